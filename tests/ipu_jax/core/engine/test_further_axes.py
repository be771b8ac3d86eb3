"""Test the staged scan on a mesh with a further axis, over which a stage splits its values: rings keep the split.

A Pipeline has a mesh of two axes; its program runs here in a `shard_map` over these two of three.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ipu_jax import Pipeline, Stage, make_mesh
from ipu_jax.core.layout import packing
from ipu_jax.core.step_args import StepArgs
from support.against_plain import (
    bubbles_hold_nan,  # noqa: F401 (a fixture)
)
from support.dense import largest_relative_error

N, D, F, M, PARTS = 8, 16, 32, 5, 4
SPECS = P(None, "tensor"), P("tensor", None)  # of the weights of a layer


def annotated(w: Any, x: Any) -> Any:
    """Return x plus an MLP whose hidden columns XLA splits over "tensor", as annotations ask it to."""
    up, down = (lax.with_sharding_constraint(leaf, spec) for leaf, spec in zip(w, SPECS, strict=True))
    return x + lax.with_sharding_constraint(jnp.tanh(x @ up) @ down, P(None, None))


def typed(w: Any, x: Any) -> Any:
    """Return the same with the split in the types of the arrays."""
    up, down = (jax.sharding.reshard(leaf, spec) for leaf, spec in zip(w, SPECS, strict=True))
    return x + jnp.einsum("nf,fd->nd", jnp.tanh(x @ up), down, out_sharding=P(None, None))


def plain(w: Any, x: Any) -> Any:
    up, down = w
    return x + jnp.tanh(x @ up) @ down


def value_and_grad_on(mesh: Mesh, layer: Any, schedule: str, weights: Any, batch: Any) -> tuple[Any, Any, str]:
    """Return loss, whole gradients and the compiled text of a pipeline of two such layers."""
    stages = [
        Stage(lambda w, x, mb: layer(w, mb["x"]), params="a", ipu=0),
        Stage(lambda w, x, mb: jnp.mean((layer(w, x) - mb["y"]) ** 2), params="b", ipu=1),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), schedule=schedule, gradient_accumulation=M)
    params = pipeline.shard(weights)
    specs = packing.specs_of(params.layout)

    def program(params: Any, batch: Any) -> Any:
        result = pipeline.placement.run_on_ipu(StepArgs(params, batch), loss_cotangent=1 / M)
        return result.loss, result.gradients

    step = jax.jit(
        jax.shard_map(
            program,
            mesh=mesh,
            axis_names={"replica", "ipu"},
            in_specs=(specs, P()),
            out_specs=(P(), specs),
            check_vma=False,
        )
    )
    placed = lambda tree, mesh: jax.device_put(
        jax.tree.map(np.asarray, tree), jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    )
    with jax.set_mesh(mesh):
        params = placed(params, mesh)
        loss, gradients = step(params, batch)
        text = step.lower(params, batch).compile().as_text()
    return loss, pipeline.unshard(placed(gradients, pipeline.mesh)), text or ""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["grouped", "1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("kind", "layer"), [(AxisType.Auto, annotated), (AxisType.Explicit, typed)], ids=["auto", "explicit"]
)
def test_a_value_that_is_split_over_a_further_axis_stays_split(kind, layer, schedule):
    devices = np.array(jax.devices()[: 2 * PARTS]).reshape(1, 2, PARTS)
    mesh = Mesh(devices, ("replica", "ipu", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto, kind))
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / 4).astype(np.float32)
    weights = {name: (normal(D, F), normal(F, D)) for name in "ab"}
    batch = {"x": normal(M, N, D), "y": normal(M, N, D)}
    loss, gradients, text = value_and_grad_on(mesh, layer, schedule, weights, batch)

    def dense(weights: Any) -> Any:
        outputs = plain(weights["b"], plain(weights["a"], batch["x"]))
        return jnp.mean((outputs - batch["y"]) ** 2)

    expected = jax.value_and_grad(dense)(weights)
    assert largest_relative_error((loss, gradients), expected) < 1e-5
    assert re.search(rf"f32\[\d+,{N},{F // PARTS}\]", text), "a ring of split values"
    assert not re.search(rf"f32\[\d+,{N},{F}\]", text), "a ring of whole values"
    if kind == AxisType.Auto:  # typed weights are whole between the stages, and so are their gradients
        assert "all-gather" not in text

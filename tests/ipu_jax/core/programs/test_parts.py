"""Test which concurrent stages keep a cotangent on the IPU that has it, and that the others get equal parts of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh, verify
from ipu_jax.pipelines import VerificationError
from sharded_ops import embedding, linear_cross_entropy, log_softmax_cross_entropy, matmul
from support.against_plain import (
    bubbles_hold_nan,  # noqa: F401 (a fixture)
)

N, D, V, M = 6, 8, 11, 3


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, dy: (jnp.clip(dy, -0.01, 0.01),))


@jax.custom_vjp
def of_all_equal(x):
    """Return the sum over the IPUs, for a use that is the same on all of them."""
    return lax.psum(x, "ipu")


of_all_equal.defvjp(lambda x: (lax.psum(x, "ipu"), None), lambda _, dy: (dy * lax.axis_size("ipu"),))


def table(w, x, mb):
    return embedding(w, mb["ids"], size=V)


def scaled_with_positions(w, x, mb):
    h = embedding(w["table"], mb["ids"], size=V) * D**0.5 + w["positions"]
    return jnp.where(mb["keep"][:, None], h / 0.9, 0)


def normalised(w, x, mb):
    h = embedding(w, mb["ids"], size=V)
    return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1)


def gathered(w, x, mb):
    return lax.all_gather(jax.nn.one_hot(mb["ids"], V) @ w, "ipu", axis=1, tiled=True)


def token_losses(w, x, mb):
    logits = matmul(mb["x"], w)
    return mb["x"] * log_softmax_cross_entropy(logits, mb["ids"], size=V)[:, None]


def fused_losses(w, x, mb):
    return mb["x"] * linear_cross_entropy(mb["x"], w, mb["ids"], size=V)[:, None]


def assuming(w, x, mb):
    return mb["x"] * of_all_equal(jnp.sin(mb["x"] @ w).sum(axis=1))[:, None]


def clipping(w, x, mb):
    return clipped(embedding(w, mb["ids"], size=V))


def own_rows(w, x, mb):
    """Use each IPU's own rows of a sum: the transpose of the last sum gets what a branch has multiplied."""
    own = (lax.axis_index("ipu") == 0) * (jax.nn.one_hot(mb["ids"], V) @ w)
    return lax.psum(own, "ipu")


ROWS, COLUMNS = P("ipu"), P(None, "ipu")
KEPT = {
    "embedding": (table, (V, D), ROWS),
    "scaled, with positions and dropout": (scaled_with_positions, {"table": (V, D), "positions": (D,)}, None),
    "a norm": (normalised, (V, D), ROWS),
    "gathered columns": (gathered, (V, D), COLUMNS),
    "one IPU's rows": (own_rows, (V, D), P()),
}
PARTS = {
    "cross-entropy per token": (token_losses, (D, V), COLUMNS),
    "fused cross-entropy per token": (fused_losses, (V, D), ROWS),
}


def pipeline_of(fn: Any, spec: Any, *, ipus: int = 2) -> Pipeline:
    specs = {"first": {"table": ROWS, "positions": P()} if spec is None else spec}
    stages = [
        Stage(fn, params="first", ipu=ALL_IPUS),
        Stage(lambda w, x, mb: jnp.tanh(x @ w), params="a", ipu=0),
        Stage(lambda w, x, mb: jnp.mean((x @ w - mb["x"]) ** 2), params="b", ipu=ipus - 1),
    ]
    return Pipeline(stages, mesh=make_mesh(1, ipus), gradient_accumulation=M, specs=specs)


def arguments(pipeline: Pipeline, shape: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    first = {name: normal(*s) for name, s in shape.items()} if isinstance(shape, dict) else normal(*shape)
    batch = {
        "ids": rng.integers(0, V, (M, N)).astype(np.int32),
        "x": normal(M, N, D),
        "keep": rng.random((M, N)) < 0.9,
    }
    return pipeline.shard({"first": first, "a": normal(D, D), "b": normal(D, D)}), batch


def broadcasts_in_backward(pipeline: Pipeline, params: Any, batch: Any) -> int:
    """Return how many cotangents a concurrent stage's B gets from another IPU."""
    plan = pipeline.placement.plan(params, batch)
    return sum(s.place is None and not p.needs_sums_only for s, p in zip(plan.segments, plan.programs, strict=True))


@pytest.mark.fast("embedding-2")
@pytest.mark.parametrize("ipus", [2, 4])
@pytest.mark.parametrize("name", [*KEPT, *PARTS])
def test_every_gradient_is_right_and_only_sums_stay_where_they_are(name, ipus):
    fn, shape, spec = {**KEPT, **PARTS}[name]
    pipeline = pipeline_of(fn, spec, ipus=ipus)
    params, batch = arguments(pipeline, shape)
    verify(pipeline, params, batch)
    assert broadcasts_in_backward(pipeline, params, batch) == (name in PARTS)


@pytest.mark.parametrize(("fn", "shape", "spec"), [(assuming, (D, 4), COLUMNS), (clipping, (V, D), ROWS)])
@pytest.mark.slow
def test_a_rule_of_the_users_own_gets_equal_parts(fn, shape, spec):
    pipeline = pipeline_of(fn, spec)
    params, batch = arguments(pipeline, shape)
    assert broadcasts_in_backward(pipeline, params, batch) == 1
    if fn is clipping:  # it clips a part
        with pytest.raises(VerificationError):
            verify(pipeline, params, batch)
    else:
        verify(pipeline, params, batch)


def test_a_cotangent_that_stays_is_sent_by_no_collective():
    fn, shape, spec = KEPT["embedding"]
    pipeline = pipeline_of(fn, spec)
    params, batch = arguments(pipeline, shape)
    lowered = jax.jit(pipeline.value_and_grad).lower(params, batch).as_text()
    ends = [part.split("}) : ")[1].splitlines()[0] for part in lowered.split("stablehlo.all_reduce")[1:]]
    # the rows that F looks up, and the sum of the cotangents in B
    assert ends.count(f"(tensor<{N}x{D}xf32>) -> tensor<{N}x{D}xf32>") == 2, ends

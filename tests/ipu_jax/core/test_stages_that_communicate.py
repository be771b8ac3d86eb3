"""Test stages that communicate over a further axis by hand, in a `jax.shard_map` of their own, against dense twins."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import Stage, make_mesh, verify
from ipu_jax.pipelines import VerificationError
from support.against_plain import bubbles_hold_nan
from support.annotated import Annotated, annotated
from support.dense import largest_relative_error

__all__ = ["bubbles_hold_nan"]

MESHES, SCHEDULES = ((1, 2, 2), (2, 2, 2), (1, 4, 2)), ("1f1b", "zb-h1", "grouped", "gpipe", "sequential")
KINDS = {"experts": False, "ring": True}  # whether they need uniform guards
CROSSINGS = [
    pytest.param(*case, id="-".join(map(str, (*case[0], *case[1:]))))
    for case in itertools.product(MESHES, SCHEDULES, KINDS)
]


def on_mesh(model: Annotated, shape=(1, 2, 2), **options):
    return model.pipeline(make_mesh(*shape[:2], tensor=shape[2]), **({"schedule": "1f1b"} | options))


def errors_of(pipeline, model: Annotated, expected) -> list[float]:
    loss, gradients = pipeline.value_and_grad(pipeline.shard(model.params), model.batch)
    return [largest_relative_error(*each) for each in zip((loss, pipeline.unshard(gradients)), expected, strict=True)]


@pytest.mark.fast("1-2-2-1f1b-experts", "1-2-2-1f1b-ring")
@pytest.mark.parametrize(("shape", "schedule", "kind"), CROSSINGS)
def test_a_step_equals_its_dense_twin_under_the_guards_that_it_needs(shape, schedule, kind):
    model = annotated(kind, shape[1], replicas=shape[0])
    pipeline = on_mesh(model, shape, schedule=schedule)
    assert max(errors_of(pipeline, model, model.twin())) < 1e-5
    assert any(pipeline.placement.guards.needed.values()) is KINDS[kind]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_experts_may_have_uniform_guards(schedule):
    model = annotated("experts", 2)
    assert max(errors_of(on_mesh(model, schedule=schedule, guards="uniform"), model, model.twin())) < 1e-5


def test_a_ring_under_own_guards_is_refused():
    model = annotated("ring", 2)
    pipeline = on_mesh(model, guards="own")
    with pytest.raises(ValueError, match=r"over axis 'tensor' \(collective-permute in .*use guards='uniform'"):
        pipeline.value_and_grad(pipeline.shard(model.params), model.batch)


@pytest.mark.slow
def test_in_bfloat16_a_ring_is_as_exact_as_on_one_device():
    model = annotated("ring", 2, dtype=jnp.bfloat16)
    wide = lambda leaf: leaf.astype(np.float32) if leaf.dtype == jnp.bfloat16 else leaf
    params, batch = jax.tree.map(wide, (model.params, model.batch))
    exact = dataclasses.replace(model, params=params, batch=batch).twin()
    of_twin = [largest_relative_error(*each) for each in zip(model.twin(), exact, strict=True)]
    assert max(errors_of(on_mesh(model), model, exact)) < 1.5 * max(of_twin) < 0.1


@pytest.mark.slow
def test_in_bfloat16_tokens_go_to_the_experts_of_one_device():
    model = annotated("experts", 2, dtype=jnp.bfloat16)
    pipeline = on_mesh(model)
    assert verify(pipeline, pipeline.shard(model.params), model.batch).worst[1] < 1e-3


def summed(times: int, *, check_vma: bool) -> Annotated:
    """Return Megatron's MLPs by hand, whose results on the devices are added up `times` times; once is right."""

    def of_device(w, x):
        y = jnp.tanh((x * w["scale"]) @ w["up"]) @ w["down"]
        for _ in range(times):
            y = lax.psum(y, "tensor")
        return x + y

    def block(w, x):  # jax.shard_map keeps the mesh of its first call, and verify calls stages on another one, too
        over = {"axis_names": {"tensor"}, "in_specs": (model.specs["block0"], P()), "out_specs": P()}
        return jax.shard_map(of_device, **over, check_vma=check_vma)(w, x)

    model = annotated("mlp", 2)
    stages = (Stage(lambda w, x, mb: block(w, mb["x"]), "block0", 0), Stage(lambda w, x, mb: block(w, x), "block1", 1))
    return dataclasses.replace(model, stages=(*stages, model.stages[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_verify_accepts_a_psum_that_is_there_once(check_vma):
    model = summed(1, check_vma=check_vma)
    pipeline = on_mesh(model)
    assert verify(pipeline, pipeline.shard(model.params), model.batch).worst[1] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("times", "check_vma"), [(0, False), (2, True), (2, False)])
def test_verify_finds_a_psum_that_is_forgotten_or_there_twice(times, check_vma):
    model = summed(times, check_vma=check_vma)
    pipeline = on_mesh(model)
    with pytest.raises(VerificationError, match="block"):
        verify(pipeline, pipeline.shard(model.params), model.batch)


def test_jax_refuses_a_psum_that_is_forgotten():
    model = summed(0, check_vma=True)
    pipeline = on_mesh(model)
    with pytest.raises(ValueError, match="tensor"):
        verify(pipeline, pipeline.shard(model.params), model.batch)

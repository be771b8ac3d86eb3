"""Test that a call keeps the batch it was given: loaders refill one NumPy buffer while devices still compute."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.steps import replicate
from support.inputs import normal

M, D = 3, 4
REFILLED = threading.Event()


def wait(x):
    """Return 1 when the buffer has been refilled; a call that computes before it returns does not wait for long."""
    REFILLED.wait(0.5)
    return np.ones((), np.float32)


def late(x):
    return x * jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x)


def loss(w, mb):
    return jnp.mean((jnp.tanh(late(mb["x"]) @ w["a"]) @ w["b"] - mb["y"]) ** 2)


WEIGHTS = {"a": normal((D, D)), "b": normal((D, D), seed=1)}
STAGES = [
    Stage(lambda w, _, mb: jnp.tanh(late(mb["x"]) @ w), "a", 0),
    Stage(lambda w, x, mb: jnp.mean((x @ w - mb["y"]) ** 2), "b", 1, predict=lambda w, x, mb: x @ w),
]
PIPELINE = Pipeline(STAGES, gradient_accumulation=M)
CUT = Pipeline.from_function(
    loss, WEIGHTS, {"x": np.ones((2, D), np.float32), "y": np.ones((2, D), np.float32)}, ipus=2, gradient_accumulation=M
)
REPLICAS = replicate(loss, replication_factor=2, gradient_accumulation=M)
TWICE = lambda batch: jax.tree.map(lambda leaf: np.broadcast_to(leaf, (2, *leaf.shape)), batch)


def step_of(model):
    return make_train_step(model, optax.sgd(0.1), TrainOptions(gradient_accumulation=M, on_nonfinite="skip"))


def updated(model):
    step = step_of(model)
    return lambda batch: step(step.init(WEIGHTS), batch)[0].params


def evaluated(model):
    step = step_of(model)
    return lambda batch: step.loss(step.init(WEIGHTS), batch)


CALLS = {
    "step of a pipeline": updated(PIPELINE),
    "step of a cut function": updated(CUT),
    "step of replicas": lambda batch: updated(REPLICAS)(TWICE(batch)),
    "step.loss": evaluated(PIPELINE),
    "step.loss of replicas": lambda batch: evaluated(REPLICAS)(TWICE(batch)),
    "value_and_grad": lambda batch: PIPELINE.value_and_grad(PIPELINE.shard(WEIGHTS), batch),
    "loss": lambda batch: CUT.loss(CUT.shard(WEIGHTS), batch),
    "jax.grad of loss": lambda batch: jax.grad(PIPELINE.loss)(PIPELINE.shard(WEIGHTS), batch),
    "predict": lambda batch: PIPELINE.predict(PIPELINE.shard(WEIGHTS), batch),
    "value_and_grad of replicas": lambda batch: REPLICAS.value_and_grad(REPLICAS.shard(WEIGHTS), TWICE(batch)),
    "loss of replicas": lambda batch: REPLICAS.loss(REPLICAS.shard(WEIGHTS), TWICE(batch)),
}


def aligned(array):
    """Return a copy whose memory jax can share."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.fast("step of a pipeline", "step.loss of replicas")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_keeps_a_batch_that_is_refilled_after_it(call):
    batch = {"x": np.asarray(normal((M, 2, D), seed=2)), "y": np.asarray(normal((M, 2, D), seed=3))}
    REFILLED.set()
    expected = jax.tree.map(np.asarray, CALLS[call](batch))
    REFILLED.clear()
    buffer = jax.tree.map(aligned, batch)
    found = CALLS[call](buffer)
    for leaf in buffer.values():
        leaf[...] = 1e3
    REFILLED.set()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found), expected)


def test_weights_can_be_refilled_once_they_are_placed():
    on_all = [Stage(lambda w, x, mb: jnp.float32(0), name, ALL_IPUS) for name in "ab"]
    concurrent = Pipeline(on_all, mesh=make_mesh(1, 2), specs={"a": PartitionSpec("ipu"), "b": PartitionSpec()})
    for place in (PIPELINE, CUT, REPLICAS, concurrent):
        weights = jax.tree.map(lambda leaf: aligned(np.asarray(leaf)), WEIGHTS)
        placed = place.shard(weights)
        for leaf in weights.values():
            leaf[...] = 1e3
        jax.tree.map(np.testing.assert_array_equal, place.unshard(placed), WEIGHTS)

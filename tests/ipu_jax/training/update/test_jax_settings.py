"""Test that training works, and returns the same bits, under the settings of jax that find mistakes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale
from ipu_jax.steps import replicate
from support.trained import quick_compiles

M, K, REPLICAS = 2, 2, 2
RNG = np.random.default_rng(4)


def drawn(*shape):
    return RNG.normal(size=shape).astype(np.float32)


PARAMS = {"first": {"w": drawn(5, 3), "b": drawn(3)}, "last": {"w": drawn(3, 2), "b": drawn(2)}}
STATE = {"mean": np.zeros(5, np.float32)}
BATCH = {"x": drawn(K, REPLICAS, M, 6, 5), "y": drawn(K, REPLICAS, M, 6, 2), "n": np.ones((K, REPLICAS, M, 6), "f4")}
OPTIONS = TrainOptions(
    weighted=True,
    device_iterations=K,
    outputs="sum",
    max_gradient_norm=0.5,
    loss_scale=DynamicScale(),
    precision="16.16",
    stochastic_rounding=True,
    shard_optimizer=True,
    norms=True,
    ema_decay=0.9,
    on_nonfinite="skip",
)


def hidden(p, mb):
    return jnp.tanh(mb["x"] @ p["w"] + p["b"][None])


def loss_fn(p, x, mb):
    return jnp.sum(((x @ p["w"] + p["b"][None] - mb["y"]) ** 2).sum(-1) * mb["n"]), mb["n"].sum()


def step_of(kind):
    if kind == "function":
        fn = lambda p, mb, key: loss_fn(p["last"], hidden(p["first"], mb), mb)
        model = replicate(fn, replication_factor=REPLICAS, gradient_accumulation=M, random=True)
    else:

        def first(p, x, mb, *, state, key):
            return Outputs(hidden(p, mb), state=0.9 * state + 0.1 * mb["x"].mean(0))

        stages = [Stage(first, params="first", state="mean", random=True, ipu=0), Stage(loss_fn, params="last", ipu=1)]
        model = Pipeline(stages, mesh=make_mesh(REPLICAS, 2), gradient_accumulation=M)
    return make_train_step(model, optax.adamw(0.1), OPTIONS)


def trained(kind, key):
    step = step_of(kind)
    state = step.init(PARAMS, stages=STATE if kind == "pipeline" else None, key=key)
    # a call with NumPy arrays would be an implicit transfer
    batch = jax.device_put(BATCH, NamedSharding(step.mesh, PartitionSpec(None, "replica")))
    for _ in range(2):
        state, _ = step(state, batch)
    step.check(state)
    state = step.restore(step.whole(state))
    assert step.find_nonfinite(state, jax.tree.map(lambda leaf: leaf[0], BATCH)) is None
    losses = [step.loss(state, BATCH, key=key, ema=ema)[0] for ema in (False, True)]
    params = step.model.unshard(step.model.shard(PARAMS))
    return jax.device_get({name: leaf for name, leaf in step.whole(state).items() if name != "key"}), losses, params


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "pipeline"])
def test_settings_that_find_mistakes_find_none(kind):
    with quick_compiles():
        key = jax.random.key(3)
        expected = trained(kind, key)
        with jax.numpy_rank_promotion("raise"), jax.debug_nans(True), jax.transfer_guard("disallow"):
            jax.tree.map(np.testing.assert_array_equal, trained(kind, key), expected)

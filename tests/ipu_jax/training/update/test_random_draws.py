"""Test that whatever a training step draws is distinct, but the same wherever the same weights are held.

The weights are 1 in bfloat16 and their updates a half of the distance to the next number, so that stochastic rounding
tosses a coin for each: the new weights show the noise.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.steps import replicate

LENGTH = 64  # numbers that are compared at once: 64 coins agree by chance once in 2**64 times
UP = 2.0**-7  # the distance from 1 to the next bfloat16 number
SIZE = 4 * LENGTH


def ones(*names: str) -> dict[str, Any]:
    return {name: jnp.ones(SIZE, jnp.bfloat16) for name in names}


def total(p: Any) -> Any:
    return -sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(p))


def first(p, x, mb):
    return mb.sum() + total(p)


def then(p, x, mb):
    return x + total(p)


def over_ipus(p, x, mb):
    return x + total(p["whole"]) + jax.lax.psum(total(p["split"]), "ipu")


def pipeline(replicas: int) -> Pipeline:
    """Return two stages on IPU 0, that run merged, one on IPU 1, and a concurrent one."""
    stages = [
        Stage(first, params="a", ipu=0),
        Stage(then, params="b", ipu=0),
        Stage(then, params="c", ipu=1),
        Stage(over_ipus, params="d", ipu=ALL_IPUS),
    ]
    specs = {"d": {"whole": PartitionSpec(), "split": PartitionSpec("ipu")}}
    return Pipeline(stages, mesh=make_mesh(replicas, 2), specs=specs)


WEIGHTS = {"a": ones("v", "w"), "b": ones("w"), "c": ones("v", "w"), "d": ones("whole", "split")}


def function(replicas: int) -> Any:
    return replicate(lambda p, mb: total(p) + mb.sum(), replication_factor=replicas)


@pytest.mark.fast("pipeline-2-True")
@pytest.mark.parametrize(
    ("model", "replicas", "shard_optimizer"),
    [(pipeline, 2, True), (function, 2, True), (pipeline, 1, False), (pipeline, 2, False), (function, 2, False)],
)
def test_rounding_tosses_a_coin_of_its_own_for_each_weight_of_each_update(model, replicas, shard_optimizer):
    """Leaves, IPUs, shards, the replicas' chunks and updates have coins of their own; copies of a weight have one."""
    options = TrainOptions(precision="16.16", stochastic_rounding=True, shard_optimizer=shard_optimizer)
    step = make_train_step(model(replicas), optax.sgd(UP / 2), options)
    start = step.whole(step.init(WEIGHTS, key=jax.random.key(3)))
    batch, coins = np.zeros((1, 1) if replicas == 1 else (replicas, 1, 1), np.float32), []
    for number in (0, 1):
        state, _ = step(step.restore(start | {"step": number}), batch)
        for array in jax.tree.leaves(state.params):
            for one, other in itertools.combinations(array.addressable_shards, 2):
                if one.index == other.index:
                    np.testing.assert_array_equal(one.data, other.data)
        coins += [(np.asarray(w, np.float32) - 1) / UP for w in jax.tree.leaves(step.whole(state)["params"])]
    pieces = np.concatenate(coins).reshape(-1, LENGTH)
    assert set(np.unique(pieces)) == {0, 1}
    assert len(np.unique(pieces, axis=0)) == len(pieces)


def test_the_model_draws_other_numbers_in_each_update_replica_microbatch_and_merged_stage():
    """docs/training.md: fold_in(fold_in(fold_in(fold_in(key, update), replica), micro-batch), stage)."""
    updates, replicas, m = 2, 2, 2

    def draw(p, x, mb, *, key):
        data = jax.random.key_data(key)
        return Outputs(mb.sum() * p if x is None else x * p, aux=data)

    places = (0, 0, 1, 1)
    stages = [Stage(draw, params=f"s{i}", ipu=place, random=True) for i, place in enumerate(places)]
    model = Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=m)
    options = TrainOptions(device_iterations=updates, outputs="all", precision="16.16", stochastic_rounding=True)
    step = make_train_step(model, optax.sgd(0.1), options)
    key = jax.random.key(11)
    state = step.init({f"s{i}": np.float32(1) for i in range(len(places))}, key=key)
    _, outputs = step(state, np.zeros((updates, replicas, m, 1), np.float32))
    found = np.stack([np.asarray(outputs.aux[f"s{i}"]) for i in range(len(places))], axis=3)
    assert found.shape == (updates, replicas, m, len(places), 2)
    for numbers in itertools.product(*map(range, found.shape[:-1])):
        expected = jax.random.key_data(functools.reduce(jax.random.fold_in, numbers, key))
        np.testing.assert_array_equal(found[numbers], expected)
    assert len(np.unique(found.reshape(-1, 2), axis=0)) == updates * replicas * m * len(places)

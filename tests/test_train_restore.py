"""A training step goes on from what was saved, on other IPUs and replicas as well, as if it had never stopped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense import largest_relative_error

from ipu_jax import DynamicScale, TrainOptions, make_train_step

FEATURES, ROWS, UPDATES = 5, 8, 2


def loss_fn(params, rows):
    return jnp.mean((jnp.tanh(rows @ params["w"]) @ params["v"] + params["b"]) ** 2)


def weights():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(FEATURES, 3)), "v": rng.normal(size=3), "b": rng.normal(size=())}


def step_of(replicas, optimizer, **options):
    options = TrainOptions(replication_factor=replicas, device_iterations=UPDATES, **options)
    return make_train_step(loss_fn, optimizer, options)


def batch_for(replicas, seed):
    """(updates, [replicas,] 1 micro-batch, rows of a replica, features): the same rows for any number of replicas."""
    rows = np.random.default_rng(seed).normal(size=(UPDATES, replicas, 1, ROWS // replicas, FEATURES))
    return jnp.asarray(rows if replicas > 1 else rows[:, 0], jnp.float32)


@pytest.mark.parametrize(("before", "after"), [((2, True), (1, False)), ((1, False), (4, True))])
def test_training_goes_on_where_it_stopped(before, after):
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights())
    optimizer = optax.adam(0.05)
    first = step_of(before[0], optimizer, shard_optimizer=before[1], loss_scale=DynamicScale())
    second = step_of(after[0], optimizer, shard_optimizer=after[1], loss_scale=DynamicScale())

    state, _ = first(first.init(params), batch_for(before[0], 1))
    saved = jax.tree.map(np.asarray, first.whole(state))
    restored, _ = second(second.restore(saved), batch_for(after[0], 2))
    found = second.whole(restored)

    alone = step_of(after[0], optimizer, shard_optimizer=after[1], loss_scale=DynamicScale())
    state, _ = alone(alone.init(params), batch_for(after[0], 1))
    state, _ = alone(state, batch_for(after[0], 2))
    expected = alone.whole(state)
    assert largest_relative_error(found, expected) <= 1e-6
    assert found["step"] == 2 * UPDATES
    assert largest_relative_error(found["params"], saved["params"]) > 1e-3  # it did go on


def test_what_cannot_be_restored_is_refused():
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights())
    step = step_of(1, optax.sgd(0.1, momentum=0.9))
    saved = step.whole(step.init(params))
    with pytest.raises(ValueError, match=r"^the saved state has no \['step'\]: give what step\.whole\(state\) gave$"):
        step.restore({name: part for name, part in saved.items() if name != "step"})
    with pytest.raises(ValueError, match=r"^the saved optimizer state has leaves \["):
        step_of(1, optax.adam(0.1)).restore(saved)
    with pytest.raises(ValueError, match=r"differ in whether they scale the loss by a DynamicScale$"):
        step_of(1, optax.sgd(0.1, momentum=0.9), loss_scale=DynamicScale()).restore(saved)

"""Test that a training run that is stopped and resumed is the one that was not, also on other IPUs."""

import dataclasses
import functools
import pickle
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Checkpoints
from ipu_jax.training.checkpoints._description import stored
from support import across, earlier, resumed
from support.resumed import TOPOLOGIES, differing
from support.trained import compiled_quickly, quick_compiles

_compiled_quickly = compiled_quickly()


@functools.cache
def basic_step() -> Any:
    return resumed.step_for(TOPOLOGIES["basic"])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return a folder with checkpoints of steps 4 and 8, the losses up to step 12, and the states at 8 and 12."""
    folder = tmp_path_factory.mktemp("stopped")
    with quick_compiles():
        step = basic_step()
        with Checkpoints(folder, step, every=4) as checkpoints:
            state = resumed.first_state(step)
            assert checkpoints.restore(state) is None
            state, losses, position = resumed.train(step, state, 4, checkpoints=checkpoints, extra={"rate": 0.02})
        at_8 = resumed.plain(step, state)
        state, more, _ = resumed.train(step, state, 2, position=position)
    return folder, losses + more, at_8, resumed.plain(step, state)


def restored(folder: Any, step: Any) -> Any:
    with Checkpoints(folder, step) as checkpoints:
        return checkpoints.restore(resumed.first_state(step), resume="must")


def test_a_training_that_was_stopped_is_the_one_that_was_not(stopped):
    """With state of stages, dropout, a dynamic loss scale, an average, two updates per call and shuffled data."""
    folder, losses, at_8, at_12 = stopped
    step = basic_step()
    found = restored(folder, step)
    assert (found.step, found.topology, found.extra) == (8, "same", {"rate": 0.02})
    assert found.path == folder / "step-8"
    assert not differing(resumed.plain(step, found.state), at_8)
    state, more, _ = resumed.train(step, found.state, 2, position=found.feed)
    assert more == losses[4:]
    assert not differing(resumed.plain(step, state), at_12)


def with_other_values(state: Any) -> Any:
    """Return a state in which no leaf has the value that a new state has, and no two elements are alike."""
    leaves, treedef = jax.tree.flatten(state)

    def other(number: int, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(100 + number), leaf.sharding)
        values = 100 * number + np.arange(1, leaf.size + 1).reshape(leaf.shape)
        return jax.device_put(jnp.asarray(values, leaf.dtype), leaf.sharding)

    drawn = jax.tree.unflatten(treedef, [other(number, leaf) for number, leaf in enumerate(leaves)])
    return dataclasses.replace(drawn, nonfinite=jax.device_put(jnp.int32(1), state.nonfinite.sharding))


@pytest.mark.fast("concurrent-concurrent", "two replicas-concurrent, four IPUs")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("concurrent", "concurrent"),
        ("concurrent", "other schedule"),
        ("two replicas", "two replicas"),
        ("basic", "two replicas"),
        ("two replicas", "concurrent, four IPUs"),
    ],
)
def test_no_leaf_of_a_state_is_lost(tmp_path, before, after):
    """Save weights, optimizer, stages' state, both numbers of the scale, step, key and average, all unlike new ones."""
    one, other = (resumed.step_for(TOPOLOGIES[name], on_nonfinite="skip", max_skips=3) for name in (before, after))
    new = resumed.first_state(one)
    state = with_other_values(new)
    unchanged = [name for name, value in named(new).items() if np.array_equal(value, named(state)[name])]
    assert not unchanged
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(state, now=True)
    found = restored(tmp_path, other).state
    assert not differing(resumed.plain(other, found), resumed.plain(one, state))
    whole = one.whole(state)
    pickled = pickle.loads(pickle.dumps({name: value for name, value in whole.items() if name != "key"}))
    unpickled = other.restore(pickled | {"key": whole["key"]})
    assert not differing(resumed.plain(other, unpickled), resumed.plain(one, state))
    assert int(found.nonfinite) == 0  # the one leaf that is not saved
    if before == after:
        assert differing(named(found), named(state)) == [".nonfinite"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("concurrent, four IPUs", "basic"),
        ("basic", "concurrent, four IPUs"),
        ("concurrent, four IPUs", "concurrent"),
        ("one IPU", "stages elsewhere"),
    ],
)
def test_each_number_of_another_topology_is_read_once(tmp_path, before, after):
    """Without the padding of leaves that share an array, whichever devices ask for a number."""
    one, other = (resumed.step_for(TOPOLOGIES[name]) for name in (before, after))
    state = resumed.first_state(one)
    with Checkpoints(tmp_path, one) as checkpoints:
        checkpoints.save(state, now=True)
    with resumed.counted_reads() as counts:
        found = restored(tmp_path, other)
    assert found.topology == "other"
    whole = one.whole(state)
    held = [jnp.asarray(stored(leaf)) for leaf in jax.tree.leaves(whole)]
    assert sum(counts) == sum(leaf.nbytes for leaf in held)


def named(state: Any) -> Any:
    """Return all arrays of a state as they lie on the IPUs, by name."""
    return across.named("", state)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name not in ("basic", "two replicas")])
def test_a_training_goes_on_on_other_ipus(stopped, name):
    folder, losses, at_8, _ = stopped
    step = resumed.step_for(TOPOLOGIES[name])
    found = restored(folder, step)
    assert found.topology == ("same" if name == "other schedule" else "other")
    assert not differing(resumed.plain(step, found.state), at_8)
    _, more, _ = resumed.train(step, found.state, 2, position=found.feed)
    np.testing.assert_allclose(more, losses[4:], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard_optimizer", "options"),
    [
        (True, {}),
        (False, {"precision": "16.16", "stochastic_rounding": True}),
        (False, {"precision": "16.32", "ema_decay": None}),
    ],
)
def test_a_training_is_resumed_under_other_options(tmp_path, shard_optimizer, options):
    topology = dataclasses.replace(TOPOLOGIES["two replicas"], shard_optimizer=shard_optimizer)
    step, again = (resumed.step_for(topology, **options) for _ in range(2))
    state, _, position = resumed.train(step, resumed.first_state(step), 2)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, position, now=True)
    state, losses, _ = resumed.train(step, state, 2, position=position)
    found = restored(tmp_path, again)
    after, more, _ = resumed.train(again, found.state, 2, position=found.feed)
    assert (found.topology, more) == ("same", losses)
    assert not differing(resumed.plain(again, after), resumed.plain(step, state))


# states that an earlier commit saved


@pytest.fixture(scope="module")
def saved_before(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    zipfile.ZipFile(earlier.SAVED).extractall(folder)
    return folder


@pytest.mark.parametrize(("ipus", "topology"), [(2, "same"), (3, "other"), (1, "other")])
@pytest.mark.parametrize("name", earlier.STEPS)
def test_a_state_from_before_is_restored(saved_before, name, ipus, topology):
    """The layout of arrays and their names in files are as then."""
    with quick_compiles():
        step = earlier.STEPS[name](ipus)
        expected = earlier.saved_state(name, step)
        with Checkpoints(saved_before / name, step) as checkpoints:
            found = checkpoints.restore(earlier.first_state(name, step), resume="must")
        assert found is not None
        assert found.topology == topology
        assert resumed.differing(resumed.plain(step, found.state), resumed.plain(step, expected)) == []

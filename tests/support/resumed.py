"""Train a small model with everything that a checkpoint can hold, on any topology, in any number of processes.

The model has three stages: a layer with dropout and a running mean, like batch norm's; a layer; and a head over 7
columns with a sum of each column, on one IPU or split unevenly over all IPUs. The data are shuffled.
"""

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Checkpoints, Feed, Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.distributed.errors import InstancesMissingError
from ipu_jax.io import CheckpointError
from ipu_jax.options import DynamicScale
from ipu_jax.training.checkpoints._description import stored
from ipu_jax.training.checkpoints._store import Store
from support import across
from support.programs import Results

COLUMNS, EXAMPLES, PER_UPDATE = 7, 64, 8


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where a training run takes place: the places of its stages (None: all IPUs), IPUs, replicas and schedule."""

    places: tuple[int | None, int | None, int | None] = (0, 1, 1)
    ipus: int = 2
    replicas: int = 1
    schedule: str = "grouped"
    shard_optimizer: bool = False


TOPOLOGIES = {
    "basic": Topology(),
    "one IPU": Topology((0, 0, 0), ipus=1),
    "concurrent": Topology((0, 1, None)),
    "other schedule": Topology(schedule="1f1b"),
    "stages elsewhere": Topology((1, 0, 1), ipus=3),
    "two replicas": Topology(replicas=2, shard_optimizer=True),
    "concurrent, four IPUs": Topology((3, 1, None), ipus=4),
}

EVERYTHING: dict[str, Any] = {"loss_scale": DynamicScale(initial=16.0, growth_interval=2), "ema_decay": 0.75}


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda n: rng.normal(size=(EXAMPLES, n)).astype(np.float32)
    return {"x": draw(5), "y": draw(COLUMNS)}


def weights() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(scale=0.5, size=shape).astype(np.float32)
    params = {"first": {"w": draw(5, 6)}, "middle": {"w": draw(6, 4), "b": draw(4)}, "head": {"w": draw(4, COLUMNS)}}
    return params, {"mean": np.zeros(6, np.float32), "sums": np.zeros(COLUMNS, np.float32)}


def _first(p: Any, x: Any, mb: Any, *, state: Any, key: Any) -> Any:
    hidden = jnp.tanh(mb["x"] @ p["w"])
    kept = hidden if key is None else hidden * jax.random.bernoulli(key, 0.9, hidden.shape) / 0.9
    return Outputs(kept - state, state=0.9 * state + 0.1 * lax.stop_gradient(hidden.mean(0)))


def _first_without_dropout(p: Any, x: Any, mb: Any, *, state: Any, key: Any = None) -> Any:
    return _first(p, x, mb, state=state, key=None)


def _middle(p: Any, x: Any, mb: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"])


def _head(p: Any, x: Any, mb: Any, *, state: Any) -> Any:
    outputs = x @ p["w"]
    return Outputs(jnp.mean((outputs - mb["y"]) ** 2), state=state + lax.stop_gradient(jnp.abs(outputs).sum(0)))


def _split_head(p: Any, x: Any, mb: Any, *, state: Any) -> Any:
    own = x @ p["w"]
    outputs = lax.all_gather(own, "ipu", axis=1, tiled=True)[:, :COLUMNS]
    return Outputs(jnp.mean((outputs - mb["y"]) ** 2), state=state + lax.stop_gradient(jnp.abs(own).sum(0)))


def step_for(topology: Topology, *, device_iterations: int = 2, dropout: bool = True, **options: Any) -> Any:
    """Return a training step; without dropout the first stage takes no key."""
    at = [ALL_IPUS if place is None else place for place in topology.places]
    split = topology.places[2] is None
    pipeline = Pipeline(
        [
            Stage(_first, params="first", state="mean", ipu=at[0], random=True, evaluate=_first_without_dropout)
            if dropout
            else Stage(_first_without_dropout, params="first", state="mean", ipu=at[0]),
            Stage(_middle, params="middle", ipu=at[1]),
            Stage(_split_head if split else _head, params="head", state="sums", ipu=at[2]),
        ],
        mesh=make_mesh(topology.replicas, topology.ipus),
        specs={"head": {"w": PartitionSpec(None, "ipu")}} if split else None,
        state_specs={"sums": PartitionSpec("ipu")} if split else None,
        gradient_accumulation=2,
        schedule=topology.schedule,
    )
    chosen = TrainOptions(
        device_iterations=device_iterations, shard_optimizer=topology.shard_optimizer, **(EVERYTHING | options)
    )
    return make_train_step(pipeline, optax.chain(optax.trace(0.9), optax.adam(0.02)), chosen)


def first_state(step: Any) -> Any:
    params, stages = weights()
    return step.init(params, stages=stages, key=jax.random.key(3) if step.random else None)


def feed_for(step: Any, state: Any = None) -> Feed:
    return Feed(
        data(),
        mesh=step.model.mesh,
        micro_batch=PER_UPDATE // 2 // step.model.replicas,
        gradient_accumulation=2,
        device_iterations=step.options.device_iterations,
        seed=5,
        state=state,
        prefetch=0,
    )


def train(step: Any, state: Any, calls: int, *, position: Any = None, checkpoints: Any = None, **save: Any) -> Any:
    """Return the state after some calls, the losses, and the data position; save after each call."""
    losses = []
    with feed_for(step, position) as feed:
        for _ in range(calls):
            state, outputs = step(state, next(feed))
            losses.append(float(outputs.loss))
            if checkpoints is not None:
                checkpoints.save(state, feed, **save)
        return state, losses, feed.state()


def plain(step: Any, state: Any) -> Results:
    """Return a whole state as arrays by name."""
    return across.named("", step.whole(state))


def differing(found: Results, expected: Results, begin: str = "") -> list[str]:
    """Return the names of the leaves of a state that differ in any bit, where other results may stand beside both."""
    leaves = lambda results, begin: {name for name in results if name.startswith((f"{begin}[", f"{begin}."))}
    names = leaves(expected, "")
    assert names
    assert leaves(found, begin) == {f"{begin}{name}" for name in names}
    same = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b)
    return sorted(name for name in names if not same(found[f"{begin}{name}"], expected[name]))


def as_if_trained(step: Any, state: Any) -> Any:
    """Return a state after 4 updates with random numbers, without compiling anything."""
    rng = np.random.default_rng(4)

    def drawn(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(rng.uniform(0.5, 1, leaf.shape), leaf.dtype)

    return step.restore(jax.tree.map(drawn, step.whole(state)) | {"step": 4})


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Yield a list that gets the bytes of each part that is read out of the arrays of a checkpoint."""
    store, counts = cast(Any, Store), list[int]()
    opened = store.opened

    class Counted:
        def __init__(self, array: Any):
            self._array, self.shape = array, array.shape

        def __getitem__(self, index: Any) -> np.ndarray:
            part = np.asarray(self._array[index])
            counts.append(part.nbytes)
            return part

    store.opened = lambda *args: {name: Counted(array) for name, array in opened(*args).items()}
    try:
        yield counts
    finally:
        store.opened = opened


# in several processes


def saved_by_processes(folder: str, topology: str, calls: int, every: int = 4) -> Results:
    """Train and save, or for 0 calls save a random state; return losses, the state and the last checkpoint."""
    step = step_for(TOPOLOGIES[topology])
    state = first_state(step)
    with Checkpoints(folder, step, every=every, timeout=60) as checkpoints:
        assert checkpoints.restore(state) is None
        if calls == 0:
            state = as_if_trained(step, state)
            checkpoints.save(state, now=True)
        state, losses, _ = train(step, state, calls, checkpoints=checkpoints)
    last = np.array(-1 if checkpoints.last is None else checkpoints.last)
    return {"losses": np.array(losses), "last": last, **plain(step, state)}


def restored_by_processes(folder: str, topology: str, calls: int) -> Results:
    """Restore and continue the training; return the restored state, the losses and the last state."""
    step = step_for(TOPOLOGIES[topology])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Checkpoints(folder, step, timeout=60) as checkpoints:
            found = checkpoints.restore(first_state(step), resume="must")
    assert found is not None
    before = plain(step, found.state)
    state, losses, _ = train(step, found.state, calls, position=found.feed)
    return {
        "losses": np.array(losses),
        "step": np.array(found.step),
        "topology": np.array(found.topology),
        "warned": np.array([str(each.message) for each in seen if "checkpoint" in str(each.category).lower()]),
        **{f"restored{name}": value for name, value in before.items()},
        **plain(step, state),
    }


def bytes_read_by_processes(folder: str, topology: str) -> Results:
    """Restore; return the bytes that this process reads of arrays, and the bytes of the state that its devices hold."""
    step = step_for(TOPOLOGIES[topology])
    like = first_state(step)
    with Checkpoints(folder, step, timeout=60) as checkpoints, counted_reads() as counts:
        assert checkpoints.restore(like, resume="must") is not None
    shards = [{f"{shard.index}": shard.data for shard in leaf.addressable_shards} for leaf in jax.tree.leaves(like)]
    held = sum(data.size * data.dtype.itemsize for of_leaf in shards for data in map(stored, of_leaf.values()))
    return {"read": np.array(sum(counts)), "held": np.array(held)}


def locked_while_another_reads(folder: str) -> Results:
    """Restore a checkpoint that has its name only from the lock on, slowly on instance 1; return the restored state."""
    step, store = step_for(TOPOLOGIES["basic"]), cast(Any, Store)
    read = store.read
    store.read = lambda *args: (time.sleep(2.0 * jax.process_index()), read(*args))[1]
    with Checkpoints(folder, step, timeout=60) as checkpoints:
        found = checkpoints.restore(first_state(step), resume="must")
        checkpoints.lock()
    assert found is not None
    return {"files": np.array(sorted(os.listdir(folder))), **plain(step, found.state)}


def two_trainings(folder: str) -> Results:
    """Return the errors of a second run in a folder, and the files in the folder afterwards."""
    step = step_for(TOPOLOGIES["basic"])
    state, errors = first_state(step), []
    with Checkpoints(folder, step, timeout=60) as first, Checkpoints(folder, step, timeout=60) as second:
        first.save(state, now=True)
        first.wait()
        for use in (second.lock, lambda: second.save(state, now=True)):
            try:
                use()
            except CheckpointError as error:
                errors.append(f"{error.errno} {error}")
    return {"errors": np.array(errors), "files": np.array(sorted(os.listdir(folder)))}


def one_does_not_save(folder: str) -> Results:
    """Return the error of instance 0, which is the only one that saves, and the seconds until the error."""
    step = step_for(TOPOLOGIES["basic"])
    state, begin = first_state(step), time.monotonic()
    checkpoints = Checkpoints(folder, step, timeout=3)
    error = ""
    if jax.process_index() == 0:
        try:
            checkpoints.save(state, now=True)
        except InstancesMissingError as raised:
            error = str(raised)
    return {"error": np.array(error), "seconds": np.array(time.monotonic() - begin)}

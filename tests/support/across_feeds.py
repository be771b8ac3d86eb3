"""Feed rows to all devices, of one process or of several, and return which rows each process reads."""

import json
from typing import Any

import jax
import numpy as np
import optax

from ipu_jax import Feed, Pipeline, TrainOptions, configure, make_mesh, make_train_step
from support.across import MICRO_BATCHES, model_of, named, refusal, trained
from support.programs import Results


def fed(replicas: int, ipus: int, each: list[dict[str, Any]]) -> Results:
    """Return, for each feed, the rows on this process's IPUs by batch and replica, and its state at the end.

    Each dict in `each` contains options of a `Feed`, the number of "examples", whether they are a "stream", and after
    how many "batches" to stop.
    """
    mesh, found = make_mesh(replicas, ipus), {}
    rows_of_device = {device: row for row, devices in enumerate(mesh.devices) for device in devices}
    for number, given in enumerate(each):
        options = {"remainder": "pad", "fill": -1, "prefetch": 0, "epochs": 1} | given
        stream, batches = options.pop("stream", False), options.pop("batches", None)
        numbers, reads = np.arange(options.pop("examples", 37)), [np.zeros(0, int)]
        source: Any = _Loader(numbers) if stream else _Numbers(numbers, reads)
        options |= {"items": "batches"} if stream else {}
        with Feed(source, mesh=mesh, micro_batch=2, gradient_accumulation=2, **options) as feed:
            for at, batch in enumerate(feed):
                for shard in batch.data["n"].addressable_shards:
                    row, values = rows_of_device[shard.device], np.asarray(shard.data).reshape(-1)
                    # the IPUs of a replica have the same rows
                    same = found.setdefault(f"{number} batch {at} replica {row}", values)
                    np.testing.assert_array_equal(values, same)
                found[f"{number} batch {at} counts"] = np.array([batch.examples, batch.updates])
                found[f"{number} batch {at} is real"] = batch.is_real
                if at + 1 == batches:
                    break
            found[f"{number} state"] = np.array(json.dumps(feed.state()))
        found[f"{number} reads"] = np.unique(np.concatenate(reads))
    return found


class _Numbers:
    """Records which examples are read."""

    def __init__(self, numbers: np.ndarray, reads: list[np.ndarray]):
        self._numbers, self._reads = numbers, reads

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, indices: np.ndarray) -> Any:
        self._reads.append(np.asarray(indices))
        return {"n": self._numbers[indices]}


class _Loader:
    def __init__(self, numbers: np.ndarray):
        self._numbers = numbers

    def __iter__(self) -> Any:
        return iter([{"n": self._numbers[first : first + 5]} for first in range(0, len(self._numbers), 5)])


def feed_trains(replicas: int, ipus: int) -> Results:
    """Return a pipeline's weights after an epoch of a feed, two updates per call, the last call cut short."""
    model = model_of(replicas, ipus)
    rng = np.random.default_rng(3)
    examples = MICRO_BATCHES * replicas * 3 * 5
    source: dict[str, np.ndarray] = {
        name: rng.integers(10, size=examples).astype(np.int32) for name in ("ids", "labels")
    }
    source["x"] = rng.normal(size=(examples, 6)).astype(np.float32)
    step = make_train_step(model.pipeline(ipus), optax.sgd(0.1), TrainOptions(device_iterations=2))
    state = step.init(model.params)
    options = {"gradient_accumulation": MICRO_BATCHES, "device_iterations": 2, "remainder": "updates"}
    with Feed(source, mesh=step.model.mesh, micro_batch=3, epochs=1, **options) as feed:
        for batch in feed:
            state, _ = step(state, batch)
    return named("whole", step.whole(state))


def feed_in_buckets(replicas: int, ipus: int) -> Results:
    """Return the losses of an epoch of examples of unlike lengths, and the length of each batch.

    On several IPUs, the loss function is cut, for another length.
    """

    def loss(w: Any, mb: Any) -> Any:
        counts = mb["n"] > 0
        return (w["b"] * jax.numpy.tanh(w["a"] * mb["n"] / 9) * counts).sum(), counts.sum()

    weights, model = {"a": np.float32(1), "b": np.float32(1)}, loss
    if ipus > 1:
        options: Any = {"ipus": ipus, "replicas": replicas, "gradient_accumulation": 1}
        model = Pipeline.from_function(loss, weights, {"n": np.ones((3, 5), int)}, **options)
    options = TrainOptions(replication_factor=replicas, weighted=True)
    step = make_train_step(model, optax.sgd(0.001), options)
    state, losses, sizes = step.init(weights), list[float](), list[int]()
    examples = [{"n": np.full(k * 7 % 16 + 1, k + 1)} for k in range(61)]
    with Feed(examples, items="examples", step=step, micro_batch=3, buckets=(4, 8, 16), seed=4, epochs=1) as feed:
        for batch in feed:
            state, outputs = step(state, batch)
            losses.append(float(outputs.loss))
            sizes.append(batch.data["n"].shape[-1])
    return {"losses": np.array(losses), "sizes": np.array(sizes)}


def trained_and_refused(replicas: int, ipus: int, each: list[dict[str, Any]]) -> Results:
    """Return the results of training, and errors by names that begin with "refused", of two processes of one device."""
    mesh = make_mesh(1, 2)
    numbers = {"n": np.arange(6)}
    of_first = jax.sharding.Mesh(
        np.array([[device for device in jax.devices() if device.process_index == 0]]), mesh.axis_names
    )
    feed = lambda mesh, **options: refusal(lambda: Feed(numbers, mesh=mesh, micro_batch=1, **options))
    refused = {
        "too few": refusal(lambda: make_mesh(2, 2)),
        "too few here": refusal(lambda: configure(2)),
        "an idle instance": refusal(lambda: make_mesh(1, 1)),
        "another count": feed(mesh, instances=3),
        "another instance": feed(mesh, instance=1 - jax.process_index()),
        "a mesh of others": feed(of_first),
        "right": feed(mesh, instances=2, instance=jax.process_index()),
    }
    return trained(replicas, ipus, each) | {f"refused {name}": text for name, text in refused.items()}

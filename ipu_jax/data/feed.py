"""Assemble batches of examples on the host, and send them to the IPUs ahead of the step that uses them.

    source --read--> rows of this instance --send--> batch on the mesh --> step
    (arrays,          (Order: shuffled,               (device_put)
     an indexable)     sliced, resumable)
    `------------- `workers` threads, at most `prefetch` batches ahead ---'

    source = {"images": images, "labels": labels}
    with Feed(source, mesh=pipeline.mesh, micro_batch=64, gradient_accumulation=16) as feed:
        for batch in feed.epoch():
            loss, gradients = pipeline.value_and_grad(params, batch.data)

Bytes are sent as bytes: give uint8 images, and `normalise` them inside the step. See docs/design/feed.md.
"""

import dataclasses
import math
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, SupportsIndex

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax._checks import as_int, check_count
from ipu_jax.data.order import EpochOrder, Position
from ipu_jax.data.prefetch import FeedTimeoutError, Prefetcher
from ipu_jax.data.source import Source
from ipu_jax.devices import REPLICA_AXIS

_STATE: Final = ("epoch", "position", "examples", "seed", "shuffle")


@dataclasses.dataclass(frozen=True, eq=False)
class FeedBatch:
    """One batch, on the IPUs.

    Attributes:
        data: a pytree like the source's, with leaves `jax.Array` of shape (device_iterations, replicas, M, micro-batch,
            ...), where each of the first two dims is left out if it is 1. With one device iteration,
            `Pipeline.value_and_grad` takes it.
        epoch: the epoch that the batch belongs to, from 0.
        examples: the number of its real examples, over all instances.
        updates: the number of its device iterations that contain a real example. These are the first ones.
        is_real: bool, which rows of this instance are real examples. Its dims are the leading dims of this instance's
            part of `data`.
        nbytes: the bytes of this instance's rows, as they were sent to each IPU of a replica.
    """

    data: Any
    epoch: int
    examples: int
    updates: int
    is_real: npt.NDArray[np.bool_]
    nbytes: int


class Feed:
    """Iterates over batches of examples on a mesh, in an order that depends on seed and epoch, from any position on.

    Iteration continues through the epochs; `epoch()` stops at the end of the current one. Every batch has the same
    shape. Each replica's rows are sent to all IPUs of that replica. Nothing is communicated between IPUs or instances.

    If all devices of `mesh` belong to this process, it contains the replicas of this instance only, and there are
    `instances` times as many replicas in all. A mesh over the devices of several processes contains the replicas of all
    instances, and each instance has equally many of its rows.

    Args:
        source: a pytree of arrays with one example per row, or an indexable: an object with `__len__()` and with a
            `__getitem__` that returns a pytree of NumPy arrays (n, ...) for an index array (n,). If there are several
            workers, several threads call it at once.
        mesh: a mesh with an axis "replica", such as `Pipeline.mesh`.
        micro_batch: B, the examples of a micro-batch.
        gradient_accumulation: M, the micro-batches of an update on each replica.
        device_iterations: K, the updates of a batch.
        shuffle: whether each epoch has a new order, which depends on the seed. Otherwise it is the source's own order.
        seed: the seed of the shuffling, at least 0.
        epochs: iteration ends after this many epochs, including those before `state`; None for never.
        remainder: what is done with the examples at the end of an epoch that do not fill a whole batch. "drop" (the
            default) leaves them out. "updates" leaves out only those that do not fill a whole update, so that a batch
            may contain fewer than K updates. "pad" fills the batch up with `fill`, and "wrap" with the epoch's first
            examples again. `FeedBatch` says which rows are real.
        fill: what batches are filled up with under "pad" and "updates": a number, or a pytree of numbers like the
            source, for example a label that is not a class.
        prefetch: how many batches may be ready or being made, beyond those that were returned. With 0 the caller's own
            thread makes each batch when it is asked for.
        workers: the number of threads that make batches, at most `prefetch`. Without prefetch it must be 1, and no
            thread is started.
        instances: the number of processes that share the replicas.
        instance: the number of this process among them, from 0.
        timeout: seconds to wait for a batch of the workers before an error is raised.
        state: what `state()` returned: the feed continues with the very next batch. The numbers of instances and
            workers and the dims of the batch may differ from before.
        last: the deprecated name of `remainder`.

    Attributes:
        like: a pytree like a batch's, with leaves `jax.ShapeDtypeStruct` with sharding: a step can be compiled for it.
        prefetch, workers: the arguments of these names.

    Raises:
        ValueError: a value is outside its rule, the source cannot be read, there are too few examples, or the state is
            that of another order of examples.

    >>> from ipu_jax.devices import make_mesh
    >>> source = {"x": np.arange(10, dtype=np.int32)}
    >>> with Feed(source, mesh=make_mesh(2, 1), micro_batch=2, shuffle=False, epochs=1) as feed:
    ...     batch = next(feed)
    ...     batch.data["x"].tolist(), feed.batches_per_epoch, feed.state()["position"]
    ([[[0, 1]], [[2, 3]]], 2, 4)
    """

    def __init__(
        self,
        source: Any,
        *,
        mesh: Mesh,
        micro_batch: int,
        gradient_accumulation: int = 1,
        device_iterations: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        remainder: str | None = None,
        fill: Any = 0,
        prefetch: int = 2,
        workers: int = 1,
        instances: int = 1,
        instance: int = 0,
        timeout: float = 120.0,
        state: Mapping[str, SupportsIndex] | None = None,
        last: str | None = None,
    ):
        if epochs is not None:
            check_count("epochs", epochs)
        num_ahead = as_int(prefetch)
        if num_ahead is None or num_ahead < 0:
            raise ValueError(f"prefetch={prefetch!r} is not a number of batches: give an int of at least 0")
        if check_count("workers", workers) > max(prefetch, 1):
            raise ValueError(
                f"workers={workers}, but prefetch={prefetch} batches are made at once at most: use fewer workers, or "
                f"prefetch={workers}"
            )
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout={timeout} is not a number of seconds: give one such as 120")
        check_count("instances", instances)
        replicas, mesh_replicas = _replicas(mesh, instances, instance)
        examples = Source(source)
        order = EpochOrder(
            examples.examples,
            micro_batch,
            gradient_accumulation=gradient_accumulation,
            replicas=replicas,
            iterations=device_iterations,
            shuffle=shuffle,
            seed=seed,
            remainder=_remainder(remainder, last),
            instances=instances,
            instance=instance,
        )
        # per leading dim: its size in the whole batch, its size on this instance, and its mesh axis
        dims = ((device_iterations, device_iterations, None), (mesh_replicas, replicas // instances, REPLICA_AXIS))
        leading = [dim for dim in dims if dim[0] > 1]
        update_dims = (gradient_accumulation, micro_batch)
        shape, local_shape = (*[dim[0] for dim in leading], *update_dims), (*[dim[1] for dim in leading], *update_dims)
        sharding = NamedSharding(mesh, PartitionSpec(*[dim[2] for dim in leading]))
        self.like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape), leaf.dtype, sharding=sharding), examples.like
        )
        self._assembler = _Assembler(examples, order, self.like, local_shape, examples.filling(fill))
        self._order, self._epochs = order, epochs
        self.prefetch, self.workers, self._timeout = num_ahead, workers, timeout
        self._position = order.first(Position(0, 0) if state is None else _position_of(state, order))
        self._ahead: Prefetcher[Position, FeedBatch] | None = None
        self._closed = False

    @property
    def batches_per_epoch(self) -> int:
        """Return the number of batches in a whole epoch."""
        return self._order.batches_from(0)

    def state(self) -> dict[str, int]:
        """Return the feed's position as plain ints: after the last batch that was returned, however many are ready.

        It is the same on every instance.
        """
        order = self._order
        values = (self._position.epoch, self._position.position, order.examples, order.seed, int(order.shuffle))
        return dict(zip(_STATE, values, strict=True))

    def seek(self, epoch: int) -> None:
        """Go to the start of an epoch. If the feed is there already, batches that are ready are kept."""
        to = as_int(epoch)
        if to is None or to < 0:
            raise ValueError(f"epoch={epoch!r} is not an epoch: give an int of at least 0")
        if self._position != Position(to, 0):
            self._drop()
            self._position = Position(to, 0)

    def epoch(self) -> Iterator[FeedBatch]:
        """Yield the batches that are left of the current epoch."""
        number = self._position.epoch
        while self._position.epoch == number and not self._is_done:
            yield self._next()

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> FeedBatch:
        """Return the next batch.

        Raises:
            StopIteration: `epochs` are over.
            FeedTimeoutError: the batch did not arrive in time; the message says what the workers do.
            Exception: whatever the source raised. The next call tries the same batch again.
        """
        if self._is_done:
            raise StopIteration
        return self._next()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._closed = True
        if error is None:
            self._drop()
        else:
            self._drop_after(error)

    def close(self) -> None:
        """End the workers and drop the batches that are ready. A second call does nothing; `state` still works.

        Raises:
            FeedTimeoutError: a worker is stuck in the source.
        """
        self._closed = True
        self._drop()

    @property
    def _is_done(self) -> bool:
        return self._epochs is not None and self._position.epoch >= self._epochs

    def _next(self) -> FeedBatch:
        if self._closed:
            raise ValueError("the feed is closed: read inside its `with` block")
        try:
            if not self.prefetch:
                batch = self._assembler(self._position)
            else:
                if self._ahead is None:
                    self._ahead = Prefetcher(
                        self._assembler,
                        _positions(self._order, self._position, self._epochs),
                        ahead=self.prefetch,
                        workers=self.workers,
                        seconds=self._timeout,
                    )
                batch = self._ahead.take()
            self._position = self._order.after(self._position)
        except FeedTimeoutError:
            raise  # the batch may still arrive: the next call waits for it again
        except BaseException as error:  # Ctrl-C, too, may arrive after a batch is taken and before it is counted
            self._drop_after(error)
            if isinstance(error, StopIteration):  # it would end the caller's loop, as if there were no more batches
                raise RuntimeError("the source raised StopIteration") from error
            raise
        return batch

    def _drop(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _drop_after(self, error: BaseException) -> None:
        try:
            self._drop()
        except FeedTimeoutError as stuck:
            error.add_note(f"and a worker is stuck: {stuck}")


class _Assembler:
    """Makes the batch that begins at a position. It has no reference to the feed, which workers must not keep alive."""

    def __init__(self, source: Source, order: EpochOrder, like: Any, lead: tuple[int, ...], fill: Any):
        self._source, self._order, self._like, self._lead, self._fill = source, order, like, lead, fill

    def __call__(self, position: Position) -> FeedBatch:
        rows = self._order.rows(position)
        indices, is_real = rows.indices.reshape(-1), rows.is_real.reshape(-1)
        is_whole = self._order.remainder == "wrap" or is_real.all()
        read = self._source.read(indices) if is_whole else self._filled_up(indices, is_real)
        return FeedBatch(
            jax.tree.map(self._send, self._like, read),
            position.epoch,
            rows.examples,
            rows.updates,
            is_real.reshape(self._lead),
            sum(leaf.nbytes for leaf in jax.tree.leaves(read)),
        )

    def _filled_up(self, indices: npt.NDArray[np.intp], is_real: npt.NDArray[np.bool_]) -> Any:
        whole = jax.tree.map(
            lambda like, fill: np.full((len(indices), *like.shape), fill, like.dtype), self._source.like, self._fill
        )
        if is_real.any():
            read = jax.tree.leaves(self._source.read(indices[is_real]))
            for filled, real in zip(jax.tree.leaves(whole), read, strict=True):
                filled[is_real] = real
        return whole

    def _send(self, like: jax.ShapeDtypeStruct, rows: npt.NDArray[Any]) -> jax.Array:
        of_instance = rows.reshape(*self._lead, *rows.shape[1:])
        return jax.make_array_from_process_local_data(like.sharding, of_instance, like.shape)


def _positions(order: EpochOrder, position: Position, epochs: int | None) -> Iterator[Position]:
    while epochs is None or position.epoch < epochs:
        yield position
        position = order.after(position)


def _replicas(mesh: Mesh, instances: int, instance: int) -> tuple[int, int]:
    """Return the number of replicas of all instances, and that of the mesh."""
    if REPLICA_AXIS not in mesh.axis_names:
        raise ValueError(
            f"mesh has axes {mesh.axis_names}, none is 'replica': make it with make_mesh(replicas, ipus_per_replica)"
        )
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(REPLICA_AXIS), 0)
    owners = [{device.process_index for device in row.flat} for row in rows.reshape(len(rows), -1)]
    processes = set().union(*owners)
    if processes == {jax.process_index()}:
        return len(rows) * instances, len(rows)
    if len(processes) != instances:
        raise ValueError(f"mesh lies on {len(processes)} processes, but instances={instances}: give one for each")
    each = len(rows) // instances
    if owners[instance * each : (instance + 1) * each] != [{jax.process_index()}] * each or len(rows) % instances:
        raise ValueError(
            f"mesh has replicas of the processes {[sorted(of_row) for of_row in owners]}, and instance={instance} is "
            f"process {jax.process_index()}: give each instance as many replicas, whole ones, in the order of instances"
        )
    return len(rows), len(rows)


def _position_of(state: Mapping[str, SupportsIndex], order: EpochOrder) -> Position:
    try:
        saved = {name: operator.index(value) for name, value in state.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"state={state!r} is not one: give what state() returned") from error
    if saved.keys() != set(_STATE) or saved["epoch"] < 0 or not 0 <= saved["position"] <= saved["examples"]:
        raise ValueError(f"state={saved} is not one: give what state() returned")
    own = {"examples": order.examples, "seed": order.seed, "shuffle": int(order.shuffle)}
    for name, value in own.items():
        if saved[name] != value:
            raise ValueError(
                f"state is of {name}={saved[name]}, but the feed has {name}={value}: its order is another one, and "
                "examples would be lost or read twice"
            )
    return Position(saved["epoch"], saved["position"])


def _remainder(remainder: str | None, last: str | None) -> str:
    if last is None:
        return "drop" if remainder is None else remainder
    if remainder is not None:
        raise ValueError(f"last={last!r} and remainder={remainder!r} are two names of one thing: give remainder")
    warnings.warn("Feed(last=) is called remainder= now", DeprecationWarning, stacklevel=3)
    return last

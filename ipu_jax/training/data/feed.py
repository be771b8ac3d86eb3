"""Assemble batches of examples on the host, and send them to the IPUs ahead of the step that uses them.

    source --read--> rows of this instance --send--> batch on the mesh --> step
    (arrays,          (Order: shuffled,               (device_put)
     an indexable,     sliced, resumable;
     a stream)         a stream: rebatched)
    `------------- `workers` threads, at most `prefetch` batches ahead ---'

    source = {"images": images, "labels": labels}
    with Feed(source, step=step, micro_batch=64) as feed:
        for batch in feed.epoch():
            state, outputs = step(state, batch)

Bytes are sent as bytes: give uint8 images, and `normalise` them inside the step. See docs/design/data.md.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from jax.sharding import Mesh

from ipu_jax.base import facts
from ipu_jax.base.annotations import Json, Tree
from ipu_jax.base.checks import as_int, check_bool, check_choice, check_count, in_line
from ipu_jax.base.decorators import public
from ipu_jax.core.options import TrainOptions
from ipu_jax.training.data._order import BatchDims, EpochOrder, Position
from ipu_jax.training.data.batch import FeedBatch, share_of
from ipu_jax.training.data.buckets import Buckets, checked_buckets
from ipu_jax.training.data.prefetch import FeedTimeoutError, Prefetcher
from ipu_jax.training.data.reader import Batches, IndexedReader, StreamReader
from ipu_jax.training.data.source import ArraySource, ExampleSource, has_numbers
from ipu_jax.training.data.stream import Stream

__all__ = ["Buckets", "Feed", "FeedBatch"]

_MARGIN = 10.0


@runtime_checkable
class ForStep(Protocol):
    """The properties of a training step that a feed needs."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def gradient_accumulation(self) -> int: ...
    @property
    def options(self) -> TrainOptions: ...


@public
class Feed:
    """Iterates over batches of examples on a mesh from any position on. The order depends on seed and epoch.

    Iteration continues through the epochs; `epoch()` stops at the end of the current one. Every batch has the same
    shape; with `buckets`, one shape per bucket. Each replica's rows are sent to all IPUs of that replica. Nothing is
    communicated between IPUs or instances.

    A mesh over the devices of several processes contains the replicas of all instances. Each instance reads the rows of
    the replicas of which it has IPUs. Two instances that share a replica both read its rows. If all devices of `mesh`
    belong to this process, the mesh contains the replicas of this instance only, and there are `instances` times as
    many replicas in all.

    Args:
        source: the source of the examples; `items` says how it returns them. An array can be an array of NumPy or jax,
            or a tensor of torch or TensorFlow. In examples and batches of `items`, a list of numbers is also an array.
        step: the training step that uses the batches. It provides `mesh`, `gradient_accumulation` and
            `device_iterations`, and the default of `remainder` is then "updates".
        mesh: a mesh with an axis "replica", such as `Pipeline.mesh`; required without a `step`.
        micro_batch: B, the examples of a micro-batch.
        items: None for a pytree of arrays with one example per row, or for an indexable: an object with `__len__()` and
            with a `__getitem__` that returns a pytree of arrays (n, ...) for an index array (n,). "examples" for an
            object that returns one example at a time: an object with `__len__()` and a `__getitem__` that takes an int,
            such as a list of dicts or a dataset of torch or Hugging Face, or else a stream of examples. "batches" for a
            stream of batches of any sizes, each a pytree of arrays (n, ...). A stream is an iterable such as a
            `DataLoader` or `tf.data.Dataset`; a function that takes the number of an epoch and returns a fresh iterator
            of it; or an iterator, which can be read once. Every instance reads the whole stream, and keeps the rows of
            its own replicas. With several workers, several threads call `__getitem__` at once.
        gradient_accumulation: M, the micro-batches of an update on each replica; 1 by default.
        device_iterations: K, the updates of a batch; 1 by default.
        shuffle: whether each epoch has a new order, which depends on the seed. Otherwise it is the source's own order.
            Default: True, except for a stream, which must shuffle on its own.
        seed: the seed of the shuffling, at least 0.
        epochs: the number of epochs after which iteration ends, including epochs before `state`; None for never.
        remainder: how to treat the examples at the end of an epoch that do not fill a whole batch. "drop" leaves them
            out. None, the default, does so too, and warns if they contain whole updates, which can happen if K > 1 (a
            stream warns at the end of an epoch). "updates" leaves out only examples that do not fill a whole update. A
            batch may then contain fewer than K updates: its `data` has only these, and a step takes the batch as it is,
            with filled up `arrays`. "pad" fills the batch up with `fill`, and "wrap" (not for a stream) with the
            epoch's first examples again. `FeedBatch` says which rows are real.
        fill: the values that fill up batches under "pad" and "updates": a number, or a pytree of numbers like the
            source, for example a label that is not a class.
        buckets: the sizes to which examples of unlike lengths are padded, or `Buckets` with more options; only with
            `items`. All examples of a batch are padded by `fill` to the smallest size that holds the longest of them,
            on all replicas and instances. Examples with numbers are grouped, so that a batch has examples of one
            bucket: each bucket collects its own from the shuffled order, and what is left over shares batches. A state
            inside an epoch then belongs to these buckets and to the number of examples per batch. A stream keeps its
            order, and may group by itself.
        prefetch: the most batches that are ready or being made beyond the returned batches. With 0, the caller's own
            thread makes each batch on request. Default: 2, or `workers` if there are more.
        workers: the number of threads that make batches, at most `prefetch`. With prefetch=0 it must be 1, and no
            thread is started. A stream is read by one worker.
        instances: the number of processes that share the replicas. Default: the number of processes of the mesh.
        instance: the number of this process among them, from 0. Default: its place among the processes of the mesh.
        timeout: seconds to wait for a batch from the workers before an error is raised.
        state: a result of `state()`: the feed continues with the next batch. The numbers of instances and workers and
            the dims of the batch may differ from before. A stream continues through the source's `state_dict` and
            `load_state_dict`, if it has both. Otherwise the feed reads the examples before the state again. They must
            then come in the same order as before; the last of them is checked.

    `len(feed)` is the number of batches in an epoch, which is unknown for a stream.

    Attributes:
        device_iterations: K, the updates of a batch.
        epochs: the argument of this name.
        examples_per_update: the examples of an update, over all replicas and micro-batches.
        updates_per_epoch: the updates of an epoch; None for a stream.
        mesh: the mesh to which batches are sent.
        examples: the examples of an epoch; None for a stream.
        like: a pytree like a batch's `arrays`, with leaves `jax.ShapeDtypeStruct` with sharding. A step can be compiled
            for it. With buckets, it has the size of the largest.
        prefetch, workers: the arguments of these names, or their defaults.
        last: the batch that was returned last; None before the first one, while the next one is read, and once it was
            put back. A loop that was interrupted puts back with it the updates that its state has not seen.

    Raises:
        ValueError: a value is outside its rule, the source cannot be read, there are too few examples, or the state
            belongs to another order of examples. While batches are made: an example is not like the first one; the
            message contains its number and the leaf. For an iterator also: it would have to be read again.

    >>> import numpy as np
    >>> from ipu_jax.core.mesh.devices import make_mesh
    >>> source = {"x": np.arange(10, dtype=np.int32)}
    >>> with Feed(source, mesh=make_mesh(2, 1), micro_batch=2, shuffle=False, epochs=1) as feed:
    ...     batch = next(feed)
    ...     batch.data["x"].tolist(), len(feed), feed.state()["position"]
    ([[[0, 1]], [[2, 3]]], 2, 4)

    A loader's batches of 3 become batches of 4, which is 2 replicas x 2 examples:

    >>> loader = [{"x": [0, 1, 2]}, {"x": [3, 4, 5]}, {"x": [6, 7, 8]}]
    >>> with Feed(loader, items="batches", mesh=make_mesh(2, 1), micro_batch=2, remainder="pad", fill=-1) as feed:
    ...     [batch.data["x"].reshape(-1).tolist() for batch in feed.epoch()]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, -1, -1, -1]]
    """

    def __init__(
        self,
        source: Any,
        *,
        micro_batch: int,
        step: ForStep | None = None,
        mesh: Mesh | None = None,
        items: Literal["examples", "batches"] | None = None,
        gradient_accumulation: int | None = None,
        device_iterations: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        epochs: int | None = None,
        remainder: str | None = None,
        fill: Tree = 0,
        buckets: Buckets | Sequence[int] | None = None,
        prefetch: int | None = None,
        workers: int = 1,
        instances: int | None = None,
        instance: int | None = None,
        timeout: float = 120.0,
        state: Mapping[str, Json] | None = None,
    ):
        mesh, counts = _mesh_and_counts(step, mesh, gradient_accumulation, device_iterations)
        if epochs is not None:
            epochs = check_count("epochs", epochs)
        workers = check_count("workers", workers)
        self.prefetch = _batches_ahead(prefetch, workers)
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout={timeout} is not a number of seconds: give one such as 120")
        warns = remainder is None and step is None
        remainder = remainder or ("drop" if step is None else "updates")
        dims = BatchDims(micro_batch, **counts, **share_of(mesh, instances, instance), remainder=remainder)
        rest: dict[str, Json] = {"mesh": mesh, "warns": warns, "fill": fill, "epochs": epochs, "state": state}
        of_form = {"buckets": checked_buckets(buckets, items), "fill": fill}
        if _is_stream(source, items):
            self._reader = _stream(source, items, dims, of_form, shuffle, seed, workers, **rest)
        else:
            self._reader = _examples(source, items, dims, of_form, shuffle, seed, **rest)
        order = self._order = self._reader.order
        self.mesh, self.epochs, self.workers, self._timeout = mesh, epochs, workers, timeout
        self.device_iterations, self.examples_per_update = dims.iterations, dims.per_update
        self.examples = None if order is None else order.examples
        self.updates_per_epoch = None if order is None else order.updates_per_epoch
        self.like, self._position = self._reader.like, self._reader.start
        self._shared: dict[str, Json] = {**dims.counts, "remainder": dims.remainder, "epochs": epochs}
        self.last: FeedBatch | None = None
        self._last_began = self._position
        self._rest: tuple[FeedBatch, Position] | None = None  # of a batch that was put back, and where the next begins
        self._batches: Batches | None = None
        self._ahead: Prefetcher[Position, tuple[FeedBatch | None, Position]] | None = None
        self._closed = False

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch.

        Raises:
            TypeError: the source is a stream, for which it is unknown.
        """
        if self.updates_per_epoch is None:
            raise TypeError("a stream does not say how many batches an epoch has: count those that feed.epoch() yields")
        return math.ceil(self.updates_per_epoch / self.device_iterations)

    def __repr__(self) -> str:
        at = self.position
        each = f"{self.examples_per_update:,} examples per update"
        if self.updates_per_epoch is not None:
            each += f", {self.updates_per_epoch:,} updates per epoch"
        return f"Feed({each}; at example {at.position:,} of epoch {at.epoch}{', closed' * self._closed})"

    def __bool__(self) -> bool:
        return True

    def state(self, *, updates: int | None = None) -> dict[str, Json]:
        """Return the feed's position as plain data: after the last returned batch, however many batches are ready.

        These are plain ints, and the same on every instance. For a stream with a `state_dict` of its own, the entry
        "source" is the result of that method.

        Args:
            updates: return the position after this many updates of that batch instead.
        """
        position = self._position
        if updates is not None:
            position = self._reader.within(self._last_began, updates * self.examples_per_update)
        return self._reader.state(position)

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a result of `state`, like a feed made with `state=`.

        Raises:
            ValueError: the state belongs to another order of examples, or the source cannot be read again.
        """
        self._go(self._reader.position_of(state))

    def put_back(self, batch: FeedBatch, updates: int) -> None:
        """Continue inside the last returned batch, after this many of its updates. The others come again.

        A stream is not read again for this, so an iterator can also continue.

        Raises:
            ValueError: the batch has not more updates than these.
        """
        if not 0 <= updates < batch.updates:
            raise ValueError(
                f"updates={updates}, but the batch has {batch.updates}: give the number of updates made, from 0 to "
                f"{batch.updates - 1}"
            )
        examples = updates * self.examples_per_update
        position = self._reader.within(self._last_began, examples)
        if self._order is None or not updates:
            self._rest = batch.after(updates, examples) if updates else batch, self._position
        else:
            self._drop()
        self._position, self.last = position, None

    def check_epoch(self, epoch: int) -> None:
        """Raise `ValueError` if the source cannot return to the start of an epoch, as an iterator never can."""
        self._reader.at_epoch(epoch)

    def seek(self, epoch: int) -> None:
        """Go to the start of an epoch. If the feed is there already, batches that are ready are kept.

        Raises:
            ValueError: `epoch` is not an int of at least 0, or the source is an iterator that cannot be repeated.
        """
        to = as_int(epoch)
        if to is None or to < 0:
            raise ValueError(f"epoch={epoch!r} is not an epoch: give an int of at least 0")
        if (self._position.epoch, self._position.position) != (to, 0):
            self._go(self._reader.at_epoch(to))

    def epoch(self) -> Iterator[FeedBatch]:
        """Yield the batches that are left in the current epoch."""
        number = self._position.epoch
        while self._position.epoch == number and not self._is_done:
            batch = self._next()
            if batch is not None:
                yield batch

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> FeedBatch:
        """Return the next batch.

        Raises:
            StopIteration: `epochs` are over.
            FeedTimeoutError: the batch did not arrive in time; the message says what the workers are doing.
            Exception: whatever the source raised. The next call tries the same batch again.
        """
        while not self._is_done:
            batch = self._next()
            if batch is not None:
                return batch
        raise StopIteration

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._closed, self.last = True, None
        if error is None:
            self._drop()
        else:
            self._leave()

    def close(self) -> None:
        """End the workers and drop the batches that are ready. A second call does nothing; `state` still works.

        Raises:
            FeedTimeoutError: a worker is stuck in the source.
        """
        self._closed, self.last = True, None
        self._drop()

    @property
    def position(self) -> Position:
        """Return the position after the last batch: its `epoch`, and the examples before it there, its `position`."""
        return self._position

    def position_after(self, updates: int) -> tuple[int, int] | None:
        """Return the epoch and the position after this many more updates; None for a stream.

        >>> import numpy as np
        >>> from ipu_jax.core.mesh.devices import make_mesh
        >>> feed = Feed(np.arange(10), mesh=make_mesh(1, 1), micro_batch=3)  # 3 updates per epoch
        >>> feed.position_after(7), feed.updates_to(2, 3), feed.updates_to(2, 10)
        ((2, 3), 7, 9)
        """
        return None if self._order is None else self._order.later(self._position, updates)

    def updates_to(self, epoch: int, position: int) -> int | None:
        """Return the number of updates until every example before a position is read; None for a stream.

        Examples that an epoch leaves out need no update. A position that is behind the feed gives 0.
        """
        return None if self._order is None else self._order.updates_between(self._position, epoch, position)

    @property
    def _is_done(self) -> bool:
        return self.epochs is not None and self._position.epoch >= self.epochs

    def _next(self) -> FeedBatch | None:
        """Return the next batch; None if the epoch ended instead."""
        if self._closed:
            raise ValueError("the feed is closed: read inside its `with` block")
        began, self.last = self._position, None
        try:
            # a slow source is not a stuck step; the margin lets our own error, which says what the workers do, go first
            with facts.during("reading a batch", self._timeout + _MARGIN):
                batch, following = self._read()
                if batch is not None:
                    batch = dataclasses.replace(batch, feed=self._shared | self._reader.shared(began))
                # one statement: wherever Ctrl-C interrupts, the batch is either counted and kept, or neither
                self._last_began, self._position, self.last = began, following, batch
        except FeedTimeoutError:
            raise  # the batch may still arrive: the next call waits for it again
        except BaseException as error:  # Ctrl-C can also arrive after a batch is taken and before it is counted
            if self.last is None:
                self._leave()
            if isinstance(error, StopIteration):  # it would end the caller's loop, as if there were no more batches
                raise RuntimeError("the source raised StopIteration") from error
            raise
        return batch

    def _read(self) -> tuple[FeedBatch | None, Position]:
        if self._rest is not None:
            batch_and_following, self._rest = self._rest, None
            return batch_and_following
        if self._batches is None:
            self._drop()  # workers that were left may still read the source
            self._batches = self._reader.batches(self._position)
        if not self.prefetch:
            return self._batches.make(self._position)
        if self._ahead is None:
            options: dict[str, Any] = {"workers": self.workers, "seconds": self._timeout}
            self._ahead = Prefetcher(self._batches.make, self._batches.positions, ahead=self.prefetch, **options)
        return self._ahead.take()

    def _go(self, position: Position) -> None:
        """Continue from a position, without the batches that are ready."""
        self._drop()
        self._position, self.last = position, None

    def _drop(self) -> None:
        ahead, self._ahead, self._batches, self._rest = self._ahead, None, None, None
        if ahead is not None:
            ahead.close()

    def _leave(self) -> None:
        """Drop the batches that are ready, after an error, which must not wait for a worker that is stuck."""
        self._batches = self._rest = None
        if self._ahead is not None:
            self._ahead.stop()


def _batches_ahead(prefetch: int | None, workers: int) -> int:
    """Return how many batches may be ready or being made, from the arguments of `Feed`.

    Raises:
        ValueError: `prefetch` is not a number of batches, or there are more workers than batches.
    """
    num_ahead = max(2, workers) if prefetch is None else as_int(prefetch)
    if num_ahead is None or num_ahead < 0:
        raise ValueError(f"prefetch={prefetch!r} is not a number of batches: give an int of at least 0")
    if workers > max(num_ahead, 1):
        raise ValueError(
            f"workers={workers}, but at most prefetch={prefetch} batches are made at once: use fewer workers, or "
            f"prefetch={workers}"
        )
    return num_ahead


def _is_stream(source: Any, items: str | None) -> bool:
    """Return whether a feed reads the source in its own order, rather than by the numbers of examples."""
    if items is None:
        return False
    are_batches = check_choice("items", items, ("examples", "batches")) == "batches"
    return are_batches or not has_numbers(source) or isinstance(source, dict)


def _stream(
    source: Any, items: str | None, dims: BatchDims, of_form: Any, shuffle: Any, seed: int, workers: int, **rest: Json
) -> StreamReader:
    """Return the reader of a stream, which takes no options that are only for examples with numbers."""
    if shuffle is not None:
        check_bool("shuffle", shuffle)
    named = f"the source, a {type(source).__name__}, gives one item after the other"
    if shuffle or seed:
        option = "shuffle=True" if shuffle else f"seed={seed}"
        raise ValueError(f"{option}, but {named}: let the source shuffle, or give one with __len__ and __getitem__")
    if workers > 1:
        raise ValueError(f"workers={workers}, but {named}: use workers=1, and let the source have workers of its own")
    if dims.remainder == "wrap":
        raise ValueError(f"remainder='wrap', but {named}, so the first ones are gone: use 'drop', 'updates' or 'pad'")
    return StreamReader(Stream(source, batched=items == "batches", **of_form), dims, **rest)


def _examples(
    source: Any, items: str | None, dims: BatchDims, of_form: Any, shuffle: Any, seed: int, *, warns: bool, **rest: Json
) -> IndexedReader:
    """Return the reader of examples with numbers."""
    examples = ArraySource(source) if items is None else ExampleSource(source, **of_form)
    shuffle = shuffle is None or check_bool("shuffle", shuffle)
    order = EpochOrder(examples.examples, dims, shuffle=shuffle, seed=seed, sizes=examples.sizes)
    if warns:
        dims.warn_of_updates_left_out(order.examples % dims.per_batch, order.examples, stacklevel=4)
    return IndexedReader(examples, order, **rest)


def _mesh_and_counts(
    step: ForStep | None, mesh: Mesh | None, m: int | None, k: int | None
) -> tuple[Mesh, dict[str, int]]:
    """Return the mesh, and M and K as arguments of `BatchDims`, from the step if there is one.

    Raises:
        ValueError: a value is given in addition to the step, or neither a step nor a mesh is given.
    """
    if step is None:
        if mesh is None:
            raise ValueError("neither step= nor mesh= is given: say whom the batches are for, such as step=step")
        return mesh, {"gradient_accumulation": 1 if m is None else m, "iterations": 1 if k is None else k}
    if not isinstance(step, ForStep):
        raise ValueError(f"step={in_line(step)} is not a training step: make it with make_train_step(...)")
    given = {"mesh": mesh, "gradient_accumulation": m, "device_iterations": k}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}= is given, and the step has one: leave it out, or leave step= out")
    counts = {"gradient_accumulation": step.gradient_accumulation, "iterations": step.options.device_iterations}
    return step.mesh, counts

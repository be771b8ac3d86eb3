"""Make results ahead of their use on threads, and return them in order.

    items    0  1  2  3  4  5 ...
    worker 0 [0 ][ 2  ]   .         at most `ahead` results are made or being made beyond what was taken;
    worker 1 [1    ][3]   .         a worker that would make one more waits
    taken    0  1 ...               in the order of the items, whichever worker is the first to be ready

The workers are threads, not processes: a process that is forked after jax has started may hang, and a spawned process
would hold a second copy of the data and send every batch through a pipe. NumPy releases the interpreter lock while it
gathers rows, and image decoders release it while they decode. This module does not import jax.
"""

import dataclasses
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# The time that a worker has to finish its batch after the request to stop.
_STOP_SECONDS = 10.0


class FeedTimeoutError(TimeoutError):
    """A batch did not arrive in time, or a worker did not end. The message says what each worker is doing."""


@dataclasses.dataclass
class _Shared(Generic[_Item, _Result]):
    """State shared by the workers and the reader. No worker holds the `Prefetcher`, so that it can be collected."""

    make: Callable[[_Item], _Result]
    items: Iterator[_Item]
    ahead: int
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    issued: int = 0
    taken: int = 0
    stopped: bool = False  # no more items are begun
    dropped: bool = False  # results are no longer wanted
    # by the number of the item: its result, or the exception that was raised instead
    results: dict[int, tuple[_Result | None, BaseException | None]] = dataclasses.field(default_factory=dict)
    # by the number of the worker: the item that it works on, and since when
    busy: dict[int, tuple[_Item, float]] = dataclasses.field(default_factory=dict)


class Prefetcher(Generic[_Item, _Result]):
    """Computes `make(item)` for each item on threads, ahead of the caller, and returns the results in order.

    After an error no more items are begun. The results before the error are returned first.

    Args:
        make: the function. Several workers call it at once.
        items: the items. One worker at a time draws from them; the caller takes no more results than there are items.
        ahead: the most results that are ready or being made beyond the taken results; at least 1.
        workers: the number of threads, at least 1.
        seconds: the longest time that `take` waits.

    >>> squares = Prefetcher(lambda n: n * n, iter(range(4)), ahead=2, workers=2, seconds=60)
    >>> [squares.take() for _ in range(4)]
    [0, 1, 4, 9]
    >>> squares.close()
    """

    def __init__(
        self, make: Callable[[_Item], _Result], items: Iterator[_Item], *, ahead: int, workers: int, seconds: float
    ):
        self._seconds = seconds
        self._shared: _Shared[_Item, _Result] = _Shared(make, items, ahead)
        self._threads = [
            threading.Thread(target=_work, args=(self._shared, k), name=f"feed worker {k}", daemon=True)
            for k in range(workers)
        ]
        # workers that are not closed end when this object is collected or the interpreter exits: jax crashes if threads
        # still use it then
        self._ended = weakref.finalize(self, _stop, self._shared, self._threads)
        for thread in self._threads:
            thread.start()

    def take(self) -> _Result:
        """Wait for the result of the next item, and return it.

        Raises:
            FeedTimeoutError: the result did not arrive in time.
            BaseException: the exception that `make` raised instead, with the worker's traceback.
        """
        shared = self._shared
        with shared.changed:
            number = shared.taken
            if not shared.changed.wait_for(lambda: number in shared.results, self._seconds):
                raise self._timeout(f"nothing arrived within {self._seconds:g} s")
            result, error = shared.results.pop(number)
            shared.taken += 1
            shared.changed.notify_all()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: keeping it would make a reference cycle
        return result  # pyright: ignore[reportReturnType] (without an error there is a result)

    def stop(self) -> None:
        """Drop the results, and let each worker end after what it makes now. `close` waits for them."""
        _stop(self._shared, [])

    def close(self) -> None:
        """End the workers, and drop their results. A second call does nothing.

        Raises:
            FeedTimeoutError: a worker is stuck in `make`.
        """
        self._ended()
        if any(thread.is_alive() for thread in self._threads):
            raise self._timeout(f"a worker did not end within {_STOP_SECONDS:g} s")

    def _timeout(self, what: str) -> FeedTimeoutError:
        frames, now = sys._current_frames(), time.monotonic()
        with self._shared.changed:
            busy = dict(self._shared.busy)
        lines, stacks = [], []
        for number, thread in enumerate(self._threads):
            frame = frames.get(thread.ident or -1)
            if not thread.is_alive() or frame is None:
                lines.append(f"worker {number} has ended")
            elif number not in busy:
                lines.append(f"worker {number} waits")
            else:
                item, since = busy[number]
                at = traceback.extract_stack(frame)[-1]
                lines.append(
                    f"worker {number} has been at {item} for {now - since:.1f} s, now in {at.filename}:{at.lineno} "
                    f"({at.name})"
                )
                stacks.append(f"Stack of worker {number}:\n{''.join(traceback.format_stack(frame))}".rstrip())
        error = FeedTimeoutError(f"{what}: {'; '.join(lines)}. Mend the source, or allow more with timeout=")
        for stack in stacks:
            error.add_note(stack)
        return error


def _work(shared: _Shared[Any, Any], worker: int) -> None:
    while True:
        with shared.changed:
            shared.changed.wait_for(lambda: shared.stopped or shared.issued - shared.taken < shared.ahead)
            if shared.stopped:
                return
            number = shared.issued
            try:
                item = next(shared.items)
            except StopIteration:
                return
            shared.issued += 1
            shared.busy[worker] = (item, time.monotonic())
        error = result = None
        try:
            result = shared.make(item)
        except BaseException as raised:  # whatever it is, `take` raises it
            raised.add_note(f"raised by feed worker {worker} at {item}")
            error = raised
        with shared.changed:
            del shared.busy[worker]
            shared.stopped |= error is not None
            if not shared.dropped:
                shared.results[number] = (result, error)
            shared.changed.notify_all()
        del item, result, error  # a worker that waits must not keep a batch alive


def _stop(shared: _Shared[Any, Any], threads: list[threading.Thread]) -> None:
    with shared.changed:
        shared.stopped = shared.dropped = True
        shared.results.clear()
        shared.changed.notify_all()
    if threading.current_thread() in threads:
        return  # garbage may be collected in a worker, which cannot wait for itself
    deadline = time.monotonic() + _STOP_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

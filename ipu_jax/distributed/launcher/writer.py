"""Write poprun's own output on a thread, so that a slow reader does not hold up supervision.

    supervision  -- put(1, b"[1,0]<stdout>:...\\n") -->  queue  --> thread --> stdout

The queue is bounded. While it is full, the pipes of the instances are not read, so nothing is lost and memory does not
grow. The instances wait as if they wrote to the slow reader themselves.

Nothing here imports jax.
"""

import collections
import os
import select
import threading
from typing import Final

MOST: Final = 4 << 20
"""Bytes in the queue at which the instances have to wait."""


class Writer:
    """Writes to file descriptors in the order of the requests."""

    def __init__(self) -> None:
        self._queue: collections.deque[tuple[int, bytes]] = collections.deque()
        self._changed = threading.Condition()
        self._bytes = 0
        self._closing = False
        self.error: OSError | None = None
        """The error of the first write that failed; None if none has."""
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Return whether so many bytes wait that no more should be read."""
        return self._bytes >= MOST

    @property
    def low(self) -> bool:
        """Return whether so few bytes wait that more can be read again."""
        return self._bytes < MOST // 2

    def put(self, handle: int, data: bytes) -> None:
        """Write all of `data`, after everything put before."""
        if data:
            with self._changed:
                self._queue.append((handle, data))
                self._bytes += len(data)
                self._changed.notify()

    def close(self, seconds: float) -> bool:
        """Return whether everything is written within `seconds`. The method can be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                handle, data = self._queue.popleft()
                while self._queue and self._queue[0][0] == handle and len(data) < 1 << 16:
                    data += self._queue.popleft()[1]
            try:
                _write(handle, data)
            except OSError as error:
                if self.error is None:
                    self.error = error
            with self._changed:
                self._bytes -= len(data)


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(handle, view) :]
        except BlockingIOError:  # another process has made the terminal or pipe non-blocking
            select.select([], [handle], [], 1.0)

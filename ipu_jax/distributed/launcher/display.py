"""Show the output of the instances on the user's terminal, and take the signals that the user sends from it.

    Output(1, "stdout", b"a\\nb")  -->  files  -->  Splitter  -->  Screen  -->  OutputWriter  -->  [1,1]<stdout>:a

The writer is a thread with a bounded queue, so that a slow reader does not hold up supervision. While the queue is
full, the pipes of the instances are not read, so nothing is lost and memory does not grow. The instances wait as if
they wrote to the slow reader themselves.

Nothing here imports jax.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import queue
import re
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Final, Literal

from ipu_jax.base.terminal import without_commands
from ipu_jax.distributed.launcher.hosts import Stream
from ipu_jax.distributed.launcher.lines import Screen, Snippet, Splitter

MOST: Final = 4 << 20
"""Bytes in the queue at which the instances have to wait."""
STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Tags = Literal["off", "short", "full"]
"""What is put before each line: nothing, the number of its instance, or what mpirun writes, such as [1,0]<stdout>:."""

_CAUGHT: Final = (*STOPPING, signal.SIGTSTP, signal.SIGCONT, signal.SIGCHLD, signal.SIGWINCH)
_HANDLES: Final[dict[Stream, int]] = {"stdout": 1, "stderr": 2}
# gloo's C++ writes "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1" to
# stdout of each instance, whatever its logging is set to. It writes each piece of that separately, and its threads
# write into each other's lines, so any mixture of the pieces can appear.
_NOISE: Final = re.compile(
    rb"(?:\[Gloo\] Rank )*\d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+?(?=\d+ is connected|\D|$)"
)
_NOISE_BEGINS: Final = b"[Gloo] Rank "
_SAID_BY_GLOO: Final = (
    _NOISE_BEGINS,
    b"is connected to ",
    b"peer ranks. ",
    b"Expected number of connected peer ranks is : ",
)
_PIECES_OF_NOISE: Final = re.compile(b"|".join(map(re.escape, _SAID_BY_GLOO)))
_LONG_AGO: Final = 40
_KEPT: Final = 20
_LONGEST_KEPT: Final = 2000


class Signals:
    """Collects signals from its creation until the process ends, and wakes up whoever waits for them.

    A signal that was already ignored, as under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        for number in _CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)  # without a Python handler, nothing is written to the pipe
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, files: Iterable[int], seconds: float) -> list[int]:
        """Wait until a file can be read, a signal arrives, or the time has passed. Return the signals."""
        poll = select.poll()
        for file in (self._read, *files):
            poll.register(file, select.POLLIN)
        poll.poll(seconds * 1000)
        taken: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._read, 512):
                taken += data
        return [number for number in taken if number != signal.SIGCHLD]


class OutputWriter:
    """Writes to file descriptors in the order of the requests, in a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._asked = self._done = 0  # bytes
        self.error: OSError | None = None
        """The error of the first write that failed; None if none has."""
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Return whether enough bytes wait, and reading should pause."""
        return self._asked - self._done >= MOST

    @property
    def low(self) -> bool:
        """Return whether so few bytes wait that more can be read again."""
        return self._asked - self._done < MOST // 2

    def put(self, handle: int, data: bytes) -> None:
        """Write all of `data`, after everything put before."""
        if data:
            self._asked += len(data)
            self._queue.put((handle, data))

    def close(self, seconds: float) -> bool:
        """Return whether everything is written within `seconds`. The method can be called again."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                _write(*item)
            except OSError as error:
                self.error = self.error or error
            self._done += len(item[1])


@dataclasses.dataclass
class _Source:
    splitter: Splitter
    tail: collections.deque[tuple[int, str]]  # the last lines, and how many had been shown when each was; -1: hidden
    file: FileIO | None = None
    ends_of_noise: int = 0  # gloo's line ends that are still to come


class Display:
    """Shows the output of the instances of a run.

    Args:
        writer: writes to stdout and stderr.
        only: the instance whose stdout is shown, or None for all.
        tags: what is put before each line.
        timestamps: whether a tag contains the time at which the line was read.
        folder: where each stream is also written to a file; None for no files.
    """

    def __init__(self, writer: OutputWriter, *, only: int | None, tags: Tags, timestamps: bool, folder: Path | None):
        self.writer, self._only, self._tags, self._timestamps, self._folder = writer, only, tags, timestamps, folder
        self._sources: dict[tuple[int, Stream], _Source] = {}
        self._screens = _screens()
        self._attempt = 0
        self._keeps = True  # whether the attempt's streams have files, if there is a folder
        self._shown = 0

    @property
    def columns(self) -> int | None:
        """Return the columns of the terminal for a line of an instance, beside its tag; None without a terminal."""
        columns = self._screens["stderr"].columns
        return None if columns is None else max(20, columns - len(self._tag(0, "stderr")) - 1)

    def resize(self) -> None:
        """Look up the width of the terminal again."""
        for stream, screen in self._screens.items():
            screen.columns = _columns(_HANDLES[stream])

    def begin(self, attempt: int) -> None:
        """Begin an attempt, with new streams."""
        self._attempt, self._sources, self._keeps = attempt, {}, True

    def show(self, instance: int, stream: Stream, data: bytes) -> None:
        """Show output of an instance; empty data is the end of the stream."""
        source, now = self._source(instance, stream), time.monotonic()
        if data:
            self._keep(source, data)
            self._snippets(instance, stream, source.splitter.feed(data, now))
            return
        self._snippets(instance, stream, source.splitter.finish())
        self._put(stream, self._screens[stream].finish(f"{instance} {stream}"))
        if source.file is not None:
            source.file.close()
            source.file = None

    def tick(self) -> None:
        """Show the text that has waited too long for its end."""
        now = time.monotonic()
        for (instance, stream), source in self._sources.items():
            self._snippets(instance, stream, source.splitter.tick(now))
        for stream, screen in self._screens.items():
            self._put(stream, screen.tick(now))

    def resume(self) -> None:
        """Restart the wait for the ends of lines, since nobody has read the streams for a while."""
        for source in self._sources.values():
            source.splitter.wait(time.monotonic())

    def say(self, *lines: str) -> None:
        """Write poprun's own lines to stderr. They may quote the output of instances."""
        for line in "\n".join(lines).split("\n") if lines else []:
            text = without_commands(line.encode(errors="replace"))
            self._put("stderr", self._screens["stderr"].line("poprun", b"", b"poprun: " + text))

    def draw(self, text: str) -> None:
        """Write a drawing to stdout, in one piece."""
        self._put("stdout", os.fsencode(text))

    def tail(self, instance: int, stream: Stream = "stderr", *, seen: bool = False) -> list[str]:
        """Return the last lines of an instance that are not on the screen; with `seen`, also the lines that are."""
        source = self._sources.get((instance, stream))
        lines = list(source.tail) if source else []
        return [text for number, text in lines if seen or number < 0 or self._shown - number > _LONG_AGO]

    def close(self) -> None:
        """End the last line, and close the files."""
        for (instance, stream), source in self._sources.items():
            if source.file is not None:
                self.show(instance, stream, b"")
        for stream, screen in self._screens.items():
            self._put(stream, screen.close())

    def _source(self, instance: int, stream: Stream) -> _Source:
        key = (instance, stream)
        if key not in self._sources:
            tail = collections.deque[tuple[int, str]](maxlen=_KEPT)
            self._sources[key] = _Source(Splitter(), tail, self._file(f"instance-{instance}.{stream}"))
        return self._sources[key]

    def _file(self, name: str) -> FileIO | None:
        """Open a stream's file. If that fails, as in a removed folder, say so once and go on without it."""
        if self._folder is None or not self._keeps:
            return None
        folder = self._folder / f"attempt-{self._attempt}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return (folder / name).open("wb", buffering=0)
        except OSError as error:
            self._keeps = False
            self.say(f"{folder} cannot be written ({error.strerror}): the run goes on without it")
            return None

    def _keep(self, source: _Source, data: bytes) -> None:
        """Write to a stream's file. If that fails, as on a full disk, say so once and go on without it."""
        if source.file is not None:
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[source.file.write(rest) :]
            except OSError as error:
                self.say(f"{source.file.name} cannot be written ({error.strerror}): the run goes on without it")
                source.file.close()
                source.file = None

    def _snippets(self, instance: int, stream: Stream, snippets: list[Snippet]) -> None:
        key, screen, source = f"{instance} {stream}", self._screens[stream], self._sources[instance, stream]
        hidden = stream == "stdout" and self._only not in (None, instance)
        for snippet in itertools.chain.from_iterable(_clean(each, source, stream) for each in snippets):
            if snippet.kind == "state":
                if instance == 0 and not hidden:
                    tag, now = self._tag(instance, stream), time.monotonic()
                    # of the texts between two blank ones, the first may be due, and the last stays
                    for _, run in itertools.groupby(snippet.text.split(b"\n"), lambda text: not text.strip()):
                        first, *others = run
                        for text in (first, *others[-1:]):
                            self._put(stream, screen.state(key, tag, text, now))
                continue
            last, shown = [snippet.text], self._shown + 1
            if b"\n" in snippet.text:
                last = snippet.text[-_KEPT * _LONGEST_KEPT :].rsplit(b"\n", _KEPT)[-_KEPT:]
                shown += snippet.text.count(b"\n")
            for i, line in enumerate(last):
                number = -1 if hidden else shown - len(last) + 1 + i
                source.tail.append((number, line[-_LONGEST_KEPT:].decode(errors="replace")))
            if not hidden:
                self._shown = shown
                draw = screen.line if snippet.kind == "line" else screen.part
                self._put(stream, draw(key, self._tag(instance, stream), snippet.text, goes_on=snippet.goes_on))

    def _tag(self, instance: int, stream: Stream) -> bytes:
        at = ""
        if self._timestamps:
            seconds = time.time()
            at = time.strftime("[%H:%M:%S", time.localtime(seconds)) + f".{int(seconds % 1 * 1000):03}]"
        before = {"off": "", "short": f"[{instance}]", "full": f"[1,{instance}]<{stream}>"}[self._tags] + at
        return f"{before}{':' if self._tags == 'full' else ' ' if before else ''}".encode()

    def _put(self, stream: Stream, data: bytes) -> None:
        self.writer.put(_HANDLES[stream], data)


def _clean(snippet: Snippet, source: _Source, stream: Stream) -> Iterator[Snippet]:
    """Yield a snippet without terminal commands or gloo's noise: line by line only if it contains gloo's.

    A bar that has a terminal to itself may erase its own lines. Here it would erase tags, and other instances' lines.
    The same holds for a file or a pipe, which may be shown on a terminal later.
    """
    may_be_noisy = stream == "stdout" and snippet.kind != "state"
    text = without_commands(snippet.text)
    if text is not snippet.text:
        if b"\n\n" in b"\n%b\n" % text:  # a line that had nothing but commands is left out
            pairs = zip(text.split(b"\n"), snippet.text.split(b"\n"), strict=True)
            left = [line for i, (line, before) in enumerate(pairs) if line or not before or (snippet.goes_on and not i)]
            if not left:
                return
            text = b"\n".join(left)
        snippet = dataclasses.replace(snippet, text=text)
    if not (may_be_noisy and (source.ends_of_noise or any(said in snippet.text for said in _SAID_BY_GLOO))):
        yield snippet
        return
    for i, line in enumerate(snippet.text.split(b"\n")):
        text, source.ends_of_noise = without_noise(line, source.ends_of_noise)
        if text is not None:
            # the newline after a bar may be gloo's: the bar goes on
            kind = "state" if snippet.was_state and text != line and not snippet.goes_on else snippet.kind
            yield dataclasses.replace(snippet, kind=kind, text=text, goes_on=snippet.goes_on and i == 0)


def _screens() -> dict[Stream, Screen]:
    """Return the screens of stdout and stderr: the same one if both go to one terminal, file or pipe."""
    places = {stream: os.fstat(handle) for stream, handle in _HANDLES.items()}
    screens: dict[Stream, Screen] = {stream: Screen(_columns(handle)) for stream, handle in _HANDLES.items()}
    out, err = places["stdout"], places["stderr"]
    if (out.st_dev, out.st_ino, out.st_rdev) == (err.st_dev, err.st_ino, err.st_rdev):
        screens["stdout"] = screens["stderr"]
    return screens


def _columns(handle: int) -> int | None:
    if not os.isatty(handle) or os.environ.get("TERM") == "dumb":
        return None
    return os.get_terminal_size(handle).columns or 80


def without_noise(line: bytes, ends_to_come: int) -> tuple[bytes | None, int]:
    """Return a line of stdout without gloo's noise, and the number of gloo's line ends that are still to come.

    The line is None if it contained nothing else.

    >>> said = b"is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    >>> without_noise(b"[Gloo] Rank [Gloo] Rank 1 " + said + b"0 " + said, 0)  # its second line end follows
    (None, 1)
    >>> without_noise(b"", 1), without_noise(b"", 0)
    ((None, 0), (b'', 0))
    >>> without_noise(b"[Gloo] Rank 2 is connected to [Gloo] Rank 7", 0), without_noise(b"7", 1), without_noise(b"7", 0)
    ((None, 1), (None, 0), (b'7', 0))
    >>> without_noise(b"[Gloo] Rank 0 is connected to 1 peer ranks. ", 0), without_noise(said[29:], 0)
    ((None, 0), (None, 0))
    >>> without_noise(b"loss 2.3[Gloo] Rank 0 " + said, 0)
    (b'loss 2.3', 0)
    """
    begun = line.count(_NOISE_BEGINS)
    rest, pieces = _PIECES_OF_NOISE.subn(b"", line)
    if (pieces or ends_to_come) and not rest.strip(b"0123456789 "):
        return None, max(0, ends_to_come + begun - 1)
    text, whole = _NOISE.subn(b"", line)
    return text, max(0, ends_to_come + begun - (whole > 0))


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(handle, view) :]
        except BlockingIOError:  # another process has made the terminal or pipe non-blocking
            select.select([], [handle], [], 1.0)

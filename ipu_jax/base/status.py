"""Say on a terminal what takes longer than two seconds, on one line that goes away.

verifying, program 1 of 2, compiling the pipeline: 12 s

    during("placing weights")     a block, or a function that this decorates; blocks inside it are named after it
    say("comparing")              what the innermost block of this thread does from now on
    with tracing("the pipeline")  in a function that jax traces: after it jax compiles, until the block around the call

The line is on stderr, right of the cursor, which stays where it is: so it covers nothing that a program has printed. It
is erased when a block ends, and before the program prints. IPU_JAX_QUIET=1 switches it off. Nothing here imports jax.
"""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

AFTER: Final = 2.0
"""Seconds of work before the line appears."""
EVERY: Final = 0.5
"""Seconds between two drawings."""
QUIET: Final = "IPU_JAX_QUIET"

_AT_CURSOR: Final = "\x1b7\x1b[K\x1b[?7l{}\x1b[?7h\x1b8"  # cut at the edge; then back to the cursor
_ERASE: Final = "\x1b[K"


@dataclasses.dataclass(slots=True)
class _WorkBlock:
    """A block of work.

    Attributes:
        text: the name of the work.
        now: the current part of it.
        since: the time when that part began.
        began: the time when the block first said anything, or 0.
    """

    text: str = ""
    now: str = ""
    since: float = 0.0
    began: float = 0.0


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.blocks: list[_WorkBlock] = []


_own: Final = _OfThread()


class during(contextlib.ContextDecorator):
    """Say in a `with` block, or in a function that this decorates, what the host does.

    Args:
        text: a few words. Without it the block is silent until `say` or `tracing`, and costs a microsecond.
    """

    def __init__(self, text: str = ""):
        self._text = text

    def __enter__(self) -> None:
        _own.blocks.append(_WorkBlock(self._text))
        if self._text:
            say("")

    def __exit__(self, *_: object) -> None:
        if _own.blocks.pop().began:
            _line.end(_own.blocks)


SILENT: Final = during()


def say(doing: str) -> None:
    """Say what the innermost block of this thread does from now on. Outside of blocks nothing is said."""
    if _own.blocks and _is_shown():
        block, now = _own.blocks[-1], time.monotonic()
        block.now, block.since, block.began = doing, now, block.began or now
        _line.begin(_own.blocks)


@contextlib.contextmanager
def tracing(program: str) -> Iterator[None]:
    """Say in a function that jax traces that it does so, and then that jax compiles the program."""
    say(f"tracing {program}")
    yield
    say(f"compiling {program}")


def is_notebook() -> bool:
    """Return whether this program is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _is_shown() -> bool:
    """Return whether there is a terminal to say it on, on which rich draws no bars."""
    return (
        os.environ.get(QUIET, "") in ("", "0")
        and os.environ.get("TERM", "dumb") != "dumb"
        and not type(sys.stderr).__module__.startswith("rich.")  # which takes the place of stderr meanwhile
        and _is_terminal(sys.stderr)
        and not is_notebook()
    )


def _is_terminal(stream: Any) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # None, another object, or closed
        return False


class _Erasing:
    """Stands for stdout or stderr on a terminal while the main thread works, and erases the line before it writes."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        _line.erase()
        return self.stream.write(text)


class _StatusLine:
    """The line on the terminal, drawn by a thread that ends when no block has anything to say."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, such as in a forked process, which does not have the thread."""
        self._lock = threading.RLock()  # a signal handler may print while its thread draws
        self._working: dict[int, list[_WorkBlock]] = {}  # the blocks of each thread that says something, longest first
        self._has_thread, self._terminal = False, -1  # where a line is now, as a file descriptor; -1 if nowhere

    def begin(self, blocks: list[_WorkBlock]) -> None:
        """Show the blocks of this thread from now on, after one of them has changed its text."""
        with self._lock:
            self.erase()
            if id(blocks) not in self._working:
                self._working[id(blocks)] = blocks
                _replace_streams(lambda stream: _Erasing(stream) if _is_terminal(stream) else stream)
            if not self._has_thread:
                with contextlib.suppress(RuntimeError):  # at the end of the process no thread can be started
                    threading.Thread(target=self._watch, name="ipu_jax status", daemon=True).start()
                    self._has_thread = True

    def end(self, blocks: list[_WorkBlock]) -> None:
        """Erase the line when a block of this thread has ended; another block may draw it again."""
        with self._lock:
            self.erase()
            if not any(block.began for block in blocks) and self._working.pop(id(blocks), None) is not None:
                _replace_streams(lambda stream: stream)

    def erase(self) -> None:
        """Erase the line, if there is one."""
        if self._terminal >= 0:
            with self._lock:
                self._write(_ERASE)
                self._terminal = -1

    def _watch(self) -> None:
        while True:
            time.sleep(EVERY)
            with self._lock:
                if not self._working:
                    self.erase()
                    self._has_thread = False
                    return
                self._draw([block for block in next(iter(self._working.values())) if block.began])

    def _draw(self, blocks: list[_WorkBlock]) -> None:
        now = time.monotonic()
        if not blocks or now - blocks[0].began < AFTER or not _is_shown():
            self.erase()
            return
        texts = [text for block in blocks for text in (block.text, block.now) if text]
        with contextlib.suppress(OSError, ValueError):  # it only says that it is a terminal
            terminal = sys.stderr.fileno()
            width = os.get_terminal_size(terminal).columns or 80
            self._terminal = terminal
            self._write(_AT_CURSOR.format(f"{', '.join(texts)}: {int(now - blocks[-1].since)} s"[: width - 1]))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._terminal, text.encode())


def _replace_streams(by: Callable[[Any], Any]) -> None:
    """Replace stdout and stderr, in the main thread: another one would do it in the midst of `redirect_stdout`."""
    if threading.current_thread() is threading.main_thread():
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            setattr(sys, name, by(stream.stream if isinstance(stream, _Erasing) else stream))


_line: Final = _StatusLine()
os.register_at_fork(after_in_child=_line.forget)

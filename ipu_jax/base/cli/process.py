"""Run a command as a process that ends quietly and at once, whatever its user or the reader of its output does.

    the command ends on its own                    its own exit status
    the reader of a pipe has gone (`| head`)       141, and nothing is printed, as for a program ended by SIGPIPE
    stdout or stderr cannot be written (full disk) 74, EX_IOERR of sysexits.h, and one line
    the working directory was removed              2, and one line, if the command needs to know it
    Ctrl-C                                         130, at once, also in the middle of an import or a compilation

Characters that stdout's encoding lacks are printed as escapes. A closed stdout or stderr discards everything.

Nothing here imports jax.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, NoReturn, TextIO

CANNOT_WRITE: Final = 74
"""The exit status of a command whose output or files could not be written."""

_NO_WORKING_DIRECTORY: Final = 2
_INTERRUPTED: Final = 130
READER_HAS_GONE: Final = 141
_CLEAN_UP: Final = b"\x1b[?25h\x1b[K\n"  # show the cursor, and erase the line of `status` right of it


class _CannotWriteError(OSError):
    """Raised by a `_StandardStream`, to distinguish it from an error of the program's own files."""


class _StandardStream(io.TextIOWrapper):
    """stdout or stderr: each line is written when it is printed, so that nothing is lost at an exit without a flush."""

    def __init__(self, number: int, encoding: str):
        bytes_out = io.BufferedWriter(io.FileIO(number, "wb", closefd=False))
        super().__init__(bytes_out, encoding=encoding, errors="backslashreplace", line_buffering=True)

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _CannotWriteError(error.errno, error.strerror) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _CannotWriteError(error.errno, error.strerror) from error


def run(prog: str, main: Callable[[], int], *, extra: str | None = None, packages: Collection[str] = ()) -> NoReturn:
    """Run a command, and end the process with its exit status, or with one of the statuses above.

    Args:
        prog: the name of the command.
        main: the command; it returns its exit status, or exits.
        extra: the extra of ipu-jax that installs the other packages that the command needs.
        packages: the import names of these packages. If one is missing, the process ends with status 2.
    """
    _open_what_is_closed()
    for name, number in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, _StandardStream(number, encoding=getattr(getattr(sys, name), "encoding", "utf-8")))
    _end_at_ctrl_c()
    status = _status(prog, main, extra, packages)
    _discard_if_unwritable(sys.stderr)  # argparse goes on without an error when it cannot print one
    sys.exit(status)


@contextlib.contextmanager
def warnings_as_lines(prog: str, *kinds: type[Warning], shown: bool = True) -> Iterator[None]:
    """Print warnings of some kinds as lines of a command within a `with` block; print nothing unless `shown`."""

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if not issubclass(category, kinds):
            usual(message, category, *args, **kwargs)
        elif shown:
            print(f"{prog}: {message}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        for kind in kinds:
            warnings.simplefilter("always", kind)
        usual, warnings.showwarning = warnings.showwarning, show
        yield


def _status(prog: str, main: Callable[[], int], extra: str | None, packages: Collection[str]) -> Any:
    try:
        try:
            return main()
        except SystemExit as stopped:
            return stopped.code
        except KeyboardInterrupt:  # from a command that handles Ctrl-C itself, and has said what it did
            return _INTERRUPTED
        except ModuleNotFoundError as missing:
            package = (missing.name or "").split(".")[0]
            if package not in packages:
                raise
            print(f"{prog} needs {package}, which is not installed: pip install 'ipu-jax[{extra}]'", file=sys.stderr)
            return 2
        except FileNotFoundError as error:
            if not is_of_a_removed_directory(error):
                raise
            print(f"{prog}: the working directory was removed: change to one that is there", file=sys.stderr)
            return _NO_WORKING_DIRECTORY
        finally:
            sys.stdout.flush()
    except _CannotWriteError as error:
        for stream in (sys.stdout, sys.stderr):
            _discard_if_unwritable(stream)
        if error.errno == errno.EPIPE:
            return READER_HAS_GONE
        print(f"{prog}: the output cannot be written ({error.strerror}): write it elsewhere", file=sys.stderr)
        return CANNOT_WRITE


def is_of_a_removed_directory(error: BaseException) -> bool:
    """Return whether an error comes from asking for a working directory that was removed."""
    if not isinstance(error, FileNotFoundError) or error.filename is not None:
        return False
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _discard_if_unwritable(stream: TextIO) -> None:
    """Send a stream to /dev/null if it cannot be written, so that Python can close it without an error."""
    try:
        stream.write("")
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def _open_what_is_closed() -> None:
    """Open stdin, stdout and stderr on /dev/null if they are closed, before a file or a socket gets their number."""
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(nowhere)


def _end_at_ctrl_c() -> None:
    """End the process at Ctrl-C, even while it compiles or waits in XLA, where Python runs no handler.

    The system's handler writes to a pipe, and a thread that reads it ends the process. A process that was started to
    ignore Ctrl-C keeps ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:
        while signal.SIGINT not in os.read(read, 1):
            pass
        _end()

    threading.Thread(target=watch, name="ctrl-c", daemon=True).start()
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: _end())  # without a Python handler nothing would be written to the pipe


def _end() -> NoReturn:
    with contextlib.suppress(OSError, StopIteration):  # there is no terminal
        os.write(next(filter(os.isatty, (1, 2))), _CLEAN_UP)
    os._exit(_INTERRUPTED)

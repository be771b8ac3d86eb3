"""Test how a command ends when the reader of its output goes, its output cannot be written, or its user interrupts."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]

# A command is this program with the body of `main`.
COMMAND = """
import sys
from ipu_jax.base.cli.process import run
def main():
{body}
    return 5
run("command", main)
"""
# A process that was started in the background ignores Ctrl-C, and so do the processes that it starts.
LISTENING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.{how}); os.execv(sys.executable, sys.argv[1:])"
LINES = "    for line in range(100_000): print(line)"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
command_of = lambda body: [sys.executable, "-c", COMMAND.format(body=body)]


def shell(script, body):
    """Run a command by a shell's script, in which "$@" is the command; return status, stdout and stderr."""
    words = ["bash", "-c", script, "bash", *command_of(body)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("script", "body", "expected"),
    [
        ('"$@"', "    print('done')", (5, "done\n", "")),
        ('"$@"', "    print('done'); sys.exit(3)", (3, "done\n", "")),
        ('"$@"', "    sys.exit('why')", (1, "", "why\n")),
        ('"$@" | head -n 2; exit ${PIPESTATUS[0]}', LINES, (141, "0\n1\n", "")),
        ('"$@" | true; exit ${PIPESTATUS[0]}', f"{LINES}\n    sys.exit(3)", (141, "", "")),
        ('"$@" 2>&1 | true; exit ${PIPESTATUS[0]}', LINES.replace("(line)", "(line, file=sys.stderr)"), (141, "", "")),
        (
            '"$@" > /dev/full',
            "    print('done')",
            (74, "", "command: the output cannot be written (No space left on device): write it elsewhere\n"),
        ),
        ('"$@" 2> /dev/full', "    print('done', file=sys.stderr)", (74, "", "")),
        ('"$@" >&-', "    print('done')", (5, "", "")),
        ('"$@" 2>&-', "    print('done', file=sys.stderr); print('seen')", (5, "seen\n", "")),
        ('"$@" <&- >&- 2>&-', "    print('done'); print('done', file=sys.stderr)", (5, "", "")),
        ('PYTHONIOENCODING=ascii "$@"', "    print('1 \\u2026 2')", (5, "1 \\u2026 2\n", "")),
        ('PYTHONIOENCODING=ascii "$@"', "    sys.exit('\\u2026')", (1, "", "\\u2026\n")),
        ('PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 LC_ALL=C "$@"', "    print('\\u2026', '\\udcff')", None),
    ],
)
def test_a_command_ends_without_a_traceback(script, body, expected):
    status, out, err = shell(script, body)
    if expected is None:
        assert (status, err) == (5, "")
    else:
        assert (status, out, err) == expected


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_file_does_not_take_the_number_of_a_stream_that_is_closed(closed, tmp_path):
    path = tmp_path / "file"
    body = f"    with open({str(path)!r}, 'w') as file: print('out'); print('err', file=sys.stderr); file.write('in')"
    assert shell(f'"$@" {closed}', body)[0] == 5
    assert path.read_text() == "in"


def test_a_mistake_of_the_programs_own_is_still_shown():
    status, _, err = shell('"$@"', "    open('/no/such/file')")
    assert status == 1
    assert "Traceback" in err
    assert err.endswith("No such file or directory: '/no/such/file'\n")


STARTED = "    print('started')\n"
BUSY = {
    "in Python": "    while True: pass",
    "asleep": "    import time; time.sleep(60)",
    # Python runs no handler of signals while this computes
    "in a library": "    import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "where exceptions are swallowed": "    while True:\n        try: sum(range(9))\n        except BaseException: pass",
}


@contextlib.contextmanager
def started(body, how, **pipes):
    """Start a command that treats Ctrl-C in a given way, and wait until it works."""
    command = [sys.executable, "-c", LISTENING.format(how=how), *command_of(STARTED + body)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process


@pytest.mark.parametrize("doing", BUSY)
def test_ctrl_c_ends_it_at_once_with_130(doing):
    with started(BUSY[doing], "SIG_DFL", stderr=subprocess.PIPE) as process:
        time.sleep(0.3)  # until it is in the middle of it
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "")


def test_a_process_that_was_started_to_ignore_ctrl_c_ignores_it():
    with started("    sys.stdin.readline()", "SIG_IGN", stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGINT)
        assert process.communicate("go on\n", timeout=60) == ("", None)
    assert process.returncode == 5


def test_after_ctrl_c_a_terminal_has_its_cursor_again():
    body = f"    sys.stdout.write('\\x1b[?25l')\n{STARTED}{BUSY['asleep']}"
    terminal, of_command = pty.openpty()
    take_terminal = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {LISTENING.format(how='SIG_DFL')}"
    words = [sys.executable, "-c", take_terminal, *command_of(body)]
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), of_command)
    process = subprocess.Popen(words, **streams, start_new_session=True, env=ENVIRONMENT)
    os.close(of_command)
    shown, is_pressed = b"", False
    with contextlib.suppress(OSError):  # nobody writes to it any more
        while data := os.read(terminal, 1000):
            shown += data
            if b"started" in shown and not is_pressed:
                is_pressed = os.write(terminal, b"\x03") == 1
    os.close(terminal)
    assert process.wait(timeout=60) == 130
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert b"\x1b[K" in shown[shown.index(b"started") :], "a line about long work stays"
    assert b"Traceback" not in shown

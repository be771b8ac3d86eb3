"""Test what a terminal shows of long work, read as a terminal reads it, and that nothing of it stays."""

import contextlib
import itertools
import os
import pty
import re
import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading, time, types, warnings
from ipu_jax.base import facts, status

status.AFTER, status.EVERY = 0.1, 0.02
facts._modules.clear()  # nobody else listens: jax is not imported


def shown(so=True):
    "Wait until the line is shown, or no longer."
    until = time.monotonic() + 20
    while (status._line._terminal >= 0) is not so and time.monotonic() < until:
        time.sleep(0.01)


def work(wait=shown):
    with facts.during("placing weights"):
        wait()


"""


class Terminal:
    """Reads what a program writes as a terminal does, and remembers all lines that it ever showed.

    >>> terminal = Terminal("12345\\x1b7\\x1b[?7l67\\x1b[?7h\\x1b8\\x1b[Kab\\r\\nlast")
    >>> terminal.lines, "1234567" in terminal.seen
    (['12345ab', 'last'], True)
    """

    def __init__(self, text: str):
        self.lines, self.seen = [""], set[str]()
        column = kept = 0
        for command, letter in re.findall(r"(\x1b7|\x1b8|\x1b\[[?\d;]*[A-Za-z])|(.)", text, re.DOTALL):
            line = self.lines[-1]
            if command == "\x1b[K":
                self.lines[-1] = line[:column]
            elif command == "\x1b7":
                kept = column
            elif command == "\x1b8":
                column = kept
            elif letter == "\n":
                self.lines.append("")
            elif letter == "\r":
                column = 0
            elif letter:
                self.lines[-1] = f"{line:{column}}"[:column] + letter + line[column + 1 :]
                column += 1
            self.seen.add(self.lines[-1])
        if self.lines[-1] == "":
            self.lines.pop()

    def has_shown(self, text: str) -> bool:
        return any(text in line for line in self.seen)


def written(body: str, *, start: str = START, **variables: str) -> str:
    """Return what a program writes on a terminal."""
    terminal, of_program = pty.openpty()
    words, own = [sys.executable, "-c", start + body], os.environ | {"TERM": "xterm", "NO_COLOR": "1"} | variables
    process = subprocess.Popen(words, stdin=of_program, stdout=of_program, stderr=of_program, env=own)
    os.close(of_program)
    shown = b""
    with contextlib.suppress(OSError):  # no process writes to it any more
        while data := os.read(terminal, 4096):
            shown += data
    os.close(terminal)
    process.wait(timeout=60)
    return shown.decode()


def test_long_work_is_said_on_a_line_that_goes_away():
    terminal = Terminal(written("print('wait: ', end='', flush=True); work(); print('done')"))
    assert terminal.has_shown("wait: placing weights: ")
    assert terminal.lines == ["wait: done"]


def test_the_line_is_shorter_than_the_terminal_is_wide():
    terminal = Terminal(
        written("""
import termios
termios.tcsetwinsize(2, (24, 20))
with status.during(40 * "x"):
    shown()
""")
    )
    assert max(terminal.seen, key=len) == 19 * "x"


def test_blocks_inside_are_named_after_the_block_around_them():
    text = written("""
@status.during("verifying")
def verify():
    shown()
    status.say("program 2 of 2")
    shown()
    with status.SILENT:
        with status.tracing("the pipeline"):
            shown()
        shown()
    shown()

status.say("nothing")  # outside of a block
verify()
""")
    after = ["", "", ", tracing the pipeline", ", compiling the pipeline", ""]
    steps = [f"verifying{', program 2 of 2' * (k > 0)}{step}" for k, step in enumerate(after)]
    assert [line for line, _ in itertools.groupby(re.findall(r"\[\?7l(.*?): \d+ s", text))] == steps


def test_what_the_program_prints_meanwhile_stands_on_lines_of_its_own():
    terminal = Terminal(
        written("""
out = sys.stdout
with status.during("tracing a function of the user that prints"):
    for shape in ((4, 16), (4,)):
        shown()
        print(shape)
        shown()
        print(shape, file=sys.stderr)
    shown()
print(sys.stdout is out)
""")
    )
    assert terminal.has_shown("tracing a function")
    assert terminal.lines == ["(4, 16)", "(4, 16)", "(4,)", "(4,)", "True"]


@pytest.mark.parametrize("error", ["raise ValueError('wrong')", "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"])
def test_an_error_and_ctrl_c_leave_no_line(error):
    start = f"{START}signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    body = f"with status.during('comparing'):\n    shown()\n    exec({error!r})"
    terminal = Terminal(written(body, start=start))
    assert terminal.has_shown("comparing: ")
    assert terminal.lines[0] == "Traceback (most recent call last):"
    assert terminal.lines[-1] in ("ValueError: wrong", "KeyboardInterrupt")
    assert not [line for line in terminal.lines if "comparing: " in line]


SILENT = {
    "short work": ("status.AFTER = 5; [work(lambda: time.sleep(0.03)) for _ in range(9)]", {}),
    "IPU_JAX_QUIET": ("work(pause)", {"IPU_JAX_QUIET": "1"}),
    "a dumb terminal": ("work(pause)", {"TERM": "dumb"}),
    "a notebook": (
        "shell = type('ZMQInteractiveShell', (), {})()\n"
        "sys.modules['IPython'] = types.SimpleNamespace(get_ipython=lambda: shell)\nwork(pause)",
        {},
    ),
    "no stderr": ("sys.stderr = None; work(pause)", {}),
    "no work": ("with status.SILENT: pause()", {}),
}


@pytest.mark.parametrize("case", SILENT)
def test_nothing_is_written(case):
    body, variables = SILENT[case]
    text = written(f"pause = lambda: time.sleep(0.4)\n{body}\nprint(threading.active_count())", **variables)
    assert text in (("1\r\n", "2\r\n") if case == "short work" else ("1\r\n",))


def test_logs_and_stdout_have_nothing_of_it():
    body = f"{START}print('one'); work(lambda: time.sleep(0.4)); print('two')"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (b"one\ntwo\n", b"")
    text = written(f"""
import subprocess
body = {body.replace("lambda: time.sleep(0.4)", "shown")!r}
print(subprocess.run([sys.executable, "-c", body], stdout=subprocess.PIPE).stdout)
""")  # only stderr is a terminal
    assert Terminal(text).has_shown("placing weights")
    assert Terminal(text).lines == [str(done.stdout)]


BAR = """
from rich.console import Console
from rich.progress import Progress
def bar():
    progress = Progress(console=Console(width=60), transient=True)
    progress.add_task("Training", total=2)
    return progress
"""


def test_a_bar_of_rich_takes_its_place():
    text = written(f"{BAR}with bar(): work(lambda: time.sleep(0.4))\nwork()")
    assert text.rindex("Training") < text.index("placing weights")
    terminal = Terminal(text)
    assert not any("Training" in line and "placing" in line for line in terminal.seen)
    text = written(f"{BAR}with status.during('cutting'):\n    shown()\n    with bar(): shown(False); time.sleep(0.4)")
    assert "cutting" in text[: text.index("Training")]
    # one drawing may have begun when the bar came: it stands right of the bar, and is erased
    assert text[text.index("Training") : text.rindex("Training")].count("cutting") <= 1


def test_threads_and_forked_processes_say_what_they_do_too():
    terminal = Terminal(
        written("""
def in_thread():
    with status.during("placing weights"):
        shown()
        at.wait()

at = threading.Event()
thread = threading.Thread(target=in_thread)
thread.start()
shown()
with status.during("comparing"):
    at.set()
    thread.join()
    shown(False)
    shown()
    warnings.simplefilter("ignore")  # Python 3.12 warns of threads
    child = os.fork()
    if not child:
        with status.during("reading"):
            shown()
            print("", end="")
        os._exit(5)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(ended, isinstance(sys.stdout, status._Erasing))
""")
    )
    assert all(map(terminal.has_shown, ("placing weights: ", "comparing: ", "comparing, reading: ")))
    assert terminal.lines == ["5 False"]

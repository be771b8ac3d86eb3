"""Test the command ipu-monitor: its JSON, what it says when there is nothing, and its full screen in a terminal."""

import contextlib
import fcntl
import json
import os
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from ipu_jax.run.observe.monitor import command
from support.launched import HEEDING, PLAIN_POPRUN, ROOT, environment, recorded, wait_for

MONITOR = [sys.executable, "-m", "ipu_jax.run.observe.monitor.command"]
HEEDING_MONITOR = [*HEEDING, *MONITOR]
STEPS = "for k in range(3): ago(3 - k), beacon.finished()\nago(0)"
ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
PICTURE = b"uses ipu_jax"
KEYS = {
    "pid", "user", "command", "state", "reason", "doing", "running_seconds", "run", "instance", "instances",
    "replicas", "ipus_per_replica", "ipus", "planned_after", "planned_updates", "step", "steps_per_second",
    "samples_per_second", "last_step_seconds", "seconds_left", "busy_share", "rss_bytes", "device_bytes",
    "device_limit_bytes",
}  # fmt: skip


def test_json_has_a_line_with_stable_keys(folder, capsys):
    """All of the line can be printed, whatever the record says."""
    with recorded(folder, f"{STEPS}\nrecord.note(ipus=[dict(id=3, platform='cpu', kind='\\x1b]0;t\\x9b')])") as running:
        (folder / "other").write_text("")
        assert command.main(["--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isascii()
    assert line.isprintable()
    found = json.loads(line)
    assert found.keys() == {"format", "time", "host", "processes", "ignored"}
    assert found["format"] == 1
    assert abs(found["time"] - time.time()) < 60
    assert found["ignored"] == [{"path": str(folder / "other"), "reason": "has no name of a record"}]
    (process,) = found["processes"]
    assert process.keys() == KEYS
    assert (process["pid"], process["state"], process["step"]) == (running.pid, "running", 3)
    placeless = {"replica": None, "ipu": None, "stages": [], "further": []}
    assert process["ipus"] == [{"id": 3, "platform": "cpu", "kind": "\x1b]0;t\x9b", **placeless}]
    assert 0 <= process["busy_share"] <= 1


@pytest.mark.parametrize(
    ("flags", "said", "status"),
    [
        ("", "No process uses ipu_jax.", 0),
        ("--pid 1", "None of the processes asked for uses ipu_jax.", 1),
        (f"--user {os.getuid()}", "None of the processes asked for uses ipu_jax.", 0),
    ],
)
def test_nothing_to_show_is_said(folder, capsys, flags, said, status):
    assert command.main(["--once", *flags.split()]) == status
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(": 0 processes on 0 IPUs")
    assert second == said


def test_another_users_processes_are_said_to_be_hidden(folder, capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert command.main(["--once", "--user", "root"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "Only root and that user can see what root runs."


def test_records_that_are_turned_off_are_named(monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setattr("ipu_jax.run.observe.monitor.records._folders", lambda: iter(()))
    assert command.main([]) == 0
    assert capsys.readouterr().out.endswith("uses ipu_jax, and IPU_JAX_MONITOR=off asks for no records.\n")


@pytest.mark.parametrize("flags", ["--once", "--json"])
def test_a_process_with_a_number_that_is_not_there_gives_a_line_and_status_1(folder, capsys, flags):
    with recorded(folder, STEPS) as running:
        named = ["--pid", str(running.pid)]
        assert command.main([flags, *named]) == 0
        assert capsys.readouterr().err == ""
        assert command.main([flags, *named, "--pid", "999999", "--pid", "1"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("ipu-monitor: --pid 1, 999999: ")
    assert err.count("\n") == 1
    assert str(running.pid) in out  # the other one is shown


def test_rows_are_sorted_as_asked_in_the_table_and_in_json(folder, capsys):
    with recorded(folder, STEPS) as first, recorded(folder, f"{STEPS}\nbeacon.finished(9)") as second:
        for flags, rows in (("", [first, second]), ("--sort step", [second, first]), ("--sort STEP", [second, first])):
            pids = [process.pid for process in rows]
            assert command.main(["--json", *flags.split()]) == 0
            assert [found["pid"] for found in json.loads(capsys.readouterr().out)["processes"]] == pids
            assert command.main(["--once", *flags.split()]) == 0
            assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[2:]] == pids


def test_without_proc_there_is_one_line(folder, capsys, monkeypatch, tmp_path):
    (tmp_path / "self").mkdir()
    monkeypatch.setattr("ipu_jax.distributed.processes.identity._PROC", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        command.main([])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "ipu-monitor: neither /proc nor psutil can list processes: mount /proc, or run it elsewhere\n"
    )


def test_a_look_takes_less_than_half_a_second_of_work_and_is_not_wrapped(folder):
    with recorded(folder, f"{STEPS}\nbeacon.enter(Phase.BUSY, 'saving', 600)"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(MONITOR, env=environment(COLUMNS="80"), capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    assert lines[2].rstrip().endswith("  busy: saving")


def test_it_can_be_repeated_into_a_pipe(folder):
    words = [*HEEDING_MONITOR, "--watch=0.1", "--json"]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as monitor:
        assert monitor.stdout is not None
        looks = [json.loads(monitor.stdout.readline()) for _ in range(3)]
        monitor.send_signal(signal.SIGINT)
        assert monitor.wait(timeout=60) == 130
    assert [look["processes"] for look in looks] == [[], [], []]
    assert looks[0]["time"] < looks[1]["time"] < looks[2]["time"]


class Terminal:
    """A terminal in which the monitor runs."""

    def __init__(self, folder, columns=100, words=("--watch", "60"), **settings):
        self.handle, other = pty.openpty()
        self.resize(columns)
        self.before = termios.tcgetattr(self.handle)
        # A test worker's readline may have set these, which hold whatever size the terminal has.
        own = {k: v for k, v in environment(**{"TERM": "xterm", **settings}).items() if k != "LINES"}
        self.process = subprocess.Popen(
            [*HEEDING_MONITOR, *words], env=own, stdin=other, stdout=other, stderr=other, start_new_session=True
        )
        os.close(other)

    def resize(self, columns):
        fcntl.ioctl(self.handle, termios.TIOCSWINSZ, struct.pack("HHHH", 20, columns, 0, 0))

    def read_until(self, end, seconds=60.0):
        """Read until something has been written since the last call, and return all of that."""
        read, until = b"", time.monotonic() + seconds
        while end not in read:
            assert time.monotonic() < until, read
            if select.select([self.handle], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # the other end has been closed
                    read += os.read(self.handle, 65536)
        return read

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.handle)


@pytest.fixture
def terminal(folder):
    with contextlib.closing(Terminal(folder)) as terminal:
        yield terminal


@pytest.mark.fast("q-0", "2-130")
@pytest.mark.parametrize(
    ("end", "status"),
    [("q", 0), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_the_terminal_is_as_before_when_it_ends(terminal, end, status):
    first = terminal.read_until(PICTURE)
    assert first.startswith(ENTER)
    assert b"No process uses ipu_jax." in first
    if isinstance(end, str):
        os.write(terminal.handle, end.encode())
    else:
        terminal.process.send_signal(end)
    assert terminal.read_until(LEAVE).endswith(b"\x1b[?25h" + LEAVE)
    assert terminal.process.wait(timeout=60) == status
    assert termios.tcgetattr(terminal.handle) == terminal.before


def test_its_keys_sort_the_rows(folder):
    with (
        recorded(folder, STEPS) as first,
        recorded(folder, f"{STEPS}\nbeacon.finished(9)") as second,
        contextlib.closing(Terminal(folder)) as terminal,
    ):
        assert shown_pids(terminal) == [first.pid, second.pid]
        for key, rows in ((b"t", [second, first]), (b"t", [first, second]), (b"T", [second, first])):
            os.write(terminal.handle, key)
            assert shown_pids(terminal) == [process.pid for process in rows], key


def test_the_screen_says_at_its_end_that_a_process_was_not_there(folder):
    with contextlib.closing(Terminal(folder, words=("--pid", "999999"))) as terminal:
        terminal.read_until(PICTURE)
        os.write(terminal.handle, b"q")
        assert b"ipu-monitor: --pid 999999: " in terminal.read_until(b"all are shown").rpartition(LEAVE)[2]
        assert terminal.process.wait(timeout=60) == 1
        assert termios.tcgetattr(terminal.handle) == terminal.before


def shown_pids(terminal):
    """Return the numbers of the processes in the next picture, from the top."""
    picture = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", terminal.read_until(b"[q]uit")).decode()
    return [int(line.split()[0]) for line in picture.splitlines() if re.match(r" *\d+  ", line)]


@pytest.mark.fast("settings0-True", "settings1-False")
@pytest.mark.parametrize(("settings", "is_green"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_are_for_terminals_that_want_them(folder, settings, is_green):
    with recorded(folder, STEPS), contextlib.closing(Terminal(folder, words=["--once"], **settings)) as terminal:
        shown = terminal.read_until(b"running").decode()
    codes = {code for text in re.findall(r"\x1b\[([0-9;]*)m", shown) for code in text.split(";")}
    assert ("32" in codes) == is_green
    assert is_green or codes <= {"", "0", "1", "2"}  # bold and dim are not colours


def test_a_pipe_has_neither_colours_nor_bars(folder):
    with recorded(folder, f"{STEPS}\nrecord.note(planned_after=0, planned_updates=12)"):
        for flags in ("--once", "--json"):
            done = subprocess.run([*MONITOR, flags], env=environment(TERM="xterm"), capture_output=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, b"")
            assert "━".encode() not in done.stdout
            assert b"\x1b" not in done.stdout
            assert b" 3/12   25%  " in done.stdout or flags == "--json"


def test_it_is_drawn_anew_for_another_size_and_after_a_suspension(folder, terminal):
    wide = terminal.read_until(PICTURE)
    assert b"processes on 0 IPUs" in wide
    terminal.resize(30)
    os.kill(terminal.process.pid, signal.SIGWINCH)
    narrow = wide
    for _ in range(5):  # one that was due anyway may come first
        narrow = terminal.read_until(PICTURE).rpartition(b"\x1b[H")[2]  # two may come at once
        if b"processes on 0 IPUs" not in narrow:
            break
    assert b"processes on 0 IPUs" not in narrow
    assert "…".encode() in narrow
    os.kill(terminal.process.pid, signal.SIGTSTP)
    assert terminal.read_until(LEAVE)
    os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert termios.tcgetattr(terminal.handle) == terminal.before
    os.kill(terminal.process.pid, signal.SIGCONT)
    assert terminal.read_until(PICTURE).startswith(ENTER)


PLACES = ["--num-replicas", "2", "--num-instances", "2", "--ipus-per-replica", "2"]
TRAINING = ["--pipeline-mode", "concurrent", "--synthetic-data", "--epochs", "1000"]


@pytest.mark.slow
def test_the_instances_of_a_training_are_shown_with_their_places(tmp_path):
    settings = environment(IPU_JAX_MONITOR=str(tmp_path / "records"))
    program = [sys.executable, "-m", "mnist_example.run_sharded_mnist", *TRAINING]

    def look():
        words = [*MONITOR, "--json"]
        done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)["processes"]

    def is_training(rows):
        return len(rows) == 2 and all((row["samples_per_second"] or 0) > 0 for row in rows)

    with subprocess.Popen([*PLAIN_POPRUN, *PLACES, *program], env=settings, stdout=subprocess.DEVNULL) as run:
        try:
            wait_for(lambda: is_training(look()), 200)
            rows = look()
            assert [(row["instance"], row["instances"], row["replicas"]) for row in rows] == [(0, 2, 2), (1, 2, 2)]
            assert len({row["run"] for row in rows}) == 1
            for row in rows:
                assert [(ipu["replica"], ipu["ipu"]) for ipu in row["ipus"]] == [(row["instance"], k) for k in (0, 1)]
                assert row["ipus"][0]["stages"][0] == "hidden"
                assert row["state"] == "running"
                # an update is 4 micro-batches of 16 images on each of 2 replicas
                assert row["samples_per_second"] == pytest.approx(128 * row["steps_per_second"])
        finally:
            run.kill()  # its watcher ends the instances
    wait_for(lambda: look() == [], 200)
    assert list((tmp_path / "records").iterdir()) == []


# where neither /proc nor Linux's own calls exist

HIDE = "from support import like_macos; like_macos.hide(); "
TRAIN = """
import sys, time
import jax.numpy as jnp, optax
from ipu_jax import Feed, Stage, Pipeline, configure, fit, make_train_step
configure(2)
body = Stage(lambda w, x, mb: mb @ w, params="body", ipu=0)
head = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="head", ipu=1)
step = make_train_step(Pipeline([body, head], gradient_accumulation=2), optax.sgd(0.01))
weights = {"body": jnp.eye(3), "head": jnp.ones((3, 1))}
feed = Feed(jnp.ones((64, 3)), micro_batch=2, step=step)
def evaluate(state):
    print("evaluating", flush=True)
    sys.stdin.readline()
    return {}
fit(step, step.init(weights), feed, updates=20, evaluate=evaluate, progress=False, say=len)
print("psutil" in sys.modules, sys.platform, flush=True)
"""
MONITOR_CODE = "from ipu_jax.run.observe.monitor import command; command.main(sys.argv[1:])"


def settings_of(records):
    return {**environment(IPU_JAX_MONITOR=str(records)), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def looked(settings, start, *flags):
    words = [sys.executable, "-c", f"import sys; {start}{MONITOR_CODE}", "--once", *flags]
    done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [True, False])
def test_a_training_is_shown(tmp_path, hidden):
    records = tmp_path / "records"
    settings, start = settings_of(records) | {"JAX_PLATFORMS": "cpu"}, HIDE if hidden else ""
    words = [sys.executable, "-c", start + TRAIN]
    with subprocess.Popen(words, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        assert training.stdout.readline() == "evaluating\n"
        (found,) = json.loads(looked(settings, start, "--json"))["processes"]
        assert (found["pid"], found["state"], found["doing"]) == (training.pid, "running", "busy: evaluating")
        assert (found["planned_updates"], len(found["ipus"])) == (20, 2)
        assert found["step"] in (15, 16)  # the last may not have been noticed
        assert 0 <= found["busy_share"] <= 1
        assert found["rss_bytes"] > 10**7
        assert f"\n{training.pid}  " in looked(settings, start)
        out, _ = training.communicate("\n\n\n", timeout=60)
        assert out.splitlines()[-1] == ("True darwin" if hidden else "False linux")
        assert training.returncode == 0
    assert list(records.iterdir()) == []


def test_a_process_is_shown_and_after_a_kill_it_is_gone_and_its_record_removed(tmp_path):
    records = tmp_path / "records"
    settings = settings_of(records)
    begin = HIDE + "from ipu_jax.distributed.processes import record; record.begin(); "
    waits = [sys.executable, "-c", f"{begin}print('ready', flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(waits, env=settings, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        (found,) = json.loads(looked(settings, HIDE, "--json"))["processes"]
        assert (found["pid"], found["state"], found["doing"]) == (killed.pid, "running", "no step yet")
        killed.kill()
    assert len(list(records.iterdir())) == 1
    counts = f"{begin}import os; print(len(os.listdir({str(records)!r})))"
    done = subprocess.run([sys.executable, "-c", counts], env=settings, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert list(records.iterdir()) == []

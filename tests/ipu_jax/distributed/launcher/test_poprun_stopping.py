"""Test that poprun stops its instances when its user, its reader or its own death asks for it, and leaves none."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from support.launched import (
    PLAIN_POPRUN,
    POPRUN,
    environment,
    gone_within,
    marked,
    on_a_terminal,
    program,
    start,
    wait_for,
)

TWO = ("--num-instances", "2", "--num-replicas", "2")
READY = """
def ready():
    (run_dir / f"ready.{me}").touch()
    while not all((run_dir / f"ready.{i}").exists() for i in range(instances)):
        time.sleep(0.005)
    if me == 0:
        print("ready", flush=True)
"""


@pytest.fixture
def started(tmp_path, mark):
    """Return a function that starts poprun with a program, and waits until all instances are ready."""
    processes = []

    def begin(body, *words, **variables):
        process = start(*TWO, *words, *program(tmp_path, READY + body), POPRUN_TEST=mark, **variables)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "[1,0]<stdout>:ready\n"
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


SLEEP = "\nready()\ntime.sleep(600)\n"
IGNORE = "\nfor number in (1, 2, 15):\n    signal.signal(number, signal.SIG_IGN)" + SLEEP


@pytest.mark.parametrize(
    ("number", "body", "words"),
    [
        *(pytest.param(number, SLEEP, (), marks=pytest.mark.slow) for number in (2, 15, 1)),
        (signal.SIGTERM, IGNORE, ("--grace", "0.5")),
    ],
)
def test_a_signal_is_passed_on_and_ends_all_within_the_grace_period(started, mark, number, body, words):
    process = started(body, *words)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert marked(mark) == set()


def test_after_a_failure_the_others_have_the_grace_period(started, mark, tmp_path):
    asked = tmp_path / "asked"
    body = f"""
signal.signal(signal.SIGTERM, lambda *_: Path({str(asked)!r}).write_text(str(time.monotonic())))
ready()
me or sys.exit(3)
while True:
    time.sleep(600)
"""
    assert started(body, "--grace", "3").wait(timeout=60) == 3
    assert time.monotonic() - float(asked.read_text()) > 2.5, "it is 1.5 s if nothing is said"
    assert marked(mark) == set()


def test_a_program_may_save_and_end_well(started, tmp_path):
    body = f"""
def save(*_):
    time.sleep(2)
    (Path({str(tmp_path)!r}) / f"saved.{{me}}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
ready()
time.sleep(600)
"""
    process = started(body)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert {path.name for path in tmp_path.glob("saved.*")} == {"saved.0", "saved.1"}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=str)
def test_a_second_signal_kills_at_once(started, mark, number):
    process = started(IGNORE, "--grace", "300")
    process.send_signal(number)
    assert process.stderr is not None
    said = process.stderr.readline()
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number, "the instances have 300 s after the first"
    assert marked(mark) == set()
    assert f"{number.name} was passed on to all instances: they may take 300 s" in said


@pytest.mark.parametrize(
    ("body", "name"),
    [
        pytest.param(SLEEP, "{}/victim\nnl", marks=pytest.mark.slow),
        pytest.param(SLEEP, "{}/victim\nfolder {}/other", marks=pytest.mark.slow),
        ("\nsubprocess.Popen(['sleep', '600'], start_new_session=True)" + IGNORE, "{}/\udcff"),
    ],
)
def test_nothing_outlives_a_poprun_that_is_killed_and_no_other_folder_is_removed(started, mark, tmp_path, body, name):
    scratch, others = Path(name.format(tmp_path, tmp_path)), (tmp_path / "victim", tmp_path / "other")
    for folder in (*others, scratch):
        folder.mkdir(parents=True)
    process = started(body, TMPDIR=str(scratch))
    variables = (Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in marked(mark))
    (name,) = {text[16:] for each in variables for text in each if text.startswith(b"IPU_JAX_RUN_DIR=")}
    folder = Path(os.fsdecode(name))
    assert folder.parent == scratch
    process.kill()
    gone_within(mark)
    wait_for(lambda: not folder.exists())
    assert scratch.is_dir()
    assert all(folder.is_dir() for folder in others)


@pytest.mark.slow
def test_a_poprun_that_was_suspended_starts_its_clocks_anew(started, mark):
    body = """
step(0), step(1)
ready()
n = 1
while not (run_dir / "end").exists():
    n += 1
    step(n)
    if n == 40:
        (run_dir / "end").touch()
"""
    process = started(body)
    instances = marked(mark)
    process.send_signal(signal.SIGSTOP)
    for pid in instances:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6.5)
    process.send_signal(signal.SIGCONT)
    time.sleep(1)  # for a while nothing happens: that is none of the instances' fault
    for pid in instances:
        os.kill(pid, signal.SIGCONT)
    assert process.wait(timeout=60) == 0


letters = lambda pids: {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


def test_ctrl_z_stops_the_instances_and_goes_on_with_them(started, mark):
    process = started(SLEEP)
    instances = marked(mark)
    process.send_signal(signal.SIGTSTP)
    wait_for(lambda: letters([*instances, process.pid]) == {"T"})
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: "T" not in letters([*instances, process.pid]))


@pytest.mark.parametrize(
    ("script", "status", "out", "err"),
    [
        ('"$@" | head -n 2; exit ${PIPESTATUS[0]}', 141, 2, ""),
        (
            '"$@" > /dev/full',
            74,
            0,
            "poprun: the output cannot be written (No space left on device): write it elsewhere\n",
        ),
    ],
    ids=["its reader has gone", "the disk is full"],
)
def test_an_output_that_cannot_be_written_ends_everything(tmp_path, mark, script, status, out, err):
    body = "while True: print('line', flush=True); time.sleep(0.01)"
    words = ["bash", "-c", script, "bash", *POPRUN, *TWO, *program(tmp_path, body)]
    done = subprocess.run(words, env=environment(POPRUN_TEST=mark), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (status, out, err)
    assert marked(mark) == set()


@pytest.mark.slow
def test_a_slow_reader_loses_nothing_and_is_nobodys_fault(tmp_path, mark):
    body = """
    for n in range(100):
        step(n, 0.001)
        print("x" * 100_000)
    """
    process = start(*TWO, "-v", "--stall-timeout", "10", *program(tmp_path, body), POPRUN_TEST=mark)
    # 20 MB are more than the pipes and the queue hold: the instances wait, for longer than a step may take
    time.sleep(15)
    assert marked(mark)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert len(re.findall(r"^\[1,[01]\]<stdout>:x{100000}$", out, re.MULTILINE)) == 200
    assert "stuck" not in err


@pytest.mark.slow
@pytest.mark.parametrize("size", [2049, 1 << 20])
def test_a_poprun_that_reads_slowly_is_nobodys_fault(tmp_path, size):
    body = f"""
    for n in range(3):
        step(n, 0.001)
    if me == 1:
        for _ in range({(3 << 20) // size}):
            os.write(1, b"x" * {size})
    step(3)
    """
    # it takes 20 s for all, so that instance 1 waits for longer than a step may take
    slow = """
        import time
        from ipu_jax.distributed import poprun
        from ipu_jax.distributed.launcher.display import Display
        show = Display.show
        Display.show = lambda *words: time.sleep(len(words[-1]) / 1.5e5) or show(*words)
        poprun.command()
        """
    (tmp_path / "slow.py").write_text(textwrap.dedent(slow))
    words = [sys.executable, str(tmp_path / "slow.py"), *TWO, "--stall-timeout", "10", *program(tmp_path, body)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("x") == (3 << 20) // size * size


@pytest.mark.slow
def test_supervision_goes_on_while_nobody_reads(tmp_path, mark):
    body = """
    if me == 1:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        print("x" * 100_000)
    """
    process = start(*TWO, "-v", *program(tmp_path, body), POPRUN_TEST=mark)
    wait_for(lambda: marked(mark))
    gone_within(mark)  # although not one line was read
    process.communicate(timeout=60)
    assert process.returncode == 137


def test_ctrl_c_on_a_terminal_reaches_the_instances_once(tmp_path, mark):
    body = READY + "\ntry:\n    ready(), time.sleep(600)\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    words = (*TWO, *program(tmp_path, body))
    status, shown = on_a_terminal(*words, interrupted_after=b"ready", POPRUN_TEST=mark)
    assert (status, shown.count("interrupted\n")) == (130, 2)
    assert marked(mark) == set()


def test_nohup_is_respected(tmp_path, mark):
    sent = tmp_path / "sent"
    body = f"print('up', flush=True)\nwhile not Path({str(sent)!r}).exists(): time.sleep(0.05)"
    words = ["bash", "-c", 'trap "" HUP; exec "$@"', "bash", *PLAIN_POPRUN, *TWO, *program(tmp_path, body)]
    process = subprocess.Popen(words, env=environment(POPRUN_TEST=mark), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    sent.touch()
    process.communicate(timeout=60)
    assert process.returncode == 0

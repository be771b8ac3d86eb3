"""Test that one training alone saves to a folder, that any may read it, and that the death of its process frees it."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipu_jax import Checkpoints
from ipu_jax.distributed.processes.identity import own_identity
from ipu_jax.io import CheckpointError
from ipu_jax.training.checkpoints import _lock
from ipu_jax.training.checkpoints._lock import Lock
from support.killed_saves import restored, state_of, step_of

ROOT = Path(__file__).parents[4]
HOLDER = """
import sys, time, os
from pathlib import Path
from ipu_jax.training.checkpoints._lock import Lock
lock = Lock(Path(sys.argv[1]))
lock.take()
child = os.fork() if len(sys.argv) > 2 else ""
if child == 0:
    time.sleep(60)
    os._exit(0)
print(f"held{child}", flush=True)
time.sleep(60)
"""
REST = (
    "Two training runs in one folder would remove each other's checkpoints: wait until that one has ended, stop it, or "
    "save to another folder"
)


@pytest.fixture
def holder(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """Return another process that has the lock of this folder."""
    process = hold(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def hold(folder: Path, *forks: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder), *forks]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(Lock.take, "__defaults__", (0.1,))


def test_a_second_training_is_refused_at_its_first_step_and_reads_all_the_same(tmp_path, holder, impatient):
    step = step_of()
    holders = rf"process {holder.pid} on {re.escape(socket.gethostname())} saves there since \d{{4}}-[-:\d+ ]+"
    with Checkpoints(tmp_path, step, every=1000, on_save_error="continue") as checkpoints:
        state = state_of(step, 0, 0)
        assert checkpoints.restore(state) is None
        for use in (
            checkpoints.lock,
            lambda: checkpoints.due(state),
            lambda: checkpoints.save(state),
            lambda: checkpoints.save(state, now=True),
        ):
            checkpoints._has_tried_to_lock = False
            with pytest.raises(CheckpointError, match=rf"^{tmp_path} is in use: {holders}\. {REST}$") as raised:
                use()
            assert raised.value.errno == errno.EBUSY
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_the_death_of_its_process_frees_it_at_once(tmp_path, holder, impatient):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    step = step_of()
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state_of(step, 1, 1), now=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_process_that_is_dying_is_waited_for(tmp_path, holder):
    lock = Lock(tmp_path)
    os.kill(holder.pid, signal.SIGKILL)
    lock.take()
    assert lock.is_held
    lock.release()


def test_a_forked_child_does_not_keep_it(tmp_path, impatient):
    process = hold(tmp_path, "fork")
    assert process.stdout is not None
    child = int(process.stdout.readline().removeprefix("held"))
    try:
        with pytest.raises(CheckpointError):
            Lock(tmp_path).take()
        process.kill()
        process.wait()
        os.kill(child, 0)
        lock = Lock(tmp_path)
        lock.take()
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.stdout.close()


def test_two_of_one_process_exclude_each_other_until_one_is_closed_or_dropped(tmp_path, impatient):
    step = step_of()
    first, second = (Checkpoints(tmp_path, step) for _ in range(2))
    first.lock()
    own = r"is in use: this process saves there since .*, by other Checkpoints, which close\(\) would end\."
    with pytest.raises(CheckpointError, match=own):
        second.lock()
    first.close()
    second.lock()
    second.close()
    third = Checkpoints(tmp_path, step)
    third.lock()
    third._store.close()
    del third  # as a notebook's cell does that is run again
    first = Checkpoints(tmp_path, step)
    first.lock()
    first.close()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_somebody_removed_is_taken_again_before_a_save(tmp_path, impatient):
    step = step_of()
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state_of(step, 1, 1), now=True)
        (tmp_path / ".lock").unlink()
        checkpoints.save(state_of(step, 2, 2), now=True)
        with pytest.raises(CheckpointError):
            Lock(tmp_path).take()
        (tmp_path / ".lock").unlink()
        other = Lock(tmp_path)
        other._path.write_bytes(_lock._own_text())
        taken = locked(tmp_path / ".lock")
        with pytest.raises(CheckpointError, match=r"step-3 failed, \[Errno 16\] .* is in use: this process"):
            checkpoints.save(state_of(step, 3, 3), now=True)
        os.close(taken)
        (tmp_path / ".lock").unlink()
    assert restored(tmp_path) == (2, 2)


def test_a_folder_that_cannot_be_made_is_said_by_lock_and_left_to_the_save_by_due(tmp_path):
    (tmp_path / "file").write_text("")
    step = step_of()
    with Checkpoints(tmp_path / "file" / "runs", step) as checkpoints:
        with pytest.raises(CheckpointError, match=r"runs cannot be locked: \[Errno 20\] Not a directory"):
            checkpoints.lock()
        assert not checkpoints.due(state_of(step, 0, 0))


# where files cannot be locked


@pytest.fixture
def lockless(monkeypatch) -> None:
    """Have the file system lock no files."""

    def refuses(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)


def write_lock(folder: Path, **fields: str) -> None:
    own = json.loads(_lock._own_text())
    (folder / ".lock").write_text(json.dumps({**own, **fields}))


def test_without_locks_of_files_its_text_counts(tmp_path, lockless, impatient):
    lock = Lock(tmp_path)
    lock.take()
    assert lock.is_held
    with pytest.raises(CheckpointError, match="this process saves there"):
        Lock(tmp_path).take()
    lock.release()
    assert not list(tmp_path.iterdir())
    own = own_identity()
    assert own is not None
    dead = str(own._replace(pid=1 << 22, start=5))
    before = str(own._replace(boot="00000000"))
    for identity in (dead, before):
        write_lock(tmp_path, process=identity)
        lock.take()
        lock.release()


@pytest.mark.parametrize("where", [{"host": "node-7"}, {"process": "4194304-5-{boot}-1"}, {"process": "77"}])
def test_without_locks_nobody_knows_of_another_host_or_container(tmp_path, lockless, impatient, where):
    own = own_identity()
    assert own is not None
    write_lock(tmp_path, **{name: text.format(boot=own.boot) for name, text in where.items()})
    mend = rf"\(if it has ended, remove {tmp_path}/\.lock: this disk cannot tell\)\. {REST}"
    with pytest.raises(CheckpointError, match=mend):
        Lock(tmp_path).take()
    (tmp_path / ".lock").unlink()
    lock = Lock(tmp_path)
    lock.take()
    lock.release()


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b'{"host": "\\u001b[2J", "process": "1", "since": "now"}'])
def test_a_text_that_is_not_a_locks_is_not_shown(tmp_path, impatient, text):
    (tmp_path / ".lock").write_bytes(text)
    (tmp_path / ".lock").chmod(0o600)
    taken = locked(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match=r"is in use: another process saves there\. "):
        Lock(tmp_path).take()
    os.close(taken)


def locked(path: Path) -> int:
    """Lock a file, and return its handle."""
    handle = os.open(path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def test_who_can_only_read_the_folder_cannot_lock_it(tmp_path, impatient):
    lock = Lock(tmp_path)
    lock.take()
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
    lock.release()
    (tmp_path / ".lock").touch(0o644)  # of an earlier version that was killed, and locked by a reader
    taken = locked(tmp_path / ".lock")
    lock.take()
    assert lock.is_held
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600
    lock.release()
    os.close(taken)


def test_a_training_of_an_earlier_version_is_still_refused_to(tmp_path, impatient):
    (tmp_path / ".lock").write_bytes(_lock._own_text())
    (tmp_path / ".lock").chmod(0o644)
    taken = locked(tmp_path / ".lock")
    with pytest.raises(CheckpointError, match="is in use: this process"):
        Lock(tmp_path).take()
    os.close(taken)

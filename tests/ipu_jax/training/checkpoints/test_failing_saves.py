"""Test what happens when the disk fails for real: it is full, read-only or gone. The last good checkpoint stays."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from ipu_jax import Checkpoints
from ipu_jax.io import CheckpointError, CheckpointWarning
from ipu_jax.training.checkpoints import _folder
from ipu_jax.training.checkpoints._writer import Job, Writer
from support.killed_saves import restored, state_of, step_of

COLUMNS = 100_000
BYTES = 4 * COLUMNS * 4 + 4  # of the state: weights, and the number of the step


@contextlib.contextmanager
def _mounted(at: Path, size: str) -> Iterator[Path]:
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Return a folder on a disk of its own with room for two checkpoints and a bit more."""
    with _mounted(tmp_path / "disk", "5M") as at:
        yield at


def save(checkpoints: Checkpoints, number: int, *, waits: bool = False) -> bool:
    """Save a state with this number of updates, which all weights have as value; return whether it is saved."""
    begun = checkpoints.save(state_of(step_of(), number, number, COLUMNS), now=True)
    if waits:
        checkpoints.wait()
    return begun


@contextlib.contextmanager
def with_one(runs: Path, **options: Any) -> Iterator[Checkpoints]:
    """Yield checkpoints that have saved the first one."""
    with Checkpoints(runs, step_of(), **options) as checkpoints:
        assert save(checkpoints, 1, waits=True)
        yield checkpoints


def assert_last_is(runs: Path, number: int) -> None:
    assert restored(runs, COLUMNS) == (number, number)


def fill(folder: Path, left: int) -> Path:
    """Write a file that leaves so many bytes free."""
    path = folder / "other data"
    path.write_bytes(bytes(shutil.disk_usage(folder).free - left))
    return path


@pytest.mark.parametrize("metadata", [1 << 20, -(10**9)], ids=["found before", "found while it writes"])
def test_a_full_disk_leaves_the_checkpoint_of_the_step_that_is_saved_again(tmp_path, monkeypatch, metadata):
    """With room for one, and keep=1: the one that is there is all that the training has."""
    with _mounted(tmp_path / "disk", "3M") as disk, with_one(disk / "runs", keep=1) as checkpoints:
        runs = disk / "runs"
        monkeypatch.setattr(_folder, "_METADATA", metadata)
        with pytest.raises(
            CheckpointError, match=r"step-1(\.2)? failed, \[Errno 28\] .*; the last good one is of step 1$"
        ):
            save(checkpoints, 1, waits=True)
        assert sorted(os.listdir(runs)) == [".lock", "step-1"]
        assert_last_is(runs, 1)


@pytest.mark.parametrize(
    ("metadata", "left"),
    [(1 << 20, 1_000_000), (-(10**9), 0), (-(10**9), 700_000), (-(10**9), 1_603_000)],
    ids=["before anything is written", "at once", "half way", "at the end"],
)
def test_a_disk_that_is_full_leaves_the_last_good_checkpoint(small_disk, monkeypatch, metadata, left):
    """All but the first fill the disk after the room was looked at: the errors are the file system's own."""
    runs = small_disk / "runs"
    monkeypatch.setattr(_folder, "_METADATA", metadata)
    with with_one(runs) as checkpoints:
        others = fill(small_disk, left)
        with pytest.raises(CheckpointError) as raised:
            save(checkpoints, 2, waits=True)
    assert raised.value.errno == 28
    text = str(raised.value)
    assert f"saving {runs}/step-2 failed, [Errno 28] No space left on device, of {BYTES:,} bytes" in text
    assert (" bytes are free" in text) == (metadata > 0)
    assert text.endswith("; the last good one is of step 1")
    assert os.listdir(runs) == ["step-1"], "what was written half keeps room from others"
    others.unlink()
    assert_last_is(runs, 1)


@pytest.mark.parametrize(("metadata", "left"), [(1 << 20, 0), (-(10**9), 700_000)], ids=["at once", "late"])
def test_a_training_that_goes_on_is_warned_and_saves_again_when_there_is_room(small_disk, monkeypatch, metadata, left):
    runs = small_disk / "runs"
    monkeypatch.setattr(_folder, "_METADATA", metadata)
    with with_one(runs, keep=1, on_save_error="continue") as checkpoints:
        others = fill(small_disk, left)
        with pytest.warns(CheckpointWarning, match=r"step-2 failed, \[Errno 28\].* the last good one is of step 1$"):
            assert save(checkpoints, 2, waits=True) == (metadata < 0)
        others.unlink()
        assert save(checkpoints, 3)
    assert_last_is(runs, 3)


def test_a_disk_that_cannot_be_written_to_is_named(small_disk):
    runs = small_disk / "runs"
    with with_one(runs) as checkpoints:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(CheckpointError, match=r"step-2 failed, \[Errno 30\] Read-only file system, of 1,600,004"):
            save(checkpoints, 2)
        assert_last_is(runs, 1)  # reading needs no room
    assert checkpoints.last == 1


def test_a_first_save_that_fails_says_what_is_there(tmp_path, monkeypatch):
    """A resumed training has checkpoints, although it has sealed none itself."""
    monkeypatch.setattr(_folder, "_METADATA", 1 << 60)
    with Checkpoints(tmp_path, step_of()) as checkpoints:
        with pytest.raises(CheckpointError, match=r"step-2 failed, \[Errno 28\] .*; there is none before it$"):
            save(checkpoints, 2)
        monkeypatch.undo()
        save(checkpoints, 1)
    monkeypatch.setattr(_folder, "_METADATA", 1 << 60)
    wrong = r"step-2 failed, \[Errno 28\] .*; the last one there is step-1$"
    with Checkpoints(tmp_path, step_of()) as checkpoints, pytest.raises(CheckpointError, match=wrong):
        save(checkpoints, 2)


@pytest.mark.parametrize("on_save_error", ["stop", "continue"])
def test_a_folder_that_has_vanished_is_named_once(tmp_path, on_save_error):
    """A warning is given once, and not again at the end."""
    runs, wrong = tmp_path / "runs", r"step-2 failed, \[Errno 2\] No such file or directory"
    stops = on_save_error == "stop"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with with_one(runs, on_save_error=on_save_error) as checkpoints:
            runs.rename(tmp_path / "elsewhere")
            with pytest.raises(CheckpointError, match=wrong) if stops else contextlib.nullcontext():
                save(checkpoints, 2)
            (tmp_path / "elsewhere").rename(runs)
            save(checkpoints, 3)
    told = [str(each.message) for each in seen if each.category is CheckpointWarning]
    assert [bool(re.search(wrong, text)) for text in told] == ([] if stops else [True])
    assert_last_is(runs, 3)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a file").write_text("")
    wrong = r"step-1 failed, \[Errno 20\] Not a directory, of [^;]*runs'$"
    with pytest.raises(CheckpointError, match=wrong), with_one(tmp_path / "a file" / "runs"):
        pass


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning_once(tmp_path):
    """It is a link here; the training goes on, and what can be removed is."""
    runs, link = tmp_path / "runs", tmp_path / "runs" / "step-1"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with with_one(runs, keep=1) as checkpoints:
            link.symlink_to(link.rename(tmp_path / "elsewhere"))
            for number in range(2, 6):
                assert save(checkpoints, number, waits=True)
                assert checkpoints.last == number
    assert [str(each.message) for each in seen if each.category is CheckpointWarning] == [
        f"{link} is no longer kept, but cannot be removed ([Errno 40] it is a symbolic link): remove it yourself"
    ]
    assert sorted(os.listdir(runs)) == ["step-1", "step-5"]
    assert_last_is(runs, 5)


@pytest.mark.slow
def test_of_echoes_only_those_of_orbax_are_dropped():
    """A callback to a closed loop that no Python code made, and a write of orbax that has not begun."""
    code = """
import asyncio, sys, weakref
from ipu_jax.training.checkpoints import _store
_store.drop_echoes()
loop = asyncio.new_event_loop()
loop.close()
class Late:
    pass
def from_python(_):
    loop.call_soon_threadsafe(print)
for callback in (loop.call_soon_threadsafe, from_python):
    late = Late()
    kept = weakref.ref(late, callback)
    del late
def async_serialize_from_host():
    async def write_fragment():
        pass
    return write_fragment()
async def other():
    pass
async_serialize_from_host()
other()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("RuntimeError: Event loop is closed") == 1
    assert "in from_python" in done.stderr
    assert done.stderr.count("was never awaited") == 1
    assert "coroutine 'other' was never awaited" in done.stderr


class FullDisk:
    """Stands in for a `Store`, and for the `Meetings`, of an instance whose disk is full."""

    def begin(self, folder: Path | None = None, arrays: Any = None) -> None:
        if folder is not None:
            folder.mkdir()

    def wait(self, check: Any) -> None:
        raise OSError(28, "No space left on device")

    def check(self) -> None:
        pass

    def fail(self, error: BaseException, errno: int | None) -> None:
        assert errno == 28


@pytest.mark.parametrize("instances", [1, 2])
def test_a_failed_saves_folder_stays_while_other_instances_may_write_to_it(tmp_path, monkeypatch, instances):
    disk: Any = FullDisk()
    writer = Writer(disk, disk, keep=1, seconds=1)
    monkeypatch.setattr(jax, "process_count", lambda: instances)
    writer.begin(Job(tmp_path / "step-1", 1, 1, {}), {})
    assert isinstance(writer.take_error(), OSError)
    assert [path.name for path in tmp_path.iterdir()] == ([] if instances == 1 else ["step-1.unsealed"])

"""Test what happens when the disk fails for real: it is full, read-only or gone. The last good checkpoint stays."""

import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import CheckpointError, Checkpoints, CheckpointWarning, TrainOptions, make_train_step
from ipu_jax.checkpoints import _folder
from ipu_jax.checkpoints._writer import Job, Writer

BYTES = 400_000 * 4 + 4
"""Of the state: weights, and the number of the step."""


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


@functools.cache
def step_of() -> Any:
    return make_train_step(lambda w, rows: jnp.mean((rows @ w) ** 2), optax.sgd(0.1), TrainOptions(donate=False))


def state_of(step: Any, value: int) -> Any:
    whole = step.whole(step.init(np.full((4, 100_000), value, np.float32)))
    return step.restore({**whole, "step": value})


def last_in(folder: Path) -> int | None:
    """Return the step of the checkpoint that is restored, and check that it is whole."""
    step = step_of()
    with Checkpoints(folder, step) as checkpoints:
        found = checkpoints.restore(state_of(step, 0))
    if found is None:
        return None
    assert np.all(np.asarray(found.state.params) == found.step)
    return found.step


def fill(folder: Path, left: int) -> Path:
    """Write a file that leaves so many bytes free."""
    path = folder / "other data"
    path.write_bytes(bytes(shutil.disk_usage(folder).free - left))
    return path


def test_a_disk_without_room_is_found_before_anything_is_written(small_disk):
    step, runs = step_of(), small_disk / "runs"
    with Checkpoints(runs, step) as checkpoints:
        checkpoints.save(state_of(step, 1), now=True)
        checkpoints.wait()
        fill(small_disk, 1_000_000)
        with pytest.raises(CheckpointError) as raised:
            checkpoints.save(state_of(step, 2), now=True)
        assert raised.value.errno == 28
        text = str(raised.value)
        begin = f"saving {runs}/step-2 failed, [Errno 28] No space left on device, of {BYTES:,} bytes: "
        assert text.startswith(begin)
        assert " bytes are free" in text
        assert text.endswith("; the last good one is of step 1")
    assert os.listdir(runs) == ["step-1"]
    assert last_in(runs) == 1


@pytest.mark.parametrize("metadata", [1 << 20, -(10**9)], ids=["found before", "found while it writes"])
def test_a_full_disk_leaves_the_checkpoint_of_the_step_that_is_saved_again(tmp_path, monkeypatch, metadata):
    """With room for one, and keep=1: the one that is there is all that the training has."""
    step = step_of()
    with _mounted(tmp_path / "disk", "3M") as disk, Checkpoints(disk / "runs", step, keep=1) as checkpoints:
        runs = disk / "runs"
        checkpoints.save(state_of(step, 1), now=True)
        checkpoints.wait()
        monkeypatch.setattr(_folder, "_METADATA", metadata)
        again = dataclasses.replace(state_of(step, 1))

        def save() -> None:
            checkpoints.save(again, now=True)
            checkpoints.wait()

        with pytest.raises(CheckpointError, match=r"step-1 failed, \[Errno 28\] .*; the last good one is of step 1$"):
            save()
        assert sorted(os.listdir(runs)) == [".lock", "step-1"]
        assert last_in(runs) == 1


@pytest.mark.parametrize("left", [0, 700_000, 1_603_000], ids=["at once", "half way", "at the end"])
def test_a_disk_that_gets_full_meanwhile_leaves_the_last_good_checkpoint(small_disk, monkeypatch, left):
    """Others fill the disk after the room was looked at: the errors are the file system's own."""
    step, runs = step_of(), small_disk / "runs"
    monkeypatch.setattr(_folder, "_METADATA", -(10**9))
    checkpoints = Checkpoints(runs, step)
    checkpoints.save(state_of(step, 1), now=True)
    checkpoints.wait()
    others = fill(small_disk, left)
    with pytest.raises(CheckpointError) as raised, checkpoints:
        checkpoints.save(state_of(step, 2), now=True)
    assert raised.value.errno == 28
    assert f"saving {runs}/step-2 failed, [Errno 28] No space left on device, of {BYTES:,} bytes" in str(raised.value)
    assert str(raised.value).endswith("; the last good one is of step 1")
    assert os.listdir(runs) == ["step-1"], "what was written half keeps room from others"
    others.unlink()
    assert last_in(runs) == 1


def test_a_training_that_goes_on_saves_again_when_there_is_room(small_disk):
    step, runs = step_of(), small_disk / "runs"
    with Checkpoints(runs, step, keep=1, on_save_error="continue") as checkpoints:
        assert checkpoints.save(state_of(step, 1), now=True)
        checkpoints.wait()
        others = fill(small_disk, 0)
        with pytest.warns(CheckpointWarning, match=r"step-2 failed, \[Errno 28\].* the last good one is of step 1$"):
            assert not checkpoints.save(state_of(step, 2), now=True)
        others.unlink()
        assert checkpoints.save(state_of(step, 3), now=True)
    assert last_in(runs) == 3


def test_a_late_error_is_a_warning_for_a_training_that_goes_on(small_disk, monkeypatch):
    step, runs = step_of(), small_disk / "runs"
    monkeypatch.setattr(_folder, "_METADATA", -(10**9))
    with Checkpoints(runs, step, on_save_error="continue") as checkpoints:
        checkpoints.save(state_of(step, 1), now=True)
        checkpoints.wait()
        others = fill(small_disk, 700_000)
        checkpoints.save(state_of(step, 2), now=True)
        with pytest.warns(CheckpointWarning, match=r"step-2 failed, \[Errno 28\]"):
            checkpoints.wait()
        others.unlink()
        checkpoints.save(state_of(step, 3), now=True)
    assert last_in(runs) == 3


def test_a_disk_that_cannot_be_written_to_is_named(small_disk):
    step, runs = step_of(), small_disk / "runs"
    with Checkpoints(runs, step) as checkpoints:
        checkpoints.save(state_of(step, 1), now=True)
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(CheckpointError, match=r"step-2 failed, \[Errno 30\] Read-only file system, of 1,600,004"):
            checkpoints.save(state_of(step, 2), now=True)
        assert last_in(runs) == 1  # reading needs no room
    assert checkpoints.last == 1


def test_a_folder_that_has_vanished_is_named(tmp_path):
    step, runs = step_of(), tmp_path / "runs"
    with Checkpoints(runs, step) as checkpoints:
        checkpoints.save(state_of(step, 1), now=True)
        checkpoints.wait()
        runs.rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match=r"step-2 failed, \[Errno 2\] No such file or directory"):
            checkpoints.save(state_of(step, 2), now=True)
        (tmp_path / "elsewhere").rename(runs)
        checkpoints.save(state_of(step, 3), now=True)
    assert last_in(runs) == 3


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a file").write_text("")
    step = step_of()
    wrong = r"failed, \[Errno 20\] Not a directory.*; there is none before it$"
    with Checkpoints(tmp_path / "a file" / "runs", step) as checkpoints, pytest.raises(CheckpointError, match=wrong):
        checkpoints.save(state_of(step, 1), now=True)


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning_once(tmp_path):
    """It is a link here; the training goes on, and what can be removed is."""
    step, runs, link = step_of(), tmp_path / "runs", tmp_path / "runs" / "step-1"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Checkpoints(runs, step, keep=1) as checkpoints:
            for number in range(1, 6):
                assert checkpoints.save(state_of(step, number), now=True)
                checkpoints.wait()
                if number == 1:
                    link.symlink_to(link.rename(tmp_path / "elsewhere"))
                assert checkpoints.last == number
    assert [str(each.message) for each in seen if each.category is CheckpointWarning] == [
        f"{link} is no longer kept, but cannot be removed ([Errno 40] it is a symbolic link): remove it yourself"
    ]
    assert sorted(os.listdir(runs)) == ["step-1", "step-5"]
    assert last_in(runs) == 5


def test_a_save_after_one_that_failed_is_no_warning(tmp_path):
    """A warning is given once, and not again at the end."""
    step, runs = step_of(), tmp_path / "runs"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Checkpoints(runs, step, on_save_error="continue") as checkpoints:
            checkpoints.save(state_of(step, 1), now=True)
            checkpoints.wait()
            runs.rename(tmp_path / "elsewhere")
            checkpoints.save(state_of(step, 2), now=True)
            (tmp_path / "elsewhere").rename(runs)
            checkpoints.save(state_of(step, 3), now=True)
    assert len([each for each in seen if each.category is CheckpointWarning]) == 1


def test_a_callback_to_a_closed_loop_is_dropped_only_if_no_python_code_made_it():
    code = """
import asyncio, sys, weakref
from ipu_jax.checkpoints import _echoes
_echoes.drop_echoes()
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
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("RuntimeError: Event loop is closed") == 1
    assert "in from_python" in done.stderr


def test_only_a_write_of_orbax_that_has_not_begun_may_never_begin():
    code = """
from ipu_jax.checkpoints import _echoes
_echoes.drop_echoes()
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

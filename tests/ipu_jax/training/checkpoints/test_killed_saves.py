"""Test that a kill before any change that a save makes to the folder loses no checkpoint that was sealed."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ipu_jax import Checkpoints
from ipu_jax.training.checkpoints import _folder, _seal
from support import killed_saves
from support.killed_saves import Deaths, restored, state_of, step_of


def sealed(folder: Path, number: int, value: float) -> Path:
    """Save a state, and return the folder of its checkpoint."""
    step = step_of()
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.save(state_of(step, number, value), now=True)
    return folder / f"step-{number}"


# what a killed save leaves is named when the training is resumed
left_overs_are_named = pytest.mark.filterwarnings(r"ignore:.*was left over from a save that did not end")


@left_overs_are_named
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the deaths
@pytest.mark.fast("every second change")
@pytest.mark.parametrize(
    ("number", "stride"), [(5, 2), (5, 1), (6, 1)], ids=["every second change", "the same step", "the next step"]
)
def test_a_kill_before_any_change_loses_nothing_that_was_sealed(tmp_path, monkeypatch, number, stride):
    """With keep=1 the only checkpoint is replaced; what is restored is the old one or the new one, whole."""
    deaths, step = Deaths(monkeypatch.setattr), step_of()
    before, after = state_of(step, 5, 1), state_of(step, number, 2)
    with Checkpoints(tmp_path / "first", step) as checkpoints:
        checkpoints.save(before, now=True)
    at, folder = 0, tmp_path
    for at in itertools.count(1, stride):
        folder = Path(shutil.copytree(tmp_path / "first", tmp_path / str(at)))
        killed = Checkpoints(folder, step, keep=1)
        with deaths.before(at):
            killed.save(after, now=True)
            killed.wait()
        killed.close()  # nothing is written any more, and the lock is freed as by the death of a process
        left = sorted(path.name for path in folder.iterdir())
        found = restored(folder)
        assert found in ([(number, 2)] if killed.last is not None else [(5, 1), (number, 2)]), (at, left)
        if not deaths.is_dead:
            break
        if at % 3 == 0:
            with Checkpoints(folder, step, keep=1) as checkpoints:
                checkpoints.save(state_of(step, 7, 3), now=True)
            assert [path.name for path in folder.iterdir()] == ["step-7"], (at, left)
    assert at > 20, "the changes of a save were not counted"
    assert [path.name for path in folder.iterdir()] == [f"step-{number}{'.2' if number == 5 else ''}"]


def run(folder: Path, number: int) -> subprocess.Popen[bytes]:
    tests = Path(killed_saves.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    return subprocess.Popen([sys.executable, killed_saves.__file__, str(folder), str(number)], env=environment)


@left_overs_are_named
@pytest.mark.slow
@pytest.mark.parametrize("rename", [1, 2, 3, 4, 5])
def test_kill_9_before_any_rename_loses_nothing(tmp_path, rename):
    """The renames: checksums, the seal and the new checkpoint get their names, and the old one is removed."""
    status = run(tmp_path, rename).wait(120)
    assert status == (-signal.SIGKILL if rename <= 4 else 0)
    assert restored(tmp_path) == ((5, 1) if rename <= 2 else (5, 2))


def moved(folder: Path, source: str, target: str) -> Path:
    (folder / source).rename(folder / target)
    return folder / target


@pytest.mark.parametrize("name", ["step-5.unsealed", "step-5.replaced", "step-5.9.unsealed"])
def test_a_whole_checkpoint_is_found_under_any_name_that_a_kill_leaves(tmp_path, name):
    """ "replaced" is of an earlier version. Only a process that holds the lock gives it its name."""
    moved(tmp_path, sealed(tmp_path, 5, 1).name, name)
    assert restored(tmp_path) == (5, 1)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with Checkpoints(tmp_path, step_of()) as checkpoints:
        checkpoints.lock()
    assert [path.name for path in tmp_path.iterdir()] == [name.rpartition(".")[0]]
    assert restored(tmp_path) == (5, 1)


def test_a_reader_finds_it_while_another_process_saves(tmp_path):
    """Without the lock nothing is renamed or removed."""
    moved(tmp_path, sealed(tmp_path, 5, 1).name, "step-5.unsealed")
    half = Path(shutil.copytree(tmp_path / "step-5.unsealed", tmp_path / "step-6.unsealed"))
    (half / _seal.SEAL).unlink()
    step = step_of()
    other = Checkpoints(tmp_path, step)
    other._lock.take()
    assert restored(tmp_path) == (5, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-5.unsealed", "step-6.unsealed"]
    other.close()


def test_of_two_whole_ones_of_a_step_the_later_is_found_and_stays(tmp_path):
    """As an earlier version leaves them that is killed before the last rename of a save of the same step."""
    old = moved(tmp_path, sealed(tmp_path, 5, 1).name, "kept")
    sealed(tmp_path, 4, 0)
    moved(tmp_path, sealed(tmp_path, 5, 2).name, "step-5.unsealed")
    moved(tmp_path, old.name, "step-5.replaced")
    assert restored(tmp_path) == (5, 2)
    sealed(tmp_path, 7, 3)
    left = {path.name: _seal.read_seal(path)["number"] for path in tmp_path.iterdir()}
    assert left == {"step-4": 1, "step-5.3": 2, "step-7": 3}


def test_a_save_whose_last_rename_fails_leaves_both(tmp_path, monkeypatch):
    """The new one is sealed by then: it gets its name as soon as that is possible."""
    sealed(tmp_path, 5, 1)
    step, usual = step_of(), Path.rename

    def rename(self: Path, target: Any) -> Path:
        if self.name == "step-5.2.unsealed" and Path(target).name == "step-5.2":
            raise OSError(5, "Input/output error")
        return usual(self, target)

    with Checkpoints(tmp_path, step, keep=1, on_save_error="continue") as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            checkpoints.save(state_of(step, 5, 2), now=True)
            with pytest.warns(UserWarning, match=r"step-5.2 failed, \[Errno 5\]"):
                checkpoints.wait()
        assert _seal.read_seal(tmp_path / "step-5")["number"] == 1
        assert [path.name for path in _folder.left_over_in(tmp_path)] == ["step-5.2.unsealed"]
        assert restored(tmp_path) == (5, 2)
        checkpoints.save(state_of(step, 6, 3), now=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-6"]

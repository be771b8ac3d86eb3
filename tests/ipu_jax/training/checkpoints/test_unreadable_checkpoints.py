"""Test that what cannot be read, or is of a newer version, is never taken for damaged, and never removed."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ipu_jax import Checkpoints
from ipu_jax.io import CheckpointError
from ipu_jax.training.checkpoints import _seal
from support import killed_saves
from support.killed_saves import restored, state_of, step_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with step-1, step-2 and step-3, whose weights are these numbers."""
    folder, step = tmp_path_factory.mktemp("saved"), step_of()
    with Checkpoints(folder, step) as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(state_of(step, number, number), now=True)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "runs"))


def refuse_to_read(monkeypatch: Any, number: int, *parts: str) -> None:
    """Have the operating system fail with this number for whoever opens a file whose path has these parts."""
    usual = os.open

    def opened(path: Any, *args: Any, **options: Any) -> Any:
        if set(parts) <= set(Path(path).parts):
            raise OSError(number, os.strerror(number), str(path))
        return usual(path, *args, **options)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_seal_that_cannot_be_read_is_an_error(folder, monkeypatch, number, resume):
    refuse_to_read(monkeypatch, number, "step-3", _seal.SEAL)
    step = step_of()
    like, why = (
        state_of(step, 0, 0),
        rf"ipu_jax\.json cannot be read \({os.strerror(number)}\): .* this user can read it",
    )
    with Checkpoints(folder, step) as checkpoints:
        may_be = rf"{folder}/step-3 may be the last checkpoint, and {why}; .* another one\. Nothing was removed"
        with pytest.raises(CheckpointError, match=may_be) as raised:
            checkpoints.restore(like, resume=resume)
        assert raised.value.errno == number
        with pytest.raises(CheckpointError, match=rf"{folder}/step-3 cannot be restored: {why}"):
            checkpoints.restore(like, resume=folder / "step-3")
        found = checkpoints.restore(like, resume=folder / "step-2")
    assert found is not None
    assert found.step == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2", "step-3"]


def test_an_array_that_cannot_be_read_is_an_error(folder, monkeypatch):
    refuse_to_read(monkeypatch, errno.EIO, "step-3", "manifest.ocdbt")
    with pytest.raises(CheckpointError, match=r"step-3 may be the last .*, and a file cannot be read \(.*Errno 5"):
        restored(folder)


def test_an_older_one_that_cannot_be_read_does_not_matter_and_stays(folder, monkeypatch):
    """Not even `keep` removes it, nor a save of its step, which gets another name."""
    refuse_to_read(monkeypatch, errno.EACCES, "step-1", _seal.SEAL)
    assert restored(folder) == (3, 3)
    step = step_of()
    with Checkpoints(folder, step, keep=1) as checkpoints:
        checkpoints.save(state_of(step, 4, 4), now=True)
        checkpoints.wait()
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-1", "step-4"]
        checkpoints.save(state_of(step, 1, 5), now=True)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-1.7"]
    monkeypatch.undo()
    assert _seal.read_seal(folder / "step-1")["number"] == 1
    assert restored(folder) == (1, 5)


def newer(checkpoint: Path) -> None:
    """Give a checkpoint the format of a version to come."""
    _seal._write(checkpoint / _seal.SEAL, {**_seal.read_seal(checkpoint), "format": 7})


def test_a_newer_format_is_an_error_and_stays(folder):
    for number in (2, 3):
        newer(folder / f"step-{number}")
    with pytest.raises(
        CheckpointError,
        match=r"step-3 may be the last checkpoint, and it has format 7, and this version reads format 1: use a newer "
        r"ipu_jax; or resume from the path of another one\. Nothing was removed$",
    ):
        restored(folder)
    step = step_of()
    with Checkpoints(folder, step, keep=1) as checkpoints:
        assert checkpoints.restore(state_of(step, 0, 0), resume=folder / "step-1") is not None
        checkpoints.save(state_of(step, 4, 4), now=True)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3", "step-4"]


def test_a_left_over_that_cannot_be_read_stays(folder, monkeypatch):
    (folder / "step-3").rename(folder / "step-3.unsealed")
    refuse_to_read(monkeypatch, errno.ESTALE, "step-3.unsealed")
    with pytest.raises(CheckpointError, match=r"step-3\.unsealed may be the last checkpoint"):
        restored(folder)
    monkeypatch.undo()
    assert restored(folder) == (3, 3)


def test_a_folder_that_cannot_be_listed_is_an_error(folder, monkeypatch):
    usual = os.listdir

    def refuses(path: Any = ".") -> Any:
        if path == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return usual(path)

    monkeypatch.setattr(os, "listdir", refuses)
    step = step_of()
    wrong = r"runs cannot be read \(\[Errno 13\] Permission denied: .*\): give a folder that this user can read"
    with Checkpoints(folder, step) as checkpoints:
        for resume in ("auto", "must", "never"):
            with pytest.raises(CheckpointError, match=wrong):
                checkpoints.restore(state_of(step, 0, 0), resume=resume)


AS_NOBODY = """
import os, sys, warnings
from support.killed_saves import restored, state_of, step_of
folder = sys.argv[1]
restored(folder)
for number in (2, 3):
    os.chmod(f"{folder}/step-{number}/ipu_jax.json", 0)
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    print("restored", restored(folder))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_another_user_begins_no_training_over_what_may_not_be_read(saved):
    """For real: by a user to whom the files are forbidden."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = shutil.copytree(saved, Path(parent) / "runs")
        folder.chmod(0o755)
        tests = Path(killed_saves.__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(folder)], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.startswith(
            f"CheckpointError {folder}/step-3 may be the last checkpoint, and ipu_jax.json cannot be read (Permission "
        )
        assert len(list(folder.iterdir())) == 3

"""Test that what cannot be read, or is of a newer version, is never taken for damaged, and never removed."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from ipu_jax import CheckpointError, Checkpoints, CheckpointWarning
from ipu_jax.checkpoints import _seal
from support import killed_saves
from support.harness import exactly
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
    usual = Path.open

    def opened(self: Path, *args: Any, **options: Any) -> Any:
        if set(parts) <= set(self.parts):
            raise OSError(number, os.strerror(number), str(self))
        return usual(self, *args, **options)

    monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_seal_that_cannot_be_read_is_an_error(folder, monkeypatch, number, resume):
    refuse_to_read(monkeypatch, number, "step-3", _seal.SEAL)
    step = step_of()
    why = f"ipu_jax.json cannot be read ({os.strerror(number)}): see that this user can read it"
    message = (
        f"{folder}/step-3 may be the last checkpoint, and {why}; or resume from the path of another one. "
        "Nothing was removed"
    )
    with Checkpoints(folder, step) as checkpoints:
        with pytest.raises(CheckpointError, match=exactly(message)) as raised:
            checkpoints.restore(state_of(step, 0, 0), resume=resume)
        assert raised.value.errno == number
        with pytest.raises(CheckpointError, match=exactly(f"{folder}/step-3 cannot be restored: {why}")):
            checkpoints.restore(state_of(step, 0, 0), resume=folder / "step-3")
        found = checkpoints.restore(state_of(step, 0, 0), resume=folder / "step-2")
    assert found is not None
    assert found.step == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2", "step-3"]


def test_an_array_that_cannot_be_read_is_an_error(folder, monkeypatch):
    refuse_to_read(monkeypatch, errno.EIO, "step-3", "manifest.ocdbt")
    with pytest.raises(
        CheckpointError, match=r"step-3 may be the last checkpoint, and a file cannot be read \(.*Errno 5"
    ):
        restored(folder)


def test_an_older_one_that_cannot_be_read_does_not_matter_and_stays(folder, monkeypatch):
    """Not even `keep` removes it, nor a save of its step."""
    refuse_to_read(monkeypatch, errno.EACCES, "step-1", _seal.SEAL)
    assert restored(folder) == (3, 3)
    step = step_of()
    with Checkpoints(folder, step, keep=1) as checkpoints:
        checkpoints.save(state_of(step, 4, 4), now=True)
        checkpoints.wait()
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-1", "step-4"]
        message = (
            rf"saving {folder}/step-1 failed, \[Errno 13\] Permission denied, of \d+ bytes: {folder}/step-1 is there, "
            r"and ipu_jax.json cannot be read \(Permission denied\): see that this user can read it, or move it "
            r"elsewhere; the last good one is of step 4$"
        )
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(state_of(step, 1, 5), now=True)
    monkeypatch.undo()
    assert _seal.read_seal(folder / "step-1")["step"] == 1


def newer(checkpoint: Path) -> None:
    """Give a checkpoint the format of a version to come."""
    write_seal(checkpoint, {**_seal.read_seal(checkpoint), "format": 7})


def write_seal(checkpoint: Path, content: Any) -> None:
    text = json.dumps(content).encode()
    (checkpoint / _seal.SEAL).write_bytes(b"%d\n" % zlib.crc32(text) + text)


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
    (folder / "step-3").rename(folder / "step-3.removed")
    refuse_to_read(monkeypatch, errno.ESTALE, "step-3.removed")
    with pytest.raises(CheckpointError, match=r"step-3\.removed may be the last checkpoint"):
        restored(folder)
    monkeypatch.undo()
    assert restored(folder) == (3, 3)


def test_a_folder_that_cannot_be_listed_is_an_error(folder, monkeypatch):
    usual = os.scandir

    def refuses(path: Any = ".") -> Any:
        if path == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return usual(path)

    monkeypatch.setattr(os, "scandir", refuses)
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


WRONG_SEALS: dict[str, tuple[Any, str]] = {
    "a list": (lambda seal: [seal], "its format is None"),
    "a number": (lambda seal: 3, "its format is None"),
    "no format": (lambda seal: {**seal, "format": None}, "its format is None"),
    "an older format": (lambda seal: {**seal, "format": 0}, "its format is 0"),
    "a bool for a format": (lambda seal: {**seal, "format": True}, "its format is True"),
    "no number": (lambda seal: {name: seal[name] for name in seal if name != "number"}, "it has no number"),
    "no files": (lambda seal: {name: seal[name] for name in seal if name != "files"}, "it has no files"),
    "a text for a number": (lambda seal: {**seal, "number": "3"}, "its number is '3'"),
    "a list of files": (lambda seal: {**seal, "files": ["a"]}, "its files is \"['a']\""),
    "files without sizes": (lambda seal: {**seal, "files": {"a": 3}}, "its files is \"{'a': 3}\""),
    "no model": (lambda seal: {**seal, "model": None}, "its model is 'None'"),
    "an empty model": (lambda seal: {**seal, "model": {}}, "its model is not described"),
    "leaves that are none": (
        lambda seal: {**seal, "model": {**seal["model"], "leaves": {"params": [{"a": 1}]}}},
        "its model is not described",
    ),
    "arrays without shapes": (
        lambda seal: {**seal, "model": {**seal["model"], "arrays": {"a": {"dtype": "f", "shape": ["x"]}}}},
        "its model has other shapes or names",
    ),
    "no description": (lambda seal: {**seal, "describes": []}, "its describes is '[]'"),
}


@pytest.mark.parametrize("name", WRONG_SEALS)
def test_a_seal_with_another_content_is_damaged(folder, name):
    """Its checksum is right: nobody's bit was flipped, but another program wrote it."""
    change, why = WRONG_SEALS[name]
    write_seal(folder / "step-3", change(_seal.read_seal(folder / "step-3")))
    message = f"{folder}/step-3 cannot be restored, ipu_jax.json is damaged ({why}): it is skipped"
    with pytest.warns(CheckpointWarning, match=exactly(message)):
        assert restored(folder) == (2, 2)
    step = step_of()
    with Checkpoints(folder, step) as checkpoints, pytest.raises(CheckpointError, match=r"ipu_jax\.json is damaged"):
        checkpoints.restore(state_of(step, 0, 0), resume=folder / "step-3")


@pytest.mark.parametrize("folder", ["", None, 3, "a\0b", Path("a\0b")])
def test_what_is_no_folder_is_refused(folder):
    with pytest.raises(ValueError, match=exactly(f"folder={folder!r} is not a path: give one such as 'runs/mnist'")):
        Checkpoints(folder, step_of())


def test_a_file_is_no_folder(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ValueError, match=exactly(f"folder='{path}' is not a folder: give one, or a name that is free")):
        Checkpoints(path, step_of())
    step = step_of()
    wrong = r"file/runs cannot be read \(\[Errno 20\] Not a directory"
    with Checkpoints(path / "runs", step) as checkpoints, pytest.raises(CheckpointError, match=wrong):
        checkpoints.restore(state_of(step, 0, 0))


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("latest", "resume='latest' is neither 'auto', 'must' nor 'never', and there is no folder {cwd}/latest"),
        ("", "resume='' is not a path: give one of a checkpoint, or 'auto', 'must' or 'never'"),
        (None, "resume=None is not a path: give one of a checkpoint, or 'auto', 'must' or 'never'"),
        (True, "resume=True is not a path: give one of a checkpoint, or 'auto', 'must' or 'never'"),
    ],
)
def test_what_is_no_way_to_resume_is_refused(tmp_path, monkeypatch, resume, message):
    monkeypatch.chdir(tmp_path)
    step = step_of()
    wrong = exactly(message.format(cwd=tmp_path))
    with Checkpoints("runs", step) as checkpoints, pytest.raises(ValueError, match=wrong):
        checkpoints.restore(state_of(step, 0, 0), resume=resume)

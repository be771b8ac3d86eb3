"""Test what cannot be read, is of a newer version, or was planted by others: it is one error, and harms nothing.

It is never taken for damaged, and never removed, and reading a folder writes nothing.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from ipu_jax import Checkpoints
from ipu_jax.io import CheckpointError, import_weights
from ipu_jax.training.checkpoints import _seal
from support import killed_saves
from support.killed_saves import restored, state_of, step_of

pytestmark = pytest.mark.timeout(120)  # a pipe or a device without an end would take for ever


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


# what others plant


@pytest.fixture
def two(folder: Path) -> Path:
    """Return the folder without step-3, beside a file that nobody may write to."""
    shutil.rmtree(folder / "step-3")
    (folder.parent / "precious").write_text("my thesis")
    return folder


def as_it_is(two: Path) -> list[tuple[str, os.stat_result]]:
    """Return what a write of any kind would change; reading changes the times of access only."""
    found = [(str(path), path.lstat()) for path in sorted([two, *two.rglob("*")])]
    return [(path, os.stat_result((*stat[:7], 0, *stat[8:10]))) for path, stat in found]


def link(path: Path) -> None:
    path.symlink_to("../precious")


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    os.mkfifo(path)


KINDS = [link, device, loop, pipe]


@pytest.mark.parametrize("plant", [None, *KINDS])
def test_to_restore_writes_nothing(two: Path, plant: Callable[[Path], None] | None) -> None:
    (two / "step-2").rename(two / "step-2.unsealed")
    shutil.copytree(two / "step-1", two / "step-1.removed")
    (two / "step-7.unsealed.orbax-checkpoint-tmp").mkdir()
    if plant is not None:
        plant(two / ".lock")
    before = as_it_is(two)
    assert restored(two) == (2, 2)
    assert as_it_is(two) == before
    assert (two.parent / "precious").read_text() == "my thesis"


@pytest.mark.parametrize("plant", KINDS)
def test_a_planted_lock_is_one_error_and_overwrites_nothing(two: Path, plant: Callable[[Path], None]) -> None:
    plant(two / ".lock")
    with Checkpoints(two, step_of()) as checkpoints:
        with pytest.raises(CheckpointError, match=r"runs cannot be locked: .*(link|[Nn]ot a regular file)"):
            checkpoints.lock()
        with pytest.raises(CheckpointError, match=r"saving .*/step-3 failed, .*(link|[Nn]ot a regular file)"):
            checkpoints.save(state_of(step_of(), 3, 3), now=True)
    assert (two.parent / "precious").read_text() == "my thesis"
    assert sorted(path.name for path in two.iterdir()) == [".lock", "step-1", "step-2"]


@pytest.mark.parametrize("plant", KINDS)
@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_planted_seal_is_one_error(two: Path, plant: Callable[[Path], None], resume: str) -> None:
    (two / "step-2" / _seal.SEAL).unlink()
    plant(two / "step-2" / _seal.SEAL)
    assert_refused(two, resume, "step-2 (may be the last checkpoint|cannot be restored).*cannot be read")


def sealed_with(two: Path, name: str, size: int, checksum: int) -> None:
    """Let the seal of step-2 also list this file."""
    facts = _seal.read_seal(two / "step-2")
    facts["files"][name] = [size, checksum]
    (two / "step-2" / _seal.SEAL).unlink()
    _seal._write(two / "step-2" / _seal.SEAL, facts)


def assert_refused(two: Path, resume: str, words: str) -> None:
    at, like = two / "step-2" if resume == "path" else resume, state_of(step_of(), 0, 0)
    with Checkpoints(two, step_of()) as checkpoints, pytest.raises(CheckpointError, match=words):
        checkpoints.restore(like, resume=at)


@pytest.mark.parametrize("plant", [device, pipe])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_planted_file_of_a_checkpoint_is_one_error(two: Path, plant: Callable[[Path], None], is_listed: bool) -> None:
    """Also one that the seal does not list: orbax looks for files on its own."""
    plant(two / "step-2" / "_METADATA2")
    if is_listed:
        sealed_with(two, "_METADATA2", 0, 0)
    for resume in ("auto", "path"):
        assert_refused(two, resume, "a file cannot be read .*(link|[Nn]ot a regular file)")


@pytest.mark.parametrize("name", ["../../precious", "/etc/passwd", "a/../../step-1/ipu_jax.json"])
def test_a_seal_that_names_files_outside_its_folder_is_damaged(two: Path, name: str) -> None:
    file = Path(os.path.normpath(two / "step-2" / name))
    sealed_with(two, name, *_seal._checksum(file))
    with pytest.warns(UserWarning, match=rf"step-2 cannot be restored, .* names '{name}', which is outside its folder"):
        assert restored(two) == (1, 1)


def test_the_probe_of_a_save_follows_no_link(two: Path) -> None:
    link(two / f".probe-{os.getpid()}")
    with Checkpoints(two, step_of()) as checkpoints:
        checkpoints.save(state_of(step_of(), 3, 3), now=True)
    assert (two.parent / "precious").read_text() == "my thesis"
    assert restored(two) == (3, 3)


# weight files

LIKE = {"a": jax.ShapeDtypeStruct((4,), "float32")}


def test_an_index_that_names_an_index_is_one_error(tmp_path: Path) -> None:
    one, other = (tmp_path / f"{name}.safetensors.index.json" for name in ("one", "other"))
    for first, second in ((one, one), (one, other)):
        first.write_text(json.dumps({"weight_map": {"a": second.name}}))
        second.write_text(json.dumps({"weight_map": {"a": first.name}}))
        with pytest.raises(ValueError, match=r"names '\w+\.safetensors\.index\.json', which is an index, too"):
            import_weights(one, LIKE)


@pytest.mark.parametrize("name", ["w.safetensors", "w.safetensors.index.json"])
def test_a_pipe_or_a_device_is_no_weight_file_and_a_link_to_a_file_is(tmp_path: Path, name: str) -> None:
    for plant in (device, loop, pipe):
        plant(tmp_path / name)
        with pytest.raises(OSError, match=r"[Nn]ot a regular file|Too many levels of symbolic links"):
            import_weights(tmp_path / name, LIKE)
        (tmp_path / name).unlink()
    np.savez(tmp_path / "blob.npz", a=np.arange(4, dtype=np.float32))
    (tmp_path / "linked.npz").symlink_to("blob.npz")  # as in the cache of Hugging Face
    assert import_weights(tmp_path / "linked.npz", LIKE)["a"].tolist() == [0, 1, 2, 3]

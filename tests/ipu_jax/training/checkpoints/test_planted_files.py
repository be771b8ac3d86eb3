"""Test that reading a folder writes nothing, and that what others plant there is one error that harms nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from ipu_jax import Checkpoints
from ipu_jax.io import CheckpointError, import_weights
from ipu_jax.training.checkpoints import _seal
from support.killed_saves import restored, state_of, step_of

pytestmark = pytest.mark.timeout(120)  # a pipe or a device without an end would take for ever


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with step-1 and step-2, whose weights are these numbers."""
    folder, step = tmp_path_factory.mktemp("saved"), step_of()
    with Checkpoints(folder, step) as checkpoints:
        for number in (1, 2):
            checkpoints.save(state_of(step, number, number), now=True)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    (tmp_path / "precious").write_text("my thesis")
    return Path(shutil.copytree(saved, tmp_path / "runs"))


def as_it_is(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Return what a write of any kind would change; reading changes the times of access only."""
    found = [(str(path), path.lstat()) for path in sorted([folder, *folder.rglob("*")])]
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
def test_to_restore_writes_nothing(folder: Path, plant: Callable[[Path], None] | None) -> None:
    (folder / "step-2").rename(folder / "step-2.unsealed")
    shutil.copytree(folder / "step-1", folder / "step-1.removed")
    (folder / "step-7.unsealed.orbax-checkpoint-tmp").mkdir()
    if plant is not None:
        plant(folder / ".lock")
    before = as_it_is(folder)
    assert restored(folder) == (2, 2)
    assert as_it_is(folder) == before
    assert (folder.parent / "precious").read_text() == "my thesis"


@pytest.mark.parametrize("plant", KINDS)
def test_a_planted_lock_is_one_error_and_overwrites_nothing(folder: Path, plant: Callable[[Path], None]) -> None:
    plant(folder / ".lock")
    with Checkpoints(folder, step_of()) as checkpoints:
        with pytest.raises(CheckpointError, match=r"runs cannot be locked: .*(link|[Nn]ot a regular file)"):
            checkpoints.lock()
        with pytest.raises(CheckpointError, match=r"saving .*/step-3 failed, .*(link|[Nn]ot a regular file)"):
            checkpoints.save(state_of(step_of(), 3, 3), now=True)
    assert (folder.parent / "precious").read_text() == "my thesis"
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-1", "step-2"]


@pytest.mark.parametrize("plant", KINDS)
@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_planted_seal_is_one_error(folder: Path, plant: Callable[[Path], None], resume: str) -> None:
    (folder / "step-2" / _seal.SEAL).unlink()
    plant(folder / "step-2" / _seal.SEAL)
    assert_refused(folder, resume, "step-2 (may be the last checkpoint|cannot be restored).*cannot be read")


def sealed_with(folder: Path, name: str, size: int, checksum: int) -> None:
    """Let the seal of step-2 also list this file."""
    facts = _seal.read_seal(folder / "step-2")
    facts["files"][name] = [size, checksum]
    (folder / "step-2" / _seal.SEAL).unlink()
    _seal._write(folder / "step-2" / _seal.SEAL, facts)


def assert_refused(folder: Path, resume: str, words: str) -> None:
    at, like = folder / "step-2" if resume == "path" else resume, state_of(step_of(), 0, 0)
    with Checkpoints(folder, step_of()) as checkpoints, pytest.raises(CheckpointError, match=words):
        checkpoints.restore(like, resume=at)


@pytest.mark.parametrize("plant", [device, pipe])
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_planted_file_of_a_checkpoint_is_one_error(
    folder: Path, plant: Callable[[Path], None], is_listed: bool
) -> None:
    """Also one that the seal does not list: orbax looks for files on its own."""
    plant(folder / "step-2" / "_METADATA2")
    if is_listed:
        sealed_with(folder, "_METADATA2", 0, 0)
    for resume in ("auto", "path"):
        assert_refused(folder, resume, "a file cannot be read .*(link|[Nn]ot a regular file)")


@pytest.mark.parametrize("name", ["../../precious", "/etc/passwd", "a/../../step-1/ipu_jax.json"])
def test_a_seal_that_names_files_outside_its_folder_is_damaged(folder: Path, name: str) -> None:
    file = Path(os.path.normpath(folder / "step-2" / name))
    sealed_with(folder, name, *_seal._checksum(file))
    with pytest.warns(UserWarning, match=rf"step-2 cannot be restored, .* names '{name}', which is outside its folder"):
        assert restored(folder) == (1, 1)


def test_the_probe_of_a_save_follows_no_link(folder: Path) -> None:
    link(folder / f".probe-{os.getpid()}")
    with Checkpoints(folder, step_of()) as checkpoints:
        checkpoints.save(state_of(step_of(), 3, 3), now=True)
    assert (folder.parent / "precious").read_text() == "my thesis"
    assert restored(folder) == (3, 3)


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

"""Test that a checkpoint that is damaged in any way is found, named and skipped for the one before it."""

import errno
import functools
import os
import re
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Checkpoints, TrainOptions, make_train_step
from ipu_jax.io import CheckpointError, CheckpointWarning
from ipu_jax.training.checkpoints import _folder, _seal
from ipu_jax.training.checkpoints._seal import SEAL


@functools.cache
def step_of() -> Any:
    loss_fn = lambda params, rows: jnp.mean((rows @ params["w"]) ** 2)
    return make_train_step(loss_fn, optax.adam(0.1), TrainOptions(replication_factor=2, donate=False))


def state_with(step: Any, value: int) -> Any:
    """Return a state of so many updates, whose weights are this number, too."""
    whole = step.whole(step.init({"w": np.full((700, 3), value, np.float32)}))
    return step.restore({**whole, "step": value})


def save(folder: Path, *values: int, **options: Any) -> None:
    step = step_of()
    with Checkpoints(folder, step, **options) as checkpoints:
        for value in values:
            checkpoints.save(state_with(step, value), {"epoch": value}, now=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with the checkpoints step-1 and step-2."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 1, 2)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """Return a copy of that folder."""
    return Path(shutil.copytree(saved, tmp_path / "runs"))


def restored(folder: Path, resume: Any = "auto") -> tuple[Any, list[str]]:
    """Return what was restored, and the warnings."""
    step = step_of()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with Checkpoints(folder, step) as checkpoints:
            found = checkpoints.restore(state_with(step, 0), resume=resume)
    if found is not None:
        assert np.all(np.asarray(found.state.params["w"]) == found.step), "the weights are of another checkpoint"
        assert found.feed == {"epoch": found.step}
    assert {each.category for each in seen} <= {CheckpointWarning}
    return found, [str(each.message) for each in seen]


def largest(checkpoint: Path) -> Path:
    """Return the file with the arrays."""
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def test_one_flipped_bit_in_any_file_is_found(folder):
    names = [path.relative_to(folder / "step-2") for path in (folder / "step-2").rglob("*") if path.is_file()]
    assert len(names) > 8
    for name in names:
        path = folder / "step-2" / name
        before = path.read_bytes()
        flip(path, len(before) // 2)
        found, warnings_ = restored(folder)
        assert len(warnings_) == 1, name
        (warned,) = warnings_
        assert found.step == 1, name
        why = "ipu_jax.json is damaged (its checksum differs)" if name.name == SEAL else f"{name} was changed"
        assert warned == f"{folder}/step-2 cannot be restored, {why}: it is skipped"
        path.write_bytes(before)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Any, str]] = {
    "a truncated file": (lambda at: cut(largest(at)), "{name} has another size"),
    "an empty file": (lambda at: largest(at).write_bytes(b""), "{name} has another size"),
    "a missing file": (lambda at: largest(at).unlink(), "{name} is missing"),
    "half of the files": (
        lambda at: [shutil.rmtree(at / "ocdbt.process_0"), shutil.rmtree(at / "d")],
        " is missing, and so on for ",
    ),
    "no seal": (lambda at: (at / SEAL).unlink(), "it has no seal, ipu_jax.json"),
    "an empty folder": (lambda at: [shutil.rmtree(at), at.mkdir()], "it has no seal, ipu_jax.json"),
    "half a seal": (lambda at: cut(at / SEAL), "ipu_jax.json is damaged (its checksum differs)"),
    "an empty seal": (lambda at: (at / SEAL).write_bytes(b""), "ipu_jax.json is damaged (its checksum differs)"),
}

# the checksum is right: nobody's bit was flipped, but another program wrote it
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


def another_seal(change: Any, why: str) -> tuple[Any, str]:
    return lambda at: _seal._write(at / SEAL, change(_seal.read_seal(at))), f"ipu_jax.json is damaged ({why})"


DAMAGES |= {name: another_seal(*wrong) for name, wrong in WRONG_SEALS.items()}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(folder, name):
    damage, why = DAMAGES[name]
    at = folder / "step-2"
    why = why.replace("{name}", str(largest(at).relative_to(at)))
    damage(at)
    found, (warned,) = restored(folder)
    assert found.step == 1
    assert warned.startswith(f"{at} cannot be restored, ")
    assert warned.endswith(": it is skipped")
    assert why in warned
    assert "\n" not in warned
    with pytest.raises(CheckpointError, match=re.escape(f"{at} cannot be restored: ")):
        restored(folder, at)


def test_what_a_killed_save_leaves_is_named_and_removed_by_the_next_save(folder):
    left_over = folder / "step-3.unsealed"
    shutil.copytree(folder / "step-2", left_over)
    (left_over / SEAL).unlink()
    found, warned = restored(folder)
    assert (found.step, warned) == (2, [])
    assert left_over.exists(), "without the lock nothing is removed"
    with pytest.warns(CheckpointWarning, match=rf"^{left_over} was left over from a save that .* end: it is removed$"):
        save(folder, 3)
    assert restored(folder)[0].step == 3
    assert not left_over.exists()


def test_a_training_that_has_nothing_left_to_save_removes_and_names_it_once(folder):
    """As `fit` resumes: it locks the folder before it looks for a checkpoint."""
    left_over = folder / "step-2.7.unsealed.orbax-checkpoint-tmp"
    left_over.mkdir()
    step = step_of()
    for expected in ([left_over], []):
        with warnings.catch_warnings(record=True) as seen, Checkpoints(folder, step) as checkpoints:
            warnings.simplefilter("always")
            checkpoints.lock()
            assert checkpoints.restore(state_with(step, 0)) is not None
        assert [str(each.message).split(" was left over")[0] for each in seen] == [str(path) for path in expected]
        assert listed(folder) == ["step-1", "step-2"]


def test_a_leftover_that_cannot_be_removed_is_named_and_costs_no_time(folder, monkeypatch):
    left_over, usual = folder / "step-2.7.unsealed", shutil.rmtree
    left_over.mkdir()

    def rmtree(path: Any, *args: Any, **options: Any) -> None:
        if "step-2.7" in str(path):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        usual(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    monkeypatch.setattr(_folder.time, "sleep", lambda seconds: pytest.fail("it waits for what does not change"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        save(folder, 3, 4, 5)
    assert [str(each.message) for each in seen] == [
        f"{left_over}.removed is no longer kept, but cannot be removed ([Errno 1] Operation not permitted): remove it "
        "yourself"
    ]


def test_a_checkpoint_that_does_not_get_its_name_is_found_and_stops_nothing(folder, monkeypatch):
    unnamed, usual = (folder / "step-2").rename(folder / "step-2.unsealed"), Path.rename
    (folder / "step-7.unsealed").mkdir()

    def rename(self: Path, target: Any) -> Path:
        if self == unnamed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return usual(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with Checkpoints(folder, step_of()) as checkpoints:
        with pytest.warns(CheckpointWarning, match=r"step-7\.unsealed was left over"):
            checkpoints.lock()
        found = checkpoints.restore(state_with(step_of(), 0))
    assert found is not None
    assert (found.step, listed(folder)) == (2, ["step-1", "step-2.unsealed"])


def test_a_removal_that_was_cut_off_is_finished_when_the_training_goes_on(folder):
    half_gone = folder / "step-1.removed"
    (folder / "step-1").rename(half_gone)
    found, warned = restored(folder)
    assert (found.step, warned, listed(folder)) == (2, [], ["step-1.removed", "step-2"])
    save(folder, 3)
    assert listed(folder) == ["step-2", "step-3"]


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_other_files_and_copies_in_the_folder_do_not_matter(folder):
    (folder / "step-9").write_text("a file")
    (folder / "notes.txt").write_text("mine")
    shutil.copytree(folder / "step-2", folder / "step-2 (copy)")
    found, warned = restored(folder)
    assert (found.step, warned) == (2, [])


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_if_all_are_damaged_the_caller_decides(folder, resume):
    cut(largest(folder / "step-1"))
    (folder / "step-2" / SEAL).unlink()
    before = contents(folder)
    wrong = f"step-2, it has no seal, {SEAL}; step-1, {largest(folder / 'step-1').relative_to(folder / 'step-1')}"
    with pytest.raises(CheckpointError, match=rf"whole: {re.escape(wrong)} .*Nothing was removed: .*to another folder"):
        restored(folder, resume)
    assert contents(folder) == before


def test_damaged_ones_are_named_up_to_five(folder):
    for number in range(3, 8):
        (folder / f"step-{number}").mkdir()
    for number in (1, 2):
        cut(largest(folder / f"step-{number}"))
    with pytest.raises(CheckpointError, match=r"whole: step-7, .*; step-3, it has no seal, ipu_jax.json; and 2 more\."):
        restored(folder)


def test_saves_never_remove_a_damaged_one(folder):
    """Not even if nothing was restored before; a whole one that is no longer kept goes."""
    flip(largest(folder / "step-1"), 7)
    before = contents(folder / "step-1")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        save(folder, 3, 4, 5, keep=1)
    assert [str(each.message) for each in seen] == [
        f"{folder}/step-1 is no longer kept, but cannot be removed (it is damaged, and only whole checkpoints are "
        "removed): remove it yourself"
    ]
    assert (listed(folder), contents(folder / "step-1")) == (["step-1", "step-5"], before)


def test_a_folder_of_the_user_stays_whatever_its_name_begins_with(folder):
    for name in ("step-7.unsealed-notes", "step-7.unsealed.txt", "step-7.removed-plots", "step-7.unsealed"):
        (folder / name).mkdir()
        (folder / name / "mine").write_text("mine")
    with pytest.warns(CheckpointWarning, match=r"step-7\.unsealed was left over .*: it is removed"):
        save(folder, 7, keep=1)
    assert listed(folder) == ["step-7", "step-7.removed-plots", "step-7.unsealed-notes", "step-7.unsealed.txt"]


@pytest.mark.parametrize(
    "names", [["step-8"], ["step-8.unsealed"], ["step-8.replaced", "step-8.3", "step-8.4.unsealed"]]
)
def test_files_with_names_that_a_save_would_give_stay(folder, names):
    for name in names:
        (folder / name).write_text("mine")
    save(folder, 8)
    assert listed(folder) == sorted([*names, "step-1", "step-2", f"step-8.{5 if len(names) > 1 else 3}"])
    assert restored(folder)[0].step == 8


@pytest.mark.parametrize("is_own", [True, False])
def test_a_running_save_is_not_left_over(folder, monkeypatch, is_own):
    """Neither for the training that saves, nor for a reader beside it."""
    step, is_sealing, is_read, write_seal = step_of(), threading.Event(), threading.Event(), _seal.write_seal
    monkeypatch.setattr(_seal, "write_seal", lambda *a, **k: (is_sealing.set(), is_read.wait(60), write_seal(*a, **k)))
    with Checkpoints(folder, step) as checkpoints, Checkpoints(folder, step) as reader:
        checkpoints.save(state_with(step, 3), {"epoch": 3}, now=True)
        assert is_sealing.wait(60)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = (checkpoints if is_own else reader).restore(state_with(step, 0))
            assert (folder / "step-3.unsealed").is_dir()
        finally:
            is_read.set()
        assert found is not None
        assert found.step == 2


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_one_checkpoint_is_restored_by_its_path(folder):
    found, _ = restored(folder, folder / "step-1")
    assert (found.step, found.path) == (1, folder / "step-1")
    moved = folder.parent / "best"
    (folder / "step-1").rename(moved)
    assert restored(folder, str(moved))[0].step == 1
    flip(largest(moved), 5)
    changed = largest(moved).relative_to(moved)
    with pytest.raises(CheckpointError, match=rf"{moved} cannot be restored: {changed} was changed"):
        restored(folder, moved)
    with pytest.raises(CheckpointError, match=r"/none cannot be restored: there is no such"):
        restored(folder, folder / "none")


def test_must_is_for_folders_with_checkpoints_and_never_for_those_without(folder, tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path} holds no checkpoint: .* or resume='auto' for a fresh"):
        restored(tmp_path, "must")
    with pytest.raises(ValueError, match=rf"'never', but {folder} holds step-2: give another .* resume='auto'"):
        restored(folder, "never")
    assert restored(tmp_path / "new", "never") == (None, [])
    assert restored(tmp_path / "new", "auto") == (None, [])


@pytest.mark.parametrize("damage", [lambda at: flip(largest(at), 3), lambda at: (at / SEAL).unlink()])
def test_a_damaged_one_is_replaced_when_the_training_passes_it_again(folder, damage):
    damage(folder / "step-2")
    step = step_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        with Checkpoints(folder, step) as checkpoints:
            found = checkpoints.restore(state_with(step, 0))
            assert found is not None
            assert found.step == 1
            checkpoints.save(state_with(step, 2), {"epoch": 2}, now=True)
    assert restored(folder)[0].step == 2
    assert len(listed(folder)) == 2

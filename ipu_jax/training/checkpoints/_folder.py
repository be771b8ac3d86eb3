"""Find the checkpoints in a folder, name a new one, and remove those that are no longer kept.

    runs/mnist/step-200                 a checkpoint: a folder with a seal
    runs/mnist/step-200.7               the same step, saved again as save 7: a name that nothing had before
    runs/mnist/step-300.unsealed        being saved, or left over from a save that was killed
    runs/mnist/step-100.removed         being removed

The seal decides, and the number in it says which checkpoint was saved last. No save takes a name that is there, so none
moves a checkpoint out of its way, and a kill between any two changes loses none.

Nothing here imports jax.
"""

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from ipu_jax.base.annotations import Json
from ipu_jax.base.opening import sync_folder
from ipu_jax.training.checkpoints import _seal
from ipu_jax.training.checkpoints.errors import CheckpointError, UnreadableError

_NAME: Final = re.compile(r"step-(\d+)(\.\d+)?")
# Every other name is the user's. orbax writes to a folder with a longer name. "replaced": versions before 2026-12 gave
# this name to a checkpoint whose successor was sealed; to be forgotten in 2027-12
_LEFT_OVER: Final = re.compile(rf"({_NAME.pattern})\.(unsealed(\.orbax-checkpoint-tmp(-\d+)?)?|replaced|removed)")
_LOOK_EVERY: Final = 0.05
_METADATA: Final = 1 << 20  # bytes that orbax and the seal write besides the arrays, at most

_PROBE: Final = 1 << 12

Failures = list[tuple[Path, Exception]]
"""Folders that could not be removed, and why."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A folder that is named like a checkpoint, or is left over from a save and has a seal.

    Attributes:
        path: the folder.
        seal: the content of its seal; None if it has no readable seal.
        wrong: what is wrong with it, or "".
        is_unreadable: whether it can still be whole for another user or a newer version.
        errno: the operating system's error number if it cannot be read, or None.
    """

    path: Path
    seal: dict[str, Json] | None
    wrong: str = ""
    is_unreadable: bool = False
    errno: int | None = None

    @property
    def number(self) -> int:
        """Return its number in the order of the saves; -1 if it is not known."""
        return -1 if self.seal is None else self.seal["number"]

    @property
    def step(self) -> int:
        """Return the step in its name."""
        return int(self.path.name.removeprefix("step-").partition(".")[0])


def path_for(folder: Path, step: int) -> Path:
    """Return the path of the first checkpoint of a step."""
    return folder / f"step-{step}"


def _free_path(folder: Path, step: int) -> Path:
    """Return a path for a checkpoint whose name nothing has, nor had: saved again, it gets the save's number."""
    first, names = path_for(folder, step), set(os.listdir(folder))
    ours = {name for name in names if _NAME.fullmatch(name) or _LEFT_OVER.fullmatch(name)}
    if all(name.partition(".")[0] != first.name for name in ours):
        return first
    number = next_number(folder)
    while not names.isdisjoint((f"{first.name}.{number}", f"{first.name}.{number}.unsealed")):  # files of the user
        number += 1
    return folder / f"{first.name}.{number}"


def unsealed(path: Path) -> Path:
    """Return the path of a checkpoint while it is not sealed."""
    return path.with_name(f"{path.name}.unsealed")


def publish(path: Path) -> None:
    """Give a sealed checkpoint its name.

    Raises:
        OSError: it cannot be renamed.
    """
    unsealed(path).rename(path)
    sync_folder(path.parent)


def found_at(path: Path) -> Found:
    """Return the checkpoint at a path."""
    try:
        return Found(path, _seal.read_seal(path))
    except CheckpointError as error:
        return Found(path, None, str(error), isinstance(error, UnreadableError), error.errno)


def checkpoints_in(folder: Path) -> list[Found]:
    """Return all folders that are checkpoints or named like one, the last saved first.

    A folder without a seal comes before the checkpoints of earlier steps, because it is unknown when it was saved.

    Raises:
        OSError: the folder exists but cannot be listed.
    """
    found = [found_at(path) for path in _folders_in(folder, _NAME)]
    found += [found_at(path) for path in left_over_in(folder) if _is_sealed(path)]
    sealed = sorted((each for each in found if each.seal), key=lambda each: -each.number)
    for each in sorted((each for each in found if not each.seal), key=lambda each: each.step):
        before = [i for i, other in enumerate(sealed) if other.step < each.step]
        sealed.insert(before[0] if before else len(sealed), each)
    return sealed


def next_number(folder: Path) -> int:
    """Return the number for the next checkpoint to save, after all that exist. Unreadable ones have numbers, too."""
    found = checkpoints_in(folder)
    return 1 + max((each.number for each in found), default=0) + sum(each.is_unreadable for each in found)


def left_over_in(folder: Path) -> list[Path]:
    """Return the folders that saves and removals have left under other names.

    Raises:
        OSError: the folder exists but cannot be listed.
    """
    return sorted(path for path in _folders_in(folder, _LEFT_OVER) if not path.is_symlink())


def _folders_in(folder: Path, names: re.Pattern[str]) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return [folder / name for name in os.listdir(folder) if names.fullmatch(name) and (folder / name).is_dir()]
    return []


def _is_of_a_save(left_over: Path) -> bool:
    return left_over.suffix != ".removed"


def _is_sealed(left_over: Path) -> bool:
    return _is_of_a_save(left_over) and os.path.lexists(left_over / _seal.SEAL)


def make_room(folder: Path, step: int, size: int) -> Path:
    """Check that the folder has room for a checkpoint of this step, and return its path.

    Args:
        folder: the folder of all checkpoints.
        step: the step of the new checkpoint.
        size: its bytes.

    Raises:
        OSError: the folder is gone, cannot be written to, or has too little room.
    """
    path = _free_path(folder, step)
    free = shutil.disk_usage(folder).free
    if free < size + _METADATA:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {free:,} bytes are free", str(path))
    # a quota or a limit may allow creating a file, but not writing to it; a file without a name leaves nothing behind
    with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
        probe.write(bytes(_PROBE))
    return path


def _remove(path: Path) -> Failures:
    """Remove a checkpoint, or finish a removal; return what is still there. Readers lose it at once: it is renamed."""
    doomed = path
    try:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link")
        if _is_of_a_save(path):
            doomed = path.with_name(f"{path.name}.removed")
            path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        return [(doomed if doomed.is_dir() else path, error)]
    return []


def settle(folder: Path, patience: float = 0.0) -> tuple[list[Path], Failures]:
    """Give sealed leftovers of killed saves their names, and remove all other leftovers of saves and removals.

    Call it only in a process that holds the folder's lock and is not saving: then nobody else writes there.

    Args:
        folder: the folder of all checkpoints.
        patience: seconds to look again until nothing is left. Some of orbax's threads may still write, and make their
            folders anew, after another thread has failed.

    Returns:
        The removed leftovers of saves, and what could not be removed.
    """
    removed, deadline = list[Path](), time.monotonic() + patience
    while True:
        failed, left_over = Failures(), list[Path]()
        with contextlib.suppress(OSError):  # perhaps the folder itself cannot be read
            left_over = left_over_in(folder)
        for path in left_over:
            if _is_sealed(path):
                with contextlib.suppress(OSError):  # it is found under its name all the same
                    path.rename(_free_path_of(path))
            elif stays := _remove(path):
                failed += stays
            elif _is_of_a_save(path):
                removed.append(path)
        if not left_over or time.monotonic() >= deadline:
            return removed, failed
        time.sleep(_LOOK_EVERY)


def _free_path_of(left_over: Path) -> Path:
    """Return the name that a sealed leftover was to have, or another one if that is not free."""
    path = left_over.with_name(_LEFT_OVER.sub(r"\1", left_over.name))
    return _free_path(path.parent, Found(path, None).step) if os.path.lexists(path) else path


def remove_all_but(newest: Path, keep: int, is_whole: dict[Path, bool]) -> Failures:
    """Remove all sealed checkpoints except the last `keep`; return which were not removed, and why.

    A checkpoint whose files don't match its seal stays: perhaps the user can still rescue it. Whatever a newer
    checkpoint of the same step has replaced is removed as well, unless it cannot be read.

    Args:
        newest: the path of the last checkpoint.
        keep: how many checkpoints to keep.
        is_whole: which checkpoints are known to be whole or damaged. Others are read and added before they are removed.
    """
    try:
        found = [each for each in checkpoints_in(newest.parent) if not each.is_unreadable]
    except OSError as error:
        return [(newest.parent, error)]
    kept, replaced, last = list[Found](), list[Found](), Found(newest, None).step
    for each in found:
        if each.path != newest and (each.step == last or (each.seal and each.step in {other.step for other in kept})):
            replaced.append(each)
        elif each.seal is not None:
            kept.append(each)
    failed: Failures = []
    for each in [*replaced, *kept[keep:]]:
        try:
            if each in replaced or _is_whole(each, is_whole):
                failed += _remove(each.path)
                is_whole.pop(each.path, None)
            else:
                failed.append((each.path, CheckpointError("it is damaged, and only whole checkpoints are removed")))
        except OSError as error:  # it cannot be read
            failed.append((each.path, error))
    return failed


def _is_whole(found: Found, known: dict[Path, bool]) -> bool:
    if found.path not in known:
        assert found.seal is not None, "only sealed checkpoints are removed"
        files = found.seal["files"]
        known[found.path] = not _seal.check_files(found.path, files, files)
    return known[found.path]


def _checked_path(name: str, path: Any, such_as: str) -> Path:
    """Return an absolute path.

    Raises:
        ValueError: it is empty, or not a path.
    """
    if not isinstance(path, str | os.PathLike) or os.fspath(path) in ("", b"") or "\0" in os.fsdecode(path):
        raise ValueError(f"{name}={path!r} is not a path: give one {such_as}")
    return Path(os.fsdecode(path)).absolute()


def checked_folder(folder: Any) -> Path:
    """Return the path given as `folder=`.

    Raises:
        ValueError: it is not a path, or it is the path of a file.
    """
    path = _checked_path("folder", folder, "such as 'runs/mnist'")
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder={os.fspath(folder)!r} is not a folder: give one, or a name that is free")
    return path


def checkpoint_at(resume: Any) -> Path:
    """Return the path given as `resume=`.

    Raises:
        ValueError: it is neither a path nor "auto", "must" or "never".
    """
    path = _checked_path("resume", resume, "of a checkpoint, or 'auto', 'must' or 'never'")
    if isinstance(resume, str) and os.sep not in resume and not path.exists():
        raise ValueError(f"resume={resume!r} is neither 'auto', 'must' nor 'never', and there is no folder {path}")
    return path

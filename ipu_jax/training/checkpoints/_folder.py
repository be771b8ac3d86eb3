"""Find the checkpoints in a folder, make room for a new one, and remove those that are no longer kept.

    runs/mnist/step-200                 a checkpoint: it gets this name when it is sealed
    runs/mnist/step-300.unsealed        being saved, or left over from a save that was killed
    runs/mnist/step-300.replaced        the previous checkpoint of this step, until the new one has its name
    runs/mnist/step-100.removed         being removed: its seal goes first

A folder with a seal and all its files is a checkpoint, whatever its name. So a kill between two renames loses none.

Nothing here imports jax.
"""

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, Final

from ipu_jax.base.annotations import Json
from ipu_jax.base.replacing import sync_folder
from ipu_jax.training.checkpoints import _seal
from ipu_jax.training.checkpoints.errors import CheckpointError, UnreadableError

_NAME: Final = re.compile(r"step-(\d+)")
# orbax writes to a folder with a longer name; every other name is the user's
_LEFT_OVER: Final = re.compile(r"step-\d+\.(unsealed(\.orbax-checkpoint-tmp(-\d+)?)?|replaced|removed)")
_TRIES: Final = 20
_METADATA: Final = 1 << 20  # bytes that orbax and the seal write besides the arrays, at most

_PROBE: Final = 1 << 12


@dataclasses.dataclass(frozen=True)
class Found:
    """A folder that is named like a checkpoint, or is left over from a checkpoint.

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
        return int(_named(self.path).name.removeprefix("step-"))


def path_for(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step}"


def unsealed(path: Path) -> Path:
    """Return the path of a checkpoint while it is not sealed."""
    return path.with_name(f"{path.name}.unsealed")


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def publish(path: Path) -> None:
    """Give a sealed checkpoint its name. An older checkpoint with this name is moved away first.

    Raises:
        OSError: it cannot be renamed; an older checkpoint has its name again.
    """
    replaced = _replaced(path)
    if is_replacing := os.path.lexists(path):
        if replaced.is_dir():
            remove(replaced)  # both of its successors are sealed
        path.rename(replaced)
    try:
        unsealed(path).rename(path)
    except OSError:
        if is_replacing:
            replaced.rename(path)
        raise
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
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except FileNotFoundError:
        return []
    found = [found_at(folder / name) for name in names if _NAME.fullmatch(name)]
    found += [each for path in left_over_in(folder) if _may_be_whole(each := found_at(path))]
    sealed = sorted((each for each in found if each.seal), key=lambda each: -each.number)
    for each in sorted((each for each in found if not each.seal), key=lambda each: each.step):
        before = [i for i, other in enumerate(sealed) if other.step < each.step]
        sealed.insert(before[0] if before else len(sealed), each)
    return sealed


def next_number(folder: Path) -> int:
    """Return the number for the next checkpoint to save, after all that exist."""
    return 1 + max((found.number for found in checkpoints_in(folder)), default=0)


def _named(path: Path) -> Path:
    """Return the name that a checkpoint has when it is sealed, from any of its names."""
    return path.with_name(path.name.partition(".")[0])


def left_over_in(folder: Path) -> list[Path]:
    """Return the folders that saves and removals have left under other names.

    Raises:
        OSError: the folder exists but cannot be listed.
    """
    try:
        entries = [entry for entry in os.scandir(folder) if _LEFT_OVER.fullmatch(entry.name)]
    except FileNotFoundError:
        return []
    return sorted(folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def _may_be_whole(found: Found) -> bool:
    try:
        return found.is_unreadable or (found.seal is not None and _seal.has_all_files(found.path, found.seal["files"]))
    except OSError:
        return True


def make_room(folder: Path, step: int, size: int) -> None:
    """Remove leftovers, and check that the folder has room for a checkpoint of this step.

    Args:
        folder: the folder of all checkpoints.
        step: the step of the new checkpoint.
        size: its bytes.

    Raises:
        OSError: the folder is gone, cannot be written to, or has too little room.
        CheckpointError: a file has a name that the save needs.
        UnreadableError: a checkpoint of this step exists, and cannot be read.
    """
    path = path_for(folder, step)
    for name in (path, unsealed(path), _replaced(path)):
        if os.path.lexists(name) and not name.is_dir():
            raise CheckpointError(
                f"{name} is there, and a save needs the name for a folder: move it elsewhere", errno.EEXIST
            )
    remove_left_over(folder)
    for name in (path, unsealed(path)):
        if (there := found_at(name)).is_unreadable:
            raise UnreadableError(f"{name} is there, and {there.wrong}, or move it elsewhere", there.errno)
    free = shutil.disk_usage(folder).free
    if free < size + _METADATA:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {free:,} bytes are free", str(path))
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(_PROBE))  # a quota or a limit may allow creating a file, but not writing to it
    finally:
        probe.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint. Readers lose it at once, since it is renamed and loses its seal first.

    Raises:
        OSError: it cannot be removed. While it is whole, it keeps its name.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link")
    doomed = path if _LEFT_OVER.fullmatch(path.name) else path.with_name(f"{path.name}.removed")
    if doomed != path:
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
    try:
        (doomed / _seal.SEAL).unlink(missing_ok=True)
    except OSError:
        if doomed != path:
            doomed.rename(path)
        raise
    shutil.rmtree(doomed)


def settle(folder: Path) -> None:
    """Rename whole leftover checkpoints to their names, and finish removals, as far as possible.

    Call it only in a process that holds the folder's lock and is not saving.
    """
    with contextlib.suppress(OSError):  # perhaps the folder itself cannot be read
        for path in left_over_in(folder):
            found, name = found_at(path), _named(path)
            if not _may_be_whole(found):
                if not path.name.startswith(unsealed(name).name):
                    shutil.rmtree(path, ignore_errors=True)
            elif found.seal is None:
                continue  # unreadable: perhaps whole
            elif not os.path.lexists(name):
                path.rename(name)
            elif path == unsealed(name) and not found_at(name).is_unreadable:
                publish(name)


def remove_left_over(folder: Path) -> None:
    """Remove incomplete leftovers of saves and removals, as far as possible."""
    with contextlib.suppress(OSError):  # perhaps the folder itself cannot be read
        for _ in range(_TRIES):  # some of orbax's threads may still be writing after another thread has failed
            left = [path for path in left_over_in(folder) if not _may_be_whole(found_at(path))]
            for each in left:
                shutil.rmtree(each, ignore_errors=True)
            if not left:
                return
            time.sleep(0.05)


def remove_all_but(folder: Path, keep: int, is_whole: dict[Path, bool]) -> list[tuple[Path, Exception]]:
    """Remove all sealed checkpoints except the last `keep`; return which were not removed, and why.

    A checkpoint whose files don't match its seal stays: perhaps the user can still rescue it. Checkpoints that a newer
    one of the same step has replaced are removed as well.

    Args:
        folder: the folder of all checkpoints.
        keep: how many checkpoints to keep.
        is_whole: which checkpoints are known to be whole or damaged. Others are read and added before they are removed.
    """
    remove_left_over(folder)
    try:
        sealed = [found for found in checkpoints_in(folder) if found.seal is not None]
    except OSError as error:
        return [(folder, error)]
    names = {found.path for found in sealed}
    replaced = [found for found in sealed if _named(found.path) != found.path and _named(found.path) in names]
    failed: list[tuple[Path, Exception]] = []
    for found in [*replaced, *[found for found in sealed if found not in replaced][keep:]]:
        try:
            if found not in replaced and not _is_whole(found, is_whole):
                raise CheckpointError("it is damaged, and only whole checkpoints are removed")
            remove(found.path)
            is_whole.pop(found.path, None)
        except (OSError, CheckpointError) as error:
            failed.append((found.path, error))
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

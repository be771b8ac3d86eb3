"""Find the checkpoints in a folder, make room for a new one, and remove those that are no longer kept.

    runs/mnist/step-200                 a checkpoint: it gets this name when it is sealed
    runs/mnist/step-300.unsealed        being saved, or left over from a save that was killed

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

from ipu_jax.checkpoints import _seal
from ipu_jax.checkpoints.errors import CheckpointError

_NAME: Final = re.compile(r"step-(\d+)")
_LEFT_OVER: Final = re.compile(r"step-\d+\.(unsealed.*|removed)")  # orbax writes to a folder with a longer name
_REMOVED: Final = ".removed"
_TRIES: Final = 20
_METADATA: Final = 1 << 20  # bytes that orbax and the seal write besides the arrays, at most

_PROBE: Final = 1 << 12


@dataclasses.dataclass(frozen=True)
class Found:
    """A folder that is named like a checkpoint.

    Attributes:
        path: the folder.
        seal: what its seal says; None if it has none that can be read.
        wrong: what is wrong with it, or "".
    """

    path: Path
    seal: dict[str, Any] | None
    wrong: str = ""

    @property
    def number(self) -> int:
        """Return its number in the order of the saves; -1 if it is not known."""
        return -1 if self.seal is None else self.seal["number"]


def path_for(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step}"


def unsealed(path: Path) -> Path:
    """Return where a checkpoint is as long as it is not sealed."""
    return path.with_name(f"{path.name}.unsealed")


def publish(path: Path) -> None:
    """Give a checkpoint that has been sealed its name.

    Raises:
        OSError: it cannot be renamed.
    """
    unsealed(path).rename(path)
    _seal.sync_folder(path.parent)


def found_at(path: Path) -> Found:
    """Return the checkpoint at a path."""
    try:
        return Found(path, _seal.read_seal(path))
    except CheckpointError as error:
        return Found(path, None, str(error))


def checkpoints_in(folder: Path) -> list[Found]:
    """Return all folders that are named like a checkpoint, what was saved last first.

    One without a seal comes before those of earlier steps, because nobody knows when it was saved.
    """
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except FileNotFoundError:
        return []
    found = [found_at(folder / name) for name in names if _NAME.fullmatch(name)]
    sealed = sorted((each for each in found if each.seal), key=lambda each: -each.number)
    for each in sorted((each for each in found if not each.seal), key=_step):
        before = [i for i, other in enumerate(sealed) if _step(other) < _step(each)]
        sealed.insert(before[0] if before else len(sealed), each)
    return sealed


def next_number(folder: Path) -> int:
    """Return the number of a checkpoint that is saved after all that are there."""
    return 1 + max((found.number for found in checkpoints_in(folder)), default=0)


def _step(found: Found) -> int:
    return int(found.path.name.removeprefix("step-"))


def left_over_in(folder: Path) -> list[Path]:
    """Return the temporary folders of saves that were killed."""
    try:
        return sorted(folder / entry.name for entry in os.scandir(folder) if _LEFT_OVER.fullmatch(entry.name))
    except FileNotFoundError:
        return []


def make_room(folder: Path, step: int, size: int) -> None:
    """Remove what is in the way of a checkpoint of this step, and check that the folder can take it.

    Args:
        folder: of all checkpoints.
        step: of the new one.
        size: its bytes.

    Raises:
        OSError: the folder is gone, cannot be written to, or has too little room.
    """
    path = path_for(folder, step)
    remove(path)
    remove_left_over(folder)
    free = shutil.disk_usage(folder).free
    if free < size + _METADATA:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {free:,} bytes are free", str(path))
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(_PROBE))  # a quota or a limit may let a file be made, but not written to
    finally:
        probe.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a checkpoint: at once for whoever looks for it, since it is renamed first."""
    if path.exists():
        doomed = path if _LEFT_OVER.fullmatch(path.name) else path.with_name(path.name + _REMOVED)
        if doomed != path:
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
        shutil.rmtree(doomed)


def finish_removals(folder: Path) -> None:
    """Remove what a process that was killed had begun to remove, as far as that is possible.

    Unlike what a save left over, it may be removed while another process saves.
    """
    with contextlib.suppress(OSError):
        for each in left_over_in(folder):
            if each.name.endswith(_REMOVED):
                shutil.rmtree(each, ignore_errors=True)


def remove_left_over(folder: Path) -> None:
    """Remove what saves that failed or were killed left over, as far as that is possible."""
    with contextlib.suppress(OSError):  # the folder itself may be what cannot be read
        for _ in range(_TRIES):  # some of orbax's threads may still be writing after another one has failed
            for each in left_over_in(folder):
                shutil.rmtree(each, ignore_errors=True)
            if not left_over_in(folder):
                return
            time.sleep(0.05)


def remove_all_but(folder: Path, keep: int) -> None:
    """Remove all checkpoints with a seal but the last ones.

    Raises:
        OSError: one cannot be removed.
    """
    sealed = [found for found in checkpoints_in(folder) if found.seal is not None]
    for found in sealed[keep:]:
        remove(found.path)

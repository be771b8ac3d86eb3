"""Find the checkpoint that a training resumes from: the last whole checkpoint of this training."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from ipu_jax.training.checkpoints import _agreement, _description, _folder, _seal
from ipu_jax.training.checkpoints.errors import CheckpointError, UnreadableError, errno_of

_NAMED: Final = 5  # damaged checkpoints that an error names


@dataclasses.dataclass(frozen=True)
class Search:
    """Searches the checkpoints of a folder. All instances make the same calls, and get the same result.

    Across several instances it communicates what is wrong with each instance's share of the files.

    Args:
        folder: the folder of the checkpoints.
        words: the user's description, which a checkpoint must also have.
        timeout: the time limit for waiting for other instances, in seconds.
        warn: called with a text about each skipped checkpoint.
    """

    folder: Path
    words: Mapping[str, Any]
    timeout: float
    warn: Callable[[str], None]

    def last_whole(self, model: Mapping[str, Any], *, must: bool, is_in_use: bool) -> _folder.Found | None:
        """Return the last whole checkpoint, or None in a folder without checkpoints.

        Args:
            model: the description of this training's step.
            must: whether a folder without checkpoints is an error.
            is_in_use: whether a training saves to the folder, so that an unsealed checkpoint can be of a running save.

        Raises:
            ValueError: it is of another training.
            CheckpointError: this user or this version cannot read the folder, or what may be the last checkpoint; or
                all checkpoints are damaged, or there is none and there must be one.
        """
        candidates = self.candidates()
        names = {found.path for found in candidates}
        for left_over in _folder.left_over_in(self.folder):
            if left_over not in names and not (is_in_use and ".unsealed" in left_over.name):
                self.warn(f"{left_over} is left over from a save that did not end: it is skipped")
        damaged: list[tuple[Path, str]] = []
        for found in candidates:
            try:
                wrong = self.wrong_with(found, model)
            except UnreadableError as error:
                raise CheckpointError(
                    f"{found.path} may be the last checkpoint, and {error}; or resume from the path of another one. "
                    "Nothing was removed",
                    error.errno,
                ) from None
            if not wrong:
                for path, what in damaged:
                    self.warn(f"{path} cannot be restored, {what}: it is skipped")
                return found
            damaged.append((found.path, wrong))
        if damaged:
            each = "; ".join(f"{path.name}, {wrong}" for path, wrong in damaged[:_NAMED])
            more = f"; and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else ""
            raise CheckpointError(
                f"{self.folder} holds no checkpoint that is whole: {each}{more}. Nothing was removed: resume from the "
                "path of another one, or save to another folder to begin at 0"
            )
        if must:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint: give the path of one, or resume='auto' for a fresh start"
            )
        return None

    def candidates(self) -> list[_folder.Found]:
        """Return all folders that may be checkpoints, the last saved first.

        Raises:
            CheckpointError: the folder cannot be read, on any instance.
        """
        found: list[_folder.Found] = []
        error: OSError | None = None
        try:
            found = _folder.checkpoints_in(self.folder)
        except OSError as failed:
            error = failed
        if unreadable := _agreement.first_error(error, self.timeout):
            raise CheckpointError(
                f"{self.folder} cannot be read ({unreadable}): give a folder that this user can read, or a name that "
                "is free",
                errno_of(unreadable),
            )
        return found

    def at(self, path: Path, model: Mapping[str, Any]) -> _folder.Found:
        """Return the checkpoint at a path.

        Raises:
            CheckpointError: it is not whole, or cannot be read.
            ValueError: it is of another training.
        """
        found = _folder.found_at(path)
        try:
            wrong = self.wrong_with(found, model)
        except UnreadableError as error:
            raise CheckpointError(f"{path} cannot be restored: {error}", error.errno) from None
        if wrong:
            raise CheckpointError(f"{path} cannot be restored: {wrong}")
        return found

    def wrong_with(self, found: _folder.Found, model: Mapping[str, Any]) -> str:
        """Return what is wrong with the files of a checkpoint, the same on all instances, or "".

        Args:
            found: the checkpoint.
            model: the description of this training's step.

        Raises:
            ValueError: it is of another training.
            UnreadableError: an instance cannot read it, but it may be whole.
        """
        unreadable = UnreadableError(found.wrong, found.errno) if found.is_unreadable else None
        if first := _agreement.first_error(unreadable, self.timeout):
            raise UnreadableError(str(first), errno_of(first))
        if found.seal is not None:
            if wrong := _description.wrong_with(found.seal["model"]):
                return f"{_seal.SEAL} is damaged ({wrong})"
            _description.check_words(str(found.path), found.seal["describes"], self.words)
            _description.check_model(str(found.path), found.seal["model"], model)
        if _agreement.anywhere(found.seal is None, self.timeout):
            return found.wrong or "another instance cannot read its seal"
        assert found.seal is not None, "all instances have read it"
        return _agreement.damage_of(found.path, found.seal["files"], self.timeout)

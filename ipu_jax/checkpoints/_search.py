"""Find the checkpoint that a training goes on from: the last one that is whole, and of this training."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ipu_jax.checkpoints import _agreement, _description, _folder
from ipu_jax.checkpoints.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Search:
    """Looks through the checkpoints of a folder. All instances make the same calls, and find the same.

    Communicates, across several instances, what each found wrong with its share of the files.

    Args:
        folder: of the checkpoints.
        words: the user's description, which a checkpoint must have too.
        timeout: seconds that waiting for other instances may take.
        warn: is told which checkpoints are skipped, and why.
    """

    folder: Path
    words: Mapping[str, Any]
    timeout: float
    warn: Callable[[str], None]

    def last_whole(self, model: Mapping[str, Any]) -> _folder.Found | None:
        """Return the last checkpoint that is whole, or None.

        Raises:
            ValueError: it is of another training.
        """
        candidates = _folder.checkpoints_in(self.folder)
        for left_over in _folder.left_over_in(self.folder):
            self.warn(f"{left_over} is left over from a save that did not end: it is skipped")
        for found in candidates:
            wrong = self.wrong_with(found, model)
            if wrong:
                self.warn(f"{found.path} cannot be restored, {wrong}: it is skipped")
            elif found.seal is not None:
                return found
        return None

    def at(self, path: Path, model: Mapping[str, Any]) -> _folder.Found:
        """Return the checkpoint at a path.

        Raises:
            CheckpointError: it is not whole.
            ValueError: it is of another training.
        """
        found = _folder.found_at(path)
        if wrong := self.wrong_with(found, model):
            raise CheckpointError(f"{path} cannot be restored: {wrong}")
        return found

    def wrong_with(self, found: _folder.Found, model: Mapping[str, Any]) -> str:
        """Return what is wrong with the files of a checkpoint, the same on all instances, or "".

        Args:
            found: the checkpoint.
            model: the description of this training's step.

        Raises:
            ValueError: it is of another training.
        """
        if found.seal is not None:
            _description.check_words(str(found.path), found.seal["describes"], self.words)
            _description.check_model(str(found.path), found.seal["model"], model)
        if _agreement.anywhere(found.seal is None, self.timeout):
            return found.wrong or "another instance cannot read its seal"
        assert found.seal is not None, "all instances have read it"
        return _agreement.damage_of(found.path, found.seal["files"], self.timeout)

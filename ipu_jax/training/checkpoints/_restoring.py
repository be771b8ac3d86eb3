"""Find the checkpoint that a training run resumes from, the last whole one of this run, and read its state.

Arrays are read onto the IPUs, or leaf by leaf for another topology. Each process reads only what its devices need.
"""

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Json, Value
from ipu_jax.base.keys import key_impl
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.mesh.instances import Index, PiecedArray, relative
from ipu_jax.training.checkpoints import _all_instances, _description, _folder, _seal
from ipu_jax.training.checkpoints._description import KINDS, has_same_places, leaves, named, with_arrays
from ipu_jax.training.checkpoints._store import Store, as_key
from ipu_jax.training.checkpoints.errors import CheckpointError, CheckpointWarning, UnreadableError, errno_of
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.update.step import TrainStep

_NAMED: Final = 5  # damaged checkpoints that an error names


@dataclasses.dataclass(frozen=True)
class Restored:
    """Hold what was restored from a checkpoint.

    Attributes:
        state: the state to continue with, on the IPUs.
        step: the number of updates that it has made.
        feed: the data position, for `Feed(state=...)`; None if none was saved.
        extra: the user's own data; None if none was saved.
        path: the checkpoint.
        topology: "same" if its arrays were read as they are, "other" if leaves were read out of them.
    """

    state: TrainState
    step: int
    feed: dict[str, Json] | None
    extra: Json
    path: Path
    topology: Literal["same", "other"]


@dataclasses.dataclass(frozen=True)
class Search:
    """Searches the checkpoints of a folder. All instances make the same calls, and get the same result.

    Across several instances it communicates what is wrong with each instance's share of the files.

    Args:
        folder: the folder of the checkpoints.
        model: the description of this run's step.
        words: the user's description, which a checkpoint must also have.
        timeout: the time limit for waiting for other instances, in seconds.
    """

    folder: Path
    model: Mapping[str, Json]
    words: Mapping[str, Json]
    timeout: float

    def last_whole(self, *, must: bool) -> _folder.Found | None:
        """Return the last whole checkpoint, or None in a folder without checkpoints.

        Args:
            must: whether a folder without checkpoints is an error.

        Raises:
            ValueError: it is of another run.
            CheckpointError: this user or this version cannot read the folder, or what may be the last checkpoint; or
                all checkpoints are damaged, or there is none and there must be one.
        """
        candidates = candidates_in(self.folder, self.timeout)
        damaged: list[tuple[Path, str]] = []
        for found in candidates:
            try:
                wrong = self.wrong_with(found)
            except UnreadableError as error:
                raise CheckpointError(
                    f"{found.path} may be the last checkpoint, and {error}; or resume from the path of another one. "
                    "Nothing was removed",
                    error.errno,
                ) from None
            if not wrong:
                for path, what in damaged:
                    warn(f"{path} cannot be restored, {what}: it is skipped")
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

    def at(self, path: Path) -> _folder.Found:
        """Return the checkpoint at a path.

        Raises:
            CheckpointError: it is not whole, or cannot be read.
            ValueError: it is of another run.
        """
        found = _folder.found_at(path)
        try:
            wrong = self.wrong_with(found)
        except UnreadableError as error:
            raise CheckpointError(f"{path} cannot be restored: {error}", error.errno) from None
        if wrong:
            raise CheckpointError(f"{path} cannot be restored: {wrong}")
        return found

    def wrong_with(self, found: _folder.Found) -> str:
        """Return what is wrong with the files of a checkpoint, the same on all instances, or "".

        Raises:
            ValueError: it is of another run.
            UnreadableError: an instance cannot read it, but it may be whole.
        """
        unreadable = UnreadableError(found.wrong, found.errno) if found.is_unreadable else None
        if first := _all_instances.first_error(unreadable, self.timeout):
            raise UnreadableError(str(first), errno_of(first))
        if found.seal is not None:
            if wrong := _description.wrong_with(found.seal["model"]):
                return f"{_seal.SEAL} is damaged ({wrong})"
            _description.check_words(str(found.path), found.seal["describes"], self.words)
            _description.check_model(str(found.path), found.seal["model"], self.model)
        if _all_instances.anywhere(found.seal is None, self.timeout):
            return found.wrong or "another instance cannot read its seal"
        assert found.seal is not None, "all instances have read it"
        return _all_instances.damage_of(found.path, found.seal["files"], self.timeout)


def candidates_in(folder: Path, timeout: float) -> list[_folder.Found]:
    """Return all folders that may be checkpoints, the last saved first. Communicates a number per instance.

    Raises:
        CheckpointError: the folder cannot be read, on any instance.
    """
    found: list[_folder.Found] = []
    error: OSError | None = None
    try:
        found = _folder.checkpoints_in(folder)
    except OSError as failed:
        error = failed
    if unreadable := _all_instances.first_error(error, timeout):
        raise CheckpointError(
            f"{folder} cannot be read ({unreadable}): give a folder that this user can read, or a name that is free",
            errno_of(unreadable),
        )
    return found


def read(store: Store, found: _folder.Found, step: TrainStep, like: TrainState, here: Mapping[str, Json]) -> Restored:
    """Return what a checkpoint contains.

    Args:
        store: reads its arrays.
        found: the checkpoint, which is of this run.
        step: the training step.
        like: a state of this step.
        here: the description of the step.
    """
    seal: Json = found.seal
    is_same = has_same_places(seal["model"], here)
    state = (_read_as_saved if is_same else _read_by_leaves)(store, found, step, like)
    topology = "same" if is_same else "other"
    return Restored(state, seal["step"], seal["feed"], seal["extra"], found.path, topology)


def _read_as_saved(store: Store, found: _folder.Found, step: TrainStep, like: TrainState) -> TrainState:
    """Return the state of a checkpoint with the same arrays as this step. Each process reads its own shards."""
    shardings = named(step.placement.shardings(like))
    state = with_arrays(like, store.read(found.path, named(like), shardings))
    return dataclasses.replace(state, nonfinite=step.placement.no_streak())


@jax.transfer_guard("allow")  # the caller asks for this transfer
def _read_by_leaves(store: Store, found: _folder.Found, step: TrainStep, like: TrainState) -> TrainState:
    """Return the state of a checkpoint of another topology.

    Each process reads the rows of its own devices, and holds one array of them at a time until it is placed.
    """
    step.check_state(like)
    seal: Json = found.seal
    described = seal["model"]["arrays"]
    arrays = store.opened(found.path, described)
    single = lambda name: as_key(np.asarray(arrays[name][...]), described[name]["dtype"])
    scale = like.scale
    if scale is not None:
        values = {name: jnp.asarray(single(f"scale.{name}")) for name in ("scale", "good_steps")}
        scale = dataclasses.replace(scale, **values)
    key = single("key") if "key" in arrays else None
    value_of = _SavedLeaves(seal["model"], arrays).value_of
    return step.placement.placed_by(value_of, like, scale=scale, step=int(single("step")), key=key)


class _SavedLeaves:
    """Finds leaves of this run in the arrays of a checkpoint.

    Args:
        saved: the description of the checkpoint.
        arrays: its arrays by name, as `Store.opened` returns them.
    """

    def __init__(self, saved: Mapping[str, Json], arrays: Mapping[str, Any]):
        self._arrays, self._pieces = arrays, dict[tuple[str, str], list[tuple[Index, Leaf, str]]]()
        for kind in KINDS:
            # a part that several groups share is in several arrays, and is read from one
            parts = {(leaf.path, leaf.part.rows): (name, leaf) for name, leaf in leaves(saved, kind)}
            for name, leaf in parts.values():
                pieces = [(*piece, name) for piece in leaf.pieces()]
                self._pieces.setdefault((kind, leaf.path), []).extend(pieces)
        self._placing, self._read = ("", -1), dict[str, _ReadOnce]()

    def value_of(self, kind: str, leaf: Leaf) -> Value:
        """Return a leaf, as `shard_leaves` asks for it; keys are read at once."""
        if self._placing != (kind, leaf.array):  # what was read for the array before is placed
            self._placing, self._read = (kind, leaf.array), {}
        pieces = self._pieces[kind, leaf.path]
        for _, _, name in pieces:
            self._read.setdefault(name, _ReadOnce(self._arrays[name]))
        if key_impl(leaf.dtype) is not None:
            return as_key(np.asarray(self._arrays[pieces[0][2]][...]), leaf.dtype)
        own = [(block, functools.partial(piece.block_in, self._read[name])) for block, piece, name in pieces]
        reads = [(relative(block, leaf.place), read) for block, read in own]
        return PiecedArray(leaf.shape, jnp.dtype(leaf.dtype), reads)


class _ReadOnce:
    """An array whose regions are read once, though several devices ask for them."""

    def __init__(self, array: Any):
        self.shape, self._array = array.shape, array
        self._regions: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def __getitem__(self, region: Index) -> np.ndarray:
        bounds = tuple((part.start, part.stop) for part in region)
        if bounds not in self._regions:
            self._regions[bounds] = np.asarray(self._array[region])
        return self._regions[bounds]


def warn(text: str) -> None:
    """Warn the user on instance 0. Call it from a function that a public method calls."""
    if jax.process_index() == 0:
        warnings.warn(text, CheckpointWarning, stacklevel=4)

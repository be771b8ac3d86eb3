"""Let all instances agree on what failed on any of them, and on which files of a checkpoint are damaged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import jax
import numpy as np

from ipu_jax.distributed import popdist
from ipu_jax.training.checkpoints import _seal
from ipu_jax.training.checkpoints.errors import CheckpointError, UnreadableError, errno_of

_LONGEST: Final = 500  # characters of an error that are sent to other instances
_WORDS: Final = {_seal.MISSING: "is missing", _seal.SHORT: "has another size", _seal.CHANGED: "was changed"}


def anywhere(here: bool, seconds: float) -> bool:
    """Return whether `here` is true on any instance. Communicates a number per instance."""
    return bool(popdist.all_reduce(int(here), "sum", timeout=seconds))


def first_error(error: BaseException | None, seconds: float) -> BaseException | None:
    """Return this instance's error, or else the error of the first instance that has one, with its number and errno.

    Communicates a number per instance, and the text of an error if there is one.
    """
    own, count = jax.process_index(), jax.process_count()
    failed = np.asarray(popdist.all_reduce(np.eye(count)[own] * (error is not None), "sum", timeout=seconds))
    if not failed.any():
        return None
    first = int(np.argmax(failed))
    text, number = " ".join(str(error).split())[:_LONGEST], None if error is None else errno_of(error)
    letter = np.frombuffer(f"{number or 0} {text}".encode()[: 2 * _LONGEST].ljust(2 * _LONGEST), np.uint8)
    told = np.asarray(popdist.broadcast(letter, first, timeout=seconds)).tobytes().decode(errors="replace")
    number, _, text = told.rstrip().partition(" ")
    return error or CheckpointError(f"on instance {first}: {text}", int(number) or None)


def damage_of(path: Path, files: dict[str, Sequence[int]], seconds: float) -> str:
    """Return what is wrong with the files of a checkpoint, or ""; each instance reads its share of the files.

    Communicates a number per instance, and one per file.

    Raises:
        UnreadableError: the operating system cannot read a file, on any instance.
    """
    names = sorted(files)
    own = names[jax.process_index() :: jax.process_count()]
    codes = np.zeros(len(names), np.int64)
    error: OSError | None = None
    try:
        for name, code in _seal.check_files(path, files, own).items():
            codes[names.index(name)] = code
    except OSError as failed:
        error = failed
    if unreadable := first_error(error, seconds):
        raise UnreadableError(
            f"a file cannot be read ({unreadable}): see that this user can read it", errno_of(unreadable)
        )
    codes = np.asarray(popdist.all_reduce(codes, "sum", timeout=seconds))
    wrong = [f"{name} {_WORDS[code]}" for name, code in zip(names, codes.tolist(), strict=True) if code]
    return wrong[0] + (f", and so on for {len(wrong)} files" if len(wrong) > 1 else "") if wrong else ""

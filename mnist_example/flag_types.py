"""Turn the texts of flags into values; a text that is none is refused with the rule that it breaks."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from ipu_jax.tools.command_line import number_that, shown
from mnist_example.checks import check_choice

_FLOAT32: Final = np.finfo(np.float32)

count = number_that(int, lambda n: n >= 1, "a count: give a whole number of at least 1")
positive = number_that(float, lambda x: 0 < x < math.inf, "a positive number: give one such as 0.01")
# rates that float32 can represent: a rate that is rounded to 0 would silently train nothing
rate = number_that(
    float, lambda x: float(_FLOAT32.tiny) <= x <= float(_FLOAT32.max), "a positive number: give one such as 0.01"
)
seed = number_that(int, lambda n: 0 <= n < 2**32, "a seed: give a whole number from 0 to 4294967295")


def path(text: str) -> Path:
    """Return `text` as a path. An empty path is refused: it would be the current folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is no path: give one that is not empty")
    return Path(text)


def resume(text: str) -> str:
    """Return "auto", "never" or the path of a checkpoint, which must be there. A `./` makes a path of such a word."""
    if text in ("auto", "never"):
        return text
    if not path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is no checkpoint: give its folder, or auto, or never")
    return text


def checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """Return an argparse type for texts that `check` does not refuse by a ValueError, whose message is shown."""

    def of_text(text: str) -> str:
        try:
            return check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return of_text


def one_of(name: str, choices: tuple[str, ...]) -> Callable[[str], str]:
    """Return an argparse type for one of `choices`, in upper or lower case (TensorFlow for the IPU wrote "Grouped")."""
    return checked(lambda text: check_choice(name, shown(text.lower()), choices))

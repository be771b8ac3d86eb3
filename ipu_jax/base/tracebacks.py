"""Shorten the traceback of an exception from a user's function that our code called.

    user's call -> pipeline.value_and_grad -> 13 frames of ours -> user's stage

Only the first of our frames stays: the method that the user called. jax removes its own frames. Set jax's option
`jax_traceback_filtering` to "off" to see all frames.
"""

import contextlib
import functools
import types
from pathlib import Path

import jax

_OURS = f"{Path(__file__).parents[1]}/"
_JAX = f"{Path(jax.__file__).parent}/"
_BETWEEN = (contextlib.__file__, functools.__file__)  # our frames call each other through these


class ShortTracebacks:
    """A context in which the tracebacks of users' exceptions get only one frame of ours, that with the `with` itself.

    Errors that we raise ourselves keep all frames.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: types.TracebackType | None) -> None:
        if error is None or trace is None or jax.config.values["jax_traceback_filtering"] == "off":
            return
        entries = [trace]
        while entries[-1].tb_next is not None:
            entries.append(entries[-1].tb_next)
        if all(_is_ours(entry) or _is_of(entry, _JAX) for entry in entries[1:]):
            return
        kept = [entries[0], *(entry for entry in entries[1:] if not _is_ours(entry))]
        shortened: types.TracebackType | None = None
        for entry in reversed(kept):
            shortened = types.TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        error.__traceback__ = shortened


def _is_ours(entry: types.TracebackType) -> bool:
    return _is_of(entry, _OURS) or entry.tb_frame.f_code.co_filename in _BETWEEN


def _is_of(entry: types.TracebackType, folder: str) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(folder)

"""Refusals before anything is compiled: jax tells of each compilation, and `refused` looks that there was none."""

import contextlib

import jax
import pytest

from support.harness import exactly

compilations: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _note_what_iscompilations(event: str, *_args: object, **_kwargs: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(event)


@contextlib.contextmanager
def refused(message: str):
    """The ValueError with this message, and nothing compiled by then."""
    before = len(compilations)
    with pytest.raises(ValueError, match=exactly(message)):
        yield
    assert len(compilations) == before

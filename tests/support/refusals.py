"""Check that an error is raised before anything is compiled: jax reports each compilation to a listener."""

import contextlib

import jax
import pytest

from support.harness import exactly

compilations: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _note_compilation(event: str, *_args: object, **_kwargs: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(event)


@contextlib.contextmanager
def refused(message: str):
    """Expect a ValueError with this message before anything is compiled."""
    before = len(compilations)
    with pytest.raises(ValueError, match=exactly(message)):
        yield
    assert len(compilations) == before

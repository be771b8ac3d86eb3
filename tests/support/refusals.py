"""Tables of refusals: calls that must raise before anything is compiled, and what the messages must hold.

A row is a call and at least two texts: the value, the word that names the rule, and the mend. The rest of the message
may change: whoever mends its English breaks no test. An error is raised before anything is compiled; jax reports each
compilation to a listener.

    @refusals(
        (lambda: Stage(3), "fn=3", "callable", "(params, x, microbatch)"),
        (lambda: Stage(mlp, ipu=-1), "ipu=-1", "an int of at least 0", "ALL_IPUS"),
    )
    def test_a_stage_is_refused(call, holds):
        with refused(*holds):
            call()
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest

compilations: list[str] = []


@jax.monitoring.register_event_duration_secs_listener
def _note_compilation(event: str, *_args: object, **_kwargs: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        compilations.append(event)


@contextlib.contextmanager
def refused(*holds: str, error: type[BaseException] = ValueError) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message holds each of these texts, before anything is compiled."""
    before = len(compilations)
    with pytest.raises(error) as raised:
        yield raised
    missing = [text for text in holds if text not in str(raised.value)]
    assert not missing, f"{missing} is not in: {raised.value}"
    assert len(compilations) == before


def refusals(*rows: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Return the parameters `call` and `holds` of a test, from rows of a call and the texts that its message holds."""
    cases: list[Any] = []
    for call, *holds in rows:
        assert callable(call), f"{call}: a row begins with a call"
        assert len(holds) > 1, f"{holds}: give two or more texts"
        cases.append(pytest.param(call, holds, id=holds[0]))
    return pytest.mark.parametrize(("call", "holds"), cases)

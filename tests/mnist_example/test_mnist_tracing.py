"""Test that device calls are divided for a trace without changing what they compute."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mnist_example.tracing import Tracing


class Results(NamedTuple):
    losses: Any
    skipped: Any
    nonfinite: Any


class Recording:
    """Stands for `ipu_jax.Recording`: it counts the programs that it runs."""

    steps, path, timeline = 3, "trace.json.gz", None

    def __init__(self):
        self.ran: list[int] = []
        self.finished = 0

    @property
    def is_recorded(self):
        return sum(self.ran[1:]) >= self.steps

    @property
    def report(self):
        return f"report of {self.ran}"

    def run(self, program, *args, steps):
        self.ran.append(steps)
        return program(*args)

    def finish(self):
        self.finished += 1


@jax.jit
def program(state, batch, count):
    """Add up the rows of a batch one by one, as updates follow one another.

    An odd row counts as skipped, and what stands for the verdict on an update is three times its row.
    """

    def update(i, carry):
        state, losses, skipped, nonfinite = carry
        state, row = 2 * state + batch[i], batch[i].astype(jnp.int32)
        return state, losses.at[i].set(state), skipped + row % 2, nonfinite.at[i].set(3 * row)

    carry = state, jnp.zeros(batch.shape[0]), jnp.int32(0), jnp.zeros(batch.shape[0], jnp.int32)
    state, *results = jax.lax.fori_loop(0, count, update, carry)
    return state, Results(*results)


@pytest.mark.parametrize(
    ("counts", "pieces"),
    [([8, 8], [1, 3, 4]), ([2, 8, 8], [1, 1, 2, 6]), ([4, 8], [1, 3]), ([1, 1, 1, 1, 1], [1, 1, 1, 1])],
)
def test_pieces_of_a_call_make_the_same_updates(counts, pieces):
    said: list[str] = []
    tracing, recording, plain = Tracing(say=said.append), Recording(), Tracing()
    tracing._recording = recording  # pyright: ignore[reportAttributeAccessIssue]
    state, expected = jnp.float32(1), jnp.float32(1)
    for k, count in enumerate(counts):
        batch = jnp.asarray(np.random.default_rng(k).integers(0, 9, 8), jnp.float32)
        state, results = tracing.run(program, state, batch, count)
        expected, of_one_call = plain.run(program, expected, batch, count)
        assert state == expected
        assert results.losses[:count].tolist() == of_one_call.losses[:count].tolist()
        assert results.skipped == of_one_call.skipped
        assert results.nonfinite[:count].tolist() == of_one_call.nonfinite[:count].tolist()
    assert recording.ran == pieces
    assert recording.finished == 1
    assert said == [f"report of {pieces}\nTrace: trace.json.gz, for https://ui.perfetto.dev"]

"""Test that tables of micro-batches decode to themselves from their runs, and how many runs a table has.

`test_executed` has the tables of every schedule.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import make_schedule
from ipu_jax.core.engine.scan import microbatches_at, runs_of, runs_of_ipu


def table_of(ticks_of: list[tuple[Any, list[int]]], ipus: int) -> np.ndarray:
    """Return a table (ticks, rows, ipus), with a row per stage, from its IPU and the tick of each micro-batch."""
    ticks = 1 + max(max(of_stage) for _, of_stage in ticks_of)
    table = np.full((ticks, len(ticks_of), ipus), -1, np.int32)
    for row, (ipu, of_stage) in enumerate(ticks_of):
        table[of_stage, row, ipu] = np.arange(len(of_stage))
    return table


@pytest.mark.parametrize("seed", range(3))
def test_rows_in_which_micro_batches_come_in_any_order_decode_to_themselves(seed):
    """Nothing here is a schedule: ticks have any micro-batch, some of them several times."""
    table = np.random.default_rng(seed).integers(-1, 4, (23, 3, 2)).astype(np.int32)
    runs, ticks = runs_of([table]), jnp.arange(23)
    of_ipu = jax.jit(lambda ipu: jax.vmap(lambda tick: microbatches_at(runs_of_ipu(runs, ipu), tick))(ticks))
    np.testing.assert_array_equal(np.stack([of_ipu(ipu) for ipu in range(2)], axis=2), table)


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ([0, 1, 2, 3], [(0, 1, 4, 0)]),
        ([5, 7, 9], [(5, 2, 3, 0)]),
        ([4], [(4, 1, 1, 0)]),
        ([0, 1, 3, 5, 7], [(0, 1, 2, 0), (3, 2, 3, 2)]),  # the gap before a run belongs to neither
        ([0, 2, 3, 4, 8], [(0, 2, 2, 0), (3, 1, 2, 2), (8, 1, 1, 4)]),
    ],
)
def test_runs_by_hand(ticks, expected):
    assert runs_of([table_of([(0, ticks)], 1)])[0, 0].tolist() == [list(run) for run in expected]


def test_the_number_of_runs_does_not_grow_with_the_micro_batches():
    for name, most in (("grouped", 1), ("gpipe", 1), ("1f1b", 2), ("zb-h1", 3)):
        for micro_batches in (32, 128):
            schedule = make_schedule(name, ipus=8, gradient_accumulation=micro_batches)
            forward = table_of([(ipu, list(rows)) for ipu, rows in enumerate(schedule.forward)], 8)
            assert runs_of([forward]).shape == (8, 8, most, 4), name

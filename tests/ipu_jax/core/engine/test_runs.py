"""Test that tables of micro-batches decode to themselves from their runs, and how many runs a table has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import make_schedule
from ipu_jax.core.engine.scan import microbatches_at, runs_of, runs_of_ipu
from ipu_jax.schedules import SCHEDULES


def table_of(ticks_of: list[tuple[Any, list[int]]], ipus: int) -> np.ndarray:
    """Return a table (ticks, rows, ipus), with a row per stage, from its IPU and the tick of each micro-batch."""
    ticks = 1 + max(max(of_stage) for _, of_stage in ticks_of)
    table = np.full((ticks, len(ticks_of), ipus), -1, np.int32)
    for row, (ipu, of_stage) in enumerate(ticks_of):
        table[of_stage, row, ipu] = np.arange(len(of_stage))
    return table


def decoded(tables: list[np.ndarray]) -> np.ndarray:
    runs = runs_of(tables)
    ticks, _, ipus = tables[0].shape
    of_ipu = jax.jit(
        lambda ipu: jax.vmap(lambda tick: microbatches_at(runs_of_ipu(runs, ipu), tick))(jnp.arange(ticks))
    )
    return np.stack([of_ipu(ipu) for ipu in range(ipus)], axis=2)


def assert_decodes(tables: list[np.ndarray]) -> None:
    np.testing.assert_array_equal(decoded(tables), np.concatenate(tables, axis=1))


@pytest.mark.fast("gpipe-16", "1f1b-3", "zbv-3", "looped-zb-16")
@pytest.mark.parametrize("micro_batches", [1, 3, 16])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_tables_of_every_family_decode_to_themselves(name, micro_batches):
    schedule = make_schedule(name, ipus=4, gradient_accumulation=micro_batches)
    rows = [rows for rows in (schedule.forward, schedule.backward, schedule.weight) if rows is not None]
    last = max(tick for of_kind in rows for of_stage in of_kind for tick in of_stage)
    tables = [table_of([*zip(schedule.placement, map(list, of_kind), strict=True)], 4) for of_kind in rows]
    assert_decodes([np.pad(t, ((0, last + 1 - len(t)), (0, 0), (0, 0)), constant_values=-1) for t in tables])


@pytest.mark.fast("0", "5")
@pytest.mark.parametrize("seed", range(8))
def test_rows_in_which_micro_batches_come_in_any_order_decode_to_themselves(seed):
    """Nothing here is a schedule: ticks have any micro-batch, some of them several times."""
    table = np.random.default_rng(seed).integers(-1, 4, (23, 3, 2)).astype(np.int32)
    assert_decodes([table])


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

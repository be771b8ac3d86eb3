"""Write tables of micro-batches as runs, and read an IPU's row of a tick from them.

A run is (first tick, ticks from one micro-batch to the next, number of micro-batches, first micro-batch). A stage has
one to three runs under most schedules, whatever the number of micro-batches, and at most one per micro-batch. A table
of all IPUs is a constant of each IPU's program. As runs, the tables of 256 IPUs and 512 micro-batches take 0.1 MB.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Value


def runs_of(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return the runs of each IPU and row, (ipus, rows, runs, 4) int32, in the order of their ticks.

    Args:
        tables: arrays (ticks, rows, ipus) of micro-batches, -1 where idle; all of the same shape.
    """
    rows = np.concatenate(tables, axis=1).transpose(2, 1, 0)
    found = [[_runs(row) for row in of_ipu] for of_ipu in rows]
    most = max(1, *(len(runs) for of_ipu in found for runs in of_ipu))
    none = (0, 1, 0, 0)
    return np.array([[runs + [none] * (most - len(runs)) for runs in of_ipu] for of_ipu in found], np.int32)


def _runs(row: np.ndarray) -> list[tuple[int, int, int, int]]:
    ticks = np.flatnonzero(row >= 0)
    gaps, follows = np.diff(ticks), np.diff(row[ticks]) == 1
    breaks = 1 + np.flatnonzero(~follows[1:] | (gaps[1:] != gaps[:-1]))
    runs, at = [], 0
    while at < len(ticks):
        every, end = 1, at + 1
        if at < len(gaps) and follows[at]:
            k = np.searchsorted(breaks, at + 1)
            every, end = int(gaps[at]), int(breaks[k] if k < len(breaks) else len(gaps)) + 1
        runs.append((int(ticks[at]), every, end - at, int(row[ticks[at]])))
        at = end
    return runs


def runs_of_ipu(runs: np.ndarray, ipu: Value) -> Value:
    """Return the runs of one IPU, (rows, runs, 4); its number may be traced."""
    # a constant of two dims: a TPU pads the last two
    return jnp.asarray(runs.reshape(len(runs), -1))[ipu].reshape(runs.shape[1:])


def microbatches_at(own: Value, tick: Value) -> Value:
    """Return the micro-batch of each row in a tick, (rows,) int32, or -1 where idle; `own` is an IPU's runs."""
    first, every, count, start = (own[..., k] for k in range(4))
    number = (tick - first) // every
    active = (number >= 0) & (number < count) & (first + number * every == tick)
    return jnp.max(jnp.where(active, start + number, -1), axis=1)

"""Test indices outside their array, against plain jax on one device.

jax defines what an index beyond the end reads, and what its gradient is; a pipeline must not change it.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipu_jax import Pipeline, Stage, make_mesh
from support.against_plain import assert_equals_plain, bubbles_hold_nan  # noqa: F401 (a fixture)
from support.trained import compiled_quickly

V, D, TOKENS, M = 7, 4, 6, 3
# of the first token to the last: inside, the last row, one beyond, far beyond, the last row from behind, one before all
IDS = np.array([0, V - 1, V, 2**31 - 1, -1, -V - 1], np.int32)


_compiled_quickly = compiled_quickly()


def normal(seed, *shape):
    return (np.random.default_rng(seed).normal(size=shape) / 2).astype(np.float32)


def batch_of(m, seed=0):
    """Return ids in another order for each micro-batch, so that each is beyond the end in another place."""
    rng = np.random.default_rng(seed)
    rolled = np.stack([np.roll(IDS, rng.integers(TOKENS)) for _ in range(m)])
    return {"ids": rolled, "y": normal(seed + 1, m, TOKENS, D)}


def seen(rows):
    """Return rows in which NaN, as `take` reads beyond the end, is a number, so that the loss is one."""
    return jnp.where(jnp.isnan(rows), 0.5, rows)


LEGAL = np.clip(IDS, 0, V - 1)  # a promise that all are in bounds must be kept
READS = {
    "indexed": lambda t, ids: t[ids],
    "take": lambda t, ids: seen(jnp.take(t, ids, axis=0)),
    "clip": lambda t, ids: t.at[ids].get(mode="clip"),
    "fill": lambda t, ids: t.at[ids].get(mode="fill", fill_value=0.5),
    "drop negative ones": lambda t, ids: t.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False),
    "along an axis": lambda t, ids: seen(jnp.take_along_axis(t, jnp.broadcast_to(ids[:, None], (TOKENS, D)), axis=0)),
    "slices": lambda t, ids: jnp.stack([lax.dynamic_slice_in_dim(t, i, 1)[0] for i in ids]),
    "added rows": lambda t, ids: (0 * t).at[ids].add(t[:TOKENS])[:TOKENS],
    "set rows": lambda t, ids: t.at[ids].set(2.0, mode="drop")[:TOKENS],
    "wrap": lambda t, ids: jnp.take(t, ids, axis=0, mode="wrap"),
    "clip by take": lambda t, ids: jnp.take(t, ids, axis=0, mode="clip"),
    "clip unsigned": lambda t, ids: t.at[ids.astype("uint32")].get(mode="clip"),
    "clip a part of a row": lambda t, ids: jnp.tile(t[:, 1:3].at[ids].get(mode="clip"), 2),
    "promise_in_bounds": lambda t, ids: t.at[LEGAL].get(mode="promise_in_bounds"),
}
SOME = ("indexed", "take", "slices", "drop negative ones")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "ipus", "schedule", "reads"),
    [
        ("flat", 2, "grouped", SOME),
        ("flat", 2, "grouped", READS),
        ("a row of a scanned leaf", 2, "1f1b", READS),
        ("of its own shape", 2, "zb-h1", READS),
        ("a row of a scanned leaf", 2, "zb-h1", READS),
        ("flat", 1, "1f1b", READS),
    ],
)
def test_a_table_on_one_ipu_is_read_as_plain_jax_reads_it(slot, ipus, schedule, reads):
    """Each table is in a slot with a leaf of the other IPU: the slot is flat, and longer, if that has another shape."""
    layers = (2,) if slot == "a row of a scanned leaf" else ()

    def rows_of(tables, ids):
        return sum(READS[read](table, ids) for read, table in tables.items()) / len(tables)

    def first(p, x, mb):
        if not layers:
            return rows_of(p, mb["ids"])
        layer = lambda h, tables: (jnp.tanh(h) + rows_of(tables, mb["ids"]), None)
        return lax.scan(layer, jnp.zeros((TOKENS, D)), p)[0]

    def last(p, x, mb):
        return jnp.mean((jnp.tanh(x @ sum(w.reshape(-1, D)[:D] for w in p.values())) - mb["y"]) ** 2)

    shape = (V + 1, D) if slot == "flat" else (*layers, V, D)
    params = {
        "first": {read: normal(k, *layers, V, D) for k, read in enumerate(reads)},
        "last": {read: normal(20 + k, *shape) / 4 for k, read in enumerate(reads)},
    }
    batch = batch_of(M)
    stages = [Stage(first, params="first", ipu=0), Stage(last, params="last", ipu=ipus - 1)]
    pipeline = Pipeline(stages, mesh=make_mesh(1, ipus), gradient_accumulation=M, schedule=schedule)
    assert ipus == 1 or {array.shape[1:] for array in pipeline.shard(params).arrays} == {
        ((V + 1) * D,) if slot == "flat" else shape
    }

    def plain(params):
        return jnp.mean(lax.map(lambda mb: last(params["last"], first(params["first"], None, mb), mb), batch))

    assert_equals_plain(pipeline, params, batch, plain, rtol=2e-5)

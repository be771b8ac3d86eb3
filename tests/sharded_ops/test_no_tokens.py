"""Test every op without any tokens, as on a replica without a part of a ragged batch: empty results, zero gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import (
    Split,
    argmax,
    debug_sharding,
    embedding,
    from_all,
    layer_norm,
    log_softmax,
    matmul,
    reduce_scatter_tokens,
    reduce_to,
    reduce_to_all,
    rms_norm,
    sample,
    scatter_tokens,
    softmax,
    take_along_last_dim,
    tied_projection,
    to_all,
    top_k,
)
from support.harness import on_ipus

D, V = 3, 6  # on 2 IPUs, so that D is padded
OF_REPLICA, BOTH, CUT = P("data"), P("data", "ipu"), P(("data", "ipu"))
X, HIDDEN, IDS = np.ones((0, V), np.float32), np.ones((0, D), np.float32), np.ones(0, np.int32)
TABLE, W, BIAS = np.ones((V, D), np.float32), np.ones((D, V), np.float32), np.ones(V, np.float32)
SCALE, W_ROWS = np.ones(4, np.float32), np.ones((4, V), np.float32)  # padded
HIDDEN_PADDED = np.ones((0, 4), np.float32)
ROWS, COLUMNS, WHOLE = P("ipu"), P(None, "ipu"), P()


def _sample(**options):
    return lambda x: sample(jax.random.key(0), x, size=V, **options)


# For each op: the op, its arrays and their specs, and the specs and shapes of its results.
OPS = {
    "embedding": (lambda t: embedding(t, IDS, size=V), [(TABLE, ROWS)], OF_REPLICA, (0, D)),
    "embedding-scatter": (lambda t: embedding(t, IDS, size=V, reduction="scatter"), [(TABLE, ROWS)], CUT, (0, D)),
    "embedding-features": (lambda t: embedding(t, IDS, size=V, split="features"), [(W, COLUMNS)], BOTH, (0, V)),
    "take_along_last_dim": (lambda x: take_along_last_dim(x, IDS, size=V), [(X, BOTH)], OF_REPLICA, (0,)),
    "matmul": (
        lambda x, w, b: matmul(x, w, bias=b, size=V),
        [(HIDDEN, OF_REPLICA), (W, COLUMNS), (BIAS, ROWS)],
        BOTH,
        (0, V),
    ),
    "matmul-tokens": (
        lambda x, w, b: matmul(x, w, bias=b, tokens=0),
        [(HIDDEN, CUT), (W, COLUMNS), (BIAS, ROWS)],
        BOTH,
        (0, V),
    ),
    "matmul-rows": (
        lambda x, w, b: matmul(x, w, bias=b, split="rows", size=D),
        [(HIDDEN_PADDED, BOTH), (W_ROWS, ROWS), (BIAS, WHOLE)],
        OF_REPLICA,
        (0, V),
    ),
    "matmul-scatter": (
        lambda x, w, b: matmul(x, w, bias=b, split="rows", size=D, reduction="scatter"),
        [(HIDDEN_PADDED, BOTH), (W_ROWS, ROWS), (BIAS, WHOLE)],
        CUT,
        (0, V),
    ),
    "tied_projection": (
        functools.partial(tied_projection, size=V),
        [(HIDDEN, OF_REPLICA), (TABLE, ROWS)],
        BOTH,
        (0, V),
    ),
    "rms_norm": (functools.partial(rms_norm, size=D), [(HIDDEN_PADDED, BOTH), (SCALE, ROWS)], BOTH, (0, 4)),
    "layer_norm": (
        functools.partial(layer_norm, size=D),
        [(HIDDEN_PADDED, BOTH), (SCALE, ROWS), (SCALE, ROWS)],
        BOTH,
        (0, 4),
    ),
    "softmax": (functools.partial(softmax, size=V), [(X, BOTH)], BOTH, (0, V)),
    "log_softmax": (functools.partial(log_softmax, size=V), [(X, BOTH)], BOTH, (0, V)),
    "argmax": (functools.partial(argmax, size=V), [(X, BOTH)], OF_REPLICA, (0,)),
    "top_1": (lambda x: top_k(x, 1, size=V)[0], [(X, BOTH)], OF_REPLICA, (0, 1)),
    "top_5": (lambda x: top_k(x, 5, size=V)[0], [(X, BOTH)], OF_REPLICA, (0, 5)),
    "top_5-columns": (lambda x: top_k(x, 5, size=V)[1], [(X, BOTH)], OF_REPLICA, (0, 5)),
    "sample": (_sample(), [(X, BOTH)], OF_REPLICA, (0,)),
    "sample-top_k": (_sample(top_k=5), [(X, BOTH)], OF_REPLICA, (0,)),
    "sample-top_p": (_sample(top_k=2, top_p=np.ones(0)), [(X, BOTH)], OF_REPLICA, (0,)),
    "sample-cold": (_sample(temperature=np.zeros(0)), [(X, BOTH)], OF_REPLICA, (0,)),
    "to_all": (functools.partial(to_all, owner=1), [(X, BOTH)], OF_REPLICA, (0, V // 2)),
    "from_all": (functools.partial(from_all, dim=1, size=V), [(X, BOTH)], OF_REPLICA, (0, V)),
    "reduce_to_all": (reduce_to_all, [(X, BOTH)], OF_REPLICA, (0, V // 2)),
    "reduce_to": (functools.partial(reduce_to, owner=0), [(X, BOTH)], BOTH, (0, V)),
    "scatter_tokens": (scatter_tokens, [(X, OF_REPLICA)], CUT, (0, V)),
    "scatter_tokens-ids": (scatter_tokens, [(IDS, OF_REPLICA)], CUT, (0,)),
    "reduce_scatter_tokens": (reduce_scatter_tokens, [(X, BOTH)], CUT, (0, V // 2)),
    "debug_sharding": (functools.partial(debug_sharding, name="nothing"), [(X, BOTH)], BOTH, (0, V)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("typed", [True, False])
def test_every_op_of_no_tokens(typed, dtype):
    arrays = {
        op: [array if array.dtype == np.int32 else array.astype(dtype) for array, _ in given]
        for op, (_, given, _, _) in OPS.items()
    }

    # One program of all ops, which compiles in a tenth of the time that 28 programs take.
    def each_ipu(arrays):
        return {op: fn(*arrays[op]) for op, (fn, _, _, _) in OPS.items()}

    in_specs = ({op: [spec for _, spec in given] for op, (_, given, _, _) in OPS.items()},)
    out_specs = {op: spec for op, (_, _, spec, _) in OPS.items()}
    sharded = on_ipus(each_ipu, 2, in_specs, out_specs, typed, replicas=2)

    @jax.jit
    def both(arrays):
        results, vjp = jax.vjp(sharded, arrays)
        seeds = jax.tree.map(
            lambda r: (
                jnp.ones_like(r) if jnp.issubdtype(r.dtype, jnp.floating) else np.zeros(r.shape, jax.dtypes.float0)
            ),
            results,
        )
        return results, vjp(seeds)

    results, (gradients,) = both(arrays)
    for op, (_, given, _, shape) in OPS.items():
        assert results[op].shape == shape, op
        if jnp.issubdtype(results[op].dtype, jnp.floating):
            assert results[op].dtype == dtype, op
        for (array, _), gradient in zip(given, gradients[op], strict=True):
            assert gradient.shape == array.shape, op
            assert not gradient.size or not np.any(np.asarray(gradient, np.float32)), op


def test_a_split_of_no_rows_and_a_size_of_none():
    split = Split(0, 4)
    assert (split.local, split.padded, split.padding, split.count(3)) == (0, 0, 0, 0)
    assert split.pad(np.ones((2, 0)), 1).shape == split.unpad(np.ones((2, 0)), 1).shape == (2, 0)

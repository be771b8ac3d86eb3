"""Test what each op sends on 2 IPUs, forward and backward: the collectives in the compiled program, and their bytes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import (
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
    take_along_last_dim,
    tied_projection,
    to_all,
    top_k,
)
from support.harness import collectives, on_ipus

ROWS, COLUMNS, WHOLE = P("ipu"), P(None, "ipu"), P()
IDS = np.zeros(5, np.int32)


def _looked_up(table, **options):
    return embedding(table, IDS, size=4, **options)


def _picked(x):
    return take_along_last_dim(x, IDS, size=4)


def _with_bias(x, w, bias, **options):
    return matmul(x, w, bias=bias, **options)


def _drawn(x, **options):
    return sample(jax.random.key(0), x, size=6, **options)


def _largest(x, k):
    return top_k(x, k, size=6)[0]


def _squared(x, scale, op):
    """Square a norm, so that its cotangent depends on the result; else the compiler would merge both all-reduces."""
    return op(x, scale, size=4) ** 2


def _gathers(size):
    return [("all-gather", size)]


def _reduces(size):
    return [("all-reduce", size)]


def _scatters(size):
    return [("reduce-scatter", size)]


X, PARTS, TABLE = [((3, 4), WHOLE)], [((6, 3), ROWS)], [((4, 4), ROWS)]
X_COLUMNS, W_COLUMNS, W_ROWS = [((3, 4), COLUMNS)], [((4, 6), COLUMNS)], [((4, 6), ROWS)]
LOGITS, NORMED = [((5, 6), COLUMNS)], ([((3, 4), COLUMNS), ((4,), ROWS)], COLUMNS)
BIAS, WHOLE_BIAS = [((6,), ROWS)], [((6,), WHOLE)]
_of = functools.partial
_scattered = _of(_with_bias, split="rows", reduction="scatter")
# The op; the shape and the spec of each operand; the spec of the result; what is sent forward, and backward if typed
# and if untyped. A float32 has 4 bytes. Where the gradient needs what is gathered forward, that is sent in both.
SENT: list[tuple[Any, ...]] = [
    (
        _of(log_softmax, size=6),
        [((5, 6), COLUMNS)],
        COLUMNS,
        _gathers(80),
        _gathers(80) + _reduces(20),
        _gathers(80) + _scatters(40),
    ),
    # The result of 5 lookups is (5, 4), that of 5 picks (5,); scattered, (3, 4) on each IPU.
    (_looked_up, TABLE, WHOLE, _reduces(80), [], _reduces(80)),
    (_picked, [((5, 4), COLUMNS)], WHOLE, _reduces(20), [], _reduces(20)),
    (_of(_looked_up, reduction="scatter"), TABLE, ROWS, _scatters(48), *[_gathers(96)] * 2),
    (_of(_looked_up, split="features"), [((4, 4), COLUMNS)], COLUMNS, [], [], []),
    # dx is (3, 4), 48 bytes, and the result (3, 6), 72; padded, 64 and 96; a bias has 24.
    (matmul, X + W_COLUMNS, COLUMNS, [], *[_reduces(48)] * 2),
    (_of(matmul, split="rows"), X_COLUMNS + W_ROWS, WHOLE, _reduces(72), [], _reduces(72)),
    (_of(_with_bias, tokens=3), TABLE + W_COLUMNS + BIAS, COLUMNS, _gathers(64), *[_gathers(64) + _scatters(32)] * 2),
    (_scattered, X_COLUMNS + W_ROWS + WHOLE_BIAS, ROWS, _scatters(48), *[_gathers(96) + _reduces(24)] * 2),
    (_of(tied_projection, size=6), [*X, ((6, 4), ROWS)], COLUMNS, [], *[_reduces(48)] * 2),
    # x is (3, 3) on each IPU, 36 bytes, and a slice of it (2, 3), 24.
    (_of(reduce_to, owner=1), PARTS, ROWS, *[_reduces(36)] * 3),
    (reduce_scatter_tokens, PARTS, ROWS, _scatters(24), *[_gathers(48)] * 2),
    (scatter_tokens, [((3, 3), WHOLE)], ROWS, [], _gathers(48), _reduces(36)),
    (_of(to_all, owner=1), PARTS, WHOLE, _reduces(36), [], _reduces(36)),
    (_of(from_all, dim=0, size=6), PARTS, WHOLE, _gathers(72), [], _scatters(36)),
    (reduce_to_all, PARTS, WHOLE, _reduces(36), [], _reduces(36)),
    (_of(debug_sharding, name="x"), [((4, 3), ROWS)], ROWS, _gathers(32), *[_gathers(32) * 2] * 2),
    # A float of 3 tokens has 12 bytes.
    (_of(_squared, op=rms_norm), *NORMED, _reduces(12), *[_reduces(12) * 2] * 2),
    (_of(_squared, op=layer_norm), *NORMED, _gathers(48), *[_gathers(48) + of for of in (_reduces(24), _scatters(24))]),
    # Each IPU has 3 columns: of 5 tokens, a value and a column of each candidate. Indices have no gradient.
    (_of(argmax, size=6), LOGITS, WHOLE, _gathers(80), None, None),
    (_of(_largest, k=2), LOGITS, WHOLE, _gathers(160), _gathers(160), _gathers(160) + _reduces(40)),
    (_of(_largest, k=6), LOGITS, WHOLE, _gathers(240), _gathers(240), _gathers(240) + _reduces(120)),
    (_drawn, LOGITS, WHOLE, _gathers(80), None, None),
    (_of(_drawn, top_k=2, top_p=0.5), LOGITS, WHOLE, _gathers(160), None, None),
    # A nucleus of all columns sends no rows.
    (_of(_drawn, min_p=0.1), LOGITS, WHOLE, _gathers(80) + _reduces(20), None, None),
    (_of(_drawn, top_p=0.9), LOGITS, WHOLE, _gathers(80) * 2 + _reduces(20) * 2 + _reduces(300), None, None),
]


def _cases():
    """Yield both kinds of types where they send other things, and else one of the two in turn, with the other slow."""
    for number, (op, *row, typed, untyped) in enumerate(SENT):
        for is_typed, backward in ((True, typed), (False, untyped)):
            marks = pytest.mark.slow if typed == untyped and number % 2 == is_typed else ()
            name = getattr(op, "func", op).__name__.strip("_")
            forward = row[-1] if is_typed or typed == untyped else None  # which is sent in both
            values = (is_typed, op, *row[:-1], forward, backward)
            yield pytest.param(*values, marks=marks, id=f"{name}-{number}-{is_typed}")


@pytest.mark.parametrize(("typed", "op", "operands", "out_spec", "forward", "backward"), list(_cases()))
def test_each_op_sends_what_it_says(typed, op, operands, out_spec, forward, backward):
    shapes, specs = zip(*operands, strict=True)
    sharded, arrays = on_ipus(op, 2, specs, out_spec, typed), [jnp.ones(shape) for shape in shapes]
    assert forward is None or collectives(sharded, *arrays) == forward
    if backward is None:
        return
    ct = jnp.ones(jax.eval_shape(sharded, *arrays).shape)
    assert collectives(lambda ct, *arrays: jax.vjp(sharded, *arrays)[1](ct), ct, *arrays) == sorted(backward)

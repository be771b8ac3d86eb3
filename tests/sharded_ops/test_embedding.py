"""Test lookups in a split dim against indexing of the whole array, also with indices that are in no shard."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, embedding, take_along_last_dim
from support.dense_twins import dense_embedding, dense_take_along_last_dim
from support.harness import (
    a_few_cases,
    assert_close,
    dense_vjp,
    every_case,
    examples,
    normal,
    on_ipus,
    padded,
    seeds,
    split_vjp,
)

TOKENS = 6
FAR = (-(2**31), 2**31 - 1)


def _indices(size: int) -> st.SearchStrategy[list[int]]:
    """Return indices: mostly valid ones, with repetitions; negative ones, ones beyond the end, and int32's extremes."""
    each = st.one_of(st.integers(0, size - 1), st.integers(-size - 1, 2 * size), st.sampled_from(FAR))
    return st.lists(each, min_size=TOKENS, max_size=TOKENS)


@every_case
@examples
@given(seed=seeds, data=st.data())
def test_embedding(mode, n, size, dtype, seed, data):
    table, ct = normal(seed, (size, 3), dtype), normal(seed + 1, (2, 3, 3), dtype)
    ids = np.array(data.draw(_indices(size)), np.int32).reshape(2, 3)

    out, (dtable,) = split_vjp(embedding, mode, n, [table], [ids], dims=[0], ct=ct, size=size)

    want, (want_dtable,) = dense_vjp(dense_embedding, [table], [ids], ct=ct)
    np.testing.assert_array_equal(out, want)
    # A row's gradient is the sum of up to 6 cotangents in the table's dtype, in another order on each side; untyped,
    # each cotangent is divided by n first.
    bound = dense_vjp(dense_embedding, [table], [ids], ct=np.abs(ct).astype(dtype))[1][0]
    assert_close(dtable, want_dtable, bound, roundings=2 * TOKENS + n + 1)


@pytest.mark.parametrize("form", ["scatter", "features"])
@a_few_cases
@examples
@given(seed=seeds, data=st.data())
def test_embedding_scattered_over_tokens_and_split_by_features(mode, n, size, dtype, form, seed, data):
    """The table is split by rows and the result by tokens, or both by features."""
    dim, columns = (0, 3) if form == "scatter" else (1, size)
    rows = size if form == "scatter" else 7
    options: dict[str, Any] = {"reduction": "scatter"} if form == "scatter" else {"split": "features"}
    table, ct = normal(seed, (rows, columns), dtype), normal(seed + 1, (TOKENS, columns), dtype)
    ids = np.array(data.draw(_indices(rows)), np.int32)

    out, (dtable,) = split_vjp(embedding, mode, n, [table], [ids], dims=[dim], out_dim=dim, ct=ct, size=size, **options)

    want, (want_dtable,) = dense_vjp(dense_embedding, [table], [ids], ct=ct)
    np.testing.assert_array_equal(out, want)
    bound = dense_vjp(dense_embedding, [table], [ids], ct=np.abs(ct).astype(dtype))[1][0]
    assert_close(dtable, want_dtable, bound, roundings=2 * TOKENS)


@every_case
@examples
@given(seed=seeds, data=st.data())
def test_take_along_last_dim(mode, n, size, dtype, seed, data):
    x, ct = normal(seed, (2, 3, size), dtype), normal(seed + 1, (2, 3), dtype)
    indices = np.array(data.draw(_indices(size)), np.int32).reshape(2, 3)

    out, (dx,) = split_vjp(take_along_last_dim, mode, n, [x], [indices], dims=[2], ct=ct, size=size)

    want, (want_dx,) = dense_vjp(dense_take_along_last_dim, [x], [indices], ct=ct)
    np.testing.assert_array_equal(out, want)
    # Untyped, the cotangent is divided by n and summed again: n + 1 roundings.
    assert_close(dx, want_dx, np.abs(want_dx.astype(np.float32)), roundings=n + 1)


@pytest.mark.parametrize("shape", [(), (4,), (2, 1, 3), (0,)])
def test_ids_of_any_shape(shape):
    table = normal(0, (4, 3))
    ids = np.arange(int(np.prod(shape))).reshape(shape).astype(np.int32) - 1
    out = on_ipus(functools.partial(embedding, size=4), 2, (P("ipu"), P()), P())(table, ids)
    np.testing.assert_array_equal(out, dense_embedding(table, ids))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_ids_of_any_integer_dtype(dtype):
    size = 200  # more rows than an int8 can count
    table = normal(0, (size, 2))
    ids = np.array([0, 1, 126, 127, np.iinfo(dtype).min, np.iinfo(dtype).max]).astype(dtype)
    out = on_ipus(functools.partial(embedding, size=size), 4, (P("ipu"), P()), P())(table, ids)
    np.testing.assert_array_equal(
        out, dense_embedding(table, jnp.array(ids.astype(np.int64).clip(-1, size), jnp.int32))
    )


def test_no_gradient_is_scattered_twice_for_a_row_on_the_border():
    split = Split(5, 2)  # rows 0 1 2 | 3 4 and padding
    ids = np.array([2, 3, 2, 5, -1], np.int32)
    sharded = on_ipus(functools.partial(embedding, size=5), 2, (P("ipu"), P()), P())
    dtable = jax.grad(lambda table: sharded(table, ids).sum())(padded(split, np.ones((5, 1), np.float32), 0))
    assert dtable.ravel().tolist() == [0, 0, 2, 1, 0, 0]

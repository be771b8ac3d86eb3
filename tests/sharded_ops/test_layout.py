"""Test how a dim is split: the arithmetic by its properties, the arrays by what each IPU holds."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_ops import Split
from sharded_ops._split import as_int32, check_one_per_row, split_over
from support.harness import SPLITS, mesh_of, on_ipus
from support.refusals import refusals, refused


@given(size=st.integers(1, 200), parts=st.integers(1, 40))
def test_the_ipus_share_the_rows_out_in_order(size, parts):
    split = Split(size, parts)
    rows = [list(range(split.offset(i), split.offset(i) + split.count(i))) for i in range(parts)]
    assert list(itertools.chain(*rows)) == list(range(size))
    assert max(map(len, rows)) == split.local
    assert split.padding == sum(split.local - len(of_ipu) for of_ipu in rows)
    assert split.padded == size + split.padding
    assert split.padding < parts


@pytest.mark.parametrize(("n", "size", "dim"), [(*split, k % 3 - 1) for k, split in enumerate(SPLITS)])
def test_each_ipu_holds_its_rows_and_then_zeros(n, size, dim):
    split = Split(size, n)
    array = np.arange(1, 3 * size + 1).reshape((size, 3) if dim == 0 else (3, size))
    padded = split.pad(array, dim)

    on_ipus = jax.device_put(padded, NamedSharding(mesh_of(n), split.spec(dim, 2, "ipu")))

    for index, shard in enumerate(sorted(on_ipus.addressable_shards, key=lambda shard: shard.device.id)):
        real = np.take(array, range(split.offset(index), split.offset(index) + split.count(index)), axis=dim)
        held, padding = np.split(np.asarray(shard.data), [split.count(index)], axis=dim)
        np.testing.assert_array_equal(held, real)
        np.testing.assert_array_equal(padding, 0)
        assert shard.data.shape[dim] == split.local
    np.testing.assert_array_equal(split.unpad(on_ipus, dim), array)


def test_padding_and_dropping_it_are_each_others_transpose():
    split = Split(5, 4)
    small, large = jnp.arange(10.0).reshape(2, 5), jnp.arange(16.0).reshape(2, 8)
    (pulled_back,) = jax.vjp(lambda x: split.pad(x, 1), small)[1](large)
    np.testing.assert_array_equal(pulled_back, split.unpad(large, 1))
    (pulled_back,) = jax.vjp(lambda x: split.unpad(x, 1), large)[1](small)
    np.testing.assert_array_equal(pulled_back, split.pad(small, 1))


def test_a_split_of_no_rows_and_a_size_of_none():
    split = Split(0, 4)
    assert (split.local, split.padded, split.padding, split.count(3)) == (0, 0, 0, 0)
    assert split.pad(np.ones((2, 0)), 1).shape == split.unpad(np.ones((2, 0)), 1).shape == (2, 0)


HALVES: Any = Split(4, 2)
CHECK: Any = check_one_per_row


@refusals(
    (lambda: Split(-1, 2), "size=-1 is out of range", "an int of at least 0"),
    (lambda: Split(4, 0), "parts=0 is out of range", "an int of at least 1"),
    (lambda: Split(4.0, 2), "size=4.0 is not an int", "an int of at least 0"),  # pyright: ignore[reportArgumentType]
    (lambda: Split(4, True), "parts=True is not an int", "an int of at least 1"),
    (lambda: HALVES.offset(2), "index=2 names no IPU of 2", "0 to 1"),
    (lambda: HALVES.offset(np.int64(4)), "index=4 names no IPU of 2", "0 to 1"),
    (lambda: HALVES.offset(True), "index=True is not an int", "give an int"),
    (lambda: HALVES.count(-1), "index=-1 names no IPU of 2", "0 to 1"),
    (lambda: HALVES.pad(np.ones((3, 5)), 1), "pad: dim 1", "has 5 rows", "takes 4", "whose dim 1 has 4"),
    (lambda: Split(3, 2).unpad(np.ones(3), -1), "unpad: dim -1", "has 3 rows", "takes 4", "whose dim -1 has 4"),
    (lambda: HALVES.pad(np.ones(4), 1), "pad: dim=1 ", "of 1 dims", "-1 to 0"),
    (lambda: HALVES.pad(np.ones(4), None), "dim=None is not an int", "give an int"),
    (lambda: HALVES.unpad(np.ones(4), 0.0), "dim=0.0 is not an int", "give an int"),
    (lambda: HALVES.pad([1.0] * 3, 0), "array=[1.0, 1.0, 1.0] is not an array", "such as jnp.asarray makes"),
    (lambda: HALVES.spec(2, 2, "ipu"), "spec: dim=2 ", "of 2 dims", "-2 to 1"),
    (lambda: HALVES.spec(0, 2, ("data", "ipu")), "axis=('data', 'ipu') ", "the name of one mesh axis", "such as 'ipu'"),
    (lambda: as_int32("ids", np.ones(3), 4), "ids has dtype float64", "must be integers", "use int32"),
    (lambda: as_int32("ids", np.array([True]), 4), "ids has dtype bool", "must be integers", "use int32"),
    (
        lambda: CHECK("labels", np.zeros((3, 1), np.int32), np.ones((3, 4))),
        *("labels has shape (3, 1)", "a shard of shape (3, 4)", "give shape (3,)"),
    ),
    (lambda: on_ipus(lambda: split_over(2**31 - 1, "ipu"), 2, (), P())(), "size=2147483647", "int32", "2**31 - 2"),
)
def test_a_mistake_in_a_split_is_told_with_its_mend(call, holds):
    with refused(*holds):
        call()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize(
    ("size", "on_device"),  # sizes are more than fits into 8 bits, and into 16
    [(3, False), (1000, False), (70_000, False), pytest.param(70_000, True, marks=pytest.mark.slow)],
)
def test_any_integer_dtype_is_taken_and_none_wraps(dtype, size, on_device):
    limits = np.iinfo(dtype)
    values = [
        limits.min,
        limits.max,
        *(v for v in (-1, 0, 2, 3, 999, 1000, 69_999, 70_000, 2**32 + 1) if limits.min <= v <= limits.max),
    ]
    with jax.enable_x64(on_device):  # otherwise a 64-bit array would be truncated to 32 bits on its way to the device
        indices = np.array(values, dtype)
        got = as_int32("ids", jnp.asarray(indices) if on_device else indices, size)
    assert got.dtype == jnp.int32
    assert got.tolist() == [value if 0 <= value < size else -1 for value in values]


@pytest.mark.parametrize(("index", "taken"), [(2, 2), (3, -1), (-1, -1), (2**40, -1)])
def test_a_plain_int_is_an_index(index, taken):
    assert as_int32("ids", index, 3).tolist() == taken

"""Test argmax and top_k of a split dim against jnp.argmax and lax.top_k: values and columns; gradients in test_ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, argmax, sample, top_k
from support.harness import SPLITS, normal, on_ipus, padded
from support.transforms import COLUMNS, INF, NAN, in_transforms

LOWEST, HIGHEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max

# Each row is cut to the size of the split. There are ties within a shard and between shards, at every place.
FLOATS = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 3, 2, 3, 3, 1, 3, 2, 3, 0],
        [-INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF, -INF],
        [-INF, -1, -INF, -1, -2, -2, -INF, -1, -INF, -INF],
        [INF, 0, INF, NAN, 1, NAN, INF, 0, NAN, 1],
        [1, 2, 3, 4, 5, 6, 7, 8, 9, NAN],
        [9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
        [-9, -8, -7, -6, -5, -4, -3, -2, -1, -0.5],
    ],
    np.float32,
)
INTS = np.array(
    [
        [LOWEST] * 10,
        [5, LOWEST, 5, HIGHEST, 5, HIGHEST, 0, 0, -1, HIGHEST],
        [LOWEST] * 4 + [LOWEST + 1] + [LOWEST] * 5,
        [7] * 10,
    ],
    np.int32,
)


def _choices(x, *, size):
    """Return argmax, and top_k for few columns, for more than an IPU has, and for all."""
    return argmax(x, size=size), *(top_k(x, k, size=size) for k in sorted({1, (size + 2) // 2, size}))


def _dense_choices(x):
    size = x.shape[-1]
    ks = sorted({1, (size + 2) // 2, size})
    return jnp.argmax(x, -1).astype(jnp.int32), *(tuple(lax.top_k(x, k)) for k in ks)


def _both(floats, ints, *, size):
    return _choices(floats, size=size), _choices(ints, size=size)


@pytest.mark.slow
@pytest.mark.parametrize("fill", [NAN, INF])
@pytest.mark.parametrize(
    ("n", "size", "typed", "replicas"),
    [
        *((n, size, i % 2 == 0, None) for i, (n, size) in enumerate((*SPLITS, (3, 7), (8, 10)))),
        *((n, 10, typed, 2) for n in (1, 2, 4) for typed in (True, False)),
    ],
)
def test_choices_are_jnp_argmaxs_and_lax_top_ks(n, size, typed, replicas, fill):
    split = Split(size, n)
    rows = np.concatenate([FLOATS[:, :size], normal(0, (8, size))])
    ints = INTS[:, :size]
    data = "data" if replicas else None
    run = on_ipus(functools.partial(_both, size=size), n, P(data, "ipu"), P(data), typed, replicas)
    got = run(padded(split, rows, 1, fill), padded(split, ints, 1, fill=HIGHEST))
    want = _dense_choices(rows), _dense_choices(ints)
    jax.tree.map(_assert_equal, got, want)


def _assert_equal(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "uint32", "bfloat16", "float16")


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [pytest.param(DTYPES[::2], marks=pytest.mark.slow), DTYPES[1::2]], ids=" ".join)
def test_choices_in_every_real_dtype(dtypes):
    split = Split(7, 3)
    values = np.array([[0, 1, 1, 250, 3, 250, 7], [1, 0, 100, 5, 120, 100, 0]])
    extremes = {"int8": -128, "int16": -32768, "uint16": 65535, "uint32": 2**32 - 1, "float16": -6e4, "bfloat16": 3e38}
    rows = []
    for name in dtypes:
        array = np.minimum(values, 127).astype(name) if name == "int8" else values.astype(name)
        array[:, 4] = extremes.get(name, array[0, 4])
        rows.append(array)

    def each_ipu(*rows):
        return [(argmax(row, size=7), top_k(row, 5, size=7)) for row in rows]

    run = on_ipus(each_ipu, 3, (COLUMNS,) * len(rows), P())
    got = run(*(padded(split, row, 1, fill=1) for row in rows))
    for choices, row in zip(got, map(jnp.asarray, rows), strict=True):
        want = jnp.argmax(row, -1).astype(jnp.int32), tuple(lax.top_k(row, 5))
        jax.tree.map(_assert_equal, choices, want)


@pytest.mark.slow
def test_choices_among_64_bit_values():
    with jax.enable_x64(True):
        rows = np.array([[2**53, 2**53 + 1, -(2**62)]]), np.array([[1.0, 1 + 2.0**-50, 1.0]])
        each_ipu = lambda *rows: [_choices(row, size=3) for row in rows]
        shards = (padded(Split(3, 2), row, 1, fill=2**60) for row in rows)
        got = on_ipus(each_ipu, 2, (COLUMNS, COLUMNS), P())(*shards)
        jax.tree.map(_assert_equal, got, [_dense_choices(jnp.asarray(row)) for row in rows])


def test_nan_is_largest_whatever_its_sign():
    x = np.array([[1, np.copysign(NAN, -1), 3, np.copysign(NAN, 1), -INF]], np.float32)
    best, *_, (values, columns) = on_ipus(functools.partial(_choices, size=5), 3, COLUMNS, P())(
        padded(Split(5, 3), x, 1, INF)
    )
    assert best.tolist() == [1]
    assert columns.tolist() == [[1, 3, 2, 0, 4]]
    np.testing.assert_array_equal(values, [[NAN, NAN, 3, 1, -INF]])


def _top_values(x, *, size, k):
    return top_k(x, k, size=size)[0]


def _dense_top_values(x, *, k):
    return lax.top_k(x, k)[0]


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_forward_mode_and_second_derivatives(typed):
    x, dx = normal(0, (2, 6)), normal(1, (2, 6))

    def of(op):
        def energy(x):
            return (op(x) ** 3).sum()

        return jax.jit(lambda x, dx: jax.jvp(jax.grad(energy), (x,), (dx,)))

    sharded = on_ipus(functools.partial(_top_values, size=6, k=4), 2, COLUMNS, P(), typed)
    got, want = of(sharded)(x, dx), of(functools.partial(_dense_top_values, k=4))(x, dx)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


@in_transforms
def test_choices_may_stand_in_vmap_and_scan(transform, typed):
    x = normal(0, (4, 2, 5))
    each_ipu = transform(functools.partial(_choices, size=5))
    got = on_ipus(each_ipu, 2, P(None, None, "ipu"), P(), typed)(padded(Split(5, 2), x, 2))
    jax.tree.map(_assert_equal, got, _dense_choices(x))


def test_shards_that_are_alike_on_all_ipus():
    """Constants inside a shard_map with check_vma=True vary over no axis, so shards must be marked with lax.pcast."""

    def each_ipu(key):
        x = lax.pcast(jnp.arange(3.0).at[1].set(7), "ipu", to="varying")  # columns 0-2, and the same in 3-5
        return *top_k(x, 3, size=6), argmax(x, size=6), sample(key, x, size=6, temperature=0.01)

    values, columns, best, drawn = on_ipus(each_ipu, 2, P(), P())(jax.random.key(0))
    assert values.tolist() == [7, 7, 2]
    assert (columns.tolist(), best, int(drawn) in (1, 4)) == ([1, 4, 2], 1, True)

"""Test reading examples from arrays and from indexables, always into new memory."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ipu_jax.data.leaves import filling
from ipu_jax.data.source import ArraySource, normalise
from support.refusals import refused

INDICES = np.array([4, 0, 4, 2])


class Squares:
    """An indexable that returns the same buffer again and again."""

    def __init__(self, count=5):
        self._count, self._buffer = count, np.zeros((99, 2), np.float32)

    def __len__(self):
        return self._count

    def __getitem__(self, indices):
        self._buffer[: len(indices)] = (indices**2)[:, None]
        return [self._buffer[: len(indices)]]


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (np.uint8, np.uint8),
        (np.bool_, np.bool_),
        (np.int64, np.int32),
        (np.float64, np.float32),
        (np.float16, np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (">i4", np.int32),
        (np.uint64, np.uint32),
    ],
)
def test_arrays_of_every_dtype_are_read_as_jax_holds_them(dtype, held):
    array = np.arange(30).reshape(5, 3, 2).astype(dtype)
    array.flags.writeable = False
    source = ArraySource((array, {"n": array[:, 0, 0]}))
    first, second = source.read(INDICES)
    assert (source.examples, first.dtype, second["n"].dtype) == (5, held, held)
    np.testing.assert_array_equal(first, array[INDICES].astype(held))
    np.testing.assert_array_equal(second["n"], array[INDICES, 0, 0].astype(held))
    assert source.like[0] == jax.ShapeDtypeStruct((3, 2), held)
    first[:] = 0  # new memory, and writable


def test_a_jax_array_is_a_source_too():
    assert ArraySource(jnp.arange(5) * 2).read(INDICES).tolist() == [8, 0, 8, 4]


def test_a_buffer_that_is_used_again_changes_nothing_that_was_read():
    source = ArraySource(Squares())
    (first,) = source.read(INDICES)
    sent = jax.device_put(first)
    source.read(np.array([1, 1, 1, 1]))
    assert first[:, 0].tolist() == sent[:, 0].tolist() == [16, 0, 16, 4]


def test_big_integers_are_refused_when_they_are_read():
    source = ArraySource({"id": np.array([1, 2**31, -(2**40)])})
    assert source.read(np.array([0]))["id"].tolist() == [1]
    for index, value in ((1, 2147483648), (2, -1099511627776)):
        with refused(f"{value} at source['id']", "int32 cannot hold", "set jax_enable_x64"):
            source.read(np.array([0, index]))


def test_filling_takes_the_sources_structure():
    like = ArraySource({"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.int32)}).like
    assert filling(-1, like) == {"x": -1, "y": -1}
    assert filling({"x": 0.5, "y": 7}, like) == {"x": 0.5, "y": 7}


# bytes as numbers


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_bytes_are_normalised_alike_on_host_and_ipu_but_for_rounding(dtype):
    every = np.arange(256, dtype=np.uint8)[:, None]
    mean, std = np.array([0.5, 0.1307, 0.9]), np.array([0.5, 0.3081, 0.2])
    on_ipu = jax.jit(lambda values: normalise(values, mean=mean, std=std, dtype=dtype))(jnp.asarray(every))
    on_host = normalise(every, mean=mean, std=std, dtype=dtype)
    exact = (every / 255 - mean) / std
    assert on_ipu.dtype == on_host.dtype == dtype
    # three roundings, of the quotient, of the difference and of the result; the first two are divided by std
    tolerance = 4 * float(jnp.finfo(dtype).eps) / std.min()
    for found in (on_ipu, on_host):
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=tolerance, rtol=0)

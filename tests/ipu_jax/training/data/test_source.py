"""Test reading examples from arrays, indexables and datasets, always into new memory, and tensors as arrays.

The oracle of examples that are read one at a time is a feed of the same examples as arrays.
"""

import collections

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ipu_jax import Feed, make_mesh
from ipu_jax.training.data.source import ArraySource, ExampleSource, normalise
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


# examples that are read one at a time by their numbers, and other libraries' tensors

N = 29
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)


class Tensor:
    """Like a tensor of torch: NumPy converts it."""

    def __init__(self, values):
        self._values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self._values


class Eager:
    """Like a tensor of TensorFlow that NumPy cannot convert by itself."""

    def __init__(self, values):
        self._values = values

    def numpy(self):
        return self._values


class Dataset:
    """Like a dataset of torch: an int gives one example."""

    def __init__(self, wrap=lambda x: x):
        self._wrap = wrap

    def __len__(self):
        return N

    def __getitem__(self, index):
        if not isinstance(index, int):
            raise TypeError(f"{type(index).__name__} is not an int")
        return self._wrap(X[index]), index


@pytest.mark.parametrize(
    "source",
    [
        Dataset(),
        Dataset(Tensor),
        Dataset(lambda x: Eager(x.tolist())),
        Dataset(lambda x: x.tolist()),
        [(X[k], np.int64(k)) for k in range(N)],
        tuple((Tensor(X[k]), k) for k in range(N)),
    ],
    ids=["dataset", "torch", "tensorflow", "lists", "a list", "a tuple"],
)
@pytest.mark.parametrize(("prefetch", "workers"), [(0, 1), (4, 3)])
def test_examples_are_read_in_the_order_of_arrays(source, prefetch, workers):
    options = {"mesh": make_mesh(2, 1), "micro_batch": 3, "remainder": "pad", "fill": -1, "seed": 5, "epochs": 2}
    with Feed((X, np.arange(N)), **options, prefetch=0) as feed:
        expected = list(feed)
    with Feed(source, items="examples", **options, prefetch=prefetch, workers=workers) as feed:
        assert len(feed) == 5
        found = [next(feed) for _ in range(3)]
        state = feed.state()
        found += feed
    for batch, wanted in zip(found, expected, strict=True):
        for leaf, of_arrays in zip(batch.data, wanted.data, strict=True):
            np.testing.assert_array_equal(leaf, of_arrays)
            assert (leaf.dtype, leaf.sharding) == (of_arrays.dtype, of_arrays.sharding)
    with Feed(source, items="examples", **options, state=state) as feed:
        np.testing.assert_array_equal(next(feed).data[0], expected[3].data[0])


def test_arrays_may_be_other_libraries_tensors():
    source = ArraySource({"x": Tensor(X), "y": Eager(np.arange(N))})
    read = source.read(np.array([4, 0]))
    np.testing.assert_array_equal(read["x"], X[[4, 0]])
    assert read["y"].tolist() == [4, 0]


def test_any_mapping_is_a_dict_and_structures_may_be_nested():
    rows = [collections.UserDict({"a": {"b": (k, [k, 2.5])}, "c": [np.float32(k), np.zeros(2)]}) for k in range(4)]
    read = ExampleSource(rows).read(np.array([3, 1]))
    assert read["a"]["b"][0].tolist() == [3, 1]
    assert read["a"]["b"][1].tolist() == [[3, 2.5], [1, 2.5]]
    assert [leaf.shape for leaf in read["c"]] == [(2,), (2, 2)]


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

"""Test feeds of examples that are read one at a time by their numbers, and of other libraries' tensors.

The oracle is a feed of the same examples as arrays, whose batches test_feed compares with a plain loop.
"""

import collections

import numpy as np
import pytest

from ipu_jax import Feed, make_mesh
from ipu_jax.data.leaves import on_host
from ipu_jax.data.source import ArraySource, ExampleSource

N = 29
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)


class Tensor:
    """Like a tensor of torch: NumPy converts it, unless it has a gradient."""

    def __init__(self, values, requires_grad=False):
        self._values, self._requires_grad = np.asarray(values), requires_grad

    def __array__(self, dtype=None, copy=None):
        if self._requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
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


def test_a_leaf_that_no_library_converts_is_left_as_it_is():
    assert on_host("text") == "text"
    assert on_host(3) == 3

"""Test how leaves are made of saved arrays, and that everything that does not fit is said at once."""

import itertools
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ipu_jax.io import Saved, import_weights
from ipu_jax.training.weight_files import importing
from ipu_jax.training.weight_files._tensors import TensorInfo


def draw(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


A, B, C = draw(6, 4), draw(6, 4, seed=1), draw(2, 3, 5, 7, seed=2)
TREE = {"a": A, "b": B, "c": C, "d": {"e": draw(3)}}


def made(saved, like, **options):
    used = {name for name in ("a", "b", "c", "d/e") if name not in saved.names}
    return import_weights(TREE, {"w": like}, mapping={"w": saved}, ignore=used, **options)["w"]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (Saved("a"), A),
        (Saved("d/e"), TREE["d"]["e"]),
        (Saved("a").transpose(), A.T),
        (Saved("c").transpose(2, 3, 1, 0), C.transpose(2, 3, 1, 0)),
        (Saved("c").transpose(-1, 0, 1, 2), C.transpose(3, 0, 1, 2)),
        (Saved("a").reshape(8, 3), A.reshape(8, 3)),
        (Saved("a").reshape(2, -1), A.reshape(2, 12)),
        (Saved("a").part(1, of=3), A[2:4]),
        (Saved("a").part(0, of=[1, 3], dim=1), A[:, :1]),
        (Saved("a").part(1, of=[1, 3], dim=-1).transpose(), A[:, 1:].T),
        (Saved("a", "b").join(0), np.concatenate([A, B])),
        (Saved("a", "b").transpose().join(-1), np.concatenate([A.T, B.T], 1)),
        (Saved("a", "b").part(0, of=2, dim=1).stack(), np.stack([A[:, :2], B[:, :2]])),
        (Saved("a", "b", "a").stack(-1), np.stack([A, B, A], -1)),
        (Saved("a").astype("bfloat16"), A.astype(ml_dtypes.bfloat16)),
        (Saved("a").apply(np.flipud).transpose(), A[::-1].T),
        (Saved("a", "b").apply(np.abs).join(0), abs(np.concatenate([A, B]))),
    ],
    ids=str,
)
def test_a_leaf_is_made_as_numpy_makes_it(saved, expected):
    for like in (expected, jax.ShapeDtypeStruct(expected.shape, expected.dtype), jnp.zeros_like(expected)):
        found = made(saved, like)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize(
    ("saved", "rows"),
    [
        (Saved("a", "b").stack(), (slice(1, 2),)),
        (Saved("a", "b").transpose().stack(-1), (slice(None), slice(2, 4), slice(1, 2))),
        (Saved("a", "b").join(0), (slice(len(A) + 1, len(A) + 3),)),
        (Saved("b", "a").transpose().join(-1), (slice(1, 3), slice(2))),
    ],
    ids=str,
)
def test_rows_of_one_of_several_arrays_are_no_copy_of_all(saved, rows):
    """So an IPU that holds some layers of a stack reads their pages of the file only."""
    found = saved.array(TREE.__getitem__)
    assert np.shares_memory(found[rows], B)
    assert not np.shares_memory(found[rows], A)
    np.testing.assert_array_equal(found[rows], np.asarray(found)[rows])


def test_everything_that_does_not_fit_is_one_error():
    tree = {
        "layer": {"weigth": draw(2, 3), "bias": draw(3), "conv": draw(8, 4, 3, 3)},
        "extra": draw(1),
        "wide": draw(2, dtype=np.float64),
        "both": draw(2, dtype=np.float64),
    }
    like = {
        "layer": {"weight": draw(2, 3), "bias": draw(4), "conv": draw(3, 3, 4, 8)},
        "wide": draw(2),
        "both": draw(3),
        "gone": draw(2),
    }
    with pytest.raises(ValueError, match="does not fit") as caught:
        import_weights(tree, like, mapping={"layer/bais": "layer/bias", "gone": Saved("x", "extra").join(0)})
    first, *problems, last = str(caught.value).splitlines()
    assert first == "the tree does not fit `like`, 9 problems:"
    assert [problem.strip() for problem in problems] == [
        "mapping has 'layer/bais', not a leaf: did you mean 'layer/bias'?",
        "shape: leaf 'both' is float32[3], and the array float64[2]",
        "dtype: leaf 'both' is float32[3], and the array float64[2], which may lose digits: cast=True rounds",
        "missing: 'x', for leaf 'gone'",
        "shape: leaf 'layer/bias' is float32[4], and the array float32[3]",
        "shape: leaf 'layer/conv' is float32[3, 3, 4, 8], and the array float32[8, 4, 3, 3]: "
        ".transpose(2, 3, 1, 0) would fit",
        "missing: 'layer/weight': did you mean 'layer/weigth'?",
        "dtype: leaf 'wide' is float32[2], and the array float64[2], which may lose digits: cast=True rounds",
        "unexpected: 'layer/weigth' float32[2, 3], which no leaf takes: did you mean 'layer/weight'?",
    ]
    assert last.startswith("Say mapping=")


@pytest.mark.parametrize(("saved", "leaves"), [(3000, 3000), (3000, 2), (2, 3000)])
def test_thousands_of_wrong_names_are_counted_and_compared_a_bounded_number_of_times(monkeypatch, saved, leaves):
    compared = []
    near = lambda name, names, **options: compared.append(len(names)) or []
    monkeypatch.setattr(importing.difflib, "get_close_matches", near)
    tree = {f"model.layers.{k:04}.weight": draw(1) for k in range(saved)}
    like = {f"blocks {k:04}": draw(1) for k in range(leaves)}
    with pytest.raises(ValueError, match=f"{saved + leaves} problems:") as caught:
        import_weights(tree, like)
    _, *problems, more, _ = str(caught.value).splitlines()
    named = [*(f"missing: {name!r}" for name in like), *(f"unexpected: {name!r}" for name in tree)][:100]
    assert [problem.strip() for problem in problems] == [
        text if text.startswith("missing") else f"{text} float32[1], which no leaf takes" for text in named
    ]
    assert more == f"  and {saved + leaves - 100:,} more"
    assert 0 < sum(compared) <= 10_000


def test_many_names_that_fit_are_looked_up_in_linear_time():
    class Counting(dict):
        reads = 0

        def __getitem__(self, name):
            Counting.reads += 1
            return super().__getitem__(name)

        def __iter__(self):
            for name in super().__iter__():
                Counting.reads += 1
                yield name

    infos = {f"w{k}": TensorInfo((1,), np.dtype(np.float32)) for k in range(1000)}
    source: Any = SimpleNamespace(label="a file", tensors=Counting(infos))
    assert len(importing.fit(infos, source, None, (), cast=False)) == 1000
    assert 0 < Counting.reads <= 10 * 1000


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:])
def test_the_transposition_of_three_dims_is_named(order):
    shape = (2, 3, 4)
    source, like = {"w": np.zeros(shape)}, {"w": np.zeros([shape[d] for d in order])}
    with pytest.raises(ValueError, match=re.escape(f".transpose({', '.join(map(str, order))}) would fit")):
        import_weights(source, like)


@pytest.mark.parametrize("patterns", ["*", ["a*"], ("a", "a?")])
def test_ignored_arrays_are_not_unexpected(patterns):
    found = import_weights({"w": A, "a": A, "ab": A}, {"w": A}, ignore=patterns)
    np.testing.assert_array_equal(found["w"], A)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("float16", "float32"), ("bfloat16", "float32"), ("int8", "int32"), ("int16", "float32"), ("float32", "float64")],
)
def test_what_a_dtype_holds_exactly_is_converted_unasked(stored, wanted):
    values = np.array([1.5, -0.0, 3, np.inf] if "float" in stored else [1, -2, 127, 0], jnp.dtype(stored))
    found = import_weights([values], [np.zeros(4, wanted)])[0]
    assert found.dtype == wanted
    np.testing.assert_array_equal(found, values.astype(wanted))


@pytest.mark.parametrize(
    ("stored", "wanted", "values", "expected"),
    [
        ("float64", "float32", [1 + 2.0**-25, -0.0, 1e-60, np.inf], [1, -0.0, 0, np.inf]),
        ("float32", "bfloat16", [1.0, 1.00390625, 1.01171875, np.nan], [1, 1, 1.015625, np.nan]),  # ties: to even
        ("float32", "float16", [65504.0, 1 + 2.0**-12, -0.5, 0], [65504, 1, -0.5, 0]),
        ("int64", "int32", [2**31 - 1, -5, 0, 1], [2**31 - 1, -5, 0, 1]),
        ("float32", "int32", [1.0, -5.0, 0.0, 2.0**24], [1, -5, 0, 2**24]),
    ],
)
def test_numbers_are_rounded_where_asked(stored, wanted, values, expected):
    source = [np.array(values, stored)]
    with pytest.raises(ValueError, match="may lose digits: cast=True rounds"):
        import_weights(source, [np.zeros(4, jnp.dtype(wanted))])
    found = import_weights(source, [np.zeros(4, jnp.dtype(wanted))], cast=True)[0]
    np.testing.assert_array_equal(found.astype(np.float64), expected)


def test_imported_arrays_share_no_memory_with_their_source():
    source = {"w": np.ones(64, np.float32)}
    for like in ({"w": np.zeros(64, np.float32)}, {"w": jnp.zeros(64)}):
        found = import_weights(source, like)
        source["w"][:] = 7
        assert float(found["w"].sum()) == 64
        source["w"][:] = 1

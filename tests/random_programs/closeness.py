"""Check that a result is about as close to the exact result as a dense program that rounds as often.

A case's dense program runs in float64, which gives the exact result, and in the case's own dtypes, which shows the
effect of rounding. It also runs from float32 weights that are changed by one unit in the last place and, in half types,
with rounding after each operation: no program can be expected to be closer than these differences. None of the dense
programs uses our library. The error of a result may then be

    4 x the dense programs' own worst error in that leaf      rounding depends on chance and on the order of sums
    + ULPS eps of the largest number in that leaf             in case the dense program was exact by chance
    + eps / 4 of the largest gradient of all, or of `terms`   terms that cancel in a leaf were as large as in others

where eps belongs to the coarsest dtype in which the case computes. For float32 this allows 1e-6 of a leaf. The error of
a gradient that misses one micro-batch of eight, or is in the wrong leaf, is 10,000 times larger. Numbers that are not
finite in float64, such as weights of a training run that diverges, must not be finite in the result either.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

ULPS = 8


def assert_close(what: str, found: Any, exact: Any, rounded: Sequence[Any], eps: float, *, terms: float = 0.0) -> None:
    """Raise `AssertionError` with every leaf of `found` whose error is larger than the errors of `rounded` allow.

    Args:
        what: the name of the tree.
        found: the result to be checked.
        exact: the right result, a tree of the same structure and shapes.
        rounded: the dense program's results in the case's own dtypes, each a tree like `exact`.
        eps: the eps of the coarsest dtype of the computation.
        terms: the largest number that is known to cancel on the way to all leaves.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(exact)]
    assert jax.tree.structure(found) == jax.tree.structure(exact), (
        f"{what} has the tree {jax.tree.structure(found)}, and should have {jax.tree.structure(exact)}"
    )
    found, exact, *rounded = ([_float64(leaf) for leaf in jax.tree.leaves(tree)] for tree in (found, exact, *rounded))
    largest = max([terms, *(np.abs(leaf[np.isfinite(leaf)]).max(initial=0) for leaf in exact)])
    wrong = []
    for path, f, e, *of_rounded in zip(paths, found, exact, *rounded, strict=True):
        if f.shape != e.shape:
            wrong.append(f"{what}{path} has shape {f.shape}, and should have {e.shape}")
            continue
        finite = np.isfinite(e)
        if not np.array_equal(np.isfinite(f), finite):
            wrong.append(
                f"{what}{path} has {(~np.isfinite(f)).sum()} numbers that are not finite, not {(~finite).sum()}"
            )
            continue
        f, e, *of_rounded = (np.where(finite, leaf, 0) for leaf in (f, e, *of_rounded))
        own = max(np.abs(r - e).max(initial=0) for r in of_rounded)
        allowed = 4 * own + ULPS * eps * np.abs(e).max(initial=0) + eps / 4 * largest
        off = np.abs(f - e).max(initial=0)
        if not off <= allowed:
            wrong.append(
                f"{what}{path} of shape {f.shape} is off by {off:.3g}, where {allowed:.3g} is allowed; "
                f"its largest number should be {np.abs(e).max(initial=0):.3g}, and is {np.abs(f).max(initial=0):.3g}"
            )
    assert not wrong, "\n".join(wrong)


def assert_same_bits(found: Any, expected: Any) -> None:
    """Raise `AssertionError` unless two trees have equal structures, shapes, dtypes and bits; keys count as numbers."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        is_key = isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key)
        a, b = (np.asarray(jax.random.key_data(leaf) if is_key else leaf) for leaf in (a, b))
        assert (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes()), (
            f"{jax.tree_util.keystr(path)} has other bits"
        )


def coarsest(dtypes: Any) -> float:
    """Return the eps of the coarsest of these floating dtypes, but at least float32's eps."""
    return max([float(jnp.finfo(jnp.float32).eps), *(float(jnp.finfo(dtype).eps) for dtype in dtypes)])


def as_float64(tree: Any) -> Any:
    """Return the exact program's input: floating leaves as numpy's float64, other leaves unchanged."""
    return jax.tree.map(lambda leaf: _float64(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def nudged(tree: Any, seed: int) -> Any:
    """Return the tree with each float32 or float64 number changed at random, by at most one unit in its last place."""
    rng = np.random.default_rng(seed)

    def move(leaf: Any) -> Any:
        if leaf.dtype not in (np.float32, np.float64):
            return leaf
        return (leaf * (1 + np.finfo(leaf.dtype).eps * rng.uniform(-1, 1, leaf.shape))).astype(leaf.dtype)

    return jax.tree.map(move, tree)


def of_all_processes(leaf: Any) -> Any:
    """Return an array of several processes whole on each of them, and anything else unchanged."""
    is_elsewhere = isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    return multihost_utils.process_allgather(leaf, tiled=True) if is_elsewhere else leaf


def _float64(leaf: Any) -> np.ndarray:
    return np.asarray(of_all_processes(leaf)).astype(np.float64)

"""Test rows of a stacked leaf in all the ways in which a function can take them: the right rows, wherever it is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from support.composed import composed, cut_into
from support.inputs import normal

LAYERS, D = 6, 4
PARAMS = {"w": 0.5 * normal((LAYERS, D, D)), "head": normal((D, 3), seed=1)}
X = normal((5, D), seed=2)


def layers(x, rows):
    return lax.scan(lambda x, w: (x + jnp.sin(x @ w), None), x, rows)[0]


def each(x, rows):
    for k in range(len(rows)):
        x = x + jnp.sin(x @ rows[k])
    return x


def taken(w, k):
    return lax.dynamic_index_in_dim(w, k, keepdims=False)


WAYS = {
    "rows of rows": lambda w, x: each(each(x, w[:4]), w[4:]),
    "rows of rows of rows": lambda w, x: each(x, w[1:][1:][1:3]),
    "scans of rows": lambda w, x: layers(layers(x, w[:2]), w[2:]),
    "a scan of rows of rows": lambda w, x: layers(x, w[1:][2:]),
    "two halves, the last first": lambda w, x: layers(layers(x, w[3:]), w[:3]),
    "a loop, then a scan": lambda w, x: layers(each(x, w[:2]), w[2:]),
    "negative": lambda w, x: each(each(x, w[-4:-1]), w[-1:]),
    "strided": lambda w, x: each(each(x, w[1::2]), w[::2]),
    "strided rows of rows": lambda w, x: layers(x, w[2:][::2]),
    "reversed": lambda w, x: each(x, w[::-1]),
    "reversed rows": lambda w, x: layers(x, w[3:][::-1]),
    "a reversed scan": lambda w, x: lax.scan(lambda x, w: (x + jnp.sin(x @ w), None), x, w[2:], reverse=True)[0],
    "dynamic_slice": lambda w, x: each(x, lax.dynamic_slice_in_dim(w[1:], 2, 3)),
    "dynamic_index": lambda w, x: x @ taken(w[2:], 1) + jnp.sin(x @ taken(w, 1)),
    "the same row by two slices": lambda w, x: each(x, w[2:]) @ w[:4][2] + jnp.sin(each(x, w[1:4])),
    "cast rows": lambda w, x: layers(layers(x, (2 * w[:3]).astype(jnp.bfloat16).astype(jnp.float32)), 2 * w[3:]),
    "rows of columns": lambda w, x: each(x, w[2:, :, 1:][:, :, :1]) @ w[1],
    "a norm of rows that no layer reads": lambda w, x: each(x, w[1:4]) / jnp.linalg.norm(w),
    "rows along 1, some of them turned": lambda w, x: x @ w[:, 0][:D] + jnp.sin(x @ jnp.roll(w, 1, 0)[:, 1][:D]),
    "no rows": lambda w, x: layers(each(x, w[4:4]), w),
    "unstack": lambda w, x: functools.reduce(lambda x, row: x + jnp.sin(x @ row), jnp.unstack(2 * w)[1:], x) @ w[0],
    "split": lambda w, x: layers(each(x, jnp.split(w, 3)[1]), jnp.split(w, [2, 5])[1]),
}


@pytest.mark.fast(
    *("two halves, the last first", "a loop, then a scan", "negative", "strided rows of rows", "reversed rows"),
    *("rows of columns", "a reversed scan", "a norm of rows that no layer reads"),
    "rows along 1, some of them turned",
)
@pytest.mark.parametrize("way", WAYS)
def test_a_function_reads_its_own_rows_wherever_it_is_cut(way):
    def loss(params, x):
        return jnp.mean((WAYS[way](params["w"], x) @ params["head"]) ** 2)

    expected, gradients = jax.jit(jax.value_and_grad(loss))(PARAMS, X)
    for stages in (2, 3):
        run = jax.value_and_grad(composed(cut_into(stages, loss, PARAMS, X)), has_aux=True)
        (value, _), found = jax.jit(run)(PARAMS, None, X)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for name, leaf in gradients.items():
            np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-5 * np.abs(leaf).max(), err_msg=name)


@pytest.mark.parametrize("rows", [slice(0, 3), slice(3, 6), slice(1, 2), slice(2, None, -1), slice(None)])
def test_rows_that_only_a_result_reads_are_of_the_same_leaf(rows):
    def loss(params, state, x):
        x = layers(layers(x, params["w"][:3]), params["w"][3:])
        return jnp.mean(x**2), {"sum": params["w"][rows].sum(0)}, {"first": params["head"][0]}

    for stages in (1, 2, 3):
        model = cut_into(stages, loss, PARAMS, X, state={"first": jnp.zeros(3)})
        held: dict[int, list] = {}
        for parts in model.weights.parts_of_groups.values():
            for part in parts:
                held.setdefault(part.leaf, []).append(part.rows or (0, jax.tree.leaves(PARAMS)[part.leaf].shape[0]))
        for leaf, ranges in held.items():  # each row of each leaf is held once
            ends = [0, *(stop for _, stop in sorted(ranges))]
            assert [start for start, _ in sorted(ranges)] == ends[:-1], (leaf, ranges)
        _, (aux, _) = jax.jit(composed(model))(PARAMS, {"first": jnp.zeros(3)}, X)
        np.testing.assert_allclose(aux["sum"], PARAMS["w"][rows].sum(0), rtol=1e-6)

"""Test updates of a leaf whose rows along any of its axes are in several parts, against optax on the whole leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

from ipu_jax.base.keys import without_keys
from ipu_jax.core.layout.packed_layout import PackedLayout, plan_layout
from ipu_jax.core.layout.whole_tree import Part, WholeTree, divided, joined
from ipu_jax.core.optimizer._rows import in_rows
from support.inputs import normal
from support.refusals import refused

PARAMS = {"b": normal((4,)), "w": normal((6, 6, 6), seed=1)}
LOSS = jnp.float32(0.5)


def layout_of(axis: int) -> PackedLayout:
    """Return where the leaves are: "w" in three unequal parts."""
    rows = [Part(1, rows, axis) for rows in ((0, 1), (1, 4), (4, 6))]
    groups = {"stage 0": [Part(0), rows[0]], "stage 1": [rows[1]], "stage 2": [rows[2]]}
    whole = WholeTree.of("params", PARAMS, groups)
    return plan_layout(whole.split(PARAMS), {name: k for k, name in enumerate(groups)}, {}, 3, whole=whole)


def updated_in_parts(tx: Any, axis: int) -> tuple[Any, Any]:
    """Return the last updates and state of a divided update, joined, and of optax on whole leaves."""
    layout, state = layout_of(axis), tx.init(PARAMS)
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), PARAMS)
    of_optax, in_parts = jax.jit(tx.update), layout.arranged(layout.groups_of(tree))
    closed = jax.make_jaxpr(lambda g, s, p, _: tx.update(g, s, p))(PARAMS, state, PARAMS, LOSS)
    leaves = jax.tree.leaves(layout.arranged({group.name: list(group.leaves) for group in layout.groups}))
    update, like = in_rows(closed, in_parts, jax.eval_shape(lambda: state), leaves)
    run, treedef = jax.jit(core.jaxpr_as_fun(update)), jax.tree.structure((in_parts, like))
    of_parts, updates, expected = divided(state, like), None, None
    for seed in (3, 4):  # the second update reads the state of the first
        gradients = jax.tree.map(lambda leaf: normal(leaf.shape, seed=seed), PARAMS)  # noqa: B023
        args = divided(gradients, in_parts), of_parts, divided(PARAMS, in_parts), LOSS
        updates, of_parts = jax.tree.unflatten(treedef, run(*jax.tree.leaves(args)))
        expected, state = of_optax(gradients, state, PARAMS)
    return joined((updates, of_parts)), (expected, state)


def of_flat(updates: Any, _: Any) -> Any:
    """Scale each leaf by numbers that follow from the flat leaf, where the order of its elements counts."""

    def one(leaf: jax.Array) -> jax.Array:
        flat = leaf.ravel()
        weighed = jnp.sum(jnp.abs(flat) * jnp.cos(jnp.arange(flat.size)) + jnp.ones(flat.shape) / flat.size)
        return leaf * weighed + jnp.vdot(flat, 2 * flat) / flat.size + flat.max()

    return jax.tree.map(one, updates)


def by_axes(updates: Any, _: Any) -> Any:
    """Scale by another number along each axis."""
    rates = lambda leaf, axis: jnp.arange(leaf.shape[axis]).reshape([-1 if k == axis else 1 for k in range(leaf.ndim)])
    return jax.tree.map(lambda leaf: sum(leaf * rates(leaf, axis) for axis in range(leaf.ndim)), updates)


TRANSFORMS = {
    "adam": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
    "lamb": optax.lamb(0.1),
    "every 2": optax.MultiSteps(optax.lion(0.1), 2).gradient_transformation(),
    "noise": optax.add_noise(0.1, 0.5, 7),
    "flat": optax.stateless(of_flat),
    "rates": optax.stateless(by_axes),
}


@pytest.mark.fast("adam-1", "flat-1", "flat-2", "rates-1", "rates-2", "every 2-1")
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_rows_along_later_axes_are_updated_as_in_the_whole_leaf(name, axis):
    found, expected = updated_in_parts(TRANSFORMS[name], axis)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(without_keys(f), without_keys(e), rtol=1e-5, atol=1e-6)


FLAT_STATE = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.ravel, params),
    lambda updates, state, params=None: (updates, jax.tree.map(lambda u, s: s + u.ravel(), updates, state)),
)


def test_a_flat_state_can_be_in_parts_along_axis_0_alone():
    found, expected = updated_in_parts(FLAT_STATE, 0)
    np.testing.assert_allclose(found[1]["w"], expected[1]["w"], rtol=1e-6)
    with refused("its reshape", "params['w'] of shape (6, 6, 6) in one piece", "one array per layer"):
        updated_in_parts(FLAT_STATE, 1)

"""Test optimizers that skip an update of all weights, where the weights lie apart, against optax on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from ipu_jax import Pipeline, make_mesh
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.optimizer.update import ShardedUpdate
from support.trained import MODELS, compiled_quickly
from support.updates import check_model, gradients_for

EVERY_OTHER: Any = lambda step: step % 2 == 0
TOO_LARGE = functools.partial(optax.transforms.skip_large_updates, max_squared_norm=1e6)


def multi_steps(optimizer, **options):
    steps: Any = optax.MultiSteps(optimizer, 2, **options)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


OPTIMIZERS = {
    "if finite": optax.apply_if_finite(optax.adamw(1e-2), 5),
    "if finite, clipped and noisy": optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(0.5), optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)), 5
    ),
    "if finite, twice": optax.apply_if_finite(optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 5), 5),
    "if finite, muon": optax.apply_if_finite(optax.contrib.muon(0.1), 5),
    "if finite, adafactor": optax.apply_if_finite(optax.adafactor(1e-2, min_dim_size_to_factor=4), 5),
    "steps": multi_steps(optax.lamb(1e-2)),
    "steps without NaN": multi_steps(optax.adam(1e-2), should_skip_update_fn=optax.transforms.skip_not_finite),
    "steps of a sum, small": multi_steps(optax.sgd(0.1), use_grad_mean=False, should_skip_update_fn=TOO_LARGE),
    "every other": optax.transforms.conditionally_transform(optax.adam(1e-2), EVERY_OTHER),
    "masked every other": optax.transforms.conditionally_mask(optax.adam(1e-2), EVERY_OTHER),
    "novograd": optax.novograd(1e-2),
    "mechanize": optax.contrib.mechanize(optax.sgd(0.1)),
}


_compiled_quickly = compiled_quickly()


def one_is_nan(params):
    """Return gradients of which the second update's have one NaN, in the last leaf, and the others none."""
    leaves, treedef = jax.tree.flatten(gradients_for(params))
    leaves[-1] = leaves[-1].at[1].set(leaves[-1][1].at[(-1,) * (leaves[-1].ndim - 1)].set(jnp.nan))
    return jax.tree.unflatten(treedef, leaves)


LOCAL, SPLIT, TIED = "unlike local stages", "a concurrent head, split unevenly", "a tied table, split unevenly"
CASES = [
    (LOCAL, 1, ("if finite",), one_is_nan),
    (SPLIT, 2, ("if finite",), one_is_nan),
    (LOCAL, 1, ("steps without NaN",), one_is_nan),
    (TIED, 1, ("if finite", "if finite, twice"), one_is_nan),
    (SPLIT, 1, ("steps without NaN", "steps of a sum, small"), one_is_nan),
    (SPLIT, 2, ("if finite, clipped and noisy", "steps of a sum, small"), one_is_nan),
    (LOCAL, 1, ("if finite, muon",), one_is_nan),
    (LOCAL, 1, ("if finite, adafactor",), one_is_nan),
    (LOCAL, 1, ("mechanize", "novograd"), gradients_for),
    (SPLIT, 1, ("steps", "novograd"), gradients_for),
    (SPLIT, 2, ("every other", "masked every other"), gradients_for),
    ("like stages stacked", 1, ("every other", "steps"), gradients_for),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "replicas", "names", "gradients"), CASES)
def test_conditions_between_trees_equal_plain_optax(model, replicas, names, gradients):
    check_model(model, replicas, {name: OPTIMIZERS[name] for name in names}, gradients)


def test_a_condition_of_one_leaf_stays_one():
    """Only the IPU that has the leaf runs a branch; a condition between trees is gone."""

    def each_leaf(tree, _):
        return jax.tree.map(lambda g: jax.lax.cond(g.sum() > 0, jnp.sort, jnp.negative, g), tree)

    dense, ipus = MODELS[LOCAL]()
    layout = Pipeline(dense.stages, mesh=make_mesh(1, ipus)).shard(dense.params).layout
    blocks = Blocks(layout, replicas=1)
    conds_of = lambda optimizer: [
        eqn for eqn in ShardedUpdate(optimizer, blocks).analysis.jaxpr.eqns if eqn.primitive.name == "cond"
    ]
    assert len(conds_of(optax.stateless(each_leaf))) == len(blocks.leaves)
    assert not conds_of(optax.apply_if_finite(optax.sgd(0.1), 5))


@pytest.mark.slow
def test_whole_numbers_of_leaves_that_lie_apart_are_told_exactly():
    large = 2**24 + 1  # the first that float32 cannot tell from another

    def remainder(tree, _):
        numbers = [jnp.where(leaf < 9, large, 0) for leaf in jax.tree.leaves(tree)]
        total = sum(jnp.sum(n) % 1001 + jnp.max(n) + jnp.min(n) for n in numbers) % 101
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, total), tree)

    check_model(SPLIT, 2, {"remainder": optax.stateless(remainder)})

"""Run optax updates of drawn gradients on weights in slots, shards and chunks, and by plain optax on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ipu_jax import Pipeline, make_mesh
from ipu_jax.base.keys import without_keys
from ipu_jax.core.layout import blocks as zero
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.blocks import Blocks, to_blocks
from ipu_jax.core.optimizer.update import ShardedUpdate
from support.dense import largest_relative_error
from support.trained import MODELS, state_error

STEPS = 3


def gradients_for(params):
    """Return gradients of all updates, stacked, like the weights."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda w: jnp.asarray(rng.normal(size=(STEPS, *w.shape)), w.dtype), params)


def plain(optimizer, params, gradients):
    """Return weights and state after all updates by optax on one device."""
    optimizer = optax.with_extra_args_support(optimizer)

    def one(carry, at):
        (params, state), (i, g) = carry, at
        updates, state = optimizer.update(g, state, params, value=i)
        return (optax.apply_updates(params, updates), state), None

    def run(params, gradients):
        first = (params, optimizer.init(params))
        return jax.lax.scan(one, first, (jnp.arange(STEPS) * 1.0, gradients))[0]

    return jax.jit(run)(params, gradients)


def spread(pipeline, optimizers, params, gradients, replicas):
    """Return, for each optimizer, whole weights and state after all updates, and the sharded weights."""
    placed = pipeline.shard(params)
    # each replica has a part of the gradient, and the sum of the parts is the gradient
    each = [pipeline.shard(jax.tree.map(lambda g, i=i: g[i] / replicas, gradients)) for i in range(STEPS)]
    of_gradients = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    blocks = Blocks(placed.layout, replicas=replicas)
    updates = {name: ShardedUpdate(optimizer, blocks) for name, optimizer in optimizers.items()}
    trained = dict(zip(blocks.leaves, jax.tree.leaves(params), strict=True))
    states = {name: update.init(trained.__getitem__, pipeline.mesh) for name, update in updates.items()}
    specs = {name: packing.specs_of(state.layout) for name, state in states.items()}

    def one(update, carry, at):
        (params, state), (i, sharded) = carry, at
        g = to_blocks(sharded)
        g = zero.scatter(blocks, g) if replicas > 1 else g
        params, _, state = update.apply(g, state, params, i)
        return params, state

    def program(params, states, gradients):
        def step(carry, at):
            return {name: one(update, carry[name], at) for name, update in updates.items()}, None

        first = {name: (params, states[name]) for name in updates}
        return jax.lax.scan(step, first, (jnp.arange(STEPS) * 1.0, gradients))[0]

    of_params = packing.specs_of(placed.layout)
    stacked = jax.tree.map(lambda spec: P(None, *spec), of_params, is_leaf=lambda leaf: isinstance(leaf, P))
    run = jax.shard_map(
        program,
        mesh=pipeline.mesh,
        in_specs=(of_params, specs, stacked),
        out_specs={name: (of_params, specs[name]) for name in updates},
        check_vma=False,
    )
    found = jax.jit(run)(placed, states, of_gradients)
    results = {}
    for name, (weights, state) in found.items():
        whole = packing.unshard_tree(state)
        for array, restored in zip(state.arrays, updates[name].restore(whole, pipeline.mesh).arrays, strict=True):
            np.testing.assert_array_equal(*map(without_keys, (array, restored)), err_msg=name)
        results[name] = (pipeline.unshard(weights), whole, weights)
    return results


def padding_is_zero(sharded):
    """Return whether only leaves have been written, so that unused parts of slots and padding of shards are still 0."""
    magnitude = lambda tree: sum(float(jnp.abs(a.astype(jnp.float32)).sum()) for a in jax.tree.leaves(tree))
    total, whole = magnitude(sharded), magnitude(packing.unshard_tree(sharded))
    return abs(total - whole) <= 1e-5 * total


def check_model(model, replicas, optimizers, gradients=None):
    """Check the optimizers on one of `support.trained.MODELS`; a `gradients` function replaces `gradients_for`."""
    dense, ipus = MODELS[model]()
    pipeline = Pipeline(dense.stages, mesh=make_mesh(replicas, ipus), specs=dense.specs)
    check(pipeline, dense.params, optimizers, gradients=gradients and gradients(dense.params))


def check(pipeline, whole, optimizers, tolerance=1e-6, gradients=None):
    """Assert that weights and states are equal to `plain`'s, and padding is untouched."""
    gradients, replicas = gradients_for(whole) if gradients is None else gradients, pipeline.replicas
    for name, (params, state, sharded) in spread(pipeline, optimizers, whole, gradients, replicas).items():
        expected, expected_state = plain(optimizers[name], whole, gradients)
        assert largest_relative_error(params, expected) <= tolerance, name
        # norms are summed in another order; a half differs by one rounding if its float32 value was near a tie
        assert state_error(state, expected_state) <= (1e-2 if name == "half momentum" else 2 * tolerance), name
        assert padding_is_zero(sharded), name

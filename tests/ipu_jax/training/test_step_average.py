"""Test the moving average of the weights against a plain loop over optax on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from support.dense import chain, largest_relative_error
from support.small_problems import product_loss, product_rows, product_weights
from support.trained import batches_of, compiled_quickly

DECAY, STEPS = 0.75, 3


_compiled_quickly = compiled_quickly()


def averaged(history):
    """Return the average by its definition, in float64."""
    wide = [jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree) for tree in history]
    average = wide[0]
    for tree in wide[1:]:
        average = jax.tree.map(lambda e, w: DECAY * e + (1 - DECAY) * w, average, tree)
    return average


def test_a_pipeline_with_unlike_slots_and_an_uneven_split():
    model = chain((0, 1, None), 2, replicas=2, like=False)
    options = TrainOptions(device_iterations=STEPS, shard_optimizer=True, ema_decay=DECAY)
    step = make_train_step(model.pipeline(2), optax.sgd(0.5), options)
    state, _ = step(step.init(model.params), batches_of(model, STEPS))

    @jax.jit
    def updated(params, batch):
        _, gradients = dataclasses.replace(model, params=params, batch=batch).twin()
        return jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients)

    history = [model.params]
    for i in range(STEPS):
        history.append(updated(history[-1], jax.tree.map(lambda leaf, i=i: leaf[i], batches_of(model, STEPS))))
    expected = averaged(history)
    assert largest_relative_error(step.whole(state)["ema"], expected) <= 1e-6
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), model.batch)
    as_weights = jax.tree.map(jnp.float32, expected)
    loss = np.mean(jax.jit(jax.vmap(lambda microbatch: model.dense(as_weights, microbatch)))(flat))
    batches = jax.tree.map(lambda leaf: jnp.stack([leaf] * STEPS), model.batch)
    np.testing.assert_allclose(step.loss(state, batches, ema=True), loss, rtol=1e-5)


def test_in_half_the_average_is_of_rounded_weights_in_float32():
    options = TrainOptions(precision="16.16", stochastic_rounding=True, ema_decay=DECAY)
    step = make_train_step(product_loss, optax.sgd(0.1), options)
    state, history = step.init(product_weights(), key=jax.random.key(0)), []
    history.append(step.whole(state)["params"])
    for batch in product_rows(STEPS, 1):
        state, _ = step(state, batch)
        history.append(step.whole(state)["params"])
    found = step.whole(state)["ema"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"float32"}
    assert largest_relative_error(found, averaged(history)) <= 1e-6
    of_average = step.init(found, key=jax.random.key(0))  # in half
    assert float(step.loss(state, product_rows(1), ema=True)) == float(step.loss(of_average, product_rows(1)))


def split_pipeline(ipus, **options):
    """A local stage with a frozen leaf that shares a slot, and a head that is split over the IPUs."""
    first = lambda p, x, mb: mb @ p["u"] * p["fixed"]  # noqa: E731
    last = lambda p, x, mb: jnp.mean(lax.psum(jnp.sum(x @ p["v"]), "ipu") ** 2 + p["gain"] ** 2)  # noqa: E731
    middle = lambda p, x, mb: x + p["b"]  # noqa: E731
    stages = [
        Stage(first, params="first", ipu=0),
        Stage(middle, params="middle", ipu=ipus - 1),
        Stage(last, params="last", ipu=ALL_IPUS),
    ]
    specs = {"last": {"v": P(None, "ipu"), "gain": P()}}
    return Pipeline(stages, mesh=make_mesh(1, ipus), specs=specs, frozen={"first": {"fixed": True, "u": False}})


def split_weights():
    rng = np.random.default_rng(2)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "first": {"u": draw(5, 3), "fixed": draw(3)},
        "middle": {"b": draw(3)},
        "last": {"v": draw(3, 5), "gain": draw()},
    }


def test_training_continues_on_other_ipus_from_what_was_saved():
    options = TrainOptions(ema_decay=DECAY)
    on = {ipus: make_train_step(split_pipeline(ipus), optax.sgd(1e-3), options) for ipus in (2, 4)}
    state = on[2].init(split_weights())
    for batch in product_rows(2, 1):
        state, _ = on[2](state, batch)
    saved = on[2].whole(state)
    np.testing.assert_array_equal(saved["ema"]["first"]["fixed"], split_weights()["first"]["fixed"])
    moved = on[4].restore(saved)
    for found, expected in zip(*map(jax.tree.leaves, (on[4].whole(moved)["ema"], saved["ema"])), strict=True):
        np.testing.assert_array_equal(found, expected)
    losses = [on[2].loss(state, product_rows(1), ema=True), on[4].loss(moved, product_rows(1), ema=True)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    dense = saved["ema"]
    hidden = product_rows(1)[0] @ dense["first"]["u"] * dense["first"]["fixed"] + dense["middle"]["b"]
    expected = float(jnp.sum(hidden @ dense["last"]["v"]) ** 2 + dense["last"]["gain"] ** 2)
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)


def test_an_average_begins_anew_from_a_state_without_one():
    plain, averaging = (make_train_step(product_loss, optax.sgd(0.1), TrainOptions(ema_decay=d)) for d in (None, DECAY))
    saved = plain.whole(plain.init(product_weights()))
    del saved["ema"]  # as an older version saved it
    assert plain.whole(plain.restore(saved))["ema"] is None
    begun = averaging.restore({**saved, "ema": saved["params"]})
    np.testing.assert_array_equal(averaging.whole(begun)["ema"]["u"], product_weights()["u"])

"""Test the moving average of the weights against a plain loop over optax on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import TrainOptions, make_train_step
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


def test_an_average_begins_anew_from_a_state_without_one():
    plain, averaging = (make_train_step(product_loss, optax.sgd(0.1), TrainOptions(ema_decay=d)) for d in (None, DECAY))
    saved = plain.whole(plain.init(product_weights()))
    del saved["ema"]  # as an older version saved it
    assert plain.whole(plain.restore(saved))["ema"] is None
    begun = averaging.restore({**saved, "ema": saved["params"]})
    np.testing.assert_array_equal(averaging.whole(begun)["ema"]["u"], product_weights()["u"])

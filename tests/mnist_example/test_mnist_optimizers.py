"""Test the optimizers by name: each is optax's, and bad names and rates are refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mnist_example.optimizers import NAMES, default_learning_rate, keeps_state_in_float16, make_optimizer

OPTAX = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lamb": optax.lamb(0.1),
}


def weights_after(optimizer, updates=3):
    weights: Any = jnp.array([1.0, -2.0, 0.5])  # optax's types allow trees of arrays only
    state = optimizer.init(weights)
    for number in range(updates):
        changes, state = optimizer.update(weights * (number + 1), state, weights)
        weights = optax.apply_updates(weights, changes)
    return np.asarray(weights)


def test_every_name_is_optaxs_own_optimizer():
    assert set(NAMES) == set(OPTAX)
    found = {name: weights_after(make_optimizer(name, 0.1)) for name in NAMES}
    for name, optimizer in OPTAX.items():
        np.testing.assert_array_equal(found[name], weights_after(optimizer))
    assert len({weights.tobytes() for weights in found.values()}) == len(NAMES)


def test_learning_rates_start_where_each_optimizer_learns():
    found = {name: default_learning_rate(name, of_sgd=0.02) for name in NAMES}
    assert found == {"sgd": 0.02, "momentum": 0.002, "adam": 0.001, "adamw": 0.001, "lamb": 0.01}


@pytest.mark.parametrize("name", NAMES)
def test_what_keeps_its_state_in_float16_stays_finite_where_a_gradient_is_zero(name):
    optimizer = make_optimizer(name, 0.1)
    weights = jnp.array([1.0, 1.0], jnp.float16)
    changes: Any = optimizer.update(jnp.array([0.0, 1.0], jnp.float16), optimizer.init(weights), weights)[0]
    assert bool(jnp.isfinite(changes).all()) == keeps_state_in_float16(name)


def test_bad_input_is_refused():
    for refuse in (lambda name: make_optimizer(name, 0.1), lambda name: default_learning_rate(name, 0.1)):
        with pytest.raises(ValueError) as refused:  # noqa: PT011 (the whole message is compared)
            refuse("lamp")
        assert str(refused.value) == (
            "optimizer='lamp' is unknown: did you mean 'lamb'? Choose one of 'sgd', 'momentum', 'adam', 'adamw', 'lamb'"
        )
    with pytest.raises(ValueError, match=r"^learning_rate=0 is not a positive number: give a finite one above 0$"):
        make_optimizer("sgd", 0)

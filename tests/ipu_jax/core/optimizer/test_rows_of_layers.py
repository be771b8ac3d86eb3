"""Test optimizers that look at whole matrices, with layers of a leaf on several IPUs, against optax on one device."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from ipu_jax import Checkpoints, Pipeline, TrainOptions, make_train_step
from ipu_jax.steps import per_layer
from support.inputs import normal
from support.refusals import refusals, refused

M, D, H = 4, 6, 10
OF_LAYER = optax.contrib.MuonDimensionNumbers(1, 2)


def params_of(layers: int, axis: int = 0, dtype: Any = jnp.float32) -> Any:
    """Return weights whose matrices are stacked along an axis, and vectors along the first."""
    up, down = 0.2 * normal((layers, D, H), seed=1), 0.2 * normal((layers, H, D), seed=2)
    stacked = {"up": np.moveaxis(up, 0, axis), "down": np.moveaxis(down, 0, axis), "b": 0.1 * normal((layers, H))}
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, dtype), {"table": 0.3 * normal((9, D), seed=3), "layers": stacked}
    )


def batch_of(update: int) -> Any:
    ids = np.random.default_rng(update).integers(9, size=(M, 4))
    return {"ids": ids, "y": normal((M, 4, 9), seed=10 + update)}


def loss_of(axis: int = 0) -> Any:
    def loss(params, micro_batch):
        layers = {k: jnp.moveaxis(w, axis if k != "b" else 0, 0) for k, w in params["layers"].items()}
        layer = lambda x, w: (x + jnp.tanh(x @ w["up"] + w["b"]) @ w["down"], None)
        x, _ = lax.scan(layer, params["table"][micro_batch["ids"]], layers)
        return jnp.mean((x @ params["table"].T - micro_batch["y"]) ** 2).astype(jnp.float32)

    return loss


def cut(ipus, layers, schedule="1f1b", axis=0, dtype: Any = jnp.float32) -> Pipeline:
    one = jax.tree.map(lambda leaf: leaf[0], batch_of(0))
    options = {"ipus": ipus, "schedule": schedule, "gradient_accumulation": M}
    return Pipeline.from_function(loss_of(axis), params_of(layers, axis, dtype), one, **options)


def on_layers(tx, of_others=None):
    """Return an optimizer with `tx` for the stacked leaves alone."""
    label = {"table": "others", "layers": "layers"}
    return optax.partition({"layers": tx, "others": of_others or optax.adam(1e-2)}, label)


def by_layer(fn):
    """Return an optimizer whose update of a stacked leaf follows from `fn` of its gradient, now and the last time."""

    def update(updates, state, params=None):
        new = jax.tree.map(fn, updates)
        return jax.tree.map(lambda u, s: -0.01 * (u + 0.5 * s), new, state), new

    return on_layers(optax.GradientTransformation(lambda params: jax.tree.map(lambda w: 0 * fn(w), params), update))


def with_rates(g):
    """Return products of each layer with itself, times a rate of its own, plus an array of the leaf's shape."""
    rates = 1 + jnp.arange(len(g), dtype=g.dtype)
    of_layers = g.reshape(len(g), g.shape[1], -1)
    products = jnp.einsum("lij,lkj,lkm,l->lim", of_layers, of_layers, of_layers, rates).reshape(g.shape)
    return products + jnp.cos(jnp.arange(g.size, dtype=g.dtype)).reshape(g.shape)


def muon(dims=OF_LAYER, **options: Any):
    of_leaves = {"table": optax.contrib.MuonDimensionNumbers(), "layers": {"up": dims, "down": dims, "b": None}}
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=of_leaves, weight_decay=0.1, **options)


def until_small(g):
    """Return a leaf after a loop whose carry has a number, which is read later, and a copy that starts as zeros."""
    body = lambda carry: (carry[0] + 1, 0.5 * carry[1] + 0.1 * carry[2], carry[2] + carry[1])
    count, g, _ = lax.while_loop(lambda carry: carry[0] < 8, body, (jnp.int32(0), g, jnp.zeros_like(g)))
    return 0.1 * count * g


OPTIMIZERS: dict[str, Any] = {
    "muon": muon,
    "muon in a scan": lambda: muon(ns_coeffs=((3.4, -4.7, 2.0), (3.0, -4.0, 1.5), (2.0, -1.5, 0.5))),
    "muon by aol": lambda: muon(preconditioning="aol"),
    "muon by the spectral norm": lambda: muon(preconditioning="spectral"),
    "lamb per layer": lambda: on_layers(per_layer(optax.lamb(1e-2, weight_decay=0.1)), optax.lamb(1e-2)),
    "adafactor per layer": lambda: on_layers(per_layer(optax.adafactor(1e-2, min_dim_size_to_factor=4))),
    "muon per layer": lambda: on_layers(per_layer(optax.contrib.muon(1e-2))),
    "momo per layer": lambda: per_layer(optax.contrib.momo(0.1)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor of the last two dims": lambda: optax.masked(
        optax.adafactor(1e-2, min_dim_size_to_factor=6),
        {"table": False, "layers": {"up": True, "down": True, "b": False}},
    ),
    "a loop of a known length": lambda: by_layer(lambda g: lax.fori_loop(0, 3, lambda i, x: 0.9 * x + i * g, g)),
    "a loop until": lambda: by_layer(until_small),
    "map": lambda: by_layer(lambda g: lax.map(lambda x: x / (1 + jnp.linalg.norm(x)), g)),
    "rates of layers": lambda: by_layer(with_rates),
    "sorted": lambda: by_layer(lambda g: jnp.sort(g, axis=-1) + 0.1 * jnp.argsort(g, axis=-1)),
    "flat": lambda: by_layer(lambda g: jnp.cumsum(g.reshape(len(g), -1), 1).reshape(g.shape) + jnp.vdot(g, g)),
}
REFUSED: dict[str, Any] = {
    "muon over layers": lambda: muon(optax.contrib.MuonDimensionNumbers(0, 1)),
    "products of layers": lambda: by_layer(lambda g: g + jnp.sum(jnp.einsum("i...,j...->ij", g, g))),
    "layers in order": lambda: by_layer(lambda g: jnp.sort(g, axis=0)),
    "layers added up": lambda: by_layer(lambda g: lax.scan(lambda s, x: (s + x, s), jnp.zeros_like(g[0]), g)[1]),
    "a loop until all layers are small": lambda: by_layer(
        lambda g: lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.1, lambda x: 0.5 * x, g)
    ),
    "factors of vectors of layers": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    # parts of a leaf, flat, would not follow one another in the state
    "flat state": lambda: optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.ravel, params),
        lambda updates, state, params=None: (updates, jax.tree.map(lambda u, s: s + u.ravel(), updates, state)),
    ),
}


def updated(tx, params, state, gradients, value):
    updates, state = optax.with_extra_args_support(tx).update(gradients, state, params, value=value)
    return optax.apply_updates(params, updates), state


def close(found, expected, bound=1e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        f, e = np.asarray(f, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(f, e, rtol=0, atol=bound * max(1, np.abs(e).max(initial=0)))


def check_updates(tx, pipeline, params, updates=3, bound=1e-6):
    """Assert that updates of given gradients are as on one device, with the state; return the optimizer and state."""
    optimizer, sharded, plain = pipeline.optimizer(tx), pipeline.shard(params), jax.jit(updated, static_argnums=0)
    of_ipus, state = optimizer.init(sharded), tx.init(params)
    apply = jax.jit(optimizer.apply)
    for seed in range(updates):
        gradients = jax.tree.map(lambda w: jnp.asarray(0.1 * normal(w.shape, seed=seed), w.dtype), params)  # noqa: B023
        value = jnp.float32(seed + 1)
        sharded, of_ipus = apply(pipeline.shard(gradients), of_ipus, sharded, value)
        params, state = plain(tx, params, state, gradients, value)
    close(pipeline.unshard(sharded), params, bound)
    close(optimizer.whole(of_ipus, sharded), state, bound)
    return optimizer, of_ipus


@pytest.mark.fast("muon", "muon by aol", "rates of layers", "adafactor per layer", "a loop until")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_updated_as_on_one_device(name):
    check_updates(OPTIMIZERS[name](), cut(4, 5), params_of(5))


@pytest.mark.parametrize("name", ["muon", "lamb per layer", "adafactor per layer"])
def test_rows_in_half(name):
    dtype = jnp.bfloat16
    check_updates(OPTIMIZERS[name](), cut(2, 7, dtype=dtype), params_of(7, dtype=dtype), bound=0.02)


def test_layers_along_axis_1():
    tx, params = muon(optax.contrib.MuonDimensionNumbers(0, 2)), params_of(5, axis=1)
    check_updates(tx, cut(2, 5, axis=1), params)


def test_each_ipu_has_the_factors_of_its_layers_and_sends_nothing():
    pipeline = cut(2, 6)
    optimizer, state = check_updates(OPTIMIZERS["adafactor per layer"](), pipeline, params_of(6), updates=1)
    # counters, what adafactor has in place of a moment, and adam's moments of the table
    assert {leaf.shape for leaf in state.layout.leaves if leaf.ipus is None} == {(), (6,), (6, 1), (9, D)}
    sharded = pipeline.shard(params_of(6))
    text = str(jax.jit(optimizer.apply).lower(sharded, state, sharded).compile().as_text())
    assert not re.search(r"all-|permute|reduce-scatter", text)


def trained(tx, params, updates):
    """Return weights and optax's state after updates on one device."""
    loss = lambda params, batch: jnp.mean(jax.vmap(lambda mb: loss_of()(params, mb))(batch))
    plain, update, state = jax.jit(jax.value_and_grad(loss)), jax.jit(updated, static_argnums=0), tx.init(params)
    for k in range(updates):
        value, gradients = plain(params, batch_of(k))
        params, state = update(tx, params, state, gradients, value)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize(("ipus", "layers", "schedule"), [(2, 7, "1f1b"), (4, 5, "zb-h1")])
@pytest.mark.parametrize("name", ["muon", "lamb per layer", "adafactor per layer"])
def test_training_goes_on_with_other_numbers_of_ipus(tmp_path, name, ipus, layers, schedule):
    tx, params = OPTIMIZERS[name](), params_of(layers)
    step = make_train_step(cut(ipus, layers, schedule), tx)
    state = step.init(params)
    for k in range(3):
        state, _ = step(state, batch_of(k))
    close([step.whole(state)[key] for key in ("params", "optimizer")], [*trained(tx, params, 3)])
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
    after = trained(tx, params, 4)
    for others in {1, 2, 4} - {ipus}:
        step = make_train_step(cut(others, layers), tx)
        with Checkpoints(tmp_path, step) as checkpoints:
            restored = checkpoints.restore(step.init(params))
        assert restored is not None
        close(step.whole(restored.state)["optimizer"], trained(tx, params, 3)[1])
        state, _ = step(restored.state, batch_of(3))
        close([step.whole(state)[key] for key in ("params", "optimizer")], [*after])


@pytest.mark.slow
def test_each_replica_updates_its_layers():
    tx, params = muon(), params_of(5)
    step = make_train_step(cut(2, 5), tx, TrainOptions(replication_factor=2))
    state, _ = step(step.init(params), jax.tree.map(lambda leaf: np.stack([leaf, leaf]), batch_of(0)))
    close(step.whole(state)["params"], trained(tx, params, 1)[0])


def refused_by(tx, **options: Any):
    step, params = make_train_step(cut(2, 6), tx, TrainOptions(**options)), jax.tree.map(np.asarray, params_of(6))
    return lambda: step.init(params)


@refusals(
    *(
        (refused_by(make()), "params['layers']['", "in one piece", "ipu_jax.steps.per_layer")
        for make in REFUSED.values()
    ),
    (refused_by(muon(), shard_optimizer=True, replication_factor=2), "in one piece", "shard_optimizer=False"),
    (lambda: per_layer(optax.sgd(0.1)).init(3 * [np.ones(())]), "params[0]", "per_layer", "optax.partition"),
)
def test_what_needs_more_than_rows_is_refused(call, holds):
    with refused(*holds):
        call()


def test_per_layer_is_a_leaf_for_each_layer():
    """Compare with optax on lists of layers, where leaves have unlike numbers of layers, and inside of a mask."""

    def updates(tx: Any, params: Any) -> Any:
        state, new = tx.init(params), params
        for _ in range(3):
            new, state = tx.update(params, state, params)
        return new

    params = {"w": normal((3, 4, 5)), "v": normal((2, 6), seed=1), "table": normal((9, 4), seed=2)}
    tx, mask = optax.lamb(0.1, weight_decay=0.1), {"w": True, "v": True, "table": False}
    found = updates(optax.masked(per_layer(tx), mask), params)
    expected = updates(tx, {name: [*params[name]] for name in "wv"})
    np.testing.assert_array_equal(found["table"], params["table"])
    close({name: [*found[name]] for name in "wv"}, expected)

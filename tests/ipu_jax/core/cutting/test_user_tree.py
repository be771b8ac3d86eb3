"""Test that everything speaks in the user's tree: rows of weights on several IPUs, weights on all IPUs, refusals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Pipeline, TrainOptions, make_train_step
from ipu_jax.base.keys import without_keys
from ipu_jax.io import export_weights, import_weights
from support.inputs import normal
from support.refusals import refusals, refused

M = 3
PARAMS = {
    "table": normal((9, 8)),
    "layers": {"w": 0.4 * normal((8, 7, 8), seed=1), "b": jnp.zeros((7, 8))},
    "unused": jnp.ones(3),
}
BATCH = {"ids": np.random.default_rng(0).integers(9, size=(M, 4)), "y": normal((M, 4, 9), seed=2)}
ONE = jax.tree.map(lambda leaf: leaf[0], BATCH)


def loss(params, micro_batch):
    """A tied table, and a scan over seven layers: w is stacked along axis 1 and b along axis 0, as flax can do it."""
    layer = lambda x, w: (x + jnp.tanh(x @ w["w"] + w["b"]), None)
    layers = {**params["layers"], "w": jnp.moveaxis(params["layers"]["w"], 1, 0)}
    x, _ = jax.lax.scan(layer, params["table"][micro_batch["ids"]], layers)
    return jnp.mean((x @ params["table"].T - micro_batch["y"]) ** 2)


def cut(ipus=2, schedule="1f1b", fn: Any = loss, params=PARAMS, **options: Any):
    options = {"gradient_accumulation": M} | options
    return Pipeline.from_function(fn, params, ONE, ipus=ipus, schedule=schedule, **options)


def assert_close(actual, expected, rtol=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = without_keys(a), without_keys(e)
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * (np.abs(np.asarray(e, np.float32)).max() + 1e-8))


@jax.jit
def plain(params):
    """Return the mean loss and gradients by jax on one device."""
    return jax.value_and_grad(lambda params: jnp.mean(jax.vmap(lambda mb: loss(params, mb))(BATCH)))(params)


def updated(tx, params, state, gradients, value):
    """Return weights and state after an update of plain optax on one device."""

    @jax.jit
    def update(params, state):
        updates, new = optax.with_extra_args_support(tx).update(gradients, state, params, value=value)
        return optax.apply_updates(params, updates), new

    return update(params, state)


def trained(tx, steps):
    """Return weights and optax's state after steps of plain optax on one device."""
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        value, gradients = plain(params)
        params, state = updated(tx, params, state, gradients, value)
    return params, state


TX = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(1e-2, mask={"table": True, "layers": {"w": True, "b": False}, "unused": False}),
)


@pytest.fixture(scope="module")
def stepped():
    """Return a step for 3 IPUs, its state after two updates, and what plain optax has then."""
    step = make_train_step(cut(3), TX, TrainOptions(ema_decay=0.5))
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return step, state, trained(TX, 2)


def test_weights_and_the_optimizers_state_are_trees_of_the_user(stepped):
    step, state, (params, of_optax) = stepped
    on_all = [leaf.path for leaf in state.params.layout.leaves if leaf.ipu is None]
    assert on_all == ["params['table']"]
    assert_close(step.model.unshard(state.params), params)
    assert_close(step.whole(state)["optimizer"], of_optax)
    assert state.params.keys() == ["layers", "table", "unused"]
    np.testing.assert_allclose(state.params["layers"]["w"], params["layers"]["w"], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("average", [False, True])
def test_weight_files_have_the_users_names(stepped, tmp_path, average):
    step, state, _ = stepped
    whole = step.whole(state)
    export_weights(tmp_path / "w.npz", state, average=average)
    with np.load(tmp_path / "w.npz") as file:
        assert sorted(file.files) == ["layers/b", "layers/w", "table", "unused"]
        np.testing.assert_array_equal(file["layers/w"], whole["ema" if average else "params"]["layers"]["w"])
    for pipeline in (cut(1), cut(4)):
        placed = import_weights(tmp_path / "w.npz", like=pipeline.shard_shapes(PARAMS))
        assert_close(pipeline.unshard(placed), whole["ema" if average else "params"], rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["16.32", "16.16"])
def test_half_precision_equals_a_loss_that_casts(precision):
    def half(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree)

    first = PARAMS if precision == "16.32" else half(PARAMS)
    step = make_train_step(cut(2), optax.sgd(0.1), TrainOptions(precision=precision))
    state, out = step(step.init(PARAMS), BATCH)
    in_half = lambda params: jnp.mean(jax.vmap(lambda mb: loss(half(params), half(mb)))(BATCH))
    value, gradients = jax.jit(jax.value_and_grad(in_half))(first)
    expected = jax.tree.map(lambda w, g: (w - 0.1 * g).astype(w.dtype), first, gradients)
    np.testing.assert_allclose(out.loss, value, rtol=0.02)
    assert_close(step.model.unshard(state.params), expected, rtol=0.02)


def with_flat_state(_):
    """Return a transformation whose state has flat leaves: parts of w, flat, would not follow one another in it."""
    add = lambda updates, state, params=None: (updates, jax.tree.map(lambda u, s: s + u.ravel(), updates, state))
    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.ravel, params), add)


def test_an_optimizer_that_needs_a_divided_leaf_in_one_piece_is_refused():
    factored = lambda rate: optax.adafactor(rate, min_dim_size_to_factor=2)
    for make in (optax.adaptive_grad_clip, factored, with_flat_state):
        step = make_train_step(cut(2), make(0.1))
        with pytest.raises(ValueError, match=r"layers'\]\['[wb]'\] of shape \((8, )?7, 8\) in one piece.*norms of"):
            step.init(PARAMS)


def test_an_optimizer_that_mixes_a_divided_leaf_with_another_is_refused():
    def mixed(update: Any, _: Any) -> Any:
        return {**update, "table": update["table"] + update["layers"]["w"].sum(0)[:1, :1]}

    def crossed(update: Any, _: Any) -> Any:
        return {**update, "other": update["layers"]["w"]}

    params = {**PARAMS, "other": jnp.zeros((8, 7, 8))}
    for transform in (mixed, crossed):
        step = make_train_step(cut(2, params=params), optax.stateless(transform))
        with pytest.raises(ValueError, match=r"optimizer: .*layers'\]\['w'\]"):
            step.init(params)


def by_path(fn):
    """Return a function of a tree, as optax calls it, that gives `fn(names)` for the path to each leaf."""

    def of_tree(tree):
        return jax.tree.map_with_path(lambda path, _: fn([getattr(key, "key", None) for key in path]), tree)

    return of_tree


def rates_by_path():
    """A transformation as users write them: other rates by path, and a state that counts by path."""

    def update(updates, state, params=None):
        rates = by_path(lambda names: 0.1 if names[-1] == "w" and names[0] == "layers" else 0.01 * len(names))(updates)
        counts = jax.tree.map_with_path(lambda path, n: n + len(jax.tree_util.keystr(path)), state)
        return jax.tree.map(lambda u, rate: -rate * u, updates, rates), counts

    return optax.GradientTransformation(lambda params: by_path(len)(params), update)


def of_flat(update, _):
    """Scale each leaf by numbers that follow from the flat leaf, where the order of its elements counts."""

    def one(leaf):
        flat = leaf.ravel()
        weighed = jnp.sum(jnp.abs(flat) * jnp.cos(jnp.arange(flat.size)) + jnp.ones(flat.shape))
        return leaf * weighed + jnp.vdot(flat, 2 * flat) / flat.size + flat.max()

    return jax.tree.map(one, update)


SEES_THE_TREE = {
    "mask by keystr": lambda: optax.adamw(1e-2, weight_decay=0.5, mask=by_path(lambda names: names[-1] == "w")),
    "masked": lambda: optax.masked(optax.sgd(0.1), by_path(lambda names: names[-1] in ("table", "b"))),
    "labels": lambda: optax.partition(
        {True: optax.lion(0.1), False: optax.sgd(0.2)}, by_path(lambda names: names[-1] == "w")
    ),
    "dims of muon": lambda: optax.contrib.muon(
        0.1,
        muon_weight_dimension_numbers=by_path(
            lambda names: optax.contrib.MuonDimensionNumbers((0,), (1,)) if names == ["table"] else None
        ),
    ),
    "rates by path": rates_by_path,
    "flat": lambda: optax.stateless(of_flat),
    "fill": lambda: optax.stateless(lambda u, _: jax.tree.map(lambda g: jnp.ones_like(g) - 0.1 * g, u)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
}


@pytest.mark.fast("mask by keystr", "rates by path", "flat", "clip_by_block_rms")
@pytest.mark.parametrize("name", SEES_THE_TREE)
def test_optax_sees_the_users_tree(name):
    tx, pipeline = SEES_THE_TREE[name](), cut(3)
    optimizer, sharded = pipeline.optimizer(tx), pipeline.shard(PARAMS)
    of_ipus, params, state = optimizer.init(sharded), PARAMS, tx.init(PARAMS)
    for seed in (3, 4):  # the second update reads the state of the first
        gradients = jax.tree.map(lambda leaf: 0.1 * normal(leaf.shape, seed=seed), PARAMS)  # noqa: B023
        value = jnp.float32(seed)
        sharded, of_ipus = optimizer.apply(pipeline.shard(gradients), of_ipus, sharded, value)
        params, state = updated(tx, params, state, gradients, value)
    assert_close(pipeline.unshard(sharded), params)
    assert_close(optimizer.whole(of_ipus, sharded), state, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_frozen_rows_are_no_leaves_for_optax(replicas):
    frozen = {"table": False, "layers": {"w": True, "b": False}, "unused": False}
    options = TrainOptions(ema_decay=0.5, shard_optimizer=replicas > 1, replication_factor=replicas)
    step = make_train_step(
        cut(2, frozen=frozen), optax.adamw(0.1, mask=by_path(lambda names: names[-1] == "b")), options
    )
    batch = jax.tree.map(lambda leaf: np.stack([leaf] * replicas), BATCH) if replicas > 1 else BATCH
    state, _ = step(step.init(PARAMS), batch)
    whole = step.whole(state)
    np.testing.assert_array_equal(whole["params"]["layers"]["w"], PARAMS["layers"]["w"])
    assert not jax.tree.leaves(whole["optimizer"][0].mu["layers"]["w"])
    mean = jax.tree.map(lambda old, new: 0.5 * old + 0.5 * new, PARAMS, whole["params"])
    assert_close(whole["ema"], mean)
    assert_close(step.whole(step.restore(whole)), whole, rtol=0)


def ordered(params, micro_batch):
    jax.debug.print("{}", micro_batch["y"][0], ordered=True)
    return loss(params, micro_batch)


STATE = {"count": np.zeros((), np.int32)}
PIPELINE = cut()
RANDOM = cut(fn=lambda p, mb, key: loss(p, mb) + jax.random.normal(key))
STATEFUL = cut(fn=lambda p, s, mb: (loss(p, mb), {"count": s["count"] + 1}), state=STATE)
PLACED, KEY = PIPELINE.shard(PARAMS), jax.random.key(0, impl="rbg")


@refusals(
    (lambda: cut(fn=3), "loss=3", "callable", "(params, micro_batch)"),
    (lambda: cut(fn=lambda params: 0.0), "1 arguments", "(params, micro_batch)", "key"),
    (lambda: cut(fn=lambda p, s, mb, key: 0.0), "4 arguments", "needs state="),
    (lambda: cut(fn=lambda p, mb: p["table"][mb["ids"]]), "float32[4, 8]", "test_user_tree.py:", "float scalar"),
    (lambda: cut(fn=lambda p, mb: {"loss": loss(p, mb)}), "loss returns a dict", "a float scalar"),
    (lambda: cut(fn=lambda p, mb: (loss(p, mb), 1, 2)), "a tuple of 3", "(loss, aux)"),
    (lambda: cut(fn=lambda p, s, mb: loss(p, mb), state=STATE), "one value", "(loss, new_state)"),
    (lambda: cut(fn=lambda p, s, mb: (loss(p, mb), {"count": 1.0}), state=STATE), "new state", "same tree"),
    (lambda: cut(fn=lambda p, mb: jnp.mean(p["table"][mb["ids"]]), ipus=8), "8 stages", "places", "fewer IPUs"),
    (lambda: cut(cuts=["block"]), "cuts=['block'] marks 0 places", "need 1", "fewer IPUs"),
    (lambda: cut(cuts=3), "cuts=3", "not a list of names", "give one"),
    (lambda: cut(cuts="block"), "cuts='block'", "not a list of names", "give one"),
    (lambda: cut(costs="exact"), "costs='exact'", "'counted'", "'traced'"),
    (lambda: cut(fn=ordered), "ordered effect", "test_user_tree.py:", "ordered=False"),
    (lambda: cut(frozen={"tables": True}), "frozen does not fit", "names tables, which", "nothing for", "name all"),
    (lambda: cut(ipus=0), "ipus=0", "at least 1"),
    (
        lambda: PIPELINE.unshard(jax.tree.map(np.asarray, PARAMS)),
        "sharded is a dict",
        "give what pipeline.shard(...) returns",
    ),
    (lambda: PIPELINE.shard({"table": PARAMS["table"]}), "params", "no params['layers']", "like that one"),
    (lambda: PIPELINE.shard({**PARAMS, "table": np.ones((9, 7))}), "params['table']", "(9, 7)", "(9, 8)"),
)
def test_what_cannot_be_cut_or_placed_is_refused(call, holds):
    with refused(*holds):
        call()


@refusals(
    (lambda: PIPELINE.value_and_grad(PLACED, {"ids": BATCH["ids"]}), "batch['y']", "missing"),
    (lambda: PIPELINE.value_and_grad(PLACED, {**BATCH, "z": BATCH["y"]}), "batch['z']", "unknown"),
    (
        lambda: PIPELINE.value_and_grad(PLACED, {**BATCH, "y": np.ones((M, 5, 9), np.float32)}),
        "cut for micro-batches of ['ids'] [4], ['y'] [4, 9]",
        "raises TypeError for ['ids'] [4], ['y'] [5, 9]: sub got incompatible shapes",
    ),
    (lambda: PIPELINE.value_and_grad(PLACED, {**BATCH, "ids": np.ones((M, 4), np.float32)}), "float32[4]", "int"),
    (lambda: PIPELINE.predict(PLACED, BATCH), "loss function", "pipeline.forward(fn, inputs)"),
    (lambda: STATEFUL.value_and_grad(PLACED, BATCH), "state is missing", "shard_state(...)"),
    (lambda: RANDOM.value_and_grad(PLACED, BATCH, key=KEY), "key is a key<rbg>", "key<fry>", "jax.random.key(seed)"),
)
def test_a_batch_or_a_key_of_another_kind_is_refused(call, holds):
    with refused(*holds):
        call()

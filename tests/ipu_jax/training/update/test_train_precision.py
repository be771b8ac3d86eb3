"""Test half types: the dtypes of operations, sums and weights; rounding that is right on average; loss scaling."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale
from ipu_jax.steps import Replicas
from ipu_jax.training.update._precision import stochastic_round
from support.dense import largest_relative_error
from support.one_stage import KINDS, model_of
from support.trained import compiled_quickly

HALVES = ("bfloat16", "float16")


_compiled_quickly = compiled_quickly()


def seen_dtypes(found):
    def loss_fn(params, microbatch):
        found.update(w=params["w"].dtype, x=microbatch["x"].dtype, n=microbatch["n"].dtype)
        return jnp.mean((microbatch["x"] @ params["w"]) ** 2)

    return loss_fn


@pytest.mark.fast("function-32.32-float16", "pipeline-16.32-bfloat16", "pipeline-16.16-float16")
@pytest.mark.parametrize(("precision", "half"), [("32.32", "float16"), *itertools.product(["16.32", "16.16"], HALVES)])
@KINDS
def test_what_is_computed_and_held_in_which_dtype(kind, precision, half):
    found = {}
    batch = {"x": jnp.ones((1, 3, 4)), "n": jnp.ones((1, 3), jnp.int32)}
    options = TrainOptions(precision=precision, half=half)
    step = make_train_step(model_of(kind, seen_dtypes(found)), optax.adam(0.1), options)
    state = step.init({"p": {"w": jnp.ones((4, 2))}})
    # it need not be compiled, since the trace shows it
    shapes, _ = jax.eval_shape(step, state, batch)
    computed, held = (("float32" if part == "32" else half) for part in precision.split("."))
    assert found == {"w": computed, "x": computed, "n": "int32"}
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes.params)} == {jnp.dtype(held)}
    moments = step.whole(state)["optimizer"][0].mu
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype(held)}


def adapted(p, x):
    for w, low in zip(p["base"], p["low"], strict=True):
        x = jnp.tanh(x @ w + x @ low)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def of_stages(**options):
    """Return a pipeline of two written stages: a frozen layer, and one that is trained."""
    stages = [
        Stage(lambda p, _, x: jnp.tanh(x @ p["w"]), params="base"),
        Stage(lambda p, x, _: jnp.mean((x @ p["w"]).astype(jnp.float32) ** 2), params="low", ipu=1),
    ]
    return Pipeline(stages, frozen={"base": True, "low": False}, **options)


def of_function(**options):
    params = {name: [jnp.ones((4, 4), dtype)] * 2 for name, dtype in (("base", "bfloat16"), ("low", "float32"))}
    one, frozen = jnp.ones((3, 4)), {"base": True, "low": False}
    return Pipeline.from_function(adapted, params, one, ipus=2, frozen=frozen, **options)


@pytest.mark.parametrize("precision", ["16.32", "16.16"])
@pytest.mark.parametrize("make", [of_stages, of_function], ids=["stages", "function"])
def test_a_frozen_base_in_half_is_held_as_it_is(make, precision):
    step = make_train_step(make(gradient_accumulation=2), optax.adam(0.1), TrainOptions(precision=precision))
    leaf = lambda dtype: jnp.full((4, 4), 0.3, dtype)
    one = lambda dtype: {"w": leaf(dtype)} if make is of_stages else [leaf(dtype)] * 2
    state = step.init({"base": one("bfloat16"), "low": one("float32")})
    shapes = step.shapes({"base": one("bfloat16"), "low": one("float32")})
    assert [x.dtype for x in jax.tree.leaves(state)] == [x.dtype for x in jax.tree.leaves(shapes)]
    state, outputs = step(state, jnp.ones((2, 3, 4)))
    state = step.restore(step.whole(state))
    params = step.whole(state)["params"]
    assert {x.dtype for x in jax.tree.leaves(params["base"])} == {jnp.dtype("bfloat16")}
    held = jnp.dtype("float32" if precision == "16.32" else "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(params["low"])} == {held}
    assert float(outputs.loss) > float(step(state, jnp.ones((2, 3, 4)))[1].loss)


@pytest.mark.fast("16.32-float16", "16.16-bfloat16")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("precision", ["16.32", "16.16"])
def test_compute_in_half_with_sums_in_float32(precision, half):
    """Each micro-batch's gradient is a half, but their sum is in float32, so small ones are not lost."""
    m = 1024
    x = np.full((m, 1, 1), 2.0**-7, np.float32)
    x[0] = 8.0
    options = TrainOptions(gradient_accumulation=m, precision=precision, half=half, reduction="sum")
    step = make_train_step(lambda w, mb: jnp.sum(w * mb), optax.sgd(1.0), options)
    state, _ = step(step.init(jnp.zeros(1)), x)
    exact = 8.0 + (m - 1) * 2.0**-7
    held = jnp.float32 if precision == "16.32" else half
    assert float(step.whole(state)["params"][0]) == -float(jnp.asarray(exact, held))


# rounding


@pytest.mark.fast("bfloat16")
@pytest.mark.parametrize("half", HALVES)
def test_rounding_is_right_on_average(half):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=60), rng.normal(size=40) * 2.0**-12]).astype(np.float32)
    keys = jax.random.split(jax.random.key(1), 4000)
    rounded = jax.jit(jax.vmap(lambda key: stochastic_round(x, half, key)))(keys).astype(np.float32)
    down = np.asarray(jnp.nextafter(jnp.asarray(x, half), jnp.asarray(-jnp.inf, half)).astype(jnp.float32))
    up = np.asarray(jnp.nextafter(jnp.asarray(x, half), jnp.asarray(jnp.inf, half)).astype(jnp.float32))
    nearest = x.astype(half).astype(np.float32)
    gap = np.where(nearest < x, up - nearest, nearest - down)
    # a mean of 4000 numbers that are each less than a gap off: five standard deviations are 0.04 of a gap
    assert np.all(np.abs(np.asarray(rounded).mean(0) - x) <= 0.04 * gap)
    # always one of the two neighbours
    assert np.all(np.abs(np.asarray(rounded) - x) < gap)
    assert np.any(np.asarray(rounded) != nearest)


@pytest.mark.parametrize("half", HALVES)
def test_what_is_exact_infinite_or_no_number_stays(half):
    largest = float(jnp.finfo(half).max)
    x = jnp.asarray([0.0, 1.0, -2.5, jnp.inf, -jnp.inf, jnp.nan, largest, 2.0**-14], jnp.float32)
    for seed in range(5):
        np.testing.assert_array_equal(stochastic_round(x, half, jax.random.key(seed)).astype(jnp.float32), x)


# sums and evaluation


LIMIT, MANY = 2.0**-8, 5000
GRADIENTS = {  # of two leaves, of MANY elements and of 3
    "squares overflow float16": (300.0, [-1000.0, 300.0, 0.5]),
    "sum of squares overflows float16": (16.0, [100.0, -200.0, 1.0]),
    "one element is near the largest": (0.0, [60000.0, -0.125, 30.0]),
    "squares are 0 in float16": (2.0**-13, [2.0**-14, -(2.0**-13), 0.0]),
    "more squares than halves can count": (1.0, [1.0, -1.0, 1.0]),
    "below the limit": (2.0**-16, [2.0**-13, -(2.0**-13), 2.0**-15]),
}


@functools.cache
def clipping_step(kind, half):
    """Return a step whose gradients are the batch."""
    options = TrainOptions(
        precision="16.16",
        half=half,
        max_gradient_norm=LIMIT,
        norms=True,
        shard_optimizer=kind == "shard_optimizer",
        replication_factor=2 if kind == "shard_optimizer" else 1,
    )
    if kind != "pipeline":
        return make_train_step(lambda p, mb: (p["a"] * mb["a"]).sum() + (p["b"] * mb["b"]).sum(), optax.sgd(1), options)
    first = Stage(lambda p, x, mb: (p * mb["a"]).sum(), params="a", ipu=0)
    last = Stage(lambda p, x, mb: x + (p * mb["b"]).sum(), params="b", ipu=1)
    return make_train_step(Pipeline([first, last]), optax.sgd(1), options)


@pytest.mark.fast(*(f"shard_optimizer-float16-{name}" for name in GRADIENTS))
@pytest.mark.parametrize("gradients", GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize(("kind", "half"), [*itertools.product(["shard_optimizer", "pipeline", "function"], HALVES)])
def test_gradients_in_half_are_clipped_by_their_norm_in_float64(kind, half, gradients):
    step = clipping_step(kind, half)
    given = {"a": jnp.full(MANY, gradients[0], half), "b": jnp.asarray(gradients[1], half)}
    state = step.init(jax.tree.map(jnp.zeros_like, given))
    lead = (2, 1) if kind == "shard_optimizer" else (1,)
    state, outputs = step(state, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)), given))
    wide = {name: np.asarray(leaf).astype(np.float64) for name, leaf in given.items()}
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in wide.values()))
    np.testing.assert_allclose(outputs.gradient_norm, norm, rtol=1e-5)
    for name, found in step.whole(state)["params"].items():
        expected, spacing = -wide[name] * min(1, LIMIT / norm), float(jnp.finfo(half).eps)
        # one rounding to the half type, in which float16 has no numbers between 0 and 2**-24
        np.testing.assert_allclose(
            np.asarray(found, np.float64), expected, rtol=0.6 * spacing, atol=2**-25, err_msg=name
        )


@pytest.mark.fast("True-function", "False-pipeline")
@KINDS
@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_sums_over_replicas_are_of_float32(kind, shard_optimizer):
    """A replica's 1 + 2^-8 is not a bfloat16: if it were rounded before it is sent, its sum with -1 would be 0."""
    of_both: Any = {"gradient_accumulation": 2, "reduction": "sum"}
    options = TrainOptions(replication_factor=2, precision="16.16", shard_optimizer=shard_optimizer, **of_both)
    step = make_train_step(model_of(kind, lambda w, mb: jnp.sum(w * mb), **of_both), optax.sgd(1.0), options)
    batch = np.asarray([[[1.0], [2.0**-8]], [[-1.0], [0.0]]], np.float32)
    state, _ = step(step.init({"p": jnp.zeros(3)}), batch)
    assert step.whole(state)["params"]["p"].tolist() == [-(2.0**-8)] * 3


@pytest.mark.fast("16.32-function", "16.16-pipeline")
@KINDS
@pytest.mark.parametrize("precision", ["16.32", "16.16"])
def test_evaluation_reads_weights_and_rows_in_the_precision_of_training(kind, precision):
    """The computation here is in float32, so a twin that rounds by hand differs by float32 rounding only."""
    rng, seen = np.random.default_rng(0), []
    params = {"a": rng.normal(size=(5, 7)).astype(np.float32), "b": rng.normal(size=7).astype(np.float32)}
    rows = rng.normal(size=(2, 2, 3, 5)).astype(np.float32)

    def wide(*read):
        seen.extend(leaf.dtype for leaf in read)
        return [leaf.astype(jnp.float32) for leaf in read]

    def loss_fn(p, mb):
        mb, a, b = wide(mb, p["a"], p["b"])
        return jnp.mean((mb @ a @ b) ** 2)

    def first(p, x, mb):
        mb, a = wide(mb, p)
        return mb @ a

    model = Replicas(loss_fn, replication_factor=2, gradient_accumulation=2)
    if kind == "pipeline":
        never = lambda p, x, mb: jnp.mean(x @ p) * jnp.nan
        last = Stage(never, params="b", ipu=1, evaluate=lambda p, x, mb: jnp.mean((x @ wide(p)[0]) ** 2))
        stages = [Stage(first, params="a", ipu=0), last]
        model = Pipeline(stages, mesh=make_mesh(2, 2), gradient_accumulation=2)
    step = make_train_step(model, optax.sgd(0.1), TrainOptions(precision=precision))
    state = step.init(params)
    of_step, found = float(step.loss(state, rows)), float(step.model.loss(state.params, rows))
    assert set(seen) == {jnp.dtype("bfloat16")}
    assert of_step == pytest.approx(found, rel=1e-6)
    rounded = lambda x: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    expected = np.mean((rounded(rows) @ rounded(params["a"]) @ rounded(params["b"])) ** 2)
    assert found == pytest.approx(expected, rel=1e-6)
    assert abs(np.mean((rows @ params["a"] @ params["b"]) ** 2) - expected) > 1e-4 * expected


# loss scaling


@pytest.mark.fast("function")
@KINDS
def test_a_static_scale_saves_gradients_that_float16_would_lose(kind):
    tiny = 2.0**-20  # a gradient whose square root is no trouble, but which the mean over rows pushes below float16
    loss_fn = lambda w, mb: jnp.mean((mb * w) * jnp.asarray(tiny, mb.dtype)) * jnp.asarray(2.0**-8, mb.dtype)
    found = {}
    for scale in (1.0, 2.0**14):
        options = TrainOptions(precision="16.32", half="float16", loss_scale=scale)
        step = make_train_step(model_of(kind, loss_fn), optax.sgd(2.0**28), options)
        state, _ = step(step.init({"p": jnp.zeros(1)}), jnp.ones((1, 4, 1)))
        found[scale] = float(step.whole(state)["params"]["p"][0])
    assert found == {1.0: 0, 2.0**14: -1}


@pytest.mark.fast("function")
@KINDS
def test_a_bad_update_is_skipped_and_the_scale_follows(kind):
    params, model = {"p": jnp.ones(3)}, model_of("function", lambda w, mb: jnp.mean((mb @ w) ** 2))
    if kind == "pipeline":
        first = Stage(lambda w, x, mb: mb * w, params="a", ipu=0)
        last = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="p", ipu=1)
        params, model = params | {"a": jnp.ones(3)}, Pipeline([first, last], mesh=make_mesh(2, 2))
    options = TrainOptions(
        replication_factor=2,
        loss_scale=DynamicScale(initial=8.0, growth_interval=2),
        device_iterations=6,
        outputs="all",
        shard_optimizer=kind == "function",
    )
    step = make_train_step(model, optax.adam(0.1), options)
    batch = np.random.default_rng(0).normal(size=(6, 2, 1, 4, 3)).astype(np.float32)
    batch[3, 1, 0, 2, 1] = np.inf  # update 3, on one replica
    state, outputs = step(step.init(params), batch)
    assert outputs.updated.tolist() == [1, 1, 1, 0, 1, 1]
    # 8, 8, then 16; after the bad one 8, and two good ones later 16
    assert state.scale is not None
    assert float(state.scale.scale) == 16
    assert int(state.scale.good_steps) == 0
    assert int(state.step) == 6
    whole_state = step.whole(state)
    assert int(whole_state["optimizer"][0].count) == 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(whole_state["params"]))
    # as without the bad batch and without scaling
    without = TrainOptions(replication_factor=2, device_iterations=5)
    plain = make_train_step(model, optax.adam(0.1), without)
    expected, _ = plain(plain.init(params), np.delete(batch, 3, axis=0))
    assert largest_relative_error(whole_state["params"], plain.whole(expected)["params"]) <= 1e-6


def test_a_scale_where_everything_is_frozen_only_grows():
    stages = [Stage(lambda p, x, mb: mb * p, params="a"), Stage(lambda p, x, mb: jnp.mean(x * p), params="b", ipu=1)]
    model = Pipeline(stages, frozen={"a": True, "b": True})
    options = TrainOptions(loss_scale=DynamicScale(initial=8.0, growth_interval=1))
    step = make_train_step(model, optax.adam(0.1), options)
    params = {"a": np.full(3, 2, np.float32), "b": np.full(3, 3, np.float32)}
    state, outputs = step(step.init(params), np.ones((1, 2, 3), np.float32))
    whole = step.whole(state)
    assert (float(outputs.loss), int(outputs.updated), float(whole["scale"].scale)) == (6.0, 1, 16.0)
    assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, whole["params"])) == {"a": [2] * 3, "b": [3] * 3}


@pytest.mark.parametrize(
    ("chosen", "finite", "scales"),
    [
        ({"initial": 2.0, "growth_interval": 1, "largest": 4.0}, (1, 1, 1, 0, 0, 0, 0), [4, 4, 4, 2, 1, 1, 1]),
        ({"initial": 8.0, "growth_interval": 3}, (1, 0, 1, 1, 1), [8, 4, 4, 4, 8]),  # a bad one starts the count anew
    ],
)
def test_the_scale_follows_the_updates_within_its_bounds(chosen, finite, scales):
    """The gradient is the batch's number."""
    options = TrainOptions(loss_scale=DynamicScale(**chosen))
    step: Any = make_train_step(lambda w, x: x.mean() * w, optax.sgd(0.1), options)
    state, seen = step.init(np.float32(1)), []
    for is_finite in finite:
        state, _ = step(state, np.full((1, 1), 1.0 if is_finite else np.inf, np.float32))
        seen.append(float(state.scale.scale))
    assert seen == scales


def test_predictions_are_computed_in_half():
    stage = Stage(lambda w, x, mb: jnp.mean(mb @ w), params="w", predict=lambda w, x, mb: mb @ w)
    step = make_train_step(Pipeline([stage]), optax.sgd(0.1), TrainOptions(precision="16.32"))
    weights, batch = np.full((3, 2), 1 + 2**-10, np.float32), np.ones((1, 4, 3), np.float32)
    found = step.model.predict(step.init({"w": weights}).params, batch)
    assert found.dtype == jnp.bfloat16
    assert found.tolist() == [[[3.0, 3.0]] * 4]  # each weight was rounded to 1


def test_the_average_of_weights_in_half_is_kept_in_float32():
    options = TrainOptions(precision="16.16", ema_decay=0.75)
    step = make_train_step(lambda w, x: jnp.mean(x * w), optax.sgd(2.0**-4), options)
    state, _ = step(step.init(jnp.ones(1)), np.ones((1, 2), np.float32))
    assert state.params.dtype == jnp.bfloat16
    assert step.whole(state)["ema"].tolist() == [1 - 2.0**-6]
    half = [1 - 2.0**-6 - 2.0**-10]  # which bfloat16 does not hold
    state = step.restore({**step.whole(state), "ema": np.array(half, np.float32)})
    assert step.whole(state)["ema"].tolist() == half


# float64


def test_an_optimizer_sees_a_loss_beyond_float32_and_float32_weights_stay_float32():
    def update(gradients: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: -0.25 * g / value, gradients), state

    by_loss: Any = update
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), by_loss)
    with jax.enable_x64(True):
        options = TrainOptions(on_nonfinite="stop", loss_scale=8.0, norms=True)
        step = make_train_step(lambda w, x: jnp.mean(x) * w, optimizer, options)
        batch = np.full((1, 2), 1e40)
        state, outputs = step(step.init(np.float64(1)), batch)
        step.check(state)
        assert float(outputs.loss) == outputs.gradient_norm == 1e40
        assert float(state.params) == 0.75
        found = jax.eval_shape(step, step.init(np.float32(1)), np.ones((1, 2), np.float32))
        floats = [leaf for leaf in jax.tree.leaves(found) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        assert {leaf.dtype.name for leaf in floats} == {"float32"}

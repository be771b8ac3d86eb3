"""Halves: what is computed, summed and held in which dtype; rounding that is right on average; loss scaling."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense import chain, largest_relative_error
from test_pipeline import refused
from trained import quick_compiles

from ipu_jax import DynamicScale, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.precision import stochastic_round
from ipu_jax.scaling import Scale, next_scale

HALVES = ("bfloat16", "float16")


@pytest.fixture(autouse=True)
def _compiled_quickly():
    with quick_compiles():
        yield


def seen_dtypes(found):
    def loss_fn(params, microbatch):
        found.update(w=params["w"].dtype, x=microbatch["x"].dtype, n=microbatch["n"].dtype)
        return jnp.mean((microbatch["x"] @ params["w"]) ** 2)

    return loss_fn


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("precision", ["32.32", "16.32", "16.16"])
@pytest.mark.parametrize("kind", ["function", "pipeline"])
def test_what_is_computed_and_held_in_which_dtype(kind, precision, half):
    found = {}
    loss_fn = seen_dtypes(found)
    model = loss_fn if kind == "function" else Pipeline([Stage(lambda p, x, mb: loss_fn(p, mb), params="p")])
    params = {"w": jnp.ones((4, 2))}
    batch = {"x": jnp.ones((1, 3, 4)), "n": jnp.ones((1, 3), jnp.int32)}
    step = make_train_step(model, optax.adam(0.1), TrainOptions(precision=precision, half=half))
    state = step.init(params if kind == "function" else {"p": params})
    # no need to compile it: the trace says it
    shapes, _ = jax.eval_shape(step._program, state, batch)
    computed, held = (("float32" if part == "32" else half) for part in precision.split("."))
    assert found == {"w": computed, "x": computed, "n": "int32"}
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes.params)} == {jnp.dtype(held)}
    moments = step.whole(state)["optimizer"][0].mu
    assert {leaf.dtype for leaf in jax.tree.leaves(moments)} == {jnp.dtype(held)}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("precision", ["16.32", "16.16"])
def test_compute_in_half_with_sums_in_float32(precision, half):
    """Each micro-batch's gradient is a half; their sum is of float32s, so that small ones are not lost."""
    m = 1024
    x = np.full((m, 1, 1), 2.0**-7, np.float32)
    x[0] = 8.0
    options = TrainOptions(gradient_accumulation=m, precision=precision, half=half, reduction="sum")
    step = make_train_step(lambda w, mb: jnp.sum(w * mb), optax.sgd(1.0), options)
    state, _ = step(step.init(jnp.zeros(1)), x)
    exact = 8.0 + (m - 1) * 2.0**-7
    held = jnp.float32 if precision == "16.32" else half
    assert float(step.whole(state)["params"][0]) == -float(jnp.asarray(exact, held))


@pytest.mark.parametrize("precision", ["16.32", "16.16"])
def test_a_pipeline_in_half_is_near_the_float32_one(precision):
    model = chain((0, None), 4, like=False)
    step = make_train_step(model.pipeline(2), optax.sgd(0.1), TrainOptions(precision=precision))
    state, outputs = step(step.init(model.params), model.batch)
    loss, gradients = model.twin()
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, model.params, gradients)
    assert abs(float(outputs.loss) - float(loss)) <= 2e-2 * float(loss)
    # the weights' own rounding under 16.16, and a hundredth of a gradient's under 16.32
    bound = {"16.32": 2e-3, "16.16": 1e-2}[precision]
    found = jax.tree.map(lambda w: w.astype(jnp.float32), step.whole(state)["params"])
    assert largest_relative_error(found, expected) <= bound


# rounding


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
    # only ever one of the two neighbours
    assert np.all(np.abs(np.asarray(rounded) - x) < gap)
    assert np.any(np.asarray(rounded) != nearest)


@pytest.mark.parametrize("half", HALVES)
def test_what_is_exact_infinite_or_no_number_stays(half):
    largest = float(jnp.finfo(half).max)
    x = jnp.asarray([0.0, 1.0, -2.5, jnp.inf, -jnp.inf, jnp.nan, largest, 2.0**-14], jnp.float32)
    for seed in range(5):
        np.testing.assert_array_equal(stochastic_round(x, half, jax.random.key(seed)).astype(jnp.float32), x)


@pytest.mark.parametrize(("kind", "shard_optimizer"), [("function", False), ("function", True), ("pipeline", True)])
def test_small_updates_are_not_lost(kind, shard_optimizer):
    """200 updates of a sixteenth of the gap between two bfloat16: rounding to the nearest loses them all."""
    n, steps, update = 512, 200, 2.0**-12
    loss_fn = lambda w, mb: jnp.sum(w * mb[0, 0])  # noqa: E731
    model = loss_fn
    if kind == "pipeline":
        model = Pipeline(
            [Stage(lambda p, x, mb: loss_fn(p, mb), params="p", ipu=1)], mesh=make_mesh(2, 2), reduction="sum"
        )
    found = {}
    for stochastic in (False, True):
        options = TrainOptions(
            replication_factor=2,
            reduction="sum",
            precision="16.16",
            stochastic_rounding=stochastic,
            shard_optimizer=shard_optimizer,
            device_iterations=steps,
        )
        step = make_train_step(model, optax.sgd(1.0), options)
        whole = jnp.ones(n)
        state = step.init(whole if kind == "function" else {"p": whole}, key=jax.random.key(0) if stochastic else None)
        state, _ = step(state, np.full((steps, 2, 1, 1, 1), -update / 2, np.float32))
        # replicas must stay alike, although they round at random
        for leaf in jax.tree.leaves(state.params):
            blocks = [
                np.asarray(s.data) for s in leaf.addressable_shards if s.index == leaf.addressable_shards[0].index
            ]
            assert all(np.array_equal(block, blocks[0]) for block in blocks)
        params = step.whole(state)["params"]
        found[stochastic] = np.asarray((params if kind == "function" else params["p"]).astype(jnp.float32))
    assert np.all(found[False] == 1)
    # a walk of 200 steps with a deviation of a quarter of a gap each, over 512 weights: 5 sigma are 0.006
    assert abs(found[True].mean() - (1 + steps * update)) <= 0.006
    assert len(np.unique(found[True])) > 5


# loss scaling


@pytest.mark.parametrize("kind", ["function", "pipeline"])
def test_a_static_scale_saves_gradients_that_float16_would_lose(kind):
    tiny = 2.0**-20  # a gradient whose square root is no trouble, but which the mean over rows pushes below float16
    loss_fn = lambda w, mb: jnp.mean((mb * w) * jnp.asarray(tiny, mb.dtype)) * jnp.asarray(2.0**-8, mb.dtype)  # noqa: E731
    model = loss_fn if kind == "function" else Pipeline([Stage(lambda p, x, mb: loss_fn(p, mb), params="p")])
    found = {}
    for scale in (1.0, 2.0**14):
        options = TrainOptions(precision="16.32", half="float16", loss_scale=scale)
        step = make_train_step(model, optax.sgd(2.0**28), options)
        whole = jnp.zeros(1)
        state, _ = step(step.init(whole if kind == "function" else {"p": whole}), jnp.ones((1, 4, 1)))
        params = step.whole(state)["params"]
        found[scale] = float((params if kind == "function" else params["p"])[0])
    assert found[1.0] == 0
    assert found[2.0**14] == -1


@pytest.mark.parametrize("kind", ["function", "pipeline"])
def test_a_bad_update_is_skipped_and_the_scale_follows(kind):
    def loss_fn(w, mb):
        return jnp.mean((mb @ w) ** 2)

    model = loss_fn
    if kind == "pipeline":
        first = Stage(lambda w, x, mb: mb * w, params="a", ipu=0)
        model = Pipeline([first, Stage(lambda p, x, mb: loss_fn(p, x), params="p", ipu=1)], mesh=make_mesh(2, 2))
    options = TrainOptions(
        replication_factor=2,
        loss_scale=DynamicScale(initial=8.0, growth_interval=2),
        device_iterations=6,
        outputs="all",
        shard_optimizer=kind == "function",
    )
    step = make_train_step(model, optax.adam(0.1), options)
    whole = jnp.ones(3)
    batch = np.random.default_rng(0).normal(size=(6, 2, 1, 4, 3)).astype(np.float32)
    batch[3, 1, 0, 2, 1] = np.inf  # update 3, on one replica
    state, outputs = step(step.init(whole if kind == "function" else {"a": jnp.ones(3), "p": whole}), batch)
    assert outputs.updated.tolist() == [1, 1, 1, 0, 1, 1]
    # 8, 8, then 16; after the bad one 8, and two good ones later 16
    assert state.scale is not None
    assert float(state.scale.scale) == 16
    assert int(state.scale.good) == 0
    assert int(state.step) == 6
    whole_state = step.whole(state)
    assert int(whole_state["optimizer"][0].count) == 5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(whole_state["params"]))
    # as if the bad batch had never been, and nothing had been scaled
    without = TrainOptions(replication_factor=2, device_iterations=5)
    plain = make_train_step(model, optax.adam(0.1), without)
    expected, _ = plain(
        plain.init(whole if kind == "function" else {"a": jnp.ones(3), "p": whole}), np.delete(batch, 3, axis=0)
    )
    assert largest_relative_error(whole_state["params"], plain.whole(expected)["params"]) <= 1e-6


def test_the_scale_stays_within_its_bounds():
    chosen = DynamicScale(initial=2.0, growth_interval=1, largest=4.0)
    scale = Scale(jnp.float32(2), jnp.int32(0))
    seen = []
    for finite in (True, True, True, False, False, False, False):
        scale = next_scale(chosen, scale, finite)
        seen.append(float(scale.scale))
    assert seen == [4, 4, 4, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth_interval": 0}, "growth_interval=0 is not a count: give an int of at least 1"),
        ({"factor": 1}, "factor=1 does not grow: give one above 1, such as 2"),
        ({"initial": float("nan")}, "initial=nan is not a positive number: give a finite one above 0"),
        ({"initial": 0.5}, "initial=0.5 is outside smallest=1.0 to largest=16777216.0: start between the two"),
    ],
)
def test_dynamic_scales_that_cannot_be(options, message):
    with refused(message):
        DynamicScale(**options)

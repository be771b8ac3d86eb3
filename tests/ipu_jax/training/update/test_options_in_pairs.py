"""Test every two of the training options together, under several optimizers and placements, against plain optax.

The programs are a covering array: each two values of two factors meet in one of them. The gradients of a micro-batch
are numbers of the batch, doubled where a weight is below 0, so that they depend on the weights, and yet half types hold
them exactly. The oracle adds them up in NumPy, and runs optax on whole weights on one device.
"""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale
from ipu_jax.steps import NonFiniteLossError, NonFiniteLossWarning
from support.pairs import covering, pairs_of, possible_pairs
from support.trained import quick_compiles

UPDATES = 4
DYNAMIC = DynamicScale(initial=2.0**4, growth_interval=2)
RATES = optax.linear_schedule(0.25, 0.0625, 4)  # float32 holds each of them, and what they are computed from
OPTIMIZERS = {
    "momentum": optax.sgd(0.125, momentum=0.5),
    "adamw, no biases": optax.adamw(
        0.1, eps=0.1, weight_decay=0.25, mask=lambda t: jax.tree.map(lambda w: w.ndim > 1, t)
    ),
    "lamb, with its rate": optax.inject_hyperparams(optax.lamb)(RATES, eps=0.1),
    "clipped rmsprop": optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(0.1, eps=0.1)),
    "every second": optax.MultiSteps(optax.adam(0.2, eps=0.1), every_k_schedule=2),
}
PLACES = {
    "a function": None,
    "one IPU": (0, 0),
    "two IPUs": (0, 1),
    "a split head": (0, 1, None),
    "four IPUs": (2, 0, 1, 3, None),
}
FACTORS: dict[str, list[Any]] = {
    "optimizer": [*OPTIMIZERS],
    "places": [*PLACES],
    "schedule": ["grouped", "1f1b"],
    "replicas": [1, 2],
    "micro_batches": [2, 4],
    "said by": ["model", "options"],
    "reduction": ["mean", "sum"],
    "weighted": [False, True],
    "device_iterations": [1, 2, 4],
    "outputs": ["final", "all", "sum", "every second"],
    "max_gradient_norm": [None, 0.5],
    "loss_scale": [1.0, 64.0, DYNAMIC],
    "precision": [("32.32", "bfloat16"), ("16.32", "bfloat16"), ("16.16", "float16")],
    "stochastic_rounding": [False, True],
    "shard_optimizer": [False, True],
    "donate": [True, False],
    "norms": [False, True],
    "ema_decay": [None, 0.75],
    "on_nonfinite": [(None, 10), ("stop", 10), ("skip", 10), ("skip", 2)],
    "bad": [(), (1,), (1, 2)],
    "offload": [(), ("optimizer",)],
}


def possible(case):
    """Return whether a case may occur; choices that it does not name are those that allow the most."""
    is_function = case.get("places") == "a function"
    return not (
        (case.get("stochastic_rounding") and case.get("precision", ("16.16", ""))[0] != "16.16")
        or (case.get("outputs") == "every second" and case.get("device_iterations") == 1)
        or (case.get("bad") and case.get("on_nonfinite", ("stop", 1))[0] is None and case.get("loss_scale") != DYNAMIC)
        or (is_function and (case.get("schedule", "grouped") != "grouped" or case.get("said by") == "model"))
    )


CASES = covering(FACTORS, possible, seed=27)


def test_the_cases_meet_in_all_pairs():
    met = set().union(*map(pairs_of, CASES))
    # a bad update without `on_nonfinite` is possible where a third choice, a DynamicScale, skips it
    of_three = {(("on_nonfinite", (None, 10)), ("bad", bad)) for bad in [(1,), (1, 2)]}
    assert met == possible_pairs(FACTORS, possible) | of_three
    assert len(CASES) < 40


@dataclasses.dataclass(frozen=True)
class Model:
    """Whole weights, and the batch of each update, leaves (replicas, M, ...)."""

    weights: dict[str, Any]
    batches: list[dict[str, Any]]


def model_of(case, dtype):
    rng = np.random.default_rng(1)
    places = PLACES[case["places"]] or (0, 0)
    shapes = [
        {"w": (3, 4), "b": (4,)},
        {"b": (5,)},
        {"w": (4, 5), "b": (5,)},
        {"w": (2, 2, 3)},
        {"w": (4, 7), "b": (7,)},
    ]
    names = [f"stage{i}" for i in range(len(places))]
    of_stages = dict(zip(names[:-1], shapes, strict=False)) | {names[-1]: shapes[-1]}

    def drawn(most, *lead):  # eighths, which every half type holds, or what float32 does not hold
        parts = 24 if dtype == np.float64 else 8
        draw = lambda shape: rng.integers(1, most, (*lead, *shape)) * rng.choice([-1, 1], (*lead, *shape)) / parts
        return jax.tree.map(lambda shape: draw(shape).astype(dtype), of_stages, is_leaf=lambda s: isinstance(s, tuple))

    lead = (case["replicas"], case["micro_batches"])
    batches = [{"g": drawn(6, *lead), "n": rng.integers(1, 5, lead).astype(dtype)} for _ in range(UPDATES)]
    for number in case["bad"]:
        batches[number]["g"]["stage1"]["b"][-1, -1, 2] = np.inf
    return Model(drawn(9), batches)


def own_part(g, w):
    """Return this IPU's columns of a leaf that is split in its last dim, where padding stands for zeros."""
    whole = jnp.pad(g, [*[(0, 0)] * (g.ndim - 1), (0, w.shape[-1])])
    return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index("ipu") * w.shape[-1], w.shape[-1], -1)


def product(p, g):
    """Return the sum of weights times gradients: the derivative is g, or 2 g where the weight is below 0."""
    of_leaves = jax.tree.map(lambda w, g: jnp.vdot(w, jnp.where(w < 0, 2 * g, g)), p, g)
    return sum(jax.tree.leaves(of_leaves))


def trained_model(case):
    """Return what `make_train_step` takes."""
    places, weighted = PLACES[case["places"]], case["weighted"]
    if places is None:

        def loss(p, mb):
            found = product(p, mb["g"])
            return (found, mb["n"]) if weighted else found

        return loss

    def stage(number, place):
        name, is_last = f"stage{number}", number == len(places) - 1

        def fn(p, x, mb):
            g = mb["g"][name]
            own = g if place is not None else jax.tree.map(own_part, g, p)
            found = product(p, own) if place is not None else jax.lax.psum(product(p, own), "ipu")
            found = found if x is None else x + found
            if is_last and weighted:
                return found, (mb["n"] if place is not None else {"count": mb["n"]})
            return found

        return Stage(fn, params=name, ipu=ALL_IPUS if place is None else place)

    ipus = 1 + max(place for place in places if place is not None)
    by_options = case["said by"] == "options"
    return Pipeline(
        [stage(number, place) for number, place in enumerate(places)],
        mesh=make_mesh(1 if by_options else case["replicas"], ipus),
        gradient_accumulation=case["micro_batches"],
        reduction=case["reduction"],
        schedule=case["schedule"],
        specs={f"stage{len(places) - 1}": {"w": P(None, "ipu"), "b": P("ipu")}} if places[-1] is None else None,
    )


def options_of(case):
    precision, half = case["precision"]
    outputs = case["outputs"]
    stated = {}
    if case["said by"] == "options":
        stated = {
            "replication_factor": case["replicas"],
            "gradient_accumulation": case["micro_batches"],
            "reduction": case["reduction"],
        }
    names = ("weighted", "device_iterations", "max_gradient_norm", "loss_scale", "stochastic_rounding")
    return TrainOptions(
        **stated,
        **{name: case[name] for name in (*names, "shard_optimizer", "donate", "norms", "ema_decay", "offload")},
        outputs=2 if outputs == "every second" else outputs,
        precision=precision,
        half=half,
        on_nonfinite=case["on_nonfinite"][0],
        max_skips=case["on_nonfinite"][1],
    )


# the oracle


def to_half(tree, half):
    return jax.tree.map(lambda w: np.asarray(w).astype(half), tree)


def loss_and_gradients(case, weights, batch):
    """Return loss and gradients of an update, in float64, as the documentation of `TrainOptions` defines them."""
    total, sums = 0.0, jax.tree.map(lambda w: np.zeros(np.shape(w)), weights)
    for replica in range(case["replicas"]):
        for m in range(case["micro_batches"]):
            g = jax.tree.map(
                lambda g, w, r=replica, m=m: np.where(np.asarray(w, np.float64) < 0, 2 * g[r, m], g[r, m]).astype(
                    float
                ),
                batch["g"],
                weights,
            )
            products = jax.tree.map(lambda w, g: np.sum(np.asarray(w, np.float64) * g), weights, g)
            total += sum(jax.tree.leaves(products))
            sums = jax.tree.map(np.add, sums, g)
    count = batch["n"].sum() if case["weighted"] else case["replicas"] * case["micro_batches"]
    gradients = sums if case["reduction"] == "sum" else jax.tree.map(lambda s: s / count, sums)
    loss = total if case["weighted"] and case["reduction"] == "sum" else total / count
    return loss, gradients


def norm(tree):
    return np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in jax.tree.leaves(tree)))


def expected_of(case, model):
    """Return weights, optimizer's state, average, number of the step, whether it stopped, and each update's outputs."""
    precision, half = case["precision"]
    optimizer, (on_nonfinite, max_skips) = OPTIMIZERS[case["optimizer"]], case["on_nonfinite"]
    limit = max_skips if on_nonfinite == "skip" else 1
    weights = to_half(model.weights, half) if precision == "16.16" else model.weights
    average, state, update = (
        jax.tree.map(np.float64, weights),
        jax.jit(optimizer.init)(weights),
        jax.jit(optimizer.update),
    )
    outputs, streak, step = [], 0, 0
    wide = np.float32 if precision != "32.32" else jax.tree.leaves(weights)[0].dtype
    for batch in model.batches:
        loss, gradients = loss_and_gradients(case, weights if precision == "32.32" else to_half(weights, half), batch)
        finite = bool(np.isfinite(norm(gradients)))
        told = {"loss": loss, "gradient_norm": norm(gradients), "parameter_norm": norm(weights)}
        stopped = on_nonfinite is not None and streak >= limit
        made = finite and not stopped
        if on_nonfinite is not None:
            streak = 0 if made else streak + (not stopped)
        step += on_nonfinite is None or streak < limit
        outputs.append(told | {"updated": int(made), "learning_rate": np.nan})
        if not made:
            continue
        clip = case["max_gradient_norm"]
        factor = min(1.0, clip / told["gradient_norm"]) if clip else 1.0
        given = jax.tree.map(lambda g, w, f=factor: jnp.asarray(g * f, w.dtype), gradients, weights)
        changes, state = update(given, state, weights)
        if "rate" in case["optimizer"]:
            outputs[-1]["learning_rate"] = float(state.hyperparams["learning_rate"])
        weights = jax.tree.map(lambda w, c: np.add(w, c, dtype=wide).astype(w.dtype), weights, changes)
        if case["ema_decay"]:
            average = jax.tree.map(lambda e, w: e + (1 - case["ema_decay"]) * (np.float64(w) - e), average, weights)
    return weights, state, average, step, on_nonfinite is not None and streak >= limit, outputs


def returned(case, values):
    """Return what calls return of the values of all updates."""
    of_calls = np.asarray(values, np.float64).reshape(-1, case["device_iterations"])
    if case["outputs"] == "sum":
        return of_calls.sum(1)
    every = {"final": case["device_iterations"], "all": 1, "every second": 2}[case["outputs"]]
    return of_calls[:, every - 1 :: every].reshape(-1)


# the comparison


def call_batch(case, batches):
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    stacked = jax.tree.map(lambda leaf: leaf[:, 0], stacked) if case["replicas"] == 1 else stacked
    return jax.tree.map(lambda leaf: leaf[0], stacked) if case["device_iterations"] == 1 else stacked


def trained(case, model):
    """Return the step, its last state, the outputs of all calls, and whether the state was stopped."""
    step = make_train_step(trained_model(case), OPTIMIZERS[case["optimizer"]], options_of(case))
    state = step.init(model.weights, key=jax.random.key(0) if case["stochastic_rounding"] else None)
    outputs, k, stopped = [], case["device_iterations"], False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteLossWarning)
        for first in range(0, UPDATES, k):
            before = state
            state, of_call = step(state, call_batch(case, model.batches[first : first + k]))
            outputs.append(of_call)
            if not case["donate"]:
                assert int(before.step) <= int(state.step), "the old state can be read"
        try:
            step.check(state)
        except NonFiniteLossError:
            stopped = True
    return step, state, outputs, stopped


def close(found, expected, tolerance, scale=0.0):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(found[finite], expected[finite], rtol=tolerance, atol=tolerance * scale)


def check(case, dtype: Any = np.float32):
    model = model_of(case, dtype)
    weights, memory, average, updates, stops, of_updates = expected_of(case, model)
    step, state, outputs, stopped = trained(case, model)
    assert (int(state.step), stopped) == (updates, stops)
    precision, half = case["precision"]
    eps = float(jnp.finfo(half).eps)
    # gradients are exact; a loss is summed in half, and under 16.16 optax computes in half
    exact = 1e-5 if dtype == np.float32 else 1e-13
    of_loss = exact if precision == "32.32" else 8 * eps
    of_weights = exact if precision != "16.16" else (24 if case["stochastic_rounding"] else 12) * eps
    told = {name: returned(case, [of_update[name] for of_update in of_updates]) for name in of_updates[0]}
    found = lambda name: np.concatenate([np.atleast_1d(getattr(of_call, name)) for of_call in outputs])
    close(found("loss"), told["loss"], of_loss, scale=30)
    if case["norms"]:
        close(found("gradient_norm"), told["gradient_norm"], max(exact, of_weights))
        close(found("parameter_norm"), told["parameter_norm"], of_weights)
    else:
        assert all(of_call.gradient_norm is None for of_call in outputs)
    if case["on_nonfinite"][0] or case["loss_scale"] == DYNAMIC:
        np.testing.assert_array_equal(found("updated"), told["updated"])
    if "rate" in case["optimizer"] and np.isfinite(told["learning_rate"]).all():
        close(found("learning_rate"), told["learning_rate"], 1e-5)
    whole = step.whole(state)
    jax.tree.map(lambda f, e: close(f, e, of_weights, scale=1), whole["params"], weights)
    if precision == "32.32":
        for f, e in zip(jax.tree.leaves(whole["optimizer"]), jax.tree.leaves(memory), strict=True):
            close(f, e, of_weights, scale=1)
    if case["ema_decay"]:
        jax.tree.map(lambda f, e: close(f, e, of_weights, scale=1), whole["ema"], average)
    else:
        assert whole["ema"] is None


EXACT = {str(i): case for i, case in enumerate(CASES) if case["precision"][0] == "32.32"}


@pytest.mark.fast("27")
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_options_together_are_as_exact_as_float64(case):
    odd = {0.75: 0.9, 0.5: 0.3, 64.0: 1000.0}  # which float32 does not hold, or would round
    names = ("ema_decay", "max_gradient_norm", "loss_scale")
    with quick_compiles(), jax.enable_x64(True):
        check(case | {name: odd.get(case[name], case[name]) for name in names}, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=map(str, range(len(CASES))))
def test_options_together_equal_plain_optax(case):
    with quick_compiles():
        check(case)

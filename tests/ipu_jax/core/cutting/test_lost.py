"""Test what is said where a cut loses what a pipeline is for: leaves on all IPUs, and stages without work."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from ipu_jax import Pipeline, stage_end
from support.dense import largest_relative_error
from support.inputs import normal
from support.refusals import refusals, refused

X = jnp.ones((4, 8))
STACK = normal((8, 8, 8), seed=0)  # 2,048 bytes
TABLE = {"table": STACK[0], "layers": STACK, "scale": jnp.ones(())}


def layer(x, w):
    return jnp.tanh(x @ w)


def scanned(x, stack):
    return lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0]


def looped(x, stack, order=(0, 1, 2, 3, 4, 5, 6, 7)):
    return functools.reduce(layer, [stack[k] for k in order], x)


def mean_at_the_end(p, x):
    x = scanned(x, p)
    return x @ p.mean(0)


def tied_table(p, x):
    return scanned(x @ p["table"] * p["scale"], p["layers"]) @ p["table"].T * p["scale"]


def forth_and_back(p, x):
    return functools.reduce(layer, p, x) - functools.reduce(layer, p[::-1], -x)


def cut(model, params, *, ipus=4, **options):
    return Pipeline.from_function(lambda p, x: jnp.mean(model(p, x) ** 2), params, X, ipus=ipus, **options)


AT_ONCE = "all IPUs hold params (2.0 kB): {} (test_lost.py:LINE) reads all layers at once. Do it layer by layer"
ONE_ROW = "all IPUs hold params (2.0 kB): stages 0 and 2 both read row 0 (test_lost.py:LINE). Tied layers"
LOST = {
    "inverse, loop": (lambda p, x: looped(x, jnp.linalg.inv(2 * p)), STACK, [AT_ONCE.format("lu")]),
    "sums, scan": (lambda p, x: scanned(x, jnp.cumsum(p, 0)), STACK, [AT_ONCE.format("cumsum")]),
    "mean": (mean_at_the_end, STACK, [AT_ONCE.format("reduce_sum")]),
    "with a penalty": (
        lambda p, x: looped(x, jnp.cumsum(p, 0)) + jnp.sum(p**2),
        *(STACK, [AT_ONCE.format("cumsum")]),
    ),
    "tied layers": (lambda p, x: looped(x, p, (0, 1, 2, 3) * 2), STACK, [ONE_ROW]),
    "scanned twice": (lambda p, x: scanned(scanned(x, p), p), STACK, [ONE_ROW]),
    "tied table": (
        *(tied_table, TABLE),
        ["all IPUs hold params['table'] (256 B): tied, stages 0, 3 read it", "all IPUs hold 1 more leaf (4 B)"],
    ),
    "one input forth, another back": (
        *(forth_and_back, list(STACK[:4])),
        [
            "all IPUs hold params[0] (256 B), params[1] (256 B): tied, stages 0, 3 read it",
            "all IPUs hold params[2] (256 B): tied, stages 1, 2 read it",
            "all IPUs hold 1 more leaf (256 B)",
        ],
    ),
    "small": (
        lambda p, x: scanned(x * p["scale"], p["layers"]) * p["scale"],
        *(TABLE, ["all IPUs hold 1 small leaf (4 B)"]),
    ),
    "divided": (lambda p, x: scanned(x, p) + jnp.sum(p**2), STACK, []),
}


@pytest.mark.parametrize(("model", "params", "expected"), LOST.values(), ids=LOST)
def test_print_says_which_leaves_all_ipus_hold_and_why(model, params, expected):
    lines = [line for line in str(cut(model, params)).splitlines() if line.startswith("all IPUs hold")]
    assert len(lines) == len(expected)
    for line, begin in zip(lines, expected, strict=True):
        assert re.sub(r"py:\d+", "py:LINE", line).startswith(begin), line


def test_the_line_is_the_users():
    """It is where the model calls a function of a library whose own lines say nothing."""
    number = mean_at_the_end.__code__.co_firstlineno + 2
    assert f"reduce_sum (test_lost.py:{number})" in str(cut(mean_at_the_end, STACK))


def while_loop(p, x):
    return lax.while_loop(lambda c: c[1] < 8, lambda c: (layer(c[0], p[c[1]]), c[1] + 1), (x, 0))[0]


def at_unknown_places(p, x):
    return lax.scan(lambda x, k: (layer(x, p[k]), None), x, jnp.argsort(x[0]))[0]


def one_state_for_all(p, state, x):
    x, means = lax.scan(lambda x, ws: (layer(x - ws[1], ws[0]), x.mean(0)), x, (p, state))
    return jnp.mean(x), means / jnp.linalg.norm(means)


STATE = normal((8, 8), seed=1)


@refusals(
    (lambda: cut(while_loop, STACK), "one operation, while (test_lost.py", "lax.scan(layer, x, params)", "fewer IPUs"),
    (lambda: cut(at_unknown_places, STACK), "one operation, scan (test_lost.py", "lax.scan(layer, x, params)"),
    (
        lambda: cut(lambda p, x: lax.map(lambda row: scanned(row[None], p)[0], x), STACK),
        *("one operation, scan (test_lost.py", "a stage would have no work", "jax.vmap in place of lax.map"),
    ),
    (
        lambda: cut(lambda p, x: lax.cond(x[0, 0] > 0, lambda: looped(x, p), lambda: -x), STACK),
        *("one operation, cond (test_lost.py", "write one for each layer"),
    ),
    (
        lambda: Pipeline.from_function(one_state_for_all, STACK, X, state=STATE, ipus=4),
        *("state keeps 100%", "2 places", "hold one leaf per layer"),
    ),
)
def test_no_stage_is_empty(call, holds):
    with refused(*holds):
        call()


def test_an_empty_stage_can_be_asked_for():
    many = lambda p, x: lax.fori_loop(0, 64, lambda _, x: layer(x, p[0]), x)
    pipeline = cut(lambda p, x: stage_end(-stage_end(many(p, x))), STACK, ipus=3)
    assert pipeline.function is not None
    assert 0 < pipeline.function.cut.work[1] < 0.01 * pipeline.function.cut.work[0] / 3


def with_backward(backward):
    @jax.custom_vjp
    def own(w):
        return w

    own.defvjp(lambda w: (w, w), lambda w, g: (backward(w, g),))
    return own


LINEAR = {
    "scaled by the weights": lambda w, g: g * w / (1 + jnp.abs(w)),
    "masked": lambda w, g: jnp.where(w > 0, g, 0),
    "through a matrix": lambda w, g: jnp.tril(jnp.ones((8, 8))) @ g[::-1] + g.sum(0),
    "mixed": lambda w, g: jnp.concatenate([g[4:], 0.5 * g[:4]]).astype(jnp.float32) - g / 3,
}
NOT_LINEAR = {
    "clipped by its norm": lambda w, g: g / (1 + jnp.linalg.norm(g)),
    "clipped by value": lambda w, g: jnp.clip(g, -1e-3, 1e-3),
    "decayed": lambda w, g: g + 0.1 * w,
    "chosen by itself": lambda w, g: jnp.where(g > 0, g, 0),
    "squared": lambda w, g: g * g,
}


@pytest.mark.parametrize("backward", LINEAR.values(), ids=LINEAR)
def test_tied_weights_may_have_a_linear_backward(backward):
    own = with_backward(backward)
    loss = lambda p, x: jnp.mean(tied_table(p | {"table": own(p["table"])}, x) ** 2)
    pipe = Pipeline.from_function(loss, TABLE, X, ipus=4)
    gradients = pipe.unshard(pipe.value_and_grad(pipe.shard(TABLE), X[None])[1])
    assert largest_relative_error(gradients, jax.grad(loss)(TABLE, X)) < 1e-5


@pytest.mark.parametrize("backward", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_tied_weights_with_another_backward_are_refused(backward):
    own = with_backward(backward)
    with refused("stages 0 and 3 compute custom_vjp_call (test_lost.py:", "not linear", "in the optimizer"):
        cut(lambda p, x: tied_table(p | {"table": own(p["table"])}, x), TABLE)


@pytest.mark.parametrize("backward", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_weights_of_one_stage_may_have_any_backward(backward):
    own = with_backward(backward)
    cut(lambda p, x: looped(x, [*map(own, p)]), list(STACK))

"""Test rows that are taken inside of calls, and through functions with derivatives of their own, against plain jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from support.composed import composed, cut_into
from support.dense import largest_relative_error
from support.inputs import normal

L, D = 4, 8
W = np.array(0.6 * normal((L, D, D)))
W[:, 3] = 0  # where the derivative of relu jumps
PARAMS = {"head": normal((D, 3), seed=1), "s": jnp.full((L, 1, 1), 0.1), "u": jnp.float32(0.3), "w": jnp.asarray(W)}
BATCH = {"x": normal((5, D), seed=2), "keep": np.array([True, False] * 2), "which": np.array([0, 1, 2, 0])}


def layer(x, w):
    return x + jnp.tanh(x @ w)


def divided(loss):
    """Return the rows of "w" that each of two stages holds, and the error of value and gradients."""
    expected = jax.jit(jax.value_and_grad(loss))(PARAMS, BATCH)
    model = cut_into(2, loss, PARAMS, BATCH)
    (value, _), gradients = jax.jit(jax.value_and_grad(composed(model), has_aux=True))(PARAMS, None, BATCH)
    held = [leaf.part.rows for leaf in model.weights.leaves if leaf.part.leaf == [*PARAMS].index("w")]
    return held, largest_relative_error((value, gradients), expected)


def own_vjp(fn, backward, forward=None):
    found = jax.custom_vjp(fn)
    found.defvjp(lambda *xs: ((forward or fn)(*xs), xs), backward)
    return found


def own_jvp(fn, rule):
    found = jax.custom_jvp(fn)
    found.defjvp(rule)
    return found


MASK = np.linspace(0, 1, D, dtype=np.float32)
ROWS = np.arange(1, L + 1, dtype=np.float32)[:, None, None]
doubled = lambda fn: own_jvp(fn, lambda xs, ts: (fn(*xs), 2 * fn(*ts)))
steps = lambda w, s: jnp.round(w / s) * s
straight = own_vjp(lambda w: jnp.round(8 * w) / 8, lambda kept, g: (g * (jnp.abs(kept[0]) < 0.7),))
learnt = own_vjp(steps, lambda kept, g: (g, jnp.sum(g * (steps(*kept) - kept[0]) / kept[1], (1, 2), keepdims=True)))
slope = lambda yes, no, w: jnp.where(w > 0, yes, no)
leaky = own_jvp(
    lambda w, u: slope(w, u * w, w),
    lambda xs, ts: (slope(xs[0], xs[1] * xs[0], xs[0]), slope(ts[0], xs[1] * ts[0] + xs[0] * ts[1], xs[0])),
)
BY_ROWS = {
    "relu": lambda p: jax.nn.relu(p["w"]),
    "rounded, with a window": lambda p: straight(p["w"]),
    "a learnt step for each row": lambda p: learnt(p["w"], p["s"]),
    "one slope for all rows": lambda p: leaky(p["w"], p["u"]),
    "another value where it is differentiated": lambda p: own_vjp(
        lambda w: 2 * w, lambda kept, g: (g * kept[0],), lambda w: 3 * w
    )(p["w"]),
    "gradients clipped by row": lambda p: own_vjp(
        lambda w: w, lambda _, g: (g / (1 + jnp.linalg.norm(g, axis=(1, 2), keepdims=True)),)
    )(p["w"]),
    "along another dim": lambda p: own_vjp(lambda w: w.swapaxes(0, 1), lambda _, g: (2 * g.swapaxes(0, 1),))(
        p["w"].swapaxes(0, 1)
    ),
    "a constant": lambda p: doubled(lambda w: w * MASK)(p["w"]),
    "one after the other": lambda p: straight(2 * jax.nn.relu(p["w"])),
}
MIXED = {
    "derivative adds rows": lambda p: own_jvp(lambda w: w, lambda xs, ts: (xs[0], jnp.cumsum(ts[0], 0)))(p["w"]),
    "gradient adds rows": lambda p: own_vjp(lambda w: w, lambda _, g: (jnp.cumsum(g, 0),))(p["w"]),
    "reversed": lambda p: doubled(lambda w: w[::-1])(p["w"]),
    "repeated": lambda p: doubled(lambda w: jnp.repeat(w[:2], 2, axis=0))(p["w"]),
    "pairs": lambda p: doubled(lambda w: (w.reshape(2, 2, D, D) * np.array([1, 2])[:, None, None]).reshape(L, D, D))(
        p["w"]
    ),
    "a constant with rows": lambda p: doubled(lambda w: w * ROWS)(p["w"]),
    "one learnt step": lambda p: own_vjp(steps, lambda kept, g: (g, jnp.sum(g * kept[0])))(p["w"], p["u"]),
}


@pytest.mark.fast(*(f"{name}-scan" for name in [*BY_ROWS][::2]), "gradient adds rows-scan", "repeated-scan")
@pytest.mark.parametrize("how", ["loop", "scan"])
@pytest.mark.parametrize("name", [*BY_ROWS, *MIXED])
def test_a_stack_is_divided_before_a_function_with_its_own_derivative_if_rows_stay_apart(name, how):
    def loss(p, mb):
        x, w = mb["x"], {**BY_ROWS, **MIXED}[name](p)
        if how == "scan":
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, w)
        for k in range(L) if how == "loop" else ():
            x = layer(x, w[k])
        return jnp.mean((x @ p["head"]) ** 2)

    held, error = divided(loss)
    assert held == ([(0, 2), (2, 4)] if name in BY_ROWS else [None])
    assert error < 1e-5


def test_a_derivative_that_raises_is_not_traced_into_an_error():
    def backward(_, g):
        raise NotImplementedError

    fn = own_vjp(lambda w: 2 * w, backward)

    def loss(p, mb):
        w = fn(lax.stop_gradient(p["w"]))
        return jnp.mean((layer(layer(mb["x"], w[0]), w[1]) @ p["head"]) ** 2)

    assert divided(loss)[1] < 1e-5


adding = jax.jit(lambda x: x + MASK)
named = jax.checkpoint_policies.save_only_these_names("a")
INSIDE = {
    "traced number": lambda w, k, x, mb: jax.checkpoint(lambda w, k, x: layer(x, w[k]))(w, k, x),
    "take": lambda w, k, x, mb: jax.checkpoint(lambda x: layer(x, jnp.take(w, k, axis=0)))(x),
    "unstack": lambda w, k, x, mb: jax.checkpoint(lambda x: layer(x, jnp.unstack(w)[k]))(x),
    "after a cast and relu": lambda w, k, x, mb: jax.checkpoint(
        lambda x: layer(x, jax.nn.relu(w.astype(jnp.bfloat16))[k].astype(jnp.float32))
    )(x),
    "nested": lambda w, k, x, mb: jax.checkpoint(lambda x: 1.5 * jax.checkpoint(lambda x: layer(x, w[k]))(x))(x),
    "policy": lambda w, k, x, mb: jax.checkpoint(lambda x: checkpoint_name(layer(x, w[k]), "a"), policy=named)(x),
    "barriers by input": lambda w, k, x, mb: jax.checkpoint(
        lambda x, w: adding(layer(x, w[k])), prevent_cse=(False, True)
    )(x, w),
    "constant": lambda w, k, x, mb: jax.checkpoint(lambda x: adding(layer(x, w[k])))(x),
    "part of a row": lambda w, k, x, mb: jax.checkpoint(lambda x: x + jnp.tanh(x[:, :4] @ w[k, :4]))(x),
    "row is a result": lambda w, k, x, mb: sum(jax.checkpoint(lambda x: (layer(x, w[k]), w[k].sum()))(x)),
    "switch": lambda w, k, x, mb: lax.switch(
        mb["which"][k], [lambda x: layer(x, w[k]), lambda x: x @ w[k].T, lambda x: 2 * x], x
    ),
    "cond in checkpoint": lambda w, k, x, mb: jax.checkpoint(
        lambda x: lax.cond(mb["keep"][k], lambda x: layer(x, w[k]), lambda x: x, x)
    )(x),
    "checkpoint in cond": lambda w, k, x, mb: lax.cond(
        mb["keep"][k], jax.checkpoint(lambda x: layer(x, w[k])), lambda x: x, x
    ),
}
WHOLE = {
    "unknown number": lambda w, k, x, mb: jax.checkpoint(lambda x: layer(x, w[mb["which"][k]]))(x),
    "one branch reads all": lambda w, k, x, mb: lax.cond(
        mb["keep"][k], lambda x: layer(x, w[k]), lambda x: x @ w.sum(0), x
    ),
}


@pytest.mark.fast("traced number", "after a cast and relu", "barriers by input", "one branch reads all")
@pytest.mark.parametrize("name", [*INSIDE, *WHOLE])
def test_rows_are_taken_outside_of_a_call(name):
    one = {**INSIDE, **WHOLE}[name]

    def loss(p, mb):
        x = mb["x"]
        for k in (0, 0, 1, 2, 2, 3):  # each has less than the work from which a checkpoint is opened
            x = one(p["w"], k, x, mb)
        return jnp.mean((x @ p["head"]) ** 2)

    held, error = divided(loss)
    assert held == ([(0, 2), (2, 4)] if name in INSIDE else [None])
    assert error < 1e-5

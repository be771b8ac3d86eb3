"""Cut functions under jax's flags for the future: the same stages, of the same work, with the same results."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from ipu_jax import Pipeline, stage_end
from support.composed import composed, cut_into
from support.dense import largest_relative_error
from support.flags import FUTURE_FLAGS, turned_on
from support.inputs import normal

X = normal((4, 8), seed=1)
PARAMS = {"loop": [normal((8, 8), seed=k) / 3 for k in range(8)], "scan": normal((6, 8, 8), seed=9) / 3}
CHANGING = [flag for flag in FUTURE_FLAGS if flag in ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")]
"""The flags under which a function has other primitives."""


def loss_of(mark=lambda x: x):
    """Return a loss function with everything that the flags change, defined under the flag."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (0.9 * g @ kept[1].T, kept[0].T @ g))

    @jax.custom_jvp
    def capped(x, w):
        return jnp.tanh(x @ w)

    @capped.defjvp
    def _(primals, tangents):
        y = capped(*primals)
        return y, 0.9 * (1 - y**2) * (tangents[0] @ primals[1] + primals[0] @ tangents[1])

    policy = jax.checkpoint_policies.save_only_these_names("product")

    def loss(p, x):
        block = jax.checkpoint(lambda x, w: x + jnp.tanh(checkpoint_name(product(x, w), "product")), policy=policy)
        for w in p["loop"]:
            x = mark(block(x, w))
        layer = jax.checkpoint(lambda x, w: x + jax.nn.softmax(capped(x, w)))
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, p["scan"])
        return jnp.mean(x**2)

    return loss


def tables():
    """Return the tables of stages: cut anywhere, at marks and at names."""
    ways = [(lambda x: x, None), (stage_end, None), (lambda x: checkpoint_name(x, "end"), ["end"])]
    cut = lambda mark, cuts: Pipeline.from_function(loss_of(mark), PARAMS, X, ipus=4, cuts=cuts)
    return [str(cut(mark, cuts)) for mark, cuts in ways]


def apart(table):
    """Return the texts and the percentages of a table."""
    return re.split(r"[\d.]+%", table), [float(share) for share in re.findall(r"([\d.]+)%", table)]


def gradients_of(stages):
    """Return the gradients of a function that is cut into stages, or of the function itself, where there are none."""
    loss = loss_of()
    run = (lambda p: composed(cut_into(stages, loss, PARAMS, X))(p, None, X)[0]) if stages else lambda p: loss(p, X)
    return jax.jit(jax.grad(run))(PARAMS)


tables_today = functools.cache(tables)
gradients_today = functools.cache(gradients_of)


def test_the_flags_of_this_jax_are_found():
    assert {"jax_remat3", "jax_custom_vjp3"} <= {*FUTURE_FLAGS}


@pytest.mark.parametrize("flag", FUTURE_FLAGS)
def test_no_flag_changes_a_stage(flag):
    expected = tables_today()
    with turned_on(flag):
        found = tables()
    for one, other in zip(found, expected, strict=True):
        (texts, shares), (expected_texts, expected_shares) = apart(one), apart(other)
        assert texts == expected_texts
        assert shares == pytest.approx(expected_shares, abs=2)  # a softmax with a rule of its own hides a stop_gradient


@pytest.mark.parametrize("flag", CHANGING)
def test_no_flag_changes_a_gradient(flag):
    expected = gradients_today(0)
    with turned_on(flag):
        assert largest_relative_error(gradients_of(3), expected) < 1e-5


@pytest.mark.parametrize("flag", [None, *CHANGING])
def test_a_mark_inside_one_operation_is_refused(flag):
    scanned = lambda p, x: jax.lax.scan(lambda x, w: (stage_end(x @ w), None), x, p["scan"])[0].sum()

    def through(call):
        def loss(p, x):
            for w in p["loop"]:
                x = call(lambda x, w: stage_end(jnp.tanh(x @ w)))(x, w)
            return jnp.mean(x**2)

        return loss

    def own(fn):
        found = jax.custom_vjp(fn)
        found.defvjp(lambda x, w: (fn(x, w), w), lambda w, g: (g @ w.T, g.T @ g))
        return found

    with turned_on(flag) if flag else contextlib.nullcontext():
        cases = [(scanned, "scan .*leave it out"), (through(jax.checkpoint), "jax.checkpoint .*mark its result")]
        cases += [(through(own), "(custom_vjp_call|CustomVJPTraced) ")]
        for loss, named in cases:
            with pytest.raises(ValueError, match=rf"stage_end \(.*py:\d+\) is inside one operation, {named}"):
                cut_into(2, loss, PARAMS, X)


@pytest.mark.parametrize("flag", CHANGING)
def test_a_gradient_that_ignores_the_cotangent_is_refused(flag):
    def loss(p, x):
        @jax.custom_vjp
        def scaled(x, s):
            return x * s

        scaled.defvjp(lambda x, s: (x * s, (x, s)), lambda kept, g: (g * kept[1], jnp.ones_like(kept[1])))
        for w in p["loop"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(scaled(x, p["scan"][0, 0]) ** 2)

    refused = pytest.raises(ValueError, match=r"the custom_vjp of scaled .* gives its input 2 a gradient")
    with turned_on(flag), refused:
        cut_into(2, loss, PARAMS, X)

"""Test the two halves of a stage against `jax.vjp` of the plain function, and what is stashed between them.

Everything that depends on a micro-batch has a dim of ROWS, and no weight has one. So a stashed weight, or a copy of
one, can be found by its shape.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipu_jax import Stage
from ipu_jax.core.programs.segment import Message, MicrobatchInputs, whole
from ipu_jax.core.programs.segment_program import split_floats, trace_segment
from support.counted import primitives_of
from support.dense import largest_relative_error
from support.inputs import MICROBATCH, ROWS, D, E, X, mlp, normal
from support.sums import empty_sums

F32, BF16 = jnp.float32, jnp.bfloat16

W = {"w": (D, E), "b": (E,)}
STACK = {"w": (3, D, D), "b": (3, D)}


GIVEN = MicrobatchInputs(MICROBATCH, (None,))


class Halves:
    """Return F and B of one stage as plain functions of its own weights and x."""

    def __init__(self, fn, params, x=X):
        self.treedef = jax.tree.structure(params)
        self.halves = trace_segment(
            whole((Stage(fn, params="g"),), "training"), {"g": params}, Message(x), GIVEN, {}, last=False
        )
        self.y = self.halves.y.y
        self.stash = self.halves.stash

    def forward(self, params, x):
        results, stash = self.halves.forward({"g": params}, Message(x), GIVEN, {})
        return results.y.y, stash

    def backward(self, params, stash, dy):
        totals, dx = self.halves.backward({"g": params}, GIVEN, stash, dy, empty_sums(params), jnp.int32(0))
        return jax.tree.unflatten(self.treedef, totals), dx


def stashed(fn, shapes=None, x=X) -> list[tuple[str, tuple[int, ...]]]:
    return sorted((s.dtype.name, s.shape) for s in Halves(fn, normal(W if shapes is None else shapes), x).stash)


def matmul(p, x, mb):
    return x @ p["w"] + p["b"]


def half_mlp(p, x, mb):
    return jax.nn.relu(x.astype(BF16) @ p["w"].astype(BF16) + p["b"].astype(BF16))


def layers(p, x, mb):
    return lax.scan(lambda h, wb: (jnp.tanh(h @ wb[0] + wb[1]), None), x, (p["w"], p["b"]))[0]


def half_layers(p, x, mb):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(BF16)), None), x.astype(BF16), p["w"])[0]


def remat_layers(p, x, mb):
    layer = jax.checkpoint(lambda h, wb: jnp.tanh(h @ wb[0] + wb[1]))
    return lax.scan(lambda h, wb: (layer(h, wb), None), x, (p["w"], p["b"]))[0]


def loop_layers(p, x, mb):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"][i]), x)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, x > 0), lambda positive, g: (jnp.where(positive, jnp.clip(g, -0.1, 0.1), 0),))


def attention(p, x, mb):
    scores = (x @ p["w"]) @ (x @ p["w"]).T
    return jax.nn.softmax(scores, axis=-1) @ x


def layer_norm(p, x, mb):
    centred = x - x.mean(-1, keepdims=True)
    return (centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)) @ p["w"] + p["b"]


def spectral(p, x, mb):
    return x @ (p["w"] / jnp.linalg.norm(p["w"])) + p["b"]


FUNCTIONS = {
    "a matmul": (matmul, W),
    "an MLP": (mlp, W),
    "an MLP in jit": (jax.jit(mlp), W),
    "an MLP in jit in jit": (jax.jit(lambda p, x, mb: jax.jit(mlp)(p, x, mb) * 2), W),
    "an MLP in checkpoint": (jax.checkpoint(mlp), W),
    "an MLP in checkpoint in jit": (jax.jit(jax.checkpoint(mlp)), W),
    "a checkpoint that saves its dots": (
        jax.checkpoint(mlp, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        W,
    ),
    "a scan over layers": (layers, STACK),
    "a scan over layers in jit": (jax.jit(layers), STACK),
    "a scan over remat layers": (remat_layers, STACK),
    "a fori_loop over layers": (loop_layers, STACK),
    "custom_vjp": (lambda p, x, mb: clipped(matmul(p, x, mb)), W),
    "custom_vjp in jit": (jax.jit(lambda p, x, mb: clipped(matmul(p, clipped(x), mb))), W),
    "gelu, a jit of its own": (lambda p, x, mb: jax.nn.gelu(matmul(p, x, mb)), W),
    "a dropout mask of the batch": (lambda p, x, mb: jnp.where(mb["keep"], matmul(p, x, mb) / 0.7, 0), W),
    "dropout by a key of the batch": (
        lambda p, x, mb: jnp.where(jax.random.bernoulli(mb["key"], 0.7, (ROWS, E)), matmul(p, x, mb), 0),
        W,
    ),
    "a branch that the batch takes": (
        lambda p, x, mb: lax.cond(mb["ids"][0] == 0, lambda: matmul(p, x, mb), lambda: jnp.zeros((ROWS, E))),
        W,
    ),
    "the weight used twice": (lambda p, x, mb: jnp.tanh(jnp.sin(x) @ p["w"]) @ p["w"].T, W),
    "a weight unused": (lambda p, x, mb: x @ p["w"], W),
    "x unused": (lambda p, x, mb: mb["x"] @ p["w"] + p["b"], W),
    "no x and no weights": (lambda p, x, mb: mb["x"] * 2, {}),
    "a weight that is normalised": (spectral, W),
    "layer norm": (layer_norm, W),
    "attention": (attention, W),
    "a gather from the weights": (lambda p, x, mb: x + p["w"].T[mb["ids"]], W),
    "take_along_axis": (lambda p, x, mb: jnp.take_along_axis(x @ p["w"], mb["ids"][:, None], 1), W),
    "a sort": (lambda p, x, mb: jnp.sort(matmul(p, x, mb), axis=0), W),
    "a sum over rows": (lambda p, x, mb: jnp.cumsum(matmul(p, x, mb), axis=0).mean(), W),
    "stop_gradient": (lambda p, x, mb: lax.stop_gradient(x @ p["w"]) + p["b"], W),
    "a tree with ints and bools": (
        lambda p, x, mb: {"h": matmul(p, x, mb), "top": jnp.argmax(x @ p["w"], -1), "pos": [(x > 0, mb["ids"])]},
        W,
    ),
    "several floats of several shapes": (lambda p, x, mb: (matmul(p, x, mb), x.sum(), [mb["x"], p["b"] ** 2]), W),
    "only ints": (lambda p, x, mb: jnp.argmax(x @ p["w"], -1), W),
    "nothing": (lambda p, x, mb: (), W),
}


def as_plain_vjp(fn, params, x, dy):
    """Return `(y, dparams, floats of dx)` by `jax.vjp` of the function itself."""

    def floats_only(params, x_floats):
        y = fn(params, join_x(x_floats, x_others), MICROBATCH)
        return split_floats(y)[0], y

    x_floats, x_others, join_x = split_floats(x)
    _, vjp, y = jax.vjp(floats_only, params, x_floats, has_aux=True)
    return y, *vjp(dy)


@pytest.mark.fast("1")
@pytest.mark.parametrize("half", [0, 1])
def test_the_halves_together_are_the_vjp(half):
    """Half of all functions are in one program, which compiles in less time than one program for each."""
    names = [*FUNCTIONS][half::2]
    params = {name: normal(FUNCTIONS[name][1]) for name in names}
    both = {name: Halves(FUNCTIONS[name][0], params[name]) for name in names}

    def run(name, weights):
        fn, of = FUNCTIONS[name][0], both[name]
        dy = [jnp.asarray(np.random.default_rng(9).normal(size=y.shape), y.dtype) for y in split_floats(of.y)[0]]
        y, stash = of.forward(weights, X)
        return (y, *of.backward(weights, stash, dy)), as_plain_vjp(fn, weights, X, dy), stash

    results = jax.jit(lambda params: {name: run(name, params[name]) for name in names})(params)
    for name, (found, expected, stash) in results.items():
        for one, other, bound in zip(found, expected, (1e-6, 2e-6, 2e-6), strict=True):
            assert largest_relative_error(one, other) < bound, name
        kinds = [jax.tree.map(lambda leaf: (leaf.dtype, leaf.shape), tree) for tree in (stash, found[0])]
        expected_kinds = [jax.tree.map(lambda v: (v.dtype, v.shape), tree) for tree in (both[name].stash, both[name].y)]
        assert kinds == expected_kinds, name


@pytest.mark.parametrize(
    "fn", [half_mlp, jax.jit(half_mlp), jax.checkpoint(half_mlp)], ids=["plain", "jit", "checkpoint"]
)
@pytest.mark.fast("jit")
def test_the_halves_of_a_stage_in_bfloat16_are_the_vjp(fn):
    params = normal(W)
    both = Halves(fn, params)
    dy = [jnp.ones((ROWS, E), BF16)]

    @jax.jit
    def run(params):
        y, stash = both.forward(params, X)
        dparams, dx = both.backward(params, stash, dy)
        return (y, dparams, dx), as_plain_vjp(fn, params, X, dy)

    found, expected = run(params)
    # the same operations in the same precision, but XLA may fuse them in another way: one rounding of 2^-8
    assert largest_relative_error(found, expected) <= 2**-8
    assert found[1]["w"].dtype == F32


# what is stashed


INPUT, ONE_BIT_A_UNIT = ("float32", (ROWS, D)), ("bool", (ROWS, E))
STASHES = {
    "an MLP's input, and one bit a unit": (mlp, X, [ONE_BIT_A_UNIT, INPUT]),
    "nothing of the micro-batch": (lambda p, x, mb: jax.nn.relu(mb["x"] @ p["w"] + p["b"]), None, [ONE_BIT_A_UNIT]),
    "nothing of two products with it": (lambda p, x, mb: jnp.stack([mb["x"] @ p["w"], mb["x"] @ p["w"]]), None, []),
    "nothing that where makes of constants": (lambda p, x, mb: jnp.where(mb["keep"], x @ p["w"], 0), X, [INPUT]),
    "nothing that a jit makes of constants": (jax.jit(mlp), X, [ONE_BIT_A_UNIT, INPUT]),
    "a remat stage's input alone": (jax.checkpoint(mlp), X, [INPUT]),
    "the input as the stage casts it": (half_mlp, X, [("bfloat16", (ROWS, D)), ONE_BIT_A_UNIT]),
    "what is a residual twice, once": (lambda p, x, mb: (x @ p["w"], x @ (2 * p["w"])), X, [INPUT]),
}


@pytest.mark.parametrize(("fn", "x", "expected"), STASHES.values(), ids=STASHES)
def test_what_is_stashed(fn, x, expected):
    assert stashed(fn, x=x) == expected


# A loop and a cond return as residuals the weights that they read inside.
MAKE_COPIES = ("a fori_loop over layers", "a branch that the batch takes")


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        *(case for name, case in FUNCTIONS.items() if name not in MAKE_COPIES),
        (half_mlp, W),
        (lambda p, x, mb: x @ jax.nn.softmax(p["w"]), W),
        (lambda p, x, mb: x @ jnp.where(p["w"] > 0, p["w"], 0.1 * p["w"]), W),
        (lambda p, x, mb: jnp.einsum("nd,de->ne", x.astype(BF16), p["w"].astype(BF16)), W),
    ],
)
def test_no_weight_and_nothing_that_comes_of_weights_alone_is_stashed(fn, shapes):
    assert all(ROWS in shape for _, shape in stashed(fn, shapes) if shape)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (jax.jit(half_mlp), W),
        (jax.jit(lambda p, x, mb: x @ jax.nn.softmax(p["w"])), W),
        (half_layers, STACK),
        (loop_layers, STACK),
    ],
    ids=["jit", "jit of a softmax", "scan", "fori_loop"],
)
def test_no_copy_of_a_weight_that_is_made_inside_a_jit_or_a_loop_is_stashed(fn, shapes):
    # fori_loop keeps the numbers of its iterations, too
    assert all(ROWS in shape for dtype, shape in stashed(fn, shapes) if shape and dtype != "int32")


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["plain", "jit"])
def test_nothing_is_computed_twice(wrap):
    def fn(p, x, mb):
        for w in (p["w0"], p["w1"], p["w2"]):
            x = jnp.tanh(x @ w)
        return x

    params = normal({"w0": (D, E), "w1": (E, E), "w2": (E, D)})
    both = Halves(wrap(fn), params)
    y, stash = both.forward(params, X)
    forward = primitives_of(jax.make_jaxpr(both.forward)(params, X).jaxpr)
    backward = primitives_of(jax.make_jaxpr(lambda p, s: both.backward(p, s, [y]))(params, stash).jaxpr)
    assert (forward["dot_general"], forward["tanh"]) == (3, 3)
    assert (backward["dot_general"], backward["tanh"]) == (6, 0)

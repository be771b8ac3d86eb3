"""Test that like stages share one program, and that stages which only look alike do not: each computes its own."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl

from ipu_jax import Pipeline, Stage, make_mesh
from ipu_jax.core.programs.segment import Message, MicrobatchInputs, whole
from ipu_jax.core.programs.segment_program import trace_segment
from support.against_plain import assert_equals_plain

ROWS, D, M = 3, 4, 3
SHAPE = jax.ShapeDtypeStruct((ROWS, D), "float32")
LARGE = 5000


def adds(constant):
    return lambda p, x, mb: jnp.tanh(x @ p) + constant


def adds_in_scan(constant):
    def fn(p, x, mb):
        return lax.scan(lambda h, w: (jnp.tanh(h @ p) + constant * w, None), x, jnp.ones(2))[0]

    return fn


def adds_in_cond(constant):
    return lambda p, x, mb: lax.cond(x.sum() > 0, lambda x: x @ p + constant, lambda x: x @ p - constant, x)


def multiplies(scale):
    return lambda p, x, mb: jnp.tanh(x @ p) * scale


def calls(on_host):
    return lambda p, x, mb: x @ p + jax.pure_callback(on_host, SHAPE, lax.stop_gradient(x))


def calls_in_order(on_host):
    return lambda p, x, mb: x @ p + io_callback(on_host, SHAPE, lax.stop_gradient(x))


def calls_in_scan(on_host):
    def fn(p, x, mb):
        def step(h, _):
            return h @ p + jax.pure_callback(on_host, SHAPE, lax.stop_gradient(h)), None

        return lax.scan(step, x, None, length=2)[0]

    return fn


def exported(fn):
    call = jax.export.export(jax.jit(fn))(SHAPE, jax.ShapeDtypeStruct((D, D), "float32")).call
    return lambda p, x, mb: x @ p + lax.stop_gradient(call(x, p))


def with_rule(scale):
    """Return a stage with a custom rule: its backward pass differs, which the forward pass does not show."""

    @jax.custom_vjp
    def product(x, p):
        return x @ p

    product.defvjp(lambda x, p: (x @ p, (x, p)), lambda kept, g: (scale * g @ kept[1].T, kept[0].T @ g))
    return lambda p, x, mb: product(x, p)


def with_kernel(scale=2.0, reversed=False, rows=1, kept=0):
    """Return a stage with a Pallas kernel, which also runs backward.

    The kernel scales blocks of `rows` rows, in reverse order or not, by a constant, and begins with block `kept`.
    """

    def kernel(x_ref, y_ref):
        y_ref[...] = scale * x_ref[...]

    def scaled(x):
        blocks = x.shape[0] // rows
        whole = pl.BlockSpec((rows, x.shape[1]), lambda i: ((i + kept) % blocks, 0))
        result = pl.BlockSpec((rows, x.shape[1]), lambda i: (blocks - 1 - i if reversed else i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, out_shape=shape, grid=(blocks,), in_specs=[whole], out_specs=result, interpret=True
        )(x)

    rule = jax.custom_vjp(scaled)
    rule.defvjp(lambda x: (scaled(x), None), lambda _, g: (scaled(g),))
    return lambda p, x, mb: rule(jnp.tanh(x @ p))


def doubled(x, p=None):
    return np.asarray(2 * x) if p is None else 2 * (x @ p)


def halved(x, p=None):
    return np.asarray(x / 2) if p is None else (x @ p) / 2


TENTH = np.float32(0.1)
one, two = np.random.default_rng(0).normal(size=(2, ROWS, D)).astype("float32")
UNLIKE = {
    "a literal": (multiplies(2.0), multiplies(2.5)),
    "a literal in its last bit": (multiplies(TENTH), multiplies(np.nextafter(TENTH, np.float32(1)))),
    "the sign of a zero": (adds(0.0), adds(-0.0)),
    "a constant": (adds(one), adds(two)),
    "a constant's last bit": (adds(one), adds(np.nextafter(one, np.float32(9)))),
    "a constant in a scan": (adds_in_scan(one), adds_in_scan(two)),
    "a constant in a cond": (adds_in_cond(one), adds_in_cond(two)),
    "a callback": (calls(doubled), calls(halved)),
    "an ordered callback": (calls_in_order(doubled), calls_in_order(halved)),
    "a callback in a scan": (calls_in_scan(doubled), calls_in_scan(halved)),
    "an exported function": (exported(doubled), exported(halved)),
    "a rule's backward": (with_rule(1.0), with_rule(-3.0)),
    "a literal in a kernel": (with_kernel(2.0), with_kernel(2.5)),
    "the order of a kernel's blocks": (with_kernel(), with_kernel(reversed=True)),
    "a kernel's blocks": (with_kernel(), with_kernel(rows=3)),
    "a literal in a kernel's index map": (with_kernel(), with_kernel(kept=1)),
}  # fmt: skip


def program_of(fn, **options):
    w = jax.ShapeDtypeStruct((D, D), "float32")
    stage = Stage(fn, params="g", **options)
    keys = (jax.random.key(0) if stage.random else None,)
    return trace_segment(
        whole((stage,), "training"), {"g": w}, Message(SHAPE), MicrobatchInputs(None, keys), {}, last=False
    )


@pytest.mark.parametrize("pair", UNLIKE.values(), ids=UNLIKE)
def test_unlike_stages_do_not_compute_the_same(pair):
    assert not program_of(pair[0]).computes_the_same(program_of(pair[1]))


def dropped(p, x, mb, *, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jax.nn.gelu(jax.nn.relu(x @ p)), 0)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: lambda p, x, mb: jax.nn.silu(jax.nn.relu(x @ p)) + jax.nn.softmax(x), lambda: {}),
        (lambda: adds(one.copy()), lambda: {}),
        (lambda: adds_in_scan(one.copy()), lambda: {}),
        (lambda: functools.partial(dropped), lambda: {"random": True}),
        (lambda: adds(1.0), lambda: {"recompute": "all"}),
        (lambda: adds(1.0), lambda: {"recompute": jax.checkpoint_policies.save_only_these_names("a")}),
        (lambda: calls(doubled), lambda: {}),
        (lambda: lambda p, x, mb: jax.jit(lambda x: x @ p)(x)[jnp.asarray([0, 1, 0])], lambda: {}),
        (lambda: with_kernel(reversed=True), lambda: {}),
    ],
    ids=[
        "activations",
        "constants",
        "scan",
        "dropout",
        "recompute",
        "policy",
        "one callback",
        "gather",
        "Pallas kernel",
    ],
)
def test_like_stages_made_apart_compute_the_same(make, options):
    first = program_of(make(), **options())
    assert first.computes_the_same(program_of(make(), **options()))


def test_stages_that_hold_a_large_constant_stand_alone():
    large = np.ones(LARGE, "float32")
    fn = lambda p, x, mb: x @ p + large.sum() * jnp.asarray(large)[: x.shape[1]]
    assert not program_of(fn).computes_the_same(program_of(fn))


WEIGHTS = {f"w{i}": np.random.default_rng(i).normal(size=(D, D)).astype("float32") for i in range(4)}
BATCH = np.random.default_rng(9).normal(size=(M, ROWS, D)).astype("float32")


def first(p, x, mb):
    return jnp.tanh(mb @ p)


def last(p, x, mb):
    return jnp.mean((x @ p) ** 2)


@pytest.mark.fast("True")
@pytest.mark.parametrize("crowded", [False, True])
def test_like_stages_share_a_program_only_where_their_weights_lie_in_like_slots(crowded):
    """An earlier stage of IPU 1 may have a leaf with the shape of its later stage's, which is then in another slot."""
    # other messages than those around the like stages, so that these may share their registers
    stages = [
        Stage(lambda p, x, mb: {"h": jnp.tanh(mb @ p)}, params="w0", ipu=0),
        Stage(lambda p, x, mb: {"h": x["h"] @ p if crowded else x["h"]}, params="another" if crowded else None, ipu=1),
        Stage(lambda p, x, mb: x["h"], ipu=0),
        Stage(adds(1.0), params="w1", ipu=1),
        Stage(adds(1.0), params="w2", ipu=2),
        Stage(last, params="w3", ipu=3),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 4), gradient_accumulation=M)
    weights = WEIGHTS | ({"another": np.eye(D, dtype="float32") / 2} if crowded else {})
    params = pipeline.shard(weights)
    slots = {group.name: group.leaves[0].array for group in params.layout.groups}
    assert (slots["w1"] != slots["w2"]) == crowded
    plan = pipeline.placement.plan(params, BATCH)
    assert plan.programs[3].computes_the_same(plan.programs[4])
    assert plan.channel_of[2] == plan.channel_of[3] == plan.channel_of[4]
    assert ((3, 4) in plan.classes) == (not crowded)

    def dense(params):
        def one(mb):
            h = jnp.tanh(mb @ params["w0"])
            h = h @ params["another"] if crowded else h
            h = jnp.tanh((jnp.tanh(h @ params["w1"]) + 1) @ params["w2"]) + 1
            return jnp.mean((h @ params["w3"]) ** 2)

        return sum(map(one, BATCH)) / M

    assert_equals_plain(pipeline, weights, BATCH, dense)

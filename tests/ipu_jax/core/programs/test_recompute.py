"""Test which values of F a stage keeps by default, and that its gradients are those of the plain function.

`test_halves` compares the gradients of many more functions with `jax.vjp`, with this default.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh, PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from ipu_jax.base.jaxprs import traced_on
from ipu_jax.core.programs.segment import Message, MicrobatchInputs, Segment
from ipu_jax.core.programs.segment_program import trace_segment
from support.counted import primitives_of
from support.inputs import normal
from support.platforms import programs_for

BATCH, TOKENS, FEATURES, HEADS, HIDDEN, LAYERS = 2, 48, 24, 3, 72, 4
X = np.asarray(np.random.default_rng(0).normal(size=(BATCH, TOKENS, FEATURES)), np.float32)
GIVEN = MicrobatchInputs({"key": jax.random.key(3), "x": X}, (None,))


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def attention(p, x):
    q, k, v = jnp.einsum("btd,dcnk->cbtnk", norm(x), p["qkv"])
    chances = jax.nn.softmax(jnp.einsum("btnk,bsnk->bnts", q, k))
    return x + jnp.einsum("bnts,bsnk,nkd->btd", chances, v, p["out"])


def block(p, x):
    x = attention(p, x)
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


BLOCK = {
    "qkv": (FEATURES, 3, HEADS, FEATURES // HEADS),
    "out": (HEADS, FEATURES // HEADS, FEATURES),
    "up": (FEATURES, HIDDEN),
    "down": (HIDDEN, FEATURES),
}
STACK = {name: (LAYERS, *shape) for name, shape in BLOCK.items()}


def unrolled(p, x, mb):
    for i in range(LAYERS):
        x = block(jax.tree.map(lambda w, i=i: w[i], p), x)
    return x


def scanned(p, x, mb):
    return lax.scan(lambda x, layer: (block(layer, x), None), x, p)[0]


def nested(p, x, mb):
    pairs = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), p)
    return lax.scan(lambda x, pair: (scanned(pair, x, mb), None), x, pairs)[0]


def traced(fn, params, recompute: Any = "auto", x=X, *, ipu: Any = 0, split=False):
    stage = Stage(fn, params="g", recompute=recompute, ipu=ipu)
    segment = Segment((stage,), 0, (frozenset(),))
    return trace_segment(segment, {"g": params}, Message(x), GIVEN, {}, last=False, split=split)


@functools.cache
def of_layers(fn, recompute: Any):
    """Return the program of a stage of all layers, traced once for all tests."""
    return traced(fn, normal(STACK), recompute)


def gradients(fn, params, recompute="auto", x=X):
    """Return y, dx and dparams of a stage for a random dy, and those of the plain function."""
    program = traced(fn, params, recompute, x)

    @jax.jit
    def run(params, x):
        results, stash = program.forward({"g": params}, Message(x), GIVEN, {})
        dy = jax.random.normal(jax.random.key(7), results.y.y.shape, results.y.y.dtype)
        dx, *dparams = core.jaxpr_as_fun(program.jaxprs["B"])(*jax.tree.leaves((params, GIVEN)), *stash, dy)
        plain, vjp = jax.vjp(lambda p, x: fn(p, x, GIVEN.microbatch), params, x)
        return (results.y.y, dx, *dparams), (plain, *(leaf for tree in vjp(dy)[::-1] for leaf in jax.tree.leaves(tree)))

    return run(params, x)


def assert_gradients(fn, params, recompute: Any = "auto", *, atol=2e-6):
    """Compare y, dx and dparams with the plain function's, relative to the largest number of each."""
    for one, other in zip(*gradients(fn, params, recompute), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol * float(abs(other).max()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_as_near_to_float64_as_with_all_values_kept(dtype):
    params, x = jax.tree.map(lambda w: w.astype(dtype), normal(STACK)), X.astype(dtype)
    found, plain = gradients(scanned, params, x=x)
    kept, _ = gradients(scanned, params, "none", x=x)
    dy = np.asarray(jax.random.normal(jax.random.key(7), plain[0].shape, dtype)).astype(np.float64)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, x))
        y, vjp = jax.vjp(lambda p, x: scanned(p, x, None), *wide)
        exact = [np.asarray(leaf) for leaf in (y, *jax.tree.leaves(vjp(dy)[::-1]))]
    for one, other, true in zip(found, kept, exact, strict=True):
        assert one.dtype == dtype
        error = [float(abs(np.asarray(a).astype(np.float64) - true).max()) for a in (one, other)]
        assert error[0] <= 2 * error[1]


@pytest.mark.fast("none")
@pytest.mark.parametrize("recompute", ["auto", "none", "all"])
def test_a_loop_without_a_reverse_mode_behind_stop_gradient(recompute):
    def doubled(p, x, mb):
        turns = lax.while_loop(lambda c: abs(c).max() < 9, lambda c: c * 2, x @ p)
        return x @ p * lax.stop_gradient(turns) + jnp.where(turns > 0, x, 1)

    assert_gradients(doubled, normal((FEATURES, FEATURES)), recompute, atol=1e-5)


def test_a_block_keeps_its_products_with_weights_and_the_inputs_of_its_norms():
    """By hand: at this size a mean costs 24 operations, and a mixed value 96, less than the 4 bytes it would take."""
    stash = [s.shape for s in traced(lambda p, x, mb: block(p, x), normal(BLOCK)).stash]
    assert not any(shape.count(TOKENS) > 1 for shape in stash), "no scores"
    rows = BATCH * TOKENS
    assert sum(int(np.prod(shape)) for shape in stash) == rows * (3 * FEATURES + HIDDEN + 2 * FEATURES)


@pytest.mark.parametrize(("platform", "is_kept"), [("cpu", True), ("tpu", False), ("gpu", False)])
def test_the_exp_of_scores_is_kept_where_products_are_dear(platform, is_kept):
    """By hand: it costs 2 * 128 / 64 + 1 bytes on a CPU, 2 * 128 / 256 + 1 on a chip; to keep it costs 4."""

    def mixed(w, x, mb):
        q = mb @ w
        return jax.nn.softmax(jnp.einsum("btk,bsk->bts", q, q)) @ q

    stages = [Stage(mixed, params="w", ipu=0), Stage(lambda w, x, mb: jnp.mean(x), ipu=1)]
    with programs_for(platform):
        pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=2)
        weights = {"w": jax.ShapeDtypeStruct((FEATURES, 128), np.float32)}
        batch = jax.ShapeDtypeStruct((2, BATCH, TOKENS, FEATURES), np.float32)
        plan = pipeline.placement.plan(pipeline.shard_shapes(weights), batch)
    assert ((BATCH, TOKENS, TOKENS) in [value.shape for value in plan.programs[0].stash]) == is_kept


@pytest.mark.slow
@pytest.mark.parametrize("fn", [scanned, nested])
def test_a_scan_keeps_per_layer_what_an_unrolled_stage_keeps(fn):
    floats = lambda program: sum(int(np.prod(s.shape)) for s in program.stash)
    per_layer, all_layers = (floats(of_layers(f, "auto")) for f in (fn, unrolled))
    assert per_layer <= 1.1 * all_layers
    assert floats(of_layers(fn, "none")) > 2.5 * per_layer


@pytest.mark.parametrize("fn", [unrolled, scanned])
def test_no_product_with_weights_is_computed_twice(fn):
    """Of the 6 products of a block, 2 are batched: scores and mixed values, which are computed again."""
    auto, none = of_layers(fn, "auto"), of_layers(fn, "none")
    products = [primitives_of(p.jaxprs["B"].jaxpr)["dot_general"] for p in (auto, none)]
    assert products == [LAYERS * 14, LAYERS * 12]
    assert primitives_of(auto.jaxprs["F"].jaxpr)["dot_general"] == LAYERS * 6


def test_a_dropout_mask_is_kept_as_bools_and_no_random_bits_are_drawn_again():
    def dropout(p, x, mb):
        return jnp.where(jax.random.bernoulli(mb["key"], 0.9, x.shape), norm(x) @ p, 0)

    program = traced(dropout, normal((FEATURES, FEATURES)))
    assert ("bool", X.shape) in [(s.dtype.name, s.shape) for s in program.stash]
    assert primitives_of(program.jaxprs["B"].jaxpr)["random_bits"] == 0


def test_what_follows_from_the_micro_batch_by_cheap_operations_is_not_kept():
    assert traced(lambda p, x, mb: jnp.sin(mb["x"]) @ p, normal((FEATURES, FEATURES))).stash == []


def test_an_aux_costs_nothing_in_b():
    def with_aux(p, x, mb):
        h = x @ p
        return Outputs(jnp.tanh(h), aux={"sines": jnp.sin(h @ p), "positive": (h > 0).sum()})

    def without(p, x, mb):
        return jnp.tanh(x @ p)

    params = normal((FEATURES, FEATURES))
    one, other = traced(with_aux, params), traced(without, params)
    counts = [primitives_of(p.jaxprs["B"].jaxpr)["dot_general"] for p in (one, other)]
    assert counts == [2, 2]
    assert [s.shape for s in one.stash] == [s.shape for s in other.stash]


def test_results_without_a_gradient_have_none():
    def fn(p, x, mb):
        h = x @ p
        large = jnp.argmax(h, -1)
        picked = lax.cond(large[0, 0] >= 0, lambda h: h * 2, lambda h: h, h)
        return jnp.tanh(picked) + lax.stop_gradient(jnp.sin(h)).sum()

    assert_gradients(fn, normal((FEATURES, FEATURES)))


def test_functions_with_their_own_derivative_keep_it_and_run_once():
    @jax.custom_vjp
    def scaled(x):
        return jnp.sin(x)

    scaled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, g: (10 * g * cosine,))
    fn = lambda p, x, mb: scaled(norm(x) @ p)
    params = normal((FEATURES, FEATURES))
    assert_gradients(fn, params)
    assert primitives_of(traced(fn, params).jaxprs["B"].jaxpr)["cos"] == 0


def test_a_rule_for_tangents_may_have_a_loop_that_makes_its_result_too():
    @jax.custom_jvp
    def bounded(x):
        return jnp.tanh(jnp.tanh(x))

    @bounded.defjvp
    def rule(primals, tangents):
        def step(carry, _):
            x, dx = carry
            y = jnp.tanh(x)
            return (y, 2 * dx * (1 - y**2)), None

        return lax.scan(step, (*primals, *tangents), length=2)[0]

    assert_gradients(lambda p, x, mb: (bounded(norm(x) @ p) * norm(x)) @ p, normal((FEATURES, FEATURES)))


def test_collectives_run_once():
    """A concurrent stage reduces its product, as a row-parallel layer does; B does so for its own gradient alone."""

    def rows(p, x, mb):
        return jax.nn.gelu(lax.psum(norm(x) @ p, "ipu")) * lax.pmax(lax.stop_gradient(x.max()), "ipu")

    def collectives(recompute):
        mesh = AbstractMesh((1, 2), ("replica", "ipu"))
        program = traced_on(mesh, lambda: traced(rows, normal((FEATURES, FEATURES)), recompute, ipu=ALL_IPUS))
        counts = primitives_of(program.jaxprs["B"].jaxpr)
        return {name: counts[name] for name in counts if name.startswith(("psum", "pmax"))}

    assert collectives("auto") == collectives("none") != collectives("all")


def test_w_computes_again_what_is_cheap():
    """By hand: of an MLP F keeps x and the first product, and B keeps for W the gradients of both products alone."""

    def mlp(p, x, mb):
        return jax.nn.gelu(x @ p["up"]) @ p["down"]

    program = traced(mlp, normal({"up": BLOCK["up"], "down": BLOCK["down"]}), split=True)
    up, down = (BATCH, TOKENS, HIDDEN), (BATCH, TOKENS, FEATURES)
    assert sorted(s.shape for s in program.stash) == [down, up]
    assert sorted(s.shape for s in program.weight_residuals) == [down, up]
    assert primitives_of(program.jaxprs["W"].jaxpr)["dot_general"] == 2
    assert primitives_of(program.jaxprs["B"].jaxpr)["dot_general"] == 2


@pytest.mark.slow
def test_what_a_stage_asks_for_is_what_it_gets():
    policy = jax.checkpoint_policies.everything_saveable
    least, none, auto, saved = (len(of_layers(unrolled, asked).stash) for asked in ("all", "none", "auto", policy))
    assert least < auto < none
    assert saved > auto


def test_results_that_are_not_arrays_are_handed_on():
    stage = Stage(lambda p, x, mb: "text", params="g")
    segment = Segment((stage,), 0, (frozenset(),))
    message, _, _ = segment({"g": jnp.ones(3)}, Message(X), GIVEN, {})
    assert message.y == "text"


def test_a_concurrent_head_computes_nothing_again():
    """Its B follows its F in one task, so nothing is stashed, and all values are there."""

    def loss(p, x, mb):
        return lax.psum(jnp.tanh(jax.nn.gelu(x @ p)).mean(), "ipu")

    stages = [Stage(lambda p, x, mb: jnp.tanh(mb @ p), params="body"), Stage(loss, params="head", ipu=ALL_IPUS)]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), specs={"head": PartitionSpec(None, "ipu")})
    params = pipeline.shard(normal({"body": (FEATURES, FEATURES), "head": (FEATURES, HIDDEN)}))
    body, head = pipeline.placement.plan(params, X[None]).programs
    assert primitives_of(head.jaxprs["B"].jaxpr)["tanh"] == 0
    assert primitives_of(head.jaxprs["F"].jaxpr)["tanh"] == 2
    assert [s.shape for s in body.stash] == [X.shape], "the tanh, from which the first stage's B computes its square"


@pytest.mark.slow
def test_results_of_a_scans_iterations_that_only_an_aux_reads_get_no_gradient():
    def layers(w, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.mean()), x, w)

    def last(w, x, mb):
        (h, means), earlier = layers(w, x[0]), x[1]
        return jnp.mean(h**2), jnp.concatenate([earlier, means])

    weights, x = {"a": 0.1 * jnp.arange(32.0).reshape(2, 4, 4), "b": jnp.ones((2, 4, 4))}, jnp.ones((1, 3, 4))
    stages = [Stage(lambda w, x, mb: layers(w, mb), params="a", ipu=0), Stage(last, params="b", ipu=1)]
    pipeline = Pipeline(stages)
    (_, means), gradients = pipeline.value_and_grad(pipeline.shard(weights), x)

    def whole(weights):
        h, first = layers(weights["a"], x[0])
        h, second = layers(weights["b"], h)
        return jnp.mean(h**2), jnp.concatenate([first, second])

    expected, expected_means = jax.jit(jax.grad(whole, has_aux=True))(weights)
    np.testing.assert_allclose(means[0], expected_means, rtol=1e-6)
    for name, gradient in pipeline.unshard(gradients).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-8)

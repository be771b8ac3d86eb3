"""Test that B and W together are the whole backward pass: equal gradients, weight products in W, and none twice."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ipu_jax import Stage
from ipu_jax.core.programs.segment import NO_MESSAGE, Message, MicrobatchInputs, whole
from ipu_jax.core.programs.segment_program import SegmentProgram, trace_segment
from support.counted import primitives_of
from support.dense import largest_relative_error
from support.flags import turned_on
from support.inputs import normal
from support.sums import empty_sums

ROWS, D, LAYERS = 5, 6, 3


def layer(h, wb):
    return jnp.tanh(h @ wb["w"] + wb["b"])


def one_by_one(p, x, mb):
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda leaf, i=i: leaf[i], p))
    return x


def scanned(p, x, mb):
    return lax.scan(lambda h, wb: (layer(h, wb), None), x, p)[0]


def backwards(p, x, mb):
    return lax.scan(lambda h, wb: (layer(h, wb), None), x, p, reverse=True, unroll=2)[0]


def remat_scanned(p, x, mb):
    return lax.scan(lambda h, wb: (jax.checkpoint(layer)(h, wb), None), x, p)[0]


def with_outputs(p, x, mb):
    """Use what the scan stacks as well, and a weight that every iteration reads."""
    last, every = lax.scan(lambda h, wb: (layer(h, wb) @ p["w"][0], h.sum(1)), x, p)
    return last * every.sum()


def nested(p, x, mb):
    def outer(h, _):
        return scanned(p, h, mb), None

    return lax.scan(outer, x, None, length=2)[0]


FUNCTIONS = {
    "one by one": one_by_one,
    "a scan": scanned,
    "a scan in jit": jax.jit(scanned),
    "a scan from the end, unrolled": backwards,
    "a scan of checkpoints": remat_scanned,
    "a checkpoint of a scan in jit": jax.checkpoint(jax.jit(scanned)),
    "a scan with outputs": with_outputs,
    "a scan in a scan": nested,
}


def embedded(fn):
    """Return a first stage, which has no dx: rows of a table, a bias, and then `fn`."""
    return lambda p, _, mb: fn(p["layers"], p["table"][mb] + p["bias"], mb)


X = Message(jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, D)), "float32"))
GIVEN = MicrobatchInputs(np.array([3, 0, 3, 1, 6], np.int32), (None,))
LAYER_SHAPES = {"w": (LAYERS, D, D), "b": (LAYERS, D)}
SHAPES = {"layers": LAYER_SHAPES, "table": (7, D), "bias": (D,)}


def cut(
    fn: Any, recompute: Any = "none", given: MicrobatchInputs = GIVEN, *, first: bool = False
) -> tuple[SegmentProgram, dict[str, Any]]:
    """Return the cut program of a stage, by default of one in the middle, and its weights."""
    params = jax.tree.map(lambda leaf: leaf / 3, normal(SHAPES if first else LAYER_SHAPES))
    segment = whole((Stage(fn, params="g", recompute=recompute),), "training")
    message = NO_MESSAGE if first else X
    return trace_segment(segment, {"g": params}, message, given, {}, last=False, split=True), params


WAYS = list(itertools.product(("none", "auto", "all"), (False, True)))


@pytest.mark.fast("2-0")
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("turn", range(len(WAYS)))
def test_b_and_w_give_what_the_vjp_gives(turn, half):
    """In each turn, each function is cut in another of the ways; one program has half of them."""
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, D)), "float32")

    ways = {
        name: (fn, *WAYS[(turn - k) % len(WAYS)]) for k, (name, fn) in enumerate(FUNCTIONS.items()) if k % 2 == half
    }
    programs = {
        name: cut(embedded(fn) if first else fn, recompute, first=first)
        for name, (fn, recompute, first) in ways.items()
    }

    def run(name, params):
        (fn, _, first), (halves, _) = ways[name], programs[name]
        fn, message = (embedded(fn), NO_MESSAGE) if first else (fn, X)
        _, stash = halves.forward({"g": params}, message, GIVEN, {})
        dx, made = halves.backward_input({"g": params}, GIVEN, stash, [dy])
        totals = halves.backward_weight({"g": params}, GIVEN, stash, made, empty_sums(params), jnp.int32(0))
        of_params, of_x = jax.vjp(lambda p, x: fn(p, x, GIVEN.microbatch), params, X.y)[1](dy)
        found = jax.tree.unflatten(jax.tree.structure(params), totals), dx
        return found, (of_params, [] if first else [of_x])

    given = {name: params for name, (_, params) in programs.items()}
    results = jax.jit(lambda given: {name: run(name, given[name]) for name in ways})(given)
    for name, (found, expected) in results.items():
        assert largest_relative_error(found, expected) < 2e-6, (name, ways[name][1:])


def products(program: Any) -> int:
    return primitives_of(program.jaxpr)["dot_general"]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("fn", [one_by_one, scanned, jax.jit(scanned), backwards], ids=lambda fn: fn.__name__)
def test_w_makes_the_products_of_the_weights_gradients_and_b_the_others(fn, first):
    """The rows of a table need the gradient of all layers' inputs, which is three products, all of them in B."""
    programs = cut(embedded(fn) if first else fn, first=first)[0].jaxprs
    assert {kind: products(program) for kind, program in programs.items()} == {"F": 3, "B": 3, "W": 3}
    scatters = {kind: "scatter-add" in {eqn.primitive.name for eqn in programs[kind].jaxpr.eqns} for kind in "BW"}
    assert scatters == {"B": False, "W": first}


@pytest.mark.parametrize(
    ("fn", "recompute", "again"),
    [(scanned, "all", 3), (remat_scanned, "none", 3), (remat_scanned, "all", 6), (jax.jit(scanned), "all", 3)],
)
def test_what_is_recomputed_is_recomputed_in_b_alone(fn, recompute, again):
    programs = cut(fn, recompute)[0].jaxprs
    assert products(programs["B"]) <= 3 + again
    assert products(programs["W"]) == 3


def test_the_cut_of_a_scan_is_one_gradient_a_layer_and_no_weight():
    assert [made.shape for made in cut(scanned)[0].weight_residuals] == [(LAYERS, ROWS, D)]


ALONE = {
    "of the weights": (lambda p, x, mb: x @ jnp.exp(p["w"][0]), "none"),
    "of the weights, recomputed": (lambda p, x, mb: x @ jnp.exp(p["w"][0]), "all"),
    "of the micro-batch": (lambda p, x, mb: (x * jnp.sin(mb)) @ p["w"][0], "all"),
    "of both": (lambda p, x, mb: x @ jnp.exp(p["w"][0] * jnp.sin(mb[0])), "all"),
}


@pytest.mark.parametrize(("fn", "recompute"), ALONE.values(), ids=ALONE)
def test_what_is_computed_of_weights_and_micro_batch_alone_is_computed_in_b_and_w_and_not_cut(fn, recompute):
    """Both dx and dw need it, and W cannot compute it from dy alone."""
    given = MicrobatchInputs(jax.ShapeDtypeStruct((ROWS, D), "float32"), (None,))
    assert [made.shape for made in cut(fn, recompute, given)[0].weight_residuals] == [(ROWS, D)]


def test_a_policy_decides_what_b_finds():
    kept = functools.partial(cut, scanned)
    saving = kept(jax.checkpoint_policies.everything_saveable)[0]
    assert products(saving.jaxprs["B"]) < products(kept("all")[0].jaxprs["B"])


@pytest.mark.parametrize("recompute", ["all", jax.checkpoint_policies.save_only_these_names("kept")])
def test_a_policy_decides_the_same_under_the_flag_for_jaxs_next_checkpoint(recompute):
    def text():
        fn = lambda p, x, mb: jnp.sin(checkpoint_name(jnp.cos(jax.checkpoint(scanned)(p, x, mb)), "kept"))
        return {kind: str(program) for kind, program in cut(fn, recompute)[0].jaxprs.items()}

    today = text()
    with turned_on("jax_remat3"):
        assert text() == today


def test_the_next_checkpoint_is_in_no_program():
    """jax 0.12 leaves one in the backward pass; programs with it are never alike."""
    with turned_on("jax_remat3"):
        programs = cut(remat_scanned)[0].jaxprs
    assert not any("call_hi_primitive" in primitives_of(program.jaxpr) for program in programs.values())


# a first stage whose input is made of the micro-batch


def of_numbers(p, _, mb):
    x = jnp.cos(mb[:, None] * jnp.arange(D))
    for i in range(LAYERS):
        x = jnp.tanh(x @ p["layers"]["w"][i])
    return x


def of_numbers_scanned(p, _, mb):
    start = jnp.cos(mb[:, None] * jnp.arange(D))
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), start, p["layers"]["w"])[0]


def test_b_of_a_first_stage_goes_on_to_the_first_weights_only():
    """Nothing needs the gradient of the first layer's input. In a scan, each iteration is the same program."""
    for fn, of_b in ((of_numbers, LAYERS - 1), (of_numbers_scanned, LAYERS)):
        programs = cut(fn, first=True)[0].jaxprs
        assert {kind: products(program) for kind, program in programs.items()} == {"F": 3, "B": of_b, "W": 3}


def test_a_first_stage_keeps_a_gradient_per_layer_from_b_to_w():
    scan, alone = (cut(fn, first=True)[0].weight_residuals for fn in (of_numbers_scanned, of_numbers))
    assert [kept.shape for kept in scan] == [(LAYERS, ROWS, D)]
    assert [kept.shape for kept in alone] == [(ROWS, D)] * LAYERS
    assert sorted(kept.shape for kept in cut(embedded(scanned), first=True)[0].weight_residuals) == [
        (LAYERS, ROWS, D),
        (ROWS, D),
    ]

"""Test gradients that are added in place against `jax.vjp` of the plain function, each to its own leaf.

The trees have neighbouring leaves of equal shapes, so that a gradient in the wrong place changes numbers and not
shapes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from ipu_jax.base.jaxprs import laid_open
from ipu_jax.core.programs import gradient_sums
from ipu_jax.core.programs.gradient_sums import Sum, add_gradients
from support.dense import largest_relative_error
from support.trained import quick_compiles

LAYERS, D, ROWS = 3, 4, 5
X = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, D)), "float32")
SHAPES = {"a": (LAYERS, D, D), "b": (LAYERS, D, D), "c": (D, D), "d": (D, D), "g": (LAYERS, D), "s": ()}
PARAMS = {k: np.random.default_rng(i).normal(size=s).astype("float32") / 2 for i, (k, s) in enumerate(SHAPES.items())}


def scanned(p, x):
    return lax.scan(lambda h, w: (h + jnp.tanh(h @ w["a"]) @ w["b"] * w["g"], None), x, p)[0]


def layers(p):
    return {name: p[name] for name in ("a", "b", "g")}


def scaled(p, x):
    return scanned(layers(p) | {"a": p["a"] * p["s"]}, x)


def half(p, x):
    return scanned(layers(p) | {"b": p["b"].astype("bfloat16").astype("float32")}, x)


def half_inside(p, x):
    step = lambda h, w: (h + (h.astype("bfloat16") @ w["a"].astype("bfloat16")).astype("float32") @ w["b"], None)
    return lax.scan(step, x, layers(p))[0]


def shared(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ p["c"] + h @ w["a"]) @ p["d"], None), x, layers(p))[0]


def backwards(p, x):
    return lax.scan(lambda h, w: (jnp.sin(h @ w["b"]) @ w["a"], h), x, layers(p), reverse=True, unroll=2)[0]


def with_outputs(p, x):
    h, seen = lax.scan(lambda h, w: (jnp.tanh(h @ w["a"]), h @ w["b"]), x, layers(p))
    return h + seen.sum(0) + seen[1]


def twice(p, x):
    return scanned(layers(p) | {"b": p["a"]}, scanned(layers(p), x))


def nested(p, x):
    def outer(h, w):
        return lax.scan(lambda h, row: (h + jnp.tanh(h @ w["b"]) * row, None), h, w["a"])[0], None

    return lax.scan(outer, x, layers(p))[0]


def nested_shared(p, x):
    def outer(h, w):
        return lax.scan(lambda h, _: (jnp.tanh(h @ p["c"]) @ w["b"], None), h, None, length=2)[0], None

    return lax.scan(outer, x, layers(p))[0]


def sliced_in_scan(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w["a"][:, :2] @ w["b"][1:3]) + w["g"][0], None), x, layers(p))[0]


def counted(p, x):
    def step(i, h):
        return jnp.tanh(h @ p["a"][i]) @ lax.dynamic_index_in_dim(p["b"], i + 2, keepdims=False)

    return lax.fori_loop(0, LAYERS, step, x)


def beyond_the_end(p, x):
    # not `dynamic_index_in_dim`, which is a jit, whose gradient would be added as a whole
    def step(i, h):
        return jnp.tanh(h @ lax.dynamic_slice(p["b"], (i + 2, 0, 0), (1, D, D))[0])

    return lax.fori_loop(0, LAYERS, step, x)


def looked_up(p, x):
    ids = jnp.asarray([0, 3, 3, 1, 3])
    return x * p["c"][ids] + p["a"][jnp.asarray([1, 1, 2]), ids[:3]].sum(0) + p["d"][ids[0]]


def one_for_two(p, x):
    return x @ (p["c"] + p["d"]) + p["c"].sum()


def like_the_input(p, x):
    """Use a sum of gradients twice: as the leaf's, and on the way to dx."""
    h = x[:D] + p["c"]
    return jnp.tanh(h) + jnp.sin(h)


FUNCTIONS = {
    f.__name__: f
    for f in (
        scaled, half, half_inside, shared, backwards, with_outputs, twice, nested, nested_shared, sliced_in_scan,
        counted, beyond_the_end, looked_up, one_for_two, like_the_input,
    )
} | {"scanned": lambda p, x: scanned(layers(p), x)}  # fmt: skip


def traced_backward(fn, params, x, dy):
    """Return a closed jaxpr from (params, x, dy) to dx and the gradient of each leaf."""

    def backward(params, x, dy):
        dparams, dx = jax.vjp(fn, params, x)[1](dy)
        return [dx, *jax.tree.leaves(dparams)]

    return laid_open(jax.make_jaxpr(backward)(params, x, dy))


BEFORE = 0.5  # the initial values of the accumulators


def assert_added(cases):
    """Compare dx and gradients of functions with `jax.vjp`'s, in one program; `cases` has each by name.

    Each comes with the shapes of the leaves whose accumulators are flat; others have the leaves' own shapes.
    """
    leaves = jax.tree.leaves(PARAMS)

    def run(params, x, fn, flat):
        dy = jnp.asarray(np.random.default_rng(2).normal(size=jax.eval_shape(fn, PARAMS, X).shape), "float32")
        traced, args = traced_backward(fn, PARAMS, X, dy), [*jax.tree.leaves(params), x, dy]
        totals = [jnp.full(leaf.size + 3 if leaf.shape in flat else leaf.shape, BEFORE) for leaf in leaves]
        sums = [Sum(total, leaf.shape) for total, leaf in zip(totals, leaves, strict=True)]
        return add_gradients(traced, args, 1, sums, jnp.int32(0)), core.jaxpr_as_fun(traced)(*args)

    results = jax.jit(lambda params, x: {name: run(params, x, *case) for name, case in cases.items()})(PARAMS, X)
    for name, ((new, dx), expected) in results.items():
        for total, leaf in zip(new, leaves, strict=True):
            np.testing.assert_array_equal(total.reshape(-1)[leaf.size :], BEFORE)
        found = [total.reshape(-1)[: leaf.size].reshape(leaf.shape) for total, leaf in zip(new, leaves, strict=True)]
        # a gradient that is rounded to bfloat16 is summed before the rounding here, and after it there
        rtol = 1e-2 if name.startswith("half") else 1e-5
        for one, other in zip([*dx, *[total - BEFORE for total in found]], expected, strict=True):
            assert largest_relative_error(one, other) < rtol, name


# Each function has whole accumulators in one turn and flat ones in another; a turn has half of the functions.
in_turns = pytest.mark.parametrize("turn", range(4))


def whole_or_flat(functions, turn):
    half, flat = divmod(turn, 2)
    return {
        name: (fn, tuple(SHAPES.values()) if (k + flat) % 2 else ())
        for k, (name, fn) in enumerate([*functions.items()][half::2])
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "flat",
    [(), ((LAYERS, D, D),), tuple(SHAPES.values()), ((LAYERS, D), (D, D))],
    ids=["whole", "matrices flat", "flat", "others flat"],
)
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint], ids=["plain", "checkpoint"])
def test_each_leaf_gets_its_own_gradient(wrap, flat):
    assert_added({name: (wrap(fn), flat) for name, fn in FUNCTIONS.items()})


@pytest.mark.parametrize("flat", [pytest.param((), id="whole"), pytest.param(((D, D),), id="flat")])
def test_a_sum_that_a_scan_carries_or_that_is_read_twice_is_whole(flat):
    def fn(p, x):
        h, w = lax.fori_loop(0, 3, lambda i, hw: (jnp.tanh(hw[0] @ hw[1]), hw[1] + 0.25), (x, p["c"]))
        return h @ w @ p["d"]

    assert_added({"carried": (fn, flat), "like the input": (like_the_input, flat)})


def test_gradients_of_half_types_add_up_in_float32():
    params = {"a": jnp.ones((LAYERS, D, D), "bfloat16"), "c": jnp.ones((D, D), "bfloat16")}

    def fn(p, x):
        return lax.scan(lambda h, w: (h, (x * w + x * p["c"]).sum()), 0, p["a"])[1]

    x, dy = jnp.ones((D, D), "bfloat16"), jnp.ones(LAYERS, "bfloat16")
    traced = traced_backward(fn, params, x, dy)
    sums = [Sum(jnp.full(leaf.shape, 256.0), leaf.shape) for leaf in params.values()]
    (a, c), _ = add_gradients(traced, [*params.values(), x, dy], 1, sums, jnp.int32(0))
    np.testing.assert_array_equal(a, 257.0)  # in bfloat16, 256 + 1 is 256
    np.testing.assert_array_equal(c, 259.0)


IDS = jnp.asarray([0, 2, 2, -1, 9, -9, 3, 2])  # of 3 or 4 rows: read twice, counted from the end, beyond both ends
BYTES = jnp.asarray([0, 1, 1, 3, 255], "uint8")
INSIDE = jnp.asarray([2, 0, 2])


def read_in_every_mode(p, x):
    rows = [p["c"].at[IDS].get(mode=mode, fill_value=0) for mode in ("clip", "fill", "promise_in_bounds")]
    taken = [jnp.take(p["d"], IDS, axis=0, mode=mode, fill_value=0) for mode in ("clip", "wrap", "fill")]
    return jnp.concatenate([*rows, *taken]) @ x.T


def read_by_small_integers(p, x):
    rows = [p["c"].at[BYTES].get(mode=mode, fill_value=0) for mode in ("clip", "fill")]
    return jnp.concatenate(rows) @ x.T + p["g"].at[BYTES[1:], BYTES[1]].get(mode="clip").sum()


def read_parts_of_rows(p, x):
    columns = p["c"][:, INSIDE] @ p["d"][INSIDE, 1:3] @ p["d"][:2, INSIDE]
    return x[:4, :3] * columns + p["a"][:, INSIDE, 1:].sum((0, 1)) + p["b"][INSIDE, :, INSIDE].sum(1)


def read_along_an_axis(p, x):
    picked = jnp.take_along_axis(p["c"], jnp.asarray([[1, 3], [0, 0], [2, 5], [-1, 1]]), axis=1, mode="clip")
    per_layer = jax.vmap(lambda table, i: table[i])(p["a"], jnp.asarray([[0, 0], [3, 1], [9, 2]]))
    return x @ picked * per_layer.sum()


def read_in_a_scan(p, x):
    def step(h, w):
        h = h + jnp.take(w["a"], IDS[:ROWS], axis=0, mode="fill", fill_value=0)
        return jnp.tanh(h @ p["d"]) + p["c"].at[IDS[:ROWS]].get(mode="clip"), None

    return lax.scan(step, x, layers(p))[0]


def read_from_slices(p, x):
    """Read rows of slices: one beyond the end of a slice is not the next one of the table."""
    of_slice = p["c"][1:3].at[IDS].get(mode="fill", fill_value=0) @ p["a"][1].at[IDS[:4]].get(mode="clip")
    return of_slice @ x.T + p["a"][:2, 1:3].at[IDS[:4], IDS[4:]].get(mode="fill", fill_value=0).sum()


def read_none(p, x):
    return x + p["c"][IDS[:0]].sum() + p["a"][:, IDS[:0]].sum()


AT = jnp.asarray([2, 0, 7])  # the last one is beyond the end of each dim: a slice that begins there is moved inside

# parts of a weight of (LAYERS, D, D), each by another equation or at other positions
PARTS = {
    "every second": lambda w: [
        w[::2], w[1::2], w[:, 1::3], w[1, :, ::2], lax.slice(w, (0, 1, 0), (3, 4, 4), (2, 2, 3)),
    ],
    "several dims": lambda w: [
        w[1:, :2, 1:3], w[2:, ::3, 1:], w[::2, ::2, ::2], w[1, 2:, 3], w[..., 1], w[1:2, None, 2],
    ],
    "from behind": lambda w: [w[::-1], w[:, ::-2], w[2:0:-1, 3:0:-2, ::-3], w[-1], w[:, -3:-1], jnp.flip(w, (0, 2))],
    "at a computed index": lambda w: [
        lax.dynamic_slice(w, AT, (1, D, 2)), lax.dynamic_slice(w, AT[::-1], (2, 3, D)),
        lax.dynamic_slice_in_dim(w, AT[2], 2, axis=1),
        lax.dynamic_index_in_dim(w, AT[0] - 1, axis=1, keepdims=False), w[AT[0]], w[AT[1], :, -AT[0]],
    ],
    "by arrays of indices": lambda w: [
        w[AT[:2]], w[:, AT], w[AT[:2], ..., AT[1:]], w[AT[:2, None], AT[:2]], w[::2, AT[:2], 1::2],
        w[jnp.asarray([-1, -3])], w[np.array([True, False, True])], jnp.take(w, AT, axis=2, mode="clip"),
        jnp.take_along_axis(w, AT[:2].reshape(1, 2, 1), axis=1),
    ],
    "rearranged": lambda w: [
        jnp.roll(w, 1, axis=1), *jnp.split(w, [1, 3], axis=2), w.reshape(LAYERS * D, D)[::3], w.T[1::2],
        w.at[1].set(0)[:2], lax.pad(w, 0.0, ((-1, 1, 0), (0, -2, 1), (1, 0, 2))),
        jnp.diagonal(w, axis1=1, axis2=2), jnp.tril(w),
    ],
}  # fmt: skip


@pytest.mark.slow
@in_turns
def test_each_part_of_a_weight_is_added_where_it_was_read(turn):
    """Two leaves: the first of each part alone, and the second of all parts together."""

    def read(parts):
        return lambda p, x: jnp.concatenate([part.reshape(-1) for part in (parts(p["a"])[0], *parts(p["b"]))])

    with quick_compiles():
        assert_added(whole_or_flat({name: read(parts) for name, parts in PARTS.items()}, turn))


READS = {
    f.__name__: f
    for f in (
        read_in_every_mode, read_by_small_integers, read_parts_of_rows, read_along_an_axis, read_in_a_scan,
        read_from_slices, read_none,
    )
}  # fmt: skip


@pytest.mark.fast("1")
@in_turns
def test_rows_are_added_where_their_indices_point(turn, monkeypatch):
    monkeypatch.setattr(gradient_sums, "_ELEMENTS_PER_PIECE", 0)  # these tables are so small that zeros would cost less
    assert_added(whole_or_flat(READS, turn))


def test_rows_of_half_types_add_up_in_float32():
    table, ids = jnp.ones((4, D), "bfloat16"), jnp.asarray([1, 1, 3])
    read = {"half": lambda t, x: x * t[ids], "wide": lambda t, x: x * t.astype("float32")[ids]}
    for fn in read.values():
        x = jnp.full((3, D), 1.0, jax.eval_shape(fn, table, jnp.ones((3, D), "bfloat16")).dtype)
        traced = traced_backward(fn, table, x, jnp.ones_like(x))
        for shape in (table.shape, (table.size + 1,)):
            sums = [Sum(jnp.full(shape, 256.0), table.shape)]
            add = jax.jit(lambda t, x, of=(traced, sums): add_gradients(of[0], [t, x, x], 1, of[1], 0))
            (total,), _ = add(table, x)
            total = total.reshape(-1)[: table.size].reshape(table.shape)
            np.testing.assert_array_equal(total[:, 0], [256, 258, 256, 257])  # in bfloat16, 256 + 1 is 256


def made(jaxpr):
    """Return the shapes and dtypes of all values that a program computes."""
    for eqn in jaxpr.eqns:
        yield from ((v.aval.shape, v.aval.dtype.name) for v in eqn.outvars)
        for inner in core.jaxprs_in_params(eqn.params):
            yield from made(inner)


@pytest.mark.parametrize("fn", ["scanned", "backwards", "twice", "nested"])
def test_no_gradient_as_long_as_all_layers_is_made(fn):
    dy = jnp.ones((ROWS, D))
    traced = traced_backward(FUNCTIONS[fn], PARAMS, X, dy)
    assert ((LAYERS, D, D), "float32") in set(made(traced.jaxpr))

    def run(params, totals, zero):
        sums = [Sum(total, leaf.shape) for total, leaf in zip(totals, jax.tree.leaves(PARAMS), strict=True)]
        return add_gradients(traced, [*jax.tree.leaves(params), X, dy], 1, sums, zero)[0]

    flat = [jnp.zeros(leaf.size + 1) for leaf in jax.tree.leaves(PARAMS)]
    outputs = set(made(jax.make_jaxpr(run)(PARAMS, flat, 0).jaxpr))
    assert ((LAYERS, D, D), "float32") not in outputs

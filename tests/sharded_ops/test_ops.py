"""Test every op against its dense twin in float64, with every gradient, on meshes of one axis and of two.

Of 6 tokens each of 2 replicas has 3. Weights are the same on both, so their gradients are summed over "data". Padding
of inputs is NaN, and so is padding of those cotangents that are documented not to be read. All ops are in one program,
which compiles in a tenth of the time that 30 programs take; where a run is quick, every second op is in one of two.
"""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import (
    argmax,
    debug_sharding,
    embedding,
    from_all,
    layer_norm,
    log_softmax,
    matmul,
    reduce_scatter_tokens,
    reduce_to,
    reduce_to_all,
    rms_norm,
    sample,
    scatter_tokens,
    softmax,
    take_along_last_dim,
    tied_projection,
    to_all,
    top_k,
)
from support.dense_twins import (
    dense_embedding,
    dense_layer_norm,
    dense_log_softmax,
    dense_matmul,
    dense_rms_norm,
    dense_softmax,
    dense_take_along_last_dim,
    dense_tied_projection,
)
from support.harness import CASES, Operand, assert_close, dense_vjp, examples, on_ipus, placed_vjp, seeds, side_by_side

TOKENS, D = 6, 4
EPSILON = 0.1  # large, so that a row of one column, whose variance is 0, has gradients as large as those of other rows
FAR = (-(2**31), 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op of floating operands, and of `index` if it takes one, and its dense twin, whose result has `out`'s place.

    On one axis the result and the gradients may be off by `rounded` times the dtype's eps, relative to the dense
    program's on absolute values, or to what `bounds` makes of the dense ones and of the result's cotangent.
    """

    op: Callable
    operands: tuple[Operand, ...]
    out: Operand
    dense: Callable
    rounded: tuple[float, float] = (0, 0)
    index: str = ""  # "ids" or "owner"
    bounds: tuple[Callable, Callable] | None = None
    padding: float = 0  # of the result
    ct_fill: float = np.nan


# How far a result may be off, and its gradients, in `Case.rounded` roundings.
_SOFTMAX = (lambda want, ct: 1, lambda want, ct: np.abs(ct).max(initial=0))
_LOG_SOFTMAX = (  # its gradient is ct - softmax * sum(ct)
    lambda want, ct: 1 + np.abs(want),
    lambda want, ct: np.abs(ct) + np.abs(ct).sum(-1, keepdims=True),
)
_PICKED = (lambda want, ct: 0, lambda want, ct: np.abs(want))
_NORM = (lambda want, ct: np.maximum(np.abs(want).max(initial=0), 10),) * 2
_HALF_NORM = (lambda want, ct: np.maximum(np.abs(want), 1e-3),) * 2


def _with_bias(x, w, bias, **options):
    return matmul(x, w, bias=bias, **options)


def _rms(x, scale=1.0):
    return dense_rms_norm(x, jnp.broadcast_to(scale, x.shape[-1:]).astype(x.dtype), epsilon=EPSILON)


def _layer(x, scale=1.0, bias=0.0):
    scale, bias = (jnp.broadcast_to(one, x.shape[-1:]).astype(x.dtype) for one in (scale, bias))
    return dense_layer_norm(x, scale, bias, epsilon=EPSILON)


def _itself(x):
    return x


def cases_of(
    n: int, size: int, tokens: int, replicas: int | None, dtype: Any, part: int | None = None
) -> dict[str, Case]:
    """Return all ops on n IPUs, which divide dims of this size, or every second one, from number `part` on."""
    cases = _all_cases(n, size, tokens, replicas, dtype)
    return cases if part is None else dict([*cases.items()][part::2])


@functools.cache
def _all_cases(n: int, size: int, tokens: int, replicas: int | None, dtype: Any) -> dict[str, Case]:
    half, k, of_replica = dtype != jnp.float32, (size + 2) // 2, tokens // (replicas or 1)
    whole, both, cut = Operand(tokens=True), Operand(split=1, tokens=True), Operand(cut=True)
    # On two axes, where more parts of a sum are rounded in half types, the sums are shorter.
    rows = (tokens, 1 if replicas else 2)
    x, x_cut = Operand((*rows, D), tokens=True), Operand((*rows, D), cut=True)
    logits, last = Operand((tokens, size), split=1, tokens=True), Operand((*rows, size), split=2, tokens=True)
    inner, whole_inner = (Operand((tokens, size, D), split=split, tokens=True) for split in (1, None))
    parts = Operand((tokens, n * size), split=1, tokens=True)  # each IPU's part is a block of columns
    table, w, vector = Operand((size, D), split=0), Operand((D, size), split=1), Operand((size,), split=0)
    by_features, of_rows = Operand((size, size), split=1), (last, table, Operand((D,)))
    # Each sum of products has up to 10 terms, on either side. In half types, it is accumulated in float32 and rounded
    # once on each side, and then n rounded parts are added where a gradient is reduced over the IPUs.
    product, biased = ((2 + n, 2 + n), (3 + n, 3 + n)) if half else ((20, 20), (20, 20))
    # A row's gradient is a sum of up to 6 cotangents; untyped, a cotangent is divided by n and summed again.
    looked_up, rows_sum, again = (0, 2 * TOKENS + n + 1), (0, 2 * TOKENS), (0, n + 1)
    norm: dict[str, Any] = {"bounds": _HALF_NORM if half else _NORM, "rounded": (1, 1) if half else (20, 20)}

    def of(op, **options):
        return partial(op, size=size, **options)

    rms, layer = of(rms_norm, epsilon=EPSILON), of(layer_norm, epsilon=EPSILON)

    def sum_of_blocks(x):
        return x.reshape(tokens, n, size).sum(1)

    def block_at(x, owner):
        return lax.dynamic_slice_in_dim(x, owner * size, size, 1)

    def sum_at(x, owner):
        return jnp.where(jnp.arange(n * size) // size == owner, jnp.tile(sum_of_blocks(x), n), 0)

    return {
        "embedding": Case(of(embedding), (table,), whole, dense_embedding, looked_up, "ids"),
        "embedding-scatter": Case(of(embedding, reduction="scatter"), (table,), cut, dense_embedding, rows_sum, "ids"),
        "embedding-features": Case(
            of(embedding, split="features"), (by_features,), both, dense_embedding, rows_sum, "ids"
        ),
        "take_along_last_dim": Case(of(take_along_last_dim), (logits,), whole, dense_take_along_last_dim, again, "ids"),
        "matmul": Case(of(matmul), (x, w), last, jnp.matmul, product, ct_fill=1e9),
        "matmul-bias": Case(of(_with_bias), (x, w, vector), last, dense_matmul, biased, ct_fill=1e9),
        "matmul-tokens": Case(
            of(_with_bias, tokens=of_replica), (x_cut, w, vector), last, dense_matmul, biased, ct_fill=1e9
        ),
        "matmul-rows": Case(of(matmul, split="rows"), of_rows[:2], whole, jnp.matmul, product),
        "matmul-rows-bias": Case(of(_with_bias, split="rows"), of_rows, whole, dense_matmul, biased),
        "matmul-scatter": Case(of(_with_bias, split="rows", reduction="scatter"), of_rows, cut, dense_matmul, biased),
        "tied_projection": Case(of(tied_projection), (x, table), last, dense_tied_projection, product),
        "rms_norm": Case(rms, (last, vector), last, _rms, **norm),
        "rms_norm-plain": Case(lambda x: rms(x, None), (last,), last, _rms, **norm),
        "rms_norm-offset": Case(
            partial(rms, scale_offset=1.0), (last, vector), last, lambda x, s: _rms(x, 1 + s), **norm
        ),
        "layer_norm": Case(layer, (last, vector, vector), last, _layer, **norm),
        "layer_norm-plain": Case(lambda x: layer(x, None), (last,), last, _layer, **norm),
        "layer_norm-bias": Case(
            lambda x, b: layer(x, None, b), (last, vector), last, lambda x, b: _layer(x, 1, b), **norm
        ),
        "layer_norm-offset": Case(
            partial(layer, scale_offset=1.0), (last, vector, vector), last, lambda x, s, b: _layer(x, 1 + s, b), **norm
        ),
        # exp and log are good to a few ulps each, and a denominator is a sum of at most 10 terms.
        "softmax": Case(of(softmax), (last,), last, dense_softmax, (20, 20), bounds=_SOFTMAX),
        "log_softmax": Case(
            of(log_softmax), (last,), last, dense_log_softmax, (20, 20), bounds=_LOG_SOFTMAX, padding=-np.inf
        ),
        "top_k": Case(
            lambda x: top_k(x, k, size=size)[0], (logits,), whole, lambda x: lax.top_k(x, k)[0], again, bounds=_PICKED
        ),
        "from_all": Case(of(from_all, dim=-1), (last,), whole, _itself, again),
        "from_all-inner": Case(of(from_all, dim=-2), (inner,), whole, _itself, again),
        "scatter_tokens": Case(scatter_tokens, (x,), cut, _itself),
        "scatter_tokens-inner": Case(partial(scatter_tokens, dim=-2), (whole_inner,), both, _itself),
        "debug_sharding": Case(partial(debug_sharding, name="x"), (parts,), both, _itself),
        "reduce_to_all": Case(reduce_to_all, (parts,), whole, sum_of_blocks, (n, n + 1)),
        "reduce_scatter_tokens": Case(reduce_scatter_tokens, (parts,), cut, sum_of_blocks, (n, 0)),
        "reduce_scatter_tokens-last": Case(
            partial(reduce_scatter_tokens, dim=-1), (parts,), both, sum_of_blocks, (n, 0)
        ),
        "to_all": Case(to_all, (parts,), whole, block_at, again, "owner"),
        "reduce_to": Case(reduce_to, (parts,), both, sum_at, (n, 0), "owner"),
    }


@functools.cache
def _programs(*of: Any) -> tuple[Callable, Callable]:
    """Return a program of all ops, and one of their dense twins, which also take ids and an owner."""

    def called(fn, index):
        return lambda *xs: fn(*xs[:-2], *{"": (), "ids": xs[-2:-1], "owner": xs[-1:]}[index])

    cases, counts = cases_of(*of).values(), [len(case.operands) for case in cases_of(*of).values()]
    ops, twins = ([called(fn, case.index) for case in cases for fn in (case.op, case.dense)][k::2] for k in (0, 1))
    return side_by_side(ops, counts), side_by_side(twins, counts)


def _inputs(of: tuple, seed: int) -> tuple[list, list, list]:
    """Return whole operands and [ids, owner], and cotangents of the results."""
    n, size, tokens, _, dtype, _ = of
    rng, cases = np.random.default_rng(seed), cases_of(*of)
    ids = np.full(tokens, rng.integers(size), np.int32)  # both replicas read one row, and replica 0 twice
    ids[4:5] = rng.integers(size)
    ids[[i for i in (1, 5) if i < tokens]] = rng.choice([*range(-size - 1, 0), *range(size, 2 * size), *FAR])
    owner = np.int32(rng.integers(n))
    floats = {name: [rng.standard_normal(o.shape) for o in case.operands] for name, case in cases.items()}
    for name in floats.keys() & {"softmax", "log_softmax"}:
        floats[name][0] = floats[name][0] * rng.choice([1e-3, 1, 30]) + rng.choice([0, 1e4, -1e4])
    if "top_k" in floats:
        floats["top_k"][0][:1] = 1  # a tie, whose gradients go to the lower columns
    others = np.where(np.arange(n * size) // size == owner, 0, np.nan)
    if "to_all" in floats:
        floats["to_all"][0] += others  # what no IPU but the owner has is not read
    flat = [array.astype(dtype) for arrays in floats.values() for array in arrays]
    shapes = jax.eval_shape(_programs(*of)[1], *flat, ids, owner)
    cts = {name: rng.standard_normal(shape.shape) for name, shape in zip(cases, shapes, strict=True)}
    if "reduce_to" in cts:
        cts["reduce_to"] += others
    return flat, [ids, owner], [ct.astype(dtype) for ct in cts.values()]


def _on_mesh(mode: str, of: tuple, floats: list, ints: list, cts: list) -> tuple[Any, Any]:
    """Return results and gradients of all ops, whose padding is still there."""
    n, _, _, replicas, _, _ = of
    cases = cases_of(*of).values()
    places = [operand for case in cases for operand in case.operands], [case.out for case in cases]
    fills = [case.ct_fill for case in cases]
    int_spec = P("data") if replicas else P(), P()
    return placed_vjp(_programs(*of)[0], mode, n, *places, floats, ints, cts, fills, int_spec, replicas)


def _sum_of_replicas(of: tuple, floats: list, ints: list, cts: list) -> list:
    """Return the sum over replicas of the absolute gradients that each one's tokens have."""
    _, _, tokens, replicas, _, _ = of
    own = np.arange(tokens) * replicas // tokens
    gradients = []
    for replica in range(replicas):
        of_replica = tuple(np.where((own == replica).reshape(-1, *[1] * (ct.ndim - 1)), ct, 0) for ct in cts)
        gradients.append(dense_vjp(_programs(*of)[1], floats, ints, ct=of_replica)[1])
    return [sum(map(np.abs, parts)) for parts in zip(*gradients, strict=True)]


# On two axes, each number of IPUs and each dtype is tested in some of the modes only.
_TWO_AXES = [
    ("untyped-outside", 2, 7, jnp.bfloat16),
    ("typed-outside", 1, 5, jnp.float32),
    ("untyped-outside", 1, 5, jnp.bfloat16),
    ("untyped-inside", 1, 5, jnp.float32),
    *((mode, 2, 7, jnp.float32) for mode in ("typed-outside", "typed-inside", "untyped-inside")),
    ("typed-outside", 2, 7, jnp.bfloat16),
    *((mode, 4, 10, jnp.float32) for mode in ("typed-outside", "untyped-outside")),
    *((mode, 4, 10, jnp.bfloat16) for mode in ("typed-inside", "untyped-inside")),
]


def _configurations():
    """Yield all, of which two always run in two halves: both types and dtypes, one axis and two."""
    for case in CASES:
        yield case.id.removesuffix("-float32"), *case.values, None
    for mode, n, size, dtype in _TWO_AXES:
        yield f"{mode}-2x{n}x{size}-{jnp.dtype(dtype)}", mode, n, size, dtype, 2


def _parts():
    for name, *values in _configurations():
        yield pytest.param(*values, None, id=name, marks=pytest.mark.slow)
        if name in ("typed-outside-3x7", "untyped-outside-2x2x7-bfloat16"):
            yield from (pytest.param(*values, part, id=f"{name}-{part}") for part in (0, 1))


@pytest.mark.fast("typed-outside-3x7-0", "typed-outside-3x7-1")
@pytest.mark.parametrize(("mode", "n", "size", "dtype", "replicas", "part"), list(_parts()))
@examples
@given(seed=seeds)
def test_values_and_every_gradient(mode, n, size, dtype, replicas, part, seed):
    of, half = (n, size, TOKENS, replicas, dtype, part), dtype != jnp.float32
    floats, ints, cts = _inputs(of, seed)
    with jax.enable_x64(True):
        wide, wide_cts = ([array.astype(np.float64) for array in arrays] for arrays in (floats, cts))
        wants, of_wants = dense_vjp(_programs(*of)[1], wide, ints, ct=tuple(wide_cts))
        absolute, of_absolute = (list(map(np.abs, arrays)) for arrays in (wide, wide_cts))
        sizes, of_sizes = dense_vjp(_programs(*of)[1], absolute, ints, ct=tuple(of_absolute))
        if replicas and half:
            of_sizes = _sum_of_replicas(of, wide, ints, wide_cts)

    outs, gradients = _on_mesh(mode, of, floats, ints, cts)

    rest = iter(zip(gradients, of_wants, of_sizes, strict=True))
    for (name, case), out, want, size_of, ct in zip(cases_of(*of).items(), outs, wants, sizes, wide_cts, strict=True):
        got = [(case.out.unpadded(out, want, n, replicas, case.padding), want, size_of)]
        for operand, (gradient, wanted, bound) in zip(case.operands, rest, strict=False):
            got.append((operand.unpadded(gradient, wanted, n, replicas), wanted, bound))
        for k, (found, wanted, bound) in enumerate(got):
            roundings = case.rounded[k > 0]
            if replicas:
                # Ops on half types compute in float32 and round their result. A sum over replicas or IPUs rounds again,
                # and its parts can be larger than the sum. 1e-3 of a bfloat16 rounding is 65 float32 roundings.
                parts = np.maximum(bound if k else 0, np.abs(wanted).max()) + 1e-3
                bound, roundings = np.abs(wanted) + (parts if half else 5), 1 if half else 10
            elif case.bounds:
                bound = case.bounds[k > 0](wanted, ct)
            assert_close(found, wanted.astype(dtype), bound, roundings, f"{name}, {k or 'result'}")


# Without any tokens, as on a replica without a part of a ragged batch


def _sample(**options):
    return lambda x: sample(jax.random.key(0), x, size=10, **options)


# Further ops of logits (0, 10), and the specs and shapes of their results.
_WHOLE = Operand(tokens=True)
CHOICES = {
    "argmax": (partial(argmax, size=10), _WHOLE, (0,)),
    "top_1": (lambda x: top_k(x, 1, size=10)[0], _WHOLE, (0, 1)),
    "top_7": (lambda x: top_k(x, 7, size=10)[0], _WHOLE, (0, 7)),
    "top_7-columns": (lambda x: top_k(x, 7, size=10)[1], _WHOLE, (0, 7)),
    "sample": (_sample(), _WHOLE, (0,)),
    "sample-top_k": (_sample(top_k=7), _WHOLE, (0,)),
    "sample-top_p": (_sample(top_k=2, top_p=np.ones(0)), _WHOLE, (0,)),
    "sample-cold": (_sample(temperature=np.zeros(0)), _WHOLE, (0,)),
    "scatter_tokens-ids": (lambda x: scatter_tokens(jnp.zeros(0, jnp.int32)), Operand(cut=True), (0,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("typed", [True, False])
def test_without_tokens_results_are_empty_and_gradients_zero(typed, dtype):
    of = (2, 10, 0, 2, dtype, None)
    floats, ints, cts = _inputs(of, 0)
    results, gradients = _on_mesh(f"{'typed' if typed else 'untyped'}-outside", of, floats, ints, cts)
    for (name, case), result, ct in zip(cases_of(*of).items(), results, cts, strict=True):
        assert case.out.unpadded(result, ct, 2, 2).shape == ct.shape, name
        assert result.dtype == dtype, name
    assert not any(np.any(np.asarray(gradient, np.float32)) for gradient in gradients)

    fns, outs = ({name: row[k] for name, row in CHOICES.items()} for k in (0, 1))
    out_specs = {name: out.spec(2) for name, out in outs.items()}
    each_ipu = lambda x: {name: fn(x) for name, fn in fns.items()}
    chosen = on_ipus(each_ipu, 2, P("data", "ipu"), out_specs, typed, replicas=2)(np.ones((0, 10), dtype))
    for name, (*_, shape) in CHOICES.items():
        assert chosen[name].shape == shape, name
        assert chosen[name].dtype in (dtype, jnp.int32), name


# Lookups


@pytest.mark.parametrize("shape", [(), (4,), (2, 1, 3), (0,)])
def test_ids_of_any_shape(shape):
    table = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    ids = np.arange(int(np.prod(shape))).reshape(shape).astype(np.int32) - 1
    out = on_ipus(partial(embedding, size=4), 2, (P("ipu"), P()), P())(table, ids)
    np.testing.assert_array_equal(out, dense_embedding(table, ids))

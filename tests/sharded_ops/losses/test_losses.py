"""Test both cross-entropies against a dense twin in float64: all options, with every gradient, on one axis and on two.

On two axes, each of 2 groups of IPUs along "data" has its own tokens, and so its own sum or mean; gradients of a table
and of a bias are summed over the groups. Each entry of the tables is a loss of its own, and all are in one program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

from sharded_ops import linear_cross_entropy, log_softmax_cross_entropy
from support.harness import (
    CASES,
    Operand,
    assert_close,
    dense_vjp,
    examples,
    normal,
    on_ipus,
    placed_vjp,
    seeds,
    side_by_side,
    split_vjp,
)
from support.losses import ROUNDINGS, assert_like_dense_linear, dense_loss, dense_of_each, of_each

FEATURES = 4
WEIGHTED: dict[str, Any] = {"weighted": True, "reduction": "mean"}
SMOOTHED = {"label_smoothing": 0.2, "z_loss": 0.05}
ALL: dict[str, Any] = {"label_smoothing": 0.3, "z_loss": 0.1, "soft_cap": 4.0, "temperature": 2.0}
LSE, ENTROPY = {"return_log_sum_exp": True}, {"return_entropy": True}
CHUNKS = {"token_chunk": 3, "column_chunk": 2}  # which do not divide 5 or 7 tokens and the rows of each IPU
# `soft`, `weighted` and `bias` say which operands an entry uses; `cut`, that hidden states are scattered over tokens.
LOSSES: dict[str, dict[str, Any]] = {
    "logits plain": {},
    "logits ignored": {"weighted": True, "ignore_index": 2} | LSE,
    "logits smoothed sum": {"weighted": True, "reduction": "sum"} | SMOOTHED,
    "logits mean": {"reduction": "mean"},
    "logits clip": {"soft_cap": 3.0, "temperature": 0.7, "out_of_range": "clip", "weighted": True} | LSE,
    "logits all smoothed": {"label_smoothing": 1.0, "soft_cap": 5.0, "reduction": "sum", "ignore_index": -100},
    "logits everything": ALL | WEIGHTED | {"ignore_index": 2} | LSE | ENTROPY,
    "logits soft": {"soft": True, "weighted": True} | ENTROPY,
    "logits soft mean": {"soft": True, "soft_cap": 6.0} | SMOOTHED | WEIGHTED | LSE,
    "linear ignored": {"weighted": True, "ignore_index": 2} | ENTROPY | CHUNKS,
    "linear smoothed sum": {"weighted": True, "reduction": "sum"} | SMOOTHED | CHUNKS,
    "linear mean": {"reduction": "mean"} | CHUNKS,
    "linear clip": {"soft_cap": 3.0, "out_of_range": "clip", "weighted": True},
    "linear backward": ALL | WEIGHTED | {"ignore_index": 2, "gradients": "backward"} | CHUNKS,
    "linear forward": ALL | WEIGHTED | {"ignore_index": 2, "gradients": "forward"} | CHUNKS,
    "linear forward sum": {"gradients": "forward", "out_of_range": "clip", "weighted": True, "reduction": "sum"},
    "linear bias": ALL | WEIGHTED | {"bias": True, "gradients": "forward"} | CHUNKS,
    "linear bias cut": ALL | WEIGHTED | {"bias": True, "cut": True, "gradients": "forward"} | CHUNKS,
    "linear entropy cut": ALL | LSE | ENTROPY | {"bias": True, "cut": True, "weighted": True, "token_chunk": 2},
    "linear soft": ALL | ENTROPY | {"bias": True, "soft": True, "weighted": True} | CHUNKS,
}


def _own(entry):
    return {name: value for name, value in entry.items() if name not in ("bias", "cut")}


def _of_logits(entry, size):
    def op(logits, weights, soft, labels):
        return of_each((entry,), functools.partial(log_softmax_cross_entropy, logits, size=size), labels, weights, soft)

    return op


def _linear(entry, size, tokens):
    given: dict[str, Any] = {"size": size} | ({"tokens": tokens} if "cut" in entry else {})

    def op(hidden, table, bias, weights, soft, labels):
        loss = functools.partial(linear_cross_entropy, hidden, table, bias=bias if "bias" in entry else None, **given)
        return of_each((_own(entry),), loss, labels, weights, soft)

    return op


def _dense(entry, groups):
    """Return the dense twin of either loss, of logits or of hidden states, table and bias."""

    def op(*operands):
        *made, weights, soft, labels = operands
        logits = made[0] if len(made) == 1 else made[0] @ made[1].T + made[2] * ("bias" in entry)
        of_groups = [x.reshape(groups, -1, *x.shape[1:]) for x in (logits, labels, weights, soft)]
        return jnp.concatenate(jax.vmap(functools.partial(dense_of_each, (_own(entry),)))(*of_groups), axis=-1)

    return op


def _transposed(op):
    return lambda *operands: op(*operands).T


@functools.cache
def _programs(names: tuple[str, ...], n: int, size: int, replicas: int | None) -> tuple[Any, Any, list[Any]]:
    """Return a program of these losses, and one of their dense twins, each to (tokens, rows), and operands of each."""
    tokens, groups = (10, replicas) if replicas else (7, 1)
    logits, weights = Operand((tokens, size), split=1, tokens=True), Operand((tokens,), tokens=True)
    hidden, cut = Operand((tokens, FEATURES), tokens=True), Operand((tokens, FEATURES), cut=True)
    table, bias = Operand((size, FEATURES), split=0), Operand((size,), split=0)
    ops, twins, operands = [], [], []
    for name in names:
        entry = LOSSES[name]
        if name.startswith("logits"):
            ops.append(_of_logits(entry, size))
            operands.append((logits, weights, logits))
        else:
            ops.append(_linear(entry, size, tokens // groups))
            operands.append((cut if "cut" in entry else hidden, table, bias, weights, logits))
        twins.append(_dense(entry, groups))
    op, twin = (side_by_side([*map(_transposed, fns)], [*map(len, operands)]) for fns in (ops, twins))
    return op, twin, operands


def _floats(rng, name, operands, dtype):
    """Return the operands of an entry; soft targets need not add up to 1, and those of logits may be negative."""
    *made, weights, soft = (rng.standard_normal(operand.shape) for operand in operands)
    if name == "logits plain":
        made[0] = made[0] * rng.choice([1e-3, 1, 30]) + rng.choice([0, 1e4, -1e4])
    if name.startswith("logits"):
        soft = np.round(soft + 0.5, 1)
    else:
        soft = np.abs(soft)
        soft[1] = 0
    return [*(x.astype(dtype) for x in made), np.abs(weights).astype(np.float32), soft.astype(dtype)]


def _assert_like_dense(name, got, want, floats, ct, labels):
    (loss, grads), (want_loss, of_want) = got, want
    half = floats[0].dtype != np.float32
    if name.startswith("linear"):
        entry, (hidden, table, bias, weights, soft) = LOSSES[name], floats
        # A token's targets add up to `mass`, by which losses and slopes are larger than those of a label.
        mass = 1 + soft.astype(np.float32).sum(-1).max() if "soft" in entry else 1
        kept = [0, 1, *([2] if "bias" in entry else []), 3]
        of_kept = (loss, [grads[k] for k in kept]), (want_loss, [of_want[k] for k in kept])
        operands = [(hidden, table, bias, weights * mass)[k] for k in kept]
        largest = assert_like_dense_linear(*of_kept, operands, ct)
        assert_close(grads[4], of_want[4], largest * (1 + np.abs(ct).max()), 2 if half else 10)
    elif name == "logits plain":
        assert_close(loss, want_loss, 1 + want_loss, ROUNDINGS)
        assert_close(grads[0], of_want[0], (1 + want_loss) * np.abs(ct), ROUNDINGS)
        outside = (labels < 0) | (labels >= grads[0].shape[1])
        np.testing.assert_array_equal(loss[outside], 0)
        np.testing.assert_array_equal(grads[0][outside].astype(np.float32), 0)
    else:
        assert_close(loss, want_loss, 1 + np.abs(want_loss).max(), ROUNDINGS)
        for k, (found, wanted) in enumerate(zip(grads, of_want, strict=True)):
            largest = 1 + np.abs(wanted.astype(np.float32)).max()
            assert_close(found, wanted, largest, 1 if half and k != 1 else ROUNDINGS)


def _assert_like_groups(got, want, largest):
    """Compare on two axes, where in half types dlogits, products and their sum are each rounded."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    for found, wanted, of_all in zip(got[1], want[1], largest, strict=True):
        allowed = of_all * (5e-6 if found.dtype == np.float32 else 4 * float(jnp.finfo(found.dtype).eps))
        error = np.abs(found.astype(np.float64) - wanted.astype(np.float64)).max()
        assert error <= allowed, f"{error}, where {allowed} is allowed"


# What always runs: a few losses, typed and untyped, inside and outside.
QUICK = {
    "untyped-inside-4x10-bfloat16": ("logits everything", "linear entropy cut"),
    "typed-inside-8x5-float32": ("logits plain", "linear bias cut"),
    "untyped-outside-2x2x11-float32": ("logits ignored", "linear backward"),
}


def _configurations():
    cases = [(*case.values, None) for case in CASES]
    cases += [("typed-inside", 4, 10, jnp.float16, None), ("untyped-outside", 2, 9, jnp.float16, None)]
    for n, half in ((1, jnp.bfloat16), (2, None), (4, jnp.float16)):
        for mode in ("typed-outside", "typed-inside", "untyped-outside", "untyped-inside"):
            cases += [(mode, n, 11, jnp.float32, 2)]
            cases += [(mode, n, 11, half, 2)] if half and mode in ("typed-outside", "untyped-inside") else []
    for mode, n, size, dtype, replicas in cases:
        name = f"{mode}-{f'{replicas}x' if replicas else ''}{n}x{size}-{jnp.dtype(dtype)}"
        if name in QUICK:
            yield pytest.param(QUICK[name], mode, n, size, dtype, replicas, id=name)
        yield pytest.param(tuple(LOSSES), mode, n, size, dtype, replicas, id=f"{name}-all", marks=pytest.mark.slow)


@pytest.mark.fast("typed-inside-8x5-float32")
@pytest.mark.parametrize(("names", "mode", "n", "size", "dtype", "replicas"), list(_configurations()))
@examples
@given(seed=seeds)
def test_values_and_every_gradient(names, mode, n, size, dtype, replicas, seed):
    rng, (op, dense, operands) = np.random.default_rng(seed), _programs(names, n, size, replicas)
    each = [_floats(rng, name, of, dtype) for name, of in zip(names, operands, strict=True)]
    labels = rng.integers(0, size, len(each[0][0])).astype(np.int32)
    labels[1:3] = 2 % size, rng.choice([-1, -100, -(2**31), size, size + 1, 2**31 - 1])
    flat, floats = [operand for of in operands for operand in of], [x for of_loss in each for x in of_loss]
    cts = [rng.standard_normal(out.shape).astype(np.float32) for out in jax.eval_shape(dense, *floats, labels)]
    with jax.enable_x64(True):
        wide, wide_cts = ([x.astype(np.float64) for x in arrays] for arrays in (floats, cts))
        wants, of_wants = dense_vjp(dense, wide, [labels], ct=tuple(wide_cts))
    outs, of_labels = [Operand(tokens=True)] * len(cts), (P("data") if replicas else P(),)
    results, grads = placed_vjp(op, mode, n, flat, outs, floats, [labels], cts, [0] * len(cts), of_labels, replicas)

    grads = [operand.unpadded(*pair, n, replicas) for operand, *pair in zip(flat, grads, floats, strict=True)]
    of_wants = [want.astype(x.dtype) for want, x in zip(of_wants, floats, strict=True)]
    sizes: dict[int, list[float]] = {}  # the largest gradients of each operand, by how many operands a loss has
    at = 0
    for of_loss in each:
        own = [float(np.abs(want).max()) for want in of_wants[at : at + len(of_loss)]]
        sizes[len(own)] = [max(pair) for pair in zip(own, sizes.get(len(own), own), strict=True)]
        at += len(own)
    at = 0
    for name, of_loss, found, want, ct in zip(names, each, results, wants, cts, strict=True):
        own = slice(at, at := at + len(of_loss))
        got, wanted = (found, grads[own]), (want.astype(np.float32), of_wants[own])
        try:
            if replicas:
                _assert_like_groups(got, wanted, sizes[len(of_loss)])
            else:
                _assert_like_dense(name, got, wanted, of_loss, ct, labels)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param((), marks=pytest.mark.slow), (2, 1, 3)])
def test_tokens_of_any_shape(shape):
    count = int(np.prod(shape))
    labels = (np.arange(count, dtype=np.int32) - 1).reshape(shape)
    ct, hidden, table = normal(0, shape), normal(1, (*shape, FEATURES)), normal(2, (7, FEATURES))
    logits = hidden @ table.T
    for op, floats, dims in (
        (log_softmax_cross_entropy, [logits], [len(shape)]),
        (functools.partial(linear_cross_entropy, token_chunk=2), [hidden, table], [None, 0]),
    ):
        got = split_vjp(op, "untyped-outside", 2, floats, [labels], dims=dims, ct=ct, size=7)

        def dense(*floats):
            made = floats[0] if len(floats) == 1 else floats[0] @ floats[1].T
            return dense_loss(made.reshape(-1, 7), labels.reshape(-1), None).reshape(shape)

        want = dense_vjp(dense, floats, ct=ct)
        for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(found, wanted, 1 + np.abs(wanted).max(), ROUNDINGS)


# Operands that vary over fewer axes than the others


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(), P(None, "ipu"), P("data")], ids=str)
def test_soft_targets_may_vary_over_fewer_axes_than_the_logits(spec):
    """Devices that have the same target by its spec all use it, and it gets the sum of their gradients."""
    logits = normal(0, (4, 6))
    rows, columns = 2 if "data" not in spec else 4, 6 if "ipu" in spec else 3
    soft, ct = np.abs(normal(1, (rows, columns))), np.arange(1, 5, dtype=np.float32)
    op = functools.partial(log_softmax_cross_entropy, size=6, label_smoothing=0.1)

    def dense(logits, soft):
        whole = jnp.tile(soft, (4 // rows, 6 // columns))
        return dense_loss(logits, whole, None, soft=True, label_smoothing=0.1)

    with jax.enable_x64(True):
        wide = [logits.astype(np.float64), soft.astype(np.float64)]
        want = jax.tree.leaves(dense_vjp(dense, wide, ct=ct.astype(np.float64)))
    got, vjp = jax.vjp(on_ipus(op, 2, (P("data", "ipu"), spec), P("data"), replicas=2), logits, soft)
    for found, wanted in zip((got, *vjp(ct)), want, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("name", ["hidden", "labels", "weights"])
def test_one_operand_alone_may_vary_over_the_data_axis(name, gradients):
    """The other operands are the same for both groups, and get the sum of the groups' gradients."""
    operands = {
        "hidden": normal(0, (4, 3)),
        "labels": np.array([0, 5, 3, 1], np.int32),
        "weights": np.arange(1, 5, dtype=np.float32),
    }
    table = normal(1, (6, 3))
    shared = {k: x if k == name else x[:2] for k, x in operands.items()}
    specs = {k: P("data") if k == name else P() for k in operands}

    def each_device(operands, table):
        op = functools.partial(linear_cross_entropy, size=6, reduction="mean", gradients=gradients)
        return op(operands["hidden"], table, operands["labels"], weights=operands["weights"])[None]

    sharded = on_ipus(each_device, 2, (specs, P("ipu")), P("data"), replicas=2)

    def total(losses):
        return losses[0] - 3 * losses[1]

    def dense(floats, table):
        whole = {k: x if k == name else jnp.concatenate([x, x]) for k, x in (shared | floats).items()}
        groups = {k: x.reshape(2, 2, *x.shape[1:]) for k, x in whole.items()}
        mean = functools.partial(dense_loss, weighted=True, reduction="mean")
        return total(jax.vmap(mean)(groups["hidden"] @ table.T, groups["labels"], groups["weights"]))

    floats = {k: shared[k] for k in ("hidden", "weights")}
    got = jax.jit(jax.value_and_grad(lambda f, t: total(sharded(shared | f, t)), (0, 1)))(floats, table)
    want = jax.jit(jax.value_and_grad(dense, (0, 1)))(floats, table)
    for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

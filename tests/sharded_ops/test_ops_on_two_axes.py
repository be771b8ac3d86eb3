"""Test every op on a mesh of two axes, with its tokens, or none, split over "data", against dense twins in float64.

Each of 2 replicas has 3 of the 6 tokens. The 2 or 4 IPUs of a replica divide neither these nor the 7 features and 10
columns. Weights are the same on both replicas, so their gradients are summed over "data". Padding of inputs is NaN, and
so is padding of those cotangents that are documented not to be read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import (
    Split,
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
from sharded_ops._sampling import _nucleus
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
from support.harness import assert_close, dense_vjp, on_ipus, padded, sharded_vjp, unpadded

REPLICAS, TOKENS, FEATURES, COLUMNS = 2, 6, 7, 10
EPSILON = 0.1


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array on the mesh: dim `split` over "ipu"; of `tokens`, dim 0 over "data"; `cut`, dim 0 over both."""

    shape: tuple[int, ...]
    split: int | None = None
    tokens: bool = False
    cut: bool = False

    def shape_of(self, tokens):
        return (tokens, *self.shape[1:]) if self.tokens or self.cut else self.shape

    @property
    def spec(self):
        if self.cut:
            return P(("data", "ipu"))
        names = {0: "data"} if self.tokens else {}
        names |= {} if self.split is None else {self.split: "ipu"}
        return P(*(names.get(dim) for dim in range(max(names, default=-1) + 1)))

    def padded(self, whole, n, fill=np.nan):
        if self.cut:
            split = Split(len(whole) // REPLICAS, n)
            return np.concatenate([padded(split, part, 0, fill) for part in np.split(whole, REPLICAS)])
        return whole if self.split is None else padded(Split(whole.shape[self.split], n), whole, self.split, fill)

    def unpadded(self, array, whole_shape, n, padding=0):
        """Return the array without its padding, after checking what the padding contains."""
        if self.cut:
            split = Split(whole_shape[0] // REPLICAS, n)
            return np.concatenate([unpadded(split, part, 0, padding) for part in np.split(array, REPLICAS)])
        return array if self.split is None else unpadded(Split(whole_shape[self.split], n), array, self.split, padding)


# A result has the shape of its dense twin's result.
OF_REPLICA, BOTH, CUT = Operand((), tokens=True), Operand((), split=1, tokens=True), Operand((), cut=True)

TABLE, TABLE_OF_FEATURES = Operand((COLUMNS, FEATURES), split=0), Operand((COLUMNS, FEATURES), split=1)
HIDDEN = Operand((TOKENS, FEATURES), tokens=True)
HIDDEN_SHARD, HIDDEN_CUT = dataclasses.replace(HIDDEN, split=1), Operand((TOKENS, FEATURES), cut=True)
LOGITS = Operand((TOKENS, COLUMNS), split=1, tokens=True)
W, W_ROWS = Operand((FEATURES, COLUMNS), split=1), Operand((FEATURES, COLUMNS), split=0)
BIAS, WHOLE_BIAS, SCALE = Operand((COLUMNS,), split=0), Operand((COLUMNS,)), Operand((FEATURES,), split=0)
PARTS = Operand((TOKENS, 12), split=1, tokens=True)  # each IPU's part is a block of columns, which 1, 2 and 4 divide


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with floating operands, and with integer indices if `indices`, and its dense twin."""

    name: str
    op: Callable
    operands: tuple[Operand, ...]
    out: Operand
    dense: Callable
    indices: bool = False
    of_n: bool = False  # whether `dense` also takes the number of IPUs
    padding: float = 0  # of the result
    ct_fill: float = np.nan


def _matmul(x, w, b, **options):
    return matmul(x, w, bias=b, **options)


def _top_3(x):
    return lax.top_k(x, 3)[0]


def _last_block(x, *, n):
    return x[:, -12 // n :]


def _sum_of_blocks(x, *, n):
    return sum(jnp.split(x, n, axis=1))


def _sum_on_last(x, *, n):
    return jnp.zeros_like(x).at[:, -12 // n :].set(_sum_of_blocks(x, n=n))


def _to_last(op):
    return lambda x: op(x, lax.axis_size("ipu") - 1)


def _itself(x):
    return x


def _sized(op, size, **options):
    return functools.partial(op, size=size, **options)


_rms, _layer = (functools.partial(op, epsilon=EPSILON) for op in (dense_rms_norm, dense_layer_norm))
_columns, _rows = _sized(_matmul, COLUMNS), _sized(_matmul, FEATURES, split="rows")
_scattered = functools.partial(_rows, reduction="scatter")
_picked = _sized(take_along_last_dim, COLUMNS)

CASES = [
    Case("embedding", _sized(embedding, COLUMNS), (TABLE,), OF_REPLICA, dense_embedding, True),
    Case("embedding-scatter", _sized(embedding, COLUMNS, reduction="scatter"), (TABLE,), CUT, dense_embedding, True),
    Case(
        "embedding-features",
        _sized(embedding, FEATURES, split="features"),
        (TABLE_OF_FEATURES,),
        BOTH,
        dense_embedding,
        True,
    ),
    Case("take_along_last_dim", _picked, (LOGITS,), OF_REPLICA, dense_take_along_last_dim, True),
    Case("matmul", _columns, (HIDDEN, W, BIAS), BOTH, dense_matmul, ct_fill=1e9),
    Case(
        "matmul-tokens",
        functools.partial(_columns, tokens=TOKENS // REPLICAS),
        (HIDDEN_CUT, W, BIAS),
        BOTH,
        dense_matmul,
        ct_fill=1e9,
    ),
    Case("matmul-rows", _rows, (HIDDEN_SHARD, W_ROWS, WHOLE_BIAS), OF_REPLICA, dense_matmul),
    Case("matmul-scatter", _scattered, (HIDDEN_SHARD, W_ROWS, WHOLE_BIAS), CUT, dense_matmul),
    Case("tied_projection", _sized(tied_projection, COLUMNS), (HIDDEN, TABLE), BOTH, dense_tied_projection),
    Case("rms_norm", _sized(rms_norm, FEATURES, epsilon=EPSILON), (HIDDEN_SHARD, SCALE), BOTH, _rms),
    Case("layer_norm", _sized(layer_norm, FEATURES, epsilon=EPSILON), (HIDDEN_SHARD, SCALE, SCALE), BOTH, _layer),
    Case("softmax", _sized(softmax, COLUMNS), (LOGITS,), BOTH, dense_softmax),
    Case("log_softmax", _sized(log_softmax, COLUMNS), (LOGITS,), BOTH, dense_log_softmax, padding=-np.inf),
    Case("top_k", lambda x: top_k(x, 3, size=COLUMNS)[0], (LOGITS,), OF_REPLICA, _top_3),
    Case("from_all", _sized(from_all, COLUMNS, dim=1), (LOGITS,), OF_REPLICA, _itself),
    Case("scatter_tokens", scatter_tokens, (HIDDEN,), CUT, _itself),
    Case("debug_sharding", functools.partial(debug_sharding, name="x"), (PARTS,), BOTH, _itself),
    Case("to_all", _to_last(to_all), (PARTS,), OF_REPLICA, _last_block, of_n=True),
    Case("reduce_to", _to_last(reduce_to), (PARTS,), BOTH, _sum_on_last, of_n=True),
    Case("reduce_to_all", reduce_to_all, (PARTS,), OF_REPLICA, _sum_of_blocks, of_n=True),
    Case("reduce_scatter_tokens", reduce_scatter_tokens, (PARTS,), CUT, _sum_of_blocks, of_n=True),
]


# Each number of IPUs and each dtype is tested in some of the modes only.
CONFIGURATIONS = [
    pytest.param(n, mode, dtype, id=f"{mode}-{n}-{jnp.dtype(dtype).name}", marks=() if always else pytest.mark.slow)
    for n, mode, dtype, always in (
        (2, "typed-outside", jnp.float32, True),
        (4, "untyped-outside", jnp.float32, True),
        (4, "typed-inside", jnp.bfloat16, True),
        (1, "typed-outside", jnp.float32, False),
        (1, "untyped-outside", jnp.bfloat16, False),
        (1, "untyped-inside", jnp.float32, False),
        (2, "typed-inside", jnp.float32, False),
        (2, "typed-outside", jnp.bfloat16, False),
        (2, "untyped-outside", jnp.bfloat16, False),
        (2, "untyped-inside", jnp.float32, False),
        (4, "typed-outside", jnp.float32, False),
        (4, "untyped-inside", jnp.bfloat16, False),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("n", "mode", "dtype"), CONFIGURATIONS)
def test_values_and_every_gradient(case, n, mode, dtype):
    rng = np.random.default_rng(len(case.name))
    floats = [rng.standard_normal(operand.shape).astype(dtype) for operand in case.operands]
    # On both replicas an id occurs twice, and one is out of range.
    indices = [np.array([3, 9, 3, 3, -1, 10], np.int32)] if case.indices else []
    told = {"n": n} if case.of_n else {}
    ct = rng.standard_normal(jax.eval_shape(lambda *a: case.dense(*a, **told), *floats, *indices).shape).astype(dtype)
    with jax.enable_x64(True):
        wide = [array.astype(np.float64) for array in floats]
        want, want_grads = dense_vjp(case.dense, wide, indices, ct=ct.astype(np.float64), **told)

    out, grads = sharded_vjp(
        case.op,
        mode,
        n,
        [operand.padded(array, n) for operand, array in zip(case.operands, floats, strict=True)],
        indices,
        in_specs=tuple(operand.spec for operand in case.operands),
        int_spec=P("data"),
        out_spec=case.out.spec,
        ct=case.out.padded(ct, n, case.ct_fill),
        replicas=REPLICAS,
    )

    got = [case.out.unpadded(out, want.shape, n, case.padding)]
    got += [of.unpadded(grad, w.shape, n) for of, grad, w in zip(case.operands, grads, want_grads, strict=True)]
    for one_got, one_want in zip(got, (want, *want_grads), strict=True):
        # Half types are rounded once, and once more by the sum over replicas or IPUs.
        bound = np.abs(one_want) + (np.abs(one_want).max() if dtype == jnp.bfloat16 else 5)
        assert_close(one_got, one_want.astype(dtype), bound, roundings=1 if dtype == jnp.bfloat16 else 10)


# Without any tokens, as on a replica without a part of a ragged batch


def _sample(**options):
    return lambda x: sample(jax.random.key(0), x, size=COLUMNS, **options)


# Further ops of logits, and the specs and shapes of their results.
CHOICES = {
    "argmax": (_sized(argmax, COLUMNS), OF_REPLICA, (0,)),
    "top_1": (lambda x: top_k(x, 1, size=COLUMNS)[0], OF_REPLICA, (0, 1)),
    "top_7": (lambda x: top_k(x, 7, size=COLUMNS)[0], OF_REPLICA, (0, 7)),
    "top_7-columns": (lambda x: top_k(x, 7, size=COLUMNS)[1], OF_REPLICA, (0, 7)),
    "sample": (_sample(), OF_REPLICA, (0,)),
    "sample-top_k": (_sample(top_k=7), OF_REPLICA, (0,)),
    "sample-top_p": (_sample(top_k=2, top_p=np.ones(0)), OF_REPLICA, (0,)),
    "sample-cold": (_sample(temperature=np.zeros(0)), OF_REPLICA, (0,)),
    "scatter_tokens-ids": (lambda x: scatter_tokens(jnp.zeros(0, jnp.int32)), CUT, (0,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("typed", [True, False])
def test_without_tokens_results_are_empty_and_gradients_zero(typed, dtype):
    n, no_ids, operands, fns, outs, shapes = 2, np.zeros(0, np.int32), {}, {}, {}, {}
    for case in CASES:
        op = functools.partial(case.op, tokens=0) if case.name == "matmul-tokens" else case.op
        fns[case.name] = functools.partial(lambda op, ids, *x: op(*x, *ids), op, [no_ids] * case.indices)
        operands[case.name], outs[case.name] = case.operands, case.out
        wholes = [np.ones(operand.shape_of(0), dtype) for operand in case.operands]
        dense = functools.partial(case.dense, **{"n": n} if case.of_n else {})
        want = jax.eval_shape(dense, *wholes, *[no_ids] * case.indices)
        shapes[case.name] = case.out.padded(np.ones(want.shape), n).shape
    for name, (fn, out, shape) in CHOICES.items():
        fns[name], operands[name], outs[name], shapes[name] = fn, (LOGITS,), out, shape
    arrays = {name: [o.padded(np.ones(o.shape_of(0), dtype), n, 1) for o in of] for name, of in operands.items()}

    # One program of all ops, which compiles in a tenth of the time that 30 programs take.
    sharded = on_ipus(
        lambda arrays: {name: fn(*arrays[name]) for name, fn in fns.items()},
        n,
        ({name: [operand.spec for operand in of] for name, of in operands.items()},),
        {name: out.spec for name, out in outs.items()},
        typed,
        REPLICAS,
    )

    @jax.jit
    def both(arrays):
        results, vjp = jax.vjp(sharded, arrays)
        floating = lambda r: jnp.issubdtype(r.dtype, jnp.floating)  # noqa: E731
        cts = jax.tree.map(lambda r: jnp.ones_like(r) if floating(r) else np.zeros(r.shape, jax.dtypes.float0), results)
        return results, vjp(cts)

    results, (gradients,) = both(arrays)
    for name, result in results.items():
        assert result.shape == shapes[name], name
        assert result.dtype in (dtype, jnp.int32), name
        for array, gradient in zip(arrays[name], gradients[name], strict=True):
            assert gradient.shape == array.shape, name
            assert not gradient.size or not np.any(np.asarray(gradient, np.float32)), name


# Choices, which have no gradient


_LATER = [pytest.param(n, typed, marks=pytest.mark.slow) for n, typed in ((1, True), (1, False), (2, False), (4, True))]


@pytest.mark.slow
@pytest.mark.parametrize(("n", "typed"), [(2, True), (4, False), *_LATER])
def test_choices_are_those_of_each_token(n, typed):
    """Test ops that return columns, which have no gradient; the column drawn must not depend on the number of IPUs."""
    x = np.random.default_rng(5).integers(0, 5, (TOKENS, COLUMNS)).astype(np.float32)  # with ties

    def each_ipu(x):
        # With one key, tokens on both replicas would make the same draws.
        key = jax.random.fold_in(jax.random.key(3), lax.axis_index("data"))
        values, columns = top_k(x, 4, size=COLUMNS)
        options: tuple[dict[str, Any], ...] = ({}, {"top_k": 4}, {"top_k": 4, "top_p": 0.5}, {"temperature": 0.0})
        return values, columns, argmax(x, size=COLUMNS), [sample(key, x, size=COLUMNS, **o) for o in options]

    sharded = on_ipus(each_ipu, n, BOTH.spec, P("data"), typed, REPLICAS)
    values, columns, best, drawn = jax.device_get(sharded(BOTH.padded(x, n)))

    order = np.argsort(-x, axis=-1, kind="stable")
    np.testing.assert_array_equal(columns, order[:, :4])
    np.testing.assert_array_equal(values, np.take_along_axis(x, order[:, :4], axis=-1))
    np.testing.assert_array_equal(best, order[:, 0])
    np.testing.assert_array_equal(drawn[3], order[:, 0])
    for some in drawn[1:3]:
        assert np.all((some[:, None] == order[:, :4]).any(-1))
    np.testing.assert_array_equal(drawn[:3], _drawn_on_one_device(x))


def _drawn_on_one_device(x):
    """Return the draws on one IPU, which by the docstring of `sample` are the same on any number of IPUs."""

    def each_ipu(x, replica):
        key = jax.random.fold_in(jax.random.key(3), replica)
        options: tuple[dict[str, Any], ...] = ({}, {"top_k": 4}, {"top_k": 4, "top_p": 0.5})
        return [sample(key, x, size=COLUMNS, **o) for o in options]

    one = on_ipus(each_ipu, 1, P(), P(), typed=False)
    of_replicas = [jax.device_get(one(part, replica)) for replica, part in enumerate(np.split(x, REPLICAS))]
    return np.concatenate(of_replicas, axis=1)


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_nucleus_of_everything_is_no_nucleus(typed):
    """top_p=1 draws the same columns as no top_p; test_sampling looks at their probabilities."""
    x = np.tile(np.array([1.0, 0.0, -1.0, 2.0, -np.inf], np.float32), (400, 1))

    def each_ipu(x):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
        options: tuple[dict[str, Any], ...] = (
            {"top_k": 5},
            {"top_k": 5, "top_p": 1},
            {"top_k": 3},
            {"top_k": 3, "top_p": 1.0},
        )
        return [sample(key, x, size=5, temperature=0.7, **o) for o in options]

    sharded = on_ipus(each_ipu, 2, BOTH.spec, P("data"), typed, REPLICAS)
    drawn = jax.device_get(sharded(BOTH.padded(x, 2)))

    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[2], drawn[3])
    assert [set(columns.tolist()) for columns in (drawn[1], drawn[3])] == [{0, 1, 2, 3}, {0, 1, 3}]


def test_a_nucleus_of_everything_keeps_what_float32_adds_nothing_to():
    """The first column's probability is rounded to 1, but the other columns belong to the nucleus nevertheless."""
    p = jax.nn.softmax(jnp.array([[0.0, -20.0, -30.0]]))
    assert p[0, 0] == 1
    assert _nucleus(p, jnp.ones((1, 1))).tolist() == [[True, True, True]]
    assert _nucleus(p, jnp.full((1, 1), 0.999)).tolist() == [[True, False, False]]

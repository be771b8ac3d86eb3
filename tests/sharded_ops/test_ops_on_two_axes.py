"""Test every op on a mesh of two axes, with its tokens split over "data", against float64 formulae worked out by hand.

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
from jax.sharding import AxisType
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
from sharded_ops._sampling import _nucleus
from support.harness import assert_close

REPLICAS, TOKENS, FEATURES, COLUMNS = 2, 6, 7, 10
EPSILON = 0.1


@functools.cache
def mesh_of(n):
    devices = jax.devices()[: REPLICAS * n]
    return jax.make_mesh((REPLICAS, n), ("data", "ipu"), axis_types=(AxisType.Auto,) * 2, devices=devices)


@dataclasses.dataclass(frozen=True)
class Place:
    """How a whole array is placed on the mesh: dim `split` over "ipu", dim 0 over "data", or dim 0 over both."""

    split: int | None = None
    replicas: bool = False
    cut: bool = False

    @property
    def spec(self):
        if self.cut:
            return P(("data", "ipu"))
        names = {0: "data"} if self.replicas else {}
        names |= {} if self.split is None else {self.split: "ipu"}
        return P(*(names.get(dim) for dim in range(max(names, default=-1) + 1)))

    def padded(self, whole, n, fill):
        if self.cut:
            return np.concatenate([_padded(part, 0, n, fill) for part in np.split(whole, REPLICAS)])
        return whole if self.split is None else _padded(whole, self.split, n, fill)

    def unpadded(self, array, whole_shape, n, padding):
        """Return the array without its padding, after checking what the padding contains."""
        if self.cut:
            rows = whole_shape[0] // REPLICAS
            return np.concatenate([_unpadded(part, 0, rows, padding) for part in np.split(array, REPLICAS)])
        return array if self.split is None else _unpadded(array, self.split, whole_shape[self.split], padding)


def _padded(whole, dim, n, fill):
    widths = [(0, -whole.shape[dim] % n if d == dim else 0) for d in range(whole.ndim)]
    return np.pad(whole, widths, constant_values=whole.dtype.type(fill))


def _unpadded(array, dim, rows, padding):
    real, rest = np.split(array, [rows], axis=dim)
    np.testing.assert_array_equal(rest.astype(np.float32), padding)
    return real


WHOLE = Place()
OF_REPLICA = Place(replicas=True)
BOTH = Place(split=1, replicas=True)
ROWS, SPLIT_COLUMNS = Place(split=0), Place(split=1)
CUT = Place(cut=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op with floating `inputs` and integer `indices`, and a function for its result and gradients by hand."""

    name: str
    op: Callable
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[Place, ...]
    out: Place
    result: tuple[int, ...]  # its whole shape; -1 stands for the columns of one part
    dense: Callable  # takes float64 inputs, indices and the cotangent, and returns the result and the gradients
    indices: bool = False
    of_n: bool = False  # whether `dense` also takes the number of IPUs
    padding: float = 0  # of the result
    ct_fill: float = np.nan


def _embedding(table, ids, ct):
    known = (ids >= 0) & (ids < len(table))
    dtable = np.zeros_like(table)
    for token in np.flatnonzero(known):
        dtable[ids[token]] += ct[token]
    return np.where(known[:, None], table[np.where(known, ids, 0)], 0), (dtable,)


def _take_along_last_dim(x, indices, ct):
    picked, dx = np.zeros(len(x)), np.zeros_like(x)
    for token, column in enumerate(indices):
        if 0 <= column < x.shape[1]:
            picked[token], dx[token, column] = x[token, column], ct[token]
    return picked, (dx,)


def _matmul(x, w, b, ct):
    return x @ w + b, (ct @ w.T, x.T @ ct, ct.sum(0))


def _tied(hidden, table, ct):
    return hidden @ table.T, (ct @ table, ct.T @ hidden)


def _rms(x, scale, ct):
    root = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    y, dy = x / root, ct * scale
    return y * scale, ((dy - y * (dy * y).mean(-1, keepdims=True)) / root, (ct * y).sum(0))


def _layer(x, scale, bias, ct):
    centred = x - x.mean(-1, keepdims=True)
    root = np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    y, dy = centred / root, ct * scale
    dx = (dy - dy.mean(-1, keepdims=True) - y * (dy * y).mean(-1, keepdims=True)) / root
    return y * scale + bias, (dx, (ct * y).sum(0), ct.sum(0))


def _softmax(x, ct):
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p, (p * (ct - (p * ct).sum(-1, keepdims=True)),)


def _log_softmax(x, ct):
    p = _softmax(x, ct)[0]
    return np.log(p), (ct - p * ct.sum(-1, keepdims=True),)


def _top_3(x, ct):
    columns = np.argsort(-x, axis=-1, kind="stable")[:, :3]
    dx = np.zeros_like(x)
    np.put_along_axis(dx, columns, ct, axis=-1)
    return np.take_along_axis(x, columns, axis=-1), (dx,)


# In the next ops each IPU's part is a block of 12 columns, which 1, 2 and 4 IPUs divide.
PARTS = (TOKENS, 12)


def _last_block(x, ct, n):
    dx = np.zeros_like(x)
    dx[:, -12 // n :] = ct
    return x[:, -12 // n :], (dx,)


def _sum_of_blocks(x, ct, n):
    return sum(np.split(x, n, axis=1)), (np.tile(ct, n),)


def _sum_on_last(x, ct, n):
    out = np.zeros_like(x)
    out[:, -12 // n :] = sum(np.split(x, n, axis=1))
    return out, (np.tile(ct[:, -12 // n :], n),)


def _to_last(op):
    return lambda x: op(x, lax.axis_size("ipu") - 1)


def _itself(x, ct):
    return x, (ct,)


CASES = [
    Case(
        "embedding",
        lambda t, i: embedding(t, i, size=COLUMNS),
        ((COLUMNS, FEATURES),),
        (ROWS,),
        OF_REPLICA,
        (TOKENS, FEATURES),
        _embedding,
        True,
    ),
    Case(
        "embedding-scatter",
        lambda t, i: embedding(t, i, size=COLUMNS, reduction="scatter"),
        ((COLUMNS, FEATURES),),
        (ROWS,),
        CUT,
        (TOKENS, FEATURES),
        _embedding,
        True,
    ),
    Case(
        "embedding-features",
        lambda t, i: embedding(t, i, size=FEATURES, split="features"),
        ((COLUMNS, FEATURES),),
        (SPLIT_COLUMNS,),
        BOTH,
        (TOKENS, FEATURES),
        _embedding,
        True,
    ),
    Case(
        "take_along_last_dim",
        lambda x, i: take_along_last_dim(x, i, size=COLUMNS),
        ((TOKENS, COLUMNS),),
        (BOTH,),
        OF_REPLICA,
        (TOKENS,),
        _take_along_last_dim,
        True,
    ),
    Case(
        "matmul",
        lambda x, w, b: matmul(x, w, bias=b, size=COLUMNS),
        ((TOKENS, FEATURES), (FEATURES, COLUMNS), (COLUMNS,)),
        (OF_REPLICA, SPLIT_COLUMNS, ROWS),
        BOTH,
        (TOKENS, COLUMNS),
        _matmul,
        ct_fill=1e9,
    ),
    Case(
        "matmul-tokens",
        lambda x, w, b: matmul(x, w, bias=b, size=COLUMNS, tokens=TOKENS // REPLICAS),
        ((TOKENS, FEATURES), (FEATURES, COLUMNS), (COLUMNS,)),
        (CUT, SPLIT_COLUMNS, ROWS),
        BOTH,
        (TOKENS, COLUMNS),
        _matmul,
        ct_fill=1e9,
    ),
    Case(
        "matmul-rows",
        lambda x, w, b: matmul(x, w, bias=b, split="rows", size=FEATURES),
        ((TOKENS, FEATURES), (FEATURES, COLUMNS), (COLUMNS,)),
        (BOTH, ROWS, WHOLE),
        OF_REPLICA,
        (TOKENS, COLUMNS),
        _matmul,
    ),
    Case(
        "matmul-scatter",
        lambda x, w, b: matmul(x, w, bias=b, split="rows", size=FEATURES, reduction="scatter"),
        ((TOKENS, FEATURES), (FEATURES, COLUMNS), (COLUMNS,)),
        (BOTH, ROWS, WHOLE),
        CUT,
        (TOKENS, COLUMNS),
        _matmul,
    ),
    Case(
        "tied_projection",
        functools.partial(tied_projection, size=COLUMNS),
        ((TOKENS, FEATURES), (COLUMNS, FEATURES)),
        (OF_REPLICA, ROWS),
        BOTH,
        (TOKENS, COLUMNS),
        _tied,
    ),
    Case(
        "rms_norm",
        functools.partial(rms_norm, size=FEATURES, epsilon=EPSILON),
        ((TOKENS, FEATURES), (FEATURES,)),
        (BOTH, ROWS),
        BOTH,
        (TOKENS, FEATURES),
        _rms,
    ),
    Case(
        "layer_norm",
        functools.partial(layer_norm, size=FEATURES, epsilon=EPSILON),
        ((TOKENS, FEATURES), (FEATURES,), (FEATURES,)),
        (BOTH, ROWS, ROWS),
        BOTH,
        (TOKENS, FEATURES),
        _layer,
    ),
    Case(
        "softmax",
        functools.partial(softmax, size=COLUMNS),
        ((TOKENS, COLUMNS),),
        (BOTH,),
        BOTH,
        (TOKENS, COLUMNS),
        _softmax,
    ),
    Case(
        "log_softmax",
        functools.partial(log_softmax, size=COLUMNS),
        ((TOKENS, COLUMNS),),
        (BOTH,),
        BOTH,
        (TOKENS, COLUMNS),
        _log_softmax,
        padding=-np.inf,
    ),
    Case(
        "top_k", lambda x: top_k(x, 3, size=COLUMNS)[0], ((TOKENS, COLUMNS),), (BOTH,), OF_REPLICA, (TOKENS, 3), _top_3
    ),
    Case(
        "from_all",
        functools.partial(from_all, dim=1, size=COLUMNS),
        ((TOKENS, COLUMNS),),
        (BOTH,),
        OF_REPLICA,
        (TOKENS, COLUMNS),
        _itself,
    ),
    Case("scatter_tokens", scatter_tokens, ((TOKENS, FEATURES),), (OF_REPLICA,), CUT, (TOKENS, FEATURES), _itself),
    Case(
        "debug_sharding",
        functools.partial(debug_sharding, name="x"),
        (PARTS,),
        (BOTH,),
        BOTH,
        PARTS,
        _itself,
    ),
    Case("to_all", _to_last(to_all), (PARTS,), (BOTH,), OF_REPLICA, (TOKENS, -1), _last_block, of_n=True),
    Case("reduce_to", _to_last(reduce_to), (PARTS,), (BOTH,), BOTH, PARTS, _sum_on_last, of_n=True),
    Case("reduce_to_all", reduce_to_all, (PARTS,), (BOTH,), OF_REPLICA, (TOKENS, -1), _sum_of_blocks, of_n=True),
    Case(
        "reduce_scatter_tokens", reduce_scatter_tokens, (PARTS,), (BOTH,), CUT, (TOKENS, -1), _sum_of_blocks, of_n=True
    ),
]


def _program(case, n, mode):
    """Return the result and the gradients for global arrays, by `jax.vjp` of the shard_map or inside it."""
    typed, inside = mode.startswith("typed"), mode.endswith("inside")
    specs = tuple(place.spec for place in case.places)
    index_specs = (P("data"),) if case.indices else ()
    out_spec = case.out.spec

    def shard_map(fn, in_specs, out_specs):
        return jax.shard_map(fn, mesh=mesh_of(n), in_specs=in_specs, out_specs=out_specs, check_vma=typed)

    if not inside:
        sharded = shard_map(case.op, (*specs, *index_specs), out_spec)

        def outside(floats, indices, ct):
            out, vjp = jax.vjp(lambda *floats: sharded(*floats, *indices), *floats)
            return out, vjp(ct)

        return jax.jit(outside)

    def each_ipu(floats, indices, ct):
        out, vjp = jax.vjp(lambda *floats: case.op(*floats, *indices), *floats)
        if typed:
            return out, vjp(ct)
        # As `_collectives` says of check_vma=False: cotangents and gradients of replicated values are equal parts.
        grads = vjp(ct / np.prod([lax.axis_size(axis) for axis in _missing(out_spec)], dtype=ct.dtype))
        return out, tuple(
            lax.psum(grad, _missing(spec)) if _missing(spec) else grad for grad, spec in zip(grads, specs, strict=True)
        )

    return jax.jit(shard_map(each_ipu, (specs, index_specs, out_spec), (out_spec, specs)))


def _missing(spec):
    """Return the axes over which a value of this spec is the same."""
    named = {name for names in spec for name in (names if isinstance(names, tuple) else (names,))}
    return tuple(axis for axis in ("data", "ipu") if axis not in named)


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
    floats = [rng.standard_normal(shape).astype(dtype) for shape in case.shapes]
    # On both replicas an id occurs twice, and one is out of range.
    indices = [np.array([3, 9, 3, 3, -1, 10], np.int32)] if case.indices else []
    wide = [array.astype(np.float64) for array in floats]
    told = {"n": n} if case.of_n else {}
    ct = rng.standard_normal([PARTS[1] // n if size == -1 else size for size in case.result]).astype(dtype)
    want, want_grads = case.dense(*wide, *indices, ct.astype(np.float64), **told)

    program = _program(case, n, mode)
    arrays = tuple(place.padded(array, n, np.nan) for place, array in zip(case.places, floats, strict=True))
    out, grads = jax.device_get(program(arrays, tuple(indices), case.out.padded(ct, n, case.ct_fill)))

    got = [case.out.unpadded(out, want.shape, n, case.padding)]
    got += [place.unpadded(grad, w.shape, n, 0) for place, grad, w in zip(case.places, grads, want_grads, strict=True)]
    for one_got, one_want in zip(got, (want, *want_grads), strict=True):
        # Half types are rounded once, and once more by the sum over replicas or IPUs.
        bound = np.abs(one_want) + (np.abs(one_want).max() if dtype == jnp.bfloat16 else 5)
        assert_close(one_got, one_want.astype(dtype), bound, roundings=1 if dtype == jnp.bfloat16 else 10)


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

    sharded = jax.shard_map(each_ipu, mesh=mesh_of(n), in_specs=BOTH.spec, out_specs=P("data"), check_vma=typed)
    values, columns, best, drawn = jax.device_get(jax.jit(sharded)(BOTH.padded(x, n, np.nan)))

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
    mesh = jax.make_mesh((1,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def each_ipu(x, replica):
        key = jax.random.fold_in(jax.random.key(3), replica)
        options: tuple[dict[str, Any], ...] = ({}, {"top_k": 4}, {"top_k": 4, "top_p": 0.5})
        return [sample(key, x, size=COLUMNS, **o) for o in options]

    one = jax.jit(jax.shard_map(each_ipu, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    of_replicas = [jax.device_get(one(part, replica)) for replica, part in enumerate(np.split(x, REPLICAS))]
    return np.concatenate(of_replicas, axis=1)


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_nucleus_of_everything_is_no_nucleus(typed):
    """top_p=1 draws the same columns as no top_p, each with its probability."""
    logits = np.array([1.0, 0.0, -1.0, 2.0, -np.inf], np.float32)
    tokens, temperature = 8000, 0.7
    x = np.tile(logits, (tokens, 1))

    def each_ipu(x):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
        options: tuple[dict[str, Any], ...] = (
            {"top_k": 5},
            {"top_k": 5, "top_p": 1},
            {"top_k": 3},
            {"top_k": 3, "top_p": 1.0},
        )
        return [sample(key, x, size=5, temperature=temperature, **o) for o in options]

    sharded = jax.shard_map(each_ipu, mesh=mesh_of(2), in_specs=BOTH.spec, out_specs=P("data"), check_vma=typed)
    drawn = jax.device_get(jax.jit(sharded)(BOTH.padded(x, 2, np.nan)))

    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[2], drawn[3])
    weights = np.exp(logits.astype(np.float64) / temperature)
    for columns, allowed in ((drawn[1], [0, 1, 2, 3]), (drawn[3], [3, 0, 1])):
        p = np.where(np.isin(np.arange(5), allowed), weights, 0)
        p /= p.sum()
        deviation = np.sqrt(p * (1 - p) / tokens)
        frequency = np.bincount(columns, minlength=5) / tokens
        assert np.all(np.abs(frequency - p) <= 4 * deviation), (frequency, p)


def test_a_nucleus_of_everything_keeps_what_float32_adds_nothing_to():
    """The first column's probability is rounded to 1, but the other columns belong to the nucleus nevertheless."""
    p = jax.nn.softmax(jnp.array([[0.0, -20.0, -30.0]]))
    assert p[0, 0] == 1
    assert _nucleus(p, jnp.ones((1, 1))).tolist() == [[True, True, True]]
    assert _nucleus(p, jnp.full((1, 1), 0.999)).tolist() == [[True, False, False]]

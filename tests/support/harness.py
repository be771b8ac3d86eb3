"""Run sharded ops and their dense twins, and compare them: the harness of the tests of all sharded ops.

An op is right if it agrees with a dense program that does not use IPUs, forward and in every gradient, for each way of
differentiating. There are four ways, `MODES`, and `sharded_vjp` runs an op in any of them:

    typed / untyped      the shard_map has check_vma=True, or False
    outside / inside     jax.vjp is called on the shard_map, or within it, on each IPU's own program

A mesh of `replicas` has a second axis, "data", over which specs may split the tokens.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sharded_ops import (
    Split,
)

ON_ALL = P()

MODES = ("typed-outside", "typed-inside", "untyped-outside", "untyped-inside")

# (IPUs, size of the split dim): one IPU, an even split, uneven splits, and IPUs that hold only padding
SPLITS = ((1, 5), (2, 6), (3, 7), (2, 1), (8, 5), (4, 10))


@functools.cache
def mesh_of(n: int, replicas: int | None = None) -> Mesh:
    """Return a mesh of one axis, "ipu", or, with `replicas`, of two: "data" and "ipu"."""
    sizes, names = ((n,), ("ipu",)) if replicas is None else ((replicas, n), ("data", "ipu"))
    devices = jax.devices()[: n * (replicas or 1)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def on_ipus(
    op: Callable, n: int, in_specs: Any, out_specs: Any, typed: bool = True, replicas: int | None = None
) -> Callable:
    """Return `op` as a program that runs on each of n IPUs, of each of the replicas."""
    mesh = mesh_of(n, replicas)
    return jax.jit(jax.shard_map(op, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=typed))


@functools.cache
def _program(
    op: Callable,
    mode: str,
    n: int,
    in_specs: tuple[P, ...],
    int_spec: Any,
    out_spec: Any,
    replicas: int | None,
    kwargs: tuple,
) -> Callable:
    typed, inside = mode.startswith("typed"), mode.endswith("inside")
    op = functools.partial(op, **dict(kwargs))
    axes = mesh_of(n, replicas).shape

    def alike_over(spec):
        """Return the axes over which a value of this spec is the same."""
        named = {name for names in spec for name in (names if isinstance(names, tuple) else (names,))}
        return tuple(axis for axis in axes if axis not in named)

    if not inside:
        sharded = on_ipus(lambda floats, ints: op(*floats, *ints), n, (in_specs, int_spec), out_spec, typed, replicas)

        def program(floats, ints, ct):
            out, vjp = jax.vjp(lambda *floats: sharded(floats, ints), *floats)
            return out, vjp(ct)

        return jax.jit(program)

    def each_ipu(floats, ints, ct):
        out, vjp = jax.vjp(lambda *floats: op(*floats, *ints), *floats)
        if typed:
            return out, vjp(ct)
        # Untyped, the IPUs' results are summed: n equal parts of a replicated result are the whole ...
        part = lambda ct, spec: ct / np.prod([axes[axis] for axis in alike_over(spec)], dtype=ct.dtype)
        grads = vjp(jax.tree.map(part, ct, out_spec))
        # ... and each IPU's result for a replicated input is its part of the gradient.
        parts = zip(grads, in_specs, strict=True)
        return out, tuple(lax.psum(grad, alike_over(spec)) if alike_over(spec) else grad for grad, spec in parts)

    return on_ipus(each_ipu, n, (in_specs, int_spec, out_spec), (out_spec, in_specs), typed, replicas)


def sharded_vjp(
    op: Callable,
    mode: str,
    n: int,
    floats: Sequence[Any],
    ints: Sequence[Any] = (),
    *,
    in_specs: tuple[P, ...],
    out_spec: Any = ON_ALL,
    int_spec: Any = ON_ALL,
    ct: Any,
    replicas: int | None = None,
    **kwargs: Any,
) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Return `op(*floats, *ints, **kwargs)` on n IPUs, and its gradients by `floats` for the result's cotangent `ct`.

    All arrays are global: `floats` are padded and sharded by `in_specs`, and `ints` by `int_spec`.
    """
    program = _program(op, mode, n, in_specs, int_spec, out_spec, replicas, tuple(sorted(kwargs.items())))
    return jax.device_get(program(tuple(floats), tuple(ints), ct))


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array on the mesh: dim `split` over "ipu"; of `tokens`, dim 0 over "data"; `cut`, dim 0 over both."""

    shape: tuple[int, ...] = ()
    split: int | None = None
    tokens: bool = False
    cut: bool = False

    def spec(self, replicas):
        data = "data" if replicas else None
        if self.cut:
            return P(("data", "ipu")) if replicas else P("ipu")
        names = {0: data} if self.tokens else {}
        names |= {} if self.split is None else {self.split: "ipu"}
        return P(*(names.get(dim) for dim in range(max(names, default=-1) + 1)))

    def padded(self, whole, n, replicas, fill=np.nan):
        dim, parts = (0, replicas or 1) if self.cut else (self.split, 1)
        if dim is None:
            return whole
        pieces = np.split(whole, parts)
        return np.concatenate([padded(Split(piece.shape[dim], n), piece, dim, fill) for piece in pieces])

    def unpadded(self, array, like, n, replicas, padding: float = 0):
        """Return the array without its padding, after checking what the padding contains."""
        dim, parts = (0, replicas or 1) if self.cut else (self.split, 1)
        if dim is None:
            return array
        split = Split(like.shape[dim] // parts, n)
        return np.concatenate([unpadded(split, piece, dim, padding) for piece in np.split(array, parts)])


def split_vjp(
    op: Callable,
    mode: str,
    n: int,
    floats: Sequence[np.ndarray],
    ints: Sequence[Any] = (),
    *,
    dims: Sequence[int | None],
    out_dim: int | None = None,
    ct: np.ndarray,
    fill: float = np.nan,
    ct_fill: float = np.nan,
    padding: float = 0,
    **kwargs: Any,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return what `sharded_vjp` does, of whole arrays: dim `dims[k]` of each, and `out_dim` of the result, is split.

    They are padded with `fill` and `ct_fill`; padding of the result must be `padding`, and that of gradients 0.
    """

    operands, out = [Operand(split=dim) for dim in dims], Operand(split=out_dim)
    result, grads = sharded_vjp(
        op,
        mode,
        n,
        [operand.padded(array, n, None, fill) for operand, array in zip(operands, floats, strict=True)],
        ints,
        in_specs=tuple(operand.spec(None) for operand in operands),
        out_spec=out.spec(None),
        ct=out.padded(ct, n, None, ct_fill),
        **kwargs,
    )
    whole = [
        operand.unpadded(grad, array, n, None) for operand, grad, array in zip(operands, grads, floats, strict=True)
    ]
    return out.unpadded(result, ct, n, None, padding), tuple(whole)


def collectives(fn: Callable, *args: Any) -> list[tuple[str, int]]:
    """Return the collectives in the compiled HLO of `fn(*args)`: the kind of each, and the bytes of its result."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    assert text is not None
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    found = re.findall(rf"= ([^=]*?) ({kinds})(?:-start)?\(", text)
    return sorted((kind, sum(map(_bytes, re.findall(r"[a-z]+[0-9]+\[[0-9,]*\]", shape)))) for shape, kind in found)


def _bytes(shape: str) -> int:
    dtype, dims = shape.rstrip("]").split("[")
    return int(re.sub("[a-z]+", "", dtype)) // 8 * int(np.prod([int(d) for d in dims.split(",") if d]))


@functools.cache
def _dense_program(op: Callable, kwargs: tuple) -> Callable:
    op = functools.partial(op, **dict(kwargs))

    def program(floats, ints, ct):
        out, vjp = jax.vjp(lambda *floats: op(*floats, *ints), *floats)
        return out, vjp(ct)

    return jax.jit(program)


def dense_vjp(
    op: Callable, floats: Sequence[Any], ints: Sequence[Any] = (), *, ct: Any, **kwargs: Any
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return the same as `sharded_vjp` for a dense twin on one device; nothing is padded or sharded."""
    return jax.device_get(_dense_program(op, tuple(sorted(kwargs.items())))(tuple(floats), tuple(ints), ct))


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def padded(split: Split, array: np.ndarray, dim: int, fill: float = np.nan) -> np.ndarray:
    """Return the array padded with `fill`, which becomes visible wherever padding leaks."""
    widths = [(0, split.padding if d == dim else 0) for d in range(array.ndim)]
    return np.pad(array, widths, constant_values=array.dtype.type(fill))


def unpadded(split: Split, array: ArrayLike, dim: int, padding: float = 0) -> np.ndarray:
    """Return the array without its padding, after checking that all of this equals `padding` (0 for gradients)."""
    real, rest = np.split(np.asarray(array), [split.size], axis=dim)
    assert rest.shape[dim] == split.padding
    np.testing.assert_array_equal(rest.astype(np.float32), padding)
    return real


def side_by_side(fns: Sequence[Callable], counts: Sequence[int]) -> Callable:
    """Return a program of all functions, of which each takes as many operands as its count, and all that follow."""

    def program(*operands):
        rest = iter(operands)
        own = [[next(rest) for _ in range(count)] for count in counts]
        shared = list(rest)
        return tuple(fn(*operands, *shared) for fn, operands in zip(fns, own, strict=True))

    return program


def placed_vjp(
    op: Callable,
    mode: str,
    n: int,
    operands: Sequence[Operand],
    outs: Sequence[Operand],
    floats: Sequence[np.ndarray],
    ints: Sequence[Any],
    cts: Sequence[np.ndarray],
    ct_fills: Sequence[float],
    int_spec: Any,
    replicas: int | None,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return what `sharded_vjp` does, of a program of whole `floats` with many results; padding is still there."""
    return sharded_vjp(
        op,
        mode,
        n,
        [operand.padded(array, n, replicas) for operand, array in zip(operands, floats, strict=True)],
        ints,
        in_specs=tuple(operand.spec(replicas) for operand in operands),
        int_spec=int_spec,
        out_spec=tuple(out.spec(replicas) for out in outs),
        ct=tuple(out.padded(ct, n, replicas, fill) for out, ct, fill in zip(outs, cts, ct_fills, strict=True)),
        replicas=replicas,
    )


def assert_close(got: ArrayLike, want: ArrayLike, bound: ArrayLike, roundings: float, name: str = "") -> None:
    """Check |got - want| <= roundings * eps * bound, where `bound` is at least as large as the rounded numbers."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
    allowed = roundings * float(jnp.finfo(got.dtype).eps) * np.abs(np.asarray(bound, np.float64))
    assert np.all(error <= allowed), f"{name} off by {error.max()}, where {np.max(allowed)} is allowed at most"


def exactly(message: str) -> str:
    """Return a pattern for `pytest.raises` that only this message matches, with or without jax's note on tracebacks."""
    return rf"\A{re.escape(message)}(\n-|\Z)"


def _case(mode: str, n: int, size: int, dtype: Any, always: bool) -> Any:
    marks = () if always else pytest.mark.slow
    return pytest.param(mode, n, size, dtype, id=f"{mode}-{n}x{size}-{dtype.__name__}", marks=marks)


# Each case compiles a program, which takes most of its time, and each of its examples runs the program. So not every
# mode has every split: the first mode has all splits, the other modes have every second split. Half types are in the
# two modes that round least and most. A few cases of every kind always run; of the others a sample runs.
_ALWAYS = (("typed-outside", 3), ("typed-inside", 8), ("untyped-outside", 2), ("untyped-inside", 3))
CASES = [
    *(
        _case(mode, n, size, jnp.float32, (mode, n) in _ALWAYS)
        for mode, splits in zip(MODES, (SPLITS, SPLITS[::2], SPLITS[1::2], SPLITS[::2]), strict=True)
        for n, size in splits
    ),
    _case("typed-outside", 4, 10, jnp.bfloat16, always=False),
    _case("untyped-inside", 4, 10, jnp.bfloat16, always=True),
]

examples = settings(max_examples=4)
seeds = st.integers(0, 2**32 - 1)

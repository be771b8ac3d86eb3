"""Run sharded ops and their dense twins, and compare them: the harness of the tests of all sharded ops.

An op is right if it agrees with a dense program that does not use IPUs, forward and in every gradient, for each way of
differentiating. There are four ways, `MODES`, and `sharded_vjp` runs an op in any of them:

    typed / untyped      the shard_map has check_vma=True, or False
    outside / inside     jax.vjp is called on the shard_map, or within it, on each IPU's own program

A mesh of `replicas` has a second axis, "data", over which specs may split the tokens.
"""

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
    int_spec: P,
    out_spec: P,
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
        part = lambda ct, spec: ct / np.prod([axes[axis] for axis in alike_over(spec)], dtype=ct.dtype)  # noqa: E731
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
    out_spec: P = ON_ALL,
    int_spec: P = ON_ALL,
    ct: Any,
    replicas: int | None = None,
    **kwargs: Any,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return `op(*floats, *ints, **kwargs)` on n IPUs, and its gradients by `floats` for the result's cotangent `ct`.

    All arrays are global: `floats` are padded and sharded by `in_specs`, and `ints` by `int_spec`.
    """
    program = _program(op, mode, n, in_specs, int_spec, out_spec, replicas, tuple(sorted(kwargs.items())))
    return jax.device_get(program(tuple(floats), tuple(ints), ct))


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

    def pad(array: np.ndarray, dim: int | None, fill: float) -> np.ndarray:
        return array if dim is None else padded(Split(array.shape[dim], n), array, dim, fill)

    def unpad(array: np.ndarray, like: np.ndarray, dim: int | None, padding: float = 0) -> np.ndarray:
        return array if dim is None else unpadded(Split(like.shape[dim], n), array, dim, padding)

    in_specs = tuple(ON_ALL if dim is None else P(*(None,) * dim, "ipu") for dim in dims)
    out, grads = sharded_vjp(
        op,
        mode,
        n,
        [pad(array, dim, fill) for array, dim in zip(floats, dims, strict=True)],
        ints,
        in_specs=in_specs,
        out_spec=ON_ALL if out_dim is None else P(*(None,) * out_dim, "ipu"),
        ct=pad(ct, out_dim, ct_fill),
        **kwargs,
    )
    whole = [unpad(grad, array, dim) for grad, array, dim in zip(grads, floats, dims, strict=True)]
    return unpad(out, ct, out_dim, padding), tuple(whole)


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
every_case = pytest.mark.parametrize(("mode", "n", "size", "dtype"), CASES)

examples = settings(max_examples=4)
seeds = st.integers(0, 2**32 - 1)

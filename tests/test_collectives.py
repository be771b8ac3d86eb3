"""The collectives against their dense twins, and the harness that the tests of all sharded ops share.

An op is right when it agrees with a dense program that knows nothing of IPUs, forward and in every gradient, however
the two are differentiated. There are four ways, `MODES`, and `sharded_vjp` runs an op in each:

    typed / untyped      the shard_map has check_vma=True, or False
    outside / inside     jax.vjp is taken of the shard_map, or within it, for each IPU's own program
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from sharded_ops import (
    Split,
    from_all,
    reduce_scatter_tokens,
    reduce_to,
    reduce_to_all,
    scatter_tokens,
    to_all,
)

ON_ALL = P()

MODES = ("typed-outside", "typed-inside", "untyped-outside", "untyped-inside")

# (IPUs, size of the split dim): one IPU, an even split, ragged ones, and IPUs that hold nothing but padding
SPLITS = ((1, 5), (2, 6), (3, 7), (2, 1), (8, 5), (4, 10))


@functools.cache
def mesh_of(n: int) -> Mesh:
    return jax.make_mesh((n,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def on_ipus(op: Callable, n: int, in_specs: Any, out_specs: Any, typed: bool = True) -> Callable:
    """`op` as the program of each of n IPUs."""
    return jax.jit(jax.shard_map(op, mesh=mesh_of(n), in_specs=in_specs, out_specs=out_specs, check_vma=typed))


@functools.cache
def _program(op: Callable, mode: str, n: int, in_specs: tuple[P, ...], out_spec: P, kwargs: tuple) -> Callable:
    typed, inside = mode.startswith("typed"), mode.endswith("inside")
    op = functools.partial(op, **dict(kwargs))

    if not inside:
        sharded = on_ipus(lambda floats, ints: op(*floats, *ints), n, (in_specs, P()), out_spec, typed)

        def program(floats, ints, ct):
            out, vjp = jax.vjp(lambda *floats: sharded(floats, ints), *floats)
            return out, vjp(ct)

        return jax.jit(program)

    def each_ipu(floats, ints, ct):
        out, vjp = jax.vjp(lambda *floats: op(*floats, *ints), *floats)
        if typed:
            return out, vjp(ct)
        # Untyped, the IPUs' results are added up: n equal parts of a replicated one make the whole ...
        grads = vjp(ct / n if out_spec == P() else ct)
        # ... and what each IPU finds for an input that all hold is its part of the gradient.
        parts = zip(grads, in_specs, strict=True)
        return out, tuple(lax.psum(grad, "ipu") if spec == P() else grad for grad, spec in parts)

    return on_ipus(each_ipu, n, (in_specs, P(), out_spec), (out_spec, in_specs), typed)


def sharded_vjp(
    op: Callable,
    mode: str,
    n: int,
    floats: Sequence[Any],
    ints: Sequence[Any] = (),
    *,
    in_specs: tuple[P, ...],
    out_spec: P = ON_ALL,
    ct: Any,
    **kwargs: Any,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """`op(*floats, *ints, **kwargs)` on n IPUs, and its gradients by `floats` for the result's cotangent `ct`.

    All arrays are global, `floats` padded and sharded by `in_specs`, `ints` on all IPUs.
    """
    program = _program(op, mode, n, in_specs, out_spec, tuple(sorted(kwargs.items())))
    return jax.device_get(program(tuple(floats), tuple(ints), ct))


def collectives(fn: Callable, *args: Any) -> list[tuple[str, int]]:
    """The collectives in the compiled HLO of `fn(*args)`: the kind of each, and the bytes of its result."""
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
    """What `sharded_vjp` gives, of a dense twin on one device: nothing is padded or sharded."""
    return jax.device_get(_dense_program(op, tuple(sorted(kwargs.items())))(tuple(floats), tuple(ints), ct))


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def padded(split: Split, array: np.ndarray, dim: int, fill: float = np.nan) -> np.ndarray:
    """The array padded with a `fill` that shows wherever padding leaks."""
    widths = [(0, split.padding if d == dim else 0) for d in range(array.ndim)]
    return np.pad(array, widths, constant_values=array.dtype.type(fill))


def unpadded(split: Split, array: ArrayLike, dim: int, padding: float = 0) -> np.ndarray:
    """The array without its padding, which must hold exactly `padding`, as that of every gradient does."""
    real, rest = np.split(np.asarray(array), [split.size], axis=dim)
    assert rest.shape[dim] == split.padding
    np.testing.assert_array_equal(rest.astype(np.float32), padding)
    return real


def assert_close(got: ArrayLike, want: ArrayLike, bound: ArrayLike, roundings: float) -> None:
    """|got - want| <= roundings * eps * bound, where `bound` is at least the size of what was rounded."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
    allowed = roundings * float(jnp.finfo(got.dtype).eps) * np.abs(np.asarray(bound, np.float64))
    assert np.all(error <= allowed), f"off by {error.max()}, where {np.max(allowed)} is allowed at most"


def exactly(message: str) -> str:
    """A pattern for `pytest.raises` that this message alone matches, with or without jax's note on its traceback."""
    return rf"\A{re.escape(message)}(\n-|\Z)"


def _case(mode: str, n: int, size: int, dtype: Any) -> Any:
    return pytest.param(mode, n, size, dtype, id=f"{mode}-{n}x{size}-{dtype.__name__}")


# Each case compiles a program, which takes most of its time, and each of its examples runs it. So the modes share the
# splits out among them: all in the first mode, every other one in the others; half types in the two that round least
# and most.
CASES = [
    *(_case("typed-outside", n, size, jnp.float32) for n, size in SPLITS),
    *(_case("typed-inside", n, size, jnp.float32) for n, size in SPLITS[::2]),
    *(_case("untyped-outside", n, size, jnp.float32) for n, size in SPLITS[1::2]),
    *(_case("untyped-inside", n, size, jnp.float32) for n, size in SPLITS[::2]),
    *(_case(mode, 4, 10, jnp.bfloat16) for mode in ("typed-outside", "untyped-inside")),
]
every_case = pytest.mark.parametrize(("mode", "n", "size", "dtype"), CASES)

# For an op's further forms: every mode, both dtypes, 1, 2, 4 and 8 IPUs and every kind of split, in half the programs.
FEW_CASES = [
    _case("typed-outside", 1, 5, jnp.float32),
    _case("typed-outside", 8, 5, jnp.float32),
    _case("typed-inside", 2, 6, jnp.float32),
    _case("typed-inside", 4, 10, jnp.bfloat16),
    _case("untyped-outside", 2, 1, jnp.float32),
    _case("untyped-outside", 4, 10, jnp.bfloat16),
    _case("untyped-inside", 3, 7, jnp.float32),
    _case("untyped-inside", 8, 5, jnp.bfloat16),
]
a_few_cases = pytest.mark.parametrize(("mode", "n", "size", "dtype"), FEW_CASES)
examples = settings(max_examples=4, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


@every_case
@examples
@given(seed=seeds, data=st.data())
def test_to_all_gives_the_owners_value_and_gathers_its_gradient(mode, n, size, dtype, seed, data):
    owner = data.draw(st.integers(0, n - 1))
    x = np.full((n, size), np.nan, dtype)
    x[owner] = normal(seed, (size,), dtype)
    ct = normal(seed + 1, (1, size), dtype)

    out, (dx,) = sharded_vjp(_to_all_traced, mode, n, [x], [np.int32(owner)], in_specs=(P("ipu"),), ct=ct)

    np.testing.assert_array_equal(out, x[owner : owner + 1])
    # Untyped, the cotangent is cut in n and added up again: n + 1 roundings.
    is_owner = np.arange(n)[:, None] == owner
    assert_close(dx, np.where(is_owner, ct, np.zeros_like(ct)), np.where(is_owner, np.abs(ct), 0), roundings=n + 1)


def _to_all_traced(x, owner):
    return to_all(x, owner)


@pytest.mark.parametrize(
    ("owner", "dtype"), [(0, jnp.int32), (1, jnp.uint8), (1, jnp.bool_), (2, jnp.bool_), (2, jnp.float16)]
)
def test_to_all_keeps_the_dtype_and_takes_a_plain_int(owner, dtype):
    x = jnp.arange(6).reshape(3, 2).astype(dtype)
    op = functools.partial(to_all, owner=owner)
    out = on_ipus(op, 3, P("ipu"), P())(x)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, x[owner : owner + 1])


@every_case
@examples
@given(seed=seeds)
def test_from_all_gathers_the_dim_and_cuts_its_gradient(mode, n, size, dtype, seed):
    split = Split(size, n)
    x, ct = normal(seed, (2, size, 3), dtype), normal(seed + 1, (2, size, 3), dtype)

    spec = split.spec(1, 3, "ipu")
    out, (dx,) = sharded_vjp(from_all, mode, n, [padded(split, x, 1)], in_specs=(spec,), ct=ct, dim=-2, size=size)

    np.testing.assert_array_equal(out, x)
    assert_close(unpadded(split, dx, 1), ct, np.abs(ct), roundings=n + 1)


@every_case
@examples
@given(seed=seeds)
def test_reduce_to_all_sums(mode, n, size, dtype, seed):
    x, ct = normal(seed, (n, size), dtype), normal(seed + 1, (1, size), dtype)

    out, (dx,) = sharded_vjp(reduce_to_all, mode, n, [x], in_specs=(P("ipu"),), ct=ct)

    assert_close(out, x.sum(0, keepdims=True), np.abs(x).sum(0), roundings=n)
    assert_close(dx, np.broadcast_to(ct, x.shape), np.abs(ct), roundings=n + 1)


@a_few_cases
@examples
@given(seed=seeds, data=st.data())
def test_reduce_to_sums_on_the_owner_and_spreads_its_gradient(mode, n, size, dtype, seed, data):
    owner = data.draw(st.integers(0, n - 1))
    x = normal(seed, (n, size), dtype)
    ct = np.full((n, size), np.nan, dtype)
    ct[owner] = normal(seed + 1, (size,), dtype)

    out, (dx,) = sharded_vjp(
        _reduce_to_traced, mode, n, [x], [np.int32(owner)], in_specs=(P("ipu"),), out_spec=P("ipu"), ct=ct
    )

    is_owner = np.arange(n)[:, None] == owner
    assert_close(out, np.where(is_owner, x.sum(0), np.zeros_like(x)), np.abs(x).sum(0) * is_owner, roundings=n)
    np.testing.assert_array_equal(dx, np.broadcast_to(ct[owner], x.shape))


def _reduce_to_traced(x, owner):
    return reduce_to(x, owner)


@a_few_cases
@examples
@given(seed=seeds)
def test_scatter_tokens_cuts_the_dim_and_gathers_its_gradient(mode, n, size, dtype, seed):
    split = Split(size, n)
    x, ct = normal(seed, (2, size, 3), dtype), normal(seed + 1, (2, size, 3), dtype)

    out, (dx,) = sharded_vjp(
        scatter_tokens,
        mode,
        n,
        [x],
        in_specs=(P(),),
        out_spec=split.spec(1, 3, "ipu"),
        ct=padded(split, ct, 1),
        dim=-2,
    )

    np.testing.assert_array_equal(unpadded(split, out, 1), x)
    np.testing.assert_array_equal(dx, ct)


@a_few_cases
@examples
@given(seed=seeds)
def test_reduce_scatter_tokens_sums_and_cuts(mode, n, size, dtype, seed):
    split = Split(size, n)
    x, ct = normal(seed, (n, 2, size), dtype), normal(seed + 1, (2, size), dtype)

    out, (dx,) = sharded_vjp(
        _reduce_scatter_last,
        mode,
        n,
        [x],
        in_specs=(P("ipu"),),
        out_spec=split.spec(1, 2, "ipu"),
        ct=padded(split, ct, 1),
    )

    assert_close(unpadded(split, out, 1), x.sum(0), np.abs(x).sum(0), roundings=n)
    np.testing.assert_array_equal(dx, np.broadcast_to(ct, x.shape))


def _reduce_scatter_last(x):
    return reduce_scatter_tokens(x[0], dim=-1)


@pytest.mark.parametrize("typed", [True, False])
def test_ids_are_scattered_inside_a_gradient_and_what_is_scattered_comes_back(typed):
    ids = jnp.arange(5)

    def picked(table, ids):
        return from_all(table[scatter_tokens(ids)], 0, size=5)

    sharded = on_ipus(picked, 2, (P(), P()), P(), typed)
    table = jnp.arange(10.0)
    np.testing.assert_array_equal(sharded(table, ids), table[:5])
    dtable = jax.grad(lambda table: (sharded(table, ids) * jnp.arange(1.0, 6.0)).sum())(table)
    np.testing.assert_array_equal(dtable, [1, 2, 3, 4, 5, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("typed", [True, False])
def test_scattering_has_second_derivatives(typed):
    def to_the_fourth(x):
        return from_all(scatter_tokens(x) ** 4, 0, size=3)

    sharded = on_ipus(to_the_fourth, 2, P(), P(), typed)
    x = jnp.array([1.0, 2.0, 3.0])
    second = jax.grad(lambda x: jax.grad(lambda x: sharded(x).sum())(x).sum())(x)
    np.testing.assert_array_equal(second, 12 * x**2)


@pytest.mark.parametrize(
    ("op", "typed", "forward", "backward"),
    [
        # x is (3, 3) float32 on each of 2 IPUs, 36 bytes, and a slice of it (2, 3), 24 bytes
        (functools.partial(reduce_to, owner=1), True, [("all-reduce", 36)], [("all-reduce", 36)]),
        (functools.partial(reduce_to, owner=1), False, [("all-reduce", 36)], [("all-reduce", 36)]),
        (reduce_scatter_tokens, True, [("reduce-scatter", 24)], [("all-gather", 48)]),
        (reduce_scatter_tokens, False, [("reduce-scatter", 24)], [("all-gather", 48)]),
        (scatter_tokens, True, [], [("all-gather", 48)]),
        (scatter_tokens, False, [], [("all-reduce", 36)]),
    ],
)
def test_each_that_leaves_its_result_apart_sends_what_it_says(op, typed, forward, backward):
    on_all = op is scatter_tokens
    sharded = on_ipus(op, 2, P() if on_all else P("ipu"), P("ipu"), typed)
    x = jnp.ones((3, 3) if on_all else (6, 3))
    out = sharded(x)
    assert collectives(sharded, x) == forward
    assert collectives(lambda x, ct: jax.vjp(sharded, x)[1](ct), x, out) == backward


@pytest.mark.parametrize(
    ("op", "typed", "forward", "backward"),
    [
        # x is (2, 3) float32 on each of 2 IPUs: 24 bytes
        (functools.partial(to_all, owner=1), True, [("all-reduce", 24)], []),
        (functools.partial(to_all, owner=1), False, [("all-reduce", 24)], [("all-reduce", 24)]),
        (functools.partial(from_all, dim=0, size=4), True, [("all-gather", 48)], []),
        (functools.partial(from_all, dim=0, size=4), False, [("all-gather", 48)], [("reduce-scatter", 24)]),
        (reduce_to_all, True, [("all-reduce", 24)], []),
        (reduce_to_all, False, [("all-reduce", 24)], [("all-reduce", 24)]),
    ],
)
def test_each_sends_what_it_says(op, typed, forward, backward):
    sharded = on_ipus(op, 2, P("ipu"), P(), typed)
    x = jnp.ones((4, 3))
    out = sharded(x)
    assert collectives(sharded, x) == forward
    assert collectives(lambda x, ct: jax.vjp(sharded, x)[1](ct), x, out) == backward


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            lambda x: to_all(x, 2),
            "owner=2 names no IPU of axis 'ipu', which has 2: give 0 to 1",
        ),
        (
            lambda x: to_all(x, lax.axis_index("ipu")),
            "owner varies over axis 'ipu', but must be the same on all its IPUs: bring it in with in_specs that don't "
            "name 'ipu', or use to_all or from_all on it first",
        ),
        (
            lambda x: to_all(x, 0, "model"),
            "axis='model' is no axis of an enclosing shard_map: call the op inside jax.shard_map on a mesh that has "
            "this axis, or give the axis that its mesh has",
        ),
        (
            lambda x: from_all(x, 2, 4),
            "x_shard has shape (2, 3) on each IPU, without a dim 2 to split: give an array that has one",
        ),
        (
            lambda x: from_all(x, 0, 5),
            "x_shard has shape (2, 3) on each IPU, with 2 rows in dim 0, but size=5 over the 2 IPUs of axis 'ipu' "
            "takes 3: pad the whole array with Split(size=5, parts=2).pad(array, 0) and shard it with "
            "in_specs=Split(size=5, parts=2).spec(0, 2, 'ipu')",
        ),
        (
            lambda x: reduce_to_all(reduce_to_all(x)),
            "x of shape (2, 3) is the same on all 2 IPUs of axis 'ipu', so it is no part of a sum over them: use it as "
            "it is, or lax.pcast(x, 'ipu', to='varying') if each IPU does add the same",
        ),
        (
            lambda x: reduce_scatter_tokens(reduce_to_all(x)),
            "x of shape (2, 3) is the same on all 2 IPUs of axis 'ipu', so it is no part of a sum over them: use it as "
            "it is, or lax.pcast(x, 'ipu', to='varying') if each IPU does add the same",
        ),
        (
            lambda x: reduce_scatter_tokens(x, dim=2),
            "x has shape (2, 3), without a dim 2 to scatter: give an array that has one",
        ),
        (
            lambda x: scatter_tokens(reduce_to_all(x), dim=-3),
            "x has shape (2, 3), without a dim -3 to scatter: give an array that has one",
        ),
        (
            scatter_tokens,
            "x varies over axis 'ipu', but must be the same on all its IPUs: bring it in with in_specs that don't "
            "name 'ipu', or use to_all or from_all on it first",
        ),
        (
            lambda x: scatter_tokens(x, "model"),
            "axis='model' is no axis of an enclosing shard_map: call the op inside jax.shard_map on a mesh that has "
            "this axis, or give the axis that its mesh has",
        ),
        (
            lambda x: reduce_to(x, -1),
            "owner=-1 names no IPU of axis 'ipu', which has 2: give 0 to 1",
        ),
    ],
)
def test_a_wrong_call_is_refused_when_traced(op, message):
    with pytest.raises(ValueError, match=exactly(message)):
        on_ipus(op, 2, P("ipu"), P())(jnp.ones((4, 3)))


def test_outside_any_shard_map_the_axis_is_missed():
    with pytest.raises(ValueError, match=r"^axis='ipu' is no axis of an enclosing shard_map: "):
        reduce_to_all(jnp.ones(3))


def test_reducing_again_on_one_ipu_is_the_dense_sum_of_one():
    twice = on_ipus(lambda x: reduce_to_all(reduce_to_all(x)), 1, P("ipu"), P())
    np.testing.assert_array_equal(twice(jnp.arange(3.0)), np.arange(3.0))

"""Test the collectives against their dense twins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from sharded_ops import from_all, reduce_scatter_tokens, reduce_to, reduce_to_all, scatter_tokens, to_all
from support.harness import a_few_cases, assert_close, every_case, examples, normal, on_ipus, seeds, split_vjp

SPLIT, WHOLE = P("ipu"), P()


@every_case
@examples
@given(seed=seeds, data=st.data())
def test_to_all_gives_the_owners_value_and_gathers_its_gradient(mode, n, size, dtype, seed, data):
    owner = data.draw(st.integers(0, n - 1))
    x = np.full((n, size), np.nan, dtype)
    x[owner] = normal(seed, (size,), dtype)
    ct = normal(seed + 1, (1, size), dtype)

    out, (dx,) = split_vjp(_to_all_traced, mode, n, [x], [np.int32(owner)], dims=[0], ct=ct)

    np.testing.assert_array_equal(out, x[owner : owner + 1])
    # Untyped, the cotangent is divided by n and summed again: n + 1 roundings.
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
    x, ct = normal(seed, (2, size, 3), dtype), normal(seed + 1, (2, size, 3), dtype)

    out, (dx,) = split_vjp(from_all, mode, n, [x], dims=[1], ct=ct, dim=-2, size=size)

    np.testing.assert_array_equal(out, x)
    assert_close(dx, ct, np.abs(ct), roundings=n + 1)


@every_case
@examples
@given(seed=seeds)
def test_reduce_to_all_sums(mode, n, size, dtype, seed):
    x, ct = normal(seed, (n, size), dtype), normal(seed + 1, (1, size), dtype)

    out, (dx,) = split_vjp(reduce_to_all, mode, n, [x], dims=[0], ct=ct)

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

    out, (dx,) = split_vjp(_reduce_to_traced, mode, n, [x], [np.int32(owner)], dims=[0], out_dim=0, ct=ct)

    is_owner = np.arange(n)[:, None] == owner
    assert_close(out, np.where(is_owner, x.sum(0), np.zeros_like(x)), np.abs(x).sum(0) * is_owner, roundings=n)
    np.testing.assert_array_equal(dx, np.broadcast_to(ct[owner], x.shape))


def _reduce_to_traced(x, owner):
    return reduce_to(x, owner)


@a_few_cases
@examples
@given(seed=seeds)
def test_scatter_tokens_cuts_the_dim_and_gathers_its_gradient(mode, n, size, dtype, seed):
    x, ct = normal(seed, (2, size, 3), dtype), normal(seed + 1, (2, size, 3), dtype)

    out, (dx,) = split_vjp(scatter_tokens, mode, n, [x], dims=[None], out_dim=1, ct=ct, dim=-2)

    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(dx, ct)


@a_few_cases
@examples
@given(seed=seeds)
def test_reduce_scatter_tokens_sums_and_cuts(mode, n, size, dtype, seed):
    x, ct = normal(seed, (n, 2, size), dtype), normal(seed + 1, (2, size), dtype)

    out, (dx,) = split_vjp(_reduce_scatter_last, mode, n, [x], dims=[0], out_dim=1, ct=ct)

    assert_close(out, x.sum(0), np.abs(x).sum(0), roundings=n)
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


def test_outside_any_shard_map_the_axis_is_missed():
    with pytest.raises(ValueError, match=r"^axis='ipu' is no axis of an enclosing shard_map: "):
        reduce_to_all(jnp.ones(3))


def test_reducing_again_on_one_ipu_is_the_dense_sum_of_one():
    twice = on_ipus(lambda x: reduce_to_all(reduce_to_all(x)), 1, P("ipu"), P())
    np.testing.assert_array_equal(twice(jnp.arange(3.0)), np.arange(3.0))

"""Test the collectives with dtypes, inside gradients and on one IPU; test_ops compares them with their dense twins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import from_all, reduce_to_all, scatter_tokens, to_all
from support.harness import on_ipus


@pytest.mark.fast("1-bool", "2-float16")
@pytest.mark.parametrize(
    ("owner", "dtype"), [(0, jnp.int32), (1, jnp.uint8), (1, jnp.bool_), (2, jnp.bool_), (2, jnp.float16)]
)
def test_to_all_keeps_the_dtype_and_takes_a_plain_int(owner, dtype):
    x = jnp.arange(6).reshape(3, 2).astype(dtype)
    op = functools.partial(to_all, owner=owner)
    out = on_ipus(op, 3, P("ipu"), P())(x)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, x[owner : owner + 1])


@pytest.mark.fast("True")
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


@pytest.mark.fast("False")
@pytest.mark.parametrize("typed", [True, False])
def test_scattering_has_second_derivatives(typed):
    def to_the_fourth(x):
        return from_all(scatter_tokens(x) ** 4, 0, size=3)

    sharded = on_ipus(to_the_fourth, 2, P(), P(), typed)
    x = jnp.array([1.0, 2.0, 3.0])
    second = jax.grad(lambda x: jax.grad(lambda x: sharded(x).sum())(x).sum())(x)
    np.testing.assert_array_equal(second, 12 * x**2)


def test_outside_any_shard_map_the_axis_is_missed():
    with pytest.raises(ValueError, match=r"^axis='ipu' is not an axis of an enclosing shard_map: "):
        reduce_to_all(jnp.ones(3))


def test_reducing_again_on_one_ipu_is_the_dense_sum_of_one():
    twice = on_ipus(lambda x: reduce_to_all(reduce_to_all(x)), 1, P("ipu"), P())
    np.testing.assert_array_equal(twice(jnp.arange(3.0)), np.arange(3.0))

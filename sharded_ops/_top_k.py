"""Choose the largest columns of a last dim that is split over the IPUs of a mesh axis.

No IPU ever holds a whole row. Each IPU finds the best of its own columns, one all-gather brings these few candidates to
all IPUs, and every IPU makes the same choice among them. Here k = 2 of 9 columns on 3 IPUs:

    IPU               0             1             2
    x              5  1  7       7  0  9       2  9  3
    its two best   7@2 5@0       9@5 7@3       9@7 3@8        value@column
    all-gather         7@2 5@0 9@5 7@3 9@7 3@8                on every IPU; equal values are in the order of columns
    two best                 9@5 9@7                          the lower column first, as in lax.top_k

A value and its column travel as bits in one integer array, so neither is rounded, however many columns there are.

Dims: N tokens (any number of leading dims), V columns, K chosen columns; n IPUs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._arguments import array, whole_number
from sharded_ops._collectives import as_varying, gather_to_all, reduce_to_all
from sharded_ops._split import Split, check_shard, local_rows, mask_padding, split_over, varying_axes


def argmax(x_shard: jax.Array, *, size: int, axis: str = "ipu") -> jax.Array:
    """Return `jnp.argmax` over a last dim that is split over the IPUs of `axis`.

    Forward: one all-gather of 2 numbers per token: each shard's largest value, widened to at least 32 bits, and its
    column. There is no backward pass: an index has no gradient.

    Args:
        x_shard: (N.., V) globally, padded with `Split(size, n).pad(x, -1)`; each IPU holds (N.., ceil(V/n)). Any real
            dtype, or bool.
        size: V, without padding. Padding is not read and never chosen.
        axis: the mesh axis.

    Returns:
        (N..) int32, the same on all IPUs: the column, in [0, size). If columns tie, the lowest column is returned. NaN
        counts as the largest value.

    Raises:
        ValueError: `x_shard` is not real, does not fit `size` or is replicated over several IPUs, or the enclosing
            shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> best = jax.shard_map(partial(argmax, size=3), mesh=mesh, in_specs=P(None, "ipu"), out_specs=P())
        >>> x_NV = jnp.array([[1, 2, 3, 9], [5, 5, 4, 9]])  # 3 columns and one of padding
        >>> print(jax.jit(best)(x_NV))
        [2 0]
    """
    x_shard = array("x_shard", x_shard)
    split = split_of_ordered("x_shard", x_shard, size, axis)
    return sharded_argmax(widened(x_shard), split, axis)


def top_k(x_shard: jax.Array, k: int, *, size: int, axis: str = "ipu") -> tuple[jax.Array, jax.Array]:
    """Return `lax.top_k` over a last dim that is split over the IPUs of `axis`.

    Forward: one all-gather of 2 min(k, ceil(V/n)) numbers per token, with values widened to at least 32 bits.
    Backward: under check_vma=True nothing, as each IPU keeps the gradients of its own columns; under check_vma=False
    one all-reduce of the values' cotangent, (N.., k). Forward-mode derivatives: one all-reduce of (N.., k).

    Args:
        x_shard: (N.., V) globally, padded with `Split(size, n).pad(x, -1)`; each IPU holds (N.., ceil(V/n)). Any real
            dtype, or bool.
        k: how many columns, from 1 to `size`. It can be larger than the number of columns on one IPU.
        size: V, without padding. Padding is not read and never chosen, and its gradient is zero.
        axis: the mesh axis.

    Returns:
        The k largest values, largest first, (N.., k) in the dtype of `x_shard`; and their columns, (N.., k) int32 in
        [0, size). Both are the same on all IPUs. If columns tie, the lower one comes first. NaN counts as the largest
        value, whatever its sign bit (`lax.top_k` puts NaN last if its sign bit is set), and 0 as larger than -0.

    Raises:
        ValueError: `k` is not an int from 1 to `size`; `x_shard` is not real, does not fit `size` or is replicated over
            several IPUs; or the enclosing shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> best = jax.shard_map(partial(top_k, k=2, size=3), mesh=mesh, in_specs=P(None, "ipu"), out_specs=P())
        >>> values_NK, columns_NK = jax.jit(best)(jnp.array([[1, 2, 3, 9]]))  # 3 columns and one of padding
        >>> print(values_NK, columns_NK)
        [[3 2]] [[2 1]]
    """
    x_shard = array("x_shard", x_shard)
    split = split_of_ordered("x_shard", x_shard, size, axis)
    k = whole_number("k", k, at_least=1, at_most=split.size)
    values_NK, columns_NK = sharded_top_k(widened(x_shard), k, split, axis)
    values_NK = values_NK.astype(x_shard.dtype)
    if jnp.issubdtype(x_shard.dtype, jnp.floating):
        # A custom rule's result must vary over the same axes as its tangent, but without any tokens the result of
        # jnp.where varies over no axis.
        values_NK = as_varying(values_NK, varying_axes(x_shard) - {axis})
        values_NK = _with_derivative(x_shard, values_NK, columns_NK, split, axis)
    return values_NK, columns_NK


def sharded_argmax(x_NV: jax.Array, split: Split, axis: str) -> jax.Array:
    """Return the column of the largest value, (N..), like `argmax`. The values must be `widened`."""
    x_NV = mask_padding(lax.stop_gradient(x_NV), -1, split, axis, fill=_lowest(x_NV.dtype))
    columns_N = split.offset(lax.axis_index(axis)) + jnp.argmax(x_NV, -1).astype(jnp.int32)
    values_nN, columns_nN = _gather_candidates(x_NV.max(-1), columns_N, axis)
    # If shards tie, the first one has the lowest column. Padding is in the last columns, so it loses every tie.
    return jnp.take_along_axis(columns_nN, jnp.argmax(values_nN, 0)[None], axis=0)[0]


def sharded_top_k(x_NV: jax.Array, k: int, split: Split, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return the k largest values and their columns, (N.., k), like `top_k`. The values must be `widened`.

    The results have no derivative.
    """
    x_NV = lax.stop_gradient(x_NV)
    if jnp.issubdtype(x_NV.dtype, jnp.floating):
        # lax.top_k puts NaN first or last depending on its sign bit, and last would be after the padding.
        x_NV = jnp.where(jnp.isnan(x_NV), jnp.nan, x_NV)
    x_NV = mask_padding(x_NV, -1, split, axis, fill=_lowest(x_NV.dtype))
    values_NK, columns_NK = lax.top_k(x_NV, min(k, split.local))
    columns_NK = split.offset(lax.axis_index(axis)) + columns_NK.astype(jnp.int32)
    # The candidates are concatenated in the order of their shards, so that the lower column of equal values still comes
    # first.
    values_NK, columns_NK = (
        jnp.moveaxis(gathered, 0, -2).reshape(*x_NV.shape[:-1], split.parts * values_NK.shape[-1])
        for gathered in _gather_candidates(values_NK, columns_NK, axis)
    )
    values_NK, places_NK = lax.top_k(values_NK, k)
    return values_NK, jnp.take_along_axis(columns_NK, places_NK, axis=-1)


def _gather_candidates(values: jax.Array, columns: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return the values (of 32 or 64 bits) and columns of all IPUs, each (n, ..). One all-gather sends their bits."""
    carrier = jnp.int32 if values.dtype.itemsize == 4 else jnp.int64
    pair = jnp.stack([lax.bitcast_convert_type(values, carrier), columns.astype(carrier)])
    pairs = gather_to_all(pair, axis)
    return lax.bitcast_convert_type(pairs[:, 0], values.dtype), pairs[:, 1].astype(jnp.int32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _with_derivative(
    x_NV: jax.Array, values_NK: jax.Array, columns_NK: jax.Array, split: Split, axis: str
) -> jax.Array:
    """Return `values_NK`, which equal x_NV[.., columns_NK], with the derivative of that expression.

    The values themselves were gathered as bits, which have no derivative.
    """
    return values_NK


@_with_derivative.defjvp
def _with_derivative_jvp(split: Split, axis: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x_NV, values_NK, columns_NK = primals
    rows_NK = local_rows(columns_NK, split, axis)
    dvalues_NK = jnp.take_along_axis(tangents[0], rows_NK, axis=-1, mode="fill", fill_value=0)
    # Not `values_NK` itself: a second derivative differentiates this result, which must depend on `x_NV`.
    return _with_derivative(x_NV, values_NK, columns_NK, split, axis), reduce_to_all(dvalues_NK, axis)


def split_of_ordered(name: str, x_shard: jax.Array, size: int, axis: str) -> Split:
    """Return the `Split` of the last dim of `x_shard`.

    Raises:
        ValueError: the values have no order, or are not a shard that fits `size`.
    """
    split = split_over(size, axis)
    if not any(jnp.issubdtype(x_shard.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"{name} has dtype {x_shard.dtype}, which has no order: give real numbers")
    check_shard(name, x_shard, -1, split, axis)
    return split


def widened(x: jax.Array) -> jax.Array:
    """Return `x` with at least 32 bits per element. The conversion is exact and keeps the order."""
    if x.dtype.itemsize >= 4:
        return x
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _lowest(dtype: Any) -> float:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else int(jnp.iinfo(dtype).min)

"""Iterate over tiles of tokens by columns, and multiply them: shared by both modes of `linear_cross_entropy`.

Padding of the table can be NaN, and so can the rows of tokens that don't count: neither reaches a product here.

Dims: N tokens, D features, V rows of the shard; C columns of a tile.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops.losses._statistics import Terms, shard_start

_Carry = TypeVar("_Carry")


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The size of a tile: tokens, and columns of the shard. The last tiles can have fewer tokens or columns."""

    tokens: int
    columns: int


def for_chunks(extent: int, chunk: int, body: Callable[[Any, int, _Carry], _Carry], carry: _Carry) -> _Carry:
    """Run `carry = body(start, width, carry)` for each chunk of the extent, and return the last carry.

    The last chunk can be smaller than `chunk`.
    """
    full, rest = divmod(extent, chunk)
    if full == 1:
        carry = body(0, chunk, carry)
    elif full:
        carry = lax.fori_loop(0, full, lambda k, carry: body(k * chunk, chunk, carry), carry)
    return body(full * chunk, rest, carry) if rest else carry


def counted_tokens(chunk_ND: jax.Array, labels_N: jax.Array) -> jax.Array:
    """Return a chunk's tokens, with 0 for tokens that don't count.

    Their dlogits are zero, but the tokens themselves can be NaN, and NaN times zero is NaN.
    """
    return jnp.where((labels_N < 0)[:, None], 0, chunk_ND)


def table_rows(table_VD: jax.Array, column: Any, columns: int, terms: Terms) -> jax.Array:
    """Return the table's rows of a tile, with 0 for padding. Padding can be NaN, and NaN times zero dlogits is NaN."""
    tile_CD = lax.dynamic_slice_in_dim(table_VD, column, columns)
    if not terms.split.padding:
        return tile_CD
    is_real_C = shard_start(terms) + column + jnp.arange(columns) < terms.split.size
    return jnp.where(is_real_C[:, None], tile_CD, 0)


def logits(hidden_ND: jax.Array, tile_CD: jax.Array, bias_C: jax.Array | None) -> jax.Array:
    """Return the raw logits of a tile, (N, C), in float32 for half types."""
    wide = jnp.promote_types(hidden_ND.dtype, jnp.float32)
    logits_NC = lax.dot_general(hidden_ND, tile_CD, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    return logits_NC if bias_C is None else logits_NC + bias_C.astype(wide)


def bias_tile(bias_V: jax.Array | None, column: Any, columns: int) -> jax.Array | None:
    """Return the bias of a tile's columns, (C,); None without a bias."""
    return None if bias_V is None else lax.dynamic_slice_in_dim(bias_V, column, columns)


def in_range(dlogits: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | float]:
    """Return dlogits times a scale, in `dtype`, and the scale. The caller must divide products with dlogits by it.

    In float16, dlogits as small as 1/V times a weight of 1/N would be rounded to 0. So they are first scaled up as far
    as float16 allows. The scale is 1 for other dtypes.
    """
    if not is_narrow(dtype):
        return dlogits.astype(dtype), 1.0
    largest = jnp.where(jnp.isfinite(dlogits), jnp.abs(dlogits), 0).max(initial=0)
    # The 1e-30 keeps the scale finite where all dlogits are 0.
    scale = lax.stop_gradient(float(jnp.finfo(dtype).max) / 4 / jnp.maximum(largest, 1e-30))
    return (dlogits * scale).astype(dtype), scale


def is_narrow(dtype: jnp.dtype) -> bool:
    """Return whether small float32 numbers become 0 in this dtype: true for float16, but not for bfloat16."""
    return bool(jnp.finfo(dtype).tiny > jnp.finfo(jnp.float32).tiny)


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))

"""Multiply by the transpose of a table that is split by rows over the IPUs of a mesh axis, without transposing it.

Dims: N tokens (any number of leading dims), V rows of the table, D features; n IPUs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._arguments import array
from sharded_ops._collectives import as_varying, axes_of_rule, check_same_on_all
from sharded_ops._matmul import accumulator, check_floating, contract_tokens
from sharded_ops._split import Split, check_shard, mask_padding, split_over


def tied_projection(hidden: jax.Array, table: jax.Array, *, size: int, axis: str = "ipu") -> jax.Array:
    """Return `hidden @ table.T`, with the table split by rows over the IPUs of `axis`, as `embedding` takes it.

    The table is neither transposed nor copied in memory, except that with padding, the backward pass makes a masked
    copy of the shard for dhidden. `log_softmax_cross_entropy` takes these logits as they are.

    Forward: sends nothing. Backward: one all-reduce of dhidden, (N.., D) in the dtype of `hidden`; under
    check_vma=False it is done where the `shard_map` is differentiated (see the module `_collectives`). Only
    reverse-mode derivatives are supported.

    Half types accumulate in float32, forward and backward, and are rounded once.

    Args:
        hidden: (N.., D) on all IPUs, floating.
        table: (V, D) globally, padded with `Split(size, n).pad(table, 0)`; each IPU holds (ceil(V/n), D). Floating; if
            its dtype is narrower than `hidden`'s, a widened copy is made first.
        size: V, without padding. Padding is never read, and its gradient is zero.
        axis: the mesh axis.

    Returns:
        (N.., V) globally, each IPU holds (N.., ceil(V/n)), in the dtype that `hidden` and `table` promote to. The
        columns of padded rows are zeros.

    Raises:
        ValueError: shapes or dtypes don't fit together, the shard does not fit `size` or is replicated over several
            IPUs, `hidden` differs between IPUs, or the enclosing shard_map has no axis `axis`.

    Source: Press and Wolf 2017, arXiv:1608.05859, for the tied weights; Shoeybi et al. 2019, arXiv:1909.08053, for the
    split by rows.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> hidden_ND, table_VD = jnp.array([[1.0, 10.0]]), jnp.arange(8.0).reshape(4, 2)
        >>> op = partial(tied_projection, size=4)
        >>> project = jax.shard_map(op, mesh=mesh, in_specs=(P(), P("ipu", None)), out_specs=P(None, "ipu"))
        >>> print(jax.jit(project)(hidden_ND, table_VD))
        [[10. 32. 54. 76.]]
    """
    split = split_over(size, axis)
    hidden, table = array("hidden", hidden), array("table", table)
    check_floating(hidden=hidden, table=table)
    if hidden.ndim < 1 or table.ndim != 2 or hidden.shape[-1] != table.shape[1]:
        raise ValueError(
            f"hidden of shape {hidden.shape} and table of shape {table.shape} on each IPU: they must be (.., D) and "
            f"(V/n, D), with the same D: shard dim 0 of the table, and nothing else"
        )
    check_shard("table", table, 0, split, axis)
    check_same_on_all("hidden", hidden, axis)
    dtype = jnp.promote_types(hidden.dtype, table.dtype)
    axes = axes_of_rule(axis, hidden, table)
    hidden_ND, table_VD = as_varying(hidden.astype(dtype), axes), as_varying(table.astype(dtype), axes)
    return mask_padding(_tied_dot(hidden_ND, table_VD, split, axis), -1, split, axis, fill=0).astype(dtype)


# A custom rule, because lax's rule would keep a masked copy of the table from the forward pass until the backward pass.
# Only dhidden sums over rows of the table, so only dhidden must not read padding.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _tied_dot(hidden_ND: jax.Array, table_VD: jax.Array, split: Split, axis: str) -> jax.Array:
    contracted = (((hidden_ND.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(hidden_ND, table_VD, contracted, preferred_element_type=accumulator(hidden_ND.dtype))


def _tied_dot_forward(
    hidden_ND: jax.Array, table_VD: jax.Array, split: Split, axis: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _tied_dot(hidden_ND, table_VD, split, axis), (hidden_ND, table_VD)


def _tied_dot_backward(
    split: Split, axis: str, operands: tuple[jax.Array, jax.Array], dy_NV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    hidden_ND, table_VD = operands
    dy_NV = dy_NV.astype(hidden_ND.dtype)  # exact, for the reason given in _matmul._half_dot_backward
    masked_VD = mask_padding(table_VD, 0, split, axis, fill=0)
    dhidden_ND = jnp.matmul(dy_NV, masked_VD, preferred_element_type=accumulator(dy_NV.dtype))
    return dhidden_ND.astype(hidden_ND.dtype), contract_tokens(dy_NV, hidden_ND)


_tied_dot.defvjp(_tied_dot_forward, _tied_dot_backward)

"""Compute softmax over a last dim that is split over the IPUs of a mesh axis.

No IPU ever holds a whole row of logits. Each IPU reduces its own columns to two floats per token: their largest logit,
and the log-sum-exp relative to it. One all-gather brings these to all IPUs, and each IPU finishes on its own.

Dims: N tokens (any number of leading dims), V columns; n IPUs.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._arguments import array
from sharded_ops._collectives import gather_to_all
from sharded_ops._split import Split, check_shard, mask_padding, split_over


def log_softmax(logits_shard: jax.Array, *, size: int, axis: str = "ipu") -> jax.Array:
    """Return `jax.nn.log_softmax` over a last dim that is split over the IPUs of `axis`.

    Forward: one all-gather of 2 floats per token. Backward: one all-reduce of 1 float per token under check_vma=True;
    one reduce-scatter that leaves 2 floats per token on each IPU under check_vma=False.

    Args:
        logits_shard: (N.., V) globally, padded with `Split(size, n).pad(logits, -1)`; each IPU holds (N.., ceil(V/n)).
            Any floating dtype; half types are computed in float32.
        size: V, without padding. Padding is not read, does not enter the denominator, and its gradient is zero.
        axis: the mesh axis.

    Returns:
        (N.., V) globally, each IPU holds (N.., ceil(V/n)), in the dtype of `logits_shard`. Padding comes out as -inf,
        the logarithm of its probability.

    Raises:
        ValueError: the logits are not floating, their shard does not fit `size` or is replicated over several IPUs, or
            the enclosing shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(log_softmax, size=3)
        >>> sharded = jax.shard_map(op, mesh=mesh, in_specs=P(None, "ipu"), out_specs=P(None, "ipu"))
        >>> logits_NV = jnp.log(jnp.array([[1.0, 2.0, 1.0, 99.0]]))  # 3 columns and one of padding
        >>> print(jnp.exp(jax.jit(sharded)(logits_NV)))
        [[0.25 0.5  0.25 0.  ]]
    """
    logits_shard = array("logits_shard", logits_shard)
    split = checked_split(logits_shard, size, axis)
    logits_NV = logits_shard.astype(jnp.promote_types(logits_shard.dtype, jnp.float32))
    logits_NV = mask_padding(logits_NV, -1, split, axis, fill=-jnp.inf)
    top_N, log_sum_N = top_and_log_sum(logits_NV, dim=-1)
    # two floats per token from each of n shards
    parts_n2N = gather_to_all(jnp.stack([top_N, log_sum_N]), axis)
    tops_nN, log_sums_nN = parts_n2N[:, 0], parts_n2N[:, 1]
    base_N = lax.stop_gradient(finite(tops_nN.max(0)))
    log_total_N = log_sum_exp(tops_nN - base_N + log_sums_nN)
    log_p_NV = (logits_NV - base_N[..., None]) - log_total_N[..., None]
    # Masked once more, so that the cotangent of padding does not reach the denominator.
    return mask_padding(log_p_NV, -1, split, axis, fill=-jnp.inf).astype(logits_shard.dtype)


def softmax(logits_shard: jax.Array, *, size: int, axis: str = "ipu") -> jax.Array:
    """Return `jax.nn.softmax` over a last dim that is split over the IPUs of `axis`: the exponential of `log_softmax`.

    Forward and backward send what `log_softmax` sends.

    Args:
        logits_shard: (N.., V) globally, padded with `Split(size, n).pad(logits, -1)`; each IPU holds (N.., ceil(V/n)).
            Any floating dtype; half types are computed in float32.
        size: V, without padding. Padding is not read, does not enter the denominator, and its gradient is zero.
        axis: the mesh axis.

    Returns:
        (N.., V) globally, each IPU holds (N.., ceil(V/n)), in the dtype of `logits_shard`. Padding comes out as 0.

    Raises:
        ValueError: as for `log_softmax`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> sharded = jax.shard_map(
        ...     partial(softmax, size=3), mesh=mesh, in_specs=P(None, "ipu"), out_specs=P(None, "ipu")
        ... )
        >>> print(jax.jit(sharded)(jnp.log(jnp.array([[1.0, 2.0, 1.0, 99.0]]))))  # 3 columns and one of padding
        [[0.25 0.5  0.25 0.  ]]
    """
    logits_shard = array("logits_shard", logits_shard)
    checked_split(logits_shard, size, axis)
    wide = jnp.promote_types(logits_shard.dtype, jnp.float32)
    return jnp.exp(log_softmax(logits_shard.astype(wide), size=size, axis=axis)).astype(logits_shard.dtype)


def checked_split(logits_shard: jax.Array, size: int, axis: str) -> Split:
    """Return the `Split` of the logits' last dim.

    Raises:
        ValueError: the logits are not floating, or are not a shard that fits `size`.
    """
    split = split_over(size, axis)
    check_floating_logits(logits_shard)
    check_shard("logits_shard", logits_shard, -1, split, axis)
    return split


def check_floating_logits(logits_shard: jax.Array) -> None:
    """Raise a `ValueError` for logits that are not floating."""
    if not jnp.issubdtype(logits_shard.dtype, jnp.floating):
        raise ValueError(
            f"logits_shard has dtype {logits_shard.dtype}, but logits must be floating: convert them first"
        )


def top_and_log_sum(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Return the largest entry t along `dim`, and log(sum(exp(x - t))): both are -inf if all of x is -inf.

    Only the second result is differentiable. It needs both `where`s: log(0) must not be computed even in the branch
    that is not taken. Its derivative, inf, would be multiplied by zero in the transposed `where`, which gives NaN. If
    `x` contains NaN, so do the results.
    """
    top = lax.stop_gradient(x).max(dim)
    total = jnp.exp(x - jnp.expand_dims(finite(top), dim)).sum(dim)
    empty = total == 0
    return top, jnp.where(empty, -jnp.inf, jnp.log(jnp.where(empty, 1, total)))


def log_sum_exp(x_nN: jax.Array) -> jax.Array:
    """Return log(sum(exp(x))) over the shards."""
    top_N, log_sum_N = top_and_log_sum(x_nN, dim=0)
    return finite(top_N) + log_sum_N


def finite(x: jax.Array) -> jax.Array:
    """Return `x` with 0 in place of -inf, so that subtracting it never computes inf - inf."""
    return jnp.where(x == -jnp.inf, 0, x)

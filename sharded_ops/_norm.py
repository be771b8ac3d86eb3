"""Normalise over a last dim that is split over the IPUs of a mesh axis.

Each IPU reduces its own columns to one or two floats per token, one collective combines these into the statistics of
the whole row on all IPUs, and each IPU finishes on its own.

    rms_norm     each IPU's sum of squares                        one all-reduce of 1 float per token
    layer_norm   each IPU's mean m, and its sum M of (x - m)^2    one all-gather of 2 floats per token

layer_norm combines the gathered floats like Chan et al. (Updating formulae and a pairwise algorithm for computing
sample variances, 1979, equation 2.1), here for n parts of c columns each:

    mean = sum(c * m) / D        variance = (sum(M) + sum(c * (m - mean)^2)) / D

Unlike E[x^2] - E[x]^2, this never subtracts squares of large means. With a mean of 1e4 and a deviation of 1, that
subtraction would lose every digit of float32.

Everything is plain lax, so derivatives of any order and in either mode are supported.

Dims: N tokens (any number of leading dims), D columns; n IPUs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharded_ops._arguments import array, real_number
from sharded_ops._collectives import as_varying_over, gather_to_all, reduce_to_all
from sharded_ops._split import Split, check_shard, mask_padding, split_over


def rms_norm(
    x_shard: jax.Array,
    scale_shard: jax.Array | None,
    *,
    size: int,
    axis: str = "ipu",
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
) -> jax.Array:
    """Return `x / sqrt(mean(x^2) + epsilon) * (scale_offset + scale)`, over a last dim that is split over the IPUs.

    Forward: one all-reduce of 1 float per token. Backward: one all-reduce of 1 float per token.

    Args:
        x_shard: (N.., D) globally, padded with `Split(size, n).pad(x, -1)`; each IPU holds (N.., ceil(D/n)). Any
            floating dtype; half types are computed in float32 and rounded once.
        scale_shard: (D,) globally, padded and split like `x`; each IPU holds (ceil(D/n),). Floating. None for no scale.
        size: D, without padding. Padding is neither read nor counted, and its gradient is zero.
        axis: the mesh axis.
        epsilon: added to the mean of squares, at least 0.
        scale_offset: added to the scale, in float32 at least: 1 for the scales of Gemma, which are trained around 0.

    Returns:
        (N.., D) globally, each IPU holds (N.., ceil(D/n)), in the dtype of `x_shard`. Padding comes out as zeros, and
        its cotangent is not read.

    Raises:
        ValueError: an array is not floating, a shard does not fit `size` or is replicated over several IPUs, `epsilon`
            is not a number of at least 0, `scale_offset` is not a number or is given without a scale, or the enclosing
            shard_map has no axis `axis`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(rms_norm, size=2, epsilon=0.0)
        >>> sharded = jax.shard_map(op, mesh=mesh, in_specs=(P(None, "ipu"), P("ipu")), out_specs=P(None, "ipu"))
        >>> print(jax.jit(sharded)(jnp.array([[1.0, 7.0]]), jnp.array([5.0, 10.0])))  # the root mean square is 5
        [[ 1. 14.]]
    """
    split, epsilon = split_over(size, axis), real_number("epsilon", epsilon, at_least=0)
    x_shard = array("x_shard", x_shard)
    x_ND = _masked_columns("x_shard", x_shard, split, axis)
    scale_D = _scale(scale_shard, scale_offset, x_ND, split, axis)
    mean_square_N = reduce_to_all(jnp.square(x_ND).sum(-1), axis) / split.size
    y_ND = x_ND * lax.rsqrt(mean_square_N + epsilon)[..., None]
    return _finish(y_ND if scale_D is None else y_ND * scale_D, x_shard, split, axis)


def layer_norm(
    x_shard: jax.Array,
    scale_shard: jax.Array | None,
    bias_shard: jax.Array | None = None,
    *,
    size: int,
    axis: str = "ipu",
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
) -> jax.Array:
    """Return `(x - mean(x)) / sqrt(var(x) + epsilon) * (scale_offset + scale) + bias` over a split last dim.

    Forward: one all-gather of 2 floats per token. Backward: one all-reduce of 2 floats per token under check_vma=True;
    one reduce-scatter that leaves 2 floats per token on each IPU under check_vma=False.

    The result is as exact as the mean, which is a float32. A row whose mean is k deviations away from zero gets an
    error of about k * 2**-24, as large as the error from rounding `x` itself.

    Args:
        x_shard: (N.., D) globally, padded with `Split(size, n).pad(x, -1)`; each IPU holds (N.., ceil(D/n)). Any
            floating dtype; half types are computed in float32 and rounded once.
        scale_shard: (D,) globally, padded and split like `x`; each IPU holds (ceil(D/n),). Floating. None for no scale.
        bias_shard: as `scale_shard`, or None.
        size: D, without padding. Padding is neither read nor counted, and its gradient is zero.
        axis: the mesh axis.
        epsilon: added to the variance, at least 0.
        scale_offset: added to the scale, in float32 at least, such as 1 for scales that are trained around 0.

    Returns:
        (N.., D) globally, each IPU holds (N.., ceil(D/n)), in the dtype of `x_shard`. Padding comes out as zeros, and
        its cotangent is not read.

    Raises:
        ValueError: an array is not floating, a shard does not fit `size` or is replicated over several IPUs, `epsilon`
            is not a number of at least 0, `scale_offset` is not a number or is given without a scale, or the enclosing
            shard_map has no axis `axis`.

    Source: Ba et al. 2016, arXiv:1607.06450.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(layer_norm, size=2, epsilon=0.0)
        >>> sharded = jax.shard_map(op, mesh=mesh, in_specs=(P(None, "ipu"), P("ipu")), out_specs=P(None, "ipu"))
        >>> print(jax.jit(sharded)(jnp.array([[4.0, 8.0]]), jnp.array([1.0, 10.0])))  # the mean is 6, the deviation 2
        [[-1. 10.]]
    """
    split, epsilon = split_over(size, axis), real_number("epsilon", epsilon, at_least=0)
    x_shard = array("x_shard", x_shard)
    x_ND = _masked_columns("x_shard", x_shard, split, axis)
    scale_D = _scale(scale_shard, scale_offset, x_ND, split, axis)
    mean_N, variance_N = _mean_and_variance(x_ND, split, axis)
    y_ND = (x_ND - mean_N[..., None]) * lax.rsqrt(variance_N + epsilon)[..., None]
    if scale_D is not None:
        y_ND = y_ND * scale_D
    if bias_shard is not None:
        y_ND = y_ND + _per_column("bias_shard", bias_shard, x_ND, split, axis)
    return _finish(y_ND, x_shard, split, axis)


def _mean_and_variance(x_ND: jax.Array, split: Split, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return the mean and the variance of each row over all IPUs, without padding. Forward: one all-gather."""
    counts_n = np.array([split.count(index) for index in range(split.parts)], x_ND.dtype)
    # An IPU with nothing but padding divides zero by one, and has a weight of zero in the sums over the IPUs.
    count = jnp.maximum(jnp.asarray(counts_n)[lax.axis_index(axis)], 1)

    # The sum of many columns with a large mean is large, and so is its rounding error. So the mean is computed in two
    # passes. The derivatives of the second pass are exact, whatever the result of the first pass is. That result is
    # used twice, and XLA computes its quotient again for each use. Without the clamp, XLA would fuse the unrounded
    # quotient into the subtraction and the addition (fused multiply-add).
    largest = jnp.finfo(x_ND.dtype).max
    rough_N = lax.stop_gradient(lax.clamp(-largest, x_ND.sum(-1) / count, largest))
    mean_N = rough_N + _sum_without_padding(x_ND - rough_N[..., None], split, axis) / count
    squares_N = _sum_without_padding(jnp.square(x_ND - mean_N[..., None]), split, axis)

    # two floats per token from each of n shards
    parts_n2N = gather_to_all(jnp.stack([mean_N, squares_N]), axis)
    means_nN, squares_nN = parts_n2N[:, 0], parts_n2N[:, 1]
    # Multiplied and summed rather than computed with a dot, whose operands a GPU or TPU may round.
    weights_nN = jnp.asarray(counts_n / split.size).reshape(-1, *(1,) * mean_N.ndim)
    # Computed relative to the first shard's mean, for the same reason as above. The first shard always has a column
    # that is not padding.
    base_N = lax.stop_gradient(means_nN[0])
    mean_N = base_N + (weights_nN * (means_nN - base_N)).sum(0)
    between_N = (weights_nN * jnp.square(means_nN - mean_N)).sum(0)
    row_2N = jnp.stack([mean_N, squares_nN.sum(0) / split.size + between_N])
    # Stacked, so that under check_vma=True the backward pass has one all-reduce rather than two.
    mean_N, variance_N = as_varying_over(row_2N, axis)
    return mean_N, variance_N


def _sum_without_padding(x_ND: jax.Array, split: Split, axis: str) -> jax.Array:
    return mask_padding(x_ND, -1, split, axis, fill=0).sum(-1)


def _masked_columns(name: str, shard: jax.Array, split: Split, axis: str) -> jax.Array:
    """Return the shard in float32 (float64 if it is in float64), with zeros for padding, typed as varying."""
    if not jnp.issubdtype(shard.dtype, jnp.floating):
        raise ValueError(f"{name} has dtype {shard.dtype}, but norms take floating arrays: convert it first")
    check_shard(name, shard, -1, split, axis)
    wide = shard.astype(jnp.promote_types(shard.dtype, jnp.float32))
    return as_varying_over(mask_padding(wide, -1, split, axis, fill=0), axis)


def _scale(scale_shard: jax.Array | None, offset: float, x_ND: jax.Array, split: Split, axis: str) -> jax.Array | None:
    """Return the factor of each column, typed as varying; None without a scale."""
    offset = real_number("scale_offset", offset)
    if scale_shard is not None:
        scale_D = _per_column("scale_shard", scale_shard, x_ND, split, axis)
        return scale_D + offset if offset else scale_D
    if offset:
        raise ValueError(f"scale_offset={offset} is added to a scale, but scale_shard is None: leave it out")
    return None


def _per_column(name: str, shard: jax.Array, x_ND: jax.Array, split: Split, axis: str) -> jax.Array:
    """Return a scale or bias in the dtype of `x_ND`, with zeros for padding, typed as varying."""
    shard = array(name, shard)
    if shard.ndim != 1:
        raise ValueError(f"{name} has shape {shard.shape} on each IPU, but must have 1 dim: one value for each column")
    return _masked_columns(name, shard, split, axis).astype(x_ND.dtype)


def _finish(y_ND: jax.Array, x_shard: jax.Array, split: Split, axis: str) -> jax.Array:
    """Return `y_ND` in the dtype of the input, masked so that no cotangent of padding reaches the other columns."""
    return mask_padding(y_ND, -1, split, axis, fill=0).astype(x_shard.dtype)

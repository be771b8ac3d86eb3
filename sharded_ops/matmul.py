"""A matmul whose weight is split over the IPUs of a mesh axis, by columns or by rows.

    split="columns"                              split="rows"

          w_DV  [ IPU 0 | IPU 1 ]                                w_DK  [ IPU 0 ]
                                                                       [ IPU 1 ]
    x_ND  [ all ]  ->  y_NV [ IPU 0 | IPU 1 ]    x_ND  [ IPU 0 | IPU 1 ]  ->  y_NK [ sum ]

Column after row is the pair of a sharded MLP (Shoeybi et al. 2019, arXiv:1909.08053, section 3): columns sends nothing
forward, its result is what rows takes, and rows sends nothing backward.

Dims: N tokens (any number of leading dims), D and V or K the weight's rows and columns; n IPUs.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops.collectives import as_varying, reduce_to_all, varying_axes
from sharded_ops.layout import axis_size, check_shard, mask_padding, split_over


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    split: Literal["columns", "rows"] = "columns",
    size: int | None = None,
    axis: str = "ipu",
) -> jax.Array:
    """`x @ w` with `w` split over the IPUs of `axis`.

    split="columns": `x` is (N.., D) on all IPUs, `w` (D, V) globally; each IPU holds (D, V/n). The result is (N.., V)
    globally; each IPU holds (N.., V/n). Forward: sends nothing. Backward: one all-reduce of dx, (N.., D) in the dtype
    of `x`; under check_vma=False it stands where the `shard_map` is differentiated (see `collectives`).

    split="rows": `x` is (N.., D) globally, each IPU holds (N.., D/n); `w` is (D, K) globally, each IPU holds (D/n, K).
    The result is (N.., K) on all IPUs. Forward: one all-reduce of the partial results. Backward: sends nothing under
    check_vma=True; under check_vma=False one all-reduce of the result's cotangent.

    Half types accumulate in float32 and are rounded once: the partial results of split="rows" cross the axis as float32
    and are rounded after the sum. The backward matmuls take half operands and accumulate in float32 as well; dx of
    split="columns" is summed over the IPUs in the dtype of `x`, as its gradient crosses the `shard_map` in that dtype.

    Args:
        x: floating, as said above.
        w: floating, as said above. A dim that n does not divide is padded first: `Split(size, n).pad(w, dim)`.
        split: which dim of `w` is split.
        size: the split dim without its padding (V, or D). When given, padding is neither read nor given a gradient,
            at the cost of a copy of the shard where there is some. Without it padding is multiplied like the rest:
            padded with zeros it does no harm, and under split="columns" the results of padded columns are padding.
        axis: the mesh axis.

    Returns:
        In the dtype that `x` and `w` promote to.

    Raises:
        ValueError: shapes or dtypes that don't go together, an unknown `split`, a shard that does not fit `size`, or an
            `axis` that is not the enclosing shard_map's.

    Example:
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x_ND, w_DV = jnp.ones((1, 3)), jnp.arange(12.0).reshape(3, 4)
        >>> project = jax.shard_map(matmul, mesh=mesh, in_specs=(P(), P(None, "ipu")), out_specs=P(None, "ipu"))
        >>> print(jax.jit(project)(x_ND, w_DV))
        [[12. 15. 18. 21.]]
    """
    if split not in ("columns", "rows"):
        raise ValueError(f"split={split!r} is no way to split a weight: use 'columns' or 'rows'")
    axis_size(axis)  # refuses an unknown axis, which split="columns" would never come to use
    _check_operands(x, w)
    if size is not None:
        split_size = split_over(size, axis)
        dim = 1 if split == "columns" else 0
        check_shard("w", w, dim, split_size, axis)
        w = mask_padding(w, dim, split_size, axis, fill=0)
        if split == "rows":
            x = mask_padding(x, -1, split_size, axis, fill=0)
    dtype = jnp.promote_types(x.dtype, w.dtype)
    partial = _dot(x.astype(dtype), w.astype(dtype))
    return (partial if split == "columns" else reduce_to_all(partial, axis)).astype(dtype)


def _check_operands(x: jax.Array, w: jax.Array) -> None:
    for name, operand in (("x", x), ("w", w)):
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {operand.dtype}, but matmul takes floating operands: convert it first")
    if x.ndim < 1 or w.ndim != 2:
        raise ValueError(
            f"x of shape {x.shape} and w of shape {w.shape}: x must have at least 1 dim, and w 2: reshape them to "
            f"(.., D) and (D, V)"
        )
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"x of shape {x.shape} and w of shape {w.shape} on each IPU: the last dim of x and dim 0 of w must agree, "
            f"so shard dim 0 of w exactly if the last dim of x is sharded (split='rows')"
        )


def _dot(x_ND: jax.Array, w_DV: jax.Array) -> jax.Array:
    """This IPU's product: in float32 for half types, else in the operands' dtype."""
    if x_ND.dtype.itemsize > 2:
        return jnp.matmul(x_ND, w_DV)
    # A custom rule needs operands that vary alike; what that adds is a psum in the rule's transpose, as lax would.
    axes = varying_axes(x_ND) | varying_axes(w_DV)
    return _half_dot(as_varying(x_ND, axes), as_varying(w_DV, axes))


# Its own rule, because lax's would multiply the float32 cotangent with half operands, which jax lowers, on CPU and GPU,
# to matmuls wholly in float32 and a float32 copy of each operand.
@jax.custom_vjp
def _half_dot(x_ND: jax.Array, w_DV: jax.Array) -> jax.Array:
    return jnp.matmul(x_ND, w_DV, preferred_element_type=jnp.float32)


def _half_dot_forward(x_ND: jax.Array, w_DV: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _half_dot(x_ND, w_DV), (x_ND, w_DV)


def _half_dot_backward(operands: tuple[jax.Array, jax.Array], dy_NV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, w_DV = operands
    # Nothing is lost: the result was rounded to this dtype, so its cotangent came from it.
    dy_NV = dy_NV.astype(x_ND.dtype)
    dx_ND = jnp.matmul(dy_NV, w_DV.T, preferred_element_type=jnp.float32)
    tokens = tuple(range(x_ND.ndim - 1))
    dw_DV = lax.dot_general(x_ND, dy_NV, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)
    return dx_ND.astype(x_ND.dtype), dw_DV.astype(w_DV.dtype)


_half_dot.defvjp(_half_dot_forward, _half_dot_backward)

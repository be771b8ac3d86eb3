"""Multiply by a weight that is split over the IPUs of a mesh axis, by columns or by rows.

    split="columns"                              split="rows"

          w_DV  [ IPU 0 | IPU 1 ]                                w_DK  [ IPU 0 ]
                                                                       [ IPU 1 ]
    x_ND  [ all ]  ->  y_NV [ IPU 0 | IPU 1 ]    x_ND  [ IPU 0 | IPU 1 ]  ->  y_NK [ sum ]

A sharded MLP is a pair of these, first "columns" and then "rows" (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"columns" sends nothing forward. "rows" takes the split result of "columns" as it is, and sends nothing backward.

Between two such pairs every IPU holds all tokens. In sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2) each IPU holds its own slice of the tokens there. One all-gather and one reduce-scatter, each with half
the traffic of an all-reduce, then replace the all-reduce:

    tokens=N, split="columns"                          split="rows", reduction="scatter"

    x_ND  [ IPU 0 ]  gather                                                              [ IPU 0 ]
          [ IPU 1 ]  ---->  y_NV [ IPU 0 | IPU 1 ]     x_ND  [ IPU 0 | IPU 1 ]  ->  y_NK [ IPU 1 ]

`tied_projection` multiplies by the transpose of a table that is split by rows, without transposing it.

Dims: N tokens (any number of leading dims; the first one is scattered), D rows of the weight, V or K columns; n IPUs.
For `tied_projection`, V rows of the table and D features.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._arguments import array, one_of, whole_number
from sharded_ops._collectives import (
    ON_A_VMAPPED_AXIS,
    as_varying,
    as_varying_over,
    axes_of_rule,
    check_part_of_sum,
    check_same_on_all,
    gather_tokens,
    reduce_scatter_tokens,
    reduce_to_all,
    varying_axes,
)
from sharded_ops._split import Split, axis_size, check_apart, check_shard, mask_padding, split_over


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    split: Literal["columns", "rows"] = "columns",
    size: int | None = None,
    axis: str = "ipu",
    bias: jax.Array | None = None,
    reduction: Literal["sum", "scatter"] = "sum",
    tokens: int | None = None,
) -> jax.Array:
    """Return `x @ w`, or `x @ w + bias`, with `w` split over the IPUs of `axis`.

    split="columns": `x` is (N.., D) on all IPUs, `w` (D, V) and `bias` (V,) globally; each IPU holds (D, V/n) and
    (V/n,). The result is (N.., V) globally; each IPU holds (N.., V/n). Forward: sends nothing. Backward: one all-reduce
    of dx, (N.., D) in the dtype of `x`; under check_vma=False it is done where the `shard_map` is differentiated (see
    the module `_collectives`).

    split="columns", tokens=N: the same, but `x` is (N, .., D) globally, and each IPU holds (ceil(N/n), .., D), as
    `scatter_tokens` returns it. Forward: one all-gather of `x`, whose result is kept for dw; under `jax.checkpoint` it
    is gathered again instead. Backward: one reduce-scatter of dx, (N, .., D) in the dtype of `x`.

    split="rows": `x` is (N.., D) globally, each IPU holds (N.., D/n); `w` is (D, K) globally, each IPU holds (D/n, K);
    `bias` is (K,) on all IPUs and is added once, after the sum. The result is (N.., K) on all IPUs. Forward: one
    all-reduce of the partial results. Backward: sends nothing under check_vma=True; under check_vma=False one
    all-reduce of the result's cotangent, and one all-reduce of dbias where the `shard_map` is differentiated.

    split="rows", reduction="scatter": the same, but the result is (N, .., K) globally, and each IPU holds
    (ceil(N/n), .., K). Forward: one reduce-scatter of the partial results. Backward: one all-gather of the result's
    cotangent, in the result's dtype, and one all-reduce of dbias, (K,), in float32 for half types. Under
    check_vma=False this all-reduce is done where the `shard_map` is differentiated, in the dtype of `bias`.

    If n does not divide N, the tokens are padded to n * ceil(N/n) rows. The padding of a scattered `x` is not read. In
    a scattered result the padding is zeros, with or without a bias, and its cotangent is not read.

    Half types accumulate in float32 and are rounded once: the partial results of split="rows" cross the axis as float32
    and are rounded after the sum and the bias. The backward matmuls take half operands and accumulate in float32 as
    well. dx of split="columns" is summed over the IPUs in the dtype of `x`, because it leaves the `shard_map` in that
    dtype.

    Args:
        x: floating, in the shape given above.
        w: floating, in the shape given above. If n does not divide the split dim, pad it first with
            `Split(size, n).pad(w, dim)`.
        split: which dim of `w` is split.
        size: the size of the split dim without padding (V, or D). If given, padding is not read and gets no gradient;
            if there is padding, this needs a copy of the shard. Without `size`, padding is multiplied like the rest.
            That does no harm if it is zeros, and under split="columns" the results of padded columns are padding again.
        axis: the mesh axis.
        bias: floating, in the shape given above, or None. It does not widen the result.
        reduction: what split="rows" does with the partial results: "sum" leaves their sum on all IPUs, "scatter" leaves
            it split over dim 0.
        tokens: N, if the `x` of split="columns" is scattered over dim 0; None if all IPUs hold the whole `x`.

    Returns:
        The product in the dtype that `x` and `w` promote to, in the shape given above.

    Raises:
        ValueError: shapes or dtypes don't fit together; `split` or `reduction` is unknown; `reduction` or `tokens` does
            not apply to the given split; a shard does not fit `size` or `tokens`; by its type an operand is split where
            it must be whole, or whole where it must be split; or the enclosing shard_map has no axis `axis`.

    Example:
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> x_ND, w_DV = jnp.ones((1, 3)), jnp.arange(12.0).reshape(3, 4)
        >>> project = jax.shard_map(matmul, mesh=mesh, in_specs=(P(), P(None, "ipu")), out_specs=P(None, "ipu"))
        >>> print(jax.jit(project)(x_ND, w_DV))
        [[12. 15. 18. 21.]]
    """
    one_of("split", split, ("columns", "rows"), "is not a way to split a weight")
    axis_size(axis)  # raises for an unknown axis, even though split="columns" may not use it
    x, w = array("x", x), array("w", w)
    bias = None if bias is None else array("bias", bias)
    tokens = None if tokens is None else whole_number("tokens", tokens, at_least=0, instead="None if all IPUs hold x")
    _check_operands(x, w)
    _check_scattering(x, split, reduction, tokens)
    _check_bias(bias, w)
    _check_types(x, w, bias, split, tokens, axis)
    if size is not None:
        x, w, bias = _without_padding(x, w, bias, split, size, axis)
    if tokens is not None:
        split_tokens = split_over(tokens, axis, option="tokens", at_least=0)
        check_shard("x", x, 0, split_tokens, axis, option="tokens")
        # On an axis of one IPU, check_shard accepts an `x` that does not vary over the axis.
        x = as_varying_over(x, axis)
        x = split_tokens.unpad(gather_tokens(x, axis), 0)

    dtype = jnp.promote_types(x.dtype, w.dtype)
    y = _dot(x.astype(dtype), w.astype(dtype))
    if split == "rows":
        y = reduce_to_all(y, axis) if reduction == "sum" else _reduce_scatter(y, dtype, axis)
    if bias is not None:
        y = y + bias.astype(y.dtype)
        if reduction == "scatter":
            y = mask_padding(y, 0, _split_of_tokens(x, axis), axis, fill=0)
    return y.astype(dtype)


def _without_padding(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, split: str, size: int, axis: str
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the operands with 0 in the padding of the split dim. A `w` that does not fit `size` is refused."""
    dim, of_size = 1 if split == "columns" else 0, split_over(size, axis)
    check_shard("w", w, dim, of_size, axis)
    w = mask_padding(w, dim, of_size, axis, fill=0)
    if split == "rows":
        return mask_padding(x, -1, of_size, axis, fill=0), w, bias
    return x, w, None if bias is None else mask_padding(bias, 0, of_size, axis, fill=0)


def _check_floating(**operands: jax.Array) -> None:
    for name, operand in operands.items():
        if not jnp.issubdtype(operand.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {operand.dtype}, but matmul takes floating operands: convert it first")


def _check_operands(x: jax.Array, w: jax.Array) -> None:
    _check_floating(x=x, w=w)
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


def _check_scattering(x: jax.Array, split: str, reduction: str, tokens: int | None) -> None:
    one_of("reduction", reduction, ("sum", "scatter"), "is not a way to leave the result")
    if split == "columns" and reduction == "scatter":
        raise ValueError(
            "reduction='scatter' leaves a sum over the IPUs scattered over tokens, but split='columns' sums nothing: "
            "use split='rows', or tokens=N if x is scattered"
        )
    if split == "rows" and tokens is not None:
        raise ValueError(
            f"tokens={tokens} gathers an x that is scattered over tokens, but split='rows' takes all tokens on each "
            f"IPU: use split='columns', or reduction='scatter' if the result is to be scattered"
        )
    if x.ndim < 2 and (reduction == "scatter" or tokens is not None):
        raise ValueError(f"x has shape {x.shape}, without a dim of tokens to scatter: give (N, .., D)")


def _check_bias(bias: jax.Array | None, w: jax.Array) -> None:
    if bias is None:
        return
    _check_floating(bias=bias)
    if bias.shape != w.shape[1:]:
        raise ValueError(
            f"bias of shape {bias.shape} and w of shape {w.shape} on each IPU: give a bias for each of its "
            f"{w.shape[1]} columns, sharded like them under split='columns', whole under split='rows'"
        )


def _check_types(x: jax.Array, w: jax.Array, bias: jax.Array | None, split: str, tokens: int | None, axis: str) -> None:
    """Raise for an operand that by its type is split where it must be whole, or whole where it must be split."""
    if tokens is None:  # else check_shard checks `x`
        (check_same_on_all if split == "columns" else check_apart)("x", x, axis)
    check_apart("w", w, axis)
    if bias is not None:
        (check_apart if split == "columns" else check_same_on_all)("bias", bias, axis)


def _accumulator(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype to accumulate in: float32 for half types, else the dtype itself."""
    return jnp.dtype(jnp.float32) if dtype.itemsize <= 2 else dtype


def _dot(x_ND: jax.Array, w_DV: jax.Array) -> jax.Array:
    """Return this IPU's product: in float32 for half types, else in the operands' dtype."""
    if x_ND.dtype.itemsize > 2:
        return jnp.matmul(x_ND, w_DV)
    # A custom rule needs operands that vary over the same axes. The transpose of as_varying is a psum over the added
    # axes, which lax would do as well.
    axes = varying_axes(x_ND) | varying_axes(w_DV)
    return _half_dot(as_varying(x_ND, axes), as_varying(w_DV, axes))


# A custom rule, because lax's rule would multiply the float32 cotangent by half operands. On CPU and GPU, jax lowers
# that to matmuls entirely in float32, with a float32 copy of each operand.
@jax.custom_vjp
def _half_dot(x_ND: jax.Array, w_DV: jax.Array) -> jax.Array:
    return jnp.matmul(x_ND, w_DV, preferred_element_type=jnp.float32)


def _half_dot_backward(operands: tuple[jax.Array, jax.Array], dy_NV: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_ND, w_DV = operands
    # Exact: the result was rounded to this dtype, so its cotangent was converted from this dtype.
    dy_NV = dy_NV.astype(x_ND.dtype)
    dx_ND = jnp.matmul(dy_NV, w_DV.T, preferred_element_type=jnp.float32)
    return dx_ND.astype(x_ND.dtype), _contract_tokens(x_ND, dy_NV)


_half_dot.defvjp(lambda x_ND, w_DV: (_half_dot(x_ND, w_DV), (x_ND, w_DV)), _half_dot_backward)


def _contract_tokens(a_NA: jax.Array, b_NB: jax.Array) -> jax.Array:
    """Return the sum of the outer products of all tokens, (A, B), accumulated in float32 for half types."""
    tokens = tuple(range(a_NA.ndim - 1))
    c_AB = lax.dot_general(a_NA, b_NB, ((tokens, tokens), ((), ())), preferred_element_type=_accumulator(a_NA.dtype))
    return c_AB.astype(a_NA.dtype)


def _reduce_scatter(y_NK: jax.Array, dtype: jnp.dtype, axis: str) -> jax.Array:
    """Return `reduce_scatter_tokens(y_NK)`, with a backward pass that gathers the cotangent in `dtype`.

    The result will be rounded to `dtype`.
    """
    if y_NK.dtype == dtype:
        return reduce_scatter_tokens(y_NK, axis)
    check_part_of_sum(y_NK, axis)
    y_NK = as_varying_over(y_NK, axis)
    return _half_reduce_scatter(y_NK, _split_of_tokens(y_NK, axis), dtype, axis)


def _split_of_tokens(x: jax.Array, axis: str) -> Split:
    return split_over(x.shape[0], axis, option="x.shape[0]", at_least=0)


# A custom rule, because lax's rule would gather the cotangent in float32, although it was converted from the half type.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _half_reduce_scatter(y_NK: jax.Array, split: Split, dtype: jnp.dtype, axis: str) -> jax.Array:
    return reduce_scatter_tokens(y_NK, axis)


def _half_reduce_scatter_backward(
    split: Split, dtype: jnp.dtype, axis: str, _: None, dy_NK: jax.Array
) -> tuple[jax.Array]:
    return (split.unpad(gather_tokens(dy_NK.astype(dtype), axis), 0).astype(dy_NK.dtype),)


_half_reduce_scatter.defvjp(
    lambda y_NK, split, dtype, axis: (reduce_scatter_tokens(y_NK, axis), None),
    _half_reduce_scatter_backward,
    **ON_A_VMAPPED_AXIS,
)


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
    _check_floating(hidden=hidden, table=table)
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
    return lax.dot_general(hidden_ND, table_VD, contracted, preferred_element_type=_accumulator(hidden_ND.dtype))


def _tied_dot_backward(
    split: Split, axis: str, operands: tuple[jax.Array, jax.Array], dy_NV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    hidden_ND, table_VD = operands
    dy_NV = dy_NV.astype(hidden_ND.dtype)  # exact, for the reason given in _half_dot_backward
    masked_VD = mask_padding(table_VD, 0, split, axis, fill=0)
    dhidden_ND = jnp.matmul(dy_NV, masked_VD, preferred_element_type=_accumulator(dy_NV.dtype))
    return dhidden_ND.astype(hidden_ND.dtype), _contract_tokens(dy_NV, hidden_ND)


_tied_dot.defvjp(
    lambda hidden_ND, table_VD, *where: (_tied_dot(hidden_ND, table_VD, *where), (hidden_ND, table_VD)),
    _tied_dot_backward,
    **ON_A_VMAPPED_AXIS,
)

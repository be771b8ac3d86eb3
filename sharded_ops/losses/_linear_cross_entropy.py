"""Fuse projection and softmax cross-entropy, so that the logits of all tokens and columns never exist at once.

    hidden_ND (all IPUs)   table_VD (split by rows, as for `embedding`)   labels_N (all IPUs)

    gradients="backward"                                      matmuls
        forward    for each tile: logits, statistics             1
                   one all-gather; loss of each token
        backward   for each tile: logits again, dlogits,         1
                   parts of both gradients                       2

    gradients="forward", the default for a loss that is a sum or a mean
        forward    for each chunk of tokens: logits of all       1
                   columns of the shard, statistics, all-gather,
                   loss, dlogits, and the gradient of hidden;    1
                   for each tile of them a part of the table's   1
        backward   both gradients times the loss's cotangent     0

A tile is `token_chunk` tokens by `column_chunk` columns of the shard; the last tiles can be smaller.

(Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", arXiv:2411.09009, compute the logits twice;
Hsu et al. 2024, "Liger kernel", arXiv:2410.10989, compute the gradients in the forward pass.)

Dims: N tokens, D features, V rows of the table; C columns of a tile; n IPUs.
"""

import math
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sharded_ops._arguments import array, array_like, one_axis, one_of, whole_number
from sharded_ops._collectives import as_varying, axes_of_rule, check_same_on_all, gather_tokens
from sharded_ops._split import Split, check_shard, split_over
from sharded_ops.losses._options import (
    LossOptions,
    OutOfRange,
    Reduction,
    checked_options,
    checked_targets,
    checked_terms,
    checked_weights,
    reduce_losses,
)
from sharded_ops.losses._statistics import Terms
from sharded_ops.losses._token_losses import Chunks, Operands, sum_of_losses, token_losses

# How many logits exist at once: in a tile (2 MiB of float32), and in a chunk of tokens with all the shard's columns
# (8 MiB). Smaller numbers make matmuls slow. If `hidden` is large, larger numbers are used, since they then hardly
# increase the memory in use.
_TILE, _CHUNK = 1 << 19, 1 << 21

# With gradients="forward": the tokens of a chunk with which matmuls are fast on a CPU, the least number of such chunks
# for which this size is used regardless of memory, and the elements of the table's gradient that are added at once
# (4 MiB of float32).
_TOKENS, _MANY_CHUNKS, _TABLE_TILE = 256, 16, 1 << 20


class LinearLossOptions(LossOptions, total=False):
    bias: jax.Array | None
    tokens: int | None
    gradients: Literal["backward", "forward"] | None
    token_chunk: int | None
    column_chunk: int | None


@overload
def linear_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    labels: ArrayLike,
    *,
    return_log_sum_exp: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[LinearLossOptions],
) -> jax.Array: ...


@overload
def linear_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    labels: ArrayLike,
    *,
    return_log_sum_exp: Literal[True],
    return_entropy: bool = False,
    **options: Unpack[LinearLossOptions],
) -> tuple[jax.Array, ...]: ...


@overload
def linear_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    labels: ArrayLike,
    *,
    return_log_sum_exp: bool = False,
    return_entropy: Literal[True],
    **options: Unpack[LinearLossOptions],
) -> tuple[jax.Array, ...]: ...


def linear_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    labels: ArrayLike,
    *,
    size: int,
    bias: jax.Array | None = None,
    tokens: int | None = None,
    axis: str = "ipu",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    out_of_range: OutOfRange = "ignore",
    weights: ArrayLike | None = None,
    reduction: Reduction = "none",
    return_log_sum_exp: bool = False,
    return_entropy: bool = False,
    gradients: Literal["backward", "forward"] | None = None,
    token_chunk: int | None = None,
    column_chunk: int | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Return `log_softmax_cross_entropy(hidden @ table.T + bias, labels)`, without storing all the logits at once.

    Forward: with gradients="backward" one all-gather of 3 floats per token, and of one more with soft targets, and with
    the entropy; with gradients="forward" 3 floats per token, in one all-gather for each chunk of tokens. Backward, in
    both cases: one all-reduce of dhidden, (N.., D) in the dtype of `hidden`; under check_vma=False it is done where the
    `shard_map` is differentiated (see the module `_collectives`). With `tokens`, the forward pass begins with one
    all-gather of `hidden`, and in the backward pass one reduce-scatter of dhidden replaces the all-reduce and sends
    half as much. Under check_vma=False all IPUs must use the loss in the same way, as `log_softmax_cross_entropy`
    explains.

    Reverse mode is supported, and forward mode over reverse mode (`jax.hessian`). jax refuses forward mode alone: for
    that, use `matmul` and `log_softmax_cross_entropy`. Second derivatives keep every tile, so they take at least the
    memory of the logits.

    Args:
        hidden: (N.., D), floating, the same on all IPUs; with `tokens` (N, .., D) globally, scattered over dim 0. The
            row of a token that does not count is not read, except for its log-sum-exp and entropy.
        table: (V, D) globally, padded with `Split(size, n).pad(table, 0)`; each IPU holds (ceil(V/n), D). In the dtype
            of `hidden`. Half types are multiplied as they are and accumulate in float32. In float16, dlogits are first
            scaled to its range, so that small dlogits are not rounded to 0 before a loss scale is applied.
        labels: (N..) of any integer dtype, the same on all IPUs; or soft targets, floating, (N.., V) globally, padded
            and split in the last dim; each IPU holds (N.., ceil(V/n)). Soft targets are differentiable too.
        size: V, without padding. Padding is not read, and its gradient is zero.
        bias: (V,) globally, padded with `Split(size, n).pad(bias, 0)`; each IPU holds (ceil(V/n),). Added to the logits
            before the soft cap, in float32 at least. Any floating dtype. None for no bias.
        tokens: N, if `hidden` is scattered over dim 0, as `scatter_tokens` returns it: each IPU holds
            (ceil(N/n), .., D). Padding is not read. All IPUs still need the labels and weights of all tokens. None if
            all IPUs hold all of `hidden`.
        axis: the mesh axis.
        label_smoothing, z_loss, soft_cap, temperature, ignore_index, out_of_range, weights, reduction: as for
            `log_softmax_cross_entropy`.
        return_log_sum_exp, return_entropy: return these as well, in this order.
        gradients: the pass in which the gradients are computed. "forward" saves one matmul in four. It requires
            `reduction` "mean" or "sum", and cannot be used with soft targets, `return_log_sum_exp` or `return_entropy`;
            it is the default wherever it can be used. If differentiated, the forward pass then computes both gradients,
            which are kept until the backward pass (float16 gradients in float32). "backward" keeps `hidden`, the table
            and a few floats per token.
        token_chunk: tokens per tile. With gradients="forward", the logits of `token_chunk` tokens and all the shard's
            columns exist at once. The default is at most 1024 with gradients="backward". With "forward", the default
            allows at most 2**21 logits at once (8 MiB), or N * D logits if that is more; this limit is never below 64
            tokens, nor below a 16th of the tokens, up to 256.
        column_chunk: columns per tile. With gradients="backward", the default allows at most 2**19 logits in a tile
            (2 MiB), or N * D / 4 logits if that is more; this limit is never below 64 columns. With "forward", the
            default is at most 2**20 / D (4 MiB of the table's gradient); this limit is never below 128 columns. Both
            defaults are lowered so that chunks divide evenly, unless that would at least double the number of chunks.

    Returns:
        The loss: (N..), or () if reduced, in float32 (float64 for float64), the same on all IPUs. With
        return_log_sum_exp also the log-sum-exp, and with return_entropy the entropy of the softmax, (N..) in the same
        dtype, even for tokens that don't count.

    Raises:
        ValueError: shapes or dtypes don't fit together; a shard does not fit `size` or `tokens`; by their types,
            `hidden` without `tokens`, labels or `weights` differ between the IPUs of `axis`, or a shard does not; an
            option is out of range; gradients="forward" is given for a loss that is not reduced, for soft targets, or
            with the log-sum-exp or the entropy; or the enclosing shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(linear_cross_entropy, size=4, reduction="mean")
        >>> loss = jax.shard_map(op, mesh=mesh, in_specs=(P(), P("ipu"), P()), out_specs=P())
        >>> print(jax.jit(loss)(jnp.ones((3, 8)), jnp.ones((4, 8)), jnp.array([0, 3, 1])))  # log(4)
        1.3862944
    """
    split = split_over(whole_number("size", size, at_least=1), one_axis(axis))
    checked_options(out_of_range, reduction, return_log_sum_exp=return_log_sum_exp, return_entropy=return_entropy)
    labels = array_like("labels", labels)
    are_soft = jnp.issubdtype(labels.dtype, jnp.floating)
    also = [name for name, wanted in (("log_sum_exp", return_log_sum_exp), ("entropy", return_entropy)) if wanted]
    way = _way(gradients, reduction, is_soft=are_soft, also=also)
    terms = checked_terms(Terms(split, axis, label_smoothing, z_loss, soft_cap, temperature, bool(return_entropy)))
    hidden, table, bias = _checked_operands(hidden, table, bias, tokens, split, axis)
    weights = None if weights is None else checked_weights(weights)
    for name, per_token in (("labels", None if are_soft else labels), ("weights", weights)):
        if per_token is not None:
            _check_per_token(name, per_token, hidden, axis)
    shape, wide = (*hidden.shape[:-1], split.local), jnp.promote_types(hidden.dtype, jnp.float32)
    targets, counted, faulty = checked_targets(labels, shape, wide, terms, ignore_index, out_of_range)
    if are_soft:
        check_shard("labels", jnp.asarray(labels), -1, split, axis)
    chunks = _chunks(hidden, split.local, way, token_chunk, column_chunk)
    axes = axes_of_rule(axis, *(x for x in (hidden, table, bias, targets, weights) if x is not None))
    # The transpose of as_varying sums the parts of dhidden. If tokens were gathered, the gather's transpose sums them.
    hidden_ND, table_VD = as_varying(hidden.reshape(-1, hidden.shape[-1]), axes), as_varying(table, axes)
    operands = hidden_ND, table_VD, None if bias is None else as_varying(bias, axes)
    targets = targets.reshape(-1, split.local) if are_soft else targets.reshape(-1)
    total = lambda losses: reduce_losses(losses, counted, faulty, weights, reduction)
    if way == "forward":
        # The gradient of the total by each token's loss is the factor of that loss. It is computed from this device's
        # own sum: if `ones` varied over fewer axes than the losses do, jax would sum the gradient over the other axes.
        ones = as_varying(jnp.ones(shape[:-1], wide), axes - {axis})
        factors_N = jax.grad(total)(ones).reshape(-1)
        return sum_of_losses(Operands(*operands, targets), factors_N, terms, chunks)
    targets = as_varying(targets, axes) if are_soft else targets
    outputs: Any = token_losses(Operands(*operands, targets), terms, chunks, bool(return_log_sum_exp))
    loss, *others = (each.reshape(shape[:-1]) for each in outputs if each is not None)
    return (total(loss), *others) if others else total(loss)


def _way(gradients: Any, reduction: Reduction, *, is_soft: bool, also: list[str]) -> Literal["backward", "forward"]:
    """Return the pass in which the gradients are computed: `gradients` if given, else the default for the options."""
    if gradients is None:
        return "backward" if reduction == "none" or is_soft or also else "forward"
    one_of("gradients", gradients, ("backward", "forward"))
    if gradients == "forward" and reduction == "none":
        raise ValueError(
            "gradients='forward' computes them before each token's cotangent is known, so the loss must be reduced: "
            "use reduction='mean' or 'sum', or gradients='backward'"
        )
    if gradients == "forward" and also:
        raise ValueError(
            f"gradients='forward' computes them before the cotangent of the {also[0].replace('_', '-')} is known: use "
            f"gradients='backward' with return_{also[0]}=True"
        )
    if gradients == "forward" and is_soft:
        raise ValueError(
            "gradients='forward' would keep the gradients of the soft targets, which are as large as the logits: use "
            "gradients='backward' with soft targets"
        )
    return gradients


def _checked_operands(
    hidden: Any, table: Any, bias: Any, tokens: int | None, split: Split, axis: str
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return the operands, with `hidden` for all tokens: gathered if its tokens are scattered."""
    hidden, table = array("hidden", hidden), array("table", table)
    if hidden.ndim < 1 or table.ndim != 2 or hidden.shape[-1] != table.shape[1]:
        raise ValueError(
            f"hidden of shape {hidden.shape} and table of shape {table.shape} on each IPU don't go together: give "
            "(.., D) and (rows, D)"
        )
    if hidden.dtype != table.dtype or not jnp.issubdtype(hidden.dtype, jnp.floating):
        raise ValueError(
            f"hidden has dtype {hidden.dtype} and table {table.dtype}, but both must have the same floating dtype: "
            "convert one of them"
        )
    check_shard("table", table, 0, split, axis)
    if bias is not None:
        bias = array("bias", bias)
        if bias.ndim != 1 or not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(
                f"bias has dtype {bias.dtype} and shape {bias.shape} on each IPU, but takes one float for each row of "
                "the table: give a floating array of 1 dim"
            )
        check_shard("bias", bias, 0, split, axis)
    if tokens is None:
        check_same_on_all("hidden", hidden, axis)
        return hidden, table, bias
    number = whole_number("tokens", tokens, at_least=0, instead="None if all IPUs hold hidden")
    of_tokens = split_over(number, axis, option="tokens", at_least=0)
    if hidden.ndim < 2:
        raise ValueError(f"hidden has shape {hidden.shape}, without a dim of tokens that is scattered: give (N, .., D)")
    check_shard("hidden", hidden, 0, of_tokens, axis, option="tokens")
    return of_tokens.unpad(gather_tokens(hidden, axis), 0), table, bias


def _chunks(hidden: jax.Array, local: int, way: str, token_chunk: Any, column_chunk: Any) -> Chunks:
    *leading, features = hidden.shape
    tokens = math.prod(leading)
    token_chunk, column_chunk = (
        None if chunk is None else whole_number(name, chunk, at_least=1, instead="leave it out to have it chosen")
        for name, chunk in (("token_chunk", token_chunk), ("column_chunk", column_chunk))
    )
    if way == "forward":
        at_once = max(_CHUNK, tokens * features) // local
        tokens_of_tile = max(64, at_once, min(_TOKENS, tokens // _MANY_CHUNKS))
        columns_of_tile = max(128, _TABLE_TILE // max(features, 1))
    else:
        tokens_of_tile = 1024
        columns_of_tile = max(64, max(_TILE, tokens * features // 4) // min(tokens_of_tile, max(tokens, 1)))
    return Chunks(
        min(token_chunk or _even(tokens, tokens_of_tile), max(tokens, 1)),
        min(column_chunk or _even(local, columns_of_tile), local),
    )


def _even(extent: int, limit: int) -> int:
    """Return the width of equal chunks of at most `limit`, or of unequal chunks if equal ones need twice as many."""
    least = max(-(-extent // limit), 1)
    number = next((k for k in range(least, 2 * least) if extent % k == 0), least)
    return max(-(-extent // number), 1)


def _check_per_token(name: str, per_token: Any, hidden: jax.Array, axis: str) -> None:
    if jnp.shape(per_token) != hidden.shape[:-1]:
        raise ValueError(
            f"{name} has shape {jnp.shape(per_token)}, but hidden of shape {hidden.shape} takes one for each token: "
            f"give shape {hidden.shape[:-1]}"
        )
    check_same_on_all(name, per_token, axis)

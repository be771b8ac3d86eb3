"""The fused projection and softmax cross-entropy: the logits of all tokens and columns are never there at once.

    hidden_ND (all IPUs)   table_VD (rows split, as `embedding` has it)   labels_N (all IPUs)

    gradients="backward"                                      matmuls
        forward    for each tile: logits, statistics             1
                   one all-gather; loss of each token
        backward   for each tile: logits again, slopes,          1
                   parts of both gradients                       2

    gradients="forward", for a loss that is a sum or a mean
        forward    for each chunk of tokens: logits of all       1
                   columns of the shard, statistics, all-gather,
                   loss; and for each tile of them slopes,
                   parts of both gradients                       2
        backward   both gradients times the loss's cotangent     0

A tile is `token_chunk` tokens by `column_chunk` columns of the shard; the last ones may be smaller.

(Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", arXiv:2411.09009, compute the logits twice;
Hsu et al. 2024, "Liger kernel", arXiv:2410.10989, the gradients in the forward pass.)

Dims: N tokens, D features, V rows of the table; C columns of a tile; n IPUs.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sharded_ops.collectives import as_varying, check_same_on_all, is_typed, varying_axes
from sharded_ops.cross_entropy import OutOfRange, Reduction, checked_labels, checked_options, checked_terms, reduced
from sharded_ops.fused import Chunks, loss, sum_of_losses
from sharded_ops.layout import check_shard, split_over
from sharded_ops.tiles import Terms

# Logits: of a tile, 2 MiB of float32, and of all the shard's columns for a chunk of tokens, 8 MiB. Smaller ones make
# slow matmuls, larger ones no faster on a CPU; beside a large `hidden` they may be larger at no cost that is felt.
_TILE, _CHUNK = 1 << 19, 1 << 21


def linear_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    labels: ArrayLike,
    *,
    size: int,
    axis: str = "ipu",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = None,
    out_of_range: OutOfRange = "ignore",
    weights: ArrayLike | None = None,
    reduction: Reduction = "none",
    gradients: Literal["backward", "forward"] = "backward",
    token_chunk: int | None = None,
    column_chunk: int | None = None,
) -> jax.Array:
    """`log_softmax_cross_entropy(hidden @ table.T, labels)` without ever making the logits.

    gradients="backward": forward one all-gather of 2 floats a token, 3 with label smoothing. gradients="forward": as
    many floats, in one all-gather for each chunk of tokens. Backward, in both: one all-reduce of dx, (N.., D) in the
    dtype of `hidden`; under check_vma=False it stands where the `shard_map` is differentiated (see `collectives`).
    Under check_vma=False all IPUs must use the loss alike, as `log_softmax_cross_entropy` says.

    Only reverse-mode derivatives are there, and only the first: for others use `tied_projection` and
    `log_softmax_cross_entropy`.

    Args:
        hidden: (N.., D), floating, the same on all IPUs.
        table: (V, D) globally, padded with `Split(size, n).pad(table, 0)`; each IPU holds (ceil(V/n), D). In the dtype
            of `hidden`. Half types are multiplied as they are and accumulate in float32.
        labels: (N..) of any integer dtype, the same on all IPUs.
        size: V, without padding. Padding is not read, and its gradient is zero.
        axis: the mesh axis.
        label_smoothing, z_loss, soft_cap, temperature, ignore_index, out_of_range, weights, reduction: as for
            `log_softmax_cross_entropy`.
        gradients: where the gradients are computed. "forward" is faster by one matmul in four, for `reduction` "mean"
            or "sum" only; the forward pass then makes and keeps both gradients, but only where it is differentiated.
        token_chunk: tokens of a tile; with gradients="forward" as many have their logits of all the shard's columns
            there at once. By default 1024 at most; with gradients="forward" at most as make 2**21 logits (8 MiB), or
            N * D of them if that is more, but 64 may always be.
        column_chunk: columns of a tile. By default at most as make 2**19 logits (2 MiB), or N * D / 4 of them if that
            is more, but 64 may always be; with gradients="forward" 128 at most, or a 128th of the shard's if that is
            more. Defaults are lowered to chunks that divide evenly, where that not more than doubles their number.

    Returns:
        The loss: (N..), or () if reduced, in float32 (float64 for float64), the same on all IPUs.

    Raises:
        ValueError: shapes or dtypes that don't go together, a shard that does not fit `size`, an option outside its
            range, gradients="forward" for a loss that is not reduced, or an `axis` that is not the enclosing
            shard_map's.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(linear_cross_entropy, size=4, reduction="mean")
        >>> loss = jax.shard_map(op, mesh=mesh, in_specs=(P(), P("ipu"), P()), out_specs=P())
        >>> print(jax.jit(loss)(jnp.ones((3, 8)), jnp.ones((4, 8)), jnp.array([0, 3, 1])))  # log(4)
        1.3862944
    """
    split = split_over(size, axis)
    checked_options(out_of_range, reduction)
    terms = checked_terms(Terms(split, axis, label_smoothing, z_loss, soft_cap, temperature))
    _check_operands(hidden, table)
    check_shard("table", table, 0, split, axis)
    for name, per_token in (("labels", labels), ("weights", weights)):
        if per_token is not None:
            _check_per_token(name, per_token, hidden)
            check_same_on_all(name, per_token, axis)
    targets, faulty = checked_labels(labels, size, ignore_index, out_of_range)
    shape = targets.shape
    hidden_ND, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    chunks = _chunks(hidden_ND.shape, split.local, gradients, reduction, token_chunk, column_chunk)
    # What a rule returns for an operand has to vary as that does; the transpose of this sums the parts of dx.
    axes = varying_axes(hidden) | varying_axes(table) | varying_axes(targets) | ({axis} if is_typed(axis) else set())
    hidden_ND, table_VD = as_varying(hidden_ND, axes), as_varying(table, axes)
    if gradients == "backward":
        loss_N: jax.Array = loss(hidden_ND, table_VD, targets_N, terms, chunks)
        return reduced(loss_N.reshape(shape), targets >= 0, faulty, weights, reduction)

    def total(losses: jax.Array) -> jax.Array:
        return reduced(losses, targets >= 0, faulty, weights, reduction)

    # What each token's loss is multiplied with in the end.
    factors = jax.grad(total)(jnp.ones(shape, jnp.promote_types(hidden.dtype, jnp.float32)))
    return sum_of_losses(hidden_ND, table_VD, targets_N, factors.reshape(-1), terms, chunks)


def _chunks(
    shape: tuple[int, ...],
    local: int,
    gradients: str,
    reduction: str,
    token_chunk: int | None,
    column_chunk: int | None,
) -> Chunks:
    tokens, features = shape
    if gradients not in ("backward", "forward"):
        raise ValueError(f"gradients={gradients!r} is unknown: use 'backward' or 'forward'")
    for name, chunk in (("token_chunk", token_chunk), ("column_chunk", column_chunk)):
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise ValueError(f"{name}={chunk!r} must be a positive int: leave it out to have it chosen")
    if gradients == "forward" and reduction == "none":
        raise ValueError(
            "gradients='forward' computes them before each token's cotangent is known, so the loss must be reduced: "
            "use reduction='mean' or 'sum', or gradients='backward'"
        )
    if gradients == "forward":
        at_once = max(_CHUNK, tokens * features) // local
        tokens_of_tile, columns_of_tile = max(64, at_once), max(128, local // 128)
    else:
        tokens_of_tile = 1024
        columns_of_tile = max(64, max(_TILE, tokens * features // 4) // min(tokens_of_tile, max(tokens, 1)))
    return Chunks(
        min(token_chunk or _even(tokens, tokens_of_tile), max(tokens, 1)),
        min(column_chunk or _even(local, columns_of_tile), local),
    )


def _even(extent: int, limit: int) -> int:
    """The width of equal chunks of at most `limit`; unequal ones where that would more than double their number."""
    least = max(-(-extent // limit), 1)
    number = next((k for k in range(least, 2 * least) if extent % k == 0), least)
    return max(-(-extent // number), 1)


def _check_operands(hidden: jax.Array, table: jax.Array) -> None:
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


def _check_per_token(name: str, per_token: ArrayLike, hidden: jax.Array) -> None:
    if jnp.shape(per_token) != hidden.shape[:-1]:
        raise ValueError(
            f"{name} has shape {jnp.shape(per_token)}, but hidden of shape {hidden.shape} takes one for each token: "
            f"give shape {hidden.shape[:-1]}"
        )

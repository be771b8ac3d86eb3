"""Reduce logits to statistics per token, combine these over all shards, and derive loss and gradient from them.

The logits are processed in tiles: some columns of some tokens. Each tile is reduced to its statistics, a few floats per
token, and the statistics of all tiles of a shard are merged. One all-gather brings the statistics of every shard to all
IPUs. Each IPU then knows each token's loss, and can compute the gradient of any tile on its own.

The target gives each column v a weight u_v: 1 for the label's column and 0 for the others, or, with label smoothing or
soft targets, a weight for many columns. Let x be the logits and t a shard's own largest logit. The shard sends

    t    d = lse(shard) - t    a = sum of u_v (x_v - t)    b = sum of u_v, if the other IPUs can't compute it

With T the largest t of all shards, every IPU computes

                 lse   =  T + logsumexp over shards of (t - T) + d
                 loss  =  sum of u_v (lse - x_v)  =  sum over shards of  b (lse - t) - a

So a shard sends 3 floats per token, and with soft targets a fourth. For a label with logit y, a is y - t in the
label's shard and 0 in the others. As both lse - t and t - y are 0 or more, no two large numbers ever cancel. So the
loss is as exact as the dense program's, even for a confident prediction, whose loss is much smaller than its logits.
The gradient needs T and lse - T. Every IPU then knows them as exactly as the dense program, so the gradient sends
nothing.

With the entropy H = - sum of p_v log p_v, where p is the softmax of x, a shard sends one more float: e, the mean of
x - t under the softmax of its own columns. Shard s has exp((t - T) + d - (lse - T)) of all probability, so that

                 H     =  (lse - T) - sum over shards of  share * (e + t - T)

(Megatron-LM and torch's loss_parallel use three all-reduces of one float per token: Shoeybi et al. 2019,
arXiv:1909.08053, section 3. Subtracting a reference from the logits is the online softmax of Milakov and Gimelshein
2018, arXiv:1805.02867.)

Dims: N tokens (any number of leading dims), C columns of a tile, V columns in all; n IPUs; K floats per token.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sharded_ops._softmax import finite, log_sum_exp, top_and_log_sum
from sharded_ops._split import Split


@dataclasses.dataclass(frozen=True)
class Terms:
    """The options of a token's loss, and how its columns are split: over which mesh axis, and into which parts."""

    split: Split
    axis: str
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    temperature: float = 1.0
    entropy: bool = False


class Statistics(NamedTuple):
    """Statistics per token of a tile's columns, or of all columns of a shard."""

    top_N: jax.Array  # t
    log_sum_N: jax.Array  # d, the log of the sum of exp(logit - t)
    label_logit_N: jax.Array | None  # 0 if the label is not among the columns; None with soft targets
    gap_N: jax.Array | None  # a: for soft targets, or only its smoothing part for labels; None without either
    mass_N: jax.Array | None  # b for soft targets; None for labels, whose b every IPU can compute
    depth_N: jax.Array | None  # e; None without the entropy


class RowStatistics(NamedTuple):
    """Statistics per token of a whole row of logits, the same on all IPUs. The log-sum-exp is base + rest."""

    base_N: jax.Array  # T
    rest_N: jax.Array  # lse - T
    loss_N: jax.Array
    mass_N: jax.Array | None  # the sum of all u_v for soft targets; None for labels
    entropy_N: jax.Array | None  # H; None unless it is wanted


def shard_start(terms: Terms) -> jax.Array:
    """Return the global column at which this IPU's shard starts."""
    return terms.split.offset(lax.axis_index(terms.axis))


def is_soft(targets: jax.Array) -> bool:
    """Return whether targets are soft, (N.., C) weights of the columns, rather than (N..) labels."""
    return not jnp.issubdtype(targets.dtype, jnp.integer)


def softmax_logits(x_NC: jax.Array, first: int | jax.Array, terms: Terms) -> jax.Array:
    """Return the logits that the softmax takes: in float32 at least, capped, divided by the temperature, padding -inf.

    Args:
        x_NC: the raw logits of a tile.
        first: the global column at which the tile starts.
        terms: the options of the loss.
    """
    x_NC = x_NC.astype(jnp.promote_types(x_NC.dtype, jnp.float32))
    if terms.soft_cap is not None:
        # Padding may be NaN, and NaN times zero in the derivative of tanh is NaN.
        x_NC = _where_real(x_NC, first, terms, 0)
        x_NC = terms.soft_cap * jnp.tanh(x_NC / terms.soft_cap)
    if terms.temperature != 1:
        x_NC = x_NC / terms.temperature
    return _where_real(x_NC, first, terms, -jnp.inf)


def statistics(logits_NC: jax.Array, targets: jax.Array, first: int | jax.Array, terms: Terms) -> Statistics:
    """Reduce a tile to its statistics. Sends nothing.

    Args:
        logits_NC: the tile, as `softmax_logits` returns it.
        targets: (N..) labels as `as_int32` returns them, or (N.., C) soft targets.
        first: the global column at which the tile starts.
        terms: the options of the loss.
    """
    top_N, log_sum_N = top_and_log_sum(logits_NC, dim=-1)
    label_logit_N = gap_N = mass_N = depth_N = None
    below_top_NC = logits_NC - finite(top_N)[..., None]
    if is_soft(targets):
        u_NC = _weights(targets, first, terms)
        gap_N = jnp.where(u_NC == 0, 0, u_NC * below_top_NC).sum(-1)
        mass_N = u_NC.sum(-1)
    else:
        columns = logits_NC.shape[-1]
        column_N = targets - first
        column_N = jnp.where((column_N >= 0) & (column_N < columns), column_N, columns)
        label_logit_N1 = jnp.take_along_axis(logits_NC, column_N[..., None], axis=-1, mode="fill", fill_value=0)
        label_logit_N = label_logit_N1[..., 0]
        if terms.label_smoothing:
            gap_N = _where_real(below_top_NC, first, terms, 0).sum(-1) * (terms.label_smoothing / terms.split.size)
    if terms.entropy:
        own_NC = jnp.exp(below_top_NC - log_sum_N[..., None])
        # -inf times 0 is NaN, also where it is only a factor of a derivative
        depth_N = (own_NC * jnp.where(own_NC > 0, below_top_NC, 0)).sum(-1)
    return Statistics(top_N, log_sum_N, label_logit_N, gap_N, mass_N, depth_N)


def merge_tiles(a: Statistics, b: Statistics, masses: tuple[float | jax.Array, float | jax.Array]) -> Statistics:
    """Return the combined statistics of two tiles of the same tokens.

    Args:
        a: the statistics of one tile.
        b: the statistics of another tile, which has no column in common with the first one.
        masses: for each tile, the total weight that label smoothing gives to its columns. Not used for soft targets,
            whose statistics contain it.
    """
    top_N = jnp.maximum(a.top_N, b.top_N)
    shifts = [finite(part.top_N) - finite(top_N) for part in (a, b)]
    log_sum_N = log_sum_exp(jnp.stack([a.log_sum_N + shifts[0], b.log_sum_N + shifts[1]]))
    label_logit_N = gap_N = mass_N = depth_N = None
    if a.label_logit_N is not None and b.label_logit_N is not None:
        label_logit_N = a.label_logit_N + b.label_logit_N
    if a.mass_N is not None and b.mass_N is not None:
        masses, mass_N = (a.mass_N, b.mass_N), a.mass_N + b.mass_N
    if a.gap_N is not None and b.gap_N is not None:
        gap_N = a.gap_N + masses[0] * shifts[0] + b.gap_N + masses[1] * shifts[1]
    if a.depth_N is not None and b.depth_N is not None:
        log_sums_2N = jnp.stack([a.log_sum_N + shifts[0], b.log_sum_N + shifts[1]])
        depth_N = _mean_depth(log_sums_2N, jnp.stack([a.depth_N + shifts[0], b.depth_N + shifts[1]]), log_sum_N)
    return Statistics(top_N, log_sum_N, label_logit_N, gap_N, mass_N, depth_N)


def _mean_depth(log_sums_sN: jax.Array, depths_sN: jax.Array, log_sum_N: jax.Array) -> jax.Array:
    """Return the mean of the depths of some parts of a row, each by its share of `log_sum_N`, the log of their sum."""
    shares_sN = jnp.exp(log_sums_sN - log_sum_N)
    return jnp.where(shares_sN > 0, shares_sN * depths_sN, 0).sum(0)


def shard_summary(shard: Statistics, targets: jax.Array, terms: Terms) -> jax.Array:
    """Return the numbers that a shard sends: (K, N..). Communicates nothing.

    K is 3; soft targets add one number, and the entropy adds the last one.
    """
    top_N, log_sum_N, label_logit_N, gap_N, mass_N, depth_N = shard
    if gap_N is None:
        gap_N = jnp.zeros_like(top_N)
    if label_logit_N is not None and terms.label_smoothing < 1:
        holds_label_N = targets // terms.split.local == lax.axis_index(terms.axis)
        label_gap_N = jnp.where(holds_label_N, label_logit_N - finite(top_N), 0)
        gap_N = gap_N + (1 - terms.label_smoothing) * label_gap_N
    return jnp.stack([each for each in (top_N, log_sum_N, gap_N, mass_N, depth_N) if each is not None])


def combine_shards(summaries_nKN: jax.Array, targets: jax.Array, terms: Terms) -> RowStatistics:
    """Combine the `shard_summary` of every shard into statistics of all columns. Communicates nothing."""
    top_nN, log_sum_nN, gap_nN = (summaries_nKN[:, k] for k in range(3))
    references_nN = finite(top_nN)
    base_N = finite(top_nN.max(0))
    rest_N = log_sum_exp((references_nN - base_N) + log_sum_nN)
    mass_N = None
    if is_soft(targets):
        mass_nN = summaries_nKN[:, 3]
        mass_N = mass_nN.sum(0)
    else:
        shards_n1 = jnp.arange(terms.split.parts).reshape(-1, *(1,) * targets.ndim)
        has_label_nN = (targets // terms.split.local == shards_n1).astype(rest_N.dtype)
        counts_n = jnp.array([terms.split.count(index) for index in range(terms.split.parts)], rest_N.dtype)
        smoothing_mass_n1 = (counts_n * (terms.label_smoothing / terms.split.size)).reshape(shards_n1.shape)
        mass_nN = (1 - terms.label_smoothing) * has_label_nN + smoothing_mass_n1
    above_nN = rest_N + (base_N - references_nN)  # lse - t
    loss_N = (jnp.where(mass_nN == 0, 0, mass_nN * above_nN) - gap_nN).sum(0)
    if terms.z_loss:
        loss_N = loss_N + terms.z_loss * (base_N + rest_N) ** 2
    entropy_N = None
    if terms.entropy:
        shifts_nN = references_nN - base_N
        entropy_N = rest_N - _mean_depth(log_sum_nN + shifts_nN, summaries_nKN[:, -1] + shifts_nN, rest_N)
    return RowStatistics(base_N, rest_N, loss_N, mass_N, entropy_N)


def probabilities(
    logits_NC: jax.Array, base_N: jax.Array, rest_N: jax.Array, unread: jax.Array | bool = False
) -> jax.Array:
    """Return a tile's softmax, exp(logit - lse): 0 for logits of -inf and in `unread` rows.

    Neither of these makes a derivative NaN.
    """
    exponent_NC = (logits_NC - base_N[..., None]) - rest_N[..., None]
    return jnp.exp(jnp.where((logits_NC == -jnp.inf) | unread, -jnp.inf, exponent_NC))


def loss_dlogits(
    logits_NC: jax.Array, targets: jax.Array, row: RowStatistics, first: int | jax.Array, terms: Terms
) -> jax.Array:
    """Return the derivative of each token's loss by the logits of a tile, (N.., C): 0 for tokens that don't count."""
    unread_N1 = False if is_soft(targets) else (targets < 0)[..., None]
    p_NC = probabilities(logits_NC, row.base_N, row.rest_N, unread_N1)
    scale_N = jnp.ones_like(row.rest_N) if row.mass_N is None else row.mass_N
    if terms.z_loss:
        scale_N = scale_N + 2 * terms.z_loss * (row.base_N + row.rest_N)
    if row.mass_N is not None or terms.z_loss:
        p_NC = p_NC * scale_N[..., None]
    dlogits_NC = p_NC - _weights(targets, first, terms, logits_NC.shape[-1])
    return dlogits_NC if unread_N1 is False else jnp.where(unread_N1, 0, dlogits_NC)


def entropy_dlogits(logits_NC: jax.Array, row: RowStatistics) -> jax.Array:
    """Return the derivative of each token's entropy by the logits of a tile, -p (log p + H): (N.., C)."""
    assert row.entropy_N is not None
    p_NC = probabilities(logits_NC, row.base_N, row.rest_N)
    log_p_NC = (logits_NC - row.base_N[..., None]) - row.rest_N[..., None]
    return -p_NC * (jnp.where(logits_NC == -jnp.inf, 0, log_p_NC) + row.entropy_N[..., None])


def loss_dtargets(logits_NC: jax.Array, row: RowStatistics, first: int | jax.Array, terms: Terms) -> jax.Array:
    """Return the derivative of each token's loss by the soft targets of a tile, (N.., C): 0 for padding."""
    gaps_NC = (row.base_N[..., None] - logits_NC) + row.rest_N[..., None]
    return (1 - terms.label_smoothing) * _where_real(gaps_NC, first, terms, 0)


def _weights(targets: jax.Array, first: int | jax.Array, terms: Terms, columns: int | None = None) -> jax.Array:
    """Return the weight u_v of each column v of a tile: (N.., C). `columns` is C, needed for labels only."""
    if is_soft(targets):
        weights_NC = targets
        if terms.label_smoothing:
            weights_NC = (1 - terms.label_smoothing) * weights_NC + terms.label_smoothing / terms.split.size
        return _where_real(weights_NC, first, terms, 0)
    assert columns is not None
    is_label_NC = first + jnp.arange(columns) == targets[..., None]
    if not terms.label_smoothing:
        return is_label_NC
    smoothing = terms.label_smoothing / terms.split.size
    return _where_real(jnp.where(is_label_NC, 1 - terms.label_smoothing + smoothing, smoothing), first, terms, 0)


def _where_real(x_NC: jax.Array, first: int | jax.Array, terms: Terms, fill: float) -> jax.Array:
    """Return `x` with `fill` in the columns of padding; `x` itself if the split has no padding."""
    if not terms.split.padding:
        return x_NC
    return jnp.where(first + jnp.arange(x_NC.shape[-1]) < terms.split.size, x_NC, fill)

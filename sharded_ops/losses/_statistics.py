"""What a softmax cross-entropy computes of a tile: some columns of the logits of some tokens.

A tile is reduced to a few floats per token, its statistics; those of a shard's tiles are merged into one; one
all-gather hands every shard's to all IPUs, which then know each token's loss, and with it the gradient of any tile by
itself.

The target gives each column v a weight u_v: 1 to the label's, or by label smoothing and soft targets to many. With x
the logits, a shard tells the others, measured from its own largest logit t,

    t    d = lse(shard) - t    a = sum of u_v (x_v - t)    b = sum of u_v, where the others can't know it

                 lse   =  T + logsumexp over shards of (t - T) + d               T = the largest t
                 loss  =  sum of u_v (lse - x_v)  =  sum over shards of  b (lse - t) - a

that is 3 floats, and a fourth for soft targets. For a label y, a is y - t in its shard, and 0 elsewhere: no large
number is ever taken from another, as both lse - t and t - y are 0 or more. So the loss is as exact as the dense
program's, also for a confident prediction, whose loss is much smaller than its logits. The gradient needs T and
lse - T, which every IPU then knows as exactly as the dense program does, and sends nothing.

(Megatron-LM and torch's loss_parallel use three all-reduces of a float per token: Shoeybi et al. 2019,
arXiv:1909.08053, section 3. Measuring from a reference is the online softmax of Milakov and Gimelshein 2018,
arXiv:1805.02867.)

Dims: N tokens (any number of leading dims), C columns of a tile, V of all; n IPUs; K floats per token.
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
    """The terms of a token's loss, and the axis over which its columns are split."""

    split: Split
    axis: str
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    temperature: float = 1.0


class Statistics(NamedTuple):
    """Statistics per token of a tile's columns, or of all columns of a shard."""

    top_N: jax.Array
    log_sum_N: jax.Array  # log of the sum of exp(logit - top)
    label_logit_N: jax.Array | None  # where the label is among the columns, else 0; None with soft targets
    spread_N: jax.Array | None  # a, of soft targets or of smoothing alone; None if only the label's column has weight
    mass_N: jax.Array | None  # b; None where it is known


class Whole(NamedTuple):
    """Statistics per token of all columns, the same on all IPUs. The log-sum-exp is base + rest."""

    base_N: jax.Array
    rest_N: jax.Array
    loss_N: jax.Array
    mass_N: jax.Array | None  # the sum of soft targets


def first_column(terms: Terms) -> jax.Array:
    """Return the global column at which this IPU's shard starts."""
    return terms.split.offset(lax.axis_index(terms.axis))


def is_soft(targets: jax.Array) -> bool:
    """Return whether targets are weights of all columns, (N.., C), and not a label for each token, (N..)."""
    return not jnp.issubdtype(targets.dtype, jnp.integer)


def logits_of(x_NC: jax.Array, first: int | jax.Array, terms: Terms) -> jax.Array:
    """Return the softmax's logits: in float32 at least, capped, divided by the temperature, -inf for padding.

    Args:
        x_NC: the raw logits of a tile.
        first: the global column at which it starts.
        terms: of the loss.
    """
    x_NC = x_NC.astype(jnp.promote_types(x_NC.dtype, jnp.float32))
    if terms.soft_cap is not None:
        # Padding may hold anything, and NaN would go through the derivative of tanh times zero.
        x_NC = _where_real(x_NC, first, terms, 0)
        x_NC = terms.soft_cap * jnp.tanh(x_NC / terms.soft_cap)
    if terms.temperature != 1:
        x_NC = x_NC / terms.temperature
    return _where_real(x_NC, first, terms, -jnp.inf)


def statistics(logits_NC: jax.Array, targets: jax.Array, first: int | jax.Array, terms: Terms) -> Statistics:
    """Reduces a tile, as `logits_of` gives it, to its statistics. Sends nothing.

    Args:
        logits_NC: a tile.
        targets: (N..) labels as `as_int32` gives them, or (N.., C) soft targets.
        first: the global column at which it starts.
        terms: of the loss.
    """
    top_N, log_sum_N = top_and_log_sum(logits_NC, dim=-1)
    label_logit_N = spread_N = mass_N = None
    apart_NC = logits_NC - finite(top_N)[..., None]
    if is_soft(targets):
        u_NC = _weights(targets, first, terms)
        spread_N = jnp.where(u_NC == 0, 0, u_NC * apart_NC).sum(-1)
        mass_N = u_NC.sum(-1)
    else:
        columns = logits_NC.shape[-1]
        column_N = targets - first
        column_N = jnp.where((column_N >= 0) & (column_N < columns), column_N, columns)
        taken_N1 = jnp.take_along_axis(logits_NC, column_N[..., None], axis=-1, mode="fill", fill_value=0)
        label_logit_N = taken_N1[..., 0]
        if terms.label_smoothing:
            spread_N = _where_real(apart_NC, first, terms, 0).sum(-1) * (terms.label_smoothing / terms.split.size)
    return Statistics(top_N, log_sum_N, label_logit_N, spread_N, mass_N)


def merged(a: Statistics, b: Statistics, masses: tuple[float | jax.Array, float | jax.Array]) -> Statistics:
    """Return the statistics of two tiles of the same tokens as those of one. For labels only.

    Args:
        a: of one tile.
        b: of another, with no column in common.
        masses: for each the weight that its columns have by smoothing.
    """
    assert a.label_logit_N is not None
    assert b.label_logit_N is not None
    top_N = jnp.maximum(a.top_N, b.top_N)
    moved = [finite(part.top_N) - finite(top_N) for part in (a, b)]
    log_sum_N = log_sum_exp(jnp.stack([a.log_sum_N + moved[0], b.log_sum_N + moved[1]]))
    spread_N = None
    if a.spread_N is not None and b.spread_N is not None:
        spread_N = a.spread_N + masses[0] * moved[0] + b.spread_N + masses[1] * moved[1]
    return Statistics(top_N, log_sum_N, a.label_logit_N + b.label_logit_N, spread_N, None)


def numbers_sent(of_shard: Statistics, targets: jax.Array, terms: Terms) -> jax.Array:
    """Return the numbers that a shard sends: (K, N..), K being 3, or 4 with soft targets. Communicates nothing."""
    top_N, log_sum_N, label_logit_N, spread_N, mass_N = of_shard
    if spread_N is None:
        spread_N = jnp.zeros_like(top_N)
    if label_logit_N is not None and terms.label_smoothing < 1:
        holds_label_N = targets // terms.split.local == lax.axis_index(terms.axis)
        below_N = jnp.where(holds_label_N, label_logit_N - finite(top_N), 0)
        spread_N = spread_N + (1 - terms.label_smoothing) * below_N
    sent = [top_N, log_sum_N, spread_N]
    return jnp.stack(sent if mass_N is None else [*sent, mass_N])


def put_together(numbers_nKN: jax.Array, targets: jax.Array, terms: Terms) -> Whole:
    """Combine every shard's `numbers_sent` into statistics of all columns. Communicates nothing."""
    top_nN, log_sum_nN, spread_nN = (numbers_nKN[:, k] for k in range(3))
    references_nN = finite(top_nN)
    base_N = finite(top_nN.max(0))
    rest_N = log_sum_exp((references_nN - base_N) + log_sum_nN)
    mass_N = None
    if is_soft(targets):
        mass_nN = numbers_nKN[:, 3]
        mass_N = mass_nN.sum(0)
    else:
        shards_n1 = jnp.arange(terms.split.parts).reshape(-1, *(1,) * targets.ndim)
        of_label_nN = (targets // terms.split.local == shards_n1).astype(rest_N.dtype)
        of_smoothing_n1 = smoothing_masses(terms, rest_N.dtype).reshape(shards_n1.shape)
        mass_nN = (1 - terms.label_smoothing) * of_label_nN + of_smoothing_n1
    gaps_nN = rest_N + (base_N - references_nN)
    loss_N = (jnp.where(mass_nN == 0, 0, mass_nN * gaps_nN) - spread_nN).sum(0)
    if terms.z_loss:
        loss_N = loss_N + terms.z_loss * (base_N + rest_N) ** 2
    return Whole(base_N, rest_N, loss_N, mass_N)


def probabilities(
    logits_NC: jax.Array, base_N: jax.Array, rest_N: jax.Array, unread: jax.Array | bool = False
) -> jax.Array:
    """exp(logit - lse) of a tile: 0 where the logit is -inf and in `unread` rows, with no NaN in any derivative."""
    exponent_NC = (logits_NC - base_N[..., None]) - rest_N[..., None]
    return jnp.exp(jnp.where((logits_NC == -jnp.inf) | unread, -jnp.inf, exponent_NC))


def slopes(logits_NC: jax.Array, targets: jax.Array, whole: Whole, first: int | jax.Array, terms: Terms) -> jax.Array:
    """Return the derivative of each token's loss by its logits of a tile, (N.., C); 0 in rows whose label does not
    count.
    """
    unread_N1 = False if is_soft(targets) else (targets < 0)[..., None]
    p_NC = probabilities(logits_NC, whole.base_N, whole.rest_N, unread_N1)
    scale_N = jnp.ones_like(whole.rest_N) if whole.mass_N is None else whole.mass_N
    if terms.z_loss:
        scale_N = scale_N + 2 * terms.z_loss * (whole.base_N + whole.rest_N)
    if whole.mass_N is not None or terms.z_loss:
        p_NC = p_NC * scale_N[..., None]
    slopes_NC = p_NC - _weights(targets, first, terms, logits_NC.shape[-1])
    return slopes_NC if unread_N1 is False else jnp.where(unread_N1, 0, slopes_NC)


def _weights(targets: jax.Array, first: int | jax.Array, terms: Terms, columns: int | None = None) -> jax.Array:
    """Return the weight u of each column: (N.., C)."""
    if is_soft(targets):
        own_NC = targets
        if terms.label_smoothing:
            own_NC = (1 - terms.label_smoothing) * own_NC + terms.label_smoothing / terms.split.size
        return _where_real(own_NC, first, terms, 0)
    assert columns is not None
    is_label_NC = first + jnp.arange(columns) == targets[..., None]
    if not terms.label_smoothing:
        return is_label_NC
    spread = terms.label_smoothing / terms.split.size
    return _where_real(jnp.where(is_label_NC, 1 - terms.label_smoothing + spread, spread), first, terms, 0)


def smoothing_masses(terms: Terms, dtype: jnp.dtype) -> jax.Array:
    """For each shard the weight that its columns have by smoothing alone: (n,)."""
    counts = [terms.split.count(index) for index in range(terms.split.parts)]
    return jnp.array(counts, dtype) * (terms.label_smoothing / terms.split.size)


def _where_real(x_NC: jax.Array, first: int | jax.Array, terms: Terms, fill: float) -> jax.Array:
    """Return `x` with `fill` in the columns of padding; `x` itself where the split has none."""
    if not terms.split.padding:
        return x_NC
    return jnp.where(first + jnp.arange(x_NC.shape[-1]) < terms.split.size, x_NC, fill)

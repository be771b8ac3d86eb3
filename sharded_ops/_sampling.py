"""Draw columns at random from a last dim that is split over the IPUs of a mesh axis.

A random draw is made by adding noise to the logits and choosing the largest. If g is independent standard Gumbel noise,
the largest of logits / T + g is a draw from softmax(logits / T). So is the largest of logits + T g, which needs no
special case for T = 0. See Gumbel 1954; Maddison, Tarlow and Minka 2014, arXiv:1411.0030, section 2. `_top_k` finds the
largest.

The noise of each column is drawn from its own key, into which the column's *global* number is folded. So an IPU draws
the noise of its own columns only, and the result does not depend on the number of IPUs.

The nucleus is the fewest of the largest columns whose probabilities add up to top_p. Sorting would need whole rows, but
the least logit alone determines a nucleus. So this logit is searched for by the bits of a float, four bits at a time:

    threshold  0011 ....     the largest one so far with enough probability above it
    15 of      0011 0001 .. 0011 1111     each IPU adds up its columns from each threshold on,
                                          one all-reduce of 15 numbers per token adds up the IPUs' sums

Columns that equal the least logit tie; as many of them as needed are taken, lower columns first.

Dims: N tokens (any number of leading dims), V columns, K candidate columns; n IPUs, T thresholds.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from sharded_ops._arguments import array, array_like, shown, whole_number
from sharded_ops._collectives import as_varying, check_same_on_all, gather_to_all
from sharded_ops._softmax import check_floating_logits
from sharded_ops._split import Split, mask_padding, varying_axes
from sharded_ops._top_k import sharded_argmax, sharded_top_k, split_of_ordered, widened

_DIGIT = 4  # bits of the threshold of a nucleus that are determined at once


def sample(
    key: jax.Array,
    logits_shard: jax.Array,
    *,
    size: int,
    axis: str = "ipu",
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
) -> jax.Array:
    """Draw one column for each token from softmax(logits / temperature), over a last dim that is split over `axis`.

    The same key draws the same columns on any number of IPUs: the random bits are the same, and a draw can differ only
    if two columns tie to within the rounding of a logarithm. Probabilities are computed from the logits in float32
    (float64 if they are in float64), exact to about 2**-32. Tokens are drawn independently of each other. To draw
    again, or for another batch, use another key; under `jax.vmap` use one key per row.

    Without `top_k`, each IPU draws Gumbel noise for each token and each of its own columns; then one all-gather sends 2
    numbers per token. This computes a hash and two logarithms per token and column, and a hash per column. `min_p` and
    `top_p` add one all-reduce of 1 number per token for the largest logit. `top_p` finds the nucleus without gathering
    rows. For that it adds, per token, one all-reduce of 1 number, 8 (16 in float64) of 15, and one all-gather of 2.
    With `top_k`, one all-gather sends 2 min(top_k, ceil(V/n)) numbers per token. Then every IPU makes the same draw
    among the top_k candidates, and noise is drawn only for these. There is no backward pass: an index has no gradient.

    Args:
        key: one typed key, `jax.random.key(seed)`, the same on all IPUs of `axis`. Under check_vma=False this cannot be
            checked; if the keys differ, the columns differ between IPUs and do not have the right distribution.
        logits_shard: (N.., V) globally, padded with `Split(size, n).pad(logits, -1)`; each IPU holds (N.., ceil(V/n)).
            Any floating dtype; half types are computed in float32. A column with logit -inf is never drawn, unless the
            whole row is -inf: then column 0 is drawn. In a row with NaN the first NaN is drawn, as with `argmax`.
        size: V, without padding. Padding is not read and never drawn.
        axis: the mesh axis.
        temperature: a scalar, or (N..), one per token. 0 chooses like `argmax`. It must be finite and not negative;
            this cannot be checked if it is traced.
        top_k: draw from the top_k largest columns only, as `sharded_ops.top_k` finds them; None: draw from all.
        top_p: a scalar or (N..), more than 0 and at most 1. Draw from the nucleus only: the fewest of the largest
            columns whose probabilities add up to at least top_p (Holtzman et al. 2019, arXiv:1904.09751, section 3.1).
            Columns are in the order of `sharded_ops.top_k`. A column's probability is its share after the temperature;
            with `top_k`, its share among the top_k columns. If the sum is within rounding of top_p, the last column may
            depend on the number of IPUs.
        min_p: a scalar or (N..), from 0 to 1. Draw only from columns that are at least min_p times as probable as the
            most probable column, after the temperature (Nguyen et al. 2024, arXiv:2407.01082). With `top_p`, a column
            must pass both tests; the nucleus is computed from all columns, as in Hugging Face.

    Returns:
        (N..) int32, the same on all IPUs: columns in [0, size).

    Raises:
        ValueError: `key` is not one typed key or differs between IPUs; the logits are not floating; their shard does
            not fit `size` or is replicated over several IPUs; `temperature`, `top_p` or `min_p` is out of range, has a
            shape other than () or (N..), or differs between IPUs; `top_k` is not an int from 1 to `size`; or the
            enclosing shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(sample, size=3, temperature=0.7)
        >>> draw = jax.shard_map(op, mesh=mesh, in_specs=(P(), P(None, "ipu")), out_specs=P())
        >>> logits_NV = jnp.log(jnp.array([[0.5, 0.5, 0.0, 9.0]] * 1000))  # 3 columns and one of padding
        >>> print(jnp.bincount(jax.jit(draw)(jax.random.key(0), logits_NV), length=4) > 400)
        [ True  True False False]
    """
    logits_shard = array("logits_shard", logits_shard)
    split = split_of_ordered("logits_shard", logits_shard, size, axis)
    check_floating_logits(logits_shard)
    _check_key(key, axis)
    if top_k is not None:
        top_k = whole_number("top_k", top_k, at_least=1, at_most=split.size, instead="None for all columns")
    logits_NV = widened(logits_shard)
    tokens, dtype = logits_NV.shape[:-1], logits_NV.dtype
    largest = float(jnp.finfo(dtype).max)
    temperature = _checked_per_token(
        "temperature", temperature, tokens, axis, (0, largest), "a finite number, at least 0"
    )
    if top_p is not None:
        # With the smallest number above zero, the interval is (0, 1].
        lowest = float(np.nextafter(0, 1))
        top_p = _checked_per_token("top_p", top_p, tokens, axis, (lowest, 1), "more than 0, at most 1")
    if min_p is not None:
        min_p = _checked_per_token("min_p", min_p, tokens, axis, (0, 1), "a number from 0 to 1")
    if not isinstance(temperature, Tracer) and not np.any(np.asarray(temperature)):
        return sharded_argmax(logits_NV, split, axis)
    temperature_N1 = _per_token(temperature, dtype)
    top_p_N1, min_p_N1 = (None if p is None else _per_token(p, dtype) for p in (top_p, min_p))
    if top_k is not None:
        return _drawn_of_top_k(key, logits_NV, top_k, temperature_N1, top_p_N1, min_p_N1, split, axis)
    columns_V = split.offset(lax.axis_index(axis)) + jnp.arange(split.local, dtype=jnp.int32)
    drawn_NV = logits_NV + temperature_N1 * _gumbel_of_columns(key, columns_V, tokens, dtype)
    if top_p_N1 is not None or min_p_N1 is not None:
        kept_NV = kept_columns(logits_NV, temperature_N1, top_p_N1, min_p_N1, split, axis)
        drawn_NV = jnp.where(kept_NV, drawn_NV, -jnp.inf)
    return sharded_argmax(drawn_NV, split, axis)


def _drawn_of_top_k(
    key: jax.Array, x_NV: jax.Array, k: int, temperature_N1: Any, top_p_N1: Any, min_p_N1: Any, split: Split, axis: str
) -> jax.Array:
    """Draw one of the k largest columns of the logits for each token. Every IPU makes the same draw."""
    logits_NK, columns_NK = sharded_top_k(x_NV, k, split, axis)
    drawn_NK = logits_NK + temperature_N1 * _gumbel(key, logits_NK.shape, x_NV.dtype)
    p_NK = _odds(logits_NK, logits_NK[..., :1], temperature_N1)
    if top_p_N1 is not None:
        drawn_NK = jnp.where(_nucleus(p_NK, top_p_N1), drawn_NK, -jnp.inf)
    if min_p_N1 is not None:
        drawn_NK = jnp.where((p_NK >= min_p_N1) | jnp.isnan(logits_NK), drawn_NK, -jnp.inf)
    return jnp.take_along_axis(columns_NK, jnp.argmax(drawn_NK, -1, keepdims=True), axis=-1)[..., 0]


def _gumbel_of_columns(key: jax.Array, columns_V: jax.Array, tokens: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return Gumbel noise (N.., V) that depends only on the key, the token and the column's number."""
    # Only threefry, among jax's key implementations, draws the same numbers with and without vmap.
    key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")

    def draw(column: jax.Array) -> jax.Array:
        return _gumbel(jax.random.fold_in(key, column), tokens, dtype)

    return jax.vmap(draw, out_axes=-1)(columns_V)


def _gumbel(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return standard Gumbel noise.

    The noise is -log(e) of an exponential e = -log(1 - u), where u is uniform with steps of 2**-32 (2**-64 in float64).
    The largest noise comes from the smallest u, and near 0 floats can represent such small steps. `jax.random.gumbel`
    has steps of 2**-23 there, unless it takes twice the bits. With 100 000 equal columns, the largest would then tie
    with another about once in a hundred draws, and the lower column would win.
    """
    return _gumbel_of_bits(jax.random.bits(key, shape, jnp.uint64 if dtype == jnp.float64 else jnp.uint32), dtype)


def _gumbel_of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    u = (bits.astype(dtype) + 0.5) * 0.5 ** (8 * bits.dtype.itemsize)
    # Rounding may have made u 1, which would make the noise -inf.
    u = jnp.minimum(u, 1 - jnp.finfo(dtype).epsneg)
    return -jnp.log(-jnp.log1p(-u))


def _nucleus(p_NK: jax.Array, top_p_N1: jax.Array) -> jax.Array:
    """Return which candidates are in the nucleus: the probabilities before each of these add up to less than `top_p`.

    The candidates are sorted, largest first. The first one is always in the nucleus.
    """
    upto_NK = jnp.cumsum(p_NK, -1)
    before_NK = jnp.concatenate([jnp.zeros_like(upto_NK[..., :1]), upto_NK[..., :-1]], -1)
    # A top_p of 1 keeps every candidate, even if the rounded probabilities of the first few add up to 1.
    return (before_NK < top_p_N1 * upto_NK[..., -1:]) | (top_p_N1 >= 1) | (jnp.arange(p_NK.shape[-1]) == 0)


def _odds(logits_NK: jax.Array, top_N1: jax.Array, temperature_N1: jax.Array) -> jax.Array:
    """Return how probable each column is, relative to the row's largest one: from 0 to 1."""
    # Logits equal to the top one are treated separately, as inf - inf is NaN. At temperature 0 the others get 0.
    below_NK = (logits_NK - top_N1) / jnp.maximum(temperature_N1, jnp.finfo(logits_NK.dtype).tiny)
    return jnp.exp(jnp.where(logits_NK == top_N1, 0, below_NK))


def kept_columns(
    logits_NV: jax.Array,
    temperature_N1: jax.Array,
    top_p_N1: jax.Array | None,
    min_p_N1: jax.Array | None,
    split: Split,
    axis: str,
) -> jax.Array:
    """Return which columns of this IPU's shard can be drawn, (N.., V) bool. NaN can, since `sample` draws the first.

    Forward: one all-reduce of 1 number per token; with `top_p_N1` also the collectives of `_in_nucleus`.
    """
    logits_NV = mask_padding(lax.stop_gradient(logits_NV), -1, split, axis, fill=-jnp.inf)
    is_nan_NV = jnp.isnan(logits_NV)
    top_N = lax.pmax(jnp.where(is_nan_NV, -jnp.inf, logits_NV).max(-1), axis)
    p_NV = mask_padding(_odds(logits_NV, top_N[..., None], temperature_N1), -1, split, axis, fill=0)
    kept_NV = jnp.ones(logits_NV.shape, bool)
    if top_p_N1 is not None:
        kept_NV &= _in_nucleus(logits_NV, jnp.where(is_nan_NV, 0, p_NV), top_N, top_p_N1, axis)
    if min_p_N1 is not None:
        kept_NV &= p_NV >= min_p_N1
    return kept_NV | is_nan_NV


def _in_nucleus(logits_NV: jax.Array, p_NV: jax.Array, top_N: jax.Array, top_p_N1: jax.Array, axis: str) -> jax.Array:
    """Return which columns are in the nucleus. The row's largest column always is.

    Forward, per token: one all-reduce of 1 number, one of 15 for each 4 bits of a logit, and one all-gather of 2.
    """
    ranks_NV, top_rank_N = _rank(logits_NV), _rank(top_N)
    needed_N = top_p_N1[..., 0] * lax.psum(p_NV.sum(-1), axis)
    digits_T = jnp.arange(1, 1 << _DIGIT, dtype=ranks_NV.dtype)

    def find_digit(k: jax.Array, threshold_N: jax.Array) -> jax.Array:
        shift = (ranks_NV.dtype.itemsize * 8 - _DIGIT * (k + 1)).astype(ranks_NV.dtype)
        thresholds_NT = threshold_N[..., None] | (digits_T << shift)
        above_NTV = ranks_NV[..., None, :] >= thresholds_NT[..., None]
        mass_NT = lax.psum(jnp.where(above_NTV, p_NV[..., None, :], 0).sum(-1), axis)
        digit_N = (mass_NT >= needed_N[..., None]).sum(-1).astype(ranks_NV.dtype)
        return threshold_N | (digit_N << shift)

    rounds = ranks_NV.dtype.itemsize * 8 // _DIGIT
    zeros_N = as_varying(jnp.zeros(top_N.shape, ranks_NV.dtype), varying_axes(needed_N))
    least_N = lax.fori_loop(0, rounds, find_digit, zeros_N)
    least_N1 = jnp.minimum(least_N, top_rank_N)[..., None]
    above_NV, ties_NV = ranks_NV > least_N1, ranks_NV == least_N1
    of_shard_2N = jnp.stack([jnp.where(above_NV, p_NV, 0).sum(-1), ties_NV.sum(-1).astype(p_NV.dtype)])
    parts_n2N = gather_to_all(of_shard_2N, axis)
    is_before_n1 = (jnp.arange(parts_n2N.shape[0]) < lax.axis_index(axis)).reshape(-1, *(1,) * top_N.ndim)
    tied_before_N = jnp.where(is_before_n1, parts_n2N[:, 1], 0).sum(0)
    number_NV = tied_before_N[..., None] + jnp.cumsum(ties_NV, -1) - 1  # of a tied column among all tied ones, from 0
    # The mass before a tied column; all tied columns have the same probability.
    before_NV = parts_n2N[:, 0].sum(0)[..., None] + number_NV * p_NV
    is_first_NV = (number_NV == 0) & (least_N1 == top_rank_N[..., None])
    tied_NV = ties_NV & ((before_NV < needed_N[..., None]) | is_first_NV)
    # A top_p of 1 keeps every column, even if the rounded probabilities of the first few add up to 1.
    return above_NV | tied_NV | (top_p_N1 >= 1)


def _rank(logits: jax.Array) -> jax.Array:
    """Return unsigned integers in the same order as the logits, 0 above -0."""
    bits = logits.dtype.itemsize * 8
    unsigned = jnp.uint32 if bits == 32 else jnp.uint64
    raw = lax.bitcast_convert_type(logits, unsigned)
    sign = unsigned(1 << (bits - 1))
    return jnp.where(raw & sign != 0, ~raw, raw | sign)


def _check_key(key: Any, axis: str) -> None:
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or shape != ():
        what = f"key={key!r}" if dtype is None else f"key has dtype {dtype} and shape {shape}, so it"
        raise ValueError(
            f"{what} is not one typed key: make it with jax.random.key(seed), or jax.random.wrap_key_data of raw data"
        )
    check_same_on_all("key", key, axis)


def _checked_per_token(
    name: str, value: ArrayLike, tokens: tuple[int, ...], axis: str, bounds: tuple[float, float], rule: str
) -> jax.Array | np.ndarray:
    value = array_like(name, value)
    if not jnp.issubdtype(value.dtype, jnp.floating) and not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {value.dtype}, but must be a real number: convert it first")
    if np.shape(value) not in ((), tokens):
        raise ValueError(
            f"{name} has shape {np.shape(value)}, but logits of {tokens} tokens take one for all or one for each: give "
            f"shape () or {tokens}"
        )
    check_same_on_all(name, value, axis)
    if isinstance(value, Tracer):
        return value
    # Compared in float64, like the bounds: a narrower type would round the lower bound of top_p to 0.
    known = np.asarray(value, np.float64)
    outside = ~((known >= bounds[0]) & (known <= bounds[1]))
    if outside.any():
        raise ValueError(f"{name}={shown(np.asarray(value)[outside].flat[0].item())} is out of range: give {rule}")
    return value


def _per_token(value: ArrayLike, dtype: Any) -> jax.Array:
    """Return a scalar, or one value per token, in a shape that broadcasts with (N.., K)."""
    return jnp.asarray(value, dtype)[..., None]

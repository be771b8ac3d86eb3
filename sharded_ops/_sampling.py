"""Choosing columns of a last dim that is split over the IPUs of a mesh axis: the largest, the k largest, one at random.

No IPU ever holds a whole row. Each finds the best of its own columns, one all-gather hands these few candidates to all,
and every IPU chooses among them alike. Here k = 2 of 9 columns on 3 IPUs:

    IPU               0             1             2
    x              5  1  7       7  0  9       2  9  3
    its two best   7@2 5@0       9@5 7@3       9@7 3@8        value@column
    all-gather         7@2 5@0 9@5 7@3 9@7 3@8                on every IPU, in the order of their columns if values tie
    two best                 9@5 9@7                          the lower column first, as in lax.top_k

A value and its column travel in one integer array, as bits, so that neither is rounded, however many columns there are.

Drawing at random is choosing the largest too. With g independent standard Gumbel noise, the largest of logits / T + g
(of logits + T g: this form needs no case for T = 0) is a draw from softmax(logits / T). See Gumbel 1954; Maddison,
Tarlow and Minka 2014, arXiv:1411.0030, section 2. The noise of a column is drawn from a key of its own, folded from the
column's *global* number: so an IPU draws the noise of its own columns and no other, and how many IPUs there are changes
nothing.

Dims: N tokens (any number of leading dims), V columns, K chosen or candidate columns; n IPUs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from sharded_ops._arguments import array, array_like, whole_number
from sharded_ops._collectives import as_varying, check_same_on_all, gather_to_all, reduce_to_all
from sharded_ops._split import Split, check_shard, local_rows, mask_padding, split_over, varying_axes


def argmax(x_shard: jax.Array, *, size: int, axis: str = "ipu") -> jax.Array:
    """Return `jnp.argmax` over a last dim that is split over the IPUs of `axis`.

    Forward: one all-gather of 2 numbers per token: each shard's largest value, widened to 32 bits if it has fewer, and
    its column. There is no backward pass: an index has no gradient.

    Args:
        x_shard: (N.., V) globally, padded with `Split(size, n).pad(x, -1)`; each IPU holds (N.., ceil(V/n)). Any real
            dtype, or bool.
        size: V, without padding. Padding is not read and never chosen.
        axis: the mesh axis.

    Returns:
        (N..) int32, the same on all IPUs: the column in [0, size). Of columns that tie, the lowest; NaN is largest.

    Raises:
        ValueError: `x_shard` is not real, does not fit `size` or is the same on all of several IPUs, or `axis` is not
            the enclosing shard_map's.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> best = jax.shard_map(partial(argmax, size=3), mesh=mesh, in_specs=P(None, "ipu"), out_specs=P())
        >>> x_NV = jnp.array([[1, 2, 3, 9], [5, 5, 4, 9]])  # 3 columns and one of padding
        >>> print(jax.jit(best)(x_NV))
        [2 0]
    """
    x_shard = array("x_shard", x_shard)
    split = _checked_split("x_shard", x_shard, size, axis)
    return _argmax(_widened(x_shard), split, axis)


def top_k(x_shard: jax.Array, k: int, *, size: int, axis: str = "ipu") -> tuple[jax.Array, jax.Array]:
    """Return `lax.top_k` over a last dim that is split over the IPUs of `axis`.

    Forward: one all-gather of 2 min(k, ceil(V/n)) numbers per token, values widened to 32 bits if they have fewer.
    Backward: under check_vma=True nothing, each IPU keeps the gradients of its own columns; under check_vma=False one
    all-reduce of the values' cotangent, (N.., k). Forward-mode derivatives: one all-reduce of (N.., k).

    Args:
        x_shard: (N.., V) globally, padded with `Split(size, n).pad(x, -1)`; each IPU holds (N.., ceil(V/n)). Any real
            dtype, or bool.
        k: how many columns, 1 to `size`. It may be more than an IPU has.
        size: V, without padding. Padding is not read and never chosen, and its gradient is zero.
        axis: the mesh axis.

    Returns:
        The k largest values, largest first, (N.., k) in the dtype of `x_shard`; and their columns, (N.., k) int32 in
        [0, size). Both the same on all IPUs. Of columns that tie, the lower comes first; NaN is largest, whatever its
        sign bit (`lax.top_k` puts one whose sign bit is set last), and 0 is larger than -0.

    Raises:
        ValueError: `k` is no int from 1 to `size`, `x_shard` is not real, does not fit `size` or is the same on all of
            several IPUs, or `axis` is not the enclosing shard_map's.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> best = jax.shard_map(partial(top_k, k=2, size=3), mesh=mesh, in_specs=P(None, "ipu"), out_specs=P())
        >>> values_NK, columns_NK = jax.jit(best)(jnp.array([[1, 2, 3, 9]]))  # 3 columns and one of padding
        >>> print(values_NK, columns_NK)
        [[3 2]] [[2 1]]
    """
    x_shard = array("x_shard", x_shard)
    split = _checked_split("x_shard", x_shard, size, axis)
    k = whole_number("k", k, at_least=1, at_most=split.size)
    values_NK, columns_NK = _top_k(_widened(x_shard), k, split, axis)
    values_NK = values_NK.astype(x_shard.dtype)
    if jnp.issubdtype(x_shard.dtype, jnp.floating):
        # A rule's result has to vary as its tangent; what jnp.where makes of no tokens varies over nothing.
        values_NK = as_varying(values_NK, varying_axes(x_shard) - {axis})
        values_NK = _picked(x_shard, values_NK, columns_NK, split, axis)
    return values_NK, columns_NK


def sample(
    key: jax.Array,
    logits_shard: jax.Array,
    *,
    size: int,
    axis: str = "ipu",
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
) -> jax.Array:
    """Draw one column for each token from softmax(logits / temperature), over a last dim that is split over `axis`.

    The same key draws the same columns on any number of IPUs: the random bits are the same, and a draw could differ
    only where two columns tie to within the rounding of a logarithm. Probabilities are those of the logits in float32
    (float64 if they are), exact to about 2**-32. Tokens are drawn independently of each other; to draw again, or for
    another batch, take another key, and under `jax.vmap` one for each row.

    Without `top_k`: Gumbel noise for each token and column, drawn by the IPU that holds the column; then one all-gather
    of 2 numbers per token. It costs a hash and two logarithms for each token and column, and a hash for each column.
    With `top_k`: one all-gather of 2 min(top_k, ceil(V/n)) numbers per token; then every IPU draws alike among the
    top_k candidates, whose noise is all there is. There is no backward pass: an index has no gradient.

    Args:
        key: one typed key, `jax.random.key(seed)`, the same on all IPUs of `axis`. Under check_vma=False it cannot be
            seen whether it is; with keys that differ, the columns differ between IPUs and are not distributed so.
        logits_shard: (N.., V) globally, padded with `Split(size, n).pad(logits, -1)`; each IPU holds (N.., ceil(V/n)).
            Any floating dtype; half types are computed in float32. A logit of -inf is never drawn, unless the whole row
            is -inf: that gives column 0. In a row with NaN the first NaN is drawn, as `argmax` chooses it.
        size: V, without padding. Padding is not read and never drawn.
        axis: the mesh axis.
        temperature: a scalar, or (N..): one for each token. 0 chooses as `argmax` does. It must be finite and not
            negative; where it is traced, that cannot be checked.
        top_k: draws from the top_k largest columns only, as `sharded_ops.top_k` finds them. None: from all.
        top_p: a scalar or (N..), more than 0 and at most 1: draws from the nucleus only, the fewest of the largest
            columns that have at least this probability together (Holtzman et al. 2019, arXiv:1904.09751, section 3.1).
            It needs `top_k`, and a column's probability is its share among those top_k, after the temperature;
            `top_k=size` gives the nucleus of the whole row, and gathers whole rows for it.

    Returns:
        (N..) int32, the same on all IPUs: columns in [0, size).

    Raises:
        ValueError: `key` is not one typed key or differs between IPUs; the logits are not floating or their shard does
            not fit `size` or is the same on all of several IPUs; `temperature` or `top_p` is out of its range, has not
            the shape () or (N..) or differs between IPUs; `top_k` is no int from 1 to `size`; `top_p` comes without
            it; or `axis` is not the enclosing shard_map's.

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
    split = _checked_split("logits_shard", logits_shard, size, axis)
    if not jnp.issubdtype(logits_shard.dtype, jnp.floating):
        raise ValueError(
            f"logits_shard has dtype {logits_shard.dtype}, but logits must be floating: convert them first"
        )
    _check_key(key, axis)
    if top_k is not None:
        top_k = whole_number("top_k", top_k, at_least=1, at_most=split.size, instead="None for all columns")
    logits_NV = _widened(logits_shard)
    tokens, dtype = logits_NV.shape[:-1], logits_NV.dtype
    temperature = _checked_per_token(
        "temperature", temperature, tokens, axis, lowest=0, highest=float(jnp.finfo(dtype).max)
    )
    if top_p is not None:
        # The smallest number above zero: the open end of the interval (0, 1].
        top_p = _checked_per_token("top_p", top_p, tokens, axis, lowest=float(np.nextafter(0, 1)), highest=1)
        if top_k is None:
            raise ValueError(
                f"top_p={_shown(top_p)} needs top_k, as the nucleus is found among gathered candidates: give top_k, at "
                f"most size={split.size}, which takes the nucleus of the whole row"
            )
    if _is_zero(temperature):
        return _argmax(logits_NV, split, axis)
    temperature_N1 = _per_token(temperature, dtype)
    if top_k is None:
        columns_V = split.offset(lax.axis_index(axis)) + jnp.arange(split.local, dtype=jnp.int32)
        noise_NV = _gumbel_of_columns(key, columns_V, tokens, dtype)
        return _argmax(logits_NV + temperature_N1 * noise_NV, split, axis)
    logits_NK, columns_NK = _top_k(logits_NV, top_k, split, axis)
    drawn_NK = logits_NK + temperature_N1 * _gumbel(key, logits_NK.shape, dtype)
    if top_p is not None:
        nucleus_NK = _nucleus(logits_NK, temperature_N1, _per_token(top_p, dtype))
        drawn_NK = jnp.where(nucleus_NK, drawn_NK, -jnp.inf)
    return jnp.take_along_axis(columns_NK, jnp.argmax(drawn_NK, -1, keepdims=True), axis=-1)[..., 0]


def _argmax(x_NV: jax.Array, split: Split, axis: str) -> jax.Array:
    x_NV = mask_padding(lax.stop_gradient(x_NV), -1, split, axis, fill=_lowest(x_NV.dtype))
    columns_N = split.offset(lax.axis_index(axis)) + jnp.argmax(x_NV, -1).astype(jnp.int32)
    values_nN, columns_nN = _gather_candidates(x_NV.max(-1), columns_N, axis)
    # The first of equal shards has the lowest columns; and padding, the last column there is, loses every tie.
    return jnp.take_along_axis(columns_nN, jnp.argmax(values_nN, 0)[None], axis=0)[0]


def _top_k(x_NV: jax.Array, k: int, split: Split, axis: str) -> tuple[jax.Array, jax.Array]:
    x_NV = lax.stop_gradient(x_NV)
    if jnp.issubdtype(x_NV.dtype, jnp.floating):
        # lax.top_k puts NaN first or last by its sign bit; last is behind the padding.
        x_NV = jnp.where(jnp.isnan(x_NV), jnp.nan, x_NV)
    x_NV = mask_padding(x_NV, -1, split, axis, fill=_lowest(x_NV.dtype))
    values_NK, columns_NK = lax.top_k(x_NV, min(k, split.local))
    columns_NK = split.offset(lax.axis_index(axis)) + columns_NK.astype(jnp.int32)
    # Side by side in the order of their shards, so that of equal values the lower column still comes first.
    values_NK, columns_NK = (
        jnp.moveaxis(of_all, 0, -2).reshape(*x_NV.shape[:-1], split.parts * values_NK.shape[-1])
        for of_all in _gather_candidates(values_NK, columns_NK, axis)
    )
    values_NK, places_NK = lax.top_k(values_NK, k)
    return values_NK, jnp.take_along_axis(columns_NK, places_NK, axis=-1)


def _gather_candidates(values: jax.Array, columns: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return values of 32 or 64 bits and their columns of all IPUs, (n, ..) each, in one all-gather of their bits."""
    carrier = jnp.int32 if values.dtype.itemsize == 4 else jnp.int64
    pair = jnp.stack([lax.bitcast_convert_type(values, carrier), columns.astype(carrier)])
    pairs = gather_to_all(pair, axis)
    return lax.bitcast_convert_type(pairs[:, 0], values.dtype), pairs[:, 1].astype(jnp.int32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _picked(x_NV: jax.Array, values_NK: jax.Array, columns_NK: jax.Array, split: Split, axis: str) -> jax.Array:
    """Return `values_NK`, with the derivative by `x_NV` of having been picked out of it at `columns_NK`.

    The values came as bits, which have no derivative.
    """
    return values_NK


@_picked.defjvp
def _picked_jvp(split: Split, axis: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x_NV, values_NK, columns_NK = primals
    rows_NK = local_rows(columns_NK, split, axis)
    dvalues_NK = jnp.take_along_axis(tangents[0], rows_NK, axis=-1, mode="fill", fill_value=0)
    # Picked anew, not `values_NK`: what this rule returns is differentiated for second derivatives.
    return _picked(x_NV, values_NK, columns_NK, split, axis), reduce_to_all(dvalues_NK, axis)


def _gumbel_of_columns(key: jax.Array, columns_V: jax.Array, tokens: tuple[int, ...], dtype: Any) -> jax.Array:
    """Gumbel noise (N.., V) that depends on the key, the token and the column's number, and on nothing else."""
    # Of jax's kinds of keys only threefry draws the same under vmap as without.
    key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")

    def draw(column: jax.Array) -> jax.Array:
        return _gumbel(jax.random.fold_in(key, column), tokens, dtype)

    return jax.vmap(draw, out_axes=-1)(columns_V)


def _gumbel(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Standard Gumbel noise -log(e), of exponential e = -log(1 - u), where uniform u has steps of 2**-32 (2**-64).

    The largest noise is that of the smallest u, which floats near 0 can tell apart. `jax.random.gumbel` has steps of
    2**-23 there, unless it takes twice the bits: of 100 000 equal columns, the largest would tie with another about
    once in a hundred draws, and the lower column would win.
    """
    return _gumbel_of_bits(jax.random.bits(key, shape, jnp.uint64 if dtype == jnp.float64 else jnp.uint32), dtype)


def _gumbel_of_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    u = (bits.astype(dtype) + 0.5) * 0.5 ** (8 * bits.dtype.itemsize)
    # Rounding may have made it 1, the noise of which is -inf.
    u = jnp.minimum(u, 1 - jnp.finfo(dtype).epsneg)
    return -jnp.log(-jnp.log1p(-u))


def _nucleus(logits_NK: jax.Array, temperature_N1: jax.Array, top_p_N1: jax.Array) -> jax.Array:
    """Return which of the candidates, largest first, have less than `top_p` before them. Always the first."""
    top_N1 = logits_NK[..., :1]
    # Equal logits first, as inf - inf is no difference; and at temperature 0 all others have no probability.
    below_NK = (logits_NK - top_N1) / jnp.maximum(temperature_N1, jnp.finfo(logits_NK.dtype).tiny)
    p_NK = jnp.exp(jnp.where(logits_NK == top_N1, 0, below_NK))
    upto_NK = jnp.cumsum(p_NK, -1)
    before_NK = jnp.concatenate([jnp.zeros_like(top_N1), upto_NK[..., :-1]], -1)
    # At 1 nothing is cut, though the first few may add up to 1 when rounded.
    return (before_NK < top_p_N1 * upto_NK[..., -1:]) | (top_p_N1 >= 1) | (jnp.arange(p_NK.shape[-1]) == 0)


def _checked_split(name: str, x_shard: jax.Array, size: int, axis: str) -> Split:
    split = split_over(size, axis)
    if not any(jnp.issubdtype(x_shard.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"{name} has dtype {x_shard.dtype}, which has no order: give real numbers")
    check_shard(name, x_shard, -1, split, axis)
    return split


def _widened(x: jax.Array) -> jax.Array:
    """Return `x` in 32 bits if its dtype has fewer: as exact, in the same order."""
    if x.dtype.itemsize >= 4:
        return x
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _lowest(dtype: Any) -> float:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else int(jnp.iinfo(dtype).min)


def _check_key(key: Any, axis: str) -> None:
    dtype, shape = getattr(key, "dtype", None), np.shape(key)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or shape != ():
        what = f"key={key!r}" if dtype is None else f"key has dtype {dtype} and shape {shape}, so it"
        raise ValueError(
            f"{what} is not one typed key: make it with jax.random.key(seed), or jax.random.wrap_key_data of raw data"
        )
    check_same_on_all("key", key, axis)


def _checked_per_token(
    name: str, value: ArrayLike, tokens: tuple[int, ...], axis: str, *, lowest: float, highest: float
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
    # In float64, as the bounds are: rounded to a narrower type, the lowest of top_p is 0.
    known = np.asarray(value, np.float64)
    outside = ~((known >= lowest) & (known <= highest))
    if outside.any():
        bounds = "a finite number, at least 0" if lowest == 0 else "more than 0, at most 1"
        raise ValueError(f"{name}={_shown(np.asarray(value)[outside].flat[0])} is out of range: give {bounds}")
    return value


def _is_zero(temperature: ArrayLike) -> bool:
    return not isinstance(temperature, Tracer) and not np.any(np.asarray(temperature))


def _per_token(value: ArrayLike, dtype: Any) -> jax.Array:
    """Return a scalar, or one for each token, to stand beside (N.., K)."""
    return jnp.asarray(value, dtype)[..., None]


def _shown(value: Any) -> str:
    return "<traced>" if isinstance(value, Tracer) else f"{np.asarray(value)}"

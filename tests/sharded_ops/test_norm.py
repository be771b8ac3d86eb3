"""Test the split norms with large means and wide scales; see also test_ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, layer_norm, rms_norm
from support.dense_twins import dense_layer_norm, dense_rms_norm
from support.harness import assert_close, normal, on_ipus, padded, unpadded

EPSILON = 0.1
_dense_rms, _dense_layer = (functools.partial(op, epsilon=EPSILON) for op in (dense_rms_norm, dense_layer_norm))


@pytest.mark.parametrize("op", [rms_norm, layer_norm])
def test_a_wide_scale_is_not_rounded_to_a_half_types_x(op):
    split, x = Split(7, 3), normal(0, (20, 7), jnp.bfloat16)
    vectors = [normal(1 + i, (7,), np.float32) for i in range(1 if op is rms_norm else 2)]
    specs = (split.spec(1, 2, "ipu"), *(P("ipu") for _ in vectors))
    sharded = on_ipus(functools.partial(op, size=7, epsilon=EPSILON), 3, specs, specs[0])
    out = sharded(padded(split, x, 1), *(padded(split, vector, 0) for vector in vectors))

    wide = x.astype(np.float64)
    centred = wide if op is rms_norm else wide - wide.mean(-1, keepdims=True)
    want = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + EPSILON) * vectors[0]
    want = want if op is rms_norm else want + vectors[1]
    # One rounding to bfloat16, and the rounding of float32 in addition, but not two to bfloat16.
    errors = np.abs(np.asarray(unpadded(split, out, 1), np.float64) - want)
    assert (errors <= 1.02 * 2.0**-8 * np.abs(want)).all()


def _layer_norm_in_float64(x, scale, ct):
    """Return the result and dx, by formulas worked out by hand."""
    x, scale, ct = (np.asarray(array, np.float64) for array in (x, scale, ct))
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True))
    y = centred / deviation
    dy = ct * scale
    dx = (dy - dy.mean(-1, keepdims=True) - y * (dy * y).mean(-1, keepdims=True)) / deviation
    return y * scale, dx


def _error_from_rounded_means(x, columns):
    """Return how far layer_norm(x) without scale may be off if each mean is rounded to float32 once.

    These are the mean of each IPU's `columns`, and the mean of the whole row. With means of 1e4 their roundings are
    1e-3. All other roundings are a thousand times smaller; 1% is added for them.
    """
    wide = x.astype(np.float64)
    mean, deviation = wide.mean(-1, keepdims=True), wide.std(-1, keepdims=True)
    parts = [wide[:, i : i + columns] for i in range(0, wide.shape[1], columns)]
    weights = np.array([part.shape[1] / wide.shape[1] for part in parts])
    means = np.stack([part.mean(-1) for part in parts], -1)
    roundings = weights * (means.astype(np.float32) - means)
    in_mean = np.abs(roundings.sum(-1, keepdims=True)) + np.spacing(mean.astype(np.float32)) / 2
    # The variance has the terms weights * (means - mean)^2. A small change of it changes its root by 1 / (2 deviation).
    in_deviation = np.abs((roundings * (means - mean)).sum(-1, keepdims=True)) / deviation
    return 1.01 * (in_mean + np.abs(wide - mean) / deviation * in_deviation) / deviation


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(("n", "size"), [(1, 4096), (8, 21)])
def test_layer_norm_of_a_mean_of_ten_thousand_deviations(typed, n, size):
    split, mean = Split(size, n), 1e4
    x = (normal(0, (16, size)) + mean).astype(np.float32)
    scale, ct = normal(1, (size,)), normal(2, (16, size))

    op = functools.partial(layer_norm, size=size, epsilon=0.0)
    sharded = on_ipus(op, n, (P(None, "ipu"), P("ipu")), P(None, "ipu"), typed)
    out, vjp = jax.vjp(lambda x: split.unpad(sharded(split.pad(x, 1), split.pad(scale, 0)), 1), x)
    (dx,) = vjp(ct)

    want, want_dx = _layer_norm_in_float64(x, scale, ct)
    assert (np.abs(out - want) <= np.abs(scale) * _error_from_rounded_means(x, -(-size // n))).all()
    assert np.abs(dx - want_dx).max() <= 2 * mean * 2**-23 * np.abs(ct * scale).max()
    # The docstring's claim about the other formula.
    naive_variance = np.mean(x**2, -1, dtype=np.float32) - np.mean(x, -1, dtype=np.float32) ** 2
    assert np.abs(naive_variance - 1).max() > 0.5


def test_mixed_dtypes_keep_the_inputs_and_shards_may_be_alike_on_all_ipus():
    x, scale, bias = normal(0, (3, 2), jnp.bfloat16), normal(1, (2,)), normal(2, (2,))

    def each_ipu(*alike):
        x, scale, bias = (lax.pcast(array, "ipu", to="varying") for array in alike)
        return layer_norm(x, scale, bias, size=4, epsilon=EPSILON)

    out = on_ipus(each_ipu, 2, P(), P(None, "ipu"))(x, scale, bias)
    twice = [np.concatenate([array, array], -1) for array in (x, scale, bias)]
    assert out.dtype == jnp.bfloat16
    assert_close(out, jax.jit(_dense_layer)(*twice), np.abs(np.asarray(out, np.float32)) + 1e-3, roundings=1)

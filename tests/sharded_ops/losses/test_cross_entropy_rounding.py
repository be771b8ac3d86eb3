"""Test that the split cross-entropy is exact, also for large and extreme logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, log_softmax_cross_entropy
from support.harness import MODES, normal, on_ipus, padded
from support.losses import COLUMNS, EXTREMES, dense_loss, in_float64, sharded_cross_entropy

WIDE = 61  # columns, on 3 IPUs: 21, 21 and 19


@pytest.mark.fast("3-0.1")
@pytest.mark.parametrize(("n", "smoothing"), [(1, 0.1), (3, 0.0), (3, 0.1)])
def test_where_logits_and_losses_are_large_nothing_is_lost_of_the_gradient(n, smoothing):
    """The three floats are the label's logit, the largest logit and the log-sum-exp relative to it."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, WIDE))
    logits = np.concatenate([x * 30, x * 300, x + 1e4, rng.choice([-1e4, 1e4, 0, 1], (64, WIDE))]).astype(np.float32)
    labels, ct = rng.integers(0, WIDE, len(logits)).astype(np.int32), np.ones(len(logits), np.float32)
    loss, dlogits = sharded_cross_entropy("typed-outside", n, WIDE, logits, labels, ct, label_smoothing=smoothing)
    want_loss, want, log_p = in_float64(logits, labels)
    want_loss = (1 - smoothing) * want_loss - smoothing * log_p.mean(-1)
    want += smoothing * ((np.arange(WIDE) == labels[:, None]) - 1 / WIDE)
    np.testing.assert_allclose(dlogits, want, rtol=0, atol=4e-7)
    np.testing.assert_allclose(loss, want_loss, rtol=3e-7, atol=1e-6)


@pytest.mark.fast("untyped-inside")
@pytest.mark.parametrize("mode", MODES)
def test_extreme_logits(mode):
    logits = np.array([row for row, _ in EXTREMES], np.float32)
    labels = np.array([label for _, label in EXTREMES], np.int32)
    want_loss, want_dlogits, _ = in_float64(logits, labels)
    is_finite = np.isfinite(want_loss)

    loss, dlogits = sharded_cross_entropy(mode, 3, 7, logits, labels, np.ones(len(EXTREMES), np.float32))
    np.testing.assert_array_equal(loss[~is_finite], np.inf)
    np.testing.assert_allclose(loss[is_finite], want_loss[is_finite], rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(dlogits, want_dlogits, rtol=0, atol=4e-7)


@pytest.mark.slow
def test_the_loss_is_float32_or_float64_whatever_the_options_are():
    """Options may not widen the result, though numpy's numbers have a dtype, and Python's are float64 under x64."""
    options = {"label_smoothing": np.float64(0.1), "z_loss": 0.1, "soft_cap": np.float64(3), "temperature": 2.0}
    with jax.enable_x64(True):
        for dtype, wanted in ((jnp.bfloat16, jnp.float32), (jnp.float64, jnp.float64)):
            logits, labels = padded(Split(6, 4), normal(0, (3, 6)).astype(dtype), 1), np.arange(3)
            op = functools.partial(log_softmax_cross_entropy, size=6, **options)
            sharded = on_ipus(op, 4, (COLUMNS, P()), P())
            gradient = jax.grad(lambda logits, labels, op=sharded: op(logits, labels).sum())
            assert jax.eval_shape(gradient, logits, labels).dtype == dtype
            assert jax.eval_shape(sharded, logits, labels).dtype == wanted
        loss = sharded(logits, labels)  # in float64
        want = jax.jit(lambda x, y: dense_loss(x, y, None, **options))(logits[:, :6], labels)
        np.testing.assert_allclose(loss, want, rtol=1e-14)

"""Test the split softmax and its logarithm with extreme logits and half types; see also test_ops."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, log_softmax, log_softmax_cross_entropy, softmax
from support.harness import MODES, normal, on_ipus, padded, split_vjp, unpadded
from support.losses import EXTREMES, in_float64


@pytest.mark.fast("typed-outside")
@pytest.mark.parametrize("mode", MODES)
def test_extreme_logits(mode):
    logits = np.array([row for row, _ in EXTREMES], np.float32)
    *_, want_log_p = in_float64(logits, np.zeros(len(logits)))
    ct, options = normal(0, logits.shape), {"out_dim": 1, "padding": -np.inf, "size": 7}
    log_p, (dlogits,) = split_vjp(log_softmax, mode, 3, [logits], dims=[1], ct=ct, **options)
    np.testing.assert_allclose(log_p, want_log_p, rtol=2e-6, atol=1e-6)
    want_dlogits = ct - np.exp(want_log_p) * ct.sum(-1, keepdims=True)
    np.testing.assert_allclose(dlogits, want_dlogits, atol=4e-6)


def test_what_is_not_a_number_is_hidden_by_neither_of_them_nor_by_the_loss():
    logits = np.zeros((1, 6), np.float32)
    logits[0, 4] = np.nan

    def each_ipu(logits):
        loss = log_softmax_cross_entropy(logits, np.zeros(1, np.int32), size=6)
        return log_softmax(logits, size=6), softmax(logits, size=6), loss

    columns = P(None, "ipu")
    assert all(np.isnan(found).all() for found in on_ipus(each_ipu, 3, columns, (columns, columns, P()))(logits))


def test_probabilities_of_half_logits_are_rounded_once():
    split, logits = Split(37, 3), (4 * normal(0, (20, 37))).astype(jnp.bfloat16)
    sharded = on_ipus(functools.partial(softmax, size=37), 3, P(None, "ipu"), P(None, "ipu"))
    p = np.asarray(unpadded(split, sharded(padded(split, logits, 1)), 1), np.float64)
    want = np.exp(logits.astype(np.float64))
    want /= want.sum(-1, keepdims=True)
    # One rounding to bfloat16, and that of float32 in addition; rounding the logarithm would give many times as much.
    assert (np.abs(p - want) <= 1.02 * 2.0**-8 * want).all()

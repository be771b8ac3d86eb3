"""Test the split cross-entropy: against optax's, with labels of all dtypes, with padding that must not leak."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, log_softmax_cross_entropy
from support.harness import assert_close, dense_vjp, normal, on_ipus, padded
from support.losses import COLUMNS, ROUNDINGS, TOKENS, sharded_cross_entropy


def test_the_cross_entropy_is_optaxs():
    logits, labels = normal(0, (TOKENS, 10)), np.arange(TOKENS, dtype=np.int32)
    ct = np.ones(TOKENS, np.float32)
    loss, dlogits = sharded_cross_entropy("typed-outside", 4, 10, logits, labels, ct)
    want, (want_dlogits,) = dense_vjp(optax.softmax_cross_entropy_with_integer_labels, [logits], [labels], ct=ct)
    assert_close(loss, want, 1 + want, ROUNDINGS)
    assert_close(dlogits, want_dlogits, 1, ROUNDINGS)


# What must not leak


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "label_smoothing": 0.1, "z_loss": 0.1}])
def test_no_padding_leaks_whatever_it_holds(options):
    logits, labels, ct = normal(0, (TOKENS, 5)), np.arange(TOKENS, dtype=np.int32) - 1, np.ones(TOKENS, np.float32)
    zero_loss, zero_dlogits = sharded_cross_entropy("typed-outside", 8, 5, logits, labels, ct, fill=0, **options)
    for fill in (np.nan, 1e9, np.inf, -np.inf):
        loss, dlogits = sharded_cross_entropy("typed-outside", 8, 5, logits, labels, ct, fill=fill, **options)
        np.testing.assert_array_equal(loss, zero_loss)
        np.testing.assert_array_equal(dlogits, zero_dlogits)


# Labels


def test_labels_of_every_dtype_and_what_stands_outside():
    """Labels are constants of one program, since numpy's int64 holds labels that jax's int32 would truncate."""
    cases: Any = (
        (np.array([0, 3, -1, 6], np.int8), {}, [0, 3, None, 6]),
        (np.array([0, 3, 255, 6], np.uint8), {"ignore_index": 255, "out_of_range": "nan"}, [0, 3, None, 6]),
        # -100 is not a uint8, so no label is ignored: 156 must not be taken for -100 wrapped around
        (np.array([0, 3, 156, 6], np.uint8), {"ignore_index": -100, "out_of_range": "clip"}, [0, 3, 6, 6]),
        (np.array([0, 2**32 + 3, -(2**40), 6]), {}, [0, None, None, 6]),
        (np.array([0, 2**32 + 3, -(2**40), 6]), {"out_of_range": "clip"}, [0, 6, 0, 6]),
        (np.array([0, 2**40, 3, 6]), {"ignore_index": 2**40, "out_of_range": "nan"}, [0, None, 3, 6]),
        (np.array([0, 2**32 + 3, 3, 6], np.uint64), {"out_of_range": "clip"}, [0, 6, 3, 6]),
        (np.array([0, 3, 7, 6], np.int16), {"ignore_index": 2**40, "out_of_range": "nan"}, [0, 3, np.nan, 6]),
        (np.array([0, 3, 2, 6], np.uint32), {"ignore_index": np.int64(0)}, [None, 3, 2, 6]),
    )

    def all_of_them(logits):
        losses = [log_softmax_cross_entropy(logits, labels, size=7, **options) for labels, options, _ in cases]
        return jnp.stack(losses)

    logits = normal(0, (4, 7))
    log_p = np.asarray(jax.nn.log_softmax(logits))
    got = on_ipus(all_of_them, 3, COLUMNS, P())(padded(Split(7, 3), logits, 1))
    for loss, (_, _, columns) in zip(got, cases, strict=True):
        want = [0 if y is None else np.nan if y is np.nan else -log_p[i, y] for i, y in enumerate(columns)]
        np.testing.assert_allclose(loss, np.array(want, np.float32), rtol=1e-5)

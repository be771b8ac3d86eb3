"""Test the split cross-entropy against a dense twin: options, labels, padding that must not leak."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, log_softmax_cross_entropy
from support.harness import assert_close, dense_vjp, every_case, examples, normal, on_ipus, padded, seeds, split_vjp
from support.losses import COLUMNS, ROUNDINGS, TOKENS, dense_cross_entropy, dense_loss, of_each, sharded_cross_entropy

WEIGHTED = {"ignore_index": 2, "weighted": True, "reduction": "mean"}
# The options of each result of one compiled program. `soft` and `weighted` say which operands an entry uses.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"label_smoothing": 0.1, "z_loss": 0.01} | WEIGHTED,
    {"soft_cap": 3.0, "temperature": 0.7, "out_of_range": "clip", "weighted": True},
    {"label_smoothing": 1.0, "soft_cap": 5.0, "reduction": "sum", "ignore_index": -100},
    {"label_smoothing": 0.3, "z_loss": 0.1, "soft_cap": 4.0, "temperature": 2.0, "out_of_range": "clip"} | WEIGHTED,
    {"soft": True, "label_smoothing": 0.2, "z_loss": 0.05, "soft_cap": 6.0, "weighted": True, "reduction": "mean"},
)


def _options_of_one_program(logits, soft, weights, labels, *, size):
    """Return (options, N..): the loss and the log-sum-exp of each entry."""
    op = functools.partial(log_softmax_cross_entropy, logits, size=size, return_log_sum_exp=True)
    return of_each(OPTIONS, op, labels, weights, soft)


def _dense_options(logits, soft, weights, labels):
    rows = []
    for options in OPTIONS:
        x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        if "soft_cap" in options:
            x = options["soft_cap"] * jnp.tanh(x / options["soft_cap"])
        lse = jax.nn.logsumexp(x / options.get("temperature", 1.0), -1)
        rows += [dense_loss(logits, soft if options.get("soft") else labels, weights, **options), lse]
    return jnp.stack([jnp.broadcast_to(row, labels.shape) for row in rows])


def _labels(data, shape, size) -> np.ndarray:
    each = st.one_of(st.integers(0, size - 1), st.sampled_from((-1, -100, -(2**31), size, size + 1, 2**31 - 1)))
    count = int(np.prod(shape))
    return np.array(data.draw(st.lists(each, min_size=count, max_size=count)), np.int32).reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "n", "size", "dtype", "shape"),
    [
        ("typed-outside", 3, 7, jnp.float32, (2, 3)),
        ("typed-inside", 2, 6, jnp.bfloat16, (5,)),
        ("untyped-outside", 4, 10, jnp.float16, (2, 1, 2)),
        ("untyped-inside", 8, 5, jnp.float32, ()),
    ],
)
@examples
@given(seed=seeds, scale=st.sampled_from((0.1, 3)), data=st.data())
def test_every_option(mode, n, size, dtype, shape, seed, scale, data):
    lead = len(shape)
    logits = (normal(seed, (*shape, size)) * scale).astype(dtype)
    # Soft targets need not add up to 1; some are negative, some 0.
    soft = np.round(normal(seed + 1, (*shape, size)) + 0.5, 1).astype(dtype)
    weights, labels = np.abs(normal(seed + 2, shape)).astype(np.float32), _labels(data, shape, size)
    row = data.draw(st.integers(0, 2 * len(OPTIONS) - 1))
    ct = np.zeros((2 * len(OPTIONS), *shape), np.float32)
    ct[row] = normal(seed + 3, shape)

    floats, dims = [logits, soft, weights], [lead, lead, None]
    loss, (dlogits, dsoft, dweights) = split_vjp(
        _options_of_one_program, mode, n, floats, [labels], dims=dims, ct=ct, size=size
    )
    want, (want_dlogits, want_dsoft, want_dweights) = dense_vjp(_dense_options, floats, [labels], ct=ct)

    assert_close(loss, want, 1 + np.abs(want).max(), ROUNDINGS)
    for got, wanted in ((dlogits, want_dlogits), (dsoft, want_dsoft)):
        largest = 1 + np.abs(wanted.astype(np.float32)).max(initial=0)
        assert_close(got, wanted, largest, ROUNDINGS if dtype == jnp.float32 else 1)
    assert_close(dweights, want_dweights, 1 + np.abs(want_dweights).max(initial=0), ROUNDINGS)


@pytest.mark.slow
@every_case
@examples
@given(seed=seeds, scale=st.sampled_from((1e-3, 1, 30)), offset=st.sampled_from((0, 1e4, -1e4)), data=st.data())
def test_cross_entropy(mode, n, size, dtype, seed, scale, offset, data):
    logits = (normal(seed, (TOKENS, size)) * scale + offset).astype(dtype)
    labels, ct = _labels(data, (TOKENS,), size), normal(seed + 1, (TOKENS,))

    loss, dlogits = sharded_cross_entropy(mode, n, size, logits, labels, ct)

    want, (want_dlogits,) = dense_vjp(dense_cross_entropy, [logits], [labels], ct=ct)
    assert_close(loss, want, 1 + want, ROUNDINGS)
    assert_close(dlogits, want_dlogits, ((1 + want) * np.abs(ct))[:, None], ROUNDINGS)
    without_label = (labels < 0) | (labels >= size)
    np.testing.assert_array_equal(loss[without_label], 0)
    np.testing.assert_array_equal(dlogits[without_label].astype(np.float32), 0)


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

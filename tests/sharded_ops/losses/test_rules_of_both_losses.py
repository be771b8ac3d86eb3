"""Test what both cross-entropies promise of tokens and labels: the split one, and the fused one in both its ways."""

import functools
from typing import Any

import numpy as np
import pytest

from sharded_ops import linear_cross_entropy, log_softmax_cross_entropy
from support.harness import normal, split_vjp

SIZE, FEATURES, IPUS = 7, 4, 3
TABLE = normal(9, (SIZE, FEATURES))
_fused = functools.partial(linear_cross_entropy, token_chunk=2, column_chunk=2)
# Each loss, of tokens that are rows of logits or hidden states, and a reduction that it can make.
KINDS: dict[str, tuple[Any, str]] = {
    "logits": (log_softmax_cross_entropy, "none"),
    "backward": (functools.partial(_fused, gradients="backward"), "none"),
    "forward": (functools.partial(_fused, gradients="forward"), "mean"),
}


def _tokens(kind, count):
    return normal(0, (count, SIZE if kind == "logits" else FEATURES))


def _weighted(tokens, *rest, of, **options):
    *table, weights, labels = rest
    return of(tokens, *table, labels, weights=weights, **options)


def _run(kind, op, tokens, weights, ct, *labels, **options):
    """Return the loss and the gradients of the tokens and of the weights, of an op of tokens, table and weights."""
    floats, dims = ([tokens, weights], [1, None]) if kind == "logits" else ([tokens, TABLE, weights], [None, 0, None])
    loss, (dtokens, *dtable, dweights) = split_vjp(
        op, "typed-outside", IPUS, floats, labels, dims=dims, ct=np.asarray(ct, np.float32), size=SIZE, **options
    )
    return loss, dtokens, dweights, *dtable


ALL = {"soft_cap": 2.0, "label_smoothing": 0.1, "z_loss": 0.1}


@pytest.mark.fast("logits-options1")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("logits", {}, marks=pytest.mark.slow),
        ("logits", ALL),
        ("backward", ALL),
        pytest.param("forward", {}, marks=pytest.mark.slow),
        pytest.param("backward", {}, marks=pytest.mark.slow),
        pytest.param("forward", ALL, marks=pytest.mark.slow),
    ],
)
def test_a_token_that_does_not_count_is_not_read(kind, options):
    """Whatever its row and its weight contain, loss and gradients are the same to the last bit."""
    labels, unread = np.array([3, -1, 9, 0, 2, 6]), np.array([False, True, True, False, True, False])
    tokens, weights = _tokens(kind, 6), np.linspace(1, 2, 6, dtype=np.float32)
    op, reduction = KINDS[kind]
    options = {"of": op, "ignore_index": 2, "reduction": reduction} | options
    ct = np.ones(6 if reduction == "none" else ())
    first = loss, dtokens, dweights, *_ = _run(kind, _weighted, tokens, weights, ct, labels, **options)
    assert np.isfinite(loss).all()
    for fill in (np.nan, np.inf, -np.inf):
        tokens[unread], weights[unread] = fill, fill
        for again, before in zip(_run(kind, _weighted, tokens, weights, ct, labels, **options), first, strict=True):
            np.testing.assert_array_equal(again, before)
    for of_each in (dtokens, dweights, loss) if loss.ndim else (dtokens, dweights):
        np.testing.assert_array_equal(of_each[unread], 0)
    assert np.all(np.abs(dtokens[~unread]).max(-1) > 1e-3)


def _of_nobody(tokens, *rest, of, reduction, size):
    """Return losses of no tokens, of tokens that are ignored or out of range, and of tokens that have no weight."""
    op, table = functools.partial(of, size=size, reduction=reduction), rest[:-1]
    empty = op(tokens[:0], *table, np.zeros(0, np.int32), label_smoothing=0.1)
    assert empty.shape == ((0,) if reduction == "none" else ())
    ignored = op(tokens, *table, np.array([-100, SIZE]), soft_cap=3.0, z_loss=0.1, ignore_index=-100)
    return empty.sum() + ignored.sum() + op(tokens, *table, np.array([1, 2]), weights=rest[-1] * 0).sum()


@pytest.mark.parametrize(
    ("kind", "reduction"),
    [
        pytest.param("logits", "sum", marks=pytest.mark.slow),
        pytest.param("logits", "mean", marks=pytest.mark.slow),
        pytest.param("backward", "none", marks=pytest.mark.slow),
        ("forward", "mean"),
        pytest.param("logits", "none", marks=pytest.mark.slow),
        pytest.param("forward", "sum", marks=pytest.mark.slow),
    ],
)
def test_where_no_token_counts_the_loss_and_its_gradient_are_zero(kind, reduction):
    """PyTorch #70348, #75181, #116349: cross_entropy gives NaN where every label is ignore_index, since 1.11 by intent;
    a micro-batch of a prompt alone then ends the training. cosmos-rl (PR 155) and FederatedScope (PR 625) met it."""
    weights = np.ones(2, np.float32)
    for found in _run(kind, _of_nobody, _tokens(kind, 2), weights, 1, of=KINDS[kind][0], reduction=reduction):
        np.testing.assert_array_equal(found, 0)


@pytest.mark.fast("forward")
@pytest.mark.parametrize("kind", KINDS)
def test_a_label_that_must_not_be_is_nan_in_the_loss_and_in_its_own_row_only(kind):
    op, reduction = KINDS[kind]
    options = {"of": op, "ignore_index": -1, "out_of_range": "nan", "soft_cap": 3.0, "reduction": reduction}
    tokens, weights = _tokens(kind, 4), np.ones(4, np.float32)
    for labels in ((3, SIZE, -2, -1), (3, 0, SIZE - 1, -1)):
        bad = np.array([label not in range(-1, SIZE) for label in labels])
        ct = np.ones(4 if reduction == "none" else ())
        loss, dtokens, *_ = _run(kind, _weighted, tokens, weights, ct, np.array(labels), **options)
        np.testing.assert_array_equal(np.isnan(loss), bad if loss.ndim else bad.any())
        np.testing.assert_array_equal(np.isnan(dtokens), np.broadcast_to(bad[:, None], tokens.shape))
        np.testing.assert_array_equal(dtokens[3], 0)

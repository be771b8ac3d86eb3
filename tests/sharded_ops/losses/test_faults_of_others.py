"""Test for faults that split or fused cross-entropies of other libraries had, unless test_losses would see them.

The numbers are those of issues (#) and pull requests (PR) in which the faults were reported or fixed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, linear_cross_entropy, log_softmax, log_softmax_cross_entropy
from support.harness import dense_vjp, normal, on_ipus, split_vjp
from support.losses import dense_loss

COLUMNS, ROWS = P(None, "ipu"), P("ipu")


def _loss_and_gradient(n, size, logits, labels, ct, *, fill=np.nan, mode="untyped-outside", **options):
    """Run `log_softmax_cross_entropy` on n IPUs; the padding of the gradient is checked and removed."""
    op = functools.partial(log_softmax_cross_entropy, size=size, **options)
    loss, (dlogits,) = split_vjp(op, mode, n, [logits], [labels], dims=[1], ct=ct, fill=fill)
    return loss, dlogits


def _dense(logits, labels, ct, **options):
    loss, (dlogits,) = dense_vjp(functools.partial(_dense_of, **options), [logits], [labels], ct=ct)
    return loss, dlogits


def _dense_of(logits, labels, **options):
    return dense_loss(logits, labels, None, **options)


def _assert_same(got, want):
    for found, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-7)


def test_label_smoothing_is_over_the_whole_vocabulary_and_the_same_on_all_ipus():
    """Megatron-LM #737, #7464, and row 1 of #7452: smoothing divided by the shard's vocabulary, and averaged the log-
    probabilities of the shard only. So each rank had another loss, and the loss depended on the split."""
    logits, labels = normal(0, (6, 8)), np.arange(6, dtype=np.int32)

    def from_each(logits, labels):
        return log_softmax_cross_entropy(logits, labels, size=8, label_smoothing=0.1)[None]

    want, _ = _dense(logits, labels, np.ones(6, np.float32), label_smoothing=0.1)
    for n in (1, 4):
        losses = on_ipus(from_each, n, (COLUMNS, P()), ROWS, typed=False)(logits, labels)
        np.testing.assert_array_equal(losses, np.broadcast_to(losses[0], (n, 6)))
        np.testing.assert_allclose(losses[0], want, rtol=2e-6)


def test_a_vocabulary_that_does_not_divide_trains_as_on_one_ipu():
    """Megatron-LM #1754: with a vocabulary that two ranks could not halve, losses drifted apart, up to half as
    much again, in 2000 steps.
    Here 50 steps of descent on 13 columns give the dense program's losses, on 2 and on 4 IPUs."""
    x, labels = normal(0, (12, 5)), np.arange(12, dtype=np.int32) + 1
    first = normal(1, (13, 5))

    def descend(loss):
        def step(table, _):
            value, gradient = jax.value_and_grad(loss)(table)
            return table - 0.3 * gradient, value

        return jax.jit(lambda table: jax.lax.scan(step, table, length=50)[1])(first)

    want = descend(lambda table: dense_loss(x @ table.T, labels, None, reduction="mean"))
    assert want[-1] < want[0] / 2
    for n in (2, 4):
        op = functools.partial(linear_cross_entropy, size=13, reduction="mean")
        sharded = on_ipus(op, n, (P(), ROWS, P()), P())
        got = descend(lambda table, n=n, op=sharded: op(x, Split(13, n).pad(table, 0), labels))
        np.testing.assert_allclose(got, want, rtol=2e-5)


def test_a_label_out_of_range_takes_no_other_shards_logit():
    """A label masked to index 0 of a shard, clipped, or wrapped around when negative, takes the logit of another token
    of the vocabulary without a word. In Megatron-LM-FL (PR 99) -100 reached gather and scatter_add; in cut-cross-
    entropy's vocab-parallel kernels (apple/ml-cross-entropy PR 59) the index that stood for "not here" met a column of
    padding in the last tile, and the loss became infinite. 13 columns on 4 IPUs: 13, 14 and 15 are padding."""
    labels = np.array([13, 14, 15, 16, -1, -4, -100, 12], np.int32)
    logits, ct = normal(0, (8, 13)), np.ones(8, np.float32)
    loss, dlogits = _loss_and_gradient(4, 13, logits, labels, ct)
    np.testing.assert_array_equal(loss[:-1], 0)
    np.testing.assert_array_equal(dlogits[:-1], 0)
    want_loss, want_dlogits = _dense(logits[-1:], labels[-1:], ct[-1:])
    _assert_same((loss[-1:], dlogits[-1:]), (want_loss, want_dlogits))

    hidden, table = normal(1, (8, 3)), normal(2, (13, 3))
    op = functools.partial(linear_cross_entropy, size=13, token_chunk=3, column_chunk=3)
    loss, (dhidden, _) = split_vjp(op, "typed-outside", 4, [hidden, table], [labels], dims=[None, 0], ct=ct)
    np.testing.assert_array_equal(loss[:-1], 0)
    np.testing.assert_array_equal(dhidden[:-1], 0)
    np.testing.assert_allclose(loss[-1:], _dense(hidden[-1:] @ table.T, labels[-1:], ct[-1:])[0], rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["typed-inside", "untyped-inside"])
@pytest.mark.parametrize("gradients", ["backward", "forward"])
def test_the_gradient_of_the_hidden_states_is_whole_on_every_ipu(mode, gradients):
    """apple/ml-cross-entropy PR 42: the vocab-parallel loss gave each rank its part of the embeddings' gradient, where
    the sum of all was expected, so training with several ranks went otherwise than with one."""
    hidden, table, labels = normal(0, (4, 3)), normal(1, (7, 3)), np.array([0, 6, 3, 2], np.int32)
    op = functools.partial(linear_cross_entropy, size=7, reduction="mean", gradients=gradients)
    _, got = split_vjp(op, mode, 3, [hidden, table], [labels], dims=[None, 0], ct=np.ones((), np.float32))
    want = jax.jit(jax.grad(lambda h, t: dense_loss(h @ t.T, labels, None, reduction="mean"), (0, 1)))(hidden, table)
    _assert_same(got, want)


@pytest.mark.parametrize(
    ("smoothing", "weights"),
    [
        pytest.param(0.0, np.ones(5, np.float32), id="fairseq2 PR 1455"),
        pytest.param(0.2, np.ones(5, np.float32), id="PyTorch 73205"),
        pytest.param(0.1, np.array([0.2, 7, 0.3, 7, 0.4], np.float32), id="PyTorch 69339"),
    ],
)
def test_a_mean_leaves_ignored_tokens_out(smoothing, weights):
    """A mean over all tokens makes the loss of short sequences small (fairseq2 PR 1455); the uniform part of a smoothed
    loss was of the ignored tokens as well (PyTorch #73205); weights, smoothing and an ignored label together looked up
    the weight of the ignored label, and failed (PyTorch #69339, #91383)."""
    logits, labels = normal(0, (5, 6)), np.array([2, -100, 5, -100, 1], np.int32)
    options = {"label_smoothing": smoothing, "ignore_index": -100, "reduction": "mean", "weights": weights}
    loss, dlogits = _loss_and_gradient(3, 6, logits, labels, np.float32(1), **options)
    share = weights[::2] / weights[::2].sum()
    each, want = _dense(logits[::2], labels[::2], share, label_smoothing=smoothing)
    _assert_same((loss, dlogits[::2]), (each @ share, want))
    np.testing.assert_array_equal(dlogits[1::2], 0)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["backward", "forward"])
def test_gradients_in_half_precision_accumulate_in_float32(gradients):
    """Liger-Kernel #512, #827 (PR 830): the table's gradient was added up over chunks of tokens in bfloat16, and the
    training diverged. Here 512 chunks of one token: in bfloat16 the sum would stand still after a few hundred."""
    tokens, features, size = 512, 2, 6
    hidden = (1 + np.abs(normal(0, (tokens, features)))).astype(jnp.bfloat16)
    table, labels = normal(1, (size, features)).astype(jnp.bfloat16), np.zeros(tokens, np.int32)
    op = functools.partial(linear_cross_entropy, size=size, reduction="sum", token_chunk=1, gradients=gradients)
    _, (_, dtable) = split_vjp(
        op, "typed-outside", 2, [hidden, table], [labels], dims=[None, 0], ct=np.ones((), np.float32)
    )
    wide = hidden.astype(np.float32), table.astype(np.float32)
    want = jax.jit(jax.grad(lambda t: dense_loss(wide[0] @ t.T, labels, None, reduction="sum")))(wide[1])
    # One rounding of the sum, and of each slope.
    allowed = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(want)
    assert np.all(np.abs(dtable.astype(np.float32) - want) <= allowed)


def test_log_softmax_has_its_own_gradient_whatever_uses_it():
    """PyTorch #190746: within loss_parallel() the gradient of every log_softmax is the identity, since the loss's own
    rule does the rest; what else uses it, here the entropy, has a wrong gradient without a word."""
    logits = normal(0, (4, 7))

    def negative_entropy(logits):
        log_p = log_softmax(logits, size=7)
        return jax.lax.psum(jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * log_p, 0).sum(-1), "ipu")

    ct = np.ones(4, np.float32)
    got = split_vjp(negative_entropy, "untyped-outside", 3, [logits], dims=[1], ct=ct, fill=0)
    want, (want_dlogits,) = dense_vjp(_dense_negative_entropy, [logits], ct=ct)
    _assert_same((got[0], *got[1]), (want, want_dlogits))


def _dense_negative_entropy(logits):
    return (jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)

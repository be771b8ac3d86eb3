"""Test the split cross-entropy: by optax's, exact, labels of all dtypes, what is sent."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, log_softmax_cross_entropy
from support.harness import MODES, collectives, normal, on_ipus, padded, split_vjp
from support.losses import COLUMNS, EXTREMES, dense_loss, in_float64, sharded_cross_entropy

# Labels


@pytest.mark.slow
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


# What is sent and kept


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    ("floats", "dtype", "options"),
    [
        (3, jnp.bfloat16, {"z_loss": 0.1, "soft_cap": 3.0, "reduction": "mean"}),
        (3, jnp.float32, {"label_smoothing": 0.1}),
        (4, jnp.float32, {"soft": True}),
    ],
)
def test_the_cross_entropy_sends_three_or_four_floats_a_token_and_nothing_backward(typed, floats, dtype, options):
    n, tokens = 4, 5
    options = dict(options)
    soft = options.pop("soft", False)
    op = functools.partial(log_softmax_cross_entropy, size=10, **options)
    logits, target = jnp.ones((tokens, 12), dtype), jnp.ones((tokens, 12)) if soft else jnp.arange(tokens)
    of_target = COLUMNS if soft else P()
    sharded = on_ipus(op, n, (COLUMNS, of_target), P(), typed)

    sent = [("all-gather", n * floats * 4 * tokens)]
    assert collectives(sharded, logits, target) == sent
    outside = jax.value_and_grad(lambda logits, target: sharded(logits, target).mean(), (0, 1) if soft else 0)
    assert collectives(outside, logits, target) == sent
    inside = jax.value_and_grad(lambda logits, target: op(logits, target).mean())
    each_ipu = on_ipus(inside, n, (COLUMNS, of_target), (P(), COLUMNS), typed)
    assert collectives(each_ipu, logits, target) == sent


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "soft_cap": 3.0, "temperature": 2.0, "reduction": "mean"}]
)
def test_the_backward_pass_keeps_the_logits_as_they_came_and_else_numbers_of_tokens(typed, options):
    tokens, kept = 5, []

    def each_ipu(logits, labels):
        op = functools.partial(log_softmax_cross_entropy, labels=labels, size=10, **options)
        loss, vjp = jax.vjp(op, logits)
        kept.extend(jax.tree.leaves(vjp))
        return loss

    jax.eval_shape(
        on_ipus(each_ipu, 4, (COLUMNS, P()), P(), typed), jnp.ones((tokens, 12), jnp.bfloat16), jnp.arange(5)
    )
    wide = [(leaf.shape, leaf.dtype) for leaf in kept if leaf.size > tokens]
    assert wide == [((tokens, 3), jnp.bfloat16)]
    assert sum(leaf.dtype == jnp.float32 for leaf in kept if leaf.size == tokens) <= 3


# Large and extreme logits

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


def test_the_entropy_of_extreme_logits():
    """Columns of probability 0 add nothing, and make nothing NaN."""
    logits, labels = np.array([row for row, _ in EXTREMES], np.float32), np.full(len(EXTREMES), -1, np.int32)
    *_, log_p = in_float64(logits, labels)
    p, log_p = np.exp(log_p), np.where(log_p > -np.inf, log_p, 0)
    want = -(p * log_p).sum(-1)

    def entropy(logits, labels, size):
        return log_softmax_cross_entropy(logits, labels, size=size, return_entropy=True)[1]

    ct = np.ones(len(EXTREMES), np.float32)
    got, (dlogits,) = split_vjp(entropy, "untyped-inside", 3, [logits], [labels], dims=[1], ct=ct, size=7)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-7)
    np.testing.assert_allclose(dlogits, -p * (log_p + want[:, None]), rtol=0, atol=2e-7)


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

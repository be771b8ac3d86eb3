"""Test the split cross-entropy: by optax's, labels of all dtypes, padding that must not leak, what is sent and kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, log_softmax_cross_entropy, matmul
from support.harness import assert_close, collectives, dense_vjp, normal, on_ipus, padded
from support.losses import COLUMNS, ROUNDINGS, TOKENS, sharded_cross_entropy


@pytest.mark.slow
def test_the_cross_entropy_is_optaxs():
    logits, labels = normal(0, (TOKENS, 10)), np.arange(TOKENS, dtype=np.int32)
    ct = np.ones(TOKENS, np.float32)
    loss, dlogits = sharded_cross_entropy("typed-outside", 4, 10, logits, labels, ct)
    want, (want_dlogits,) = dense_vjp(optax.softmax_cross_entropy_with_integer_labels, [logits], [labels], ct=ct)
    assert_close(loss, want, 1 + want, ROUNDINGS)
    assert_close(dlogits, want_dlogits, 1, ROUNDINGS)


# What must not leak


@pytest.mark.fast("options1")
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "label_smoothing": 0.1, "z_loss": 0.1}])
def test_no_padding_leaks_whatever_it_holds(options):
    logits, labels, ct = normal(0, (TOKENS, 5)), np.arange(TOKENS, dtype=np.int32) - 1, np.ones(TOKENS, np.float32)
    zero_loss, zero_dlogits = sharded_cross_entropy("typed-outside", 8, 5, logits, labels, ct, fill=0, **options)
    for fill in (np.nan, 1e9, np.inf, -np.inf):
        loss, dlogits = sharded_cross_entropy("typed-outside", 8, 5, logits, labels, ct, fill=fill, **options)
        np.testing.assert_array_equal(loss, zero_loss)
        np.testing.assert_array_equal(dlogits, zero_dlogits)


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


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_projection_and_cross_entropy_send_one_gather_and_one_reduction_of_dx(typed):
    n, tokens, features = 2, 5, 3

    def head(x, w, labels):
        return log_softmax_cross_entropy(matmul(x, w), labels, size=6)

    sharded = on_ipus(head, n, (P(), COLUMNS, P()), P(), typed)
    loss_and_grads = jax.value_and_grad(lambda x, w: sharded(x, w, jnp.arange(tokens)).mean(), argnums=(0, 1))
    sent = collectives(loss_and_grads, jnp.ones((tokens, features)), jnp.ones((features, 6)))
    assert sent == [("all-gather", n * 3 * 4 * tokens), ("all-reduce", 4 * tokens * features)]


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

"""Test what the split cross-entropy sends and keeps."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import log_softmax_cross_entropy, matmul
from support.harness import collectives, on_ipus
from support.losses import COLUMNS


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
    "options",
    [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "soft_cap": 3.0, "temperature": 2.0, "reduction": "mean"}],
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

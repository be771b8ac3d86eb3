"""Test the fused loss with a bias, soft targets, scattered tokens and its log-sum-exp, against whole rows of logits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, linear_cross_entropy
from support.harness import assert_close, collectives, dense_vjp, normal, on_ipus, padded, split_vjp
from support.losses import assert_like_dense_linear, dense_loss

TOKENS, FEATURES = 7, 4
ROWS = P("ipu")

EVERYTHING: dict[str, Any] = {"label_smoothing": 0.3, "z_loss": 0.1, "soft_cap": 4.0, "temperature": 2.0}
# The options of each loss of one compiled program. Not all chunks divide 7 tokens and 1 to 5 rows.
OF_LABELS: dict[str, Any] = EVERYTHING | {"reduction": "mean", "token_chunk": 3, "column_chunk": 2}
BACKWARD: dict[str, Any] = {"soft_cap": 4.0, "temperature": 2.0, "token_chunk": 2, "column_chunk": 3}


def _case(mode, n, size, dtype, *scattered, slow=False):
    return pytest.param(mode, n, size, dtype, *scattered, marks=(pytest.mark.slow,) if slow else ())


def _of_labels(hidden, table, bias, weights, labels, *, size, tokens=None):
    """Return the loss by gradients="forward", and loss and log-sum-exp by gradients="backward"."""
    op = functools.partial(linear_cross_entropy, hidden, table, labels, size=size, bias=bias, tokens=tokens)
    forward = op(weights=weights, **OF_LABELS)
    return jnp.stack(
        [jnp.broadcast_to(forward, weights.shape), *op(weights=weights, return_log_sum_exp=True, **BACKWARD)]
    )


def _of_soft(hidden, table, bias, weights, targets, *, size):
    op = functools.partial(linear_cross_entropy, hidden, table, targets, size=size, bias=bias, weights=weights)
    return jnp.stack([*op(return_log_sum_exp=True, **EVERYTHING, token_chunk=3, column_chunk=2)])


def _dense_logits(hidden, table, bias):
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.matmul(hidden, table.T, preferred_element_type=wide) + bias.astype(wide)


def _dense_loss(logits, targets, weights, *, soft=False, **options):
    others = {k: v for k, v in options.items() if k not in ("token_chunk", "column_chunk")}
    loss = dense_loss(logits, targets, weights, weighted=True, soft=soft, **others)
    return jnp.broadcast_to(loss, weights.shape)


def _dense_log_sum_exp(logits):
    return jax.nn.logsumexp(4.0 * jnp.tanh(logits / 4.0) / 2.0, -1)  # both programs have this cap and temperature


def _dense_of_labels(hidden, table, bias, weights, labels):
    logits = _dense_logits(hidden, table, bias)
    losses = [_dense_loss(logits, labels, weights, **options) for options in (OF_LABELS, BACKWARD)]
    return jnp.stack([*losses, _dense_log_sum_exp(logits)])


def _dense_of_soft(hidden, table, bias, weights, targets):
    logits = _dense_logits(hidden, table, bias)
    return jnp.stack([_dense_loss(logits, targets, weights, soft=True, **EVERYTHING), _dense_log_sum_exp(logits)])


def _operands(size, dtype):
    hidden, table = normal(0, (TOKENS, FEATURES), dtype), normal(1, (size, FEATURES), dtype)
    return hidden, table, normal(2, (size,), dtype), np.abs(normal(3, (TOKENS,))).astype(np.float32)


def _cotangents(rows):
    """Return a cotangent of each row by itself, and one of all rows."""
    ct = normal(5, (rows, TOKENS))
    return [*(ct * (np.arange(rows) == row)[:, None] for row in range(rows)), ct]


@pytest.mark.parametrize(
    ("mode", "n", "size", "dtype", "scattered"),
    [
        _case("untyped-outside", 8, 5, jnp.float32, False),
        _case("typed-inside", 2, 7, jnp.bfloat16, True),
        _case("typed-outside", 4, 10, jnp.float32, True, slow=True),
        _case("untyped-inside", 3, 7, jnp.float32, True, slow=True),
        _case("typed-outside", 1, 5, jnp.float32, False, slow=True),
        _case("untyped-outside", 2, 6, jnp.bfloat16, True, slow=True),
        _case("typed-inside", 8, 5, jnp.float32, True, slow=True),
        _case("untyped-inside", 4, 10, jnp.bfloat16, False, slow=True),
    ],
)
def test_bias_and_log_sum_exp_both_ways(mode, n, size, dtype, scattered):
    operands = _operands(size, dtype)
    labels = np.array([0, size - 1, -1, 0, size // 2, size, 0], np.int32)
    dims = [0 if scattered else None, 0, 0, None]
    options = {"size": size, "tokens": TOKENS} if scattered else {"size": size}
    for ct in _cotangents(3):
        got = split_vjp(_of_labels, mode, n, operands, [labels], dims=dims, ct=ct, **options)
        want = dense_vjp(_dense_of_labels, operands, [labels], ct=ct)
        assert_like_dense_linear(got, want, operands, ct)


@pytest.mark.parametrize(
    ("mode", "n", "size", "dtype"),
    [
        _case("typed-outside", 4, 10, jnp.float32),
        _case("untyped-inside", 2, 7, jnp.bfloat16),
        _case("untyped-outside", 8, 5, jnp.float32, slow=True),
        _case("typed-inside", 1, 5, jnp.float32, slow=True),
    ],
)
def test_soft_targets_and_their_gradient(mode, n, size, dtype):
    hidden, table, bias, weights = _operands(size, dtype)
    targets = np.abs(normal(4, (TOKENS, size), dtype))  # they need not add up to 1
    targets[1] = 0
    operands, dims = [hidden, table, bias, weights, targets], [None, 0, 0, None, 1]
    for ct in _cotangents(2):
        rows, (*grads, dtargets) = split_vjp(_of_soft, mode, n, operands, dims=dims, ct=ct, size=size)
        want = dense_vjp(_dense_of_soft, operands, ct=ct)
        # a token's targets add up to `mass`, by which losses and slopes are larger than those of a label
        mass = 1 + targets.astype(np.float32).sum(-1).max()
        largest = assert_like_dense_linear((rows, grads), want, [hidden, table, bias, weights * mass], ct)
        assert_close(dtargets, want[1][4], largest * (1 + np.abs(ct).max()), 10 if dtype == jnp.float32 else 2)


@pytest.mark.parametrize(("gradients", "typed"), [("backward", True), ("forward", False)])
def test_scattered_tokens_send_a_reduce_scatter_and_no_all_reduce(gradients, typed):
    n, tokens, features = 2, 8, 3
    hidden, table, labels = jnp.ones((tokens, features)), jnp.ones((6, features)), jnp.arange(tokens)
    op = functools.partial(
        linear_cross_entropy, size=6, tokens=tokens, gradients=gradients, reduction="mean", token_chunk=tokens
    )
    sharded = on_ipus(op, n, (ROWS, ROWS, P()), P(), typed)
    gathered = [("all-gather", 4 * tokens * features), ("all-gather", n * 3 * 4 * tokens)]
    assert collectives(sharded, hidden, table, labels) == sorted(gathered)
    of_dx = ("reduce-scatter", 4 * tokens * features // n)
    assert collectives(jax.value_and_grad(sharded, (0, 1)), hidden, table, labels) == [*sorted(gathered), of_dx]


def test_rows_that_do_not_count_may_be_nan_unless_their_log_sum_exp_is_wanted():
    hidden = normal(0, (3, FEATURES))
    hidden[1] = np.nan
    table, bias, labels = (
        padded(Split(5, 2), normal(1, (5, FEATURES)), 0),
        np.zeros(6, np.float32),
        np.array([0, -1, 4]),
    )

    def total(hidden, table, bias, *, wants_lse):
        out = linear_cross_entropy(hidden, table, labels, size=5, bias=bias, return_log_sum_exp=wants_lse)
        return out[0].sum() + out[1].sum() if wants_lse else out.sum()

    for wants_lse in (False, True):
        op = on_ipus(functools.partial(total, wants_lse=wants_lse), 2, (P(), ROWS, ROWS), P())
        value, grads = jax.value_and_grad(op, (0, 1, 2))(hidden, table, bias)
        assert np.isnan(value) == wants_lse
        assert np.isnan(grads[2]).any() == wants_lse
        assert not np.isnan(np.asarray(grads[0])[[0, 2]]).any()

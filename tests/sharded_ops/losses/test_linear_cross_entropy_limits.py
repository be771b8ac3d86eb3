"""Test the fused projection and cross-entropy at its limits: float16's range, NaN in tokens, second derivatives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, linear_cross_entropy
from support.harness import normal, on_ipus, padded, split_vjp, unpadded
from support.losses import dense_loss

ROWS = P("ipu")


# float16: its least number is 6e-8 and its largest 65504


def _gradients_by_hand(hidden, table, labels, factors):
    """Return the gradients of the sum of (loss times factor), in float64."""
    hidden, table = hidden.astype(np.float64), table.astype(np.float64)
    logits = hidden @ table.T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    slopes = p / p.sum(-1, keepdims=True) - (np.arange(len(table)) == labels[:, None])
    slopes *= np.asarray(factors)[:, None]
    return slopes @ table, slopes.T @ hidden


def _half_gradients(total, hidden, table, labels, dtype, typed):
    """Return the gradients, on 2 IPUs, of `total` of the loss with these options."""
    split = Split(len(table), 2)

    def each_ipu(hidden, table):
        return total(functools.partial(linear_cross_entropy, hidden, table, labels, size=split.size))

    sharded = on_ipus(each_ipu, 2, (P(), ROWS), P(), typed)
    found = jax.jit(jax.grad(sharded, (0, 1)))(hidden, padded(split, table, 0))
    assert all(gradient.dtype == dtype for gradient in found)
    return np.asarray(found[0], np.float64), unpadded(split, found[1], 0).astype(np.float64)


def _assert_rows_close(got, want, roundings, dtype):
    largest = np.abs(want).max(-1)
    assert np.all(largest > 0)
    error = (np.abs(got - want).max(-1) / largest).max()
    assert error <= roundings * float(jnp.finfo(dtype).eps), error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "gradients", "typed"),
    [
        (jnp.float16, "forward", True),
        pytest.param(jnp.float16, "backward", False, marks=pytest.mark.slow),
        pytest.param(jnp.bfloat16, "forward", False, marks=pytest.mark.slow),
    ],
)
def test_a_loss_scale_saves_every_row_of_the_gradients(dtype, gradients, typed):
    """For a mean over N, dlogits of a row that is not a label's are 1/(V N): 2e-7, which float16 rounds by a fifth."""
    tokens, size, scale = 512, 8001, 2.0**15
    hidden, table = normal(0, (tokens, 4), dtype), (normal(1, (size, 4)) * 0.1).astype(dtype)
    labels = np.arange(tokens, dtype=np.int32) % 7

    def total(loss):
        return loss(reduction="mean", gradients=gradients) * scale

    got = _half_gradients(total, hidden, table, labels, dtype, typed)
    want = _gradients_by_hand(hidden, table, labels, np.full(tokens, scale / tokens))
    # The dlogits are rounded and then their sums; if rows of `hidden` cancel, a sum is smaller than its addends.
    for found, wanted in zip(got, want, strict=True):
        _assert_rows_close(found, wanted, 4, dtype)


def test_a_sum_that_float16_cannot_hold_may_be_divided_afterwards():
    tokens, size = 2048, 5
    hidden, table = np.full((tokens, 2), 60, np.float16), normal(1, (size, 2), np.float16)
    labels = np.zeros(tokens, np.int32)
    got = _half_gradients(lambda loss: loss(reduction="sum") / tokens, hidden, table, labels, jnp.float16, True)
    want = _gradients_by_hand(hidden, table, labels, np.full(tokens, 1 / tokens))
    assert np.abs(want[1]).max() * tokens > 65504
    _assert_rows_close(got[1][[0]], want[1][[0]], 4, jnp.float16)
    assert np.isfinite(got[0]).all()
    assert np.isfinite(got[1]).all()


@pytest.mark.slow
def test_slopes_that_float16_cannot_hold_are_scaled_down():
    """With a weight of 1e7 the dlogits overflow, but the gradients don't, because the operands are small."""
    hidden, table = (normal(0, (6, 3)) * 1e-3).astype(np.float16), (normal(1, (5, 3)) * 1e-3).astype(np.float16)
    labels, weights = np.arange(6, dtype=np.int32) % 5, np.full(6, 1e7, np.float32)
    for gradients in ("forward", "backward"):
        got = _half_gradients(
            lambda loss, gradients=gradients: loss(reduction="sum", weights=weights, gradients=gradients),
            hidden,
            table,
            labels,
            jnp.float16,
            True,
        )
        for found, wanted in zip(got, _gradients_by_hand(hidden, table, labels, weights), strict=True):
            _assert_rows_close(found, wanted, 4, jnp.float16)


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


# Second derivatives

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.1, "soft_cap": 4.0, "temperature": 1.5, "ignore_index": 2}


def _along(loss, directions, split_dot=jnp.vdot):
    """Return the derivative of a squared loss's gradient along `directions`: reverse and forward over reverse mode."""

    def gradient(*args):
        return jax.grad(lambda *args: (loss(*args) ** 2).sum(), (0, 1, 2))(*args)

    def inner(*args):
        dots = (jnp.vdot, split_dot, jnp.vdot)
        return sum(dot(g, d) for dot, g, d in zip(dots, gradient(*args), directions, strict=True))

    return {
        "reverse": lambda *args: jax.grad(inner, (0, 1, 2))(*args),
        "forward": lambda *args: jax.jvp(gradient, args, tuple(directions))[1],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("over", "gradients", "reduction", "typed", "inside"),
    [
        pytest.param("reverse", "forward", "mean", True, False, marks=pytest.mark.slow),
        pytest.param("forward", "backward", "none", False, False),
        pytest.param("reverse", "backward", "sum", False, False, marks=pytest.mark.slow),
        pytest.param("forward", "forward", "mean", True, False, marks=pytest.mark.slow),
        pytest.param("reverse", "forward", "sum", True, True, marks=pytest.mark.slow),
        pytest.param("reverse", "backward", "mean", True, True, marks=pytest.mark.slow),
    ],
)
def test_second_derivatives_are_those_of_the_dense_program(over, gradients, reduction, typed, inside):
    with jax.enable_x64(True):
        labels, split, rng = np.array([0, 6, -1, 3]), Split(7, 2), np.random.default_rng(0)
        shapes = ((4, 3), (7, 3), (4,))
        args = [jnp.asarray(np.abs(rng.standard_normal(shape))) for shape in shapes]
        directions = [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]
        options: dict[str, Any] = (
            {"z_loss": 0.1, "soft_cap": 4.0} if typed else {"label_smoothing": 0.1, "temperature": 1.5}
        )

        def each_ipu(hidden, table, weights):
            op = functools.partial(linear_cross_entropy, labels=labels, size=7, reduction=reduction)
            op = functools.partial(op, gradients=gradients, token_chunk=2, column_chunk=2)
            if gradients == "forward":
                return op(hidden, table, weights=weights, **options)
            losses, entropy = op(hidden, table, weights=weights, return_entropy=True, **options)
            return losses + entropy if losses.ndim else losses + entropy.sum()

        def dense(hidden, table, weights):
            logits = hidden @ table.T
            losses = dense_loss(logits, labels, weights, weighted=True, reduction=reduction, **options)
            if gradients == "forward":
                return losses
            cap = options.get("soft_cap")
            logits = cap * jnp.tanh(logits / cap) if cap else logits / options["temperature"]
            entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1)
            return losses + entropy if losses.ndim else losses + entropy.sum()

        def pad(xs):
            return xs[0], split.pad(xs[1], 0), xs[2]

        def derived_inside(args, directions):
            return _along(each_ipu, directions, lambda a, b: lax.psum(jnp.vdot(a, b), "ipu"))[over](*args)

        specs = (P(), ROWS, P())
        if inside:
            found = on_ipus(derived_inside, 2, (specs, specs), specs)(pad(args), pad(directions))
            got = found[0], split.unpad(found[1], 0), found[2]
        else:
            loss = on_ipus(each_ipu, 2, specs, P(), typed)
            got = jax.jit(_along(lambda *args: loss(*pad(args)), directions)[over])(*args)
        want = jax.jit(_along(dense, directions)[over])(*args)
        for found, wanted in zip(got, want, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)

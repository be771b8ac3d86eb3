"""Test that the split cross-entropy is as exact as the dense program, also for extreme logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, log_softmax_cross_entropy
from support.harness import MODES, dense_vjp, normal, on_ipus, padded
from support.losses import COLUMNS, EXTREMES, dense_loss, in_float64, sharded_cross_entropy

WIDE = 61  # columns, on 3 IPUs: 21, 21 and 19


def _kinds(seeds_of=range(4), tokens=32):
    """Yield logits of many kinds: (name, logits, labels)."""
    for seed in seeds_of:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((tokens, WIDE)).astype(np.float32)
        y, rows = rng.integers(0, WIDE, tokens).astype(np.int32), np.arange(tokens)

        def raised(*changes, x=x, y=y, rows=rows):
            z = x.copy()
            for by, amount in changes:
                z[rows, (y + by) % WIDE] += np.float32(amount)
            return z

        yield "normal", x, y
        yield "small", x * np.float32(1e-3), y
        yield "around 1e4", x + np.float32(1e4), y
        yield "around -1e4", x - np.float32(1e4), y
        yield "sure and right", raised((0, 12)), y
        yield "surer and right", raised((0, 1e4)), y
        yield "sure and wrong, on the label's IPU", raised((1, 1e4)), y
        yield "sure and wrong, on another IPU", raised((30, 1e4), (31, 1e4)), y
        yield "undecided between two IPUs", raised((1, 1e4), (31, 1e4)), y
        yield "the label at -100", raised((0, -100)), y
        yield "the label at -1e4", raised((0, -1e4)), y
        yield "constant", np.full_like(x, rng.standard_normal()), y
        yield "a tie", raised((0, 1e4), (30, 1e4)) * (np.abs(x) < 0), y
        is_other = np.arange(WIDE) != y[:, None]
        yield "only some columns", np.where(is_other & (rng.random(x.shape) < 0.5), np.float32(-np.inf), x), y


def _stacked(kinds):
    names, logits, labels = zip(*kinds, strict=True)
    return np.repeat(names, len(labels[0])), np.concatenate(logits), np.concatenate(labels)


def _errors(got, want, dense):
    """Return the largest errors of both results, and one rounding of the largest number."""
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    of = lambda x: np.abs(x[finite] - want[finite]).max(initial=0)  # noqa: E731
    return of(got), of(dense), np.finfo(np.float32).eps * np.abs(want[finite]).max(initial=0)


@pytest.mark.fast("options1")
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4}])
def test_it_rounds_no_more_than_twice_what_the_dense_program_does(options):
    """A larger error is accepted up to one rounding of the largest number per term of the loss.

    The dense program's error may happen to be 0, and is less than one rounding if all columns are equal.
    """
    names, logits, labels = _stacked(_kinds())
    ct = np.ones(len(labels), np.float32)
    with np.errstate(all="ignore"):
        loss, dlogits = sharded_cross_entropy("typed-outside", 3, WIDE, logits, labels, ct, **options)
        dense = functools.partial(_dense_of_labels, **options)
        float32 = dense_vjp(dense, [logits], [labels], ct=ct)
        with jax.enable_x64(True):
            float64 = dense_vjp(
                functools.partial(dense), [logits.astype(np.float64)], [labels], ct=ct.astype(np.float64)
            )
    for name in dict.fromkeys(names):
        of = names == name
        for got, wanted, twin in (
            (loss, float64[0], float32[0]),
            (dlogits, float64[1][0], float32[1][0]),
        ):
            if options and name == "only some columns":
                continue  # Smoothing gives weight to a column of probability 0, so the loss is inf.
            error, of_dense, rounding = _errors(got[of], wanted[of], twin[of])
            assert error <= max(2 * of_dense, (1 + len(options)) * rounding), (
                f"{name}: {error}, dense {of_dense}, rounding {rounding}"
            )


def _dense_of_labels(logits, labels, **options):
    return dense_loss(logits, labels, None, **options)


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


@pytest.mark.fast("typed-outside", "untyped-inside")
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

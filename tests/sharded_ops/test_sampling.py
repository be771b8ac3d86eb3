"""Test draws from a split vocabulary against draws from noise that is made here, column by column, and that noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, sample
from sharded_ops import _sampling as choice
from support.harness import normal, on_ipus, padded
from support.transforms import COLUMNS, INF, NAN, gumbel, in_transforms, noise_of


def _softmax(logits):
    with np.errstate(invalid="ignore"):
        p = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def _dense_samples(key, logits, temperatures, top_ps, k):
    """Return what `_samples` must draw, by numpy from whole rows of noise."""
    rows = np.arange(len(logits))[:, None]
    drawn = logits + temperatures[:, None] * gumbel(key, logits.shape[:-1], logits.shape[-1])
    order = np.argsort(-logits, -1, kind="stable")[:, :k]
    p = _softmax(logits[rows, order] / np.maximum(temperatures, 1e-6)[:, None])
    kept = np.cumsum(p, -1) - p < top_ps[:, None]
    their_noise = noise_of(np.asarray(jax.random.bits(key, order.shape)))
    drawn_of_k = np.where(kept, logits[rows, order] + temperatures[:, None] * their_noise, -INF)
    return np.argmax(drawn, -1), order[rows[:, 0], np.argmax(drawn_of_k, -1)]


def _samples(key, logits, temperatures, top_ps, *, size, k):
    draw = functools.partial(sample, key, logits, size=size, temperature=temperatures)
    return draw(), draw(top_k=k, top_p=top_ps)


@pytest.mark.fast("3-False-rbg-float32-None")
@pytest.mark.parametrize(
    ("n", "typed", "impl", "dtype", "replicas"),
    [
        (1, True, "threefry2x32", jnp.float32, None),
        (2, False, "threefry2x32", jnp.float32, None),
        (8, True, "threefry2x32", jnp.bfloat16, None),
        (3, False, "rbg", jnp.float32, None),
        *((n, typed, "threefry2x32", jnp.float32, 2) for n in (1, 2, 4) for typed in (True, False)),
    ],
)
def test_the_same_key_draws_the_same_columns_on_any_number_of_ipus(n, typed, impl, dtype, replicas):
    size, tokens, k = 37, 600, 11
    logits = (2 * normal(0, (tokens, size))).astype(jnp.bfloat16).astype(dtype)
    logits[::3, 5:30] = -INF
    rng = np.random.default_rng(1)
    temperatures = rng.choice(np.array([0, 0.3, 1, 2], np.float32), tokens)
    top_ps = rng.choice(np.array([0.01, 0.6, 0.9, 1], np.float32), tokens)
    key = jax.random.key(7, impl=impl)

    def each_ipu(key, *given):
        # With one key, tokens on both replicas would make the same draws.
        own = jax.random.fold_in(key, lax.axis_index("data")) if replicas else key
        return _samples(own, *given, size=size, k=k)

    rows, columns = (P("data"), P("data", "ipu")) if replicas else (P(), COLUMNS)
    run = on_ipus(each_ipu, n, (P(), columns, rows, rows), rows, typed, replicas)
    got = run(key, padded(Split(size, n), logits, 1), temperatures, top_ps)

    logits = logits.astype(np.float32)
    keys = [jax.random.fold_in(key, replica) for replica in range(replicas)] if replicas else [key]
    parts = zip(*(np.split(array, len(keys)) for array in (logits, temperatures, top_ps)), strict=True)
    wanted = [_dense_samples(own, x, t, p, k) for own, (x, t, p) in zip(keys, parts, strict=True)]
    for found, want in zip(got, np.concatenate(wanted, axis=1), strict=True):
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, want)
        cold = temperatures == 0
        np.testing.assert_array_equal(found[cold], logits.argmax(-1)[cold])


@pytest.mark.slow
def test_only_the_tokens_of_a_known_temperature_of_zero_are_greedy():
    """A temperature that is known when traced takes a shorter way if it is 0 for all tokens."""
    temperatures = np.tile(np.array([0, 2], np.float32), 20)
    logits = normal(3, (40, 7))

    def each_ipu(key, logits):
        return [sample(key, logits, size=7, temperature=known) for known in (temperatures, 0 * temperatures)]

    run = on_ipus(each_ipu, 3, (P(), COLUMNS), P())
    some, none = run(jax.random.key(2), padded(Split(7, 3), logits, 1))
    drawn = np.argmax(logits + temperatures[:, None] * gumbel(jax.random.key(2), (40,), 7), -1)
    assert (drawn[1::2] != logits[1::2].argmax(-1)).any()
    np.testing.assert_array_equal(some, drawn)
    np.testing.assert_array_equal(none, logits.argmax(-1))


@pytest.mark.slow
def test_the_noise_is_gumbels_to_its_end():
    noise = choice._gumbel(jax.random.key(5), (1 << 20,), jnp.float32)
    uniform = np.sort(np.exp(-np.exp(-np.asarray(noise, np.float64))))
    # Kolmogorov-Smirnov: the statistic exceeds 1.95 once in a thousand times.
    steps = np.arange(1, uniform.size + 1) / uniform.size
    assert np.sqrt(uniform.size) * np.abs(uniform - steps).max() < 1.95
    # Of the largest 1000 in a million, only some 940 would differ with steps of 2**-23.
    largest = np.sort(np.asarray(noise))[-1000:]
    assert np.unique(largest).size > 998
    ends = choice._gumbel_of_bits(jnp.array([0, 2**32 - 1], jnp.uint32), jnp.float32)
    np.testing.assert_allclose(ends, noise_of(np.array([0, 2**32 - 1], np.uint32)), rtol=1e-6)


def test_no_ipu_draws_the_noise_of_others():
    def flops(n):
        draw = on_ipus(functools.partial(sample, size=4096), n, (P(), COLUMNS), P())
        analysis = jax.jit(draw).lower(jax.random.key(0), jnp.ones((4, 4096))).compile().cost_analysis()
        assert analysis is not None
        return analysis["flops"]

    assert flops(8) < flops(1) / 7.5


@pytest.mark.slow
def test_float64_logits_take_float64_noise():
    with jax.enable_x64(True):
        # Steps of 1e-12 on logits of 1, which float32 could not represent.
        logits = np.broadcast_to(1 + 1e-12 * np.arange(6.0), (2000, 6))
        draw = functools.partial(sample, size=6, temperature=1e-12)
        drawn = on_ipus(draw, 2, (P(), COLUMNS), P())(jax.random.key(0), logits)
    # By chi-square: in float32, all columns would have the same probability.
    expected = 2000 * _softmax(np.round((logits[0] - 1) * 2**52) / 2**52 / 1e-12)
    statistic = ((np.bincount(drawn, minlength=6) - expected)[expected > 5] ** 2 / expected[expected > 5]).sum()
    assert jax.scipy.stats.chi2.sf(statistic, (expected > 5).sum() - 1) > 1e-3


ODD_ROWS = np.array(
    [
        [-INF] * 7,
        [0, NAN, 9, 0, NAN, 0, 0],
        [-INF] * 6 + [-50],
        [INF, 0, 0, 0, 0, 0, INF],
        [0, 0, -INF, 99, 99, 0, -INF],
        [-3e38, 3e38, 0, 0, 0, 0, 0],
    ],
    np.float32,
)


@pytest.mark.slow
def test_rows_that_leave_no_choice():
    def each_ipu(key, logits, zero):
        draw = functools.partial(sample, key, logits, size=7)
        return {
            "plain": draw(),
            "nucleus": draw(top_k=7, top_p=0.1, temperature=0.5),
            "static": draw(temperature=0),
            "traced nucleus": draw(temperature=zero, top_k=3, top_p=0.5),
        }

    logits = padded(Split(7, 3), ODD_ROWS, 1)
    got = on_ipus(each_ipu, 3, (P(), COLUMNS, P()), P())(jax.random.key(1), logits, 0.0)
    best = [0, 1, 6, 0, 3, 1]
    for name, columns in got.items():
        if name == "plain":  # columns 3 and 4 of row 4 have the same probability
            assert int(columns[4]) in (3, 4)
            columns = columns.at[4].set(3)
        assert columns.tolist() == best, name


@pytest.mark.fast("6")
@pytest.mark.parametrize("k", [4, 6])
def test_a_nucleus_that_is_full_just_so_takes_no_further_column(k):
    """Of 4 equal columns, 2 have half of the probability. With k=6 the other two candidates have a probability of 0."""
    logits = np.broadcast_to(np.array([0, -INF, 0, 0, 0, -INF], np.float32), (64, 6))
    draw = functools.partial(sample, size=6, top_k=k, top_p=0.5)
    drawn = on_ipus(draw, 2, (P(), COLUMNS), P())(jax.random.key(0), logits)
    assert set(np.asarray(drawn).tolist()) == {0, 2}


@in_transforms
def test_drawing_may_stand_in_vmap_and_scan(transform, typed):
    logits, keys = normal(0, (3, 5, 7)), jax.random.split(jax.random.key(0), 3)
    each_ipu = transform(functools.partial(sample, size=7, temperature=0.8))
    got = on_ipus(each_ipu, 3, (P(), P(None, None, "ipu")), P(), typed)(keys, padded(Split(7, 3), logits, 2))
    want = [np.argmax(row + np.float32(0.8) * gumbel(key, (5,), 7), -1) for key, row in zip(keys, logits, strict=True)]
    np.testing.assert_array_equal(got, want)

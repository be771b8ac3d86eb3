"""Test draws from a split vocabulary against draws from noise that is made here, column by column, and that noise.

Which columns of a nucleus may be drawn is worked out by numpy, by sorting whole rows in float64.
"""

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


# A nucleus, and columns that are probable enough


def _kept_by_hand(logits, temperatures, top_ps, min_ps):
    kept = np.zeros(logits.shape, bool)
    for row, (x, t, top_p, min_p) in enumerate(
        zip(logits.astype(np.float64), temperatures, top_ps, min_ps, strict=True)
    ):
        odds = np.ones(x.size)  # where a column equals the largest one, even if that is infinite
        below = x < x.max()
        odds[below] = np.exp((x[below] - x.max()) / max(t, 1e-30))
        total = 0.0
        for column in np.lexsort((np.signbit(x), -x)):  # as `top_k`: 0 before -0, and of equal ones the lower column
            if top_p < 1 and total >= top_p * odds.sum():
                break
            kept[row, column] = odds[column] >= min_p
            total += odds[column]
    return kept


def _kept(logits, temperatures, top_ps, min_ps, *, size):
    wide = logits.astype(jnp.float32)
    numbers = (temperatures[:, None], top_ps[:, None], min_ps[:, None])
    return choice.kept_columns(wide, *numbers, Split(size, jax.lax.axis_size("ipu")), "ipu")


@pytest.mark.parametrize(
    ("n", "size", "typed", "dtype"),
    [
        pytest.param(1, 29, True, jnp.float32, marks=pytest.mark.slow),
        (2, 30, False, jnp.float32),
        (4, 29, True, jnp.bfloat16),
        pytest.param(8, 11, False, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_the_kept_columns_are_those_of_sorted_rows(n, size, typed, dtype):
    tokens = 400
    rng = np.random.default_rng(n)
    logits = (3 * rng.standard_normal((tokens, size))).astype(dtype)
    logits[::2] = np.round(logits[::2].astype(np.float32)).astype(dtype)  # many ties
    logits[::5, 3:9] = -INF
    logits[1::7, 2] = INF
    logits[3] = 0
    temperatures = rng.choice(np.array([0, 0.3, 1, 2], np.float32), tokens)
    # No sum of few equal probabilities is near these.
    top_ps = rng.choice(np.array([1e-6, 0.113, 0.6137, 0.917, 1], np.float32), tokens)
    min_ps = rng.choice(np.array([0, 0.017, 0.31, 1], np.float32), tokens)
    run = on_ipus(functools.partial(_kept, size=size), n, (COLUMNS, P(), P(), P()), COLUMNS, typed)
    found = np.asarray(run(padded(Split(size, n), logits, 1), temperatures, top_ps, min_ps))[:, :size]
    wanted = _kept_by_hand(logits.astype(np.float32), temperatures, top_ps, min_ps)
    np.testing.assert_array_equal(found, wanted)
    # The rows are of every kind: one column is kept, all are, or only some of those that tie.
    counts = wanted.sum(-1)
    is_cut = [bool(set(x[kept]) & set(x[~kept])) for x, kept in zip(logits.astype(np.float32), wanted, strict=True)]
    assert min((counts == 1).sum(), (counts == size).sum(), sum(is_cut)) > 0


def test_columns_that_add_up_to_top_p_exactly_are_the_nucleus():
    run = on_ipus(functools.partial(_kept, size=8), 2, (COLUMNS, P(), P(), P()), COLUMNS)
    halves = np.array([1.0, 0.5, 0.25, 0.125], np.float32)
    kept = np.asarray(run(np.zeros((4, 8), np.float32), np.ones(4, np.float32), halves, np.zeros(4, np.float32)))
    np.testing.assert_array_equal(kept, np.arange(8) < 8 * halves[:, None])


@pytest.mark.slow
def test_the_draws_are_those_of_the_noise_among_the_kept_columns():
    tokens, size, key = 300, 10, jax.random.key(3)
    rng = np.random.default_rng(0)
    logits = (2 * rng.standard_normal((tokens, size))).astype(np.float32)
    temperatures, top_ps, min_ps = (rng.choice(np.array(of, np.float32), tokens) for of in (
        (0.5, 1, 2), (0.113, 0.6137, 0.917, 1), (0, 0.017, 0.31)
    ))  # fmt: skip

    def each_ipu(key, logits, temperatures, top_ps, min_ps):
        draw = functools.partial(sample, key, logits, size=size, temperature=temperatures)
        return draw(top_p=top_ps, min_p=min_ps), draw(min_p=min_ps, top_k=size)

    run = on_ipus(each_ipu, 4, (P(), COLUMNS, *[P()] * 3), P())
    both, of_top_k = run(key, padded(Split(size, 4), logits, 1), temperatures, top_ps, min_ps)
    kept = _kept_by_hand(logits, temperatures, top_ps, min_ps)
    noise = temperatures[:, None] * gumbel(key, (tokens,), size)
    np.testing.assert_array_equal(both, np.argmax(np.where(kept, logits + noise, -INF), -1))
    probable = _kept_by_hand(logits, temperatures, np.ones(tokens), min_ps)
    assert probable[np.arange(tokens), of_top_k].all()
    assert not kept[np.arange(tokens), of_top_k].all()


@pytest.mark.slow
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_nan_infinite_and_cold_rows_are_drawn_as_without_a_nucleus(n):
    logits = normal(0, (4, 7))
    logits[0, [2, 5]] = NAN
    logits[1] = -INF
    logits[2, 4] = INF

    def each_ipu(key, logits):
        options = {"size": 7, "temperature": np.array([1, 1, 1, 0], np.float32)}
        return sample(key, logits, top_p=0.3, **options), sample(key, logits, min_p=0.9, **options)

    run = on_ipus(each_ipu, n, (P(), COLUMNS), P())
    for found in run(jax.random.key(0), padded(Split(7, n), logits, 1)):
        assert found.tolist() == [2, 0, 4, logits[3].argmax()]


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
def test_a_nucleus_of_everything_is_no_nucleus(typed):
    """top_p=1 draws the same columns as no top_p; test_sampling looks at their probabilities."""
    x = np.tile(np.array([1, 0, -1, 2, -INF], np.float32), (400, 1))

    def each_ipu(x):
        draw = functools.partial(sample, jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data")), x)
        return [draw(size=5, temperature=0.7, top_k=k, top_p=p) for k in (5, 3) for p in (None, 1.0)]

    sharded = on_ipus(each_ipu, 2, P("data", "ipu"), P("data"), typed, replicas=2)
    drawn = jax.device_get(sharded(padded(Split(5, 2), x, 1)))
    np.testing.assert_array_equal(drawn[::2], drawn[1::2])
    assert [set(columns.tolist()) for columns in drawn[1::2]] == [{0, 1, 2, 3}, {0, 1, 3}]


def test_a_nucleus_of_everything_keeps_what_float32_adds_nothing_to():
    """The first column's probability is rounded to 1, but the other columns belong to the nucleus nevertheless."""
    p = jax.nn.softmax(jnp.array([[0.0, -20.0, -30.0]]))
    assert p[0, 0] == 1
    assert choice._nucleus(p, jnp.ones((1, 1))).tolist() == [[True, True, True]]
    assert choice._nucleus(p, jnp.full((1, 1), 0.999)).tolist() == [[True, False, False]]

"""Test draws from a nucleus that no IPU holds a whole row of, and from columns that are probable enough.

Which columns may be drawn is worked out by numpy, by sorting whole rows in float64; and then which is, from the noise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, sample
from sharded_ops._sampling import _nucleus, kept_columns
from support.harness import collectives, normal, on_ipus, padded
from support.transforms import COLUMNS, INF, NAN, gumbel


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
    return kept_columns(wide, *numbers, Split(size, jax.lax.axis_size("ipu")), "ipu")


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
    assert _nucleus(p, jnp.ones((1, 1))).tolist() == [[True, True, True]]
    assert _nucleus(p, jnp.full((1, 1), 0.999)).tolist() == [[True, False, False]]


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
def test_it_sends_no_rows(typed):
    n, tokens, size = 2, 8, 64

    def of(**options):
        run = on_ipus(functools.partial(sample, size=size, **options), n, (P(), COLUMNS), P(), typed)
        return collectives(run, jax.random.key(0), jnp.ones((tokens, size)))

    one = 4 * tokens
    drawn = ("all-gather", n * 2 * one)
    assert of(min_p=0.1) == [drawn, ("all-reduce", one)]
    assert of(top_p=0.9) == [drawn, drawn, ("all-reduce", one), ("all-reduce", one), ("all-reduce", 15 * one)]

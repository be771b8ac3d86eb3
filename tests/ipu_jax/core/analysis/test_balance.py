"""Test `balance_layers` against brute force over all partitions, its refusals, and traced costs by hand."""

import itertools
import math

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from ipu_jax import ALL_IPUS, Stage
from ipu_jax.core.analysis.balance import balance_layers, measure_costs
from support.refusals import refusals, refused


def every_partition(layers, runs):
    for inner in itertools.combinations(range(1, layers), runs - 1):
        yield list(itertools.pairwise([0, *inner, layers]))


def best_by_force(costs, ipus, memory=None, limit=math.inf):
    found = []
    for runs in every_partition(len(costs), ipus):
        if memory is None or all(sum(memory[a:b]) <= limit for a, b in runs):
            loads = [sum(costs[a:b]) for a, b in runs]
            found.append((max(loads), sum(load**2 for load in loads)))
    return min(found, default=None)


@st.composite
def problems(draw):
    costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    memory = draw(st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs)))
    limited = st.fixed_dictionaries({"memory": st.just(memory), "limit": st.integers(5, 15)})
    return costs, draw(st.integers(1, len(costs))), draw(st.just({}) | limited)


@pytest.mark.slow
@settings(max_examples=250)
@given(problems())
def test_no_partition_is_better(problem):
    costs, ipus, options = problem
    expected = best_by_force(costs, ipus, **options)
    if expected is None:
        with pytest.raises(ValueError, match="no split of"):
            balance_layers(range(len(costs)), costs, ipus, **options)
        return
    found = balance_layers(range(len(costs)), costs, ipus, **options)
    assert [k for k, _ in itertools.groupby(found.ipus)] == list(range(ipus)), "neighbours together, no IPU without"
    held = lambda sizes: tuple(sum(s for s, at in zip(sizes, found.ipus, strict=True) if at == k) for k in range(ipus))
    assert found.loads == held(costs)
    assert (max(found.loads), sum(load**2 for load in found.loads)) == expected
    assert not options or max(held(options["memory"])) <= options["limit"]


def test_stages_get_their_ipus_and_concurrent_ones_stay():
    fn = lambda w, x, mb: x
    embed = Stage(fn, params="table", ipu=ALL_IPUS)
    layers = [Stage(fn, params=f"w{i}", recompute="all") for i in range(4)]
    found = balance_layers([embed, *layers, embed], [1000, 1, 1, 1, 3, 1000], ipus=2)
    assert found.ipus == (None, 0, 0, 0, 1, None)
    assert found.loads == (3, 3)
    assert found.imbalance == 0
    assert [stage.ipu for stage in found.stages] == [ALL_IPUS, 0, 0, 0, 1, ALL_IPUS]
    assert all(new.recompute == "all" and new.fn is fn for new in found.stages[1:5])
    assert layers[3].ipu == 0, "the stages that were given are left alone"
    assert str(found).splitlines()[3].split() == ["all", "table,", "table", "-", "-"]


def test_layers_that_are_no_stages_give_no_stages():
    found = balance_layers([(jnp.tanh, 1), (jnp.sin, 2)], [1.5, 0.5], 2)
    assert found.stages == ()
    assert found.imbalance == pytest.approx(0.5)
    assert "layer 0" in str(found)


def test_ten_names_are_told_in_short():
    assert "a0, a1, ... a9 (10)" in str(balance_layers([f"a{i}" for i in range(10)], [1] * 10, 1))


def test_rounds_go_round_the_ipus():
    found = balance_layers("abcdef", [1, 2, 1, 1, 2, 1], 2, rounds=2)
    assert found.ipus == (0, 1, 0, 0, 1, 1) or sum(found.loads) == 8
    assert [k for k, _ in itertools.groupby(found.ipus)] == [0, 1, 0, 1]


@refusals(
    (lambda: balance_layers("abc", [1, 2], 2), "costs has 2 numbers for 3 layers", "one for each layer"),
    (lambda: balance_layers("ab", [1, 2], 3), "2 layers cannot fill 3 IPUs", "fewer IPUs"),
    (lambda: balance_layers("ab", [1, 2], 2, rounds=2), "2 layers cannot fill 2 IPUs x 2 rounds", "cut them finer"),
    (lambda: balance_layers("ab", [0, 0], 2), "costs of all 2 layers are 0", "nothing to balance"),
    (lambda: balance_layers("ab", [1, 1], 0), "ipus=0", "an int of at least 1"),
    (lambda: balance_layers("ab", [1, 1], 2, memory=[1, 2]), "memory=[1, 2] and limit=None", "give the layers' bytes"),
    (lambda: balance_layers("ab", [1, 1], 2, memory=[1], limit=3), "memory has 1 numbers for 2 layers", "give"),
    (lambda: balance_layers("ab", [1, 1], 2, memory=[1, 9], limit=8), "'b' takes 9 bytes", "limit=8: cut the layer"),
    (lambda: balance_layers("abc", [1] * 3, 2, memory=[2] * 3, limit=3), "no split of 3 layers", "take more IPUs"),
    (
        lambda: balance_layers("abcd", [1] * 4, 2, rounds=2, memory=[1] * 4, limit=3),
        "limit=3 with rounds=2",
        "leave one",
    ),
)
def test_what_cannot_be_balanced_is_refused(call, holds):
    with refused(*holds):
        call()


def test_measured_costs_of_a_concurrent_stage_are_the_whole_ones():
    both = lambda w, x, mb: lax.psum((mb @ w).sum(), "ipu")
    alone = lambda w, x, mb: (mb @ w).sum()
    args = ({"w": jnp.ones((8, 16))}, jnp.ones((4, 8)))
    (found,) = measure_costs([Stage(both, params="w", ipu=ALL_IPUS)], *args)
    (expected,) = measure_costs([Stage(alone, params="w")], *args)
    assert found == pytest.approx(expected, abs=2)

"""Test what schedules, the simulator, `balance_layers` and `measure_costs` take: names of others, numpy's numbers."""

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Outputs, Pipeline, Stage
from ipu_jax.core.analysis.balance import balance_layers, measure_costs
from ipu_jax.core.schedules import Schedule, make_schedule

TORCH = {
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "looped",
    "LoopedBFS": "looped-bfs",
    "InterleavedZeroBubble": "looped-zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
JAXPP = {"GPipe": "gpipe", "Std1F1B": "1f1b", "Eager1F1B": "grouped", "Interleaved1F1B": "looped"}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *TORCH.items(),
        *((f"Schedule{name}", ours) for name, ours in TORCH.items()),
        *JAXPP.items(),
        ("ZB-H1", "zb-h1"),
        ("Grouped", "grouped"),
    ],
)
def test_a_schedules_name_elsewhere_means_ours(name, ours):
    expected = make_schedule(ours, ipus=2, gradient_accumulation=3)
    for spelled in (name, name.lower(), name.upper()):
        assert make_schedule(spelled, ipus=2, gradient_accumulation=3) == expected
    stages = [Stage(lambda p, x, mb: mb.mean(), ipu=0)]
    assert Pipeline(stages, gradient_accumulation=3, schedule=name).schedule.name == ours


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpys_integers_are_integers(integer):
    two, three = integer(2), integer(3)
    places = np.array([0, 1, 0, 1], integer)
    expected = make_schedule("looped", ipus=2, gradient_accumulation=3, placement=(0, 1, 0, 1), rounds=2)
    for found in (
        make_schedule("looped", ipus=two, gradient_accumulation=three, rounds=two),
        make_schedule("looped", gradient_accumulation=three, placement=tuple(places)),
        make_schedule("looped", ipus=two, gradient_accumulation=three, placement=places),  # pyright: ignore[reportArgumentType]
        Schedule("looped", (*places,), two, expected.forward, np.array(expected.backward), None, "one-phase"),  # pyright: ignore[reportArgumentType]
    ):
        assert found == expected
        assert str(found) == str(expected)
        assert hash(found) == hash(expected)
        assert {type(ipu) for ipu in (*found.placement, found.ipus, found.micro_batches, found.ticks)} == {int}
        assert {type(tick) for row in (*found.forward, *found.backward) for tick in row} == {int}


# the simulator


def test_costs_may_be_numpys_and_any_sequence():
    schedule: Any = make_schedule("zb-h1", ipus=2, gradient_accumulation=3)
    expected = schedule.simulate([1, 2], [3, 4], [1, 2], 0.5)
    for of in (np.array, jnp.array, tuple, iter):
        found = schedule.simulate(of([1, 2]), of([3, 4]), of([1, 2]), np.float64(0.5))
        assert found == expected
        assert type(found.makespan) is float
    assert schedule.simulate(np.int64(1), jnp.float32(2)) == schedule.simulate(1, 2)
    assert schedule.bubble(np.float32(1), np.int32(2)) == schedule.bubble(1, 2)


# split and measure_costs


def test_split_takes_numpys_numbers():
    costs, memory = np.array([4, 1, 1, 1, 3, 2]), np.ones(6, np.float32)
    two, three, limit = (cast(Any, number) for number in (np.int64(2), np.int64(3), np.float32(3)))
    expected = balance_layers(range(6), [4, 1, 1, 1, 3, 2], 3, memory=[1] * 6, limit=3)
    found = balance_layers(np.arange(6), costs, three, memory=memory, limit=limit)
    assert (found.ipus, found.loads) == (expected.ipus, expected.loads)
    assert {type(load) for load in found.loads} == {float}
    assert balance_layers("abcd", iter([1, 1, 1, 1]), two, rounds=two).ipus == (0, 1, 0, 1)


def test_measure_costs_by_hand_of_state_keys_and_numpys_float64():
    def noisy(w, x, mb, *, key, state):
        return Outputs(mb @ w + jax.random.key_data(key)[0].astype(jnp.float32), state=state + 1)

    stages = [Stage(noisy, params="a", random=True, state="s"), Stage(lambda w, x, mb: jnp.sum(x @ w), params="b")]
    weights = {"a": np.ones((4, 8)), "b": np.ones((8, 2))}
    found = measure_costs(stages, weights, np.ones((3, 4)), {"s": np.zeros(5, np.int32)})
    products = [2 * 3 * a * b for a, b in itertools.pairwise((4, 8, 2))]
    # F: the product, the sum with the number, five counters; W. The last: F, B, W and a sum of 3 x 2
    assert found == [2 * products[0] + 3 * 8 + 5, 3 * products[1] + 6]

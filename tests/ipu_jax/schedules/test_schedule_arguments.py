"""Test the arguments of schedules, the simulator, `balance_layers` and `measure_costs`, and their errors."""

import itertools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Outputs, Pipeline, Stage, make_mesh
from ipu_jax.analysis.balance import balance_layers, measure_costs
from ipu_jax.schedules import SCHEDULES, Schedule, make_schedule
from support.harness import exactly

CHOICES = ", ".join(map(repr, (*SCHEDULES, "auto")))
ROWS = (((0, 1), (1, 2)), ((2, 3), (1, 2)))  # of two stages on two IPUs, two micro-batches, two-phase


def refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=exactly(message)):
        call()


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
    expected = make_schedule(ours, ipus=2, micro_batches=3)
    for spelled in (name, name.lower(), name.upper()):
        assert make_schedule(spelled, ipus=2, micro_batches=3) == expected
    stages = [Stage(lambda p, x, mb: mb.mean(), ipu=0)]
    assert Pipeline(stages, gradient_accumulation=3, schedule=name).schedule.name == ours


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("1F1C", "1f1b"), ("GPype", "gpipe"), ("ZB-H2", "zb-h1"), ("ZBW", "zbv"), ("Interleave", "interleaved")],
)
def test_a_misspelled_name_is_told_the_right_one(name, nearest):
    message = f"schedule={name!r} is unknown: did you mean {nearest!r}? Choose one of {CHOICES}"
    refused(lambda: make_schedule(name, ipus=2, micro_batches=2), message)
    refused(lambda: Pipeline([Stage(lambda p, x, mb: x)], schedule=name), message)


@pytest.mark.parametrize("name", [1, None, b"1f1b", ("1f1b",)])
def test_a_schedule_that_is_no_name_is_refused(name):
    refused(
        lambda: make_schedule(name, ipus=2, micro_batches=2), f"schedule={name!r} is unknown: Choose one of {CHOICES}"
    )


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpys_integers_are_integers(integer):
    two, three = integer(2), integer(3)
    places = np.array([0, 1, 0, 1], integer)
    expected = make_schedule("looped", ipus=2, micro_batches=3, placement=(0, 1, 0, 1), rounds=2)
    for found in (
        make_schedule("looped", ipus=two, micro_batches=three, rounds=two),
        make_schedule("looped", micro_batches=three, placement=tuple(places)),
        make_schedule("looped", ipus=two, micro_batches=three, placement=places),  # pyright: ignore[reportArgumentType]
        Schedule("looped", (*places,), two, expected.forward, np.array(expected.backward), None, "one-phase"),  # pyright: ignore[reportArgumentType]
    ):
        assert found == expected
        assert str(found) == str(expected)
        assert hash(found) == hash(expected)
        assert {type(ipu) for ipu in (*found.placement, found.ipus, found.micro_batches, found.ticks)} == {int}
        assert {type(tick) for row in (*found.forward, *found.backward) for tick in row} == {int}


def test_a_pipeline_takes_numpys_integers_for_its_schedule():
    stages = [Stage(lambda p, x, mb: mb * 2.0, ipu=0), Stage(lambda p, x, mb: x.mean(), ipu=1)]
    schedule = make_schedule("1f1b", ipus=np.int64(2), micro_batches=np.int64(2), placement=np.arange(2))  # pyright: ignore[reportArgumentType]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), schedule=schedule, gradient_accumulation=2)
    assert float(pipeline.loss(pipeline.shard({}), np.ones((2, 3), np.float32))) == 2


BAD_COUNTS = (0, -1, 2.0, "2", True, None, np.float32(2), np.array([2]), math.nan)


@pytest.mark.parametrize("bad", BAD_COUNTS, ids=repr)
def test_what_is_not_a_count_is_refused(bad):
    rule = f"={bad!r} is not a count: give an int of at least 1"
    refused(lambda: make_schedule("1f1b", ipus=2, micro_batches=bad), f"micro_batches{rule}")
    refused(lambda: make_schedule("looped", ipus=2, micro_batches=2, rounds=bad), f"rounds{rule}")
    refused(lambda: Schedule("mine", (0, 1), bad, *ROWS), f"ipus{rule}")
    refused(lambda: balance_layers("ab", [1, 1], bad), f"ipus{rule}")
    refused(lambda: balance_layers("ab", [1, 1], 1, rounds=bad), f"rounds{rule}")
    if bad is not None:  # nobody said how many
        refused(lambda: make_schedule("1f1b", ipus=bad, micro_batches=2), f"ipus{rule}")
        refused(lambda: make_schedule("1f1b", ipus=bad, placement=(0, 1), micro_batches=2), f"ipus{rule}")


@pytest.mark.parametrize("bad", [0.0, "0", True, np.float32(1), (0,), math.nan], ids=repr)
def test_a_place_that_is_no_integer_is_refused(bad):
    message = f"stage 1 is on IPU {bad!r}: give an int, or None for a concurrent stage"
    refused(lambda: make_schedule("grouped", placement=(0, bad), micro_batches=2), message)
    refused(lambda: Schedule("mine", (0, bad), 2, *ROWS), message)


@pytest.mark.parametrize("bad", [3, "01", 1.5])
def test_a_placement_that_is_none_is_refused(bad):
    message = f"placement={bad!r} is no placement: give per stage its IPU, or None, as in (0, 1, None)"
    refused(lambda: make_schedule("grouped", placement=bad, micro_batches=2), message)


@pytest.mark.parametrize("bad", [1.0, "1", None, True, np.float64(1)], ids=repr)
def test_a_tick_that_is_no_integer_is_refused(bad):
    forward, backward = ROWS
    wrong = (backward[0], (backward[1][0], bad))
    refused(
        lambda: Schedule("mine", (0, 1), 2, forward, wrong),
        f"schedule 'mine': 1B1 is in tick {bad!r}: give an int of at least 0",
    )


@pytest.mark.parametrize("bad", [None, 3, "01", (0, 1)], ids=repr)
def test_a_table_that_is_none_is_refused(bad):
    forward, _ = ROWS
    refused(
        lambda: Schedule("mine", (0, 1), 2, forward, bad),
        f"schedule 'mine': the backward table is {bad!r}: give per stage a row of ticks, one a micro-batch",
    )


def test_a_schedule_is_read_from_text():
    refused(
        lambda: Schedule.from_text(3),  # pyright: ignore[reportArgumentType]
        "text=3 is no text: give what str(schedule) gives, or a grid of your own",
    )


def test_a_schedules_own_name_must_be_text():
    refused(
        lambda: Schedule(3, (0, 1), 2, *ROWS),  # pyright: ignore[reportArgumentType]
        "name=3 cannot stand in a header: give one line, words apart by one blank",
    )


# the simulator


def test_costs_may_be_numpys_and_any_sequence():
    schedule: Any = make_schedule("zb-h1", ipus=2, micro_batches=3)
    expected = schedule.simulate([1, 2], [3, 4], [1, 2], 0.5)
    for of in (np.array, jnp.array, tuple, iter):
        found = schedule.simulate(of([1, 2]), of([3, 4]), of([1, 2]), np.float64(0.5))
        assert found == expected
        assert type(found.makespan) is float
    assert schedule.simulate(np.int64(1), jnp.float32(2)) == schedule.simulate(1, 2)
    assert schedule.bubble(np.float32(1), np.int32(2)) == schedule.bubble(1, 2)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, None, "1", True, 1j, {"a": 1}], ids=repr)
def test_what_is_not_a_cost_is_refused(bad):
    schedule = make_schedule("zb-h1", ipus=2, micro_batches=3)
    rule = f"={bad!r} is not a cost: give a finite number of at least 0"
    refused(lambda: schedule.simulate(bad), f"forward{rule}")
    refused(lambda: schedule.simulate(1, bad), f"backward{rule}")
    refused(lambda: schedule.simulate([1, bad]), f"forward[1]{rule}")
    refused(lambda: schedule.simulate(1, 2, 1, bad), f"transfer{rule}")
    refused(lambda: balance_layers("ab", [1, bad], 2), f"layer 'b': costs[1]{rule}")
    if bad is not None:
        refused(lambda: schedule.simulate(1, 2, bad), f"weight{rule}")
        size = rule.replace("a cost", "a size")
        refused(lambda: balance_layers("ab", [1, 1], 2, memory=[1, bad], limit=3), f"layer 'b': memory[1]{size}")
        refused(lambda: balance_layers("ab", [1, 1], 2, memory=[1, 1], limit=bad), f"limit{size}")


# split and measure_costs


def test_split_takes_numpys_numbers():
    costs, memory = np.array([4, 1, 1, 1, 3, 2]), np.ones(6, np.float32)
    two, three, limit = (cast(Any, number) for number in (np.int64(2), np.int64(3), np.float32(3)))
    expected = balance_layers(range(6), [4, 1, 1, 1, 3, 2], 3, memory=[1] * 6, limit=3)
    found = balance_layers(np.arange(6), costs, three, memory=memory, limit=limit)
    assert (found.ipus, found.loads) == (expected.ipus, expected.loads)
    assert {type(load) for load in found.loads} == {float}
    assert balance_layers("abcd", iter([1, 1, 1, 1]), two, rounds=two).ipus == (0, 1, 0, 1)


@pytest.mark.parametrize("bad", [None, 3, "12", {0: 1, 1: 1}], ids=repr)
def test_costs_and_memory_are_a_number_a_layer(bad):
    refused(lambda: balance_layers("ab", bad, 2), f"costs={bad!r} are no numbers: give one for each layer")
    if bad is not None:
        refused(
            lambda: balance_layers("ab", [1, 1], 2, memory=bad, limit=3),
            f"memory={bad!r} are no numbers: give one for each layer",
        )


def test_layers_that_are_no_list_are_refused():
    refused(lambda: balance_layers(3, [1], 1), "model_layers=3 are no layers: give them in their order, as in a list")  # pyright: ignore[reportArgumentType]


FIRST = Stage(lambda w, x, mb: mb @ w, params="a")
LAST = Stage(lambda w, x, mb: jnp.sum(x @ w), params="b")
WEIGHTS = {"a": np.ones((4, 8)), "b": np.ones((8, 2))}


@pytest.mark.parametrize(
    ("stages", "params", "state", "message"),
    [
        ([], {}, None, "stages=() is empty: give at least one Stage"),
        ([FIRST, "last"], WEIGHTS, None, "stages holds 'last': give Stages, the first one first"),
        (3, WEIGHTS, None, "stages holds 3: give Stages, the first one first"),
        ([FIRST, LAST], {"a": 1}, None, "params: missing 'b', which stages name"),
        ([FIRST, LAST], [1, 2], None, "params is a list: give {group: pytree}"),
        (
            [Stage(lambda p, x, mb, *, state: Outputs(mb.sum(), state=state), state="s")],
            {},
            None,
            "state: missing 's', which stages name",
        ),
    ],
)
def test_measure_costs_refuses(stages, params, state, message):
    refused(lambda: measure_costs(stages, params, np.ones((3, 4)), state), message)


def test_measure_costs_by_hand_of_state_keys_and_numpys_float64():
    def noisy(w, x, mb, *, key, state):
        return Outputs(mb @ w + jax.random.key_data(key)[0].astype(jnp.float32), state=state + 1)

    stage = Stage(noisy, params="a", random=True, state="s")
    found = measure_costs([stage, LAST], WEIGHTS, np.ones((3, 4)), {"s": np.zeros(5, np.int32)})
    products = [2 * 3 * a * b for a, b in itertools.pairwise((4, 8, 2))]
    # F: the product, the sum with the number, five counters; W. The last: F, B, W and a sum of 3 x 2
    assert found == [2 * products[0] + 3 * 8 + 5, 3 * products[1] + 6]

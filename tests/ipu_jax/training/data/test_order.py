"""Test which example is in which batch: each once, over any number of instances, and from any place on."""

from typing import Any

import numpy as np
import pytest

from ipu_jax.training.data.order import BatchDims, EpochOrder, Position

INSTANCES = (1, 2, 4, 8)


START = Position(0, 0)


def walk(order, place=START, epochs=1):
    """Return the places from a given one on, for so many epochs."""
    found, place = [], order.first(place)
    end = place.epoch + epochs
    while place.epoch < end:
        found.append(place)
        place = order.after(place)
    return found


def read(orders, place):
    """Return the set of real examples of a batch in all instances, which must agree about the whole batch."""
    parts = [order.rows(place) for order in orders]
    (told,) = {part.examples for part in parts}
    found = np.concatenate([part.indices[part.is_real] for part in parts])
    assert len(found) == told
    return found


def of_instances(instances, examples, *, seed=0, remainder="drop", replicas=8, **dims):
    every = [BatchDims(1, replicas=replicas, instances=instances, instance=n, **dims) for n in range(instances)]
    return [EpochOrder(examples, own, seed=seed, remainder=remainder) for own in every]


@pytest.mark.parametrize("instances", INSTANCES)
@pytest.mark.parametrize("remainder", ["drop", "updates", "pad", "wrap"])
def test_instances_read_each_example_once_but_for_what_the_rule_leaves_out(instances, remainder):
    orders = of_instances(instances, 101, gradient_accumulation=2, iterations=2, remainder=remainder)
    for epoch in (0, 1):
        found = [read(orders, place) for place in walk(orders[0], Position(epoch, 0))]
        # a batch is 2 updates of 16: 101 are 3 batches and 5, or 6 updates and 5
        left_out = {"drop": 5, "updates": 5, "pad": 0, "wrap": 0}[remainder]
        every = np.concatenate(found)
        assert len(np.unique(every)) == len(every) == 101 - left_out
        assert set(every) <= set(range(101))
        assert len(found) == orders[0].batches_from(0) == (3 if left_out else 4)


def test_the_order_is_that_of_seed_and_epoch_and_not_of_the_instances():
    expected = np.arange(48)
    np.random.default_rng([3, 5]).shuffle(expected)
    for instances in INSTANCES:
        orders = of_instances(instances, 48, iterations=2, gradient_accumulation=3, seed=3)
        parts = [order.rows(Position(5, 0)).indices for order in orders]
        assert {part.shape for part in parts} == {(2, 8 // instances, 3, 1)}
        np.testing.assert_array_equal(np.concatenate(parts, axis=1).reshape(-1), expected)


@pytest.mark.parametrize("remainder", ["pad", "wrap"])
def test_fewer_examples_than_a_batch_fill_one(remainder):
    order = EpochOrder(3, BatchDims(4, iterations=2), shuffle=False, remainder=remainder)
    rows = order.rows(Position(0, 0))
    assert (rows.examples, order.dims.updates(3), walk(order)) == (3, 1, [Position(0, 0)])
    if remainder == "wrap":
        assert rows.indices.reshape(-1).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("remainder", ["drop", "updates", "pad", "wrap"])
@pytest.mark.parametrize(("before", "after"), [((1, 8), (8, 8)), ((8, 8), (2, 8)), ((4, 4), (2, 6)), ((2, 2), (1, 1))])
def test_any_number_of_instances_goes_on_where_others_stopped(remainder, before, after):
    """Test (instances, replicas) before and after; the batches may have another size."""
    options = {"gradient_accumulation": 2, "seed": 1, "remainder": remainder}
    first, second = (of_instances(n, 333, replicas=replicas, **options) for n, replicas in (before, after))
    start = walk(first[0])[:3]
    seen = [read(first, place) for place in start]
    then = [read(second, place) for place in walk(second[0], first[0].after(start[-1]))]
    every = np.concatenate([*seen, *then])
    assert len(np.unique(every)) == len(every)
    missing = 333 - len(every)
    assert missing == (0 if remainder in ("pad", "wrap") else (333 - len(np.concatenate(seen))) % second[0].per_update)


@pytest.mark.parametrize(("remainder", "per_epoch"), [("drop", 3), ("pad", 4)])
def test_a_goal_among_examples_that_are_left_out_needs_no_further_update(remainder, per_epoch):
    order = EpochOrder(10, BatchDims(3), remainder=remainder)
    for epochs in (1, 2, 3):
        assert order.updates_between(Position(0, 0), Position(epochs - 1, 10)) == epochs * per_epoch


def test_the_order_of_an_epoch_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        EpochOrder(10, BatchDims(4)).of_epoch(0)[0] = 1


def test_numpys_integers_are_taken_as_pythons_own():
    numbers: Any = (int, np.uint8)
    of_dims = {"micro_batch": 2, "replicas": 2, "gradient_accumulation": 3, "iterations": 2, "instances": 2}
    plain, order = (
        EpochOrder(number(40), BatchDims(**{name: number(value) for name, value in of_dims.items()}), seed=number(5))
        for number in numbers
    )
    assert {type(value) for value in (order.examples, order.seed, order.per_update, order.per_batch)} == {int}
    assert np.array_equal(order.rows(Position(0, 0)).indices, plain.rows(Position(0, 0)).indices)

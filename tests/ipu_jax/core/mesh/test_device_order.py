"""Test the order of devices in a mesh, on devices that only say where they are."""

import dataclasses
import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest

from ipu_jax.core.mesh.device_order import hops, path_through, place_of, rows_of


@dataclasses.dataclass(frozen=True)
class Chip:
    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int | None = 0


@dataclasses.dataclass(frozen=True)
class Unplaced:
    number: int


def grid(*sides: int, cores: int = 1, slice_index: int | None = 0, seed: int = 0) -> list[Any]:
    """Return all devices of a grid, shuffled."""
    places = itertools.product(itertools.product(*map(range, sides)), range(cores))
    chips = [Chip(coords, core, slice_index) for coords, core in places]
    return random.Random(seed).sample(chips, len(chips))


def steps(row: Iterable[Any]) -> list[int]:
    return [distance(a, b) for a, b in itertools.pairwise(row)]


def distance(a: Any, b: Any) -> int:
    return sum(abs(x - y) for x, y in zip((*a.coords, a.core_on_chip), (*b.coords, b.core_on_chip), strict=True))


def slices_of(rows: Iterable[Any]) -> list[list[int]]:
    return [sorted({chip.slice_index for chip in row}) for row in rows]


SIDES = [(2, 4), (4, 2), (3, 5), (2, 2, 3), (4, 4, 4), (1, 1, 1), (7,)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("cores", [1, 2])
def test_one_row_goes_through_a_full_grid_from_neighbour_to_neighbour(sides, cores, seed):
    chips = grid(*sides, cores=cores, seed=seed)
    (row,) = rows_of(chips, 1, len(chips))
    assert set(row) == set(chips)
    assert steps(row) == [1] * (len(chips) - 1)
    assert list(row) == path_through(chips) == path_through(chips[::-1])


def test_coordinates_can_start_anywhere():
    moved = [Chip((chip.coords[0] + 4, chip.coords[1] + 2)) for chip in grid(4, 4)]
    assert steps(path_through(moved)) == [1] * 15


@pytest.mark.parametrize(
    ("sides", "replicas", "ipus", "apart"),
    [
        ((2, 4), 2, 4, 1),
        ((4, 2), 2, 4, 1),
        ((4, 4), 4, 4, 1),
        ((4, 4), 2, 8, 2),  # a replica is two lines: its neighbour's first line comes after both
        ((4, 4, 4), 4, 16, 1),
        ((4, 4, 4), 16, 4, 1),
    ],
)
def test_an_ipu_is_beside_its_peer_of_the_next_replica(sides, replicas, ipus, apart):
    rows = rows_of(grid(*sides), replicas, ipus)
    assert rows.shape == (replicas, ipus)
    assert len(set(rows.flat)) == replicas * ipus
    for row in rows:
        assert steps(row) == [1] * (ipus - 1)
    for row, following in itertools.pairwise(rows):
        assert [*map(distance, row, following)] == [apart] * ipus


TWO_SLICES = [*grid(2, 2, slice_index=1), *grid(2, 2, slice_index=0)]
UNEVEN = [*grid(1, 3, slice_index=0), *grid(1, 5, slice_index=1)]


@pytest.mark.parametrize(
    ("devices", "replicas", "ipus", "slices"),
    [
        (TWO_SLICES, 2, 4, [[0], [1]]),
        (TWO_SLICES, 4, 2, [[0], [0], [1], [1]]),
        (TWO_SLICES, 1, 4, [[0]]),
        (TWO_SLICES, 1, 8, [[0, 1]]),  # larger than a slice
        (TWO_SLICES, 1, 5, [[0, 1]]),
        (TWO_SLICES, 2, 3, [[0], [1]]),  # one of each slice is left out
        (UNEVEN, 3, 2, [[0], [1], [1]]),
        (UNEVEN, 4, 2, [[0], [0, 1], [1], [1]]),  # and here it is needed
        (UNEVEN, 1, 4, [[1]]),  # the first slice is too small
        (UNEVEN, 2, 4, [[0, 1], [1]]),
    ],
)
def test_a_replica_is_in_one_slice_where_it_fits(devices, replicas, ipus, slices):
    rows = rows_of(devices, replicas, ipus)
    assert slices_of(rows) == slices
    assert rows.shape == (replicas, ipus)
    assert len(set(rows.flat)) == replicas * ipus
    for row in rows:
        for a, b in itertools.pairwise(row):
            assert a.slice_index != b.slice_index or distance(a, b) == 1


def test_devices_that_know_no_slice_are_in_one():
    rows = rows_of([*grid(2, 2, slice_index=None)], 2, 2)
    assert slices_of(rows) == [[None], [None]]


def test_a_grid_with_holes_keeps_all_its_devices():
    chips = [chip for chip in grid(4, 4) if chip.coords not in {(1, 1), (2, 3), (0, 0)}]
    path = path_through(chips)
    assert len(path) == len(chips) == 13
    assert set(path) == set(chips)


@pytest.mark.parametrize(
    "devices",
    [
        [Unplaced(3), Unplaced(1), Unplaced(2), Unplaced(0)],
        [Chip((1, 0)), Unplaced(0), Chip((0, 0)), Unplaced(1)],  # not all of them
        [Chip((1, 0)), Chip((0, 0)), Chip((1, 0)), Chip((1, 1))],  # two in the same place
    ],
    ids=["none", "some", "twice"],
)
def test_devices_without_a_place_of_their_own_keep_their_order(devices):
    assert path_through(devices) == devices
    assert rows_of(devices, 1, 4).tolist() == [devices]
    assert rows_of(devices[:1], 1, 1).tolist() == [devices[:1]]


def test_hops_are_counted_along_the_links():
    assert hops(Chip((0, 0, 0)), Chip((0, 0, 0))) == 0
    assert hops(Chip((3, 0, 1)), Chip((1, 1, 1), core_on_chip=1)) == 4
    one, other = Unplaced(0), Unplaced(1)
    assert (hops(one, one), hops(one, other), hops(one, Chip((5, 5)))) == (0, 1, 1)
    assert (place_of(one), place_of(Chip((2, 1), core_on_chip=1))) == (None, (2, 1, 1))


# sides of a slice, (replicas, IPUs, devices of an IPU), the most links to the same device of the next IPU
GROUPS = [
    ((2, 2), (1, 2, 2), 1),
    ((2, 4), (1, 4, 2), 1),
    ((4, 2), (2, 2, 2), 1),
    ((4, 4), (1, 4, 4), 1),
    ((4, 4), (2, 4, 2), 3),
    ((4, 4, 4), (1, 16, 4), 1),
    ((4, 4, 4), (2, 4, 8), 3),
]


@pytest.mark.parametrize(("sides", "mesh", "most"), GROUPS)
def test_the_devices_of_an_ipu_are_neighbours_and_ipus_are_near_each_other(sides, mesh, most):
    replicas, ipus, group = mesh
    rows = rows_of(grid(*sides), replicas, ipus, group).reshape(mesh)
    assert len({*rows.flat}) == rows.size
    assert all(steps(of_ipu) == [1] * (group - 1) for row in rows for of_ipu in row)
    links = [distance(*pair) for row in rows for one in itertools.pairwise(row) for pair in zip(*one, strict=True)]
    assert max(links) == most


def test_groups_of_devices_that_know_no_place_keep_their_order():
    devices = [Unplaced(number) for number in range(12)]
    assert rows_of(devices, 2, 3, 2).reshape(-1).tolist() == devices

"""Put devices in the order of a mesh, so that neighbours in a pipeline are neighbours in the machine.

    a TPU slice of 2 x 4 chips      0 - 1 - 2 - 3       replicas of 4 IPUs: a row each. The second one is turned round,
                                                |       so that IPU k of one replica is beside IPU k of the next.
                                    7 - 6 - 5 - 4

    pairs of 2 x 4 chips        0 0'               an IPU of two chips, and the next one beside it: of all such paths
                                1 1'               through the slice, the one that makes the links between neighbours
                                2 2'               and within IPUs the shortest
                                3 3'

Fast links connect a slice: TPU chips, or the GPUs of a host. Devices without coordinates, such as CPU
devices, keep their order.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from ipu_jax.base.annotations import Device

_Place = tuple[int, ...]
_MOST_TRIED: Final = 64
"""The most devices for which paths through a grid with holes are tried."""


def rows_of(devices: Sequence[Device], replicas: int, ipus: int, group: int = 1) -> np.ndarray:
    """Return the devices of each replica: the first ones of all, along a path through each slice.

    A replica is in one slice if a slice has enough devices. Then the rest of a slice, if too small, is left out unless
    it is needed.

    Args:
        devices: the devices to choose from.
        replicas, ipus: how many replicas there are, and how many IPUs each has.
        group: the number of devices of an IPU.

    Returns:
        An array (replicas, ipus * group) of devices, an IPU's beside each other.
    """
    ipus *= group
    slices: dict[int, list[Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    rows: list[list[Device]] = []
    for number in sorted(slices):
        count = min(len(slices[number]) // ipus, replicas - len(rows))
        path = _first_through(slices[number], count * ipus, group)
        rows += [path[at : at + ipus] for at in range(0, len(path), ipus)]
    if len(rows) < replicas:
        path, needed = list[Device](), replicas * ipus
        for number in sorted(slices):
            path += _first_through(slices[number], min(len(slices[number]), needed - len(path)), group)
        rows = [path[at : at + ipus] for at in range(0, needed, ipus)]
    turned: list[list[Device]] = []
    for row in rows:
        beside = turned[-1] if turned else row
        row = _turned(row, group) if group > 1 else row
        turned.append(min(row, row[::-1], key=lambda way: sum(map(hops, beside, way))))
    found = np.empty((replicas, ipus), object)
    found[:] = turned
    return found


def _turned(row: list[Device], group: int) -> list[Device]:
    """Return a replica's devices, each IPU's turned round if it is nearer to the IPU before it so."""
    found: list[Device] = []
    for at in range(0, len(row), group):
        here = row[at : at + group]
        found += min(here, here[::-1], key=lambda way: sum(map(hops, found[-group:], way)))
    return found


def _links(path: Sequence[Device], group: int) -> int:
    """Return how many links there are between neighbours of an IPU's devices, and to the same ones of the next IPU."""
    path = _turned([*path], group)
    inside = sum(hops(one, other) for k, (one, other) in enumerate(itertools.pairwise(path)) if (k + 1) % group)
    return inside + sum(map(hops, path, path[group:]))


def _first_through(devices: Sequence[Device], count: int, group: int) -> list[Device]:
    """Return a path through the first devices of a slice, or through others if the first ones are scattered."""
    path = path_through(devices[:count], group)
    return path if _length(path) < count or group > 1 else path_through(devices, group)[:count]


def path_through(devices: Sequence[Device], group: int = 1) -> list[Device]:
    """Return the devices of a slice along a path, from each to a neighbour of it if they are a full grid.

    For groups of devices it is the path on which these are near each other, and each group near the next one.
    """
    places = {place_of(device): device for device in devices}
    if not devices or None in places or len(places) < len(devices):
        return list(devices)
    sides = [sorted(set(side)) for side in zip(*places, strict=True)]
    # the longest side is the fastest, so that a replica is rather a line than a square, and has one beside it
    orders = [tuple(sorted(range(len(sides)), key=lambda dim: len(sides[dim])))]
    if group > 1:
        orders += itertools.permutations(orders[0])
    ways = [[places[place] for place in _snake(sides, order) if place in places] for order in dict.fromkeys(orders)]
    through = min(ways, key=lambda way: _links(way, group)) if group > 1 else ways[0]
    if math.prod(map(len, sides)) == len(devices) or len(devices) > _MOST_TRIED:
        return through
    return min((through, *(_nearest_first(start, through) for start in through)), key=_length)


def _snake(sides: Sequence[Sequence[int]], order: Sequence[int]) -> Iterator[_Place]:
    """Yield the places of a grid from each to a neighbour; the last dim of `order` is the fastest."""
    path: list[_Place] = [()]
    for dim in reversed(order):
        path = [(at, *rest) for k, at in enumerate(sides[dim]) for rest in (path if k % 2 == 0 else reversed(path))]
    by_dim = [order.index(dim) for dim in range(len(sides))]
    return (tuple(place[k] for k in by_dim) for place in path)


def _nearest_first(start: Device, devices: Sequence[Device]) -> list[Device]:
    """Return a path that goes from a device to the nearest one that is left, again and again."""
    path, left = [start], [device for device in devices if device is not start]
    while left:
        path.append(min(left, key=lambda device: hops(path[-1], device)))
        left.remove(path[-1])
    return path


def _length(path: Sequence[Device]) -> int:
    return sum(itertools.starmap(hops, itertools.pairwise(path)))


def place_of(device: Device) -> _Place | None:
    """Return where a device is in the grid of its slice: its chip's coordinates and its core's number, or None."""
    coordinates, core = (getattr(device, name, None) for name in ("coords", "core_on_chip"))
    return None if coordinates is None or core is None else (*coordinates, core)  # GPUs have no cores


def hops(one: Device, other: Device) -> int:
    """Return how many links a message takes from one device to another of its slice; 1 where places are not known."""
    here, there = place_of(one), place_of(other)
    if here is None or there is None:
        return int(one is not other)
    return sum(abs(a - b) for a, b in zip(here, there, strict=True))

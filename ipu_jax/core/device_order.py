"""Put devices in the order of a mesh, so that neighbours in a pipeline are neighbours in the machine.

    a TPU slice of 2 x 4 chips      0 - 1 - 2 - 3       replicas of 4 IPUs: a row each. The second one is turned round,
                                                |       so that IPU k of one replica is beside IPU k of the next.
                                    7 - 6 - 5 - 4

Fast links connect a slice: TPU chips, or the GPUs of a host. Devices without coordinates, such as CPU
devices, keep their order.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_Place = tuple[int, ...]
_MOST_TRIED: Final = 64
"""The most devices for which paths through a grid with holes are tried."""


def rows_of(devices: Sequence[Any], replicas: int, ipus: int) -> npt.NDArray[Any]:
    """Return the devices of each replica, (replicas, ipus): the first ones of all, along a path through each slice.

    A replica is in one slice if a slice has enough devices. Then the rest of a slice, if too small, is left out unless
    it is needed.
    """
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    rows: list[list[Any]] = []
    for number in sorted(slices):
        count = min(len(slices[number]) // ipus, replicas - len(rows))
        path = _first_through(slices[number], count * ipus)
        rows += [path[at : at + ipus] for at in range(0, len(path), ipus)]
    if len(rows) < replicas:
        path, needed = list[Any](), replicas * ipus
        for number in sorted(slices):
            path += _first_through(slices[number], min(len(slices[number]), needed - len(path)))
        rows = [path[at : at + ipus] for at in range(0, needed, ipus)]
    turned: list[list[Any]] = []
    for row in rows:
        beside = turned[-1] if turned else row
        turned.append(min(row, row[::-1], key=lambda way: sum(map(hops, beside, way))))
    found = np.empty((replicas, ipus), object)
    found[:] = turned
    return found


def _first_through(devices: Sequence[Any], count: int) -> list[Any]:
    """Return a path through the first devices of a slice, or through others if the first ones are scattered."""
    path = path_through(devices[:count])
    return path if _length(path) < count else path_through(devices)[:count]


def path_through(devices: Sequence[Any]) -> list[Any]:
    """Return the devices of a slice along a path, from each to a neighbour of it if they are a full grid."""
    places = {place_of(device): device for device in devices}
    if not devices or None in places or len(places) < len(devices):
        return list(devices)
    sides = [sorted(set(side)) for side in zip(*places, strict=True)]
    # the longest side is the fastest, so that a replica is rather a line than a square, and has one beside it
    order = sorted(range(len(sides)), key=lambda dim: len(sides[dim]))
    path: list[_Place] = [()]
    for dim in reversed(order):
        path = [(at, *rest) for k, at in enumerate(sides[dim]) for rest in (path if k % 2 == 0 else reversed(path))]
    by_dim = [order.index(dim) for dim in range(len(sides))]
    ordered = (tuple(place[k] for k in by_dim) for place in path)
    through = [places[place] for place in ordered if place in places]
    if math.prod(map(len, sides)) == len(devices) or len(devices) > _MOST_TRIED:
        return through
    return min((through, *(_nearest_first(start, through) for start in through)), key=_length)


def _nearest_first(start: Any, devices: Sequence[Any]) -> list[Any]:
    """Return a path that goes from a device to the nearest one that is left, again and again."""
    path, left = [start], [device for device in devices if device is not start]
    while left:
        path.append(min(left, key=lambda device: hops(path[-1], device)))
        left.remove(path[-1])
    return path


def _length(path: Sequence[Any]) -> int:
    return sum(itertools.starmap(hops, itertools.pairwise(path)))


def place_of(device: Any) -> _Place | None:
    """Return where a device is in the grid of its slice: its chip's coordinates and its core's number, or None."""
    coordinates, core = (getattr(device, name, None) for name in ("coords", "core_on_chip"))
    return None if coordinates is None or core is None else (*coordinates, core)  # GPUs have no cores


def hops(one: Any, other: Any) -> int:
    """Return how many links a message takes from one device to another of its slice; 1 where places are not known."""
    here, there = place_of(one), place_of(other)
    if here is None or there is None:
        return int(one is not other)
    return sum(abs(a - b) for a, b in zip(here, there, strict=True))

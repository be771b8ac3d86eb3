"""Describe how the instances of one host are started: command, environment, threads and cores.

Nothing here imports jax.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.distributed.environment import CACHE, THREADS, Place, cache_of

BOOTSTRAP: Final = Path(__file__).parents[1] / "bootstrap"
"""The folder whose `sitecustomize` runs first in each instance."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """Describe what a host starts.

    Attributes:
        command: the program and its arguments.
        places: the places of this host's instances.
        environment: the variables of all instances, besides the variables of a place.
        numa_aware: whether each instance is bound to cores of one NUMA node.
        executables: a folder for compiled programs, in which each instance has its own folder.
    """

    command: tuple[str, ...]
    places: tuple[Place, ...]
    environment: Mapping[str, str]
    numa_aware: bool = False
    executables: str | None = None

    def to_json(self) -> dict[str, Json]:
        """Return this as plain data."""
        places = [{**dataclasses.asdict(place), "run_dir": None} for place in self.places]
        return {**dataclasses.asdict(self), "environment": dict(self.environment), "places": places}

    @classmethod
    def from_json(cls, values: Mapping[str, Json]) -> "Launch":
        """Return the launch that `to_json` turned into `values`."""
        places = tuple(Place(**place) for place in values["places"])
        return cls(tuple(values["command"]), places, values["environment"], values["numa_aware"], values["executables"])

    def shares(self) -> list[list[int]]:
        """Return the cores of each instance; together, they are the cores of this host."""
        return shares_of_cores(len(self.places), sorted(available_cores()), nodes_of_cores())

    def binds(self) -> bool:
        """Return whether the instances are bound to their cores: not if some would have to share a core."""
        return self.numa_aware and len(available_cores()) >= len(self.places)

    def variables(self, place: Place, cores: int) -> dict[str, str]:
        """Return the whole environment of an instance with this number of cores."""
        environment = {**self.environment, **place.variables()}
        environment.setdefault(THREADS, str(threads_of(place.local_devices, cores)))
        environment.setdefault("PYTHONUNBUFFERED", "1")
        if self.executables is not None:
            environment[CACHE] = str(cache_of(Path(self.executables), place.instance))
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *([before] if before else [])])
        return environment


def threads_of(local_devices: int, cores: int) -> int:
    """Return the size of an instance's thread pool: one thread per device, which may wait, and one per core.

    >>> threads_of(2, cores=1), threads_of(2, cores=0), threads_of(1, cores=8)
    (3, 3, 9)
    """
    return local_devices + max(1, cores)


def shares_of_cores(instances: int, cores: Sequence[int], nodes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the cores of each instance.

    If there are at most as many NUMA nodes as instances, each instance has cores of one node, as many as other
    instances of that node or one fewer. If there are more nodes, or none are known, cores are divided in order. If
    there are fewer cores than instances, some share a core.

    >>> shares_of_cores(2, cores=range(8), nodes=[[0, 2, 4, 6], [1, 3, 5, 7]])
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    >>> shares_of_cores(3, cores=range(4), nodes=[])
    [[0], [1], [2, 3]]
    >>> shares_of_cores(3, cores=[5, 6], nodes=[])
    [[5], [5], [6]]
    """
    usable = [[core for core in node if core in set(cores)] for node in nodes]
    usable = [node for node in usable if node]
    if not usable or len(usable) > instances:
        usable = [list(cores)]
    shares: list[list[int]] = []
    for i, node in enumerate(usable):
        of_node = (i + 1) * instances // len(usable) - i * instances // len(usable)
        for j in range(of_node):
            begin, end = j * len(node) // of_node, (j + 1) * len(node) // of_node
            shares.append(list(node[begin : max(end, begin + 1)]))
    return shares


def available_cores() -> set[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def nodes_of_cores(folder: Path = Path("/sys/devices/system/node")) -> list[list[int]]:
    """Return the cores of each NUMA node of this host; no nodes if the system does not report them."""
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    nodes: list[list[int]] = []
    for path in lists:
        try:
            nodes.append(cores_of(path.read_text()))
        except (OSError, ValueError):
            return []
    return [node for node in nodes if node]  # a node may have memory only


def cores_of(text: str) -> list[int]:
    """Return the cores in a list as Linux writes it.

    >>> cores_of("0-2,8,10-11\\n")
    [0, 1, 2, 8, 10, 11]
    """
    cores: list[int] = []
    for part in filter(None, re.split(r"[,\s]+", text)):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores

"""Divide replicas over instances, instances over hosts, and cores over the instances of a host; read host names.

    8 replicas of 2 IPUs, 4 instances, hosts a and b

    host a:  instance 0 (replicas 0-1, IPUs 0-3),   instance 1 (replicas 2-3, IPUs 4-7)
    host b:  instance 2 (replicas 4-5, IPUs 8-11),  instance 3 (replicas 6-7, IPUs 12-15)

A `Launch` says how a host starts its instances: command, environment, threads and cores.

Nothing here imports jax.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.base.checks import shown
from ipu_jax.distributed.environment import CACHE, THREADS, InstancePlace, cache_of, text_of, uneven
from ipu_jax.distributed.errors import runs_of

BOOTSTRAP: Final = Path(__file__).parents[1] / "bootstrap"
"""The folder whose `sitecustomize` runs first in each instance."""
LOCALHOST: Final = "localhost"
MOST_HOSTS: Final = 4096
_LOOPBACK: Final = (LOCALHOST, "127.0.0.1", "::1")
# a name in the DNS has at most 253 letters, and 1 to 63 between two dots
_NAME: Final = re.compile(r"(?!.*[^.@]{64})(?!\.|.*\.\.)[A-Za-z0-9_.:@%-]{1,253}")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Assign instances to hosts: which host has which instances, replicas and IPUs.

    Attributes:
        hosts: the names of the hosts, which share the instances equally, in this order.
        instances, replicas, ipus_per_replica: their numbers.
        axes: names and sizes of the mesh's further axes; an IPU is a group of devices, which is never cut.

    >>> topology = Topology(("a", "b"), instances=4, replicas=8, ipus_per_replica=2)
    >>> topology.instances_of("b"), topology.host_of(1)
    (range(2, 4), 'a')
    >>> print(topology, end="")
    poprun topology: 8 replicas of 2 IPUs, 4 instances, each with 2
      a  instances 0-1  replicas 0-3
      b  instances 2-3  replicas 4-7
    """

    hosts: tuple[str, ...]
    instances: int
    replicas: int
    ipus_per_replica: int
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        replicas, instances, ipus = self.replicas, self.instances, self.ipus_per_replica
        why = uneven(replicas, instances, ipus, self.axes)
        if why is not None:
            fit = {n for n in range(1, replicas + 1) if replicas % n == 0}
            fit |= {replicas * n for n in range(1, ipus + 1) if ipus % n == 0}
            near = max((n for n in fit if n < instances), default=0), min((n for n in fit if n > instances), default=0)
            give = " or ".join(str(n) for n in near if n)
            enough = -(-replicas // instances) * instances
            raise ValueError(f"{why}: give {give} instance{'' if give == '1' else 's'}, or {enough} replicas")
        if self.instances % len(self.hosts):
            below = self.instances // len(self.hosts) * len(self.hosts)
            near = " or ".join(str(n) for n in (below, below + len(self.hosts)) if n)
            raise ValueError(
                f"num_instances={self.instances} cannot be shared by {len(self.hosts)} hosts: give {near} instances, "
                f"or a number of hosts that divides {self.instances}"
            )

    @property
    def instances_per_host(self) -> int:
        """Return the number of instances per host."""
        return self.instances // len(self.hosts)

    def instances_of(self, host: str) -> range:
        """Return the instances of a host."""
        first = self.hosts.index(host) * self.instances_per_host
        return range(first, first + self.instances_per_host)

    def host_of(self, instance: int) -> str:
        """Return the host of an instance."""
        return self.hosts[instance // self.instances_per_host]

    def __str__(self) -> str:
        per = self.replicas // self.instances
        share = f"each with {per}" if per else f"{self.instances // self.replicas} to a replica"
        group = f" of {math.prod(self.axes.values())} devices ({text_of(self.axes)})" if self.axes else ""
        lines = [
            f"poprun topology: {self.replicas} replicas of {self.ipus_per_replica} IPUs{group}, "
            f"{self.instances} instances, {share}"
        ]
        hosts, width = len(self.hosts), max(map(len, self.hosts))
        for k, host in enumerate(self.hosts):
            replicas = range(k * self.replicas // hosts, -(-(k + 1) * self.replicas // hosts))
            lines.append(f"  {host:<{width}}  instances {ranges(self.instances_of(host))}  replicas {ranges(replicas)}")
        return "\n".join(lines) + "\n"

    def place(self, instance: int, coordinator: str, bind: str, attempt: int) -> InstancePlace:
        """Return the place of an instance."""
        shares = self.instances, instance % self.instances_per_host, self.replicas, self.ipus_per_replica
        return InstancePlace(instance, *shares, coordinator, bind, attempt, axes=self.axes)


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
    places: tuple[InstancePlace, ...]
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
        places = tuple(InstancePlace(**place) for place in values["places"])
        return cls(tuple(values["command"]), places, values["environment"], values["numa_aware"], values["executables"])

    def shares(self) -> list[list[int]]:
        """Return the cores of each instance; together, they are the cores of this host."""
        return shares_of_cores(len(self.places), sorted(available_cores()), nodes_of_cores())

    def binds(self) -> bool:
        """Return whether the instances are bound to their cores: not if the system can't, or some would share one."""
        return self.numa_aware and can_bind() and len(available_cores()) >= len(self.places)

    def variables(self, place: InstancePlace, cores: int) -> dict[str, str]:
        """Return the whole environment of an instance with this number of cores."""
        environment = {**self.environment, **place.variables()}
        # a thread per device, which may wait, and one per core
        environment.setdefault(THREADS, str(place.local_devices + max(1, cores)))
        environment.setdefault("PYTHONUNBUFFERED", "1")
        if self.executables is not None:
            environment[CACHE] = str(cache_of(Path(self.executables), place.instance))
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *([before] if before else [])])
        return environment


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


def can_bind() -> bool:
    """Return whether this system can bind a process to cores; macOS cannot."""
    return hasattr(os, "sched_setaffinity")


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


def is_this_host(name: str, own_names: Iterable[str]) -> bool:
    """Return whether a name means this host: it is a loopback name or in `own_names`.

    >>> is_this_host("localhost", ["pod1"]), is_this_host("pod1", ["pod1.lab", "pod1"]), is_this_host("pod2", ["pod1"])
    (True, True, False)
    """
    return name in _LOOPBACK or name in set(own_names)


def host_names(text: str) -> tuple[str, ...]:
    """Return the hosts in a list, in which a range in brackets stands for several hosts.

    Raises:
        ValueError: a name or a range is malformed, or a host is named twice.

    >>> host_names("pod[0-2,4],login"), host_names("rack[08-10]-a")
    (('pod0', 'pod1', 'pod2', 'pod4', 'login'), ('rack08-a', 'rack09-a', 'rack10-a'))
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        names += _expanded(part.strip(), shown(text))
        if len(names) > MOST_HOSTS:
            raise ValueError(f"{shown(text)!r} are more than {MOST_HOSTS} hosts: give fewer")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"host {twice!r} is named twice: name it once, and raise --num-instances to start more there")
    return tuple(names)


def hosts_in_file(path: Path) -> tuple[str, ...]:
    """Return the hosts in a file: the first word of each line. Others, such as mpirun's slots=4, have no effect.

    Raises:
        ValueError: the file cannot be read, is empty, or names a host twice.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from error
    names = [words[0] for line in lines if (words := line.split("#")[0].split())]
    if not names:
        raise ValueError(f"{path} names no hosts: give one in each line")
    return host_names(",".join(names))


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, in order.

    >>> ranges([0, 1, 2, 5]), ranges([3]), ranges([])
    ('0-2,5', '3', '')
    """
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs_of(numbers))


def _expanded(part: str, text: str) -> list[str]:
    found = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\]([^\[\]]*)", part)
    if found is None:
        if not _NAME.fullmatch(part) or part.startswith("-"):
            raise ValueError(f"{text!r} is not a list of hosts: give names such as a,b or host[0-2,4]")
        if re.fullmatch(r"[^:]+:\d+", part):
            raise ValueError(f"{part!r} has slots: name the host alone; --num-instances counts the processes of all")
        return [part]
    before, inside, after = found.groups()
    names: list[str] = []
    for item in inside.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ValueError(f"{text!r} is not a list of hosts: {item!r} is not a number or a range such as 0-2")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if last - first > MOST_HOSTS:
            raise ValueError(f"{text!r} are more than {MOST_HOSTS} hosts: give fewer")
        names += [f"{before}{number:0{len(bounds[1])}}{after}" for number in range(first, last + 1)]
    return [name for one in names for name in _expanded(one, text)]

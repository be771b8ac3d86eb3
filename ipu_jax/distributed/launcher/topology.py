"""Divide replicas over instances, and instances over hosts; read host names.

    8 replicas of 2 IPUs, 4 instances, hosts a and b

    host a:  instance 0 (replicas 0-1, IPUs 0-3),   instance 1 (replicas 2-3, IPUs 4-7)
    host b:  instance 2 (replicas 4-5, IPUs 8-11),  instance 3 (replicas 6-7, IPUs 12-15)

Nothing here imports jax.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.distributed.environment import Place, text_of, uneven
from ipu_jax.distributed.errors import runs_of

LOCALHOST: Final = "localhost"
MOST_HOSTS: Final = 4096
_LOOPBACK: Final = (LOCALHOST, "127.0.0.1", "::1")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:@%-]+")


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

    def place(self, instance: int, coordinator: str, bind: str, attempt: int) -> Place:
        """Return the place of an instance."""
        return Place(
            instance=instance,
            instances=self.instances,
            local_instance=instance % self.instances_per_host,
            replicas=self.replicas,
            ipus_per_replica=self.ipus_per_replica,
            coordinator=coordinator,
            bind=bind,
            attempt=attempt,
            axes=self.axes,
        )


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
        names += _expanded(part.strip(), text)
        if len(names) > MOST_HOSTS:
            raise ValueError(f"{text!r} are more than {MOST_HOSTS} hosts: give fewer")
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
        raise ValueError(f"{path} names no host: give one in each line")
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
            raise ValueError(f"{text!r} is no list of hosts: give names such as a,b or host[0-2,4]")
        return [part]
    before, inside, after = found.groups()
    names: list[str] = []
    for item in inside.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if bounds is None or int(bounds[2] or bounds[1]) < int(bounds[1]):
            raise ValueError(f"{text!r} is no list of hosts: {item!r} is not a number or a range such as 0-2")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if last - first > MOST_HOSTS:
            raise ValueError(f"{text!r} are more than {MOST_HOSTS} hosts: give fewer")
        names += [f"{before}{number:0{len(bounds[1])}}{after}" for number in range(first, last + 1)]
    return [name for one in names for name in _expanded(one, text)]

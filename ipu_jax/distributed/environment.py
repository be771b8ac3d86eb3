"""Name, write and read the environment variables by which a launcher gives an instance its place.

    POPDIST_...      the six variables of Graphcore's poprun, which scripts written for it read
    JAX_..., PJRT_.. what jax itself reads
    IPU_JAX_...      the rest: the number of instances, which one this is, the further axes of the mesh, the folder that
                     its launcher reads, and the run's token, by which instances recognise each other

    place = InstancePlace(instance=1, instances=2, ..., coordinator="127.0.0.1:40001")
    place_of(place.variables()) == place

Nothing here imports jax.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ipu_jax.distributed.processes.record import INSTANCE, RUN_DIR

TOTAL_REPLICAS: Final = "POPDIST_NUM_TOTAL_REPLICAS"
IPUS_PER_REPLICA: Final = "POPDIST_NUM_IPUS_PER_REPLICA"
LOCAL_REPLICAS: Final = "POPDIST_NUM_LOCAL_REPLICAS"
UNIFORM: Final = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
REPLICA_OFFSET: Final = "POPDIST_REPLICA_INDEX_OFFSET"
LOCAL_INSTANCE: Final = "POPDIST_LOCAL_INSTANCE_INDEX"

COORDINATOR: Final = "JAX_COORDINATOR_ADDRESS"
COORDINATOR_BIND: Final = "JAX_COORDINATOR_BIND_ADDRESS"
NUM_CPU_DEVICES: Final = "JAX_NUM_CPU_DEVICES"
THREADS: Final = "PJRT_NPROC"

INSTANCES: Final = "IPU_JAX_INSTANCES"
AXES: Final = "IPU_JAX_AXES"
ATTEMPT: Final = "IPU_JAX_ATTEMPT"
TOKEN: Final = "IPU_JAX_RUN_TOKEN"
START_TIMEOUT: Final = "IPU_JAX_START_TIMEOUT"
"""Sets the seconds that an instance may keep the others waiting in `popdist.init` before its launcher ends them all."""

CACHE: Final = "JAX_COMPILATION_CACHE_DIR"

TERMINAL_WIDTH: Final = "POPRUN_TERMINAL_WIDTH"
"""Says that poprun's own output is a terminal, and how many columns a line of an instance has beside its tag."""

MOST_DEVICES: Final = 1024
"""The largest size of a further axis."""

_LONGEST_SHOWN: Final = 40
_MEET_SECONDS: Final = 60.0
_MARGIN: Final = 10.0  # a launcher sees which instance is missing, and should report it first

_TAKEN: Final = ("replica", "ipu", "replicas", "ipus_per_replica", "devices")
"""Names of axes that the mesh has already, or that `make_mesh` could not tell from its other arguments."""

_NUMBERS: Final = (INSTANCE, INSTANCES, LOCAL_INSTANCE, TOTAL_REPLICAS, IPUS_PER_REPLICA)


@dataclasses.dataclass(frozen=True)
class InstancePlace:
    """The place of an instance in its run.

    Instances share the IPUs of all replicas equally and in order. Either an instance has whole replicas, or a replica
    spans whole instances.

    Attributes:
        instance: its number among all instances, from 0.
        instances: the number of instances.
        local_instance: its number among the instances of its host.
        replicas: the number of replicas of all instances.
        ipus_per_replica: the number of IPUs that share one replica.
        axes: names and sizes of the mesh's further axes. Each IPU is a group of devices, which one instance has.
        coordinator: "host:port" of jax's coordination service, which instance 0 runs.
        bind: the address that the service listens on, with its port.
        attempt: how often the run was started before.
        run_dir: the folder of this attempt, which the launcher reads; None without a launcher.
        token: a secret that only the instances of this attempt know; empty if there is none.

    >>> place = InstancePlace(1, 2, 1, replicas=8, ipus_per_replica=2, coordinator="host:4001", bind="host:4001")
    >>> place.local_replicas, place.first_replica, place.local_ipus
    (4, 4, 8)
    >>> spanning = InstancePlace(1, 2, 1, replicas=1, ipus_per_replica=2, coordinator="host:4001", bind="host:4001")
    >>> spanning.local_replicas, spanning.first_replica, spanning.local_ipus
    (1, 0, 1)
    >>> grouped = InstancePlace(0, 2, 0, 2, 2, coordinator="host:4001", bind="host:4001", axes={"tensor": 4})
    >>> grouped.local_ipus, grouped.local_devices
    (2, 8)
    """

    instance: int
    instances: int
    local_instance: int
    replicas: int
    ipus_per_replica: int
    coordinator: str
    bind: str
    attempt: int = 0
    run_dir: Path | None = None
    token: str = dataclasses.field(default="", repr=False)
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def local_replicas(self) -> int:
        """Return the number of replicas that have IPUs on this instance."""
        return max(1, self.replicas // self.instances)

    @property
    def first_replica(self) -> int:
        """Return the number, among all replicas, of the first replica that has IPUs on this instance."""
        return self.instance * self.replicas // self.instances

    @property
    def local_ipus(self) -> int:
        """Return the number of IPUs of this instance."""
        return self.replicas * self.ipus_per_replica // self.instances

    @property
    def local_devices(self) -> int:
        """Return the number of devices of this instance's IPUs."""
        return self.local_ipus * math.prod(self.axes.values())

    def variables(self) -> dict[str, str]:
        """Return the environment variables of this place, except the size of XLA's thread pool."""
        values: dict[str, object] = {
            TOTAL_REPLICAS: self.replicas,
            IPUS_PER_REPLICA: self.ipus_per_replica,
            LOCAL_REPLICAS: self.local_replicas,
            UNIFORM: 1,
            REPLICA_OFFSET: self.first_replica,
            LOCAL_INSTANCE: self.local_instance,
            COORDINATOR: self.coordinator,
            COORDINATOR_BIND: self.bind,
            NUM_CPU_DEVICES: self.local_devices,
            INSTANCE: self.instance,
            INSTANCES: self.instances,
            ATTEMPT: self.attempt,
        }
        if_given = {RUN_DIR: self.run_dir, TOKEN: self.token, AXES: text_of(self.axes)}
        values |= {name: value for name, value in if_given.items() if value}
        return {name: str(value) for name, value in values.items()}


def cache_of(folder: Path, instance: int) -> Path:
    """Return an instance's own part of a folder for compiled programs. `popdist.init` lets the instance write there.

    >>> cache_of(Path("executables"), 1).as_posix()
    'executables/instance-1'
    """
    return folder / f"instance-{instance}"


def meet_seconds(environ: Mapping[str, str]) -> float:
    """Return how many seconds an instance waits for the others by default: a few more than its launcher.

    >>> meet_seconds({}), meet_seconds({START_TIMEOUT: "300"})
    (60.0, 310.0)
    """
    text = environ.get(START_TIMEOUT)
    return _MEET_SECONDS if text is None else float(text) + _MARGIN


def axes_of(text: str) -> dict[str, int]:
    """Return the names and sizes of further axes.

    Raises:
        ValueError: the text is not such a list, or the mesh cannot have these axes.

    >>> axes_of("tensor=2,context=4")
    {'tensor': 2, 'context': 4}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        is_count = size.isascii() and size.isdecimal() and len(size) <= len(str(MOST_DEVICES))
        if not (name.isidentifier() and is_count and 1 <= int(size) <= MOST_DEVICES):
            raise ValueError(
                f"{part[:_LONGEST_SHOWN]!r} is not an axis with a size from 1 to {MOST_DEVICES}: give a list such as "
                "tensor=2,context=4"
            )
        if name in _TAKEN or name in axes:
            raise ValueError(
                f"{part[:_LONGEST_SHOWN]!r} has a name that is taken already: give each axis a name of its own"
            )
        axes[name] = int(size)
    return axes


def text_of(axes: Mapping[str, int]) -> str:
    """Return the text from which `axes_of` reads axes."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def uneven(replicas: int, instances: int, ipus_per_replica: int, axes: Mapping[str, int]) -> str | None:
    """Return why the instances cannot share the replicas, or the IPUs of each replica, equally; None if they can.

    >>> uneven(replicas=2, instances=8, ipus_per_replica=2, axes={"tensor": 2})
    'num_instances=8 would cut the group of 2 devices (tensor=2) that is an IPU'
    """
    shares_replicas = replicas % instances == 0
    if shares_replicas or (instances % replicas == 0 and ipus_per_replica % (instances // replicas) == 0):
        return None
    ipus, group = replicas * ipus_per_replica, math.prod(axes.values())
    if ipus % instances and ipus * group % instances == 0:
        return f"num_instances={instances} would cut the group of {group} devices ({text_of(axes)}) that is an IPU"
    return f"num_replicas={replicas} cannot be shared by num_instances={instances}"


def place_of(environ: Mapping[str, str]) -> InstancePlace | None:
    """Return the place given by the environment, or None if no launcher of ours has set it.

    Raises:
        ValueError: a variable is missing or not a number, or the variables contradict each other.
    """
    if INSTANCE not in environ:
        return None
    missing = [name for name in (*_NUMBERS, COORDINATOR) if name not in environ]
    if missing:
        raise ValueError(f"the environment has {INSTANCE}, but not {', '.join(missing)}: start instances with poprun")
    number: dict[str, int] = {}
    for name in (*_NUMBERS, ATTEMPT):
        text = environ.get(name, "0")
        least = 0 if name in (INSTANCE, LOCAL_INSTANCE, ATTEMPT) else 1
        if not text.isascii() or not text.isdecimal() or int(text) < least:
            raise ValueError(f"{name}={text!r} is not a whole number of at least {least}: start instances with poprun")
        number[name] = int(text)
    if number[INSTANCE] >= number[INSTANCES]:
        raise ValueError(
            f"{INSTANCE}={number[INSTANCE]} is not one of {INSTANCES}={number[INSTANCES]}: start instances with poprun"
        )
    try:
        axes = axes_of(environ[AXES]) if AXES in environ else {}
    except ValueError as error:
        raise ValueError(f"{AXES}={environ[AXES]!r}: {error}") from error
    instance, instances, local_instance, replicas, ipus = (number[name] for name in _NUMBERS)
    if (why := uneven(replicas, instances, ipus, axes)) is not None:
        raise ValueError(
            f"{why}: give a number of instances that divides {replicas}, or a multiple of {replicas} that divides all "
            f"{replicas * ipus} IPUs"
        )
    coordinator = environ[COORDINATOR]
    return InstancePlace(
        *(instance, instances, local_instance, replicas, ipus),
        coordinator=coordinator,
        bind=environ.get(COORDINATOR_BIND, coordinator),
        attempt=number[ATTEMPT],
        run_dir=Path(environ[RUN_DIR]) if environ.get(RUN_DIR) else None,
        token=environ.get(TOKEN, ""),
        axes=axes,
    )

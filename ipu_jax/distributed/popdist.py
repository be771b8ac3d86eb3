"""Tell a script its place among the instances of a run, and exchange values between their hosts.

    from ipu_jax import popdist

    popdist.init()                                # first of all; does nothing if there is one instance only
    replicas, ipus = popdist.get_num_total_replicas(), popdist.get_num_ipus_per_replica()
    mesh = make_mesh(replicas, ipus, **popdist.get_further_axes())
    seed = popdist.broadcast(seed)
    loss, accuracy = popdist.all_reduce([loss, accuracy])
    if popdist.get_instance_index() == 0:
        print(loss)

The same script runs with and without `poprun`. Without it there is one instance. The camelCase names of Graphcore's
popdist work too. All instances must call functions that communicate, in the same order.

Importing this module loads no jax.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from ipu_jax.base.checks import check_choice, check_count
from ipu_jax.distributed.environment import TOTAL_REPLICAS, InstancePlace, cache_of, meet_seconds, place_of
from ipu_jax.distributed.errors import InstancesDifferError, InstancesMissingError, PortTakenError
from ipu_jax.distributed.processes import record
from ipu_jax.distributed.processes.beacons import Phase

__all__ = [
    "InstancesDifferError",
    "InstancesMissingError",
    "PortTakenError",
    "all_reduce",
    "barrier",
    "broadcast",
    "busy",
    "count_steps",
    "execute_on_instances",
    "get_further_axes",
    "get_instance_index",
    "get_local_instance_index",
    "get_num_instances",
    "get_num_ipus_per_replica",
    "get_num_local_devices",
    "get_num_local_ipus",
    "get_num_local_replicas",
    "get_num_total_replicas",
    "get_replica_index_offset",
    "init",
    "is_popdist_env_set",
    "own_cache",
]

_Tree = TypeVar("_Tree")
_Result = TypeVar("_Result")

_TIMEOUT: Final = 300.0

compares_programs = True
"""Whether training steps compare what the instances are about to run; `init` sets it."""


def is_popdist_env_set() -> bool:
    """Return whether poprun started this process.

    >>> is_popdist_env_set()
    False
    """
    return TOTAL_REPLICAS in os.environ


def init(*, timeout: float | None = None, check_flags: bool = True, check_programs: bool = True) -> None:
    """Connect this instance with the others. Call it before any other use of jax. A second call does nothing.

    The instances first meet and compare their numbers, command lines and package versions. Then
    `jax.distributed.initialize()` connects them. Their numbers come from poprun, or from SLURM, Open MPI or Kubernetes,
    as jax reads them. Otherwise there is one instance, and nothing is done. Instances that the program has connected
    already only compare.

    From then on, the process ends at once with its own exit code if it raises, and otherwise together with the others.

    Communicates with instance 0 over TCP.

    Args:
        timeout: seconds to wait for the others. Default: 60; under poprun, 10 more than its --start-timeout.
        check_flags: whether all instances must have the same command line.
        check_programs: whether the first call of each training step compares the instances' batches, feeds, programs
            and first weights, and raises InstancesDifferError if they differ. The same on all instances.

    Raises:
        InstancesDifferError: an instance has different flags, packages or numbers; the message names it.
        InstancesMissingError: an instance did not arrive in time.
        PortTakenError: another program uses the coordinator's port.
        RuntimeError: jax's backend is already running.
        ValueError: the environment variables are not as poprun sets them.
    """
    global compares_programs
    compares_programs, place = check_programs, place_of(os.environ)
    if place is None and not any(name in os.environ for name in _SIGNS_OF_A_CLUSTER):
        return
    from ipu_jax.distributed import _joining  # imports jax

    _joining.connect(place, seconds=meet_seconds(os.environ) if timeout is None else timeout, flags=check_flags)


# the variables by which jax detects SLURM, Open MPI, Kubernetes
_SIGNS_OF_A_CLUSTER: Final = ("SLURM_PROCID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST")


def get_instance_index() -> int:
    """Return the number of this instance, from 0."""
    return _place().instance


def is_first() -> bool:
    """Return whether this is the first instance, which prints and writes files."""
    return get_instance_index() == 0


def get_num_instances() -> int:
    """Return the number of instances."""
    return _place().instances


def get_local_instance_index() -> int:
    """Return the number of this instance among the instances of its host, from 0."""
    return _place().local_instance


def get_num_total_replicas() -> int:
    """Return the total number of replicas of all instances."""
    return _place().replicas


def get_num_local_replicas() -> int:
    """Return the number of replicas that have IPUs on this instance."""
    return _place().local_replicas


def get_replica_index_offset() -> int:
    """Return the number, among all replicas, of the first replica that has IPUs on this instance."""
    return _place().first_replica


def get_num_ipus_per_replica() -> int:
    """Return the number of IPUs per replica."""
    return _place().ipus_per_replica


def get_num_local_ipus() -> int:
    """Return the number of IPUs of this instance."""
    return _place().local_ipus


def get_further_axes() -> dict[str, int]:
    """Return the names and sizes of the mesh's further axes, as `make_mesh` takes them; without any, an empty dict."""
    return dict(_place().axes)


def get_num_local_devices() -> int:
    """Return the number of devices of this instance's IPUs, as `configure` takes it."""
    return _place().local_devices


def execute_on_instances(
    instances: Iterable[int], func: Callable[..., _Result], *args: Any, **kwargs: Any
) -> _Result | None:
    """Call a function on some instances only. Nothing is communicated, and no instance waits.

    Args:
        instances: the numbers of these instances.
        func: the function; it must not communicate with other instances.
        args, kwargs: its arguments.

    Returns:
        The function's result; None on the other instances.

    Raises:
        ValueError: a number is not the number of an instance.

    >>> execute_on_instances({0}, "on instance {}".format, get_instance_index())
    'on instance 0'
    """
    chosen = set(instances)
    for number in sorted(chosen):
        if not isinstance(number, int) or not 0 <= number < get_num_instances():
            raise ValueError(
                f"instances={sorted(chosen)} has {number!r}: give numbers from 0 to {get_num_instances() - 1}"
            )
    return func(*args, **kwargs) if get_instance_index() in chosen else None


def all_reduce(tree: _Tree, op: Literal["mean", "sum"] = "mean", *, timeout: float = _TIMEOUT) -> _Tree:
    """Return the mean or sum over all instances of a pytree of numbers on the host. All instances call it.

    This is one exchange, however many leaves there are. All instances add in the same order, in float64, complex128
    or, for the sum of integers, in 64-bit integers, and get the same bits.

    Communicates the leaves, once, from each instance to all others.

    Args:
        tree: its leaves are NumPy or jax arrays, whole on this host, or Python numbers.
        op: "mean" or "sum".
        timeout: seconds to wait for the other instances.

    Returns:
        The same pytree: NumPy arrays of the leaves' dtypes, but float64 for the mean of integers; Python numbers for
        Python numbers.

    Raises:
        InstancesMissingError: an instance did not call it in time; the message names it.
        InstancesDifferError: instances call it with different trees, shapes or dtypes.
        ValueError: `op` is unknown, or a leaf is not a number.

    >>> all_reduce({"loss": 0.5, "right": 3}, "sum")
    {'loss': 0.5, 'right': 3}
    """
    check_choice("op", op, ("mean", "sum"))
    from ipu_jax.distributed import board  # imports jax

    return board.all_reduce(tree, op, seconds=timeout)


def broadcast(tree: _Tree, root: int = 0, *, timeout: float = _TIMEOUT) -> _Tree:
    """Return one instance's pytree, such as weights or a seed, on all instances. All instances call it.

    Communicates the leaves from that instance to all others.

    Args:
        tree: its leaves are NumPy or jax arrays, whole on this host, Python numbers, or typed keys. The other instances
            give a tree of the same shapes and dtypes; its values don't matter.
        root: the number of the instance.
        timeout: seconds to wait for the other instances.

    Returns:
        The same pytree: NumPy arrays, typed keys for typed keys, and Python numbers for Python numbers.

    Raises:
        InstancesMissingError: an instance did not call it in time; the message names it.
        InstancesDifferError: instances call it with different trees, shapes, dtypes or roots.
        ValueError: `root` is not the number of an instance, or a leaf is not a number.

    >>> broadcast(2022)
    2022
    """
    if not isinstance(root, int) or not 0 <= root < get_num_instances():
        raise ValueError(
            f"root={root!r} is not the number of an instance: give one from 0 to {get_num_instances() - 1}"
        )
    from ipu_jax.distributed import board  # imports jax

    return board.broadcast(tree, root, seconds=timeout)


def barrier(name: str = "barrier", *, timeout: float = _TIMEOUT) -> None:
    """Wait until all instances have arrived here. All instances call it.

    Args:
        name: the name of the barrier in errors.
        timeout: seconds to wait.

    Raises:
        InstancesMissingError: an instance did not arrive in time; the message names it.
        InstancesDifferError: an instance waits somewhere else.
    """
    from ipu_jax.distributed import board  # imports jax

    board.gather(f"barrier {name!r}", b"", seconds=timeout)


@contextlib.contextmanager
def busy(what: str, seconds: float = 600.0) -> Iterator[None]:
    """Tell poprun that this instance does something other than steps for a while, so that it does not count as stuck.

    Without poprun this does nothing.

    Args:
        what: a few words for poprun's report, such as "saving".
        seconds: the time that this may take; after that, the instance counts as stuck.

    >>> with busy("drawing the losses", seconds=60):
    ...     pass
    """
    with record.during(Phase.BUSY, what, seconds):
        yield


def own_cache(folder: str | os.PathLike[str]) -> Path:
    """Return this instance's part of a folder for compiled programs; the whole folder if there is one instance.

    On its own, jax writes its executable cache in the first process only, and the others compile everything at each
    start. After `init`, each instance also writes to the folder that this returns.

    >>> own_cache("executables").as_posix()
    'executables'
    """
    return Path(folder) if get_num_instances() == 1 else cache_of(Path(folder), get_instance_index())


def count_steps(steps: int = 1, *, updates: int | None = None, samples: int = 0) -> None:
    """Report finished steps to poprun from a loop that does not use ipu_jax's own steps, which count themselves.

    poprun takes an instance for stuck if it finishes no step for far longer than its steps take. `ipu-monitor` shows
    updates and examples per second, also without poprun.

    Args:
        steps: device calls that have finished.
        updates: the weight updates in these steps, on each replica. Default: one per step.
        samples: the examples in these updates, on all instances together; 0 if unknown.

    >>> count_steps(updates=10, samples=640)
    """
    check_count("steps", steps)
    beacon = record.begin()
    if beacon is not None:
        beacon.begun(steps)
        beacon.finished(steps, updates, samples)


def _place() -> InstancePlace:
    """Return the place of this process. Without poprun, each process that jax is connected with has a replica."""
    if (place := place_of(os.environ)) is not None:
        return place
    instance, instances = 0, 1
    if "jax" in sys.modules:
        from ipu_jax.distributed import board

        instance, instances = board.process()
    return InstancePlace(instance, instances, 0, replicas=instances, ipus_per_replica=1, coordinator="", bind="")


isPopdistEnvSet = is_popdist_env_set
getInstanceIndex = get_instance_index
getLocalInstanceIndex = get_local_instance_index
getNumInstances = get_num_instances
getNumTotalReplicas = get_num_total_replicas
getNumLocalReplicas = get_num_local_replicas
getReplicaIndexOffset = get_replica_index_offset
getNumIpusPerReplica = get_num_ipus_per_replica
executeOnInstances = execute_on_instances
allReduce = all_reduce

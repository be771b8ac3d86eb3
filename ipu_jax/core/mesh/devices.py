"""Make virtual IPUs (one XLA device each, on any platform) and their mesh.

On a laptop or in CI the devices are forced host devices of the CPU backend; on a GPU or TPU machine they are the real
ones. The program is the same. They form one mesh, with a row per replica:

                      axis "ipu"
                    +------+------+
    axis "replica"  | IPU0 | IPU1 |   replica 0:  make_mesh(replicas=2, ipus_per_replica=2)
                    +------+------+
                    | IPU0 | IPU1 |   replica 1
                    +------+------+

    configure(4)              # before anything else touches jax; also gives XLA the threads that 4 IPUs need
    mesh = make_mesh(2, 2)

Importing this module touches no device.
"""

import collections
import contextlib
import enum
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal, get_args

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ipu_jax.base import facts
from ipu_jax.base.annotations import Device
from ipu_jax.base.checks import check_bool, check_choice, check_count
from ipu_jax.base.decorators import public
from ipu_jax.core.mesh.cuda_graphs import use_cuda_graphs
from ipu_jax.core.mesh.device_order import rows_of

Cores = Literal["shared", "one per IPU"]

REPLICA_AXIS: Final = "replica"
IPU_AXIS: Final = "ipu"


class AllIpus(enum.Enum):
    """The type of `ALL_IPUS`, its only member. An enum member stays one object through pickle and deepcopy."""

    ALL_IPUS = "ALL_IPUS"

    def __repr__(self) -> str:
        return self.name


ALL_IPUS: Final = AllIpus.ALL_IPUS
"""The place of a concurrent stage: every IPU of its replica."""


@public
def configure(num_ipus: int, *, cores: Cores = "shared", cuda_graphs: bool | None = None) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm] (jaxlib has no stubs)
    """Give this process at least `num_ipus` virtual IPUs, and start the jax backend.

    On CPU this makes `num_ipus` host devices, which only works before the backend starts: call it first (but after
    `jax.distributed.initialize`, if several processes work together). A larger count that was set before, by an earlier
    call or `JAX_NUM_CPU_DEVICES`, is kept. On GPU and TPU the existing devices are used.

    On CPU this also sizes XLA's thread pool. By default XLA makes a thread per core, and an IPU that waits in an
    exchange blocks a thread: of two cores, only one would be left for an IPU that works (docs/design/distributed.md). A
    size that the user set by the environment variable `PJRT_NPROC` is kept.

    On NVIDIA GPUs this adds flags to `XLA_FLAGS` that put the tasks of a tick into CUDA graphs; otherwise the host
    would decide for each task whether it runs. Flags that the user set are kept, and passes that XLA is to leave out
    add up.

    Args:
        num_ipus: how many IPUs the program needs in this process, at least 1.
        cores: how virtual IPUs use a CPU's cores. "shared": an IPU that works can use all cores, and an IPU that waits
            uses none, so that a program runs as fast as possible. "one per IPU": each IPU gets one core's worth, if
            there are enough cores, so that bubbles take time as on real devices. Use it to compare schedules.
        cuda_graphs: whether to put tasks into CUDA graphs. None: where the driver supports CUDA 12.3 or newer; with an
            older driver there is a `UserWarning`. It has no effect without an NVIDIA GPU.

    Returns:
        The first `num_ipus` devices of this process.

    Raises:
        ValueError: `num_ipus` is not a positive int, `cores` is unknown, there are fewer devices and more cannot be
            made, `JAX_PLATFORMS` names a platform that this machine does not have, `cuda_graphs` is neither a bool nor
            None, or it is True and the driver is too old.

    >>> len(configure(4))
    4
    """
    num_ipus = check_count("num_ipus", num_ipus)
    check_choice("cores", cores, get_args(Cores))
    use_graphs = None if cuda_graphs is None else check_bool("cuda_graphs", cuda_graphs)
    if _described is not None:
        if len(_described) >= num_ipus:
            return _described[:num_ipus]
        raise ValueError(f"num_ipus={num_ipus}, but {_too_few_in(_described, num_ipus)}")
    use_cuda_graphs(use_graphs, jax.config.values["jax_platforms"])
    # This has no effect on GPU and TPU, so the platform need not be known yet. jax raises if the backend is running
    # already and the count would change; there may be enough devices nonetheless.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(num_ipus, cpu_devices_asked_for()))
    threads = pool_threads(max(num_ipus, cpu_devices_asked_for()), cores)
    # XLA reads it only when the backend starts; a child process has its own number of IPUs
    with environment("PJRT_NPROC", os.environ.get("PJRT_NPROC", str(threads))):
        devices = local_devices()
    if len(devices) >= num_ipus:
        facts.say(lambda listener: listener.devices(devices[:num_ipus]))
        return devices[:num_ipus]
    raise ValueError(f"num_ipus={num_ipus}, but {_too_few(num_ipus, len(devices), devices[0].platform)}")


@public
def make_mesh(replicas: int, ipus_per_replica: int, *, devices: Sequence[Device] | None = None, **axes: int) -> Mesh:
    """Return the mesh of a program: `replicas` rows of `ipus_per_replica` IPUs, over the first devices of jax.

    After `jax.distributed.initialize` these are the devices of all instances, beginning with instance 0. Every instance
    makes the same call, and a replica can be on several instances.

    On a TPU slice an IPU is one hop from the next one in its row. With several slices, or several hosts of GPUs, a
    replica is in one of them if it fits. Devices that don't know their place keep their order.

    Args:
        replicas: copies of the model, at least 1: the size of axis "replica".
        ipus_per_replica: IPUs that share one copy, at least 1: the size of axis "ipu".
        devices: the devices to choose from, such as `chips.describe("v5e:2x4")`. A wider mesh that is made from this
            one, as by `TrainOptions(replication_factor=)`, is chosen from them, too. Default: all of jax.
        axes: names and sizes of further axes, such as `tensor=2`. Each IPU is then a group of devices, among which XLA
            splits the arrays of a stage as its annotations and the `specs` of its weights say. The last axis varies
            fastest: its devices are neighbours.

    Returns:
        A mesh with axes `("replica", "ipu", *axes)`, all of type Auto (the Explicit axes that `jax.make_mesh` makes by
        default are refused by plain Flax training).

    Raises:
        ValueError: a size is not a positive int, there are too few devices, `devices` are not devices of one platform,
            or an instance would have none of them.

    >>> mesh = make_mesh(2, 2)
    >>> dict(mesh.shape)
    {'replica': 2, 'ipu': 2}
    """
    replicas = check_count("replicas", replicas)
    ipus_per_replica = check_count("ipus_per_replica", ipus_per_replica)
    sizes = [replicas, ipus_per_replica, *(check_count(axis, size) for axis, size in axes.items())]
    names = (REPLICA_AXIS, IPU_AXIS, *axes)
    if len(set(names)) < len(names):
        raise ValueError(f"axes={axes!r}: the mesh has 'replica' and 'ipu' already; give further axes other names")
    needed, pool = math.prod(sizes), _pool(devices)
    counts = f"replicas={replicas} x ipus_per_replica={ipus_per_replica}"
    counts += "".join(f" x {axis}={size}" for axis, size in axes.items())
    if len(pool) < needed:
        what = "devices" if axes else "IPUs"
        raise ValueError(f"{counts} needs {needed} {what}, but {_too_few_in(pool, needed, given=devices is not None)}")
    chosen = rows_of(pool, replicas, ipus_per_replica, math.prod(sizes[2:])).reshape(sizes)
    idle = sorted({device.process_index for device in pool} - {device.process_index for device in chosen.flat})
    if idle and not is_described(pool[0]):
        numbers = ", ".join(map(str, idle))
        raise ValueError(
            f"{counts} takes the first {needed} of {len(pool)} devices, and instance{'s' * (len(idle) > 1)} "
            f"{numbers} would have none of them, and could not take part: use all {len(pool)}, give each instance "
            "fewer devices, or start fewer instances"
        )
    groups = chosen.reshape(replicas * ipus_per_replica, -1)
    cut = next((group for group in groups if len({device.process_index for device in group}) > 1), None)
    if cut is not None and devices is None and not is_described(cut[0]):
        sizes_of_group = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ValueError(
            f"{counts} would put the {len(cut)} devices of an IPU ({sizes_of_group}) on several instances, "
            f"{', '.join(map(str, sorted({device.process_index for device in cut})))}: take as many devices per "
            "instance as whole IPUs need, or give devices= in the order that you want"
        )
    mesh = Mesh(chosen, names, axis_types=(AxisType.Auto,) * len(names))
    _pool_of[mesh] = None if devices is None and _described is None else pool
    facts.say(lambda listener: listener.mesh(mesh, ()))
    return mesh


_pool_of: dict[Mesh, list[Device] | None] = {}
_described: list[Device] | None = None


def devices_of(mesh: Mesh) -> list[Device] | None:
    """Return the devices from which a wider mesh is made, as `make_mesh` takes them; None for all of jax.

    jax makes equal meshes one object, so these belong to the last `make_mesh` that made an equal one: ask at once.
    """
    if mesh not in _pool_of and is_described(mesh.devices.flat[0]):
        return mesh.devices.flat[0].client.devices()
    return _pool_of.get(mesh)


@contextlib.contextmanager
def describing(devices: Sequence[Device]) -> Iterator[None]:
    """Let `make_mesh` and `configure` take these devices in place of jax's own, for a script that is only compiled."""
    global _described
    before, _described = _described, _pool(devices)
    try:
        yield
    finally:
        _described = before


def is_described(device: Device) -> bool:
    """Return whether a device is not there and only described, so that programs can be compiled for it, but not run."""
    return not device.client.local_devices()


def check_there(mesh: Mesh, what: str, instead: str) -> None:
    """Raise `ValueError` if the devices of a mesh are only described: `what` needs real ones."""
    device = mesh.devices.flat[0]
    if is_described(device):
        raise ValueError(
            f"{what} needs devices, but the mesh's {mesh.size} x {device.device_kind} are only described, for the "
            f"compiler: use {instead}"
        )


def _pool(devices: Sequence[Device] | None) -> list[Device]:
    if devices is None:
        return jax.devices() if _described is None else _described
    pool = list(devices) if isinstance(devices, Sequence | np.ndarray) else []
    if not pool or not all(isinstance(device, jax.Device) for device in pool):  # pyright: ignore[reportArgumentType] (jaxlib has no stubs)
        raise ValueError(f"devices={devices!r} is not a list of devices: give one such as jax.devices()[:4]")
    if len({device.client for device in pool}) > 1 or len(set(pool)) < len(pool):
        raise ValueError(f"devices={devices!r} are not different devices of one platform: give each of them once")
    return pool


def local_devices() -> list[Device]:
    """Return the devices of this process, and start the jax backend.

    Raises:
        ValueError: `JAX_PLATFORMS` names a platform that this machine does not have.
    """
    try:
        # jax waits here until the devices of all instances are known, and gives up after 120 s without naming any
        with facts.during("for the devices of all instances", 110, waiting=True):
            return jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts that a known platform has started
        asked_for = jax.config.values["jax_platforms"]
        if not asked_for:
            raise
        said = str(error).partition("\n")[0].partition(" (set JAX_PLATFORMS")[0].removesuffix(".")
        reason = said and f" ({said})"
        raise ValueError(
            f"JAX_PLATFORMS={asked_for} asks for a platform that does not start on this machine{reason}: "
            "set JAX_PLATFORMS=cpu for virtual IPUs, or unset it"
        ) from error


def pool_threads(ipus: int, cores: Cores) -> int:
    """Return the size of XLA's thread pool for virtual IPUs on a CPU."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ipus if cores == "one per IPU" else available + ipus


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in this context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def cpu_devices_asked_for() -> int:
    """Return the number of host devices that the configuration asks for so far, or less than 1 if it asks for none."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(jax.config.values["jax_num_cpu_devices"], int(flag[1]) if flag else 0)


def _too_few_in(pool: list[Device], needed: int, *, given: bool = False) -> str:
    if given or is_described(pool[0]):
        kind = "described" if is_described(pool[0]) else "given"
        return f"{len(pool)} {pool[0].device_kind} devices were {kind}: use fewer IPUs, or more devices"
    return _too_few_of_all(needed, pool) if jax.process_count() > 1 else _too_few(needed, len(pool), pool[0].platform)


def _too_few(needed: int, there: int, platform: str) -> str:
    """Return the end of an error message: how many devices there are, and a fix."""
    if platform == "cpu":
        where = f" on instance {jax.process_index()}" if jax.process_count() > 1 else ""
        return (
            f"jax already started its CPU backend with {there}{where}: "
            f"call configure({needed}) before any other use of jax, or set JAX_NUM_CPU_DEVICES={needed}."
        )
    return (
        f"this machine's {platform.upper()} platform has {there}: "
        "use fewer IPUs, or set JAX_PLATFORMS=cpu for virtual ones."
    )


def _too_few_of_all(needed: int, devices: list[Device]) -> str:
    """Return the end of an error message about the devices of all instances."""
    of_each = collections.Counter(device.process_index for device in devices)
    counts = [of_each[instance] for instance in range(jax.process_count())]
    each = f"{counts[0]} each" if len(set(counts)) == 1 else ", ".join(map(str, counts))
    there = f"the {len(counts)} instances have {len(devices)} in all ({each})"
    if devices[0].platform == "cpu":
        share = -(-needed // len(counts))
        return (
            f"{there}: call configure({share}) on each of them, after jax.distributed.initialize and before any other "
            f"use of jax, or set JAX_NUM_CPU_DEVICES={share}."
        )
    return f"{there}: use fewer IPUs, or start more instances."

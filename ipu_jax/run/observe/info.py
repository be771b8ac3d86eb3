"""Print what a program of ipu_jax would find on this host: the command `ipu-info`.

    $ ipu-info
    versions     ipu_jax 0.1.0, jax 0.10.2, jaxlib 0.10.2, numpy 2.4.6, optax 0.2.8, flax 0.12.8, Python 3.11.9
    devices      cpu: 1 virtual IPU; configure(N) or JAX_NUM_CPU_DEVICES=N makes N
    cores        2 of 2
    ...

The command starts jax's backend, as a program would, and makes no IPUs beyond the existing ones.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

from ipu_jax.base.annotations import Json
from ipu_jax.base.cli.parser import CommandParser
from ipu_jax.base.cli.process import run
from ipu_jax.base.version import __version__
from ipu_jax.distributed.processes.record import SWITCH, is_off, own_folder

PROG: Final = "ipu-info"
FORMAT: Final = 1
"""The version of the format that --json prints."""

_PACKAGES: Final = ("jax", "jaxlib", "numpy", "optax", "flax", "equinox", "orbax-checkpoint")
_POOL: Final = "PJRT_NPROC"
_MPI: Final = "MPITRAMPOLINE_LIB"


@dataclasses.dataclass(frozen=True)
class Info:
    """Hold what a program would find on this host; the fields are the keys of `--json`.

    Attributes:
        versions: of the installed packages, and of Python.
        platform: of the devices, such as "cpu".
        devices: `{"id", "kind"}` of each device.
        virtual: whether they are virtual IPUs; a program can ask for more of these.
        asked_for: how many virtual IPUs the environment asks for; None if it does not ask.
        cores: how many cores this process may use.
        cores_of_host: how many cores the host has.
        threads: the size of XLA's pool if `configure` makes as many virtual IPUs as `devices` lists, or the value of
            `PJRT_NPROC`; None on other platforms.
        threads_set: whether `PJRT_NPROC` sets `threads`.
        collectives: by name, whether a library for collectives between processes' CPU devices is available.
        collectives_chosen: the library that a program gets; None if jax is configured to use none.
        cache: the folder of compiled programs; None if they are not kept.
        records: the folder of this user's records, which `ipu-monitor` reads; None if records are turned off.
    """

    versions: dict[str, str]
    platform: str
    devices: tuple[dict[str, Json], ...]
    virtual: bool
    asked_for: int | None
    cores: int
    cores_of_host: int
    threads: int | None
    threads_set: bool
    collectives: dict[str, bool]
    collectives_chosen: str | None
    cache: str | None
    records: str | None


def command() -> NoReturn:
    """Print the information, and end the process with the exit status."""
    run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the information, and return the exit status."""
    about = "Prints the devices, versions, cores and collectives that a program of ipu_jax would find."
    parser = CommandParser(PROG, about, hints={"l list list-devices d device-id": "it lists all devices: leave it out"})
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse(argv)
    try:
        info = find()
    except ValueError as error:
        parser.refuse(error)
    if args.json:
        print(json.dumps({"format": FORMAT, **dataclasses.asdict(info)}))
    else:
        for name, text in described(info):
            print(f"{name:<12} {text}")
    return 0


def find() -> Info:
    """Return what a program would find, and start jax's backend.

    Raises:
        ValueError: `JAX_PLATFORMS` names a platform that this machine does not have.
    """
    import jax

    from ipu_jax.core.mesh.devices import cpu_devices_asked_for, local_devices, pool_threads

    devices, asked_for = local_devices(), cpu_devices_asked_for()
    virtual, given = devices[0].platform == "cpu", os.environ.get(_POOL)
    threads = int(given) if given and given.isdecimal() else pool_threads(len(devices), "shared")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Info(
        versions=_versions(),
        platform=devices[0].platform,
        devices=tuple({"id": device.id, "kind": device.device_kind} for device in devices),
        virtual=virtual,
        asked_for=asked_for if asked_for > 0 else None,
        cores=cores,
        cores_of_host=os.cpu_count() or 1,
        threads=threads if virtual else None,
        threads_set=given is not None,
        collectives=_collectives(),
        collectives_chosen=jax.config.values["jax_cpu_collectives_implementation"],
        cache=jax.config.values["jax_compilation_cache_dir"],
        records=None if is_off() else str(own_folder()),
    )


def described(info: Info) -> Iterator[tuple[str, str]]:
    """Yield the lines that describe the host: a name and a text each."""
    yield "versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())
    count = len(info.devices)
    if info.virtual:
        more = "configure(N) in a program, or JAX_NUM_CPU_DEVICES=N, makes N"
        yield "devices", f"cpu: {count} virtual IPU{'s' * (count > 1)}; {more}"
    else:
        kinds = ", ".join(sorted({device["kind"] for device in info.devices}))
        yield "devices", f"{info.platform}: {count} ({kinds}); JAX_PLATFORMS=cpu gives virtual IPUs"
    yield "cores", f"{info.cores} of the host's {info.cores_of_host}"
    if info.threads is not None:
        ipus = f"{count} IPU{'s' * (count > 1)}"
        why = f"{_POOL} is set" if info.threads_set else f"a thread per core and IPU, for {ipus}"
        yield "threads", f"{info.threads} in XLA's pool: {why}"
    parts: list[str] = []
    for name, is_there in info.collectives.items():
        note = " (used)" if name == info.collectives_chosen else "" if is_there else f" (needs {_MPI}=libmpiwrapper.so)"
        parts.append(name + note)
    yield "collectives", f"between processes on CPUs: {', '.join(parts) or 'none'}"
    yield "cache", info.cache or "compiled programs are not kept; JAX_COMPILATION_CACHE_DIR names a folder for them"
    yield "records", info.records or f"none: {SWITCH} turns them off, and ipu-monitor shows nothing"


def _versions() -> dict[str, str]:
    found = {"ipu_jax": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, "Python": platform.python_version()}


def _collectives() -> dict[str, bool]:
    """Return the collectives of this jaxlib. MPI also needs a library of the host, which jaxlib loads by its path."""
    # jax has no public interface for this
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    found: dict[str, bool] = {}
    if hasattr(_jax, "make_gloo_tcp_collectives"):
        found["gloo"] = True
    if hasattr(_jax, "make_mpi_collectives"):
        found["mpi"] = os.path.isfile(os.environ.get(_MPI, ""))
    return found


if __name__ == "__main__":
    command()

"""Start a program as several host processes that work as one: the command `poprun`.

    poprun --num-replicas 8 --num-instances 4 --ipus-per-replica 2 python train.py

    options     the command line            topology    which host has which instances, replicas and cores
    attempts    restarts                    hosts       this host;  ssh: another host;  watcher: nothing is left behind
    supervisor  one attempt                 display     what is shown;  lines: how it is cut and drawn
    culprits    who is stuck, or failed     causes      what is said about it

Nothing here imports jax.
"""

import contextlib
import ipaddress
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from ipu_jax.base.cli import process
from ipu_jax.distributed.environment import AXES, START_TIMEOUT, TERMINAL_WIDTH
from ipu_jax.distributed.launcher.attempts import CannotStartError, SupervisedRun
from ipu_jax.distributed.launcher.display import STOPPING, Display, OutputWriter, Signals
from ipu_jax.distributed.launcher.hosts import LocalHost, free_port
from ipu_jax.distributed.launcher.options import Options, PoprunParser, options_of
from ipu_jax.distributed.launcher.ssh import Host, RemoteHost, Shell
from ipu_jax.distributed.launcher.topology import (
    Topology,
    available_cores,
    can_bind,
    is_this_host,
    nodes_of_cores,
    ranges,
)
from ipu_jax.distributed.processes.flight import RECORD

NOT_FOUND: Final = 127
"""The exit status if the program does not exist, as in a shell."""
NOT_EXECUTABLE: Final = 126

_LOOPBACK: Final = "127.0.0.1"
_EVERY_ADDRESS: Final = "[::]"
_NEVER: Final = 1e7  # seconds: jax takes no infinite time
_WILDCARDS: Final = ("", "*", "0.0.0.0", "::", _EVERY_ADDRESS)
# What instances on another host need from this environment: the same code, and the user's jax settings.
_TRAVELS: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_TRAVELS_BY_PREFIX: Final = ("JAX_", "XLA_", "PJRT_", "IPU_JAX_")


def main(argv: Sequence[str] | None = None) -> int:
    """Run poprun, and return its exit status."""
    parser = PoprunParser()
    own, program = parser.split(sys.argv[1:] if argv is None else argv)
    options = options_of(parser, parser.parse(own), program)
    try:
        topology = Topology(
            options.host, options.num_instances, options.num_replicas, options.ipus_per_replica, options.axes
        )
    except ValueError as error:
        parser.refuse(error)
    for line in options.without_effect:
        print(f"poprun: {line}", file=sys.stderr)
    here = (socket.gethostname(), socket.gethostname().split(".")[0])
    is_here = {name: is_this_host(name, here) for name in topology.hosts}
    local = [*is_here.values()]
    coordinator, bind = _coordinator(options, topology, local, here)
    is_only_shown = options.offline_mode or options.dry_run
    if any(local) and not is_only_shown:
        _check_program(parser, options.program[0], dict(options.env).get("PATH", os.environ.get("PATH")))
        _check_output(parser, options)
    if not (is_only_shown or all(local)) and shutil.which(options.remote_shell[0]) is None:
        parser.error(f"argument --remote-shell: {options.remote_shell[0]!r} is not in PATH: give one that is")
    if options.numa_aware:
        print(f"poprun: {_about_nodes(topology)}", file=sys.stderr)
    signals = Signals()
    display = Display(
        OutputWriter(),
        only=options.only_output_from_instance,
        tags=options.tag_output,
        timestamps=options.timestamps,
        folder=options.output_dir,
    )
    environments = {name: _environment(options, is_local, display.columns) for name, is_local in is_here.items()}
    run = SupervisedRun(options, topology, environments, coordinator, bind, display, signals)
    if options.print_topology:
        display.draw(str(topology))
    if is_only_shown:
        display.draw(_commands(run))
    return _written(run, 0 if is_only_shown else _supervised(run, here))


def _supervised(run: SupervisedRun, here: Sequence[str]) -> int:
    """Connect to the hosts, and start and watch the instances. Return the exit status."""
    shell = Shell(run.options.remote_shell, os.getcwd())
    hosts: list[Host] = []

    def connect(name: str) -> Host:
        return LocalHost(name) if is_this_host(name, here) else RemoteHost(name, shell)

    try:
        for name in run.topology.hosts:
            hosts.append(connect(name))
        return run.to_its_end(hosts, connect)
    except CannotStartError as error:
        run.display.say(str(error))
        return error.status
    finally:
        for host in hosts:
            host.close()


def command() -> NoReturn:
    """Run poprun as a process; docs/design/command-lines.md lists its exit statuses."""
    process.run("poprun", main)


def _written(run: SupervisedRun, status: int) -> int:
    """Wait until all output is written or a signal arrives. Return the exit status."""
    writer = run.display.writer
    while not writer.close(0.05):
        if set(STOPPING) & set(run.signals.wait([], 0)):
            return status
    if writer.error is None:
        return status
    if isinstance(writer.error, BrokenPipeError):
        return process.READER_HAS_GONE
    print(f"poprun: the output cannot be written ({writer.error.strerror}): write it elsewhere", file=sys.stderr)
    return process.CANNOT_WRITE


def _coordinator(options: Options, topology: Topology, local: Sequence[bool], here: Sequence[str]) -> tuple[str, str]:
    """Return the host name by which instances reach instance 0's coordinator, and the address that it listens on.

    Without `--coordinator-bind`, it accepts connections from outside this host only if other hosts have instances. If
    instance 0 is here, it then listens on the one address from which this host reaches all others, if there is one.
    """
    bind = options.coordinator_bind
    if all(local):
        bind = bind or _LOOPBACK
        return (_LOOPBACK if bind in _WILDCARDS else bind), bind
    if bind is None and local[0]:
        others = [name.rpartition("@")[2] for name, is_local in zip(topology.hosts, local, strict=True) if not is_local]
        own = {_address_towards(name) for name in others}
        if len(own) == 1 and (address := own.pop()) is not None:
            return address, address
    first = here[0] if local[0] else topology.hosts[0].rpartition("@")[2]
    return (first if bind is None or bind in _WILDCARDS else bind), bind or _EVERY_ADDRESS


def _address_towards(host: str) -> str | None:
    """Return this host's address on the route to another host; None if it is unknown. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as way:
                way.connect(address)
                own = ipaddress.ip_address(way.getsockname()[0])
                if not (own.is_loopback or own.is_link_local or own.is_unspecified):
                    return f"[{own}]" if own.version == 6 else str(own)
    return None


def _check_program(parser: PoprunParser, program: str, path: str | None) -> None:
    """Exit as a shell does if the program cannot be found or executed."""
    if shutil.which(program, path=path) is not None:
        return
    beside = None if "/" in program else shutil.which(program, path=os.path.dirname(sys.executable))
    if beside is not None:
        parser.exit(NOT_FOUND, f"poprun: {program} is not in PATH: did you mean {shlex.quote(beside)}?\n")
    if not Path(program).is_file():
        parser.exit(NOT_FOUND, f"poprun: there is no program {program!r}: give one in PATH, or its path\n")
    python = f", or start it with: python {shlex.quote(program)}" if program.endswith(".py") else ""
    if "/" in program or python:
        line = f"poprun: {program} is not executable: make it so with chmod +x{python}\n"
        parser.exit(NOT_EXECUTABLE, line)
    parser.exit(NOT_FOUND, f"poprun: {program} is not in PATH: did you mean ./{program}?\n")


def _check_output(parser: PoprunParser, options: Options) -> None:
    """Make the folders that the run writes to. Refuse an output folder that contains files of an earlier run."""
    folders = {"--output-dir": options.output_dir, "--executable-cache-path": options.executable_cache_path}
    for flag, folder in folders.items():
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                parser.error(f"argument {flag}: {folder} cannot be made ({error.strerror}): give another folder")
            if not os.access(folder, os.W_OK | os.X_OK):
                parser.error(f"argument {flag}: {folder} cannot be written to: give another folder")
    if options.output_dir is not None and any(options.output_dir.glob("attempt-*")):
        parser.error(f"argument --output-dir: {options.output_dir} has files of another run: give another folder")


def _about_nodes(topology: Topology) -> str:
    nodes, cores = len(nodes_of_cores()), len(available_cores())
    if not can_bind():
        return "--numa-aware: this system cannot bind a process to cores: none is bound"
    if cores < topology.instances_per_host:
        return (
            f"--numa-aware: {topology.instances_per_host} instances have {cores} cores: they share all of them, "
            "and none is bound"
        )
    if nodes <= 1:
        return f"--numa-aware: this host has one NUMA node: each instance is bound to its share of {cores} cores"
    return f"--numa-aware: each instance is bound to its share of the cores of one of {nodes} NUMA nodes"


def _environment(options: Options, is_local: bool, columns: int | None) -> dict[str, str]:
    """Return the variables that all instances of a host share, without the variables of their places."""
    travels = lambda name: is_local or name in _TRAVELS or name.startswith(_TRAVELS_BY_PREFIX)
    # not the axes of a run that has started this one
    base = {name: value for name, value in os.environ.items() if name != AXES and travels(name)}
    environment = {**base, START_TIMEOUT: f"{min(options.start_timeout, _NEVER):g}", **dict(options.env)}
    if options.flight_recorder:
        environment[RECORD] = "1"
    if options.executable_cache_path is not None:
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    if columns and "COLUMNS" not in os.environ:  # progress bars in a pipe take their width from it
        environment |= {"COLUMNS": str(columns), TERMINAL_WIDTH: str(columns)}
    return environment


def _commands(run: SupervisedRun) -> str:
    """Return each instance's command, as a user could type it on its host."""
    options = run.options
    port = options.coordinator_port or free_port(_LOOPBACK)
    lines: list[str] = []
    for name, launch in zip(run.topology.hosts, run.launches(port, 0), strict=True):
        lines.append(f"# on host {name}:")
        for place, cores in zip(launch.places, launch.shares(), strict=True):
            variables = launch.variables(place, len(cores))
            changed = {key: value for key, value in sorted(variables.items()) if os.environ.get(key) != value}
            words = ["env", *(f"{key}={value}" for key, value in changed.items())]
            if launch.binds():
                words += ["taskset", "--cpu-list", ranges(cores)]
            lines.append(f"cd {shlex.quote(os.getcwd())} && {shlex.join([*words, *launch.command])}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    command()

"""Write a command: flags, refusals in one line, a bar, and an end without a traceback, alone or under poprun.

    @dataclasses.dataclass(frozen=True)
    class Flags:
        ipus: int = cli.flag(None, cli.count, "IPUs of a replica")
        replicas: int = cli.flag(None, cli.count, "copies of the model")

    def main() -> int:
        parser = cli.Parser("my-command", "Trains my model.")
        cli.add_flags(parser, Flags)
        flags = cli.flags_of(Flags, parser.parse())        # wrong flags: status 2, before jax is imported
        counts = cli.counts_of(flags.ipus, flags.replicas)
        cli.start_ipus(**counts)
        ...

    cli.run("my-command", main)                            # Ctrl-C, a closed pipe or a full disk: no traceback

    poprun --num-replicas 8 --num-instances 4 --ipus-per-replica 2 my-command

Under poprun, instances share the replicas, and the first one prints. poprun then sets the numbers of replicas and IPUs.
Without poprun there is one instance. Nothing here imports jax before `start_ipus`.
"""

import signal
import time
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from ipu_jax.base.cli.output_paths import check_file, reason_of, writable_folder
from ipu_jax.base.cli.parser import (
    CommandParser,
    add_flags,
    checked,
    count,
    flag,
    flags_of,
    one_of,
    path,
    positive,
    rate,
    seed,
    versions,
    whole_number,
)
from ipu_jax.base.cli.process import CANNOT_WRITE, run, warnings_as_lines
from ipu_jax.base.cli.progress import Bar, shows_progress
from ipu_jax.base.replacing import replacing
from ipu_jax.distributed import popdist

__all__ = [
    "CANNOT_WRITE",
    "Bar",
    "Parser",
    "add_flags",
    "check_file",
    "checked",
    "count",
    "counts_of",
    "end_together",
    "flag",
    "flags_of",
    "load_once_per_host",
    "one_of",
    "path",
    "positive",
    "rate",
    "reason_of",
    "replacing",
    "run",
    "seed",
    "shows_progress",
    "start_ipus",
    "versions",
    "wait_for_all",
    "warnings_as_lines",
    "whole_number",
    "writable_folder",
]

_Result = TypeVar("_Result")

_LOAD_SECONDS: Final = 600.0
_FIRST_SPEAKS_SECONDS: Final = 3.0
_FIRST_ENDS_SECONDS: Final = 1.0


class Parser(CommandParser):
    """An `argparse.ArgumentParser` whose errors are one line each, and say what to give instead.

    The other instances wait a moment before they print an error. If the first instance has the same error, poprun ends
    them meanwhile. An error of another instance alone, such as a folder missing on its host, is printed.

    `called` has the flags of values that errors call by another name, such as `{"num_ipus": "--ipus"}`.
    """

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit with the message. An instance other than the first waits before it prints an error."""
        if status and not popdist.is_first():
            time.sleep(_FIRST_SPEAKS_SECONDS)
        super().exit(status, message)

    def refuse(self, error: Exception) -> NoReturn:
        """Exit with status 2 and the error's message; under poprun, add poprun's names of the counts."""
        if popdist.is_popdist_env_set() and any(name in str(error) for name in ("ipus", "replicas")):
            names = "(under poprun, --ipus is its --ipus-per-replica, and --replicas its --num-replicas)"
            error = ValueError(f"{error} {names}")
        super().refuse(error)


def counts_of(ipus: int | None, replicas: int | None, default_ipus: int = 2) -> dict[str, int]:
    """Return the flags "ipus" and "replicas": poprun's values, else the given ones, else the defaults.

    Raises:
        ValueError: a given value differs from poprun's, or poprun has further axes, which these counts lack.
    """
    if not popdist.is_popdist_env_set():
        return {"ipus": ipus or default_ipus, "replicas": replicas or 1}
    if popdist.get_further_axes():
        raise ValueError("poprun's --axes gives the mesh further axes, which this program lacks: leave --axes out")
    counts = {"ipus": popdist.get_num_ipus_per_replica(), "replicas": popdist.get_num_total_replicas()}
    for name, given, own in (("ipus", ipus, "ipus-per-replica"), ("replicas", replicas, "num-replicas")):
        if given not in (None, counts[name]):
            raise ValueError(f"--{name} {given}, but poprun runs --{own} {counts[name]}: leave --{name} out")
    return counts


def start_ipus(replicas: int, ipus: int) -> None:
    """Connect this instance with the others, and make its share of `replicas` x `ipus` virtual IPUs.

    Raises:
        ValueError: the IPUs cannot be made; the message contains the flags --ipus and --replicas.
    """
    from ipu_jax.core.mesh.devices import configure  # imports jax

    popdist.init()
    if popdist.get_num_instances() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # jax has set a handler that does nothing
    count = replicas * ipus // popdist.get_num_instances()
    try:
        configure(count)
    except ValueError as error:
        flags = f"--ipus {ipus}" + (f" x --replicas {replicas}" if replicas > 1 else "")
        raise ValueError(str(error).replace(f"num_ipus={count}", flags)) from error


def load_once_per_host(load: Callable[[], _Result]) -> _Result:
    """Call a function that may download files: on the first instance of each host, then on the others.

    Communicates: all instances wait for the first ones.

    Args:
        load: reads data; on the other instances, after the first one of their host has done so.
    """
    if popdist.get_num_instances() == 1:
        return load()
    loaded = load() if popdist.get_local_instance_index() == 0 else None
    popdist.barrier("the first instance of each host has loaded the data", timeout=_LOAD_SECONDS)
    return load() if loaded is None else loaded


def wait_for_all(where: str, seconds: float = 300.0) -> None:
    """Wait until all instances have arrived here, for at most `seconds`; a single instance goes on at once."""
    if popdist.get_num_instances() > 1:
        with popdist.busy(f"waiting for the others at {where}", seconds):
            popdist.barrier(where, timeout=seconds)


def end_together() -> None:
    """Wait for the other instances to reach the same end, so that none is stopped before it has said why.

    The first instance ends last. It runs the coordinator, and the others would report its loss.
    """
    wait_for_all("the end of the training", 60)
    if popdist.is_first() and popdist.get_num_instances() > 1:
        time.sleep(_FIRST_ENDS_SECONDS)

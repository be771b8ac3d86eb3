"""Train under poprun, where several instances share the replicas: each has its own, and the first one speaks.

    poprun --num-replicas 8 --num-instances 4 --ipus-per-replica 2 run-sharded-mnist --pipeline-mode concurrent

The numbers of replicas and of IPUs are poprun's then. Without poprun there is one instance, and nothing here changes
anything. Nothing here imports jax before `connect`.
"""

import argparse
import signal
import time
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from ipu_jax import popdist
from ipu_jax.tools.command_line import Parser

_Result = TypeVar("_Result")

_IPUS: Final = 2
_LOAD_SECONDS: Final = 600.0
_FIRST_SPEAKS_SECONDS: Final = 3.0
_FIRST_ENDS_SECONDS: Final = 1.0


class InstanceParser(Parser):
    """A parser whose errors the first instance prints, although all instances come to them.

    Another instance waits a moment with an error. Where the first one has it too, poprun ends the other meanwhile; an
    error that the other one alone has, such as of a folder that its host lacks, is printed.
    """

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit with the message; an instance other than the first one waits before it."""
        if status and not is_first():
            time.sleep(_FIRST_SPEAKS_SECONDS)
        super().exit(status, message)


def is_first() -> bool:
    """Return whether this instance is the one that prints, and writes files."""
    return popdist.get_instance_index() == 0


def fill_in_counts(args: argparse.Namespace) -> None:
    """Set `args.ipus` and `args.replicas` where they were not given: to poprun's, or else to the defaults.

    Raises:
        ValueError: they were given, and poprun has others.
    """
    of_poprun = {
        "ipus": ("ipus-per-replica", popdist.get_num_ipus_per_replica()),
        "replicas": ("num-replicas", popdist.get_num_total_replicas()),
    }
    defaults = {"ipus": _IPUS, "replicas": 1}
    for name, (flag, count) in of_poprun.items():
        given = getattr(args, name)
        if not popdist.is_popdist_env_set():
            setattr(args, name, defaults[name] if given is None else given)
        elif given not in (None, count):
            raise ValueError(f"--{name} {given}, but poprun runs --{flag} {count}: leave --{name} out")
        else:
            setattr(args, name, count)


def explained(error: Exception) -> Exception:
    """Return the error; under poprun, with the flags of poprun that give the counts in it."""
    if not popdist.is_popdist_env_set() or not any(name in str(error) for name in ("ipus", "replicas")):
        return error
    return ValueError(f"{error} (under poprun, --ipus is its --ipus-per-replica, and --replicas its --num-replicas)")


def connect() -> None:
    """Connect this instance with the others, before jax is used for anything else."""
    popdist.init()
    if popdist.get_num_instances() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # jax has set a handler that does nothing


def local_ipus(replicas: int, ipus: int) -> int:
    """Return how many IPUs this instance needs for so many replicas of so many IPUs in all."""
    return replicas * ipus // popdist.get_num_instances()


def first_of_host_first(load: Callable[[], _Result]) -> _Result:
    """Call a function that may download files, on the first instance of each host before its others.

    Communicates: all instances wait for the first ones.
    """
    if popdist.get_num_instances() == 1:
        return load()
    loaded = load() if popdist.get_local_instance_index() == 0 else None
    popdist.barrier("the first instance of each host has loaded the data", timeout=_LOAD_SECONDS)
    return load() if loaded is None else loaded


def wait_for_all(where: str, seconds: float = 300.0) -> None:
    """Wait until all instances have come here, for so many seconds at most; a single one goes on at once."""
    if popdist.get_num_instances() > 1:
        with popdist.busy(f"waiting for the others at {where}", seconds):
            popdist.barrier(where, timeout=seconds)


def end_together() -> None:
    """Wait for the other instances, which come to the same end, so that none is stopped before it has said why.

    The first instance ends last, since the others would lose the coordinator, which it runs, and complain of that.
    """
    wait_for_all("the end of the training", 60)
    if is_first() and popdist.get_num_instances() > 1:
        time.sleep(_FIRST_ENDS_SECONDS)

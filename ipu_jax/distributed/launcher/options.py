"""Read poprun's command line: its options end at the first word that is not an option: the program.

    poprun --num-replicas 8 --num-instances 4 -- python train.py --num-replicas 3
           `---- poprun's own ----'              `---- the program's ---------'

Options of Graphcore's poprun that have no meaning here are accepted, since scripts use them, and reported to have no
effect.

Nothing here imports jax.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ipu_jax.base.checks import shown
from ipu_jax.base.cli.parser import MOST_IPUS, CommandParser, checked, number_that, path, whole_number
from ipu_jax.distributed.environment import InstancePlace, axes_of
from ipu_jax.distributed.launcher.display import Tags
from ipu_jax.distributed.launcher.topology import LOCALHOST, host_names, hosts_in_file

GRACE: Final = 1.5
_DESCRIPTION: Final = (
    "Start a program as several host processes (instances) that share replicas and IPUs, show what they print, and end "
    "them all, with the reason, when one fails or is stuck."
)
_EPILOG: Final = "The options end at the first word that is not one, or at --. See docs/instances.md."
_TRUE: Final = ("yes", "true", "on", "1")
_FALSE: Final = ("no", "false", "off", "0")
_TAGS: Final[Mapping[str, Tags]] = {
    **dict.fromkeys(_TRUE, "full"),
    **dict.fromkeys(_FALSE, "off"),
    **{"short": "short", "full": "full"},
}
_HINTS: Final[Mapping[str, str]] = {
    "np nproc nproc-per-node num-processes processes": "--num-instances N starts N processes, on all hosts together",
    "nnodes num-nodes nodes": "name the hosts with --host a,b; --num-instances counts the processes of all of them",
}
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LONGEST: Final = 1e7
_ITS_OWN: Final = frozenset(InstancePlace(0, 1, 0, 1, 1, "", "", run_dir=Path(), token="x", axes={"x": 1}).variables())

_NO_VIPU: Final = "there is no V-IPU server here: an instance makes its IPUs of the devices of its host"
_NO_MPI: Final = "instances are started without mpirun: give variables with -x NAME=VALUE"
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "--num-ilds": "there are no IPU-Link domains here",
    **dict.fromkeys(("--vipu-server-host", "--vipu-server-port", "--vipu-server-timeout"), _NO_VIPU),
    **dict.fromkeys(("--vipu-partition", "--vipu-partition-attempts"), _NO_VIPU),
    **dict.fromkeys(("--vipu-cluster", "--vipu-allocation"), _NO_VIPU),
    **dict.fromkeys(("--mpi-global-args", "--mpi-local-args"), _NO_MPI),
    "--sync-type": "XLA decides when devices wait for each other",
    "--host-subnet": "give the address with --coordinator-bind",
    "--version-format": "--version has one format",
}
"""Options of the original that take a value, and why they do nothing here."""
TRUTHS_WITHOUT_EFFECT: Final = dict.fromkeys(
    ("--update-partition", "--reset-partition", "--remove-partition"),
    "there are no partitions here: an instance makes its IPUs of the devices of its host",
)
"""The same for options that are yes or no."""


def _truth(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is neither yes nor no")
    return text.lower() in _TRUE


def _tags(text: str) -> Tags:
    if text.lower() not in _TAGS:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is not one of off, short and full")
    return _TAGS[text.lower()]


def _limit(text: str) -> float:
    """Return a limit in seconds; infinite for "off"."""
    if text == "off":
        return float("inf")
    return number_that(float, lambda value: 0 < value <= _LONGEST, "a positive number of seconds, or off")(text)


def _folder(text: str) -> Path:
    folder = path(text).absolute()
    if folder.exists() and not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a folder: give another")
    return folder


def _address(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:%*\[\]-]+", text):
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is not an address: give one such as 127.0.0.1")
    return text


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name) or "\0" in value:
        what = f"{shown(text)!r} is not a variable: give NAME=VALUE, or the NAME of one that is set"
        raise argparse.ArgumentTypeError(what)
    if name in _ITS_OWN:
        raise argparse.ArgumentTypeError(f"poprun sets {name} itself, by instance: leave it out")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set in this environment: give {name}=VALUE, or set it")
    return name, value if equals else os.environ[name]


def _command(text: str) -> tuple[str, ...]:
    """Return the words of a command, divided as in a shell."""
    with contextlib.suppress(ValueError):  # a quote is not closed, or nothing follows a backslash
        if (words := tuple(shlex.split(text))) and words[0]:
            return words
    raise ValueError(f"{shown(text)!r} is not a command: close its quotes, and give one such as ssh or 'ssh -p 2222'")


def _option(default: Any, kind: Callable[[str], Any] | None, metavar: str, help: str, *names: str, **how: Any) -> Any:
    """Return a field of `Options` that is an option, named like the field, and how argparse reads it."""
    how = {"default": default, "type": kind, "metavar": metavar, "help": help, **how}
    return dataclasses.field(default=default, metadata={"names": names, "how": how})


def _yes(help: str) -> Any:
    """Return an option that means yes when given, and can also be given as =yes or =no, as in the original."""
    return _option(False, _truth, "yes|no", help, nargs="?", const=True)


_COUNT: Final = whole_number(1, MOST_IPUS * MOST_IPUS)
_SECONDS: Final = number_that(float, lambda value: 0 < value <= _LONGEST, "a positive number of seconds")


@dataclasses.dataclass(frozen=True)
class Options:
    """Hold the values of a command line, by the names of the options. `program` is the program with its arguments."""

    num_instances: int = _option(1, _COUNT, "N", "host processes, shared equally by the hosts (default: 1)", "-n")
    num_replicas: int = _option(
        None, _COUNT, "N", "copies of the model, shared equally by the instances (default: one for each)"
    )
    ipus_per_replica: int = _option(1, _COUNT, "N", "virtual IPUs of each replica (default: 1)")
    axes: Mapping[str, int] = _option(
        None,
        checked(axes_of),
        "NAME=SIZE,...",
        "further axes of the mesh: an IPU is a group of devices, such as tensor=2 (default: none)",
    )
    host: tuple[str, ...] = _option(
        None, checked(host_names), "HOSTS", "hosts, such as a,b or pod[0-2,4] (default: this one)", "-H"
    )
    hostfile: None = _option(None, None, "FILE", "a file with a host in each line")
    remote_shell: tuple[str, ...] = _option(None, checked(_command), "COMMAND", "reaches another host (default: ssh)")
    offline_mode: bool = _yes("print what to run on each host, and start nothing")
    dry_run: bool = _yes("the same")
    numa_aware: bool = _yes("bind each instance to cores of one NUMA node")
    executable_cache_path: Path | None = _option(None, _folder, "DIR", "keep compiled programs in this folder")
    env: Sequence[tuple[str, str]] = _option(
        None, _variable, "NAME[=VALUE]", "a variable for the instances", "-x", action="append"
    )
    allow_run_as_root: bool = _yes("accepted for the original's sake: it is allowed")

    print_topology: bool = _yes("print which host has which instances and replicas")
    only_output_from_instance: int | None = _option(
        None, whole_number(0, MOST_IPUS * MOST_IPUS), "N", "hide the stdout of the others, never their stderr"
    )
    output_dir: Path | None = _option(None, _folder, "DIR", "write a file for each attempt, instance and stream")
    timestamps: bool = _yes("put the time at which a line was read into its tag")
    tag_output: Tags = _option(
        *("full", _tags, "off|short|full"),
        "what is put before each line: nothing, [0], or [1,0]<stdout>: (default: full)",
        nargs="?",
        const="full",
    )

    max_restarts: int = _option(
        0, whole_number(0, 2**31 - 1), "N", "how often all instances are started again after a failure (default: 0)"
    )
    stall_timeout: float | None = _option(
        *(None, _limit, "SECONDS|off"),
        "how long an instance may finish no step (default: the larger of 5 s and 5 x the median step)",
    )
    compile_timeout: float = _option(
        1800.0, _limit, "SECONDS|off", "how long an instance may start, or compile (default: 1800)"
    )
    start_timeout: float = _option(
        60.0, _limit, "SECONDS|off", "how long the others may wait in popdist.init for an instance (default: 60)"
    )
    grace: float | None = _option(
        None, _SECONDS, "SECONDS", f"from SIGTERM to SIGKILL (default: {GRACE:g} after a failure)"
    )
    flight_recorder: bool = _yes("let IPUs report each tick, so that a stuck run says what each IPU does")

    coordinator_port: int = _option(
        *(0, whole_number(1, 65535), "N"),
        "the port of jax's coordinator (default: a free one, another for each attempt)",
    )
    coordinator_bind: str | None = _option(
        *(None, _address, "ADDRESS"),
        "what it listens on (default: loopback if all instances are on this host, else every address)",
    )
    verbose: int = 0
    program: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()


class PoprunParser(CommandParser):
    """The parser of poprun's own options."""

    def __init__(self) -> None:
        super().__init__("poprun", _DESCRIPTION, _EPILOG, called={"hosts": "--host"}, hints=_HINTS)
        self.usage = "poprun [options] PROGRAM [arguments]"
        for field in dataclasses.fields(Options):
            if field.metadata:
                name = "--" + field.name.replace("_", "-")
                how = {key: value for key, value in field.metadata["how"].items() if value is not None}
                self.add_argument(*field.metadata["names"], name, **how)
        self.add_argument("-v", "--verbose", action="count", default=0, help="say what is started, seen and stopped")
        self.add_argument("--vv", action="store_const", const=2, default=0, help="say more")
        for name in (*WITHOUT_EFFECT, *TRUTHS_WITHOUT_EFFECT):
            how = {"nargs": "?", "type": _truth, "const": True} if name in TRUTHS_WITHOUT_EFFECT else {}
            self.add_argument(name, help=argparse.SUPPRESS, **how)

    def split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return poprun's own words, and the program with its arguments."""
        own, i = list[str](), 0
        while i < len(argv):
            word = argv[i]
            if word == "--":
                return own, list(argv[i + 1 :])
            if not word.startswith("-") or word == "-":
                break
            name, equals, _ = word.partition("=")
            action = self._option_string_actions.get(name)
            i += 1
            own.append(word)
            if action is None:
                if not re.match(r"-[xH].|-n\d+$|-v+$", word):
                    self.error(f"unrecognized arguments: {shown(word)}: {self._nearest([word])}")
            elif equals or action.nargs == 0 or i == len(argv):
                continue
            elif action.nargs != "?":
                # mpirun's options are values here, although they look like options of ours
                own[-1:] = [f"{name}={argv[i]}"] if name in WITHOUT_EFFECT else [word, argv[i]]
                i += 1
            elif argv[i] in (_TAGS if name == "--tag-output" else (*_TRUE, *_FALSE)) and i + 1 < len(argv):
                # the last word is a program: `true`
                own.append(argv[i])
                i += 1
        return own, list(argv[i:])


def options_of(parser: PoprunParser, parsed: argparse.Namespace, program: Sequence[str]) -> Options:
    """Return the options of a parsed command line; wrong options exit with status 2."""
    given = {name: value for name, value in vars(parsed).items() if value is not None}
    if not program:
        parser.error(
            "no program is given: name one after the options, such as: poprun --num-instances 2 python train.py"
        )
    only = parsed.only_output_from_instance
    if only is not None and only >= parsed.num_instances:
        parser.error(
            f"--only-output-from-instance {only} is not one of the {parsed.num_instances} instances: "
            f"give one from 0 to {parsed.num_instances - 1}"
        )
    if parsed.hostfile is not None and parsed.host is not None:
        parser.error("--host and --hostfile both name the hosts: give one of them")
    source = "argument --hostfile"
    try:
        hosts = hosts_in_file(Path(parsed.hostfile)) if parsed.hostfile is not None else (LOCALHOST,)
        source = "POPRUN_REMOTE_SHELL"
        shell = parsed.remote_shell or _command(os.environ.get(source) or "ssh")
    except ValueError as error:
        parser.error(f"{source}: {error}")
    values = {
        "num_replicas": parsed.num_instances,
        "axes": {},
        "env": (),
        "remote_shell": shell,
        "host": hosts,
        **{field.name: given[field.name] for field in dataclasses.fields(Options) if field.name in given},
        "verbose": max(parsed.verbose, parsed.vv),
        "program": tuple(program),
        "without_effect": tuple(
            f"{name} has no effect: {why}"
            for name, why in {**WITHOUT_EFFECT, **TRUTHS_WITHOUT_EFFECT}.items()
            if given.get(name.lstrip("-").replace("-", "_"), False) is not False
        ),
    }
    return Options(**values)

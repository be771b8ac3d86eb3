"""Read poprun's command line: its options end at the first word that is not an option: the program.

    poprun --num-replicas 8 --num-instances 4 -- python train.py --num-replicas 3
           `---- poprun's own ----'              `---- the program's ---------'

Options of Graphcore's poprun that have no meaning here are accepted, since scripts use them, and reported to have no
effect.

Nothing here imports jax.
"""

import argparse
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ipu_jax.base.cli.parser import MOST_IPUS, Parser, number_that, shown, whole_number
from ipu_jax.distributed.environment import Place, axes_of
from ipu_jax.distributed.launcher.terminal import Tags
from ipu_jax.distributed.launcher.topology import LOCALHOST, host_names, hosts_in_file

GRACE: Final = 1.5
_DESCRIPTION: Final = (
    "Start a program as several host processes (instances) that share replicas and IPUs, show what they print, and end "
    "them all, with the reason, when one fails or is stuck."
)
_EPILOG: Final = "The options end at the first word that is none, or at --. docs/instances.md tells more."
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
_ITS_OWN: Final = frozenset(Place(0, 1, 0, 1, 1, "", "", run_dir=Path(), token="its own", axes={"own": 1}).variables())

_NO_VIPU: Final = "there is no V-IPU server here: an instance makes its IPUs of the devices of its host"
_NO_PARTITION: Final = "there are no partitions here: an instance makes its IPUs of the devices of its host"
_NO_MPI: Final = "instances are started without mpirun: give variables with -x NAME=VALUE"
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "--num-ilds": "there are no IPU-Link domains here",
    "--vipu-server-host": _NO_VIPU,
    "--vipu-server-port": _NO_VIPU,
    "--vipu-server-timeout": _NO_VIPU,
    "--vipu-partition": _NO_VIPU,
    "--vipu-partition-attempts": _NO_VIPU,
    "--vipu-cluster": _NO_VIPU,
    "--vipu-allocation": _NO_VIPU,
    "--mpi-global-args": _NO_MPI,
    "--mpi-local-args": _NO_MPI,
    "--sync-type": "XLA decides when devices wait for each other",
    "--host-subnet": "give the address with --coordinator-bind",
    "--version-format": "--version has one format",
}
"""Options of the original that take a value, and why they do nothing here."""
TRUTHS_WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "--update-partition": _NO_PARTITION,
    "--reset-partition": _NO_PARTITION,
    "--remove-partition": _NO_PARTITION,
}
"""The same for options that are yes or no."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Hold the values of a command line, by the names of the options. `program` is the program with its arguments."""

    program: tuple[str, ...]
    num_replicas: int
    num_instances: int
    ipus_per_replica: int
    axes: Mapping[str, int]
    hosts: tuple[str, ...]
    offline_mode: bool
    dry_run: bool
    executable_cache_path: Path | None
    numa_aware: bool
    print_topology: bool
    only_output_from_instance: int | None
    flight_recorder: bool
    output_dir: Path | None
    tag_output: Tags
    timestamps: bool
    max_restarts: int
    stall_timeout: float | None
    compile_timeout: float
    start_timeout: float
    grace: float | None
    coordinator_port: int
    coordinator_bind: str | None
    env: tuple[tuple[str, str], ...]
    remote_shell: str
    verbose: int
    without_effect: tuple[str, ...]


class PoprunParser(Parser):
    """The parser of poprun's own options."""

    def __init__(self) -> None:
        super().__init__("poprun", _DESCRIPTION, _EPILOG, called={"hosts": "--host"}, hints=_HINTS)
        self.usage = "poprun [options] PROGRAM [arguments]"
        self._add_division()
        self._add_output()
        self._add_supervision()
        self._add_coordinator()
        for name in WITHOUT_EFFECT:
            self.add_argument(name, help=argparse.SUPPRESS)
        for name in TRUTHS_WITHOUT_EFFECT:
            self._add_truth(name, argparse.SUPPRESS)

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

    def _add_truth(self, name: str, meaning: str) -> None:
        """Add an option that means yes when given, and can also be given as =yes or =no, as in the original."""
        self.add_argument(name, nargs="?", type=_truth, const=True, default=False, metavar="yes|no", help=meaning)

    def _add_division(self) -> None:
        for *names, default, meaning in (
            ("--num-instances", "-n", 1, "host processes, shared equally by the hosts (default: 1)"),
            ("--num-replicas", None, "copies of the model, shared equally by the instances (default: one for each)"),
            ("--ipus-per-replica", 1, "virtual IPUs of each replica (default: 1)"),
        ):
            most = MOST_IPUS * MOST_IPUS
            self.add_argument(*names, type=whole_number(1, most), default=default, metavar="N", help=meaning)
        self.add_argument(
            "--axes",
            type=_axes,
            default={},
            metavar="NAME=SIZE,...",
            help="further axes of the mesh: an IPU is a group of devices, such as tensor=2 (default: none)",
        )
        self.add_argument("--host", "-H", metavar="HOSTS", help="hosts, such as a,b or pod[0-2,4] (default: this one)")
        self.add_argument("--hostfile", metavar="FILE", help="a file with a host in each line")
        self.add_argument(
            "--remote-shell", metavar="COMMAND", help="what starts a command on another host (default: ssh)"
        )
        self._add_truth("--offline-mode", "print what to run on each host, and start nothing")
        self._add_truth("--dry-run", "the same")
        self._add_truth("--numa-aware", "bind each instance to cores of one NUMA node")
        self.add_argument("--executable-cache-path", metavar="DIR", help="keep compiled programs in this folder")
        self.add_argument(
            *("-x", "--env"), action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the instances"
        )
        self._add_truth("--allow-run-as-root", "accepted for the original's sake: it is allowed")

    def _add_output(self) -> None:
        self._add_truth("--print-topology", "print which host has which instances and replicas")
        self.add_argument(
            "--only-output-from-instance",
            type=whole_number(0, MOST_IPUS * MOST_IPUS),
            metavar="N",
            help="hide the stdout of the others, never their stderr",
        )
        self.add_argument("--output-dir", metavar="DIR", help="write a file for each attempt, instance and stream")
        self._add_truth("--timestamps", "put the time at which a line was read into its tag")
        self.add_argument(
            "--tag-output",
            nargs="?",
            type=_tags,
            const="full",
            default="full",
            metavar="off|short|full",
            help="what is put before each line: nothing, [0], or [1,0]<stdout>: (default: full)",
        )
        self.add_argument("-v", "--verbose", action="count", default=0, help="say what is started, seen and stopped")
        self.add_argument("--vv", action="store_const", const=2, default=0, help="say more")

    def _add_supervision(self) -> None:
        seconds = number_that(float, lambda value: 0 < value <= _LONGEST, "a positive number of seconds")
        self.add_size("--max-restarts", 0, "how often all instances are started again after a failure", least=0)
        self.add_argument(
            "--stall-timeout",
            type=_limit,
            metavar="SECONDS|off",
            help="how long an instance may finish no step (default: the larger of 5 s and 5 x the median step)",
        )
        self.add_argument(
            "--compile-timeout",
            type=_limit,
            default=1800.0,
            metavar="SECONDS|off",
            help="how long an instance may start, or compile (default: 1800)",
        )
        self.add_argument(
            "--start-timeout",
            type=_limit,
            default=60.0,
            metavar="SECONDS|off",
            help="how long the others may wait in popdist.init for an instance (default: 60)",
        )
        self._add_truth("--flight-recorder", "let IPUs report each tick, so that a stuck run says what each IPU does")
        self.add_argument(
            "--grace",
            type=seconds,
            metavar="SECONDS",
            help=f"from SIGTERM to SIGKILL (default: {GRACE:g} after a failure)",
        )

    def _add_coordinator(self) -> None:
        self.add_argument(
            "--coordinator-port",
            type=whole_number(1, 65535),
            default=0,
            metavar="N",
            help="the port of jax's coordinator (default: a free one, another for each attempt)",
        )
        self.add_argument(
            "--coordinator-bind",
            metavar="ADDRESS",
            help="what it listens on (default: loopback if all instances are on this host, else every address)",
        )


def options_of(parser: PoprunParser, parsed: argparse.Namespace, program: Sequence[str]) -> Options:
    """Return the options of a parsed command line; wrong options exit with status 2."""
    without_effect = [
        f"{name} has no effect: {why}"
        for name, why in {**WITHOUT_EFFECT, **TRUTHS_WITHOUT_EFFECT}.items()
        if getattr(parsed, name.lstrip("-").replace("-", "_")) not in (None, False)
    ]
    if not program:
        parser.error(
            "no program is given: name one after the options, such as: poprun --num-instances 2 python train.py"
        )
    only = parsed.only_output_from_instance
    if only is not None and only >= parsed.num_instances:
        parser.error(
            f"--only-output-from-instance {only} is none of the {parsed.num_instances} instances: "
            f"give one from 0 to {parsed.num_instances - 1}"
        )
    if parsed.hostfile is not None and parsed.host is not None:
        parser.error("--host and --hostfile both name the hosts: give one of them")
    try:
        hosts = (LOCALHOST,)
        if parsed.host is not None:
            hosts = host_names(parsed.host)
        elif parsed.hostfile is not None:
            hosts = hosts_in_file(Path(parsed.hostfile))
    except ValueError as error:
        parser.error(f"argument {'--host' if parsed.host is not None else '--hostfile'}: {error}")
    checked = {
        "program": tuple(program),
        "num_replicas": parsed.num_replicas or parsed.num_instances,
        "hosts": hosts,
        "executable_cache_path": _folder(parser, "--executable-cache-path", parsed.executable_cache_path),
        "output_dir": _folder(parser, "--output-dir", parsed.output_dir),
        "coordinator_bind": _address(parser, parsed.coordinator_bind),
        "env": tuple(_variable(parser, text) for text in parsed.env),
        "remote_shell": parsed.remote_shell or os.environ.get("POPRUN_REMOTE_SHELL") or "ssh",
        "verbose": max(parsed.verbose, parsed.vv),
        "without_effect": tuple(without_effect),
    }
    names = {field.name for field in dataclasses.fields(Options)}
    return Options(**{name: getattr(parsed, name) for name in names - checked.keys()}, **checked)


def _truth(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is neither yes nor no")
    return text.lower() in _TRUE


def _tags(text: str) -> Tags:
    if text.lower() not in _TAGS:
        raise argparse.ArgumentTypeError(f"{shown(text)!r} is none of off, short and full")
    return _TAGS[text.lower()]


def _axes(text: str) -> dict[str, int]:
    try:
        return axes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _limit(text: str) -> float:
    """Return a limit in seconds; infinite for "off"."""
    if text == "off":
        return float("inf")
    return number_that(float, lambda value: 0 < value <= _LONGEST, "a positive number of seconds, or off")(text)


def _folder(parser: Parser, flag: str, text: str | None) -> Path | None:
    if text is None:
        return None
    if not text or "\0" in text:
        parser.error(f"argument {flag}: {text!r} is no path: give one that is not empty")
    path = Path(text).absolute()
    if path.exists() and not path.is_dir():
        parser.error(f"argument {flag}: {shown(text)} is no folder: give another")
    return path


def _address(parser: Parser, text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"[A-Za-z0-9_.:%*\[\]-]+", text):
        parser.error(f"argument --coordinator-bind: {shown(text)!r} is no address: give one such as 127.0.0.1")
    return text


def _variable(parser: Parser, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name) or "\0" in value:
        parser.error(f"argument -x: {shown(text)!r} is no variable: give NAME=VALUE, or the NAME of one that is set")
    if name in _ITS_OWN:
        parser.error(f"argument -x: poprun sets {name} itself, by instance: leave it out")
    if not equals:
        if name not in os.environ:
            parser.error(f"argument -x: {name} is not set in this environment: give {name}=VALUE, or set it")
        value = os.environ[name]
    return name, value

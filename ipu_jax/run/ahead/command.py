"""Compile a training script's step for chips that are not there, and print what it needs: the command `ipu-compile`.

    $ ipu-compile --topology v5e:4x4 train.py --layers 24
    TrainStep(Pipeline of 26 stages on 16 IPUs, 64 micro-batches per update)
    compiled for 16 x TPU v5 lite by jax 0.10.2, libtpu 0.0.42: nothing ran
    ...

The script runs as usual up to `ipu_jax.chips.hand_over(step, weights, batch)`, where it ends. Until then `make_mesh`
and `configure` take the described chips in place of jax's own.
"""

import argparse
import contextlib
import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from ipu_jax.base.annotations import Device
from ipu_jax.base.cli.parser import CommandParser, count
from ipu_jax.base.cli.process import run
from ipu_jax.run.ahead.kinds import topology_of

PROG: Final = "ipu-compile"
_TOO_LARGE: Final = 1
_EPILOG: Final = """
The script calls ipu_jax.chips.hand_over(step, weights, batch) before it places weights; shapes suffice. The status is 1
if the program does not fit into a chip's memory.
"""


def command() -> NoReturn:
    """Compile for the command line, and end the process with the exit status."""
    run(PROG, main)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile for a command line, print the report, and return the exit status."""
    about = "Compiles a script's training step for TPUs or GPUs that are not there, and prints what it needs and costs."
    parser = CommandParser(PROG, about, _EPILOG)
    parser.add_argument("--topology", required=True, help="the chips, such as v5e:4x4, v5p:4x4x4, v6e:2x4 or h100x8")
    parser.add_argument("--slices", type=count, default=1, metavar="N", help="TPU slices of this shape (default: 1)")
    parser.add_argument("--offload", choices=("optimizer",), help="its state rests in the host's memory")
    parser.add_argument("--explain", action="store_true", help="where a step's time goes on paper, and what to change")
    parser.add_argument("--json", action="store_true", help="print one line of JSON; the script prints to stderr")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script", help="a Python script, or the name of a module, that calls hand_over")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    args = parser.parse(argv)
    try:
        topology_of(args.topology)
        file = _file_of(args.script, args.is_module)
        import jax

        jax.config.update("jax_platforms", "cpu")  # no other is there, and none is looked for
        from ipu_jax.run.ahead.compilers import describe

        devices = describe(args.topology, slices=args.slices)
    except ValueError as error:
        parser.refuse(error)
    report = _handed_over(parser, args, file, devices)
    print(report.json() if args.json else report)
    return 0 if report.fits else _TOO_LARGE


def _file_of(script: str, is_module: bool) -> str:
    """Return the file of a script or module; raise `ValueError` if there is none. A module's packages are imported."""
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(script)))
    if not is_module:
        if not os.path.isfile(script):
            raise ValueError(f"{script} is not a file: give the path of a Python script, or -m and a module's name")
        return script
    try:
        spec = importlib.util.find_spec(script)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.has_location or spec.origin is None:
        raise ValueError(f"-m {script} is not a module here: give its name, such as examples.gpt")
    return spec.origin


def _handed_over(parser: CommandParser, args: argparse.Namespace, file: str, devices: list[Device]) -> Any:
    """Run the script up to `hand_over`, and return the report."""
    from ipu_jax.core.mesh.devices import describing
    from ipu_jax.run.ahead.compiling import HandedOver, awaiting

    output = sys.stderr if args.json else sys.stdout
    start = runpy.run_module if args.is_module else runpy.run_path
    sys.argv = [file, *args.arguments]
    try:
        with describing(devices), awaiting(args.offload, explain=args.explain), contextlib.redirect_stdout(output):
            start(args.script, run_name="__main__")
    except HandedOver as handed:
        return handed.report
    except SystemExit as end:
        parser.error(f"{args.script} ended with status {end.code} before it called ipu_jax.chips.hand_over(...)")
    except Exception as error:
        _print_without_ours(error, file)
        parser.error(f"{args.script} failed before ipu_jax.chips.hand_over(...) had a report: {type(error).__name__}")
    parser.error(f"{args.script} ended without a call of ipu_jax.chips.hand_over(step, weights, batch): add one")


def _print_without_ours(error: Exception, script: str) -> None:
    """Print an error's traceback from the script on, without the frames of ipu_jax."""
    shown, package = traceback.TracebackException.from_exception(error), Path(__file__).parents[2]
    files = [frame.filename for frame in shown.stack]
    if package in Path(files[-1]).parents:  # our message says all that the error behind it does
        shown.__cause__ = shown.__context__ = None
    first = files.index(script) if script in files else len(files)  # a script that cannot be parsed has no frame
    shown.stack[:] = [frame for frame in shown.stack[first:] if package not in Path(frame.filename).parents]
    print("".join(shown.format()), end="", file=sys.stderr)

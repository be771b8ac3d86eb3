"""Draw the schedules of a training: what `--plot-schedule` asks for. Nothing here imports jax."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Final

from ipu_jax import Schedule, popdist
from ipu_jax.tools.process import CANNOT_WRITE
from mnist_example.instances import is_first
from mnist_example.layouts import MODES, Mode
from mnist_example.places import check_picture, reason_of, write_whole

_FLAG: Final = "--plot-schedule"
_SUFFIXES: Final = (".svg", ".png")


def check_pictures(args: argparse.Namespace) -> None:
    """Check that the pictures that the flags ask for can be drawn and written.

    Raises:
        ValueError: a file ends neither in .svg nor in .png or cannot be written, two pictures would be one file, or a
            PNG file is to be drawn without matplotlib.
    """
    for mode in MODES if args.compare else (args.pipeline_mode,):
        path = _file_of(args, mode)
        if path is None:
            return
        if args.compare and args.plot is not None and path.absolute() == args.plot.absolute():
            raise ValueError(f"{_FLAG} would write {path}, and so would --plot: give them different names")
        check_picture(_FLAG, path, _SUFFIXES)
        if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(
                f"{_FLAG} draws PNG files with matplotlib, which is not installed: pip install 'ipu-jax[plots]', or "
                "give a name that ends in .svg"
            )


def _file_of(args: argparse.Namespace, mode: Mode) -> Path | None:
    """Return the file for a mode, None without the flag. With --compare, each mode has one, named after it."""
    path: Path | None = args.plot_schedule
    if path is None or not args.compare:
        return path
    return path.parent / f"{path.stem}-{mode}{path.suffix}"


class SchedulePictures:
    """Draws the schedule of each mode on the first instance, and knows how that ended.

    Attributes:
        status: the exit status that follows from it: 0 unless a picture could not be written.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.status = 0

    def draw(self, mode: Mode, schedule: Schedule) -> None:
        """Draw a schedule if the flags ask for it. A picture that cannot be written does not stop the training."""
        path = _file_of(self._args, mode)
        if path is None or not is_first():
            return
        try:
            with popdist.busy("drawing the schedule"):
                if path.suffix.lower() == ".svg":
                    write_whole(path, schedule.to_svg().encode())
                else:
                    schedule.plot(path)
        except Exception as error:
            print(f"run-sharded-mnist: {_FLAG} {path} was not drawn ({reason_of(error)})", file=sys.stderr)
            self.status = CANNOT_WRITE
        else:
            print(f"Schedule: {path}", flush=True)

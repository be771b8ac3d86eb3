"""Draw a schedule into a file: what `Schedule.plot` and `Schedule.to_svg` do."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ipu_jax.schedules._simulate import Simulation
from ipu_jax.schedules._timetable import Timetable, segments_of, tables_of
from ipu_jax.schedules.pictures.figure import figure_of
from ipu_jax.schedules.pictures.grid import Grid, grid_by_tick, grid_by_time
from ipu_jax.schedules.pictures.scene import scene_of
from ipu_jax.schedules.pictures.svg import svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMATS = (".svg", ".png")
_MOST_CELLS = 200_000  # 4 MB of SVG, and on a page about one to a pixel
_DOTS_PER_INCH = 200


def svg(table: Timetable, simulation: Simulation | None, bubble: Callable[[], float]) -> str:
    """Return the picture as SVG; `Schedule.to_svg` documents the arguments."""
    return svg_of(scene_of(_grid(table, simulation, bubble)))


def plot(table: Timetable, path: object, simulation: Simulation | None, bubble: Callable[[], float]) -> "Figure":
    """Return the picture as a figure, and write it to `path`; `Schedule.plot` documents the arguments."""
    file = None if path is None else _checked(path)
    scene = scene_of(_grid(table, simulation, bubble))
    figure = figure_of(scene)
    if file is not None and file.suffix.lower() == ".svg":
        _write(file, svg_of(scene).encode())
    elif file is not None:
        picture = io.BytesIO()
        # without the version of matplotlib, which would be in the file
        figure.savefig(picture, dpi=_DOTS_PER_INCH, format="png", metadata={"Software": None})
        _write(file, picture.getvalue())
    return figure


def _grid(table: Timetable, simulation: Simulation | None, bubble: Callable[[], float]) -> Grid:
    cells = len(table.forward[0]) * sum(
        len([kind for kind, _ in tables_of(table)]) if ipu is not None else 2 * table.ipus
        for ipu in (table.placement[stages[0]] for stages in segments_of(table.placement))
    )
    if cells > _MOST_CELLS:
        raise ValueError(
            f"schedule {table.name!r} has {cells:,} cells, more than a picture can show: draw one of "
            f"{_MOST_CELLS:,} at most; with fewer micro-batches it looks alike"
        )
    return grid_by_tick(table, bubble()) if simulation is None else grid_by_time(table, simulation)


def _checked(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path={path!r} is no path: give the name of an SVG or PNG file")
    file = Path(path)
    if file.suffix.lower() not in _FORMATS:
        raise ValueError(
            f"path={os.fspath(path)!r} ends neither in .svg nor in .png: give such a name, or save the figure that "
            "plot() returns"
        )
    return file


def _write(file: Path, content: bytes) -> None:
    """Write a file; if that fails, one that was there is unchanged."""
    target = file.resolve()  # of a link, the file that it names
    if target.exists() and not target.is_file():
        target.write_bytes(content)  # such as /dev/stdout
        return
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(target)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise

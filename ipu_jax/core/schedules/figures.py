"""Make figures with matplotlib, an extra that is imported when a picture is made, and write them to files.

title                                a figure is as wide as a page, and begins with these three;
caption                              lengths are in points (1/72 inch)
[] legend  [] of colours  // idle
"""

import io
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ipu_jax.base.annotations import Json
from ipu_jax.base.opening import replacing
from ipu_jax.core.schedules._timetable import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The hues come from Okabe and Ito, "Color Universal Design", 2008. Colour-blind people can tell them apart, and black
# text can be read on them.
INK: Final = "#1f2328"
FAINT: Final = "#57606a"
LINE: Final = "#d3d8dd"
IDLE: Final = "#eceef1"  # below lines of `IDLE_LINE`: a bubble is hatched
IDLE_LINE: Final = "#aab1b9"
UPDATE: Final = "#d9dde2"
LOCAL: Final[dict[Kind, str]] = {"F": "#7db9e2", "B": "#dd7a3c", "W": "#f5e26b"}
CONCURRENT: Final[dict[Kind, str]] = {"F": "#8ad3b4", "B": "#2fa37c", "W": ""}
# in the words of `PipelineReport`
BYTES: Final = {
    "weights": "#5f7fa3",
    "padding": "#dfe3e8",
    "state": "#93acc6",
    "gradients": "#b89560",
    "optimizer": "#8d6e63",
    "batch": "#dcc9a3",
    "other temporary": "#c3c9d0",
    "stash": "#cc79a7",
}
LIMIT: Final = "#b3261e"


def name_of(kind: Kind, *, has_weight_tasks: bool = False, is_concurrent: bool = False) -> str:
    """Return what a legend says of a kind of task.

    >>> name_of("B"), name_of("B", has_weight_tasks=True), name_of("F", is_concurrent=True)
    ('B: backward', 'B: backward by input', 'F of a concurrent stage, on all IPUs')
    """
    if is_concurrent:
        return f"{kind} of a concurrent stage, on all IPUs"
    backward = "B: backward by input" if has_weight_tasks else "B: backward"
    return {"F": "F: forward", "B": backward, "W": "W: backward by weight"}[kind]


# Per file type, the metadata about matplotlib and the date that is left out.
_METADATA: dict[str, dict[str, Json]] = {
    ".svg": dict.fromkeys(("Creator", "Date", "Format", "Type")),
    ".png": {"Software": None},
    ".pdf": dict.fromkeys(("CreationDate", "Creator", "Producer")),
}
# These replace the user's settings, so that equal plans give equal files.
_STYLE: list[Any] = [
    "default",
    {"svg.hashsalt": "ipu_jax", "svg.fonttype": "none", "text.parse_math": False, "font.sans-serif": ["DejaVu Sans"]},
    {"legend.frameon": False, "legend.fontsize": 8.0, "legend.borderpad": 0.0, "legend.borderaxespad": 0.0},
    {"legend.handlelength": 1.4, "legend.handleheight": 1.0, "legend.columnspacing": 1.8},
]
WIDTH: Final = 720.0
MARGIN: Final = 12.0
TEXT: Final = 8.0
DIGIT: Final = 0.64  # the width of a digit over its size
_HATCHED: Final[dict[str, Json]] = {"fc": IDLE, "ec": IDLE_LINE, "hatch": "//////"}


def drawn(draw: Callable[["Figure"], None]) -> "Figure":
    """Return a figure on which `draw` has drawn, in this project's style; a notebook shows it.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib.style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib cannot be imported: pip install 'ipu-jax[plots]'") from error
    with matplotlib.style.context(_STYLE):
        figure = Figure()
        draw(figure)
    setattr(figure, "_repr_svg_", partial(svg_of, figure))  # noqa: B010 (notebooks ask for it)
    return figure


def svg_of(figure: "Figure") -> str:
    """Return a figure as an SVG element, for a file or for a page of HTML."""
    text = _content(figure, ".svg").decode()
    # without the RDF metadata, which repeats the title
    return re.sub("\n *<metadata>.*?</metadata>", "", text[text.index("<svg") :], count=1, flags=re.DOTALL)


def written(path: object, make: Callable[[], "Figure"]) -> "Figure":
    """Return the figure that `make` returns, and write it to `path`, unless that is None.

    Raises:
        ValueError: `path` is not a path, or has another suffix.
        OSError: the file cannot be written. An existing file is unchanged.
    """
    if path is None:
        return make()
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path={path!r} is not a path: give the name of an SVG, PNG or PDF file")
    suffix = Path(path).suffix.lower()
    if suffix not in _METADATA:
        raise ValueError(
            f"path={os.fspath(path)!r} does not end in .svg, .png or .pdf: give such a name, or save the figure that "
            "plot() returns"
        )
    figure = make()
    content = svg_of(figure).encode() if suffix == ".svg" else _content(figure, suffix)
    with replacing(path) as file:
        file.write(content)
    return figure


def _content(figure: "Figure", suffix: str) -> bytes:
    import matplotlib.style

    file = io.BytesIO()
    with matplotlib.style.context(_STYLE):
        metadata = _METADATA[suffix] | {"Title": figure.get_suptitle()}
        figure.savefig(file, format=suffix[1:], dpi=200, metadata=metadata)
    return file.getvalue()


def headed(figure: "Figure", below: float, title: str, caption: str, legend: Mapping[str, str]) -> tuple[float, float]:
    """Draw title, caption and legend, with room `below` them; return where that begins, and the figure's height.

    Args:
        figure: an empty one.
        below: the height of the rest.
        title, caption: texts; the caption is wrapped.
        legend: the colour of each name; `IDLE` is hatched.
    """
    from matplotlib.patches import Patch

    lines = textwrap.wrap(caption, 165)
    top = MARGIN + 42.0 + 12.0 * len(lines)
    height = top + below
    figure.set_size_inches(WIDTH / 72, height / 72)
    size = min(12.0, (WIDTH - 2 * MARGIN) / (0.72 * len(title)))  # no letter is wider on average
    style: dict[str, Json] = {"x": MARGIN / WIDTH, "ha": "left", "va": "top"}
    figure.suptitle(title, y=1 - MARGIN / height, weight="bold", size=size, color=INK, **style)
    style |= {"size": TEXT, "color": FAINT, "linespacing": 1.3}
    figure.text(y=1 - (MARGIN + 20.0) / height, s="\n".join(lines), **style)
    look_of: Callable[[str], dict[str, Json]] = lambda of: _HATCHED if of == IDLE else {"fc": of, "ec": LINE}
    patches = [Patch(lw=0.5, label=name, **look_of(colour)) for name, colour in legend.items()]
    anchor = MARGIN / WIDTH, 1 - (top - 16.0) / height
    figure.legend(handles=patches, loc="upper left", bbox_to_anchor=anchor, ncols=len(patches), labelcolor=FAINT)
    return top, height


def numbered(count: int, width: float) -> int:
    """Return the step, 1, 2, 5, 10 and so on, in which the numbers of `count` ticks of this width do not touch."""
    room = (DIGIT * TEXT * len(str(count)) + 4.0) / width
    return next(step for step in (10**k * digit for k in itertools.count() for digit in (1, 2, 5)) if step >= room)


def outlined(axes: "Axes", outlines: Iterable[Iterable[tuple[float, float]]], colour: str, edge: float = 0.0) -> None:
    """Draw polygons of one colour, with as many corners each, as one path, which keeps the file small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    look: dict[str, Json] = _HATCHED if colour == IDLE else {"fc": colour, "ec": "white"}
    path = Outline.make_compound_path_from_polys(np.array([list(outline) for outline in outlines]))
    axes.add_artist(PathPatch(path, lw=edge, clip_on=False, zorder=2.0 if edge else 1.0, **look))

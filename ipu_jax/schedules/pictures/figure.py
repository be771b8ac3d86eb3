"""Draw a picture with matplotlib, an extra that is imported where it is needed."""

from itertools import groupby
from typing import TYPE_CHECKING

from ipu_jax.schedules.pictures.shapes import Scene

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PIXELS_PER_INCH = 96.0
_POINTS_PER_PIXEL = 72.0 / _PIXELS_PER_INCH


def figure_of(scene: Scene) -> "Figure":
    """Return the picture as a figure.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.collections import PatchCollection, PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Circle
    except ImportError as error:
        raise ImportError("matplotlib cannot be imported: pip install 'ipu-jax[plots]'; to_svg() needs none") from error
    figure = Figure(figsize=(scene.width / _PIXELS_PER_INCH, scene.height / _PIXELS_PER_INCH))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0.0, scene.width), ylim=(scene.height, 0.0))
    axes.set_axis_off()
    for layer, (paint, rectangles) in enumerate(groupby(scene.rectangles, lambda rectangle: rectangle.paint)):
        corners = [
            ((r.x, r.y), (r.x + r.width, r.y), (r.x + r.width, r.y + r.height), (r.x, r.y + r.height))
            for r in rectangles
        ]
        axes.add_collection(
            PolyCollection(corners, facecolors=paint.light, linewidths=0.0, zorder=layer), autolim=False
        )
    above = len(scene.rectangles)
    for paint, dots in groupby(scene.dots, lambda dot: dot.paint):
        circles = [Circle((dot.x, dot.y), dot.radius) for dot in dots]
        axes.add_collection(
            PatchCollection(circles, facecolors=paint.light, linewidths=0.0, zorder=above), autolim=False
        )
    anchors = {"start": "left", "middle": "center", "end": "right"}
    for word in scene.words:
        axes.text(
            word.x,
            word.y,
            word.text.replace("$", r"\$"),
            fontsize=word.size * _POINTS_PER_PIXEL,
            color=word.paint.light,
            horizontalalignment=anchors[word.anchor],
            verticalalignment="baseline",
            fontweight="bold" if word.bold else "normal",
            zorder=above + 1,
        )
    return figure

"""Compare the losses of the two modes, in words and as a picture."""

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mnist_example.places import write_whole

_Losses = npt.NDArray[np.floating]

# The losses of the two modes agree closely for so many updates; the difference by rounding grows with every update.
_FIRST_UPDATES = 50


def describe(basic: _Losses, concurrent: _Losses) -> str:
    """Return a line that says how far the losses of the two modes, (updates,) each, are apart."""
    difference = _relative(basic, concurrent)
    first = difference[:_FIRST_UPDATES]
    # the loss of an update that was skipped may not be finite, and then has no difference
    return (
        f"Largest relative difference of the losses: {np.fmax.reduce(first):.1e} over the first {len(first)} updates, "
        f"{np.fmax.reduce(difference):.1e} over all {len(difference)}"
    )


def draw(basic: _Losses, concurrent: _Losses, path: Path) -> None:
    """Draw the losses of both modes, (updates,) each, into a PNG file.

    Raises:
        OSError: the file cannot be written; one that was there is unchanged.
    """
    picture = io.BytesIO()
    _draw(basic, concurrent, _relative(basic, concurrent), picture)
    write_whole(path, picture.getvalue())


def _relative(basic: _Losses, concurrent: _Losses) -> _Losses:
    with np.errstate(invalid="ignore"):
        return np.abs(concurrent - basic) / basic


def _draw(basic: _Losses, concurrent: _Losses, difference: _Losses, file: io.BytesIO | Path) -> None:
    """Draw both curves above, one thick and one dashed since they nearly coincide, and below how far they are apart."""
    from matplotlib.figure import Figure  # an extra, and slow to import
    from matplotlib.ticker import MaxNLocator

    updates = np.arange(1, len(basic) + 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    curves, differences = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    mark = "o" if len(basic) == 1 else ""  # one point makes no line
    curves.plot(updates, basic, color="#9ecae1", linewidth=5, marker=mark, markersize=12, label="basic")
    curves.plot(updates, concurrent, color="#d94801", linewidth=1.3, linestyle="--", marker=mark, label="concurrent")
    curves.set_ylabel("mean loss of an update")
    curves.set_title("Basic and concurrent pipeline: same weights, same batches")
    curves.legend()
    differences.semilogy(updates, np.maximum(difference, 1e-9), color="#636363", linewidth=1, marker=mark)
    differences.set_ylabel("relative difference")
    differences.set_xlabel("weight updates")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (curves, differences):
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150, format="png")

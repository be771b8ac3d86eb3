"""Draw the plots of the documentation from the record, results.json, in the look of the schedules' pictures.

    64 micro-batches take 119.8 MB ...    the title is what the plot says; its figures come from the record
    temporary MB per IPU over ...         what is drawn, and of what
    120 |              /  usual pipeline, 119.8 MB
        |___________/___  ipu_jax, 9.4 MB

`make pictures` draws them. Lengths are in points; a page shows them so wide that no letter is smaller than 10 pixels.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import results
from ipu_jax.core.schedules.figures import FAINT, INK, LINE, MARGIN, WIDTH, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# from Okabe and Ito, as the schedules' hues, but dark enough for lines on white
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#7a8087"
_TITLE, _LETTERS = 13.0, 10.5
_LEFT, _ABOVE, _BELOW = 44.0, 66.0, 40.0


def memory() -> "Figure":
    """Draw the memory of a step over its micro-batches, for the usual JAX pipeline and for ours."""
    found = _figures_of("rivals")
    counts = (4, 8, 16, 32, 64)
    lines = {
        "usual idiom": (ORANGE, "usual pipeline"),
        "usual idiom with jax.checkpoint": (GREEN, "with jax.checkpoint"),
        "ipu_jax": (BLUE, "ipu_jax"),
    }
    values = {name: [found[f"temporary MB an IPU, {name}, plain layers, M={m}"] for m in counts] for name in lines}

    def draw(axes: "Axes") -> None:
        for name, (colour, text) in lines.items():
            line_to(axes, counts, values[name], colour, f"{text}: {values[name][-1]:.1f} MB")
        axes.set(xticks=counts, xlabel="micro-batches in a step")

    usual, ours = values["usual idiom"][-1], values["ipu_jax"][-1]
    title = f"{counts[-1]} micro-batches take {usual:.1f} MB of memory in the usual pipeline, and {ours:.1f} MB here"
    return plotted(title, "Temporary MB per device: eight layers of 1024 x 1024 in two stages, as XLA reports it", draw)


def split_head() -> "Figure":
    """Draw the memory of a step over the columns of its head, for a head on one IPU and on both."""
    found = _figures_of("growth")
    columns = (1024, 4096, 16384)
    lines = {"head on IPU 1": ORANGE, "head on both IPUs": BLUE}
    values = {name: [found[f"temporary MB an IPU, {n} columns, {name}"] for n in columns] for name in lines}

    def draw(axes: "Axes") -> None:
        for name, colour in lines.items():
            line_to(axes, columns, values[name], colour, f"{name}: {values[name][-1]:.1f} MB")
        axes.set_xticks(columns, [f"{n:,}" for n in columns])
        axes.set_xlabel("columns of the head, such as words of a vocabulary")

    one, both = (values[name][-1] for name in lines)
    title = f"A head of {columns[-1]:,} columns takes {one:.1f} MB on one IPU, and {both:.1f} MB split over two"
    said = "Temporary MB of the fuller IPU: four layers of 256 x 256 and a head, as XLA reports it"
    return plotted(title, said, draw)


def long_run() -> "Figure":
    """Draw how far the losses of pipelines are from those on one device, over 3,000 updates."""
    found, curves = _figures_of("long_run"), results.read()["long_run"].curves
    looks = {
        "one device, one rounding error off": (GREY, "one device, its first weights off by one rounding error"),
        "1f1b": (BLUE, "4 IPUs, 1f1b; zb-h1 has the same bits"),
        "1f1b, bfloat16": (ORANGE, "4 IPUs, bfloat16"),
    }
    assert curves["1f1b"] == curves["zb-h1"]
    rounding, ours, _ = (found[f"largest relative difference of 3000 smoothed losses, {name}"] for name in looks)

    def draw(axes: "Axes") -> None:
        for name, (colour, _) in looks.items():
            step = 3000 // len(curves[name])
            line_to(axes, [step * (k + 1) for k in range(len(curves[name]))], curves[name], colour)
        axes.set(yscale="log", ylim=(1e-8, 1e-2), xlabel="updates", xticks=range(0, 3001, 500))
        axes.set_yticks([1e-8, 1e-6, 1e-4, 1e-2], ["0.000001%", "0.0001%", "0.01%", "1%"])

    title = f"One rounding error moves the loss by {rounding:.2%} in 3,000 updates; a pipeline moves it by {ours:.2%}"
    said = "Largest difference so far from the loss on one device; a GPT of 0.8 million parameters"
    return plotted(title, said, draw, left=76.0, right=20.0, legend={text: colour for colour, text in looks.values()})


def reading() -> "Figure":
    """Draw what workers and instances gain, for a host that decodes and for one that also waits for a disk."""
    found = _figures_of("distributed_lesson")
    kinds = {"decoding": ("Python decodes", BLUE), "waiting": ("it also waits, 2 ms an example", ORANGE)}
    steps = ("8 replicas, only reading", "8 replicas, 4 workers", "8 replicas on 2 instances")
    steps = (*steps, "8 replicas on 2 instances, 4 workers")
    ratio = lambda kind, step: found[f"examples/s / one replica's, {kind}, {step}"]

    def draw(axes: "Axes") -> None:
        for k, (kind, (_, colour)) in enumerate(kinds.items()):
            rows = [row + 0.36 * (k - 0.5) for row in range(len(steps))]
            values = [ratio(kind, step) / ratio(kind, "8 replicas") for step in steps]
            bars = axes.barh(rows, values, 0.34, color=colour)
            over = {"fc": "white", "ec": "none", "pad": 1.0}
            axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=_LETTERS, color=INK, bbox=over)
        axes.set_yticks(range(len(steps)), [step.removeprefix("8 replicas").lstrip(", ") for step in steps])
        axes.invert_yaxis()
        axes.grid(axis="x", color=LINE, lw=0.75)
        axes.grid(visible=False, axis="y")
        axes.axvline(1, color=FAINT, lw=1, zorder=1.5)
        axes.set_xlabel("examples per second, as a multiple of 8 replicas in one process")

    title = "Workers help where reading waits, instances where Python decodes"
    said = "Eight replicas on two cores, each way of reading beside one process with one worker"
    legend = {name: colour for name, colour in kinds.values()}
    return plotted(title, said, draw, left=150.0, right=50.0, legend=legend, height=300.0)


PLOTS: Final[dict[str, Callable[[], "Figure"]]] = {
    "rivals-memory.svg": memory,
    "growth.svg": split_head,
    "long_run.svg": long_run,
    "distributed.svg": reading,
}


def _figures_of(script: str) -> dict[str, float]:
    return {figure.name: figure.value for figure in results.read()[script].figures}


def line_to(axes: "Axes", x: Sequence[float], y: Sequence[float], colour: str, text: str = "") -> None:
    """Draw a line, and a text beside its end."""
    axes.plot(x, y, color=colour, lw=2.0, marker="o" if len(x) < 10 else None, ms=5.0, clip_on=False)
    style: dict[str, Any] = {"color": colour, "weight": "bold", "size": _LETTERS, "va": "center"}
    axes.annotate(text, (x[-1], y[-1]), xytext=(10, 0), textcoords="offset points", annotation_clip=False, **style)


def plotted(
    title: str,
    said: str,
    draw: Callable[["Axes"], None],
    *,
    left: float = _LEFT,
    right: float = 190.0,
    legend: Mapping[str, str] | None = None,
    height: float = 280.0,
    below: float = _BELOW,
) -> "Figure":
    """Return a figure with one plot, which `draw` draws.

    Args:
        title, said: the message, and what is drawn.
        left, right, below: the room beside the axes, and below.
        legend: the colour of each name.
    """

    def whole(figure: "Figure") -> None:
        figure.set_size_inches(WIDTH / 72, height / 72)
        style: dict[str, Any] = {"x": MARGIN / WIDTH, "ha": "left", "va": "top"}
        figure.suptitle(title, y=1 - MARGIN / height, weight="bold", size=_TITLE, color=INK, **style)
        figure.text(y=1 - (MARGIN + 21.0) / height, s=said, size=_LETTERS, color=FAINT, **style)
        above = _ABOVE + (18.0 if legend else 0.0)
        size = (WIDTH - left - right) / WIDTH, (height - above - below) / height
        axes = figure.add_axes((left / WIDTH, below / height, *size))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(LINE)
        axes.grid(axis="y", color=LINE, lw=0.75)
        axes.set_axisbelow(True)
        draw(axes)
        axes.tick_params(length=0, which="both", labelsize=_LETTERS, labelcolor=FAINT, pad=6.0)
        axes.xaxis.label.set(size=_LETTERS, color=FAINT)
        if axes.get_yscale() == "linear" and axes.get_autoscaley_on() and not axes.yaxis_inverted():
            axes.set_ylim(bottom=0)
        if legend:
            from matplotlib.patches import Patch

            patches = [Patch(fc=colour, label=name) for name, colour in legend.items()]
            at = MARGIN / WIDTH, 1 - (MARGIN + 42.0) / height
            figure.legend(handles=patches, loc="upper left", bbox_to_anchor=at, ncols=len(patches), fontsize=_LETTERS)

    return drawn(whole)

"""The colours and words of tasks in every picture: schedules, the report of a run, bytes over the ticks.

The hues come from Okabe and Ito, "Color Universal Design", 2008. Colour-blind people can tell them apart, and black
text can be read on them.
"""

from typing import Final

from ipu_jax.core.schedules._timetable import Kind

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

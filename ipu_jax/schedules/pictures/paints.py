"""Name the colours of a picture, which differ in lightness as well as in hue.

Hues are those of Okabe and Ito ("Color Universal Design", 2008), which people with deuteranopia or protanopia can tell
apart: sky blue for F, vermillion for B, yellow for W, bluish green for concurrent stages. They are made lighter or
darker so that they stand on a ladder of lightness, from idle over W, F and concurrent down to B. So they also differ
in grey print. Each kind has two ends, `deep` and `pale`, between which the chunks of an IPU lie; no other kind's steps
lie between them. `tests/ipu_jax/schedules/test_picture_colours.py` computes all contrasts, also as simulated for both
kinds of colour blindness.
"""

import dataclasses

from ipu_jax.schedules._timetable import Kind


@dataclasses.dataclass(frozen=True)
class Paint:
    """A colour on a light page, and on a dark one if it differs there."""

    light: str
    dark: str = ""

    def on(self, *, dark: bool) -> str:
        return self.dark or self.light if dark else self.light


CARD = Paint("#ffffff", "#14181d")
IDLE = Paint("#f1f3f5", "#2a3037")
INK = Paint("#1f2328", "#e6e9ec")
FAINT_INK = Paint("#57606a", "#a3abb4")
LINE = Paint("#c5cad0", "#4b535c")
UPDATE = Paint("#3c434b", "#8f98a3")
ON_LIGHT = Paint("#000000")
ON_DARK = Paint("#ffffff")

_ENDS: dict[Kind, tuple[str, str]] = {
    "F": ("#4ea5d6", "#66b5e5"),
    "B": ("#7d3500", "#9c4300"),
    "W": ("#dfd33c", "#eade40"),
}
_JOINT: dict[Kind, Paint] = {"F": Paint("#009b70"), "B": Paint("#008d66")}


def paint_of(kind: Kind, chunk: int | None = 0, chunks: int = 1) -> Paint:
    """Return the colour of a task of one of an IPU's chunks, or of a concurrent stage if `chunk` is None.

    >>> paint_of("F"), paint_of("F", 1, 2), paint_of("B", None)
    (Paint(light='#4ea5d6', dark=''), Paint(light='#66b5e5', dark=''), Paint(light='#008d66', dark=''))
    """
    if chunk is None:
        return _JOINT[kind]
    deep, pale = _ENDS[kind]
    part = chunk / max(1, chunks - 1)
    return Paint("#" + "".join(_between(deep, pale, part, at) for at in (1, 3, 5)))


def text_on(kind: Kind, chunk: int | None) -> Paint:
    """Return the colour of text on a task."""
    return ON_DARK if kind == "B" and chunk is not None else ON_LIGHT


def _between(deep: str, pale: str, part: float, at: int) -> str:
    a, b = int(deep[at : at + 2], 16), int(pale[at : at + 2], 16)
    return f"{round(a + (b - a) * part):02x}"

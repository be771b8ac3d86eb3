"""List what is done with each primitive of jax, as docs/design/cutting.md prints it."""

from collections.abc import Sequence
from typing import Final

from ipu_jax.base.jaxprs import CALLS, CHECKPOINTS
from ipu_jax.core.cutting.cut import PRODUCTS
from ipu_jax.core.cutting.dividing import ADDED
from ipu_jax.core.cutting.inlined import INLINED
from ipu_jax.core.cutting.known_places import AT_KNOWN_PLACES, TAKEN_OUTSIDE
from ipu_jax.core.cutting.own_rows import RULES
from ipu_jax.core.cutting.rows import JOINS

_MANY: Final = 20
"""From how many primitives on with one rule the table does not name them."""


def rules() -> list[tuple[str, str]]:
    """Return rows of a table: primitives, and what is done with them."""
    whole = [name for name in CALLS if name not in (*INLINED, *CHECKPOINTS)]
    followed: dict[str, list[str]] = {}
    for name, rule in RULES.items():
        followed.setdefault(str(rule.__doc__), []).append(name)
    rows: list[tuple[Sequence[str], str]] = [
        (INLINED, "Opened: a cut can be inside of it."),
        (CHECKPOINTS, "Opened around 20% or more of the FLOPs, and each stage's part is under one again."),
        (["scan"], "Opened over rows of leaves or constants, if its carry is an activation: an operation per layer."),
        (["while", "cond", *whole], "Kept whole: one operation, in one stage. Its bodies count as its work."),
        (AT_KNOWN_PLACES, "Rows of a leaf, at places known when the function is cut: static slices or updates."),
        (TAKEN_OUTSIDE, "Kept whole, but gets rows of a leaf in its place, if its bodies take only such rows."),
        *((names, f"Followed: {rule[0].lower()}{rule[1:]}") for rule, names in followed.items()),
        (JOINS, "Followed: the rows of the input that has them, if it joins rows."),
        ([*ADDED], "Reduces all rows of a divided leaf: each stage reduces its own, and sends the result on."),
        (PRODUCTS, "B counts as much as F for each operand with a gradient; elsewhere once for all of them."),
        (["stop_gradient"], "What only it reads counts no B."),
    ]
    rows.append((["all others"], "Kept whole: one operation, which reads all rows of its inputs."))
    return [(_printed(names), what) for names, what in rows]


def _printed(names: Sequence[str]) -> str:
    if len(names) > _MANY:
        return f"{len(names)} elementwise ones, such as `add`"
    return ", ".join(name if " " in name else f"`{name}`" for name in names)

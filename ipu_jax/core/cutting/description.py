"""Say where a function was cut, and why: the lines of `print(pipeline)` below the first."""

from collections.abc import Sequence
from typing import Any, Final

from ipu_jax.base.showing import Table, counted
from ipu_jax.core.cutting.cut import Cut
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.lost import of_shared, of_split, reasons
from ipu_jax.core.cutting.split_leaves import bytes_of_part
from ipu_jax.core.cutting.stages import Held
from ipu_jax.core.cutting.users_code import line_of, scopes_of
from ipu_jax.core.programs.cost import bytes_of, in_units
from ipu_jax.core.stage import Stage

_LISTED: Final = 8
"""For up to how many IPUs the bytes of each are printed."""


def names_of(division: Division) -> list[str]:
    """Return a name for each stage: the user's modules that it runs, or "stage 2" where there are none or two alike."""
    scopes = [[scopes_of(eqn) for eqn in piece.equations] for piece in division.pieces]
    common = _common([found for of_stage in scopes for found in of_stage if found])
    names = []
    for s, of_stage in enumerate(scopes):
        modules = [found[len(common)] for found in of_stage if len(found) > len(common)]
        first, last = (modules[0], modules[-1]) if modules else ("", "")
        names.append(f"stage {s}" if not modules else first if first == last else f"{first} to {last}")
    return [name if names.count(name) == 1 else f"stage {s}" for s, name in enumerate(names)]


def _common(scopes: Sequence[list[str]]) -> list[str]:
    """Return the outer modules that all of these have."""
    common = list(scopes[0]) if scopes else []
    for found in scopes:
        while found[: len(common)] != common:
            common.pop()
    return common


def described(
    division: Division,
    cut: Cut,
    stages: Sequence[Stage],
    held: Held,
    paths: Sequence[str] = (),
    of_state: Sequence[str] = (),
) -> list[str | Table]:
    """Return a row per stage, and of a loss lines about the cut, what makes it uneven and what is on all IPUs.

    Args:
        division, cut: the divided function.
        stages: the stages.
        held: who holds weights and state.
        paths, of_state: per leaf of the weights and of the state its path; of no loss function they are left out.
    """
    names, places = [stage.name for stage in stages], [stage.place for stage in stages]
    trace, messages, total = division.trace, division.messages, sum(cut.work) or 1.0
    rows = [("stage", "IPU", "work", "weights", "ends after", "sends per micro-batch")]
    for s, piece in enumerate(division.pieces):
        own = {division.parts[v] for v in piece.weights} - held.copied.keys()
        sent = messages[s] if s < len(messages) else trace.outputs
        text = f"{counted(len(sent), 'array')}, {in_units(bytes_of([v.aval for v in sent]), 'B')}"
        text = "the loss" if s == len(messages) and paths else text
        ends = line_of(cut.operations[cut.ends[s] - 1]) if cut.ends[s] else ""
        name = f"{s} {names[s]}" if names[s] != f"stage {s}" else str(s)
        weights = in_units(sum(bytes_of_part(trace.params[part.leaf], part, held.over) for part in own), "B")
        place = "all" if places[s] is None else str(places[s])
        rows.append((name, place, f"{cut.work[s] / total:.1%}", weights, ends, text))
    if not any(row[4] for row in rows[1:]):  # code without a file has no lines
        rows = [(*row[:4], row[5]) for row in rows]
    if any(held.state):
        sizes = [sum(bytes_of_part(trace.state[part.leaf], part) for part in parts) for parts in held.state]
        sizes = [in_units(size, "B") for size in sizes]
        rows = [(*row[:4], size, *row[4:]) for row, size in zip(rows, ["state", *sizes], strict=True)]
    table = Table(rows, left=len(rows[0]), indent="  ")
    if not paths:
        return [table]
    of_ipu, ipus = cut.work_per_ipu, held.over.ipus
    uneven = f"the busiest IPU has {max(of_ipu) * ipus / (sum(of_ipu) or 1.0) - 1:.1%} more work than the mean"
    lines = [*reasons(cut, cut.local_stages, of_state), *of_split(division, paths, held.over)]
    lines += of_shared(division, paths, {p: of for p, of in held.copied.items() if p not in held.over.blocked})
    return [table, f"cut at {_where(cut)}; {uneven}", _shares(division, held, places), *lines]


def _shares(division: Division, held: Held, places: Sequence[Any]) -> str:
    """Return the bytes of weights that each IPU holds, beside an even share."""
    leaves = division.trace.params
    size = lambda part: bytes_of_part(leaves[part.leaf], part, held.over)
    sizes = {name: sum(map(size, parts)) for name, parts in held.groups.items()}
    home = dict(zip(held.own, places, strict=True))
    on = lambda ipu: sum(size for name, size in sizes.items() if home.get(name) in (None, ipu))
    of_ipus = [*map(on, range(held.over.ipus))]
    found = [in_units(size, "B") for size in of_ipus]
    named = ", ".join(found) if len(found) <= _LISTED else " to ".join(in_units(f(of_ipus), "B") for f in (min, max))
    even = bytes_of([v.aval for v in leaves]) / len(of_ipus)
    times = max(of_ipus) / max(even, 1)
    return f"weights per IPU: {named}; the most is {times:.2f} times an even share, {in_units(even, 'B')}"


def _where(cut: Cut) -> str:
    if cut.marked:
        return "places that the function marks"
    if cut.at_waists:
        return f"waists, where one activation is live: {cut.waists} of {cut.places} places"
    return f"the {cut.places} places: the {cut.waists} waists, where one activation is live, give uneven stages"

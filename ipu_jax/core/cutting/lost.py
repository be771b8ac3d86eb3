"""Say why a cut is worse than it could be, and what to write instead: leaves on all IPUs, and uneven or empty stages.

all IPUs hold params['w'] (1.0 MB): lu (model.py:12) reads all layers at once. Do it layer by layer, inside of the scan
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from ipu_jax.base.annotations import Eqn, Var
from ipu_jax.base.jaxprs import bodies_of, in_scan_parts, scan_parts, variables
from ipu_jax.base.row_rules import Taken, rows_before
from ipu_jax.base.showing import counted
from ipu_jax.core.cutting.cut import Cut, Places
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.own_rows import RULES
from ipu_jax.core.cutting.rows import taken_by
from ipu_jax.core.cutting.scan_layers import ScanLayer
from ipu_jax.core.cutting.split_leaves import OverIpus
from ipu_jax.core.cutting.users_code import at_line, line_of, name_of
from ipu_jax.core.layout.tree_parts import Part
from ipu_jax.core.programs.cost import bytes_of, in_units

_UNEVEN: Final = 1.25
"""The work that is kept together, relative to a stage's part of the work, from which a line says why."""
_NAMED: Final = 3
_SMALL_SHARE: Final = 0.01
"""The part of the largest stage's own weights up to which leaves that all IPUs hold are only counted."""


# uneven and empty stages


def reasons(found: Cut | Places, stages: int, of_state: Sequence[str]) -> list[str]:
    """Return what keeps more than a stage's part of the work in one stage: an operation, or a leaf of the state."""
    (number, share), (leaf, kept), operations = found.heaviest, found.kept, found.operations
    lines = [f"{share:.0%} of the work is one operation, {_operation(operations[number])}"] if operations else []
    lines = lines if share * stages >= _UNEVEN else []
    if kept * stages >= _UNEVEN:
        lines.append(
            f"{of_state[leaf]} keeps {kept:.0%} of the work in one stage: all from where it is first read to where its "
            "new value is computed. Read and replace it row by row, in a scan or a loop over layers, or hold one leaf "
            "per layer"
        )
    return lines


def _operation(operation: Eqn) -> str:
    """Return an operation, and what to write in its place."""
    named = f"{name_of(operation)}{at_line(operation)}"
    if isinstance(operation, ScanLayer):
        return f"a layer of {named}: a Python loop over the layers is cut inside of layers as well"
    name, mend = operation.primitive.name, "write it as several"
    if name == "scan" and scan_parts(operation.params)[1] == 0:
        mend = "write jax.vmap in place of lax.map"
    elif name in ("scan", "while"):
        mend = "write the loop as a scan over stacked weights, lax.scan(layer, x, params)"
    elif bodies_of(operation):
        mend = "write one for each layer"
    return f"{named}, which cannot be cut: {mend} for more even stages"


# leaves that operations on all IPUs split


def of_split(division: Division, paths: Sequence[str], over: OverIpus) -> list[str]:
    """Return lines about the leaves that lie split over the IPUs, and about others that do not, and why."""
    named = lambda part: f"{paths[part.leaf]} ({in_units(bytes_of(division.trace.params[part.leaf].aval), 'B')})"
    leaves = [*dict.fromkeys(map(named, over.dims))]
    more = f" and {counted(len(leaves) - _NAMED, 'more leaf').replace('leafs', 'leaves')}" * (len(leaves) > _NAMED)
    lines = [f"split over the IPUs: {', '.join(leaves[:_NAMED])}{more}"] if leaves else []
    for part, (_, eqn) in over.blocked.items():
        why = "the function returns it" if eqn is None else f"{name_of(eqn)}{at_line(eqn)} needs all of it"
        lines.append(f"all IPUs hold {named(part)} whole, though everywhere splits it: {why}")
    return lines


# leaves that all IPUs hold


class _Reader(NamedTuple):
    """An equation that reads a leaf, or what follows from it: which rows of the leaf; None: all of it at once."""

    stage: int
    eqn: Eqn
    rows: Sequence[int] | None


def of_shared(division: Division, paths: Sequence[str], copied: Mapping[Part, list[int]]) -> list[str]:
    """Return lines about the leaves that all IPUs hold: which, why, and what to write instead.

    Args:
        division: the divided function.
        paths: per leaf of the weights its path.
        copied: the leaves that all IPUs hold, and the stages that read each.
    """
    size = {part: bytes_of(division.trace.params[part.leaf].aval) for part in copied}
    own = [[v.aval for v in piece.weights if division.parts[v] not in copied] for piece in division.pieces]
    least = _SMALL_SHARE * max(map(bytes_of, own))
    leaves = sorted((part for part in copied if size[part] > least), key=lambda part: -size[part])[:_NAMED]
    why: dict[str, list[str]] = {}
    for part in leaves:
        reason = _reason(division, division.trace.params[part.leaf], copied[part])
        why.setdefault(reason, []).append(f"{paths[part.leaf]} ({in_units(size[part], 'B')})")
    lines = [f"all IPUs hold {', '.join(named)}: {reason}" for reason, named in why.items()]
    if others := [part for part in copied if part not in leaves]:
        more = counted(len(others), "more leaf" if leaves else "small leaf").replace("leafs", "leaves")
        lines.append(f"all IPUs hold {more} ({in_units(sum(size[part] for part in others), 'B')})")
    return lines


def _reason(division: Division, leaf: Var, stages: Sequence[int]) -> str:
    """Return why a leaf is not divided: read whole, two stages read one row, or tied."""
    readers = [reader for s in stages for reader in _readers(division, leaf, s)]
    by_rows = [(reader, reader.rows) for reader in readers if reader.rows is not None]
    at_once = [reader.eqn for reader in readers if reader.rows is None]
    if by_rows and at_once:
        largest = max(at_once, key=lambda eqn: bytes_of([v.aval for v in eqn.outvars]))
        return (
            f"{name_of(largest)}{at_line(largest)} reads all layers at once. Do it layer by layer, inside of the scan "
            "or loop over the layers, or reduce it to a number"
        )
    for (one, rows), (other, others) in itertools.combinations(by_rows, 2):
        row = max(rows[0], others[0])
        if one.stage != other.stage and row < min(rows[1], others[1]):
            lines = ", ".join(dict.fromkeys(filter(None, (line_of(one.eqn), line_of(other.eqn)))))
            both = f"stages {one.stage} and {other.stage} both read row {row}{f' ({lines})' if lines else ''}"
            return f"{both}. Tied layers are on all IPUs"
    return f"tied, stages {', '.join(map(str, stages))} read it"


def _readers(division: Division, leaf: Var, stage: int) -> Iterator[_Reader]:
    """Yield the equations of a stage that read rows of a leaf, or all of it."""
    axis = division.trace.axes.get(leaf, 0)
    dims = {leaf: axis}  # of what follows from it row by row, the dim of the rows
    joined: set[Var] = set()  # what follows from all rows at once
    rows: dict[Var, Sequence[int]] = {}
    for eqn in division.pieces[stage].equations:
        taken, is_again, stacked = taken_by(eqn), any(v in division.again for v in eqn.outvars), list[Var]()
        if eqn.primitive.name == "scan":
            stacked = variables(in_scan_parts(eqn.params, eqn.invars)[2])
        for v in dict.fromkeys(variables(eqn.invars)):
            if v in rows:
                yield _Reader(stage, eqn, rows.pop(v))
            if v not in dims and v not in joined:
                continue
            if taken is not None and (v in joined or (v is leaf and taken.dim == axis)):
                rows[eqn.outvars[0]] = taken[1:]
            elif v in stacked and dims.get(v, 0) == 0:
                yield _Reader(stage, eqn, (0, v.aval.shape[0]))
            elif v in dims and is_again and (dim := _dim_after(eqn, v, dims[v])) is not None:
                dims[eqn.outvars[0]] = dim
            else:
                joined.update(eqn.outvars if is_again else ())
                if v in dims:
                    yield _Reader(stage, eqn, None)


def _dim_after(eqn: Eqn, var: Var, dim: int) -> int | None:
    """Return the dim of an equation's result that has the rows of an input along `dim`; None if no dim has."""
    for d in range(eqn.outvars[0].aval.ndim):
        before = rows_before(eqn, Taken(d, 0, 1), RULES)
        rows = None if before is None else before.rows[eqn.invars.index(var)]
        if rows is not None and rows.dim == dim:
            return d
    return None

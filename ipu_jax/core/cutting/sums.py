"""Let each stage add up its own rows of a leaf, where a function reduces all of the leaf, as a penalty or a norm does.

sum(w ** 2)      stage 0: a = sum(w[0:4] ** 2)      stage 1: b = a + sum(w[4:8] ** 2)      stage 2: b + sum(w[8:] ** 2)
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Function, Var
from ipu_jax.base.row_rules import Taken
from ipu_jax.core.cutting.rows import RowTaker, equation

ADDED: Final[dict[str, Function]] = {
    "reduce_sum": lax.add,
    "dot_general": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}
"""How the results for parts become the result for all rows, per primitive that reduces."""


class Tile(NamedTuple):
    """The rows of a leaf that a stage reads."""

    start: int
    stop: int
    stage: int


def sum_of_parts(
    eqn: Eqn,
    taker: RowTaker,
    tiles: Mapping[Var, Sequence[Tile]],
    axes: Mapping[Var, int],
    needs_all: Callable[[Var], bool],
) -> list[tuple[Eqn, int]]:
    """Return equations that compute a value from a part for each stage, with the stages that run them; [] if none can.

    Args:
        eqn: computes the value.
        taker: follows rows back to leaves.
        tiles: per leaf that is divided, which rows each stage has.
        axes: per leaf, the dim along which its rows are.
        needs_all: returns whether a value depends on all rows of a divided leaf, so that no early stage has it.
    """
    (result,) = eqn.outvars
    reduced = [(dims, eqn.invars) for dims in _reduced(eqn)]
    for dims, values in [*reduced, *(([d], [result]) for d in range(result.aval.ndim))]:
        for leaf, of_leaf in tiles.items():
            count, size = leaf.aval.shape[axes[leaf]], values[0].aval.shape[dims[0]]
            scaled = [(tile.start * size // count, tile.stop * size // count, tile.stage) for tile in of_leaf]
            rows = [([Taken(d, start, stop) for d in dims], stage) for start, stop, stage in scaled]
            ends = [_ends(values, of_inputs, taker) for of_inputs, _ in rows]
            whole = any(of is None and v not in tiles and needs_all(v) for of_part in ends for v, of in of_part)
            stages = [stage for _, stage in rows]
            own = size % count == 0 and all(_has_rows(*part, tiles, axes) for part in zip(ends, stages, strict=True))
            if own and not whole:
                return _in_parts(eqn, rows, taker) if values is eqn.invars else _joined(result, rows, taker)
    return []


def _reduced(eqn: Eqn) -> list[list[int]]:
    """Return the dims along which an equation reduces, each as one of each input."""
    if eqn.primitive.name == "dot_general":
        return [list(pair) for pair in zip(*eqn.params["dimension_numbers"][0], strict=True)]
    return [[int(d)] for d in eqn.params["axes"]] if eqn.primitive.name in ADDED else []


def _ends(values: Sequence[Var], rows: list[Taken], taker: RowTaker) -> list[tuple[Var, Taken | None]]:
    return [end for v, of in zip(values, rows, strict=True) for end in taker.reached(v, of)]


def _has_rows(
    ends: Sequence[tuple[Var, Taken | None]], stage: int, tiles: Mapping[Var, Sequence[Tile]], axes: Mapping[Var, int]
) -> bool:
    """Return whether a stage has all rows of divided leaves among these."""
    of_leaves = [(v, of) for v, of in ends if v in tiles]
    own = lambda v, of: any(t.start <= of.start and of.stop <= t.stop for t in tiles[v] if t.stage == stage)
    return bool(of_leaves) and all(of is not None and of.dim == axes[v] and own(v, of) for v, of in of_leaves)


def _in_parts(eqn: Eqn, rows: Sequence[tuple[list[Taken], int]], taker: RowTaker) -> list[tuple[Eqn, int]]:
    """Return the reduction of each stage's rows, and the sums of these from stage to stage."""
    found, before = list[tuple[Eqn, int]](), list[Var]()
    for k, (of_inputs, stage) in enumerate(sorted(rows, key=operator.itemgetter(1))):
        inputs = [taker.take(v, of) for v, of in zip(eqn.invars, of_inputs, strict=True)]
        part, total = core.Var(eqn.outvars[0].aval), core.Var(eqn.outvars[0].aval)
        total = eqn.outvars[0] if k == len(rows) - 1 else total
        found.append((eqn.replace(invars=inputs, outvars=[part]), stage))
        if before:
            found.append((equation(ADDED[eqn.primitive.name], [before[-1], part], total), stage))
        before.append(total if before else part)
    return found


def _joined(result: Var, rows: Sequence[tuple[list[Taken], int]], taker: RowTaker) -> list[tuple[Eqn, int]]:
    """Return the equations of each stage's rows of a result, and of the last stage, which joins them."""
    parts = [taker.take(result, of) for (of,), _ in rows]
    found = [(taker.made[part], stage) for part, (_, stage) in zip(parts, rows, strict=True)]
    join = equation(lambda *xs: lax.concatenate(xs, rows[0][0][0].dim), parts, result)
    return [*found, (join, max(stage for _, stage in rows))]

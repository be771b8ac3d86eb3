"""Divide a function's operations into stages: who runs which, takes which rows, and has what is small.

scan over 10 layers, cut after 4     stage 0: scan over 4 layers, of rows 0-3     stage 1: scan over 6, of rows 4-9
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Function, Var
from ipu_jax.base.jaxprs import (
    checkpointed,
    how_of,
    in_order,
    in_scan_parts,
    needed,
    part_of,
    read_by,
    shape_of,
    variables,
)
from ipu_jax.base.row_rules import Taken
from ipu_jax.core.cutting.division import Division, NewValue
from ipu_jax.core.cutting.rows import RowTaker, equation, slicing, taken_by
from ipu_jax.core.cutting.scan_layers import ScanLayer, ScanStack
from ipu_jax.core.cutting.trace import SMALL, FunctionTrace
from ipu_jax.core.layout.tree_parts import Part
from ipu_jax.core.programs.cost import bytes_of

_Rows = dict[tuple[Var, int, int], Var]
"""Per value, first row, and the row after the last, the variable of these rows."""
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


def divide(
    trace: FunctionTrace, of_stages: Iterable[Collection[Eqn]], homes: Mapping[int, int] | None = None
) -> Division:
    """Divide a function into stages. Each runs its operations in the order of the function.

    Args:
        trace: the trace of the function.
        of_stages: the operations on activations of each stage.
        homes: per whole leaf of the weights a stage that holds it, if it is known who holds them, and there is no
            backward. Otherwise stages will hold what they read, each its rows of a leaf in one part.
    """
    parts, of_state, again = _parts(trace)
    turn = {id(op): t for t, op in enumerate(trace.activations)}
    of_stages = [sorted(of_stage, key=lambda op: turn[id(op)]) for of_stage in of_stages]
    runs = _runs_of_layers(of_stages)
    taker = trace.row_taker()
    rows = _rows_read(runs, taker)
    slices: dict[Var, Eqn] = {}
    for eqn in taker.equations:
        is_activation = any(v in slices or trace.kinds.get(v) == "a" for v in variables(eqn.invars))
        (slices if is_activation else again)[eqn.outvars[0]] = eqn
    scans = [*zip(runs, (_shorter(run, rows) for run in runs), strict=True)]
    own = _own_equations(of_stages, scans, slices)
    new_state, late = _new_rows(trace, of_stages, scans)
    for s, eqn in ((s, eqn) for s, eqns in enumerate(late) for eqn in eqns):
        if taken_by(eqn) is not None and not trace.is_activation(eqn.invars[0]):
            again[eqn.outvars[0]] = eqn
        else:
            own[s].append(eqn)
    _find_parts(trace, parts, of_state, again)
    if homes is None:
        own = _under_checkpoints(trace, own, {*variables(trace.results), *(held.new for held in new_state)})
    division = Division(trace, own, parts, of_state, again, new_state)
    division = _with_small_values(division, homes or {}, taker)
    return _with_rows_gathered(division) if homes is None else division


def _parts(trace: FunctionTrace) -> tuple[dict[Var, Part], dict[Var, Part], dict[Var, Eqn]]:
    """Return the parts of weights and of state that variables are, and the equation of each value but activations."""
    parts, of_state = ({v: Part(k) for k, v in enumerate(leaves)} for leaves in (trace.params, trace.state))
    again = {v: op for op in trace.operations for v in op.outvars if not trace.is_activation(v)}
    return parts, of_state, again


def _find_parts(trace: FunctionTrace, parts: dict[Var, Part], of_state: dict[Var, Part], again: dict[Var, Eqn]) -> None:
    """Make slices of leaves parts of them; of the state, if its leaf is stacked, or the function only reads it."""
    for var, eqn in [*again.items()]:
        if (taken := taken_by(eqn)) is None:
            continue
        held, whole = (parts, trace.params) if eqn.invars[0] in parts else (of_state, trace.state)
        leaf = held.get(eqn.invars[0])
        if leaf is None or trace.axes.get(whole[leaf.leaf], 0) != taken.dim:
            continue
        if held is parts or leaf.leaf in trace.stacked or not trace.new_state:
            del again[var]
            held[var] = leaf.part(taken.start, taken.stop, taken.dim)


# the equations of each stage


def _runs_of_layers(of_stages: Iterable[list[Eqn]]) -> list[list[ScanLayer]]:
    """Return the layers of all scans, grouped by scan and stage."""
    runs: dict[tuple[int, int], list[ScanLayer]] = {}
    for s, of_stage in enumerate(of_stages):
        for op in of_stage:
            if isinstance(op, ScanLayer):
                runs.setdefault((id(op.scan), s), []).append(op)
    return [*runs.values()]


def _range_of(run: list[ScanLayer]) -> tuple[int, int]:
    """Return the first row of a scan's inputs that a run of its layers reads, and the one after the last."""
    params, start, stop = run[0].scan.params, run[0].number, run[-1].number + 1
    return (params["length"] - stop, params["length"] - start) if params["reverse"] else (start, stop)


def _rows_read(runs: Iterable[list[ScanLayer]], taker: RowTaker) -> _Rows:
    """Return a variable for each range of rows that runs of layers read, unless they read all rows."""
    parts = [run for run in runs if len(run) < run[0].scan.params["length"]]
    read = [
        (v, *_range_of(run)) for run in parts for v in variables(in_scan_parts(run[0].scan.params, run[0].invars)[2])
    ]
    return {(v, start, stop): taker.take(v, Taken(0, start, stop)) for v, start, stop in read}


def _shorter(run: list[ScanLayer], rows: _Rows) -> Eqn:
    """Return the equation of a scan over a run of layers."""
    scan, length = run[0].scan, len(run)
    if length == scan.params["length"]:
        return scan.replace(invars=run[0].invars)
    fixed, carry, stacked = in_scan_parts(scan.params, run[0].invars)
    xs = [v if isinstance(v, core.Literal) else rows[(v, *_range_of(run))] for v in stacked]
    ys = [core.Var(v.aval.update(shape=(length, *v.aval.shape[1:]))) for v in scan.outvars[len(carry) :]]
    params = {**scan.params, "length": length}
    if isinstance(params.get("unroll"), int):
        params["unroll"] = min(params["unroll"], length)
    return scan.replace(invars=[*fixed, *carry, *xs], outvars=[*run[-1].outvars[: len(carry)], *ys], params=params)


def _own_equations(
    of_stages: list[list[Eqn]], runs: list[tuple[list[ScanLayer], Eqn]], slices: dict[Var, Eqn]
) -> list[list[Eqn]]:
    """Return the equations of each stage, with one for its layers of a scan, and one that joins what these return."""
    scans: dict[int, list[Eqn]] = {}
    placed: dict[int, list[Eqn]] = {}  # in place of the last layer of a run
    for run, scan in runs:
        scans.setdefault(id(run[0].scan), []).append(scan)
        before = in_order([slices[v] for v in variables(scan.invars) if v in slices], [*slices.values()])
        placed[id(run[-1])] = [*(eqn for eqn in before if slices.pop(eqn.outvars[0], None)), scan]

    def in_place_of(op: Eqn) -> list[Eqn]:
        if isinstance(op, ScanLayer):
            return placed.get(id(op), [])
        if not isinstance(op, ScanStack):
            return [op]
        at, of_scan = op.scan.outvars.index(op.outvars[0]), scans[id(op.scan)]
        parts = [scan.outvars[at] for scan in of_scan][:: -1 if op.scan.params["reverse"] else 1]
        return [equation(lambda *xs: lax.concatenate(xs, 0), parts, op.outvars[0])] if len(parts) > 1 else []

    return [[eqn for op in of_stage for eqn in in_place_of(op)] for of_stage in of_stages]


def _new_rows(
    trace: FunctionTrace, of_stages: list[list[Eqn]], runs: list[tuple[list[ScanLayer], Eqn]]
) -> tuple[list[NewValue], list[list[Eqn]]]:
    """Return the new rows of stacked leaves of the state, and per stage the equations that compute them."""
    if not trace.new_rows:
        return [], [[] for _ in of_stages]
    stage_of = {v: s for s, of_stage in enumerate(of_stages) for op in of_stage for v in op.outvars}
    taker = RowTaker({**trace.late_taker.made}, trace.late_taker.joined, trace.late_taker.rules)  # of this division
    late = [op for op in trace.operations if not isinstance(op, ScanLayer | ScanStack)]
    late = [op for op in late if op.outvars and trace.is_activation(op.outvars[0]) and op.outvars[0] not in stage_of]
    for run, scan in runs:
        _, carry, _ = in_scan_parts(scan.params, scan.invars)
        for stack, rows in zip(run[0].scan.outvars[len(carry) :], scan.outvars[len(carry) :], strict=True):
            taker.known[stack, Taken(0, *_range_of(run))] = rows
    found: list[NewValue] = []
    before: list[list[Eqn]] = [[] for _ in of_stages]
    for leaf, new_rows in trace.new_rows.items():
        new = trace.new_state[leaf]
        for s, of_stage in itertools.groupby(new_rows.rows, lambda row: stage_of[row[1]]):
            ends = sorted(end for part, _ in of_stage for end in part.rows or ())
            count, taken = len(taker.equations), Taken(new_rows.axis, ends[0], ends[-1])
            rows = taker.take(new, taken)
            own = taker.equations[count:]
            before[s] += [*needed(late, [rows, *read_by(own)]), *own]
            found.append(NewValue(Part(leaf) if rows is new else Part(leaf, taken[1:], taken.dim), s, rows))
    return found, before


def _under_checkpoints(trace: FunctionTrace, own: list[list[Eqn]], results: set[Var]) -> list[list[Eqn]]:
    """Return the equations of each stage, with each run of them that was under one `jax.checkpoint` under one again."""
    opened_of = lambda eqn: trace.opened.get(eqn.outvars[0]) if eqn.outvars else None
    found = []
    for of_stage in own:
        runs = [list(run) for _, run in itertools.groupby(of_stage, lambda eqn: id(opened_of(eqn)))]
        found.append([eqn for run in runs for eqn in _checkpointed(trace, own, opened_of(run[0]), run, results)])
    return found


def _checkpointed(
    trace: FunctionTrace, own: list[list[Eqn]], opened: Eqn | None, equations: list[Eqn], results: set[Var]
) -> list[Eqn]:
    """Return a `jax.checkpoint` like `opened` of a stage's equations, if there is one, or else these."""
    if opened is None:
        return equations
    made, inside = {v for eqn in equations for v in eqn.outvars}, set(map(id, equations))
    read = {*read_by([eqn for eqns in own for eqn in eqns if id(eqn) not in inside])}
    outvars = [v for eqn in equations for v in eqn.outvars if v in read or v in results]
    constants = {*trace.closed.jaxpr.constvars}  # the first inputs, as where jax closes over them
    inputs = sorted((v for v in read_by(equations) if v not in made), key=lambda v: v not in constants)
    invars = list(dict.fromkeys(inputs))
    run = checkpointed(core.jaxpr_as_fun(part_of(trace.closed, invars, equations, outvars)), **how_of(opened))
    (eqn,) = jax.make_jaxpr(run)(*(shape_of(v.aval) for v in invars)).jaxpr.eqns
    return [eqn.replace(invars=invars, outvars=outvars, source_info=opened.source_info)]


# small values and rows of leaves: which stage has them


def _with_small_values(division: Division, homes: Mapping[int, int], taker: RowTaker) -> Division:
    """Return the division in which what is small and computed from weights alone, such as a penalty, has a stage.

    The stage that has the weights computes it. Otherwise the stage that needs it would have to hold all of them, too.
    """
    own, trace, without = division.own, division.trace, division
    small: list[tuple[Eqn, set[Part], int | None]] = [(*found, None) for found in _small_operations(division)]
    if not small:
        return division
    results = {v for op, _, _ in small for v in op.outvars}
    read = [division.needs([v for v in read_by(eqns) if v not in results], s).weights for s, eqns in enumerate(own)]
    if not homes:
        division, small = _with_sums(division, small, read, taker)
    needed = division.needs([*read_by([eqn for eqns in own for eqn in eqns]), *trace.results], -1).equations
    small = [of_op for of_op in small if id(of_op[0]) in set(map(id, needed))]
    results = {v for op, _, _ in small for v in op.outvars}
    held = {Part(leaf): s for leaf, s in homes.items()}  # the first stage that reads each part for something else
    for s, of_stage in enumerate(read):
        for v in of_stage:
            held.setdefault(division.parts[v], s)
    placed: dict[Var, int] = {}
    for op, of_op, home in small:
        before = [placed.get(v) for v in variables(op.invars) if v in results]
        at = [next((s for part, s in held.items() if part.holds(own_part)), None) for own_part in of_op]
        if home is not None or None not in (*before, *at):
            stage = max([*filter(None, before), *filter(None, at)], default=0)
            placed |= dict.fromkeys(op.outvars, stage if home is None else home)
    added = [[op for op, *_ in small if placed.get(op.outvars[0]) == s] for s in range(len(own))]
    found = dataclasses.replace(division, own=[in_order(eqns, eqns) for eqns in map(operator.add, own, added)])
    wanted = [[*read_by(eqns), *(value.new for value in found.state_of(s))] for s, eqns in enumerate(found.own)]
    early = (found.stage_of[v] > s for s, vs in enumerate(wanted) for v in found.needs(vs, s).incoming)
    return without if any(early) else found  # such a value is computed again, from weights, where it is needed early


def _with_sums(
    division: Division, small: list[Any], read: Sequence[Sequence[Var]], taker: RowTaker
) -> tuple[Division, list[Any]]:
    """Return the division, and small operations in which sums over a divided leaf are sums of the stages' own rows."""
    trace, rows = division.trace, dict[Var, dict[int, list[Any]]]()
    for s, of_stage in enumerate(read):
        for part in map(division.parts.__getitem__, of_stage):
            rows.setdefault(trace.params[part.leaf], {}).setdefault(s, []).append(part.rows)
    divided = {v: of_leaf for v, of_leaf in rows.items() if not any(None in of for of in of_leaf.values())}
    tiles = {v: _tiles(of_leaf, v.aval.shape[trace.axes.get(v, 0)]) for v, of_leaf in divided.items()}
    tiles = {v: of_leaf for v, of_leaf in tiles.items() if len(of_leaf) > 1}
    leaf_of = lambda v: trace.params[division.parts[v].leaf]
    needs_all = lambda v: any(leaf_of(part) in tiles for part in division.needs([v], -1).weights)
    found: list[Any] = []
    for op, of_op, _ in small if tiles else ():
        parts = sum_of_parts(op, taker, tiles, trace.axes, needs_all)
        found += [(eqn, set[Part](), stage) for eqn, stage in parts] or [(op, of_op, None)]
    if not tiles:
        return division, small
    new = {v: eqn for eqn in [*taker.equations, *(op for op, *_ in found)] for v in eqn.outvars}
    again, parts = {**division.again, **new}, dict(division.parts)
    _find_parts(trace, parts, dict(division.of_state), again)
    return dataclasses.replace(division, parts=parts, again=again), found


def small_values(trace: FunctionTrace) -> set[Var]:
    """Return the values that are computed from larger weights alone: the stage with the weights can send them."""
    parts, of_state, again = _parts(trace)
    _find_parts(trace, parts, of_state, again)
    return {v for op, _ in _small_operations(Division(trace, [], parts, of_state, again, [])) for v in op.outvars}


def _small_operations(division: Division) -> list[tuple[Eqn, set[Part]]]:
    """Return the operations that compute small results from larger weights, and the parts of these that each reads."""
    found: list[tuple[Eqn, set[Part]]] = []
    results: set[Var] = set()
    trace, parts = division.trace, division.parts
    for op in trace.operations:
        if op.effects or trace.kinds[op.outvars[0]] != "w" or op.outvars[0] in parts:
            continue
        size = bytes_of([v.aval for v in op.outvars])
        if size > SMALL:
            continue
        inputs = variables(op.invars)
        read = division.needs([v for v in inputs if v not in results], -1).weights
        if results.intersection(inputs) or bytes_of([v.aval for v in read]) > 8 * size:
            found.append((op, {parts[v] for v in read}))
            results.update(op.outvars)
    return found


def _with_rows_gathered(division: Division) -> Division:
    """Return the division with each stage's rows of a leaf in one part, which together are the leaf.

    Where a stage reads the leaf whole, or two stages read one row, or one stage reads all of it, rows are slices of
    the leaf.
    """
    trace, parts, again = division.trace, dict(division.parts), dict(division.again)
    if len(parts) == len(trace.params):
        return division
    read: dict[int, dict[int, list[Var]]] = {}  # per leaf and stage, the variables
    for s, piece in enumerate(division.pieces):
        for v in piece.weights:
            read.setdefault(parts[v].leaf, {}).setdefault(s, []).append(v)
    for leaf, by_stage in read.items():
        rows = {v: parts[v].rows for of_stage in by_stage.values() for v in of_stage}
        whole = trace.params[leaf]
        dim = trace.axes.get(whole, 0)
        of_stages = {s: [rows[v] for v in vs] for s, vs in by_stage.items()}
        tiles = [] if None in rows.values() else _tiles(of_stages, whole.aval.shape[dim])
        if len(tiles) < 2:
            again |= {v: slicing(whole, Taken(dim, *of_var), v) for v, of_var in rows.items() if of_var is not None}
            continue
        for first, last, s in tiles:
            part = core.Var(whole.aval.update(shape=Taken(dim, first, last).of(whole.aval.shape)))
            parts[part] = Part(leaf, (first, last), dim)
            for v in by_stage[s]:
                start, stop = rows[v] or (0, 0)
                if first <= start and stop <= last and (start, stop) != (first, last):
                    again[v] = slicing(part, Taken(dim, start - first, stop - first), v)
    return dataclasses.replace(division, parts=parts, again=again)


def _tiles(rows: dict[int, list[Any]], count: int) -> list[Tile]:
    """Return the rows of each stage, in order, of all `count` rows of a leaf; [] if two stages read one row.

    Args:
        rows: per stage, the rows that it reads; those that no stage reads go with their neighbours.
        count: the number of the leaf's rows.
    """
    runs: list[Tile] = []
    for start, stop, s in sorted((*of_rows, s) for s, of_stage in rows.items() for of_rows in of_stage):
        if runs and runs[-1].stage == s:
            runs[-1] = Tile(runs[-1].start, max(runs[-1].stop, stop), s)
        elif runs and start < runs[-1].stop:
            return []
        else:
            runs.append(Tile(start, stop, s))
    ends = [0, *(start for start, _, _ in runs[1:]), count]
    return [Tile(*of_tile, s) for of_tile, (_, _, s) in zip(itertools.pairwise(ends), runs, strict=True)]


def sum_of_parts(
    eqn: Eqn,
    taker: RowTaker,
    tiles: Mapping[Var, Sequence[Tile]],
    axes: Mapping[Var, int],
    needs_all: Callable[[Var], bool],
) -> list[tuple[Eqn, int]]:
    """Return equations that compute a value from a part for each stage, with the stages that run them; [] if none can.

    sum(w ** 2)      stage 0: a = sum(w[0:4] ** 2)      stage 1: b = a + sum(w[4:8] ** 2)      stage 2: b + ...

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

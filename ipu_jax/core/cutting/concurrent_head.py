"""Put the head of a traced function on all IPUs at once: its last product with a leaf, and the loss of it.

    x = table[tokens]                  x = everywhere[table, tokens]            each IPU has rows of the table
    .. layers ..                 ->    .. layers ..
    loss(x @ table.T + b, y)           loss = everywhere[table, b, x, y]        and of the bias

Other leaves with as many rows are split as well, if that gathers nothing more. Look-ups in such leaves run on all IPUs,
too: one in a tied table must, and an embedding table of its own is as large as the head's.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from jax.extend import core
from jax.sharding import Mesh, PartitionSpec

from ipu_jax.base.annotations import Eqn, Jaxpr, Var
from ipu_jax.base.jaxprs import (
    CALLS,
    all_equations,
    closed_of,
    depending,
    how_of,
    part_of,
    read_by,
    scan_parts,
    shape_of,
    traced_on,
    variables,
)
from ipu_jax.base.row_rules import Taken
from ipu_jax.core.cutting.cut import Cut, Places
from ipu_jax.core.cutting.everywhere import everywhere, is_everywhere, traced_for, under_checkpoint
from ipu_jax.core.cutting.fused_head import with_fused_loss
from ipu_jax.core.cutting.own_rows import RULES
from ipu_jax.core.cutting.rows import RowTaker, between
from ipu_jax.core.cutting.scan_layers import ScanLayer, ScanStack
from ipu_jax.core.cutting.shares import in_shares
from ipu_jax.core.cutting.split_leaves import bytes_of_part
from ipu_jax.core.cutting.trace import FunctionTrace, Kind, Read
from ipu_jax.core.cutting.users_code import at_line
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.programs.cost import bytes_of

_Rows = tuple[Var, int]
"""A leaf, and the dim of its rows."""


def with_concurrent_head(
    trace: FunctionTrace, ipus: int, mesh: Mesh | None = None, split: Sequence[_Rows] | None = None
) -> FunctionTrace:
    """Return a trace whose head, and look-ups in leaves with as many rows, are operations on all IPUs.

    Args:
        trace: the trace of a loss function, or of another function of its weights.
        ipus: the number of IPUs. On one, the trace stays as it is.
        mesh: the mesh that the trace is for, if the function names further axes of one.
        split: for another function, the leaves that lie split, and the dim of each: its head is the last product with
            one of them, if there is any.

    Raises:
        ValueError: a loss function has no product with a leaf after which there are no layers.
    """
    products, rows = _head(trace, split)
    if ipus == 1:
        return trace
    following = depending(trace.activations, [v for op in products for v in op.outvars])
    head = [op for op in trace.activations if op in products or not following.isdisjoint(variables(op.invars))]
    of_size = lambda size: [
        (leaf, dim) for leaf in trace.params for dim, of in enumerate(leaf.aval.shape) if of == size
    ]
    alike = split if rows is None or split is not None else [rows, *of_size(rows[0].aval.shape[rows[1]])]
    lookups = [op for op in trace.activations if op not in head and _looks_up(op, trace, rows, alike or ())]
    on_ipus = functools.partial(_everywhere, trace, alike or (), ipus, mesh, must=split is not None)
    new = {id(op): on_ipus([op], op.outvars) for op in lookups} | {id(op): [] for op in head}
    results = [v for v in dict.fromkeys(variables(trace.results)) if v in following]
    operations = [eqn for op in trace.operations for eqn in new.get(id(op), [op])]
    return _with_operations(trace, operations + (on_ipus(head, results) if head else []))


def _with_operations(trace: FunctionTrace, operations: list[Eqn]) -> FunctionTrace:
    found = trace.with_operations(operations)
    found.made_by = {v: op for op in operations for v in op.outvars}
    padded: dict[Var, Kind] = {v: "w" for v in found.made_by if v not in trace.kinds}
    found.kinds = trace.kinds | padded
    on_ipus = {v for op in operations if is_everywhere(op) for v in op.outvars}
    found.opened = {v: op for v, op in trace.opened.items() if v not in on_ipus}
    return found


# which operations are the head


def _head(trace: FunctionTrace, split: Sequence[_Rows] | None) -> tuple[list[Eqn], _Rows | None]:
    """Return the last products with a leaf, and the leaf: the largest with a product that no layer follows.

    If it is known which leaves lie split, it is one of them, or None.
    """
    taker, followed = trace.row_taker(), set[Var]()
    last: list[tuple[Eqn, list[_Rows]]] = []
    for op in reversed(trace.activations):
        is_last, rows = followed.isdisjoint(op.outvars), _multiplied(op, taker, trace)
        last += [(op, rows)] if rows and is_last else []
        if rows or not is_last or isinstance(op, ScanLayer | ScanStack):
            followed.update(variables(op.invars))
    found = [rows for _, of_op in last for rows in of_op]
    if split is not None:
        found = [rows for rows in found if rows in split]
    if not found and split is not None:
        return [], None
    if not found:
        raise ValueError(
            "head='concurrent': the function has no product of an activation with a whole leaf of params near its end: "
            "leave head= out, or run the head on all IPUs by ipu_jax.everywhere"
        )
    leaf = max(found, key=lambda rows: rows[0].aval.size)
    return [op for op, of_op in last if leaf in of_op], leaf


def _multiplied(op: Eqn, taker: RowTaker, trace: FunctionTrace) -> list[_Rows]:
    """Return the whole leaves that an operation multiplies with, and the dim of each that is not contracted."""
    if isinstance(op, ScanLayer | ScanStack):
        return []
    found = [(v, rows) for v, dim in _operands(op) for rows in _rows_of(v, dim, taker, trace)]
    return [rows for v, rows in found if rows[0].aval.size == v.aval.size]


def _operands(op: Eqn) -> Iterator[_Rows]:
    """Yield the operands of products in an operation, and the only dim of each that is not contracted."""
    name = op.primitive.name
    if name == "dot_general":
        contracted, batch = op.params["dimension_numbers"]
        for k, v in enumerate(op.invars):
            free = [d for d in range(v.aval.ndim) if d not in (*contracted[k], *batch[k])]
            if len(free) == 1 and isinstance(v, core.Var):
                yield v, free[0]
    elif name in CALLS or name == "scan":
        jaxpr = closed_of(op.params[CALLS.get(name, "jaxpr")]).jaxpr
        fixed = scan_parts(op.params)[0] if name == "scan" else len(jaxpr.invars)
        outer = dict(zip(jaxpr.invars[:fixed], op.invars[:fixed], strict=True))
        taker = RowTaker({v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}, {}, RULES)
        for operand, dim in (rows for eqn in jaxpr.eqns for rows in _operands(eqn)):
            for v, of in taker.reached(operand, Taken(dim, 0, 1)):
                if of is not None and isinstance(outer.get(v), core.Var):
                    yield outer[v], of.dim


def _rows_of(v: Var, dim: int, taker: RowTaker, trace: FunctionTrace) -> list[_Rows]:
    """Return the leaves whose rows are the rows of a value along a dim."""
    ends = taker.reached(v, Taken(dim, 0, 1))
    return [(leaf, of.dim) for leaf, of in ends if of is not None and of[1:] == (0, 1) and leaf in trace.params]


def _looks_up(op: Eqn, trace: FunctionTrace, of_head: _Rows | None, alike: Sequence[_Rows]) -> bool:
    """Return whether an operation looks rows up in the leaf of the head, or in one like it."""
    if isinstance(op, ScanLayer | ScanStack) or op.primitive.name not in ("gather", "dot_general"):
        return False
    if op.primitive.name == "gather":
        at, sizes = op.params["dimension_numbers"].start_index_map, op.params["slice_sizes"]
        read = [(op.invars[0], dim) for dim in at if sizes[dim] == 1]
    else:
        contracted = op.params["dimension_numbers"][0]
        read = [(v, dim) for v, dims in zip(op.invars, contracted, strict=True) for dim in dims]
    taker = trace.row_taker()
    found = [rows for v, dim in read if isinstance(v, core.Var) for rows in _rows_of(v, dim, taker, trace)]
    is_wide = op.primitive.name == "gather" and any(rows in alike for rows in found)
    return is_wide or of_head in found


# operations on all IPUs


def _everywhere(
    trace: FunctionTrace,
    splits: Sequence[_Rows],
    ipus: int,
    mesh: Mesh | None,
    ops: list[Eqn],
    results: list[Var],
    *,
    must: bool,
) -> list[Eqn]:
    """Return operations as one on all IPUs, after the equations that pad its operands.

    What they read is computed there, too, if it follows from the batch, or from leaves that can be split. Such a leaf
    is split if it `must` be, or if no more is gathered then.
    """
    leaves = [leaf for leaf, _ in splits]
    own = _with_inputs(trace, ops, leaves)
    constants = {*trace.batch, *trace.key, *trace.constants, *trace.closed.jaxpr.constvars}
    for op in ops:
        if op.primitive.name == "dot_general" and _multiplied(op, trace.row_taker(), trace):
            own = with_fused_loss(own, results, op, leaves, constants)
    made = {v for op in own for v in op.outvars}
    inputs = [v for v in dict.fromkeys(read_by(own, results)) if v not in made]
    jaxpr = part_of(trace.closed, inputs, own, results).jaxpr.replace(constvars=[])
    dims, best = dict[Var, int](), (float("inf"), list[Eqn]())
    for leaf, dim in splits:
        if leaf in inputs and leaf not in dims:
            eqns = _traced(closed_of(jaxpr), inputs, dims | {leaf: dim}, results, ipus, mesh)
            inside = all_equations(eqns[-1].params["jaxpr"].jaxpr)
            gathers = sum(eqn.primitive.name == "all_gather" for eqn in inside)
            if must or gathers <= best[0]:
                dims, best = dims | {leaf: dim}, (gathers, eqns)
    opened = trace.opened.get(ops[0].outvars[0])
    eqns = [eqn.replace(source_info=ops[0].source_info) for eqn in best[1]]
    return eqns if opened is None else [*eqns[:-1], under_checkpoint(eqns[-1], how_of(opened))]


def _with_inputs(trace: FunctionTrace, ops: list[Eqn], leaves: Sequence[Var]) -> list[Eqn]:
    """Return operations and those that compute what they read, from the batch, or from these leaves and others."""
    of_leaves = depending([op for op in trace.operations if not _is_activation(trace, op)], leaves)
    found, waiting = {id(op) for op in ops}, read_by(ops)
    while waiting:
        op = trace.made_by.get(waiting.pop())
        if op is None or id(op) in found or _is_activation(trace, op):
            continue
        if trace.kinds[op.outvars[0]] == "b" or not of_leaves.isdisjoint(op.outvars):
            found.add(id(op))
            waiting += variables(op.invars)
    return [op for op in trace.operations if id(op) in found]


def _is_activation(trace: FunctionTrace, op: Eqn) -> bool:
    return bool(op.effects) or trace.is_activation(op.outvars[0])


def _traced(
    closed: Jaxpr, inputs: Sequence[Var], dims: dict[Var, int], results: Sequence[Var], ipus: int, mesh: Mesh | None
) -> list[Eqn]:
    """Return the equations of a closed jaxpr on all IPUs, with these inputs split along `dims`."""
    splits = [(dims[v], v.aval.shape[dims[v]]) if v in dims else None for v in inputs]
    specs = tuple(PartitionSpec() if split is None else PartitionSpec(*[None] * split[0], IPU_AXIS) for split in splits)
    run = everywhere(in_shares(closed, splits), in_specs=specs)
    trace = functools.partial(traced_for, ipus, run, *(shape_of(v.aval) for v in inputs))
    found, _ = trace() if mesh is None else traced_on(mesh, trace)
    return between(found, inputs, results)


_WORK: Final = 0.02
"""The part of the local work that every IPU may do again beside its operations on all IPUs, for a better border."""
_WEIGHTS: Final = 0.05
"""The part of all weights that every IPU may hold for that."""


def cut_around(
    places: Places, ipus: Sequence[int | None], marks: Sequence[str], cut: Callable[[Places], Cut | None]
) -> Cut | None:
    """Return a cut with a concurrent stage for each run of operations on all IPUs, or None if there is none.

        operations   look up, add  |  block ........ block  |  block ........ block  |  norm, fused loss
        stages       all IPUs      |  IPU 0                 |  IPU 1                 |  all IPUs

    Such a stage has what is cheap beside its operations. The rest is cut as without them. So an operation in the middle
    of IPU 0's part makes three stages of it: IPU 0, all IPUs, IPU 0.

    Args:
        places: the places at which the function can be cut.
        ipus: the IPU of each local stage.
        marks: the names of values after which the function asks to be cut; no concurrent stage reaches beyond one.
        cut: cuts the local operations into as many stages.

    Raises:
        ValueError: a function can be cut nowhere near an operation on all IPUs.
    """
    at = [t for t, op in enumerate(places.operations) if is_everywhere(op)]
    if not at:
        return cut(places)
    pieces = _pieces(places, at, [t for t in places.marked(marks) if places.allowed[t]])
    inside = np.zeros(len(places.operations), bool)
    for start, end in pieces:
        inside[start:end] = True
    if inside.all():
        return places.cut_at([], [None])
    found = cut(_local(places, pieces, inside))
    if found is None:
        return None
    ends = sorted({*found.ends, *itertools.chain(*pieces)} - {0})
    stage_at = lambda t: next(s for s, end in enumerate(found.ends) if t < end)
    of_stages = [None if inside[start] else ipus[stage_at(start)] for start in [0, *ends[:-1]]]
    return places.cut_at(ends[:-1], of_stages, marked=found.marked)


def _local(places: Places, pieces: Iterable[tuple[int, int]], inside: np.ndarray) -> Places:
    """Return the places of the local operations: concurrent ones have no work, and no place is inside of a piece."""
    local, count = copy.copy(places), len(inside)
    local.work = np.where(inside, 0.0, places.work)
    local.allowed = places.allowed & ~np.append(inside[1:] & inside[:-1], True)
    for start, end in pieces:  # a stage begins there anyway
        if start == 0:
            local.allowed[end - 1] = False
        elif end == count:
            local.allowed[start - 1] = False
    return local


def _pieces(places: Places, at: Sequence[int], marked: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first operation of each concurrent stage, and the one after its last, for the operations `at`.

    A stage takes operations beside one on all IPUs up to where the fewest bytes are live, and as many as it may, but
    none beyond a marked place.
    """
    count, work = len(places.operations), places.work.copy()
    work[list(at)] = 0.0
    most = _WORK * float(work.sum()) / max(2, len(at)), _WEIGHTS * bytes_of([v.aval for v in places.trace.params])
    pieces: list[tuple[int, int]] = []
    for t in at:
        first = max([m + 1 for m in marked if m < t], default=0)
        last = min([m + 1 for m in marked if m >= t], default=count)
        before, after = (_cheap(places, work, most, of) for of in (range(t - 1, -1, -1), range(t + 1, count)))
        starts = [s for s in (t, *before) if s >= first and (s == 0 or places.allowed[s - 1])]
        ends = [e + 1 for e in (t, *after) if e < last and (e + 1 == count or places.allowed[e])]
        if not starts or not ends:
            raise ValueError(
                f"everywhere{at_line(places.operations[t])}: the function can be cut at no place before it, or at none "
                "after it: leaves of a state, or an array of keys, hold it together with other operations"
            )
        start = 0 if 0 in starts else min(starts, key=lambda s: (places.sent[s - 1], s))
        end = count if count in ends else min(ends, key=lambda e: (places.sent[e - 1], -e))
        if pieces and start <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(end, pieces[-1][1]))
        else:
            pieces.append((start, end))
    return pieces


def _cheap(places: Places, work: np.ndarray, most: tuple[float, float], beside: Iterable[int]) -> list[int]:
    """Return the first ones of these operations that all IPUs may run: within the most work, and bytes of weights."""
    found, done, read = list[int](), 0.0, set[Read]()
    for s in beside:
        done += work[s]
        if not is_everywhere(places.operations[s]):
            read |= {of for of in places.trace.reads[id(places.operations[s])] if of[0] == "params"}
        if done > most[0] or sum(bytes_of_part(places.trace.params[part.leaf], part) for _, part in read) > most[1]:
            break
        found.append(s)
    return found

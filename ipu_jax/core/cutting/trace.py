"""Lay a function open: one list of operations, in the order of its trace, and what each value depends on.

    weights -> "w"     computed again wherever a stage needs it: casts, transposed tables
    batch   -> "b"     the same: masks, positions, dropout's bits
    state   -> "s"     the same
    several -> "a"     an activation: computed once, by the stage in which its operation lies

Calls of `jax.jit` are inlined, and so is a `jax.checkpoint` around much of the work; each stage puts its part under one
again. A scan over stacked weights becomes an operation per layer, so that it can be cut between any two of them.
"""

import copy
import dataclasses
import functools
import itertools
import operator
import os
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import jax
from jax.extend import core

from ipu_jax.base.annotations import Batch, Eqn, Function, Jaxpr, Key, Params, Tree, Value, Var
from ipu_jax.base.checkpoints import plain
from ipu_jax.base.jaxprs import (
    CALLS,
    CHECKPOINTS,
    JITS,
    closed_of,
    differentiated_between,
    in_scan_parts,
    is_float,
    needed,
    scan_parts,
    variables,
)
from ipu_jax.core.cutting.known_places import at_known_places
from ipu_jax.core.cutting.rows import JOINS, RowTaker, Taken, slices_of_leaves, taken_by
from ipu_jax.core.cutting.scan_layers import ScanLayer, ScanStack, layers_of
from ipu_jax.core.layout.whole_tree import Part
from ipu_jax.core.programs.cost import bytes_of, equation_flops

_MUCH: Final = 0.2
"""The part of all FLOPs from which a `jax.checkpoint` is opened."""
INLINED: Final = (*JITS, "closed_call")
Kind = Literal["w", "b", "s", "a"]
Read = tuple[str, Part]
"""A leaf of the "params" or of the "state", or rows of it."""

SMALL: Final = 4096
"""Bytes up to which a value that is computed from larger weights is sent, so that the weights stay in one stage."""
_AGAIN: Final = 64
"""FLOPs per byte of a result from which it is cheaper to send it than to compute it in each stage that needs it."""
_NOT_THE_USERS: Final = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{os.sep}ipykernel_",  # a cell of a notebook: its file is called by a number
)


@dataclasses.dataclass(frozen=True)
class NewRows:
    """The new value of a leaf of the state that is held by rows.

    Attributes:
        axis: the dim along which the rows are.
        rows: rows of the leaf, first rows first, and an activation in whose stage their new value is computed.
        values: the activations from which new rows are computed.
    """

    axis: int
    rows: list[tuple[Part, Var]]
    values: set[Var]


@dataclasses.dataclass(eq=False)
class FunctionTrace:
    """A traced function, laid open.

    Attributes:
        closed: the jaxpr of the trace.
        params, state, batch, key: the variables of the leaves of each argument.
        constants: the values of the constants of inlined calls.
        outputs, aux, new_state: the results; the output of a loss function is its loss.
        operations: equations, `ScanLayer`s and `ScanStack`s that the results need, in order.
        kinds: the kind of each variable.
        made_by: the operation that computes a variable.
        axes: per leaf of which operations take rows, the dim along which these are.
        opened: the `jax.checkpoint` that was around the operation that computes a variable.
    """

    closed: Jaxpr
    params: list[Var]
    state: list[Var]
    batch: list[Var]
    key: list[Var]
    constants: dict[Var, Value]
    outputs: list[Var]
    aux: list[Var]
    new_state: list[Var]
    operations: list[Eqn]
    kinds: dict[Var, Kind] = dataclasses.field(default_factory=dict)
    made_by: dict[Var, Eqn] = dataclasses.field(default_factory=dict)
    axes: dict[Var, int] = dataclasses.field(default_factory=dict)
    opened: dict[Var, Eqn] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._open_checkpoints()
        results = self.results
        self.operations = needed(self.operations, results, effects=True)
        self._find_kinds()
        self._slice_leaves()
        if any(_is_over_weights(op, self.kinds) for op in self.operations):
            layers = [layers_of(op) if _is_over_weights(op, self.kinds) else [op] for op in self.operations]
            self.operations = needed([*itertools.chain(*layers)], results, effects=True)
            self._find_kinds()
            for op in self.operations:
                if isinstance(op, ScanLayer) and op.scan.outvars[0] in self.opened:
                    self.opened |= dict.fromkeys(op.outvars, self.opened[op.scan.outvars[0]])
        self.made_by = {v: op for op in self.operations for v in op.outvars}

    @property
    def results(self) -> list[Var]:
        return [*self.outputs, *self.aux, *self.new_state]

    @functools.cached_property
    def activations(self) -> list[Eqn]:
        """Return the operations that run once, in one stage: they compute activations, or have effects.

        Those that compute nothing but a leaf of the state from its new rows are not among them: see `new_rows`.
        """
        wanted = [v for k, v in enumerate(self.new_state) if k not in self.new_rows]
        wanted += [v for found in self.new_rows.values() for v in found.values]
        operations = needed(self.operations, [*self.outputs, *self.aux, *wanted], effects=True)
        return [op for op in operations if op.effects or self.kinds[op.outvars[0]] == "a"]

    @functools.cached_property
    def differentiated(self) -> set[Var]:
        """Return the values through which gradients go from the outputs to the weights."""
        return differentiated_between(self.operations, [v for v in self.params if is_float(v)], self.outputs)

    @functools.cached_property
    def reads(self) -> dict[int, set[Read]]:
        """Return, per activation's operation by its id, the weights and state that it reads, also through casts."""
        return self.reads_but_for(())

    def reads_but_for(self, sent: Collection[Var]) -> dict[int, set[Read]]:
        """Return `reads` without what is read only through these values."""
        leaves = [("params", self.params), ("state", self.state)]
        sliced: dict[Var, Read] = {v: (name, Part(k)) for name, of in leaves for k, v in enumerate(of)}
        own = {v: {leaf} for v, leaf in sliced.items()}  # what follows from leaves
        taker = self.row_taker()
        found: dict[int, set[Read]] = {}
        for op in self.operations:
            others, rows = op.invars, list[tuple[Var, Taken | None]]()
            if isinstance(op, ScanLayer):
                fixed, carry, stacked = in_scan_parts(op.scan.params, op.invars)
                others = [*fixed, *carry]
                rows = [end for v in variables(stacked) for end in taker.reached(v, Taken(0, op.row, op.row + 1))]
            read = set[Read]().union(*(own.get(v, ()) for v in variables(others)))
            for v, of_leaf in rows:
                is_part = of_leaf is not None and self.axes.get(v, 0) == of_leaf.dim and v in sliced
                read |= {self._rows_of(sliced[v], of_leaf)} if is_part else own.get(v, set())
            if op.effects or self.is_activation(op.outvars[0]):
                found[id(op)] = read
                continue
            taken = taken_by(op)
            if taken is not None and op.invars[0] in sliced and self.axes.get(op.invars[0], 0) == taken.dim:
                sliced[op.outvars[0]] = self._rows_of(sliced[op.invars[0]], taken)
                read = {sliced[op.outvars[0]]}
            own |= {v: read for v in op.outvars if v not in sent}
        return found

    def _rows_of(self, leaf: Read, taken: Taken) -> Read:
        name, part = leaf
        return name, part.part(taken.start, taken.stop, taken.dim)

    def row_taker(self) -> RowTaker:
        """Return what follows rows of values back to leaves: through all operations that can run again, and joins."""
        made = {v: op for op in self.operations for v in op.outvars if not self.is_activation(v)}
        plain = (op for op in self.operations if not isinstance(op, ScanLayer | ScanStack))
        return RowTaker(made, {op.outvars[0]: op for op in plain if op.primitive.name in JOINS})

    @functools.cached_property
    def new_rows(self) -> dict[int, NewRows]:
        """Return, per leaf of the state whose rows layers read and replace, who computes these rows."""
        found = {k: self._new_rows(k) for k in range(len(self.new_state))}
        return {k: rows for k, rows in found.items() if rows is not None}

    @functools.cached_property
    def late_taker(self) -> RowTaker:
        """Return what follows rows of a new state back to their layers: also through what nothing else needs."""
        others = set(map(id, needed(self.operations, [*self.outputs, *self.aux], effects=True)))
        taker = self.row_taker()
        for op in self.operations:
            if isinstance(op, ScanStack):
                taker.joined[op.outvars[0]] = op
            elif id(op) not in others and not isinstance(op, ScanLayer):
                taker.made |= dict.fromkeys(op.outvars, op)
        return taker

    def _new_rows(self, k: int) -> NewRows | None:
        """Return who computes the rows of a leaf of the state; None if its stage needs all of them."""
        leaf, new, first = self.state[k], self.new_state[k], len(self.results) - len(self.new_state)
        others = [v for j, v in enumerate(self.results) if j != first + k]
        if not self.is_activation(new) or new in others or any(k in self.leaves_of(v) for v in others):
            return None
        at, axis = {v: t for t, op in enumerate(self.operations) for v in op.outvars}, self.axes.get(leaf, 0)
        anchors: list[Var] = []
        values: set[Var] = set()
        for row, ends in enumerate(self._late_ends(leaf, new, axis)):
            own = [v for v, _ in ends if self.is_activation(v)]
            layers = {id(self.made_by[v]) for v in own if isinstance(self.made_by[v], ScanLayer)}
            anchor = max(own, key=at.__getitem__, default=None) or self._first_reader(ends)
            wrong = any(of is not None and (v in own or (v is leaf and of != (axis, row, row + 1))) for v, of in ends)
            if wrong or anchor is None or (leaf, None) in ends or layers - {id(self.made_by[anchor])}:
                return None
            anchors.append(anchor)
            values.update([*own, anchor])
        starts = [row for row in range(len(anchors)) if row == 0 or anchors[row] is not anchors[row - 1]]
        parts = [Part(k, rows, axis) for rows in itertools.pairwise([*starts, len(anchors)])]
        rows = [*zip(parts, [anchors[row] for row in starts], strict=True)]
        kept = needed(self.operations, [*others, *values], effects=True)
        reads = set[Read]().union(*(self.reads.get(id(op), ()) for op in kept))
        read = [part for name, part in reads if (name, part.leaf) == ("state", k)]
        order = [at[anchor] for _, anchor in rows]
        is_read_by_rows = all(any(part.holds(of_layer) for part in parts) for of_layer in read)
        is_in_order = order in (sorted(order), sorted(order)[::-1])
        return NewRows(axis, rows, values) if len(rows) > 1 and is_read_by_rows and is_in_order else None

    def _late_ends(self, leaf: Var, new: Var, axis: int) -> list[list[tuple[Var, Taken | None]]]:
        """Return, per row of a leaf of the state, what its new value is computed from, before what only it needs."""
        shape, late = leaf.aval.shape, self.late_taker.made
        found = [self.late_taker.reached(new, Taken(axis, row, row + 1)) for row in range(shape[axis] if shape else 0)]
        rows_of: dict[Var, set[int]] = {}  # per value that only new rows need, which of them
        for row, ends in enumerate(found):
            waiting = [v for v, of in ends if of is None]
            while waiting:
                v = waiting.pop()
                if v in late and self.is_activation(v) and row not in rows_of.setdefault(v, set()):
                    rows_of[v].add(row)
                    waiting += variables(late[v].invars)
        for ends in found:
            waiting, ends[:] = [*ends], []
            while waiting:
                v, of = waiting.pop()
                is_own = of is None and len(rows_of.get(v, ())) == 1
                (waiting if is_own else ends).extend(
                    [(x, None) for x in variables(late[v].invars)] if is_own else [(v, of)]
                )
        return found

    def _first_reader(self, ends: Sequence[tuple[Var, Taken | None]]) -> Var | None:
        """Return a result of the first operation that reads rows of weights among these."""
        wanted = [("params", Part(self.params.index(v), of[1:], of.dim)) for v, of in ends if v in self.params and of]
        found = (op for op in self.operations if any(r in self.reads.get(id(op), ()) for r in wanted) and op.outvars)
        return next((op.outvars[0] for op in found), None)

    @property
    def stacked(self) -> dict[int, list[tuple[Part, Var]]]:
        """Return, per leaf of the state that is held by rows, the rows, and an activation of their layer, in order."""
        return {k: found.rows for k, found in self.new_rows.items()}

    @functools.cached_property
    def follows(self) -> dict[Var, set[int]]:
        """Return the leaves of the state from which each value follows, other than activations."""
        found = {v: {k} for k, v in enumerate(self.state)}
        for op in self.operations:
            leaves = set[int]().union(*(found.get(v, ()) for v in variables(op.invars)))
            found |= {v: leaves for v in op.outvars if leaves and not self.is_activation(v)}
        return found

    @functools.cached_property
    def kept_together(self) -> list[set[int]]:
        """Return sets of leaves of the state that cannot be copied. One stage holds all leaves of a set.

        An activation replaces such a leaf, or it follows from such a leaf. Other leaves can be updated by any stage.
        """
        kept = [{k} for k, new in enumerate(self.new_state) if self.is_activation(new)]
        results = [({k}, self.leaves_of(v) - {k}) for k, v in enumerate(self.new_state)]
        results += [(set[int](), self.leaves_of(v)) for v in self.aux]
        for own, leaves in [*filter(operator.itemgetter(1), results)] * len(self.state):  # one can need a later one
            if found := [of_stage for of_stage in kept if of_stage & (own | leaves)]:
                kept = [of_stage for of_stage in kept if of_stage not in found] + [own.union(*found)]
        return kept

    def leaves_of(self, result: Var) -> set[int]:
        """Return the leaves of the state that a stage needs to compute a result other than an activation."""
        return set() if isinstance(result, core.Literal) else self.follows.get(result, set())

    def is_activation(self, atom: Var) -> bool:
        return not isinstance(atom, core.Literal) and self.kinds[atom] == "a"

    def with_new_state_early(self) -> "FunctionTrace":
        """Return the trace in an order in which a new state is computed as soon as what it follows from is there.

        It may be computed after the whole model, `0.9 * old + 0.1 * means`, and belongs to the stage of its layer; an
        average of weights belongs to where these are first read.
        """
        if not self.new_state:
            return self
        for_others = set(map(id, needed(self.operations, [*self.outputs, *self.aux], effects=True)))
        turn: dict[Var, int] = {}
        turns: list[int] = []
        first: dict[Read, int] = {}
        for t, op in enumerate(self.operations):
            if not op.effects and not self.is_activation(op.outvars[0]):
                turns.append(-1)  # it is computed again wherever it is read
                continue
            reads = self.reads[id(op)]
            if id(op) in for_others:
                first |= {read: t for read in reads if read not in first}
                turns.append(t)
            else:
                made = [turn[v] for v in variables(op.invars) if v in turn]
                turns.append(max(made or [first[read] for read in reads if read in first], default=t))
            turn |= dict.fromkeys(op.outvars, turns[-1])
        found = copy.copy(self)
        for name in ("new_rows", "late_taker", "activations"):
            found.__dict__.pop(name, None)
        found.operations = [self.operations[t] for t in sorted(range(len(turns)), key=turns.__getitem__)]
        return found

    def _slice_leaves(self) -> None:
        """Let slices and scans over weights read rows of leaves wherever rows can be followed back to these."""
        leaves = [*self.params, *self.state]
        of_leaves = [*leaves, *(v for v, kind in self.kinds.items() if kind in ("w", "s"))]
        constants = dict(zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True)) | self.constants
        self.operations = at_known_places(self.operations, constants, of_leaves)
        self._find_kinds()
        taker = self.row_taker()
        for op in self.operations:
            if _is_over_weights(op, self.kinds):
                stacked, length = variables(in_scan_parts(op.params, op.invars)[2]), op.params["length"]
                for v, row in itertools.product(stacked, range(length)):
                    rows = [end for end in taker.reached(v, Taken(0, row, row + 1)) if end[0] in {*leaves}]
                    self.axes |= {leaf: of.dim for leaf, of in rows if of is not None and leaf not in self.axes}
        self.operations = needed(
            slices_of_leaves(self.operations, taker, leaves, self.axes), self.results, effects=True
        )
        self._find_kinds()

    def _open_checkpoints(self) -> None:
        """Inline each `jax.checkpoint` that is around much of the work."""
        if not any(op.primitive.name in CHECKPOINTS for op in self.operations):
            return
        flops = [equation_flops(op) for op in self.operations]
        found: list[Eqn] = []
        renamed: dict[Var, Var] = {}

        def atom(v: Var) -> Var:
            return v if isinstance(v, core.Literal) else renamed.get(v, v)

        for op, own in zip(self.operations, flops, strict=True):
            inputs = list(map(atom, op.invars))
            if op.primitive.name not in CHECKPOINTS or own < _MUCH * sum(flops):
                found.append(op.replace(invars=inputs))
                continue
            body, inner = closed_of(op.params["jaxpr"]), list[Eqn]()
            env = dict(zip(body.jaxpr.invars, inputs, strict=True))
            outputs = _inlined(body.jaxpr, env, op.source_info, inner, self.constants)
            renamed |= zip(op.outvars, outputs, strict=True)
            self.opened |= {v: op for eqn in inner for v in eqn.outvars}
            found += inner
        self.operations, self.outputs = found, list(map(atom, self.outputs))
        self.aux, self.new_state = list(map(atom, self.aux)), list(map(atom, self.new_state))

    def _find_kinds(self) -> None:
        kinds: dict[Var, Kind | None] = dict.fromkeys([*self.closed.jaxpr.constvars, *self.constants])
        flops: dict[Var, float] = {}  # of everything that a stage would have to compute again
        kinds |= dict.fromkeys(self.params, "w") | dict.fromkeys(self.state, "s")
        kinds |= dict.fromkeys([*self.batch, *self.key], "b")
        for op in self.operations:
            inputs = variables(op.invars)
            on = {kinds[v] for v in inputs} - {None}
            kind = "a" if len(on) > 1 or op.effects or isinstance(op, ScanLayer | ScanStack) else next(iter(on), None)
            if kind != "a":
                work = equation_flops(op) + sum(flops.get(v, 0.0) for v in {*inputs})
                size = bytes_of([v.aval for v in op.outvars])
                is_sum = op.primitive.name == "dot_general" and 8 * size < bytes_of([v.aval for v in inputs])
                if _contracts(op) and work > _AGAIN * size and not (kind == "w" and is_sum and size <= SMALL):
                    kind = "a"
                flops |= dict.fromkeys(op.outvars, work)
            kinds |= dict.fromkeys(op.outvars, kind)
        self.kinds = {v: kind or "b" for v, kind in kinds.items()}


def _contracts(eqn: Eqn) -> bool:
    """Return whether an equation can take many FLOPs per element of its result."""
    name = eqn.primitive.name
    return name in ("dot_general", "conv_general_dilated", "scan", "while", "cond") or any(
        True for _ in core.jaxprs_in_params(eqn.params)
    )


def trace_of(fn: Function, params: Params, state: Tree, microbatch: Batch, key: Key) -> tuple[FunctionTrace, Tree]:
    """Trace `fn(params, state, microbatch, key)` on shapes; return its trace and the shapes of its results.

    Args:
        fn: returns `(outputs, aux, new state)`; the outputs of a loss function are the loss.
        params, state, microbatch, key: trees of arrays or of their shapes; None for what the function does not take.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(params, state, microbatch, key)
    closed = plain(closed)
    invars = iter(closed.jaxpr.invars)
    of = lambda tree: [next(invars) for _ in jax.tree.leaves(tree)]
    arguments = of(params), of(state), of(microbatch), of(key)
    constants: dict[Var, Value] = {}
    operations: list[Eqn] = []
    found = iter(_inlined(closed.jaxpr, {}, None, operations, constants))
    outputs, aux, new_state = ([next(found) for _ in jax.tree.leaves(tree)] for tree in shapes)
    return FunctionTrace(closed, *arguments, constants, outputs, aux, new_state, operations), shapes


def _inlined(
    jaxpr: Jaxpr, env: dict[Var, Var], call: Any, operations: list[Eqn], constants: dict[Var, Value]
) -> list[Var]:
    """Append a jaxpr's equations to `operations`, with variables of their own, and return its results.

    They have the line of the call, whose `source_info` is given, where it is not the user's function that is called.
    """
    is_users = call is None or any(map(line_of, jaxpr.eqns[:1]))

    def atom(v: Var) -> Var:
        return v if isinstance(v, core.Literal) else env.get(v, v)

    for eqn in jaxpr.eqns:
        inputs, info = [atom(v) for v in eqn.invars], eqn.source_info
        if call is not None:
            traceback = info.traceback if is_users else call.traceback
            info = info.replace(name_stack=call.name_stack + info.name_stack, traceback=traceback)
        if eqn.primitive.name in INLINED:
            body = closed_of(eqn.params[CALLS[eqn.primitive.name]])
            inner = dict(zip(body.jaxpr.invars, inputs, strict=True))
            for var, value in zip(body.jaxpr.constvars, body.consts, strict=True):
                inner[var] = core.Var(var.aval)
                constants[inner[var]] = value
            outputs = _inlined(body.jaxpr, inner, info, operations, constants)
        elif call is None:  # its variables are its own already
            outputs = eqn.outvars
            operations.append(eqn.replace(invars=inputs) if inputs != eqn.invars else eqn)
        else:
            outputs = [core.Var(v.aval) for v in eqn.outvars]
            operations.append(eqn.replace(invars=inputs, outvars=outputs, source_info=info))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [atom(v) for v in jaxpr.outvars]


def _is_over_weights(eqn: Eqn, kinds: dict[Var, Kind]) -> bool:
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or eqn.effects:
        return False
    consts, carry = scan_parts(eqn.params)
    rows = variables(eqn.invars[consts + carry :])
    return any(kinds[v] == "w" for v in rows) and any(kinds[v] == "a" for v in eqn.outvars[:carry])


def line_of(operation: Eqn) -> str:
    """Return "file.py:12", the innermost line of the user's that computes an operation; "" if there is none."""
    found = _equation(operation).source_info.traceback
    frames = found.frames if found is not None else ()
    return next((f"{os.path.basename(f.file_name)}:{f.line_num}" for f in frames if _is_users(f.file_name)), "")


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not any(part in file for part in _NOT_THE_USERS)


def is_ours(error: BaseException) -> bool:
    """Return whether this package raised an error itself."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].startswith(_NOT_THE_USERS[2])


def users_line(error: BaseException) -> str:
    """Return " (file.py:12)", the innermost line of the user's in an error's traceback, or ""."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [f" ({os.path.basename(file)}:{line})" for file, line in frames if _is_users(file)]
    return users[-1] if users else ""


def at_line(operation: Eqn) -> str:
    """Return " (file.py:12)", or ""."""
    line = line_of(operation)
    return f" ({line})" if line else ""


def name_of(operation: Eqn) -> str:
    """Return the name of an operation's primitive, such as "dot_general", as its user knows it."""
    eqn = _equation(operation)
    if eqn.primitive.name in CHECKPOINTS:
        return "jax.checkpoint"
    return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name


def scopes_of(operation: Eqn) -> list[str]:
    """Return the names of the modules, or `jax.named_scope`s, around an operation, the outermost first."""
    stack = _equation(operation).source_info.name_stack
    scopes = str(stack).split("/") if stack.stack else []
    # vmap() is not a module, and neither are the subscripts of einsum
    return [scope for scope in scopes if scope and "(" not in scope and "->" not in scope and "," not in scope]


def _equation(operation: Eqn) -> Eqn:
    return operation.scan if isinstance(operation, ScanLayer | ScanStack) else operation

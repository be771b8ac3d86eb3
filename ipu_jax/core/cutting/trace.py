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
from collections.abc import Collection, Sequence
from typing import Final, Literal

import jax
from jax.extend import core

from ipu_jax.base.annotations import Batch, Eqn, Function, Jaxpr, Key, Params, Tree, Value, Var
from ipu_jax.base.jaxprs import bodies_of, differentiated_between, in_scan_parts, is_float, needed, plain, variables
from ipu_jax.base.row_rules import FOLLOWED, Taken
from ipu_jax.core.cutting.everywhere import is_everywhere, traced_for
from ipu_jax.core.cutting.inlined import inlined, with_checkpoints_open
from ipu_jax.core.cutting.known_places import at_known_places, with_rows_outside
from ipu_jax.core.cutting.own_rows import RULES
from ipu_jax.core.cutting.rows import JOINS, RowTaker, equations, slices_of_leaves, taken_by
from ipu_jax.core.cutting.scan_layers import ScanLayer, ScanStack, has_inner_layers, layers_of, unrolled
from ipu_jax.core.layout.tree_parts import Part
from ipu_jax.core.programs.cost import bytes_of, equation_flops

Kind = Literal["w", "b", "s", "a"]
Read = tuple[str, Part]
"""A leaf of the "params" or of the "state", or rows of it."""

_MOST_GROUPS: Final = 32
"""How many groups of layers, each a scan of its own, are unrolled."""
SMALL: Final = 4096
"""Bytes up to which a value that is computed from larger weights is sent, so that the weights stay in one stage."""
_AGAIN: Final = 64
"""FLOPs per byte of a result from which it is cheaper to send it than to compute it in each stage that needs it."""


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
        masked: values of weights and batch of which only scans over weights read rows: they are computed again.
        frozen: the weights that get no gradient.
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
    masked: set[Var] = dataclasses.field(default_factory=set)
    frozen: set[Var] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self._open_checkpoints()
        results = self.results
        self.operations = needed(self.operations, results, effects=True)
        self._find_kinds()
        self._slice_leaves()
        if any(self._goes_over_layers(op) for op in self.operations):
            layers = [layers_of(op) if self._goes_over_layers(op) else [op] for op in self.operations]
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
        operations = self.operations
        if self.new_rows:
            wanted = [v for k, v in enumerate(self.new_state) if k not in self.new_rows]
            wanted += [v for found in self.new_rows.values() for v in found.values]
            operations = needed(operations, [*self.outputs, *self.aux, *wanted], effects=True)
        return [op for op in operations if op.effects or self.kinds[op.outvars[0]] == "a"]

    @functools.cached_property
    def differentiated(self) -> set[Var]:
        """Return the values through which gradients go from the outputs to the weights."""
        trained = [v for v in self.params if is_float(v) and v not in self.frozen]
        return differentiated_between(self.operations, trained, self.outputs)

    @functools.cached_property
    def reads(self) -> dict[int, set[Read]]:
        """Return, per activation's operation by its id, the weights and state that it reads, also through casts."""
        return self.reads_but_for(())

    def reads_but_for(self, sent: Collection[Var]) -> dict[int, set[Read]]:
        """Return `reads` without what is read only through these values."""
        leaves = [("params", self.params), ("state", self.state)]
        sliced: dict[Var, Read] = {v: (name, Part(k)) for name, of in leaves for k, v in enumerate(of)}
        own = {v: {leaf} for v, leaf in sliced.items()}  # what follows from leaves
        taker, found, nothing = None, dict[int, set[Read]](), set[Read]()
        for op in self.operations:
            is_run, others, stacked = op.effects or self.kinds[op.outvars[0]] == "a", op.invars, list[Var]()
            if isinstance(op, ScanLayer):
                fixed, carry, stacked = in_scan_parts(op.scan.params, op.invars)
                others, taker = [*fixed, *carry], taker or self.row_taker()
            of_inputs = [own[v] for v in variables(others) if v in own]
            read = nothing.union(*of_inputs) if len(of_inputs) > 1 else next(iter(of_inputs), nothing)
            for v in variables(stacked):
                for end, of_leaf in taker.reached(v, Taken(0, op.row, op.row + 1)) if taker else ():
                    part = self._rows_of(sliced.get(end), of_leaf)
                    read = read | (own.get(end, nothing) if part is None else {part})
            if is_run:
                found[id(op)] = read
            elif of_inputs:
                part = self._rows_of(sliced.get(op.invars[0]), taken_by(op)) if len(op.invars) == 1 else None
                if part is not None:
                    sliced[op.outvars[0]] = part
                    read = {part}
                own |= {v: read for v in op.outvars if v not in sent}
        return found

    def _rows_of(self, leaf: Read | None, taken: Taken | None) -> Read | None:
        """Return rows of a leaf, or of rows of it; None if they are not the rows by which the leaf is divided."""
        if leaf is None or taken is None:
            return None
        name, part = leaf
        whole = (self.params if name == "params" else self.state)[part.leaf]
        return (name, part.part(*taken[1:], taken.dim)) if self.axes.get(whole, 0) == taken.dim else None

    def row_taker(self) -> RowTaker:
        """Return what follows rows of values back to leaves: through all operations that can run again, and joins."""
        made, joined = dict[Var, Eqn](), dict[Var, Eqn]()
        for op in self.operations:
            if op.outvars and self.kinds[op.outvars[0]] != "a":
                made |= dict.fromkeys(op.outvars, op)
            if not isinstance(op, ScanLayer | ScanStack) and op.primitive.name in JOINS:
                joined[op.outvars[0]] = op
        return RowTaker(made, joined, RULES)

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
        is_computed = self.is_activation(new) or not self.masked.isdisjoint(variables([new]))
        if not is_computed or new in others or any(k in self.leaves_of(v) for v in others):
            return None
        at, axis = {v: t for t, op in enumerate(self.operations) for v in op.outvars}, self.axes.get(leaf, 0)
        anchors: list[Var] = []
        values: set[Var] = set()
        for row, ends in enumerate(self._late_ends(leaf, new, axis)):
            own = [v for v, _ in ends if self.is_activation(v)]
            layers = {id(self.made_by[v]) for v in own if isinstance(self.made_by[v], ScanLayer)}
            anchor = max(own, key=at.__getitem__, default=None) or self._first_reader(ends)
            mixed = [v for v in own if v in self.late_taker.made]  # what follows from other rows as well
            wrong = any(of and (v in mixed or (v is leaf and of != (axis, row, row + 1))) for v, of in ends)
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
        found = [self.first_readers[read] for read in wanted if read in self.first_readers]
        return min(found, key=operator.itemgetter(0))[1] if found else None

    @functools.cached_property
    def first_readers(self) -> dict[Read, tuple[int, Var]]:
        """Return, for each `Read`, the number of the first operation that reads it, and a result of that."""
        found: dict[Read, tuple[int, Var]] = {}
        for t, op in enumerate(self.operations):
            for read in self.reads.get(id(op), ()) if op.outvars else ():
                found.setdefault(read, (t, op.outvars[0]))
        return found

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
        kept = [{k} for k, new in enumerate(self.new_state) if self.is_activation(new) or k in self.stacked]
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
        return self.with_operations([self.operations[t] for t in sorted(range(len(turns)), key=turns.__getitem__)])

    def with_operations(self, operations: list[Eqn]) -> "FunctionTrace":
        """Return the trace with these operations."""
        found = copy.copy(self)
        for name, value in vars(FunctionTrace).items():
            if isinstance(value, functools.cached_property):
                found.__dict__.pop(name, None)
        found.operations = operations
        return found

    def _goes_over_layers(self, op: Eqn, mixed: Collection[Var] = ()) -> bool:
        """Return whether an operation is a scan over rows of weights, or of matrices of state, constants or `mixed`."""
        if op.primitive.name != "scan" or op.params["length"] < 2 or op.effects:
            return False
        _, carry, rows = in_scan_parts(op.params, op.invars)
        constants = {*self.closed.jaxpr.constvars, *self.constants}
        matrices = [v for v in variables(rows) if is_float(v) and v.aval.ndim > 2]
        is_over = any(self.kinds[v] == "s" or v in constants or v in mixed for v in matrices)
        is_over = is_over or any(self.kinds[v] == "w" for v in variables(rows))
        return is_over and any(map(self.is_activation, op.outvars[: len(carry)]))

    def _unroll_groups(self) -> None:
        """Unroll scans over groups of layers, so that the layers of each group become a scan of their own."""
        if not any(op.primitive.name == "scan" for op in self.operations):
            return
        weights, taker = {v for v, kind in self.kinds.items() if kind == "w"}, self.row_taker()
        groups = set[int]()
        for op in self.operations:
            if has_inner_layers(op, weights) and not op.effects and op.params["length"] <= _MOST_GROUPS:
                xs = variables(in_scan_parts(op.params, op.invars)[2])
                ends = [of for v in xs for leaf, of in taker.reached(v, Taken(0, 0, 1)) if leaf in self.params]
                if any(of is not None and of.stop > of.start + 1 for of in ends):  # a group is several rows of a leaf
                    groups.add(id(op))
        if not groups:
            return
        found: list[Eqn] = []
        for op in self.operations:
            outer = self.opened.get(op.outvars[0]) if op.outvars else None
            new = equations(unrolled(op), op.invars, op.outvars) if id(op) in groups else [op]
            self.opened |= {v: outer for eqn in new for v in eqn.outvars if outer is not None}
            found += new
        self.operations = found
        self._open_checkpoints()
        self.operations = needed(self.operations, self.results, effects=True)
        self._find_kinds()

    def _slice_leaves(self) -> None:
        """Let slices and scans over weights read rows of leaves wherever rows can be followed back to these."""
        self._unroll_groups()
        leaves = [*self.params, *self.state]
        of_leaves = [*leaves, *(v for v, kind in self.kinds.items() if kind in ("w", "s"))]
        constants = dict(zip(self.closed.jaxpr.constvars, self.closed.consts, strict=True)) | self.constants
        operations = at_known_places(self.operations, constants, of_leaves)
        self._set_operations(with_rows_outside(operations, constants, of_leaves))
        mixed, of_leaves = self._mixed(), {*leaves}
        taker = self.row_taker()
        taker.made |= mixed
        for op in self.operations:
            if self._goes_over_layers(op, mixed):
                stacked, length = variables(in_scan_parts(op.params, op.invars)[2]), op.params["length"]
                for v, row in itertools.product(stacked, range(length)):
                    rows = [end for end in taker.reached(v, Taken(0, row, row + 1)) if end[0] in of_leaves]
                    self.axes |= {leaf: of.dim for leaf, of in rows if of is not None and leaf not in self.axes}
        operations = slices_of_leaves(self.operations, taker, leaves, self.axes)
        if taker.equations:
            operations = needed(operations, self.results, effects=True)
        read_by_rows = {*mixed}.difference(variables([*self.outputs, *self.aux]))
        for op in reversed(operations if mixed else ()):
            whole = op.invars
            if self._goes_over_layers(op, mixed):
                fixed, carry, _ = in_scan_parts(op.params, op.invars)
                whole = [*fixed, *carry]
            if read_by_rows.isdisjoint(op.outvars):
                read_by_rows.difference_update(variables(whole))
        self.masked |= read_by_rows
        self._set_operations(operations, again=bool(read_by_rows))

    def _set_operations(self, operations: list[Eqn], *, again: bool = False) -> None:
        """Replace the operations, and find kinds again if they are others, or `again`."""
        is_new = again or list(map(id, operations)) != list(map(id, self.operations))
        self.operations = operations
        if is_new:
            self._find_kinds()

    def _mixed(self) -> dict[Var, Eqn]:
        """Return the operations on weights and batch whose rows follow from theirs, such as weights times a mask."""
        found: dict[Var, Eqn] = {}
        for op in self.operations:
            if op.primitive.name not in FOLLOWED or op.effects or self.kinds[op.outvars[0]] != "a":
                continue
            if all(v in found or self.kinds[v] != "a" for v in variables(op.invars)) and not _contracts(op):
                found[op.outvars[0]] = op
        return found

    def _open_checkpoints(self) -> None:
        self.operations, named = with_checkpoints_open(self.operations, self.constants, self.opened)
        self.outputs, self.aux = [*map(named, self.outputs)], [*map(named, self.aux)]
        self.new_state = [*map(named, self.new_state)]

    def _find_kinds(self) -> None:
        kinds: dict[Var, Kind | None] = dict.fromkeys([*self.closed.jaxpr.constvars, *self.constants])
        flops: dict[Var, float] = {}  # of everything that a stage would have to compute again
        kinds |= dict.fromkeys(self.params, "w") | dict.fromkeys(self.state, "s")
        kinds |= dict.fromkeys([*self.batch, *self.key], "b")
        for op in self.operations:
            inputs = variables(op.invars)
            on = {kinds[v] for v in inputs} - {None}
            on = {"w"} if self.masked and self.masked.intersection(op.outvars) else on
            is_one = op.effects or type(op) in (ScanLayer, ScanStack) or is_everywhere(op)
            kind = "a" if len(on) > 1 or is_one else next(iter(on), None)
            if kind != "a":
                work = equation_flops(op) + sum(flops.get(v, 0.0) for v in {*inputs})
                size = bytes_of([v.aval for v in op.outvars])
                is_sum = op.primitive.name == "dot_general" and 8 * size < bytes_of([v.aval for v in inputs])
                if _contracts(op) and work > _AGAIN * size and not (kind == "w" and is_sum and size <= SMALL):
                    kind = "a"
                flops |= dict.fromkeys(op.outvars, work)
            kinds |= dict.fromkeys(op.outvars, kind)
        self.kinds = {v: kind or "b" for v, kind in kinds.items()}
        self.of_constants = {v for v, kind in kinds.items() if kind is None}


def _contracts(eqn: Eqn) -> bool:
    """Return whether an equation can take many FLOPs per element of its result."""
    return eqn.primitive.name in ("dot_general", "conv_general_dilated") or any(True for _ in bodies_of(eqn))


def trace_of(
    fn: Function, params: Params, state: Tree, microbatch: Batch, key: Key, ipus: int = 1
) -> tuple[FunctionTrace, Tree]:
    """Trace `fn(params, state, microbatch, key)` on shapes; return its trace and the shapes of its results.

    Args:
        fn: returns `(outputs, aux, new state)`; the outputs of a loss function are the loss.
        params, state, microbatch, key: trees of arrays or of their shapes; None for what the function does not take.
        ipus: the number of IPUs for its calls of an `everywhere`.
    """
    closed, shapes = traced_for(ipus, fn, params, state, microbatch, key)
    closed = plain(closed)
    invars = iter(closed.jaxpr.invars)
    of = lambda tree: [next(invars) for _ in jax.tree.leaves(tree)]
    arguments = of(params), of(state), of(microbatch), of(key)
    constants: dict[Var, Value] = {}
    operations: list[Eqn] = []
    found = iter(inlined(closed.jaxpr, {}, None, operations, constants))
    outputs, aux, new_state = ([next(found) for _ in jax.tree.leaves(tree)] for tree in shapes)
    return FunctionTrace(closed, *arguments, constants, outputs, aux, new_state, operations), shapes

"""Divide a program's equations into stages: what each computes, which weights it reads, and what it sends.

             stage 0                    stage 1                    stage 2
reads        embed, layers 0-3          layers 4-7                 layers 8-9, embed (held by all IPUs)
computes     its own activations, and again the casts and masks that it needs
sends        (x,)                       (x,)                       the loss
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Var
from ipu_jax.base.jaxprs import in_order, part_of, read_by, scan_parts, variables
from ipu_jax.core.cutting.program import Layer, Program, Stack
from ipu_jax.core.programs.cost import bytes_of
from ipu_jax.core.weights.whole_tree import Part

_SMALL: Final = 4096
"""Bytes up to which a value that is computed from larger weights is sent, so that the weights stay in one stage."""
_BY_ROW: Final = (
    *("convert_element_type", "reduce_precision", "copy", "stop_gradient", "neg", "abs", "sign", "square"),
    *("mul", "add", "sub", "div", "max", "min", "pow", "integer_pow"),
    *("exp", "log", "sqrt", "rsqrt", "tanh", "logistic"),
)
"""Operations whose result has rows that depend only on the same rows of their inputs."""


@dataclasses.dataclass
class Piece:
    """Hold the equations and the variables of one stage.

    Attributes:
        equations: in order; values that are computed again are among them.
        weights: the variables of the weights that it reads, in the order in which it reads them.
        incoming: the variables of activations that earlier stages computed.
        inputs: the variables of leaves of micro-batch, key and state that it reads, and of constants.
    """

    equations: list[Eqn] = dataclasses.field(default_factory=list)
    weights: list[Var] = dataclasses.field(default_factory=list)
    incoming: list[Var] = dataclasses.field(default_factory=list)
    inputs: set[Var] = dataclasses.field(default_factory=set)


class Division:
    """A program's equations, divided into stages.

    Attributes:
        parts: the part of `params` that each variable of weights is.
        pieces: per stage, what it computes.
        stage_of: the stage that computes each activation.
        aux_home: per result of `aux`, the stage that returns it.
        state_homes: per leaf of the state, the stages that hold it. It is one, unless the new value follows from the
            state alone, as a counter's: then all stages that read it, or compute from it the new value of another leaf
            that they hold, hold a copy, and update it alike.
    """

    def __init__(self, program: Program, ends: Sequence[int]):
        self.program, self.stages = program, len(ends)
        self.parts: dict[Var, Part] = {v: Part(k) for k, v in enumerate(program.params)}
        self.pool = {v: op for op in program.operations for v in op.outvars if not program.is_activation(v)}
        self._rows: dict[Var, Var] = {}
        self._find_rows()
        self.own = self._own_equations(ends)
        if program.opened:
            self.own = [self._under_checkpoints(eqns) for eqns in self.own]
        self.stage_of = {v: s for s, eqns in enumerate(self.own) for eqn in eqns for v in eqn.outvars}
        self._place_small_values()
        self.state_homes = self._homes_of_state()
        self.aux_home = [self._home(v) for v in program.aux]
        self._gather_rows()
        self.pieces = [self._piece(s) for s in range(self.stages)]

    # the equations of each stage

    def _own_equations(self, ends: Sequence[int]) -> list[list[Eqn]]:
        of_stages = [self.program.activations[start:end] for start, end in itertools.pairwise([0, *ends])]
        runs: dict[int, dict[int, list[Layer]]] = {}  # per scan and stage, the layers
        for s, of_stage in enumerate(of_stages):
            for op in of_stage:
                if isinstance(op, Layer):
                    runs.setdefault(id(op.scan), {}).setdefault(s, []).append(op)
        own: list[list[Any]] = []
        stacked: dict[tuple[int, int], list[Eqn]] = {}
        for s, of_stage in enumerate(of_stages):
            eqns: list[Eqn] = []
            for op in of_stage:
                if isinstance(op, Layer):
                    run = runs[id(op.scan)][s]
                    if op is run[-1]:  # in place of the layers of a stage, one equation
                        whole = len(runs[id(op.scan)]) == 1
                        eqns += [op.scan.replace(invars=run[0].invars)] if whole else self._shorter(run[0], op, stacked)
                elif isinstance(op, Stack):
                    if len(runs[id(op.scan)]) > 1:
                        parts = stacked[id(op.scan), op.position]
                        eqns.append(_equation(lambda *values: lax.concatenate(values, 0), parts, op.outvars[0]))
                else:
                    eqns.append(op)
            own.append(eqns)
        return own

    def _under_checkpoints(self, equations: list[Eqn]) -> list[Eqn]:
        """Return a stage's equations with each run of them that was under one `jax.checkpoint` under one again."""
        program, found = self.program, []
        checkpoint_of = lambda eqn: id(program.opened.get(eqn.outvars[0]) if eqn.outvars else None)
        for _, run in itertools.groupby(equations, checkpoint_of):
            eqns = list(run)
            opened = program.opened.get(eqns[0].outvars[0]) if eqns[0].outvars else None
            found += eqns if opened is None else [self._checkpointed(opened, eqns)]
        return found

    def _checkpointed(self, opened: Eqn, equations: list[Eqn]) -> Eqn:
        program, made = self.program, {v for eqn in equations for v in eqn.outvars}
        inside = set(map(id, equations))
        read = {*read_by([eqn for eqns in self.own for eqn in eqns if id(eqn) not in inside])}
        results = {*variables([program.loss, *program.aux, *program.new_state])}
        outvars = [v for eqn in equations for v in eqn.outvars if v in read or v in results]
        known = made.union(program.closed.jaxpr.constvars)
        invars = list(dict.fromkeys(v for v in read_by(equations) if v not in known))
        how = {name: opened.params[name] for name in ("policy", "prevent_cse")}
        how["prevent_cse"] = how["prevent_cse"] if isinstance(how["prevent_cse"], bool) else any(how["prevent_cse"])
        run = jax.checkpoint(core.jaxpr_as_fun(part_of(program.closed, invars, equations, outvars)), **how)
        closed: Jaxpr = jax.make_jaxpr(run)(*(_shape(v) for v in invars))
        program.constants.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        (eqn,) = closed.jaxpr.eqns
        renamed = dict(zip(closed.jaxpr.invars, invars, strict=True))
        return eqn.replace(
            invars=[renamed.get(v, v) for v in eqn.invars], outvars=outvars, source_info=opened.source_info
        )

    def _shorter(self, first: Layer, last: Layer, stacked: dict[tuple[int, int], list[Eqn]]) -> list[Eqn]:
        """Return the equations of a scan over the layers from `first` to `last`."""
        scan, (consts, carry) = first.scan, scan_parts(first.scan.params)
        length = scan.params["length"]
        start, stop = first.number, last.number + 1
        rows = (length - stop, length - start) if scan.params["reverse"] else (start, stop)
        before: list[Eqn] = []
        xs = [self._rows_of(v, *rows, before) for v in first.invars[consts + carry :]]
        outputs = list(last.outvars[:carry])
        for k, whole in enumerate(scan.outvars[carry:]):
            part = core.Var(whole.aval.update(shape=(stop - start, *whole.aval.shape[1:])))
            outputs.append(part)
            of_result = stacked.setdefault((id(scan), k), [])
            of_result.insert(0 if scan.params["reverse"] else len(of_result), part)
        params = {**scan.params, "length": stop - start}
        if isinstance(params.get("unroll"), int):
            params["unroll"] = min(params["unroll"], stop - start)
        return [*before, scan.replace(invars=[*first.invars[: consts + carry], *xs], outvars=outputs, params=params)]

    def _rows_of(self, var: Var, start: int, stop: int, before: list[Eqn]) -> Var:
        """Return the variable of some rows of a scan's input; equations of activations are appended to `before`."""
        if isinstance(var, core.Literal):
            return var
        key = (var, start, stop)
        if key in self._rows:
            return self._rows[key]
        rows = core.Var(var.aval.update(shape=(stop - start, *var.aval.shape[1:])))
        if var in self.parts:
            self.parts[rows] = self.parts[var].part(start, stop)
        elif self.program.is_activation(var):
            before.append(_slice(var, start, stop, rows))
        else:
            made = self.pool.get(var)
            inputs = None if made is None else self._inputs_by_row(made, var, start, stop)
            if made is None or inputs is None:
                self.pool[rows] = _slice(var, start, stop, rows)
            else:
                self.pool[rows] = made.replace(invars=inputs, outvars=[rows])
        self._rows[key] = rows
        return rows

    def _inputs_by_row(self, eqn: Eqn, var: Var, start: int, stop: int) -> list[Var] | None:
        """Return the inputs of which an equation computes only these rows, or None if rows depend on other rows."""
        if eqn.primitive.name not in _BY_ROW or any(v.aval.shape not in ((), var.aval.shape) for v in eqn.invars):
            return None
        return [v if v.aval.shape == () else self._rows_of(v, start, stop, []) for v in eqn.invars]

    # what is computed again, and what is sent instead

    def _walk(self, wanted: Iterable[Var], seen: dict[int, Var], found: Piece, stage: int) -> None:
        """Add what the variables depend on to `found`: leaves, activations of other stages, equations to run again."""
        waiting = list(wanted)
        while waiting:
            var = waiting.pop()
            if isinstance(var, core.Literal):
                continue
            if var in self.stage_of:
                if self.stage_of[var] != stage:
                    found.incoming.append(var)
            elif var in self.parts and var not in self.pool:
                found.weights.append(var)
            elif var in self.pool:
                eqn = self.pool[var]
                if id(eqn) not in seen:
                    seen[id(eqn)] = eqn
                    waiting += eqn.invars
            else:
                found.inputs.add(var)

    def _needs(self, wanted: Iterable[Var], stage: int) -> Piece:
        found = Piece()
        self._walk(wanted, {}, found, stage)
        return found

    def _place_small_values(self) -> None:
        """Let the stage that has the weights compute what is small and computed from weights alone, such as a penalty.

        Otherwise the stage that needs it would have to hold all these weights, too.
        """
        small = self._small_operations()
        if not small:
            return
        results = {v for op, _ in small for v in op.outvars}
        held: dict[int, int] = {}  # the first stage that reads each leaf for something else
        for s in range(self.stages):
            found = self._needs([v for v in read_by(self.own[s]) if v not in results], s)
            for v in found.weights:
                held.setdefault(self.parts[v].leaf, s)
        placed: dict[Var, int] = {}
        for op, leaves in small:
            before = [placed.get(v) for v in variables(op.invars) if v in results]
            if leaves <= held.keys() and None not in before:
                stage = max([*filter(None, before), *(held[leaf] for leaf in leaves)], default=0)
                placed |= dict.fromkeys(op.outvars, stage)
        needed_at = list(map(read_by, self.own))
        if any(placed.get(v, 0) > s for s, read in enumerate(needed_at) for v in read):
            return  # a stage needs such a value before the one with its weights: it is computed again, from weights
        for op, _ in small:
            if op.outvars[0] in placed:
                self.own[placed[op.outvars[0]]].append(op)
        self.stage_of |= placed
        self.own = [in_order(eqns, eqns) for eqns in self.own]

    def _small_operations(self) -> list[tuple[Eqn, set[int]]]:
        """Return the operations that compute small results from larger weights, and the leaves that each reads."""
        found: list[tuple[Eqn, set[int]]] = []
        results: set[Var] = set()
        for op in self.program.operations:
            if op.effects or self.program.kinds[op.outvars[0]] != "w":
                continue
            size = bytes_of([v.aval for v in op.outvars])
            if size > _SMALL:
                continue
            inputs = variables(op.invars)
            leaves = {self.parts[v].leaf for v in self._needs([v for v in inputs if v not in results], -1).weights}
            of_leaves = bytes_of([self.program.params[leaf].aval for leaf in leaves])
            if results.intersection(inputs) or of_leaves > 8 * size:
                found.append((op, leaves))
                results.update(op.outvars)
        return found

    def _find_rows(self) -> None:
        """Let static rows of a leaf, `w[k]` in a loop over layers, be parts of it, as rows of a scan are."""
        for var, eqn in list(self.pool.items()):
            if isinstance(eqn, Layer | Stack) or eqn.primitive.name != "slice" or eqn.invars[0] not in self.parts:
                continue
            (leaf,), params = eqn.invars, eqn.params
            starts, stops = params["start_indices"], params["limit_indices"]
            is_whole = starts[1:] == (0,) * len(starts[1:]) and stops[1:] == leaf.aval.shape[1:]
            if is_whole and set(params["strides"] or ()) <= {1}:
                del self.pool[var]
                self.parts[var] = self.parts[leaf].part(starts[0], stops[0])

    def _gather_rows(self) -> None:
        """Give each stage its rows of a leaf in one part, which together are the leaf.

        Where a stage reads the leaf whole, or two stages read one row, or one stage reads all of it, rows are slices of
        the leaf.
        """
        if len(self.parts) == len(self.program.params):
            return
        read: dict[int, dict[int, list[Var]]] = {}  # per leaf and stage, the variables
        for s in range(self.stages):
            for v in dict.fromkeys(self._needs(read_by(self.own[s], self._results(s)), s).weights):
                read.setdefault(self.parts[v].leaf, {}).setdefault(s, []).append(v)
        for leaf, by_stage in read.items():
            rows = {s: [self.parts[v].rows for v in of_stage] for s, of_stage in by_stage.items()}
            runs = [] if any(None in of_stage for of_stage in rows.values()) else _tiles(rows)
            variables_of_rows = [(v, self.parts[v].rows) for of_stage in by_stage.values() for v in of_stage]
            if len(runs) < 2:
                for v, of_var in variables_of_rows:
                    if of_var is not None:
                        self.pool[v] = _slice(self.program.params[leaf], *of_var, v)
                continue
            whole = self.program.params[leaf].aval
            ends = [0, *(start for start, _, _ in runs[1:]), whole.shape[0]]  # someone has the rows that nothing reads
            for (first, last), (_, _, s) in zip(itertools.pairwise(ends), runs, strict=True):
                part = core.Var(whole.update(shape=(last - first, *whole.shape[1:])))
                self.parts[part] = Part(leaf, (first, last))
                for v in by_stage[s]:
                    start, stop = self.parts[v].rows or (0, 0)
                    if first <= start and stop <= last:
                        if (start, stop) == (first, last):
                            continue
                        self.pool[v] = _slice(part, start - first, stop - first, v)

    def _home(self, result: Var) -> int:
        """Return the stage that returns a result that is not the loss."""
        if isinstance(result, core.Literal):
            return self.stages - 1
        if result in self.stage_of:
            return self.stage_of[result]
        found = self._needs([result], -1)
        stages = [self.stage_of[v] for v in found.incoming]
        if stages:
            return max(stages)
        if needed := self.program.leaves_of(result):
            return min(set[int].intersection(*(set(self.state_homes[k]) for k in needed)))
        leaves = {self.parts[v].leaf for v in found.weights}
        for s in range(self.stages):
            if leaves & {self.parts[v].leaf for v in self._needs(read_by(self.own[s]), s).weights}:
                return s
        return self.stages - 1

    def _homes_of_state(self) -> list[list[int]]:
        if not self.program.state:
            return []
        reads = [self._needs(read_by(eqns), s).inputs for s, eqns in enumerate(self.own)]
        program = self.program
        homes = [{s for s, read in enumerate(reads) if var in read} for var in program.state]
        kept = set[int]().union(*program.kept_together)
        for leaves in program.kept_together:
            home = {self.stage_of[v] for v in (program.new_state[k] for k in leaves) if program.is_activation(v)}
            assert len(home) == 1, "a cut does not separate the operations on these leaves"
            for k in leaves:
                homes[k] = home
        homes = [of_leaf or {0} for of_leaf in homes]
        results = [(of_leaf, program.leaves_of(v)) for of_leaf, v in zip(homes, program.new_state, strict=True)]
        for leaves in filter(None, map(program.leaves_of, program.aux)):
            results.append(({min(homes[min(leaves, key=lambda k: k not in kept)])}, leaves))
        for own, leaves in results * len(homes):  # a leaf may follow from one that comes later
            for k in leaves:
                homes[k] |= own
        return [sorted(of_leaf) for of_leaf in homes]

    def returned(self, stage: int) -> tuple[list[int], list[int]]:
        """Return the numbers of the results of `aux` and of `new_state` that a stage returns."""
        of_state = [k for k, homes in enumerate(self.state_homes) if stage in homes]
        return [k for k, home in enumerate(self.aux_home) if home == stage], of_state

    def _results(self, stage: int) -> list[Var]:
        """Return the variables of the results that a stage returns, without those that it sends."""
        aux, state = self.returned(stage)
        results = [*(self.program.aux[k] for k in aux), *(self.program.new_state[k] for k in state)]
        return [*results, self.program.loss] if stage == self.stages - 1 else results

    def _piece(self, stage: int) -> Piece:
        piece, seen = Piece(), {}
        for eqn in self.own[stage]:
            self._walk(eqn.invars, seen, piece, stage)
        self._walk(self._results(stage), seen, piece, stage)
        equations = [*seen.values(), *self.own[stage]]
        piece.equations = in_order(equations, equations)
        piece.weights, piece.incoming = list(dict.fromkeys(piece.weights)), list(dict.fromkeys(piece.incoming))
        return piece

    @functools.cached_property
    def messages(self) -> list[list[Var]]:
        """Return, per boundary, the activations that a later stage reads, in the order in which they are computed."""
        order = {v: n for n, v in enumerate(v for eqns in self.own for eqn in eqns for v in eqn.outvars)}
        sent = []
        for s in range(self.stages - 1):
            later = {v for piece in self.pieces[s + 1 :] for v in piece.incoming if self.stage_of[v] <= s}
            sent.append(sorted(later, key=order.__getitem__))
        return sent


def _tiles(rows: dict[int, list[Any]]) -> list[tuple[int, int, int]]:
    """Return the runs of rows that stages read, as (start, stop, stage) in order; [] if two stages read one row."""
    runs: list[tuple[int, int, int]] = []
    for start, stop, s in sorted((*of_rows, s) for s, of_stage in rows.items() for of_rows in of_stage):
        if runs and runs[-1][2] == s:
            runs[-1] = (runs[-1][0], max(runs[-1][1], stop), s)
        elif runs and start < runs[-1][1]:
            return []
        else:
            runs.append((start, stop, s))
    return runs


def _slice(var: Var, start: int, stop: int, rows: Var) -> Var:
    return _equation(lambda x: lax.slice_in_dim(x, start, stop), [var], rows)


def _equation(fn: Any, inputs: list[Var], output: Var) -> Eqn:
    """Return the equation of a function that is one operation, between these variables."""
    (eqn,) = jax.make_jaxpr(fn)(*map(_shape, inputs)).jaxpr.eqns
    return eqn.replace(invars=inputs, outvars=[output])


def _shape(var: Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)

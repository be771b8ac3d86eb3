"""Hold a function that is divided into stages: what each computes, which weights it reads, and what it sends.

             stage 0                    stage 1                    stage 2
reads        embed, layers 0-3          layers 4-7                 layers 8-9, embed (held by all IPUs)
computes     its own activations, and again the casts and masks that it needs
sends        (x,)                       (x,)                       the loss
"""

import dataclasses
import functools
from collections.abc import Iterable

from jax.extend import core

from ipu_jax.base.annotations import Eqn, Var
from ipu_jax.base.jaxprs import in_order, read_by
from ipu_jax.core.cutting.trace import SMALL, FunctionTrace
from ipu_jax.core.layout.tree_parts import Part
from ipu_jax.core.programs.cost import bytes_of


@dataclasses.dataclass(frozen=True)
class StagePiece:
    """Hold the equations and the variables of one stage.

    Attributes:
        equations: in order; values that are computed again are among them.
        weights: the variables of the weights that it reads, in the order in which it reads them.
        incoming: the variables of activations that earlier stages computed.
        state: the variables of the state that it reads.
        inputs: the variables of leaves of micro-batch and key that it reads, and of constants.
    """

    equations: list[Eqn]
    weights: list[Var]
    incoming: list[Var]
    state: list[Var]
    inputs: set[Var]


@dataclasses.dataclass(frozen=True)
class NewValue:
    """The new value of a leaf of the state, or of rows of it, which this stage computes."""

    part: Part
    stage: int
    new: Var


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """A function's equations, divided into stages.

    Attributes:
        trace: the trace of the function.
        own: per stage, the equations that no other stage runs.
        parts, of_state: the part of `params`, and of the state, that each variable of these is.
        again: the equation of each value that any stage can compute again.
        new_rows: the new values of the rows of stacked leaves of the state.
        placed: the `state_homes`, if they are given.
    """

    trace: FunctionTrace
    own: list[list[Eqn]]
    parts: dict[Var, Part]
    of_state: dict[Var, Part]
    again: dict[Var, Eqn]
    new_rows: list[NewValue]
    placed: list[list[int]] | None = None

    @functools.cached_property
    def stage_of(self) -> dict[Var, int]:
        """Return the stage that computes each activation."""
        return {v: s for s, eqns in enumerate(self.own) for eqn in eqns for v in eqn.outvars}

    def needs(self, wanted: Iterable[Var], stage: int) -> StagePiece:
        """Return what variables depend on: leaves, activations of other stages, and equations to run again."""
        weights, incoming, state, inputs, waiting = list[Var](), list[Var](), list[Var](), set[Var](), list(wanted)
        equations: dict[int, Eqn] = {}
        while waiting:
            var = waiting.pop()
            if isinstance(var, core.Literal):
                continue
            if var in self.stage_of:
                if self.stage_of[var] != stage:
                    incoming.append(var)
            elif var in self.again:
                eqn = self.again[var]
                if id(eqn) not in equations:
                    equations[id(eqn)] = eqn
                    waiting += eqn.invars
            elif var in self.parts:
                weights.append(var)
            elif var in self.of_state:
                state.append(var)
            else:
                inputs.add(var)
        weights, incoming, state = ([*dict.fromkeys(found)] for found in (weights, incoming, state))
        return StagePiece([*equations.values()], weights, incoming, state, inputs)

    @functools.cached_property
    def state_homes(self) -> list[list[int]]:
        """Return, per leaf of the state, the stages that hold it whole.

        It is one, unless the new value follows from the state alone, as a counter's: then all stages that read it, or
        compute from it the new value of another leaf that they hold, hold a copy, and update it alike. If none does,
        the stage that computes what it follows from holds it. Otherwise all stages hold a small leaf, and stage 0 a
        larger one.
        """
        if not self.trace.new_state or self.placed is not None:
            return self.placed or []
        trace, last = self.trace, len(self.own) - 1
        reads = [self.needs(read_by(eqns), s).state for s, eqns in enumerate(self.own)]
        reads[last] += self.needs(trace.outputs, last).state
        homes = [{s for s, read in enumerate(reads) if var in read} for var in trace.state]
        kept = set[int]().union(*trace.kept_together)
        for leaves in trace.kept_together:
            if leaves & trace.stacked.keys():
                continue
            home = {self.stage_of[v] for v in (trace.new_state[k] for k in leaves) if trace.is_activation(v)}
            assert len(home) == 1, "a cut does not separate the operations on these leaves"
            for k in leaves:
                homes[k] = home
        everywhere = {*range(len(self.own))}  # another function may read it at any of them
        small = [bytes_of([v.aval]) <= SMALL for v in trace.state]
        sums = [{self.stage_of[v] for v in self.needs([new], -1).incoming} for new in trace.new_state]
        unread = [{max(of)} if of else everywhere if few else {0} for of, few in zip(sums, small, strict=True)]
        homes = [of_leaf or other for of_leaf, other in zip(homes, unread, strict=True)]
        results = [(of_leaf, trace.leaves_of(v)) for of_leaf, v in zip(homes, trace.new_state, strict=True)]
        for leaves in filter(None, map(trace.leaves_of, trace.aux)):
            results.append(({min(homes[min(leaves, key=lambda k: k not in kept)])}, leaves))
        for own, leaves in results * len(homes):  # a leaf may follow from one that comes later
            for k in leaves:
                homes[k] |= own
        return [[] if k in trace.stacked else sorted(of_leaf) for k, of_leaf in enumerate(homes)]

    @functools.cached_property
    def aux_home(self) -> list[int]:
        """Return, per result of `aux`, the stage that returns it."""
        return list(map(self._home, self.trace.aux))

    def _home(self, result: Var) -> int:
        last = len(self.own) - 1
        if isinstance(result, core.Literal):
            return last
        if result in self.stage_of:
            return self.stage_of[result]
        found = self.needs([result], -1)
        if found.incoming:
            return max(self.stage_of[v] for v in found.incoming)
        if needed := self.trace.leaves_of(result):
            return min(set[int].intersection(*(set(self.state_homes[k]) for k in needed)))
        leaves = {self.parts[v].leaf for v in found.weights}
        for s, eqns in enumerate(self.own):
            if leaves & {self.parts[v].leaf for v in self.needs(read_by(eqns), s).weights}:
                return s
        return last

    def aux_of(self, stage: int) -> list[int]:
        """Return the numbers of the results of `aux` that a stage returns."""
        return [k for k, home in enumerate(self.aux_home) if home == stage]

    def state_of(self, stage: int) -> list[NewValue]:
        """Return the new values of the state that a stage holds, in the order of the leaves."""
        whole = [(k, self.trace.new_state[k]) for k, homes in enumerate(self.state_homes) if stage in homes]
        held = [NewValue(Part(k), stage, new) for k, new in whole]
        held += [rows for rows in self.new_rows if rows.stage == stage]
        return sorted(held, key=lambda value: value.part.leaf)

    @functools.cached_property
    def pieces(self) -> list[StagePiece]:
        """Return, per stage, what it computes."""
        pieces = []
        for s, own in enumerate(self.own):
            results = [*(self.trace.aux[k] for k in self.aux_of(s)), *(value.new for value in self.state_of(s))]
            results += self.trace.outputs if s == len(self.own) - 1 else []
            # `needs` begins at the end: with what the first equation reads
            found = self.needs([*results, *(v for eqn in reversed(own) for v in eqn.invars)], s)
            equations = [*found.equations, *own]
            pieces.append(dataclasses.replace(found, equations=in_order(equations, equations)))
        return pieces

    @functools.cached_property
    def messages(self) -> list[list[Var]]:
        """Return, per boundary, the activations that a later stage reads, in the order in which they are computed."""
        order = {v: n for n, v in enumerate(self.stage_of)}
        sent = []
        for s in range(len(self.own) - 1):
            later = {v for piece in self.pieces[s + 1 :] for v in piece.incoming if self.stage_of[v] <= s}
            sent.append(sorted(later, key=order.__getitem__))
        return sent

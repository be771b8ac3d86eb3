"""Order a function's operations by the weights that they read, so that a stage can run a layer wherever it is called.

    the function    policy: layer 0, layer 1, layer 2      reference: layer 0, layer 1, layer 2      loss
    by weights      layer 0 (policy, reference)    layer 1 (policy, reference)    layer 2 (both)     loss

A stage is a run of operations, so only in the second order can each stage have its own layers. It is made in two steps:

1. Operations that read the same weight are put together, unless one of them follows from another: a table that is read
   at both ends of a model stays apart.
2. What has been put together, and every other operation, is ordered by how far it is on its longest way to the loss,
   in FLOPs. So two towers run side by side, and a teacher beside its student, whatever they cost.
"""

import dataclasses
import heapq
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from ipu_jax.base.annotations import Eqn, Var
from ipu_jax.base.jaxprs import variables
from ipu_jax.core.cutting.scan_layers import ScanLayer, ScanStack
from ipu_jax.core.cutting.trace import FunctionTrace, Read
from ipu_jax.core.layout.tree_parts import Part
from ipu_jax.core.programs.cost import bytes_of, equation_flops

_APART: Final = 0.05
"""The part of all work that runs beside a neighbouring stage, from which another order is tried."""

Reads = Mapping[int, Collection[Read]]
"""Per operation, by its id, the weights and the state that it reads."""
_Row = tuple[str, int, int | None]
"""A leaf of "params" or "state", and a row of it; None: all of it."""


@dataclasses.dataclass(frozen=True)
class Order:
    """Hold the operations on activations in an order in which a function can be cut.

    Attributes:
        operations: the operations.
        together: the first and the last place of each run that no cut may divide: they read the same weights.
    """

    operations: list[Eqn]
    together: list[tuple[int, int]] = dataclasses.field(default_factory=list)


def runs_apart(of_stages: Sequence[Sequence[Eqn]], work: Mapping[int, float]) -> bool:
    """Return whether much of the work runs beside a neighbouring stage: then another order may be better.

    An operation does so if it follows from less than half of the stage before, or less than half of the stage after it
    follows from it, measured along the longest way through that stage.

    Args:
        of_stages: the operations of each stage.
        work: per operation, by its id, its FLOPs.
    """
    beside = set[int]()
    for forth in (True, False):
        longest: dict[Var, tuple[int, float, float]] = {}  # of a value: its stage, and ways through that and the last
        reached = [0.0] * len(of_stages)
        numbered = [*enumerate(of_stages)] if forth else [*enumerate(reversed(of_stages))]
        through: dict[int, tuple[int, float]] = {}
        for s, of_stage in numbered:
            for op in of_stage if forth else reversed(of_stage):
                reads, makes = (op.invars, op.outvars) if forth else (op.outvars, op.invars)
                before = [longest[v] for v in variables(reads) if v in longest]
                own = work[id(op)] + max((way for at, way, _ in before if at == s), default=0.0)
                last = max((last if at == s else way for at, way, last in before if at >= s - 1), default=0.0)
                reached[s] = max(reached[s], own)
                through[id(op)] = s, last
                for v in variables(makes):
                    longest[v] = max((s, own, last), longest.get(v, (s, 0.0, 0.0)))
        beside |= {op for op, (s, last) in through.items() if s and last < reached[s - 1] / 2}
    return sum(work[op] for op in beside) > _APART * sum(work.values())


def by_weights(trace: FunctionTrace, reads: Reads) -> Order:
    """Return a function's operations in an order in which those that read the same weights are neighbours.

    Args:
        trace: the trace of the function.
        reads: what each operation reads.
    """
    operations = trace.activations
    made = {v: t for t, op in enumerate(operations) for v in op.outvars}
    before = [sorted({made[v] for v in variables(op.invars) if v in made}) for op in operations]
    rows = [_rows_read(trace, reads.get(id(op), ())) for op in operations]
    for k, new in enumerate(trace.new_state):  # who replaces a leaf of the state is where it is read
        replaced = trace.stacked.get(k, [(Part(k), new)])
        for part, of_part in ((part, v) for part, v in replaced if trace.is_activation(v)):
            rows[made[of_part]] |= _rows_read(trace, [("state", part)])
    of_leaves = _on_leaves_alone(trace, operations, before)
    for t, of_op in enumerate(before):
        rows[t].update(*(rows[s] for s in of_op if s in of_leaves))
    groups = _Groups(trace, before, _together(rows, before, of_leaves))
    return groups.ordered(operations, {made[v] for v in trace.outputs if v in made})


def _rows_read(trace: FunctionTrace, reads: Collection[Read]) -> set[_Row]:
    """Return the rows of weights, and of the state that one stage holds: leaves that are held together are one."""
    found = set[_Row]()
    for name, part in reads:
        leaf, rows = part.leaf, [None] if part.rows is None else range(*part.rows)
        if name == "state" and leaf not in trace.stacked:
            held = next((leaves for leaves in trace.kept_together if leaf in leaves), ())
            leaf, rows = min(held, default=leaf), [None] * bool(held)
        found |= {(name, leaf, row) for row in rows}
    return found


def _bytes_of_row(trace: FunctionTrace, leaf: Var, row: int | None) -> float:
    return bytes_of(leaf.aval) / (1 if row is None else leaf.aval.shape[trace.axes.get(leaf, 0)])


def _on_leaves_alone(trace: FunctionTrace, operations: Sequence[Eqn], before: Sequence[Sequence[int]]) -> set[int]:
    """Return the operations on weights and state alone, such as an average of both: who reads it reads these leaves."""
    found = set[int]()
    for t, op in enumerate(operations):
        given = [v for v in variables(op.invars) if trace.kinds[v] != "a"]
        if found.issuperset(before[t]) and all(trace.kinds[v] in ("w", "s") for v in given):
            found.add(t)
    return found


def _together(
    rows: Sequence[set[_Row]], before: Sequence[Sequence[int]], of_leaves: Collection[int]
) -> dict[_Row, list[int]]:
    """Return the operations that read each row of a leaf, if there are several and none follows from another."""
    readers: dict[_Row, list[int]] = {}
    for t, of_op in enumerate(rows):
        for row in of_op:
            readers.setdefault(row, []).append(t)
    several = {row: times for row, times in readers.items() if len(times) > 1}
    bits = {row: 1 << k for k, row in enumerate(several)}
    own = [sum(bits[row] for row in of_op if row in bits) for of_op in rows]
    earlier: list[int] = []  # a bit for each row that is read before
    for of_op in before:
        found = 0
        for s in of_op:
            found |= earlier[s] | (0 if s in of_leaves else own[s])
        earlier.append(found)
    again = 0
    for ones, others in zip(own, earlier, strict=True):
        again |= ones & others
    return {row: times for row, times in several.items() if not again & bits[row]}


class _Groups:
    """Operations that read the same weights, as one each; any other operation is a group of its own.

    Args:
        trace: the trace of the function.
        before: per operation the earlier ones whose results it reads.
        together: operations that read the same row of a leaf.
    """

    def __init__(self, trace: FunctionTrace, before: Sequence[Sequence[int]], together: Mapping[_Row, Sequence[int]]):
        self.before, self.count = before, len(before)
        self.of = list(range(self.count))  # per operation, the first one of its group
        for times in together.values():
            for t in times:
                one, other = sorted((self._first(times[0]), self._first(t)))
                self.of[other] = one
        self.of = [self._first(t) for t in range(self.count)]
        leaves = {"params": trace.params, "state": trace.state}
        self.size = [0.0] * self.count  # per group, the bytes of what keeps it together
        for (name, leaf, row), times in together.items():
            self.size[self.of[times[0]]] += _bytes_of_row(trace, leaves[name][leaf], row)

    def _first(self, t: int) -> int:
        while self.of[t] != t:
            t = self.of[t]
        return t

    def in_turn(self) -> dict[int, list[int]]:
        """Return the members of each group, the groups in an order in which each follows those that it reads.

        Groups can wait for each other, if two layers run in one order on one input and in the other on another. Then
        the one with the fewest bytes is taken apart.
        """
        after: list[list[int]] = [[] for _ in self.before]
        for t, of_op in enumerate(self.before):
            for s in of_op:
                after[s].append(t)
        waits = [len(of_op) for of_op in self.before]  # of each operation, for how many others
        members: dict[int, list[int]] = {}
        for t, group in enumerate(self.of):
            members.setdefault(group, []).append(t)
        # of each group, how many members wait for another group
        inside = [sum(self.of[s] == self.of[t] for s in of_op) for t, of_op in enumerate(self.before)]
        waits = [count - own for count, own in zip(waits, inside, strict=True)]
        blocked = {group: sum(waits[t] > 0 for t in of_group) for group, of_group in members.items()}
        ready = [group for group, count in blocked.items() if not count]
        found: dict[int, list[int]] = {}
        heapq.heapify(ready)
        while len(found) < len(members):
            if not ready:
                stuck = [g for g in members if g not in found and blocked[g] < len(members[g])]
                ready = self._taken_apart(min(stuck, key=self.size.__getitem__), members, waits, blocked)
                continue
            group = heapq.heappop(ready)
            found[group] = members[group]
            for t in members[group]:
                for u in after[t]:
                    if self.of[u] != group:
                        waits[u] -= 1
                        blocked[self.of[u]] -= waits[u] == 0
                        if not blocked[self.of[u]] and not waits[u]:
                            heapq.heappush(ready, self.of[u])
        return found

    def _taken_apart(
        self, group: int, members: dict[int, list[int]], waits: list[int], blocked: dict[int, int]
    ) -> list[int]:
        """Make each operation of a group a group of its own, and return those that are ready."""
        apart = members.pop(group)
        for t in apart:
            waits[t] += sum(self.of[s] == group for s in self.before[t])
        for t in apart:
            self.of[t] = t
            members[t], blocked[t] = [t], int(waits[t] > 0)
        return [t for t in apart if not blocked[t]]

    def ordered(self, operations: Sequence[Eqn], last: Collection[int]) -> Order:
        """Return the operations ordered by how far each group is on its longest way to the operations `last`.

        What is on no such way, such as a new state, follows right after what it reads.
        """
        groups, flops = self.in_turn(), _forward_flops(operations)
        cost = {group: sum(flops[t] for t in times) + len(times) for group, times in groups.items()}
        before = {g: {self.of[s] for t in times for s in self.before[t]} - {g} for g, times in groups.items()}
        start, left = dict[int, float](), dict[int, float]()  # FLOPs up to the end of a group, and from there on
        for group, of_group in before.items():
            start[group] = cost[group] + max((start[g] for g in of_group), default=0.0)
        left |= dict.fromkeys((self.of[t] for t in last), 0.0)
        for group in reversed([*groups]):
            if group in left:
                for g in before[group]:
                    left[g] = max(left.get(g, 0.0), left[group] + cost[group])
        done: dict[int, float] = {}
        for group, of_group in before.items():
            own = start[group] / (start[group] + left[group]) if group in left else 0.0
            done[group] = max([own, *(done[g] for g in of_group)])
        found, together = list[Eqn](), list[tuple[int, int]]()
        for group in sorted(groups, key=done.__getitem__):
            found += [operations[t] for t in groups[group]]
            together.append((len(found) - len(groups[group]), len(found) - 1))
        return Order(found, [(first, end) for first, end in together if first < end])


def _forward_flops(operations: Sequence[Eqn]) -> list[float]:
    of_layers: dict[int, float] = {}
    found: list[float] = []
    for op in operations:
        if isinstance(op, ScanLayer):
            if id(op.scan) not in of_layers:
                of_layers[id(op.scan)] = equation_flops(op.scan) / op.scan.params["length"]
            found.append(of_layers[id(op.scan)])
        else:
            found.append(0.0 if isinstance(op, ScanStack) else equation_flops(op))
    return found


# who holds what


class Holding(NamedTuple):
    """The bytes of weights that IPUs hold: of each IPU alone, and of each leaf that all hold since several read it."""

    own: dict[int, float]
    shared: dict[int, float]

    def largest(self, apart: Collection[int] = ()) -> float:
        """Return the bytes of the IPU that holds the most, without some shared leaves."""
        return max(self.own.values()) + sum(size for leaf, size in self.shared.items() if leaf not in apart)

    @property
    def even(self) -> float:
        """Return an even share of the bytes of all weights that are read."""
        return (sum(self.own.values()) + sum(self.shared.values())) / len(self.own)


def holding(
    trace: FunctionTrace, reads: Reads, of_stages: Sequence[Sequence[Eqn]], ipus: Sequence[int | None]
) -> Holding:
    """Return the bytes of weights that IPUs would hold. What only concurrent stages read is split, as far as possible.

    Args:
        trace: the trace of the function.
        reads: what each operation reads.
        of_stages: the operations of each stage.
        ipus: per stage its IPU, or None if it is concurrent.
    """
    readers: dict[int, dict[int | None, set[int | None]]] = {}  # per leaf and row, the IPUs
    for ipu, of_stage in zip(ipus, of_stages, strict=True):
        of_stage_reads = set[Read]().union(*(reads.get(id(op), ()) for op in of_stage))
        for name, leaf, row in _rows_read(trace, of_stage_reads):
            if name == "params":
                readers.setdefault(leaf, {}).setdefault(row, set()).add(ipu)
    own = dict.fromkeys((ipu for ipu in ipus if ipu is not None), 0.0) or {0: 0.0}
    found = Holding(own, {})
    for number, by_row in readers.items():
        leaf, of_leaf = trace.params[number], set[int | None]().union(*by_row.values())
        if len(of_leaf) > 1 and (None in by_row or any(len(of_row) > 1 for of_row in by_row.values())):
            found.shared[number] = bytes_of(leaf.aval)
            continue
        for row in [None] if None in by_row else by_row:
            (ipu,) = by_row[row]
            for each in own if ipu is None else [ipu]:
                own[each] += _bytes_of_row(trace, leaf, row) / (len(own) if ipu is None else 1)
    return found

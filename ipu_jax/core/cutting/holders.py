"""Say which stages hold what, and cut a function so that each of its operations runs where its weights are.

    loss      embed, layers 0-3 | layers 4-7 | layers 8-11, norm, table      where its stages hold the weights
    another   embed, layers 0-3 | layers 4-7 | layers 8-11, norm, argmax     each operation where its weights are

An operation that reads weights of one stage runs there. Those that read none, or what all IPUs hold, run where the
least is sent.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
import numpy as np

from ipu_jax.base.annotations import Eqn, Tree, Var
from ipu_jax.base.jaxprs import variables
from ipu_jax.core.cutting.cut import TYPICAL, Cut, Places, work_of
from ipu_jax.core.cutting.dividing import small_values
from ipu_jax.core.cutting.division import Division
from ipu_jax.core.cutting.everywhere import is_everywhere
from ipu_jax.core.cutting.order import Order
from ipu_jax.core.cutting.split_leaves import Blocked, OverIpus
from ipu_jax.core.cutting.stages import Held
from ipu_jax.core.cutting.trace import FunctionTrace, Read
from ipu_jax.core.cutting.users_code import at_line, name_of
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.tree_parts import Part
from ipu_jax.core.stage import Stage

_ALL_IPUS: Final[Read] = "all IPUs", Part(0)
"""What an operation on all IPUs needs: a concurrent stage."""
_BY_ROWS: Final = "hold one leaf per layer, or stack them, layers first, as xs and ys of the scan over the layers"


class Holders:
    """Say which stages of a loss function hold which parts of its weights, and of the state that a function uses.

    Args:
        stages: the loss function's stages.
        weights: which group holds which part of its weights.
        state: who holds the state, each stage in its group "stage 0", "stage 1" and so on; None if nobody does yet.
        ipus: the number of IPUs.
        replaces_state: whether the function replaces it.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        weights: PackedLayout,
        state: PackedLayout | None,
        *,
        ipus: int,
        replaces_state: bool,
    ):
        self.stages, self.count, self._weights, self._state, self._ipus = stages, len(stages), weights, state, ipus
        self._replaces = replaces_state and state is not None
        self._parts: dict[tuple[str, int], list[tuple[str, Part]]] = {}  # per leaf, the groups with a part of it
        for name, tree in (("params", weights), ("state", state)):
            for group, parts in () if tree is None else tree.parts_of_groups.items():
                for part in parts:
                    self._parts.setdefault((name, part.leaf), []).append((group, part))

    def groups(self, read: Read) -> list[str]:
        """Return the groups that have what an operation reads."""
        name, part = read
        return [group for group, held in self._parts.get((name, part.leaf), ()) if held.holds(part)]

    def of(self, read: Read) -> Sequence[int]:
        """Return the stages that have what an operation reads."""
        if read[0] == "state" and self._state is None:
            return range(self.count)
        groups = self.groups(read)
        own = [stage.params if read[0] == "params" else f"stage {s}" for s, stage in enumerate(self.stages)]
        is_everywhere = read[0] == "params" and not {*groups} <= {*own}
        return [s for s in range(self.count) if is_everywhere or own[s] in groups]

    @property
    def ipus(self) -> list[int | None]:
        """Return the IPU of each stage, or None if it is concurrent."""
        return [stage.place for stage in self.stages]

    @property
    def homes(self) -> dict[int, int]:
        """Return, per leaf of the weights that is whole, the first stage that holds it."""
        whole = [leaf for leaf in self._weights.leaves if leaf.part.rows is None]
        return {leaf.part.leaf: min(self.of(("params", leaf.part))) for leaf in whole}

    def needs(self, trace: FunctionTrace) -> dict[int, dict[Read, Sequence[int]]]:
        """Return, per activation's operation by its id, what it reads or replaces, and the stages that can do so."""
        found: dict[int, dict[Read, Sequence[int]]] = {}
        for op, reads in trace.reads_but_for(small_values(trace)).items():
            of_op = sorted(reads if self._state is not None else (r for r in reads if r[0] == "params"), key=str)
            found[op] = {read: self.of(read) for read in of_op}
        for op in filter(is_everywhere, trace.activations):
            found[id(op)][_ALL_IPUS] = [s for s, ipu in enumerate(self.ipus) if ipu is None]
        whole = [(Part(k), new) for k, new in enumerate(trace.new_state) if k not in trace.stacked]
        for part, new in itertools.chain(whole, *trace.stacked.values()) if self._replaces else ():
            if trace.is_activation(new):  # the first stage that holds it sends it to the others
                found[id(trace.made_by[new])]["state", part] = self.of(("state", part))[:1]
        return found

    def may_run(self, places: Places, needs: dict[int, dict[Read, Sequence[int]]]) -> np.ndarray:
        """Return whether a stage may run an operation, (stages, operations)."""
        found = [{*range(self.count)}.intersection(*needs[id(op)].values()) for op in places.operations]
        return np.array([[s in of_operation for of_operation in found] for s in range(self.count)], bool)

    def split(self, trace: FunctionTrace) -> list[tuple[Var, int]]:
        """Return the leaves that lie split over the IPUs, and the dim of each."""
        of_leaves = (leaf for leaf in self._weights.leaves if leaf.part.rows is None)
        return [(trace.params[leaf.part.leaf], leaf.split) for leaf in of_leaves if leaf.split is not None]

    def of_new_state(self, trace: FunctionTrace) -> list[list[int]] | None:
        """Return, per leaf of a state that is placed and replaced, the stages that hold it whole; otherwise None."""
        if not self._replaces:
            return None
        leaves = range(len(trace.state))
        return [[] if k in trace.stacked else [*self.of(("state", Part(k)))] for k in leaves]

    def path(self, read: Read) -> str:
        name, part = read
        if read == _ALL_IPUS:
            return "everywhere"
        tree = self._weights if name == "params" else self._state
        assert tree is not None, "who holds it is known"
        return tree.paths[part.leaf] + ("" if part.rows is None else f"[{part.rows[0]}:{part.rows[1]}]")

    def held(self, division: Division) -> Held:
        """Return what the stages of a divided function hold.

        Raises:
            ValueError: one of them reads what another one holds.
        """
        own = [stage.params for stage in self.stages]
        shared, copied = list[tuple[str, ...]](), dict[Part, list[int]]()
        for s, piece in enumerate(division.pieces):
            read: list[tuple[Var, Read]] = [(v, ("params", division.parts[v])) for v in piece.weights]
            read += [(v, ("state", division.of_state[v])) for v in piece.state]
            others: list[str] = []
            for var, leaf in read:
                if s not in self.of(leaf):
                    raise ValueError(self.not_held(leaf, _reader(piece.equations, var), s))
                of_leaf = [group for group in self.groups(leaf) if leaf[0] == "params" and group not in own]
                others += of_leaf
                if of_leaf:
                    copied.setdefault(leaf[1], []).append(s)
            shared.append(tuple(dict.fromkeys([*self.stages[s].shared, *others])))
        new = [[value.part for value in division.state_of(s)] for s in range(self.count)]
        of_groups = {} if self._state is None else self._state.parts_of_groups
        state = new if self._state is None else [of_groups.get(f"stage {s}", []) for s in range(self.count)]
        assert state == new or not self._replaces, f"{new} is replaced where {state} is held"
        split = {leaf.part: leaf.split for leaf in self._weights.leaves if leaf.split is not None}
        over = OverIpus(self._ipus, split)
        self._check_split(division, over)
        return Held(self._weights.parts_of_groups, own, shared, state, copied, over)

    def _check_split(self, division: Division, over: OverIpus) -> None:
        for s in range(self.count):
            found = over.shards(division, s)
            if isinstance(found, Blocked):
                by = "as an output" if found.by is None else f"by {name_of(found.by)}{at_line(found.by)}"
                raise ValueError(
                    f"{self.path(('params', found.part))} lies split over the IPUs, and is needed whole {by}: read it "
                    "in an everywhere that splits it as in the loss function"
                )

    def not_held(self, read: Read, line: str, stage: int | None = None) -> str:
        """Say that a stage, or any stage, lacks what is read in this line."""
        if read == _ALL_IPUS:
            return f"everywhere{line} needs a concurrent stage, and the loss function has none: leave it out here, too"
        found = self.of(read)
        if not found:
            return (
                f"{self.path(read)} is read whole{line}, and its rows are on several IPUs: read the rows of each layer "
                "where the layer is computed, in a scan over them or as w[k]"
            )
        return (
            f"{self.path(read)} is on {_stages(found)}, and is read{line} by stage {stage}: read it where the loss "
            "function does, and use its results later"
        )


def _reader(equations: Sequence[Eqn], var: Var) -> str:
    return next((at_line(eqn) for eqn in equations if any(v is var for v in eqn.invars)), "")


def _stages(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return f"stage{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def cut_alike(trace: FunctionTrace, holders: Holders, like: FunctionTrace, cut: Cut, state: Tree) -> Cut:
    """Return where a function is cut that was cut for micro-batches of other sizes.

    It has the same stages if it has the same operations. Otherwise it is cut along the weights.

    Args:
        trace: the trace for the new sizes.
        holders: who holds weights and state.
        like, cut: the trace for the other sizes, and where it was cut.
        state: the tree of the state.

    Raises:
        ValueError: there is no such cut.
    """
    if _form(trace) == _form(like):
        same = {id(old): new for old, new in zip(like.activations, trace.activations, strict=True)}
        places = Places(trace, work_of(trace), Order([same[id(op)] for op in cut.operations]))
        found = places.cut_at(cut.ends[:-1], holders.ipus, marked=cut.marked)
        may = holders.may_run(places, holders.needs(trace))
        own = [may[s, start:end].all() for s, (start, end) in enumerate(itertools.pairwise([0, *found.ends]))]
        if all(own) and all(places.allowed[end - 1] for end in found.ends if 0 < end < len(found.operations)):
            return found
    return cut_along(trace, holders, state)


def _form(trace: FunctionTrace) -> list[tuple[Any, list[int | None]]]:
    """Return the primitive of each operation, and the numbers of the operations that make its inputs."""
    made = {v: t for t, op in enumerate(trace.activations) for v in op.outvars}
    return [(getattr(op, "primitive", type(op)), [*map(made.get, variables(op.invars))]) for op in trace.activations]


def cut_along(trace: FunctionTrace, holders: Holders, state: Tree) -> Cut:
    """Return where a function is cut, so that each operation is in a stage that holds what it reads.

    Of all such cuts it is the one whose stages are the most even and send the least. If there is none in the function's
    own order, each operation moves to the first stage that can run it.

    Raises:
        ValueError: there is none.
    """
    work, of_all = work_of(trace), holders.needs(trace)
    for order in (None, _by_stages):
        places = Places(trace, work, None if order is None else order(trace, of_all, holders))
        ends = _ends(places, holders.may_run(places, of_all))
        if ends is not None:
            return places.cut_at(ends, holders.ipus)
    kept = ""
    if places.kept[1]:
        path, _ = jax.tree.leaves_with_path(state)[places.kept[0]]
        leaf = f"state{jax.tree_util.keystr(path)}"
        kept = f": {leaf} is one array, and several stages read or replace it; {_BY_ROWS}"
    raise ValueError(f"the function cannot be cut into these {holders.count} stages{kept}")


def _by_stages(trace: FunctionTrace, needs: dict[int, dict[Read, Sequence[int]]], holders: Holders) -> Order:
    """Return the operations ordered by the first stage that can run each.

    Raises:
        ValueError: no stage can run one of them, after what it follows from.
    """
    first: dict[Var, tuple[int, str]] = {}  # of each value the stage, and what made it no earlier one
    turns: list[int] = []
    for op in trace.activations:
        before = [first[v] for v in variables(op.invars) if v in first]
        stage, why = max(before, default=(0, ""), key=operator.itemgetter(0))
        at = {f"{holders.path(read)} of {_stages(found)}": found for read, found in needs[id(op)].items() if found}
        for read, found in needs[id(op)].items():
            if not found:
                raise ValueError(holders.not_held(read, at_line(op)))
        for place, found in at.items():
            if max(found) < stage:
                mend = "read weights in the order of the loss function"
                raise ValueError(f"{place} is read{at_line(op)} after {why}: {mend}")
        may = {*range(stage, holders.count)}.intersection(*at.values())
        if not may:
            raise ValueError(f"one operation{at_line(op)} reads {' and '.join(at)}: read them one after the other")
        if min(may) > stage:
            why = max(at, key=lambda place: min({*at[place]}.intersection(range(stage, holders.count))))
            stage = min(may)
        first |= dict.fromkeys(op.outvars, (stage, why))
        turns.append(stage)
    return Order([trace.activations[t] for t in sorted(range(len(turns)), key=turns.__getitem__)])


def _ends(places: Places, may: np.ndarray) -> tuple[int, ...] | None:
    """Return, per stage but the last, the number of operations of it and of earlier ones; a stage may have none.

    Args:
        places: the places at which the function can be cut.
        may: (stages, operations), whether a stage may run an operation.
    """
    stages, count = may.shape
    total = np.concatenate([[0.0], np.cumsum(places.work)])
    never = np.concatenate([np.zeros((stages, 1), int), np.cumsum(~may, 1)], 1)
    at = np.array([0, *(t + 1 for t in range(count - 1) if places.allowed[t]), count])
    price = np.concatenate([[0], places.sent])[at]
    price = price * (TYPICAL / max(1.0, float(np.median(price))))
    even = max(float(total[-1]) / stages, 1.0)
    cost, before = np.where(at == 0, 0.0, np.inf), list[np.ndarray]()
    for s in range(stages):
        ones = np.flatnonzero(np.isfinite(cost))
        load = total[at][None] - total[at[ones]][:, None]
        fits = (at[None] >= at[ones][:, None]) & (never[s][at][None] == never[s][at[ones]][:, None])
        steps = np.where(fits, cost[ones][:, None] + (load / even) ** 2, np.inf)
        if not len(ones) or np.isinf(steps).all():
            return None
        before.append(ones[steps.argmin(0)])
        cost = steps.min(0) + price
    if np.isinf(cost[-1]):
        return None
    chosen = [len(at) - 1]
    for step in reversed(before):
        chosen.append(int(step[chosen[-1]]))
    return tuple(int(at[k]) for k in reversed(chosen[1:-1]))

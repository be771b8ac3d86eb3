"""Cut any other function of the weights that a loss function was cut for: its logits, its test loss, one decode step.

    loss      embed, layers 0-3 | layers 4-7 | layers 8-11, norm, table      where its stages hold the weights
    decode    embed, layers 0-3 | layers 4-7 | layers 8-11, norm, argmax     each operation where its weights are

The weights say where each operation belongs; the traces of the two functions are not compared. An operation that reads
weights of one stage runs there. Those that read none, or what all IPUs hold, run where the least is sent.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Final

import jax
import numpy as np

from ipu_jax.base import status
from ipu_jax.base.annotations import Batch, Eqn, Function, Tree, Var
from ipu_jax.base.checks import in_line
from ipu_jax.core.cutting import given
from ipu_jax.core.cutting.cut import TYPICAL, Cut, Places
from ipu_jax.core.cutting.description import described
from ipu_jax.core.cutting.division import Division, divide
from ipu_jax.core.cutting.function import FunctionModel, as_traced
from ipu_jax.core.cutting.stages import Held, make_stage
from ipu_jax.core.cutting.trace import FunctionTrace, Read, at_line
from ipu_jax.core.layout.whole_tree import Part, WholeTree

_BY_ROWS: Final = "hold one leaf per layer, or stack them, layers first, as xs and ys of the scan over the layers"


def forward_of(
    model: FunctionModel, fn: Function, inputs: Batch, state: Tree, placed: WholeTree | None = None
) -> tuple[FunctionModel, Tree]:
    """Return a function as stages that hold what the stages of the loss function hold, and the shapes of its outputs.

    Args:
        model: the loss function's stages.
        fn: the function: of the weights, the state, inputs and perhaps a key.
        inputs: one micro-batch of its inputs, or their shapes.
        state: the function's own state, which it returns anew after its outputs; or None. Then it gets the loss
            function's state, if that has one, and leaves it as it is.
        placed: who holds the function's own state already, as another function of these weights has it; or None.

    Raises:
        ValueError: the function takes or returns something else, or reads weights in another order than the stages.
    """
    if not callable(fn):
        raise ValueError(f"fn={in_line(fn):.60} is not callable: give a function of (params, inputs)")
    source = model.source
    own = None if state is None else given.shapes("state", state)
    taken, microbatch = source.state if own is None else own, given.shapes("inputs", inputs)
    call = given.ForwardCall(fn, taken, [True] * len(model.weights.paths), source.cast, replaces_state=own is not None)
    key = jax.eval_shape(lambda: jax.random.key(0)) if call.takes_key else None
    status.say("tracing the function")
    trace, results = call.traced(source.params, microbatch, key, source.mesh)
    status.say("cutting the function")
    given.check_effects(trace)
    given.check_constants(trace)
    if not trace.outputs:
        raise ValueError(f"fn returns {results[0]!r:.60}, without an array: return its outputs, any pytree of arrays")
    holders = _Holders(model, model.state if own is None else placed, replaces_state=own is not None)
    named = jax.tree.leaves_with_path(taken)
    cut = _cut(trace, holders, [f"state{jax.tree_util.keystr(path)}" for path, _ in named])
    division = dataclasses.replace(divide(trace, cut.ends, holds=False), homes=holders.homes(trace))
    held = holders.held(division)
    make = functools.partial(make_stage, division, held, microbatch, outputs=results[0], in_place=True)
    stages = tuple(make(s, name=stage.name, ipu=stage.ipu) for s, stage in enumerate(model.stages))
    stages = tuple(dataclasses.replace(stage, predict=stage.fn) for stage in stages)
    trees = jax.tree.structure((source.params, taken, microbatch, key)), jax.tree.structure(results)
    forward = FunctionModel(
        stages=stages,
        weights=model.weights,
        state=held.of_state(own) if own is not None else model.state,
        call=call if source.mesh is not None else as_traced(trace.closed, call, *trees),
        aux=jax.tree.structure(None),
        aux_home=(),
        microbatch=microbatch,
        key=key,
        cut=cut,
        source=source,
        described=described(division, cut, stages, held),
    )
    return forward, results[0]


class _Holders:
    """Which stages of a loss function hold which parts of its weights, and of the state that a function uses.

    Args:
        model: the loss function's stages.
        state: who holds the state, each stage in its group "stage 0", "stage 1" and so on; None if nobody does yet.
        replaces_state: whether the function replaces it.
    """

    def __init__(self, model: FunctionModel, state: WholeTree | None, *, replaces_state: bool):
        self.model, self.count, self._state, self._replaces = model, len(model.stages), state, replaces_state
        self._parts = {"params": [*model.weights.groups], "state": [] if state is None else [*state.groups]}

    def of(self, read: Read) -> frozenset[int]:
        """Return the stages that have what an operation reads."""
        name, part = read
        if name == "state" and self._state is None:
            return frozenset(range(self.count))
        groups = {group for group, parts in self._parts[name] if any(held.holds(part) for held in parts)}
        own = [stage.params if name == "params" else f"stage {s}" for s, stage in enumerate(self.model.stages)]
        is_everywhere = name == "params" and not groups <= {*own}
        return frozenset(s for s in range(self.count) if is_everywhere or own[s] in groups)

    def needs(self, trace: FunctionTrace) -> dict[int, dict[Read, frozenset[int]]]:
        """Return, per activation's operation by its id, what it reads or replaces, and the stages that have this."""
        found = {op: {read: self.of(read) for read in reads} for op, reads in trace.reads.items()}
        if self._state is not None and self._replaces:
            whole = [(Part(k), new) for k, new in enumerate(trace.new_state) if k not in trace.stacked]
            for part, new in filter(
                lambda one: trace.is_activation(one[1]), itertools.chain(whole, *trace.stacked.values())
            ):
                first = sorted(self.of(("state", part)))[:1]  # it sends the new value to the others
                found[id(trace.made_by[new])]["state", part] = frozenset(first)
        return found

    def homes(self, trace: FunctionTrace) -> list[list[int]] | None:
        """Return, per leaf of a state that is placed and replaced, the stages that hold it whole; otherwise None."""
        if self._state is None or not self._replaces:
            return None
        whole = [k not in trace.stacked for k in range(len(trace.state))]
        return [sorted(self.of(("state", Part(k)))) if is_whole else [] for k, is_whole in enumerate(whole)]

    def path(self, read: Read) -> str:
        name, part = read
        tree = self.model.weights if name == "params" else self._state
        assert tree is not None, "who holds it is known"
        return tree.paths[part.leaf] + ("" if part.rows is None else f"[{part.rows[0]}:{part.rows[1]}]")

    def held(self, division: Division) -> Held:
        """Return what the stages of a divided function hold.

        Raises:
            ValueError: one of them reads what another one holds.
        """
        groups: dict[str, Sequence[Part]] = {**dict(self.model.weights.groups)}
        own = [stage.params for stage in self.model.stages]
        shared, everywhere = list[tuple[str, ...]](), dict[Part, list[int]]()
        for s, piece in enumerate(division.pieces):
            read = [(v, ("params", division.parts[v])) for v in piece.weights]
            read += [(v, ("state", division.of_state[v])) for v in piece.state]
            for var, leaf in read:
                if s not in self.of(leaf):
                    raise ValueError(self.not_held(leaf, s, _reader(piece.equations, var)))
            parts = [division.parts[v] for v in piece.weights]
            others = [g for g, of_group in groups.items() if g not in own and _any_holds(of_group, parts)]
            shared.append(tuple(dict.fromkeys([*self.model.stages[s].shared, *others])))
            for part in (part for part in parts if any(_any_holds(groups[name], [part]) for name in others)):
                everywhere.setdefault(part, []).append(s)
        new = [tuple(value.part for value in division.state_of(s)) for s in range(self.count)]
        of_groups = dict(self._parts["state"])
        state = new if self._state is None else [of_groups.get(f"stage {s}", ()) for s in range(self.count)]
        assert state == new or not self._replaces, f"{new} is replaced where {state} is held"
        return Held(groups, own, shared, state, everywhere)

    def not_held(self, read: Read, stage: int, line: str) -> str:
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


def _any_holds(ones: Iterable[Part], others: Iterable[Part]) -> bool:
    return any(one.holds(other) for one in ones for other in others)


def _reader(equations: Sequence[Eqn], var: Var) -> str:
    return next((at_line(eqn) for eqn in equations if any(v is var for v in eqn.invars)), "")


def _stages(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return f"stage{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def _cut(trace: FunctionTrace, holders: _Holders, of_state: Sequence[str]) -> Cut:
    """Return where a function is cut, so that each operation is in a stage that holds what it reads.

    Of all such cuts it is the one whose stages are the most even and send the least.

    Raises:
        ValueError: there is none.
    """
    places = Places(trace, [True] * len(trace.params))
    needs, stages = holders.needs(trace), range(holders.count)
    found = [frozenset(stages).intersection(*needs[id(op)].values()) for op in places.operations]
    may = np.array([[s in of_op for of_op in found] for s in stages])  # per stage, whether it may run the operation
    ends = _ends(places, may)
    if ends is None:
        raise ValueError(_why_none(places, holders, needs, of_state))
    total = np.concatenate([[0.0], np.cumsum(places.work)])
    work = np.diff(total[[0, *ends]])
    sent = [int(places.sent[end - 1]) if end else 0 for end in ends[:-1]]
    is_waist = [bool(end == 0 or places.is_waist[end - 1]) for end in ends[:-1]]
    return Cut(
        ends=ends,
        work=tuple(map(float, work)),
        sent=tuple(sent),
        waists=int((places.allowed & places.is_waist).sum()),
        places=int(places.allowed.sum()),
        at_waists=all(is_waist),
        marked=False,
        heaviest=places.heaviest,
        kept=places.kept,
    )


def _ends(places: Places, may: np.ndarray) -> tuple[int, ...] | None:
    """Return, per stage, the number of operations of it and of earlier ones; a stage may have none.

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
    return tuple(int(at[k]) for k in reversed(chosen[:-1]))


def _why_none(
    places: Places, holders: _Holders, needs: dict[int, dict[Read, frozenset[int]]], of_state: Sequence[str]
) -> str:
    """Say which operation reads weights where no stage can run it."""
    latest: tuple[int, Read | None] = 0, None  # the first stage that can run the operations so far, and why
    seen: set[Read] = set()
    for op in places.operations:
        reads = sorted(needs[id(op)].items(), key=str)
        for read, found in reads:
            if not found:
                return holders.not_held(read, -1, at_line(op))
            if max(found) < latest[0] and latest[1] is not None:
                again = (
                    "" if read not in seen else ", for the second time: call the model once, on both inputs, stacked"
                )
                return (
                    f"{holders.path(read)} is on {_stages(found)}, and is read{at_line(op)} after "
                    f"{holders.path(latest[1])} of {_stages(holders.of(latest[1]))}"
                    + (again or ": read weights in the order of the loss function")
                )
        if reads and not frozenset.intersection(*(found for _, found in reads)):
            names = " and ".join(f"{holders.path(read)} of {_stages(found)}" for read, found in reads)
            return f"one operation{at_line(op)} reads {names}: read them one after the other, as the loss function does"
        for read, found in reads:
            seen.add(read)
            latest = max(latest, (min(found), read), key=operator.itemgetter(0))
    kept = f": {of_state[places.kept[0]]} is one array, and layers of several stages replace it; {_BY_ROWS}"
    return f"the function cannot be cut into these {holders.count} stages" + kept * bool(places.kept[1])

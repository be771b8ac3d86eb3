"""Cut any other function of the weights that a loss function was cut for: its logits, its test loss, one decode step.

    loss      embed, layers 0-3 | layers 4-7 | layers 8-11, norm, table      where its stages hold the weights
    decode    embed, layers 0-3 | layers 4-7 | layers 8-11, norm, argmax     each operation where its weights are

The weights say where each operation belongs; the traces of the two functions are not compared. An operation that reads
weights of one stage runs there. Those that read none, or what all IPUs hold, run where the least is sent.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Final

import jax
import numpy as np

from ipu_jax.base import status
from ipu_jax.base.annotations import Batch, Eqn, Function, Tree, Var
from ipu_jax.base.checks import in_line
from ipu_jax.base.jaxprs import needed, variables
from ipu_jax.core.cutting import given
from ipu_jax.core.cutting.cut import TYPICAL, Cut, Places
from ipu_jax.core.cutting.description import described
from ipu_jax.core.cutting.division import Division, divide
from ipu_jax.core.cutting.function import FunctionModel, as_traced
from ipu_jax.core.cutting.stages import Held, make_stage
from ipu_jax.core.cutting.trace import FunctionTrace, Read, at_line
from ipu_jax.core.layout.whole_tree import Part

_BY_ROWS: Final = "hold one leaf per layer, or stack them, layers first, as xs and ys of the scan over the layers"


def forward_of(model: FunctionModel, fn: Function, inputs: Batch, state: Tree) -> tuple[FunctionModel, Tree]:
    """Return a function as stages that hold what the stages of the loss function hold, and the shapes of its outputs.

    Args:
        model: the loss function's stages.
        fn: the function: of the weights, the state, inputs and perhaps a key.
        inputs: one micro-batch of its inputs, or their shapes.
        state: the function's own state, which it returns anew after its outputs; or None. Then it gets the loss
            function's state, if that has one, and leaves it as it is.

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
    trace.operations = _early(trace)
    holders = _Holders(model, reads_state=own is None)
    named = jax.tree.leaves_with_path(taken)
    cut = _cut(trace, holders, [f"state{jax.tree_util.keystr(path)}" for path, _ in named])
    division = divide(trace, cut.ends, holds=False)
    held = holders.held(division)
    make = functools.partial(make_stage, division, held, microbatch, recompute="none", outputs=results[0])
    placed = [(stage.name, stage.ipu) for stage in model.stages]
    stages = tuple(make(s, name=name, ipu=ipu) for s, (name, ipu) in enumerate(placed))
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


def _early(trace: FunctionTrace) -> list[Eqn]:
    """Return the operations in an order in which a new state is computed as soon as what it follows from is there.

    A cache may be replaced after the whole model, `jnp.where(is_active, new, old)`, and belongs to its layer's stage.
    """
    for_outputs = set(map(id, needed(trace.operations, trace.outputs, effects=True)))
    turn: dict[Var, int] = {}
    turns: list[int] = []
    for t, op in enumerate(trace.operations):
        made = [turn[v] for v in variables(op.invars) if v in turn and trace.is_activation(v)]
        turns.append(t if id(op) in for_outputs or not made else max(made))
        turn |= dict.fromkeys(op.outvars, turns[-1])
    return [trace.operations[t] for t in sorted(range(len(turns)), key=turns.__getitem__)]


class _Holders:
    """Which stages of a loss function hold which parts of its weights and its state.

    Args:
        model: the loss function's stages.
        reads_state: whether its state is read.
    """

    def __init__(self, model: FunctionModel, *, reads_state: bool):
        self.model, self.count, self._reads_state = model, len(model.stages), reads_state
        self._parts = {"params": [*model.weights.groups], "state": []}
        if reads_state and model.state is not None:
            self._parts["state"] = [*model.state.groups]

    def of(self, read: Read) -> frozenset[int]:
        """Return the stages that have what an operation reads."""
        name, part = read
        if name == "state" and not self._reads_state:
            return frozenset(range(self.count))
        groups = {group for group, parts in self._parts[name] if any(held.holds(part) for held in parts)}
        own = [stage.params if name == "params" else stage.state for stage in self.model.stages]
        is_everywhere = name == "params" and not groups <= {*own}
        return frozenset(s for s in range(self.count) if is_everywhere or own[s] in groups)

    def path(self, read: Read) -> str:
        name, part = read
        tree = self.model.weights if name == "params" else self.model.state
        assert tree is not None, "the function reads it"
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
        if not self._reads_state:
            state: list[Sequence[Part]] = [[value.part for value in division.state_of(s)] for s in range(self.count)]
        else:
            of_groups = dict(self._parts["state"])
            state = [of_groups.get(stage.state or "", ()) for stage in self.model.stages]
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
    places, count = Places(trace, [True] * len(trace.params)), holders.count
    operations = places.operations
    may = np.ones((count, len(operations)), bool)  # per stage, whether it may run the operation
    for t, op in enumerate(operations):
        for read in trace.reads[id(op)]:
            may[[s for s in range(count) if s not in holders.of(read)], t] = False
    ends = _ends(places, may)
    if ends is None:
        raise ValueError(_why_none(trace, places, holders, may, of_state))
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


def _why_none(trace: FunctionTrace, places: Places, holders: _Holders, may: np.ndarray, of_state: Sequence[str]) -> str:
    """Say which operation reads weights where no stage can run it."""
    latest: tuple[int, Read | None] = 0, None  # the first stage that can run the operations so far, and why
    seen: set[Read] = set()
    for t, op in enumerate(places.operations):
        reads = sorted(trace.reads[id(op)], key=str)
        for read in reads:
            found = holders.of(read)
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
        if reads and not may[:, t].any():
            names = " and ".join(f"{holders.path(read)} of {_stages(holders.of(read))}" for read in reads)
            return f"one operation{at_line(op)} reads {names}: read them one after the other, as the loss function does"
        for read in reads:
            seen.add(read)
            latest = max(latest, (min(holders.of(read)), read), key=operator.itemgetter(0))
    kept = f": {of_state[places.kept[0]]} is one array, and several stages read or replace it; {_BY_ROWS}"
    return f"the function cannot be cut into these {holders.count} stages" + kept * bool(places.kept[1])

"""What a task does: F, B or W of one team's segment, as a guarded piece of the scan's body.

Each takes the rows of the tick, `{"F": (teams,), "B": ..., "W": ..., "x": ..., "dy": ...}`, micro-batches of this IPU
or -1, and the state of the scan, and returns the state with what the task changed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax._collectives import from_source
from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.engine._guard import Fence, guard
from ipu_jax.engine.plan import Plan
from ipu_jax.engine.stash import Key, Stash
from ipu_jax.programs.gradient_sums import Sum
from ipu_jax.programs.segment import NO_MESSAGE, MicrobatchInputs, keys_of
from ipu_jax.weights import packing
from ipu_jax.weights.packed_layout import Group
from ipu_jax.weights.packing import Sharded

Rows = dict[str, Any]
State = dict[str, Any]

WATCH: Callable[..., None] | None = None
"""Where a program was traced with it, called on the host whenever an IPU runs a task: `WATCH(kind, stage=, microbatch=,
tick=, ipu=, replica=)`, the stage being the first of its segment. Tests count with it what is really executed."""


class Tasks:
    """Run the tasks of a plan's teams on one IPU of one replica.

    Args:
        plan: from `make_plan`.
        params, state: this IPU's shards.
        batch: leaves (M, micro-batch, ...).
        key: a random key, or None.
        loss_cotangent: of one micro-batch's loss.
        backward: whether F keeps what B needs, and changes the model's state.
    """

    def __init__(
        self,
        plan: Plan,
        params: Sharded,
        state: Sharded,
        batch: Any,
        key: Any,
        *,
        loss_cotangent: float,
        backward: bool,
    ):
        self.plan, self.params, self.model_state, self.batch, self.key = plan, params, state, batch, key
        self.loss_cotangent, self.backward = loss_cotangent, backward
        self.me, self.replica = lax.axis_index(IPU_AXIS), lax.axis_index(REPLICA_AXIS)
        self.slots = [slot[0] for slot in params.slots]
        self.stash = Stash(plan)
        self.last = plan.last

    # what a team reads; its first segment speaks for all of them

    def lead(self, t: int) -> int:
        return self.plan.teams[t][0]

    def groups(self, t: int) -> list[Group]:
        return [self.params.layout.group(name) for name in self.plan.segments[self.lead(t)].groups]

    def held(self, t: int) -> Any:
        """Return the packed weights that the team uses, and no others."""
        used = {leaf.slot for g in self.groups(t) if g.ipu is not None for leaf in g.leaves}
        slots = [slot if k in used else None for k, slot in enumerate(self.slots)]
        return slots, {g.name: self.params.concurrent[g.name] for g in self.groups(t) if g.ipu is None}

    def weights(self, t: int, slots: Sequence[Any], concurrent: dict[str, Any]) -> dict[str, Any]:
        return {g.name: _unpacked(slots, concurrent, g) for g in self.groups(t)}

    def given(self, t: int, at: Any) -> MicrobatchInputs:
        microbatch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), self.batch)
        stages = self.plan.segments[self.lead(t)].stages
        numbers = [self.stage_number(t) + k for k in range(len(stages))]
        return MicrobatchInputs(microbatch, keys_of(self.key, self.replica, at, numbers, stages))

    def stage_number(self, t: int) -> Any:
        """Return the number of the first stage of this IPU's segment."""
        firsts = {self.plan.segments[i].place: self.plan.segments[i].first for i in self.plan.teams[t]}
        if len(firsts) == 1:
            return next(iter(firsts.values()))
        return jnp.asarray([firsts.get(ipu, 0) for ipu in range(self.plan.ipus)])[self.me]

    def state_groups(self, t: int) -> list[Group]:
        return [self.model_state.layout.group(name) for name in self.plan.segments[self.lead(t)].state_groups]

    def read_state(self, t: int, carry: dict[str, Any]) -> dict[str, Any]:
        if not self.state_groups(t):
            return {}
        slots, concurrent = carry["model_state"]
        return {g.name: _unpacked(slots, concurrent, g) for g in self.state_groups(t)}

    # what it changes

    def incoming(self, t: int, state: dict[str, Any]) -> tuple[Any, int | None]:
        """Return the register that a team reads x from, and the IPU to broadcast it from, or None."""
        i = self.lead(t)
        if i == 0:
            return NO_MESSAGE, None
        lane, before, here = self.plan.lanes[i - 1], self.plan.segments[i - 1].place, self.plan.segments[i].place
        return self.register(lane, "y", state), before if here is None else None

    def outgoing(self, t: int, state: dict[str, Any]) -> tuple[Any, int | None]:
        """Return the register that a team reads its cotangent from, and the IPU to broadcast it from, or None."""
        i = self.lead(t)
        if i == self.last:
            return None, None
        lane, here, after = self.plan.lanes[i], self.plan.segments[i].place, self.plan.segments[i + 1].place
        return self.register(lane, "dx", state), after if here is None else None

    def register(self, lane: int, key: str, state: dict[str, Any]) -> Any:
        return state[f"{key}_in" if self.plan.routes[lane] else key][lane]

    def read(self, key: Key, carry: dict[str, Any], at: Any, fence: Fence) -> list[Any]:
        return self.stash.read(carry["stash"], key, self.me, at, fence.zero)

    def write(self, key: Key, carry: dict[str, Any], at: Any, values: list[Any], fence: Fence) -> dict[str, Any]:
        return {"stash": self.stash.write(carry["stash"], key, self.me, at, values, fence.zero)}

    def arrived(self, key: Key, register: Any, source: int | None, at: Any, carry: dict[str, Any], fence: Fence) -> Any:
        """Return the message, read from its ring where messages queue, and broadcast where all IPUs need it."""
        if key in self.stash:
            register = jax.tree.unflatten(jax.tree.structure(register), self.read(key, carry, at, fence))
        return register if source is None else from_source(source, register)

    def keep_result(
        self, t: int, y: Any, new_state: Any, aux: Any, at: Any, carry: dict[str, Any], zero: Any
    ) -> dict[str, Any]:
        i, kept = self.lead(t), {}
        if i < self.last:
            kept["y"] = _replaced(carry["y"], self.plan.lanes[i], y)
        else:
            kept["loss"] = carry["loss"] + y.astype(carry["loss"].dtype)
        if jax.tree.leaves(aux):
            kept[f"aux{i}"] = jax.tree.map(
                lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, at, 0), carry[f"aux{i}"], aux
            )
        if self.backward and self.state_groups(t):
            slots, concurrent = carry["model_state"]
            for group in self.state_groups(t):
                if group.ipu is not None:
                    slots = packing.write(slots, group, new_state[group.name], zero)
                else:
                    concurrent = {**concurrent, group.name: jax.tree.leaves(new_state[group.name])}
            kept["model_state"] = (slots, concurrent)
        return kept

    def trained(self, t: int) -> list[tuple[Group, int]]:
        """Return the leaves that get a gradient, in the order of dparams, as groups and positions in them."""
        groups = sorted(self.groups(t), key=lambda g: g.name)
        return [(g, k) for g in groups for k, leaf in enumerate(g.leaves) if not leaf.frozen]

    def sums(self, t: int, state: State) -> list[Sum]:
        """Return the accumulator of each trained leaf."""
        found = []
        for group, k in self.trained(t):
            leaf = group.leaves[k]
            concurrent = group.ipu is None
            total = state["concurrent_sums"][group.name][k] if concurrent else state["sums"][leaf.slot]
            found.append(Sum(total, total.shape if concurrent else leaf.shape))
        return found

    def keep_sums(self, t: int, totals: list[Any], state: State) -> State:
        sums = list(state["sums"])
        concurrent = {name: list(leaves) for name, leaves in state["concurrent_sums"].items()}
        for (group, k), total in zip(self.trained(t), totals, strict=True):
            if group.ipu is None:
                concurrent[group.name][k] = total
            else:
                sums[group.leaves[k].slot] = total
        return {"sums": sums, "concurrent_sums": concurrent}

    def keep_dx(self, t: int, dx: list[Any], state: State) -> State:
        i = self.lead(t)
        if i == 0:
            return {}
        if self.plan.segments[i].place is None:
            dx = [lax.psum(leaf, IPU_AXIS) for leaf in dx]
        return {"dx": _replaced(state["dx"], self.plan.lanes[i - 1], dx)}

    def run_forward(self, t: int, rows: Rows, state: State) -> State:
        halves, at = self.plan.halves[self.lead(t)], rows["F"][t]
        register, source = self.incoming(t, state)

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), register_here, at_here = fence((self.held(t), register, at))
            self.watch("F", t, at_here, rows)
            x = self.arrived(("x", t), register_here, source, at_here, carry, fence)
            weights, given = self.weights(t, slots, concurrent), self.given(t, at_here)
            y, new_state, aux, stash = halves.forward(weights, x, given, self.read_state(t, carry))
            kept = self.keep_result(t, y, new_state, aux, at_here, carry, fence.zero)
            if self.backward and ("stash", t) in self.stash:
                kept |= self.write(("stash", t), carry, at_here, stash, fence)
            return {**carry, **kept}

        return self.guarded(at, body, state, self.results(t))

    def results(self, t: int) -> list[str]:
        """Return the entries of the scan's state that F of a team reads and changes."""
        i = self.lead(t)
        keys = ["stash", "y" if i < self.last else "loss", f"aux{i}"]
        return [*keys, "model_state"] if self.state_groups(t) else keys

    def run_backward(self, t: int, rows: Rows, state: State) -> State:
        """Run B: compute dx, and dparams unless the team has its own W."""
        i, at = self.lead(t), rows["B"][t]
        segment, halves, is_split = self.plan.segments[i], self.plan.halves[i], self.plan.is_split(i)
        register, source = self.outgoing(t, state)

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), register_here, at_here = fence((self.held(t), register, at))
            self.watch("B", t, at_here, rows)
            dy = self.arrived(("dy", t), register_here, source, at_here, carry, fence)
            if i == self.last:
                dy = fence([jnp.full((), self.loss_cotangent, halves.y.dtype)])
            if segment.place is None:
                dy = [leaf / self.plan.ipus for leaf in dy]
            saved = self.read(("stash", t), carry, at_here, fence)
            weights, given = self.weights(t, slots, concurrent), self.given(t, at_here)
            if is_split:
                dx, cut = halves.backward_input(weights, given, saved, dy)
                return {**carry, **self.keep_dx(t, dx, carry), **self.write(("cut", t), carry, at_here, cut, fence)}
            totals, dx = halves.backward(weights, given, saved, dy, self.sums(t, carry), fence.zero)
            return {**carry, **self.keep_sums(t, totals, carry), **self.keep_dx(t, dx, carry)}

        return self.guarded(
            at, body, state, ["stash", "dx"] if is_split else ["stash", "sums", "concurrent_sums", "dx"]
        )

    def run_weight(self, t: int, rows: Rows, state: State) -> State:
        """Run W: compute dparams from the stash and from what B left."""
        halves, at = self.plan.halves[self.lead(t)], rows["W"][t]

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), at_here = fence((self.held(t), at))
            self.watch("W", t, at_here, rows)
            saved = self.read(("stash", t), carry, at_here, fence)
            cut = self.read(("cut", t), carry, at_here, fence)
            weights, given = self.weights(t, slots, concurrent), self.given(t, at_here)
            totals = halves.backward_weight(weights, given, saved, cut, self.sums(t, carry), fence.zero)
            return {**carry, **self.keep_sums(t, totals, carry)}

        return self.guarded(at, body, state, ["stash", "sums", "concurrent_sums"])

    def run_head(self, t: int, rows: Rows, state: State) -> State:
        """Run F and B of the concurrent loss head together, so that nothing of it is stashed."""
        halves, at = self.plan.halves[self.last], rows["F"][t]
        register, source = self.incoming(t, state)

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), register_here, at_here = fence((self.held(t), register, at))
            self.watch("F", t, at_here, rows)
            x = self.arrived(("x", t), register_here, source, at_here, carry, fence)
            weights, given = self.weights(t, slots, concurrent), self.given(t, at_here)
            y, new_state, aux, saved = halves.forward(weights, x, given, self.read_state(t, carry))
            self.watch("B", t, at_here, rows)
            dy = fence([jnp.full((), self.loss_cotangent / self.plan.ipus, y.dtype)])
            totals, dx = halves.backward(weights, given, saved, dy, self.sums(t, carry), fence.zero)
            kept = self.keep_result(t, y, new_state, aux, at_here, carry, fence.zero)
            kept |= self.keep_sums(t, totals, carry)
            return {**carry, **kept, **self.keep_dx(t, dx, carry)}

        return self.guarded(at, body, state, [*self.results(t), "sums", "concurrent_sums", "dx"])

    def watch(self, kind: str, t: int, at: Any, rows: Rows) -> None:
        if WATCH is not None:
            jax.debug.callback(
                WATCH,
                kind,
                stage=self.stage_number(t),
                microbatch=at,
                tick=rows["tick"],
                ipu=self.me,
                replica=self.replica,
            )

    def queue_up(self, kind: str, t: int, rows: Rows, state: State) -> State:
        """Put the message that just arrived for a team into its ring, if its messages queue."""
        key: Key = ("x", t) if kind == "x" else ("dy", t)
        if key not in self.stash:
            return state
        i, at = self.lead(t), rows[kind][t]
        register = (
            self.register(self.plan.lanes[i - 1], "y", state)
            if kind == "x"
            else self.register(self.plan.lanes[i], "dx", state)
        )

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            leaves, at_here = fence((jax.tree.leaves(register), at))
            return self.write(key, carry, at_here, leaves, fence)

        return self.guarded(at, body, state, ["stash"])

    def guarded(self, at: Any, body: Callable[[Fence, State], State], state: State, keys: list[str]) -> State:
        """Run `body` where `at` is a micro-batch, after all guards before it."""
        ran, carry = guard(in_turn(state, at) >= 0, body, {key: state[key] for key in keys if key in state})
        return {**state, **carry, "ran": state["ran"] + ran}


def in_turn(state: State, value: Any) -> Any:
    """Return `value` in a way that XLA cannot compute before all guards so far have run: their count decides.

    Without it XLA may put an exchange, which waits for all IPUs, before the tasks of some of them: F of IPU 0, the
    exchange of its y, F of IPU 1. Each IPU would then wait for the other's task before it begins its own.
    """
    return jax.tree.map(lambda leaf: jnp.where(state["ran"] < 0, jnp.zeros_like(leaf), leaf), value)


def _unpacked(slots: Sequence[Any], concurrent: dict[str, Any], group: Group) -> Any:
    if group.ipu is not None:
        return packing.read(slots, group)
    return jax.tree.unflatten(group.treedef, concurrent[group.name])


def _replaced(values: Sequence[Any], at: int, value: Any) -> list[Any]:
    return [value if i == at else old for i, old in enumerate(values)]

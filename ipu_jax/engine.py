"""The staged scan: one `lax.scan` over ticks inside one `shard_map`, which runs whatever schedule it is given.

A tick is the clock of `schedule.py`, in straight-line code. Under the two-phase clock:

    entry   broadcast y -> F of concurrent segments                                     (predicate: the tick alone)
    F       each IPU: F of its local segments, if the schedule says so                  (predicate: tick and IPU)
            ppermute y to the neighbour
    head    broadcast y -> F and B of the loss head on all IPUs -> reduce dx            (predicate: the tick alone)
    B       each IPU: B (and W) of its local segments                                   (predicate: tick and IPU)
            ppermute dx to the neighbour
    exit    broadcast dy -> B of concurrent segments -> reduce dx                       (predicate: the tick alone)

Under the one-phase clock F, B and W stand together, before both exchanges and the head.

Gradients are taken inside, by `jax.vjp`; nothing differentiates through the scan, so memory does not grow with the
micro-batches. What a predicate decides stands in a `guard`.

The program runs under `check_vma=False`, so that a stage may be any plain function. There JAX's rule is that the
differentiated scalar is the sum over the devices: a value that all IPUs hold alike gets its cotangent in equal parts of
1/n, and the partial cotangents of a replicated input are summed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax import packing
from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.guard import Fence, guard
from ipu_jax.halves import split_floats
from ipu_jax.packing import Group, Sharded
from ipu_jax.plan import TABLES, Plan
from ipu_jax.segment import NOTHING, Given, keys_of
from ipu_jax.stash import Key, Stash

IDLE_FILL = 0.0
"""What registers and stash hold before anything is written. Tests make it NaN: a bubble that leaks shows."""

WATCH: Callable[..., None] | None = None
"""Where a program was traced with it, called on the host whenever an IPU runs a task: `WATCH(kind, stage=, microbatch=,
tick=, ipu=, replica=)`, the stage being the first of its segment. Tests count with it what is really executed."""


def _idle(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(shape.shape, IDLE_FILL if jnp.issubdtype(shape.dtype, jnp.inexact) else 0, shape.dtype)


def _floats(message: Any) -> list[Any]:
    return split_floats(message)[0]


def _from(source: int, tree: Any, axis: str = IPU_AXIS) -> Any:
    """Everyone on the axis gets what `source` holds. Communicates one psum a leaf; what others hold never counts."""
    me = lax.axis_index(axis)

    def one(leaf: jax.Array) -> jax.Array:
        bits = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        return lax.psum(jnp.where(me == source, bits, jnp.zeros_like(bits)), axis).astype(leaf.dtype)

    return jax.tree.map(one, tree)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gives, on every IPU.

    Attributes:
        loss: mean over micro-batches and replicas; the same on all IPUs.
        aux: per stage that returned one, with a leading M; the same on all IPUs of a replica.
        state: laid out as it came.
        gradients: laid out as the parameters, summed over replicas; None without a backward.
    """

    loss: Any
    aux: dict[str, Any]
    state: Sharded
    gradients: Sharded | None


def run(
    plan: Plan, params: Sharded, state: Sharded, batch: Any, key: Any, *, seed: float, replicas: int, backward: bool
) -> Result:
    """The program of one IPU: call it inside `shard_map` over axes ("replica", "ipu") with `check_vma=False`.

    Args:
        plan: from `make_plan`.
        params, state: this IPU's shards; a slot is (1, *slot.shape).
        batch: leaves (M, micro-batch, ...), the same on every IPU of the replica.
        key: a random key, the same on all replicas, or None.
        seed: the cotangent of one micro-batch's loss.
        replicas: size of axis "replica".
        backward: whether to compute gradients and change the state; without, only F runs.
    """
    return _Program(plan, params, state, batch, key, seed, replicas, backward).run()


class _Program:
    """One trace of the staged scan."""

    def __init__(
        self,
        plan: Plan,
        params: Sharded,
        state: Sharded,
        batch: Any,
        key: Any,
        seed: float,
        replicas: int,
        backward: bool,
    ):
        self.plan, self.params, self.model_state, self.batch, self.key = plan, params, state, batch, key
        self.seed, self.replicas, self.backward = seed, replicas, backward
        self.layout = params.layout
        self.me, self.replica = lax.axis_index(IPU_AXIS), lax.axis_index(REPLICA_AXIS)
        self.slots = [slot[0] for slot in params.slots]
        self.stash = Stash(plan)
        self.last = plan.last
        self.local = [t for t, team in enumerate(plan.teams) if plan.segments[team[0]].place is not None]
        self.entry = [
            t for t, team in enumerate(plan.teams) if plan.schedule.phase(plan.segments[team[0]].first, "F") == "entry"
        ]
        self.head = plan.team_of(self.last) if plan.segments[self.last].place is None else None

    # what a team reads; its first segment speaks for all of them

    def lead(self, t: int) -> int:
        return self.plan.teams[t][0]

    def groups(self, t: int) -> list[Group]:
        return [self.layout.group(name) for name in self.plan.segments[self.lead(t)].groups]

    def held(self, t: int) -> Any:
        """The packed weights that the team uses, and nothing else."""
        used = {leaf.slot for g in self.groups(t) if g.ipu is not None for leaf in g.leaves}
        slots = [slot if k in used else None for k, slot in enumerate(self.slots)]
        return slots, {g.name: self.params.concurrent[g.name] for g in self.groups(t) if g.ipu is None}

    def weights(self, t: int, slots: Sequence[Any], concurrent: dict[str, Any]) -> dict[str, Any]:
        return {g.name: _unpacked(slots, concurrent, g) for g in self.groups(t)}

    def given(self, t: int, at: Any) -> Given:
        microbatch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), self.batch)
        stages = self.plan.segments[self.lead(t)].stages
        numbers = [self.stage_number(t) + k for k in range(len(stages))]
        return Given(microbatch, keys_of(self.key, self.replica, at, numbers, stages))

    def stage_number(self, t: int) -> Any:
        """The number of the first stage of this IPU's segment."""
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

    # the state of the scan

    def start(self) -> dict[str, Any]:
        plan = self.plan
        loss = plan.halves[-1].y
        state: dict[str, Any] = {
            "y": [jax.tree.map(_idle, message) for message in plan.messages],
            "y_in": [jax.tree.map(_idle, m) if r else None for m, r in zip(plan.messages, plan.routes, strict=True)],
            "loss": jnp.zeros((), jnp.promote_types(loss.dtype, jnp.float32)),
            "model_state": ([slot[0] for slot in self.model_state.slots], self.model_state.concurrent),
        }
        for i, halves in enumerate(plan.halves):
            count = plan.schedule.micro_batches
            state[f"aux{i}"] = jax.tree.map(lambda a, n=count: jnp.zeros((n, *a.shape), a.dtype), halves.aux)
        if self.backward:
            floats = [[_idle(leaf) for leaf in _floats(message)] for message in plan.messages]
            trained = self.layout.trained_slots
            state |= {
                "dx": floats,
                "dx_in": [f if r else None for f, r in zip(floats, plan.routes, strict=True)],
                "stash": jax.tree.map(_idle, self.stash.shapes),
                "sums": [_zeros(slot) if k in trained else None for k, slot in enumerate(self.slots)],
                "concurrent_sums": {
                    g.name: [
                        None if leaf.frozen else _zeros(value)
                        for leaf, value in zip(g.leaves, self.params.concurrent[g.name], strict=True)
                    ]
                    for g in self.layout.groups
                    if g.ipu is None
                },
            }
        return state

    # F and B of one segment

    def incoming(self, t: int, state: dict[str, Any]) -> tuple[Any, int | None]:
        """The register that a team reads its x from, and the IPU that it must be broadcast from (or None)."""
        i = self.lead(t)
        if i == 0:
            return NOTHING, None
        lane, before, here = self.plan.lanes[i - 1], self.plan.segments[i - 1].place, self.plan.segments[i].place
        return self.register(lane, "y", state), before if here is None else None

    def outgoing(self, t: int, state: dict[str, Any]) -> tuple[Any, int | None]:
        """The register that a team reads the cotangent of its result from, likewise."""
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
        """The message itself: out of its ring where messages queue up, and on all IPUs where all need it."""
        if key in self.stash:
            register = jax.tree.unflatten(jax.tree.structure(register), self.read(key, carry, at, fence))
        return register if source is None else _from(source, register)

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

    def keep_sums(self, t: int, dparams: list[Any], state: dict[str, Any], zero: Any) -> dict[str, Any]:
        sums, concurrent = state["sums"], dict(state["concurrent_sums"])
        following = iter(dparams)
        for group in sorted(self.groups(t), key=lambda g: g.name):
            new = [next(following) for leaf in group.leaves if not leaf.frozen]
            if group.ipu is not None:
                sums = packing.accumulate(sums, group, new, zero)
            else:
                of_group = iter(new)
                concurrent[group.name] = [
                    None if total is None else total + next(of_group).astype(total.dtype)
                    for total in concurrent[group.name]
                ]
        return {"sums": sums, "concurrent_sums": concurrent}

    def keep_dx(self, t: int, dx: list[Any], state: dict[str, Any]) -> dict[str, Any]:
        i = self.lead(t)
        if i == 0:
            return {}
        if self.plan.segments[i].place is None:
            dx = [lax.psum(leaf, IPU_AXIS) for leaf in dx]
        return {"dx": _replaced(state["dx"], self.plan.lanes[i - 1], dx)}

    def run_forward(self, t: int, rows: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
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
        """What F of a team reads and changes of the scan's state."""
        i = self.lead(t)
        keys = ["stash", "y" if i < self.last else "loss", f"aux{i}"]
        return [*keys, "model_state"] if self.state_groups(t) else keys

    def run_backward(self, t: int, rows: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """B: dx, and dparams unless the team has a W of its own."""
        i, at = self.lead(t), rows["B"][t]
        segment, halves, is_split = self.plan.segments[i], self.plan.halves[i], self.plan.is_split(i)
        register, source = self.outgoing(t, state)

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), register_here, at_here = fence((self.held(t), register, at))
            self.watch("B", t, at_here, rows)
            dy = self.arrived(("dy", t), register_here, source, at_here, carry, fence)
            if i == self.last:
                dy = fence([jnp.full((), self.seed, halves.y.dtype)])
            if segment.place is None:
                dy = [leaf / self.plan.ipus for leaf in dy]
            saved = self.read(("stash", t), carry, at_here, fence)
            weights, given = self.weights(t, slots, concurrent), self.given(t, at_here)
            if is_split:
                dx, cut = halves.backward_input(weights, given, saved, dy)
                return {**carry, **self.keep_dx(t, dx, carry), **self.write(("cut", t), carry, at_here, cut, fence)}
            dparams, dx = halves.backward(weights, given, saved, dy)
            return {**carry, **self.keep_sums(t, dparams, carry, fence.zero), **self.keep_dx(t, dx, carry)}

        return self.guarded(
            at, body, state, ["stash", "dx"] if is_split else ["stash", "sums", "concurrent_sums", "dx"]
        )

    def run_weight(self, t: int, rows: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """W: dparams, from what F stashed and B cut."""
        halves, at = self.plan.halves[self.lead(t)], rows["W"][t]

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), at_here = fence((self.held(t), at))
            self.watch("W", t, at_here, rows)
            saved = self.read(("stash", t), carry, at_here, fence)
            cut = self.read(("cut", t), carry, at_here, fence)
            weights, given = self.weights(t, slots, concurrent), self.given(t, at_here)
            dparams = halves.backward_weight(weights, given, saved, cut)
            return {**carry, **self.keep_sums(t, dparams, carry, fence.zero)}

        return self.guarded(at, body, state, ["stash", "sums", "concurrent_sums"])

    def run_head(self, t: int, rows: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """F and B of the concurrent loss head in one go: nothing of it is stashed."""
        halves, at = self.plan.halves[self.last], rows["F"][t]
        register, source = self.incoming(t, state)

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), register_here, at_here = fence((self.held(t), register, at))
            self.watch("F", t, at_here, rows)
            x = self.arrived(("x", t), register_here, source, at_here, carry, fence)
            weights, given = self.weights(t, slots, concurrent), self.given(t, at_here)
            y, new_state, aux, saved = halves.forward(weights, x, given, self.read_state(t, carry))
            self.watch("B", t, at_here, rows)
            dy = fence([jnp.full((), self.seed / self.plan.ipus, y.dtype)])
            dparams, dx = halves.backward(weights, given, saved, dy)
            kept = self.keep_result(t, y, new_state, aux, at_here, carry, fence.zero)
            kept |= self.keep_sums(t, dparams, carry, fence.zero)
            return {**carry, **kept, **self.keep_dx(t, dx, carry)}

        return self.guarded(at, body, state, [*self.results(t), "sums", "concurrent_sums", "dx"])

    def watch(self, kind: str, t: int, at: Any, rows: dict[str, Any]) -> None:
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

    def queue_up(self, kind: str, t: int, rows: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """Puts the message that just came for a team into its ring, where messages queue up."""
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

    def guarded(self, at: Any, body: Any, state: dict[str, Any], keys: list[str]) -> dict[str, Any]:
        carry = {key: state[key] for key in keys if key in state}
        return {**state, **guard(at >= 0, body, carry)}

    # the tick

    def exchange(self, state: dict[str, Any], key: str, *, back: bool) -> dict[str, Any]:
        received = list(state[f"{key}_in"])
        for lane, pairs in enumerate(self.plan.routes):
            if pairs:
                permutation = [(b, a) for a, b in pairs] if back else list(pairs)
                received[lane] = jax.tree.map(lambda v, p=permutation: lax.ppermute(v, IPU_AXIS, p), state[key][lane])
        return {**state, f"{key}_in": received}

    def behind(self, teams: Sequence[int]) -> list[int]:
        """The teams that get an activation from some of these."""
        return sorted({self.plan.team_of(i + 1) for t in teams for i in self.plan.teams[t] if i < self.last})

    def before(self, teams: Sequence[int]) -> list[int]:
        """The teams that get a gradient from some of these."""
        return sorted({self.plan.team_of(i - 1) for t in teams for i in self.plan.teams[t] if i > 0})

    def tick(self, state: dict[str, Any], rows: dict[str, Any]) -> tuple[dict[str, Any], None]:
        one_phase = self.plan.schedule.clock == "one-phase"

        def backward(state: dict[str, Any]) -> dict[str, Any]:
            for t in reversed(self.local):
                state = self.run_backward(t, rows, state)
            for t in self.local:
                if self.plan.is_split(self.lead(t)):
                    state = self.run_weight(t, rows, state)
            return state

        def back(state: dict[str, Any]) -> dict[str, Any]:
            state = self.exchange(state, "dx", back=True)
            for t in self.before(self.local):
                state = self.queue_up("dy", t, rows, state)
            return state

        for t in self.entry:
            state = self.run_forward(t, rows, state)
            for after in self.behind([t]):
                state = self.queue_up("x", after, rows, state)
        for t in self.local:
            state = self.run_forward(t, rows, state)
        if self.backward and one_phase:
            state = backward(state)
        state = self.exchange(state, "y", back=False)
        for t in self.behind(self.local):
            state = self.queue_up("x", t, rows, state)
        if self.backward and one_phase:
            state = back(state)
        if self.head is not None:
            state = (self.run_head if self.backward else self.run_forward)(self.head, rows, state)
            if self.backward:
                for t in self.before([self.head]):
                    state = self.queue_up("dy", t, rows, state)
        if self.backward:
            if not one_phase:
                state = back(backward(state))
            for t in reversed(self.entry):
                state = self.run_backward(t, rows, state)
                for before in self.before([t]):
                    state = self.queue_up("dy", before, rows, state)
        return state, None

    def run(self) -> Result:
        ticks = self.plan.schedule.ticks if self.backward else self.plan.schedule.forward_ticks
        rows: dict[str, Any] = {kind: jnp.asarray(self.plan.tables[kind][:ticks])[:, :, self.me] for kind in TABLES}
        if WATCH is not None:
            rows["tick"] = jnp.arange(ticks)
        state, _ = lax.scan(self.tick, self.start(), rows)
        loss, aux = state["loss"] / self.plan.schedule.micro_batches, {}
        for i, segment in enumerate(self.plan.segments):
            of_segment = state[f"aux{i}"]
            twice = aux.keys() & of_segment.keys()
            if twice:
                raise ValueError(f"two stages called {min(twice)!r} return aux: give them names of their own, name=...")
            aux |= of_segment if segment.place is None else _from(segment.place, of_segment)
        place = self.plan.segments[-1].place
        if place is not None:
            loss = _from(place, loss)
        if self.replicas > 1:
            loss = lax.pmean(loss, REPLICA_AXIS)
        return Result(loss, aux, self.new_state(state), self.gradients(state) if self.backward else None)

    def new_state(self, state: dict[str, Any]) -> Sharded:
        slots, concurrent = state["model_state"]
        found = Sharded([slot[None] for slot in slots], concurrent, self.model_state.layout)

        def over_replicas(leaf: Any) -> Any:
            is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
            return lax.pmean(leaf, REPLICA_AXIS) if is_float else _from(0, leaf, REPLICA_AXIS)

        return jax.tree.map(over_replicas, found) if self.replicas > 1 and self.backward else found

    def gradients(self, state: dict[str, Any]) -> Sharded:
        sums, concurrent = state["sums"], dict(state["concurrent_sums"])
        for group in self.layout.groups:
            if group.ipu is None:
                # what every IPU holds whole got a part of its gradient on each
                concurrent[group.name] = [
                    g if g is None or IPU_AXIS in leaf.spec else lax.psum(g, IPU_AXIS)
                    for leaf, g in zip(group.leaves, concurrent[group.name], strict=True)
                ]
        found = Sharded([None if total is None else total[None] for total in sums], concurrent, self.layout)
        if self.replicas > 1:
            found = jax.tree.map(lambda g: lax.psum(g, REPLICA_AXIS), found)
        is_none = lambda leaf: leaf is None  # noqa: E731
        return jax.tree.map(
            lambda g, p: jnp.zeros_like(p) if g is None else g.astype(p.dtype), found, self.params, is_leaf=is_none
        )


def _zeros(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def _unpacked(slots: Sequence[Any], concurrent: dict[str, Any], group: Group) -> Any:
    if group.ipu is not None:
        return packing.read(slots, group)
    return jax.tree.unflatten(group.treedef, concurrent[group.name])


def _replaced(values: Sequence[Any], at: int, value: Any) -> list[Any]:
    return [value if i == at else old for i, old in enumerate(values)]

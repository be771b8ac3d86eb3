"""The staged scan: one `lax.scan` over ticks inside one `shard_map`, which runs whatever schedule it is given.

A tick goes through the phases that the schedule's clock names (`PHASES`). Under the two-phase clock:

    entry   broadcast y -> F of concurrent segments                                     (predicate: the tick alone)
    F       each IPU: F of its local segments, if the schedule says so                  (predicate: tick and IPU)
    head    broadcast y -> F and B of the loss head on all IPUs -> reduce dx            (predicate: the tick alone)
    B       each IPU: B of its local segments                                           (predicate: tick and IPU)
            ppermute y to the neighbour, and dx back
    exit    broadcast dy -> B of concurrent segments -> reduce dx                       (predicate: the tick alone)

Under the one-phase clock F, B and W stand together, before the head. IPUs wait for each other in the exchanges and in
concurrent stages, and nowhere else: what an IPU gets it uses in the next tick, so one exchange at the end serves both
phases, and every task of the tick stands before it (`in_turn`).

Gradients are taken inside, by `jax.vjp`; nothing differentiates through the scan, so memory does not grow with the
micro-batches. What a predicate decides stands in a `guard`.

The program runs under `check_vma=False`, so that a stage may be any plain function. There JAX's rule is that the
differentiated scalar is the sum over the devices: a value that all IPUs hold alike gets its cotangent in equal parts of
1/n, and the partial cotangents of a replicated input are summed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax._collectives import from_source, state_over_replicas
from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.engine import _tasks as tasks
from ipu_jax.engine._tasks import Tasks, in_turn
from ipu_jax.engine.plan import TABLES, Plan
from ipu_jax.programs.segment import merged_aux
from ipu_jax.programs.segment_program import split_floats
from ipu_jax.schedules import PHASES
from ipu_jax.weights.packing import Sharded

IDLE_FILL = 0.0
"""What registers and stash hold before anything is written. Tests make it NaN: a bubble that leaks shows."""


def _idle(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(shape.shape, IDLE_FILL if jnp.issubdtype(shape.dtype, jnp.inexact) else 0, shape.dtype)


def _floats(message: Any) -> list[Any]:
    return split_floats(message)[0]


@dataclasses.dataclass(frozen=True)
class Result:
    """Hold the results of a run, on every IPU.

    Attributes:
        loss: mean over micro-batches, and over replicas where it is reduced; the same on all IPUs.
        aux: per stage that returned one, with a leading M; the same on all IPUs of a replica.
        state: laid out as it came.
        gradients: laid out as the parameters, float32 at least; summed over replicas where they are reduced; None
            without a backward.
    """

    loss: Any
    aux: dict[str, Any]
    state: Sharded
    gradients: Sharded | None


def run(
    plan: Plan,
    params: Sharded,
    state: Sharded,
    batch: Any,
    key: Any,
    *,
    loss_cotangent: float,
    reduce_over_replicas: bool,
    backward: bool,
) -> Result:
    """Run one IPU's program. Call it inside `shard_map` over ("replica", "ipu") with `check_vma=False`.

    Args:
        plan: from `make_plan`.
        params, state: this IPU's shards; a slot is (1, *slot.shape).
        batch: leaves (M, micro-batch, ...), the same on every IPU of the replica.
        key: a random key, the same on all replicas, or None.
        loss_cotangent: of one micro-batch's loss.
        reduce_over_replicas: whether loss, new state and gradients are reduced over the axis "replica"; otherwise they
            are this replica's own.
        backward: whether to compute gradients and change the state; without, only F runs.
    """
    return _Program(plan, params, state, batch, key, loss_cotangent, reduce_over_replicas, backward).run()


class _Program:
    """Trace the staged scan once."""

    def __init__(
        self,
        plan: Plan,
        params: Sharded,
        state: Sharded,
        batch: Any,
        key: Any,
        loss_cotangent: float,
        reduce_over_replicas: bool,
        backward: bool,
    ):
        self.plan, self.params, self.model_state = plan, params, state
        self.reduces, self.backward = reduce_over_replicas, backward
        self.tasks = Tasks(plan, params, state, batch, key, loss_cotangent=loss_cotangent, backward=backward)
        firsts = [plan.segments[team[0]] for team in plan.teams]
        self.local = [t for t, segment in enumerate(firsts) if segment.place is not None]
        self.entry = [t for t, segment in enumerate(firsts) if plan.schedule.phase(segment.first, "F") == "entry"]
        self.head = plan.team_of(plan.last) if plan.segments[plan.last].place is None else None
        self.phases = {
            "entry": self.entry_phase,
            "F": self.forward_phase,
            "work": self.work_phase,
            "head": self.head_phase,
            "B": self.backward_phase,
            "exit": self.exit_phase,
        }

    # the state of the scan

    def start(self) -> dict[str, Any]:
        plan = self.plan
        loss = plan.halves[-1].y
        state: dict[str, Any] = {
            "y": [jax.tree.map(_idle, message) for message in plan.messages],
            "y_in": [jax.tree.map(_idle, m) if r else None for m, r in zip(plan.messages, plan.routes, strict=True)],
            "ran": jnp.int32(0),
            "loss": jnp.zeros((), jnp.promote_types(loss.dtype, jnp.float32)),
            "model_state": ([slot[0] for slot in self.model_state.slots], self.model_state.concurrent),
        }
        for i, halves in enumerate(plan.halves):
            count = plan.schedule.micro_batches
            state[f"aux{i}"] = jax.tree.map(lambda a, n=count: jnp.zeros((n, *a.shape), a.dtype), halves.aux)
        if self.backward:
            floats = [[_idle(leaf) for leaf in _floats(message)] for message in plan.messages]
            trained = self.params.layout.trainable_slots
            state |= {
                "dx": floats,
                "dx_in": [f if r else None for f, r in zip(floats, plan.routes, strict=True)],
                "stash": jax.tree.map(_idle, self.tasks.stash.shapes),
                "sums": [_zeros(slot) if k in trained else None for k, slot in enumerate(self.tasks.slots)],
                "concurrent_sums": {
                    g.name: [
                        None if leaf.frozen else _zeros(value)
                        for leaf, value in zip(g.leaves, self.params.concurrent[g.name], strict=True)
                    ]
                    for g in self.params.layout.groups
                    if g.ipu is None
                },
            }
        return state

    # the tick

    def exchange(self, state: dict[str, Any], key: str, *, back: bool) -> dict[str, Any]:
        received = list(state[f"{key}_in"])
        for lane, pairs in enumerate(self.plan.routes):
            if pairs:
                permutation = [(b, a) for a, b in pairs] if back else list(pairs)
                sent = in_turn(state, state[key][lane])
                received[lane] = jax.tree.map(lambda v, p=permutation: lax.ppermute(v, IPU_AXIS, p), sent)
        return {**state, f"{key}_in": received}

    def behind(self, teams: Sequence[int]) -> list[int]:
        """Return the teams that get an activation from any of these."""
        return sorted({self.plan.team_of(i + 1) for t in teams for i in self.plan.teams[t] if i < self.plan.last})

    def before(self, teams: Sequence[int]) -> list[int]:
        """Return the teams that get a gradient from any of these."""
        return sorted({self.plan.team_of(i - 1) for t in teams for i in self.plan.teams[t] if i > 0})

    def tick(self, state: dict[str, Any], rows: dict[str, Any]) -> tuple[dict[str, Any], None]:
        for phase in PHASES[self.plan.schedule.clock]:
            state = self.phases[phase](state, rows)
        return state, None

    def entry_phase(self, state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
        for t in self.entry:
            state = self.tasks.run_forward(t, rows, state)
            for after in self.behind([t]):
                state = self.tasks.queue_up("x", after, rows, state)
        return state

    def forward_phase(self, state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
        for t in self.local:
            state = self.tasks.run_forward(t, rows, state)
        return self.queue_for_concurrent(state, rows)

    def work_phase(self, state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
        for t in self.local:
            state = self.tasks.run_forward(t, rows, state)
        return self.queue_for_concurrent(self.backward_phase(state, rows), rows)

    def queue_for_concurrent(self, state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
        """Queue what concurrent teams get from local ones: it is on its IPU already."""
        for t in self.behind(self.local):
            if t not in self.local:
                state = self.tasks.queue_up("x", t, rows, state)
        return state

    def head_phase(self, state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
        if self.head is None:
            return state
        if not self.backward:
            return self.tasks.run_forward(self.head, rows, state)
        state = self.tasks.run_head(self.head, rows, state)
        for t in self.before([self.head]):
            state = self.tasks.queue_up("dy", t, rows, state)
        return state

    def backward_phase(self, state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
        if not self.backward:
            return state
        for t in reversed(self.local):
            state = self.tasks.run_backward(t, rows, state)
        for t in self.local:
            if self.plan.is_split(self.plan.teams[t][0]):
                state = self.tasks.run_weight(t, rows, state)
        return state

    def exit_phase(self, state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
        """Exchange the messages of all phases before, and run B of the concurrent stages of `entry`."""
        state = self.exchange(state, "y", back=False)
        for t in self.behind(self.local):
            if t in self.local:
                state = self.tasks.queue_up("x", t, rows, state)
        if not self.backward:
            return state
        state = self.exchange(state, "dx", back=True)
        for t in self.before(self.local):
            state = self.tasks.queue_up("dy", t, rows, state)
        for t in reversed(self.entry):
            state = self.tasks.run_backward(t, rows, state)
            for t_before in self.before([t]):
                state = self.tasks.queue_up("dy", t_before, rows, state)
        return state

    def run(self) -> Result:
        ticks = self.plan.schedule.ticks if self.backward else self.plan.schedule.forward_ticks
        rows: dict[str, Any] = {
            kind: jnp.asarray(self.plan.tables[kind][:ticks])[:, :, self.tasks.me] for kind in TABLES
        }
        if tasks.WATCH is not None:
            rows["tick"] = jnp.arange(ticks)
        state, _ = lax.scan(self.tick, self.start(), rows)
        loss, aux = state["loss"] / self.plan.schedule.micro_batches, {}
        for i, segment in enumerate(self.plan.segments):
            of_segment = state[f"aux{i}"]
            if segment.place is not None:
                of_segment = from_source(segment.place, of_segment)
            aux = merged_aux(aux, of_segment)
        place = self.plan.segments[-1].place
        if place is not None:
            loss = from_source(place, loss)
        if self.reduces:
            loss = lax.pmean(loss, REPLICA_AXIS)
        return Result(loss, aux, self.new_state(state), self.gradients(state) if self.backward else None)

    def new_state(self, state: dict[str, Any]) -> Sharded:
        slots, concurrent = state["model_state"]
        found = Sharded([slot[None] for slot in slots], concurrent, self.model_state.layout)
        return state_over_replicas(found) if self.reduces and self.backward else found

    def gradients(self, state: dict[str, Any]) -> Sharded:
        sums, concurrent = state["sums"], dict(state["concurrent_sums"])
        for group in self.params.layout.groups:
            if group.ipu is None:
                # what every IPU holds whole got a part of its gradient on each
                concurrent[group.name] = [
                    g if g is None or IPU_AXIS in leaf.spec else lax.psum(g, IPU_AXIS)
                    for leaf, g in zip(group.leaves, concurrent[group.name], strict=True)
                ]
        found = Sharded([None if total is None else total[None] for total in sums], concurrent, self.params.layout)
        if self.reduces:
            found = jax.tree.map(lambda g: lax.psum(g, REPLICA_AXIS), found)
        is_none = lambda leaf: leaf is None  # noqa: E731
        return jax.tree.map(lambda g, p: jnp.zeros_like(p) if g is None else g, found, self.params, is_leaf=is_none)


def _zeros(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))

"""Run the staged scan: one `lax.scan` over ticks inside one `shard_map`, for any schedule.

A tick goes through the phases of the schedule's clock, in the order of `PHASES`. Under the two-phase clock:

    entry   broadcast y -> F of concurrent segments                                     (predicate: the tick alone)
    F       each IPU: F of its local segments, if the schedule says so                  (predicate: tick and IPU)
    head    broadcast y -> F and B of the loss head on all IPUs -> reduce dx            (predicate: the tick alone)
    B       each IPU: B of its local segments                                           (predicate: tick and IPU)
    W       each IPU: W of its local segments, if the schedule splits the backward      (predicate: tick and IPU)
            ppermute y to the neighbour, and dx back
    exit    broadcast dy -> B of concurrent segments -> reduce dx                       (predicate: the tick alone)

Under the one-phase clock F, B and W run in one phase, before the head. IPUs wait for each other only in exchanges and
in concurrent stages. An IPU uses a message in the tick after it arrives, so one exchange at the end of the tick serves
all phases, and every task of the tick runs before it (`_guard`). Where no IPU sends, there is no exchange.

On chips, which send while they compute, messages of the two-phase clock travel beside tasks in every tick, in no guard:
y during the head and B, dx during W, or without W during the next tick's F.

Gradients are computed inside the scan, by `jax.vjp` of each segment. Nothing differentiates through the scan, so memory
does not grow with the number of micro-batches. Each conditional task is a `guard`.

The program runs under `check_vma=False`, so that a stage can be any plain function. JAX then differentiates the sum of
the scalar over devices. So the cotangent of a value that is the same on all n IPUs is divided by n, and the partial
cotangents of a replicated input are summed.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax.base.annotations import Tree, Value
from ipu_jax.core.collectives import broadcast, reduced, state_over_replicas
from ipu_jax.core.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.engine import labels
from ipu_jax.core.engine._carry import Carry, first_carry
from ipu_jax.core.engine._flight import report_of
from ipu_jax.core.engine._runs import microbatches_at, runs_of, runs_of_ipu
from ipu_jax.core.engine._stretches import stretches_of
from ipu_jax.core.engine._tasks import Rows, Tasks
from ipu_jax.core.engine.plan import EXCHANGES, TABLES, Exchange, Plan
from ipu_jax.core.programs.segment import merged_aux
from ipu_jax.core.schedules import PHASES
from ipu_jax.core.step_args import StepArgs
from ipu_jax.core.weights.packing import Sharded

# per whether the backward is split: y is under way during head and B, and dx during W or the next tick's F
_OVERLAPPED = {
    False: ("dx", "entry", "F", "y", "head", "B", "exit"),
    True: ("entry", "F", "y", "head", "B", "dx", "W", "exit"),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Hold the results of a run, on every IPU.

    Attributes:
        loss: mean over micro-batches, and over replicas where it is reduced; the same on all IPUs; None in prediction.
        aux: per stage that returned one, with a leading M; the same on all IPUs of a replica.
        state: laid out like the state that was passed.
        gradients: laid out like the weights that were passed, at least float32; summed over replicas where they are
            reduced; None without a backward.
        outputs: in prediction, the outputs of the last stage with a leading M; the same on all IPUs of a replica,
            except where the stage's `predict_specs` split them.
        adds_loss: whether stages add losses to the last stage's loss.
    """

    loss: Value
    aux: dict[str, Tree]
    state: Sharded
    gradients: Sharded | None
    outputs: Tree = None
    adds_loss: bool = False


def run(plan: Plan, args: StepArgs, *, loss_cotangent: Value = None, reduce_over_replicas: bool = False) -> Result:
    """Run one IPU's program. Call it inside `shard_map` over ("replica", "ipu") with `check_vma=False`.

    Args:
        plan: from `make_plan`.
        args: this IPU's shards of weights and state, a slot is (1, *slot.shape); its replica's batch, leaves (M,
            micro-batch, ...); and the key, the same on all replicas.
        loss_cotangent: the cotangent of one micro-batch's loss, if there is a backward.
        reduce_over_replicas: whether to reduce loss, new state and gradients over the axis "replica"; otherwise they
            are this replica's own.
    """
    return _Program(plan, args, loss_cotangent).run(reduce_over_replicas)


class _Program:
    """Trace the staged scan once."""

    def __init__(self, plan: Plan, args: StepArgs, loss_cotangent: Value):
        self.plan, self.args = plan, args
        self.ticks = plan.schedule.ticks if plan.backward else plan.schedule.forward_ticks
        self.tasks = Tasks(plan, args, loss_cotangent, range(self.ticks))
        self.name = labels.of_plan(plan)
        self.report = report_of(plan, self.name)
        firsts = [plan.segments[members[0]] for members in plan.classes]
        self.local = [c for c, segment in enumerate(firsts) if segment.place is not None]
        self.entry = [c for c, segment in enumerate(firsts) if plan.schedule.phase(segment.first, "F") == "entry"]
        self.head = plan.class_of(plan.last) if plan.segments[plan.last].place is None else None
        self.phases = {
            "entry": self.entry_phase,
            "F": self.forward_phase,
            "work": self.work_phase,
            "head": self.head_phase,
            "B": self.backward_phase,
            "W": self.weight_phase,
            "exit": self.exit_phase,
            "y": functools.partial(self.exchange, "y"),
            "dx": functools.partial(self.exchange, "dx"),
        }
        overlapped = _OVERLAPPED[plan.schedule.weight is not None]
        self.order = overlapped if self.overlaps else PHASES[plan.schedule.clock]

    def run(self, reduce_over_replicas: bool) -> Result:
        runs = runs_of_ipu(runs_of([self.plan.tables[kind] for kind in TABLES]), self.tasks.ipu)
        with jax.named_scope(self.name):
            # one program may make several updates
            carry = self.report(first_carry(self.plan, self.args, self.tasks.stash), 0, self.args[:2])
            for ticks in stretches_of(self.plan, self.ticks):
                self.tasks = self.tasks.within(ticks)
                rows: Rows = {kind: jnp.asarray(self.plan.exchanges[kind][ticks]) for kind in EXCHANGES}
                rows["tick"] = jnp.arange(ticks.start, ticks.stop, dtype=jnp.int32)
                carry, _ = lax.scan(lambda carry, rows: self.tick(carry, rows, runs), carry, rows)
        place = self.plan.segments[-1].place
        if self.plan.role == "prediction":
            outputs = carry.outputs if place is None else broadcast(place, carry.outputs)
            return Result(None, {}, self.new_state(carry, reduce_over_replicas=False), None, outputs)
        loss, aux = carry.loss / self.plan.schedule.micro_batches, {}
        for i, segment in enumerate(self.plan.segments):
            own = carry.aux[i]
            aux = merged_aux(aux, own if segment.place is None else broadcast(segment.place, own))
        if place is not None:
            loss = broadcast(place, loss)
        if reduce_over_replicas:
            loss = reduced(lax.pmean, loss, REPLICA_AXIS)
        state = self.new_state(carry, reduce_over_replicas)
        gradients = self.gradients(carry, reduce_over_replicas) if self.plan.backward else None
        return Result(loss, aux, state, gradients, adds_loss=self.plan.programs[-1].results.adds_loss)

    def new_state(self, carry: Carry, reduce_over_replicas: bool) -> Sharded:
        slots, concurrent = carry.model_state
        state = Sharded([slot[None] for slot in slots], concurrent, self.args.state.layout)
        return state_over_replicas(state) if reduce_over_replicas and self.plan.role == "training" else state

    def gradients(self, carry: Carry, reduce_over_replicas: bool) -> Sharded:
        params, concurrent = self.args.params, dict(carry.concurrent_sums)
        for group in self.plan.params.groups:
            if group.ipu is None:
                # each IPU computed a part of the gradient of a leaf that all of them hold whole
                concurrent[group.name] = [
                    g if g is None or IPU_AXIS in leaf.spec else lax.psum(g, IPU_AXIS)
                    for leaf, g in zip(group.leaves, concurrent[group.name], strict=True)
                ]
        slots = [None if total is None else total[None] for total in carry.sums]
        sums = Sharded(slots, concurrent, params.layout)
        if reduce_over_replicas:
            sums = jax.tree.map(lambda g: reduced(lax.psum, g, REPLICA_AXIS), sums)
        is_none = lambda leaf: leaf is None
        return jax.tree.map(lambda g, p: jnp.zeros_like(p) if g is None else g, sums, params, is_leaf=is_none)

    # the tick

    def tick(self, carry: Carry, rows: Rows, runs: Value) -> tuple[Carry, None]:
        microbatches = microbatches_at(runs, rows["tick"])
        rows = rows | dict(zip(TABLES, jnp.split(microbatches, len(TABLES)), strict=True))
        for phase in self.order:
            carry = self.phases[phase](carry, rows)
        return self.report(carry, rows["tick"] + 1, None), None

    def entry_phase(self, carry: Carry, rows: Rows) -> Carry:
        for c in self.entry:
            carry = self.tasks.run_forward(c, rows, carry)
            for receiver in self.downstream([c]):
                carry = self.tasks.enqueue("x", receiver, rows, carry, [c])
        return carry

    def forward_phase(self, carry: Carry, rows: Rows) -> Carry:
        for c in self.local:
            carry = self.tasks.run_forward(c, rows, carry)
        return self.enqueue_for_concurrent(carry, rows)

    def work_phase(self, carry: Carry, rows: Rows) -> Carry:
        for c in self.local:
            carry = self.tasks.run_forward(c, rows, carry)
        carry = self.weight_phase(self.backward_phase(carry, rows), rows)
        return self.enqueue_for_concurrent(carry, rows)

    def head_phase(self, carry: Carry, rows: Rows) -> Carry:
        if self.head is None:
            return carry
        if not self.plan.backward:
            return self.tasks.run_forward(self.head, rows, carry)
        carry = self.tasks.run_head(self.head, rows, carry)
        for c in self.upstream([self.head]):
            carry = self.tasks.enqueue("dy", c, rows, carry, [self.head])
        return carry

    def backward_phase(self, carry: Carry, rows: Rows) -> Carry:
        if not self.plan.backward:
            return carry
        for c in reversed(self.local):
            carry = self.tasks.run_backward(c, rows, carry)
        return carry

    def weight_phase(self, carry: Carry, rows: Rows) -> Carry:
        for c in reversed(self.local) if self.plan.backward else ():
            if self.plan.is_split(self.plan.classes[c][0]):
                carry = self.tasks.run_weight(c, rows, carry)
        return carry

    def exit_phase(self, carry: Carry, rows: Rows) -> Carry:
        """Exchange the messages of all earlier phases, and run B of the concurrent stages of `entry`."""
        if not self.overlaps:
            carry = self.exchange("y", carry, rows)
        for c in self.downstream(self.local):
            if c in self.local:
                carry = self.tasks.enqueue("x", c, rows, carry, self.local)
        if not self.plan.backward:
            return carry
        if not self.overlaps:
            carry = self.exchange("dx", carry, rows)
        for c in self.upstream(self.local):
            carry = self.tasks.enqueue("dy", c, rows, carry, self.local)
        for c in reversed(self.entry):
            carry = self.tasks.run_backward(c, rows, carry)
            for receiver in self.upstream([c]):
                carry = self.tasks.enqueue("dy", receiver, rows, carry, [c])
        return carry

    @property
    def overlaps(self) -> bool:
        """Return whether tasks run while messages are under way.

        Under the two-phase clock no task waits for a message of its own phase. A CPU has no cores to spare for this.
        """
        queues = any((kind, c) in self.tasks.stash for kind in ("x", "dy") for c in self.local)
        return self.plan.platform != "cpu" and self.plan.schedule.clock == "two-phase" and not queues

    def exchange(self, kind: Exchange, carry: Carry, rows: Rows) -> Carry:
        """Run the ppermute of each channel that crosses IPUs."""
        if kind == "dx" and not self.plan.backward:
            return carry
        for k, channel in enumerate(self.plan.channels):
            if channel.pairs:
                sends = None if self.overlaps else rows[kind][k]
                carry = self.tasks.exchange(kind, k, sends, carry)
        return carry

    def enqueue_for_concurrent(self, carry: Carry, rows: Rows) -> Carry:
        """Enqueue the messages from local classes to concurrent ones, which need no exchange."""
        for c in self.downstream(self.local):
            if c not in self.local:
                carry = self.tasks.enqueue("x", c, rows, carry, self.local)
        return carry

    def downstream(self, classes: Sequence[int]) -> list[int]:
        """Return the classes that receive an activation from any of these."""
        plan = self.plan
        return sorted({plan.class_of(i + 1) for c in classes for i in plan.classes[c] if i < plan.last})

    def upstream(self, classes: Sequence[int]) -> list[int]:
        """Return the classes that receive a gradient from any of these."""
        return sorted({self.plan.class_of(i - 1) for c in classes for i in self.plan.classes[c] if i > 0})

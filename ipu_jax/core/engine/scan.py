"""Run the staged scan: one `lax.scan` over ticks inside one `shard_map`, for any schedule.

A tick is a list of actions (`order`): F, B and W of segment classes, and exchanges with neighbours. Each conditional
action is a `guard`. Whether a local segment's task runs depends on tick and IPU. Whether a concurrent segment's task or
an exchange runs depends on the tick alone. Where no IPU sends, there is no exchange.

Gradients are computed inside the scan, by `jax.vjp` of each segment. Nothing differentiates through the scan, so memory
does not grow with the number of micro-batches.

The program runs under `check_vma=False`, so that a stage can be any plain function. JAX then differentiates the sum of
the scalar over devices. So the cotangent of a value that is the same on all n IPUs is divided by n, and the partial
cotangents of a replicated input are summed.

Dims: P IPUs, T ticks, R rows of tables (a segment class each), N runs of a row, M micro-batches of a row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax.base import facts
from ipu_jax.base.annotations import Tree, Value
from ipu_jax.core.engine import labels
from ipu_jax.core.engine._carry import Carry, first_carry
from ipu_jax.core.engine._tasks import Rows, Tasks
from ipu_jax.core.engine.labels import PlanNames
from ipu_jax.core.engine.order import EXCHANGES, WORDS
from ipu_jax.core.engine.plan import TABLES, Plan, stretches_of
from ipu_jax.core.layout.packing import Sharded, sharded_of
from ipu_jax.core.mesh.axes import broadcast, reduced, state_over_replicas
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.programs.segment import merged_aux
from ipu_jax.core.step_args import StepArgs


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

    def run(self, reduce_over_replicas: bool) -> Result:
        runs_RN4 = runs_of_ipu(runs_of([self.plan.tables[kind] for kind in TABLES]), self.tasks.ipu)
        with jax.named_scope(self.name):
            # one program may make several updates
            carry = self.report(first_carry(self.plan, self.args, self.tasks.stash), 0, self.args[:2])
            for ticks in stretches_of(self.plan, self.ticks):
                self.tasks = self.tasks.within(ticks)
                rows: Rows = {kind: jnp.asarray(self.plan.exchanges[kind][ticks]) for kind in EXCHANGES}
                rows["tick"] = jnp.arange(ticks.start, ticks.stop, dtype=jnp.int32)
                carry, _ = lax.scan(lambda carry, rows: self.tick(carry, rows, runs_RN4), carry, rows)
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
        state = sharded_of(carry.model_state, self.args.state.layout)
        return state_over_replicas(state) if reduce_over_replicas and self.plan.role == "training" else state

    def gradients(self, carry: Carry, reduce_over_replicas: bool) -> Sharded:
        params, totals = self.args.params, list(carry.sums)
        for leaf in self.plan.params.leaves:
            if leaf.ipu is None and leaf.split is None and not leaf.frozen:
                # each IPU computed a part of the gradient of a leaf that all of them hold whole
                totals[leaf.array] = lax.psum(totals[leaf.array], IPU_AXIS)
        sums = sharded_of(totals, params.layout)
        if reduce_over_replicas:
            sums = jax.tree.map(lambda g: reduced(lax.psum, g, REPLICA_AXIS), sums)
        is_none = lambda leaf: leaf is None
        return jax.tree.map(lambda g, p: jnp.zeros_like(p) if g is None else g, sums, params, is_leaf=is_none)

    def tick(self, carry: Carry, rows: Rows, runs_RN4: Value) -> tuple[Carry, None]:
        microbatches_R = microbatches_at(runs_RN4, rows["tick"])
        rows = rows | dict(zip(TABLES, jnp.split(microbatches_R, len(TABLES)), strict=True))
        for kind, number, senders in self.plan.tick.actions:
            match kind:
                case "F":
                    carry = self.tasks.run_forward(number, rows, carry)
                case "B":
                    carry = self.tasks.run_backward(number, rows, carry)
                case "W":
                    carry = self.tasks.run_weight(number, rows, carry)
                case "FB":
                    carry = self.tasks.run_head(number, rows, carry)
                case "x" | "dy":
                    carry = self.tasks.enqueue(kind, number, rows, carry, senders)
                case "y" | "dx":
                    carry = self.tasks.exchange(kind, number, rows, carry)
        return self.report(carry, rows["tick"] + 1, None), None


def report_of(plan: Plan, name: str) -> Callable[[Carry, Value, Tree], Carry]:
    """Return `(carry, tick, after) -> carry`, which reports a tick, so that a run that hangs can say what it was doing.

    A report on the host gets the number of guards that have run from the last guard of its tick, and returns it to the
    first guard of the next tick. So XLA can move no task past a report, and a report of tick t means that this IPU has
    finished tick t - 1. Without a listener that asks, the program has no reports. Call it inside `shard_map`.

    XLA keeps the report in the loop in which the values `after` are computed.

    Args:
        plan: of the program.
        name: of the plan's scan.
    """
    replicas, tasks = lax.axis_size(REPLICA_AXIS), lambda: tasks_of(labels.names_of(plan))
    heard = [listener.ticks(name, plan.role, replicas, tasks) for listener in facts.listeners()]
    if not (listening := [one for one in heard if one is not None]):
        return lambda carry, tick, after: carry

    def on_host(values: Any) -> Any:
        replica, ipu, tick, guards_run = np.asarray(values).tolist()
        for listener in listening:
            listener(replica, ipu, tick)
        return np.int32(guards_run)

    def report(carry: Carry, tick: Value, after: Tree) -> Carry:
        guards_run, _ = lax.optimization_barrier((carry.guards_run, after))
        values = jnp.stack([lax.axis_index(REPLICA_AXIS), lax.axis_index(IPU_AXIS), jnp.int32(tick), guards_run])
        call = lambda values: jax.pure_callback(on_host, jax.ShapeDtypeStruct((), jnp.int32), values)
        if plan.axes:  # a callback needs a program that XLA splits over no axis
            call = jax.shard_map(call, in_specs=P(), out_specs=P(), axis_names={*plan.axes}, check_vma=False)
        return dataclasses.replace(carry, guards_run=call(values))

    return report


def tasks_of(names: PlanNames) -> list[list[str]]:
    """Return, per IPU and tick, the tasks in words; "" where it is idle.

    Under uniform guards an IPU that is idle takes part in the tasks of other IPUs.
    """
    found = [[""] * names.ticks for _ in range(names.ipus)]
    for (kind, c), microbatches in names.microbatches.items():
        if kind in EXCHANGES:
            continue
        for tick, ipu in np.argwhere(microbatches >= 0).tolist():
            segment, microbatch = names.segment(c, ipu), microbatches[tick, ipu]
            last = segment.first + len(segment.stages) - 1
            stages = f"stage {last}" if last == segment.first else f"stages {segment.first} to {last}"
            task = f"{WORDS[kind]} of micro-batch {microbatch} of {stages} ({', '.join(segment.stages)})"
            found[ipu][tick] += f", {task}" if found[ipu][tick] else task
    return found


def runs_of(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return the runs of each IPU and row, (P, R, N, 4) int32, in the order of their ticks.

    A run is (first tick, ticks from one micro-batch to the next, number of micro-batches, first micro-batch). A stage
    has one to three under most schedules, and at most one per micro-batch. A table of all IPUs is a constant of each
    IPU's program. As runs, the tables of 256 IPUs and 512 micro-batches take 0.1 MB.

    Args:
        tables: arrays (T, rows, P) of micro-batches, -1 where idle; all of the same shape.
    """
    microbatches_PRT = np.concatenate(tables, axis=1).transpose(2, 1, 0)
    found = [[_runs(microbatch_T) for microbatch_T in of_ipu_RT] for of_ipu_RT in microbatches_PRT]
    most = max(1, *(len(runs) for of_ipu in found for runs in of_ipu))
    none = (0, 1, 0, 0)
    return np.array([[runs + [none] * (most - len(runs)) for runs in of_ipu] for of_ipu in found], np.int32)


def _runs(microbatch_T: np.ndarray) -> list[tuple[int, int, int, int]]:
    tick_M = np.flatnonzero(microbatch_T >= 0)
    gaps, follows = np.diff(tick_M), np.diff(microbatch_T[tick_M]) == 1
    breaks = 1 + np.flatnonzero(~follows[1:] | (gaps[1:] != gaps[:-1]))
    runs, at = [], 0
    while at < len(tick_M):
        every, end = 1, at + 1
        if at < len(gaps) and follows[at]:
            k = np.searchsorted(breaks, at + 1)
            every, end = int(gaps[at]), int(breaks[k] if k < len(breaks) else len(gaps)) + 1
        runs.append((int(tick_M[at]), every, end - at, int(microbatch_T[tick_M[at]])))
        at = end
    return runs


def runs_of_ipu(runs_PRN4: np.ndarray, ipu: Value) -> Value:
    """Return the runs of one IPU, (R, N, 4); its number may be traced."""
    # a constant of two dims: a TPU pads the last two
    return jnp.asarray(runs_PRN4.reshape(len(runs_PRN4), -1))[ipu].reshape(runs_PRN4.shape[1:])


def microbatches_at(runs_RN4: Value, tick: Value) -> Value:
    """Return the micro-batch of each row in a tick, (R,) int32, or -1 where idle, from an IPU's runs."""
    first_RN, every_RN, count_RN, start_RN = (runs_RN4[..., k] for k in range(4))
    number_RN = (tick - first_RN) // every_RN
    active_RN = (number_RN >= 0) & (number_RN < count_RN) & (first_RN + number_RN * every_RN == tick)
    return jnp.max(jnp.where(active_RN, start_RN + number_RN, -1), axis=1)

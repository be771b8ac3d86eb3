"""Report each tick to the listeners that ask for it, so that a run that hangs can say what it was doing.

    before the scan      report 0
    end of tick t        guards_run -> report t + 1 -> guards_run      on the host

A report gets the number of guards that have run from the last guard of its tick, and returns it to the first guard of
the next tick. So XLA can move no task past a report, and a report of tick t means that this IPU has finished tick
t - 1. Without a listener that asks, the program has no reports.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax.base import facts
from ipu_jax.base.annotations import Tree, Value
from ipu_jax.core.engine import labels
from ipu_jax.core.engine._carry import Carry
from ipu_jax.core.engine.labels import PlanNames
from ipu_jax.core.engine.order import EXCHANGES, WORDS
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS


def report_of(plan: Plan, name: str) -> Callable[[Carry, Value, Tree], Carry]:
    """Return `(carry, tick, after) -> carry`, which reports a tick. Call it inside `shard_map`.

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

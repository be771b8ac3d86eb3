"""Report each tick to the listeners that ask for it, so that a run that hangs can say what it was doing.

    before the scan      report 0
    end of tick t        guards_run -> report t + 1 -> guards_run      on the host

A report gets the number of guards that have run from the last guard of its tick, and returns it to the first guard of
the next tick. So XLA can move no task past a report, and a report of tick t means that this IPU has finished tick
t - 1. Without a listener that asks, the program has no reports.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.base import facts
from ipu_jax.base.annotations import Tree, Value
from ipu_jax.core.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.engine import labels
from ipu_jax.core.engine.labels import PlanNames
from ipu_jax.core.engine.plan import Plan

Report = Callable[[Value, Value, Tree], Value]

_KINDS: Final = {"F": "F", "FB": "F and B", "B": "B", "W": "W"}  # in the order of a tick


def report_of(plan: Plan, name: str) -> Report:
    """Return `(guards_run, tick, after) -> guards_run`, which reports a tick. Call it inside `shard_map`.

    XLA keeps the report in the loop in which the values `after` are computed.

    Args:
        plan: of the program.
        name: of the plan's scan.
    """
    replicas, tasks = lax.axis_size(REPLICA_AXIS), lambda: tasks_of(labels.names_of(plan))
    heard = [listener.ticks(name, plan.role, replicas, tasks) for listener in facts.listeners()]
    listening = [one for one in heard if one is not None]
    if not listening:
        return lambda guards_run, tick, after: guards_run

    def on_host(values: Any) -> Any:
        replica, ipu, tick, guards_run = np.asarray(values).tolist()
        for listener in listening:
            listener(replica, ipu, tick)
        return np.int32(guards_run)

    def report(guards_run: Value, tick: Value, after: Tree) -> Value:
        guards_run, _ = lax.optimization_barrier((guards_run, after))
        values = jnp.stack([lax.axis_index(REPLICA_AXIS), lax.axis_index(IPU_AXIS), jnp.int32(tick), guards_run])
        call = lambda values: jax.pure_callback(on_host, jax.ShapeDtypeStruct((), jnp.int32), values)  # noqa: E731
        if plan.axes:  # a callback needs a program that XLA splits over no axis
            whole = PartitionSpec()
            call = jax.shard_map(call, in_specs=whole, out_specs=whole, axis_names={*plan.axes}, check_vma=False)
        return call(values)

    return report


def tasks_of(names: PlanNames) -> list[list[str]]:
    """Return, per IPU and tick, the tasks in words; "" where it is idle."""
    found = [[""] * names.ticks for _ in range(names.ipus)]
    guards = [(kind, c) for kind in _KINDS for of, c in names.microbatches if of == kind]
    for kind, c in guards:
        for tick, ipu in np.argwhere(names.microbatches[kind, c] >= 0).tolist():
            segment, microbatch = names.segment(c, ipu), names.microbatches[kind, c][tick, ipu]
            last = segment.first + len(segment.stages) - 1
            stages = f"stage {last}" if last == segment.first else f"stages {segment.first} to {last}"
            task = f"{_KINDS[kind]} of micro-batch {microbatch} of {stages} ({', '.join(segment.stages)})"
            found[ipu][tick] += f", {task}" if found[ipu][tick] else task
    return found

"""Write a timeline as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing open.

    plan                        a process above the others
        IPU 0    0F0  0F1 ...   a thread per IPU of a replica
    instance 0
        replica 0, IPU 0        a thread per IPU, its slices as "X" events: start and duration
    instance 1 ...

Perfetto takes two "X" events of a thread for nested only if one lies within the other. So times are whole nanoseconds,
and a slice never ends after the one that it lies in. Slices of one name have one colour: those of the plan have the
colours of what was measured.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

from ipu_jax.observe.tracing.timeline import Slice, Timeline

_PLAN = 1  # the number of its process; instance i has the number i + 2


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the events."""
    placed = {(step.replica, step.ipu): step.instance for step in timeline.steps}
    events = _process(_PLAN, f"plan: {timeline.schedule.name}, each task's median time, exchanges take none", 0)
    for ipu in range(timeline.schedule.ipus):
        events += _thread(_PLAN, ipu, f"IPU {ipu}")
        events += _slices(_PLAN, ipu, [one for one in timeline.plan if one.ipu == ipu])
    for instance in timeline.instances:
        events += _process(instance + 2, f"instance {instance}", instance + 1)
    for thread, (replica, ipu) in enumerate(timeline.ipus):
        process = placed[replica, ipu] + 2
        events += _thread(process, thread, f"replica {replica}, IPU {ipu}")
        events += _slices(process, thread, timeline.of_ipu(replica, ipu))
    return events


def write(timeline: Timeline, path: Path) -> None:
    """Write the events of a timeline, compressed; a file is there whole or not at all."""
    contents = {
        "displayTimeUnit": "ms",
        "traceEvents": events_of(timeline),
        "otherData": {"schedule": timeline.schedule.to_text(), "clocks": timeline.clocks},
    }
    being_written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        being_written.write_bytes(gzip.compress(json.dumps(contents).encode(), mtime=0))
        being_written.replace(path)
    finally:
        being_written.unlink(missing_ok=True)


def _process(process: int, name: str, order: int) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": order}},
    ]


def _thread(process: int, thread: int, name: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}},
    ]


def _slices(process: int, thread: int, slices: list[Slice]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    open_until: list[int] = []
    for one in sorted(slices, key=lambda one: (one.start, -one.end)):
        start, end = round(1e9 * one.start), round(1e9 * one.end)
        while open_until and open_until[-1] <= start:
            open_until.pop()
        end = min(end, *open_until[-1:]) if open_until else end
        open_until.append(end)
        args = {"step": one.step, "tick": one.tick, "microbatch": one.microbatch}
        event = {"ph": "X", "name": one.name, "cat": one.kind, "pid": process, "tid": thread}
        event |= {"ts": start / 1e3, "dur": (end - start) / 1e3}
        events.append(event | {"args": {key: value for key, value in args.items() if value is not None}})
    return events

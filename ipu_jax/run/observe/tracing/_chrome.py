"""Write a timeline as Chrome's trace events, which https://ui.perfetto.dev and chrome://tracing open.

    instance 0                      a process per instance
        replica 0, IPU 0, plan      two threads per IPU: what was planned,
        replica 0, IPU 0, measured  and below it what was measured, as "X" events: start and duration
        replica 0, IPU 1, plan
        ...
    instance 1 ...

Perfetto's importer and page treat such a file as follows:

- Two "X" events of a thread must nest or be disjoint, else it drops the second one. So times are whole nanoseconds, and
  a slice never ends after the slice that contains it.
- It takes thread 0 of all processes for one thread, the idle thread, and drops overlaps: no thread here has number 0.
- It sorts processes by their number of events, whatever `process_sort_index` says: a separate process for the plan
  would come below the measurement. It sorts threads by number, but puts a thread with its process's number first: no
  thread here has that number.
- It colours slices by name: the slices of the plan have the colours of the measured ones.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

from ipu_jax.run.observe.tracing.timeline import Slice, Timeline


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the events."""
    placed = {(step.replica, step.ipu): step.instance for step in timeline.steps}
    process = {instance: k + 1 for k, instance in enumerate(timeline.instances)}
    events: list[dict[str, Any]] = []
    for instance, number in process.items():
        events += _process(number, f"instance {instance}")
    first = max(process.values(), default=0) + 1
    for k, (replica, ipu) in enumerate(timeline.ipus):
        number, thread = process[placed[replica, ipu]], first + 2 * k
        planned = [one for one in timeline.plan if one.ipu == ipu]
        tracks = (("plan", planned), ("measured", timeline.of_ipu(replica, ipu)))
        for below, (kind, slices) in enumerate(tracks):
            events += _thread(number, thread + below, f"replica {replica}, IPU {ipu}, {kind}")
            events += _slices(number, thread + below, slices)
    return events


def write(timeline: Timeline, path: Path) -> None:
    """Write the events of a timeline, compressed. The file appears complete or not at all."""
    contents = {
        "displayTimeUnit": "ms",
        "traceEvents": events_of(timeline),
        "otherData": {"schedule": timeline.schedule.to_text(), "clocks": timeline.clocks, "devices": timeline.devices},
    }
    being_written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        being_written.write_bytes(gzip.compress(json.dumps(contents).encode(), mtime=0))
        being_written.replace(path)
    finally:
        being_written.unlink(missing_ok=True)


def _process(process: int, name: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}},
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

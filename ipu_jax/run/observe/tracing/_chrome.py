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

What an IPU waits for is in the args of its slices "..., waiting", which are those that the report counts as waiting: an
exchange waits for the tasks that send to this IPU, and a collective for the others that compute the task around it.
"""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

from ipu_jax.base.annotations import Json
from ipu_jax.base.opening import replacing
from ipu_jax.core.schedules import Schedule
from ipu_jax.run.observe.tracing._assembling import task_name
from ipu_jax.run.observe.tracing.timeline import WAITING, Slice, Timeline
from ipu_jax.run.observe.tracing.trace_report import net_seconds


def events_of(timeline: Timeline) -> list[dict[str, Json]]:
    """Return the events."""
    placed = {(step.replica, step.ipu): step.instance for step in timeline.steps}
    process = {instance: k + 1 for k, instance in enumerate(timeline.instances)}
    events, senders = list[dict[str, Json]](), _senders(timeline.schedule)
    for instance, number in process.items():
        events += _named("process", number, 0, f"instance {instance}")
    first = max(process.values(), default=0) + 1
    for k, (replica, ipu) in enumerate(timeline.ipus):
        number, thread = process[placed[replica, ipu]], first + 2 * k
        planned = [one for one in timeline.plan if one.ipu == ipu]
        tracks = (("plan", planned), ("measured", timeline.of_ipu(replica, ipu)))
        for below, (kind, slices) in enumerate(tracks):
            events += _named("thread", number, thread + below, f"replica {replica}, IPU {ipu}, {kind}")
            events += _slices(number, thread + below, slices, timeline, senders)
    return events


def write(timeline: Timeline, path: Path) -> None:
    """Write the events of a timeline, compressed. The file appears complete or not at all."""
    contents = {
        "displayTimeUnit": "ms",
        "traceEvents": events_of(timeline),
        "otherData": {"schedule": timeline.schedule.to_text(), "clocks": timeline.clocks, "devices": timeline.devices},
    }
    with replacing(path) as file:
        file.write(gzip.compress(json.dumps(contents).encode(), mtime=0))


def _named(what: str, process: int, thread: int, name: str) -> list[dict[str, Any]]:
    """Return what gives a "thread" its name and its rank, or a "process", which has thread 0."""
    where = {"ph": "M", "pid": process, "tid": thread}
    rank = {"name": f"{what}_sort_index", "args": {"sort_index": thread or process}}
    return [where | {"name": f"{what}_name", "args": {"name": name}}, where | rank]


_Senders = dict[tuple[str, int, int | None], list[str]]


def _senders(schedule: Schedule) -> _Senders:
    """Return the tasks that send to an IPU, by the exchange's name, the receiving IPU, and the tick."""
    found: _Senders = {}
    for one, following in itertools.pairwise(schedule.segments):
        for name, sender, receiver in (("y", one, following), ("dx", following, one)):
            ipu, target = schedule.placement[sender[0]], schedule.placement[receiver[0]]
            if ipu is not None and target is not None:
                kind, rows = ("F", schedule.forward) if name == "y" else ("B", schedule.backward)
                for microbatch, tick in enumerate(rows[sender[0]]):
                    key, sent = (f"exchange {name}", target, tick), task_name(tuple(sender), kind, microbatch)
                    found.setdefault(key, []).append(f"{sent} of IPU {ipu}")
    return found


def _slices(
    process: int, thread: int, slices: list[Slice], timeline: Timeline, senders: _Senders
) -> list[dict[str, Json]]:
    events: list[dict[str, Json]] = []
    busy = {id(task): seconds for task, seconds in net_seconds(slices)}
    around: list[tuple[int, Slice]] = []  # the slices in which the next one can lie, with their ends
    for one in sorted(slices, key=lambda one: (one.start, -one.end)):
        start, end = round(1e9 * one.start), round(1e9 * one.end)
        while around and around[-1][0] <= start:
            around.pop()
        end = min(end, around[-1][0]) if around else end
        args = {
            "stage": ", ".join(timeline.stages[stage] for stage in one.stages) or None,
            "for": _waits_for(one, timeline, around[-1][1] if around else None, senders),
            "FLOP": one.flops,
            "GFLOP/s": round(one.flops / busy[id(one)] / 1e9, 3) if one.flops and busy[id(one)] > 0 else None,
            # an exchange moves as many bytes in each tick, but a message only where there is a sender
            "received bytes": one.received if (one.name, one.ipu, one.tick) in senders else None,
            "step": one.step,
            "tick": one.tick,
            "microbatch": one.microbatch,
        }
        name = f"{one.name}, waiting" if one.kind in WAITING else one.name  # a narrow slice shows the first letters
        event = {"ph": "X", "name": name, "cat": one.kind, "pid": process, "tid": thread}
        event |= {"ts": start / 1e3, "dur": (end - start) / 1e3}
        events.append(event | {"args": {key: value for key, value in args.items() if value is not None}})
        around.append((end, one))
    return events


def _waits_for(one: Slice, timeline: Timeline, around: Slice | None, senders: _Senders) -> str | None:
    """Return what an IPU waits for in a slice, given the slice around it; None for a slice in which it works."""
    if one.kind not in WAITING:
        return None
    if one.kind == "exchange":
        sent = senders.get((one.name, one.ipu, one.tick))
        return ", ".join(sent) if sent else "all IPUs, of which none sends to this one"
    if around is None or not around.stages:
        return "other IPUs or replicas"
    is_local = timeline.schedule.placement[around.stages[0]] is not None
    return "the other devices of this IPU" if is_local else "the other IPUs, which run this task together"

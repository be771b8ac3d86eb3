"""Make one page about a run that opens anywhere, without a network: was it good, where the time went, what to change.

RunLog --> Digest --> verdict, curves, rows --\\
Timeline --> where the time went, slices --+--> page.html + page.css + scripts + data --> out.html, one file
Schedule --> its picture, by its times ---/
"""

import html
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import jax

from ipu_jax.base.annotations import Json
from ipu_jax.base.decorators import public
from ipu_jax.base.showing import counted
from ipu_jax.core.analysis.at_peak import Peak, in_words
from ipu_jax.core.analysis.report import PipelineReport
from ipu_jax.core.programs.cost import in_units
from ipu_jax.core.schedules import Schedule
from ipu_jax.core.schedules.figures import BYTES, CONCURRENT, LOCAL, UPDATE, name_of
from ipu_jax.run.observe.runs._verdict import advice_on, bubbles, loss_means, verdict_of
from ipu_jax.run.observe.runs.digest import Digest, duration, is_event
from ipu_jax.run.observe.runs.html_parts import MARKS, MOST_POINTS, check_page, folded, table, write_page
from ipu_jax.run.observe.runs.log import RunLog
from ipu_jax.run.observe.tracing.timeline import TASKS, Slice, Timeline, group_in_words
from ipu_jax.run.observe.tracing.trace_report import TraceReport, make_report, median_costs, net_seconds, simulated
from ipu_jax.training.update.state import TrainState

_SCRIPTS: Final = ("page.js", "curves.js", "timeline.js", "memory.js")  # the first has what the others call
_MOST_SLICES: Final = 6000


@public
def write_report(
    path: str | os.PathLike[str],
    events: RunLog | Sequence[Mapping[str, Json]],
    *,
    title: str = "Run",
    schedules: Mapping[str, str | Schedule] | None = None,
    timeline: Timeline | None = None,
    memory: Mapping[str, Json] | None = None,
) -> Path:
    """Write a page about a run: one HTML file that loads nothing else.

    Args:
        path: the file, whose name ends in .html. An existing file is replaced once the new one is complete.
        events: a `RunLog`, or the contents of `RunLog.events`. An event with a value of a wrong type is left out, and
            the page says so.
        title: of the page.
        schedules: pictures as SVG, or schedules to draw, by their titles. The schedule of the timeline is drawn with
            the measured time of each task; drawing needs matplotlib, and without it the page says so.
        timeline: measured steps, such as a trace records. Only the first slices of a long timeline are shown.
        memory: `{"ipus": [{kind: bytes}, ...], "limit": bytes or None}`, a dict per IPU and what an IPU can hold, and
            possibly "peaks", a `Peak` per IPU, as `memory_of` returns.

    Returns:
        The path.

    Raises:
        ValueError: an argument is of the wrong type, or the file's name ends otherwise.
        OSError: the file cannot be written; an existing file is kept.
    """
    pictures = {} if schedules is None else schedules
    _check(path, events, title, pictures, timeline, memory)
    digest = events.digest if isinstance(events, RunLog) else Digest(events)
    report = None if timeline is None else make_report(timeline)
    data = {
        "curves": digest.drawn(MOST_POINTS),
        "means": [[one.first, one.last, one.value, f"{one}"] for one in loss_means(digest) or () if one.size > 1],
        "timeline": None if timeline is None else _shown(timeline),
        "memory": memory
        and {key: value for key, value in memory.items() if key != "peaks"}
        | {"colours": BYTES | {"temporary": BYTES["other temporary"]}},
    }
    parts = {
        "TITLE": html.escape(title),
        "VERDICT": _verdict(digest, report),
        "FIGURES": _figures(digest, report),
        "HEAD": _head(digest),
        "PHASES": _phases(digest),
        "TIME": "" if timeline is None or report is None else _time(timeline, report),
        "ADVICE": _listed(advice_on(digest, timeline, report)),
        "SCHEDULES": _pictures(pictures, timeline),
        "PEAKS": _peaks((memory or {}).get("peaks", [])),
        "HISTORY": _history(digest.rows),
        "FLAGS": _flags(*digest.flags),
        "VERSIONS": table(digest.versions),
    }
    return write_page(path, "page.html", _SCRIPTS, data, parts)


def memory_of(report: PipelineReport, state: TrainState) -> dict[str, Json]:
    """Return the predicted bytes of each IPU by kind and at its peak, with the optimizer's state, for `write_report`.

    Args:
        report: the result of `Pipeline.report`.
        state: of the training step.

    Returns:
        A dict per IPU; the bytes that an IPU can hold, None if that is not known, as on hosts; and a `Peak` per IPU.

    Raises:
        ValueError: one of them is something else.
    """
    if not hasattr(report, "bytes_by_kind") or not hasattr(state, "optimizer"):
        given = f"{type(report).__name__}, {type(state).__name__}"
        raise ValueError(f"memory_of({given}) has the wrong types: give pipeline.report(...) and the step's state")
    optimizer = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.optimizer))
    ipus = [report.bytes_by_kind(part.ipu) | {"optimizer": optimizer} for part in report.ipus]
    peaks = [report.at_peak(part.ipu).beside({"optimizer": optimizer}) for part in report.ipus]
    return {"ipus": ipus, "limit": report.limit, "peaks": peaks}


def _check(path: Json, events: Json, title: Json, pictures: Json, timeline: Json, memory: Json) -> None:
    is_log = isinstance(events, RunLog) or (isinstance(events, Sequence) and all(map(is_event, events)))
    are_pictures = isinstance(pictures, Mapping) and all(isinstance(one, str | Schedule) for one in pictures.values())
    has_bytes = memory is None or (
        isinstance(memory, Mapping)
        and "ipus" in memory
        and all(isinstance(peak, Peak) for peak in memory.get("peaks", ()))
    )
    checks = (
        ("events", events, is_log, "a RunLog, or RunLog(path) of a file"),
        ("title", title, isinstance(title, str), "a text"),
        ("schedules", pictures, are_pictures, "them by title, such as {'planned': schedule}"),
        ("timeline", timeline, isinstance(timeline, Timeline | None), "recording.timeline"),
        ("memory", memory, has_bytes, "memory_of(report, state)"),
    )
    check_page(path, checks)


def _verdict(digest: Digest, report: TraceReport | None) -> str:
    level, sentences = verdict_of(digest, report)
    first, *others = map(html.escape, sentences)
    return f"<p class='verdict {level}'><i>{MARKS[level]}</i> <b>{first}</b> {' '.join(others)}</p>"


def _figures(digest: Digest, report: TraceReport | None) -> str:
    found = digest.figures()
    if report is not None:
        planned, measured = bubbles(report)
        found["bubble"] = f"{measured:.0%} (planned {planned:.0%})"
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in found.items()
    )
    return f"<dl class='figures'>{cells}</dl>"


def _head(digest: Digest) -> str:
    spans = (f"<span>{html.escape(name)} <b>{html.escape(text)}</b></span>" for name, text in digest.head.items())
    return f"<p class='head'>{' '.join(spans)}</p>"


def _phases(digest: Digest) -> str:
    spent = digest.phases()
    if not spent:
        return ""
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in spent.items())
    return f"<p>Of {duration(sum(spent.values()))}: {parts}.</p>"


def _time(timeline: Timeline, report: TraceReport) -> str:
    """Return the table of where the time of each IPU's mean step went, with a bar per IPU."""
    longest = max(one.step for one in report.ipus) or 1.0
    rows: list[str] = []
    for one in report.ipus:
        steps = sum((step.replica, step.ipu) == (one.replica, one.ipu) for step in timeline.steps)
        parts: dict[str, float] = defaultdict(float)
        for task, net in net_seconds(timeline.of_ipu(one.replica, one.ipu)):
            parts[_kind(timeline.schedule, task)] += net / steps
        parts |= {"waiting": one.waiting, "update": one.update, "other": one.other}
        bar = "".join(
            f"<div {_look(kind)} style='width:{100 * seconds / longest:.3g}%;{_paint(kind)}' title='{kind}'></div>"
            for kind, seconds in parts.items()
        )
        times = "".join(
            f"<td>{1e3 * each:.2f} ms</td>" for each in (one.busy, one.waiting, one.update, one.other, one.step)
        )
        name = _name(timeline, one.replica, one.ipu)
        rows.append(
            f"<tr><td>{name}</td><td><div class='bar'>{bar}</div></td>{times}"
            f"<td>{one.bubble_planned:.1%}</td><td>{one.bubble_measured:.1%}</td></tr>"
        )
    marked = "".join(
        f"<th><i {_look(kind)} style='{_paint(kind)}'></i>{kind}</th>" for kind in ("waiting", "update", "other")
    )
    head = f"<td></td><th>mean of {counted(report.steps, 'step')}</th><th>busy</th>{marked}"
    head += "".join(f"<th>{title}</th>" for title in ("step", "bubble planned", "measured"))
    return f"<div class='scroll'><table class='time'><tr>{head}</tr>{''.join(rows)}</table></div>"


def _kinds() -> dict[str, dict[str, Json]]:
    """Return the name and the colours of each kind of slice; the page has its own for waiting and other."""
    kinds: dict[str, dict[str, Json]] = {}
    for prefix, palette in (("", LOCAL), ("all ", CONCURRENT)):
        kinds |= {
            prefix + kind: {"name": name_of(kind, is_concurrent=bool(prefix)), "colours": [palette[kind]]}
            for kind in palette
            if palette[kind]
        }
        both = "F and B of a concurrent head" if prefix else "F and B of a head"
        kinds[f"{prefix}FB"] = {"name": both, "colours": [palette["F"], palette["B"]]}
    kinds["update"] = {"name": "weight update", "colours": [UPDATE]}
    return kinds | {kind: {"name": kind, "colours": []} for kind in ("waiting", "other")}


def _kind(schedule: Schedule, one: Slice) -> str:
    if one.kind in ("exchange", "collective"):
        return "waiting"
    is_concurrent = one.kind in TASKS and one.stages and schedule.placement[one.stages[0]] is None
    return f"all {one.kind}" if is_concurrent else one.kind


def _look(kind: str) -> str:
    return f"class='{kind}'" if kind in ("waiting", "other") else ""


def _paint(kind: str) -> str:
    colours = _kinds()[kind]["colours"]
    return f"background:linear-gradient({colours[0]} 50%,{colours[-1]} 50%)" if colours else ""


def _name(timeline: Timeline, replica: int, ipu: int) -> str:
    return f"replica {replica}, IPU {ipu}" if timeline.ipus[-1][0] else f"IPU {ipu}"


def _shown(timeline: Timeline) -> dict[str, Json]:
    """Return the rows of slices that the page draws, times in microseconds; the plan is above each measured row.

    A row begins with what lies under its slices: waiting in a plan, other time in a measured step. A slice is its kind,
    name, start and length, and for a task its step, micro-batch and first stage, so that a micro-batch can be followed.
    """
    measured = [one for one in timeline.slices if one.end > one.start]
    steps = sorted({one.step for one in measured})
    kept: list[int] = []
    count = 0
    for step in steps:
        count += sum(one.step == step for one in measured)
        if kept and count > _MOST_SLICES:
            break
        kept.append(step)
    plan = [one for one in timeline.plan if one.step in kept]
    spans = [
        ["waiting", "waiting, planned", *_span(min(one.start for one in of_step), max(one.end for one in of_step))]
        for step in kept
        if (of_step := [one for one in plan if one.step == step])
    ]
    rows: list[dict[str, Json]] = []
    for replica, ipu in timeline.ipus:
        if spans:
            slices = spans + [_slice(timeline.schedule, one) for one in plan if one.ipu == ipu]
            rows.append({"label": f"plan, IPU {ipu}", "brief": "plan", "plan": True, "slices": slices})
        mine = [one for one in timeline.of_ipu(replica, ipu) if one.step in kept][:_MOST_SLICES]
        whole = [
            ["other", "other", *_span(step.start, step.end)]
            for step in timeline.steps
            if (step.replica, step.ipu) == (replica, ipu) and step.step in kept
        ]
        brief = f"{replica}, IPU {ipu}" if timeline.ipus[-1][0] else f"IPU {ipu}"
        slices = whole + [_slice(timeline.schedule, one) for one in mine]
        row = {"label": _name(timeline, replica, ipu), "brief": brief, "plan": False, "replica": replica}
        rows.append(row | {"slices": slices})
    clocks = f"{timeline.clocks}{group_in_words(timeline.devices)}"
    return {"rows": rows, "kinds": _kinds(), "steps": len(kept), "of": len(steps), "clocks": clocks}


def _slice(schedule: Schedule, one: Slice) -> list[Json]:
    kind = _kind(schedule, one)
    name = f"waiting, {one.name}" if kind == "waiting" else one.name
    task = [[one.step, one.microbatch, one.stages[0]]] if one.microbatch is not None and one.stages else []
    return [kind, name, *_span(one.start, one.end), *task]


def _span(start: float, end: float) -> list[int]:
    return [round(1e6 * start), round(1e6 * (end - start))]


def _pictures(schedules: Mapping[str, str | Schedule], timeline: Timeline | None) -> str:
    """Return the pictures. With a timeline, its schedule is drawn with the measured time of each task."""
    found: dict[str, str] = {}
    try:
        if timeline is not None:
            run = simulated(timeline.schedule, median_costs(timeline.slices))
            drawn = timeline.schedule.to_svg(simulation=run)
            found["As planned, with the measured time of each task, in seconds"] = drawn
        for name, picture in schedules.items():
            if isinstance(picture, str):
                found[name] = picture
            elif timeline is None or picture != timeline.schedule:  # a page has one bubble
                found[name] = picture.to_svg()
    except (ImportError, ValueError) as error:  # too large to draw, or no time
        found["Not drawn"] = f"<p>{html.escape(str(error))}</p>"
    figures = (
        f"<figure><figcaption>{html.escape(name)}</figcaption><div class='scroll picture'>{svg}</div></figure>"
        for name, svg in found.items()
    )
    return f"<section><h2>Schedule and bytes</h2>{''.join(figures)}</section>" if found else ""


def _peaks(peaks: Sequence[Peak]) -> str:
    """Return what lives on each IPU when its bytes are the most; the fullest IPU is unfolded."""
    fullest = max(peaks, key=lambda peak: peak.nbytes, default=None)
    folded: list[str] = []
    for peak in peaks:
        rows = ([*in_words(one), in_units(one.nbytes, "B")] for one in peak.alive)
        cells = "".join(f"<tr>{''.join(f'<td>{html.escape(each)}</td>' for each in row)}</tr>" for row in rows)
        head = "<tr><th>what</th><th>micro-batches</th><th>values of each</th><th>bytes</th></tr>"
        folded.append(
            f"<details{' open' * (peak is fullest)}><summary>IPU {peak.ipu}, in tick {peak.tick}: "
            f"{in_units(peak.nbytes, 'B')} in use</summary><div class='scroll'>"
            f"<table class='peak'>{head}{cells}</table></div></details>"
        )
    return f"<section><h2>What lives on an IPU at its peak</h2>{''.join(folded)}</section>" if folded else ""


def _listed(sentences: Sequence[str]) -> str:
    if not sentences:
        return "<p>Nothing stands out.</p>"
    return f"<ul class='advice'>{''.join(f'<li>{html.escape(each)}</li>' for each in sentences)}</ul>"


def _flags(given: Mapping[str, str], others: Mapping[str, str]) -> str:
    summary = f"{counted(len(others), 'flag')} at the default"
    return (table(given) if given or not others else "") + folded(summary, others)


def _history(rows: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(each)}</td>' for each in row)}</tr>" for row in rows)
    head = "<tr><th>time (UTC)</th><th>event</th><th>details</th></tr>"
    return f"<div class='scroll'><table class='history'>{head}{cells}</table></div>"

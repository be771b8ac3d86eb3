"""Make one page about a run that opens anywhere, without a network: losses, speed, schedule, timeline, memory, faults.

RunLog.events --> points, rows --\\
Schedule.to_svg() ----------------+--> page.html + page.css + page.js + data --> out.html, one file
Timeline --> slices of few steps -/
"""

import html
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

import jax

from ipu_jax.base.replacing import replacing
from ipu_jax.core.analysis.report import PipelineReport
from ipu_jax.run.observe.runs import _facts
from ipu_jax.run.observe.tracing.timeline import Timeline, group_in_words
from ipu_jax.training.update.state import TrainState

_MOST_SLICES: Final = 6000
_MOST_POINTS: Final = 1000


def write_report(
    path: str | os.PathLike[str],
    events: Sequence[Mapping[str, Any]],
    *,
    title: str = "Run",
    schedules: Mapping[str, str] | None = None,
    timeline: Timeline | None = None,
    memory: Mapping[str, Any] | None = None,
) -> Path:
    """Write a page about a run: one HTML file that loads nothing else.

    Args:
        path: the file. An existing file is replaced once the new one is complete.
        events: the contents of `RunLog.events`.
        title: of the page.
        schedules: pictures of schedules as SVG, such as `Schedule.to_svg()` returns, by their titles.
        timeline: measured steps, such as a trace records. Only the first slices of a long timeline are shown.
        memory: `{"limit": bytes or None, "limit_of": text, "ipus": [{kind: bytes}, ...]}`, a dict per IPU.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written; an existing file is kept.
    """
    text = page(events, title=title, schedules=schedules, timeline=timeline, memory=memory)
    with replacing(path) as file:
        file.write(text.encode())
    return Path(path)


def memory_of(report: PipelineReport, state: TrainState) -> dict[str, Any]:
    """Return the predicted bytes of each IPU by kind, with the optimizer's state, and their limit, for `write_report`.

    Args:
        report: the result of `Pipeline.report`.
        state: of the training step.
    """
    device = jax.local_devices()[0]
    shares = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.optimizer)]
    ipus = [{**report.bytes_by_kind(part.ipu), "optimizer": sum(shares)} for part in report.ipus]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return {"ipus": ipus, "limit": limit, "limit_of": f"the memory of one {device.device_kind}"}
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"ipus": ipus, "limit": whole, "limit_of": "the host's memory, which all virtual IPUs share"}


def page(
    events: Sequence[Mapping[str, Any]],
    *,
    title: str = "Run",
    schedules: Mapping[str, str] | None = None,
    timeline: Timeline | None = None,
    memory: Mapping[str, Any] | None = None,
) -> str:
    """Return the page that `write_report` writes, with the same arguments."""
    data = {
        "curves": _facts.curves(events, _MOST_POINTS),
        "timeline": None if timeline is None else _shown(timeline),
        "memory": memory,
    }
    parts = {
        "TITLE": html.escape(title),
        "CSS": _file("page.css"),
        "JS": _file("page.js"),
        # no text of the data can end the script
        "DATA": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "SUMMARY": _table(_facts.summary(events)),
        "SCHEDULES": "".join(
            f"<figure><figcaption>{html.escape(name)}</figcaption>{svg}</figure>"
            for name, svg in (schedules or {}).items()
        )
        or "<p>No picture was asked for.</p>",
        "HISTORY": _history(_facts.history(events)),
        "FLAGS": _table(_facts.flags(events)),
        "VERSIONS": _table(_facts.versions(events)),
    }
    text = _file("page.html")
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def _shown(timeline: Timeline) -> dict[str, Any]:
    """Return the rows of slices that the page draws, times in microseconds; the plan is above each measured row."""
    measured = [one for one in timeline.slices if one.end > one.start]
    steps = sorted({one.step for one in measured})
    kept: list[int] = []
    count = 0
    for step in steps:
        count += sum(one.step == step for one in measured)
        if kept and count > _MOST_SLICES:
            break
        kept.append(step)
    rows: list[dict[str, Any]] = []
    for replica, ipu in timeline.ipus:
        plan = [one for one in timeline.plan if one.ipu == ipu and one.step in kept]
        if plan:
            rows.append({"label": f"plan, IPU {ipu}", "plan": True, "slices": [_slice(one) for one in plan]})
        mine = [one for one in timeline.of_ipu(replica, ipu) if one.step in kept][:_MOST_SLICES]
        name = f"replica {replica}, IPU {ipu}" if replica or timeline.ipus[-1][0] else f"IPU {ipu}"
        rows.append({"label": name, "plan": False, "slices": [_slice(one) for one in mine]})
    clocks = f"{timeline.clocks}{group_in_words(timeline.devices)}"
    return {"rows": rows, "steps": len(kept), "of": len(steps), "clocks": clocks}


def _slice(one: Any) -> list[Any]:
    return [one.kind, one.name, round(1e6 * one.start), round(1e6 * (one.end - one.start))]


def _table(rows: Mapping[str, str]) -> str:
    if not rows:
        return "<p>Nothing is known.</p>"
    cells = "".join(
        f"<tr><th scope='row'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in rows.items()
    )
    return f"<div class='scroll'><table>{cells}</table></div>"


def _history(rows: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(each)}</td>' for each in row)}</tr>" for row in rows)
    head = "<tr><th>time (UTC)</th><th>event</th><th></th></tr>"
    return f"<div class='scroll'><table class='history'>{head}{cells}</table></div>"


def _file(name: str) -> str:
    return (resources.files("ipu_jax.run.observe.runs") / name).read_text(encoding="utf-8")

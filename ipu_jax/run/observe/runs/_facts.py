"""Extract from the events of a run's log what the page about the run shows: curves, sums, and what happened when.

A run that was stopped and resumed has several attempts in one log. Where two attempts made the same update, the later
attempt counts, since the run continued with its weights.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.base.showing import counted
from ipu_jax.run.observe.runs.log import figure_in_words

Events = Sequence[Mapping[str, Json]]

LOSS: Final = "loss"
SPEED: Final = "samples per second"
ENDS: Final = ("end", "stopped", "failed")
_TOLD: Final = ("start", "resumed", "compiled", "saved", "skipped", *ENDS)
_OF_EVERY_EVENT: Final = ("event", "time", "seconds", "updates", "epoch")
_PHASES: Final = {"compiled": "compiling", "evaluated": "evaluating", "saved": "saving"}
_OF_HEAD: Final = {
    "model": "model",
    "data": "data",
    "ipus": "IPUs of a replica",
    "replicas": "replicas",
    "instances": "instances",
    "schedule": "schedule",
    "devices": "devices",
    "samples_per_update": "samples per update",
    "seed": "seed",
    "step": "step",
}


def curves(events: Events, most: int) -> dict[str, list[list[float]]]:
    """Return points [updates, value] of the losses, every evaluated figure, and the speed, at most `most` of each.

    >>> curves([{"event": "losses", "updates": 2, "losses": [3.0, 1.0]}], 10)["loss"]
    [[1, 3.0], [2, 1.0]]
    """
    found: dict[str, dict[int, float]] = {LOSS: {}}
    speeds: dict[int, float] = {}
    for event in events:
        updates = event.get("updates", 0)
        if event["event"] == "resumed":  # the updates after this point are made again
            for values in (*found.values(), speeds):
                for later in [key for key in values if key > updates]:
                    del values[later]
        losses = event.get("losses", [])
        for i, loss in enumerate(losses):
            if _is_number(loss):
                found[LOSS][updates - len(losses) + 1 + i] = loss
        if _is_number(event.get("samples_per_second")):
            speeds[updates] = event["samples_per_second"]
        if event["event"] in ("evaluated", "accuracy"):
            for name, value in event.items():
                if name not in _OF_EVERY_EVENT and _is_number(value):
                    found.setdefault("test loss" if name == LOSS else name, {})[updates] = value
    return {name: _thinned(sorted(values.items()), most) for name, values in (found | {SPEED: speeds}).items()}


def attempts(events: Events) -> list[list[Mapping[str, Json]]]:
    """Return the events of each start; events before the first start are an attempt, too."""
    found: list[list[Mapping[str, Json]]] = []
    for event in events:
        if event["event"] == "start" or not found:
            found.append([])
        found[-1].append(event)
    return found


def phases(events: Events) -> dict[str, float]:
    """Return the seconds that all attempts spent compiling, training, evaluating and saving.

    An event ends the phase that it is about: the time since the event before it counts.
    """
    found: dict[str, float] = {"compiling": 0.0, "training": 0.0, "evaluating": 0.0, "saving": 0.0}
    for attempt in attempts(events):
        timed = [event for event in attempt if _is_number(event.get("seconds"))]
        for before, event in itertools.pairwise(timed):
            found[_PHASES.get(event["event"], "training")] += max(0.0, event["seconds"] - before["seconds"])
    return {name: seconds for name, seconds in found.items() if seconds}


def figures(events: Events) -> dict[str, str]:
    """Return the run's figures, as texts by name: progress, the last of each curve, speed and duration."""
    start, points = last(events, "start"), curves(events, 10**9)
    found: dict[str, str] = {}
    made = max((event.get("updates", 0) for event in events), default=0)
    total, per_epoch = start.get("total_updates"), start.get("updates_per_epoch")
    if made:
        found["updates"] = f"{made:,}" + (f" of {total:,}" if total and total != made else "")
        found["updates"] += f" ({counted(made / per_epoch, 'epoch')})" if per_epoch else ""
    for name, values in points.items():
        if values and name not in (LOSS, SPEED):
            found[name] = figure_in_words(name, float(values[-1][1]))
    if points[LOSS]:
        found["last loss"] = f"{points[LOSS][-1][1]:.4g}"
    if points[SPEED]:
        found[SPEED] = f"{statistics.median(value for _, value in points[SPEED]):,.0f} (median)"
    if seconds := sum(phases(events).values()):
        found["duration"] = duration(seconds)
    return found


def head(events: Events) -> dict[str, str]:
    """Return what was run, where and when, as texts by name."""
    start = last(events, "start")
    by_flag = {name.replace("-", "_"): value for name, value in start.get("flags", {}).items()}
    found = {}
    if begins := [event["time"] for event in events if event["event"] == "start" and event.get("time")]:
        found["started"] = f"{str(begins[0])[:19].replace('T', ' ')} UTC"
    for key, name in _OF_HEAD.items():
        value = start.get(key, by_flag.get(key))
        if value is not None:
            found[name] = _text(value)
    if start.get("command"):
        found["command"] = _text(start["command"])
    return found


def flags(events: Events) -> tuple[dict[str, str], dict[str, str]]:
    """Return the last start's flags that differ from their defaults, and the others that have a value."""
    start = last(events, "start")
    defaults = start.get("defaults", {})
    given: dict[str, str] = {}
    kept: dict[str, str] = {}
    for name, value in start.get("flags", {}).items():
        if value is not None:
            (kept if name in defaults and defaults[name] == value else given)[name] = _text(value)
    return given, kept


def versions(events: Events) -> dict[str, str]:
    """Return the versions of the last start."""
    return {name: _text(value) for name, value in last(events, "start").get("versions", {}).items()}


def history(events: Events) -> list[tuple[str, str, str]]:
    """Return the time, name and description of each event that is not a figure. Saves in a row are one."""
    rows: list[tuple[str, str, str]] = []
    is_open = False
    for number, attempt in enumerate(attempts(events), 1):
        if is_open:
            rows.append(("", "lost", "the attempt before this one ended without a word, as a killed one does"))
        told = [event for event in attempt if event["event"] in _TOLD]
        for name, group in itertools.groupby(told, key=lambda event: event["event"]):
            alike = list(group)
            if name == "saved" and len(alike) > 1:
                rows.append((_time(alike[-1]), name, f"{len(alike)} times, the last one {words(alike[-1])}"))
                continue
            start = f"attempt {number}; " if name == "start" else ""
            rows += [(_time(event), name, start + words(event)) for event in alike]
        is_open = not any(event["event"] in ENDS for event in attempt)
    return rows


def last(events: Events, name: str) -> Mapping[str, Json]:
    """Return the last event with a name; {} if there is none."""
    return next((event for event in reversed(events) if event["event"] == name), {})


def words(event: Mapping[str, Json]) -> str:
    """Return what an event says besides its name and time.

    >>> words({"event": "saved", "updates": 1200, "folder": "runs/x"})
    'after 1,200 updates; in runs/x'
    >>> words({"event": "compiled", "compile_seconds": 25.14})
    'in 25.1 s'
    """
    spoken = {
        "updates": lambda value: f"after {counted(value, 'update')}",
        "compile_seconds": lambda value: f"in {duration(value)}",
        "folder": lambda value: f"in {value}",
        "path": lambda value: f"from {value}" if event["event"] == "resumed" else str(value),
        "total_updates": lambda value: f"of {value:,}",
        "count": lambda value: counted(value, "update"),
        "command": _text,
        "reason": str,
        "error": str,
    }
    said = {key: value for key, value in event.items() if key not in ("event", "time", "flags", "versions", "seconds")}
    if event["event"] == "start":
        said = {"command": said.get("command")}
    return "; ".join(
        spoken[key](value) if key in spoken else f"{key.replace('_', ' ')} {_text(value)}"
        for key, value in said.items()
        if value is not None
    )


def duration(seconds: float) -> str:
    """Return a duration in words.

    >>> duration(0.42), duration(75.2), duration(7384)
    ('0.4 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def _time(event: Mapping[str, Json]) -> str:
    return str(event.get("time", ""))[:19].replace("T", " ")


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Json) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _thinned(points: list[tuple[int, float]], most: int) -> list[list[float]]:
    """Return at most `most` points, each the mean of the same number of neighbours."""
    size = -(-len(points) // most)
    if size <= 1:
        return [[x, y] for x, y in points]
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [[group[-1][0], sum(y for _, y in group) / len(group)] for group in groups]

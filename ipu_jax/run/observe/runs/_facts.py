"""Extract from the events of a run's log what the page about the run shows: curves, sums, and what happened when.

A run that was stopped and resumed has several attempts in one log. Where two attempts made the same update, the later
attempt counts, since the run continued with its weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

Events = Sequence[Mapping[str, Any]]

_TOLD: Final = ("start", "resumed", "compiled", "saved", "skipped", "failed", "stopped", "end")


def curves(events: Events, most: int) -> dict[str, list[list[float]]]:
    """Return points [updates, value] of losses, accuracies and speeds, at most `most` of each.

    >>> curves([{"event": "losses", "updates": 2, "losses": [3.0, 1.0]}], 10)["loss"]
    [[1, 3.0], [2, 1.0]]
    """
    losses: dict[int, float] = {}
    accuracies: dict[int, float] = {}
    speeds: dict[int, float] = {}
    for event in events:
        updates = event.get("updates", 0)
        if event["event"] == "resumed":  # the updates after this point are made again
            for values in (losses, accuracies, speeds):
                for later in [key for key in values if key > updates]:
                    del values[later]
        found = event.get("losses", [])
        for i, loss in enumerate(found):
            if isinstance(loss, int | float):
                losses[updates - len(found) + 1 + i] = loss
        for name, values in (("accuracy", accuracies), ("samples_per_second", speeds)):
            if isinstance(event.get(name), int | float):
                values[updates] = event[name]
    named = {"loss": losses, "accuracy": accuracies, "samples per second": speeds}
    return {name: _thinned(sorted(values.items()), most) for name, values in named.items()}


def summary(events: Events) -> dict[str, str]:
    """Return the figures at the top of the page."""
    start, points = last(events, "start"), curves(events, 10**9)
    found: dict[str, str] = {}
    if points["loss"]:
        updates, loss = points["loss"][-1]
        found["updates"], found["last loss"] = f"{updates:,.0f}", f"{loss:.4f}"
    if points["accuracy"]:
        found["accuracy"] = f"{points['accuracy'][-1][1]:.2%}"
    if points["samples per second"]:
        speeds = sorted(value for _, value in points["samples per second"])
        found["samples per second"] = f"{speeds[len(speeds) // 2]:,.0f} (median of the device calls)"
    for name in ("ipus", "replicas", "instances", "schedule", "devices"):
        if start.get(name) is not None:
            found["IPUs of a replica" if name == "ipus" else name] = str(start[name])
    attempts = sum(event["event"] == "start" for event in events)
    if attempts > 1:
        found["starts"] = str(attempts)
    skipped = sum(event.get("count", 1) for event in events if event["event"] == "skipped")
    if skipped:
        found["skipped updates"] = str(skipped)
    found["ended"] = _ended(events)
    return found


def flags(events: Events) -> dict[str, str]:
    """Return the flags of the last start that have a value, as texts."""
    found = last(events, "start").get("flags", {})
    return {name: _text(value) for name, value in found.items() if value is not None}


def versions(events: Events) -> dict[str, str]:
    """Return the versions of the last start."""
    return {name: _text(value) for name, value in last(events, "start").get("versions", {}).items()}


def history(events: Events) -> list[tuple[str, str, str]]:
    """Return the time, name and description of each event that is not a figure."""
    rows: list[tuple[str, str, str]] = []
    is_open = False
    for event in events:
        name = event["event"]
        if name not in _TOLD:
            continue
        if name == "start":
            if is_open:
                rows.append(("", "lost", "the attempt before this one ended without a word, as a killed one does"))
            is_open = True
        elif name in ("end", "stopped", "failed"):
            is_open = False
        rows.append((str(event.get("time", ""))[:19].replace("T", " "), name, _words(event)))
    return rows


def last(events: Events, name: str) -> Mapping[str, Any]:
    """Return the last event with a name; {} if there is none."""
    return next((event for event in reversed(events) if event["event"] == name), {})


def _ended(events: Events) -> str:
    for event in reversed(events):
        if event["event"] in ("end", "stopped", "failed"):
            return _words(event) or event["event"]
        if event["event"] == "start":
            break
    return "not yet, or without a word"


def _words(event: Mapping[str, Any]) -> str:
    said = {key: value for key, value in event.items() if key not in ("event", "time", "flags", "versions", "seconds")}
    if event["event"] == "start":
        said = {key: said[key] for key in ("attempt", "command") if key in said}
    bare = ("reason", "error", "path", "folder")
    return "; ".join(
        _text(value) if key in bare else f"{key.replace('_', ' ')} {_text(value)}" for key, value in said.items()
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _thinned(points: list[tuple[int, float]], most: int) -> list[list[float]]:
    """Return at most `most` points, each the mean of the same number of neighbours."""
    size = -(-len(points) // most)
    if size <= 1:
        return [[x, y] for x, y in points]
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [[group[-1][0], sum(y for _, y in group) / len(group)] for group in groups]

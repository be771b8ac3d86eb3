"""Digest the events of a run's log into what the page about the run shows: curves, sums, and what happened when.

events --add, one by one--> Digest --> curves    points, from a number on means of neighbours
                                       phases    seconds
                                       rows      what happened when, at most a thousand
                                       head, flags, versions    of the last start

So a digest is small however long the run is. `_VALUES` says which values of an event are read, and they are checked
here alone. An event with a value of a wrong type is left out, and the verdict on the run says so.

A run that was stopped and resumed has several attempts in one log. Where two attempts made the same update, the later
attempt counts, since the run continued with its weights.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.base.showing import counted

LOSS: Final = "loss"
SPEED: Final = "samples per second"
LAST_LOSS: Final = "last loss"
MOST_RUNS: Final = 8
"""The most runs on a page: four colours, each as a whole and as a dashed line (page.css)."""
_ENDS: Final = ("end", "stopped", "failed")
_TOLD: Final = ("start", "resumed", "compiled", "saved", "skipped", *_ENDS)
_OF_EVERY_EVENT: Final = ("event", "time", "seconds", "updates", "epoch")
_COUNTS: Final = ("updates", "total_updates", "updates_per_epoch", "count")
_VALUES: Final = {
    "start": _COUNTS[1:3],  # notes may have the other names
    **dict.fromkeys(("evaluated", "accuracy"), _COUNTS[:1]),
    **dict.fromkeys((*_TOLD[1:], "losses", "speed"), (*_COUNTS, "compile_seconds", "samples_per_second", "losses")),
}
_PHASES: Final = {"compiled": "compiling", "evaluated": "evaluating", "saved": "saving"}
_OF_MODEL: Final = ("model", "data", "ipus", "replicas", "instances", "schedule", "devices")
_OF_HEAD: Final = (*_OF_MODEL, "samples_per_update", "seed", "step")
_NAMES: Final = {"ipus": "IPUs of a replica"}
_MOST_POINTS: Final = 1 << 14
_MOST_ROWS: Final = 1000
_LARGEST: Final = 1e100
_DEEPEST: Final = 50


class Curve:
    """Holds values by the number of updates, and the last one. Of very many, it holds means of neighbours."""

    def __init__(self) -> None:
        self.last = -math.inf, math.nan
        self._size = 1  # how many updates a mean is of
        self._means: dict[int, tuple[int, float, int]] = {}  # the last update, the mean, the number of values

    def add(self, updates: int, value: float) -> None:
        """Add a value. It replaces an earlier value of the same update."""
        if updates >= self.last[0]:
            self.last = updates, value
        self._put(updates, value, 1)
        while len(self._means) > _MOST_POINTS:
            self._size *= 2
            means, self._means = self._means, {}
            for mean in means.values():
                self._put(*mean)

    def forget_after(self, updates: int) -> None:
        """Forget the values of later updates."""
        if self.last[0] > updates:
            self._means = {key: mean for key, mean in self._means.items() if key <= updates // self._size}
            self.last = max((mean[:2] for mean in self._means.values()), default=(-math.inf, math.nan))

    def points(self) -> list[tuple[int, float]]:
        """Return updates and values, in the order of the updates."""
        return [mean[:2] for mean in self.means()]

    def means(self) -> list[tuple[int, float, int]]:
        """Return updates, values, and of how many values each is the mean, in the order of the updates."""
        return sorted(self._means.values())

    def _put(self, updates: int, value: float, count: int) -> None:
        key = updates // self._size
        latest, mean, before = self._means.get(key, (updates, 0.0, 0)) if self._size > 1 else (updates, 0.0, 0)
        total = before + count
        self._means[key] = max(latest, updates), value if not before else mean + (value - mean) * count / total, total


class Digest:
    """Holds what is known of a run after some of its events.

    Attributes:
        curves: the losses, every evaluated figure, and the speed.
        rows: the time, name and description of each event that is not a figure. Saves in a row are one; of very many
            events, those in the middle are left out.
        events: the number of events.
        starts: the number of starts.
        updates: the number of updates.
        skipped: how many of them were skipped.
        nonfinite: how many losses are not finite.
        ends_finite: whether the last loss is finite.
        ending: the last start or end, and what it says; ("", "") before the first one.
        head: what was run, where and when, as texts by name.
        expected: what the last start says that figures reach at least, by name.
        flags: the last start's flags that differ from their defaults, and the others that have a value.
        versions: of the last start.
        left_out: the number of events that could not be read, and why the first could not.
    """

    def __init__(self, events: Iterable[Mapping[str, Json]] = ()) -> None:
        self.rows: list[tuple[str, str, str]] = []
        self.curves: dict[str, Curve] = {LOSS: Curve(), SPEED: Curve()}
        self.events = self.starts = self.updates = self.skipped = self.nonfinite = 0
        self.ends_finite, self.ending, self.left_out = True, ("", ""), (0, "")
        self.head: dict[str, str] = {}
        self.expected: dict[str, float] = {}
        self.flags: tuple[dict[str, str], dict[str, str]] = {}, {}
        self.versions: dict[str, str] = {}
        self._lengths: dict[str, int] = {}
        self._seconds: dict[str, float] = dict.fromkeys(("compiling", "training", "evaluating", "saving"), 0.0)
        self._clock: float | None = None
        self._saves = 0
        for event in events:
            self.add(plain(event))

    def add(self, event: dict[str, Json]) -> list[tuple[str, int, float]]:
        """Add an event, which is plain data. Return the points that it adds to curves: name, update, value."""
        self.events += 1
        name = event["event"]
        found = {key: event[key] for key in _VALUES.get(name, ()) if event.get(key) is not None}
        if wrong := [f"{key}={str(value)[:60]!r}" for key, value in found.items() if not _is_right(key, value)]:
            self.left_out = self.left_out[0] + 1, self.left_out[1] or f"event {self.events}, {name!r}, has {wrong[0]}"
            return []
        self._time(name, event.get("seconds"))
        updates, losses = found.get("updates", 0), found.get("losses", [])
        self.updates = max(self.updates, updates)
        self.skipped += found.get("count", 1) if name == "skipped" else 0
        self.nonfinite += len(losses) - sum(map(_is_number, losses))
        self.ends_finite = _is_number(losses[-1]) if losses else self.ends_finite
        if name == "start":
            self._start(event, found)
        elif name == "resumed":  # the updates after this point are made again
            for curve in self.curves.values():
                curve.forget_after(updates)
        if name in ("start", *_ENDS):
            self.ending = name, _text(event.get("error" if name == "failed" else "reason", ""))
        if name in _TOLD:
            self._tell(name, event)
        points = [(LOSS, updates - len(losses) + 1 + i, loss) for i, loss in enumerate(losses) if _is_number(loss)]
        if "samples_per_second" in found:
            points.append((SPEED, updates, found["samples_per_second"]))
        if name in ("evaluated", "accuracy"):
            figures = {key: each for key, each in event.items() if key not in _OF_EVERY_EVENT and _is_number(each)}
            points += [("test loss" if key == LOSS else key, updates, each) for key, each in figures.items()]
        for curve, at, value in points:
            self.curves.setdefault(curve, Curve()).add(at, value)
        return points

    def drawn(self, most: int) -> dict[str, list[list[float]]]:
        """Return points [updates, value] of each curve, at most `most`.

        >>> Digest([{"event": "losses", "updates": 2, "losses": [3.0, 1.0]}]).drawn(10)["loss"]
        [[1, 3.0], [2, 1.0]]
        """
        names = sorted(self.curves, key=lambda name: name == SPEED)  # it is drawn below the others
        return {name: _thinned(self.curves[name].points(), most) for name in names}

    def phases(self) -> dict[str, float]:
        """Return the seconds that all attempts spent compiling, training, evaluating and saving.

        An event ends the phase that it is about: the time since the event before it counts.
        """
        return {name: seconds for name, seconds in self._seconds.items() if seconds}

    def values(self) -> dict[str, float]:
        """Return the last value of each curve, and the median speed, by name."""
        curves = {name: curve.points() for name, curve in self.curves.items()}
        found = {name: self.curves[name].last[1] for name in curves if curves[name] and name not in (LOSS, SPEED)}
        if curves[LOSS]:
            found[LAST_LOSS] = self.curves[LOSS].last[1]
        if curves[SPEED]:
            found[SPEED] = statistics.median(value for _, value in curves[SPEED])
        return found

    def figures(self) -> dict[str, str]:
        """Return the run's figures, as texts by name: progress, the last of each curve, speed and duration."""
        found: dict[str, str] = {}
        total, per_epoch = (self._lengths.get(name) for name in _VALUES["start"])
        if made := self.updates:
            found["updates"] = f"{made:,}" + (f" of {total:,}" if total and total != made else "")
            found["updates"] += f" ({counted(made / per_epoch, 'epoch')})" if per_epoch else ""
        shown = {LAST_LOSS: "{:.4g}", SPEED: "{:,.0f} (median)"}
        for name, value in self.values().items():
            found[name] = shown[name].format(value) if name in shown else figure_in_words(name, float(value))
        if seconds := sum(self._seconds.values()):
            found["duration"] = duration(seconds)
        return found

    def _time(self, name: str, seconds: Json) -> None:
        before = None if name == "start" else self._clock  # each attempt has a clock of its own
        if _is_number(seconds):
            if before is not None:
                self._seconds[_PHASES.get(name, "training")] += max(0.0, seconds - before)
            before = seconds
        self._clock = before

    def _start(self, event: dict[str, Json], lengths: dict[str, int]) -> None:
        if self.events > 1 and self.ending[0] not in _ENDS:
            self.rows.append(("", "lost", "the attempt before this one ended without a word, as a killed one does"))
        self.starts += 1
        self._lengths = lengths
        given = [event.get(key) or {} for key in ("flags", "defaults")]  # which may be anything in notes
        flags, defaults = (each if isinstance(each, dict) else {"flags": each} for each in given)
        by_flag = {name.replace("-", "_"): value for name, value in flags.items()}
        began = self.head.get("started") or (f"{_when(event)} UTC" if event.get("time") else None)
        values = {head_name(key): event.get(key, by_flag.get(key)) for key in _OF_HEAD}
        found = {"started": began, **values, "command": event.get("command") or None}
        self.head = {name: _text(value) for name, value in found.items() if value is not None}
        expected = event.get("expected")
        self.expected = {k: v for k, v in expected.items() if _is_number(v)} if isinstance(expected, dict) else {}
        self.flags = {}, {}
        for name, value in flags.items():
            if value is not None:
                self.flags[name in defaults and defaults[name] == value][name] = _text(value)
        versions = event.get("versions")
        self.versions = {name: _text(of) for name, of in versions.items()} if isinstance(versions, dict) else {}

    def _tell(self, name: str, event: dict[str, Json]) -> None:
        said = f"attempt {self.starts}; {words(event)}" if name == "start" else words(event)
        is_again = name == "saved" and bool(self.rows) and self.rows[-1][1] == name
        self._saves = self._saves + 1 if is_again else 1
        if is_again:
            self.rows.pop()
            said = f"{self._saves} times, the last one {said}"
        self.rows.append((_when(event), name, said))
        if len(self.rows) > _MOST_ROWS:
            middle = slice(_MOST_ROWS // 2, _MOST_ROWS // 2 + 2)
            self.rows[middle] = [("", "left out", f"this table has {_MOST_ROWS:,} rows")]


def check_runs(runs: Mapping[str, Digest]) -> None:
    """Raise `ValueError` if a page cannot show these runs: too many, or one without events."""
    if len(runs) > MOST_RUNS:
        raise ValueError(f"{len(runs)} runs are more than the {MOST_RUNS} that can be told apart: leave some out")
    if empty := next((name for name, digest in runs.items() if not digest.events), None):
        raise ValueError(f"{empty} has no events, so nothing is known of this run yet: leave it out")


def head_name(key: str) -> str:
    """Return the name in `Digest.head` of a value, or a flag, of a start.

    >>> head_name("ipus"), head_name("samples-per-update")
    ('IPUs of a replica', 'samples per update')
    """
    return _NAMES.get(key, key.replace("-", " ").replace("_", " "))


def is_event(value: Json) -> bool:
    """Return whether plain data are an event."""
    return isinstance(value, Mapping) and isinstance(value.get("event"), str)


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
        "folder": lambda value: f"in {_text(value)}",
        "path": lambda value: f"from {_text(value)}" if event["event"] == "resumed" else _text(value),
        "total_updates": lambda value: f"of {value:,}",
        "count": lambda value: counted(value, "update"),
        **dict.fromkeys(("command", "reason", "error"), _text),
    }
    unsaid = ("event", "time", "flags", "versions", "seconds")
    said = ["command"] if event["event"] == "start" else [key for key in event if key not in unsaid]
    return "; ".join(
        spoken[key](event[key]) if key in spoken else f"{key.replace('_', ' ')} {_text(event[key])}"
        for key in said
        if event.get(key) is not None
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


def figure_in_words(name: str, value: float) -> str:
    """Return a figure of an evaluation as its line shows it.

    >>> figure_in_words("accuracy", 0.97), figure_in_words("loss", 0.25), figure_in_words("errors", 12345.0)
    ('97.00%', '0.25', '12,345')
    """
    if name.endswith("accuracy") and math.isfinite(value):
        return f"{value:.2%}"
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e12 else f"{value:.4g}"


def plain(value: Json, depth: int = 0) -> Json:
    """Return plain data; a number that JSON lacks becomes a text, and so does what is nested too deeply."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 1024 else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return {str(key): plain(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value]
    item = getattr(value, "tolist", None)
    return str(value) if item is None else plain(item(), depth + 1)


def _is_right(key: str, value: Json) -> bool:
    """Return whether a value that is read has the type of its name."""
    if key == "losses":  # texts such as "nan" are not finite
        return isinstance(value, list) and not any(isinstance(loss, bool | list | dict) for loss in value)
    return _is_number(value) and (key not in _COUNTS or (isinstance(value, int) and value >= 0))


def _when(event: Mapping[str, Json]) -> str:
    return _text(event.get("time", ""))[:19].replace("T", " ")


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


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

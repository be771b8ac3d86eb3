"""Make random schedule tables: in each tick each IPU does any of the tasks that are ready, or nothing.

Tables are made by playing the clock that `core/schedules/_timetable.py` documents, without its code. Segments are runs
of stages with one place. The results of a segment in a phase are available to other segments when the phase ends, and
micro-batches pass through every segment in order.
"""

import dataclasses
from typing import Any, Literal

import numpy as np

Placement = tuple[int | None, ...]
Rows = tuple[tuple[int, ...], ...]
Clock = Literal["one-phase", "two-phase"]
Table = tuple[Rows, Rows, Rows | None, Clock]


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of stages with one place. `role` is "local", "entry" (concurrent, before a local segment) or "head"."""

    place: int | None
    stages: tuple[int, ...]
    role: str


def segments_of(placement: Placement) -> list[Segment]:
    runs: list[list[int]] = []
    for stage, place in enumerate(placement):
        if runs and placement[runs[-1][0]] == place:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    last_local = max((s for s, place in enumerate(placement) if place is not None), default=-1)
    found = []
    for run in runs:
        place = placement[run[0]]
        role = "local" if place is not None else "entry" if run[0] < last_local else "head"
        found.append(Segment(place, tuple(run), role))
    return found


def random_table(
    rng: np.random.Generator, placement: Placement, micro_batches: int, *, two_phase: bool | None = None
) -> Table:
    """Return `(forward, backward, weight, clock)` of a schedule whose segments run their micro-batches in order."""
    segments = segments_of(placement)
    two_phase = bool(rng.random() < 0.35) if two_phase is None else two_phase
    split = any(s.role == "local" for s in segments) and bool(rng.random() < 0.5)
    play = _Play(segments, micro_batches, split, two_phase, rng)
    done = play.run()

    def rows(kind: str) -> Rows:
        found = {}
        for i, segment in enumerate(segments):
            of = "B" if kind == "W" and segment.place is None else kind
            for stage in segment.stages:
                found[stage] = tuple(done[i, of, m] for m in range(micro_batches))
        return tuple(found[stage] for stage in range(len(placement)))

    return rows("F"), rows("B"), rows("W") if split else None, "two-phase" if two_phase else "one-phase"


# phases in which each of some segments does a task, if it is ready: their role, and the kind of the task
EACH = {"entry": ("entry", "F"), "exit": ("entry", "B"), "F": ("local", "F"), "B": ("local", "B"), "W": ("local", "W")}


class _Play:
    """One game: `begun` counts the micro-batches that have begun a task, `there` the messages that have arrived."""

    def __init__(self, segments: list[Segment], micro_batches: int, split: bool, two_phase: bool, rng: Any):
        self.segments, self.m, self.split, self.two_phase, self.rng = segments, micro_batches, split, two_phase, rng
        self.begun = {(i, kind): 0 for i in range(len(segments)) for kind in "FBW"}
        self.there = {(i, kind): 0 for i in range(len(segments)) for kind in "FB"}
        self.there[0, "F"] = micro_batches
        self.done: dict[tuple[int, str, int], int] = {}
        # how many F can run ahead of B: any bound of at least one is valid
        self.ahead = [int(rng.integers(1, micro_batches + 1)) for _ in segments]
        self.eager = float(rng.choice([0.4, 0.7, 0.95]))
        self.sends: list[tuple[int, str]] = []

    def run(self) -> dict[tuple[int, str, int], int]:
        tick = 0
        phases = ("entry", "F", "head", "B", "W", "exit") if self.two_phase else ("entry", "work", "head", "exit")
        wanted = self.m * sum(2 + (self.split and s.place is not None) for s in self.segments)
        while len(self.done) < wanted:
            for phase in phases:
                if phase in EACH:
                    self._each(*EACH[phase], tick)
                else:
                    getattr(self, f"_{phase}")(tick)
                for message in self.sends:
                    self.there[message] += 1
                self.sends = []
            tick += 1
            assert tick < 10_000, "the game does not end"
        return self.done

    def _do(self, i: int, kind: str, tick: int) -> None:
        self.done[i, kind, self.begun[i, kind]] = tick
        self.begun[i, kind] += 1
        if kind == "F" and i + 1 < len(self.segments):
            self.sends.append((i + 1, "F"))
        if kind == "B" and i > 0:
            self.sends.append((i - 1, "B"))

    def _ready(self, i: int, kind: str) -> bool:
        begun, m = self.begun, self.begun[i, kind]
        if m == self.m:
            return False
        if kind == "F":
            last = "W" if self.split and self.segments[i].role == "local" else "B"
            free = not self.two_phase or i + 1 == len(self.segments) or begun[i + 1, "F"] >= begun[i, "F"]
            return self.there[i, "F"] > m and begun[i, "F"] - begun[i, last] < self.ahead[i] and free
        if kind == "W":
            return self.split and begun[i, "B"] > m
        free = not self.two_phase or i == 0 or begun[i - 1, "B"] >= begun[i, "B"]
        from_behind = begun[i, "F"] > m if i + 1 == len(self.segments) else self.there[i, "B"] > m
        return from_behind and begun[i, "F"] > m and free

    def _wants(self) -> bool:
        return bool(self.rng.random() < self.eager)

    def _each(self, role: str, kind: str, tick: int) -> None:
        # a message must be taken before the next one is sent: under the two-phase clock there is room for only one
        order = range(len(self.segments))
        for i in reversed(order) if kind == "F" else order:
            if self.segments[i].role == role and self._ready(i, kind) and self._wants():
                self._do(i, kind, tick)

    def _work(self, tick: int) -> None:
        for ipu in sorted({s.place for s in self.segments if s.place is not None}):
            mine = [i for i, s in enumerate(self.segments) if s.place == ipu]
            ready = [(i, kind) for i in mine for kind in "FBW" if self._ready(i, kind)]
            if ready and self._wants():
                self._do(*ready[int(self.rng.integers(len(ready)))], tick)

    def _head(self, tick: int) -> None:
        last = len(self.segments) - 1
        if self.segments[last].role == "head" and self._ready(last, "F") and self._wants():
            free = not self.two_phase or last == 0 or self.begun[last - 1, "B"] >= self.begun[last, "B"]
            if free:
                self._do(last, "F", tick)
                self._do(last, "B", tick)

"""What a program of the staged scan is made of, decided before it runs: segments, teams, tables and registers.

teams       like local segments of several IPUs, such as the middle blocks of a transformer, are one piece of program
            that each IPU runs on its own weights. So the program does not grow with them. Any other segment is a team
            of its own.
tables      per tick, team and IPU the micro-batch of its F, B and W, and of the messages that wait for it.
registers   what lies between neighbouring segments, a lane each: IPU 0 --y--> IPU 1, and --dx--> back. Boundaries
            with like messages share a lane, and so one ppermute, as long as each IPU sends once and receives once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np

from ipu_jax.devices import IPU_AXIS
from ipu_jax.programs.segment import NO_MESSAGE, MicrobatchInputs, Segment
from ipu_jax.programs.segment_program import SegmentProgram, trace_segment
from ipu_jax.schedules import Schedule
from ipu_jax.weights.packed_layout import PackedLayout, local_shapes

Table = Literal["F", "B", "W", "x", "dy"]
TABLES: tuple[Table, ...] = ("F", "B", "W", "x", "dy")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Hold everything static about one program.

    Attributes:
        segments, halves: per segment, its stages and its traced F and B.
        teams: per team the numbers of its segments; the first one's halves are what runs.
        tables: per table (ticks, teams, ipus) micro-batches, -1 where idle. "F", "B" and "W" are tasks ("W" all idle
            where B does the whole backward), "x" and "dy" the messages that come to wait for them.
        lanes: per boundary between segment i and i+1, the register that carries it.
        routes: per register that crosses IPUs, its `(source, destination)` pairs; none where it doesn't cross.
        messages: per register, the tree of shapes.
    """

    segments: tuple[Segment, ...]
    halves: tuple[SegmentProgram, ...]
    schedule: Schedule
    ipus: int
    teams: tuple[tuple[int, ...], ...]
    tables: dict[Table, np.ndarray]
    lanes: tuple[int, ...]
    routes: tuple[tuple[tuple[int, int], ...], ...]
    messages: tuple[Any, ...]

    @property
    def last(self) -> int:
        return len(self.segments) - 1

    def team_of(self, i: int) -> int:
        return next(t for t, team in enumerate(self.teams) if i in team)

    def is_split(self, i: int) -> bool:
        """Return whether segment i has its own W."""
        return self.schedule.weight is not None and self.segments[i].place is not None

    def queue(self, i: int, kind: Literal["F", "B"]) -> int:
        """Return how many messages wait at once between segments i and i + 1: activations ("F") or gradients ("B")."""
        return self.schedule.inbox_depth(self.segments[i + 1].first - 1, kind)

    def waits_at(self, i: int, kind: Literal["x", "dy"]) -> int | None:
        """Return the IPU at which messages wait for segment i, or None if they wait on all.

        A message between IPUs waits where it is used, any other where it was made.
        """
        other = self.segments[i - 1 if kind == "x" else i + 1].place
        return other if self.segments[i].place is None else self.segments[i].place


def make_plan(
    segments: tuple[Segment, ...],
    schedule: Schedule,
    params: PackedLayout,
    state: PackedLayout,
    microbatch: Any,
    *,
    key: Any = None,
) -> Plan:
    """Trace every segment, inside the shard_map (axis names must be in scope), and lay out the registers.

    Args:
        segments: the model.
        schedule: when each stage runs.
        params, state: where weights and state are kept.
        microbatch: shapes of one micro-batch.
        key: shape of a random key, where one was given.
    """
    weights, states = local_shapes(params), local_shapes(state)
    halves: list[SegmentProgram] = []
    x: Any = NO_MESSAGE
    for i, segment in enumerate(segments):
        own = {name: weights[name] for name in segment.groups}
        frozen = {name: [leaf.frozen for leaf in params.group(name).leaves] for name in segment.groups}
        args = (
            own,
            x,
            MicrobatchInputs(microbatch, tuple(key if stage.random else None for stage in segment.stages)),
            {name: states[name] for name in segment.state_groups},
        )
        last = i == len(segments) - 1
        split = schedule.weight is not None and segment.place is not None
        trained = [not is_frozen for name in sorted(frozen) for is_frozen in frozen[name]]
        shards = _shards(params, segment.groups), _shards(state, segment.state_groups)
        halves.append(trace_segment(segment, *args, last=last, split=split, trained=trained, shards=shards))
        x = halves[-1].y
    lanes: list[int] = []
    routes: list[list[tuple[int, int]]] = []
    messages: list[Any] = []
    for i in range(len(segments) - 1):
        source, target = segments[i].place, segments[i + 1].place
        crossing = [] if source is None or target is None or source == target else [(source, target)]
        lane = next(
            (k for k in range(len(routes)) if crossing and _fits(crossing[0], halves[i].y, routes[k], messages[k])),
            None,
        )
        if lane is None:
            lane = len(routes)
            routes.append([])
            messages.append(halves[i].y)
        routes[lane] += crossing
        lanes.append(lane)
    plan = Plan(
        segments=segments,
        halves=tuple(halves),
        schedule=schedule,
        ipus=params.ipus,
        teams=(),
        tables={},
        lanes=tuple(lanes),
        routes=tuple(map(tuple, routes)),
        messages=tuple(messages),
    )
    teams = _teams(plan, params, state)
    return dataclasses.replace(plan, teams=teams, tables={table: _table(plan, teams, table) for table in TABLES})


def _shards(layout: PackedLayout, names: Sequence[str]) -> dict[str, Any]:
    """Return, per group, a tree that says of each leaf whether IPUs hold different shards of it."""
    groups = {name: layout.group(name) for name in names}
    return {
        name: jax.tree.unflatten(g.treedef, [g.ipu is None and IPU_AXIS in leaf.spec for leaf in g.leaves])
        for name, g in groups.items()
    }


def _fits(pair: tuple[int, int], y: Any, taken: list[tuple[int, int]], message: Any) -> bool:
    """Return whether a message fits a register: its like share one ppermute if each IPU sends and receives once."""
    return bool(taken) and message == y and all(pair[0] != a and pair[1] != b for a, b in taken)


def _teams(plan: Plan, params: PackedLayout, state: PackedLayout) -> tuple[tuple[int, ...], ...]:
    """Join like segments of different IPUs, so that each IPU still runs its own in order."""
    teams: list[list[int]] = []
    likeness: list[Any] = []
    latest: dict[int | None, int] = {}  # per IPU, the team of its segment before
    for i, segment in enumerate(plan.segments):
        like = _likeness(plan, i, params, state)
        after = latest.get(segment.place, -1) + 1
        fitting = [t for t in range(after, len(teams)) if like is not None and likeness[t] == like]
        if fitting:
            teams[fitting[0]].append(i)
        else:
            teams.append([i])
            likeness.append(like)
        latest[segment.place] = fitting[0] if fitting else len(teams) - 1
    return tuple(map(tuple, teams))


def _likeness(plan: Plan, i: int, params: PackedLayout, state: PackedLayout) -> Any:
    """Return what segments must have in common to form a team, or None for a segment that forms its own."""
    segment, halves = plan.segments[i], plan.halves[i]
    inner = 0 < i < plan.last and None not in (plan.segments[j].place for j in (i - 1, i, i + 1))
    if not inner or halves.signature is None or jax.tree.leaves(halves.aux):
        return None

    def kept(layout: PackedLayout, groups: Sequence[str]) -> list[Any]:
        return [(leaf.slot, leaf.shape, leaf.frozen) for name in sorted(groups) for leaf in layout.group(name).leaves]

    crosses = [plan.segments[j].place != segment.place for j in (i - 1, i + 1)]
    keys = [stage.random for stage in segment.stages]
    groups = (kept(params, segment.groups), kept(state, segment.state_groups))
    return (halves.signature, plan.lanes[i - 1], plan.lanes[i], crosses, keys, groups)


def _table(plan: Plan, teams: tuple[tuple[int, ...], ...], kind: Table) -> np.ndarray:
    schedule, segments = plan.schedule, plan.segments
    table = np.full((schedule.ticks, len(teams), plan.ipus), -1, np.int32)
    rows: Any = {"F": schedule.forward, "B": schedule.backward, "W": schedule.weight}.get(kind)
    for t, team in enumerate(teams):
        for i in team:
            place, made_by = segments[i].place, i
            if kind in ("x", "dy"):
                made_by = i - 1 if kind == "x" else i + 1
                if not 0 <= made_by <= plan.last:
                    continue
                place = plan.waits_at(i, kind)
                rows = schedule.forward if kind == "x" else schedule.backward
            if rows is None:
                continue
            for microbatch, tick in enumerate(rows[segments[made_by].first]):
                table[tick, t, slice(None) if place is None else place] = microbatch
    return table

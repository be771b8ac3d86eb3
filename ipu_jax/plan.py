"""What a program of the staged scan is made of, decided before it runs: segments, tables, registers and the stash.

registers   what lies between neighbouring segments, a lane each: IPU 0 --y--> IPU 1, and --dx--> back. Boundaries
            with like messages share a lane, and so one ppermute, as long as each IPU sends once and receives once.
stash       what a micro-batch leaves on its IPU between F and B: one flat buffer a dtype, in which each segment has
            a ring of as many micro-batches as the schedule keeps there.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import numpy as np
from jax import lax

from ipu_jax.halves import Halves, halves_of, split_floats
from ipu_jax.schedule import Schedule
from ipu_jax.stage import Segment


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one program.

    Attributes:
        segments, halves: per segment, its stages and its traced F and B.
        forward, backward, weight: (ticks, segments) tables of the micro-batch to run, -1 where idle. All of `weight`
            is idle where B does the whole backward.
        lanes: per boundary between segment i and i+1, the register that carries it.
        routes: per register that crosses IPUs, its `(source, destination)` pairs; none where it doesn't cross.
    """

    segments: tuple[Segment, ...]
    halves: tuple[Halves, ...]
    schedule: Schedule
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    lanes: tuple[int, ...]
    routes: tuple[tuple[tuple[int, int], ...], ...]
    messages: tuple[Any, ...]  # per register, the tree of shapes

    def is_split(self, i: int) -> bool:
        """Whether segment i has a W of its own."""
        return self.schedule.weight is not None and self.segments[i].place is not None

    def queue(self, i: int, kind: Literal["F", "B"]) -> int:
        """How many messages wait at once at the boundary behind segment i: activations ("F") or gradients ("B")."""
        return self.schedule.inbox_depth(self.segments[i + 1].first - 1, kind)


def make_plan(segments: tuple[Segment, ...], schedule: Schedule, params: dict[str, Any], microbatch: Any) -> Plan:
    """Traces every segment, inside the shard_map (axis names must be in scope), and lays out the registers.

    Args:
        segments: the model.
        schedule: when each stage runs.
        params: `{group: tree of this IPU's shapes}`.
        microbatch: shapes of one micro-batch.
    """
    halves: list[Halves] = []
    x: Any = None
    for i, segment in enumerate(segments):
        weights = {name: params[name] for name in segment.groups}
        split = schedule.weight is not None and segment.place is not None
        halves.append(halves_of(segment, weights, x, microbatch, last=i == len(segments) - 1, split=split))
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
    return Plan(
        segments=segments,
        halves=tuple(halves),
        schedule=schedule,
        forward=_table(schedule.forward, segments, schedule.ticks),
        backward=_table(schedule.backward, segments, schedule.ticks),
        weight=_table(schedule.weight or ((),) * len(schedule.placement), segments, schedule.ticks),
        lanes=tuple(lanes),
        routes=tuple(map(tuple, routes)),
        messages=tuple(messages),
    )


def _fits(pair: tuple[int, int], y: Any, taken: list[tuple[int, int]], message: Any) -> bool:
    """Like messages share a register and one ppermute, in which an IPU sends once and receives once."""
    return bool(taken) and message == y and all(pair[0] != a and pair[1] != b for a, b in taken)


def _table(rows: tuple[tuple[int, ...], ...], segments: tuple[Segment, ...], ticks: int) -> np.ndarray:
    table = np.full((ticks, len(segments)), -1, np.int32)
    for i, segment in enumerate(segments):
        for microbatch, tick in enumerate(rows[segment.first]):
            table[tick, i] = microbatch
    return table


class Stash:
    """One flat buffer a dtype, with rings of micro-batches in it.

    Local segments of different IPUs share the same region, so that the buffer is as long as the fullest IPU needs.

    Attributes:
        sizes: per dtype, the buffer's length.
    """

    def __init__(self, plan: Plan, ipus: int):
        self._rings: dict[tuple[str, int], list[tuple[str, int, int, Any]]] = {}
        self._depth: dict[tuple[str, int], int] = {}
        self._holder: dict[tuple[str, int], int | None] = {}
        used: list[dict[str, int]] = [{} for _ in range(ipus)]
        # what all IPUs hold comes first: it lies at the same place on every one
        for key, place, depth, shapes in sorted(_rings_of(plan), key=lambda ring: ring[1] is not None):
            self._rings[key], self._depth[key], self._holder[key] = [], depth, place
            for shape in shapes:
                dtype, size = np.dtype(shape.dtype).name, math.prod(shape.shape)
                owner = used[place or 0]
                self._rings[key].append((dtype, owner.get(dtype, 0), size, shape))
                owner[dtype] = owner.get(dtype, 0) + size * depth
                if place is None:
                    used = [dict(owner) for _ in used]
        dtypes = sorted({dtype for owner in used for dtype in owner})
        self.sizes = {dtype: max(owner.get(dtype, 0) for owner in used) for dtype in dtypes}

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._rings

    def holder(self, key: tuple[str, int]) -> int | None:
        """The IPU that writes the ring; None where all do."""
        return self._holder[key]

    def write(
        self, buffers: dict[str, Any], key: tuple[str, int], microbatch: Any, values: list[Any], zero: Any
    ) -> dict[str, Any]:
        """The buffers with one micro-batch's values in its ring; `zero` is the guard's own traced 0."""
        buffers = dict(buffers)
        for (dtype, base, size, _), value in zip(self._rings[key], values, strict=True):
            at = self._at(key, base, size, microbatch, zero)
            buffers[dtype] = lax.dynamic_update_slice(buffers[dtype], value.reshape(-1), at)
        return buffers

    def read(self, buffers: dict[str, Any], key: tuple[str, int], microbatch: Any, zero: Any) -> list[Any]:
        """What `write` put there."""
        return [
            lax.dynamic_slice(buffers[dtype], self._at(key, base, size, microbatch, zero), (size,)).reshape(shape.shape)
            for dtype, base, size, shape in self._rings[key]
        ]

    def _at(self, key: tuple[str, int], base: int, size: int, microbatch: Any, zero: Any) -> tuple[Any]:
        # in a ring of one micro-batch the place would be a constant, and XLA free to read it before the guard
        return (base + microbatch % self._depth[key] * size + zero,)


def _rings_of(plan: Plan) -> Iterator[tuple[tuple[str, int], int | None, int, list[Any]]]:
    """Per ring: its key, the IPU that holds it (None: all), its depth, and the shapes of one micro-batch."""
    for i, (segment, halves) in enumerate(zip(plan.segments, plan.halves, strict=True)):
        if plan.schedule.phase(segment.first, "F") != "head":  # whose B follows its F at once
            yield ("stash", i), segment.place, plan.schedule.stash_depth(segment.first), halves.stash
        if plan.is_split(i):
            yield ("cut", i), segment.place, plan.schedule.cut_depth(segment.first), halves.cut
        if i + 1 < len(plan.segments):
            after = plan.segments[i + 1].place
            message = plan.messages[plan.lanes[i]]
            # a message between IPUs waits where it is used, any other where it was made
            if plan.queue(i, "F") > 1:
                held = segment.place if after is None else after
                yield ("x", i + 1), held, plan.queue(i, "F"), jax.tree.leaves(message)
            if plan.queue(i, "B") > 1:
                held = after if segment.place is None else segment.place
                yield ("dy", i), held, plan.queue(i, "B"), split_floats(message)[0]

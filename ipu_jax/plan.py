"""What a program of the staged scan is made of, decided before it runs: segments, tables, registers and the stash.

registers   what lies between neighbouring segments, a lane each: IPU 0 --y--> IPU 1, and --dx--> back. Boundaries
            with like messages share a lane, and so one ppermute, as long as each IPU sends once and receives once.
stash       what a micro-batch leaves on its IPU between F and B: one flat buffer a dtype, in which each segment has
            a ring of as many micro-batches as the schedule keeps there.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax

from ipu_jax.schedule import Schedule
from ipu_jax.stage import Halves, Segment, halves_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one program.

    Attributes:
        segments, halves: per segment, its stages and its traced F and B.
        forward, backward: (ticks, segments) tables of the micro-batch to run, -1 where idle.
        lanes: per boundary between segment i and i+1, the register that carries it.
        routes: per register that crosses IPUs, its `(source, destination)` pairs; none where it doesn't cross.
    """

    segments: tuple[Segment, ...]
    halves: tuple[Halves, ...]
    schedule: Schedule
    forward: np.ndarray
    backward: np.ndarray
    lanes: tuple[int, ...]
    routes: tuple[tuple[tuple[int, int], ...], ...]
    messages: tuple[Any, ...]  # per register, the tree of shapes

    def depth(self, i: int) -> int:
        return self.schedule.stash_depth(self.segments[i].first)


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
        halves.append(halves_of(segment, weights, x, microbatch, last=i == len(segments) - 1))
        x = halves[-1].y
    lanes: list[int] = []
    routes: list[list[tuple[int, int]]] = []
    messages: list[Any] = []
    for i in range(len(segments) - 1):
        source, target = segments[i].place, segments[i + 1].place
        crossing = [] if source is None or target is None else [(source, target)]
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
    """One flat buffer a dtype, in which each segment has a ring of `depth` micro-batches.

    Local segments of different IPUs share the same region, so that the buffer is as long as the fullest IPU needs.

    Attributes:
        sizes: per dtype, the buffer's length.
    """

    def __init__(self, plan: Plan, ipus: int):
        self._rings: dict[int, list[tuple[str, int, int, jax.ShapeDtypeStruct]]] = {}
        used: list[dict[str, int]] = [{} for _ in range(ipus)]
        # concurrent segments first: their rings lie at the same place on every IPU
        order = sorted(range(len(plan.segments)), key=lambda i: plan.segments[i].place is not None)
        for i in order:
            place = plan.segments[i].place
            if plan.schedule.phase(plan.segments[i].first, "F") == "head":
                continue  # its B follows its F at once
            self._rings[i] = []
            for shape in plan.halves[i].stash:
                dtype, size = np.dtype(shape.dtype).name, int(np.prod(shape.shape))
                owner = used[place or 0]
                self._rings[i].append((dtype, owner.get(dtype, 0), size, shape))
                owner[dtype] = owner.get(dtype, 0) + size * plan.depth(i)
                if place is None:
                    used = [dict(owner) for _ in used]
        dtypes = sorted({dtype for owner in used for dtype in owner})
        self.sizes = {dtype: max(owner.get(dtype, 0) for owner in used) for dtype in dtypes}
        self._depth = {i: plan.depth(i) for i in self._rings}

    def write(self, buffers: dict[str, Any], i: int, microbatch: Any, values: list[Any]) -> dict[str, Any]:
        buffers = dict(buffers)
        for (dtype, base, size, _), value in zip(self._rings[i], values, strict=True):
            at = base + microbatch % self._depth[i] * size
            buffers[dtype] = lax.dynamic_update_slice(buffers[dtype], value.reshape(-1), (at,))
        return buffers

    def read(self, buffers: dict[str, Any], i: int, microbatch: Any) -> list[Any]:
        return [
            lax.dynamic_slice(buffers[dtype], (base + microbatch % self._depth[i] * size,), (size,)).reshape(
                shape.shape
            )
            for dtype, base, size, shape in self._rings[i]
        ]

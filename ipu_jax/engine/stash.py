"""The stash: what a micro-batch leaves on its IPU, in rings, in flat buffers.

    ("stash", team)   between F and the last use of it           ("x", team)    activations that wait for F
    ("cut", team)     between B and W                            ("dy", team)   gradients that wait for B

A ring has a place for as many micro-batches as the schedule keeps there. There is a buffer for each of these four kinds
and each dtype, such as "cut:float32": a task reads one kind and writes another, and XLA copies a buffer that is both
read and written in one loop. In a buffer an IPU's rings follow one another, whatever its stages are, so that it is as
long as the fullest IPU needs.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipu_jax.engine.plan import Plan
from ipu_jax.programs.segment_program import split_floats

Key = tuple[Literal["stash", "cut", "x", "dy"], int]


class Stash:
    """Lay out the rings in the buffers.

    Attributes:
        used: per IPU and buffer, the numbers that its rings take.
        sizes: per buffer, the most that an IPU takes of it.
    """

    def __init__(self, plan: Plan):
        self._rings: dict[Key, list[tuple[str, np.ndarray, int, Any]]] = {}
        self._depths: dict[Key, np.ndarray] = {}
        self.used: list[dict[str, int]] = [{} for _ in range(plan.ipus)]
        # what all IPUs hold comes first: it lies at the same place on every one
        for key, depths, shapes in sorted(_rings_of(plan), key=lambda ring: None not in ring[1]):
            everywhere = depths.get(None)
            depth_of = np.array([depths.get(ipu, everywhere or 0) for ipu in range(plan.ipus)])
            self._rings[key], self._depths[key] = [], depth_of
            for shape in shapes:
                buffer, size = f"{key[0]}:{np.dtype(shape.dtype).name}", math.prod(shape.shape)
                bases = np.array([used.get(buffer, 0) for used in self.used])
                self._rings[key].append((buffer, bases, size, shape))
                for used, depth in zip(self.used, depth_of, strict=True):
                    if depth:
                        used[buffer] = used.get(buffer, 0) + size * int(depth)
        buffers = sorted({buffer for used in self.used for buffer in used})
        self.sizes = {buffer: max(used.get(buffer, 0) for used in self.used) for buffer in buffers}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the buffers' shapes, each one number longer than its rings.

        A slice as long as its buffer is the buffer, wherever it begins, and XLA free to read it before the guard.
        """
        return {name: jax.ShapeDtypeStruct((size + 1,), name.split(":")[1]) for name, size in self.sizes.items()}

    def __contains__(self, key: Key) -> bool:
        return key in self._rings

    def write(
        self, buffers: Mapping[str, Any], key: Key, me: Any, microbatch: Any, values: list[Any], zero: Any
    ) -> dict[str, Any]:
        """Return the buffers with a micro-batch's values written to IPU `me`'s ring; `zero` is the guard's traced 0."""
        written = dict(buffers)
        for (buffer, bases, size, _), value in zip(self._rings[key], values, strict=True):
            at = self._at(key, bases, size, me, microbatch, zero)
            written[buffer] = lax.dynamic_update_slice(written[buffer], value.reshape(-1), at)
        return written

    def read(self, buffers: Mapping[str, Any], key: Key, me: Any, microbatch: Any, zero: Any) -> list[Any]:
        """Return what `write` wrote there."""
        return [
            lax.dynamic_slice(buffers[buffer], self._at(key, bases, size, me, microbatch, zero), (size,)).reshape(
                shape.shape
            )
            for buffer, bases, size, shape in self._rings[key]
        ]

    def _at(self, key: Key, bases: np.ndarray, size: int, me: Any, microbatch: Any, zero: Any) -> tuple[Any]:
        depths = self._depths[key]
        base, depth = (_of_ipu(numbers, depths > 0, me) for numbers in (bases, depths))
        # in a ring of one micro-batch the place would be a constant, and XLA free to read it before the guard
        return (base + microbatch % depth * size + zero,)


def _of_ipu(numbers: np.ndarray, holders: np.ndarray, me: Any) -> Any:
    held = set(numbers[holders].tolist())
    return held.pop() if len(held) == 1 else jnp.asarray(np.maximum(numbers, 1 - holders), jnp.int32)[me]


def _rings_of(plan: Plan) -> Iterator[tuple[Key, dict[int | None, int], list[Any]]]:
    """Yield, per ring, its key, its depth on each IPU that holds it (None: all), and the shapes of one micro-batch."""
    schedule, segments = plan.schedule, plan.segments
    for t, team in enumerate(plan.teams):
        first, halves = team[0], plan.halves[team[0]]
        if schedule.phase(segments[first].first, "F") != "head":  # whose B follows its F at once
            depths = {segments[i].place: schedule.stash_depth(segments[i].first) for i in team}
            yield ("stash", t), depths, halves.stash
        if plan.is_split(first):
            yield ("cut", t), {segments[i].place: schedule.cut_depth(segments[i].first) for i in team}, halves.cut
        if first > 0 and any(plan.queue(i - 1, "F") > 1 for i in team):
            depths = {plan.waits_at(i, "x"): plan.queue(i - 1, "F") for i in team}
            yield ("x", t), depths, jax.tree.leaves(plan.messages[plan.lanes[first - 1]])
        if first < plan.last and any(plan.queue(i, "B") > 1 for i in team):
            depths = {plan.waits_at(i, "dy"): plan.queue(i, "B") for i in team}
            yield ("dy", t), depths, split_floats(plan.messages[plan.lanes[first]])[0]

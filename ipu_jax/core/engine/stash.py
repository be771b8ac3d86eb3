"""Store the values that micro-batches need later on the same IPU: rings in flat buffers.

    ("stash", class)    residuals of F, until their last use     ("x", class)    activations that wait for F
    ("weight", class)   weight residuals, from B to W            ("dy", class)   gradients that wait for B

A ring has room for as many micro-batches as the schedule keeps in it. There is one buffer per kind of ring and dtype,
such as "weight:float32": a task reads one kind and writes another, and XLA copies a buffer that one loop both reads and
writes. An IPU's rings follow one another in a buffer, whatever its stages are. So the buffer is as long as the IPU with
the most data needs.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.programs.segment_program import split_floats

Key = tuple[Literal["stash", "weight", "x", "dy"], int]


class Stash:
    """Lay out the rings in the buffers.

    Attributes:
        used: per IPU and buffer, the number of elements that the rings take.
        sizes: per buffer, the most elements that one IPU takes.
    """

    def __init__(self, plan: Plan):
        self._rings: dict[Key, list[tuple[str, np.ndarray, int, Any]]] = {}
        self._depths: dict[Key, np.ndarray] = {}
        self.used: list[dict[str, int]] = [{} for _ in range(plan.ipus)]
        # rings of all IPUs come first, so that they begin at the same index on each
        for key, depths, shapes in sorted(_rings_of(plan), key=lambda ring: None not in ring[1]):
            of_all = depths.get(None)
            depth_of = np.array([depths.get(ipu, of_all or 0) for ipu in range(plan.ipus)])
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
        """Return the buffers' shapes, each one element longer than its rings.

        XLA recognises a slice as long as its buffer as the whole buffer, and may read it before the guard.
        """
        return {name: jax.ShapeDtypeStruct((size + 1,), name.split(":")[1]) for name, size in self.sizes.items()}

    def __contains__(self, key: Key) -> bool:
        return key in self._rings

    def write(
        self, buffers: Mapping[str, Any], key: Key, ipu: Any, microbatch: Any, values: list[Any], zero: Any
    ) -> dict[str, Any]:
        """Return the buffers with a micro-batch's values written to this IPU's ring; `zero` is the guard's traced 0."""
        written = dict(buffers)
        for (buffer, bases, size, _), value in zip(self._rings[key], values, strict=True):
            at = self._at(key, bases, size, ipu, microbatch, zero)
            written[buffer] = lax.dynamic_update_slice(written[buffer], value.reshape(-1), at)
        return written

    def read(self, buffers: Mapping[str, Any], key: Key, ipu: Any, microbatch: Any, zero: Any) -> list[Any]:
        """Return the values that `write` wrote for a micro-batch."""
        return [
            lax.dynamic_slice(buffers[buffer], self._at(key, bases, size, ipu, microbatch, zero), (size,)).reshape(
                shape.shape
            )
            for buffer, bases, size, shape in self._rings[key]
        ]

    def _at(self, key: Key, bases: np.ndarray, size: int, ipu: Any, microbatch: Any, zero: Any) -> tuple[Any]:
        depths = self._depths[key]
        base, depth = (_of_ipu(numbers, depths > 0, ipu) for numbers in (bases, depths))
        # in a ring of one micro-batch the index would be a constant, and XLA might read it before the guard
        return (base + microbatch % depth * size + zero,)


def _of_ipu(numbers: np.ndarray, holders: np.ndarray, ipu: Any) -> Any:
    """Return this IPU's number: a plain int where all holders have the same number."""
    distinct = set(numbers[holders].tolist())
    return distinct.pop() if len(distinct) == 1 else jnp.asarray(np.maximum(numbers, 1 - holders), jnp.int32)[ipu]


def _rings_of(plan: Plan) -> Iterator[tuple[Key, dict[int | None, int], list[Any]]]:
    """Yield the key of each ring, its depth per IPU that has it (None: all), and the shapes of one micro-batch."""
    schedule, segments = plan.schedule, plan.segments
    for c, members in enumerate(plan.classes):
        first, program = members[0], plan.programs[members[0]]
        if schedule.phase(segments[first].first, "F") != "head":  # there, B follows F in the same task
            depths = {segments[i].place: schedule.stash_depth(segments[i].first) for i in members}
            yield ("stash", c), depths, program.stash
        if plan.is_split(first):
            depths = {segments[i].place: schedule.weight_residual_depth(segments[i].first) for i in members}
            yield ("weight", c), depths, program.weight_residuals
        if first > 0 and any(plan.queue(i - 1, "F") > 1 for i in members):
            depths = {plan.waits_at(i, "x"): plan.queue(i - 1, "F") for i in members}
            yield ("x", c), depths, jax.tree.leaves(plan.channels[plan.channel_of[first - 1]].message)
        if first < plan.last and any(plan.queue(i, "B") > 1 for i in members):
            depths = {plan.waits_at(i, "dy"): plan.queue(i, "B") for i in members}
            yield ("dy", c), depths, split_floats(plan.channels[plan.channel_of[first]].message)[0]

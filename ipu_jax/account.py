"""Counting what a pipeline needs: FLOPs and bytes alive per segment; weights, stash, messages and waiting per IPU.

Everything is read off the plan and the traced halves; `report` puts it together.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ipu_jax import packing
from ipu_jax.cost import bytes_of, jaxpr_flops, jaxpr_peak_bytes
from ipu_jax.devices import IPU_AXIS
from ipu_jax.halves import split_floats
from ipu_jax.packing import Layout, Leaf, Sharded
from ipu_jax.plan import Plan, Stash, _rings_of, make_plan
from ipu_jax.schedule import Schedule
from ipu_jax.stage import Stage, segments_of

T = TypeVar("T")


class PipelineLike(Protocol):
    """What a report reads of a `Pipeline`, which stands above this module."""

    stages: tuple[Stage, ...]
    schedule: Schedule
    mesh: Mesh
    ipus: int
    replicas: int


def plan_for(
    pipeline: PipelineLike, params: Sharded, batch: Any, inspect: Callable[[Plan, dict[str, Any], Any], T]
) -> tuple[Plan, T]:
    """The plan that a step with these shapes has, and what `inspect(plan, weights, microbatch)` says of it.

    Planning traces stages, and concurrent ones name the axis "ipu": so it stands in a `shard_map` that is traced and
    thrown away, and so does `inspect`, which gets the shapes that one IPU sees: `{group: tree}` and one micro-batch.

    Raises:
        ValueError: what `make_plan` refuses.
    """
    layout = params.layout
    weights = {
        group.name: jax.tree.unflatten(
            group.treedef, [jax.ShapeDtypeStruct(_held(layout, leaf, group.ipu), leaf.dtype) for leaf in group.leaves]
        )
        for group in layout.groups
    }
    lead = 1 if pipeline.replicas == 1 else 2
    microbatch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[lead:], leaf.dtype), batch)
    found: list[tuple[Plan, T]] = []

    def program() -> Any:
        segments = segments_of(pipeline.stages, pipeline.schedule)
        plan = make_plan(segments, pipeline.schedule, weights, microbatch)
        found.append((plan, inspect(plan, weights, microbatch)))
        return jnp.zeros(())

    mapped = jax.shard_map(program, mesh=pipeline.mesh, in_specs=(), out_specs=PartitionSpec(), check_vma=False)
    jax.eval_shape(mapped)
    return found[0]


def _held(layout: Layout, leaf: Leaf, ipu: int | None) -> tuple[int, ...]:
    return packing.local_shape(leaf, layout.ipus) if ipu is None else leaf.shape


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """What one segment costs an IPU for one micro-batch.

    Attributes:
        forward, backward, weight: FLOPs of F, of the whole backward pass, and of W where it is apart.
        working_set: bytes alive at once in any of them.
    """

    forward: int
    backward: int
    weight: int
    working_set: int


def costs_of(plan: Plan, weights: dict[str, Any], microbatch: Any) -> list[SegmentCost]:
    found, x = [], None
    for i, (segment, halves) in enumerate(zip(plan.segments, plan.halves, strict=True)):
        own = {name: weights[name] for name in segment.groups}
        dy = list(halves.y[:1]) if i + 1 == len(plan.segments) else split_floats(halves.y)[0]
        like_x = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), x)
        first = len(jax.tree.leaves(own))
        sliced = range(first, first + len(jax.tree.leaves(microbatch)) + len(halves.stash))  # out of batch and stash
        f = jax.make_jaxpr(halves.forward)(own, x, microbatch)
        if plan.is_split(i):
            b = jax.make_jaxpr(halves.backward_input)(own, microbatch, halves.stash, dy)
            w = jax.make_jaxpr(halves.backward_weight)(own, microbatch, halves.stash, halves.cut)
        else:

            def backward(own: Any, mb: Any, stash: Any, dy: Any, halves: Any = halves, like_x: Any = like_x) -> Any:
                return halves.backward(own, like_x, mb, stash, dy)

            b, w = jax.make_jaxpr(backward)(own, microbatch, halves.stash, dy), None
        alive = [jaxpr_peak_bytes(half, copied=sliced, keep_outputs=False) for half in (b, w) if half is not None]
        alive.append(jaxpr_peak_bytes(f, keep_outputs=False))
        of_w = 0 if w is None else jaxpr_flops(w)
        found.append(SegmentCost(jaxpr_flops(f), jaxpr_flops(b) + of_w, of_w, max(alive)))
        x = halves.y
    return found


def stash_of(plan: Plan, ipu: int) -> int:
    """Bytes that an IPU's own segments keep: for each ring its depth x what a micro-batch leaves."""
    return sum(depth * bytes_of(shapes) for _, place, depth, shapes in _rings_of(plan) if place in (None, ipu))


def stash_buffer(plan: Plan, ipus: int) -> int:
    """Bytes of the scan's stash, on every IPU as many as the fullest needs."""
    return sum(size * np.dtype(dtype).itemsize for dtype, size in Stash(plan, ipus).sizes.items())


def weights_of(layout: Layout, ipu: int) -> tuple[int, int, int]:
    """An IPU's own bytes of weights, what it holds with padding, and what the accumulators of that take."""
    own = 0
    arrays = [(slot.shape, slot.dtype) for slot in layout.slots]
    for group in layout.groups:
        for leaf in group.leaves:
            size = np.dtype(leaf.dtype).itemsize
            if group.ipu is None:
                shape = packing.local_shape(leaf, layout.ipus)
                arrays.append((shape, leaf.dtype))
                for dim, axis in enumerate(leaf.spec):
                    if axis == IPU_AXIS:  # the last shards are shorter where the dim does not divide
                        left = leaf.shape[dim] - ipu * shape[dim]
                        shape = (*shape[:dim], min(max(left, 0), shape[dim]), *shape[dim + 1 :])
                own += size * math.prod(shape)
            elif group.ipu == ipu:
                own += size * leaf.size
    held = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
    return own, held, sum(math.prod(shape) * _sum_dtype(dtype).itemsize for shape, dtype in arrays)


def _sum_dtype(dtype: str) -> np.dtype:
    return np.dtype(jnp.promote_types(dtype, jnp.float32))


def wider_sums(layout: Layout) -> int:
    """Bytes of the accumulators that no gradient can lie in, since they are wider."""
    held = [(slot.shape, slot.dtype) for slot in layout.slots]
    concurrent = [leaf for group in layout.groups if group.ipu is None for leaf in group.leaves]
    held += [(packing.local_shape(leaf, layout.ipus), leaf.dtype) for leaf in concurrent]
    return sum(math.prod(s) * _sum_dtype(dtype).itemsize for s, dtype in held if _sum_dtype(dtype) != np.dtype(dtype))


def registers_of(plan: Plan, micro_batches: int) -> int:
    """y and dx of each register, once as made and, where they cross IPUs, once as received; loss and aux."""
    total = bytes_of(plan.halves[-1].y[0]) + micro_batches * bytes_of(plan.halves[-1].y[1])
    for message, pairs in zip(plan.messages, plan.routes, strict=True):
        total += (bytes_of(message) + bytes_of(split_floats(message)[0])) * (2 if pairs else 1)
    return total


def sent_by(plan: Plan, ipu: int) -> int:
    """What an IPU puts into collectives between stages in a tick in which every stage is active."""
    total = 0
    for message, pairs in zip(plan.messages, plan.routes, strict=True):
        total += sum(bytes_of(message) for source, _ in pairs if source == ipu)
        total += sum(bytes_of(split_floats(message)[0]) for _, target in pairs if target == ipu)
    for i in range(len(plan.segments) - 1):
        message, floats = plan.halves[i].y, split_floats(plan.halves[i].y)[0]
        if plan.segments[i + 1].place is None:  # x to all of them, by a psum, and the parts of dx summed
            total += bytes_of(message) + bytes_of(floats)
        elif plan.segments[i].place is None:  # dy to all of them
            total += bytes_of(floats)
    return total


def idle_shares(plan: Plan, costs: list[SegmentCost], ipus: int) -> list[float]:
    """Per IPU the share of a step in which it waits. The exchanges of each tick are collectives: all meet in them."""
    of_stage: dict[str, list[float]] = {"forward": [], "backward": [], "weight": []}
    for segment, cost in zip(plan.segments, costs, strict=True):
        whole = ipus if segment.place is None else 1  # the simulator divides what is concurrent by the IPUs
        for kind, found in of_stage.items():
            found += [whole * getattr(cost, kind) / len(segment.stages)] * len(segment.stages)
    run = plan.schedule.simulate(of_stage["forward"], of_stage["backward"], of_stage["weight"], lockstep=True)
    return [1 - busy / run.makespan if run.makespan else 0.0 for busy in run.busy]

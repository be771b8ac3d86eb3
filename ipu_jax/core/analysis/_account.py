"""Count the needs of a pipeline: FLOPs and live bytes per segment; weights, stash, messages and idle time per IPU.

All counts are derived from the plan and the traced programs of its segments. `report` puts them together.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ipu_jax.core.analysis.stage_costs import transfer_time
from ipu_jax.core.devices import IPU_AXIS
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh_axes import parts
from ipu_jax.core.programs.cost import bytes_of, jaxpr_flops, jaxpr_peak_bytes
from ipu_jax.core.programs.segment_program import split_floats
from ipu_jax.core.weights.packed_layout import PackedLayout, local_shape


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """The cost of one segment on one IPU for one micro-batch.

    Attributes:
        forward, backward, weight: FLOPs of F, of the whole backward pass, and of its part W if that runs separately.
        working_set: the most bytes alive at once in any of these passes.
    """

    forward: int
    backward: int
    weight: int
    working_set: int


def segment_costs(plan: Plan) -> list[SegmentCost]:
    """Return the cost of each segment."""
    costs = []
    for segment, program in zip(plan.segments, plan.programs, strict=True):
        forward, *backward = program.jaxprs.values()
        weights = sum(len(plan.params.group(name).leaves) for name in segment.groups)
        num_dy = len(split_floats(program.y)[0])
        flops = [jaxpr_flops(jaxpr) for jaxpr in backward]
        # Inputs after the weights are copied slices of the batch and the stash, except B's dy, which is in a channel.
        ends = [len(backward[0].in_avals) - num_dy, *(len(jaxpr.in_avals) for jaxpr in backward[1:])]
        peak_bytes = [
            jaxpr_peak_bytes(jaxpr, copied=range(weights, end), keep_outputs=False)
            for jaxpr, end in zip(backward, ends, strict=True)
        ]
        peak_bytes.append(jaxpr_peak_bytes(forward, keep_outputs=False))
        costs.append(SegmentCost(jaxpr_flops(forward), sum(flops), sum(flops[1:]), max(peak_bytes)))
    return costs


class WeightBytes(NamedTuple):
    """The bytes of an IPU's own weights, of the arrays that hold them with padding, and of their accumulators.

    If the IPU is a group of devices, they are the bytes on one device.
    """

    own: int
    allocated: int
    accumulators: int


def weight_bytes(layout: PackedLayout, ipu: int, axes: Mapping[str, int]) -> WeightBytes:
    """Return the bytes that an IPU's weights and their accumulators take, split over further axes of these sizes."""
    own = 0
    arrays = [(math.prod(slot.shape) // parts(axes, slot.spec), slot.dtype) for slot in layout.slots]
    summed = [array for k, array in enumerate(arrays) if k in layout.trainable_slots]
    for group in layout.groups:
        for leaf in group.leaves:
            size, split = np.dtype(leaf.dtype).itemsize, parts(axes, leaf.spec)
            if group.ipu is None:
                shape = local_shape(leaf, layout.ipus)
                arrays.append((math.prod(shape) // split, leaf.dtype))
                summed += [] if leaf.frozen else arrays[-1:]
                for dim, axis in enumerate(leaf.spec):
                    if axis == IPU_AXIS:  # the last shards are shorter if the dim does not divide evenly
                        left = leaf.shape[dim] - ipu * shape[dim]
                        shape = (*shape[:dim], min(max(left, 0), shape[dim]), *shape[dim + 1 :])
                own += size * math.prod(shape) // split
            elif group.ipu == ipu:
                own += size * leaf.size // split
    allocated = sum(count * np.dtype(dtype).itemsize for count, dtype in arrays)
    accumulators = sum(count * _sum_dtype(dtype).itemsize for count, dtype in summed)
    return WeightBytes(own, allocated, accumulators)


def _sum_dtype(dtype: str) -> np.dtype:
    return np.dtype(jnp.promote_types(dtype, jnp.float32))


def wide_accumulator_bytes(layout: PackedLayout, axes: Mapping[str, int]) -> int:
    """Return the bytes of accumulators that are wider than their gradients, and so cannot share memory with them."""
    summed = [(slot.shape, slot) for k, slot in enumerate(layout.slots) if k in layout.trainable_slots]
    concurrent = [leaf for g in layout.groups if g.ipu is None for leaf in g.leaves if not leaf.frozen]
    summed += [(local_shape(leaf, layout.ipus), leaf) for leaf in concurrent]
    return sum(
        math.prod(shape) // parts(axes, held.spec) * _sum_dtype(held.dtype).itemsize
        for shape, held in summed
        if _sum_dtype(held.dtype) != np.dtype(held.dtype)
    )


def channel_bytes(plan: Plan) -> int:
    """Return the bytes of loss, aux, and each channel's y and dx, which count twice if another IPU receives them."""
    m = plan.schedule.micro_batches
    total = bytes_of(plan.programs[-1].y) + m * sum(bytes_of(program.aux) for program in plan.programs)
    y, dx = plan.outboxes("y"), plan.outboxes("dx")
    for k, channel in enumerate(plan.channels):
        is_received = bool(channel.pairs)
        total += bytes_of(channel.message) * ((k in y) + is_received)
        total += bytes_of(split_floats(channel.message)[0]) * ((k in dx) + is_received)
    return total


def sent_bytes(plan: Plan, ipu: int) -> int:
    """Return the bytes that an IPU sends in collectives between stages, in a tick in which every stage is active."""
    total = 0
    for channel in plan.channels:
        total += sum(bytes_of(channel.message) for source, _ in channel.pairs if source == ipu)
        total += sum(bytes_of(split_floats(channel.message)[0]) for _, target in channel.pairs if target == ipu)
    for i in range(len(plan.segments) - 1):
        message, floats = plan.programs[i].y, split_floats(plan.programs[i].y)[0]
        if plan.segments[i + 1].place is None:  # a psum broadcasts x to all IPUs, and another psum sums the parts of dx
            total += bytes_of(message) + bytes_of(floats)
        elif plan.segments[i].place is None and not plan.programs[i].needs_sums_only:  # dy is broadcast to all IPUs
            total += bytes_of(floats)
    return total


class Waits(NamedTuple):
    """Hold how IPUs wait in a step if FLOPs are time: all wait for each other at each exchange.

    Attributes:
        idle: per IPU, the share of the step in which it is idle.
        exchanges: the ticks in which an IPU sends to another.
        exposed: the share of the step that messages take while no task hides them; None where a message takes no time.
    """

    idle: list[float]
    exchanges: int
    exposed: float | None


def waits(plan: Plan, costs: list[SegmentCost]) -> Waits:
    """Return how IPUs wait in a step on the plan's platform."""
    stage_costs: dict[str, list[float]] = {"forward": [], "backward": [], "weight": []}
    for segment, cost in zip(plan.segments, costs, strict=True):
        # the simulator divides the cost of concurrent stages among the IPUs
        sharers = plan.ipus if segment.place is None else 1
        for kind, per_stage in stage_costs.items():
            per_stage += [sharers * getattr(cost, kind) / len(segment.stages)] * len(segment.stages)
    transfer = transfer_time(plan.segments, plan.programs, plan.platform, "FLOPs")
    forward, backward, weight = stage_costs.values()
    run = plan.schedule.simulate(forward, backward, weight, transfer, lockstep=True)
    idle = [1 - busy / run.makespan if run.makespan else 0.0 for busy in run.busy]
    exchanges = int((plan.exchanges["y"] | plan.exchanges["dx"]).any(1).sum())
    hidden = plan.schedule.clock == "two-phase"
    return Waits(idle, exchanges, (0.0 if hidden else exchanges * transfer / run.makespan) if transfer else None)

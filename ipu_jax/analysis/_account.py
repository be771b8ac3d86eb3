"""Counting what a pipeline needs: FLOPs and bytes alive per segment; weights, stash, messages and waiting per IPU.

Everything is read off the plan and its traced programs; `report` puts it together.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from ipu_jax.analysis.cost import bytes_of, jaxpr_flops, jaxpr_peak_bytes
from ipu_jax.devices import IPU_AXIS
from ipu_jax.engine.plan import Plan
from ipu_jax.engine.stash import Stash
from ipu_jax.programs.segment_program import split_floats
from ipu_jax.weights import packing
from ipu_jax.weights.packing import Layout


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """The cost of one segment to an IPU for one micro-batch.

    Attributes:
        forward, backward, weight: FLOPs of F, of the whole backward pass, and of W where it is apart.
        working_set: bytes alive at once in any of them.
    """

    forward: int
    backward: int
    weight: int
    working_set: int


def costs_of(plan: Plan, params: Layout) -> list[SegmentCost]:
    """Return the costs of each segment."""
    found = []
    for segment, program in zip(plan.segments, plan.programs, strict=True):
        f, *backward = program.jaxprs.values()
        weights = sum(len(params.group(name).leaves) for name in segment.groups)
        num_dy = len(split_floats(program.y)[0])
        # what a B reads of the batch and of the stash is a slice of it, and so a copy
        sliced = range(weights, len(backward[0].in_avals) - num_dy)
        flops = [jaxpr_flops(jaxpr) for jaxpr in backward]
        alive = [jaxpr_peak_bytes(jaxpr, copied=sliced, keep_outputs=False) for jaxpr in backward]
        alive.append(jaxpr_peak_bytes(f, keep_outputs=False))
        found.append(SegmentCost(jaxpr_flops(f), sum(flops), sum(flops[1:]), max(alive)))
    return found


def stash_of(plan: Plan, ipu: int) -> int:
    """Return the bytes that an IPU's own segments keep: for each ring, its depth x what a micro-batch leaves."""
    return _stash_bytes(Stash(plan).used[ipu])


def stash_buffers(plan: Plan) -> int:
    """Return the bytes of the scan's stash, on every IPU as many as the fullest needs."""
    return _stash_bytes(Stash(plan).sizes)


def _stash_bytes(sizes: dict[str, int]) -> int:
    return sum(size * np.dtype(buffer.split(":")[1]).itemsize for buffer, size in sizes.items())


def weights_of(layout: Layout, ipu: int) -> tuple[int, int, int]:
    """Return an IPU's own bytes of weights, its bytes with padding, and those of their accumulators."""
    own = 0
    arrays = [(slot.shape, slot.dtype) for slot in layout.slots]
    summed = [array for k, array in enumerate(arrays) if k in layout.trained_slots]
    for group in layout.groups:
        for leaf in group.leaves:
            size = np.dtype(leaf.dtype).itemsize
            if group.ipu is None:
                shape = packing.local_shape(leaf, layout.ipus)
                arrays.append((shape, leaf.dtype))
                summed += [] if leaf.frozen else arrays[-1:]
                for dim, axis in enumerate(leaf.spec):
                    if axis == IPU_AXIS:  # the last shards are shorter where the dim does not divide
                        left = leaf.shape[dim] - ipu * shape[dim]
                        shape = (*shape[:dim], min(max(left, 0), shape[dim]), *shape[dim + 1 :])
                own += size * math.prod(shape)
            elif group.ipu == ipu:
                own += size * leaf.size
    held = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)
    return own, held, sum(math.prod(shape) * _sum_dtype(dtype).itemsize for shape, dtype in summed)


def _sum_dtype(dtype: str) -> np.dtype:
    return np.dtype(jnp.promote_types(dtype, jnp.float32))


def wider_sums(layout: Layout) -> int:
    """Return the bytes of the accumulators that are wider than their gradients, and so cannot share their memory."""
    held = [(slot.shape, slot.dtype) for k, slot in enumerate(layout.slots) if k in layout.trained_slots]
    concurrent = [leaf for g in layout.groups if g.ipu is None for leaf in g.leaves if not leaf.frozen]
    held += [(packing.local_shape(leaf, layout.ipus), leaf.dtype) for leaf in concurrent]
    return sum(math.prod(s) * _sum_dtype(dtype).itemsize for s, dtype in held if _sum_dtype(dtype) != np.dtype(dtype))


def registers_of(plan: Plan, micro_batches: int) -> int:
    """Return the bytes of y and dx of each register, as made and, if they cross IPUs, as received; of loss and aux."""
    total = bytes_of(plan.programs[-1].y) + micro_batches * sum(bytes_of(program.aux) for program in plan.programs)
    for channel in plan.channels:
        size = bytes_of(channel.message) + bytes_of(split_floats(channel.message)[0])
        total += size * (2 if channel.pairs else 1)
    return total


def sent_by(plan: Plan, ipu: int) -> int:
    """Return the bytes that an IPU puts into collectives between stages in a tick in which every stage is active."""
    total = 0
    for channel in plan.channels:
        total += sum(bytes_of(channel.message) for source, _ in channel.pairs if source == ipu)
        total += sum(bytes_of(split_floats(channel.message)[0]) for _, target in channel.pairs if target == ipu)
    for i in range(len(plan.segments) - 1):
        message, floats = plan.programs[i].y, split_floats(plan.programs[i].y)[0]
        if plan.segments[i + 1].place is None:  # x to all of them, by a psum, and the parts of dx summed
            total += bytes_of(message) + bytes_of(floats)
        elif plan.segments[i].place is None:  # dy to all of them
            total += bytes_of(floats)
    return total


def idle_shares(plan: Plan, costs: list[SegmentCost], ipus: int) -> list[float]:
    """Return, per IPU, the share of a step in which it waits: all IPUs meet in the exchanges of each tick."""
    of_stage: dict[str, list[float]] = {"forward": [], "backward": [], "weight": []}
    for segment, cost in zip(plan.segments, costs, strict=True):
        whole = ipus if segment.place is None else 1  # the simulator divides what is concurrent by the IPUs
        for kind, found in of_stage.items():
            found += [whole * getattr(cost, kind) / len(segment.stages)] * len(segment.stages)
    run = plan.schedule.simulate(of_stage["forward"], of_stage["backward"], of_stage["weight"], lockstep=True)
    return [1 - busy / run.makespan if run.makespan else 0.0 for busy in run.busy]

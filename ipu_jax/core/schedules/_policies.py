"""Search the policies of the list scheduler: which task goes first, and how many micro-batches a segment may hold.

A segment must hold as many micro-batches as its IPU can process during a round trip, from F until the last use. So the
search tries multiples of this depth, cut down to the limit of bytes. Then it varies the rules of single IPUs and the
depths of single segments, and keeps the variations that do not lengthen the run.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from ipu_jax.core.schedules._costs import Work
from ipu_jax.core.schedules._list_scheduler import FIRSTS, Order, Policy, list_schedule

Limits = Sequence[float]

SCALES = (1.0, 1.25, 1.6, 2.2, 3.5, math.inf)
ROUNDING = 1e-9  # relative


@dataclasses.dataclass(frozen=True)
class ScheduledPolicy:
    """A policy, the order of tasks that it gives, and the time at which the last one ends."""

    work: Work
    policy: Policy
    order: Order
    makespan: float


def bytes_held(work: Work, depths: Sequence[int], residual_depths: Sequence[int]) -> list[float]:
    """Return, per IPU, the bytes that its segments hold at these depths."""
    everywhere = [work.head_stash, *(stash * depth for stash, depth in zip(work.joint_stash, depths, strict=True))]
    held = [list(everywhere) for _ in range(work.ipus)]
    for ipu, mine in work.line.on.items():
        held[ipu] += [work.stash[i] * depths[i] + work.residuals[i] * residual_depths[i] for i in mine]
    return [math.fsum(parts) for parts in held]


def fits(held: Sequence[float], limits: Limits) -> bool:
    return all(mine <= limit * (1 + ROUNDING) for mine, limit in zip(held, limits, strict=True))


def allot(
    work: Work,
    most: Sequence[int],
    limits: Limits,
    *,
    residual_most: int | None = None,
    least: tuple[Sequence[int], Sequence[int]] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return depths and residual depths as near to `most` as the limits allow, or None if `least` does not fit.

    Extra micro-batches are distributed so that the depths of an IPU's segments stay proportional to their round trips.

    Args:
        work: the segments and their bytes.
        most: per segment, the wanted depth.
        limits: bytes per IPU.
        residual_most: the wanted residual depth of each segment. Default: no more than its depth.
        least: per segment, the depths and residual depths that it needs. Default: 1.
    """
    n = len(work.line)
    depths, residuals = (list(least[0]), list(least[1])) if least else ([1] * n, [1] * n)
    if not fits(bytes_held(work, depths, residuals), limits):
        return None
    levels = [(level, i) for i in range(n) for level in range(depths[i] + 1, most[i] + 1)]
    if any(limit != math.inf for limit in limits):
        trips = [work.round_trip(i) or 1.0 for i in range(n)]
        levels.sort(key=lambda step: (step[0] / trips[step[1]], step))
    full: set[int] = set()
    for level, i in levels:
        if i in full:
            continue
        before = depths[i], residuals[i]
        depths[i] = level
        residuals[i] = max(residuals[i], level if residual_most is None else min(level, residual_most))
        if not _fit_at(work, i, depths, residuals, limits):
            depths[i], residuals[i] = before
            full.add(i)
    return tuple(depths), tuple(residuals)


def _fit_at(work: Work, i: int, depths: Sequence[int], residuals: Sequence[int], limits: Limits) -> bool:
    """Return whether the IPUs that hold bytes of segment i have room for these depths."""
    if work.joint_stash[i]:
        return fits(bytes_held(work, depths, residuals), limits)
    ipu = work.line.places[i]
    parts = [work.stash[j] * depths[j] + work.residuals[j] * residuals[j] for j in work.line.on[ipu]]
    parts += [work.head_stash, *(stash * depth for stash, depth in zip(work.joint_stash, depths, strict=True))]
    return math.fsum(parts) <= limits[ipu] * (1 + ROUNDING)


def wanted(work: Work, scale: float) -> list[int]:
    """Return, per segment, `scale` times the micro-batches that it must hold to keep its IPU busy."""
    count = work.line.micro_batches
    period = max(work.share(ipu) for ipu in work.line.on) + work.joint_share()
    if scale == math.inf or period <= 0:
        return [count] * len(work.line)
    trips = [work.round_trip(i) for i in range(len(work.line))]
    # slightly less, so that rounding cannot turn a whole number into the next
    return [max(1, min(count, math.ceil(scale * trip / period - 1e-9))) for trip in trips]


def policies(work: Work, limits: Limits) -> Iterator[Policy]:
    """Yield the policies to try first, each once, from the smallest depths to the largest."""
    n = len(work.line)
    residual_mosts = (1, 2, None) if any(work.residuals) else (None,)
    has_joint = work.has_head or any(work.joint)
    patiences = (0.0, 0.5, 1.0) if work.split else (0.0,)
    eagers = (1.0, 0.5, 0.0) if has_joint else (1.0,)
    seen: set[Policy] = set()
    for scale, residual_most in itertools.product(SCALES, residual_mosts):
        found = allot(work, wanted(work, scale), limits, residual_most=residual_most)
        if found is None:
            continue
        for first, patience, eager in itertools.product(FIRSTS, patiences, eagers):
            if first == "room" and not work.split:
                continue
            policy = Policy((first,) * n, *found, patience, eager)
            if policy not in seen:
                seen.add(policy)
                yield policy


def search(
    work: Work, limits: Limits, transfer: float, bound: float, *, tries: int, rng: random.Random
) -> list[ScheduledPolicy]:
    """Return the best runs of at most about 2 `tries` policies, the best run first.

    Args:
        work: the costs of the tasks.
        limits: bytes per IPU.
        transfer: the time that a message takes.
        bound: a time before which no run can end. A run that ends then is optimal.
        tries: how many policies to try, and how many variations of the best one.
        rng: the only source of randomness.
    """
    every = list(policies(work, limits))
    runs: list[ScheduledPolicy] = []
    stride = max(1, math.ceil(len(every) / max(1, tries)))
    for policy in every[::stride]:
        runs.append(ScheduledPolicy(work, policy, *list_schedule(work, policy, transfer)))
        if runs[-1].makespan <= bound * (1 + ROUNDING):
            return [runs[-1]]
    runs.sort(key=lambda run: run.makespan)  # stable: of equal runs, the run that holds the least is first
    if not runs:
        return []
    best = runs[0]
    for _ in range(tries):
        policy = _varied(best, limits, rng)
        if policy is None:
            continue
        run = ScheduledPolicy(work, policy, *list_schedule(work, policy, transfer))
        if run.makespan <= best.makespan:
            best = run
            if best.makespan <= bound * (1 + ROUNDING):
                break
    return [best, *runs]


def _varied(run: ScheduledPolicy, limits: Limits, rng: random.Random) -> Policy | None:
    """Return a run's policy with one IPU's rule, a few depths, or a number changed; None if that does not fit."""
    work, policy = run.work, run.policy
    n, count = len(work.line), work.line.micro_batches
    dice = rng.random
    what = dice()
    if what < 0.4:
        ipu = list(work.line.on)[int(dice() * len(work.line.on))]
        first = FIRSTS[int(dice() * len(FIRSTS))]
        mine = work.line.on[ipu]
        return dataclasses.replace(policy, first=tuple(first if i in mine else policy.first[i] for i in range(n)))
    if what < 0.5:
        patience = dice() if work.split else 0.0
        return dataclasses.replace(policy, patience=patience, eager=dice())  # without concurrent stages all are eager
    depths = list(policy.depths)
    for _ in range(1 + int(2 * dice())):
        i = int(dice() * n)
        depths[i] = max(1, min(count, depths[i] + (1 if dice() < 0.5 else -1)))
    residuals = [min(depths[i], max(1, policy.residual_depths[i] + int(3 * dice()) - 1)) for i in range(n)]
    if not any(work.residuals):
        residuals = depths
    if not fits(bytes_held(work, depths, residuals), limits):
        return None
    return dataclasses.replace(policy, depths=tuple(depths), residual_depths=tuple(residuals))

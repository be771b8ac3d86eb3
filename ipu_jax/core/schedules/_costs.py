"""Define the costs and sizes of stages, and compute them for the segments of a line, whose tasks a search schedules."""

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from ipu_jax.base.checks import check_choice, check_cost
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.schedules._schedule import Schedule
from ipu_jax.core.schedules._simulate import Simulation
from ipu_jax.core.schedules._timetable import Line, Placement

Costs = Sequence[float]

Unit = Literal["FLOPs", "seconds"]

_SIZES = ("stash", "weight_residuals")


@dataclasses.dataclass(frozen=True, repr=False)
class StageCosts(Shown):
    """Hold the costs of each stage for one micro-batch, in any unit of time, and the bytes that the stage keeps.

    The costs of a concurrent stage are for the whole stage, and the IPUs divide them evenly. A concurrent stage has no
    W: its backward pass always costs `whole_backward`. Its bytes are the bytes that each IPU holds.

    Attributes:
        forward: per stage, the cost of F.
        backward: per stage, the cost of B (the gradient of the stage's input) where B is split from W.
        weight: per stage, the cost of W (the gradients of the stage's weights).
        whole_backward: per stage, the cost of the backward pass where it is not split. Default: backward + weight. It
            may be less if B and W share work.
        stash: per stage, the bytes that it holds from F until its last use: W, or B if there is no W. Default: 0.
        weight_residuals: per stage, the bytes that it holds from B until W besides the stash. Default: 0.
        unit: "FLOPs" or "seconds", if it is known. On chips `Pipeline(schedule="auto")` then adds the time of messages.

    Raises:
        ValueError: a cost or a size is not a finite number of at least 0, there is not one number per stage, or the
            unit is unknown.

    >>> costs = StageCosts(forward=[1, 2], backward=[1, 2], weight=[1, 1.5])
    >>> costs.whole_backward, costs.stash
    ((2.0, 3.5), (0.0, 0.0))
    """

    forward: Costs
    backward: Costs
    weight: Costs
    whole_backward: Costs | None = None
    stash: Costs | None = None
    weight_residuals: Costs | None = None
    unit: Unit | None = None

    def __post_init__(self) -> None:
        defaults: dict[str, Costs] = {}
        if self.unit is not None:
            check_choice("unit", self.unit, get_args(Unit))
        for field in dataclasses.fields(self)[:-1]:  # without the unit
            given = getattr(self, field.name)
            if given is None and field.default is None:
                given = defaults[field.name]
            numbers = _numbers(field.name, given)
            if field.name == "forward":
                defaults |= dict.fromkeys(_SIZES, (0.0,) * len(numbers))
                if not numbers:
                    raise ValueError(f"forward={given!r} has no stages: give at least one cost")
            if len(numbers) != len(self.forward):
                raise ValueError(
                    f"{field.name} has {len(numbers)} numbers, but forward has {len(self.forward)}: give one per stage"
                )
            object.__setattr__(self, field.name, numbers)
            if field.name == "weight":
                defaults["whole_backward"] = [b + w for b, w in zip(self.backward, numbers, strict=True)]

    def __len__(self) -> int:
        return len(self.forward)

    def _shown(self) -> list[str | Table]:
        names = [field.name for field in dataclasses.fields(self)[:-1]]
        rows = [[str(k), *(f"{getattr(self, name)[k]:.6g}" for name in names)] for k in range(len(self))]
        unit = f", in {self.unit}" if self.unit else ""
        return [f"StageCosts of a micro-batch{unit}", Table([["stage", *names], *rows])]

    @classmethod
    def equal(cls, placement: Placement) -> "StageCosts":
        """Return costs of 1 for each of F, B and W, per IPU's whole share and per concurrent stage.

        An IPU's share is divided evenly among its stages. A local stage stashes 1 byte, a concurrent stage none.

        >>> StageCosts.equal((0, 1, 1, None)).forward
        (1.0, 0.5, 0.5, 1.0)
        """
        shares = [1.0 if ipu is None else 1.0 / placement.count(ipu) for ipu in placement]
        return cls(shares, shares, shares, stash=[0.0 if ipu is None else 1.0 for ipu in placement])

    def simulate(self, schedule: Schedule, transfer: float = 0.0, *, lockstep: bool = False) -> Simulation:
        """Simulate a schedule at these costs; `Schedule.simulate` documents the arguments."""
        assert self.whole_backward is not None, "it was filled in"
        whole, weight = list(self.whole_backward), [0.0] * len(self)
        if schedule.weight is not None:
            for stage, ipu in enumerate(schedule.placement):
                if ipu is not None:
                    whole[stage], weight[stage] = self.backward[stage] + self.weight[stage], self.weight[stage]
        return schedule.simulate(self.forward, whole, weight, transfer, lockstep=lockstep)

    def stash_bytes(self, schedule: Schedule) -> tuple[float, ...]:
        """Return, per IPU, the bytes of the stash and of the weight residuals of its stages under a schedule.

        >>> from ipu_jax.core.schedules import make_schedule
        >>> costs = StageCosts([1, 1], [1, 1], [1, 1], stash=[10, 20])
        >>> costs.stash_bytes(make_schedule("1f1b", ipus=2, gradient_accumulation=4))
        (20.0, 20.0)
        """
        assert self.stash is not None, "it was filled in"
        assert self.weight_residuals is not None, "it was filled in"
        parts: list[list[float]] = [[] for _ in range(schedule.ipus)]
        for stage, ipu in enumerate(schedule.placement):
            held = schedule.stash_depth(stage) * self.stash[stage]
            held += schedule.weight_residual_depth(stage) * self.weight_residuals[stage]
            for k in range(schedule.ipus) if ipu is None else (ipu,):
                parts[k].append(held)
        return tuple(map(math.fsum, parts))


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    is_scalar = not isinstance(given, Iterable) or getattr(given, "shape", None) == ()
    if is_scalar or isinstance(given, (str, bytes, Mapping)):
        raise ValueError(f"{name}={given!r} is not a list of numbers: give one per stage")
    kind = "size" if name in _SIZES else "cost"
    return tuple(check_cost(f"{name}[{stage}]", value, kind) for stage, value in enumerate(given))


class Work:
    """The segments of a line, with their costs and sizes on one IPU.

    All sums use `math.fsum`, because `sum` rounds differently in Python 3.11 and 3.12, and every process of a program
    must find the same schedule.

    Attributes:
        line: the local segments.
        ipus: IPUs of the replica.
        split: whether B and W are split.
        forward, backward, weight: per segment, the cost of F, of B and of W. Without W, B is the whole backward pass.
        stash, residuals: per segment, the bytes of one micro-batch.
        joint: per segment, whether concurrent stages precede it.
        joint_forward, joint_backward: per segment, the cost of these concurrent stages to each IPU, or 0.
        joint_stash: per segment, the bytes of one micro-batch of these concurrent stages on each IPU, or 0.
        has_head, head, head_stash: the same for the concurrent stages that no local stage follows, F and B together.
    """

    def __init__(self, costs: StageCosts, placement: Placement, micro_batches: int, ipus: int, *, split: bool):
        assert costs.whole_backward is not None, "it was filled in"
        assert costs.stash is not None, "it was filled in"
        assert costs.weight_residuals is not None, "it was filled in"
        self.line = Line(placement, micro_batches, split)
        self.ipus = ipus
        self.split = "W" in self.line.kinds
        local: list[tuple[range, range]] = []  # each local segment, after the concurrent stages before it
        before = range(0)
        for stages in self.line.segments:
            if placement[stages[0]] is None:
                before = stages
            else:
                local.append((before, stages))
                before = range(0)
        own = lambda numbers: [_sum(numbers, stages) for _, stages in local]
        ahead = lambda numbers: [_sum(numbers, stages) for stages, _ in local]
        shared = lambda numbers: [total / ipus for total in ahead(numbers)]
        none = [0.0] * len(local)
        self.forward = own(costs.forward)
        self.backward = own(costs.backward if self.split else costs.whole_backward)
        self.weight = own(costs.weight) if self.split else none
        self.stash = own(costs.stash)
        self.residuals = own(costs.weight_residuals) if self.split else none
        self.joint = [len(stages) > 0 for stages, _ in local]
        self.joint_forward, self.joint_backward = shared(costs.forward), shared(costs.whole_backward)
        self.joint_stash = ahead(costs.stash)
        self.has_head = len(before) > 0
        self.head = (_sum(costs.forward, before) + _sum(costs.whole_backward, before)) / ipus
        self.head_stash = _sum(costs.stash, before)

    @property
    def tasks(self) -> int:
        return len(self.line) * len(self.line.kinds) * self.line.micro_batches

    def with_equal_costs(self) -> "Work":
        """Return the same tasks at costs of 1."""
        other = copy.copy(self)
        other.forward = other.backward = [1.0] * len(self.line)
        other.weight = [1.0 if self.split else 0.0] * len(self.line)
        return other

    def without_concurrent(self) -> "Work":
        """Return the same local tasks without waits for concurrent stages. The bytes of those stages still count."""
        other = copy.copy(self)
        other.joint, other.has_head = [False] * len(self.line), False
        return other

    def share(self, ipu: int) -> float:
        """Return how long an IPU works on one micro-batch, without concurrent stages."""
        return math.fsum(self.forward[i] + self.backward[i] + self.weight[i] for i in self.line.on[ipu])

    def joint_share(self) -> float:
        """Return how long each IPU works on the concurrent stages of one micro-batch."""
        return math.fsum([*self.joint_forward, *self.joint_backward, self.head])

    def round_trip(self, i: int) -> float:
        """Return the time of a micro-batch alone from the start of segment i's F to its last use."""
        after = range(i, len(self.line))
        return math.fsum(
            [self.forward[j] + self.backward[j] for j in after]
            + [self.joint_forward[j] + self.joint_backward[j] for j in after if j > i]
            + [self.head, self.weight[i]]
        )


def lower_bound(work: Work, transfer: float) -> float:
    """Return a time before which no run can end, under either clock: the longest of these times, over all IPUs.

    An IPU has none of its own work to do before its first F. Concurrent stages cannot run then either, because they
    need all IPUs. Then the IPU has all its own work to do. The backward pass of the segments before its own follows its
    last B. If B is not split, the last B is also its last task.

    An IPU cannot begin its first B before the first micro-batch comes back to it. Then it has all its B and W to do.
    """
    line, count = work.line, work.line.micro_batches
    concurrent = work.has_head or any(work.joint)
    joint_path = work.joint_share() if concurrent else 0.0
    hops = 0.0 if concurrent else transfer  # concurrent stages may run while a message is on its way
    way = [0.0]  # the time until segment i can begin its first F
    back = [0.0]  # the time from the end of segment i's last B to the end of the run, without W
    for i in range(len(line)):
        sends = i + 1 < len(line) and line.places[i] != line.places[i + 1]
        way.append(way[-1] + work.forward[i] + (hops if sends else 0.0))
        back.append(back[-1] + work.backward[i] + (hops if sends else 0.0))
    bounds = [way[-1] + back[-1] + joint_path, count * joint_path]
    for ipu, mine in line.on.items():
        joint = count * joint_path
        first_b = way[-1] + back[-1] - back[mine[-1] + 1]
        last_w = work.weight[0] if mine[0] > 0 else 0.0
        before_last = [work.forward[i] + work.backward[i] for i in mine]
        bounds += [
            way[mine[0]] + joint + count * work.share(ipu) + (0.0 if work.split else back[mine[0]]),
            way[mine[0]] + joint + count * math.fsum(before_last) + back[mine[0]] + last_w,
            first_b + count * math.fsum(work.backward[i] + work.weight[i] for i in mine),
        ]
    return max(bounds)


def _sum(costs: Sequence[float], stages: range) -> float:
    return math.fsum(costs[stage] for stage in stages)

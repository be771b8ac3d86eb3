"""Name the tasks of the staged scan in the compiled program, so that a profile shows which IPU ran which task when.

    jit(_run)/.../ipu_jax.plan.9f3c01d2.77ab10e4/while/body/closed_call/ipu_jax.F.2/while       F of segment class 2
                  ipu_jax.y.0/while                                                             an exchange of channel 0

A name contains the segment class, since one piece of program runs the tasks of all its micro-batches. The order of its
runs gives the tick, and the `PlanNames` of the program gives the micro-batch of each IPU in that tick.

Names are always present. They do not change the computation, and XLA leaves them out of the key of a compiled program.
So any program can be profiled without compiling another one.
"""

import dataclasses
import hashlib
import re
from typing import Any, Final

import numpy as np

from ipu_jax.core.engine.order import WORDS, Kind, Tick
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.programs.cost import bytes_of, jaxpr_flops
from ipu_jax.core.schedules import Schedule
from ipu_jax.core.stage import Role

Guard = tuple[Kind, int]  # the first two fields of an `Action`

UPDATE: Final = "ipu_jax.update"
"""The name of a training step's operations on its gradients."""

_GUARD = re.compile(rf"ipu_jax\.({'|'.join(WORDS)})\.(\d+)/while$")
_PLAN = re.compile(r"ipu_jax\.plan\.([0-9a-f]+)\.([0-9a-f]+)(?:/|$)")


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentNames:
    """Describe a segment for a profile: its first stage, the names of its stages, and its IPU or None."""

    first: int
    stages: tuple[str, ...]
    place: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class PlanNames:
    """Describe a plan for a profile.

    Attributes:
        schedule: when each stage runs.
        ipus: the number of IPUs of a replica.
        role, backward: as in `Plan`.
        segments: the segments, in order.
        classes: per segment class, the numbers of its segments.
        ticks: the number of ticks that the program runs.
        microbatches: per kind and number of a guard of a task or an exchange, in the order of a tick, an array (ticks,
            ipus): the micro-batch, or -1 where the guard is not active. For an exchange, 0 where it is active.
        tick, uniform: as in `Plan`.
        flops: per kind and number of a task's guard, the operations of one run.
        received: per kind and number of an exchange's guard, the bytes that each IPU receives, if any.
    """

    schedule: Schedule
    ipus: int
    role: Role
    backward: bool
    segments: tuple[SegmentNames, ...]
    classes: tuple[tuple[int, ...], ...]
    ticks: int
    microbatches: dict[Guard, np.ndarray]
    tick: Tick = dataclasses.field(default_factory=Tick)
    uniform: bool = False
    flops: dict[Guard, int] = dataclasses.field(default_factory=dict)
    received: dict[Guard, dict[int, int]] = dataclasses.field(default_factory=dict)

    def segment(self, c: int, ipu: int) -> SegmentNames:
        """Return the segment of a class that an IPU runs."""
        mine = (self.segments[i] for i in self.classes[c])
        return next(segment for segment in mine if segment.place in (None, ipu))


_plans: dict[str, PlanNames] = {}  # by both digests, and by the first alone


def label(kind: Kind, number: int) -> str:
    """Return the name of an action."""
    return f"ipu_jax.{kind}.{number}"


def of_plan(plan: Plan) -> str:
    """Return the name of a plan's scan, by which `plan_named` finds the plan in this process."""
    names = names_of(plan)
    about = (names.schedule.name, names.schedule.placement, plan.role, plan.backward, plan.classes, *names.microbatches)
    about += ("uniform",) if plan.uniform else ()
    # a program from an executable cache has the names of its first compilation, whose stages may have had other names
    structure = _digest(about, *plan.tables.values(), *names.microbatches.values())
    called = _digest(([segment.stages for segment in names.segments], names.flops, names.received))
    _plans[f"{structure}.{called}"] = _plans[structure] = names
    return f"ipu_jax.plan.{structure}.{called}"


def plan_named(name: str) -> PlanNames | None:
    """Return the plan of the scan that contains an operation of this name; None if no known scan does."""
    found = _PLAN.search(name)
    return None if found is None else _plans.get(f"{found[1]}.{found[2]}") or _plans.get(found[1])


def guard_named(name: str) -> Guard | None:
    """Return the kind and the number of the guard whose loop has this name, or None.

    >>> guard_named("jit(f)/ipu_jax.plan.01.23/while/body/closed_call/ipu_jax.FB.3/while")
    ('FB', 3)
    >>> guard_named("jit(f)/ipu_jax.F.3/while/body/while")  # a loop in a stage
    """
    found = _GUARD.search(name)
    kind: Kind = found[1] if found else "F"  # pyright: ignore[reportAssignmentType]
    return (kind, int(found[2])) if found else None


def names_of(plan: Plan) -> PlanNames:
    """Return the description of a plan."""
    ticks = plan.schedule.ticks if plan.backward else plan.schedule.forward_ticks
    segments = tuple(SegmentNames(s.first, tuple(stage.name for stage in s.stages), s.place) for s in plan.segments)
    microbatches: dict[Guard, np.ndarray] = {}
    flops: dict[Guard, int] = {}
    received: dict[Guard, dict[int, int]] = {}
    for kind, number, _ in plan.tick.actions:
        guard = kind, number
        if kind == "y" or kind == "dx":
            active = np.where(plan.exchanges[kind][:ticks, number], 0, -1)
            microbatches[guard] = np.repeat(active[:, None], plan.ipus, axis=1)
            channel = plan.channels[number]
            size = bytes_of(channel.carried(kind))
            received[guard] = {target if kind == "y" else source: size for source, target in channel.pairs}
        elif kind != "x" and kind != "dy":
            microbatches[guard] = plan.tables["F" if kind == "FB" else kind][:ticks, number]
            jaxprs = plan.programs[plan.classes[number][0]].jaxprs
            flops[guard] = sum(jaxpr_flops(jaxprs[letter]) for letter in kind)
    about = plan.schedule, plan.ipus, plan.role, plan.backward, segments, plan.classes
    return PlanNames(*about, ticks, microbatches, plan.tick, plan.uniform, flops, received)


def _digest(about: Any, *tables: np.ndarray) -> str:
    found = hashlib.sha256(repr(about).encode())
    for table in tables:
        found.update(repr(table.shape).encode() + table.tobytes())
    return found.hexdigest()[:12]

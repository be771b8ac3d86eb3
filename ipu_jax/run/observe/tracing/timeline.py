"""Hold what each IPU ran when, and its plan, as plain data: for pictures, reports and other programs.

IPU 0   0F0 | 0F1 | exchange y ...... | 0B0 | 0B1 | update        a Slice each, in seconds
IPU 1   exchange y ... | 1F0 | 1B0 | exchange dx | ...            a collective inside a task is a Slice in a Slice
"""

import dataclasses
import json
from collections.abc import Iterable
from typing import Final, Literal

from ipu_jax.base.annotations import Json
from ipu_jax.base.showing import counted
from ipu_jax.core.schedules import Schedule


class TraceError(RuntimeError):
    """Raised if nothing could be recorded, or if the recording does not fit the plan or cannot be written."""


Kind = Literal["F", "B", "W", "FB", "exchange", "collective", "update"]
TASKS: Final[tuple[Kind, ...]] = ("F", "B", "W", "FB")
WAITING: Final[tuple[Kind, ...]] = ("exchange", "collective")

_FORMAT: Final = "ipu_jax timeline 1"


@dataclasses.dataclass(frozen=True)
class Slice:
    """Hold a time in which an IPU did one thing.

    Attributes:
        instance, replica, ipu, step: where and in which step; in a plan, instance and replica are 0.
        kind: a task; an exchange with neighbours; another collective, possibly inside a task or an update; or the
            weight update, with the reduction of gradients over replicas.
        name: "2F0" as `Task` prints; "2-3F0" for a segment of several stages; "4F0 4B0" for a loss head, whose F and B
            are one task; "exchange y", "exchange dx", "all-reduce", "update".
        start, end: seconds from the beginning of the timeline.
        tick: of a task or an exchange, else None.
        stages: the stages that a task runs.
        microbatch: of a task, else None.
        flops: of a measured task, its operations by count; None in texts of versions that did not count them.
        received: of an exchange, the bytes that the IPU receives; None if it receives nothing.
    """

    instance: int
    replica: int
    ipu: int
    step: int
    kind: Kind
    name: str
    start: float
    end: float
    tick: int | None = None
    stages: tuple[int, ...] = ()
    microbatch: int | None = None
    flops: int | None = None
    received: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Step:
    """Hold when an IPU began and ended a step, in seconds; steps of one call follow one another without a gap."""

    instance: int
    replica: int
    ipu: int
    step: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Hold a few measured steps of a pipeline, and its plan beside each of them.

    Attributes:
        schedule: when each stage should run.
        stages: the names of the stages.
        backward: whether there were gradients; otherwise only F ran.
        steps: the steps of every IPU.
        slices: the measured slices, by IPU, in the order of their starts; a slice comes before the slices in it.
        plan: what each IPU of a replica would have done if each task had taken its median time and exchanges no time:
            per step, from the start of its first task.
        clocks: how the clocks of the instances were aligned.
        devices: of the group that is an IPU; the steps and slices are of its first one.
    """

    schedule: Schedule
    stages: tuple[str, ...]
    backward: bool
    steps: tuple[Step, ...]
    slices: tuple[Slice, ...]
    plan: tuple[Slice, ...] = ()
    clocks: str = "one clock"
    devices: int = 1

    def __repr__(self) -> str:
        steps, slices = counted(len({step.step for step in self.steps}), "step"), counted(len(self.slices), "slice")
        return f"Timeline({steps} of {counted(len(self.ipus), 'IPU')}, {slices}; {self.schedule.name}, {self.clocks})"

    @property
    def ipus(self) -> list[tuple[int, int]]:
        """Return `(replica, ipu)` of every IPU that was measured."""
        return sorted({(step.replica, step.ipu) for step in self.steps})

    @property
    def instances(self) -> list[int]:
        """Return the number of every instance that measured."""
        return sorted({step.instance for step in self.steps})

    def of_ipu(self, replica: int, ipu: int) -> list[Slice]:
        """Return the slices of one IPU."""
        return [one for one in self.slices if (one.replica, one.ipu) == (replica, ipu)]

    def to_json(self) -> str:
        """Return the timeline as JSON, which `from_json` reads."""
        values = {name: getattr(self, name) for name in ("stages", "backward", "clocks", "devices")}
        rows = {name: [*map(dataclasses.astuple, getattr(self, name))] for name in ("steps", "slices", "plan")}
        return json.dumps({"format": _FORMAT, "schedule": self.schedule.to_text(), **values, **rows})

    @classmethod
    def from_json(cls, text: str) -> "Timeline":
        """Return the timeline that a text of `to_json` describes.

        Raises:
            ValueError: the text does not come from `to_json`.
        """
        try:
            fields = json.loads(text)
            is_ours = fields["format"] == _FORMAT
        except (ValueError, TypeError, KeyError):
            is_ours, fields = False, {}
        if not is_ours:
            raise ValueError(f"text begins with {str(text)[:40]!r}: give what Timeline.to_json returned")
        return cls(
            Schedule.from_text(fields["schedule"]),
            tuple(fields["stages"]),
            fields["backward"],
            tuple(Step(*step) for step in fields["steps"]),
            _slices(fields["slices"]),
            _slices(fields["plan"]),
            fields["clocks"],
            fields.get("devices", 1),  # texts of versions without further axes have none
        )


def group_in_words(devices: int) -> str:
    """Return which devices a timeline leaves out; nothing if an IPU is one device.

    >>> group_in_words(2), group_in_words(1)
    ('; each IPU is 2 devices, shown by the first', '')
    """
    return f"; each IPU is {devices} devices, shown by the first" if devices > 1 else ""


def _slices(rows: Iterable[list[Json]]) -> tuple[Slice, ...]:
    # texts of earlier versions have shorter rows
    return tuple(Slice(*row[:9], tuple(row[9]), *row[10:]) for row in rows)  # pyright: ignore

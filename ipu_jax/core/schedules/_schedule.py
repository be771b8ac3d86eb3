"""Define schedules as plain data: the tick in which each stage runs F, B and W of each micro-batch.

Three stages on three IPUs, four micro-batches, schedule "grouped" (a cell is stage, F or B, micro-batch):

           ramp-up       main                                ramp-down
    tick   0        1    2        3        4        5        6        7
    IPU 0  0F0      0F1  0F2      0F3      0B0      0B1      0B2      0B3
    IPU 1           1F0  1F1      1F2 1B0  1F3 1B1  1B2      1B3
    IPU 2                2F0 2B0  2F1 2B1  2F2 2B2  2F3 2B3

F is the forward pass of a stage and B the backward pass. A schedule is two or three tables of ticks and a clock, which
defines the phases of a tick (see `_timetable`). If a schedule has W, the backward pass is split: B computes the
gradient of a stage's input, for which another IPU waits, and W the gradients of its weights, for which nobody waits. So
W fills ticks in which an IPU would otherwise be idle.

`make_schedule` (`_make`) returns the named schedules (`_families`). A table of your own also runs if it passes
`_validate`. `Schedule.from_text` reads a printed schedule, or a grid that you drew.
"""

import dataclasses
import os
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ipu_jax.base.checks import as_int, check_count
from ipu_jax.core.schedules._plot import figure_of
from ipu_jax.core.schedules._simulate import Cost, Simulation, simulate
from ipu_jax.core.schedules._text import draw, parse
from ipu_jax.core.schedules._timetable import (
    Kind,
    Placement,
    Rows,
    Task,
    Timetable,
    phase,
    segments_of,
    tables_of,
    tasks_of,
    tick_of,
)
from ipu_jax.core.schedules._torch_csv import from_torch_csv, to_torch_csv
from ipu_jax.core.schedules._validate import validate
from ipu_jax.core.schedules.figures import svg_of, written
from ipu_jax.core.schedules.lifetimes import Lifetimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Schedule(Timetable):
    """The tick of each task of a weight update. Immutable, and validated when it is made.

    Attributes:
        name, placement, ipus, forward, backward, weight, clock: as in `Timetable`.

    Raises:
        ValueError: the table is not valid; the message names the first wrong task, and says how to mend it.

    >>> from ipu_jax.core.schedules import make_schedule
    >>> schedule = make_schedule("grouped", ipus=2, gradient_accumulation=3)
    >>> print(schedule)
    grouped: 2 stages on 2 IPUs, 3 micro-batches, 5 ticks, bubble 25.0%
    stash: stage 0 holds 3, stage 1 holds 1
           ramp-up  main                         ramp-down
    tick   0        1        2        3        4
    IPU 0  0F0      0F1      0F2 0B0  0B1      0B2
    IPU 1           1F0 1B0  1F1 1B1  1F2 1B2
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", placement_of(self.placement))
        object.__setattr__(self, "ipus", check_count("ipus", self.ipus))
        for name in ("forward", "backward", "weight"):
            rows = getattr(self, name)
            if rows is not None or name != "weight":
                object.__setattr__(self, name, _rows_of(self.name, name, rows))
        validate(self)

    @property
    def micro_batches(self) -> int:
        """Return M, the number of micro-batches of a step."""
        return len(self.forward[0])

    @property
    def ticks(self) -> int:
        """Return the number of ticks in a step."""
        return 1 + max(max(map(max, rows)) for _, rows in tables_of(self))

    @property
    def forward_ticks(self) -> int:
        """Return the number of ticks in a forward-only run of this schedule."""
        return 1 + max(map(max, self.forward))

    @property
    def segments(self) -> tuple[range, ...]:
        """Return the stages of each segment: neighbours on one IPU, or concurrent neighbours; they share ticks."""
        return segments_of(self.placement)

    def phase(self, stage: int, kind: Kind) -> str:
        """Return the phase of the tick in which the stage's F, B or W runs."""
        return phase(self, stage, kind)

    def stash_depth(self, stage: int) -> int:
        """Return the largest number of micro-batches that a stage holds at once, each from its F until its last use.

        The last use is W, or B if the stage has no W. Micro-batch m uses slot m modulo depth.
        """
        return Lifetimes(self).stash(stage).depth()

    def weight_residual_depth(self, stage: int) -> int:
        """Return the largest number of micro-batches that a stage holds at once between B and W; 0 if it has no W."""
        return Lifetimes(self).weight_residuals(stage).depth()

    def inbox_depth(self, boundary: int, kind: Kind) -> int:
        """Return the largest number of messages that wait at once between two stages; 1 if no queue is needed.

        A message waits from the end of the phase in which it was made until the task that uses it. The message of
        micro-batch m uses slot m modulo depth.

        Args:
            boundary: between stage `boundary` and stage `boundary + 1`.
            kind: "F" for activations, "B" for their gradients.
        """
        return max(1, Lifetimes(self).inbox(boundary, kind).depth())

    @cached_property
    def _by_tick(self) -> dict[int, list[Task]]:
        by_tick: dict[int, list[Task]] = {}
        for task in tasks_of(self):
            by_tick.setdefault(tick_of(self, task), []).append(task)
        return by_tick

    def tasks(self, tick: int) -> list[Task]:
        """Return the tasks of a tick, in the order of the clock."""
        return list(self._by_tick.get(tick, []))

    def order(self, ipu: int) -> list[Task]:
        """Return the tasks of an IPU, including concurrent ones, in the order in which it runs them."""
        return tasks_of(self, [stage for stage, place in enumerate(self.placement) if place in (None, ipu)])

    def simulate(
        self,
        forward: Cost = 1.0,
        backward: Cost = 2.0,
        weight: Cost | None = None,
        transfer: float = 0.0,
        *,
        lockstep: bool = False,
    ) -> Simulation:
        """Simulate a run in which tasks take time.

        Each IPU runs its tasks in order, each as soon as its inputs have arrived.

        Args:
            forward: the cost of F. A number is the cost of an IPU's whole share of the model, which is divided evenly
                among its local stages, and the cost of each concurrent stage. A sequence contains a cost per stage. The
                cost of a concurrent stage is divided evenly among the IPUs.
            backward: the same for the cost of the whole backward pass.
            weight: the same for W's part of `backward`, if the schedule has W. Default: half of `backward`.
            transfer: the time that a message takes from one IPU to another, or to all of them.
            lockstep: whether all IPUs also wait for each other at the end of each tick in which one sends to another.
                Under the one-phase clock such a tick is longer by `transfer`: the next tick needs its messages. Under
                the two-phase clock they travel while the next tasks run. A concurrent stage begins with the broadcast
                of its message, which takes `transfer`.

        Returns:
            A `Simulation`: makespan, bubble, and peak stash and busy time per IPU. `_simulate` lists the closed forms.

        Raises:
            ValueError: a cost is not a finite number of at least 0, a sequence does not contain a cost per stage, or
                `weight` is above `backward`.

        >>> from ipu_jax.core.schedules import make_schedule
        >>> zbv = make_schedule("zbv", ipus=4, gradient_accumulation=8).simulate(forward=1, backward=2)
        >>> zbv.makespan, round(zbv.bubble, 4), zbv.peak_stash
        (25.5, 0.0588, (8, 8, 8, 8))
        """
        return simulate(self, forward, backward, weight, transfer, lockstep=lockstep)

    def bubble(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Return the idle share of the IPUs' time if F of each stage costs `forward` and B costs `backward`.

        The cost of a concurrent stage is divided among the IPUs. Under the two-phase clock IPUs wait for each other
        where one sends to another. For S local stages on S IPUs, "grouped" gives (S-1)/(M+S-1) and "sequential" gives
        1-1/S.
        """
        return self._usual(forward, backward).bubble

    def _usual(self, forward: float = 1.0, backward: float = 2.0) -> Simulation:
        stages = len(self.placement)
        return self.simulate([forward] * stages, [backward] * stages, lockstep=self.clock == "two-phase")

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Return the schedule that a text draws: the text of `str(schedule)`, or a grid of your own.

        A grid needs a row per IPU. Its cells are aligned with the numbers of a line "tick", or are separated by "|" or
        by two or more blanks, with "." for a tick in which the IPU is idle. A stage is on the IPU in whose row it
        appears; a stage that appears in all rows is concurrent. Without a header the name is "custom", and the clock is
        "one-phase" unless an IPU runs more than one segment in a tick.

        Raises:
            ValueError: the text is not such a drawing, or the schedule that it draws is not valid.

        >>> schedule = Schedule.from_text('''
        ...     IPU 0 | 0F0 |     | 0B0 | 0F1 |     | 0B1
        ...     IPU 1 |     | 1F0 | 1B0 |     | 1F1 | 1B1
        ... ''')
        Traceback (most recent call last):
        ...
        ValueError: schedule 'custom': IPU 0, tick 2, 0B0: it needs 1B0, which runs in tick 2, and a message between \
IPUs takes until the next tick: move it to tick 3 or later
        >>> schedule = Schedule.from_text('''
        ...     IPU 0  0F0  0F1  .    0B0  .    0B1
        ...     IPU 1  .    1F0  1B0  1F1  1B1  .
        ... ''')
        >>> schedule.placement, schedule.clock, schedule.inbox_depth(0, "F")
        ((0, 1), 'one-phase', 1)
        >>> Schedule.from_text(str(schedule)) == schedule
        True
        """
        if not isinstance(text, str):
            raise ValueError(f"text={text!r} is not a string: give what str(schedule) gives, or a grid of your own")
        return cls(**vars(parse(text)))

    @classmethod
    def from_torch_csv(cls, text: str, name: str = "custom") -> "Schedule":
        """Return the schedule that a CSV of `torch.distributed.pipelining` describes, in its "compute_only" format.

        Each IPU does the tasks of its row in order, each task in the earliest tick in which its inputs have arrived.
        Neighbouring stages in one row run as one segment.

        Raises:
            ValueError: a cell is not an action, a stage is in no row or in two, a task is missing or occurs twice, or
                the rows wait for each other for ever.

        >>> schedule = Schedule.from_torch_csv("0F0,0F1,,0B0,,0B1\\n,1F0,1B0,1F1,1B1")
        >>> schedule.placement, schedule.backward
        ((0, 1), ((3, 5), (2, 4)))
        """
        if not isinstance(text, str):
            raise ValueError(f"text={text!r} is not a string: give the contents of a CSV file")
        return cls(**vars(from_torch_csv(text, name)))

    def to_torch_csv(self) -> str:
        """Return the schedule as a CSV that `torch.distributed.pipelining` loads as "compute_only", a row per IPU.

        Raises:
            ValueError: the schedule has a concurrent stage, which torch does not know.

        >>> from ipu_jax.core.schedules import make_schedule
        >>> print(make_schedule("zb-h1", ipus=2, gradient_accumulation=1).to_torch_csv(), end="")
        0F0,0I0,0W0
        1F0,1I0,1W0
        """
        return to_torch_csv(self)

    def to_text(self) -> str:
        """Return the schedule as text: one row per IPU, one column per tick. `from_text` reads it back."""
        return draw(self, self.bubble())

    def __str__(self) -> str:
        return self.to_text()

    def plot(self, path: str | os.PathLike[str] | None = None, *, simulation: Simulation | None = None) -> "Figure":
        """Draw the schedule with a row per IPU, which shows its tasks by tick or by time.

        The picture names ramp-up, main, ramp-down and the weight update, and is as wide as a page. Cells contain the
        numbers of their micro-batches. If cells are too small for numbers, a few micro-batches are dark. A notebook
        shows a schedule, and the figure that this method returns, as this picture.

        Args:
            path: the SVG, PNG or PDF file to write, chosen by its suffix. None writes nothing. An existing file is
                replaced once the new file is complete.
            simulation: the result of `simulate` for this schedule. Each task is then as wide as its time. Default: the
                planned ticks; or, if these would not show the bubble, the times from which `bubble()` has it.

        Returns:
            A matplotlib figure. matplotlib is the extra `plots`.

        Raises:
            ValueError: `path` has another suffix, `simulation` is not of this schedule, or the schedule is too large to
                draw.
            ImportError: matplotlib is missing.
            OSError: the file cannot be written. An existing file is unchanged.

        >>> from ipu_jax.core.schedules import make_schedule
        >>> schedule = make_schedule("1f1b", ipus=4, gradient_accumulation=8)
        >>> schedule.plot("1f1b.gif")
        Traceback (most recent call last):
        ...
        ValueError: path='1f1b.gif' does not end in .svg, .png or .pdf: give such a name, or save the figure that \
plot() returns
        """
        return written(path, lambda: figure_of(self, simulation, self._usual))

    def to_svg(self, *, simulation: Simulation | None = None) -> str:
        """Return the picture that `plot` draws as the text of an SVG file.

        The text needs no other file, and can be part of an HTML page as it is. The same schedule gives the same text.

        Args:
            simulation: as for `plot`.

        Raises:
            ValueError: `simulation` is not of this schedule, or the schedule is too large to draw.
            ImportError: matplotlib, the extra `plots`, is missing.

        >>> from ipu_jax.core.schedules import make_schedule
        >>> schedule = make_schedule("1f1b", ipus=4, gradient_accumulation=8)
        >>> svg = schedule.to_svg(simulation=schedule.simulate(forward=1, backward=2, transfer=0.1))
        """
        return svg_of(figure_of(self, simulation, self._usual))

    def _repr_svg_(self) -> str | None:
        """Return the picture that a notebook shows. If it cannot be drawn, return None, and the text is shown."""
        try:
            return self.to_svg()
        except (ImportError, ValueError):
            return None


def placement_of(placement: Any) -> Placement:
    if isinstance(placement, str) or not isinstance(placement, Iterable):
        raise ValueError(
            f"placement={placement!r} is not a placement: give the IPU of each stage, or None, as in (0, 1, None)"
        )
    ipus = []
    for stage, ipu in enumerate(placement):
        ipus.append(None if ipu is None else as_int(ipu))
        if ipu is not None and ipus[-1] is None:
            raise ValueError(f"stage {stage} is on IPU {ipu!r}: give an int, or None for a concurrent stage")
    return tuple(ipus)


def _rows_of(schedule: str, name: str, rows: Any) -> Rows:
    is_table = isinstance(rows, Iterable) and not isinstance(rows, str)
    return tuple(
        _row_of(schedule, name, rows, *stage_and_row) for stage_and_row in enumerate(rows if is_table else [None])
    )


def _row_of(schedule: str, name: str, rows: Any, stage: int, row: Any) -> tuple[int, ...]:
    if not isinstance(row, Iterable):
        raise ValueError(
            f"schedule {schedule!r}: the {name} table is {rows!r}: give a row of ticks per stage, one per micro-batch"
        )
    cells = tuple(row)
    if set(map(type, cells)) <= {int}:
        return cells
    for m, tick in enumerate(cells):
        if as_int(tick) is None:
            task = Task(stage, _LETTERS[name], m)
            raise ValueError(f"schedule {schedule!r}: {task} is in tick {tick!r}: give an int of at least 0")
    return tuple(map(int, cells))


_LETTERS: dict[str, Kind] = {"forward": "F", "backward": "B", "weight": "W"}

"""Choose the schedule of a pipeline: the one that is given, or under "auto" the best one for the shapes of a step."""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Sequence

import jax

from ipu_jax.base.annotations import Function, Json
from ipu_jax.core.analysis.report import PipelineReport, count_report
from ipu_jax.core.analysis.stage_costs import TracedStages, transfer_time
from ipu_jax.core.engine.plan import Plan, make_plan, trace_programs
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.programs.cost import bytes_of, in_units
from ipu_jax.core.programs.prices import Prices
from ipu_jax.core.programs.segment import segments_of
from ipu_jax.core.schedules import FoundSchedule, Schedule, StageCosts, canonical_name, find_schedule, make_schedule
from ipu_jax.core.stage import Role, Stage
from ipu_jax.core.step_args import StepArgs

_ROUNDS = 4  # of searches with less and less room, while the result does not fit


class StepShapes:
    """The shapes of one step on one replica. Its methods trace stages, and need the mesh axes, as in a `shard_map`.

    Args:
        args: the arguments of one replica, leaves of the batch are (M, ...): arrays, tracers or `jax.ShapeDtypeStruct`.
        params: the layout of the weights, in which frozen leaves get no gradient.
        platform, prices: of the IPUs.
        uniform: whether guards are uniform, as in `Plan`.
        exact: as in `Segment`.
    """

    def __init__(
        self, args: StepArgs, params: PackedLayout, platform: str, prices: Prices, *, uniform: bool, exact: bool
    ):
        self.params, self.state, self.batch = params, args.state.layout, args.batch
        self.platform, self._prices, self._uniform, self._exact = platform, prices, uniform, exact
        self._microbatch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), args.batch)
        self._key = None if args.key is None else jax.ShapeDtypeStruct(args.key.shape, args.key.dtype)

    @property
    def micro_batches(self) -> int:
        return jax.tree.leaves(self.batch)[0].shape[0]

    def plan(
        self, stages: tuple[Stage, ...], schedule: Schedule, *, role: Role = "training", backward: bool = True
    ) -> Plan:
        """Return the plan of the step under a schedule."""
        segments = segments_of(stages, schedule, role, prices=self._prices, backward=backward, exact=self._exact)
        return make_plan(
            segments,
            schedule,
            self.params,
            self.state,
            self._microbatch,
            key=self._key,
            platform=self.platform,
            uniform=self._uniform,
        )

    def report(self, stages: tuple[Stage, ...], schedule: Schedule) -> PipelineReport:
        """Return the report of the step under a schedule. Temporary bytes are predicted."""
        return count_report(self.plan(stages, schedule), bytes_of(self.batch))

    def trace(self, stages: tuple[Stage, ...]) -> TracedStages:
        """Return the traced programs of the stages, whose costs can be counted and measured."""
        placement = tuple(stage.place for stage in stages)
        # all schedules divide the same stages into the same segments
        any_schedule = make_schedule(
            "sequential", gradient_accumulation=self.micro_batches, ipus=self.params.ipus, placement=placement
        )
        segments = segments_of(stages, any_schedule, prices=self._prices, exact=self._exact)
        split = [segment.place is not None for segment in segments]
        programs = trace_programs(segments, split, self.params, self.state, self._microbatch, self._key)
        return TracedStages(segments, programs, self.params.ipus, self.platform)


@dataclasses.dataclass(frozen=True)
class ScheduleChoice:
    """Make or find the schedule of a pipeline.

    Attributes:
        stages: the model.
        ipus: IPUs of a replica.
        micro_batches: M.
        ipu_memory: the bytes that an IPU can hold, which no schedule that is found exceeds, or None.
    """

    stages: tuple[Stage, ...]
    ipus: int
    micro_batches: int
    ipu_memory: float | None

    @property
    def _placement(self) -> tuple[int | None, ...]:
        return tuple(stage.place for stage in self.stages)

    def of(self, given: str | Schedule) -> Schedule | None:
        """Return the schedule that a user gives, or None for "auto".

        Raises:
            ValueError: the name is unknown, the schedule is made for other stages, or it runs F of a stage with state
                out of order.
        """
        if not isinstance(given, Schedule) and canonical_name(given) == "auto":
            return None
        return self._in_order(self._fitting(given) if isinstance(given, Schedule) else self.named(given))

    def find(self, shapes: StepShapes, costs: StageCosts | None = None) -> FoundSchedule:
        """Return the schedule that takes the least time for these shapes.

        Args:
            shapes: the shapes of a step.
            costs: the costs to use instead of counted FLOPs. If they have no bytes, the bytes are counted. On chips a
                message takes time, too, if the costs say their unit.

        Raises:
            ValueError: `costs` are for other stages, or no schedule fits in `ipu_memory`.
        """
        traced = shapes.trace(self.stages)
        sizes = (costs.stash, costs.weight_residuals) if isinstance(costs, StageCosts) else ()
        if costs is None or (sizes and not any(itertools.chain(*filter(None, sizes)))):
            counted = traced.counted()
            if costs is None:
                costs = counted
            elif len(costs) == len(counted):  # others are refused by the search
                costs = dataclasses.replace(costs, stash=counted.stash, weight_residuals=counted.weight_residuals)
        unit = costs.unit if isinstance(costs, StageCosts) else None
        transfer = transfer_time(traced, unit)

        def search(stash_limit: list[float] | None) -> FoundSchedule:
            return find_schedule(
                costs,
                placement=self._placement,
                gradient_accumulation=self.micro_batches,
                ipus=self.ipus,
                transfer=transfer,
                lockstep=True,  # the engine's IPUs wait for each other at each exchange
                stash_limit=stash_limit,
            )

        found = search(None) if self.ipu_memory is None else self._search_within(search, costs, shapes)
        self._in_order(found.schedule)
        return found

    def _search_within(self, search: Function, costs: StageCosts, shapes: StepShapes) -> FoundSchedule:
        """Find a schedule whose report fits in `ipu_memory`.

        The limit of a search bounds the stash of each IPU. The engine's buffers may be larger: per dtype, they are as
        long as on the IPU that needs the most, and they also hold waiting messages. So the result is checked, and the
        search is repeated with less room if the result does not fit.
        """
        memory = self.ipu_memory
        assert memory is not None, "the caller checked it"
        least = self.named("sequential")
        smallest = shapes.report(self.stages, least)
        if _largest(smallest) > memory:
            worst = max(range(self.ipus), key=smallest.total)
            kinds = ", ".join(f"{kind} {in_units(size, 'B')}" for kind, size in smallest.bytes_by_kind(worst).items())
            raise ValueError(
                f"ipu_memory={memory:g} is too low for any schedule: under 'sequential', which stashes the least, IPU "
                f"{worst} needs {smallest.total(worst)} bytes ({kinds}): give at least that, or use recompute='all' on "
                "its stages, more IPUs, or a smaller micro-batch"
            )
        floor = costs.stash_bytes(least)
        room = [memory - smallest.total(k) + smallest.stash for k in range(self.ipus)]
        for _ in range(_ROUNDS):
            found = search([max(limit, low) for limit, low in zip(room, floor, strict=True)])
            excess = _largest(shapes.report(self.stages, found.schedule)) - memory
            if excess <= 0:
                return found
            room = [limit - excess for limit in room]
        found = search(list(floor))
        fitting = (
            candidate
            for candidate in found.candidates
            if candidate.fits and _largest(shapes.report(self.stages, candidate.schedule)) <= memory
        )
        best = next(fitting)  # "sequential" fits
        return dataclasses.replace(found, schedule=best.schedule, makespan=best.makespan)

    def named(self, name: str, micro_batches: int | None = None) -> Schedule:
        """Return the schedule of this name for these stages, or for another M."""
        m = self.micro_batches if micro_batches is None else micro_batches
        return make_schedule(name, gradient_accumulation=m, ipus=self.ipus, placement=self._placement)

    def _fitting(self, schedule: Schedule) -> Schedule:
        m = self.micro_batches
        if (schedule.placement, schedule.ipus, schedule.micro_batches) != (self._placement, self.ipus, m):
            raise ValueError(
                f"schedule {schedule.name!r} places {schedule.placement} on {schedule.ipus} IPUs with "
                f"{schedule.micro_batches} micro-batches, but the stages stand on {self._placement}, the mesh has "
                f"{self.ipus} IPUs and gradient_accumulation={m}: make the schedule for these"
            )
        return schedule

    def _in_order(self, schedule: Schedule) -> Schedule:
        for stage, forward in zip(self.stages, schedule.forward, strict=True):
            if stage.state is not None and list(forward) != sorted(forward):
                raise ValueError(
                    f"schedule {schedule.name!r} runs F of stage {stage.name!r} out of the micro-batches' order, "
                    "but its state is updated in order: run them in order, or hold no state in it"
                )
        return schedule


def warn_of_messages(schedule: Schedule, platform: str, *, stacklevel: int) -> None:
    """Warn if "grouped" leaves chips less idle than a schedule of the one-phase clock, at F = 1 and B = 2."""
    if platform == "cpu" or schedule.clock == "two-phase":
        return
    where: Json = {
        "ipus": schedule.ipus,
        "placement": schedule.placement,
        "gradient_accumulation": schedule.micro_batches,
    }
    one, two = (other.simulate(lockstep=True) for other in (schedule, make_schedule("grouped", **where)))
    if two.bubble < one.bubble - 1e-9:
        ipu = max(range(schedule.ipus), key=two.peak_stash.__getitem__)
        warnings.warn(
            f"schedule {schedule.name!r} on {platform}: IPUs wait for each other wherever one sends, and little hides "
            f"the time of a message. If B takes twice as long as F and messages take no time, IPUs are idle for "
            f"{one.bubble:.1%} of a step; under 'grouped', which hides messages, for {two.bubble:.1%}, with "
            f"{two.peak_stash[ipu]} instead of {one.peak_stash[ipu]} micro-batches stashed on IPU {ipu}: use "
            "schedule='grouped' if that fits, or schedule='auto'",
            stacklevel=stacklevel,
        )


@contextlib.contextmanager
def silent_about_messages() -> Iterator[None]:
    """Leave out what `warn_of_messages` would say in this context."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "schedule .* IPUs wait for each other", UserWarning)
        yield


def _largest(report: PipelineReport) -> int:
    return max(report.total(part.ipu) for part in report.ipus)


def places_of_stages(schedule: str | Schedule, ipus: int, rounds: int) -> Sequence[int | None]:
    """Return the IPU of each stage that a schedule has."""
    if isinstance(schedule, Schedule):
        return schedule.placement
    family = "sequential" if canonical_name(schedule) == "auto" else schedule
    return make_schedule(family, ipus=ipus, gradient_accumulation=1, rounds=rounds).placement

"""Say what a step of a pipeline needs, before one is run: its memory, its program, the costs of its stages."""

from typing import Any

import jax
from jax.sharding import Mesh

from ipu_jax.base.annotations import Batch
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.core.analysis.report import MemoryGuard, PipelineReport, check_ipu_memory, make_report
from ipu_jax.core.analysis.stage_costs import check_measurable
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.devices import check_there
from ipu_jax.core.pipeline._programs import Programs
from ipu_jax.core.pipeline.placed_stages import PlacedStages
from ipu_jax.core.schedules import FoundSchedule, StageCosts
from ipu_jax.core.stage import Stage
from ipu_jax.core.step_args import StepArgs


@public_on_mesh
class Foreseen:
    """The methods of `Pipeline` that make no step: they trace, count, compile, or measure stages alone."""

    stages: tuple[Stage, ...]
    mesh: Mesh
    placement: PlacedStages
    _memory: MemoryGuard
    _programs: Programs

    def report(
        self,
        params: Sharded,
        batch: Batch,
        state: Sharded | None = None,
        key: jax.Array | None = None,
        *,
        compile: bool = True,
        ipu_memory: float | None = None,
    ) -> PipelineReport:
        """Report what a step needs on each IPU: bytes by kind, FLOPs, bytes sent, and its idle share. Nothing is run.

        Args:
            params: from `shard`, or `jax.eval_shape(lambda p: p, params)`.
            batch, state, key: as for `value_and_grad`, or with `jax.ShapeDtypeStruct` in place of arrays.
            compile: whether to compile the step for the temporary bytes that XLA reports. Otherwise they are predicted.
            ipu_memory: the memory of an IPU in bytes; a `UserWarning` says what does not fit. Default: the pipeline's
                own value.

        Raises:
            ValueError: `value_and_grad` would refuse the arguments, or `ipu_memory` is not above 0.

        >>> import jax.numpy as jnp
        >>> from ipu_jax import Pipeline
        >>> stage = lambda w, x, mb: jnp.mean((mb @ w) ** 2)
        >>> pipeline = Pipeline([Stage(stage, params="w", ipu=0)], gradient_accumulation=2)
        >>> params = pipeline.shard({"w": jnp.ones((3, 1))})
        >>> pipeline.report(params, jax.ShapeDtypeStruct((2, 4, 3), "float32"), compile=False).ipus[0].weights
        12
        """
        given, placed, lowered = StepArgs(params, batch, state, key), self.placement, None
        placed.check(given)
        limit = self._memory.ipu_memory if ipu_memory is None else ipu_memory
        check_ipu_memory(limit)
        if compile:
            placed = self.placement.chosen(self._programs.update, given)
            lowered = placed.lowered(self._programs.update, given)
        return make_report(placed.plan(*given), batch, mesh=self.mesh, lowered=lowered, ipu_memory=limit)

    def lower(self, params: Sharded, batch: Batch, state: Sharded | None = None, key: jax.Array | None = None) -> Any:
        """Return the program of `value_and_grad`, lowered but not run. Compile it to see its memory and its HLO.

        On a mesh with further axes it is compiled here, too, to choose `guards`.

        Args:
            params: from `shard` or `shard_shapes`.
            batch, state, key: as for `value_and_grad`, or with `jax.ShapeDtypeStruct` in place of arrays. A batch whose
                leaves don't say where they are is split over the replicas.

        Raises:
            ValueError: `value_and_grad` would refuse the arguments.
        """
        return self.lowered(StepArgs(params, batch, state, key))[1]

    def lowered(self, given: StepArgs) -> tuple[PlacedStages, Any]:
        """Return the stages as they run with these arguments, and their program, lowered."""
        self.placement.check(given)
        placed = self.placement.chosen(self._programs.update, given, runs=False)
        return placed, placed.lowered(self._programs.update, given)

    def choose_schedule(
        self,
        params: Sharded,
        batch: Batch,
        state: Sharded | None = None,
        key: jax.Array | None = None,
        *,
        costs: StageCosts | None = None,
    ) -> FoundSchedule:
        """Return the schedule that a pipeline with schedule="auto" takes for these shapes. The result can be printed.

        With other costs, `pipeline.replace(schedule=found.schedule)` takes what was found.

        Args:
            params, batch, state, key: as for `report`.
            costs: for example from `stage_costs`, the same on every instance. Default: FLOPs. If they contain no bytes,
                the bytes of the stash are counted. On chips messages take time, too, if the costs say their unit.

        Returns:
            The result of `find_schedule`.

        Raises:
            ValueError: the schedule was given; `value_and_grad` would refuse the arguments; or no schedule fits in
                `ipu_memory`.
        """
        given, placed = StepArgs(params, batch, state, key), self.placement
        if placed.schedule is not None:
            raise ValueError(
                f"the schedule is {placed.schedule.name!r}, which was given: make the Pipeline with schedule='auto' to "
                "choose one"
            )
        placed.check(given)
        return placed.found(given, costs)

    def stage_costs(
        self,
        params: Sharded,
        batch: Batch,
        state: Sharded | None = None,
        key: jax.Array | None = None,
        *,
        measured: bool = False,
        repeats: int = 5,
    ) -> StageCosts:
        """Return the costs of F, B and W of each stage for one micro-batch, and the bytes that they stash.

        Costs are FLOPs, or if `measured` the median seconds of F, B, W and the whole backward pass, each run alone on
        the IPUs of its stage. Measured programs do not accumulate gradients, and times include their start. Stages that
        run as one segment share its cost evenly. Across several instances, all of them must measure at the same time,
        and get the same costs.

        Args:
            params, batch, state, key: as for `report`. Only their shapes are used.
            measured: whether to measure. Then no argument may be traced by `jax.jit`.
            repeats: runs of each program, after one run that compiles it; fewer if they take more than 10 seconds.

        Raises:
            ValueError: as in `value_and_grad`, or an argument is a tracer when costs are to be measured.
        """
        given = StepArgs(params, batch, state, key)
        self.placement.check(given)
        check_measurable(given, measured, repeats)
        if measured:
            check_there(self.mesh, "measured=True", "measured=False, which counts FLOPs")
        stages = self.placement.of_batch(batch).stages
        traced = self.placement.traced(lambda shapes: shapes.trace(stages), given)
        return traced.measured(self.mesh, repeats) if measured else traced.counted()

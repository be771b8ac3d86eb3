"""Place stages on the IPUs of a mesh: weights and state, the program of one IPU, the needs and costs of a step."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from ipu_jax.base import facts
from ipu_jax.base.doors import public_on_mesh
from ipu_jax.base.jaxprs import traced_on
from ipu_jax.core.analysis.report import MemoryGuard, PipelineReport, lowered, make_report
from ipu_jax.core.analysis.schedule_choice import ScheduleChoice, StepShapes, warn_of_messages
from ipu_jax.core.analysis.stage_costs import check_measurable
from ipu_jax.core.cutting.function import FunctionModel
from ipu_jax.core.devices import IPU_AXIS, REPLICA_AXIS, InFlight, check_there, devices_of, make_mesh
from ipu_jax.core.engine import scan as engine
from ipu_jax.core.engine.on_mesh import run_on_mesh
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh_axes import further_axes
from ipu_jax.core.optimizer.pipeline_optimizer import PipelineOptimizer
from ipu_jax.core.options import PipelineOptions, Reduction
from ipu_jax.core.pipeline._guards import GuardChoice, Guards
from ipu_jax.core.schedules import FoundSchedule, Schedule, StageCosts
from ipu_jax.core.stage import Role, Stage, check_untied
from ipu_jax.core.weights import packing
from ipu_jax.core.weights.arguments import (
    check_alive,
    check_batch,
    check_key,
    check_mesh,
    check_places,
    check_predict_axes,
    check_prediction_batch,
    check_reducible,
    checked_stages,
)
from ipu_jax.core.weights.groups import Groups
from ipu_jax.core.weights.packed_layout import PackedLayout
from ipu_jax.core.weights.packing import Sharded


@public_on_mesh
class PlacedStages:
    """The abstract base of `Pipeline`: everything that does not run a step."""

    def __init__(
        self,
        stages: Iterable[Stage],
        *,
        mesh: Mesh | None = None,
        schedule: str | Schedule = "grouped",
        gradient_accumulation: int | None = None,
        reduction: Reduction | None = None,
        specs: Mapping[str, Any] | None = None,
        state_specs: Mapping[str, Any] | None = None,
        frozen: Mapping[str, Any] | None = None,
        ipu_memory: float | None = None,
        guards: Guards = "auto",
        function: FunctionModel | None = None,
    ):
        self.stages, self.function = checked_stages(stages), function
        check_untied(self.stages)
        if gradient_accumulation is None and isinstance(schedule, Schedule):
            gradient_accumulation = schedule.micro_batches
        self.given = {"gradient_accumulation": gradient_accumulation, "reduction": reduction}
        self.options = PipelineOptions(**{name: value for name, value in self.given.items() if value is not None})
        placement = tuple(stage.place for stage in self.stages)
        self.mesh = make_mesh(1, 1 + max((p for p in placement if p is not None), default=0)) if mesh is None else mesh
        check_mesh(self.mesh)
        self.given_devices = devices_of(self.mesh)
        self.replicas, self.ipus = self.mesh.shape[REPLICA_AXIS], self.mesh.shape[IPU_AXIS]
        check_places(self.stages, self.ipus)
        check_predict_axes(self.stages, further_axes(self.mesh))
        check_reducible(self.stages, self.mesh)
        trees = {} if function is None else {"whole": function.weights, "whole_state": function.state}
        self._groups = Groups(
            self.stages,
            self.ipus,
            further_axes(self.mesh),
            specs=specs,
            state_specs=state_specs,
            frozen=frozen,
            **trees,
        )
        self._choice = ScheduleChoice(
            schedule,
            self.stages,
            ipus=self.ipus,
            micro_batches=self.options.gradient_accumulation,
            ipu_memory=ipu_memory,
        )
        self._asked_for = schedule
        if self.schedule_or_name != "auto":
            warn_of_messages(self.schedule, self.platform, stacklevel=4)
        self._window = InFlight()
        self._memory, self.guards = MemoryGuard(ipu_memory), GuardChoice(guards, self.mesh)
        # jitted once, so that all calls with the same shapes run the same program
        self._value_and_grad = jax.jit(self._update)
        for listener in facts.listeners():
            listener.mesh(self.mesh, [(stage.name, stage.place) for stage in self.stages])

    @property
    def platform(self) -> str:
        """Return the platform of the IPUs, such as "cpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def schedule(self) -> Schedule:
        """Return the schedule. Under "auto", raise a `ValueError` if none has been found yet."""
        return self._choice.schedule

    @property
    def schedule_or_name(self) -> Schedule | str:
        """Return the schedule, or "auto" if none has been found yet."""
        return self._choice.schedule_or_name

    @facts.during("placing weights")
    def shard(self, params: Any) -> Sharded:
        """Place whole weights on the IPUs.

        Each IPU gets the weights of its own stages and its own shard of the concurrent groups. Communicates from host
        to device only.

        Args:
            params: whole weights, floating arrays (jax or numpy), in `{group: pytree}`; of a function that was cut, in
                its own tree. A leaf of a concurrent group has its whole shape, without padding.

        Returns:
            A `Sharded`, a pytree of `jax.Array`. `value_and_grad` takes it, and returns gradients in the same form.
            Its arrays are packed: `Sharded` says which optimizers are right on them.

        Raises:
            ValueError: a group is missing or unknown, a leaf is not a floating array, a spec does not fit, or the
                devices are only described.
        """
        check_there(self.mesh, "shard", "shard_shapes(params)")
        return packing.shard_tree(params, self._groups.layout(params), self.mesh)

    def shard_shapes(self, params: Any) -> Sharded:
        """Return the result of `shard` with `jax.ShapeDtypeStruct`s in place of arrays, for `import_weights(like=)`.

        Args:
            params: as for `shard`, whole arrays or their shapes, for example from `jax.eval_shape(init, key)`.

        Raises:
            ValueError: as in `shard`.
        """
        return packing.shapes_on(self._groups.layout(params), self.mesh)

    def shard_state_shapes(self, state: Any) -> Sharded:
        """Return the result of `shard_state` with `jax.ShapeDtypeStruct`s in place of arrays."""
        return packing.shapes_on(self._groups.state_layout(state), self.mesh)

    def shard_state(self, state: Any) -> Sharded:
        """Place `{group: pytree of state}` on the IPUs, as `shard` places weights. Leaves can have any dtype.

        Raises:
            ValueError: a group is missing or unknown, a leaf is not an array, a spec does not fit, or the devices are
                only described.
        """
        check_there(self.mesh, "shard_state", "shard_state_shapes(state)")
        return packing.shard_tree(state, self._groups.state_layout(state), self.mesh)

    def optimizer(self, transformation: optax.GradientTransformation) -> PipelineOptimizer:
        """Return an optax transformation as an optimizer of this pipeline's weights, for a custom training loop.

        On a `Sharded`, optax's own functions would see packed arrays. Here they see `{group: pytree}`.

        Args:
            transformation: any `optax.GradientTransformation`, or `optax.MultiSteps`, that does not call the loss
                function itself.

        Raises:
            ValueError: it is neither, such as `optax.adam` without its arguments; or its update needs a function that
                computes the loss, as in lbfgs, or the gradients of each example, as in dpsgd.

        >>> import jax.numpy as jnp, optax
        >>> from ipu_jax import Pipeline
        >>> stage = lambda w, x, mb: jnp.mean((mb @ w) ** 2)
        >>> pipeline = Pipeline([Stage(stage, params="w", ipu=0)], gradient_accumulation=2)
        >>> params, optimizer = pipeline.shard({"w": jnp.ones((3, 1))}), pipeline.optimizer(optax.lamb(0.5))
        >>> loss, gradients = pipeline.value_and_grad(params, jnp.ones((2, 4, 3)))
        >>> params, state = optimizer.apply(gradients, optimizer.init(params), params)
        >>> pipeline.unshard(params)["w"].round(4).tolist()
        [[0.5], [0.5], [0.5]]
        """
        return PipelineOptimizer(self, self._groups, transformation)

    @facts.during("gathering weights")
    def unshard(self, sharded: Sharded) -> Any:
        """Return the tree of parameters, gradients or state, whole and unpadded: the inverse of `shard`.

        Each instance gets the whole tree, on its default device. If a replica is on several instances, all of them must
        call this, since it communicates one all-gather per array that is split over them.
        """
        if not isinstance(sharded, Sharded):
            raise ValueError(f"sharded is a {type(sharded).__name__}: give what pipeline.shard(...) returns")
        check_alive("sharded", sharded)
        return packing.unshard_tree(sharded)

    def report(
        self,
        params: Sharded,
        batch: Any,
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
        self.check(params, batch, state, key)
        limit = self._memory.ipu_memory if ipu_memory is None else ipu_memory
        program = self._value_and_grad if compile else None
        frozen = self.apply_frozen(params)
        if compile:
            self._check_guards(self._value_and_grad, params, batch, state, key)
        plan = self.plan_step(frozen, batch, state, key)
        return make_report(plan, frozen, batch, state, key, mesh=self.mesh, program=program, ipu_memory=limit)

    def lower(self, params: Sharded, batch: Any, state: Sharded | None = None, key: jax.Array | None = None) -> Any:
        """Return the program of `value_and_grad`, lowered but not run. Compile it to see its memory and its HLO.

        On a mesh with further axes it is compiled here, too, to choose `guards`.

        Args:
            params: from `shard` or `shard_shapes`.
            batch, state, key: as for `value_and_grad`, or with `jax.ShapeDtypeStruct` in place of arrays. A batch whose
                leaves don't say where they are is split over the replicas.

        Raises:
            ValueError: `value_and_grad` would refuse the arguments.
        """
        self.check(params, batch, state, key)
        lower = lambda: lowered(self._value_and_grad, self.mesh, params, batch, state, key)  # noqa: E731
        self.guards.check_shapes(self._value_and_grad, (params, batch, state, key), lower)
        return lower()

    def choose_schedule(
        self,
        params: Sharded,
        batch: Any,
        state: Sharded | None = None,
        key: jax.Array | None = None,
        *,
        costs: StageCosts | None = None,
    ) -> FoundSchedule:
        """Find the schedule of a pipeline with schedule="auto" now, not in its first step. The result can be printed.

        Args:
            params, batch, state, key: as for `report`.
            costs: for example from `stage_costs`, the same on every instance. Default: FLOPs. If they contain no bytes,
                the bytes of the stash are counted. On chips messages take time, too, if the costs say their unit.

        Returns:
            The result of `find_schedule`; if a schedule was found before, that result again.

        Raises:
            ValueError: the schedule was given, or it was found before `costs` were given; `value_and_grad` would refuse
                the arguments; or no schedule fits in `ipu_memory`.
        """
        self._choice.check_choosable(costs)
        self.check(params, batch, state, key)
        choose = lambda shapes: self._choice.choose(shapes, costs)  # noqa: E731
        return self._traced(choose, self.apply_frozen(params), batch, state, key)

    def stage_costs(
        self,
        params: Sharded,
        batch: Any,
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
        self.check(params, batch, state, key)
        check_measurable((params, batch, state, key), measured, repeats)
        if measured:
            check_there(self.mesh, "measured=True", "measured=False, which counts FLOPs")
        trace = lambda shapes: shapes.trace(self.stages)  # noqa: E731
        traced = self._traced(trace, self.apply_frozen(params), batch, state, key)
        return traced.measured(self.mesh, repeats) if measured else traced.counted()

    def _bounded(
        self, program: Callable[..., Any], *args: Any, jitted: Any = None, updates: int = 0, samples: int = 0
    ) -> Any:
        self._check_guards(program if jitted is None else jitted, *args)
        self._window.begin(args)
        result = program(*args)
        # otherwise a loop that never waits would exhaust the threads of the CPU backend
        self._window.admit(result, updates=updates, samples=samples)
        return result

    def _check_guards(self, program: Any, *args: Any) -> None:
        self.guards.check(program, args, lambda: lowered(program, self.mesh, *args))

    def _check(self, params: Any, batch: Any, state: Any, key: Any, role: Role) -> None:
        self._groups.check(params, state)
        check_key(key, self.stages, role)
        if role == "prediction":
            check_prediction_batch(batch, self.replicas)
        else:
            check_batch(batch, self.replicas, self.options.gradient_accumulation)
        check_alive("batch", batch)
        if self.function is not None:
            self.function.check(batch, 1 if self.replicas == 1 else 2, key)

    def _run(
        self,
        params: Sharded,
        batch: Any,
        state: Sharded | None,
        key: Any,
        *,
        role: Role,
        backward: bool,
        reduction: Reduction = "mean",
    ) -> tuple[Any, dict[str, Any], Sharded | None, Sharded]:
        """Return the loss, the aux by stage, the gradients (None without `backward`) and the new state."""
        program = functools.partial(
            self.run_on_ipu,
            loss_cotangent=1.0 if reduction == "sum" else 1.0 / (self.options.gradient_accumulation * self.replicas),
            reduce_over_replicas=self.replicas > 1,
            role=role,
            backward=backward,
        )
        state = state or packing.empty_sharded(self.ipus)
        return run_on_mesh(program, self.mesh, params, batch, state, key, backward=backward)

    def _update(self, *args: Any) -> Any:
        loss, aux, *rest = self._run(*args, role="training", backward=True, reduction=self.options.reduction)
        return self.loss_with_aux(loss, aux), *rest

    def run_on_ipu(
        self,
        params: Sharded,
        batch: Any,
        state: Sharded | None,
        key: Any,
        *,
        loss_cotangent: Any = None,
        reduce_over_replicas: bool = False,
        backward: bool = True,
        role: Role | None = None,
    ) -> engine.Result:
        """Run one IPU's program, for callers with their own `shard_map`, such as `make_train_step`.

        Call it inside a `shard_map` over the pipeline's mesh. Without `reduce_over_replicas` nothing is sent
        between replicas, and loss, gradients and new state are this replica's own. Gradients are at least float32.

        Args:
            params, batch, state, key: this IPU's part.
            loss_cotangent: the cotangent of one micro-batch's loss, if there is a backward.
            reduce_over_replicas: whether to reduce the results over all replicas.
            backward: whether to compute gradients.
            role: which functions of the stages run. Default: "training", or "evaluation" without a backward.
        """
        role = role or ("training" if backward else "evaluation")
        state = state or packing.empty_sharded(self.ipus)
        params_as_frozen = self.apply_frozen(params)
        shapes = self._shapes(params_as_frozen.layout, state.layout, batch, key)
        plan = self._choice.plan(shapes, role=role, backward=backward)
        args = engine.Arguments(params_as_frozen, state, batch, key, loss_cotangent)
        result = engine.run(plan, args, reduce_over_replicas=reduce_over_replicas)
        if result.gradients is None:
            return result
        # the same layout as the weights, so that elementwise functions take both
        return dataclasses.replace(result, gradients=dataclasses.replace(result.gradients, layout=params.layout))

    def apply_frozen(self, params: Sharded) -> Sharded:
        """Return the weights, sharded by any pipeline, with exactly the leaves frozen that this pipeline freezes.

        Raises:
            ValueError: this pipeline's `frozen` does not fit the weights, or a leaf that it trains is not floating.
        """
        return self._groups.apply_frozen(params)

    def check(self, params: Any, batch: Any, state: Any = None, key: Any = None) -> None:
        """Raise the `ValueError` that `value_and_grad` would raise for these arguments."""
        self._check(params, batch, state, key, "training")

    def _shapes(self, params: PackedLayout, state: PackedLayout, batch: Any, key: Any) -> StepShapes:
        return StepShapes(params, state, batch, key, self.platform, uniform=self.guards.uniform)

    def plan_step(self, params: Sharded, batch: Any, state: Sharded | None = None, key: Any = None) -> Plan:
        """Return the plan of a step with these arguments, arrays or shapes. It traces the stages and runs nothing."""
        plan = lambda shapes: self._choice.plan(shapes, role="training", backward=True)  # noqa: E731
        return self._traced(plan, params, batch, state, key)

    def _traced(
        self, fn: Callable[[StepShapes], Any], params: Sharded, batch: Any, state: Sharded | None, key: Any
    ) -> Any:
        """Return `fn` of the shapes of a step on one replica, called as inside the `shard_map`."""
        num_leading = 0 if self.replicas == 1 else 1
        dtype_of = lambda leaf: jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)  # noqa: E731
        replica_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[num_leading:], dtype_of(x)), batch)
        layouts = params.layout, (state or packing.empty_sharded(self.ipus)).layout
        return traced_on(self.mesh, lambda: fn(self._shapes(*layouts, replica_batch, key)))

    def frozen_mask(self, params: Any) -> list[bool]:
        """Return, per leaf of whole weights, whether it gets no gradient."""
        return self._groups.layout(params).frozen_whole_leaves()

    def loss_with_aux(self, loss: Any, aux: dict[str, Any]) -> Any:
        """Return the loss, or the loss and the aux of the stages, as `value_and_grad` returns them."""
        if not jax.tree.leaves(aux):
            return loss
        if self.function is not None:
            return loss, self.function.whole_aux(aux)
        last = self.stages[-1].name
        return loss, aux[last] if aux.keys() == {last} else aux

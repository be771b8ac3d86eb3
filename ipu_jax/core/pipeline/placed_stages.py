"""Hold the stages of a pipeline on the IPUs of its mesh: checks and plans of a step, and the program of one IPU."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from ipu_jax.base import status
from ipu_jax.base.annotations import Batch, Params, Tree, Value
from ipu_jax.base.jaxprs import traced_on
from ipu_jax.base.showing import Table, counted
from ipu_jax.core.compiled.guards import GuardCheck
from ipu_jax.core.cutting.function import FunctionModel
from ipu_jax.core.engine import scan as engine
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import WHOLE
from ipu_jax.core.layout.packing import check_alive
from ipu_jax.core.layout.rule import LayoutRule
from ipu_jax.core.mesh.axes import over_ipus, rounded
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.instances import shapes_by
from ipu_jax.core.options import PipelineOptions, Reduction
from ipu_jax.core.pipeline._schedule_choice import ScheduleChoice, StepShapes
from ipu_jax.core.pipeline.arguments import check_batch, check_key, check_prediction_batch
from ipu_jax.core.programs.prices import Prices, prices_on
from ipu_jax.core.schedules import FoundSchedule, Schedule, StageCosts
from ipu_jax.core.stage import Role, Stage
from ipu_jax.core.step_args import StepArgs, given_dims, without_dims


class StepResults(NamedTuple):
    """The results of a run on all IPUs; those that the run does not have are None.

    Attributes:
        loss: the mean over micro-batches and replicas.
        aux: per stage that returned one, leaves ([R,] M, ...).
        outputs: in prediction, the outputs of the last stage, leaves ([R,] m, ...).
        gradients: in the dtypes and the layout of the weights.
        state: the new state; in prediction with several replicas, any one replica's.
    """

    loss: Any
    aux: Tree
    outputs: Any
    gradients: Params
    state: Tree


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedStages:
    """The stages of a pipeline on the IPUs of its mesh; `Pipeline.placement`.

    Its arguments `given` are a `StepArgs` as a user gives it, of arrays or shapes.

    Attributes:
        stages, mesh, options: as the pipeline's.
        function: the loss function of which the stages were cut, or None.
        weights, state: where their leaves are, and which weights are frozen.
        choice: how the schedule is found.
        guards: finds out which guards a program needs.
        schedule: the schedule; None under "auto", until the shapes of a step are known.
        uniform: whether IPUs run each other's tasks, too.
        exact: as in `Segment`.
    """

    stages: tuple[Stage, ...]
    mesh: Mesh
    options: PipelineOptions
    function: FunctionModel | None
    weights: LayoutRule
    state: LayoutRule
    choice: ScheduleChoice
    guards: GuardCheck
    schedule: Schedule | None
    uniform: bool
    exact: bool = False

    @property
    def replicas(self) -> int:
        return self.mesh.shape[REPLICA_AXIS]

    @property
    def ipus(self) -> int:
        return self.mesh.shape[IPU_AXIS]

    @property
    def takes_key(self) -> bool:
        """Return whether the stages were cut out of a function that takes a key, whether or not it is used."""
        return self.function is not None and self.function.key is not None

    @property
    def platform(self) -> str:
        """Return the platform of the IPUs, such as "cpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def prices(self) -> Prices:
        """Return what the IPUs pay for values that B computes again."""
        return prices_on(self.platform, self.mesh.devices.flat[0].device_kind)

    def check(self, given: StepArgs, role: Role = "training") -> None:
        """Raise the `ValueError` that `value_and_grad`, `loss` or `predict` raises for these arguments."""
        self.weights.check(given.params)
        if self.state.owners:
            self.state.check(given.state)
        elif given.state is not None:
            raise ValueError(
                "state was given, but no stage holds any: name its group, Stage(..., state='name'), or cut a function "
                "with state="
            )
        check_key(given.key, self.stages, role, taken=self.takes_key)
        if role == "prediction":
            check_prediction_batch(given.batch, self.replicas)
        else:
            check_batch(given.batch, self.replicas, self.options.gradient_accumulation)
        check_alive("batch", given.batch)
        if self.function is not None:
            self.function.check(given.batch, 1 + given_dims(self.replicas), given.key)

    def lowered(self, program: Any, given: StepArgs) -> Any:
        """Return a jitted program of these four arguments, lowered for arrays or shapes, wherever these are."""
        placed = lambda tree: tree and shapes_by(tree, packing.shardings_of(tree.layout, self.mesh))
        spec = PartitionSpec(*[REPLICA_AXIS] * given_dims(self.replicas))
        batch = packing.batch_shapes(given.batch, self.mesh, spec)
        key = None if given.key is None else jax.ShapeDtypeStruct(given.key.shape, given.key.dtype)
        return program.lower(self, placed(given.params), batch, placed(given.state), key)

    # what is chosen before a program is traced

    def guarded(
        self, program: Any, args: Tree, lower: Callable[["PlacedStages"], Any], *, runs: bool = True
    ) -> "PlacedStages":
        """Return these stages with the guards that a jitted program needs.

        Args:
            program: `program(placed stages, *args)`, where the placed stages are static.
            args: its arguments.
            lower: lowers the program for the shapes of its arguments, where weights are as their specs say.
            runs: whether it runs, or is only lowered.

        Raises:
            ValueError: the program cannot have the guards that were given.
        """
        lowered = lambda is_there: program.lower(self, *args) if is_there else lower(self)
        about = {"uniform": self.uniform, "runs": runs}
        is_uniform = self.guards.are_uniform((program, self), args, lowered, **about)
        return self if is_uniform == self.uniform else self._with_uniform_guards

    def chosen(self, program: Any, given: StepArgs, *, trains: bool = True, runs: bool = True) -> "PlacedStages":
        """Return these stages as a program of these arguments runs them: under its schedule, with its guards."""
        placed = self.scheduled(given) if trains else self.of_batch(given.batch)
        return placed.guarded(program, given, lambda placed: placed.lowered(program, given), runs=runs)

    def of_batch(self, batch: Batch) -> "PlacedStages":
        """Return these stages as a batch needs them: for micro-batches of other sizes, the function is cut anew.

        Each part of the weights and of the state stays where it is.

        Raises:
            ValueError: the function cannot be cut so.
        """
        if self.function is None:
            return self
        leading = 1 + given_dims(self.replicas)
        leaves, treedef = jax.tree.flatten(batch)
        sizes = treedef, *(tuple(leaf.shape[leading:]) for leaf in leaves)
        if sizes not in self._by_sizes:
            self._by_sizes[sizes] = self._of_function(self.function.of_microbatch(batch, leading))
        return self._by_sizes[sizes]

    def _of_function(self, function: FunctionModel) -> "PlacedStages":
        if function is self.function:
            return self
        choice = dataclasses.replace(self.choice, stages=function.stages)
        return dataclasses.replace(self, stages=function.stages, function=function, choice=choice)

    def scheduled(self, given: StepArgs) -> "PlacedStages":
        """Return these stages as a step needs them: under "auto" with the schedule for its shapes."""
        placed = self.of_batch(given.batch)
        if placed.schedule is not None:
            return placed
        leaves, treedef = jax.tree.flatten(given)
        shapes = (treedef, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if shapes not in self._by_shapes:
            self._by_shapes[shapes] = dataclasses.replace(placed, schedule=placed.found(given).schedule)
        return self._by_shapes[shapes]

    def found(self, given: StepArgs, costs: StageCosts | None = None) -> FoundSchedule:
        """Return the result of the search for a schedule for the shapes of a step."""
        choice = self.of_batch(given.batch).choice
        return self.traced(lambda shapes: choice.find(shapes, costs), given)

    @functools.cached_property
    def _by_sizes(self) -> dict[Any, "PlacedStages"]:
        return {}

    @functools.cached_property
    def _by_shapes(self) -> dict[Any, "PlacedStages"]:
        return {}  # so that equal shapes give one value

    @functools.cached_property
    def _with_uniform_guards(self) -> "PlacedStages":
        return dataclasses.replace(self, uniform=True)

    def plan(self, *given: Tree) -> Plan:
        """Return the plan of a step of `value_and_grad` with these arguments. Stages are traced, and nothing is run."""
        args, placed = StepArgs(*given), self.scheduled(StepArgs(*given))
        return self.traced(lambda shapes: placed._plan(shapes, role="training", backward=True), args)

    def _plan(self, shapes: StepShapes, *, role: Role, backward: bool) -> Plan:
        if not backward:
            # there is no B to interleave with F, so this schedule, which fills the pipeline at once, is the shortest
            schedule = self.choice.named("grouped", shapes.micro_batches)
        else:
            # the schedule is found for training functions; others need not have a key, or state
            assert self.schedule is not None or role != "training", "it is chosen before a program is traced"
            schedule = self.schedule or self.choice.named("grouped")
        return shapes.plan(self.stages, schedule, role=role, backward=backward)

    def traced(self, fn: Callable[[StepShapes], Any], given: StepArgs) -> Any:
        """Return `fn` of the shapes of a step on one replica, called as inside the `shard_map`."""

        def shape_of(leaf: Value) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            return jax.ShapeDtypeStruct(leaf.shape[given_dims(self.replicas) :], dtype)

        args = given._replace(batch=jax.tree.map(shape_of, given.batch), state=self._state(given))
        with status.during("tracing the stages"):
            return traced_on(self.mesh, lambda: fn(self._shapes(args)))

    def run(self, given: StepArgs, *, role: Role, backward: bool, reduction: Reduction = "mean") -> StepResults:
        """Run a step on all IPUs, and return its results as a user gets them. Call it inside `jax.jit`."""
        cotangent = 1.0 if reduction == "sum" else 1.0 / (self.options.gradient_accumulation * self.replicas)

        def on_ipu(args: StepArgs) -> StepResults:
            result = self.run_on_ipu(
                args.of_replica(), loss_cotangent=cotangent, reduce_over_replicas=True, role=role, backward=backward
            )
            aux, outputs = jax.tree.map(lambda leaf: leaf[None], (result.aux, result.outputs))
            rounding = lambda g, p: rounded(g, p.dtype)
            gradients = result.gradients and jax.tree.map(rounding, result.gradients, args.params)
            return StepResults(result.loss, aux, outputs, gradients, result.state)

        args = given.entered(self.replicas)._replace(state=self._state(given))
        of_replicas, is_spec = PartitionSpec(REPLICA_AXIS), lambda leaf: isinstance(leaf, PartitionSpec)
        weights, state = packing.specs_of(args.params.layout), packing.specs_of(args.state.layout)
        of_output = lambda spec: PartitionSpec(REPLICA_AXIS, None, *spec)
        outputs = jax.tree.map(of_output, self.stages[-1].predict_specs, is_leaf=is_spec)
        in_specs = (StepArgs(weights, of_replicas, state, WHOLE),)
        out_specs = StepResults(WHOLE, of_replicas, outputs, weights if backward else WHOLE, state)
        with status.tracing("the pipeline"):
            results = over_ipus(on_ipu, self.mesh, in_specs=in_specs, out_specs=out_specs)(args)
        aux, outputs = without_dims((results.aux, results.outputs), self.replicas)
        return results._replace(aux=aux, outputs=outputs)

    def run_on_ipu(
        self,
        args: StepArgs,
        *,
        loss_cotangent: Value = None,
        reduce_over_replicas: bool = False,
        backward: bool = True,
        role: Role = "training",
    ) -> engine.Result:
        """Run one IPU's program, inside a `shard_map` over the pipeline's mesh.

        Without `reduce_over_replicas` nothing is sent between replicas, and loss, gradients and new state are this
        replica's own. Gradients are at least float32.

        Args:
            args: this IPU's part; leaves of the batch are (M, micro-batch, ...).
            loss_cotangent: the cotangent of one micro-batch's loss, if there is a backward.
            reduce_over_replicas: whether to reduce the results over all replicas.
            backward: whether to compute gradients.
            role: which functions of the stages run.
        """
        args = args._replace(state=self._state(args))
        plan = self._plan(self._shapes(args), role=role, backward=backward)
        return engine.run(plan, args, loss_cotangent=loss_cotangent, reduce_over_replicas=reduce_over_replicas)

    def _state(self, args: StepArgs) -> packing.Sharded:
        return args.state or packing.Sharded([], PackedLayout(self.ipus))

    def _shapes(self, args: StepArgs) -> StepShapes:
        layout = self.weights.as_trained(args.params.layout)
        return StepShapes(args, layout, self.platform, self.prices, uniform=self.uniform, exact=self.exact)

    def loss_with_aux(self, loss: Value, aux: dict[str, Tree]) -> Tree:
        """Return the loss, or the loss and the aux of the stages, as `value_and_grad` returns them."""
        if self.function is not None:
            has_aux = self.function.aux != jax.tree.structure(None)
            return (loss, self.function.whole_aux(aux)) if has_aux else loss
        if not jax.tree.leaves(aux):
            return loss
        last = self.stages[-1].name
        return loss, aux[last] if aux.keys() == {last} else aux

    def described(self) -> list[str | Table]:
        """Return a line about the pipeline, and a row per stage.

        >>> from ipu_jax import ALL_IPUS, Pipeline
        >>> first = Stage(lambda w, x, mb: mb @ w, params="first", ipu=0, random=True)
        >>> head = Stage(lambda w, x, mb: (x @ w).mean(), params="table", ipu=ALL_IPUS, name="head")
        >>> print(Pipeline([first, head], gradient_accumulation=4, specs={"table": PartitionSpec()}))
        Pipeline of 2 stages on 1 IPU, schedule 'grouped', 4 micro-batches, reduction 'mean'
          0  first  IPU 0     params 'first', random
          1  head   all IPUs  params 'table'
        """
        name, m = "auto" if self.schedule is None else self.schedule.name, self.options.gradient_accumulation
        replicas = f"{self.replicas} replicas x " * given_dims(self.replicas)
        first = (
            f"Pipeline of {counted(len(self.stages), 'stage')} on {replicas}{counted(self.ipus, 'IPU')}, schedule "
            f"{name!r}, {counted(m, 'micro-batch')}, reduction {self.options.reduction!r}"
        )
        if self.function is not None:
            return [first, *self.function.described]
        rows = [
            (str(k), stage.name, _place(stage), ", ".join(_properties(stage))) for k, stage in enumerate(self.stages)
        ]
        digits = len(rows[-1][0])
        return [first, Table([(row[0].rjust(digits), *row[1:]) for row in rows], left=4, has_head=False, indent="  ")]


def _place(stage: Stage) -> str:
    return "all IPUs" if stage.place is None else f"IPU {stage.place}"


def _properties(stage: Stage) -> list[str]:
    named: dict[str, Any] = {"params": stage.params, "state": stage.state}
    found = [f"{name} {value!r}" for name, value in named.items() if value is not None]
    found += ["random"] if stage.random else []
    for verb, names in (("takes", stage.takes), ("shares", stage.shared)):
        found += [f"{verb} {', '.join(map(repr, names))}"] if names else []
    functions = {"evaluate": stage.evaluate, "predict": stage.predict, "reference": stage.reference}
    return [*found, *(name for name, fn in functions.items() if fn is not None)]

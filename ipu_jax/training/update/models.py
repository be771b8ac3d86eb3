"""Give a training step one face of what it trains, a pipeline or a loss function, and choose it.

    Pipeline       PipelineModel    weights are a `Sharded`; stages, perhaps with state, on a mesh of replicas and IPUs
    loss function  ReplicasModel    weights are a plain tree, the same on every replica; a replica is one IPU

Everything else in this room is the same for both.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ipu_jax.base.annotations import Dtype, Function, Params, Tree, Value
from ipu_jax.base.checks import in_line
from ipu_jax.base.showing import counted
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.blocks import to_blocks
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import WHOLE
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.axes import over_ipus, state_over_replicas
from ipu_jax.core.mesh.instances import put_copy
from ipu_jax.core.options import Reduction, TrainOptions
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.pipeline.placed_stages import PlacedStages
from ipu_jax.core.stage import Stage
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.training.update._precision import cast_floats, computing_in, function_in
from ipu_jax.training.update.replicas import Replicas, accumulate, counts_of, loss_and_aux, over_replicas, replicate


class Gradients(NamedTuple):
    """The gradients of one replica for an update, and what comes with them, in its mapped program.

    Attributes:
        loss: the replica's mean loss.
        aux: the model's aux, leaves (M, ...), or None.
        sums: per block, the gradients' sums over the micro-batches, at least float32.
        stages: the stages' new state, over all replicas, or None.
    """

    loss: Value
    aux: Tree
    sums: list[Tree]
    stages: Tree


class Model(Protocol):
    """Describe a model to the training step. Weights are whole, as users give them, or placed, as `place` returns them.

    Without a word of its own, a model has nothing to choose, freezes nothing, and its aux came with the loss.

    Attributes:
        kind: a name for the line of `describe`.
        runs: the `Pipeline` or `Replicas`, with all its replicas and in the step's precision.
        random: whether it takes a key.
        stages: the model as stages; a loss function is a single one.
        state_groups: the names of the stages' state.
        takes_unused_key: whether it takes a key that nothing reads.
        mesh, replicas, m, reduction: as `runs` has them; `m` is its gradient accumulation.

    Methods:
        check: raise the `ValueError` that `value_and_grad` would raise for arguments as a user gives them.
        has: return whether a state's weights belong to this kind of model.
        loss: return the loss and the aux, or None, of arguments as a user gives them, without gradients.
        place: place whole weights on the IPUs.
        layout: return where each leaf of placed weights is.
        on_ipus: map a program over the IPUs of all replicas; the result takes and returns global arrays.
        gradients: return this replica's loss and gradients; its batch has leaves (M, micro-batch, ...). It raises
            `ValueError` if the loss is `weighted`, and a stage adds a loss that has no count.
    """

    kind: str
    runs: Any
    random: bool
    stages: tuple[Stage, ...]
    state_groups: Sequence[str]
    takes_unused_key = False
    mesh: Mesh
    replicas: int
    m: int
    reduction: Reduction

    def __init__(self, runs: Any, stages: tuple[Stage, ...], *, random: bool, state_groups: Sequence[str] = ()):
        self.runs, self.stages, self.random, self.state_groups = runs, stages, random, state_groups
        self.mesh, self.replicas = runs.mesh, runs.replicas
        self.m, self.reduction = runs.options.gradient_accumulation, runs.options.reduction

    def check(self, given: StepArgs) -> None: ...
    def has(self, params: Params) -> bool: ...
    def loss(self, given: StepArgs) -> tuple[Value, Tree]: ...
    def place(self, params: Params) -> Params: ...
    def layout(self, placed: Params) -> PackedLayout: ...
    def on_ipus(self, program: Function, *, in_specs: Tree, out_specs: Tree) -> Function: ...
    def gradients(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Gradients: ...

    def describe(self) -> str:
        """Return a line about the kind of the model and its sizes."""
        replicas = f" x {self.replicas} replicas" * given_dims(self.replicas)
        return f"{self.kind} on {counted(self.runs.ipus, 'IPU')}{replicas}, {counted(self.m, 'micro-batch')} per update"

    def scheduled(self, given: Callable[[], StepArgs]) -> Any:
        """Return what is chosen for these arguments before a program is traced; see `PlacedStages.scheduled`."""

    def guarded(self, chosen: Any, program: Any, args: Tree, lower: Callable[[Any], Any], *, runs: bool = True) -> Any:
        """Return what is chosen, with the guards that a program needs; see `PlacedStages.guarded`."""
        return chosen

    def on(self, chosen: Any) -> "Model":
        """Return the model with what was chosen."""
        return self

    def freezes_as(self, params: Params) -> bool:
        """Return whether the weights of a state were placed by a model that freezes the same leaves."""
        return True

    def aux_of_loss(self, aux: Tree) -> Tree:
        """Return the aux that came with the loss itself: the last stage's aux, if the aux is a dict by stage name."""
        return aux

    def loss_cotangent(self, scale: Value, *, weighted: bool) -> Value:
        """Return the cotangent of one micro-batch's loss; a `weighted` loss is divided by its count later."""
        return scale if weighted or self.reduction == "sum" else scale / (self.m * self.replicas)


class PipelineModel(Model):
    """A pipeline as a training step sees it."""

    def __init__(self, pipeline: Pipeline, *, exact: bool):
        stages = pipeline.stages
        groups = sorted(stage.state for stage in stages if stage.state is not None)
        super().__init__(pipeline, stages, random=any(stage.random for stage in stages), state_groups=groups)
        self.kind = f"Pipeline of {len(stages)} stages"
        self.pipeline, self.placement = pipeline, pipeline.placement
        if exact:
            self.placement = dataclasses.replace(pipeline.placement, exact=True)
        self.takes_unused_key = not self.random and self.placement.takes_key

    def check(self, given: StepArgs) -> None:
        self.placement.check(given)

    def scheduled(self, given: Callable[[], StepArgs]) -> PlacedStages:
        is_fixed = self.placement.schedule is not None and self.placement.function is None
        return self.placement if is_fixed else self.placement.scheduled(given())

    def guarded(
        self, chosen: PlacedStages, program: Any, args: Tree, lower: Callable[[Any], Any], *, runs: bool = True
    ) -> PlacedStages:
        return chosen.guarded(program, args, lower, runs=runs)

    def on(self, chosen: PlacedStages) -> "PipelineModel":
        model = copy.copy(self)
        model.placement, model.stages = chosen, chosen.stages
        return model

    def has(self, params: Params) -> bool:
        return isinstance(params, Sharded)

    def freezes_as(self, params: Sharded) -> bool:
        return self.placement.weights.as_trained(params.layout) == params.layout

    def loss(self, given: StepArgs) -> tuple[Value, Tree]:
        return loss_and_aux(self.pipeline.loss(*given))

    def aux_of_loss(self, aux: Tree) -> Tree:
        last, names = self.pipeline.stages[-1].name, {stage.name for stage in self.pipeline.stages}
        return aux[last] if isinstance(aux, dict) and last in aux and aux.keys() <= names else aux

    def place(self, params: Params) -> Sharded:
        return self.pipeline.shard(params)

    def layout(self, placed: Sharded) -> PackedLayout:
        return placed.layout

    def on_ipus(self, program: Function, *, in_specs: Tree, out_specs: Tree) -> Function:
        return over_ipus(program, self.mesh, in_specs=in_specs, out_specs=out_specs)

    def gradients(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Gradients:
        result = self.placement.run_on_ipu(args, loss_cotangent=loss_cotangent)
        if weighted and result.adds_loss:
            raise ValueError(
                "weighted=True divides the loss by counts, but a stage adds a loss that has none, Outputs(loss=...) or "
                "losses=: send it to the last stage as a skip, and return (sum + count * loss, count) there"
            )
        value = self.placement.loss_with_aux(result.loss, result.aux)
        aux = value[1] if isinstance(value, tuple) else None
        stages = args.state and state_over_replicas(result.state)
        return Gradients(result.loss, aux, to_blocks(result.gradients), stages)


class ReplicasModel(Model):
    """A loss function as a training step sees it."""

    kind = "loss function"

    def __init__(self, runs: Replicas):
        call = lambda p, _, microbatch, **extra: runs.loss_fn(p, microbatch, **extra)
        stage = Stage(call, "params", random="same" if runs.random else False, recompute="none")
        super().__init__(runs, (stage,), random=runs.random)
        self.replicated, self.loss_fn = runs, runs.loss_fn

    def check(self, given: StepArgs) -> None:
        self.replicated.check(given)

    def has(self, params: Params) -> bool:
        return not isinstance(params, Sharded)

    def loss(self, given: StepArgs) -> tuple[Value, Tree]:
        return loss_and_aux(self.replicated.loss(given.params, given.batch, given.key))

    def place(self, params: Params) -> Params:
        self.replicated.check_params(params)
        return jax.tree.map(lambda leaf: put_copy(leaf, NamedSharding(self.mesh, WHOLE)), params)

    def layout(self, placed: Tree) -> PackedLayout:
        leaves, treedef = jax.tree.flatten(placed)
        return _layout_of(treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))

    def on_ipus(self, program: Function, *, in_specs: Tree, out_specs: Tree) -> Function:
        return over_replicas(program, self.replicated.devices, in_specs=in_specs, out_specs=out_specs)

    def gradients(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Gradients:
        loss, aux, sums = accumulate(self.loss_fn, args, loss_cotangent=loss_cotangent, random=self.random)
        return Gradients(loss, aux, jax.tree.leaves(sums), None)


@functools.lru_cache(maxsize=64)
def _layout_of(treedef: Any, leaves: tuple[tuple[tuple[int, ...], Dtype], ...]) -> PackedLayout:
    """Return the layout of a plain tree of weights, which each call of a step asks for."""
    return PackedLayout.of_one_ipu("params", jax.tree.unflatten(treedef, [jax.ShapeDtypeStruct(*of) for of in leaves]))


def model_for(model: Any, options: TrainOptions) -> Model:
    """Return the model that a step runs, from what its user gives.

    Raises:
        ValueError: the options contradict the model's own options, or the model is neither a pipeline nor callable.
    """
    half = None if options.precision == "32.32" else jnp.dtype(options.half)
    count, asked_for = options.replication_factor, _asked_for(model, options)
    if isinstance(model, Pipeline):
        if any(value != getattr(model.options, name) for name, value in asked_for.items()):
            model = model.replace(**asked_for)
        if count is not None and count != model.replicas:
            model = replicate(model, replication_factor=count)
        if half is not None and model.function is not None:
            held = half if options.precision == "16.16" else jnp.float32
            model = model.replace(stages=function_in(model.function, half, held))
        elif half is not None:
            model = model.replace(stages=[computing_in(stage, half) for stage in model.stages])
        return PipelineModel(model, exact=options.exact)
    if options.exact:
        raise ValueError("exact=True needs a Pipeline, whose schedule and IPUs can differ: leave it out")
    own: dict[str, Any] = {"replication_factor": count or 1}
    if isinstance(model, Replicas):
        own = {"replication_factor": model.replicas, "random": model.random, "devices": model.given_devices}
        model, asked_for = model.loss_fn, {**model.given, **asked_for}
    elif not callable(model):
        raise ValueError(
            f"model={in_line(model):.60} is neither a Pipeline, nor Replicas, nor callable: give a loss function, or "
            "Pipeline(stages)"
        )
    fn = loss_fn = model
    if half is not None:
        fn = lambda p, mb, **asked_for: loss_fn(cast_floats(p, half), cast_floats(mb, half), **asked_for)
    return ReplicasModel(Replicas(fn, **own, **asked_for))


def _asked_for(model: Any, options: TrainOptions) -> dict[str, Any]:
    """Return M and the reduction, if the options give them.

    Raises:
        ValueError: the model was made with another M or reduction, or is `Replicas` of another number.
    """
    names = ("gradient_accumulation", "reduction")
    asked_for = {name: value for name in names if (value := getattr(options, name)) is not None}
    own = model.given if isinstance(model, Pipeline | Replicas) else {}
    for name, value in asked_for.items():
        if own.get(name) not in (None, value):
            raise ValueError(
                f"TrainOptions({name}={value!r}), but the {type(model).__name__} was made with {name}={own[name]!r}: "
                "give it in one of the two places, or the same in both"
            )
    count = options.replication_factor
    if isinstance(model, Replicas) and count not in (None, model.replicas):
        raise ValueError(
            f"TrainOptions(replication_factor={count}), but the Replicas are {model.replicas}: "
            "give it in one of the two places, or the same in both"
        )
    return asked_for


def specs_of(tree: Tree) -> Tree:
    """Return the PartitionSpec of each array of placed weights or state. A plain tree is whole on every IPU."""
    return packing.specs_of(tree.layout) if isinstance(tree, Sharded) else jax.tree.map(lambda _: WHOLE, tree)


def loss_of_batch(model: Model, options: TrainOptions, given: StepArgs) -> Tree:
    """Return the loss, or `(loss, aux)`, of a batch as `TrainStep.loss` documents it: as training reports it.

    weighted      (sum over all micro-batches, replicas and updates of the batch) / (sum of their counts)
      of sums     under reduction="sum": the mean of the sums of all updates
    otherwise     the mean over them

    Args:
        model: the model with all its replicas, in the step's precision.
        options: the step's options.
        given: weights and stages' state on the IPUs; the batch of a call, leaves ([updates,] [replicas,] M, ...); and a
            key or None.
    """
    updates = [given]
    if given_dims(options.device_iterations):
        count = len(jax.tree.leaves(given.batch)[0])
        keys = [None if given.key is None else jax.random.fold_in(given.key, i) for i in range(count)]
        updates = [
            given._replace(batch=jax.tree.map(lambda leaf, i=i: leaf[i], given.batch), key=key)
            for i, key in enumerate(keys)
        ]
    results = [model.loss(of_update) for of_update in updates]
    losses, stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
    aux = stacked if given_dims(options.device_iterations) else results[0][1]
    value = jnp.mean(losses)
    if options.weighted:
        counts = counts_of(model.aux_of_loss(stacked), dims=2 + given_dims(model.replicas))
        value = _weighted(model, losses * model.m * model.replicas, counts)
    return value if aux is None else (value, aux)


def _weighted(model: Model, sums: Value, counts: Value) -> Value:
    if model.reduction == "sum":
        return jnp.mean(sums)
    total = jnp.sum(counts, dtype=jnp.promote_types(counts.dtype, sums.dtype))
    return sums.sum() / jnp.where(total > 0, total, jnp.inf)

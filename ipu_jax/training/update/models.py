"""Give a training step one face of what it trains, a pipeline or a loss function, and choose it.

    Pipeline       PipelineModel    weights are a `Sharded`; stages, perhaps with state, on a mesh of replicas and IPUs
    loss function  ReplicasModel    weights are a plain tree, the same on every replica; a replica is one IPU

Everything else in this room is the same for both.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ipu_jax.base.annotations import Batch, Function, Params, Tree, Value
from ipu_jax.base.checks import in_line
from ipu_jax.base.showing import counted
from ipu_jax.core.collectives import state_over_replicas
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.instances import put_copy
from ipu_jax.core.mesh_axes import over_ipus
from ipu_jax.core.optimizer.blocks import Blocks, blocks_of_layout, blocks_of_tree, to_blocks
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.core.weights import packing
from ipu_jax.core.weights.packed_layout import WHOLE
from ipu_jax.core.weights.packing import Sharded
from ipu_jax.core.weights.place import Place, places_of_layout
from ipu_jax.training.update._accumulate import accumulate
from ipu_jax.training.update._precision import cast_floats, computing_in, function_in
from ipu_jax.training.update._probes import ProbedPipeline, flags_of_function, flags_of_stages, run_probed_function
from ipu_jax.training.update.nonfinite import UpdateFlags
from ipu_jax.training.update.replicas import Replicas, over_replicas, replicate
from ipu_jax.training.update.state import TrainState


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


class _Model:
    """Hold what both kinds have.

    Attributes:
        runs: the `Pipeline` or `Replicas`, with all its replicas and in the step's precision.
        random: whether it takes a key.
        state_groups: the names of the stages' state.
        takes_unused_key: whether it takes a key that nothing reads.
    """

    takes_unused_key = False

    def __init__(self, runs: Any, *, random: bool, state_groups: Sequence[str] = ()):
        self.runs, self.random, self.state_groups = runs, random, state_groups
        self.mesh, self.replicas, self.ipus = runs.mesh, runs.replicas, runs.ipus
        self.m, self.reduction = runs.options.gradient_accumulation, runs.options.reduction

    def loss(self, given: StepArgs) -> tuple[Tree, Tree]:
        """Return the loss and the aux, or None, of `StepArgs` as a user gives them, without gradients."""
        value = self._loss(given)
        return value if isinstance(value, tuple) else (value, None)

    def _loss(self, given: StepArgs) -> Tree:
        raise NotImplementedError

    def loss_cotangent(self, scale: Value, *, weighted: bool) -> Value:
        """Return the cotangent of one micro-batch's loss; a `weighted` loss is divided by its count later."""
        return scale if weighted or self.reduction == "sum" else scale / (self.m * self.replicas)

    def _described(self, kind: str) -> str:
        replicas = f" x {self.replicas} replicas" * given_dims(self.replicas)
        return f"{kind} on {counted(self.ipus, 'IPU')}{replicas}, {counted(self.m, 'micro-batch')} per update"


class PipelineModel(_Model):
    """A pipeline as a training step sees it."""

    def __init__(self, pipeline: Pipeline):
        stages = pipeline.stages
        groups = sorted(stage.state for stage in stages if stage.state is not None)
        super().__init__(pipeline, random=any(stage.random for stage in stages), state_groups=groups)
        self.pipeline, self.placement = pipeline, pipeline.placement
        self.takes_unused_key = not self.random and self.placement.takes_key

    # on the host

    def describe(self) -> str:
        """Return a line about the kind of the model and its sizes."""
        return self._described(f"Pipeline of {len(self.pipeline.stages)} stages")

    def check(self, given: StepArgs) -> None:
        """Raise the `ValueError` that `value_and_grad` would raise for these arguments."""
        self.placement.check(given)

    def has(self, params: Params) -> bool:
        """Return whether a state's weights belong to this kind of model."""
        return isinstance(params, Sharded)

    def freezes_as(self, params: Sharded) -> bool:
        """Return whether the weights of a state were placed by a model that freezes the same leaves."""
        return self.placement.groups.as_trained(params.layout) == params.layout

    def check_guards(self, program: Any, args: Tree, lower: Callable[[], Any], *, runs: bool = True) -> None:
        """Choose the guards of a jitted program before it runs, or is only lowered; see `GuardChoice.check`."""
        guards = self.placement.guards
        (guards.check if runs else guards.check_shapes)(program, args, lower)

    def _loss(self, given: StepArgs) -> Tree:
        return self.pipeline.loss(*given)

    def aux_of_loss(self, aux: Tree) -> Tree:
        """Return the aux that came with the loss itself: the last stage's aux, if the aux is a dict by stage name."""
        last, names = self.pipeline.stages[-1].name, {stage.name for stage in self.pipeline.stages}
        return aux[last] if isinstance(aux, dict) and last in aux and aux.keys() <= names else aux

    def plan(self, given: StepArgs) -> Plan | None:
        """Return the plan of an update, if the model has one."""
        return self.placement.plan(*given)

    # weights and state

    def place(self, params: Params) -> Sharded:
        """Place whole weights on the IPUs."""
        return self.pipeline.shard(params)

    def layout(self, placed: Sharded) -> Any:
        """Return what the blocks of weights depend on; it can be hashed."""
        return placed.layout

    def blocks(self, placed: Sharded, replicas: int) -> Blocks:
        """Return the blocks of the weights, each divided among this many replicas."""
        return blocks_of_layout(placed.layout, replicas=replicas)

    def trained(self, placed: Sharded, whole: Tree) -> list[Value]:
        """Return the trained leaves of a whole tree with the structure of the weights."""
        return placed.layout.trained_leaves(whole)

    def frozen(self, placed: Sharded) -> list[bool]:
        """Return, per leaf of the whole weights, whether it is frozen."""
        return placed.layout.frozen_whole_leaves()

    def places(self, placed: Sharded) -> list[Place]:
        """Return where each leaf of the whole weights is in the arrays of a checkpoint."""
        return places_of_layout(placed.layout, "params")

    def assembled(self, placed: Sharded, leaves: Sequence[Value]) -> Tree:
        """Return the whole weights from their leaves, in the order of `places`."""
        return placed.layout.assembled(leaves)

    # inside the program

    def on_ipus(self, program: Function, *, in_specs: Tree, out_specs: Tree) -> Function:
        """Map a program over the IPUs of all replicas. The result takes and returns global arrays."""
        return over_ipus(program, self.mesh, in_specs=in_specs, out_specs=out_specs)

    def gradients(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Gradients:
        """Return this replica's loss and gradients; its batch has leaves (M, micro-batch, ...).

        Raises:
            ValueError: the loss is `weighted`, and a stage adds a loss that has no count.
        """
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

    # what was not finite

    def probed(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Any:
        """Run an update with probes inside `jax.jit`, and return their flags; `args` has all dims."""
        return ProbedPipeline(self.pipeline, args.params.layout, weighted=weighted).run(args, loss_cotangent)

    def flags(self, state: TrainState, batch: Batch, results: Tree) -> UpdateFlags:
        """Return the flags by name, from what `probed` returned, on the host."""
        return flags_of_stages(self.pipeline.stages, state, batch, results)


class ReplicasModel(_Model):
    """A loss function as a training step sees it. It has the methods of `PipelineModel`."""

    def __init__(self, runs: Replicas):
        super().__init__(runs, random=runs.random)
        self.replicated, self.loss_fn = runs, runs.loss_fn

    def describe(self) -> str:
        return self._described("loss function")

    def check(self, given: StepArgs) -> None:
        self.replicated.check(given)

    def has(self, params: Params) -> bool:
        return not isinstance(params, Sharded)

    def freezes_as(self, params: Params) -> bool:
        return True

    def check_guards(self, program: Any, args: Tree, lower: Callable[[], Any], *, runs: bool = True) -> None:
        pass

    def _loss(self, given: StepArgs) -> Tree:
        return self.replicated.loss(given.params, given.batch, given.key)

    def aux_of_loss(self, aux: Tree) -> Tree:
        return aux

    def plan(self, given: StepArgs) -> Plan | None:
        return None

    def place(self, params: Params) -> Params:
        self.replicated.check_params(params)
        return jax.tree.map(lambda leaf: put_copy(leaf, NamedSharding(self.mesh, WHOLE)), params)

    def layout(self, placed: Tree) -> Any:
        leaves, treedef = jax.tree.flatten(placed)
        return treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)

    def blocks(self, placed: Tree, replicas: int) -> Blocks:
        return blocks_of_tree(placed, replicas=replicas)

    def trained(self, placed: Tree, whole: Tree) -> list[Value]:
        return jax.tree.leaves(whole)

    def frozen(self, placed: Tree) -> list[bool]:
        return [False] * len(jax.tree.leaves(placed))

    def places(self, placed: Tree) -> list[Place]:
        leaves = self.blocks(placed, 1).leaves
        return [Place(leaf.path, leaf.shape, leaf.dtype, f"params.{i}") for i, leaf in enumerate(leaves)]

    def assembled(self, placed: Tree, leaves: Sequence[Value]) -> Tree:
        return jax.tree.unflatten(jax.tree.structure(placed), leaves)

    def on_ipus(self, program: Function, *, in_specs: Tree, out_specs: Tree) -> Function:
        return over_replicas(program, self.replicated.devices, in_specs=in_specs, out_specs=out_specs)

    def gradients(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Gradients:
        loss, aux, sums = accumulate(self.loss_fn, args, loss_cotangent=loss_cotangent, random=self.random)
        return Gradients(loss, aux, jax.tree.leaves(sums), None)

    def probed(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Any:
        return run_probed_function(self, args, loss_cotangent)

    def flags(self, state: TrainState, batch: Batch, results: Tree) -> UpdateFlags:
        return flags_of_function(state, batch, results)


Model = PipelineModel | ReplicasModel


def model_for(model: Any, options: TrainOptions) -> Model:
    """Return the model that a step runs, from what its user gives.

    Raises:
        ValueError: the options contradict the model's own options, or the model is neither a pipeline nor callable.
    """
    half = None if options.precision == "32.32" else jnp.dtype(options.half)
    asked_for: dict[str, Any] = {
        name: value for name in ("gradient_accumulation", "reduction") if (value := getattr(options, name)) is not None
    }
    if isinstance(model, Pipeline | Replicas):
        for name, value in asked_for.items():
            own = model.given[name]
            if own is not None and value != own:
                raise ValueError(
                    f"TrainOptions({name}={value!r}), but the {type(model).__name__} was made with {name}={own!r}: "
                    "give it in one of the two places, or the same in both"
                )
    count = options.replication_factor
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
        return PipelineModel(model)
    random, devices = False, None
    if isinstance(model, Replicas):
        if count is not None and count != model.replicas:
            raise ValueError(
                f"TrainOptions(replication_factor={count}), but the Replicas are {model.replicas}: "
                "give it in one of the two places, or the same in both"
            )
        random, count, devices = model.random, model.replicas, model.given_devices
        model, asked_for = model.loss_fn, {**model.given, **asked_for}
    elif not callable(model):
        raise ValueError(
            f"model={in_line(model):.60} is neither a Pipeline, nor Replicas, nor callable: give a loss function, or "
            "Pipeline(stages)"
        )
    fn = loss_fn = model
    if half is not None:
        fn = lambda p, mb, **asked_for: loss_fn(cast_floats(p, half), cast_floats(mb, half), **asked_for)
    return ReplicasModel(Replicas(fn, replication_factor=count or 1, random=random, devices=devices, **asked_for))


def specs_of(tree: Tree) -> Tree:
    """Return the PartitionSpec of each array of placed weights or state. A plain tree is whole on every IPU."""
    return packing.specs_of(tree.layout) if isinstance(tree, Sharded) else jax.tree.map(lambda _: WHOLE, tree)

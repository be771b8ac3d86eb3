"""Run a pipeline's stages unsharded, on whole weights, for comparison with the pipeline.

`reference_value_and_grad` runs the stages one after the other, micro-batch by micro-batch. Each micro-batch is
differentiated by its own `jax.vjp`, from the same cotangent of the loss as in the pipeline, so that a custom rule that
depends on the cotangent (clips it, takes its sign) computes the same in both. A stage's `reference` function takes the
place of its `fn`; a concurrent stage without one runs on a mesh of a single IPU, where its collectives do nothing. The
replicas run side by side, each on its first IPU, so that a stage can communicate over axis "replica" (synchronised
batch norm). `reference_predict` runs the functions of `Pipeline.predict` in the same way. Across several instances, all
of them must call these functions.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ipu_jax.base import status
from ipu_jax.base.annotations import Batch, Device, Function, Key, Params, Tree, Value
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.base.jaxprs import check_context_mesh
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.mesh.axes import further_axes
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.instances import own_device, put
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.pipeline.arguments import check_batch, check_key, check_predictable, check_prediction_batch
from ipu_jax.core.pipeline.forward import Forward
from ipu_jax.core.programs.segment import NO_MESSAGE, Message, MicrobatchInputs, keys_of, loss_and_aux, whole
from ipu_jax.core.stage import Stage
from ipu_jax.core.step_args import StepArgs, without_dims

_COPY_AXIS: Final = "copy of a replica"

Compiled = Callable[[Function], Function]


@public_on_mesh
def reference_value_and_grad(
    pipeline: Pipeline, params: dict[str, Params], batch: Batch, state: dict[str, Tree] | None = None, key: Key = None
) -> Tree:
    """Return the result of `Pipeline.value_and_grad`, computed by the unsharded program.

    Args:
        pipeline: the pipeline with the stages, gradient accumulation, reduction and frozen leaves. Its schedule is
            ignored.
        params: `{group: pytree}`, whole weights.
        batch, key: as for `Pipeline.value_and_grad`.
        state: `{group: pytree}`, whole, if stages have state.

    Returns:
        `(loss, {group: pytree of gradients})`, with aux and new state as in `Pipeline.value_and_grad`. The loss is the
        mean over micro-batches and replicas. Gradients are reduced by the pipeline's `reduction`, and accumulated in at
        least float32. All results are on this instance's first device of the mesh. Each replica runs on its first IPU,
        and also on the first IPU of each other instance that it is on. Only the stages' own functions communicate, over
        axis "replica"; and arrays on several instances are gathered.

    Raises:
        ValueError: the batch does not fit, or a group of state or a key is missing or superfluous. Under
            `jax.debug_nans`: weights, batch or state hold a NaN.
    """
    check_pipeline(pipeline)
    _check_searchable(params=params, batch=batch, state=state)
    value, gradients, *new_state = unsharded_update(pipeline, StepArgs(params, batch, state, key))
    return value, jax.tree.map(lambda g, w: g.astype(jnp.result_type(w)), gradients, params), *new_state


@public_on_mesh
def reference_predict(
    pipeline: Pipeline,
    params: dict[str, Params],
    batch: Batch,
    state: dict[str, Tree] | None = None,
    key: Key = None,
    *,
    return_state: bool = False,
) -> Tree:
    """Return the result of `Pipeline.predict`, computed by the unsharded program.

    Args:
        pipeline: the pipeline with the stages.
        params: `{group: pytree}`, whole weights.
        batch, key, return_state: as for `Pipeline.predict`.
        state: `{group: pytree}`, whole, if stages have state.

    Returns:
        The outputs with leading dims (m,), or (replicas, m), on this instance's first device of the mesh; outputs that
        the pipeline keeps split have no padding here. With `return_state`, `(outputs, {group: pytree of state})`. It
        communicates like `reference_value_and_grad`.

    Raises:
        ValueError: as in `Pipeline.predict`.
    """
    check_pipeline(pipeline)
    stages, replicas = pipeline.stages, pipeline.replicas
    check_predictable(stages, replicas, return_state)
    check_key(key, stages, "prediction")
    check_prediction_batch(batch, replicas)
    given = StepArgs(params, batch, state, key)
    _check_whole(pipeline, given)
    outputs, new_state = _predicted(pipeline, whole(stages, "prediction"), given)
    return (outputs, new_state) if return_state else outputs


def unsharded_forward(forward: Forward, given: StepArgs, compiled: Compiled = jax.jit) -> tuple[Tree, Tree]:
    """Return the outputs and the new state of a forward pass, computed by the function itself on whole arguments."""
    function = forward.placement.of_batch(given.batch).function
    assert function is not None, "it was cut"
    return _predicted(forward, function.unsharded, given, compiled)


def _predicted(runs: Any, model: Function, given: StepArgs, compiled: Compiled = jax.jit) -> tuple[Tree, Tree]:
    def run_replica(args: StepArgs) -> Tree:
        def run_microbatch(state: Tree, index_and_microbatch: tuple[Value, Batch]) -> tuple[Tree, Tree]:
            inputs = _inputs(runs.stages, args.key, *index_and_microbatch)
            message, new_state, _ = model(args.params, NO_MESSAGE, inputs, state)
            return new_state, jax.tree.map(jnp.asarray, message.y)

        return lax.scan(run_microbatch, args.state, _numbered(args.batch))

    states, outputs = _on_first_ipus(runs, run_replica, given, compiled)
    return without_dims(outputs, runs.replicas), jax.tree.map(lambda leaf: leaf[0], states)


def unsharded_update(pipeline: Pipeline, given: StepArgs, compiled: Compiled = jax.jit) -> Tree:
    """Compute `reference_value_and_grad` by `compiled(program)`, with gradients in at least float32."""
    stages, replicas, m = pipeline.stages, pipeline.replicas, pipeline.options.gradient_accumulation
    check_key(given.key, stages, "training", taken=pipeline.placement.takes_key)
    check_batch(given.batch, replicas, m)
    frozen = _check_whole(pipeline, given).frozen
    placed = pipeline.placement.of_batch(given.batch)
    model = whole(stages, "reference") if placed.function is None else placed.function.unsharded
    leaves, treedef = jax.tree.flatten(given.params)

    def learning_of(args: StepArgs) -> Learning:
        of_args = zip(jax.tree.leaves(args.params), frozen, strict=True)
        return Learning([leaf for leaf, is_frozen in of_args if not is_frozen])

    def call(learning: Learning, args: StepArgs, inputs: MicrobatchInputs, state: Tree) -> tuple[Message, Tree, Tree]:
        following, of_args = iter(learning.summed), zip(jax.tree.leaves(args.params), frozen, strict=True)
        weights = [leaf if is_frozen else next(following) for leaf, is_frozen in of_args]
        return model(jax.tree.unflatten(treedef, weights), NO_MESSAGE, inputs, state)

    gradients, states, losses, aux = differentiated(pipeline, given, learning_of, call, compiled)
    leaves = put(leaves, SingleDeviceSharding(own_device(pipeline.mesh)))
    sums = iter(gradients.summed)
    of_leaves = [
        jnp.zeros_like(leaf) if is_frozen else next(sums).sum(0) for leaf, is_frozen in zip(leaves, frozen, strict=True)
    ]
    new_state = jax.tree.map(lambda s: s.mean(0) if jnp.issubdtype(s.dtype, jnp.floating) else s[0], states)
    loss = losses.sum(dtype=jnp.promote_types(losses.dtype, jnp.float32)) / (m * replicas)
    value = placed.loss_with_aux(loss, without_dims(aux, replicas))
    result = (value, jax.tree.unflatten(treedef, of_leaves))
    return (*result, new_state) if jax.tree.leaves(new_state) else result


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Learning:
    """Hold trained values, or their gradients: those that are summed over micro-batches, and those that are stacked."""

    summed: Tree
    stacked: Tree = ()


def differentiated(
    pipeline: Pipeline,
    given: StepArgs,
    learning_of: Callable[[StepArgs], Learning],
    call: Callable[[Learning, StepArgs, MicrobatchInputs, Tree], tuple[Message, Tree, Tree]],
    compiled: Compiled,
) -> tuple[Learning, Tree, Value, Tree]:
    """Differentiate a model for one micro-batch after the other, each replica on its first IPU.

    Args:
        pipeline: the pipeline whose stages the model runs.
        given: whole arguments.
        learning_of: returns the values by which the model is differentiated, from the arguments of a replica.
        call: runs the model: (these values, arguments of a replica, inputs, state) -> (message, new state, aux).
        compiled: as in `unsharded_update`.

    Returns:
        The gradients, in at least float32; the new state; losses; and the aux by stage. Leaves have leading dims
        (replicas,); stacked gradients, losses and aux (replicas, M).
    """
    stages, count = pipeline.stages, pipeline.options.gradient_accumulation * pipeline.replicas
    cotangent = 1.0 if pipeline.options.reduction == "sum" else 1.0 / count
    wide = lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))

    def run_replica(args: StepArgs) -> Tree:
        learning = learning_of(args)

        def run_microbatch(carry: Tree, index_and_microbatch: tuple[Value, Batch]) -> tuple[Tree, Tree]:
            sums, state = carry
            inputs = _inputs(stages, args.key, *index_and_microbatch)

            def loss_of(learning: Learning) -> tuple[Value, Tree]:
                message, new_state, aux = call(learning, args, inputs, state)
                loss, aux = loss_and_aux(message, aux, stages[-1])
                return loss, (new_state, aux)

            loss, vjp, (state, aux) = jax.vjp(loss_of, learning, has_aux=True)
            (gradients,) = jax.tree.map(wide, vjp(jnp.full((), cotangent, loss.dtype)))
            sums = jax.tree.map(jnp.add, sums, gradients.summed)
            return (sums, state), (gradients.stacked, loss, aux)

        zeros = jax.tree.map(lambda leaf: jnp.zeros_like(wide(leaf)), learning.summed)
        (sums, new_state), (stacked, *others) = lax.scan(run_microbatch, (zeros, args.state), _numbered(args.batch))
        return Learning(sums, stacked), new_state, *others

    return _on_first_ipus(pipeline, run_replica, given, compiled)


def check_pipeline(pipeline: Any) -> None:
    """Raise `ValueError` unless it is a `Pipeline`."""
    if not isinstance(pipeline, Pipeline):
        raise ValueError(f"pipeline is a {type(pipeline).__name__}: give a Pipeline, such as step.model")


def _check_whole(pipeline: Pipeline, given: StepArgs) -> PackedLayout:
    """Return the layout of whole weights, or raise the `ValueError` that `shard` or `shard_state` raises for them."""
    pipeline.placement.state.layout({} if given.state is None else given.state)
    return pipeline.placement.weights.layout(given.params)


def _check_searchable(**inputs: Tree) -> None:
    """Raise `ValueError` if jax searches for the operation that makes a NaN, but an input holds one already."""
    if not jax.config.values["jax_debug_nans"]:
        return
    for what, where in numbers_that(np.isnan, inputs):
        raise ValueError(f"{where}, but jax.debug_nans finds a NaN that an operation makes: give {what} without a NaN")


def numbers_that(are_bad: Callable[[Value], Value], inputs: Mapping[str, Tree]) -> Iterator[tuple[str, str]]:
    """Yield per float leaf with a bad number the input's name, and the first such number.

    Arrays of which other instances hold a part are not looked at.

    >>> list(numbers_that(np.isnan, {"batch": {"x": jnp.array([[1, 2], [3, np.nan]])}}))
    [('batch', "batch['x'][1, 1] is nan")]
    """
    for what, tree in inputs.items():
        for path, leaf in jax.tree.leaves_with_path(tree):
            is_float = jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating)
            if is_float and getattr(leaf, "is_fully_addressable", True) and are_bad(leaf := np.asarray(leaf)).any():
                at = np.argwhere(are_bad(leaf))[0].tolist()
                yield what, f"{what}{jax.tree_util.keystr(path)}{at or ''} is {leaf[tuple(at)].item()}"


def _numbered(batch: Batch) -> tuple[Value, Batch]:
    return jnp.arange(len(jax.tree.leaves(batch)[0])), batch


def _inputs(stages: tuple[Stage, ...], key: Key, index: Value, microbatch: Batch) -> MicrobatchInputs:
    keys = keys_of(key, lax.axis_index(REPLICA_AXIS), index, range(len(stages)), stages)
    return MicrobatchInputs(microbatch, keys)


def _on_first_ipus(
    pipeline: Pipeline | Forward, run_replica: Callable[[StepArgs], Any], given: StepArgs, compiled: Compiled
) -> Tree:
    """Return the results of all replicas, stacked, on this instance's first device."""
    check_context_mesh()
    copies, first_ipu = _copies(pipeline.mesh), SingleDeviceSharding(own_device(pipeline.mesh))
    replicated, per_replica = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
    params, batch, state, key = given.entered(pipeline.replicas)
    params, state, key = put((params, {} if state is None else state, key), NamedSharding(copies, replicated))
    args = StepArgs(params, put(batch, NamedSharding(copies, per_replica)), state, key)

    def stacked(args: StepArgs) -> Tree:
        with status.tracing("the unsharded program"):
            return jax.tree.map(lambda leaf: leaf[None], run_replica(args.of_replica()))

    specs, names = (StepArgs(replicated, per_replica, replicated, replicated),), {REPLICA_AXIS, IPU_AXIS, _COPY_AXIS}
    how = {"in_specs": specs, "out_specs": per_replica, "axis_names": names, "check_vma": False}
    mapped = jax.shard_map(stacked, mesh=copies, **how)
    with status.SILENT:  # until the program runs
        results = compiled(mapped)(args)
    return put(results, first_ipu)


def _copies(mesh: Mesh) -> Mesh:
    """Return a mesh of the replicas' first devices, (replicas, 1, copies), and of size 1 in further axes.

    If a replica is on several instances, each of them has a copy of it: the program runs on all instances, and each
    gets the results. The copies do not differ otherwise.
    """
    rows: list[list[Device]] = []
    of_replicas = mesh.devices.reshape(len(mesh.devices), -1)
    for row in of_replicas:
        first_of: dict[int, Any] = {}
        for device in row:
            first_of.setdefault(device.process_index, device)
        first = list(first_of.values())
        rows.append([*first, *(device for device in row if device not in first)])
    copies = max(len({device.process_index for device in row}) for row in of_replicas)
    further = further_axes(mesh)
    devices = np.array([row[:copies] for row in rows]).reshape(len(rows), 1, copies, *[1] * len(further))
    names = (REPLICA_AXIS, IPU_AXIS, _COPY_AXIS, *further)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

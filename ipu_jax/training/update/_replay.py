"""Run F and B of each stage of an update alone, one after the other, and flag the values that are not finite.

    micro-batch 0                      F of stage 0 -> F of 1 -> F of 2                         weights, batch, state,
    micro-batch 1                      F of stage 0 -> F of 1 -> F of 2                         outputs, losses
    if all losses are finite, again
    micro-batch 0                      F of stage 0 -> F of 1 -> F of 2 -> B of 2 -> B of 1     gradients, until the
                                                                                                first that is not finite

The host calls one program per task, with the update's weights, keys, state and loss scale. All IPUs of all replicas run
it. So a concurrent stage, or one that communicates over "replica", does what it does in the update. All IPUs get the
weights of a local stage and run it, so that it needs no guard; the results of the stage's own IPU count. Beside its own
part, an IPU holds the weights of one stage, the state of all, and the messages of one micro-batch.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from ipu_jax.base import facts
from ipu_jax.base.annotations import Batch, Key, Tree, Value
from ipu_jax.base.jaxprs import shape_of
from ipu_jax.base.keys import with_keys, without_keys
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.layout import WHOLE, Group, Leaf, PackedLayout
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.axes import over_ipus
from ipu_jax.core.mesh.collectives import broadcast, reduced
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.instances import on_host
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.programs.segment import NO_MESSAGE, MicrobatchInputs, call_segment, keys_of, one_by_one
from ipu_jax.core.programs.segment_program import split_floats
from ipu_jax.core.step_args import with_dims
from ipu_jax.training.update._accumulate import counts_of
from ipu_jax.training.update._model import Model
from ipu_jax.training.update._precision import current_scale, widened
from ipu_jax.training.update.nonfinite import NonFinite, StageFlags, UpdateFlags, first_nonfinite
from ipu_jax.training.update.state import TrainState

_OF_REPLICA, _OF_IPU = PartitionSpec(REPLICA_AXIS), PartitionSpec((REPLICA_AXIS, IPU_AXIS))


class _Task(NamedTuple):
    """The arguments of F or B of a stage. Leaves of `x` and `state` have a row per IPU.

    Attributes:
        params: the weights on the IPUs.
        batch: leaves (replicas, M, micro-batch, ...).
        key: the key of the update, or None.
        microbatch: the number of the micro-batch.
        x: the message to the stage.
        state: the stage's state before the micro-batch, by group.
    """

    params: Sharded
    batch: Batch
    key: Key
    microbatch: Value
    x: Tree
    state: dict[str, Tree]

    @property
    def specs(self) -> "_Task":
        return _Task(packing.specs_of(self.params.layout), _OF_REPLICA, WHOLE, WHOLE, _OF_IPU, _OF_IPU)


class Replay:
    """Finds what was not finite in updates of a step.

    Args:
        model: the model with all its replicas, in the step's precision.
        options: the step's options.
    """

    def __init__(self, model: Model, options: TrainOptions):
        self._model, self._options, self._mesh = model, options, model.mesh
        if IPU_AXIS not in self._mesh.shape:
            axes = (REPLICA_AXIS, IPU_AXIS)
            self._mesh = Mesh(self._mesh.devices[:, None], axes, axis_types=(AxisType.Auto, AxisType.Auto))
        self._segments = one_by_one(model.stages)
        self._enter, self._are_finite = jax.jit(self._entered), jax.jit(self._sums_are_finite)
        self._run_forward = jax.jit(self._forward, static_argnums=(0, 1))
        self._run_backward = jax.jit(self._backward, static_argnums=0)

    @facts.during("finding what was not finite")
    def find(self, state: TrainState, batch: Batch, step: int) -> NonFinite | None:
        """Return the first value that is not finite in an update, or None if there is none.

        Args:
            state: the state before the update; its `step` is not read.
            batch: the batch of this update, as a user gives it.
            step: the number of the update, from 1.
        """
        params, layout = self._model.sharded(state.params), state.stages and state.stages.layout
        key = jax.random.fold_in(state.key, step - 1) if self._model.random else None
        batch, before, sums = self._enter(params, batch, state.stages)
        first, states, forward, losses = _Task(params, batch, key, 0, NO_MESSAGE, {}), before, [], []
        for m in range(self._model.m):
            _, states, flags, loss = self._through(first._replace(microbatch=m), states, layout)
            forward.append(jax.tree.map(on_host, flags))
            losses.append(on_host(loss))
        backward, is_finite = [[{}] * len(self._segments)], True
        if np.isfinite(losses).all():
            scale = current_scale(self._options, state.scale)
            cotangent = self._model.loss_cotangent(scale, weighted=self._options.weighted)
            backward, states = [], before
            for m in range(self._model.m):
                tasks, states, *_ = self._through(first._replace(microbatch=m), states, layout)
                sums, flags = self._back_through(tasks, sums, cotangent)
                backward.append(jax.tree.map(on_host, flags))
                if any(map(np.any, jax.tree.leaves(backward[-1]))):
                    break
            else:
                is_finite = bool(on_host(self._are_finite(sums)))
        both = zip(_of_microbatches(forward), _of_microbatches(backward), strict=True)
        stages = [StageFlags(**flags, gradients=gradients) for flags, gradients in both]
        names = [segment.name for segment in self._segments] if isinstance(state.params, Sharded) else None
        return first_nonfinite(step, UpdateFlags(np.stack(losses, 1), stages, names, is_finite))

    def _through(
        self, task: _Task, states: dict[str, Tree], layout: PackedLayout | None
    ) -> tuple[list[_Task], dict[str, Tree], list[Tree], Value]:
        """Run F of all stages: return their tasks, the new state by group, their flags, and the loss."""
        tasks, flags, loss = list[_Task](), list[Tree](), None
        for number, segment in enumerate(self._segments):
            tasks.append(task._replace(state={name: states[name] for name in segment.state_groups}))
            paths = tuple(leaf.path for name in segment.state_groups if layout for leaf in layout.group(name).leaves)
            (y, new), found, loss = self._run_forward(number, paths, tasks[-1])
            task, states = task._replace(x=y), {**states, **new}
            flags.append(found)
        return tasks, states, flags, loss

    def _back_through(self, tasks: list[_Task], sums: list[Value], cotangent: Value) -> tuple[list[Value], list[Tree]]:
        """Run B of all stages, the last one first: return the sums of gradients and the stages' flags."""
        dy, flags = list[Value](), list[Tree]()
        for number, task in reversed(list(enumerate(tasks))):
            (dy, sums), found = self._run_backward(number, task, dy, sums, cotangent)
            flags.insert(0, found)
        return sums, flags

    # the programs

    def _entered(self, params: Sharded, batch: Batch, state: Sharded | None) -> Tree:
        """Return the batch with all dims; the whole state by group, and zeros as sums of gradients, with rows."""

        def program(params: Sharded, batch: Batch, state: Sharded | None) -> Tree:
            zeros = [jnp.zeros_like(widened(array)) for array in packing.arrays_of(params)]
            groups = () if state is None else state.layout.groups
            states = {group.name: _whole(packing.arrays_of(state), group) for group in groups}
            return batch, _row(states), _row(zeros)

        in_specs = (packing.specs_of(params.layout), _OF_REPLICA, state and packing.specs_of(state.layout))
        mapped = over_ipus(program, self._mesh, in_specs=in_specs, out_specs=(_OF_REPLICA, _OF_IPU, _OF_IPU))
        return mapped(params, with_dims(batch, self._model.replicas), state)

    def _forward(self, number: int, state_paths: tuple[str, ...], task: _Task) -> Tree:
        """Run F of a stage: return `(y, new state)` with rows, the flags of its values, and of the last stage the loss.

        Flags and losses are (replicas,).
        """
        segment, is_last = self._segments[number], number == len(self._segments) - 1
        names = [f"stages{path.removeprefix('state')}" for path in state_paths]

        def program(task: _Task) -> Tree:
            weights, x, inputs, state = self._arguments(number, task)
            results = call_segment(segment, weights, x, inputs, state, is_last)
            outputs = jax.tree.leaves(results.y)
            if is_last and self._options.weighted:
                outputs.append(counts_of(results.aux.get(segment.name), dims=0))
            batch = jax.tree.leaves_with_path(inputs.microbatch)
            flags = {
                "weights": _flags((leaf.path, w) for leaf, w in self._leaves(number, task, weights)),
                "batch": _flags((f"batch{jax.tree_util.keystr(path)}", leaf) for path, leaf in batch),
                "state": _flags(zip(names, jax.tree.leaves(state), strict=True)),
                "new_state": _flags(zip(names, jax.tree.leaves(results.state), strict=True)),
                "outputs": _flags((str(i), leaf) for i, leaf in enumerate(outputs)),
            }
            loss = lax.all_gather(_of_place(segment.place, widened(results.y)), REPLICA_AXIS) if is_last else None
            own = _of_place(segment.place, (results.y, results.state))
            return _row(own), _of_replicas(segment.place, flags), loss

        out_specs = (_OF_IPU, WHOLE, WHOLE)
        return over_ipus(program, self._mesh, in_specs=(task.specs,), out_specs=out_specs)(task)

    def _backward(self, number: int, task: _Task, dy: list[Value], sums: list[Value], cotangent: Value) -> Tree:
        """Run B of a stage: return `(dx, sums)` with rows, and the flags of its gradients, (replicas,).

        `dy` and `dx` list the floating leaves of the message after and before the stage.
        """
        segment, is_last = self._segments[number], number == len(self._segments) - 1
        # the step computes the gradient of x only if an earlier stage has trained weights
        groups = {name for earlier in self._segments[:number] for name in earlier.groups}
        reads_dx = any(not leaf.frozen for name in groups for leaf in task.params.layout.group(name).leaves)

        def program(task: _Task, dy: list[Value], sums: list[Value], cotangent: Value) -> Tree:
            weights, x, inputs, state = self._arguments(number, task)
            leaves = self._leaves(number, task, weights)
            floats, others, join = split_floats(x)

            def differentiable(trained: list[Value], floats: list[Value]) -> list[Value]:
                following = iter(trained)
                values = [w if leaf.frozen else next(following) for leaf, w in leaves]
                own = jax.tree.unflatten(jax.tree.structure(weights), values)
                return split_floats(call_segment(segment, own, join(floats, others), inputs, state, is_last).y)[0]

            y, vjp = jax.vjp(differentiable, [w for leaf, w in leaves if not leaf.frozen], floats)
            dy = [jnp.full((), cotangent, y[0].dtype)] if is_last else _own(dy)
            if segment.place is None:  # each IPU has a part of the gradients of what all of them have whole
                dy = [leaf / lax.axis_size(IPU_AXIS) for leaf in dy]
            gradients, dx = vjp(dy)
            dx = lax.psum(dx, IPU_AXIS) if segment.place is None else _of_place(segment.place, dx)
            trained = [leaf for leaf, _ in leaves if not leaf.frozen]
            named = [(leaf.path, g) for leaf, g in zip(trained, gradients, strict=True)]
            flags = _flags([*named, *(("its input", leaf) for leaf in dx if reads_dx)])
            added = _own(sums)
            for leaf, gradient in zip(trained, gradients, strict=True):
                added = _with_added(added, leaf, widened(gradient), is_part=segment.place is None)
            return _row((dx, added)), _of_replicas(segment.place, flags)

        in_specs, out_specs = (task.specs, _OF_IPU, _OF_IPU, WHOLE), (_OF_IPU, WHOLE)
        mapped = over_ipus(program, self._mesh, in_specs=in_specs, out_specs=out_specs)
        return mapped(task, dy, sums, cotangent)

    def _sums_are_finite(self, sums: list[Value]) -> Value:
        """Return whether the sums of gradients over the replicas are finite. Communicates them, and one number."""

        def program(sums: list[Value]) -> Value:
            are_bad = [jnp.any(~jnp.isfinite(total)) for total in reduced(lax.psum, sums, REPLICA_AXIS)]
            return lax.pmax(jnp.any(jnp.asarray(are_bad)).astype(jnp.int32), IPU_AXIS) == 0

        return over_ipus(program, self._mesh, in_specs=(_OF_IPU,), out_specs=WHOLE)(sums)

    def _arguments(self, number: int, task: _Task) -> tuple[dict[str, Tree], Tree, MicrobatchInputs, dict[str, Tree]]:
        """Return a stage's arguments in its program: weights, message, inputs and state."""
        segment, arrays, groups = self._segments[number], packing.arrays_of(task.params), task.params.layout.group
        weights = collections.OrderedDict((name, _whole(arrays, groups(name))) for name in segment.groups)
        microbatch = jax.tree.map(lambda leaf: leaf[0, task.microbatch], task.batch)
        keys = keys_of(task.key, lax.axis_index(REPLICA_AXIS), task.microbatch, [number], segment.stages)
        return weights, _own(task.x), MicrobatchInputs(microbatch, keys), _own(task.state)

    def _leaves(self, number: int, task: _Task, weights: dict[str, Tree]) -> list[tuple[Leaf, Value]]:
        """Return the leaves of a stage's weights, with their values."""
        leaves = (leaf for name in self._segments[number].groups for leaf in task.params.layout.group(name).leaves)
        return list(zip(leaves, jax.tree.leaves(weights), strict=True))


def _of_microbatches(flags: Sequence[Sequence[Tree]]) -> list[Tree]:
    """Return per stage flags (replicas, M), from the flags of each micro-batch and stage, (replicas,)."""
    return [jax.tree.map(lambda *of: np.stack(of, 1), *of_stage) for of_stage in zip(*flags, strict=True)]


# in a program


def _row(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def _own(rows: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf[0], rows)


def _whole(arrays: Sequence[Value], group: Group) -> Tree:
    """Return a group's tree on all IPUs of the replica; of a leaf that is split, each IPU's shard."""
    return group.tree_of(lambda leaf: _of_place(leaf.ipu, packing.leaf_in(arrays[leaf.array], leaf)))


def _of_place(place: int | None, tree: Tree) -> Tree:
    """Return the tree of this IPU of the replica; with None, each IPU's own."""
    if place is None:
        return tree
    return jax.tree.map(lambda leaf: with_keys(broadcast(place, without_keys(leaf)), shape_of(leaf)), tree)


def _with_added(sums: Sequence[Value], leaf: Leaf, gradient: Value, *, is_part: bool) -> list[Value]:
    """Return this IPU's sums with a gradient added; `is_part` of what the IPUs add up, unless the leaf is split."""
    if is_part and leaf.split is None:
        gradient = lax.psum(gradient, IPU_AXIS)
    if leaf.ipu is not None:
        gradient = jnp.where(lax.axis_index(IPU_AXIS) == leaf.ipu, gradient, 0)
    total = packing.leaf_in(sums[leaf.array], leaf) + gradient
    return packing.write(sums, Group("", jax.tree.structure([0]), (leaf,)), [total], jnp.int32(0))


def _flags(named: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return, by name, whether a floating value is not finite. Several values can have one name."""
    flags: dict[str, Value] = collections.OrderedDict()  # jax would sort the names of a dict
    for name, value in named:
        if jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            flags[name] = jnp.any(~jnp.isfinite(value)) | flags.get(name, False)
    return flags


def _of_replicas(place: int | None, flags: Tree) -> Tree:
    """Return the flags of the replicas, (replicas,) each: of a stage's IPU, or of any IPU for a concurrent stage."""
    leaves, treedef = jax.tree.flatten(flags)
    found = jnp.asarray(leaves, jnp.int32).reshape(len(leaves))
    found = lax.pmax(found, IPU_AXIS) if place is None else broadcast(place, found)
    return jax.tree.unflatten(treedef, list(lax.all_gather(found, REPLICA_AXIS, axis=1) > 0))

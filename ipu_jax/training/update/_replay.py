"""Run F and B of each stage of an update alone, one after the other, to name what was not finite.

    micro-batch 0    F of stage 0 -> F of 1 -> F of 2 -> loss -> B of 2 -> B of 1 -> B of 0
    micro-batch 1    F of stage 0 -> F of 1 -> F of 2 -> loss -> B of 2 -> B of 1 -> B of 0

The host calls one program per task, with the update's weights, keys, state and loss scale. It returns the largest size
in each value that the task reads or returns. The sizes of all gradients bound their sums.

All IPUs of all replicas run a task. So a concurrent stage, or one that communicates over "replica", does what it does
in the update. All IPUs get the weights of a local stage and run it, so that it needs no guard; the results of the
stage's own IPU count. Beside its own part, an IPU holds the weights of one stage, and the messages of one micro-batch.
"""

import collections
import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from ipu_jax.base import facts
from ipu_jax.base.annotations import Batch, Tree, Value
from ipu_jax.base.jaxprs import shape_of
from ipu_jax.base.keys import with_keys, without_keys
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.leaf import WHOLE, Leaf
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.axes import broadcast, over_ipus
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.instances import on_host
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.programs.segment import NO_MESSAGE, MicrobatchInputs, Segment, call_segment, keys_of, one_by_one
from ipu_jax.core.programs.segment_program import split_floats, split_marked
from ipu_jax.core.step_args import StepArgs
from ipu_jax.training.update._precision import current_scale, widened
from ipu_jax.training.update.models import Model
from ipu_jax.training.update.nonfinite import NonFinite, StageFlags, first_nonfinite
from ipu_jax.training.update.state import TrainState

_OF_REPLICA, _ROWS = PartitionSpec(REPLICA_AXIS), PartitionSpec((REPLICA_AXIS, IPU_AXIS))


class Replay:
    """Finds what was not finite in updates of a step.

    Between two programs, a value has a row per IPU of all replicas.

    Args:
        model: the model with all its replicas, in the step's precision.
        options: the step's options.
    """

    def __init__(self, model: Model, options: TrainOptions):
        self._model, self._options, self._mesh = model, options, model.mesh
        if IPU_AXIS not in self._mesh.shape:
            axes = (REPLICA_AXIS, IPU_AXIS)
            self._mesh = Mesh(self._mesh.devices[:, None], axes, axis_types=(AxisType.Auto, AxisType.Auto))
        self._segments: Sequence[Segment] = ()  # of the last update that was run
        self._enter, self._run = jax.jit(self._entered), jax.jit(self._task, static_argnums=0)

    @facts.during("finding what was not finite")
    def find(self, state: TrainState, batch: Batch, step: int) -> NonFinite | None:
        """Return the first value that is not finite in an update, or None if there is none.

        Args:
            state: the state before the update; its `step` is not read.
            batch: the batch of this update, as a user gives it.
            step: the number of the update, from 1.
        """
        key = jax.random.fold_in(state.key, step - 1) if self._model.random else None
        chosen = self._model.scheduled(lambda: StepArgs(state.params, batch, state.stages, key))
        self._segments = one_by_one(self._model.on(chosen).stages)
        params = Sharded(jax.tree.leaves(state.params), self._model.layout(state.params))
        given = StepArgs(params, batch, state.stages or Sharded([], PackedLayout()), key)
        args, dloss = self._enter(given, current_scale(self._options, state.scale))
        losses, sizes = [], []
        for m in range(self._model.m):
            args, loss, of_stages = self._through(m, args, dloss)
            losses.append(on_host(loss).reshape(self._model.replicas, -1)[:, 0])
            sizes.append(of_stages)
        of_stages = [jax.tree.map(lambda *of: np.stack(of, 1), *of_stage) for of_stage in zip(*sizes, strict=True)]
        with np.errstate(over="ignore"):  # no sum of gradients is larger, also of the parts on a replica's IPUs
            gradients = jax.tree.leaves([of_stage["gradients"] for of_stage in of_stages])
            bound = self._mesh.shape[IPU_AXIS] * sum(size.sum() for size in gradients)
        stages = [StageFlags(**of) for of in jax.tree.map(lambda size: ~np.isfinite(size), of_stages)]
        names = [segment.name for segment in self._segments] if isinstance(state.params, Sharded) else None
        return first_nonfinite(step, np.stack(losses, 1), stages, names, sums_are_finite=bool(np.isfinite(bound)))

    def _through(self, m: int, args: StepArgs, dy: list[Value]) -> tuple[StepArgs, Value, list[Tree]]:
        """Run F of all stages, and B of all stages, for one micro-batch.

        Returns:
            The arguments with the new state, the loss, and per stage the sizes of its values, by kind.
        """
        x, tasks, sizes = NO_MESSAGE, list[tuple[StepArgs, Tree]](), list[Tree]()
        for number in range(len(self._segments)):
            tasks.append((args, x))
            (x, state), found = self._run(number, m, args, x)
            args = args._replace(state=state)
            sizes.append(self._of_replicas(number, found))
        for number, task in reversed([*enumerate(tasks)]):
            dy, found = self._run(number, m, *task, dy)
            sizes[number] |= self._of_replicas(number, found)
        return args, x, sizes

    def _of_replicas(self, number: int, sizes: Tree) -> Tree:
        """Return the sizes of a stage's values on each replica, (replicas,): the largest of its IPUs."""
        place = self._segments[number].place
        by_ipu = jax.tree.map(lambda rows: on_host(rows).reshape(self._model.replicas, -1), sizes)
        return jax.tree.map(lambda size: size.max(1) if place is None else size[:, place], by_ipu)

    # the programs

    def _entered(self, given: StepArgs, scale: Value) -> tuple[StepArgs, list[Value]]:
        """Return the arguments with all dims, and with rows of state; and the cotangent of a loss."""
        dloss = self._model.loss_cotangent(scale, weighted=self._options.weighted)
        program = lambda batch, state, dloss: (batch, _rows((packing.arrays_of(state), [dloss])))
        in_specs = (_OF_REPLICA, packing.specs_of(given.state.layout), WHOLE)
        mapped = over_ipus(program, self._mesh, in_specs=in_specs, out_specs=(_OF_REPLICA, _ROWS))
        batch, (arrays, dloss) = mapped(given.entered(self._model.replicas).batch, given.state, dloss)
        return given._replace(batch=batch, state=Sharded(arrays, given.state.layout)), dloss

    def _task(self, number: int, m: Value, given: StepArgs, x: Tree, dy: list[Value] | None = None) -> Tree:
        """Run F of a stage for micro-batch `m`, or its B from the cotangents of the floating leaves of y.

        Returns:
            `(y, new state)`, or the gradients of the floating leaves of x; and the sizes of what F reads and returns,
            or of the gradients, by kind. The y of the last stage is the loss.
        """

        def program(m: Value, args: StepArgs, x: Tree, dy: list[Value] | None) -> Tree:
            args, x, dy = args.of_replica(), *_own((x, dy))
            return _rows(self._forward(number, m, args, x) if dy is None else self._backward(number, m, args, x, dy))

        args = StepArgs(packing.specs_of(given.params.layout), _OF_REPLICA, _ROWS, WHOLE)
        mapped = over_ipus(program, self._mesh, in_specs=(WHOLE, args, _ROWS, _ROWS), out_specs=_ROWS)
        return mapped(m, given, x, dy)

    def _arguments(self, number: int, m: Value, args: StepArgs) -> tuple[Tree, MicrobatchInputs, Tree]:
        """Return a stage's weights, inputs and state."""
        segment = self._segments[number]
        weights = _read(segment.groups, packing.arrays_of(args.params), args.params.layout)
        keys = keys_of(args.key, lax.axis_index(REPLICA_AXIS), m, [number], segment.stages)
        inputs = MicrobatchInputs(jax.tree.map(lambda leaf: leaf[m], args.batch), keys)
        return weights, inputs, _read(segment.state_groups, _own(args.state.arrays), args.state.layout)

    def _forward(self, number: int, m: Value, args: StepArgs, x: Tree) -> Tree:
        segment, is_last, layout = self._segments[number], number == len(self._segments) - 1, args.state.layout
        weights, inputs, state = self._arguments(number, m, args)
        results = call_segment(segment, weights, x, inputs, state, is_last)
        batch = jax.tree.leaves_with_path(inputs.microbatch)
        of_state = [f"stages{leaf.path.removeprefix('state')}" for leaf in _leaves(segment.state_groups, layout)]
        sizes = {
            "weights": _sizes((leaf.path for leaf in _leaves(segment.groups, args.params.layout)), weights),
            "batch": _sizes((f"batch{jax.tree_util.keystr(path)}" for path, _ in batch), inputs.microbatch),
            "state": _sizes(of_state, state),
            "new_state": _sizes(of_state, results.state),
            "outputs": _sizes(map(str, itertools.count()), results.y),
        }
        states = before = _own(args.state.arrays)
        for name in segment.state_groups:
            states = packing.write(states, layout.group(name), results.state[name], jnp.int32(0))
        if segment.place is not None:
            is_here = lax.axis_index(IPU_AXIS) == segment.place
            states = [jnp.where(is_here, *both) for both in zip(states, before, strict=True)]
        y = _of_place(segment.place, widened(results.y) if is_last else results.y)
        return (y, Sharded(states, layout)), sizes

    def _backward(self, number: int, m: Value, args: StepArgs, x: Tree, dy: list[Value]) -> Tree:
        segment, is_last, layout = self._segments[number], number == len(self._segments) - 1, args.params.layout
        weights, inputs, state = self._arguments(number, m, args)
        leaves = _leaves(segment.groups, layout)
        trained, frozen, join = split_marked(weights, [not leaf.frozen for leaf in leaves])
        floats, others, join_x = split_floats(x)

        def call(trained: list[Value], floats: list[Value]) -> list[Value]:
            given = join(trained, frozen), join_x(floats, others), inputs, state
            return split_floats(call_segment(segment, *given, is_last).y)[0]

        y, vjp = jax.vjp(call, trained, floats)
        parts = 1 if segment.place is not None else lax.axis_size(IPU_AXIS)
        gradients, dx = vjp([leaf.astype(of.dtype) / parts for leaf, of in zip(dy, y, strict=True)])
        dx = lax.psum(dx, IPU_AXIS) if segment.place is None else _of_place(segment.place, dx)
        sizes = _sizes((leaf.path for leaf in leaves if not leaf.frozen), gradients)
        earlier = [name for before in self._segments[:number] for name in before.groups]
        if not all(leaf.frozen for leaf in _leaves(earlier, layout)):  # otherwise the step has no such gradient
            sizes |= _sizes(itertools.repeat("its input"), dx)
        return dx, {"gradients": sizes}


def _leaves(names: Iterable[str], layout: PackedLayout) -> list[Leaf]:
    return [leaf for name in names for leaf in layout.group(name).leaves]


# in a program


def _rows(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def _own(rows: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf[0], rows)


def _read(names: Iterable[str], arrays: Sequence[Value], layout: PackedLayout) -> dict[str, Tree]:
    """Return the trees of groups on all IPUs of the replica; of a leaf that is split, each IPU has its shard."""
    read = lambda leaf: _of_place(leaf.ipu, packing.leaf_in(arrays[leaf.array], leaf))
    return collections.OrderedDict((name, layout.group(name).tree_of(read)) for name in names)


def _of_place(place: int | None, tree: Tree) -> Tree:
    """Return the tree of this IPU of the replica; with None, each IPU's own."""
    if place is None:
        return tree
    return jax.tree.map(lambda leaf: with_keys(broadcast(place, without_keys(leaf)), shape_of(leaf)), tree)


def _sizes(names: Iterable[str], tree: Tree) -> dict[str, Value]:
    """Return, by name, the largest size in the floating leaves of this name: it is finite if all of them are."""
    sizes: dict[str, Value] = collections.OrderedDict()  # jax would sort the names of a dict
    for name, value in zip(names, jax.tree.leaves(tree), strict=False):
        if jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            # no NaN, which the maximum over the devices of an IPU loses
            size = jnp.max(jnp.where(jnp.isfinite(value), jnp.abs(value), jnp.inf), initial=0)
            sizes[name] = jnp.maximum(widened(size), sizes.get(name, 0))
    return sizes

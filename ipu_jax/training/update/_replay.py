"""Run F and B of each stage of an update alone, one after the other, to name what was not finite.

    micro-batch 0                    F of stage 0 -> F of 1 -> F of 2                       weights, batch, state,
    micro-batch 1                    F of stage 0 -> F of 1 -> F of 2                       outputs, losses
    if all losses are finite, again
    micro-batch 0                    F of stage 0 -> F of 1 -> F of 2 -> B of 2 -> B of 1   gradients, until one is bad

The host calls one program per task, with the update's weights, keys, state and loss scale. All IPUs of all replicas run
it. So a concurrent stage, or one that communicates over "replica", does what it does in the update. All IPUs get the
weights of a local stage and run it, so that it needs no guard; the results of the stage's own IPU count. Beside its own
part, an IPU holds the weights of one stage, and the messages of one micro-batch.
"""

import collections
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
from ipu_jax.core.layout.layout import WHOLE, PackedLayout
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.axes import over_ipus
from ipu_jax.core.mesh.collectives import broadcast
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.instances import on_host
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.programs.segment import NO_MESSAGE, MicrobatchInputs, call_segment, keys_of, one_by_one
from ipu_jax.core.programs.segment_program import split_floats
from ipu_jax.core.step_args import StepArgs
from ipu_jax.training.update._accumulate import counts_of
from ipu_jax.training.update._model import Model
from ipu_jax.training.update._precision import current_scale, widened
from ipu_jax.training.update.nonfinite import NonFinite, StageFlags, UpdateFlags, first_nonfinite
from ipu_jax.training.update.state import TrainState

_INPUT = "its input"
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
        self._segments = one_by_one(model.stages)
        self._enter, self._run = jax.jit(self._entered), jax.jit(self._task, static_argnums=(0, 1))

    @facts.during("finding what was not finite")
    def find(self, state: TrainState, batch: Batch, step: int) -> NonFinite | None:
        """Return the first value that is not finite in an update, or None if there is none.

        Args:
            state: the state before the update; its `step` is not read.
            batch: the batch of this update, as a user gives it.
            step: the number of the update, from 1.
        """
        key = jax.random.fold_in(state.key, step - 1) if self._model.random else None
        given = StepArgs(self._model.sharded(state.params), batch, state.stages or Sharded([], PackedLayout()), key)
        start, dloss = self._enter(given, current_scale(self._options, state.scale))
        count, args = len(self._segments), start
        losses, forward, backward = [], [], [[{}] * count]
        for m in range(self._model.m):
            _, args, loss, sizes = self._through(m, args)
            losses.append(on_host(loss).reshape(self._model.replicas, -1)[:, 0])
            forward.append(sizes)
        if np.isfinite(losses).all():
            args, backward = start, []
            for m in range(self._model.m):
                tasks, args, *_ = self._through(m, args)
                dy, sizes = dloss, [{}] * count
                for number in reversed(range(count)):
                    dy, found = self._run(number, "B", m, *tasks[number], dy)
                    sizes[number] = self._of_replicas(number, found)
                backward.append(sizes)
                if not np.isfinite([size for of in sizes for size in of.values()]).all():
                    break
        sums = collections.Counter[str]()
        for name, size in (of for sizes in backward for of_stage in sizes for of in of_stage.items()):
            with np.errstate(over="ignore"):
                sums[name] += size.sum() * (name != _INPUT)
        both = zip(_of_microbatches(forward), _of_microbatches(backward), strict=True)
        stages = [StageFlags(**flags, gradients=gradients) for flags, gradients in both]
        names = [segment.name for segment in self._segments] if isinstance(state.params, Sharded) else None
        is_finite = bool(np.isfinite([*sums.values()]).all())
        return first_nonfinite(step, UpdateFlags(np.stack(losses, 1), stages, names, is_finite))

    def _through(self, m: int, args: StepArgs) -> tuple[list[tuple[StepArgs, Tree]], StepArgs, Value, list[Tree]]:
        """Run F of all stages.

        Returns:
            Per stage its arguments, and the message to it; the arguments with the new state; the loss; per stage the
            sizes of its values.
        """
        x, tasks, sizes = NO_MESSAGE, list[tuple[StepArgs, Tree]](), list[Tree]()
        for number in range(len(self._segments)):
            tasks.append((args, x))
            (x, state), found = self._run(number, "F", m, args, x)
            args = args._replace(state=state)
            sizes.append({kind: self._of_replicas(number, of_kind) for kind, of_kind in found.items()})
        return tasks, args, x, sizes

    def _of_replicas(self, number: int, sizes: dict[str, Value]) -> dict[str, np.ndarray]:
        """Return the sizes of a stage's values on each replica, (replicas,): of a concurrent stage, added over IPUs."""
        place, replicas = self._segments[number].place, self._model.replicas
        by_ipu = {name: on_host(size).reshape(replicas, -1) for name, size in sizes.items()}
        with np.errstate(over="ignore"):
            return {name: size.sum(1) if place is None else size[:, place] for name, size in by_ipu.items()}

    # the programs

    def _entered(self, given: StepArgs, scale: Value) -> tuple[StepArgs, list[Value]]:
        """Return the arguments with all dims, and with rows of state; and the cotangent of a loss."""
        dloss = self._model.loss_cotangent(scale, weighted=self._options.weighted)
        program = lambda batch, state, dloss: (batch, _rows((packing.arrays_of(state), [dloss])))
        in_specs = (_OF_REPLICA, packing.specs_of(given.state.layout), WHOLE)
        mapped = over_ipus(program, self._mesh, in_specs=in_specs, out_specs=(_OF_REPLICA, _ROWS))
        batch, (arrays, dloss) = mapped(given.entered(self._model.replicas).batch, given.state, dloss)
        return given._replace(batch=batch, state=Sharded(arrays, given.state.layout)), dloss

    def _task(self, number: int, kind: str, m: Value, given: StepArgs, x: Tree, dy: Sequence[Value] = ()) -> Tree:
        """Run F or B of a stage for micro-batch `m`.

        Returns:
            `(y, new state)` and the sizes of the values that F reads and returns, by kind; or the floating leaves of
            dx, and the sizes of the gradients. Of the last stage, y is the loss.
        """
        segment, is_last, params = self._segments[number], number == len(self._segments) - 1, given.params.layout
        place, group_of = segment.place, given.state.layout.group
        leaves = [leaf for name in segment.groups for leaf in params.group(name).leaves]
        earlier = {name for before in self._segments[:number] for name in before.groups}
        # the step computes the gradient of x only if an earlier stage has trained weights
        reads_dx = any(not leaf.frozen for name in earlier for leaf in params.group(name).leaves)

        def program(m: Value, args: StepArgs, x: Tree, dy: Sequence[Value]) -> Tree:
            args, x, dy = args.of_replica(), *_own((x, dy))
            weights = _read(segment.groups, packing.arrays_of(args.params), params)
            states = _own(args.state.arrays)
            state = _read(segment.state_groups, states, given.state.layout)
            keys = keys_of(args.key, lax.axis_index(REPLICA_AXIS), m, [number], segment.stages)
            inputs = MicrobatchInputs(jax.tree.map(lambda leaf: leaf[m], args.batch), keys)
            values, treedef = jax.tree.flatten(weights)
            trained = [i for i, leaf in enumerate(leaves) if not leaf.frozen]
            floats, others, join = split_floats(x)

            def call(trained_values: list[Value], floats: list[Value]) -> tuple[list[Value], Tree]:
                own = dict(enumerate(values)) | dict(zip(trained, trained_values, strict=True))
                own = jax.tree.unflatten(treedef, own.values())
                results = call_segment(segment, own, join(floats, others), inputs, state, is_last)
                return split_floats(results.y)[0], results

            y, vjp, results = jax.vjp(call, [values[i] for i in trained], floats, has_aux=True)
            if kind == "B":
                parts = lax.axis_size(IPU_AXIS) if place is None else 1
                gradients, dx = vjp([leaf.astype(of.dtype) / parts for leaf, of in zip(dy, y, strict=True)])
                dx = lax.psum(dx, IPU_AXIS) if place is None else _of_place(place, dx)
                named = [(leaves[i].path, g) for i, g in zip(trained, gradients, strict=True)]
                return _rows((dx, _sizes([*named, *((_INPUT, leaf) for leaf in dx if reads_dx)])))
            outputs = jax.tree.leaves(results.y)
            if is_last and self._options.weighted:
                outputs.append(counts_of(results.aux.get(segment.name), dims=0))
            named = [(f"batch{jax.tree_util.keystr(p)}", v) for p, v in jax.tree.leaves_with_path(inputs.microbatch)]
            of_state = [leaf.path for name in segment.state_groups for leaf in group_of(name).leaves]
            of_state = [f"stages{path.removeprefix('state')}" for path in of_state]
            sizes = {
                "weights": _sizes(zip((leaf.path for leaf in leaves), values, strict=True)),
                "batch": _sizes(named),
                "state": _sizes(zip(of_state, jax.tree.leaves(state), strict=True)),
                "new_state": _sizes(zip(of_state, jax.tree.leaves(results.state), strict=True)),
                "outputs": _sizes((str(i), output) for i, output in enumerate(outputs)),
            }
            is_here = True if place is None else lax.axis_index(IPU_AXIS) == place
            for name in segment.state_groups:
                new = packing.write(states, group_of(name), results.state[name], jnp.int32(0))
                states = [jnp.where(is_here, *both) for both in zip(new, states, strict=True)]
            message = _of_place(place, widened(results.y) if is_last else results.y)
            return _rows(((message, Sharded(states, given.state.layout)), sizes))

        args = StepArgs(packing.specs_of(params), _OF_REPLICA, _ROWS, WHOLE)
        mapped = over_ipus(program, self._mesh, in_specs=(WHOLE, args, _ROWS, _ROWS), out_specs=_ROWS)
        return mapped(m, given, x, dy)


def _of_microbatches(sizes: Sequence[Sequence[Tree]]) -> list[Tree]:
    """Return per stage flags (replicas, M): whether the sizes of each micro-batch and stage are not finite."""
    return [jax.tree.map(lambda *of: ~np.isfinite(np.stack(of, 1)), *of_stage) for of_stage in zip(*sizes, strict=True)]


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


def _sizes(named: Iterable[tuple[str, Value]]) -> dict[str, Value]:
    """Return, by name, the largest size in the floating values of this name: it is finite if all of them are."""
    sizes: dict[str, Value] = collections.OrderedDict()  # jax would sort the names of a dict
    for name, value in named:
        if jnp.issubdtype(jnp.result_type(value), jnp.inexact):
            size = widened(jnp.max(jnp.abs(value), initial=0))
            sizes[name] = jnp.maximum(size, sizes.get(name, 0))
    return sizes

"""Run the forward and backward of one update again, with probes that flag the values that are not finite.

    x, weights, micro-batch, state --+--> stage --+--> y, new state          forward: flags leave as the stage's aux
                                     |            |
    dx, gradients of weights <-------+-- probe    +--> flags                 backward: flags leave as a gradient

This runs the pipeline's own program, on its IPUs, under its schedule, with the update's keys, state and loss scale. So
whatever a stage does (communicate, draw numbers, keep state) it does here as well, and no weight is gathered. For the
backward, each group of weights gets one more leaf, the probe. Values that a stage reads pass through an identity
function. If a value's gradient is not finite, the backward of this function gives the probe a gradient of 1 at the
place of the micro-batch and the value.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.base import facts
from ipu_jax.base.annotations import Batch, Function, Params, Tree, Value
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.layout import WHOLE, Group, Leaf, PackedArray, PackedLayout
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.axes import over_ipus
from ipu_jax.core.mesh.collectives import reduced
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.instances import on_host
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.pipeline.placed_stages import PlacedStages
from ipu_jax.core.stage import Outputs, Stage
from ipu_jax.core.step_args import StepArgs
from ipu_jax.training.update._accumulate import accumulate, counts_of, loss_and_aux
from ipu_jax.training.update._model import Model
from ipu_jax.training.update._precision import current_scale
from ipu_jax.training.update.nonfinite import NonFinite, StageFlags, UpdateFlags, first_nonfinite
from ipu_jax.training.update.state import TrainState

_INPUT = 0  # in a probe, the row for the gradients of a stage's inputs; rows for its weights follow


class Diagnosis:
    """Finds what was not finite in updates of a step.

    Args:
        model: the model with all its replicas, in the step's precision.
        options: the step's options.
    """

    def __init__(self, model: Model, options: TrainOptions):
        self._model, self._options = model, options
        self._program = jax.jit(self._run, static_argnums=0)

    @facts.during("finding what was not finite")
    def find(self, state: TrainState, batch: Batch, step: int) -> NonFinite | None:
        """Return the first value that is not finite in an update, or None if there is none.

        Args:
            state: the state before the update; its `step` is not read.
            batch: the batch of this update, as a user gives it.
            step: the number of the update, from 1.
        """
        key = jax.random.fold_in(state.key, step - 1) if self._model.random else None
        given = StepArgs(state.params, batch, state.stages, key)
        args = (given, current_scale(self._options, state.scale))
        lower = lambda chosen: self._program.lower(chosen, *args)
        chosen = self._model.guarded(self._model.scheduled(lambda: given), self._program, args, lower)
        results = jax.tree.map(on_host, self._program(chosen, *args))
        return first_nonfinite(step, self._model.flags(state, batch, results))

    def _run(self, chosen: Any, given: StepArgs, scale: Value) -> Tree:
        model, weighted = self._model.on(chosen), self._options.weighted
        cotangent = model.loss_cotangent(scale, weighted=weighted)
        return model.probed(given.entered(model.replicas), cotangent, weighted=weighted)


class ProbedPipeline:
    """A pipeline with probes, for weights in one layout.

    Args:
        model: the stages with all their replicas, in the step's precision, as the step runs them.
        layout: the layout of the weights, in which the pipeline's frozen leaves are frozen.
        weighted: whether the losses come with counts.

    Attributes:
        users: per stage, the name of its group with a probe, and the stage's number among the stages of this group.
    """

    def __init__(self, model: PlacedStages, layout: PackedLayout, *, weighted: bool):
        self._layout, self._weighted, self._m = layout, weighted, model.options.gradient_accumulation
        self.users: list[tuple[str, int]] = []
        groups = {group.name: group for group in layout.groups}
        places: dict[str, int | None] = {name: None for stage in model.stages for name in stage.shared}
        for number, stage in enumerate(model.stages):
            name = f"probe of stage {number}" if stage.params is None else stage.params
            if stage.params is None:
                groups[name] = Group(name, jax.tree.structure(None), ())
            places[name] = stage.place
            self.users.append((name, sum(user == name for user, _ in self.users)))
        rows = 1 + max(sum(len(groups[name].leaves) for name in stage.groups) for stage in model.stages)
        self._shape = (1 + max(use for _, use in self.users), rows, self._m)
        self._extended = self._with_probes(groups, places)
        stages = [self._probed(number, stage, groups) for number, stage in enumerate(model.stages)]
        frozen = {
            group.name: (jax.tree.unflatten(group.treedef, [leaf.frozen for leaf in group.leaves]), False)
            for group in groups.values()
        }
        schedule = model.schedule
        assert schedule is not None, "the step has chosen it"
        self._pipeline = Pipeline(
            stages,
            mesh=model.mesh,
            schedule=schedule,
            gradient_accumulation=self._m,
            reduction=model.options.reduction,
            guards="uniform" if model.uniform else "auto",
            specs={name: WHOLE for name in groups if places[name] is None},  # the layout has the real ones
            frozen=frozen,
        )

    def _with_probes(self, groups: dict[str, Group], places: dict[str, int | None]) -> PackedLayout:
        """Return the layout in which each group is `(its tree, probe)`; the last arrays hold the probes."""
        arrays, of_place, extended = [*self._layout.arrays], collections.Counter[int | None](), list[Group]()
        slots = max(collections.Counter(place for place in places.values() if place is not None).values(), default=0)
        for group in groups.values():
            place = places[group.name]
            array = len(arrays) + of_place[place] + slots * (place is None)
            of_place[place] += 1
            probe = Leaf(f"the probe of {group.name}", self._shape, "float32", array=array, ipu=place)
            tree = jax.tree.unflatten(group.treedef, range(len(group.leaves)))
            extended.append(Group(group.name, jax.tree.structure((tree, 0)), (*group.leaves, probe)))
        arrays += [PackedArray(self._shape, "float32", is_slot=k < slots) for k in range(slots + of_place[None])]
        return PackedLayout(self._layout.ipus, tuple(extended), arrays=tuple(arrays))

    def _probed(self, number: int, stage: Stage, groups: dict[str, Group]) -> Stage:
        name, use = self.users[number]
        is_trained = [not leaf.frozen for group in stage.groups for leaf in groups[group].leaves]
        is_last = number == len(self.users) - 1

        def fn(params: Params, x: Tree, numbered: Tree, **extra: Tree) -> Outputs:
            (own, probe), microbatch = params, numbered["microbatch"]
            weights = (own, [extra["shared"][name][0] for name in stage.shared])
            watch = lambda row, value: _watched((use, row, self._shape), value, probe, numbered["number"])
            given = extra.get("state")
            leaves, treedef = jax.tree.flatten(weights)
            leaves = [watch(1 + i, w) if is_trained[i] else w for i, w in enumerate(leaves)]
            own, others = jax.tree.unflatten(treedef, leaves)
            extra |= {"shared": dict(zip(stage.shared, others, strict=True))} if stage.shared else {}
            x, skips = _of_floats(lambda floats: watch(_INPUT, floats), (x, extra.get("skips")))
            extra |= {} if skips is None else {"skips": skips}
            out = stage.fn(own, x, microbatch, **extra)
            out = out if isinstance(out, Outputs) else Outputs(out)
            y, losses, outputs = out.y, [out.loss], (out.y, dict(out.skips), out.loss)
            if is_last:
                y, aux = out.y if isinstance(out.y, tuple) else (out.y, out.aux)
                losses.append(y)
                outputs = (y, out.loss, counts_of(aux, dims=0) if self._weighted else None)
            losses = [loss for loss in losses if loss is not None]
            flags = {
                "weights": _flags(weights),
                "batch": _flags(microbatch),
                "state": _flags(given),
                "new_state": _flags(out.state),
                "outputs": _flags(outputs),
            }
            if stage.place is None:  # a shard is on one IPU, and each IPU must return the same aux
                flags = jax.tree.map(lambda flag: lax.pmax(flag, IPU_AXIS), flags)
            aux = {kind: flag for kind, flag in flags.items() if flag.size}
            aux |= {"loss": sum(losses)} if losses else {}
            return dataclasses.replace(out, y=y, aux=lax.stop_gradient(aux))

        own = {"fn": fn, "params": name, "name": f"{number} {stage.name}", "predict_specs": WHOLE}
        return dataclasses.replace(stage, **own, reference=None, evaluate=None, predict=None)

    def run(self, args: StepArgs, loss_cotangent: Value) -> Tree:
        """Return the aux of each stage, the gradients of the probes, and whether all sums of gradients are finite.

        Communicates what a training step communicates, and one pmin of a number.

        Args:
            args: whole, of one update.
            loss_cotangent: the loss cotangent of one micro-batch.

        Returns:
            Per stage its flags, (replicas, M, values) each, and the loss that it adds, if any; per stage its probe's
            gradient, (replicas, rows, M); and a bool.
        """
        model, extended, own = self._pipeline, self._extended, len(self._layout.arrays)
        added = [array.shape_on_mesh(extended.ipus) for array in extended.arrays[own:]]
        with_probes = Sharded([*args.params.arrays, *(jnp.zeros(shape, jnp.float32) for shape in added)], extended)

        def program(args: StepArgs, loss_cotangent: Value) -> Tree:
            args = args.of_replica()
            numbered = {"microbatch": args.batch, "number": jnp.arange(self._m)}
            result = model.placement.run_on_ipu(args._replace(batch=numbered), loss_cotangent=loss_cotangent)
            assert result.gradients is not None, "there is a backward"
            sums = result.gradients.arrays
            is_finite = _sums_are_finite(sums[:own], IPU_AXIS)
            expand = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)
            return expand(result.aux), expand(sums[own:]), is_finite

        replicas = PartitionSpec(REPLICA_AXIS)
        of_state = args.state and packing.specs_of(args.state.layout)
        in_specs = (StepArgs(packing.specs_of(extended), replicas, of_state, WHOLE), WHOLE)
        of_probes = [PartitionSpec(REPLICA_AXIS, *array.spec_on_mesh) for array in extended.arrays[own:]]
        out_specs = (replicas, of_probes, WHOLE)
        mapped = over_ipus(program, model.mesh, in_specs=in_specs, out_specs=out_specs)
        aux, found, is_finite = mapped(args._replace(params=with_probes), loss_cotangent)
        gradients = []
        for name, use in self.users:
            probe = extended.group(name).leaves[-1]
            array = found[probe.array - own]
            gradients.append((array if probe.ipu is None else array[:, probe.ipu])[:, use])
        return [aux[stage.name] for stage in model.stages], gradients, is_finite


def flags_of_stages(model_stages: Sequence[Stage], state: TrainState, batch: Batch, results: Tree) -> UpdateFlags:
    """Return the flags of an update by name, from what `ProbedPipeline.run` returned, on the host."""
    flags, gradients, is_finite = results
    layout = state.params.layout
    of_batch, stages, any_trained = float_names(batch, "batch"), [], False
    for stage, own, probe in zip(model_stages, flags, gradients, strict=True):
        leaves = [leaf for name in stage.groups for leaf in layout.group(name).leaves]
        held = () if stage.state is None or state.stages is None else state.stages.layout.group(stage.state).leaves
        of_state = [path.replace("state", "stages", 1) for path in _float_paths(held)]
        outputs = own.get("outputs", np.zeros((*probe.shape[:1], probe.shape[-1], 0)))
        trained = {leaf.path: probe[:, 1 + i] > 0 for i, leaf in enumerate(leaves) if not leaf.frozen}
        stages.append(
            StageFlags(
                weights=_by_name(_float_paths(leaves), own.get("weights")),
                batch=_by_name(of_batch, own.get("batch")),
                state=_by_name(of_state, own.get("state")),
                outputs=_by_name([str(i) for i in range(outputs.shape[-1])], outputs),
                new_state=_by_name(of_state, own.get("new_state")),
                # the step computes it only if an earlier stage has trained weights
                input_gradients={"its input": probe[:, 0] > 0} if any_trained else {},
                weight_gradients=trained,
            )
        )
        any_trained = any_trained or bool(trained)
    names = [stage.name for stage in model_stages]
    losses = np.sum([_wide(own["loss"]) for own in flags if "loss" in own], axis=0)
    return UpdateFlags(losses, stages, names, bool(is_finite))


def run_probed_function(model: Model, loss_fn: Function, args: StepArgs, loss_cotangent: Value) -> Tree:
    """Return the flags of a plain loss function, (replicas, M, values) each, and whether the gradient sums are finite.

    Communicates one psum of all gradients over the replicas.
    """

    def program(args: StepArgs, loss_cotangent: Value) -> Tree:
        probed = functools.partial(_probed_loss, loss_fn, loss_cotangent)
        own = args.of_replica()
        _, aux, sums = accumulate(probed, own, loss_cotangent=loss_cotangent, random=model.random)
        return jax.tree.map(lambda leaf: leaf[None], aux), _sums_are_finite(sums)

    replicas = PartitionSpec(REPLICA_AXIS)
    in_specs, out_specs = (StepArgs(WHOLE, replicas, None, WHOLE), WHOLE), (replicas, WHOLE)
    return model.on_ipus(program, in_specs=in_specs, out_specs=out_specs)(args, loss_cotangent)


def flags_of_function(state: TrainState, batch: Batch, results: Tree) -> UpdateFlags:
    """Return the flags of an update by name, from what `run_probed_function` returned, on the host."""
    flags, is_finite = results
    weights = float_names(state.params, "params")
    stage = StageFlags(
        weights=_by_name(weights, flags["weights"]),
        batch=_by_name(float_names(batch, "batch"), flags["batch"]),
        outputs=_by_name(["loss"], flags["outputs"]),
        weight_gradients=_by_name(weights, flags["weight_gradients"]),
    )
    return UpdateFlags(_wide(flags["loss"]), [stage], None, bool(is_finite))


def _probed_loss(loss_fn: Function, loss_cotangent: Value, params: Params, microbatch: Batch, **extra: Tree) -> Tree:
    """Return the loss of one micro-batch, and as its aux the flags of the loss and its gradients."""
    of_loss = lambda p: loss_and_aux(loss_fn(p, microbatch, **extra))[0]
    loss, vjp = jax.vjp(of_loss, lax.stop_gradient(params))
    (gradients,) = vjp(jnp.full((), loss_cotangent, loss.dtype))
    flags = {"weights": params, "batch": microbatch, "weight_gradients": gradients, "outputs": loss}
    aux = {kind: _flags(tree) for kind, tree in flags.items()} | {"loss": loss}
    return of_loss(params), lax.stop_gradient(aux)


def float_names(tree: Tree, prefix: str) -> list[str]:
    """Return the names of a tree's floating leaves, in the order of the flags that `_flags` returns."""
    return [
        f"{prefix}{jax.tree_util.keystr(path)}" for path, leaf in jax.tree.leaves_with_path(tree) if _is_float(leaf)
    ]


def _sums_are_finite(sums: Tree, *axes: str) -> Value:
    """Return whether the sums over the replicas are finite, on all IPUs of the axes."""
    found = 1 - jnp.max(jnp.append(_flags(reduced(lax.psum, sums, REPLICA_AXIS)), 0))
    return reduced(lax.pmin, found, *axes)


def _is_float(leaf: Value) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _flags(tree: Tree) -> Value:
    """Return int32, (floating leaves,): 1 where a leaf contains a value that is not finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]
    return jnp.asarray([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves], jnp.int32).reshape(len(leaves))


def _of_floats(fn: Any, tree: Tree) -> Tree:
    """Return the tree with its floating leaves replaced by `fn(list of them)`."""
    leaves, treedef = jax.tree.flatten(tree)
    where = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    if where:
        for i, leaf in zip(where, fn([leaves[i] for i in where]), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def _float_paths(leaves: Sequence[Leaf]) -> list[str]:
    return [leaf.path for leaf in leaves if jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.inexact)]


def _by_name(names: list[str], flags: Tree) -> dict[str, Value]:
    """Return (replicas, M) bools by name from (replicas, M, names); None stands for no names."""
    if flags is None:
        assert not names, f"the probes saw nothing of {names}"
        return {}
    assert flags.shape[-1] == len(names), f"the probes saw {flags.shape[-1]} of {names}"
    return {name: flags[..., i] > 0 for i, name in enumerate(names)}


def _wide(losses: Value) -> Value:
    losses = np.asarray(losses)
    return losses.astype(jnp.promote_types(losses.dtype, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(where: tuple[int, int, tuple[int, ...]], value: Value, probe: Value, number: Value) -> Value:
    """Return the value. Backward, the probe's gradient is 1 at (use, row, number) if the value's is not finite."""
    return value


def _watch_backward(
    where: tuple[int, int, tuple[int, ...]], number: Value, cotangent: Value
) -> tuple[Value, Value, Value]:
    use, row, shape = where
    bad = jnp.max(_flags(cotangent)).astype(jnp.float32)
    return cotangent, jnp.zeros(shape, jnp.float32).at[use, row, number].set(bad), np.zeros((), jax.dtypes.float0)


_watched.defvjp(lambda where, value, probe, number: (value, number), _watch_backward)

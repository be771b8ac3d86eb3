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

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.core.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.stage import Outputs, Stage
from ipu_jax.core.step_args import StepArgs
from ipu_jax.core.weights.packed_layout import WHOLE, Group, Leaf, PackedLayout, Slot
from ipu_jax.core.weights.packing import Sharded
from ipu_jax.training.update._accumulate import accumulate_gradients, counts_of, loss_and_aux
from ipu_jax.training.update._model import on_ipus
from ipu_jax.training.update._placement import specs_of
from ipu_jax.training.update.replicas import Replicas

_INPUT = 0  # in a probe, the row for the gradients of a stage's inputs; rows for its weights follow


class ProbedPipeline:
    """A pipeline with probes, for weights in one layout.

    Args:
        model: the model with all its replicas, in the step's precision.
        layout: the layout of the weights, in which the pipeline's frozen leaves are frozen.
        weighted: whether the losses come with counts.

    Attributes:
        users: per stage, the name of its group with a probe, and the stage's number among the stages of this group.
    """

    def __init__(self, model: Pipeline, layout: PackedLayout, *, weighted: bool):
        self._layout, self._weighted, self._m = layout, weighted, model.options.gradient_accumulation
        self.users: list[tuple[str, int]] = []
        groups = {group.name: group for group in layout.groups}
        for number, stage in enumerate(model.stages):
            name = f"probe of stage {number}" if stage.params is None else stage.params
            if stage.params is None:
                groups[name] = Group(name, stage.place, jax.tree.structure(None), ())
            self.users.append((name, sum(user == name for user, _ in self.users)))
        rows = 1 + max(sum(len(groups[name].leaves) for name in stage.groups) for stage in model.stages)
        self._shape = (1 + max(use for _, use in self.users), rows, self._m)
        self._extended = self._with_probes(list(groups.values()))
        stages = [self._probed(number, stage, groups) for number, stage in enumerate(model.stages)]
        frozen = {
            group.name: (jax.tree.unflatten(group.treedef, [leaf.frozen for leaf in group.leaves]), False)
            for group in groups.values()
        }
        self._pipeline = Pipeline(
            stages,
            mesh=model.mesh,
            schedule=model.placement.choice.schedule_or_name,
            gradient_accumulation=self._m,
            reduction=model.options.reduction,
            specs={name: WHOLE for name, group in groups.items() if group.ipu is None},  # the layout has the real ones
            frozen=frozen,
        )

    def _with_probes(self, groups: Sequence[Group]) -> PackedLayout:
        """Return the layout in which each group is `(its tree, probe)`; the last slots hold the probes."""
        slots, of_ipu, extended = list(self._layout.slots), [0] * self._layout.ipus, []
        for group in groups:
            slot = -1
            if group.ipu is not None:
                slot = len(self._layout.slots) + of_ipu[group.ipu]
                of_ipu[group.ipu] += 1
            probe = Leaf(f"the probe of {group.name}", self._shape, "float32", slot)
            tree = jax.tree.unflatten(group.treedef, range(len(group.leaves)))
            extended.append(Group(group.name, group.ipu, jax.tree.structure((tree, 0)), (*group.leaves, probe)))
        slots += [Slot(self._shape, "float32")] * max(of_ipu)
        return PackedLayout(self._layout.ipus, tuple(extended), tuple(slots))

    def _probed(self, number: int, stage: Stage, groups: dict[str, Group]) -> Stage:
        name, use = self.users[number]
        is_trained = [not leaf.frozen for group in stage.groups for leaf in groups[group].leaves]
        is_last = number == len(self.users) - 1

        def fn(params: Any, x: Any, numbered: Any, **extra: Any) -> Outputs:
            (own, probe), microbatch = params, numbered["microbatch"]
            weights = (own, [extra["shared"][name][0] for name in stage.shared])
            watch = lambda row, value: _watched((use, row, self._shape), value, probe, numbered["number"])  # noqa: E731
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

    def run(self, args: StepArgs, loss_cotangent: Any) -> Any:
        """Return the aux of each stage, the gradients of the probes, and whether all sums of gradients are finite.

        Communicates what a training step communicates, and one pmin of a number.

        Args:
            args: whole, of one update; leaves of the batch are ([replicas,] M, ...).
            loss_cotangent: the loss cotangent of one micro-batch.

        Returns:
            Per stage its flags, (replicas, M, values) each, and the loss that it adds, if any; per slot and per
            concurrent group the probes, (replicas, [ipus,] uses, rows, M); and a bool.
        """
        model, extended, layout = self._pipeline, self._extended, self._layout
        probes = jnp.zeros(self._shape, jnp.float32)
        own, params = args.params.concurrent, args.params
        with_probes = Sharded(
            [*params.slots, *[jnp.stack([probes] * layout.ipus)] * (len(extended.slots) - len(layout.slots))],
            {group.name: [*own.get(group.name, []), probes] for group in extended.groups if group.ipu is None},
            extended,
        )

        def program(args: StepArgs, loss_cotangent: Any) -> Any:
            args = args.of_replica()
            numbered = {"microbatch": args.batch, "number": jnp.arange(self._m)}
            result = model.placement.run_on_ipu(args._replace(batch=numbered), loss_cotangent=loss_cotangent)
            assert result.gradients is not None, "there is a backward"
            sums = result.gradients
            of_ipus, of_groups = sums.slots[len(layout.slots) :], {k: v[-1] for k, v in sums.concurrent.items()}
            others = (sums.slots[: len(layout.slots)], {k: v[:-1] for k, v in sums.concurrent.items()})
            is_finite = _sums_are_finite(others, (IPU_AXIS,), model.replicas)
            expand = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)  # noqa: E731
            return expand(result.aux), expand(of_ipus), expand(of_groups), is_finite

        replicas = PartitionSpec(REPLICA_AXIS)
        in_specs = (StepArgs(specs_of(with_probes), replicas, specs_of(args.state), WHOLE), WHOLE)
        out_specs = (replicas, PartitionSpec(REPLICA_AXIS, IPU_AXIS), replicas, WHOLE)
        mapped = on_ipus(model, program, in_specs=in_specs, out_specs=out_specs)
        aux, of_ipus, of_groups, is_finite = mapped(
            args.entered(model.replicas)._replace(params=with_probes), loss_cotangent
        )
        by_name = {group.name: group for group in extended.groups}
        gradients = []
        for name, use in self.users:
            group = by_name[name]
            if group.ipu is None:
                gradients.append(of_groups[name][:, use])
            else:
                gradients.append(of_ipus[group.leaves[-1].slot - len(layout.slots)][:, group.ipu, use])
        return [aux[stage.name] for stage in model.stages], gradients, is_finite


def run_probed_function(model: Replicas, params: Any, batch: Any, key: Any, loss_cotangent: Any) -> Any:
    """Return the flags of a plain loss function, (replicas, M, values) each, and whether the gradient sums are finite.

    Communicates one psum of all gradients over the replicas, and one pmin of a number.
    """

    def program(params: Any, batch: Any, key: Any, loss_cotangent: Any) -> Any:
        loss_fn = functools.partial(_probed_loss, model, loss_cotangent)
        batch = jax.tree.map(lambda leaf: leaf[0], batch)
        _, aux, sums = accumulate_gradients(
            loss_fn, params, batch, key, loss_cotangent=loss_cotangent, random=model.random
        )
        return jax.tree.map(lambda leaf: leaf[None], aux), _sums_are_finite(sums, (), model.replicas)

    if model.replicas == 1:
        batch = jax.tree.map(lambda leaf: leaf[None], batch)
    replicas = PartitionSpec(REPLICA_AXIS)
    mapped = on_ipus(model, program, in_specs=(WHOLE, replicas, WHOLE, WHOLE), out_specs=(replicas, WHOLE))
    return mapped(params, batch, key, loss_cotangent)


def _probed_loss(model: Replicas, loss_cotangent: Any, params: Any, microbatch: Any, **extra: Any) -> Any:
    """Return the loss of one micro-batch, and as its aux the flags of the loss and its gradients."""
    of_loss = lambda p: loss_and_aux(model.loss_fn(p, microbatch, **extra))[0]  # noqa: E731
    loss, vjp = jax.vjp(of_loss, lax.stop_gradient(params))
    (gradients,) = vjp(jnp.full((), loss_cotangent, loss.dtype))
    flags = {"weights": params, "batch": microbatch, "weight_gradients": gradients, "outputs": loss}
    aux = {kind: _flags(tree) for kind, tree in flags.items()} | {"loss": loss}
    return of_loss(params), lax.stop_gradient(aux)


def float_names(tree: Any, prefix: str) -> list[str]:
    """Return the names of a tree's floating leaves, in the order of the flags that `_flags` returns."""
    return [
        f"{prefix}{jax.tree_util.keystr(path)}" for path, leaf in jax.tree.leaves_with_path(tree) if _is_float(leaf)
    ]


def _sums_are_finite(sums: Any, axes: tuple[str, ...], replicas: int) -> Any:
    sums = lax.psum(sums, REPLICA_AXIS) if replicas > 1 else sums
    found = 1 - jnp.max(jnp.append(_flags(sums), 0))
    return lax.pmin(found, axes) if axes else found


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _flags(tree: Any) -> Any:
    """Return int32, (floating leaves,): 1 where a leaf contains a value that is not finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]
    return jnp.asarray([jnp.any(~jnp.isfinite(leaf)) for leaf in leaves], jnp.int32).reshape(len(leaves))


def _of_floats(fn: Any, tree: Any) -> Any:
    """Return the tree with its floating leaves replaced by `fn(list of them)`."""
    leaves, treedef = jax.tree.flatten(tree)
    where = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    if where:
        for i, leaf in zip(where, fn([leaves[i] for i in where]), strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(where: tuple[int, int, tuple[int, ...]], value: Any, probe: Any, number: Any) -> Any:
    """Return the value. Backward, the probe's gradient is 1 at (use, row, number) if the value's is not finite."""
    return value


def _watch_forward(where: Any, value: Any, probe: Any, number: Any) -> tuple[Any, Any]:
    return value, number


def _watch_backward(where: tuple[int, int, tuple[int, ...]], number: Any, cotangent: Any) -> tuple[Any, Any, Any]:
    use, row, shape = where
    bad = jnp.max(_flags(cotangent)).astype(jnp.float32)
    return cotangent, jnp.zeros(shape, jnp.float32).at[use, row, number].set(bad), np.zeros((), jax.dtypes.float0)


_watched.defvjp(_watch_forward, _watch_backward)

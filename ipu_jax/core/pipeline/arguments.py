"""Check the arguments of a pipeline before anything is traced: stages and their places, mesh, keys, batches."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from ipu_jax.base.annotations import Batch, Key, Value
from ipu_jax.base.keys import is_one_key
from ipu_jax.core.layout.leaf import check_array
from ipu_jax.core.mesh.axes import further_axes, names_in
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS, make_mesh
from ipu_jax.core.stage import Role, Stage


def checked_stages(stages: Any) -> tuple[Stage, ...]:
    """Return the stages as a tuple.

    Raises:
        ValueError: there are no stages, or one of them is not a `Stage`.
    """
    checked = tuple(stages) if isinstance(stages, Iterable) else (stages,)
    if not checked:
        raise ValueError("stages=() is empty: give at least one Stage")
    for number, stage in enumerate(checked):
        if not isinstance(stage, Stage):
            whole = "; Pipeline.from_function cuts a whole loss function" if callable(stage) else ""
            raise ValueError(f"stage {number} is {stage!r}: give a list of Stage(fn, params='group', ipu=0){whole}")
    return checked


def check_predict_axes(stages: tuple[Stage, ...], axes: Mapping[str, int]) -> None:
    """Raise `ValueError` if `predict_specs` name an axis that the mesh lacks."""
    for stage in stages:
        for spec in jax.tree.leaves(stage.predict_specs):
            for axis in (axis for entry in spec for axis in names_in(entry)):
                if axis not in (IPU_AXIS, *axes):
                    raise ValueError(
                        f"stage {stage.name!r}: predict_specs holds {spec}, but the mesh has no axis {axis!r}: make it "
                        f"with make_mesh(replicas, ipus_per_replica, {axis}=...)"
                    )


def check_reducible(stages: tuple[Stage, ...], mesh: Mesh) -> None:
    """Raise `ValueError` if stages reduce over "ipu" where XLA cannot: on one IPU that is a group of devices."""
    everywhere = [stage.name for stage in stages if stage.place is None or stage.shared]
    if everywhere and mesh.size > 1 and mesh.shape[REPLICA_AXIS] * mesh.shape[IPU_AXIS] == 1:
        raise ValueError(
            f"stage {everywhere[0]!r} reduces over axis 'ipu', but the mesh is one IPU of {mesh.size} devices, on "
            "which XLA cannot do that: make it local (ipu=0, without shared), or give the mesh more IPUs or replicas"
        )


def check_places(stages: tuple[Stage, ...], ipus: int) -> None:
    """Raise `ValueError` if a stage is on an IPU that a replica of `ipus` IPUs does not have."""
    for number, stage in enumerate(stages):
        if stage.place is not None and stage.place >= ipus:
            raise ValueError(
                f"stage {number}, {stage.name!r}, is on IPU {stage.place}, outside the replica: "
                f"it has IPUs 0 to {ipus - 1}; make the mesh wider or move the stage"
            )


def mesh_for(mesh: Mesh | None, stages: tuple[Stage, ...]) -> Mesh:
    """Return the mesh of a pipeline; by default it has one replica, on as many IPUs as the stages name.

    Raises:
        ValueError: no mesh is given, and no stage is on IPU 0, as if IPUs counted from 1; or as in `check_mesh`.
    """
    if mesh is not None:
        check_mesh(mesh)
        return mesh
    places = sorted({0 if stage.place is None else stage.place for stage in stages})
    if places[0] > 0:
        raise ValueError(
            f"stages are on IPU {', '.join(map(str, places))}, and none is on IPU 0: IPUs count from 0; move the "
            f"stages, or give mesh=make_mesh(1, {places[-1] + 1}), in which IPU 0 is idle"
        )
    return make_mesh(1, 1 + places[-1])


def check_mesh(mesh: Any) -> None:
    """Raise `ValueError` unless `mesh` has the axes "replica" and "ipu" first, and XLA can split over further ones."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh={mesh!r} is not a mesh: make it with make_mesh(replicas, ipus_per_replica)")
    if tuple(mesh.axis_names[:2]) != (REPLICA_AXIS, IPU_AXIS):
        raise ValueError(f"mesh has axes {mesh.axis_names}: make it with make_mesh(replicas, ipus_per_replica)")
    if not further_axes(mesh):
        return
    for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != AxisType.Auto:
            raise ValueError(f"mesh axis {axis!r} is of type {kind}, and must be Auto: make it with make_mesh")
    if not jax.config.values["jax_use_shardy_partitioner"]:
        raise ValueError(
            f"mesh has the further axes {', '.join(map(repr, further_axes(mesh)))}, and jax_use_shardy_partitioner is "
            "False: only Shardy partitions programs that name some axes themselves; set it to True"
        )


def check_key(key: Key, stages: tuple[Stage, ...], role: Role, *, taken: bool = False) -> None:
    """Raise `ValueError` if a stage needs a key in this role and has none, or if `key` is not typed or not taken.

    A function can take a key that it does not use, for example with a dropout rate of 0: then it is `taken`.
    """
    needing = [stage.name for stage in stages if stage.needs_key(role)]
    if key is None and needing:
        without = ", or evaluate a function that takes none, step.model.forward(test_loss, micro_batch)"
        cut = taken and role == "evaluation"
        raise ValueError(f"stage {needing[0]!r} takes a random key: pass key=jax.random.key(...){without * cut}")
    if key is not None and not is_one_key(key):
        raise ValueError(f"key={key!r} is not one typed key: make it with jax.random.key(seed)")
    if key is not None and not taken and not any(stage.random for stage in stages):
        raise ValueError(
            "a key was given, but no stage takes one: give Stage(..., random=True), or cut a function of (params, "
            "micro_batch, key)"
        )


def arrays_in(batch: Batch) -> list[tuple[str, Value]]:
    """Return the paths and arrays of a batch; raise `ValueError` if a leaf is not an array, or if there are none."""
    named = [(f"batch{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree.leaves_with_path(batch)]
    if not named:
        raise ValueError("batch has no arrays: the first stage has nothing to read, and M is unknown")
    for where, leaf in named:
        check_array(where, leaf)
    return named


def check_batch(batch: Batch, replicas: int, m: int) -> None:
    """Raise `ValueError` unless the leaves of `batch` are (m, ...), or (replicas, m, ...) with several replicas."""
    leading = (m,) if replicas == 1 else (replicas, m)
    for where, leaf in arrays_in(batch):
        if leaf.shape[: len(leading)] != leading:
            rule = "(gradient_accumulation," if replicas == 1 else "(replicas, gradient_accumulation,"
            raise ValueError(
                f"{where} has shape {tuple(leaf.shape)}: its leading dims must be {rule} ...) = "
                f"({', '.join(map(str, leading))}, ...)"
            )


def check_predictable(stages: tuple[Stage, ...], replicas: int, return_state: bool) -> None:
    """Raise `ValueError` unless the stages can predict, and the new state can be returned if it is asked for."""
    last = stages[-1]
    if last.predict is None:
        raise ValueError(
            f"the last stage, {last.name!r}, cannot predict: give Stage(..., predict=fn), a function called like "
            "fn that returns the outputs of one micro-batch in place of its loss"
        )
    if return_state and all(stage.state is None for stage in stages):
        raise ValueError("return_state=True, but no stage holds state: name its group, Stage(..., state='name')")
    if return_state and replicas > 1:
        raise ValueError(
            f"return_state=True on {replicas} replicas, whose micro-batches would leave {replicas} different states: "
            "predict on one, pipeline.replace(mesh=make_mesh(1, ipus))"
        )


def check_prediction_batch(batch: Batch, replicas: int) -> None:
    """Raise `ValueError` unless all leaves of `batch` are (m, ...) for one m of at least 1, or (replicas, m, ...)."""
    leading = 1 if replicas == 1 else 2
    rule = "(micro-batches, ...)" if replicas == 1 else f"(replicas, micro-batches, ...) = ({replicas}, ...)"
    arrays = arrays_in(batch)
    first = tuple(arrays[0][1].shape)[:leading]
    for where, leaf in arrays:
        found = tuple(leaf.shape)[:leading]
        if len(found) < leading or 0 in found or (replicas > 1 and found[0] != replicas):
            raise ValueError(
                f"{where} has shape {tuple(leaf.shape)}: its leading dims must be {rule}, with any "
                "number of micro-batches from 1 on"
            )
        if found != first:
            raise ValueError(
                f"{where} has {found[-1]} micro-batches and another leaf {first[-1]}: all "
                f"leaves must have the same leading dims, {rule}"
            )


def count_samples(batch: Batch, dims: int) -> int:
    """Return the number of examples in a batch: the product of the first `dims` dims of a leaf with enough dims.

    >>> count_samples({"x": np.zeros((2, 4, 8, 28, 28)), "scale": np.zeros(2)}, dims=3)
    64
    """
    return next((math.prod(leaf.shape[:dims]) for leaf in jax.tree.leaves(batch) if np.ndim(leaf) >= dims), 0)


def check_one_batch(others: Sequence[Batch], ipus: int) -> None:
    """Raise `ValueError` if `Pipeline.from_function` gets several arguments as micro-batch."""
    if others:
        parts = ", ".join(f"micro_batch[{k}]" for k in range(1 + len(others)))
        raise ValueError(
            f"{1 + len(others)} arguments are given as micro_batch: join them, from_function(lambda params, "
            f"micro_batch: loss(params, {parts}), params, (x, y), ipus={ipus}, ...)"
        )

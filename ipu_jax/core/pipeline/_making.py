"""Make the stages and the mesh of `Pipeline.from_function`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import Mesh

from ipu_jax.base.annotations import Batch
from ipu_jax.core.cutting.function import FunctionModel, Source, model_of
from ipu_jax.core.cutting.given import NeedsAxesError
from ipu_jax.core.schedules import Schedule, canonical_name, make_schedule


def check_one_batch(others: Sequence[Batch], ipus: int) -> None:
    """Raise `ValueError` if `Pipeline.from_function` gets several arguments as micro-batch."""
    if others:
        parts = ", ".join(f"micro_batch[{k}]" for k in range(1 + len(others)))
        raise ValueError(
            f"{1 + len(others)} arguments are given as micro_batch: join them, from_function(lambda params, "
            f"micro_batch: loss(params, {parts}), params, (x, y), ipus={ipus}, ...)"
        )


def places_of_stages(schedule: str | Schedule, ipus: int, rounds: int) -> Sequence[int | None]:
    """Return the IPU of each stage that a schedule has."""
    if isinstance(schedule, Schedule):
        return schedule.placement
    family = "sequential" if canonical_name(schedule) == "auto" else schedule
    return make_schedule(family, ipus=ipus, gradient_accumulation=1, rounds=rounds).placement


def cut_on(mesh_of: Callable[..., Mesh], source: Source, axes: Mapping[str, int] | None) -> tuple[FunctionModel, Mesh]:
    """Return a loss function as stages, and a mesh with further axes.

    If none are given, and the function names axes of size 1 of the mesh of `jax.set_mesh`, it gets these.
    """
    mesh = mesh_of(**(axes or {}))
    try:
        return model_of(dataclasses.replace(source, mesh=mesh) if axes else source), mesh
    except NeedsAxesError as needs:
        if {*needs.axes.values()} != {1}:
            raise
        return cut_on(mesh_of, source, needs.axes)

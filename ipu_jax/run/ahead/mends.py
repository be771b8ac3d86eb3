"""Say what would make a pipeline fit into less memory, by the bytes that a report predicts: nothing is compiled.

Each change is tried alone, on the shapes of the step: recompute="all" on every stage, twice as many micro-batches of
half the size, another schedule.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import jax

from ipu_jax.core.analysis.report import make_report
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.programs.cost import in_units
from ipu_jax.core.step_args import StepArgs, given_dims

_SCHEDULES: Final = ("grouped", "1f1b", "zb-h1")


def mends_of(pipeline: Pipeline, plan: Plan, given: StepArgs, room: int) -> tuple[str, ...]:
    """Return a line per change that makes the temporary bytes smaller, and a last one if none does.

    Args:
        pipeline: the pipeline.
        plan: the plan of its step.
        given: the step's arguments as a user gives them, arrays or shapes.
        room: the bytes that a chip has beside the program's arguments.
    """
    now = make_report(plan, given.batch, mesh=pipeline.mesh).predicted_temporary
    found = []
    for name, changed, args in _changes(pipeline, plan.schedule.name, given):
        with contextlib.suppress(ValueError):  # such as a schedule that the stages' places or M do not fit
            other = pipeline.replace(**changed)
            report = make_report(other.placement.plan(*args), args.batch, mesh=other.mesh)
            then, gradients = report.predicted_temporary, max(part.gradients for part in report.ipus)
            if then < now:
                fits = ": fits" if then + gradients <= room else ""
                found.append(f"{name}: temporary {in_units(now, 'B')} -> {in_units(then, 'B')}, by prediction{fits}")
    return (*found, "more IPUs for the same layers, or a smaller micro-batch")


def _changes(pipeline: Pipeline, schedule: str, given: StepArgs) -> Iterator[tuple[str, dict[str, Any], StepArgs]]:
    if pipeline.function is None:
        stages = [dataclasses.replace(stage, recompute="all") for stage in pipeline.stages]
        yield "recompute='all' on every stage", {"stages": stages}, given
    m, at = pipeline.options.gradient_accumulation, given_dims(pipeline.replicas)
    if all(leaf.ndim > at + 1 and leaf.shape[at + 1] % 2 == 0 for leaf in jax.tree.leaves(given.batch)):
        halved = jax.tree.map(lambda leaf: _halved(leaf, at), given.batch)
        name = f"gradient_accumulation={2 * m} with half of each micro-batch"
        yield name, {"gradient_accumulation": 2 * m}, given._replace(batch=halved)
    if pipeline.function is None:
        for other in _SCHEDULES:
            if other != schedule:
                yield f"schedule={other!r}", {"schedule": other}, given


def _halved(leaf: Any, at: int) -> jax.ShapeDtypeStruct:
    shape = (*leaf.shape[:at], 2 * leaf.shape[at], leaf.shape[at + 1] // 2, *leaf.shape[at + 2 :])
    return jax.ShapeDtypeStruct(shape, leaf.dtype)

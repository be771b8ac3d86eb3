"""Describe a pipeline in lines of text, for `print(pipeline)`."""

from typing import Any

from ipu_jax.base.showing import Table, counted
from ipu_jax.core.pipeline._placed_stages import PlacedStages
from ipu_jax.core.stage import Stage


def describe(pipeline: PlacedStages) -> list[str | Table]:
    """Return a line about the pipeline, and a row per stage.

    >>> from ipu_jax import ALL_IPUS, Pipeline, Stage
    >>> from jax.sharding import PartitionSpec
    >>> first = Stage(lambda w, x, mb: mb @ w, params="first", ipu=0, random=True)
    >>> head = Stage(lambda w, x, mb: (x @ w).mean(), params="table", ipu=ALL_IPUS, name="head")
    >>> print(Pipeline([first, head], gradient_accumulation=4, specs={"table": PartitionSpec()}))
    Pipeline of 2 stages on 1 IPU, schedule 'grouped', 4 micro-batches, reduction 'mean'
      0  first  IPU 0     params 'first', random
      1  head   all IPUs  params 'table'
    """
    stages, schedule = pipeline.stages, pipeline.schedule_or_name
    name = schedule if isinstance(schedule, str) else schedule.name
    replicas = "" if pipeline.replicas == 1 else f"{pipeline.replicas} replicas x "
    first = (
        f"Pipeline of {counted(len(stages), 'stage')} on {replicas}{counted(pipeline.ipus, 'IPU')}, schedule "
        f"{name!r}, {counted(pipeline.options.gradient_accumulation, 'micro-batch')}, reduction "
        f"{pipeline.options.reduction!r}"
    )
    if pipeline.function is not None:
        return [first, *pipeline.function.described]
    rows = [(str(k), stage.name, _place(stage), ", ".join(_properties(stage))) for k, stage in enumerate(stages)]
    digits = len(rows[-1][0])
    return [first, Table([(row[0].rjust(digits), *row[1:]) for row in rows], left=4, has_head=False, indent="  ")]


def _place(stage: Stage) -> str:
    return "all IPUs" if stage.place is None else f"IPU {stage.place}"


def _properties(stage: Stage) -> list[str]:
    named: dict[str, Any] = {"params": stage.params, "state": stage.state}
    found = [f"{name} {value!r}" for name, value in named.items() if value is not None]
    found += ["random"] if stage.random else []
    for verb, names in (("takes", stage.takes), ("shares", stage.shared)):
        found += [f"{verb} {', '.join(map(repr, names))}"] if names else []
    functions = {"evaluate": stage.evaluate, "predict": stage.predict, "reference": stage.reference}
    return [*found, *(name for name, fn in functions.items() if fn is not None)]

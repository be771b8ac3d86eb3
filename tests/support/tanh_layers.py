"""Make pipelines whose memory is nearly all activations: three tanh layers of 64x64 per stage, 512 rows.

`compiled_bytes` are XLA's, and `PipelineReport.predicted_temporary` is ours. docs/measured.md has the rows of 4 IPUs.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ipu_jax import Pipeline, Stage
from ipu_jax.costs import PipelineReport

WIDTH, ROWS, LAYERS = 64, 512, 3
SCHEDULES = ("grouped", "1f1b", "gpipe", "zb-h1", "looped")
MICRO_BATCHES = (4, 8, 16)
NEAR = 1.05  # the largest ratio allowed between measured and predicted bytes, either way


def layers(weights: Any, x: Any, microbatch: Any) -> Any:
    x = microbatch["x"] if x is None else x
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def layers_and_loss(weights: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean((layers(weights, x, microbatch) - microbatch["y"]) ** 2)


def pipeline_of(
    schedule: str, ipus: int, micro_batches: int, *, recompute: Literal["auto", "none", "all"] = "auto"
) -> Pipeline:
    """Return a pipeline with one stage of three layers on each IPU, or with two stages on each for "looped"."""
    count = 2 * ipus if schedule == "looped" else ipus
    stages = [
        Stage(layers_and_loss if i == count - 1 else layers, params=f"stage{i}", ipu=i % ipus, recompute=recompute)
        for i in range(count)
    ]
    return Pipeline(stages, schedule=schedule, gradient_accumulation=micro_batches)


def arguments(pipeline: Pipeline, width: int = WIDTH, rows: int = ROWS) -> tuple[Any, Any]:
    """Return sharded weights, and the shapes of a batch."""
    m = pipeline.options.gradient_accumulation
    params = {f"stage{i}": [jnp.ones((width, width))] * LAYERS for i in range(len(pipeline.stages))}
    batch = {key: jax.ShapeDtypeStruct((m, rows, width), "float32") for key in "xy"}
    return pipeline.shard(params), batch


@functools.cache
def report_of(
    schedule: str, ipus: int, micro_batches: int, *, recompute: Literal["auto", "none", "all"] = "auto"
) -> PipelineReport:
    """Return the compiled report of the pipeline."""
    pipeline = pipeline_of(schedule, ipus, micro_batches, recompute=recompute)
    return pipeline.report(*arguments(pipeline))


def compiled_bytes(report: PipelineReport) -> int:
    """Return the temporary bytes that XLA reports."""
    assert report.temporary is not None, "this backend does not say what a program's memory is"
    return report.temporary


def settled(schedule: str, ipus: int) -> tuple[int, ...]:
    """Return the numbers in `MICRO_BATCHES` that fill the stash; beyond the first, memory must not grow.

    There are none for "gpipe", which keeps all micro-batches.
    """
    least = {"grouped": 2 * ipus - 1, "looped": 2 * ipus}.get(schedule, ipus)
    return () if schedule == "gpipe" else tuple(m for m in MICRO_BATCHES if m >= least)

"""Check that an IPU's temporary bytes are what its report predicts, and don't grow with the number of micro-batches.

A stage is three tanh layers of 64x64 on micro-batches of 512 rows, so that activations take nearly all the memory. The
compiled step's `memory_analysis().temp_size_in_bytes` is compared with `PipelineReport.predicted_temporary`, for every
schedule below. Nothing is run. docs/measured.md has the rows of 4 IPUs.

    python benchmarks/memory.py [--check]
"""

import functools
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp

from figures import Figures
from ipu_jax import Pipeline, Stage, configure
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
    """Return the compiled report of the benchmark's model."""
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


def main() -> int:
    figures = Figures("temporary bytes of a step: as compiled, as predicted, and in the micro-batches")
    figures.shrink(__name__, SCHEDULES=("grouped",), MICRO_BATCHES=(4,))
    configure(4)
    print("| IPUs | schedule | stash, MB | predicted, MB | compiled, MB | compiled / predicted |")
    print("|---|---|---|---|---|---|")
    for ipus, schedule in [(ipus, schedule) for ipus in (2, 4) for schedule in SCHEDULES]:
        found = [report_of(schedule, ipus, m) for m in MICRO_BATCHES]
        columns = [(one.stash, one.predicted_temporary, compiled_bytes(one)) for one in found]
        cells = [" / ".join(f"{size / 1e6:.2f}" for size in sizes) for sizes in zip(*columns, strict=True)]
        ratios = " / ".join(f"{compiled_bytes(one) / one.predicted_temporary:.2f}" for one in found)
        print(f"| {ipus} | {schedule} | {' | '.join(cells)} | {ratios} |", flush=True)
    for ipus in (2, 4):
        for schedule in SCHEDULES:
            found = [report_of(schedule, ipus, m) for m in MICRO_BATCHES]
            ratios = [compiled_bytes(one) / one.predicted_temporary for one in found]
            apart = max(max(ratio, 1 / ratio) for ratio in ratios)
            figures.add(f"compiled against predicted bytes, {schedule}, {ipus} IPUs, at most", apart, NEAR)
            flat = [compiled_bytes(report_of(schedule, ipus, m)) for m in settled(schedule, ipus)]
            if flat:
                first, last = settled(schedule, ipus)[0], settled(schedule, ipus)[-1]
                figures.add(f"temporary bytes, M={last} / M={first}, {schedule}, {ipus} IPUs", flat[-1] / flat[0], 1.05)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

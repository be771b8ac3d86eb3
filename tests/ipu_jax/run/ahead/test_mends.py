"""Test what would make a pipeline fit: each line holds the bytes that the changed pipeline's report predicts."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import Pipeline, Stage, everywhere, make_mesh
from ipu_jax.core.analysis.report import in_units
from ipu_jax.core.step_args import StepArgs
from ipu_jax.run.ahead.compiling import mends_of
from ipu_jax.schedules import make_schedule
from sharded_ops import from_all

N, D, M, LAYERS = 32, 64, 8, 2
LAST = "more IPUs for the same layers, or a smaller micro-batch"


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, "float32")


def mlp(w, x):
    for _ in range(LAYERS):
        x = jnp.tanh(x @ w)
    return x


def pipeline_of(places=(0, 1, 2), *, schedule: Any = "grouped", m=M, replicas=1, recompute: Any = "auto"):
    """Return stages of some layers whose activations B needs, on these IPUs."""
    first, last = lambda w, x, mb: mlp(w, mb), lambda w, x, mb: jnp.mean(mlp(w, x) ** 2)
    functions = [first, *[lambda w, x, mb: mlp(w, x)] * (len(places) - 2), last]
    stages = [
        Stage(f, f"w{i}", ipu, recompute=recompute) for i, (f, ipu) in enumerate(zip(functions, places, strict=True))
    ]
    mesh = make_mesh(replicas, max(places) + 1)
    return Pipeline(stages, mesh=mesh, schedule=schedule, gradient_accumulation=m)


def arguments_of(pipeline, n=N):
    params = pipeline.shard_shapes({stage.groups[0]: shape(D, D) for stage in pipeline.stages})
    replicas = [pipeline.replicas] * (pipeline.replicas > 1)
    return params, shape(*replicas, pipeline.options.gradient_accumulation, n, D), None, None


def mends(pipeline, arguments=None, room=0):
    arguments = arguments or arguments_of(pipeline)
    return mends_of(pipeline, pipeline.placement.plan(*arguments), StepArgs(*arguments), room)


def temporary(pipeline, n=N):
    return pipeline.report(*arguments_of(pipeline, n), compile=False).predicted_temporary


def line(change, now, then):
    assert then < now
    return f"{change}: temporary {in_units(now, 'B')} -> {in_units(then, 'B')}, by prediction"


@pytest.mark.slow
def test_a_line_says_whether_the_change_is_enough():
    pipeline = pipeline_of()
    room = temporary(pipeline_of(schedule="1f1b")) + 4 * D * D  # and the gradients
    enough = {name: line.endswith(": fits") for line in mends(pipeline, room=room) for name in [line.split(":")[0]]}
    assert enough["schedule='1f1b'"]
    assert not any(line.endswith(": fits") for line in mends(pipeline, room=room - 1) if "1f1b" in line)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_line_holds_the_bytes_of_the_changed_pipeline(replicas):
    now = temporary(pipeline_of(replicas=replicas))
    halved = temporary(pipeline_of(replicas=replicas, m=2 * M), n=N // 2)
    assert mends(pipeline_of(replicas=replicas)) == (
        line("recompute='all' on every stage", now, temporary(pipeline_of(replicas=replicas, recompute="all"))),
        line(f"gradient_accumulation={2 * M} with half of each micro-batch", now, halved),
        line("schedule='1f1b'", now, temporary(pipeline_of(replicas=replicas, schedule="1f1b"))),
        LAST,
    )


names = lambda lines: [line.partition(":")[0].split("=")[0] for line in lines]


def test_only_what_makes_it_smaller_is_named():
    assert names(mends(pipeline_of(schedule="1f1b"))) == ["recompute", "gradient_accumulation", LAST]
    assert names(mends(pipeline_of(schedule="1f1b", recompute="all"))) == ["gradient_accumulation", LAST]
    odd = pipeline_of(schedule="1f1b", recompute="all")
    assert mends(odd, arguments_of(odd, n=3)) == (LAST,)


def test_a_schedule_that_does_not_fit_the_places_is_left_out():
    looped = pipeline_of((0, 1, 0, 1), schedule="interleaved")
    assert names(mends(looped)) == ["recompute", "gradient_accumulation", LAST]


def test_a_schedule_of_ones_own_keeps_its_micro_batches():
    own = make_schedule("grouped", ipus=3, gradient_accumulation=M, placement=(0, 1, 2))
    assert names(mends(pipeline_of(schedule=own))) == ["recompute", "schedule", LAST]


@pytest.mark.slow
def test_a_function_is_cut_again_for_each_change():
    weights, rows = {"a": shape(D, D), "b": shape(D, D)}, PartitionSpec("ipu")

    def loss(params, x):
        count, sum_of = x.shape[0], everywhere(lambda w, x: from_all(x @ w.T, -1, D).sum(), in_specs=(rows, None))
        x = mlp(params["a"], mlp(params["a"], x)).reshape(count, D)  # for one size of micro-batch
        return sum_of(params["b"], x) / count

    def cut(m=M, n=N, **options):
        return Pipeline.from_function(loss, weights, shape(n, D), ipus=2, gradient_accumulation=m, **options)

    def predicted(m=M, n=N, **options):
        pipeline = cut(m, n, **options)
        return pipeline.report(pipeline.shard_shapes(weights), shape(m, n, D), compile=False).predicted_temporary

    now = predicted()
    then = {
        "recompute='all' on every stage": predicted(recompute="all"),
        "gradient_accumulation=16 with half of each micro-batch": predicted(2 * M, N // 2),
        "schedule='1f1b'": predicted(schedule="1f1b"),
        "schedule='zb-h1'": predicted(schedule="zb-h1"),
    }
    arguments = (cut().shard_shapes(weights), shape(M, N, D), None, None)
    assert mends(cut(), arguments) == (*[line(name, now, of) for name, of in then.items() if of < now], LAST)

"""Test the memory of a compiled step against the prediction of its report and the promises of the design.

The bytes are XLA's own (`memory_analysis`), and the buffers are those in the compiled program's text, so nothing here
depends on the code that predicts.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from support.tanh_layers import (
    LAYERS,
    MICRO_BATCHES,
    NEAR,
    ROWS,
    SCHEDULES,
    WIDTH,
    arguments,
    compiled_bytes,
    pipeline_of,
    report_of,
    settled,
)

slow = pytest.mark.slow
MESSAGE = 4 * ROWS * WIDTH  # bytes of one activation


def compiled_step(pipeline, params, batch):
    return jax.jit(pipeline.value_and_grad).lower(params, batch).compile()


@slow
@pytest.mark.parametrize("ipus", [2, 4])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in ("gpipe", "looped-bfs")])
def test_temporary_bytes_are_flat_in_the_micro_batches(schedule, ipus):
    flat = [compiled_bytes(report_of(schedule, ipus, m)) for m in settled(schedule, ipus)]
    assert len(flat) >= 2
    assert max(flat) <= 1.05 * min(flat)


@slow
@pytest.mark.parametrize("ipus", [2, 4])
def test_gpipe_keeps_every_micro_batch(ipus):
    small, large = (report_of("gpipe", ipus, m) for m in (8, 16))
    assert large.stash == 2 * small.stash
    assert compiled_bytes(large) - compiled_bytes(small) == pytest.approx(small.stash, rel=0.01)


@slow
@pytest.mark.parametrize(("ipus", "micro_batches"), [*((2, m) for m in MICRO_BATCHES), (4, 8), (4, 16)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_temporary_bytes_are_what_the_report_predicts(schedule, ipus, micro_batches):
    found = report_of(schedule, ipus, micro_batches)
    assert found.stash > 0.35 * found.predicted_temporary, "the stash is a large part of what this model needs"
    assert found.predicted_temporary / NEAR <= compiled_bytes(found) <= found.predicted_temporary * NEAR


DEPTHS = pytest.mark.parametrize(("schedule", "depths"), [("grouped", (3, 1)), ("1f1b", (2, 1)), ("gpipe", (8, 8))])


@DEPTHS
def test_the_stash_is_depth_times_residuals(schedule, depths):
    """By hand: each of 3 layers keeps tanh, from which B computes 1 - tanh**2; the last stage also keeps its input."""
    pipeline = pipeline_of(schedule, 2, 8)
    first, last = (part.stash for part in pipeline.report(*arguments(pipeline), compile=False).ipus)
    assert first == depths[0] * LAYERS * MESSAGE
    assert last == depths[1] * (LAYERS + 1) * MESSAGE


@slow
@DEPTHS
def test_without_recompute_the_stash_holds_what_jax_keeps(schedule, depths):
    """By hand: each of 3 layers keeps tanh and 1 - tanh; the last stage also its input and the difference from y."""
    first, last = (part.stash for part in report_of(schedule, 2, 8, recompute="none").ipus)
    a_layer = 2 * LAYERS * MESSAGE
    # jax 0.12 finds that the tanh of the first stage's last layer is its result, and keeps one value less there
    assert first in (depths[0] * a_layer, depths[0] * (a_layer - MESSAGE))
    assert last in (depths[1] * (a_layer + 2 * MESSAGE), depths[1] * (a_layer + MESSAGE))


@slow
def test_recompute_takes_the_stash_away():
    kept, found = (report_of("1f1b", 2, 8, recompute=recompute) for recompute in ("none", "all"))
    assert [part.stash for part in found.ipus] == [0, MESSAGE], "the first stage reads its input from the batch"
    assert compiled_bytes(found) < 0.6 * compiled_bytes(kept)
    # the working set is the largest part here, and the report has only an upper bound of it
    assert compiled_bytes(found) <= found.predicted_temporary * NEAR
    assert found.ipus[0].flops > 1.3 * kept.ipus[0].flops, "a third more work"


WIDE = 512  # weights of 1 MB, activations of 2 rows


@pytest.fixture(scope="module", params=[pytest.param(name, marks=slow) for name in ("grouped", "1f1b")] + ["zb-h1"])
def heavy_weights(request):
    pipeline = pipeline_of(request.param, 2, 8)
    params, batch = arguments(pipeline, width=WIDE, rows=2)
    return pipeline, params, batch, compiled_step(pipeline, params, batch)


@slow
def test_no_weights_are_stashed(heavy_weights):
    pipeline, params, batch, step = heavy_weights
    leaf, message = 4 * WIDE * WIDE, 4 * 2 * WIDE
    found = pipeline.report(params, batch)
    assert found.stash < 64 * message < leaf / 2
    # sums are in the gradients that the step returns; beyond those there are at most one stage's products
    assert step.memory_analysis().temp_size_in_bytes <= 1.05 * LAYERS * leaf
    assert step.memory_analysis().output_size_in_bytes == pytest.approx(LAYERS * leaf, rel=0.01)
    assert found.ipus[0].gradients == found.ipus[0].accumulators == LAYERS * leaf


@pytest.mark.slow
def test_no_buffer_holds_gradients_of_several_stages(heavy_weights):
    """An IPU sums its own stages' gradients only: no array as large as two leaves."""
    *_, step = heavy_weights
    shapes = re.findall(r"\bf32\[([\d,]+)\]", step.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert largest == WIDE * WIDE


def test_half_precision_sums_are_wider_than_their_gradients():
    pipeline = pipeline_of("1f1b", 2, 4)
    params, batch = arguments(pipeline)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    params = pipeline.shard(pipeline.unshard(params))
    part = pipeline.report(params, batch, compile=False).ipus[0]
    assert (part.weights, part.gradients, part.accumulators) == tuple(LAYERS * WIDTH * WIDTH * k for k in (2, 2, 4))

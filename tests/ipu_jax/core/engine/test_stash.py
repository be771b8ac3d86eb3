"""Test where the rings of the stash lie, that they keep values of any shape, and what padding to tiles costs on a TPU.

A TPU's layout runs on CPUs here: only the names of the platforms differ.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage, make_mesh
from ipu_jax.core.engine.stash import Buffer, Stash
from support.against_plain import (
    assert_equals_plain,
    bubbles_hold_nan,  # noqa: F401 (a fixture)
)
from support.platforms import programs_for

N, D, HEADS = 6, 16, 2


def tanhs(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def shapes_of(
    widths: list[list[int]], schedule: str, micro_batches: int, *, rows: int = N, platform: str = "gpu"
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the buffers for tanh layers of these widths, a list per IPU."""
    ends = [widths[0][0], *(of_ipu[-1] for of_ipu in widths)]
    every = [[ends[i], *of_ipu] for i, of_ipu in enumerate(widths)]
    params = {
        f"p{i}": [np.ones((a, b), np.float32) for a, b in itertools.pairwise(of_ipu)] for i, of_ipu in enumerate(every)
    }
    last = len(widths) - 1
    stages = [
        Stage(
            lambda w, x, mb, i=i: (lambda y: jnp.sum(y) if i == last else y)(tanhs(w, mb if x is None else x)),
            params=f"p{i}",
            ipu=i,
        )
        for i in range(len(widths))
    ]
    pipeline = Pipeline(stages, schedule=schedule, gradient_accumulation=micro_batches)
    batch = jax.ShapeDtypeStruct((micro_batches, rows, ends[0]), np.float32)
    with programs_for(platform):
        plan = pipeline.placement.plan(pipeline.shard(params), batch)
    return {name: shape.shape for name, shape in Stash(plan).shapes.items()}


SHAPED = f"stash:float32:{N}x{D}"
BY_HAND = {  # widths per IPU, schedule, platform and shapes
    # grouped keeps 3 micro-batches on IPU 0 and 1 on IPU 1; IPU 1 keeps its input, too
    "one shape": ([[D, D], [D, D]], "grouped", "gpu", {SHAPED: (6, N, D)}),
    # IPU 1 keeps its input, of D, beside a layer of 2D and one of D: 4 rows more than IPU 0
    "two shapes of which all IPUs keep as much": (
        *([[2 * D, D], [2 * D, D]], "gpipe", "gpu"),
        {f"stash:float32:{N}x{2 * D}": (4, N, 2 * D), SHAPED: (8, N, D)},
    ),
    # IPU 0 keeps 3 micro-batches of 320 and of 8, IPU 1 one of 8 and one of 20, for which a buffer has two rows
    "a shape of one IPU, which would take room on the other": (
        *([[320, 8], [20]], "grouped", "gpu"),
        {f"stash:float32:{N}x8": (3, N, 8), "stash:float32:flat": (N * 960 + 1,)},
    ),
    "all are flat on a CPU": ([[D, D], [D, D]], "grouped", "cpu", {"stash:float32:flat": (N * 6 * D + 1,)}),
}


@pytest.mark.parametrize(("widths", "schedule", "platform", "shapes"), BY_HAND.values(), ids=BY_HAND)
def test_shapes_of_buffers_by_hand(widths, schedule, platform, shapes):
    assert shapes_of(widths, schedule, 4, platform=platform) == shapes


@pytest.mark.fast("5-False")
@pytest.mark.parametrize(("width", "spare"), [(10, True), (5, False)])
def test_on_a_tpu_buffers_may_take_10_percent_more(width, spare):
    # IPU 0 keeps 3 micro-batches of `width` tiles, IPU 1 one of them and one or two of one tile (as jax decides), for
    # which a buffer has two rows: 2 / 30 more, or 2 / 15
    found = shapes_of([[128 * width], [128]], "grouped", 4, rows=8, platform="tpu")
    shaped = {f"stash:float32:8x{128 * width}": (3, 8, 128 * width), "stash:float32:8x128": (2, 8, 128)}
    if spare:
        assert found == shaped
    else:
        assert "stash:float32:flat" in found
        assert sum(map(math.prod, found.values())) <= 1.1 * math.prod(shaped[f"stash:float32:8x{128 * width}"])


def unlike(x: Any, weights: Any) -> Any:
    """Return what the first stage computes: it keeps values with heads and dims of 1, scalars, masks and integers."""
    heads = jnp.tanh((x @ weights["up"]).reshape(N, HEADS, 1, -1))
    scores = jax.nn.softmax(jnp.einsum("nhik,mhik->hnm", heads, heads))
    mixed = jnp.einsum("hnm,mhik->nhik", scores, heads).reshape(N, -1)
    kept = jnp.where(mixed > jnp.median(mixed), mixed, 0) * jax.lax.rsqrt(jnp.mean(mixed**2) + 1)
    order = jnp.argsort(kept, axis=1)
    return jnp.take_along_axis(kept, order, 1) @ weights["down"]


def squeezed(x: Any, weights: Any) -> Any:
    """Return what the last stage computes: its values have another shape than the first's."""
    y = jnp.sin(x[:, None, :] @ weights)[:, 0, :]
    return jnp.mean(jnp.log1p(y**2).sum(1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize("schedule", ["grouped", "1f1b", "zb-h1"])
def test_values_of_any_shape_come_back(schedule, platform):
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / 2).astype(np.float32)
    params = {"a": {"up": normal(D, 2 * D), "down": normal(2 * D, D)}, "b": normal(D, 5)}
    m = 5
    pipeline = Pipeline(
        [
            Stage(lambda w, x, mb: unlike(mb, w), params="a", ipu=0),
            Stage(lambda w, x, mb: squeezed(x, w), params="b", ipu=1),
        ],
        mesh=make_mesh(1, 2),
        schedule=schedule,
        gradient_accumulation=m,
    )
    batch = normal(m, N, D)
    plain = lambda p: jnp.mean(jnp.stack([squeezed(unlike(x, p["a"]), p["b"]) for x in batch]))
    with programs_for(platform):
        assert_equals_plain(pipeline, params, batch, plain)


# tiles


@pytest.mark.parametrize(
    ("dtype", "row", "rows", "elements"),
    [
        ("float32", (512, 1024), 3, 3 * 512 * 1024),
        ("float32", (1024,), 3, 4 * 1024),  # the rows are the dim before the last
        ("float32", (512, 10), 3, 3 * 16 * 512),  # 10 columns would take 128; as rows of 512 they take 16
        ("bfloat16", (4, 1000, 16, 64), 2, 2 * 4 * 16 * 64 * 1024),  # 1,000 lies last
        ("int8", (3, 200), 2, 2 * 4 * 256),
        ("float32", (), 3, 128),
    ],
)
def test_padding_by_hand(dtype, row, rows, elements):
    of_tpu, of_gpu = (Buffer("stash", dtype, row, platform) for platform in ("tpu", "gpu"))
    assert of_tpu.padded_nbytes(rows) == elements * np.dtype(jnp.dtype(dtype)).itemsize
    assert of_gpu.padded_nbytes(rows) == of_gpu.nbytes(rows) == of_tpu.nbytes(rows)


def test_a_report_says_what_padding_costs():
    """By hand: IPU 0 keeps 3 micro-batches of (64, 1270), whose rows take 1,280 columns."""
    stages = [
        Stage(lambda w, x, mb: jnp.tanh(mb @ w), params="a", ipu=0),
        Stage(lambda w, x, mb: jnp.mean(x), ipu=1),
    ]
    pipeline = Pipeline(stages, schedule="grouped", gradient_accumulation=4)
    params = pipeline.shard({"a": np.ones((8, 1270), np.float32)})
    with programs_for("tpu"):
        found = pipeline.report(params, jax.ShapeDtypeStruct((4, 64, 8), np.float32), compile=False)
    assert (found.stash, found.stash_padding) == (4 * 3 * 64 * 1280, 4 * 3 * 64 * 10)
    assert found.ipus[0].stash == 4 * 3 * 64 * 1270
    assert "stash 983.0 kB (7.7 kB of it pads to tiles)" in str(found)


def test_nothing_pads_elsewhere():
    pipeline = Pipeline([Stage(lambda w, x, mb: jnp.mean(jnp.tanh(mb @ w)), params="a")], gradient_accumulation=2)
    params = pipeline.shard({"a": np.ones((8, 200), np.float32)})
    found = pipeline.report(params, jax.ShapeDtypeStruct((2, 6, 8), np.float32), compile=False)
    assert found.stash_padding == 0
    assert "tiles" not in str(found)


@pytest.mark.parametrize(("axes", "is_pinned"), [({}, True), ({"tensor": 2}, False)], ids=["whole", "split"])
def test_on_chips_buffers_have_a_layout_unless_xla_splits_them(axes, is_pinned):
    """XLA's partitioner cannot split a layout constraint, and would gather the buffer in each task."""
    stages = [
        Stage(lambda w, x, mb: jnp.tanh(mb @ w), params="a", ipu=0),
        Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="b", ipu=1),
    ]
    with programs_for("tpu"):
        pipeline = Pipeline(stages, mesh=make_mesh(1, 2, **axes), gradient_accumulation=3)
        params = pipeline.shard({"a": np.ones((128, 128), np.float32), "b": np.ones((128, 128), np.float32)})
        program = jax.make_jaxpr(pipeline.value_and_grad)(params, np.ones((3, 8, 128), np.float32))
    assert ("layout_constraint" in str(program)) == is_pinned

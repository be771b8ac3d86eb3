"""Give a cut function micro-batches of other sizes than it was cut for, and compare every result with plain jax.

Some functions have the same operations for all sizes, others do not: their number of chunks follows from the length.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, verify
from ipu_jax.core.cutting import function
from ipu_jax.core.cutting.everywhere import is_everywhere
from ipu_jax.core.cutting.function import FunctionModel
from ipu_jax.core.cutting.holders import cut_along
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.composed import composed, cut_into
from support.dense import largest_relative_error
from support.inputs import normal
from support.refusals import compilations, refusals, refused
from support.trained import compiled_quickly

from .everywhere_models import EXAMPLES as EVERYWHERE
from .test_whole_models import MODELS, Step, assert_equal, differentiated

_compiled_quickly = compiled_quickly()

LENGTHS_STAY = ("scanned_gpt", "linen_gpt", "linen_gpt_scanned")
"""Models whose positions are as many as the tokens of their own micro-batches."""


def twice_the_rows(leaf: Any) -> Any:
    return np.concatenate([leaf, leaf[::-1]]) if leaf.ndim else leaf


def longer_rows(leaf: Any) -> Any:
    is_tokens = leaf.ndim == 2 and leaf.dtype == np.int32
    return np.concatenate([leaf, leaf[:, 2::-1]], 1) if is_tokens else leaf


def cut_along_weights(trace: Any, holders: Any, like: Any, cut: Any, state: Any) -> Any:
    return cut_along(trace, holders, state)


@pytest.mark.fast("places-twice_the_rows-control_flow", "weights-twice_the_rows-scan_with_a_key_per_layer")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("resized", [twice_the_rows, longer_rows])
@pytest.mark.parametrize("way", ["places", "weights"])
def test_the_stages_compute_what_the_function_computes(name, resized, way, monkeypatch):
    example, rng = MODELS[name](), np.random.default_rng(1)
    micro_batch = example.micro_batch(rng)
    other, key = jax.tree.map(resized, micro_batch), jax.random.key(7) if example.takes_key else None
    if resized is longer_rows and (name in LENGTHS_STAY or shapes_of(other) == shapes_of(micro_batch)):
        return
    if way == "weights":
        monkeypatch.setattr(function, "cut_alike", cut_along_weights)
    (expected, (aux, state)), of_loss = differentiated(name)(example.params, example.state, other, key)
    for stages in (2, 4):
        first = cut_into(stages, example.loss, example.params, micro_batch, state=example.state)
        model = first.of_microbatch(other, 0)
        assert (model.weights, model.state) == (first.weights, first.state)
        run = jax.jit(jax.value_and_grad(composed(model), has_aux=True))
        (loss, (of_stages, of_groups)), gradients = run(example.params, example.state, other, key)
        split = {} if model.state is None else model.state.split(state)  # each copy of a leaf
        assert_equal(
            Step(loss, gradients, of_stages, of_groups), Step(expected, of_loss, aux, split), example.tolerance
        )


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


V, D, LAYERS, M = 11, 8, 4, 3
PARAMS = {
    "table": normal((V, D)),
    "positions": normal((16, D), seed=1),
    "layers": [
        {"up": normal((D, 2 * D), seed=2 + k) / 3, "down": normal((2 * D, D), seed=20 + k) / 4} for k in range(LAYERS)
    ],
}


def loss(params, ids):
    """Mix each chunk of four tokens in an operation of its own; return how many chunks there are, too."""
    x, chunks = params["table"][ids] + params["positions"][: ids.shape[1]], ids.shape[1] // 4
    for w in params["layers"]:
        parts = [x[:, 4 * k : 4 * k + 4] for k in range(chunks)]
        x = jnp.concatenate([part + (1 + k) * jnp.cumsum(part, 1) / 4 for k, part in enumerate(parts)], 1)
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    chances = jax.nn.log_softmax((x @ params["table"].T).astype(jnp.float32))
    return -jnp.take_along_axis(chances[:, :-1], ids[:, 1:, None], -1).mean(), {
        "chunks": chunks + jnp.zeros(()),
        "x": x[0, 0],
    }


def batch_of(*shape):
    return np.random.default_rng(0).integers(V, size=shape).astype(np.int32)


def cut(ipus: int = 2, schedule: str = "1f1b", *, params: Any = PARAMS, fn: Any = loss, **options: Any) -> Pipeline:
    options = {"gradient_accumulation": M} | options
    return Pipeline.from_function(fn, params, batch_of(2, 8), ipus=ipus, schedule=schedule, **options)


@functools.cache
def plain() -> Any:
    """Return a function of weights and a batch that returns the mean loss, aux and mean gradients, by plain jax."""

    def mean(params, batch):
        losses, aux = jax.vmap(lambda ids: loss(params, ids))(batch)
        return losses.mean(), aux

    return jax.jit(jax.value_and_grad(mean, has_aux=True))


def assert_right(pipeline: Pipeline, params: Any, batch: Any, tolerance: float = 1e-6) -> None:
    placed = pipeline.shard(params)
    found, gradients = pipeline.value_and_grad(placed, batch)
    (value, aux), expected = plain()(params, batch.reshape(-1, *batch.shape[-2:]))
    of_replicas = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[batch.ndim - 2 :]), found[1])
    named = zip(
        jax.tree.leaves((found[0], of_replicas, pipeline.unshard(gradients))),
        jax.tree.leaves_with_path((value, aux, expected)),
        strict=True,
    )
    for leaf, (path, wanted) in named:
        assert largest_relative_error(leaf, wanted) < tolerance, path
    assert largest_relative_error(pipeline.loss(placed, batch)[0], value) < tolerance


CASES = (
    *((ipus, "1f1b", {}) for ipus in (1, 2, 4)),
    *((2, schedule, {}) for schedule in ("zb-wave", "zb-h1", "auto")),
    (2, "grouped", {"head": "concurrent"}),
    (2, "1f1b", {"replicas": 2}),
)


@pytest.mark.fast("2-zb-wave")
@pytest.mark.parametrize(
    ("ipus", "schedule", "options"), CASES, ids=["-".join(map(str, [*case[:2], *case[2]])) for case in CASES]
)
def test_a_pipeline_takes_each_length(ipus, schedule, options):
    pipeline = cut(ipus, schedule, **options)
    lead = (options["replicas"],) if "replicas" in options else ()
    for rows, length in ((1, 12), (3, 4)):
        assert_right(pipeline, PARAMS, batch_of(*lead, M, rows, length))


@pytest.mark.slow
def test_half_precision_is_as_exact_as_for_the_first_size():
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PARAMS)
    pipeline = cut(params=half)
    assert_right(pipeline, half, batch_of(M, 2, 8), 2e-2)
    assert_right(pipeline, half, batch_of(M, 3, 12), 2e-2)


@pytest.mark.fast("tied")
@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_lies_split_over_the_ipus_stays_split(name):
    example = EVERYWHERE[name]()
    micro_batch = example.micro_batch(np.random.default_rng(0))
    options: Any = {"ipus": 3, "schedule": "1f1b", "gradient_accumulation": M}
    pipeline = Pipeline.from_function(example.loss, example.params, micro_batch, **options)
    other = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf[:1]]), micro_batch)
    batch = jax.tree.map(lambda leaf: np.stack([leaf, leaf[::-1], leaf]), other)
    mean = lambda params: (
        sum(example.dense(params, jax.tree.map(lambda leaf, m=m: leaf[m], batch)) for m in range(M)) / M
    )
    expected, of_loss = jax.jit(jax.value_and_grad(mean))(example.params)
    found, gradients = pipeline.value_and_grad(pipeline.shard(example.params), batch)
    assert largest_relative_error(jax.tree.leaves(found)[0], expected) < 1e-6
    for leaf, wanted in zip(jax.tree.leaves(pipeline.unshard(gradients)), jax.tree.leaves(of_loss), strict=True):
        assert largest_relative_error(leaf, wanted) < 2e-6


def function_of(pipeline: Pipeline, batch: Any) -> FunctionModel:
    found = pipeline.placement.of_batch(batch).function
    assert found is not None
    return found


def test_a_head_is_on_all_ipus_for_each_size_though_something_else_needs_its_table_whole():
    def loss(params, ids):
        x = params["table"][ids] @ (params["table"].T @ params["table"])
        x = jnp.tanh(x @ params["layers"][0]["up"]) @ params["layers"][0]["down"]
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ params["table"].T), ids[..., None], -1).mean()

    pipeline = cut(fn=loss, head="concurrent")
    for ids in (batch_of(M, 2, 8), batch_of(M, 3, 5)):
        found = function_of(pipeline, ids)
        assert not any(leaf.split is not None for leaf in found.weights.leaves)
        of_all = [any(map(is_everywhere, of_stage)) for of_stage in found.cut.of_stages]
        assert of_all == [ipu is None for ipu in found.cut.ipus] == [True, False, False, True]


def test_like_operations_are_cut_at_the_same_places_though_others_are_more_even():
    """The layers of the second half take more work for longer rows, as attention does."""

    def loss(params, ids):
        x = params["table"][ids]
        for k, w in enumerate(params["layers"]):
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
            x = x + jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x if k > 1 else x
        return jnp.mean(x**2)

    pipeline, long = cut(2, fn=loss), batch_of(M, 2, 64)
    first, other = function_of(pipeline, batch_of(M, 2, 8)), function_of(pipeline, long)
    assert first is pipeline.function
    assert other is function_of(pipeline, long)  # cut once
    assert other.cut.ends == first.cut.ends
    assert cut_into(2, loss, PARAMS, long[0]).cut.ends != first.cut.ends
    assert [stage.name for stage in other.stages] == [stage.name for stage in first.stages]


def test_it_is_proved_planned_and_reported_for_the_sizes_that_are_given():
    pipeline, long, short = cut(schedule="auto"), batch_of(M, 4, 12), batch_of(M, 1, 4)
    placed = pipeline.shard(PARAMS)
    reports = [pipeline.report(placed, batch, compile=False) for batch in (short, long)]
    assert reports[0].stash < reports[1].stash
    work = [pipeline.stage_costs(placed, batch) for batch in (short, long)]
    assert sum(work[0].forward) * 8 < sum(work[1].forward)
    assert pipeline.choose_schedule(placed, long).makespan > 8 * pipeline.choose_schedule(placed, short).makespan
    before = len(compilations)
    pipeline.value_and_grad(placed, short)
    compiled = len(compilations)
    pipeline.value_and_grad(placed, short)
    assert len(compilations) == compiled > before
    assert verify(pipeline, placed, long).worst[1] < 1e-6


@pytest.mark.slow
def test_a_proof_of_all_bits_holds_for_other_sizes():
    verify(pipeline := cut(), pipeline.shard(PARAMS), batch_of(M, 4, 12), exact=True)


def counting(params, state, ids):
    value, _ = loss(params, ids)
    mean = params["table"][ids].mean((0, 1))
    return value + state["mean"].sum(), {"mean": 0.9 * state["mean"] + 0.1 * mean, "rows": state["rows"] + len(ids)}


def test_a_state_stays_where_it_is():
    state = {"mean": jnp.zeros(D), "rows": jnp.zeros((), jnp.int32)}
    pipeline = cut(fn=counting, state=state)
    placed, of_stages, expected = pipeline.shard(PARAMS), pipeline.shard_state(state), state
    for number, (rows, length) in enumerate([(2, 8), (3, 12)]):
        batch, losses = batch_of(M, rows, length) * (1 + number) % V, []
        for ids in batch:
            value, expected = counting(PARAMS, expected, ids)
            losses.append(value)
        found, _, of_stages = pipeline.value_and_grad(placed, batch, of_stages)
        assert largest_relative_error(found, np.mean(losses)) < 1e-6
    found = pipeline.unshard(of_stages)
    np.testing.assert_allclose(found["mean"], expected["mean"], rtol=1e-5)
    assert found["rows"] == expected["rows"] == M * 5


def test_an_aux_comes_from_the_stage_that_computes_it_at_this_size():
    """What no weight is in moves to the first stage where rows are long, and is all of the work."""

    def loss(params, x):
        x, aux = jnp.tanh(x @ params["first"]), []
        for k in range(6 + (x.shape[1] > 8)):
            x = x + jax.nn.softmax(x @ x.swapaxes(1, 2) / (1 + k)) @ x / 9
            aux.append(x[0, 0, :2])
        return jnp.mean((x @ params["last"]) ** 2), aux

    params = {"first": normal((40 * D, D)) / 9, "last": normal((D, D))}
    one = normal((1, 2, 40 * D))
    pipeline = Pipeline.from_function(loss, params, one, ipus=2, gradient_accumulation=M)
    placed, long = pipeline.shard(params), normal((M, 1, 128, 40 * D))
    homes = [function_of(pipeline, batch).aux_home for batch in (one[None], long)]
    assert homes[0][:6] != homes[1][:6]
    for found in (pipeline.loss(placed, long), pipeline.value_and_grad(placed, long)[0]):
        for m in range(M):
            _, aux = loss(params, long[m])
            for leaf, wanted in zip(found[1], aux, strict=True):
                assert largest_relative_error(leaf[m], wanted) < 1e-6


def test_operations_that_are_alike_can_read_other_weights():
    """Two towers, of which the one that the second stage holds is computed first if there are many rows."""

    def loss(params, x):
        towers = [params["a"], params["b"]][:: 1 if len(x) < 5 else -1]
        ends = [jnp.tanh(jnp.tanh(x @ w) @ w) for w in towers]
        return jnp.mean((ends[0] + ends[1]) ** 2)

    params, rows = {"a": normal((D, D)), "b": normal((D, D), seed=1)}, normal((M, 6, D), seed=2)
    pipeline = Pipeline.from_function(loss, params, rows[0, :4], ipus=2, gradient_accumulation=M)
    expected, of_loss = jax.value_and_grad(lambda p: jnp.mean(jax.vmap(lambda x: loss(p, x))(rows)))(params)
    found, gradients = pipeline.value_and_grad(pipeline.shard(params), rows)
    assert largest_relative_error((found, pipeline.unshard(gradients)), (expected, of_loss)) < 1e-6


def test_operations_that_are_alike_can_follow_from_others():
    """Two towers; what has no weights follows from the first layer, or in longer rows from the second."""

    def loss(params, x):
        first = jnp.tanh(x @ params["a"])
        second = jnp.tanh(first @ params["b"])
        free = first if x.shape[1] < 40 else second
        for _ in range(4):
            free = jnp.tanh(free @ free.swapaxes(1, 2)) @ free / 50
        tower = jnp.tanh(jnp.tanh(x[:, ::-1] @ params["a"]) @ params["b"])
        return jnp.mean((second * tower + free) ** 2)

    params = {"a": normal((D, D)), "b": normal((D, D), seed=1)}
    short, long = normal((M, 2, 32, D), seed=2), normal((M, 2, 48, D), seed=3)
    pipeline = Pipeline.from_function(loss, params, short[0], ipus=2, gradient_accumulation=M)
    expected, of_loss = jax.value_and_grad(lambda p: jnp.mean(jax.vmap(lambda x: loss(p, x))(long)))(params)
    found, gradients = pipeline.value_and_grad(pipeline.shard(params), long)
    assert largest_relative_error((found, pipeline.unshard(gradients)), (expected, of_loss)) < 1e-6


def test_a_copy_of_the_state_stays_in_a_stage_that_does_not_read_it_at_this_size():
    def loss(params, state, x):
        scale = 1 + state["calls"] / 9
        y = jnp.tanh(x @ params["a"] * scale) @ params["b"]
        return jnp.mean((y * (scale if len(x) < 5 else 1)) ** 2), {"calls": state["calls"] + 1}

    params, rows = {"a": normal((D, D)), "b": normal((D, D), seed=1)}, normal((M, 6, D), seed=2)
    options: Any = {"state": {"calls": jnp.zeros(())}, "ipus": 2, "gradient_accumulation": M}
    pipeline = Pipeline.from_function(loss, params, rows[0, :4], **options)
    placed, of_stages = pipeline.shard(params), pipeline.shard_state(options["state"])
    assert {group.name for group in of_stages.layout.groups} == {"stage 0", "stage 1"}
    state = options["state"]
    for batch in (rows, rows[:, :4]):
        losses = []
        for x in batch:
            value, state = loss(params, state, x)
            losses.append(value)
        found, _, of_stages = pipeline.value_and_grad(placed, batch, of_stages)
        assert largest_relative_error(found, np.mean(losses)) < 1e-6
    assert pipeline.unshard(of_stages)["calls"] == 2 * M


def in_another_order(params, ids):
    """Run the layers backwards if rows are long."""
    layers = params["layers"][:: 1 if ids.shape[1] < 10 else -1]
    return loss(params | {"layers": layers}, ids)


def of_its_length(params, state, ids):
    return loss(params, ids)[0], {"last": ids[0] + state["last"][:1]}


def run(pipeline: Pipeline, batch: Any, state: Any = None) -> Any:
    return pipeline.value_and_grad(pipeline.shard(PARAMS), batch, state and pipeline.shard_state(state))


LAST = {"last": np.zeros(8, np.int32)}


@refusals(
    (
        lambda: run(cut(fn=in_another_order), batch_of(M, 2, 12)),
        "was cut for micro-batches of [2, 8], and raises ValueError for [2, 12]",
        "read weights in the order of the loss function",
    ),
    (lambda: run(cut(), batch_of(M, 2, 20)), "raises ValueError for [2, 20]", "Incompatible shapes", "; give sizes"),
    (lambda: run(cut(), batch_of(M, 16)), "int32[16]", "cut for int32[2, 8]", "this number of dims, of any sizes"),
    (lambda: run(cut(), batch_of(M, 2, 8) * 1.0), "float64[2, 8]", "cut for int32[2, 8]", "this dtype"),
    (
        lambda: run(cut(fn=of_its_length, state=LAST), batch_of(M, 2, 12), LAST),
        "raises ValueError for [2, 12]",
        "new state",
    ),
)
def test_sizes_that_the_function_does_not_take_are_refused(call, holds):
    with refused(*holds):
        call()

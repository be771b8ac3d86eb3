"""Test that a pipeline's update has the bits of its stages on one device, and that `verify(exact=True)` finds one ulp.

The right models were written without regard to the order of additions: norms by `jnp.var`, attention, tied weights,
scans that are cut into rows, dropout, state. Faults change the library by one rounding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh, verify
from ipu_jax.core.programs.segment_program import SegmentProgram
from ipu_jax.pipelines import VerificationError
from support.exact_models import (
    ROWS,
    STATE,
    WEIGHTS,
    D,
    M,
    T,
    V,
    block,
    block_weights,
    cross_entropy,
    drawn,
    embedded,
    listed,
    scanned,
    tied,
    with_dropout_and_state,
)
from support.layers import normal
from support.refusals import refusals, refused

BATCH: Any = {
    "ids": np.random.default_rng(0).integers(0, V, (M, ROWS, T)).astype(np.int32),
    "labels": np.random.default_rng(1).integers(0, V, (M, ROWS, T)).astype(np.int32),
}
ONES = np.ones((M, ROWS, D), np.float32)
MICROBATCH = jax.tree.map(lambda leaf: leaf[0], BATCH)
ROWS_OF_ALL = normal(4, M, ROWS, D, seed=9)


# stages of one's own


def staged(places: list[int], schedule: str, recompute: Any = "auto", **options: Any) -> tuple[Pipeline, Any]:
    how: Any = {"recompute": recompute}
    stages = [
        Stage(lambda w, x, mb: block(w, jax.nn.one_hot(mb["ids"], D)), "first", places[0], **how),
        *(Stage(lambda w, x, mb: block(w, x), f"block {k}", ipu, **how) for k, ipu in enumerate(places[1:-1])),
        Stage(lambda w, x, mb: cross_entropy(x @ w, mb), "head", places[-1], **how),
    ]
    weights = {stage.params: block_weights(k) for k, stage in enumerate(stages[:-1])} | {"head": drawn(D, V)}
    mesh = make_mesh(options.pop("replicas", 1), 1 + max(places))
    return Pipeline(stages, mesh=mesh, gradient_accumulation=M, schedule=schedule, **options), weights


LINE, PAIRS, WAVE, ROUNDS, ONE = [0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]
SCHEDULES = [
    *(
        (LINE, name)
        for name in ("sequential", "grouped", "gpipe", "1f1b", "interleaved", "zb-h1", "grouped-zb", "auto")
    ),
    *((PAIRS, name) for name in ("1f1b", "zb-h1")),
    *((WAVE, name) for name in ("zbv", "zb-wave", "dualpipev")),
    *((ROUNDS, name) for name in ("looped", "looped-bfs", "looped-zb")),
    (ONE, "sequential"),
]


@pytest.mark.fast("0123-1f1b-auto", "0101-looped-zb-none")
@pytest.mark.parametrize("recompute", ["auto", "none", "all"])
@pytest.mark.parametrize(("places", "schedule"), SCHEDULES, ids=lambda one: "".join(map(str, one)))
def test_every_schedule_has_the_bits_of_one_device(places, schedule, recompute):
    pipeline, weights = staged(places, schedule, recompute)
    report = verify(pipeline, pipeline.shard(weights), BATCH, exact=True)
    assert report.loss == report.reference_loss
    assert report.worst[1] == 0


# cut functions


def in_half(p, mb):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
    x, _ = lax.scan(lambda x, w: (block(w, x), None), embedded(half, mb), half["stacked"])
    return cross_entropy((x @ half["table"].T).astype(jnp.float32), mb)


READ = {
    listed: ("table", "positions", "layers", "out"),
    tied: ("table", "positions", "layers"),
    scanned: ("table", "positions", "stacked", "out"),
    in_half: ("table", "positions", "stacked"),
    with_dropout_and_state: ("table", "positions", "layers", "out"),
}


def cut(loss: Any, ipus: int, schedule: str, *, replicas: int = 1, **options: Any) -> tuple[Pipeline, Any, list[Any]]:
    """Return the pipeline, the user's weights, and the other arguments of `verify`."""
    params, others = {name: WEIGHTS[name] for name in READ[loss]}, [None, None]
    state = STATE if loss is with_dropout_and_state else None
    options |= {} if state is None else {"state": state}
    options |= {"ipus": ipus, "replicas": replicas}
    m = M // replicas if M % replicas == 0 else 1
    how = {"gradient_accumulation": m, "schedule": schedule}
    pipeline = Pipeline.from_function(loss, params, MICROBATCH, **how, **options)
    if state is not None:
        others = [pipeline.shard_state(state), jax.random.key(3)]
    lead = (replicas, m) if replicas > 1 else (m,)
    batch = jax.tree.map(lambda leaf: leaf[: replicas * m].reshape(*lead, *leaf.shape[1:]), BATCH)
    return pipeline, params, [batch, *others]


@pytest.mark.fast("scanned-2-zb-h1")
@pytest.mark.parametrize(("ipus", "schedule"), [(2, "zb-h1"), (2, "1f1b"), (2, "zbv"), (4, "1f1b"), (1, "sequential")])
@pytest.mark.parametrize("loss", READ)
def test_a_cut_function_has_the_bits_of_its_stages(loss, ipus, schedule):
    pipeline, params, others = cut(loss, ipus, schedule)
    verify(pipeline, pipeline.shard(params), *others, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "ipus"), [(2, 2), (3, 1), (4, 1)])
@pytest.mark.parametrize("loss", [tied, with_dropout_and_state])
def test_replicas_are_added_in_order(loss, replicas, ipus):
    pipeline, params, others = cut(loss, ipus, "1f1b" if ipus > 1 else "sequential", replicas=replicas)
    verify(pipeline, pipeline.shard(params), *others, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["grouped", "grouped-zb", "looped-zb"])
def test_a_group_of_two_stages_that_run_in_one_tick_is_added_as_the_pipeline_does(schedule):
    def squares(w, x, mb):
        return jnp.tanh((mb if x is None else x) @ w["w"]) * -w["v"]

    head = Stage(lambda w, x, mb: -jax.nn.relu(x @ w - 9).sum() + jnp.square(x[:, 1:] @ w[1:]).mean(), "head", 1)
    stages = [Stage(squares, ("g", "h", "g")[k], k % 2, name=f"{k}") for k in range(3)]
    weights = {name: {"w": drawn(D, D, seed=k), "v": drawn(D, D)[0]} for k, name in enumerate("gh")}
    weights |= {"head": drawn(D, V)}
    pipeline = Pipeline([*stages, head], mesh=make_mesh(1, 2), gradient_accumulation=M, schedule=schedule)
    verify(pipeline, pipeline.shard(weights), ROWS_OF_ALL[0], exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["grouped", "looped-zb"])
def test_minus_zero_has_the_bits_that_a_pipeline_gives_it(schedule):
    def fn(w, x, mb):
        y = jax.nn.relu((mb if x is None else x) * w)
        return Outputs(y * -1.0, aux={"largest": y.max() * -1.0})

    stages = [Stage(fn, "w", 0, name="a"), Stage(lambda w, x, mb: x * w, "x", 1), Stage(fn, "w", 0, name="b")]
    stages += [Stage(lambda w, x, mb: -jax.nn.relu(x @ w - 1).sum(), "head", 1)]
    weights = {"w": -np.ones(D, np.float32), "x": np.ones(D, np.float32), "head": np.eye(D, dtype=np.float32)}
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=M, schedule=schedule)
    assert str(verify(pipeline, pipeline.shard(weights), ONES, exact=True).loss) == "0.0"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_losses_and_state_in_half_have_the_bits_of_one_device(dtype):
    def fn(w, x, mb, *, state):
        y = mb.astype(dtype) @ w
        return Outputs(y, state=state + y.mean(0))

    stages = [Stage(fn, "w", 0, state="s"), Stage(lambda w, x, mb: jnp.square(x @ w).mean(), "head", 1)]
    pipeline = Pipeline(stages, mesh=make_mesh(4, 2), gradient_accumulation=3)
    weights = {"w": drawn(D, D).astype(dtype), "head": drawn(D, V).astype(dtype)}
    state = pipeline.shard_state({"s": jnp.zeros(D, dtype)})
    verify(pipeline, pipeline.shard(weights), ROWS_OF_ALL[:, :3], state, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_mean_loss_of_three_micro_batches_has_the_bits_of_a_division_by_three(seed):
    stages = [Stage(lambda w, x, mb: jnp.abs(mb @ w).mean(), "w", 0)]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 1), gradient_accumulation=3)
    verify(pipeline, pipeline.shard({"w": drawn(D, D, seed=seed)}), ROWS_OF_ALL[0, :3], exact=True)


# faults of one rounding

BACKWARD = SegmentProgram.backward


def by_one_ulp(self, params, inputs, stash, dy, sums, zero):
    return BACKWARD(self, params, inputs, stash, [x * jnp.asarray(1 + 2**-23, x.dtype) for x in dy], sums, zero)


def by_fewer_bits(self, params, inputs, stash, dy, sums, zero):
    totals, dx = BACKWARD(self, params, inputs, stash, dy, sums, zero)
    return totals, [lax.reduce_precision(x, 8, 19) for x in dx]


@pytest.mark.fast("by_one_ulp")
@pytest.mark.parametrize("fault", [by_one_ulp, by_fewer_bits])
def test_a_fault_of_one_rounding_is_found_bit_by_bit_alone(monkeypatch, fault):
    monkeypatch.setattr(SegmentProgram, "backward", fault)
    pipeline, params, others = cut(scanned, 2, "1f1b")
    weights = pipeline.shard(params)
    verify(pipeline, weights, *others)
    with pytest.raises(VerificationError, match=r"results differ from the stages on one device: .*stacked.* bits"):
        verify(pipeline, weights, *others, exact=True)


@pytest.mark.slow
def test_a_function_that_its_stages_do_not_compute_is_found_too(monkeypatch):
    pipeline, params, others = cut(listed, 2, "1f1b")
    assert pipeline.function is not None
    monkeypatch.setattr(
        type(pipeline.function), "unsharded", lambda *_: pytest.fail("the function was compared"), raising=True
    )
    with pytest.raises(pytest.fail.Exception, match="the function was compared"):
        verify(pipeline, pipeline.shard(params), *others, exact=True)


def verified(pipeline: Any, weights: Any, batch: Any, exact: Any = True) -> None:
    verify(pipeline, pipeline.shard(weights), batch, exact=exact)


def concurrent() -> Any:
    first = Stage(lambda w, x, mb: mb @ w, "first", 0)
    head = Stage(lambda w, x, mb: lax.psum((x @ w).sum(), "ipu"), "head", ALL_IPUS)
    return Pipeline([first, head], mesh=make_mesh(1, 2), gradient_accumulation=M, specs={"head": P(None, "ipu")})


def split() -> Any:
    stage = Stage(lambda w, x, mb: (mb @ w).sum(), "w", 0)
    mesh = make_mesh(1, 1, tensor=2)
    return Pipeline([stage], mesh=mesh, gradient_accumulation=M, specs={"w": P(None, "tensor")})


@refusals(
    (lambda: verified(concurrent(), {"first": np.eye(D), "head": np.eye(D)}, ONES), "'head'", "all IPUs", "1e-05"),
    (lambda: verified(split(), {"w": np.eye(D)}, ONES), "tensor", "an order of its own", "leave exact out"),
    (lambda: verified(split(), {"w": np.eye(D)}, ONES, "yes"), "exact='yes'", "True or False"),
)
def test_what_cannot_have_equal_bits_is_refused(call, holds):
    with refused(*holds):
        call()


@pytest.mark.slow
def test_a_forward_pass_is_refused():
    pipeline, params, others = cut(listed, 2, "1f1b")
    forward = pipeline.forward(lambda p, x: p["table"][x].sum(), MICROBATCH["ids"])
    with pytest.raises(ValueError, match="a forward pass makes none: leave exact out"):
        verify(forward, pipeline.shard(params), others[0]["ids"], exact=True)


def test_outputs_of_a_stage_are_compared():
    def fn(w, x, mb):
        return Outputs((mb @ w).sum(), aux={"largest": (mb @ w).max()})

    pipeline = Pipeline([Stage(fn, "w", 0)], gradient_accumulation=M)
    report = verify(pipeline, pipeline.shard({"w": np.eye(D, dtype=np.float32)}), ONES, exact=True)
    assert report.aux_errors == {"aux['largest']": 0.0}

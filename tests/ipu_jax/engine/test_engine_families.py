"""Test that every schedule family, run by the engine, gives the unsharded program's loss and gradients."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Schedule, Stage, make_mesh, verify
from ipu_jax.schedules import SCHEDULES, StageCosts, find_schedule, make_schedule
from sharded_ops import log_softmax_cross_entropy, matmul
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)

CLASSES = 7


def layer(params, x, microbatch):
    x = microbatch["x"] if x is None else x
    return jax.nn.relu(x @ params["w"] + params["b"])


def head(params, x, microbatch):
    logits = matmul(x, params["w"]) + params["b"]
    return jnp.mean(log_softmax_cross_entropy(logits, microbatch["y"], size=CLASSES))


def dense_head(params, x, microbatch):
    log_p = jax.nn.log_softmax(x @ params["w"] + params["b"])
    return -jnp.mean(jnp.take_along_axis(log_p, microbatch["y"][:, None], axis=1))


def weights(rows, columns, seed):
    w = np.random.default_rng(seed).normal(size=(rows, columns)) / rows**0.5
    return {"w": w.astype(np.float32), "b": np.full(columns, 0.1, np.float32)}


def assert_equals_the_unsharded_program(
    name: str,
    ipus: int,
    micro_batches: int,
    *,
    concurrent_head: bool,
    recompute: Any = "auto",
    replicas: int = 1,
    rounds: int = 2,
):
    """Return a chain of unlike layers under the family's own placement, with or without a concurrent head after it."""
    own = make_schedule(name, micro_batches=1, ipus=ipus, rounds=rounds).placement
    placement = [ipu for ipu in own if ipu is not None]
    widths = [12, *(16 + i % 3 for i in range(len(placement)))]
    stages = [Stage(layer, params=f"layer{i}", ipu=ipu, recompute=recompute) for i, ipu in enumerate(placement)]
    params = {f"layer{i}": weights(widths[i], widths[i + 1], i) for i in range(len(placement))}
    params["head"] = weights(widths[-1], CLASSES, 99)
    specs = {"head": {"w": PartitionSpec(None, "ipu"), "b": PartitionSpec("ipu")}}
    if concurrent_head:
        stages.append(Stage(head, params="head", ipu=ALL_IPUS, reference=dense_head))
        schedule = make_schedule(name, micro_batches=micro_batches, ipus=ipus, placement=(*placement, None))
    else:
        stages.pop()
        last = f"layer{len(stages)}"
        whole = lambda p, x, mb: dense_head(p["head"], layer(p["layer"], x, mb), mb)  # noqa: E731
        stages.append(Stage(whole, params="last", ipu=placement[-1], recompute=recompute))
        params["last"] = {"layer": params.pop(last), "head": params.pop("head")}
        specs = {}
        schedule = make_schedule(name, micro_batches=micro_batches, ipus=ipus, rounds=rounds)
    pipeline = Pipeline(
        stages,
        mesh=make_mesh(replicas, ipus),
        schedule=schedule,
        gradient_accumulation=micro_batches,
        specs=specs,
    )
    lead = (micro_batches,) if replicas == 1 else (replicas, micro_batches)
    rng = np.random.default_rng(5)
    batch = {
        "x": rng.normal(size=(*lead, 5, 12)).astype(np.float32),
        "y": rng.integers(0, CLASSES, (*lead, 5)).astype(np.int32),
    }
    sharded = pipeline.shard(params)
    report = verify(pipeline, sharded, batch)
    assert float(pipeline.loss(sharded, batch)) == pytest.approx(report.loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("concurrent_head", [False, True], ids=["local head", "concurrent head"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_family_equals_the_unsharded_program(name, concurrent_head):
    assert_equals_the_unsharded_program(name, 2, 3, concurrent_head=concurrent_head)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_family_on_4_ipus(name, micro_batches):
    assert_equals_the_unsharded_program(name, 4, micro_batches, concurrent_head=micro_batches == 5)


@pytest.mark.parametrize(
    ("name", "ipus", "micro_batches", "rounds"),
    [("zb-wave", 3, 4, 4), ("looped-zb", 2, 3, 3), pytest.param("zb-wave", 2, 5, 5, marks=pytest.mark.slow)],
)
def test_more_stages_per_ipu_than_two(name, ipus, micro_batches, rounds):
    assert_equals_the_unsharded_program(name, ipus, micro_batches, concurrent_head=ipus == 3, rounds=rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute", ["none", "all", jax.checkpoint_policies.dots_saveable], ids=["none", "all", "dots"]
)
@pytest.mark.parametrize("name", ["grouped", "zb-h1"])
def test_recompute_changes_no_number(name, recompute):
    assert_equals_the_unsharded_program(name, 2, 3, concurrent_head=False, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_a_table_made_for_the_costs_of_unlike_stages(lockstep):
    """Four layers there and back over two IPUs, and a concurrent head: the first layer costs 14 times the third."""
    placement, widths = (0, 1, 1, 0, None), (12, 35, 5, 6, 35)
    forward = [rows * columns for rows, columns in itertools.pairwise(widths)] + [widths[-1] * CLASSES]
    costs = StageCosts(forward, forward, forward, stash=[*widths[:-1], 0])
    found = find_schedule(costs, placement=placement, micro_batches=5, stash_limit=70, lockstep=lockstep)
    assert found.schedule.name == "auto"
    assert found.schedule.weight is not None
    stages = [Stage(layer, params=f"layer{i}", ipu=ipu) for i, ipu in enumerate(placement[:-1])]
    stages.append(Stage(head, params="head", ipu=ALL_IPUS, reference=dense_head))
    params = {f"layer{i}": weights(*size, i) for i, size in enumerate(itertools.pairwise(widths))}
    params["head"] = weights(widths[-1], CLASSES, 99)
    specs = {"head": {"w": PartitionSpec(None, "ipu"), "b": PartitionSpec("ipu")}}
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), schedule=found.schedule, gradient_accumulation=5, specs=specs)
    rng = np.random.default_rng(5)
    batch = {
        "x": rng.normal(size=(5, 5, 12)).astype(np.float32),
        "y": rng.integers(0, CLASSES, (5, 5)).astype(np.int32),
    }
    verify(pipeline, pipeline.shard(params), batch)


def test_a_backward_in_reverse_from_torchs_csv():
    schedule = Schedule.from_torch_csv("0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0")
    stages = [
        Stage(lambda w, x, mb: jnp.tanh(mb @ w), params="first", ipu=0),
        Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="last", ipu=1),
    ]
    pipeline = Pipeline(stages, schedule=schedule, gradient_accumulation=3)
    params = pipeline.shard({"first": weights(3, 5, 0)["w"], "last": weights(5, 2, 1)["w"]})
    verify(pipeline, params, np.random.default_rng(2).normal(size=(3, 4, 3)).astype(np.float32))


def test_replicas_of_a_zero_bubble_pipeline():
    assert_equals_the_unsharded_program("zb-h1", 2, 3, concurrent_head=True, replicas=2)


@pytest.mark.parametrize(
    ("name", "places", "micro_batches", "waiting"),
    [
        ("zbv", (0, 1, 2, 3, 3, 2, 1, 0), 5, {"F": [1, 2], "B": [1, 1]}),
        ("looped", (0, 1, 2, 0, 1, 2), 4, {"F": [1, 1], "B": [1, 3]}),
    ],
)
def test_messages_may_wait_for_the_second_of_two_like_stages_alone(name, places, micro_batches, waiting):
    """Stages 1 and 2 are one piece of program, which comes after rings that only stage 2 needs."""
    stages = [Stage(lambda w, x, mb: jnp.sin(x), ipu=ipu, name=f"stage {i}") for i, ipu in enumerate(places)]
    stages[0] = Stage(lambda w, x, mb: mb @ w, params="first", ipu=places[0])
    stages[-1] = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="last", ipu=places[-1])
    pipeline = Pipeline(stages, schedule=name, gradient_accumulation=micro_batches)
    params = pipeline.shard({"first": weights(3, 3, 0)["w"], "last": weights(3, 2, 1)["w"]})
    batch = np.random.default_rng(2).normal(size=(micro_batches, 5, 3)).astype(np.float32)
    plan = pipeline.plan_step(params, batch)
    assert (1, 2) in plan.classes
    assert {"F": [plan.queue(i - 1, "F") for i in (1, 2)], "B": [plan.queue(i, "B") for i in (1, 2)]} == waiting
    verify(pipeline, params, batch)


def test_recompute_all_shrinks_the_temporary_memory():
    def temporary_bytes(recompute: Any) -> int:
        deep = lambda p, x, mb: jax.nn.tanh(jax.nn.tanh(jax.nn.tanh(jax.nn.tanh(mb @ p) @ p) @ p) @ p)  # noqa: E731
        loss = lambda p, x, mb: jnp.mean((x @ p) ** 2)  # noqa: E731
        stages = [Stage(deep, params="a", ipu=0, recompute=recompute), Stage(loss, params="b", ipu=1)]
        pipeline = Pipeline(stages, gradient_accumulation=4, schedule="gpipe")
        params = pipeline.shard({"a": np.ones((64, 64), np.float32), "b": np.ones((64, 64), np.float32)})
        batch = np.ones((4, 512, 64), np.float32)
        compiled = jax.jit(pipeline.value_and_grad).lower(params, batch).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes("all") < 0.8 * temporary_bytes("none")

"""Test combinations of choices against dense twins: each possible pair of the choices below is in some case."""

import dataclasses
from typing import Any

import jax
import pytest

from ipu_jax import Pipeline, make_mesh
from ipu_jax.core.schedules import SCHEDULES, make_schedule
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import Model, chain, largest_relative_error
from support.pairs import covering, pairs_of, possible_pairs

CHOICES: dict[str, tuple[Any, ...]] = {
    "schedule": SCHEDULES,
    "ipus": (1, 2, 4, 8),
    "micro_batches": ("below", "equal", "above"),
    "like": (True, False),
    "concurrent": ("none", "start", "middle", "end", "both", "tied"),
    "recompute": ("auto", "none", "all", "dots"),
    "replicas": (1, 2),
    "reduction": ("mean", "sum"),
}


def possible(case: dict[str, Any]) -> bool:
    return case.get("ipus", 1) * case.get("replicas", 1) <= 8


CASES = covering(CHOICES, possible)


def model_of(schedule: str, ipus: int, micro_batches: str, like: bool, concurrent: str, recompute: Any, replicas: int):
    places: list[int | None] = list(make_schedule(schedule, ipus=ipus, gradient_accumulation=1).placement)
    stages = len(places)
    if concurrent in ("start", "both", "tied"):
        places.insert(0, None)
    if concurrent == "middle":
        places.insert((len(places) + 1) // 2, None)
    if concurrent in ("end", "both", "tied"):
        places.append(None)
    count = {"below": max(1, stages // 2), "equal": stages, "above": stages + 1 + stages // 2}[micro_batches]
    model = chain(tuple(places), count, replicas=replicas, like=like, tied=concurrent == "tied")
    policy = jax.checkpoint_policies.dots_saveable if recompute == "dots" else recompute
    return dataclasses.replace(
        model, stages=tuple(dataclasses.replace(stage, recompute=policy) for stage in model.stages)
    )


def test_the_cases_meet_in_all_pairs():
    met = set().union(*map(pairs_of, CASES))
    assert possible_pairs(CHOICES, possible) <= met
    assert len(CASES) < 80


@pytest.mark.fast(
    "grouped-zb-2-above-True-both-dots-2-sum",
    "looped-zb-2-equal-True-none-none-1-sum",
    "sequential-2-above-True-tied-auto-2-mean",
)
@pytest.mark.parametrize("case", CASES, ids=["-".join(map(str, case.values())) for case in CASES])
def test_equals_the_dense_twin(case):
    schedule, ipus, micro_batches, like, concurrent, recompute, replicas, reduction = case.values()
    model: Model = model_of(schedule, ipus, micro_batches, like, concurrent, recompute, replicas)
    pipeline = Pipeline(
        model.stages,
        mesh=make_mesh(replicas, ipus),
        specs=model.specs,
        gradient_accumulation=model.micro_batches,
        schedule=schedule,
        reduction=reduction,
    )
    params = pipeline.shard(model.params)
    expected_loss, expected = model.twin(reduction)
    before = pipeline.loss(params, model.batch)
    loss, gradients = pipeline.value_and_grad(params, model.batch)
    between = pipeline.loss(params, model.batch)
    again, _ = pipeline.value_and_grad(params, model.batch)
    for found in (before, loss, between, again):
        assert float(found) == pytest.approx(float(expected_loss), rel=1e-5)
    assert largest_relative_error(pipeline.unshard(gradients), expected) < 1e-5

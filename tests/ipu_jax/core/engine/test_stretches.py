"""Test the scan's stretches: which guards are left in each, and that idle concurrent stages have no effect.

Under the two-phase clock messages travel beside tasks on chips, in no guard; on GPUs no message is in a guard. A chip's
program runs on CPUs here: only the name of the platform differs.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh, make_schedule
from ipu_jax.schedules import SCHEDULES
from support.against_plain import (
    assert_equals_its_twin,
    assert_equals_plain,
    bubbles_hold_nan,  # noqa: F401 (a fixture)
)
from support.dense import chain
from support.platforms import programs_for

BOTH_ENDS = (None, 0, 1, None)


def scans_of(platform: str, schedule: str, places: Any) -> list[tuple[int, int, int]]:
    """Return the ticks of each scan over ticks, and the guards and the exchanges outside of guards in a tick."""
    model = chain(places, 3)
    with programs_for(platform):
        pipeline = model.pipeline(2, schedule=schedule)
        return scans_in(jax.make_jaxpr(pipeline.value_and_grad)(pipeline.shard(model.params), model.batch).jaxpr)


def scans_in(jaxpr: Any) -> list[tuple[int, int, int]]:
    found = []
    for eqn in jaxpr.eqns:
        inner = [*core.jaxprs_in_params(eqn.params)]
        if eqn.primitive.name == "scan":
            names = [e.primitive.name for e in inner[0].eqns]
            found.append((eqn.params["length"], names.count("while"), names.count("ppermute")))
        else:
            found += [scan for jaxpr in inner for scan in scans_in(jaxpr)]
    return found


@pytest.mark.parametrize(
    ("platform", "schedule", "places", "scans"),
    [
        # F | F, B | B: the embedding and the head are in no guard
        ("gpu", "grouped", BOTH_ENDS, [(1, 1), (3, 2), (1, 1)]),
        # embedding, F, head, B, the embedding's B
        ("tpu", "grouped", BOTH_ENDS, [(5, 5)]),
        # and the exchanges of y and dx
        ("cpu", "grouped", BOTH_ENDS, [(5, 7)]),
        # the head is local, and a class of its own
        ("gpu", "grouped", (None, 0, 1), [(5, 4)]),
        # the head does not run in consecutive ticks
        ("gpu", "sequential", BOTH_ENDS, [(9, 5)]),
        ("gpu", "1f1b", BOTH_ENDS, [(8, 5)]),
        ("tpu", "1f1b", BOTH_ENDS, [(8, 7)]),
    ],
)
def test_the_ticks_and_the_guards_of_each_scan(platform, schedule, places, scans):
    assert [scan[:2] for scan in scans_of(platform, schedule, places)] == scans


@pytest.mark.parametrize(
    ("platform", "schedule", "exchanges"),
    [
        *((platform, schedule, 2) for platform in ("tpu", "gpu") for schedule in ("grouped", "grouped-zb")),  # y and dx
        ("tpu", "1f1b", 0),  # the next tick needs them
        ("gpu", "1f1b", 2),  # the host would read the predicate
        *(("cpu", schedule, 0) for schedule in ("grouped", "grouped-zb", "1f1b")),
    ],
)
def test_which_exchanges_are_in_no_guard(platform, schedule, exchanges):
    assert [scan[2] for scan in scans_of(platform, schedule, (0, 1))] == [exchanges]


@pytest.mark.fast("zb-h1-basic", "dualpipev-both")
@pytest.mark.parametrize("ends", ["basic", "both"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_gpu_sends_in_every_tick_changes_nothing(schedule, ends):
    places = make_schedule(schedule, ipus=3, gradient_accumulation=1).placement
    model = chain(places if ends == "basic" else (None, *places, None), 7)
    with programs_for("gpu"):
        assert_equals_its_twin(model, 3, {"schedule": schedule})


@pytest.mark.slow
def test_a_backward_in_reverse_reads_no_stash_before_it_is_written():
    """B without effect would read the values of the last micro-batch, whose F has not run in the first ticks."""
    rng, m = np.random.default_rng(2), 3
    params = {name: rng.normal(size=(4, 4)).astype(np.float32) for name in ("front", "block")}
    batch = {"x": rng.normal(size=(m, 3, 4)).astype(np.float32)}

    def normed(h):
        return h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True))

    stages = [
        Stage(lambda w, x, mb: normed(mb["x"] @ w), params="front", ipu=ALL_IPUS, recompute="none"),
        Stage(lambda w, x, mb: x @ w, params="block", ipu=0),
        Stage(lambda w, x, mb: (x**3).mean(), ipu=1),
    ]
    gpipe = make_schedule("gpipe", placement=(None, 0, 1), gradient_accumulation=m)
    schedule = dataclasses.replace(gpipe, name="own", backward=tuple(row[::-1] for row in gpipe.backward))
    with programs_for("gpu"):
        pipeline = Pipeline(stages, schedule=schedule, mesh=make_mesh(1, 2), specs={"front": jax.P()})
        assert_equals_plain(
            pipeline, params, batch, lambda p: ((normed(batch["x"] @ p["front"]) @ p["block"]) ** 3).mean()
        )


def test_a_prediction_of_another_number_of_micro_batches():
    rng = np.random.default_rng(1)
    table = rng.normal(size=(7, 4)).astype(np.float32)
    stages = [
        Stage(lambda w, x, mb: mb["x"] @ w, params="front", ipu=ALL_IPUS),
        Stage(lambda w, x, mb: x + 1, ipu=0),
        Stage(lambda w, x, mb: x * 2, ipu=1),
        Stage(lambda w, x, mb: x.mean(), predict=lambda w, x, mb: x, ipu=ALL_IPUS),
    ]
    batch = {"x": rng.normal(size=(5, 3, 7)).astype(np.float32)}
    with programs_for("gpu"):
        pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=2, specs={"front": jax.P()})
        found = pipeline.predict(pipeline.shard({"front": table}), batch)
    np.testing.assert_allclose(found, (batch["x"] @ table + 1) * 2, rtol=1e-5)

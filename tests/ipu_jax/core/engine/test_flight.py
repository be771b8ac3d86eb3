"""Test the reports of ticks: which each IPU makes and when, and that a program computes the same with them."""

import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage, make_mesh
from ipu_jax.base import facts
from ipu_jax.core.engine import _carry
from ipu_jax.schedules import Task
from support.dense import chain


class Reports(facts.Listener):
    """Hears ticks, as `(replica, ipu, tick)` per program, and its tasks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.log: list[tuple[int, str]] = []  # IPU, and what happened, in the order of time
        self.heard: dict[str, list[tuple[int, int, int]]] = {}
        self.tasks: dict[str, list[list[str]]] = {}
        self.roles: dict[str, str] = {}

    def ticks(
        self, program: str, role: str, replicas: int, tasks: Callable[[], list[list[str]]]
    ) -> Callable[[int, int, int], None]:
        heard = self.heard.setdefault(program, [])
        self.tasks[program], self.roles[program] = tasks(), role

        def report(*place: Any) -> None:
            with self.lock:
                heard.append(place)
                self.log.append((place[1], f"tick {place[2]}"))

        return report


@pytest.fixture
def reports():
    listener = Reports()
    yield listener
    facts.stop_listening(listener)


def in_words(tasks: list[Task], names: list[str]) -> set[str]:
    """Return the texts that say some tasks, worked out of the schedule."""
    return {f"{one.kind} of micro-batch {one.microbatch} of stage {one.stage} ({names[one.stage]})" for one in tasks}


def told(text: str) -> set[str]:
    """Return a task for each kind, where "F and B of ..." is two."""
    found = re.findall(r"((?:F|B|W)(?: and B)?) (of micro-batch \d+ of stage \d+ \([^)]*\))", text)
    return {f"{kind} {rest}" for kinds, rest in found for kind in kinds.split(" and ")}


CASES = [
    pytest.param((0, 1), 2, "grouped", 5, 1, id="grouped"),
    pytest.param((0, 1), 2, "1f1b", 3, 2, id="1f1b over replicas"),
    pytest.param((None, 0, 1, 2, 3, None), 4, "grouped", 5, 1, id="concurrent"),
    pytest.param((None, 0, 1, None), 2, "zb-h1", 3, 2, id="concurrent over replicas"),
    pytest.param((0, 1, 0, 1), 2, "looped", 6, 1, id="looped"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("places", "ipus", "name", "m", "replicas"), CASES)
def test_each_ipu_reports_each_tick_in_order_and_all_results_stay(
    places, ipus, name, m, replicas, reports, monkeypatch
):
    monkeypatch.setattr(_carry, "IDLE_FILL", float("nan"))
    model = chain(places, m, replicas=replicas)

    def text() -> str:
        pipeline = model.pipeline(ipus, schedule=name)
        return str(jax.make_jaxpr(pipeline.value_and_grad)(pipeline.shard(model.params), model.batch))

    def computed() -> tuple[Any, Pipeline]:
        pipeline = model.pipeline(ipus, schedule=name)
        params = pipeline.shard(model.params)
        found = [pipeline.value_and_grad(params, model.batch)]
        found += [pipeline.loss(params, model.batch)] if name == "grouped" else []
        return jax.tree.map(np.asarray, jax.block_until_ready(found)), pipeline

    (expected, _), before = computed(), text()
    assert "callback" not in before
    facts.listen(reports)
    found, pipeline = computed()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    heard_of = dict(reports.roles)
    assert text().count("pure_callback[") == 2  # one before the scan, and one in it
    facts.stop_listening(reports)
    assert text() == before

    schedule, names = pipeline.schedule, [stage.name for stage in model.stages]
    assert sorted(heard_of.values()) == (["evaluation", "training"] if name == "grouped" else ["training"])
    for program in heard_of:
        heard = reports.heard[program]
        tasks = reports.tasks[program]
        for replica in range(replicas):
            for ipu in range(ipus):
                ticks = [tick for *place, tick in heard if place == [replica, ipu]]
                assert ticks == [*range(len(tasks[ipu]) + 1)]
        if reports.roles[program] == "training":
            assert {len(of_ipu) for of_ipu in tasks} == {schedule.ticks}
            for ipu, of_ipu in enumerate(tasks):
                for tick, words in enumerate(of_ipu):
                    own = [one for one in schedule.tasks(tick) if schedule.placement[one.stage] in (None, ipu)]
                    # W of a concurrent stage belongs to its B
                    own = [one for one in own if one.kind != "W" or places[one.stage] is not None]
                    assert told(words) == in_words(own, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "1f1b"])
def test_a_report_comes_after_the_tasks_of_the_tick_before_and_before_those_of_its_own(name, reports):
    """The stages tell the host when they run, and their y depends on its answer."""
    ipus, m = 4, 7

    def stage_on(ipu: int) -> Stage:
        def say(number: Any) -> Any:
            with reports.lock:
                reports.log.append((ipu, f"F {number}"))
            return np.float32(0)

        def run(w: Any, x: Any, mb: Any) -> Any:
            x = mb["x"] if x is None else x
            x = x + jax.pure_callback(say, jax.ShapeDtypeStruct((), jnp.float32), mb["number"])
            return jnp.tanh(x @ w) if ipu < ipus - 1 else jnp.mean((x @ w) ** 2)

        return Stage(run, params=f"w{ipu}", ipu=ipu, predict=None if ipu < ipus - 1 else lambda w, x, mb: x @ w)

    stages = [stage_on(ipu) for ipu in range(ipus)]
    pipeline = Pipeline(stages, mesh=make_mesh(1, ipus), schedule=name, gradient_accumulation=m)
    params = pipeline.shard({f"w{ipu}": jnp.full((6, 6), 0.2) for ipu in range(ipus)})
    facts.listen(reports)
    out = pipeline.value_and_grad(params, {"x": jnp.ones((m, 2, 6)), "number": jnp.arange(m)})
    jax.block_until_ready(out)
    for ipu in range(ipus):
        expected = [
            event
            for tick in range(pipeline.schedule.ticks)
            for event in (
                f"tick {tick}",
                *(f"F {t.microbatch}" for t in pipeline.schedule.tasks(tick) if (t.stage, t.kind) == (ipu, "F")),
            )
        ]
        last = f"tick {pipeline.schedule.ticks}"
        assert [what for of, what in reports.log if of == ipu] == [*expected, last]

    reports.log.clear()
    jax.block_until_ready(pipeline.predict(params, {"x": jnp.ones((5, 2, 6)), "number": jnp.arange(5)}))
    for ipu in range(ipus):
        # under "grouped", a tick per micro-batch and stage
        expected = [f"tick {tick}" for tick in range(9)]
        for number in reversed(range(5 * (ipu < 3))):
            expected.insert(number + ipu + 1, f"F {number}")
        assert [what for of, what in reports.log if of == ipu] == expected
    assert sorted(reports.roles.values()) == ["prediction", "training"]

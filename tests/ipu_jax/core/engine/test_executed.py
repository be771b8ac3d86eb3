"""Test that the engine runs the schedule, by counting the tasks that each IPU runs in each tick."""

import threading
from collections import Counter
from typing import Any

import jax
import pytest

from ipu_jax.core.engine import _carry
from ipu_jax.core.schedules import SCHEDULES, make_schedule
from ipu_jax.core.schedules._timetable import Kind
from ipu_jax.schedules import Schedule
from support.dense import chain


@pytest.fixture
def seen(monkeypatch):
    """Return every task that ran, as (replica, ipu, tick, kind, stage, micro-batch)."""
    found: list[tuple[int, int, int, Kind, int, int]] = []
    lock = threading.Lock()

    def watch(kind: Kind, *, stage: Any, microbatch: Any, tick: Any, ipu: Any, replica: Any) -> None:
        with lock:
            found.append((int(replica), int(ipu), int(tick), kind, int(stage), int(microbatch)))

    monkeypatch.setattr(_carry, "WATCH", watch)
    monkeypatch.setattr(_carry, "IDLE_FILL", float("nan"))
    return found


def planned(schedule: Schedule, replicas: int = 1) -> Counter:
    """Return the tasks of `schedule.tasks`, with a segment's stages counted as one."""
    firsts = {stage: stages[0] for stages in schedule.segments for stage in stages}
    found = set()
    for tick in range(schedule.ticks):
        for task in schedule.tasks(tick):
            place = schedule.placement[task.stage]
            if task.kind == "W" and place is None:
                continue  # the W of a concurrent stage is its B
            for ipu in range(schedule.ipus) if place is None else (place,):
                found.add((ipu, tick, task.kind, firsts[task.stage], task.microbatch))
    return Counter((replica, *cell) for cell in found for replica in range(replicas))


def run(model: Any, ipus: int, schedule: Any) -> Schedule:
    pipeline = model.pipeline(ipus, schedule=schedule)
    jax.block_until_ready(pipeline.value_and_grad(pipeline.shard(model.params), model.batch))
    jax.effects_barrier()
    return pipeline.schedule


@pytest.mark.fast("grouped-concurrent ends")
@pytest.mark.parametrize("concurrent_ends", [False, True], ids=["local", "concurrent ends"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_task_runs_once_in_its_tick_on_its_ipu(name, concurrent_ends, seen):
    places = make_schedule(name, ipus=2, gradient_accumulation=1).placement
    model = chain((None, *places, None) if concurrent_ends else places, 3)
    schedule = run(model, 2, name)
    assert Counter(seen) == planned(schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("places", "replicas"), [((0, 1, 2, 3), 1), ((0, 1), 2)], ids=["0-1-2-3, 1", "0-1, 2"])
def test_like_stages_of_one_team_each_run_their_own_on_each_replica(places, replicas, seen):
    schedule = run(chain(places, 3, replicas=replicas), len(places), "zb-h1")
    assert Counter(seen) == planned(schedule, replicas=replicas)


def test_nothing_is_watched_unless_asked():
    model = chain((0, 1), 2)
    pipeline = model.pipeline(2)
    text = str(jax.make_jaxpr(pipeline.value_and_grad)(pipeline.shard(model.params), model.batch))
    assert "debug_callback" not in text

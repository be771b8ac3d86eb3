"""Test that the engine runs the schedule, by counting the tasks that each IPU runs in each tick."""

import threading
from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax.core.engine import _hooks
from ipu_jax.core.schedules import SCHEDULES, make_schedule
from ipu_jax.core.schedules._timetable import Kind
from ipu_jax.schedules import Schedule, Task
from support.dense import chain


@pytest.fixture
def seen(monkeypatch):
    """Return every task that ran, as (replica, ipu, tick, kind, stage, micro-batch)."""
    found: list[tuple[int, int, int, Kind, int, int]] = []
    lock = threading.Lock()

    def watch(kind: Kind, *, stage: Any, microbatch: Any, tick: Any, ipu: Any, replica: Any) -> None:
        with lock:
            found.append((int(replica), int(ipu), int(tick), kind, int(stage), int(microbatch)))

    monkeypatch.setattr(_hooks, "WATCH", watch)
    monkeypatch.setattr(_hooks, "IDLE_FILL", float("nan"))
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


@pytest.mark.slow
@pytest.mark.parametrize("concurrent_ends", [False, True], ids=["local", "concurrent ends"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_task_runs_once_in_its_tick_on_its_ipu(name, concurrent_ends, seen):
    places = make_schedule(name, ipus=2, micro_batches=1).placement
    model = chain((None, *places, None) if concurrent_ends else places, 3)
    schedule = run(model, 2, name)
    assert Counter(seen) == planned(schedule)


def test_each_replica_runs_them_all(seen):
    schedule = run(chain((0, 1), 2, replicas=2), 2, "1f1b")
    assert Counter(seen) == planned(schedule, replicas=2)


def test_like_stages_of_one_team_each_run_their_own(seen):
    schedule = run(chain((0, 1, 2, 3), 3), 4, "zb-h1")
    assert Counter(seen) == planned(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv", "looped", "interleaved"])
def test_the_simulators_figures_are_those_of_what_ran(name, seen):
    """With costs given to the tasks in the order in which they ran, makespan, bubble and stash are the simulator's."""
    forward, backward = 1.0, 2.0
    model = chain(make_schedule(name, ipus=4, micro_batches=1).placement, 8)
    schedule = run(model, 4, name)
    share = {ipu: sum(place == ipu for place in schedule.placement) for ipu in range(4)}
    split = schedule.weight is not None
    price = {"F": forward, "B": backward / 2 if split else backward, "W": backward / 2}
    firsts = {stage: stages for stages in schedule.segments for stage in stages[:1]}
    # which stage's F, B or W a segment's task stands for
    order: dict[int, list[Task]] = defaultdict(list)
    for _, ipu, _, kind, stage, microbatch in sorted(seen, key=lambda cell: cell[2]):
        stages = firsts[stage] if kind != "B" else reversed(firsts[stage])
        order[ipu] += [Task(s, kind, microbatch) for s in stages]
    free = dict.fromkeys(range(4), 0.0)
    done: dict[Task, float] = {}
    last = len(schedule.placement) - 1
    waiting = {ipu: list(of_ipu) for ipu, of_ipu in order.items()}
    while any(waiting.values()):
        for ipu, of_ipu in waiting.items():
            while of_ipu:
                task = of_ipu[0]
                needs = {
                    "F": [Task(task.stage - 1, "F", task.microbatch)] if task.stage else [],
                    "B": [Task(task.stage, "F", task.microbatch)]
                    + ([Task(task.stage + 1, "B", task.microbatch)] if task.stage < last else []),
                    "W": [Task(task.stage, "B", task.microbatch)],
                }[task.kind]
                if not all(need in done for need in needs):
                    break
                start = max([free[ipu], *(done[need] for need in needs)])
                free[ipu] = done[of_ipu.pop(0)] = start + price[task.kind] / share[ipu]
    makespan = max(done.values())
    found = schedule.simulate(forward=forward, backward=backward)
    assert makespan == pytest.approx(found.makespan)
    assert 1 - 8 * (forward + backward) / makespan == pytest.approx(found.bubble)
    for ipu, of_ipu in order.items():
        held = peak = 0
        for task in of_ipu:
            held += (task.kind == "F") - (task.kind == ("W" if split else "B"))
            peak = max(peak, held)
        assert peak == found.peak_stash[ipu]


def test_nothing_is_watched_unless_asked():
    model = chain((0, 1), 2)
    pipeline = model.pipeline(2)
    text = str(jax.make_jaxpr(pipeline.value_and_grad)(pipeline.shard(model.params), model.batch))
    assert "debug_callback" not in text
    assert np.isfinite(jnp.asarray(pipeline.loss(pipeline.shard(model.params), model.batch)))

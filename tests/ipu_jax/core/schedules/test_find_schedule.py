"""Test the search of schedules: never worse than a family, as good as an exhaustive search, within its limit.

The oracles are made here: an exhaustive search over the orders of two IPUs' tasks where IPUs run freely, and the
shortest path over all states of two IPUs where they run in lockstep.
"""

import heapq
import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ipu_jax
from ipu_jax.core.schedules import SCHEDULES, Schedule, StageCosts, _auto, canonical_name, find_schedule, make_schedule
from ipu_jax.core.schedules._auto import schedule_of
from ipu_jax.core.schedules._costs import Work, lower_bound
from ipu_jax.core.schedules._list_scheduler import FIRSTS, Joint, Policy, earliest_ticks, list_schedule

Order = tuple[tuple[str, int], ...]


def given_of(value: Any) -> Any:
    """Return a value that may be None, but is not."""
    assert value is not None
    return value


def families(placement, micro_batches: int, ipus: int) -> dict[str, Schedule]:
    found = {}
    for name in SCHEDULES:
        try:
            found[name] = make_schedule(name, placement=placement, gradient_accumulation=micro_batches, ipus=ipus)
        except ValueError as error:
            assert "cannot serve" in str(error)  # noqa: PT017
    return found


def makespan_of(schedule: Schedule, costs: StageCosts, transfer: float = 0.0, *, lockstep: bool = False) -> float:
    """Return the makespan, with B of backward + W if the schedule splits it, and of the whole backward if not."""
    whole, weight = [], []
    for stage, ipu in enumerate(schedule.placement):
        split = schedule.weight is not None and ipu is not None
        whole.append(costs.backward[stage] + costs.weight[stage] if split else given_of(costs.whole_backward)[stage])
        weight.append(costs.weight[stage] if split else 0)
    return schedule.simulate(costs.forward, whole, weight, transfer, lockstep=lockstep).makespan


def bytes_of(schedule: Schedule, costs: StageCosts) -> list[float]:
    """Count, tick after tick, the micro-batches that each stage holds, and return the bytes per IPU at its peaks."""
    held = [0.0] * schedule.ipus
    for stage, ipu in enumerate(schedule.placement):
        forward, backward = schedule.forward[stage], schedule.backward[stage]
        split = schedule.weight is not None and ipu is not None
        last = given_of(schedule.weight)[stage] if split else backward
        depth = max(sum(f <= tick <= w for f, w in zip(forward, last, strict=True)) for tick in range(schedule.ticks))
        size = depth * given_of(costs.stash)[stage]
        if split:
            spans = list(zip(backward, last, strict=True))
            depth = max(sum(b <= tick <= w for b, w in spans) for tick in range(schedule.ticks))
            size += depth * given_of(costs.weight_residuals)[stage]
        for k in range(schedule.ipus) if ipu is None else (ipu,):
            held[k] += size
    return held


@st.composite
def problems(draw):
    ipus = draw(st.integers(1, 4))
    placement = tuple(draw(st.lists(st.sampled_from([*range(ipus), None]), min_size=1, max_size=6)))
    if draw(st.booleans()):  # a placement that more families can serve
        placement = (*range(ipus), *reversed(range(ipus)))
    rng = random.Random(draw(st.integers(0, 10**6)))
    number = lambda: rng.choice([0.0, 1.0, 1.0, rng.uniform(0.2, 3)])
    forward, backward, weight, stash, residuals = ([number() for _ in placement] for _ in range(5))
    whole = [b + w * rng.uniform(0.5, 1) for b, w in zip(backward, weight, strict=True)]
    costs = StageCosts(forward, backward, weight, whole, stash, residuals)
    micro_batches = draw(st.integers(1, 6))
    arguments = {"placement": placement, "ipus": ipus, "gradient_accumulation": micro_batches}
    arguments |= {"transfer": draw(st.sampled_from([0.0, 0.25])), "lockstep": draw(st.booleans())}
    named = families(placement, micro_batches, ipus)
    floor = bytes_of(named["sequential"], costs)
    limit = draw(st.sampled_from([None, *named]))
    limit = None if limit is None else [max(pair) for pair in zip(floor, bytes_of(named[limit], costs), strict=True)]
    return costs, arguments, limit


@pytest.mark.slow
@settings(max_examples=6)
@given(problems())
def test_no_family_that_fits_is_better(problem):
    costs, arguments, limit = problem
    found = find_schedule(costs, stash_limit=limit, **arguments)
    assert found.makespan >= found.bound * (1 - 1e-9)
    assert found.makespan == pytest.approx(
        makespan_of(found.schedule, costs, arguments["transfer"], lockstep=arguments["lockstep"])
    )
    room = [math.inf] * arguments["ipus"] if limit is None else limit
    fits = lambda held: all(h <= r * (1 + 1e-6) + 1e-9 for h, r in zip(held, room, strict=True))
    assert fits(found.candidates[0].stash_bytes)
    if found.schedule.clock == "one-phase":  # where a tick is enough to tell who holds what
        held = bytes_of(found.schedule, costs)
        assert fits(held)
        assert found.candidates[0].stash_bytes == pytest.approx(held)
    candidates = {candidate.name: candidate for candidate in found.candidates}
    for name, schedule in families(
        arguments["placement"], arguments["gradient_accumulation"], arguments["ipus"]
    ).items():
        makespan = makespan_of(schedule, costs, arguments["transfer"], lockstep=arguments["lockstep"])
        assert candidates[name].makespan == pytest.approx(makespan)
        if candidates[name].fits:
            assert found.makespan <= makespan * (1 + 1e-9)


# tables worked out by hand


@pytest.mark.fast("costs0-placement0-3-63", "costs3-placement3-1-8", "costs2-placement2-3-13.5")
@pytest.mark.parametrize(
    ("costs", "placement", "micro_batches", "makespan"),
    [
        (StageCosts([1, 2], [3, 4], [5, 6]), (0, 0), 3, 3 * 21),  # one IPU works without a pause
        (StageCosts([1, 1], [1, 1], [1, 1]), (0, 1), 4, 1 + 4 * 3),  # IPU 1 waits for one F, then has 4 (F + B + W)
        (StageCosts([1, 3], [1, 2], [1, 1]), (None, None), 3, 3 * (1 + 2 + 3 + 3) / 2),
        # 0F 1F head 1B 0B in turn, and W beside B: the head is 2 / 2 for F and 4 / 2 for B
        (StageCosts([1, 1, 2], [1, 1, 4], [1, 1, 0]), (0, 1, None), 1, 1 + 1 + 3 + 1 + 1 + 1),
    ],
)
def test_makespans_by_hand_reach_the_bound(costs, placement, micro_batches, makespan):
    ipus = 1 if placement == (0, 0) else 2
    for lockstep in (False, True) if placement == (0, 1) else (False,):
        found = find_schedule(
            costs, placement=placement, gradient_accumulation=micro_batches, ipus=ipus, lockstep=lockstep
        )
        assert (found.makespan, found.bound) == (makespan, makespan)


@pytest.mark.fast("False")
@pytest.mark.parametrize("lockstep", [False, True])
def test_a_stash_of_one_micro_batch_allows_one_round_trip_at_a_time(lockstep):
    # a round trip of IPU 0 is 0F 1F 1B 0B 0W, and 1W runs beside 0B; without W it would be 6
    costs = StageCosts([1, 1], [1, 1], [1, 1], stash=[7, 7])
    found = find_schedule(costs, placement=(0, 1), gradient_accumulation=4, stash_limit=7, lockstep=lockstep)
    assert found.makespan == 4 * 5
    assert found.candidates[0].stash_bytes == (7, 7)


def test_a_whole_backward_that_is_cheaper_than_its_parts_is_not_split():
    costs = StageCosts([1, 1], [2, 2], [2, 2], whole_backward=[2, 2])
    found = find_schedule(costs, placement=(0, 1), gradient_accumulation=4)
    assert found.schedule.weight is None
    assert found.makespan == (4 + 1) * 3


def test_of_equal_schedules_the_one_with_less_stash_is_chosen():
    # one IPU is never idle, whatever the order
    found = find_schedule(StageCosts([1], [1], [1], stash=[1]), placement=(0,), gradient_accumulation=4)
    assert found.schedule.name == "sequential"
    assert {candidate.makespan for candidate in found.candidates} == {12}
    assert [c.stash_bytes[0] for c in found.candidates] == sorted(c.stash_bytes[0] for c in found.candidates)


# exhaustive searches


def orders(micro_batches: int, *, in_order: bool) -> Iterator[Order]:
    """Yield every order of one stage's tasks in which F of a micro-batch is before B, and B before W."""

    def more(done: tuple[int, ...], found: Order) -> Iterator[Order]:
        if len(found) == 3 * micro_batches:
            yield found
        for m in range(micro_batches):
            if done[m] < 3 and not (in_order and any(earlier <= done[m] for earlier in done[:m])):
                yield from more((*done[:m], done[m] + 1, *done[m + 1 :]), (*found, ("FBW"[done[m]], m)))

    return more((0,) * micro_batches, ())


def free_makespan(both: tuple[Order, ...], costs: StageCosts) -> float:
    """Return the time that two IPUs with a stage each take for their orders; infinity if they wait for each other."""
    cost = {"F": costs.forward, "B": costs.backward, "W": costs.weight}
    ends: dict[tuple[int, str, int], float] = {}
    done, free = [0, 0], [0.0, 0.0]
    moved = True
    while moved:
        moved = False
        for k in (0, 1):
            while done[k] < len(both[k]):
                kind, m = both[k][done[k]]
                need = (0, "F", m) if (k, kind) == (1, "F") else (1, "B", m) if (k, kind) == (0, "B") else None
                if need is not None and need not in ends:
                    break
                free[k] = max(free[k], ends[need] if need else 0.0) + cost[kind][k]
                ends[k, kind, m] = free[k]
                done[k] += 1
                moved = True
    return max(free) if all(n == len(order) for n, order in zip(done, both, strict=True)) else math.inf


def depth_of(order: Order) -> int:
    held = itertools.accumulate({"F": 1, "B": 0, "W": -1}[kind] for kind, _ in order)
    return max(held)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("micro_batches", "in_order"), [(2, False), (3, True)])
def test_free_running_is_as_good_as_any_order(seed, limit, micro_batches, in_order):
    rng = random.Random(seed)
    costs = StageCosts(*([rng.uniform(0.2, 3) for _ in range(2)] for _ in range(3)), stash=[1, 1])
    some = [order for order in orders(micro_batches, in_order=in_order) if depth_of(order) <= limit]
    best = min(free_makespan(both, costs) for both in itertools.product(some, repeat=2))
    found = find_schedule(costs, placement=(0, 1), gradient_accumulation=micro_batches, stash_limit=limit)
    assert found.makespan == pytest.approx(best)


def lockstep_optimum(costs: StageCosts, micro_batches: int, limit: int, transfer: float, *, split: bool) -> float:
    """Return the least makespan, by Dijkstra over the numbers of F, B and W done on two IPUs with a stage each.

    A step goes from one exchange to the next: IPU 0 sends by an F, IPU 1 by a B, which is an IPU's last task before the
    exchange. Before that each IPU may do any of the other tasks for which it has the inputs.
    """
    whole = costs.backward if split else given_of(costs.whole_backward)
    cost = [costs.forward, given_of(whole), costs.weight]
    goal = (micro_batches,) * 3 if split else (micro_batches, micro_batches, 0)
    sends = 0, 1  # F of IPU 0, and B of IPU 1

    def ways(state: tuple[tuple[int, ...], ...], k: int) -> dict[tuple[tuple[int, ...], bool], float]:
        """Return what an IPU can have done by the next exchange, with whether it has sent, and the time it takes."""
        arrived = micro_batches if k == 0 else state[0][0], state[1][1]
        found: dict[tuple[tuple[int, ...], bool], float] = {(state[k], False): 0.0}
        waiting = [state[k]]
        while waiting:
            done = waiting.pop()
            f, b, w = done
            held = f - (w if split else b)
            can = [f < arrived[0] and held < limit, b < (f if k == 1 else min(f, arrived[1])), split and w < b]
            for kind in range(3):
                if can[kind]:
                    after = tuple(n + (j == kind) for j, n in enumerate(done))
                    sent = kind == sends[k]
                    if (after, sent) not in found:
                        found[after, sent] = found[done, False] + cost[kind][k]
                        waiting += [] if sent else [after]
        return found

    queue: list[tuple[float, tuple[tuple[int, ...], ...]]] = [(0.0, ((0, 0, 0), (0, 0, 0)))]
    seen = set()
    while queue:
        time, state = heapq.heappop(queue)
        if state == (goal, goal):
            return time
        if state in seen:
            continue
        seen.add(state)
        for (first, one), (second, two) in itertools.product(ways(state, 0).items(), ways(state, 1).items()):
            after = first[0], second[0]
            if first[1] or second[1] or after == (goal, goal):
                exchange = transfer if first[1] or second[1] else 0.0
                heapq.heappush(queue, (time + max(one, two) + exchange, after))
    raise AssertionError("the goal can be reached")


@pytest.mark.slow
@pytest.mark.parametrize("transfer", [0.0, 0.3])
@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_lockstep_is_as_good_as_any_table(seed, limit, micro_batches, transfer):
    rng = random.Random(seed)
    costs = StageCosts(*([rng.uniform(0.2, 3) for _ in range(2)] for _ in range(3)), stash=[1, 1])
    best = min(lockstep_optimum(costs, micro_batches, limit, transfer, split=split) for split in (True, False))
    arguments: dict[str, Any] = {"gradient_accumulation": micro_batches, "stash_limit": limit, "transfer": transfer}
    found = find_schedule(costs, placement=(0, 1), lockstep=True, **arguments)
    two_phase = [c.makespan for c in found.candidates if c.fits and c.schedule.clock == "two-phase"]
    assert found.makespan == pytest.approx(min([best, *two_phase]))


@pytest.mark.fast("grouped-zb")
@pytest.mark.parametrize(
    ("transfer", "residuals", "room", "name"),
    [
        (0.0, 0, 7, "zb-h1"),
        (0.5, 0, 7, "grouped-zb"),
        (0.5, 1, 7, "grouped"),  # IPU 3 of grouped-zb would hold 4 stashes and 4 of what W needs from B
        (0.5, 0, 6, "auto"),
    ],
    ids=["zb-h1", "grouped-zb", "grouped", "auto"],
)
def test_the_two_phase_clock_wins_where_messages_are_dear(transfer, residuals, room, name):
    """Its messages travel beside tasks. zb-h1 waits for a message in 25 of its 27 ticks, and idles less without."""
    ones = [1] * 4
    costs = StageCosts(ones, ones, ones, stash=ones, weight_residuals=[residuals] * 4)
    find: dict[str, Any] = {
        "placement": (0, 1, 2, 3),
        "gradient_accumulation": 8,
        "lockstep": True,
        "transfer": transfer,
    }
    found = find_schedule(costs, stash_limit=room, **find)
    assert found.schedule.name == name
    by_name = {candidate.name: candidate.makespan for candidate in found.candidates}
    assert by_name["grouped"] == pytest.approx(11 * 3 + 2 * 3 * transfer)
    assert by_name["grouped-zb"] == pytest.approx(8 * 3 + 3 * 2 + 3 * transfer)
    assert by_name["zb-h1"] == pytest.approx(27 + 25 * transfer)
    assert (f"(lockstep, {transfer} per message)" in str(found)) == (transfer > 0)


# the list scheduler


@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize("eager", [1.0, 0.0])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("placement", [(0, 1, 2, 2, 1, 0), (None, 0, 1, 0, None, 1, None), (2, 2, 0, None, 1)])
def test_the_list_scheduler_knows_how_long_its_run_takes(placement, split, eager, first):
    rng = random.Random(1)
    costs = StageCosts(*([rng.uniform(0.2, 2) for _ in placement] for _ in range(3)), stash=[1.0] * len(placement))
    work = Work(costs, placement, 7, 3, split=split)
    depths = tuple(rng.randint(1, 4) for _ in range(len(work.line)))
    order, end = list_schedule(work, Policy((first,) * len(depths), depths, depths, 0.0, eager), 0.0)
    schedule = schedule_of(work, earliest_ticks(order, work))
    assert makespan_of(schedule, costs) == pytest.approx(end)
    assert end >= lower_bound(work, 0.0)
    local = [stages[0] for stages in schedule.segments if placement[stages[0]] is not None]
    assert all(schedule.stash_depth(stage) <= depth for stage, depth in zip(local, depths, strict=True))


def test_an_ipu_that_is_patient_waits_for_b_rather_than_do_w():
    # IPU 0 could do 0W0 from 4.5 to 14.5, and 0B1 is ready at 6
    costs = StageCosts([1, 0.5], [1, 2], [10, 0])
    work = Work(costs, (0, 1), 2, 2, split=True)
    kinds = []
    for patience in (0.0, 0.5):
        order, _ = list_schedule(work, Policy(("B", "B"), (2, 2), (2, 2), patience), 0.0)
        kinds.append([task[1:] for task in order if not isinstance(task, Joint) and task[0] == 0])
    assert kinds[0] == [("F", 0), ("F", 1), ("B", 0), ("W", 0), ("B", 1), ("W", 1)]
    assert kinds[1] == [("F", 0), ("F", 1), ("B", 0), ("B", 1), ("W", 0), ("W", 1)]


# one result everywhere


PROGRAM = """
from ipu_jax.core.schedules import StageCosts, find_schedule
costs = StageCosts([1, .7, .3, 1.1, .5], [1.3, .8, .3, 1.2, .4], [.9, .7, .1, 1, .3], stash=[3, 2, 1, 4, 1])
for lockstep in (False, True):
    where = {"placement": (None, 0, 1, 2, 0), "gradient_accumulation": 6, "stash_limit": 14}
    found = find_schedule(costs, lockstep=lockstep, **where)
    print(found, found.schedule, sep="\\n")
"""


@pytest.mark.slow
def test_every_process_finds_the_same_table():
    def run(hash_seed: int) -> str:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONPATH": str(Path(ipu_jax.__file__).parents[1]),
        }
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    first = run(1)
    assert first.count("auto: makespan") == 2
    assert run(2) == first


@pytest.mark.slow
def test_the_last_searches_are_remembered_if_they_are_not_large(monkeypatch):
    costs = StageCosts([1, 2.5], [1, 2], [1, 2])
    ask = lambda **other: find_schedule(costs, **{"placement": (0, 1), "gradient_accumulation": 3, **other})
    assert ask().schedule is ask(stash_limit=None).schedule
    for other in ({"seed": 1}, {"transfer": 0.5}, {"lockstep": True}, {"ipus": 3}, {"stash_limit": 100.0}):
        assert ask(**other).schedule is not ask().schedule, other
    monkeypatch.setattr(_auto, "_MEDIUM", 5)
    assert ask().schedule is not ask().schedule


# make_schedule("auto")


def test_make_schedule_searches_under_the_name_auto():
    assert canonical_name("AUTO") == canonical_name("ScheduleAuto") == "auto"
    assert make_schedule("auto", ipus=4, gradient_accumulation=8) == make_schedule(
        "zb-h1", ipus=4, gradient_accumulation=8
    )
    costs = StageCosts([1, 2, 1], [1, 2, 1], [1, 2, 1], stash=[1, 1, 1])
    found = find_schedule(costs, placement=(0, 1, 2), gradient_accumulation=8, stash_limit=3)
    made = make_schedule("auto", placement=(0, 1, 2), gradient_accumulation=8, costs=costs, stash_limit=3)
    assert made == found.schedule
    assert made.name == "auto"
    assert Schedule.from_text(str(made)) == made


def test_equal_costs_are_those_of_an_ipus_share():
    costs = StageCosts.equal((None, 0, 1, 1, None))
    assert costs == StageCosts(*[(1, 1, 0.5, 0.5, 1)] * 3, stash=(0, 1, 1, 1, 0))
    schedule = make_schedule("zb-h1", placement=(None, 0, 1, 1, None), gradient_accumulation=3)
    assert costs.simulate(schedule).makespan == schedule.simulate(1, 2, 1).makespan


# what it prints


@pytest.mark.slow
def test_the_table_says_what_was_chosen_and_what_the_others_need():
    costs = StageCosts([1, 2], [1, 2], [1, 2], stash=[1, 3])
    found = find_schedule(costs, placement=(0, 1), gradient_accumulation=4, stash_limit=[2, 5])
    assert str(found) == EXPECTED
    free = find_schedule(costs, placement=(0, 1), gradient_accumulation=4, lockstep=True)
    assert str(free).splitlines()[0] == "auto: makespan 25 (lockstep), 1.000 x the lower bound 25"
    assert "does not fit" not in str(free)


EXPECTED = """\
auto: makespan 25 (free running), 1.000 x the lower bound 25
schedule     makespan  / chosen  bubble  bytes per IPU
auto         25        1.000     28.0%   3              <- chosen
interleaved  27        1.080     33.3%   3
1f1b         27        1.080     33.3%   3
sequential   36        1.440     50.0%   3
zb-h1        25        1.000     28.0%   6              does not fit: IPU 1 needs 6, the limit is 5
zb-wave      25        1.000     28.0%   6              does not fit: IPU 1 needs 6, the limit is 5
grouped-zb   25        1.000     28.0%   6              does not fit: IPU 0 needs 3, the limit is 2
looped-zb    25        1.000     28.0%   9              does not fit: IPU 1 needs 9, the limit is 5
grouped      27        1.080     33.3%   3              does not fit: IPU 0 needs 3, the limit is 2
looped       27        1.080     33.3%   3              does not fit: IPU 0 needs 3, the limit is 2
gpipe        27        1.080     33.3%   12             does not fit: IPU 1 needs 12, the limit is 5
looped-bfs   27        1.080     33.3%   12             does not fit: IPU 1 needs 12, the limit is 5"""


def test_no_costs_at_all_print_as_well():
    zeros = StageCosts([0], [0], [0])
    first_line = str(find_schedule(zeros, placement=(0,), gradient_accumulation=1)).splitlines()[0]
    assert first_line == "sequential: makespan 0 (free running), no work"

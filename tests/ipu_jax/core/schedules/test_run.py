"""Test the run in which rules choose for all IPUs at once, against one that asks a rule for one task at a time."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_jax.core.schedules import Schedule, Task, make_schedule

Segment = tuple[int, str]


def one_at_a_time(name: str, places: list[int], count: int) -> dict[tuple[int, str, int], int]:
    """Return the tick of each task of stages that all have the same length.

    The rules are those of the papers, in words: 1F1B does a B if it can, and holds at most S-s micro-batches; zb-h1
    puts in a W where it must wait or is full; zbv holds at most S micro-batches of its share and prefers B.
    """
    n, split = len(places), name != "1f1b"
    ipus = sorted(set(places))
    begun: dict[Segment, int] = defaultdict(int)
    ended: set[tuple[int, str, int]] = set()
    ticks: dict[tuple[int, str, int], int] = {}
    free = dict.fromkeys(ipus, 0)
    busy: dict[int, tuple[int, tuple[int, str, int]]] = {}

    def waits_for(i: int, kind: str, m: int) -> list[tuple[int, str, int]]:
        if kind == "F":
            return [(i - 1, "F", m)] if i else []
        return [(i, "B", m)] if kind == "W" else [(i + 1, "B", m) if i < n - 1 else (i, "F", m)]

    def held(i: int, last: str) -> int:
        return begun[i, "F"] - begun[i, last]

    def choose(ipu: int) -> tuple[int, str, int] | None:
        mine = [i for i in range(n) if places[i] == ipu]
        can = [(i, k, begun[i, k]) for i in mine for k in ("FBW" if split else "FB")]
        can = [t for t in can if t[2] < count and all(source in ended for source in waits_for(*t))]
        old = lambda kind: min((t for t in can if t[1] == kind), key=lambda t: (t[2], -t[0]), default=None)
        forward = [t for t in can if t[1] == "F"]
        if name == "zbv":
            room = len(mine) * len(ipus) - sum(held(i, "W") for i in mine)
            go = [t for t in forward if sum(i >= t[0] for i in mine) <= room]
            return old("B") or max(go, default=None) or old("W")
        due = [t for t in forward if held(t[0], "B") < n - t[0]]
        if name == "1f1b":
            return old("B") or max(due, default=None)
        fits = [t for t in due if held(t[0], "W") < n]
        return max(fits, default=None) or (old("W") if due else None) or old("B") or old("W")

    now = 0
    while len(ended) < n * count * (2 + split):
        for ipu in ipus:
            task = choose(ipu) if ipu not in busy else None
            if task is not None:
                begun[task[:2]] += 1
                ticks[task] = max([free[ipu], *(ticks[source] + 1 for source in waits_for(*task))])
                free[ipu] = ticks[task] + 1
                busy[ipu] = now + (2 if task[1] == "B" and not split else 1), task
        now += 1
        for ipu in [ipu for ipu, (end, _) in busy.items() if end == now]:
            ended.add(busy.pop(ipu)[1])
    return ticks


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
@settings(max_examples=25)
@given(data=st.data())
def test_all_ipus_at_once_choose_what_each_one_would(name, data):
    ipus, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    line = list(data.draw(st.permutations(range(ipus))))
    places = (
        [*line, *line[::-1]] if name == "zbv" else data.draw(st.lists(st.sampled_from(line), min_size=1, max_size=7))
    )
    places = [ipu for s, ipu in enumerate(places) if s == 0 or ipu != places[s - 1]]  # neighbours would be one segment
    schedule = make_schedule(name, placement=tuple(places), gradient_accumulation=count)
    assert {
        (stage, kind, m): tick
        for kind, rows in (("F", schedule.forward), ("B", schedule.backward), ("W", schedule.weight or ()))
        for stage, row in enumerate(rows)
        for m, tick in enumerate(row)
    } == one_at_a_time(name, places, count)


def test_times_are_those_of_the_tasks_that_there_are():
    run = make_schedule("zb-h1", placement=(0, 1, None), gradient_accumulation=2).simulate()
    assert len(run.start_times) == len(list(run.start_times)) == 2 * (3 + 3 + 2)
    assert next(iter(run.start_times)) == Task(0, "F", 0)
    assert Task(2, "B", 1) in run.start_times
    for missing in (Task(2, "W", 0), Task(3, "F", 0), Task(0, "F", 2), Task(0, "F", -1), Task(-1, "F", 0), "0F0"):
        assert missing not in run.end_times
    assert run == make_schedule("zb-h1", placement=(0, 1, None), gradient_accumulation=2).simulate()


def test_the_last_tick_that_an_engine_reaches_is_accepted():
    assert Schedule("custom", (0,), 1, ((0,),), ((1 << 32,),), clock="one-phase").stash_depth(0) == 1

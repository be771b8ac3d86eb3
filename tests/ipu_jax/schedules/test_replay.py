"""Test the validator: what it accepts can be replayed independently, and what it refuses is named in the error.

`replay` implements the clock independently: it moves tagged messages through bounded queues as an engine would, and
checks what each task finds there.
"""

import dataclasses
import re
from collections import deque

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ipu_jax.schedules import SCHEDULES, Schedule, make_schedule


def replay(schedule: Schedule) -> None:
    """Run a schedule with micro-batch numbers in place of arrays, and assert that each task finds its own."""
    places, last = schedule.placement, len(schedule.placement) - 1
    stages = range(last + 1)
    last_local = max((s for s in stages if places[s] is not None), default=-1)
    where = {"F": schedule.forward, "B": schedule.backward, "W": schedule.weight}
    queues: dict[tuple[str, int], deque] = {(kind, s): deque() for s in stages for kind in "FB"}
    stash = [[None] * schedule.stash_depth(s) for s in stages]
    cuts = [[None] * schedule.weight_residual_depth(s) for s in stages]
    made: dict[tuple[str, int], int] = {}
    sending: list[tuple[str, int, int]] = []
    done = 0

    def put(ring: list, m: int) -> None:
        assert ring[m % len(ring)] is None
        ring[m % len(ring)] = m

    def take(ring: list, m: int, *, free: bool) -> None:
        assert ring[m % len(ring)] == m
        if free:
            ring[m % len(ring)] = None

    def run(kind: str, s: int, m: int) -> None:
        nonlocal done
        done += 1
        split = schedule.weight is not None and places[s] is not None
        if kind == "W":
            take(cuts[s], m, free=True)
            take(stash[s], m, free=True)
            return
        source, target = (s - 1, s + 1) if kind == "F" else (s + 1, s - 1)
        if 0 <= source <= last:
            if places[source] == places[s]:
                assert made[kind, source] == m  # made on this IPU in this very tick
            else:
                assert queues[kind, source].popleft() == m
        made[kind, s] = m
        if 0 <= target <= last and places[target] != places[s]:
            sending.append((kind, s, m))
        if kind == "F":
            put(stash[s], m)
        else:
            take(stash[s], m, free=not split)
            if split:
                put(cuts[s], m)

    def deliver() -> None:
        for kind, s, m in sending:
            queues[kind, s].append(m)
            room = schedule.inbox_depth(s, "F") if kind == "F" else schedule.inbox_depth(s - 1, "B")
            assert len(queues[kind, s]) <= (1 if schedule.clock == "two-phase" else room)
        sending.clear()

    entries = [s for s in stages if places[s] is None and s < last_local]
    locals_ = [s for s in stages if places[s] is not None]
    head = [s for s in stages if s > last_local]
    one_phase = [[("F", entries)], [("F", locals_), ("B", locals_), ("W", locals_)], [("F", head), ("B", head)]]
    two_phase = [[("F", entries)], [("F", locals_)], [("F", head), ("B", head)], [("B", locals_)]]
    for tick in range(schedule.ticks):
        made.clear()
        for phase in [*(one_phase if schedule.clock == "one-phase" else two_phase), [("B", entries)]]:
            busy: dict[int | None, set] = {}
            for kind, candidates in phase:
                for s in candidates if kind == "F" else reversed(candidates):
                    for m in range(schedule.micro_batches):
                        if where[kind] is None or where[kind][s][m] != tick:
                            continue
                        if kind != "W" or places[s] is not None:
                            run(kind, s, m)
                            first = next(seg[0] for seg in schedule.segments if s in seg)
                            busy.setdefault(places[s], set()).add((first, kind, m))
            deliver()
            if schedule.clock == "one-phase":
                assert all(len(tasks) == 1 for ipu, tasks in busy.items() if ipu is not None)
    kinds = sum(2 if schedule.weight is None or places[s] is None else 3 for s in stages)
    assert done == kinds * schedule.micro_batches
    assert not any(queues.values())
    assert all(slot is None for ring in (*stash, *cuts) for slot in ring)


@st.composite
def schedules(draw, names=SCHEDULES, most_ipus: int = 6, most_micro_batches: int = 10) -> Schedule:
    """Draw a schedule of some family, with concurrent stages anywhere."""
    name = draw(st.sampled_from(names))
    ipus, m_count = draw(st.integers(1, most_ipus)), draw(st.integers(1, most_micro_batches))
    line = list(make_schedule(name, ipus=ipus, micro_batches=1, rounds=draw(st.integers(1, 3))).placement)
    if name not in ("looped", "looped-bfs", "looped-zb", "zbv", "zb-wave", "dualpipev"):
        line = draw(st.lists(st.integers(0, ipus - 1), max_size=8))
    placement = []
    for ipu in line:
        placement += [None] * draw(st.sampled_from([0, 0, 0, 0, 1, 2])) + [ipu]
    placement += [None] * draw(st.sampled_from([0, 1, 2] if placement else [1, 2]))
    return make_schedule(name, ipus=ipus, placement=tuple(placement), micro_batches=m_count)


@settings(max_examples=200)
@given(schedule=schedules())
def test_every_family_replays_on_every_placement(schedule):
    replay(schedule)


@settings(max_examples=100)
@given(schedule=schedules())
def test_every_schedule_prints_and_parses_back(schedule):
    assert Schedule.from_text(str(schedule)) == schedule
    assert str(Schedule.from_text(str(schedule))) == str(schedule)


def attempt(schedule: Schedule, **tables) -> tuple[Schedule | None, str]:
    """Return the schedule with other tables, or the error."""
    try:
        return dataclasses.replace(schedule, name="mutant", **tables), ""
    except ValueError as error:
        return None, str(error)


@settings(max_examples=400)
@given(schedule=schedules(most_ipus=3, most_micro_batches=4), data=st.data())
def test_what_the_validator_lets_through_replays(schedule, data):
    """Move cells of a table with room between its ticks: it must be refused, or be still right."""
    tables = _with_cells_moved(schedule, _with_idle_ticks(schedule, data), data)
    mutant, refusal = attempt(schedule, **tables)
    if mutant is not None:
        replay(mutant)
    else:
        assert re.match(r"schedule 'mutant': (IPU \d+|all IPUs), tick -?\d+, \d+[FBW]\d+: ", refusal)


def _with_cells_moved(schedule: Schedule, tables: dict, data) -> dict:
    """Move one micro-batch's F, B or W of a segment a little, or swap it with another one's, once or twice."""
    rows = {kind: [list(row) for row in table] for kind, table in tables.items()}
    micro_batches = st.integers(0, schedule.micro_batches - 1)
    for _ in range(data.draw(st.integers(1, 2))):
        segment, kind = data.draw(st.sampled_from(schedule.segments)), data.draw(st.sampled_from(list(rows)))
        m, other = data.draw(micro_batches), data.draw(micro_batches)
        by = data.draw(st.sampled_from([-3, -2, -1, 1, 2, 3, 9]))
        kinds = [kind]
        if schedule.placement[segment[0]] is None:  # a head does F and B in one tick, and B includes W
            at_the_end = all(ipu is None for ipu in schedule.placement[segment[0] :])
            kinds = list(rows) if at_the_end else [k for k in rows if (k == "forward") == (kind == "forward")]
        some = segment[: data.draw(st.sampled_from([len(segment), len(segment), 1]))]
        for row in (rows[k][s] for k in kinds for s in some):
            if m != other:
                row[m], row[other] = row[other], row[m]
            else:
                row[m] += by
    return {kind: tuple(map(tuple, table)) for kind, table in rows.items()}


def _with_idle_ticks(schedule: Schedule, data) -> dict:
    gaps = [data.draw(st.integers(0, 2)) for _ in range(schedule.ticks)]
    at = [tick + sum(gaps[: tick + 1]) for tick in range(schedule.ticks)]
    return {
        kind: tuple(tuple(at[tick] for tick in row) for row in rows)
        for kind in ("forward", "backward", "weight")
        if (rows := getattr(schedule, kind)) is not None
    }


@settings(max_examples=100)
@given(schedule=schedules(), data=st.data())
def test_a_schedule_with_idle_ticks_put_in_is_right_too(schedule, data):
    replay(dataclasses.replace(schedule, **_with_idle_ticks(schedule, data)))


@settings(max_examples=100)
@given(schedule=schedules(tuple(n for n in SCHEDULES if n not in ("sequential", "grouped"))), data=st.data())
def test_micro_batches_may_run_in_another_order_where_the_slots_allow_it(schedule, data):
    shuffled = data.draw(st.permutations(range(schedule.micro_batches)))
    assume(shuffled != sorted(shuffled))
    moved = {
        kind: tuple(tuple(row[m] for m in shuffled) for row in rows)
        for kind in ("forward", "backward", "weight")
        if (rows := getattr(schedule, kind)) is not None
    }
    other, refusal = attempt(schedule, **moved)
    if other is not None:
        replay(other)
    else:
        assert refusal.endswith("freed it: run the micro-batches in order")


# refused by name


def rows(*lines: str) -> tuple[tuple[int, ...], ...]:
    """Return `((0, 1), (1, 3))` for `rows("01", "13")`: a line for each stage, a digit for each micro-batch."""
    return tuple(tuple(map(int, line)) for line in lines)


ONE, TWO = "one-phase", "two-phase"
WRONG = {
    "an activation used in the tick in which it is sent": (
        ((0, 1), rows("0", "0"), rows("3", "2"), None, ONE),
        "IPU 1, tick 0, 1F0: it needs 0F0, which runs in tick 0, and a message between IPUs takes until the next tick: "
        "move it to tick 1 or later",
    ),
    "a gradient used in the tick in which it is sent": (
        ((0, 1), rows("0", "1"), rows("2", "2"), None, ONE),
        "IPU 0, tick 2, 0B0: it needs 1B0, which runs in tick 2, and a message between IPUs takes until the next tick: "
        "move it to tick 3 or later",
    ),
    "B before its own F": (
        ((0,), rows("1"), rows("0"), None, ONE),
        "IPU 0, tick 0, 0B0: it needs 0F0, which runs in tick 1: move it to tick 2 or later",
    ),
    "W before B": (
        ((0,), rows("0"), rows("2"), rows("1"), ONE),
        "IPU 0, tick 1, 0W0: it needs 0B0, which runs in tick 2: move it to tick 3 or later",
    ),
    "the head's gradient used in its own tick": (
        ((0, None), rows("0", "1"), rows("1", "1"), None, ONE),
        "IPU 0, tick 1, 0B0: it needs 1B0, which runs in tick 1: move it to tick 2 or later",
    ),
    "a local result used by the entry of the same tick": (
        ((0, None, 1), rows("0", "0", "1"), rows("4", "3", "2"), None, ONE),
        "all IPUs, tick 0, 1F0: it needs 0F0, which runs in tick 0: move it to tick 1 or later",
    ),
    "a gradient out of exit used in its tick": (
        ((0, None, 1), rows("0", "1", "1"), rows("2", "2", "2"), None, ONE),
        "IPU 0, tick 2, 0B0: it needs 1B0, which runs in tick 2: move it to tick 3 or later",
    ),
    "the same under the two-phase clock": (
        ((0, None, 1), rows("0", "1", "1"), rows("1", "1", "1"), None, TWO),
        "IPU 0, tick 1, 0B0: it needs 1B0, which runs in tick 1: move it to tick 2 or later",
    ),
    "two tasks of an IPU in a tick": (
        ((0, 1, 0), rows("00", "12", "24"), rows("88", "67", "35"), None, ONE),
        "IPU 0, tick 0, 0F1: 0F0 has this tick, and a stage does F of one micro-batch a tick: move one of them",
    ),
    "two segments of an IPU in a tick": (
        ((0, 1, 0), rows("02", "13", "24"), rows("78", "56", "35"), None, ONE),
        "IPU 0, tick 2, 2F0: the IPU does 0F1 in this tick, and under the one-phase clock one task a tick: move one of "
        "them",
    ),
    "F and B of an IPU in a tick": (
        ((0,), rows("01"), rows("12"), None, ONE),
        "IPU 0, tick 1, 0B0: the IPU does 0F1 in this tick, and under the one-phase clock one task a tick: move one of "
        "them",
    ),
    "neighbours of one IPU in different ticks": (
        ((0, 0), rows("0", "1"), rows("2", "2"), None, ONE),
        "IPU 0, tick 1, 1F0: its neighbour's 0F0 runs in tick 0, and neighbouring stages of one place run as one: "
        "give both the same tick",
    ),
    "the head's B apart from its F": (
        ((None,), rows("0"), rows("1"), None, TWO),
        "all IPUs, tick 1, 0B0: 0F0 runs in tick 0, and the concurrent stages at the end do F and B in one tick: "
        "give both the same tick",
    ),
    "W of a concurrent stage": (
        ((0, None), rows("0", "0"), rows("1", "0"), rows("2", "3"), ONE),
        "all IPUs, tick 3, 1W0: a concurrent stage has no W, its B in tick 0 does everything: repeat that tick",
    ),
    "messages that cross": (
        ((0, 1), rows("01", "32"), rows("67", "45"), None, ONE),
        "IPU 1, tick 2, 1F1: the messages cross: 0F0 (tick 0) was sent before 0F1 (tick 1), but 1F0 comes only in "
        "tick 3: use them in the order in which they are sent",
    ),
    "gradients that cross": (
        ((0, 1), rows("01", "12"), rows("76", "34"), None, ONE),
        "IPU 0, tick 6, 0B1: the messages cross: 1B0 (tick 3) was sent before 1B1 (tick 4), but 0B0 comes only in "
        "tick 7: use them in the order in which they are sent",
    ),
    "a message that waits under the two-phase clock": (
        ((0, 1), rows("01", "34"), rows("45", "34"), None, TWO),
        "IPU 0, tick 1, 0F1: it overwrites the message of 0F0 before 1F0 in tick 3 has used it, and under the "
        "two-phase clock none may wait: move one of them, or give clock='one-phase'",
    ),
    "a head a tick late under the two-phase clock": (
        ((0, None), rows("01", "12"), rows("12", "12"), None, TWO),
        "IPU 0, tick 1, 0F1: it overwrites the message of 0F0 before 1F0 in tick 1 has used it, and under the "
        "two-phase clock none may wait: move one of them, or give clock='one-phase'",
    ),
    "a stash slot": (
        ((0,), rows("014"), rows("526"), None, ONE),
        "IPU 0, tick 4, 0F2: it writes slot 0 of 2 of the stash before 0B0 in tick 5 has freed it: run the "
        "micro-batches in order",
    ),
    "a cut slot": (
        ((0,), rows("012"), rows("346"), rows("758"), ONE),
        "IPU 0, tick 6, 0B2: it writes slot 0 of 2 of the cut before 0W0 in tick 7 has freed it: run the "
        "micro-batches in order",
    ),
    "an inbox slot": (
        ((0, 1), ((0, 2, 1), (2, 4, 3)), ((12, 14, 13), (9, 11, 10)), None, ONE),
        "IPU 0, tick 1, 0F2: it writes slot 0 of 2 of the inbox before 1F0 in tick 2 has freed it: run the "
        "micro-batches in order",
    ),
    "a tick before the first": (
        ((0,), ((0, -1),), rows("23"), None, ONE),
        "IPU 0, tick -1, 0F1: there is no such tick: the first is tick 0",
    ),
}


@pytest.mark.parametrize(("tables", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_table_is_refused_naming_the_cell(tables, message):
    placement, forward, backward, weight, clock = tables
    with pytest.raises(ValueError, match=r"^schedule 'mine': ") as caught:
        Schedule("mine", placement, 2, forward, backward, weight, clock)
    assert str(caught.value) == f"schedule 'mine': {message}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement": ()}, "schedule 'mine' is empty: give at least one stage and one micro-batch"),
        ({"forward": ()}, "schedule 'mine' is empty: give at least one stage and one micro-batch"),
        ({"forward": ((0, 1), (1,))}, "schedule 'mine': the forward table must be 2 stages x 2 micro-batches"),
        ({"weight": ((4,),)}, "schedule 'mine': the weight table must be 2 stages x 1 micro-batches"),
        ({"placement": (0, 2)}, "stage 1 is on IPU 2, outside the replica: it has IPUs 0 to 1"),
        ({"ipus": 0}, "ipus=0 is not a count: give an int of at least 1"),
        ({"clock": "one-fase"}, "clock='one-fase' is unknown: did you mean 'one-phase'? "
         "Choose one of 'two-phase', 'one-phase'"),
        ({"name": "my\nown"}, "name='my\\nown' cannot stand in a header: give one line, words apart by one blank"),
        ({"weight": ((4,), (3,)), "clock": "two-phase"},
         "schedule 'mine': the two-phase clock has no phase for W: give clock='one-phase'"),
        ({"placement": (None, None), "forward": ((0,), (0,)), "backward": ((0,), (0,)), "weight": ((0,), (0,))},
         "schedule 'mine': concurrent stages have no W, and there are no others: give weight=None"),
    ],
)  # fmt: skip
def test_a_table_out_of_shape_is_refused(fields, message):
    right = {
        "name": "mine", "placement": (0, 1), "ipus": 2, "forward": ((0,), (1,)), "backward": ((3,), (2,)),
        "clock": "one-phase",
    }  # fmt: skip
    Schedule(**right)
    with pytest.raises(ValueError, match=r".") as caught:
        Schedule(**right | fields)
    assert str(caught.value) == message


# drawings


def test_a_bare_grid_tells_placement_and_clock():
    drawn = Schedule.from_text("""
        IPU 0  0F0  0F1  .    0B0  .    0B1
        IPU 1  .    1F0  1B0  1F1  1B1  .
    """)
    assert drawn == Schedule("custom", (0, 1), 2, rows("01", "13"), rows("35", "24"), None, "one-phase")
    barred = Schedule.from_text("IPU 0 | 0F0 | 0F1 |  | 0B0 |  | 0B1 |\nIPU 1 |  | 1F0 | 1B0 | 1F1 | 1B1 |  |")
    assert barred == drawn
    placed = Schedule.from_text("""
        tick   0    1    2    3    4    5
        IPU 1       1F0  1B0  1F1  1B1
        IPU 0  0F0  0F1       0B0       0B1
    """)
    assert placed == drawn


def test_a_bare_grid_with_two_tasks_of_an_ipu_in_a_tick_has_the_two_phase_clock():
    assert Schedule.from_text("""
        IPU 0  0F0 1F0 1B0  0B0
        IPU 1  1F0 1B0      .
    """) == Schedule("custom", (0, None), 2, rows("0", "0"), rows("1", "0"), None, "one-phase")
    assert Schedule.from_text("IPU 0  0F0 1F0 1B0 0B0\nIPU 1  1F0 1B0") == Schedule(
        "custom", (0, None), 2, rows("0", "0"), rows("0", "0")
    )


def test_w_of_a_drawing_is_read_and_concurrent_stages_have_none():
    drawn = Schedule.from_text("""
        IPU 0  0F0 1F0 1B0  0B0  0W0
        IPU 1  1F0 1B0
    """)
    assert drawn.weight == rows("2", "0")
    assert [str(task) for task in drawn.order(0)] == ["0F0", "1F0", "1B0", "0B0", "0W0"]
    assert [str(task) for task in drawn.order(1)] == ["1F0", "1B0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the rows are of IPUs []: give a row for each IPU, 'IPU 0', 'IPU 1' and so on"),
        ("IPU 1  0F0  0B0", "the rows are of IPUs [1]: give a row for each IPU, 'IPU 0', 'IPU 1' and so on"),
        ("IPU 0  0F0\nIPU 0  0B0", "IPU 0 has two rows: give each IPU one"),
        ("IPU 0  .  .", "the rows have no tasks: write stage, F, B or W, micro-batch, as in '2F0'"),
        ("IPU 0  0F0  0X0", "IPU 0, tick 1: '0X0' is not a task: write stage, F, B or W, micro-batch, as in '2F0'"),
        ("IPU 0  0F0  0F0", "IPU 0, tick 1: 0F0 is there already in tick 0: do each task once"),
        ("IPU 0  0F0 0F0", "IPU 0, tick 0: 0F0 is there already in tick 0: do each task once"),
        ("IPU 0  0F0  0B0  0F1", "schedule 'custom': 0B1 is missing: IPU 0 must do it in some tick"),
        ("IPU 0  0F0  0B0  0W0  0F1  0B1", "schedule 'custom': 0W1 is missing: IPU 0 must do it in some tick"),
        ("IPU 0  0F0 2F0  0B0", "stage 1 is missing: number the stages from 0 without a gap"),
        ("IPU 0  0F0  .\nIPU 1  .  0B0", "0F0 stands in the rows of IPUs [0], stage 0 in those of [0, 1]: "
         "a stage stands on one IPU, or on all of them"),
        ("IPU 0  0F0\nIPU 1  0F0\nIPU 2  .", "0F0 stands in the rows of IPUs [0, 1], stage 0 in those of [0, 1]: "
         "a stage stands on one IPU, or on all of them"),
        ("IPU 0  0F0  0B0\nhello", "'hello' is no line of a schedule: rows begin with 'IPU' and a number"),
    ],
)  # fmt: skip
def test_a_wrong_drawing_is_refused(text, message):
    with pytest.raises(ValueError, match=r".") as caught:
        Schedule.from_text(text)
    assert str(caught.value) == message


def test_a_drawing_with_one_cell_wrong_names_the_cell():
    text = str(make_schedule("1f1b", ipus=3, micro_batches=4))
    assert Schedule.from_text(text).name == "1f1b"
    with pytest.raises(ValueError, match="is there already") as caught:
        Schedule.from_text(text.replace("1F2", "1F1"))
    assert str(caught.value) == "IPU 1, tick 5: 1F1 is there already in tick 2: do each task once"


def test_one_ipu_needs_its_placement_said():
    concurrent = make_schedule("zb-h1", ipus=1, placement=(None, 0, None), micro_batches=2)
    assert str(concurrent).splitlines()[2] == "placement: all IPUs, IPU 0, all IPUs"
    assert Schedule.from_text(str(concurrent)) == concurrent

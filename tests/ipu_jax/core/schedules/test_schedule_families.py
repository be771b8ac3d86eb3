"""Test the schedules that have names: their figures, their closed forms, and how many micro-batches each keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_jax.core.schedules import SCHEDULES, Schedule, Task, make_schedule
from ipu_jax.core.schedules._timetable import Kind

KINDS: tuple[Kind, ...] = ("F", "B")

ONE_PHASE = tuple(name for name in SCHEDULES if name not in ("sequential", "grouped", "grouped-zb"))
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 10))
FOLDED = ("zbv", "zb-wave", "dualpipev")  # two stages of an IPU are one segment where the line turns
COSTS = st.sampled_from([{}, {"forward": 1, "backward": 1}, {"forward": 3, "backward": 0.5}, {"backward": 2.5}])

# figures

AT_4_IPUS_AND_8_MICRO_BATCHES = {
    "sequential": (96, 0.75, (1, 1, 1, 1)),
    "grouped": (33, 3 / 11, (7, 5, 3, 1)),
    "grouped-zb": (27, 1 / 9, (7, 6, 5, 4)),
    "interleaved": (33, 3 / 11, (4, 3, 2, 1)),
    "gpipe": (33, 3 / 11, (8, 8, 8, 8)),
    "1f1b": (33, 3 / 11, (4, 3, 2, 1)),
    "looped": (28.5, 3 / 19, (11, 9, 7, 5)),  # of stages half as big
    "looped-bfs": (28.5, 3 / 19, (16, 16, 16, 16)),
    "looped-zb": (25.5, 1 / 17, (11, 11, 11, 11)),
    "zb-h1": (27, 1 / 9, (4, 4, 4, 4)),
    "zbv": (25.5, 1 / 17, (8, 8, 8, 8)),  # of stages half as big
    "zb-wave": (25.5, 1 / 17, (8, 8, 8, 8)),
    "dualpipev": (25.5, 1 / 17, (9, 9, 9, 10)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_figures_of_every_family(name):
    makespan, bubble, peak_stash = AT_4_IPUS_AND_8_MICRO_BATCHES[name]
    run = make_schedule(name, ipus=4, gradient_accumulation=8).simulate(forward=1, backward=2)
    assert run.makespan == pytest.approx(makespan)
    assert run.bubble == pytest.approx(bubble)
    assert run.peak_stash == peak_stash
    assert run.busy == pytest.approx((24, 24, 24, 24))


def test_the_zero_bubble_grid_with_concurrent_ends():
    assert str(make_schedule("zb-h1", placement=(None, 0, 1, None), gradient_accumulation=3)).splitlines() == [
        "zb-h1: 4 stages on 2 IPUs, 3 micro-batches, 10 ticks, bubble 5.3%, one-phase clock",
        "stash: stage 0 holds 2, stage 1 holds 2, stage 2 holds 2, stage 3 holds 1",
        "       ramp-up  main" + " " * 66 + "ramp-down",
        "tick   0        1                2    3                4    5        6                7          8        9",
        "IPU 0  0F0 1F0  0F1 1F1 3F0 3B0       1B0 3F1 3B1 0B0  1W0  0F2 1F2  1B1 3F2 3B2 0B1  1W1        1B2 0B2  1W2",
        "IPU 1  0F0      0F1 2F0 3F0 3B0  2B0  2F1 3F1 3B1 0B0  2B1  0F2 2W0  2F2 3F2 3B2 0B1  2B2        2W1 0B2  2W2",
    ]


# closed forms


@settings(max_examples=25)
@given(sizes=SIZES, costs=COSTS)
def test_one_stage_an_ipu_has_the_bubble_of_1f1b_whatever_f_and_b_cost(sizes, costs):
    s_count, m_count = sizes
    for name in ("grouped", "interleaved", "gpipe", "1f1b"):
        run = make_schedule(name, ipus=s_count, gradient_accumulation=m_count).simulate(**costs)
        assert run.bubble == pytest.approx((s_count - 1) / (m_count + s_count - 1)), name
    sequential = make_schedule("sequential", ipus=s_count, gradient_accumulation=m_count)
    assert sequential.bubble(**costs) == pytest.approx(1 - 1 / s_count)


@settings(max_examples=25)
@given(sizes=SIZES)
def test_grouped_with_w_hides_messages_and_leaves_the_way_there_and_back_of_one_micro_batch(sizes):
    s_count, m_count = sizes
    schedule = make_schedule("grouped-zb", ipus=s_count, gradient_accumulation=m_count)
    assert schedule.clock == "two-phase"
    assert schedule.weight is not None
    for s in range(s_count):
        assert schedule.forward[s] == tuple(s + m for m in range(m_count))
        assert schedule.backward[s] == tuple(2 * s_count - 2 - s + m for m in range(m_count))
        assert schedule.weight[s] == tuple(2 * s_count - 2 + m for m in range(m_count))
        assert schedule.stash_depth(s) == min(m_count, 2 * s_count - 1 - s)
        assert schedule.weight_residual_depth(s) == min(m_count, s + 1)
    # F and B of a micro-batch that is alone, and with enough others there is no y but the first that no task hides
    makespan, way = schedule.simulate(forward=1, backward=2, transfer=0.5, lockstep=True).makespan, s_count - 1
    assert makespan <= 3 * m_count + 2 * way * (1 + 0.5)
    assert m_count < 2 * s_count - 1 or makespan == pytest.approx(3 * m_count + 2 * way + way * 0.5)
    assert schedule.bubble() == pytest.approx(1 - 3 * m_count / (3 * m_count + 2 * (s_count - 1)))
    makespan = schedule.simulate(forward=1, backward=2.5, weight=0.7, lockstep=True).makespan
    assert makespan == pytest.approx(m_count * 3.5 + way * 2.8)
    free = schedule.simulate(forward=1, backward=2)
    assert free.makespan <= 3 * m_count + 2 * (s_count - 1)
    if m_count >= s_count:
        assert free.makespan == pytest.approx(3 * m_count + s_count - 1)


@settings(max_examples=25)
@given(sizes=SIZES, rounds=st.integers(1, 4))
def test_looped_divides_the_bubble_by_its_rounds_whatever_the_micro_batches(sizes, rounds):
    s_count, m_count = sizes
    run = make_schedule("looped", ipus=s_count, gradient_accumulation=m_count, rounds=rounds).simulate()
    # with fewer micro-batches than IPUs, an IPU is idle until a round comes back
    waits = max(0, s_count - m_count) * (1 - 1 / rounds) * 3 if s_count > 1 else 0
    assert run.makespan == pytest.approx(3 * m_count + 3 * (s_count - 1) / rounds + waits)
    if m_count >= s_count:
        assert run.bubble == pytest.approx((s_count - 1) / (rounds * m_count + s_count - 1))


def bound(s_count: int, m_count: int, rounds: int) -> float:
    """Return the shortest makespan that any order can have if F = B = W = 1 for an IPU's share of the model."""
    return 3 * m_count + (s_count - 1) / rounds


@pytest.mark.slow
@settings(max_examples=30)
@given(sizes=SIZES, rounds=st.integers(1, 6))
def test_a_zero_bubble_wave_leaves_the_way_of_its_first_sweep(sizes, rounds):
    s_count, m_count = sizes
    run = make_schedule("zb-wave", ipus=s_count, gradient_accumulation=m_count, rounds=rounds).simulate(
        forward=1, backward=2
    )
    least = bound(s_count, m_count, rounds)
    assert run.makespan >= least - 1e-9
    # 1F1B's fullest IPU keeps min(M, S) micro-batches, here of each of its stages
    assert max(run.peak_stash) <= rounds * min(m_count, s_count)
    if m_count >= s_count and rounds % 2 == 0:
        assert run.makespan == pytest.approx(least)
    elif m_count >= s_count:
        assert run.makespan <= least + 4 / rounds + 1e-9


@pytest.mark.fast("2", "3")
@pytest.mark.parametrize("s_count", [2, 3, 4, 5])
def test_a_wave_of_three_sweeps_is_at_most_an_f_above_the_bound(s_count):
    for m_count in range(s_count, 3 * s_count + 2):
        run = make_schedule("zb-wave", ipus=s_count, gradient_accumulation=m_count, rounds=3).simulate(
            forward=1, backward=2
        )
        assert run.makespan <= bound(s_count, m_count, 3) + 1 / 3 + 1e-9
        if m_count % s_count == 0 and s_count > 2:
            assert run.makespan == pytest.approx(bound(s_count, m_count, 3))


@pytest.mark.slow
@settings(max_examples=25)
@given(sizes=SIZES, rounds=st.integers(1, 4))
def test_looped_zero_bubble_is_the_bound_with_the_memory_of_looped(sizes, rounds):
    s_count, m_count = sizes
    runs = {
        name: make_schedule(name, ipus=s_count, gradient_accumulation=m_count, rounds=rounds).simulate(
            forward=1, backward=2
        )
        for name in ("looped", "looped-zb")
    }
    assert max(runs["looped-zb"].peak_stash) <= max(runs["looped"].peak_stash)
    if m_count >= s_count and rounds > 1:
        assert runs["looped-zb"].makespan == pytest.approx(bound(s_count, m_count, rounds))


@pytest.mark.slow
@settings(max_examples=25)
@given(sizes=SIZES, rounds=st.integers(1, 4))
def test_breadth_first_is_as_long_as_looped_and_keeps_everything(sizes, rounds):
    s_count, m_count = sizes
    schedule = make_schedule("looped-bfs", ipus=s_count, gradient_accumulation=m_count, rounds=rounds)
    looped = make_schedule("looped", ipus=s_count, gradient_accumulation=m_count, rounds=rounds)
    assert schedule.simulate().makespan == pytest.approx(looped.simulate().makespan)
    assert [schedule.stash_depth(s) for s in range(len(schedule.placement))] == [m_count] * len(schedule.placement)
    for ipu in range(s_count):
        order = [task for task in schedule.order(ipu) if task.stage % s_count == ipu]
        half = len(order) // 2
        assert [task.kind for task in order] == ["F"] * half + ["B"] * half
        forward = [(task.stage, task.microbatch) for task in order[:half]]
        assert forward == sorted(forward) or s_count == 1


@pytest.mark.slow
@settings(max_examples=30)
@given(sizes=SIZES)
def test_the_families_from_the_smallest_bubble_to_the_greatest(sizes):
    s_count, m_count = sizes
    names = ("zb-wave", "zbv", "zb-h1", "1f1b", "sequential", "looped", "dualpipev")
    schedules = {name: make_schedule(name, ipus=s_count, gradient_accumulation=m_count) for name in names}
    runs = {name: schedule.simulate(forward=1, backward=2) for name, schedule in schedules.items()}
    assert runs["zb-h1"].makespan == pytest.approx(3 * m_count + s_count - 1 + max(0, s_count - m_count))
    least = bound(s_count, m_count, 2)
    assert min(runs["zbv"].makespan, runs["dualpipev"].makespan) >= least - 1e-9
    assert runs["zbv"].makespan <= least + 1 or m_count < s_count
    assert runs["dualpipev"].makespan <= least + 0.5 or m_count < 2 * s_count
    assert max(runs["dualpipev"].peak_stash) <= 2 * min(m_count, s_count + 1)
    # Qi et al. 2024: no more than 1F1B's fullest IPU; here of both its stages together
    assert max(runs["zbv"].peak_stash) <= 2 * min(m_count, s_count)
    assert schedules["zb-wave"].placement == schedules["zbv"].placement
    assert runs["zb-wave"].makespan <= runs["zbv"].makespan + 1e-9
    bubbles = [runs[name].bubble for name in ("zbv", "zb-h1", "1f1b", "sequential")]
    assert bubbles == sorted(bubbles)
    assert runs["looped"].bubble <= runs["1f1b"].bubble + 1e-9


@settings(max_examples=25)
@given(sizes=SIZES)
def test_grouped_and_interleaved_are_closed_tables(sizes):
    s_count, m_count = sizes
    grouped = make_schedule("grouped", ipus=s_count, gradient_accumulation=m_count)
    assert grouped.ticks == m_count + 2 * (s_count - 1)
    assert grouped.forward_ticks == m_count + s_count - 1
    schedule = make_schedule("interleaved", ipus=s_count, gradient_accumulation=m_count)
    for s in range(s_count):
        assert schedule.forward[s] == tuple(s + 2 * m for m in range(m_count))
        assert schedule.backward[s] == tuple(2 * s_count - 1 - s + 2 * m for m in range(m_count))


# what is kept


@settings(max_examples=30)
@given(sizes=SIZES)
def test_what_each_family_stashes(sizes):
    s_count, m_count = sizes
    every = range(s_count)

    def depths(name: str, placement: tuple[int | None, ...] | None = None) -> list[int]:
        schedule = make_schedule(name, ipus=s_count, gradient_accumulation=m_count, placement=placement)
        return [schedule.stash_depth(s) for s in range(len(schedule.placement))]

    assert depths("1f1b") == depths("interleaved") == [min(m_count, s_count - s) for s in every]
    assert depths("gpipe") == [m_count] * s_count
    assert depths("grouped") == [min(m_count, 2 * (s_count - 1 - s) + 1) for s in every]
    for placement in (tuple(every), (*every, 0), (None, *every, None), (0, None, *every)):
        assert depths("sequential", placement) == [1] * len(placement)
    assert max(depths("zb-h1")) <= min(m_count, s_count)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("gpipe", "looped-bfs")])
def test_what_is_kept_does_not_grow_with_the_micro_batches(name):
    def kept(m_count: int) -> tuple:
        schedule = make_schedule(name, ipus=3, gradient_accumulation=m_count)
        stages = range(len(schedule.placement))
        boundaries: list[tuple[int, Kind]] = [(b, kind) for b in stages[:-1] for kind in KINDS]
        return (
            [schedule.stash_depth(s) for s in stages],
            [schedule.weight_residual_depth(s) for s in stages],
            [schedule.inbox_depth(*boundary) for boundary in boundaries],
        )

    assert kept(12) == kept(48)


@settings(max_examples=25)
@given(sizes=SIZES, name=st.sampled_from(["interleaved", "gpipe", "grouped", "grouped-zb", "sequential"]))
def test_no_message_waits_where_a_register_must_do(sizes, name):
    schedule = make_schedule(name, ipus=sizes[0], gradient_accumulation=sizes[1])
    assert all(schedule.inbox_depth(b, kind) == 1 for b in range(sizes[0] - 1) for kind in KINDS)


def test_a_depth_counts_a_message_until_the_tick_of_its_use():
    schedule = Schedule.from_text("""
        IPU 0  0F0  0F1  0F2  .    .    0B0  .    0B1  .    0B2
        IPU 1  .    .    1F0  1B0  1F1  1B1  1F2  1B2  .    .
    """)
    # at the end of tick 2: 0F1 and 0F2, while 0F0 was used in it
    assert schedule.inbox_depth(0, "F") == 2
    assert schedule.inbox_depth(0, "B") == 1
    assert [schedule.stash_depth(s) for s in range(2)] == [3, 1]


def test_what_lies_between_b_and_w():
    schedule = Schedule.from_text("IPU 0  0F0  0B0  0F1  0B1  0W0  0W1  0F2  0B2  0W2")
    assert (schedule.stash_depth(0), schedule.weight_residual_depth(0)) == (2, 2)
    assert make_schedule("1f1b", ipus=2, gradient_accumulation=4).weight_residual_depth(0) == 0
    assert make_schedule("zb-h1", placement=(0, 1, None), gradient_accumulation=4).weight_residual_depth(2) == 0


# queries


def test_phases_order_and_ticks_under_the_one_phase_clock():
    schedule = make_schedule("1f1b", placement=(None, 0, None, 1, None), gradient_accumulation=2)
    assert [schedule.phase(s, "F") for s in range(5)] == ["entry", "work", "entry", "work", "head"]
    assert [schedule.phase(s, "B") for s in range(5)] == ["exit", "work", "exit", "work", "head"]
    assert [[str(task) for task in schedule.tasks(tick)] for tick in range(schedule.ticks)] == [
        ["0F0", "1F0"],
        ["0F1", "2F0", "1F1", "3F0", "4F0", "4B0"],
        ["3B0", "2B0"],
        ["2F1", "3F1", "1B0", "4F1", "4B1", "0B0"],
        ["3B1", "2B1"],
        ["1B1", "0B1"],
    ]
    assert schedule.order(1) == [t for tick in range(6) for t in schedule.tasks(tick) if t.stage != 1]
    assert (schedule.ticks, schedule.forward_ticks) == (6, 4)
    assert schedule.segments == (range(1), range(1, 2), range(2, 3), range(3, 4), range(4, 5))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_model_of_concurrent_stages_alone(name):
    schedule = make_schedule(name, placement=(None, None), ipus=2, gradient_accumulation=3)
    assert schedule.forward == schedule.backward == ((0, 1, 2), (0, 1, 2))
    assert schedule.weight is None
    assert schedule.simulate().bubble == pytest.approx(0)


# the simulator


def test_a_number_is_the_cost_of_an_ipu_and_a_sequence_that_of_stages():
    schedule = make_schedule("zbv", ipus=2, gradient_accumulation=4)
    assert schedule.simulate(2, 4).makespan == schedule.simulate([1] * 4, [2] * 4).makespan
    assert schedule.simulate(2, 4).busy == (24, 24)
    uneven = make_schedule("1f1b", ipus=2, gradient_accumulation=4).simulate([1, 3], [2, 6])
    assert uneven.busy == (12, 36)
    assert uneven.makespan == 1 + 36 + 2


def test_a_concurrent_stage_keeps_all_ipus_busy_for_its_share():
    run = make_schedule("1f1b", placement=(0, 1, None), gradient_accumulation=1).simulate(1, 2)
    assert [run.start_times[Task.parse(t)] for t in ("0F0", "1F0", "2F0", "2B0", "1B0", "0B0")] == [
        0,
        1,
        2,
        2.5,
        3.5,
        5.5,
    ]
    assert (run.makespan, run.busy) == (7.5, (4.5, 4.5))
    assert run.end_times[Task(2, "B", 0)] == 3.5


def test_transfer_delays_what_crosses():
    schedule = make_schedule("1f1b", ipus=3, gradient_accumulation=1)
    assert schedule.simulate(transfer=0.5).makespan == 9 + 4 * 0.5
    assert make_schedule("1f1b", placement=(None, 0, 1, None), gradient_accumulation=1).simulate(
        transfer=0.5
    ).makespan == (
        make_schedule("1f1b", placement=(None, 0, 1, None), gradient_accumulation=1).simulate().makespan + 4 * 0.5
    )
    # on one IPU a concurrent stage has no other IPU to wait for
    alone = make_schedule("1f1b", placement=(None, 0, None), ipus=1, gradient_accumulation=1)
    assert alone.simulate(transfer=0.5).makespan == 9


def test_only_the_two_phase_clock_hides_messages_in_lockstep():
    # IPU 0  0F0 > | 0F1 > |       | 0B0       | 0B1       each > is a message that the next tick needs
    # IPU 1        | 1F0   | 1B0 > | 1F1 1B1 > |
    assert (
        make_schedule("1f1b", ipus=2, gradient_accumulation=2).simulate(transfer=0.5, lockstep=True).makespan
        == 9 + 4 * 0.5
    )
    for s_count, m_count in ((2, 2), (4, 8)):
        run = make_schedule("grouped", ipus=s_count, gradient_accumulation=m_count).simulate(
            transfer=0.5, lockstep=True
        )
        # on the way there and back of one micro-batch alone there is no task to hide a message
        assert run.makespan == (m_count + s_count - 1) * 3 + 2 * (s_count - 1) * 0.5


def test_in_lockstep_nothing_hides_the_broadcast_with_which_a_concurrent_stage_begins():
    # embedding 0.5, F 1, B 1, W 1, then the embedding's B 1: its broadcast of 0.5 runs beside W, or after it
    schedule = make_schedule("grouped-zb", placement=(None, 0), ipus=2, gradient_accumulation=1)
    assert schedule.simulate(1, 2, weight=1, transfer=0.5).makespan == 4.5
    assert schedule.simulate(1, 2, weight=1, transfer=0.5, lockstep=True).makespan == 5


def test_w_takes_its_part_of_the_backward():
    schedule = make_schedule("zb-h1", ipus=4, gradient_accumulation=8)
    assert schedule.simulate(weight=0).makespan == pytest.approx(33)
    assert schedule.simulate(1, 2, weight=1).makespan == 27
    # W is not part of a schedule without it
    assert make_schedule("1f1b", ipus=4, gradient_accumulation=8).simulate(weight=0.3).makespan == 33


@settings(max_examples=25)
@given(sizes=SIZES, name=st.sampled_from(SCHEDULES))
def test_waiting_at_every_exchange_never_makes_a_run_shorter(sizes, name):
    schedule = make_schedule(name, ipus=sizes[0], gradient_accumulation=sizes[1])
    free, held = schedule.simulate(), schedule.simulate(lockstep=True)
    assert held.makespan >= free.makespan - 1e-9
    assert held.busy == pytest.approx(free.busy)
    assert held.peak_stash == free.peak_stash


@settings(max_examples=40)
@given(sizes=SIZES.filter(lambda sizes: sizes[0] > 1), name=st.sampled_from([n for n in ONE_PHASE if n not in FOLDED]))
def test_tasks_of_equal_cost_take_the_ticks_of_the_table(sizes, name):
    schedule = make_schedule(name, ipus=sizes[0], gradient_accumulation=sizes[1])
    assert len(schedule.segments) == len(schedule.placement)
    run = schedule.simulate([1] * len(schedule.placement), [2 if schedule.weight else 1] * len(schedule.placement))
    assert run.makespan == pytest.approx(schedule.ticks)
    assert all(run.start_times[task] <= tick for tick in range(schedule.ticks) for task in schedule.tasks(tick))


# make


def test_placements_that_families_make():
    assert make_schedule("zbv", ipus=4, gradient_accumulation=8).placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert make_schedule("looped", ipus=2, gradient_accumulation=8).placement == (0, 1, 0, 1)
    assert make_schedule("looped", ipus=2, gradient_accumulation=8, rounds=3).placement == (0, 1, 0, 1, 0, 1)
    assert make_schedule("1f1b", ipus=3, gradient_accumulation=8).placement == (0, 1, 2)


SERVED = {
    "zbv": [
        (0, None, 0, 1, None, 1, 0),
        (0, 1, 2, 1, 0),
        (2, 0, None, 0, 2),
        (None, 1, 0, 0, 1, None),
        (0,),
        (0, 0, 1, 1, 1, 0, 0),
    ],
    "dualpipev": [(0, 0, 1, 1, 1, 0, 0)],
    "zb-wave": [
        (0, 1, None, 1, 0, None, 0),
        (0, 1, 1, 0, 0, 1),
        (2, 0, 1, 1, 0, None, 2, 2, 0, 1),
        (0, 1),
        (0, 0, 0),
        (0, 1, None, 1, 0, 0, 1),
    ],
    "looped": [
        (0, None, 0, 1, 0, 1, None, 1),
        (0, 1, None, 0, 1),
        (1, 0, 1, 0, 1, 0),
        (0, 0),
        (0, 1, 2),
        (0, 0, 1, 0, 0, 1),
    ],
    "looped-bfs": [(0, 0, 1, 0, 0, 1)],
    "looped-zb": [(0, 0, 1, 0, 0, 1)],
}


@pytest.mark.parametrize("name", SERVED)
def test_placements_that_a_family_serves(name):
    for placement in SERVED[name]:
        schedule = make_schedule(name, placement=placement, gradient_accumulation=5)
        assert schedule.micro_batches == 5
        assert (schedule.weight is not None) == (name not in ("looped", "looped-bfs")), placement

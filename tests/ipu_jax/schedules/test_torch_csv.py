"""Test reading and writing the CSV in which torch.distributed.pipelining keeps schedules."""

import pytest

from ipu_jax.schedules import SCHEDULES, Schedule, make_schedule

# written by hand, as torch prints its 1F1B for two ranks and two micro-batches
ONE_F_ONE_B = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


def tasks_by_ipu(schedule: Schedule) -> list[list[str]]:
    return [[str(task) for task in schedule.order(ipu)] for ipu in range(schedule.ipus)]


def test_a_csv_of_1f1b_is_1f1b():
    schedule = Schedule.from_torch_csv(ONE_F_ONE_B, "1f1b")
    assert schedule == make_schedule("1f1b", ipus=2, micro_batches=2)
    assert schedule.to_torch_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_written_and_read_has_the_same_order_and_length(name, micro_batches):
    schedule = make_schedule(name, ipus=3, micro_batches=micro_batches)
    again = Schedule.from_torch_csv(schedule.to_torch_csv(), name)
    assert (again.placement, again.ipus, again.micro_batches) == (schedule.placement, 3, micro_batches)
    assert again.simulate(1, 2).makespan == pytest.approx(schedule.simulate(1, 2).makespan)
    if schedule.clock == "one-phase":
        assert tasks_by_ipu(again) == tasks_by_ipu(schedule)


def test_communication_is_left_out_and_overlapped_actions_are_two():
    text = "0UNSHARD, 0F0, 0SEND_F0, 0F1, 0SEND_F1, 0RECV_B0, 0B0, 0RECV_B1, 0B1, 0REDUCE_GRAD, 0RESHARD\n"
    text += "1RECV_F0, 1F0, 1RECV_F1, (1F1;1B0)OVERLAP_F_B, 1B1"
    assert tasks_by_ipu(Schedule.from_torch_csv(text)) == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]


def test_a_whole_backward_among_split_ones_is_both_parts():
    schedule = Schedule.from_torch_csv("0F0,0F1,0I0,0B1,0W0")
    assert tasks_by_ipu(schedule) == [["0F0", "0F1", "0B0", "0B1", "0W1", "0W0"]]


def test_the_backward_may_take_the_micro_batches_in_reverse():
    """torch's LoopedBFS does."""
    schedule = Schedule.from_torch_csv("0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0")
    assert schedule.backward == ((7, 6, 5), (6, 5, 4))


def test_neighbouring_stages_of_a_row_run_as_one():
    """By hand: F and B of stages 1 and 2 where torch does the first of them, W where it does the last."""
    text = "0F0,3F0,3I0,0I0,3W0,0W0\n1F0,2F0,2I0,2W0,1I0,1W0"
    schedule = Schedule.from_torch_csv(text)
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.forward == ((0,), (1,), (1,), (2,))
    assert schedule.backward == ((5,), (4,), (4,), (3,))
    assert schedule.weight == ((7,), (5,), (5,), (6,))
    waits = Schedule.from_torch_csv("0F0,1F0,0F1,1F1,1I0,0I0,1W0,1I1,0I1,0W0,1W1,0W1")
    assert (waits.forward, waits.backward, waits.weight) == (((0, 1),) * 2, ((2, 3),) * 2, ((4, 5),) * 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0", "row 0 has '0X0', which is not an action: write stage, F, B, I or W, micro-batch"),
        ("0F,0B0", "row 0 has '0F' without a micro-batch: write it as in '2F0'"),
        ("", "stage 0 is in no row: give each stage's tasks"),
        ("0F0,0B0\n2F0,2B0", "stage 1 is in no row: give each stage's tasks"),
        ("0F0,0B0\n0F1,0B1", "stage 0 is in rows 0 and 1: a stage runs on one IPU"),
        ("0F0,0F1,0B0", "0B1 is missing: every stage does each of its tasks once per micro-batch"),
        ("0F0,0F0,0B0", "0F0 is there 2 times: every stage does each of its tasks once per micro-batch"),
        ("0F0,0I0", "0W0 is missing: every stage does each of its tasks once per micro-batch"),
        (
            "0B0,0F0\n1F0,1B0",
            "schedule 'custom': the rows can never run to their end, since some IPUs wait for each other: put each "
            "task behind those that it needs",
        ),
    ],
)
def test_a_wrong_csv_is_refused(text, message):
    with pytest.raises(ValueError, match=r".") as refused:
        Schedule.from_torch_csv(text)
    assert str(refused.value) == message


def test_a_concurrent_stage_is_refused():
    schedule = make_schedule("1f1b", placement=(0, 1, None), micro_batches=2)
    with pytest.raises(ValueError, match=r"concurrent stages \[2\], which torch's CSV cannot hold: use to_text\(\)"):
        schedule.to_torch_csv()
    with pytest.raises(ValueError, match="text=None is not a text"):
        Schedule.from_torch_csv(None)  # pyright: ignore[reportArgumentType] (on purpose)

"""Test the CSV of schedules against torch.distributed.pipelining: what it wrote, its own loader if it is there, errors.

The texts below are what torch 2.13.0 wrote for two ranks with `_dump_csv`.
"""

from typing import Any

import pytest

from ipu_jax.core.schedules import SCHEDULES, Schedule, make_schedule
from support.refusals import refusals, refused

INTERLEAVED_ZERO_BUBBLE = (  # "compute_comms", two micro-batches
    "0UNSHARD,2UNSHARD,0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,2RECV_B0,2I0,2SEND_B0,"
    "2W0,2RECV_B1,2I1,2SEND_B1,2W1,0RECV_B0,2REDUCE_GRAD,2RESHARD,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD\r\n"
    "1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3I0,3SEND_B0,1RECV_B0,3F1,"
    "3I1,3SEND_B1,1RECV_B1,3W0,1I0,1SEND_B0,3W1,3REDUCE_GRAD,3RESHARD,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1RESHARD\r\n"
)
ZBV = (  # "compute_only", two micro-batches
    "0F0,0F1,,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,,,,0I1,0W1,,\r\n"
    ",1F0,2F0,1F1,2F1,2I0,2W0,,1I0,1W0,,2I1,2W1,1I1,,,1W1,,\r\n"
)
DUALPIPEV = (  # "compute_only", four micro-batches
    "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,"
    "0W3\r\n"
    "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3\r\n"
)


def orders(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, schedule.order(ipu))) for ipu in range(schedule.ipus)]


def test_what_torch_wrote_is_read():
    """By hand. Stages 1 and 2 of the folded ones run as one: F and B at the first of the two, W at the last."""
    schedule = Schedule.from_torch_csv(INTERLEAVED_ZERO_BUBBLE)
    assert schedule.placement == (0, 1, 0, 1)
    assert orders(schedule) == [
        "0F0 0F1 2F0 2F1 2B0 2W0 2B1 2W1 0B0 0W0 0B1 0W1",
        "1F0 1F1 3F0 3B0 3F1 3B1 3W0 1B0 3W1 1B1 1W0 1W1",
    ]
    schedule = Schedule.from_torch_csv(ZBV)
    assert schedule.placement == (0, 1, 1, 0)
    assert orders(schedule) == [
        "0F0 0F1 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 0B1 0W1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2W0 1W0 2B1 1B1 2W1 1W1",
    ]
    # a whole backward among split ones is both its parts
    assert orders(Schedule.from_torch_csv(DUALPIPEV))[0] == (
        "0F0 0F1 0F2 3F0 3B0 3W0 3F1 0F3 3B1 3W1 3F2 0B0 0W0 3B2 3W2 3F3 0B1 0W1 3B3 3W3 0B2 0W2 0B3 0W3"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_loads_and_writes_every_schedule(name, tmp_path):
    """By torch's runtime without devices: as much of it as loads and writes a CSV."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = make_schedule(name, ipus=4, gradient_accumulation=8)
    runtime = object.__new__(torch._PipelineScheduleRuntime)
    runtime.pipeline_order, runtime._stages, runtime._defer_pp_recv = {}, [], False
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = 4, len(schedule.placement), 8
    (tmp_path / "ours.csv").write_text(schedule.to_torch_csv())
    runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_only")  # torch validates it
    for form in ("compute_only", "compute_comms"):
        runtime._dump_csv(str(tmp_path / "theirs.csv"), format=form)
        again = Schedule.from_torch_csv((tmp_path / "theirs.csv").read_text(), name)
        assert (again.placement, orders(again)) == (schedule.placement, orders(schedule))


def test_a_csv_of_1f1b_is_1f1b():
    schedule = Schedule.from_torch_csv("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n", "1f1b")
    assert schedule == make_schedule("1f1b", ipus=2, gradient_accumulation=2)
    assert schedule.to_torch_csv() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    split = make_schedule("zb-h1", ipus=2, gradient_accumulation=1)
    assert split.to_torch_csv() == "0F0,0I0,0W0\n1F0,1I0,1W0\n"


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_written_and_read_has_the_same_order_and_length(name, micro_batches):
    schedule = make_schedule(name, ipus=3, gradient_accumulation=micro_batches)
    again = Schedule.from_torch_csv(schedule.to_torch_csv(), name)
    assert (again.placement, again.ipus, again.micro_batches) == (schedule.placement, 3, micro_batches)
    assert again.simulate(1, 2).makespan == pytest.approx(schedule.simulate(1, 2).makespan)
    if schedule.clock == "one-phase":
        assert orders(again) == orders(schedule)


def test_the_backward_may_take_the_micro_batches_in_reverse():
    """torch's LoopedBFS does."""
    schedule = Schedule.from_torch_csv("0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0")
    assert schedule.backward == ((7, 6, 5), (6, 5, 4))


READ: Any = Schedule.from_torch_csv
ONCE = "each of its tasks once per micro-batch"


@refusals(
    (lambda: READ("0F0,0X0"), "row 0 has '0X0'", "not an action", "F, B, I or W"),
    (lambda: READ("0F,0B0"), "row 0 has '0F'", "without a micro-batch", "as in '2F0'"),
    (lambda: READ(""), "stage 0 is in no row", "each stage's tasks"),
    (lambda: READ("0F0,0B0\n2F0,2B0"), "stage 1 is in no row", "each stage's tasks"),
    (lambda: READ("0F0,0B0\n0F1,0B1"), "stage 0 is in rows 0 and 1", "on one IPU"),
    (lambda: READ("0F0,0F1,0B0"), "0B1 is missing", ONCE),
    (lambda: READ("0F0,0F0,0B0"), "0F0 is there 2 times", ONCE),
    (lambda: READ("0F0,0I0"), "0W0 is missing", ONCE),
    (lambda: READ("0B0,0F0\n1F0,1B0"), "schedule 'custom'", "can never run to their end", "behind those that it needs"),
    (lambda: READ(None), "text=None", "is not a string"),
    (
        lambda: make_schedule("1f1b", placement=(0, 1, None), gradient_accumulation=2).to_torch_csv(),
        *("concurrent stages [2]", "torch's CSV cannot hold", "use to_text()"),
    ),
)
def test_a_wrong_csv_is_refused(call, holds):
    with refused(*holds):
        call()

"""Test checkpoints of several real processes: each writes its own shards, and any number of processes restores them."""

from pathlib import Path

import pytest

from support import failing_disks, resumed
from support.programs import Results, run_instances


def saved(folder: Path, devices: list[int], topology: str, calls: int) -> list[Results]:
    return run_instances(resumed.saved_by_processes, devices, folder=str(folder), topology=topology, calls=calls)


def restored(folder: Path, devices: list[int], topology: str, calls: int) -> list[Results]:
    return run_instances(resumed.restored_by_processes, devices, folder=str(folder), topology=topology, calls=calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "devices"),
    [
        ("basic", [2]),
        ("basic", [1, 1]),
        ("concurrent", [1, 1]),
        ("two replicas", [4]),
        ("two replicas", [1, 1, 1, 1]),
        ("two replicas", [3, 1]),
        ("concurrent, four IPUs", [1, 1, 1, 1]),
        ("concurrent, four IPUs", [2, 2]),
    ],
)
def test_any_number_of_processes_restores_what_two_saved(tmp_path, topology, devices):
    both = saved(tmp_path, [1, 1], "basic", calls=0)
    for found in restored(tmp_path, devices, topology, calls=0):
        assert int(found["step"]) == 4
        assert str(found["topology"]) == ("same" if topology == "basic" else "other")
        assert not resumed.differing(found, both[0], "restored")


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "devices"), [("basic", [1, 1]), ("concurrent", [1, 1]), ("two replicas", [2, 2])])
def test_a_process_reads_what_its_devices_hold(tmp_path, topology, devices):
    """Of a checkpoint of four IPUs: no process reads more bytes than it holds, or what another one holds."""
    saved(tmp_path, [4], "concurrent, four IPUs", calls=0)
    both = run_instances(resumed.bytes_read_by_processes, devices, folder=str(tmp_path), topology=topology)
    for found in both:
        assert 0 < int(found["read"]) <= int(found["held"])


@pytest.mark.slow
def test_a_training_of_two_processes_is_resumed_as_if_it_had_not_stopped(tmp_path):
    """With the optimizer's state in parts over replicas, each of which is on another process."""
    whole = saved(tmp_path / "whole", [2, 2], "two replicas", calls=4)
    first = saved(tmp_path / "parts", [2, 2], "two replicas", calls=2)
    then = restored(tmp_path / "parts", [2, 2], "two replicas", calls=2)
    for each, before, after in zip(whole, first, then, strict=True):
        assert str(after["topology"]) == "same"
        assert [*before["losses"], *after["losses"]] == [*each["losses"]]
        assert not resumed.differing(after, each)


@pytest.mark.slow
def test_what_one_process_finds_wrong_is_known_to_all(tmp_path):
    saved(tmp_path, [1, 1], "basic", calls=4)
    array = tmp_path / "step-8" / "manifest.ocdbt"
    array.write_bytes(array.read_bytes()[:-1])
    both = restored(tmp_path, [1, 1], "basic", calls=0)
    assert [int(found["step"]) for found in both] == [4, 4]
    warned = f"{tmp_path}/step-8 cannot be restored, manifest.ocdbt has another size: it is skipped"
    assert [found["warned"].tolist() for found in both] == [[warned], []]


@pytest.mark.slow
def test_what_a_killed_save_left_gets_its_name_when_all_have_read_it(tmp_path):
    both = saved(tmp_path, [1, 1], "basic", calls=0)
    (tmp_path / "step-4").rename(tmp_path / "step-4.unsealed")
    for found in run_instances(resumed.locked_while_another_reads, [1, 1], folder=str(tmp_path)):
        assert "step-4" in found["files"]
        assert not resumed.differing(found, both[0])


@pytest.mark.slow
def test_a_run_has_one_lock_and_a_second_training_is_refused_on_all_instances(tmp_path):
    for number, found in enumerate(run_instances(resumed.two_trainings, [1, 1], folder=str(tmp_path))):
        where = f"on instance 0: {tmp_path}" if number else str(tmp_path)
        assert len(found["errors"]) == 2
        assert all(str(error).startswith(f"16 {where} is in use: this process saves") for error in found["errors"])
        assert "step-0" in found["files"]


@pytest.mark.slow
def test_an_instance_that_does_not_save_is_named_in_time(tmp_path):
    first, _ = run_instances(resumed.one_does_not_save, [1, 1], folder=str(tmp_path))
    assert "instance 1 of 2 did not join within 3 s" in str(first["error"])
    assert float(first["seconds"]) < 30


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "stuck"), [(1, True), (0, False), (1, False)])
def test_the_failing_disk_of_one_instance_is_told_to_all_at_once(tmp_path, victim, stuck):
    both = run_instances(failing_disks.one_disk_fails, [1, 1], folder=str(tmp_path), victim=victim, stuck=stuck)
    for number, found in enumerate(both):
        error = str(found["error"])
        assert error.startswith(f"saving {tmp_path}/step-0 failed, [Errno 27] File too large, of ")
        assert (f"on instance {victim}: " in error) == (number != victim)
        assert int(found["errno"]) == 27
        assert float(found["seconds"]) < failing_disks.TIMEOUT / 5
        assert int(found["calls"]) == int(both[0]["calls"]) < 1000, "not in the same step, or at the next save only"
        assert not found["was sealed"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]  # the save after it

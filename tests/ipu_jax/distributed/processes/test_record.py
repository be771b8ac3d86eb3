"""Test the record that a process writes of itself: what it says, whose it is, and that it never fails a run."""

import errno
import json
import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import optax
import psutil
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Feed, Pipeline, Stage, TrainOptions, cli, fit, make_mesh, make_train_step, popdist
from ipu_jax.distributed.processes import beacons, listener, record
from ipu_jax.distributed.processes.identity import Identity, is_living, own_identity
from ipu_jax.distributed.processes.listener import OWN
from ipu_jax.run.observe.monitor import records
from ipu_jax.steps import InFlight
from support.launched import environment


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Let this process begin a record of its own, in a new folder."""
    monkeypatch.setenv("IPU_JAX_MONITOR", str(tmp_path / "records"))
    for name in ("_asked", "_record", "_looked"):
        monkeypatch.setattr(record, name, None)
    OWN.forget()
    return tmp_path / "records"


def written(folder):
    """Return what the record of this process says: its JSON, and its beacon."""
    (path,) = folder.iterdir()
    reading = beacons.read(path / "beacon")
    assert reading is not None
    return json.loads((path / "said.json").read_text()), reading


def pipeline_of_two():
    body = lambda w, x, mb: jnp.tanh(mb @ w)
    head = lambda w, x, mb: jnp.mean((x @ w) ** 2)
    stages = [Stage(body, params="body", ipu=1), Stage(head, params="head", ipu=ALL_IPUS)]
    return Pipeline(stages, specs={"head": PartitionSpec()}, gradient_accumulation=2)


WEIGHTS = {"body": jnp.ones((3, 3)), "head": jnp.ones((3, 1))}


def test_a_training_writes_its_ipus_stages_updates_and_examples(folder, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py"])
    step = make_train_step(pipeline_of_two(), optax.sgd(0.1), TrainOptions(replication_factor=2, device_iterations=3))
    state = step.init(WEIGHTS)
    for _ in range(6):
        state, outputs = step(state, jnp.ones((3, 2, 2, 4, 3)))
        outputs.loss.block_until_ready()
    static, reading = written(folder)
    assert (static["format"], static["instance"], static["instances"]) == (3, 0, 1)
    assert static["command"] == ["python", "train.py"]
    assert (static["replicas"], static["ipus_per_replica"]) == (2, 2)
    assert [(ipu["platform"], ipu["replica"], ipu["ipu"], ipu["stages"]) for ipu in static["ipus"]] == [
        ("cpu", 0, 0, ["head"]),
        ("cpu", 0, 1, ["body", "head"]),
        ("cpu", 1, 0, ["head"]),
        ("cpu", 1, 1, ["body", "head"]),
    ]
    assert reading.finished >= 5  # the last may not have been noticed
    assert (reading.updates, reading.samples) == (3 * reading.finished, 3 * 2 * 2 * 4 * reading.finished)
    assert reading.first_at <= reading.mark.at < reading.finished_at
    assert reading.device_bytes == 0  # those of a CPU do not say


def test_each_device_of_a_group_has_the_place_of_its_ipu(folder):
    """`ipu-monitor` reads them from the record."""
    body = Stage(lambda w, x, mb: mb @ w, params="body", ipu=0, name="body")
    head = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="head", ipu=1, name="head")
    Pipeline([body, head], mesh=make_mesh(2, 2, tensor=2), gradient_accumulation=2)
    own = own_identity()
    assert own is not None
    (record,), _ = records.find(own, {})
    assert (record.said.replicas, record.said.ipus_per_replica) == (2, 2)
    placed = [(ipu.replica, ipu.ipu, ipu.further, ipu.stages) for ipu in record.said.ipus]
    assert placed == [(r, i, (k,), (("body", "head")[i],)) for r in (0, 1) for i in (0, 1) for k in (0, 1)]


def test_devices_that_tell_are_asked_for_their_memory_now_and_then(folder, monkeypatch):
    asked: list[int] = []

    class Device:
        def memory_stats(self):
            asked.append(1)
            return {"bytes_in_use": 1000 * len(asked)}

    clock = [0.0]
    monkeypatch.setattr("ipu_jax.distributed.processes.listener.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    window, output = InFlight(), jnp.ones(()).block_until_ready()
    held: list[int] = []
    for clock[0] in (0.0, 1.0, 1.9, 2.1, 3.0, 9.0):
        window.admit(output)
        held.append(written(folder)[1].device_bytes)
    assert held == [1000, 1000, 1000, 2000, 2000, 3000]


def test_devices_with_a_limit_say_it_once_all_do(folder, monkeypatch):
    stats = [{"bytes_in_use": 5, "bytes_limit": 70}, {"bytes_in_use": 6, "bytes_limit": 80}]
    devices = [SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]
    monkeypatch.setattr("jax.local_devices", lambda: devices)
    InFlight().admit(jnp.ones(()).block_until_ready())
    static, reading = written(folder)
    assert (reading.device_bytes, static["device_limit_bytes"]) == (11, 150)
    del stats[0]["bytes_limit"]
    assert listener._device_bytes() == (11, 0)


def test_a_plan_counts_from_the_updates_that_were_made(folder):
    """By hand: 2 updates have been made, 5 are planned, and 3 of them are made."""
    plans = lambda: [written(folder)[0][name] for name in ("planned_after", "planned_updates")]
    OWN.planned(5)  # without a record, nothing is said
    popdist.count_steps(updates=2)
    with cli.Bar("one", 9, 4, 1, shown=False):
        assert plans() == [2, 7]
        popdist.count_steps(updates=3)
        assert plans() == [2, 7]
    assert plans() == [None, None]
    with cli.Bar("two", None, 0, 1, shown=False):
        assert plans() == [None, None]


def test_fit_plans_its_updates(folder):
    step = make_train_step(pipeline_of_two(), optax.sgd(0.1))
    feed, plans = Feed(jnp.ones((8, 3)), micro_batch=2, step=step), list[tuple[int, int]]()

    def evaluate(state):
        static = written(folder)[0]
        plans.append((static["planned_after"], static["planned_updates"]))
        return {}

    state = step.init(WEIGHTS)
    for _ in range(2):
        state = fit(step, state, feed, epochs=3, evaluate=evaluate, progress=False, say=len).state
    assert plans == [(0, 6)] * 3 + [(6, 12)] * 3
    assert written(folder)[0]["planned_updates"] is None


def test_gradients_are_updates_and_losses_are_none(folder):
    pipeline, batch = pipeline_of_two(), jnp.ones((2, 4, 3))
    params = pipeline.shard(WEIGHTS)
    for _ in range(3):
        pipeline.loss(params, batch).block_until_ready()
        pipeline.value_and_grad(params, batch)[0].block_until_ready()
    InFlight(limit=1).admit(jnp.ones(()))
    _, reading = written(folder)
    assert reading.updates >= 2
    assert reading.samples == 8 * (reading.updates - 1)  # the one of the bare window has none
    assert reading.finished > reading.updates


def test_steps_of_a_loop_of_ones_own_count_as_they_are_told(folder):
    popdist.count_steps(2)
    popdist.count_steps(updates=10, samples=640)
    _, reading = written(folder)
    assert (reading.finished, reading.updates, reading.samples) == (3, 12, 640)


def test_the_speed_of_late_is_since_a_mark_some_seconds_ago(folder, monkeypatch):
    clock = [100]
    monkeypatch.setattr("ipu_jax.distributed.processes.beacons.time.monotonic_ns", lambda: clock[0] * 10**9)
    beacon = record.begin()
    assert beacon is not None
    marks: list[float] = []
    for _ in range(20):
        clock[0] += 1
        beacon.finished(samples=2)
        marks.append(written(folder)[1].mark.at)
    # the first step is no measure; later the mark is 6 to 11 s ago
    assert marks == [101] * 12 + [107] * 6 + [113] * 2
    assert written(folder)[1].mark == beacons.Mark(113, 13, 26)


def said_by(code, folder):
    own = environment(IPU_JAX_MONITOR=str(folder / "records"))
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


def test_only_the_user_may_read_it_and_it_goes_with_the_process(tmp_path):
    code = """
import json, os
from ipu_jax.distributed.processes import record
record.begin(), record.note(replicas=3)
folder = record.own_folder()
print(*(oct(path.stat().st_mode & 0o777) for path in sorted((folder, *folder.rglob("*")))))
if os.fork() == 0:
    print(record.current(), flush=True)
    record.note(replicas=4)  # of which it has no record
    record.begin()
    record.note(replicas=5)
    print(len(list(folder.iterdir())), flush=True)
    raise SystemExit  # whose exit is not the end of the other process
os.wait()
print(*(json.loads(path.read_text())["replicas"] for path in folder.rglob("said.json")))
"""
    assert said_by(code, tmp_path) == "0o700 0o700 0o600 0o600\nNone\n2\n3\n"
    assert list((tmp_path / "records").iterdir()) == []


def test_a_process_that_replaces_its_program_begins_anew(tmp_path):
    code = """
import json, os, sys
from ipu_jax.distributed.processes import beacons, record
record.begin(), record.note(run="a" * (2000 if len(sys.argv) == 1 else 1))
if len(sys.argv) == 1:
    os.execv(sys.executable, [*sys.orig_argv, "again"])
(path,) = record.own_folder().iterdir()
print(json.loads((path / "said.json").read_text())["run"], beacons.read(path / "beacon").pid == os.getpid())
"""
    assert said_by(code, tmp_path) == "a True\n"


def test_the_records_lie_in_the_users_own_runtime_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("IPU_JAX_MONITOR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert record.own_folder() == tmp_path / "ipu_jax"
    monkeypatch.setattr(os, "geteuid", lambda: 4321)  # as under sudo: the folder is another user's
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/scratch")
    assert str(record.own_folder()) == "/scratch/ipu_jax-4321"


@pytest.mark.parametrize("word", ["OFF", "0", "no"])
def test_it_can_be_turned_off(folder, monkeypatch, word):
    monkeypatch.setenv("IPU_JAX_MONITOR", word)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder.parent))
    assert record.begin() is None
    assert not (folder.parent / "ipu_jax").exists()


@pytest.mark.parametrize("kind", ["open to others", "link", "file", "missing parent"])
def test_what_is_no_folder_of_ones_own_gets_no_record(folder, tmp_path, monkeypatch, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if kind == "open to others":
        folder.mkdir(mode=0o755)
    elif kind == "link":
        folder.symlink_to(elsewhere)
    elif kind == "file":
        folder.write_text("")
    else:
        monkeypatch.setenv("IPU_JAX_MONITOR", str(folder / "deeper"))
    InFlight(limit=1).admit(jnp.ones(()))
    assert record.begin() is None
    assert record.current() is None
    assert list(elsewhere.iterdir()) == []
    assert not folder.is_dir() or list(folder.iterdir()) == []


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["mkdir", "fsync", "posix_fallocate", "mmap", "pwrite without posix_fallocate"])
def test_a_full_disk_gives_no_record_and_no_error(folder, monkeypatch, what):
    if " without " in what:  # on macOS
        what, _, missing = what.split()
        monkeypatch.delattr(os, missing)
    monkeypatch.setattr(mmap if what == "mmap" else os, what, full)
    assert record.begin() is None
    assert not folder.exists() or list(folder.iterdir()) == []


def test_without_proc_psutil_tells_who_lives(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("ipu_jax.distributed.processes.identity._PROC", tmp_path / "none")
    assert record.begin() is not None
    (own,) = map(Identity.parse, os.listdir(folder))
    assert own is not None
    assert own == own_identity()
    assert own.pid == os.getpid()
    assert is_living(own)
    assert not is_living(own._replace(start=own.start - 1))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        zombie = own._replace(pid=ended.pid, start=round(psutil.Process(ended.pid).create_time() * 1e6))
        assert not is_living(zombie)
    assert not is_living(zombie)


def test_where_proc_tells_nothing_there_is_no_record(folder, monkeypatch, tmp_path):
    (tmp_path / "none" / "self").mkdir(parents=True)
    monkeypatch.setattr("ipu_jax.distributed.processes.identity._PROC", tmp_path / "none")
    assert own_identity() is None
    assert record.begin() is None
    assert not folder.exists()


def test_what_is_noted_on_a_full_disk_leaves_what_was_said(folder, monkeypatch):
    record.begin()
    record.note(run="x" * 1000)
    record.note(run="short")
    monkeypatch.setattr(os, "fsync", full)
    record.note(replicas=7, run="x" * 5000)
    static, _ = written(folder)
    assert (static["run"], "replicas" in static) == ("short", False)
    assert len(list(folder.rglob("*"))) == 3  # no part of a file


def test_what_killed_processes_have_left_is_removed_by_the_next(folder):
    own = own_identity()
    assert own is not None
    folder.mkdir(mode=0o700)
    others = [f"{own._replace(start=1, boot='00000000')}", f"{own._replace(start=1)}.txt", "notes"]
    for name in (f"{own._replace(start=own.start - 1)}", *others):
        (folder / name).mkdir()
    (folder / f"{own._replace(start=own.start - 2)}").symlink_to("gone")
    record.begin()
    assert {path.name for path in folder.iterdir()} == {*others, str(own)}


def test_a_long_command_is_shortened(folder, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["train", "x" * 5000, "more"])
    record.begin()
    static, _ = written(folder)
    assert static["command"] == ["train", "x" * 995 + "..."]


def test_under_poprun_the_monitor_finds_the_launchers_record(folder, monkeypatch, tmp_path):
    run = tmp_path / "poprun-abc"
    run.mkdir()
    monkeypatch.setenv(record.RUN_DIR, str(run))
    monkeypatch.setenv(record.INSTANCE, "0")
    beacon = record.begin()
    assert beacon is not None
    assert beacon.launched
    beacon.finished(2)
    static, reading = written(folder)
    assert static["run"] == "poprun-abc"
    assert beacons.read(run / "0" / "beacon") == reading
    assert [path.is_symlink() for path in folder.iterdir()] == [True]

"""Test the flight recorder: real processes hang on purpose in one task, and the record must name this task."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ipu_jax.distributed.processes import flight, record
from ipu_jax.distributed.processes.record import OwnRecord
from ipu_jax.schedules import make_schedule
from support.launched import wait_for
from support.programs import places

TRAINS = """
    import json, os, pathlib, sys, time

    from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, configure, make_mesh, make_train_step, popdist

    popdist.init()
    import jax, jax.numpy as jnp, numpy as np, optax

    kind, stage, number, r, ipus, m, schedule, k, head = json.loads(sys.argv[1])
    configure(popdist.get_num_local_ipus())
    folder = pathlib.Path(os.environ["IPU_JAX_RUN_DIR"])

    def stuck(here, values):
        while (folder / "hang").exists() and [kind, stage] == here and number in np.asarray(values):
            time.sleep(0.05)
        return np.float32(0)

    def passing(own):
        @jax.custom_vjp
        def gate(x, numbers):
            return x + jax.pure_callback(lambda n: stuck(["F", own], n), jax.ShapeDtypeStruct((), jnp.float32), numbers)

        def back(numbers, dy):
            zero = jax.pure_callback(lambda n: stuck(["B", own], n), jax.ShapeDtypeStruct((), jnp.float32), numbers)
            return dy + zero, None

        gate.defvjp(lambda x, numbers: (gate(x, numbers), numbers), back)
        return gate

    def block(own):
        return lambda w, x, mb: jnp.tanh(passing(own)(mb["x"] if x is None else x, mb["number"]) @ w)

    def loss(w, x, mb):
        return jnp.mean((passing(ipus - 1)(x, mb["number"]) @ w) ** 2)

    d, rows = 11, 3
    stages = [Stage(block(i), params=f"w{i}", ipu=i, name=f"block {i}") for i in range(ipus - 1)]
    stages.append(Stage(loss, params="head", ipu=ipus - 1 if head == "local" else ALL_IPUS, name="loss"))
    specs = None if head == "local" else {"head": jax.sharding.PartitionSpec()}
    pipeline = Pipeline(stages, mesh=make_mesh(r, ipus), gradient_accumulation=m, schedule=schedule, specs=specs)
    step = make_train_step(
        pipeline, optax.sgd(0.01), TrainOptions(replication_factor=r, device_iterations=k)
    )
    rng = np.random.default_rng(3)
    weights = {f"w{i}": rng.normal(size=(d, d)).astype(np.float32) / 4 for i in range(ipus - 1)}
    state = step.init({**weights, "head": np.ones((d, 2), np.float32)})
    lead = (*[k] * (k > 1), *[r] * (r > 1), m)
    # micro-batch 3 of replica 1 has the number 103, in the last update only
    of = np.arange(m) + 100 * np.arange(r)[:, None] * (r > 1)
    numbers = np.broadcast_to(of.reshape(lead[k > 1:])[..., None], (*lead, rows))
    if k > 1:
        numbers = numbers - np.array([1000, 0]).reshape(2, *[1] * (numbers.ndim - 1))
    batch = {"x": rng.normal(size=(*lead, rows, d)).astype(np.float32), "number": numbers.astype(np.int32)}
    for _ in range(2):
        state, outputs = step(state, batch)
    jax.block_until_ready(state)
    (folder / f"warm.{popdist.get_instance_index()}").touch()
    while not (folder / "hang").exists():
        time.sleep(0.02)
    state, outputs = step(state, batch)
    jax.block_until_ready(state)
    (folder / f"done.{popdist.get_instance_index()}").touch()
    time.sleep(600)
"""


@contextlib.contextmanager
def hanging(folder: Path, about: Sequence[Any], instances: int = 1) -> Iterator[Any]:
    """Start a training run that hangs in a task, and give a function that returns the record's lines once it does."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(TRAINS))
    _, _, _, replicas, ipus, *_ = about
    own = places(instances, replicas=replicas, ipus_per_replica=ipus, run_dir=folder)
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PJRT_"))}
    with contextlib.ExitStack() as stack:
        processes = []
        for number, place in enumerate(own):
            environment = {**usual, **place, flight.RECORD: "1", "JAX_PLATFORMS": "cpu"}
            command = [sys.executable, str(script), json.dumps(about)]
            err = stack.enter_context((folder / f"{number}.err").open("wb"))
            processes.append(subprocess.Popen(command, env=environment, stderr=err))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)

        def all_have(name: str) -> bool:
            for number, process in enumerate(processes):
                assert process.poll() is None, (folder / f"{number}.err").read_text()
            return all((folder / f"{name}.{number}").exists() for number in range(instances))

        def lines() -> list[str]:
            return [line for number in range(instances) for line in flight.read(folder / str(number)).lines]

        wait_for(lambda: all_have("warm"), 90)
        assert len(lines()) == replicas * ipus
        assert all("after all" in line for line in lines())
        (folder / "hang").touch()
        # 1.5 s after its last report, an IPU waits
        wait_for(lambda: min(float(line.split()[-2]) for line in lines()) > 1.5)
        yield lines()
        assert not list(folder.glob("done.*"))
        (folder / "hang").unlink()
        wait_for(lambda: all_have("done"))


# kind, stage, micro-batch (and 100 for replica 1), replicas, IPUs, M, schedule, K, head; instances
CASES = [
    pytest.param(["B", 1, 3, 1, 2, 5, "grouped", 1, "local"], 1, id="grouped"),
    pytest.param(["F", 2, 4, 1, 4, 7, "1f1b", 1, "local"], 1, id="1f1b"),
    pytest.param(["B", 1, 102, 2, 2, 3, "zb-h1", 1, "local"], 1, id="replicas"),
    pytest.param(["F", 0, 0, 1, 2, 6, "grouped", 2, "concurrent"], 1, id="device iterations"),
    pytest.param(["B", 3, 6, 1, 4, 7, "grouped", 1, "concurrent"], 1, id="concurrent"),
    pytest.param(["B", 2, 2, 1, 4, 5, "1f1b", 1, "local"], 2, id="instances"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("about", "instances"), CASES)
def test_the_record_of_a_hang_names_the_task_that_hangs(about, instances, tmp_path):
    kind, stage, number, _, ipus, m, name, _, head = about
    replica, microbatch = divmod(number, 100)
    placement = (*range(ipus - 1), ipus - 1 if head == "local" else None)
    schedule = make_schedule(name, ipus=ipus, gradient_accumulation=m, placement=placement)
    (tick,) = (
        tick
        for tick in range(schedule.ticks)
        for task in schedule.tasks(tick)
        if (task.kind, task.stage, task.microbatch) == (kind, stage, microbatch)
    )
    with hanging(tmp_path, about, instances) as lines:
        found = {
            (int(line[2]), int(line[1])): (line[3], int(line[4]))
            for text in lines
            if (line := re.fullmatch(r"IPU (\d+) of replica (\d+): (.*?),? (?:in )?tick (\d+) of .*", text))
        }
        for ipu in range(ipus) if placement[stage] is None else [placement[stage]]:
            doing, at = found[replica, ipu]
            assert at == tick
            assert told(doing) == {
                (task.stage, task.kind, task.microbatch)
                for task in schedule.tasks(tick)
                if schedule.placement[task.stage] in (None, ipu)
            }
        # the others wait for it, in this tick or a later one, except in the other replica
        assert all(at >= tick for (of, _), (_, at) in found.items() if of == replica)
        assert all(" after all " in line for line in lines if f"of replica {replica}:" not in line)


def told(text: str) -> set[tuple[int, str, int]]:
    """Return the tasks in a line, as (stage, kind, micro-batch)."""
    return {
        (int(stage), kind, int(microbatch))
        for kinds, microbatch, stage in re.findall(r"([FBW](?: and B)?) of micro-batch (\d+) of stage (\d+) \(", text)
        for kind in kinds.split(" and ")
    }


def test_lines_follow_replicas_and_ipus_and_say_what_is_done_in_a_tick(tmp_path):
    own = OwnRecord(tmp_path / "7", launched=True)
    recorder = flight.Recorder(own)
    tasks = [["F of micro-batch 0 of stage 0 (a)", ""], ["", "B of micro-batch 0 of stage 1 (b)"]]
    report = recorder.report("one", "training", 2, lambda: tasks)
    assert flight.read(own.folder) == flight.Seen()
    since = time.monotonic()
    report(1, 1, 1)
    report(1, 0, 1)
    report(0, 1, 2)
    report(0, 0, 0)
    assert [re.sub(r", for \d+\.\d s$", "", line) for line in flight.read(own.folder).lines] == [
        "IPU 0 of replica 0: F of micro-batch 0 of stage 0 (a), tick 0 of 2",
        "IPU 1 of replica 0: after all 2 ticks of training: collectives, the update, or nothing",
        "IPU 0 of replica 1: idle in tick 1 of 2",
        "IPU 1 of replica 1: B of micro-batch 0 of stage 1 (b), tick 1 of 2",
    ]
    assert flight.read(own.folder).ticks == (0, 2)
    other = recorder.report("other", "evaluation", 3, lambda: [["F"], ["F"], ["F"]])  # needs further slots
    assert recorder.report("one", "training", 2, list) is report
    other(2, 2, 0)
    report(0, 0, 1)
    lines = flight.read(own.folder).lines
    assert len(lines) == 5
    assert lines[0].startswith("IPU 0 of replica 0: idle in tick 1 of 2, for ")
    assert lines[4].startswith("IPU 2 of replica 2: F, tick 0 of 1, for ")
    assert float(lines[4].split()[-2]) <= time.monotonic() - since + 0.1
    report(0, 1, 0)
    assert flight.read(own.folder).ticks == (0, 1)  # of IPU 2: IPU 1 is idle in tick 0
    other(2, 2, 1)
    assert flight.read(own.folder).ticks == (1, 1)
    assert flight.read(tmp_path / "8") == flight.Seen()


def test_many_ipus_have_slots_of_their_own(tmp_path):
    recorder = flight.Recorder(OwnRecord(tmp_path / "0", launched=True))
    few = recorder.report("few", "training", 1, lambda: [["F"]] * 3)
    few(0, 2, 0)
    many = recorder.report("many", "training", 50, lambda: [["B"]] * 40)
    for replica in range(50):
        for ipu in range(40):
            many(replica, ipu, replica % 2)
    few(0, 1, 0)
    lines = flight.read(tmp_path / "0").lines
    assert len(lines) == 2000
    assert lines[1].startswith("IPU 1 of replica 0: F, tick 0 of 1")
    assert lines[2].startswith("IPU 2 of replica 0: B, tick 0 of 1")
    assert lines[1999].startswith("IPU 39 of replica 49: after all 1 ticks")


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Let a launcher ask for the ticks of this process."""
    for name in ("_looked", "_record"):
        monkeypatch.setattr(record, name, None)
    for name, value in {flight.RECORD: "1", record.RUN_DIR: str(tmp_path), record.INSTANCE: "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("missing", [flight.RECORD, "IPU_JAX_RUN_DIR"])
@pytest.mark.usefixtures("asked")
def test_nothing_is_recorded_unless_a_launcher_asks(missing, tmp_path, monkeypatch):
    monkeypatch.delenv(missing)
    assert flight.report_of("one", "training", 1, lambda: [["F"]]) is None
    assert not list(tmp_path.rglob("ticks"))


@pytest.mark.usefixtures("asked")
def test_a_folder_that_is_gone_ends_no_training(tmp_path):
    assert record.current() is not None
    shutil.rmtree(tmp_path / "0")
    with pytest.warns(UserWarning, match="flight recorder"):
        assert flight.report_of("one", "training", 1, lambda: [["F"]]) is None

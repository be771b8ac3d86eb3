"""Test that poprun keeps its promises for a real training: a pipeline that two instances compute together.

The others wait for the instance that fails in a collective of gloo, which no time limit of jax's ends within half an
hour. Each program prints the moment of its fault, on the monotonic clock.
"""

import gzip
import itertools
import json
import re
import signal
import sys

import pytest

from support.launched import gone_within, poprun, start

# Instance sys.argv[2] has a fault sys.argv[1] at the moment sys.argv[3].
TRAINING = """
import contextlib, ctypes, os, re, signal, sys, time

kind, culprit, when, folder = sys.argv[1:]
def moment(name):
    if name == when and os.environ["IPU_JAX_INSTANCE"] == culprit:
        print(f"fault={time.monotonic()}", flush=True)
        if kind == "kill" and os.environ["IPU_JAX_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "lock":
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
        if kind == "spin":
            re.match("(a+)+$", "a" * 64 + "b")  # holds it, too
        if kind == "raise":
            raise ValueError("a loss of 7")
        if kind.isdigit():
            sys.exit(int(kind))
        if kind == "last file":
            time.sleep(7)  # more than the 5 s that a step may take
moment("import")
import jax, numpy as np, optax
from ipu_jax import Checkpoints, Pipeline, Stage, make_mesh, make_train_step, popdist
from ipu_jax.observe import trace

popdist.init()
def body(w, x, batch):
    moment("compile")
    return jax.numpy.tanh(batch @ w)
head = Stage(lambda w, x, batch: jax.numpy.mean((x @ w) ** 2), params="head", ipu=1)
mesh = make_mesh(popdist.get_num_total_replicas(), popdist.get_num_ipus_per_replica())
step = make_train_step(Pipeline([Stage(body, params="body", ipu=0), head], mesh=mesh, gradient_accumulation=2),
                       optax.sgd(0.1))
draw = np.random.default_rng(0).standard_normal
state = step.init({"body": draw((4, 6)), "head": draw((6, 1))})
batch = draw((2, 3, 4) if mesh.shape["replica"] == 1 else (2, 2, 3, 4)).astype(np.float32)
recording = trace(folder, steps=2) if kind == "trace" else contextlib.nullcontext()
with recording, Checkpoints(folder, step) as checkpoints:
    for number in range(1, 31):
        if number == 6:
            moment("step")
        state, outputs = step(state, batch)
        if number == 8 and kind != "trace":
            checkpoints.save(state, now=True)
            moment("save")
        if number % 10 == 0:
            float(outputs.loss)
    moment("end of the block")
print("trained", float(outputs.loss), flush=True)
moment("end")
if kind == "trace" and popdist.get_instance_index() == 1:
    print(recording.report)
"""


REPLICA = ["--num-instances", "2", "--num-replicas", "1", "--ipus-per-replica", "2"]  # one, on two instances


def trained(tmp_path, kind, culprit, when="step", *options):
    path = tmp_path / "train.py"
    path.write_text(TRAINING)
    words = ("-v", *REPLICA, *options, sys.executable, str(path))
    own = (kind, str(culprit), when, str(tmp_path / "saved"))
    return poprun(*words, *own, POPRUN_TEST=str(tmp_path), timeout=120)


@pytest.mark.slow
def test_a_training_over_two_instances_ends_well_and_leaves_nothing_although_one_has_a_last_file_to_write(tmp_path):
    ran = trained(tmp_path, "last file", 0, "end")
    assert ran.status == 0, ran.err
    lines = sorted(line for line in ran.out.splitlines() if "trained" in line)
    assert [line.split()[0] for line in lines] == ["[1,0]<stdout>:trained", "[1,1]<stdout>:trained"]
    assert len({line.split()[1] for line in lines}) == 1
    assert "Gloo" not in ran.out
    assert "peer ranks" not in ran.out
    gone_within(str(tmp_path))


TOGETHER = """
import jax, jax.numpy as jnp, numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import PartitionSpec as P
from ipu_jax import Pipeline, Stage, configure, make_mesh, popdist

popdist.init()
configure(popdist.get_num_local_devices())
mesh = make_mesh(popdist.get_num_total_replicas(), popdist.get_num_ipus_per_replica(), **popdist.get_further_axes())
print([sorted({device.process_index for device in group}) for group in mesh.devices[0]], flush=True)
def mlp(w, x):
    hidden = with_sharding_constraint(jnp.tanh(x @ w["up"]), P(None, "tensor"))
    return with_sharding_constraint(hidden @ w["down"], P())
first = Stage(lambda w, x, batch: mlp(w, batch), params="a", ipu=0)
last = Stage(lambda w, x, batch: jnp.mean(mlp(w, x) ** 2), params="b", ipu=1)
spec = {"up": P(None, "tensor"), "down": P("tensor", None)}
pipeline = Pipeline([first, last], mesh=mesh, gradient_accumulation=3, specs={"a": spec, "b": spec})
draw = lambda *shape: np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)
weights, batch = {name: {"up": draw(4, 6), "down": draw(6, 4)} for name in "ab"}, draw(3, 5, 4)
plain = lambda w, x: jnp.tanh(x @ w["up"]) @ w["down"]
dense = jnp.mean(plain(weights["b"], plain(weights["a"], batch.reshape(15, 4))) ** 2)
loss, _ = pipeline.value_and_grad(pipeline.shard(weights), batch)
np.testing.assert_allclose(loss, dense, rtol=1e-5)
print("right", flush=True)
popdist.barrier()
if popdist.get_instance_index() == 1:
    raise ValueError("a loss of 7")
popdist.all_reduce(np.zeros(200_000, np.float32))  # in gloo
"""


@pytest.mark.slow
def test_a_pipeline_has_all_devices_of_its_ipus_and_an_instance_that_is_lost_is_named(tmp_path):
    path = tmp_path / "together.py"
    path.write_text(TOGETHER)
    ran = poprun(*REPLICA, "--axes", "tensor=2", sys.executable, str(path), timeout=120, POPRUN_TEST=str(tmp_path))
    assert ran.status == 1, ran.err
    assert (ran.out.count("[[0], [1]]"), ran.out.count("right")) == (2, 2)
    (report,) = [line for line in ran.err.splitlines() if line.startswith("poprun: instance") and " (host " in line]
    assert report.startswith("poprun: instance 1 "), "the other one fails, too, since its peer is gone"
    assert "ValueError: a loss of 7" in report
    gone_within(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "culprit", "status", "said"),
    [
        ("raise", 1, 1, "ValueError: a loss of 7"),
        ("raise", 0, 1, "ValueError: a loss of 7"),
        ("kill", 1, 137, "SIGKILL"),
        ("kill", 0, 137, "SIGKILL"),
        ("9", 1, 9, "9"),
    ],
)
def test_an_instance_that_is_lost_in_a_training_is_named_and_all_are_gone(tmp_path, kind, culprit, status, said):
    ran = trained(tmp_path, kind, culprit)
    assert ran.status == status, ran.err
    (report,) = [line for line in ran.err.splitlines() if line.startswith("poprun: instance") and " (host " in line]
    assert report.startswith(f"poprun: instance {culprit} "), "the other one fails, too, since its peer is gone"
    assert said in report
    gone_within(str(tmp_path))
    assert ran.ended - ran.stamp("fault") < 60, "jax alone takes minutes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("import", "with status 0 before its first step had finished, while instance 1 still waits in popdist.init"),
        ("compile", "before its first step had finished, while instance 1 still waits in the first update of a "),
        ("step", r"after step 5, while instance 1 still (trains, in step [6-8]|waits in )"),  # in the save of step 8
        ("save", "after step 8, while instance 1 still "),
        ("end of the block", "after step 30, while instance 1 still "),
    ],
)
def test_an_instance_that_ends_with_0_too_early_is_named(tmp_path, when, said):
    ran = trained(tmp_path, "0", 0, when)
    assert ran.status == 1, ran.err
    assert re.search(rf"poprun: instance 0 \(host localhost, pid \d+\) ended its program {said}", ran.err), ran.err
    assert "poprun: instance 1 (host" not in ran.err
    if when != "import":  # the other one may still import jax then, and needs nobody
        assert ran.seen("stopping [12] instances") - ran.stamp("fault") < 60
    gone_within(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "culprit", "letter"),
    [("stop", 1, "T (stopped)"), ("stop", 0, "T (stopped)"), ("lock", 1, "S (sleeping)"), ("spin", 0, "R (running)")],
)
def test_an_instance_that_is_stuck_is_named_after_5_s(tmp_path, kind, culprit, letter):
    ran = trained(tmp_path, kind, culprit)
    assert ran.status == 124, ran.err
    assert 4 < ran.seen(f"instance {culprit} is stuck") - ran.stamp("fault") < 60
    assert f"instance {culprit} (host localhost, pid " in ran.err
    assert f"the process is in state {letter}" in ran.err
    assert ("in moment" in ran.err) == (kind != "stop")  # its Python stack
    assert kind == "stop" or "the limit is 5 s (the larger of 5 s and 5 x the median step of 0." in ran.err
    assert "    fault=" in ran.err  # its last line
    gone_within(str(tmp_path))


@pytest.mark.slow
def test_after_ctrl_c_jax_aborts_no_instance_that_ends_after_the_first(tmp_path):
    (tmp_path / "program.py").write_text("""
import sys, time
from ipu_jax import popdist

popdist.init()
popdist.barrier()
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.5 * popdist.get_instance_index())
    print("stopped", popdist.get_instance_index(), flush=True)
    sys.exit(130)
""")
    process = start("-n", "2", "--tag-output", "off", sys.executable, str(tmp_path / "program.py"))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["stopped 0", "stopped 1"]
    assert err == "poprun: SIGINT was passed on to all instances: they may take 30 s, and a second one kills them\n"


@pytest.mark.slow
def test_a_training_that_is_killed_is_started_again(tmp_path):
    ran = trained(tmp_path, "kill", 0, "step", "--max-restarts", "2")
    assert ran.status == 0, ran.err
    assert ran.out.count("trained") == 2
    assert "restart 1 of 2" in ran.err


@pytest.mark.slow
def test_the_traces_of_all_instances_are_one_timeline_on_one_clock(tmp_path):
    ran = trained(tmp_path, "trace", 0, "", "--num-replicas", "2")
    assert ran.status == 0, ran.err
    assert "2 steps of" in ran.out
    assert "2 instances on one clock" in ran.out
    events = json.loads(gzip.decompress((tmp_path / "saved" / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(pid, name) for (pid, _), name in names.items()} == {
        (1 + replica, f"replica {replica}, IPU {ipu}, {track}")
        for replica in range(2)
        for ipu in range(2)
        for track in ("plan", "measured")
    }
    # an update holds the reduction of its IPU's gradients over replicas: on one clock none ends before another begins
    for step, ipu in itertools.product(range(2), range(2)):
        mine = [e for e in events if e["ph"] == "X" and e["cat"] == "update" and e["args"]["step"] == step]
        mine = [e for e in mine if names[e["pid"], e["tid"]].endswith(f"IPU {ipu}, measured")]
        assert len(mine) == 2
        assert max(e["ts"] for e in mine) < min(e["ts"] + e["dur"] for e in mine)

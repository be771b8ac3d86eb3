"""Test that the timelines of several instances become one, on the clock that they share."""

import gzip
import json
import sys

import pytest

from support.launched import poprun

PROGRAM = """
import sys
from ipu_jax import popdist
popdist.init()
import jax, numpy as np, optax
from ipu_jax import Pipeline, Stage, TraceError, make_mesh, make_train_step, trace

mesh = make_mesh(popdist.get_num_total_replicas(), popdist.get_num_ipus_per_replica())
body = Stage(lambda w, x, batch: jax.numpy.tanh(batch @ w), params="body", ipu=0)
head = Stage(lambda w, x, batch: jax.numpy.mean((x @ w) ** 2), params="head", ipu=1)
step = make_train_step(Pipeline([body, head], mesh=mesh, gradient_accumulation=2), optax.sgd(0.1))
draw = np.random.default_rng(0).standard_normal
state = step.init({"body": draw((4, 6)), "head": draw((6, 1))})
batch = draw((2, 2, 3, 4)).astype(np.float32)
with trace(sys.argv[1], steps=2) as recording:
    for _ in range(4):
        state, outputs = step(state, batch)
if popdist.get_instance_index() == 1:
    print(recording.report)
"""


@pytest.mark.slow
def test_all_instances_are_in_one_file(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ["--num-replicas", "2", "--num-instances", "2", "--ipus-per-replica", "2"]
    done = poprun(*words, sys.executable, str(tmp_path / "train.py"), str(tmp_path / "trace"), timeout=200)
    assert done.status == 0, done.err
    assert "2 steps of" in done.out
    assert "2 instances on one clock" in done.out
    events = json.loads(gzip.decompress((tmp_path / "trace" / "trace.json.gz").read_bytes()))["traceEvents"]
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {
        (1 + replica, f"replica {replica}, IPU {ipu}, {track}")
        for replica in range(2)
        for ipu in range(2)
        for track in ("plan", "measured")
    }
    # all replicas end their reduction of gradients together, so on one clock no update ends before another begins
    for step in range(2):
        mine = [e for e in events if e["ph"] == "X" and e["cat"] == "update" and e["args"]["step"] == step]
        assert len(mine) == 4
        assert max(e["ts"] for e in mine) < min(e["ts"] + e["dur"] for e in mine)

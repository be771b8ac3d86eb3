"""Test that a training run and ipu-monitor find each other where neither /proc nor Linux's own calls exist."""

import json
import subprocess
import sys

import pytest

from support.launched import ROOT, environment

HIDE = "from support import like_macos; like_macos.hide(); "
TRAIN = """
import sys, time
import jax.numpy as jnp, optax
from ipu_jax import Feed, Stage, Pipeline, configure, fit, make_train_step
configure(2)
body = Stage(lambda w, x, mb: mb @ w, params="body", ipu=0)
head = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="head", ipu=1)
step = make_train_step(Pipeline([body, head], gradient_accumulation=2), optax.sgd(0.01))
weights = {"body": jnp.eye(3), "head": jnp.ones((3, 1))}
feed = Feed(jnp.ones((64, 3)), micro_batch=2, step=step)
def evaluate(state):
    print("evaluating", flush=True)
    sys.stdin.readline()
    return {}
fit(step, step.init(weights), feed, updates=20, evaluate=evaluate, progress=False, say=len)
print("psutil" in sys.modules, sys.platform, flush=True)
"""
MONITOR = "from ipu_jax.run.observe.monitor import command; command.main(sys.argv[1:])"
settings_of = lambda records: {**environment(IPU_JAX_MONITOR=str(records)), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def look(settings, start, *flags):
    words = [sys.executable, "-c", f"import sys; {start}{MONITOR}", "--once", *flags]
    done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [True, False])
def test_a_training_is_shown(tmp_path, hidden):
    records = tmp_path / "records"
    settings, start = settings_of(records) | {"JAX_PLATFORMS": "cpu"}, HIDE if hidden else ""
    words = [sys.executable, "-c", start + TRAIN]
    with subprocess.Popen(words, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        assert training.stdout.readline() == "evaluating\n"
        (found,) = json.loads(look(settings, start, "--json"))["processes"]
        assert (found["pid"], found["state"], found["doing"]) == (training.pid, "running", "busy: evaluating")
        assert (found["planned_updates"], len(found["ipus"])) == (20, 2)
        assert found["step"] in (15, 16)  # the last may not have been noticed
        assert 0 <= found["busy_share"] <= 1
        assert found["rss_bytes"] > 10**7
        assert f"\n{training.pid}  " in look(settings, start)
        out, _ = training.communicate("\n\n\n", timeout=60)
        assert out.splitlines()[-1] == ("True darwin" if hidden else "False linux")
        assert training.returncode == 0
    assert list(records.iterdir()) == []


def test_a_process_is_shown_and_after_a_kill_it_is_gone_and_its_record_removed(tmp_path):
    records = tmp_path / "records"
    settings = settings_of(records)
    begin = HIDE + "from ipu_jax.distributed.processes import record; record.begin(); "
    waits = [sys.executable, "-c", f"{begin}print('ready', flush=True); import time; time.sleep(600)"]
    with subprocess.Popen(waits, env=settings, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "ready\n"
        (found,) = json.loads(look(settings, HIDE, "--json"))["processes"]
        assert (found["pid"], found["state"], found["doing"]) == (killed.pid, "running", "no step yet")
        killed.kill()
    assert len(list(records.iterdir())) == 1
    counts = f"{begin}import os; print(len(os.listdir({str(records)!r})))"
    done = subprocess.run([sys.executable, "-c", counts], env=settings, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert list(records.iterdir()) == []

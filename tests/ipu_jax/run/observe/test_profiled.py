"""Test that the environment profiles a program that does not ask for it: a loop over a step, a pipeline, and `fit`."""

import json
import os
import re
import subprocess
import sys
from typing import Any, cast

import jax
import numpy as np
import pytest

from ipu_jax import Feed
from ipu_jax.base import facts
from ipu_jax.run.observe import profiled
from support.fitted import B, D, M, make_step, normal, weights
from support.refusals import refused

BEGIN = """
from ipu_jax import Feed, configure, fit
configure(2)
from support.fitted import B, D, M, make_step, normal, weights
step, rows = make_step(), normal(0, 8 * M * B, D)
"""
FIT = """
with Feed(rows, step=step, micro_batch=B) as feed:
    state = fit(step, step.init(weights()), feed, say=len).state
    fit(step, state, feed, say=len, title="Again")
"""
LOOP = """
state = step.init(weights())
with Feed(rows, step=step, micro_batch=B) as feed:
    for batch in feed.epoch():
        state, outputs = step(state, batch)
"""
PIPELINE = """
shards = step.model.shard(weights())
for seed in range(8):
    step.model.value_and_grad(shards, normal(seed, M, B, D))
"""


def run(program, **environment):
    command = [sys.executable, "-c", BEGIN + program]
    given = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("program", [FIT, LOOP, PIPELINE], ids=["fit", "loop", "pipeline"])
def test_the_environment_asks_for_a_trace_and_a_page(program, tmp_path):
    page = tmp_path / "run.html"
    done = run(program, IPU_JAX_TRACE=str(tmp_path / "trace"), IPU_JAX_REPORT=str(page))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trace/trace.json.gz").is_file()
    assert ("Trace: " in done.stderr) == (program is not FIT)  # which says it as all its lines
    text = page.read_text()
    assert not [one for one in ('"loss":[[1,', '"timeline":{"rows"', '"samples per second":[[') if one not in text]
    if program is FIT:
        assert "Again" in (tmp_path / "run-2.html").read_text()


@pytest.mark.slow
def test_too_few_steps_give_a_line_and_no_trace(tmp_path):
    done = run("step(step.init(weights()), rows[: M * B].reshape(M, B, D))", IPU_JAX_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "IPU_JAX_TRACE: there is no trace: no step was recorded" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_wrong_environment_is_refused_in_a_line():
    done = run(LOOP, IPU_JAX_TRACE=__file__)
    assert done.returncode == 1
    assert f"IPU_JAX_TRACE: trace {__file__} is not a folder" in done.stderr.splitlines()[-1]


def test_a_page_of_a_wrong_name_is_refused(monkeypatch):
    monkeypatch.setenv(profiled.REPORT, "run.txt")
    with refused("IPU_JAX_REPORT run.txt has the wrong suffix", "give a name that ends in .html"):
        profiled.Profiled()


def test_a_loop_leaves_a_trace_and_a_page(tmp_path, monkeypatch, capsys):
    step, rows, page = make_step(), normal(0, 8 * M * B, D), tmp_path / "run.html"
    monkeypatch.setattr(profiled, "_recorded", [])
    monkeypatch.setenv(profiled.TRACE, str(tmp_path / "trace"))
    monkeypatch.setenv(profiled.REPORT, str(page))
    facts.listen(listener := profiled.Profiled())
    with Feed(rows, step=step, micro_batch=B) as feed:
        state = step.init(weights())
        for batch in feed.epoch():
            state, _ = step(state, batch)
    listener._end()  # as at the end of the process
    listener.leave()
    assert (tmp_path / "trace/trace.json.gz").is_file()
    assert f"Trace: {tmp_path}/trace/trace.json.gz, for" in capsys.readouterr().err
    text = page.read_text()
    assert not [one for one in ('"timeline":{"rows"', '"samples per second":[[') if one not in text]
    (losses,) = re.findall(r'"loss":(\[\[.*?\]\])', text)
    assert [update for update, _ in json.loads(losses)] == [*range(1, 9)]


class Late:
    """A loss that is there once it is read."""

    is_fully_addressable, size = True, 1

    def is_deleted(self):
        return False

    def is_ready(self):
        return False

    def __array__(self, *_args, **_options):
        return np.array(0.5)


def test_the_page_has_the_loss_of_an_update_that_the_process_did_not_wait_for(tmp_path, monkeypatch):
    monkeypatch.delenv(profiled.TRACE, raising=False)
    monkeypatch.setenv(profiled.REPORT, str(tmp_path / "run.html"))
    listener = profiled.Profiled()
    listener.dispatched(None, [cast(Any, Late())], 1, 4)
    listener._end()
    listener.leave()
    assert '"loss":[[1,0.5]]' in (tmp_path / "run.html").read_text()


def test_what_fit_is_given_counts_more_than_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(profiled, "_recorded", [])
    monkeypatch.setattr(profiled, "_pages", [])
    monkeypatch.setenv(profiled.TRACE, str(tmp_path / "trace"))
    monkeypatch.setenv(profiled.REPORT, str(tmp_path / "run.html"))
    assert profiled.asked("mine", "mine.html") == ("mine", "mine.html")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.warns(UserWarning, match=r"IPU_JAX_TRACE=.*: only CPU devices are traced; use jax\.profiler\.trace"):
        assert profiled.asked(None, None) == (None, tmp_path / "run.html")
    assert profiled.asked(None, None) == (None, tmp_path / "run-2.html")  # without another warning
    monkeypatch.setattr(profiled, "_recorded", [])
    monkeypatch.undo()
    monkeypatch.setattr(profiled, "_recorded", [])
    monkeypatch.setenv(profiled.TRACE, __file__)
    with refused("IPU_JAX_TRACE", "is not a folder", "give one"):
        profiled.asked(None, None)

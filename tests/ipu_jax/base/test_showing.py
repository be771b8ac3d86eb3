"""Test what consoles and notebooks show of results: aligned text, short, and tables of the same cells in HTML."""

import html
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import ALL_IPUS, Feed, Pipeline, Stage, make_mesh, make_schedule, make_train_step, verify
from ipu_jax.base.showing import Shown, Table
from ipu_jax.costs import balance_layers
from ipu_jax.observe import RunLog, trace
from ipu_jax.schedules import StageCosts, find_schedule

EVIL = "<script>alert('x')</script>"


class Result(Shown):
    def _shown(self):
        yield f"a line & {EVIL}"
        yield Table([("name", "size"), (EVIL, "12"), ("b", "3,456")])


def test_text_and_html_have_the_same_cells_and_no_text_becomes_code():
    lines = str(Result()).splitlines()
    assert repr(Result()) == str(Result())
    width = len(EVIL)
    assert lines[1:] == [f"{'name':<{width}}   size", f"{EVIL}     12", f"{'b':<{width}}  3,456"]
    page = Result()._repr_html_()
    assert "<script" not in page
    cells = [html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", page)]
    assert cells == ["name", "size", EVIL, "12", "b", "3,456"]
    assert page.count("<th ") == 2


def results(folder):
    """Return a result of each kind that a notebook shows, by name."""
    body = Stage(lambda w, x, mb: jnp.tanh(mb["x"] @ w), params="body", ipu=0)
    head = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="head", ipu=1)
    pipeline = Pipeline([body, head], mesh=make_mesh(1, 2), schedule="1f1b", gradient_accumulation=4)
    weights = {"body": np.eye(8, dtype=np.float32), "head": np.ones((8, 8), np.float32)}
    params = pipeline.shard(weights)
    batch = {"x": np.ones((4, 2, 8), np.float32)}
    step = make_train_step(pipeline, optax.sgd(0.1))
    feed = Feed({"x": np.ones((64, 8), np.float32)}, step=step, micro_batch=2)
    schedule = make_schedule("1f1b", ipus=2, gradient_accumulation=4)
    costs = StageCosts((1.0, 1.0), (2.0, 2.0), (1.0, 1.0))
    log = RunLog()
    log.event("start")
    with feed:
        found = {
            "a pipeline": (pipeline, "Pipeline of 2 stages on 2 IPUs"),
            "weights": (params, "Sharded: 2 groups on 2 IPUs, 128 numbers"),
            "shapes": (pipeline.shard_shapes(weights), "Sharded: 2 groups"),
            "a verification": (verify(pipeline, params, batch), "relative error"),
            "a report": (pipeline.report(params, batch), "1f1b: 4 micro-batches on 2 IPUs"),
            "a batch": (next(feed), "FeedBatch of epoch 0: 8 examples, 1 update\n"),
            "a feed": (feed, "Feed(8 examples per update, 8 updates per epoch; at example 8 of epoch 0, closed)"),
            "a simulation": (schedule.simulate(), "makespan"),
            "layers": (balance_layers(["a", "b"], [1.0, 2.0], 2), "imbalance"),
            "a choice": (find_schedule(costs, placement=(0, 1), gradient_accumulation=4), "lower bound"),
            "a state": (step.init(weights), "TrainState("),
            "costs": (pipeline.stage_costs(params, batch), "StageCosts of a micro-batch, in FLOPs\nstage  forward"),
            "a log": (log, "RunLog(1 event)"),
            "a recording to be made": (trace(folder), "Recording(3 steps, to "),
        }
    return found


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    return results(tmp_path_factory.mktemp("trace"))


def test_the_last_line_of_a_cell_is_short_and_says_something(shown):
    for name, (value, words) in shown.items():
        assert words in repr(value), name
        assert len(repr(value)) < 1500, name
        assert "object at 0x" not in repr(value), name
        if isinstance(value, Shown):
            page = value._repr_html_()
            assert all(html.escape(cell) in page for cell in words.split()), name


def test_a_pipeline_shows_its_schedule_and_many_groups_are_cut(shown):
    pipeline, _ = shown["a pipeline"]
    assert "<svg" in pipeline._repr_html_()
    groups = {f"layer {k}": np.zeros(3, np.float32) for k in range(40)}
    stages = [Stage(lambda w, x, mb: mb + w, params="layer 0", ipu=0)]
    stages += [Stage(lambda w, x, mb: x + w, params=name, ipu=0) for name in list(groups)[1:]]
    stages.append(Stage(lambda w, x, mb: x.sum() * 0.0, params="head", ipu=ALL_IPUS))
    many = Pipeline(stages, mesh=make_mesh(1, 1), specs={"head": jax.sharding.PartitionSpec()})
    lines = repr(many.shard(groups | {"head": np.ones(1, np.float32)})).splitlines()
    assert lines[0] == "Sharded: 41 groups on 1 IPUs, 121 numbers"
    assert lines[-1] == "and 29 more groups"
    assert len(lines) == 1 + 1 + 12 + 1


def test_weights_inside_a_jitted_function_can_be_printed(shown):
    texts = []
    jax.jit(lambda params: texts.append(repr(params)) or 0)(shown["weights"][0])
    assert texts == [repr(shown["weights"][0])]

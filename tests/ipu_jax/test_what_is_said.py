"""Test which work says what it does on a terminal: what is traced and compiled, and nothing in a step that is not."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Pipeline, TrainOptions, make_train_step, verify
from ipu_jax.base import status
from ipu_jax.schedules import StageCosts, find_schedule
from ipu_jax.steps import Replicas

WEIGHTS, BATCH = {"a": np.eye(3, dtype=np.float32), "b": np.ones((3, 2), np.float32)}, np.ones((4, 5, 3), np.float32)
PIPELINE = "tracing the pipeline", "compiling the pipeline"
UNSHARDED = "tracing the unsharded program", "compiling the unsharded program"


def loss(params, micro_batch):
    return jnp.mean((jnp.tanh(micro_batch @ params["a"]) @ params["b"]) ** 2)


@pytest.fixture
def said(monkeypatch):
    """Return a function that returns what has been said since it was called before."""
    texts: list[str] = []

    def begin(blocks):
        texts.append(", ".join(filter(None, itertools.chain(*((block.text, block.now) for block in blocks)))))

    monkeypatch.setattr(status, "_is_shown", lambda: True)
    monkeypatch.setattr(status._line, "begin", begin)
    return lambda: [texts.pop(0) for _ in range(len(texts))]


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline.from_function(loss, WEIGHTS, BATCH[0], ipus=2, gradient_accumulation=4)


def test_a_pipeline_says_what_it_does_in_the_first_step_alone(said):
    pipeline = Pipeline.from_function(loss, WEIGHTS, BATCH[0], ipus=2, gradient_accumulation=4, schedule="auto")
    assert said() == ["tracing the function", "cutting the function"]
    params = pipeline.shard(WEIGHTS)
    assert said() == ["placing weights"]
    pipeline.value_and_grad(params, BATCH)
    assert said() == ["tracing the stages", "tracing the stages, choosing a schedule", *PIPELINE]
    pipeline.value_and_grad(params, BATCH)
    assert said() == []
    pipeline.report(params, BATCH)
    assert said() == [*PIPELINE, "compiling the pipeline, tracing the stages"]

    verify(pipeline, params, BATCH)
    first, second = (f"verifying, program {k} of 2" for k in (1, 2))
    assert said() == [
        *("verifying", "verifying, gathering weights", first, f"{first}, gathering weights", second),
        *(f"{second}, {what}" for what in UNSHARDED),
        "verifying, comparing",
    ]


@pytest.mark.parametrize("kind", ["pipeline", "function"])
def test_a_training_step_says_it_too(kind, said, pipeline):
    step = make_train_step(pipeline if kind == "pipeline" else loss, optax.sgd(0.1), TrainOptions())
    state = step.init(WEIGHTS)
    assert said()[0] == "placing the state"
    for expected in (["tracing the training step", "compiling the training step"], []):
        state, _ = step(state, BATCH if kind == "pipeline" else BATCH[:1])
        assert said() == expected


def test_a_search_for_a_schedule_says_it(said):
    find_schedule(StageCosts([1, 2], [1, 2], [1, 2]), placement=(0, 1), gradient_accumulation=3)
    assert said() == ["choosing a schedule"]


def test_a_function_on_replicas_says_it(said):
    replicas = Replicas(loss)
    replicas.value_and_grad(WEIGHTS, BATCH[:1])
    assert said()[-2:] == ["tracing the function", "compiling the function"]

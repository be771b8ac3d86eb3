"""Test that a user's exception is not buried below our frames, and that an error of ours keeps them."""

import functools
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_jax
from ipu_jax import Pipeline, Stage, make_train_step, verify

OURS = f"{Path(ipu_jax.__file__).parent}/"
X = np.ones((1, 2, 3), np.float32)


class OwnError(Exception):
    """An exception that only the user's program raises."""


def deeper(x):
    raise OwnError(x.shape)


def broken(w, x, mb):
    return deeper(x)


def pipeline_of(last=broken) -> Pipeline:
    stages = [Stage(lambda w, x, mb: mb @ w, params="w"), Stage(last, name="last", ipu=1, predict=last)]
    return Pipeline(stages)


METHODS = ("value_and_grad", "loss", "predict", "report", "stage_costs")
CALLS = {method: lambda pipeline, *args, method=method: getattr(pipeline, method)(*args) for method in METHODS}
CALLS |= {"verify": verify, "inside jit": lambda pipeline, *args: jax.jit(pipeline.value_and_grad)(*args)}


def step_of(pipeline, params, batch, method="__call__"):
    step = make_train_step(pipeline, optax.sgd(0.1))
    getattr(step, method)(step.init(pipeline.unshard(params)), batch)


CALLS |= {"step": step_of, "step.loss": functools.partial(step_of, method="loss")}


def raised(error, pipeline, call):
    """Return the error that a call with weights and a batch raises, and its frames."""
    params = pipeline.shard({"w": np.ones((3, 3), np.float32)})
    with pytest.raises(error) as caught:
        call(pipeline, params, X)
    return caught.value, traceback.extract_tb(caught.value.__traceback__)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_frame_of_ours_stands_above_the_users(call):
    error, frames = raised(OwnError, pipeline_of(), call)
    assert sum(frame.filename.startswith(OURS) for frame in frames) == 1
    assert [frame.name for frame in frames[-2:]] == ["broken", "deeper"]
    assert "raised in stage 1, 'last'" in error.__notes__


def test_the_whole_of_it_is_there_for_who_asks_for_it():
    jax.config.update("jax_traceback_filtering", "off")
    try:
        _, frames = raised(OwnError, pipeline_of(), CALLS["value_and_grad"])
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert sum(frame.filename.startswith(OURS) for frame in frames) > 5


def test_an_error_of_ours_keeps_its_frames():
    error, frames = raised(ValueError, pipeline_of(lambda w, x, mb: jnp.ones(2)), CALLS["value_and_grad"])
    assert "the last stage, 'last', returns float32[2]" in str(error)
    assert frames[-1].name == "loss_and_aux"

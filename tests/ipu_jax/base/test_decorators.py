"""Test what stands around a public call: short tracebacks, the argument that was meant, and the mesh of `set_mesh`."""

import functools
import inspect
import itertools
import pickle
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import ipu_jax
from ipu_jax import Pipeline, Stage, TrainOptions, make_train_step, verify
from ipu_jax.base.decorators import public
from ipu_jax.pipelines import reference_value_and_grad
from support.refusals import refusals, refused

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


if_of_python = lambda w, x, mb: jnp.mean(x) if x.sum() > 0 else jnp.mean(-x)
MISTAKES = {
    "no scalar": (lambda w, x, mb: jnp.ones(2), "the last stage, 'last', returns float32[2]"),
    "a key that is not there": (lambda w, x, mb: {}["z"], "'z'"),
    "an if": (if_of_python, "boolean conversion of traced array"),
    "shapes": (lambda w, x, mb: x @ jnp.ones((7, 7)), "contracting dimensions"),
    "a collective": (lambda w, x, mb: jax.lax.psum(jnp.mean(x), "ipu"), "stage 'last' on IPU 1 uses psum"),
    "an axis": (lambda w, x, mb: jax.lax.psum(jnp.mean(x), "model"), "unbound axis name: model"),
}


@pytest.mark.fast(*map("{}-{}".format, itertools.cycle(MISTAKES), CALLS))  # each call once, and each mistake
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(("last", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_stage_takes_twenty_lines_and_names_the_stage(call, last, says):
    if call is CALLS["predict"] and last is MISTAKES["no scalar"][0]:
        return  # a prediction may have any shape
    error, frames = raised(Exception, pipeline_of(last), call)
    text = "".join(traceback.format_exception(error))
    assert says in text
    assert "'last'" in text
    assert len(text.splitlines()) <= 21  # one is the call in this file that `raised` makes
    assert sum(frame.filename.startswith(OURS) for frame in frames) == 1


def test_a_fault_of_ours_keeps_all_frames():
    def broken_door():
        namespace = {"__name__": "ipu_jax.core"}
        exec("def outer(): return inner()\ndef inner(): return {}['slot']", namespace)
        outer: Any = namespace["outer"]
        return public(outer)()

    with pytest.raises(KeyError) as caught:
        broken_door()
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-2:] == ["outer", "inner"]


def test_a_type_error_of_the_users_function_is_left_alone():
    def user(w, x, mb):
        return user(w, x, mb, **{"gradient_accum": 1})

    error, _ = raised(TypeError, pipeline_of(user), CALLS["value_and_grad"])
    assert str(error).endswith("user() got an unexpected keyword argument 'gradient_accum'")


def test_decorated_names_keep_their_signatures():
    assert [*inspect.signature(Pipeline).parameters][:3] == ["stages", "mesh", "schedule"]
    assert [*inspect.signature(Pipeline.value_and_grad).parameters] == ["self", "params", "batch", "state", "key"]
    assert [*inspect.signature(Stage).parameters][:2] == ["fn", "params"]
    assert inspect.signature(TrainOptions).parameters["device_iterations"].default == 1
    assert pickle.loads(pickle.dumps(TrainOptions(device_iterations=2))) == TrainOptions(device_iterations=2)
    assert (verify.__doc__ or "").startswith("Run the pipeline")


good = lambda w, x, mb: jnp.mean((x - mb) ** 2)
USES = {
    **CALLS,
    "reference": lambda pipeline, params, x: reference_value_and_grad(pipeline, pipeline.unshard(params), x),
}
USES["loss function"] = lambda pipeline, params, x: step_of_function(x)
del USES["inside jit"]


def step_of_function(x):
    step = make_train_step(lambda w, rows: jnp.mean(rows @ w), optax.sgd(0.1))
    step(step.init(np.ones(3, np.float32)), x)


@pytest.mark.fast("AxisType.Auto-step")
@pytest.mark.parametrize("call", USES.values(), ids=USES)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_of_set_mesh_is_left_outside(call, kind):
    pipeline = pipeline_of(good)
    params = pipeline.shard({"w": np.ones((3, 3), np.float32)})
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))):
        call(pipeline, params, X)
        assert jax.sharding.get_abstract_mesh().axis_names == ("data", "model")
    call(pipeline, params, X)


@functools.cache
def placed():
    pipeline = pipeline_of(good)
    return pipeline, pipeline.shard({"w": np.ones((3, 3), np.float32)})


def inside(wrap, call="value_and_grad"):
    return wrap(lambda x: (CALLS[call](*placed(), X), x)[1])(np.ones((2, 1)))


def mapped(program):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data")
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=split, out_specs=split))


def on_another_mesh(program):
    def run(x):
        with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"))):
            return jax.jit(program)(x)

    return run


@refusals(
    (lambda: inside(jax.pmap), "inside jax.shard_map or jax.pmap", "call it outside"),
    (lambda: inside(mapped), "over the axes 'data'", "inside jax.shard_map", "call it outside"),
    (lambda: inside(mapped, "report"), "over the axes 'data'", "inside jax.shard_map", "call it outside"),
    (lambda: inside(on_another_mesh), "axes 'data', 'model'", "jax.set_mesh of another mesh", "leave jax.set_mesh"),
)
def test_a_map_inside_a_map_is_refused(call, holds):
    placed()  # compiles
    with refused(*holds):
        call()

"""Test that batches and weights that are not arrays are refused by path, rule and mend, wherever they are given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, Pipeline, Stage, TrainOptions, make_train_step, verify
from ipu_jax.pipelines import reference_value_and_grad
from support.refusals import refusals, refused


class Tensor:
    """Looks like a tensor of torch."""

    def __init__(self, array: Any):
        self._array = np.asarray(array)

    dtype = type("dtype", (), {"__repr__": lambda self: "torch.float32"})()
    shape = property(lambda self: self._array.shape)

    def numpy(self) -> Any:
        return self._array


Tensor.__module__ = "torch"

WEIGHTS = {"body": np.ones((3, 3), np.float32), "head": np.ones((3, 1), np.float32)}
BATCH = {"x": np.ones((2, 4, 3), np.float32)}
PIPELINE = Pipeline(
    [
        Stage(lambda w, x, mb: mb["x"] @ w, params="body"),
        Stage(lambda w, x, mb: jnp.mean(x @ w), params="head", ipu=1, predict=lambda w, x, mb: x @ w),
    ],
    gradient_accumulation=2,
)
SHARDED = PIPELINE.shard(WEIGHTS)
STEP = make_train_step(PIPELINE, optax.sgd(0.1))
STATE = STEP.init(WEIGHTS)
OF_FUNCTION = make_train_step(lambda w, rows: jnp.mean(rows @ w["w"]), optax.sgd(0.1))
IN_HALF = make_train_step(PIPELINE, optax.sgd(0.1), TrainOptions(precision="16.32"))
TWICE = make_train_step(PIPELINE, optax.sgd(0.1), TrainOptions(device_iterations=2))

TAKE_BATCH = {
    "value_and_grad": lambda batch: PIPELINE.value_and_grad(SHARDED, batch),
    "loss": lambda batch: PIPELINE.loss(SHARDED, batch),
    "predict": lambda batch: PIPELINE.predict(SHARDED, batch),
    "report": lambda batch: PIPELINE.report(SHARDED, batch),
    "lower": lambda batch: PIPELINE.lower(SHARDED, batch),
    "verify": lambda batch: verify(PIPELINE, SHARDED, batch),
    "reference": lambda batch: reference_value_and_grad(PIPELINE, WEIGHTS, batch),
    "step": lambda batch: STEP(STATE, batch),
    "several updates": lambda batch: TWICE(TWICE_STATE, batch),
    "step.loss": lambda batch: STEP.loss(STATE, batch),
    "find_nonfinite": lambda batch: STEP.find_nonfinite(STATE, batch),
    "of a function": lambda batch: OF_FUNCTION(OF_FUNCTION_STATE, batch),
}
TWICE_STATE = TWICE.init(WEIGHTS)
OF_FUNCTION_STATE = OF_FUNCTION.init({"w": np.ones((3, 1), np.float32)})
NO_BATCHES = {
    "torch": (Tensor(BATCH["x"]), "is a torch.Tensor", "give tensor.numpy()"),
    "text": ("rows.npy", "is 'rows.npy'", "an array of numbers"),
    "texts": (np.full((2, 4, 3), "a"), "has dtype <U1", "IPUs hold numbers and bools"),
    "objects": (np.full((2, 4, 3), None), "has dtype object", "IPUs hold numbers and bools"),
    "byte order": (np.ones((2, 4, 3), np.dtype(np.float32).newbyteorder()), "has dtype >f4", "native byte order"),
    "dates": (np.full((2, 4, 3), np.datetime64("2020")), "has dtype datetime64[Y]", "IPUs hold numbers and bools"),
    "lists": (BATCH["x"].tolist(), "[0][0][0] is 1.0", "give np.asarray(batch['x'])"),
    "a number": (1.5, "is 1.5", "an array of numbers"),
    "an object": (object(), "is a builtins.object", "a NumPy or jax array"),
}


@pytest.mark.parametrize("call", TAKE_BATCH.values(), ids=TAKE_BATCH)
@pytest.mark.parametrize(("x", "value", "mend"), NO_BATCHES.values(), ids=NO_BATCHES)
def test_a_batch_that_is_no_array_is_refused(call, x, value, mend):
    with refused(f"batch['x']{'' if value.startswith('[') else ' '}{value}", mend):
        call({"x": x})


def test_a_feed_reads_tensors_of_torch_by_their_rows():
    class Rows(Tensor):
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return self._array

        def __len__(self) -> int:
            return len(self._array)

    with Feed({"x": Rows(np.arange(24.0).reshape(8, 3))}, step=STEP, micro_batch=4) as feed:
        assert next(feed).data["x"].shape == (2, 4, 3)


untyped: Any = Stage
TORCH = {name: Tensor(leaf) for name, leaf in WEIGHTS.items()}
A_TENSOR = "params['body'] is a torch.Tensor", "give tensor.numpy()"
FUNCTION = lambda w, rows: jnp.mean(jnp.tanh(rows @ w["body"]) @ w["head"])


@refusals(
    (lambda: PIPELINE.shard(TORCH), *A_TENSOR),
    (lambda: PIPELINE.shard_shapes(TORCH), *A_TENSOR),
    (lambda: STEP.init(TORCH), *A_TENSOR),
    (lambda: IN_HALF.init(TORCH), *A_TENSOR),
    (lambda: reference_value_and_grad(PIPELINE, TORCH, BATCH), *A_TENSOR),
    (lambda: OF_FUNCTION.init({"w": Tensor(np.ones((3, 1)))}), "params['w'] is a torch.Tensor", "give tensor.numpy()"),
    (lambda: PIPELINE.shard({**WEIGHTS, "body": "w.npy"}), "params['body'] is 'w.npy'", "an array of numbers"),
    (
        lambda: PIPELINE.shard(jax.tree.map(lambda leaf: leaf.tolist(), WEIGHTS)),
        "params['body'][0][0] is 1.0",
        "give np.asarray(params['body'])",
    ),
    (lambda: PIPELINE.shard(None), "params is a NoneType", "a dict of whole arrays", "['body', 'head']"),
    (lambda: PIPELINE.shard(WEIGHTS["body"]), "params is a ndarray", "a dict of whole arrays", "['body', 'head']"),
    (lambda: PIPELINE.shard(SHARDED), "params is placed already", "unshard(params)"),
    (
        lambda: Pipeline.from_function(FUNCTION, TORCH, BATCH["x"][0], ipus=2, schedule="1f1b"),
        "is a torch.Tensor",
        "give tensor.numpy()",
    ),
    (lambda: untyped(FUNCTION, params=WEIGHTS["body"]), "params is a ndarray", "the name of a group", "pipeline.shard"),
    (lambda: untyped(FUNCTION, params=Tensor(1.0)), "params is a Tensor", "the name of a group", "pipeline.shard"),
    (lambda: untyped(FUNCTION, params=WEIGHTS), "params is a dict", "the name of a group", "pipeline.shard"),
    (lambda: untyped(FUNCTION, state={"seen": 0}), "state is a dict", "the name of a group", "pipeline.shard_state"),
    (lambda: untyped(FUNCTION, reference=3), "reference=3", "callable", "called like fn"),
)
def test_weights_that_are_no_arrays_are_refused(call, holds):
    with refused(*holds):
        call()


def test_a_stage_that_returns_none_is_blamed_itself():
    forgets = Stage(lambda w, x, mb: None, params="body", name="forgets")
    pipeline = Pipeline([forgets, PIPELINE.stages[1]], gradient_accumulation=2)
    with refused("stage 'forgets' returns None", "return y"):
        pipeline.value_and_grad(SHARDED, BATCH)

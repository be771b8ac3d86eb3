"""Test that the examples train, evaluate, predict and resume, and that they are as short as their README says."""

import ast
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples import any_function, equinox_attention, linen_convnet, nnx_transformer, plain_layers, tied_gpt, training
from support.dense import largest_relative_error

GLUE = 11
LINES = {
    "annotated_flax": 68,
    "llama": 150,
    "lora": 100,
    "dpo": 100,
    "distill": 100,
    "mixtral": 120,
    "ring": 120,
    "unet": 100,
    "gan": 100,
}
SOURCES = {
    linen_convnet: linen_convnet.images,
    nnx_transformer: nnx_transformer.sequences,
    equinox_attention: equinox_attention.clouds,
    plain_layers: plain_layers.sorted_rows,
    tied_gpt: nnx_transformer.sequences,
    any_function: any_function.sequences,
}


cross_entropy = lambda outputs, labels: optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()
squared_error = lambda outputs, targets: jnp.mean((outputs - targets) ** 2)


# per example, its model on one device: (what step.whole returns, inputs) to outputs


def linen_model(whole, examples) -> Any:
    variables = {"params": whole["params"], "batch_stats": whole["stages"]}
    return linen_convnet.ConvNet().apply(variables, examples["images"], train=False)


def nnx_model(whole, examples):
    module = nnx.eval_shape(nnx_transformer.make_model)
    module.eval()
    nnx.update(module, whole["params"])
    return module(examples["tokens"])


def equinox_model(whole, examples):
    module = eqx.combine(whole["params"], eqx.filter_eval_shape(equinox_attention.make_model))
    return jax.vmap(eqx.nn.inference_mode(module))(examples["points"])


def plain_model(whole, examples):
    x = examples["x"]
    for number in range(plain_layers.LAYERS):
        x = plain_layers.residual(whole["params"][number], x)
    return x


def gpt_model(whole, examples):
    params = whole["params"]
    x = params["table"][examples["tokens"]] + params["positions"]
    for weights in params["blocks"]:
        x = tied_gpt.block(weights, x)
    return tied_gpt.norm(x) @ params["table"].T


def function_model(whole, examples):
    return any_function.GPT().apply({"params": whole["params"]}, examples["tokens"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "outputs", "model", "loss_of", "labels"),
    [
        (linen_convnet, linen_convnet.logits, linen_model, cross_entropy, "labels"),
        (nnx_transformer, nnx_transformer.logits, nnx_model, cross_entropy, "targets"),
        (equinox_attention, equinox_attention.radius, equinox_model, squared_error, "radius"),
        (plain_layers, plain_layers.outputs, plain_model, squared_error, "y"),
        (tied_gpt, tied_gpt.logits, gpt_model, cross_entropy, "targets"),
        (any_function, any_function.logits, function_model, cross_entropy, "targets"),
    ],
    ids=lambda value: value.__name__.split(".")[-1] if isinstance(value, ModuleType) else "",
)
def test_an_example_trains_evaluates_predicts_and_resumes(
    example, outputs, model, loss_of, labels, tmp_path, monkeypatch
):
    monkeypatch.setattr(plain_layers, "LAYERS", 2)
    step, start = example.make_step()
    test_loss = getattr(example, "test_loss", example.loss)  # one function where training is not random
    source, others = SOURCES[example](0), SOURCES[example](1)
    untrained, at_start = step.whole(start), training.evaluation(step, test_loss, others)(start)["loss"]

    def train(folder, updates):
        fresh = step.restore(untrained)
        return training.train(step, fresh, test_loss, source, others, folder=tmp_path / folder, updates=updates)

    in_one_go = train("one go", 10)
    train("in parts", 3)
    result = train("in parts", 10)
    resumed = result.state
    assert int(resumed.step) == 10
    assert len(result.losses) == 7
    np.testing.assert_array_equal(result.losses, in_one_go.losses[3:])
    whole = step.whole(resumed)
    jax.tree.map(np.testing.assert_array_equal, *map(without_keys, (whole, step.whole(in_one_go.state))))

    expected = jax.jit(model)(whole, others)
    [*_, (updates, figures)] = result.evaluations
    assert updates == 10
    np.testing.assert_allclose(figures["loss"], loss_of(expected, others[labels]), rtol=1e-5)
    assert figures["loss"] < 0.8 * at_start
    inputs = {name: rows.reshape(-1, training.B, *rows.shape[1:]) for name, rows in others.items() if name != labels}
    found = training.predict(step, resumed, outputs, inputs)
    found = np.asarray(found).reshape(-1, *found.shape[2:])
    assert largest_relative_error(found, expected) <= 1e-5


def without_keys(whole):
    return {**whole, "key": None if whole["key"] is None else jax.random.key_data(whole["key"])}


@pytest.mark.parametrize("example", SOURCES, ids=lambda example: example.__name__.split(".")[-1])
def test_the_glue_of_an_example_is_short(example):
    functions = [example.make_step, training.train, training.evaluation, training.predict]
    assert sum(map(lines_of, functions)) <= GLUE


def lines_of(function) -> int:
    """Return how many lines of code stand in a function, without its head and its docstring."""
    (definition,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body[1:] if ast.get_docstring(definition) else definition.body
    lines = {number for node in body for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


@pytest.mark.parametrize("name", ["balance_loss", "attention_residuals", "multi_token"])
def test_model_and_glue_are_short(name):
    example = importlib.import_module(f"examples.{name}")
    own = [each for _, each in inspect.getmembers(example, inspect.isfunction) if each.__module__ == example.__name__]
    assert sum(1 + lines_of(each) for each in own if each.__name__ not in ("make_data", "main")) <= 40


@pytest.mark.parametrize("name", LINES)
def test_an_example_is_short(name):
    assert len(inspect.getsource(importlib.import_module(f"examples.{name}")).splitlines()) <= LINES[name]


def test_three_lines_make_a_pipeline_of_a_function():
    lines = inspect.getsource(any_function).splitlines()
    assert len([line for line in lines if line.endswith("  # pipeline")]) == 3


def test_every_example_is_tried():
    names = {path.stem for path in Path(training.__file__).parent.glob("*.py")}
    # tried by the files beside this
    special = {"balance_loss", "attention_residuals", "multi_token", "annotated_flax", "llama"}
    elsewhere = special | {"mixtral", "ring", "unet", "gan", "distributed", "gpt", "serve", "lora", "dpo", "distill"}
    assert names == {example.__name__.split(".")[-1] for example in SOURCES} | {"training"} | elsewhere

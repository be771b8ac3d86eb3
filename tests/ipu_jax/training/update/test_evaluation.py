"""Test `Evaluation`, the mean of a forward pass over a data set: by NumPy in float64 on whole weights.

Rows that fill up a batch are zeros. Two of the figures of zeros are not finite, so that a row that leaks shows.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, Pipeline, TrainOptions, fit, make_train_step
from ipu_jax.io import Checkpoints
from ipu_jax.steps import Evaluation
from support import across
from support.dense import largest_relative_error
from support.programs import assert_same_everywhere, run_instances
from support.refusals import refusals, refused
from support.trained import compiled_quickly

B, D, LAYERS, M = 4, 3, 4, 2

_compiled_quickly = compiled_quickly()


def examples(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=(count, D)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": np.abs(y) + 0.1}


PARAMS = [0.8 * w for w in examples(LAYERS * D, seed=9)["x"].reshape(LAYERS, D, D)]
ONE = examples(B)


def model(np: Any, params, x):
    for w in params:
        x = np.tanh(x @ w)
    return x


def loss(params, batch):
    return jnp.mean((model(jnp, params, batch["x"]) - batch["y"]) ** 2)


def figures(params, batch):
    """Return means over the micro-batch, in several dtypes."""
    found = model(jnp, params, batch["x"])
    return {
        "loss": jnp.mean((found - batch["y"]) ** 2),
        "log": jnp.mean(jnp.log(batch["y"])),  # -inf of a row of zeros
        "length": jnp.mean(batch["x"] / jnp.linalg.norm(batch["x"], axis=-1, keepdims=True)),  # and NaN
        "right": (found.argmax(-1) == batch["y"].argmax(-1)).mean(),
        "all": jnp.all(batch["y"] < 1.5),
        "rows": jnp.sum(batch["y"] > 0.5),
    }


def expected(params, data):
    """Return the figures of a data set; those that are not means over rows, per micro-batch."""
    found, (x, y) = model(np, params, data["x"].astype(np.float64)), (data["x"], data["y"].astype(np.float64))
    parts = [y[start : start + B] for start in range(0, len(y), B)]
    by_size = lambda of: sum(len(part) * of(part) for part in parts) / len(y)
    return {
        "loss": np.mean((found - y) ** 2),
        "log": np.mean(np.log(y)),
        "length": np.mean(x / np.linalg.norm(x, axis=-1, keepdims=True)),
        "right": np.mean(found.argmax(-1) == y.argmax(-1)),
        "all": by_size(lambda part: np.all(part < 1.5)),
        "rows": by_size(lambda part: np.sum(part > 0.5)),
    }


def assert_close(found, wanted, rtol=2e-6):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(found[name]) is float
        np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=name)


@functools.cache
def step_of(ipus: int = 2, replicas: int = 1, **options: Any):
    pipeline = Pipeline.from_function(loss, PARAMS, ONE, ipus=ipus, gradient_accumulation=M)
    return make_train_step(pipeline, optax.sgd(0.1), TrainOptions(replication_factor=replicas, **options))


@functools.cache
def forward_of(ipus: int = 2, replicas: int = 1, fn: Any = figures):
    return step_of(ipus, replicas).model.forward(fn, ONE)


@pytest.mark.fast("22-1-2", "3-2-None", "37-2-2")
@pytest.mark.parametrize("micro_batches", [2, None])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("count", [32, 22, 37, 3, 4])
def test_each_example_counts_once(count, replicas, micro_batches):
    """A call takes 8 or 16 rows, or by default as many as there are; no count but 32 and 4 fills its micro-batches."""
    data = examples(count)
    evaluation = Evaluation(forward_of(2, replicas), data, micro_batches=micro_batches)
    state = step_of(2, replicas).init(PARAMS)
    found = evaluation(state)
    assert_close(found, expected(PARAMS, data))
    assert evaluation(state) == found


def test_the_source_can_be_a_stream_or_a_dataset():
    data, epochs = examples(19), list[int]()
    rows = [{name: leaf[k] for name, leaf in data.items()} for k in range(19)]

    def loader(epoch):
        epochs.append(epoch)
        return ({name: leaf[k : k + 5] for name, leaf in data.items()} for k in range(0, 19, 5))

    state = step_of().init(PARAMS)
    sources: list[Any] = [(rows, "examples"), (loader, "batches"), ([*loader(0)], "batches")]
    for source, items in sources:
        evaluation = Evaluation(forward_of(fn=loss), source, items=items, micro_batches=M)
        first = evaluation(state)
        assert_close(first, {"loss": expected(PARAMS, data)["loss"]})
        assert evaluation(state) == first
    assert {*epochs} == {0}  # of which an evaluation always is


def test_a_function_can_draw_numbers_the_same_in_every_evaluation():
    def noisy(params, batch, key):
        return {"loss": loss(params, batch) * jax.random.uniform(key), "drawn": jax.random.uniform(key)}

    data, key = examples(19), jax.random.key(5)
    evaluation = Evaluation(forward_of(fn=noisy), data, micro_batches=M, key=key)
    state = step_of().init(PARAMS)
    found = evaluation(state)
    # 2 micro-batches in each of 2 calls, and one of 3 rows
    calls = [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)]
    keys = [functools.reduce(jax.random.fold_in, (call, 0, i), key) for call, i in calls]
    drawn = [float(jax.random.uniform(one)) for one in keys]
    assert len({*drawn}) == 5
    parts = [{name: leaf[k * B : (k + 1) * B] for name, leaf in data.items()} for k in range(5)]
    losses = [number * len(part["x"]) * loss(PARAMS, part) for number, part in zip(drawn, parts, strict=True)]
    assert_close(found, {"loss": sum(losses) / 19, "drawn": np.dot(drawn, [4, 4, 4, 4, 3]) / 19})
    assert evaluation(state) == found


def test_an_evaluation_that_failed_leaves_the_next_one_whole_and_nothing_on_the_ipus():
    class Rows:
        fails_at = 13

        def __len__(self):
            return 22

        def __getitem__(self, k):
            if k == self.fails_at:
                raise OSError("disk")
            return {name: leaf[k] for name, leaf in data.items()}

    data, rows = examples(22), Rows()
    evaluation = Evaluation(forward_of(), rows, items="examples", micro_batches=M)
    state, on_ipus = step_of().init(PARAMS), lambda: [a for a in jax.live_arrays() if a.shape == (M, B, D)]
    before = len(on_ipus())
    with pytest.raises(OSError, match="disk"):
        evaluation(state)
    assert len(on_ipus()) == before
    rows.fails_at = -1
    assert_close(evaluation(state), expected(PARAMS, data))
    assert len(on_ipus()) == before


def test_fit_evaluates_at_the_end_of_epochs_and_trains_as_without(tmp_path):
    train, test, step = examples(32, seed=1), examples(20, seed=2), step_of()
    quiet: Any = {"progress": False, "say": list}
    with Feed(train, step=step, micro_batch=B) as feed:
        first = fit(step, step.init(PARAMS), feed, epochs=1, **quiet)
        whole = [jax.device_get(step.whole(first.state)["params"])]
        second = fit(step, first.state, feed, epochs=1, **quiet)
        whole.append(jax.device_get(step.whole(second.state)["params"]))
    evaluation = Evaluation(forward_of(), test, micro_batches=M)
    with Feed(train, step=step, micro_batch=B) as feed:
        result = fit(
            step, step.init(PARAMS), feed, epochs=2, evaluate=evaluation, checkpoints=tmp_path / "run", **quiet
        )
    np.testing.assert_array_equal(result.losses, [*first.losses, *second.losses])
    assert [updates for updates, _ in result.evaluations] == [4, 8]
    for params, (_, found) in zip(whole, result.evaluations, strict=True):
        assert_close(found, expected(params, test))
    other = step_of(ipus=4)
    with Checkpoints(tmp_path / "run", other) as checkpoints:
        restored = checkpoints.restore(other.init(PARAMS))
    assert restored is not None
    assert_close(Evaluation(forward_of(ipus=4), test)(restored.state), expected(whole[1], test))


def test_an_evaluation_reads_the_state_that_training_left():
    """A module with dropout and batch norm is evaluated so in test_examples."""

    def counting(params, seen, batch, key):
        return loss(params, batch) + jax.random.normal(key), seen + batch["x"].mean(0)

    pipeline = Pipeline.from_function(counting, PARAMS, ONE, state=jnp.zeros(D), ipus=2, gradient_accumulation=M)
    step, data = make_train_step(pipeline, optax.sgd(0.1)), examples(M * B)
    state = step.init(PARAMS, stages=jnp.zeros(D), key=jax.random.key(0))
    with Feed(data, step=step, micro_batch=B, shuffle=False) as feed:
        state, _ = step(state, next(feed))
    found = Evaluation(step.model.forward(lambda params, seen, batch: seen[0], ONE), data)(state)
    assert_close(found, {"loss": data["x"].reshape(M, B, D).mean(1).sum(0)[0]})


def test_a_step_in_half_precision_evaluates_in_it():
    data, step = examples(22), step_of(precision="16.32")
    forward = step.model.forward(figures, ONE)
    assert forward.outputs["loss"].dtype == jnp.bfloat16
    found = Evaluation(forward, data, micro_batches=M)(step.init(PARAMS))
    half = functools.partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, jnp.bfloat16))
    parts = [half({name: leaf[k : k + B] for name, leaf in data.items()}) for k in range(0, 22, B)]
    each = [{name: len(part["x"]) * float(v) for name, v in figures(half(PARAMS), part).items()} for part in parts]
    wanted = {name: sum(part[name] for part in each) / 22 for name in each[0]}
    assert found.keys() == wanted.keys()
    assert largest_relative_error(found, wanted) < 4 * float(jnp.finfo(jnp.bfloat16).eps)
    assert abs(found["loss"] / expected(PARAMS, data)["loss"] - 1) > 1e-5  # not in float32


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "replicas", "ipus"), [((1, 1), 1, 2), ((2, 2), 2, 2), ((1, 1, 1, 1), 2, 2)])
def test_several_instances_evaluate_as_one(devices, replicas, ipus):
    options = {"replicas": replicas, "ipus": ipus}
    found = assert_same_everywhere(run_instances(across.evaluated, devices, **options))
    np.testing.assert_allclose(found["before"], found["expected"], rtol=1e-6)
    for name, value in across.evaluated(**options).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


# refusals


def evaluating(fn: Any = figures, source: Any = ONE, inputs: Any = ONE, state: Any = None, **options: Any) -> Any:
    return lambda: Evaluation(step_of().model.forward(fn, inputs, state=state), source, **options)


def counted(params, state, batch):
    return loss(params, batch), state + 1


def with_key(params, batch, key):
    return loss(params, batch) + jax.random.uniform(key)


def of_four_rows(params, batch):
    if len(batch["x"]) != B:
        raise ValueError(f"{len(batch['x'])} rows, and the model takes {B}")
    return loss(params, batch)


@refusals(
    (lambda: Evaluation(cast(Any, loss), ONE), "forward is a function", "pipeline.forward(fn, inputs)"),
    (evaluating(counted, state=jnp.zeros(())), "a state of its own", "leave state= out"),
    (evaluating(with_key), "key is missing", "give key=jax.random.key(...)"),
    (evaluating(with_key, key=3), "key=3", "not one typed key", "jax.random.key(seed)"),
    (evaluating(key=jax.random.key(0)), "a key was given", "(params, micro_batch, key)"),
    (evaluating(lambda p, b: model(jnp, p, b["x"])), "outputs are float32[4, 3]", "return the mean", "in a dict"),
    (evaluating(lambda p, b: {"z": loss(p, b) * 1j}), "outputs['z'] are complex64[]", "a float scalar"),
    (evaluating(lambda p, b: {"k": jax.random.key(b["x"][0, 0].astype(int))}), "['k'] are key<fry>[]", "a float"),
    (evaluating(lambda p, b: (loss(p, b),)), "outputs are a tuple", "several by name in a dict"),
    (evaluating(lambda p, b: {"a": {"b": loss(p, b)}}), "outputs['a'] are a dict", "several by name in a dict"),
    (evaluating(loss, inputs={**ONE, "n": 3}), "first dims", "[(), (4,), (4,)]", "they must be one, the micro-batch's"),
    (evaluating(micro_batches=0), "micro_batches=0", "at least 1"),
    (evaluating(source={"x": ONE["x"]}), "batch['y'] is missing", "cut for micro-batches with ['x'], ['y']"),
    (evaluating(source=examples(0)), "no examples", "an example a row"),
    (evaluating(source=iter([ONE]), items="batches"), "cannot be repeated", "a function of the epoch"),
    (evaluating(of_four_rows, examples(B + 3)), "3 rows", "the model takes 4"),
)
def test_an_evaluation_is_refused(call, holds):
    with refused(*holds):
        call()


def test_what_cannot_be_evaluated_is_refused_before_the_training():
    evaluation, state = Evaluation(forward_of(), ONE), step_of(2, 2).init(PARAMS)
    others = "on other devices", "4 and 2", "step.model.forward(fn, inputs)"
    with refused(*others):
        evaluation(state)
    with refused("state is a list", "give what step.init returns"):
        evaluation(cast(Any, PARAMS))
    with Feed(examples(32), step=step_of(2, 2), micro_batch=B) as feed:
        with refused(*others):
            fit(step_of(2, 2), state, feed, evaluate=evaluation)
        with refused("evaluate= is a Forward", "takes a batch", "Evaluation(forward, data)"):
            fit(step_of(2, 2), state, feed, evaluate=forward_of(2, 2))
        named = forward_of(2, 2, lambda params, batch: {"epoch": loss(params, batch)})
        with refused("figures have the name 'epoch'", "choose another name"):
            fit(step_of(2, 2), state, feed, evaluate=Evaluation(named, ONE))


def test_the_loss_of_a_function_with_dropout_names_the_function_to_evaluate():
    pipeline = Pipeline.from_function(with_key, PARAMS, ONE, ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.sgd(0.1))
    batch = {name: leaf.reshape(M, B, D) for name, leaf in examples(M * B).items()}
    state = step.init(PARAMS, key=jax.random.key(0))
    with refused("takes a random key", "pass key=", "or evaluate", "step.model.forward(test_loss, micro_batch)"):
        step.loss(state, batch)

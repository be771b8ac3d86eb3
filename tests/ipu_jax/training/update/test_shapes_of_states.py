"""Test that `step.shapes` returns the shapes of what `step.init` returns, and that programs are lowered for them."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale
from ipu_jax.steps import replicate
from support.refusals import compilations, refusals, refused
from support.trained import bits, compiled_quickly

_compiled_quickly = compiled_quickly()

drawn = lambda *shape: np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)
WEIGHTS = {"a": {"w": drawn(3, 4), "b": drawn(4)}, "b": {"w": drawn(4, 3)}, "head": drawn(3, 5)}  # 5 columns on 2 IPUs
STATE = {"seen": {"mean": np.zeros(3, np.float32), "count": np.int32(0)}}
TABLE = {"table": drawn(7, 4), "w": drawn(4, 4, 4), "gain": drawn(4)}
KEY = jax.random.key(3)


def first(p: Any, x: Any, mb: Any) -> Any:
    return jnp.tanh(mb @ p["w"] + p["b"])


def random_first(p: Any, x: Any, mb: Any, *, state: Any, key: Any) -> Any:
    seen = {"mean": 0.9 * state["mean"] + 0.1 * mb.mean(0), "count": state["count"] + 1}
    return Outputs(first(p, x, mb + jax.random.normal(key, mb.shape)), state=seen)


def pipeline_of(fn: Any = first, replicas: int = 1, **options: Any) -> Pipeline:
    of_first = {} if fn is first else {"state": "seen", "random": True}
    stages = [
        Stage(fn, params="a", ipu=0, **of_first),
        Stage(lambda p, x, mb: x @ p["w"], params="b", ipu=1),
        Stage(lambda p, x, mb: jax.lax.psum(jnp.mean((x @ p) ** 2), "ipu"), params="head", ipu=ALL_IPUS),
    ]
    return Pipeline(stages, mesh=make_mesh(replicas, 2), specs={"head": PartitionSpec(None, "ipu")}, **options)


def function(p: Any, mb: Any, **_: Any) -> Any:
    return jnp.mean((jnp.tanh(mb @ p["a"]["w"] + p["a"]["b"]) @ p["b"]["w"] @ p["head"]) ** 2)


def tied(p: Any, ids: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), p["table"][ids], p["w"])  # its rows are on both IPUs
    return jnp.mean(jax.nn.logsumexp(x * p["gain"] @ p["table"].T, axis=-1))


def cut(replicas: int = 1) -> Pipeline:
    return Pipeline.from_function(tied, TABLE, jnp.zeros(6, jnp.int32), ipus=2, replicas=replicas)


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def facts_of(tree: Any) -> Any:
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(tree)]


ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
NOISY = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), ADAM)  # a key in its state
HALF, DOUBLE = (jax.tree.map(lambda leaf, d=d: leaf.astype(d), WEIGHTS) for d in (jnp.bfloat16, np.float64))
ALL: dict[str, Any] = {"shard_optimizer": True, "ema_decay": 0.9, "loss_scale": DynamicScale(), "on_nonfinite": "skip"}
ALL |= {"precision": "16.16", "stochastic_rounding": True}
SHARDED: dict[str, Any] = {"replication_factor": 2, "shard_optimizer": True}
RANDOM, REPLICAS = {"stages": STATE, "key": KEY}, replicate(function, replication_factor=2, random=True)


def case(make: Any = pipeline_of, params: Any = WEIGHTS, optimizer: Any = ADAM, given: Any = (), **options: Any) -> Any:
    """Return a function that makes a step, with more options, and the arguments of its `init`."""
    return lambda **more: (make_train_step(make(), optimizer, TrainOptions(**options, **more)), params, dict(given))


CASES = {
    "a pipeline": case(),
    "bfloat16": case(params=HALF, ema_decay=0.9),
    "state and keys": case(lambda: pipeline_of(random_first), given=RANDOM),
    "all": case(lambda: pipeline_of(random_first, 2, frozen={"b": True}), given=RANDOM, **ALL),
    "frozen": case(lambda: pipeline_of(frozen={"a": {"w": True, "b": False}}), **SHARDED),
    "a DynamicScale": case(optimizer=SGD, loss_scale=DynamicScale()),
    "on_nonfinite": case(optimizer=SGD, on_nonfinite="stop"),
    "float64 in 16.16": case(params=DOUBLE, precision="16.16"),
    "16.32": case(params=HALF, precision="16.32"),
    "shard_optimizer": case(ema_decay=0.9, **SHARDED),
    "adafactor": case(optimizer=optax.adafactor(0.1, min_dim_size_to_factor=2), replication_factor=2),
    "MultiSteps": case(optimizer=optax.MultiSteps(ADAM, 2)),
    "lamb": case(optimizer=optax.lamb(0.1), **SHARDED),
    "an optimizer's key": case(optimizer=NOISY),
    "a function": case(lambda: function, replication_factor=2),
    "a function in 16.16": case(lambda: function, DOUBLE, replication_factor=2, precision="16.16"),
    "all of a function": case(lambda: REPLICAS, optimizer=NOISY, given={"key": KEY}, **ALL),
    "offload": case(ema_decay=0.9, on_nonfinite="skip", offload=("optimizer",)),
    "a function's offload": case(lambda: function, ema_decay=0.9, replication_factor=2, offload=("optimizer",)),
    "a cut function": case(cut, TABLE),
    "a cut function in 16.16": case(cut, TABLE, precision="16.16", ema_decay=0.9, **SHARDED),
}


@pytest.mark.fast(
    "all", "shard_optimizer", "float64 in 16.16", "adafactor", "all of a function", "a cut function in 16.16"
)
@pytest.mark.parametrize("name", CASES)
def test_shapes_are_those_of_the_state_that_init_returns(name):
    step, params, given = CASES[name]()
    expected = facts_of(step.init(params, **given))
    assert facts_of(step.shapes(params, **given)) == expected
    assert facts_of(step.shapes(shapes_of(params), **shapes_of(given))) == expected


@pytest.mark.parametrize(("make", "params"), [(pipeline_of, WEIGHTS), (pipeline_of, DOUBLE), (cut, TABLE)])
def test_weights_that_are_placed_or_would_be_have_the_same_shapes(make, params):
    step, *_ = case(make, replication_factor=2, precision="16.16")()
    expected = facts_of(step.init(params))
    for placed in (make().shard(params), make().shard_shapes(params), make(replicas=2).shard_shapes(shapes_of(params))):
        assert facts_of(step.shapes(placed)) == expected


def shapes_by(model: Any, params: Any, **given: Any) -> Any:
    return lambda: case(lambda: model, precision="16.16")()[0].shapes(params, **given)


@refusals(
    (shapes_by(function, {"a": 1.0}), "params['a'] is 1.0", "array of numbers", "np.asarray(params['a'])"),
    (shapes_by(pipeline_of(), WEIGHTS | {"head": "w"}), "params['head'] is 'w'", "array"),
    (shapes_by(pipeline_of(), WEIGHTS, stages=STATE), "the model holds no state", "leave them out"),
    (shapes_by(pipeline_of(random_first), WEIGHTS, key=KEY), "stages is missing", "the state of 'seen'"),
    (shapes_by(pipeline_of(random_first), WEIGHTS, stages=STATE), "key is missing", "jax.random.key(seed)"),
)
def test_what_init_refuses_has_no_shapes(call, holds):
    with refused(*holds):
        call()


def test_shapes_transfer_and_compile_nothing():
    step, params, given = CASES["all"]()
    params, given, before = shapes_of(params), shapes_of(given), len(compilations)
    with jax.transfer_guard("disallow_explicit"):
        step.shapes(params, **given)
    assert len(compilations) == before


def test_a_key_that_nothing_draws_from_is_left_out_and_the_warning_names_the_caller():
    step, *_ = case()()
    with pytest.warns(UserWarning, match="key is not used") as caught:
        state = step.shapes(WEIGHTS, key=KEY)
    assert (state.key, caught[0].filename) == (None, __file__)


@pytest.mark.fast("shard_optimizer")
@pytest.mark.parametrize(
    ("name", "updates", "shape", "spec"),
    [
        ("a pipeline", 1, (2, 6, 3), PartitionSpec()),
        ("all", 3, (3, 2, 2, 6, 3), PartitionSpec(None, "replica")),
        ("shard_optimizer", 1, (2, 2, 6, 3), PartitionSpec("replica")),
        ("all of a function", 3, (3, 2, 2, 6, 3), PartitionSpec(None, "replica")),
        ("a cut function in 16.16", 1, (2, 2, 6), PartitionSpec("replica")),
    ],
    ids=["a pipeline", "all", "shard_optimizer", "all of a function", "a cut function"],
)
def test_the_program_of_shapes_is_that_of_arrays(name, updates, shape, spec):
    step, params, given = CASES[name](gradient_accumulation=2, device_iterations=updates)
    batch = np.ones(shape, int if params is TABLE else float)
    expected = step.lower(step.init(params, **given), batch).as_text()
    state, anywhere = step.shapes(shapes_of(params), **shapes_of(given)), jax.device_put(batch, jax.devices()[5])
    placed = jax.device_put(batch, NamedSharding(step.mesh, spec))  # as by a Feed
    for same in (shapes_of(batch), jnp.asarray(batch), anywhere, placed):
        assert step.lower(state, same).as_text() == expected


@pytest.mark.fast("plain")
@pytest.mark.parametrize(("fn", "replicas"), [(first, 1), (random_first, 2)], ids=["plain", "all"])
def test_a_pipeline_that_is_compiled_for_shapes_computes_what_it_computes(fn, replicas):
    pipeline = pipeline_of(fn, replicas, gradient_accumulation=2, frozen={"b": True})
    rows = drawn(*[replicas] * (replicas > 1), 2, 6, 3)
    shapes, arrays = [pipeline.shard_shapes(shapes_of(WEIGHTS)), shapes_of(rows)], [pipeline.shard(WEIGHTS), rows]
    if fn is random_first:
        shapes += [pipeline.shard_state_shapes(shapes_of(STATE)), shapes_of(KEY)]
        arrays += [pipeline.shard_state(STATE), KEY]
    lowered = pipeline.lower(*shapes)
    assert len(jax.tree.leaves(lowered.args_info)) == len(jax.tree.leaves(arrays))
    arrays[1] = jax.device_put(rows, NamedSharding(pipeline.mesh, PartitionSpec(*["replica"] * (replicas > 1))))
    expected = pipeline.value_and_grad(*arrays)
    found = lowered.compile()(*arrays, *[None] * (4 - len(arrays)))
    assert bits(found[: len(expected)]) == bits(expected)


@pytest.mark.parametrize("name", ["shard_optimizer", "a function"])
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_lowered(name, monkeypatch):
    step, params, _ = CASES[name](gradient_accumulation=2)
    state, wrong = step.shapes(params), drawn(2, 3, 6, 3)
    monkeypatch.setattr(step, "_program", None)
    calls = [lambda batch: step.lower(state, batch)]
    if isinstance(step.model, Pipeline):
        monkeypatch.setattr(step.model._programs, "update", None)
        calls.append(lambda batch: step.model.lower(state.params, batch))
    for call, batch in itertools.product(calls, (wrong, shapes_of(wrong))):
        with refused("batch has shape (2, 3, 6, 3)", "(replicas, gradient_accumulation, ...) = (2, 2, ...)"):
            call(batch)


def test_leaves_without_elements_are_read_back():
    """Jax may hand out parts of them that are as long as the whole."""
    stages = [
        Stage(lambda p, x, mb: mb, ipu=0),
        Stage(lambda p, x, mb: jnp.mean(x**2) + p["none"].sum(), params="b", ipu=1),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(2, 2), gradient_accumulation=2)
    step = make_train_step(pipeline, optax.adam(0.1), TrainOptions(shard_optimizer=True, ema_decay=0.5))
    whole = step.whole(step.init({"b": {"none": np.zeros((0, 3), np.float32)}}))
    assert {leaf.shape for leaf in jax.tree.leaves((whole["ema"], whole["optimizer"][0].mu))} == {(0, 3)}

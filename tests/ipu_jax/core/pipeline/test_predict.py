"""Test `Pipeline.predict`: outputs of any number of micro-batches, split or whole; the expected ones are NumPy's."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from ipu_jax.core.schedules import make_schedule
from ipu_jax.pipelines import reference_predict
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.layers import normal
from support.refusals import refusals, refused

ROWS, D, V, M = 3, 4, 7, 4  # 7 columns on 2 IPUs are 4 and 3, on 4 IPUs 2, 2, 2 and 1
SPLIT = P(None, "ipu")


PARAMS = {"a": normal(D, D, seed=0), "b": normal(D, D, seed=1), "head": normal(D, V, seed=2)}


def expected_logits(x: np.ndarray) -> np.ndarray:
    y = np.tanh(x.astype(np.float64) @ PARAMS["a"])
    return (np.tanh(y @ PARAMS["b"]) + x) @ PARAMS["head"]


def first(w, x, mb):
    return jnp.tanh(mb["x"] @ w)


def second(w, x, mb):
    return jnp.tanh(x @ w) + mb["x"]


def loss(w, x, mb):
    return jnp.mean((x @ w) ** 2 * mb["label"])  # there are no labels in prediction


def whole_logits(w, x, mb):
    logits = x @ w
    return logits if w.shape[1] == V else lax.all_gather(logits, "ipu", axis=1, tiled=True)[:, :V]


def model(head: Any = 1, *, body: int = 1, ipus: int = 2, replicas: int = 1, schedule: Any = "grouped", **of_head: Any):
    of_head = {"predict": lambda w, x, mb: x @ w} | of_head
    stages = [
        Stage(first, params="a", ipu=0),
        Stage(second, params="b", ipu=body),
        Stage(loss, params="head", ipu=head, **of_head),
    ]
    specs = {"head": SPLIT} if head is ALL_IPUS else None
    mesh = make_mesh(replicas, ipus)
    return Pipeline(stages, mesh=mesh, gradient_accumulation=M, specs=specs, schedule=schedule)


def predicted(pipeline: Pipeline, batch: Any) -> Any:
    """Return the prediction, after comparing it with that of the unsharded program."""
    found = pipeline.predict(pipeline.shard(PARAMS), batch)
    unsharded = reference_predict(pipeline, PARAMS, batch)
    np.testing.assert_allclose(np.asarray(found)[..., :V], unsharded, rtol=1e-5, atol=1e-6)
    return found


CASES = {
    "on one IPU": (1, {"head": 0, "body": 0, "ipus": 1}),
    "basic": (5, {"head": 1}),
    "on four IPUs, two of them idle": (2, {"head": 3, "ipus": 4, "schedule": "zb-h1"}),
    "with a schedule of one's own": (
        3,
        {"schedule": make_schedule("gpipe", gradient_accumulation=M, ipus=2, placement=(0, 1, 1))},
    ),
    "before a schedule is found": (2, {"schedule": "auto"}),
    "there and back": (3, {"head": 0, "schedule": "1f1b"}),
}


@pytest.mark.fast("on one IPU", "basic")
@pytest.mark.parametrize(("m", "options"), CASES.values(), ids=CASES)
def test_outputs_of_any_number_of_micro_batches(m, options):
    x = normal(m, ROWS, D, seed=3)
    found = predicted(model(**options), {"x": x})
    assert found.shape == (m, ROWS, V)
    assert found.sharding.is_fully_replicated
    np.testing.assert_allclose(found, expected_logits(x), rtol=1e-4, atol=1e-5)


@pytest.mark.fast("2-1-sequential-False")
@pytest.mark.parametrize(
    ("ipus", "replicas", "schedule", "split"),
    [(2, 2, "1f1b", True), (2, 1, "sequential", False), (2, 1, "sequential", True), (4, 2, "1f1b", False)],
)
def test_logits_of_a_concurrent_stage_stay_split_or_are_gathered(ipus, replicas, schedule, split):
    of_head: dict[str, Any] = {"predict_specs": SPLIT} if split else {"predict": whole_logits}
    pipeline = model(ALL_IPUS, ipus=ipus, replicas=replicas, schedule=schedule, **of_head)
    lead = (3,) if replicas == 1 else (replicas, 3)
    x = normal(*lead, ROWS, D, seed=3)
    found = predicted(pipeline, {"x": x})
    padded = -(-V // ipus) * ipus
    assert found.shape == (*lead, ROWS, padded if split else V)
    assert {shard.data.shape[-1] for shard in found.addressable_shards} == {padded // ipus if split else V}
    np.testing.assert_allclose(found[..., :V], expected_logits(x), rtol=1e-4, atol=1e-5)


def test_outputs_are_any_tree_of_any_dtypes_and_some_of_them_split():
    def predict(w, x, mb):
        return {"top": mb["x"].argmax(-1), "logits": [x @ w, None], "any": mb["x"].max() > 1, "two": 2}

    specs = {"top": P(), "logits": SPLIT, "any": P(), "two": P()}
    pipeline = model(ALL_IPUS, predict=predict, predict_specs=specs)
    x = normal(2, ROWS, D, seed=3) * 3
    found = jax.jit(pipeline.predict)(pipeline.shard(PARAMS), {"x": x})
    assert found["logits"][1] is None
    np.testing.assert_array_equal(found["top"], x.argmax(-1))
    np.testing.assert_array_equal(found["any"], x.max((1, 2)) > 1)
    np.testing.assert_array_equal(found["two"], [2, 2])
    np.testing.assert_allclose(found["logits"][0][..., :V], expected_logits(x), rtol=1e-4, atol=1e-5)


# state and keys


def stateful() -> Pipeline:
    """Two counters change in prediction; a batch norm's state does not, whatever its functions return."""

    def unused(*args, **kwargs):
        raise AssertionError("predict goes before evaluate, and evaluate before fn")

    def counting(w, x, mb, *, state):
        return Outputs((mb + state["sum"]) @ w, state={"sum": state["sum"] + mb.sum()})

    def normed(w, x, mb, *, state):
        return Outputs(x * state, state=state + 100)

    def last(w, x, mb, *, state, key):
        return jnp.mean(x) / 0  # it is trained only

    def drawing(w, x, mb, *, state, key):
        noise = 0 if key is None else jax.random.uniform(key)
        return Outputs({"y": x @ w + noise, "seen": state}, state=state + 1)

    stages = [
        Stage(unused, params="a", state="counter", predict=counting, evaluate=unused),
        Stage(unused, state="norm", ipu=1, name="norm", evaluate=normed),
        Stage(last, params="b", state="calls", ipu=ALL_IPUS, random=True, predict=drawing),
    ]
    return Pipeline(stages, gradient_accumulation=M, specs={"b": P()})


STATE = {"counter": {"sum": np.float32(0.5)}, "norm": np.float32(2), "calls": np.int32(7)}


@pytest.mark.fast("None")
@pytest.mark.parametrize("key", [None, 5])
def test_what_predict_returns_as_state_is_what_the_next_micro_batch_reads(key):
    pipeline, x = stateful(), normal(3, ROWS, D, seed=4)
    typed = None if key is None else jax.random.key(key)
    params, state = pipeline.shard({name: PARAMS[name] for name in "ab"}), pipeline.shard_state(STATE)
    found, new = pipeline.predict(params, x, state, typed, return_state=True)

    sums = 0.5 + np.concatenate([[0], np.cumsum(x.sum((1, 2)))])
    y = (x + sums[:3, None, None]) @ PARAMS["a"] * 2 @ PARAMS["b"]
    if typed is not None:
        of_replica = jax.random.fold_in(typed, 0)
        noise = [jax.random.uniform(jax.random.fold_in(jax.random.fold_in(of_replica, m), 2)) for m in range(3)]
        y = y + np.array(noise)[:, None, None]
    np.testing.assert_allclose(found["y"], y, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["seen"], [7, 8, 9])
    new = pipeline.unshard(new)
    assert (float(new["norm"]), int(new["calls"])) == (2, 10)
    assert float(new["counter"]["sum"]) == pytest.approx(sums[3], rel=1e-5)
    np.testing.assert_array_equal(pipeline.unshard(state)["calls"], 7)  # the given one is as it was

    if key is None:
        again = pipeline.predict(params, x, state)
        jax.tree.map(np.testing.assert_array_equal, again, found)
        later = pipeline.predict(params, x, pipeline.shard_state(new))
        np.testing.assert_array_equal(later["seen"], [10, 11, 12])
        outputs, of_unsharded = reference_predict(pipeline, pipeline.unshard(params), x, STATE, return_state=True)
        np.testing.assert_allclose(outputs["y"], y, rtol=1e-4, atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), of_unsharded, new)


def test_a_random_stage_without_predict_or_evaluate_needs_a_key():
    stage = Stage(lambda w, x, mb, *, key: jax.random.normal(key, mb["x"].shape), random=True, name="noise")
    last = Stage(loss, params="head", predict=lambda w, x, mb: x @ w)
    pipeline = Pipeline([stage, last])
    params, batch = pipeline.shard({"head": PARAMS["head"]}), {"x": normal(2, ROWS, D, seed=3)}
    with refused("stage 'noise' takes a random key: pass key=jax.random.key(...)"):
        pipeline.predict(params, batch)
    predicting = pipeline.replace(stages=[dataclasses.replace(stage, predict=lambda w, x, mb, key: mb["x"]), last])
    found = predicting.predict(params, batch)
    np.testing.assert_allclose(found, batch["x"] @ PARAMS["head"], rtol=1e-5)


@pytest.mark.parametrize("other", [{}, {"predict": True}, {"evaluate": True}], ids=str)
def test_a_state_of_fn_that_predict_drops_is_warned_of(other):
    def counted(w, x, mb, *, state):
        return Outputs(mb + state, state=state + 1)

    first = dataclasses.replace(Stage(counted, state="count", ipu=0, name="counts"), **dict.fromkeys(other, counted))
    last = Stage(lambda w, x, mb: jnp.mean(x * w), params="w", ipu=1, predict=lambda w, x, mb: x * w)
    pipeline = Pipeline([first, last], gradient_accumulation=2)
    warned = contextlib.nullcontext() if other else pytest.warns(UserWarning, match="'counts': predict drops the state")
    with warned:
        found = pipeline.predict(
            pipeline.shard({"w": np.float32(1)}),
            np.zeros((3, 1), np.float32),
            pipeline.shard_state({"count": np.float32(5)}),
        )
    np.testing.assert_array_equal(found[:, 0], [5, 6, 7] if "predict" in other else [5, 5, 5])


# refusals


def predicting(batch: Any = None, *, replicas: int = 1, **of_head: Any) -> Any:
    """Return a call of predict, with a head on all IPUs if it has anything to do with splits."""
    batch = {"x": normal(2, ROWS, D, seed=3)} if batch is None else batch
    pipeline = model(ALL_IPUS if of_head else 1, replicas=replicas, **of_head)
    return lambda: pipeline.predict(pipeline.shard(PARAMS), batch)


def without_predict(call: Any) -> Any:
    pipeline = model(predict=None)
    return lambda: call(pipeline, PARAMS, {"x": normal(2, ROWS, D, seed=3)})


def returning_state(pipeline: Pipeline) -> Any:
    params = {stage.params: PARAMS[stage.params] for stage in pipeline.stages if stage.params}
    return lambda: pipeline.predict(pipeline.shard(params), {"x": normal(2, ROWS, D, seed=3)}, return_state=True)


CANNOT = "the last stage, 'head', cannot predict", "give Stage(..., predict=fn)", "in place of its loss"
LEAD, ANY = "its leading dims must be (micro-batches, ...)", "any number of micro-batches from 1 on"


@refusals(
    (without_predict(lambda pipeline, params, batch: pipeline.predict(pipeline.shard(params), batch)), *CANNOT),
    (without_predict(reference_predict), *CANNOT),
    (predicting({"x": np.float32(1)}), "batch['x'] has shape ()", LEAD, ANY),
    (predicting({"x": np.ones((0, 3))}), "batch['x'] has shape (0, 3)", LEAD, ANY),
    (predicting({"x": np.ones((2, 3)), "y": np.ones((3, 3))}), "batch['y'] has 3", "another leaf 2", "all leaves must"),
    (
        predicting([np.ones((3, 2))], replicas=2),
        "batch[0] has shape (3, 2)",
        "(replicas, micro-batches, ...) = (2, ...)",
    ),
    (predicting({}), "batch has no arrays", "nothing to read"),
    (returning_state(model()), "return_state=True, but no stage holds state", "Stage(..., state='name')"),
    (
        returning_state(stateful().replace(mesh=make_mesh(2, 2))),
        "return_state=True on 2 replicas",
        "make_mesh(1, ipus)",
    ),
    (
        predicting(predict=lambda w, x, mb: {"y": x @ w}),
        "'head' returns outputs['y'] of float32[3, 4] that may differ between IPUs",
        "Stage(predict_specs=PartitionSpec(...))",
        "jax.lax.all_gather",
    ),
    (
        predicting(predict=lambda w, x, mb: x, predict_specs=SPLIT),
        f"predict_specs says {SPLIT} for outputs of float32[3, 4]",
        "every IPU returns the same",
        "leave 'ipu' out",
    ),
    (
        predicting(predict=lambda w, x, mb: (x @ w)[0], predict_specs=SPLIT),
        f"predict_specs says {SPLIT} for outputs of float32[4]",
        "fewer dims",
        "one micro-batch's outputs",
    ),
    (
        predicting(predict_specs={"y": SPLIT}),
        "stage 'head': predict_specs",
        "does not fit the tree that predict returns",
    ),
)
def test_a_prediction_that_there_cannot_be_is_refused(call, holds):
    with refused(*holds):
        call()

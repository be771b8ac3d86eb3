"""Test stages with state against an independent program: a Python loop over replicas and micro-batches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import largest_relative_error
from support.layers import ROWS, D, loss_layer, normal
from support.platforms import programs_for
from support.refusals import refusals, refused

MOMENTUM = 0.9


# batch norm


def norm_layer(p, x, mb, *, state):
    """Apply batch norm as a user writes it: normalise by the micro-batch, and keep running averages."""
    x = mb["x"] if x is None else x
    h = x @ p["w"]
    mean, var = h.mean(0), h.var(0)
    seen = {
        "mean": MOMENTUM * state["mean"] + (1 - MOMENTUM) * mean,
        "var": MOMENTUM * state["var"] + (1 - MOMENTUM) * var,
        "count": state["count"] + (mb["x"] > 0).sum(dtype=jnp.int32),  # not the same on all replicas
    }
    return Outputs(jnp.tanh((h - mean) * lax.rsqrt(var + 1e-5) * p["gain"]), state=seen)


def norm_layer_in_evaluation(p, x, mb, *, state):
    x = mb["x"] if x is None else x
    return jnp.tanh((x @ p["w"] - state["mean"]) * lax.rsqrt(state["var"] + 1e-5) * p["gain"])


class NormModel:
    """Return a pipeline with normalised layers at `places`, and then the loss, on the last IPU or on all."""

    def __init__(self, places: tuple[int | None, ...], micro_batches: int, replicas: int = 1, recompute: Any = "auto"):
        self.replicas, self.micro_batches = replicas, micro_batches
        norm = functools.partial(Stage, norm_layer, evaluate=norm_layer_in_evaluation, recompute=recompute)
        self.names = [f"layer{i}" for i in range(len(places) - 1)]
        self.stages = [
            norm(params=name, state=f"{name} seen", ipu=ALL_IPUS if place is None else place)
            for name, place in zip(self.names, places, strict=False)
        ]
        self.stages.append(Stage(loss_layer, params="loss", ipu=ALL_IPUS if places[-1] is None else places[-1]))
        self.params = {
            **{name: {"w": normal(D, D, seed=i), "gain": normal(D, seed=50 + i)} for i, name in enumerate(self.names)},
            "loss": {"w": normal(D, D, seed=99)},
        }
        self.state = {
            f"{name} seen": {
                "mean": normal(D, seed=70 + i),
                "var": normal(D, seed=80 + i) ** 2,
                "count": np.full((), i, np.int32),
            }
            for i, name in enumerate(self.names)
        }
        self.specs = {
            stage.params: PartitionSpec() for stage in self.stages if stage.params is not None and stage.place is None
        }
        lead = (micro_batches,) if replicas == 1 else (replicas, micro_batches)
        self.batch = {"x": normal(*lead, ROWS, D, seed=1), "y": normal(*lead, ROWS, D, seed=2)}

    def pipeline(self, ipus: int, schedule: str = "grouped") -> Pipeline:
        return Pipeline(
            self.stages,
            mesh=make_mesh(self.replicas, ipus),
            schedule=schedule,
            gradient_accumulation=self.micro_batches,
            specs=self.specs,
        )

    def twin(self) -> tuple[Any, Any, Any]:
        """Return loss, gradients and new state, without using any of our code."""

        def forward(params, x, y, state):
            new, positive = {}, jnp.sum(x > 0, dtype=jnp.int32)
            for name in self.names:
                h = jnp.einsum("nd,de->ne", x, params[name]["w"])
                mean, var = h.sum(0) / ROWS, jnp.square(h - h.sum(0) / ROWS).sum(0) / ROWS
                old = state[f"{name} seen"]
                new[f"{name} seen"] = {
                    "count": old["count"] + positive,
                    "mean": old["mean"] * 0.9 + mean * 0.1,
                    "var": old["var"] * 0.9 + var * 0.1,
                }
                x = jnp.tanh((h - mean[None]) / jnp.sqrt(var[None] + 1e-5) * params[name]["gain"])
            return jnp.square(x @ params["loss"]["w"] - y).mean(), new

        step = jax.jit(jax.value_and_grad(forward, has_aux=True))
        xs, ys = (self.batch[k].reshape(self.replicas, self.micro_batches, ROWS, D) for k in ("x", "y"))
        losses, gradients, states = [], [], []
        for replica in range(self.replicas):
            state = self.state
            for m in range(self.micro_batches):
                (loss, state), gradient = step(self.params, xs[replica, m], ys[replica, m], state)
                losses.append(loss)
                gradients.append(gradient)
            states.append(state)
        mean = lambda *leaves: sum(leaves) / len(leaves)
        state = jax.tree.map(lambda *s: s[0] if s[0].dtype == np.int32 else mean(*s), *states)
        return mean(*losses), jax.tree.map(mean, *gradients), state


def assert_state_loss_and_gradients_equal_the_twins(model: NormModel, pipeline: Pipeline) -> None:
    params, state = pipeline.shard(model.params), pipeline.shard_state(model.state)
    evaluated = pipeline.loss(params, model.batch, state)
    loss, gradients, new_state = pipeline.value_and_grad(params, model.batch, state)
    expected_loss, expected_gradients, expected_state = model.twin()
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert largest_relative_error(pipeline.unshard(gradients), expected_gradients) < 1e-5
    for array in jax.tree.leaves(new_state):
        of_device = {shard.device.id: shard for shard in array.addressable_shards}
        for replica in pipeline.mesh.devices[1:]:
            for first, other in zip(pipeline.mesh.devices[0], replica, strict=True):
                np.testing.assert_array_equal(of_device[first.id].data, of_device[other.id].data)
    found = pipeline.unshard(new_state)
    assert largest_relative_error(found, expected_state) < 1e-5
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert float(pipeline.loss(params, model.batch, state)) == float(evaluated)  # it changes nothing


STRETCHED = (None, 0, 1, None)  # for a GPU, whose ticks are in stretches


@pytest.mark.parametrize(
    ("places", "ipus", "micro_batches", "of_model", "schedule"),
    [
        pytest.param((0, 1, 2, 3), 4, 2, {}, "1f1b", id="like stages in one team"),
        pytest.param((0, 1), 2, 2, {"replicas": 2}, "grouped", id="integers of replica 0"),
        *(((0, 1, 1), 2, 3, {}, name) for name in ("sequential", "interleaved", "gpipe", "zb-h1")),
        ((0, 1, 0, 1), 2, 4, {}, "looped"),
        ((0, 1, 1, 0), 2, 4, {}, "zbv"),
        ((0, 0), 1, 2, {"recompute": "none"}, "grouped"),
        ((1, 0, 1, 0), 4, 5, {"recompute": "all"}, "grouped"),
        ((None, 0, None, 1, None), 2, 2, {"recompute": "none", "replicas": 2}, "grouped"),
        (STRETCHED, 2, 4, {}, "grouped"),
    ],
)
@pytest.mark.fast("integers of replica 0")
def test_running_statistics_are_updated_once_a_micro_batch_in_order(places, ipus, micro_batches, of_model, schedule):
    model = NormModel(places, micro_batches, **of_model)
    with programs_for("gpu" if places == STRETCHED else "cpu"):
        assert_state_loss_and_gradients_equal_the_twins(model, model.pipeline(ipus, schedule))


def test_a_concurrent_stage_may_split_its_state():
    def fn(p, x, mb, *, state):
        return Outputs(mb @ p, state=state + lax.axis_index("ipu") + 1.0)

    stages = [
        Stage(
            fn, params="w", state="s", ipu=ALL_IPUS, reference=lambda p, x, mb, *, state: Outputs(mb @ p, state=state)
        ),
        Stage(lambda p, x, mb: jnp.mean(x), ipu=1),
    ]
    pipeline = Pipeline(
        stages, gradient_accumulation=2, specs={"w": PartitionSpec()}, state_specs={"s": PartitionSpec("ipu")}
    )
    params, state = pipeline.shard({"w": normal(D, D)}), pipeline.shard_state({"s": np.zeros(3, np.float32)})
    _, _, new = pipeline.value_and_grad(params, normal(2, ROWS, D), state)
    np.testing.assert_array_equal(pipeline.unshard(new)["s"], [2, 2, 4])  # two micro-batches; 2 + 1 numbers an IPU


PLAIN = Stage(lambda p, x, mb: mb.mean())
RANDOM = Stage(lambda p, x, mb, *, key: mb.mean(), random=True, name="r")
HOLDING = Stage(lambda p, x, mb, *, state: Outputs(mb.mean(), state=state), state="s")
METHODS = "value_and_grad", "loss"
ZEROS, KEY = {"s": np.zeros(3, np.float32)}, jax.random.key(0)


def called(stage: Stage, method: str = "value_and_grad", *, state: Any = None, key: Any = None) -> Any:
    pipeline = Pipeline([stage])
    return lambda: getattr(pipeline, method)(pipeline.shard({}), np.ones((1, 2)), state, key)


def renewing(new: Any) -> Any:
    """Return a call of a stage that returns `new(state)` as its state."""
    stage = Stage(lambda p, x, mb, *, state: Outputs(mb.mean(), state=new(state)), state="s", name="one")
    return called(stage, state=Pipeline([stage]).shard_state(ZEROS))


RENEWED = "stage 'one' got state float32[3] and returns ", "with the same tree, shapes and dtypes"


@refusals(
    (renewing(lambda s: None), "returns None:", *RENEWED),
    (renewing(lambda s: s[:1]), "returns float32[1]:", *RENEWED),
    (renewing(lambda s: s.astype(jnp.int32)), "returns int32[3]:", *RENEWED),
    (renewing(lambda s: {"a": s}), "returns {'a': 'float32[3]'}:", *RENEWED),
    (called(PLAIN, state=Pipeline([HOLDING]).shard_state(ZEROS)), "state was given", "no stage holds", "state='name'"),
    (called(PLAIN, key=KEY), "a key was given", "no stage takes one", "random=True"),
    *((called(RANDOM, method), "stage 'r' takes a random key", "jax.random.key(...)") for method in METHODS),
    *((called(HOLDING, method), "state is missing", "pipeline.shard_state({...})", "'s'") for method in METHODS),
    (called(HOLDING, state=ZEROS), "state is a dict", "what pipeline.shard_state(...) returns"),
    (called(RANDOM, key=0), "key=0 is not one typed key", "jax.random.key(seed)"),
    (lambda: Pipeline([HOLDING, HOLDING]), "state 's'", "named by two stages", "give each stage its own"),
)
def test_state_and_keys_that_do_not_fit_are_refused(call, holds):
    with refused(*holds):
        call()

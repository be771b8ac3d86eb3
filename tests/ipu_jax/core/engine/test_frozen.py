"""Test that frozen weights get no gradient and cost none, and weights of several dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from support.against_plain import assert_equals_plain, bubbles_hold_nan, stages_at  # noqa: F401 (a fixture)
from support.dense import largest_relative_error
from support.layers import ROWS, D, loss_layer, normal
from support.refusals import refusals, refused


def frozen_pipeline(frozen: Any, schedule: str = "grouped", places: tuple[int | None, ...] = (0, 1)) -> Pipeline:
    def first(p, x, mb):
        return jnp.tanh(mb["x"] @ p["w"] + p["b"]) * p["scale"][p["row"]]

    stages, specs = stages_at(places, [first, loss_layer], "ab")
    return Pipeline(
        stages, gradient_accumulation=3, frozen=frozen, schedule=schedule, specs=specs, mesh=make_mesh(1, 2)
    )


MIXED = {
    "a": {
        "w": normal(D, D),
        "b": jnp.asarray(normal(D), jnp.bfloat16),
        "scale": normal(2, D),
        "row": np.ones((), np.int32),
    },
    "b": {"w": normal(D, D, seed=4)},
}
INT = {"w": False, "b": False, "scale": False, "row": True}


@pytest.mark.fast("frozen1-learning1-places2-zb-h1")
@pytest.mark.parametrize("schedule", ["grouped", "zb-h1"])
@pytest.mark.parametrize("places", [(0, 1), (None, 1), (0, None), (0, 0)])
@pytest.mark.parametrize(
    ("frozen", "learning"),
    [
        ({"a": INT}, {"a": ["w", "b", "scale"], "b": ["w"]}),
        ({"a": {**INT, "w": True}}, {"a": ["b", "scale"], "b": ["w"]}),
        ({"a": True}, {"b": ["w"]}),
        ({"a": True, "b": True}, {}),
        ({"a": INT, "b": True}, {"a": ["w", "b", "scale"]}),
    ],
)
def test_frozen_leaves_get_no_gradient_and_the_others_theirs(frozen, learning, places, schedule):
    pipeline = frozen_pipeline(frozen, schedule, places)
    params = pipeline.shard(MIXED)
    batch = {"x": normal(3, ROWS, D, seed=1), "y": normal(3, ROWS, D, seed=2)}
    loss, gradients = pipeline.value_and_grad(params, batch)

    def twin(chosen):
        a, b = ({**MIXED[g], **chosen.get(g, {})} for g in "ab")
        h = jnp.tanh(batch["x"] @ a["w"] + a["b"]) * a["scale"][1]
        return jnp.mean((h @ b["w"] - batch["y"]) ** 2)

    expected, of_chosen = jax.value_and_grad(twin)(
        {g: {n: MIXED[g][n] for n in names} for g, names in learning.items()}
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for group, leaves in pipeline.unshard(gradients).items():
        for name, gradient in leaves.items():
            assert gradient.dtype == MIXED[group][name].dtype
            if name in learning.get(group, []):
                bound = 1e-2 if gradient.dtype == jnp.bfloat16 else 1e-5
                assert largest_relative_error([gradient], [of_chosen[group][name]]) < bound
            else:
                assert not np.asarray(gradient).any()


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "schedule"), [("z", "grouped"), ("a", "zb-h1")])
def test_of_two_groups_that_run_as_one_the_other_learns_in_whatever_order_they_are_named(frozen, schedule):
    stages = [
        Stage(lambda p, x, mb: jnp.tanh(mb["x"] @ p["w"]), params="z", ipu=0),
        Stage(lambda p, x, mb: jnp.sin(x @ p["w"]), params="a", ipu=0),
        Stage(loss_layer, params="b", ipu=1),
    ]
    pipeline = Pipeline(stages, gradient_accumulation=3, frozen={frozen: True}, schedule=schedule)
    params = {name: {"w": normal(D, D, seed=seed)} for seed, name in enumerate("zab")}
    batch = {"x": normal(3, ROWS, D, seed=4), "y": normal(3, ROWS, D, seed=5)}

    def twin(params):
        z, a, b = (jax.lax.stop_gradient(params[name]["w"]) if name == frozen else params[name]["w"] for name in "zab")
        return jnp.mean((jnp.sin(jnp.tanh(batch["x"] @ z) @ a) @ b - batch["y"]) ** 2)

    assert_equals_plain(pipeline, params, batch, twin)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4", "bool", "complex64"])
def test_frozen_weights_may_be_of_any_dtype(dtype):
    def scaled(p, x, mb):
        return jnp.tanh(mb["x"] @ (jnp.real(p["scale"]).astype("float32") * p["w"]))

    stages = [Stage(scaled, params="a"), Stage(loss_layer, params="b", ipu=1)]
    pipeline = Pipeline(stages, gradient_accumulation=2, frozen={"a": {"w": False, "scale": True}})
    scale = jnp.arange(D * D).reshape(D, D) % 3
    params = {"a": {"w": normal(D, D), "scale": scale.astype(dtype)}, "b": {"w": normal(D, D, seed=1)}}
    batch = {"x": normal(2, ROWS, D, seed=2), "y": normal(2, ROWS, D, seed=3)}
    loss, gradients = pipeline.value_and_grad(pipeline.shard(params), batch)

    def twin(a, b):
        h = jnp.tanh(batch["x"] @ (jnp.real(params["a"]["scale"]).astype("float32") * a))
        return jnp.mean((h @ b - batch["y"]) ** 2)

    expected, of_both = jax.value_and_grad(twin, argnums=(0, 1))(params["a"]["w"], params["b"]["w"])
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    found = pipeline.unshard(gradients)
    assert largest_relative_error([found["a"]["w"], found["b"]["w"]], list(of_both)) < 1e-5
    assert found["a"]["scale"].dtype == dtype
    np.testing.assert_array_equal(pipeline.unshard(pipeline.shard(params))["a"]["scale"], params["a"]["scale"])


@pytest.mark.slow
def test_a_frozen_group_costs_neither_an_accumulator_nor_its_part_of_the_backward():
    def compiled(frozen):
        stages = [
            Stage(lambda p, x, mb: jnp.tanh(mb["x"] @ p["w"]), params="a", ipu=0),
            Stage(loss_layer, params="b", ipu=1),
        ]
        pipeline = Pipeline(stages, gradient_accumulation=2, frozen=frozen)
        params = pipeline.shard({"a": {"w": normal(1024, 64)}, "b": {"w": normal(64, 64)}})
        batch = {"x": normal(2, ROWS, 1024), "y": normal(2, ROWS, 64)}
        return jax.jit(pipeline.value_and_grad).lower(params, batch)

    learning, frozen = compiled({}), compiled({"a": True})
    count = lambda lowered: lowered.as_text().count("stablehlo.dot_general")
    assert count(learning) == 5  # 2 forward, dW of both, dx of the second
    assert count(frozen) <= 4  # jax 0.12 also finds that dx is not needed
    of = lambda lowered: lowered.compile().memory_analysis().temp_size_in_bytes
    assert of(learning) - of(frozen) > 0.9 * 4 * 1024 * 64


# weights that another pipeline sharded


def two_stages(frozen: Any) -> Pipeline:
    """Return a model of unlike widths, so that leaves share flat slots, with an unevenly split concurrent head."""
    stages = [
        Stage(lambda p, x, mb: jnp.tanh(mb["x"] @ p["w"] + p["b"]), params="a", ipu=0),
        Stage(lambda p, x, mb: jnp.tanh(x @ p["w"]), params="b", ipu=1),
        Stage(lambda p, x, mb: jax.lax.psum(jnp.sum((x @ p["w"]) ** 2), "ipu") / ROWS, params="head", ipu=ALL_IPUS),
    ]
    return Pipeline(
        stages, gradient_accumulation=2, frozen=frozen, specs={"head": PartitionSpec(None, "ipu")}, mesh=make_mesh(1, 2)
    )


UNLIKE = {
    "a": {"w": normal(D, 5), "b": normal(5)},
    "b": {"w": normal(5, 3, seed=4)},
    "head": {"w": normal(3, 7, seed=5)},
}


def test_what_another_pipeline_froze_costs_as_much_as_if_this_one_had_sharded_it():
    batch = {"x": normal(2, ROWS, D, seed=1)}
    first, second = two_stages({"a": True}), two_stages({})
    of_first, of_second = first.shard(UNLIKE), second.shard(UNLIKE)
    for pipeline in (first, second):
        own, others = (of_first, of_second) if pipeline is first else (of_second, of_first)
        of_own, of_others = (pipeline.report(params, batch, compile=False) for params in (own, others))
        assert of_own == of_others
    # the accumulators of a/w and a/b, and of b/w in their slots
    assert second.report(of_first, batch, compile=False) != first.report(of_first, batch, compile=False)


def handed_on(frozen: Any, method: str = "value_and_grad") -> Any:
    """Call a pipeline with weights that another one sharded, which froze the integers."""
    params = frozen_pipeline({"a": INT}).shard(MIXED)
    batch = {"x": normal(3, ROWS, D, seed=1), "y": normal(3, ROWS, D, seed=2)}
    return getattr(frozen_pipeline(frozen), method)(params, batch)


FLOATING = "params['a']['row'] is int32", "must be floating", "freeze it, or carry other data in the batch"


@refusals(
    (
        lambda: frozen_pipeline({"c": True}).shard(MIXED),
        "frozen for 'c'",
        "no stage names such a group",
        "there are 'a', 'b'",
    ),
    (lambda: frozen_pipeline({"a": 1}).shard(MIXED), "frozen['a'] holds 1", "give True, False, or a tree of them"),
    (lambda: frozen_pipeline({}).shard(MIXED), *FLOATING),
    (lambda: handed_on({}), *FLOATING),
    (lambda: handed_on({}, "loss"), *FLOATING),
    (lambda: handed_on({}, "report"), *FLOATING),
    (lambda: handed_on({"a": {"w": True}}), "frozen['a'] does not fit", "it says nothing for b"),
)
def test_a_frozen_that_does_not_fit_is_refused(call, holds):
    with refused(*holds):
        call()

"""Test the pipeline as a user sees it: bad input, aux, optimizers, and what it compiles."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from ipu_jax.core.layout import rule
from ipu_jax.core.schedules import make_schedule
from support.dense import chain
from support.refusals import compilations, refusals, refused


def test_a_compilation_is_noted():
    before = len(compilations)
    jax.jit(lambda x: x * 3 + 1)(np.ones(17)).block_until_ready()
    assert len(compilations) > before


def body(w, x, mb):
    return jnp.tanh((mb["x"] if x is None else x) @ w)


def loss(w, x, mb):
    return jnp.mean(((mb["x"] if x is None else x) @ w) ** 2)


def pipeline_of(stages: Any, **options: Any) -> Pipeline:
    return Pipeline(stages, **options)


def two_stages(*, groups: str = "ab", ipus: Any = (0, 1), **options: Any) -> Pipeline:
    first, last = groups
    return Pipeline([Stage(body, params=first, ipu=ipus[0]), Stage(loss, params=last, ipu=ipus[1])], **options)


def weights(*names: str) -> dict[str, np.ndarray]:
    return {name: np.eye(4, dtype=np.float32) for name in names}


def batch(*lead: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(*lead, 3, 4)).astype(np.float32)}


# bad input


def mesh_of(shape: tuple[int, ...], *axes: str) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, axes, devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def scheduled(**made_for: Any) -> Pipeline:
    return two_stages(schedule=make_schedule("grouped", **made_for), gradient_accumulation=4)


MADE_FOR = "the stages stand on (0, 1), the mesh has 2 IPUs and gradient_accumulation=4"


@refusals(
    (lambda: pipeline_of([]), "stages=()", "at least one Stage"),
    (lambda: pipeline_of(3), "stage 0 is 3", "give a list of Stage("),
    (lambda: pipeline_of(body), "stage 0 is <function body", "give a list of Stage("),
    (lambda: pipeline_of([body]), "stage 0 is <function body", "give a list of Stage("),
    (lambda: pipeline_of([Stage(body, params="a"), None]), "stage 1 is None", "give a list of Stage("),
    (lambda: two_stages(mesh=3), "mesh=3", "not a mesh", "make_mesh(replicas, ipus_per_replica)"),
    (lambda: two_stages(mesh=(1, 2)), "mesh=(1, 2)", "not a mesh", "make_mesh(replicas, ipus_per_replica)"),
    (lambda: two_stages(mesh="2"), "mesh='2'", "not a mesh", "make_mesh(replicas, ipus_per_replica)"),
    *(
        (lambda shape=shape, axes=axes: two_stages(mesh=mesh_of(shape, *axes)), f"axes {axes}", "make_mesh(replicas, ")
        for shape, axes in (
            ((2,), ("ipu",)),
            ((2,), ("x",)),
            ((1, 2), ("ipu", "replica")),
            ((1, 2, 1), ("a", "b", "c")),
        )
    ),
    *(
        (lambda given={name: value}: two_stages(**given), f"{name}={value!r}", "which group", "{'group': ...}")
        for name in ("specs", "state_specs", "frozen")
        for value in (3, True, P("ipu"), ["a"])
    ),
    (lambda: two_stages(gradient_accumulation=0), "gradient_accumulation=0", "count", "at least 1"),
    (lambda: two_stages(schedule="groupd"), "schedule='groupd'", "'grouped'? ", "Choose one of", "'auto'"),
    (lambda: two_stages(schedule=None), "schedule=None", "is unknown: choose one of 'sequential'"),
    (lambda: two_stages(reduction="average"), "reduction='average'", "give 'mean'", "'sum'"),
    (lambda: two_stages(ipus=(0, 2), mesh=make_mesh(1, 2)), "stage 1, 'b', is on IPU 2", "IPUs 0 to 1", "wider"),
    (lambda: two_stages(ipus=(0, 7), mesh=make_mesh(1, 2)), "stage 1, 'b', is on IPU 7", "IPUs 0 to 1", "wider"),
    (lambda: two_stages(ipus=(0, 8)), "ipus_per_replica=9 needs 9 IPUs", "configure(9)"),
    (lambda: two_stages(groups="tt"), "group 't' is used on IPU 0 and on IPU 1", "its own group"),
    (lambda: two_stages(groups="tt", ipus=(ALL_IPUS, 1)), "'t' is used on ALL_IPUS and on IPU 1", "its own group"),
    (lambda: two_stages(groups="tt", ipus=(0, ALL_IPUS)), "'t' is used on IPU 0 and on ALL_IPUS", "its own group"),
    (lambda: two_stages(specs={"b": P()}), "specs for 'b'", "only groups of concurrent stages"),
    (lambda: two_stages(specs={"typo": P()}), "specs for 'typo'", "no stage names such a group", "there are 'a'"),
    (lambda: two_stages(specs={"b": P(), "a": P()}), "specs for 'a', 'b'", "only groups of concurrent stages"),
    (lambda: scheduled(ipus=3, gradient_accumulation=4), "(0, 1, 2) on 3 IPUs with 4 micro-batches", MADE_FOR),
    (lambda: scheduled(ipus=2, gradient_accumulation=3), "(0, 1) on 2 IPUs with 3 micro-batches", MADE_FOR),
    (lambda: scheduled(placement=(1, 0), gradient_accumulation=4), "(1, 0) on 2 IPUs with 4 micro-batches", MADE_FOR),
    (lambda: scheduled(placement=(0, 1), ipus=4, gradient_accumulation=4), "(0, 1) on 4 IPUs", MADE_FOR, "for these"),
    (
        lambda: scheduled(placement=(0, None), ipus=2, gradient_accumulation=4),
        "(0, None) on 2 IPUs",
        MADE_FOR,
        "for these",
    ),
    (lambda: concurrent().shard(weights("w")), "group 'w' is concurrent", "no PartitionSpecs", "specs={'w': "),
    (lambda: two_stages().shard(weights("a", "c")), "missing 'b'; unknown 'c'", "the groups 'a', 'b'"),
    (
        lambda: two_stages().shard(weights("a") | {"b": np.ones((4, 4), np.int32)}),
        "params['b'] is int32",
        "floating",
        "freeze it",
    ),
)
def test_a_pipeline_that_there_cannot_be_is_refused(call, holds):
    with refused(*holds):
        call()


def concurrent(spec=None, ipus=2, replicas=1) -> Pipeline:
    stage = Stage(lambda w, x, mb: jnp.mean(mb["x"] @ w), params="w", ipu=ALL_IPUS)
    return Pipeline([stage], mesh=make_mesh(replicas, ipus), specs=None if spec is None else {"w": spec})


@pytest.mark.parametrize("spec", [P(), P(None), P(None, None)])
def test_a_leaf_that_every_ipu_holds_gets_its_whole_gradient_however_its_spec_is_written(spec):
    stage = Stage(lambda w, x, mb: jnp.mean(mb @ w), params="w", ipu=ALL_IPUS)
    pipeline = Pipeline([stage], mesh=make_mesh(1, 2), specs={"w": spec})
    rows = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    _, gradients = pipeline.value_and_grad(pipeline.shard({"w": np.ones((3, 2), np.float32)}), rows)
    # of the mean of 4 x 2 numbers, a column of rows stands in 8ths in both
    np.testing.assert_allclose(pipeline.unshard(gradients)["w"], [[18 / 8] * 2, [22 / 8] * 2, [26 / 8] * 2])


KEY = jax.random.key(0)


def handing_on_a_key(where: str) -> Any:
    """Return a call of a pipeline whose first stage returns its key in its y or its aux."""

    def first(w, x, mb, *, key):
        return Outputs((mb["x"] @ w, key) if where == "y" else mb["x"] @ w, aux=None if where == "y" else {"of": key})

    stages = [Stage(first, params="a", random=True), Stage(lambda w, x, mb: jnp.mean(x[0] @ w), params="b", ipu=1)]
    return lambda method: getattr(Pipeline(stages), method)(
        Pipeline(stages).shard(weights("a", "b")), batch(1), key=KEY
    )


def given(params: Any) -> Any:
    """Return a call of two stages with weights that another pipeline sharded, or none did."""
    return lambda method: getattr(two_stages(), method)(params(), batch(1))


def on(batch: Any, m: int = 4, *, replicas: int = 1) -> Any:
    def call(method):
        pipeline = two_stages(mesh=make_mesh(replicas, 2), gradient_accumulation=m)
        return getattr(pipeline, method)(pipeline.shard(weights("a", "b")), batch)

    return call


def by_other_specs(method: str) -> Any:
    params = concurrent(P(None, "ipu")).shard(weights("w"))
    return jax.eval_shape(getattr(concurrent(P()), method), params, batch(1))


OTHERS = "sharded by a pipeline with other groups or IPUs", "shard them with this one"
IN_ALL, OF_REPLICAS = "(gradient_accumulation, ...) = (4, ...)", "(replicas, gradient_accumulation, ...) = (2, 4, ...)"


@pytest.mark.parametrize("method", ["value_and_grad", "loss"])
@refusals(
    (handing_on_a_key("y"), "stage 'a' returns a random key, key<fry>, in its y", "jax.random.key_data(key)"),
    (handing_on_a_key("aux"), "stage 'a' returns a random key, key<fry>, in its aux", "jax.random.key_data(key)"),
    (given(lambda: weights("a", "b")), "params is a dict", "pipeline.shard(...)"),
    (given(lambda: Pipeline([Stage(loss, params="c")]).shard(weights("c"))), *OTHERS),
    (given(lambda: two_stages(mesh=make_mesh(1, 4)).shard(weights("a", "b"))), *OTHERS),
    (given(lambda: two_stages(ipus=(1, 0)).shard(weights("a", "b"))), *OTHERS),
    (by_other_specs, "sharded by a pipeline with other specs", "shard them with this one"),
    (on(batch(3)), "batch['x'] has shape (3, 3, 4)", IN_ALL),
    (on({"x": np.float32(1)}), "batch['x'] has shape ()", IN_ALL),
    (on({"x": 1.0}), "batch['x'] is 1.0", "must be an array of numbers"),
    (on([[1, 2]], 1), "batch[0][0] is 1", "must be an array of numbers", "np.asarray(batch)"),
    (on(batch(4) | {"y": [np.ones((2, 4))]}), "batch['y'][0] has shape (2, 4)", IN_ALL),
    (on(batch(4), replicas=2), "batch['x'] has shape (4, 3, 4)", OF_REPLICAS),
    (on(batch(4, 2), replicas=2), "batch['x'] has shape (4, 2, 3, 4)", OF_REPLICAS),
    *((on(empty), "batch has no arrays", "nothing to read") for empty in (None, {}, [], {"x": None})),
)
def test_arguments_that_do_not_fit_a_pipeline_are_refused(call, holds, method):
    with refused(*holds):
        call(method)


def test_params_on_other_devices():
    params = concurrent(P(), replicas=2).shard(weights("w"))
    pipeline = concurrent(P())
    with pytest.raises(ValueError, match="incompatible devices"):
        pipeline.value_and_grad(params, batch(1))


def test_weights_of_another_tree_than_the_stage_reads():
    pipeline = two_stages()
    params = pipeline.shard({"a": {"w": np.eye(4, dtype=np.float32)}, "b": np.eye(4, dtype=np.float32)})
    before = len(compilations)
    with pytest.raises(TypeError) as caught:
        pipeline.value_and_grad(params, batch(1))
    assert "raised in stage 0, 'a'" in caught.value.__notes__
    assert len(compilations) == before


def test_a_refused_call_leaves_the_pipeline_as_it_was():
    pipeline = two_stages(gradient_accumulation=2)
    params = pipeline.shard(weights("a", "b"))
    with pytest.raises(ValueError, match=r"^batch\['x'\] has shape"):
        pipeline.value_and_grad(params, batch(3))
    value, _ = pipeline.value_and_grad(params, batch(2))
    assert value == pytest.approx(float(np.mean(np.tanh(batch(2)["x"]) ** 2)))


# what it gives


def test_without_a_mesh_there_is_one_replica_on_the_ipus_that_the_stages_name():
    assert dict(two_stages().mesh.shape) == {"replica": 1, "ipu": 2}
    assert dict(Pipeline([Stage(loss, params="b", ipu=ALL_IPUS)]).mesh.shape) == {"replica": 1, "ipu": 1}


def test_gradients_lie_where_the_params_lie_and_padding_gets_none():
    model = chain((None, 0, 1, None), 2, like=False, replicas=2)
    pipeline = model.pipeline(4)
    params = pipeline.shard(model.params)
    _, gradients = pipeline.value_and_grad(params, model.batch)
    assert gradients.layout == params.layout
    for gradient, weight in zip(jax.tree.leaves(gradients), jax.tree.leaves(params), strict=True):
        assert gradient.sharding.is_equivalent_to(weight.sharding, weight.ndim)
        assert (gradient.shape, gradient.dtype) == (weight.shape, weight.dtype)
    whole = pipeline.shard(pipeline.unshard(gradients))  # zeros wherever there is padding, or an IPU without stages
    jax.tree.map(np.testing.assert_array_equal, gradients, whole)


def test_one_program_is_compiled_and_serves_every_call():
    pipeline = two_stages(gradient_accumulation=3)
    params, data = pipeline.shard(weights("a", "b")), batch(3)
    on_device = jax.tree.map(jnp.asarray, data)
    before = len(compilations)
    _, gradients = pipeline.value_and_grad(params, data)
    assert len(compilations) == before + 1
    pipeline.value_and_grad(gradients, data)
    pipeline.value_and_grad(params, on_device)
    assert len(compilations) == before + 1


def test_a_pipeline_prints_as_its_stages():
    first = Stage(body, params="a", state="seen", random=True, evaluate=body)
    last = Stage(loss, params="b", ipu=ALL_IPUS, takes=("x", "y"), name="the head", predict=body, reference=body)
    pipeline = Pipeline([first, Stage(body, ipu=1), last], mesh=make_mesh(2, 2), schedule="auto", specs={"b": P()})
    assert str(pipeline) == (
        "Pipeline of 3 stages on 2 replicas x 2 IPUs, schedule 'auto', 1 micro-batch, reduction 'mean'\n"
        "  0  a         IPU 0     params 'a', state 'seen', random, evaluate\n"
        "  1  body      IPU 1\n"
        "  2  the head  all IPUs  params 'b', takes 'x', 'y', predict, reference"
    )


# many steps


def test_a_step_may_donate_its_params_outside_of_jit_too():
    pipeline = two_stages()
    params, data = pipeline.shard(weights("a", "b")), batch(1)
    update = jax.jit(lambda p, g: jax.tree.map(lambda p, g: p - 0.1 * g, p, g), donate_argnums=(0, 1))
    values = []
    for _ in range(20):
        value, gradients = pipeline.value_and_grad(params, data)
        params = update(params, gradients)
        values.append(value)
    assert all(later < earlier for earlier, later in itertools.pairwise(values))


def test_a_layout_is_checked_once(monkeypatch):
    """A step's calls get the weights in the same layout again and again."""
    pipeline = two_stages()
    params = pipeline.shard(weights("a", "b"))
    pipeline.loss(params, batch(1))
    for name in ("with_frozen", "specs_of_group"):
        monkeypatch.setattr(rule, name, None)
    pipeline.loss(params, batch(1))
    with pytest.raises(TypeError, match="not callable"):
        pipeline.loss(pipeline.shard(weights("a", "b")), batch(1))  # another layout, if an equal one

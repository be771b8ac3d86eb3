"""Test pipelines on meshes with further axes against dense twins in plain jax on one device.

XLA may split arrays, but no result may change: loss, gradients, state and predictions equal the twin's, and weights and
gradients are split as the specs say.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step, verify
from ipu_jax.core.engine.stash import Stash
from ipu_jax.core.mesh.axes import names_further
from ipu_jax.steps import replicate
from support.against_plain import bubbles_hold_nan
from support.annotated import Annotated, B, D, F, T, V, annotated, cross_entropy, mlp, split
from support.dense import chain, largest_relative_error
from support.layers import normal
from support.platforms import programs_for
from support.refusals import refusals, refused

__all__ = ["bubbles_hold_nan"]

TWO = ("context", "tensor")


def mesh_of(shape: tuple[int, ...], *axes: str) -> Any:
    return make_mesh(*shape[:2], **dict(zip(axes or ("tensor",), shape[2:], strict=True)))


def assert_equals_its_twin(model: Annotated, pipeline: Pipeline) -> Any:
    """Compare a step with the model's dense twin, and return the gradients as they lie on the mesh."""
    loss, gradients = pipeline.value_and_grad(pipeline.shard(model.params), model.batch)
    expected_loss, expected = model.twin()
    assert largest_relative_error(loss, expected_loss) < 1e-5
    found = pipeline.unshard(gradients)
    assert largest_relative_error(found, expected) < 1e-5
    assert jax.tree.map(lambda g: g.dtype, found) == jax.tree.map(lambda w: w.dtype, model.params)
    return gradients


def assert_lie_like(params: Any, found: Any) -> None:
    """Assert that arrays are split as the weights are, where these are split over further axes."""
    for array, given in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        if names_further(given.sharding.spec):
            assert array.sharding.is_equivalent_to(given.sharding, array.ndim), (array.sharding, given.sharding)


def shardings_of(sharded: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return, per array, its shape and its index on each device: what a sharding says, however it is written."""
    return [
        (leaf.shape, {d.id: str(index) for d, index in leaf.sharding.devices_indices_map(leaf.shape).items()})
        for leaf in jax.tree.leaves(sharded)
    ]


MESHES = ((1, 2, 2), (2, 2, 2), (1, 2, 4), (1, 4, 2))
SCHEDULES = ("1f1b", "zb-h1", "grouped", "sequential")
KINDS = ("mlp", "heads", "sequence")
CROSSINGS = [
    pytest.param(*case, id="-".join(map(str, (*case[0], *case[1:]))))
    for case in itertools.product(MESHES, SCHEDULES, KINDS)
]


@pytest.mark.fast("1-2-2-1f1b-mlp")
@pytest.mark.parametrize(("shape", "schedule", "kind"), CROSSINGS)
def test_a_step_equals_its_dense_twin(shape, schedule, kind):
    model = annotated(kind, shape[1], replicas=shape[0])
    pipeline = model.pipeline(mesh_of(shape), schedule=schedule)
    assert_lie_like(pipeline.shard(model.params), assert_equals_its_twin(model, pipeline))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "schedule", "kind"), CROSSINGS[::5])
def test_verify_the_loss_and_predictions_are_exact(shape, schedule, kind):
    model = annotated(kind, shape[1], replicas=shape[0])
    pipeline = model.pipeline(mesh_of(shape), schedule=schedule)
    params = pipeline.shard(model.params)
    report = verify(pipeline, params, model.batch, rtol=1e-6)
    assert report.loss_error < 1e-6
    assert report.worst[1] < 1e-6
    assert largest_relative_error(pipeline.loss(params, model.batch), jax.jit(model.loss)(model.params)) < 1e-6
    logits = pipeline.predict(params, model.batch)
    assert largest_relative_error(logits, jax.jit(model.logits)(model.params)) < 1e-5


FURTHER = {
    "both": ("both", (1, 2, 2, 2), TWO, "1f1b", "auto"),
    "both, zb-h1": ("both", (1, 2, 2, 2), TWO, "zb-h1", "auto"),
    "tuple": ("tuple", (1, 2, 2, 2), TWO, "zb-h1", "none"),
    "tuple, grouped": ("tuple", (1, 2, 2, 2), TWO, "grouped", "auto"),
    "fsdp": ("fsdp", (1, 2, 2), ("tensor",), "1f1b", "all"),
    "fsdp, zb-h1": ("fsdp", (1, 2, 4), ("tensor",), "zb-h1", "all"),
    "fsdp, grouped": ("fsdp", (2, 2, 2), ("tensor",), "grouped", "none"),
    "three IPUs": ("mlp", (1, 3, 2), ("tensor",), "1f1b", "all"),
    "plain": ("plain", (1, 2, 2), ("tensor",), "1f1b", "auto"),
    "one IPU": ("mlp", (1, 1, 4), ("tensor",), "1f1b", "auto"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape", "axes", "schedule", "recompute"), FURTHER.values(), ids=FURTHER)
def test_other_ways_to_split_equal_their_dense_twins(kind, shape, axes, schedule, recompute):
    """Test two axes at once, a dim over two axes, weights that are whole only where they are used, and no spec."""
    model = annotated(kind, shape[1], replicas=shape[0])
    stages = tuple(dataclasses.replace(stage, recompute=recompute) for stage in model.stages)
    model = dataclasses.replace(model, stages=stages)
    pipeline = model.pipeline(mesh_of(shape, *axes), schedule=schedule)
    params = pipeline.shard(model.params)
    assert_lie_like(params, assert_equals_its_twin(model, pipeline))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["grouped", "1f1b", "zb-h1"])
def test_rings_keep_the_split_of_their_values(schedule):
    model = annotated("mlp", 2)
    pipeline = model.pipeline(mesh_of((1, 2, 4)), schedule=schedule)
    text = str(jax.jit(pipeline.value_and_grad).lower(pipeline.shard(model.params), model.batch).compile().as_text())
    rings = lambda *shape: re.search(rf"f32\[[23],{','.join(map(str, shape))}\]", text)
    assert rings(B, T, F // 4), "a ring of split values"
    assert rings(B // 4, T, D), "a ring of values that are whole on each device"
    assert not rings(B, T, F)


def stored_by(pipeline: Pipeline, params: Any, batch: Any) -> dict[str, Any]:
    """Return how each buffer's rows are split where they are stored, if the engine splits them."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    plan = pipeline.placement.plan(pipeline.shard_shapes(params), shapes, None, None)
    return {buffer.name: buffer.stored.split for buffer in Stash(plan)._rows if buffer.stored}


WHOLE = f"float32:{B}x{T}x{D}"
OF_TENSOR, OF_CONTEXT = (("tensor",), (), ()), (("tensor",), ("context",), ())
STORED_SPLIT = {  # the block, further axes, schedule, platform, and the split of what is stored split, by hand
    # IPU 1 keeps x and x after its block for the head; with a W both keep dy
    "1f1b": ("mlp", ("tensor",), "1f1b", "cpu", {f"stash:{WHOLE}": OF_TENSOR, f"stash:{WHOLE}:1": OF_TENSOR}),
    "zb-h1": (
        *("mlp", ("tensor",), "zb-h1", "cpu"),
        {f"stash:{WHOLE}": OF_TENSOR, f"stash:{WHOLE}:1": OF_TENSOR, f"weight:{WHOLE}": OF_TENSOR},
    ),
    "the dims of another axis stay": (
        *("both", TWO, "1f1b", "cpu"),
        {f"stash:{WHOLE}": OF_CONTEXT, f"stash:{WHOLE}:1": OF_CONTEXT},
    ),
    "over all axes": (
        *("tuple", TWO, "1f1b", "cpu"),
        {f"stash:{WHOLE}": ((*TWO,), (), ()), f"stash:{WHOLE}:1": ((*TWO,), (), ())},
    ),
    "nobody says it": ("plain", ("tensor",), "zb-h1", "cpu", {}),
    "all are split": ("fsdp", ("tensor",), "1f1b", "cpu", {}),
    "chips: a short ring": ("mlp", ("tensor",), "1f1b", "tpu", {}),
    "chips: a long ring": (
        "mlp",
        ("tensor",),
        "gpipe",
        "tpu",
        {f"stash:{WHOLE}": OF_TENSOR, f"stash:{WHOLE}:1": OF_TENSOR},
    ),
}


@pytest.mark.fast("1f1b", "zb-h1", "chips: a short ring")
@pytest.mark.parametrize(("kind", "axes", "schedule", "platform", "splits"), STORED_SPLIT.values(), ids=STORED_SPLIT)
def test_what_is_whole_is_stored_split(kind, axes, schedule, platform, splits):
    model = annotated(kind, 2)
    with programs_for(platform):
        pipeline = model.pipeline(mesh_of((1, 2, *[2] * len(axes)), *axes), schedule=schedule)
        assert stored_by(pipeline, model.params, model.batch) == splits


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "schedule"), [((1, 2, 2), "1f1b"), ((1, 4, 2), "zb-h1"), ((1, 4, 2), "grouped")])
def test_a_concurrent_head_is_split_by_hand_over_ipus_and_by_xla_over_tensor(shape, schedule):
    model = annotated("mlp", shape[1], concurrent_head=True)
    pipeline = model.pipeline(mesh_of(shape), schedule=schedule)
    params = pipeline.shard(model.params)
    assert_lie_like(params, assert_equals_its_twin(model, pipeline))
    (leaf,) = params.layout.group("head").leaves
    head = params.arrays[leaf.array]
    columns = -(-model.params["head"].shape[1] // shape[1])
    assert {shard.data.shape for shard in head.addressable_shards} == {(D // 2, columns)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_a_step_is_as_exact_as_on_one_device(kind):
    model = annotated(kind, 2, dtype=jnp.bfloat16)
    wide = lambda leaf: leaf.astype(np.float32) if leaf.dtype == jnp.bfloat16 else leaf
    params, batch = jax.tree.map(wide, (model.params, model.batch))
    exact = dataclasses.replace(model, params=params, batch=batch).twin()
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b")
    loss, gradients = pipeline.value_and_grad(pipeline.shard(model.params), model.batch)
    found = pipeline.unshard(gradients)
    assert jax.tree.map(lambda g: g.dtype, found) == jax.tree.map(lambda w: w.dtype, model.params)
    errors = [largest_relative_error(one, exact) for one in ((loss, found), model.twin())]
    assert errors[0] < 1.5 * errors[1] < 0.1


@pytest.mark.slow
def test_stages_may_have_other_leaves_on_each_ipu():
    """IPU 0 has a narrow MLP and a gain, IPU 1 a wide MLP and a head; leaves that are not split share flat slots."""
    model = annotated("mlp", 2)
    wide = {"scale": normal(D, seed=1), "up": normal(D, 2 * F, seed=2), "down": normal(2 * F, D, seed=3)}
    gain = normal(1, 1, D, seed=4)

    def narrow(w, x, mb):
        return mlp(w, mb["x"]) * w["gain"]

    def dense(params, batch):
        first = params["block0"]
        x = batch["x"] + jnp.tanh((batch["x"] * first["scale"]) @ first["up"]) @ first["down"]
        x = x * first["gain"]
        second = params["block1"]
        return (x + jnp.tanh((x * second["scale"]) @ second["up"]) @ second["down"]) @ params["head"]

    params = model.params | {"block0": model.params["block0"] | {"gain": gain}, "block1": wide}
    specs = model.specs | {"block0": model.specs["block0"] | {"gain": P()}, "block1": {**model.specs["block1"]}}
    stages = (Stage(narrow, params="block0", ipu=0), *model.stages[1:])
    model = dataclasses.replace(model, stages=stages, params=params, specs=specs, dense=dense)
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b")
    placed = pipeline.shard(model.params)
    assert largest_relative_error(pipeline.unshard(placed), model.params) == 0
    by_shape = {array.shape: array.spec for array in placed.layout.arrays}
    halves, whole = P(None, "tensor"), P()
    assert by_shape[D, F] == by_shape[D, 2 * F] == by_shape[D, V] == halves
    assert {spec for shape, spec in by_shape.items() if len(shape) == 1} == {whole}
    assert_lie_like(placed, assert_equals_its_twin(model, pipeline))


@pytest.mark.slow
def test_a_state_can_be_split():
    model, mesh = annotated("mlp", 2), mesh_of((1, 2, 2))
    decay = 0.75

    def remembering(w, x, mb, *, state):
        hidden = split(jnp.tanh((mb["x"] * w["scale"]) @ w["up"]), P(None, None, "tensor"))
        mean = decay * state["mean"] + (1 - decay) * hidden.mean((0, 1))
        y = split(mb["x"] + (hidden + state["mean"]) @ w["down"], P())
        return Outputs(y, state={"mean": mean, "count": state["count"] + 1})

    stages = (Stage(remembering, params="block0", ipu=0, state="seen"), *model.stages[1:])
    pipeline = dataclasses.replace(model, stages=stages).pipeline(
        mesh, schedule="1f1b", state_specs={"seen": {"mean": P("tensor"), "count": P()}}
    )
    whole = {"seen": {"mean": normal(F, seed=1), "count": np.int32(3)}}

    def expected_of(params):
        """Go through the micro-batches one after the other."""
        mean, losses, w = whole["seen"]["mean"], [], params["block0"]
        for x, labels in zip(model.batch["x"], model.batch["labels"], strict=True):
            hidden = jnp.tanh((x * w["scale"]) @ w["up"])
            y = x + (hidden + jax.lax.stop_gradient(mean)) @ w["down"]
            z = y + jnp.tanh((y * params["block1"]["scale"]) @ params["block1"]["up"]) @ params["block1"]["down"]
            losses.append(optax.softmax_cross_entropy_with_integer_labels(z @ params["head"], labels).mean())
            mean = decay * mean + (1 - decay) * hidden.reshape(-1, F).mean(0)
        return sum(losses) / len(losses), mean

    placed = pipeline.shard_state(whole)
    assert largest_relative_error(pipeline.unshard(placed), whole) == 0
    assert {array.sharding.spec for array in placed.arrays} == {P("ipu", "tensor"), P("ipu")}
    loss, gradients, state = pipeline.value_and_grad(pipeline.shard(model.params), model.batch, placed)
    (expected_loss, mean), expected = jax.jit(jax.value_and_grad(expected_of, has_aux=True))(model.params)
    assert largest_relative_error(loss, expected_loss) < 1e-5
    assert largest_relative_error(pipeline.unshard(gradients), expected) < 1e-5
    assert_lie_like(placed, state)
    found = pipeline.unshard(state)["seen"]
    assert largest_relative_error(found["mean"], mean) < 1e-5
    assert found["count"] == 3 + model.micro_batches


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("tensor"), P(None, "tensor")], ids=["rows", "columns"])
def test_a_shared_group_can_be_split(spec):
    """The table is the embedding, which IPU 0 reads, and the head, which IPU 1 reads."""
    untied = annotated("mlp", 2)
    blocks = ("block0", "block1")
    embedding = Stage(lambda p, x, mb, *, shared: shared["table"][mb["ids"]], ipu=0, shared=("table",))
    body = [Stage(lambda w, x, mb: mlp(w, x), params=name, ipu=i) for i, name in enumerate(blocks)]
    head = Stage(
        lambda p, x, mb, *, shared: cross_entropy(x @ shared["table"].T, mb["labels"]), ipu=1, shared=("table",)
    )

    def dense(params, batch):
        x = jax.nn.one_hot(batch["ids"], V) @ params["table"]
        return untied.dense({name: params[name] for name in blocks} | {"head": params["table"].T}, {"x": x})

    params = {name: untied.params[name] for name in blocks} | {"table": normal(V, D, seed=1)}
    specs = {name: untied.specs[name] for name in blocks} | {"table": spec}
    stages = (embedding, *body, head)
    model = dataclasses.replace(untied, stages=stages, params=params, specs=specs, dense=dense)
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b")
    assert_lie_like(pipeline.shard(params), assert_equals_its_twin(model, pipeline))


@pytest.mark.slow
def test_frozen_leaves_can_be_split():
    model = annotated("mlp", 2)
    frozen = {"block0": {"scale": False, "up": True, "down": False}, "block1": True}
    pipeline = model.pipeline(mesh_of((1, 2, 2)), schedule="1f1b", frozen=frozen)
    params = pipeline.shard(model.params)
    loss, gradients = pipeline.value_and_grad(params, model.batch)
    assert_lie_like(params, gradients)
    expected_loss, expected = model.twin()
    expected["block0"]["up"] = jnp.zeros((D, F))
    expected["block1"] = jax.tree.map(jnp.zeros_like, expected["block1"])
    found = pipeline.unshard(gradients)
    assert largest_relative_error(loss, expected_loss) < 1e-5
    assert jax.tree.map(lambda leaf: leaf.any(), found) == jax.tree.map(lambda leaf: leaf.any(), expected)
    assert largest_relative_error(found, expected) < 1e-5


# where weights lie


@pytest.mark.fast("heads-float32", "tuple-bfloat16")
@pytest.mark.parametrize(("kind", "dtype"), [("heads", "float32"), ("tuple", "bfloat16")])
def test_shard_splits_as_the_specs_say_and_unshard_returns_the_same_bits(kind, dtype):
    model = annotated(kind, 2, dtype=jnp.dtype(dtype))
    mesh = mesh_of((1, 2, 2, 2), *TWO)
    pipeline = model.pipeline(mesh)
    placed = pipeline.shard(model.params)
    for found, given in zip(jax.tree.leaves(pipeline.unshard(placed)), jax.tree.leaves(model.params), strict=True):
        assert found.dtype == given.dtype
        assert np.asarray(found).tobytes() == np.asarray(given).tobytes()
    shapes = pipeline.shard_shapes(jax.eval_shape(lambda: model.params))
    assert shardings_of(shapes) == shardings_of(placed)
    specs = jax.tree.leaves(model.specs, is_leaf=lambda leaf: isinstance(leaf, P))
    for ipu in range(2):
        for leaf in (leaf for leaf in placed.layout.leaves if leaf.ipu == ipu):
            spec = placed.layout.spec(leaf)
            assert spec in specs
            slot = placed.arrays[leaf.array]
            assert slot.sharding.is_equivalent_to(NamedSharding(mesh, P("ipu", *spec)), slot.ndim), leaf.path


def test_the_devices_of_an_ipu_hold_their_parts():
    model = annotated("mlp", 2)
    placed = model.pipeline(mesh_of((1, 2, 2))).shard(model.params)
    leaf = {leaf.path: leaf for group in placed.layout.groups for leaf in group.leaves}["params['block1']['up']"]
    parts = {shard.device.id: np.asarray(shard.data) for shard in placed.arrays[leaf.array].addressable_shards}
    up = np.asarray(model.params["block1"]["up"])
    np.testing.assert_array_equal(parts[2][0], up[:, : F // 2])
    np.testing.assert_array_equal(parts[3][0], up[:, F // 2 :])


WIDER = {
    "replicate": lambda model: replicate(model, replication_factor=2),
    "replicate by IPUs": lambda model: replicate(model, num_ipus=4),
    "options": lambda model: make_train_step(model, optax.sgd(0.1), TrainOptions(replication_factor=2)).model,
}


@pytest.mark.parametrize("wider", WIDER)
def test_more_replicas_keep_the_axes(wider):
    mesh = WIDER[wider](annotated("mlp", 2).pipeline(mesh_of((1, 2, 2)))).mesh
    assert dict(mesh.shape) == {"replica": 2, "ipu": 2, "tensor": 2}
    assert mesh.devices.tolist() == np.reshape(jax.devices()[:8], (2, 2, 2)).tolist()


# what has no further axes


@pytest.mark.fast("zb-h1")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_axis_of_one_device_changes_no_program(schedule):
    def program(mesh):
        model = chain((0, None, 1), 3)
        pipeline = Pipeline(model.stages, mesh=mesh, specs=model.specs, gradient_accumulation=3, schedule=schedule)
        text = str(jax.make_jaxpr(pipeline.value_and_grad)(pipeline.shard(model.params), model.batch))
        return re.sub(r"Mesh\([^()]*(\([^()]*\)[^()]*)*\)", "Mesh", text)

    assert program(make_mesh(1, 2, tensor=1)) == program(make_mesh(1, 2))


# refusals


def placed(spec: Any, *shape: int, at: Any = "block0", **options: Any) -> Any:
    """Return a call that shards a model whose `up`, or head, has this spec, on a mesh (1, 2, 2) or as given."""

    def call():
        model = annotated("mlp", 2, concurrent_head=at == "head")
        specs = model.specs | {at: spec if at == "head" else {**model.specs["block0"], "up": spec}}
        return model.pipeline(mesh_of(shape or (1, 2, 2)), specs=specs, **options).shard(model.params)

    return call


def pipeline_on(mesh: Any, **options: Any) -> Any:
    return lambda: annotated("mlp", 2).pipeline(mesh(), **options)


def explicit(*axes: str) -> Any:
    return lambda: jax.make_mesh((1, 2, 2), axes, devices=jax.devices()[:4])


MESH = "make_mesh(replicas, ipus_per_replica"
UP, HEAD = "params['block0']['up'] of shape (8, 12) has spec", "params['head'] of shape (8, 11) has spec"
AT_MOST = "give a PartitionSpec of at most 2 dims, with 'tensor' at most once and None elsewhere"


@refusals(
    # meshes
    (lambda: make_mesh(1, 2, tensor=0), "tensor=0", "count", "an int of at least 1"),
    (lambda: make_mesh(1, 2, tensor=True), "tensor=True", "count", "an int of at least 1"),
    (lambda: make_mesh(1, 2, context=2, tensor=cast(Any, 2.0)), "tensor=2.0", "count", "an int of at least 1"),
    *(
        (lambda axes=axes: make_mesh(1, 2, **axes), f"axes={axes}", "has 'replica' and 'ipu' already", "other names")
        for axes in ({"ipu": 2}, {"replica": 2}, {"tensor": 2, "replica": 1})
    ),
    (
        lambda: make_mesh(2, 2, tensor=4),
        *("replicas=2 x ipus_per_replica=2 x tensor=4 needs 16 devices", "with 8", "configure(16)"),
    ),
    (
        lambda: make_mesh(1, 2, tensor=2, devices=jax.devices()[:3]),
        *("ipus_per_replica=2 x tensor=2 needs 4 devices", "3 cpu devices were given", "or more devices"),
    ),
    (
        lambda: replicate(annotated("mlp", 2).pipeline(mesh_of((1, 2, 4))), replication_factor=2),
        *("replicas=2 x ipus_per_replica=2 x tensor=4 needs 16 devices", "configure(16)"),
    ),
    (
        pipeline_on(explicit("replica", "ipu", "tensor")),
        *("mesh axis 'replica' is of type AxisType.Explicit", "must be Auto", "make it with make_mesh"),
    ),
    *(
        (pipeline_on(explicit(*axes)), f"mesh has axes {axes}", f"make it with {MESH})")
        for axes in (("replica", "tensor", "ipu"), ("tensor", "replica", "ipu"))
    ),
    # specs of local groups
    (
        pipeline_on(lambda: make_mesh(1, 2)),
        *("specs for 'block0', 'block1', 'head'", "only groups of concurrent stages", f"{MESH}, tensor=2)"),
    ),
    (
        pipeline_on(lambda: mesh_of((1, 2, 2)), state_specs={"seen": P("tensor")}),
        *("state_specs for 'seen'", "no stage names such a group", "leave it out", "Stage(..., state=)"),
    ),
    (
        placed(P("data")),
        *(f"{UP} P('data',)", "the mesh has no axis 'data'", AT_MOST, f"{MESH}, data=2)"),
    ),
    (placed(P(None, ("tensor", "data"))), f"{UP} P(None, ('tensor', 'data'))", "no axis 'data'", f"{MESH}, data=2)"),
    (placed(P(P.UNCONSTRAINED)), f"{UP} P(UNCONSTRAINED,)", "the mesh has no axis", AT_MOST),
    (placed(P("replica")), f"{UP} P('replica',)", "every replica holds its weights whole", AT_MOST),
    *(
        (placed(spec), f"{UP} {spec}", "its group is on IPU 0", "concurrent stages only", "(ipu=ALL_IPUS)")
        for spec in (P(None, "ipu"), P(("ipu", "tensor")))
    ),
    *(
        (placed(spec), f"{UP} {spec}", "'tensor' splits it twice", AT_MOST)
        for spec in (P("tensor", "tensor"), P(("tensor", "tensor")))
    ),
    (placed(P(None, None, "tensor")), f"{UP} P(None, None, 'tensor')", "it has no dim 2", AT_MOST),
    *((placed(spec), f"{UP} {spec}", "it is not a PartitionSpec", AT_MOST) for spec in ("tensor", 2)),
    (placed(P("tensor"), 1, 2, 3), f"{UP} P('tensor',)", "dim 0 is not divisible by tensor=3", "leave the dim whole"),
    # specs of concurrent groups
    *(
        (placed(spec, at="head"), f"{HEAD} {spec}", "is split over 'ipu' and 'tensor'", "a dim of its own")
        for spec in (P(("ipu", "tensor")), P(None, ("tensor", "ipu")))
    ),
    (
        placed(P("ipu", "tensor"), at="head"),
        f"{HEAD} P('ipu', 'tensor')",
        "dim 1 is not divisible by tensor=2",
        "whole",
    ),
    (placed(P("ipu", "ipu"), at="head"), f"{HEAD} P('ipu', 'ipu')", "'ipu' splits it twice", "'ipu' and 'tensor' at"),
)
def test_what_cannot_be_split_is_refused(call, holds):
    with refused(*holds):
        call()


def test_a_dim_over_two_axes_is_divisible_by_their_product():
    model = annotated("mlp", 2)
    specs = model.specs | {"block0": {"scale": P(), "up": P(TWO, None), "down": P(TWO)}}
    mesh = make_mesh(1, 2, context=1, tensor=2)
    assert model.pipeline(mesh, specs=specs).shard(model.params).layout.group("block0")
    params = model.params | {"block0": {"scale": normal(6), "up": normal(6, 4), "down": normal(4, 6)}}
    with refused(
        "params['block0']['up'] of shape (6, 4)",
        "dim 0 is not divisible by context=2 x tensor=2",
        "leave the dim whole",
    ):
        model.pipeline(mesh_of((1, 2, 2, 2), *TWO), specs=specs).shard(params)


@pytest.fixture
def without_shardy() -> Iterator[None]:
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


def test_only_shardy_splits(without_shardy):
    model = annotated("mlp", 2)
    with refused("mesh has the further axes 'tensor'", "jax_use_shardy_partitioner is False", "set it to True"):
        model.pipeline(mesh_of((1, 2, 2)))
    assert chain((0, 1), 2).pipeline(2).ipus == 2


# layers and functions


def layered() -> tuple[Any, list[Any], dict[str, P], dict[str, Any]]:
    """Return a layer, the weights of four of them, their specs, and a batch."""

    def layer(w: Any, x: Any) -> Any:
        return split(x + split(jnp.tanh(x @ w["up"]), P(None, "tensor")) @ w["down"], P())

    weights = [{"up": normal(5, 6, seed=i), "down": normal(6, 5, seed=9 + i)} for i in range(4)]
    batch = {"x": normal(3, 4, 5), "y": normal(3, 4, 5, seed=1)}
    return layer, weights, {"up": P(None, "tensor"), "down": P("tensor")}, batch


def layers_alone(weights: Any, batch: Any) -> Any:
    """Return the loss of the layers in plain jax."""
    x = batch["x"]
    for w in weights:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean((x - batch["y"]) ** 2)


def test_what_is_whole_in_a_scan_over_layers_is_stored_split():
    layer, weights, specs, batch = layered()
    pairs = {f"p{i}": jax.tree.map(lambda *leaves: np.stack(leaves), *weights[2 * i : 2 * i + 2]) for i in range(2)}
    scanned = lambda w, x: jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, w)[0]
    stages = [
        Stage(lambda w, x, mb: scanned(w, mb["x"]), params="p0", ipu=0),
        Stage(lambda w, x, mb: jnp.mean((scanned(w, x) - mb["y"]) ** 2), params="p1", ipu=1),
    ]
    specs = {key: {name: P(None, *spec) for name, spec in specs.items()} for key in pairs}
    pipeline = Pipeline(stages, mesh=mesh_of((1, 2, 2)), specs=specs, gradient_accumulation=3, schedule="1f1b")
    # the inputs of two layers, 4 x 5, and the last layer's output
    stored = {"stash:float32:2x4x5": (("tensor",), (), ()), "stash:float32:4x5": (("tensor",), ())}
    assert stored_by(pipeline, pairs, batch) == stored
    loss, gradients = pipeline.value_and_grad(pipeline.shard(pairs), batch)
    listed = lambda pairs: [jax.tree.map(lambda leaf, i=i: leaf[i % 2], pairs[f"p{i // 2}"]) for i in range(4)]
    expected_loss, expected = jax.value_and_grad(lambda pairs: layers_alone(listed(pairs), batch))(pairs)
    assert largest_relative_error(loss, expected_loss) < 1e-5
    assert largest_relative_error(pipeline.unshard(gradients), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("costs", ["counted", "traced"])
def test_a_function_keeps_the_axes(costs):
    layer, weights, specs, batch = layered()
    params = {"in": normal(5, 5), "layers": jax.tree.map(lambda *leaves: np.stack(leaves), *weights)}

    def loss_fn(params: Any, mb: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), mb["x"] @ params["in"], params["layers"])
        return jnp.mean((x - mb["y"]) ** 2)

    def alone(params: Any, batch: Any) -> Any:
        listed = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(4)]
        return layers_alone(listed, batch | {"x": batch["x"] @ params["in"]})

    split_layers = {name: P(None, *spec) for name, spec in specs.items()}
    pipeline = Pipeline.from_function(
        loss_fn,
        params,
        jax.tree.map(lambda leaf: leaf[0], batch),
        ipus=2,
        axes={"tensor": 2},
        specs={"in": P(), "layers": split_layers},
        schedule="1f1b",
        gradient_accumulation=3,
        costs=costs,
    )
    placed = pipeline.shard(params)
    loss, gradients = pipeline.value_and_grad(placed, batch)
    expected_loss, expected = jax.value_and_grad(alone)(params, batch)
    assert largest_relative_error(loss, expected_loss) < 1e-5
    assert largest_relative_error(pipeline.unshard(gradients), expected) < 1e-5
    assert_lie_like(placed, gradients)
    verify(pipeline, placed, batch)
    wider = make_train_step(pipeline, optax.sgd(0.1), TrainOptions(replication_factor=2))  # traced anew for its mesh
    twice = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), batch)
    state, outputs = wider(wider.init(params), twice)
    assert largest_relative_error(outputs.loss, expected_loss) < 1e-5
    descended = jax.tree.map(lambda w, g: w - 0.1 * g, params, expected)
    assert largest_relative_error(wider.whole(state)["params"], descended) < 1e-5


# predictions that stay split


def predicting(spec: P, *, columns: int = 8) -> Any:
    """Return a pipeline whose outputs, (3, 4, columns), have this spec, with its weights and batch."""
    logits = lambda w, x, mb: x @ w
    stages = [
        Stage(lambda w, x, mb: mb["x"] @ w, params="first", ipu=0),
        Stage(lambda w, x, mb: jnp.mean(x @ w), params="head", ipu=1, predict=logits, predict_specs=spec),
    ]
    pipeline = Pipeline(
        stages, mesh=make_mesh(1, 2, tensor=2), gradient_accumulation=3, specs={"head": P(None, "tensor")}
    )
    weights = {"first": normal(5, 6), "head": normal(6, columns, seed=1)}
    return pipeline, weights, {"x": normal(3, 4, 5, seed=2)}


def test_outputs_can_stay_split_over_a_further_axis():
    pipeline, weights, batch = predicting(P(None, "tensor"))
    outputs = pipeline.predict(pipeline.shard(weights), batch)
    assert {shard.data.shape for shard in outputs.addressable_shards} == {(3, 4, 4)}
    assert largest_relative_error(outputs, batch["x"] @ weights["first"] @ weights["head"]) < 1e-5


def test_a_reduction_that_xla_cannot_do_is_refused():
    """On one IPU that is a group of devices, XLA fails at a psum over "ipu" with an internal error."""
    concurrent, holds = (
        annotated("mlp", 1, concurrent_head=True),
        ("stage 'head'", "one IPU of 8 devices", "make it local"),
    )
    with refused(*holds):
        concurrent.pipeline(mesh_of((1, 1, 8)))
    assert annotated("mlp", 1).pipeline(mesh_of((1, 1, 4))).ipus == 1


def test_outputs_that_cannot_be_split_so_are_refused():
    with refused("predict_specs holds", "no axis 'expert'", "make_mesh(replicas, ipus_per_replica, expert=...)"):
        predicting(P("expert"))
    pipeline, weights, batch = predicting(P("tensor"), columns=6)
    params = pipeline.shard(weights)
    uneven = {"x": batch["x"][:, :3]}
    with refused("predict_specs says", "dim 0 is not divisible by tensor=2", "leave the dim whole"):
        pipeline.predict(params, uneven)

"""Test groups that every IPU holds whole and that stages on different IPUs share, such as a tied embedding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_train_step, verify
from ipu_jax.core.analysis.balance import measure_costs
from support.against_plain import assert_equals_plain, bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import largest_relative_error
from support.layers import ROWS, D, normal
from support.refusals import refusals, refused

V, M = 9, 5
WHOLE, SPLIT = PartitionSpec(), PartitionSpec("ipu")
INNER = "a1", "z2"


def embed(p, x, mb, *, shared):
    rows = shared["table"]["rows"][mb["tokens"]]
    return rows if p is None else rows @ p


def layer(p, x, mb):
    return jnp.tanh(x @ p)


def scaled(p, x, mb, *, shared):
    return jnp.tanh(x @ p) * shared["gain"]["g"]


def logits_of(p, x, mb, *, shared):
    return (x if p is None else x @ p) @ shared["table"]["rows"].T


def cross_entropy(p, x, mb, *, shared):
    logits = jax.nn.log_softmax(logits_of(p, x, mb, shared=shared))
    return -jnp.take_along_axis(logits, mb["targets"][:, None], 1).mean()


def tied(places, *, middle=layer, own=True, mesh=None, frozen=None, **options: Any) -> Pipeline:
    """Return a pipeline whose first and last stage share the table, and whose middle stages share `gain` or nothing."""
    fns = [embed, *[middle] * (len(places) - 2), cross_entropy]
    shares = [("table",), *[("gain",) if middle is scaled else ()] * (len(places) - 2), ("table",)]
    stages = [
        Stage(
            fn,
            params=f"p{i}" if own or 0 < i < len(places) - 1 else None,
            ipu=ALL_IPUS if place is None else place,
            shared=shared,
            name=f"s{i}",
            predict=logits_of if fn is cross_entropy else None,
        )
        for i, (fn, shared, place) in enumerate(zip(fns, shares, places, strict=True))
    ]
    specs = {stage.params: WHOLE for stage in stages if stage.place is None and stage.params} | options.pop("specs", {})
    mesh = mesh or make_mesh(1, 1 + max(place for place in places if place is not None))
    return Pipeline(stages, mesh=mesh, gradient_accumulation=M, specs=specs, frozen=frozen, **options)


def weights_of(pipeline: Pipeline, dtype: Any = np.float32) -> dict[str, Any]:
    groups = {
        "table": {"rows": normal(V, D, seed=7), "unread": normal(2, seed=8)},
        "gain": {"g": 1 + normal(D, seed=9)},
        **{f"p{i}": normal(D, D, seed=i) for i in range(len(pipeline.stages))},
    }
    named = {name for stage in pipeline.stages for name in (stage.params, *stage.shared)}
    return jax.tree.map(lambda w: jnp.asarray(w, dtype), {name: groups[name] for name in groups if name in named})


def batch_of(*lead: int, seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, V, (*lead, ROWS)) for name in ("tokens", "targets")}


def twin_of(pipeline: Pipeline, batch: Any) -> Any:
    """Return the same model of whole weights, as one function in plain jax."""
    tokens, targets = batch["tokens"].reshape(-1), batch["targets"].reshape(-1)
    last = len(pipeline.stages) - 1

    def loss(params):
        table, gain = params["table"]["rows"], params.get("gain", {"g": 1})["g"]
        h = table[tokens]
        for i in range(last + 1):
            h = h @ params[f"p{i}"] if f"p{i}" in params else h
            h = jnp.tanh(h) * gain if 0 < i < last else h
        scores = h @ table.T
        chosen = jnp.take_along_axis(scores, targets[:, None], 1)[:, 0]
        return jnp.mean(jax.scipy.special.logsumexp(scores, axis=1) - chosen)

    return loss


def check_step(pipeline: Pipeline, *, rtol: float = 2e-6, dtype: Any = np.float32) -> None:
    batch = batch_of(M) if pipeline.replicas == 1 else batch_of(pipeline.replicas, M)
    twin = twin_of(pipeline, batch)
    expected = assert_equals_plain(pipeline, weights_of(pipeline, dtype), batch, twin, rtol=rtol)
    loss = pipeline.loss(pipeline.shard(weights_of(pipeline, dtype)), batch)
    assert float(loss) == pytest.approx(float(expected), rel=rtol)


FOUR = (0, 1, 2, 3)
CASES = [
    *((places, {"schedule": name}) for places in ((0, 0, 1), (0, *FOUR)) for name in ("grouped", "1f1b", "zb-h1")),
    *((places, {"schedule": "looped"}) for places in ((0, 1) * 2, FOUR * 2)),
    (FOUR, {"middle": scaled}),
    (FOUR, {"middle": scaled, "schedule": "zb-h1", "own": False}),
    ((None, 0, 1), {}),
    ((0, 1, None), {"own": False}),
    ((0, None, 1), {"middle": scaled, "schedule": "1f1b"}),
    ((0, 0), {"own": False}),
    ((0, 1, 1), {"mesh": (2, 2), "reduction": "mean"}),
    ((0, 1), {"mesh": (1, 3), "dtype": jnp.bfloat16}),
]


@pytest.mark.fast("places2-options2")
@pytest.mark.parametrize(("places", "options"), CASES)
def test_a_tied_table_gets_the_gradients_of_all_its_stages(places, options):
    given: Any = {**options, "mesh": make_mesh(*options["mesh"])} if "mesh" in options else {**options}
    half: Any = {"rtol": 3e-2, "dtype": given.pop("dtype")} if "dtype" in given else {}
    check_step(tied(places, **given), **half)


def test_shared_weights_are_read_again_not_stashed():
    auto = tied((0, 1))
    for recompute in ("auto", "all", "none"):
        pipeline = auto.replace(stages=[dataclasses.replace(stage, recompute=recompute) for stage in auto.stages])
        plan = pipeline.placement.plan(pipeline.shard(weights_of(pipeline)), batch_of(M))
        assert not {(V, D), (D, V)} & {kept.shape for program in plan.programs for kept in program.stash}


def test_shared_weights_cost_as_little_stash_as_the_stages_own():
    """In a scan the choice is made per layer: what follows from x and weights is computed again from x."""

    def layers(w, x):
        return jax.lax.scan(lambda h, _: (jnp.exp(-h * h + w) * jnp.sin(h), None), x, None, length=3)[0]

    last = Stage(lambda p, x, mb: x.mean(), ipu=1)
    owning = Stage(lambda p, x, mb: layers(p, mb), "w", ipu=0)
    sharing = Stage(lambda p, x, mb, *, shared: layers(shared["w"], mb), ipu=0, shared=("w",))
    stashes = []
    for stage in (owning, sharing):
        pipeline = Pipeline([stage, last], gradient_accumulation=M)
        plan = pipeline.placement.plan(pipeline.shard({"w": normal(ROWS, D)}), normal(M, ROWS, D))
        stashes.append([(kept.shape, kept.dtype) for kept in plan.programs[0].stash])
    assert stashes[0] == stashes[1] == [((3, ROWS, D), jnp.float32)]


@pytest.mark.slow
def test_a_concurrent_stage_may_train_what_local_ones_share():
    """The first stage, on all IPUs, has the table as its params; the last, on IPU 1, shares it."""
    stages = [
        Stage(lambda p, x, mb: p["rows"][mb["tokens"]], params="table", ipu=ALL_IPUS),
        Stage(layer, params="p1", ipu=0),
        Stage(cross_entropy, params="p2", ipu=1, shared=("table",)),
    ]
    pipeline = Pipeline(stages, gradient_accumulation=M)
    check_step(pipeline)
    for specs in ({"table": WHOLE}, {"table": {"rows": PartitionSpec(None, None), "unread": WHOLE}}):
        of_specs = Pipeline(stages, gradient_accumulation=M, specs=specs)
        found, expected = (p.shard(weights_of(p)).arrays for p in (of_specs, pipeline))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def test_concurrent_stages_may_share_a_split_group():
    def split(p, x, mb, *, shared):
        return jax.lax.all_gather(shared["w"], "ipu", tiled=True)[:5] @ mb["x"]

    stages = [Stage(split, ipu=ALL_IPUS, shared=("w",)), Stage(lambda p, x, mb: (x**2).mean(), ipu=1)]
    pipeline = Pipeline(stages, gradient_accumulation=2, specs={"w": SPLIT})
    batch, w = {"x": normal(2, 3)}, normal(5, 3)
    assert_equals_plain(pipeline, {"w": w}, batch, lambda p: ((batch["x"] @ p["w"].T) ** 2).mean())


def test_like_stages_that_share_a_group_are_one_class_and_those_that_share_another_are_not():
    def share(*names):
        functions = {name: lambda p, x, mb, *, shared, name=name: jnp.tanh(x @ p) * shared[name] for name in "gh"}
        # "a1" sorts before the shared group, and "z2" after it
        inner = [
            Stage(functions[name], own, i, shared=(name,)) for i, own, name in zip((1, 2), INNER, names, strict=True)
        ]
        first = Stage(lambda p, x, mb: mb @ p, params="p0", ipu=0)
        last = Stage(lambda p, x, mb: (x @ p).mean(), params="p9", ipu=3)
        return Pipeline([first, *inner, last], gradient_accumulation=M)

    weights = {name: normal(D, D, seed=i) for i, name in enumerate(("p0", *INNER, "p9"))}
    batch = normal(M, ROWS, D)
    for names, classes in (("gg", ((0,), (1, 2), (3,))), ("gh", ((0,), (1,), (2,), (3,)))):
        pipeline, gains = share(*names), {name: 1 + normal(D, seed=ord(name)) for name in {*names}}
        assert pipeline.placement.plan(pipeline.shard(weights | gains), batch).classes == classes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "16.32"}, {"shard_optimizer": True, "replication_factor": 2}],
    ids=["floats", "halves", "replicas"],
)
def test_steps_keep_the_copies_of_all_ipus_equal_and_are_those_of_optax(options):
    replicas = options.get("replication_factor", 1)
    pipeline, optimizer, steps = tied((0, 1)), optax.adamw(1e-2, weight_decay=0.1), 3
    step = make_train_step(pipeline, optimizer, TrainOptions(gradient_accumulation=M, **options))
    expected = weights = weights_of(pipeline)
    state, moments, update = step.init(weights), optimizer.init(weights), jax.jit(optimizer.update)
    gradients_of = jax.jit(lambda weights, batch: jax.grad(twin_of(pipeline, batch))(weights))
    for k in range(steps):
        batch = batch_of(M, seed=k) if replicas == 1 else batch_of(replicas, M, seed=k)
        state, _ = step(state, batch)
        updates, moments = update(gradients_of(expected, batch), moments, expected)
        expected = optax.apply_updates(expected, updates)
    assert largest_relative_error(pipeline.unshard(state.params), expected) < (0.05 if "precision" in options else 1e-5)
    for array in (state.params.arrays[leaf.array] for leaf in state.params.layout.group("table").leaves):
        copies = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(copies) == 2 * replicas
        for copy in copies:
            np.testing.assert_array_equal(copy, copies[0])


def test_a_shared_group_is_computed_in_the_steps_precision():
    seen = []

    def looking(p, x, mb, *, shared):
        seen.append(shared["w"].dtype)
        return (mb * shared["w"]).mean()

    stages = [Stage(looking, shared=("w",))]
    step = make_train_step(Pipeline(stages), optax.sgd(0.1), TrainOptions(precision="16.32"))
    jax.eval_shape(step, step.init({"w": np.ones(3, np.float32)}), np.ones((1, 3), np.float32))
    assert {*seen} == {jnp.dtype("bfloat16")}


@pytest.mark.slow
def test_a_value_that_is_not_finite_is_named_for_the_stage_that_shares_it():
    step = make_train_step(tied((0, 1, 2), own=False), optax.sgd(0.1), TrainOptions(gradient_accumulation=M))
    weights, batch = weights_of(tied((0, 1, 2), own=False)), batch_of(M)
    assert step.find_nonfinite(step.init(weights), batch) is None
    weights["table"]["rows"] = np.full((V, D), np.nan, np.float32)
    found: Any = step.find_nonfinite(step.init(weights), batch)
    assert (found.name, found.what) == ("s0", "its weight params['table']['rows']")


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_named_for_the_stage_that_shares_its_weight():
    def rooted(p, x, mb, *, shared):
        return (x * jnp.sqrt(shared["b"])).mean()  # its slope at 0 is infinite

    stages = [Stage(lambda p, x, mb: mb * p, "a", 0), Stage(rooted, ipu=1, shared=("b",), name="end")]
    step = make_train_step(Pipeline(stages), optax.sgd(0.1))
    ones = np.ones(3, np.float32)
    found: Any = step.find_nonfinite(step.init({"a": ones, "b": 0 * ones}), ones[None])
    assert (found.name, found.what) == ("end", "the gradient of params['b']")


@pytest.mark.slow
def test_frozen_shared_leaves_get_no_gradient():
    pipeline = tied((0, 1), frozen={"table": {"rows": True, "unread": False}})
    weights, batch = weights_of(pipeline), batch_of(M)
    params = pipeline.shard(weights)
    gradients = pipeline.unshard(pipeline.value_and_grad(params, batch)[1])
    expected = jax.jit(jax.grad(twin_of(pipeline, batch)))(weights)
    expected["table"]["rows"] = jnp.zeros_like(weights["table"]["rows"])
    assert largest_relative_error(gradients, expected) < 1e-5
    assert params.layout.group("table").leaves[0].frozen


def test_what_is_said_of_a_pipeline_that_shares():
    pipeline = tied((0, 1, 2, 3), middle=scaled)
    report = pipeline.report(pipeline.shard(weights_of(pipeline)), batch_of(M), compile=False)
    floats = V * D + 2 + D + D * D  # every IPU holds the table, the gain and its own weights
    assert {part.weights for part in report.ipus} == {4 * floats}
    assert "shares 'table'" in repr(pipeline)


@pytest.mark.slow
def test_all_that_a_pipeline_can_do():
    pipeline = tied((0, 1, 2, 3), middle=scaled)
    weights, batch = weights_of(pipeline), batch_of(M)
    params = pipeline.shard(weights)
    verify(pipeline, params, batch)
    scores = pipeline.predict(params, batch)
    table, h = weights["table"]["rows"], weights["table"]["rows"][batch["tokens"]] @ weights["p0"]
    for i in (1, 2):
        h = jnp.tanh(h @ weights[f"p{i}"]) * weights["gain"]["g"]
    np.testing.assert_allclose(scores, h @ weights["p3"] @ table.T, atol=1e-5)
    costs = pipeline.stage_costs(params, batch)
    assert min(costs.forward) > 0
    one = {name: leaf[0] for name, leaf in batch.items()}
    assert min(measure_costs(pipeline.stages, weights, one)) > 0
    verify(tied((0, 1, 2, 3), middle=scaled, schedule="auto"), params, batch)


STAGE: Any = Stage


def test_names_may_come_from_any_iterable_and_count_once():
    assert STAGE(layer, "w", shared=(name for name in "aba")).groups == ("w", "a", "b")


@refusals(
    (lambda: STAGE(layer, shared="table"), "shared='table' is not a tuple of names", "give shared=('name',)"),
    (lambda: STAGE(layer, shared=(1,)), "shared=(1,) is not a tuple of names", "give shared=('name',)"),
    (lambda: STAGE(layer, shared=3), "shared=3 is not a tuple of names", "give shared=('name',)"),
    (lambda: STAGE(layer, takes=3), "takes=3 is not a tuple of names", "give takes=('name',)"),
    (lambda: STAGE(layer, "w", shared=("w",)), "shared=('w',)", "the stage's own params", "leave it out"),
    (
        lambda: Pipeline([Stage(layer, "w", ipu=1, name="own"), Stage(layer, ipu=0, shared=("w",), name="other")]),
        "group 'w' is shared by stage 'other', and the params of stage 'own' on IPU 1",
        "every IPU holds a shared group",
        "shared=('w',)",
    ),
    (
        lambda: tied((0, 1), specs={"table": {"rows": SPLIT, "unread": WHOLE}}),
        f"specs['table'] holds {SPLIT}",
        "every IPU holds it whole",
        "PartitionSpec()",
    ),
    (lambda: measure_costs(tied((0, 1)).stages, {"p0": 1, "p1": 1}, None), "missing 'table'", "stages name"),
    (lambda: tied((0, 1)).shard({"p0": normal(D, D), "p1": normal(D, D)}), "params: missing 'table'", "The stages"),
)
def test_what_cannot_be_shared_is_refused(call, holds):
    with refused(*holds):
        call()

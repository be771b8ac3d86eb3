"""Test what a training step sends and stores, empty leaves, frozen weights, and a pipeline on other replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from support.dense import largest_relative_error
from support.one_stage import KINDS
from support.small_problems import tanh_loss, tanh_problem
from support.trained import compiled_quickly, state_error

_compiled_quickly = compiled_quickly()


@pytest.mark.parametrize(
    ("shard_optimizer", "collectives"), [(False, {"all-reduce": 2}), (True, {"reduce-scatter": 1, "all-gather": 1})]
)
def test_few_large_collectives(shard_optimizer, collectives):
    params, batch = tanh_problem(2, 3)
    options = TrainOptions(replication_factor=2, gradient_accumulation=3, shard_optimizer=shard_optimizer)
    step = make_train_step(tanh_loss, optax.adam(1e-2), options)
    hlo = step.lower(step.init(params), batch).compile().as_text()
    for kind, most in collectives.items():
        found = [line for line in hlo.splitlines() if f" {kind}(" in line or f" {kind}-start(" in line]
        assert 1 <= len(found) <= most, found
        assert not [line for line in found if "while/body" in line]


def test_the_optimizer_state_falls_by_the_replicas():
    params = {"w": np.ones((61, 7), np.float32), "b": np.ones(5, np.float32)}
    cut, whole = (
        make_train_step(
            lambda p, mb: p["w"].sum(),
            optax.adam(1e-2),
            TrainOptions(replication_factor=4, shard_optimizer=shard_optimizer),
        )
        .init(params)
        .optimizer
        for shard_optimizer in (True, False)
    )
    held = lambda tree: sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))
    moments = [a for a, of in zip(cut.arrays, cut.layout.arrays, strict=True) if "replicated" not in of.name]
    assert held(moments) == 2 * 4 * (-(-61 * 7 // 4) + -(-5 // 4))
    # without, every IPU holds two moments of every weight, among what is everywhere
    assert held(moments) <= held(whole) / 4 + 2 * 4 * 2


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("shapes", [((0,), (3, 2), (), (2, 0)), ((0, 4), (0,), (0,), (0,))])
def test_leaves_without_elements_are_updated_like_any(kind, shapes):
    """The first leaf of all, one in between, or all of them; each in the bucket of its dtype, split or whole."""
    names = ("a", "b", "c", "d")
    params = {name: np.full(shape, 2, np.float32) for name, shape in zip(names, shapes, strict=True)}
    scaled = lambda leaf, mb: jnp.sum(leaf**2) * jnp.mean(mb)
    model = lambda p, mb: sum(scaled(p[name], mb) for name in names)
    if kind == "pipeline":
        stages = [
            Stage(lambda p, x, mb: scaled(p["a"], mb) + scaled(p["b"], mb), params="first", ipu=0),
            Stage(lambda p, x, mb: x + scaled(p["c"], mb), params="last", ipu=1),
            Stage(lambda p, x, mb: x + jax.lax.psum(scaled(p["d"], mb), "ipu"), params="head", ipu=ALL_IPUS),
        ]
        model = Pipeline(stages, mesh=make_mesh(2, 2), specs={"head": P(*[None] * (len(shapes[3]) - 1), "ipu")})
        params = {"first": {n: params[n] for n in "ab"}, "last": {"c": params["c"]}, "head": {"d": params["d"]}}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    step = make_train_step(model, optimizer, TrainOptions(replication_factor=2, shard_optimizer=True))
    batch = np.asarray([1.0, 2.0], np.float32).reshape(2, 1, 1)
    state, outputs = step(step.init(params), batch)
    gradients = jax.tree.map(lambda w: 2 * w * 1.5, params)
    expected_state = optimizer.init(params)
    updates, expected_state = optimizer.update(gradients, expected_state, params)
    whole = step.whole(state)
    assert largest_relative_error(whole["params"], optax.apply_updates(params, updates)) <= 1e-6
    assert state_error(whole["optimizer"], expected_state) <= 1e-6
    np.testing.assert_allclose(outputs.loss, 1.5 * 4 * sum(w.size for w in jax.tree.leaves(params)), rtol=1e-6)


def test_frozen_weights_stay_and_are_not_decayed():
    """`fixed` shares a slot with a trained weight of another IPU, and `table` is not floating."""
    first = lambda p, x, mb: p["table"][mb] * p["w"] + p["fixed"]
    last = lambda p, x, mb: jnp.mean((x * p["u"] + p["v"]) ** 2)
    frozen = {"first": {"fixed": True, "table": True, "w": False}}
    pipeline = Pipeline([Stage(first, params="first", ipu=0), Stage(last, params="last", ipu=1)], frozen=frozen)
    step = make_train_step(pipeline, optax.adamw(0.1, weight_decay=0.5), TrainOptions(ema_decay=0.5))
    params = {
        "first": {"w": jnp.ones(3), "fixed": jnp.arange(3.0), "table": jnp.arange(12).reshape(4, 3)},
        "last": {"u": jnp.ones(3), "v": jnp.ones(3)},
    }
    state = step.init(params)
    assert {len(params), len(state.params.arrays)} == {2, 3}  # w, fixed, u and v lie in two
    rows = jnp.ones((1, 2), jnp.int32)
    state, _ = step(state, rows)
    found, average = step.whole(state)["params"], step.whole(state)["ema"]
    for name in ("fixed", "table"):
        for tree in (found, average):
            np.testing.assert_array_equal(tree["first"][name], params["first"][name])
    for group, name in (("first", "w"), ("last", "u"), ("last", "v")):
        assert not np.any(np.asarray(found[group][name]) == params[group][name]), name
    np.testing.assert_allclose(
        step.loss(state, rows, ema=True), last(average["last"], first(average["first"], None, 1), None), rtol=1e-6
    )


@pytest.mark.slow
def test_a_pipeline_on_other_replicas_and_in_half_is_otherwise_the_same():
    """It keeps what is frozen, how state is split, the schedule, the reduction and the memory of an IPU."""

    def first(w, x, mb):
        return mb * w["fixed"] * w["scale"]

    def last(w, x, mb, *, state):
        return Outputs(jax.lax.psum(jnp.sum(x @ w), "ipu"), state=state + 1)

    pipeline = Pipeline(
        [Stage(first, params="first", ipu=0), Stage(last, params="last", state="last", ipu=ALL_IPUS)],
        mesh=make_mesh(1, 2),
        schedule="gpipe",
        gradient_accumulation=2,
        reduction="sum",
        specs={"last": P(None, "ipu")},
        state_specs={"last": P("ipu")},
        frozen={"first": {"fixed": True, "scale": False}},
        ipu_memory=1000.0,
    )
    step = make_train_step(pipeline, optax.adam(0.5), TrainOptions(replication_factor=2, precision="16.32"))
    params = {"first": {"fixed": jnp.full(3, 2.0), "scale": jnp.ones(3)}, "last": jnp.ones((3, 4))}
    state = step.init(params, stages={"last": jnp.zeros(4)})
    assert state.stages is not None
    assert jax.tree.leaves(state.stages)[0].sharding.spec == P("ipu")
    assert [shard.data.shape for shard in state.stages.arrays[0].addressable_shards] == [(2,)] * 4
    state, outputs = step(state, np.ones((2, 2, 5, 3), np.float32))
    whole = step.whole(state)
    assert isinstance(whole["optimizer"][0].mu["first"]["fixed"], optax.MaskedNode)
    assert whole["params"]["first"]["fixed"].tolist() == [2, 2, 2]
    np.testing.assert_allclose(whole["params"]["first"]["scale"], 0.5, rtol=1e-5)
    assert whole["stages"]["last"].tolist() == [2, 2, 2, 2]
    assert float(outputs.loss) == 5 * 3 * 2 * 4
    # adam hides how long a gradient is; its first moment does not: 4 micro-batches, 5 rows, 2 of `fixed`, 0.1 of it
    np.testing.assert_allclose(whole["optimizer"][0].mu["last"], 0.1 * 4 * 5 * 2, rtol=1e-5)
    assert step.model.schedule.name == "gpipe"
    assert (step.model.replicas, step.model.ipus) == (2, 2)
    with pytest.warns(UserWarning, match=r"more than ipu_memory=1\.0 kB"):
        step.model.report(state.params, np.ones((2, 2, 50, 3), np.float32), state.stages, compile=False)


def test_a_key_that_nothing_draws_from_is_not_used_and_a_warning_says_so():
    params, batches = tanh_problem(2, 1)
    step = make_train_step(tanh_loss, optax.sgd(0.1), TrainOptions(device_iterations=2))
    rule = r"^key is not used, for neither the model nor the rounding is random: leave it out, or .* random=True"
    with pytest.warns(UserWarning, match=rule) as caught:
        state = step.init(params, key=jax.random.key(0))
    assert caught[0].filename == __file__
    assert state.key is None
    without, _ = step(step.init(params), batches)
    with pytest.warns(UserWarning, match=rule):
        state = step.restore(step.whole(state) | {"key": jax.random.key(1)})
    found, _ = step(state, batches)
    jax.tree.map(np.testing.assert_array_equal, step.whole(found), step.whole(without))

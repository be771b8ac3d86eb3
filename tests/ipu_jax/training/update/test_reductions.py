"""Test every reduction over replicas and IPUs, one or two of each: of the loss, gradients, aux, state and norms.

All values differ per replica, per IPU and per micro-batch. The state also has integers and bools, of which
replica 0's go on. The oracle is a loop over replicas and micro-batches, in plain jnp on one device, and NumPy's sums.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_schedule, make_train_step
from ipu_jax.steps import replicate
from support.trained import compiled_quickly

D, COLUMNS, ROWS, M, RATE = 4, 5, 3, 2, 0.5  # 5 columns: 3 and 2 on two IPUs
STEPS = 2


def normal(seed, *shape):
    return (np.random.default_rng(seed).normal(size=shape) / 2).astype(np.float32)


PARAMS = {
    "first": {"w": normal(0, D, D)},
    "second": {"w": normal(1, D, D), "b": normal(2, D)},
    "head": {"w": normal(3, D, COLUMNS), "gain": normal(4, D)},  # the columns are split, the gain is whole
}
STATE = {
    "of first": {
        "mean": normal(5, D),
        "calls": np.int32(7),
        "flags": np.array([True, False, True]),
        "last": np.array([1, 2], np.uint8),
    },
    "of second": {"n": np.int32(0), "any": np.bool_(False), "largest": np.float32(0)},
    "of head": {
        "columns": normal(6, COLUMNS),
        "marks": np.zeros(COLUMNS, np.int32),
        "odd": np.bool_(False),
        "calls": np.int32(1),
    },
}
SPLIT = {"columns": P("ipu"), "marks": P("ipu"), "odd": P(), "calls": P()}


def first_of(p, x, mb, state):
    y = jnp.tanh(mb["x"] @ p["w"])
    new = {
        "mean": 0.75 * state["mean"] + 0.25 * y.mean(0),  # as a batch norm keeps it
        "calls": state["calls"] + mb["n"],
        "flags": state["flags"] ^ mb["flags"],
        "last": jnp.stack([mb["n"], state["last"][0].astype(jnp.int32)]).astype(jnp.uint8),
    }
    return y * (1 + state["mean"]), new, {"sum": y.sum(), "n": mb["n"], "flags": mb["flags"]}


def second_of(p, x, mb, state):
    y = jnp.tanh(x @ p["w"] + p["b"])
    new = {
        "n": state["n"] * 3 + mb["n"],
        "any": state["any"] | (mb["n"] == 5),
        "largest": jnp.maximum(state["largest"], mb["x"][0, 0]),
    }
    return y, new, {"row": y[0], "is_large": mb["x"][0, 0] > 0.2}


def head_of(w, gain, x, mb, state):
    """Return the sum of squares of these columns, and the new state."""
    y = (x * gain) @ w
    new = {
        "columns": state["columns"] * 0.5 + y.sum(0),
        "marks": state["marks"] + mb["n"],
        "odd": state["odd"] ^ (mb["n"] % 2 == 1),
        "calls": state["calls"] + mb["n"],
    }
    # the state of an earlier micro-batch and update acts, integers and bools as well
    return jnp.sum(y**2 * (1 + state["odd"] + 0.1 * state["calls"])), new


# as a pipeline


def local(of):
    def fn(p, x, mb, *, state):
        y, new, aux = of(p, x, mb, state)
        return Outputs(y, state=new, aux=aux)

    return fn


def head(p, x, mb, *, state, weighted=False):
    squares, new = head_of(p["w"], p["gain"], x, mb, state)
    loss = lax.psum(squares, "ipu")
    return Outputs(loss * mb["n"] if weighted else loss, state=new, aux={"count": mb["n"], "x": x.max()})


def pipeline_of(replicas, ipus, reduction, schedule="grouped", *, weighted=False):
    stages = [
        Stage(local(first_of), params="first", state="of first", ipu=0, name="first"),
        Stage(local(second_of), params="second", state="of second", ipu=ipus - 1, name="second"),
        Stage(functools.partial(head, weighted=weighted), params="head", state="of head", ipu=ALL_IPUS, name="head"),
    ]
    return Pipeline(
        stages,
        mesh=make_mesh(replicas, ipus),
        gradient_accumulation=M,
        reduction=reduction,
        schedule=schedule,
        specs={"head": {"w": P(None, "ipu"), "gain": P()}},
        state_specs={"of head": SPLIT},
    )


def batch_of(replicas, number=0):
    rng = np.random.default_rng(100 + number)
    lead = (replicas, M)
    return {
        "x": rng.normal(size=(*lead, ROWS, D)).astype(np.float32),
        # the first replica's numbers have other sums than the second's, also modulo 2
        "n": rng.permutation([1, 2, 4, 6][: replicas * M]).reshape(lead).astype(np.int32) + number,
        "flags": rng.random((*lead, 3)) < 0.5,
    }


def given(batch, replicas):
    return batch if replicas > 1 else jax.tree.map(lambda leaf: leaf[0], batch)


# the oracle


def plain_loss(params, mb, state, weighted):
    x, of_first, aux_first = first_of(params["first"], None, mb, state["of first"])
    x, of_second, aux_second = second_of(params["second"], x, mb, state["of second"])
    loss, of_head = head_of(params["head"]["w"], params["head"]["gain"], x, mb, state["of head"])
    aux = {"first": aux_first, "second": aux_second, "head": {"count": mb["n"], "x": x.max()}}
    new = {"of first": of_first, "of second": of_second, "of head": of_head}
    return loss * mb["n"] if weighted else loss, (lax.stop_gradient(new), aux)


@functools.cache
def plain_value_and_grad(weighted):
    return jax.jit(jax.value_and_grad(functools.partial(plain_loss, weighted=weighted), has_aux=True))


def plain(params, batch, state, reduction, *, weighted=False, evaluates=False):
    """Return loss, gradients, new state and aux, leaves (replicas, M, ...), of one update.

    In evaluation the state stays, so that each micro-batch reads the same one.
    """
    replicas = len(batch["n"])
    losses, gradients, states, auxes = [], [], [], []
    for replica in range(replicas):
        own = state
        for m in range(M):
            mb = jax.tree.map(lambda leaf, r=replica, m=m: leaf[r, m], batch)
            (loss, (new, aux)), gradient = plain_value_and_grad(weighted)(params, mb, own)
            own = state if evaluates else new
            losses.append(np.float64(loss))
            gradients.append(gradient)
            auxes.append(aux)
        states.append(own)
    count = batch["n"].sum() if weighted else replicas * M
    total = jax.tree.map(lambda *leaves: np.sum(np.stack(leaves), 0, dtype=np.float64), *gradients)
    gradients = total if reduction == "sum" else jax.tree.map(lambda leaf: leaf / count, total)
    floating = lambda leaf: np.issubdtype(np.asarray(leaf).dtype, np.floating)
    new = jax.tree.map(lambda *s: np.mean(np.stack(s), 0) if floating(s[0]) else np.asarray(s[0]), *states)
    stacked = jax.tree.map(lambda *a: np.stack(a).reshape(replicas, M, *np.shape(a[0])), *auxes)
    loss = np.sum(losses) if weighted and reduction == "sum" else np.sum(losses) / count
    return loss, gradients, new, stacked


def same(found, expected, name):
    """Assert that trees are alike: floats nearly, integers and bools exactly, and all in the right dtype."""
    assert jax.tree.structure(found) == jax.tree.structure(expected), name

    def one(path, f, e):
        f, e, where = np.asarray(f), np.asarray(e), f"{name}{jax.tree_util.keystr(path)}"
        assert f.shape == e.shape, where
        if np.issubdtype(e.dtype, np.floating):
            np.testing.assert_allclose(f, e, rtol=2e-5, atol=2e-6, err_msg=where)
        else:
            assert f.dtype == e.dtype, where
            np.testing.assert_array_equal(f, e, err_msg=where)

    jax.tree_util.tree_map_with_path(one, found, expected)


def alike_on_all_devices(tree):
    """Assert that devices which hold the same part of an array hold the same numbers: replicas must not drift apart."""
    for array in jax.tree.leaves(tree):
        parts = {}
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, parts.setdefault(str(shard.index), np.asarray(shard.data)))


MESHES = [(1, 1), (2, 1), (1, 2), (2, 2)]


_compiled_quickly = compiled_quickly()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "ipus", "reduction", "schedule"),
    [
        (2, 2, "mean", "grouped"),
        *[
            (r, n, "mean" if schedule == "1f1b" else "sum", schedule)
            for r, n in MESHES
            for schedule in ("grouped", "1f1b")
        ],
    ],
)
def test_a_pipeline_reduces_loss_gradients_aux_and_state(replicas, ipus, reduction, schedule):
    pipeline, batch = pipeline_of(replicas, ipus, reduction, schedule), batch_of(replicas)
    params, state = pipeline.shard(PARAMS), pipeline.shard_state(STATE)
    (loss, aux), gradients, new = pipeline.value_and_grad(params, given(batch, replicas), state)
    expected = plain(PARAMS, batch, STATE, reduction)
    same(loss, expected[0], "loss")
    same(pipeline.unshard(gradients), expected[1], "gradients")
    same(pipeline.unshard(new), expected[2], "state")
    alike_on_all_devices([gradients, new])
    same(aux, given(expected[3], replicas), "aux")
    loss, aux = pipeline.loss(params, given(batch, replicas), state)
    expected = plain(PARAMS, batch, STATE, reduction, evaluates=True)
    same(loss, expected[0], "evaluated loss")
    same(aux, given(expected[3], replicas), "evaluated aux")


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "ipus"), MESHES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_a_step_reduces_losses_norms_aux_and_state_over_updates(replicas, ipus, weighted, shard_optimizer):
    reduction = "sum" if weighted == shard_optimizer and replicas * ipus < 4 else "mean"
    options = TrainOptions(
        weighted=weighted, shard_optimizer=shard_optimizer, norms=True, device_iterations=STEPS, outputs="all"
    )
    rate = RATE / 100 if reduction == "sum" else RATE  # weights that explode would cancel when they are compared
    step = make_train_step(pipeline_of(replicas, ipus, reduction, weighted=weighted), optax.sgd(rate), options)
    batches = [batch_of(replicas, number) for number in range(STEPS)]
    stacked = jax.tree.map(lambda *leaves: np.stack([given(leaf, replicas) for leaf in leaves]), *batches)
    state, outputs = step(step.init(PARAMS, stages=STATE), stacked)
    whole = step.whole(state)

    params, stages = PARAMS, STATE
    for number, batch in enumerate(batches):
        loss, gradients, stages, aux = plain(params, batch, stages, reduction, weighted=weighted)
        norm = lambda tree: np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in jax.tree.leaves(tree)))
        same(outputs.loss[number], loss, "loss")
        same(outputs.gradient_norm[number], norm(gradients), "gradient norm")
        same(outputs.parameter_norm[number], norm(params), "parameter norm")
        same(jax.tree.map(lambda leaf, k=number: leaf[k], outputs.aux), given(aux, replicas), "aux")
        params = jax.tree.map(lambda w, g: np.float32(w - rate * g), params, gradients)
    same(whole["params"], params, "weights")
    same(whole["stages"], stages, "state")
    alike_on_all_devices([state.params, state.stages])
    after = [batch_of(replicas, 7 + number) for number in range(STEPS)]
    loss, _ = step.loss(
        state, jax.tree.map(lambda *leaves: np.stack([given(leaf, replicas) for leaf in leaves]), *after)
    )
    parts = [plain(params, batch, stages, reduction, weighted=weighted, evaluates=True)[0] for batch in after]
    counts = [batch["n"].sum() for batch in after] if weighted and reduction == "mean" else [1] * STEPS
    same(loss, np.average(parts, weights=counts), "loss of a batch")


@pytest.mark.fast("2-mean")
@pytest.mark.parametrize(("replicas", "reduction"), [(1, "sum"), (2, "mean")])
def test_replicas_of_a_function_reduce_loss_gradients_and_aux(replicas, reduction):
    def loss_fn(params, mb):
        loss, (_, aux) = plain_loss(params, mb, STATE, False)
        return loss, aux

    model = replicate(loss_fn, replication_factor=replicas, gradient_accumulation=M, reduction=reduction)
    batch = batch_of(replicas)
    (loss, aux), gradients = model.value_and_grad(model.shard(PARAMS), given(batch, replicas))
    expected = plain(PARAMS, batch, STATE, reduction, evaluates=True)
    same(loss, expected[0], "loss")
    same(gradients, expected[1], "gradients")
    same(aux, given(expected[3], replicas), "aux")


# M and the reduction: given to the model, or in TrainOptions, with the same result


def squares(w, x, mb):
    return jnp.mean((mb @ w) ** 2)


@pytest.mark.fast("Replicas", "loss function")
@pytest.mark.parametrize("name", ["1f1b", "auto", "function", "Replicas", "loss function"])
def test_m_and_the_reduction_may_be_given_in_either_place(name):
    def made(**given):
        match name:
            case "function":
                one = jnp.zeros((ROWS, D))
                whole = lambda w, mb: squares(w["a"], None, mb)
                return Pipeline.from_function(whole, {"a": jnp.zeros(D)}, one, ipus=1, **given)
            case "Replicas":
                return replicate(lambda w, mb: squares(w["a"], None, mb), replication_factor=1, **given)
            case "loss function":
                return lambda w, mb: squares(w["a"], None, mb)
            case _:
                return Pipeline([Stage(squares, "a")], schedule=name, **given)

    weights, batch = {"a": normal(0, D)}, normal(1, 3, ROWS, D)
    late = make_train_step(made(), optax.sgd(1.0), TrainOptions(gradient_accumulation=3, reduction="sum"))
    state, _ = late(late.init(weights), batch)
    with_m = {} if name == "loss function" else {"gradient_accumulation": 3, "reduction": "sum"}
    assert late.gradient_accumulation == 3
    gradient = sum(2 * x.T @ (x @ weights["a"]) / ROWS for x in batch.astype(np.float64))
    np.testing.assert_allclose(late.whole(state)["params"]["a"], weights["a"] - gradient, rtol=1e-5)
    if with_m:
        early = make_train_step(made(**with_m), optax.sgd(1.0))
        again, _ = early(early.init(weights), batch)
        np.testing.assert_array_equal(late.whole(state)["params"]["a"], early.whole(again)["params"]["a"])


def test_a_schedule_brings_its_own_m():
    pipeline = Pipeline([Stage(squares, "a")], schedule=make_schedule("gpipe", ipus=1, gradient_accumulation=3))
    assert pipeline.options.gradient_accumulation == 3

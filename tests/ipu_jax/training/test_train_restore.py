"""Test that training continues from what was saved as if it had not stopped, also on other IPUs and replicas."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, DynamicScale, Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from support.dense import largest_relative_error
from support.small_problems import product_loss, product_weights
from support.trained import quick_compiles

FEATURES = 5


# a pipeline: unlike local stages, one with state and a key, and a head that is split over all IPUs

WIDTH, HEAD, MICRO = 4, 6, 2  # 6 columns: 3 on each of 2 IPUs, 2 on each of 4 with two of padding


def noisy(w: Any, x: Any, mb: Any, *, state: Any, key: Any) -> Outputs:
    kept = jnp.tanh(mb @ w["w"] + w["b"]) * jax.random.bernoulli(key, 0.5, (WIDTH,))
    return Outputs(kept, state={"seen": state["seen"] + 1, "sum": state["sum"] + mb.sum()})


def head(w: Any, x: Any, mb: Any, *, state: Any) -> Outputs:
    columns = x @ w
    total = lax.psum(jnp.sum(columns**2), "ipu")
    # the state is split as the columns are: each IPU's own
    return Outputs(total / x.shape[0], state=state + jnp.abs(columns).sum(0))


def pipeline_step(replicas: int, ipus: int, **options: Any) -> Any:
    stages = [
        Stage(noisy, params="body", state="body", random=True, ipu=0),
        Stage(lambda w, x, mb: jnp.tanh(x @ w), params="middle", ipu=1),
        Stage(head, params="head", state="head", ipu=ALL_IPUS),
    ]
    model = Pipeline(
        stages,
        mesh=make_mesh(replicas, ipus),
        gradient_accumulation=MICRO // replicas,
        specs={"head": P(None, "ipu")},
        state_specs={"head": P("ipu")},
    )
    return make_train_step(model, optax.adam(0.05), TrainOptions(**options))


def pipeline_weights() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    params = {
        "body": {"w": normal(FEATURES, WIDTH), "b": normal(WIDTH)},
        "middle": normal(WIDTH, WIDTH),
        "head": normal(WIDTH, HEAD),
    }
    return params, {"body": {"seen": np.int32(0), "sum": np.float32(0)}, "head": np.zeros(HEAD, np.float32)}


def dense_update(at: Any, rows: np.ndarray, key: Any, number: int) -> tuple[Any, Any, Any]:
    """Return whole weights, optax's state and the stages' after one more update of (replicas, M, rows, features)."""
    params, optimizer_state, stages = at
    replicas, m = rows.shape[:2]
    of_update = jax.random.fold_in(key, number)

    def loss(p: Any) -> tuple[Any, Any]:
        total, columns = 0, []
        for r, i in np.ndindex(replicas, m):
            own = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(of_update, r), i), 0)
            hidden = jnp.tanh(rows[r, i] @ p["body"]["w"] + p["body"]["b"])
            hidden = jnp.tanh(hidden * jax.random.bernoulli(own, 0.5, (WIDTH,)) @ p["middle"])
            columns.append(jnp.abs(hidden @ p["head"]).sum(0))
            total += jnp.sum((hidden @ p["head"]) ** 2) / rows.shape[2] / (replicas * m)
        return total, sum(columns) / replicas

    gradients, columns = jax.jit(jax.grad(loss, has_aux=True))(params)
    updates, optimizer_state = optax.adam(0.05).update(gradients, optimizer_state, params)
    body = {"seen": stages["body"]["seen"] + m, "sum": stages["body"]["sum"] + rows.sum() / replicas}
    return optax.apply_updates(params, updates), optimizer_state, {"body": body, "head": stages["head"] + columns}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 2, False), (2, 4, True)),
        pytest.param((2, 4, True), (1, 2, False), marks=pytest.mark.slow),
        pytest.param((2, 2, True), (1, 4, False), marks=pytest.mark.slow),
        pytest.param((1, 4, False), (2, 2, False), marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_goes_on_where_it_stopped(before, after):
    """Test weights, their average, moments, the stages' state, and the next masks, on other IPUs and replicas."""
    with quick_compiles():
        first, second = (
            pipeline_step(
                r, n, shard_optimizer=s, loss_scale=DynamicScale(initial=4.0, growth_interval=1), ema_decay=0.75
            )
            for r, n, s in (before, after)
        )
        params, stages = pipeline_weights()
        key = jax.random.key(9)
        rows = np.random.default_rng(2).normal(size=(2, MICRO, 3, FEATURES)).astype(np.float32)
        of = lambda rows, r: rows if r == 1 else rows.reshape(r, MICRO // r, 3, FEATURES)  # noqa: E731
        state, _ = first(first.init(params, stages=stages, key=key), of(rows[0], before[0]))
        whole = first.whole(state)
        first(state, of(rows[1], before[0]))  # what was saved outlives the state
        assert jax.random.key_data(whole["key"]).tolist() == jax.random.key_data(key).tolist()
        saved = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, whole | {"key": None})))
        restored = second.restore(saved | {"key": whole["key"]})
        for parts in (restored.params.concurrent["head"], restored.stages.concurrent["head"]):
            assert len({str(shard.index) for shard in parts[0].addressable_shards}) == after[1]
        state, _ = second(restored, of(rows[1], after[0]))
        found = second.whole(state)

    at, average = (params, optax.adam(0.05).init(params), stages), params
    for number, (r, *_) in enumerate((before, after)):
        at = dense_update(at, rows[number].reshape(r, MICRO // r, 3, FEATURES), key, number)
        average = jax.tree.map(lambda e, w: 0.75 * e + 0.25 * w, average, at[0])
    assert largest_relative_error(found["ema"], average) <= 1e-5
    assert largest_relative_error(found["params"], at[0]) <= 1e-5
    assert largest_relative_error(found["optimizer"], at[1]) <= 1e-5
    assert largest_relative_error(found["stages"], at[2]) <= 1e-5
    assert (found["step"], float(found["scale"].scale)) == (2, 16.0)


def test_an_average_begins_anew_from_a_state_without_one():
    plain, averaging = (make_train_step(product_loss, optax.sgd(0.1), TrainOptions(ema_decay=d)) for d in (None, 0.75))
    saved = plain.whole(plain.init(product_weights()))
    del saved["ema"]  # as an older version saved it
    assert plain.whole(plain.restore(saved))["ema"] is None
    begun = averaging.restore({**saved, "ema": saved["params"]})
    np.testing.assert_array_equal(averaging.whole(begun)["ema"]["u"], product_weights()["u"])

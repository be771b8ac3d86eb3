"""Test that stages draw the same random numbers in the pipeline, when recomputed, and in an independent program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh, verify
from support.against_plain import assert_equals_plain, bubbles_hold_nan, stages_at  # noqa: F401 (a fixture)
from support.layers import ROWS, D, loss_layer, normal


def dropout(p, x, mb, *, key):
    x = mb["x"] if x is None else x
    h = jnp.tanh(x @ p["w"])
    keep = jax.random.bernoulli(key, 0.6, h.shape)
    return Outputs(jnp.where(keep, h / 0.6, 0), aux=jax.random.key_data(key))


def dropout_loss(p, x, mb, *, key):
    return jnp.mean((dropout(p, x, mb, key=key).y - mb["y"]) ** 2), jax.random.key_data(key)


def dropout_pipeline(micro_batches: int, schedule: str, recompute: Any, replicas: int = 1, ipus: int = 3) -> Pipeline:
    stages = [
        Stage(dropout, params=f"layer{i}", ipu=i, random=True, recompute=recompute, name=f"layer{i}")
        for i in range(ipus - 1)
    ]
    stages.append(Stage(dropout_loss, params="last", ipu=ipus - 1, random=True, recompute=recompute))
    mesh = make_mesh(replicas, ipus)
    return Pipeline(stages, mesh=mesh, schedule=schedule, gradient_accumulation=micro_batches)


def dropout_inputs(pipeline: Pipeline) -> tuple[Any, Any]:
    groups = [stage.params for stage in pipeline.stages]
    params = {name: {"w": normal(D, D, seed=i)} for i, name in enumerate(groups)}
    m, r = pipeline.options.gradient_accumulation, pipeline.replicas
    lead = (m,) if r == 1 else (r, m)
    return params, {"x": normal(*lead, ROWS, D, seed=8), "y": normal(*lead, ROWS, D, seed=9)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recompute", "replicas"),
    [
        ("grouped", "none", 1),
        ("grouped", "all", 1),
        ("1f1b", jax.checkpoint_policies.dots_saveable, 1),
        ("zb-h1", "none", 1),
        ("zb-h1", "all", 1),
        ("sequential", "none", 2),
        ("grouped", "all", 2),
    ],
)
def test_dropout_equals_the_unsharded_programs(schedule, recompute, replicas):
    pipeline = dropout_pipeline(4, schedule, recompute, replicas)
    params, batch = dropout_inputs(pipeline)
    key = jax.random.key(5)
    verify(pipeline, pipeline.shard(params), batch, key=key)

    def twin(params):
        x, y = (batch[k].reshape(replicas, 4, ROWS, D) for k in ("x", "y"))
        total = 0
        for r in range(replicas):
            for m in range(4):
                h = x[r, m]
                for s, name in enumerate(["layer0", "layer1", "last"]):
                    own = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, r), m), s)
                    keep = jax.random.bernoulli(own, 0.6, (ROWS, D))
                    h = jnp.tanh(h @ params[name]["w"]) * keep / 0.6
                total += jnp.mean((h - y[r, m]) ** 2) / 4 / replicas
        return total

    assert_equals_plain(pipeline, params, batch, twin, key=key)
    (_, aux), _ = pipeline.value_and_grad(pipeline.shard(params), batch, key=key)
    keys = np.concatenate([np.asarray(found).reshape(-1, 2) for found in aux.values()])
    assert len(np.unique(keys, axis=0)) == 3 * 4 * replicas  # each micro-batch, stage and replica has its own


# Each key is worked out by hand as docs/training.md gives it. B draws again what the gradients depend on. Neighbouring
# stages of one IPU, and neighbouring concurrent ones, run merged.


def scaled_noise(p, x, mb, *, key):
    x = jnp.zeros(ROWS) if x is None else x
    return Outputs(x + p * jax.random.uniform(key, (ROWS,)), aux=jax.random.key_data(key))


def noisy_loss(p, x, mb, *, key):
    out = scaled_noise(p, x, mb, key=key)
    return jnp.mean(out.y), out.aux


@pytest.mark.parametrize(
    ("places", "schedule", "replicas"),
    [
        ((0, 0, None), "1f1b", 1),
        ((0, 0, None, None), "1f1b", 2),
        ((0, None, None), "grouped", 1),
        ((0, 0, 0, 0), "sequential", 2),
        ((None, None, 0, 0, 1, 1, 1), "zb-h1", 2),
        ((0, 0, 1, 1, 0, 0, 1, 1), "1f1b", 1),
        ((0, 0, 1, 0, 0, 1, 1), "gpipe", 2),
    ],
)
@pytest.mark.fast("places0-1f1b-1")
def test_each_merged_stage_draws_its_own_numbers_in_f_and_again_in_b(places, schedule, replicas):
    m, names = 2, [f"s{i}" for i in range(len(places))]
    fns = [scaled_noise] * (len(places) - 1) + [noisy_loss]
    stages, specs = stages_at(places, fns, names, random=True, recompute="all")
    mesh = make_mesh(replicas, 1 + max(place or 0 for place in places))
    pipeline = Pipeline(stages, mesh=mesh, gradient_accumulation=m, schedule=schedule, specs=specs)
    params = pipeline.shard({name: np.float32(i + 1) for i, name in enumerate(names)})
    batch, key = np.zeros((m, 1) if replicas == 1 else (replicas, m, 1), np.float32), jax.random.key(7)
    (_, aux), gradients = pipeline.value_and_grad(params, batch, key=key)
    _, of_loss = pipeline.loss(params, batch, key=key)
    gradients, seen = pipeline.unshard(gradients), set()
    for number, name in enumerate(names):
        folded = [
            functools.reduce(jax.random.fold_in, (replica, microbatch, number), key)
            for replica in range(replicas)
            for microbatch in range(m)
        ]
        expected = np.stack([jax.random.key_data(one) for one in folded])
        np.testing.assert_array_equal(np.asarray(aux[name]).reshape(-1, 2), expected, err_msg=name)
        np.testing.assert_array_equal(np.asarray(of_loss[name]).reshape(-1, 2), expected, err_msg=name)
        noise = np.mean([jax.random.uniform(one, (ROWS,)) for one in folded])
        np.testing.assert_allclose(gradients[name], noise, rtol=1e-5, err_msg=name)
        seen |= set(map(tuple, expected))
    assert len(seen) == len(places) * m * replicas


@pytest.mark.slow
def test_a_key_that_a_scan_over_layers_splits_is_recomputed_alike():
    def layers(p, x, mb, *, key):
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
        def layer(h, of_layer):
            w, k = of_layer
            return jnp.tanh(h @ w) * jax.random.bernoulli(k, 0.5, h.shape), None

        return lax.scan(layer, mb["x"], (p["w"], jax.random.split(key, 3)))[0]

    stages = [
        Stage(layers, params="a", random=True, recompute=jax.checkpoint_policies.everything_saveable),
        Stage(loss_layer, params="b", ipu=1),
    ]
    pipeline = Pipeline(stages, gradient_accumulation=3, schedule="1f1b")
    params = pipeline.shard({"a": {"w": normal(3, D, D)}, "b": {"w": normal(D, D)}})
    batch = {"x": normal(3, ROWS, D, seed=1), "y": normal(3, ROWS, D, seed=2)}
    verify(pipeline, params, batch, key=jax.random.key(3))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["grouped", "zb-h1"])
def test_a_key_that_depends_on_activations_is_stashed(schedule):
    def drawn(p, x, mb, *, key):
        h = mb["x"] @ p["w"]
        of_h = jax.random.fold_in(key, jnp.argmax(h).astype(jnp.uint32))
        return jax.checkpoint(lambda h, k: jnp.sin(h) * jax.random.bernoulli(k, 0.5, h.shape))(h, of_h)

    stages = [Stage(drawn, params="a", random=True, recompute="none"), Stage(loss_layer, params="b", ipu=1)]
    pipeline = Pipeline(stages, gradient_accumulation=3, schedule=schedule)
    params = pipeline.shard({"a": {"w": normal(D, D)}, "b": {"w": normal(D, D)}})
    batch = {"x": normal(3, ROWS, D, seed=1), "y": normal(3, ROWS, D, seed=2)}
    verify(pipeline, params, batch, key=jax.random.key(3))


def test_a_concurrent_stage_gets_one_key_on_all_ipus():
    def fn(p, x, mb, *, key):
        data = jax.random.key_data(key)
        return Outputs(x @ p["w"], aux=lax.all_gather(data, "ipu"))

    def first(p, x, mb):
        return mb["x"]

    stages = [
        Stage(first),
        Stage(fn, params="w", ipu=ALL_IPUS, random=True),
        Stage(loss_layer, params="b", ipu=1),
    ]
    pipeline = Pipeline(stages, gradient_accumulation=2, specs={"w": PartitionSpec()})
    params = pipeline.shard({"w": {"w": normal(D, D)}, "b": {"w": normal(D, D)}})
    batch = {"x": normal(2, ROWS, D, seed=1), "y": normal(2, ROWS, D, seed=2)}
    (_, aux), _ = pipeline.value_and_grad(params, batch, key=jax.random.key(3))
    data = np.asarray(aux["w"])
    assert data.shape == (2, 2, 2)
    np.testing.assert_array_equal(data[:, 0], data[:, 1])

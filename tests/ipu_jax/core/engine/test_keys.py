"""Test that stages draw the same random numbers in the pipeline, when recomputed, and in an independent program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh, verify
from support.against_plain import bubbles_hold_nan, stages_at  # noqa: F401 (a fixture)
from support.layers import ROWS, D, loss_layer, normal
from support.platforms import programs_for

# Each key is worked out by hand as docs/training.md gives it. B draws again what the gradients depend on. Neighbouring
# stages of one IPU, and neighbouring concurrent ones, run merged.


def scaled_noise(p, x, mb, *, key):
    x = jnp.zeros(ROWS) if x is None else x
    return Outputs(x + p * jax.random.uniform(key, (ROWS,)), aux=jax.random.key_data(key))


def noisy_loss(p, x, mb, *, key):
    out = scaled_noise(p, x, mb, key=key)
    return jnp.mean(out.y), out.aux


STRETCHED = (None, 0, 1, None)  # for a GPU, whose ticks are in stretches


@pytest.mark.parametrize(
    ("places", "schedule", "replicas", "recompute"),
    [
        ((0, 0, None), "1f1b", 1, "all"),
        ((0, 0, None, None), "1f1b", 2, "all"),
        ((0, None, None), "grouped", 1, "all"),
        ((0, 0, 0, 0), "sequential", 2, "all"),
        ((None, None, 0, 0, 1, 1, 1), "zb-h1", 2, "all"),
        ((0, 0, 1, 1, 0, 0, 1, 1), "1f1b", 1, "all"),
        ((0, 0, 1, 0, 0, 1, 1), "gpipe", 2, "all"),
        ((0, 1, 2), "grouped", 2, "none"),
        ((0, 1, 2), "zb-h1", 1, "none"),
        ((0, 1, 2, 3), "1f1b", 1, jax.checkpoint_policies.dots_saveable),
        (STRETCHED, "grouped", 1, "all"),
    ],
)
@pytest.mark.fast("places0-1f1b-1-all")
def test_each_merged_stage_draws_its_own_numbers_in_f_and_again_in_b(places, schedule, replicas, recompute):
    m, names = 2, [f"s{i}" for i in range(len(places))]
    fns = [scaled_noise] * (len(places) - 1) + [noisy_loss]
    stages, specs = stages_at(places, fns, names, random=True, recompute=recompute)
    mesh = make_mesh(replicas, 1 + max(place or 0 for place in places))
    batch, key = np.zeros((m, 1) if replicas == 1 else (replicas, m, 1), np.float32), jax.random.key(7)
    with programs_for("gpu" if places is STRETCHED else "cpu"):
        pipeline = Pipeline(stages, mesh=mesh, gradient_accumulation=m, schedule=schedule, specs=specs)
        params = pipeline.shard({name: np.float32(i + 1) for i, name in enumerate(names)})
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


def split_in_a_scan(p, x, mb, *, key):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
    def layer(h, of_layer):
        w, k = of_layer
        return jnp.tanh(h @ w) * jax.random.bernoulli(k, 0.5, h.shape), None

    return lax.scan(layer, mb["x"], (p["w"], jax.random.split(key, 3)))[0]


def of_activations(p, x, mb, *, key):
    h = mb["x"] @ p["w"][0]
    of_h = jax.random.fold_in(key, jnp.argmax(h).astype(jnp.uint32))
    return jax.checkpoint(lambda h, k: jnp.sin(h) * jax.random.bernoulli(k, 0.5, h.shape))(h, of_h)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "recompute", "schedule"),
    [
        (split_in_a_scan, jax.checkpoint_policies.everything_saveable, "1f1b"),
        (of_activations, "none", "grouped"),
        (of_activations, "none", "zb-h1"),
    ],
)
def test_a_key_that_a_scan_splits_or_activations_decide_is_the_same_in_b(fn, recompute, schedule):
    stages = [Stage(fn, params="a", random=True, recompute=recompute), Stage(loss_layer, params="b", ipu=1)]
    pipeline = Pipeline(stages, gradient_accumulation=3, schedule=schedule)
    params = pipeline.shard({"a": {"w": normal(3, D, D)}, "b": {"w": normal(D, D)}})
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

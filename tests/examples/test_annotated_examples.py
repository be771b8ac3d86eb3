"""Test the examples whose blocks XLA splits: loss, gradients and tokens equal a dense twin's, and the scripts run."""

import dataclasses
import itertools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import annotated_flax, llama
from ipu_jax import Feed, fit
from support import documents
from support.against_plain import assert_equals_plain, bubbles_hold_nan  # noqa: F401 (a fixture)

SIZES = llama.Sizes(vocabulary=12, tokens=8, features=12, groups=2, queries=3, head=6, hidden=20, blocks=3)


def flax_twin(weights, batch):
    def normed(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]

    def block(x, p):
        kernels = [p[f"Dense_{i}"]["kernel"] for i in range(6)]
        width, tokens = x.shape[-1] // annotated_flax.HEADS, x.shape[-2]
        h = normed(x, p["LayerNorm_0"])
        q, k, v = (h @ kernel for kernel in kernels[:3])
        read = []
        for first in range(0, x.shape[-1], width):
            own = slice(first, first + width)
            scores = jnp.exp(q[..., own] @ jnp.swapaxes(k[..., own], -1, -2) / np.sqrt(width)) * np.tri(tokens)
            read.append(scores / scores.sum(-1, keepdims=True) @ v[..., own])
        x = x + jnp.concatenate(read, -1) @ kernels[3]
        return x + jax.nn.gelu(normed(x, p["LayerNorm_1"]) @ kernels[4]) @ kernels[5]

    y = block(block(batch["x"], weights["layers_0"]), weights["layers_1"])
    return jnp.square(y - batch["y"]).mean()


def flax_weights(pipeline):
    return pipeline.init(lambda key: nn.unbox(annotated_flax.init(key)), jax.random.key(0))


def llama_logits(weights, tokens):
    """Return the logits (T, V) of one sequence (T,)."""

    def normed(x, gain):
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * gain

    def turned(x):
        half = x.shape[1] // 2
        turns = np.exp(1j * np.outer(np.arange(len(x)), 10000.0 ** -(np.arange(half) / half)))
        plane = jax.lax.complex(x[:, :half], x[:, half:]) * turns.astype(np.complex64)
        return jnp.concatenate([plane.real, plane.imag], 1)

    def attend(p, x):
        read = jnp.zeros_like(x)
        for g, r in np.ndindex(p["queries"].shape[1:3]):
            scores = turned(x @ p["queries"][:, g, r]) @ turned(x @ p["keys"][:, g]).T / np.sqrt(SIZES.head)
            scores = jnp.exp(scores - scores.max(1, keepdims=True)) * np.tri(len(x))
            read += scores / scores.sum(1, keepdims=True) @ (x @ p["values"][:, g]) @ p["out"][g, r]
        return read

    x = weights["table"][tokens]
    for p in weights["blocks"]:
        x = x + attend(p, normed(x, p["norm 1"]))
        h = normed(x, p["norm 2"])
        gate = h @ p["gate"]
        x = x + (gate / (1 + jnp.exp(-gate)) * (h @ p["up"])) @ p["down"]
    return normed(x, weights["norm"]) @ weights["head"]


def llama_weights(sizes):
    return jax.jit(sizes.init)(jax.random.key(0))


@jax.jit
def llama_twin(weights, batch):
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), batch)
    log_chances = jax.nn.log_softmax(jax.vmap(lambda tokens: llama_logits(weights, tokens))(rows["tokens"]))
    return -jnp.take_along_axis(log_chances, rows["targets"][..., None], -1).mean()


def moved(weights, scale):
    """Return other weights, so that gains and biases are not ones and zeros."""
    random = np.random.default_rng(1)
    return jax.tree.map(lambda w: np.asarray(w + random.normal(scale=scale, size=w.shape), np.float32), weights)


@pytest.mark.slow
def test_loss_and_gradients_of_annotated_flax_modules_equal_a_dense_twin():
    pipeline, random = annotated_flax.make_pipeline(), np.random.default_rng(2)
    weights = moved(pipeline.unshard(flax_weights(pipeline)), 0.2)
    shape = (annotated_flax.M, annotated_flax.B, annotated_flax.TOKENS, annotated_flax.FEATURES)
    batch = {name: random.normal(size=shape).astype(np.float32) for name in "xy"}
    assert_equals_plain(pipeline, weights, batch, lambda weights: flax_twin(weights, batch))


def test_the_llama_has_a_step_on_each_mesh():
    for replicas, ipus, devices in ((2, 2, 2), (1, 2, 4)):
        sizes = dataclasses.replace(SIZES, groups=devices)
        step = llama.make_step(sizes, replicas, ipus, devices)
        weights = jax.tree.leaves(step.shapes(jax.eval_shape(sizes.init, jax.random.key(0))).params)
        assert any(ipus * devices == leaf.sharding.num_devices // replicas for leaf in weights)


@pytest.mark.slow
def test_a_device_holds_half_of_each_annotated_kernel():
    params = flax_weights(annotated_flax.make_pipeline())
    sizes = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(params)]
    d = annotated_flax.FEATURES
    assert sum(sizes) == 4 * d + (4 * d**2 + 8 * d**2) // 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 2), (1, 2, 4), (4, 1, 2)])
def test_loss_and_gradients_of_the_llama_equal_a_dense_twin(mesh):
    sizes = dataclasses.replace(SIZES, groups=mesh[-1])
    step = llama.make_step(sizes, *mesh)
    weights, random = moved(llama_weights(sizes), 0.3), np.random.default_rng(3)
    lead = [mesh[0]] * (mesh[0] > 1)
    shape = (*lead, llama.MICRO_BATCHES // mesh[0], llama.B, SIZES.tokens)
    batch = {name: random.integers(SIZES.vocabulary, size=shape, dtype=np.int32) for name in ("tokens", "targets")}
    assert_equals_plain(step.model, weights, batch, lambda weights: llama_twin(weights, batch))


@pytest.mark.slow
def test_the_llama_trains_as_optax_on_one_device_and_resumes_on_another_mesh(tmp_path):
    step, other = (llama.make_step(SIZES, *shape, 2) for shape in ((2, 2), (1, 4)))
    weights, data = moved(llama_weights(SIZES), 0.3), llama.sequences(5, SIZES, 64)
    with Feed(data, step=step, micro_batch=llama.B) as feed:
        batches = [jax.device_get(batch.data) for batch in itertools.islice(feed, 3)]
    expected, losses = weights, []
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state, gradients_of = optimizer.init(expected), jax.jit(jax.value_and_grad(llama_twin))
    for batch in batches:
        loss, gradients = gradients_of(expected, batch)
        updates, state = optimizer.update(gradients, state, expected)
        expected = optax.apply_updates(expected, updates)
        losses.append(float(loss))
    with Feed(data, step=step, micro_batch=llama.B) as feed:
        result = fit(step, step.init(weights), feed, updates=2, checkpoints=tmp_path, say=lambda line: None)
    np.testing.assert_allclose(result.losses, losses[:2], rtol=1e-5)
    assert llama.next_loss(other, other.init(weights), data, str(tmp_path)) == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.slow
def test_the_llama_predicts_the_tokens_of_a_dense_twin():
    step = llama.make_step(SIZES, 2, 2, 2)
    weights = moved(llama_weights(SIZES), 0.5)
    given = np.random.default_rng(6).integers(SIZES.vocabulary, size=(2, 1, llama.B, SIZES.tokens), dtype=np.int32)
    found = llama.continued(step, step.init(weights), given)
    rows, next_of = given.reshape(-1, SIZES.tokens).copy(), jax.jit(llama_logits)
    for row, t in itertools.product(rows, range(llama.PERIOD, SIZES.tokens)):
        row[t] = next_of(weights, row)[t - 1].argmax()
    np.testing.assert_array_equal(found.reshape(rows.shape), rows)
    assert len({tuple(row) for row in rows[:, llama.PERIOD :]}) > 1


@pytest.mark.slow
def test_the_annotated_flax_modules_verify_themselves():
    verified, step = documents.printed(annotated_flax).splitlines()
    errors = [float(error) for error in re.findall(r"relative error (\S+?)(?:;| at )", verified)]
    assert len(errors) == 2
    assert max(errors) < 1e-5
    before, after = map(float, re.findall(r"\d\.\d+", step))
    assert after < before


@pytest.mark.slow
def test_the_llama_learns_and_finds_the_same_next_loss(tmp_path):
    lines = documents.printed(llama, str(tmp_path), "32").splitlines()
    losses = [float(line.split()[-1]) for line in lines if "loss:" in line]
    assert losses[-1] < losses[0] - 0.3
    first, second = map(float, re.findall(r"\d\.\d{6}", lines[-1]))
    assert first == pytest.approx(second, rel=1e-5)
    assert first < losses[0] - 0.3

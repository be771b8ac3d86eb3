"""Test the examples whose devices communicate by hand: loss and gradients equal a dense twin's, and the scripts run."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import lora, mixtral, ring
from ipu_jax import Pipeline, make_mesh
from support import documents
from support.against_plain import assert_equals_plain, bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import largest_relative_error

ROWS, M = 8, 4
AXIS = {mixtral: "expert", ring: "context"}


def make_case(example, replicas: int = 1) -> tuple[Any, Any]:
    """Return weights of another size than an example's own, and a batch."""
    random, lead = np.random.default_rng(1), (replicas,) * (replicas > 1)
    weights = jax.tree.map(
        lambda w: w + random.normal(scale=0.1, size=w.shape).astype(np.float32), example.make_weights()
    )
    shape = (*lead, M, ROWS, mixtral.LENGTH)
    return weights, {"tokens": random.integers(mixtral.VOCABULARY, size=shape, dtype=np.int32)}


# the twins: the mean loss of a batch in plain jax, where each sequence or token goes alone


def normed(x):
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def attended(p, x, causal=True):
    """Return what the heads read in one sequence (T, D)."""
    length, width = x.shape
    heads, size = mixtral.HEADS, width // mixtral.HEADS
    rows = normed(x) @ p["qkv"]
    read = []
    for head in range(heads):
        q, k, v = (rows[:, part * width + head * size :][:, :size] for part in range(3))
        scores = jnp.exp(q @ k.T / np.sqrt(size)) * (np.tri(length) if causal else 1)
        read.append(scores / scores.sum(1, keepdims=True) @ v)
    return x + jnp.concatenate(read, 1) @ p["out"]


def mixed(p, x):
    """Return a token (D,) after its two experts, which experts these are, and the chances of all."""
    scores = jnp.exp(x @ p["router"])
    chances, chosen = scores / scores.sum(), jnp.argsort(-scores)[:2]
    y = 0.0
    for one in chosen:
        gate, up, down = (p["experts"][name][one] for name in ("gate", "up", "down"))
        y += chances[one] / chances[chosen].sum() * (((x @ gate) / (1 + jnp.exp(-x @ gate)) * (x @ up)) @ down)
    return y, jnp.zeros(len(scores)).at[chosen].set(0.5), chances


def cross_entropy(weights, x, tokens):
    chances = jax.nn.log_softmax(normed(x) @ weights["table"].T)
    return -jnp.mean(jax.vmap(lambda row, token: row[token])(chances[:-1], tokens[1:]))


def loss_of_mixtral(weights, tokens):
    """Return the loss of one micro-batch (B, T)."""
    x, balance = weights["table"][tokens] + weights["positions"], 0.0
    for p in weights["layers"]:
        x = jax.vmap(lambda x, p=p: attended(p, x))(x)
        y, share, chances = jax.vmap(jax.vmap(functools.partial(mixed, p)))(normed(x))
        x, balance = x + y, balance + mixtral.E * share.mean((0, 1)) @ chances.mean((0, 1))
    return jax.vmap(functools.partial(cross_entropy, weights))(x, tokens).mean() + 0.01 * balance


def loss_of_ring(weights, tokens, causal=True):
    x = weights["table"][tokens] + weights["positions"]
    for p in weights["layers"]:
        x = jax.vmap(lambda x, p=p: attended(p, x, causal))(x)
        x = x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]
    return jax.vmap(functools.partial(cross_entropy, weights))(x, tokens).mean()


TWINS = {mixtral: loss_of_mixtral, ring: loss_of_ring}
CASES = [
    (mixtral, (1, 2, 2), "1f1b", {}),
    (mixtral, (2, 2, 2), "zb-h1", {}),
    (mixtral, (1, 2, 4), "looped", {}),
    (ring, (1, 2, 2), "zb-h1", {"causal": False}),
    (ring, (2, 2, 2), "1f1b", {}),
    (ring, (1, 2, 4), "grouped", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("example", "mesh", "schedule", "options"), CASES)
def test_loss_and_gradients_equal_a_dense_twin(example, mesh, schedule, options):
    weights, batch = make_case(example, mesh[0])
    one = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[-2:])[0], batch)
    loss = functools.partial(example.loss, **options)
    given: dict[str, Any] = {"replicas": mesh[0], "ipus": mesh[1], "axes": {AXIS[example]: mesh[2]}}
    given |= {"schedule": schedule, "gradient_accumulation": M, "specs": getattr(example, "make_specs", lambda: None)()}
    pipeline = Pipeline.from_function(loss, weights, one, **given)
    rows = batch["tokens"].reshape(-1, ROWS, mixtral.LENGTH)
    twin = lambda weights: jax.vmap(lambda tokens: TWINS[example](weights, tokens, **options))(rows).mean()
    assert_equals_plain(pipeline, weights, batch, twin)
    assert any(pipeline.placement.guards.needed.values()) is (example is ring)


@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_reads_what_one_device_reads_however_large_the_scores(causal):
    q, k, v = np.random.default_rng(0).normal(scale=9, size=(3, 2, 8, 2, 4)).astype(np.float32)
    run = functools.partial(ring.ring, causal=causal)
    run = jax.shard_map(run, mesh=make_mesh(1, 1, context=4), in_specs=(ring.TOKENS,) * 3, out_specs=ring.TOKENS)
    assert largest_relative_error(jax.jit(run)(q, k, v), jax.nn.dot_product_attention(q, k, v, is_causal=causal)) < 1e-5


def test_no_token_is_dropped_if_all_choose_the_experts_of_one_device():
    p = jax.tree.map(jnp.asarray, make_case(mixtral)[0]["layers"][0])
    p["router"] = p["router"].at[0].set(jnp.array([0.0, 0, 9, 9]))
    x = np.random.default_rng(0).normal(size=(4, 6, mixtral.D)).astype(np.float32)
    x[..., 0] = 1
    with jax.set_mesh(make_mesh(1, 1, expert=2)):
        found, balance = jax.jit(mixtral.mixture)(p, x)
    expected, share, _ = jax.vmap(jax.vmap(functools.partial(mixed, p)))(x)
    assert share[..., 2:].sum() == 4 * 6
    assert largest_relative_error(found, expected) < 1e-5
    assert float(balance) == pytest.approx(2, rel=1e-2)


def sent(example, rows: int, length: int, devices: int) -> list[str]:
    """Return what an example prints of its collectives, from the sizes of what a device sends."""
    own = rows * length // devices  # tokens of a device
    if example is mixtral:
        block = devices * own * mixtral.K * 4
        return [
            f"3 all-to-alls per micro-batch, {2 * block * mixtral.D + block} B",
            f"2 all-to-alls per micro-batch, {2 * block * mixtral.D} B",
        ]
    return [f"{2 * (devices - 1)} collective-permutes per micro-batch, {2 * (devices - 1) * own * ring.D * 4} B"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("example", AXIS, ids=lambda example: example.__name__)
def test_an_example_verifies_itself_learns_and_sends_what_it_must(example):
    lines = documents.printed(example).splitlines()
    (losses,) = (re.findall(r"[\d.]+", line) for line in lines if line.startswith("loss ") and " to " in line)
    first, last = map(float, losses)
    assert last < 0.6 * first
    (verified,) = (line for line in lines if "gradients" in line)
    errors = [float(error) for error in re.findall(r"relative error (\S+?)(?:;| at )", verified)]
    assert len(errors) == 2
    assert max(errors) < 1e-6
    forward, backward = sent(example, lora.B, lora.LENGTH, 2)
    assert f"stage 0 F: {forward} on a device" in lines
    assert {f"stage {number} B: {backward} on a device" for number in (0, 1)} < set(lines)

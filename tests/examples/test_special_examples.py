"""Test the GPT, and examples of models that pipelines seldom run: loss and gradients equal a twin's in plain jax."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import attention_residuals, balance_loss, gpt, multi_token
from ipu_jax import Pipeline
from support import documents
from support.against_plain import assert_equals_plain, bubbles_hold_nan  # noqa: F401 (a fixture)

EXAMPLES = {balance_loss: ("dualpipev",), attention_residuals: ("1f1b", "zb-h1", "zbv"), multi_token: ("1f1b", "zb-h1")}


# per example, the mean loss of a batch, for whole weights


def loss_of_experts(weights, batch):
    def of_micro_batch(x, y):
        balance = 0.0
        for name in sorted(weights):
            router, up, down = (weights[name][key] for key in ("router", "up", "down"))
            scores = jnp.exp(x @ router)
            chances = scores / scores.sum(1, keepdims=True)
            number = jnp.argmax(scores, 1)
            rows = jnp.arange(len(x))
            hidden = jax.nn.gelu(jax.vmap(jnp.dot)(x, up[number]))
            x = x + chances[rows, number][:, None] * jax.vmap(jnp.dot)(hidden, down[number])
            shares = jnp.bincount(number, length=4) / len(x)
            balance += 0.01 * 4 * shares @ chances.mean(0)
        return jnp.square(x - y).mean() + balance

    return jax.vmap(of_micro_batch)(batch["x"], batch["y"]).mean()


def loss_of_residuals(weights, batch):
    outputs = [batch["x"]]
    for name in sorted(weights):
        p = weights[name]
        query = p.get("query", 0)
        scores = [jnp.exp((y * query).sum(-1) / jnp.sqrt(jnp.square(y).mean(-1) + 1e-6)) for y in outputs]
        scores = jnp.stack(scores)[..., None]
        mixed = (scores * jnp.stack(outputs)).sum(0) / scores.sum(0)
        outputs.append(jax.nn.gelu(mixed @ p["up"]) @ p["down"])
    return jnp.square(outputs[-1] - batch["y"]).mean()


def loss_of_tokens(weights, batch):
    table, tokens = weights["table"], batch["tokens"]
    length = tokens.shape[-1] - 2
    normed = lambda x: x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    def block(k, x):
        before, p = jnp.stack([normed(x)[:, :, : t + 1].sum(2) for t in range(length)], 2), weights["blocks"][k]
        return x + jax.nn.gelu(before @ p["up"]) @ p["down"]

    def cross_entropy(x, labels):
        chances = jax.nn.log_softmax(normed(x) @ table.T)
        return -jnp.take_along_axis(chances, labels[..., None], -1).mean()

    ahead = [tokens[:, :, k : k + length] for k in range(3)]
    x = block(1, block(0, table[ahead[0]]))
    both = jnp.concatenate([normed(x), normed(table[ahead[1]])], -1)
    further = block(2, both @ weights["join"])
    return cross_entropy(x, ahead[1]) + 0.3 * cross_entropy(further, ahead[2])


TWINS = {balance_loss: loss_of_experts, attention_residuals: loss_of_residuals, multi_token: loss_of_tokens}
CASES = [(example, schedule) for example, schedules in EXAMPLES.items() for schedule in schedules]
name_of = lambda value: value if isinstance(value, str) else value.__name__.split(".")[-1]


@pytest.mark.fast("balance_loss-dualpipev")
@pytest.mark.parametrize(("example", "schedule"), CASES, ids=name_of)
def test_loss_and_gradients_equal_a_dense_twin(example, schedule):
    weights, batch = example.make_data()
    pipeline = example.make_pipeline(schedule)
    assert pipeline.schedule.name == schedule
    assert_equals_plain(pipeline, weights, batch, lambda weights: TWINS[example](weights, batch))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_an_example_verifies_itself(example):
    lines = documents.printed(example).splitlines()
    assert [line.split(":")[0] for line in lines] == list(EXAMPLES[example])
    for line in lines:
        assert documents.where_shown("largest relative error 1.0e-06", line) is not None, line


# a GPT that trains on the machine's devices

WIDTH, BLOCKS, VOCABULARY, TOKENS = 256, 4, 30, 6  # two heads; three IPUs or four cannot share 30 rows evenly


def loss_of_gpt(weights, batch):
    def norm(x):
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def attend(x, w):
        q, k, v = (jnp.tensordot(x, w["qkv"][:, part], 1) for part in range(3))
        scores = jnp.einsum("btnk,bsnk->bnts", q, k) / np.sqrt(q.shape[-1])
        chances = jax.nn.softmax(jnp.where(np.tri(TOKENS, dtype=bool), scores, -jnp.inf))
        return jnp.tensordot(jnp.einsum("bnts,bsnk->btnk", chances, v), w["out"], 2)

    def of_micro_batch(tokens, targets):
        x = weights["table"][tokens]
        for w in weights["blocks"]:
            x = x + attend(norm(x), w)
            x = x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]
        log_chances = jax.nn.log_softmax(norm(x) @ weights["table"].T)
        return -jnp.take_along_axis(log_chances, targets[..., None], -1).mean()

    return jax.vmap(of_micro_batch)(batch["tokens"], batch["targets"]).mean()


def pipeline_of_gpt(ipus: int, schedule: str, weights: Any) -> Pipeline:
    given = {"ipus": ipus, "replicas": 1, "micro_batch": 2, "sequence": TOKENS, "schedule": schedule}
    return gpt.make_step(argparse.Namespace(**given, recompute="auto", gradient_accumulation=5), weights).model


@pytest.mark.slow
@pytest.mark.parametrize(("ipus", "schedule"), [(1, "grouped"), (2, "1f1b"), (3, "grouped"), (4, "zb-h1")])
def test_loss_and_gradients_of_the_gpt_equal_a_dense_twin(ipus, schedule):
    random = np.random.default_rng(ipus)
    draw = lambda shape: random.normal(scale=0.1, size=shape.shape).astype(np.float32)
    weights = jax.tree.map(draw, gpt.shapes(WIDTH, BLOCKS, VOCABULARY))
    batch = {name: random.integers(VOCABULARY, size=(5, 2, TOKENS), dtype=np.int32) for name in ("tokens", "targets")}
    pipeline = pipeline_of_gpt(ipus, schedule, weights)
    assert (pipeline.ipus, pipeline.schedule.name) == (ipus, schedule)
    assert_equals_plain(pipeline, weights, batch, lambda weights: loss_of_gpt(weights, batch))


@pytest.mark.slow
def test_the_gpt_trains_on_the_devices_of_a_machine():
    flags = "--ipus 2 --width 64 --blocks 2 --sequence 16 --vocabulary 64 --gradient-accumulation 2 --updates 4"
    losses = [float(line.split()[-1]) for line in documents.printed(gpt, *flags.split()).splitlines()]
    assert len(losses) == 4
    assert abs(losses[0] - np.log(64)) < 0.1  # it knows nothing yet
    assert losses == sorted(losses, reverse=True)

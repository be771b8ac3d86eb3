"""Test the GPT example: its loss and gradients equal a dense twin's, and it trains on the machine's devices."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import gpt
from ipu_jax import Pipeline
from support import documents
from support.against_plain import assert_equals_plain, bubbles_hold_nan  # noqa: F401 (a fixture)

WIDTH, BLOCKS, VOCABULARY, TOKENS = 256, 4, 30, 6  # two heads; three IPUs or four cannot share 30 rows evenly


def twin(weights, batch):
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


def pipeline_of(ipus: int, schedule: str, weights: Any) -> Pipeline:
    given = {"ipus": ipus, "replicas": 1, "micro_batch": 2, "sequence": TOKENS, "schedule": schedule}
    return gpt.make_step(argparse.Namespace(**given, recompute="auto", gradient_accumulation=5), weights).model


@pytest.mark.slow
@pytest.mark.parametrize(("ipus", "schedule"), [(1, "grouped"), (2, "1f1b"), (3, "grouped"), (4, "zb-h1")])
def test_loss_and_gradients_equal_a_dense_twin(ipus, schedule):
    random = np.random.default_rng(ipus)
    draw = lambda shape: random.normal(scale=0.1, size=shape.shape).astype(np.float32)
    weights = jax.tree.map(draw, gpt.shapes(WIDTH, BLOCKS, VOCABULARY))
    batch = {name: random.integers(VOCABULARY, size=(5, 2, TOKENS), dtype=np.int32) for name in ("tokens", "targets")}
    pipeline = pipeline_of(ipus, schedule, weights)
    assert (pipeline.ipus, pipeline.schedule.name) == (ipus, schedule)
    assert_equals_plain(pipeline, weights, batch, lambda weights: twin(weights, batch))


@pytest.mark.slow
def test_it_trains_on_the_devices_of_a_machine():
    flags = "--ipus 2 --width 64 --blocks 2 --sequence 16 --vocabulary 64 --gradient-accumulation 2 --updates 4"
    losses = [float(line.split()[-1]) for line in documents.printed(gpt, *flags.split()).splitlines()]
    assert len(losses) == 4
    assert abs(losses[0] - np.log(64)) < 0.1  # it knows nothing yet
    assert losses == sorted(losses, reverse=True)

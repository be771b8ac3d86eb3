"""Test generation with a cache of keys and values as a stage's state, against a model that reads all tokens anew."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from sharded_ops import argmax, embedding, sample, tied_projection
from support import transformer

V, T, D, N, LAYERS = 11, 9, 8, 2, 2
GROUPS, B, PROMPT = 3, 2, 3
CHOOSE = 5  # the number of the stage that chooses tokens


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    normal = lambda *shape: rng.normal(scale=0.5, size=shape).astype(np.float32)
    norm = lambda: {"scale": 1 + normal(D) / 9, "bias": normal(D) / 9}

    def block() -> dict[str, Any]:
        attention = {"qkv": normal(D, 3, N, D // N), "out": normal(N, D // N, D)}
        return {
            "norm1": norm(),
            "attention": attention,
            "norm2": norm(),
            "mlp": {"up": normal(D, 9), "down": normal(9, D)},
        }

    blocks = {f"block{k}": block() for k in range(LAYERS)}
    return {"table": normal(V, D), "positions": normal(T, D), "norm": norm(), **blocks}


def layer_norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def embed(table, _, mb):
    return embedding(table, mb["token"], size=V)


def add_position(positions, x, mb):
    return x + positions[mb["position"]]


def cached_block(p, x, mb, *, state):
    """Read one token of each sequence (B, D), and the keys and values (GROUPS, B, T, N, K) of those before it."""
    q, k, v = jnp.einsum("bd,dcnk->cbnk", layer_norm(p["norm1"], x), p["attention"]["qkv"])
    at = mb["group"], slice(None), mb["position"]
    state = {"k": state["k"].at[at].set(k), "v": state["v"].at[at].set(v)}
    keys, values = state["k"][mb["group"]], state["v"][mb["group"]]
    scores = jnp.einsum("bnk,bsnk->bns", q, keys) / np.sqrt(D // N)
    chances = jax.nn.softmax(jnp.where(jnp.arange(T) <= mb["position"], scores, -jnp.inf))
    x = x + jnp.einsum("bns,bsnk,nkd->bd", chances, values, p["attention"]["out"])
    return Outputs(x + jax.nn.gelu(layer_norm(p["norm2"], x) @ p["mlp"]["up"]) @ p["mlp"]["down"], state=state)


def choose(table, x, mb, *, key):
    logits = tied_projection(x, table, size=V)
    return argmax(logits, size=V) if key is None else sample(key, logits, size=V, temperature=0.8)


def generator(ipus: int, places: tuple[int, int], *, concurrent: bool) -> Pipeline:
    """Return a pipeline that is never trained: its functions for training do not matter."""
    ends = [ALL_IPUS, ALL_IPUS] if concurrent else [places[0], places[0]]
    blocks = [
        Stage(cached_block, params=f"block{k}", state=f"cache{k}", ipu=place, predict=cached_block)
        for k, place in enumerate(places)
    ]
    stages = [
        Stage(embed, params="table", ipu=ALL_IPUS, name="embedding"),
        Stage(add_position, params="positions", ipu=ends[0]),
        *blocks,
        Stage(lambda p, x, mb: layer_norm(p, x), params="norm", ipu=ends[1]),
        Stage(choose, params="table", ipu=ALL_IPUS, name="projection", random=True, predict=choose),
    ]
    specs = {"table": P("ipu", None)} | ({"positions": P(), "norm": P()} if concurrent else {})
    return Pipeline(stages, mesh=make_mesh(1, ipus), specs=specs)


def generated(pipeline: Pipeline, prompts: np.ndarray, key: Any) -> np.ndarray:
    cache = {name: np.zeros((GROUPS, B, T, N, D // N), np.float32) for name in "kv"}
    params = pipeline.shard(WEIGHTS)
    state = pipeline.shard_state({f"cache{k}": cache for k in range(LAYERS)})
    tokens = list(np.moveaxis(prompts, -1, 0))
    for t in range(T - 1):
        batch = {"token": tokens[t], "position": np.full(GROUPS, t), "group": np.arange(GROUPS)}
        of_step = None if key is None else jax.random.fold_in(key, t)
        chosen, state = pipeline.predict(params, batch, state, of_step, return_state=True)
        if t + 1 >= PROMPT:
            tokens.append(np.asarray(chosen))
    return np.stack(tokens, -1)


@jax.jit
def dense_logits(tokens: jax.Array) -> jax.Array:
    """Return the logits (T, V) of one sequence (T,) of tokens."""
    x = jnp.asarray(WEIGHTS["table"])[tokens] + WEIGHTS["positions"]
    for k in range(LAYERS):
        x = transformer.block(WEIGHTS[f"block{k}"], x)
    return transformer.normalised(WEIGHTS["norm"], x) @ WEIGHTS["table"].T


def dense_generated(prompts: np.ndarray, key: Any) -> np.ndarray:
    alone = Mesh(jax.devices()[:1], ("ipu",), axis_types=(AxisType.Auto,))
    draw = lambda key, logits: sample(key, logits, size=V, temperature=0.8)
    drawn = jax.jit(jax.shard_map(draw, mesh=alone, in_specs=P(), out_specs=P(), check_vma=False))
    tokens = np.zeros((GROUPS, B, T), np.int32)
    tokens[..., :PROMPT] = prompts
    for t in range(PROMPT - 1, T - 1):
        for g in range(GROUPS):
            logits = np.stack([dense_logits(sequence)[t] for sequence in tokens[g]])
            if key is None:
                tokens[g, :, t + 1] = logits.argmax(-1)
            else:
                own = jax.random.fold_in(key, t)
                for number in (0, g, CHOOSE):  # the replica, the micro-batch, the stage
                    own = jax.random.fold_in(own, number)
                tokens[g, :, t + 1] = drawn(own, logits)
    return tokens


WEIGHTS = weights()
PROMPTS = np.random.default_rng(5).integers(V, size=(GROUPS, B, PROMPT)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ipus", "places", "concurrent"),
    [
        (2, (0, 1), True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, (0, 0), True), (2, (1, 0), False))),
        pytest.param(4, (3, 1), True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", [11, pytest.param(None, marks=pytest.mark.slow)])
def test_tokens_of_a_cache_in_the_state_are_those_of_the_dense_model(ipus, places, concurrent, seed):
    pipeline = generator(ipus, places, concurrent=concurrent)
    if not concurrent:  # positions and norm beside different blocks
        stages = list(pipeline.stages)
        assert [stage.place for stage in stages] == [None, 1, 1, 0, 1, None]
    key = None if seed is None else jax.random.key(seed)
    found = generated(pipeline, PROMPTS, key)
    np.testing.assert_array_equal(found, dense_generated(PROMPTS, key))
    assert len({tuple(row) for row in found[..., PROMPT:].reshape(-1, T - PROMPT)}) > 1

"""Test two functions with one state: the second has it where the first does, and both equal plain jax."""

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax import Pipeline, stage_end
from support.dense import largest_relative_error
from support.layers import normal
from support.refusals import refusals, refused

D, T, B, PROMPT = 8, 512, 2, 4
PARAMS = {
    name: normal(*shape, seed=seed)
    for seed, (name, shape) in enumerate(
        {"up": (D, 8 * D), "down": (8 * D, D), "qkv": (D, 3 * D), "out": (D, 8 * D), "last": (8 * D, D)}.items()
    )
}
CACHE = {
    "k": np.zeros((B, T, D), np.float32),
    "v": np.zeros((B, T, D), np.float32),
    "latest": np.zeros((B, D), np.float32),
    "calls": np.zeros((), np.float32),
    "tokens": np.zeros((), np.float32),
}
PROMPTS = {"x": normal(B, PROMPT, D, seed=7), "at": np.int32(0)}
TOKEN = {"x": normal(B, 1, D, seed=8), "at": np.int32(PROMPT)}


def attend(q, k, v, seen):
    return jax.nn.softmax(jnp.where(seen, q @ jnp.swapaxes(k, 1, 2), -1e9)) @ v


def qkv(p, x):
    return jnp.split(jnp.tanh(x @ p["up"]) @ p["down"] @ p["qkv"], 3, -1)


def project(p, y):
    return jnp.tanh(y @ p["out"]) @ p["last"]


def loss(p, inputs):
    q, k, v = stage_end(qkv(p, inputs["x"]))
    return jnp.square(project(p, attend(q, k, v, jnp.tri(PROMPT, dtype=bool)))).mean()


def with_rows(cache, inputs, k, v):
    put = lambda old, new: jax.lax.dynamic_update_slice(old, new, (0, inputs["at"], 0))
    return cache | {"k": put(cache["k"], k), "v": put(cache["v"], v)}


def prefill(p, cache, inputs):
    """Attend to the prompt alone, which is little work; both stages read the two numbers of the cache."""
    numbers = cache["calls"] + cache["tokens"]
    q, k, v = qkv(p, inputs["x"] + numbers)
    y = project(p, attend(q, k, v, jnp.tri(PROMPT, dtype=bool))) * (1 + numbers)
    new = {"calls": cache["calls"] + 1, "tokens": cache["tokens"] + PROMPT, "latest": y[:, -1]}
    return y, with_rows(cache, inputs, k, v) | new


def decode(p, cache, inputs):
    """Attend to the whole cache; replace a number by an activation, and the latest output by an earlier value."""
    q, k, v = qkv(p, inputs["x"])
    new = {"calls": cache["calls"] + q.max(), "tokens": cache["tokens"] + 1}
    new = with_rows(cache, inputs, k, v) | new
    y = attend(q, new["k"], new["v"], jnp.arange(T) <= inputs["at"] + jnp.arange(q.shape[1])[:, None])
    return project(p, y), new | {"latest": 2 * q[:, -1]}


def pipeline_of(ipus: int = 2) -> Pipeline:
    return Pipeline.from_function(loss, PARAMS, PROMPTS, ipus=ipus, gradient_accumulation=2)


def test_a_function_takes_and_returns_the_state_of_another_one():
    pipeline = pipeline_of()
    weights, first = pipeline.shard(PARAMS), pipeline.forward(prefill, PROMPTS, state=CACHE)
    second = pipeline.forward(decode, TOKEN, state=first)
    placed = first.shard_state(CACHE)
    alone = pipeline.forward(decode, TOKEN, state=CACHE).shard_state(CACHE)
    assert {group.name: len(group.leaves) for group in placed.layout.groups} == {"stage 0": 4, "stage 1": 3}
    assert alone.layout != placed.layout  # so that it matters
    cache = CACHE
    three = {**TOKEN, "x": np.repeat(TOKEN["x"], 3, 1)}
    for function, fn, like in ((first, prefill, PROMPTS), (second, decode, TOKEN), (second, decode, three)) * 2:
        inputs = jax.tree.map(lambda leaf: np.asarray(normal(*leaf.shape) if leaf.shape else PROMPT), like)
        inputs["at"] = np.int32(0 if fn is prefill else PROMPT)
        found, placed = function(weights, jax.tree.map(lambda leaf: leaf[None], inputs), placed)
        expected, cache = jax.jit(fn)(PARAMS, cache, inputs)
        assert largest_relative_error(found[0], expected) < 1e-6
    jax.tree.map(lambda *both: np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-6), first.unshard(placed), cache)


def read_early(p, cache, inputs):
    return project(p, qkv(p, inputs["x"] * cache["latest"].mean())[0]), cache


def replaced_late(p, cache, inputs):
    y = project(p, qkv(p, inputs["x"])[0])
    return y, cache | {"calls": y.max()}


def sharing(of, fn=decode):
    return lambda pipeline: pipeline.forward(fn, TOKEN, state=of(pipeline))


@refusals(
    (sharing(lambda pipeline: pipeline.forward(project, TOKEN["x"])), "has no state of its own", "made with state="),
    (sharing(lambda _: pipeline_of(1).forward(prefill, PROMPTS, state=CACHE)), "with stages in other places", "a tree"),
    (
        sharing(lambda pipeline: pipeline.forward(prefill, PROMPTS, state=CACHE), replaced_late),
        "state['calls'] of stage 0 is read (test_shared_state.py",
        "after params['out'] of stage 1",
    ),
    (
        sharing(lambda pipeline: pipeline.forward(prefill, PROMPTS, state=CACHE), read_early),
        "params['up'] of stage 0 is read (test_shared_state.py",
        "after state['latest'] of stage 1: read weights in the order of the loss function",
    ),
)
def test_a_state_that_cannot_be_shared(call, holds):
    pipeline = pipeline_of()
    with refused(*holds):
        call(pipeline)

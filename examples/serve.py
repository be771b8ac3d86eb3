"""Train a small GPT on any number of IPUs, and serve it from the trained weights, where they are.

    IPU 0   tokens -> table, layers 0-1 \\                               a b c d .     the ticks of one decoding step
    IPU 1                                -> layers 2-3, table -> tokens  . a b c d     of four groups of sequences

Each IPU keeps the keys and values of its own layers. A group's prompts fill its slot of the cache; then each step adds
a token to every sequence, at its own position, and a new group can take a slot while the others go on. A step of m
groups on S IPUs takes m+S-1 ticks: the bubble costs (S-1)/(m+S-1) per token. Take another engine if the model fits one
device, or if the latency of a single stream counts, whose tokens pass all IPUs one after the other. Run it on 1, 2 or 4
IPUs: python -m examples.serve IPUS
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Feed, Pipeline, cli, configure, fit, make_train_step

VOCABULARY, FEATURES, HEADS, LAYERS, LENGTH = 32, 32, 2, 4, 32
PROMPT, GROUPS, B = 6, 4, 2  # tokens of the longest prompt, slots of the cache, sequences of a group


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def model(params, tokens, at=0, caches=None, slot=0):
    """Return activations (B, T, features) of tokens (B, T), which begin at position at[b], and the new cache."""
    positions = jnp.reshape(at, (-1, 1)) + jnp.arange(tokens.shape[1])
    written = slot, jnp.arange(len(tokens))[:, None], positions
    x, new = params["table"][tokens] + params["positions"][positions], []
    for w, cache in zip(params["layers"], caches or [None] * LAYERS, strict=True):  # a scan copies all slots' rows
        q, k, v = jnp.split((norm(x) @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        if cache is not None:
            cache = {"k": cache["k"].at[written].set(k), "v": cache["v"].at[written].set(v)}
            k, v = cache["k"][slot], cache["v"][slot]
        seen = jnp.arange(k.shape[1]) <= positions[:, None, :, None]
        x = x + jax.nn.dot_product_attention(q, k, v, mask=seen).reshape(x.shape) @ w["out"]
        x = x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]
        new.append(cache)
    return norm(x), new


def loss(params, batch):
    logits = model(params, batch["tokens"])[0] @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:]).mean()


def next_tokens(params, caches, group):
    """Return the likeliest token (B,) after token last[b] of each sequence of a group, and the new cache."""
    x, caches = model(params, group["tokens"], group["at"], caches, group["slot"])
    return (jnp.take_along_axis(x, group["last"][:, None, None], 1)[:, 0] @ params["table"].T).argmax(-1), caches


def init(key) -> dict:
    keys, d = iter(jax.random.split(key, 2 + 4 * LAYERS)), FEATURES
    draw = lambda *shape: 0.1 * jax.random.normal(next(keys), shape)
    layer = lambda: {"qkv": draw(d, 3 * d), "out": draw(d, d), "up": draw(d, 4 * d), "down": draw(4 * d, d)}
    return {"table": draw(VOCABULARY, d), "positions": draw(LENGTH, d), "layers": [layer() for _ in range(LAYERS)]}


def sequences(seed: int, *count: int) -> np.ndarray:
    """Return sequences that count up by 1, 2 or 3, modulo the vocabulary."""
    random = np.random.default_rng(seed)
    start, pace = random.integers(VOCABULARY, size=(*count, 1)), random.integers(1, 4, size=(*count, 1))
    return ((start + pace * np.arange(LENGTH)) % VOCABULARY).astype(np.int32)


def serve(pipeline: Pipeline, weights, prompts, lengths, steps: int) -> list:
    """Return the tokens after the prompts of each of GROUPS + 1 groups; the last group takes slot 1 halfway."""
    slots, rows = np.append(np.arange(GROUPS), 1), np.zeros((GROUPS, B, LENGTH, HEADS, FEATURES // HEADS), np.float32)
    prompt, empty = {"tokens": prompts, "at": 0 * lengths, "last": lengths - 1, "slot": slots}, {"k": rows, "v": rows}
    of = lambda groups: {name: leaf[groups] for name, leaf in prompt.items()}
    prefill = pipeline.forward(next_tokens, of(0), state=[empty] * LAYERS)
    decode = pipeline.forward(next_tokens, of(0) | {"tokens": prompts[0, :, :1]}, state=prefill)
    groups, served = np.arange(GROUPS), [[] for _ in prompts]  # the group in each slot, and its tokens
    tokens, cache = prefill(weights, of(groups), prefill.shard_state([empty] * LAYERS))
    print(decode, cache, sep="\n")  # each IPU has the rows of its layers
    for step in range(steps):
        tokens = np.array(tokens)
        if step == steps // 2:  # group 1 has ended
            groups[1] = GROUPS
            tokens[1:2], cache = prefill(weights, of(groups[1:2]), cache)
        for group, found in zip(groups, tokens, strict=True):
            served[group].append(found)
        at = lengths[groups] + np.array([[len(served[group]) - 1] for group in groups])
        tokens, cache = decode(weights, of(groups) | {"tokens": tokens[..., None], "at": at, "last": 0 * at}, cache)
    return served


def continued(params, prompts, lengths, count: int) -> np.ndarray:
    """Return count tokens after prompts (B, PROMPT), each by the whole model on one device, without a cache."""
    tokens, rows, at = np.zeros((B, LENGTH), np.int32), np.arange(B), lengths + np.arange(count)[:, None]
    tokens[:, :PROMPT] = prompts
    logits = jax.jit(lambda tokens: model(params, tokens)[0] @ params["table"].T)
    for now in at:
        tokens[rows, now] = logits(tokens)[rows, now - 1].argmax(-1)
    return tokens[rows, at]


def main(ipus: int = 2, updates: int = 60) -> None:
    configure(ipus)
    key, tokens = jax.random.key(0), sequences(0, 512)
    shapes = jax.eval_shape(init, key)
    pipeline = Pipeline.from_function(loss, shapes, {"tokens": tokens[:8]}, ipus=ipus, gradient_accumulation=4)
    step = make_train_step(pipeline, optax.adam(1e-2))
    with Feed({"tokens": tokens}, step=step, micro_batch=8) as feed:
        state = fit(step, step.init(init, key), feed, updates=updates).state
    prompts, whole = sequences(1, GROUPS + 1, B)[..., :PROMPT], step.whole(state)["params"]
    lengths = np.random.default_rng(2).integers(2, PROMPT + 1, size=(GROUPS + 1, B), dtype=np.int32)
    served = serve(step.model, state.params, prompts, lengths, LENGTH - PROMPT)
    same = np.concatenate([s == continued(whole, prompts[k], lengths[k], len(s)) for k, s in enumerate(served)])
    print(f"{same.sum()} of {same.size} tokens equal greedy decoding without a cache on one device")
    print(f"{ipus - 1} of {GROUPS + ipus - 1} ticks of each IPU per token of {GROUPS} groups are a bubble")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT, and serve it from the trained weights.")
    parser.add_argument("ipus", nargs="?", type=int, default=2, choices=(1, 2, 4), help="IPUs (default: 2)")
    parser.add_argument("updates", nargs="?", type=cli.count, default=60, help="weight updates (default: 60)")
    main(**vars(parser.parse_args()))

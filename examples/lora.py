"""Train LoRA adapters in float32 on a frozen base in bfloat16, save them alone, and merge them.

Each IPU holds the base, the adapters and Adam's moments of its own layers; the base has neither gradients nor moments.
The base learns to count up, and then the adapters to count down: python -m examples.lora
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Feed, Pipeline, configure, fit, make_train_step, verify
from ipu_jax.io import export_weights, import_weights

VOCABULARY, FEATURES, HEADS, LAYERS, LENGTH, RANK, B, M = 64, 32, 2, 4, 16, 4, 8, 4
norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def layer(x, w, low):
    product = lambda x, name: x @ w[name] + (x @ low[name]["a"] @ low[name]["b"] if low else 0)
    q, k, v = jnp.split(product(norm(x), "qkv").reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
    x = x + product(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), "out")
    return x + product(jax.nn.gelu(product(norm(x), "up")), "down")


def model(base, lora, tokens):
    """Return logits (B, T, V) of tokens (B, T), in float32: so JAX computes float32 times bfloat16."""
    x = base["table"][tokens].astype(jnp.float32) + base["positions"]
    for w, low in zip(base["layers"], lora or [None] * len(base["layers"]), strict=True):
        x = layer(x, w, low)
    return norm(x) @ base["table"].T


def loss(params, batch):
    logits = model(params["base"], params.get("lora"), batch["tokens"])[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def make_base(features: int = FEATURES, layers: int = LAYERS) -> dict:
    random, d = np.random.default_rng(0), features
    draw = lambda *shape: random.normal(scale=0.1, size=shape).astype(np.float32)
    one = lambda: {"qkv": draw(d, 3 * d), "out": draw(d, d), "up": draw(d, 4 * d), "down": draw(4 * d, d)}
    return {"table": draw(VOCABULARY, d), "positions": draw(LENGTH, d), "layers": [one() for _ in range(layers)]}


def make_adapters(base) -> list:
    """Return a (in, rank) and b (rank, out) for each product of each layer; a @ b is zero at first."""
    random = np.random.default_rng(1)
    draw = lambda *shape: (random.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)
    return jax.tree.map(lambda w: {"a": draw(len(w), RANK), "b": 0 * draw(RANK, w.shape[1])}, base["layers"])


def merged(base, lora):
    """Return the base in float32, with a @ b added to its products."""
    whole = jax.tree.map(np.float32, base)
    for w, low in zip(whole["layers"], lora, strict=True):
        w |= {name: w[name] + low[name]["a"] @ low[name]["b"] for name in w}
    return whole


def sequences(seed: int, sign: int) -> dict[str, np.ndarray]:
    """Return sequences that count up (sign 1) or down (-1) by 1, 2 or 3, modulo the vocabulary."""
    random = np.random.default_rng(seed)
    start, pace = random.integers(VOCABULARY, size=(512, 1)), random.integers(1, 4, size=(512, 1))
    return {"tokens": ((start + sign * pace * np.arange(LENGTH)) % VOCABULARY).astype(np.int32)}


def trained(loss, params, data, updates: int = 60, **options):
    """Return the pipeline of a loss function and its state after some updates, verified."""
    one, batch = ({name: rows[: M * B].reshape(M, B, -1)[k] for name, rows in data.items()} for k in (0, slice(M)))
    pipeline = Pipeline.from_function(loss, params, one, schedule="1f1b", gradient_accumulation=M, **options)
    step = make_train_step(pipeline, optax.adam(1e-2))
    with Feed(data, step=step, micro_batch=B) as feed:
        result = fit(step, step.init(params), feed, updates=updates, say=lambda line: None)
    print(pipeline, f"loss {result.losses[0]:.3f} to {result.losses[-1]:.3f}", sep="\n")
    print(verify(pipeline, result.state.params, batch))
    return pipeline, result.state


def main() -> None:
    down, tokens = sequences(1, -1), sequences(2, -1)["tokens"][:B]
    plain, state = trained(loss, {"base": make_base()}, sequences(0, 1), ipus=2)
    base = jax.tree.map(lambda w: w.astype(jnp.bfloat16), plain.unshard(state.params)["base"])
    params = {"base": base, "lora": make_adapters(base)}
    pipeline, state = trained(loss, params, down, ipus=2, frozen={"base": True, "lora": False})
    for name, tree in {**params, "moments of Adam": state.optimizer}.items():
        print(f"{name}: {sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 1000:.1f} kB")
    with tempfile.TemporaryDirectory() as folder:
        export_weights(f"{folder}/adapters.safetensors", state, ignore="base/*")
        saved = import_weights(f"{folder}/adapters.safetensors", {"lora": params["lora"]})
    logits = pipeline.forward(lambda params, tokens: model(params["base"], params["lora"], tokens), tokens)
    error = abs(model(merged(base, saved["lora"]), None, tokens) - logits(state.params, tokens[None])[0]).max()
    print(f"on one device, with the saved adapters merged, logits differ by {error:.1e} at most")


if __name__ == "__main__":
    configure(2)
    main()

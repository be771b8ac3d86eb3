"""Whole models in plain jax, as their authors would write them. Each function returns an `Example`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .example import LENGTH, ROWS, VOCAB, D, Example, cross_entropy, normal, rows, squared_error, tokens


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def attention(p: Any, x: jax.Array, context: jax.Array, mask: jax.Array | None = None, heads: int = 2) -> jax.Array:
    split = lambda y: y.reshape(*y.shape[:-1], heads, -1)
    y = jax.nn.dot_product_attention(split(x @ p["q"]), split(context @ p["k"]), split(context @ p["v"]), mask=mask)
    return y.reshape(x.shape) @ p["o"]


def mlp(p: Any, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def block(p: Any, x: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
    h = norm(x, p["norm1"])
    x = x + attention(p["attention"], h, h, mask)
    return x + mlp(p["mlp"], norm(x, p["norm2"]))


def attention_weights(rng: np.random.Generator, *lead: int) -> dict[str, np.ndarray]:
    return {name: normal(rng, *lead, D, D) for name in "qkvo"}


def block_weights(rng: np.random.Generator, *lead: int) -> dict[str, Any]:
    return {
        "norm1": np.ones((*lead, D), np.float32),
        "attention": attention_weights(rng, *lead),
        "norm2": np.ones((*lead, D), np.float32),
        "mlp": {"up": normal(rng, *lead, D, 2 * D), "down": normal(rng, *lead, 2 * D, D)},
    }


def scanned_gpt() -> Example:
    """Layers are one scan over stacked weights, recomputed in the backward pass; the embedding is tied."""
    rng = np.random.default_rng(0)
    params = {
        "embed": normal(rng, VOCAB, D),
        "position": normal(rng, LENGTH, D),
        "blocks": block_weights(rng, 6),
        "norm": np.ones(D, np.float32),
    }

    def logits(params, batch):
        x = params["embed"][batch["ids"]] + params["position"][: batch["ids"].shape[1]]
        x, _ = lax.scan(jax.checkpoint(lambda x, p: (block(p, x), None)), x, params["blocks"])
        return norm(x, params["norm"]) @ params["embed"].T

    def loss(params, batch):
        return cross_entropy(logits(params, batch), batch["labels"])

    return Example(loss, params, tokens, outputs=logits)


def scan_that_carries_a_key() -> Example:
    """Each layer splits the key that the scan carries, for its dropout."""
    rng = np.random.default_rng(2)
    params = {"layers": {"w": normal(rng, 5, D, D), "b": normal(rng, 5, D)}, "out": normal(rng, D, D)}

    def outputs(params, batch, key):
        def layer(carry, p):
            x, key = carry
            key, own = jax.random.split(key)
            y = jax.nn.relu(x @ p["w"] + p["b"])
            return (x + jnp.where(jax.random.bernoulli(own, 0.7, y.shape), y / 0.7, 0.0), key), None

        (x, _), _ = lax.scan(layer, (batch["x"], key), params["layers"])
        return x @ params["out"]

    def loss(params, batch, key):
        return squared_error(outputs(params, batch, key), batch["y"])

    return Example(loss, params, rows, takes_key=True, outputs=outputs)


def metrics() -> Example:
    """The aux has numbers of several layers: floats, ints, and one that depends on the batch alone."""
    rng = np.random.default_rng(3)
    params = {"embed": normal(rng, VOCAB, D), "layers": [normal(rng, D, D) for _ in range(6)]}
    params["head"] = normal(rng, D, VOCAB)

    def loss(params, batch):
        x, norms = params["embed"][batch["ids"]], []
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w)
            norms.append(jnp.linalg.norm(x))
        logits = x @ params["head"]
        right = logits.argmax(-1) == batch["labels"]
        return cross_entropy(logits, batch["labels"]), {
            "norms": norms,
            "active": jnp.sum(x > 0),
            "right": right.sum(),
            "tokens": jnp.asarray(batch["ids"].size),
            "first": batch["ids"][:, 0],
            "logits": logits,
            "size of the table": jnp.abs(params["embed"]).max(),
        }

    return Example(loss, params, tokens)


def encoder_decoder() -> Example:
    """Each layer of the decoder reads the encoder's result: the decoder has no waist."""
    rng = np.random.default_rng(4)
    params = {
        "source": normal(rng, VOCAB, D),
        "target": normal(rng, VOCAB, D),
        "encoder": [block_weights(rng)],
        "decoder": [block_weights(rng) | {"cross": attention_weights(rng)} for _ in range(2)],
        "head": normal(rng, D, VOCAB),
    }

    def logits(params, batch):
        encoded = params["source"][batch["source"]]
        for p in params["encoder"]:
            encoded = block(p, encoded)
        mask = (batch["source"] > 0)[:, None, None, :]
        x = params["target"][batch["ids"]]
        for p in params["decoder"]:
            x = block(p, x)
            x = x + attention(p["cross"], x, encoded, mask)
        return x @ params["head"]

    def loss(params, batch):
        return cross_entropy(logits(params, batch), batch["labels"])

    def micro_batch(rng):
        return tokens(rng) | {"source": rng.integers(1, VOCAB, size=(ROWS, 4)).astype(np.int32)}

    return Example(loss, params, micro_batch, outputs=logits)


def reads_of_all_earlier_layers() -> Example:
    """Each layer reads a weighted sum of all earlier layers' results, as DenseNet and attention residuals do."""
    rng = np.random.default_rng(6)
    params = [{"query": normal(rng, D), "w": normal(rng, D, D)} for _ in range(6)]

    def outputs(params, batch):
        results = [batch["x"]]
        for p in params:
            stacked = jnp.stack(results)
            weights = jax.nn.softmax(stacked @ p["query"], axis=0)
            x = jnp.einsum("lr,lrd->rd", weights, stacked)
            results.append(jnp.tanh(x @ p["w"]))
        return jnp.concatenate(results, -1).mean(-1)

    def loss(params, batch):
        return squared_error(outputs(params, batch), batch["y"][:, 0])

    return Example(loss, params, rows, outputs=outputs)


@jax.custom_vjp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(4 * x) / 4


straight_through.defvjp(lambda x: (straight_through(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 2, g, 0.0),))


@jax.custom_jvp
def softcap(x: jax.Array, cap: float = 3.0) -> jax.Array:
    return cap * jnp.tanh(x / cap)


@softcap.defjvp
def _(primals, tangents):
    y = softcap(*primals)
    return y, 0.9 * (1 - (y / primals[1]) ** 2) * tangents[0]  # not the derivative: a wrong one would show


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scale_gradient(x: jax.Array, factor: float) -> jax.Array:
    return x


scale_gradient.defvjp(lambda x, factor: (x, None), lambda factor, _, g: (factor * g,))


def custom_derivatives() -> Example:
    """Functions have derivatives of their own: quantization, a soft cap, scaled gradients, and functions of jax.nn."""
    rng = np.random.default_rng(7)
    params = {f"layer {k}": normal(rng, D, D) for k in range(6)}

    def loss(params, batch):
        x = batch["x"]
        for k, activation in enumerate([jax.nn.relu6, jax.nn.silu, straight_through, jax.nn.relu]):
            x = x + activation(x @ params[f"layer {k}"])
        x = softcap(x @ params["layer 4"], 3.0)
        return squared_error(scale_gradient(x, 0.5) @ params["layer 5"], batch["y"])

    return Example(loss, params, rows)


def control_flow() -> Example:
    """Layers have a loop until the largest value is small enough, a loop with a counter, and branches."""
    rng = np.random.default_rng(8)
    params = {name: normal(rng, D, D) for name in ("in", "loop", "branch 0", "branch 1", "normed", "out")}

    def spectral_norm(w):
        def step(carry):
            u, _, turn = carry
            v = w.T @ u
            u = w @ (v / jnp.linalg.norm(v))
            return u / jnp.linalg.norm(u), jnp.linalg.norm(u), turn + 1

        start = jnp.ones(D) / jnp.sqrt(D), jnp.float32(0), 0
        return lax.while_loop(lambda carry: carry[2] < 5, step, start)[1]

    def outputs(params, batch):
        x = jnp.tanh(batch["x"] @ params["in"])
        x = lax.fori_loop(0, 3, lambda _, x: x + 0.5 * jnp.tanh(x @ params["loop"]), x)
        double, same = (lambda x: 2 * x @ params["branch 0"]), (lambda x: x @ params["branch 1"])
        x = lax.cond(x.mean() > 0, double, same, x)
        halvings = lax.while_loop(lambda n: jnp.abs(x).max() * 0.5**n > 1, lambda n: n + 1, jnp.int32(0))
        x = x * 0.5 ** lax.stop_gradient(halvings).astype(jnp.float32)
        x = x @ (params["normed"] / lax.stop_gradient(spectral_norm(params["normed"])))
        x = lax.switch(batch["choice"], [jnp.sin, jnp.tanh, lambda x: x], x)
        return x @ params["out"]

    def loss(params, batch):
        return squared_error(outputs(params, batch), batch["y"])

    return Example(loss, params, lambda rng: rows(rng) | {"choice": np.int32(rng.integers(3))}, outputs=outputs)


def jitted_layers() -> Example:
    """One jitted layer is called again and again, and calls a jitted function itself."""
    rng = np.random.default_rng(9)
    params = [{"w": normal(rng, D, D), "b": normal(rng, D)} for _ in range(6)]
    table = jnp.asarray(normal(rng, D))

    @jax.jit
    def act(x):
        return jnp.where(x > 0, x, 0.1 * x) + table

    @functools.partial(jax.jit, static_argnames="residual")
    def layer(p, x, residual):
        y = act(x @ p["w"] + p["b"])
        return x + y if residual else y

    def outputs(params, batch):
        x = batch["x"]
        for k, p in enumerate(params):
            x = layer(p, x, residual=k % 2 == 0)
        return x

    @jax.jit
    def loss(params, batch):
        return squared_error(outputs(params, batch), batch["y"])

    return Example(loss, params, rows, outputs=outputs)


def lstm() -> Example:
    """Two LSTM layers, each a scan over time, which no stage can share; and a head."""
    rng = np.random.default_rng(10)
    params: dict[str, Any] = {"embed": normal(rng, VOCAB, D), "head": normal(rng, D, VOCAB)}
    params["layers"] = [{"x": normal(rng, D, 4 * D), "h": normal(rng, D, 4 * D)} for _ in range(3)]

    def logits(params, batch):
        x = params["embed"][batch["ids"]].swapaxes(0, 1)
        for p in params["layers"]:

            def step(carry, x, p=p):
                h, c = carry
                i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"], 4, -1)
                c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (h, c), h

            zeros = jnp.zeros((x.shape[1], D))
            _, x = lax.scan(step, (zeros, zeros), x)
        return x.swapaxes(0, 1) @ params["head"]

    def loss(params, batch):
        return cross_entropy(logits(params, batch), batch["labels"])

    return Example(loss, params, tokens, outputs=logits)


def unused_weights() -> Example:
    """Nothing reads some leaves; some rows of a leaf; and one leaf has an effect on the aux alone."""
    rng = np.random.default_rng(11)
    params = {"layers": normal(rng, 6, D, D), "probe": normal(rng, D), "unused": {"w": normal(rng, 3), "n": None}}

    def outputs(params, batch):
        x = batch["x"]
        for k in range(5):
            x = jnp.tanh(x @ params["layers"][k])
        return x, lax.stop_gradient(x) @ params["probe"]

    def loss(params, batch):
        x, probed = outputs(params, batch)
        return squared_error(x, batch["y"]), probed

    return Example(loss, params, rows, outputs=outputs)


def recommender() -> Example:
    """Tables of integer features, a network of numbers, and products of all pairs."""
    rng = np.random.default_rng(12)
    sizes = [5, 9, 17]
    params = {
        "tables": [normal(rng, size, D) for size in sizes],
        "bottom": [normal(rng, D, D) for _ in range(3)],
        "top": [normal(rng, 14, D), normal(rng, D, D), normal(rng, D, 1)],
    }

    def logits(params, batch):
        x = batch["numbers"]
        for w in params["bottom"]:
            x = jax.nn.relu(x @ w)
        features = [table[batch["ids"][:, k]] for k, table in enumerate(params["tables"])]
        stacked = jnp.stack([x, *features], 1)
        products = jnp.einsum("rid,rjd->rij", stacked, stacked)
        first, second = jnp.triu_indices(4, k=1)
        x = jnp.concatenate([x, products[:, first, second]], -1)
        for w in params["top"][:-1]:
            x = jax.nn.relu(x @ w)
        return (x @ params["top"][-1])[:, 0]

    def loss(params, batch):
        logit = logits(params, batch)
        return jnp.mean(jax.nn.softplus(logit) - batch["clicked"] * logit)

    def micro_batch(rng):
        return {
            "numbers": rng.normal(size=(6, D)).astype(np.float32),
            "ids": np.stack([rng.integers(size, size=6) for size in sizes], 1).astype(np.int32),
            "clicked": rng.integers(2, size=6).astype(np.float32),
        }

    return Example(loss, params, micro_batch, outputs=logits)


def vae() -> Example:
    """The latent values are drawn with the key; the loss is a reconstruction and a divergence."""
    rng = np.random.default_rng(13)
    params = {
        "encoder": [normal(rng, D, D) for _ in range(3)],
        "mean": normal(rng, D, 4),
        "log_variance": normal(rng, D, 4),
        "decoder": [normal(rng, 4, D), normal(rng, D, D), normal(rng, D, D)],
    }

    def loss(params, batch, key):
        x = batch["x"]
        for w in params["encoder"]:
            x = jnp.tanh(x @ w)
        mean, log_variance = x @ params["mean"], x @ params["log_variance"]
        z = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
        for w in params["decoder"][:-1]:
            z = jnp.tanh(z @ w)
        reconstruction = squared_error(z @ params["decoder"][-1], batch["x"])
        divergence = -0.5 * jnp.mean(1 + log_variance - mean**2 - jnp.exp(log_variance))
        return reconstruction + 0.1 * divergence, {"reconstruction": reconstruction, "divergence": divergence}

    return Example(loss, params, lambda rng: {"x": rows(rng)["x"]}, takes_key=True)


PLAIN_MODELS = (
    scanned_gpt, scan_that_carries_a_key, metrics, encoder_decoder, reads_of_all_earlier_layers, custom_derivatives,
    control_flow, jitted_layers, lstm, unused_weights, recommender, vae,
)  # fmt: skip

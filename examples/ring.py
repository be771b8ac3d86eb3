"""Train on long sequences by ring attention: each device of an IPU has a part of the tokens, and sees all keys go by.

    IPU 0   device 0   tokens 0-7    \\  layer 0
            device 1   tokens 8-15   /           \\
    IPU 1   device 2   tokens 0-7    \\            -> layer 1 -> loss
            device 3   tokens 8-15   /

All but the attention is whole-array code, which XLA splits by tokens. The ring is a `jax.shard_map` over "context", an
axis of type Auto, in the function that `Pipeline.from_function` cuts. XLA pairs a permute with the permutes of all
devices of the mesh, so all IPUs run a layer together (`guards="uniform"`): the pipeline finds that out by itself. It
learns to count: python -m examples.ring

B sequences, T query tokens and S key tokens of a device, H heads of K features (Liu et al. 2023, arXiv:2310.01889).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from examples.lora import LENGTH, VOCABULARY, norm, sequences, trained
from examples.mixtral import exchanges
from ipu_jax import configure

D, HEADS, LAYERS = 32, 2, 2
TOKENS = PartitionSpec(None, "context")


def ring(q_BTHK, k_BSHK, v_BSHK, *, causal: bool):
    """Return what the queries of a device read from the values of all devices.

    Communicates over "context" N - 1 permutes of keys and of values in F, and as many of their gradients in B. The
    softmax is summed up block by block, relative to the largest score so far.
    """
    devices, own, length = lax.axis_size("context"), lax.axis_index("context"), q_BTHK.shape[1]
    to_next = [(i, (i + 1) % devices) for i in range(devices)]
    of_tokens = lambda device: device * length + jnp.arange(length)  # their places in the sequence
    largest_BHT1, total_BHT1, read_BHTK = -jnp.inf, 0.0, 0.0
    for step in range(devices):  # the own block is the first: it has a key for each query
        scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) / q_BTHK.shape[-1] ** 0.5
        if causal:
            seen_TS = of_tokens(own)[:, None] >= of_tokens((own - step) % devices)
            scores_BHTS = jnp.where(seen_TS, scores_BHTS, -jnp.inf)
        # the result does not depend on it, so its gradient is zero
        new_BHT1 = lax.stop_gradient(jnp.maximum(largest_BHT1, scores_BHTS.max(-1, keepdims=True)))
        shrunk_BHT1, chances_BHTS = jnp.exp(largest_BHT1 - new_BHT1), jnp.exp(scores_BHTS - new_BHT1)
        total_BHT1 = total_BHT1 * shrunk_BHT1 + chances_BHTS.sum(-1, keepdims=True)
        read_BHTK = read_BHTK * shrunk_BHT1 + jnp.einsum("bhts,bshk->bhtk", chances_BHTS, v_BSHK)
        largest_BHT1 = new_BHT1
        if step < devices - 1:
            k_BSHK, v_BSHK = lax.ppermute((k_BSHK, v_BSHK), "context", to_next)
    return jnp.moveaxis(read_BHTK / total_BHT1, 1, 2)


def layer(p, x_BTD, causal: bool):
    over_devices = jax.shard_map(
        functools.partial(ring, causal=causal), axis_names={"context"}, in_specs=(TOKENS,) * 3, out_specs=TOKENS
    )
    q, k, v = jnp.split((norm(x_BTD) @ p["qkv"]).reshape(*x_BTD.shape[:2], 3 * HEADS, -1), 3, axis=2)
    x_BTD += over_devices(q, k, v).reshape(x_BTD.shape) @ p["out"]
    return lax.with_sharding_constraint(x_BTD + jax.nn.gelu(norm(x_BTD) @ p["up"]) @ p["down"], TOKENS)


def loss(params, batch, causal: bool = True):
    x_BTD = lax.with_sharding_constraint(params["table"][batch["tokens"]] + params["positions"], TOKENS)
    for p in params["layers"]:
        x_BTD = layer(p, x_BTD, causal)
    logits = (norm(x_BTD) @ params["table"].T)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def make_weights() -> dict:
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(scale=0.1, size=shape).astype(np.float32)
    one = lambda: {"qkv": draw(D, 3 * D), "out": draw(D, D), "up": draw(D, 4 * D), "down": draw(4 * D, D)}
    return {"table": draw(VOCABULARY, D), "positions": draw(LENGTH, D), "layers": [one() for _ in range(LAYERS)]}


def main() -> None:
    pipeline, state = trained(loss, make_weights(), sequences(0, 1), updates=20, ipus=2, axes={"context": 2})
    exchanges(pipeline, state.params, "collective-permute")


if __name__ == "__main__":
    configure(4)
    main()

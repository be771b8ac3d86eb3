"""Train a GPT on any number of chips, or find out before whether it fits: its embedding and logits share one table.

    IPU 0     table, rows 0-7999   \\   blocks 0-5   \\                  / table, rows 0-7999   \\
    IPU 1     table, rows 8000-...  ->               -> blocks 6-11 ... -> table, rows 8000-...  -> loss

    ipu-compile --topology v5e:2x2 examples/gpt.py --width 1024 --blocks 24     what it needs and costs, without a chip
    python -m examples.gpt --ipus 2 --width 64 --blocks 2 --sequence 32         a few updates on the machine's devices
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from ipu_jax import Pipeline, TrainOptions, chips, configure, everywhere, make_train_step
from ipu_jax.steps import TrainStep
from sharded_ops import embedding, log_softmax_cross_entropy, tied_projection

ROWS = PartitionSpec("ipu")  # each IPU has its rows of the table


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ipus", type=int, default=4, help="the IPUs of a replica (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="features of a token (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=8, help="transformer blocks (default: %(default)s)")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences of a micro-batch (default: %(default)s)")
    parser.add_argument("--gradient-accumulation", type=int, default=16, help="M (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=32000, help="rows of the table (default: %(default)s)")
    parser.add_argument("--schedule", default="grouped", help="of the pipeline (default: %(default)s)")
    parser.add_argument("--recompute", default="auto", help="auto, all or none (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=3, help="how many to make (default: %(default)s)")
    return parser.parse_args()


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def block(weights, x):
    q, k, v = jnp.einsum("btd,dcnk->cbtnk", norm(x), weights["qkv"])
    x = x + jnp.einsum("btnk,nkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), weights["out"])
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]


def loss(params, micro_batch):
    size = len(params["table"])

    def cross_entropy(rows, x, targets):
        logits = tied_projection(norm(x), rows, size=size)
        return log_softmax_cross_entropy(logits, targets, size=size).mean()

    embed = everywhere(lambda rows, tokens: embedding(rows, tokens, size=size), in_specs=(ROWS, None))
    x = embed(params["table"], micro_batch["tokens"])
    for weights in params["blocks"]:
        x = block(weights, x)
    return everywhere(cross_entropy, in_specs=(ROWS, None, None))(params["table"], x, micro_batch["targets"])


def shapes(width: int, blocks: int, vocabulary: int) -> dict:
    heads = max(1, width // 128)
    qkv, out = (width, 3, heads, width // heads), (heads, width // heads, width)
    of_block = {"qkv": qkv, "out": out, "up": (width, 4 * width), "down": (4 * width, width)}
    weight = lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    of_blocks = [{name: weight(shape) for name, shape in of_block.items()} for _ in range(blocks)]
    return {"table": weight((vocabulary, width)), "blocks": of_blocks}


def drawn(key, weights: dict) -> dict:
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(key, len(leaves))
    draw = lambda key, leaf: 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)
    return jax.tree.unflatten(tree, map(draw, keys, leaves))


def make_step(given: argparse.Namespace, weights: dict) -> TrainStep:
    tokens = jax.ShapeDtypeStruct((given.micro_batch, given.sequence), jnp.int32)
    options = {n: getattr(given, n) for n in ("ipus", "replicas", "schedule", "gradient_accumulation", "recompute")}
    pipeline = Pipeline.from_function(loss, weights, {"tokens": tokens, "targets": tokens}, **options)
    return make_train_step(pipeline, optax.adamw(3e-4), TrainOptions(max_gradient_norm=1.0))


def main() -> None:
    given = flags()
    configure(given.ipus * given.replicas)
    weights = shapes(given.width, given.blocks, given.vocabulary)
    step = make_step(given, weights)
    several = [given.replicas] * (given.replicas > 1)
    of_batch = (*several, given.gradient_accumulation, given.micro_batch, given.sequence)
    batch = {name: jax.ShapeDtypeStruct(of_batch, jnp.int32) for name in ("tokens", "targets")}
    chips.hand_over(step, weights, batch)  # under ipu-compile the script ends here

    state = step.init(lambda key: drawn(key, weights), jax.random.key(0))  # each IPU makes its own, however many
    tokens = np.random.default_rng(0).integers(given.vocabulary, size=of_batch, dtype=np.int32)
    for _ in range(given.updates):
        state, outputs = step(state, {"tokens": tokens, "targets": np.roll(tokens, -1, axis=-1)})
        print(f"update {int(state.step)}: loss {float(outputs.loss):.3f}")


if __name__ == "__main__":
    main()

"""Measure whether a forward pass of a cut function costs as much as `Pipeline.predict` of stages written by hand.

The GPT of from_function.py is cut for 4 virtual IPUs by its loss. `pipeline.forward` gives its logits; beside it run
the hand-written stages, the last of which predicts the same logits. Then it decodes with a cache of keys and values
that is stacked over the layers: each IPU should hold its own layers' rows, and a step should copy none of them.

    python benchmarks/forward.py [--check]
"""

import dataclasses
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from figures import Figures, Program, largest_relative_difference, side_by_side
from from_function import all_blocks, by_hand, in_groups, init_params, loss
from gpt import Sizes, add_positions, embed_whole, layer_norm, random_batch
from ipu_jax import Pipeline, configure

SIZES = Sizes(vocabulary=256, length=32, features=128, heads=4, layers=8)
IPUS, MICRO_BATCHES, SEQUENCES, ROUNDS = 4, 8, 4, 20
LENGTH = 256  # of a cache


def logits(params: Any, microbatch: Any) -> jax.Array:
    x_BTD = add_positions(params["positions"], embed_whole(params["table"], None, microbatch), microbatch)
    x_BTD = layer_norm(params["norm"], all_blocks(params["blocks"], x_BTD))
    return x_BTD @ params.get("projection", params["table"]).T


def last_logits(weights: Any, x_BTD: jax.Array, _: Any, shared: Any = None) -> jax.Array:
    x_BTD = layer_norm(weights["norm"], all_blocks(weights["blocks"], x_BTD))
    return x_BTD @ (weights["projection"] if shared is None else shared["table"]).T


def predictions(figures: Figures, *, scan: bool, tied: bool) -> dict[str, float]:
    """Run one model both ways, and return the ratio of each count of the forward pass to the hand-written stages'."""
    params, batch = init_params(SIZES, scan=scan, tied=tied), random_batch(SIZES, MICRO_BATCHES, SEQUENCES)
    one = jax.tree.map(lambda leaf: leaf[0], batch)
    cut = Pipeline.from_function(loss, params, one, ipus=IPUS, schedule="1f1b", gradient_accumulation=MICRO_BATCHES)
    forward, written = cut.forward(logits, one), by_hand("1f1b", tied=tied)
    *others, head = written.stages
    written = written.replace(stages=[*others, dataclasses.replace(head, predict=last_logits)])
    batch = jax.device_put(batch, jax.NamedSharding(cut.mesh, jax.P()))
    runs = ((forward, cut.shard(params)), (written.predict, written.shard(in_groups(params))))
    program, other = (Program(jax.jit(run).lower(w, batch).compile(), (w, batch)) for run, w in runs)
    name = f"{'scan' if scan else 'unrolled'}, {'tied' if tied else 'untied'}"
    difference = largest_relative_difference(program.result(), other.result())
    figures.add(f"logits / by hand, {name}, relative difference", difference, 1e-6)
    ours, theirs = side_by_side(program, other, rounds=ROUNDS)
    figures.add(f"CPU work / by hand, {name}", (ours / theirs).cpu, 1.05)
    counts = [
        (p.compiled.cost_analysis()["flops"], p.compiled.as_text().count(" = "), p.bytes) for p in (program, other)
    ]
    return dict(zip(("FLOPs", "instructions", "temporary bytes an IPU"), np.divide(counts[0], counts[1]), strict=True))


def decode(params: Any, cache: Any, inputs: Any) -> tuple[jax.Array, Any]:
    """Read a token of each sequence, keep its keys and values, and return the next token."""
    x_BD, at = params["table"][inputs["token"]], inputs["at"]

    def layer(x_BD: jax.Array, weights_and_cache: Any) -> tuple[jax.Array, Any]:
        p, kept = weights_and_cache
        qkv = jnp.einsum("bd,dsnk->sbnk", layer_norm(p["norm1"], x_BD), p["attention"]["qkv"])
        kept = [
            jax.lax.dynamic_update_slice_in_dim(c, new[:, None], at, 1) for c, new in zip(kept, qkv[1:], strict=True)
        ]
        scores_BNS = jnp.einsum("bnk,bsnk->bns", qkv[0], kept[0])
        weights_BNS = jax.nn.softmax(jnp.where(jnp.arange(LENGTH) <= at, scores_BNS, -jnp.inf))
        return x_BD + jnp.einsum("bns,bsnk,nkd->bd", weights_BNS, kept[1], p["attention"]["out"]), kept

    x_BD, cache = jax.lax.scan(layer, x_BD, (params["blocks"], cache))
    return (layer_norm(params["norm"], x_BD) @ params["table"].T).argmax(-1), cache


def decoding(figures: Figures) -> None:
    """Count the bytes of a cache on each IPU, and those that a step of decoding needs besides it."""
    temporary, sizes = [], (SIZES, dataclasses.replace(SIZES, layers=2 * SIZES.layers))
    for size in sizes:
        params, heads = init_params(size, scan=True), (size.heads, size.features // size.heads)
        cache = [jnp.zeros((size.layers, SEQUENCES, LENGTH, *heads))] * 2
        one = jax.tree.map(lambda leaf: leaf[0], random_batch(size, 1, SEQUENCES))
        cut = Pipeline.from_function(loss, params, one, ipus=IPUS, schedule="1f1b", gradient_accumulation=MICRO_BATCHES)
        inputs = {"token": jnp.zeros((1, SEQUENCES), "int32"), "at": jnp.zeros(1, "int32")}
        step = cut.forward(decode, jax.tree.map(lambda leaf: leaf[0], inputs), state=cache)
        kept = step.shard_state(cache)
        compiled = step.lower(cut.shard(params), inputs, kept).compile()
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(kept))
        share = sum(leaf.nbytes for leaf in cache) / IPUS
        figures.add(f"bytes of a cache an IPU / even share, {size.layers} layers", held / share, 1.0)
        memory: Any = compiled.memory_analysis()
        figures.add(
            f"bytes of a cache that a step does not reuse, {size.layers} layers", share - memory.alias_size_in_bytes, 0
        )
        temporary.append(memory.temp_size_in_bytes)
    figures.add("temporary bytes of a step of decoding, twice the layers / once", temporary[1] / temporary[0], 1.02)


def main() -> int:
    figures = Figures("a forward pass of a cut function beside hand-written stages, and decoding with a cache")
    figures.shrink(__name__, SIZES=Sizes(vocabulary=11, length=4, features=8, heads=2, layers=4), LENGTH=8)
    figures.shrink("from_function", SIZES=Sizes(vocabulary=11, length=4, features=8, heads=2, layers=4))
    configure(IPUS)
    largest: dict[str, float] = {}
    models = list(itertools.product((False, True), (True, False)))
    for scan, tied in models:
        for kind, ratio in predictions(figures, scan=scan, tied=tied).items():
            largest[kind] = max(ratio, largest.get(kind, 0.0))
    for kind, ratio in largest.items():
        figures.add(f"{kind} / by hand, largest of {len(models)}", ratio, 1.05 if kind == "instructions" else 1.0)
    decoding(figures)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

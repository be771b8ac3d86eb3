"""Measure whether a function that is cut into stages costs as much as stages written by hand, and what cutting takes.

A GPT of eight blocks is one loss function in plain JAX: `Pipeline.from_function` cuts it for 4 virtual IPUs. Beside it
runs the same model as four hand-written `Stage`s with two blocks each, which are the places where it is cut. There are
four such models: its blocks are unrolled with weights of their own, or one `lax.scan` over stacked weights; its table
is tied, so that the first and the last IPU read it, or the projection has its own.

Cutting is compared with tracing the function alone, and the heaviest stage with the heaviest one of the best cut. For
losses that run layers several times, or side by side, the weights of the largest IPU are compared with an even share,
and with a cut in the order of the function.

Where parts of a function run on all IPUs, by `everywhere`, the rivals have concurrent stages: the GPT of `gpt.py`,
whose table is split over the IPUs, and the digits' network, whose classifier is. A head that `head="concurrent"` puts
on all IPUs is compared with the same function without it.

    python benchmarks/from_function.py [--check] [--only PART]
"""

import argparse
import dataclasses
import gc
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cross_entropy import COLLECTIVE
from figures import Figures, Program, largest_relative_difference, side_by_side
from gpt import (
    Sizes,
    add_positions,
    attention,
    block,
    blocks,
    embed_split,
    embed_whole,
    layer_norm,
    loss_split,
    loss_whole,
    mlp,
    random_batch,
)
from gpt import make_pipeline as gpt_by_hand
from ipu_jax import ALL_IPUS, Pipeline, Stage, configure, everywhere, make_mesh
from ipu_jax.costs import flops_of
from mnist_example import model as digits
from sharded_ops import argmax, log_softmax_cross_entropy, matmul

Piece = Callable[[Any, Any, Any], Any]

SIZES = Sizes(vocabulary=256, length=32, features=128, heads=4, layers=8)
IPUS, MICRO_BATCHES, SEQUENCES, ROUNDS = 4, 8, 4, 20
SCHEDULES = ("1f1b", "zb-h1")
NEARLY = ("FLOPs that XLA counts", "instructions in the program", "temporary bytes an IPU")
LAYERS_TO_CUT, TIMES_TO_CUT = (24, 96), 11
REPEATED = Sizes(vocabulary=128, length=16, features=64, heads=4, layers=16)
# models whose head is as much work as a part of a block, and as several blocks
UNEVEN = (
    Sizes(vocabulary=300, length=16, features=64, heads=4, layers=7),
    Sizes(vocabulary=1000, length=16, features=64, heads=4, layers=6),
)


# the model, as one function


def init_params(sizes: Sizes, *, scan: bool = False, tied: bool = True) -> dict[str, Any]:
    """Return random weights: the blocks as a list, or stacked for `scan`."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * sizes.layers + 3))
    width, heads = sizes.features, sizes.heads

    def normal(*shape: int) -> jax.Array:
        return 0.1 * jax.random.normal(next(keys), shape)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    layers = [
        {
            "norm1": norm(),
            "attention": {"qkv": normal(width, 3, heads, width // heads), "out": normal(heads, width // heads, width)},
            "norm2": norm(),
            "mlp": {"up": normal(width, 4 * width), "down": normal(4 * width, width)},
        }
        for _ in range(sizes.layers)
    ]
    params = {
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if scan else layers,
        "norm": norm(),
        "positions": normal(sizes.length, width),
        "table": normal(sizes.vocabulary, width),
    }
    return params if tied else params | {"projection": normal(sizes.vocabulary, width)}


def loss(params: Any, microbatch: Any) -> jax.Array:
    x_BTD = add_positions(params["positions"], embed_whole(params["table"], None, microbatch), microbatch)
    x_BTD = all_blocks(params["blocks"], x_BTD)
    return loss_whole(params.get("projection", params["table"]), layer_norm(params["norm"], x_BTD), microbatch)


def all_blocks(weights: Any, x_BTD: jax.Array) -> jax.Array:
    if not isinstance(weights, list):
        return blocks(weights, x_BTD, None)
    for p in weights:
        x_BTD = block(p, x_BTD)
    return x_BTD


# the same model, as stages written by hand


def first(weights: Any, _: None, microbatch: Any, shared: Any = None) -> jax.Array:
    table = weights["table"] if shared is None else shared["table"]
    x_BTD = add_positions(weights["positions"], embed_whole(table, None, microbatch), microbatch)
    return all_blocks(weights["blocks"], x_BTD)


def middle(weights: Any, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    return all_blocks(weights["blocks"], x_BTD)


def last(weights: Any, x_BTD: jax.Array, microbatch: Any, shared: Any = None) -> jax.Array:
    x_BTD = layer_norm(weights["norm"], all_blocks(weights["blocks"], x_BTD))
    return loss_whole(weights["projection"] if shared is None else shared["table"], x_BTD, microbatch)


def by_hand(schedule: str, *, tied: bool) -> Pipeline:
    shared = ("table",) if tied else ()
    stages = [
        Stage(first, params="stage0", ipu=0, shared=shared),
        *(Stage(middle, params=f"stage{i}", ipu=i) for i in range(1, IPUS - 1)),
        Stage(last, params=f"stage{IPUS - 1}", ipu=IPUS - 1, shared=shared),
    ]
    return Pipeline(stages, schedule=schedule, gradient_accumulation=MICRO_BATCHES)


def in_groups(params: Any) -> dict[str, Any]:
    """Return a tree of `init_params` in the groups of `by_hand`."""
    each = SIZES.layers // IPUS

    def of_stage(i: int) -> Any:
        rows = slice(each * i, each * (i + 1))
        layers = params["blocks"]
        return layers[rows] if isinstance(layers, list) else jax.tree.map(lambda leaf: leaf[rows], layers)

    groups = {f"stage{i}": {"blocks": of_stage(i)} for i in range(IPUS)}
    groups["stage0"] |= {"positions": params["positions"]}
    groups[f"stage{IPUS - 1}"] |= {"norm": params["norm"]}
    if "projection" not in params:
        return groups | {"table": params["table"]}
    groups["stage0"] |= {"table": params["table"]}
    groups[f"stage{IPUS - 1}"] |= {"projection": params["projection"]}
    return groups


# parts on all IPUs, and the same models as stages written by hand


def loss_on_all_ipus(params: Any, microbatch: Any) -> jax.Array:
    """Return the loss of the GPT whose table is split over the IPUs."""
    size = SIZES.vocabulary
    look_up = everywhere(partial(embed_split, size=size), in_specs=(P("ipu"), P(), P()))
    project = everywhere(partial(loss_split, size=size), in_specs=(P("ipu"), P(), P()))
    x_BTD = add_positions(params["positions"], look_up(params["table"], None, microbatch), microbatch)
    x_BTD = layer_norm(params["norm"], all_blocks(params["blocks"], x_BTD))
    return project(params["table"], x_BTD, microbatch)


def in_gpt_groups(params: Any) -> dict[str, Any]:
    """Return a tree of `init_params` in the groups of `gpt.make_pipeline`."""
    each = SIZES.layers // IPUS
    rows = [jax.tree.map(lambda w, i=i: w[each * i : each * (i + 1)], params["blocks"]) for i in range(IPUS)]
    whole = {name: params[name] for name in ("table", "positions", "norm")}
    return whole | {f"blocks{i}": of_ipu for i, of_ipu in enumerate(rows)}


def digits_by_hand(**options: Any) -> Pipeline:
    """Return the digits' network as stages, with its classifier on all IPUs."""
    dense = lambda p, x: x @ p["w"] + p["b"]
    of_images = lambda p, _, mb: jax.nn.relu(
        dense(p, digits.scaled_images(mb["images"], p["w"].dtype).reshape(-1, 784))
    )

    def head(p: Any, x: jax.Array, mb: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits, labels = matmul(x, p["w"]) + p["b"], mb["labels"].astype(jnp.int32)
        losses = log_softmax_cross_entropy(logits, labels, size=10)
        found = argmax(jax.lax.stop_gradient(logits), size=10)
        return losses.mean(), {"correct": jnp.sum(found == labels, dtype=jnp.int32)}

    stages = [
        Stage(of_images, params="hidden", ipu=0),
        Stage(lambda p, x, _: jax.nn.relu(dense(p, x)), params="features", ipu=0),
        Stage(head, params="classifier", ipu=ALL_IPUS),
    ]
    specs = {"classifier": {"w": P(None, "ipu"), "b": P("ipu")}}
    return Pipeline(stages, mesh=make_mesh(1, IPUS), specs=specs, **options)


def on_all_ipus(figures: Figures) -> None:
    """Compare functions with parts on all IPUs with stages written by hand, and with a head that stays on one IPU."""
    largest: dict[str, float] = {}
    batch, random = random_batch(SIZES, MICRO_BATCHES, SEQUENCES), np.random.default_rng(0)
    params, stacked = init_params(SIZES), init_params(SIZES, scan=True)
    images = {
        "images": random.normal(size=(MICRO_BATCHES, 4, 28, 28)).astype(np.float32),
        "labels": random.integers(0, 10, (MICRO_BATCHES, 4)),
    }
    for schedule in SCHEDULES:
        options: dict[str, Any] = {"schedule": schedule, "gradient_accumulation": MICRO_BATCHES}
        cut: Any = partial(Pipeline.from_function, micro_batch=one_of(batch), ipus=IPUS, **options)
        gpt = cut(loss_on_all_ipus, stacked), stacked, gpt_by_hand(SIZES, IPUS, **options), in_gpt_groups, batch
        network = digits.make_pipeline("concurrent", one_of(images), ipus=IPUS, **options)
        mlp = network, digits.init_params(0), digits_by_hand(**options), lambda params: params, images
        for name, both in (("GPT", gpt), ("digits", mlp)):
            for kind, ratio in beside(figures, f"{name} on all IPUs, {schedule}", *both).items():
                largest[kind] = max(ratio, largest.get(kind, 0.0))
        local, split = (counted(cut(loss, params, head=head), params, batch)[1] for head in ("local", "concurrent"))
        for kind in ("FLOPs of the busiest IPU", "temporary bytes an IPU"):
            figures.add(f"{kind}, head='concurrent' / 'local', {schedule}", split[kind] / local[kind], 1.0)
    for kind, ratio in largest.items():
        figures.add(f"{kind} on all IPUs / by hand, largest of {2 * len(SCHEDULES)}", ratio, 1.01)


# the figures


def one_of(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], batch)


def steps(figures: Figures) -> None:
    """Compare the cut functions with the hand-written stages, and print the largest ratio of each count."""
    largest: dict[str, float] = {}
    count, batch = 0, random_batch(SIZES, MICRO_BATCHES, SEQUENCES)
    for schedule, scan, tied in itertools.product(SCHEDULES, (False, True), (True, False)):
        params = init_params(SIZES, scan=scan, tied=tied)
        options: dict[str, Any] = {"schedule": schedule, "gradient_accumulation": MICRO_BATCHES}
        cut = Pipeline.from_function(loss, params, one_of(batch), ipus=IPUS, **options)
        name = f"{'scan' if scan else 'unrolled'}, {'tied' if tied else 'untied'}, {schedule}"
        hand = by_hand(schedule, tied=tied)
        for kind, ratio in beside(figures, name, cut, params, hand, in_groups, batch).items():
            largest[kind] = max(ratio, largest.get(kind, 0.0))
        count += 1
    for kind, ratio in largest.items():
        figures.add(f"{kind} / by hand, largest of {count}", ratio, 1.02 if kind in NEARLY else 1.0)


def beside(
    figures: Figures, name: str, cut: Pipeline, params: Any, hand: Pipeline, in_groups: Callable[[Any], Any], batch: Any
) -> dict[str, float]:
    """Run one model both ways, and return the ratio of each count of the cut function's program to the other's."""
    program, counts = counted(cut, params, batch)
    other, expected = counted(hand, in_groups(params), batch)
    value, gradients = program.result()
    difference = largest_relative_difference((value, in_groups(gradients)), other.result())
    figures.add(f"loss and gradients / by hand, {name}, relative difference", difference, 1e-5)
    ours, theirs = side_by_side(program, other, rounds=ROUNDS)
    figures.add(f"CPU work / by hand, {name}", (ours / theirs).cpu, 1.02)
    figures.add(f"step time / by hand on both cores, {name}", (ours / theirs).wall)
    return {kind: counts[kind] / expected[kind] for kind in counts}


def counted(pipeline: Pipeline, params: Any, batch: Any) -> tuple[Program, dict[str, float]]:
    """Return the compiled step, and what can be counted of it."""
    arguments = (pipeline.shard(params), jax.device_put(batch, jax.NamedSharding(pipeline.mesh, jax.P())))
    compiled: Any = jax.jit(pipeline.value_and_grad).lower(*arguments).compile()
    report, hlo = pipeline.report(*arguments, compile=False), compiled.as_text()
    program = Program(compiled, arguments, lambda found: (found[0], pipeline.unshard(found[1])))
    return program, {
        "bytes of weights an IPU": max(part.weights + part.padding for part in report.ipus),
        "bytes of gradients an IPU": max(part.gradients for part in report.ipus),
        "bytes of the stash": report.stash,
        "bytes that an IPU sends per tick": max(part.sent for part in report.ipus),
        "collectives in the program": len(COLLECTIVE.findall(hlo)),
        "segment classes": len(pipeline.placement.plan(*arguments).classes),
        "FLOPs of the busiest IPU": max(part.flops for part in report.ipus),
        "FLOPs that XLA counts": compiled.cost_analysis()["flops"],
        "instructions in the program": hlo.count(" = "),
        "temporary bytes an IPU": program.bytes,
    }


def time_to_cut(figures: Figures, layers: int) -> None:
    """Compare the CPU times of cutting a function and of tracing it alone: both trace it anew."""
    sizes = Sizes(vocabulary=128, length=16, features=64, heads=4, layers=layers)
    params = jax.eval_shape(lambda: init_params(sizes))
    one = {name: jax.ShapeDtypeStruct((SEQUENCES, sizes.length), "int32") for name in ("tokens", "targets")}

    def cut(fn: Callable[..., Any]) -> None:
        Pipeline.from_function(fn, params, one, ipus=IPUS, schedule="1f1b", gradient_accumulation=MICRO_BATCHES)

    def seconds(call: Callable[..., Any]) -> float:
        gc.collect()  # otherwise what the other call leaves behind is collected in this one
        begun = time.process_time()
        call(lambda params, microbatch: loss(params, microbatch))  # a new function: JAX has no trace of it
        return time.process_time() - begun

    gc.collect()
    gc.freeze()  # collecting the modules' own objects would take as long as either
    rounds = [(seconds(cut), seconds(lambda fn: jax.make_jaxpr(fn)(params, one))) for _ in range(TIMES_TO_CUT)]
    gc.unfreeze()
    figures.add(
        f"time to trace and cut / time to trace, {layers} blocks",
        statistics.median(ours / theirs for ours, theirs in rounds[min(2, len(rounds) - 1) :]),
        1.5,
    )
    figures.add(f"seconds to trace and cut, {layers} blocks", min(ours for ours, _ in rounds))


# the model in halves of blocks: functions of (weights, x)


def pieces_of(sizes: Sizes, params: Any) -> tuple[list[Piece], list[Any]]:
    """Return the embedding, the halves of the blocks and the head as functions, and the weights of each."""
    halves: list[Piece] = [
        lambda p, x_BTD, _: x_BTD + attention(p["attention"], layer_norm(p["norm1"], x_BTD)),
        lambda p, x_BTD, _: x_BTD + mlp(p["mlp"], layer_norm(p["norm2"], x_BTD)),
    ]
    embed: Piece = lambda p, _, mb: add_positions(p["positions"], embed_whole(p["table"], None, mb), mb)
    head: Piece = lambda p, x_BTD, mb: loss_whole(p["projection"], layer_norm(p["norm"], x_BTD), mb)
    weights_of_halves = [
        {name: p[name] for name in names}
        for p in params["blocks"]
        for names in (("attention", "norm1"), ("mlp", "norm2"))
    ]
    ends = [{name: params[name] for name in names} for names in (("positions", "table"), ("projection", "norm"))]
    return [embed, *halves * sizes.layers, head], [ends[0], *weights_of_halves, ends[1]]


def run(weights: Any, x: Any, microbatch: Any, *, pieces: Sequence[Piece]) -> Any:
    for piece, p in zip(pieces, weights, strict=True):
        x = piece(p, x, microbatch)
    return x


def heaviest(pipeline: Pipeline, params: Any, batch: Any) -> float:
    """Return the FLOPs of F and B of the pipeline's heaviest stage, counted in its traced program."""
    costs: Any = pipeline.stage_costs(pipeline.shard_shapes(params), batch)
    return max(f + b for f, b in zip(costs.forward, costs.whole_backward, strict=True))


def evenness(figures: Figures, sizes: Sizes) -> None:
    """Compare the heaviest stage with the best cut's, among all cuts between halves of blocks."""
    params = jax.eval_shape(lambda: init_params(sizes, tied=False))
    batch = jax.eval_shape(lambda: random_batch(sizes, 1, SEQUENCES))
    one = jax.eval_shape(lambda batch: jax.tree.map(lambda leaf: leaf[0], batch), batch)
    pieces, weights = pieces_of(sizes, params)
    work, x = [], None
    for piece, p in zip(pieces, weights, strict=True):
        y = jax.eval_shape(piece, p, x, one)
        work.append(
            flops_of(lambda p, x, mb, dy, f=piece: jax.vjp(lambda p, x: f(p, x, mb), p, x)[1](dy), p, x, one, y)
        )
        x = y
    total = np.concatenate([[0], np.cumsum(work)])
    cuts = itertools.combinations(range(1, len(pieces)), IPUS - 1)
    bounds = min(((0, *cut, len(pieces)) for cut in cuts), key=lambda cut: np.diff(total[[*cut]]).max())
    parts = list(itertools.pairwise(bounds))
    stages = [Stage(partial(run, pieces=pieces[a:b]), params=f"stage{i}", ipu=i) for i, (a, b) in enumerate(parts)]
    best = Pipeline(stages, schedule="1f1b", gradient_accumulation=1)
    ours = Pipeline.from_function(loss, params, one, ipus=IPUS, schedule="1f1b", gradient_accumulation=1)
    figures.add(
        f"heaviest stage / best of all cuts, {sizes.layers} blocks, vocabulary {sizes.vocabulary}",
        heaviest(ours, params, batch)
        / heaviest(best, {f"stage{i}": weights[a:b] for i, (a, b) in enumerate(parts)}, batch),
        1.05,
    )


# losses that run layers several times


def hidden(params: Any, tokens: Any) -> jax.Array:
    x_BTD = add_positions(
        params["positions"], embed_whole(params["table"], None, {"tokens": tokens}), {"tokens": tokens}
    )
    return layer_norm(params["norm"], all_blocks(params["blocks"], x_BTD))


def preference(params: Any, mb: Any) -> jax.Array:
    """Return a loss of DPO: policy and frozen reference, each on two sequences."""
    swapped = {"tokens": mb["targets"], "targets": mb["tokens"]}
    gain = lambda mb: loss(params["policy"], mb) - jax.lax.stop_gradient(loss(params["reference"], mb))
    return jax.nn.softplus(gain(mb) - gain(swapped))


def contrastive(params: Any, mb: Any) -> jax.Array:
    one, other = (hidden(params, mb[name]).mean(1) for name in ("tokens", "targets"))
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(one @ other.T)))


def distilled(params: Any, mb: Any) -> jax.Array:
    wanted = jax.lax.stop_gradient(hidden(params["teacher"], mb["tokens"]).mean(-1))
    return jnp.mean((hidden(params["student"], mb["tokens"]).mean(-1) - wanted) ** 2)


def weights(figures: Figures) -> None:
    """Compare the weights of the largest IPU with an even share, and with a cut in the order of the function."""
    own = jax.eval_shape(lambda: init_params(REPEATED))
    wide = jax.eval_shape(lambda: init_params(dataclasses.replace(REPEATED, features=2 * REPEATED.features)))
    one = {name: jax.ShapeDtypeStruct((SEQUENCES, REPEATED.length), "int32") for name in ("tokens", "targets")}
    functions: dict[str, tuple[Any, Any]] = {
        "DPO": (preference, {"policy": own, "reference": own}),
        "two towers": (contrastive, own),
        "a wider teacher": (distilled, {"teacher": wide, "student": own}),
    }
    for (name, (fn, params)), schedule in itertools.product(functions.items(), SCHEDULES):
        text = str(Pipeline.from_function(fn, params, one, ipus=IPUS, schedule=schedule, gradient_accumulation=4))
        (share,) = re.findall(r"the most is ([\d.]+) times an even share", text)
        figures.add(f"largest IPU's weights / an even share, {name}, {schedule}", float(share), 1.15)
        ours, theirs = (
            float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]
            for number, unit in re.findall(r"([\d.]+) (\w?B) (?:of them|otherwise)", text)
        )
        figures.add(f"the same in the function's order, {name}, {schedule}", float(share) * theirs / ours)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", choices=("steps", "cutting", "evenness", "weights", "everywhere"), help="measure this part alone"
    )


def main() -> int:
    figures = Figures(
        "a function cut into stages: its step beside hand-written stages, and what cutting takes", flags=flags
    )
    small = {"SIZES": Sizes(vocabulary=11, length=4, features=8, heads=2, layers=4), "LAYERS_TO_CUT": (2,)}
    few = {"MICRO_BATCHES": 2, "SEQUENCES": 1, "TIMES_TO_CUT": 1, "UNEVEN": UNEVEN[:1], "SCHEDULES": ("1f1b",)}
    few |= {"REPEATED": dataclasses.replace(REPEATED, features=8)}
    figures.shrink(__name__, **small, **few)
    configure(IPUS)
    parts: dict[str, Callable[[], object]] = {
        "cutting": lambda: [time_to_cut(figures, layers) for layers in LAYERS_TO_CUT],
        "evenness": lambda: [evenness(figures, sizes) for sizes in UNEVEN],
        "weights": lambda: weights(figures),
        "everywhere": lambda: on_all_ipus(figures),
        "steps": lambda: steps(figures),
    }
    for part in parts if figures.args.only is None else [figures.args.only]:
        parts[part]()
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

"""Measure the cost of a pipelined GPT with a tied, vocabulary-split table.

The model is a small GPT over the virtual IPUs of a replica. The embedding and the projection back to the vocabulary are
concurrent stages that share one table, whose rows are split over the IPUs. The transformer blocks between them are
pipelined:

    concurrent   IPU 0: table, rows 0 ..  \\   blocks 0-1 \\              / table, rows 0 ..  \\
                 IPU 1: table, the rest   ->              blocks 2-3 -> norm, table, the rest -> loss

    basic        IPU 0: table, positions, blocks 0-1
                 IPU 1:                              blocks 2-3, norm, another table, loss

Positions and the last norm are concurrent too, and whole on every IPU. So the pipelined stages contain only blocks. In
a longer pipeline the stages in the middle are equal and share one compiled body. *basic* cannot tie the weights: a
group of weights is on one IPU, so the projection has its own table.

Each pipeline is compared with its own unsharded program (a jitted scan over micro-batches of the same functions on
whole weights), in CPU work and in temporary bytes per IPU. There are three sizes, the layers of a stage are in a scan
or unrolled, and the schedule is "grouped" or "zb-h1". No option is set.

At one size *basic* is measured too. There it is compared with the same model as a pipeline that is differentiated from
outside (`rivals_of/usual_idiom.py`), with `jax.checkpoint` around the work of each tick. Every device of that pipeline
holds the tables, positions and last norm.

Dims: V vocabulary, B sequences of a micro-batch, T and S tokens of a sequence (S those attended to), D features,
N heads, K features of a head, F hidden features of the MLP, L layers of a stage.

    python benchmarks/gpt.py [--check] [--only SIZE]
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from figures import Bounds, Figures, Program, scanned
from ipu_jax import ALL_IPUS, Pipeline, Stage, configure, make_mesh
from rivals_of import usual_idiom
from sharded_ops import embedding, log_softmax_cross_entropy, tied_projection

Mode = Literal["concurrent", "basic"]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the model. `features` must be divisible by `heads`, and `layers` by the number of IPUs."""

    vocabulary: int
    length: int
    features: int
    heads: int
    layers: int


# the model


def layer_norm(p: Any, x_BTD: jax.Array) -> jax.Array:
    wide_BTD = x_BTD.astype(jnp.float32)
    wide_BTD = wide_BTD - wide_BTD.mean(-1, keepdims=True)
    normed_BTD = wide_BTD * lax.rsqrt((wide_BTD**2).mean(-1, keepdims=True) + 1e-5)
    return normed_BTD.astype(x_BTD.dtype) * p["scale"] + p["bias"]


def attention(p: Any, x_BTD: jax.Array) -> jax.Array:
    """Apply causal attention: a token attends to itself and to the tokens before it."""
    q_BTNK, k_BSNK, v_BSNK = jnp.einsum("btd,dcnk->cbtnk", x_BTD, p["qkv"])
    scores_BNTS = jnp.einsum("btnk,bsnk->bnts", q_BTNK, k_BSNK).astype(jnp.float32) / q_BTNK.shape[-1] ** 0.5
    tokens = jnp.arange(x_BTD.shape[1])
    seen_TS = tokens[:, None] >= tokens
    chances_BNTS = jax.nn.softmax(jnp.where(seen_TS, scores_BNTS, -jnp.inf)).astype(x_BTD.dtype)
    mixed_BTNK = jnp.einsum("bnts,bsnk->btnk", chances_BNTS, v_BSNK)
    return jnp.einsum("btnk,nkd->btd", mixed_BTNK, p["out"])


def mlp(p: Any, x_BTD: jax.Array) -> jax.Array:
    return jax.nn.gelu(x_BTD @ p["up"]) @ p["down"]


def block(p: Any, x_BTD: jax.Array) -> jax.Array:
    x_BTD = x_BTD + attention(p["attention"], layer_norm(p["norm1"], x_BTD))
    return x_BTD + mlp(p["mlp"], layer_norm(p["norm2"], x_BTD))


# the stages: functions of (params, x, microbatch)


def embed_split(table_VD: jax.Array, _: None, microbatch: Any, *, size: int) -> jax.Array:
    return embedding(table_VD, microbatch["tokens"], size=size)


def embed_whole(table_VD: jax.Array, _: None, microbatch: Any) -> jax.Array:
    return table_VD[microbatch["tokens"]]


def add_positions(positions_TD: jax.Array, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    return x_BTD + positions_TD


def blocks(p: Any, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    """Apply L blocks one after the other. Every leaf of `p` has a leading dim (L,)."""
    return lax.scan(lambda x_BTD, layer: (block(layer, x_BTD), None), x_BTD, p)[0]


def blocks_unrolled(p: Any, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    """Apply L blocks one after the other, without a loop."""
    for i in range(p["mlp"]["up"].shape[0]):
        x_BTD = block(jax.tree.map(lambda w_L, i=i: w_L[i], p), x_BTD)
    return x_BTD


def norm(p: Any, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    return layer_norm(p, x_BTD)


def loss_split(table_VD: jax.Array, x_BTD: jax.Array, microbatch: Any, *, size: int) -> jax.Array:
    logits_BTV = tied_projection(x_BTD, table_VD, size=size)
    return log_softmax_cross_entropy(logits_BTV, microbatch["targets"], size=size).mean()


def loss_whole(table_VD: jax.Array, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    logits_BTV = (x_BTD @ table_VD.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, microbatch["targets"]).mean()


def make_pipeline(
    sizes: Sizes,
    ipus: int,
    *,
    mode: Mode = "concurrent",
    recompute: Any = "auto",
    layers: Callable[..., jax.Array] = blocks,
    **options: Any,
) -> Pipeline:
    """Return the GPT as a pipeline on `ipus` IPUs, with the same number of blocks on each.

    A batch is `{"tokens", "targets"}`, (M, B, T) int32 each; a target is the token that follows.

    Args:
        sizes: the sizes of the model.
        ipus: the number of IPUs of the replica.
        mode: where embedding and projection are; see the top of this file.
        recompute: as for `Stage`, for the stages of blocks.
        layers: `blocks` or `blocks_unrolled`.
        options: other options of `Pipeline`.
    """
    if sizes.layers % ipus:
        raise ValueError(f"layers={sizes.layers} don't divide by ipus={ipus}: give a multiple")
    middle = [
        Stage(add_positions, params="positions", ipu=0 if mode == "basic" else ALL_IPUS),
        *(Stage(layers, params=f"blocks{i}", ipu=i, recompute=recompute) for i in range(ipus)),
        Stage(norm, params="norm", ipu=ipus - 1 if mode == "basic" else ALL_IPUS),
    ]
    if mode == "basic":
        first = Stage(embed_whole, params="table", ipu=0, name="embedding")
        last = Stage(loss_whole, params="projection", ipu=ipus - 1)
        return Pipeline([first, *middle, last], mesh=make_mesh(1, ipus), **options)
    size = sizes.vocabulary
    first = Stage(partial(embed_split, size=size), params="table", ipu=ALL_IPUS, name="embedding")
    last = Stage(partial(loss_split, size=size), params="table", ipu=ALL_IPUS, name="projection")
    specs = {"table": PartitionSpec("ipu"), "positions": PartitionSpec(), "norm": PartitionSpec()}
    return Pipeline([first, *middle, last], mesh=make_mesh(1, ipus), specs=specs, **options)


def init_params(
    sizes: Sizes, ipus: int, *, mode: Mode = "concurrent", seed: int = 0, dtype: Any = jnp.float32
) -> dict[str, Any]:
    """Return whole weights for `make_pipeline`, normal with a standard deviation of 0.02, as in GPT-2."""
    keys = iter(jax.random.split(jax.random.key(seed), 7))
    layers, width, heads = sizes.layers, sizes.features, sizes.heads

    def normal(*shape: int) -> jax.Array:
        return (0.02 * jax.random.normal(next(keys), shape)).astype(dtype)

    def norm_of(*lead: int) -> dict[str, jax.Array]:
        return {"scale": jnp.ones((*lead, width), dtype), "bias": jnp.zeros((*lead, width), dtype)}

    all_blocks = {
        "norm1": norm_of(layers),
        "attention": {
            "qkv": normal(layers, width, 3, heads, width // heads),
            "out": normal(layers, heads, width // heads, width),
        },
        "norm2": norm_of(layers),
        "mlp": {"up": normal(layers, width, 4 * width), "down": normal(layers, 4 * width, width)},
    }
    each = layers // ipus
    params = {
        "table": normal(sizes.vocabulary, width),
        "positions": normal(sizes.length, width),
        **{f"blocks{i}": jax.tree.map(lambda w, i=i: w[each * i : each * (i + 1)], all_blocks) for i in range(ipus)},
        "norm": norm_of(),
    }
    return params | ({"projection": normal(sizes.vocabulary, width)} if mode == "basic" else {})


def random_batch(sizes: Sizes, micro_batches: int, sequences: int, seed: int = 1) -> dict[str, jax.Array]:
    shape = (micro_batches, sequences, sizes.length + 1)
    text = jax.random.randint(jax.random.key(seed), shape, 0, sizes.vocabulary)
    return {"tokens": text[..., :-1], "targets": text[..., 1:]}


# the programs


def loss_of(params: Any, microbatch: Any, layers: Callable[..., jax.Array] = blocks) -> jax.Array:
    """Return the mean loss of a micro-batch, for whole weights."""
    x_BTD = _embedded(params, microbatch)
    for name in sorted(name for name in params if name.startswith("blocks")):
        x_BTD = layers(params[name], x_BTD, microbatch)
    return _projected_loss(params, x_BTD, microbatch)


def unsharded(params: Any, batch: Any, layers: Callable[..., jax.Array] = blocks) -> Any:
    """Return mean loss and gradients, computed on one device by a scan over micro-batches."""
    return scanned(partial(loss_of, layers=layers))(params, batch)


def _embedded(params: Any, microbatch: Any) -> jax.Array:
    return add_positions(params["positions"], embed_whole(params["table"], None, microbatch), microbatch)


def _projected_loss(params: Any, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    projection = params.get("projection", params["table"])
    return loss_whole(projection, norm(params["norm"], x_BTD, microbatch), microbatch)


def in_the_usual_idiom(
    mesh: Mesh, micro_batches: int, layers: Callable[..., jax.Array] = blocks, **variation: Any
) -> Any:
    """Return the GPT as the usual JAX pipeline: a jitted function made by `usual_idiom.value_and_grad`.

    `for_the_usual_idiom` returns its first two arguments.
    """
    stage = lambda p, x_BTD: layers(p, x_BTD, None)
    return usual_idiom.value_and_grad(stage, _projected_loss, mesh, micro_batches, first=_embedded, **variation)


def for_the_usual_idiom(params: Any) -> tuple[Any, Any]:
    """Return weights for the usual pipeline: stacked blocks (stages, L, ...), and the weights held by every device."""
    names = sorted(name for name in params if name.startswith("blocks"))
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *(params[name] for name in names))
    return stacked, {name: group for name, group in params.items() if name not in names}


def from_the_usual_idiom(stacked: Any, shared: Any) -> dict[str, Any]:
    """Return the usual pipeline's gradients in the layout of `init_params`."""
    stages = jax.tree.leaves(stacked)[0].shape[0]
    return shared | {f"blocks{i}": jax.tree.map(lambda g, i=i: g[i], stacked) for i in range(stages)}


# the figures


SIZES = {
    "4 layers x 256": Sizes(vocabulary=4095, length=64, features=256, heads=4, layers=4),
    "6 layers x 192": Sizes(vocabulary=3001, length=96, features=192, heads=4, layers=6),
    "8 layers x 512": Sizes(vocabulary=8192, length=128, features=512, heads=8, layers=8),
}
BASIC = "6 layers x 192"
ROUNDS = {"8 layers x 512": 3}  # a step takes six to nine seconds
IPUS, MICRO_BATCHES, SEQUENCES = 2, 8, 4
BOUNDS = {"grouped": Bounds(cpu=1.03, bytes=0.80), "zb-h1": Bounds(cpu=1.05)}
FORMS = (blocks, blocks_unrolled)  # of the layers of a stage
IDIOMS: dict[str, dict[str, Any]] = {
    "usual idiom with jax.checkpoint": {"checkpoint": True},
    "usual idiom with jax.checkpoint, no idle work": {"checkpoint": True, "skip_idle": True},
}


def measure(figures: Figures, size: str, mode: Mode, layers: Callable[..., jax.Array]) -> None:
    """Compare a model under both schedules, and in "basic" mode also in the usual idiom, with its unsharded program."""
    sizes, mesh = SIZES[size], make_mesh(1, IPUS)
    whole = init_params(sizes, IPUS, mode=mode)
    batch = random_batch(sizes, MICRO_BATCHES, SEQUENCES)
    spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec()))
    programs = {}
    for schedule in BOUNDS:
        pipeline = make_pipeline(
            sizes, IPUS, mode=mode, layers=layers, schedule=schedule, gradient_accumulation=MICRO_BATCHES
        )
        arguments = (pipeline.shard(whole), spread)
        step = jax.jit(pipeline.value_and_grad).lower(*arguments).compile()
        programs[schedule] = Program(step, arguments, lambda found, of=pipeline: (found[0], of.unshard(found[1])))
    if mode == "basic":
        stacked, shared = for_the_usual_idiom(whole)
        stacked = jax.device_put(stacked, NamedSharding(mesh, PartitionSpec("ipu")))
        arguments = (stacked, jax.device_put(shared, spread["tokens"].sharding), spread)
        for idiom, variation in IDIOMS.items():
            step = in_the_usual_idiom(mesh, MICRO_BATCHES, layers, **variation).lower(*arguments).compile()
            programs[idiom] = Program(step, arguments, lambda found: (found[0], from_the_usual_idiom(*found[1])))
    dense = jax.jit(partial(unsharded, layers=layers)).lower(whole, batch).compile()
    figures.add_beside_unsharded(
        f"{size}, {'unrolled' if layers is blocks_unrolled else 'scan'}, {mode}",
        Program(dense, (whole, batch)),
        programs,
        BOUNDS,
        most_difference=1e-5,
        rounds=ROUNDS.get(size, 5),
    )


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(SIZES), help="measure this size alone")


def main() -> int:
    figures = Figures("GPT: pipelined blocks between vocabulary-split tables, and its unsharded program", flags=flags)
    smallest = {"smallest": Sizes(vocabulary=11, length=6, features=8, heads=2, layers=2)}
    few = {"BOUNDS": {"grouped": Bounds()}, "FORMS": (blocks,)}
    figures.shrink(__name__, SIZES=smallest, MICRO_BATCHES=2, SEQUENCES=1, **few)
    configure(IPUS)
    for size in SIZES if figures.args.only is None else [figures.args.only]:
        for layers in FORMS:
            for mode in ("concurrent", "basic") if size == BASIC else ("concurrent",):
                measure(figures, size, mode, layers)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

"""Measure the cost of pipelining a ResNet, a transformer with skips and a recommender, on 2 virtual IPUs.

*ResNet-18* has the form used for CIFAR: the stem is one 3x3 convolution without pooling, and images are 32x32 with 3
channels. Every convolution is followed by batch norm, whose running averages are the stages' state. Blocks are the Flax
modules of the MNIST example, with its convolutions, which are matrix products on a CPU.

    IPU 0: stem, blocks 1-4 \\
    IPU 1:                    blocks 5-8, pool, classifier, loss

*The transformer* is U-shaped (Bao et al. 2022, arXiv:2209.12152): each encoder's result also goes to the opposite
decoder, which joins it with its input by a matrix. So a message from IPU 0 to IPU 1 contains four activations.

    IPU 0: tokens -> encoder 0 -> encoder 1 -> encoder 2 -> middle
                         |            |            |          |
    IPU 1: loss <--- decoder 0 <- decoder 1 <- decoder 2 <----+

*The recommender* reads a few rows of a large table per example (Naumov et al. 2019, arXiv:1906.00091). Its layers are
on IPU 0, where the table is alone in its slot, or on IPU 1, where one of them shares a flat slot with the table. It is
measured with few and with many micro-batches, because any work on the whole table in each micro-batch would grow with
their number.

    IPU 0: ids -> table -> (layers)
    IPU 1:                 (layers) -> loss

With a small hidden layer, few operations hide the work on the table. This recommender is on the first and the last of
2 and of 4 IPUs, and is compared with the fastest unsharded program: it takes the gradient of the rows, and adds them in
place to one table of zeros. The pipeline fills such a table on each IPU, because a gradient has the shape of its slot.

The ResNet is one function, which the library cuts; the others are stages, with skips and with places of their own. Each
pipeline is compared with its unsharded program (a jitted scan over micro-batches of the same functions) in results, CPU
work and temporary bytes per IPU, under "grouped" and "zb-h1". No option is set.

Dims: B images, sequences or examples of a micro-batch, H and W rows and columns, C channels, T tokens, D features,
V vocabulary.

    python benchmarks/models.py [--check] [--only resnet|transformer|recommender]
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from figures import Bounds, Figures, Program
from gpt import Sizes, block, init_params, layer_norm, loss_whole, random_batch
from ipu_jax import Outputs, Pipeline, Stage, configure
from ipu_jax.nn import conv_general_dilated
from mnist_example import resnet

IPUS, MOST_IPUS, MICRO_BATCHES, ROUNDS = 2, 4, 8, 7
COUNTS = (4, 32)  # M of the recommender
BOUNDS = {"grouped": Bounds(cpu=1.05), "zb-h1": Bounds()}
BOUNDS_OF_RECOMMENDER = {"grouped": Bounds(cpu=1.2), "zb-h1": Bounds(cpu=1.2)}
BOUND_OF_ROWS, ROUNDS_OF_ROWS, SMALL = Bounds(cpu=1.25), 25, 4  # a small hidden layer
ROWS, WIDTH, FIELDS = 200_000, 32, 8  # the size of the recommender's table, and the rows that an example reads


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as one function and as a pipeline, with their inputs.

    Attributes:
        loss: `loss(params, state, microbatch)` returns the loss of a micro-batch and the new state, on one device.
        pipeline: returns the pipeline under a schedule.
        params: whole weights.
        batch: leaves (M, B, ...).
        state: the function's state.
    """

    loss: Callable[[Any, Any, Any], Any]
    pipeline: Callable[[str], Pipeline]
    params: dict[str, Any]
    batch: dict[str, jax.Array]
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


def of_stages(stages: Sequence[Stage], params: dict[str, Any], batch: dict[str, jax.Array]) -> Model:
    """Return a model without state, whose loss is in the last stage. On one device they run one after the other."""

    def loss(params: Any, state: Any, microbatch: Any) -> Any:
        x: Any = None
        skips: dict[str, Any] = {}
        for stage in stages:
            taken = {"skips": {name: skips[name] for name in stage.takes}} if stage.takes else {}
            x = stage.fn(params.get(stage.params), x, microbatch, **taken)
            if isinstance(x, Outputs):
                skips |= x.skips
                x = x.y
        return x, state

    micro_batches = len(jax.tree.leaves(batch)[0])
    pipeline = lambda schedule: Pipeline(stages, schedule=schedule, gradient_accumulation=micro_batches)
    return Model(loss, pipeline, params, batch)


# ResNet-18


class Stem(nn.Module):
    """A 3x3 convolution, batch norm and relu: (B, H, W, 3) to (B, H, W, features)."""

    features: int

    @nn.compact
    def __call__(self, x_BHWC: jax.Array, train: bool) -> jax.Array:
        conv = nn.Conv(self.features, (3, 3), padding=1, use_bias=False, conv_general_dilated=conv_general_dilated)
        return nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(conv(x_BHWC)))


def classify(p: Any, x_BHWC: jax.Array, microbatch: Any) -> jax.Array:
    logits = x_BHWC.mean((1, 2)) @ p["w"] + p["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["labels"]).mean()


def resnet18(*, width: int = 32, side: int = 32, images: int = 16, micro_batches: int = MICRO_BATCHES) -> Model:
    """Return the ResNet, random images (M, B, side, side, 3) and their labels.

    Args:
        width: channels of the stem; the published network has 64.
        side: rows and columns of an image.
        images: images of a micro-batch.
        micro_batches: M.
    """
    modules = {layer.name: layer.module for layer in resnet.layers_of("resnet18", width=width)} | {"stem": Stem(width)}

    def loss(params: Any, averages: Any, microbatch: Any) -> Any:
        x, new = microbatch["images"], {}
        for name, module in modules.items():
            variables = {"params": params[name], **averages[name]}
            x, new[name] = module.apply(variables, x, train=True, mutable=["batch_stats"])
        return classify(params["classifier"], x, microbatch), new

    keys = jax.random.split(jax.random.key(1))
    batch = {
        "images": jax.random.normal(keys[0], (micro_batches, images, side, side, 3)),
        "labels": jax.random.randint(keys[1], (micro_batches, images), 0, 10),
    }
    params, averages = resnet.init_params("resnet18", 0, width=width), resnet.init_state("resnet18", width=width)
    stem = modules["stem"].init(jax.random.key(0), jnp.zeros((1, side, side, 3)), train=False)
    params["stem"], averages["stem"] = stem["params"], {"batch_stats": stem["batch_stats"]}
    one = jax.tree.map(lambda leaf: leaf[0], batch)
    options = {"state": averages, "ipus": IPUS, "gradient_accumulation": micro_batches}
    pipeline = lambda schedule: Pipeline.from_function(loss, params, one, schedule=schedule, **options)
    return Model(loss, pipeline, params, batch, averages)


# the U-shaped transformer


def encode(p: Any, x_BTD: jax.Array | None, microbatch: Any, *, name: str) -> Outputs:
    """Apply a block (in the first encoder, to the embedded tokens), and return the result also as a skip."""
    y_BTD = block(p["block"], p["table"][microbatch["tokens"]] + p["positions"] if x_BTD is None else x_BTD)
    return Outputs(y_BTD, skips={name: y_BTD})


def bend(p: Any, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    return block(p, x_BTD)


def decode(p: Any, x_BTD: jax.Array, microbatch: Any, *, skips: Any) -> jax.Array:
    """Join the input with the opposite encoder's result, and apply a block."""
    (skip_BTD,) = skips.values()
    return block(p["block"], jnp.concatenate([x_BTD, skip_BTD], axis=-1) @ p["join"])


def predict(p: Any, x_BTD: jax.Array, microbatch: Any) -> jax.Array:
    return loss_whole(p["projection"], layer_norm(p["norm"], x_BTD), microbatch)


def u_transformer(sizes: Sizes | None = None, *, sequences: int = 4, micro_batches: int = MICRO_BATCHES) -> Model:
    """Return the transformer, with random tokens (M, B, T) and the tokens that follow them.

    Args:
        sizes: the sizes of the model; the layer in the middle is neither an encoder nor a decoder.
        sequences: sequences of a micro-batch.
        micro_batches: M.
    """
    sizes = sizes or Sizes(vocabulary=2048, length=96, features=256, heads=4, layers=7)
    drawn = init_params(sizes, sizes.layers, mode="basic")  # one block in each group, stacked: (1, ...)
    blocks = [jax.tree.map(lambda w: w[0], drawn[f"blocks{i}"]) for i in range(sizes.layers)]
    depth, width = sizes.layers // 2, sizes.features
    encoders, decoders = ([f"{kind}{i}" for i in range(depth)] for kind in ("encoder", "decoder"))
    params: dict[str, Any] = {name: {"block": blocks.pop()} for name in (*encoders, *decoders)}
    params["middle"] = blocks.pop()
    params["encoder0"] |= {"table": drawn["table"], "positions": drawn["positions"]}
    for i, key in enumerate(jax.random.split(jax.random.key(2), depth)):
        params[f"decoder{i}"] |= {"join": jax.random.normal(key, (2 * width, width)) / (2 * width) ** 0.5}
    params["prediction"] = {"norm": drawn["norm"], "projection": drawn["projection"]}
    stages = [
        *(Stage(partial(encode, name=f"level{i}"), params=name, ipu=0) for i, name in enumerate(encoders)),
        Stage(bend, params="middle", ipu=0),
        *(Stage(decode, params=f"decoder{i}", ipu=1, takes=(f"level{i}",)) for i in reversed(range(depth))),
        Stage(predict, params="prediction", ipu=1),
    ]
    return of_stages(stages, params, random_batch(sizes, micro_batches, sequences))


# the recommender


def look_up(p: Any, _: None, microbatch: Any) -> jax.Array:
    return p["table"][microbatch["ids"]].reshape(len(microbatch["ids"]), -1)


def perceptron(p: Any, x_BD: jax.Array, microbatch: Any) -> jax.Array:
    return jax.nn.relu(x_BD @ p["w0"]) @ p["w1"]


def click_loss(p: Any, x_BD: jax.Array, microbatch: Any) -> jax.Array:
    return optax.sigmoid_binary_cross_entropy(x_BD[:, 0], microbatch["clicks"]).mean()


def recommender(*, packed: bool, micro_batches: int, examples: int = 256, hidden: int = 256, ipus: int = IPUS) -> Model:
    """Return the recommender, random ids (M, B, FIELDS) and clicks.

    Args:
        packed: whether its layers are on the last IPU; otherwise they are on IPU 0.
        micro_batches: M.
        examples: examples of a micro-batch.
        hidden: the width of the hidden layer.
        ipus: the number of IPUs. The table is on the first, and the loss on the last.
    """
    keys = jax.random.split(jax.random.key(3), 5)
    params = {
        "table": {"table": jax.random.normal(keys[0], (ROWS, WIDTH))},
        "layers": {
            "w0": jax.random.normal(keys[1], (FIELDS * WIDTH, hidden)) / (FIELDS * WIDTH) ** 0.5,
            "w1": jax.random.normal(keys[2], (hidden, 1)) / hidden**0.5,
        },
    }
    batch = {
        "ids": jax.random.randint(keys[3], (micro_batches, examples, FIELDS), 0, ROWS),
        "clicks": jax.random.bernoulli(keys[4], 0.5, (micro_batches, examples)).astype("float32"),
    }
    stages = [
        Stage(look_up, params="table", ipu=0),
        Stage(perceptron, params="layers", ipu=(ipus - 1) * packed),
        Stage(click_loss, ipu=ipus - 1),
    ]
    return of_stages(stages, params, batch)


# the programs and the figures


def unsharded(model: Model) -> Callable[[Any, Any, Any], Any]:
    """Return a function of (params, batch, state) for mean loss, gradients and new state: a scan, on one device."""

    def step(params: Any, batch: Any, state: Any) -> Any:
        def add(carry: Any, microbatch: Any) -> Any:
            sums, state = carry
            (loss, state), gradients = jax.value_and_grad(model.loss, has_aux=True)(params, state, microbatch)
            return (jax.tree.map(jnp.add, sums, (loss, gradients)), state), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (sums, state), _ = lax.scan(add, (zeros, state), batch)
        loss, gradients = jax.tree.map(lambda total: total / len(jax.tree.leaves(batch)[0]), sums)
        return loss, gradients, state

    return step


def rows_in_place(params: Any, batch: Any, state: Any) -> Any:
    """Return the recommender's mean loss and gradients, and its state, on one device.

    Each micro-batch adds the gradients of the rows that it reads to one table, in place.
    """
    count = len(batch["ids"])

    def loss_of(layers: Any, rows_BFD: jax.Array, microbatch: Any) -> jax.Array:
        x_BD = perceptron(layers, rows_BFD.reshape(len(rows_BFD), -1), microbatch)
        return click_loss(None, x_BD, microbatch) / count

    def add(sums: Any, microbatch: Any) -> Any:
        (loss, of_table, of_layers), ids = sums, microbatch["ids"]
        rows_BFD = params["table"]["table"][ids]
        part, (layers, rows_BFD) = jax.value_and_grad(loss_of, (0, 1))(params["layers"], rows_BFD, microbatch)
        return (loss + part, of_table.at[ids].add(rows_BFD), jax.tree.map(jnp.add, of_layers, layers)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    (loss, table, layers), _ = lax.scan(add, (jnp.zeros(()), zeros["table"]["table"], zeros["layers"]), batch)
    return loss, {"table": {"table": table}, "layers": layers}, state


def pipelined(model: Model, schedule: str) -> Program:
    """Return the model's step as a pipeline; its comparable result has the form of `unsharded`'s."""
    pipeline = model.pipeline(schedule)
    spread = jax.device_put(model.batch, NamedSharding(pipeline.mesh, PartitionSpec()))
    arguments = (pipeline.shard(model.params), spread)
    if model.state:
        arguments += (pipeline.shard_state(model.state),)
    compiled = jax.jit(pipeline.value_and_grad).lower(*arguments).compile()
    return Program(compiled, arguments, lambda found: (found[0], *map(pipeline.unshard, found[1:])))


def measure(figures: Figures, name: str, model: Model, bounds: dict[str, Bounds]) -> None:
    arguments = (model.params, model.batch, model.state)
    dense = Program(jax.jit(unsharded(model)).lower(*arguments).compile(), arguments)
    programs = {schedule: pipelined(model, schedule) for schedule in bounds}
    figures.add_beside_unsharded(name, dense, programs, bounds, most_difference=1e-4, rounds=ROUNDS)


def measure_recommender(figures: Figures) -> None:
    for packed in (False, True):
        for micro_batches in COUNTS:
            name = f"recommender, M = {micro_batches}, " + (
                "layers on IPU 1" if packed else "table and layers on IPU 0"
            )
            measure(figures, name, recommender(packed=packed, micro_batches=micro_batches), BOUNDS_OF_RECOMMENDER)
    for micro_batches in COUNTS:
        measure_rows(figures, micro_batches)


def measure_rows(figures: Figures, micro_batches: int) -> None:
    models = {
        f"{ipus} IPUs": recommender(packed=True, micro_batches=micro_batches, hidden=SMALL, ipus=ipus)
        for ipus in (2, MOST_IPUS)
    }
    model = models["2 IPUs"]
    arguments = (model.params, model.batch, model.state)
    in_place = Program(jax.jit(rows_in_place).lower(*arguments).compile(), arguments)
    figures.add_beside_unsharded(
        f"recommender, M = {micro_batches}, rows added in place",
        in_place,
        {name: pipelined(model, "grouped") for name, model in models.items()},
        dict.fromkeys(models, BOUND_OF_ROWS if micro_batches == 32 else Bounds()),
        most_difference=1e-4,
        rounds=ROUNDS_OF_ROWS,
    )


MODELS = {"resnet": ("ResNet-18", resnet18), "transformer": ("U-shaped transformer", u_transformer)}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=[*MODELS, "recommender"], help="measure this model alone")


def main() -> int:
    figures = Figures("a ResNet, a transformer with skips and a recommender as pipelines, and unsharded", flags=flags)
    figures.shrink(__name__, COUNTS=(2,), ROWS=50, BOUNDS_OF_RECOMMENDER={"grouped": Bounds()})
    configure(MOST_IPUS)
    for key, (name, make) in MODELS.items():
        if figures.args.only in (None, key):
            measure(figures, name, make(), BOUNDS)
    if figures.args.only in (None, "recommender"):
        measure_recommender(figures)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

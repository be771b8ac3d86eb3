"""Make ResNets for the handwritten digits as pipelines over any number of IPUs, with batch norm as stage state.

These are the published networks (He et al. 2015, arXiv:1512.03385, table 1), for one-channel images and 10 classes:

                      resnet18          resnet50
    stem              7x7, stride 2, 64 channels; batch norm; relu; 3x3 max pool, stride 2
    blocks, 64        2 basic           3 bottlenecks             basic        3x3, 3x3
    blocks, 128       2, first /2       4, first /2               bottleneck   1x1, 3x3, 1x1 to 4 times the channels
    blocks, 256       2, first /2       6, first /2               each convolution is followed by batch norm; a block
    blocks, 512       2, first /2       3, first /2               adds its input, by a 1x1 where shapes differ
    head              average pool, classifier, cross-entropy

A bottleneck has its stride in its 3x3 rather than in its first 1x1, as in torchvision ("v1.5"). Strided convolutions
pad both sides evenly, as in torch. The layers are Flax modules. A network is one function, which is cut between its
layers so that the IPUs' loads are as even as possible:

    basic         IPU0   images -> stem, block1 ... \\
    (resnet18)    IPU1                              -> ... block8, pool, classifier, cross-entropy -> loss

    concurrent    IPU0   images -> stem, block1 ... \\             -> pool, classes 0-4, cross-entropy \\
                  IPU1                              -> ... block8 \\-> pool, classes 5-9, cross-entropy  -> loss

Batch norm normalises a micro-batch by its own mean and variance, as in GPipe and in torch's pipelines. So results
depend on the size of the micro-batch, but not on the number of IPUs. Running averages are the function's state, in
float32 for every precision. Each micro-batch moves them a tenth of the way to its statistics, and evaluation uses them
instead.

Dims: B images of a micro-batch, H rows, W columns, C channels; arrays have them in that order ("NHWC").
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax import Pipeline, stage_end
from ipu_jax.nn import conv_general_dilated
from mnist_example.flags import RESNET_BLOCKS, Mode
from mnist_example.model import classifier_params, head_of, scaled_images

SIDE: Final = 28
"""Rows and columns of an image with which the shapes are found. The networks take images of any size."""

WIDTH: Final = 64


class _ConvNorm(nn.Module):
    """A convolution without bias, followed by batch norm: (B, H, W, C) to (B, H/strides, W/strides, features)."""

    features: int
    kernel: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        conv = nn.Conv(
            self.features,
            (self.kernel, self.kernel),
            self.strides,
            padding=self.kernel // 2,
            use_bias=False,
            conv_general_dilated=conv_general_dilated,
            name="conv",
        )
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5, name="norm")
        return norm(conv(x))


class _Stem(nn.Module):
    """The first convolution, batch norm, relu and max pool: (B, H, W) to (B, H/4, W/4, features)."""

    features: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        weights = jax.tree.leaves(self.variables.get("params", {}))  # none while they are being drawn
        x = scaled_images(images, weights[0].dtype if weights else jnp.float32)
        y = nn.relu(_ConvNorm(self.features, 7, 2, name="first")(x[..., None], train))
        return nn.max_pool(y, (3, 3), (2, 2), ((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType] (Flax's mistake)


class _Block(nn.Module):
    """Convolutions with the input added to their result: (B, H, W, C) to (B, H/strides, W/strides, out).

    `shapes` contains (features, kernel, strides) for each convolution.
    """

    shapes: tuple[tuple[int, int, int], ...]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = x
        for number, (features, kernel, strides) in enumerate(self.shapes):
            y = nn.relu(y) if number else y
            y = _ConvNorm(features, kernel, strides, name=f"conv{number}")(y, train)
        if x.shape != y.shape:
            strides = math.prod(strides for _, _, strides in self.shapes)
            x = _ConvNorm(y.shape[-1], 1, strides, name="shortcut")(x, train)
        return nn.relu(x + y)


@dataclasses.dataclass(frozen=True)
class ResnetLayer:
    """A part of the network that is on one IPU. Its weights and averages are named like the layer.

    Attributes:
        name: such as "stem" or "block1".
        module: called with (x, train); its variables are "params" and "batch_stats".
        inputs: the shape of x for one image of MNIST's size.
    """

    name: str
    module: nn.Module
    inputs: tuple[int, ...]

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Return Flax's variables in float32, `{"params": ..., "batch_stats": ...}`."""
        return dict(self.module.init(key, jnp.zeros((1, *self.inputs)), train=False))


@functools.cache
def layers_of(name: str, *, width: int = WIDTH) -> tuple[ResnetLayer, ...]:
    """Return the stem and the blocks, in order. The head is not included.

    Args:
        name: "resnet18" or "resnet50".
        width: channels of the stem, and of the 3x3 in the first blocks; the published networks have 64.

    >>> [layer.name for layer in layers_of("resnet18")][-2:], layers_of("resnet50")[-1].inputs
    (['block7', 'block8'], (1, 1, 2048))
    """
    layers = [ResnetLayer("stem", _Stem(width), (SIDE, SIDE))]
    for group, count in enumerate(RESNET_BLOCKS[name]):
        features = width * 2**group
        for place in range(count):
            strides = 2 if group and not place else 1
            if name == "resnet18":
                shapes = ((features, 3, strides), (features, 3, 1))
            else:
                shapes = ((features, 1, 1), (features, 3, strides), (4 * features, 1, 1))
            layers.append(ResnetLayer(f"block{len(layers)}", _Block(shapes), _output(layers[-1])))
    return tuple(layers)


def _output(layer: ResnetLayer) -> tuple[int, ...]:
    run = lambda key: layer.module.init_with_output(key, jnp.zeros((1, *layer.inputs)), train=False)[0]
    return jax.eval_shape(run, jax.random.key(0)).shape[1:]


def init_params(name: str, seed: int, *, width: int = WIDTH) -> dict[str, Any]:
    """Return random whole weights for `Pipeline.shard`, float32, the same for both modes and any number of IPUs.

    The initialisation is He normal for kernels, LeCun normal for the classifier, 1 for scales and 0 for biases.

    Args:
        name, width: as for `layers_of`.
        seed: the same seed gives the same weights.

    Returns:
        `{"stem": {...}, "block1": {...}, ..., "classifier": {"w": (D, classes), "b": (classes,)}}`; a convolution's
        kernel is (rows, columns, C in, C out).
    """
    shapes = shapes_of(name, width=width)[0]
    features = shapes.pop("classifier")["w"].shape[0]
    random = np.random.default_rng(seed)  # drawing 50 shapes with jax.random takes 10 s, most of it for compiling

    def drawn(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        kind = path[-1].key
        if kind == "kernel":
            deviation = math.sqrt(2 / math.prod(shape.shape[:-1]))
            return jnp.asarray(deviation * random.standard_normal(shape.shape, np.float32))
        return jnp.full(shape.shape, {"scale": 1, "bias": 0}[kind], jnp.float32)

    return {**jax.tree.map_with_path(drawn, shapes), "classifier": classifier_params(jax.random.key(seed), features)}


def init_state(name: str, *, width: int = WIDTH) -> dict[str, Any]:
    """Return the initial running averages for `Pipeline.shard_state`: means of 0 and variances of 1.

    Returns:
        `{"stem": {"batch_stats": {...}}, ...}`: for each batch norm, `{"mean": (C,), "var": (C,)}` in float32.
    """
    fresh = lambda path, average: jnp.full(average.shape, path[-1].key == "var", average.dtype)
    return jax.tree.map_with_path(fresh, shapes_of(name, width=width)[1])


def shapes_of(name: str, *, width: int = WIDTH) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shapes of `init_params` and of `init_state`."""
    layers = layers_of(name, width=width)

    def drawn(key: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        own = {layer.name: layer.init(key) for layer in layers}
        params = {name: variables.pop("params") for name, variables in own.items()}
        return {**params, "classifier": classifier_params(key, _output(layers[-1])[-1])}, own

    return jax.eval_shape(drawn, jax.random.key(0))


def make_pipeline(
    name: str, mode: Mode, micro_batch: Any, *, ipus: int = 2, width: int = WIDTH, **options: Any
) -> Pipeline:
    """Return the network as a pipeline, over the first `replicas` x `ipus` devices.

    Precision, micro-batches, loss and aux are as in `mnist_example.model.make_pipeline`. A micro-batch must have at
    least 2 images; they can have any number of rows and columns.

    Args:
        name, width: as for `layers_of`.
        mode: "basic" or "concurrent", as drawn at the top of this file.
        micro_batch: a micro-batch, or its shapes.
        ipus: IPUs of a replica, from 1 to the number of layers.
        options: of `Pipeline.from_function`, such as `schedule` and `replicas`.
    """
    params, state = shapes_of(name, width=width)
    loss = loss_of(name, mode, width=width)
    return Pipeline.from_function(loss, params, micro_batch, state=state, ipus=ipus, **options)


def loss_of(name: str, mode: Mode, *, training: bool = True, width: int = WIDTH) -> Callable[..., tuple[Any, ...]]:
    """Return a network in a mode: a function of whole weights, running averages and a micro-batch.

    In training it returns `(loss, aux, new averages)`. Otherwise it normalises by the averages, and returns
    `(loss, aux)`.
    """
    layers, head = layers_of(name, width=width), head_of(mode)

    def loss(params: Any, averages: Any, micro_batch: dict[str, jax.Array]) -> tuple[Any, ...]:
        x, new = micro_batch["images"], {}
        for layer in layers:
            variables = {"params": params[layer.name], **averages[layer.name]}
            with jax.named_scope(layer.name):
                x, new[layer.name] = layer.module.apply(variables, x, train=training, mutable=["batch_stats"])
                x = stage_end(x)
        with jax.named_scope("classifier"):
            result = head(params["classifier"], x.mean(axis=(1, 2)), micro_batch["labels"])
        return (*result, new) if training else result

    return loss

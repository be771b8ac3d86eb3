"""Make the handwritten digits network as a pipeline: on several IPUs, or with its classifier split over all of them.

The network is a 784-2560-1280-10 MLP with relu between the layers and a bias in each. It is one function, which is cut
after its layers; the modes differ in its last lines, and all layouts use the same weights:

    basic, 2 IPUs   IPU0   images -> hidden, features \\
                    IPU1                              -> classifier, softmax cross-entropy -> loss

    basic, 3 IPUs   IPU0   images -> hidden \\
                    IPU1                    -> features \\
                    IPU2                                -> classifier, softmax cross-entropy -> loss

    concurrent      IPU0   images -> hidden, features \\ -> classifier (classes 0-4), softmax cross-entropy \\
                    IPU1                              \\-> classifier (classes 5-9), softmax cross-entropy  -> loss

In concurrent mode the end is a call of `everywhere`: every IPU holds its own columns of the classifier's weight and
bias. The softmax gets the number of real classes: 10 classes on 4 IPUs are 3, 3, 3 and 1, and the 2 columns that pad
the last shard don't count.

A micro-batch is `{"images": (B, 28, 28), "labels": (B,)}`: images are uint8 from 0 to 255, or floating from 0 to 1;
labels have any integer dtype. An image with a label outside 0 to 9 does not count as an example: its loss is zero, and
it is never correct. (Such images fill up the last batch of an evaluation.)

Dims: B images of a micro-batch, P pixels, H hidden, D features that the classifier reads, C classes (c on this IPU).
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

import sharded_ops
from ipu_jax import Pipeline, everywhere, make_schedule, stage_end
from ipu_jax.io import normalise
from ipu_jax.pipelines import IPU_AXIS
from mnist_example.flags import CLASSES, Mode

PIXELS: Final = 28 * 28
HIDDEN: Final = 2560
FEATURES: Final = 1280


def init_params(seed: ArrayLike) -> dict[str, Any]:
    """Return random weights for `TrainStep.init`, float32, the same for both modes and any number of IPUs.

    The initialisation is He normal before a relu, LeCun normal for the classifier, and zero for biases.

    Args:
        seed: a whole number; the same seed gives the same weights.

    Returns:
        `{"hidden": {"w": (P, H), "b": (H,)}, "features": {"w": (H, D), "b": (D,)}, "classifier": {"w": (D, C), "b":
        (C,)}}`.

    >>> jax.tree.map(jnp.shape, init_params(0)["classifier"])
    {'b': (10,), 'w': (1280, 10)}
    """
    he = jax.nn.initializers.he_normal()
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "hidden": _layer(keys[0], he, PIXELS, HIDDEN),
        "features": _layer(keys[1], he, HIDDEN, FEATURES),
        "classifier": classifier_params(keys[2], FEATURES),
    }


def make_pipeline(
    mode: Mode, micro_batch: Any, *, ipus: int = 2, replicas: int = 1, devices: Any = None, **options: Any
) -> Pipeline:
    """Return the network as a pipeline, over the first `replicas` x `ipus` devices.

    Every layer computes in the dtype of its weights, and the loss is computed in float32. So `TrainOptions(precision=)`
    of a training step decides the precision. The loss is the mean over the micro-batches. aux is
    `{"correct": (M,) int32}`: for each micro-batch, the number of images whose (first) largest logit is their label's.

    Args:
        mode: "basic" or "concurrent", as drawn at the top of this file.
        micro_batch: a micro-batch, or its shapes.
        ipus: IPUs of a replica; basic mode uses 3 at most.
        replicas: copies of the network, each with its own micro-batches.
        devices: as for `make_mesh`.
        options: `gradient_accumulation`, `schedule` and `reduction`, as for `Pipeline`.
    """
    layers = (0, 1) if mode == "basic" and ipus > 2 else (0, 0)
    placement = (*layers, None if mode == "concurrent" else ipus - 1)
    placed: dict[str, Any] = {"ipus": ipus, "replicas": replicas, "devices": devices}
    placed["schedule"] = make_schedule("sequential", placement=placement, ipus=ipus, gradient_accumulation=1)
    params = jax.eval_shape(lambda: init_params(0))
    pipeline = Pipeline.from_function(loss_of(mode), params, micro_batch, **placed)
    return pipeline.replace(**{"schedule": "grouped", **options})


def loss_of(mode: Mode) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Return the network in a mode: a function of whole weights and a micro-batch that returns `(loss, aux)`."""
    head = head_of(mode)

    def loss(params: Any, micro_batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        x = scaled_images(micro_batch["images"], params["hidden"]["w"].dtype).reshape(-1, PIXELS)
        for name in ("hidden", "features"):
            with jax.named_scope(name):
                x = stage_end(jax.nn.relu(_dense(params[name], x)))
        with jax.named_scope("classifier"):
            return head(params["classifier"], x, micro_batch["labels"])

    return loss


def head_of(mode: Mode) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Return the end of any network for digits: the classifier, the cross-entropy, and the count of correct images.

    Args:
        mode: "basic" computes it in one stage; "concurrent" on all IPUs at once, each with its own c classes.

    Returns:
        A function of weights `{"w": (D, C), "b": (C,)}`, features (B, D) and labels (B,). It returns the mean loss and
        `{"correct": () int32}`.
    """
    specs = {"w": PartitionSpec(None, IPU_AXIS), "b": PartitionSpec(IPU_AXIS)}
    return _head if mode == "basic" else everywhere(_sharded_head, in_specs=(specs, PartitionSpec(), PartitionSpec()))


def classifier_params(key: jax.Array, features: int) -> dict[str, jax.Array]:
    """Return random weights of the group "classifier": `{"w": (features, C), "b": (C,)}`, LeCun normal and zeros."""
    return _layer(key, jax.nn.initializers.lecun_normal(), features, CLASSES)


def _layer(key: jax.Array, init: jax.nn.initializers.Initializer, rows: int, columns: int) -> dict[str, jax.Array]:
    return {"w": init(key, (rows, columns), jnp.float32), "b": jnp.zeros(columns, jnp.float32)}


def scaled_images(images: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return images in `dtype`, as the networks read them. Bytes from 0 to 255 are scaled to 0 to 1; floats are not."""
    return normalise(images, dtype=dtype) if images.dtype == jnp.uint8 else images.astype(dtype)


def _dense(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def _head(params: Any, x_BD: jax.Array, labels_B: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits_BC, labels_B = _dense(params, x_BD), labels_B.astype(jnp.int32)
    is_example_B = (labels_B >= 0) & (labels_B < CLASSES)
    own_B = jnp.where(is_example_B, labels_B, 0)
    losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC.astype(jnp.float32), own_B)
    return jnp.where(is_example_B, losses_B, 0).mean(), _correct(jnp.argmax(logits_BC, axis=-1), labels_B)


def _sharded_head(params: Any, x_BD: jax.Array, labels_B: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    # In the columns that pad a shard, weight and bias are zero, and so are the logits. The loss never reads these.
    logits_Bc, labels_B = sharded_ops.matmul(x_BD, params["w"]) + params["b"], labels_B.astype(jnp.int32)
    losses_B = sharded_ops.log_softmax_cross_entropy(logits_Bc, labels_B, size=CLASSES)
    return losses_B.mean(), _correct(sharded_ops.argmax(lax.stop_gradient(logits_Bc), size=CLASSES), labels_B)


def _correct(predictions_B: jax.Array, labels_B: jax.Array) -> dict[str, jax.Array]:
    return {"correct": jnp.sum(predictions_B == labels_B, dtype=jnp.int32)}

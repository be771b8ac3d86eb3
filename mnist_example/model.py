"""Make the handwritten digits network as a pipeline: on several IPUs, or with its classifier split over all of them.

The network is a 784-2560-1280-10 MLP with relu between the layers and a bias in each. All layouts use the same weights:

    basic, 2 IPUs   IPU0   images -> hidden, features \\
                    IPU1                              -> classifier -- softmax cross-entropy -> loss

    basic, 3 IPUs   IPU0   images -> hidden \\
                    IPU1                    -> features \\
                    IPU2                                -> classifier -- softmax cross-entropy -> loss

    concurrent      IPU0   images -> hidden, features \\ -> classifier (classes 0-4) -- softmax cross-entropy \\
                    IPU1                              \\-> classifier (classes 5-9) -- softmax cross-entropy  -> loss

In concurrent mode every IPU holds its own columns of the classifier's weight and bias. The softmax gets the number of
real classes: 10 classes on 4 IPUs are 3, 3, 3 and 1, and the 2 columns that pad the last shard don't count.

A micro-batch is `{"images": (B, 28, 28), "labels": (B,)}`: images are uint8 from 0 to 255, or floating from 0 to 1;
labels have any integer dtype. An image with a label outside 0 to 9 does not count as an example: its loss is zero, and
it is never correct. (Such images fill up the last batch of an evaluation.)

Dims: B images of a micro-batch, P pixels, H hidden, D features that the classifier reads, C classes (c on this IPU).
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

import sharded_ops
from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.io import normalise
from ipu_jax.pipelines import IPU_AXIS
from mnist_example.flags import CLASSES, Mode

PIXELS: Final = 28 * 28
HIDDEN: Final = 2560
FEATURES: Final = 1280


def init_params(seed: int) -> dict[str, Any]:
    """Return random whole weights for `Pipeline.shard`, float32, the same for both modes and any number of IPUs.

    The initialisation is He normal before a relu, LeCun normal for the classifier, and zero for biases.

    Args:
        seed: the same seed gives the same weights.

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


def make_pipeline(mode: Mode, *, ipus: int = 2, replicas: int = 1, devices: Any = None, **options: Any) -> Pipeline:
    """Return the network as a pipeline, over the first `replicas` x `ipus` devices.

    Every stage computes in the dtype of its weights, and the loss is computed in float32. So `TrainOptions(precision=)`
    of a training step decides the precision. The loss is the mean over the micro-batches. aux is
    `{"correct": (M,) int32}`: for each micro-batch, the number of images whose (first) largest logit is their label's.

    Args:
        mode: "basic" or "concurrent", as drawn at the top of this file.
        ipus: IPUs of a replica; basic mode uses 3 at most.
        replicas: copies of the network, each with its own micro-batches.
        devices: as for `make_mesh`.
        options: of `Pipeline`, such as `gradient_accumulation`, `schedule` and `reduction`.
    """
    places = (0, 1) if mode == "basic" and ipus > 2 else (0, 0)
    head, specs = head_stages(mode, ipu=ipus - 1)
    body = [Stage(_hidden, params="hidden", ipu=places[0]), Stage(_features, params="features", ipu=places[1])]
    return Pipeline([*body, *head], mesh=make_mesh(replicas, ipus, devices=devices), specs=specs, **options)


def head_stages(mode: Mode, ipu: int) -> tuple[list[Stage], dict[str, Any]]:
    """Return the last two stages of any network for digits: the classifier, and the cross-entropy as the loss.

    The stage before must return features (B, D). The weights are the group "classifier", `{"w": (D, C), "b": (C,)}`.

    Args:
        mode: "basic" puts the classifier on one IPU; "concurrent" splits the classes over all IPUs, c on each.
        ipu: the IPU of both stages in basic mode.

    Returns:
        The two stages, and the `specs` that `Pipeline` needs for them. The last stage returns
        `(loss, {"correct": () int32})`.
    """
    if mode == "basic":
        classifier = Stage(_classifier, params="classifier", ipu=ipu)
        return [classifier, Stage(_cross_entropy, ipu=ipu, name="cross-entropy")], {}
    classifier = Stage(_sharded_classifier, params="classifier", ipu=ALL_IPUS, reference=_classifier)
    loss = Stage(_sharded_cross_entropy, ipu=ALL_IPUS, reference=_cross_entropy, name="cross-entropy")
    return [classifier, loss], {"classifier": {"w": PartitionSpec(None, IPU_AXIS), "b": PartitionSpec(IPU_AXIS)}}


def classifier_params(key: jax.Array, features: int) -> dict[str, jax.Array]:
    """Return random weights of the group "classifier": `{"w": (features, C), "b": (C,)}`, LeCun normal and zeros."""
    return _layer(key, jax.nn.initializers.lecun_normal(), features, CLASSES)


def _layer(key: jax.Array, init: jax.nn.initializers.Initializer, rows: int, columns: int) -> dict[str, jax.Array]:
    return {"w": init(key, (rows, columns), jnp.float32), "b": jnp.zeros(columns, jnp.float32)}


def scaled_images(images: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return images in `dtype`, as the networks read them. Bytes from 0 to 255 are scaled to 0 to 1; floats are not."""
    return normalise(images, dtype=dtype) if images.dtype == jnp.uint8 else images.astype(dtype)


def _hidden(params: Any, x: None, microbatch: dict[str, jax.Array]) -> jax.Array:
    images = microbatch["images"]
    x_BP = scaled_images(images, params["w"].dtype).reshape(len(images), PIXELS)
    return jax.nn.relu(_dense(params, x_BP))


def _features(params: Any, h_BH: jax.Array, microbatch: Any) -> jax.Array:
    return jax.nn.relu(_dense(params, h_BH))


def _dense(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def _classifier(params: Any, x_BD: jax.Array, microbatch: Any) -> jax.Array:
    return _dense(params, x_BD)


def _cross_entropy(params: None, logits_BC: jax.Array, microbatch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    labels_B = microbatch["labels"].astype(jnp.int32)
    is_example_B = (labels_B >= 0) & (labels_B < CLASSES)
    losses_B = optax.softmax_cross_entropy_with_integer_labels(
        logits_BC.astype(jnp.float32), jnp.where(is_example_B, labels_B, 0)
    )
    loss = jnp.where(is_example_B, losses_B, 0).mean()
    return loss, {"correct": jnp.sum(jnp.argmax(logits_BC, axis=-1) == labels_B, dtype=jnp.int32)}


def _sharded_classifier(params: Any, x_BD: jax.Array, microbatch: Any) -> jax.Array:
    # In the columns that pad a shard, weight and bias are zero, and so are the logits. The loss never reads these.
    return sharded_ops.matmul(x_BD, params["w"]) + params["b"]


def _sharded_cross_entropy(
    params: None, logits_Bc: jax.Array, microbatch: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    labels_B = microbatch["labels"].astype(jnp.int32)
    losses_B = sharded_ops.log_softmax_cross_entropy(logits_Bc, labels_B, size=CLASSES)
    predictions_B = sharded_ops.argmax(lax.stop_gradient(logits_Bc), size=CLASSES)
    return losses_B.mean(), {"correct": jnp.sum(predictions_B == labels_B, dtype=jnp.int32)}

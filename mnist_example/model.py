"""Make the handwritten digits network as a pipeline: on two IPUs, or with its classifier split over all IPUs.

It is a 784-2560-1280-10 MLP with relu between the layers and a bias in each. Both modes use the same weights:

    basic         IPU0   images -> MLP \\
                  IPU1                  -> classifier -- softmax cross-entropy -> loss

    concurrent    IPU0   images -> MLP \\ -> classifier (classes 0-4) -- softmax cross-entropy \\
                  IPU1                  \\-> classifier (classes 5-9) -- softmax cross-entropy  -> loss

In concurrent mode every IPU holds its own columns of the classifier's weight and of its bias. The softmax gets the
number of real classes: 10 classes on 4 IPUs are 3, 3, 3 and 1, and the 2 columns that pad the last shard don't count.

A micro-batch is `{"images": (B, 28, 28), "labels": (B,)}`: images are uint8 from 0 to 255, or floating from 0 to 1;
labels have any integer dtype. An image with a label outside 0 to 9 does not count as an example: its loss is zero, and
it is never correct. (Such images fill up the last batch of an evaluation.)

Dims: B images of a micro-batch, P pixels, H hidden, D features that the classifier reads, C classes (c of them here).
"""

import functools
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

import sharded_ops
from ipu_jax import ALL_IPUS, IPU_AXIS, Half, Pipeline, Reduction, Stage, make_mesh, normalise
from mnist_example.checks import check_choice, check_count

PIXELS: Final = 28 * 28
HIDDEN: Final = 2560
FEATURES: Final = 1280
CLASSES: Final = 10

Mode = Literal["basic", "concurrent"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

Precision = Literal["16.16", "16.32", "32.32"]
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
HALVES: Final[tuple[Half, ...]] = get_args(Half)

_StageFn = Any  # a function of (params, x, microbatch); the types of x differ from stage to stage


def weights_dtype(precision: Precision, half: Half = "bfloat16") -> DTypeLike:
    """Return the dtype in which weights are stored: `half` for "16.16", else float32.

    Precisions are named as in PopTorch's examples: the bits of the operations, a point, and the bits of the stored
    weights. The 16-bit type is `half`. In each precision, the loss is computed and gradients are summed over
    micro-batches in float32.

        "32.32"   everything is float32
        "16.32"   stages cast their float32 weights to `half` and compute in it; updates are made in float32
        "16.16"   weights are stored in `half` too. They take half the memory, but an update below 1/256 of a bfloat16
                  weight, or 1/2048 of a float16 weight, may be rounded away

    Raises:
        ValueError: an unknown half.
    """
    check_choice("half", half, HALVES)
    return jnp.float32 if precision.endswith(".32") else jnp.dtype(half)


def operations_dtype(precision: Precision, half: Half = "bfloat16") -> DTypeLike:
    """Return the dtype in which stages compute: float32 for "32.32", else `half`.

    Raises:
        ValueError: an unknown precision or half.
    """
    check_choice("precision", precision, PRECISIONS)
    check_choice("half", half, HALVES)
    return jnp.float32 if precision.startswith("32.") else jnp.dtype(half)


def init_params(seed: int, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """Return random whole weights for `Pipeline.shard`, the same for both modes and any number of IPUs.

    The initialisation is He's normal before a relu, LeCun's normal for the classifier, and zero for biases. Weights are
    drawn in float32 and rounded to `dtype`, so that all precisions start from the same weights.

    Args:
        seed: the same seed gives the same weights.
        dtype: of the leaves; `weights_dtype(precision)`.

    Returns:
        `{"mlp": {"hidden": {"w": (P, H), "b": (H,)}, "features": {"w": (H, D), "b": (D,)}},
        "classifier": {"w": (D, C), "b": (C,)}}`.

    >>> jax.tree.map(jnp.shape, init_params(0)["classifier"])
    {'b': (10,), 'w': (1280, 10)}
    """
    he = jax.nn.initializers.he_normal()
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "mlp": {
            "hidden": _layer(keys[0], he, PIXELS, HIDDEN, dtype),
            "features": _layer(keys[1], he, HIDDEN, FEATURES, dtype),
        },
        "classifier": classifier_params(keys[2], FEATURES, dtype),
    }


def check_ipus(mode: Mode, ipus: int) -> None:
    """Raise for a number of IPUs that the mode cannot use, whatever the number of devices is.

    Raises:
        ValueError: an unknown mode, a number below 1, a number other than 2 in basic mode, or more IPUs than classes.
    """
    check_choice("mode", mode, MODES)
    check_count("ipus", ipus)
    if mode == "basic" and ipus != 2:
        raise ValueError(f"ipus={ipus}, but basic mode has a part for each of 2 IPUs: use 2, or concurrent mode")
    if ipus > CLASSES:
        raise ValueError(f"ipus={ipus}, but there are {CLASSES} classes to split: use {CLASSES} IPUs at most")


def make_pipeline(
    mode: Mode,
    *,
    ipus: int = 2,
    gradient_accumulation: int = 84,
    schedule: str = "grouped",
    reduction: Reduction = "sum",
    precision: Precision = "32.32",
    half: Half = "bfloat16",
) -> Pipeline:
    """Return the network as a pipeline on one replica, over the first `ipus` devices.

    The loss is the mean over the micro-batches. aux is `{"correct": (M,) int32}`: for each micro-batch, the number of
    images whose (first) largest logit is that of their label.

    Args:
        mode: "basic" or "concurrent", as drawn at the top of this file.
        ipus: IPUs of the replica; basic mode takes 2, concurrent mode 1 to 10.
        gradient_accumulation: M, the micro-batches of one weight update.
        schedule: "grouped" or "sequential".
        reduction: gradients are the "sum" or the "mean" over the micro-batches.
        precision: "32.32", "16.32" or "16.16"; give `shard` weights of `weights_dtype(precision, half)`.
        half: "bfloat16", or "float16", whose small gradients need a loss scale.

    Raises:
        ValueError: an unknown name, a count below 1, IPUs that `check_ipus` refuses, or fewer devices than IPUs.
    """
    check_ipus(mode, ipus)
    dtype = operations_dtype(precision, half)
    head, specs = head_stages(mode, dtype, ipu=1)
    return Pipeline(
        [Stage(functools.partial(_mlp, dtype), params="mlp", ipu=0), *head],
        mesh=make_mesh(1, ipus),
        schedule=schedule,
        gradient_accumulation=gradient_accumulation,
        reduction=reduction,
        specs=specs,
    )


def head_stages(mode: Mode, dtype: DTypeLike, ipu: int) -> tuple[list[Stage], dict[str, Any]]:
    """Return the last two stages of any network of digits: the classifier, and the cross-entropy as the loss.

    The stage before must return features (B, D). The weights are the group "classifier", `{"w": (D, C), "b": (C,)}`.

    Args:
        mode: "basic" puts the classifier on one IPU; "concurrent" splits the classes over all IPUs, c on each.
        dtype: of the classifier's operations; the loss is computed in float32.
        ipu: the IPU of both stages in basic mode.

    Returns:
        The two stages, and the `specs` that `Pipeline` needs for them. The last stage returns
        `(loss, {"correct": () int32})`.
    """
    classifier = functools.partial(_classifier, dtype)
    if mode == "basic":
        stages = [
            Stage(classifier, params="classifier", ipu=ipu),
            Stage(_cross_entropy, ipu=ipu, name="cross-entropy"),
        ]
        return stages, {}
    sharded_classifier = functools.partial(_sharded_classifier, dtype)
    stages = [
        Stage(sharded_classifier, params="classifier", ipu=ALL_IPUS, reference=classifier),
        Stage(_sharded_cross_entropy, ipu=ALL_IPUS, reference=_cross_entropy, name="cross-entropy"),
    ]
    return stages, {"classifier": {"w": PartitionSpec(None, IPU_AXIS), "b": PartitionSpec(IPU_AXIS)}}


def classifier_params(key: jax.Array, features: int, dtype: DTypeLike) -> dict[str, jax.Array]:
    """Return random weights of the group "classifier": `{"w": (features, C), "b": (C,)}`, LeCun's normal and zeros."""
    return _layer(key, jax.nn.initializers.lecun_normal(), features, CLASSES, dtype)


def _layer(
    key: jax.Array, init: jax.nn.initializers.Initializer, rows: int, columns: int, dtype: DTypeLike
) -> dict[str, jax.Array]:
    return {"w": init(key, (rows, columns), jnp.float32).astype(dtype), "b": jnp.zeros(columns, dtype)}


def scaled_images(images: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return images in `dtype`, as the networks read them: bytes from 0 to 255 are scaled to 0 to 1, floats are not."""
    return normalise(images, dtype=dtype) if images.dtype == jnp.uint8 else images.astype(dtype)


def _mlp(dtype: DTypeLike, params: Any, x: None, microbatch: dict[str, jax.Array]) -> jax.Array:
    images = microbatch["images"]
    x_BP = scaled_images(images, dtype).reshape(len(images), PIXELS)
    h_BH = jax.nn.relu(_dense(dtype, params["hidden"], x_BP))
    return jax.nn.relu(_dense(dtype, params["features"], h_BH))


def _dense(dtype: DTypeLike, layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["w"].astype(dtype) + layer["b"].astype(dtype)


def _classifier(dtype: DTypeLike, params: Any, x_BD: jax.Array, microbatch: Any) -> jax.Array:
    return _dense(dtype, params, x_BD)


def _cross_entropy(params: None, logits_BC: jax.Array, microbatch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    labels_B = microbatch["labels"].astype(jnp.int32)
    is_example_B = (labels_B >= 0) & (labels_B < CLASSES)
    losses_B = optax.softmax_cross_entropy_with_integer_labels(
        logits_BC.astype(jnp.float32), jnp.where(is_example_B, labels_B, 0)
    )
    loss = jnp.where(is_example_B, losses_B, 0).mean()
    return loss, {"correct": jnp.sum(jnp.argmax(logits_BC, axis=-1) == labels_B, dtype=jnp.int32)}


def _sharded_classifier(dtype: DTypeLike, params: Any, x_BD: jax.Array, microbatch: Any) -> jax.Array:
    # In the columns that pad a shard, weight and bias are zero, and so are the logits. The loss never reads them.
    return sharded_ops.matmul(x_BD, params["w"].astype(dtype)) + params["b"].astype(dtype)


def _sharded_cross_entropy(
    params: None, logits_Bc: jax.Array, microbatch: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    labels_B = microbatch["labels"].astype(jnp.int32)
    losses_B = sharded_ops.log_softmax_cross_entropy(logits_Bc, labels_B, size=CLASSES)
    predictions_B = sharded_ops.argmax(lax.stop_gradient(logits_Bc), size=CLASSES)
    return losses_B.mean(), {"correct": jnp.sum(predictions_B == labels_B, dtype=jnp.int32)}

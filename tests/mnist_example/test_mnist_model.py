"""Test the digits network: its weights, both pipelines against the unsharded program, and what counts as an example."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipu_jax
from ipu_jax.base.jaxprs import all_equations
from mnist_example import model
from mnist_example.data import synthetic_mnist
from mnist_example.flags import CLASSES, MODES
from mnist_example.model import init_params, loss_of, make_pipeline

M, B = 3, 4
LAYOUTS = [
    ("basic", 1, "grouped", "sum"),
    ("basic", 2, "grouped", "sum"),
    ("basic", 2, "sequential", "sum"),
    ("basic", 3, "1f1b", "sum"),
    ("concurrent", 1, "grouped", "sum"),
    ("concurrent", 2, "grouped", "mean"),
    ("concurrent", 4, "grouped", "sum"),
    ("concurrent", 8, "grouped", "sum"),
]


ONE = {"images": np.zeros((B, 28, 28), np.uint8), "labels": np.zeros(B, np.int8)}


@functools.cache
def pipeline_of(mode, ipus=2, schedule="grouped", reduction="mean"):
    return make_pipeline(mode, ONE, ipus=ipus, gradient_accumulation=M, schedule=schedule, reduction=reduction)


@pytest.fixture(autouse=True, scope="module")
def few_weights():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "HIDDEN", 160)
        patch.setattr(model, "FEATURES", 80)
        yield


@pytest.fixture(scope="module")
def params(few_weights):
    """Return weights with biases that aren't zero, so that a bias left out or padded wrongly is noticed."""
    drawn = init_params(0)
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: np.asarray(p) if p.ndim > 1 else np.float32(0.1 * rng.normal(size=p.shape)), drawn)


@pytest.fixture(scope="module")
def batch():
    digits = synthetic_mnist(seed=0, n_train=M * B, n_test=1)
    return {
        "images": digits.train_images.reshape(M, B, 28, 28),
        "labels": digits.train_labels.reshape(M, B).astype(np.int8),
    }


def dense_logits(params, images):
    """Return the logits (N, C), by numpy in float64."""
    x = images.reshape(-1, 784) / 255.0
    for layer in (params["hidden"], params["features"]):
        x = np.maximum(x @ np.asarray(layer["w"], np.float64) + np.asarray(layer["b"], np.float64), 0)
    return x @ np.asarray(params["classifier"]["w"], np.float64) + np.asarray(params["classifier"]["b"], np.float64)


def dense_loss(params, batch):
    """Return the mean over micro-batches of the sum of losses of real examples divided by B."""
    logits = dense_logits(params, batch["images"])
    labels = batch["labels"].reshape(-1).astype(np.int32)
    is_example = (labels >= 0) & (labels < CLASSES)
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), np.where(is_example, labels, 0)]
    return np.where(is_example, losses, 0).mean()


def dense_gradients(params, batch):
    """Return the gradients of the sum over micro-batches, by jax on one device."""

    def loss(params):
        x = batch["images"].reshape(-1, 784) / jnp.float32(255)
        for name in ("hidden", "features"):
            x = jnp.maximum(jnp.dot(x, params[name]["w"], precision="highest") + params[name]["b"], 0)
        logits = jnp.dot(x, params["classifier"]["w"], precision="highest") + params["classifier"]["b"]
        return -(jax.nn.log_softmax(logits) * np.eye(CLASSES)[batch["labels"].reshape(-1)]).sum() / B

    return jax.grad(loss)(params)


# weights


def test_weights_have_the_networks_shapes_and_scales_and_follow_the_seed(monkeypatch):
    monkeypatch.setattr(model, "HIDDEN", 2560)
    monkeypatch.setattr(model, "FEATURES", 1280)
    whole = jax.eval_shape(lambda: init_params(0))
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(whole)}
    assert shapes == {
        "['classifier']['b']": (10,),
        "['classifier']['w']": (1280, 10),
        "['features']['b']": (1280,),
        "['features']['w']": (2560, 1280),
        "['hidden']['b']": (2560,),
        "['hidden']['w']": (784, 2560),
    }
    monkeypatch.setattr(model, "HIDDEN", 640)
    monkeypatch.setattr(model, "FEATURES", 320)
    drawn, same, other = (jax.tree.map(np.asarray, init_params(seed)) for seed in (1, 1, 2))
    assert float(drawn["hidden"]["w"].std()) == pytest.approx((2 / 784) ** 0.5, rel=0.01)
    assert float(drawn["features"]["w"].std()) == pytest.approx((2 / 640) ** 0.5, rel=0.01)
    assert float(drawn["classifier"]["w"].std()) == pytest.approx((1 / 320) ** 0.5, rel=0.05)
    assert not any(leaf.any() for leaf in jax.tree.leaves(drawn) if leaf.ndim == 1)
    np.testing.assert_array_equal(drawn["classifier"]["w"], same["classifier"]["w"])
    assert not np.array_equal(drawn["classifier"]["w"], other["classifier"]["w"])


# the pipelines


@pytest.mark.fast("concurrent-2-grouped-mean")
@pytest.mark.parametrize(("mode", "ipus", "schedule", "reduction"), LAYOUTS)
def test_loss_and_gradients_are_the_dense_and_the_unsharded_programs(mode, ipus, schedule, reduction, params, batch):
    pipeline = pipeline_of(mode, ipus, schedule, reduction)
    sharded = pipeline.shard(params)
    (loss, aux), gradients = pipeline.value_and_grad(sharded, batch)
    assert float(loss) == pytest.approx(dense_loss(params, batch), rel=1e-5)
    predictions = dense_logits(params, batch["images"]).argmax(-1).reshape(M, B)
    np.testing.assert_array_equal(aux["correct"], (predictions == batch["labels"]).sum(-1))
    for found, expected in zip(
        jax.tree.leaves(pipeline.unshard(gradients)), jax.tree.leaves(dense_gradients(params, batch)), strict=True
    ):
        expected = expected / (M if reduction == "mean" else 1)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    assert len(ipu_jax.verify(pipeline, sharded, batch).gradient_errors) == 6


def test_a_class_that_pads_a_shard_is_never_predicted(params, batch):
    """All logits of the 10 classes are negative, and those of the 2 that fill up the fourth shard are 0."""
    classifier = params["classifier"]
    low = {**params, "classifier": {**classifier, "b": classifier["b"] - 50}}
    predictions = dense_logits(low, batch["images"]).argmax(-1).reshape(M, B)
    pipeline = pipeline_of("concurrent", 4)
    _, aux = pipeline.loss(pipeline.shard(low), {**batch, "labels": np.int8(predictions)})
    np.testing.assert_array_equal(aux["correct"], [B] * M)


# what an example is


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ipus"), [("basic", 2), ("concurrent", 4)])
def test_what_has_no_label_counts_for_nothing(mode, ipus, params, batch):
    labels = batch["labels"].copy()
    labels[0], labels[1, :2], labels[2, 0] = -1, (10, 127), 11  # 10 and 11 are columns of padding on 4 IPUs
    masked = {**batch, "labels": labels}
    pipeline = pipeline_of(mode, ipus)
    sharded = pipeline.shard(params)
    (loss, aux), gradients = pipeline.value_and_grad(sharded, masked)
    assert float(loss) == pytest.approx(dense_loss(params, masked), rel=1e-5)
    assert int(aux["correct"][0]) == 0
    # other images in their place change nothing
    images = batch["images"].copy()
    for unread in (np.s_[0], np.s_[1, :2], np.s_[2, 0]):
        images[unread] = 255 - images[unread]
    (other_loss, other_aux), others = pipeline.value_and_grad(sharded, {"images": images, "labels": labels})
    assert float(loss) == float(other_loss)
    np.testing.assert_array_equal(aux["correct"], other_aux["correct"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8), gradients, others)


@pytest.mark.parametrize("mode", MODES)
def test_images_may_be_bytes_or_floats(mode, params, batch):
    loss = jax.jit(lambda mb: loss_of(mode)(params, mb)[0])
    floats = {"images": (batch["images"][0] / 255).astype(np.float32), "labels": batch["labels"][0].astype(np.int32)}
    of_bytes = loss(jax.tree.map(lambda leaf: leaf[0], batch))
    assert float(loss(floats)) == pytest.approx(float(of_bytes), rel=1e-6)


# dtypes and places


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("images", ["uint8", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_layers_compute_in_the_dtype_of_their_weights(mode, images, dtype, params, batch):
    stored = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)
    micro_batch = {"images": batch["images"][0].astype(images), "labels": batch["labels"][0]}
    program = jax.make_jaxpr(loss_of(mode))(stored, micro_batch)
    products = [eqn for eqn in all_equations(program.jaxpr) if eqn.primitive.name == "dot_general"]
    assert [[v.aval.dtype for v in eqn.invars] for eqn in products] == [[dtype, dtype]] * 3
    assert jax.eval_shape(loss_of(mode), stored, micro_batch)[0].dtype == "float32"


def test_layers_are_where_the_picture_has_them():
    """Basic mode spreads them over three IPUs; in concurrent mode IPU 0 has all but the classifier, for any number."""
    places = lambda mode, ipus: [stage.place for stage in pipeline_of(mode, ipus).stages]
    assert [places("basic", ipus) for ipus in (1, 2, 3)] == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
    assert [places("concurrent", ipus) for ipus in (1, 2, 8)] == [[0, 0, None]] * 3

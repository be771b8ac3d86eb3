"""Test the digits network: its weights, both pipelines against the unsharded program, and what counts as an example."""

import functools

import jax
import numpy as np
import pytest

import ipu_jax
from mnist_example import model
from mnist_example.data import synthetic_mnist
from mnist_example.flags import CLASSES
from mnist_example.model import init_params, make_pipeline

M, B = 3, 4
LAYOUTS = [
    ("basic", 1, "grouped"),
    ("basic", 2, "grouped"),
    ("basic", 2, "sequential"),
    ("basic", 3, "1f1b"),
    ("concurrent", 1, "grouped"),
    ("concurrent", 2, "grouped"),
    ("concurrent", 4, "grouped"),
    ("concurrent", 8, "grouped"),
]


@functools.cache
def pipeline_of(mode, ipus):
    return make_pipeline(mode, ipus=ipus, gradient_accumulation=M)


@pytest.fixture(scope="module")
def params():
    """Return few weights with biases that aren't zero, so that a bias left out or padded wrongly is noticed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "HIDDEN", 160)
        patch.setattr(model, "FEATURES", 80)
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


# weights


def test_weights_have_the_networks_shapes_and_scales_and_follow_the_seed(monkeypatch):
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


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ipus", "schedule"), LAYOUTS)
def test_loss_and_gradients_are_the_dense_and_the_unsharded_programs(mode, ipus, schedule, params, batch):
    pipeline = make_pipeline(mode, ipus=ipus, gradient_accumulation=M, schedule=schedule)
    sharded = pipeline.shard(params)
    loss, aux = pipeline.loss(sharded, batch)
    assert float(loss) == pytest.approx(dense_loss(params, batch), rel=1e-5)
    predictions = dense_logits(params, batch["images"]).argmax(-1).reshape(M, B)
    np.testing.assert_array_equal(aux["correct"], (predictions == batch["labels"]).sum(-1))
    assert len(ipu_jax.verify(pipeline, sharded, batch).gradient_errors) == 6


@pytest.mark.fast("mean")
@pytest.mark.parametrize(("reduction", "scale"), [("sum", 1.0), ("mean", 1 / M)], ids=["sum", "mean"])
def test_gradients_are_summed_or_averaged_over_the_accumulation(reduction, scale, params, batch):
    pipeline = make_pipeline("concurrent", gradient_accumulation=M, reduction=reduction)
    _, gradients = pipeline.value_and_grad(pipeline.shard(params), batch)
    found = pipeline.unshard(gradients)["classifier"]["b"]
    logits, labels = dense_logits(params, batch["images"]), batch["labels"].reshape(-1)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = scale * (probabilities - np.eye(CLASSES)[labels]).sum(0) / B
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_an_ipu_holds_its_own_classes_only(params):
    pipeline = pipeline_of("concurrent", 4)
    bias, weight = pipeline.shard(params).concurrent["classifier"]
    for ipu, (b, w) in enumerate(zip(bias.addressable_shards, weight.addressable_shards, strict=True)):
        assert (b.data.shape, w.data.shape) == ((3,), (80, 3))  # 10 classes are 3, 3, 3 and 1
        np.testing.assert_array_equal(b.data[: 10 - 3 * ipu], params["classifier"]["b"][3 * ipu : 3 * ipu + 3])
    assert not bias.addressable_shards[3].data[1:].any()


def test_a_class_that_pads_a_shard_is_never_predicted(params, batch):
    """All logits of the 10 classes are negative, and those of the 2 that fill up the fourth shard are 0."""
    classifier = params["classifier"]
    low = {**params, "classifier": {**classifier, "b": classifier["b"] - 50}}
    predictions = dense_logits(low, batch["images"]).argmax(-1).reshape(M, B)
    pipeline = pipeline_of("concurrent", 4)
    _, aux = pipeline.loss(pipeline.shard(low), {**batch, "labels": np.int32(predictions)})
    np.testing.assert_array_equal(aux["correct"], [B] * M)


# what an example is


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ipus"), [("basic", 2), ("concurrent", 4)])
def test_what_has_no_label_counts_for_nothing(mode, ipus, params, batch):
    labels = batch["labels"].copy()
    labels[0], labels[1, :2], labels[2, 0] = -1, (10, 127), 11  # 10 and 11 are columns of padding on 4 IPUs
    masked = {**batch, "labels": labels}
    pipeline = make_pipeline(mode, ipus=ipus, gradient_accumulation=M)
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


@pytest.mark.fast("concurrent-4")
@pytest.mark.parametrize(("mode", "ipus"), [("basic", 2), ("concurrent", 4), ("concurrent", 8)])
def test_of_equal_logits_the_first_counts(mode, ipus, params, batch):
    undecided = {**params, "classifier": jax.tree.map(np.zeros_like, params["classifier"])}
    # 3 and 9 are on different IPUs, 3 and 4 are on the same of 2 IPUs
    undecided["classifier"]["b"][[3, 4, 9]] = 1.0
    pipeline = pipeline_of(mode, ipus)
    labels = np.array([[3, 4, 9, 0], [3, 3, 3, 3], [9, 9, 4, 4]], np.int32)
    _, aux = pipeline.loss(pipeline.shard(undecided), {**batch, "labels": labels})
    np.testing.assert_array_equal(aux["correct"], [1, 4, 0])


def through_the_stages(params, micro_batch):
    """Return the features, the logits and the loss."""
    hidden, body, classifier, loss = make_pipeline("basic", gradient_accumulation=M).stages
    features = body.fn(params["features"], hidden.fn(params["hidden"], None, micro_batch), micro_batch)
    logits = classifier.fn(params["classifier"], features, micro_batch)
    return features, logits, loss.fn(None, logits, micro_batch)[0]


def test_images_may_be_bytes_or_floats(params, batch):
    loss = jax.jit(lambda mb: through_the_stages(params, mb)[2])
    floats = {"images": (batch["images"][0] / 255).astype(np.float32), "labels": batch["labels"][0].astype(np.int32)}
    of_bytes = loss(jax.tree.map(lambda leaf: leaf[0], batch))
    assert float(loss(floats)) == pytest.approx(float(of_bytes), rel=1e-6)


# dtypes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("images", ["uint8", "float32"])
def test_stages_compute_in_the_dtype_of_their_weights(dtype, images, params, batch):
    stored = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), params)
    micro_batch = {"images": batch["images"][0].astype(images), "labels": batch["labels"][0]}
    found = jax.eval_shape(through_the_stages, stored, micro_batch)
    assert [leaf.dtype for leaf in found] == [dtype, dtype, "float32"]


def test_in_basic_mode_the_layers_are_spread_over_three_ipus():
    places = lambda ipus: [stage.place for stage in make_pipeline("basic", ipus=ipus).stages]
    assert [places(1), places(2), places(3)] == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 2]]

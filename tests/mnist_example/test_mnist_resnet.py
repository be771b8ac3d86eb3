"""Test the ResNets: their size, and pipelined training against whole-model programs, with running averages.

The tests' networks are 4 channels wide. With micro-batches of so few images, batch norms are over so few values that
some variances are near zero, which magnifies rounding. The images here are large enough to avoid that.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_jax
from ipu_jax.steps import TrainStep
from mnist_example import data, resnet, training
from mnist_example.data import synthetic_mnist
from mnist_example.flags import Flags, parsed
from mnist_example.resnet import init_params, init_state, layers_of, make_pipeline

WIDTH = 4
SIDE = 64  # so that the last blocks get 2x2 pixels, and each of their batch norms gets 32 values
B = 8
# mode, IPUs and micro-batches: fewer and more of these than stages, in both modes
LAYOUTS = [("basic", 1, 2), ("basic", 2, 5), ("basic", 4, 2), ("concurrent", 2, 1), ("concurrent", 4, 5)]


def make_batch(m, b=B, side=SIDE):
    """Return random digits of other sizes than MNIST's."""
    keys = jax.random.split(jax.random.key(m))
    return {
        "images": jax.random.randint(keys[0], (m, b, side, side), 0, 256).astype(jnp.uint8),
        "labels": jax.random.randint(keys[1], (m, b), 0, 10),
    }


def pipeline_of(mode, batch, *, name="resnet18", width=WIDTH, **options):
    """Return a narrow network for the micro-batches of a batch."""
    return make_pipeline(name, mode, jax.tree.map(lambda leaf: leaf[0], batch), width=width, **options)


@pytest.fixture(scope="module")
def params():
    """Return weights with scales and biases that aren't 1 and 0, so that one left out or misplaced is noticed."""
    whole = init_params("resnet18", 0, width=WIDTH)
    random = np.random.default_rng(1)
    return jax.tree.map(lambda p: p if p.ndim > 1 else p + jnp.float32(0.2 * random.standard_normal(p.shape)), whole)


@pytest.fixture(scope="module")
def state():
    """Return running averages that aren't 0 and 1, for the same reason."""
    random = np.random.default_rng(2)
    fresh = init_state("resnet18", width=WIDTH)
    return jax.tree.map(lambda s: s + jnp.float32(0.5 * random.random(s.shape)), fresh)


# the independent program: one Flax module from He et al.'s table 1, which does not use the package


class Whole(nn.Module):
    """ResNet-18 of `WIDTH` channels as one module, from images (B, H, W) to logits (B, 10)."""

    @nn.compact
    def __call__(self, images, train):
        def conv(x, features, kernel, strides):
            pad = kernel // 2
            return nn.Conv(features, (kernel, kernel), strides, [(pad, pad)] * 2, use_bias=False)(x)

        def norm(x):
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)

        x = images[..., None] / 255.0
        x = nn.relu(norm(conv(x, WIDTH, 7, 2)))
        x = nn.max_pool(x, (3, 3), (2, 2), [(1, 1)] * 2)  # pyright: ignore[reportArgumentType] (Flax's mistake)
        for group in range(4):
            for place in range(2):
                features, strides = WIDTH * 2**group, 2 if group > 0 and place == 0 else 1
                y = nn.relu(norm(conv(x, features, 3, strides)))
                y = norm(conv(y, features, 3, 1))
                if strides == 2:
                    x = norm(conv(x, features, 1, strides))
                x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


def in_its_own_names(params, state):
    """Return the same weights and averages for `Whole`, whose modules are numbered in the order of their calls."""
    convs, norms, averages = [], [], []
    for layer in layers_of("resnet18"):
        for name in sorted(params[layer.name]):  # "conv0", "conv1", "shortcut"; the stem's "first"
            convs.append(params[layer.name][name]["conv"])
            norms.append(params[layer.name][name]["norm"])
            averages.append(state[layer.name]["batch_stats"][name]["norm"])
    numbered = lambda kind, values: {f"{kind}_{i}": value for i, value in enumerate(values)}
    head = {"Dense_0": {"kernel": params["classifier"]["w"], "bias": params["classifier"]["b"]}}
    return {**numbered("Conv", convs), **numbered("BatchNorm", norms), **head}, numbered("BatchNorm", averages)


@jax.jit
def whole_step(params, state, microbatch):
    """Return loss, gradients and new averages of one micro-batch."""

    def loss_of(params):
        logits, new = Whole().apply(
            {"params": params, "batch_stats": state}, microbatch["images"], True, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["labels"])
        return losses.mean(), new["batch_stats"]

    (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    return loss, gradients, state


def whole_update(params, state, batch):
    """Return mean loss, summed gradients and final averages of M micro-batches, with the names of `Whole`."""
    params, state = in_its_own_names(params, state)
    losses, sums = [], jax.tree.map(jnp.zeros_like, params)
    for i in range(len(batch["labels"])):
        loss, gradients, state = whole_step(params, state, jax.tree.map(lambda leaf, i=i: leaf[i], batch))
        losses.append(loss)
        sums = jax.tree.map(jnp.add, sums, gradients)
    return np.mean(losses), sums, state


def evaluated(params, state, images) -> Any:
    """Return the logits (N, 10) of evaluation, by `Whole`."""
    whole, averages = in_its_own_names(params, state)
    return Whole().apply({"params": whole, "batch_stats": averages}, images, False)


def assert_close(found, expected, rtol):
    """Compare each leaf, relative to its largest magnitude."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, f), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        f, e = np.asarray(f, np.float64), np.asarray(e, np.float64)
        assert np.abs(f - e).max() <= rtol * np.abs(e).max(), (jax.tree_util.keystr(path), np.abs(f - e).max())


# size


@pytest.mark.fast("18-11175370")
@pytest.mark.parametrize(
    # torchvision's counts, less 2 of 3 input channels under a 7x7 of 64, less 990 of 1000 classes
    ("depth", "count"),
    [(18, 11_689_512 - 2 * 49 * 64 - 990 * 513), (50, 25_557_032 - 2 * 49 * 64 - 990 * 2049)],
)
def test_the_networks_have_the_published_number_of_weights(depth, count):
    layers = layers_of(f"resnet{depth}")
    shapes = [jax.eval_shape(layer.init, jax.random.key(0))["params"] for layer in layers]
    classifier = (512 if depth == 18 else 2048) * 10 + 10
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) + classifier == count


def test_weights_start_as_he_and_lecun_say(monkeypatch):
    layers = layers_of("resnet18", width=16)
    monkeypatch.setattr(resnet, "layers_of", lambda name, width: (layers[0], layers[-1]))
    whole, other = (init_params("resnet18", seed) for seed in (3, 4))
    assert float(whole["block8"]["conv1"]["conv"]["kernel"].std()) == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.01)
    assert float(whole["classifier"]["w"].std()) == pytest.approx((1 / 128) ** 0.5, rel=0.05)
    for path, leaf in jax.tree.leaves_with_path(whole):
        if leaf.ndim == 1:
            assert (leaf == (1 if path[-1].key == "scale" else 0)).all()
    assert not np.array_equal(whole["stem"]["first"]["conv"]["kernel"], other["stem"]["first"]["conv"]["kernel"])


# the pipelines


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ipus", "m"), LAYOUTS)
def test_an_update_is_the_unsharded_programs(mode, ipus, m, params, state):
    """Compare loss, every gradient and every running average."""
    batch = make_batch(m)
    pipeline = pipeline_of(mode, batch, ipus=ipus, gradient_accumulation=m, reduction="sum")
    sharded, averages = pipeline.shard(params), pipeline.shard_state(state)
    report = ipu_jax.verify(pipeline, sharded, batch, state=averages, rtol=1e-4)
    assert len(report.gradient_errors) == len(jax.tree.leaves(params))
    (loss, aux), gradients, new = pipeline.value_and_grad(sharded, batch, state=averages)
    expected_loss, expected_gradients, expected_state = whole_update(params, state, batch)
    assert float(loss) == pytest.approx(expected_loss, rel=1e-5)
    assert aux["correct"].shape == (m,)
    found_gradients, found_state = in_its_own_names(pipeline.unshard(gradients), pipeline.unshard(new))
    assert_close(found_gradients, expected_gradients, rtol=1e-4)
    assert_close(found_state, expected_state, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "ipus"), [("basic", 2), ("concurrent", 4)])
def test_evaluation_reads_the_running_averages(mode, ipus, params, state):
    batch = make_batch(3)
    pipeline = pipeline_of(mode, batch, ipus=ipus, gradient_accumulation=3)
    evaluate = pipeline.forward(
        resnet.loss_of("resnet18", mode, training=False, width=WIDTH), jax.tree.map(lambda leaf: leaf[0], batch)
    )
    losses, aux = evaluate(pipeline.shard(params), batch, pipeline.shard_state(state))
    logits = evaluated(params, state, batch["images"].reshape(-1, SIDE, SIDE))
    labels = batch["labels"].reshape(-1)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    assert float(losses.mean()) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_array_equal(aux["correct"], (logits.argmax(-1) == labels).reshape(3, B).sum(-1))


@pytest.mark.slow
def test_averages_are_float32_in_lower_precision(params, state):
    of_step = pipeline_of("basic", make_batch(2), gradient_accumulation=2)
    step = ipu_jax.make_train_step(of_step, optax.sgd(1.0), ipu_jax.TrainOptions(precision="16.16"))
    placed, pipeline, batch = step.init(params, stages=state), step.model, make_batch(2)
    (loss, _), gradients, new = pipeline.value_and_grad(placed.params, batch, state=placed.stages)
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}
    exact, _, averages = whole_update(params, state, batch)
    assert 1e-6 < abs(float(loss) - exact) / exact < 0.05
    assert_close(in_its_own_names(params, pipeline.unshard(new))[1], averages, rtol=0.05)


# placing


@pytest.mark.parametrize("mode", ["basic", "concurrent"])
def test_whole_layers_are_placed_as_evenly_as_possible(mode):
    batch = make_batch(1)
    for ipus in (2, 8):
        pipeline = pipeline_of(mode, batch, ipus=ipus)
        places = [stage.place for stage in pipeline.stages]
        assert places == [*range(ipus)] + [None] * (mode == "concurrent")
    two = pipeline_of(mode, batch)
    assert "cut at places that the function marks" in str(two)
    assert two.function is not None
    work = two.function.cut.work_per_ipu
    assert max(work) < 0.6 * sum(work)


# the command


@pytest.fixture
def training_of(monkeypatch):
    """Return a function of flags that prepares the training of a ResNet-18 of 4 channels on few digits."""
    monkeypatch.setattr(data, "synthetic_mnist", lambda seed: synthetic_mnist(seed, 24, 10))
    monkeypatch.setattr(resnet, "WIDTH", WIDTH)
    for name in ("make_pipeline", "loss_of", "init_params", "init_state", "shapes_of"):
        monkeypatch.setattr(resnet, name, functools.partial(getattr(resnet, name), width=WIDTH))

    def prepare(flags):
        _, found = parsed("run-sharded-mnist", "", [*flags, "--model", "resnet18", "--synthetic-data"], Flags)
        return training.TrainingRun(found, found.modes[0], data.prepared(found, found.ipus))

    return prepare


def test_a_training_begins_with_fresh_averages(training_of, monkeypatch):
    prepared = training_of(["--pipeline-mode", "basic", "--batch-size", "4"])
    monkeypatch.setattr(resnet, "init_params", lambda name, seed: (name, seed))
    monkeypatch.setattr(TrainStep, "init", lambda self, params, *, stages: (params, stages))
    weights, stages = prepared.init()
    assert weights == ("resnet18", 0)
    assert_close(stages, init_state("resnet18", width=WIDTH), rtol=0)


@pytest.mark.slow
def test_the_command_trains_a_resnet_and_evaluation_changes_nothing(training_of, monkeypatch, capsys):
    flags = ["--pipeline-mode", "concurrent", "--ipus", "3", "--batch-size", "4"]
    looked = training_of(flags)
    with_looks = looked.run(None)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("concurrent ResNet-18 pipeline on 3 IPUs, grouped; synthetic data, seed 0")
    assert any("Test accuracy: " in line for line in others[-3:])  # a line on the speed may follow
    found, fresh = looked.step.whole(with_looks.state), init_state("resnet18", width=WIDTH)
    mean_of = lambda state: state["stem"]["batch_stats"]["first"]["norm"]["mean"]
    assert not np.array_equal(mean_of(fresh), mean_of(found["stages"]))
    # the accuracy is of all 10 images, whatever fills the last batch
    digits = synthetic_mnist(0, 24, 10)
    logits = evaluated(found["params"], found["stages"], digits.test_images)
    assert looked.accuracy(with_looks.state) == (logits.argmax(-1) == digits.test_labels).mean()
    monkeypatch.setattr(training.TrainingRun, "accuracy", lambda self, state: 0.0)
    plain = training_of(flags)
    jax.tree.map(np.testing.assert_array_equal, plain.step.whole(plain.run(None).state), found)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_compare_puts_both_modes_on_the_same_ipus(name):
    _, found = parsed("run-sharded-mnist", "", ["--compare", "--model", name, "--ipus", "3"], Flags)
    assert [(mode, found.ipus_of(mode)) for mode in found.modes] == [("concurrent", 3), ("basic", 3)]

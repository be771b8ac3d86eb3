"""Test that states and weights saved on one mesh, with or without a further axis, are the same bits on any other."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from ipu_jax import Checkpoints, TrainOptions, make_train_step
from ipu_jax.io import export_weights, import_weights
from support.resumed import as_if_trained, differing, plain
from support.tensor_split import SplitModel, mesh_of, updated_plainly
from support.trained import bits, compiled_quickly

_compiled_quickly = compiled_quickly()

# replicas, IPUs, and perhaps devices of an IPU. With two replicas, optimizer state and average are in chunks.
SHAPES = ((2, 2, 2), (1, 2, 4), (1, 4, 2), (2, 1, 4), (1, 1, 8), (2, 2))
ONE_GROUP = (1, 1, 8)  # on which concurrent stages are refused
MODELS = {
    "local": SplitModel(blocks=4, features=7, hidden=16, outputs=8),
    "concurrent": SplitModel(blocks=4, features=8, hidden=16, outputs=7, concurrent=True),
    "small": SplitModel(features=3, hidden=4, outputs=2, micro_batches=2),
}
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))
ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=4)


def named(shape):
    return "x".join(map(str, shape))


@functools.cache
def step_of(model: str, shape: tuple[int, ...], optimizer: Any = ADAMW) -> Any:
    options = TrainOptions(shard_optimizer=shape[0] > 1, ema_decay=0.9)
    return make_train_step(MODELS[model].pipeline(mesh_of(*shape)), optimizer, options)


def first_state(step: Any, model: str) -> Any:
    return step.init(MODELS[model].params(np.float32))


def restored(folder, step, model) -> Any:
    with Checkpoints(folder, step) as checkpoints:
        return checkpoints.restore(first_state(step, model), resume="must")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a state of random numbers from a mesh: its folder, and the whole state."""

    @functools.cache
    def save(model, shape, optimizer=ADAMW):
        folder, step = tmp_path_factory.mktemp("saved"), step_of(model, shape, optimizer)
        state = as_if_trained(step, first_state(step, model))
        with Checkpoints(folder, step) as checkpoints:
            checkpoints.save(state, now=True)
        return folder, plain(step, state)

    return save


def check_restored(saved, model, source, target, optimizer=ADAMW):
    """Restore on another mesh; assert that the whole state has the same bits, and each array its place. Return it."""
    folder, expected = saved(model, source, optimizer)
    step = step_of(model, target, optimizer)
    found = restored(folder, step, model)
    assert found.topology == ("same" if source == target else "other")
    assert not differing(plain(step, found.state), expected)
    first = first_state(step, model)
    for array, like in zip(jax.tree.leaves(found.state), jax.tree.leaves(first), strict=True):
        assert array.sharding.is_equivalent_to(like.sharding, array.ndim)
    # so is padding
    for array, like in zip(jax.tree.leaves(found.state), jax.tree.leaves(as_if_trained(step, first)), strict=True):
        np.testing.assert_array_equal(array, like)
    return step, found.state


def shapes_for(model: str) -> list[tuple[int, ...]]:
    shapes = [(1, 2, 2), (2, 1), (2, 2, 2)] if model == "small" else SHAPES
    return [shape for shape in shapes if (model, shape) != ("concurrent", ONE_GROUP)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "source"),
    [pytest.param(model, shape, id=f"{model}-{named(shape)}") for model in MODELS for shape in shapes_for(model)],
)
def test_a_state_is_the_same_on_every_mesh(saved, model, source):
    for target in shapes_for(model):
        check_restored(saved, model, source, target)


@pytest.mark.slow
def test_factors_of_matrices_are_the_same_on_every_mesh(saved):
    """adafactor keeps means of rows and columns, which are not split as their matrix is."""
    shapes = [shape for shape in SHAPES if shape[0] == 1]
    for source, target in itertools.product(shapes, shapes):
        check_restored(saved, "local", source, target, ADAFACTOR)


def goings_on():
    """Yield each mesh with the one before it."""
    for model in MODELS:
        for source, target in itertools.pairwise([*shapes_for(model), SHAPES[0]]):
            yield pytest.param(model, source, target, id=f"{model}-{named(source)}-{named(target)}")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "source", "target"), list(goings_on()))
def test_a_training_goes_on_as_by_plain_optax(saved, model, source, target):
    step, state = check_restored(saved, model, source, target)
    twin, whole = MODELS[model], step.whole(state)
    batches = twin.batches(2, np.float32)
    params, memory = whole["params"], whole["optimizer"]
    for number in range(2):
        batch = jax.tree.map(lambda leaf, i=number: leaf[i], batches)
        state, outputs = step(state, jax.tree.map(lambda leaf, i=number: leaf[i], twin.for_mesh(batches, step.mesh)))
        loss, params, memory = updated_plainly(twin, ADAMW, params, memory, batch)
        np.testing.assert_allclose(outputs.loss, loss, rtol=2e-6)
    for found, expected in zip(jax.tree.leaves(step.whole(state)["params"]), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


# weight files


@pytest.mark.fast("safetensors-concurrent")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_weight_files_are_the_same_for_every_mesh(tmp_path, model, suffix):
    files, placed = {}, {}
    whole = MODELS[model].params(np.float32)
    for shape in shapes_for(model):
        placed[shape] = MODELS[model].pipeline(mesh_of(*shape)).shard(whole)
        files[shape] = tmp_path / f"{named(shape)}.{suffix}"
        export_weights(files[shape], placed[shape])
    assert len({file.read_bytes() for file in files.values()}) == 1
    first = files[shapes_for(model)[0]]
    for shape in shapes_for(model):
        expected = placed[shape]
        for like in (expected, MODELS[model].pipeline(mesh_of(*shape)).shard_shapes(whole)):
            found = import_weights(first, like)
            assert bits(found) == bits(expected)
            for array, own in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert array.sharding.is_equivalent_to(own.sharding, array.ndim)


@pytest.mark.fast("local-(2, 2, 2)")
@pytest.mark.parametrize(
    ("model", "shape"), [("local", (2, 2, 2)), ("local", ONE_GROUP), ("concurrent", (2, 2, 2))], ids=str
)
def test_an_average_in_chunks_is_exported_whole(tmp_path, model, shape):
    step = step_of(model, shape)
    state = as_if_trained(step, first_state(step, model))
    whole = step.whole(state)
    export_weights(tmp_path / "w.safetensors", state, average=True)
    found = import_weights(tmp_path / "w.safetensors", jax.tree.map(np.asarray, whole["ema"]))
    assert bits(found) == bits(whole["ema"])
    assert bits(whole["ema"]) != bits(whole["params"])


@pytest.mark.parametrize("model", MODELS)
def test_a_group_is_read_whole_from_split_weights(model):
    whole = MODELS[model].params(np.float32)
    for shape in shapes_for(model):
        placed = MODELS[model].pipeline(mesh_of(*shape)).shard(whole)
        for group, leaves in whole.items():
            assert bits(placed[group]) == bits(leaves)
        assert sorted(placed) == sorted(whole)

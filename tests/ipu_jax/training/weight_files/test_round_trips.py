"""Test that weights come back from files with the same bits. More trees are in tests/random_programs, kind layouts."""

import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import TrainOptions, make_train_step
from ipu_jax.io import export_weights, import_weights
from ipu_jax.steps import replicate
from support.exported import random_bits, unlike_pipeline, unlike_weights
from support.trained import bits

FORMATS = ("safetensors", "npz")


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return tmp_path / f"weights.{request.param}"


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert bits(found) == bits(expected)


def test_ignored_leaves_are_not_written_and_come_from_another_file(tmp_path):
    whole = unlike_weights("float32")
    given = unlike_pipeline(4).shard(whole)
    parts = tmp_path / "second.npz", tmp_path / "others.safetensors"
    export_weights(parts[0], given, ignore=("first*", "table/*", "alone"))
    export_weights(parts[1], unlike_pipeline(2).shard(whole), ignore="second/*")
    with np.load(parts[0]) as file:
        assert {*file.files} == {"second/gain", "second/rest/counts", "second/rest/empty", "second/rest/on"}
    assert_same_bits(import_weights(parts, given), given)


def test_equal_weights_make_equal_files(tmp_path):
    for suffix in FORMATS:
        files = [tmp_path / f"{number}.{suffix}" for number in range(3)]
        for file, made in zip(files, [unlike_pipeline(2), unlike_pipeline(8), unlike_pipeline(2, 4)], strict=True):
            export_weights(file, made.shard(unlike_weights("bfloat16")))
        assert len({file.read_bytes() for file in files}) == 1
    with zipfile.ZipFile(tmp_path / "0.npz") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_of_replicas_come_back(path, dtype):
    made = replicate(lambda p, rows: jnp.mean(rows), replication_factor=4)
    for whole in ({"a": [random_bits(0, dtype, 3, 2), random_bits(1, dtype)], "b": None}, random_bits(2, dtype, 4)):
        placed = made.shard(whole)
        export_weights(path, placed)
        for like in (placed, made.shard_shapes(whole)):
            found = import_weights(path, like)
            assert_same_bits(found, whole)
            for array, own in zip(jax.tree.leaves(found), jax.tree.leaves(placed), strict=True):
                assert array.sharding.is_equivalent_to(own.sharding, array.ndim)


def test_a_functions_state_gives_its_average(path):
    step = make_train_step(
        lambda w, rows: jnp.mean((rows @ w) ** 2),
        optax.sgd(0.1),
        TrainOptions(replication_factor=2, ema_decay=0.5, shard_optimizer=True),
    )
    state, _ = step(step.init(jnp.ones(3)), jnp.ones((2, 1, 4, 3)))
    export_weights(path, state, average=True)
    assert_same_bits(import_weights(path, np.zeros(3, np.float32)), step.whole(state)["ema"])


def test_plain_trees_come_back_with_wide_and_odd_dtypes(path):
    kinds = ["float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64"]
    whole = {
        kind: random_bits(number, kind, 2, 3) for number, kind in enumerate([*kinds, "float8_e4m3fn", "float8_e5m2"])
    }
    whole |= {
        "big-endian": np.arange(3, dtype=">i4"),
        "columns first": np.asfortranarray(random_bits(20, "float32", 4, 3)),
    }
    whole["rows apart"] = random_bits(21, "float16", 6, 4)[::2, 1:3]
    export_weights(path, whole)
    assert_same_bits(import_weights(path, whole), whole)


def test_large_arrays_in_pieces_come_back(path):
    large = random_bits(0, "bfloat16", 3, 700, 1500)  # 6.3 MB
    whole = {
        "c": large,
        "turned": large.transpose(2, 0, 1),
        "turned otherwise": large.transpose(0, 2, 1),
        "flat": large.ravel()[::2],
    }
    export_weights(path, whole)
    assert_same_bits(import_weights(path, whole), whole)

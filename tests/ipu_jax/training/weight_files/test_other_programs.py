"""Test files of other programs: the safetensors library's own, NumPy's, and models as torch saves them.

torch is not needed: a `state_dict` is names and arrays, which the library's NumPy flavour writes to the same bytes.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from ipu_jax import Pipeline, Stage
from ipu_jax.io import Saved, export_weights, import_weights
from support.trained import bits

RNG = np.random.default_rng(0)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(RNG.normal(size=shape), dtype)


TENSORS = {
    "plain.weight": draw(3, 5),
    "half": draw(4, dtype=np.float16),
    "brain": draw(2, 3, dtype=ml_dtypes.bfloat16),
    "scalar": draw(),
    "empty": draw(0, 3),
    "ids": np.arange(7),
    "on": np.array([True, False, True]),
    "ünï/cødé": draw(2),
}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert bits(found) == bits(expected)


def test_the_librarys_files_are_read(tmp_path):
    path = tmp_path / "theirs.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt", "of": "somebody"})
    like = {f"leaf {number}": value for number, value in enumerate(TENSORS.values())}
    found = import_weights(path, like, mapping=dict(zip(like, TENSORS, strict=True)))
    assert_same(found, like)


def test_ours_are_read_by_the_library(tmp_path):
    path = tmp_path / "ours.safetensors"
    export_weights(path, TENSORS)
    assert_same(load_file(path), {name.replace("/", "~1"): value for name, value in TENSORS.items()})
    with safe_open(path, "numpy") as file:
        assert list(file.metadata()) == ["ipu_jax.crc32"]
        assert sorted(file.keys()) == sorted(name.replace("/", "~1") for name in TENSORS)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    for name, value in TENSORS.items():  # each begins at a multiple of the size of its elements
        assert header[name.replace("/", "~1")]["data_offsets"][0] % value.itemsize == 0


@pytest.mark.parametrize("tree", [{}, {"w": None}, np.ones(3, np.float32)], ids=["empty", "none", "one leaf"])
def test_trees_without_names_are_read_by_the_library(tmp_path, tree):
    path = tmp_path / "ours.safetensors"
    export_weights(path, tree)
    assert_same(load_file(path), {"": tree} if isinstance(tree, np.ndarray) else {})
    assert jax.tree.structure(import_weights(path, tree)) == jax.tree.structure(tree)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_numpys_files_are_read_and_ours_by_numpy(tmp_path, save):
    save(tmp_path / "theirs.npz", **TENSORS, fortran=np.asfortranarray(draw(3, 4)))
    with np.load(tmp_path / "theirs.npz") as file:
        fortran = file["fortran"]
    like = {f"leaf {number}": value for number, value in enumerate([*TENSORS.values(), fortran])}
    mapping = dict(zip(like, [*TENSORS, "fortran"], strict=True))
    assert_same(import_weights(tmp_path / "theirs.npz", like, mapping=mapping), like)

    export_weights(tmp_path / "ours.npz", TENSORS)
    with np.load(tmp_path / "ours.npz") as file:
        found = {name.replace("~1", "/"): file[name] for name in file.files}
    found["brain"] = found["brain"].view(ml_dtypes.bfloat16)
    assert_same(found, {name: TENSORS[name] for name in found})
    loaded: Any = jnp.load(tmp_path / "ours.npz")
    with loaded:
        assert loaded["plain.weight"].shape == (3, 5)


def test_a_model_in_several_files_is_read_by_their_paths_or_their_index(tmp_path):
    homes = {"half": "model-00001-of-00002.safetensors", "ids": "model-00002-of-00002.safetensors"}
    for name, home in homes.items():
        save_file({name: TENSORS[name]}, tmp_path / home)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 64}, "weight_map": homes}))
    np.savez(tmp_path / "more.npz", more=TENSORS["scalar"])
    like = {name: TENSORS[name] for name in homes}
    assert_same(import_weights(index, like), like)
    paths = [tmp_path / name for name in (*homes.values(), "more.npz")]
    assert_same(import_weights(paths, like | {"more": TENSORS["scalar"]}), like | {"more": TENSORS["scalar"]})


# models as torch saves them: Linear (out, in), Conv2d (out, in, rows, columns)


def conv_by_hand(d: dict[str, np.ndarray], images: np.ndarray) -> np.ndarray:
    """Return the outputs for images (N, C, H, W): convolutions without padding, ReLU, the mean, a Linear."""
    x = images
    for name in ("conv1", "conv2"):
        windows = np.lib.stride_tricks.sliding_window_view(x, d[f"{name}.weight"].shape[2:], axis=(2, 3))
        x = np.einsum("nchwij,ocij->nohw", windows, d[f"{name}.weight"]) + d[f"{name}.bias"][:, None, None]
        x = np.maximum(x, 0)
    return x.mean((2, 3)) @ d["fc.weight"].T + d["fc.bias"]


def conv(p, x, mb):
    x = mb["x"] if x is None else x
    y = lax.conv_general_dilated(x, p["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + p["b"])


def classify(p, x, mb):
    return x.mean((1, 2)) @ p["w"] + p["b"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_torch_conv_net_predicts_as_by_hand(tmp_path, dtype):
    state_dict = {
        "conv1.weight": draw(4, 3, 3, 2, dtype=dtype),
        "conv1.bias": draw(4, dtype=dtype),
        "conv2.weight": draw(5, 4, 2, 3, dtype=dtype),
        "conv2.bias": draw(5, dtype=dtype),
        "fc.weight": draw(6, 5, dtype=dtype),
        "fc.bias": draw(6, dtype=dtype),
    }
    save_file(state_dict, tmp_path / "torch.safetensors")
    stages = [Stage(conv, params=f"conv{k + 1}", ipu=k) for k in range(2)]
    stages.append(Stage(lambda p, x, mb: jnp.mean(classify(p, x, mb)), params="fc", ipu=1, predict=classify))
    pipeline = Pipeline(stages)
    whole = {name: {} for name in ("conv1", "conv2", "fc")}
    mapping = {}
    for saved, array in state_dict.items():
        group, leaf = saved.split(".")[0], {"weight": "w", "bias": "b"}[saved.split(".")[1]]
        order = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[array.ndim]
        whole[group][leaf] = jax.ShapeDtypeStruct([array.shape[d] for d in order], "float32")
        mapping[f"{group}/{leaf}"] = Saved(saved).transpose(*order)
    like = pipeline.shard_shapes(whole)
    params = import_weights(tmp_path / "torch.safetensors", like, mapping=mapping, cast=dtype == "float64")
    images = draw(2, 3, 3, 8, 7)
    found = pipeline.predict(params, {"x": images.transpose(0, 1, 3, 4, 2)})
    np.testing.assert_allclose(found, [conv_by_hand(state_dict, m) for m in images], rtol=2e-5, atol=2e-5)

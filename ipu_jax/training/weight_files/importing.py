"""Import whole weights: match saved arrays with leaves, then read and place them one after the other.

like       {"mlp": {"w": (784, 256), "b": (256,)}}          the leaves, their places and dtypes
file       fc.weight (256, 784), fc.bias (256,)
mapping    {"mlp/w": Saved("fc.weight").transpose(), "mlp/b": "fc.bias"}
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ipu_jax.training.update.state import TrainState
from ipu_jax.training.weight_files._fit import fit, holds, misfit
from ipu_jax.training.weight_files._npz import NpzFile
from ipu_jax.training.weight_files._placing import placed, wanted_leaves
from ipu_jax.training.weight_files._safetensors import SafetensorsFile
from ipu_jax.training.weight_files._tensors import BadFileError, TensorInfo, WeightSource, naming
from ipu_jax.training.weight_files.names import named_leaves
from ipu_jax.training.weight_files.saved import Saved, rounded

_INDEX = ".index.json"  # Hugging Face's suffix
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # an archive with entries, and an empty one


def import_weights(
    source: Any,
    like: Any,
    *,
    mapping: Mapping[str, Saved | str] | None = None,
    ignore: Iterable[str] = (),
    cast: bool = False,
) -> Any:
    """Read whole weights and place them like other weights: the inverse of `export_weights`, for any number of IPUs.

    Leaves are read and placed one after the other. From a safetensors file an instance takes only the rows that its own
    IPUs hold; from an npz file, the whole leaf. Nothing is communicated, and across several instances each reads the
    file. Files from `export_weights` contain a checksum of each leaf, to recognise damage.

    Args:
        source: the path of a safetensors or npz file, ours or another program's; several paths of files that share one
            model, or the path of their index, such as "model.safetensors.index.json"; or a pytree of arrays on the
            host, with names as in `export_weights`.
        like: the result, with other values: what `Pipeline.shard` or `shard_shapes` returns, or a pytree of arrays or
            `jax.ShapeDtypeStruct`. A leaf with a sharding is placed by it; any other leaf becomes a NumPy array.
        mapping: for leaves with another name or shape, the name of the array, or a `Saved` with the steps to make it.
        ignore: patterns of `fnmatch`, such as "*.num_batches_tracked", for arrays that no leaf needs.
        cast: whether numbers may be rounded to the leaf's dtype. Otherwise this dtype must hold all values of the
            array's dtype. Integers must not change, and finite numbers must stay finite.

    Returns:
        Weights with the structure, the dtypes and the placement of `like`.

    Raises:
        ValueError: names and shapes don't fit, reported in one message before any array is read; a number cannot be
            rounded; or a file is damaged.
        OSError: a file cannot be read.

    >>> import jax
    >>> linear = {"fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "fc.bias": np.ones(2, np.float32)}
    >>> like = {"w": jax.ShapeDtypeStruct((3, 2), "float32"), "b": jax.ShapeDtypeStruct((2,), "float32")}
    >>> mapping = {"w": Saved("fc.weight").transpose(), "b": "fc.bias"}
    >>> import_weights(linear, like, mapping=mapping)["w"].tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    if isinstance(like, TrainState):
        raise ValueError(
            "like is a TrainState, of which only the weights can be imported: give like=state.params, and go on with "
            "dataclasses.replace(state, params=...); its optimizer's state and average stay those of other weights"
        )
    wanted = wanted_leaves(like)
    with contextlib.ExitStack() as files:
        found = _opened(source, files)
        plans = fit(wanted, found, mapping, ignore, cast=cast)

        def read(name: str) -> np.ndarray:
            array = plans[name].array(found.read)
            made = TensorInfo(array.shape, array.dtype)
            for problem in misfit(name, wanted[name], plans[name], made, cast=cast):  # after `Saved.apply`
                raise ValueError(f"{found.label} does not fit `like`: {problem}")
            dtype = np.dtype(wanted[name].dtype)
            try:
                return array if holds(array.dtype, dtype) else rounded(array, dtype)
            except ValueError as error:
                raise ValueError(f"{found.label}, leaf {name!r}: {error}") from None

        return placed(like, read)


def _opened(source: Any, files: contextlib.ExitStack) -> WeightSource:
    if isinstance(source, str | os.PathLike):
        return _opened_file(source, files)
    is_paths = isinstance(source, list | tuple) and source and all(isinstance(s, str | os.PathLike) for s in source)
    if is_paths:
        return _Several([_opened_file(path, files) for path in source])
    return _Tree(source)


def _opened_file(path: str | os.PathLike[str], files: contextlib.ExitStack) -> WeightSource:
    label = os.fspath(path)
    if str(label).endswith(_INDEX):
        return _opened_index(str(label), files)
    file = files.enter_context(open(path, "rb"))  # noqa: SIM115 (the stack closes it)
    kind = NpzFile if file.read(4) in _ZIP else SafetensorsFile
    file.seek(0)
    return kind(file, str(label))


def _opened_index(path: str, files: contextlib.ExitStack) -> WeightSource:
    """Return the arrays of the files that an index names, {"weight_map": {array: file}}. All are in its folder."""
    with open(path, encoding="utf-8") as file, naming(path, ValueError, RecursionError):
        index = json.load(file)
        homes = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(homes, dict) or not homes or not all(isinstance(home, str) for home in homes.values()):
            raise ValueError('it has no "weight_map" from names of arrays to names of files')
        outside = sorted(home for home in homes.values() if os.path.basename(home) != home)
        if outside:
            raise ValueError(f"it names {outside[0]!r}, which is not a file beside it")
    names = sorted(set(homes.values()))
    of_file = {home: _opened_file(os.path.join(os.path.dirname(path), home), files) for home in names}
    for name, home in homes.items():
        if name not in of_file[home].tensors:
            raise BadFileError(f"{path} says that {name!r} is in {home}, which does not have it. Download both again")
    return _Several(list(of_file.values()))


class _Tree:
    """The arrays of a pytree on the host."""

    def __init__(self, tree: Any):
        self.label = "the tree"
        self._leaves = dict(named_leaves(tree))
        for name, leaf in self._leaves.items():
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(f"the source's leaf {name!r} is {leaf!r}, which is no array: give arrays, or a path")
        self.tensors = {n: TensorInfo(tuple(leaf.shape), np.dtype(leaf.dtype)) for n, leaf in self._leaves.items()}

    def read(self, name: str) -> np.ndarray:
        return np.asarray(self._leaves[name])


class _Several:
    """The arrays of several files that together contain one model."""

    def __init__(self, sources: list[WeightSource]):
        self.label = " with ".join(source.label for source in sources)
        self._home: dict[str, WeightSource] = {}
        for source in sources:
            for name in source.tensors:
                if name in self._home:
                    raise ValueError(f"{name!r} is in {self._home[name].label} and in {source.label}: give one of them")
                self._home[name] = source
        self.tensors = {name: source.tensors[name] for name, source in self._home.items()}

    def read(self, name: str) -> np.ndarray:
        return self._home[name].read(name)

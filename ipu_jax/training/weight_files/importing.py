"""Import whole weights: match saved arrays with leaves, then read and place them one after the other.

Each IPU gets its own rows, and no leaf is read whole without need.

like       {"mlp": {"w": (784, 256), "b": (256,)}}          the leaves, their places and dtypes
file       fc.weight (256, 784), fc.bias (256,)
mapping    {"mlp/w": Saved("fc.weight").transpose(), "mlp/b": "fc.bias"}
"""

import contextlib
import difflib
import functools
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from ipu_jax.base.annotations import Device, Params, Tree, Value
from ipu_jax.base.keys import is_key
from ipu_jax.base.opening import content, reading
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.layout.packing import Sharded, block_of
from ipu_jax.core.mesh.instances import Index, PiecedArray, device_blocks
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.weight_files._npz import NpzFile
from ipu_jax.training.weight_files._safetensors import SafetensorsFile
from ipu_jax.training.weight_files._tensors import (
    BadFileError,
    TensorInfo,
    WeightSource,
    named_leaves,
    names_in,
    naming,
    not_ignored,
    quoted,
)
from ipu_jax.training.weight_files.saved import Saved, rounded

_INDEX = ".index.json"  # Hugging Face's suffix
_MOST_INDEX = 1 << 30  # bytes
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # an archive with entries, and an empty one
_COMPARISONS = 10_000  # of names, to find the nearest one: with thousands of wrong names it would take minutes
_NAMED = 100  # problems that an error names

Read = Callable[[str], np.ndarray | PiecedArray]


def import_weights(
    source: Any,
    like: Params,
    *,
    mapping: Mapping[str, Saved | str] | None = None,
    ignore: Iterable[str] = (),
    cast: bool = False,
) -> Params:
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
    wanted = _wanted_leaves(like)
    with contextlib.ExitStack() as files:
        found = _opened(source, files)
        plans = fit(wanted, found, mapping, ignore, cast=cast)

        def read(name: str) -> np.ndarray | PiecedArray:
            array = plans[name].array(found.read)
            made = TensorInfo(array.shape, array.dtype)
            for problem in misfit(name, wanted[name], plans[name], made, cast=cast):  # after `Saved.apply`
                raise ValueError(f"{found.label} does not fit `like`: {problem}")
            dtype = np.dtype(wanted[name].dtype)
            try:
                return array if holds(array.dtype, dtype) else rounded(np.asarray(array), dtype)
            except ValueError as error:
                raise ValueError(f"{found.label}, leaf {name!r}: {error}") from None

        return _placed(like, read)


def _wanted_leaves(like: Params) -> dict[str, TensorInfo]:
    """Return the shape and dtype of each leaf of weights, by its name."""
    if isinstance(like, Sharded):
        return {name: TensorInfo(leaf.whole_shape, jnp.dtype(leaf.dtype)) for name, leaf in names_in(like.layout)}
    wanted = {}
    for name, leaf in named_leaves(like):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or is_key(leaf):
            raise ValueError(f"like has a leaf {name!r}, {leaf!r}, which is not an array: give arrays or shapes")
        wanted[name] = TensorInfo(tuple(leaf.shape), np.dtype(leaf.dtype))
    return wanted


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
    file = files.enter_context(reading(path, follow=True))
    kind = NpzFile if file.read(4) in _ZIP else SafetensorsFile
    file.seek(0)
    return kind(file, str(label))


def _opened_index(path: str, files: contextlib.ExitStack) -> WeightSource:
    """Return the arrays of the files that an index names, {"weight_map": {array: file}}. All are in its folder."""
    with naming(path, ValueError, RecursionError):
        index = json.loads(content(path, _MOST_INDEX, follow=True))
        homes = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(homes, dict) or not homes or not all(isinstance(home, str) for home in homes.values()):
            raise ValueError('it has no "weight_map" from names of arrays to names of files')
        outside = sorted(home for home in homes.values() if os.path.basename(home) != home)
        if outside:
            raise ValueError(f"it names {quoted(outside[0])}, which is not a file beside it")
        if indices := sorted(home for home in homes.values() if home.endswith(_INDEX)):
            raise ValueError(f"it names {quoted(indices[0])}, which is an index, too")
    names = sorted(set(homes.values()))
    of_file = {home: _opened_file(os.path.join(os.path.dirname(path), home), files) for home in names}
    for name, home in homes.items():
        if name not in of_file[home].tensors:
            raise BadFileError(f"{path} says that {quoted(name)} is in {home}, which does not have it. Get both again")
    return _Several(list(of_file.values()))


class _Tree:
    """The arrays of a pytree on the host."""

    def __init__(self, tree: Tree):
        self.label = "the tree"
        self._leaves = dict(named_leaves(tree))
        for name, leaf in self._leaves.items():
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(f"the source's leaf {name!r} is {leaf!r}, not an array: give arrays, or a path")
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
                    raise ValueError(
                        f"{quoted(name)} is in {self._home[name].label} and in {source.label}: give one of them"
                    )
                self._home[name] = source
        self.tensors = {name: source.tensors[name] for name, source in self._home.items()}

    def read(self, name: str) -> np.ndarray:
        return self._home[name].read(name)


def fit(
    wanted: Mapping[str, TensorInfo],
    source: WeightSource,
    mapping: Mapping[str, Saved | str] | None,
    ignore: Iterable[str],
    *,
    cast: bool,
) -> dict[str, Saved]:
    """Return, per leaf, how it is made from saved arrays.

    Args:
        wanted: per leaf, its shape and dtype.
        source: the saved arrays.
        mapping: per leaf, the name of its array or a `Saved`. Other leaves are made of the array of the same name.
        ignore: patterns of names of arrays that no leaf needs.
        cast: whether a leaf's dtype may hold fewer values than the array's dtype.

    Raises:
        ValueError: names each leaf without an array, array without a leaf, wrong shape and wrong dtype.
    """
    plans = {name: Saved(name) for name in wanted} | {
        name: saved if isinstance(saved, Saved) else Saved(saved) for name, saved in (mapping or {}).items()
    }
    used = {name for leaf in wanted for name in plans[leaf].names}
    unused = sorted(not_ignored(source.tensors.keys() - used, ignore))
    guess = _Guesses()
    problems = [
        f"mapping has {name!r}, not a leaf{guess.nearest(name, wanted)}" for name in plans.keys() - wanted.keys()
    ]
    for name, info in wanted.items():
        problems += _problems(name, info, plans[name], source, unused, guess, cast)
    missing = [leaf for leaf in wanted if not source.tensors.keys() >= set(plans[leaf].names)]
    problems += [
        f"unexpected: {quoted(name)} {source.tensors[name]}, which no leaf takes{guess.nearest(name, missing)}"
        for name in unused
    ]
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems[:_NAMED])
        lines += f"\n  and {len(problems) - _NAMED:,} more" if len(problems) > _NAMED else ""
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        raise ValueError(
            f"{source.label} does not fit `like`, {count}:{lines}\nSay mapping={{leaf: Saved(name)}} for other names "
            "or shapes, ignore=[pattern] for arrays that no leaf needs, cast=True to round"
        )
    return {name: plans[name] for name in wanted}


def holds(stored: np.dtype | str, wanted: np.dtype | str) -> bool:
    """Return whether the dtype `wanted` can hold every value of the dtype `stored`.

    >>> holds(np.dtype("float16"), np.dtype("float32")), holds(np.dtype("float32"), np.dtype("float16"))
    (True, False)
    """
    if isinstance(stored, str) or isinstance(wanted, str):
        return False
    return stored == wanted or np.can_cast(stored, wanted, "safe")


class _Guesses:
    """Finds the nearest name for each of the first wrong names."""

    def __init__(self):
        self._left = _COMPARISONS

    def nearest(self, name: str, names: Collection[str]) -> str:
        """Return ": did you mean ...?", or nothing."""
        self._left -= len(names)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.75) if self._left >= 0 else []
        return f": did you mean {quoted(near[0])}?" if near else ""


def _problems(
    name: str, info: TensorInfo, saved: Saved, source: WeightSource, unused: list[str], guess: _Guesses, cast: bool
) -> list[str]:
    absent = [part for part in saved.names if part not in source.tensors]
    if absent:
        whose = {part: f", for leaf {name!r}" for part in absent} | {name: ""}
        return [f"missing: {quoted(part)}{whose[part]}{guess.nearest(part, unused)}" for part in absent]
    unknown = [source.tensors[part] for part in saved.names if isinstance(source.tensors[part].dtype, str)]
    if unknown:
        origin = _origin(name, saved)
        return [f"dtype: leaf {name!r} is {info}, and the array {unknown[0]}{origin}, which has no meaning here"]
    try:
        made = saved.info(source.tensors)
    except ValueError as error:
        return [f"leaf {name!r} {info} is {saved}, which cannot be made: {error}"]
    return [] if made is None else misfit(name, info, saved, made, cast=cast)


def misfit(name: str, info: TensorInfo, saved: Saved, made: TensorInfo, *, cast: bool) -> list[str]:
    """Return, as texts, what is wrong with a leaf that would be made with the shape and dtype `made`."""
    origin, problems = _origin(name, saved), list[str]()
    if made.shape != info.shape:
        problems.append(f"shape: leaf {name!r} is {info}, and the array {made}{origin}{_hint(info.shape, made.shape)}")
    if not (cast or holds(made.dtype, info.dtype)):
        problems.append(
            f"dtype: leaf {name!r} is {info}, and the array {made}{origin}, which may lose digits: cast=True rounds"
        )
    return problems


def _origin(name: str, saved: Saved) -> str:
    return "" if saved.names == (name,) and repr(saved) == f"Saved({name!r})" else f", by {saved}"


def _hint(wanted: Sequence[int], made: Sequence[int]) -> str:
    orders = [(1, 0), (2, 3, 1, 0)]  # torch's Linear and Conv2d
    orders += itertools.permutations(range(3))
    for order in orders:
        if len(order) == len(made) and tuple(made[d] for d in order) == tuple(wanted):
            return f": .transpose({', '.join(map(str, order))}) would fit"
    return ""


def _placed(like: Params, read: Read) -> Params:
    """Return weights like these, with the values that `read` returns by name. Communicates only from host to device."""
    if isinstance(like, Sharded):
        name_of = {leaf: name for name, leaf in names_in(like.layout)}
        held = [[(name_of[leaf], leaf) for leaf in leaves] for leaves in like.layout.held_by_array]
        both = zip(like.arrays, held, strict=True)
        arrays = [_placed_array(tuple(array.shape), _sharding_of(array), leaves, read) for array, leaves in both]
        return Sharded(arrays, like.layout)
    leaves = [_placed_leaf(leaf, name, read) for name, leaf in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _placed_leaf(leaf: Value, name: str, read: Read) -> Value:
    shape, dtype, sharding = tuple(leaf.shape), np.dtype(leaf.dtype), getattr(leaf, "sharding", None)
    if sharding is not None:
        return _placed_array(shape, sharding, [(name, Leaf(name, shape, str(dtype)))], read)
    whole = np.empty(shape, dtype)
    whole[...] = read(name)
    return whole


def _sharding_of(array: Value) -> Sharding:
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        raise ValueError(
            f"like has {array!r}, which does not say where it is: give what pipeline.shard_shapes(...) returns"
        )
    return sharding


def _placed_array(
    shape: tuple[int, ...], sharding: Sharding, parts: Sequence[tuple[str, Leaf]], read: Read
) -> jax.Array:
    """Return an array of this shape that has these leaves, all of one dtype, and zeros where there is none."""
    names = {leaf: name for name, leaf in parts}
    of_all = functools.cache(lambda leaf: leaf.of_whole(read(names[leaf])))
    # a leaf of all IPUs is read once for all blocks; another one has a single block
    value_of = lambda leaf: of_all(leaf) if leaf.ipu is None else leaf.of_whole(read(names[leaf]))
    dtype = jnp.dtype(parts[0][1].dtype)

    def block(index: Index) -> np.ndarray:
        return np.array(block_of([leaf for _, leaf in parts], value_of, shape, index), dtype)

    return _on_devices(shape, sharding, block)


def _on_devices(shape: tuple[int, ...], sharding: Sharding, block: Callable[[Index], np.ndarray]) -> jax.Array:
    """Return an array of which each device gets its block. A block is read after the previous block has arrived."""
    arrays: dict[Device, jax.Array] = {}
    for index, devices in device_blocks(shape, sharding.addressable_devices_indices_map(shape)):
        rows = block(index)
        for number, device in enumerate(devices):
            # each device gets its own copy: an array on a CPU shares the memory of `rows`, and may be donated
            own = rows if number == len(devices) - 1 else rows.copy()
            arrays[device] = jax.block_until_ready(jax.device_put(own, device))
    ordered = [arrays[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, ordered)

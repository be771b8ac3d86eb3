"""Export whole weights: read leaf by leaf, write each leaf at once, and give the file its name at the end.

leaf 0   read on one instance -> written, dropped
leaf 1   read                 -> written, dropped
...
the temporary file reaches the disk, and gets the name of the old one
"""

import errno as errors
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from ipu_jax.base.replacing import replacing
from ipu_jax.core.instances import gathered
from ipu_jax.training.weight_files import _npz, _safetensors
from ipu_jax.training.weight_files._tensors import TensorInfo
from ipu_jax.training.weight_files._whole import whole_leaves

_FORMATS: dict[str, ModuleType] = {".safetensors": _safetensors, ".npz": _npz}


def export_weights(path: str | os.PathLike[str], weights: Any, *, average: bool = False) -> None:
    """Write whole, unsharded weights to a safetensors or npz file, leaf by leaf.

    A leaf's name is made of the keys that lead to it, "group/path/to/leaf"; "/" in a key becomes "~1", and "~" "~0". It
    has its whole shape, without padding, and its own dtype, bfloat16 included. A group that several stages name is
    written once. Frozen weights are also written.

    Only one leaf is whole at a time, on the host of one instance; from a slot, only the row of the leaf is read. Across
    several instances, all must call it, and the first instance writes. They communicate one psum per part that the
    first instance does not have, and finally one all-gather of a number: all return only when the file is there.

    The file is written under another name in the same folder. It replaces an older file when it has reached the disk.
    If anything fails, the older file stays.

    Args:
        path: its suffix, ".safetensors" or ".npz", selects the format.
        weights: what `Pipeline.shard`, `Pipeline.shard_state` or `Replicas.shard` returns, a `TrainState`, whose
            weights are exported, or any pytree of arrays. If each instance has its own arrays, the first one's count.
        average: whether to export the average of a `TrainState` in place of the trained weights, in float32 at least.

    Raises:
        ValueError: the suffix is neither of these, a leaf cannot be named or the format cannot hold it, an earlier call
            used up the buffers, or there is no average. Nothing has been written then.
        OSError: the file cannot be written. It is raised on all instances.

    >>> import jax.numpy as jnp, tempfile
    >>> from ipu_jax import Pipeline, Stage
    >>> stage = Stage(lambda p, x, mb: jnp.mean((mb @ p["w"] + p["b"]) ** 2), params="layer", ipu=0)
    >>> params = Pipeline([stage]).shard({"layer": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_weights(f"{folder}/weights.npz", params)
    ...     with np.load(f"{folder}/weights.npz") as file:
    ...         print({name: file[name].shape for name in file.files})
    {'layer/b': (2,), 'layer/w': (3, 2)}
    """
    file_format = _format_of(path)
    whole = whole_leaves(weights, average=average)
    infos = [(leaf.name, TensorInfo(leaf.shape, leaf.dtype)) for leaf in whole.leaves]
    for name, info in infos:
        file_format.check_writable(name, info)
    order = file_format.file_order(infos)
    arrays = whole.arrays([whole.leaves[i] for i in order])
    failure: Exception | None = None
    if whole.reads_here:
        failure = _written(file_format, path, [infos[i] for i in order], arrays)
    if whole.mesh is not None:
        for _ in arrays:  # others help send what the first instance reads; after a failure it discards the rest
            pass
        number = 0 if failure is None else getattr(failure, "errno", None) or errors.EIO
        code = int(gathered(whole.mesh, [number]).max())
        if code and failure is None:
            failure = OSError(code, f"{os.strerror(code)}: instance {whole.reader} could not write it", os.fspath(path))
    if failure is not None:
        raise failure


def _format_of(path: str | os.PathLike[str]) -> ModuleType:
    suffix = os.path.splitext(path)[1]
    if suffix not in _FORMATS:
        raise ValueError(f"path={os.fspath(path)!r} has the suffix {suffix!r}: give one of {', '.join(_FORMATS)}")
    return _FORMATS[suffix]


def _written(
    file_format: ModuleType, path: Any, infos: list[tuple[str, TensorInfo]], arrays: Iterator[np.ndarray | None]
) -> Exception | None:
    """Write the file, and return the error, if any: other instances must learn of it before it is raised."""
    try:
        with replacing(path) as file:
            file_format.write(file, infos, arrays)
    except Exception as error:
        return error
    return None

"""Export and import weights on all devices, of one process or of several, and measure how much memory is held.

`support.instances` makes the same calls in every process. The functions return plain arrays.
"""

import errno
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from ipu_jax import (
    ALL_IPUS,
    Pipeline,
    Stage,
    TrainOptions,
    export_weights,
    import_weights,
    make_mesh,
    make_train_step,
    replicate,
)
from ipu_jax.weight_files import _npz
from support.instances import Results

SPECS = {"table": {"rows": PartitionSpec("ipu"), "columns": PartitionSpec(None, "ipu"), "whole": PartitionSpec()}}


def unlike_weights(ipus: int) -> dict[str, Any]:
    """Return groups of different sizes for the IPUs, and a table for all; with -0.0 and NaNs of several payloads."""
    rng = np.random.default_rng(0)

    def bits(dtype: str, *shape: int) -> np.ndarray:
        kind = jnp.dtype(dtype)
        return rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)

    local = {
        f"ipu {k}": {
            "w": bits("float32", 3 + k, 5),
            "half": [bits("bfloat16", 4), bits("float16", k)],
            "counts": np.arange(k, 9, dtype=np.int8),
            "on": np.array([k % 2 == 0, True]),
        }
        for k in range(ipus)
    }
    table = {"rows": bits("bfloat16", 10, 3), "columns": bits("float32", 2, 7), "whole": bits("float32", 3)}
    return local | {"table": table}


def unlike_pipeline(ipus: int, replicas: int, *, reverse: bool = False) -> Pipeline:
    def stage(p: Any, x: Any, mb: Any) -> Any:
        return mb

    places = [ipus - 1 - k if reverse else k for k in range(ipus)]
    stages = [Stage(stage, params=f"ipu {k}", ipu=places[k]) for k in range(ipus)]
    frozen = {f"ipu {k}": {"w": False, "half": False, "counts": True, "on": True} for k in range(ipus)}
    tied = Stage(stage, params="table", ipu=ALL_IPUS)
    return Pipeline([tied, *stages, tied], mesh=make_mesh(replicas, ipus), specs=SPECS, frozen=frozen)


def written(folder: str, replicas: int, ipus: int) -> Results:
    """Write a pipeline's weights in both formats, read them back, and return their bytes on this instance's devices."""
    weights = unlike_weights(ipus)
    placed = unlike_pipeline(ipus, replicas).shard(weights)
    found: Results = {}
    for suffix in ("safetensors", "npz"):
        path = Path(folder, f"weights.{suffix}")
        export_weights(path, placed)
        found[f"{suffix} is there"] = np.array(path.exists())  # on every instance, as soon as the call returns
        for reverse in (False, True):
            pipeline = unlike_pipeline(ipus, replicas, reverse=reverse)
            expected, imported = pipeline.shard(weights), import_weights(path, pipeline.shard_shapes(weights))
            pairs = zip(jax.tree.leaves(imported), jax.tree.leaves(expected), strict=True)
            found[f"{suffix} {reverse} is the same"] = np.array([_same_shards(a, b) for a, b in pairs])
    return found


def trained_and_written(folder: str, replicas: int, shard_optimizer: bool) -> Results:
    """Write the weights of a training on two IPUs and their average, and the weights of replicas of a function."""
    stages = [Stage(lambda p, x, mb: jnp.tanh(mb @ p), params="a", ipu=0)]
    stages.append(Stage(lambda p, x, mb: jnp.mean((x @ p["w"] + p["b"]) ** 2), params="b", ipu=1))
    options = TrainOptions(ema_decay=0.5, shard_optimizer=shard_optimizer)
    pipeline = Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=2)
    step = make_train_step(pipeline, optax.sgd(0.5), options)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    state = step.init({"a": draw(5, 3), "b": {"w": draw(3, 4), "b": draw(4)}})
    state, _ = step(state, draw(*([] if replicas == 1 else [replicas]), 2, 4, 5))
    whole = step.whole(state)
    found: Results = {}
    for name, average in (("params", False), ("ema", True)):
        export_weights(Path(folder, f"{name}.npz"), state, average=average)
        found |= _same(f"{name} ", import_weights(Path(folder, f"{name}.npz"), _host(whole[name])), whole[name])
    made = replicate(lambda p, rows: jnp.mean(rows @ p["w"]), replication_factor=2 * replicas)
    tree = {"w": draw(3, 2), "none": None}
    export_weights(Path(folder, "function.safetensors"), made.shard(tree))
    return found | _same("function ", import_weights(Path(folder, "function.safetensors"), _host(tree)), tree)


def refused(folder: str, ipus: int) -> Results:
    """Return each instance's error when the first cannot write, and whether the instances can go on."""
    placed = unlike_pipeline(ipus, 1).shard(unlike_weights(ipus))
    no_folder = _error(Path(folder, "none", "weights.npz"), placed)
    write, written = _npz._write_array, []

    def full_in_the_middle(*args: Any) -> None:
        written.append(args)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    _npz._write_array = full_in_the_middle
    full = _error(Path(folder, "full.npz"), placed)
    _npz._write_array = write
    export_weights(Path(folder, "weights.npz"), placed)
    went_on = np.array(Path(folder, "weights.npz").exists())
    return {"no folder": np.array(no_folder), "full": np.array(full), "went on": went_on}


def _error(path: Path, weights: Any) -> str:
    try:
        export_weights(path, weights)
    except OSError as raised:
        return str(raised)
    return "nothing was raised"


def held(path: str, way: str, leaves: int, ipus: int = 4) -> Results:
    """Return the bytes of all leaves, of one leaf, and by how much the host's memory grew above what remains.

    Args:
        path: the path of the file.
        way: "export", "import", or "unshard", which makes all leaves whole and shows that the measurement notices them.
        leaves: how many leaves of 4 MB each there are.
        ipus: the number of IPUs; half of the leaves are local, and half are split over all IPUs.
    """
    shape = (1024, 1024)
    weights = {f"ipu {k}": [jax.ShapeDtypeStruct(shape, "float32")] * (leaves // 2 // ipus) for k in range(ipus)}
    weights["all"] = [jax.ShapeDtypeStruct(shape, "float32")] * (leaves // 2)
    stages = [Stage(lambda p, x, mb: mb, params=f"ipu {k}", ipu=k) for k in range(ipus)]
    stages.append(Stage(lambda p, x, mb: mb, params="all", ipu=ALL_IPUS))
    pipeline = Pipeline(stages, specs={"all": PartitionSpec(None, "ipu")})
    like = pipeline.shard_shapes(weights)
    fill = jax.jit(lambda: jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), like), out_shardings=_shardings(like))
    placed: Any = jax.block_until_ready(fill())
    export_weights(path, placed)
    if way == "import":
        placed = None
    _forget_peak()
    before = _status("VmRSS")
    if way == "export":
        export_weights(path, placed)
    elif way == "import":
        placed = import_weights(path, like)
    else:
        placed = (placed, pipeline.unshard(placed))
    remains = before if way == "unshard" else max(before, _status("VmRSS"))
    total = sum(np.prod(shape) * 4 for _ in range(leaves))
    return {
        "total": np.array(total),
        "leaf": np.array(np.prod(shape) * 4),
        "above": np.array(_status("VmHWM") - remains),
    }


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda shape: shape.sharding, tree)


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    """Return a figure of this process's memory in bytes; VmHWM is the largest VmRSS since `_forget_peak`."""
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def _same(name: str, found: Any, expected: Any) -> Results:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    return {
        f"{name}{jax.tree_util.keystr(path)} is the same": np.array(
            (f.dtype, f.shape, f.tobytes()) == (e.dtype, e.shape, np.asarray(e).tobytes())
        )
        for (path, f), e in pairs
    }


def _same_shards(found: jax.Array, expected: jax.Array) -> bool:
    """Return whether this process's devices hold the same bytes of two arrays."""
    shards = lambda array: {  # noqa: E731
        shard.device.id: (str(shard.index), np.asarray(shard.data).tobytes()) for shard in array.addressable_shards
    }
    return found.dtype == expected.dtype and found.shape == expected.shape and shards(found) == shards(expected)

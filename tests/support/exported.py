"""Export and import weights on all devices, of one process or of several, and measure how much memory is held.

`support.programs` makes the same calls in every process. The functions return plain arrays.
"""

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.io import export_weights, import_weights
from ipu_jax.steps import replicate
from ipu_jax.training.weight_files import _npz
from support import resumed
from support.programs import Results
from support.trained import bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    gain: object
    rest: object


def random_bits(seed: int, dtype: str, *shape: int) -> np.ndarray:
    """Return an array of random bits, with -0.0, infinities and NaNs of any payload among them."""
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    return rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)


def unlike_weights(dtype: str) -> dict:
    """Return groups with every kind of node, names to be escaped, scalars, empty arrays and unlike sizes."""
    draw = lambda seed, *shape: random_bits(seed, dtype, *shape)
    return {
        "first/half": {"a/b~c": [draw(0, 3, 4), None, (draw(1, 5),)], "scalar": draw(2), "1": {"": draw(3, 7)}},
        "second": Node(draw(4, 9, 2), {"empty": draw(5, 0, 3), "counts": np.arange(4), "on": np.array([True, False])}),
        "table": {"rows": draw(6, 10, 3), "columns": draw(7, 2, 5), "whole": draw(8, 3), "none": draw(9, 0, 4)},
        "alone": draw(10, 3, 3),
    }


SPECS = {"table": {"rows": P("ipu"), "columns": P(None, "ipu"), "whole": P(), "none": P()}}
FROZEN = {"second": Node(False, {"empty": False, "counts": True, "on": True})}


def unlike_pipeline(ipus: int, replicas: int = 1, *, reverse: bool = False) -> Pipeline:
    """Return a pipeline of these groups, in which two stages use the table."""
    places = [0, min(1, ipus - 1), ipus - 1]
    stages = [
        Stage(lambda p, x, mb: mb, params=name, ipu=ipu)
        for name, ipu in zip(("first/half", "second", "alone"), places[::-1] if reverse else places, strict=True)
    ]
    tied = Stage(lambda p, x, mb: x, params="table", ipu=ALL_IPUS)
    return Pipeline([tied, *stages, tied], mesh=make_mesh(replicas, ipus), specs=SPECS, frozen=FROZEN)


def written(folder: str, replicas: int, ipus: int) -> Results:
    """Write a pipeline's weights in both formats, read them back, and return their bytes on this instance's devices."""
    whole = unlike_weights("bfloat16")
    placed = unlike_pipeline(ipus, replicas).shard(whole)
    found: Results = {}
    for suffix in ("safetensors", "npz"):
        path = Path(folder, f"weights.{suffix}")
        export_weights(path, placed)
        found[f"{suffix} is there"] = np.array(path.exists())  # on every instance, as soon as the call returns
        for reverse in (False, True):
            made = unlike_pipeline(ipus, replicas, reverse=reverse)
            expected, imported = made.shard(whole), import_weights(path, made.shard_shapes(whole))
            pairs = zip(jax.tree.leaves(imported), jax.tree.leaves(expected), strict=True)
            found[f"{suffix} {reverse} is the same"] = np.array([_same_shards(a, b) for a, b in pairs])
    return found


def trained_and_written(folder: str, replicas: int, shard_optimizer: bool) -> Results:
    """Write the weights of a training run on two IPUs and their average, and the weights of replicas of a function."""
    step = resumed.step_for(resumed.Topology(replicas=replicas, shard_optimizer=shard_optimizer))
    state, _, _ = resumed.train(step, resumed.first_state(step), 1)
    whole = step.whole(state)
    found: Results = {}
    for name, average in (("params", False), ("ema", True)):
        export_weights(Path(folder, f"{name}.npz"), state, average=average)
        imported = import_weights(Path(folder, f"{name}.npz"), _host(whole[name]))
        found[f"{name} is the same"] = np.array(bits(imported) == bits(whole[name]))
    made = replicate(lambda p, rows: jnp.mean(rows @ p["w"]), replication_factor=2 * replicas)
    tree = {"w": random_bits(0, "float32", 3, 2), "none": None}
    export_weights(Path(folder, "function.safetensors"), made.shard(tree))
    imported = import_weights(Path(folder, "function.safetensors"), _host(tree))
    return found | {"function is the same": np.array(bits(imported) == bits(tree))}


def refused(folder: str, ipus: int) -> Results:
    """Return each instance's error when the first cannot write, and whether the instances can go on."""
    placed = unlike_pipeline(ipus).shard(unlike_weights("float32"))
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
    shapes = {f"ipu {k}": [jax.ShapeDtypeStruct(shape, "float32")] * (leaves // 2 // ipus) for k in range(ipus)}
    shapes["all"] = [jax.ShapeDtypeStruct(shape, "float32")] * (leaves // 2)
    stages = [Stage(lambda p, x, mb: mb, params=f"ipu {k}", ipu=k) for k in range(ipus)]
    stages.append(Stage(lambda p, x, mb: mb, params="all", ipu=ALL_IPUS))
    made = Pipeline(stages, specs={"all": P(None, "ipu")})
    like = made.shard_shapes(shapes)
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
        placed = (placed, made.unshard(placed))
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


def _same_shards(found: jax.Array, expected: jax.Array) -> bool:
    """Return whether this process's devices hold the same bytes of two arrays."""
    shards = lambda array: {
        shard.device.id: (str(shard.index), np.asarray(shard.data).tobytes()) for shard in array.addressable_shards
    }
    return found.dtype == expected.dtype and found.shape == expected.shape and shards(found) == shards(expected)

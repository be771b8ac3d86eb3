"""Exchange pytrees of numbers between the hosts of all instances: `popdist.all_reduce` and `popdist.broadcast`.

All leaves of a pytree are one exchange. Small payloads go over the board, which needs no device and compiles nothing.
Large payloads go through one all-gather or broadcast over the devices, after all instances have met at the board.
"""

from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ipu_jax.base.annotations import Dtype, Tree, Value
from ipu_jax.base.keys import is_key
from ipu_jax.distributed import board
from ipu_jax.distributed.processes import beacons

_SMALL: Final = 1 << 18


def all_reduce(tree: Tree, op: Literal["mean", "sum"], *, seconds: float) -> Tree:
    """Return the reduced tree: see `popdist.all_reduce`."""
    leaves, treedef = jax.tree.flatten(tree)
    if any(is_key(leaf) for leaf in leaves):
        raise ValueError("a leaf is a random key, which has no mean or sum: use popdist.broadcast")
    parts = _gathered(f"all_reduce({op})", treedef, [_on_host(leaf) for leaf in leaves], seconds=seconds)
    reduced = [_like(leaf, _reduced(of_leaf, op)) for leaf, *of_leaf in zip(leaves, *parts, strict=True)]
    return treedef.unflatten(reduced)


def broadcast(tree: Tree, root: int, *, seconds: float) -> Tree:
    """Return the tree of instance `root`: see `popdist.broadcast`."""
    leaves, treedef = jax.tree.flatten(tree)
    impls = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in leaves]
    arrays = [
        _on_host(leaf if impl is None else jax.random.key_data(leaf)) for leaf, impl in zip(leaves, impls, strict=True)
    ]
    (of_root,) = _gathered(f"broadcast(root={root})", (treedef, impls), arrays, seconds=seconds, root=root)
    values = [
        _like(leaf, value.copy()) if impl is None else jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
        for leaf, value, impl in zip(leaves, of_root, impls, strict=True)
    ]
    return treedef.unflatten(values)


def _gathered(
    what: str, kind: Any, arrays: list[np.ndarray], *, seconds: float, root: int | None = None
) -> list[list[np.ndarray]]:
    """Return the arrays of all instances, or of the root only. Alone, return the arrays themselves."""
    own, count = board.process()
    if count == 1:
        return [arrays]
    form = f"{kind} of {', '.join(f'{array.dtype}{list(array.shape)}' for array in arrays)}"
    joined, is_sent = b"".join(array.tobytes() for array in arrays), root in (None, own)
    is_small = len(joined) <= _SMALL
    found = board.gather(what, joined if is_small and is_sent else b"", seconds=seconds, form=form)
    if not is_small:
        flat = np.frombuffer(joined, np.uint8)
        with beacons.meeting(f"in {what}", seconds + board.MARGIN):
            if root is None:
                found = [row.tobytes() for row in np.asarray(multihost_utils.process_allgather(flat))]
            else:
                sent = multihost_utils.broadcast_one_to_all(flat, is_source=is_sent)
                found = [np.asarray(sent).tobytes()]
    elif root is not None:
        found = [found[root]]
    return [_split(part, arrays) for part in found]


def _on_host(leaf: Value) -> np.ndarray:
    array = np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
        raise ValueError(f"a leaf is {leaf!r}: give numbers and arrays of numbers")
    return array


def _split(joined: bytes, like: list[np.ndarray]) -> list[np.ndarray]:
    found, at = list[np.ndarray](), 0
    for array in like:
        found.append(np.frombuffer(joined[at : at + array.nbytes], array.dtype).reshape(array.shape))
        at += array.nbytes
    return found


def _reduced(parts: list[np.ndarray], op: str) -> np.ndarray:
    """Return the sum or mean, added in the order of the instances."""
    dtype = parts[0].dtype
    is_whole = dtype.kind == "b" or jnp.issubdtype(dtype, jnp.integer)  # int4 has another kind
    wide: Dtype = np.complex128 if dtype.kind == "c" else np.float64
    if is_whole and op == "sum":
        wide = np.uint64 if dtype.kind == "u" else np.int64
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    if op == "mean":
        total = total / len(parts)
        return total if is_whole else total.astype(dtype)
    return total if dtype.kind == "b" else total.astype(dtype)


def _like(leaf: Value, value: np.ndarray) -> Value:
    """Return the value as a Python number if the leaf is one."""
    return value.item() if isinstance(leaf, bool | int | float | complex) else value

"""Reduce and broadcast pytrees of numbers on the host, all leaves in one exchange of bytes."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ipu_jax.base.keys import is_key
from ipu_jax.distributed._exchange import gather


def all_reduce(tree: Any, op: Literal["mean", "sum"], *, seconds: float) -> Any:
    """Return the reduced tree: see `popdist.all_reduce`."""
    leaves, treedef = jax.tree.flatten(tree)
    if any(is_key(leaf) for leaf in leaves):
        raise ValueError("a leaf is a random key, which has no mean or sum: use popdist.broadcast")
    arrays = [_on_host(leaf) for leaf in leaves]
    parts = [
        _split(part, arrays)
        for part in gather(f"all_reduce({op})", _form(treedef, arrays), _joined(arrays), seconds=seconds)
    ]
    reduced = [_like(leaf, _reduced(of_leaf, op)) for leaf, *of_leaf in zip(leaves, *parts, strict=True)]
    return jax.tree.unflatten(treedef, reduced)


def broadcast(tree: Any, root: int, *, seconds: float) -> Any:
    """Return the tree of instance `root`: see `popdist.broadcast`."""
    leaves, treedef = jax.tree.flatten(tree)
    impls = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in leaves]
    arrays = [
        _on_host(leaf if impl is None else jax.random.key_data(leaf)) for leaf, impl in zip(leaves, impls, strict=True)
    ]
    form = f"{_form(treedef, arrays)} {impls}" if any(impls) else _form(treedef, arrays)
    (of_root,) = gather(f"broadcast(root={root})", form, _joined(arrays), seconds=seconds, root=root)
    values = [
        _like(leaf, value) if impl is None else jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
        for leaf, value, impl in zip(leaves, _split(of_root, arrays), impls, strict=True)
    ]
    return jax.tree.unflatten(treedef, values)


def _on_host(leaf: Any) -> npt.NDArray[Any]:
    array = np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
        raise ValueError(f"a leaf is {leaf!r}: give numbers and arrays of numbers")
    return array


def _form(treedef: Any, arrays: list[npt.NDArray[Any]]) -> str:
    return f"{treedef} of {', '.join(f'{array.dtype}{list(array.shape)}' for array in arrays)}"


def _joined(arrays: list[npt.NDArray[Any]]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _split(joined: bytes, like: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    found, at = list[npt.NDArray[Any]](), 0
    for array in like:
        found.append(np.frombuffer(joined[at : at + array.nbytes], array.dtype).reshape(array.shape).copy())
        at += array.nbytes
    return found


def _reduced(parts: list[npt.NDArray[Any]], op: str) -> npt.NDArray[Any]:
    """Return the sum or mean, added in the order of the instances."""
    dtype = parts[0].dtype
    is_whole = dtype.kind == "b" or jnp.issubdtype(dtype, jnp.integer)  # int4 has another kind
    wide: Any = np.complex128 if dtype.kind == "c" else np.float64
    if is_whole and op == "sum":
        wide = np.uint64 if dtype.kind == "u" else np.int64
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    if op == "mean":
        total = total / len(parts)
        return total if is_whole else total.astype(dtype)
    return total if dtype.kind == "b" else total.astype(dtype)


def _like(leaf: Any, value: npt.NDArray[Any]) -> Any:
    """Return the value as a Python number if the leaf is one."""
    return value.item() if isinstance(leaf, bool | int | float | complex) else value

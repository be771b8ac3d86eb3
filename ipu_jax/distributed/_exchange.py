"""Exchange bytes and pytrees of numbers between the hosts of all instances, with a timeout that names who is missing.

All leaves of a pytree are one exchange. Small payloads go through jax's coordination service, which needs no device and
compiles nothing. Large payloads go through one all-gather or broadcast over the devices, after the service has made
sure that all instances have arrived.

Every exchange has a number, and the instances must make the same exchanges in the same order.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the coordination service's client, which jax does not export
from jax.experimental import multihost_utils

from ipu_jax.base.annotations import Dtype, Tree, Value
from ipu_jax.base.keys import is_key
from ipu_jax.distributed.errors import InstancesDifferError, InstancesMissingError, named
from ipu_jax.distributed.processes import beacons

_SMALL: Final = 1 << 18
_MARGIN: Final = 10.0  # poprun waits a little longer, so that our error, which names the missing instances, comes first
_ROOM: Final = "ipu_jax/exchange"

_numbers = itertools.count()


def process() -> tuple[int, int]:
    """Return the number of this process and the number of processes, without starting jax's backend.

    Starting the backend waits two minutes for all processes, and its error does not name the missing ones.
    """
    state = distributed.global_state
    return (state.process_id, state.num_processes) if jax.distributed.is_initialized() else (0, 1)


def all_reduce(tree: Tree, op: Literal["mean", "sum"], *, seconds: float) -> Tree:
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


def broadcast(tree: Tree, root: int, *, seconds: float) -> Tree:
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


def gather(what: str, form: str, payload: bytes, *, seconds: float, root: int | None = None) -> list[bytes]:
    """Return the bytes of all instances, in order, or of one instance only. Every instance calls it.

    Communicates the bytes, once, from each instance, or from the root only, to all others.

    Args:
        what: the name of the exchange in errors, such as "all_reduce".
        form: a text that must be equal on all instances, such as shapes and dtypes. Equal forms mean equal sizes.
        payload: the bytes of this instance.
        seconds: how long to wait for the others.
        root: the instance whose bytes are returned; None for all.

    Raises:
        InstancesMissingError: some instances did not arrive in time.
        InstancesDifferError: the instances make different exchanges, or give different forms.
    """
    client, count = distributed.global_state.client, process()[1]
    if count == 1 or client is None:
        return [payload]
    with beacons.meeting(f"in {what}", seconds + _MARGIN):
        return _gathered(client, what, form, payload, seconds=seconds, root=root)


def _gathered(client: Any, what: str, form: str, payload: bytes, *, seconds: float, root: int | None) -> list[bytes]:
    own, count = process()
    number = next(_numbers)
    key = lambda exchange, instance: f"{_ROOM}/{exchange}/{instance}"  # noqa: E731
    is_small, is_sent = len(payload) <= _SMALL, root in (None, own)
    header = " ".join(f"{what} {form}".split()).encode() + b"\n"
    client.key_value_set_bytes(key(number, own), header + payload if is_small and is_sent else header)
    found, missing = collected(client, functools.partial(key, number), seconds)
    if missing:
        raise InstancesMissingError(
            f"{what}: {named(missing)} of {count} did not come within {seconds:g} s. All instances must call it, "
            "in the same order; allow more with timeout="
        )
    if number:  # an instance that makes this exchange has read all of the previous one
        client.key_value_delete(key(number - 1, own))
    headers, bodies = zip(*(text.split(b"\n", 1) for text in found), strict=True)
    if len(set(headers)) > 1:
        other = next(i for i, text in enumerate(headers) if text != headers[0])
        raise InstancesDifferError(
            f"instance 0 calls {headers[0].decode()}, instance {other} calls {headers[other].decode()}: "
            "all instances must make the same calls, with arrays of the same shapes and dtypes"
        )
    if is_small:
        return list(bodies) if root is None else [bodies[root]]
    own_bytes = np.frombuffer(payload, np.uint8)
    if root is None:
        return [row.tobytes() for row in np.asarray(multihost_utils.process_allgather(own_bytes))]
    return [np.asarray(multihost_utils.broadcast_one_to_all(own_bytes, is_source=own == root)).tobytes()]


def collected(client: Any, key_of: Callable[[int], str], seconds: float) -> tuple[list[bytes], list[int]]:
    """Return what each instance has written to the service at its key, and the instances that have not in `seconds`."""
    deadline, found, everyone = time.monotonic() + seconds, list[bytes](), range(process()[1])
    for instance in everyone:
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            found.append(client.blocking_key_value_get_bytes(key_of(instance), left))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return found, [i for i in everyone if not _is_there(client, key_of(i))] or [instance]
    return found, []


def _is_there(client: Any, key: str) -> bool:
    try:
        client.key_value_try_get_bytes(key)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _on_host(leaf: Value) -> np.ndarray:
    array = np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
        raise ValueError(f"a leaf is {leaf!r}: give numbers and arrays of numbers")
    return array


def _form(treedef: Any, arrays: list[np.ndarray]) -> str:
    return f"{treedef} of {', '.join(f'{array.dtype}{list(array.shape)}' for array in arrays)}"


def _joined(arrays: list[np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _split(joined: bytes, like: list[np.ndarray]) -> list[np.ndarray]:
    found, at = list[np.ndarray](), 0
    for array in like:
        found.append(np.frombuffer(joined[at : at + array.nbytes], array.dtype).reshape(array.shape).copy())
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

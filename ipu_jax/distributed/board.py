"""The board on which instances agree: each posts entries, and reads the entries of the others.

    instance 0   post("sealed") -- look("sealed") ................. [b"", b""]
    instance 1   ............................... post("sealed") --- look("sealed") --- [b"", b""]

The entries lie in jax's coordination service, which instance 0 keeps: it needs no device and compiles nothing. Every
call has a time limit, and its error names who is missing; this is instance 0 if the service does not answer. An
instance that is alone posts nothing and waits for nobody.

`gather` and `agree` are exchanges of the whole program: the instances make the same ones in the same order. So are
`all_reduce` and `broadcast` of pytrees of numbers on the hosts, whose leaves are one exchange. Large payloads go
through one all-gather or broadcast over the devices, after all instances have met at the board.
"""

import collections
import concurrent.futures
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the coordination service's client, which jax does not export
from jax.experimental import multihost_utils

from ipu_jax.base.annotations import Dtype, Json, Tree, Value
from ipu_jax.base.keys import is_key
from ipu_jax.distributed.errors import InstancesDifferError, InstancesMissingError, named
from ipu_jax.distributed.processes import record

MARGIN: Final = 10.0  # poprun waits a little longer, so that our error, which names the missing instances, comes first
_ANSWER_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.02
_ERA: Final = 8  # exchanges whose entries are removed together

_Text = Callable[[str], str]
_numbers = collections.defaultdict[str, "itertools.count[int]"](itertools.count)
_exchanges = itertools.count()


def process() -> tuple[int, int]:
    """Return the number of this process and the number of processes, without starting jax's backend.

    Starting the backend waits two minutes for all processes, and its error does not name the missing ones.
    """
    state = distributed.global_state
    return (state.process_id, state.num_processes) if jax.distributed.is_initialized() else (0, 1)


def on_a_daemon(work: Callable[[], Any], name: str) -> concurrent.futures.Future[Any]:
    """Start work on a new thread that does not keep the process alive, and return a future of its result."""
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


class Board:
    """Entries by place and instance. Every instance creates the boards of a name in the same order.

    The methods raise InstancesMissingError when time is up, and RuntimeError if instance 0 has gone. `missing` returns
    the text of the first error for words such as "instance 1 of 2".

    Args:
        name: the name of this board; boards of the same name are numbered.

    Attributes:
        own: the number of this instance.
        count: the number of instances. If it is 1, all methods return at once.
    """

    def __init__(self, name: str):
        self.own, self.count = process()
        self._client: Any = distributed.global_state.client if self.count > 1 else None
        self._room = f"ipu_jax/{name}/{next(_numbers[name])}"

    def post(self, place: str, entry: bytes = b"", *, seconds: float, missing: _Text | None = None) -> None:
        """Send this instance's entry at a place to instance 0. A second one raises RuntimeError."""
        self._within(seconds, lambda: self._client.key_value_set_bytes(self._key(place, self.own), entry), missing)

    def seen(self, place: str, *, seconds: float, missing: _Text | None = None) -> dict[int, bytes]:
        """Return the entries that are at a place now, by instance. Communicates them from instance 0."""
        found = self._within(seconds, lambda: self._client.key_value_dir_get_bytes(self._key(place)), missing)
        return {int(key.rpartition("/")[2]): entry for key, entry in found or ()}

    def look(
        self, place: str, *, seconds: float, missing: _Text, unless: Callable[[], None] | None = None
    ) -> list[bytes]:
        """Wait until all instances have posted at a place, and return their entries; alone, none.

        Communicates the entries from instance 0. While instances are missing, `unless` is called many times a second,
        and its error ends the wait.
        """
        deadline, entries = time.monotonic() + seconds, list[bytes]()
        left = lambda: max(0.001, deadline - time.monotonic())
        if self._client is None:
            return entries
        while unless and left() > 0.001:
            if len(self.seen(place, seconds=max(left(), _ANSWER_SECONDS), missing=missing)) == self.count:
                break
            unless()
            time.sleep(_POLL_SECONDS)
        try:
            for instance in range(self.count):
                key = self._key(place, instance)
                entries.append(self._client.blocking_key_value_get_bytes(key, int(1000 * left())))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            here = self.seen(place, seconds=_ANSWER_SECONDS, missing=missing)
            absent = sorted({*range(self.count)} - here.keys()) or [len(entries)]
            raise InstancesMissingError(missing(f"{named(absent)} of {self.count}")) from None
        return entries

    def clear(self, place: str, *, seconds: float) -> None:
        """Remove the entries of all instances at a place and below it."""
        self._within(seconds, lambda: self._client.key_value_delete(self._key(place)))

    def _key(self, place: str, instance: int | str = "") -> str:
        return f"{self._room}/{place}/{instance}"

    def _within(self, seconds: float, call: Callable[[], Any], missing: _Text | None = None) -> Any:
        """Return what a call of the client returns, which itself waits for ever if instance 0 is stopped."""
        if self._client is None:
            return None
        try:
            return on_a_daemon(call, "board").result(seconds)
        except TimeoutError:
            missing = missing or (lambda who: f"{who} did not answer within {seconds:g} s: look at what it does")
            raise InstancesMissingError(missing(f"instance 0 of {self.count}")) from None


_board = functools.cache(lambda: Board("exchange"))


def gather(
    what: str, payload: bytes, *, seconds: float, form: str = "", mend: str = "allow more with timeout="
) -> list[bytes]:
    """Return the bytes of all instances, in order. Every instance calls it.

    Communicates the bytes, which should be fewer than a megabyte, once from each instance to all others.

    Args:
        what, form: the name of the exchange, such as "all_reduce", and a text such as shapes. Both must be equal on all
            instances, and the errors give them.
        payload: the bytes of this instance.
        seconds: how long to wait for the others.
        mend: what else the caller can do if an instance is missing.

    Raises:
        InstancesMissingError: some instances did not arrive in time.
        InstancesDifferError: the instances make different exchanges, or give different forms.
    """
    if process()[1] == 1:
        return [payload]
    board, number, own = _board(), next(_exchanges), " ".join(f"{what} {form}".split()).encode()

    def missing(who: str) -> str:
        return f"{what}: {who} did not join within {seconds:g} s. All instances must call it, in the same order; {mend}"

    with record.meeting(f"in {what}", seconds + MARGIN):
        era, turn = divmod(number, _ERA)
        board.post(f"{era}/{turn}", own + b"\n" + payload, seconds=seconds, missing=missing)
        entries = [entry.split(b"\n", 1) for entry in board.look(f"{era}/{turn}", seconds=seconds, missing=missing)]
        if board.own == 0 and era and not turn:  # who makes this exchange has read all of the previous ones
            board.clear(f"{era - 1}", seconds=seconds)
        for instance, (header, _) in enumerate(entries):
            if header != entries[0][0]:
                raise InstancesDifferError(
                    f"instance 0 calls {entries[0][0].decode()}, instance {instance} calls {header.decode()}: "
                    "all instances must make the same calls, with arrays of the same shapes and dtypes"
                )
    return [body for _, body in entries]


def agree(what: str, value: Json, *, seconds: float) -> list[Json]:
    """Return the JSON values of all instances, in order: see `gather`. Alone, return the value itself."""
    if process()[1] == 1:
        return [value]
    return [json.loads(text) for text in gather(what, json.dumps(value).encode(), seconds=seconds)]


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
    own, count = process()
    if count == 1:
        return [arrays]
    form = f"{kind} of {', '.join(f'{array.dtype}{list(array.shape)}' for array in arrays)}"
    joined, is_sent = b"".join(array.tobytes() for array in arrays), root in (None, own)
    is_small = len(joined) <= _SMALL
    found = gather(what, joined if is_small and is_sent else b"", seconds=seconds, form=form)
    if not is_small:
        flat = np.frombuffer(joined, np.uint8)
        with record.meeting(f"in {what}", seconds + MARGIN):
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

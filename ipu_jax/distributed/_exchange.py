"""Exchange bytes between the hosts of all instances, with a timeout that names the missing instances.

Small payloads go through jax's coordination service, which needs no device and compiles nothing. Large payloads go
through one all-gather or broadcast over the devices, after the service has made sure that all instances have arrived.

Every exchange has a number, and the instances must make the same exchanges in the same order.
"""

import itertools
import time
from typing import Any, Final

import jax
import numpy as np
from jax._src import distributed  # the coordination service's client, which jax does not export
from jax.experimental import multihost_utils

from ipu_jax.distributed._fingerprint import named
from ipu_jax.distributed.errors import InstancesDifferError, InstancesMissingError
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
    deadline = time.monotonic() + seconds
    found: list[bytes] = []
    for instance in range(count):
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            found.append(client.blocking_key_value_get_bytes(key(number, instance), left))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            missing = [i for i in range(count) if not _is_there(client, key(number, i))] or [instance]
            raise InstancesMissingError(
                f"{what}: {named(missing)} of {count} did not come within {seconds:g} s. All instances must call it, "
                "in the same order; allow more with timeout="
            ) from None
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


def _is_there(client: Any, key: str) -> bool:
    try:
        client.key_value_try_get_bytes(key)
    except jax.errors.JaxRuntimeError:
        return False
    return True

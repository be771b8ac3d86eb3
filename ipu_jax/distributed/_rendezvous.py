"""Let the instances of a run meet before jax connects them, so that a run that cannot work is refused at once.

They compare their *fingerprints*: what all must have in common.

    instance 1 --- hello: its number, what it must share ---> instance 0, on the coordinator's port
    instance 2 --- hello ----------------------------------->
               <-- welcome, or who differs and in what ------
    then instance 0 frees the port, jax's coordination service takes it, and the others go on once it answers

A caller without the run's token is dropped without an answer, and none of its data is parsed (`_reception.py`).

jax itself waits five minutes for an instance that never arrives, and does not notice that one has different flags,
packages or numbers of instances. It crashes if the port is taken.

Nothing here imports jax.
"""

import contextlib
import errno
import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.distributed._reception import Reception, ask
from ipu_jax.distributed.environment import COORDINATOR, Place, text_of
from ipu_jax.distributed.errors import InstancesDifferError, InstancesMissingError, PortTakenError, named

_RETRY_SECONDS: Final = 0.05
_LEAVE_SECONDS: Final = 2.0
_SERVICE_SECONDS: Final = 5.0
_BACKLOG: Final = 128
# what decides the compiled program: it must be equal on all instances, or the order of its collectives differs
_PACKAGES: Final = ("ipu-jax", "jax", "jaxlib", "numpy", "optax", "flax", "equinox")
_VARIABLES: Final = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "JAX_THREEFRY_PARTITIONABLE",
    "XLA_FLAGS",
)
_ABSENT: Final = "none"
_LONGEST: Final = 200


def fingerprint(place: Place | None, *, flags: bool = True) -> dict[str, str]:
    """Return what this process must have in common with the other instances, as texts by name.

    Args:
        place: the place of this instance, if known.
        flags: whether to include the command line.
    """
    found = {"Python": platform.python_version()}
    if place is not None:
        found |= {
            "number of instances": str(place.instances),
            "number of replicas": str(place.replicas),
            "IPUs per replica": str(place.ipus_per_replica),
            "further axes": text_of(place.axes) or _ABSENT,
            "attempt": str(place.attempt),
        }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = _ABSENT
    found |= {name: os.environ.get(name, _ABSENT) for name in _VARIABLES}
    if flags:
        found["flags"] = " ".join(sys.argv[1:]) or _ABSENT
    return found


def difference(fingerprints: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return which instances differ from the others, and in what; None if all are equal.

    The most frequent value counts as right; in a tie, the value of the first instance.

    Args:
        fingerprints: the fingerprints by instance number.

    >>> alike, other = {"jax": "0.10.2", "flags": "--epochs 2"}, {"jax": "0.10.2", "flags": "--epochs 3"}
    >>> print(difference({0: alike, 1: alike, 2: other}))
    instance 2 has flags '--epochs 3', instances 0 and 1 have '--epochs 2'
    >>> difference({0: alike, 1: alike}) is None
    True
    """
    told: list[str] = []
    for name in sorted({name for one in fingerprints.values() for name in one}):
        having: dict[str, list[int]] = {}
        for instance, one in sorted(fingerprints.items()):
            having.setdefault(one.get(name, _ABSENT), []).append(instance)
        if len(having) > 1:
            usual = max(having, key=lambda text: (len(having[text]), -having[text][0]))
            others = [
                f"{named(having[text])} {_has(having[text])} {name} {_quoted(text)}" for text in having if text != usual
            ]
            told.append(f"{', '.join(others)}, {named(having[usual])} {_has(having[usual])} {_quoted(usual)}")
    return "; ".join(told) or None


def meet(place: Place, own: Mapping[str, str], *, seconds: float) -> None:
    """Wait until all instances have arrived, and compare what they must have in common. Every instance calls it.

    Communicates over TCP with instance 0.

    Args:
        place: the place of this instance.
        own: its fingerprint.
        seconds: how long to wait for all.

    Raises:
        InstancesDifferError: the instances differ. Each instance that has arrived raises it.
        InstancesMissingError: some instances did not arrive in time.
        PortTakenError: on instance 0, if another program uses the port.
        ValueError: the coordinator's address is malformed.
    """
    deadline = time.monotonic() + seconds
    if place.instance == 0:
        _receive(place, own, deadline, seconds)
    elif place.instances > 1:
        _greet(place, own, deadline, seconds)


def _receive(place: Place, own: Mapping[str, str], deadline: float, seconds: float) -> None:
    come: dict[int, Mapping[str, str]] = {0: own}
    with Reception(_listening(place), place.token) as reception:
        while len(come) < place.instances:
            try:
                hello = reception.next(deadline)
            except TimeoutError:
                missing = sorted(set(range(place.instances)) - come.keys())
                problem = f"{named(missing)} of {place.instances} did not come within {seconds:g} s: see their output"
                reception.answer({"missing": problem})
                raise InstancesMissingError(problem) from None
            number, theirs = _read(hello)
            if number is None:
                continue
            problem = difference({**come, number: theirs}) if number not in come else None
            if problem is None and not 0 < number < place.instances:
                problem = f"an instance says that it is number {number} of {place.instances}: give each its own number"
            elif problem is None and number in come:
                problem = f"two instances say that they are number {number}: give each its own number"
            if problem is not None:
                reception.answer({"differ": problem})
                raise InstancesDifferError(f"{problem}. Start all with the same program, flags and packages")
            come[number] = theirs
        reception.close_the_door()
        reception.answer({"welcome": True})
        # The side that closes first keeps the port busy for a while: let the guests do so.
        reception.wait_for_leave(_LEAVE_SECONDS)


def _read(hello: Json) -> tuple[int | None, dict[str, str]]:
    """Return the number and the fingerprint in a hello; no number if it is not a hello."""
    match hello:
        case {"instance": int(number), "fingerprint": dict(theirs)} if not isinstance(number, bool):
            if all(isinstance(value, str) for value in theirs.values()):
                return number, theirs
    return None, {}


def _greet(place: Place, own: Mapping[str, str], deadline: float, seconds: float) -> None:
    address = _address(place.coordinator)
    hello = {"instance": place.instance, "fingerprint": dict(own)}
    while True:
        try:
            with socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic())) as host:
                answer = ask(host, place.token, hello, deadline + _LEAVE_SECONDS)
        except OSError:
            answer = None
        if isinstance(answer, dict):
            break
        if time.monotonic() > deadline:
            raise InstancesMissingError(
                f"instance 0 did not answer on {place.coordinator} within {seconds:g} s: see its output, and whether "
                "this host reaches that address"
            )
        time.sleep(_RETRY_SECONDS)
    if "welcome" in answer:
        _await_service(address)
    if "differ" in answer:
        raise InstancesDifferError(f"{answer['differ']}. Start all with the same program, flags and packages")
    if "missing" in answer:
        raise InstancesMissingError(answer["missing"])


def _await_service(address: tuple[str, int]) -> None:
    """Wait until jax's service listens. Its clients wait a second before they retry."""
    deadline = time.monotonic() + _SERVICE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=_SERVICE_SECONDS):
            return
        time.sleep(_RETRY_SECONDS / 5)


def _listening(place: Place) -> socket.socket:
    host, port = _address(place.bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(max(_BACKLOG, place.instances))
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTakenError(
            error.errno, f"port {port} on {host} is taken by another program: start anew, or give another {COORDINATOR}"
        ) from None
    return listener


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{COORDINATOR}={text!r} is not an address: give HOST:PORT, such as 127.0.0.1:40001")
    return host.strip("[]"), int(port)


def _has(numbers: Sequence[int]) -> str:
    return "have" if len(numbers) > 1 else "has"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "...")

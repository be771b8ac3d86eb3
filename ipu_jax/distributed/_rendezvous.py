"""Let the instances of a run meet before jax connects them, so that a run that cannot work is refused at once.

They compare their *fingerprints*: what all must have in common. jax itself waits five minutes for an instance that
never arrives, and does not notice that one has different flags, packages or numbers of instances. It crashes if the
port is taken.

    instance 1 --- hello: its number, what it must share ---> instance 0, on the coordinator's port
    instance 2 --- hello ----------------------------------->
               <-- welcome, or who differs and in what ------
    then instance 0 frees the port, jax's coordination service takes it, and the others go on once it answers

Anyone can reach the port, so a hello takes three steps, and only callers that know the run's token are heard:

    guest                                            host
      | -- nonce, proof of it ------------------------> |   wrong, late or too long: dropped without an answer
      | <- another nonce, proof of both --------------- |   so that a guest, too, knows to whom it speaks
      | -- proof of both and of the value, value -----> |   now it is read
      | <- the same, for the answer ------------------- |

A proof is an HMAC under the token, which itself is never sent. Nothing that a stranger sends is parsed. Connections are
served side by side. Their number, time and bytes are bounded, so silent ones block nobody. Without a token, anyone who
speaks this protocol is accepted.

Nothing here imports jax.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import hmac
import importlib.metadata
import json
import os
import platform
import queue
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Final

from ipu_jax.base.annotations import Json
from ipu_jax.distributed.environment import COORDINATOR, InstancePlace, text_of
from ipu_jax.distributed.errors import (
    ABSENT,
    InstancesDifferError,
    InstancesMissingError,
    PortTakenError,
    difference,
    named,
)

_NONCE: Final = 32
_PROOF: Final = 64
_GREETING: Final = _NONCE + _PROOF + 1
_GREETING_SECONDS: Final = 2.0
_MOST_STRANGERS: Final = 64
_MOST_BYTES: Final = 1 << 20
_ACCEPT_SECONDS: Final = 0.01
_RETRY_SECONDS: Final = 0.05
_LEAVE_SECONDS: Final = 2.0
_SERVICE_SECONDS: Final = 5.0
_BACKLOG: Final = 128
# what decides the compiled program: it must be equal on all instances, or the order of its collectives differs
_PACKAGES: Final = ("ipu-jax", "jax", "jaxlib", "numpy", "optax", "flax", "equinox")
_OPTIONS: Final = ("DEFAULT_MATMUL_PRECISION", "DEFAULT_PRNG_IMPL", "ENABLE_X64", "PLATFORMS", "THREEFRY_PARTITIONABLE")
_VARIABLES: Final = (*(f"JAX_{option}" for option in _OPTIONS), "XLA_FLAGS")


def fingerprint(place: InstancePlace | None, *, flags: bool = True) -> dict[str, str]:
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
            "further axes": text_of(place.axes) or ABSENT,
            "attempt": str(place.attempt),
        }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ABSENT
    found |= {name: os.environ.get(name, ABSENT) for name in _VARIABLES}
    if flags:
        text = " ".join(sys.argv[1:]) or ABSENT
        checksum = zlib.crc32(text.encode(errors="surrogateescape"))  # a line to the host holds a megabyte
        found["flags"] = text if len(text) < 100_000 else f"of {len(text):,} letters, checksum {checksum:08x}"
    return found


def meet(place: InstancePlace, own: Mapping[str, str], *, seconds: float) -> None:
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


def refusal(problem: str) -> InstancesDifferError:
    """Return the error of instances that differ."""
    return InstancesDifferError(f"{problem}. Start all with the same program, flags and packages")


def _receive(place: InstancePlace, own: Mapping[str, str], deadline: float, seconds: float) -> None:
    come, answer = {0: own}, dict[str, Json]()
    reception = _Reception(_listening(place), place.token)
    try:
        while len(come) < place.instances:
            hello = reception.next(deadline)
            if hello is None:
                missing = sorted(set(range(place.instances)) - come.keys())
                problem = f"{named(missing)} of {place.instances} did not join within {seconds:g} s: see their output"
                answer = {"missing": problem}
                raise InstancesMissingError(problem)
            number, theirs = hello
            problem = difference({**come, number: theirs}) if number not in come else None
            if problem is None and not 0 < number < place.instances:
                problem = f"an instance says that it is number {number} of {place.instances}: give each its own number"
            elif problem is None and number in come:
                problem = f"two instances say that they are number {number}: give each its own number"
            if problem is not None:
                answer = {"differ": problem}
                raise refusal(problem)
            come[number] = theirs
        answer = {"welcome": True}
    finally:
        reception.close(answer)


def _greet(place: InstancePlace, own: Mapping[str, str], deadline: float, seconds: float) -> None:
    address = _address(place.coordinator)
    hello = {"instance": place.instance, "fingerprint": dict(own)}
    answer: Json = None
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic())) as host,
        ):
            answer = ask(host, place.token, hello, deadline + _LEAVE_SECONDS)
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
        raise refusal(answer["differ"])
    if "missing" in answer:
        raise InstancesMissingError(answer["missing"])


def _await_service(address: tuple[str, int]) -> None:
    """Wait until jax's service listens. Its clients wait a second before they retry."""
    deadline = time.monotonic() + _SERVICE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=_SERVICE_SECONDS):
            return
        time.sleep(_RETRY_SECONDS / 5)


def _listening(place: InstancePlace) -> socket.socket:
    host, port = _address(place.bind)
    family, backlog = socket.AF_INET6 if ":" in host else socket.AF_INET, max(_BACKLOG, place.instances)
    is_both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=is_both)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise PortTakenError(
            error.errno, f"port {port} on {host} is in use by another program: restart, or give another {COORDINATOR}"
        ) from None


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{COORDINATOR}={text!r} is not an address: give HOST:PORT, such as 127.0.0.1:40001")
    return host.strip("[]"), int(port)


# only callers that know the token


class NotOursError(OSError):
    """Raised if the other side does not know the token, or sends something unreadable."""


def ask(host: socket.socket, token: str, value: Json, deadline: float) -> Json:
    """Send a JSON value to a host if it knows the token, and return its answer.

    Raises:
        NotOursError: the other side does not know the token.
        OSError: the connection was lost, or there was no answer by the deadline.
    """
    nonce = _nonce()
    host.settimeout(_GREETING_SECONDS)
    host.sendall(nonce + _proof(token, b"guest", nonce) + b"\n")
    text = _line(host, _GREETING, min(deadline, time.monotonic() + _GREETING_SECONDS))
    nonces = nonce + text[:_NONCE]
    _check(text[_NONCE:-1], token, b"host", nonces)
    host.sendall(_sealed(token, b"guest", nonces, value))
    return _opened(token, b"host", nonces, _line(host, _MOST_BYTES, deadline))


@dataclasses.dataclass(eq=False)
class _Guest:
    """A connection to this host, a thread that serves it, and whether it has proved that it knows the token."""

    socket: socket.socket
    thread: threading.Thread = dataclasses.field(init=False)
    is_known: bool = False

    def dismiss(self) -> None:
        """End the conversation. The thread closes the connection."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class _Reception:
    """Hears all who call a listener, side by side."""

    def __init__(self, listener: socket.socket, token: str):
        self._listener, self._token = listener, token
        self._here, self._heard = list[_Guest](), list[_Guest]()
        self._said: queue.SimpleQueue[tuple[_Guest, Json]] = queue.SimpleQueue()
        self._answer: concurrent.futures.Future[Json] = concurrent.futures.Future()
        listener.settimeout(_ACCEPT_SECONDS)

    def next(self, deadline: float) -> tuple[int, dict[str, str]] | None:
        """Return the number and fingerprint of the next guest that knows the token; None after the deadline."""
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # nobody has come, or has gone already
                self._accept(_Guest(self._listener.accept()[0]))
            with contextlib.suppress(queue.Empty):
                guest, hello = self._said.get_nowait()
                self._heard.append(guest)
                match hello:
                    case {"instance": int(number), "fingerprint": dict(theirs)} if not isinstance(number, bool):
                        if all(isinstance(value, str) for value in theirs.values()):
                            return number, theirs
        return None

    def close(self, answer: Json) -> None:
        """Stop listening, answer the guests that were heard, if there is an answer, and dismiss all others."""
        self._listener.close()
        for guest in self._here:
            if not answer or guest not in self._heard:
                guest.dismiss()
        self._answer.set_result(answer)
        for guest in self._here:
            guest.thread.join()

    def _accept(self, guest: _Guest) -> None:
        self._here = [other for other in self._here if other.thread.is_alive()]
        strangers = [other for other in self._here if not other.is_known]
        for oldest in strangers[: max(0, len(strangers) + 1 - _MOST_STRANGERS)]:
            oldest.dismiss()  # an instance of ours would have spoken by now
        guest.thread = threading.Thread(target=self._serve, args=(guest,), daemon=True)
        guest.thread.start()
        self._here.append(guest)

    def _serve(self, guest: _Guest) -> None:
        with contextlib.suppress(OSError), guest.socket as other:
            text = _line(other, _GREETING, time.monotonic() + _GREETING_SECONDS)
            _check(text[_NONCE:-1], self._token, b"guest", text[:_NONCE])
            guest.is_known, own = True, _nonce()
            nonces = text[:_NONCE] + own
            other.sendall(own + _proof(self._token, b"host", nonces) + b"\n")
            text = _line(other, _MOST_BYTES, time.monotonic() + _GREETING_SECONDS)
            self._said.put((guest, _opened(self._token, b"guest", nonces, text)))
            answer = self._answer.result()
            other.settimeout(_LEAVE_SECONDS)
            other.sendall(_sealed(self._token, b"host", nonces, answer))  # an error if this guest was dismissed
            other.recv(1)  # the side that closes first keeps the port busy for a while: let the guest do so


def _nonce() -> bytes:
    return secrets.token_hex(_NONCE // 2).encode()


def _proof(token: str, *said: bytes) -> bytes:
    return hmac.new(token.encode(errors="surrogateescape"), b"".join(said), "sha256").hexdigest().encode()


def _check(theirs: bytes, token: str, *said: bytes) -> None:
    if not hmac.compare_digest(theirs, _proof(token, *said)):
        raise NotOursError("it does not know the token of this run")


def _sealed(token: str, who: bytes, nonces: bytes, value: Json) -> bytes:
    text = json.dumps(value).encode()
    return _proof(token, who, nonces, text) + text + b"\n"


def _opened(token: str, who: bytes, nonces: bytes, line: bytes) -> Json:
    text = line[_PROOF:-1]
    _check(line[:_PROOF], token, who, nonces, text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotOursError(f"what it says cannot be read: {error}") from None


def _line(other: socket.socket, most: int, deadline: float) -> bytes:
    """Return the next bytes up to the end of a line; fewer if the connection ends or the line is too long."""
    text = b""
    while not text.endswith(b"\n") and len(text) < most:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        other.settimeout(left)
        if not (piece := other.recv(most - len(text))):
            break
        text += piece
    return text

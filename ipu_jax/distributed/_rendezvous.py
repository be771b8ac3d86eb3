"""Let the instances of a run meet before jax connects them, so that a run that cannot work is refused at once.

They compare their *fingerprints*: what all must have in common. jax itself waits five minutes for an instance that
never arrives, does not notice that one has different flags or packages, and crashes if the port is taken.

    guest (instance 1 to N - 1)                      host (instance 0, on the coordinator's port)
      | -- a random text, proof --------------------> |   wrong, late or too long: dropped without an answer
      | <- another random text, proof --------------- |   so that a guest, too, knows to whom it speaks
      | -- its number and fingerprint, proof -------> |
      | <- welcome, or what is wrong, proof --------- |   the host frees the port, and jax's service takes it

Anyone can reach the port. A proof is an HMAC of the talk so far under the run's token, which itself is never sent, and
no line is parsed without one. Guests are served side by side. The number, time and bytes of strangers are bounded, so
silent ones block nobody. Without a token, anyone who speaks this protocol is accepted.

Nothing here imports jax.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import hmac
import importlib.metadata
import json
import os
import platform
import secrets
import socket
import sys
import threading
import zlib
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from typing import Any, Final

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

_PROOF: Final = 64  # letters
_GREETING_SECONDS: Final = 2.0
_MOST_STRANGERS: Final = 64
_MOST_BYTES: Final = 1 << 20
_RETRY_SECONDS: Final = 0.05
_LEAVE_SECONDS: Final = 2.0
_SERVICE_SECONDS: Final = 5.0
_BACKLOG: Final = 128
_BROKEN: Final = (OSError, EOFError, ValueError, RecursionError, asyncio.LimitOverrunError)  # talks that go no further
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
    side = _as_host if place.instance == 0 else _as_guest
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
    loop, result = runner.get_loop(), concurrent.futures.Future[None]()

    def run() -> None:
        try:
            with runner:
                runner.run(side(place, own, seconds))
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    # on a thread of its own: this one may run a loop already, as in a notebook
    threading.Thread(target=run, name="meeting of instances", daemon=True).start()
    try:
        result.result()
    finally:
        with contextlib.suppress(RuntimeError):  # it is closed, unless this thread was interrupted
            loop.call_soon_threadsafe(loop.stop)


def refusal(problem: str) -> InstancesDifferError:
    """Return the error of instances that differ."""
    return InstancesDifferError(f"{problem}. Start all with the same program, flags and packages")


@dataclasses.dataclass
class _Talk:
    """A talk with somebody who proves in each line that it knows the token, and that it has heard the same."""

    token: str
    reader: StreamReader
    writer: StreamWriter
    so_far: bytes = b""

    def say(self, value: Json) -> None:
        text = json.dumps(value).encode()
        self.writer.write(self._proof(text) + text + b"\n")
        self.so_far += text + b"\n"

    async def hear(self, seconds: float | None = None) -> Json:
        """Return what the other says within some seconds; raise an error of `_BROKEN` if it does not."""
        async with asyncio.timeout(seconds):
            line = await self.reader.readuntil()
        text = line[_PROOF:-1]
        if not hmac.compare_digest(line[:_PROOF], self._proof(text)):
            raise PermissionError("it does not know the token of this run")
        self.so_far += text + b"\n"
        return json.loads(text)

    def _proof(self, text: bytes) -> bytes:
        key = self.token.encode(errors="surrogateescape")
        return hmac.new(key, self.so_far + text, "sha256").hexdigest().encode()


async def _as_host(place: InstancePlace, own: Mapping[str, str], seconds: float) -> None:
    come, answer, hellos, is_over = {0: own}, dict[str, str](), asyncio.Queue[Json](), asyncio.Event()
    strangers, heard = dict[StreamWriter, None](), set[Any]()

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        strangers[writer] = None
        for oldest in [*strangers][:-_MOST_STRANGERS]:  # an instance of ours would have spoken by now
            oldest.transport.abort()
        # at the end this task is cancelled; Python 3.11 would log that
        with contextlib.suppress(*_BROKEN, asyncio.CancelledError), contextlib.closing(writer):
            talk = _Talk(place.token, reader, writer)
            try:
                await talk.hear(_GREETING_SECONDS)
            finally:
                del strangers[writer]
            talk.say(secrets.token_hex())
            hellos.put_nowait(await talk.hear(_GREETING_SECONDS))
            heard.add(asyncio.current_task())
            await is_over.wait()
            if answer:
                talk.say(answer)
                await talk.hear(_LEAVE_SECONDS)  # the side that closes first keeps the port busy: let the guest do so

    options: Any = {"backlog": max(_BACKLOG, place.instances), "limit": _MOST_BYTES}
    server = await asyncio.start_server(serve, sock=_listening(place), **options)
    try:
        async with asyncio.timeout(seconds):
            while len(come) < place.instances:
                match await hellos.get():
                    case {"instance": int(number), "fingerprint": dict(theirs)} if 0 < number < place.instances:
                        if not all(isinstance(value, str) for value in theirs.values()):
                            continue
                        twice = f"two instances say that they are number {number}: give each its own number"
                        if problem := twice if number in come else difference({**come, number: theirs}):
                            answer["differ"] = problem
                            raise refusal(problem)
                        come[number] = theirs
        answer["welcome"] = ""
    except TimeoutError:
        missing = named(sorted({*range(place.instances)} - come.keys()))
        answer["missing"] = f"{missing} of {place.instances} did not join within {seconds:g} s: see their output"
        raise InstancesMissingError(answer["missing"]) from None
    finally:
        server.close()
        is_over.set()
        await asyncio.sleep(0)  # who has just come is served, so that it can be dropped
        await asyncio.gather(*heard)


async def _as_guest(place: InstancePlace, own: Mapping[str, str], seconds: float) -> None:
    address, loop = _address(place.coordinator), asyncio.get_running_loop()
    hello, deadline = {"instance": place.instance, "fingerprint": dict(own)}, loop.time() + seconds
    answer: Json = None
    while not isinstance(answer, dict):
        if loop.time() > deadline:
            raise InstancesMissingError(
                f"instance 0 did not answer on {place.coordinator} within {seconds:g} s: see its output, and whether "
                "this host reaches that address"
            )
        try:
            async with asyncio.timeout_at(deadline + _LEAVE_SECONDS):
                answer = await ask(address, place.token, hello)
        except _BROKEN:
            await asyncio.sleep(_RETRY_SECONDS)
    if "differ" in answer:
        raise refusal(answer["differ"])
    if "missing" in answer:
        raise InstancesMissingError(answer["missing"])
    until = loop.time() + _SERVICE_SECONDS
    while loop.time() < until:  # jax's clients wait a second before they retry
        with contextlib.suppress(OSError):
            return (await asyncio.open_connection(*address))[1].close()
        await asyncio.sleep(_RETRY_SECONDS / 5)
    return None


async def ask(address: tuple[str, int], token: str, value: Json) -> Json:
    """Send a JSON value to a host if it knows the token, and return its answer; raise `_BROKEN` if the talk breaks."""
    reader, writer = await asyncio.open_connection(*address, limit=_MOST_BYTES)
    with contextlib.closing(writer):
        talk = _Talk(token, reader, writer)
        talk.say(secrets.token_hex())
        await talk.hear(_GREETING_SECONDS)
        talk.say(value)
        return await talk.hear()


def _listening(place: InstancePlace) -> socket.socket:
    host, port = _address(place.bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_both = family is socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=is_both)
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

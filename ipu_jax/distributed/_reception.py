"""Accept only callers that know the run's token, on a port that anyone can reach.

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

import collections
import contextlib
import dataclasses
import hmac
import json
import secrets
import selectors
import socket
import time
from typing import Final

from ipu_jax.base.annotations import Json

_NONCE: Final = 32
_PROOF: Final = 64
_GREETING: Final = _NONCE + _PROOF + 1
_GREETING_SECONDS: Final = 2.0
_MOST_STRANGERS: Final = 64
_MOST_BYTES: Final = 1 << 20
_AT_ONCE: Final = 1 << 16


class NotOursError(OSError):
    """Raised if the other side does not know the token, or sends something unreadable."""


@dataclasses.dataclass
class Guest:
    """A connection to this host.

    Attributes:
        socket: the socket of the connection.
        until: when it is dropped unless it has sent more, on the monotonic clock.
        nonces: the nonces of both sides; empty until the guest has proved that it knows the token.
    """

    socket: socket.socket
    until: float
    nonces: bytes = b""
    text: bytes = b""


class Reception:
    """Serves the connections to a listener until the listener is closed.

    Args:
        listener: a listening socket, which is closed with this object.
        token: the token of the run.
    """

    def __init__(self, listener: socket.socket, token: str):
        self._listener, self._token = listener, token
        self._selector = selectors.DefaultSelector()
        self._here: dict[socket.socket, Guest] = {}
        self._ready: collections.deque[tuple[Guest, Json]] = collections.deque()
        self._welcome: list[Guest] = []
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> "Reception":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_the_door()
        for guest in self._welcome:
            guest.socket.close()

    def next(self, deadline: float) -> Json:
        """Return the value sent by the next guest that knows the token.

        Raises:
            TimeoutError: no guest has come by the deadline, on the monotonic clock.
        """
        while not self._ready:
            now = time.monotonic()
            for guest in [guest for guest in self._here.values() if guest.until <= now]:
                self._drop(guest)
            if now >= deadline:
                raise TimeoutError
            wake = min([deadline, *(guest.until for guest in self._here.values())])
            for key, _ in self._selector.select(wake - now):
                if key.fileobj is self._listener:
                    self._accept()
                elif (guest := self._here.get(key.fileobj)) is not None:  # pyright: ignore[reportArgumentType]
                    self._read(guest)
        guest, value = self._ready.popleft()
        self._welcome.append(guest)
        return value

    def answer(self, value: Json) -> None:
        """Send a value to all guests whose values `next` has returned."""
        for guest in self._welcome:
            with contextlib.suppress(OSError):
                guest.socket.sendall(_sealed(self._token, b"host", guest.nonces, value))

    def close_the_door(self) -> None:
        """Stop listening, and close every connection except to the guests whose values `next` has returned."""
        for guest in [*self._here.values(), *(guest for guest, _ in self._ready)]:
            guest.socket.close()
        self._here.clear()
        self._ready.clear()
        self._selector.close()
        self._listener.close()

    def wait_for_leave(self, seconds: float) -> None:
        """Wait until all guests have closed their connections, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        for guest in self._welcome:
            with contextlib.suppress(OSError):
                guest.socket.settimeout(max(0.001, deadline - time.monotonic()))
                guest.socket.recv(1)

    def _accept(self) -> None:
        try:
            other, _ = self._listener.accept()
        except OSError:
            return  # it has gone already
        other.setblocking(False)
        strangers = [guest for guest in self._here.values() if not guest.nonces]
        if len(strangers) >= _MOST_STRANGERS:
            self._drop(strangers[0])  # the oldest: an instance of ours would have spoken by now
        self._here[other] = Guest(other, time.monotonic() + _GREETING_SECONDS)
        self._selector.register(other, selectors.EVENT_READ)

    def _drop(self, guest: Guest) -> None:
        self._forget(guest)
        guest.socket.close()

    def _forget(self, guest: Guest) -> None:
        del self._here[guest.socket]
        self._selector.unregister(guest.socket)

    def _read(self, guest: Guest) -> None:
        room = (_MOST_BYTES if guest.nonces else _GREETING) - len(guest.text)
        try:
            piece = guest.socket.recv(min(room, _AT_ONCE))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        guest.text += piece
        if not piece:
            self._drop(guest)
        elif not guest.nonces and len(guest.text) == _GREETING:
            self._greet(guest)
        elif guest.nonces and guest.text.endswith(b"\n"):
            self._take(guest)
        elif len(guest.text) >= _MOST_BYTES:
            self._drop(guest)

    def _greet(self, guest: Guest) -> None:
        nonce, theirs = guest.text[:_NONCE], guest.text[_NONCE:-1]
        if not hmac.compare_digest(theirs, _proof(self._token, b"guest", nonce)):
            self._drop(guest)
            return
        own = _nonce()
        guest.nonces, guest.text, guest.until = nonce + own, b"", time.monotonic() + _GREETING_SECONDS
        try:
            guest.socket.sendall(own + _proof(self._token, b"host", guest.nonces) + b"\n")
        except OSError:
            self._drop(guest)

    def _take(self, guest: Guest) -> None:
        try:
            value = _opened(self._token, b"guest", guest.nonces, guest.text)
        except NotOursError:
            self._drop(guest)
            return
        self._forget(guest)
        guest.socket.setblocking(True)
        guest.socket.settimeout(_GREETING_SECONDS)
        self._ready.append((guest, value))


def ask(host: socket.socket, token: str, value: Json, deadline: float) -> Json:
    """Send a value to a host that knows the token, and return its answer.

    Args:
        host: a connection to the host.
        token: the token of the run.
        value: a JSON value. It is sent only to a host that knows the token.
        deadline: the deadline of the answer, on the monotonic clock.

    Raises:
        NotOursError: the other side does not know the token.
        OSError: the connection was lost, or there was no answer in time.
    """
    nonce = _nonce()
    host.settimeout(_GREETING_SECONDS)
    host.sendall(nonce + _proof(token, b"guest", nonce) + b"\n")
    text = _line(host, _GREETING, min(deadline, time.monotonic() + _GREETING_SECONDS))
    nonces = nonce + text[:_NONCE]
    if not hmac.compare_digest(text[_NONCE:-1], _proof(token, b"host", nonces)):
        raise NotOursError("it does not know the token of this run")
    host.sendall(_sealed(token, b"guest", nonces, value))
    return _opened(token, b"host", nonces, _line(host, _MOST_BYTES, deadline))


def _nonce() -> bytes:
    return secrets.token_hex(_NONCE // 2).encode()


def _proof(token: str, *said: bytes) -> bytes:
    return hmac.new(token.encode(errors="surrogateescape"), b"".join(said), "sha256").hexdigest().encode()


def _sealed(token: str, who: bytes, nonces: bytes, value: Json) -> bytes:
    text = json.dumps(value).encode()
    return _proof(token, who, nonces, text) + text + b"\n"


def _opened(token: str, who: bytes, nonces: bytes, line: bytes) -> Json:
    theirs, text = line[:_PROOF], line[_PROOF:-1]
    if not hmac.compare_digest(theirs, _proof(token, who, nonces, text)):
        raise NotOursError("what it says has another token than this run")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotOursError(f"what it says cannot be read: {error}") from None


def _line(host: socket.socket, most: int, deadline: float) -> bytes:
    """Return the next bytes up to the end of a line; fewer if the connection ends or the line is too long."""
    text = b""
    while not text.endswith(b"\n") and len(text) < most:
        host.settimeout(max(0.001, deadline - time.monotonic()))
        piece = host.recv(most - len(text))
        if not piece:
            break
        text += piece
    return text

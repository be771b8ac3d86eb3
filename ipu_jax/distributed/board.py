"""The board on which instances agree: each posts entries, and reads the entries of the others.

    instance 0   post("sealed") -- look("sealed") ................. [b"", b""]
    instance 1   ............................... post("sealed") --- look("sealed") --- [b"", b""]

The entries lie in jax's coordination service, which instance 0 keeps: it needs no device and compiles nothing. Every
call has a time limit, and its error names who is missing; this is instance 0 if the service does not answer. An
instance that is alone posts nothing and waits for nobody.

`gather` and `agree` are exchanges of the whole program: the instances make the same ones in the same order.
"""

import collections
import concurrent.futures
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import jax
from jax._src import distributed  # the coordination service's client, which jax does not export

from ipu_jax.base.annotations import Json
from ipu_jax.distributed.errors import InstancesDifferError, InstancesMissingError, named
from ipu_jax.distributed.processes import beacons

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


@functools.cache
def _board() -> Board:
    return Board("exchange")


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

    with beacons.meeting(f"in {what}", seconds + MARGIN):
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

"""Test that instances meet before jax connects them, and that what cannot work is refused at once, by name."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import socket
import threading
import time

import pytest

from ipu_jax.distributed import _rendezvous
from ipu_jax.distributed._rendezvous import ask, fingerprint, meet
from ipu_jax.distributed.environment import InstancePlace
from ipu_jax.distributed.errors import InstancesDifferError, InstancesMissingError, PortTakenError, difference
from support.programs import free_port
from support.refusals import refused

ALIKE = {"jax": "0.10.2", "flags": "--epochs 2"}


SECRET = {"jax": "0.10.2", "flags": "--api-key SECRET"}
TOKEN = "0123456789abcdef" * 2


def place(instance: int, instances: int, port: int, token: str = "") -> InstancePlace:
    address = f"127.0.0.1:{port}"
    return InstancePlace(instance, instances, instance, instances, 1, address, address, token=token)


def met(places_and_prints, *, seconds: float = 10.0):
    """Return, per instance, None or the error that it raised."""
    found: list[BaseException | None] = [None] * len(places_and_prints)
    with contextlib.ExitStack() as service:

        def run(number: int) -> None:
            own, _ = places_and_prints[number]
            try:
                meet(*places_and_prints[number], seconds=seconds)
                if own.instance == 0 and own.instances > 1:  # as jax does
                    service.enter_context(socket.create_server(("127.0.0.1", int(own.bind.partition(":")[2]))))
            except BaseException as error:
                found[number] = error

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(places_and_prints))]
        for thread in reversed(threads):  # instance 0 last: the others must wait for it
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(30)
        return found


@pytest.mark.parametrize("instances", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_instances_that_are_alike_meet_and_free_the_port(instances):
    port = free_port()
    errors = met([(place(i, instances, port), ALIKE) for i in range(instances)])
    assert errors == [None] * instances
    with socket.socket() as next_one:
        next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        next_one.bind(("127.0.0.1", port))
        next_one.listen()


@pytest.mark.parametrize("letters", [7, 99_000, 2_000_000])
def test_a_command_line_of_any_length_is_compared(monkeypatch, letters):
    def flags(last):
        monkeypatch.setattr("sys.argv", ["train.py", "\udcff", "x" * letters, last])
        return fingerprint(None)

    alike, other = flags("a"), flags("b")
    assert len(json.dumps(alike)) < 1 << 18
    assert (difference({0: alike, 1: flags("a")}), difference({0: alike, 1: other}) is None) == (None, False)


def of_count(instances):
    return fingerprint(place(0, instances, 1), flags=False)


@pytest.mark.parametrize(
    ("numbers", "counts", "prints", "told"),
    [
        ([0, 1, 2], [3, 3, 3], [ALIKE, ALIKE | {"flags": "2"}, ALIKE], "instance 1 has flags '2', instance"),
        ([0, 1, 2], [3, 3, 3], [ALIKE, ALIKE | {"jax": "0.9"}, ALIKE], "instance 1 has jax '0.9', instance"),
        ([0, 1], [2, 3], [of_count(2), of_count(3)], "instance 1 has number of instances '3', instance 0 has '2'"),
        ([0, 1, 1], [3, 3, 3], [ALIKE] * 3, "two instances say that they are number 1: give each its own number"),
    ],
)
def test_an_instance_that_differs_is_named(numbers, counts, prints, told):
    port = free_port()
    places = [place(number, count, port) for number, count in zip(numbers, counts, strict=True)]
    errors = met(list(zip(places, prints, strict=True)), seconds=10)
    # instance 0 refuses when it sees the difference, and does not wait for instance 2, which may wait for nothing
    for error in errors[:2] if len(set(numbers)) == len(numbers) else errors[:1]:
        assert isinstance(error, InstancesDifferError)
        assert told in str(error)
        assert "number 1" in told or str(error).endswith(". Start all with the same program, flags and packages")


def test_instances_that_do_not_come_are_named_when_time_is_up():
    port = free_port()
    errors = met([(place(0, 4, port), ALIKE), (place(2, 4, port), ALIKE)], seconds=10)
    message = "instances 1 and 3 of 4 did not join within 10 s: see their output"
    assert [(type(error), str(error)) for error in errors] == [(InstancesMissingError, message)] * 2


def test_a_first_instance_that_does_not_come_is_named():
    port = free_port()
    errors = met([(place(1, 2, port), ALIKE)], seconds=0.5)
    assert isinstance(errors[0], InstancesMissingError)
    assert f"instance 0 did not answer on 127.0.0.1:{port} within 0.5 s" in str(errors[0])


def test_a_port_that_another_program_has_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        errors = met([(place(0, 2, port), ALIKE)])
    assert isinstance(errors[0], PortTakenError)
    assert f"port {port} on 127.0.0.1 is in use by another program" in str(errors[0])


def connected(port: int) -> socket.socket:
    """Return a connection to a port on which somebody is about to listen."""
    for _ in range(400):
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        time.sleep(0.01)
    raise AssertionError("nobody listens")


hello = lambda instance, fingerprint: json.dumps({"instance": instance, "fingerprint": fingerprint}).encode() + b"\n"
SAID = [
    b'{"instance": 1}\n',
    b'{"instance": "1"}\n',
    b"[]\n",
    hello(1, None),
    hello(1, {"flags": ["--epochs 2"]}),
    hello(1, {}),
    hello(1, SECRET),  # a copy
    b"[" * 200_000 + b"\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    bytes(range(256)) * 8192,
    b"0" * 96 + b"\n",
    b"",
]
NO_HELLOS = [None, [], {"instance": 1}, {"instance": 1, "fingerprint": None}, {"instance": 2, "fingerprint": {}}]
NO_HELLOS += [{"instance": "1", "fingerprint": {}}, {"instance": 1, "fingerprint": {"flags": ["--epochs 2"]}}]


def says_anything(port, said, silent):
    with connected(port) as own:
        with contextlib.suppress(OSError):  # it is dropped before it has said all
            own.sendall(said)
            own.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert own.recv(1000) == b""


def knows_another_token_or_none(port, token, silent):
    connected(port).close()
    with pytest.raises((EOFError, ConnectionError)):  # it is dropped
        asyncio.run(ask(("127.0.0.1", port), token, {"instance": 1, "fingerprint": {}}))


def says_a_greeting_again(port, text, silent):
    greeting = hmac.new(TOKEN.encode(), text, "sha256").hexdigest().encode() + text + b"\n"
    with connected(port) as own:
        own.sendall(greeting)  # as it was overheard
        assert len(own.recv(1000)) == 64 + 66 + 1
        own.sendall(b"0" * 64 + hello(1, {}))
        assert own.recv(1000) == b""


def says_no_hello_with_the_right_token(port, value, silent):
    connected(port).close()
    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(ask(("127.0.0.1", port), TOKEN, value), 0.2))


def is_silent(port, count, silent):
    for _ in range(count):
        silent.enter_context(connected(port))


@pytest.mark.parametrize(
    ("stranger", "with_what"),
    [
        *((says_anything, said) for said in SAID),
        *((knows_another_token_or_none, token) for token in ("", TOKEN[::-1])),
        (says_a_greeting_again, b'"0"'),
        *((says_no_hello_with_the_right_token, value) for value in NO_HELLOS),
        (is_silent, 200),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)[:30]),
)
def test_a_stranger_on_the_port_gets_no_answer_and_keeps_nobody_waiting(stranger, with_what, caplog):
    """Let two instances meet, the second after a stranger has called."""
    port, failed = free_port(), list[BaseException]()
    with contextlib.ExitStack() as service, contextlib.ExitStack() as silent:

        def first() -> None:
            try:
                meet(place(0, 2, port, TOKEN), SECRET, seconds=60)
                service.enter_context(socket.create_server(("127.0.0.1", port)))  # as jax does
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=first)
        thread.start()
        stranger(port, with_what, silent)
        meet(place(1, 2, port, TOKEN), SECRET, seconds=60)  # 200 that are silent would take 400 s one by one
        thread.join(60)
    assert failed == []
    assert [record.getMessage() for record in caplog.records] == []  # asyncio logs tasks that were cancelled


@pytest.mark.parametrize("answer", [b"", b'{"welcome": true}\n', b'{"differ": "you"}\n', b"0" * 96 + b"\n" + b"{}\n"])
def test_an_instance_tells_its_command_line_to_nobody_who_does_not_know_the_token(answer):
    heard: list[bytes] = []

    def listen(listener: socket.socket) -> None:
        while True:
            try:
                guest, _ = listener.accept()
            except OSError:
                return
            with guest, contextlib.suppress(OSError):
                guest.settimeout(5)
                guest.sendall(answer)
                while piece := guest.recv(1000):
                    heard.append(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=listen, args=(listener,), daemon=True).start()
        with pytest.raises(InstancesMissingError, match="instance 0 did not answer"):
            meet(place(1, 2, port, TOKEN), SECRET, seconds=0.5)
    assert heard
    assert b"SECRET" not in b"".join(heard)
    assert TOKEN.encode() not in b"".join(heard)


def test_an_instance_of_another_run_does_not_join_this_one():
    port = free_port()
    pairs = [(place(0, 2, port, TOKEN), SECRET), (place(1, 2, port, TOKEN), SECRET)]
    of_another = met([(place(1, 2, port, "other"), SECRET), *pairs], seconds=10)
    assert isinstance(of_another[0], InstancesMissingError)
    assert of_another[1:] == [None, None]


def test_instances_do_not_go_on_if_the_first_one_is_interrupted(monkeypatch):
    def interrupt(fingerprints):
        raise KeyboardInterrupt

    monkeypatch.setattr(_rendezvous, "difference", interrupt)
    port = free_port()
    errors = met([(place(number, 2, port, TOKEN), ALIKE) for number in range(2)], seconds=10)
    assert [type(error) for error in errors] == [KeyboardInterrupt, InstancesMissingError]


def test_an_address_without_a_port_is_refused():
    wrong = dataclasses.replace(place(1, 2, 1), coordinator="localhost")
    with refused("JAX_COORDINATOR_ADDRESS='localhost'", "not an address", "give HOST:PORT"):
        meet(wrong, ALIKE, seconds=1)


def test_what_most_have_is_taken_for_right():
    prints = {i: {"flags": "a" if i in (1, 2, 4) else "b"} for i in range(5)}
    assert difference(prints) == "instances 0 and 3 have flags 'b', instances 1, 2 and 4 have 'a'"
    assert difference({0: {"x": "1"}, 1: {}}) == "instance 1 has x 'none', instance 0 has '1'"


def test_the_command_line_may_differ_where_it_is_not_compared():
    assert "flags" in fingerprint(None)
    assert "flags" not in fingerprint(None, flags=False)

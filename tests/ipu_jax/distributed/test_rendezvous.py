"""Test that instances meet before jax connects them, and that what cannot work is refused at once, by name."""

import contextlib
import dataclasses
import re
import socket
import threading
import time

import pytest

from ipu_jax.distributed._fingerprint import difference, fingerprint
from ipu_jax.distributed._rendezvous import meet
from ipu_jax.distributed.environment import Place
from ipu_jax.distributed.errors import InstancesDifferError, InstancesMissingError, PortTakenError
from support.programs import free_port

ALIKE = {"jax": "0.10.2", "flags": "--epochs 2"}


def place(instance: int, instances: int, port: int) -> Place:
    address = f"127.0.0.1:{port}"
    return Place(instance, instances, instance, instances, 1, address, address)


def met(places_and_prints, *, seconds: float = 10.0):
    """Return, per instance, None or the error that it raised; and how long all of them took."""
    found: list[BaseException | None] = [None] * len(places_and_prints)

    def run(number: int) -> None:
        try:
            meet(*places_and_prints[number], seconds=seconds)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(places_and_prints))]
    start = time.monotonic()
    for thread in reversed(threads):  # instance 0 last: the others must wait for it
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    return found, time.monotonic() - start


@pytest.mark.parametrize("instances", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_instances_that_are_alike_meet_and_free_the_port(instances):
    port = free_port()
    errors, _ = met([(place(i, instances, port), ALIKE) for i in range(instances)])
    assert errors == [None] * instances
    with socket.socket() as next_one:
        next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        next_one.bind(("127.0.0.1", port))
        next_one.listen()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"flags": "--epochs 3"}, "instance 1 has flags '--epochs 3', instance"),
        ({"jax": "0.9"}, "instance 1 has jax '0.9', instance"),
    ],
)
def test_an_instance_with_other_flags_or_packages_is_named_on_all_instances_within_5_s(other, told):
    port = free_port()
    prints = [ALIKE, ALIKE | other, ALIKE]
    errors, seconds = met([(place(i, 3, port), prints[i]) for i in range(3)], seconds=2)
    # instance 0 refuses when it sees the difference, and does not wait for instance 2
    for error in errors[:2]:
        assert isinstance(error, InstancesDifferError)
        assert str(error).startswith(told)
        assert str(error).endswith(". Start all with the same program, flags and packages")
    assert seconds < 5


def test_an_instance_that_counts_other_instances_is_named():
    port = free_port()
    counts = [2, 3]
    pairs = [(place(i, counts[i], port), fingerprint(place(i, counts[i], port), flags=False)) for i in range(2)]
    errors, seconds = met(pairs)
    for error in errors:
        assert isinstance(error, InstancesDifferError)
        assert "instance 1 has number of instances '3', instance 0 has '2'" in str(error)
    assert seconds < 5


def test_two_instances_with_one_number_are_refused():
    port = free_port()
    pairs = [(place(0, 3, port), ALIKE), (place(1, 3, port), ALIKE), (place(1, 3, port), ALIKE)]
    errors, seconds = met(pairs)
    assert isinstance(errors[0], InstancesDifferError)
    assert "two instances say that they are number 1: give each its own number" in str(errors[0])
    assert seconds < 5


def test_instances_that_do_not_come_are_named_when_time_is_up():
    port = free_port()
    errors, seconds = met([(place(0, 4, port), ALIKE), (place(2, 4, port), ALIKE)], seconds=1)
    message = "instances 1 and 3 of 4 did not come within 1 s: see their output"
    assert [(type(error), str(error)) for error in errors] == [(InstancesMissingError, message)] * 2
    assert seconds < 5


def test_a_first_instance_that_does_not_come_is_named():
    port = free_port()
    errors, _ = met([(place(1, 2, port), ALIKE)], seconds=0.5)
    assert isinstance(errors[0], InstancesMissingError)
    assert f"instance 0 did not answer on 127.0.0.1:{port} within 0.5 s" in str(errors[0])


def test_a_port_that_another_program_has_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        errors, seconds = met([(place(0, 2, port), ALIKE)])
    assert isinstance(errors[0], PortTakenError)
    assert f"port {port} on 127.0.0.1 is taken by another program" in str(errors[0])
    assert seconds < 5


def test_a_stranger_on_the_port_is_not_an_instance():
    port = free_port()

    def intrude() -> None:
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"instance": "1"}\n'):
            for _ in range(100):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as own:
                    own.sendall(text)
                    break
                time.sleep(0.02)

    stranger = threading.Thread(target=intrude)
    stranger.start()
    errors, _ = met([(place(0, 1, port), ALIKE)])
    first = threading.Thread(target=meet, args=(place(0, 2, port), ALIKE), kwargs={"seconds": 20})
    first.start()
    stranger.join(30)
    meet(place(1, 2, port), ALIKE, seconds=20)
    first.join(30)
    assert errors == [None]
    assert not first.is_alive()


def test_an_address_without_a_port_is_refused():
    wrong = dataclasses.replace(place(1, 2, 1), coordinator="localhost")
    message = "JAX_COORDINATOR_ADDRESS='localhost' is not an address: give HOST:PORT, such as 127.0.0.1:40001"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        meet(wrong, ALIKE, seconds=1)


def test_what_most_have_is_taken_for_right():
    prints = {i: {"flags": "a" if i in (1, 2, 4) else "b"} for i in range(5)}
    assert difference(prints) == "instances 0 and 3 have flags 'b', instances 1, 2 and 4 have 'a'"
    assert difference({0: {"x": "1"}, 1: {}}) == "instance 1 has x 'none', instance 0 has '1'"


def test_the_command_line_may_differ_where_it_is_not_compared():
    assert "flags" in fingerprint(None)
    assert "flags" not in fingerprint(None, flags=False)

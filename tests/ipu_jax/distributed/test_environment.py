"""Test the environment by which a launcher gives an instance its place."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_jax.distributed.environment import InstancePlace, axes_of, place_of
from support.refusals import refusals, refused

ADDRESS = "127.0.0.1:40001"
TENSOR = {"tensor": 2}
TWO = InstancePlace(1, 2, 1, replicas=8, ipus_per_replica=2, coordinator=ADDRESS, bind=ADDRESS)


def test_the_variables_of_the_original_are_set():
    assert place_of({"PATH": "/bin"}) is None  # without a launcher
    variables = TWO.variables()
    assert {name: value for name, value in variables.items() if name.startswith("POPDIST_")} == {
        "POPDIST_NUM_TOTAL_REPLICAS": "8",
        "POPDIST_NUM_IPUS_PER_REPLICA": "2",
        "POPDIST_NUM_LOCAL_REPLICAS": "4",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        "POPDIST_REPLICA_INDEX_OFFSET": "4",
        "POPDIST_LOCAL_INSTANCE_INDEX": "1",
    }
    assert variables["JAX_NUM_CPU_DEVICES"] == "8"
    assert "IPU_JAX_AXES" not in variables
    assert variables["JAX_COORDINATOR_ADDRESS"] == variables["JAX_COORDINATOR_BIND_ADDRESS"] == ADDRESS


@given(
    local=st.integers(1, 4),
    instances=st.integers(1, 5),
    ipus=st.integers(1, 4),
    spans=st.booleans(),
    axes=st.dictionaries(st.sampled_from(["tensor", "context", "größe"]), st.integers(1, 4)),
    data=st.data(),
)
def test_a_place_is_read_as_it_was_written(local, instances, ipus, spans, axes, data):
    replicas, ipus = (local, ipus * instances) if spans else (local * instances, ipus)
    count = local * instances if spans else instances
    usual: Any = {"coordinator": ADDRESS, "bind": ADDRESS, "attempt": 2, "run_dir": Path("/a b"), "axes": axes}
    place = InstancePlace(data.draw(st.integers(0, count - 1)), count, 0, replicas, ipus, **usual)
    assert place_of(place.variables()) == place
    assert place.local_ipus * count == replicas * ipus
    assert place.local_devices == place.local_ipus * math.prod(axes.values())


@pytest.mark.parametrize(
    ("replicas", "instances", "ipus", "expected"),
    [
        # by hand: instances 0 and 1 have two IPUs of replica 0 each, 2 and 3 of replica 1
        (2, 4, 4, [(1, 0, 2), (1, 0, 2), (1, 1, 2), (1, 1, 2)]),
        (4, 2, 1, [(2, 0, 2), (2, 2, 2)]),
        (1, 3, 3, [(1, 0, 1), (1, 0, 1), (1, 0, 1)]),
    ],
)
def test_instances_have_their_replicas_in_order(replicas, instances, ipus, expected):
    places = [InstancePlace(i, instances, i, replicas, ipus, ADDRESS, ADDRESS) for i in range(instances)]
    assert [(place.local_replicas, place.first_replica, place.local_ipus) for place in places] == expected


def test_an_ipu_is_a_group_of_devices_with_further_axes():
    """By hand: instance 1 of 2 has the second replica, which is 2 IPUs of 2 x 3 devices."""
    place = InstancePlace(1, 2, 1, 2, 2, ADDRESS, ADDRESS, axes={"tensor": 2, "context": 3})
    variables = place.variables()
    assert (variables["IPU_JAX_AXES"], variables["JAX_NUM_CPU_DEVICES"]) == ("tensor=2,context=3", "12")
    assert (place.local_ipus, place.local_devices) == (2, 12)
    read = place_of(variables)
    assert read is not None
    assert list(read.axes) == ["tensor", "context"]  # the last one varies fastest


def place_with(**changes: str | None) -> None:
    place_of({name: value for name, value in {**TWO.variables(), **changes}.items() if value is not None})


def place_among(replicas: int, instances: int, ipus: int, axes: dict[str, int]) -> None:
    place_of(InstancePlace(0, instances, 0, replicas, ipus, ADDRESS, ADDRESS, axes=axes).variables())


@refusals(
    (lambda: place_among(8, 3, 2, {}), "num_replicas=8", "shared by num_instances=3", "divides 8", "all 16 IPUs"),
    (lambda: place_among(2, 3, 3, {}), "num_replicas=2", "shared by num_instances=3", "divides 2", "all 6 IPUs"),
    (lambda: place_among(2, 8, 2, {}), "num_replicas=2", "shared by num_instances=8", "divides 2", "all 4 IPUs"),
    (lambda: place_among(3, 2, 2, {}), "num_replicas=3", "shared by num_instances=2", "divides 3", "all 6 IPUs"),
    (lambda: place_among(2, 8, 2, TENSOR), "num_instances=8 would cut", "2 devices (tensor=2)", "all 4 IPUs"),
    (lambda: place_among(3, 4, 2, TENSOR), "num_instances=4 would cut", "2 devices (tensor=2)", "divides 3"),
    (lambda: place_among(2, 3, 3, TENSOR), "num_replicas=2", "shared by num_instances=3", "divides 2"),
    (lambda: place_among(2, 16, 2, TENSOR), "num_replicas=2", "shared by num_instances=16", "divides 2"),
    (lambda: place_with(IPU_JAX_AXES="tensor=0"), "IPU_JAX_AXES='tensor=0'", "size from 1", "such as tensor=2"),
    (lambda: place_with(IPU_JAX_AXES=""), "IPU_JAX_AXES=''", "size from 1", "such as tensor=2"),
    (lambda: place_with(IPU_JAX_INSTANCES="3"), "num_replicas=8", "shared by num_instances=3", "divides 8"),
    (lambda: place_with(IPU_JAX_INSTANCES=None), "IPU_JAX_INSTANCE, but not IPU_JAX_INSTANCES", "start"),
    (lambda: place_with(IPU_JAX_INSTANCE="one"), "IPU_JAX_INSTANCE='one'", "whole number of at least 0", "start"),
    (lambda: place_with(IPU_JAX_INSTANCE="2"), "IPU_JAX_INSTANCE=2", "not one of IPU_JAX_INSTANCES=2", "start"),
    (
        lambda: place_with(POPDIST_NUM_TOTAL_REPLICAS="0"),
        "POPDIST_NUM_TOTAL_REPLICAS='0'",
        "whole number of at least 1",
        "start",
    ),
)
def test_an_environment_that_no_launcher_makes_is_refused(call, holds):
    with refused(*holds):
        call()


NO_AXES = ("tensor", "tensor=", "tensor=0", "tensor=-1", "tensor=1025", "tensor=2.0", "=2", "2=2", "a b=2", "tensor=2,")


@refusals(
    *((lambda text=text: axes_of(text), "not an axis", "size from 1 to 1024", "such as tensor=2") for text in NO_AXES),
    (lambda: axes_of("tensor=" + 5000 * "9"), "'tensor=9", "size from 1 to 1024", "such as tensor=2"),
    *(
        (lambda name=name: axes_of(f"tensor=2,{name}=2"), f"'{name}=2'", "taken already", "give each")
        for name in ("replica", "ipu", "devices", "tensor")
    ),
)
def test_wrong_axes_are_refused(call, holds):
    with refused(*holds):
        call()

"""Test how replicas, instances, hosts, cores and words of a command line are divided."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_jax.distributed.environment import InstancePlace
from ipu_jax.distributed.launcher.options import PoprunParser
from ipu_jax.distributed.launcher.topology import (
    Launch,
    Topology,
    host_names,
    hosts_in_file,
    nodes_of_cores,
    ranges,
    shares_of_cores,
)
from support.refusals import refusals, refused


def test_the_topology_says_what_each_host_has():
    assert str(Topology(("localhost",), instances=2, replicas=8, ipus_per_replica=1)) == (
        "poprun topology: 8 replicas of 1 IPUs, 2 instances, each with 4\n  localhost  instances 0-1  replicas 0-7\n"
    )

    assert str(Topology(("a", "b"), 2, 2, 2, {"tensor": 2, "context": 3})) == (
        "poprun topology: 2 replicas of 2 IPUs of 6 devices (tensor=2,context=3), 2 instances, each with 1\n"
        "  a  instances 0  replicas 0\n  b  instances 1  replicas 1\n"
    )


@st.composite
def topologies(draw):
    hosts = draw(st.integers(1, 40))
    instances = hosts * draw(st.integers(1, 12))
    if draw(st.booleans()):
        return Topology(tuple(f"host{i}" for i in range(hosts)), instances, instances * draw(st.integers(1, 20)), 2)
    replicas = draw(st.sampled_from([n for n in range(1, instances + 1) if instances % n == 0]))
    return Topology(tuple(f"host{i}" for i in range(hosts)), instances, replicas, instances // replicas)


@given(topologies())
def test_a_topology_names_every_host_with_its_instances_and_replicas(topology):
    head, *lines = str(topology).splitlines()
    assert head.startswith(f"poprun topology: {topology.replicas} replicas of {topology.ipus_per_replica} IPUs, ")
    for name, line in zip(topology.hosts, lines, strict=True):
        of_host = topology.instances_of(name)
        ipus = topology.replicas * topology.ipus_per_replica // topology.instances  # of an instance
        replicas = {ipu // topology.ipus_per_replica for ipu in range(of_host[0] * ipus, (of_host[-1] + 1) * ipus)}
        assert line.split() == [name, "instances", ranges(of_host), "replicas", ranges(sorted(replicas))]


@given(topologies())
def test_instances_share_replicas_and_hosts_equally(topology):
    places = [topology.place(i, "h:1", "h:1", 0) for i in range(topology.instances)]
    assert sum(place.local_ipus for place in places) == topology.replicas * topology.ipus_per_replica
    for name in topology.hosts:
        of_host = [places[i] for i in topology.instances_of(name)]
        assert [place.local_instance for place in of_host] == list(range(topology.instances_per_host))
        assert {topology.host_of(place.instance) for place in of_host} == {name}


NO_HOSTS = ("a..b", ".a", "", "a,,b", "a b", "pod[2-0]", "pod[x]", "pod[0", "-oX", "a;b")


@refusals(
    (lambda: Topology(("a",), 2, 1, 1), "num_replicas=1", "num_instances=2", "give 1 instance, or 2 replicas"),
    (lambda: Topology(("a",), 3, 8, 2), "num_replicas=8", "num_instances=3", "give 2 or 4 instances, or 9 replicas"),
    (lambda: Topology(("a",), 99, 4, 1), "num_replicas=4", "num_instances=99", "give 4 instances, or 99 replicas"),
    (lambda: Topology(("a",), 5, 4, 2), "num_replicas=4", "num_instances=5", "give 4 or 8 instances, or 5 replicas"),
    (lambda: Topology(("a",), 8, 2, 2, {"tensor": 2}), "num_instances=8 would cut", "2 devices", "give 4 instances"),
    (lambda: Topology(("a", "b"), 2, 1, 1, {"tensor": 2}), "num_instances=2 would cut", "(tensor=2)", "1 instance"),
    (lambda: Topology(("a", "b", "c"), 4, 4, 1), "num_instances=4", "shared by 3 hosts", "give 3 or 6 instances"),
    (lambda: hosts_in_file(Path("/dev/null")), "/dev/null", "names no host"),
    (lambda: hosts_in_file(Path("/nowhere")), "/nowhere", "No such file"),
    *((lambda text=text: host_names(text), f"{text!r} is not a list of hosts: ", " such as ") for text in NO_HOSTS),
    (lambda: host_names("a,a"), "'a' is named twice", "name it once"),
    (lambda: host_names("pod[0-1],pod1"), "'pod1' is named twice", "name it once"),
)
def test_what_cannot_be_divided_or_read_is_refused(call, holds):
    with refused(*holds):
        call()


def test_a_name_is_as_long_as_names_may_be_in_the_dns():
    for name in ("a" * 63, ".".join(["a" * 63] * 3 + ["b" * 61]), f"{'user' * 9}@{'a' * 63}.lab", "fe80::1%eth0"):
        assert host_names(name) == (name,)
        with refused("is not a list of hosts"):
            host_names(name.replace("::1", "::1" * 99) + "c" * 64)


def test_what_a_refusal_of_counts_proposes_works():
    for replicas, instances, ipus in ((1, 1, 1), (2, 2, 1), (8, 2, 2), (8, 4, 2), (9, 3, 2), (4, 4, 2), (4, 8, 2)):
        Topology(("a",), instances, replicas, ipus)
    for instances in (3, 6):
        Topology(("a", "b", "c"), instances, instances, 1)


def test_hosts_of_a_file(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\npod[0-1] slots=4\n\nlogin # the head\n")
    assert hosts_in_file(path) == ("pod0", "pod1", "login")


@given(st.sets(st.integers(0, 30)))
def test_ranges_say_all_numbers(numbers):
    found = set()
    for part in filter(None, ranges(sorted(numbers)).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


@given(st.integers(1, 12), st.sets(st.integers(0, 31), min_size=1), st.integers(1, 5))
def test_cores_are_shared_fairly_and_never_over_two_nodes(instances, cores, count):
    cores = sorted(cores)
    nodes = [[core for core in range(32) if core % count == node] for node in range(count)]
    shares = shares_of_cores(instances, cores, nodes)
    assert len(shares) == instances
    usable = [set(node) & set(cores) for node in nodes if set(node) & set(cores)]
    if len(usable) <= instances:
        assert all(any(set(share) <= node for node in usable) for share in shares)
        if all(len(node) >= instances for node in usable):
            assert sorted(core for share in shares for core in share) == cores
    assert all(share and set(share) <= set(cores) for share in shares)


def test_nodes_are_read_where_linux_writes_them(tmp_path):
    for node, cores in ((0, "0-1,4"), (10, "5"), (2, "2-3"), (3, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    assert nodes_of_cores(tmp_path) == [[0, 1, 4], [2, 3], [5]]
    assert nodes_of_cores(tmp_path / "none") == []


def test_a_size_of_the_thread_pool_that_the_user_set_is_kept():
    place = InstancePlace(0, 1, 0, 1, 2, "h:1", "h:1")
    assert Launch(("x",), (place,), {}).variables(place, cores=3)["PJRT_NPROC"] == "5"
    group = dataclasses.replace(place, axes={"tensor": 2})  # 2 IPUs of 2 devices
    assert Launch(("x",), (group,), {}).variables(group, cores=3)["PJRT_NPROC"] == "7"
    assert Launch.from_json(json.loads(json.dumps(Launch(("x",), (group,), {}).to_json()))).places == (group,)
    assert Launch(("x",), (place,), {"PJRT_NPROC": "7"}).variables(place, cores=3)["PJRT_NPROC"] == "7"


@pytest.mark.parametrize(
    ("line", "own", "program"),
    [
        ("python x.py --num-replicas 3", 0, ["python", "x.py", "--num-replicas", "3"]),
        ("--num-replicas 2 -- --odd", 2, ["--odd"]),
        ("--num-replicas=2 -v prog -v", 2, ["prog", "-v"]),
        ("--axes tensor=2,context=2 prog", 2, ["prog"]),
        ("--numa-aware prog", 1, ["prog"]),
        ("--numa-aware yes prog", 2, ["prog"]),
        ("--update-partition --remove-partition no prog", 3, ["prog"]),
        ("--print-topology true", 1, ["true"]),
        ("-x A=1 -xB=2 -Ha,b -vv prog", 5, ["prog"]),
        ("--stall-timeout off prog", 2, ["prog"]),
    ],
)
def test_the_options_end_at_the_first_word_that_is_none(line, own, program):
    words = line.split()
    assert PoprunParser().split(words) == (words[:own], program)


def test_a_value_of_mpirun_may_look_like_an_option():
    words = ["--mpi-global-args", "--tag-output", "prog"]
    assert PoprunParser().split(words) == (["--mpi-global-args=--tag-output"], ["prog"])

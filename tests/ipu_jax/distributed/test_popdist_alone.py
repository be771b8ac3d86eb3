"""Test popdist where there is one instance, and what it reads from poprun's environment."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from ipu_jax import popdist
from ipu_jax.distributed.environment import Place

ADDRESS = "127.0.0.1:40001"


@pytest.fixture
def second_of_four(monkeypatch):
    place = Place(1, 4, 1, replicas=8, ipus_per_replica=2, coordinator=ADDRESS, bind=ADDRESS)
    for name, value in place.variables().items():
        monkeypatch.setenv(name, value)


def test_without_poprun_there_is_one_instance():
    popdist.init()
    assert not popdist.is_popdist_env_set()
    assert popdist.get_instance_index() == popdist.get_local_instance_index() == popdist.get_replica_index_offset() == 0
    assert popdist.get_num_instances() == popdist.get_num_total_replicas() == popdist.get_num_local_replicas() == 1
    assert popdist.get_num_ipus_per_replica() == popdist.get_num_local_ipus() == 1


def test_the_answers_are_those_of_the_environment(second_of_four):
    assert popdist.is_popdist_env_set()
    assert (popdist.get_instance_index(), popdist.get_num_instances(), popdist.get_local_instance_index()) == (1, 4, 1)
    assert (popdist.get_num_total_replicas(), popdist.get_num_local_replicas()) == (8, 2)
    assert (popdist.get_replica_index_offset(), popdist.get_num_ipus_per_replica()) == (2, 2)
    assert popdist.get_num_local_ipus() == 4


@pytest.mark.parametrize(
    "name",
    [
        "isPopdistEnvSet",
        "getInstanceIndex",
        "getLocalInstanceIndex",
        "getNumInstances",
        "getNumTotalReplicas",
        "getNumLocalReplicas",
        "getReplicaIndexOffset",
        "getNumIpusPerReplica",
    ],
)
def test_names_of_the_original_work(name, second_of_four):
    own = re.sub(r"[A-Z]", lambda found: f"_{found[0].lower()}", name)
    assert getattr(popdist, name)() == getattr(popdist, own)()


def test_one_instance_exchanges_with_itself():
    tree: dict[str, Any] = {"a": 1, "b": [2.5, np.array([1, 2], np.float32)], "c": True}
    for op in ("mean", "sum"):
        reduced: Any = popdist.all_reduce(tree, op)
        assert reduced["a"] == 1
        assert reduced["b"][0] == 2.5
        assert reduced["b"][1].tolist() == [1, 2]
        assert reduced["b"][1].dtype == np.float32
    key = jax.random.key(3)
    assert (jax.random.key_data(popdist.broadcast(key)) == jax.random.key_data(key)).all()
    popdist.barrier()
    with popdist.busy("nothing"):
        popdist.count_steps()


def test_a_function_runs_on_the_instances_that_are_named(second_of_four):
    assert popdist.execute_on_instances([0, 1], max, 3, 4) == 4
    assert popdist.execute_on_instances({0, 3}, max, 3, 4) is None
    with pytest.raises(ValueError, match=re.escape("instances=[1, 4] has 4: give numbers from 0 to 3")):
        popdist.execute_on_instances({1, 4}, max, 3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: popdist.all_reduce(1.0, "max"), "op='max'"),  # pyright: ignore[reportArgumentType]
        (lambda: popdist.all_reduce({"a": "text"}), "a leaf is 'text': give numbers and arrays of numbers"),
        (lambda: popdist.all_reduce(jax.random.key(0)), "a leaf is a random key, which has no mean or sum"),
        (lambda: popdist.broadcast(1, root=1), "root=1 is not the number of an instance: give one from 0 to 0"),
        (lambda: popdist.count_steps(0), "steps=0"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_an_environment_that_no_launcher_made_is_refused(monkeypatch):
    monkeypatch.setenv("IPU_JAX_INSTANCE", "0")
    with pytest.raises(ValueError, match=r"^the environment has IPU_JAX_INSTANCE, but not "):
        popdist.init()

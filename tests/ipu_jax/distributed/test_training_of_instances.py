"""Test training on several processes: by plain optax on one device, and bit by bit by other numbers of processes."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from random_programs.closeness import of_all_processes
from support import across, across_feeds
from support.dense import largest_relative_error
from support.instances import Results, assert_same_everywhere, run_instances
from support.trained import train_dense

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all in parts": {"shard_optimizer": True, "ema_decay": 0.5, "norms": True, "max_gradient_norm": 0.1},
    "dynamic": {"loss_scale": "dynamic", "donate": False, "reduction": "mean"},
    "several updates": {"device_iterations": 2, "outputs": "all", "ema_decay": 0.9},
    "mixed precision": {"precision": "16.32", "shard_optimizer": True, "loss_scale": "dynamic"},
    "half": {"precision": "16.16", "stochastic_rounding": True, "shard_optimizer": True},
}


def bitwise(found: Results, expected: Results) -> list[str]:
    """Return the names of the results that are not equal bit by bit."""
    assert found.keys() == expected.keys()
    return [name for name, value in found.items() if not np.array_equal(value, expected[name])]


def check_by_optax(found: Results, replicas: int, ipus: int) -> None:
    """Check weights, optimizer state and losses of the options "plain" by optax on one device."""
    model = across.model_of(replicas, ipus)
    params, state, losses = train_dense(model, optax.adamw(0.02), across.STEPS)
    expected = across.named("0 whole['params']", params) | across.named("0 whole['optimizer']", state)
    assert largest_relative_error({name: found[name] for name in expected}, expected) <= 1e-5
    of_calls = [found[f"0 outputs[{call}].loss"] for call in range(across.STEPS)]
    np.testing.assert_allclose(of_calls, losses, rtol=1e-5)


def test_a_replica_on_two_instances_trains_as_on_one():
    """The cheap sample of this file, which always runs. No sum has more than two terms, so that all bits are equal."""
    options = {"replicas": 1, "ipus": 2, "each": [OPTIONS["plain"]]}
    found = assert_same_everywhere(run_instances(across.trained, [1, 1], **options))
    check_by_optax(found, 1, 2)
    assert not bitwise(found, across.trained(**options))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_any_number_of_instances_trains_alike(name):
    """2 to 4 processes give equal bits; one process adds four numbers in another order."""
    options = {"replicas": 2, "ipus": 2, "each": [OPTIONS[name]]}
    two, uneven, four = (
        assert_same_everywhere(run_instances(across.trained, devices, **options))
        for devices in ([2, 2], [3, 1], [1, 1, 1, 1])
    )
    assert not bitwise(two, uneven)
    assert not bitwise(two, four)
    if name == "plain":
        check_by_optax(two, 2, 2)
    # the norm over all gradients is a sum over four IPUs, all else over two
    different = bitwise(two, across.trained(**options))
    assert all("gradient_norm" in path for path in different), different


@pytest.mark.slow
def test_eight_devices_in_one_two_and_four_processes():
    options = {"replicas": 2, "ipus": 4, "each": [OPTIONS["plain"], OPTIONS["all in parts"]]}
    two, four = (
        assert_same_everywhere(run_instances(across.trained, devices, **options)) for devices in ([4, 4], [2, 2, 2, 2])
    )
    assert not bitwise(two, four)
    check_by_optax(two, 2, 4)
    one = across.trained(**options)
    assert bitwise(two, one), "one process adds four numbers in another order: if it no longer does, say so in the docs"
    numbers = [name for name, value in one.items() if value.dtype.kind not in "US"]
    pair = ({name: results[name] for name in numbers} for results in (two, one))
    assert largest_relative_error(*pair) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "all in parts", "dynamic"])
def test_replicas_of_a_function_are_those_of_one_process(name):
    """One process runs them under pmap, several under shard_map."""
    options = {"replicas": 2, "options": OPTIONS[name]}
    found = assert_same_everywhere(run_instances(across.function_trained, [1, 1], **options))
    assert not bitwise(found, across.function_trained(**options))
    of_four = assert_same_everywhere(run_instances(across.function_trained, [1, 3], replicas=4, options=OPTIONS[name]))
    expected = across.function_trained(4, OPTIONS[name])
    assert largest_relative_error(of_four, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("devices", [(1, 1), (1, 2, 1)])
def test_an_epoch_of_a_feed_trains_as_on_one_instance(devices):
    """Two updates per call; the last call of the epoch has one."""
    options = {"replicas": sum(devices) // 2, "ipus": 2}
    found = assert_same_everywhere(run_instances(across_feeds.feed_trains, devices, **options))
    assert not bitwise(found, across_feeds.feed_trains(**options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipelines", "training"])
@pytest.mark.parametrize("devices", [(1, 1), (2, 1), (1, 1, 1, 1)])
def test_random_programs_on_instances(devices, kind):
    """They have states, random keys, skips, aux, frozen weights and half types. Each process has a dense twin."""
    options = {"kind": kind, "seed": 11, "first": 40 * len(devices), "count": 1}
    for results in run_instances(across.random_cases, devices, **options):
        assert len(results["checked"]) == 1


def test_results_of_one_process_are_left_as_they_are():
    for value in (np.ones(2), 3, jax.numpy.ones(2)):
        assert of_all_processes(value) is value

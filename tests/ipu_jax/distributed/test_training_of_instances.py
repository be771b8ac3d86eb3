"""Test pipelines and training on several processes: by plain jax and optax on one device, and by one process.

And which rows each instance reads, where replicas are on several instances or instances have unlike numbers.
"""

import json
from typing import Any

import jax
import numpy as np
import optax
import pytest

from random_programs.closeness import of_all_processes
from support import across, across_feeds
from support.dense import largest_relative_error
from support.programs import InstanceError, Results, assert_same_everywhere, run_instances
from support.trained import train_dense

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all in parts": {"shard_optimizer": True, "ema_decay": 0.5, "norms": True, "max_gradient_norm": 0.1}
    | {"offload": ("optimizer",)},
    "dynamic": {"loss_scale": "dynamic", "donate": False, "reduction": "mean"},
    "several updates": {"device_iterations": 2, "outputs": "all", "ema_decay": 0.9},
    "mixed precision": {"precision": "16.32", "shard_optimizer": True, "loss_scale": "dynamic"},
    "half": {"precision": "16.16", "stochastic_rounding": True, "shard_optimizer": True},
}


MEASURED = ("seconds",)  # no two runs take the same time


def assert_close(found: Results, expected: Results, *, rtol: float, but: tuple[str, ...] = ()) -> None:
    assert found.keys() == expected.keys()
    numbers = [name for name in found if found[name].dtype.kind not in "US" and not name.startswith(but)]
    error = largest_relative_error(*({name: tree[name] for name in numbers} for tree in (found, expected)))
    assert error <= rtol
    for name in found.keys() - {*numbers, *but}:
        assert str(found[name]) == str(expected[name])


def leaves_named(found: Results, name: str) -> list[np.ndarray]:
    return [value for path, value in found.items() if path.startswith(f"{name}[")]


def check_by_dense(found: Results, replicas: int, ipus: int, dtype: str, tolerance: float) -> None:
    """Check the results of `across.whole_pipeline` by plain jax, on whole weights and one device."""
    model = across.model_of(replicas, ipus, dtype)
    loss, gradients = model.twin()
    for found_loss in (found["loss"], found["loss alone"], *found["verified"][:2]):
        assert abs(found_loss - loss) <= tolerance * abs(loss)
    for which in ("gradients", "jax.grad", "reference[1]"):
        expected = across.named(which, gradients)
        assert largest_relative_error({path: found[path] for path in expected}, expected) <= tolerance, which
    for whole, given in zip(leaves_named(found, "params"), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(whole, np.asarray(given, whole.dtype))


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


ONE_REPLICA: dict[str, Any] = {"replicas": 1, "ipus": 2, "each": [OPTIONS["plain"]]}


@pytest.fixture(scope="module")
def of_two() -> list[Results]:
    return run_instances(across_feeds.trained_and_refused, [1, 1], **ONE_REPLICA)


@pytest.mark.slow
def test_a_replica_on_two_instances_trains_as_on_one(of_two):
    """The cheap sample, which always runs. No sum has more than two terms, so that all bits are equal."""
    trained = [{name: value for name, value in of_one.items() if "refused" not in name} for of_one in of_two]
    found = assert_same_everywhere(trained)
    check_by_optax(found, 1, 2)
    assert not bitwise(found, across.trained(**ONE_REPLICA))


@pytest.mark.slow
def test_wrong_meshes_and_feeds_say_what_is_right(of_two):
    for number, results in enumerate(of_two):
        said = {name.removeprefix("refused "): str(text) for name, text in results.items() if "refused" in name}
        holds = {
            "too few": ("needs 4 IPUs", "the 2 instances have 2 in all (1 each)", "call configure(2) on each"),
            "too few here": (f"with 1 on instance {number}", "call configure(2)", "JAX_NUM_CPU_DEVICES=2"),
            "an idle instance": ("the first 1 of 2 devices", "instance 1 would have none", "start fewer instances"),
            "another count": ("mesh lies on 2 processes", "instances=3", "leave it out"),
            "another instance": (f"instance={1 - number}", f"process {number} is instance {number}", "leave it out"),
            "a mesh of others": ("devices of the processes [0]", "this is process 1", "only where the mesh"),
            "right": ("nothing was raised",),
        }
        if number == 0:
            holds["a mesh of others"] = holds["right"]
        assert said.keys() == holds.keys()
        for name, texts in holds.items():
            assert all(text in said[name] for text in texts), said[name]
            assert said[name].startswith("nothing" if texts == holds["right"] else "ValueError: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "replicas", "ipus", "dtype"),
    [
        ((1, 1), 1, 2, "float32"),
        ((1, 1, 1, 1), 2, 2, "float32"),
        ((1, 1, 1), 1, 3, "bfloat16"),
        ((3, 3), 2, 3, "float32"),
        ((2, 1), 1, 3, "float32"),
        ((1, 2, 1), 2, 2, "bfloat16"),
    ],
)
def test_pipelines_over_instances(devices, replicas, ipus, dtype):
    options = {"replicas": replicas, "ipus": ipus, "dtype": dtype}
    found = assert_same_everywhere(run_instances(across.whole_pipeline, devices, **options))
    check_by_dense(found, replicas, ipus, dtype, 1e-5 if dtype == "float32" else 0.05)
    tolerance = 0.05 if dtype == "bfloat16" else 1e-6 if sum(devices) == 2 else 1e-5
    assert_close(found, across.whole_pipeline(**options), rtol=tolerance, but=(*MEASURED, "verified", "repr"))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "replicas", "ipus"), [((1, 1), 1, 2), ((1, 2, 1), 2, 2), ((2, 1), 1, 3)])
def test_layers_predict_on_instances(devices, replicas, ipus):
    found = assert_same_everywhere(run_instances(across.predictions, devices, replicas=replicas, ipus=ipus))
    expected = found["x"]
    for layer in leaves_named(found, "layers"):
        expected = np.tanh(expected @ layer)
    np.testing.assert_allclose(found["outputs"], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["reference"], expected, rtol=1e-4, atol=1e-6)
    assert_close(found, across.predictions(replicas, ipus), rtol=1e-5)


@pytest.mark.slow
def test_what_is_wrong_on_one_instance_fails_on_all():
    first, last = (str(results["error"]) for results in run_instances(across.verify_on_one_side, [1, 1]))
    assert "the values that are furthest apart are on another instance" in first
    for said in (first, last):
        assert said.startswith("the gradient of params['stage1']['b'] differs from the unsharded program's by ")
        assert "(5 of 5 gradients differ)" in said
    report = lambda said: said[said.index("(5 of 5") :]
    assert report(first) == report(last)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("raises", "RuntimeError: of instance 1"), ("waits", "did not end in time")])
def test_the_harness_ends_all_instances_and_says_what_failed(how, said):
    """An instance that raises leaves the other one in a collective, which has no end."""
    with pytest.raises(InstanceError, match=said):
        run_instances(across.fails, [1, 1], seconds=120 if how == "raises" else 10, how=how)


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


REPLICAS, IPUS, PER_REPLICA = 2, 2, 4  # an update is 2 micro-batches of 2 examples on each replica
EXAMPLES = 37
# by the devices of each instance, the replicas that it has devices of
PLACEMENTS = {(2, 1, 1): [[0], [1], [1]], (1, 2, 1): [[0], [0, 1], [1]]}


def rows_of_epoch(options: Any) -> list[np.ndarray]:
    """Return all batches of epoch 0, (updates, replicas, examples), by NumPy alone; -1 where there is no example."""
    order = np.arange(EXAMPLES)
    if options.get("shuffle", True) and not options.get("stream"):
        np.random.default_rng([options.get("seed", 0), 0]).shuffle(order)
    updates = options.get("device_iterations", 1)
    per_batch = updates * REPLICAS * PER_REPLICA
    padded = np.concatenate([order, np.full(-EXAMPLES % per_batch, -1)])
    return list(padded.reshape(-1, updates, REPLICAS, PER_REPLICA))


def check_rows(found: list[Results], number: int, options: Any, owned: list[list[int]], first: int = 0) -> None:
    """Check that instance i has exactly the rows of the replicas `owned[i]`, from batch number `first` on."""
    batches = rows_of_epoch(options)[first:][: options.get("batches")]
    for replicas, results in zip(owned, found, strict=True):
        names = {name for name in results if name.startswith(f"{number} batch") and "replica" in name}
        assert names == {f"{number} batch {at} replica {r}" for at in range(len(batches)) for r in replicas}
        for at, batch in enumerate(batches):
            for r in replicas:
                np.testing.assert_array_equal(results[f"{number} batch {at} replica {r}"], batch[:, r].reshape(-1))
            real = results[f"{number} batch {at} is real"]
            np.testing.assert_array_equal(real.reshape(-1), batch[:, replicas].reshape(-1) >= 0)
            examples = (batch >= 0).sum()
            updates = -(-examples // (batch.size // len(batch)))
            assert results[f"{number} batch {at} counts"].tolist() == [examples, updates]
        if not options.get("stream"):
            own = np.concatenate([batch[:, replicas].reshape(-1) for batch in batches])
            # example 0 is also read to see what all are like
            np.testing.assert_array_equal(results[f"{number} reads"], np.setdiff1d(np.union1d(own, [0]), [-1]))


@pytest.mark.slow
@pytest.mark.parametrize("devices", PLACEMENTS)
def test_each_instance_reads_the_rows_of_its_own_replicas(devices):
    """It is also resumed by other numbers of instances than those that began the epoch."""
    began = across_feeds.fed(REPLICAS, IPUS, [{"batches": 2}])  # in this process alone
    state = json.loads(str(began["0 state"]))
    each: list[dict[str, Any]] = [
        {},
        {"shuffle": False, "device_iterations": 2, "prefetch": 2},
        {"stream": True},
        {"state": state},
        {"batches": 2},
        {"stream": True, "batches": 2},
    ]
    found = run_instances(across_feeds.fed, devices, replicas=REPLICAS, ipus=IPUS, each=each)
    for number, options in enumerate(each):
        check_rows(found, number, options, PLACEMENTS[devices], first=2 * (number == 3))
    states = {tuple(str(results[f"{number} state"]) for number in range(len(each))) for results in found}
    assert len(states) == 1, "a state is the same on all instances"
    for number in (4, 5):
        again = {**each[number], "batches": None, "state": json.loads(str(found[0][f"{number} state"]))}
        check_rows([across_feeds.fed(REPLICAS, IPUS, [again])], 0, again, [[0, 1]], first=2)

"""Test pipelines whose IPUs belong to several processes: by plain jax on one device, and by one process."""

import jax
import numpy as np
import pytest

from support import across
from support.dense import largest_relative_error
from support.instances import InstanceError, Results, assert_same_everywhere, run_instances

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


def test_a_replica_on_two_instances():
    """The cheap sample of this folder, which always runs: one replica, whose two IPUs are on two instances."""
    found = assert_same_everywhere(run_instances(across.whole_pipeline, [1, 1], replicas=1, ipus=2))
    check_by_dense(found, 1, 2, "float32", 1e-5)


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
    report = lambda said: said[said.index("(5 of 5") :]  # noqa: E731
    assert report(first) == report(last)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("raises", "RuntimeError: of instance 1"), ("waits", "did not end in time")])
def test_the_harness_ends_all_instances_and_says_what_failed(how, said):
    """An instance that raises leaves the other one in a collective, which has no end."""
    with pytest.raises(InstanceError, match=said):
        run_instances(across.fails, [1, 1], seconds=120 if how == "raises" else 6, how=how)

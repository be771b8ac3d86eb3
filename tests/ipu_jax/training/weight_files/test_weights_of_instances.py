"""Test export and import where IPUs belong to several processes: one writes, all know, and every bit arrives."""

import numpy as np
import pytest

from ipu_jax.io import export_weights
from support import exported
from support.programs import run_instances


def check(results) -> None:
    for of_instance in results:
        assert of_instance
        for name, value in of_instance.items():
            assert np.all(value), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "replicas", "ipus"),
    [
        ([1, 2], 1, 3),  # a replica on two instances
        ([1, 1, 1, 1], 1, 4),
        ([4, 4], 1, 8),
        ([2, 2], 2, 2),
        ([1, 1, 1, 1], 2, 2),
        ([3, 1], 2, 2),
    ],
)
def test_weights_over_instances(tmp_path, devices, replicas, ipus):
    check(run_instances(exported.written, devices, folder=str(tmp_path), replicas=replicas, ipus=ipus))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights.npz", "weights.safetensors"]
    alone = tmp_path / "one"
    alone.mkdir()
    for path in sorted(tmp_path.glob("weights.*")):
        export_weights(alone / path.name, exported.unlike_pipeline(1).shard(exported.unlike_weights("bfloat16")))
        assert (alone / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "shard_optimizer"), [(1, False), (2, True)])
def test_a_training_over_instances(tmp_path, replicas, shard_optimizer):
    devices = [1] * (2 * replicas)
    options = {"replicas": replicas, "shard_optimizer": shard_optimizer}
    check(run_instances(exported.trained_and_written, devices, folder=str(tmp_path), **options))


@pytest.mark.slow
def test_all_instances_hear_that_the_first_cannot_write(tmp_path):
    first, second = run_instances(exported.refused, [1, 1], folder=str(tmp_path), ipus=2)
    path = tmp_path / "none" / "weights.npz"
    assert str(first["no folder"]).startswith(
        "[Errno 2] No such file or directory: could not write it, no file was left"
    )
    assert str(second["no folder"]) == f"[Errno 2] No such file or directory: instance 0 could not write it: '{path}'"
    assert str(first["full"]).startswith(
        "[Errno 28] No space left on device: could not write it, no file was left there"
    )
    assert str(second["full"]).startswith("[Errno 28] No space left on device: instance 0 could not write it")
    assert [file.name for file in tmp_path.iterdir()] == ["weights.npz"]
    assert first["went on"]
    assert second["went on"]

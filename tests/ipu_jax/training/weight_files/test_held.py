"""Test that the host holds a leaf at a time, an IPU gets no more than a part, and several processes write one file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ipu_jax import make_mesh
from ipu_jax.io import export_weights
from ipu_jax.training.weight_files import exporting, importing
from support import exported
from support.programs import run_instances

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
@pytest.mark.parametrize("way", ["export", "import"])
def test_the_host_holds_a_few_leaves_however_many_there_are(tmp_path, monkeypatch, way, suffix):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")  # so that what is freed goes back to the system
    (found,) = run_instances(exported.held, [4], path=str(tmp_path / f"w.{suffix}"), way=way, leaves=48)
    assert found["total"] == 192 * MIB
    assert found["above"] <= 3 * found["leaf"] + 4 * MIB


@pytest.mark.slow
def test_the_measure_sees_whole_weights(tmp_path):
    (found,) = run_instances(exported.held, [4], path=str(tmp_path / "w.npz"), way="unshard", leaves=48)
    assert found["above"] > 0.9 * found["total"]


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        *((PartitionSpec("ipu"), dtype) for dtype in ("float32", "bfloat16", "int8", "bool", "complex64")),
        *((PartitionSpec(None, "ipu"), dtype) for dtype in ("float16", "float8_e5m2")),
        (PartitionSpec("replica", "ipu"), "bfloat16"),
    ],
)
def test_a_part_is_sent_bit_by_bit_and_no_other_part_is(spec, dtype):
    mesh, kind = make_mesh(2, 4), jnp.dtype(dtype)
    drawn = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, (8, 12, kind.itemsize), np.uint8)
    whole = drawn.view(kind).reshape(8, 12)
    whole[:, ::2] = np.array(-0.0).astype(kind)
    array = jax.make_array_from_callback((8, 12), NamedSharding(mesh, spec), lambda index: whole[index])
    for shard in array.addressable_shards:
        sent = exporting._sent_shard(array, shard.device, True)
        assert sent is not None
        assert sent.tobytes() == whole[shard.index].tobytes()
    assert exporting._sent_shard(array, mesh.devices[0, 0], False) is None
    nbytes = whole[array.addressable_shards[0].index].nbytes
    compiled = exporting._sending(mesh, spec).lower(array, np.zeros(2, np.int32)).compile()
    analysis = compiled.memory_analysis()
    assert analysis.output_size_in_bytes == nbytes
    assert analysis.temp_size_in_bytes <= 2 * nbytes + 1024
    assert "all-gather" not in compiled.as_text()


def test_every_device_has_memory_of_its_own():
    """A CPU's array shares the memory of an aligned NumPy array; two that shared it would be donated as one."""

    def block(index):
        memory = np.zeros(128, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + 16].view(np.float32)

    array = importing._on_devices((8,), NamedSharding(make_mesh(4, 2), PartitionSpec("ipu")), block)
    assert len({shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}) == 8


def test_of_a_slot_only_the_row_is_read(monkeypatch):
    placed = exported.unlike_pipeline(4).shard(exported.unlike_weights("float32"))
    read = []
    own = exporting._own_shard
    monkeypatch.setattr(exporting, "_own_shard", lambda *part: (read.append(part), own(*part))[1])
    leaf = next(leaf for leaf in exporting.whole_leaves(placed)[0] if leaf.name == "second/gain")
    found = leaf.read(0)
    assert found is not None
    assert found.shape == (9, 2)
    rows = [array.sharding.devices_indices_map(array.shape)[device][0] for array, device in read]
    assert [(row.start, row.stop) for row in rows] == [(1, 2)]


# IPUs of several processes: one writes, all know, and every bit arrives


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

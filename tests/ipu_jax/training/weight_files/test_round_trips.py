"""Test that weights come back from files with the same bits, wherever they were and wherever they go."""

import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.io import export_weights, import_weights
from ipu_jax.steps import replicate
from support.exported import random_bits, unlike_pipeline, unlike_weights
from support.trained import bits, quick_compiles

FORMATS = ("safetensors", "npz")


@pytest.fixture(params=FORMATS)
def path(request, tmp_path):
    return tmp_path / f"weights.{request.param}"


NAMES = {
    "alone": (3, 3),
    "first~1half/1/": (7,),
    "first~1half/a~1b~0c/0": (3, 4),
    "first~1half/a~1b~0c/2/0": (5,),
    "first~1half/scalar": (),
    "second/gain": (9, 2),
    "second/rest/counts": (4,),
    "second/rest/empty": (0, 3),
    "second/rest/on": (2,),
    "table/columns": (2, 5),
    "table/none": (0, 4),
    "table/rows": (10, 3),
    "table/whole": (3,),
}


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert bits(found) == bits(expected)


def assert_same_placement(found, like):
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert f.sharding.is_equivalent_to(e.sharding, f.ndim)


@pytest.mark.parametrize(("ipus", "replicas", "dtype"), [(1, 1, "float32"), (4, 1, "float16"), (2, 4, "bfloat16")])
def test_a_pipelines_weights_come_back_on_any_number_of_ipus(path, ipus, replicas, dtype):
    whole = unlike_weights(dtype)
    given = unlike_pipeline(ipus, replicas).shard(whole)
    export_weights(path, given)
    for other in (unlike_pipeline(ipus, replicas), unlike_pipeline(3, 2, reverse=True)):
        expected = other.shard(whole)
        for like in (expected, other.shard_shapes(whole)):
            found = import_weights(path, like)
            assert_same_bits(found, expected)
            assert_same_placement(found, expected)
    plain = jax.tree.map(lambda leaf: jnp.asarray(leaf), whole)
    assert_same_bits(import_weights(path, jax.tree.map(np.asarray, plain)), plain)


def test_ignored_leaves_are_not_written_and_come_from_another_file(tmp_path):
    whole = unlike_weights("float32")
    given = unlike_pipeline(4).shard(whole)
    parts = tmp_path / "second.npz", tmp_path / "others.safetensors"
    export_weights(parts[0], given, ignore=("first*", "table/*", "alone"))
    export_weights(parts[1], unlike_pipeline(2).shard(whole), ignore="second/*")
    with np.load(parts[0]) as file:
        assert set(file.files) == {name for name in NAMES if name.startswith("second/")}
    assert_same_bits(import_weights(parts, given), given)


def test_shapes_are_those_of_shard():
    for ipus, replicas in ((1, 1), (4, 2), (8, 1)):
        made = unlike_pipeline(ipus, replicas)
        placed, shapes = made.shard(unlike_weights("bfloat16")), made.shard_shapes(unlike_weights("bfloat16"))
        assert jax.tree.structure(placed) == jax.tree.structure(shapes)
        for array, shape in zip(jax.tree.leaves(placed), jax.tree.leaves(shapes), strict=True):
            assert (array.shape, array.dtype, array.sharding) == (shape.shape, shape.dtype, shape.sharding)


def test_names_and_shapes_are_those_of_the_whole_leaves_once(tmp_path):
    given = unlike_pipeline(4).shard(unlike_weights("float32"))
    export_weights(tmp_path / "w.npz", given)
    with np.load(tmp_path / "w.npz") as file:
        assert sorted((name, file[name].shape) for name in file.files) == sorted(NAMES.items())
    export_weights(tmp_path / "w.safetensors", given)
    data = (tmp_path / "w.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    assert shapes == NAMES


def test_equal_weights_make_equal_files(tmp_path):
    for suffix in FORMATS:
        files = [tmp_path / f"{number}.{suffix}" for number in range(3)]
        for file, made in zip(files, [unlike_pipeline(2), unlike_pipeline(8), unlike_pipeline(2, 4)], strict=True):
            export_weights(file, made.shard(unlike_weights("bfloat16")))
        assert len({file.read_bytes() for file in files}) == 1
    with zipfile.ZipFile(tmp_path / "0.npz") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_trained_weights_whose_arrays_a_program_made_come_back(path):
    made = unlike_pipeline(4)
    whole = jax.tree.map(
        lambda leaf: np.nan_to_num(leaf) if leaf.dtype.kind == "f" else leaf, unlike_weights("float32")
    )
    given = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf[::1], tree))(made.shard(whole))
    export_weights(path, given)
    assert_same_bits(import_weights(path, given), made.shard(whole))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_of_replicas_come_back(path, dtype):
    made = replicate(lambda p, rows: jnp.mean(rows), replication_factor=4)
    for whole in ({"a": [random_bits(0, dtype, 3, 2), random_bits(1, dtype)], "b": None}, random_bits(2, dtype, 4)):
        placed = made.shard(whole)
        export_weights(path, placed)
        for like in (placed, made.shard_shapes(whole)):
            found = import_weights(path, like)
            assert_same_bits(found, whole)
            assert_same_placement(found, placed)


def test_plain_trees_come_back_with_wide_and_odd_dtypes(path):
    kinds = ["float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "complex64"]
    whole = {
        kind: random_bits(number, kind, 2, 3) for number, kind in enumerate([*kinds, "float8_e4m3fn", "float8_e5m2"])
    }
    whole |= {
        "big-endian": np.arange(3, dtype=">i4"),
        "columns first": np.asfortranarray(random_bits(20, "float32", 4, 3)),
    }
    whole["rows apart"] = random_bits(21, "float16", 6, 4)[::2, 1:3]
    export_weights(path, whole)
    assert_same_bits(import_weights(path, whole), whole)


def test_large_arrays_in_pieces_come_back(path):
    large = random_bits(0, "bfloat16", 3, 700, 1500)  # 6.3 MB
    whole = {
        "c": large,
        "turned": large.transpose(2, 0, 1),
        "turned otherwise": large.transpose(0, 2, 1),
        "flat": large.ravel()[::2],
    }
    export_weights(path, whole)
    assert_same_bits(import_weights(path, whole), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("up", "down", "mid"), {}),
        (("down", "up", "mid"), {"shard_optimizer": True, "replication_factor": 2}),
        (("layer 10", "layer 9", "a table"), {"precision": "16.32"}),
        (("b/1", "a", "B"), {"device_iterations": 2}),
        (("b/1", "a", "B"), {"precision": "16.16"}),
    ],
    ids=["plain", "in parts", "16.32", "two updates", "16.16"],
)
def test_each_group_has_its_own_weights_and_average_whatever_their_names(tmp_path, names, options):
    """By hand: the loss is a sum, in which all leaves of stage k have the slope 1, 2 or 4. All groups look alike."""
    slopes = dict(zip(names, (1.0, 2.0, 4.0), strict=True))

    def local(name):
        def fn(p, x, mb):
            own = slopes[name] * (p["w"].sum() + p["b"].sum() + p["fixed"].sum())
            return (mb.mean() * 0 if x is None else x) + own.astype(mb.dtype)

        return fn

    def head(p, x, mb):
        return jax.lax.psum(x / jax.lax.axis_size("ipu") + local(names[2])(p, None, mb), "ipu")

    stages = [Stage(local(name), params=name, ipu=k) for k, name in enumerate(names[:2])]
    stages.append(Stage(head, params=names[2], ipu=ALL_IPUS))
    fixed = {"w": False, "b": False, "fixed": True}
    specs = {names[2]: {"w": P("ipu"), "b": P("ipu"), "fixed": P("ipu")}}
    made = Pipeline(stages, mesh=make_mesh(1, 2), specs=specs, frozen=dict.fromkeys(names, fixed))
    step = make_train_step(made, optax.sgd(0.5), TrainOptions(ema_decay=0.75, **options))
    rng = np.random.default_rng(0)
    whole = {name: {leaf: rng.normal(size=(3, 2)).astype(np.float32) for leaf in ("w", "b", "fixed")} for name in names}
    updates, replicas = options.get("device_iterations", 1), options.get("replication_factor", 1)
    lead = (updates,) * (updates > 1) + (replicas,) * (replicas > 1)
    with quick_compiles():
        state, _ = step(step.init(whole), np.ones((*lead, 1, 2), np.float32))
    # the weights after 0, 1 and 2 updates are w, w - 0.5 slope and w - slope; a quarter of the way is averaged
    moved = {1: (0.5, 0.125), 2: (1.0, 0.75 * 0.125 + 0.25 * 1.0)}[updates]
    close = 2e-2 if options.get("precision") == "16.16" else 1e-5
    on_host = step.whole(state)
    for average, kind in ((False, "params"), (True, "ema")):
        for path in (tmp_path / "w.safetensors", tmp_path / "w.npz"):
            export_weights(path, state, average=average)
            assert_same_bits(import_weights(path, jax.tree.map(np.asarray, on_host[kind])), on_host[kind])
        with np.load(tmp_path / "w.npz") as file:
            assert len(file.files) == 9
            for name, leaves in whole.items():
                for leaf, first in leaves.items():
                    expected = first if fixed[leaf] else first - moved[average] * slopes[name]
                    found = on_host[kind][name][leaf].astype(np.float32)
                    assert file[f"{name.replace('/', '~1')}/{leaf}"].shape == found.shape
                    np.testing.assert_allclose(found, expected, rtol=close, atol=close, err_msg=f"{name} {leaf}")


def test_a_functions_state_gives_its_average(path):
    step = make_train_step(
        lambda w, rows: jnp.mean((rows @ w) ** 2),
        optax.sgd(0.1),
        TrainOptions(replication_factor=2, ema_decay=0.5, shard_optimizer=True),
    )
    state, _ = step(step.init(jnp.ones(3)), jnp.ones((2, 1, 4, 3)))
    export_weights(path, state, average=True)
    assert_same_bits(import_weights(path, np.zeros(3, np.float32)), step.whole(state)["ema"])


def test_the_state_of_stages_comes_back(path):
    stage = Stage(lambda p, x, mb, *, state: (mb, state), state="counts", ipu=1)
    made = Pipeline([Stage(lambda p, x, mb: mb, ipu=0), stage])
    placed = made.shard_state({"counts": {"n": np.arange(5), "flag": np.array(True)}})
    export_weights(path, placed)
    assert_same_bits(import_weights(path, placed), placed)

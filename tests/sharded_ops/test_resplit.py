"""Test trees that are saved on some IPUs and restored on others, bit by bit, and errors that name a leaf."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharded_ops import Layout, Split, embedding
from sharded_ops._tree_layout import LeafLayout
from support.harness import assert_close, mesh_of, normal
from support.refusals import refusals, refused

SIZE = 10
DIMS = {"table": 0, "head": {"w": -1, "b": 0}, "rest": None}
SPECS = {"table": P("ipu", None), "head": {"w": P(None, "ipu"), "b": P("ipu")}, "rest": P()}


def _params(seed=0):
    """Return leaves split by rows, by columns, a vector, and two that are not split; some dtypes aren't numpy's own."""
    return {
        "table": normal(seed, (SIZE, 3), jnp.bfloat16),
        "head": {"w": normal(seed + 1, (4, SIZE)), "b": normal(seed + 2, (SIZE,), jnp.float16)},
        "rest": [normal(seed + 3, (5,), jnp.float8_e4m3fn), np.int32(seed)],
    }


LAYOUT = Layout.of(_params(), DIMS)


def _assert_same_bits(got, want):
    def same(got, want):
        got, want = np.asarray(got), np.asarray(want)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()

    jax.tree.map(same, got, want)


@pytest.mark.fast("1", "3", "8")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_each_ipu_holds_its_rows_and_then_zeros(n):
    params = _params()
    placed = LAYOUT.place(params, mesh_of(n), "ipu")

    split = Split(SIZE, n)
    padded = {
        "table": np.pad(params["table"], [(0, split.padding), (0, 0)]),
        "head": {
            "w": np.pad(params["head"]["w"], [(0, 0), (0, split.padding)]),
            "b": np.pad(params["head"]["b"], (0, split.padding)),
        },
        "rest": params["rest"],
    }
    _assert_same_bits(placed, padded)
    shardings = LAYOUT.shardings(params, mesh_of(n), "ipu")
    assert jax.tree.map(lambda leaf: leaf.sharding, placed) == shardings
    for leaf in (placed["table"], placed["head"]["w"]):
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // n}
    _assert_same_bits(LAYOUT.pad(params, n), padded)
    _assert_same_bits(LAYOUT.unpad(padded), params)
    _assert_same_bits(LAYOUT.unpad(placed), params)
    _assert_same_bits(LAYOUT.whole(placed), params)
    _assert_same_bits(LAYOUT.whole(padded), params)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 8), (3, 1), (8, 2)])
def test_a_step_saved_on_some_ipus_goes_on_elsewhere(tmp_path, before, after):
    """Test parameters and Adam's state after real steps on padded arrays, saved by numpy. Bits are compared."""
    # Other leaves are not trained: ints have no gradient, and float8 has no arithmetic on a CPU.
    floats = {name: _params()[name] for name in ("table", "head")}
    optimizer = optax.adam(1e-2)

    def stepped(params, state):
        updates, state = optimizer.update(jax.tree.map(lambda p: (p * 0.5).astype(p.dtype), params), state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), state

    layout = Layout.of(floats, {"table": 0, "head": {"w": -1, "b": 0}})
    of_state = layout.of_state(jax.eval_shape(optimizer.init, floats))
    placed = layout.place(floats, mesh_of(before), "ipu")
    state = jax.jit(optimizer.init)(placed)
    placed, state = jax.jit(stepped)(placed, state)

    whole: dict[str, Any] = dict(layout.each_whole(placed))
    np.savez(tmp_path / "params.npz", **whole)
    whole = dict(of_state.each_whole(state))
    np.savez(tmp_path / "state.npz", **whole)
    (tmp_path / "layouts.json").write_text(json.dumps([layout.to_json(), of_state.to_json()]))

    read_layout, read_of_state = map(Layout.from_json, json.loads((tmp_path / "layouts.json").read_text()))
    with np.load(tmp_path / "params.npz") as file:
        restored = read_layout.place(file, mesh_of(after), "ipu", like=placed)
    with np.load(tmp_path / "state.npz") as file:
        restored_state = read_of_state.place(file, mesh_of(after), "ipu", like=state)

    assert restored["table"].shape == (Split(SIZE, after).padded, 3)
    assert restored["table"].sharding == NamedSharding(mesh_of(after), P("ipu", None))
    assert restored_state[0].mu["head"]["w"].sharding == NamedSharding(mesh_of(after), P(None, "ipu"))
    _assert_same_bits(read_layout.whole(restored), layout.whole(placed))
    _assert_same_bits(read_of_state.whole(restored_state), of_state.whole(state))

    # Training goes on as it would have without any IPUs.
    alone, alone_state = floats, jax.jit(optimizer.init)(floats)
    for _ in range(2):
        alone, alone_state = jax.jit(stepped)(alone, alone_state)
    restored, _ = jax.jit(stepped)(restored, restored_state)
    for found, want in zip(jax.tree.leaves(layout.whole(restored)), jax.tree.leaves(alone), strict=True):
        assert_close(found, want, 1 + np.abs(np.asarray(want, np.float32)), roundings=2)


def test_a_placed_table_serves_an_op_and_pad_is_differentiated():
    layout = Layout.of(jnp.zeros((SIZE, 3)), 0)
    table, ids = normal(0, (SIZE, 3)), np.array([9, 0, 4], np.int32)
    mesh = mesh_of(3, replicas=2)
    placed = layout.place(table, mesh, "ipu")
    assert {shard.data.shape for shard in placed.addressable_shards} == {(4, 3)}
    np.testing.assert_array_equal(layout.whole(placed), table)

    in_specs = (layout.specs(table, "ipu"), P())
    lookup = jax.shard_map(functools.partial(embedding, size=SIZE), mesh=mesh, in_specs=in_specs, out_specs=P())
    np.testing.assert_array_equal(jax.jit(lookup)(placed, ids), table[ids])
    dtable = jax.jit(jax.grad(lambda table: (lookup(layout.pad(table, 3), ids) ** 2).sum()))(jnp.asarray(table))
    np.testing.assert_array_equal(dtable, np.where(np.isin(np.arange(SIZE), ids)[:, None], 2 * table, 0))


def test_specs_and_paths():
    assert LAYOUT.specs(_params(), "ipu") == {**SPECS, "rest": [P(), P()]}
    assert list(LAYOUT.leaves) == ["head/b", "head/w", "rest/0", "rest/1", "table"]
    assert LAYOUT.leaves["head/w"] == LeafLayout((4, SIZE), "float32", 1)
    assert LAYOUT.leaves["head/w"].padded_shape(4) == (4, 12)
    assert Layout.from_json(LAYOUT.to_json()) == LAYOUT
    shapes = jax.eval_shape(_params)
    assert Layout.of(shapes, DIMS) == LAYOUT


def test_an_optimizers_state_follows_its_parameters():
    params = {"table": jnp.zeros((SIZE, 3)), "inner": {"table": jnp.zeros((2, SIZE))}, "count": jnp.zeros(4)}
    layout = Layout.of(params, {"table": 0, "inner": 1, "count": None})
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    state = layout.of_state(jax.eval_shape(optimizer.init, params))
    dims = {path: leaf.dim for path, leaf in state.leaves.items()}
    assert dims == {
        "1/0/count": None,  # a scalar, whatever its name
        **{f"1/0/{moment}/{path}": leaf.dim for moment in ("mu", "nu") for path, leaf in layout.leaves.items()},
    }
    assert state.leaves["1/0/mu/inner/table"] == LeafLayout((2, SIZE), "bfloat16", 1)

    bare = Layout.of(jnp.zeros((SIZE, 3)), 0)
    state = bare.of_state(jax.eval_shape(optax.adam(1e-3).init, jnp.zeros((SIZE, 3))))
    assert {path: leaf.dim for path, leaf in state.leaves.items()} == {"0/count": None, "0/mu": 0, "0/nu": 0}


def test_statistics_of_another_shape_take_a_dim_of_their_own():
    state = {"row": {"table": jnp.zeros(SIZE)}, "column": {"table": jnp.zeros(3)}}
    layout = Layout.of({"table": jnp.zeros((SIZE, 3))}, 0)
    of_state = layout.of_state(state, {"row/table": -1, "column/table": None})
    assert {path: leaf.dim for path, leaf in of_state.leaves.items()} == {"row/table": 0, "column/table": None}


def test_leaves_are_read_and_brought_one_by_one():
    read = []

    class Source(dict):
        def __getitem__(self, path):
            read.append(path)
            return super().__getitem__(path)

    source = Source(zip("abc", np.eye(3, dtype=np.float32), strict=True))
    layout = Layout.of(dict(source), 0)
    placed = layout.place(source, mesh_of(2), "ipu", like=dict(source))
    assert read == ["a", "b", "c"]
    for _, array in layout.each_whole(placed):
        assert array.flags.owndata  # not a view of a device's memory, which a later step may overwrite
    placed["c"].delete()
    leaves = layout.each_whole(placed)
    assert [next(leaves)[0], next(leaves)[0]] == ["a", "b"]
    with pytest.raises(RuntimeError, match="deleted"):
        next(leaves)


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_placed_is_a_copy(n):
    source = {"table": np.zeros((1024, 64), np.float32), "bias": np.zeros(65536, np.float32)}
    placed = Layout.of(source, {"table": 0, "bias": None}).place(source, mesh_of(n), "ipu")
    for leaf in source.values():
        leaf += 1
    assert not any(np.any(leaf) for leaf in placed.values())


def test_what_was_brought_whole_is_a_copy():
    padded = {"table": np.zeros((4, 2), np.float32), "bias": np.zeros(3, np.float32)}
    whole = Layout.of({"table": padded["table"][:3], "bias": padded["bias"]}, {"table": 0, "bias": None}).whole(padded)
    for leaf in padded.values():
        leaf += 1
    assert not any(np.any(leaf) for leaf in whole.values())


def test_a_memory_map_is_read_in_place(tmp_path):
    table = normal(0, (SIZE, 3))
    np.save(tmp_path / "table.npy", table)
    layout = Layout.of(table, 0)
    placed = layout.place(np.load(tmp_path / "table.npy", mmap_mode="r"), mesh_of(4), "ipu")
    _assert_same_bits(layout.whole(placed), table)


TABLE = np.zeros((SIZE, 3), np.float32)
ONE: Any = Layout.of({"table": TABLE}, 0)
KEY = jax.random.key(0)


def a_leaf(**fields):
    """Return the JSON text of a layout of one leaf, with other fields."""
    return json.dumps({"table": {"shape": [10, 3], "dtype": "float32", "dim": 0} | fields})


@refusals(
    # trees of other leaves than the layout's
    (lambda: ONE.pad({"tabel": TABLE}, 2), "no leaf 'table'", "the layout has", "the tree of this layout"),
    (lambda: ONE.each_whole({"table": TABLE, "more": TABLE}), "a leaf 'more'", "does not", "the tree of this layout"),
    (lambda: ONE.place({}, mesh_of(2), "ipu", like={"table": TABLE}), "the mapping has no leaf 'table'", "the tree"),
    # leaves of another shape or dtype
    (lambda: ONE.place({"table": np.zeros((12, 3), np.float32)}, mesh_of(2), "ipu"), "(12, 3)", "(10, 3)", "the leaf"),
    (lambda: ONE.place({"table": np.zeros((SIZE, 3))}, mesh_of(2), "ipu"), "dtype float64", "float32", "convert it"),
    (lambda: ONE.pad({"table": np.zeros((12, 3))}, 3), "pad: leaf 'table' has shape (12, 3)", "(10, 3)", "the leaf"),
    (lambda: ONE.unpad({"table": TABLE[:9]}), "unpad: leaf 'table' has shape (9, 3)", "padding in dim 0", "the leaf"),
    (lambda: ONE.whole({"table": np.zeros((12, 4))}), "whole: leaf 'table' has shape (12, 4)", "in dim 0", "the leaf"),
    # numbers of parts, and axes
    (lambda: ONE.pad({"table": TABLE}, 0), "parts=0 is out of range", "an int of at least 1"),
    (lambda: ONE.pad({"table": TABLE}, None), "parts=None is not an int", "an int of at least 1"),
    (lambda: Layout.of({"n": 1.0}, None).pad({"n": 1.0}, 0), "leaf 'n' is 1.0", "not an array", "a dtype of its own"),
    (lambda: Layout.of({"n": TABLE}, None).pad({"n": TABLE}, 0), "parts=0 is out of range", "an int of at least 1"),
    (lambda: ONE.shardings({"table": TABLE}, mesh_of(2), "model"), "axis='model'", "not an axis of the", "('ipu',)"),
    *(
        (call, "axis=('data', 'ipu') ", "the name of one mesh axis", "such as 'ipu'")
        for call in (
            lambda: ONE.specs({"table": TABLE}, ("data", "ipu")),
            lambda: ONE.shardings({"table": TABLE}, mesh_of(2), ("data", "ipu")),
            lambda: ONE.place({"table": TABLE}, mesh_of(2), ("data", "ipu")),
        )
    ),
    # leaves and dims that cannot be laid out
    (lambda: Layout.of({"table": TABLE}, {"table": 2}), "leaf 'table': dim=2 ", "shape (10, 3)", "0 to 1, or None"),
    (lambda: Layout.of({"table": TABLE}, {"table": True}), "leaf 'table': dim=True ", "not an int", "or None"),
    (lambda: Layout.of({"table": TABLE}, {"table": 0.0}), "leaf 'table': dim=0.0 ", "not an int", "or None for a leaf"),
    (lambda: Layout.of({"n": np.float32(1)}, 0), "leaf 'n': dim=0 ", "shape ()", "give None"),
    (lambda: Layout.of({"table": TABLE[:0]}, 0), "leaf 'table': dim=0 ", "no rows to split", "dim=None"),
    (lambda: Layout.of({"table": TABLE}, {"tabel": 0}), "dims is not a prefix of the tree", "or None for all its"),
    (lambda: Layout.of({"table": TABLE}, {"table": [0, 1]}), "dims is not a prefix of the tree", "or None for all its"),
    (lambda: Layout.of({"lr": 0.1}, None), "leaf 'lr' is 0.1", "not an array", "a dtype of its own"),
    (lambda: Layout.of({"key": KEY}, None), "leaf 'key'", "key<fry>", "jax.random.key_data"),
    (lambda: Layout.of({"a/b": TABLE, "a": {"b": TABLE}}, None), "the path 'a/b'", "rename one"),
    # an optimizer's state
    (lambda: ONE.of_state({"row": {"table": TABLE[:, 0]}}), "'row/table'", "(10,)", "'table'", "dims={'row/table'"),
    (lambda: ONE.of_state({"mu": {"table": TABLE}}, {"nu/table": 0}), "'nu/table'", "not a leaf", "use ['mu/table']"),
    # JSON
    (lambda: Layout.from_json("[]"), "not list", "an object", "give to_json's"),
    (lambda: Layout.from_json(a_leaf(shape=[10, -3])), "'table': {\"shape\": [10, -3]", "not a leaf", "shape, dtype"),
    (lambda: Layout.from_json(a_leaf(dtype="float33")), "dtype='float33'", "not a dtype", "such as 'float32'"),
)
def test_a_mistake_in_a_layout_is_told_with_its_mend(call, holds):
    with refused(*holds):
        call()

"""Test packing: what is put on the IPUs comes back unchanged, and each IPU holds its own bytes and no others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import make_mesh
from ipu_jax.core.layout.arrays import placed
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.packing import shard_tree, unshard_tree
from support.refusals import refusals, refused

F32, BF16 = "float32", "bfloat16"


def arrays(shapes, dtype=F32, seed=0):
    """Return a tree of random arrays; `shapes` is a tree of shapes, or of `(dtype, shape)`."""
    rng = np.random.default_rng(seed)

    def one(shape):
        kind, shape = shape if shape and isinstance(shape[0], str) else (dtype, shape)
        return jnp.asarray(rng.normal(size=shape), kind)

    return jax.tree.map(one, shapes, is_leaf=lambda s: isinstance(s, tuple))


def plan_layout(params, owners, specs, ipus) -> PackedLayout:
    return placed(PackedLayout.by_group("params", params, [*owners]), owners, specs, ipus, frozen={}, axes={})


def put(params, owners, specs=None, ipus=2, replicas=1):
    return shard_tree(params, plan_layout(params, owners, specs or {}, ipus), make_mesh(replicas, ipus))


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert f.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(f), np.asarray(e))


def test_one_spec_serves_a_whole_group_and_a_prefix_a_part_of_it():
    params = {"h": {"deep": {"w": jnp.ones((4, 3)), "v": jnp.ones((6, 2))}, "b": jnp.ones(5)}}
    whole = put(params, {"h": None}, {"h": P("ipu")})
    assert [leaf.sharding.spec for leaf in whole.arrays] == [P("ipu")] * 3
    part = put(params, {"h": None}, {"h": {"deep": P(None, "ipu"), "b": P()}})
    assert [leaf.sharding.spec for leaf in part.arrays] == [P(), P(None, "ipu"), P(None, "ipu")]
    assert_same(unshard_tree(whole), params)
    assert_same(unshard_tree(part), params)


# slots


@pytest.mark.parametrize(
    ("shapes", "slots"),
    [
        # like stages are stacked at their own shape; unlike leaves share a flat slot as long as the largest
        ({f"s{k}": {"w": (4, 5), "b": (5,)} for k in range(3)}, {(F32, (3, 4, 5)), (F32, (3, 5))}),
        ({"a": (7, 5), "b": (6, 6)}, {(F32, (2, 36))}),
        (  # what is alike is stacked, b with b; the larger w0 is matched with w, flat; w1 is alone, at its own shape
            {"mlp": {"w0": (7, 5), "w1": (5, 4), "b": (4,)}, "classifier": {"w": (4, 3), "b": (4,)}},
            {(F32, (2, 4)), (F32, (2, 5, 4)), (F32, (2, 35))},
        ),
        # dtypes never share a slot
        ({"a": {"x": (F32, (4,)), "y": (BF16, (4,))}, "b": (BF16, (4,))}, {(F32, (2, 4)), (BF16, (2, 4))}),
    ],
)
def test_leaves_share_slots_by_shape_and_then_by_size(shapes, slots):
    sharded = put(arrays(shapes), {name: ipu for ipu, name in enumerate(shapes)}, ipus=len(shapes))
    found = [(slot.dtype.name, slot.shape) for slot in sharded.arrays]
    assert (len(found), set(found)) == (len(slots), slots)


def test_a_spec_that_splits_nothing_is_none():
    """Beside a further axis, leaves of other ranks share a flat slot, which such a spec may be too long for."""
    params, owners = arrays({"a": (3, 2), "b": (4, 3, 2)}), {"a": 0, "b": 1}

    def layout(specs) -> PackedLayout:
        of_groups = PackedLayout.by_group("params", params, [*owners])
        return placed(of_groups, owners, specs, 2, frozen={}, axes={"tensor": 2})

    assert layout({"a": P(None, None), "b": P(None)}) == layout({"b": P()}) == layout({})


def test_a_layout_is_the_same_data_for_the_same_shapes():
    first, second = (plan_layout(arrays({"a": (2, 3), "b": (4,)}, seed=s), {"a": 0, "b": 1}, {}, 2) for s in (0, 1))
    assert first == second
    assert hash(first) == hash(second)


# bad input

KEY = jax.random.key(0)  # jax compiles what makes a first one
F8, F4 = jnp.ones(2, jnp.float8_e4m3fn), jnp.ones((2, 4), jnp.float4_e2m1fn)
MLP, HEAD = {"w": np.ones((2, 2), F32)}, {"w": np.ones((2, 4), F32), "b": np.ones(4, F32)}
COLUMNS = P(None, "ipu")


def plan(mlp: Any = MLP, head: Any = HEAD, spec: Any = COLUMNS, **others):
    return plan_layout({"mlp": mlp, "head": head} | others, {"mlp": 0, "head": None}, {"head": spec}, 2)


def planned(params):
    return plan_layout(params, {"mlp": 0, "head": None}, {"head": COLUMNS}, 2)


NAMED = "The stages name the groups 'head', 'mlp'"
FLOATING, NARROW = "weights must be floating", "weights that are trained must have at least 16 bits"
ELSE, FREEZE = "or carry other data in the batch", "or freeze it"
NEEDS = "give a PartitionSpec of at most {} dims", "with 'ipu' at most once and None elsewhere"


@refusals(
    # groups
    (lambda: planned({"mlp": MLP}), "missing 'head'", NAMED),
    (lambda: plan(tail=1, body=2), "unknown 'body', 'tail'", NAMED),
    (lambda: planned({"mpl": MLP, "head": HEAD}), "missing 'mlp'; unknown 'mpl'", NAMED),
    # weights
    (lambda: plan({"w": np.ones((2, 2), np.int32)}), "params['mlp']['w'] is int32", FLOATING, ELSE),
    (lambda: plan(head=HEAD | {"w": np.ones((2, 4), np.int8)}), "params['head']['w'] is int8", FLOATING, ELSE),
    (lambda: plan([np.ones(2, bool)]), "params['mlp'][0] is bool", FLOATING, ELSE),
    (lambda: plan([np.ones(2, np.complex64)]), "[0] is complex64", "must be real", "jax.lax.complex(re, im)"),
    (lambda: plan([F8]), "params['mlp'][0] is float8_e4m3fn", NARROW, "bfloat16", FREEZE),
    (lambda: plan(head=HEAD | {"w": F4}), "params['head']['w'] is float4_e2m1fn", NARROW, "bfloat16", FREEZE),
    (lambda: plan({"w": 2.5}), "params['mlp']['w'] is 2.5", "must be an array of numbers"),
    (lambda: plan(KEY), "params['mlp'] is key<fry>", "not held among numbers", "jax.random.key_data"),
    (lambda: plan("w.npy"), "params['mlp'] is 'w.npy'", "must be an array of numbers"),
    # specs
    (
        lambda: plan_layout({"mlp": MLP, "head": HEAD}, {"mlp": 0, "head": None}, {}, 2),
        *("group 'head' is concurrent", "no PartitionSpecs", "specs={'head': PartitionSpec(...)}", "'ipu' for the dim"),
    ),
    (lambda: plan(spec={"w": COLUMNS, "b": COLUMNS}), f"(4,) has spec {COLUMNS}", NEEDS[0].format(1), NEEDS[1]),
    *(
        (
            lambda spec=spec: plan(spec={"w": spec, "b": P()}),
            *(f"params['head']['w'] of shape (2, 4) has spec {spec}", NEEDS[0].format(2), NEEDS[1]),
        )
        for spec in (P("replica"), P("ipu", "ipu"), P(("replica", "ipu")), "ipu", 1)
    ),
    *(
        (lambda spec=spec: plan(spec=spec), "specs['head']", "does not fit the tree")
        for spec in ({"w": P()}, {"w": P(), "b": P(), "c": P()}, [P(), P()], None, {"w": (None, "ipu"), "b": P()})
    ),
)
def test_bad_params_and_specs_are_refused_naming_the_leaf(call, holds):
    with refused(*holds):
        call()

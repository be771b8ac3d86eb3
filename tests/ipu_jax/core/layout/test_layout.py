"""Test the layout as plain data: what it says of a tree and its parts, and how it prints."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.tree_parts import Part
from support.refusals import refusals, refused

STACK = np.arange(24, dtype=np.float32).reshape(4, 6)
TREE = {"gain": np.float32(3), "layers": STACK, "table": np.ones((5, 2), "int8")}
GAIN, LAYERS, TABLE = range(3)
GROUPS = {"last": [Part(LAYERS, (3, 4)), Part(GAIN)], "shared": [Part(TABLE)], "first": [Part(LAYERS, (0, 3))]}


def sums(w: Any, x: Any, mb: Any, shared: Any = None) -> Any:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((w, x, mb, shared)))


def test_rows_of_a_leaf_are_named_after_the_first():
    leaves = ["params['layers'][3:]", "params['gain']", "params['table']", "params['layers'][0:]"]
    assert [*map(str, PackedLayout.of("params", TREE, GROUPS).leaves)] == leaves


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_mapping_of_groups_can_be_of_any_kind(kind):
    stages = [Stage(sums, params="b", ipu=0), Stage(sums, params="a", ipu=1)]
    whole = {"b": {"w": np.ones(3, np.float32)}, "a": np.zeros((2, 2), np.float32)}
    placed = Pipeline(stages).shard(kind(whole))
    assert placed.layout == Pipeline(stages).shard(whole).layout
    assert placed.keys() == ["a", "b"]
    assert placed["b"]["w"].tolist() == jax.jit(lambda placed: placed["b"]["w"])(placed).tolist() == [1, 1, 1]
    with pytest.raises(KeyError, match="'c' is not a group: there are 'a', 'b'"):
        placed["c"]


def test_a_layout_prints_a_row_per_leaf():
    stages = [
        Stage(sums, params="first", ipu=0, shared=("scale",)),
        Stage(sums, params="table", ipu=ALL_IPUS),
        Stage(sums, params="last", ipu=1, shared=("scale",)),
    ]
    weights = {"first": {"w": (2, 3), "b": (3,)}, "last": (3, 2), "table": (5, 4), "scale": ()}
    params = jax.tree.map(lambda shape: np.zeros(shape, np.float32), weights, is_leaf=lambda x: isinstance(x, tuple))
    frozen = {"first": {"w": False, "b": True}}
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), specs={"table": P("ipu")}, frozen=frozen)
    assert str(pipeline.shard(params).layout).splitlines() == [
        "Layout of 4 arrays on 2 IPUs",
        "  array  on each IPU    leaf                  shape   place",
        "  0      float32[6]     params['first']['w']  [2, 3]  IPU 0",
        "  0      float32[6]     params['last']        [3, 2]  IPU 1",
        "  1      float32[3]     params['first']['b']  [3]     IPU 0, frozen",
        "  2      float32[]      params['scale']       []      every IPU",
        "  3      float32[3, 4]  params['table']       [5, 4]  dim 0 over the IPUs",
    ]


OTHER = "is not the tree for which the function was cut", "give a tree like that one"


@refusals(
    (lambda of: of.split({**TREE, "more": 1}), OTHER[0], "it has params['more']", OTHER[1]),
    (lambda of: of.split({"gain": 1}), OTHER[0], "it has no params['layers']", OTHER[1]),
    (lambda of: of.split(collections.OrderedDict(TREE)), OTHER[0], "its nodes are", "OrderedDict", OTHER[1]),
    (
        lambda of: of.split(TREE | {"layers": np.ones((4, 5))}),
        "params['layers'] has shape (4, 5)",
        "(4, 6)",
        "give that",
    ),
    (
        lambda of: of.like(TREE | {"table": "t.npy"}),
        "params['table'] has shape ()",
        "cut for (5, 2)",
        "give that shape",
    ),
    (
        lambda of: of.like(TREE | {"gain": "high"}),
        "params['gain'] is 'high'",
        "must be an array of numbers",
        "leave it",
    ),
)
def test_a_tree_that_is_not_like_the_one_that_was_cut_is_refused(call, holds):
    with refused(*holds):
        call(PackedLayout.of("params", TREE, GROUPS))

"""Test the chunks of blocks that are split over further mesh axes, against slices by numpy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import make_mesh
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.layout.layout import Group, PackedLayout
from ipu_jax.core.layout.leaf import Leaf, PackedArray

IPUS = 2
BOTH = ("context", "tensor")
# the leaf's shape, what is split over further axes, the dim that is split over IPUs, and the dim of chunks by hand
SLOT, WHOLE = "slot", "whole"
CASES: dict[str, tuple[tuple[int, ...], P, str | int, int | None]] = {
    "columns": ((7, 8), P(None, "tensor"), SLOT, 0),
    "rows": ((8, 7), P("tensor"), SLOT, 1),
    "heads": ((3, 5, 4), P(None, None, "tensor"), SLOT, 1),
    "inner dim": ((5, 4, 3), P(None, "tensor"), SLOT, 0),
    "two axes on a dim": ((3, 8), P(None, BOTH), SLOT, 0),
    "a vector": ((10,), P("tensor"), SLOT, None),
    "no dim is whole": ((4, 6), P("context", "tensor"), SLOT, None),
    "nothing is split": ((5, 3), P(), SLOT, None),
    "fewer rows than replicas": ((1, 8), P(None, "tensor"), SLOT, 0),
    "on every IPU": ((7, 8), P(None, "tensor"), WHOLE, 0),
    "a vector on every IPU": ((10,), P("tensor"), WHOLE, None),
    "columns over IPUs": ((8, 7), P("tensor"), 1, 1),
    "columns over IPUs, no dim is whole": ((8, 7), P("tensor", "context"), 1, None),
    "rows over IPUs": ((7, 8), P(None, "tensor"), 0, 0),
    "rows over IPUs, wider inside": ((3, 8, 9), P(None, "tensor"), 0, 2),
    "inside over IPUs": ((9, 8, 3), P(None, "tensor"), 2, 0),
    "over IPUs alone": ((7, 3), P(), 0, None),
}


def blocks_of(case: str, replicas: int) -> Blocks:
    """Return one block with a leaf: on IPU 1 if it is in a slot, where IPU 0 has nothing."""
    shape, further, where, _ = CASES[case]
    split = where if isinstance(where, int) else None
    own = tuple(-(-size // IPUS) if d == split else size for d, size in enumerate(shape))
    array = PackedArray(own, "float32", further, is_slot=where == SLOT)
    place: Any = {"ipus": 0, "ipu": 1} if where == SLOT else {"split": split, "shard": None if split is None else own}
    group = Group("group", jax.tree.structure(0), (Leaf("params['w']", shape, "float32", array=0, **place),))
    return Blocks(PackedLayout(IPUS, (group,), jax.tree.structure({"w": 0}), (array,)), replicas=replicas)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return 1 + np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


def padded(array: np.ndarray, dim: int, size: int) -> np.ndarray:
    more = np.zeros((*array.shape[:dim], size - array.shape[dim], *array.shape[dim + 1 :]), array.dtype)
    return np.concatenate([array, more], dim)


def chunks_by_hand(array: np.ndarray, dim: int | None, replicas: int) -> np.ndarray:
    """Return the chunks of one IPU's block, one after another."""
    if dim is None:
        array, dim = array.reshape(-1), 0
    rows = math.ceil(array.shape[dim] / replicas)
    every = padded(array, dim, replicas * rows)
    return np.stack([every.take(range(r * rows, (r + 1) * rows), axis=dim) for r in range(replicas)])


def by_hand(case: str, replicas: int) -> np.ndarray:
    """Return the array in which the leaf's numbers are, (replicas, ipus, ...), where IPUs without it hold zeros."""
    shape, _, where, dim = CASES[case]
    value = numbered(shape)
    of_ipu = {SLOT: [0 * value, value], WHOLE: [value]}.get(str(where))
    if isinstance(where, int):
        local = math.ceil(shape[where] / IPUS)
        every = padded(value, where, IPUS * local)
        of_ipu = [every.take(range(i * local, (i + 1) * local), axis=where) for i in range(IPUS)]
    assert of_ipu is not None
    chunks = [array[None] if replicas == 1 else chunks_by_hand(array, dim, replicas) for array in of_ipu]
    return np.stack(chunks, axis=1)


@pytest.mark.fast(
    "rows-2",
    "inner dim-2",
    "heads-2",
    "two axes on a dim-2",
    "columns over IPUs-2",
    "fewer rows than replicas-2",
    "over IPUs alone-2",
    "columns-3",
    "rows over IPUs, wider inside-3",
)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_chunks_of_a_block_follow_one_another(case, replicas):
    blocks = blocks_of(case, replicas)
    block = numbered(blocks[0].shape)
    chunks = blocks.to_chunks(0, jnp.asarray(block))
    np.testing.assert_array_equal(chunks, chunks_by_hand(block, CASES[case][3], replicas))
    assert chunks.shape == (replicas, *blocks.update_shape(0))
    np.testing.assert_array_equal(blocks.from_chunks(0, chunks), block)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_ipu_masks_what_is_no_leafs_and_takes_its_part(replicas):
    """All cases are in one program."""

    def one(case: str, value: Any) -> Any:
        blocks = blocks_of(case, replicas)
        part = blocks.local_part(0, value)
        if blocks[0].is_slot:
            part = part * (blocks.own_count(0) > 0)
        mask = blocks.leaf_mask(0)
        mask = jnp.ones(part.shape, bool) if mask is None else mask
        return part[None, None], mask[None, None]

    mapped = jax.shard_map(
        lambda values: {case: one(case, value) for case, value in values.items()},
        mesh=make_mesh(replicas, IPUS),
        in_specs=P(),
        out_specs=P("replica", "ipu"),
        check_vma=False,
    )
    for case, (part, mask) in jax.jit(mapped)({case: numbered(shape) for case, (shape, *_) in CASES.items()}).items():
        expected = np.broadcast_to(by_hand(case, replicas), part.shape)
        np.testing.assert_array_equal(part * mask, expected, err_msg=case)
        np.testing.assert_array_equal(mask, expected > 0, err_msg=case)


@pytest.mark.parametrize(
    ("case", "replicas", "spec"),
    [
        ("columns", 1, P(None, "ipu", None, "tensor")),
        ("columns", 2, P("replica", "ipu", None, "tensor")),
        ("two axes on a dim", 2, P("replica", "ipu", None, BOTH)),
        ("a vector", 1, P(None, "ipu", "tensor")),
        ("a vector", 2, P("replica", "ipu")),  # flat chunks are whole on each device
        ("no dim is whole", 2, P("replica", "ipu")),
        ("on every IPU", 1, P(None, None, None, "tensor")),
        ("on every IPU", 2, P("replica", None, None, "tensor")),
        ("columns over IPUs", 2, P("replica", "ipu", "tensor")),
        ("rows over IPUs", 2, P("replica", "ipu", None, "tensor")),
    ],
)
def test_arrays_in_chunks_stay_split(case, replicas, spec):
    assert blocks_of(case, replicas).kept(0, "0.0", "float32").spec == spec

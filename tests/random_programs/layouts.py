"""Test that weights keep their bits on any layout: packed, saved, restored on other IPUs, exported and imported.

    a tree of random bits (`trees.py`) -> on 1 to 8 IPUs, by two random layouts -> read in every way that there is

What each device must hold is worked out in NumPy (`held.py`). Most cases compile nothing but copies.
"""

import itertools
import json
import math
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Checkpoints, Pipeline, Stage, TrainOptions, make_train_step
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.layout.packing import Sharded, arrays_of, sharded_of
from ipu_jax.io import export_weights, import_weights
from random_programs.closeness import assert_same_bits
from random_programs.dice import Dice
from random_programs.held import Side, mesh_of
from random_programs.trees import TRAINED, Spread, Weights, draw_spread, random_bits
from support.trained import quick_compiles


class Case:
    """Weights, two layouts of them, and what is tested besides."""

    def __init__(self, dice: Dice):
        self.weights = Weights(dice)
        self.spreads = [draw_spread(dice, self.weights, self.weights.has_groups and dice.chance(0.6)) for _ in range(2)]
        self.runs, self.shares, self.divides = dice.chance(0.25), dice.chance(0.5), dice.chance(0.5)
        self.keeps = dice.weighted({"": 10, "npz": 3, "safetensors": 4})
        self.seed = dice.number()

    def __str__(self) -> str:
        drawn = f"  runs: {self.runs}, shares: {self.shares}, divides: {self.divides}, keeps: {self.keeps!r}"
        return "\n".join([f"{self.weights}", *map(str, self.spreads), drawn])

    def check(self) -> None:
        dice, sides = Dice("layouts", self.seed, 0), [Side(self.weights, spread) for spread in self.spreads]
        for side in sides:
            side.check_held(side.sharded)
            check_whole(side)
            check_on_an_ipu(side)
            check_leaves(side, dice)
            for replicas in (1, 2, 3):
                check_blocks(side, replicas, dice)
        for one, other in itertools.permutations(sides):
            check_moved(one, other)
        if self.runs:
            check_program(sides[0])
        with tempfile.TemporaryDirectory() as folder:
            if self.keeps:
                check_file(sides, folder, self.keeps)
            if not all(self.weights.frozen):
                with quick_compiles():
                    self._check_checkpoint(dice, folder)

    def _check_checkpoint(self, dice: Dice, folder: str) -> None:
        """Check that a checkpoint is restored on another pipeline, with random bits in optimizer state and average."""
        weights, spreads = self.weights, list[Spread]()
        while weights.has_groups and len(spreads) < 2:
            spread = draw_spread(dice, weights, by_group=True)
            divides = spread.replicas > 1 or not self.divides or spreads
            # XLA cannot reduce over one IPU that is several devices
            spreads += [spread] * bool(divides and (spread.ipus > 1 or not spread.axes))
        saving, restoring = map(self._pipeline, spreads) if spreads else self._cut()
        for pipeline, spread in zip((saving, restoring), spreads, strict=False):
            sharded = pipeline.shard(weights.given)
            Side(weights, spread, sharded.layout).check_held(sharded)
        options = TrainOptions(shard_optimizer=self.divides, ema_decay=0.5)
        # adafactor's means of rows and columns are not split as their matrix is: it needs each matrix in one piece
        factors = spreads and not self.divides
        optimizer = optax.adafactor(0.1, min_dim_size_to_factor=2) if factors else optax.adam(0.1)
        one, other = (make_train_step(pipeline, optimizer, options) for pipeline in (saving, restoring))
        whole = one.whole(one.init(weights.given))
        new = lambda leaf: random_bits(dice, leaf.shape, leaf.dtype.name) if leaf.dtype.name in TRAINED else leaf
        whole["optimizer"] = jax.tree.map(new, whole["optimizer"])
        frozen = jax.tree.unflatten(jax.tree.structure(weights.tree), weights.frozen)
        whole["ema"] = jax.tree.map(lambda leaf, still: leaf if still else new(leaf), whole["ema"], frozen)
        state = one.restore(whole)
        with Checkpoints(f"{folder}/runs", one) as checkpoints:
            checkpoints.save(state, now=True)
        with Checkpoints(f"{folder}/runs", other) as checkpoints:
            found = checkpoints.restore(other.init(_zeros_like(weights.tree)))
        assert found is not None
        assert_same_bits(other.whole(found.state), whole)
        like = jax.tree.leaves(other.restore(whole))  # with padding
        assert_same_bits(jax.tree.leaves(found.state), like)
        assert [array.sharding for array in jax.tree.leaves(found.state)] == [array.sharding for array in like]
        export_weights(f"{folder}/average.npz", state, average=True)
        assert_same_bits(import_weights(f"{folder}/average.npz", _zeros_like(whole["ema"])), whole["ema"])

    def _pipeline(self, spread: Spread) -> Pipeline:
        """Return a pipeline with a layout that was drawn. Nobody runs its stages."""
        idle, stages = lambda *_: 0.0, []
        for name, owner in spread.owners.items():
            if self.shares and owner is None and not any("ipu" in spec for spec in spread.specs[name]):
                stages.append(Stage(idle, shared=(name,)))
            else:
                stages.append(Stage(idle, params=name, ipu=ALL_IPUS if owner is None else owner))
        return Pipeline(stages, mesh=mesh_of(spread), specs=spread.given["specs"], frozen=spread.given["frozen"])

    def _cut(self) -> list[Pipeline]:
        """Return two pipelines of a function, on as many IPUs as were drawn or as can be, in rows along axis 0 or 1."""
        of_rows = lambda leaf: jnp.moveaxis(leaf, 1, 0) if self.shares and leaf.ndim > 1 else leaf

        def loss(params: Any, x: Any) -> Any:
            for leaf in jax.tree.leaves(params):
                for row in of_rows(leaf) if leaf.ndim else [leaf]:
                    x = jnp.sin(x + row.real.astype(jnp.float32).sum())
            return x.sum()

        tree, frozen = self.weights.tree, self.weights.frozen
        how: Any = {"frozen": jax.tree.unflatten(jax.tree.structure(tree), frozen), "replicas": 1 + self.divides}
        rows = sum(len(of_rows(leaf)) if leaf.ndim else 1 for leaf in self.weights.leaves)
        ipus = [min(spread.ipus, 4, max(rows // 2, 1)) for spread in self.spreads]
        return [Pipeline.from_function(loss, tree, np.ones(3, np.float32), ipus=n, **how) for n in ipus]


def check_whole(side: Side) -> None:
    tree = side.weights.tree
    assert_same_bits(packing.unshard_tree(side.sharded), tree)
    if isinstance(tree, dict):
        assert_same_bits(dict(side.sharded), tree)
    values = iter([item.value for item in side.items()])
    of_groups = {group.name: group.tree_of(lambda _: next(values)) for group in side.layout.groups}
    assert_same_bits(side.layout.split(tree), of_groups)
    assert_same_bits(packing.joined(side.layout.join(of_groups)), tree)


def check_on_an_ipu(side: Side) -> None:
    """Check what a program reads on each IPU, without a program."""
    for ipu in range(side.spread.ipus):
        own = [rows[ipu] for rows in side.rows]
        sharded = sharded_of(own, side.layout)
        assert_same_bits(arrays_of(sharded), own)
        for group, leaf, owner, _, value, _ in side.items():
            if owner in (None, ipu):
                found = jax.tree.leaves(packing.read(own, group))[group.leaves.index(leaf)]
                assert_same_bits(found, own[leaf.array] if owner is None else value)


def check_leaves(side: Side, dice: Dice) -> None:
    """Check what leaves say of their places, and that they are read there, and written into any block."""
    names = [array.name for array in side.layout.arrays]
    assert len({*names}) == len(side.wholes)
    paths = [f"params{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(side.weights.tree)]
    for _, leaf, owner, _, value, number in side.items():
        whole, of_user = side.wholes[leaf.array], side.weights.leaves[number]
        assert (leaf.path, leaf.whole_shape) == (paths[number], of_user.shape), f"{leaf}"
        assert_same_bits((leaf.of_whole(of_user), leaf.in_array(whole)), (value, value))
        plain = json.loads(json.dumps(leaf.plain(names[leaf.array])))
        found = Leaf.of_plain(plain)
        assert plain["array"] == names[leaf.array]
        assert found.plain(plain["array"]) == plain
        assert_same_bits((found.in_array(whole), found.of_whole(of_user)), (value, value))
        check_pieces(found, whole, of_user, dice)
        index = _block(dice, whole.shape, owner, value.shape)
        alone = whole.copy()
        if owner is not None:
            alone[np.arange(len(alone)) != owner] = 0
        assert_same_bits(packing.block_of([leaf], lambda _, value=value: value, whole.shape, index), alone[index])


def check_moved(one: Side, other: Side) -> None:
    """Check that leaves that are read by the places of one layout, and written by another one's, are that one's."""
    leaves = {item.leaf.path: np.empty(item.leaf.whole_shape, item.value.dtype) for item in one.items()}
    for _, leaf, *_ in one.items():
        leaves[leaf.path][leaf.part.index] = leaf.in_array(one.wholes[leaf.array])
    value_of = lambda leaf: leaf.of_whole(leaves[leaf.path])
    written = [
        packing.block_of(held, value_of, whole.shape, (slice(None),) * whole.ndim)
        for held, whole in zip(other.layout.held_by_array, other.wholes, strict=True)
    ]
    assert_same_bits(written, other.wholes)


def check_program(side: Side) -> None:
    """Check that a program that reads each group of one tree, and writes it over zeros, returns that tree."""
    layout = side.layout
    own = lambda spec: P(*(entry if entry == "ipu" else None for entry in spec))
    specs = jax.tree.map(own, packing.specs_of(layout), is_leaf=lambda spec: isinstance(spec, P))

    def program(old: Sharded, new: Sharded, zero: Any) -> Sharded:
        arrays, given, ipu = arrays_of(old), arrays_of(new), lax.axis_index("ipu")
        for group in layout.groups:
            written = packing.write(arrays, group, packing.read(given, group), zero)
            owner = side.spread.owners[group.name]
            is_own = owner is None or ipu == owner
            arrays = [jnp.where(is_own, *both) for both in zip(written, arrays, strict=True)]
        return sharded_of(arrays, layout)

    how: Any = {"in_specs": (specs, specs, P()), "out_specs": specs, "axis_names": {"replica", "ipu"}}
    mapped = jax.jit(jax.shard_map(program, mesh=side.mesh, check_vma=False, **how))
    zeros = packing.shard_tree(_zeros_like(side.weights.tree), layout, side.mesh)
    assert_same_bits(mapped(zeros, side.sharded, np.int32(0)).arrays, side.wholes)


def check_file(sides: list[Side], folder: str, suffix: str) -> None:
    """Check names and bits in files of both layouts, and what they return on the other one and as a plain tree."""
    weights, path = sides[0].weights, f"{folder}/weights.{suffix}"
    escaped = lambda key: str(getattr(key, "key", getattr(key, "idx", ""))).replace("~", "~0").replace("/", "~1")
    leaves, zeros = jax.tree.leaves_with_path(weights.tree), _zeros_like(weights.tree)
    expected = {"/".join(map(escaped, path)): (leaf.shape, leaf.tobytes()) for path, leaf in leaves}
    for one, other in itertools.permutations(sides):
        export_weights(path, one.sharded)
        if suffix == "npz":
            with np.load(path) as file:
                found = {name: (file[name].shape, file[name].tobytes()) for name in file}
        else:
            arrays = safetensors.deserialize(pathlib.Path(path).read_bytes())
            found = {name: (tuple(array["shape"]), bytes(array["data"])) for name, array in arrays}
        assert found == expected
        assert_same_bits(import_weights(path, zeros), weights.tree)
        shapes = packing.shapes_on(other.layout, other.mesh)
        for like in (packing.shard_tree(zeros, other.layout, other.mesh), shapes):
            other.check_held(import_weights(path, like))
        facts = lambda tree: [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(tree)]
        assert facts(shapes) == facts(other.sharded)


def check_pieces(leaf: Leaf, array: Any, of_user: Any, dice: Dice) -> None:
    """Check random blocks of a leaf that are read from its array, and that its pieces are all of it."""
    size = 0
    for block, piece in leaf.pieces():
        sizes = [part.stop - part.start for part in block]
        size += math.prod(sizes)
        index = tuple(slice(*sorted((dice.between(0, n), dice.between(0, n)))) for n in sizes)
        assert_same_bits(piece.block_in(array, index), of_user[block][index])
    assert size == leaf.size


def check_blocks(side: Side, replicas: int, dice: Dice) -> None:
    """Check that each leaf is read back from its optimizer's block, and that a block is an array in chunks."""
    blocks = Blocks(side.layout, replicas=replicas)
    values = {item.leaf: item.value for item in side.items() if not item.leaf.frozen}
    assert {*blocks.leaves} == values.keys()
    kept = [blocks.kept(k, "x", array.dtype) for k, array in enumerate(blocks.arrays)]
    numbers = {leaf.path: side.weights.leaves[leaf.part.leaf] for leaf in blocks.leaves}
    leaves = [blocks.kept_leaf(n, blocks.block_of(n)) for n in range(len(blocks.leaves))]
    of_kept = {leaf: values[own] for own, leaf in zip(blocks.leaves, leaves, strict=True)}
    held = [[leaf for leaf in leaves if leaf.array == k] for k in range(len(kept))]
    shapes = [array.shape_on_mesh(side.spread.ipus) for array in kept]
    both = zip(held, shapes, strict=True)
    arrays = [packing.block_of(own, of_kept.__getitem__, shape, (slice(None),) * len(shape)) for own, shape in both]
    frozen = {leaf.array for leaf in side.layout.leaves if leaf.frozen}  # there a block is zero, and its slot is not
    for own, leaf in zip(blocks.leaves, leaves, strict=True):
        array, dim = arrays[leaf.array], blocks.chunk_dim(leaf.array)
        found = Leaf.of_plain(leaf.plain("as in a file"))
        assert_same_bits(found.in_array(array), values[own])
        check_pieces(found, array, numbers[own.path], dice)
        for ipu, row in enumerate(side.rows[own.array] if own.array not in frozen else []):
            chunks = array[:, min(ipu, array.shape[1] - 1)]  # all IPUs have the same, or each its own
            joined = chunks.reshape(-1) if dim is None else np.concatenate([*chunks], dim)
            inside = slice(row.size) if dim is None else tuple(map(slice, row.shape))
            assert_same_bits(joined[inside].reshape(row.shape), row)
            assert np.count_nonzero(joined) == np.count_nonzero(row)


def _block(dice: Dice, shape: tuple[int, ...], owner: int | None, leaf: tuple[int, ...]) -> tuple[slice, ...]:
    """Return a random block of an array of this shape, with the row of the leaf if the array has rows of IPUs."""
    starts = [dice.between(0, size) for size in shape]
    block = [slice(start, dice.between(start, size)) for start, size in zip(starts, shape, strict=True)]
    if owner is not None:
        block[0] = slice(dice.between(0, owner), dice.between(owner + 1, shape[0]))
        if shape[1:] != leaf:  # a flat slot is never split
            block[1:] = [slice(0, size) for size in shape[1:]]
    return tuple(block)


def _zeros_like(tree: Any) -> Any:
    return jax.tree.map(np.zeros_like, tree)

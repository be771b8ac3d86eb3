"""Lay an optimizer's state out over the IPUs: each part of it next to the leaf that it belongs to.

adam's (count, mu, nu), for a leaf on IPU 0 and a leaf on IPU 1 in the same block

kept with the block     mu, nu    arrays (replicas, ipus, *update_shape): each IPU has mu and nu of its leaf
on every IPU            count
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Dtype, Tree, Value, Var
from ipu_jax.base.keys import dtype_named
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.layout.layout import Group, PackedLayout
from ipu_jax.core.layout.leaf import Leaf, PackedArray
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.layout.tree_parts import Part, is_rows
from ipu_jax.core.optimizer._analysis import UpdateAnalysis


class StateLayout:
    """Say where the parts of an optimizer's state are.

    A part is a leaf of optax's state tree, or rows of one. It is kept with one leaf of the weights, in an array that is
    laid out like the leaf's block, or all IPUs hold it. If the leaf's owner keeps a part in another shape than the
    leaf's, the array has it flat.

    Args:
        analysis: the optimizer's update.
        blocks: where the weights are.

    Attributes:
        layout: where the leaves of optax's state tree are. First come the arrays that are kept with the blocks, block
            after block, then those that every IPU holds.
        variables: per part, its variable in the update.
        replicated: the numbers of the parts that all IPUs hold.
        array_of: per leaf of the weights, the parts that are kept with it, each with the number of its array in the
            leaf's block.
    """

    def __init__(self, analysis: UpdateAnalysis, blocks: Blocks):
        n = len(blocks.leaves)
        self._analysis, self._blocks = analysis, blocks
        self.variables: list[Var] = analysis.jaxpr.invars[n : -1 - n]
        self.replicated = [i for i in range(len(self.variables)) if i not in analysis.leaf_of_state]
        self._arrays: list[list[tuple[str, int | None]]] = [[] for _ in range(len(blocks))]  # dtype, size of a flat one
        self.array_of: list[dict[int, int]] = [{} for _ in range(n)]
        for i, leaf in analysis.leaf_of_state.items():
            self._assign_array(i, leaf)
        self._starts = [*itertools.accumulate(map(len, self._arrays), initial=0)]
        self.layout = self._packed()

    def _assign_array(self, i: int, leaf: int) -> None:
        """Choose the array for part `i` of the state: an array that is free for this leaf, or a new array."""
        arrays, taken = self._arrays[self._blocks.block_of(leaf)], self.array_of[leaf].values()
        dtype, is_flat = str(self.variables[i].aval.dtype), self.is_flat(i)
        fitting = [p for p, (d, size) in enumerate(arrays) if (d, size is not None) == (dtype, is_flat)]
        place = next((p for p in fitting if p not in taken), len(arrays))
        if place == len(arrays):
            arrays.append((dtype, 0 if is_flat else None))
        if is_flat:
            arrays[place] = (dtype, max(arrays[place][1] or 0, self.variables[i].aval.size))
        self.array_of[leaf][i] = place

    def _packed(self) -> PackedLayout:
        kept = [
            self._blocks.kept(k, f"{k}.{p}", dtype, size)
            for k, of_block in enumerate(self._arrays)
            for p, (dtype, size) in enumerate(of_block)
        ]
        avals = [self.variables[i].aval for i in self.replicated]
        everywhere = [
            PackedArray(aval.shape, str(aval.dtype), is_slot=False, name=f"replicated.{number}")
            for number, aval in enumerate(avals)
        ]
        treedef, leaves = self._analysis.state_treedef, list[Leaf]()
        numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
        for number, (path, node) in enumerate(jax.tree.leaves_with_path(numbered, is_leaf=is_rows)):
            name, parts = f"optimizer{jax.tree_util.keystr(path)}", [(node, Part(number), None)]
            if is_rows(node):
                rows = [self.variables[i].aval.shape[node.axis] for i in node.parts]
                ends = itertools.pairwise(itertools.accumulate(rows, initial=0))
                of_rows = [Part(number, of, node.axis) for of in ends]
                parts = [(i, part, sum(rows)) for i, part in zip(node.parts, of_rows, strict=True)]
            leaves += [self._leaf(i, path=name, part=part, size_of_rows=size) for i, part, size in parts]
        return PackedLayout(
            self._blocks.ipus,
            (Group("optimizer", treedef, tuple(leaves)),),
            jax.tree.structure(numbered, is_leaf=is_rows),
            (*kept, *everywhere),
            "optimizer",
        )

    def _leaf(self, i: int, **own: Any) -> Leaf:
        """Return where part `i` of the state is."""
        aval, leaf = self.variables[i].aval, self._analysis.leaf_of_state.get(i)
        own |= {"shape": tuple(aval.shape), "dtype": str(aval.dtype)}
        if leaf is None:
            return Leaf(**own, array=self._starts[-1] + self.replicated.index(i))
        array = self._starts[self._blocks.block_of(leaf)] + self.array_of[leaf][i]
        if self.is_flat(i):
            return Leaf(**own, array=array, ipus=1, ipu=self._blocks.ipu_of(leaf))
        return self._blocks.kept_leaf(leaf, array, **own)

    def is_flat(self, i: int) -> bool:
        """Return whether a leaf's owner keeps part `i` of the state in its own shape, in a flat array."""
        return self.variables[i] in self._analysis.owned

    def check_whole(self, state: Tree) -> None:
        """Raise `ValueError` unless optax's state tree is of this optimizer and for these weights."""
        expected = [(leaf.whole_shape, leaf.dtype) for leaf, *_ in self.layout.parts]
        leaves, treedef = jax.tree.flatten(state)
        found = [(np.shape(leaf), jnp.asarray(leaf).dtype.name) for leaf in leaves]
        if treedef != self.layout.treedef or found != expected:
            raise ValueError(
                f"the saved optimizer state has leaves {found} in {treedef}, but this optimizer's state for these "
                f"weights has {expected} in {self.layout.treedef}: give the one it was saved with"
            )

    def fits(self, state: Tree) -> bool:
        """Return whether a state is from this optimizer, for weights laid out like these."""
        if not isinstance(state, Sharded) or state.layout != self.layout:
            return False
        return self._shapes == [(array.shape, array.dtype) for array in state.arrays]

    @functools.cached_property
    def _shapes(self) -> list[tuple[tuple[int, ...], Dtype]]:
        return [(array.shape_on_mesh(self.layout.ipus), dtype_named(array.dtype)) for array in self.layout.arrays]

    def by_block(self, arrays: Sequence[Value]) -> tuple[list[list[Value]], list[Value]]:
        """Return the arrays of a state that are kept with each block, and those that every IPU holds."""
        kept = [list(arrays[start:stop]) for start, stop in itertools.pairwise(self._starts)]
        return kept, list(arrays[self._starts[-1] :])

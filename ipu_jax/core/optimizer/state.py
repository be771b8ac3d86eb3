"""Lay an optimizer's state out over the IPUs: each part of it next to the leaf that it belongs to.

adam's (count, mu, nu), for a leaf on IPU 0 and a leaf on IPU 1 in the same block

per_block     [[mu, nu]]    arrays (replicas, ipus, *update_shape): each IPU has mu and nu of its leaf
replicated    [count]
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Params, Tree, Value, Var
from ipu_jax.base.keys import with_keys, without_keys
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.layout.layout import WHOLE
from ipu_jax.core.layout.place import Place
from ipu_jax.core.layout.tree_parts import Within, divided, is_rows, joined
from ipu_jax.core.mesh.instances import on_host
from ipu_jax.core.optimizer._analysis import UpdateAnalysis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """Hold an optimizer's state as it is laid out on the IPUs.

    Attributes:
        per_block: per block, the arrays that are kept with it, such as adam's two moments. An array is laid out like
            its block. If a leaf's owner keeps a part in another shape than the leaf's, the array contains it flat.
        replicated: the parts that all IPUs hold: step counts, schedules, keys, norms of everything.
        kind: static; the structure of the state as optax's tree, and the places of the weights, to recognise the state
            of another optimizer or of weights on other IPUs.
    """

    per_block: list[list[Value]]
    replicated: list[Value]
    kind: str = dataclasses.field(default="", metadata={"static": True})


class StateLayout:
    """Lay whole optimizer states out in arrays with `init` and `restore`, and return them whole with `whole`.

    A part is a leaf of optax's state tree. It is kept with one leaf of the weights, or all IPUs hold it.

    Args:
        analysis: the optimizer's update.
        blocks: where the weights are.

    Attributes:
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
        self._kind = f"{analysis.state_treedef} {blocks.blocks} {blocks.leaves}"
        self._arrays: list[list[tuple[str, int | None]]] = [[] for _ in blocks]  # dtype, and the size of a flat one
        self.array_of: list[dict[int, int]] = [{} for _ in range(n)]
        for i, leaf in analysis.leaf_of_state.items():
            self._assign_array(i, leaf)

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

    def is_flat(self, i: int) -> bool:
        """Return whether a leaf's owner keeps part `i` of the state in its own shape, in a flat array."""
        return self.variables[i] in self._analysis.owned

    def init(self, optimizer: optax.GradientTransformation, params: Params) -> OptimizerState:
        """Return an optimizer's first state, in host arrays of the global shapes (replicas, ipus, *update_shape).

        Args:
            optimizer: the optimizer of the analysed update.
            params: the logical tree, whole.
        """
        return self._divided(jax.tree.leaves(divided(jax.jit(optimizer.init)(joined(params)), like=self._parts)))

    @property
    def _parts(self) -> Tree:
        """Return optax's state tree of shapes, with `Rows` where a leaf is divided."""
        return jax.tree.unflatten(self._analysis.state_treedef, [v.aval for v in self.variables])

    def shapes(self) -> OptimizerState:
        """Return what `init` returns, with `jax.ShapeDtypeStruct`s in place of arrays."""
        per_block = [[jax.ShapeDtypeStruct(*of) for of in self._global_shapes(k)] for k in range(len(self._blocks))]
        avals = (self.variables[i].aval for i in self.replicated)
        replicated = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return OptimizerState(per_block, replicated, self._kind)

    def specs(self, state: OptimizerState) -> OptimizerState:
        """Return the PartitionSpec of each array of a state. A flat array has no dims of its block to split."""

        def spec(k: int, size: int | None) -> PartitionSpec:
            of_block = self._blocks.spec(k)
            return of_block if size is None else PartitionSpec(*of_block[:2])

        per_block = [[spec(k, size) for _, size in arrays] for k, arrays in enumerate(self._arrays)]
        return dataclasses.replace(state, per_block=per_block, replicated=[WHOLE] * len(self.replicated))

    def restore(self, state: Tree) -> OptimizerState:
        """Lay out optax's state tree, such as `whole` returned, in the same way as `init` does with the first state.

        Raises:
            ValueError: the state is from another optimizer, or of other weights.
        """
        expected = [(v.aval.shape, v.aval.dtype.name) for v in self.variables]
        with contextlib.suppress(ValueError):  # another tree: the comparison says so
            state = divided(state, like=self._parts)
        leaves, treedef = jax.tree.flatten(state)
        found = [(np.shape(leaf), jnp.asarray(leaf).dtype.name) for leaf in leaves]
        if treedef != self._analysis.state_treedef or found != expected:
            raise ValueError(
                f"the saved optimizer state has leaves {found} in {treedef}, but this optimizer's state for these "
                f"weights has {expected} in {self._analysis.state_treedef}: give the one it was saved with"
            )
        return self._divided(leaves)

    def _divided(self, leaves: Sequence[Value]) -> OptimizerState:
        per_block = [
            [np.zeros(shape, dtype) for shape, dtype in self._global_shapes(k)] for k in range(len(self._blocks))
        ]
        for i, leaf in self._analysis.leaf_of_state.items():
            k, value = self._blocks.block_of(leaf), np.asarray(leaves[i])
            array = per_block[k][self.array_of[leaf][i]]
            if self.is_flat(i):
                array[0, self._blocks.ipu_of(leaf), : value.size] = value.reshape(-1)
            else:
                self._blocks.write_leaf(leaf, value, array)
        return OptimizerState(per_block, [jnp.asarray(leaves[i]) for i in self.replicated], self._kind)

    def _global_shapes(self, k: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the global shapes and the dtypes of a block's state arrays."""
        shape = self._blocks.global_shape(k)
        return [(shape if size is None else (*shape[:2], size), dtype) for dtype, size in self._arrays[k]]

    def fits(self, state: Tree) -> bool:
        """Return whether a state is from this optimizer, for weights laid out like these."""
        if not isinstance(state, OptimizerState):
            return False
        per_block = [self._global_shapes(k) for k in range(len(self._blocks))]
        replicated = [(self.variables[i].aval.shape, str(self.variables[i].aval.dtype)) for i in self.replicated]
        found = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), (state.per_block, state.replicated))
        return (state.kind, *found) == (self._kind, per_block, replicated)

    def whole(self, state: OptimizerState) -> Tree:
        """Return a copy of the whole state as optax's tree: the inverse of `restore`.

        Communicates one all-gather per array that is split over several instances.
        """
        leaves: list[Value] = [None] * len(self.variables)
        for i, value in zip(self.replicated, state.replicated, strict=True):
            leaves[i] = copied(value)
        in_array: dict[tuple[int, int], list[int]] = {}  # a split array is read once, for all parts that are in it
        for i, leaf in self._analysis.leaf_of_state.items():
            in_array.setdefault((self._blocks.block_of(leaf), self.array_of[leaf][i]), []).append(i)
        for (k, place), parts in sorted(in_array.items()):
            array = on_host(state.per_block[k][place])
            for i in parts:
                leaves[i] = jnp.array(self._place(i, "", path="").leaf(array))
        return joined(jax.tree.unflatten(self._analysis.state_treedef, leaves))

    def places(self, prefix: str) -> list[Place]:
        """Return where each leaf of the optimizer's own state is, in the order of optax's tree.

        The arrays of an `OptimizerState` are named `prefix.block.number` and `prefix.replicated.number`.
        """
        numbered = jax.tree.unflatten(self._analysis.state_treedef, list(range(len(self.variables))))
        places = []
        for path, node in jax.tree.leaves_with_path(numbered, is_leaf=is_rows):
            name, start = f"{prefix}{jax.tree_util.keystr(path)}", 0
            if not is_rows(node):
                places.append(self._place(node, prefix, path=name))
                continue
            rows = [self.variables[i].aval.shape[node.axis] for i in node.parts]
            for i, count in zip(node.parts, rows, strict=True):
                places.append(self._place(i, prefix, path=name, rows=Within(start, sum(rows), node.axis)))
                start += count
        return places

    def _place(self, i: int, prefix: str, **own: Value) -> Place:
        aval, leaf = self.variables[i].aval, self._analysis.leaf_of_state.get(i)
        own |= {"shape": tuple(aval.shape), "dtype": str(aval.dtype)}
        if leaf is None:
            return Place(**own, array=f"{prefix}.replicated.{self.replicated.index(i)}")
        k = self._blocks.block_of(leaf)
        array = f"{prefix}.{k}.{self.array_of[leaf][i]}"
        if self.is_flat(i):
            return Place(**own, array=array, ipus=1, ipu=self._blocks.ipu_of(leaf))
        return dataclasses.replace(self._blocks.place(leaf, array), **own)

    def assembled(self, leaves: Sequence[Value]) -> Tree:
        """Return optax's tree, as `whole` returns it, from its leaves in the order of `places`."""
        numbered = jax.tree.unflatten(self._analysis.state_treedef, list(range(len(self.variables))))
        return jax.tree.unflatten(jax.tree.structure(numbered, is_leaf=is_rows), leaves)


def copied(value: Value) -> Value:
    """Copy numbers or keys that all devices hold to a new array on the default device."""
    return with_keys(jnp.array(np.asarray(without_keys(value))), value)

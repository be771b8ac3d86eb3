"""Run an optimizer's update where the weights are: each IPU updates its own leaves, shards and replica chunks.

`_analysis.analyze_update` finds what is computed where; this module computes it, inside the mapped program. IPUs that
hold different leaves in one block run one program for it if the optimizer does the same to these leaves, which a
comparison of the traced programs shows. Otherwise a `switch` chooses among the programs. No collective is inside it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core

from ipu_jax._instances import on_host
from ipu_jax._jaxprs import bound
from ipu_jax._keys import is_key
from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.optimizer._analysis import LeafReduction, analyze_update
from ipu_jax.optimizer._evaluate import LeafEvaluator
from ipu_jax.optimizer._reductions import combined, partial_result, partial_shape, sent_together, size_of
from ipu_jax.optimizer.blocks import Blocks
from ipu_jax.weights.place import Place

# (leaf, the block's arrays, evaluator) -> arrays, of the same shapes for each leaf of a block
_LeafProgram = Callable[[int, Sequence[Any], LeafEvaluator], list[Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """Hold an optimizer's state, as it is laid out on the IPUs.

    Attributes:
        per_block: per block, the arrays that are kept with it, such as adam's two moments. An array is laid out as its
            block is, or contains in flat form what a leaf's owner keeps in another shape than the leaf's.
        replicated: what all IPUs hold: step counts, schedules, keys, norms of everything.
        kind: static; the structure of the state as optax knows it, by which another optimizer's state is recognised.
    """

    per_block: list[list[Any]]
    replicated: list[Any]
    kind: str = dataclasses.field(default="", metadata={"static": True})


class ShardedUpdate:
    """Run one optimizer's update for weights in given blocks.

    `init` and `restore` make the state, `apply` updates weights and state inside the mapped program, `whole` returns
    the state as optax knows it.

    Args:
        optimizer: any `optax.GradientTransformation`.
        blocks: where the weights are.

    Attributes:
        analysis: what of the update is computed where.

    Raises:
        ValueError: the optimizer needs in one piece what is in parts; the message names the leaf and the operation.
    """

    def __init__(self, optimizer: optax.GradientTransformation, blocks: Blocks):
        self.optimizer, self.blocks = optimizer, blocks
        self.analysis = analysis = analyze_update(optimizer, blocks)
        n, jaxpr = len(blocks.leaves), analysis.jaxpr
        self._gradients, self._params = jaxpr.invars[:n], jaxpr.invars[-1 - n : -1]
        self._state, self._loss = jaxpr.invars[n : -1 - n], jaxpr.invars[-1]
        self._updates, self._new_state = jaxpr.outvars[:n], jaxpr.outvars[n:]
        self._replicated = [i for i in range(len(self._state)) if i not in analysis.leaf_of_state]
        self._kind = str(analysis.state_treedef)
        # per block, its state arrays: dtype, and the size of a flat one; per leaf, the array of each part of its state
        self._arrays: list[list[tuple[str, int | None]]] = [[] for _ in blocks]
        self._array_of: list[dict[int, int]] = [{} for _ in range(n)]
        for i, leaf in analysis.leaf_of_state.items():
            self._assign_array(i, leaf)

    def _assign_array(self, i: int, leaf: int) -> None:
        """Choose the array that part `i` of the state is in: one that is free for this leaf, or a new one."""
        arrays, taken = self._arrays[self.blocks.block_of(leaf)], self._array_of[leaf].values()
        dtype, is_flat = str(self._state[i].aval.dtype), self._is_flat(i)
        fitting = [p for p, (d, size) in enumerate(arrays) if (d, size is not None) == (dtype, is_flat)]
        place = next((p for p in fitting if p not in taken), len(arrays))
        if place == len(arrays):
            arrays.append((dtype, 0 if is_flat else None))
        if is_flat:
            arrays[place] = (dtype, max(arrays[place][1] or 0, self._state[i].aval.size))
        self._array_of[leaf][i] = place

    def _is_flat(self, i: int) -> bool:
        """Return whether a leaf's owner keeps part `i` of the state in its own shape, in a flat array."""
        return self._state[i] in self.analysis.owned

    # on the host

    def init(self, params: Any) -> OptimizerState:
        """Return the optimizer's first state, in host arrays of the global shapes (replicas, ipus, *update_shape).

        Args:
            params: the logical tree, whole.
        """
        return self._divided(jax.tree.leaves(jax.jit(self.optimizer.init)(params)))

    def restore(self, state: Any) -> OptimizerState:
        """Return a state as optax knows it, such as `whole` returned, laid out as `init` lays out the first one.

        Raises:
            ValueError: the state is another optimizer's, or of other weights.
        """
        expected = [(v.aval.shape, v.aval.dtype.name) for v in self._state]
        leaves, treedef = jax.tree.flatten(state)
        found = [(np.shape(leaf), jnp.asarray(leaf).dtype.name) for leaf in leaves]
        if treedef != self.analysis.state_treedef or found != expected:
            raise ValueError(
                f"the saved optimizer state has leaves {found} in {treedef}, but this optimizer's state for these "
                f"weights has {expected} in {self.analysis.state_treedef}: give the one it was saved with"
            )
        return self._divided(leaves)

    def _divided(self, leaves: Sequence[Any]) -> OptimizerState:
        per_block = [
            [np.zeros(shape, dtype) for shape, dtype in self._global_shapes(k)] for k in range(len(self.blocks))
        ]
        for i, leaf in self.analysis.leaf_of_state.items():
            k, value = self.blocks.block_of(leaf), np.asarray(leaves[i])
            array = per_block[k][self._array_of[leaf][i]]
            if self._is_flat(i):
                array[0, self.blocks[k].leaves.index(leaf), : value.size] = value.reshape(-1)
                continue
            for ipu, part in self.blocks.host_parts(leaf, value):
                array[:, ipu] = part
        return OptimizerState(per_block, [jnp.asarray(leaves[i]) for i in self._replicated], self._kind)

    def _global_shapes(self, k: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the global shapes and the dtypes of a block's state arrays."""
        shape = self.blocks.global_shape(k)
        return [(shape if size is None else (*shape[:2], size), dtype) for dtype, size in self._arrays[k]]

    def check(self, state: OptimizerState) -> None:
        """Raise `ValueError` unless a state is this optimizer's, for weights laid out as these are."""
        per_block = [self._global_shapes(k) for k in range(len(self.blocks))]
        replicated = [(self._state[i].aval.shape, str(self._state[i].aval.dtype)) for i in self._replicated]
        found = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), (state.per_block, state.replicated))
        if (state.kind, *found) != (self._kind, per_block, replicated):
            raise ValueError(
                "state.optimizer is another optimizer's, or of weights that lie otherwise: use the step that made it, "
                "or begin anew with its weights, step.init(other.whole(state)['params'], ...)"
            )

    def whole(self, state: OptimizerState) -> Any:
        """Return the optimizer's own state, whole, as optax knows it, in copies: the inverse of `init`.

        Communicates one all-gather per array that is split over several instances.
        """
        leaves: list[Any] = [None] * len(self._state)
        for i, value in zip(self._replicated, state.replicated, strict=True):
            leaves[i] = copied(value)
        in_array: dict[tuple[int, int], list[int]] = {}  # a split array is read once, for all parts that are in it
        for i, leaf in self.analysis.leaf_of_state.items():
            in_array.setdefault((self.blocks.block_of(leaf), self._array_of[leaf][i]), []).append(i)
        for (k, place), parts in sorted(in_array.items()):
            array = on_host(state.per_block[k][place])
            for i in parts:
                leaf, aval = self.analysis.leaf_of_state[i], self._state[i].aval
                if self._is_flat(i):
                    flat = array[0, self.blocks[k].leaves.index(leaf), : aval.size]
                    leaves[i] = jnp.array(flat.reshape(aval.shape))
                else:
                    leaves[i] = jnp.asarray(self.blocks.host_leaf(leaf, array))
        return jax.tree.unflatten(self.analysis.state_treedef, leaves)

    def places(self, prefix: str) -> list[Place]:
        """Return where each leaf of the optimizer's own state is, in the order of `analysis.state_treedef`.

        The arrays of an `OptimizerState` are named `prefix.block.number` and `prefix.replicated.number`.
        """
        paths, _ = jax.tree.flatten_with_path(
            jax.tree.unflatten(self.analysis.state_treedef, list(range(len(self._state))))
        )
        places = []
        for i, (path, _) in enumerate(paths):
            aval, leaf = self._state[i].aval, self.analysis.leaf_of_state.get(i)
            own = {
                "path": f"{prefix}{jax.tree_util.keystr(path)}",
                "shape": tuple(aval.shape),
                "dtype": str(aval.dtype),
            }
            if leaf is None:
                places.append(Place(**own, array=f"{prefix}.replicated.{self._replicated.index(i)}"))
                continue
            k = self.blocks.block_of(leaf)
            array = f"{prefix}.{k}.{self._array_of[leaf][i]}"
            if self._is_flat(i):
                places.append(Place(**own, array=array, ipus=1, ipu=self.blocks[k].leaves.index(leaf)))
            else:
                places.append(dataclasses.replace(self.blocks.place(leaf, array), **own))
        return places

    # inside the program

    def apply(
        self, gradients: Sequence[Any], state: OptimizerState, params: Sequence[Any], loss: Any
    ) -> tuple[list[Any], OptimizerState]:
        """Return the weights after an update, unrounded, and the optimizer's new state.

        Communicates one all_gather of a few numbers for each level of norms over leaves of several IPUs, or over the
        parts of one leaf.

        Args:
            gradients: per block, in its update shape, and already reduced over the replicas.
            state: its arrays are this IPU's, without the dims of replicas and IPUs.
            params: per block, in its update shape.
            loss: for optimizers that ask for `value=`.

        Returns:
            Per block the weights plus their updates, in float32 where they are narrower, and the new state.
        """
        analysis, jaxpr = self.analysis, self.analysis.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, analysis.consts, strict=True))
        env[self._loss] = loss
        env.update({self._state[i]: v for i, v in zip(self._replicated, state.replicated, strict=True)})
        for leaf in range(len(self.blocks.leaves)):
            if self._gradients[leaf] not in analysis.leaf_of:
                k = self.blocks.block_of(leaf)
                env[self._gradients[leaf]], env[self._params[leaf]] = gradients[k], params[k]
        arrays = [[g, p, *of_block] for g, p, of_block in zip(gradients, params, state.per_block, strict=True)]
        for level, eqns in enumerate(analysis.replicated):
            for eqn in eqns:
                env.update(zip(eqn.outvars, bound(eqn, [_value_of(v, env) for v in eqn.invars]), strict=True))
            for dtype, together in sent_together(analysis.reductions[level]):
                env.update(self._gather(dtype, together, arrays, env))
        results = [self._new_arrays(k, of_block, env) for k, of_block in enumerate(arrays)]
        replicated = [_value_of(self._new_state[i], env) for i in self._replicated]
        new = dataclasses.replace(state, per_block=[of_block[1:] for of_block in results], replicated=replicated)
        return [weights for weights, *_ in results], new

    def _new_arrays(self, k: int, arrays: list[Any], env: dict[Any, Any]) -> list[Any]:
        """Return a block's weights plus their update, and its new state arrays."""
        new, mask = self._on_block(k, arrays, env, self._updated_leaf), self.blocks.leaf_mask(k)
        if mask is None:
            return new
        # elements that belong to no leaf keep their values: zeros, or a frozen leaf
        old = [arrays[1].astype(new[0].dtype), *map(jnp.zeros_like, new[1:])]
        flat = [False, *(size is not None for _, size in self._arrays[k])]
        masks = [self.blocks.has_leaf(k) if is_flat else mask for is_flat in flat]
        return [jnp.where(m, n, o) for m, n, o in zip(masks, new, old, strict=True)]

    def _updated_leaf(self, leaf: int, arrays: Sequence[Any], evaluator: LeafEvaluator) -> list[Any]:
        """Return a leaf's weights plus their update, and the new state arrays of its block."""
        update, weights, state = evaluator.in_block(self._updates[leaf]), arrays[1], list(arrays[2:])
        wide = jnp.promote_types(weights.dtype, jnp.float32)
        for i, place in self._array_of[leaf].items():
            if self._is_flat(i):
                flat = jnp.ravel(evaluator.logical(self._new_state[i]))
                state[place] = jnp.pad(flat, (0, state[place].size - flat.size))
            else:
                state[place] = evaluator.in_block(self._new_state[i])
        return [weights.astype(wide) + update.astype(wide), *state]

    def _on_block(self, k: int, arrays: list[Any], env: dict[Any, Any], of_leaf: _LeafProgram) -> list[Any]:
        """Run `of_leaf` for the leaf that this IPU has in a block.

        Args:
            k: number of the block.
            arrays: gradient, weights and state arrays of the block, in its update shape.
            env: the values that every IPU knows.
            of_leaf: what to run.
        """
        by_ipu = self.blocks[k].leaves
        leaves = [leaf for leaf in by_ipu if leaf is not None]
        reads = [self._replicated_reads(leaf, of_leaf, arrays, env) for leaf in leaves]
        programs = [self._program(leaf, of_leaf, variables) for leaf, variables in zip(leaves, reads, strict=True)]
        if self._have_one_program(programs, reads, arrays, env):
            values = [
                env[variables[0]] if len(set(variables)) == 1 else _select_own(by_ipu, [env[v] for v in variables])
                for variables in zip(*reads, strict=True)
            ]
            return programs[0](arrays, values)
        branches = [
            lambda arrays, run=program, variables=variables: run(arrays, [env[v] for v in variables])
            for program, variables in zip(programs, reads, strict=True)
        ]
        branch_of_ipu = jnp.asarray([0 if leaf is None else leaves.index(leaf) for leaf in by_ipu], jnp.int32)
        return lax.switch(branch_of_ipu[lax.axis_index(IPU_AXIS)], branches, arrays)

    def _have_one_program(self, programs: list[Any], reads: list[list[Any]], arrays: list[Any], env: Any) -> bool:
        """Return whether leaves' programs are the same, apart from the replicated numbers that each reads."""
        if len(programs) == 1:
            return True
        traced = [jax.make_jaxpr(p)(arrays, [env[v] for v in vs]) for p, vs in zip(programs, reads, strict=True)]
        return len({str(jaxpr) for jaxpr in traced}) == 1 and all(
            len(set(variables)) == 1 or env[variables[0]].size == 1 for variables in zip(*reads, strict=True)
        )

    def _replicated_reads(self, leaf: int, of_leaf: _LeafProgram, arrays: list[Any], env: dict[Any, Any]) -> list[Any]:
        """Return the replicated variables that a leaf's program reads, in the order in which it reads them."""
        reads: dict[Any, None] = {}

        def replicated(v: Any) -> Any:
            reads.setdefault(v)
            return env[v]

        jax.eval_shape(lambda arrays: of_leaf(leaf, arrays, self._evaluator(leaf, arrays, replicated)), arrays)
        return list(reads)

    def _program(self, leaf: int, of_leaf: _LeafProgram, reads: list[Any]) -> Any:
        """Return `of_leaf` for one leaf, as a function of the block's arrays and of the replicated values it reads."""

        def run(arrays: list[Any], values: list[Any]) -> list[Any]:
            replicated = dict(zip(reads, values, strict=True))
            return of_leaf(leaf, arrays, self._evaluator(leaf, arrays, replicated.__getitem__))

        return run

    def _evaluator(self, leaf: int, arrays: Sequence[Any], replicated: Callable[[Any], Any]) -> LeafEvaluator:
        in_block = {self._gradients[leaf]: arrays[0], self._params[leaf]: arrays[1]}
        owned: dict[Any, Any] = {}
        for i, place in self._array_of[leaf].items():
            v, array = self._state[i], arrays[2 + place]
            if self._is_flat(i):
                owned[v] = array[: v.aval.size].reshape(v.aval.shape)
            else:
                in_block[v] = array
        shape = arrays[0].shape
        return LeafEvaluator(
            self.analysis, self.blocks, leaf, shape, in_block=in_block, owned=owned, replicated=replicated
        )

    def _gather(self, dtype: Any, reductions: Sequence[LeafReduction], arrays: list[Any], env: Any) -> dict[Any, Any]:
        """Return the results of these reductions, which every IPU gets by one all_gather of `dtype` per mapped axis."""
        blocks, vectors, offset = self.blocks, [], 0
        parts: list[tuple[LeafReduction, Any, int, tuple[int, ...]]] = []  # and where in the vector, and its shape
        for k in range(len(blocks)):
            of_block = {n: [r for r in reductions if r.leaf == n] for n in blocks[k].leaves if n is not None}
            ends = [offset]
            for of_leaf in of_block.values():
                at = offset
                for reduction in of_leaf:
                    (v,) = reduction.outputs
                    parts.append((reduction, v, at, partial_shape(blocks, reduction, v)))
                    at += size_of(parts[-1][-1])
                ends.append(at)
            length = max(ends) - offset  # a block has one vector length on all IPUs
            if any(of_block.values()):
                run = self._partial_results(of_block, length, dtype, blocks.leaf_mask(k))
                vectors += self._on_block(k, arrays[k], env, run)
            offset += length
        vector = jnp.concatenate(vectors)
        by_ipu = lax.all_gather(vector, IPU_AXIS) if blocks.ipus > 1 else vector[None]
        everyone = lax.all_gather(by_ipu, REPLICA_AXIS) if blocks.replicas > 1 else by_ipu[None]
        return {
            v: combined(blocks, r, v, everyone[:, :, at : at + size_of(shape)].reshape(*everyone.shape[:2], *shape))
            for r, v, at, shape in parts
        }

    def _partial_results(self, of_block: dict[int, list[LeafReduction]], length: int, dtype: Any, mask: Any) -> Any:
        """Return the program of a leaf that packs its partial results in a vector of this length."""

        def run(leaf: int, arrays: Sequence[Any], evaluator: LeafEvaluator) -> list[Any]:
            results = [partial_result(self.blocks, r, evaluator, mask) for r in of_block[leaf]]
            vector = jnp.concatenate([*(jnp.ravel(x).astype(dtype) for x in results), jnp.zeros(0, dtype)])
            return [jnp.pad(vector, (0, length - vector.size))]

        return run


def _value_of(v: Any, env: dict[Any, Any]) -> Any:
    aval: Any = v.aval
    return jnp.asarray(v.val, aval.dtype) if isinstance(v, core.Literal) else env[v]


def _select_own(leaves: Sequence[int | None], values: list[Any]) -> Any:
    """Return this IPU's number, from one number for each IPU that has a leaf in the block."""
    following = iter(values)
    by_ipu = [values[0] if leaf is None else next(following) for leaf in leaves]
    return jnp.stack(by_ipu)[lax.axis_index(IPU_AXIS)]


def copied(value: Any) -> Any:
    """Return numbers or keys that all devices hold, as a new array on the default device."""
    if is_key(value):
        return jax.random.wrap_key_data(copied(jax.random.key_data(value)), impl=jax.random.key_impl(value))
    return jnp.array(np.asarray(value))

"""Run an optimizer's update where the weights are: each IPU updates its own leaves, shards and replica chunks.

`_analysis.analyze_update` finds what is computed where; this module computes it, inside the mapped program. IPUs with
different leaves in one block share one program if the optimizer does the same to these leaves. A comparison of the
traced programs shows this. Otherwise a `switch` chooses between the programs. The `switch` contains no collective.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend import core
from jax.sharding import Mesh

from ipu_jax.base.annotations import Dtype, Params, Tree, Value, Var
from ipu_jax.base.jaxprs import bound, laid_open, needed, read_by
from ipu_jax.core.layout.blocks import Blocks, from_blocks, gather
from ipu_jax.core.layout.born import born
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.layout.packing import Sharded, shard_tree
from ipu_jax.core.layout.tree_parts import joined
from ipu_jax.core.mesh.axes import rounded
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.mesh.guard import SLOT, Fence, guard
from ipu_jax.core.mesh.host_memory import bare, fetched, updated_by_rows
from ipu_jax.core.optimizer._analysis import LeafReduction, analyze_update
from ipu_jax.core.optimizer._evaluate import LeafEvaluator, combined, partial_result, partial_shape, sent_together
from ipu_jax.core.optimizer.state import StateLayout

# (leaf, the block's arrays, evaluator) -> arrays, with the same shapes for each leaf of a block
_LeafProgram = Callable[[int, Sequence[Value], LeafEvaluator], list[Value]]


class ShardedUpdate:
    """Run one optimizer's update for weights in given blocks.

    `init` makes the first state, and `apply` updates weights and state inside the mapped program.

    Args:
        optimizer: any `optax.GradientTransformation`.
        blocks: where the weights are.

    Attributes:
        analysis: where each value of the update is computed.
        state_layout: where the parts of the state are.

    Raises:
        ValueError: the optimizer needs a divided leaf in one piece; the message names leaf and operation.
    """

    def __init__(self, optimizer: optax.GradientTransformation, blocks: Blocks):
        self.optimizer, self.blocks = optimizer, blocks
        self.analysis = analysis = analyze_update(optimizer, blocks)
        n, jaxpr = len(blocks.leaves), analysis.jaxpr
        self._gradients, self._params = jaxpr.invars[:n], jaxpr.invars[-1 - n : -1]
        self._loss = jaxpr.invars[-1]
        self._updates, self._new_state = jaxpr.outvars[:n], jaxpr.outvars[n:]
        self.state_layout = StateLayout(analysis, blocks)

    @property
    def reads_loss(self) -> bool:
        """Return whether the optimizer's update depends on the loss."""
        jaxpr = self.analysis.jaxpr
        return self._loss in read_by(jaxpr.eqns, jaxpr.outvars)

    def init(self, value_of: Callable[[Leaf], Value], mesh: Mesh) -> Sharded:
        """Make the optimizer's first state where it is kept.

        Args:
            value_of: returns the whole value of a trained leaf. It is asked for the leaves that the state copies only;
                most optimizers begin with zeros.
            mesh: the mesh of the IPUs.
        """
        leaves = self.blocks.leaves
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        first = lambda trained: jax.tree.leaves(self.first_state(trained))
        closed = laid_open(jax.make_jaxpr(first)(shapes))
        read = set(read_by(closed.jaxpr.eqns, closed.jaxpr.outvars))
        both = zip(closed.jaxpr.invars, leaves, strict=True)
        args = [value_of(leaf) if v in read else None for v, leaf in both]
        return born(closed, args, [self.state_layout.layout], mesh)[0]

    def first_state(self, trained: Sequence[Value]) -> Tree:
        """Return the optimizer's first state, whole, as optax makes it, for whole trained leaves."""
        return self.optimizer.init(joined(self.blocks.logical_tree(trained)))

    def restore(self, state: Tree, mesh: Mesh) -> Sharded:
        """Place a whole state of optax in the same way as `init` does with the first state.

        Raises:
            ValueError: the state is from another optimizer, or of other weights.
        """
        self.state_layout.check_whole(state)
        return shard_tree(state, self.state_layout.layout, mesh)

    def apply(
        self,
        gradients: Sequence[Value],
        state: Sharded,
        params: Value,
        loss: Value,
        *,
        round_block: Callable[[int, Value], Value] = lambda k, chunk: chunk,
        made: Value = None,
    ) -> tuple[Value, list[Value], Sharded]:
        """Return the weights after an update, their chunks of this replica, and the optimizer's new state.

        Communicates one all_gather of a few numbers for each level of norms over leaves of several IPUs, or over the
        parts of one leaf; if the blocks are divided over the replicas, one all_gather of the new weights per bucket.

        Args:
            gradients: per block, in its update shape, and already summed over the replicas. They are rounded to the
                block's dtype.
            state: this IPU's arrays, as `shard_map` gives them: (1, 1, *update_shape).
            params: this IPU's weights, `Sharded` or a plain tree.
            loss: for optimizers that take `value=`.
            round_block: gets k and block k's new weights, in float32 at least, and can round them to the block's dtype.
                Weights that it does not round are rounded to nearest.
            made: if the state is in the host's memory, whether the update is made, a bool that XLA does not know. If it
                is not, weights and the arrays that are kept with blocks stay as they are.

        Returns:
            The new weights, laid out like `params`; per block this replica's chunk of them, (*update_shape); the new
            state.
        """
        blocks = self.blocks
        gradients = [rounded(g, block.dtype) for g, block in zip(gradients, blocks.arrays, strict=True)]
        unrounded, state = self._unrounded(gradients, state, blocks.chunks_of(params), loss, made)
        chunks = [round_block(k, chunk).astype(blocks[k].dtype) for k, chunk in enumerate(unrounded)]
        return from_blocks(params, gather(blocks, chunks)), chunks, state

    def _unrounded(
        self, gradients: Sequence[Value], state: Sharded, params: Sequence[Params], loss: Value, made: Value
    ) -> tuple[list[Value], Sharded]:
        """Return the chunks of the weights plus their updates, in float32 at least, and the optimizer's new state."""
        analysis, jaxpr = self.analysis, self.analysis.jaxpr
        env: dict[Var, Value] = dict(zip(jaxpr.constvars, analysis.consts, strict=True))
        env[self._loss] = jnp.asarray(loss, self._loss.aval.dtype)
        variables, replicated = self.state_layout.variables, self.state_layout.replicated
        kept, everywhere = self.state_layout.by_block(state.arrays)
        env.update({variables[i]: value for i, value in zip(replicated, everywhere, strict=True)})
        for leaf in range(len(self.blocks.leaves)):
            if self._gradients[leaf] not in analysis.leaf_of:
                k = self.blocks.block_of(leaf)
                env[self._gradients[leaf]], env[self._params[leaf]] = gradients[k], params[k]
        without_dims = bare if self.blocks.memory is not None else lambda array: array[0, 0]
        states = [[*map(without_dims, of_block)] for of_block in kept]
        arrays = [[g, p, *of_block] for g, p, of_block in zip(gradients, params, states, strict=True)]
        for level, eqns in enumerate(analysis.replicated):
            for eqn in eqns:
                env.update(zip(eqn.outvars, bound(eqn, [_value_of(v, env) for v in eqn.invars]), strict=True))
            for dtype, together in sent_together(analysis.reductions[level]):
                env.update(self._gather(dtype, together, arrays, env, made))
        results = [self._new_arrays(k, of_block, env, made) for k, of_block in enumerate(arrays)]
        values = [_value_of(self._new_state[i], env) for i in replicated]
        both = zip(itertools.chain(*(of_block[1:] for of_block in results)), itertools.chain(*kept), strict=True)
        kept = [jnp.expand_dims(new, range(old.ndim - new.ndim)) for new, old in both]
        return [of_block[0] for of_block in results], Sharded([*kept, *values], state.layout)

    def _new_arrays(self, k: int, arrays: list[Value], env: dict[Var, Value], made: Value) -> list[Value]:
        """Return a block's weights plus their update, and its new state arrays.

        The update of a slot is inside guards, so that XLA makes it in place. An IPU without a leaf in the slot runs
        none of them. If the update is elementwise, an IPU with a small leaf updates only the first elements. If the
        state is in the host's memory, the update of any block is inside guards, which fetch and store it.
        """
        blocks, (gradient, weights, *state) = self.blocks, arrays
        is_slot, is_offloaded = blocks[k].is_slot, blocks.memory is not None
        if not is_slot and not is_offloaded:
            run = partial(self._updated_leaf, old=[weights, *state], mask=blocks.leaf_mask(k))
            return self._on_block(k, arrays, env, run)
        counts, own = blocks.counts(k), blocks.own_count(k) if is_slot else 0
        has_rows = blocks.chunk_dim(k) is not None  # which may be padding
        is_elementwise = all(self._is_elementwise(leaf) for leaf in blocks.leaves_in[k] if leaf is not None)
        new = [weights.astype(jnp.promote_types(weights.dtype, jnp.float32)), *state]
        lengths = blocks.lengths(k) if is_slot and is_elementwise else [weights.size]
        for shorter, length in itertools.pairwise([0, *lengths]):

            def body(fence: Fence, old: list[Value], shorter: int = shorter, length: int = length) -> list[Value]:
                is_filled = {int(n) for n in counts.flat if shorter < n <= length} == {length} and not has_rows
                mask = None if is_filled and is_slot else blocks.leaf_mask(k, fence.zero)
                fenced = fence(gradient)

                def of_arrays(cut: Callable[[Value], Value], old: list[Value]) -> list[Value]:
                    first = [cut(fenced), *old]
                    if length < weights.size and not is_offloaded:
                        first = [lax.dynamic_slice_in_dim(array, fence.zero, length) for array in first]
                    first[1] = first[1].astype(weights.dtype)
                    own = None if mask is None else _first(cut(mask), length)
                    of_leaf = partial(self._updated_leaf, old=old, mask=own, zero=fence.zero)
                    return self._on_block(k, first, env, of_leaf)

                if not is_offloaded:
                    return of_arrays(lambda array: array, old)
                has_many = is_elementwise and weights.size > 0 and weights.ndim > 0
                rows = min(length, weights.shape[0]) if has_many else None
                return updated_by_rows(old, of_arrays, weights.shape, rows=rows, zero=fence.zero)

            active = (shorter < own) & (own <= length) if is_slot else made
            with jax.named_scope(SLOT):
                new = guard(jnp.int32(0), active & made if is_offloaded else active, body, new)[1]
        return new

    def _is_elementwise(self, leaf: int) -> bool:
        """Return whether each element of a leaf's update needs only numbers and the same element of other arrays."""
        analysis, seen = self.analysis, set[Var]()
        waiting = [self._updates[leaf], *(self._new_state[i] for i in self.state_layout.array_of[leaf])]
        while waiting:
            v = waiting.pop()
            if isinstance(v, core.Literal) or v in seen:
                continue
            seen.add(v)
            if v in analysis.owned or (v not in analysis.leaf_of and v not in analysis.constant_fills and v.aval.shape):
                return False
            if v in analysis.leaf_of and v in analysis.made_by:
                waiting += analysis.made_by[v].invars
        return True

    def _updated_leaf(
        self,
        leaf: int,
        arrays: Sequence[Value],
        evaluator: LeafEvaluator,
        *,
        old: list[Value],
        mask: Value,
        zero: Value = 0,
    ) -> list[Value]:
        """Return a leaf's weights plus their update, and the new state arrays of its block.

        Elements that belong to no leaf keep their values: zeros, or a frozen leaf. The update is computed from the new
        state as it is written, with these zeros. Otherwise XLA would need a copy of the old state.

        Args:
            leaf: the leaf's number.
            arrays: gradient, weights and state arrays, or the first elements of each.
            evaluator: computes values from `arrays`.
            old: weights and state arrays, whole; new values are written into their first elements.
            mask: which elements of `arrays` belong to the leaf; None for all.
            zero: the index of the first element. It is 0, but XLA does not know this if it must write in place.
        """
        weights, state = arrays[1], list(old[1:])
        wide = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
        for i, place in self.state_layout.array_of[leaf].items():
            if self.state_layout.is_flat(i):
                flat = jnp.ravel(evaluator.logical(self._new_state[i]))
                state[place] = jnp.pad(flat, (0, state[place].size - flat.size))
            else:
                value = evaluator.in_block(self._new_state[i])
                value = value if mask is None else jnp.where(mask, value, 0)
                state[place] = _with_first(state[place], value, zero)
                evaluator.replace(self._new_state[i], _first(state[place], value.size))
        new = wide + evaluator.in_block(self._updates[leaf]).astype(wide.dtype)
        return [_with_first(old[0], new if mask is None else jnp.where(mask, new, wide), zero), *state]

    def _on_block(self, k: int, arrays: list[Value], env: dict[Var, Value], of_leaf: _LeafProgram) -> list[Value]:
        """Run `of_leaf` for the leaf that this IPU has in a block.

        Args:
            k: number of the block.
            arrays: gradient, weights and state arrays of the block, in its update shape.
            env: the values that every IPU knows.
            of_leaf: the program to run.
        """
        by_ipu = self.blocks.leaves_in[k]
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

    def _have_one_program(
        self, programs: list[Any], reads: list[list[Var]], arrays: list[Value], env: dict[Var, Value]
    ) -> bool:
        """Return whether the leaves' programs are the same, apart from the replicated numbers that each reads."""
        if len(programs) == 1:
            return True
        traced = [jax.make_jaxpr(p)(arrays, [env[v] for v in vs]) for p, vs in zip(programs, reads, strict=True)]
        return len({str(jaxpr) for jaxpr in traced}) == 1 and all(
            len(set(variables)) == 1 or env[variables[0]].size == 1 for variables in zip(*reads, strict=True)
        )

    def _replicated_reads(
        self, leaf: int, of_leaf: _LeafProgram, arrays: list[Value], env: dict[Var, Value]
    ) -> list[Var]:
        """Return the replicated variables that a leaf's program reads, in the order in which it reads them."""
        reads: dict[Var, None] = {}

        def replicated(v: Var) -> Value:
            reads.setdefault(v)
            return env[v]

        jax.eval_shape(lambda arrays: of_leaf(leaf, arrays, self._evaluator(leaf, arrays, replicated)), arrays)
        return list(reads)

    def _program(self, leaf: int, of_leaf: _LeafProgram, reads: list[Var]) -> Any:
        """Return `of_leaf` for one leaf, as a function of the block's arrays and of the replicated values it reads."""

        def run(arrays: list[Value], values: list[Value]) -> list[Value]:
            replicated = dict(zip(reads, values, strict=True))
            return of_leaf(leaf, arrays, self._evaluator(leaf, arrays, replicated.__getitem__))

        return run

    def _evaluator(self, leaf: int, arrays: Sequence[Value], replicated: Callable[[Var], Value]) -> LeafEvaluator:
        in_block = {self._gradients[leaf]: arrays[0], self._params[leaf]: arrays[1]}
        owned: dict[Var, Value] = {}
        for i, place in self.state_layout.array_of[leaf].items():
            v, array = self.state_layout.variables[i], arrays[2 + place]
            if self.state_layout.is_flat(i):
                owned[v] = array[: v.aval.size].reshape(v.aval.shape)
            else:
                in_block[v] = array
        shape = arrays[0].shape
        return LeafEvaluator(
            self.analysis, self.blocks, leaf, shape, in_block=in_block, owned=owned, replicated=replicated
        )

    def _gather(
        self, dtype: Dtype, reductions: Sequence[LeafReduction], arrays: list[Value], env: dict[Var, Value], made: Value
    ) -> dict[Var, Value]:
        """Return the results of these reductions on every IPU, with one all_gather of `dtype` per mapped axis."""
        blocks, vectors, offset = self.blocks, [], 0
        parts: list[tuple[LeafReduction, Value, int, tuple[int, ...]]] = []  # with the offset in the vector, and shape
        for k in range(len(blocks)):
            of_block = {n: [r for r in reductions if r.leaf == n] for n in blocks.leaves_in[k] if n is not None}
            ends = [offset]
            for of_leaf in of_block.values():
                at = offset
                for reduction in of_leaf:
                    (v,) = reduction.outputs
                    parts.append((reduction, v, at, partial_shape(blocks, reduction, v)))
                    at += math.prod(parts[-1][-1])
                ends.append(at)
            length = max(ends) - offset  # a block's vector has the same length on all IPUs
            if any(of_block.values()):
                run = self._partial_results(of_block, length, dtype, blocks.leaf_mask(k))
                if self.blocks.memory is not None and self._read_state(of_block):

                    def body(fence: Fence, _: list[Value], k: int = k, run: Any = run) -> list[Value]:
                        gradient, weights, *state = fence(arrays[k])
                        own = [array[(0,) * (array.ndim - weights.ndim)] for array in fetched(state)]
                        return self._on_block(k, [gradient, weights, *own], env, run)

                    vectors += guard(jnp.int32(0), made, body, [jnp.zeros(length, dtype)])[1]
                else:
                    vectors += self._on_block(k, arrays[k], env, run)
            offset += length
        everyone = jnp.concatenate(vectors)
        for axis in blocks.axes:
            everyone = lax.all_gather(everyone, axis)
        everyone = everyone.reshape(blocks.replicas, blocks.ipus, offset)
        return {
            v: combined(blocks, r, v, everyone[:, :, at : at + math.prod(shape)].reshape(*everyone.shape[:2], *shape))
            for r, v, at, shape in parts
        }

    def _read_state(self, of_block: dict[int, list[LeafReduction]]) -> bool:
        """Return whether reductions read a state that is kept with blocks."""
        variables, kept = self.state_layout.variables, self.analysis.leaf_of_state
        results = [v for of_leaf in of_block.values() for reduction in of_leaf for v in reduction.outputs]
        read = read_by(needed(self.analysis.jaxpr.eqns, results), results)
        return not {variables[i] for i in kept}.isdisjoint(read)

    def _partial_results(self, of_block: dict[int, list[LeafReduction]], length: int, dtype: Dtype, mask: Value) -> Any:
        """Return the program that packs a leaf's partial results into a vector of this length."""

        def run(leaf: int, arrays: Sequence[Value], evaluator: LeafEvaluator) -> list[Value]:
            results = [partial_result(self.blocks, r, evaluator, mask) for r in of_block[leaf]]
            vector = jnp.concatenate([*(jnp.ravel(x).astype(dtype) for x in results), jnp.zeros(0, dtype)])
            return [jnp.pad(vector, (0, length - vector.size))]

        return run


def _value_of(v: Var, env: dict[Var, Value]) -> Value:
    aval: Value = v.aval
    return jnp.asarray(v.val, aval.dtype) if isinstance(v, core.Literal) else env[v]


def _select_own(leaves: Sequence[int | None], values: list[Value]) -> Value:
    """Return this IPU's number, from one number per IPU with a leaf in the block."""
    following = iter(values)
    by_ipu = [values[0] if leaf is None else next(following) for leaf in leaves]
    return jnp.stack(by_ipu)[lax.axis_index(IPU_AXIS)]


def _first(array: Value, length: int) -> Value:
    """Return the first `length` elements of a flat array, or all of an array with at most `length` elements."""
    return array if array.size <= length else array[:length]


def _with_first(array: Value, value: Value, zero: Value) -> Value:
    """Return a flat array with its first elements replaced by `value`, or `value` if it has the array's shape.

    XLA writes in place if the value is computed from a slice of the array at the same index, unknown to XLA.
    """
    return value if value.shape == array.shape else lax.dynamic_update_slice_in_dim(array, value, zero, 0)

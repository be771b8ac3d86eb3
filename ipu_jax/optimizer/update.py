"""An optimizer's update, run where the weights are: every IPU updates its own leaves, shards and replica chunks.

`_analysis.read` decides what runs where; this module runs it, inside the mapped program. IPUs that hold different
leaves in one cell run one program for it if the optimizer treats those leaves alike, which the traced programs show;
otherwise a `switch` chooses among the different programs. There is no collective inside it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend import core

from ipu_jax._keys import is_key
from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.optimizer._analysis import Summary, read
from ipu_jax.optimizer._evaluate import Lookup, aval_of, bind
from ipu_jax.optimizer._reductions import partial, partial_shape, size_of, whole_of
from ipu_jax.optimizer.blocks import Cells, block_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """Hold an optimizer's state, as it is laid out on the IPUs.

    Attributes:
        like: per cell, the arrays that lie as it does: adam's two moments, say.
        everywhere: what all IPUs hold alike: step counts, and whatever is not shaped as a leaf.
        kind: static; the structure of the state as optax knows it, by which another optimizer's is told.
    """

    like: list[list[Any]]
    everywhere: list[Any]
    kind: str = dataclasses.field(default="", metadata={"static": True})


class Update:
    """Run one optimizer's update for weights in given cells.

    Args:
        optimizer: any `optax.GradientTransformation`.
        cells: where the weights lie.

    Raises:
        ValueError: the optimizer needs what lies apart in one piece; it names the leaf and the operation.
    """

    def __init__(self, optimizer: optax.GradientTransformation, cells: Cells):
        self.optimizer, self.cells = optimizer, cells
        self.reading = reading = read(optimizer, cells)
        n, jaxpr = len(cells.leaves), reading.jaxpr
        self._gradients, self._params = jaxpr.invars[:n], jaxpr.invars[-1 - n : -1]
        self._state, self._value = jaxpr.invars[n : -1 - n], jaxpr.invars[-1]
        self._updates, self._new_state = jaxpr.outvars[:n], jaxpr.outvars[n:]
        self._everywhere = [i for i in range(len(self._state)) if i not in reading.like_state]
        # per cell the dtypes of its kept arrays and, of flat ones, their sizes; and per leaf which part of the state is
        # which of them
        self.kept_arrays: list[list[tuple[str, int | None]]] = [[] for _ in cells.cells]
        self._kept_of: list[dict[int, int]] = [{} for _ in range(n)]
        self.kind = str(reading.state_treedef)
        for i, leaf in reading.like_state.items():
            kept, taken = self.kept_arrays[cells.cell_of(leaf)], self._kept_of[leaf].values()
            dtype, is_flat = str(aval_of(self._state[i]).dtype), self._is_flat(i)
            fits = (p for p, (d, size) in enumerate(kept) if (d, size is not None) == (dtype, is_flat))
            place = next((p for p in fits if p not in taken), len(kept))
            if place == len(kept):
                kept.append((dtype, 0 if is_flat else None))
            if is_flat:
                kept[place] = (dtype, max(kept[place][1] or 0, aval_of(self._state[i]).size))
            self._kept_of[leaf][i] = place

    def _is_flat(self, i: int) -> bool:
        """Return whether a leaf's owner keeps this part of the state in its own shape, flattened."""
        return self._state[i] in self.reading.owned

    def _kept_shapes(self, k: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the global shapes and dtypes of a cell's kept arrays."""
        shape = block_shape(self.cells, k)
        return [(shape if size is None else (*shape[:2], size), dtype) for dtype, size in self.kept_arrays[k]]

    # on the host

    def init(self, params: Any) -> tuple[list[list[np.ndarray]], list[Any]]:
        """Return the optimizer's first state: per cell its arrays as (replicas, ipus, *shown), and what is replicated.

        Args:
            params: the logical tree, whole.
        """
        return self.spread_state(jax.tree.leaves(jax.jit(self.optimizer.init)(params)))

    def spread_state(self, leaves: Sequence[Any]) -> tuple[list[list[np.ndarray]], list[Any]]:
        """Return the same of any state of the optimizer, from its leaves."""
        cells = self.cells
        like = [[np.zeros(*kept) for kept in self._kept_shapes(k)] for k in range(len(cells.cells))]
        for i, leaf in self.reading.like_state.items():
            k, place, value = cells.cell_of(leaf), self._kept_of[leaf][i], np.asarray(leaves[i])
            if self._is_flat(i):
                like[k][place][0, cells.cells[k].leaves.index(leaf), : value.size] = value.reshape(-1)
                continue
            for ipu, local in cells.host_blocks(leaf, value):
                like[k][place][:, ipu] = local
        return like, [jnp.asarray(leaves[i]) for i in self._everywhere]

    def checked_leaves(self, state: Any) -> list[Any]:
        """Return the leaves of a whole state of the optimizer.

        Raises:
            ValueError: it is another optimizer's, or of other weights.
        """
        expected = [(aval_of(v).shape, aval_of(v).dtype.name) for v in self._state]
        leaves, treedef = jax.tree.flatten(state)
        found = [(np.shape(leaf), jnp.asarray(leaf).dtype.name) for leaf in leaves]
        if treedef != self.reading.state_treedef or found != expected:
            raise ValueError(
                f"the saved optimizer state has leaves {found} in {treedef}, but this optimizer's state for these "
                f"weights has {expected} in {self.reading.state_treedef}: give the one it was saved with"
            )
        return leaves

    def check(self, kept: Kept) -> None:
        """Raise `ValueError` unless a state is this optimizer's, for weights laid out as these are."""
        like = [self._kept_shapes(k) for k in range(len(self.cells.cells))]
        everywhere = [(aval_of(self._state[i]).shape, str(aval_of(self._state[i]).dtype)) for i in self._everywhere]
        found = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), (kept.like, kept.everywhere))
        if (kept.kind, *found) != (self.kind, like, everywhere):
            raise ValueError(
                "state.optimizer is another optimizer's, or of weights that lie otherwise: use the step that made it, "
                "or begin anew with its weights, step.init(other.whole(state)['params'], ...)"
            )

    def gather_state(self, like: Sequence[Sequence[Any]], everywhere: Sequence[Any]) -> Any:
        """Return the optimizer's own state, whole, as optax knows it: the inverse of `init`."""
        leaves: list[Any] = [None] * len(self._state)
        for i, value in zip(self._everywhere, everywhere, strict=True):
            leaves[i] = copied(value)
        for i, leaf in self.reading.like_state.items():
            k, aval = self.cells.cell_of(leaf), aval_of(self._state[i])
            array = np.asarray(like[k][self._kept_of[leaf][i]])
            if self._is_flat(i):
                flat = array[0, self.cells.cells[k].leaves.index(leaf), : aval.size]
                leaves[i] = jnp.array(flat.reshape(aval.shape))
            else:
                leaves[i] = jnp.asarray(self.cells.host_leaf(leaf, array))
        return jax.tree.unflatten(self.reading.state_treedef, leaves)

    # inside the program

    def __call__(
        self, gradients: Sequence[Any], kept: Kept, params: Sequence[Any], value: Any
    ) -> tuple[list[Any], Kept]:
        """Return the weights after an update, unrounded, and the optimizer's new state.

        Communicates one all_gather of a few floats for each level of norms that the optimizer takes.

        Args:
            gradients: per cell, as it is shown (`Cells.shown`); reduced over the replicas.
            kept: the state; its arrays are as the cells are shown.
            params: per cell, as it is shown.
            value: the loss, for optimizers that ask for it.

        Returns:
            Per cell the weights plus their updates, in float32 where they are narrower, and the new state.
        """
        reading, jaxpr = self.reading, self.reading.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, reading.consts, strict=True))
        env[self._value] = value
        env.update({self._state[i]: v for i, v in zip(self._everywhere, kept.everywhere, strict=True)})
        for n in range(len(self.cells.leaves)):
            if self._gradients[n] not in reading.like:
                k = self.cells.cell_of(n)
                env[self._gradients[n]], env[self._params[n]] = gradients[k], params[k]
        arrays = [[g, p, *(of_cell)] for g, p, of_cell in zip(gradients, params, kept.like, strict=True)]
        for level, eqns in enumerate(reading.everywhere):
            for eqn in eqns:
                env.update(zip(eqn.outvars, bind(eqn, [self._known(v, env) for v in eqn.invars]), strict=True))
            if reading.summaries[level]:
                env.update(self._gather(reading.summaries[level], arrays, env))
        results = []
        for k, of_cell in enumerate(arrays):
            found, valid = self._on_cell(k, of_cell, env, self._last), self.cells.valid(k)
            if valid is not None:
                # what is no leaf's stays as it was: zeros, or a frozen leaf
                old = [of_cell[1].astype(found[0].dtype), *map(jnp.zeros_like, found[1:])]
                flat = [False, *(size is not None for _, size in self.kept_arrays[k])]
                valid_of = [self.cells.has_leaf(k) if is_flat else valid for is_flat in flat]
                found = [jnp.where(v, n, o) for v, n, o in zip(valid_of, found, old, strict=True)]
            results.append(found)
        new = [self._known(self._new_state[i], env) for i in self._everywhere]
        like = [list(of_cell) for _, *of_cell in results]
        return [sums for sums, *_ in results], dataclasses.replace(kept, like=like, everywhere=new)

    def _known(self, v: Any, env: dict[Any, Any]) -> Any:
        return jnp.asarray(v.val, aval_of(v).dtype) if isinstance(v, core.Literal) else env[v]

    def _last(self, leaf: int, arrays: Sequence[Any], lookup: Any) -> list[Any]:
        """Return a leaf's weights plus their update, and the new state arrays of its cell."""
        update, weights = lookup(self._updates[leaf]), arrays[1]
        wide = jnp.promote_types(weights.dtype, jnp.float32)
        kept = list(arrays[2:])
        for i, place in self._kept_of[leaf].items():
            if self._is_flat(i):
                flat = jnp.ravel(lookup.logical(self._new_state[i]))
                kept[place] = jnp.pad(flat, (0, kept[place].size - flat.size))
            else:
                kept[place] = lookup(self._new_state[i])
        return [weights.astype(wide) + update.astype(wide), *kept]

    def _on_cell(self, k: int, arrays: list[Any], env: dict[Any, Any], of_leaf: Any) -> list[Any]:
        """Run `of_leaf` for the leaf that this IPU holds in a cell.

        Args:
            k: the cell.
            arrays: gradient, weights and kept arrays of the cell, as it is shown.
            env: what every IPU knows.
            of_leaf: `(leaf, arrays, lookup) -> list of arrays`, of the same shapes for each leaf of the cell.
        """
        leaves = self.cells.cells[k].leaves
        owners = [n for n in leaves if n is not None]
        programs, wanted = [], []
        for leaf in owners:
            needs = self._needs(leaf, of_leaf, arrays, env)
            wanted.append(needs)
            programs.append(self._program(leaf, of_leaf, needs))
        texts = (
            [
                str(jax.make_jaxpr(program)(arrays, [env[v] for v in needs]))
                for program, needs in zip(programs, wanted, strict=True)
            ]
            if len(owners) > 1
            else [""]
        )
        alike = len(set(texts)) == 1 and all(
            len({id(v) for v in vs}) == 1 or env[vs[0]].size == 1 for vs in zip(*wanted, strict=True)
        )
        if alike:
            known = [
                env[vs[0]] if len({id(v) for v in vs}) == 1 else self._mine(leaves, [env[v] for v in vs])
                for vs in zip(*wanted, strict=True)
            ]
            return programs[0](arrays, known)
        table = jnp.asarray([owners.index(n) if n is not None else 0 for n in leaves], jnp.int32)
        branches = [
            lambda arrays, run=program, needs=needs: run(arrays, [env[v] for v in needs])
            for program, needs in zip(programs, wanted, strict=True)
        ]
        return lax.switch(table[lax.axis_index(IPU_AXIS)], branches, arrays)

    def _mine(self, leaves: Sequence[int | None], values: list[Any]) -> Any:
        """Return this IPU's number, given one number per owner of the cell."""
        following = iter(values)
        by_ipu = [values[0] if leaf is None else next(following) for leaf in leaves]
        return jnp.stack(by_ipu)[lax.axis_index(IPU_AXIS)]

    def _needs(self, leaf: int, of_leaf: Any, arrays: list[Any], env: dict[Any, Any]) -> list[Any]:
        """Return the replicated variables that a leaf's program reads, in the order in which it reads them."""
        found: dict[Any, None] = {}

        def known(v: Any) -> Any:
            found.setdefault(v)
            return env[v]

        jax.eval_shape(lambda arrays: of_leaf(leaf, arrays, self._lookup(leaf, arrays, known)), arrays)
        return list(found)

    def _program(self, leaf: int, of_leaf: Any, needs: list[Any]) -> Any:
        def run(arrays: list[Any], values: list[Any]) -> list[Any]:
            known = dict(zip(needs, values, strict=True))
            return of_leaf(leaf, arrays, self._lookup(leaf, arrays, known.__getitem__))

        return run

    def _lookup(self, leaf: int, arrays: Sequence[Any], known: Any) -> Lookup:
        made = {self._gradients[leaf]: arrays[0], self._params[leaf]: arrays[1]}
        owned: dict[Any, Any] = {}
        for i, place in self._kept_of[leaf].items():
            aval, array = aval_of(self._state[i]), arrays[2 + place]
            if self._is_flat(i):
                owned[self._state[i]] = array[: aval.size].reshape(aval.shape)
            else:
                made[self._state[i]] = array
        return Lookup(self.reading, self.cells, leaf, arrays[0].shape, made, known, owned)

    # summaries

    def _gather(self, summaries: Sequence[Summary], arrays: list[list[Any]], env: dict[Any, Any]) -> dict[Any, Any]:
        """Return the results of these equations on every IPU: one all_gather per mapped axis."""
        cells, vectors, parts = self.cells, [], []
        offset = 0
        wide = jnp.result_type(jnp.float32, *(aval_of(v).dtype for s in summaries for v in s.outputs))
        for k in range(len(cells.cells)):
            mine = {n: [s for s in summaries if s.leaf == n] for n in cells.cells[k].leaves if n is not None}
            if not any(mine.values()):
                continue
            shapes = {
                n: [partial_shape(cells, s, v) for s in of_leaf for v in s.outputs] for n, of_leaf in mine.items()
            }
            length = max(sum(map(size_of, of_leaf)) for of_leaf in shapes.values())
            valid = cells.valid(k)

            def of_leaf(n: int, arrays: Any, lookup: Any, mine: Any = mine, length: int = length, valid: Any = valid):
                found = [jnp.ravel(x).astype(wide) for s in mine[n] for x in partial(cells, s, lookup, valid)]
                flat = jnp.concatenate([*found, jnp.zeros(0, wide)])
                return [jnp.pad(flat, (0, length - flat.size))]

            (vector,) = self._on_cell(k, arrays[k], env, of_leaf)
            vectors.append(vector)
            for n, of_leaf_n in mine.items():
                at, following = offset, iter(shapes[n])
                for s in of_leaf_n:
                    for v in s.outputs:
                        shape = next(following)
                        parts.append((s, v, k, n, at, shape))
                        at += size_of(shape)
            offset += length
        vector = jnp.concatenate(vectors)
        by_ipu = lax.all_gather(vector, IPU_AXIS) if cells.ipus > 1 else vector[None]
        everyone = lax.all_gather(by_ipu, REPLICA_AXIS) if cells.replicas > 1 else by_ipu[None]
        return {
            v: whole_of(cells, s, v, k, everyone[:, :, at : at + size_of(shape)].reshape(*everyone.shape[:2], *shape))
            for s, v, k, _, at, shape in parts
        }


def copied(value: Any) -> Any:
    """Return numbers, or keys, that all devices hold alike, as an array of its own on the default device."""
    if is_key(value):
        return jax.random.wrap_key_data(copied(jax.random.key_data(value)), impl=jax.random.key_impl(value))
    return jnp.array(np.asarray(value))

"""Divide an optimizer's update, traced on the user's tree, where rows of a leaf are on several IPUs.

optax sees    {"layers": w}                            in masks, labels and rates by path, in shapes and norms
IPUs have     {"layers": Rows([w[0:4], w[4:8]])}

m' = b1 * m + g        row by row: once for each part
sum(g * g)             once for each part, and then added: the number of the whole leaf
zeros, noise           of the whole leaf's shape: its rows
g @ g.T                needs the leaf in one piece: refused
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax.base.annotations import Eqn, Jaxpr, Tree, Value
from ipu_jax.base.jaxprs import CALLS, ELEMENTWISE, bound, closed_of, evaluated
from ipu_jax.core.layout.packed_layout import Leaf
from ipu_jax.core.layout.whole_tree import Rows, divided, is_rows, resized

_ADDED: dict[str, Callable[[Value, Value], Value]] = {
    "reduce_sum": lax.add,
    "dot_general": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}
"""How the results of a leaf's parts become the result of the leaf, per primitive that reduces to one number."""


@dataclasses.dataclass(frozen=True)
class _InParts:
    """A value whose rows along an axis are in several parts.

    `leaf` is the first part of the leaf that it is computed from. A value that `is_flat` has parts that are not: along
    another axis than the first, flat parts do not follow one another in the flat value.
    """

    parts: list[Value]
    leaf: Leaf
    axis: int
    is_flat: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = resized(self.parts[0].shape, self.axis, sum(part.shape[self.axis] for part in self.parts))
        return (math.prod(shape),) if self.is_flat else shape


def in_rows(closed: Jaxpr, weights: Tree, state: Tree, leaves: Sequence[Leaf]) -> tuple[Jaxpr, Tree]:
    """Return the update for weights whose leaves are divided, and the shapes of its state, divided alike.

    Args:
        closed: the update, traced on whole leaves: (gradients, state, weights, loss) to (updates, new state).
        weights: the weights' shapes, with `Rows` where a leaf is divided.
        state: the state's shapes, whole.
        leaves: the parts of the weights, in order.

    Returns:
        The same update, in which a divided leaf of gradients, weights, updates and state is its parts, in order. A leaf
        of the state is divided if its new value is computed from a divided leaf row by row.

    Raises:
        ValueError: the update needs a divided leaf in one piece.
    """
    shapes, treedef = jax.tree.flatten(state)
    of_weights = jax.tree.leaves(weights, is_leaf=is_rows)
    counts = [len(jax.tree.leaves(node)) for node in of_weights]
    owners = [leaves[end - count] for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
    of_state: list[Tree] = list(shapes)
    state_owners: dict[int, Leaf] = {}

    def run(gradients: list[Tree], of_state: list[Tree], params: list[Tree], loss: Value) -> list[Tree]:
        given = [*gradients, *of_state, *params]
        of = [*owners, *(state_owners.get(i) for i in range(len(of_state))), *owners]
        args = [_InParts(x.parts, leaf, x.axis) if is_rows(x) else x for x, leaf in zip(given, of, strict=True)]
        results = evaluated(closed, [*args, loss], _Rule())
        for i, result in enumerate(results[len(owners) :]):
            if isinstance(result, _InParts):
                state_owners.setdefault(i, result.leaf)
        before = [*gradients, *of_state]
        for k, (result, own) in enumerate(zip(results, before, strict=True)):
            is_new = k >= len(owners) and not is_rows(own)  # of the state: the next trace has it in parts
            if not isinstance(result, _InParts):
                continue
            if result.is_flat:  # of a state, which would be joined in another order
                raise _needed_in_one_piece("reshape", result.leaf)
            if not is_new and not (is_rows(own) and _form(result) == _form(own)):
                raise ValueError(
                    f"optimizer: what it computes for another leaf reads the rows of {result.leaf.path}, which are on "
                    "several IPUs: use transforms that work leaf by leaf, or that meet in sums and norms"
                )
        is_in_parts = lambda x: isinstance(x, _InParts)
        both = zip(results, before, strict=True)
        return [Rows(x.parts, x.axis) if is_in_parts(x) else divided(x, own) for x, own in both]

    loss = jax.ShapeDtypeStruct(closed.in_avals[-1].shape, closed.in_avals[-1].dtype)
    while True:
        traced, shapes = jax.make_jaxpr(run, return_shape=True)(of_weights, of_state, of_weights, loss)
        new = shapes[len(owners) :]
        if new == of_state:
            return traced, jax.tree.unflatten(treedef, of_state)
        of_state = new


class _Rule:
    """Compute an equation of the whole update on the parts of its inputs; for `evaluated`."""

    def __init__(self) -> None:
        self._fills: dict[int, tuple[Value, Value]] = {}  # arrays of one number, and the number

    def __call__(self, eqn: Eqn, inputs: list[Value]) -> list[Value] | None:
        name, params = eqn.primitive.name, eqn.params
        own = next((x for x in inputs if isinstance(x, _InParts)), None)
        if own is None:
            if name != "broadcast_in_dim" or jnp.shape(inputs[0]):
                return None
            (filled,) = bound(eqn, inputs)
            self._fills[id(filled)] = filled, inputs[0]
            return [filled]
        if name in CALLS:
            return evaluated(closed_of(params[CALLS[name]]), inputs, self)
        if name == "cond":
            index, *operands = inputs
            branches = [evaluated(closed_of(branch), operands, self) for branch in params["branches"]]
            return [self._selected(index, cases) for cases in zip(*branches, strict=True)]
        shape, of_parts = own.shape, [x for x in inputs if isinstance(x, _InParts)]
        alike = all(x.is_flat == own.is_flat and _form(x) == _form(own) for x in of_parts)
        if alike and name in ELEMENTWISE and all(v.aval.shape == shape for v in eqn.outvars):
            by_part = zip(*(self.parts(x, own) for x in inputs), strict=True)
            (parts,) = zip(*(bound(eqn, list(of_part)) for of_part in by_part), strict=True)
            return [dataclasses.replace(own, parts=list(parts))]
        if alike and name == "reshape" and eqn.outvars[0].aval.shape == (math.prod(shape),):
            flat = [part.reshape(-1) for part in own.parts]
            return [dataclasses.replace(own, is_flat=True) if own.axis else dataclasses.replace(own, parts=flat)]
        if alike and name in _ADDED and all(v.aval.size == 1 for v in eqn.outvars):
            return [self._number(eqn, inputs, own)]
        raise _needed_in_one_piece(name, own.leaf)

    def parts(self, x: Value, like: _InParts) -> list[Value]:
        """Return the rows of a value for each part of `like`; a number, or an array with one row, for all of them."""
        if isinstance(x, _InParts):
            return x.parts
        if id(x) in self._fills and x.shape == like.shape:
            number = jnp.asarray(self._fills[id(x)][1], x.dtype)
            return [jnp.broadcast_to(number, part.shape) for part in like.parts]
        if like.is_flat and jnp.ndim(x):
            x = jnp.broadcast_to(x, like.shape).reshape(like.leaf.whole_shape)
        elif jnp.ndim(x) < len(like.shape) or x.shape[like.axis] != like.shape[like.axis]:
            return [x] * len(like.parts)
        return divided(x, Rows(like.parts, like.axis)).parts

    def _selected(self, index: Value, cases: Sequence[Value]) -> Value:
        own = next((x for x in cases if isinstance(x, _InParts)), None)
        if own is None:
            return lax.select_n(index, *cases)
        by_part = zip(*(self.parts(x, own) for x in cases), strict=True)
        return dataclasses.replace(own, parts=[lax.select_n(index, *of_part) for of_part in by_part])

    def _number(self, eqn: Eqn, inputs: list[Value], own: _InParts) -> Value:
        """Return the number to which a leaf is reduced. A sum of halves is rounded once."""
        name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
        by_input = [[x.reshape(-1) if own.is_flat else x for x in self.parts(x, own)] for x in inputs]
        if name == "reduce_sum" and jnp.issubdtype(dtype, jnp.floating):
            by_input = [[part.astype(jnp.promote_types(dtype, jnp.float32)) for part in x] for x in by_input]
        results = [bound(eqn, list(of_part))[0] for of_part in zip(*by_input, strict=True)]
        return functools.reduce(_ADDED[name], results).astype(dtype)


def _form(node: Rows | _InParts) -> tuple[int, list[tuple[int, ...]]]:
    return node.axis, [part.shape for part in node.parts]


def _needed_in_one_piece(name: str, leaf: Leaf) -> ValueError:
    return ValueError(
        f"optimizer: its {name} needs {leaf.path} of shape {leaf.whole_shape} in one piece, but its rows are on "
        "several IPUs: use an optimizer that is elementwise or takes norms of whole leaves (sgd, adam, lamb, "
        "clip_by_global_norm), or one array per layer in place of a stacked one"
    )

"""Divide an optimizer's update, traced on the user's tree, where rows of a leaf are on several IPUs.

optax sees    {"layers": w}                            in masks, labels and rates by path, in shapes and norms
IPUs have     {"layers": Rows([w[0:4], w[4:8]])}

m' = b1 * m + g        row by row: once for each part
g @ g.mT               a product per layer: once for each part, by the rules with which a function is cut
sum(g * g)             once for each part, and then added: the number of the whole leaf
zeros, noise           of the whole leaf's shape: its rows
sort(g, axis=0)        mixes rows, needs the leaf in one piece: refused
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax.base.annotations import Eqn, Jaxpr, Tree, Value
from ipu_jax.base.jaxprs import CALLS, ELEMENTWISE, bound, closed_of, evaluated, in_scan_parts
from ipu_jax.base.row_rules import FOLLOWED, Before, Rule, Taken
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.layout.tree_parts import Rows, divided, is_rows, resized


def _over_rows(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the same rows of all that a scan without a carry goes over, as `lax.map` does over layers."""
    consts, carry, over = in_scan_parts(eqn.params, [*eqn.invars])
    rows = [*[None] * len(consts), *[taken] * len(over)]
    return None if carry or taken.dim else Before(rows, {"length": taken.stop - taken.start})


def _of_matrices(eqn: Eqn, taken: Taken) -> Before | None:
    """Take the same rows, if they are not along the last two dims, which are matrices."""
    return Before([taken for _ in eqn.invars]) if taken.dim < eqn.invars[0].aval.ndim - 2 else None


# as for cutting, and more: an equation here may have several results
_RULES: Final[Mapping[str, Rule]] = {
    **FOLLOWED,
    **dict.fromkeys(("cholesky", "eigh", "qr", "svd", "triangular_solve"), _of_matrices),
    "scan": _over_rows,
}
_ADDED: dict[str, Callable[[Value, Value], Value]] = {
    "reduce_sum": lax.add,
    "dot_general": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}
"""How the results of a leaf's parts become the result of the leaf, per primitive that reduces to one number."""
_STATIC: Final = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _InParts:
    """A value whose rows along an axis are in several parts. A pytree, so that a loop can carry it.

    Attributes:
        parts: the parts; inside a loop, which runs once for each part, this one alone.
        leaf: the first part of the leaf that the value is computed from.
        rows: per part, which rows of the value it is, along one and the same axis.
        count: how many rows the value has.
        is_flat: whether the value is flat, and its parts are not: along another axis than the first, flat parts do not
            follow one another in the flat value.
    """

    parts: list[Value]
    leaf: Leaf = dataclasses.field(metadata=_STATIC)
    rows: tuple[Taken, ...] = dataclasses.field(metadata=_STATIC)
    count: int = dataclasses.field(metadata=_STATIC)
    is_flat: bool = dataclasses.field(default=False, metadata=_STATIC)

    @classmethod
    def of(cls, node: Rows, leaf: Leaf) -> "_InParts":
        """Return all parts of a value."""
        ends = [*itertools.accumulate((part.shape[node.axis] for part in node.parts), initial=0)]
        rows = tuple(Taken(node.axis, *of_part) for of_part in itertools.pairwise(ends))
        return cls(node.parts, leaf, rows, ends[-1])

    @property
    def axis(self) -> int:
        return self.rows[0].dim

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Return the shape of the parts together."""
        return resized(self.parts[0].shape, self.axis, self.count)

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.prod(self.whole_shape),) if self.is_flat else self.whole_shape

    def along(self, dim: int, count: int) -> tuple[Taken, ...]:
        """Return the rows of each part along a dim of another value, in which several can be one, or one several."""
        return tuple(Taken(dim, *(end * count // self.count for end in of[1:])) for of in self.rows)

    def only(self, k: int) -> "_InParts":
        """Return one part."""
        return dataclasses.replace(self, parts=self.parts[k : k + 1], rows=self.rows[k : k + 1])

    def fits(self, other: Value) -> bool:
        """Return whether another value has parts of the same rows and shapes; one that is not in parts has."""
        if not isinstance(other, _InParts):
            return True
        form = lambda x: (x.is_flat, x.rows, [part.shape for part in x.parts])
        return form(self) == form(other)


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
        args = [_InParts.of(x, leaf) if is_rows(x) else x for x, leaf in zip(given, of, strict=True)]
        results = evaluated(closed, [*args, loss], _Dividing())
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
            if not is_new and not (is_rows(own) and result.fits(_InParts.of(own, result.leaf))):
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


class _Dividing:
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
        alike, size = all(map(own.fits, inputs)), math.prod(own.shape)
        if own.is_flat and alike and name in ELEMENTWISE and all(v.aval.shape == (size,) for v in eqn.outvars):
            by_part = zip(*(self._parts(x, own) for x in inputs), strict=True)
            (parts,) = zip(*(bound(eqn, list(of_part)) for of_part in by_part), strict=True)
            return [dataclasses.replace(own, parts=list(parts))]
        if name == "reshape" and own.axis and not own.is_flat and eqn.outvars[0].aval.shape == (size,):
            return [dataclasses.replace(own, is_flat=True)]
        if alike and own.rows[-1].stop - own.rows[0].start == own.count and _is_number(eqn):
            return [self._number(eqn, inputs, own)]
        results = self._row_by_row(eqn, inputs, own)
        if results is None and name in ("scan", "while"):
            results = self._part_by_part(eqn, inputs, own)
        if results is None:
            raise _needed_in_one_piece(name, own.leaf)
        return results

    def _row_by_row(self, eqn: Eqn, inputs: list[Value], own: _InParts) -> list[Value] | None:
        """Return the results if their rows follow from the same rows of what is in parts; else None."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is None or eqn.effects:
            return None
        for dim, count in enumerate(eqn.outvars[0].aval.shape):
            rows = own.along(dim, count)
            found = [before for k, of in enumerate(rows) if (before := _of_part(rule(eqn, of), inputs, k)) is not None]
            if len(found) < len(rows):
                continue
            results = list[list[Value]]()
            for k, before in enumerate(found):
                given = [self._rows(x, of, k) for x, of in zip(inputs, before.rows, strict=True)]
                results.append(bound(eqn.replace(params={**eqn.params, **before.params}), given))
            whole = dataclasses.replace(own, rows=rows, count=count)
            return [dataclasses.replace(whole, parts=list(parts)) for parts in zip(*results, strict=True)]
        return None

    def _part_by_part(self, eqn: Eqn, inputs: list[Value], own: _InParts) -> list[Value] | None:
        """Return the results of a loop, which runs once for each part, and once for what does not depend on parts."""
        is_part = [isinstance(x, _InParts) for x in inputs]
        over = in_scan_parts(eqn.params, is_part)[2] if eqn.primitive.name == "scan" else []
        if any(over) or eqn.effects or any(len(x.parts) != len(own.parts) for x in itertools.compress(inputs, is_part)):
            return None
        each = ([x.only(k) if isinstance(x, _InParts) else x for x in inputs] for k in range(len(own.parts)))
        results = zip(*(self._looped(eqn, part) for part in each), strict=True)
        without = [jnp.zeros(x.shape, x.parts[0].dtype) if isinstance(x, _InParts) else x for x in inputs]
        return [_together(*both) for both in zip(bound(eqn, without), results, strict=True)]

    def _looped(self, eqn: Eqn, inputs: list[Value]) -> list[Value]:
        """Return the results of a loop on one part."""
        params = eqn.params
        if eqn.primitive.name == "while":
            at, ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            body = lambda carry: self._alike(carry, evaluated(params["body_jaxpr"], [*inputs[at:ends], *carry], self))
            decide = lambda carry: evaluated(params["cond_jaxpr"], [*inputs[:at], *carry], self)[0]
            return lax.while_loop(decide, body, self._settled(body, inputs[ends:]))
        consts, carry, over = in_scan_parts(params, inputs)

        def step(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
            results = evaluated(params["jaxpr"], [*consts, *carry, *x], self)
            stacked = results[len(carry) :]
            if (own := next((y for y in stacked if isinstance(y, _InParts)), None)) is not None:
                raise _needed_in_one_piece("scan", own.leaf)
            return self._alike(carry, results[: len(carry)]), stacked

        first = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in over]
        carry = self._settled(lambda carry: jax.eval_shape(step, carry, first)[0], carry)
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(step, carry, over, **options)
        return [*carry, *stacked]

    def _settled(self, body: Callable[[list[Value]], list[Value]], carry: list[Value]) -> list[Value]:
        """Return the carry with parts in place of what becomes a part in the loop."""
        while True:
            before, carry = carry, self._alike(jax.eval_shape(body, carry), carry)
            if jax.tree.structure(carry) == jax.tree.structure(before):
                return carry

    def _alike(self, likes: list[Value], values: list[Value]) -> list[Value]:
        """Return values with parts wherever `likes` have them."""
        return [
            dataclasses.replace(like, parts=self._parts(x, like)) if isinstance(like, _InParts) else x
            for like, x in zip(likes, values, strict=True)
        ]

    def _parts(self, x: Value, like: _InParts) -> list[Value]:
        """Return the rows of a value of the same shape for each part of `like`, or a number for all of them."""
        if isinstance(x, _InParts):
            if not like.fits(x):
                raise _needed_in_one_piece("loop or condition", x.leaf)
            return x.parts
        if like.is_flat and jnp.ndim(x):
            x = jnp.broadcast_to(x, like.shape).reshape(like.whole_shape)
        return [self._rows(x, rows if jnp.ndim(x) else None) for rows in like.rows]

    def _rows(self, x: Value, rows: Taken | None, k: int = 0) -> Value:
        """Return rows of a value, or part `k` of it."""
        if isinstance(x, _InParts):
            return x.parts[k]
        if rows is None:
            return x
        if id(x) in self._fills:
            return jnp.broadcast_to(jnp.asarray(self._fills[id(x)][1], x.dtype), rows.of(x.shape))
        return lax.slice_in_dim(x, rows.start, rows.stop, axis=rows.dim)

    def _selected(self, index: Value, cases: Sequence[Value]) -> Value:
        own = next((x for x in cases if isinstance(x, _InParts)), None)
        if own is None:
            return lax.select_n(index, *cases)
        by_part = zip(*(self._parts(x, own) for x in cases), strict=True)
        return dataclasses.replace(own, parts=[lax.select_n(index, *of_part) for of_part in by_part])

    def _number(self, eqn: Eqn, inputs: list[Value], own: _InParts) -> Value:
        """Return the number to which a leaf is reduced. A sum of halves is rounded once."""
        name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
        by_input = [[x.reshape(-1) if own.is_flat else x for x in self._parts(x, own)] for x in inputs]
        if name == "reduce_sum" and jnp.issubdtype(dtype, jnp.floating):
            by_input = [[part.astype(jnp.promote_types(dtype, jnp.float32)) for part in x] for x in by_input]
        results = [bound(eqn, list(of_part))[0] for of_part in zip(*by_input, strict=True)]
        return functools.reduce(_ADDED[name], results).astype(dtype)


def _is_number(eqn: Eqn) -> bool:
    """Return whether an equation reduces its inputs to one number, element by element."""
    left, right = eqn.params["dimension_numbers"][0] if eqn.primitive.name == "dot_general" else ((), ())
    return eqn.primitive.name in _ADDED and tuple(left) == tuple(right) and all(v.aval.size == 1 for v in eqn.outvars)


def _of_part(before: Before | None, inputs: Sequence[Value], k: int) -> Before | None:
    """Return what rows of a result follow from, if of all that is in parts it is part `k`; else None."""
    if before is None or (before.within is not None and before.within.start):
        return None
    both = zip(inputs, before.rows, strict=True)
    of_parts = [x.rows[k : k + 1] == (rows,) and not x.is_flat for x, rows in both if isinstance(x, _InParts)]
    return before if all(of_parts) else None


def _together(plain: Value, values: Sequence[Value]) -> Value:
    """Return a value from each of its parts, or `plain` if it is not in parts."""
    first, *_ = values
    if not isinstance(first, _InParts):
        return plain
    return dataclasses.replace(first, parts=[x.parts[0] for x in values], rows=tuple(x.rows[0] for x in values))


def _needed_in_one_piece(name: str, leaf: Leaf) -> ValueError:
    return ValueError(
        f"optimizer: its {name} needs {leaf.path} of shape {leaf.whole_shape} in one piece, but its rows are on "
        "several IPUs: if dim 0 is layers, treat each as a leaf of its own, by ipu_jax.steps.per_layer(tx) or for muon "
        "by MuonDimensionNumbers(1, 2), or use an optimizer that is elementwise or takes norms of whole leaves (sgd, "
        "adam, lamb, clip_by_global_norm)"
    )

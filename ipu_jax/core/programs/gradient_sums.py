"""Run a traced backward and add each part of a gradient to its place in the accumulator.

    traced      da = scan(...) stacked       dpos = pad(dt)        dw = dw1 + dw2
    run here    per layer: sum_a[i] += da_i  sum_pos[:T] += dt     sum_w += dw1, sum_w += dw2

So a scan over layers never stacks the gradients of all layers, and a gradient that is zero outside a slice changes only
that slice of the accumulator. A gradient is a sum of parts, and the jaxpr shows which equation computes each part.
Where nothing else reads a part, its equation is replaced by an addition to the accumulator in place. Any other part is
computed as traced, and then added. JAX's own method, `VJP.with_refs`, adds a scan's gradients to the wrong leaves in
jax 0.10 where some leaves have a `Ref` and others have none (docs/design/engine.md).
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import CHECKPOINTS, bound, closed_of, in_scan_parts, laid_open, read_by, value_of

_LARGEST_INDEX = np.iinfo(np.int32).max
_ELEMENTS_PER_PIECE = 16  # elements of a whole block that are read and written in the time of one piece's update


@dataclasses.dataclass(frozen=True)
class AccumulatorBlock:
    """A block of an accumulator, to which a part of a gradient, or the rows of a scatter-add, are added in place.

        accumulator      a block                       what is added
        (L, V, D)        [i, 2:]       a (V-2, D)      part                    sum[i, 2:] += part
        (L, V, D)        [i]           a (V, D)        zeros[ids] += rows      sum[i, ids] += rows
        flat             a table from its beginning    zeros[ids] += rows      sum[ids * D:][:D] += rows

    XLA adds to a slice and scatters into an array in place. Indices have the same meaning as in a scatter-add into
    zeros of the block's shape: a row outside the block must not reach neighbouring elements of the accumulator.

    Attributes:
        leaf: the shape of the accumulator, or of the leaf whose elements a flat accumulator begins with.
        flat: whether the accumulator is flat.
        zero: an int32 0 that XLA does not know to be 0. It is added to each index, because XLA fuses an update at a
            constant index into a loop over the whole array.
        start: the block's first index, per dim of the leaf.
        size: the block's size, per dim of the leaf.
        dims: the dims of the leaf that the block's shape contains; along the others the block has one element.
    """

    leaf: tuple[int, ...]
    flat: bool
    zero: Value
    start: tuple[Value, ...]
    size: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def whole(cls, leaf: tuple[int, ...], flat: bool, zero: Value) -> "AccumulatorBlock":
        return cls(leaf, flat, zero, (0,) * len(leaf), leaf, tuple(range(len(leaf))))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.size[d] for d in self.dims)

    @property
    def is_whole(self) -> bool:
        return self.size == self.leaf and len(self.dims) == len(self.leaf)

    @property
    def in_one_piece(self) -> bool:
        """Return whether the block is contiguous in the accumulator, or the accumulator is not flat."""
        return not self.flat or math.prod(self.size[: self._inner(self.size)]) == 1

    def part(self, at: Sequence[Value], shape: Sequence[int]) -> "AccumulatorBlock":
        """Return the part of this block that has this shape and begins at these indices."""
        start, size = list(self.start), list(self.size)
        for d, i, n in zip(self.dims, at, shape, strict=True):
            start[d], size[d] = start[d] + i, n
        return dataclasses.replace(self, start=tuple(start), size=tuple(size))

    def with_dims(self, kept: Sequence[int]) -> "AccumulatorBlock":
        """Return the same block with these dims only; along the others it has one element."""
        return dataclasses.replace(self, dims=tuple(self.dims[d] for d in kept))

    def row(self, i: Value) -> "AccumulatorBlock":
        one = self.part((i, *[0] * (len(self.dims) - 1)), (1, *self.shape[1:]))
        return one.with_dims(range(1, len(self.dims)))

    def add(self, total: Value, part: Value) -> Value:
        """Return the accumulator after adding a part of the block's shape. The block must be in one piece."""
        if part.shape == total.shape == self.leaf:
            return total + part.astype(total.dtype)
        start = (self._position(self.start),) if self.flat else self.start
        block = part.reshape(-1 if self.flat else self.size)
        start = [jnp.asarray(i, self.zero.dtype) + self.zero for i in start]
        old = lax.dynamic_slice(total, start, block.shape)
        return lax.dynamic_update_slice(total, old + block.astype(total.dtype), start)

    def scatter_add(self, total: Value, indices: Value, updates: Value, params: dict[str, Any]) -> Value | None:
        """Return the accumulator after adding the updates of a scatter-add into zeros of the block's shape.

        Args:
            total: the accumulator.
            indices, updates: the equation's inputs; the updates have any float dtype.
            params: the equation's parameters.

        Returns:
            None where the caller must scatter into zeros and add the result: the updates are columns of a flat table,
            where that costs less, or the accumulator has no elements or more than an int32 can count.
        """
        dims, mode = params["dimension_numbers"], params["mode"]
        updates = updates.astype(total.dtype)
        if self.is_whole and not self.flat:
            flags = {name: params[name] for name in ("indices_are_sorted", "unique_indices")}
            return lax.scatter_add(total, indices, updates, dims, mode=mode, **flags)
        update = [1] * len(self.leaf)  # its shape, in dims of the leaf
        beside = (*dims.inserted_window_dims, *dims.operand_batching_dims)
        windows = (d for k, d in enumerate(self.dims) if k not in beside)
        for d, position in zip(windows, dims.update_window_dims, strict=True):
            update[d] = updates.shape[position]
        starts, inside = self._starts(indices, dims, update)
        if mode == lax.GatherScatterMode.CLIP:
            inside = jnp.ones_like(inside)
        order = [k for k in range(updates.ndim) if k not in dims.update_window_dims] + list(dims.update_window_dims)
        updates, count = updates.transpose(order), math.prod(inside.shape)
        if not self.flat:
            starts = [jnp.where(inside, i, size) for i, size in zip(starts, self.leaf, strict=True)]
            axes = tuple(range(len(self.leaf)))
            to_blocks = lax.ScatterDimensionNumbers(tuple(d + 1 for d in axes), (), axes)
            at = jnp.stack([i.reshape(-1) for i in starts], axis=-1)
            return lax.scatter_add(total, at, updates.reshape(count, *update), to_blocks, mode="drop")
        inner = self._inner(update)
        pieces = math.prod(update[:inner])
        many = pieces > 1 and count * pieces * _ELEMENTS_PER_PIECE > math.prod(self.size)
        if many or total.size > _LARGEST_INDEX or not math.prod(self.leaf):
            return None
        offsets = np.ravel_multi_index(np.indices((*update[:inner], *[1] * (len(update) - inner))), self.leaf).astype(
            np.int32
        )
        first = jnp.where(inside, self._position(starts), total.size)[..., None] + offsets.reshape(-1)
        to_pieces = lax.ScatterDimensionNumbers((1,), (), (0,))
        rows = updates.reshape(count * pieces, math.prod(update[inner:]))
        return lax.scatter_add(total, first.reshape(-1, 1), rows, to_pieces, mode="drop")

    def _inner(self, shape: Sequence[int]) -> int:
        """Return the first dim from which an array of this shape is contiguous in the flat leaf."""
        return max((d for d, size in enumerate(self.leaf) if shape[d] < size), default=0)

    def _position(self, index: Sequence[Value]) -> Value:
        """Return the position of an index in the flat leaf."""
        return sum(i * math.prod(self.leaf[d + 1 :]) for d, i in enumerate(index))

    def _starts(self, indices: Value, dims: Value, update: Sequence[int]) -> tuple[list[Value], Value]:
        """Return the first element of each update, per dim of the leaf, and whether the update is inside the block.

        An update outside the block is moved inside.
        """
        shape = indices.shape[:-1]
        starts, inside = [jnp.full(shape, i, jnp.int32) + self.zero for i in self.start], jnp.ones(shape, bool)
        for k, position in enumerate(dims.scatter_dims_to_operand_dims):
            d, index = self.dims[position], indices[..., k]
            # in the dtype of the indices, which may be too small for the bound
            moved = jnp.clip(index, 0, min(self.size[d] - update[d], int(jnp.iinfo(index.dtype).max)))
            inside &= moved == index
            starts[d] += moved.astype(jnp.int32)
        for position, k in zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True):
            starts[self.dims[position]] += lax.broadcasted_iota(jnp.int32, shape, k)
        return starts, inside


@dataclasses.dataclass(frozen=True)
class Sum:
    """The accumulator of one leaf's gradient.

    Attributes:
        total: an array of the leaf's shape, or a flat array that begins with the leaf's elements; its float dtype is at
            least as wide as the leaf's.
        shape: the leaf's shape.
    """

    total: Value
    shape: tuple[int, ...]


def add_gradients(
    backward: Jaxpr, args: Sequence[Value], num_dx: int, sums: Sequence[Sum], zero: Value, *, exact: bool = False
) -> tuple[list[Value], list[Value]]:
    """Run a backward and add its gradients to their accumulators.

    Args:
        backward: a closed jaxpr whose outputs are `num_dx` other values, then one gradient per entry of `sums`.
        args: its arguments.
        num_dx: how many outputs come before the gradients.
        sums: the accumulators.
        zero: an int32 0 that XLA does not know to be 0 (`AccumulatorBlock`).
        exact: whether each element gets one addition, of its whole gradient. Otherwise a sum's terms are added one by
            one.

    Returns:
        `(new totals, the other outputs)`.
    """
    totals = [s.total for s in sums]
    blocks = [AccumulatorBlock.whole(s.shape, s.total.shape != s.shape, zero) for s in sums]
    outvars = backward.jaxpr.outvars[num_dx:]
    wanted = [_Wanted(var, k, block) for k, (var, block) in enumerate(zip(outvars, blocks, strict=True))]
    walk = _Walk(backward, wanted, exact=exact)
    env = walk.run(args, totals)
    return totals, [value_of(v, env) for v in backward.jaxpr.outvars[:num_dx]]


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A variable whose value is to be added to a block of accumulator `k`."""

    var: Var
    k: int
    block: AccumulatorBlock


class _Walk:
    """Run one program whose equations compute parts of gradients.

    Args:
        closed: the program.
        wanted: its gradients.
        carried: inputs that are accumulators themselves (a scan's carry, to which the body adds), and so are not
            added again.
        exact: as for `add_gradients`.
    """

    def __init__(self, closed: Jaxpr, wanted: Sequence[_Wanted], carried: Sequence[Var] = (), *, exact: bool):
        self.closed, self.exact, jaxpr = closed, exact, closed.jaxpr
        self.uses = collections.Counter(read_by(jaxpr.eqns, jaxpr.outvars))
        self.made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self.sums_alone: set[int] = set()  # equations that only add parts
        self.parts: dict[Var, list[_Wanted]] = {}
        self.literals: list[_Wanted] = []
        for want in wanted:
            for part in self.parts_of(want):
                if isinstance(part.var, core.Literal):
                    self.literals.append(part)
                elif part.var not in carried:
                    self.parts.setdefault(part.var, []).append(part)

    def parts_of(self, want: _Wanted) -> list[_Wanted]:
        """Return the parts that add up to a variable, each with its own block, and note the equations that add them."""
        eqn = None if isinstance(want.var, core.Literal) or self.uses[want.var] > 1 else self.made_by.get(want.var)
        block = None if eqn is None else self.block_of_input(eqn, want.block)
        if eqn is None or block is None:
            return [want]
        self.sums_alone.add(id(eqn))
        inputs = eqn.invars if eqn.primitive.name == "add_any" else eqn.invars[:1]
        return [part for var in inputs for part in self.parts_of(_Wanted(var, want.k, block))]

    def block_of_input(self, eqn: Eqn, block: AccumulatorBlock) -> AccumulatorBlock | None:
        """Return the block to which an equation's inputs, or its first input, can be added instead of its output.

        Return None where no block qualifies.
        """
        part, name = eqn.invars[0].aval, eqn.primitive.name
        if name == "add_any":
            return None if self.exact else block
        if name == "convert_element_type":  # the accumulator is float32 at least
            if not jnp.issubdtype(part.dtype, jnp.floating):
                return None
            of, into = jnp.finfo(part.dtype), jnp.finfo(eqn.outvars[0].aval.dtype)  # float8 has no promotion
            rounds = of.nmant > into.nmant or of.maxexp > into.maxexp or of.minexp < into.minexp
            return None if self.exact and rounds else block
        if name == "pad":  # the gradient of a slice
            config = eqn.params["padding_config"]
            if all(low >= 0 and high >= 0 and between == 0 for low, high, between in config):
                inner = block.part([int(low) for low, _, _ in config], part.shape)
                return inner if inner.in_one_piece and self.is_zero(eqn.invars[1]) else None
        if name == "broadcast_in_dim" and part.size == eqn.outvars[0].aval.size:  # of `table[3]`
            return block.with_dims(eqn.params["broadcast_dimensions"])
        return None

    def is_zero(self, var: Var) -> bool:
        if isinstance(var, core.Literal):
            return not np.any(var.val)
        eqn = self.made_by.get(var)
        return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and self.is_zero(eqn.invars[0])

    def run(self, args: Sequence[Value], totals: list[Value]) -> dict[Var, Value]:
        """Return the values of all variables except the sums of parts, and change `totals` in place."""
        jaxpr = self.closed.jaxpr
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*self.closed.consts, *args], strict=True))
        for want in self.literals:
            self.add(want, jnp.full(want.block.shape, want.var.val), totals)
        for var in [*jaxpr.constvars, *jaxpr.invars]:
            for want in self.parts.get(var, ()):
                self.add(want, env[var], totals)
        for eqn in jaxpr.eqns:
            if id(eqn) in self.sums_alone:
                continue
            inputs = [value_of(v, env) for v in eqn.invars]
            own = {
                position: self.parts[var][0]
                for position, var in enumerate(eqn.outvars)
                if self.uses[var] == 1 and len(self.parts.get(var, ())) == 1
            }
            rule = _RULES.get(eqn.primitive.name)
            outputs = rule(self, eqn, inputs, own, totals) if rule and own else None
            if outputs is None:
                outputs, own = dict(enumerate(bound(eqn, inputs))), {}
            for position, value in outputs.items():
                var = eqn.outvars[position]
                env[var] = value
                for want in self.parts.get(var, ()):
                    self.add(want, value, totals)
        return env

    @staticmethod
    def add(want: _Wanted, part: Value, totals: list[Value]) -> None:
        totals[want.k] = want.block.add(totals[want.k], part)


# A rule adds the outputs in `own` (parts that nothing else reads) to `totals`, and returns the equation's other outputs
# as {position: value}. It returns None, and changes nothing, where it does not apply.


def _scan(
    walk: _Walk, eqn: Eqn, inputs: list[Value], own: dict[int, _Wanted], totals: list[Value]
) -> dict[int, Value] | None:
    """Add a row of a stacked output, or the next term of a carried sum, in each iteration."""
    params, body = eqn.params, laid_open(eqn.params["jaxpr"])
    if params["length"] == 0:
        return None  # the accumulator has no row that the body could add to
    consts, init, xs = in_scan_parts(params, inputs)
    num_carry, (_, carry_vars, _) = len(init), in_scan_parts(params, body.jaxpr.invars)
    added = _added_by_body(walk, body, own, carry_vars)
    if not added:
        return None
    for p, want in added.items():
        if p < num_carry and not walk.is_zero(eqn.invars[len(consts) + p]):
            walk.add(want, init[p], totals)
    kept = [p for p in range(len(eqn.outvars)) if p not in added]
    kept_carry = [p for p in kept if p < num_carry]
    ks = sorted({want.k for want in added.values()})

    def step(carry: Value, x: Value) -> Value:
        (values, held), (i, x) = carry, x
        wanted = [
            _Wanted(body.jaxpr.outvars[p], want.k, want.block if p < num_carry else want.block.row(i))
            for p, want in added.items()
        ]
        here = [held[ks.index(k)] if k in ks else None for k in range(len(totals))]
        of_kept = dict(zip(kept_carry, values, strict=True))
        of_carry = [of_kept.get(p) for p in range(num_carry)]
        sums_in = [carry_vars[p] for p in added if p < num_carry]
        env = _Walk(body, wanted, sums_in, exact=walk.exact).run([*consts, *of_carry, *x], here)
        new = [value_of(body.jaxpr.outvars[p], env) for p in kept]
        return (new[: len(kept_carry)], [here[k] for k in ks]), new[len(kept_carry) :]

    start = [init[p] for p in kept_carry], [totals[k] for k in ks]
    rows = jnp.arange(params["length"], dtype=jnp.int32), xs
    how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
    (carry, held), ys = lax.scan(step, start, rows, **how)
    for k, total in zip(ks, held, strict=True):
        totals[k] = total
    return dict(zip(kept, [*carry, *ys], strict=True))


def _added_by_body(walk: _Walk, body: Jaxpr, own: dict[int, _Wanted], carry_vars: Sequence[Var]) -> dict[int, _Wanted]:
    """Return which outputs of a scan its body can add: rows of stacked outputs, and carries that it only adds to."""
    inner, outvars = _Walk(body, (), exact=walk.exact), body.jaxpr.outvars
    parts_of = lambda p, want: [part.var for part in inner.parts_of(dataclasses.replace(want, var=outvars[p]))]
    is_sum = lambda p, want: inner.uses[carry_vars[p]] == 1 and carry_vars[p] in parts_of(p, want)
    return {p: want for p, want in own.items() if p >= len(carry_vars) or is_sum(p, want)}


def _checkpoint(
    walk: _Walk, eqn: Eqn, inputs: list[Value], own: dict[int, _Wanted], totals: list[Value]
) -> dict[int, Value]:
    """Run the body, behind the optimization barrier that JAX's own lowering sets."""
    body, barred = laid_open(closed_of(eqn.params["jaxpr"])), eqn.params["prevent_cse"]
    barred = (barred,) * len(inputs) if isinstance(barred, bool) else barred
    if eqn.params["differentiated"] and any(barred):
        behind = iter(lax.optimization_barrier([v for v, b in zip(inputs, barred, strict=True) if b]))
        inputs = [next(behind) if b else v for v, b in zip(inputs, barred, strict=True)]
    wanted = [_Wanted(body.jaxpr.outvars[p], want.k, want.block) for p, want in own.items()]
    env = _Walk(body, wanted, exact=walk.exact).run(inputs, totals)
    return {p: value_of(v, env) for p, v in enumerate(body.jaxpr.outvars) if p not in own}


def _update_slice(
    walk: _Walk, eqn: Eqn, inputs: list[Value], own: dict[int, _Wanted], totals: list[Value]
) -> dict[int, Value] | None:
    """Add the gradient of a slice at a computed index."""
    part, k, block = inputs[1], own[0].k, own[0].block
    if not walk.is_zero(eqn.invars[0]):
        return None
    # a slice that reaches beyond the end is moved back inside, and so is its gradient
    at = [jnp.clip(i, 0, size - n) for i, size, n in zip(inputs[2:], block.shape, part.shape, strict=True)]
    inner = block.part(at, part.shape)
    if not inner.in_one_piece:
        return None
    totals[k] = inner.add(totals[k], part)
    return {}


def _scatter_add(
    walk: _Walk, eqn: Eqn, inputs: list[Value], own: dict[int, _Wanted], totals: list[Value]
) -> dict[int, Value] | None:
    """Add the gradient of a gather: rows of a table."""
    k, (_, indices, updates) = own[0].k, inputs
    is_alone = walk.is_zero(eqn.invars[0]) and not walk.exact
    total = own[0].block.scatter_add(totals[k], indices, updates, eqn.params) if is_alone else None
    if total is None:
        return None
    totals[k] = total
    return {}


_RULES = {
    "scan": _scan,
    "dynamic_update_slice": _update_slice,
    "scatter-add": _scatter_add,
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
}

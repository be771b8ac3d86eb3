"""Trace a segment's forward and backward programs: F and B, or F, B and W.

    F:   params, x, inputs, state                  ->  y, new state, aux, stash   (from one `jax.vjp`)
    B:   params, inputs, stash, dy                 ->  dx, dparams                (each added to its accumulator)

    B:   params, inputs, stash, dy                 ->  dx, weight residuals       (where the schedule has a W)
    W:   params, inputs, stash, weight residuals   ->  dparams

`inputs` are the micro-batch and the random keys, which B can read again. `jax.vjp` returns a pytree whose leaves are
the residuals. The traced F shows where each residual comes from. If a residual *is* a weight or a part of `inputs`, B
reads it there. If it depends on weights alone (such as a bfloat16 copy of a weight) or follows from others by cheap
operations (`choose_residuals`), B computes it again. Only the other residuals are stashed: weights never are.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ipu_jax.base.annotations import Jaxpr, Params, Tree, Value, Var
from ipu_jax.base.jaxprs import depending, laid_open, needed, part_of, plain, postponed, read_by, shape_of, variables
from ipu_jax.base.keys import with_keys, without_keys
from ipu_jax.core.programs._backward_split import split_backward
from ipu_jax.core.programs._keeping import bytes_of, cheapest_to_keep
from ipu_jax.core.programs._likeness import Signature, signature_of
from ipu_jax.core.programs._segment_checks import check_results, differing_outputs
from ipu_jax.core.programs.gradient_sums import Sum, add_gradients
from ipu_jax.core.programs.prices import Prices
from ipu_jax.core.programs.segment import Message, MicrobatchInputs, Segment, SegmentResults, call_segment
from ipu_jax.core.programs.variance import needs_sums_only
from ipu_jax.core.stage import naming

_Values = list[Value]
_Split = tuple[_Values, _Values, Callable[[_Values, _Values], Tree]]


def split_floats(tree: Tree) -> _Split:
    """Return the tree's floating leaves, its other leaves, and a function that joins both into the tree again.

    Only the floating leaves have gradients.
    """
    dtypes = [(leaf if hasattr(leaf, "dtype") else np.asarray(leaf)).dtype for leaf in jax.tree.leaves(tree)]
    return split_marked(tree, [jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes])


def split_marked(tree: Tree, first: Sequence[bool]) -> _Split:
    """Return the marked leaves, the others, and a function that joins both into the tree again."""
    leaves, treedef = jax.tree.flatten(tree)

    def join(marked: list[Value], others: list[Value]) -> Tree:
        of_marked, of_others = iter(marked), iter(others)
        return jax.tree.unflatten(treedef, [next(of_marked if is_first else of_others) for is_first in first])

    pick = lambda want: [leaf for leaf, is_first in zip(leaves, first, strict=True) if is_first is want]
    return pick(True), pick(False), join


@dataclasses.dataclass(frozen=True)
class SegmentProgram:
    """F and B of one segment, traced for arguments of these shapes; F alone if the segment has no backward.

    Attributes:
        results: the results of F, as a tree of `jax.ShapeDtypeStruct`.
        stash: the residuals that F stores for B, per micro-batch, as a list of `jax.ShapeDtypeStruct`.
        weight_residuals: the values that B stores for W, as such a list; empty where B is not split.
        jaxprs: the closed jaxprs of "F", "B" and, where the backward is split, "W", of flat arguments as at the top of
            this file; without a backward only "F".
        whole_backward: the closed jaxpr of the whole backward pass; it is B where B is not split.
        needs_sums_only: whether B of a concurrent segment needs the cotangents of y only as sums over the IPUs.
        exact: as in `Segment`.
    """

    results: SegmentResults
    stash: list[jax.ShapeDtypeStruct]
    weight_residuals: list[jax.ShapeDtypeStruct]
    jaxprs: dict[str, Jaxpr]
    whole_backward: Any = None
    needs_sums_only: bool = False
    exact: bool = False
    _signed: Callable[[], Signature | None] = lambda: None
    _stash_types: tuple[Value, ...] = ()  # the stash's own dtypes: a random key is stashed as its data
    _num_dx: int = 0

    @property
    def y(self) -> Tree:
        return self.results.y

    def computes_the_same(self, other: "SegmentProgram") -> bool:
        """Return whether both compute the same function; False where it cannot be decided."""
        if jax.tree.structure(self.results) != jax.tree.structure(other.results):
            return False
        return self.jaxprs is other.jaxprs or (self._signed() is not None and self._signed() == other._signed())

    def forward(
        self, params: Params, x: Message, inputs: MicrobatchInputs, state: Mapping[str, Tree]
    ) -> tuple[SegmentResults, list[Value]]:
        """Return `(results, stash)`."""
        outputs = core.jaxpr_as_fun(self.jaxprs["F"])(*jax.tree.leaves((params, x, inputs, state)))
        tree = jax.tree.structure(self.results)
        results, stash = outputs[: tree.num_leaves], outputs[tree.num_leaves :]
        return jax.tree.unflatten(tree, results), list(map(without_keys, stash))

    def backward(
        self, params: Params, inputs: MicrobatchInputs, stash: _Values, dy: _Values, sums: Sequence[Sum], zero: Value
    ) -> tuple[_Values, _Values]:
        """Return `(totals, dx)`: each trained leaf's accumulator with its gradient added, and the gradient of x.

        `dy` and `dx` list the floating leaves of y and x; for `sums` and `zero` see `add_gradients`.
        """
        args = [*jax.tree.leaves((params, inputs)), *self._with_types(stash), *dy]
        return add_gradients(self.whole_backward, args, self._num_dx, sums, zero, exact=self.exact)

    def backward_input(
        self, params: Params, inputs: MicrobatchInputs, stash: _Values, dy: _Values
    ) -> tuple[_Values, _Values]:
        """Run B of a split backward: return `(dx, weight residuals)`."""
        args = [*jax.tree.leaves((params, inputs)), *self._with_types(stash), *dy]
        outputs = core.jaxpr_as_fun(self.jaxprs["B"])(*args)
        return outputs[: self._num_dx], outputs[self._num_dx :]

    def backward_weight(
        self, params: Params, inputs: MicrobatchInputs, stash: _Values, residuals: _Values, sums: list[Sum], zero: Value
    ) -> _Values:
        """Run W with B's weight residuals: return each trained leaf's accumulator with its gradient added."""
        args = [*jax.tree.leaves((params, inputs)), *self._with_types(stash), *residuals]
        return add_gradients(self.jaxprs["W"], args, 0, sums, zero, exact=self.exact)[0]

    def _with_types(self, stash: list[Value]) -> list[Value]:
        return [with_keys(value, own) for value, own in zip(stash, self._stash_types, strict=True)]


Source = tuple[Literal["input", "derived", "stash"], int]


@dataclasses.dataclass(frozen=True)
class Residuals:
    """The residuals of a segment's F.

    Attributes:
        sources: per residual, how B gets it (it is an input; it is derived from inputs and stashed values by cheap
            operations; or it is stashed), and its index among the inputs, the derived or the stashed values.
        stashed: the variables of F to stash.
        derive: a closed jaxpr from F's readable inputs and the stashed values to the derived values.
    """

    sources: tuple[Source, ...]
    stashed: list[Value]
    derive: Jaxpr

    def restored(self, readable: Sequence[Value], stash: Sequence[Value]) -> list[Value]:
        """Return the residuals, given the inputs that B reads and the stashed values."""
        values = {"input": readable, "derived": core.jaxpr_as_fun(self.derive)(*readable, *stash), "stash": stash}
        return [values[kind][i] for kind, i in self.sources]


@dataclasses.dataclass(frozen=True)
class TracedForward:
    """F of a segment, traced.

    Attributes:
        jaxpr: the closed jaxpr from (params, x, inputs, state) to the results and the values that B may read.
        results: the shapes of the results.
        differs: per output of the jaxpr, whether it may differ between IPUs.
        residuals: how B gets the residuals of `jax.vjp`; None where the segment has no backward.
        vjp: the tree of these residuals: a function from dy to (dparams, dx).
    """

    jaxpr: Jaxpr
    results: SegmentResults
    differs: list[bool]
    residuals: Residuals | None
    vjp: Any

    @property
    def num_results(self) -> int:
        return len(jax.tree.leaves(self.results))


@dataclasses.dataclass(frozen=True)
class TracedBackward:
    """The whole backward pass of a segment, traced.

    Attributes:
        jaxpr: the closed jaxpr from (params, inputs, stash, dy) to (dx, dparams).
        read: the numbers of the values of F that are its stash.
        num_given, num_dy, num_dx: how many leaves (params, inputs), dy and dx have.
        needs_sums_only: as in `SegmentProgram`.
    """

    jaxpr: Jaxpr
    read: list[int]
    num_given: int
    num_dy: int
    num_dx: int
    needs_sums_only: bool


def trace_segment(
    segment: Segment,
    params: Params,
    x: Message,
    inputs: MicrobatchInputs,
    state: Mapping[str, Tree],
    *,
    last: bool,
    split: bool = False,
    trained: Sequence[bool] | None = None,
    shards: Tree = None,
) -> SegmentProgram:
    """Trace a segment for arguments of these shapes (arrays or `jax.ShapeDtypeStruct`).

    For a segment without a backward, only F is traced, without residuals.

    Args:
        segment: the segment to trace.
        params, x, inputs, state: its arguments.
        last: whether it returns the loss, or in prediction the outputs.
        split: whether to split the backward into B and W.
        trained: per leaf of params, whether it gets a gradient; by default all do.
        shards: trees of bool for `(params, state)`: whether a leaf is sharded over the IPUs; by default none is.

    Raises:
        ValueError: the last segment does not return a scalar loss; a collective over "ipu" would wait for ever; a
            result of a concurrent segment may differ between IPUs, or `predict_specs` do not fit it. Errors that a
            stage raises get a note with its name.
    """
    trained = [True] * len(jax.tree.leaves(params)) if trained is None else trained
    shards = jax.tree.map(lambda _: False, (params, state)) if shards is None else shards
    forward = trace_forward(segment, (params, x, inputs, state), shards, trained, last=last)
    results, count = forward.results, forward.num_results
    if not segment.backward:
        return SegmentProgram(results, [], [], {"F": forward.jaxpr}, _signed=_signed(forward.jaxpr))
    backward = trace_backward(segment, forward, (params, inputs), shards[0], trained, last=last)
    outvars = forward.jaxpr.jaxpr.outvars
    f = with_outputs(forward.jaxpr, [*outvars[:count], *(outvars[count + k] for k in backward.read)])
    stash_types = tuple(map(shape_of, f.out_avals[count:]))
    jaxprs, weight_residuals = {"F": f, "B": backward.jaxpr}, list[jax.ShapeDtypeStruct]()
    if split:
        halves = split_backward(backward.jaxpr, backward.num_dx, backward.num_given, backward.num_dy, segment.prices)
        jaxprs["B"], jaxprs["W"], weight_residuals = halves
    return SegmentProgram(
        results=results,
        stash=jax.eval_shape(lambda *kept: [*map(without_keys, kept)], *stash_types),
        weight_residuals=weight_residuals,
        jaxprs=jaxprs,
        whole_backward=backward.jaxpr,
        needs_sums_only=backward.needs_sums_only,
        exact=segment.exact,
        _signed=_signed(f, backward.jaxpr),
        _stash_types=stash_types,
        _num_dx=backward.num_dx,
    )


def _signed(*jaxprs: Jaxpr) -> Callable[[], Signature | None]:
    """Return what makes their signature when it is asked for, once for all programs that share it."""
    return functools.cache(functools.partial(signature_of, jaxprs))


def trace_forward(segment: Segment, args: Tree, shards: Tree, trained: Sequence[bool], *, last: bool) -> TracedForward:
    """Trace F, and choose the values that B may read. `args` are (params, x, inputs, state)."""

    def program(params: Params, x: Message, inputs: MicrobatchInputs, state: Mapping[str, Tree]) -> tuple[Tree, Tree]:
        call = lambda params, x: call_segment(segment, params, x, inputs, state, last)
        if not segment.backward:
            return call(params, x), None
        weights, frozen, join = split_marked(params, trained)
        x_floats, x_others, join_x = split_floats(x)

        def differentiable(weights: list[Value], x_floats: list[Value]) -> tuple[list[Value], SegmentResults]:
            results = call(join(weights, frozen), join_x(x_floats, x_others))
            return split_floats(results.y)[0], results

        _, vjp, results = jax.vjp(differentiable, weights, x_floats, has_aux=True)
        return results, vjp

    closed, (results, vjp) = jax.make_jaxpr(program, return_shape=True)(*args)
    traced, result, residuals = laid_open(plain(closed)), jax.tree.structure(results), None
    count, (num_params, num_x, num_inputs, _) = result.num_leaves, (len(jax.tree.leaves(arg)) for arg in args)
    if segment.backward:
        invars, outvars = traced.jaxpr.invars, traced.jaxpr.outvars
        reusable = [*invars[:num_params], *invars[num_params + num_x : num_params + num_x + num_inputs]]
        prices = segment.prices if segment.recomputes else None
        residuals = choose_residuals(traced, outvars[count:], reusable, num_params, prices)
        traced = with_outputs(traced, [*outvars[:count], *residuals.stashed])
    may_differ = [*jax.tree.leaves(shards[0]), *[False] * (num_x + num_inputs), *jax.tree.leaves(shards[1])]
    differs = differing_outputs(segment, traced.jaxpr, may_differ, num_params)
    results = jax.tree.unflatten(result, map(shape_of, traced.out_avals[:count]))
    check_results(segment, results, jax.tree.unflatten(result, differs[:count]), last, shards[1])
    return TracedForward(traced, results, differs, residuals, jax.tree.structure(vjp))


def trace_backward(
    segment: Segment, forward: TracedForward, given: Tree, shards: Tree, trained: Sequence[bool], *, last: bool
) -> TracedBackward:
    """Trace the whole backward pass; `given` is (params, inputs), `shards` says which params are sharded."""
    residuals, count = forward.residuals, forward.num_results
    assert residuals is not None, "F was traced with its residuals"
    stash, dy = list(map(shape_of, forward.jaxpr.out_avals[count:])), split_floats(forward.results.y)[0]

    def program(given: Tree, stash: list[Value], dy: list[Value]) -> list[Value]:
        dparams, dx = jax.tree.unflatten(forward.vjp, residuals.restored(jax.tree.leaves(given), stash))(dy)
        return [*dx, *dparams]

    with naming(segment.name, segment.first):
        traced = laid_open(plain(jax.make_jaxpr(program)(given, stash, dy)))
    # B needs the values that it computes again late; earlier they would only take memory
    traced = postponed(traced, traced.jaxpr.invars[len(traced.in_avals) - len(dy) :])
    num_given, num_params, num_dx = len(jax.tree.leaves(given)), len(trained), len(traced.out_avals) - sum(trained)
    traced, read = without_unread(traced, num_given, len(stash))
    of_params, of_stash = jax.tree.leaves(shards), [forward.differs[count + k] for k in read]
    may_differ = [*of_params, *[False] * (num_given - num_params), *of_stash, *[False] * len(dy)]
    differing_outputs(segment, traced.jaxpr, may_differ, num_params)
    # parts of dx and of the gradients of leaves that every IPU holds whole are added up afterwards
    summed = [*[True] * num_dx, *(not shard for shard, t in zip(of_params, trained, strict=True) if t)]
    sums_only = segment.place is None and not last and needs_sums_only(traced.jaxpr, may_differ, len(dy), summed)
    return TracedBackward(traced, read, num_given, len(dy), num_dx, sums_only)


def choose_residuals(
    traced: Jaxpr, outvars: Sequence[Var], readable: Sequence[Var], weights: int, prices: Prices | None
) -> Residuals:
    """Choose the values to stash for these residuals.

    Args:
        traced: F as a closed jaxpr.
        outvars: the residuals.
        readable: the inputs of F that B has: weights, micro-batch and keys.
        weights: how many leading inputs are weights. Values that follow from weights alone are never stashed.
        prices: decide which residuals B computes again instead of reading the stash; None: none. Each part of a stage
            has made this choice already, but a residual of one part may follow from a residual of another.
    """
    jaxpr = traced.jaxpr
    places = {var: i for i, var in enumerate(readable)}
    varying = depending(jaxpr.eqns, jaxpr.invars[weights:])  # on x, inputs or state
    wanted = [v for v in dict.fromkeys(variables(outvars)) if v in varying and v not in places]
    stashed = wanted if prices is None else _cheapest(jaxpr, wanted, varying, places, prices)
    slots = {var: k for k, var in enumerate(stashed)}
    sources: list[Source] = []
    derived: list[Var] = []
    for var in outvars:
        if isinstance(var, core.Literal) or (var not in slots and var not in places):
            sources.append(("derived", len(derived)))
            derived.append(var)
        else:
            sources.append(("input", places[var]) if var in places else ("stash", slots[var]))
    again = needed([eqn for eqn in jaxpr.eqns if not slots.keys() & set(eqn.outvars)], derived)
    return Residuals(tuple(sources), stashed, part_of(traced, [*readable, *stashed], again, derived))


def _cheapest(jaxpr: Jaxpr, wanted: list[Var], varying: set[Var], readable: Any, prices: Prices) -> list[Var]:
    eqns = [eqn for eqn in jaxpr.eqns if varying.intersection(eqn.outvars)]
    costs = {var: float(bytes_of(var)) for var in jaxpr.invars if var in varying and var not in readable}
    cost, kept = cheapest_to_keep(eqns, costs, wanted, prices)
    if cost > 0.95 * sum(map(bytes_of, wanted)):
        return wanted
    return [v for v in [*jaxpr.invars, *(v for eqn in eqns for v in eqn.outvars)] if v in kept]


def with_outputs(traced: Jaxpr, outvars: Sequence[Var]) -> Jaxpr:
    """Return F with other outputs, without the equations that they do not need."""
    jaxpr = traced.jaxpr
    eqns = jaxpr.eqns if jaxpr.effects else needed(jaxpr.eqns, list(outvars))
    return part_of(traced, jaxpr.invars, eqns, outvars)


def without_unread(traced: Jaxpr, first: int, count: int) -> tuple[Jaxpr, list[int]]:
    """Return a program without the unread inputs among the `count` inputs from `first` on, and the numbers of the rest.

    F of a stage keeps values for the derivative of its aux as well, which B does not compute.
    """
    jaxpr = traced.jaxpr
    used = set(read_by(jaxpr.eqns, jaxpr.outvars))
    read = [k for k in range(count) if jaxpr.invars[first + k] in used]
    invars = [*jaxpr.invars[:first], *(jaxpr.invars[first + k] for k in read), *jaxpr.invars[first + count :]]
    return part_of(traced, invars, jaxpr.eqns, jaxpr.outvars), read

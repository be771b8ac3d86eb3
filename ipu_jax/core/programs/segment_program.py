"""Trace a segment's forward and backward programs: F and B, or F, B and W.

    F:   params, x, inputs, state                  ->  y, new state, aux, stash   (from one `jax.vjp`)
    B:   params, inputs, stash, dy                 ->  dx, dparams                (each added to its accumulator)

    B:   params, inputs, stash, dy                 ->  dx, weight residuals       (where the schedule has a W)
    W:   params, inputs, stash, weight residuals   ->  dparams

`inputs` are the micro-batch and the random keys, which B can read again. `jax.vjp` returns a pytree whose leaves are
the residuals. The traced F shows where each residual comes from. If a residual *is* a weight or a part of `inputs`, B
reads it there. If it depends on weights alone (such as a bfloat16 copy of a weight) or follows from others by cheap
operations (`_residuals`), B computes it again. Only the other residuals are stashed: weights never are.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ipu_jax.base.annotations import Jaxpr, Params, Tree, Value
from ipu_jax.base.jaxprs import laid_open, postponed, shape_of
from ipu_jax.base.keys import with_keys, without_keys
from ipu_jax.core.programs._agreement import check_results, differing_outputs
from ipu_jax.core.programs._backward_split import split_backward
from ipu_jax.core.programs._likeness import Signature, signature_of
from ipu_jax.core.programs._residuals import choose_residuals, with_outputs, without_unread
from ipu_jax.core.programs._variance import needs_sums_only
from ipu_jax.core.programs.gradient_sums import Sum, add_gradients
from ipu_jax.core.programs.segment import Message, MicrobatchInputs, Segment, call_segment
from ipu_jax.core.stage import naming


def split_floats(tree: Tree) -> tuple[list[Value], list[Value], Callable[[list[Value], list[Value]], Tree]]:
    """Return the tree's floating leaves, its other leaves, and a function that joins both into the tree again.

    Only the floating leaves have gradients.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in map(_as_array, leaves)]

    def join(floats: list[Value], others: list[Value]) -> Tree:
        of_floats, of_others = iter(floats), iter(others)
        return jax.tree.unflatten(treedef, [next(of_floats if is_f else of_others) for is_f in is_float])

    pick = lambda want: [leaf for leaf, is_f in zip(leaves, is_float, strict=True) if is_f is want]
    return pick(True), pick(False), join


def _as_array(leaf: Value) -> Value:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


@dataclasses.dataclass(frozen=True)
class SegmentProgram:
    """F and B of one segment, traced for arguments of these shapes; F alone if the segment has no backward.

    Attributes:
        y: the message, as a tree of `jax.ShapeDtypeStruct`; on the last segment the loss, in prediction the outputs.
        aux: the aux of each stage, as such a tree.
        stash: the residuals that F stores for B, per micro-batch, as a list of `jax.ShapeDtypeStruct`.
        weight_residuals: the values that B stores for W, as such a list; empty where B is not split.
        signature: segments with equal signatures compute the same function; None where equality cannot be decided.
        adds_loss: whether the segment or an earlier one adds a loss to the last stage's loss.
        jaxprs: the closed jaxprs of "F", "B" and, where the backward is split, "W", of flat arguments as at the top of
            this file; without a backward only "F".
        whole_backward: the closed jaxpr of the whole backward pass; it is B where B is not split.
        needs_sums_only: whether B of a concurrent segment needs the cotangents of y only as sums over the IPUs.
    """

    y: Tree
    aux: dict[str, Tree]
    stash: list[jax.ShapeDtypeStruct]
    weight_residuals: list[jax.ShapeDtypeStruct]
    signature: Signature | None
    adds_loss: bool
    jaxprs: dict[str, Jaxpr]
    _result: Tree  # the tree of (y, new state, aux)
    _stash_types: tuple[Value, ...] = ()  # the stash's own dtypes: a random key is stashed as its data
    whole_backward: Any = None
    _num_dx: int = 0
    needs_sums_only: bool = False

    def forward(
        self, params: Params, x: Message, inputs: MicrobatchInputs, state: Mapping[str, Tree]
    ) -> tuple[Tree, dict[str, Tree], dict[str, Tree], list[Value]]:
        """Return `(y, new state, aux, stash)`."""
        outputs = core.jaxpr_as_fun(self.jaxprs["F"])(*jax.tree.leaves((params, x, inputs, state)))
        count = self._result.num_leaves
        return *jax.tree.unflatten(self._result, outputs[:count]), list(map(without_keys, outputs[count:]))

    def backward(
        self,
        params: Params,
        inputs: MicrobatchInputs,
        stash: list[Value],
        dy: list[Value],
        sums: Sequence[Sum],
        zero: Value,
    ) -> tuple[list[Value], list[Value]]:
        """Return `(totals, dx)`: each trained leaf's accumulator with its gradient added, and the gradient of x.

        `dy` and `dx` list the floating leaves of y and x; for `sums` and `zero` see `add_gradients`.
        """
        args = [*jax.tree.leaves((params, inputs)), *self._with_types(stash), *dy]
        return add_gradients(self.whole_backward, args, self._num_dx, sums, zero)

    def backward_input(
        self, params: Params, inputs: MicrobatchInputs, stash: list[Value], dy: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Run B of a split backward: return `(dx, weight residuals)`."""
        args = [*jax.tree.leaves((params, inputs)), *self._with_types(stash), *dy]
        outputs = core.jaxpr_as_fun(self.jaxprs["B"])(*args)
        return outputs[: self._num_dx], outputs[self._num_dx :]

    def backward_weight(
        self,
        params: Params,
        inputs: MicrobatchInputs,
        stash: list[Value],
        weight_residuals: list[Value],
        sums: Sequence[Sum],
        zero: Value,
    ) -> list[Value]:
        """Run W of a split backward: return each trained leaf's accumulator with its gradient added."""
        args = [*jax.tree.leaves((params, inputs)), *self._with_types(stash), *weight_residuals]
        return add_gradients(self.jaxprs["W"], args, 0, sums, zero)[0]

    def _with_types(self, stash: list[Value]) -> list[Value]:
        return [with_keys(value, own) for value, own in zip(stash, self._stash_types, strict=True)]


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
    num_params = len(jax.tree.leaves(params))
    is_trained = [True] * num_params if trained is None else list(trained)
    shards = jax.tree.map(lambda _: False, (params, state)) if shards is None else shards
    shared_args = jax.tree.map(lambda _: False, (x, inputs))
    may_differ = jax.tree.leaves((shards[0], *shared_args, shards[1]))
    captured: dict[str, Any] = {}

    def checked(forward: Any) -> tuple[Any, Any, list[bool]]:
        """Return the shapes of y and aux, and whether each output may differ; refuse outputs that must not."""
        differs, result = differing_outputs(segment, forward.jaxpr, may_differ, num_params), captured["result"]
        y, _, aux = jax.tree.unflatten(result, list(map(shape_of, forward.out_avals[: result.num_leaves])))
        of_results = jax.tree.unflatten(result, differs[: result.num_leaves])
        check_results(segment, of_results, (y, aux), last, shards[1])
        return y, aux, differs

    def forward_alone(params: Params, x: Value, inputs: Tree, state: Tree) -> list[Any]:
        *results, captured["adds_loss"] = call_segment(segment, params, x, inputs, state, last)
        leaves, captured["result"] = jax.tree.flatten(tuple(results))
        return leaves

    if not segment.backward:
        forward = laid_open(jax.make_jaxpr(forward_alone)(params, x, inputs, state))
        y, aux, _ = checked(forward)
        result, adds_loss = captured["result"], captured["adds_loss"]
        return SegmentProgram(y, aux, [], [], signature_of((forward,), result), adds_loss, {"F": forward}, result)

    def program(params: Params, x: Tree, inputs: Tree, state: Tree) -> list[Value]:
        x_floats, x_others, join_x = split_floats(x)
        weights, treedef = jax.tree.flatten(params)

        def differentiable(trained_weights: list[Value], x_floats: list[Value]) -> tuple[list[Value], Value]:
            following = iter(trained_weights)
            leaves = [next(following) if t else w for w, t in zip(weights, is_trained, strict=True)]
            y, new_state, aux, captured["adds_loss"] = call_segment(
                segment, jax.tree.unflatten(treedef, leaves), join_x(x_floats, x_others), inputs, state, last
            )
            y_floats, y_others, captured["join_y"] = split_floats(y)
            return y_floats, (y_others, new_state, aux)

        trained_weights = [w for w, t in zip(weights, is_trained, strict=True) if t]
        y_floats, vjp, (others, new_state, aux) = jax.vjp(differentiable, trained_weights, x_floats, has_aux=True)
        residuals, captured["vjp"] = jax.tree.flatten(vjp)
        leaves, captured["result"] = jax.tree.flatten((captured["join_y"](y_floats, others), new_state, aux))
        return [*leaves, *residuals]

    traced = laid_open(jax.make_jaxpr(program)(params, x, inputs, state))
    count = captured["result"].num_leaves
    num_inputs, num_x = len(jax.tree.leaves(inputs)), len(jax.tree.leaves(x))
    invars, outvars = traced.jaxpr.invars, traced.jaxpr.outvars
    reusable = [*invars[:num_params], *invars[num_params + num_x : num_params + num_x + num_inputs]]
    residuals = choose_residuals(traced, outvars[count:], reusable, num_params, recompute=segment.recomputes)
    stashed = residuals.stashed
    y, aux, differs = checked(with_outputs(traced, [*outvars[:count], *stashed]))
    stash_types, dy = [shape_of(var.aval) for var in stashed], split_floats(y)[0]

    def backward(params: Params, inputs: Tree, stash: list[Value], dy: list[Value]) -> list[Value]:
        vjp = jax.tree.unflatten(captured["vjp"], residuals.restored(jax.tree.leaves((params, inputs)), stash))
        dparams, dx = vjp(dy)
        return [*dx, *dparams]

    with naming(segment.name, segment.first):
        traced_backward = laid_open(jax.make_jaxpr(backward)(params, inputs, stash_types, dy))
    # B needs the values that it computes again late; earlier they would only take memory
    traced_backward = postponed(
        traced_backward, traced_backward.jaxpr.invars[len(traced_backward.in_avals) - len(dy) :]
    )
    traced_backward, read = without_unread(traced_backward, num_params + num_inputs, len(stashed))
    stash_types = [stash_types[k] for k in read]
    of_stash = [differs[count + k] for k in read]
    of_inputs = [*jax.tree.leaves((shards[0], shared_args[1])), *of_stash, *[False] * len(dy)]
    differing_outputs(segment, traced_backward.jaxpr, of_inputs, num_params)
    num_dx = len(traced_backward.out_avals) - sum(is_trained)
    # parts of dx and of the gradients of leaves that every IPU holds whole are added up afterwards
    whole = [not shard for shard, t in zip(jax.tree.leaves(shards[0]), is_trained, strict=True) if t]
    forward = with_outputs(traced, [*outvars[:count], *(stashed[k] for k in read)])
    jaxprs, weight_residuals = {"F": forward, "B": traced_backward}, list[jax.ShapeDtypeStruct]()
    if split:
        halves = split_backward(traced_backward, num_dx, num_params + num_inputs, len(dy))
        jaxprs["B"], jaxprs["W"], weight_residuals = halves
    return SegmentProgram(
        y=y,
        aux=aux,
        stash=[jax.eval_shape(without_keys, shape) for shape in stash_types],
        weight_residuals=weight_residuals,
        signature=signature_of((forward, traced_backward), captured["result"]),
        adds_loss=captured["adds_loss"],
        needs_sums_only=segment.place is None
        and not last
        and needs_sums_only(traced_backward.jaxpr, of_inputs, len(dy), [*[True] * num_dx, *whole]),
        jaxprs=jaxprs,
        whole_backward=traced_backward,
        _result=captured["result"],
        _stash_types=tuple(stash_types),
        _num_dx=num_dx,
    )

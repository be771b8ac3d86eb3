"""The two halves of a segment, what F computes and stashes, and what B makes of it; and B cut into B and W.

    F:   params, x, given, state   ->  y, new state, aux, stash   (one `jax.vjp`, its residuals laid open)
    B:   params, given, stash, dy  ->  dx, dparams                (each added to its accumulator: `gradient_sums`)

    B:   params, given, stash, dy  ->  dx, cut                    (where the schedule has W: `cutting`)
    W:   params, given, stash, cut ->  dparams

`given` is what B can have again, the micro-batch and the keys. `jax.vjp` returns a pytree whose leaves are the
residuals. The traced F tells of each leaf where it comes from: a leaf that *is* a weight or a part of `given`, or
depends on weights alone (a bfloat16 copy of one), is put back in B by hand; only the rest is stashed. So weights are
never stashed, and nothing is computed twice.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ipu_jax._jaxprs import depending, laid_open, needed
from ipu_jax._keys import is_key
from ipu_jax.programs._agreement import differing_outputs, refuse_unlike
from ipu_jax.programs._backward_split import cut_in_two
from ipu_jax.programs._likeness import Signature, signature_of
from ipu_jax.programs.gradient_sums import Sum, add_gradients
from ipu_jax.programs.segment import Message, MicrobatchInputs, Segment, loss_and_aux
from ipu_jax.stage import naming


def split_floats(tree: Any) -> tuple[list[Any], list[Any], Callable[[list[Any], list[Any]], Any]]:
    """Return the tree's floating leaves, its other leaves, and a function that puts both back. Gradients flow in the
    first.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in map(_typed, leaves)]

    def join(floats: list[Any], others: list[Any]) -> Any:
        of_floats, of_others = iter(floats), iter(others)
        return jax.tree.unflatten(treedef, [next(of_floats if is_f else of_others) for is_f in is_float])

    pick = lambda want: [leaf for leaf, is_f in zip(leaves, is_float, strict=True) if is_f is want]  # noqa: E731
    return pick(True), pick(False), join


def _typed(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


@dataclasses.dataclass(frozen=True)
class SegmentProgram:
    """F and B of one segment for given shapes; in evaluation F alone.

    Attributes:
        y: the message's tree of `jax.ShapeDtypeStruct`; on the last segment the loss.
        aux: likewise, per stage.
        stash: what a micro-batch leaves between F and B, as a list of `jax.ShapeDtypeStruct`.
        cut: what it leaves between B and W where the backward is split in two; likewise.
        signature: segments of equal signature compute the same of their arguments; None where that cannot be told.
    """

    y: Any
    aux: dict[str, Any]
    stash: list[jax.ShapeDtypeStruct]
    cut: list[jax.ShapeDtypeStruct]
    signature: Signature | None
    _forward: Any  # closed jaxpr: flat (params, x, given, state) -> leaves of y, new state, aux, residuals
    _result: Any  # the tree of (y, new state, aux)
    _stashed: tuple[int, ...] = ()  # which outputs of F are stashed
    _kept: tuple[Any, ...] = ()  # the stash with its own dtypes: a key is stashed as its data
    _backward: Any = None  # closed jaxpr: flat (params, given, stash, dy) -> dx, dparams
    _num_dx: int = 0
    _split: Any = None  # B and W: closed jaxprs of flat (params, given, stash, dy), and of those and the cut

    @property
    def programs(self) -> dict[str, Any]:
        """The closed jaxprs of "F" and "B", and of "W" where the backward is split; in evaluation of "F" alone."""
        if self._backward is None:
            return {"F": self._forward}
        backward = {"B": self._backward} if self._split is None else dict(zip("BW", self._split, strict=True))
        return {"F": self._forward, **backward}

    def forward(
        self, params: Any, x: Message, given: MicrobatchInputs, state: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any], dict[str, Any], list[Any]]:
        """Return `(y, new state, aux, stash)`."""
        outputs = core.jaxpr_as_fun(self._forward)(*jax.tree.leaves((params, x, given, state)))
        result = jax.tree.unflatten(self._result, outputs[: self._result.num_leaves])
        return *result, [_bare(outputs[i]) for i in self._stashed]

    def backward(
        self, params: Any, given: MicrobatchInputs, stash: list[Any], dy: list[Any], sums: Sequence[Sum], zero: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return `(totals, dx)`: per trained leaf of params its accumulator, the gradient added.

        `dy` and `dx` list the floats of y and x; `sums` and `zero` are those of `add_gradients`.
        """
        args = [*jax.tree.leaves((params, given)), *self._typed(stash), *dy]
        return add_gradients(self._backward, args, self._num_dx, sums, zero)

    def backward_input(
        self, params: Any, given: MicrobatchInputs, stash: list[Any], dy: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return `(dx, cut)`: the part of the backward that dx needs."""
        outputs = core.jaxpr_as_fun(self._split[0])(*jax.tree.leaves((params, given)), *self._typed(stash), *dy)
        return outputs[: self._num_dx], outputs[self._num_dx :]

    def backward_weight(
        self, params: Any, given: MicrobatchInputs, stash: list[Any], cut: list[Any], sums: Sequence[Sum], zero: Any
    ) -> list[Any]:
        """Return the totals: the rest."""
        args = [*jax.tree.leaves((params, given)), *self._typed(stash), *cut]
        return add_gradients(self._split[1], args, 0, sums, zero)[0]

    def _typed(self, stash: list[Any]) -> list[Any]:
        return [_as_kept(value, kept) for value, kept in zip(stash, self._kept, strict=True)]


def _bare(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _as_kept(value: Any, kept: Any) -> Any:
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(kept)) if is_key(kept) else value


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def trace_segment(
    segment: Segment,
    params: Any,
    x: Message,
    given: MicrobatchInputs,
    state: Mapping[str, Any],
    *,
    last: bool,
    split: bool = False,
    trained: Sequence[bool] | None = None,
    shards: Any = None,
) -> SegmentProgram:
    """Trace a segment for the shapes of its arguments (arrays or `jax.ShapeDtypeStruct`).

    A segment whose role is evaluation is traced as it is: nothing in it needs a derivative.

    Args:
        segment: what to trace.
        params, x, given, state: what it is called with.
        last: whether it returns the loss.
        split: whether to split B from W.
        trained: per leaf of params, whether it gets a gradient; all of them do unless given.
        shards: `(params, state)` as trees of bool: whether IPUs hold unlike shards of a leaf; none unless given.

    Raises:
        ValueError: the last segment returns no scalar loss; a collective over "ipu" that would wait for ever; a result
            of a concurrent segment that may differ between IPUs; whatever its stages raise, with a note that names the
            stage.
    """
    num_params = len(jax.tree.leaves(params))
    of_gradient = [True] * num_params if trained is None else list(trained)
    shards = jax.tree.map(lambda _: False, (params, state)) if shards is None else shards
    alike = jax.tree.map(lambda _: False, (x, given))
    unlike = jax.tree.leaves((shards[0], *alike, shards[1]))
    if segment.role == "evaluation":
        return _only_forward(segment, params, x, given, state, last, unlike, shards[1])
    held: dict[str, Any] = {}

    def program(params: Any, x: Any, given: Any, state: Any) -> list[Any]:
        x_floats, x_others, join_x = split_floats(x)
        weights, treedef = jax.tree.flatten(params)

        def differentiable(learning: list[Any], x_floats: list[Any]) -> tuple[list[Any], Any]:
            following = iter(learning)
            leaves = [next(following) if t else w for w, t in zip(weights, of_gradient, strict=True)]
            y, new_state, aux = _results(
                segment, jax.tree.unflatten(treedef, leaves), join_x(x_floats, x_others), given, state, last
            )
            y_floats, y_others, held["join_y"] = split_floats(y)
            return y_floats, (y_others, new_state, aux)

        learning = [w for w, t in zip(weights, of_gradient, strict=True) if t]
        y_floats, vjp, (others, new_state, aux) = jax.vjp(differentiable, learning, x_floats, has_aux=True)
        residuals, held["vjp"] = jax.tree.flatten(vjp)
        leaves, held["result"] = jax.tree.flatten((held["join_y"](y_floats, others), new_state, aux))
        return [*leaves, *residuals]

    traced = laid_open(jax.make_jaxpr(program)(params, x, given, state))
    count = held["result"].num_leaves
    differs = differing_outputs(segment, traced.jaxpr, unlike, num_params)
    _refuse_unlike_results(segment, jax.tree.unflatten(held["result"], differs[:count]), last, shards[1])
    num_given, num_x = len(jax.tree.leaves(given)), len(jax.tree.leaves(x))
    invars = traced.jaxpr.invars
    again = [*invars[:num_params], *invars[num_params + num_x : num_params + num_x + num_given]]
    residuals = traced.jaxpr.outvars[count:]
    sources, derived, stashed = _sources(traced.jaxpr, residuals, again, num_params)
    derive = _keep_only(traced, derived, num_params)
    kept = [_shape_of(residuals[i].aval) for i in stashed]
    y, _, aux = jax.tree.unflatten(held["result"], list(map(_shape_of, traced.out_avals[:count])))
    _refuse_keys(segment, (y, aux))
    dy = split_floats(y)[0]

    def restore(inputs: list[Any], stash: list[Any]) -> Any:
        of = {"input": inputs, "derived": core.jaxpr_as_fun(derive)(*inputs[:num_params]), "stash": stash}
        return jax.tree.unflatten(held["vjp"], [of[kind][i] for kind, i in sources])

    def backward(params: Any, given: Any, stash: list[Any], dy: list[Any]) -> list[Any]:
        dparams, dx = restore(jax.tree.leaves((params, given)), stash)(dy)
        return [*dx, *dparams]

    with naming(segment.name, segment.first):
        traced_backward = laid_open(jax.make_jaxpr(backward)(params, given, kept, dy))
    of_stash = [differs[count + i] for i in stashed]
    of_inputs = [*jax.tree.leaves((shards[0], alike[1])), *of_stash, *[False] * len(dy)]
    differing_outputs(segment, traced_backward.jaxpr, of_inputs, num_params)
    halves = SegmentProgram(
        y=y,
        aux=aux,
        stash=[jax.eval_shape(_bare, shape) for shape in kept],
        cut=[],
        signature=signature_of((traced, traced_backward), sources, held["result"]),
        _forward=traced,
        _result=held["result"],
        _stashed=tuple(count + i for i in stashed),
        _kept=tuple(kept),
        _backward=traced_backward,
        _num_dx=len(traced_backward.out_avals) - sum(of_gradient),
    )
    if not split:
        return halves
    b, w, made = cut_in_two(traced_backward, halves._num_dx, num_params + num_given, len(dy))
    return dataclasses.replace(halves, cut=made, _split=(b, w))


def _results(
    segment: Segment, params: Any, x: Message, given: MicrobatchInputs, state: Mapping[str, Any], last: bool
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return what a segment hands on, which is the loss where it is the last; its new state; and its aux."""
    message, new_state, aux = segment(params, x, given, state)
    if not last:
        return message, new_state, aux
    loss, aux = loss_and_aux(message.y, aux, segment.stages[-1])
    return loss, new_state, aux


def _only_forward(
    segment: Segment,
    params: Any,
    x: Message,
    given: MicrobatchInputs,
    state: Mapping[str, Any],
    last: bool,
    unlike: Sequence[bool],
    split_state: Any,
) -> SegmentProgram:
    held: dict[str, Any] = {}

    def program(params: Any, x: Any, given: Any, state: Any) -> list[Any]:
        leaves, held["result"] = jax.tree.flatten(_results(segment, params, x, given, state, last))
        return leaves

    traced = laid_open(jax.make_jaxpr(program)(params, x, given, state))
    differs = differing_outputs(segment, traced.jaxpr, unlike, len(jax.tree.leaves(params)))
    _refuse_unlike_results(segment, jax.tree.unflatten(held["result"], differs), last, split_state)
    y, _, aux = jax.tree.unflatten(held["result"], list(map(_shape_of, traced.out_avals)))
    _refuse_keys(segment, (y, aux))
    signature = signature_of((traced,), held["result"])
    return SegmentProgram(y, aux, [], [], signature, _forward=traced, _result=held["result"])


def _refuse_unlike_results(segment: Segment, differs: Any, last: bool, split_state: Any) -> None:
    """Refuse what differs between IPUs but is handed on as one value. State may differ where it is split."""
    y, new_state, aux = differs
    refuse_unlike(segment, "a loss" if last else "a y or a skip", any(jax.tree.leaves(y)))
    refuse_unlike(segment, "an aux", any(jax.tree.leaves(aux)))
    of_state = zip(jax.tree.leaves(new_state), jax.tree.leaves(split_state), strict=True)
    refuse_unlike(segment, "state that is not split", any(may and not split for may, split in of_state))


def _refuse_keys(segment: Segment, results: Any) -> None:
    for path, leaf in jax.tree.leaves_with_path(results):
        if is_key(leaf):
            raise ValueError(
                f"stage {segment.name!r} returns a random key, {leaf.dtype}, in its {'aux' if path[0].idx else 'y'}: "
                "return jax.random.key_data(key), and wrap it again with jax.random.wrap_key_data where it is used"
            )


def _sources(
    jaxpr: Any, residuals: list[Any], again: list[Any], weights: int
) -> tuple[tuple[tuple[str, int], ...], list[Any], list[int]]:
    """Return where each residual comes from, the variables to derive again, and which residuals to stash."""
    inputs = {var: i for i, var in enumerate(again)}
    varying = depending(jaxpr.eqns, jaxpr.invars[weights:])  # on x, on what is given, or on state
    found: list[tuple[str, int]] = []
    derived: list[Any] = []
    slots: dict[Any, int] = {}  # the same value may be a residual twice
    stashed: list[int] = []
    for i, var in enumerate(residuals):
        if isinstance(var, core.Literal) or (var not in varying and var not in inputs):
            found.append(("derived", len(derived)))
            derived.append(var)
        elif var in inputs:
            found.append(("input", inputs[var]))
        else:
            if var not in slots:
                slots[var] = len(stashed)
                stashed.append(i)
            found.append(("stash", slots[var]))
    return tuple(found), derived, stashed


def _keep_only(traced: Any, outvars: list[Any], num_inputs: int) -> Any:
    """Return `traced` reduced to the equations that `outvars` need, as a function of its first inputs."""
    jaxpr = traced.jaxpr
    changed = {"eqns": needed(jaxpr.eqns, outvars), "invars": jaxpr.invars[:num_inputs], "outvars": outvars}
    return core.ClosedJaxpr(jaxpr.replace(**changed, debug_info=jaxpr.debug_info.with_unknown_names()), traced.consts)

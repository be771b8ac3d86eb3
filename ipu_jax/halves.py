"""The two halves of a segment, what F computes and stashes, and what B makes of it; and B cut into B and W.

    F:   params, x, given, state   ->  y, new state, aux, stash   (one `jax.vjp`, its residuals laid open)
    B:   params, given, stash, dy  ->  dx, dparams

    B:   params, given, stash, dy  ->  dx, cut                    (where the schedule has W)
    W:   params, given, stash, cut ->  dparams

`given` is what B can have again, the micro-batch and the keys. `jax.vjp` returns a pytree whose leaves are the
residuals. The traced F tells of each leaf where it comes from: a leaf that *is* a weight or a part of `given`, or
depends on weights alone (a bfloat16 copy of one), is put back in B by hand; only the rest is stashed. So weights are
never stashed, and nothing is computed twice.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ipu_jax.segment import Carried, Given, Segment, loss_and_aux
from ipu_jax.stage import naming
from ipu_jax.tracing import inlined, refuse_what_waits


def split_floats(tree: Any) -> tuple[list[Any], list[Any], Callable[[list[Any], list[Any]], Any]]:
    """The tree's floating leaves, its other leaves, and a function that puts both back. Gradients flow in the first."""
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
class Halves:
    """F and B of one segment for given shapes.

    Attributes:
        y: the message's tree of `jax.ShapeDtypeStruct`; on the last segment the loss.
        aux: likewise, per stage.
        stash: what a micro-batch leaves between F and B, as a list of `jax.ShapeDtypeStruct`.
        cut: what it leaves between B and W where the backward is split in two; likewise.
        signature: segments of equal signature compute the same of their arguments, unless a function closes over large
            arrays; None then.
    """

    y: Any
    aux: dict[str, Any]
    stash: list[jax.ShapeDtypeStruct]
    cut: list[jax.ShapeDtypeStruct]
    signature: tuple[Any, ...] | None
    _forward: Any  # closed jaxpr: flat (params, x, given, state) -> leaves of y, new state, aux, residuals
    _result: Any  # the tree of (y, new state, aux)
    _stashed: tuple[int, ...]  # which outputs of F are stashed
    _kept: list[Any]  # the stash with its own dtypes: a key is stashed as its data
    _backward: Any  # closed jaxpr: flat (params, given, stash, dy) -> dx, dparams
    _num_dx: int
    _split: Any  # B and W: closed jaxprs of flat (params, given, stash, dy), and of those and the cut

    def forward(
        self, params: Any, x: Carried, given: Given, state: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any], dict[str, Any], list[Any]]:
        """`(y, new state, aux, stash)`."""
        outputs = core.jaxpr_as_fun(self._forward)(*jax.tree.leaves((params, x, given, state)))
        result = jax.tree.unflatten(self._result, outputs[: self._result.num_leaves])
        return *result, [_bare(outputs[i]) for i in self._stashed]

    def backward(self, params: Any, given: Given, stash: list[Any], dy: list[Any]) -> tuple[list[Any], list[Any]]:
        """`(dparams, dx)`: a gradient per trained leaf of params; `dy` and `dx` list the floats of y and x."""
        outputs = core.jaxpr_as_fun(self._backward)(*jax.tree.leaves((params, given)), *self._typed(stash), *dy)
        return outputs[self._num_dx :], outputs[: self._num_dx]

    def backward_input(self, params: Any, given: Given, stash: list[Any], dy: list[Any]) -> tuple[list[Any], list[Any]]:
        """`(dx, cut)`: the part of the backward that dx needs."""
        outputs = core.jaxpr_as_fun(self._split[0])(*jax.tree.leaves((params, given)), *self._typed(stash), *dy)
        return outputs[: self._num_dx], outputs[self._num_dx :]

    def backward_weight(self, params: Any, given: Given, stash: list[Any], cut: list[Any]) -> list[Any]:
        """`dparams`: the rest."""
        return core.jaxpr_as_fun(self._split[1])(*jax.tree.leaves((params, given)), *self._typed(stash), *cut)

    def _typed(self, stash: list[Any]) -> list[Any]:
        return [_as_kept(value, kept) for value, kept in zip(stash, self._kept, strict=True)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _bare(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _as_kept(value: Any, kept: Any) -> Any:
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(kept)) if _is_key(kept) else value


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def halves_of(
    segment: Segment,
    params: Any,
    x: Carried,
    given: Given,
    state: Mapping[str, Any],
    *,
    last: bool,
    split: bool = False,
    trained: Sequence[bool] | None = None,
) -> Halves:
    """Traces a segment for the shapes of its arguments (arrays or `jax.ShapeDtypeStruct`).

    Args:
        segment: what to trace.
        params, x, given, state: what it is called with.
        last: whether it returns the loss.
        split: whether to split B from W.
        trained: per leaf of params, whether it gets a gradient; all of them do unless given.

    Raises:
        ValueError: the last segment returns no scalar loss; a collective over "ipu" that would wait for ever; whatever
            its stages raise, with a note that names the stage.
    """
    held: dict[str, Any] = {}
    num_params = len(jax.tree.leaves(params))
    of_gradient = [True] * num_params if trained is None else list(trained)

    def program(params: Any, x: Any, given: Any, state: Any) -> list[Any]:
        x_floats, x_others, join_x = split_floats(x)
        weights, treedef = jax.tree.flatten(params)

        def differentiable(learning: list[Any], x_floats: list[Any]) -> tuple[list[Any], Any]:
            following = iter(learning)
            leaves = [next(following) if t else w for w, t in zip(weights, of_gradient, strict=True)]
            message, new_state, aux = segment(
                jax.tree.unflatten(treedef, leaves), join_x(x_floats, x_others), given, state
            )
            if last:
                loss, aux = loss_and_aux(message.y, aux, segment.stages[-1])
                return [loss], ([], new_state, aux)
            y_floats, y_others, held["join_y"] = split_floats(message)
            return y_floats, (y_others, new_state, aux)

        learning = [w for w, t in zip(weights, of_gradient, strict=True) if t]
        y_floats, vjp, (others, new_state, aux) = jax.vjp(differentiable, learning, x_floats, has_aux=True)
        y = y_floats[0] if last else held["join_y"](y_floats, others)
        residuals, held["vjp"] = jax.tree.flatten(vjp)
        leaves, held["result"] = jax.tree.flatten((y, new_state, aux))
        return [*leaves, *residuals]

    traced = inlined(jax.make_jaxpr(program)(params, x, given, state))
    refuse_what_waits(segment, traced.jaxpr, num_params)
    num_given, num_x = len(jax.tree.leaves(given)), len(jax.tree.leaves(x))
    invars = traced.jaxpr.invars
    again = [*invars[:num_params], *invars[num_params + num_x : num_params + num_x + num_given]]
    count = held["result"].num_leaves
    residuals = traced.jaxpr.outvars[count:]
    sources, derived, stashed = _sources(traced.jaxpr, residuals, again, num_params)
    derive = _keep_only(traced, derived, num_params)
    kept = [_shape_of(residuals[i].aval) for i in stashed]
    y, _, aux = jax.tree.unflatten(held["result"], list(map(_shape_of, traced.out_avals[:count])))
    dy = [y] if last else split_floats(y)[0]

    def backward(params: Any, given: Any, stash: list[Any], dy: list[Any]) -> list[Any]:
        inputs = jax.tree.leaves((params, given))
        of = {"input": inputs, "derived": core.jaxpr_as_fun(derive)(*inputs[:num_params]), "stash": stash}
        dparams, dx = jax.tree.unflatten(held["vjp"], [of[kind][i] for kind, i in sources])(dy)
        return [*dx, *dparams]

    with naming(segment.name, segment.first):
        traced_backward = inlined(jax.make_jaxpr(backward)(params, given, kept, dy))
    refuse_what_waits(segment, traced_backward.jaxpr, num_params)
    halves = Halves(
        y=y,
        aux=aux,
        stash=[jax.eval_shape(_bare, shape) for shape in kept],
        cut=[],
        signature=_signature(traced, traced_backward, sources, held["result"]),
        _forward=traced,
        _result=held["result"],
        _stashed=tuple(count + i for i in stashed),
        _kept=kept,
        _backward=traced_backward,
        _num_dx=len(traced_backward.out_avals) - sum(of_gradient),
        _split=None,
    )
    return _with_split(halves, num_params + num_given, len(dy)) if split else halves


def _signature(forward: Any, backward: Any, sources: Any, result: Any) -> tuple[Any, ...] | None:
    """What the two programs say, addresses of Python's objects left out, and the constants that they hold."""
    consts = [np.asarray(const) for closed in (forward, backward) for const in closed.consts if not _is_key(const)]
    if any(const.size > _SMALL for const in consts) or len(consts) < len(forward.consts) + len(backward.consts):
        return None
    texts = [re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr)) for closed in (forward, backward)]
    return (*texts, sources, result, tuple((const.dtype.name, const.shape, const.tobytes()) for const in consts))


_SMALL = 4096  # numbers; larger constants are not compared


def _with_split(halves: Halves, again: int, num_dy: int) -> Halves:
    """Cuts the backward in two: the equations that dx needs are B, the others W, and what W needs of B is the cut.

    What depends on weights and `given` alone, the first `again` inputs, is computed in both rather than kept. Source:
    Qi et al. 2023, arXiv:2401.10241, section 2, there by hand for each layer.
    """
    traced, num_dx = halves._backward, halves._num_dx
    jaxpr = traced.jaxpr
    dy_vars = jaxpr.invars[len(jaxpr.invars) - num_dy :]
    varying = _depending(jaxpr.eqns, jaxpr.invars[again:])
    of_input = _needed(jaxpr.eqns, jaxpr.outvars[:num_dx])
    shared = {id(eqn) for eqn in of_input if varying.intersection(eqn.outvars)}
    of_weight = _needed([eqn for eqn in jaxpr.eqns if id(eqn) not in shared], jaxpr.outvars[num_dx:])
    made = {var for eqn in jaxpr.eqns if id(eqn) in shared for var in eqn.outvars} | set(dy_vars)
    used = [v for eqn in of_weight for v in eqn.invars] + list(jaxpr.outvars[num_dx:])
    cut = list(dict.fromkeys(v for v in used if not isinstance(v, core.Literal) and v in made))
    debug = jaxpr.debug_info.with_unknown_names()
    b = jaxpr.replace(eqns=of_input, outvars=[*jaxpr.outvars[:num_dx], *cut], debug_info=debug)
    w_inputs = [*jaxpr.invars[: len(jaxpr.invars) - num_dy], *cut]
    w = jaxpr.replace(eqns=of_weight, invars=w_inputs, outvars=jaxpr.outvars[num_dx:], debug_info=debug)
    return dataclasses.replace(
        halves,
        cut=[_shape_of(v.aval) for v in cut],
        _split=(core.ClosedJaxpr(b, traced.consts), core.ClosedJaxpr(w, traced.consts)),
    )


def _depending(eqns: list[Any], on: Sequence[Any]) -> set[Any]:
    """The variables that depend on some, these among them."""
    found = set(on)
    for eqn in eqns:
        if any(not isinstance(v, core.Literal) and v in found for v in eqn.invars):
            found.update(eqn.outvars)
    return found


def _needed(eqns: list[Any], outvars: list[Any]) -> list[Any]:
    """The equations, in order, that `outvars` need."""
    needed = {var for var in outvars if not isinstance(var, core.Literal)}
    found = []
    for eqn in reversed(eqns):
        if needed.intersection(eqn.outvars):
            found.append(eqn)
            needed.update(var for var in eqn.invars if not isinstance(var, core.Literal))
    return found[::-1]


def _sources(
    jaxpr: Any, residuals: list[Any], again: list[Any], weights: int
) -> tuple[tuple[tuple[str, int], ...], list[Any], list[int]]:
    """Where each residual comes from, the variables to derive again, and which residuals to stash."""
    inputs = {var: i for i, var in enumerate(again)}
    varying = _depending(jaxpr.eqns, jaxpr.invars[weights:])  # on x, on what is given, or on state
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
    """`traced` cut down to the equations that `outvars` need, of its first inputs."""
    jaxpr = traced.jaxpr
    changed = {"eqns": _needed(jaxpr.eqns, outvars), "invars": jaxpr.invars[:num_inputs], "outvars": outvars}
    return core.ClosedJaxpr(jaxpr.replace(**changed, debug_info=jaxpr.debug_info.with_unknown_names()), traced.consts)

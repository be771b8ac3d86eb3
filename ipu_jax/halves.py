"""The two halves of a segment, what F computes and stashes, and what B makes of it; and B cut into B and W.

    F:   params, x, micro-batch          ->  y, stash          (one `jax.vjp`, its residuals laid open)
    B:   params, micro-batch, stash, dy  ->  dparams, dx

    B:   params, micro-batch, stash, dy  ->  dx, cut           (where the schedule has W)
    W:   params, micro-batch, stash, cut ->  dparams

`jax.vjp` returns a pytree whose leaves are the residuals. The traced F tells of each leaf where it comes from: a leaf
that *is* a weight or a part of the micro-batch, or depends on weights alone (a bfloat16 copy of one), is put back in B
by hand; only the rest is stashed. So weights are never stashed, and nothing is computed twice.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ipu_jax.stage import Segment, naming
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
        y: the result's tree of `jax.ShapeDtypeStruct`; on the last segment the loss (or `(loss, aux)`).
        stash: what a micro-batch leaves between F and B, as a list of `jax.ShapeDtypeStruct`.
        cut: what it leaves between B and W where the backward is split in two; likewise.
    """

    y: Any
    stash: list[jax.ShapeDtypeStruct]
    cut: list[jax.ShapeDtypeStruct]
    _program: Any  # F as a closed jaxpr: flat inputs -> leaves of y, residuals
    _num_y: int
    _sources: tuple[tuple[str, int], ...]  # per residual: ("input", i), ("derived", k) or ("stash", k)
    _derived: Any  # the part of F that depends on weights alone, as a closed jaxpr: flat inputs -> values
    _stashed: tuple[int, ...]  # which residuals are stashed
    _vjp_treedef: Any
    _split: Any  # B and W: closed jaxprs of flat (params, microbatch, stash, dy), and of those and the cut

    def forward(self, params: Any, x: Any, microbatch: Any) -> tuple[Any, list[Any]]:
        """`(y, stash)`."""
        outputs = core.jaxpr_as_fun(self._program)(*jax.tree.leaves((params, x, microbatch)))
        y = jax.tree.unflatten(jax.tree.structure(self.y), outputs[: self._num_y])
        return y, [outputs[self._num_y + i] for i in self._stashed]

    def backward(self, params: Any, x: Any, microbatch: Any, stash: list[Any], dy: list[Any]) -> tuple[Any, list[Any]]:
        """`(dparams, dx)`; `dy` and `dx` list the floating leaves of y and x. Of `x` only the shapes matter."""
        inputs = jax.tree.leaves((params, x, microbatch))
        derived = core.jaxpr_as_fun(self._derived)(*inputs)
        of = {"input": inputs, "derived": derived, "stash": stash}
        vjp = jax.tree.unflatten(self._vjp_treedef, [of[kind][i] for kind, i in self._sources])
        return vjp(dy)

    def backward_input(
        self, params: Any, microbatch: Any, stash: list[Any], dy: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """`(dx, cut)`: the part of the backward that dx needs."""
        outputs = core.jaxpr_as_fun(self._split[0])(*jax.tree.leaves((params, microbatch, stash, dy)))
        count = len(outputs) - len(self.cut)
        return outputs[:count], outputs[count:]

    def backward_weight(self, params: Any, microbatch: Any, stash: list[Any], cut: list[Any]) -> Any:
        """`dparams`: the rest."""
        outputs = core.jaxpr_as_fun(self._split[1])(*jax.tree.leaves((params, microbatch, stash)), *cut)
        return jax.tree.unflatten(jax.tree.structure(params), outputs)


def halves_of(segment: Segment, params: Any, x: Any, microbatch: Any, *, last: bool, split: bool = False) -> Halves:
    """Traces a segment for the shapes of its arguments (arrays or `jax.ShapeDtypeStruct`); `split` its B from W too.

    Raises:
        ValueError: the last segment returns no scalar loss; a collective over "ipu" that would wait for ever.
    """
    held: dict[str, Any] = {}

    def program(params: Any, x: Any, microbatch: Any) -> list[Any]:
        x_floats, x_others, join_x = split_floats(x)

        def differentiable(params: Any, x_floats: list[Any]) -> tuple[list[Any], Any]:
            y = segment(params, join_x(x_floats, x_others), microbatch)
            if last:
                loss, aux = loss_and_aux(y, segment)
                return [loss], aux
            y_floats, y_others, held["join_y"] = split_floats(y)
            return y_floats, y_others

        y_floats, vjp, others = jax.vjp(differentiable, params, x_floats, has_aux=True)
        y = (y_floats[0], others) if last else held["join_y"](y_floats, others)
        residuals, held["vjp"] = jax.tree.flatten(vjp)
        y_leaves, held["y_treedef"] = jax.tree.flatten(y)
        held["num_y"] = len(y_leaves)
        return [*y_leaves, *residuals]

    traced = inlined(jax.make_jaxpr(program)(params, x, microbatch))
    refuse_what_waits(segment, traced.jaxpr, len(jax.tree.leaves(params)))
    num_y = held["num_y"]
    weights = len(jax.tree.leaves(params))
    num_inputs = len(traced.jaxpr.invars)
    kept = [i for i in range(num_inputs) if not weights <= i < weights + len(jax.tree.leaves(x))]
    residuals = traced.jaxpr.outvars[num_y:]
    sources, derived, stashed = _sources(traced.jaxpr, residuals, kept, weights)
    y = jax.tree.unflatten(held["y_treedef"], traced.out_avals[:num_y])
    halves = Halves(
        y=jax.tree.map(lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype), y),
        stash=[jax.ShapeDtypeStruct(residuals[i].aval.shape, residuals[i].aval.dtype) for i in stashed],
        cut=[],
        _program=traced,
        _num_y=num_y,
        _sources=sources,
        _derived=_keep_only(traced, derived),
        _stashed=tuple(stashed),
        _vjp_treedef=held["vjp"],
        _split=None,
    )
    dy = list(halves.y[:1] if last else split_floats(halves.y)[0])
    with naming(segment.name, segment.first):
        backward = _traced_backward(halves, params, x, microbatch, dy)
    refuse_what_waits(segment, backward.jaxpr, len(jax.tree.leaves(params)))
    return _with_split(halves, backward, params, microbatch, len(dy)) if split else halves


def _traced_backward(halves: Halves, params: Any, x: Any, microbatch: Any, dy: list[Any]) -> Any:
    """B as a closed jaxpr: flat (params, microbatch, stash, dy) -> leaves of dx, then of dparams."""

    def whole(params: Any, microbatch: Any, stash: list[Any], dy: list[Any]) -> list[Any]:
        x_shaped = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), x)
        dparams, dx = halves.backward(params, x_shaped, microbatch, stash, dy)
        return [*dx, *jax.tree.leaves(dparams)]

    return inlined(jax.make_jaxpr(whole)(params, microbatch, halves.stash, dy))


def _with_split(halves: Halves, traced: Any, params: Any, microbatch: Any, num_dy: int) -> Halves:
    """Cuts the backward in two: the equations that dx needs are B, the others W, and what W needs of B is the cut.

    What depends on weights and micro-batch alone is computed in both rather than kept. Source: Qi et al. 2023,
    arXiv:2401.10241, section 2, there by hand for each layer.
    """
    jaxpr = traced.jaxpr
    num_dx = len(jaxpr.outvars) - len(jax.tree.leaves(params))
    kept = len(jax.tree.leaves((params, microbatch)))
    dy_vars = jaxpr.invars[len(jaxpr.invars) - num_dy :]
    varying = set(jaxpr.invars[kept:])
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in varying for v in eqn.invars):
            varying.update(eqn.outvars)
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
        cut=[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in cut],
        _split=(core.ClosedJaxpr(b, traced.consts), core.ClosedJaxpr(w, traced.consts)),
    )


def _needed(eqns: list[Any], outvars: list[Any]) -> list[Any]:
    """The equations, in order, that `outvars` need."""
    needed = {var for var in outvars if not isinstance(var, core.Literal)}
    found = []
    for eqn in reversed(eqns):
        if needed.intersection(eqn.outvars):
            found.append(eqn)
            needed.update(var for var in eqn.invars if not isinstance(var, core.Literal))
    return found[::-1]


def loss_and_aux(y: Any, segment: Segment) -> tuple[Any, Any]:
    """What the last stage returned as `(loss, aux)`; aux is None where there is none."""
    loss: Any = y[0] if isinstance(y, tuple) and len(y) == 2 else y
    aux = y[1] if loss is not y else None
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        found = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise ValueError(
            f"the last stage, {segment.stages[-1].name!r}, returns {found}: "
            "return the micro-batch's mean loss, a float scalar, or (loss, aux)"
        )
    return loss, aux


def _sources(
    jaxpr: Any, residuals: list[Any], kept: list[int], weights: int
) -> tuple[tuple[tuple[str, int], ...], list[Any], list[int]]:
    """Where each residual comes from, the variables to derive again, and which residuals to stash."""
    inputs = {jaxpr.invars[i]: i for i in kept}
    varying = set(jaxpr.invars[weights:])  # whatever depends on x or on the micro-batch
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in varying for v in eqn.invars):
            varying.update(eqn.outvars)
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


def _keep_only(traced: Any, outvars: list[Any]) -> Any:
    """`traced` cut down to the equations that `outvars` need."""
    eqns = _needed(traced.jaxpr.eqns, outvars)
    debug = traced.jaxpr.debug_info.with_unknown_names()
    return core.ClosedJaxpr(traced.jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=debug), traced.consts)

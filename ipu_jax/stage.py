"""A stage, and its two halves: what F computes and stashes, and what B makes of it.

    F:   params, x, micro-batch  ->  y, stash              (one `jax.vjp`, its residuals laid open)
    B:   params, micro-batch, stash, dy  ->  dparams, dx

`jax.vjp` returns a pytree whose leaves are the residuals. The traced F tells of each leaf where it comes from: a leaf
that *is* a weight or a part of the micro-batch, or depends on weights alone (a bfloat16 copy of one), is put back in B
by hand; only the rest is stashed. So weights are never stashed, and nothing is computed twice.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ipu_jax.devices import ALL_IPUS, IPU_AXIS, AllIpus


@dataclasses.dataclass(frozen=True)
class Stage:
    """A piece of the model: a plain function, and where it runs.

    `fn(params, x, microbatch) -> y`. `params` is the group's pytree; on a concurrent stage each leaf is this IPU's
    shard. `x` is what the stage before returned (None for the first), `microbatch` one micro-batch of the batch (its
    leaves without the leading M). The last stage returns the micro-batch's mean loss, a float scalar, or `(loss, aux)`.

    A local stage sees one IPU, and may not communicate over axis "ipu". A concurrent stage runs on all IPUs at once:
    `x` and `y` are the same on all of them, and `fn` sends what it must with `jax.lax` collectives over "ipu".

    Flax modules serve as they are. Linen:

    >>> import flax.linen, jax, jax.numpy as jnp
    >>> dense = flax.linen.Dense(4)
    >>> weights = dense.init(jax.random.key(0), jnp.zeros((1, 8)))["params"]
    >>> Stage(lambda p, x, mb: dense.apply({"params": p}, mb["x"]), params="dense", ipu=0).name
    'dense'

    NNX: split the module once; its state is the group's pytree.

    >>> from flax import nnx
    >>> graph, state = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    >>> Stage(lambda p, x, mb: nnx.merge(graph, p)(x), params="linear", ipu=1).name
    'linear'

    Attributes:
        fn: the function above.
        params: the name of its parameter group, or None for a stage without weights. Stages of one IPU, or concurrent
            stages, may name the same group: their gradients add.
        ipu: the IPU of the replica, counted from 0, or `ALL_IPUS` for a concurrent stage.
        reference: an independent dense function of the same signature, which `verify` runs on the whole weights in
            place of `fn`.
        name: what errors call it; the group's name unless given.

    Raises:
        ValueError: `fn` is not callable, or `ipu` is neither `ALL_IPUS` nor an int of at least 0.
    """

    fn: Callable[[Any, Any, Any], Any]
    params: str | None = None
    ipu: int | AllIpus = 0
    reference: Callable[[Any, Any, Any], Any] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn={self.fn!r} is not callable: give a function of (params, x, microbatch)")
        if self.ipu is not ALL_IPUS and (isinstance(self.ipu, bool) or not isinstance(self.ipu, int) or self.ipu < 0):
            raise ValueError(f"ipu={self.ipu!r} is not an IPU: give an int of at least 0, or ALL_IPUS")
        if not self.name:
            object.__setattr__(self, "name", self.params or getattr(self.fn, "__name__", "stage"))

    @property
    def place(self) -> int | None:
        """The IPU, or None for a concurrent stage: the placement that a schedule speaks of."""
        return None if isinstance(self.ipu, AllIpus) else self.ipu


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring stages that run where they stand, one after the other, without a message between them."""

    stages: tuple[Stage, ...]
    first: int  # the number of its first stage

    @property
    def place(self) -> int | None:
        return self.stages[0].place

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stage.params for stage in self.stages if stage.params is not None))

    @property
    def name(self) -> str:
        return " + ".join(stage.name for stage in self.stages)

    def __call__(self, params: dict[str, Any], x: Any, microbatch: Any, *, reference: bool = False) -> Any:
        for number, stage in enumerate(self.stages, self.first):
            fn = stage.reference if reference and stage.reference is not None else stage.fn
            with naming(stage, number):
                x = fn(None if stage.params is None else params[stage.params], x, microbatch)
        return x


@contextlib.contextmanager
def naming(stage: Stage, number: int) -> Iterator[None]:
    """Adds to an error raised inside which stage it was raised in."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in stage {number}, {stage.name!r}")
        raise


def segments_of(stages: tuple[Stage, ...]) -> tuple[Segment, ...]:
    """Joins neighbouring stages of one IPU, and neighbouring concurrent stages."""
    found: list[Segment] = []
    for number, stage in enumerate(stages):
        if found and found[-1].place == stage.place:
            found[-1] = dataclasses.replace(found[-1], stages=(*found[-1].stages, stage))
        else:
            found.append(Segment((stage,), number))
    return tuple(found)


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
    """

    y: Any
    stash: list[jax.ShapeDtypeStruct]
    _program: Any  # F as a closed jaxpr: flat inputs -> leaves of y, residuals
    _num_y: int
    _sources: tuple[tuple[str, int], ...]  # per residual: ("input", i), ("derived", k) or ("stash", k)
    _derived: Any  # the part of F that depends on weights alone, as a closed jaxpr: flat inputs -> values
    _stashed: tuple[int, ...]  # which residuals are stashed
    _vjp_treedef: Any

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


def halves_of(segment: Segment, params: Any, x: Any, microbatch: Any, *, last: bool) -> Halves:
    """Traces a segment for the shapes of its arguments (arrays or `jax.ShapeDtypeStruct`).

    Raises:
        ValueError: the last segment returns no scalar loss; a local one communicates over axis "ipu".
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

    traced = jax.make_jaxpr(program)(params, x, microbatch)
    if segment.place is not None:
        _refuse_collectives(segment, traced.jaxpr)
    num_y = held["num_y"]
    weights = len(jax.tree.leaves(params))
    num_inputs = len(traced.jaxpr.invars)
    kept = [i for i in range(num_inputs) if not weights <= i < weights + len(jax.tree.leaves(x))]
    residuals = traced.jaxpr.outvars[num_y:]
    sources, derived, stashed = _sources(traced.jaxpr, residuals, kept, weights)
    y = jax.tree.unflatten(held["y_treedef"], traced.out_avals[:num_y])
    return Halves(
        y=jax.tree.map(lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype), y),
        stash=[jax.ShapeDtypeStruct(residuals[i].aval.shape, residuals[i].aval.dtype) for i in stashed],
        _program=traced,
        _num_y=num_y,
        _sources=sources,
        _derived=_keep_only(traced, derived),
        _stashed=tuple(stashed),
        _vjp_treedef=held["vjp"],
    )


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
    needed = {var for var in outvars if not isinstance(var, core.Literal)}
    eqns = []
    for eqn in reversed(traced.jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed.update(var for var in eqn.invars if not isinstance(var, core.Literal))
    debug = traced.jaxpr.debug_info.with_unknown_names() if outvars else traced.jaxpr.debug_info
    return core.ClosedJaxpr(traced.jaxpr.replace(eqns=eqns[::-1], outvars=outvars, debug_info=debug), traced.consts)


def _refuse_collectives(segment: Segment, jaxpr: Any) -> None:
    """A collective in a stage that only one IPU runs would wait for the others for ever."""
    for eqn in _all_equations(jaxpr):
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if IPU_AXIS in (axes if isinstance(axes, (tuple, list)) else (axes,)) and eqn.primitive.name != "axis_index":
            raise ValueError(
                f"stage {segment.name!r} on IPU {segment.place} uses {eqn.primitive.name} over axis {IPU_AXIS!r}, "
                "which would wait for ever for the IPUs that don't run it: make the stage concurrent "
                "(ipu=ALL_IPUS), or take the collective out"
            )


def _all_equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _all_equations(inner)

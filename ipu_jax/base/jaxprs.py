"""Walk over jaxprs: evaluate one under rules, inline calls, and find which equations and variables depend on others.

jax's newer primitives are objects with a method `expand` in place of a jaxpr. Under jax's flags for the future even
`jax.checkpoint` and `jax.custom_vjp` are such objects. `closed_of` returns the jaxpr of either kind. Under the flag
`jax_remat3`, under which jax 0.10 forgets `prevent_cse`, `plain` writes checkpoints and names as without it.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core.primitives import name_p, remat_p, stop_gradient_p
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ipu_jax.base.annotations import Dtype, Eqn, Function, Jaxpr, Tree, Value, Var

JITS = ("jit", "pjit")
CHECKPOINTS = ("checkpoint", "remat", "remat2")
OWN_BACKWARD = ("custom_vjp_call", "call_hi_primitive")  # of any of jax's newer primitives, too
CALLS = (
    {"call_hi_primitive": "_prim"}
    | dict.fromkeys((*JITS, *CHECKPOINTS), "jaxpr")
    | dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr"), "call_jaxpr")
)
"""The primitives that call a body once, with the equation's inputs in order, and the parameter that has the body."""
# fmt: off
ELEMENTWISE = frozenset((
    "_", "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt",
    "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite",
    "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
    "or", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on

_WITHOUT_BODIES = ELEMENTWISE | {"broadcast_in_dim", "dot_general", "reduce_sum", "reshape", "transpose"}
"""The most frequent primitives: looking for jaxprs among their parameters would take longer than most rules."""

# From jax 0.12 on, one class is both open and closed, and the older name is not among the public types.
ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)
_Literal = core.Literal

_T = TypeVar("_T")
Rule = Callable[[Eqn, list[Value]], list[Value] | None]


def shape_of(aval: Value) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a traced value."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def evaluated(closed: Jaxpr, args: Sequence[Value], rule: Rule) -> list[Value]:
    """Return the outputs of a closed jaxpr. If `rule(eqn, inputs)` returns a list, it is the equation's outputs."""
    jaxpr = closed.jaxpr
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        inputs = [value_of(v, env) for v in eqn.invars]
        outputs = rule(eqn, inputs)
        env.update(zip(eqn.outvars, bound(eqn, inputs) if outputs is None else outputs, strict=True))
    return [value_of(v, env) for v in jaxpr.outvars]


def value_of(var: Var, env: dict[Var, Value]) -> Value:
    """Return the value of a variable: a literal's own value, or the variable's entry in `env`."""
    return var.val if isinstance(var, core.Literal) else env[var]


def bound(eqn: Eqn, inputs: Sequence[Value]) -> list[Value]:
    """Return the outputs of one equation for these inputs, under the names of the modules that it was traced in."""
    with eqn.ctx.manager, named_as(eqn):
        outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def named_as(eqn: Eqn) -> contextlib.AbstractContextManager[Any]:
    """Name what is traced inside after the modules that an equation was traced in."""
    names = str(eqn.source_info.name_stack)
    return jax.named_scope(names) if names else contextlib.nullcontext()


def bound_with(eqn: Eqn, inputs: Sequence[Value], at: Sequence[int], values: Sequence[Value]) -> list[Value]:
    """Return the outputs of one equation for these inputs, with other values for the inputs `at`."""
    return bound(eqn, [*(dict(enumerate(inputs)) | dict(zip(at, values, strict=True))).values()])


def closed_of(body: Any) -> Jaxpr:
    """Return a body from an equation's parameters, a jaxpr or an object with `expand`, as a closed jaxpr."""
    if hasattr(body, "expand"):
        return _expanded(body)
    return body if hasattr(body, "consts") else ClosedJaxpr(body, ())


def _expanded(new: Any) -> Jaxpr:
    stored = getattr(getattr(new, "traced", new), "jaxpr", None)
    if stored is not None and [*stored.in_avals] == [*new.in_avals_flat]:
        return stored  # it knows the user's file, and needs no mesh axes, as expanding it may
    flat = lambda *args: jax.tree.leaves(new.expand(*jax.tree.unflatten(new.in_tree, args)))
    return jax.make_jaxpr(flat)(*new.in_avals_flat)


def bodies_of(eqn: Eqn) -> list[Jaxpr]:
    """Return the jaxprs inside an equation."""
    if not eqn.params or eqn.primitive.name in _WITHOUT_BODIES:
        return []
    new = eqn.params.get("_prim")
    return [*core.jaxprs_in_params(eqn.params)] if new is None else [closed_of(new).jaxpr]


def laid_open(closed: Jaxpr, calls: tuple[str, ...] = JITS) -> Jaxpr:
    """Return the same program with these calls inlined."""

    def rule(eqn: Eqn, inputs: list[Value]) -> list[Value] | None:
        if eqn.primitive.name not in calls:
            return None
        return evaluated(closed_of(eqn.params[CALLS[eqn.primitive.name]]), inputs, rule)

    if not any(eqn.primitive.name in calls for eqn in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: evaluated(closed, args, rule))(*closed.in_avals)


def part_of(closed: Jaxpr, invars: Sequence[Var], eqns: Sequence[Eqn], outvars: Sequence[Var]) -> Jaxpr:
    """Return some equations of a closed jaxpr as a closed jaxpr from `invars` to `outvars`."""
    changed = {"invars": list(invars), "eqns": list(eqns), "outvars": list(outvars)}
    jaxpr = closed.jaxpr.replace(**changed, debug_info=closed.jaxpr.debug_info.with_unknown_names())
    return ClosedJaxpr(jaxpr, closed.consts)


def variables(atoms: Sequence[Var]) -> list[Var]:
    """Return the atoms that are variables, not literals."""
    return [v for v in atoms if not isinstance(v, _Literal)]


def is_float(var: Var) -> bool:
    """Return whether a variable has a float dtype, so that it can have a gradient."""
    return hasattr(var.aval, "dtype") and _is_inexact(var.aval.dtype)


@functools.cache
def _is_inexact(dtype: Dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def read_by(eqns: Sequence[Eqn], outvars: Sequence[Var] = ()) -> list[Any]:
    """Return the variables that equations read, and those that are among `outvars`, as often as they are read."""
    return variables([*(v for eqn in eqns for v in eqn.invars), *outvars])


def depending(eqns: list[Eqn], on: Sequence[Var]) -> set[Var]:
    """Return the variables that depend on the variables `on`, including these."""
    dependent = set(on)
    for eqn in eqns:
        if dependent.intersection(variables(eqn.invars)):
            dependent.update(eqn.outvars)
    return dependent


def differentiated_between(eqns: Sequence[Eqn], inputs: Sequence[Var], results: Sequence[Var]) -> set[Var]:
    """Return the values through which gradients go from results back to inputs: none goes past a `stop_gradient`."""
    following, reached, passed = {*inputs}, {*variables(results)}, list[Eqn]()
    for eqn in eqns:
        if not following.isdisjoint(variables(eqn.invars)) and getattr(eqn, "primitive", None) is not stop_gradient_p:
            following.update(v for v in eqn.outvars if is_float(v))
            passed.append(eqn)
    for eqn in reversed(passed):
        if any(v in reached and v in following for v in eqn.outvars):
            reached.update(variables(eqn.invars))
    return following & reached


def needed(eqns: list[Eqn], outvars: list[Var], *, effects: bool = False) -> list[Eqn]:
    """Return the equations that `outvars` depend on, in order; with `effects`, also those that have effects."""
    wanted = set(variables(outvars))
    equations = []
    for eqn in reversed(eqns):
        if wanted.intersection(eqn.outvars) or (effects and eqn.effects):
            equations.append(eqn)
            wanted.update(variables(eqn.invars))
    return equations[::-1]


def postponed(closed: Jaxpr, on: Sequence[Var]) -> Jaxpr:
    """Return the same program, in which equations that do not depend on `on` run only when others need them."""
    jaxpr = closed.jaxpr
    dependent = depending(jaxpr.eqns, on)
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    first = [eqn for eqn in jaxpr.eqns if eqn.effects or dependent.intersection(variables(eqn.invars))]
    others = [made_by[var] for var in variables(jaxpr.outvars) if var in made_by]
    return part_of(closed, jaxpr.invars, in_order([*first, *others], jaxpr.eqns), jaxpr.outvars)


def in_order(wanted: Sequence[Any], eqns: Sequence[Eqn]) -> list[Any]:
    """Return the wanted equations in an order in which each follows those of `eqns` whose results it reads."""
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    ordered: dict[int, Eqn] = {}
    for eqn in wanted:
        waiting = [eqn]
        while waiting:
            before = [made_by[v] for v in variables(waiting[-1].invars) if v in made_by]
            before = [e for e in before if id(e) not in ordered]
            if before:
                waiting += before
            else:
                ordered.setdefault(id(waiting[-1]), waiting.pop())
    return list(ordered.values())


def all_equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """Yield the equations of a jaxpr and of every jaxpr inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in bodies_of(eqn):
            yield from all_equations(inner)


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many are its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(consts), len(carry)


def in_scan_parts(params: dict[str, Any], values: list[_T]) -> tuple[list[_T], list[_T], list[_T]]:
    """Return values that a scan's inputs have, apart: of its constants, of its carry, and of what it goes over."""
    consts, carry = scan_parts(params)
    return values[:consts], values[consts:][:carry], values[consts + carry :]


def traced_on(mesh: Mesh | AbstractMesh, fn: Callable[[], _T]) -> _T:
    """Return `fn()`, called where the first two axes of `mesh` are bound, as inside a `shard_map`. Nothing is run.

    >>> mesh = AbstractMesh((2, 3), ("replica", "ipu"))
    >>> traced_on(mesh, lambda: jax.lax.axis_size("ipu"))
    3
    """
    results: list[_T] = []

    def program() -> Value:
        results.append(fn())
        return jnp.zeros(())

    bound = set(mesh.axis_names[:2])
    check_context_mesh(mesh)
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(), out_specs=PartitionSpec(), axis_names=bound, check_vma=False
    )
    jax.eval_shape(mapped)
    return results[0]


def check_context_mesh(mesh: Mesh | AbstractMesh | None = None) -> None:
    """Raise `ValueError` where jax maps over a mesh already, or traces a program under `jax.set_mesh` of another."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty or (mesh is not None and mesh.axis_types == context.axis_types and mesh.shape == context.shape):
        return
    axes = ", ".join(repr(axis) for axis in context.axis_names if not axis.startswith("_"))
    over = f" over the axes {axes}" if axes else ""
    if context.manual_axes:
        raise ValueError(
            f"this call is inside jax.shard_map or jax.pmap{over}, but it maps over the IPUs itself: call it outside; "
            "for more copies of the model, give make_mesh more replicas"
        )
    raise ValueError(
        f"this call is inside jax.jit or jax.grad under jax.set_mesh of another mesh{over}: leave jax.set_mesh out, or "
        "give it the own mesh, jax.set_mesh(pipeline.mesh)"
    )


def checkpointed(fn: Function, *, policy: Any = None, prevent_cse: Any = True) -> Function:
    """Return what `jax.checkpoint` returns without the flag, for a function of pytrees of arrays."""

    def run(*args: Tree, **kwargs: Tree) -> Tree:
        flat, treedef = jax.tree.flatten((args, kwargs))

        def flat_fn(*leaves: Any) -> Tree:
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            return fn(*args, **kwargs)

        closed, shapes = jax.make_jaxpr(flat_fn, return_shape=True)(*flat)
        how = {"policy": policy, "prevent_cse": prevent_cse, "differentiated": False}
        outputs = remat_p.bind(*closed.consts, *flat, jaxpr=closed_over(plain(closed)), **how)
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return run


def how_of(eqn: Eqn) -> dict[str, Any]:
    """Return the options of a checkpoint's equation, for `checkpointed`."""
    barred = eqn.params["prevent_cse"]
    return {"policy": eqn.params["policy"], "prevent_cse": barred if isinstance(barred, bool) else any(barred)}


def plain(closed: Jaxpr) -> Jaxpr:
    """Return the same program with its checkpoints and names as they are without the flag."""
    is_new = any(eqn.primitive.name == "call_hi_primitive" for eqn in all_equations(closed))
    return _plain(closed) if is_new else closed


def _plain(value: Any) -> Any:
    """Return a parameter of an equation with all jaxprs in it in plain form."""
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    if not hasattr(value, "eqns"):
        return value
    is_open = not hasattr(value, "consts")
    jaxpr = (value if is_open else value.jaxpr).replace(eqns=[*map(_plain_equation, value.eqns)])
    return jaxpr if is_open else type(value)(jaxpr, value.consts)


def _plain_equation(eqn: Eqn) -> Eqn:
    new = eqn.params.get("_prim")
    if type(new).__name__ in ("CheckpointName", "CheckpointNameFwd"):
        return eqn.replace(primitive=name_p, params={"name": new.name})
    if type(new).__name__ != "RematTraced":
        return eqn.replace(params={name: _plain(value) for name, value in eqn.params.items()})
    closed = _plain(new.jaxpr)
    constants = [core.Literal(value, v.aval) for value, v in zip(closed.consts, closed.jaxpr.constvars, strict=True)]
    barred = getattr(new, "prevent_cse", True)  # jax 0.10 sets a barrier in any case
    barred = barred if isinstance(barred, bool) else (*[False] * len(constants), *barred)
    how = {"policy": new.policy, "prevent_cse": barred, "differentiated": False}
    return eqn.replace(
        primitive=remat_p, invars=[*constants, *eqn.invars], params={"jaxpr": closed_over(closed), **how}
    )


def closed_over(closed: Jaxpr) -> Jaxpr:
    """Return an open jaxpr whose first inputs are the constants."""
    jaxpr = closed.jaxpr
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=debug_info)

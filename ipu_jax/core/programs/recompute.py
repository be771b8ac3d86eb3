"""Choose which values B computes again instead of reading the stash: those that are cheaper to compute than to keep.

    kept        products with weights, a softmax's sums, dropout's masks, results of collectives
    not kept    values that follow from these by cheap operations: gelu, norms, the softmax itself

`_keeping` chooses the cheapest values from which B can compute everything that its derivative reads. Weights and the
micro-batch cost nothing, because B has them anyway.

Loops, collectives and functions with a derivative of their own are never computed again. They divide a stage into
parts. Each part becomes a function whose derivative keeps the chosen values. The body of each scan is divided in the
same way, so that a scan over layers keeps the values chosen per layer.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from ipu_jax.base import jaxprs
from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Tree, Value, Var
from ipu_jax.core.mesh.axes import axes_of
from ipu_jax.core.programs._keeping import bytes_of, cheapest_to_keep
from ipu_jax.core.programs._linear_part import Pull, linearized
from ipu_jax.core.programs.prices import Prices


class ValueOrigin(enum.Enum):
    """Classify a value: it depends on weights alone, it is an input that B gets again, or neither."""

    WEIGHTS = enum.auto()
    GIVEN = enum.auto()
    COMPUTED = enum.auto()


def recomputing(fn: Function, origins: Sequence[ValueOrigin], prices: Prices | None) -> Function:
    """Return `fn` with a derivative that reads few values of F and computes the others again.

    Args:
        fn: a function of pytrees. Results that are not arrays are returned as they are.
        origins: per positional argument, where its leaves come from. The keyword argument "key" is GIVEN, "shared" is
            WEIGHTS, and all others are COMPUTED.
        prices: on the chip that runs it; None: the derivative reads all values, and computes none again.
    """

    of_keywords = {"key": ValueOrigin.GIVEN, "shared": ValueOrigin.WEIGHTS}

    def run(*args: Tree, **kwargs: Tree) -> Tree:
        flat, treedef = jax.tree.flatten((args, kwargs))
        each = [*origins, *(of_keywords.get(name, ValueOrigin.COMPUTED) for name in sorted(kwargs))]
        subtrees = [*args, *(kwargs[name] for name in sorted(kwargs))]
        leaf_origins = [o for o, tree in zip(each, subtrees, strict=True) for _ in jax.tree.leaves(tree)]
        results: list[Value] = []

        def flat_fn(*leaves: Value) -> list[Value]:
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            results.append(fn(*args, **kwargs))
            return [leaf for leaf in jax.tree.leaves(results[0]) if isinstance(leaf, jax.Array)]

        closed = jax.make_jaxpr(flat_fn)(*flat)
        arrays = iter(_run(closed, flat, leaf_origins, prices))
        return jax.tree.map(lambda leaf: next(arrays) if isinstance(leaf, jax.Array) else leaf, results[0])

    return run


def _run(closed: Jaxpr, args: Sequence[Value], origins: Sequence[ValueOrigin], prices: Prices | None) -> list[Value]:
    """Evaluate a closed jaxpr, part by part."""
    closed = jaxprs.laid_open(closed)
    jaxpr = closed.jaxpr
    eqns = jaxprs.needed(jaxpr.eqns, jaxpr.outvars) if not jaxpr.effects else jaxpr.eqns
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    known = dict.fromkeys(jaxpr.constvars, ValueOrigin.GIVEN) | dict(zip(jaxpr.invars, origins, strict=True))
    parts = _parts(eqns)
    stacked: set[Var] = set()
    for k, part in enumerate(parts):
        inputs = list(dict.fromkeys(v for v in jaxprs.read_by(part) if v in env))
        from_weights = all(known[v] == ValueOrigin.WEIGHTS for v in inputs)
        made = [v for eqn in part for v in eqn.outvars]
        if _is_divider(part[0]):
            (eqn,) = part
            values = [jaxprs.value_of(v, env) for v in eqn.invars]
            is_scan = eqn.primitive.name == "scan"
            outputs = _scan(eqn, values, known, prices) if is_scan else jaxprs.bound(eqn, values)
            stacked.update(eqn.outvars[jaxprs.scan_parts(eqn.params)[1] :] if is_scan else ())
        else:
            read = {v for later in parts[k + 1 :] for v in jaxprs.read_by(later)}
            made = [v for v in made if v in read or v in jaxpr.outvars]
            origins_of_part, of_scan = [known[v] for v in inputs], [v in stacked for v in inputs]
            outputs = _Part(part, inputs, made, origins_of_part, of_scan, prices).run(env)
        env.update(zip(made, outputs, strict=True))
        known |= dict.fromkeys(made, ValueOrigin.WEIGHTS if from_weights else ValueOrigin.COMPUTED)
    return [jaxprs.value_of(v, env) for v in jaxpr.outvars]


def _parts(eqns: Sequence[Eqn]) -> list[list[Eqn]]:
    """Divide equations into runs without a divider, and the dividers between them."""
    parts: list[list[Eqn]] = []
    is_open = False
    for eqn in eqns:
        is_divider = _is_divider(eqn)
        if is_open and not is_divider:
            parts[-1].append(eqn)
        else:
            parts.append([eqn])
        is_open = not is_divider
    return parts


def _is_divider(eqn: Eqn) -> bool:
    has_body = eqn.primitive.name != "custom_jvp_call" and bool(jaxprs.bodies_of(eqn))
    return has_body or bool(eqn.effects) or bool(axes_of(eqn))


def _scan(eqn: Eqn, inputs: list[Value], known: dict[Var, ValueOrigin], prices: Prices | None) -> list[Value]:
    """Run a scan, with a derivative of its body that computes cheap values again."""
    params, body = eqn.params, eqn.params["jaxpr"]
    of_inputs = [ValueOrigin.WEIGHTS if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
    of_consts, of_carry, of_xs = jaxprs.in_scan_parts(params, of_inputs)
    of_body = [*of_consts, *[ValueOrigin.COMPUTED] * len(of_carry), *of_xs]
    consts, init, xs = jaxprs.in_scan_parts(params, inputs)

    def step(carry: Value, x: Value) -> Value:
        outputs = _run(body, [*consts, *carry, *x], of_body, prices)
        return outputs[: len(init)], outputs[len(init) :]

    how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
    carry, ys = lax.scan(step, init, xs, **how)
    return [*carry, *ys]


@dataclasses.dataclass(frozen=True)
class _Part:
    """A run of equations, as a function of the variables that it reads.

    Attributes:
        eqns: the equations, in order.
        inputs, outputs: variables.
        origins: the origins of the inputs.
        stacked: per input, whether it is a scan's stacked result. It gets zeros where others get no gradient: jax 0.10
            hands a missing one on to the scan's body, with the shape of all iterations.
        prices: as for `recomputing`.
    """

    eqns: list[Eqn]
    inputs: list[Var]
    outputs: list[Var]
    origins: list[ValueOrigin]
    stacked: list[bool]
    prices: Prices | None

    def __call__(self, *args: Value) -> list[Value]:
        env = dict(zip(self.inputs, args, strict=True))
        for eqn in jaxprs.needed(self.eqns, self.outputs):
            env.update(zip(eqn.outvars, jaxprs.bound(eqn, [jaxprs.value_of(v, env) for v in eqn.invars]), strict=True))
        return [env[v] for v in self.outputs]

    def run(self, env: dict[Var, Value]) -> list[Value]:
        """Return the outputs, with a derivative that keeps the cheapest values."""
        # a value without a gradient stays outside of custom_vjp, which would give it one
        varying = _differentiable(self.eqns, self.inputs)
        inside = dataclasses.replace(self, outputs=[v for v in self.outputs if v in varying])
        outside = dataclasses.replace(self, outputs=[v for v in self.outputs if v not in varying])
        args = [env[v] for v in self.inputs]
        values = dict(zip(outside.outputs, outside(*args), strict=True))
        if inside.outputs:
            run = jax.custom_vjp(inside.__call__)
            run.defvjp(inside._forward, _backward, symbolic_zeros=True)
            # the others would get a gradient of zeros, even where they come from a loop that has no reverse mode
            reached = _reached(self.eqns, inside.outputs)
            args = [arg if v in reached else lax.stop_gradient(arg) for v, arg in zip(self.inputs, args, strict=True)]
            values |= zip(inside.outputs, run(*args), strict=True)
        return [values[v] for v in self.outputs]

    def _forward(self, *primals: Value) -> tuple[list[Value], "_Saved"]:
        derivative = self.derivative(tuple(primal.perturbed for primal in primals))
        args = [primal.value for primal in primals]
        values = core.jaxpr_as_fun(derivative.forward)(*args)
        count = len(self.outputs)
        given = [args[k] for k in derivative.read]
        return values[:count], _Saved(values[count:], given, derivative)

    def derivative(self, differentiated: tuple[bool, ...]) -> "_Derivative":
        """Trace the part and its derivative with respect to some inputs, and choose the values to keep."""
        shapes = [jaxprs.shape_of(v.aval) for v in self.inputs]
        traced, residuals, pull = linearized(self, shapes, differentiated)
        jaxpr, count = traced.jaxpr, len(self.outputs)
        costs = {
            var: float(bytes_of(var)) if origin == ValueOrigin.COMPUTED else 0.0
            for var, origin in zip(jaxpr.invars, self.origins, strict=True)
        }
        wanted = set(jaxprs.variables(residuals)) - set(jaxpr.constvars)
        chosen = wanted
        if self.prices is not None:
            cost, cheapest = cheapest_to_keep(jaxpr.eqns, costs, wanted, self.prices)
            if cost <= 0.95 * sum(costs.get(var, bytes_of(var)) for var in wanted):
                chosen = cheapest
        kept = [v for eqn in jaxpr.eqns for v in eqn.outvars if v in chosen]
        again = jaxprs.needed([eqn for eqn in jaxpr.eqns if not chosen.intersection(eqn.outvars)], residuals)
        used = set(jaxprs.read_by(again, residuals))
        read = tuple(k for k, var in enumerate(jaxpr.invars) if var in used)
        return _Derivative(
            forward=jaxprs.part_of(traced, jaxpr.invars, jaxpr.eqns, [*jaxpr.outvars[:count], *kept]),
            again=jaxprs.part_of(traced, [*kept, *(jaxpr.invars[k] for k in read)], again, residuals),
            read=read,
            differentiated=differentiated,
            zeros=tuple(shape if is_stacked else None for shape, is_stacked in zip(shapes, self.stacked, strict=True)),
            pull=pull,
        )


def _differentiable(eqns: Sequence[Eqn], inputs: Sequence[Var]) -> set[Var]:
    """Return the variables that have a gradient if all floating inputs have one."""
    found = set(filter(jaxprs.is_float, inputs))
    for eqn in eqns:
        if eqn.primitive.name != "stop_gradient" and found.intersection(jaxprs.variables(eqn.invars)):
            found.update(filter(jaxprs.is_float, eqn.outvars))
    return found


def _reached(eqns: Sequence[Eqn], outputs: Sequence[Var]) -> set[Var]:
    """Return the variables that get a gradient if all of these outputs have one."""
    found = set(outputs)
    for eqn in reversed(eqns):
        if eqn.primitive.name != "stop_gradient" and found.intersection(eqn.outvars):
            found.update(filter(jaxprs.is_float, jaxprs.variables(eqn.invars)))
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Derivative:
    """The programs of a part and of its derivative.

    Attributes:
        forward: a closed jaxpr from the inputs to the outputs and the values to keep.
        again: a closed jaxpr from the kept values and the inputs that it reads to the residuals that `pull` takes.
        read: the numbers of the inputs that `again` reads.
        differentiated: per input, whether it has a gradient.
        zeros: per input, the shape of the zeros that stand for no gradient; None where None does.
        pull: from the residuals and the outputs' cotangents to the differentiated inputs' cotangents.
    """

    forward: Jaxpr
    again: Jaxpr
    read: tuple[int, ...]
    differentiated: tuple[bool, ...]
    zeros: tuple[Any, ...]
    pull: Pull


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kept", "inputs"], meta_fields=["derivative"])
@dataclasses.dataclass(frozen=True)
class _Saved:
    """Hold the values that the derivative of a part reads: kept values and inputs."""

    kept: list[Value]
    inputs: list[Value]
    derivative: _Derivative


def _backward(saved: _Saved, cotangents: list[Value]) -> tuple[Value, ...]:
    derivative = saved.derivative
    residuals = core.jaxpr_as_fun(derivative.again)(*saved.kept, *saved.inputs)
    gradients = iter(derivative.pull(residuals, cotangents))
    found = [next(gradients) if d else None for d in derivative.differentiated]
    return tuple(
        jnp.zeros(zeros.shape, zeros.dtype) if g is None and zeros is not None else g
        for g, zeros in zip(found, derivative.zeros, strict=True)
    )

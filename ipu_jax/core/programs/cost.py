"""Count the floating-point operations of a traced function, and the bytes it needs at once, from its jaxpr.

    flops_of(lambda x, w: jnp.tanh(x @ w), x, w)    2 n d e for the product, n e for the tanh

Nothing is run or compiled: the program is counted as it is written, before any fusion, and the count is the same on
every platform. The rules for primitives:

    dot_general, conv_general_dilated   2 for each multiply-add; in a convolution only where the kernel meets the input
    scan                                its body, times its length
    while                               its condition and its body once: the number of iterations is not known
    cond                                its most expensive branch
    jit, checkpoint, custom_vjp, ...    their body; of `shard_map` and `everywhere`, one device's share
    collectives, data movement          0: they compute nothing
    reductions, scatter-add             1 for each element of the input
    any other with a body               its most expensive body; of a Pallas kernel, for each step of its grid
    anything else                       1 for each element of the result, for transcendental functions too
"""

import math
from collections.abc import Iterable

import jax
import numpy as np

from ipu_jax.base.annotations import Eqn, Function, Jaxpr, Tree, Value, Var
from ipu_jax.base.jaxprs import CALLS, ELEMENTWISE, bodies_of, closed_of, variables

_BODIES = {**CALLS, "shard_map": "jaxpr", "everywhere": "jaxpr"}
_MOVES = """
    reshape transpose broadcast_in_dim squeeze expand_dims slice dynamic_slice dynamic_update_slice concatenate pad
    gather rev copy iota convert_element_type reduce_precision bitcast_convert_type stop_gradient split
    optimization_barrier device_put pcast pvary reshard sharding_constraint scatter random_wrap random_unwrap
"""
_COLLECTIVES = """
    psum psum_invariant pmax pmin pbroadcast ppermute all_gather all_gather_invariant all_to_all psum_scatter
    reduce_scatter axis_index
"""
_FREE = frozenset((_MOVES + _COLLECTIVES).split())


def flops_of(fn: Function, *args: Value) -> int:
    """Return the floating-point operations of one call `fn(*args)`.

    Args:
        fn: any function that jax can trace.
        args: pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
        The count, by the rules at the top of `ipu_jax.core.programs.cost`.

    >>> x, w = jax.ShapeDtypeStruct((2, 3), "float32"), jax.ShapeDtypeStruct((3, 5), "float32")
    >>> flops_of(lambda x, w: jax.numpy.tanh(x @ w), x, w)  # 2 * 2 * 3 * 5 and 2 * 5
    70
    """
    return jaxpr_flops(jax.make_jaxpr(fn)(*args))


def jaxpr_flops(jaxpr: Jaxpr) -> int:
    """Return the floating-point operations of a jaxpr, closed or open.

    >>> jaxpr_flops(jax.make_jaxpr(lambda x: x * 2 + 1)(jax.numpy.ones(4)))
    8
    """
    return sum(map(equation_flops, _open(jaxpr).eqns))


def _open(jaxpr: Jaxpr) -> Jaxpr:
    return closed_of(jaxpr).jaxpr


def equation_flops(eqn: Eqn) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        return _convolution_flops(eqn)
    if name == "scan":
        return params["length"] * jaxpr_flops(params["jaxpr"])
    if name == "while":
        return jaxpr_flops(params["cond_jaxpr"]) + jaxpr_flops(params["body_jaxpr"])
    if name == "cond":
        return max(map(jaxpr_flops, params["branches"]))
    if name in _BODIES:
        return jaxpr_flops(params[_BODIES[name]])
    if name in _FREE:
        return 0
    if name.startswith("reduce_") or name in ("reduce", "argmax", "argmin"):
        return _elements(v.aval for v in eqn.invars)
    if name.startswith("scatter"):
        return eqn.invars[2].aval.size
    if name in ELEMENTWISE:
        return getattr(eqn.outvars[0].aval, "size", 0)
    # a dim of a grid may be known only when the kernel runs: it counts as one step
    steps = math.prod(n for n in params["grid_mapping"].grid if isinstance(n, int)) if name == "pallas_call" else 1
    return max([_elements(v.aval for v in eqn.outvars), *(steps * jaxpr_flops(body) for body in bodies_of(eqn))])


def _elements(avals: Iterable[Value]) -> int:
    return sum(getattr(aval, "size", 0) for aval in avals)


def _convolution_flops(eqn: Eqn) -> int:
    """Return twice the multiply-adds. Kernel elements over padding or over holes of a dilated input need none."""
    params, (lhs, rhs), out = eqn.params, (v.aval for v in eqn.invars), eqn.outvars[0].aval
    numbers = params["dimension_numbers"]
    lhs_dims, rhs_dims, out_dims = numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]
    pairs = 1
    for k, (i, j, o) in enumerate(zip(lhs_dims, rhs_dims, out_dims, strict=True)):
        holes, low = params["lhs_dilation"][k], params["padding"][k][0]
        at = np.arange(out.shape[o])[:, None] * params["window_strides"][k] - low
        at = at + np.arange(rhs.shape[j]) * params["rhs_dilation"][k]
        pairs *= int(((at >= 0) & (at <= (lhs.shape[i] - 1) * holes) & (at % holes == 0)).sum())
    batch, features = out.shape[numbers.out_spec[0]], out.shape[numbers.out_spec[1]]
    return 2 * batch * features * rhs.shape[numbers.rhs_spec[1]] * pairs


def jaxpr_peak_bytes(jaxpr: Jaxpr, *, copied: range = range(0), keep_outputs: bool = True) -> int:
    """Return the most bytes of intermediate values alive at once, if each is freed after its last use.

    Inputs and constants are not counted, since they are stored elsewhere. An elementwise operation overwrites an
    operand that is not read again. If its result is read only once, the result is not counted: XLA fuses the operation
    into the operation that reads it.

    Args:
        jaxpr: closed or open.
        copied: the numbers of the inputs that are slices of a larger array. An operation on them that is not
            elementwise, such as a product, needs a copy.
        keep_outputs: whether the results stay alive until the end; otherwise each is freed when it is made.

    >>> x, w = jax.numpy.ones((4, 4)), jax.numpy.ones((4, 4))
    >>> jaxpr_peak_bytes(jax.make_jaxpr(lambda x, w: ((x @ w) @ w) @ w)(x, w))  # two products of 64 bytes at a time
    128
    """
    jaxpr = _open(jaxpr)
    inputs = [jaxpr.invars[i] for i in copied]
    return _peak(jaxpr, inputs, set(variables(jaxpr.outvars)) if keep_outputs else set())


def _peak(jaxpr: Jaxpr, copied: list[Var], live_outputs: set[Var]) -> int:
    last: dict[Var, int] = {}
    readers: dict[Var, int] = {}
    needs_copy: set[Var] = set()
    for at, eqn in enumerate(jaxpr.eqns):
        for var in variables(eqn.invars):
            last[var] = at
            readers[var] = readers.get(var, 0) + 1
            if not _is_elementwise(eqn):
                needs_copy.add(var)
    outputs = set(variables(jaxpr.outvars))
    last.update(dict.fromkeys(live_outputs, len(jaxpr.eqns)))
    alive = {var: bytes_of(var.aval) for var in copied if var in needs_copy}
    most = sum(alive.values())
    for at, eqn in enumerate(jaxpr.eqns):
        if _is_elementwise(eqn):
            alive = {var: size for var, size in alive.items() if last[var] > at}
        body = _open(eqn.params[_BODIES[eqn.primitive.name]]) if eqn.primitive.name in _BODIES else None
        if body is not None:
            # as if the body were inlined: a result that is not read later is freed when it is made
            later = [v for v, outer in zip(body.outvars, eqn.outvars, strict=True) if last.get(outer, -1) > at]
            most = max(most, sum(alive.values()) + _peak(body, [], set(variables(later))))
        inner = max((_peak(j, [], set()) for j in bodies_of(eqn)), default=0) if body is None else 0
        for var in eqn.outvars:
            fused = _is_elementwise(eqn) and readers.get(var, 0) <= 1 and var not in outputs
            alive[var] = 0 if fused or (body is not None and last.get(var, -1) <= at) else bytes_of(var.aval)
        if body is None:
            most = max(most, sum(alive.values()) + inner)
        alive = {var: size for var, size in alive.items() if last.get(var, -1) > at}
    return most


def _is_elementwise(eqn: Eqn) -> bool:
    name = eqn.primitive.name
    if name in ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "iota", "transpose"):
        return True
    shapes = {v.aval.shape for v in eqn.invars if getattr(v.aval, "shape", ())}
    special = name in ("dot_general", "conv_general_dilated", "scan", "while", "cond", "sort") or name in _BODIES
    return not special and shapes <= {eqn.outvars[0].aval.shape}


def bytes_of(tree: Tree) -> int:
    """Return the bytes of all arrays, `jax.ShapeDtypeStruct` or avals in a tree. A typed key counts as its data.

    >>> bytes_of([jax.ShapeDtypeStruct((2, 3), "bfloat16"), jax.numpy.ones(4), jax.random.key(0)])
    36
    """
    if hasattr(tree, "shape"):
        return math.prod(tree.shape) * tree.dtype.itemsize
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves if hasattr(leaf, "shape"))


def in_units(value: float, unit: str) -> str:
    """Return a number with its unit and a decimal prefix.

    >>> in_units(131072, "B"), in_units(3, "B")
    ('131.1 kB', '3 B')
    """
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.1f} {prefix}{unit}"
    return f"{value:g} {unit}"

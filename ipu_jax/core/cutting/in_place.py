"""Let a scan over layers replace the rows of a cache where they are.

    scan(layer, x, (weights, cache)) -> x, new cache       XLA keeps the old cache until the last layer has the new one
    scan(layer, (x, cache), weights) -> (x, new cache)     each layer writes its row over the old one

Only for a forward pass: the backward of the second scan would keep the whole cache of each layer.
"""

from collections.abc import Mapping

from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Tree, Value, Var
from ipu_jax.base.jaxprs import in_scan_parts
from ipu_jax.core.cutting.rows import equations


def replacing_in_place(eqn: Eqn, replaced: Mapping[Var, Var]) -> Eqn:
    """Return the equation of a scan that carries the stacked inputs that it replaces, each by one of its results.

    Args:
        eqn: any equation; only a scan changes.
        replaced: per new value, the old one.
    """
    if eqn.primitive.name != "scan":
        return eqn
    params = eqn.params
    fixed, carry, xs = in_scan_parts(params, list(eqn.invars))
    ys = eqn.outvars[len(carry) :]
    at = [(xs.index(replaced[new]), j) for j, new in enumerate(ys) if replaced.get(new) in xs]
    if not at:
        return eqn
    read, written = [i for i, _ in at], [j for _, j in at]
    body, length = core.jaxpr_as_fun(params["jaxpr"]), params["length"]
    others = [k for k in range(len(xs)) if k not in read]

    def run(fixed: list[Value], carry: list[Value], caches: list[Value], xs: list[Value]) -> Tree:
        def layer(carried: Tree, xs: list[Value]) -> tuple[Tree, list[Value]]:
            number, carry, caches = carried
            row = length - 1 - number if params["reverse"] else number
            rows = dict(zip(others, xs, strict=True))
            rows |= {
                i: lax.dynamic_index_in_dim(cache, row, keepdims=False) for i, cache in zip(read, caches, strict=True)
            }
            outs = body(*fixed, *carry, *(rows[i] for i in range(len(rows))))
            carry, new = outs[: len(carry)], outs[len(carry) :]
            caches = [
                lax.dynamic_update_index_in_dim(cache, new[j], row, 0) for j, cache in zip(written, caches, strict=True)
            ]
            return (number + 1, carry, caches), [y for j, y in enumerate(new) if j not in written]

        options = {name: params[name] for name in ("reverse", "unroll")}
        (_, carry, caches), ys = lax.scan(layer, (0, carry, caches), xs, length, **options)
        return carry, caches, ys

    results = [
        *eqn.outvars[: len(carry)],
        *(ys[j] for j in written),
        *(y for j, y in enumerate(ys) if j not in written),
    ]
    (made,) = equations(run, (fixed, carry, [xs[i] for i in read], [xs[i] for i in others]), results, like=eqn)
    return made

"""Choose which values of a program to keep, and which to compute again, for a later program that needs some of them.

Every value costs its bytes if it is kept, and the work of its operation if it is computed again. A later program that
needs a value reads it or computes it from others. The cheapest choice is a minimum cut between the values computed once
and the values that the later program needs. Source: "min-cut rematerialization" in torch.compile (AOTAutograd).
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.extend import core
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from ipu_jax.base.annotations import Eqn, Var
from ipu_jax.base.jaxprs import variables
from ipu_jax.core.programs.prices import Prices

_FLOPS_PER_BYTE = 16  # operations that take as long as moving one byte out and back
_FLOPS_OF_FUNCTIONS = 16  # per element

MOVES = """
    reshape transpose broadcast_in_dim squeeze expand_dims slice dynamic_slice concatenate pad rev copy iota name split
    convert_element_type reduce_precision bitcast_convert_type stop_gradient select_n clamp random_wrap random_unwrap
""".split()  # noqa: SIM905
_SIMPLE = """
    add add_any sub mul div neg abs sign max min square integer_pow eq ne lt le gt ge and or not xor floor ceil round
    is_finite rem shift_left shift_right_logical shift_right_arithmetic reduce_sum reduce_max reduce_min reduce_prod
    reduce_and reduce_or reduce_xor argmax argmin one_minus_square
""".split()  # noqa: SIM905
_FUNCTIONS = """
    exp exp2 expm1 log log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh logistic erf erfc
    erf_inv pow rsqrt sqrt cbrt lgamma digamma
""".split()  # noqa: SIM905
_MOST = 2**30  # scipy's capacities are int32
_ONCE, _LATER = "once", "later"


def cheapest_to_keep(
    eqns: Sequence[Eqn], inputs: Mapping[Var, float], wanted: Iterable[Var], prices: Prices
) -> tuple[float, set[Var]]:
    """Return the least cost of the values that a later program wants, and the variables to keep for it.

    Args:
        eqns: the equations of the program that computes everything once.
        inputs: per input of the program, the cost of keeping it; other inputs and constants cost nothing.
        wanted: the variables that the later program wants.
        prices: on the chip that runs the programs.
    """
    edges: list[tuple[Var, Var, float]] = [(_ONCE, var, cost) for var, cost in inputs.items()]
    edges += [(var, _LATER, math.inf) for var in wanted]
    for number, eqn in enumerate(eqns):
        edges.append((_ONCE, number, work(eqn, prices)))
        edges += [(var, number, math.inf) for var in dict.fromkeys(variables(eqn.invars))]
        edges += [(number, var, float(bytes_of(var))) for var in eqn.outvars]
    found = least_cut(edges, _ONCE, _LATER)
    assert found is not None, "every value may be kept"
    cost, once = found
    kept = {var for number, eqn in enumerate(eqns) if number in once for var in eqn.outvars if var not in once}
    return cost, kept | {var for var, price in inputs.items() if price and var not in once}


def least_cut(edges: Sequence[tuple[Var, Var, float]], source: Var, sink: Var) -> tuple[float, set[Var]] | None:
    """Return the weight of the minimum cut with the fewest nodes on the source's side, and these nodes.

    Args:
        edges: `(from, to, capacity)`; `math.inf` for an edge that must not be cut. Capacities of parallel edges add up.
        source, sink: nodes.

    Returns:
        None if every cut has an edge of infinite capacity.

    >>> weight, side = least_cut([("s", "a", 5.0), ("a", "b", 2.0), ("b", "t", math.inf)], "s", "t")
    >>> weight, sorted(side)
    (2.0, ['a', 's'])
    """
    numbers = {source: 0, sink: 1}
    capacities: dict[tuple[int, int], float] = {}
    for one, other, capacity in edges:
        ends = numbers.setdefault(one, len(numbers)), numbers.setdefault(other, len(numbers))
        capacities[ends] = capacities.get(ends, 0.0) + capacity
    finite = [c for c in capacities.values() if math.isfinite(c)]
    # all finite capacities together stay below an infinite one, although each is rounded up
    scale = min(1.0, (_MOST // 2 - len(finite)) / max(sum(finite), 1.0))
    rounded = [math.ceil(c * scale) if math.isfinite(c) else _MOST for c in capacities.values()]
    rows, columns = np.array(list(capacities), np.int32).reshape(-1, 2).T
    graph = csr_array((np.array(rounded, np.int32), (rows, columns)), shape=(len(numbers), len(numbers)))
    found = maximum_flow(graph, 0, 1)
    if found.flow_value >= _MOST:
        return None
    left = graph - found.flow
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
    weight = sum(c for (one, other), c in capacities.items() if one in reached and other not in reached)
    return weight, {node for node, number in numbers.items() if number in reached}


def bytes_of(var: Var) -> int:
    """Return the bytes of a variable, at least 1, since a value that costs 0 is never kept; a literal has none."""
    return 0 if isinstance(var, core.Literal) else max(1, math.prod(var.aval.shape) * var.aval.dtype.itemsize)


def work(eqn: Eqn, prices: Prices) -> float:
    """Return the cost of computing an equation again, in bytes kept.

    The cost is infinite for products with weights, which are not batched, and for operations that are not listed above.
    """
    name = eqn.primitive.name
    elements = max((math.prod(v.aval.shape) for v in [*eqn.invars, *eqn.outvars]), default=0)
    if name == "dot_general" and eqn.params["dimension_numbers"][1][0]:
        contracted = eqn.params["dimension_numbers"][0][0]
        flops = 2 * eqn.outvars[0].aval.size * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return flops / prices.batched
    if name in MOVES or (name == "reduce_max" and bytes_of(eqn.invars[0]) < prices.free_max):
        return 0.0
    if name in _SIMPLE:
        return elements / _FLOPS_PER_BYTE
    if name in _FUNCTIONS:
        return elements * _FLOPS_OF_FUNCTIONS / _FLOPS_PER_BYTE
    return math.inf

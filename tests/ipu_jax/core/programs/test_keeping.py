"""Test the choice of what to keep: against all choices of small graphs, and on programs worked out by hand."""

import itertools
import math
import random

import jax
import jax.numpy as jnp
import pytest

from ipu_jax.base.jaxprs import JITS, laid_open
from ipu_jax.core.programs._keeping import bytes_of, cheapest_to_keep, least_cut, work
from ipu_jax.core.programs.prices import ON_CPU, Prices, prices_on

ROWS, D = 64, 32


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_is_the_best_of_all_cuts(seed):
    dice = random.Random(seed)
    nodes = range(dice.randint(2, 7))
    capacities = [math.inf, *(float(dice.randint(0, 9)) for _ in range(8))]
    edges = [(a, b, dice.choice(capacities)) for a in nodes for b in nodes if a != b and dice.random() < 0.5]
    source, sink = nodes[0], nodes[-1]
    sides = [
        {source, *inner} for size in range(len(nodes)) for inner in itertools.combinations(list(nodes)[1:-1], size)
    ]
    weights = {frozenset(side): sum(c for a, b, c in edges if a in side and b not in side) for side in sides}
    best = min(weights.values())
    found = least_cut(edges, source, sink)
    if best == math.inf:
        assert found is None
        return
    assert found is not None
    weight, side = found
    assert weight == best
    linked = {node for a, b, _ in edges for node in (a, b)} | {source, sink}
    assert weights[frozenset(side)] == best
    assert len(side) == min(len(one & linked) for one, w in weights.items() if w == best), "the fewest nodes"


def test_capacities_far_above_those_of_the_solver():
    terabyte = 1e12
    edges = [("s", "a", 3 * terabyte), ("a", "b", 2 * terabyte), ("b", "t", math.inf)]
    assert least_cut(edges, "s", "t") == (2 * terabyte, {"s", "a"})


def kept_of(fn, *shapes, costs, prices=ON_CPU):
    """Return the names of primitives whose results are kept, or "input", for a program that wants fn's results."""
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    jaxpr = closed.jaxpr
    price = {v: bytes_of(v) if dear else 0 for v, dear in zip(jaxpr.invars, costs, strict=True)}
    cost, kept = cheapest_to_keep(jaxpr.eqns, price, jaxpr.outvars, prices)
    made_by = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    return cost, sorted(made_by.get(v, "input") for v in kept)


BATCHED = lambda q, k: jnp.einsum("btk,bsk->bts", q, k)
EXP_OF_SCORES = lambda x: jnp.exp(x - x.max(-1, keepdims=True))
BY_HAND = {  # the function, its shapes, which inputs are dear, and what is kept on a CPU
    "what follows from free inputs": (lambda x: jnp.tanh(x) * 2, [(ROWS, D)], [False], []),
    # 64 operations take as long as a byte, so a float32 is worth up to 128 products and sums
    "a cheap batched product": (BATCHED, [(1, 64, 32)] * 2, [False] * 2, []),
    "a dear batched product": (BATCHED, [(1, 64, 256)] * 2, [False] * 2, ["dot_general"]),
    "a small result rather than a large input": (lambda x: jnp.exp(x).sum(-1), [(ROWS, D)], [True], ["reduce_sum"]),
}


@pytest.mark.parametrize(("fn", "shapes", "costs", "kept"), BY_HAND.values(), ids=BY_HAND)
def test_what_is_kept_by_hand(fn, shapes, costs, kept):
    assert kept_of(fn, *shapes, costs=costs)[1] == kept


ON_V5E = prices_on("tpu", "TPU v5 lite")
CHIPS = [ON_V5E, prices_on("tpu", "TPU v5"), prices_on("gpu", "NVIDIA H100 80GB HBM3")]


@pytest.mark.parametrize("prices", CHIPS, ids=["v5e", "v5p", "h100"])
def test_on_chips_256_operations_of_a_batched_product_take_as_long_as_a_byte(prices):
    for features, kept in ((256, []), (1024, ["dot_general"])):
        assert kept_of(BATCHED, *[(1, 64, features)] * 2, costs=[False] * 2, prices=prices)[1] == kept


@pytest.mark.parametrize(
    ("prices", "kept"),
    [
        # the max of 128 numbers takes 8 bytes' time, and 4 bytes
        *[(prices, ["reduce_max"]) for prices in (ON_CPU, *CHIPS[1:])],
        (ON_V5E, []),
        (Prices(256, free_max=4 * ROWS * 128), ["reduce_max"]),
    ],
    ids=["cpu", "v5p", "h100", "v5e", "too large"],
)
def test_a_max_is_not_kept_where_scores_and_exp_fit_into_fast_memory(prices, kept):
    assert kept_of(EXP_OF_SCORES, (ROWS, 128), costs=[False], prices=prices)[1] == kept


def test_a_product_with_weights_is_kept_and_what_follows_from_it_is_not():
    def fn(x, w):
        h = x @ w
        return jnp.sin(h), jnp.cos(h)

    by_hand = 4 * ROWS * D + 2 * ROWS * D  # bytes of the product; sin and cos take 16 operations, as long as a byte
    assert kept_of(fn, (ROWS, D), (D, D), costs=[True, False]) == (by_hand, ["dot_general"])


SQUARE = (ROWS, ROWS)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.sort(x),
        lambda x: jax.lax.cumsum(x),
        lambda x: jax.lax.dot(x, x),
        lambda x: jax.lax.linalg.cholesky(x),
        lambda x: jax.lax.cummax(x),
    ],
    ids=["sort", "cumsum", "dot", "cholesky", "cummax"],
)
def test_what_is_not_elementwise_is_not_computed_again_even_if_shapes_are_equal(fn):
    assert len(kept_of(fn, SQUARE, costs=[False])[1]) == 1


@pytest.mark.parametrize("fn", [jax.lax.erf, jax.lax.tanh, jax.lax.rsqrt, jax.lax.lgamma, lambda x: jax.lax.pow(x, x)])
def test_elementwise_functions_are_computed_again(fn):
    assert kept_of(fn, SQUARE, costs=[False]) == (ROWS * ROWS, []), "16 operations for each element"


ACTIVATIONS = [
    *("relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "elu", "selu", "celu", "softplus", "log_sigmoid", "mish"),
    *("leaky_relu", "hard_swish", "softmax", "log_softmax", "standardize", "logsumexp"),
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivative_of_an_activation_consists_of_known_operations(name):
    """Another version of jax may compute it by an operation of its own, which would be kept without a reason."""
    x = jax.ShapeDtypeStruct(SQUARE, "float32")
    closed = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(getattr(jax.nn, name), x)[1]))(x)
    eqns = laid_open(closed, (*JITS, "custom_jvp_call")).jaxpr.eqns
    unknown = [eqn.primitive.name for eqn in eqns if work(eqn, ON_CPU) == math.inf]
    assert not unknown

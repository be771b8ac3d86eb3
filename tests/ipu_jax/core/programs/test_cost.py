"""Test FLOPs against hand counts and against XLA's own, and peak bytes against hand counts."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import pallas
from jax.sharding import PartitionSpec

from ipu_jax import make_mesh
from ipu_jax.core.programs.cost import bytes_of, flops_of, jaxpr_flops, jaxpr_peak_bytes


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def xla_flops(fn, *args):
    found = jax.jit(fn).lower(*args).compile().cost_analysis()
    assert found is not None
    return found["flops"]


PRODUCT = 2 * 4 * 8 * 16  # (4, 8) by (8, 16)


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (jnp.matmul, (f32(4, 8), f32(8, 16)), PRODUCT),
        (lambda x, w: jnp.einsum("bnd,bde->bne", x, w), (f32(3, 4, 8), f32(3, 8, 16)), 3 * PRODUCT),
        (lambda x: jnp.tanh(x) + 1, (f32(5, 2),), 20),
        (jnp.sum, (f32(5, 2),), 10),
        (lambda x: x.reshape(10).astype(jnp.bfloat16)[:3], (f32(5, 2),), 0),
        (lambda x, w: jax.jit(jnp.matmul)(x, w), (f32(4, 8), f32(8, 16)), PRODUCT),
        (lambda x, w: jax.checkpoint(jnp.matmul)(x, w), (f32(4, 8), f32(8, 16)), PRODUCT),
        (jax.nn.relu, (f32(4, 8),), 32),
        # a scan costs its body times its length, a cond its dearest branch, and a while one round
        (
            lambda x, ws: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0],
            (f32(4, 8), f32(7, 8, 8)),
            7 * (2 * 4 * 8 * 8 + 4 * 8),
        ),
        (lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: x + 1, x), (True, f32(4, 4)), 2 * 4**3),
        (lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x), (f32(4, 4),), 2 * 4**3 + 1),
        # each of 8 x 8 outputs of "VALID" meets 3 x 3 inputs of 4 features, for 6 features and 2 examples
        (
            lambda x, w: lax.conv(x, w, (1, 1), "VALID"),
            (f32(2, 4, 10, 10), f32(6, 4, 3, 3)),
            2 * (2 * 6 * 8 * 8) * (4 * 3 * 3),
        ),
        (lambda t, i, v: t.at[i].add(v), (f32(1000, 3), jnp.arange(2), f32(2, 3)), None),
    ],
)
def test_hand_counts(fn, args, expected):
    found = flops_of(fn, *args)
    if expected is None:
        assert 6 <= found < 30, "a scatter costs what goes in, not the table"
    else:
        assert found == expected


def rows_of_product(x, w, out):
    out[...] = x[...] @ w[...]


# in two steps; each also loads its rows and all weights, and stores its rows, an element for 1
KERNEL = pallas.pallas_call(
    rows_of_product,
    out_shape=f32(4, 16),
    grid=(2,),
    in_specs=[pallas.BlockSpec((2, 8), lambda k: (k, 0)), pallas.BlockSpec((8, 16), lambda k: (0, 0))],
    out_specs=pallas.BlockSpec((2, 16), lambda k: (k, 0)),
)
BODIES = {
    "composite": (lax.composite(jnp.matmul, "product"), PRODUCT),
    "linear_call": (lambda x, w: linear_call(lambda w, x: x @ w, lambda w, y: y @ w.T, w, x), PRODUCT),
    "kernel": (KERNEL, PRODUCT + 2 * (2 * 8 + 8 * 16 + 2 * 16)),
}


@pytest.mark.parametrize(("fn", "expected"), BODIES.values(), ids=BODIES)
def test_a_body_is_counted_whatever_calls_it(fn, expected):
    assert flops_of(fn, f32(4, 8), f32(8, 16)) == expected


def test_a_dim_of_a_kernels_grid_that_is_known_later_counts_as_one_step():
    def kernel(x, steps):
        whole = pallas.BlockSpec((4,), lambda i, j: (0,))
        body = lambda x, out: out.__setitem__(..., 2 * x[...])
        return pallas.pallas_call(body, out_shape=f32(4), grid=(steps, 2), in_specs=[whole], out_specs=whole)(x)

    assert flops_of(kernel, f32(4), jax.ShapeDtypeStruct((), "int32")) == 2 * 3 * 4  # each step loads and stores, too


def test_custom_derivatives_are_entered():
    @jax.custom_vjp
    def double(x, w):
        return x @ w

    double.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))

    assert flops_of(double, f32(4, 8), f32(8, 16)) == PRODUCT
    both = lambda x, w, g: jax.vjp(double, x, w)[1](g)
    assert flops_of(both, f32(4, 8), f32(8, 16), f32(4, 16)) == 3 * PRODUCT


def test_recompute_counts_the_forward_again():
    def fn(x, w):
        return jnp.tanh(x @ w) @ w

    def grads(f):
        return flops_of(lambda x, w, g: jax.vjp(f, x, w)[1](g), f32(8, 8), f32(8, 8), f32(8, 8))

    product = 2 * 8**3
    assert grads(fn) // product == 6
    assert grads(jax.checkpoint(fn)) // product == 7  # the first product is computed again; the second is not needed


def test_shard_map_costs_one_devices_share_and_collectives_nothing():
    mesh, spec = make_mesh(1, 4), PartitionSpec(None, "ipu")
    fn = jax.shard_map(
        lambda x, w: lax.psum((x @ w).sum(), "ipu"),
        mesh=mesh,
        in_specs=(PartitionSpec(), spec),
        out_specs=PartitionSpec(),
    )
    assert flops_of(fn, f32(4, 8), f32(8, 16)) == PRODUCT // 4 + 4 * 16 // 4


@pytest.mark.parametrize(
    ("strides", "padding", "lhs_dilation", "rhs_dilation", "groups"),
    [
        ((1, 1), "VALID", (1, 1), (1, 1), 1),
        ((1, 1), "SAME", (1, 1), (1, 1), 1),
        ((2, 2), "SAME", (1, 1), (1, 1), 1),
        ((1, 1), [(2, 1), (0, 3)], (2, 3), (1, 1), 1),
        ((2, 1), "SAME", (1, 1), (2, 2), 2),
    ],
)
def test_convolutions_count_as_xla_does(strides, padding, lhs_dilation, rhs_dilation, groups):
    def fn(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, lhs_dilation, rhs_dilation, feature_group_count=groups)

    x, w = f32(2, 4, 9, 11), f32(6, 4 // groups, 3, 3)
    assert flops_of(fn, x, w) == xla_flops(fn, x, w)


@pytest.mark.parametrize("batch", [4, 64])
def test_a_training_step_is_within_a_few_percent_of_xla(batch):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    args = ([f32(64, 64)] * 3, f32(batch, 64))
    assert flops_of(jax.grad(loss), *args) == pytest.approx(xla_flops(jax.grad(loss), *args), rel=0.05)


def test_open_and_closed_jaxprs_count_alike():
    closed = jax.make_jaxpr(lambda x: x @ x)(f32(4, 4))
    assert jaxpr_flops(closed) == jaxpr_flops(closed.jaxpr) == 128


def test_peak_bytes_by_hand():
    x, w = f32(4, 4), f32(4, 4)
    peak = lambda fn, *args, **options: jaxpr_peak_bytes(jax.make_jaxpr(fn)(*args), **options)
    assert peak(lambda x, w: (x @ w, w @ x), x, w) == 128
    assert peak(lambda x, w: (x @ w, w @ x), x, w, keep_outputs=False) == 64
    assert peak(lambda x, w: jnp.tanh(x @ w) * 2 + 1, x, w) == 64, "elementwise writes over its operand"
    assert peak(lambda x, w: x @ w, x, w, copied=range(1, 2)) == 128, "a slice that a product reads is copied"
    assert peak(lambda x, w: x + w, x, w, copied=range(1, 2)) == 64, "and one that a sum reads is not"
    inside = jax.jit(lambda x, w: (x @ w) @ w)
    assert peak(lambda x, w: inside(x, w), x, w) == 128, "what a jit hides counts as if it stood there"


def test_bytes_of_counts_every_leaf():
    assert bytes_of({"a": f32(2, 3), "b": [jnp.ones(4, jnp.int8), 3.0]}) == 28

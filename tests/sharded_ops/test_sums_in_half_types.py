"""Test that gradients of weights in half types are summed over tokens in float32.

Each cotangent is 1 and each token's part is exact, so the sum is a whole number that the half type can represent: for
2,000 tokens of one row it is 2,000. A sum in bfloat16, which has 8 bits, would stop at 256, as 256 + 1 is 256. In
float16, with 11 bits, 2048 + 1 is 2048.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import embedding, layer_norm, matmul, rms_norm, tied_projection
from support.harness import mesh_of, on_ipus

# 4 more tokens than this are a number that the dtype can represent, but that a running sum in it doesn't reach.
TOKENS = {jnp.bfloat16: 2000, jnp.float16: 4096}
every_half = pytest.mark.parametrize("dtype", list(TOKENS), ids=lambda dtype: dtype.__name__)


def _gradient(op, spec, out_spec, n, typed, weight):
    sharded = on_ipus(op, n, spec, out_spec, typed)

    def total(weight):
        return jnp.sum(sharded(weight).astype(jnp.float32))

    return np.asarray(jax.jit(jax.grad(total))(weight), np.float32)


@pytest.mark.parametrize(
    ("typed", "dtype"),
    [(True, jnp.bfloat16), (False, jnp.float16), pytest.param(False, jnp.bfloat16, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("split", "reduction", "spec", "out_spec"),
    [
        ("rows", "sum", P("ipu"), P()),
        ("rows", "scatter", P("ipu"), P("ipu")),
        ("features", "sum", P(None, "ipu"), P(None, "ipu")),
    ],
    ids=["rows", "rows-scatter", "features"],
)
def test_one_id_that_comes_up_all_the_time(split, reduction, spec, out_spec, typed, dtype):
    tokens = TOKENS[dtype]
    ids = np.full(tokens, 1, np.int32)
    ids[-3:] = 2, -1, 9

    def op(table):
        return embedding(table, ids, size=4, split=split, reduction=reduction)

    gradient = _gradient(op, spec, out_spec, 2, typed, jnp.ones((4, 4), dtype))
    want = np.zeros(4)
    want[1:3] = np.asarray(np.array([tokens - 3, 1], np.float32).astype(dtype), np.float32)  # rounded once
    np.testing.assert_array_equal(gradient, np.tile(want[:, None], 4))


@pytest.mark.parametrize(
    ("dtype", "tokens", "want"), [(jnp.bfloat16, (257, 261), 520), (jnp.float16, (2049, 2053), 4104)]
)
def test_the_sum_over_replicas_is_in_float32_too(dtype, tokens, want):
    """If the 2 replicas' counts were rounded before they are added, their sum would be smaller by 4."""
    mesh = jax.make_mesh((2, 2), ("data", "ipu"), axis_types=mesh_of(1).axis_types * 2, devices=jax.devices()[:4])
    sharded = jax.shard_map(
        functools.partial(embedding, size=4), mesh=mesh, in_specs=(P("ipu"), P("data")), out_specs=P("data")
    )
    ids = np.concatenate([np.where(np.arange(max(tokens)) < count, 1, -1) for count in tokens])
    gradient = jax.jit(jax.grad(lambda table: sharded(table, ids).astype(jnp.float32).sum()))(jnp.ones((4, 1), dtype))
    assert np.asarray(gradient, np.float32).ravel().tolist() == [0, want, 0, 0]


@pytest.mark.fast("bfloat16")
@every_half
def test_forward_mode_and_second_derivatives_of_a_half_table(dtype):
    table, direction = (jnp.asarray(np.arange(8.0).reshape(4, 2) + shift, dtype) for shift in (0, 1))
    ids = np.array([3, 0, 3], np.int32)

    def cubes(lookup):
        return lambda table: jnp.sum(lookup(table).astype(jnp.float32) ** 3)

    dense = cubes(lambda table: table[ids])
    split = cubes(on_ipus(lambda table: embedding(table, ids, size=4), 2, P("ipu"), P()))
    for of in (
        lambda f: jax.jvp(f, (table,), (direction,))[1],
        lambda f: jax.jvp(jax.grad(f), (table,), (direction,))[1],
    ):
        got, want = (np.asarray(jax.jit(of, static_argnums=0)(f), np.float32) for f in (split, dense))
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    ("op", "spec", "out_spec", "weight"),
    [
        (lambda x, b: matmul(x[:, :2], jnp.zeros((2, 2), b.dtype) + 0 * b, bias=b), P("ipu"), P(None, "ipu"), (4,)),
        (lambda x, w: matmul(x[:, :2], w), P(None, "ipu"), P(None, "ipu"), (2, 4)),
        (lambda x, w: matmul(_apart(x[:, :2]), w, split="rows"), P("ipu"), P(), (4, 2)),
        (lambda x, w: matmul(_apart(x[:, :2]), w, split="rows", reduction="scatter"), P("ipu"), P("ipu"), (4, 2)),
        (lambda x, b: matmul(_apart(x), _apart(jnp.zeros((4, 2), b.dtype)), split="rows", bias=b), P(), P(), (2,)),
        (lambda x, t: tied_projection(x[:, :2], t, size=4), P("ipu"), P(None, "ipu"), (4, 2)),
        (lambda x, s: rms_norm(_apart(x[:, :2]), s, size=4, epsilon=0.0), P("ipu"), P(None, "ipu"), (4,)),
        (lambda x, b: layer_norm(_apart(x[:, :2]), b * 0, b, size=4), P("ipu"), P(None, "ipu"), (4,)),
    ],
    ids=["bias", "columns", "rows", "rows-scatter", "bias-of-rows", "tied", "rms-scale", "layer-bias"],
)
def test_no_other_weight_of_many_tokens_saturates(op, spec, out_spec, weight, typed):
    tokens = TOKENS[jnp.bfloat16]
    x = np.ones((tokens, 4), jnp.bfloat16)
    gradient = _gradient(functools.partial(op, x), spec, out_spec, 2, typed, jnp.ones(weight, jnp.bfloat16))
    want = np.full(weight, tokens, np.float32)
    np.testing.assert_array_equal(gradient, want)


def _apart(x):
    """Return a value that is the same on all IPUs, typed as a shard."""
    return lax.pcast(x, "ipu", to="varying") if jax.typeof(lax.axis_index("ipu")).manual_axis_type.varying else x

"""The split matmul against `x @ w`, forward and in both gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P
from test_collectives import (
    assert_close,
    collectives,
    dense_vjp,
    every_case,
    exactly,
    examples,
    normal,
    on_ipus,
    padded,
    seeds,
    sharded_vjp,
    unpadded,
)

from sharded_ops import Split, matmul


def _assert_like_dense(got, x, w, ct, n):
    """Within the roundings of sums of products, which are bounded by the same program on absolute values."""
    out, grads = dense_vjp(jnp.matmul, [x, w], ct=ct)
    x_size, w_size, ct_size = (np.abs(array).astype(np.float32) for array in (x, w, ct))
    out_bound, grad_bounds = dense_vjp(jnp.matmul, [x_size, w_size], ct=ct_size)
    # float32: each sum of up to 10 terms, on each side. Half: accumulated in float32 and rounded once on each side, and
    # then n rounded parts are added where a gradient is reduced over the IPUs.
    roundings = 20 if x.dtype == np.float32 else 2 + n
    for one_got, want, bound in zip(got, (out, *grads), (out_bound, *grad_bounds), strict=True):
        assert_close(one_got, want, bound, roundings)


@every_case
@examples
@given(seed=seeds)
def test_columns(mode, n, size, dtype, seed):
    split = Split(size, n)
    x, w, ct = normal(seed, (2, 3, 8), dtype), normal(seed + 1, (8, size), dtype), normal(seed + 2, (2, 3, size), dtype)

    out, (dx, dw) = sharded_vjp(
        matmul,
        mode,
        n,
        [x, padded(split, w, 1)],
        in_specs=(P(), split.spec(1, 2, "ipu")),
        out_spec=split.spec(2, 3, "ipu"),
        ct=padded(split, ct, 2, fill=1e9),
        split="columns",
        size=size,
    )

    _assert_like_dense((unpadded(split, out, 2), dx, unpadded(split, dw, 1)), x, w, ct, n)


@every_case
@examples
@given(seed=seeds)
def test_rows(mode, n, size, dtype, seed):
    split = Split(size, n)
    x, w, ct = normal(seed, (6, size), dtype), normal(seed + 1, (size, 4), dtype), normal(seed + 2, (6, 4), dtype)

    out, (dx, dw) = sharded_vjp(
        matmul,
        mode,
        n,
        [padded(split, x, 1), padded(split, w, 0)],
        in_specs=(split.spec(1, 2, "ipu"), split.spec(0, 2, "ipu")),
        ct=ct,
        split="rows",
        size=size,
    )

    _assert_like_dense((out, unpadded(split, dx, 1), unpadded(split, dw, 0)), x, w, ct, n)


@pytest.mark.parametrize("typed", [True, False])
def test_a_sharded_mlp_of_columns_and_rows_padded_with_zeros(typed):
    split = Split(7, 3)
    x_ND, w_DV, w_VK = normal(0, (5, 4)), normal(1, (4, 7)), normal(2, (7, 6))

    def mlp(x_ND, w_DV, w_VK):
        return matmul(jnp.tanh(matmul(x_ND, w_DV, split="columns")), w_VK, split="rows")

    specs = (P(), split.spec(1, 2, "ipu"), split.spec(0, 2, "ipu"))
    sharded = on_ipus(mlp, 3, specs, P(), typed)
    got = jax.vjp(lambda x, w, v: sharded(x, split.pad(w, 1), split.pad(v, 0)), x_ND, w_DV, w_VK)
    want = jax.vjp(lambda x, w, v: jnp.tanh(x @ w) @ v, x_ND, w_DV, w_VK)

    ct = normal(3, (5, 6))
    for one_got, one_want in zip((got[0], *got[1](ct)), (want[0], *want[1](ct)), strict=True):
        # Each entry is a sum of at most 30 products of about 10 or less.
        assert_close(one_got, one_want, 10.0, roundings=30)


def test_a_vector_is_multiplied_too():
    x, w = normal(0, (4,)), normal(1, (4, 6))
    out = on_ipus(matmul, 2, (P(), P(None, "ipu")), P("ipu"))(x, w)
    assert_close(out, x @ w, jnp.abs(x) @ jnp.abs(w), roundings=8)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float16, jnp.bfloat16)])
def test_unlike_dtypes_promote_and_each_gradient_keeps_its_own(x_dtype, w_dtype):
    x, w = normal(0, (3, 4), x_dtype), normal(1, (4, 6), w_dtype)
    sharded = on_ipus(matmul, 2, (P(), P(None, "ipu")), P(None, "ipu"))
    out, vjp = jax.vjp(sharded, x, w)
    dx, dw = vjp(jnp.ones_like(out))
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.promote_types(x_dtype, w_dtype), x_dtype, w_dtype)
    assert_close(out, x @ w, jnp.abs(x.astype(out.dtype)) @ jnp.abs(w.astype(out.dtype)), roundings=8)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parts_of_a_half_row_sum_cross_as_float32_and_are_rounded_once(dtype):
    # 1 + 7 parts of an eighth of the dtype's eps each: rounded before the sum, they would vanish against 1.
    eps = float(jnp.finfo(dtype).eps)
    x, w = jnp.ones((1, 8), dtype), jnp.full((8, 1), eps / 4, dtype).at[0].set(1)
    rows = functools.partial(matmul, split="rows")
    sharded = on_ipus(rows, 8, (P(None, "ipu"), P("ipu")), P())
    assert float(sharded(x, w)[0, 0]) == 1 + 2 * eps
    assert collectives(sharded, x, w) == [("all-reduce", 4)]


@pytest.mark.parametrize("split", ["columns", "rows"])
def test_matmuls_take_half_operands_and_accumulate_in_float32(split):
    specs = (P(), P(None, "ipu")) if split == "columns" else (P(None, "ipu"), P("ipu"))
    out_specs = P(None, "ipu") if split == "columns" else P()
    op = functools.partial(matmul, split=split)
    sharded = on_ipus(op, 2, specs, out_specs)
    x, w, ct = (jnp.ones(shape, jnp.bfloat16) for shape in ((3, 4), (4, 6), (3, 6)))

    def forward_and_backward(x, w, ct):
        out, vjp = jax.vjp(sharded, x, w)
        return out, vjp(ct)

    lowered = jax.jit(forward_and_backward).lower(x, w, ct).as_text()
    product = r"stablehlo.dot_general.*: \(tensor<\w+x(\w+)>, tensor<\w+x(\w+)>\) -> tensor<\w+x(\w+)>"
    products = re.findall(product, lowered)
    assert products == [("bf16", "bf16", "f32")] * 3


@pytest.mark.parametrize("typed", [True, False])
def test_each_split_sends_what_it_says(typed):
    x, w = jnp.ones((3, 4)), jnp.ones((4, 6))

    def sent(split, in_specs, out_spec):
        op = functools.partial(matmul, split=split)
        sharded = on_ipus(op, 2, in_specs, out_spec, typed)

        def backward(x, w, ct):
            return jax.vjp(sharded, x, w)[1](ct)

        return collectives(sharded, x, w), collectives(backward, x, w, jnp.ones((3, 6)))

    # dx is (3, 4) float32, the row-split result (3, 6)
    assert sent("columns", (P(), P(None, "ipu")), P(None, "ipu")) == ([], [("all-reduce", 48)])
    row_backward = [] if typed else [("all-reduce", 72)]
    assert sent("rows", (P(None, "ipu"), P("ipu")), P()) == ([("all-reduce", 72)], row_backward)


@pytest.mark.parametrize(
    ("kwargs", "x_shape", "w_shape", "message"),
    [
        (
            {"split": "cols"},
            (3, 4),
            (4, 6),
            "split='cols' is no way to split a weight: use 'columns' or 'rows'",
        ),
        (
            {},
            (3, 5),
            (4, 6),
            "x of shape (3, 5) and w of shape (4, 3) on each IPU: the last dim of x and dim 0 of w must agree, so "
            "shard dim 0 of w exactly if the last dim of x is sharded (split='rows')",
        ),
        (
            {},
            (),
            (4, 6),
            "x of shape () and w of shape (4, 3): x must have at least 1 dim, and w 2: reshape them to (.., D) "
            "and (D, V)",
        ),
        (
            {"size": 7},
            (3, 4),
            (4, 6),
            "w has shape (4, 3) on each IPU, with 3 rows in dim 1, but size=7 over the 2 IPUs of axis 'ipu' takes 4: "
            "pad the whole array with Split(size=7, parts=2).pad(array, 1) and shard it with "
            "in_specs=Split(size=7, parts=2).spec(1, 2, 'ipu')",
        ),
    ],
)
def test_a_wrong_call_is_refused_when_traced(kwargs, x_shape, w_shape, message):
    op = functools.partial(matmul, **kwargs)
    sharded = on_ipus(op, 2, (P(), P(None, "ipu")), P(None, "ipu"))
    with pytest.raises(ValueError, match=exactly(message)):
        sharded(jnp.ones(x_shape), jnp.ones(w_shape))


def test_integers_are_refused():
    sharded = on_ipus(matmul, 2, (P(), P(None, "ipu")), P(None, "ipu"))
    message = "x has dtype int32, but matmul takes floating operands: convert it first"
    with pytest.raises(ValueError, match=exactly(message)):
        sharded(np.ones((3, 4), np.int32), jnp.ones((4, 6)))

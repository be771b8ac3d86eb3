"""Test the split matmul and the tied projection: dtypes and roundings, transforms, what is made; see also test_ops."""

import functools
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, from_all, matmul, scatter_tokens, tied_projection
from support.harness import assert_close, collectives, normal, on_ipus


def _with_bias(x, w, bias, **kwargs):
    return matmul(x, w, bias=bias, **kwargs)


@pytest.mark.fast("62-float32", "61-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [62, 61])
def test_the_tied_table_is_contracted_where_it_lies(size, dtype):
    split = Split(size, 2)
    sharded = on_ipus(functools.partial(tied_projection, size=size), 2, (P(), P("ipu")), P(None, "ipu"))
    hidden, table, ct = (jnp.ones(shape, dtype) for shape in ((5, 24), (split.padded, 24), (5, split.padded)))

    def backward(hidden, table, ct):
        return jax.vjp(sharded, hidden, table)[1](ct)

    def made(fn, *args):
        """Return the instructions that make a value of the size of the shard, transposed or not."""
        flag = "xla_cpu_use_fusion_emitters"  # as users compile, whatever the tests' own flags say
        as_users_do: dict[str, str | bool] = {flag: True} if flag in os.environ["XLA_FLAGS"] else {}
        text = jax.jit(fn).lower(*args).compile(compiler_options=as_users_do).as_text() or ""
        main = text[text.index("ENTRY") :]
        found = re.findall(r"= \w+\[(?:31,24|24,31)\]\S* ([\w-]+)\(", main)
        return sorted(op for op in found if op != "parameter")

    assert made(sharded, hidden, table) == []
    # There is the gradient itself, rounded for half types, and with padding one masked copy.
    fusions = ["fusion"] * ((dtype == jnp.bfloat16) + bool(split.padding))
    assert made(backward, hidden, table, ct) == ["dot", *fusions]
    # Check that the search in the HLO does find copies.
    assert made(lambda table: 2 * table.T, table[:31]) != []


@pytest.mark.slow
@pytest.mark.parametrize("typed", [True, False])
def test_a_sequence_parallel_block_is_itself_under_vmap_scan_and_remat(typed):
    """Test two layers, each scattered in and out, on two examples, against the dense block: 5 tokens on 4 IPUs."""
    split = Split(6, 4)
    x_BND = normal(0, (2, 5, 3))
    layers = (normal(1, (2, 3, 6)), normal(2, (2, 6)), normal(3, (2, 6, 3)), normal(4, (2, 3)))

    def block(x_shard, layer):
        w_DV, b_V, w_VD, b_D = layer
        y_NV = jnp.tanh(matmul(x_shard, w_DV, bias=b_V, tokens=5))
        return matmul(y_NV, w_VD, bias=b_D, split="rows", reduction="scatter"), None

    def program(layers, x_BND):
        def one(x_ND):
            # The block's result is typed as varying, as its input must be in a scan.
            return from_all(lax.scan(jax.checkpoint(block), scatter_tokens(x_ND), layers)[0], 0, size=5)

        return jax.vmap(one)(x_BND)

    def dense(layers, x_BND):
        for w_DV, b_V, w_VD, b_D in zip(*layers, strict=True):
            x_BND = jnp.tanh(x_BND @ w_DV + b_V) @ w_VD + b_D
        return x_BND

    def padded_program(layers, x_BND):
        w_DV, b_V, w_VD, b_D = layers
        return sharded((split.pad(w_DV, 2), split.pad(b_V, 1), split.pad(w_VD, 1), b_D), x_BND)

    specs = (P(None, None, "ipu"), P(None, "ipu"), P(None, "ipu"), P())
    sharded = on_ipus(program, 4, (specs, P()), P(), typed)
    ct = normal(5, (2, 5, 3))
    got_out, got_vjp = jax.vjp(padded_program, layers, x_BND)
    want_out, want_vjp = jax.vjp(dense, layers, x_BND)
    got, want = (got_out, got_vjp(ct)), (want_out, want_vjp(ct))
    for one_got, one_want in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Two layers of sums of at most 10 terms, each of up to about 30.
        assert_close(one_got, one_want, 30.0, roundings=30)


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


@pytest.mark.fast("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parts_of_a_half_row_sum_cross_as_float32_and_are_rounded_once(dtype):
    # One part is 1, and 7 are a quarter of the dtype's eps each: in the dtype itself, a running sum would stay at 1.
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


@pytest.mark.fast("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_half_bias_is_added_in_float32_before_the_one_rounding(dtype):
    # The sum is 1 + eps / 2, a tie that by itself is rounded to 1; with the bias of eps / 2 it is 1 + eps.
    eps = float(jnp.finfo(dtype).eps)
    x, w, bias = jnp.ones((1, 8), dtype), jnp.full((8, 1), eps / 14, dtype).at[0].set(1), jnp.full(1, eps / 2, dtype)
    rows = on_ipus(functools.partial(_with_bias, split="rows"), 8, (P(None, "ipu"), P("ipu"), P()), P())
    assert float((x @ w + bias)[0, 0]) == 1
    assert float(rows(x, w, bias)[0, 0]) == 1 + eps


@pytest.mark.fast("columns-bfloat16", "rows-float16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("split", ["columns", "rows"])
def test_a_float32_bias_is_not_rounded_before_the_sum_is(dtype, split):
    # Adding a little more than eps / 2 rounds 1 up; rounded to the dtype first, it is eps / 2, and 1 stays 1.
    eps = float(jnp.finfo(dtype).eps)
    bias = jnp.full(2, eps / 2 * (1 + eps / 4), jnp.float32)
    if split == "columns":
        x, w, specs = jnp.ones((1, 1), dtype), jnp.ones((1, 2), dtype), (P(), P(None, "ipu"), P("ipu"))
    else:
        x, w, specs = jnp.full((1, 2), 0.5, dtype), jnp.ones((2, 2), dtype), (P(None, "ipu"), P("ipu"), P())
    out_specs = P(None, "ipu") if split == "columns" else P()
    y = on_ipus(functools.partial(_with_bias, split=split), 2, specs, out_specs)(x, w, bias)
    assert y.dtype == dtype
    assert y.tolist() == [[1 + eps] * 2]


def test_a_half_row_sum_is_scattered_as_float32_and_its_cotangent_gathered_as_half():
    op = functools.partial(matmul, split="rows", reduction="scatter")
    sharded = on_ipus(op, 2, (P(None, "ipu"), P("ipu")), P("ipu"))
    x, w, ct = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 4), (4, 6), (4, 6)))

    def forward_and_backward(x, w, ct):
        out, vjp = jax.vjp(sharded, x, w)
        return out, vjp(ct)

    # The CPU compiler widens half types in collectives, so the program before compilation shows what others send.
    lowered = jax.jit(forward_and_backward).lower(x, w, ct).as_text()
    assert re.findall(r"\}\) : \(tensor<4x6x(\w+)>\) -> tensor<2x6x(\w+)>", lowered) == [("f32", "f32")]
    assert re.findall(r"all_gather.*: \(tensor<2x6x(\w+)>\) -> tensor<4x6x(\w+)>", lowered) == [("bf16", "bf16")]

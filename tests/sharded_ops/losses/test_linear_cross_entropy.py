"""Test the fused projection and cross-entropy: its rounding, its cost, and other transforms; see also test_losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax.core.programs.cost import flops_of
from sharded_ops import Split, linear_cross_entropy
from support.harness import assert_close, collectives, dense_vjp, normal, on_ipus, padded, split_vjp
from support.losses import dense_loss

FEATURES = 4
ROWS = P("ipu")

# Rounding


def _both_ways(hidden, table, labels, *, size):
    op = functools.partial(linear_cross_entropy, size=size, reduction="sum", token_chunk=20, column_chunk=8)
    return jnp.stack([op(hidden, table, labels, gradients=gradients) for gradients in ("backward", "forward")])


def _dense_sum(hidden, table, labels):
    return dense_loss(hidden @ table.T, labels, None, reduction="sum")


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-2, 1, 3])
def test_it_rounds_no_more_than_twice_what_the_dense_program_does(scale):
    """The dense program is `hidden @ table.T` and the plain loss in float32, with logits up to 60 and losses up to 100.

    Both are compared with float64, over seeds. For large logits with large losses see test_cross_entropy.
    """
    size, tokens, features = 61, 48, 16
    labels = np.arange(tokens, dtype=np.int32) % (size + 1) - 1
    errors = []
    for seed in range(4):
        hidden, table = normal(seed, (tokens, features)) * np.float32(scale), normal(seed + 9, (size, features))
        float32 = dense_vjp(_dense_sum, [hidden, table], [labels], ct=np.float32(1))
        with jax.enable_x64(True):
            wide = [hidden.astype(np.float64), table.astype(np.float64)]
            float64 = dense_vjp(_dense_sum, wide, [labels], ct=np.float64(1))
        for way in (0, 1):
            ct = np.eye(2, dtype=np.float32)[way]
            loss, grads = split_vjp(
                _both_ways, "untyped-outside", 3, [hidden, table], [labels], dims=[None, 0], ct=ct, size=size
            )
            found, twin, want = ((loss[way], *grads), (float32[0], *float32[1]), (float64[0], *float64[1]))
            of_seed = [
                (
                    np.abs(got - wanted).max(),
                    np.abs(dense - wanted).max(),
                    np.finfo(np.float32).eps * np.abs(wanted).max(),
                )
                for got, dense, wanted in zip(found, twin, want, strict=True)
            ]
            errors.append(of_seed)
    for error, of_dense, rounding in np.max(errors, axis=0):
        assert error <= max(2 * of_dense, rounding)


# Cost


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "smoothing"), [(True, 0.1), (False, 0.0)])
def test_it_sends_one_gather_and_one_reduction_of_dx(typed, smoothing):
    n, tokens, features, floats = 2, 8, 3, 3
    hidden, table, labels = jnp.ones((tokens, features)), jnp.ones((6, features)), jnp.arange(tokens)
    gathered = ("all-gather", n * floats * 4 * tokens)
    reduced = ("all-reduce", 4 * tokens * features)

    def of(gradients, chunk):
        op = functools.partial(linear_cross_entropy, size=6, gradients=gradients, label_smoothing=smoothing)
        op = functools.partial(op, reduction="mean", token_chunk=chunk, column_chunk=2)
        sharded = on_ipus(op, n, (P(), ROWS, P()), P(), typed)
        return sharded, jax.value_and_grad(sharded, (0, 1))

    loss, with_gradients = of("backward", 4)
    assert collectives(loss, hidden, table, labels) == [gathered]
    assert collectives(with_gradients, hidden, table, labels) == [gathered, reduced]
    # The HLO has the loop over chunks of tokens once, and with it the all-gather of a chunk.
    _, with_gradients = of("forward", 4)
    of_chunk = ("all-gather", n * floats * 4 * 4)
    assert collectives(with_gradients, hidden, table, labels) == [of_chunk, reduced]


@pytest.mark.fast("backward-True")
@pytest.mark.parametrize(("gradients", "typed"), [("backward", True), ("forward", False)])
def test_scattered_tokens_send_a_reduce_scatter_and_no_all_reduce(gradients, typed):
    n, tokens, features = 2, 8, 3
    hidden, table, labels = jnp.ones((tokens, features)), jnp.ones((6, features)), jnp.arange(tokens)
    op = functools.partial(
        linear_cross_entropy, size=6, tokens=tokens, gradients=gradients, reduction="mean", token_chunk=tokens
    )
    sharded = on_ipus(op, n, (ROWS, ROWS, P()), P(), typed)
    gathered = [("all-gather", 4 * tokens * features), ("all-gather", n * 3 * 4 * tokens)]
    assert collectives(sharded, hidden, table, labels) == sorted(gathered)
    of_dx = ("reduce-scatter", 4 * tokens * features // n)
    assert collectives(jax.value_and_grad(sharded, (0, 1)), hidden, table, labels) == [*sorted(gathered), of_dx]


def _big(gradients, dtype=jnp.float32, tokens=1024, features=768, size=32000):
    """Return the program of 2 IPUs, and the arguments to compile it for."""
    op = functools.partial(linear_cross_entropy, size=size, reduction="mean", gradients=gradients)
    sharded = on_ipus(op, 2, (P(), ROWS, P()), P())
    shapes = (((tokens, features), dtype), ((size + size % 2, features), dtype), ((tokens,), jnp.int32))
    return sharded, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def _temporaries(program, arguments):
    analysis = jax.jit(program).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "size", "more"), [(1024, 32000, 0), (1024, 31999, 128 * 16000), (4096, 65536, 0)])
def test_it_needs_a_twentieth_of_the_unsharded_programs_temporaries(tokens, size, more):
    """With padding it needs a chunk of logits more, those whose padding is masked."""

    def unsharded(hidden, table, labels):
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ table[:size].T, labels).mean()

    for gradients in ("backward", "forward"):
        sharded, arguments = _big(gradients, tokens=tokens, size=size)
        needed = _temporaries(jax.value_and_grad(sharded, (0, 1)), arguments)
        most = _temporaries(jax.value_and_grad(unsharded, (0, 1)), arguments) / 20 + 4 * more
        assert needed <= most, f"gradients={gradients!r} needs {needed} bytes, {most} are allowed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "size", "chunk"),
    [
        pytest.param(1024, 32000, 128, marks=pytest.mark.slow),  # 2**21 logits of 16000 columns are of 131 tokens
        (2048, 65536, 128),  # of 32768 columns of 64, but a 16th of the tokens are 128
        pytest.param(4096, 65536, 256, marks=pytest.mark.slow),
        pytest.param(8192, 65536, 256, marks=pytest.mark.slow),
    ],
)
def test_a_chunk_has_as_many_tokens_as_it_says(tokens, size, chunk):
    sharded, arguments = _big("forward", tokens=tokens, size=size, features=8)
    of_chunk = ("all-gather", 2 * 3 * 4 * chunk)
    assert of_chunk in collectives(jax.value_and_grad(sharded, (0, 1)), *arguments)


@pytest.mark.parametrize(("gradients", "matmuls"), [("backward", 4), ("forward", 3)])
def test_it_makes_as_many_matmuls_as_it_says(gradients, matmuls):
    # There are so many features that nearly all operations are matmuls.
    tokens, features, size = 256, 8192, 1024
    sharded, arguments = _big(gradients, tokens=tokens, features=features, size=size)
    one = 2 * tokens * features * size // 2
    assert round(flops_of(sharded, *arguments) / one, 1) == 1
    assert round(flops_of(jax.value_and_grad(sharded, (0, 1)), *arguments) / one, 1) == matmuls


# With other transforms


@pytest.mark.slow
def test_it_may_stand_in_other_transforms():
    def both_ways(hidden, table, labels):
        op = functools.partial(linear_cross_entropy, size=5, token_chunk=2, column_chunk=2, reduction="mean")
        return op(hidden, table, labels) + op(hidden, table, labels, gradients="forward")

    def inside(hidden, table, labels):
        return jax.vmap(jax.checkpoint(both_ways), (0, None, 0))(hidden, table, labels)

    def dense(hidden, table, labels):
        one = functools.partial(dense_loss, weights=None, reduction="mean")
        return 2 * jax.vmap(lambda h, y: one(h @ table.T, y))(hidden, labels)

    hidden, table = normal(0, (2, 3, FEATURES)), normal(1, (5, FEATURES))
    labels, ct = np.array([[0, 4, -1], [3, 2, 1]], np.int32), normal(2, (2,))
    loss, (dhidden, dtable) = split_vjp(inside, "untyped-outside", 2, [hidden, table], [labels], dims=[None, 0], ct=ct)
    want, (want_dhidden, want_dtable) = dense_vjp(dense, [hidden, table], [labels], ct=ct)
    assert_close(loss, want, 1 + want, 20)
    assert_close(dhidden, want_dhidden, 4, 20)
    assert_close(dtable, want_dtable, 4, 20)


def test_rows_that_do_not_count_are_read_if_their_log_sum_exp_is_wanted():
    """If it is not, nothing of them is: see test_rules_of_both_losses."""
    hidden = normal(0, (3, FEATURES))
    hidden[1] = np.nan
    table, bias, labels = (
        padded(Split(5, 2), normal(1, (5, FEATURES)), 0),
        np.zeros(6, np.float32),
        np.array([0, -1, 4]),
    )

    def total(hidden, table, bias):
        loss, lse = linear_cross_entropy(hidden, table, labels, size=5, bias=bias, return_log_sum_exp=True)
        return loss.sum() + lse.sum()

    op = on_ipus(total, 2, (P(), ROWS, ROWS), P())
    value, grads = jax.value_and_grad(op, (0, 1, 2))(hidden, table, bias)
    assert np.isnan(value)
    assert np.isnan(grads[2]).any()
    assert not np.isnan(np.asarray(grads[0])[[0, 2]]).any()

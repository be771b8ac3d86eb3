"""Test derivatives of the split cross-entropy, of every order and mode, and combined with other transforms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, log_softmax_cross_entropy
from support.harness import SPLITS, assert_close, dense_vjp, normal, on_ipus, split_vjp
from support.losses import COLUMNS, ROUNDINGS, TOKENS, dense_loss

DERIVED: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "soft_cap": 4.0, "temperature": 1.5}


def _derivatives(loss, args, directions, total=lambda x: x):
    """Return derivatives of the sum of losses: forward mode, reverse mode, and second ones along directions."""

    def inner(grads):
        return sum(total(jnp.vdot(g, d)) for g, d in zip(grads, directions, strict=True))

    scalar = lambda *args: (loss(*args) * (1 + jnp.arange(3))).sum()
    everything = tuple(range(len(args)))
    reverse = jax.grad(scalar, everything)
    along = lambda *args: jax.jvp(scalar, args, directions)[1]
    return (
        reverse(*args),
        (along(*args), jax.jvp(along, args, directions)[1]),
        jax.grad(lambda *args: inner(reverse(*args)), everything)(*args),  # reverse over reverse
        jax.jvp(reverse, args, directions)[1],  # forward over reverse
        jax.grad(along, everything)(*args),  # reverse over forward
    )


def _both_targets(logits, soft, weights, labels, *, op):
    hard, entropy = op(logits, labels, weights=weights, ignore_index=1, return_entropy=True, **DERIVED)
    return hard + entropy + op(logits, soft, weights=weights, **DERIVED)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["untyped-outside", "typed-inside", "typed-outside"])
def test_derivatives_of_every_order_and_mode(mode):
    with jax.enable_x64(True):
        rng, split = np.random.default_rng(0), Split(5, 3)
        labels = np.array([4, 1, 0])
        args = tuple(rng.standard_normal(shape) for shape in ((3, 5), (3, 5), (3,)))
        directions = tuple(rng.standard_normal(arg.shape) for arg in args)
        sharded = functools.partial(
            _both_targets, labels=labels, op=functools.partial(log_softmax_cross_entropy, size=5)
        )

        def pad(arrays):
            return tuple(split.pad(x, 1) if x.ndim == 2 else x for x in arrays)

        specs = (COLUMNS, COLUMNS, P())
        if mode == "typed-inside":

            def each_ipu(args, directions):
                first_is_split = lambda x: lax.psum(x, "ipu") if jax.typeof(x).manual_axis_type.varying else x
                return _derivatives(sharded, args, directions, first_is_split)

            derived = on_ipus(each_ipu, 3, (specs, specs), (specs, (P(), P()), specs, specs, specs))
            got = jax.tree.map(lambda x: split.unpad(x, 1) if x.ndim == 2 else x, derived(pad(args), pad(directions)))
        else:
            loss = on_ipus(sharded, 3, specs, P(), typed=mode == "typed-outside")
            got = jax.jit(lambda *args: _derivatives(lambda *args: loss(*pad(args)), args, directions))(*args)

        def dense(logits, soft, weights):
            hard = dense_loss(logits, labels, weights, weighted=True, ignore_index=1, **DERIVED)
            x = DERIVED["soft_cap"] * jnp.tanh(logits / DERIVED["soft_cap"]) / DERIVED["temperature"]
            entropy = -(jax.nn.softmax(x) * jax.nn.log_softmax(x)).sum(-1)
            return hard + entropy + _dense_soft(logits, soft, weights)

        want = jax.jit(lambda *args: _derivatives(dense, args, directions))(*args)
        # wanted and found are tuples of tuples of the same structure
        for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def _dense_soft(logits, soft, weights):
    """Return the dense loss of soft targets, which need not add up to 1, also under label smoothing."""
    return dense_loss(logits, soft, weights, weighted=True, soft=True, **DERIVED)


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences():
    """Finite differences use no derivative rule, while the twin's derivatives come from jax's rules too."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        labels = np.array([5, 0, 3])
        args = tuple(rng.standard_normal(shape) for shape in ((3, 6), (3, 6), (3,)))
        op = functools.partial(log_softmax_cross_entropy, size=6)
        sharded = on_ipus(
            functools.partial(_both_targets, labels=labels, op=op), 2, (COLUMNS, COLUMNS, P()), P(), typed=False
        )
        gradient = jax.jit(jax.grad(lambda *args: sharded(*args).sum(), (0, 1, 2)))(*args)
        step = 1e-6
        for k, arg in enumerate(args):
            for index in np.ndindex(arg.shape):
                change = np.zeros_like(arg)
                change[index] = step
                ends = [sharded(*args[:k], arg + sign * change, *args[k + 1 :]).sum() for sign in (1, -1)]
                assert abs(gradient[k][index] - (ends[0] - ends[1]) / (2 * step)) < 1e-8


def _scanned(op, logits, soft, labels):
    return lax.scan(lambda carry, xs: (carry, op(*xs)), 0, (logits, soft, labels))[1]


def _vmapped(op, logits, soft, labels):
    return jax.vmap(op)(logits, soft, labels)


def _rematerialised(op, logits, soft, labels):
    return jax.checkpoint(op)(logits, soft, labels)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["typed-outside", "untyped-inside"])
@pytest.mark.parametrize("wrapped", [_vmapped, _scanned, _rematerialised], ids=["vmap", "scan", "remat"])
def test_the_cross_entropy_may_stand_in_other_transforms(wrapped, mode):
    def of_six(logits, soft, labels):
        hard = log_softmax_cross_entropy(logits, labels, size=6, label_smoothing=0.1)
        return hard + log_softmax_cross_entropy(logits, soft, size=6)

    def dense(logits, soft, labels):
        return dense_loss(logits, labels, None, label_smoothing=0.1) + dense_loss(logits, soft, None, soft=True)

    shape = (2, TOKENS, 6)
    logits, soft = normal(0, shape), normal(1, shape)
    labels = np.arange(2 * TOKENS, dtype=np.int32).reshape(2, TOKENS) % 7 - 1
    ct, op = np.ones((2, TOKENS), np.float32), functools.partial(wrapped, of_six)
    loss, grads = split_vjp(op, mode, 2, [logits, soft], [labels], dims=[2, 2], ct=ct)
    want, want_grads = dense_vjp(dense, [logits, soft], [labels], ct=ct)
    assert_close(loss, want, 1 + np.abs(want).max(), ROUNDINGS)
    for got, wanted in zip(grads, want_grads, strict=True):
        assert_close(got, wanted, 1 + np.abs(wanted).max(), ROUNDINGS)


@pytest.mark.fast("2-6")
@pytest.mark.parametrize(("n", "size"), SPLITS[1::2])
def test_columns_made_of_what_all_ipus_hold_have_right_gradients(n, size):
    """A value that is the same on all IPUs gets the sum of the gradients from the columns of each IPU."""
    bias, labels, ct = np.float32(3), np.zeros(2, np.int32), np.ones(2, np.float32)
    options = {"local": Split(size, n).local, "size": size}
    losses, (dbias,) = split_vjp(
        _equal_logits, "typed-outside", n, [np.asarray(bias)], [labels], dims=[None], ct=ct, **options
    )
    np.testing.assert_allclose(losses, np.log(size), rtol=1e-6)
    # Adding the same to all logits changes nothing, so the parts of the gradient add up to zero over the IPUs.
    assert_close(dbias, np.float32(0), 1, ROUNDINGS)


def _equal_logits(bias, labels, *, local, size):
    """Return the loss of logits that are all `bias`, a value that is the same on all IPUs."""
    columns = lax.pcast(jnp.broadcast_to(bias, (2, local)), "ipu", to="varying")
    return log_softmax_cross_entropy(columns, labels, size=size)

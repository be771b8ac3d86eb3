"""Test the losses on a mesh of two axes, with the tokens split over one axis and the columns over the other.

Each group of IPUs along "data" has its own tokens, and so its own sum or mean; a table's gradient is summed over
groups. The dense twin makes the loss of each group by itself, in float64.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, linear_cross_entropy, log_softmax_cross_entropy
from support.harness import dense_vjp, normal, on_ipus, padded, sharded_vjp, unpadded
from support.losses import dense_loss, dense_of_each, of_each

TOKENS, FEATURES, GROUPS, SIZE = 10, 4, 2, 11  # on 2 and on 4 IPUs the last shard of 11 columns has padding
SMOOTHED = {"label_smoothing": 0.2, "z_loss": 0.05}
# `soft` and `weighted` say which operands an entry uses; `gradients` is for the fused loss alone.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"reduction": "none", "weighted": True, "ignore_index": 2},
    {"reduction": "sum", "weighted": True} | SMOOTHED,
    {"reduction": "mean"},
    {"reduction": "mean", "weighted": True, "ignore_index": 2} | SMOOTHED,
    {"reduction": "mean", "weighted": True, "gradients": "backward"},
    {"reduction": "none", "soft": True, "weighted": True},
    {"reduction": "mean", "soft": True, "weighted": True} | SMOOTHED,
)


OF_LINEAR = OPTIONS[:-2]


def _of_logits(logits, soft, weights, labels):
    def loss(target, gradients=None, **options):
        return log_softmax_cross_entropy(logits, target, size=SIZE, **options)

    return of_each(OPTIONS, loss, labels, weights, soft)


def _linear(hidden, table, weights, labels):
    op = functools.partial(linear_cross_entropy, hidden, table, size=SIZE, token_chunk=3, column_chunk=2)
    return of_each(OF_LINEAR, op, labels, weights)


def _dense_of_logits(logits, soft, weights, labels, options=OPTIONS):
    groups = [x.reshape(GROUPS, -1, *x.shape[1:]) for x in (logits, labels, weights, soft)]
    return jnp.concatenate(jax.vmap(functools.partial(dense_of_each, options))(*groups), axis=-1)


def _dense_linear(hidden, table, weights, labels):
    logits = hidden @ table.T
    return _dense_of_logits(logits, logits, weights, labels, OF_LINEAR)


def _cases():
    always = ((True, False, 2), (False, True, 2))
    for typed, inside, ipus in itertools.product((True, False), (False, True), (1, 2, 4)):
        # Half types in one program of each kind; each has the options of all.
        for dtype in (jnp.float32, {1: jnp.bfloat16, 2: None, 4: jnp.float16}[ipus]):
            if dtype is None or (dtype != jnp.float32 and typed == inside):
                continue
            marks = () if (typed, inside, ipus) in always else pytest.mark.slow
            mode = f"{'typed' if typed else 'untyped'}-{'inside' if inside else 'outside'}"
            name = f"{mode}-{ipus}-{jnp.dtype(dtype).name}"
            yield pytest.param(mode, ipus, dtype, id=name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "linear"])
@pytest.mark.parametrize(("mode", "ipus", "dtype"), list(_cases()))
def test_values_and_gradients_are_those_of_each_group(fused, mode, ipus, dtype):
    # Some labels of group 0 don't count, so the groups differ in counts and weights.
    labels = np.arange(TOKENS, dtype=np.int32) * 3 % SIZE
    labels[[1, 3]] = [-1, 2]
    weights, split = np.linspace(0.2, 2, TOKENS, dtype=np.float32), Split(SIZE, ipus)
    if fused:
        op, dense, dims = _linear, _dense_linear, (None, 0, None)
        floats = [normal(0, (TOKENS, FEATURES), dtype), normal(1, (SIZE, FEATURES), dtype), weights]
        specs = (P("data"), P("ipu"), P("data"))
    else:
        op, dense, dims = _of_logits, _dense_of_logits, (1, 1, None)
        soft = (normal(3, (TOKENS, SIZE)) * 0.3 + 0.2).astype(dtype)
        floats, specs = [normal(2, (TOKENS, SIZE), dtype), soft, weights], (P("data", "ipu"),) * 2 + (P("data"),)
    ct = normal(4, (len(OF_LINEAR if fused else OPTIONS), TOKENS))
    shards = [x if dim is None else padded(split, x, dim) for x, dim in zip(floats, dims, strict=True)]
    of_mesh: dict[str, Any] = {"int_spec": P("data"), "out_spec": P(None, "data"), "replicas": GROUPS}
    found, gradients = sharded_vjp(op, mode, ipus, shards, [labels], in_specs=specs, ct=ct, **of_mesh)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in floats]
        want, want_gradients = dense_vjp(dense, wide, [labels], ct=ct.astype(np.float64))

    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    # In half types, dlogits, products and their sum are each rounded, for each of the entries.
    allowed = 5e-6 if dtype == jnp.float32 else 4 * float(jnp.finfo(dtype).eps)
    for k, (got, wanted, dim) in enumerate(zip(gradients, want_gradients, dims, strict=True)):
        assert got.dtype == floats[k].dtype
        got = got if dim is None else unpadded(split, got, dim)
        error = np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max()
        assert error <= (5e-6 if k == 2 else allowed), f"operand {k}: {error}"


# Operands that vary over fewer axes than the others


@pytest.mark.parametrize("spec", [P(), P(None, "ipu"), P("data")], ids=str)
def test_soft_targets_may_vary_over_fewer_axes_than_the_logits(spec):
    """Devices that have the same target by its spec all use it, and it gets the sum of their gradients."""
    logits = normal(0, (4, 6))
    rows, columns = 2 if "data" not in spec else 4, 6 if "ipu" in spec else 3
    soft, ct = np.abs(normal(1, (rows, columns))), np.arange(1, 5, dtype=np.float32)
    op = functools.partial(log_softmax_cross_entropy, size=6, label_smoothing=0.1)

    def dense(logits, soft):
        whole = jnp.tile(soft, (4 // rows, 6 // columns))
        return dense_loss(logits, whole, None, soft=True, label_smoothing=0.1)

    with jax.enable_x64(True):
        wide = [logits.astype(np.float64), soft.astype(np.float64)]
        want = jax.tree.leaves(dense_vjp(dense, wide, ct=ct.astype(np.float64)))
    got, vjp = jax.vjp(on_ipus(op, 2, (P("data", "ipu"), spec), P("data"), replicas=2), logits, soft)
    for found, wanted in zip((got, *vjp(ct)), want, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["forward", "backward"])
@pytest.mark.parametrize("name", ["hidden", "labels", "weights"])
def test_one_operand_alone_may_vary_over_the_data_axis(name, gradients):
    """The other operands are the same for both groups, and get the sum of the groups' gradients."""
    operands = {
        "hidden": normal(0, (4, 3)),
        "labels": np.array([0, 5, 3, 1], np.int32),
        "weights": np.arange(1, 5, dtype=np.float32),
    }
    table = normal(1, (6, 3))
    shared = {k: x if k == name else x[:2] for k, x in operands.items()}
    specs = {k: P("data") if k == name else P() for k in operands}

    def each_device(operands, table):
        op = functools.partial(linear_cross_entropy, size=6, reduction="mean", gradients=gradients)
        return op(operands["hidden"], table, operands["labels"], weights=operands["weights"])[None]

    sharded = on_ipus(each_device, 2, (specs, P("ipu")), P("data"), replicas=2)

    def total(losses):
        return losses[0] - 3 * losses[1]

    def dense(floats, table):
        whole = {k: x if k == name else jnp.concatenate([x, x]) for k, x in (shared | floats).items()}
        groups = {k: x.reshape(2, 2, *x.shape[1:]) for k, x in whole.items()}
        mean = functools.partial(dense_loss, weighted=True, reduction="mean")
        return total(jax.vmap(mean)(groups["hidden"] @ table.T, groups["labels"], groups["weights"]))

    floats = {k: shared[k] for k in ("hidden", "weights")}
    got = jax.jit(jax.value_and_grad(lambda f, t: total(sharded(shared | f, t)), (0, 1)))(floats, table)
    want = jax.jit(jax.value_and_grad(dense, (0, 1)))(floats, table)
    for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ipus", [1, 2, 4])
def test_every_label_of_an_uneven_vocabulary_has_its_own_columns_loss(ipus):
    """11 columns: 6 and 5, or 3, 3, 3 and 2; labels from 2 below to 3 beyond, across every boundary and the padding."""
    size = 11
    labels = np.arange(-2, size + 3, dtype=np.int32)
    hidden, table = normal(0, (len(labels), 3)), normal(1, (size, 3))
    logits, split = hidden @ table.T, Split(size, ipus)

    def each_ipu(logits, hidden, table):
        apart = log_softmax_cross_entropy(logits, labels, size=size)
        fused = linear_cross_entropy(hidden, table, labels, size=size, token_chunk=4, column_chunk=2)
        return jnp.stack([apart, fused, log_softmax_cross_entropy(logits, labels, size=size, out_of_range="clip")])

    sharded = on_ipus(each_ipu, ipus, (P(None, "ipu"), P(), P("ipu")), P())
    apart, fused, clipped = sharded(padded(split, logits, 1), hidden, padded(split, table, 0))
    wide = logits.astype(np.float64)
    log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    nearest = [-log_p[i, min(max(label, 0), size - 1)] for i, label in enumerate(labels)]
    want = np.where((labels >= 0) & (labels < size), nearest, 0)
    np.testing.assert_allclose(apart, want, rtol=1e-5)
    np.testing.assert_allclose(fused, want, rtol=1e-5)
    np.testing.assert_allclose(clipped, nearest, rtol=1e-5)

"""Test the losses on a mesh of two axes, with the tokens split over one axis and the columns over the other.

Each group of IPUs along "data" has its own tokens, and so its own sum or mean; a table's gradient is summed over
groups. The expected results are formulas in NumPy's float64, with derivatives worked out by hand.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sharded_ops import Split, linear_cross_entropy, log_softmax_cross_entropy
from support.harness import exactly, normal, padded, unpadded

TOKENS, FEATURES, GROUPS = 10, 4, 2
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
# The factors of each entry's result in the total that is differentiated, and of each group's, or token's.
OF_ENTRY = np.array([0.7, -0.4, 1.3, 0.9, -1.1, 0.6, 1.7])


def _entries(fused):
    return [k for k, options in enumerate(OPTIONS) if not (fused and options.get("soft"))]


def _operands(dtype, size):
    """Return global arrays. Some labels of group 0 don't count, so the groups differ in counts and weights."""
    labels = np.arange(TOKENS, dtype=np.int32) * 3 % size
    labels[[1, 3]] = [-1, 2]
    return {
        "hidden": normal(0, (TOKENS, FEATURES), dtype),
        "table": normal(1, (size, FEATURES), dtype),
        "logits": normal(2, (TOKENS, size), dtype),
        "soft": (normal(3, (TOKENS, size)) * 0.3 + 0.2).astype(dtype),
        "weights": np.linspace(0.2, 2, TOKENS, dtype=np.float32),
        "labels": labels,
        "of_token": normal(4, (TOKENS,)),
    }


def _by_hand(operands, size, fused):
    """Return each entry's result for each group, (groups, entries), and the gradients of the total."""
    wide = {name: x if x.dtype == np.int32 else x.astype(np.float64) for name, x in operands.items()}
    x = wide["hidden"] @ wide["table"].T if fused else wide["logits"]
    top = x.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(x - top).sum(-1, keepdims=True)))[:, 0]
    p = np.exp(x - lse[:, None])
    labels, group = wide["labels"], np.arange(TOKENS) // (TOKENS // GROUPS)
    results = []
    dx, dsoft, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros(TOKENS)
    for k in _entries(fused):
        options = OPTIONS[k]
        s, z, soft = options.get("label_smoothing", 0), options.get("z_loss", 0), options.get("soft")
        counts = np.ones(TOKENS, bool) if soft else (labels >= 0) & (labels != options.get("ignore_index", -1))
        own = wide["soft"] if soft else np.arange(size) == labels[:, None]
        u = (1 - s) * own + s / size
        loss = np.where(counts, (u * (lse[:, None] - x)).sum(-1) + z * lse**2, 0)
        w = np.where(counts, wide["weights"] if options.get("weighted") else 1.0, 0)
        count = np.array([w[group == g].sum() for g in range(GROUPS)])[group]
        mean = np.array([(w * loss)[group == g].sum() for g in range(GROUPS)])[group] / count
        if options["reduction"] == "none":
            factor = wide["of_token"] * w
            of_weight = wide["of_token"] * loss
        elif options["reduction"] == "sum":
            factor, of_weight = w * (1 + group), loss * (1 + group)
        else:
            factor, of_weight = w / count * (1 + group), np.where(counts, loss - mean, 0) / count * (1 + group)
        results.append([(factor * loss)[group == g].sum() for g in range(GROUPS)])
        factor = np.where(counts, factor, 0) * OF_ENTRY[k]
        dx += factor[:, None] * (p * u.sum(-1, keepdims=True) + 2 * z * (lse[:, None] * p) - u)
        if soft:
            dsoft += factor[:, None] * (1 - s) * (lse[:, None] - x)
        if options.get("weighted"):
            dweights += of_weight * OF_ENTRY[k]
    gradients = {"weights": dweights}
    if fused:
        gradients |= {"hidden": dx @ wide["table"], "table": dx.T @ wide["hidden"]}
    else:
        gradients |= {"logits": dx, "soft": dsoft}
    return np.array(results).T, gradients


def _results(operands, size, fused):
    """Return one number for each entry, (1, entries), from this device."""
    results = []
    for k in _entries(fused):
        options = dict(OPTIONS[k])
        weights = operands["weights"] if options.pop("weighted", False) else None
        gradients = options.pop("gradients", None)
        target = operands["soft" if options.pop("soft", False) else "labels"]
        if fused:
            op = functools.partial(linear_cross_entropy, operands["hidden"], operands["table"], gradients=gradients)
            op = functools.partial(op, token_chunk=3, column_chunk=2)
        else:
            op = functools.partial(log_softmax_cross_entropy, operands["logits"])
        loss = op(target, size=size, weights=weights, **options)
        of_group = operands["of_token"] if options["reduction"] == "none" else 1 + lax.axis_index("data")
        results.append((loss * of_group).sum())
    return jnp.stack(results)[None]


SPECS = {
    "hidden": P("data"),
    "table": P("ipu"),
    "logits": P("data", "ipu"),
    "soft": P("data", "ipu"),
    "weights": P("data"),
    "labels": P("data"),
    "of_token": P("data"),
}
SPLIT_DIMS = {"table": 0, "logits": 1, "soft": 1}


def _program(fused, typed, inside, ipus, size):
    mesh = jax.make_mesh(
        (GROUPS, ipus), ("data", "ipu"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: GROUPS * ipus]
    )
    differentiated = ("hidden", "table", "weights") if fused else ("logits", "soft", "weights")
    of_entry = OF_ENTRY[_entries(fused)].astype(np.float32)
    results = functools.partial(_results, size=size, fused=fused)
    floats = {name: SPECS[name] for name in differentiated}

    def outside(operands):
        sharded = jax.shard_map(results, mesh=mesh, in_specs=(SPECS,), out_specs=P("data"), check_vma=typed)

        def total(floats):
            found = sharded(operands | floats)
            return (found * of_entry).sum(), found

        return jax.grad(total, has_aux=True)({name: operands[name] for name in differentiated})

    def each_device(operands):
        def total(floats):
            found = results(operands | floats)
            return (found * of_entry).sum() / (1 if typed else ipus), found

        gradients, found = jax.grad(total, has_aux=True)({name: operands[name] for name in differentiated})
        if not typed:
            # Each device holds its part of the gradient of an array that other devices hold too.
            missing = {"hidden": "ipu", "table": "data", "weights": "ipu"}
            gradients = {k: lax.psum(g, missing[k]) if k in missing else g for k, g in gradients.items()}
        return gradients, found

    if not inside:
        return jax.jit(outside)
    return jax.jit(
        jax.shard_map(each_device, mesh=mesh, in_specs=(SPECS,), out_specs=(floats, P("data")), check_vma=typed)
    )


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
            yield pytest.param(typed, inside, ipus, dtype, id=name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["logits", "linear"])
@pytest.mark.parametrize(("typed", "inside", "ipus", "dtype"), list(_cases()))
def test_values_and_gradients_are_those_worked_out_by_hand(fused, typed, inside, ipus, dtype):
    size = 11  # on 2 and on 4 IPUs the last shard has padding
    operands, split = _operands(dtype, size), Split(size, ipus)
    shards = {k: padded(split, x, SPLIT_DIMS[k]) if k in SPLIT_DIMS else x for k, x in operands.items()}
    gradients, found = _program(fused, typed, inside, ipus, size)(shards)
    want, want_gradients = _by_hand(operands, size, fused)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    assert set(gradients) == set(want_gradients)
    # In half types, dlogits, products and their sum are each rounded, for each of the entries.
    allowed = 5e-6 if dtype == jnp.float32 else 4 * float(jnp.finfo(dtype).eps)
    for name, wanted in want_gradients.items():
        assert gradients[name].dtype == operands[name].dtype
        got = np.asarray(gradients[name])
        got = unpadded(split, got, SPLIT_DIMS[name]) if name in SPLIT_DIMS else got
        error = np.abs(got.astype(np.float64) - wanted).max() / np.abs(wanted).max()
        assert error <= (5e-6 if name == "weights" else allowed), f"{name}: {error}"


# Operands that vary over fewer axes than the others


def _over_data(op, in_specs):
    mesh = jax.make_mesh((2, 2), ("data", "ipu"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    return jax.jit(jax.shard_map(op, mesh=mesh, in_specs=in_specs, out_specs=P("data")))


@pytest.mark.parametrize("spec", [P(), P(None, "ipu"), P("data")], ids=str)
def test_soft_targets_may_vary_over_fewer_axes_than_the_logits(spec):
    """Devices that have the same target by its spec all use it, and it gets the sum of their gradients."""
    logits = normal(0, (4, 6))
    rows, columns = 2 if "data" not in spec else 4, 6 if "ipu" in spec else 3
    soft = np.abs(normal(1, (rows, columns)))
    op = functools.partial(log_softmax_cross_entropy, size=6, label_smoothing=0.1)
    sharded = _over_data(op, (P("data", "ipu"), spec))
    loss, vjp = jax.vjp(sharded, logits, soft)
    dlogits, dsoft = jax.jit(vjp)(jnp.arange(1.0, 5))

    whole = np.tile(soft, (4 // rows, 6 // columns)).astype(np.float64)
    top = logits.max(-1, keepdims=True).astype(np.float64)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    u = 0.9 * whole + 0.1 / 6
    np.testing.assert_allclose(loss, (u * (lse - logits)).sum(-1), rtol=1e-5)
    ct = np.arange(1.0, 5)[:, None]
    want = ct * (np.exp(logits - lse) * u.sum(-1, keepdims=True) - u)
    np.testing.assert_allclose(dlogits, want, rtol=1e-5, atol=1e-5)
    want = (ct * 0.9 * (lse - logits)).reshape(4 // rows, rows, 6 // columns, columns).sum((0, 2))
    np.testing.assert_allclose(dsoft, want, rtol=1e-5, atol=1e-5)


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

    sharded = _over_data(each_device, (specs, P("ipu")))

    def total(losses):
        return losses[0] - 3 * losses[1]

    def dense(floats, table):
        whole = {k: x if k == name else jnp.concatenate([x, x]) for k, x in (shared | floats).items()}
        log_p = jax.nn.log_softmax(whole["hidden"] @ table.T)
        loss = -jnp.take_along_axis(log_p, whole["labels"][:, None], 1)[:, 0].reshape(2, 2)
        weights = whole["weights"].reshape(2, 2)
        return total((loss * weights).sum(1) / weights.sum(1))

    floats = {k: shared[k] for k in ("hidden", "weights")}
    got = jax.jit(jax.value_and_grad(lambda f, t: total(sharded(shared | f, t)), (0, 1)))(floats, table)
    want = jax.jit(jax.value_and_grad(dense, (0, 1)))(floats, table)
    for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


# Errors by the operands' types


def _refused(op, in_specs, message, *args):
    with pytest.raises(ValueError, match=exactly(message)):
        _over_data(op, in_specs)(*args)


def test_whole_logits_are_not_taken_for_columns():
    op = functools.partial(log_softmax_cross_entropy, size=12)
    message = (
        "logits_shard of shape (2, 6) is the same on all 2 IPUs of axis 'ipu', but must be split over them: shard the "
        "whole array with in_specs that name 'ipu', or lax.pcast(logits_shard, 'ipu', to='varying') if the shards are "
        "alike"
    )
    _refused(op, (P("data"), P("data")), message, np.ones((4, 6), np.float32), np.zeros(4, np.int32))


def test_a_whole_table_is_not_taken_for_its_rows():
    op = functools.partial(linear_cross_entropy, size=12)
    message = (
        "table of shape (6, 3) is the same on all 2 IPUs of axis 'ipu', but must be split over them: shard the whole "
        "array with in_specs that name 'ipu', or lax.pcast(table, 'ipu', to='varying') if the shards are alike"
    )
    operands = np.ones((4, 3), np.float32), np.ones((6, 3), np.float32), np.zeros(4, np.int32)
    _refused(op, (P("data"), P(), P("data")), message, *operands)


def test_hidden_is_not_split_over_the_table_s_axis():
    op = functools.partial(linear_cross_entropy, size=6)
    message = (
        "hidden varies over axis 'ipu', but must be the same on all its IPUs: bring it in with in_specs that don't "
        "name 'ipu', or use to_all or from_all on it first"
    )
    operands = np.ones((4, 3), np.float32), np.ones((6, 3), np.float32), np.zeros(2, np.int32)
    _refused(op, (P("ipu"), P("ipu"), P()), message, *operands)


# Labels


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

    mesh = jax.make_mesh((ipus,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ipus])
    sharded = jax.shard_map(each_ipu, mesh=mesh, in_specs=(P(None, "ipu"), P(), P("ipu")), out_specs=P())
    apart, fused, clipped = jax.jit(sharded)(padded(split, logits, 1), hidden, padded(split, table, 0))
    wide = logits.astype(np.float64)
    log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    nearest = [-log_p[i, min(max(label, 0), size - 1)] for i, label in enumerate(labels)]
    want = np.where((labels >= 0) & (labels < size), nearest, 0)
    np.testing.assert_allclose(apart, want, rtol=1e-5)
    np.testing.assert_allclose(fused, want, rtol=1e-5)
    np.testing.assert_allclose(clipped, nearest, rtol=1e-5)

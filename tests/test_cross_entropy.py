"""The split cross-entropy with every option against a dense twin: loss, derivatives, rounding, and what is sent."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_collectives import (
    MODES,
    SPLITS,
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

from sharded_ops import Split, embedding, log_softmax, log_softmax_cross_entropy, matmul, take_last

TOKENS = 6
COLUMNS = P(None, "ipu")

# exp and log are good to a few ulps each, and a denominator is a sum of at most 10 terms.
ROUNDINGS = 20

WEIGHTED = {"ignore_index": 2, "weighted": True, "reduction": "mean"}
# What is asked of one compiled program. `soft` and `weighted` say which operands an entry uses.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"label_smoothing": 0.1, "z_loss": 0.01} | WEIGHTED,
    {"soft_cap": 3.0, "temperature": 0.7, "out_of_range": "clip", "weighted": True},
    {"label_smoothing": 1.0, "soft_cap": 5.0, "reduction": "sum", "ignore_index": -100},
    {"label_smoothing": 0.3, "z_loss": 0.1, "soft_cap": 4.0, "temperature": 2.0, "out_of_range": "clip"} | WEIGHTED,
    {"soft": True, "label_smoothing": 0.2, "z_loss": 0.05, "soft_cap": 6.0, "weighted": True, "reduction": "mean"},
)


def dense_loss(
    logits: Any,
    target: Any,
    weights: Any,
    *,
    label_smoothing: Any = 0.0,
    z_loss: Any = 0.0,
    soft_cap: Any = None,
    temperature: Any = 1.0,
    ignore_index: Any = None,
    out_of_range: Any = "ignore",
    reduction: Any = "none",
    weighted: Any = False,
    soft: Any = False,
) -> Any:
    """The loss by torch's formulas, on whole rows of logits: the likelihood of the target, and that of all columns."""
    x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    x = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
    x = x / temperature
    size = x.shape[-1]
    log_p = jax.nn.log_softmax(x)
    if soft:
        counts = jnp.ones(x.shape[:-1], bool)
        nll = -(target.astype(x.dtype) * log_p).sum(-1)
        spread = -log_p.sum(-1) / size
    else:
        counts = jnp.ones(target.shape, bool) if ignore_index is None else target != ignore_index
        if out_of_range == "ignore":
            counts = counts & (target >= 0) & (target < size)
        nll = -jnp.take_along_axis(log_p, jnp.clip(target, 0, size - 1)[..., None], axis=-1)[..., 0]
        spread = -log_p.mean(-1)
    loss = (1 - label_smoothing) * nll + z_loss * jax.nn.logsumexp(x, -1) ** 2
    if label_smoothing:  # 0 times inf would be NaN
        loss += label_smoothing * spread
    factor = weights.astype(x.dtype) if weighted else jnp.ones(loss.shape, x.dtype)
    loss = jnp.where(counts, loss, 0) * factor
    if reduction == "none":
        return loss
    count = jnp.where(counts, factor, 0).sum()
    return loss.sum() if reduction == "sum" else loss.sum() / jnp.where(count == 0, 1, count)


def _options_of_one_program(logits, soft, weights, labels, *, size):
    """(options, N..): the loss of each entry, and for two of them the log-sum-exp as well."""
    rows = []
    for options in OPTIONS:
        options = dict(options)
        target = soft if options.pop("soft", False) else labels
        options["weights"] = weights if options.pop("weighted", False) else None
        loss, lse = log_softmax_cross_entropy(logits, target, size=size, return_log_sum_exp=True, **options)
        rows += [loss, lse]
    return jnp.stack([jnp.broadcast_to(row, labels.shape) for row in rows])


def _dense_options(logits, soft, weights, labels):
    rows = []
    for options in OPTIONS:
        x = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        if "soft_cap" in options:
            x = options["soft_cap"] * jnp.tanh(x / options["soft_cap"])
        lse = jax.nn.logsumexp(x / options.get("temperature", 1.0), -1)
        rows += [dense_loss(logits, soft if options.get("soft") else labels, weights, **options), lse]
    return jnp.stack([jnp.broadcast_to(row, labels.shape) for row in rows])


def _labels(data, shape, size) -> np.ndarray:
    each = st.one_of(st.integers(0, size - 1), st.sampled_from((-1, -100, -(2**31), size, size + 1, 2**31 - 1)))
    count = int(np.prod(shape))
    return np.array(data.draw(st.lists(each, min_size=count, max_size=count)), np.int32).reshape(shape)


@pytest.mark.parametrize(
    ("mode", "n", "size", "dtype", "shape"),
    [
        ("typed-outside", 3, 7, jnp.float32, (2, 3)),
        ("typed-inside", 2, 6, jnp.bfloat16, (5,)),
        ("untyped-outside", 4, 10, jnp.float16, (2, 1, 2)),
        ("untyped-inside", 8, 5, jnp.float32, ()),
    ],
)
@examples
@given(seed=seeds, scale=st.sampled_from((0.1, 3)), data=st.data())
def test_every_option(mode, n, size, dtype, shape, seed, scale, data):
    split, lead = Split(size, n), len(shape)
    logits = (normal(seed, (*shape, size)) * scale).astype(dtype)
    # Soft targets need not add up to 1; some are negative, some 0.
    soft = np.round(normal(seed + 1, (*shape, size)) + 0.5, 1).astype(dtype)
    weights, labels = np.abs(normal(seed + 2, shape)).astype(np.float32), _labels(data, shape, size)
    columns = P(*(None,) * lead, "ipu")
    row = data.draw(st.integers(0, 2 * len(OPTIONS) - 1))
    ct = np.zeros((2 * len(OPTIONS), *shape), np.float32)
    ct[row] = normal(seed + 3, shape)

    loss, (dlogits, dsoft, dweights) = sharded_vjp(
        _options_of_one_program,
        mode,
        n,
        [padded(split, logits, lead), padded(split, soft, lead), weights],
        [labels],
        in_specs=(columns, columns, P()),
        ct=ct,
        size=size,
    )
    want, (want_dlogits, want_dsoft, want_dweights) = dense_vjp(
        _dense_options, [logits, soft, weights], [labels], ct=ct
    )

    assert_close(loss, want, 1 + np.abs(want).max(), ROUNDINGS)
    for got, wanted in ((dlogits, want_dlogits), (dsoft, want_dsoft)):
        largest = 1 + np.abs(wanted.astype(np.float32)).max(initial=0)
        assert_close(unpadded(split, got, lead), wanted, largest, ROUNDINGS if dtype == jnp.float32 else 1)
    assert_close(dweights, want_dweights, 1 + np.abs(want_dweights).max(initial=0), ROUNDINGS)


def _dense_cross_entropy(logits, labels):
    # optax's, which takes the difference of lse and label's logit, is as exact only for logits around 0.
    return dense_loss(logits, labels, None)


@every_case
@examples
@given(seed=seeds, scale=st.sampled_from((1e-3, 1, 30)), offset=st.sampled_from((0, 1e4, -1e4)), data=st.data())
def test_cross_entropy(mode, n, size, dtype, seed, scale, offset, data):
    split = Split(size, n)
    logits = (normal(seed, (TOKENS, size)) * scale + offset).astype(dtype)
    labels, ct = _labels(data, (TOKENS,), size), normal(seed + 1, (TOKENS,))

    loss, dlogits = _sharded_cross_entropy(mode, n, size, logits, labels, ct)

    want, (want_dlogits,) = dense_vjp(_dense_cross_entropy, [logits], [labels], ct=ct)
    assert_close(loss, want, 1 + want, ROUNDINGS)
    assert_close(unpadded(split, dlogits, 1), want_dlogits, ((1 + want) * np.abs(ct))[:, None], ROUNDINGS)
    without_label = (labels < 0) | (labels >= size)
    np.testing.assert_array_equal(loss[without_label], 0)
    np.testing.assert_array_equal(dlogits[without_label].astype(np.float32), 0)


def _sharded_cross_entropy(mode, n, size, logits, labels, ct, fill=np.nan, **options):
    split = Split(size, n)
    loss, (dlogits,) = sharded_vjp(
        log_softmax_cross_entropy,
        mode,
        n,
        [padded(split, logits, 1, fill)],
        [labels],
        in_specs=(split.spec(1, 2, "ipu"),),
        ct=ct,
        size=size,
        **options,
    )
    return loss, dlogits


def test_the_cross_entropy_is_optaxs():
    logits, labels = normal(0, (TOKENS, 10)), np.arange(TOKENS, dtype=np.int32)
    ct = np.ones(TOKENS, np.float32)
    loss, dlogits = _sharded_cross_entropy("typed-outside", 4, 10, logits, labels, ct)
    want, (want_dlogits,) = dense_vjp(optax.softmax_cross_entropy_with_integer_labels, [logits], [labels], ct=ct)
    assert_close(loss, want, 1 + want, ROUNDINGS)
    assert_close(unpadded(Split(10, 4), dlogits, 1), want_dlogits, 1, ROUNDINGS)


# What must not leak


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "label_smoothing": 0.1, "z_loss": 0.1}])
def test_no_padding_leaks_whatever_it_holds(options):
    logits, labels, ct = normal(0, (TOKENS, 5)), np.arange(TOKENS, dtype=np.int32) - 1, np.ones(TOKENS, np.float32)
    zero_loss, zero_dlogits = _sharded_cross_entropy("typed-outside", 8, 5, logits, labels, ct, 0, **options)
    for fill in (np.nan, 1e9, np.inf, -np.inf):
        loss, dlogits = _sharded_cross_entropy("typed-outside", 8, 5, logits, labels, ct, fill, **options)
        np.testing.assert_array_equal(loss, zero_loss)
        np.testing.assert_array_equal(dlogits, zero_dlogits)


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "label_smoothing": 0.1, "z_loss": 0.1}])
def test_a_row_that_does_not_count_is_not_read(options):
    labels = np.array([3, -1, 9, 0, -100], np.int32)
    ignored = np.array([False, True, True, False, True])
    logits, ct = normal(0, (5, 7)), np.ones(5, np.float32)
    want_loss, want_dlogits = _sharded_cross_entropy("typed-outside", 3, 7, logits, labels, ct, **options)
    assert np.all(want_loss[~ignored] > 0.1)
    for fill in (np.nan, np.inf, -np.inf):
        logits[ignored] = fill
        loss, dlogits = _sharded_cross_entropy("typed-outside", 3, 7, logits, labels, ct, **options)
        np.testing.assert_array_equal(loss, np.where(ignored, 0, want_loss))
        np.testing.assert_array_equal(dlogits, np.where(ignored[:, None], 0, want_dlogits))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_of_no_token_is_zero_and_so_is_its_gradient(weighted):
    weights = np.zeros(3, np.float32) if weighted else None
    op = functools.partial(log_softmax_cross_entropy, size=5, reduction="mean", weights=weights)
    labels = np.array([1, 2, 3] if weighted else [-1, 5, -100], np.int32)
    logits = padded(Split(5, 2), normal(0, (3, 5)), 1)
    loss, (dlogits,) = sharded_vjp(op, "typed-outside", 2, [logits], [labels], in_specs=(COLUMNS,), ct=np.float32(1))
    np.testing.assert_array_equal(loss, 0)
    np.testing.assert_array_equal(dlogits, 0)


@pytest.mark.parametrize(("reduction", "want"), [("none", np.zeros(0)), ("sum", 0), ("mean", 0)])
def test_no_tokens_at_all(reduction, want):
    op = functools.partial(log_softmax_cross_entropy, size=5, reduction=reduction, label_smoothing=0.1)
    loss, (dlogits,) = sharded_vjp(
        op,
        "untyped-outside",
        2,
        [np.zeros((0, 6), np.float32)],
        [np.zeros(0, np.int32)],
        in_specs=(COLUMNS,),
        ct=np.zeros_like(want, np.float32),
    )
    np.testing.assert_array_equal(loss, want)
    assert dlogits.shape == (0, 6)


# Labels


def test_labels_of_every_dtype_and_what_stands_outside():
    """Each is a constant of one program: numpy's int64 holds labels that jax's int32 would cut off."""
    cases: Any = (
        (np.array([0, 3, -1, 6], np.int8), {}, [0, 3, None, 6]),
        (np.array([0, 3, 255, 6], np.uint8), {"ignore_index": 255, "out_of_range": "nan"}, [0, 3, None, 6]),
        # -100 is no uint8: no label is ignored, and 156 is not -100 wrapped around
        (np.array([0, 3, 156, 6], np.uint8), {"ignore_index": -100, "out_of_range": "clip"}, [0, 3, 6, 6]),
        (np.array([0, 2**32 + 3, -(2**40), 6]), {}, [0, None, None, 6]),
        (np.array([0, 2**32 + 3, -(2**40), 6]), {"out_of_range": "clip"}, [0, 6, 0, 6]),
        (np.array([0, 2**40, 3, 6]), {"ignore_index": 2**40, "out_of_range": "nan"}, [0, None, 3, 6]),
        (np.array([0, 2**32 + 3, 3, 6], np.uint64), {"out_of_range": "clip"}, [0, 6, 3, 6]),
        (np.array([0, 3, 7, 6], np.int16), {"ignore_index": 2**40, "out_of_range": "nan"}, [0, 3, np.nan, 6]),
        ([0, 3, 2, 6], {"ignore_index": np.int64(0)}, [None, 3, 2, 6]),
    )

    def all_of_them(logits):
        losses = [log_softmax_cross_entropy(logits, labels, size=7, **options) for labels, options, _ in cases]
        return jnp.stack(losses)

    logits = normal(0, (4, 7))
    log_p = np.asarray(jax.nn.log_softmax(logits))
    got = on_ipus(all_of_them, 3, COLUMNS, P())(padded(Split(7, 3), logits, 1))
    for loss, (_, _, columns) in zip(got, cases, strict=True):
        want = [0 if y is None else np.nan if y is np.nan else -log_p[i, y] for i, y in enumerate(columns)]
        np.testing.assert_allclose(loss, np.array(want, np.float32), rtol=1e-5)


def test_a_label_that_must_not_be_is_nan_in_the_loss_and_in_its_own_row_only():
    labels = np.array([3, 7, -2, -1], np.int32)
    logits, ct = normal(0, (4, 7)), np.ones(4, np.float32)
    options = {"ignore_index": -1, "out_of_range": "nan", "soft_cap": 3.0}
    loss, dlogits = _sharded_cross_entropy("typed-outside", 3, 7, logits, labels, ct, **options)
    np.testing.assert_array_equal(np.isnan(loss), [False, True, True, False])
    np.testing.assert_array_equal(np.isnan(dlogits[:, :7]).all(-1), [False, True, True, False])
    np.testing.assert_array_equal(np.isnan(dlogits[:, :7]).any(-1), [False, True, True, False])
    np.testing.assert_array_equal(dlogits[:, 7:], 0)
    np.testing.assert_array_equal(dlogits[3], 0)


# Derivatives

DERIVED: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "soft_cap": 4.0, "temperature": 1.5}


def _derivatives(loss, args, directions, total=lambda x: x):
    """Forward mode, reverse mode, and each of the second derivatives along the directions, of the sum of the losses."""

    def inner(grads):
        return sum(total(jnp.vdot(g, d)) for g, d in zip(grads, directions, strict=True))

    scalar = lambda *args: (loss(*args) * (1 + jnp.arange(3))).sum()  # noqa: E731
    everything = tuple(range(len(args)))
    reverse = jax.grad(scalar, everything)
    along = lambda *args: jax.jvp(scalar, args, directions)[1]  # noqa: E731
    return (
        reverse(*args),
        (along(*args), jax.jvp(along, args, directions)[1]),
        jax.grad(lambda *args: inner(reverse(*args)), everything)(*args),  # reverse over reverse
        jax.jvp(reverse, args, directions)[1],  # forward over reverse
        jax.grad(along, everything)(*args),  # reverse over forward
    )


def _both_targets(logits, soft, weights, labels, *, op):
    hard = op(logits, labels, weights=weights, ignore_index=1, **DERIVED)
    return hard + op(logits, soft, weights=weights, **DERIVED)


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
                first_is_split = lambda x: lax.psum(x, "ipu") if jax.typeof(x).manual_axis_type.varying else x  # noqa: E731
                return _derivatives(sharded, args, directions, first_is_split)

            derived = on_ipus(each_ipu, 3, (specs, specs), (specs, (P(), P()), specs, specs, specs))
            got = jax.tree.map(lambda x: split.unpad(x, 1) if x.ndim == 2 else x, derived(pad(args), pad(directions)))
        else:
            loss = on_ipus(sharded, 3, specs, P(), typed=mode == "typed-outside")
            got = jax.jit(lambda *args: _derivatives(lambda *args: loss(*pad(args)), args, directions))(*args)

        def dense(logits, soft, weights):
            hard = dense_loss(logits, labels, weights, weighted=True, ignore_index=1, **DERIVED)
            return hard + _dense_soft(logits, soft, weights)

        want = jax.jit(lambda *args: _derivatives(dense, args, directions))(*args)
        # wanted and found have tuples of tuples of the same structure
        for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def _dense_soft(logits, soft, weights):
    """Soft targets have a mass other than 1, which smoothing leaves as it is and spreads besides."""
    return dense_loss(logits, soft, weights, weighted=True, soft=True, **DERIVED)


def test_gradients_are_those_of_finite_differences():
    """The twin has derivatives by the same rules of jax; differences have none."""
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
    ct, columns = np.ones((2, TOKENS), np.float32), P(None, None, "ipu")
    op = functools.partial(wrapped, of_six)
    loss, grads = sharded_vjp(op, mode, 2, [logits, soft], [labels], in_specs=(columns, columns), ct=ct)
    want, want_grads = dense_vjp(dense, [logits, soft], [labels], ct=ct)
    assert_close(loss, want, 1 + np.abs(want).max(), ROUNDINGS)
    for got, wanted in zip(grads, want_grads, strict=True):
        assert_close(got, wanted, 1 + np.abs(wanted).max(), ROUNDINGS)


@pytest.mark.parametrize(("n", "size"), SPLITS)
def test_shards_that_are_typed_the_same_on_all_ipus_have_right_gradients(n, size):
    """Constants inside a shard_map with check_vma=True vary over no axis; nor need anything on one IPU."""
    bias, labels, ct = np.float32(3), np.zeros(2, np.int32), np.ones(2, np.float32)
    losses, (dbias,) = sharded_vjp(
        _equal_logits,
        "typed-outside",
        n,
        [bias],
        [labels],
        in_specs=(P(),),
        ct=ct,
        local=Split(size, n).local,
        size=size,
    )
    np.testing.assert_allclose(losses, np.log(size), rtol=1e-6)
    # Raising all logits alike changes nothing: the parts of the gradient add up to zero over the IPUs.
    assert_close(dbias, np.float32(0), 1, ROUNDINGS)


def _equal_logits(bias, labels, *, local, size):
    """Every column has the one logit `bias`, which all IPUs hold."""
    return log_softmax_cross_entropy(jnp.broadcast_to(bias, (2, local)), labels, size=size)


# Rounding

WIDE = 61  # columns, on 3 IPUs: 21, 21 and 19


def _kinds(seeds_of=range(4), tokens=32):
    """Logits of many sorts, by name: (name, logits, labels)."""
    for seed in seeds_of:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((tokens, WIDE)).astype(np.float32)
        y, rows = rng.integers(0, WIDE, tokens).astype(np.int32), np.arange(tokens)

        def raised(*changes, x=x, y=y, rows=rows):
            z = x.copy()
            for by, amount in changes:
                z[rows, (y + by) % WIDE] += np.float32(amount)
            return z

        yield "normal", x, y
        yield "small", x * np.float32(1e-3), y
        yield "around 1e4", x + np.float32(1e4), y
        yield "around -1e4", x - np.float32(1e4), y
        yield "sure and right", raised((0, 12)), y
        yield "surer and right", raised((0, 1e4)), y
        yield "sure and wrong, on the label's IPU", raised((1, 1e4)), y
        yield "sure and wrong, on another IPU", raised((30, 1e4), (31, 1e4)), y
        yield "undecided between two IPUs", raised((1, 1e4), (31, 1e4)), y
        yield "the label at -100", raised((0, -100)), y
        yield "the label at -1e4", raised((0, -1e4)), y
        yield "constant", np.full_like(x, rng.standard_normal()), y
        yield "a tie", raised((0, 1e4), (30, 1e4)) * (np.abs(x) < 0), y
        is_other = np.arange(WIDE) != y[:, None]
        yield "only some columns", np.where(is_other & (rng.random(x.shape) < 0.5), np.float32(-np.inf), x), y


def _stacked(kinds):
    names, logits, labels = zip(*kinds, strict=True)
    return np.repeat(names, len(labels[0])), np.concatenate(logits), np.concatenate(labels)


def _errors(got, want, dense):
    """How far each is from what is wanted, over all, and one rounding of the largest number."""
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    of = lambda x: np.abs(x[finite] - want[finite]).max(initial=0)  # noqa: E731
    return of(got), of(dense), np.finfo(np.float32).eps * np.abs(want[finite]).max(initial=0)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4}])
def test_it_rounds_no_more_than_twice_what_the_dense_program_does(options):
    """Or by one rounding of the largest number for each term of the loss, where the dense program has luck.

    Its error may be 0, and is less than a rounding where all columns are alike.
    """
    names, logits, labels = _stacked(_kinds())
    ct = np.ones(len(labels), np.float32)
    with np.errstate(all="ignore"):
        loss, dlogits = _sharded_cross_entropy("typed-outside", 3, WIDE, logits, labels, ct, **options)
        dense = functools.partial(_dense_of_labels, **options)
        float32 = dense_vjp(dense, [logits], [labels], ct=ct)
        with jax.enable_x64(True):
            float64 = dense_vjp(
                functools.partial(dense), [logits.astype(np.float64)], [labels], ct=ct.astype(np.float64)
            )
    for name in dict.fromkeys(names):
        of = names == name
        for got, wanted, twin in (
            (loss, float64[0], float32[0]),
            (dlogits[:, :WIDE], float64[1][0], float32[1][0]),
        ):
            if options and name == "only some columns":
                continue  # Smoothing asks for a column that cannot be: a loss of inf.
            error, of_dense, rounding = _errors(got[of], wanted[of], twin[of])
            assert error <= max(2 * of_dense, (1 + len(options)) * rounding), (
                f"{name}: {error}, dense {of_dense}, rounding {rounding}"
            )


def _dense_of_labels(logits, labels, **options):
    return dense_loss(logits, labels, None, **options)


def test_where_logits_and_loss_are_large_the_gradient_is_that_of_logits_rounded_once_more():
    """Two floats cannot hold the label's logit, and the log-sum-exp as exactly as its shard does, if both are large.

    The logits have been rounded themselves, by up to half an ulp of the largest; the gradient is off by no more.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, WIDE))
    logits = np.concatenate([x * 30, x * 300, rng.choice([-1e4, 1e4, 0, 1], (64, WIDE))]).astype(np.float32)
    labels, ct = rng.integers(0, WIDE, len(logits)).astype(np.int32), np.ones(len(logits), np.float32)
    _, dlogits = _sharded_cross_entropy("typed-outside", 3, WIDE, logits, labels, ct)
    _, want, _ = _in_float64(logits, labels)
    error = np.abs(dlogits[:, :WIDE] - want).max(-1)
    assert np.all(error <= np.spacing(np.abs(logits).max(-1)) / 2 + 2e-7)


# Rows of 7 logits on 3 IPUs, which hold columns 0-2, 3-5 and 6; each with a label.
EXTREMES = [
    ([1e4, -1e4, 0, 1, 2, 3, 4], 0),
    ([1e4, -1e4, 0, 1, 2, 3, 1e4], 1),
    ([-1e4] * 7, 6),
    ([-np.inf] * 3 + [0, 1, 2, 3], 4),  # IPU 0 has nothing
    ([0, 1, 2, 3, 4, 5, -np.inf], 5),  # IPU 2 has nothing
    ([0, 1, 2, -np.inf, -np.inf, -np.inf, -np.inf], 0),  # only IPU 0 has something
    ([0, 1, 2, -np.inf, 4, 5, 6], 3),  # the label itself is impossible: a loss of inf, and a gradient
    ([-5, -4, -3, -np.inf, -4, -5, -6], 3),  # and its shard's log-sum-exp is below 0
    ([0, 1, 2, 3, 4, 5, -np.inf], 6),  # and so is its whole shard
    ([1e38, -1e38, 0, 0, 0, 0, 0], 0),
    ([1010, 1000, 1000, 1000, 1000, 1000, 1000], 0),  # a confident prediction, whose loss is 3e-4
]


@pytest.mark.parametrize("mode", MODES)
def test_extreme_logits(mode):
    logits = np.array([row for row, _ in EXTREMES], np.float32)
    labels = np.array([label for _, label in EXTREMES], np.int32)
    want_loss, want_dlogits, _ = _in_float64(logits, labels)
    is_finite = np.isfinite(want_loss)

    loss, dlogits = _sharded_cross_entropy(mode, 3, 7, logits, labels, np.ones(len(EXTREMES), np.float32))
    np.testing.assert_array_equal(loss[~is_finite], np.inf)
    np.testing.assert_allclose(loss[is_finite], want_loss[is_finite], rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(dlogits[:, :7], want_dlogits, rtol=0, atol=4e-7)


def _in_float64(logits, labels):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    is_label = np.arange(logits.shape[-1]) == labels[:, None]
    return -log_p[is_label], np.exp(log_p) - is_label, log_p


def test_what_is_not_a_number_is_not_hidden():
    logits = np.zeros((1, 6), np.float32)
    logits[0, 4] = np.nan
    op = functools.partial(log_softmax_cross_entropy, size=6)
    assert np.isnan(on_ipus(op, 3, (COLUMNS, P()), P())(logits, np.zeros(1, np.int32))).all()


def test_the_loss_is_float32_or_float64_whatever_the_options_are():
    """numpy's numbers have a dtype of their own, and Python's are float64 under x64: neither may spread."""
    options = {"label_smoothing": np.float64(0.1), "z_loss": 0.1, "soft_cap": np.float64(3), "temperature": 2.0}
    with jax.enable_x64(True):
        for dtype, wanted in ((jnp.float32, jnp.float32), (jnp.bfloat16, jnp.float32), (jnp.float64, jnp.float64)):
            logits, labels = padded(Split(6, 4), normal(0, (3, 6)).astype(dtype), 1), np.arange(3)
            op = functools.partial(log_softmax_cross_entropy, size=6, **options)
            sharded = on_ipus(op, 4, (COLUMNS, P()), P())
            gradient = jax.grad(lambda logits, labels, op=sharded: op(logits, labels).sum())
            assert jax.eval_shape(gradient, logits, labels).dtype == dtype
            loss = sharded(logits, labels)
            assert loss.dtype == wanted
            want = dense_loss(logits[:, :6].astype(np.float64), labels, None, **options)
            np.testing.assert_allclose(loss, want, rtol=1e-14 if dtype == jnp.float64 else 2e-6)


# What is sent, and what is kept


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    ("floats", "dtype", "options"),
    [
        (2, jnp.bfloat16, {"z_loss": 0.1, "soft_cap": 3.0, "reduction": "mean"}),
        (3, jnp.float32, {"label_smoothing": 0.1}),
        (4, jnp.float32, {"soft": True}),
    ],
)
def test_the_cross_entropy_sends_two_to_four_floats_a_token_and_nothing_backward(typed, floats, dtype, options):
    n, tokens = 4, 5
    options = dict(options)
    soft = options.pop("soft", False)
    op = functools.partial(log_softmax_cross_entropy, size=10, **options)
    logits, target = jnp.ones((tokens, 12), dtype), jnp.ones((tokens, 12)) if soft else jnp.arange(tokens)
    of_target = COLUMNS if soft else P()
    sharded = on_ipus(op, n, (COLUMNS, of_target), P(), typed)

    sent = [("all-gather", n * floats * 4 * tokens)]
    assert collectives(sharded, logits, target) == sent
    outside = jax.value_and_grad(lambda logits, target: sharded(logits, target).mean(), (0, 1) if soft else 0)
    assert collectives(outside, logits, target) == sent
    inside = jax.value_and_grad(lambda logits, target: op(logits, target).mean())
    each_ipu = on_ipus(inside, n, (COLUMNS, of_target), (P(), COLUMNS), typed)
    assert collectives(each_ipu, logits, target) == sent


@pytest.mark.parametrize("typed", [True, False])
def test_projection_and_cross_entropy_send_one_gather_and_one_reduction_of_dx(typed):
    n, tokens, features = 2, 5, 3

    def head(x, w, labels):
        return log_softmax_cross_entropy(matmul(x, w), labels, size=6)

    sharded = on_ipus(head, n, (P(), COLUMNS, P()), P(), typed)
    loss_and_grads = jax.value_and_grad(lambda x, w: sharded(x, w, jnp.arange(tokens)).mean(), argnums=(0, 1))
    sent = collectives(loss_and_grads, jnp.ones((tokens, features)), jnp.ones((features, 6)))
    assert sent == [("all-gather", n * 2 * 4 * tokens), ("all-reduce", 4 * tokens * features)]


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1, "z_loss": 0.1, "soft_cap": 3.0, "temperature": 2.0, "reduction": "mean"}],
)
def test_the_backward_pass_keeps_the_logits_as_they_came_and_else_numbers_of_tokens(typed, options):
    tokens, kept = 5, []

    def each_ipu(logits, labels):
        op = functools.partial(log_softmax_cross_entropy, labels=labels, size=10, **options)
        loss, vjp = jax.vjp(op, logits)
        kept.extend(jax.tree.leaves(vjp))
        return loss

    jax.eval_shape(
        on_ipus(each_ipu, 4, (COLUMNS, P()), P(), typed), jnp.ones((tokens, 12), jnp.bfloat16), jnp.arange(5)
    )
    wide = [(leaf.shape, leaf.dtype) for leaf in kept if leaf.size > tokens]
    assert wide == [((tokens, 3), jnp.bfloat16)]
    assert sum(leaf.dtype == jnp.float32 for leaf in kept if leaf.size == tokens) <= 3


# In company


def _language_model(table, w, ids, labels, *, size):
    """A tied-size embedding, a projection and the loss, all sharded over "ipu": the mean loss of the tokens."""
    x = jnp.tanh(embedding(table, ids, size=size))
    losses = log_softmax_cross_entropy(matmul(x, w, size=size), labels, size=size)
    return losses.mean()


@pytest.mark.parametrize("typed", [True, False])
def test_with_replicas_on_another_axis_gradients_are_those_of_the_whole_batch(typed):
    split = Split(5, 2)
    mesh = jax.make_mesh((2, 2), ("replica", "ipu"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    table, w = normal(0, (5, 3)), normal(1, (3, 5))
    ids, labels = np.array([0, 1, 2, 3, 4, 4], np.int32), np.array([4, 3, 2, 1, 0, 7], np.int32)

    def each_ipu(table, w, ids, labels):
        return lax.pmean(_language_model(table, w, ids, labels, size=5), "replica")

    in_specs = (split.spec(0, 2, "ipu"), split.spec(1, 2, "ipu"), P("replica"), P("replica"))
    sharded = jax.shard_map(each_ipu, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=typed)
    got = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(
        padded(split, table, 0), padded(split, w, 1), ids, labels
    )

    def dense(table, w, ids, labels):
        return _dense_cross_entropy(jnp.tanh(table[ids]) @ w, labels).mean()

    want = jax.jit(jax.value_and_grad(dense, argnums=(0, 1)))(table, w, ids, labels)
    assert_close(got[0], want[0], want[0], ROUNDINGS)
    assert_close(unpadded(split, got[1][0], 0), want[1][0], 1, ROUNDINGS)
    assert_close(unpadded(split, got[1][1], 1), want[1][1], 1, ROUNDINGS)


def test_log_softmax_and_take_last_make_the_same_loss():
    def apart(logits, labels):
        return -take_last(log_softmax(logits, size=7), labels, size=7)

    split = Split(7, 3)
    logits, labels = normal(0, (TOKENS, 7)), np.array([0, 2, 3, 6, 7, -1], np.int32)
    ct = np.ones(TOKENS, np.float32)
    out, (dlogits,) = sharded_vjp(
        apart, "untyped-outside", 3, [padded(split, logits, 1)], [labels], in_specs=(COLUMNS,), ct=ct
    )
    want, want_dlogits = _sharded_cross_entropy("untyped-outside", 3, 7, logits, labels, ct)
    assert_close(out, want, 1 + want, ROUNDINGS)
    assert_close(unpadded(split, dlogits, 1), unpadded(split, want_dlogits, 1), 1, ROUNDINGS)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing=1.5 must be from 0 to 1: it is a share of the target"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1 must be from 0 to 1: it is a share of the target"),
        ({"label_smoothing": np.nan}, "label_smoothing=nan must be from 0 to 1: it is a share of the target"),
        ({"z_loss": -1.0}, "z_loss=-1.0 must be at least 0: use 0 for none"),
        ({"z_loss": np.inf}, "z_loss=inf must be at least 0: use 0 for none"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be positive: use None for no cap"),
        ({"soft_cap": np.inf}, "soft_cap=inf must be positive: use None for no cap"),
        ({"temperature": 0}, "temperature=0.0 must be positive: use 1 to leave the logits as they are"),
        (
            {"z_loss": "much"},
            "z_loss is of type str, but must be a plain number: what is compiled depends on it",
        ),
        ({"out_of_range": "drop"}, "out_of_range='drop' is unknown: use 'ignore', 'nan' or 'clip'"),
        ({"reduction": "max"}, "reduction='max' is unknown: use 'none', 'mean' or 'sum'"),
        ({"ignore_index": 0.5}, "ignore_index=0.5 is no label: give an int, or None if all labels count"),
        ({"ignore_index": True}, "ignore_index=True is no label: give an int, or None if all labels count"),
        (
            {"weights": np.ones((3, 1))},
            "weights has shape (3, 1), but a shard of shape (3, 2) takes one index for each of its rows: give shape "
            "(3,)",
        ),
        (
            {"labels": np.ones(3, np.float32)},
            "labels are floating, so they are soft targets, of shape (3,); they must have the shape of the logits, "
            "(3, 2) on each IPU: split them as the logits, or give integers for labels",
        ),
        (
            {"labels": np.ones((3, 2), np.float32), "ignore_index": -100},
            "ignore_index=-100 and out_of_range='ignore' speak of labels, but soft targets were given: leave both out, "
            "and give a token that does not count a weight of 0",
        ),
        (
            {"labels": np.ones((3, 2), np.float32), "out_of_range": "nan"},
            "ignore_index=None and out_of_range='nan' speak of labels, but soft targets were given: leave both out, "
            "and give a token that does not count a weight of 0",
        ),
        ({"labels": np.ones(3, bool)}, "labels has dtype bool, but indices must be integers: use int32"),
        (
            {"labels": np.zeros((3, 1), int)},
            "labels has shape (3, 1), but a shard of shape (3, 2) takes one index for each of its rows: give shape "
            "(3,)",
        ),
        (
            {"size": 8},
            "logits_shard has shape (3, 2) on each IPU, with 2 rows in dim -1, but size=8 over the 2 IPUs of axis "
            "'ipu' takes 4: pad the whole array with Split(size=8, parts=2).pad(array, -1) and shard it with "
            "in_specs=Split(size=8, parts=2).spec(-1, 2, 'ipu')",
        ),
    ],
)
def test_a_wrong_option_is_refused_when_traced(options, message):
    options = {"size": 4, "labels": np.zeros(3, np.int32)} | options
    with pytest.raises(ValueError, match=exactly(message)):
        on_ipus(functools.partial(log_softmax_cross_entropy, **options), 2, COLUMNS, P())(jnp.ones((3, 4)))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            lambda x, labels: log_softmax_cross_entropy(x, labels + lax.axis_index("ipu"), size=4),
            "labels varies over axis 'ipu', but must be the same on all its IPUs: bring it in with in_specs that don't "
            "name 'ipu', or use to_all or from_all on it first",
        ),
        (
            lambda x, labels: log_softmax_cross_entropy(x, labels, size=4, weights=x[:, 0]),
            "weights varies over axis 'ipu', but must be the same on all its IPUs: bring it in with in_specs that "
            "don't name 'ipu', or use to_all or from_all on it first",
        ),
        (
            lambda x, labels: log_softmax_cross_entropy(x.astype(jnp.int32), labels, size=4),
            "logits_shard has dtype int32, but logits must be floating: convert them first",
        ),
    ],
)
def test_a_wrong_call_is_refused_when_traced(op, message):
    with pytest.raises(ValueError, match=exactly(message)):
        on_ipus(op, 2, (COLUMNS, P()), P())(jnp.ones((3, 4)), jnp.zeros(3, jnp.int32))

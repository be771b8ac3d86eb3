"""The split softmax and cross-entropy against jax's and optax's, forward, gradient, and in what they send."""

import functools

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

from sharded_ops import Split, embedding, from_all, log_softmax, log_softmax_cross_entropy, matmul, take_last

TOKENS = 6

# exp and log are good to a few ulps each, and a denominator is a sum of at most 10 terms.
ROUNDINGS = 20


def _dense_log_softmax(logits):
    return jax.nn.log_softmax(logits.astype(jnp.float32)).astype(logits.dtype)


def _dense_cross_entropy(logits, labels):
    # optax's, which takes the difference of lse and label's logit, is as exact only for logits around 0.
    size = logits.shape[-1]
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    losses = -jnp.take_along_axis(log_p, labels.clip(0, size - 1)[..., None], axis=-1)[..., 0]
    return jnp.where((labels >= 0) & (labels < size), losses, 0)


def _labels(data, size) -> np.ndarray:
    each = st.one_of(st.integers(0, size - 1), st.sampled_from((-1, -(2**31), size, size + 1, 2**31 - 1)))
    return np.array(data.draw(st.lists(each, min_size=TOKENS, max_size=TOKENS)), np.int32)


@every_case
@examples
@given(seed=seeds, scale=st.sampled_from((1e-3, 1, 30)), offset=st.sampled_from((0, 1e4, -1e4)))
def test_log_softmax(mode, n, size, dtype, seed, scale, offset):
    split = Split(size, n)
    logits = (normal(seed, (TOKENS, size)) * scale + offset).astype(dtype)
    ct = normal(seed + 1, (TOKENS, size), dtype)

    spec = split.spec(1, 2, "ipu")
    out, (dlogits,) = sharded_vjp(
        log_softmax,
        mode,
        n,
        [padded(split, logits, 1)],
        in_specs=(spec,),
        out_spec=spec,
        ct=padded(split, ct, 1),
        size=size,
    )

    want, (want_dlogits,) = dense_vjp(_dense_log_softmax, [logits], ct=ct)
    assert_close(unpadded(split, out, 1, padding=-np.inf), want, 1 + np.abs(np.asarray(want, np.float32)), ROUNDINGS)
    # dlogits = ct - softmax * sum(ct)
    ct_size = np.abs(ct.astype(np.float32))
    assert_close(unpadded(split, dlogits, 1), want_dlogits, ct_size + ct_size.sum(-1, keepdims=True), ROUNDINGS)


@every_case
@examples
@given(seed=seeds, scale=st.sampled_from((1e-3, 1, 30)), offset=st.sampled_from((0, 1e4, -1e4)), data=st.data())
def test_cross_entropy(mode, n, size, dtype, seed, scale, offset, data):
    split = Split(size, n)
    logits = (normal(seed, (TOKENS, size)) * scale + offset).astype(dtype)
    labels, ct = _labels(data, size), normal(seed + 1, (TOKENS,))

    loss, dlogits = _sharded_cross_entropy(mode, n, size, logits, labels, ct)

    want, (want_dlogits,) = dense_vjp(_dense_cross_entropy, [logits], [labels], ct=ct)
    assert_close(loss, want, 1 + want, ROUNDINGS)
    assert_close(unpadded(split, dlogits, 1), want_dlogits, ((1 + want) * np.abs(ct))[:, None], ROUNDINGS)
    without_label = (labels < 0) | (labels >= size)
    np.testing.assert_array_equal(loss[without_label], 0)
    np.testing.assert_array_equal(dlogits[without_label].astype(np.float32), 0)


def _sharded_cross_entropy(mode, n, size, logits, labels, ct, fill=np.nan):
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
    )
    return loss, dlogits


@pytest.mark.parametrize("fill", [np.nan, 1e9, np.inf, -np.inf])
def test_no_padding_leaks_whatever_it_holds(fill):
    logits, labels, ct = normal(0, (TOKENS, 5)), np.arange(TOKENS, dtype=np.int32) - 1, np.ones(TOKENS, np.float32)
    loss, dlogits = _sharded_cross_entropy("typed-outside", 8, 5, logits, labels, ct, fill)
    zero_loss, zero_dlogits = _sharded_cross_entropy("typed-outside", 8, 5, logits, labels, ct, 0)
    np.testing.assert_array_equal(loss, zero_loss)
    np.testing.assert_array_equal(dlogits, zero_dlogits)


# Rows of 7 logits on 3 IPUs, which hold columns 0-2, 3-5 and 6; each with a label.
EXTREMES = [
    ([1e4, -1e4, 0, 1, 2, 3, 4], 0),
    ([1e4, -1e4, 0, 1, 2, 3, 1e4], 1),
    ([-1e4] * 7, 6),
    ([-np.inf] * 3 + [0, 1, 2, 3], 4),  # IPU 0 has nothing
    ([0, 1, 2, 3, 4, 5, -np.inf], 5),  # IPU 2 has nothing
    ([0, 1, 2, -np.inf, -np.inf, -np.inf, -np.inf], 0),  # only IPU 0 has something
    ([0, 1, 2, -np.inf, 4, 5, 6], 3),  # the label itself is impossible: a loss of inf, and a gradient
    ([0, 1, 2, 3, 4, 5, -np.inf], 6),  # and so is its whole shard
    ([1e38, -1e38, 0, 0, 0, 0, 0], 0),
    ([1010, 1000, 1000, 1000, 1000, 1000, 1000], 0),  # a confident prediction, whose loss is 3e-4
]


@pytest.mark.parametrize("mode", MODES)
def test_extreme_logits(mode):
    logits = np.array([row for row, _ in EXTREMES], np.float32)
    labels = np.array([label for _, label in EXTREMES], np.int32)
    want_loss, want_dlogits, want_log_p = _in_float64(logits, labels)
    is_finite = np.isfinite(want_loss)

    loss, dlogits = _sharded_cross_entropy(mode, 3, 7, logits, labels, np.ones(len(EXTREMES), np.float32))
    np.testing.assert_array_equal(loss[~is_finite], np.inf)
    np.testing.assert_allclose(loss[is_finite], want_loss[is_finite], rtol=2e-6, atol=1e-7)
    # The gradient is exact to the rounding of the loss, here up to 2e4.
    bound = np.where(is_finite, 1 + want_loss, 1)[:, None]
    assert np.all(np.abs(dlogits[:, :7] - want_dlogits) <= 2e-7 * bound)

    split, spec, ct = Split(7, 3), P(None, "ipu"), normal(0, logits.shape)
    log_p, (dlogits,) = sharded_vjp(
        log_softmax,
        mode,
        3,
        [padded(split, logits, 1)],
        in_specs=(spec,),
        out_spec=spec,
        ct=padded(split, ct, 1),
        size=7,
    )
    np.testing.assert_allclose(log_p[:, :7], want_log_p, rtol=2e-6, atol=1e-6)
    want_dlogits = ct - np.exp(want_log_p) * ct.sum(-1, keepdims=True)
    np.testing.assert_allclose(unpadded(split, dlogits, 1), want_dlogits, atol=4e-6)


def _in_float64(logits, labels):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    is_label = np.arange(logits.shape[-1]) == labels[:, None]
    return -log_p[is_label], np.exp(log_p) - is_label, log_p


def test_the_cross_entropy_is_optaxs():
    logits, labels = normal(0, (TOKENS, 10)), np.arange(TOKENS, dtype=np.int32)
    ct = np.ones(TOKENS, np.float32)
    loss, dlogits = _sharded_cross_entropy("typed-outside", 4, 10, logits, labels, ct)
    want, (want_dlogits,) = dense_vjp(optax.softmax_cross_entropy_with_integer_labels, [logits], [labels], ct=ct)
    assert_close(loss, want, 1 + want, ROUNDINGS)
    assert_close(unpadded(Split(10, 4), dlogits, 1), want_dlogits, 1, ROUNDINGS)


@pytest.mark.parametrize("op", [log_softmax, log_softmax_cross_entropy])
def test_what_is_not_a_number_is_not_hidden(op):
    logits = np.zeros((1, 6), np.float32)
    logits[0, 4] = np.nan
    labels = [np.zeros(1, np.int32)] if op is log_softmax_cross_entropy else []
    out_spec = P() if labels else P(None, "ipu")
    out = on_ipus(functools.partial(op, size=6), 3, (P(None, "ipu"), P())[: 1 + len(labels)], out_spec)(logits, *labels)
    assert np.isnan(out).all()


@pytest.mark.parametrize(("typed", "dtype"), [(True, jnp.bfloat16), (False, jnp.float32)])
def test_the_cross_entropy_sends_two_floats_a_token_and_nothing_backward(typed, dtype):
    n, tokens = 4, 5
    op = functools.partial(log_softmax_cross_entropy, size=10)
    sharded = on_ipus(op, n, (P(None, "ipu"), P()), P(), typed)
    logits, labels = jnp.ones((tokens, 12), dtype), jnp.arange(tokens)

    from_each = 2 * 4 * tokens
    assert collectives(sharded, logits, labels) == [("all-gather", n * from_each)]
    outside = jax.value_and_grad(lambda logits: sharded(logits, labels).mean())
    assert collectives(outside, logits) == [("all-gather", n * from_each)]
    inside = jax.value_and_grad(lambda logits, labels: op(logits, labels).mean())
    columns = P(None, "ipu")
    each_ipu = on_ipus(inside, n, (columns, P()), (P(), columns), typed)
    assert collectives(each_ipu, logits, labels) == [("all-gather", n * from_each)]


@pytest.mark.parametrize("typed", [True, False])
def test_projection_and_cross_entropy_send_one_gather_and_one_reduction_of_dx(typed):
    n, tokens, features = 2, 5, 3

    def head(x, w, labels):
        return log_softmax_cross_entropy(matmul(x, w), labels, size=6)

    sharded = on_ipus(head, n, (P(), P(None, "ipu"), P()), P(), typed)
    loss_and_grads = jax.value_and_grad(lambda x, w: sharded(x, w, jnp.arange(tokens)).mean(), argnums=(0, 1))
    sent = collectives(loss_and_grads, jnp.ones((tokens, features)), jnp.ones((features, 6)))
    assert sent == [("all-gather", n * 2 * 4 * tokens), ("all-reduce", 4 * tokens * features)]


@pytest.mark.parametrize(("typed", "backward"), [(True, ("all-reduce", 20)), (False, ("reduce-scatter", 40))])
def test_log_softmax_sends_what_it_says(typed, backward):
    sharded = on_ipus(functools.partial(log_softmax, size=6), 2, P(None, "ipu"), P(None, "ipu"), typed)
    logits = jnp.ones((5, 6))
    assert collectives(sharded, logits) == [("all-gather", 2 * 2 * 4 * 5)]
    both = collectives(lambda logits, ct: jax.vjp(sharded, logits)[1](ct), logits, logits)
    assert both == sorted([("all-gather", 2 * 2 * 4 * 5), backward])


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


def _apart(logits, labels):
    return -take_last(log_softmax(logits, size=7), labels, size=7)


def _fused(logits, labels):
    return log_softmax_cross_entropy(logits, labels, size=7)


@pytest.mark.parametrize("op", [_apart, _fused])
def test_log_softmax_and_take_last_make_the_same_loss(op):
    split = Split(7, 3)
    logits, labels = normal(0, (TOKENS, 7)), np.array([0, 2, 3, 6, 7, -1], np.int32)

    ct = np.ones(TOKENS, np.float32)
    out, (dlogits,) = sharded_vjp(
        op, "untyped-outside", 3, [padded(split, logits, 1)], [labels], in_specs=(P(None, "ipu"),), ct=ct
    )
    want, (want_dlogits,) = dense_vjp(_dense_cross_entropy, [logits], [labels], ct=ct)
    assert_close(out, want, 1 + want, ROUNDINGS)
    assert_close(unpadded(split, dlogits, 1), want_dlogits, 1, ROUNDINGS)


_of_six = functools.partial(log_softmax_cross_entropy, size=6)


def _scanned(logits, labels):
    return lax.scan(lambda carry, xs: (carry, _of_six(*xs)), 0, (logits, labels))[1]


@pytest.mark.parametrize("mode", ["typed-outside", "untyped-inside"])
@pytest.mark.parametrize(
    "wrapped", [jax.vmap(_of_six), _scanned, jax.checkpoint(_of_six)], ids=["vmap", "scan", "remat"]
)
def test_the_cross_entropy_may_stand_in_other_transforms(wrapped, mode):
    logits, labels = normal(0, (2, TOKENS, 6)), np.arange(2 * TOKENS, dtype=np.int32).reshape(2, TOKENS) % 7 - 1
    ct = np.ones((2, TOKENS), np.float32)
    loss, (dlogits,) = sharded_vjp(wrapped, mode, 2, [logits], [labels], in_specs=(P(None, None, "ipu"),), ct=ct)
    want, (want_dlogits,) = dense_vjp(_dense_cross_entropy, [logits], [labels], ct=ct)
    assert_close(loss, want, 1 + want, ROUNDINGS)
    assert_close(dlogits, want_dlogits, 1, ROUNDINGS)


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


def test_float64_logits_give_a_float64_loss():
    with jax.enable_x64(True):
        logits, labels = np.random.default_rng(0).standard_normal((3, 6)), np.arange(3)
        loss = on_ipus(functools.partial(log_softmax_cross_entropy, size=6), 2, (P(None, "ipu"), P()), P())(
            logits, labels
        )
        np.testing.assert_allclose(loss, _in_float64(logits, labels)[0], rtol=1e-14)
        assert loss.dtype == jnp.float64


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            lambda x, labels: log_softmax_cross_entropy(x, labels.astype(jnp.float32), size=4),
            "labels has dtype float32, but indices must be integers: use int32",
        ),
        (
            lambda x, labels: log_softmax_cross_entropy(x, labels[:, None], size=4),
            "labels has shape (3, 1), but a shard of shape (3, 2) takes one index for each of its rows: give shape "
            "(3,)",
        ),
        (
            lambda x, labels: log_softmax_cross_entropy(x, labels + lax.axis_index("ipu"), size=4),
            "labels varies over axis 'ipu', but must be the same on all its IPUs: bring it in with in_specs that don't "
            "name 'ipu', or use to_all or from_all on it first",
        ),
        (
            lambda x, labels: log_softmax_cross_entropy(x.astype(jnp.int32), labels, size=4),
            "logits_shard has dtype int32, but logits must be floating: convert them first",
        ),
        (
            lambda x, labels: log_softmax_cross_entropy(x, labels, size=8),
            "logits_shard has shape (3, 2) on each IPU, with 2 rows in dim -1, but size=8 over the 2 IPUs of axis "
            "'ipu' takes 4: pad the whole array with Split(size=8, parts=2).pad(array, -1) and shard it with "
            "in_specs=Split(size=8, parts=2).spec(-1, 2, 'ipu')",
        ),
        (
            lambda x, labels: log_softmax(x[0, 0], size=4),
            "logits_shard has shape () on each IPU, without a dim -1 to split: give an array that has one",
        ),
        (
            lambda x, labels: log_softmax(x, size=4, axis="model"),
            "axis='model' is no axis of an enclosing shard_map: call the op inside jax.shard_map on a mesh that has "
            "this axis, or give the axis that its mesh has",
        ),
        (
            lambda x, labels: from_all(log_softmax(x, size=-4), -1, 4),
            "size=-4 cannot describe a split dim: give a positive int",
        ),
    ],
)
def test_a_wrong_call_is_refused_when_traced(op, message):
    with pytest.raises(ValueError, match=exactly(message)):
        on_ipus(op, 2, (P(None, "ipu"), P()), P())(jnp.ones((3, 4)), jnp.zeros(3, jnp.int32))

"""Test calls that the ops refuse when they are traced, on 2 IPUs; for bad values of options see test_op_arguments."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sharded_ops import (
    argmax,
    debug_sharding,
    embedding,
    from_all,
    layer_norm,
    linear_cross_entropy,
    log_softmax,
    log_softmax_cross_entropy,
    matmul,
    reduce_scatter_tokens,
    rms_norm,
    sample,
    scatter_tokens,
    softmax,
    take_along_last_dim,
    tied_projection,
)
from support.harness import on_ipus
from support.refusals import refusals, refused

# what an op gets on each of 2 IPUs
OPERANDS = {
    "x": (jnp.ones((3, 4)), P(None, "ipu")),  # (3, 2), its columns
    "rows": (jnp.ones((4, 4)), P("ipu")),  # (2, 4)
    "scale": (jnp.ones(4), P("ipu")),  # (2,)
    "whole": (jnp.ones((3, 4)), P()),
    "ids": (jnp.zeros(3, jnp.int32), P()),
    "key": (jax.random.key(0), P()),
}


def cross_entropy(o: Any, **options: Any) -> Any:
    given = {"hidden": o.whole, "table": o.rows, "labels": o.ids, "size": 4}
    return linear_cross_entropy(**given | options)


def logits_loss(o: Any, **options: Any) -> Any:
    given = {"logits_shard": o.x, "labels": o.ids, "size": 4}
    return log_softmax_cross_entropy(**given | options)


def drawn(o: Any, key: Any = None, **options: Any) -> Any:
    return sample(o.key if key is None else key, o.x, size=4, **options)


FORWARD: Any = {"gradients": "forward", "reduction": "mean"}
FLOATS = np.ones((3, 2), np.float32)


@refusals(
    # integers
    (lambda o: softmax(o.x.astype(int), size=4), "dtype int32", "logits must be floating", "convert"),
    (lambda o: sample(o.key, o.x.astype(int), size=4), "dtype int32", "logits must be floating", "convert"),
    (lambda o: logits_loss(o, logits_shard=o.x.astype(int)), "dtype int32", "logits must be floating", "convert"),
    (lambda o: rms_norm(o.x.astype(int), o.scale, size=4), "dtype int32", "norms take floating arrays", "convert"),
    (lambda o: layer_norm(o.x, o.scale, o.scale.astype(int), size=4), "bias_shard has dtype int32", "norms", "convert"),
    (lambda o: matmul(o.whole.astype(int), o.x[:1].repeat(4, 0)), "x has dtype int32", "takes floating", "convert it"),
    (lambda o: matmul(o.whole, o.rows.T, bias=jnp.ones(2, int)), "bias has dtype int32", "takes floating", "convert"),
    (lambda o: tied_projection(o.whole.astype(int), o.rows, size=4), "hidden has dtype int32", "floating", "convert"),
    (lambda o: log_softmax(o.x[0, 0], size=4), "shape () on each IPU, without a dim -1", "give an array that has one"),
    # embedding
    (lambda o: embedding(o.rows, o.ids * 1.0, size=4), "ids has dtype float32", "use int32"),
    (lambda o: embedding(o.rows[..., None], o.ids, size=4), "(2, 4, 1) on each IPU, but must have 2", "reshape"),
    (
        lambda o: embedding(o.x, o.ids, size=4, split="features", reduction="scatter"),
        "split='features' sums nothing",
        "use split='rows', or from_all and then scatter_tokens",
    ),
    (lambda o: embedding(o.rows, o.ids[0], size=4, reduction="scatter"), "ids has shape ()", "reduction='sum'"),
    (lambda o: take_along_last_dim(o.x, o.ids[:2], size=4), "(2,), but a shard of shape (3, 2)", "give shape (3,)"),
    (lambda o: take_along_last_dim(o.x, o.ids == 0, size=4), "indices has dtype bool", "use int32"),
    # matmul
    (lambda o: matmul(o.whole[:, :3], o.rows.T), "(3, 3) and w of shape (4, 2) on each IPU", "(split='rows')"),
    (lambda o: matmul(o.whole[0, 0], o.rows.T), "x of shape ()", "reshape them to (.., D) and (D, V)"),
    (lambda o: matmul(o.whole, o.rows.T, reduction="scatter"), "split='columns' sums nothing", "use split='rows'"),
    (lambda o: matmul(o.whole, o.rows.T, split="rows", tokens=6), "tokens=6 gathers", "use split='columns'"),
    (
        lambda o: matmul(o.whole[0], o.rows.T, split="rows", reduction="scatter"),
        "x has shape (4,), without a dim of tokens",
        "give (N, .., D)",
    ),
    (lambda o: matmul(o.whole, o.rows.T, tokens=7), "with 3 rows in dim 0, but tokens=7", "Split(size=7, parts=2)"),
    (lambda o: matmul(o.whole, o.rows.T, bias=jnp.ones(6)), "bias of shape (6,)", "for each of its 2 col"),
    (lambda o: tied_projection(o.whole, o.rows[:, :3], size=4), "hidden of shape (3, 4)", "(2, 3)", "the same D"),
    # norms
    *(
        (lambda o, op=op: op(o.x, None, size=4, scale_offset=1.0), "scale_offset=1.0 ", "None", "leave it out")
        for op in (rms_norm, layer_norm)
    ),
    (lambda o: rms_norm(o.x, o.scale[None], size=4), "scale_shard has shape (1, 2)", "one value for each column"),
    (lambda o: layer_norm(o.x, o.scale[:1], size=4), "scale_shard has shape (1,)", "Split(size=4, parts=2)"),
    # choice and sampling
    (lambda o: argmax(o.x.astype(jnp.complex64), size=4), "complex64, which has no order", "give real numbers"),
    (lambda o: sample(jax.random.key_data(o.key), o.x, size=4), "key has dtype uint32", "jax.random.key(seed)"),
    (lambda o: drawn(o, 0), "key=0 is not one typed key", "jax.random.key(seed)"),
    (lambda o: sample(jax.random.split(o.key, 3), o.x, size=4), "key<fry> and shape (3,)", "jax.random.key(seed)"),
    (lambda o: drawn(o, temperature=np.array([1, 2, np.inf])), "temperature=inf", "a finite number, at least 0"),
    (lambda o: drawn(o, temperature=o.whole[:, :1]), "temperature has shape (3, 1)", "give shape () or (3,)"),
    (lambda o: drawn(o, temperature=True), "temperature has dtype bool", "convert it first"),
    (lambda o: drawn(o, temperature=1j), "temperature has dtype complex128", "convert it first"),
    (lambda o: drawn(o, temperature=np.ones(5)), "shape (5,)", "(3,) tokens", "give shape () or (3,)"),
    # collectives
    (lambda o: from_all(o.x, 2, 4), "(3, 2) on each IPU, without a dim 2", "give an array that has one"),
    (lambda o: reduce_scatter_tokens(o.x, dim=2), "without a dim 2 to scatter", "give an array that has one"),
    (lambda o: scatter_tokens(o.whole, dim=-3), "without a dim -3 to scatter", "give an array that has one"),
    (lambda o: debug_sharding(o.x * 1j, "z"), "z has dtype complex64", "such as x.real and x.imag"),
    (lambda o: debug_sharding(o.key, "key"), "key<fry>, which has no least", "or jax.random.key_data(x)"),
    # losses
    (lambda o: cross_entropy(o, gradients="forward"), "gradients='forward'", "reduction='mean' or 'sum'"),
    (lambda o: cross_entropy(o, hidden=o.whole[:, :2]), "(3, 2) and table of shape (2, 4)", "give (.., D)"),
    (lambda o: cross_entropy(o, hidden=o.whole.astype("bfloat16")), "bfloat16 and table float32", "convert one"),
    (lambda o: cross_entropy(o, labels=np.zeros((3, 4), int)), "labels has shape (3, 4)", "give shape (3,)"),
    (lambda o: cross_entropy(o, labels=o.ids == 0), "labels has dtype bool", "use int32"),
    (lambda o: cross_entropy(o, weights=np.ones(4)), "weights has shape (4,)", "give shape (3,)"),
    (lambda o: cross_entropy(o, bias=o.x[:2, :1]), "float32 and shape (2, 1)", "a floating array of 1 dim"),
    (lambda o: cross_entropy(o, bias=o.scale.astype(int)), "int32 and shape (2,)", "a floating array of 1 dim"),
    (lambda o: cross_entropy(o, **FORWARD, return_log_sum_exp=True), "log-sum-exp is known", "gradients='backward'"),
    (lambda o: cross_entropy(o, **FORWARD, return_entropy=True), "entropy is known", "backward' with return_entropy"),
    (lambda o: cross_entropy(o, **FORWARD, labels=FLOATS), "as large as the logits", "gradients='backward'"),
    (lambda o: cross_entropy(o, labels=np.ones((3, 4), np.float32)), "soft targets, of shape (3, 4)", "split them as"),
    (lambda o: cross_entropy(o, labels=FLOATS, ignore_index=0), "ignore_index=0", "a weight of 0"),
    (
        lambda o: cross_entropy(o, tokens=3, hidden=o.whole[0], labels=np.int32(0)),
        "(4,), without a dim of tokens that is scattered",
        "give (N, .., D)",
    ),
    (lambda o: cross_entropy(o, weights=np.ones(3, np.complex64)), "complex64", "real numbers", "give floats"),
    (lambda o: cross_entropy(o, temperature=o.whole[0, 0]), "<float32[] array>", "is not a plain number", "above 0"),
    (lambda o: logits_loss(o, temperature=o.whole[0, 0]), "<float32[] array>", "is not a plain number", "above 0"),
    (lambda o: logits_loss(o, weights=np.ones(3, np.complex64)), "complex64", "real numbers", "give floats"),
    (lambda o: logits_loss(o, weights=np.ones((3, 1))), "weights has shape (3, 1)", "shape (3, 2)", "give shape (3,)"),
    (lambda o: logits_loss(o, labels=FLOATS[:, 0]), "of shape (3,)", "soft targets", "(3, 2)", "split them as"),
    (lambda o: logits_loss(o, labels=FLOATS, ignore_index=-100), "ignore_index=-100", "soft targets", "a weight of 0"),
    (lambda o: logits_loss(o, labels=FLOATS, out_of_range="nan"), "out_of_range='nan'", "soft targets", "weight of 0"),
    (lambda o: logits_loss(o, labels=np.ones(3, bool)), "labels has dtype bool", "use int32"),
    (lambda o: logits_loss(o, labels=np.zeros((3, 1), int)), "labels has shape (3, 1)", "(3, 2)", "give shape (3,)"),
)
def test_a_wrong_call_is_refused_when_it_is_traced(call, holds):
    values, specs = zip(*OPERANDS.values(), strict=True)

    def program(*shards):
        return call(types.SimpleNamespace(**dict(zip(OPERANDS, shards, strict=True))))

    with refused(*holds):
        on_ipus(program, 2, specs, P())(*values)

"""Test losses and norms that are easily counted wrongly where an IPU is a group of devices, against plain jax.

The cases are from NVIDIA/Megatron-LM#7452, in whole-array code: a vocabulary, tokens or heads are split over axis
"tensor", masks leave unequal numbers of tokens to its devices, to the micro-batches and to the replicas.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import Pipeline, Stage, TrainOptions, make_mesh, make_train_step

REPLICAS, M, B, T, D, V, HEADS = 2, 3, 2, 8, 4, 6, 2
rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
BATCH = {"x": draw(REPLICAS, M, B, T, D), "labels": rng.integers(0, V, (REPLICAS, M, B, T)).astype(np.int32)}
BATCH["mask"] = rng.random((REPLICAS, M, B, T)) < np.linspace(0.9, 0.2, T)  # the second device has fewer tokens
BATCH["mask"][0, 0] = np.arange(T) == 0  # and here none
WEIGHTS = {"body": draw(D, D), "head": {"out": draw(D, V), "norm": 1 + draw(D // HEADS), "sink": draw(HEADS)}}
TOKENS, VOCABULARY = P(None, "tensor"), P(None, None, "tensor")
whole = lambda value, spec: value
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)


def entropy(w, x, mb, split):
    logits = split(x @ w["out"], VOCABULARY)
    return optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"])


def smoothed(w, x, mb, split):  # finding 1
    logits = split(x @ w["out"], VOCABULARY)
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(mb["labels"], V), 0.3)).mean()


def gathered(w, x, mb, split):  # finding 2
    logits = split(split(x @ w["out"], VOCABULARY), P())
    return optax.softmax_cross_entropy_with_integer_labels(logits, mb["labels"]).mean()


def next_two(w, x, mb, split):  # findings 3 and 9: each loss has a mask and a count of its own
    x, mask = split(x, TOKENS), mb["mask"]
    later = {"labels": jnp.flip(mb["labels"], 1)}
    both = mask & jnp.flip(mask, 1)
    mean = lambda losses, counts: jnp.sum(losses * counts) / jnp.maximum(counts.sum(), 1)
    return mean(entropy(w, x, mb, whole), mask) + 0.3 * mean(entropy(w, x, later, whole), both)


def balanced(w, x, mb, split):  # finding 10: the vocabulary serves as experts
    probabilities = jax.nn.softmax(split(x, TOKENS) @ w["out"])
    chosen = jax.nn.one_hot(probabilities.argmax(-1), V) * mb["mask"][..., None]
    count = jnp.maximum(mb["mask"].sum(), 1)
    share = chosen.sum((0, 1)) / count
    return V * jnp.sum(share * (probabilities * mb["mask"][..., None]).sum((0, 1)) / count) + x.mean()


def with_heads(w, x, mb, split):  # findings 8 and 11: a sink per head; one norm for all heads
    x = split(x.reshape(B, T, HEADS, -1), VOCABULARY)
    normed = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * w["norm"]
    scores = jnp.einsum("bthk,bshk->bhts", normed, normed)
    sinks = jnp.broadcast_to(w["sink"][:, None, None], (B, HEADS, T, 1))
    attended = jax.nn.softmax(jnp.concatenate([scores, sinks], -1))[..., :-1]
    mixed = split(jnp.einsum("bhts,bshk->bthk", attended, normed).reshape(B, T, D), P())
    return entropy(w, mixed, mb, split).mean()


def counted(w, x, mb, split):  # finding 9, where all tokens of an update count alike
    return jnp.sum(entropy(w, split(x, TOKENS), mb, whole) * mb["mask"]), mb["mask"].sum().astype(np.float32)


def pipeline_of(head: Callable[..., Any]) -> Pipeline:
    body = Stage(lambda w, x, mb: jnp.tanh(mb["x"] @ w), "body", ipu=0)
    last = Stage(lambda w, x, mb: head(w, x, mb, lax.with_sharding_constraint), "head", ipu=1)
    out = P() if head in (next_two, balanced, counted) else P(None, "tensor")
    specs = {"body": P(), "head": {"out": out, "norm": P(), "sink": P("tensor")}}
    return Pipeline([body, last], mesh=make_mesh(REPLICAS, 2, tensor=2), specs=specs, gradient_accumulation=M)


def dense(weights: Any, head: Callable[..., Any]) -> Any:
    """Return what the head returns of each micro-batch, on one device."""
    micro_batches = {name: leaf.reshape(REPLICAS * M, *leaf.shape[2:]) for name, leaf in BATCH.items()}
    return jax.vmap(lambda mb: head(weights["head"], jnp.tanh(mb["x"] @ weights["body"]), mb, whole))(micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("head", [smoothed, gathered, next_two, balanced, with_heads], ids=lambda head: head.__name__)
def test_a_loss_and_its_gradients_are_those_of_whole_arrays(head: Callable[..., Any]):
    pipeline = pipeline_of(head)
    params = pipeline.shard(WEIGHTS)
    loss, gradients = pipeline.value_and_grad(params, BATCH)
    assert "tensor" in {one.axis for one in pipeline.report(params, BATCH).collectives or ()}
    expected = jax.jit(jax.value_and_grad(lambda w: dense(w, head).mean()))(WEIGHTS)
    jax.tree.map(assert_close, (loss, pipeline.unshard(gradients)), expected)


@pytest.mark.slow
def test_an_update_is_divided_by_all_tokens():
    gradients = jax.jit(jax.grad(lambda w: dense(w, counted)[0].sum() / BATCH["mask"].sum()))(WEIGHTS)
    check_update(counted, TrainOptions(weighted=True), gradients)


@pytest.mark.slow
def test_an_update_is_clipped_by_the_norm_of_whole_arrays():
    gradients = jax.jit(jax.grad(lambda w: dense(w, smoothed).mean()))(WEIGHTS)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradients)))
    assert norm > 0.2, "more than it may be"
    clipped = jax.tree.map(lambda gradient: gradient * (0.1 / norm), gradients)
    check_update(smoothed, TrainOptions(max_gradient_norm=0.1), clipped)


def check_update(head: Callable[..., Any], options: TrainOptions, gradients: Any) -> None:
    step = make_train_step(pipeline_of(head), optax.sgd(1.0), options)
    updated = step.whole(step(step.init(WEIGHTS), BATCH)[0])["params"]
    expected = jax.tree.map(lambda weight, gradient: weight - gradient, WEIGHTS, gradients)
    jax.tree.map(assert_close, updated, expected)

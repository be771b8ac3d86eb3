"""Test that under check_vma=True ops refuse an operand that is whole where it must be split, and the reverse.

Types express what is split over an axis. The ops must look at their own axis only: on a mesh of two axes, operands may
or may not vary over the other one. If such operands were accepted, results would be wrong: a hidden that is split would
be multiplied by the shards of other features, and whole logits taken for shards would be counted n times.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import (
    argmax,
    embedding,
    from_all,
    layer_norm,
    linear_cross_entropy,
    log_softmax,
    log_softmax_cross_entropy,
    matmul,
    reduce_scatter_tokens,
    reduce_to,
    reduce_to_all,
    rms_norm,
    sample,
    scatter_tokens,
    softmax,
    take_along_last_dim,
    tied_projection,
    to_all,
    top_k,
)
from support.harness import on_ipus
from support.refusals import refused

N, D, V = 6, 4, 8
SPLIT, WHOLE, PART = "split", "whole", "part"


def _zeros(*shape):
    return jnp.zeros(shape)


def _ints(*shape):
    return jnp.zeros(shape, jnp.int32)


# For each op: its arguments on each IPU, and which of them must be split over its axis, whole, or part of a sum.
OPS = {
    "embedding": (
        functools.partial(embedding, size=V),
        {"table": (_zeros(V // 2, D), SPLIT), "ids": (_ints(N), WHOLE)},
    ),
    "embedding-scatter": (
        functools.partial(embedding, size=V, reduction="scatter"),
        {"table": (_zeros(V // 2, D), SPLIT), "ids": (_ints(N), WHOLE)},
    ),
    "embedding-features": (
        functools.partial(embedding, size=D, split="features"),
        {"table": (_zeros(V, D // 2), SPLIT), "ids": (_ints(N), WHOLE)},
    ),
    "take_along_last_dim": (
        functools.partial(take_along_last_dim, size=V),
        {"x_shard": (_zeros(N, V // 2), SPLIT), "indices": (_ints(N), WHOLE)},
    ),
    "matmul": (matmul, {"x": (_zeros(N, D), WHOLE), "w": (_zeros(D, V // 2), SPLIT), "bias": (_zeros(V // 2), SPLIT)}),
    "matmul-sized": (
        functools.partial(matmul, size=V),
        {"x": (_zeros(N, D), WHOLE), "w": (_zeros(D, V // 2), SPLIT), "bias": (_zeros(V // 2), SPLIT)},
    ),
    "matmul-tokens": (
        functools.partial(matmul, tokens=N),
        {"x": (_zeros(N // 2, D), SPLIT), "w": (_zeros(D, V // 2), SPLIT), "bias": (_zeros(V // 2), SPLIT)},
    ),
    "matmul-rows": (
        functools.partial(matmul, split="rows"),
        {"x": (_zeros(N, D // 2), SPLIT), "w": (_zeros(D // 2, V), SPLIT), "bias": (_zeros(V), WHOLE)},
    ),
    "matmul-scatter": (
        functools.partial(matmul, split="rows", reduction="scatter"),
        {"x": (_zeros(N, D // 2), SPLIT), "w": (_zeros(D // 2, V), SPLIT), "bias": (_zeros(V), WHOLE)},
    ),
    "tied_projection": (
        functools.partial(tied_projection, size=V),
        {"hidden": (_zeros(N, D), WHOLE), "table": (_zeros(V // 2, D), SPLIT)},
    ),
    "rms_norm": (
        functools.partial(rms_norm, size=D),
        {"x_shard": (_zeros(N, D // 2), SPLIT), "scale_shard": (_zeros(D // 2), SPLIT)},
    ),
    "layer_norm": (
        functools.partial(layer_norm, size=D),
        {
            "x_shard": (_zeros(N, D // 2), SPLIT),
            "scale_shard": (_zeros(D // 2), SPLIT),
            "bias_shard": (_zeros(D // 2), SPLIT),
        },
    ),
    "softmax": (functools.partial(softmax, size=V), {"logits_shard": (_zeros(N, V // 2), SPLIT)}),
    "log_softmax": (functools.partial(log_softmax, size=V), {"logits_shard": (_zeros(N, V // 2), SPLIT)}),
    "argmax": (functools.partial(argmax, size=V), {"x_shard": (_zeros(N, V // 2), SPLIT)}),
    "top_k": (functools.partial(top_k, size=V, k=3), {"x_shard": (_zeros(N, V // 2), SPLIT)}),
    "sample": (
        functools.partial(sample, size=V, top_k=3),
        {
            "key": (jax.random.key(0), WHOLE),
            "logits_shard": (_zeros(N, V // 2), SPLIT),
            "temperature": (_zeros(N), WHOLE),
            "top_p": (_zeros(N), WHOLE),
        },
    ),
    "to_all": (functools.partial(to_all, x=_zeros(N)), {"owner": (_ints(), WHOLE)}),
    "reduce_to": (reduce_to, {"x": (_zeros(N), PART), "owner": (_ints(), WHOLE)}),
    "reduce_to_all": (reduce_to_all, {"x": (_zeros(N), PART)}),
    "reduce_scatter_tokens": (reduce_scatter_tokens, {"x": (_zeros(N), PART)}),
    "scatter_tokens": (scatter_tokens, {"x": (_zeros(N, D), WHOLE)}),
    "from_all": (functools.partial(from_all, dim=1, size=V), {"x_shard": (_zeros(N, V // 2), SPLIT)}),
    "log_softmax_cross_entropy": (
        functools.partial(log_softmax_cross_entropy, size=V),
        {"logits_shard": (_zeros(N, V // 2), SPLIT), "labels": (_ints(N), WHOLE), "weights": (_zeros(N), WHOLE)},
    ),
    "linear_cross_entropy": (
        functools.partial(linear_cross_entropy, size=V),
        {
            "hidden": (_zeros(N, D), WHOLE),
            "table": (_zeros(V // 2, D), SPLIT),
            "labels": (_ints(N), WHOLE),
            "bias": (_zeros(V // 2), SPLIT),
            "weights": (_zeros(N), WHOLE),
        },
    ),
}
ARGUMENTS = [(op, name) for op, (_, arguments) in OPS.items() for name in arguments]


def _trace(op, swapped=None, *, typed=True, others=()):
    """Trace the op with arguments of the right types, except for one."""
    fn, arguments = OPS[op]

    def each_ipu(values):
        given = {}
        for name, (_, kind) in arguments.items():
            over = (("ipu",) if (kind is WHOLE) == (name == swapped) else ()) + tuple(others)
            value = values[name]
            given[name] = jax.lax.pcast(value, over, to="varying") if over and typed else value
        fn(**given)
        return jnp.zeros(())

    values = {name: value for name, (value, _) in arguments.items()}
    jax.eval_shape(on_ipus(each_ipu, 2, P(), P(), typed, replicas=2), values)


@pytest.mark.parametrize(("op", "name"), ARGUMENTS, ids=lambda value: value)
@pytest.mark.parametrize("others", [(), ("data",)], ids=["", "tokens-over-data"])
def test_each_wrong_type_is_told(op, name, others):
    value, kind = OPS[op][1][name]
    holds = {
        WHOLE: (f"{name} varies over axis 'ipu'", "must be the same on all its IPUs", "in_specs that don't name 'ipu'"),
        SPLIT: (f"{name} of shape {value.shape}", "same on all 2 IPUs", "must be split", "in_specs that name 'ipu'"),
        PART: (f"{name} of shape {value.shape}", "same on all 2 IPUs", "no part of a sum", "lax.pcast(x, 'ipu', to="),
    }
    with refused(*holds[kind]):
        _trace(op, name, others=others)


@pytest.mark.parametrize("op", OPS)
def test_the_right_types_are_taken_whatever_varies_over_the_other_axis(op):
    _trace(op)
    _trace(op, others=("data",))


@pytest.mark.parametrize("op", OPS)
def test_where_types_say_nothing_nothing_is_refused(op):
    _trace(op, typed=False)


@pytest.mark.parametrize("op", [softmax, argmax, functools.partial(tied_projection, jnp.ones((2, V)))])
def test_on_one_ipu_the_whole_is_the_shard(op):
    sharded = on_ipus(functools.partial(op, size=N), 1, P(), P("ipu"))
    jax.eval_shape(sharded, jnp.ones((N, V)) if isinstance(op, functools.partial) else jnp.ones((2, N)))

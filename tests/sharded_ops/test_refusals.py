"""Test what the ops refuse when they are traced: the value, the rule and the mend, in one table for all ops."""

import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
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

# what an op gets on each of 2 IPUs
OPERANDS = {
    "x": (jnp.ones((3, 4)), P(None, "ipu")),  # (3, 2), its columns
    "rows": (jnp.ones((4, 4)), P("ipu")),  # (2, 4)
    "scale": (jnp.ones(4), P("ipu")),  # (2,)
    "whole": (jnp.ones((3, 4)), P()),
    "ids": (jnp.zeros(3, jnp.int32), P()),
    "key": (jax.random.key(0), P()),
}


def refusal_of(op: Callable[[Any], Any]) -> str:
    """Return the message of an op on the operands of two IPUs."""
    values, specs = zip(*OPERANDS.values(), strict=True)

    def program(*shards):
        return op(types.SimpleNamespace(**dict(zip(OPERANDS, shards, strict=True))))

    with pytest.raises(ValueError, match=r"\S") as refused:
        on_ipus(program, 2, specs, P())(*values)
    return str(refused.value)


def cross_entropy(o: Any, **options: Any) -> Any:
    given = {"hidden": o.whole, "table": o.rows, "labels": o.ids, "size": 4}
    return linear_cross_entropy(**given | options)


# each op with its arguments, as a function of further ones
OPS: dict[str, Callable[..., Any]] = {
    "softmax": lambda o, size=4, **k: softmax(o.x, size=size, **k),
    "log_softmax": lambda o, size=4, **k: log_softmax(o.x, size=size, **k),
    "rms_norm": lambda o, size=4, **k: rms_norm(o.x, o.scale, size=size, **k),
    "layer_norm": lambda o, size=4, **k: layer_norm(o.x, o.scale, size=size, **k),
    "argmax": lambda o, size=4, **k: argmax(o.x, size=size, **k),
    "top_k": lambda o, size=4, **k: top_k(o.x, 2, size=size, **k),
    "sample": lambda o, size=4, **k: sample(o.key, o.x, size=size, **k),
    "embedding": lambda o, size=4, **k: embedding(o.rows, o.ids, size=size, **k),
    "embedding by features": lambda o, size=4, **k: embedding(o.x, o.ids, size=size, split="features", **k),
    "take_along_last_dim": lambda o, size=4, **k: take_along_last_dim(o.x, o.ids, size=size, **k),
    "tied_projection": lambda o, size=4, **k: tied_projection(o.whole, o.rows, size=size, **k),
    "matmul": lambda o, size=4, **k: matmul(o.whole[:, :3], o.x, size=size, **k),
    "log_softmax_cross_entropy": lambda o, size=4, **k: log_softmax_cross_entropy(o.x, o.ids, size=size, **k),
    "linear_cross_entropy": lambda o, size=4, **k: cross_entropy(o, size=size, **k),
    "from_all": lambda o, size=4, **k: from_all(o.x, 1, size, **k),
}
COLLECTIVES: dict[str, Callable[..., Any]] = {
    "to_all": lambda o, **k: to_all(o.x, 0, **k),
    "reduce_to": lambda o, **k: reduce_to(o.x, 0, **k),
    "reduce_to_all": lambda o, **k: reduce_to_all(o.x, **k),
    "scatter_tokens": lambda o, **k: scatter_tokens(o.whole, **k),
    "reduce_scatter_tokens": lambda o, **k: reduce_scatter_tokens(o.x, **k),
    "debug_sharding": lambda o, **k: debug_sharding(o.x, "x", **k),
}


@pytest.mark.parametrize("name", [*OPS, *COLLECTIVES])
def test_an_axis_of_another_mesh_is_refused(name):
    message = refusal_of(lambda o: (OPS | COLLECTIVES)[name](o, axis="model"))
    assert re.match(r"axis='model' is no axis of an enclosing shard_map: .*give the axis that its mesh has", message)


@pytest.mark.parametrize("name", OPS)
def test_a_size_that_the_shards_do_not_have_is_refused(name):
    message = refusal_of(lambda o: OPS[name](o, size=9))
    assert re.search(r"with 2 rows in dim -?\d, but size=9 over the 2 IPUs of axis 'ipu' takes 5: pad", message)
    assert re.search(r"Split\(size=9, parts=2\)\.pad\(array, -?\d\) and shard it with in_specs=Split", message)
    for size in (0, -4):
        message = refusal_of(lambda o, size=size: OPS[name](o, size=size))
        assert re.search(rf"size={size} is out of range: give an int of at least 1", message)


INTEGERS: dict[str, Callable[[Any], Any]] = {
    "logits must be floating": lambda o: softmax(o.x.astype(int), size=4),
    "dtype int32, but logits must be floating": lambda o: sample(o.key, o.x.astype(int), size=4),
    "logits_shard .* logits must be floating": lambda o: log_softmax_cross_entropy(o.x.astype(int), o.ids, size=4),
    "norms take floating arrays": lambda o: rms_norm(o.x.astype(int), o.scale, size=4),
    "bias_shard has dtype int32, but norms take": lambda o: layer_norm(o.x, o.scale, o.scale.astype(int), size=4),
    "x has dtype int32, but matmul takes floating": lambda o: matmul(o.whole.astype(int), o.x[:1].repeat(4, 0)),
    "bias has dtype int32, but matmul": lambda o: matmul(o.whole, o.rows.T, bias=jnp.ones(2, int)),
}
VARYING: dict[str, Callable[[Any], Any]] = {
    "ids": lambda o: embedding(o.rows, o.ids + lax.axis_index("ipu"), size=4),
    "indices": lambda o: take_along_last_dim(o.x, o.ids + lax.axis_index("ipu"), size=4),
    "key": lambda o: sample(jax.random.fold_in(o.key, lax.axis_index("ipu")), o.x, size=4),
    "temperature": lambda o: sample(o.key, o.x, size=4, temperature=1.0 + lax.axis_index("ipu")),
    "owner": lambda o: to_all(o.x, lax.axis_index("ipu")),
    "x": lambda o: scatter_tokens(o.x),
    "labels": lambda o: log_softmax_cross_entropy(o.x, o.ids + lax.axis_index("ipu"), size=4),
    "weights": lambda o: log_softmax_cross_entropy(o.x, o.ids, size=4, weights=o.x[:, 0]),
}


@pytest.mark.parametrize("rule", INTEGERS)
def test_integers_are_refused(rule):
    assert re.search(rf"{rule}.*convert (it|them)", message := refusal_of(INTEGERS[rule])), message
    assert "dtype int32" in message


@pytest.mark.parametrize("name", VARYING)
def test_what_differs_between_ipus_and_must_not_is_refused(name):
    message = refusal_of(VARYING[name])
    assert message.startswith(f"{name} varies over axis 'ipu', but must be the same on all its IPUs: bring it in")


FORWARD: Any = {"gradients": "forward", "reduction": "mean"}
FLOATS = np.ones((3, 2), np.float32)
# op | the value and the words of the rule, and of the mend
REFUSED: list[tuple[Callable[[Any], Any], str, str]] = [
    (lambda o: log_softmax(o.x[0, 0], size=4), "shape () on each IPU, without a dim -1", "give an array that has one"),
    # embedding
    (lambda o: embedding(o.rows, o.ids * 1.0, size=4), "ids has dtype float32", "use int32"),
    (lambda o: embedding(o.rows[..., None], o.ids, size=4), "(2, 4, 1) on each IPU, but must have 2", "reshape"),
    (lambda o: _any(embedding)(o.rows, o.ids, size=4, split="columns"), "split='columns'", "use 'rows' or 'features'"),
    (lambda o: _any(embedding)(o.rows, o.ids, size=4, reduction="mean"), "reduction='mean'", "use 'sum' or 'scatter'"),
    (
        lambda o: embedding(o.x, o.ids, size=4, split="features", reduction="scatter"),
        "split='features' sums nothing",
        "use split='rows', or from_all and then scatter_tokens",
    ),
    (lambda o: embedding(o.rows, o.ids[0], size=4, reduction="scatter"), "ids has shape ()", "reduction='sum'"),
    (lambda o: take_along_last_dim(o.x, o.ids[:2], size=4), "(2,), but a shard of shape (3, 2)", "give shape (3,)"),
    (lambda o: take_along_last_dim(o.x, o.ids == 0, size=4), "indices has dtype bool", "use int32"),
    # matmul
    (lambda o: _any(matmul)(o.whole, o.rows.T, split="cols"), "split='cols'", "use 'columns' or 'rows'"),
    (lambda o: matmul(o.whole[:, :3], o.rows.T), "(3, 3) and w of shape (4, 2) on each IPU", "(split='rows')"),
    (lambda o: matmul(o.whole[0, 0], o.rows.T), "x of shape ()", "reshape them to (.., D) and (D, V)"),
    (lambda o: _any(matmul)(o.whole, o.rows.T, reduction="mean"), "reduction='mean'", "use 'sum' or 'scatter'"),
    (lambda o: matmul(o.whole, o.rows.T, reduction="scatter"), "split='columns' sums nothing", "use split='rows'"),
    (lambda o: matmul(o.whole, o.rows.T, split="rows", tokens=6), "tokens=6 gathers", "use split='columns'"),
    (
        lambda o: matmul(o.whole[0], o.rows.T, split="rows", reduction="scatter"),
        "x has shape (4,), without a dim of tokens",
        "give (N, .., D)",
    ),
    (lambda o: matmul(o.whole, o.rows.T, tokens=7), "with 3 rows in dim 0, but tokens=7", "Split(size=7, parts=2)"),
    (lambda o: matmul(o.whole, o.rows.T, bias=jnp.ones(6)), "bias of shape (6,)", "for each of its 2 col"),
    # norms
    (lambda o: rms_norm(o.x, o.scale[None], size=4), "scale_shard has shape (1, 2)", "one value for each column"),
    (lambda o: layer_norm(o.x, o.scale[:1], size=4), "scale_shard has shape (1,)", "Split(size=4, parts=2)"),
    (lambda o: layer_norm(o.x, o.scale, size=4, epsilon=-1e-5), "epsilon=-1e-05", "a finite number of at least 0"),
    # choice and sampling
    (lambda o: argmax(o.x.astype(jnp.complex64), size=4), "complex64, which has no order", "give real numbers"),
    (lambda o: sample(o.key, o.x, size=4, top_k=5), "top_k=5", "give an int from 1 to 4, or None for all"),
    (lambda o: sample(jax.random.key_data(o.key), o.x, size=4), "key has dtype uint32", "jax.random.key(seed)"),
    (lambda o: _any(sample)(0, o.x, size=4), "key=0 is not one typed key", "jax.random.key(seed)"),
    (lambda o: sample(jax.random.split(o.key, 3), o.x, size=4), "key<fry> and shape (3,)", "jax.random.key(seed)"),
    *(
        (
            lambda o, t=t: sample(o.key, o.x, size=4, temperature=t),
            f"temperature={shown}",
            "a finite number, at least 0",
        )
        for t, shown in ((-1, "-1"), (np.array([1, 2, np.inf]), "inf"), (np.nan, "nan"))
    ),
    (
        lambda o: sample(o.key, o.x, size=4, temperature=jnp.ones((3, 1)) * o.whole[0, 0]),
        "temperature has shape (3, 1)",
        "give shape () or (3,)",
    ),
    *(
        (lambda o, p=p: sample(o.key, o.x, size=4, top_k=2, top_p=p), f"top_p={p}", "more than 0, at most 1")
        for p in (0.0, 1.5)
    ),
    # collectives
    (lambda o: to_all(o.x, 2), "owner=2 names no IPU of axis 'ipu', which has 2", "give 0 to 1"),
    (lambda o: reduce_to(o.x, -1), "owner=-1 names no IPU", "give 0 to 1"),
    (lambda o: from_all(o.x, 2, 4), "(3, 2) on each IPU, without a dim 2", "give an array that has one"),
    (lambda o: reduce_to_all(o.whole), "(3, 4) is the same on all 2 IPUs", "lax.pcast(x, 'ipu', to='varying')"),
    (lambda o: reduce_scatter_tokens(o.whole), "(3, 4) is the same on all", "lax.pcast(x, 'ipu', to='varying')"),
    (lambda o: reduce_scatter_tokens(o.x, dim=2), "without a dim 2 to scatter", "give an array that has one"),
    (lambda o: scatter_tokens(o.whole, dim=-3), "without a dim -3 to scatter", "give an array that has one"),
    (lambda o: debug_sharding(o.x * 1j, "z"), "z has dtype complex64", "such as x.real and x.imag"),
    (lambda o: debug_sharding(o.key, "key"), "key<fry>, which has no least", "or jax.random.key_data(x)"),
    # losses
    (lambda o: cross_entropy(o, gradients="forward"), "gradients='forward'", "reduction='mean' or 'sum'"),
    (
        lambda o: cross_entropy(o, hidden=o.whole[:, :2]),
        "(3, 2) and table of shape (2, 4)",
        "give (.., D) and (rows, D)",
    ),
    (lambda o: cross_entropy(o, hidden=o.whole.astype("bfloat16")), "bfloat16 and table float32", "convert one"),
    (lambda o: cross_entropy(o, labels=np.zeros((3, 4), int)), "labels has shape (3, 4)", "give shape (3,)"),
    (lambda o: cross_entropy(o, labels=o.ids == 0), "labels has dtype bool", "use int32"),
    (lambda o: cross_entropy(o, weights=np.ones(4)), "weights has shape (4,)", "give shape (3,)"),
    (lambda o: cross_entropy(o, bias=o.x[:2, :1]), "float32 and shape (2, 1)", "a floating array of 1 dim"),
    (lambda o: cross_entropy(o, bias=o.scale.astype(int)), "int32 and shape (2,)", "a floating array of 1 dim"),
    (lambda o: cross_entropy(o, **FORWARD, return_log_sum_exp=True), "log-sum-exp is known", "gradients='backward'"),
    (lambda o: cross_entropy(o, **FORWARD, labels=FLOATS), "as large as the logits", "gradients='backward'"),
    (lambda o: cross_entropy(o, labels=np.ones((3, 4), np.float32)), "soft targets, of shape (3, 4)", "split them as"),
    (lambda o: cross_entropy(o, labels=FLOATS, ignore_index=0), "ignore_index=0", "a weight of 0"),
    (
        lambda o: cross_entropy(o, tokens=3, hidden=o.whole[0], labels=np.int32(0)),
        "(4,), without a dim of tokens that is scattered",
        "give (N, .., D)",
    ),
    (lambda o: cross_entropy(o, tokens=2.0), "tokens=2.0 is not an int", "or None if all IPUs hold hidden"),
]


def _any(op: Any) -> Any:
    """Return an op whose arguments no type checker looks at."""
    return op


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_wrong_call_is_refused(case):
    op, rule, mend = REFUSED[case]
    message = refusal_of(op)
    assert rule in message, message
    assert mend in message[message.index(rule) + len(rule) :], message

"""Test that the head of a function is found and put on all IPUs, and that the function stays the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec as P

from ipu_jax import make_mesh
from ipu_jax.base.jaxprs import all_equations, part_of
from ipu_jax.core.cutting.concurrent_head import with_concurrent_head
from ipu_jax.core.cutting.everywhere import is_everywhere
from ipu_jax.core.cutting.trace import trace_of
from support.dense import largest_relative_error
from support.inputs import normal

from .tails import LABELS, TABLE, TOKENS, B, D, T, V

IPUS = 3
LAYER, BIAS, MATRIX, VALUE = normal([(D, D), (V,), (D, V), (D, 1)], seed=5)
MICROBATCH = {"tokens": TOKENS, "targets": LABELS}
cross_entropy: Any = optax.softmax_cross_entropy_with_integer_labels


class Case(NamedTuple):
    """A function whose head is put on all IPUs.

    Attributes:
        loss: of weights and micro-batch.
        params: the weights.
        split: per leaf that lies split, the dim; leaves that are read whole are not among them.
        operations: how many operations on all IPUs it has.
        fused: whether it has a cross-entropy that needs no logits.
        tolerances: the largest relative errors of its results, and of its gradients.
    """

    loss: Callable[[Any, Any], Any]
    params: dict[str, Any]
    split: dict[str, int]
    operations: int = 2
    fused: bool = True
    tolerances: tuple[float, float] = (2e-6, 2e-6)


FAST = (
    *("tied", "with a bias", "with a mask by weights", "with a temperature", "picked", "one_hot", "each loss"),
    *("ignored", "weighted", "times the bias", "chunks", "checkpointed", "next two", "decayed", "aux"),
    *("one_hot look-up", "look-up per token", "towers"),
)


def body(p, mb):
    return jnp.tanh(p["table"][mb["tokens"]] @ p["layer"])


def of_logits(loss, **more):
    """Return a case whose logits are a product with a matrix that is not the table of tokens."""
    return Case(
        lambda p, mb: loss(body(p, mb) @ p["out"], mb["targets"], p),
        {"table": TABLE, "layer": LAYER, "out": MATRIX, **more},
        {"table": 0, "out": 1},
    )


def chunks(p, mb):
    losses = jax.lax.map(lambda of: cross_entropy(of[0] @ p["table"].T, of[1]), (body(p, mb), mb["targets"]))
    return losses.mean()


def checkpointed(p, mb):
    return jax.checkpoint(lambda h, table: cross_entropy(h @ table.T, mb["targets"]).mean())(body(p, mb), p["table"])


def actor_and_critic(p, mb):
    h = body(p, mb)
    value = (h @ p["value"])[..., 0]
    return (cross_entropy(h @ p["out"], mb["targets"]) * value).mean() + (value**2).mean()


def next_two(p, mb):
    h = body(p, mb)
    return sum(cross_entropy((h * k) @ p["table"].T, mb["targets"]).mean() for k in (1.0, 0.5))


def decayed(p, mb):
    return cross_entropy(body(p, mb) @ p["table"].T, mb["targets"]).mean() + sum((w**2).sum() for w in p.values())


def towers(p, mb):
    one, other = (jnp.tanh(p["table"][mb[name]].mean(1) @ p["layers"][k]) for k, name in enumerate(MICROBATCH))
    return cross_entropy(one @ p["layer"] @ other.T, jnp.arange(B)).mean()


def low_rank(p, mb):
    matrix = p["out"] + p["left"] @ p["right"]
    return cross_entropy(body(p, mb) @ matrix, mb["targets"]).mean()


def half(p, mb):
    p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    return cross_entropy((body(p, mb) @ p["table"].T).astype(jnp.float32), mb["targets"]).mean()


def with_aux(p, mb):
    logits = body(p, mb) @ p["table"].T
    return cross_entropy(logits, mb["targets"]).mean(), {"right": (logits.argmax(-1) == mb["targets"]).mean()}


TIED = {"table": TABLE, "layer": LAYER}
CASES = {
    "tied": Case(lambda p, mb: cross_entropy(body(p, mb) @ p["table"].T, mb["targets"]).mean(), TIED, {"table": 0}),
    "untied": of_logits(lambda z, y, _: cross_entropy(z, y).mean()),
    "with a bias": of_logits(lambda z, y, p: cross_entropy(z + p["bias"], y).mean(), bias=BIAS)._replace(
        split={"table": 0, "out": 1, "bias": 0}
    ),
    "with a mask by weights": of_logits(
        lambda z, y, p: (cross_entropy(z, y) * jax.nn.sigmoid(p["bias"])[y]).mean(), bias=BIAS
    )._replace(split={"table": 0, "out": 1, "bias": 0}, operations=3),
    "with a temperature": of_logits(
        lambda z, y, p: cross_entropy(z * jnp.exp(p["t"]), y).mean(), t=jnp.array(0.1)
    )._replace(fused=False),
    "picked": of_logits(lambda z, y, _: -jnp.take_along_axis(jax.nn.log_softmax(z), y[..., None], -1).mean()),
    "picked of flat": of_logits(
        lambda z, y, _: -jnp.take_along_axis(jax.nn.log_softmax(z.reshape(-1, V)), y.reshape(-1)[:, None], -1).sum()
    ),
    "log-sum-exp": of_logits(
        lambda z, y, _: (jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, y[..., None], -1).squeeze(-1)).mean()
    ),
    "one_hot": of_logits(lambda z, y, _: -(jax.nn.log_softmax(z) * jax.nn.one_hot(y, V)).sum(-1).mean()),
    "one_hot out of range": of_logits(
        lambda z, y, _: -(jax.nn.one_hot(2 * y - V, V) * jax.nn.log_softmax(z)).sum(-1).mean()
    ),
    "each loss": of_logits(lambda z, y, _: jnp.sqrt(cross_entropy(z, y)).mean()),
    "weighted": of_logits(lambda z, y, _: (cross_entropy(z, y) * (y % 3)).sum() / (y % 3).sum()),
    "ignored": of_logits(
        lambda z, y, _: jnp.where(y % 3 == 0, 0.0, cross_entropy(z, jnp.where(y % 3 == 0, V, y))).sum()
    ),
    "ignored, each": of_logits(
        lambda z, y, _: jnp.sqrt(jnp.where(y % 3 == 0, 1.0, cross_entropy(z, jnp.where(y % 3 == 0, V, y)))).sum()
    ),
    "counted": of_logits(lambda z, y, _: jnp.where(y % 3 > 0, cross_entropy(z, y - V), 0).mean()),
    "smoothed": of_logits(
        lambda z, y, _: optax.softmax_cross_entropy(z, optax.smooth_labels(jax.nn.one_hot(y, V), 0.1)).mean()
    )._replace(fused=False),
    "times a sum of logits' columns": of_logits(
        lambda z, y, _: (cross_entropy(z, y)[..., None] * jnp.ones(V) * z**2).mean()
    )._replace(fused=False),
    "times the bias": of_logits(
        lambda z, y, p: (cross_entropy(z, y)[..., None] * p["bias"] ** 2).mean(), bias=BIAS
    )._replace(split={"table": 0, "out": 1, "bias": 0}, fused=False),
    "with a cumulative sum": of_logits(lambda z, y, p: cross_entropy(z + jnp.cumsum(p["bias"]), y).mean(), bias=BIAS),
    "chunks": Case(chunks, TIED, {"table": 0}, fused=False),
    "checkpointed": Case(checkpointed, TIED, {"table": 0}),
    "actor and critic": Case(
        actor_and_critic, {"table": TABLE, "layer": LAYER, "out": MATRIX, "value": VALUE}, {"table": 0, "out": 1}
    ),
    "next two": Case(next_two, TIED, {"table": 0}),
    "decayed": Case(decayed, TIED, {"table": 0}),
    "towers": Case(
        towers,
        {"table": TABLE[:D], "layer": LAYER, "layers": jnp.stack([LAYER, LAYER.T])},
        {"table": 0, "layer": 1},
        3,
        fused=False,
    ),
    "low rank": Case(
        low_rank,
        {"table": TABLE, "layer": LAYER, "out": MATRIX, "left": MATRIX[:, :2], "right": MATRIX[:2]},
        {"table": 0, "out": 1, "right": 1},
    ),
    "half": Case(half, TIED, {"table": 0}, tolerances=(1e-2, 3e-2)),
    "aux": Case(with_aux, TIED, {"table": 0}, fused=False),
    "one_hot look-up": Case(
        lambda p, mb: cross_entropy(
            jnp.tanh(jax.nn.one_hot(mb["tokens"], V) @ p["table"] @ p["layer"]) @ p["table"].T, mb["targets"]
        ).mean(),
        TIED,
        {"table": 0},
    ),
    "look-up per token": Case(  # as in Equinox: the gather keeps the dim of the rows, with size 1
        lambda p, mb: cross_entropy(
            jnp.tanh(jax.vmap(jax.vmap(lambda token: p["table"][token]))(mb["tokens"]) @ p["layer"]) @ p["table"].T,
            mb["targets"],
        ).mean(),
        TIED,
        {"table": 0},
    ),
    "no look-up": Case(
        lambda p, mb: ((jnp.cos(mb["tokens"][..., None] + jnp.arange(D)) @ p["layer"]) ** 2).sum(),
        {"layer": LAYER},
        {"layer": 1},
        operations=1,
        fused=False,
    ),
}


def on_ipus(trace, params):
    """Return the results of a trace's operations and their gradients, computed on all IPUs from whole weights."""
    inputs = [*trace.params, *trace.batch, *trace.constants]
    closed = part_of(trace.closed, inputs, trace.operations, trace.results)
    leaves, tree = jax.tree.flatten(params)

    def loss(*leaves):
        loss, *aux = core.jaxpr_as_fun(closed)(*leaves, *jax.tree.leaves(MICROBATCH), *trace.constants.values())
        return loss, aux

    def value_and_grad(*leaves):
        value, vjp, aux = jax.vjp(loss, *leaves, has_aux=True)
        return value, aux, jax.lax.psum(vjp(jnp.ones_like(value) / IPUS), "ipu")

    mapped = jax.shard_map(value_and_grad, mesh=make_mesh(1, IPUS), in_specs=P(), out_specs=P(), check_vma=False)
    value, aux, gradients = jax.jit(mapped)(*leaves)
    return value, aux, jax.tree.unflatten(tree, gradients)


@pytest.mark.fast(*FAST)
@pytest.mark.parametrize("name", CASES)
def test_the_head_is_on_all_ipus_and_the_function_is_the_same(name):
    case = CASES[name]

    def loss(params, _state, mb, _key):
        found = case.loss(params, mb)
        return (*found, None) if isinstance(found, tuple) else (found, None, None)

    dense, _ = trace_of(loss, case.params, None, MICROBATCH, None)
    trace = with_concurrent_head(dense, IPUS)
    expected = jax.jit(jax.value_and_grad(lambda p: loss(p, None, MICROBATCH, None)[:2], has_aux=True))(case.params)
    value, aux, gradients = on_ipus(trace, case.params)
    results = ((value, aux), gradients), ((expected[0][0], jax.tree.leaves(expected[0][1])), expected[1])
    for (found, dense), bound in zip(zip(*results, strict=True), case.tolerances, strict=True):
        assert largest_relative_error(found, dense) < bound
    on_all = [op for op in trace.operations if is_everywhere(op)]
    assert len(on_all) == case.operations
    leaf_of = dict(zip(trace.params, sorted(case.params), strict=True))
    pads = [op for op in trace.operations if not is_everywhere(op) and op.primitive.name == "pad"]
    leaf_of |= {op.outvars[0]: leaf_of[op.invars[0]] for op in pads if op.invars[0] in leaf_of}
    operands = [pair for op in on_all for pair in zip(op.invars, op.params["split_dims"], strict=True)]
    assert {leaf_of[v]: dim for v, dim in operands if dim is not None} == case.split
    inside = [eqn for op in on_all for eqn in all_equations(op.params["jaxpr"].jaxpr)]
    own_backward = ("custom_vjp_call", "call_hi_primitive")  # since jax 0.12
    assert any(eqn.primitive.name in own_backward for eqn in inside) == case.fused
    gathered = [v.aval.size for eqn in inside if eqn.primitive.name == "all_gather" for v in eqn.outvars]
    assert max(gathered, default=0) < B * T * V


def test_a_function_without_a_product_is_refused():
    trace, _ = trace_of(lambda p, *_: (p["w"].sum(), None, None), {"w": TABLE}, None, MICROBATCH, None)
    with pytest.raises(ValueError, match=r"head='concurrent'.*no product.*leave head= out"):
        with_concurrent_head(trace, IPUS)

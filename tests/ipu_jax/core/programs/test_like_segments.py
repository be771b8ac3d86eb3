"""Test that like segments are traced once, by hand and cut, and unlike ones apart: rules of derivatives count."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Outputs, Pipeline, Stage
from ipu_jax.core.programs import like_segments
from support.against_plain import assert_equals_plain

IPUS, M, N, D = 4, 3, 2, 6


def plain_sine(factor: float) -> Callable[[Any], Any]:
    return lambda x: jnp.sin(x) * (1 if factor == 1 else factor)


def sine_of_tangents(factor: float) -> Callable[[Any], Any]:
    """Return a sine whose derivative is `factor` times its own."""
    sine = jax.custom_jvp(lambda x: jnp.sin(x))
    sine.defjvp(lambda primals, tangents: (jnp.sin(*primals), factor * jnp.cos(*primals) * tangents[0]))
    return sine


def sine_of_cotangents(factor: float) -> Callable[[Any], Any]:
    sine = jax.custom_vjp(lambda x: jnp.sin(x))
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (factor * jnp.cos(x) * ct,))
    return sine


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the segments that are traced with their derivatives."""
    names, own = list[str](), like_segments.trace_segment

    def trace_segment(segment: Any, *args: Any, **options: Any) -> Any:
        names.append(segment.name)
        return own(segment, *args, **options)

    monkeypatch.setattr(like_segments, "trace_segment", trace_segment)
    return names


def weights_and_batch(ipus: int) -> tuple[list[Any], Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return [{"w": normal(D, D), "gain": normal(D)} for _ in range(ipus)], normal(M, N, D)


def layer(act: Callable[[Any], Any], w: Any, x: Any) -> Any:
    return x + act(x @ w["w"]) * w["gain"]


@pytest.mark.parametrize(
    ("make", "factors", "count"),
    [
        (plain_sine, (1, 1, 1, 1), 3),
        (plain_sine, (1, 1, 2, 1), 4),
        (sine_of_tangents, (1, 1, 1, 1), 3),
        (sine_of_tangents, (1, 1, 2, 1), 4),
        (sine_of_cotangents, (1, 1, 2, 1), 4),
    ],
    ids=["like", "unlike", "like rules", "unlike rules", "unlike rules of cotangents"],
)
def test_blocks_by_hand_are_traced_once_if_their_derivatives_are_equal_too(make, factors, count, traced):
    weights, batch = weights_and_batch(IPUS)
    acts = [make(factor) for factor in factors]

    def block(i: int) -> Callable[..., Any]:
        def fn(w: Any, x: Any, mb: Any) -> Any:
            y = layer(acts[i], w, mb if x is None else x)
            return jnp.mean(y**2) if i == IPUS - 1 else y

        return fn

    pipeline = Pipeline([Stage(block(i), f"p{i}", i) for i in range(IPUS)], schedule="1f1b", gradient_accumulation=M)
    params = {f"p{i}": w for i, w in enumerate(weights)}

    def loss(params: Any) -> Any:
        x = batch
        for i in range(IPUS):
            x = layer(acts[i], params[f"p{i}"], x)
        return jnp.mean(x**2)

    assert_equals_plain(pipeline, params, batch, loss)
    assert len(traced) == count


def test_layers_of_a_cut_function_are_traced_once(traced):
    ipus = 6
    weights, batch = weights_and_batch(ipus)

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = layer(jax.nn.softplus, w, x)  # it has a rule of its own for tangents
        return jnp.mean(x**2)

    pipeline = Pipeline.from_function(loss, weights, batch[0], ipus=ipus, gradient_accumulation=M)
    assert_equals_plain(pipeline, weights, batch, lambda w: jnp.mean(jnp.stack([loss(w, x) for x in batch])))
    assert len(traced) == 3  # the first takes the micro-batch, the last returns the loss


def test_like_stages_in_two_rounds_keep_their_own_state_and_aux(traced):
    weights, batch = weights_and_batch(6)

    def block(w: Any, x: Any, mb: Any, *, state: Any) -> Outputs:
        y = layer(jnp.sin, w, mb if x is None else x)
        return Outputs(y, state={"total": state["total"] + y.sum()}, aux=y.mean())

    last = lambda w, x, mb: jnp.mean(layer(jnp.sin, w, x) ** 2)
    names = [f"p{i}" for i in range(6)]
    # names in another order than the stages'
    stages = [Stage(block, name, i % 3, state=f"s{9 - i}") for i, name in enumerate(names[:5])]
    pipeline = Pipeline([*stages, Stage(last, "p5", 2)], schedule="looped", gradient_accumulation=M)
    state = {f"s{9 - i}": {"total": np.float32(i)} for i in range(5)}
    params = pipeline.shard(dict(zip(names, weights, strict=True)))
    (_, aux), _, new = pipeline.value_and_grad(params, batch, state=pipeline.shard_state(state))
    x, means = batch, {}
    for i, w in enumerate(weights[:5]):
        x = layer(jnp.sin, w, x)
        state[f"s{9 - i}"]["total"] += x.sum()
        means[names[i]] = x.mean((1, 2))
    for found, expected in ((aux, means), (pipeline.unshard(new), state)):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), found, expected)
    assert traced == ["p0", "p1", "p5"]

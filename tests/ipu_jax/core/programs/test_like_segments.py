"""Test that like segments are traced once, by hand and cut, and unlike ones apart: rules of derivatives count."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage
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

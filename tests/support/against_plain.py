"""Compare a pipeline's step with plain jax; and what such tests share: NaN in bubbles, and stages at places."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage
from ipu_jax.core.engine import _carry
from support.dense import Model, largest_relative_error


@pytest.fixture(autouse=True)
def bubbles_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what idle IPUs compute with NaN, in every test of a file that imports this."""
    monkeypatch.setattr(_carry, "IDLE_FILL", float("nan"))


def stages_at(
    places: Sequence[int | None], fns: Sequence[Callable[..., Any]], groups: Sequence[str] = (), **options: Any
) -> tuple[list[Stage], dict[str, PartitionSpec]]:
    """Return stages with the groups p0, p1, ... or those given, and the specs of those at None, the concurrent ones."""
    groups = groups or [f"p{i}" for i in range(len(places))]
    stages = [
        Stage(fn, params=group, ipu=ALL_IPUS if place is None else place, **options)
        for fn, group, place in zip(fns, groups, places, strict=True)
    ]
    return stages, {group: PartitionSpec() for group, place in zip(groups, places, strict=True) if place is None}


def assert_equals_plain(
    pipeline: Pipeline,
    params: Any,
    batch: Any,
    plain: Callable[[Any], Any],
    *,
    key: Any = None,
    scale: float = 1,
    rtol: float = 1e-5,
) -> Any:
    """Compare loss and gradients of a step with those of `plain(params)`, the mean loss of the batch; return the loss.

    Args:
        pipeline: the pipeline, whose aux, if it has one, is not compared.
        params: whole weights.
        batch: the batch.
        plain: a function of whole weights in plain jax.
        key: the step's random key, if it takes one.
        scale: how many times `plain`'s gradients the pipeline's are.
        rtol: the relative tolerance.
    """
    value, gradients = pipeline.value_and_grad(pipeline.shard(params), batch, key=key)
    loss = value[0] if isinstance(value, tuple) else value
    expected_loss, expected = jax.jit(jax.value_and_grad(plain))(params)
    assert largest_relative_error(loss, expected_loss) < rtol
    found = pipeline.unshard(gradients)
    assert largest_relative_error(found, jax.tree.map(lambda gradient: scale * gradient, expected)) < rtol
    return expected_loss


def assert_equals_its_twin(model: Model, ipus: int, options: dict[str, Any], rtol: float = 1e-5) -> Pipeline:
    """Compare a step of a pipeline of the model with the model's dense twin, and return the pipeline."""
    pipeline = model.pipeline(ipus, **options)
    loss, gradients = pipeline.value_and_grad(pipeline.shard(model.params), model.batch)
    expected_loss, expected = model.twin(pipeline.options.reduction)
    assert largest_relative_error(loss, expected_loss) < rtol
    found = pipeline.unshard(gradients)
    assert largest_relative_error(found, expected) < rtol
    assert jax.tree.map(lambda g: g.dtype, found) == jax.tree.map(lambda w: w.dtype, model.params)
    return pipeline

"""Test functions that are cut after given numbers of layers: marked ones, named ones, and iterations of a scan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from ipu_jax import Pipeline, everywhere, stage_end, verify
from support.refusals import refusals, refused

LAYERS, D = 7, 4
PARAMS = {"first": np.eye(D, dtype=np.float32), "layers": np.stack([np.eye(D, dtype=np.float32)] * LAYERS) / 2}
LISTED = {"first": PARAMS["first"], "layers": [*PARAMS["layers"]]}
X = np.random.default_rng(0).normal(size=(2, 3, D)).astype(np.float32)


def scanned(params: Any, x: Any) -> Any:
    y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), x @ params["first"], params["layers"])
    return jnp.mean(y**2)


def listed(params: Any, x: Any, mark: Any = stage_end, head: Any = jnp.mean) -> Any:
    x = x @ params["first"]
    for w in params["layers"]:
        x = mark(x + jnp.tanh(x @ w))
    return head(x**2)


def named(params: Any, x: Any) -> Any:
    return listed(params, x, mark=lambda x: checkpoint_name(x, "block"))


def in_scopes(params: Any, x: Any) -> Any:
    """Each layer is in the scope "block", and also names a value "block" before its end."""
    x = x @ params["first"]
    for w in params["layers"]:
        with jax.named_scope("block"):
            x = x + checkpoint_name(jnp.tanh(x @ w), "block")
    return jnp.mean(x**2)


def with_a_concurrent_head(params: Any, x: Any) -> Any:
    return listed(params, x, head=lambda x: jnp.mean(everywhere(jnp.sin, in_specs=P())(x)))


def cut(loss: Any = listed, params: Any = LISTED, **how: Any) -> Any:
    options: Any = {"ipus": 2, "gradient_accumulation": 2} | how
    return lambda: Pipeline.from_function(loss, params, X[0], **options)


def layers_on(pipeline: Pipeline) -> list[int]:
    """Return how many layers the IPUs hold."""
    assert pipeline.function is not None
    counts = [0] * pipeline.ipus
    for stage in pipeline.stages:
        for leaf in pipeline.function.weights.group(stage.params).leaves if stage.params else ():
            if "first" not in leaf.path:
                counts[stage.place or 0] += leaf.shape[0] if len(leaf.shape) == 3 else 1
    return counts


@pytest.mark.parametrize(
    ("layers_per_ipu", "ipus", "counts"),
    [
        ([2, 5], 2, [2, 5]),
        (np.array([6, 1]), 2, [6, 1]),
        ([-1, -1], 2, [3, 4]),
        ((1, 2, -1, -1), 4, [1, 2, 2, 2]),
        ([-1, 1, -1, 1], 4, [2, 1, 3, 1]),
        ([-1, -1, -1], 3, [2, 2, 3]),  # the last gets the whole remainder, as in optimum-graphcore
        ([-1], 1, [7]),
    ],
)
@pytest.mark.parametrize(("loss", "params"), [(listed, LISTED), (scanned, PARAMS)], ids=["listed", "scanned"])
def test_each_ipu_gets_its_number_of_layers(loss, params, layers_per_ipu, ipus, counts):
    pipeline = cut(loss, params, ipus=ipus, layers_per_ipu=layers_per_ipu)()
    assert layers_on(pipeline) == counts
    assert [stage.ipu for stage in pipeline.stages] == [*range(ipus)]


def test_named_layers_may_lie_before_a_part_on_all_ipus():
    for loss in (named, in_scopes):
        assert layers_on(cut(loss, cuts=["block"], layers_per_ipu=[5, 2])()) == [5, 2]
    pipeline = cut(with_a_concurrent_head, layers_per_ipu=[5, 2])()
    assert layers_on(pipeline) == [5, 2]
    verify(pipeline, pipeline.shard(LISTED), X)


@refusals(
    *(
        (cut(layers_per_ipu=wrong), f"layers_per_ipu={wrong!r} does not give numbers of layers for 2", "1, or -1")
        for wrong in ([7], [1, 2, 4], [0, 7], [-2, 7], [2.0, 5], [True, 6], "25", 7)
    ),
    *(
        (
            cut(layers_per_ipu=wrong),
            f"layers_per_ipu={wrong!r} cannot place the 7 layers",
            "add up to 7",
            "stage_end(x)",
        )
        for wrong in ([2, 2], [5, 5], [7, -1], [8, -1])
    ),
    (
        cut(lambda p, x: jnp.mean(x @ p), np.eye(D), layers_per_ipu=[1, 1]),
        "the 0 layers",
        "or is an iteration of a scan",
    ),
    (cut(schedule="looped", layers_per_ipu=[2, 5]), "the schedule has 4 stages on 2 IPUs", "'grouped' or '1f1b'"),
)
def test_numbers_that_do_not_fit_are_refused(call, holds):
    with refused(*holds):
        call()

"""Measure whether the staged scan of equal stages costs more than its bubble.

Eight relu layers of 1024x1024 in 2 stages on 2 virtual IPUs, with 16 micro-batches of 64 rows, are compared with the
unsharded jitted scan in the same process. (`rivals.py` compares the same model with other pipelines, and
`growth.py` measures compile time.)

    python benchmarks/pipeline.py [--check]
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from figures import Figures, largest_relative_difference, scanned, side_by_side, temporary_bytes
from ipu_jax import Pipeline, Stage, configure

WIDTH, ROWS, LAYERS, STAGES = 1024, 64, 8, 2


def layers(weights: Any, x: Any, microbatch: Any) -> Any:
    x = microbatch["x"] if x is None else x
    for w in weights:
        x = jax.nn.relu(x @ w)
    return x


def layers_and_loss(weights: Any, x: Any, microbatch: Any) -> Any:
    return jnp.mean((layers(weights, x, microbatch) - microbatch["y"]) ** 2)


def model() -> dict[str, list[jax.Array]]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5 for key in keys]
    return {"first": weights[: LAYERS // 2], "second": weights[LAYERS // 2 :]}


def batch_of(micro_batches: int) -> dict[str, jax.Array]:
    x, y = jax.random.normal(jax.random.key(1), (2, micro_batches, ROWS, WIDTH))
    return {"x": x, "y": y}


@jax.jit
@scanned
def unsharded(params: Any, microbatch: Any) -> Any:
    return layers_and_loss(params["second"], layers(params["first"], None, microbatch), microbatch)


def main() -> int:
    figures = Figures("like stages: step time, CPU work and memory against the unsharded scan")
    figures.shrink(__name__, WIDTH=4, ROWS=2)
    configure(STAGES)
    whole = model()
    stages = [Stage(layers, params="first", ipu=0), Stage(layers_and_loss, params="second", ipu=1)]
    pipelines = {m: Pipeline(stages, gradient_accumulation=m) for m in (4, 16, 64)}
    compiled = {
        m: jax.jit(pipeline.value_and_grad).lower(pipeline.shard(whole), batch_of(m)).compile()
        for m, pipeline in pipelines.items()
    }
    params = pipelines[16].shard(whole)
    on_ipus = jax.sharding.NamedSharding(pipelines[16].mesh, PartitionSpec())
    batch = batch_of(16)
    spread = jax.device_put(batch, on_ipus)

    loss, gradients = pipelines[16].value_and_grad(params, spread)
    found = (loss, pipelines[16].unshard(gradients))
    figures.add(
        "loss and gradients, largest relative difference",
        largest_relative_difference(found, unsharded(whole, batch)),
        1e-6,
    )

    pipelined, dense = side_by_side(lambda: compiled[16](params, spread), lambda: unsharded(whole, batch), rounds=16)
    bubble = (16 + STAGES - 1) / 16
    figures.add("CPU work / unsharded, M=16", (pipelined / dense).cpu, 1.03)
    figures.add("step time / unsharded on both cores, M=16", (pipelined / dense).wall, 1.03 * bubble)
    figures.add_spread("unsharded, M=16", dense)
    figures.add_spread("pipelined, M=16", pipelined)

    bytes_of = {m: temporary_bytes(compiled[m]) for m in compiled}
    figures.add("temporary bytes an IPU, M=16 / M=4", bytes_of[16] / bytes_of[4], 1.05)
    figures.add("temporary bytes an IPU, M=64 / M=4", bytes_of[64] / bytes_of[4], 1.05)
    figures.add("temporary bytes an IPU, M=64, MB", bytes_of[64] / 1e6)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

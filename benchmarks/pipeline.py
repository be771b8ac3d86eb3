"""Like stages: does the staged scan cost more than its bubble?

Eight relu layers of 1024x1024 in 2 stages on 2 virtual IPUs, 16 micro-batches of 64 rows, against the unsharded jitted
scan, and against the usual idiom (scan and ppermute, differentiated from outside), in the same process.

    python benchmarks/pipeline.py [--check]
"""

import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from figures import Figures, largest_relative_difference, side_by_side
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import Pipeline, Stage, configure, make_mesh

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
def unsharded(params: Any, batch: Any) -> Any:
    """The whole model on one device, micro-batches in a scan."""

    def loss_of(params: Any, microbatch: Any) -> Any:
        return layers_and_loss(params["second"], layers(params["first"], None, microbatch), microbatch)

    def add(sums: Any, microbatch: Any) -> Any:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, microbatch)), None

    count = batch["x"].shape[0]
    sums, _ = lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)), batch)
    return jax.tree.map(lambda total: total / count, sums)


def usual_idiom(micro_batches: int) -> Any:
    """The pipeline of many a tutorial: forward ticks and ppermute in a scan, `jax.grad` through all of it."""
    mesh = make_mesh(1, STAGES)

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec("ipu"), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def forward(stacked: Any, batch: Any) -> Any:
        me = lax.axis_index("ipu")
        weights = [w[0] for w in stacked]

        def tick(carry: Any, t: Any) -> Any:
            inbox, loss = carry
            at = jnp.clip(t - me, 0, micro_batches - 1)
            microbatch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), batch)
            active = (t - me >= 0) & (t - me < micro_batches)
            y = layers(weights, jnp.where(me == 0, microbatch["x"], inbox), None)
            error = jnp.mean((y - microbatch["y"]) ** 2)
            loss += jnp.where(active & (me == STAGES - 1), error, 0.0)
            return (lax.ppermute(y, "ipu", [(0, 1)]), loss), None

        ticks = jnp.arange(micro_batches + STAGES - 1)
        (_, loss), _ = lax.scan(tick, (jnp.zeros((ROWS, WIDTH)), jnp.zeros(())), ticks)
        return lax.psum(loss, "ipu") / micro_batches

    return jax.jit(jax.value_and_grad(forward))


def temporary_bytes(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> int:
    figures = Figures("like stages: step time, CPU work, memory and compile time against the unsharded scan")
    configure(STAGES)
    whole = model()
    stages = [Stage(layers, params="first", ipu=0), Stage(layers_and_loss, params="second", ipu=1)]
    compiled, compile_seconds, pipelines = {}, {}, {}
    for m in (4, 16, 64):
        pipelines[m] = Pipeline(stages, gradient_accumulation=m)
        step = jax.jit(pipelines[m].value_and_grad)
        lowered = step.lower(pipelines[m].shard(whole), batch_of(m))
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            compiled[m] = lowered.compile()
            seconds.append(time.perf_counter() - started)
        compile_seconds[m] = min(seconds)
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

    pipelined, dense = side_by_side(lambda: compiled[16](params, spread), lambda: unsharded(whole, batch))
    bubble = (16 + STAGES - 1) / 16
    figures.add("CPU work / unsharded, M=16", pipelined.cpu / dense.cpu, 1.03)
    alone = side_by_side(lambda: compiled[16](params, spread))[0]
    figures.add(
        "step time / unsharded on both cores, M=16", min(alone.wall, pipelined.wall) / dense.wall, 1.03 * bubble
    )

    bytes_of = {m: temporary_bytes(compiled[m]) for m in compiled}
    figures.add("temporary bytes an IPU, M=16 / M=4", bytes_of[16] / bytes_of[4], 1.05)
    figures.add("temporary bytes an IPU, M=64 / M=4", bytes_of[64] / bytes_of[4], 1.05)
    stacked = [jnp.stack([a, b]) for a, b in zip(whole["first"], whole["second"], strict=True)]
    idiom = usual_idiom(64).lower(stacked, batch_of(64)).compile()
    figures.add("temporary bytes an IPU, M=64, MB", bytes_of[64] / 1e6)
    figures.add("temporary bytes an IPU of the usual idiom, M=64, MB", temporary_bytes(idiom) / 1e6)
    figures.add("temporary bytes an IPU, M=64 / the usual idiom's", bytes_of[64] / temporary_bytes(idiom), 1 / 6)
    figures.add("compile time, M=64 / M=4", compile_seconds[64] / compile_seconds[4], 1.10)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

"""Run a pipeline as most JAX programs write it for themselves: ticks in a scan, and `jax.grad` through all of it.

It is modelled on the pipeline section of JAX's shard_map tutorial, and on the loop of praxis and MaxText without
circular repeats. In each tick every device runs its stage on what its neighbour sent, and `ppermute` passes the results
on. The backward pipeline comes from differentiating the forward one. All stages are one function, and their weights are
stacked.

              tick   0    1    2    3    4
    device 0         F0   F1   F2   F3   .          . is a bubble: it is computed too, from whatever the inbox contains,
    device 1         .    F0   F1   F2   F3           and masked out of the loss

It is written to be fast. The scan keeps compile time constant, micro-batches are indexed rather than copied into a
padded array, and only the loss, a scalar, leaves the loop and is reduced. There are two usual variations: `checkpoint`
saves memory, and `skip_idle` saves the work of the bubbles. The latter costs much memory: because of the `cond`, JAX no
longer sees that the weights are the same in every tick, and keeps a copy of them for each tick.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec


def value_and_grad(
    stage: Callable[[Any, jax.Array], jax.Array],
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    mesh: Mesh,
    micro_batches: int,
    *,
    checkpoint: bool = False,
    skip_idle: bool = False,
) -> Any:
    """Return a jitted function of (weights, batch) for the mean loss over micro-batches and its gradient.

    Each tick sends one ppermute of a micro-batch's activation, and in the backward pass one of its gradient. At the end
    there is one psum of the loss.

    Args:
        stage: `stage(weights, x)`; x and the result have the same shape, (micro-batch, ...).
        loss: `loss(y, target)` of one micro-batch, a scalar.
        mesh: its axis "ipu" has a device for each stage.
        micro_batches: M.
        checkpoint: let the backward pass recompute each stage's forward pass, rather than keep its residuals.
        skip_idle: compute nothing in a bubble (`lax.cond`).

    Returns:
        The function. The leaves of weights are (stages, ...), split over "ipu"; the batch is
        `{"x": (M, micro-batch, ...), "y": (M, micro-batch, ...)}` on every device.
    """
    stages = mesh.shape["ipu"]
    run_stage = jax.checkpoint(stage) if checkpoint else stage

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec("ipu"), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def forward(weights: Any, batch: Any) -> jax.Array:
        me = lax.axis_index("ipu")
        mine = jax.tree.map(lambda leaf: leaf[0], weights)

        def tick(carry: Any, t: Any) -> Any:
            inbox, total = carry
            at = jnp.clip(t - me, 0, micro_batches - 1)
            x, target = (lax.dynamic_index_in_dim(batch[key], at, keepdims=False) for key in ("x", "y"))
            x = jnp.where(me == 0, x, inbox)
            if skip_idle:
                active = (t >= me) & (t < me + micro_batches)
                y = lax.cond(active, run_stage, lambda weights, x: x, mine, x)
            else:
                y = run_stage(mine, x)
            counts = (me == stages - 1) & (t >= me)  # the last stage is busy from tick S-1 to the end
            total += jnp.where(counts, loss(y, target), 0.0)
            return (lax.ppermute(y, "ipu", [(i, i + 1) for i in range(stages - 1)]), total), None

        start = (jnp.zeros_like(batch["x"][0]), jnp.zeros(()))
        (_, total), _ = lax.scan(tick, start, jnp.arange(micro_batches + stages - 1))
        return lax.psum(total, "ipu") / micro_batches

    return jax.jit(jax.value_and_grad(forward))

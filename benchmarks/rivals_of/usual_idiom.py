"""The pipeline that most JAX programs write for themselves: ticks in a scan, `jax.grad` through all of it.

Modelled on the pipeline section of JAX's shard_map tutorial and on the circular-free loop of praxis and MaxText: in
each tick every device runs its stage on what its neighbour sent, `ppermute` passes the results on, and the backward
pipeline is what differentiation makes of the forward one. Like stages only: one function, weights stacked over them.

              tick   0    1    2    3    4
    device 0         F0   F1   F2   F3   .          . is a bubble: computed too, from whatever the inbox holds,
    device 1         .    F0   F1   F2   F3           and masked out of the loss

It has no handicap. A scan keeps compile time level; micro-batches are indexed, not copied into a padded array; only the
loss, a scalar, is carried out of the loop and reduced. Two usual variations: `checkpoint` is the remedy for its memory,
`skip_idle` saves the bubbles' work. The latter is dear: through the `cond`, JAX no longer sees that the weights are the
same in every tick, and keeps a copy of them for each.
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
    """Mean loss over micro-batches and its gradient, a jitted function of (weights, batch).

    Communicates, per tick: one ppermute of a micro-batch's activation, and in the backward pass one of its gradient.
    At the end one psum of the loss.

    Args:
        stage: `stage(weights, x)`, x and result alike: (micro-batch, ...).
        loss: `loss(y, target)` of one micro-batch, a scalar.
        mesh: its axis "ipu" has a device for each stage.
        micro_batches: M.
        checkpoint: whether the backward pass computes each stage's forward pass again, rather than keep its residuals.
        skip_idle: whether a bubble computes nothing (`lax.cond`).

    Returns:
        The function. Weights' leaves are (stages, ...), split over "ipu"; the batch is `{"x": (M, micro-batch, ...),
        "y": (M, micro-batch, ...)}` on every device.
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

"""Run a pipeline written as in most JAX programs: ticks in a scan, and `jax.grad` through all of it.

It is modelled on the pipeline section of JAX's shard_map tutorial, and on the loop of praxis and MaxText without
circular repeats. In each tick every device runs its stage on what its neighbour sent, and `ppermute` passes the results
on. The backward pipeline comes from differentiating the forward one. All stages are one function, and their weights are
stacked.

              tick   0    1    2    3    4
    device 0         F0   F1   F2   F3   .          . is a bubble: it is computed too, from whatever the inbox contains,
    device 1         .    F0   F1   F2   F3           and masked out of the loss

It is written to be fast. The scan keeps compile time constant, micro-batches are indexed rather than copied into a
padded array, and only the loss, a scalar, leaves the loop and is reduced. An embedding or a loss head, which only the
first or the last device needs, is computed by all devices and masked. There are two usual variations: `checkpoint`
saves memory, and `skip_idle` saves the work of the bubbles and of masked results. `skip_idle` alone costs much memory:
because of the `cond`, JAX no longer sees that the weights are the same in every tick, and keeps a copy of them for each
tick. With `checkpoint` it keeps only the activation that the neighbour sent.
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
    loss: Callable[[Any, jax.Array, Any], jax.Array],
    mesh: Mesh,
    micro_batches: int,
    *,
    first: Callable[[Any, Any], jax.Array] = lambda shared, microbatch: microbatch["x"],
    checkpoint: bool = False,
    skip_idle: bool = False,
) -> Any:
    """Return a jitted function of (weights, shared, batch) for the mean loss over micro-batches and its gradients.

    Each tick runs one ppermute of a micro-batch's activation, and in the backward pass one ppermute of its gradient. At
    the end there is one psum of the loss, and one psum of the gradients by `shared`.

    Args:
        stage: `stage(weights, x)`; x and the result have the same shape, (micro-batch, ...).
        loss: `loss(shared, y, microbatch)` of one micro-batch, a scalar.
        mesh: a mesh whose axis "ipu" has a device for each stage.
        micro_batches: M.
        first: `first(shared, microbatch)`, the first stage's x.
        checkpoint: let the backward pass recompute a device's work in a tick instead of keeping its residuals.
        skip_idle: compute nothing in a bubble, `first` on the first device only, and `loss` on the last device only
            (`lax.cond`).

    Returns:
        The function. The leaves of weights are (stages, ...), split over "ipu"; `shared` is on every device, like the
        batch, whose leaves are (M, micro-batch, ...). Its result is `(loss, (gradients by weights, by shared))`.
    """
    stages = mesh.shape["ipu"]

    def choose(predicate: Any, yes: Callable[[], jax.Array], no: Callable[[], jax.Array]) -> jax.Array:
        return lax.cond(predicate, yes, no) if skip_idle else jnp.where(predicate, yes(), no())

    def work(weights: Any, shared: Any, batch: Any, inbox: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return this device's results in a tick: the activation to send, and the loss of the last stage."""
        me = lax.axis_index("ipu")
        at = jnp.clip(t - me, 0, micro_batches - 1)
        microbatch = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), batch)
        x = choose(me == 0, lambda: first(shared, microbatch), lambda: inbox)
        if skip_idle:
            active = (t >= me) & (t < me + micro_batches)
            y = lax.cond(active, lambda: stage(weights, x), lambda: x)
        else:
            y = stage(weights, x)
        counts = (me == stages - 1) & (t >= me)  # the last stage is busy from tick S-1 to the end
        return y, choose(counts, lambda: loss(shared, y, microbatch), lambda: jnp.zeros(()))

    run = jax.checkpoint(work) if checkpoint else work

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec("ipu"), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def forward(weights: Any, shared: Any, batch: Any) -> jax.Array:
        mine = jax.tree.map(lambda leaf: leaf[0], weights)

        def tick(carry: Any, t: Any) -> Any:
            inbox, total = carry
            y, lost = run(mine, shared, batch, inbox, t)
            return (lax.ppermute(y, "ipu", [(i, i + 1) for i in range(stages - 1)]), total + lost), None

        activation = jax.eval_shape(first, shared, jax.tree.map(lambda leaf: leaf[0], batch))
        start = (jnp.zeros(activation.shape, activation.dtype), jnp.zeros(()))
        (_, total), _ = lax.scan(tick, start, jnp.arange(micro_batches + stages - 1))
        return lax.psum(total, "ipu") / micro_batches

    return jax.jit(jax.value_and_grad(forward, argnums=(0, 1)))

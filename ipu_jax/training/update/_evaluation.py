"""Evaluate a training step's model on the batch of a call: the loss as training reports it, without an update.

weighted      (sum over all micro-batches, replicas and updates of the batch) / (sum of their counts)
  of sums     under reduction="sum": the mean of the sums of all updates
otherwise     the mean over them
"""

from typing import Any

import jax
import jax.numpy as jnp

from ipu_jax.core.options import TrainOptions
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.weights.packing import Sharded
from ipu_jax.training.update._accumulate import counts_of
from ipu_jax.training.update._model import aux_of_loss
from ipu_jax.training.update.replicas import Replicas


def loss_of_batch(
    model: Pipeline | Replicas, options: TrainOptions, params: Any, stages: Sharded | None, batch: Any, key: Any
) -> Any:
    """Return the loss, or `(loss, aux)`, of a batch as `TrainStep.loss` documents it.

    Args:
        model: the model with all its replicas, in the step's precision.
        options: the step's options.
        params, stages: weights and stages' state on the IPUs.
        batch: leaves ([updates,] [replicas,] M, ...).
        key: a typed key, or None.
    """
    if options.device_iterations == 1:
        loss, aux = _loss_and_aux(model, params, stages, batch, key)
        losses, all_aux = loss[None], jax.tree.map(lambda leaf: leaf[None], aux)
    else:
        results = []
        for i in range(jax.tree.leaves(batch)[0].shape[0]):
            own_key = None if key is None else jax.random.fold_in(key, i)
            of_update = jax.tree.map(lambda leaf, i=i: leaf[i], batch)
            results.append(_loss_and_aux(model, params, stages, of_update, own_key))
        losses, all_aux = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
        aux = all_aux
    value = jnp.mean(losses)
    if options.weighted:
        counts = counts_of(aux_of_loss(model, all_aux), dims=2 + (model.replicas > 1))
        sums = losses * model.options.gradient_accumulation * model.replicas
        value = _weighted(model, sums, counts)
    return value if aux is None else (value, aux)


def _weighted(model: Pipeline | Replicas, sums: Any, counts: Any) -> Any:
    if model.options.reduction == "sum":
        return jnp.mean(sums)
    total = jnp.sum(counts, dtype=jnp.promote_types(counts.dtype, sums.dtype))
    return sums.sum() / jnp.where(total > 0, total, jnp.inf)


def _loss_and_aux(
    model: Pipeline | Replicas, params: Any, stages: Sharded | None, batch: Any, key: Any
) -> tuple[Any, Any]:
    is_pipeline = isinstance(model, Pipeline)
    value = model.loss(params, batch, stages, key) if is_pipeline else model.loss(params, batch, key)
    return value if isinstance(value, tuple) else (value, None)

"""Run a loss function over the micro-batches of one replica, one after the other, and sum in float32 at least."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax.base.annotations import Batch, Function, Key, Params, Tree, Value
from ipu_jax.core.mesh.devices import REPLICA_AXIS
from ipu_jax.core.stage import Outputs
from ipu_jax.core.step_args import StepArgs
from ipu_jax.training.update._precision import widened


def loss_and_aux(result: Tree) -> tuple[Value, Tree]:
    """Return the result of a loss function as `(loss, aux)`; aux is None if there is none.

    Raises:
        ValueError: the loss is not a float scalar, or it comes with a loss to add.
    """
    loss, aux = result, None
    if isinstance(result, Outputs):
        loss, aux = result.y, result.aux
        if result.loss is not None:
            raise ValueError("loss_fn returned Outputs(loss=...), which stages add to a loss: add it to y")
    elif isinstance(result, tuple) and len(result) == 2:
        loss, aux = result
    if not hasattr(loss, "shape") or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        described = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise ValueError(f"loss_fn returned {described} as its loss: return a float scalar, or (loss, aux)")
    return loss, aux


def counts_of(aux: Tree, *, dims: int) -> Value:
    """Return the counts of a model whose losses are sums: an array with `dims` dims, one count per micro-batch.

    Args:
        aux: the aux of the loss function or of the last stage.
        dims: the number of dims of the counts.

    Raises:
        ValueError: the model returns no count.
    """
    counts: Value = aux["count"] if isinstance(aux, dict) and "count" in aux else aux
    if not hasattr(counts, "shape") or counts.ndim != dims:
        raise ValueError(
            "weighted=True, but the model gives no count: return (sum, count), or (sum, aux) with aux['count'], "
            "the count a number"
        )
    return counts


def accumulate(
    loss_fn: Function, args: StepArgs, *, random: bool, loss_cotangent: Value = None
) -> tuple[Value, Tree, Params]:
    """Return the mean loss over the micro-batches of one replica, aux with a leading M, and sums of gradients.

    Args:
        loss_fn: the loss function.
        args: this replica's, batch leaves (M, micro-batch, ...).
        random: whether the function takes a key.
        loss_cotangent: the backward pass starts from it, so that a loss scale acts before anything can underflow: sums
            are gradients of `loss_cotangent` x loss, in float32 at least. None for no gradients.
    """
    call, batch = _caller(loss_fn, args.key, random), args.batch

    def of_microbatch(index: Value, microbatch: Batch) -> Any:
        fn = lambda p: loss_and_aux(call(p, index, microbatch))
        if loss_cotangent is None:
            (loss, aux), gradients = fn(args.params), None
        else:
            loss, vjp, aux = jax.vjp(fn, args.params, has_aux=True)
            (gradients,) = vjp(jnp.full((), loss_cotangent, loss.dtype))
        return jax.tree.map(widened, (loss, gradients)), aux

    def add(sums: Tree, index_and_microbatch: Tree) -> tuple[Tree, Tree]:
        loss_and_gradients, aux = of_microbatch(*index_and_microbatch)
        return jax.tree.map(jnp.add, sums, loss_and_gradients), aux

    m, first = jax.tree.leaves(batch)[0].shape[0], jax.tree.map(lambda leaf: leaf[0], batch)
    if m == 1:  # no scan: its carry would be another copy of the gradients
        (loss, sums), aux = of_microbatch(jnp.int32(0), first)
        return loss, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], aux), sums
    like = jax.eval_shape(of_microbatch, jnp.int32(0), first)[0]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    (loss, sums), aux = lax.scan(add, zeros, (jnp.arange(m), batch))
    return loss / m, aux, sums


def _caller(loss_fn: Function, key: Key, random: bool) -> Function:
    def call(params: Params, index: Value, microbatch: Batch) -> Tree:
        if not random:
            return loss_fn(params, microbatch)
        own = jax.random.fold_in(jax.random.fold_in(key, lax.axis_index(REPLICA_AXIS)), index)
        return loss_fn(params, microbatch, key=own)

    return call

"""Run a training step on one IPU: one weight update, or several in one call.

gradients of M micro-batches -> sum over replicas -> unscale, clip -> optax -> round -> weights -> average
                                (or a part each)                              (gathered)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ipu_jax.base.annotations import Batch, Key, Params, Tree, Value
from ipu_jax.core.engine.labels import UPDATE
from ipu_jax.core.layout.blocks import Blocks, summed
from ipu_jax.core.mesh.axes import reduced
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.guard import Fence, guard
from ipu_jax.core.mesh.host_memory import bare, is_stored, updated_by_rows
from ipu_jax.core.optimizer.update import ShardedUpdate
from ipu_jax.core.options import DynamicScale, TrainOptions
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.training.update._decision import Decision, decided, first_of
from ipu_jax.training.update._precision import current_scale, next_scale, stochastic_round, widened
from ipu_jax.training.update.models import Gradients, Model
from ipu_jax.training.update.replicas import counts_of
from ipu_jax.training.update.state import StepOutputs, TrainState


class Iteration:
    """Run a call of a `TrainStep` on one IPU, inside the mapped program.

    Args:
        model: the model with all its replicas.
        options: the step's options.
        update: the optimizer's update for the model's weights.
    """

    def __init__(self, model: Model, options: TrainOptions, update: ShardedUpdate):
        self.model, self.options, self.update = model, options, update
        self._learning_rate = learning_rate_in(update)

    def run(self, state: TrainState, batch: Batch, updates: tuple[Value, Value]) -> tuple[TrainState, StepOutputs]:
        """Run the updates of a call.

        Args:
            state: this IPU's blocks.
            batch: leaves (K, 1, M, ...), this replica's.
            updates: `(first, stop)`, the range of the batch's updates to make, int32 (), the same on all IPUs. A batch
                of one update makes it.

        Returns:
            The new state, and outputs with a leading dim, a row per `options.every` updates. Rows of updates that are
            not made are zeros.
        """
        options = self.options
        batch = jax.tree.map(lambda leaf: leaf[:, 0], batch)
        first = jax.tree.map(lambda leaf: leaf[0], batch)
        if not given_dims(options.device_iterations):  # a loop would be compiled apart from what is around it
            state, outputs = self.one(state, first)
            return state, jax.tree.map(lambda leaf: leaf[None], outputs)

        def update(i: Value, carry: tuple[TrainState, StepOutputs]) -> tuple[TrainState, StepOutputs]:
            state, rows = carry
            state, outputs = self.one(state, jax.tree.map(lambda leaf: leaf[i], batch))
            row = i // options.every
            if options.every > 1:  # the row of several updates
                before = jax.tree.map(lambda leaf: leaf[row], rows)
                nonfinite = first_of(before.nonfinite, outputs.nonfinite)
                skipped = None if outputs.skipped is None else before.skipped + outputs.skipped
                if options.outputs == "sum":
                    outputs = jax.tree.map(jnp.add, before, outputs)
                outputs = dataclasses.replace(outputs, nonfinite=nonfinite, skipped=skipped)
            return state, jax.tree.map(lambda leaf, value: leaf.at[row].set(value), rows, outputs)

        like = jax.eval_shape(self.one, state, first)[1]
        count_of_rows = options.device_iterations // options.every
        # outputs that are not returned are never stacked
        rows = jax.tree.map(lambda leaf: jnp.zeros((count_of_rows, *leaf.shape), leaf.dtype), like)
        return lax.fori_loop(*updates, update, (state, rows))

    def one(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepOutputs]:
        """Run one update; batch leaves are (M, ...)."""
        model, weighted, scale = self.model, self.options.weighted, current_scale(self.options, state.scale)
        key = None if state.key is None else jax.random.fold_in(state.key, state.step)
        args = StepArgs(state.params, batch, state.stages, key if model.random else None)
        found = model.gradients(args, model.loss_cotangent(scale, weighted=weighted), weighted=weighted)
        with jax.named_scope(UPDATE):
            return self._updated(state, found, scale, key)

    def _updated(self, state: TrainState, found: Gradients, scale: Value, key: Key) -> tuple[TrainState, StepOutputs]:
        """Return the new state and the outputs."""
        options, update = self.options, self.update
        blocks = update.blocks
        loss, divisor = self._global_loss(found, scale)

        gradients = summed(blocks, found.sums)
        decision = self._decision(state, loss, gradients)
        if divisor is not None:
            gradients = [g / jnp.asarray(divisor, g.dtype) for g in map(widened, gradients)]

        round_block = functools.partial(self._rounded, key=key)
        made = None
        if blocks.memory is not None:  # XLA does not know that it is True
            made = (state.step >= 0) & (True if decision is None else decision.made)
        params, chunks, optimizer = update.apply(
            gradients, state.optimizer, state.params, loss, round_block=round_block, made=made
        )
        ema = state.ema
        if ema is not None and options.ema_decay is not None:
            averaged = functools.partial(next_average, options.ema_decay)
            arrays = averaged(ema.arrays, chunks) if made is None else _by_block(averaged, ema.arrays, chunks, made)
            ema = dataclasses.replace(ema, arrays=arrays)
        new = dataclasses.replace(state, params=params, optimizer=optimizer, stages=found.stages, ema=ema)
        if decision is not None:
            new = self._unless_bad(decision, new, state)
        gradient_norm, parameter_norm = None, None
        if options.norms:
            gradient_norm, parameter_norm = norms(blocks, gradients, blocks.chunks_of(state.params))
        rate = None if self._learning_rate is None else optimizer.arrays[self._learning_rate]
        outputs = StepOutputs(
            loss=loss,
            aux=jax.tree.map(lambda leaf: leaf[None], found.aux),
            updated=None if decision is None else decision.made.astype(jnp.int32),
            gradient_norm=gradient_norm,
            parameter_norm=parameter_norm,
            learning_rate=None if rate is None else widened(rate),
            nonfinite=None if decision is None else decision.number,
            skipped=None if decision is None else 1 - decision.made.astype(jnp.int32),
        )
        step = state.step + (1 if decision is None or decision.counts is None else decision.counts)
        return dataclasses.replace(new, step=step), outputs

    def _decision(self, state: TrainState, loss: Value, gradients: list[Value]) -> Decision | None:
        """Return whether the update is made, from the sums over replicas; None if the options never ask."""
        if self.options.on_nonfinite is not None:
            return decided(self.options, state, loss, self._all_finite(gradients))
        if isinstance(self.options.loss_scale, DynamicScale):
            finite = self._all_finite(gradients)
            return Decision(finite, finite)
        return None

    def _unless_bad(self, decision: Decision, new: TrainState, old: TrainState) -> TrainState:
        """Return the new state if the update is made, else the old state, with the next loss scale in both cases."""
        keyless = [dataclasses.replace(state, key=None, scale=None) for state in (new, old)]
        # the guards have decided about arrays in the host's memory
        chosen = jax.tree.map(lambda n, o: n if is_stored(n) else jnp.where(decision.made, n, o), *keyless)
        scale = old.scale
        if isinstance(self.options.loss_scale, DynamicScale):
            assert scale is not None, "init makes it"
            scale = next_scale(self.options.loss_scale, scale, decision.finite)
            if decision.number is not None:  # a value that is not finite at any scale says nothing about the scale
                scale = jax.tree.map(lambda n, o: jnp.where(decision.number > 0, o, n), scale, old.scale)
        return dataclasses.replace(chosen, key=old.key, scale=scale, nonfinite=decision.streak)

    def _global_loss(self, found: Gradients, scale: Value) -> tuple[Value, Value]:
        """Return the loss over all replicas, and the divisor of the gradients, or None for 1."""
        options, loss = self.options, found.loss
        static = None if isinstance(scale, float | int) and scale == 1 else scale
        if not options.weighted:
            return reduced(lax.pmean, loss, REPLICA_AXIS), static
        counts = counts_of(self.model.aux_of_loss(found.aux), dims=1)
        count = jnp.sum(counts, dtype=jnp.promote_types(counts.dtype, loss.dtype))
        total, count = reduced(lax.psum, (loss * self.model.m, count), REPLICA_AXIS)
        if self.model.reduction == "sum":
            return total, static
        # if the count is 0, loss and gradients are 0: 0 divided by infinity, not by 0
        count = jnp.where(count > 0, count, jnp.inf)
        return total / count, count * scale

    def _all_finite(self, gradients: list[Value]) -> Value:
        """Return whether all gradients of all IPUs are finite, from the sums over replicas.

        Communicates one pmin of a number over the IPUs of a replica, and over the replicas if each has chunks.
        """
        # if everything is frozen there are no gradients, and the result is True
        found = jnp.stack([jnp.bool_(True), *(jnp.all(jnp.isfinite(g)) for g in gradients)]).all().astype(jnp.int32)
        return lax.pmin(found, self.update.blocks.axes) > 0

    def _rounded(self, k: int, value: Value, key: Key) -> Value:
        """Return a block's new weights in its own dtype."""
        blocks, block = self.update.blocks, self.update.blocks[k]
        if not self.options.stochastic_rounding or block.dtype not in ("bfloat16", "float16"):
            return value.astype(block.dtype)
        # the model folds in the replica's number; no replica has this number, so the model's keys differ from these
        key = jax.random.fold_in(jax.random.fold_in(key, np.uint32(2**32 - 1)), k)
        if not blocks.is_whole(k):  # IPUs that hold the same weights must round them the same
            key = jax.random.fold_in(key, lax.axis_index(IPU_AXIS))
        if blocks.is_divided:
            key = jax.random.fold_in(key, lax.axis_index(REPLICA_AXIS))
        return stochastic_round(value, block.dtype, key)


def next_average(decay: float, averages: Sequence[Value], weights: Sequence[Value]) -> list[Value]:
    """Return the averages after an update: e' = e + (1 - decay) (w - e). Communicates nothing.

    The average is in float32 at least, because half would lose (1 - decay) (w - e). Under `shard_optimizer` each
    replica keeps its part of it. Source: Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by
    Averaging".

    Args:
        decay: the fraction of the old average that stays.
        averages: per block, (1, 1, *update_shape).
        weights: the new weights per block, (*update_shape).

    >>> next_average(0.75, [jnp.full((1, 1, 2), 4.0)], [jnp.zeros(2)])[0].tolist()
    [[[3.0, 3.0]]]
    """
    return [e + (1 - decay) * (w.astype(e.dtype)[None, None] - e) for e, w in zip(averages, weights, strict=True)]


def _by_block(
    averaged: Callable[..., list[Value]], averages: Sequence[Value], weights: Sequence[Value], made: Value
) -> list[Value]:
    """Return the averages after an update, in the host's memory: each block is fetched and stored in a guard."""
    new = []
    for average, chunk in zip(averages, weights, strict=True):

        def body(fence: Fence, old: list[Value], chunk: Value = chunk) -> list[Value]:
            fenced, rows = fence(chunk), chunk.shape[0] if chunk.size and chunk.ndim else None
            of_rows = lambda cut, own: [averaged([own[0][None, None]], [cut(fenced)])[0][0, 0]]
            return updated_by_rows(old, of_rows, chunk.shape, rows=rows, zero=fence.zero)

        (array,) = guard(jnp.int32(0), made, body, [bare(average)])[1]
        new.append(jnp.expand_dims(array, range(average.ndim - array.ndim)))
    return new


def clip(largest: float) -> optax.GradientTransformation:
    """Scale gradients down to a global norm of `largest`. Unlike optax's own, this squares half types in float32."""

    def update(updates: Tree, state: Tree, params: Params = None) -> tuple[Tree, Tree]:
        squares = [_sum_of_squares(g) for g in jax.tree.leaves(updates)]
        norm = jnp.sqrt(sum(squares, jnp.float32(0)))
        factor = jnp.where(norm > largest, largest / norm, 1)
        return jax.tree.map(lambda g: (widened(g) * factor).astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def norms(blocks: Blocks, *trees: Sequence[Value]) -> list[Value]:
    """Return the norms of trees that are laid out like the blocks, the same on all IPUs, in float32 at least.

    Communicates one psum of one float per tree. A leaf that is on every IPU counts once, and padding does not count.

    Args:
        blocks: where the weights are.
        trees: this IPU's arrays of each tree, one per block, in the block's update shape.
    """
    squares = jnp.stack([_own_squares(blocks, arrays) for arrays in trees])
    return list(jnp.sqrt(lax.psum(squares, blocks.axes)))


def learning_rate_in(update: ShardedUpdate) -> int | None:
    """Return the array of the optimizer's state that is the learning rate; None if none or several are."""
    leaves = update.state_layout.layout.leaves
    found = [leaf for leaf in leaves if leaf.path.endswith(".hyperparams['learning_rate']")]
    return found[0].array if len(found) == 1 and found[0].ipus is None else None


def _own_squares(blocks: Blocks, arrays: Sequence[Value]) -> Value:
    """Return this IPU's part of the sum of squares."""
    total = jnp.float32(0)
    for k, array in enumerate(arrays):
        mask = blocks.leaf_mask(k)
        square = _sum_of_squares(array if mask is None else jnp.where(mask, array, 0))
        if IPU_AXIS in blocks.axes and blocks.is_whole(k):
            square = jnp.where(lax.axis_index(IPU_AXIS) == 0, square, 0)
        total += square
    return total


def _sum_of_squares(array: Value) -> Value:
    return jnp.sum(jnp.square(widened(array)))

"""Check that states, keys and batches fit a training step, before anything is compiled or dispatched."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from ipu_jax.base.annotations import Batch, Key
from ipu_jax.base.checks import check_count
from ipu_jax.base.keys import is_one_key
from ipu_jax.core.layout.packing import check_alive
from ipu_jax.core.options import DynamicScale, TrainOptions
from ipu_jax.core.pipeline.arguments import arrays_in, check_batch
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.training.data.feed import FeedBatch
from ipu_jax.training.update._state_placer import StatePlacer
from ipu_jax.training.update.models import Model
from ipu_jax.training.update.state import TrainState


class Arguments:
    """Checks the arguments of one training step's calls. Every check raises a `ValueError` that says what to give.

    Args:
        model: the model with all its replicas.
        options: the step's options.
        placer: places the step's states.
    """

    def __init__(self, model: Model, options: TrainOptions, placer: StatePlacer):
        self._model, self._options, self._placer = model, options, placer

    def check_state(self, state: Any) -> None:
        """Check that a state belongs to this step, and that no earlier call has used it up."""
        if not isinstance(state, TrainState) or not self._model.has(state.params):
            raise ValueError("state does not belong to this step: make it with step.init(params)")
        check_alive(
            "state", state, "go on with the state that it returned, or keep states with TrainOptions(donate=False)"
        )
        if not self._model.freezes_as(state.params):
            raise ValueError(
                "state is of a step with other frozen weights, and the optimizer's state with it: begin anew with its "
                "weights, step.init(other.whole(state)['params'], ...)"
            )
        if self._options.precision != "32.32":
            held = self._placer.held
            for leaf in self._model.layout(state.params).trained:
                own = jnp.dtype(leaf.dtype)
                if own in (jnp.float32, jnp.bfloat16, jnp.float16) and own != held:
                    raise ValueError(
                        f"state.{leaf.path} is {own}, but precision="
                        f"{self._options.precision!r} holds {held}: begin anew with its weights, "
                        "step.init(other.whole(state)['params'], ...)"
                    )
        if not self._placer.update_for(state.params).state_layout.fits(state.optimizer):
            raise ValueError(
                "state.optimizer is another optimizer's, of weights elsewhere, or in another memory (offload): use "
                "the step that made it, for another memory step.restore(other.whole(state)), or begin anew with its "
                "weights, step.init(other.whole(state)['params'], ...)"
            )
        if (state.scale is None) == isinstance(self._options.loss_scale, DynamicScale):
            raise ValueError("the state and this step differ in whether they scale the loss by a DynamicScale")
        if (state.ema is None) != (self._options.ema_decay is None):
            raise ValueError("the state and this step differ in whether they average the weights by ema_decay")
        if (state.nonfinite is None) != (self._options.on_nonfinite is None):
            raise ValueError(
                "the state and this step differ in whether they look for what is not finite (on_nonfinite): give "
                "step.restore(other.whole(state))"
            )
        self.check_key(state.key)

    @property
    def _draws(self) -> bool:
        return self._model.random or self._options.stochastic_rounding

    def key_for_state(self, key: Key, *, stacklevel: int = 5) -> Key:
        """Return the key that a new state holds: the given key, or None with a warning if nothing draws numbers.

        The warning names a caller that many levels up: by default the caller of `init` or `restore`, which have three
        decorators.
        """
        if key is None or self._draws:
            self.check_key(key)
            return key
        if self._model.takes_unused_key:
            return None
        warnings.warn(
            "key is not used, for neither the model nor the rounding is random: leave it out, or if the model should "
            "draw numbers, say so: Stage(..., random=True), or replicate(..., random=True) for a loss function",
            stacklevel=stacklevel + 1,
        )
        return None

    def check_key(self, key: Key) -> None:
        """Check that there is a key if, and only if, something draws numbers."""
        needs = "the model is random" if self._model.random else "stochastic_rounding=True draws numbers"
        if key is None and self._draws:
            raise ValueError(f"key is missing, and {needs}: pass init(..., key=jax.random.key(seed))")
        if key is not None and not self._draws:
            raise ValueError(
                "the state has a key, but this step draws no numbers: give step.restore(other.whole(state))"
            )
        if key is not None and not is_one_key(key):
            raise ValueError(f"key={key!r} is not one typed key: make it with jax.random.key(seed)")

    def batch_of_call(self, state: TrainState, batch: Batch, updates: Any = None) -> tuple[Batch, range]:
        """Check a state, a call's batch and its updates; return the batch's arrays, and which updates to make."""
        self.check_state(state)
        arrays, made = self._arrays_of(batch), self._updates_of(batch, updates)
        self._model.check(self._placer.of_one_update(state, arrays))
        return arrays, made

    def _updates_of(self, batch: Batch, updates: Any) -> range:
        """Return which updates of a batch a call makes."""
        most = batch.updates if isinstance(batch, FeedBatch) else self._options.device_iterations
        if updates is None:
            return range(most)
        made = updates if isinstance(updates, range) else range(check_count("updates", updates))
        if not (made.step == 1 and 0 <= made.start < made.stop <= most):
            raise ValueError(
                f"updates={updates!r}, but the batch has {most}: give a number from 1 to {most}, a range of them such "
                f"as range({most}), or leave it out"
            )
        return made

    def batch_of_loss(self, state: TrainState, batch: Batch) -> Batch:
        """Check a state and a batch to evaluate; return the arrays of the batch's updates with real examples."""
        self.check_state(state)
        arrays, count = self._arrays_of(batch), len(self._updates_of(batch, None))
        batch = arrays if self._options.device_iterations == count else jax.tree.map(lambda leaf: leaf[:count], arrays)
        check_batch(self._placer.of_one_update(state, batch).batch, self._model.replicas, self._model.m)
        return batch

    def batch_of_update(self, state: TrainState, batch: Batch) -> Batch:
        """Check a state and the batch of one update, without the dim of updates; return the batch's arrays."""
        self.check_state(state)
        arrays: Batch = batch.arrays if isinstance(batch, FeedBatch) else batch
        check_alive("batch", arrays)
        key = state.key if self._model.random else None
        self._model.check(StepArgs(state.params, arrays, state.stages, key))
        return arrays

    def _arrays_of(self, batch: Batch) -> Batch:
        """Return the arrays of a batch."""
        arrays: Batch = batch.arrays if isinstance(batch, FeedBatch) else batch
        check_alive("batch", arrays)
        count = self._options.device_iterations
        for where, leaf in arrays_in(arrays) if given_dims(count) else ():
            if leaf.shape[:1] != (count,):
                raise ValueError(
                    f"{where} has shape {tuple(leaf.shape)}: its first dim must be "
                    f"device_iterations={count}; give a batch of a Feed itself, not its data"
                )
        return arrays

"""Find what was not finite in an update: run its batch again with probes, and read their flags on the host.

Diagnosis.find(state, batch, step)  ->  probes on the IPUs  ->  flags, (replicas, M)  ->  NonFinite
"""

from typing import Any

import jax

from ipu_jax.base import facts
from ipu_jax.core.instances import on_host
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.step_args import StepArgs
from ipu_jax.training.update._loss_scale import current_scale
from ipu_jax.training.update.models import Model
from ipu_jax.training.update.nonfinite import NonFinite, first_nonfinite
from ipu_jax.training.update.state import TrainState


class Diagnosis:
    """Finds what was not finite in updates of a step.

    Args:
        model: the model with all its replicas, in the step's precision.
        options: the step's options.
    """

    def __init__(self, model: Model, options: TrainOptions):
        self._model, self._options = model, options
        self._program = jax.jit(self._run)

    @facts.during("finding what was not finite")
    def find(self, state: TrainState, batch: Any, step: int) -> NonFinite | None:
        """Return the first value that is not finite in an update, or None if there is none.

        Args:
            state: the state before the update; its `step` is not read.
            batch: the batch of this update, as a user gives it.
            step: the number of the update, from 1.
        """
        key = jax.random.fold_in(state.key, step - 1) if self._model.random else None
        given = StepArgs(state.params, batch, state.stages, key)
        args = (given, current_scale(self._options, state.scale))
        self._model.check_guards(self._program, args, lambda: self._program.lower(*args))
        results = jax.tree.map(on_host, self._program(*args))
        return first_nonfinite(step, self._model.flags(state, batch, results))

    def _run(self, given: StepArgs, scale: Any) -> Any:
        cotangent = self._model.loss_cotangent(scale, weighted=self._options.weighted)
        return self._model.probed(given.entered(self._model.replicas), cotangent, weighted=self._options.weighted)

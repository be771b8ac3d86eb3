"""Find what was not finite in an update: run its batch again with probes, and read their flags on the host.

Diagnosis.find(state, batch, step)  ->  probes on the IPUs  ->  flags, (replicas, M)  ->  NonFinite
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base import facts
from ipu_jax.core.instances import on_host
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.step_args import StepArgs
from ipu_jax.core.weights.packed_layout import Leaf
from ipu_jax.training.update._loss_scale import current_scale
from ipu_jax.training.update._probes import ProbedPipeline, float_names, run_probed_function
from ipu_jax.training.update.nonfinite import Flags, NonFinite, StageFlags, first_nonfinite, no_flags
from ipu_jax.training.update.replicas import Replicas
from ipu_jax.training.update.state import TrainState


class Diagnosis:
    """Finds what was not finite in updates of a step.

    Args:
        model: the model with all its replicas, in the step's precision.
        options: the step's options.
        random: whether the model takes a key.
    """

    def __init__(self, model: Pipeline | Replicas, options: TrainOptions, *, random: bool):
        self._model, self._options, self._random = model, options, random
        self._program = jax.jit(self._run)

    @facts.during("finding what was not finite")
    def find(self, state: TrainState, batch: Any, step: int) -> NonFinite | None:
        """Return the first value that is not finite in an update, or None if there is none.

        Args:
            state: the state before the update; its `step` is not read.
            batch: the batch of this update, leaves ([replicas,] M, ...).
            step: the number of the update, from 1.
        """
        key = jax.random.fold_in(state.key, step - 1) if self._random else None
        args = (state.params, batch, state.stages, key, current_scale(self._options, state.scale))
        if isinstance(self._model, Pipeline):
            self._model.placement.guards.check(self._program, args, lambda: self._program.lower(*args))
        results = self._program(*args)
        flags, gradients, is_finite = jax.tree.map(on_host, results)
        of_stages = self._of_stages if isinstance(self._model, Pipeline) else self._of_function
        return first_nonfinite(step, of_stages(state, batch, flags, gradients, bool(is_finite)))

    def _run(self, params: Any, batch: Any, stages: Any, key: Any, scale: Any) -> Any:
        """Return the flags of each stage, the gradients of its probes, and whether the gradients' sums are finite."""
        model, options = self._model, self._options
        is_sum = options.weighted or model.options.reduction == "sum"
        loss_cotangent = scale if is_sum else scale / (model.options.gradient_accumulation * model.replicas)
        if not isinstance(model, Pipeline):
            flags, is_finite = run_probed_function(model, params, batch, key, loss_cotangent)
            return [flags], [], is_finite
        probed = ProbedPipeline(model, params.layout, weighted=self._options.weighted)
        return probed.run(StepArgs(params, batch, stages, key), loss_cotangent)

    def _of_function(self, state: TrainState, batch: Any, flags: Any, _gradients: Any, is_finite: bool) -> Flags:
        weights = float_names(state.params, "params")
        named = {
            "weights": _by_name(weights, flags[0]["weights"]),
            "batch": _by_name(float_names(batch, "batch"), flags[0]["batch"]),
            "outputs": _by_name(["loss"], flags[0]["outputs"]),
            "weight_gradients": _by_name(weights, flags[0]["weight_gradients"]),
        }
        return Flags(_wide(flags[0]["loss"]), [no_flags(**named)], None, is_finite)

    def _of_stages(self, state: TrainState, batch: Any, flags: Any, gradients: Any, is_finite: bool) -> Flags:
        assert isinstance(self._model, Pipeline), "others have no stages"
        layout = state.params.layout
        of_batch, stages, any_trained = float_names(batch, "batch"), [], False
        for stage, own, probe in zip(self._model.stages, flags, gradients, strict=True):
            leaves = [leaf for name in stage.groups for leaf in layout.group(name).leaves]
            held = () if stage.state is None or state.stages is None else state.stages.layout.group(stage.state).leaves
            of_state = [path.replace("state", "stages", 1) for path in _float_paths(held)]
            outputs = own.get("outputs", np.zeros((*probe.shape[:1], probe.shape[-1], 0)))
            trained = {leaf.path: probe[:, 1 + i] > 0 for i, leaf in enumerate(leaves) if not leaf.frozen}
            stages.append(
                StageFlags(
                    weights=_by_name(_float_paths(leaves), own.get("weights")),
                    batch=_by_name(of_batch, own.get("batch")),
                    state=_by_name(of_state, own.get("state")),
                    outputs=_by_name([str(i) for i in range(outputs.shape[-1])], outputs),
                    new_state=_by_name(of_state, own.get("new_state")),
                    # the step computes it only if an earlier stage has trained weights
                    input_gradients={"its input": probe[:, 0] > 0} if any_trained else {},
                    weight_gradients=trained,
                )
            )
            any_trained = any_trained or bool(trained)
        names = [stage.name for stage in self._model.stages]
        losses = np.sum([_wide(own["loss"]) for own in flags if "loss" in own], axis=0)
        return Flags(losses, stages, names, is_finite)


def _float_paths(leaves: Sequence[Leaf]) -> list[str]:
    return [leaf.path for leaf in leaves if jnp.issubdtype(jnp.dtype(leaf.dtype), jnp.inexact)]


def _by_name(names: list[str], flags: Any) -> dict[str, Any]:
    """Return (replicas, M) bools by name from (replicas, M, names); None stands for no names."""
    if flags is None:
        assert not names, f"the probes saw nothing of {names}"
        return {}
    assert flags.shape[-1] == len(names), f"the probes saw {flags.shape[-1]} of {names}"
    return {name: flags[..., i] > 0 for i, name in enumerate(names)}


def _wide(losses: Any) -> Any:
    losses = np.asarray(losses)
    return losses.astype(jnp.promote_types(losses.dtype, jnp.float32))

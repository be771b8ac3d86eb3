"""Train, evaluate and predict: what six of the examples share."""

import os
from typing import Any

import numpy as np

from ipu_jax import Feed, fit
from ipu_jax.steps import FitResult, TrainState, TrainStep

B, M = 8, 4  # examples of a micro-batch, and micro-batches of an update


def train(
    step: TrainStep, start: TrainState, source: Any, others: Any, *, folder: str | os.PathLike[str], updates: int
) -> FitResult:
    """Train until the state has this many updates, evaluating at the end of each epoch. A later call resumes.

    Args:
        step: the training step.
        start: the state without a checkpoint, from `step.init`. Its buffers are reused.
        source: arrays with one example per row.
        others: arrays to evaluate with.
        folder: the folder of checkpoints: weights, optimizer, the stages' state, the key and the position in the data.
        updates: the number of updates at the end, including those before a resume.
    """
    with Feed(source, step=step, micro_batch=B) as feed:
        loss = lambda state: {"loss": evaluate(step, state, others)}
        return fit(step, start, feed, updates=updates, evaluate=loss, checkpoints=folder)


def evaluate(step: TrainStep, state: TrainState, source: Any) -> float:
    """Return the mean loss of a source, in evaluation mode."""
    with Feed(source, step=step, micro_batch=B) as feed:
        return float(np.mean([step.loss(state, batch) for batch in feed.epoch()]))


def predict(step: TrainStep, state: TrainState, batch: dict[str, np.ndarray]) -> Any:
    """Return the model's outputs for leaves (micro-batches, B, ...) without labels, in evaluation mode."""
    return step.model.predict(state.params, batch, state.stages)

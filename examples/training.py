"""Train, evaluate and predict: what six of the examples share."""

import os
from collections.abc import Callable
from typing import Any

import jax

from ipu_jax import Feed, fit
from ipu_jax.steps import Evaluation, FitResult, TrainState, TrainStep

B, M = 8, 4  # examples of a micro-batch, and micro-batches of an update


def train(
    step: TrainStep,
    start: TrainState,
    test_loss: Callable[..., Any],
    source: Any,
    others: Any,
    *,
    folder: str | os.PathLike[str],
    updates: int,
) -> FitResult:
    """Train until the state has this many updates, evaluating at the end of each epoch. A later call resumes.

    Args:
        step: the training step.
        start: the state without a checkpoint, from `step.init`. Its buffers are reused.
        test_loss: the loss of a micro-batch in evaluation.
        source: arrays with one example per row.
        others: arrays to evaluate with.
        folder: the folder of checkpoints: weights, optimizer, the function's state, the key and the position in the
            data.
        updates: the number of updates at the end, including those before a resume.
    """
    test = evaluation(step, test_loss, others)
    with Feed(source, step=step, micro_batch=B) as feed:
        return fit(step, start, feed, updates=updates, evaluate=test, checkpoints=folder)


def evaluation(step: TrainStep, test_loss: Callable[..., Any], others: Any) -> Evaluation:
    """Return a function of a training state for the mean loss of other examples, on the IPUs that train."""
    return Evaluation(step.model.forward(test_loss, jax.tree.map(lambda rows: rows[:B], others)), others)


def predict(step: TrainStep, state: TrainState, outputs: Callable[..., Any], inputs: Any) -> Any:
    """Return the outputs of a function for leaves (micro-batches, B, ...) without labels, on the IPUs that train."""
    run = step.model.forward(outputs, jax.tree.map(lambda rows: rows[0], inputs))
    return run(state.params, inputs, state.stages)

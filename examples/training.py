"""Train, resume, evaluate and predict: what all examples share."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from ipu_jax import Feed
from ipu_jax.steps import TrainState, TrainStep

B, M = 8, 4  # examples of a micro-batch, and micro-batches of an update


def feed_of(step: TrainStep, source: dict[str, Any], position: dict[str, int] | None = None) -> Feed:
    """Return a feed of batches for the step, from the start of the source or from a position."""
    return Feed(source, mesh=step.model.mesh, micro_batch=B, gradient_accumulation=M, state=position)


def train(step: TrainStep, start: TrainState, source: dict[str, Any], *, folder: Path, updates: int) -> TrainState:
    """Make weight updates and save a checkpoint, continuing from the one in the folder if there is one.

    Args:
        step: the training step.
        start: the state without a checkpoint, from `step.init`. It stays usable.
        source: arrays with one example per row.
        folder: an absolute path. It will contain weights, optimizer, the stages' state, the key and the position in
            the source.
        updates: how many to make.
    """
    saved = {"step": step.whole(start), "feed": feed_of(step, source).state()}
    with ocp.StandardCheckpointer() as checkpoints:
        saved = checkpoints.restore(folder, saved) if folder.exists() else saved
        state = step.restore(saved["step"])
        with feed_of(step, source, saved["feed"]) as feed:
            for batch in itertools.islice(feed, updates):
                state, _ = step(state, batch)
            checkpoints.save(folder, {"step": step.whole(state), "feed": feed.state()}, force=True)
    return state


def evaluate(step: TrainStep, state: TrainState, source: dict[str, Any]) -> float:
    """Return the mean loss of all whole batches of a source, in evaluation mode."""
    with feed_of(step, source) as feed:
        return float(np.mean([step.loss(state, batch) for batch in feed.epoch()]))


def predict(step: TrainStep, state: TrainState, batch: dict[str, np.ndarray]) -> Any:
    """Return the model's outputs for leaves (micro-batches, B, ...) without labels, in evaluation mode."""
    return step.model.predict(state.params, batch, state.stages)

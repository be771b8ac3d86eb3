"""What a training run reads and writes: batches of data, checkpoints, files of weights."""

from ipu_jax.training.checkpoints.checkpoints import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    Restored,
    SaveError,
)
from ipu_jax.training.data.feed import Buckets, Feed, FeedBatch
from ipu_jax.training.data.prefetch import FeedTimeoutError
from ipu_jax.training.data.source import normalise
from ipu_jax.training.weight_files.exporting import export_weights
from ipu_jax.training.weight_files.importing import import_weights
from ipu_jax.training.weight_files.saved import Saved

__all__ = [
    "Buckets",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "Feed",
    "FeedBatch",
    "FeedTimeoutError",
    "Restored",
    "SaveError",
    "Saved",
    "export_weights",
    "import_weights",
    "normalise",
]

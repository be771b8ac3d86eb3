"""The training step, its state and results, and the loop around it."""

from ipu_jax.core.mesh.in_flight import InFlight
from ipu_jax.distributed.stopping import StopRequest
from ipu_jax.run.executable_cache import ExecutableCache
from ipu_jax.run.loop.checked_fit import FitResult, fit
from ipu_jax.training.update.evaluation import Evaluation
from ipu_jax.training.update.nonfinite import NonFinite, NonFiniteLossError, NonFiniteLossWarning
from ipu_jax.training.update.per_layer import per_layer
from ipu_jax.training.update.replicas import Replicas, replicate
from ipu_jax.training.update.state import StepOutputs, TrainState
from ipu_jax.training.update.step import TrainStep, make_train_step

__all__ = [
    "Evaluation",
    "ExecutableCache",
    "FitResult",
    "InFlight",
    "NonFinite",
    "NonFiniteLossError",
    "NonFiniteLossWarning",
    "Replicas",
    "StepOutputs",
    "StopRequest",
    "TrainState",
    "TrainStep",
    "fit",
    "make_train_step",
    "per_layer",
    "replicate",
]

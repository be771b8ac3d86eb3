"""Multi-IPU programming on any JAX device: pipelines, concurrent stages, and the proof that they equal one device."""

from ipu_jax.cost import flops_of
from ipu_jax.devices import ALL_IPUS, InFlight, configure, make_mesh
from ipu_jax.feed import Feed, FeedBatch
from ipu_jax.options import DynamicScale, PipelineOptions, TrainOptions
from ipu_jax.packing import Sharded
from ipu_jax.pipeline import Pipeline
from ipu_jax.prefetch import FeedTimeoutError
from ipu_jax.reference import Report, VerificationError, reference_value_and_grad, verify
from ipu_jax.replicate import Replicas, replicate
from ipu_jax.report import PipelineReport
from ipu_jax.schedule import Schedule, Task
from ipu_jax.source import normalise
from ipu_jax.split import Split, measure_costs, split
from ipu_jax.stage import Outputs, Stage
from ipu_jax.train import StepOutputs, TrainState, TrainStep, make_train_step

__all__ = [
    "ALL_IPUS",
    "DynamicScale",
    "Feed",
    "FeedBatch",
    "FeedTimeoutError",
    "InFlight",
    "Outputs",
    "Pipeline",
    "PipelineOptions",
    "PipelineReport",
    "Replicas",
    "Report",
    "Schedule",
    "Sharded",
    "Split",
    "Stage",
    "StepOutputs",
    "Task",
    "TrainOptions",
    "TrainState",
    "TrainStep",
    "VerificationError",
    "configure",
    "flops_of",
    "make_mesh",
    "make_train_step",
    "measure_costs",
    "normalise",
    "reference_value_and_grad",
    "replicate",
    "split",
    "verify",
]

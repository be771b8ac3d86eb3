"""Multi-IPU programming on any JAX device: pipelines, concurrent stages, and the proof that they equal one device."""

from ipu_jax.cost import flops_of
from ipu_jax.devices import ALL_IPUS, InFlight, configure, make_mesh
from ipu_jax.feed import Feed, FeedBatch
from ipu_jax.options import PipelineOptions
from ipu_jax.packing import Sharded
from ipu_jax.pipeline import Pipeline
from ipu_jax.prefetch import FeedTimeoutError
from ipu_jax.reference import Report, VerificationError, reference_value_and_grad, verify
from ipu_jax.report import PipelineReport
from ipu_jax.schedule import Schedule, Task
from ipu_jax.source import normalise
from ipu_jax.split import Split, measure_costs, split
from ipu_jax.stage import Outputs, Stage

__all__ = [
    "ALL_IPUS",
    "Feed",
    "FeedBatch",
    "FeedTimeoutError",
    "InFlight",
    "Outputs",
    "Pipeline",
    "PipelineOptions",
    "PipelineReport",
    "Report",
    "Schedule",
    "Sharded",
    "Split",
    "Stage",
    "Task",
    "VerificationError",
    "configure",
    "flops_of",
    "make_mesh",
    "measure_costs",
    "normalise",
    "reference_value_and_grad",
    "split",
    "verify",
]

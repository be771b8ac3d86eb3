"""Multi-IPU programming on any JAX device: pipelines, concurrent stages, and the proof that they equal one device."""

from ipu_jax.devices import ALL_IPUS, InFlight, configure, make_mesh
from ipu_jax.options import PipelineOptions
from ipu_jax.packing import Sharded
from ipu_jax.pipeline import Pipeline
from ipu_jax.reference import Report, VerificationError, reference_value_and_grad, verify
from ipu_jax.schedule import Schedule, Task
from ipu_jax.stage import Outputs, Stage

__all__ = [
    "ALL_IPUS",
    "InFlight",
    "Outputs",
    "Pipeline",
    "PipelineOptions",
    "Report",
    "Schedule",
    "Sharded",
    "Stage",
    "Task",
    "VerificationError",
    "configure",
    "make_mesh",
    "reference_value_and_grad",
    "verify",
]

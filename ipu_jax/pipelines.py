"""Stages on IPUs, the pipeline that runs them, and the comparison with what one device computes."""

from ipu_jax.core.cutting.cut import stage_end
from ipu_jax.core.cutting.everywhere import everywhere
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.devices import ALL_IPUS, IPU_AXIS, REPLICA_AXIS, configure, make_mesh
from ipu_jax.core.mesh.instances import on_host
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.pipeline.forward import Forward
from ipu_jax.core.proof.comparison import ForwardReport, VerificationError, VerificationReport
from ipu_jax.core.proof.reference import reference_predict, reference_value_and_grad
from ipu_jax.core.proof.verification import verify
from ipu_jax.core.stage import Outputs, Stage

__all__ = [
    "ALL_IPUS",
    "IPU_AXIS",
    "REPLICA_AXIS",
    "Forward",
    "ForwardReport",
    "Outputs",
    "Pipeline",
    "Sharded",
    "Stage",
    "VerificationError",
    "VerificationReport",
    "configure",
    "everywhere",
    "make_mesh",
    "on_host",
    "reference_predict",
    "reference_value_and_grad",
    "stage_end",
    "verify",
]

"""Multi-IPU programming on any JAX device: pipelines, concurrent stages, and proof that they match one device."""

from typing import TYPE_CHECKING

from ipu_jax.base import facts
from ipu_jax.base.on_demand import names_on_demand
from ipu_jax.base.version import __version__

# Type checkers read these imports. At run time, a name is imported when it is first used: so a command line is checked,
# and a schedule printed, without importing jax, which takes a second.
if TYPE_CHECKING:
    from ipu_jax.core.analysis.balance import LayerPlacement, balance_layers, measure_costs
    from ipu_jax.core.analysis.cost import flops_of
    from ipu_jax.core.analysis.report import PipelineReport
    from ipu_jax.core.cutting.cut import stage_end
    from ipu_jax.core.devices import ALL_IPUS, IPU_AXIS, REPLICA_AXIS, InFlight, configure, make_mesh
    from ipu_jax.core.instances import on_host
    from ipu_jax.core.modules import (
        ModuleStage,
        conv_general_dilated,
        equinox_stage,
        gather_stages,
        linen_stage,
        nnx_stage,
    )
    from ipu_jax.core.options import (
        DynamicScale,
        Half,
        OnNonFinite,
        PipelineOptions,
        Precision,
        Reduction,
        TrainOptions,
    )
    from ipu_jax.core.pipeline import Pipeline
    from ipu_jax.core.reference import reference_predict, reference_value_and_grad
    from ipu_jax.core.schedules import (
        SCHEDULES,
        FoundSchedule,
        Schedule,
        StageCosts,
        Task,
        canonical_name,
        find_schedule,
        make_schedule,
    )
    from ipu_jax.core.stage import Outputs, Stage
    from ipu_jax.core.verification import VerificationError, VerificationReport, verify
    from ipu_jax.core.weights.packing import Sharded
    from ipu_jax.distributed import popdist
    from ipu_jax.distributed.stopping import StopRequest
    from ipu_jax.run import cli
    from ipu_jax.run.executable_cache import ExecutableCache
    from ipu_jax.run.loop.fit import FitResult, fit
    from ipu_jax.run.observe.runs.log import RunLog, RunLogWarning
    from ipu_jax.run.observe.runs.report import memory_of, write_report
    from ipu_jax.run.observe.tracing.recording import Recording, trace
    from ipu_jax.run.observe.tracing.report import TraceReport
    from ipu_jax.run.observe.tracing.timeline import Timeline, TraceError
    from ipu_jax.training.checkpoints.checkpoints import (
        CheckpointError,
        Checkpoints,
        CheckpointWarning,
        Restored,
        SaveError,
    )
    from ipu_jax.training.data.feed import Feed, FeedBatch
    from ipu_jax.training.data.order import EpochOrder, Position
    from ipu_jax.training.data.prefetch import FeedTimeoutError
    from ipu_jax.training.data.source import normalise
    from ipu_jax.training.update.nonfinite import NonFinite, NonFiniteLossError, NonFiniteLossWarning
    from ipu_jax.training.update.replicas import Replicas, replicate
    from ipu_jax.training.update.state import StepOutputs, TrainState
    from ipu_jax.training.update.step import TrainStep, make_train_step
    from ipu_jax.training.weight_files.exporting import export_weights
    from ipu_jax.training.weight_files.importing import import_weights
    from ipu_jax.training.weight_files.saved import Saved

__all__ = [
    "ALL_IPUS",
    "IPU_AXIS",
    "REPLICA_AXIS",
    "SCHEDULES",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "DynamicScale",
    "EpochOrder",
    "ExecutableCache",
    "Feed",
    "FeedBatch",
    "FeedTimeoutError",
    "FitResult",
    "FoundSchedule",
    "Half",
    "InFlight",
    "LayerPlacement",
    "ModuleStage",
    "NonFinite",
    "NonFiniteLossError",
    "NonFiniteLossWarning",
    "OnNonFinite",
    "Outputs",
    "Pipeline",
    "PipelineOptions",
    "PipelineReport",
    "Position",
    "Precision",
    "Recording",
    "Reduction",
    "Replicas",
    "Restored",
    "RunLog",
    "RunLogWarning",
    "SaveError",
    "Saved",
    "Schedule",
    "Sharded",
    "Stage",
    "StageCosts",
    "StepOutputs",
    "StopRequest",
    "Task",
    "Timeline",
    "TraceError",
    "TraceReport",
    "TrainOptions",
    "TrainState",
    "TrainStep",
    "VerificationError",
    "VerificationReport",
    "__version__",
    "balance_layers",
    "canonical_name",
    "cli",
    "configure",
    "conv_general_dilated",
    "equinox_stage",
    "export_weights",
    "find_schedule",
    "fit",
    "flops_of",
    "gather_stages",
    "import_weights",
    "linen_stage",
    "make_mesh",
    "make_schedule",
    "make_train_step",
    "measure_costs",
    "memory_of",
    "nnx_stage",
    "normalise",
    "on_host",
    "popdist",
    "reference_predict",
    "reference_value_and_grad",
    "replicate",
    "stage_end",
    "trace",
    "verify",
    "write_report",
]

# what this process says of itself goes into its beacon and its record; without a fact, nothing of this is imported
facts.listen_from("ipu_jax.distributed.processes.listening")

__getattr__, __dir__ = names_on_demand(__name__, __file__)

"""What a run did: traces, logs, reports."""

from ipu_jax.run.loop.loss_lines import LossLines
from ipu_jax.run.observe.runs.comparison import write_comparison
from ipu_jax.run.observe.runs.log import RunLog, RunLogWarning
from ipu_jax.run.observe.runs.page import memory_of, write_report
from ipu_jax.run.observe.tracing.recording import Recording, trace
from ipu_jax.run.observe.tracing.timeline import Timeline, TraceError
from ipu_jax.run.observe.tracing.trace_report import TraceReport

__all__ = [
    "LossLines",
    "Recording",
    "RunLog",
    "RunLogWarning",
    "Timeline",
    "TraceError",
    "TraceReport",
    "memory_of",
    "trace",
    "write_comparison",
    "write_report",
]

"""Options of pipelines and training steps, and the names that they take. Nothing here imports jax."""

from ipu_jax.core.mesh.cuda_graphs import CUDA_GRAPH_FLAGS
from ipu_jax.core.options import DynamicScale, Half, OnNonFinite, PipelineOptions, Precision, Reduction, TrainOptions

__all__ = [
    "CUDA_GRAPH_FLAGS",
    "DynamicScale",
    "Half",
    "OnNonFinite",
    "PipelineOptions",
    "Precision",
    "Reduction",
    "TrainOptions",
]

"""What stages and layers cost, and how that divides them over the IPUs."""

from ipu_jax.core.analysis.balance import LayerPlacement, balance_layers, measure_costs
from ipu_jax.core.analysis.report import PipelineReport
from ipu_jax.core.programs.cost import flops_of

__all__ = [
    "LayerPlacement",
    "PipelineReport",
    "balance_layers",
    "flops_of",
    "measure_costs",
]

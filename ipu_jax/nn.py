"""Modules of Flax and Equinox as stages."""

from ipu_jax.core.modules import ModuleStage, conv_general_dilated, equinox_stage, gather_stages, linen_stage, nnx_stage

__all__ = [
    "ModuleStage",
    "conv_general_dilated",
    "equinox_stage",
    "gather_stages",
    "linen_stage",
    "nnx_stage",
]

"""Make stages of Flax and Equinox modules: weights, modes, dropout keys and batch statistics go where they belong.

No file here imports Flax or Equinox until a stage is made of one of their modules.
"""

from ipu_jax.core.modules.convolution import conv_general_dilated
from ipu_jax.core.modules.equinox import equinox_stage
from ipu_jax.core.modules.linen import linen_stage
from ipu_jax.core.modules.nnx import nnx_stage
from ipu_jax.core.modules.parts import ModuleStage, gather_stages

__all__ = ["ModuleStage", "conv_general_dilated", "equinox_stage", "gather_stages", "linen_stage", "nnx_stage"]

"""Provide `Pipeline`: stages in; loss, gradients and predictions out."""

from ipu_jax.core.pipeline._pipeline import Pipeline

__all__ = ["Pipeline"]

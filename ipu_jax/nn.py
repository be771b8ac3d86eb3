"""Convolutions for Flax modules in a pipeline. A module itself is a function: `Pipeline.from_function` cuts it."""

from typing import Any

from ipu_jax.base.other_words import gone
from ipu_jax.core.convolution import conv_general_dilated

__all__ = ["conv_general_dilated"]


def __getattr__(name: str) -> Any:
    if hint := gone(name):  # an AttributeError would lose it in `from ipu_jax.nn import ...`
        raise ImportError(f"cannot import name {name!r} from {__name__!r}{hint}", name=name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

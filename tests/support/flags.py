"""Switch jax's flags for the future, as an environment variable `JAX_REMAT3=1` does."""

import contextlib
from collections.abc import Iterator

import jax
from jax._src import config

_NOT_DIFFERENTIABLE = "jax_scan3"  # jax itself has no derivative of a scan under it
FUTURE_FLAGS = tuple(
    name
    for name, holder in jax.config._value_holders.items()
    if config.UPGRADE_BOOL_HELP in (holder.__doc__ or "") and not holder.value and name != _NOT_DIFFERENTIABLE
)
"""The flags that this jax marks as an upgrade, and that are off."""


@contextlib.contextmanager
def turned_on(flag: str) -> Iterator[None]:
    """Let functions be defined and traced under a flag."""
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, False)

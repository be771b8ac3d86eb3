"""Public names that changed: the old ones work for one release, with a `DeprecationWarning` that says the new ones."""

import warnings
from typing import Any

from sharded_ops._embedding import take_along_last_dim

_NOW = {"take_last": take_along_last_dim}


def __getattr__(name: str) -> Any:
    """Return what an old public name of `sharded_ops` means, with a `DeprecationWarning`."""
    if name not in _NOW:
        raise AttributeError(f"module 'sharded_ops' has no attribute {name!r}")
    renamed = _NOW[name]
    warnings.warn(f"sharded_ops.{name} is called sharded_ops.{renamed.__name__} now", DeprecationWarning, stacklevel=2)
    return renamed

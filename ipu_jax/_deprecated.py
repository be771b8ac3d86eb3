"""Keep old public names working for one release, with a warning that says the new name."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

_NOW = {
    "Report": ("ipu_jax.verification", "VerificationReport"),
    "Split": ("ipu_jax.analysis.balance", "LayerPlacement"),
    "split": ("ipu_jax.analysis.balance", "balance_layers"),
}


def now_called(name: str, *, stacklevel: int) -> Any:
    """Return the object that an old public name of `ipu_jax` means, with a `DeprecationWarning`.

    Args:
        name: the name.
        stacklevel: as for `warnings.warn`: 2 warns of the caller.

    Raises:
        AttributeError: it is not an old name.
    """
    if name not in _NOW:
        raise AttributeError(f"module 'ipu_jax' has no attribute {name!r}", name=name)
    module, new = _NOW[name]
    warnings.warn(f"ipu_jax.{name} is called ipu_jax.{new} now", DeprecationWarning, stacklevel=stacklevel)
    return getattr(importlib.import_module(module), new)


def renamed_method(owner: str, old: str, new: str) -> Callable[..., Any]:
    """Return a method that calls the method `new` of the same object, with a `DeprecationWarning`."""

    def call_new(self: Any, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(f"{owner}.{old} is called {owner}.{new} now", DeprecationWarning, stacklevel=2)
        return getattr(self, new)(*args, **kwargs)

    call_new.__name__ = old
    return call_new


def renamed_attribute(owner: str, old: str, new: str) -> property:
    """Return a property that reads the attribute `new` of the same object, with a `DeprecationWarning`."""

    def read_new(self: Any) -> Any:
        warnings.warn(f"{owner}.{old} is called {owner}.{new} now", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read_new)

"""Prepare any Python program that poprun starts, before its first line runs, so that it need not be changed.

poprun puts this folder first in `PYTHONPATH`, and Python imports `sitecustomize` when it starts. This module only waits
until the program imports jax. Then `jax.distributed.initialize()` learns its place from poprun. A program that never
imports jax, or cannot import ipu_jax, is left alone.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_AWAITED = "jax._src.clusters"


class _WhenJaxIsImported(importlib.abc.MetaPathFinder):
    """Finds one module of jax as Python would, and registers poprun with jax once the module has been loaded."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self._loader = loader

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            importlib.import_module("ipu_jax.distributed.cluster")  # registers itself
        except ImportError as error:
            if not str(error.name).startswith("ipu_jax"):
                raise


def _run_the_users_own() -> None:
    """Run the `sitecustomize` that this module hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "IPU_JAX_INSTANCE" in os.environ:
    sys.meta_path.insert(0, _WhenJaxIsImported())
    _run_the_users_own()

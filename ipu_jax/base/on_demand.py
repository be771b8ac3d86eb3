"""Import a package's public names when they are first used, so that `import ipu_jax` alone does not load jax."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names_on_demand(package: str, init: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose `__init__` imports its names for type checkers only.

    The imports under `if TYPE_CHECKING:` in that file say where each name is defined, so no second list is needed.

    Args:
        package: the package's `__name__`.
        init: its `__file__`.

    >>> get, names = names_on_demand("ipu_jax", importlib.import_module("ipu_jax").__file__)
    >>> get("make_schedule").__module__, "make_schedule" in names()
    ('ipu_jax.core.schedules._make', True)
    """
    homes: dict[str, str] = {}

    def get(name: str) -> Any:
        if not homes:
            homes.update(_homes(init))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        home = importlib.import_module(homes[name])
        # the name may be a module in its home that has not been imported yet
        found = getattr(home, name, None) or importlib.import_module(f"{homes[name]}.{name}")
        setattr(sys.modules[package], name, found)  # so that `get` is called only once per name
        return found

    def names() -> list[str]:
        module = vars(sys.modules[package])
        return sorted({*module, *module["__all__"]})

    return get, names


def _homes(init: str) -> dict[str, str]:
    """Return the module from which each name is imported under `if TYPE_CHECKING:` in the file `init`."""
    import ast  # takes longer than the rest of the package's import

    (block,) = (
        node
        for node in ast.parse(Path(init).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }

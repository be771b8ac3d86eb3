"""List the public names of the packages and how they are called: users may rely on these.

`tests/project/public_api.txt` is the valid list. `make api` writes it again; a test compares it with the code. Run as a
program, this file does the same as `make api`.

The list has the names in each `__all__`, and Graphcore's names in popdist. Signatures come from the source, because
their text must not depend on the version of Python and jax. A class has its constructor's signature, or its fields.
"""

import ast
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
LISTED: Final = ROOT / "tests/project/public_api.txt"
SUBJECTS: Final = ("pipelines", "options", "steps", "schedules", "nn", "io", "observe", "costs", "chips")
MODULES: Final = (
    "ipu_jax",
    *(f"ipu_jax.{name}" for name in SUBJECTS),
    "ipu_jax.popdist",
    "ipu_jax.cli",
    "sharded_ops",
)


def public_api() -> list[str]:
    """Return a line for each public name, module by module in the order of `MODULES`."""
    return [f"{module}.{name}{how_called(found)}" for module in MODULES for name, found in _names(module)]


def _names(module: str) -> Iterator[tuple[str, Any]]:
    package, _, name = module.rpartition(".")
    found = getattr(importlib.import_module(package), name) if package else importlib.import_module(module)
    names = set(found.__all__)
    if not hasattr(found, "__path__"):
        own = {name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__}
        names |= {name for name in own if not name.startswith("_") and inspect.isfunction(getattr(found, name))}
    if module.removeprefix("ipu_jax.") in SUBJECTS:  # a name that is in ipu_jax, too, is listed there
        names -= set(importlib.import_module("ipu_jax").__all__)
    return ((public, getattr(found, public)) for public in sorted(names))


def how_called(found: Any) -> str:
    """Return what follows a name: arguments and result, or the value of a constant."""
    if isinstance(found, types.ModuleType):
        return ": module"
    definition = _definition(found)
    match definition:
        case ast.FunctionDef():
            result = f" -> {ast.unparse(definition.returns)}" if definition.returns else ""
            return f"({ast.unparse(definition.args)}){result}"
        case ast.ClassDef():
            return f"({', '.join(_taken(found))})"
        case _:
            # the number of a version is not promised
            return " = a version" if isinstance(found, str) and found[:1].isdigit() else f" = {found!r}"


def _taken(found: type) -> Iterator[str]:
    """Yield what a class's constructor takes: the arguments of its `__init__`, or else its fields."""
    for owner in found.__mro__:
        definition = _definition(owner) if owner.__module__.split(".")[0] == found.__module__.split(".")[0] else None
        for statement in definition.body if isinstance(definition, ast.ClassDef) else ():
            match statement:
                case ast.FunctionDef(name="__init__", args=arguments):
                    yield ast.unparse(arguments)
                    return
                case ast.AnnAssign(target=ast.Name(id=field)) if not field.startswith("_"):
                    yield ast.unparse(statement)
                case _:
                    pass


def _definition(found: Any) -> ast.stmt | None:
    """Return the definition of a class or a function; None for an object that is neither."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(found)))).body[0]
    except (TypeError, OSError):
        return None


def main() -> int:
    """Write the list again, and print which lines are gone and which are new."""
    before, now = LISTED.read_text().splitlines() if LISTED.exists() else [], public_api()
    LISTED.write_text("".join(f"{line}\n" for line in now))
    for line in changes(before, now):
        print(line)
    print(f"{len(now)} lines in {LISTED.relative_to(ROOT)}. What users notice belongs into CHANGELOG.md.")
    return 0


def changes(before: list[str], now: list[str]) -> list[str]:
    """Return the lines that are in only one of the lists: lines that are gone after `- `, then new lines after `+ `."""
    return [*(f"- {line}" for line in before if line not in now), *(f"+ {line}" for line in now if line not in before)]


if __name__ == "__main__":
    sys.exit(main())

"""List the public names of the packages with their signatures from the source: users may rely on these.

`tests/project/public_api.txt` is the valid list. `make api` writes it again; a test compares it with the code. Run as a
program, this file does the same as `make api`.

Names come from the packages as they run, and signatures from the source, so that the list is the same under every
version of Python and jax: the text of a type differs between versions. A class is listed with its fields, methods and
properties, including those inherited from our classes.
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
MODULES: Final = ("ipu_jax", "ipu_jax.popdist", "sharded_ops")
PACKAGES: Final = ("ipu_jax", "sharded_ops")

# Decorators that change how something is called. Users need not know about the others.
_TOLD: Final = ("dataclass", "classmethod", "staticmethod", "contextmanager")

# Methods that are invoked by an operator, a `with`, a `for` or a call.
_OPERATORS: Final = frozenset(
    f"__{name}__"
    for name in (
        *("init", "call", "len", "iter", "next", "getitem", "contains", "enter", "exit", "truediv"),
        *("add", "sub", "mul", "lt", "le", "gt", "ge"),
    )
)


def public_api() -> list[str]:
    """Return the lines of the list, module by module in the order of `MODULES`."""
    return [line for module in MODULES for line in lines_of_module(module)]


def lines_of_module(module: str) -> Iterator[str]:
    """Yield the lines of a module's public names, sorted.

    These are the names in `__all__`; for a module that is a file, also its other public functions, because popdist also
    has Graphcore's names for its functions.
    """
    package, _, name = module.rpartition(".")
    found = getattr(importlib.import_module(package), name) if package else importlib.import_module(module)
    names = set(found.__all__)
    if not hasattr(found, "__path__"):
        names |= {name for name, value in vars(found).items() if _is_own_function(name, value, found)}
    for public in sorted(names):
        yield from lines_of(f"{module}.{public}", getattr(found, public))


def _is_own_function(name: str, value: Any, module: types.ModuleType) -> bool:
    return not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__


def lines_of(name: str, found: Any) -> Iterator[str]:
    """Yield the lines of one public object: one line, and for a class also the lines of its members."""
    if isinstance(found, types.ModuleType):
        yield f"{name}: module"
    elif isinstance(found, type):
        yield from _lines_of_class(name, found)
    elif callable(found) and (function := _function(found)) is not None:
        yield f"{_decorators(function)}{name}{_as_text(function)}"
    else:
        yield f"{name} = {_value(found)}"


def _value(found: Any) -> str:
    """Return a constant or an alias of a type as text; the number of a version is not promised."""
    if isinstance(found, str) and found[:1].isdigit():
        return "a version"
    return repr(found)


def _function(found: Any) -> ast.FunctionDef | None:
    """Return the definition of a function; None for an object whose source is not a function."""
    try:
        source = inspect.getsource(inspect.unwrap(found))
    except (TypeError, OSError):
        return None
    statement = ast.parse(textwrap.dedent(source)).body[0]
    return statement if isinstance(statement, ast.FunctionDef) else None


def _as_text(function: ast.FunctionDef) -> str:
    """Return `(arguments) -> result` of a function's definition."""
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({ast.unparse(function.args)}){result}"


def _decorators(definition: ast.ClassDef | ast.FunctionDef) -> str:
    """Return the decorators that are in `_TOLD`, as text before the name."""
    told = (decorator for decorator in map(ast.unparse, definition.decorator_list) if _last_name(decorator) in _TOLD)
    return "".join(f"@{decorator.removeprefix('dataclasses.').removeprefix('contextlib.')} " for decorator in told)


def _last_name(decorator: str) -> str:
    """Return "dataclass" for `dataclasses.dataclass(frozen=True)`."""
    return decorator.split("(")[0].split(".")[-1]


def _lines_of_class(name: str, found: type) -> Iterator[str]:
    head = _definition(found)
    bases = ", ".join(ast.unparse(base) for base in (*head.bases, *(keyword.value for keyword in head.keywords)))
    yield f"{_decorators(head)}class {name}({bases})"
    members: dict[str, tuple[str, str]] = {}
    for owner in found.__mro__:
        if owner.__module__.split(".")[0] in PACKAGES:
            for member, *around in _members(_definition(owner)):
                members.setdefault(member, (around[0], around[1]))
    # fields keep their order, in which a constructor takes them
    yield from (f"{before}{name}.{member}{behind}" for member, (before, behind) in members.items())


def _definition(found: type) -> ast.ClassDef:
    statement = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    assert isinstance(statement, ast.ClassDef), found
    return statement


def _members(body: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Yield each public member's name, and its line's text before and after the name; fields first."""
    functions: dict[str, tuple[str, str, str]] = {}
    for statement in body.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=member), annotation=annotation, value=value) if _is_public(member):
                default = "" if value is None else f" = {ast.unparse(value)}"
                yield member, "", f": {ast.unparse(annotation)}{default}"
            case ast.Assign(targets=[ast.Name(id=member)], value=value) if _is_public(member):
                yield member, "", f" = {ast.unparse(value)}"
            case ast.FunctionDef(name=member, decorator_list=decorators) if _is_public(member):
                if any(_last_name(ast.unparse(decorator)).endswith("property") for decorator in decorators):
                    result = ast.unparse(statement.returns) if statement.returns else "Any"
                    functions[member] = member, "", f": {result} (property)"
                else:
                    # the last of several overloads is the function itself, with all arguments
                    functions[member] = member, _decorators(statement), _as_text(statement)
                if member == "__init__":
                    yield from _attributes(statement)
            case _:
                pass
    for member in sorted(functions):
        yield functions[member]


def _attributes(init: ast.FunctionDef) -> Iterator[tuple[str, str, str]]:
    """Yield the public attributes that `__init__` sets."""
    for statement in ast.walk(init):
        match statement:
            case ast.Attribute(value=ast.Name(id="self"), attr=member, ctx=ast.Store()) if _is_public(member):
                yield member, "", " (attribute)"
            case _:
                pass


def _is_public(member: str) -> bool:
    return not member.startswith("_") or member in _OPERATORS


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

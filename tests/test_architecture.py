"""Who may import whom, held by reading the imports; and that importing our packages touches no device."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ipu_jax", "sharded_ops", "mnist_example")

# What a schedule is made of, lowest first.
SCHEDULE = ("clock", "replay", "simulation", "grid", "families", "schedule")

# Lowest first: a module of ipu_jax imports only those that stand before it. A new module finds its place here.
LAYERS = (
    "options",
    *SCHEDULE,
    "devices",
    "stage",
    "segment",
    "jaxprs",
    "variance",
    "tracing",
    "cutting",
    "gradient_sums",
    "likeness",
    "halves",
    "cost",
    "split",
    "packing",
    "plan",
    "stash",
    "guard",
    "tasks",
    "engine",
    "account",
    "report",
    "arguments",
    "pipeline",
    "reference",
    "accumulate",
    "replicate",
    "cells",
    "spread",
    "lookup",
    "summaries",
    "update",
    "rts",
    "precision",
    "scaling",
    "model_for",
    "iteration",
    "train",
    "order",
    "prefetch",
    "source",
    "feed",
)

# They run where jax is not wanted: a picture of a schedule needs no device, and the launcher starts in no time.
PLAIN = (*SCHEDULE, "order", "prefetch", *(path.stem for path in (ROOT / "ipu_jax").glob("poprun.py")))


def imported_modules(path: Path, root: Path = ROOT) -> set[str]:
    """The dotted names that a file imports anywhere in it, `from a import b` giving both `a` and `a.b`."""
    package = path.relative_to(root).parent.parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def packages_imported(path: Path, root: Path = ROOT) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path, root)}


def files_of(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} is empty"
    return files


def siblings_imported(path: Path) -> set[str]:
    """The modules of ipu_jax that a file of ipu_jax imports, by their plain names."""
    return {name.split(".")[1] for name in imported_modules(path) if name.startswith("ipu_jax.")} & {
        file.stem for file in files_of("ipu_jax")
    }


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("sharded_ops", {"ipu_jax", "mnist_example"}), ("ipu_jax", {"sharded_ops", "mnist_example"})],
)
def test_the_two_libraries_know_nothing_of_each_other(package, forbidden):
    for path in files_of(package):
        assert not packages_imported(path) & forbidden, path


def test_imports_inside_ipu_jax_point_down():
    for path in files_of("ipu_jax"):
        if path.name == "__init__.py":
            continue
        assert path.stem in LAYERS, f"{path} has no place in LAYERS"
        below = set(LAYERS[: LAYERS.index(path.stem)])
        assert siblings_imported(path) <= below, f"{path} imports what stands above it"


def test_ipu_jax_never_imports_its_own_public_names():
    """`from ipu_jax import Stage` inside ipu_jax would go up, through `__init__`."""
    modules = {file.stem for file in files_of("ipu_jax")}
    for path in files_of("ipu_jax"):
        names = imported_modules(path)
        assert (
            "ipu_jax" not in names or {name.split(".")[1] for name in names if name.startswith("ipu_jax.")} <= modules
        )


@pytest.mark.parametrize("module", PLAIN)
def test_plain_modules_import_no_jax(module):
    seen: set[str] = set()
    waiting = {module}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        path = ROOT / f"ipu_jax/{name}.py"
        assert not packages_imported(path) & {"jax", "jaxlib", "flax", "optax", "orbax"}, path
        waiting |= siblings_imported(path) - seen


@pytest.mark.parametrize("module", PLAIN)
def test_plain_modules_load_no_jax(module):
    # The package is put in by hand: its __init__ imports everything, and jax with it.
    code = f"""
import sys, types
package = types.ModuleType("ipu_jax")
package.__path__ = [{str(ROOT / "ipu_jax")!r}]
sys.modules["ipu_jax"] = package
import ipu_jax.{module}
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"jax", "jaxlib", "flax", "optax", "orbax"}}))
"""
    assert run_python(code) == "[]"


def test_no_room_is_named_for_nothing():
    nameless = {"utils", "util", "helpers", "types", "common", "misc"}
    for folder in (*PACKAGES, "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not {path.stem, *path.relative_to(ROOT).parts} & nameless, f"{path}: a name lives with its owner"


def test_importing_our_packages_touches_no_device():
    # jax refuses to change the number of host devices once a backend runs; that is its public way to tell.
    code = f"""
import importlib, pkgutil
for name in {PACKAGES!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(module.name)
import jax
jax.config.update("jax_num_cpu_devices", 3)
print(len(jax.devices()))
"""
    assert run_python(code) == "3"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", {"a.b"}),
        ("from a import b", {"a", "a.b"}),
        ("from . import b", {"ipu_jax", "ipu_jax.b"}),
        ("from .b import c", {"ipu_jax.b", "ipu_jax.b.c"}),
        ("def f():\n    import hidden", {"hidden"}),
    ],
)
def test_the_reader_of_imports_sees_every_kind(tmp_path, source, expected):
    path = tmp_path / "ipu_jax" / "module.py"
    path.parent.mkdir()
    path.write_text(source)
    assert imported_modules(path, root=tmp_path) == expected


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

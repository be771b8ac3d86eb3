"""Test which module may import which, by reading the imports; and that importing our packages touches no device."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Set
from pathlib import Path

import pytest

import ipu_jax
import sharded_ops

ROOT = Path(__file__).parents[2]
PACKAGES = ("ipu_jax", "sharded_ops", "mnist_example")

# The wings of ipu_jax, and what each may import besides itself. A file at the top of ipu_jax is a wing of its own, or
# belongs to the ground, which everything may import and which imports nothing above it. Add a new wing or file here.
GROUND = (
    *("_checks", "_cli", "_collectives", "_guard", "_instances", "_jaxprs", "_keys", "_observer", "_on_demand"),
    *("_terminal", "_tracebacks", "_version", "devices", "options", "processes", "replacing", "stage"),
)
WINGS: dict[str, set[str]] = {
    "schedules": set(),
    "weights": set(),
    "programs": {"schedules"},
    "engine": {"programs", "weights", "schedules"},
    "analysis": {"engine", "programs", "weights", "schedules"},
    "pipeline": {"optimizer", "analysis", "engine", "programs", "weights", "schedules"},
    "reference": {"pipeline", "programs", "weights"},
    "verification": {"reference", "pipeline", "weights"},
    "optimizer": {"weights"},
    "training": {"pipeline", "analysis", "optimizer", "data", "weights"},
    "weight_files": {"training", "optimizer", "weights"},
    "checkpoints": {"training", "data", "distributed", "weights"},
    "observe": {"analysis", "engine", "schedules", "distributed", "training"},
    "loop": {"checkpoints", "data", "distributed", "observe", "training"},
    "executable_cache": {"distributed"},
    "data": set(),
    "distributed": set(),
    "modules": set(),
}
# They use public names only, like a user's program.
PROGRAMS = ("tools", "__main__")
# What programs share with those of mnist_example: how a command line is read, a process ends, and a file is replaced.
OF_COMMANDS = ("ipu_jax._cli.", "ipu_jax.distributed.commands.", "ipu_jax.loop.progress.", "ipu_jax.replacing.")
# Commands and what they import at the top: a wrong command line is refused without waiting for jax.
COMMANDS = (
    *("ipu_jax.tools.sharded_embedding_tool", "ipu_jax.tools.sharded_matmul_tool", "ipu_jax.tools.self_test"),
    *("mnist_example.run_sharded_mnist", "mnist_example.benchmark_dataset", "mnist_example.data"),
    *("ipu_jax.distributed.poprun", "ipu_jax.distributed.launcher.agent"),
    *("ipu_jax.observe.info", "ipu_jax.observe.monitor.command"),
)

# They must run without jax: a picture of a schedule needs no device, and the launcher must start quickly.
PLAIN = (
    *("schedules", "data.order", "data.prefetch", "processes.beacons", "processes.identity", "processes.own_record"),
    *("_terminal", "observe.monitor", "distributed.poprun", "distributed.launcher", "distributed.environment"),
    "checkpoints.errors",
)
PLAIN_AT_FIRST = "distributed.popdist"  # it imports jax only in functions that need it
HEAVY = {"jax", "jaxlib", "flax", "optax", "orbax"}


@functools.cache
def imported_modules(path: Path, root: Path = ROOT) -> set[str]:
    """Return the dotted names that a file imports anywhere in it; `from a import b` gives both `a` and `a.b`."""
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


@functools.cache
def files_of(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} is empty"
    return files


def wing_of(name: str) -> str:
    """Return the wing to which a dotted name of ipu_jax belongs: "engine" for `ipu_jax.engine.plan.Plan`."""
    return name.split(".")[1]


@functools.cache
def modules_of(package: str) -> dict[str, Path]:
    """Return the files of a package by their dotted names; a folder's `__init__` has the folder's name."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files_of(package)}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def test_libraries_know_nothing_of_what_is_built_on_them():
    for package, forbidden in (("sharded_ops", {"ipu_jax", "mnist_example"}), ("ipu_jax", {"mnist_example"})):
        for path in files_of(package):
            assert not packages_imported(path) & forbidden, path


def test_imports_between_the_wings_of_ipu_jax_point_down():
    assert {wing_of(name) for name in modules_of("ipu_jax") if name != "ipu_jax"} == {*GROUND, *WINGS, *PROGRAMS}
    for name, path in modules_of("ipu_jax").items():
        if name == "ipu_jax" or wing_of(name) in PROGRAMS:
            continue
        wing = wing_of(name)
        allowed = {*GROUND} if wing in GROUND else {*GROUND, wing, *WINGS[wing]}
        inside = {found for found in imported_modules(path) if found.startswith("ipu_jax.")}
        assert {wing_of(found) for found in inside} <= allowed, f"{path} imports what stands above it"


def test_the_wings_stand_on_each_other_without_a_circle():
    graphlib.TopologicalSorter(WINGS).prepare()


def test_the_table_of_the_wings_names_each_with_its_imports_and_about_its_lines():
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `?([\w ]+?)`? \| ([\d,]+) \| (.*) \|$", page, re.MULTILINE)
    shown = {name: {*imports.split(", ")} - {"nothing"} for name, _, imports in rows}
    assert shown == WINGS | {"the ground": {"nothing above it"}, "tools": {"public names only"}}
    paths = {module: path for module, path in modules_of("ipu_jax").items() if module != "ipu_jax"}
    for name, text, _ in rows:
        wings, told = GROUND if name == "the ground" else (name,), int(text.replace(",", ""))
        lines = sum(len(path.read_text().splitlines()) for module, path in paths.items() if wing_of(module) in wings)
        assert told % 100 == 0
        assert abs(told - lines) <= 100 + lines / 10, f"{name} has {lines} lines: write so in docs/architecture.md"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_in_a_circle(package):
    modules = modules_of(package)
    graph = {
        name: {
            found
            for found in imported_modules(path) & modules.keys()
            if found != package and not name.startswith(f"{found}.")  # a module of a folder loads the folder's __init__
        }
        for name, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def owner_of_private(name: str) -> str | None:
    """Return the folder to which a dotted name is private: `a.b` for `a.b._c.d`, None for `a.b.c`."""
    parts = name.split(".")
    return next((".".join(parts[:i]) for i, part in enumerate(parts) if re.match("_[^_]", part)), None)


def test_what_is_private_is_imported_in_its_own_folder_only():
    for package in PACKAGES:
        for name, path in modules_of(package).items():
            folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
            for found in imported_modules(path):
                owner = owner_of_private(found)
                ours = (
                    owner is None
                    or f"{found}.".startswith(OF_COMMANDS)
                    or owner.split(".")[0] not in PACKAGES
                    or f"{folder}.".startswith(f"{owner}.")
                )
                assert ours, f"{path} imports {found}, which is private to {owner}"


@pytest.mark.parametrize("folder", ["mnist_example", "benchmarks", "ipu_jax/tools"])
def test_programs_use_public_names_only(folder):
    public = {f"{package.__name__}.{name}" for package in (ipu_jax, sharded_ops) for name in package.__all__}
    own = folder.replace("/", ".")
    for path in files_of(folder):
        found = {name for name in imported_modules(path) if name.startswith(("ipu_jax.", "sharded_ops."))}
        assert {name for name in found if not f"{name}.".startswith((f"{own}.", *OF_COMMANDS))} <= public, path


def test_no_function_hides_a_module():
    for package in PACKAGES:
        for name, path in modules_of(package).items():
            if path.name == "__init__.py":
                own = {other.removeprefix(f"{name}.") for other in modules_of(package) if other.startswith(f"{name}.")}
                assigned = {
                    alias.asname or alias.name
                    for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.ImportFrom)
                    for alias in node.names
                }
                assert not own & assigned, f"{path} hands on {own & assigned}, which hides the module of that name"


@pytest.mark.parametrize("module", PLAIN)
def test_plain_modules_import_no_jax(module):
    modules = modules_of("ipu_jax")
    seen: set[str] = set()
    waiting = {name for name in modules if f"{name}.".startswith(f"ipu_jax.{module}.")}
    assert waiting
    while waiting:
        name = waiting.pop()
        seen.add(name)
        assert not packages_imported(modules[name]) & HEAVY, name
        # the package imports its public names on demand, which the next test holds
        waiting |= imported_modules(modules[name]) & modules.keys() - seen - {"ipu_jax"}


def test_plain_modules_and_commands_load_no_jax():
    import_without(HEAVY, *(f"ipu_jax.{module}" for module in (*PLAIN, PLAIN_AT_FIRST)), *COMMANDS)


def test_only_the_monitor_loads_what_it_shows_processes_with():
    trains = ("training.step", "data.feed", "distributed._instance", "observe.tracing")
    import_without({"psutil", "rich"}, *(f"ipu_jax.{name}" for name in trains), then="ipu_jax.InFlight()")


def import_without(unwanted: Set[str], *modules: str, then: str = "") -> None:
    """Import modules in one process, which fails at the first that has loaded an unwanted package."""
    run_python(f"""
import importlib, sys, ipu_jax
def check(name):
    loaded = {{each.split(".")[0] for each in sys.modules}} & {set(unwanted)}
    assert not loaded, f"{{name}} loads {{loaded}}"
for name in {modules!r}:
    importlib.import_module(name)
    check(name)
{then}
check("what follows")
""")


def test_an_editable_install_finds_the_packages_and_not_what_lies_beside_them():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["dev-mode-exact"] is True
    assert sorted(build["targets"]["wheel"]["packages"]) == sorted(PACKAGES)


def test_no_room_is_named_for_nothing():
    nameless = {"utils", "util", "helpers", "types", "common", "misc"}
    for folder in (*PACKAGES, "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not {path.stem, *path.relative_to(ROOT).parts} & nameless, f"{path}: a name lives with its owner"


def test_importing_our_packages_touches_no_device():
    # jax refuses to change the number of host devices once a backend runs: this is the public way to find out.
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


def test_the_reader_of_imports_sees_every_kind(tmp_path):
    path = tmp_path / "ipu_jax" / "module.py"
    path.parent.mkdir()
    path.write_text("import a.b\nfrom c import d\nfrom . import e\nfrom .f import g\ndef f():\n    import hidden")
    own = {"ipu_jax", "ipu_jax.e", "ipu_jax.f", "ipu_jax.f.g"}
    assert imported_modules(path, root=tmp_path) == {"a.b", "c", "c.d", "hidden"} | own


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()

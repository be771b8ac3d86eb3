"""Test which module may import which, by reading the imports; and that importing our packages touches no device."""

import ast
import functools
import graphlib
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Set
from pathlib import Path

import pytest

import ipu_jax
import sharded_ops
from support import public_api

ROOT = Path(__file__).parents[2]
PACKAGES = ("ipu_jax", "sharded_ops", "mnist_example")

# The storeys of ipu_jax, from the ground up, and which others each imports.
STOREYS: dict[str, set[str]] = {
    "base": set(),
    "core": {"base"},
    "distributed": {"base"},
    "training": {"base", "core", "distributed"},
    "run": {"base", "core", "distributed", "training"},
}
# The rooms of each storey, and which others of the storey each imports. A room is a folder or a file; "" stands for the
# files that lie in the storey itself. Add a new folder here.
ROOMS: dict[str, dict[str, set[str]]] = {
    "base": {"": set(), "cli": {""}},
    "core": {
        "": {"mesh"},
        "mesh": set(),
        "schedules": set(),
        "layout": {"", "mesh"},
        "programs": {"", "mesh", "schedules"},
        "optimizer": {"layout", "mesh"},
        "engine": {"", "layout", "mesh", "programs", "schedules"},
        "compiled": {"engine", "mesh"},
        "analysis": {"", "compiled", "engine", "layout", "mesh", "programs", "schedules"},
        "cutting": {"", "analysis", "layout", "mesh", "programs"},
        "pipeline": {
            *("", "analysis", "compiled", "cutting", "engine", "layout", "mesh", "optimizer", "programs", "schedules"),
        },
        "proof": {"", "layout", "mesh", "pipeline", "programs"},
    },
    "distributed": {"processes": set(), "": {"processes"}},
    "training": {"data": set(), "update": {"data"}, "checkpoints": {"data", "update"}, "weight_files": {"update"}},
    "run": {"observe": set(), "loop": {"observe"}, "ahead": set(), "executable_cache": set(), "cli": set()},
}
PARTS = {"distributed": {"launcher", "bootstrap"}}  # folders that belong to the files beside them
# They use public names only, like a user's program.
PROGRAMS = ("tools", "__main__")
HANDED_ON = (*public_api.SUBJECTS, "popdist", "cli")
# Commands and what they import at the top: a wrong command line is refused without waiting for jax.
COMMANDS = (
    *("ipu_jax.tools.sharded_embedding_tool", "ipu_jax.tools.sharded_matmul_tool", "ipu_jax.tools.self_test"),
    *("mnist_example.run_sharded_mnist", "mnist_example.benchmark_dataset", "mnist_example.data"),
    *("ipu_jax.distributed.poprun", "ipu_jax.distributed.launcher.ssh"),
    *("ipu_jax.run.observe.info", "ipu_jax.run.observe.monitor.command", "ipu_jax.run.ahead.command"),
    "ipu_jax.run.observe.runs.command",
)

# They must run without jax: a picture of a schedule needs no device, and the launcher must start quickly.
PLAIN = (
    *("schedules", "options"),
    *("core.schedules", "core.engine.order", "training.data._order", "training.data.prefetch"),
    "training.checkpoints.errors",
    *("distributed.processes.beacons", "distributed.processes.identity", "distributed.processes.record"),
    *("distributed.poprun", "distributed.launcher", "distributed.environment", "base.terminal", "run.observe.monitor"),
)
PLAIN_AT_FIRST = "distributed.popdist"  # it imports jax only in functions that need it
HEAVY = {"jax", "jaxlib", "flax", "equinox", "optax", "orbax"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported_modules(path: Path, root: Path = ROOT) -> set[str]:
    """Return the dotted names that a file imports anywhere in it; `from a import b` gives both `a` and `a.b`."""
    package = path.relative_to(root).parent.parts
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
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


def storey_of(name: str) -> str:
    """Return the storey to which a dotted name of ipu_jax belongs: "core" for `ipu_jax.core.engine.plan.Plan`."""
    return name.split(".")[1]


def room_of(name: str) -> str:
    """Return the room inside its storey: "engine" for `ipu_jax.core.engine.plan.Plan`, "" for `ipu_jax.core.stage`."""
    room = [*name.split("."), ""][2]
    return room if room in ROOMS[storey_of(name)] else ""


@functools.cache
def modules_of(package: str) -> dict[str, Path]:
    """Return the files of a package by their dotted names; a folder's `__init__` has the folder's name."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files_of(package)}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def test_libraries_know_nothing_of_what_is_built_on_them():
    for package, forbidden in (("sharded_ops", {"ipu_jax", "mnist_example"}), ("ipu_jax", {"mnist_example"})):
        for path in files_of(package):
            assert not packages_imported(path) & forbidden, path


def test_every_file_lies_in_a_storey_and_every_folder_is_a_room():
    top = {path.name for path in (ROOT / "ipu_jax").iterdir()} - {"__pycache__"}
    handed_on = {f"{name}.py" for name in HANDED_ON}
    assert top == {*STOREYS, *handed_on, "tools", "__init__.py", "__main__.py", "py.typed"}
    for storey in STOREYS:
        folders = {path.parent.name for path in (ROOT / "ipu_jax" / storey).glob("*/__init__.py")}
        assert folders <= {*ROOMS[storey]} | PARTS.get(storey, set()), f"{storey} has a folder that is not a room"


def test_a_storey_imports_those_below_it_and_a_room_what_its_row_says():
    of_storey: dict[str, set[str]] = {storey: set() for storey in STOREYS}
    of_room: dict[str, dict[str, set[str]]] = {storey: {room: set() for room in ROOMS[storey]} for storey in STOREYS}
    for name, path in modules_of("ipu_jax").items():
        if name == "ipu_jax" or storey_of(name) in (*PROGRAMS, *HANDED_ON):
            continue
        storey, room = storey_of(name), room_of(name)
        for found in imported_modules(path) & modules_of("ipu_jax").keys() - {"ipu_jax"}:
            other = storey_of(found)
            if other != storey:
                assert other in STOREYS[storey], f"{path} imports {found}, which is not below it"
                of_storey[storey].add(other)
            elif found != f"ipu_jax.{storey}":
                assert room_of(found) in {room, *ROOMS[storey][room]}, f"{path} imports {found} of another room"
                of_room[storey][room] |= {room_of(found)} - {room}
    assert of_storey == STOREYS, "a storey no longer imports another one: say so"
    assert of_room == ROOMS, "a room no longer imports another one: say so"


@pytest.mark.parametrize("graph", [STOREYS, *ROOMS.values()], ids=["storeys", *ROOMS])
def test_storeys_and_rooms_stand_on_each_other_without_a_circle(graph):
    graphlib.TopologicalSorter(graph).prepare()


def code_lines(path: Path) -> int:
    """Return how many lines of a program are code: not docstrings, imports, comments or empty."""
    other: set[int] = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                other |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(path.read_text().splitlines(), start=1)
    return sum(n not in other and not line.lstrip().startswith("#") and bool(line.strip()) for n, line in lines)


def test_code_is_counted_without_docstrings_imports_comments_and_empty_lines(tmp_path):
    (tmp_path / "a.py").write_text(
        "import a\nfrom b import (\n    c,\n)\n\ndef f():\n    '''Do.\n\n    More.\n    '''\n    # why\n    return '#'"
    )
    assert code_lines(tmp_path / "a.py") == 2


def reached(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return, for each node, all nodes that its arrows lead to, directly or through others."""
    found: dict[str, set[str]] = {}
    for node in graphlib.TopologicalSorter(graph).static_order():
        near = graph.get(node, set())
        found[node] = near.union(*(found[other] for other in near))
    return found


def test_the_picture_has_every_room_and_every_arrow():
    page = (ROOT / "docs/architecture.md").read_text()
    (picture,) = re.findall(r"^```text\n(  run .*?)^```", page, re.MULTILINE | re.DOTALL)
    drawn: dict[str, set[str]] = {name: set() for name in re.findall(r"[a-z]\w+", picture)}
    for chain in re.findall(r"\w+(?: --> \w+)+", picture):
        for one, other in itertools.pairwise(chain.split(" --> ")):
            drawn[one].add(other)
    for storey, rooms in ROOMS.items():
        named = {room: others - {""} for room, others in rooms.items() if room}
        assert {storey, *named, *PARTS.get(storey, set())} <= drawn.keys()
        if storey != "distributed":  # its room "" is drawn as what it offers
            assert {room: reached(drawn)[room] for room in named} == {room: reached(named)[room] for room in named}


def test_each_storey_keeps_to_its_budget_of_code_lines():
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d,]+) \| (.*) \|$", page, re.MULTILINE)
    assert {name: {*re.findall(r"`(\w+)`", imports)} for name, _, imports in rows if name in STOREYS} == STOREYS
    folders = {name: ROOT / name if name in PACKAGES else ROOT / "ipu_jax" / name for name, _, _ in rows}
    assert {*folders} == {*STOREYS, "tools", "sharded_ops", "mnist_example"}
    for name, budget, _ in rows:
        lines = sum(code_lines(path) for path in folders[name].rglob("*.py"))
        assert lines <= int(budget.replace(",", "")), f"{name} has {lines} code lines: remove some, or say why it grows"
        assert lines > int(budget.replace(",", "")) - 200, f"{name} has {lines} code lines: lower its budget"


def test_six_types_say_where_a_leaf_is():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "ipu_jax/core/layout").glob("*.py")]
    classes = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    others = {"Rows", "Sharded", "LayoutRule"}  # two hold values, and one decides
    found = {name for name in classes - others if not name.startswith("_")}
    assert found == {"PackedArray", "Leaf", "Part", "Group", "PackedLayout", "Blocks"}


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
                ours = owner is None or owner.split(".")[0] not in PACKAGES or f"{folder}.".startswith(f"{owner}.")
                assert ours, f"{path} imports {found}, which is private to {owner}"


@pytest.mark.parametrize("folder", ["mnist_example", "benchmarks", "ipu_jax/tools"])
def test_programs_use_public_names_only(folder):
    packages = (ipu_jax, sharded_ops, *(getattr(ipu_jax, name) for name in public_api.SUBJECTS))
    public = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    own = folder.replace("/", ".")
    for path in files_of(folder):
        used = {
            f"{node.value.id}.{node.attr}"  # an `import ipu_jax` alone says nothing
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        found = {name for name in imported_modules(path) | used if name.startswith(("ipu_jax.", "sharded_ops."))}
        assert {name for name in found if not f"{name}.".startswith(f"{own}.")} <= public, path


def test_no_function_hides_a_module():
    for package in PACKAGES:
        for name, path in modules_of(package).items():
            if path.name == "__init__.py":
                own = {other.removeprefix(f"{name}.") for other in modules_of(package) if other.startswith(f"{name}.")}
                assigned = {
                    alias.asname or alias.name
                    for node in ast.walk(parsed(path))
                    if isinstance(node, ast.ImportFrom) and node.module != name  # else it is the module itself
                    for alias in node.names
                }
                hidden = own & assigned - {*HANDED_ON}  # modules that two names lead to
                assert not hidden, f"{path} hands on {hidden}, which hides the module of that name"


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


def test_no_library_of_modules_is_loaded_before_it_is_needed():
    import_without({"flax", "equinox"}, "ipu_jax.nn", "ipu_jax.pipelines")


@pytest.mark.slow
def test_only_the_monitor_loads_what_it_shows_processes_with():
    trains = ("training.update.step", "training.data.feed", "distributed._joining", "run.observe.tracing")
    import_without({"psutil", "rich"}, *(f"ipu_jax.{name}" for name in trains), then="ipu_jax.steps.InFlight()")


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


def test_a_class_name_has_one_owner():
    nodes = ((path, node) for package in PACKAGES for path in files_of(package) for node in ast.walk(parsed(path)))
    classes = sorted({(node.name, str(path)) for path, node in nodes if isinstance(node, ast.ClassDef)})
    owners = {name: [path for _, path in group] for name, group in itertools.groupby(classes, lambda each: each[0])}
    shared = {name: paths for name, paths in owners.items() if len(paths) > 1}
    assert not shared


@pytest.mark.slow
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

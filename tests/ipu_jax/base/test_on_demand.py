"""Test that the public names are there when they are asked for, and that jax is not loaded before."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import ipu_jax

ROOT = Path(__file__).parents[3]


def imports_for_type_checkers():
    (block,) = (node for node in ast.parse(Path(ipu_jax.__file__).read_text()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_every_public_name_is_the_one_that_type_checkers_see():
    homes = imports_for_type_checkers()
    assert {*homes, "__version__"} == {*ipu_jax.__all__}
    for name, module in homes.items():
        assert getattr(ipu_jax, name) is getattr(importlib.import_module(module), name), name


def test_names_are_listed_and_can_be_imported_all_at_once():
    assert {*ipu_jax.__all__, "__doc__"} <= {*dir(ipu_jax)}
    names = {}
    exec("from ipu_jax import *", names)
    assert {*ipu_jax.__all__} <= {*names}


def test_jax_is_loaded_by_the_first_name_that_needs_it():
    code = """
import sys, ipu_jax
for name in ("__version__", "__all__", "make_schedule", "SCHEDULES", "TrainOptions", "EpochOrder", "Pipeline"):
    getattr(ipu_jax, name)
    print(name, "jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    loaded = dict(line.split() for line in done.stdout.splitlines())
    assert [name for name, is_loaded in loaded.items() if is_loaded == "True"] == ["Pipeline"]

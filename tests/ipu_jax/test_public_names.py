"""Test that the public names are there when they are asked for, and that jax is not loaded before."""

import ast
import collections
import importlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ipu_jax
from support import public_api

ROOT = Path(__file__).parents[2]


def imports_for_type_checkers():
    (block,) = (node for node in ast.parse(Path(ipu_jax.__file__).read_text()).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_every_public_name_is_the_one_that_type_checkers_see():
    homes = imports_for_type_checkers()
    assert {*homes} == {*ipu_jax.__all__}
    assert len(homes) <= 26, "the rest belongs into the modules"
    for name, module in homes.items():
        assert getattr(ipu_jax, name) is getattr(importlib.import_module(module), name), name


def test_every_name_is_in_one_module():
    counted = collections.Counter(name for module in public_api.SUBJECTS for name in getattr(ipu_jax, module).__all__)
    assert max(counted.values()) == 1
    assert {*ipu_jax.__all__} - {*counted} == {*public_api.SUBJECTS, "popdist", "cli"}


ZIPPED = """
import sys
sys.path.insert(0, "ipu_jax.zip")
from ipu_jax import Pipeline, Stage, configure, verify
import ipu_jax
configure(2)
import jax.numpy as jnp
stages = [Stage(lambda w, x, mb: mb @ w, "a", 0), Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), "b", 1)]
pipeline = Pipeline(stages, gradient_accumulation=2)
verify(pipeline, pipeline.shard({"a": jnp.eye(3), "b": jnp.ones((3, 1))}), jnp.ones((2, 4, 3)))
print(ipu_jax.__file__)
"""


@pytest.mark.slow
def test_the_packages_work_from_a_zip_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "ipu_jax.zip", "w") as archive:
        for path in [path for package in ("ipu_jax", "sharded_ops") for path in (ROOT / package).rglob("*.py")]:
            archive.write(path, path.relative_to(ROOT))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ZIPPED], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "ipu_jax.zip/ipu_jax/__init__.py"


def test_names_are_listed_and_can_be_imported_all_at_once():
    assert {*ipu_jax.__all__, "__doc__"} <= {*dir(ipu_jax)}
    names = {}
    exec("from ipu_jax import *", names)
    assert {*ipu_jax.__all__} <= {*names}


@pytest.mark.parametrize(
    ("name", "says"),
    [("replicate", ": it is ipu_jax.steps.replicate"), ("qqqq", "'qqqq'")],
)
def test_a_name_that_is_not_there_is_answered_by_the_one_that_was_meant(name, says):
    with pytest.raises(AttributeError, match=f"{re.escape(says)}$"):
        getattr(ipu_jax, name)


@pytest.mark.parametrize("line", ["from ipu_jax import DynamicScale", "import ipu_jax.DynamicScale"])
def test_an_import_of_a_name_that_is_elsewhere_is_answered_by_its_module(line):
    with pytest.raises(ImportError, match=re.escape("'DynamicScale' from 'ipu_jax': it is ipu_jax.options.Dynamic")):
        exec(line)
    with pytest.raises(ImportError, match=r"^cannot import name 'Trainer' from 'ipu_jax' \("):
        exec("from ipu_jax import Trainer")


def test_modules_with_a_home_elsewhere_are_the_same_module_under_both_names():
    lines = "import ipu_jax.popdist, ipu_jax.cli, sys\nfrom ipu_jax.popdist import getInstanceIndex"
    names = {}
    exec(lines, names)
    for name, home in (("popdist", "distributed"), ("cli", "run")):
        module = getattr(names["ipu_jax"], name)
        assert module is sys.modules[f"ipu_jax.{name}"] is importlib.import_module(f"ipu_jax.{home}.{name}")
    assert names["getInstanceIndex"] is ipu_jax.popdist.getInstanceIndex

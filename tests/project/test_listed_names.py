"""Test that what documents name exists, and that their lists are complete: folders, and what is ours."""

import collections
import inspect
import re

import optax
import pytest

import ipu_jax
import sharded_ops
from support import documents, public_api

ROOT = documents.ROOT
TREE = documents.blocks(ROOT / "docs/architecture.md", "text")[0]


def folders_of_the_tree():
    """Return each folder that the tree names, by its path."""
    found, above = [], {}
    for line in TREE.splitlines():
        named = re.match(r"((?:    ){0,3})(\w+)/ ", f"{line} ")
        if named:
            depth = len(named[1]) // 4
            above[depth] = named[2]
            found.append("/".join(above[k] for k in range(depth + 1)))
    return found


def test_the_architecture_lists_every_folder_once():
    listed = collections.Counter(folders_of_the_tree())
    packages = ["ipu_jax", "sharded_ops", "mnist_example"]
    there = {
        str(file.parent.relative_to(ROOT)) for name in packages for file in (ROOT / name).rglob("*.py") if file.parent
    }
    assert {name for name, count in listed.items() if count > 1} == set()
    assert there - set(listed) == set()
    assert {name for name in listed if not (ROOT / name).is_dir()} == set()


# what docs/coming-from/ says is ours: arguments, methods and functions

COMING_FROM = sorted((ROOT / "docs/coming-from").glob("*.md"))
PACKAGES = (ipu_jax, sharded_ops, *(getattr(ipu_jax, name) for name in public_api.SUBJECTS))
PUBLIC = {name: getattr(package, name) for package in PACKAGES for name in package.__all__}
CODE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"(?<![.\w])([A-Za-z_]\w*)\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")
KEYWORD = re.compile(r"(?:^|[,(]\s*)(\w+)=(?!=)")
METHOD = re.compile(r"(?<![.\w])([A-Za-z_]\w*)\.([a-z]\w*)")
OBJECTS = {
    "pipeline": ipu_jax.Pipeline,
    "step": ipu_jax.make_train_step(lambda w, microbatch: w, optax.sgd(0.1)),
    "schedule": ipu_jax.schedules.Schedule,
    "outputs": ipu_jax.steps.StepOutputs(None, None, None),
    "checkpoints": ipu_jax.Checkpoints,
}


def ours(page):
    """Return the code of the second cells of tables, which is ours; the first cells are theirs."""
    rows = [re.split(r"(?<!\\)\|", line) for line in page.read_text().splitlines() if line.startswith("|")]
    return [code for row in rows for code in CODE.findall(row[2])]


@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_arguments_and_methods_that_are_named_exist(page):
    seen = 0
    for code in ours(page):
        for name, arguments in CALL.findall(code):
            if name in PUBLIC and arguments:
                outer = re.sub(r"\([^()]*\)", "", arguments)  # without the arguments of inner calls
                assert set(KEYWORD.findall(outer)) <= {*inspect.signature(PUBLIC[name]).parameters}, code
                seen += 1
        for name, attribute in METHOD.findall(code):
            owner = OBJECTS.get(name, PUBLIC.get(name))
            if owner is not None:
                assert hasattr(owner, attribute), code
                seen += 1
    assert seen > 10

"""Test that what documents name exists, and that their lists are complete: folders, members, and what is ours."""

import collections
import re

import pytest

import ipu_jax
from support import documents

ROOT = documents.ROOT
TREE = documents.blocks(ROOT / "docs/architecture.md", "text")[0]
MEMBERS = re.compile(r"^::: (ipu_jax|sharded_ops)\.(\w+)\n    options:\n        members: \[(.*)\]", re.MULTILINE)
LISTED = [
    (name, {member.strip() for member in members.split(",")})
    for page in sorted((ROOT / "docs/reference").glob("*.md"))
    for _, name, members in MEMBERS.findall(page.read_text())
]


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


def test_classes_with_listed_members_are_found():
    assert {name for name, _ in LISTED} >= {"Pipeline", "TrainStep", "Replicas"}


USED_AS = {"Pipeline": "pipeline", "TrainStep": "step", "Replicas": "replicas"}
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*"), *ROOT.glob("mnist_example/*.py")]
TEXT = "".join(page.read_text() for page in sorted(PAGES) if page.suffix in (".md", ".py") and page.stem != "CHANGELOG")


@pytest.mark.parametrize(("name", "members"), LISTED, ids=[name for name, _ in LISTED])
def test_the_reference_lists_every_method_that_pages_and_programs_use(name, members):
    owner = getattr(ipu_jax, name)
    assert {member for member in members if not hasattr(owner, member)} == set()
    used = set(re.findall(rf"\b{USED_AS[name]}\.([a-z]\w*)\(", TEXT))
    assert {method for method in used if hasattr(owner, method)} - members == set()

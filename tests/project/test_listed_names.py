"""Test that what documents name exists, and that their lists are complete: folders, and what is ours."""

import collections
import re

from support import documents

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
    files = (file for name in ("ipu_jax", "sharded_ops", "mnist_example") for file in (ROOT / name).rglob("*.py"))
    there = {str(file.parent.relative_to(ROOT)) for file in files}
    assert {name for name, count in listed.items() if count > 1} == set()
    assert there - set(listed) == set()
    assert {name for name in listed if not (ROOT / name).is_dir()} == set()

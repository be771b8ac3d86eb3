"""Name the leaves of trees: the keys that lead to a leaf, with "/" between them.

{"blocks": [{"attention": {"w": w}}]}      "blocks/0/attention/w"
"""

from typing import Any

import jax

from ipu_jax.base.annotations import Tree, Value
from ipu_jax.core.layout.packed_layout import PackedLayout
from ipu_jax.core.layout.place import Place, places_of_layout


def named_leaves(tree: Tree) -> list[tuple[str, Value]]:
    """Return the (name, leaf) pairs of a pytree, in the order of `jax.tree.leaves`.

    Keys are escaped as in a JSON pointer: "~1" stands for "/", and "~0" for "~". None is not a leaf.
    The name of a tree that is itself a leaf is "". Source: RFC 6901, section 3.

    Raises:
        ValueError: two leaves have the same name.

    >>> [name for name, _ in named_leaves({"a/b": [1.0, None], "layers": ({"w": 2.0},)})]
    ['a~1b/0', 'layers/0/w']
    """
    named = [(_name(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]
    _check_different([name for name, _ in named])
    return named


def named_places(layout: PackedLayout, prefix: str) -> list[tuple[str, Place]]:
    """Return the name of each leaf and its place, as by `places_of_layout`, group by group.

    The parts of one leaf of the user have its name.

    Raises:
        ValueError: two leaves have the same name.
    """
    places = places_of_layout(layout, prefix)
    if layout.whole is not None:
        named = named_leaves(jax.tree.unflatten(layout.whole.treedef, layout.whole.paths))
        at = {path: name for name, path in named}
        return [(at[place.path], place) for place in places]
    trees = [{g.name: jax.tree.unflatten(g.treedef, range(len(g.leaves)))} for g in layout.groups]
    names = [_name(path) for tree in trees for path, _ in jax.tree.leaves_with_path(tree)]
    _check_different(names)
    return list(zip(names, places, strict=True))


def _name(path: tuple[Any, ...]) -> str:
    keys = (jax.tree_util.keystr((key,), simple=True) for key in path)
    return "/".join(key.replace("~", "~0").replace("/", "~1") for key in keys)


def _check_different(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two leaves have the name {name!r}: rename a key, so that each has a name of its own")
        seen.add(name)

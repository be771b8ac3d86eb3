"""Draw trees of weights, and which parts of them are on which IPUs, as data (`layouts.py` tests them).

{"b": {"w": bfloat16[4, 5]}, "a10": int8[3]}         a tree: a group of a pipeline for each key, or a user's own
"stage 0" on IPU 1: leaf 1, rows (2, 4) of axis 0    a layout: groups of parts, their IPUs, how they are split
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ipu_jax.core.layout.tree_parts import Part
from random_programs.dice import Dice

TRAINED = {"float32": 6.0, "bfloat16": 2, "float16": 1}
FROZEN = {"int32": 0.5, "uint8": 0.3, "int8": 0.2, "bool": 0.3, "complex64": 0.2, "float8_e4m3fn": 0.2}
SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (6,), (2, 3), (3, 2), (4, 5), (7, 2), (2, 4, 3)]
SHAPES += [(0,), (0, 3), (4, 0), (5, 1, 2), (2, 2, 2, 3)]
KEYS = ("w", "b", "a10", "a9", "x/y", "~1", "0", "é", "['w']")


class Weights:
    """A tree of random bits.

    Attributes:
        tree: of NumPy arrays.
        given: the same, as a user may give it: in wider dtypes, of which IPUs hold half the bits.
        leaves: of the tree.
        frozen: per leaf, whether it gets no gradient.
        has_groups: whether the tree is `{group: pytree}`.
    """

    def __init__(self, dice: Dice):
        self.has_groups = dice.chance(0.7)
        shapes = _node(dice, 3)
        if self.has_groups:
            names = dice.shuffled(KEYS)[: dice.between(1, 6)]
            like = _node(dice, 2) if dice.chance(0.4) else None  # most groups have the same leaves
            shapes = {name: _node(dice, 2) if like is None or dice.chance(0.2) else like for name in names}
        self.tree: Any = jax.tree.map(lambda leaf: random_bits(dice, *leaf), shapes)
        self.given = jax.tree.map(lambda leaf: _wider(leaf) if dice.chance(0.1) else leaf, self.tree)
        self.leaves: list[np.ndarray] = jax.tree.leaves(self.tree)
        self.frozen = [leaf.dtype.name not in TRAINED or dice.chance(0.15) for leaf in self.leaves]

    def __str__(self) -> str:
        shown = jax.tree.map(lambda leaf: f"{leaf.dtype}{[*leaf.shape]}", self.given)
        return f"{shown}\n  frozen: {[number for number, frozen in enumerate(self.frozen) if frozen]}"

    def part(self, part: Part) -> np.ndarray:
        leaf = self.leaves[part.leaf]
        return leaf if part.rows is None else leaf.take(range(*part.rows), part.axis)


@dataclasses.dataclass(frozen=True)
class Spread:
    """A layout of weights. Per group: the parts in it, its IPU or None, and the spec of each part.

    `given` has specs and `frozen` as a user gives them: per group a tree, or one value, or nothing. If `splits`, the
    specs do not say what is split over the IPUs, since the function that was cut says it.
    """

    replicas: int
    ipus: int
    axes: dict[str, int]
    by_group: bool
    splits: bool
    held: dict[str, list[Part]]
    owners: dict[str, int | None]
    specs: dict[str, list[P]]
    given: dict[str, dict[str, Any]]


def draw_spread(dice: Dice, weights: Weights, by_group: bool) -> Spread:
    """Return a layout on 1 to 8 IPUs: of the groups that the tree has, or of groups with any parts of its leaves."""
    axes = {name: 2 for name in dice.weighted({"": 6, "tensor": 2, "tensor context": 1}).split()}
    most = 8 // 2 ** len(axes)
    ipus = dice.between(1, most if dice.chance(0.2) else min(4, most))
    replicas = 2 if 2 * ipus <= most and dice.chance(0.25) else 1
    splits, leaves = not by_group and dice.chance(0.5), range(len(weights.leaves))
    parts = [[Part(n)] if by_group else _cut(dice, n, weights.leaves[n].shape) for n in leaves]
    if by_group:
        numbers = jax.tree.unflatten(jax.tree.structure(weights.tree), leaves)
        held = {name: [*map(Part, jax.tree.leaves(numbers[name]))] for name in dice.shuffled([*weights.tree])}
    else:
        held = {f"stage {k}": list[Part]() for k in range(dice.between(1, 6))}
        for part in dice.shuffled([*itertools.chain(*parts)]):
            # of a leaf of state that several stages read, each has a copy
            is_state = weights.frozen[part.leaf] and part.rows is None and not splits
            copies = 2 if is_state and dice.chance(0.2) else 1
            for name in dice.shuffled([*held])[:copies]:
                held[name].append(part)
    places = [None, *range(ipus)] if dice.chance(0.8) else [*range(ipus)]
    owners: dict[str, int | None] = {name: dice.one_of(places) for name in held}
    further = [_further(dice, [weights.part(part).shape for part in of_leaf], axes) for of_leaf in parts]
    specs = {name: [_spec(dice, further[part.leaf], owners[name]) for part in held[name]] for name in held}
    without = lambda spec: P(*(None if splits and entry == "ipu" else entry for entry in spec))
    given: dict[str, dict[str, Any]] = {"specs": {}, "frozen": {}}
    for name, own in held.items():
        form = jax.tree.structure(weights.tree[name] if by_group else own)
        frozen = [weights.frozen[part.leaf] for part in own]
        needs_specs = owners[name] is None or any(any(spec) for spec in specs[name])
        if needs_specs or (axes and dice.chance(0.5)):
            given["specs"][name] = _given(dice, [*map(without, specs[name])], form)
        if any(frozen) or dice.chance(0.3):
            given["frozen"][name] = _given(dice, frozen, form)
    return Spread(replicas, ipus, axes, by_group, splits, held, owners, specs, given)


def random_bits(dice: Dice, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array that also has NaN, infinities, zeros of both signs, and numbers below the normal ones."""
    rng = np.random.default_rng(dice.number())
    if dtype == "bool":
        return rng.integers(2, size=shape).astype(bool)
    bits = rng.integers(256, size=math.prod(shape) * np.dtype(dtype).itemsize, dtype=np.uint8)
    if dtype == "bfloat16":
        words = bits.view(np.uint16)
        words[(words & 0x7FFF) > 0x7F80] = 0x7FC0  # of its NaN, XLA's CPU backend keeps this one only
    return bits.view(dtype).reshape(shape)


class _Shape(tuple):
    """A leaf's shape and dtype, and itself a leaf."""


def _node(dice: Dice, depth: int) -> Any:
    kind = dice.weighted({"leaf": 4, "dict": 3, "list": 1, "tuple": 1, "none": 0.3}) if depth else "leaf"
    if kind == "leaf":
        shape = tuple(dice.between(0, 7) for _ in range(dice.between(1, 3)))
        shape = dice.one_of(SHAPES) if dice.chance(0.8) else shape
        return _Shape((shape, dice.weighted(FROZEN if dice.chance(0.15) else TRAINED)))
    nodes = [_node(dice, depth - 1) for _ in range(dice.between(0, 4))]
    named = dict(zip(dice.shuffled(KEYS), nodes, strict=False))
    return {"dict": named, "list": nodes, "tuple": (*nodes,), "none": None}[kind]


def _wider(leaf: np.ndarray) -> np.ndarray:
    """Return numbers that may be wider without a loss in a dtype that is as wide again."""
    is_fine = leaf.dtype == np.int32 or (leaf.dtype == np.float32 and np.isfinite(leaf).all())
    return leaf.astype(f"{leaf.dtype.kind}8") if is_fine else leaf


def _cut(dice: Dice, number: int, shape: tuple[int, ...]) -> list[Part]:
    """Return a leaf whole, or in rows along a random axis."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if not axes or dice.chance(0.5):
        return [Part(number)]
    axis = dice.one_of(axes)
    ends = [0, *dice.some_of(range(1, shape[axis]), 0.4), shape[axis]]
    return [Part(number, rows, axis) for rows in itertools.pairwise(ends)]


def _further(dice: Dice, parts: list[tuple[int, ...]], axes: dict[str, int]) -> list[Any]:
    """Return the further axes over which each dim of a leaf is split, and of all its parts, given by their shapes."""
    entries: list[tuple[str, ...]] = [() for _ in parts[0]]
    for name in dice.some_of(dice.shuffled([*axes]), 0.6):
        fit = [d for d, of in enumerate(entries) if not any(shape[d] % 2 ** (len(of) + 1) for shape in parts)]
        if fit:
            entries[dim] = (*entries[dim := dice.one_of(fit)], name)
    return [entry[0] if len(entry) == 1 else entry or None for entry in entries]


def _spec(dice: Dice, further: list[Any], owner: int | None) -> P:
    """Return the spec of a part. The IPUs split any dim of a group that all of them have, even or not."""
    entries = [*further]
    whole = [dim for dim, entry in enumerate(entries) if entry is None]
    if owner is None and whole and dice.chance(0.7):
        entries[dice.one_of(whole)] = "ipu"
    while entries and entries[-1] is None and dice.chance(0.7):
        entries.pop()
    return P(*entries)


def _given(dice: Dice, of_leaves: list[Any], form: Any) -> Any:
    is_one = len({*map(str, of_leaves)}) == 1 and dice.chance(0.5)
    return of_leaves[0] if is_one else jax.tree.unflatten(form, of_leaves)

"""Random models as data: pieces of blocks, each piece one stage. `placed` and `plain` compute them independently.

Model -> Piece (a stage: its place, skips, state) -> Block (a few weights) -> Leaf (one weight)
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from random_programs.dice import described, normal

ROWS = 3  # of a micro-batch
VOCABULARY = 11


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One weight: its shape, its dtype, and the dim that is split over the IPUs of a concurrent stage."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    split: int | None = None
    frozen: bool = False

    def __repr__(self) -> str:
        split = "" if self.split is None else f" split {self.split}"
        return f"{self.dtype}{list(self.shape)}{split}{' frozen' if self.frozen else ''}"

    def value(self, seed: int) -> np.ndarray:
        if self.dtype == "int32":  # a permutation
            return np.random.default_rng(seed).permutation(self.shape[0]).astype(np.int32)
        return normal(seed, self.shape).astype(jnp.dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Block:
    """A layer: (ROWS, d_in) -> (ROWS, d_out), computed in `dtype`. The meaning of the options depends on its kind."""

    kind: str
    d_in: int
    d_out: int
    dtype: str = "float32"
    leaves: tuple[tuple[str, Leaf], ...] = ()
    layers: int = 1
    scaled: str = ""  # the weight by which x is multiplied before the scan
    remat: bool = False
    reverse: bool = False
    residual: bool = False
    constant: int = 0  # the seed of the array that the function closes over


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss at the end of the last stage, with options of the cross-entropy."""

    kind: str
    d_in: int
    leaves: tuple[tuple[str, Leaf], ...] = ()
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    mean_inside: bool = True


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stage. It is concurrent if `place` is None. Pieces with the same `group` share their weights."""

    place: int | None
    blocks: tuple[Block, ...] = ()
    loss: Loss | None = None
    group: str | None = None
    first: str = ""  # the input of the first piece: "x", "local ids" or "split ids"
    keep: float = 1.0  # the probability with which dropout keeps a number
    draws: bool = False  # whether dropout draws with `jax.random`, which takes long to compile, or uses the key's bits
    norm: bool = False  # a batch norm, which has state
    sends: str = ""
    takes: tuple[str, ...] = ()
    aux: bool = False
    wraps: bool = False  # whether it returns a tree rather than an array
    recompute: str = "auto"
    width: int = 0  # the width of the returned array


@dataclasses.dataclass(frozen=True)
class Model:
    """Everything that defines a pipeline case."""

    pieces: tuple[Piece, ...]
    groups: tuple[tuple[str, tuple[tuple[str, Leaf], ...]], ...]  # leaves named "block/leaf"
    width: int
    replicas: int
    ipus: int
    micro_batches: int
    schedule: str
    reduction: Literal["mean", "sum"]
    seed: int
    weighted: bool = False  # whether the loss is a sum, returned with its count

    @property
    def placement(self) -> tuple[int | None, ...]:
        return tuple(piece.place for piece in self.pieces)

    def weights(self) -> dict[str, Any]:
        """Return whole weights `{group: {block: {leaf: array}}}`, in the leaves' dtypes."""
        seeds = (self.seed + 1000 * g + i for g, (_, leaves) in enumerate(self.groups) for i in range(len(leaves)))
        return self.by_leaf(lambda leaf: leaf.value(next(seeds)))

    def by_leaf(self, of: Any) -> dict[str, Any]:
        """Return the tree of `weights` with `of(leaf)` in place of each array, called in the order of the groups."""
        found: dict[str, Any] = {}
        for name, leaves in self.groups:
            tree = found.setdefault(name, {})
            for path, leaf in leaves:
                block, of_block = path.split("/")
                tree.setdefault(block, {})[of_block] = of(leaf)
        return found

    def state(self) -> dict[str, Any]:
        """Return the batch norms' initial state, by group."""
        return {
            state_of(i): {
                "mean": normal(self.seed + i, (piece.width,)).astype(np.float32),
                "var": np.square(normal(self.seed + i + 1, (piece.width,))).astype(np.float32),
                "count": np.full((), i, np.int32),
            }
            for i, piece in enumerate(self.pieces)
            if piece.norm
        }

    def batch(self, number: int = 0) -> dict[str, np.ndarray]:
        """Return a batch with leaves (replicas, M, ...), also for one replica; another `number` is another batch."""
        lead = (self.replicas, self.micro_batches)
        seed = self.seed + 10_000 * (number + 1)
        rng = np.random.default_rng(seed)
        return {
            "x": normal(seed + 1, (*lead, ROWS, self.width), 1.0).astype(np.float32),
            "y": normal(seed + 2, (*lead, ROWS, self.width), 1.0).astype(np.float32),
            "ids": rng.integers(VOCABULARY, size=(*lead, ROWS)).astype(np.int32),
            "labels": rng.integers(VOCABULARY, size=(*lead, ROWS)).astype(np.int32),
            "flag": rng.integers(2, size=lead).astype(np.int32),
        }

    @property
    def dtypes(self) -> set[str]:
        blocks = {block.dtype for piece in self.pieces for block in piece.blocks}
        return blocks | {leaf.dtype for _, leaves in self.groups for _, leaf in leaves if leaf.dtype != "int32"}

    @property
    def random(self) -> bool:
        return any(piece.keep < 1 for piece in self.pieces)

    def __str__(self) -> str:
        lines = [
            f"replicas={self.replicas} ipus={self.ipus} micro_batches={self.micro_batches} schedule={self.schedule} "
            f"reduction={self.reduction} width={self.width}"
        ]
        for i, piece in enumerate(self.pieces):
            bare = dataclasses.replace(piece, blocks=(), loss=None)
            lines.append(f"  stage {i}: {described(bare)}")
            lines += [f"      {described(dataclasses.replace(block, leaves=()))}" for block in piece.blocks]
            lines += [f"      {described(dataclasses.replace(piece.loss, leaves=()))}"] if piece.loss else []
        for name, leaves in self.groups:
            lines.append(f"  weights {name}: {', '.join(f'{path} {leaf!r}' for path, leaf in leaves)}")
        return "\n".join(lines)


def state_of(stage: int) -> str:
    return f"state{stage}"


def constant_of(seed: int, width: int) -> np.ndarray:
    """Return the array that a function with this seed closes over."""
    return normal(seed, (width,)).astype(np.float32)


def count_of(mb: Any) -> Any:
    """Return the count of a weighted micro-batch: 0, 1, 3 or 4."""
    return (mb["flag"] * 3 + mb["ids"][0] % 2).astype("float32")

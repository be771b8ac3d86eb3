"""The kinds of chips that programs are compiled for, and their figures.

Figures are public: jax-ml.github.io/scaling-book/tpus, and NVIDIA's data sheet of the H100 SXM. Memory is what XLA's
compiler for the chip gives a program. No chip reaches its FLOP/s, so times by these figures are lower bounds.
"""

import dataclasses
import operator
import os
import re
from collections.abc import Sequence
from typing import Final

from ipu_jax.base.annotations import Device


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of chip.

    Attributes:
        name: as a topology names it.
        device_kind: as jax names it.
        memory: bytes for a program, its arguments included.
        flops: bfloat16 FLOP/s.
        memory_speed: bytes/s of its memory.
        clock: cycles/s, by which XLA's compiler for TPU estimates cycles.
        link: bytes/s of one link to a neighbour, one way.
        network: bytes/s of its share of the network between slices, or between hosts of GPUs.
        most: chips along each side of the largest TPU slice.
        wraps: a side of this many chips, or of a multiple, is a ring: its last chip has a link to the first. In a slice
            with three sides all must be such sides. 0: none is a ring.
    """

    name: str
    device_kind: str
    memory: float
    flops: float
    memory_speed: float
    clock: float
    link: float
    network: float
    most: tuple[int, ...] = ()
    wraps: int = 0

    def wrapped(self, sides: Sequence[int]) -> list[bool]:
        """Return which sides of a slice are rings.

        >>> KINDS["v5e"].wrapped((8, 16)), KINDS["v5p"].wrapped((4, 4, 8)), KINDS["v5p"].wrapped((2, 2, 4))
        ([False, True], [True, True, True], [False, False, False])
        """
        rings = [self.wraps > 0 and side % self.wraps == 0 for side in sides]
        return rings if len(self.most) < 3 else [all(rings)] * len(rings)


_GIB = 2.0**30
KINDS: Final = {
    kind.name: kind
    for kind in (
        Kind("v5e", "TPU v5 lite", 15.75 * _GIB, 1.97e14, 8.2e11, 1.5e9, 4.5e10, 6.25e9, (16, 16), 16),
        Kind("v5p", "TPU v5", 95.74 * _GIB, 4.59e14, 2.8e12, 1.75e9, 9e10, 6.25e9, (16, 20, 28), 4),
        Kind("v6e", "TPU v6 lite", 31.25 * _GIB, 9.2e14, 1.6e12, 1.75e9, 9e10, 1.25e10, (16, 16), 16),
        Kind("h100", "NVIDIA H100 80GB HBM3", 8.49e10, 9.9e14, 3.35e12, 1.98e9, 4.5e11, 5e10),
    )
}


TOPOLOGIES: Final = "v5e:4x4, v5p:4x4x4, v6e:2x4 or h100x8"
_GPUS_OF_A_HOST: Final = 8


def topology_of(text: str) -> tuple[Kind, tuple[int, ...]]:
    """Return the kind of chips that a text names, and how many are along each side of a TPU slice.

    For GPUs, the sides are (hosts, GPUs of a host).

    Raises:
        ValueError: it names none.

    >>> topology_of("v5e:2x4")[1], topology_of("h100x16")[1]
    ((2, 4), (2, 8))
    """
    if found := re.fullmatch(r"h100x([1-9]\d*)", text):
        hosts, rest = divmod(int(found[1]), _GPUS_OF_A_HOST)
        if hosts and rest:
            raise ValueError(f"topology={text!r} is not a whole number of hosts with 8 GPUs: give h100x{hosts * 8}")
        return KINDS["h100"], (hosts, _GPUS_OF_A_HOST) if hosts else (1, rest)
    found = re.fullmatch(r"(v\w+):([1-9]\d*(?:x[1-9]\d*)*)", text)
    if not found or found[1] not in KINDS:
        raise ValueError(f"topology={text!r} is not known: give one such as {TOPOLOGIES}")
    kind, sides = KINDS[found[1]], tuple(int(side) for side in found[2].split("x"))
    if len(sides) != len(kind.most) or any(map(operator.gt, sorted(sides), kind.most)):
        most = "x".join(map(str, kind.most))
        raise ValueError(f"topology={text!r} is not a slice of {kind.name}, at most {most}: give a smaller one")
    return kind, sides


def kind_of(device: Device) -> Kind | None:
    """Return the kind of a device, or None if it is of another kind."""
    return next((kind for kind in KINDS.values() if kind.device_kind == device.device_kind), None)


def memory_for_jax(kind: Kind, platform: str) -> float:
    """Return the bytes that jax gives a program: of a GPU, 75% or what XLA_PYTHON_CLIENT_MEM_FRACTION says."""
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75)) if platform == "gpu" else 1.0
    return kind.memory * share

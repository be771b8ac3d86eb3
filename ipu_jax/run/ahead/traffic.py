"""List what a program sends between chips, and how long it takes on paper.

    permute                                    over the links to its target, one after the other
    all-reduce, all-gather, reduce-scatter     of chips that fill a box of a slice, such as 4 x 4: over several links

An all-gather of V bytes over n chips: each chip receives (n-1)/n V. A box has a line or a ring of chips along each of
its sides, and XLA sends a part of the array along each side at a time.

    side with wrap-around    a ring has two ways round, and a chip a neighbour on each: 2 links a side
    side without             a chip at the end of a line has one neighbour, and all wait for it: 1 link a side

So the chips of a v5e:4x4 have 2 links, as many as a corner, of a v5e:16x16 and a v6e:16x16 they have 4, of a v5p:2x2x2
3 and of a v5p:4x4x4 6. A reduce-scatter takes as long, and an all-reduce is both, one after the other.

The source is jax-ml.github.io/scaling-book, "sharding": V / (two links' speed) per wrapped side, a side without
wrap-around takes twice as long; and "tpus": which sides are wrapped. XLA's compiler for TPU writes what it chose into
the program: an all-reduce over v5e:4x4 is in 4 parts, each along one side and then the other, two of them the other way
round ("UniDirectionNDRingStrategy{colors:4 phases:2"). Each ring closes over the links of the line itself, which halves
their speed, so that the 4 parts take as long as this says. Over 2x2 and 2x4 it is one ring over all chips, both ways.

Chips that fill no box pass the array round in their order, over one link at a time.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from jax.sharding import Mesh

from ipu_jax.base.annotations import Device
from ipu_jax.core.compiled.guards import connected
from ipu_jax.core.compiled.program import Collective, Program
from ipu_jax.core.mesh.device_order import hops
from ipu_jax.run.ahead.kinds import Kind

_ALONG_SIDES = ("all-reduce", "all-gather", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives that are alike.

    Attributes:
        op: such as "all-reduce", with the message of a permute: "permute y".
        axis: of the mesh, "ipu" or "replica"; both for a collective over all chips.
        runs: how often one of them runs in a step, at most.
        nbytes: the bytes on one chip in a step, all runs together.
        hops: the most links between neighbours in its order; None if it goes over the network between slices or hosts.
        beside_work: whether the chip works while the message travels.
        seconds: how long they take on paper; None if the kind of the chip is not known.
        links: how many links of a chip carry it at a time, one way; of a GPU, whose links are counted together, 1.
    """

    op: str
    axis: str
    runs: int
    nbytes: int
    hops: int | None
    beside_work: bool
    seconds: float | None
    links: int = 1

    @property
    def over(self) -> str:
        """Return over what it goes, in words."""
        if self.hops is None:
            return "network"
        return f"{self.links} links" if self.links > 1 else f"{self.hops} hop{'s' * (self.hops > 1)}"


def rows_of(program: Program, mesh: Mesh, kind: Kind | None) -> list[Row]:
    """Return what a program sends, like collectives together, those that take the most time first."""
    found: dict[Device, list[Collective]] = {}
    for collective, groups, axis in connected(program.collectives, mesh):
        if collective.nbytes:
            links = _links_of(collective.op, groups, mesh, kind)
            distance = 1 if links else _hops_of(groups, mesh)
            key = (_name_of(collective), axis, distance, links or 1, collective.beside_work, len(groups[0]))
            found.setdefault(key, []).append(collective)
    rows = []
    for (name, axis, distance, links, beside, members), alike in found.items():
        nbytes = sum(collective.runs * collective.nbytes for collective in alike)
        seconds = None
        if kind is not None:
            speed = kind.network if distance is None else kind.link * links / max(distance, 1)
            seconds = _share_sent(alike[0].op, members) * nbytes / speed
        rows.append(Row(name, axis, sum(c.runs for c in alike), nbytes, distance, beside, seconds, links))
    return sorted(rows, key=lambda row: (-(row.seconds or 0.0), -row.nbytes))


def _share_sent(op: str, members: int) -> float:
    """Return the bytes that a chip sends in a ring, divided by the bytes of the result."""
    around = (members - 1) / members
    if op == "reduce-scatter":
        return members - 1
    return {"all-reduce": 2 * around, "collective-permute": 1.0}.get(op, around)


def _name_of(collective: Collective) -> str:
    message = re.search(r"ipu_jax\.(y|dx)\.\d+", collective.instruction.place)
    op = collective.op.removeprefix("collective-")
    return f"{op} {message[1]}" if message and op == "permute" else op


def _links_of(op: str, groups: Sequence[Sequence[int]], mesh: Mesh, kind: Kind | None) -> int:
    """Return the links of a chip that carry a collective at a time, the fewest of all groups; 0 for no full boxes."""
    devices = mesh.devices.reshape(-1)
    if op not in _ALONG_SIDES or getattr(devices[0], "coords", None) is None:
        return 0
    client = getattr(devices[0], "client", None)  # the mesh may be a part of a slice
    domain = _domain_of(devices[0])
    of_slice = [one for one in (client.devices() if client else devices) if _domain_of(one) == domain]
    sides = _sides_of(of_slice)
    wrapped = [False] * len(sides) if kind is None else kind.wrapped(sides)
    fewest = []
    for group in groups:
        members = [devices[number] for number in group]
        box = _sides_of(members)
        if len({_domain_of(one) for one in members}) > 1 or math.prod(box) != len(
            {tuple(one.coords) for one in members}
        ):
            return 0
        ways = zip(box, sides, wrapped, strict=True)
        fewest.append(sum(2 if ring and side == whole else 1 for side, whole, ring in ways if side > 1))
    return min(fewest)


def _sides_of(devices: Sequence[Device]) -> list[int]:
    """Return how many chips long each side of the box around some chips is."""
    return [max(side) - min(side) + 1 for side in zip(*(device.coords for device in devices), strict=True)]


def _hops_of(groups: Sequence[Sequence[int]], mesh: Mesh) -> int | None:
    devices = mesh.devices.reshape(-1)
    most = 1
    for group in groups:
        for one, other in itertools.pairwise(devices[number] for number in group):
            if _domain_of(one) != _domain_of(other):
                return None
            most = max(most, hops(one, other))
    return most


def _domain_of(device: Device) -> Device:
    """Return the slice of a TPU or the host of a GPU, in which fast links connect all devices."""
    return device.process_index if device.platform == "gpu" else getattr(device, "slice_index", None)

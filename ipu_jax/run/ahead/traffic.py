"""Describe what a compiled program sends: over which axis of the mesh, how many bytes, over how many links.

permute y       ipu       19 x 8.4 MB    1 hop    beside work
all-reduce      replica    1 x 25.2 MB   1 hop    exposed
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from ipu_jax.core.compiled.in_stages import axis_of, groups_of
from ipu_jax.core.compiled.program import Collective, Program
from ipu_jax.core.device_order import hops
from ipu_jax.run.ahead.kinds import Kind


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
        seconds: how long they take on paper, over one link each; None if the kind of the chip is not known.
    """

    op: str
    axis: str
    runs: int
    nbytes: int
    hops: int | None
    beside_work: bool
    seconds: float | None


def rows_of(program: Program, mesh: Mesh, kind: Kind | None) -> list[Row]:
    """Return what a program sends, like collectives together, those that take the most time first."""
    found: dict[Any, list[tuple[Collective, int | None]]] = {}
    for collective in program.collectives:
        groups = [group for group in groups_of(collective.instruction, mesh) if len(set(group)) > 1]
        if not groups or not collective.nbytes:
            continue
        axis, distance = axis_of(groups, mesh), _hops_of(groups, mesh)
        key = (_name_of(collective), axis, distance, collective.beside_work, len(groups[0]))
        found.setdefault(key, []).append((collective, distance))
    rows = []
    for (name, axis, distance, beside, members), alike in found.items():
        nbytes = sum(collective.runs * collective.nbytes for collective, _ in alike)
        seconds = None
        if kind is not None:
            speed = kind.network if distance is None else kind.link / max(distance, 1)
            seconds = _share_sent(alike[0][0].op, members) * nbytes / speed
        rows.append(Row(name, axis, sum(c.runs for c, _ in alike), nbytes, distance, beside, seconds))
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


def _hops_of(groups: Sequence[Sequence[int]], mesh: Mesh) -> int | None:
    devices = mesh.devices.reshape(-1)
    most = 1
    for group in groups:
        for one, other in itertools.pairwise(devices[number] for number in group):
            if _domain_of(one) != _domain_of(other):
                return None
            most = max(most, hops(one, other))
    return most


def _domain_of(device: Any) -> Any:
    """Return the slice of a TPU or the host of a GPU, in which fast links connect all devices."""
    return device.process_index if device.platform == "gpu" else getattr(device, "slice_index", None)

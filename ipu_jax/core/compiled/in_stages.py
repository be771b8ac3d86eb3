"""Say what the tasks of stages send: what a stage's own function sends, and what XLA put in to split its arrays.

    stage     task  collective  axis    in a run
    block 0   F     all-reduce  tensor  1 x 24.6 kB
    block 0   B     all-reduce  tensor  1 x 24.6 kB

XLA splits a stage over the further axes of a mesh (`mesh/axes.py`). Its collectives have groups, the devices of one
IPU, and can be in a guard that other IPUs don't run. Only a permute has no groups: all devices of the mesh must reach
it. XLA permutes where a dim that is split is shifted or convolved. In a guard of one IPU that would hang.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from jax.sharding import Mesh

from ipu_jax.core.compiled.program import Collective, Instruction, Program
from ipu_jax.core.engine.labels import Guard, PlanNames, guard_named, plan_named
from ipu_jax.core.engine.order import EXCHANGES, WORDS

_IDS_OF_A_SLICE: Final = 100_000


@dataclasses.dataclass(frozen=True)
class StageCollectives:
    """Like collectives of one task.

    Attributes:
        stages: the names of the stages that the task runs. Like stages on several IPUs run one piece of program.
        task: "F", "B", "W", "F and B" for a concurrent head; "queue" where a message is put into a queue.
        op: such as "all-reduce".
        axis: of the mesh; several if it goes along several, such as "replica x ipu".
        count: how many there are in a run of the task, for one micro-batch.
        nbytes: the bytes of their results on one device, all together.
    """

    stages: tuple[str, ...]
    task: str
    op: str
    axis: str
    count: int
    nbytes: int


def in_stages(program: Program, mesh: Mesh) -> list[StageCollectives]:
    """Return what the tasks of a compiled program send, stage by stage. Exchanges between stages are not listed."""
    found: dict[tuple[tuple[str, ...], str, str, str], list[int]] = {}
    for guard, plan, (kind, number) in guards_of(program):
        if kind in EXCHANGES:
            continue
        for sent, _, axis in connected(program.collectives_of(guard), mesh):
            sums = found.setdefault((stage_names(plan, number), WORDS[kind], sent.op, axis), [0, 0])
            sums[0] += sent.runs
            sums[1] += sent.runs * sent.nbytes
    return [StageCollectives(*key, *sums) for key, sums in found.items()]


def guards_of(program: Program) -> list[tuple[Instruction, PlanNames, Guard]]:
    """Return the guards with their plans, by segment class, and in the order of a tick."""
    named = ((guard, plan_named(guard.place), guard_named(guard.place)) for guard in program.guards)
    found = [(guard, plan, label) for guard, plan, label in named if plan is not None and label is not None]
    return sorted(found, key=lambda one: (one[2][1], one[1].tick.position(one[2])))


def connected(collectives: Iterable[Collective], mesh: Mesh) -> Iterator[tuple[Collective, list[list[int]], str]]:
    """Yield each collective that sends something, the groups of devices that it connects, and its axis."""
    for collective in collectives:
        groups = [group for group in _groups_of(collective.instruction, mesh) if len(set(group)) > 1]
        if groups:
            yield collective, groups, _axis_of(groups, mesh)


def stage_names(plan: PlanNames, number: int) -> tuple[str, ...]:
    return tuple(name for i in plan.classes[number] for name in plan.segments[i].stages)


def _groups_of(instruction: Instruction, mesh: Mesh) -> list[list[int]]:
    """Return the devices that a collective connects, by their numbers in the mesh.

    Between TPU slices XLA names devices by their ids: `{1,2}x{0:3}` are chips 0 to 3 of two slices, each with its like,
    and `{{100001->200000}}` is a pair.
    """
    found = re.search(r'_xla_megascale_target="?(?:\{([\d,]+)\}x\{0:(\d+)\}|\{([^}]*)\})', instruction.line)
    if not found:
        return instruction.groups
    if found[1]:
        ids = [[_IDS_OF_A_SLICE * int(n) + k for n in found[1].split(",")] for k in range(int(found[2]) + 1)]
    else:
        ids = [[int(one), int(other)] for one, other in re.findall(r"(\d+)->(\d+)", instruction.line)]
    numbers = {device.id: number for number, device in enumerate(mesh.devices.flat)}
    return [[numbers[each] for each in group if each in numbers] for group in ids]


def _axis_of(groups: Sequence[Sequence[int]], mesh: Mesh) -> str:
    """Return the axis along which groups of devices lie, or several, as in "replica x ipu"."""
    places = [np.array(np.unravel_index(group, mesh.devices.shape)) for group in groups]
    varies = np.any([(place != place[:, :1]).any(axis=1) for place in places], axis=0)
    return " x ".join(itertools.compress(mesh.axis_names, varies))

"""Decide whether IPUs run only their own tasks, or each other's tasks as well.

    guards="own"       an IPU runs F of its stages when the schedule says so; otherwise it waits
    guards="uniform"   all IPUs run F of a stage at the same time, and only the IPU of the stage keeps its results

XLA splits a stage over further mesh axes, and can put a permute into it, for which all devices of the mesh must come.
Own guards would hang there. So a program on further axes is compiled before it runs, and searched for permutes.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from ipu_jax.base.annotations import Tree
from ipu_jax.base.checks import check_choice
from ipu_jax.core.compiled.program import Collective, Instruction, Program, compiled_for
from ipu_jax.core.engine.labels import Guard, PlanNames, guard_named, plan_named
from ipu_jax.core.engine.order import EXCHANGES, QUEUES, WORDS
from ipu_jax.core.mesh.axes import further_axes, parts
from ipu_jax.core.mesh.devices import IPU_AXIS
from ipu_jax.core.mesh.guard import SLOT

Guards = Literal["auto", "own", "uniform"]
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
    """Return what the tasks of a compiled program send, stage by stage. Exchanges between stages are not listed.

        stage     task  collective  axis    in a run
        block 0   F     all-reduce  tensor  1 x 24.6 kB
        block 0   B     all-reduce  tensor  1 x 24.6 kB

    These are what a stage's own function sends, and what XLA put in to split its arrays (`mesh/axes.py`). They have
    groups, the devices of one IPU, and can be in a guard that other IPUs don't run. Only a permute has no groups: XLA
    permutes where a dim that is split is shifted or convolved.
    """
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


class GuardCheck:
    """Find out, once for each program of a pipeline and before it runs, whether it needs uniform guards.

    Args:
        given: "own", "uniform", or "auto": own guards, unless a program needs uniform ones.
        mesh: of the pipeline.

    Attributes:
        needed: per program that was looked at, whether it needs uniform guards.

    Raises:
        ValueError: `given` is none of these.
    """

    def __init__(self, given: Guards, mesh: Mesh):
        check_choice("guards", given, get_args(Guards))
        self.given: Guards = given
        self._mesh, self._may_exchange = mesh, mesh.shape[IPU_AXIS] > 1 and parts(further_axes(mesh)) > 1
        self.needed: dict[Any, bool] = {}

    def are_uniform(
        self, program: Hashable, args: Tree, lower: Callable[[bool], Any], *, uniform: bool, runs: bool = True
    ) -> bool:
        """Return whether a program must have uniform guards. It is compiled if that was not done.

        Args:
            program: an identifier of the program.
            args: its arguments.
            lower: lowers it for these arguments (True), or for their shapes where weights are as their specs say.
            uniform: whether it has uniform guards now.
            runs: whether it runs; one that does not may be too large for the devices.

        Raises:
            ValueError: it needs uniform guards where "own" was given; or its optimizer exchanges data in an update.
        """
        if not self._may_exchange:
            return uniform
        leaves, treedef = jax.tree.flatten(args)
        is_there = runs and not any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in leaves)
        where = lambda leaf: getattr(leaf, "sharding", None) if is_there else None
        kind = lambda leaf: (jnp.shape(leaf), getattr(leaf, "dtype", type(leaf)), where(leaf))
        seen = (program, uniform, treedef, tuple(map(kind, leaves)))
        too_large = () if runs else (jax.errors.JaxRuntimeError,)
        with contextlib.suppress(*too_large):
            if seen not in self.needed:
                self.needed[seen] = self._needs_uniform(lower(is_there), uniform=uniform)
        return self.needed.get(seen, uniform)

    def _needs_uniform(self, lowered: Any, *, uniform: bool) -> bool:
        compiled = Program(compiled_for(self._mesh.devices.flat[0], lowered))
        check_update(compiled, self._mesh)
        why = None if uniform else why_not_own(compiled, self._mesh)
        if why is not None and self.given == "own":
            raise ValueError(why)
        return uniform or why is not None


def check_update(program: Program, mesh: Mesh) -> None:
    """Raise `ValueError` if an IPU's update of its own leaves sends something for which all devices must be there."""
    for guard in program.instructions():
        is_slot = guard.op == "while" and guard.place.endswith(f"{SLOT}/while")
        if found := _needing_all(program, guard, mesh) if is_slot else None:
            op, axis = found
            raise ValueError(
                f"the optimizer makes XLA exchange data over axis {axis!r} ({op}) in the update of an IPU's own leaf, "
                "for which XLA waits for all devices of the mesh, but others would not take part: split the leaf along "
                "another dim, or leave it whole"
            )


def _needing_all(program: Program, guard: Instruction, mesh: Mesh) -> tuple[str, str] | None:
    """Return the kind and the axis of something that a guard sends and for which all devices must be there."""
    for sent, _, axis in connected(program.collectives_of(guard), mesh):
        if sent.op == "collective-permute" or IPU_AXIS in axis.split(" x "):
            return sent.op, axis
    return None


def why_not_own(program: Program, mesh: Mesh) -> str | None:
    """Return why own guards would hang: a task of one IPU sends something for which all devices must be there."""
    for guard, plan, (kind, number) in guards_of(program):
        segment = plan.segments[plan.classes[number][0]] if kind not in EXCHANGES else None
        if segment is None or plan.ipus == 1 or (segment.place is None and kind not in QUEUES):
            continue
        if found := _needing_all(program, guard, mesh):
            (op, axis), names = found, ", ".join(map(repr, stage_names(plan, number)))
            return (
                f"stage {names} makes XLA exchange data over axis {axis!r} ({op} in {WORDS[kind]}), for which XLA "
                "waits for all devices of the mesh, and IPUs that run other stages would not take part: use "
                "guards='uniform', or keep a dim that is shifted or convolved whole "
                "(jax.lax.with_sharding_constraint)"
            )
    return None

"""Decide whether IPUs run only their own tasks, or each other's tasks as well.

    guards="own"       an IPU runs F of its stages when the schedule says so; otherwise it waits
    guards="uniform"   all IPUs run F of a stage at the same time, and only the IPU of the stage keeps its results

XLA splits a stage over further mesh axes, and can put a permute into it, for which all devices of the mesh must come.
Own guards would hang there. So a program on further axes is compiled before it runs, and searched for permutes.
"""

import contextlib
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh

from ipu_jax.base.annotations import Tree, Value
from ipu_jax.base.checks import check_choice
from ipu_jax.core.compiled.in_stages import check_update, why_not_own
from ipu_jax.core.compiled.program import Program, compiled_for
from ipu_jax.core.devices import IPU_AXIS
from ipu_jax.core.mesh_axes import further_axes, parts

Guards = Literal["auto", "own", "uniform"]
_GUARDS: Final = get_args(Guards)


class GuardChoice:
    """The guards of a pipeline.

    Args:
        given: "own", "uniform", or "auto": own guards, until a program needs uniform ones.
        mesh: of the pipeline.

    Attributes:
        uniform: whether programs that are traced from now on have uniform guards.

    Raises:
        ValueError: `given` is none of these.
    """

    def __init__(self, given: Guards, mesh: Mesh):
        check_choice("guards", given, _GUARDS)
        self.given: Guards = given
        self._mesh, self.uniform = mesh, given == "uniform"
        self._may_exchange = mesh.shape[IPU_AXIS] > 1 and parts(further_axes(mesh)) > 1
        self._seen: set[Any] = set()

    def check_shapes(self, program: Any, args: Tree, lower: Callable[[], Any]) -> None:
        """Check a program that is not run, as `check` does; one that is too large for the devices has own guards."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self.check(program, jax.tree.map(_shape_of, args), lower)

    def check(self, program: Any, args: Tree, lower: Callable[[], Any]) -> None:
        """Make sure that a jitted program of the pipeline can run with these arguments, before it does.

        It compiles the program if that was not done, and takes uniform guards if it needs them under "auto".

        Args:
            program: the program.
            args: its arguments.
            lower: lowers it for arguments that are tracers or shapes, with weights where their specs say.

        Raises:
            ValueError: it needs uniform guards, and has own ones; or its optimizer exchanges data in an update.
        """
        if not self._may_exchange:
            return
        leaves, treedef = jax.tree.flatten(args)
        is_there = not any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in leaves)
        where = lambda leaf: getattr(leaf, "sharding", None) if is_there else None
        kind = lambda leaf: (jnp.shape(leaf), getattr(leaf, "dtype", type(leaf)), where(leaf))
        shapes = (program, treedef, tuple(map(kind, leaves)))
        if shapes in self._seen:
            return
        lowered = program.lower(*args) if is_there else lower()
        compiled = Program(compiled_for(self._mesh.devices.flat[0], lowered))
        check_update(compiled, self._mesh)
        why = None if self.uniform else why_not_own(compiled, self._mesh)
        if why is not None and self.given == "own":
            raise ValueError(why)
        if why is not None:
            self.uniform = True
            program.clear_cache()  # of the one with own guards
        self._seen.add(shapes)


def _shape_of(leaf: Value) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

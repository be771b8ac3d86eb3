"""Compile a model for the devices of its mesh, there or only described, and report on it.

    step = make_train_step(Pipeline(stages, mesh=make_mesh(2, 4, devices=describe("v5e:2x4"))), optax.adamw(1e-3))
    print(compile_ahead(step, weights, batch))       # of jax.ShapeDtypeStruct: nothing is placed or run

A training script needs no such mesh under `ipu-compile`, and one more line: `hand_over(step, weights, batch)`.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from ipu_jax.base.annotations import Batch, Key, Params, Tree
from ipu_jax.core.analysis.report import make_report
from ipu_jax.core.compiled.program import Program, host_loops
from ipu_jax.core.engine.labels import UPDATE
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.mesh.devices import REPLICA_AXIS, is_described
from ipu_jax.core.mesh.host_memory import HOST
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.programs.cost import bytes_of, in_units
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.run.ahead.chip_report import ChipReport, Memory
from ipu_jax.run.ahead.compilers import compile_lowered, version_of
from ipu_jax.run.ahead.explain import explain_step
from ipu_jax.run.ahead.kinds import kind_of, memory_for_jax
from ipu_jax.run.ahead.paper import estimate, flops_by_task, kernels_by_name
from ipu_jax.run.ahead.traffic import rows_of
from ipu_jax.training.update.state import TrainState
from ipu_jax.training.update.step import TrainStep

_SCHEDULES: Final = ("grouped", "1f1b", "zb-h1")
_UNITS: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class HandedOver(BaseException):
    """Ends a script that has handed its model over to `ipu-compile`."""

    def __init__(self, report: ChipReport):
        super().__init__(report)
        self.report = report


_awaited: tuple[str | None, bool] | None = None


@contextlib.contextmanager
def awaiting(offload: str | None = None, *, explain: bool = False) -> Iterator[None]:
    """Let `hand_over` compile, and end the script by raising `HandedOver`.

    Args:
        offload: what rests in the host's memory; None: what the options of the script's step say.
        explain: as for `compile_ahead`.
    """
    global _awaited
    _awaited = offload, explain
    try:
        yield
    finally:
        _awaited = None


def hand_over(model: Any, params: Params, batch: Batch, *, state: Tree = None, key: Key = None) -> None:
    """Give `ipu-compile` the model of a script, which ends here. Without `ipu-compile` this does nothing.

    Call it before weights are placed. Under `ipu-compile`, `make_mesh` takes the chips of `--topology`.

    Args:
        model, params, batch, state, key: as for `compile_ahead`.
    """
    if _awaited is not None:
        offload, explain = _awaited
        if offload and not isinstance(model, TrainStep):
            raise ValueError(f"--offload {offload} needs a TrainStep, which has one: hand it over, or leave it out")
        model = model.offloading((offload,)) if offload else model
        raise HandedOver(compile_ahead(model, params, batch, state=state, key=key, explain=explain))


def compile_ahead(
    model: Any, params: Params, batch: Batch, *, state: Tree = None, key: Key = None, explain: bool = False
) -> ChipReport:
    """Compile one step of a model for the devices of its mesh, and say what it needs and costs. Nothing is run.

    Args:
        model: a `TrainStep`, or a `Pipeline` for its loss and gradients.
        params: whole weights or their shapes, as `init` or `shard` take them; or placed ones.
        batch: the batch of a call or its shapes.
        state: the stages' state or its shapes, if stages hold any.
        key: a typed key or its shape, if anything draws numbers.
        explain: whether the report also says where the time of a step on paper goes, and what to change next.

    Raises:
        ValueError: `model` is neither, the arguments do not fit it, XLA cannot compile for a part of a TPU slice, or
            there is no step on paper to explain: `model` has no pipeline, or the kind of the chips is not known.

    >>> import jax.numpy as jnp
    >>> from ipu_jax import Stage
    >>> pipeline = Pipeline([Stage(lambda w, x, mb: jnp.sum(mb @ w), params="w", ipu=0)])
    >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, "float32")
    >>> report = compile_ahead(pipeline, {"w": shape(3, 1)}, shape(1, 4, 3))
    >>> report.memory.arguments, report.flops["F"]  # 3 weights and 12 numbers; 2 * 4 * 3 for the product, and the sum
    (60, 28)
    """
    (chosen, lowered), pipeline, given, held = _lowered(model, params, batch, state, key)
    plan = chosen and chosen.plan(*given)
    is_step, mesh = isinstance(model, TrainStep), pipeline.mesh
    device, kind = mesh.devices.flat[0], kind_of(mesh.devices.flat[0])
    available = None if kind is None else int(memory_for_jax(kind, device.platform))
    _check_part(mesh)
    if explain and (plan is None or kind is None):
        why = "a pipeline, and this model has none" if plan is None else f"chips whose figures are known, not {device}"
        raise ValueError(f"explain=True, or --explain, needs {why}: leave it out")
    of_batch = 0 if batch is None else bytes_of(getattr(batch, "arrays", batch)) // mesh.shape[REPLICA_AXIS]
    program, thunks, memory = _compiled(lowered, mesh, bytes_per_device(held) + of_batch, available)
    room = (memory.available or 0) - memory.arguments
    rows = [] if program is None else rows_of(program, mesh, kind)
    paper, kernels, explanation = None, (), None
    if plan is not None and kind is not None and program is not None:
        paper = estimate(plan, kind, rows, program.bodies, written=bytes_per_device(held) if is_step else 0)
        kernels = kernels_by_name(plan, kind) if any(program.bodies.values()) else ()
        explanation = explain_step(plan, kind, program, rows, paper) if explain else None
    outer = given_dims(model.options.device_iterations) if is_step else 0
    return ChipReport(
        model=str(model).splitlines()[0],
        chips=mesh.size,
        chip=device.device_kind,
        versions={"jax": jax.__version__, **version_of(device.platform)},
        mesh=dict(mesh.shape),
        memory=memory,
        flops={} if plan is None else flops_by_task(plan),
        cycles=_cycles(program),
        rows=tuple(rows),
        host_loops=None if thunks is None else host_loops(thunks, outer),
        paper=paper,
        kernels=kernels,
        mends=() if plan is None or not memory.missing else mends_of(pipeline, plan, given, room),
        explanation=explanation,
        program=program,
    )


def _lowered(model: Any, params: Params, batch: Batch, state: Tree, key: Key) -> tuple[Any, Any, StepArgs, Tree]:
    """Return what `lowered` returns, the pipeline or replicas, the arguments of an update, and what the IPUs hold."""
    if isinstance(model, TrainStep):
        held = params if isinstance(params, TrainState) else model.shapes(params, stages=state, key=key)
        given = model.placement.of_one_update(held, getattr(batch, "arrays", batch))  # of a FeedBatch
        return model.lowered(held, batch), model.model, given, held
    if isinstance(model, Pipeline):
        placed = params if isinstance(params, Sharded) else model.shard_shapes(params)
        if state is not None and not isinstance(state, Sharded):
            state = model.shard_state_shapes(state)
        given = StepArgs(placed, batch, state, key)
        return model.lowered(given), model, given, (placed, state)
    raise ValueError(f"model={model!r} is neither a TrainStep nor a Pipeline: make one from a loss function first")


def _compiled(
    lowered: Any, mesh: Mesh, arguments: int, available: int | None
) -> tuple[Program | None, str | None, Memory]:
    """Return a compiled program, its thunks and its memory; only the memory if it is too large for the chip."""
    try:
        compiled, thunks = compile_lowered(lowered, mesh.devices.flat[0])
        return Program(compiled), thunks, _memory(compiled.memory_analysis(), available)
    except jax.errors.JaxRuntimeError as error:
        if "Unexpected device_id" in str(error):
            raise _partial(mesh) from error
        memory = _too_large(error, arguments, available)
        if memory is None:
            raise
        return None, None, memory


def bytes_per_device(tree: Tree) -> int:
    """Return the bytes of arrays, or of their shapes, on one device of their shardings; not those on the host."""
    share = lambda leaf: leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
    placed = [leaf for leaf in jax.tree.leaves(tree) if getattr(leaf, "sharding", None) is not None]
    return sum(share(leaf) for leaf in placed if leaf.sharding.memory_kind != HOST)


def _memory(analysis: Any, available: int | None) -> Memory:
    results, reused = analysis.output_size_in_bytes, analysis.alias_size_in_bytes
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    program = analysis.generated_code_size_in_bytes
    needed = arguments + results - reused + temporary + program
    on_host = [getattr(analysis, f"host_{name}_size_in_bytes") for name in ("argument", "output", "temp", "alias")]
    return Memory(arguments, results, reused, temporary, program, needed, available, sum(on_host) - 2 * on_host[-1])


def _check_part(mesh: Mesh) -> None:
    """Raise `ValueError` for a part of a TPU slice with which XLA's compiler would end the process.

    It does where the chips of a ring are a rectangle, and their number does not divide the slice's.
    """
    here = mesh.devices.flat[0]
    there = len(here.client.devices())
    if here.platform != "tpu" or not is_described(here) or mesh.size == there:
        return
    along = (np.moveaxis(mesh.devices, axis, -1).reshape(-1, size) for axis, size in enumerate(mesh.devices.shape))
    for ring in itertools.chain.from_iterable(along):
        sides = [len(set(side)) for side in zip(*(device.coords for device in ring), strict=True)]
        if there % len(ring) and sum(side > 1 for side in sides) > 1 and math.prod(sides) == len(ring):
            raise _partial(mesh)


def _partial(mesh: Mesh) -> ValueError:
    there = len(mesh.devices.flat[0].client.devices())
    return ValueError(
        f"XLA's compiler for TPU cannot compile for these {mesh.size} of the {there} chips: use all of them, or "
        "another topology"
    )


def _too_large(error: Exception, arguments: int, available: int | None) -> Memory | None:
    """Return what the compiler says of a program that is too large for the chip, or None if that is not the error."""
    said = str(error)
    if not said.startswith("RESOURCE_EXHAUSTED"):
        return None
    sizes = [float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([KMGT])\b", said)]
    return Memory(arguments, 0, 0, None, None, int(max([*sizes, (available or 0) + 1])), available)


def _cycles(program: Program | None) -> dict[str, int]:
    if program is None or not program.cycles:
        return {}
    tasks = {task: program.cycles_of(task) for task in ("F", "B", "W", "FB")}
    return {name: cycles for name, cycles in {**tasks, "update": program.cycles_under(UPDATE)}.items() if cycles}


def mends_of(pipeline: Pipeline, plan: Plan, given: StepArgs, room: int) -> tuple[str, ...]:
    """Return a line per change that makes the temporary bytes smaller, and a last one if none does.

    It goes by the bytes that a report predicts, and compiles nothing. Each change is tried alone, on the shapes of the
    step: recompute="all" on every stage, twice as many micro-batches of half the size, another schedule.

    Args:
        pipeline: the pipeline.
        plan: the plan of its step.
        given: the step's arguments as a user gives them, arrays or shapes.
        room: the bytes that a chip has beside the program's arguments.
    """
    now = make_report(plan, given.batch, mesh=pipeline.mesh).predicted_temporary
    found = []
    for name, change, args in _changes(pipeline, plan.schedule.name, given):
        # a schedule that the stages' places or M do not fit, or a function that a micro-batch of another size does not
        with contextlib.suppress(ValueError, TypeError):
            other = change()
            report = make_report(other.placement.plan(*args), args.batch, mesh=other.mesh)
            then, gradients = report.predicted_temporary, max(part.gradients for part in report.ipus)
            if then < now:
                fits = ": fits" if then + gradients <= room else ""
                found.append(f"{name}: temporary {in_units(now, 'B')} -> {in_units(then, 'B')}, by prediction{fits}")
    return (*found, "more IPUs for the same layers, or a smaller micro-batch")


def _changes(
    pipeline: Pipeline, schedule: str, given: StepArgs
) -> Iterator[tuple[str, Callable[[], Pipeline], StepArgs]]:
    again = (lambda **_: None) if pipeline.function is None else pipeline.function.again
    recomputed = lambda: again(recompute="all") or [dataclasses.replace(s, recompute="all") for s in pipeline.stages]
    yield "recompute='all' on every stage", lambda: pipeline.replace(stages=recomputed()), given
    m, at = pipeline.options.gradient_accumulation, given_dims(pipeline.replicas)
    if all(leaf.ndim > at + 1 and leaf.shape[at + 1] % 2 == 0 for leaf in jax.tree.leaves(given.batch)):
        halves = lambda shape: (*shape[:at], 2 * shape[at], shape[at + 1] // 2, *shape[at + 2 :])
        halved = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(halves(leaf.shape), leaf.dtype), given.batch)
        of_halves = lambda: pipeline.replace(gradient_accumulation=2 * m)
        yield f"gradient_accumulation={2 * m} with half of each micro-batch", of_halves, given._replace(batch=halved)
    for other in _SCHEDULES:
        if other != schedule:
            yield f"schedule={other!r}", functools.partial(pipeline.replace, schedule=other), given

"""Measure what a further mesh axis costs: Megatron MLPs whose IPUs are pairs of devices, beside single devices.

Two IPUs have an MLP each, D x F and F x D. On `make_mesh(1, 2, tensor=2)` the hidden layer is split by annotations, and
XLA puts communication in. Megatron's minimum is one all-reduce in F and one in B of each MLP. On CPUs, and on chips
where rings are long, a value that an IPU keeps whole, such as x, is stored split and gathered when it is read.

    collectives     counted in the compiled program, on CPUs and for the chips of v5e:2x2
    bytes           of weights, gradients and temporary values on a device, on pairs / on single devices; also with
                    the rows between MLPs split, as in Megatron's sequence parallelism
    CPU work        of a step of the same model on pairs / on single devices
    uniform guards  the CPU work of a model that needs none, under uniform guards / under own ones

Figures for chips need XLA's compiler for TPU, which `make aot` installs.

    python benchmarks/axes.py [--check]
"""

import collections
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, PartitionSpec

from figures import Figures, Program, largest_relative_difference, side_by_side
from ipu_jax import Pipeline, Stage, configure, make_mesh
from ipu_jax.chips import describe

WIDTH, HIDDEN, ROWS, MICRO_BATCHES, ROUNDS = 256, 1024, 256, 8, 10
SCHEDULES = ("1f1b", "zb-h1")
GATHERS = {"1f1b": 2, "zb-h1": 4}  # of x and the error on IPU 1; of dy of both MLPs in W, too
CHIPS = "v5e:2x2"
SPECS = {"up": PartitionSpec(None, "tensor"), "down": PartitionSpec("tensor", None)}


def block(w: Any, x: Any) -> Any:
    hidden = with_sharding_constraint(jnp.tanh(x @ w["up"]), PartitionSpec(None, "tensor"))
    return with_sharding_constraint(x + hidden @ w["down"], PartitionSpec())


def block_of_rows(w: Any, x: Any) -> Any:
    """Return the block's result with rows split between MLPs: Megatron's sequence parallelism."""
    hidden = with_sharding_constraint(
        jnp.tanh(with_sharding_constraint(x, PartitionSpec()) @ w["up"]), PartitionSpec(None, "tensor")
    )
    return with_sharding_constraint(x + hidden @ w["down"], PartitionSpec("tensor"))


def make_pipeline(mesh: Mesh, schedule: str, *, block: Any = block, **options: Any) -> Pipeline:
    """Return the two MLPs, each on an IPU, and a loss."""
    stages = [
        Stage(lambda w, x, mb: block(w, mb["x"]), params="first", ipu=0),
        Stage(lambda w, x, mb: block(w, x), params="second", ipu=1),
        Stage(lambda w, x, mb: jnp.mean((x - mb["y"]) ** 2), ipu=1, name="loss"),
    ]
    specs = {"first": SPECS, "second": SPECS}
    return Pipeline(stages, mesh=mesh, schedule=schedule, gradient_accumulation=MICRO_BATCHES, specs=specs, **options)


def inputs() -> tuple[Any, Any]:
    """Return random weights and a batch."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(0, 0.1, shape).astype(np.float32)

    weights = {name: {"up": normal(WIDTH, HIDDEN), "down": normal(HIDDEN, WIDTH)} for name in ("first", "second")}
    return weights, {name: normal(MICRO_BATCHES, ROWS, WIDTH) for name in ("x", "y")}


def compiled(pipeline: Pipeline) -> Program:
    weights, batch = inputs()
    arguments = (pipeline.shard(weights), batch)
    step = jax.jit(pipeline.value_and_grad).lower(*arguments).compile()
    return Program(step, arguments, lambda found: jax.device_get((found[0], pipeline.unshard(found[1]))))


def count_collectives(figures: Figures, where: str, mesh: Mesh) -> None:
    """Print how many collectives the compiled program has in the tasks of each MLP."""
    weights, batch = inputs()
    for schedule in SCHEDULES:
        pipeline, found = make_pipeline(mesh, schedule), collections.Counter[tuple[str, str]]()
        for one in pipeline.report(pipeline.shard_shapes(weights), batch).collectives or ():
            found[one.task, one.op] += one.count
            if one.op != "all-reduce":
                found["any task", "all-gathers" if one.op == "all-gather" else "other collectives"] += one.count
        # the first MLP needs no gradient of its input
        for task, needed in (("F", 2), ("B", 1)):
            name = f"all-reduces in {task} of two MLPs, {schedule}, {where}"
            figures.add(name, found[task, "all-reduce"], needed, at_least=needed)
        name = f"all-gathers of what was stored split, {schedule}, {where}"
        figures.add(name, found["any task", "all-gathers"], GATHERS[schedule])
        figures.add(f"other collectives in stages, {schedule}, {where}", found["any task", "other collectives"], 0)


def measure(figures: Figures) -> None:
    """Print the costs of a step on pairs of devices, beside the step on single devices."""
    for schedule in SCHEDULES:
        single, pairs = (make_pipeline(make_mesh(1, 2, tensor=size), schedule) for size in (1, 2))
        uniform = make_pipeline(make_mesh(1, 2, tensor=2), schedule, guards="uniform")
        rows = make_pipeline(make_mesh(1, 2, tensor=2), schedule, block=block_of_rows)
        programs = [compiled(pipeline) for pipeline in (single, pairs, uniform, rows)]
        expected, *results = (program.result() for program in programs)
        difference = max(largest_relative_difference(result, expected) for result in results)
        figures.add(f"loss and gradients, {schedule}, relative difference", difference, 1e-5)
        reports = [
            pipeline.report(program.arguments[0], program.arguments[1], compile=False).ipus[0]
            for pipeline, program in zip((single, pairs), programs, strict=False)
        ]
        for kind in ("weights", "gradients"):
            one, two = (getattr(report, kind) for report in reports)
            figures.add(f"bytes of {kind}, pairs / single, {schedule}", two / one, 0.5)
        of_single, of_pairs, _, of_rows = (program.bytes for program in programs)
        figures.add(f"temporary bytes, pairs / single, {schedule}", of_pairs / of_single, 0.6)
        figures.add(f"temporary bytes, pairs with rows split / single, {schedule}", of_rows / of_single, 0.6)
        alone, split, alike, by_rows = side_by_side(*programs, rounds=ROUNDS)
        figures.add(f"CPU work, pairs / single, {schedule}", (split / alone).cpu, 1.05)
        figures.add(f"CPU work, pairs with rows split / single, {schedule}", (by_rows / alone).cpu)
        figures.add(f"CPU work, uniform guards / own, {schedule}", (alike / split).cpu)
        figures.add_spread(f"single devices, {schedule}", alone)


def main() -> int:
    figures = Figures("Megatron MLPs on IPUs that are pairs of devices")
    figures.shrink(__name__, WIDTH=8, HIDDEN=12, ROWS=6, MICRO_BATCHES=3, SCHEDULES=SCHEDULES[:1])
    configure(4)
    count_collectives(figures, "CPU", make_mesh(1, 2, tensor=2))
    try:
        chips = describe(CHIPS)
    except (ImportError, ValueError) as error:
        figures.leave_out(f"collectives for {CHIPS}", f"XLA's compiler for TPU ({error})")
    else:
        count_collectives(figures, CHIPS, make_mesh(1, 2, tensor=2, devices=chips))
    measure(figures)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

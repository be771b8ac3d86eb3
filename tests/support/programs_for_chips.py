"""Compile small pipelines for chips that are not there, and print what the compiler made of them, as JSON.

A compiler reads its environment when it starts, and other tests need a process without one: run this in a process of
its own.

    python -m support.programs_for_chips tpu                  the programs that every run of the tests compiles; or gpu
    python -m support.programs_for_chips tpu zbv concurrent   one schedule, with an embedding and a head; or "basic"
    python -m support.programs_for_chips tpu exact            a training step, with `TrainOptions(exact=True)` or not
    python -m support.programs_for_chips tpu offload          training steps with their state in the host's memory
"""

import dataclasses
import json
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

import axes
from chips import compile_alone, gpt, make_pipeline, mlp, program_of, ratio_of_cycles
from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_schedule, make_train_step
from ipu_jax.chips import ChipReport, compile_ahead, describe
from ipu_jax.core.mesh import host_memory
from ipu_jax.run.ahead.compilers import compile_lowered
from ipu_jax.steps import replicate
from program_text import copied_rings, integer_constants, permutes_beside_work, rings, sums_outside_scans
from sharded_ops import log_softmax_cross_entropy, tied_projection
from support.compiled_text import computations

IPUS = 4
MICRO_BATCHES = 128  # of the program whose tables are looked at
WIDTH, ROWS, VOCABULARY = 256, 128, 1024
MANY_MICRO_BATCHES = mlp(512, 256, micro_batches=MICRO_BATCHES)
SMALL = mlp(WIDTH, ROWS, layers=1, micro_batches=8)
SCANNED = mlp(WIDTH, ROWS, layers=2, micro_batches=8, scan=True)

Found = dict[str, Any]


def for_tpu() -> dict[str, Found]:
    slice_of_4, slice_of_8 = describe("v5e:2x2"), describe("v5e:2x4")
    mesh = make_mesh(1, IPUS, devices=slice_of_4)
    block = gpt(256, 4, sequences=2, tokens=256, micro_batches=8, vocabulary=4096)
    refusals = {}
    for ipus, some in ((4, slice_of_8[::2]), (6, slice_of_8)):  # on the second one XLA would end the process
        try:
            of_schedule(make_mesh(1, ipus, devices=some), "grouped", concurrent=False)
        except ValueError as error:
            refusals[ipus] = str(error)
    return {
        "grouped": _beside_alone(MANY_MICRO_BATCHES, mesh),
        "grouped, both ends": _beside_alone(block, mesh, concurrent=True),
        "grouped-zb": of_schedule(mesh, "grouped-zb", concurrent=False),
        "1f1b, both ends": of_schedule(mesh, "1f1b", concurrent=True),
        "zb-h1, head": _with_head(mesh),
        "two replicas": _found(compile_ahead(*make_pipeline(SMALL, make_mesh(2, 2, devices=slice_of_4)))),
        "training": _training(slice_of_8),
        "pairs": _on_pairs(slice_of_4),
        "parts of a slice": refusals,
        "v5p": {"places": [device.coords for device in make_mesh(1, 64, devices=describe("v5p:4x4x4")).devices.flat]},
    }


def for_gpu() -> dict[str, Found]:
    devices = describe("h100x8")
    mesh = make_mesh(1, IPUS, devices=devices)
    return {
        "grouped": _found(compile_ahead(*make_pipeline(MANY_MICRO_BATCHES, mesh))),
        "grouped, both ends": of_schedule(mesh, "grouped", concurrent=True),
        "1f1b, both ends": of_schedule(mesh, "1f1b", concurrent=True),
        "1f1b, layers in scans": _found(compile_ahead(*make_pipeline(SCANNED, mesh, "1f1b"))),
        "zb-h1, head": _with_head(mesh),
        "two replicas": _found(compile_ahead(*make_pipeline(SMALL, make_mesh(2, 2, devices=devices)))),
        "training": _training(devices),
        "pairs": _on_pairs(devices),
    }


def of_schedule(mesh: Mesh, schedule: str, *, concurrent: bool) -> Found:
    """Compile a layer for each stage of a schedule, which has one or two on each IPU."""
    placement = make_schedule(schedule, ipus=IPUS, gradient_accumulation=SMALL.micro_batches).placement
    places = [ipu for ipu in placement if ipu is not None]
    return _found(compile_ahead(*make_pipeline(SMALL, mesh, schedule, concurrent=concurrent, places=places)))


def _beside_alone(model: Any, mesh: Mesh, *, concurrent: bool = False) -> Found:
    report = compile_ahead(*make_pipeline(model, mesh, concurrent=concurrent))
    return _found(report) | {"ratio": ratio_of_cycles(program_of(report), compile_alone(model, mesh))}


def _with_head(mesh: Mesh) -> Found:
    """Compile layers under "zb-h1", with a concurrent head."""

    def loss(table: Any, x: Any, microbatch: Any) -> Any:
        logits = tied_projection(x, table, size=VOCABULARY)
        return jnp.mean(log_softmax_cross_entropy(logits, microbatch["labels"], size=VOCABULARY))

    basic, weights, batch = make_pipeline(SMALL, mesh)
    pipeline = Pipeline(
        [*basic.stages[:-1], Stage(loss, params="table", ipu=ALL_IPUS)],
        mesh=mesh,
        schedule="zb-h1",
        gradient_accumulation=SMALL.micro_batches,
        specs={"table": PartitionSpec("ipu")},
    )
    weights["table"] = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.bfloat16)
    batch["labels"] = jax.ShapeDtypeStruct(batch["x"].shape[:-1], jnp.int32)
    return _found(compile_ahead(pipeline, weights, batch))


def _training(devices: list[Any]) -> Found:
    """Compile a training step of two replicas, from shapes alone."""
    start = time.monotonic()
    pipeline, weights, batch = make_pipeline(SMALL, make_mesh(2, IPUS, devices=devices))
    report = compile_ahead(make_train_step(pipeline, optax.adamw(1e-3)), weights, batch)
    return _found(report) | {"seconds": time.monotonic() - start}


def _exact(devices: list[Any]) -> Found:
    """Compile a training step with and without `exact`, and count the operations that XLA likes to rewrite."""

    def layer(w: Any, x: Any, microbatch: Any) -> Any:
        h = (microbatch if x is None else x) @ w
        return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)

    last = Stage(lambda *args: jnp.mean(layer(*args) ** 2), "3", 3)
    stages = [*(Stage(layer, str(k), k) for k in range(3)), last]
    pipeline = Pipeline(stages, mesh=make_mesh(1, IPUS, devices=devices), gradient_accumulation=SMALL.micro_batches)
    weights = {str(k): jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for k in range(IPUS)}
    batch = jax.ShapeDtypeStruct((SMALL.micro_batches, ROWS, WIDTH), jnp.float32)
    found = {}
    for exact in (False, True):
        step = make_train_step(pipeline, optax.sgd(1e-3), TrainOptions(exact=exact))
        ops = [instruction.op for instruction in program_of(compile_ahead(step, weights, batch)).instructions()]
        found["exact" if exact else "default"] = {name: ops.count(name) for name in ("divide", "rsqrt")}
    return found


def _offloaded(devices: list[Any]) -> Found:
    """Compile training steps with their state in the host's memory, and list the copies to and from it.

    A stage is four pairs of matrices. "average" has norms that read the state, and an average of the weights; with
    "turned", XLA would like to transpose the state on the host, and cannot. Of unusual shapes a few rows are fetched
    at a time, where XLA can slice an array there.
    """

    def stage(w: Any, x: Any, microbatch: Any) -> Any:
        x = microbatch if x is None else x
        for pair in w:
            x = x + jnp.tanh(x @ pair["a"]) @ pair["b"]
        return x

    def transposed(fn: Any) -> Any:
        """Return a stage that reads the matrices of each pair transposed, in each other's place."""
        return lambda w, *rest: fn([{"a": pair["b"].T, "b": pair["a"].T} for pair in w], *rest)

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    last = Stage(lambda *args: jnp.mean(stage(*args) ** 2), "3", 3)
    mesh = make_mesh(1, IPUS, devices=devices)
    pipeline = Pipeline([*(Stage(stage, str(k), k) for k in range(3)), last], mesh=mesh, gradient_accumulation=4)
    group = [{"a": shape(512, 1024), "b": shape(1024, 512)}] * 4
    weights, batch = {str(k): group for k in range(IPUS)}, shape(4, 128, 512)
    adamw, host = optax.adamw(1e-3), TrainOptions(offload=("optimizer",))
    clipped = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1))
    alone = replicate(lambda w, mb: jnp.mean(stage(w, None, mb) ** 2), replication_factor=IPUS, devices=devices)
    turned = pipeline.replace(stages=[dataclasses.replace(s, fn=transposed(s.fn)) for s in pipeline.stages])
    averaged = dataclasses.replace(host, ema_decay=0.9, on_nonfinite="skip")
    cases = {
        "device": (make_train_step(pipeline, adamw), weights, batch),
        "host": (make_train_step(pipeline, adamw, host), weights, batch),
        "average": (make_train_step(pipeline, clipped, averaged), weights, batch),
        "turned": (make_train_step(turned, optax.contrib.muon(1e-3), host), weights, batch),
        "function": (make_train_step(alone, clipped, host), group, shape(IPUS, 1, 128, 512)),
    }
    unusual = [(1003, 64), (1000, 300), (3, 50, 30), (5, 7, 11, 13), (50, 7), (7, 1), (5000,), ()]
    sums = lambda w, mb: sum(jnp.mean(jnp.tanh(leaf * mb[0])) for leaf in jax.tree.leaves(w))
    for replicas in (1, 2):
        made = replicate(sums, replication_factor=replicas, devices=devices[:replicas])
        options = dataclasses.replace(averaged, shard_optimizer=replicas > 1)
        rows = shape(*[replicas] * (replicas > 1), 1, 3)
        name = f"unusual shapes on {replicas}"
        cases[name] = (make_train_step(made, adamw, options), [shape(*of) for of in unusual], rows)
    found = {}
    for name, (step, *given) in cases.items():
        host_memory._AT_ONCE = 2**12 if name.startswith("unusual") else 2**22  # a few rows
        compiled, _ = compile_lowered(step.lower(step.shapes(given[0]), given[1]), devices[0])
        memory = compiled.memory_analysis()
        size = lambda kind, memory=memory: getattr(memory, f"{kind}_size_in_bytes")
        own = size("argument") + size("output") - size("alias") + size("temp")
        inside, outside = _copies_of_host(compiled.as_text())
        found[name] = {"bytes": own, "on host": size("host_argument"), "in loops": inside, "outside": outside}
    return found


def _copies_of_host(text: str) -> tuple[int, list[str]]:
    """Return how many instructions in loops move arrays of the host's memory, which is S(5), and the others."""
    bodies, still = computations(text), r" (bitcast|get-tuple-element|parameter|tuple|while|[\w-]+-done)\("
    called = lambda name: re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", "\n".join(bodies[name]))
    waiting, in_loops = re.findall(r"body=%?([\w.\-]+)", text), set[str]()
    while waiting:
        name = waiting.pop()
        waiting += [] if name in in_loops else called(name)
        in_loops.add(name)
    moving = [(name, line) for name, body in bodies.items() for line in body if "S(5)" in line.partition("metadata")[0]]
    moving = [(name, line) for name, line in moving if not re.search(still, line)]
    outside = [line for name, line in moving if name not in in_loops]
    return len(moving) - len(outside), outside


def _on_pairs(devices: list[Any]) -> Found:
    """Compile two MLPs on IPUs that are pairs of chips, and list what their tasks send."""
    pipeline, (weights, batch) = axes.make_pipeline(make_mesh(1, 2, tensor=2, devices=devices), "zb-h1"), axes.inputs()
    report = pipeline.report(pipeline.shard_shapes(weights), batch)
    collectives = [(one.stages, one.task, one.op, one.axis, one.count) for one in report.collectives or ()]
    return {"collectives": collectives, "guards": any(pipeline.placement.guards.needed.values())}


def _found(report: ChipReport) -> Found:
    program = program_of(report)
    return {
        "rings": [f"{ring.dtype}{list(ring.dims)}" for ring in rings(program)],
        "copied rings": [f"{ring.dtype}{list(ring.dims)}" for ring in copied_rings(program)],
        "bodies": sorted(program.bodies),
        "permutes": permutes_beside_work(program),
        "integer constants": [constant.dims for constant in integer_constants(program)],
        "sums": [array.dtype for array in sums_outside_scans(program) if array.dims],
        "reused": report.memory.reused,
        "arguments": report.memory.arguments,
        "host loops": report.host_loops,
    }


def main(platform: str, *matrix: str) -> int:
    described = describe("v5e:2x2" if platform == "tpu" else "h100x4") if matrix else []
    if matrix in (("exact",), ("offload",)):
        found = (_exact if matrix == ("exact",) else _offloaded)(described)
    elif matrix:
        schedule, mode = matrix
        found = of_schedule(make_mesh(1, IPUS, devices=described), schedule, concurrent=mode == "concurrent")
    else:
        found = for_tpu() if platform == "tpu" else for_gpu()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

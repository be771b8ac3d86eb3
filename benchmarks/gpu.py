"""Measure pipelines on one NVIDIA GPU: are the numbers right, and what do guards, a training step and the loss cost?

A GPU is one IPU, so that nothing is sent. But a pipeline of concurrent and local stages in turn has all the rest:
guards, stash and queues. Each part runs in a process of its own, since XLA reads its flags once, and has a time limit:

    env      the GPU, jax's version, and whether `configure` has set the flags for CUDA graphs
    verify   7 segments under five schedules, beside the unsharded program in float32
    loss     `linear_cross_entropy` for 128k columns in bfloat16, beside optax and jnp
    step     a GPT's training step with adamw and clipping, beside plain jit with the same micro-batches
    guards   7 tiny segments, whose step is all launches: time of a tick, loops that the host drives, and XLA's profile

`step:no-graphs` and `guards:no-graphs` are the same without CUDA graphs. All parts end within `--budget` seconds.

    python benchmarks/gpu.py [--check] [--only verify step ...] [--budget 480]
"""

import argparse
import collections
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from figures import Figures, Program, largest_relative_difference, scanned, side_by_side, temporary_bytes
from gpt import Sizes, init_params, loss_of, loss_whole, make_pipeline, random_batch
from ipu_jax import (
    ALL_IPUS,
    Pipeline,
    Stage,
    TrainOptions,
    configure,
    make_mesh,
    make_schedule,
    make_train_step,
    verify,
)
from ipu_jax.chips import compile_ahead
from ipu_jax.options import CUDA_GRAPH_FLAGS
from sharded_ops import linear_cross_entropy

BUDGET, LEAST = 480.0, 15.0  # seconds: of all parts, and of a part that is begun
NO_GPU = 3  # the exit status of a part
SCHEDULES = ("grouped", "1f1b", "zb-h1", "sequential", "gpipe")  # a training step runs two of them, tiny segments three
BLOCKS = 3
RIGHT = (64, 32, 6)  # width, rows and micro-batches of segments that are verified
TINY = (128, 64, 128)  # of segments whose step is all launches
LOSS = (8192, 4096, 128 * 1024)  # tokens, features and columns
GPT, MICRO_BATCHES, SEQUENCES = Sizes(vocabulary=32000, length=1024, features=2048, heads=16, layers=4), 8, 4
ROUNDS = 5
CALLS = ("cuLaunchKernel", "cuGraphLaunch", "cuMemcpyDtoH", "cuStreamSynchronize", "cuGraphExecUpdate")


# segments: an embedding on all IPUs, blocks on one, a gain on all between two of them, a head on all


def segments(width: int, rows: int, micro_batches: int, schedule: str) -> tuple[Pipeline, Any, Any]:
    """Return a pipeline of 7 segments on one IPU, its whole weights and a batch."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)
    embed = Stage(lambda w, x, mb: jnp.tanh(mb["x"] @ w), "embed", ALL_IPUS)
    head = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), "head", ALL_IPUS)
    stages = [embed]
    params: dict[str, Any] = {name: draw(width, width) for name in ("embed", "head")}
    for k in range(BLOCKS):
        if k:
            stages.append(Stage(lambda w, x, mb: x * w, f"gain{k}", ALL_IPUS))
            params[f"gain{k}"] = jnp.ones((width,))
        stages.append(Stage(lambda w, x, mb: x + jnp.tanh(x @ w["up"]) @ w["down"], f"block{k}", 0))
        params[f"block{k}"] = {"up": draw(width, width), "down": draw(width, width)}
    stages.append(head)
    specs = {str(stage.params): P() for stage in stages if stage.place is None}
    mesh, options = make_mesh(1, 1), {"schedule": schedule, "gradient_accumulation": micro_batches}
    return Pipeline(stages, mesh=mesh, specs=specs, **options), params, {"x": draw(micro_batches, rows, width)}


def one_after_the_other(stages: Any, params: Any, microbatch: Any) -> Any:
    return functools.reduce(lambda x, stage: stage.fn(params[stage.params], x, microbatch), stages, None)


# parts


def env(figures: Figures, suffix: str) -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    are_set = sum(flag in os.environ.get("XLA_FLAGS", "") for flag in CUDA_GRAPH_FLAGS)
    needed = 0 if figures.args.smallest else len(CUDA_GRAPH_FLAGS)
    figures.add("flags for CUDA graphs that are set", are_set, at_least=needed)


def numbers(figures: Figures, suffix: str) -> None:
    for schedule in SCHEDULES:
        pipeline, params, batch = segments(*RIGHT, schedule)
        with jax.default_matmul_precision("highest"):  # else a GPU may multiply in TF32
            report = verify(pipeline, pipeline.shard(params), batch, rtol=1.0)
        difference = max(report.loss_error, report.worst[1])
        figures.add(f"loss and gradients / unsharded, {schedule}, relative difference", difference, 1e-5)


def fused_loss(figures: Figures, suffix: str) -> None:
    tokens, features, columns = LOSS
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, features), jnp.bfloat16)
    table = (jax.random.normal(keys[1], (columns, features)) / np.sqrt(features)).astype(jnp.bfloat16)
    labels, mesh = jax.random.randint(keys[2], (tokens,), 0, columns), make_mesh(1, 1)

    def in_jnp(hidden: Any, table: Any, labels: Any) -> Any:
        logits = jnp.einsum("nd,vd->nv", hidden, table, preferred_element_type=jnp.float32)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean()

    def fused(gradients: Any) -> Any:
        op = functools.partial(linear_cross_entropy, size=columns, reduction="mean", gradients=gradients)
        return jax.shard_map(op, mesh=mesh, in_specs=(P(), P("ipu"), P()), out_specs=P())

    losses = {
        "optax": lambda hidden, table, labels: loss_whole(table, hidden, {"targets": labels}),
        "jnp": in_jnp,
        "fused, gradients in the forward pass": fused("forward"),
        "fused, gradients in the backward pass": fused("backward"),
    }
    arguments = (hidden, table, labels)
    steps = {
        name: Program(jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile(), arguments)
        for name, loss in losses.items()
    }
    expected = steps["jnp"]()
    for name, step in steps.items():
        if name != "jnp":  # bfloat16 has 8 bits
            in_float32 = (jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), tree) for tree in (step(), expected))
            difference = largest_relative_difference(*in_float32)
            figures.add(f"loss and gradients / jnp, {name}, relative difference", difference, 2**-5)
    costs = side_by_side(*steps.values(), rounds=ROUNDS)
    for (name, step), cost in zip(steps.items(), costs, strict=True):
        figures.add(f"time / optax, {name}", (cost / costs[0]).wall)
        figures.add(f"TFLOP/s, {name}", 6e-12 * tokens * features * columns / cost.wall)
        figures.add(f"temporary MB, {name}", step.bytes / 1e6)


def training(figures: Figures, suffix: str) -> None:
    params, batch = init_params(GPT, 1, dtype=jnp.bfloat16), random_batch(GPT, MICRO_BATCHES, SEQUENCES)
    adamw, rows = optax.adamw(3e-4), batch["tokens"].size
    of_weights = 12 * GPT.layers * GPT.features**2 + GPT.vocabulary * GPT.features
    flops = 6 * rows * (of_weights + 2 * GPT.layers * GPT.length * GPT.features)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    @functools.partial(jax.jit, donate_argnums=0)
    def plain(state: Any, batch: Any) -> Any:
        params, moments = state
        loss, gradients = scanned(loss_of, sums=jnp.float32)(params, batch)
        gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, params)
        updates, moments = clipped.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    compiled = plain.lower((params, clipped.init(params)), batch).compile()
    for schedule in SCHEDULES[:2]:
        pipeline = make_pipeline(GPT, 1, schedule=schedule, gradient_accumulation=MICRO_BATCHES)
        step = make_train_step(pipeline, adamw, TrainOptions(max_gradient_norm=1.0))
        name, report = f"GPT, {schedule}{suffix}", compile_ahead(step, params, batch)
        figures.add(f"temporary bytes / plain jit, {name}", (report.memory.temporary or 0) / temporary_bytes(compiled))
        copied = jax.tree.map(jnp.copy, params)  # a step takes its state's arrays
        ours = _again_and_again(step, step.init(params), batch)
        theirs = _again_and_again(compiled, (copied, clipped.init(copied)), batch)
        losses = [np.array([one() for _ in range(2)]) for one in (ours, theirs)]  # the second one follows an update
        difference = largest_relative_difference(*losses)
        figures.add(f"losses of two steps / plain jit, {name}, relative difference", difference, 0.01)
        costs = side_by_side(ours, theirs, rounds=ROUNDS)
        figures.add(f"step time / plain jit, {name}", (costs[0] / costs[1]).wall)
        for program, cost in zip(("ours", "plain jit"), costs, strict=True):
            figures.add(f"TFLOP/s, {program}, {name}", 1e-12 * flops / cost.wall)
        if report.paper is not None:  # the kind of the GPU is known
            figures.add(f"step time / on paper, {name}", costs[0].wall / report.paper.seconds)


def _again_and_again(step: Any, state: Any, batch: Any) -> Callable[[], Any]:
    """Return a function that makes a step from the state after the step before, and returns its loss."""
    latest = [state]

    def call() -> Any:
        latest[0], out = step(latest[0], batch)
        return getattr(out, "loss", out)

    return call


def launches(figures: Figures, suffix: str) -> None:
    for schedule in SCHEDULES[:3]:
        pipeline, params, batch = segments(*TINY, schedule)
        placed, name = pipeline.shard(params), f"{schedule}{suffix}"
        places = tuple(stage.place for stage in pipeline.stages)
        ticks = make_schedule(schedule, placement=places, gradient_accumulation=TINY[-1]).ticks
        ours = Program(jax.jit(pipeline.value_and_grad).lower(placed, batch).compile(), (placed, batch))
        alone = functools.partial(one_after_the_other, pipeline.stages)
        theirs = Program(jax.jit(scanned(alone)).lower(params, batch).compile(), (params, batch))
        found, plain = side_by_side(ours, theirs, rounds=4 * ROUNDS)
        figures.add(f"step time / plain jit, tiny segments, {name}", (found / plain).wall)
        figures.add(f"microseconds of a tick, tiny segments, {name}", 1e6 * found.wall / ticks)
        loops = compile_ahead(pipeline, params, batch).host_loops
        if loops is None:
            figures.leave_out(f"loops that the host drives, {name}", "XLA's list of thunks, of a GPU")
        else:
            figures.add(f"loops that the host drives in a tick, {name}", loops, None if suffix else 0)
        _add_profile(figures, name, ours, ticks)


def _add_profile(figures: Figures, name: str, call: Callable[[], Any], ticks: int) -> None:
    """Add what XLA's profiler sees in one call: nobody knows its names of all versions, so that some may be missing."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = [str(path) for path in Path(folder).rglob("*.xplane.pb")]
        events = [*_events(files[0])] if files else []
    of_gpu = sorted((start, end, event) for on_gpu, start, end, event in events if on_gpu)
    if not of_gpu:
        figures.leave_out(f"profile, {name}", "events of a GPU in XLA's profile")
        return
    busy, until = 0.0, of_gpu[0][0]
    for start, end, _ in of_gpu:
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    figures.add(f"share of the time in which the GPU is busy, {name}", busy / (until - of_gpu[0][0]))
    figures.add(f"kernels and copies in a tick, {name}", len(of_gpu) / ticks)
    counts = collections.Counter(call for on_gpu, *_, event in events for call in CALLS if not on_gpu and call in event)
    for event, count in counts.items():
        figures.add(f"{event} in a tick, {name}", count / ticks)


def _events(file: str) -> Iterator[tuple[bool, float, float, str]]:
    """Yield whether each event of a profile is the GPU's, its start and end in nanoseconds, and its name."""
    for plane in jax.profiler.ProfileData.from_file(file).planes:
        for line in plane.lines:
            on_gpu = plane.name.startswith("/device:GPU") and "Stream" in line.name
            if on_gpu or plane.name.startswith("/host"):
                yield from ((on_gpu, e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events)


# processes


@dataclasses.dataclass(frozen=True)
class Part:
    """What a process measures, in how many seconds at most, and whether with CUDA graphs."""

    measure: Callable[[Figures, str], None]
    seconds: float
    graphs: bool = True


PARTS = {
    "env": Part(env, 60),
    "verify": Part(numbers, 110),
    "loss": Part(fused_loss, 80),
    "step": Part(training, 130),
    "guards": Part(launches, 90),
    "guards:no-graphs": Part(launches, 60, graphs=False),
    "step:no-graphs": Part(training, 90, graphs=False),
}


def measure(figures: Figures, part: Part) -> int:
    """Measure a part in this process, and return the exit status."""
    configure(1, cuda_graphs=None if part.graphs else False)
    if jax.devices()[0].platform != "gpu" and not figures.args.smallest:
        return NO_GPU
    part.measure(figures, "" if part.graphs else ", no CUDA graphs")
    return figures.status()


def in_a_process(figures: Figures, name: str, seconds: float) -> int | None:
    """Measure a part in a process of its own, and return its exit status, or None if its time was up."""
    smallest = ["--smallest"] * figures.args.smallest
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "figures"
        try:
            command = [sys.executable, __file__, "--part", name, "--record", str(record), *smallest]
            return subprocess.run(command, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return None
        finally:
            figures.take(record)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--part", choices=PARTS, metavar="PART", help="measure this part, in this process")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts (default: %(default)g)")


def main() -> int:
    figures, began = Figures("pipelines on one NVIDIA GPU", flags=flags), time.monotonic()
    smallest = {"RIGHT": (8, 4, 3), "TINY": (8, 4, 3), "LOSS": (16, 8, 64), "MICRO_BATCHES": 2, "SEQUENCES": 1}
    with_graphs = {name: part for name, part in PARTS.items() if part.graphs}
    figures.shrink(__name__, **smallest, GPT=Sizes(11, 6, 8, 2, 2), SCHEDULES=("zb-h1",), PARTS=with_graphs)
    if figures.args.part:
        return measure(figures, PARTS[figures.args.part])
    failed = dict[str, str]()
    for name in dict.fromkeys(["env", *(figures.args.only or PARTS)]):
        seconds = min(PARTS[name].seconds, figures.args.budget - (time.monotonic() - began))
        if seconds < LEAST:
            failed[name] = "not begun, no time is left"
            continue
        status = in_a_process(figures, name, seconds)
        if status == NO_GPU:
            figures.leave_out("pipelines on a GPU", "an NVIDIA GPU that jax finds")
            # a run of all scripts goes on without these figures
            return figures.status() if figures.args.record else 2
        if status != 0:
            failed[name] = f"stopped after {seconds:.0f} s" if status is None else f"exit status {status}"
    for name, why in failed.items():
        print(f"gpu.py: part {name}: {why}", file=sys.stderr)
    return figures.status() or min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())

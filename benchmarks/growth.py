"""Measure how a step grows with micro-batches, stages, IPUs and vocabulary: its time, its memory, its compile time.

Each point compares a pipeline with the unsharded program of the same model, in one process. The model is eight relu
layers of 256x256 on micro-batches of 64 rows; for the vocabulary it is four layers with a head on one or both of two
IPUs. Step times, and CPU times to trace, lower and compile, are relative to the unsharded program on all cores; the
steps run in turn. Bytes are reported by XLA.

    python benchmarks/growth.py [--check] [--only KIND] [--rounds N]
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from figures import Figures, Program, scanned, side_by_side
from ipu_jax import ALL_IPUS, Pipeline, Stage, configure, make_mesh
from pipeline import layers
from sharded_ops import log_softmax_cross_entropy, matmul

WIDTH, ROWS, LAYERS = 256, 64, 8
KINDS = ("micro-batches", "stages", "IPUs", "columns")
SINGULAR = {"IPUs": "IPU"}
SETTLED = (8, 32)  # the M from which memory must not grow, and the last M
COLUMNS = (1024, 4096, 16384)


@dataclasses.dataclass(frozen=True)
class Point:
    """One pipeline of a curve, with its measurements.

    Attributes:
        x: the number that grows.
        line: the name of the curve, where several pipelines have the same x.
        time: the step time relative to the unsharded program's.
        bytes, unsharded_bytes: temporary bytes of an IPU, and of the unsharded program's device.
        compile: CPU time to trace, lower and compile, relative to the unsharded program's.
        difference: the relative difference of the loss from the unsharded loss.
    """

    x: int
    line: str
    time: float
    bytes: int
    unsharded_bytes: int
    compile: float
    difference: float


Build = Callable[[], tuple[Pipeline, dict[str, Any], dict[str, Any], Callable[[Any, Any], Any]]]


def of_layers(stages: int, ipus: int, micro_batches: int, schedule: str = "grouped") -> Build:
    """Return a function that makes a pipeline of eight layers in `stages` stages, weights, batch and unsharded loss."""

    def build() -> tuple[Pipeline, dict[str, Any], dict[str, Any], Callable[[Any, Any], Any]]:
        def loss_of(x: Any, microbatch: Any) -> Any:
            return jnp.mean((x - microbatch["y"]) ** 2)

        def last(weights: Any, x: Any, microbatch: Any) -> Any:
            return loss_of(layers(weights, x, microbatch), microbatch)

        fns = [layers] * (stages - 1) + [last]
        pipeline = Pipeline(
            [Stage(fn, params=f"part{k}", ipu=k % ipus) for k, fn in enumerate(fns)],
            mesh=make_mesh(1, ipus),
            schedule=schedule,
            gradient_accumulation=micro_batches,
        )
        each = LAYERS // stages
        weights = square_matrices(LAYERS)
        whole = {f"part{k}": weights[k * each : (k + 1) * each] for k in range(stages)}
        x, y = jax.random.normal(jax.random.key(1), (2, micro_batches, ROWS, WIDTH))

        def unsharded(whole: Any, microbatch: Any) -> Any:
            of_all = [w for k in range(stages) for w in whole[f"part{k}"]]
            return loss_of(layers(of_all, None, microbatch), microbatch)

        return pipeline, whole, {"x": x, "y": y}, unsharded

    return build


def of_vocabulary(size: int, place: int | None) -> Build:
    """Return a function that makes a pipeline of four layers on two IPUs, with a head on IPU `place` (None: both)."""

    def build() -> tuple[Pipeline, dict[str, Any], dict[str, Any], Callable[[Any, Any], Any]]:
        def on_one(w: Any, x: Any, microbatch: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(x @ w, microbatch["y"]).mean()

        def on_all(w: Any, x: Any, microbatch: Any) -> Any:
            return log_softmax_cross_entropy(matmul(x, w), microbatch["y"], size=size, reduction="mean")

        stages = [
            Stage(layers, params="part0", ipu=0),
            Stage(layers, params="part1", ipu=1),
            Stage(on_all, params="head", ipu=ALL_IPUS) if place is None else Stage(on_one, params="head", ipu=place),
        ]
        specs = {"head": PartitionSpec(None, "ipu")} if place is None else None
        pipeline = Pipeline(stages, mesh=make_mesh(1, 2), specs=specs, gradient_accumulation=4)
        weights = square_matrices(4)
        head = jax.random.normal(jax.random.key(2), (WIDTH, size)) / WIDTH**0.5
        x = jax.random.normal(jax.random.key(1), (4, ROWS, WIDTH))
        y = jax.random.randint(jax.random.key(3), (4, ROWS), 0, size)

        def unsharded(whole: Any, microbatch: Any) -> Any:
            return on_one(whole["head"], layers([*whole["part0"], *whole["part1"]], None, microbatch), microbatch)

        return pipeline, {"part0": weights[:2], "part1": weights[2:], "head": head}, {"x": x, "y": y}, unsharded

    return build


def square_matrices(count: int) -> list[jax.Array]:
    return list(jax.random.normal(jax.random.key(0), (count, WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5)


def builds(kind: str) -> Iterator[tuple[int, str, Build]]:
    """Yield the number that grows, the curve's name and the function that makes the programs, for each point."""
    if kind == "micro-batches":
        yield from ((m, "grouped", of_layers(2, 2, m)) for m in (2, 4, 8, 16, 32))
    elif kind == "stages":
        yield from ((s, "looped", of_layers(s, 2, 8, "looped")) for s in (2, 4, 8))
    elif kind == "IPUs":
        yield from ((n, "grouped", of_layers(n, n, 8)) for n in (1, 2, 4, 8))
    else:
        for size in COLUMNS:
            yield size, "head on both IPUs", of_vocabulary(size, None)
            yield size, "head on IPU 1", of_vocabulary(size, 1)


def compiled(step: Callable[..., Any], *arguments: Any) -> tuple[Program, float]:
    """Return a compiled step, and the CPU time for tracing, lowering and compiling it."""
    jax.clear_caches()  # otherwise a traced function is not traced again
    started = time.process_time()
    program = jax.jit(step).lower(*arguments).compile()
    return Program(program, arguments), time.process_time() - started


def measured(x: int, line: str, build: Build, rounds: int) -> Point:
    """Compile and run a pipeline and its unsharded program."""
    pipeline, whole, batch, loss_of = build()
    spread = jax.device_put(batch, jax.sharding.NamedSharding(pipeline.mesh, PartitionSpec()))
    ours, our_seconds = compiled(pipeline.value_and_grad, pipeline.shard(whole), spread)
    dense, dense_seconds = compiled(scanned(loss_of), whole, batch)
    loss, expected = float(ours()[0]), float(dense()[0])
    times = side_by_side(ours, dense, rounds=rounds)
    ratio, difference = (times[0] / times[1]).wall, abs(loss / expected - 1)
    return Point(x, line, ratio, ours.bytes, dense.bytes, our_seconds / dense_seconds, difference)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=KINDS, help="measure what grows with this alone")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each program (default: %(default)s)")


def main() -> int:
    figures = Figures("how a step grows with micro-batches, stages, IPUs and vocabulary", flags=flags)
    figures.shrink(__name__, WIDTH=4, ROWS=2, KINDS=("columns",), COLUMNS=(7,))
    configure(8)
    kinds = (figures.args.only,) if figures.args.only else KINDS
    curves: dict[str, list[Point]] = {}
    for kind in kinds:
        curves[kind] = [measured(*given, figures.args.rounds) for given in builds(kind)]
        for point in curves[kind]:
            name = f"{point.x} {SINGULAR[kind] if point.x == 1 else kind}, {point.line}"
            figures.add(f"step time / unsharded, {name}", point.time)
            figures.add(f"temporary MB an IPU, {name}", point.bytes / 1e6)
            figures.add(f"compile CPU time / unsharded, {name}", point.compile)
        most = max(point.difference for point in curves[kind])
        figures.add(f"loss / unsharded, relative difference, {kind}, at most", most, 1e-5)
    if "micro-batches" in curves:
        of_m = {point.x: point.bytes for point in curves["micro-batches"]}
        first, last = SETTLED
        figures.add(f"temporary bytes, M={last} / M={first}", of_m[last] / of_m[first], 1.05)
    if "IPUs" in curves:
        of_ipus = {point.x: point.bytes for point in curves["IPUs"]}
        figures.add("temporary bytes an IPU, 8 IPUs / 1 IPU", of_ipus[8] / of_ipus[1])
    if "columns" in curves:
        of_head = {(point.x, point.line): point.bytes for point in curves["columns"]}
        both, one = (of_head[COLUMNS[-1], line] for line in ("head on both IPUs", "head on IPU 1"))
        figures.add(f"temporary bytes an IPU, {COLUMNS[-1]} columns, head on both IPUs / on IPU 1", both / one, 0.75)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

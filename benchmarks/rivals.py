"""Compare step time and memory of our pipelines with those of commonly used pipelines, in turn in one run.

`torch` is `torch.distributed.pipelining` with one process per stage, over gloo, on the MNIST example in its basic mode.
It gets the same weights and images, and loss and gradients are compared first. Then both train for 50 updates from the
same weights on the same batches, in float32 and in float64, and the losses are compared. `idiom` is the usual JAX
pipeline (`rivals_of/usual_idiom.py`) on the model of `pipeline.py`: eight relu layers of 1024x1024 in 2 stages,
micro-batches of 64 rows, with the layers once as plain code and once as a scan over stacked weights. No step that is
timed includes an optimizer.

    python benchmarks/rivals.py [--check] [--only torch|idiom]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from figures import Cost, Costs, Figures, Program, cost_of, largest_relative_difference, side_by_side
from ipu_jax import Pipeline, Stage, configure, make_mesh, make_train_step
from mnist_example.model import init_params, make_pipeline
from pipeline import STAGES, batch_of, layers, model
from replicas import loss_fn, named
from rivals_of import torch_pipeline
from rivals_of.torch_pipeline import TorchPipeline
from rivals_of.usual_idiom import value_and_grad
from rivals_of.workers import NEEDS_TORCH, torch_is_installed

RIVALS = ("torch", "idiom")
MNIST_SIZES = ((64, 16), (8, 84))  # (images of a micro-batch, M), as in mnist.py
UPDATES, TRAINED_SIZE = 50, (16, 4)  # of the training; (images of a micro-batch, M)
RATE, MOMENTUM = 0.01, 0.9
# In float64 only an error would separate two programs so far. In float32 our own losses differ from float64's by 4e-5,
# since an activation 7e-8 from the kink of relu rounds to its other side, and two programs may differ by about as much.
MOST_DIFFERENCE = {"float32": 1e-4, "float64": 1e-12}
THREADS = (1, 2)  # of each torch process; the figures use the better of the two
ROUNDS, STEPS = 6, 2
COUNTS = (4, 8, 16, 32, 64)  # M for the memory figures
TIMED = 16  # of these, the M of the figures of time

OURS, IDIOM, SKIPS = "ipu_jax", "usual idiom", "usual idiom that skips bubbles"
VARIATIONS: dict[str, dict[str, Any]] = {
    IDIOM: {},
    SKIPS: {"skip_idle": True},
    "usual idiom with jax.checkpoint": {"checkpoint": True},
}


# torch.distributed.pipelining


def torch_figures(figures: Figures) -> None:
    params = jax.tree.map(np.asarray, init_params(0))
    random = np.random.default_rng(1)
    batches = {
        f"{rows}x{count}": {
            "images": random.integers(0, 256, (count, rows, 28, 28), np.uint8),
            "labels": random.integers(0, 10, (count, rows), np.int32),
        }
        for rows, count in MNIST_SIZES
    }
    with TorchPipeline(named(params), batches) as rival:
        for rows, count in MNIST_SIZES:
            name = f"{rows}x{count}"
            one = jax.tree.map(lambda leaf: leaf[0], batches[name])
            pipeline = make_pipeline("basic", one, gradient_accumulation=count, reduction="sum")
            step = _step(pipeline, params, batches[name])
            (loss, _), gradients = step()
            ours = {"loss": loss, **pipeline.unshard(gradients)}
            for schedule in torch_pipeline.SCHEDULES:
                theirs_loss, theirs = rival.result(name, schedule)
                found = {"loss": theirs_loss, **{n: {k: theirs[f"{n}.{k}"] for k in "wb"} for n in ours if n != "loss"}}
                figures.add(
                    f"loss and gradients / torch {schedule}'s, {name}, relative difference",
                    largest_relative_difference(found, ours),
                    1e-4,
                )
            _compare(figures, rival, step, name, f"micro-batch {rows}, M={count}")


def training_figures(figures: Figures) -> None:
    """Train the cut network and torch's stages from the same weights on the same batches, and compare the losses."""
    rows, count = TRAINED_SIZE
    random = np.random.default_rng(2)
    images = random.integers(0, 256, (UPDATES, count, rows, 28, 28), np.uint8)
    labels = np.argmax(images.reshape(UPDATES, count, rows, -1) @ random.normal(size=(784, 10)), axis=-1)
    batches = {"images": images, "labels": labels.astype(np.int32)}
    joined = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in batches.items()}
    losses: dict[str, np.ndarray] = {}
    for dtype, bound in MOST_DIFFERENCE.items():
        with jax.enable_x64(dtype == "float64"):
            params = jax.tree.map(lambda w, dtype=dtype: np.asarray(w, dtype), init_params(0))
            losses[dtype] = _losses(params, batches)
        with TorchPipeline(named(params), {"training": joined}) as rival:
            # torch adds the gradients of micro-batches, and ours are their mean
            sgd = {"rate": RATE / count, "momentum": MOMENTUM}
            theirs = rival.losses("training", "1F1B", updates=UPDATES, **sgd)
        figures.add(
            f"largest relative difference of {UPDATES} losses to torch, {dtype}",
            abs(losses[dtype] / theirs - 1).max(),
            bound,
        )
    rounding = abs(losses["float32"] / losses["float64"] - 1).max()
    figures.add(f"largest relative difference of {UPDATES} losses, float32 / float64", rounding, 1e-4)


def _losses(params: Any, batches: dict[str, np.ndarray]) -> np.ndarray:
    """Return our loss before each update, with one batch for each."""
    one = {name: leaf[0, 0] for name, leaf in batches.items()}
    options: Any = {"ipus": STAGES, "schedule": "1f1b", "gradient_accumulation": TRAINED_SIZE[1]}
    pipeline = Pipeline.from_function(loss_fn, params, one, **options)
    step = make_train_step(pipeline, optax.sgd(RATE, MOMENTUM))
    state, losses = step.init(params), []
    for k in range(UPDATES):
        state, outputs = step(state, {name: leaf[k] for name, leaf in batches.items()})
        losses.append(float(outputs.loss))
    return np.asarray(losses)


def _step(pipeline: Pipeline, params: Any, batch: Any) -> Callable[[], Any]:
    spread = jax.device_put(batch, NamedSharding(pipeline.mesh, PartitionSpec()))
    return partial(pipeline.value_and_grad, pipeline.shard(params), spread)


def _compare(figures: Figures, rival: TorchPipeline, step: Callable[[], Any], batch: str, where: str) -> None:
    """Add the figures of the step times: rounds of a few steps of each program, so that other load affects all."""
    variants = [(schedule, threads) for schedule in torch_pipeline.SCHEDULES for threads in THREADS]
    ours: list[Cost] = []
    theirs: dict[tuple[str, int], list[Cost]] = {variant: [] for variant in variants}
    for round_ in range(ROUNDS + 1):
        if round_ == 1:  # the first was the warm-up
            ours, theirs = [], {variant: [] for variant in variants}
        ours += [cost_of(step) for _ in range(STEPS)]
        for schedule, threads in variants:
            theirs[schedule, threads] += rival.step_costs(batch, schedule, threads=threads, steps=STEPS)
    mine = Costs(ours)
    figures.add_spread(f"ours, {where}", mine)
    for schedule in torch_pipeline.SCHEDULES:
        of_torch = {threads: Costs(theirs[schedule, threads]) for threads in THREADS}
        best = min(THREADS, key=lambda threads: of_torch[threads].wall)
        figures.add(f"step time / torch {schedule}'s, {where}, threads={best}", (mine / of_torch[best]).wall, 0.90)
        figures.add(f"CPU work / torch {schedule}'s, {where}, threads=1", (mine / of_torch[1]).cpu)
        for threads, costs in of_torch.items():
            figures.add_spread(f"torch {schedule}, {where}, threads={threads}", costs)


# the usual JAX pipeline


def scanned_layers(weights: Any, x: Any, microbatch: Any) -> Any:
    """Run `pipeline.layers` with stacked weights: (layers, width, width)."""
    x = microbatch["x"] if x is None else x
    return lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, weights)[0]


def mean_squared_error(_: None, y: Any, microbatch: Any) -> Any:
    return jnp.mean((y - microbatch["y"]) ** 2)


def programs(run_layers: Callable[[Any, Any, Any], Any], weights: dict[str, Any], m: int) -> dict[str, Program]:
    """Return our step and its rivals' by name, for weights `{"first": ..., "second": ...}` that `run_layers` takes."""

    def with_loss(weights: Any, x: Any, microbatch: Any) -> Any:
        return mean_squared_error(None, run_layers(weights, x, microbatch), microbatch)

    stages = [Stage(run_layers, params="first", ipu=0), Stage(with_loss, params="second", ipu=1)]
    pipeline = Pipeline(stages, gradient_accumulation=m)
    batch = jax.device_put(batch_of(m), NamedSharding(pipeline.mesh, PartitionSpec()))
    arguments = (pipeline.shard(weights), batch)
    step = jax.jit(pipeline.value_and_grad)
    whole = lambda result: (result[0], pipeline.unshard(result[1]))
    found = {OURS: Program(step.lower(*arguments).compile(), arguments, whole)}

    mesh = make_mesh(1, STAGES)
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), weights["first"], weights["second"])
    arguments = (jax.device_put(stacked, NamedSharding(mesh, PartitionSpec("ipu"))), None, batch)

    def unstacked(result: Any) -> Any:
        loss, (of_stages, _) = result
        return loss, {name: jax.tree.map(lambda g, i=i: g[i], of_stages) for i, name in enumerate(("first", "second"))}

    for name, variation in VARIATIONS.items():
        step = value_and_grad(lambda w, x: run_layers(w, x, None), mean_squared_error, mesh, m, **variation)
        found[name] = Program(step.lower(*arguments).compile(), arguments, unstacked)
    return found


def models() -> dict[str, tuple[Callable[[Any, Any, Any], Any], dict[str, Any]]]:
    plain = model()
    stacked = {name: jnp.stack(weights) for name, weights in plain.items()}
    return {"plain layers": (layers, plain), "layers in a scan": (scanned_layers, stacked)}


def idiom_figures(figures: Figures) -> None:
    most_time = {"plain layers": 0.95, "layers in a scan": 0.75}
    for kind, (run_layers, weights) in models().items():
        compiled = {m: programs(run_layers, weights, m) for m in COUNTS}
        results = {name: program.result() for name, program in compiled[TIMED].items()}
        costs = dict(zip(compiled[TIMED], side_by_side(*compiled[TIMED].values(), rounds=12), strict=True))
        for name in (OURS, *VARIATIONS):
            for m in COUNTS:
                figures.add(f"temporary MB an IPU, {name}, {kind}, M={m}", compiled[m][name].bytes / 1e6)
        for name, cost in costs.items():
            figures.add_spread(f"{name}, {kind}, M={TIMED}", cost)
        ours = costs.pop(OURS)
        for name, cost in costs.items():
            bounded = name == IDIOM  # the variations have no bounds; they are printed to show why IDIOM was chosen
            difference = largest_relative_difference(results[OURS], results[name])
            figures.add(f"loss and gradients / {name}, {kind}, relative difference", difference, 1e-5)
            ratio = ours / cost
            figures.add(f"step time / {name}, {kind}, M={TIMED}", ratio.wall, most_time[kind] if bounded else None)
            figures.add(f"CPU work / {name}, {kind}, M={TIMED}", ratio.cpu)
            fewer = compiled[COUNTS[-1]][OURS].bytes / compiled[COUNTS[-1]][name].bytes
            figures.add(f"temporary bytes / {name}, {kind}, M={COUNTS[-1]}", fewer, 1 / 6 if bounded else None)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=RIVALS, help="measure against this rival alone")


def main() -> int:
    figures = Figures("step time and memory against torch's pipelines and the usual ones in JAX", flags=flags)
    figures.shrink(__name__, MNIST_SIZES=((2, 3),), COUNTS=(3,), TIMED=3, ROUNDS=1, STEPS=1, VARIATIONS={IDIOM: {}})
    figures.shrink(__name__, UPDATES=3, TRAINED_SIZE=(2, 3))
    figures.shrink("pipeline", WIDTH=4, ROWS=2, LAYERS=4)
    figures.shrink("mnist_example.model", HIDDEN=6, FEATURES=5)
    only = figures.args.only
    if only != "idiom" and not torch_is_installed():
        figures.leave_out("torch.distributed.pipelining", NEEDS_TORCH)
        if only == "torch":
            return 1
        only = "idiom"
    configure(STAGES)
    if only != "idiom":
        training_figures(figures)
        torch_figures(figures)
    if only != "torch":
        idiom_figures(figures)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

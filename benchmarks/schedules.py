"""Measure the gain by a concurrent head, and whether schedules take the time that they predict.

1. The head. The model is eight relu layers of 1024x1024 on 2 virtual IPUs, with 16 micro-batches of 128 rows, and a
   vocabulary head that costs as much (V=8192) or twice as much (V=16384) as the layers. *basic* has the head on the
   last IPU, *concurrent* has it on both:

       basic        IPU 0: layers 0-3 \\                          IPU 1 also has the whole head
                    IPU 1:             layers 4-7 -> head

       concurrent   IPU 0: layers 0-3 \\             -> head (first half of V)
                    IPU 1:             layers 4-7   -> head (second half)

   The gain is compared with the prediction from FLOPs alone, `Schedule.simulate(lockstep=True)`, in which a stage costs
   its matmuls and nothing else.

2. The bubbles. For 4 IPUs, 8 micro-batches and B = 2 F, the bubble of each schedule is compared with the published one.

3. All schedules. Equal stages (four relu layers per IPU, 16 micro-batches of 512 rows) run under every schedule. Step
   time and CPU work are compared with those of the unsharded program on both cores, and step time also with what
   `simulate(lockstep=True)` predicts.

All parts run with one core per virtual IPU, so that bubbles take time: a waiting IPU keeps its thread
(`configure(cores="one per IPU")`), and no operation of a pipeline uses several threads. The unsharded program uses all
cores.

Dims: N rows of a micro-batch, D features, V classes.

    python benchmarks/schedules.py [--check]
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from figures import Figures, scanned, side_by_side
from ipu_jax import ALL_IPUS, Pipeline, Stage, configure, make_schedule
from ipu_jax.schedules import Schedule
from pipeline import layers
from sharded_ops import log_softmax_cross_entropy, matmul

IPUS, LAYERS, MICRO_BATCHES = 2, 8, 16
D = 1024
ROUNDS = 4  # a step takes up to two seconds

# the closed forms of `ipu_jax.core.schedules._simulate`, which lists their sources
BUBBLES = {
    "gpipe": 0.273,
    "1f1b": 0.273,
    "looped": 0.158,
    "looped-bfs": 0.158,
    "looped-zb": 0.059,
    "zb-h1": 0.111,
    "zbv": 0.059,
    "zb-wave": 0.059,
    "dualpipev": 0.059,
}
WAVES = {4: 0.030, 8: 0.015}
ONE_CORE: dict[str, Any] = {"xla_cpu_multi_thread_eigen": False}  # operations of a program run on one thread each
VOCABULARIES = (8192, 16384)
MEASURED = ("sequential", "grouped", "interleaved", "gpipe", "1f1b", "looped", "zb-h1", "zbv")


# the model


def squared_error(_: None, x_ND: Any, microbatch: Any) -> Any:
    return jnp.mean((x_ND - microbatch["y"]) ** 2)


def whole_head(w_DV: Any, x_ND: Any, microbatch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x_ND @ w_DV, microbatch["labels"]).mean()


def split_head(w_DV: Any, x_ND: Any, microbatch: Any, *, size: int) -> Any:
    return log_softmax_cross_entropy(matmul(x_ND, w_DV), microbatch["labels"], size=size).mean()


def body(parts: int) -> dict[str, list[jax.Array]]:
    """Return the layers' weights, in `parts` groups "layers0", "layers1", ..."""
    keys = jax.random.split(jax.random.key(0), LAYERS)
    weights = [jax.random.normal(key, (D, D)) * (2 / D) ** 0.5 for key in keys]
    each = LAYERS // parts
    return {f"layers{i}": weights[each * i : each * (i + 1)] for i in range(parts)}


def unsharded(loss: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the compiled program on one device: the layers, and then this loss."""

    def loss_of(params: Any, microbatch: Any) -> Any:
        x_ND = None
        for name in sorted(name for name in params if name != "head"):
            x_ND = layers(params[name], x_ND, microbatch)
        return loss(params.get("head"), x_ND, microbatch)

    return jax.jit(scanned(loss_of))


def step_of(pipeline: Pipeline, params: Mapping[str, Any], batch: Any) -> Callable[[], Any]:
    """Return a pipeline's compiled step, whose operations run on one thread each."""
    sharded = pipeline.shard(params)
    spread = jax.device_put(batch, NamedSharding(pipeline.mesh, PartitionSpec()))
    step = jax.jit(pipeline.value_and_grad).lower(sharded, spread).compile(compiler_options=ONE_CORE)
    return partial(step, sharded, spread)


# the prediction from the matmuls alone, in units of one layer's F


def predicted(schedule: Schedule, head: float = 0.0) -> float:
    """Return the predicted step time relative to the unsharded program on both cores, if only matmuls cost time.

    Args:
        schedule: a schedule of stages with equally many layers, followed by the loss stage.
        head: the cost of the loss stage's matmul, in units of one layer.
    """
    stages = len(schedule.placement) - 1
    each = LAYERS / stages
    forward = [each] * stages + [head]
    weight = list(forward)
    # B takes two matmuls per layer, for the weight and for the input; only the first layer needs no gradient by input
    backward = [2 * f for f in forward]
    backward[0] -= 1
    work = sum(forward) + sum(backward)
    makespan = schedule.simulate(forward, backward, weight, lockstep=True).makespan
    return makespan / (schedule.micro_batches * work / IPUS)


# the figures


def head_figures(figures: Figures, vocabulary: int) -> None:
    rows = 128
    keys = jax.random.split(jax.random.key(1), 3)
    params = {**body(IPUS), "head": jax.random.normal(keys[0], (D, vocabulary)) / D**0.5}
    batch = {
        "x": jax.random.normal(keys[1], (MICRO_BATCHES, rows, D)),
        "labels": jax.random.randint(keys[2], (MICRO_BATCHES, rows), 0, vocabulary),
    }
    local = [Stage(layers, params=f"layers{i}", ipu=i) for i in range(IPUS)]
    basic = Pipeline([*local, Stage(whole_head, params="head", ipu=IPUS - 1)], gradient_accumulation=MICRO_BATCHES)
    concurrent = Pipeline(
        [*local, Stage(partial(split_head, size=vocabulary), params="head", ipu=ALL_IPUS)],
        mesh=basic.mesh,
        gradient_accumulation=MICRO_BATCHES,
        specs={"head": PartitionSpec(None, "ipu")},
    )
    dense = partial(unsharded(whole_head), params, batch)
    one, other, whole = side_by_side(
        step_of(basic, params, batch), step_of(concurrent, params, batch), dense, rounds=ROUNDS
    )
    speed_up = (one / other).wall
    head = vocabulary / D
    promised = predicted(basic.schedule, head) / predicted(concurrent.schedule, head)
    where = f"V={vocabulary}"
    figures.add(f"basic / concurrent step time, {where}", speed_up)
    figures.add(f"basic / concurrent step time as FLOPs predict, {where}", promised)
    figures.add(f"the first over the second, {where}", speed_up / promised, at_least=0.97)
    figures.add(f"basic / unsharded step time on both cores, {where}", (one / whole).wall)
    figures.add(f"concurrent / unsharded step time on both cores, {where}", (other / whole).wall, 1.05)
    figures.add(f"basic / unsharded CPU work, {where}", (one / whole).cpu)
    figures.add(f"concurrent / unsharded CPU work, {where}", (other / whole).cpu)
    for name, costs in (("basic", one), ("concurrent", other), ("unsharded", whole)):
        figures.add_spread(f"{name}, {where}", costs)


def bubble_figures(figures: Figures) -> None:
    for name, bound in BUBBLES.items():
        schedule = make_schedule(name, ipus=4, gradient_accumulation=8)
        # published to a tenth of a percent
        figures.add(f"bubble of {name}, 4 IPUs, M=8", round(schedule.simulate(forward=1, backward=2).bubble, 3), bound)
    for rounds, bound in WAVES.items():
        schedule = make_schedule("zb-wave", ipus=4, gradient_accumulation=8, rounds=rounds)
        bubble = round(schedule.simulate(forward=1, backward=2).bubble, 3)
        figures.add(f"bubble of zb-wave, {rounds} stages per IPU, 4 IPUs, M=8", bubble, bound)


def schedule_figures(figures: Figures) -> None:
    x, y = jax.random.normal(jax.random.key(1), (2, MICRO_BATCHES, 512, D))
    batch, schedules, steps = {"x": x, "y": y}, list[Schedule](), list[Callable[[], Any]]()
    for name in MEASURED:
        placement = make_schedule(name, ipus=IPUS, gradient_accumulation=1).placement
        stages = [Stage(layers, params=f"layers{i}", ipu=ipu) for i, ipu in enumerate(placement) if ipu is not None]
        # the loss is on the IPU of the last layers, so that it needs no message
        stages.append(Stage(squared_error, ipu=stages[-1].ipu))
        pipeline = Pipeline(stages, schedule=name, gradient_accumulation=MICRO_BATCHES)
        schedules.append(pipeline.schedule)
        steps.append(step_of(pipeline, body(len(placement)), batch))
    whole, *costs = side_by_side(partial(unsharded(squared_error), body(IPUS), batch), *steps, rounds=ROUNDS)
    for name, schedule, cost in zip(MEASURED, schedules, costs, strict=True):
        ratio, promised = (cost / whole).wall, predicted(schedule)
        figures.add(f"step time / unsharded on both cores, {name}", ratio)
        figures.add(f"the same as FLOPs predict, {name}", promised)
        bound = 1.04 if schedule.weight else None
        figures.add(f"the first over the second, {name}", ratio / promised, bound)
        figures.add(f"CPU work / unsharded, {name}", (cost / whole).cpu)


def main() -> int:
    figures = Figures("schedules: a concurrent head's worth, the bubbles, and every schedule measured")
    figures.shrink(__name__, D=4, MICRO_BATCHES=2, VOCABULARIES=(7,), MEASURED=("zbv",))
    configure(IPUS, cores="one per IPU")  # otherwise a working IPU also uses the core of a waiting IPU
    bubble_figures(figures)
    for vocabulary in VOCABULARIES:
        head_figures(figures, vocabulary)
    schedule_figures(figures)
    return figures.status()


if __name__ == "__main__":
    sys.exit(main())

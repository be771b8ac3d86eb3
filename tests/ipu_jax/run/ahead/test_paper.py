"""Test the time of a step on paper by arithmetic from shapes: stages of one product each, (N, D) @ (D, D)."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.chips import Kernel, Row
from ipu_jax.core.engine.plan import Plan
from ipu_jax.run.ahead.kinds import Kind
from ipu_jax.run.ahead.paper import estimate, flops_by_task, kernels_by_name, kernels_of

N, D, M = 4, 8, 6
PRODUCT, SUM = 2 * N * D * D, N * D
FLOPS, CLOCK = 1e3, 10.0
KIND = Kind("toy", "toy", memory=0, flops=FLOPS, memory_speed=1e9, clock=CLOCK, link=1, network=1)


def plan_of(schedule: str, ipus: int, *, concurrent_head: bool = False) -> Plan:
    """Return the plan of a stage per IPU, the last one a sum, and perhaps a head on all IPUs that sums as well."""
    head = lambda w, x, mb: jax.lax.psum(jnp.sum(x @ w), "ipu")
    stages = [Stage(lambda w, x, mb: mb @ w, "w0", 0)]
    stages += [Stage(lambda w, x, mb: x @ w, f"w{i}", i) for i in range(1, ipus - 1 + concurrent_head)]
    if concurrent_head:
        stages.append(Stage(head, "head", ALL_IPUS))
    else:
        stages.append(Stage(lambda w, x, mb: jnp.sum(x @ w), f"w{ipus - 1}", ipus - 1))
    specs = {"head": PartitionSpec()} if concurrent_head else None
    pipeline = Pipeline(stages, mesh=make_mesh(1, ipus), schedule=schedule, gradient_accumulation=M, specs=specs)
    weights = {name: jax.ShapeDtypeStruct((D, D), "float32") for stage in stages for name in stage.groups}
    return pipeline.placement.plan(pipeline.shard_shapes(weights), jax.ShapeDtypeStruct((M, N, D), "float32"))


def even(plan: Plan, **cycles: int) -> dict[str, int]:
    """Return equal cycles for all local segments."""
    return {f"{task}.{c}": n for task, n in cycles.items() for c in range(len(plan.classes))}


@pytest.mark.parametrize("schedule", ["grouped", "1f1b", "zb-h1"])
@pytest.mark.parametrize("ipus", [2, 3])
def test_flops_are_those_of_the_ipu_with_the_most(schedule, ipus):
    """The first stage has no gradient of its input, and the last one a sum: the gradient of a sum is not a FLOP."""
    plan, split = plan_of(schedule, ipus), schedule == "zb-h1"
    backward, weight = (PRODUCT, PRODUCT) if split else (2 * PRODUCT, 0)
    assert flops_by_task(plan) == {"F": M * (PRODUCT + SUM), "B": M * backward, "W": M * weight}
    paper = estimate(plan, KIND, [], {}, written=0)
    found = (paper.forward, paper.backward, paper.weight)
    assert found == pytest.approx([M * task / FLOPS for task in (PRODUCT + SUM, backward, weight)])
    assert (paper.messages, paper.sums, paper.update) == (0, 0, 0)
    assert paper.seconds == pytest.approx(sum(found) + paper.bubble)
    assert paper.share_of_peak == pytest.approx(sum(found) / paper.seconds)


@pytest.mark.parametrize(
    ("schedule", "forward", "backward", "weight", "bubble"),
    [
        ("grouped", 300, 500, 0, lambda s: (s - 1) * (300 + 500)),
        # these run F beside B, and IPUs wait for each other at the end of a tick: so only with equal tasks
        ("1f1b", 400, 400, 0, lambda s: (s - 1) * (400 + 400)),
        ("zb-h1", 400, 400, 400, lambda s: (s - 1) * (400 + 400 - 400)),
        ("sequential", 300, 500, 0, lambda s: (s - 1) * M * (300 + 500)),
    ],
)
@pytest.mark.parametrize("ipus", [2, 3])
def test_the_bubble_of_even_stages_has_a_closed_form(schedule, forward, backward, weight, bubble, ipus):
    plan = plan_of(schedule, ipus)
    paper = estimate(plan, KIND, [], even(plan, F=forward, B=backward, W=weight), written=0)
    times = [M * cycles / CLOCK for cycles in (forward, backward, weight)]
    assert (paper.forward, paper.backward, paper.weight) == pytest.approx(times)
    assert paper.bubble == pytest.approx(bubble(ipus) / CLOCK)


def test_a_task_takes_what_bounds_it_the_most():
    plan = plan_of("grouped", 2)
    # weights, input and micro-batch; the sum, and the input kept for B
    moved = 4 * (D * D + 2 * N * D) + 4 * (1 + N * D)
    slow = Kind("toy", "toy", memory=0, flops=1e12, memory_speed=100, clock=CLOCK, link=1, network=1)
    assert estimate(plan, slow, [], {}, written=0).forward == pytest.approx(M * moved / 100)
    assert estimate(plan, slow, [], {"F.1": 10_000}, written=0).forward == pytest.approx(M * 10_000 / CLOCK)
    assert estimate(plan, slow, [], {"F.1": 1}, written=0).forward == pytest.approx(M * moved / 100)


def test_only_what_no_work_hides_takes_time_and_the_update_reads_and_writes():
    row = lambda axis, seconds, hidden=False: Row("any", axis, 1, 1, 1, hidden, seconds)
    rows = [row("ipu", 1.0), row("ipu", 2.0), row("ipu", 4.0, True), row("replica", 8.0), row("replica x ipu", 16.0)]
    rows += [row("replica", 32.0, True), row("ipu", None)]
    plan = plan_of("grouped", 2)
    paper = estimate(plan, KIND, rows, {}, written=3_000_000_000)
    assert (paper.messages, paper.sums, paper.update) == (3, 24, 2 * 3)
    alone = estimate(plan, KIND, [], {}, written=0)
    assert paper.seconds == pytest.approx(alone.seconds + 3 + 24 + 6)
    assert paper.share_of_peak * paper.seconds == pytest.approx(alone.share_of_peak * alone.seconds)


def test_every_ipu_runs_a_concurrent_head_for_every_micro_batch():
    """The bubble is of the local stages alone, because all IPUs run the head at once."""
    plan = plan_of("grouped", 2, concurrent_head=True)
    assert flops_by_task(plan) == {"F": M * (2 * PRODUCT + SUM), "B": M * 4 * PRODUCT, "W": 0}
    cycles = {"F.0": 300, "F.1": 300, "B.0": 500, "B.1": 500, "FB.2": 1000}
    paper = estimate(plan, KIND, [], cycles, written=0)
    assert paper.forward + paper.backward == pytest.approx(M * (300 + 500 + 1000) / CLOCK)
    of_head = 3 * PRODUCT + SUM  # whose cycles are divided like its FLOPs
    assert paper.forward == pytest.approx(M * (300 + 1000 * (PRODUCT + SUM) / of_head) / CLOCK)
    assert paper.bubble == pytest.approx((300 + 500) / CLOCK)


def doubled(x, given: int | None = 2000):
    """Return x twice by a kernel in 2 steps, which says how many FLOPs it has, or does not say it."""
    cost = None if given is None else pallas.CostEstimate(flops=given, transcendentals=0, bytes_accessed=0)

    def double(source, target):
        target[...] = 2 * source[...]

    spec = pallas.BlockSpec((N // 2, D), lambda k: (k, 0))
    made = pallas.pallas_call(
        double, jax.ShapeDtypeStruct((N, D), "float32"), grid=(2,), in_specs=[spec], out_specs=spec, cost_estimate=cost
    )
    return made(jax.lax.stop_gradient(x))


def test_a_kernel_counts_its_flops_at_half_of_the_peak_where_the_compiler_counts_cycles():
    stages = [
        Stage(lambda w, x, mb: mb @ w + jax.lax.scan(lambda x, _: (doubled(x), None), mb, length=3)[0], "w0", 0),
        Stage(lambda w, x, mb: jnp.sum(doubled(x) @ w), "w1", 1),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=M)
    weights = {name: jax.ShapeDtypeStruct((D, D), "float32") for name in ("w0", "w1")}
    plan = pipeline.placement.plan(pipeline.shard_shapes(weights), jax.ShapeDtypeStruct((M, N, D), "float32"))
    (kernel,) = kernels_by_name(plan, KIND)
    assert kernel == Kernel("double", M * 3 * 2000, M * 3 * 2000 / (FLOPS / 2))

    cycles = even(plan, F=30_000, B=50_000)  # more than by the FLOPs
    with_kernels, one_each = estimate(plan, KIND, [], cycles, written=0), M * 3 * 2000 / (FLOPS / 2)
    assert with_kernels.forward == pytest.approx(M * 30_000 / CLOCK + one_each)
    assert with_kernels.backward == pytest.approx(M * 50_000 / CLOCK)
    on_gpus = estimate(plan, KIND, [], even(plan, F=0, B=0), written=0)  # there all FLOPs are at full speed
    assert on_gpus.forward == pytest.approx(flops_by_task(plan)["F"] / FLOPS)


def test_flops_of_a_kernel_are_its_own_or_counted_and_a_branch_counts_once():
    x = jax.ShapeDtypeStruct((N, D), "float32")
    flops = lambda fn: kernels_of(jax.make_jaxpr(fn)(x))
    assert flops(doubled) == {"double": 2000}
    assert flops(lambda x: doubled(x, None)) == {"double": 3 * N * D}  # each element is read, doubled and written
    branches = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: doubled(x, 70), doubled, x)
    assert flops(jax.jit(branches)) == {"double": 2000}
    assert flops(jnp.sin) == {}

"""Test where the time of a step on paper goes, and what would save time, for programs that are made up."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.chips import Array, Explanation, Instruction, Row
from ipu_jax.core.engine.plan import Plan
from ipu_jax.run.ahead.explain import explain_step, flops_with, kind_of_work, scores_of
from ipu_jax.run.ahead.kinds import Kind
from ipu_jax.run.ahead.paper import estimate

N, D, M, S = 4, 8, 6, 3
CLOCK = 10.0
KIND = Kind("toy", "toy", memory=0, flops=1e6, memory_speed=1e5, clock=CLOCK, link=1, network=1)
OPS = {
    "products": "convolution",
    "stores": "dynamic-update-slice",
    "loads": "gather",
    "copies": "copy",
    "elementwise": "add",
}
# cycles of the instructions of one run of a task
F, B = {"products": 100, "stores": 40, "elementwise": 260}, {"products": 500, "loads": 80, "copies": 220}
HEAD = {"products": 30, "elementwise": 60}


def plan_of(schedule: str = "grouped", *, head: bool = False, body: Any = lambda w, x: x @ w) -> Plan:
    """Return the plan of a stage on each of 3 IPUs, and perhaps of a head on all of them."""
    stages = [Stage(lambda w, x, mb, k=k: body(w, x if k else mb), f"w{k}", k) for k in range(S)]
    summed = Stage(lambda w, x, mb: jax.lax.psum(jnp.sum(x @ w), "ipu"), "w", ALL_IPUS)
    last = Stage(lambda w, x, mb: jnp.sum(body(w, x)), f"w{S - 1}", S - 1)
    stages = [*stages, summed] if head else [*stages[:-1], last]
    specs = {"w": PartitionSpec()} if head else None
    pipeline = Pipeline(stages, mesh=make_mesh(1, S), schedule=schedule, gradient_accumulation=M, specs=specs)
    weights = {name: jax.ShapeDtypeStruct((D, D), "float32") for stage in stages for name in stage.groups}
    return pipeline.placement.plan(pipeline.shard_shapes(weights), jax.ShapeDtypeStruct((M, N, D), "float32"))


def explained(plan: Plan, of_task: dict[str, dict[str, int]], *rows: Row, dims: tuple[int, ...] = ()) -> Explanation:
    """Explain a program whose tasks have these cycles: F and B of local classes, or of "F.1" alone; FB of heads."""
    cycles = {
        f"{task}.{c}": of_task.get(f"{task}.{c}", of_task[task])
        for c, (first, *_) in enumerate(plan.classes)
        for task in {*of_task} & {"F", "B", "FB"}
        if (plan.segments[first].place is None) == (task == "FB")
    }

    def in_task(label: str) -> Any:
        for kind, n in cycles.get(label, {}).items():
            line = f'%x = f32[4] {OPS[kind]}(%p), backend_config={{"estimated_cycles":"{n // 2}"}}'
            shape = dims if kind == "elementwise" else (1,)
            yield Instruction(OPS[kind], (Array("f32", shape),), line), 2.0, []  # in a loop of 2 runs

    bodies = {label: sum(each.values()) for label, each in cycles.items()}
    program: Any = SimpleNamespace(bodies=bodies, in_task=in_task, cycles_under=lambda label: 0)
    paper = estimate(plan, KIND, rows, bodies, written=500_000)
    found = explain_step(plan, KIND, program, rows, paper)
    assert found.seconds == paper.seconds == pytest.approx(sum(part.seconds for part in found.parts))
    for part in found.parts:
        assert sum(part.kinds.values()) in (0, pytest.approx(part.seconds))
    return found


def test_the_parts_of_a_step_add_up_to_it():
    rows = [Row("all-reduce", "ipu", 1, 1, 1, False, 7.0, 2), Row("all-gather", "ipu", 1, 1, 1, False, 2.0)]
    rows += [Row("permute y", "ipu", 1, 1, 1, True, 100.0), Row("all-reduce", "replica", 1, 1, None, False, 3.0)]
    found = explained(plan_of(head=True), {"F": F, "B": B, "FB": HEAD}, *rows)
    by_name = {part.name: part for part in found.parts}
    per_cycle = M / CLOCK
    times = {"F": 400 * per_cycle, "B": 800 * per_cycle, "FB": 90 * per_cycle, "bubble": (S - 1) * 1200 / CLOCK}
    times |= {"messages": 9.0, "sums": 3.0, "update": 10.0}
    assert {name: part.seconds for name, part in by_name.items()} == pytest.approx(times)
    assert by_name["F"].kinds == pytest.approx({kind: n * per_cycle for kind, n in F.items()})
    assert by_name["messages"].kinds == {"all-reduce over 2 links": 7.0, "all-gather over 1 hop": 2.0}
    assert by_name["sums"].kinds == {"all-reduce over network": 3.0}
    moved = [4 * (D * D + 2 * N * D), 4 * (D * D + 3 * N * D)]  # the weight, its input and result; the stash
    assert moved[0] <= (by_name["F"].least or 0.0) / M * 1e5 <= moved[1]
    assert "x its bytes at full speed, by the compiler's cycles" in by_name["F"].by
    assert "100%" in str(found).splitlines()[0]


def test_a_task_at_its_bound_says_so_and_has_no_kinds():
    found = explained(plan_of(), {})
    assert {part.by for part in found.parts if part.name in "FB"} == {"its bytes at full speed"}
    assert all(not part.kinds for part in found.parts)


def test_each_advice_saves_what_closed_forms_say():
    found = explained(plan_of(), {"F": F, "B": B})
    saves = {one.what.split(",")[0].split(" ")[0]: one.saves for one in found.advice}
    assert saves == pytest.approx(
        {
            "gradient_accumulation=12": ((S - 1) * 1200 / CLOCK + 10.0) / 2,  # of the bubble and the update
            "schedule='looped-zb'": (S - 1) * 800 / CLOCK,  # W is half of B: F alone is left of the bubble
            "tasks": (M + S - 1) * 220 / CLOCK,  # without copies
        }
    )
    assert [one.saves for one in found.advice] == sorted(saves.values(), reverse=True)


def test_messages_that_another_clock_would_not_hide_are_no_gain():
    hidden = Row("permute y", "ipu", 1, 1, 1, True, 100.0)
    found = explained(plan_of(), {"F": F, "B": B}, hidden)
    (other,) = [one for one in found.advice if one.what.startswith("schedule")]
    # looped-zb saves 160 s of bubble, and its ticks wait 100 s for messages; grouped-zb saves 80 s under the same clock
    assert (other.what.split(",")[0], other.saves) == ("schedule='grouped-zb'", pytest.approx((S - 1) * 400 / CLOCK))

    exposed = Row(
        "permute y", "ipu", 1, 1, 1, False, 100.0
    )  # under the one-phase clock, which grouped-zb does not have
    found = explained(plan_of("1f1b"), {"F": F, "B": {"products": 400}}, exposed)
    (other,) = [one for one in found.advice if one.what.startswith("schedule")]
    saves = 100 + (S - 1) * 200 / CLOCK
    assert (other.what.split(",")[0], other.saves) == ("schedule='grouped-zb'", pytest.approx(saves))


def test_uneven_stages_and_ends_on_all_ipus():
    plan = plan_of(head=True)
    long = Row("all-reduce", "ipu", 1, 1, 1, False, 500.0)
    found = explained(plan, {"F": F, "B": B, "FB": HEAD}, long)
    (ends,) = [one for one in found.advice if "head='local'" in one.what]
    # in M ticks the others wait for the last IPU's head, which takes the time of three
    assert ends.saves == pytest.approx(500 - M * (3 * 90 - 90) / CLOCK)
    slow = F | {"products": 200}
    (even,) = [one for one in explained(plan_of(), {"F": F, "B": B, "F.1": slow}).advice if "same time" in one.what]
    # tick by tick: IPU 1 is the slowest in tick 1, and in ticks 3 to 6, in which it has B, too
    ticks = [400, 500, 1200, *[1300] * 4, 1200, 800, 800]
    evened = [*[1300 / 3] * 2, *[1300 / 3 + 800] * 6, 800, 800]
    assert even.saves == pytest.approx((sum(ticks) - sum(evened)) / CLOCK)


def test_attention_in_jnp_is_advised_to_be_a_kernel():
    def body(w: Any, x: Any) -> Any:
        scores = jnp.einsum("bth,bsh->bts", *[x.reshape(1, N, D)[..., :2]] * 2)
        return x @ w + jnp.einsum("bts,bsd->btd", jnp.exp(scores), x.reshape(1, N, D))[0]

    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((N, D), (D, D)))
    jaxpr = jax.make_jaxpr(jax.jit(body))(w, x)
    assert scores_of([jaxpr]) == {(N * N, (N, N))}
    assert flops_with(scores_of([jaxpr]), jaxpr) == 2 * N * N * 2 + 2 * N * N * D
    heads = jax.ShapeDtypeStruct((3, 2 * D, 2, D // 2), "float32")  # its product has a dim of 1, which XLA leaves out
    of_heads = jax.make_jaxpr(jax.nn.dot_product_attention)(heads, heads, heads)
    assert scores_of([of_heads]) == {(3 * 2 * (2 * D) ** 2, (2 * D, 2 * D))}
    experts = lambda w, x: jnp.einsum("bth,bhd->btd", jnp.ones((2, 64, 2)), jnp.ones((2, 2, 64)))  # no softmax
    for other in (experts, lambda w, x: jnp.exp(x @ w)):
        assert scores_of([jax.make_jaxpr(other)(w, x)]) == set()

    named = lambda found: [one for one in found.advice if "attention" in one.what]
    (kernel,) = named(explained(plan_of(body=body), {"F": F, "B": B}, dims=(1, N, N)))
    full = (2 * N * N * 2 + 2 * N * N * D) / 1e6  # of the products of F
    assert kernel.saves == pytest.approx((M + S - 1) * (260 / CLOCK - 2 * full))
    assert named(explained(plan_of(body=body), {"F": F, "B": B}, dims=(1, N, N + 1))) == []
    assert named(explained(plan_of(), {"F": F, "B": B}, dims=(1, N, N))) == []


@pytest.mark.parametrize(
    ("op", "inside", "kind"),
    [
        ("fusion", ("parameter", "dynamic-slice", "convolution", "dynamic-update-slice"), "products"),
        ("fusion", ("parameter", "add", "dynamic-update-slice"), "stores"),
        ("fusion", ("parameter", "dynamic-slice", "exponential"), "loads"),
        ("fusion", ("parameter", "transpose", "bitcast"), "copies"),
        ("copy", (), "copies"),
        ("fusion", ("parameter", "exponential", "reduce"), "elementwise"),
    ],
)
def test_the_kind_of_an_instruction(op, inside, kind):
    assert kind_of_work(Instruction(op, (), ""), [Instruction(one, (), "") for one in inside]) == kind

"""Test what is reported of models compiled for the devices of the CPU, of which no memory or speed is known."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.chips import ChipReport, compile_ahead, hand_over
from ipu_jax.run.ahead import compiling
from ipu_jax.run.ahead.compiling import HandedOver, awaiting
from ipu_jax.run.ahead.kinds import KINDS
from ipu_jax.steps import replicate
from support.refusals import refusals, refused
from support.trained import compiled_quickly

N, D, M = 4, 8, 6
FORWARD = M * (2 * N * D * D + 1)  # of the first stage: its layer is the larger one, and it counts
GIB = 2**30

_compiled_quickly = compiled_quickly()


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, "float32")


WEIGHTS = {"a": {"w": shape(D, D)}, "b": {"w": shape(D, 2)}}
STATE = {"seen": jax.ShapeDtypeStruct((), "int32")}


def pipeline_of(replicas: int = 1, **options: Any) -> Pipeline:
    """Return two stages: the first one counts its micro-batches in its state, and the second one draws numbers."""
    first = lambda w, x, mb, *, state: Outputs(mb @ w["w"], state={"seen": state["seen"] + 1})
    last = lambda w, x, mb, *, key: jnp.mean(jnp.square(x @ w["w"] * jax.random.normal(key, (2,))))
    stages = [Stage(first, "a", 0, state="a"), Stage(last, "b", 1, random=True)]
    return Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=M, **options)


def step_of(**options: Any) -> Any:
    return make_train_step(pipeline_of(), optax.sgd(1e-3), TrainOptions(replication_factor=2, **options))


def report_of(model: Any, *dims: int, **given: Any) -> ChipReport:
    given = {"state": {"a": STATE}, "key": jax.eval_shape(jax.random.key, 0)} | given
    return compile_ahead(model, WEIGHTS, shape(*dims, M, N, D), **given)


def sizes(analysis: Any) -> tuple[int, ...]:
    names = ("argument", "output", "alias", "temp", "generated_code")
    return tuple(getattr(analysis, f"{name}_size_in_bytes") for name in names)


@pytest.mark.slow
def test_a_pipeline_with_state_and_keys():
    pipeline = pipeline_of()
    report = report_of(pipeline)
    memory, own = report.memory, (pipeline.shard_shapes(WEIGHTS), pipeline.shard_state_shapes({"a": STATE}))
    compiled = pipeline.lower(own[0], shape(M, N, D), own[1], jax.random.key(0)).compile()
    arguments, results, reused, temporary, code = sizes(compiled.memory_analysis())
    assert (memory.arguments, memory.results, memory.reused) == (arguments, results, reused)
    assert (memory.temporary, memory.program) == (temporary, code)
    assert memory.needed == arguments + results - reused + temporary + code
    assert (memory.available, memory.missing, report.fits, report.paper) == (None, 0, True, None)
    assert (report.chips, report.chip, report.mesh) == (2, "cpu", {"replica": 1, "ipu": 2})
    assert report.versions == {"jax": jax.__version__}
    assert report.flops["F"] == FORWARD
    assert (report.cycles, report.host_loops, report.mends) == ({}, None, ())
    assert {row.op: row.runs for row in report.rows}["permute y"] == M
    assert report.model in str(report)
    placed = compile_ahead(pipeline, own[0], shape(M, N, D), state=own[1], key=jax.random.key(0))
    assert placed.memory == memory


@pytest.mark.slow
def test_a_training_step_of_several_updates_and_replicas():
    step = step_of(device_iterations=2)
    state = step.shapes(WEIGHTS, stages={"a": STATE}, key=jax.random.key(0))
    batch = shape(2, 2, M, N, D)
    report, one = compile_ahead(step, state, batch), report_of(step_of(), 2)
    memory = step.lower(state, batch).compile().memory_analysis()
    own = report.memory
    assert sizes(memory)[:4] == (own.arguments, own.results, own.reused, own.temporary)
    assert own.reused > 0
    assert own.needed == own.arguments + own.results - own.reused + sum(sizes(memory)[3:])
    assert (report.chips, report.mesh) == (4, {"replica": 2, "ipu": 2})
    assert (report.flops, report.rows) == (one.flops, one.rows)  # of one update
    assert {row.axis for row in report.rows} == {"ipu", "replica"}


def test_a_training_step_of_a_loss_function_has_no_tasks():
    loss = lambda w, rows: jnp.mean((rows @ w) ** 2)
    step = make_train_step(replicate(loss, replication_factor=2), optax.sgd(0.1))
    report = compile_ahead(step, shape(3), shape(2, 1, N, 3))
    assert report.memory.arguments == 4 * (3 + N * 3 + 1)  # weights, a replica's rows, and the count of updates
    assert (report.flops, report.paper, report.mends) == ({}, None, ())
    assert [(row.op, row.axis) for row in report.rows] == [("all-reduce", "replica")]


LOSS_ALONE = make_train_step(lambda w, rows: jnp.mean((rows @ w) ** 2), optax.sgd(0.1))


def explained(*given: Any) -> None:
    """Hand a model over as `ipu-compile --explain` does."""
    with awaiting(explain=True):
        hand_over(*given)


@refusals(
    (lambda: report_of(lambda w, b: 0.0), "model=<function", "neither a TrainStep nor a Pipeline", "make one"),
    (lambda: report_of(pipeline_of(), state=None), "state", "shard_state"),
    (lambda: report_of(pipeline_of(), key=None), "key", "random"),
    (lambda: report_of(pipeline_of(2)), "2", "replica"),
    (lambda: report_of(pipeline_of(), explain=True), "--explain, needs chips whose figures are known", "leave it out"),
    (lambda: explained(LOSS_ALONE, shape(3), shape(1, N, 3)), "--explain, needs a pipeline", "leave it out"),
)
def test_other_models_and_arguments_are_refused(call, holds):
    with refused(*holds):
        call()


@pytest.mark.slow
def test_a_script_ends_where_it_hands_over_under_the_command_only():
    hand_over("anything", None, None)
    with pytest.raises(HandedOver) as ended, awaiting():
        hand_over(pipeline_of(), WEIGHTS, shape(M, N, D), state={"a": STATE}, key=jax.random.key(0))
    assert ended.value.report.flops["F"] == FORWARD
    assert not isinstance(ended.value, Exception)  # a script that suppresses errors ends, too
    hand_over("anything", None, None)


def test_a_script_is_offloaded_as_the_command_says():
    loss = lambda w, rows: jnp.mean((rows @ w) ** 2)
    given = (make_train_step(loss, optax.adam(0.1)), shape(3), shape(1, N, 3))
    with pytest.raises(HandedOver) as ended, awaiting("optimizer"):
        hand_over(*given)
    assert "offload=('optimizer',)" in ended.value.report.model
    with awaiting("optimizer"), refused("--offload optimizer", "needs a TrainStep", "leave it out"):
        hand_over(pipeline_of(), WEIGHTS, shape(M, N, D))


def raising(message: str) -> Any:
    def compile_lowered(lowered: Any, device: Any) -> Any:
        raise jax.errors.JaxRuntimeError(message)

    return compile_lowered


@pytest.fixture
def v5e(monkeypatch):
    """Let the CPU's devices be TPUs."""
    monkeypatch.setattr(compiling, "kind_of", lambda device: KINDS["v5e"])


@pytest.mark.slow
@pytest.mark.usefixtures("v5e")
def test_a_chip_that_is_known_has_a_time_on_paper_and_mends_where_it_is_too_small(monkeypatch):
    report = report_of(pipeline_of())
    assert report.memory.available == 15.75 * GIB
    assert (report.fits, report.mends) == (True, ())
    assert report.paper is not None
    assert report.paper.forward > 0
    monkeypatch.setattr(compiling, "memory_for_jax", lambda kind, platform: 1000.0)
    small = report_of(pipeline_of())
    assert (small.fits, small.memory.missing) == (False, report.memory.needed - 1000)
    assert small.mends[0].startswith("recompute='all'")


MESSAGES = {
    "Ran out of memory on HBM, the total memory required for HLO temporaries (298.02G) exceeds available HBM "
    "(15.75G).": 298.02,
    "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.53G of 15.75G hbm. Exceeded hbm "
    "capacity by 4.78G.\n\nTotal hbm usage >= 20.79G: ...": 20.79,
    "Used 20.53G of 15.75G hbm. Exceeded hbm capacity by 4.78G.": 20.53,
    "no number": 15.75,
}


@pytest.mark.parametrize(("message", "needed"), MESSAGES.items(), ids=str)
def test_a_program_that_is_too_large_needs_what_the_compiler_says(message, needed):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")
    memory = compiling._too_large(error, 7, int(15.75 * GIB))
    assert memory is not None
    assert (memory.needed, memory.arguments) == (pytest.approx(needed * GIB), 7)
    assert memory.missing > 0


@pytest.mark.usefixtures("v5e")
def test_a_program_that_is_too_large_to_be_compiled_has_a_report(monkeypatch):
    monkeypatch.setattr(compiling, "compile_lowered", raising("RESOURCE_EXHAUSTED: 20.53G"))
    report = report_of(step_of(), 2, explain=True)
    memory = report.memory
    assert report.explanation is None
    assert memory.needed == pytest.approx(20.53 * GIB)
    assert (memory.temporary, memory.program, report.program, report.rows, report.paper) == (None, None, None, (), None)
    assert memory.missing > 0
    assert report.mends


@pytest.mark.slow
@pytest.mark.parametrize("model", [lambda: pipeline_of(2), step_of, lambda: step_of(device_iterations=2)])
def test_the_arguments_of_a_program_that_is_too_large_are_those_of_one_chip(monkeypatch, model):
    dims = (2, 2) if "device_iterations" in str(model()) else (2,)
    arguments = report_of(model(), *dims).memory.arguments
    monkeypatch.setattr(compiling, "compile_lowered", raising("RESOURCE_EXHAUSTED"))
    found = report_of(model(), *dims).memory.arguments
    assert found == pytest.approx(arguments, abs=8)  # without the key, or the number of updates


def test_another_error_of_the_compiler_is_raised(monkeypatch):
    monkeypatch.setattr(compiling, "compile_lowered", raising("INTERNAL: a bug"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        report_of(pipeline_of())


@pytest.mark.slow
def test_the_chips_of_an_ipu_share_its_work():
    """Each stage is a product whose columns, or rows, two chips share: half of its FLOPs, of its weights and of dw."""

    def stages() -> list[Stage]:
        first = lambda w, x, mb: jax.lax.with_sharding_constraint(mb @ w, PartitionSpec())
        last = lambda w, x, mb: jnp.mean(jnp.square(x @ w))
        return [Stage(first, "a", 0), Stage(last, "b", 1)]

    specs = {"a": PartitionSpec(None, "tensor"), "b": PartitionSpec(None, "tensor")}
    one, two = (
        compile_ahead(
            Pipeline(stages(), mesh=make_mesh(1, 2, tensor=size), gradient_accumulation=M, specs=specs),
            {"a": shape(D, D), "b": shape(D, 2)},
            shape(M, N, D),
        )
        for size in (1, 2)
    )
    assert two.flops == {task: flops // 2 for task, flops in one.flops.items()}
    assert (two.chips, two.mesh) == (4, {"replica": 1, "ipu": 2, "tensor": 2})
    assert {row.axis for row in two.rows} == {"ipu", "tensor"}
    batch = 4 * M * N * D
    assert two.memory.arguments - batch == (one.memory.arguments - batch) // 2

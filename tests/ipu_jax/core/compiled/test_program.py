"""Test how the text of a compiled program is read: short programs in XLA's notation, and one compiled for CPU."""

import contextlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.chips import Array, Instruction, Program
from ipu_jax.core.compiled.guards import check_update, why_not_own
from ipu_jax.core.compiled.program import host_loops
from ipu_jax.core.engine.order import Action, Tick
from support.refusals import refused

TICKS = """HloModule jit_f, is_scheduled=true

%row (p: bf16[8,4,16]) -> bf16[4,16] {
  ROOT %dot = bf16[4,16]{1,0} convolution(%p, %p), dim_labels=bf_io->bf
}

%heads (p: bf16[8,4,16]) -> bf16[8,4,16] {
  %product = bf16[4,16]{1,0} fusion(%p), kind=kOutput, calls=%row, backend_config={"estimated_cycles":"100"}
  ROOT %layers = bf16[8,4,16]{2,1,0} while(%p), condition=%c, body=%layer, \
backend_config={"known_trip_count":{"n":"3"}}
}

%layer (p: bf16[8,4,16]) -> bf16[8,4,16] {
  ROOT %moved = bf16[8,16,4]{2,1,0} copy(%p), backend_config={"estimated_cycles":"7"}
}

%other (p: bf16[8,4,16]) -> bf16[8,4,16] {
  ROOT %product.1 = bf16[4,16]{1,0:T(8,128)(2,1)} fusion(%p), calls=%row, backend_config={"estimated_cycles":"30"}
}

%tick (p: (s32[], bf16[8,4,16])) -> (s32[], bf16[8,4,16]) {
  %while.1 = bf16[8,4,16]{2,1,0} while(%a), condition=%c, body=%heads, metadata={op_name="f/ipu_jax.F.0/while"}
  %while.2 = bf16[8,4,16]{2,1,0} while(%a), condition=%c, body=%other, metadata={op_name="f/ipu_jax.F.1/while"}
  ROOT %sum = (bf16[4,16]{1,0}, f32[]) all-reduce(%x, %y), replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (p: bf16[4,16]) -> f32[4] {
  %loop = (s32[], /*index=1*/bf16[8,4,16]{2,1,0}) while(%a), condition=%c, body=%tick, \
metadata={op_name="f/ipu_jax.plan.6bba.a041/while"}, backend_config={"known_trip_count":{"n":"5"}}
  %new = f32[4]{0} fusion(%x), metadata={op_name="f/ipu_jax.update/mul"}, backend_config={"estimated_cycles":"11"}
  ROOT %sum.1 = f32[4]{0} all-reduce(%x), to_apply=%add
}
"""


def program_of(text: str) -> Program:
    memory = SimpleNamespace(generated_code_size_in_bytes=3, temp_size_in_bytes=4)
    return Program(SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory))


def of_lines(*lines: str) -> Program:
    """Return a program whose entry computation has these instructions."""
    return program_of("\n".join(["ENTRY %main (p: f32[4]) -> f32[4] {", *(f"  {line}" for line in lines), "}"]))


def test_cycles_go_through_loops_and_those_of_a_task_are_of_the_slowest_class():
    program = program_of(TICKS)
    assert program.bodies == {"F.0": 100 + 3 * 7, "F.1": 30}
    assert (program.cycles_of("F"), program.cycles_of("B")) == (121, 0)
    in_task = [(i.cycles, runs, [one.op for one in inside]) for i, runs, inside in program.in_task("F.0")]
    assert in_task == [(100, 1, ["convolution"]), (7, 3, [])]
    assert [*program.in_task("B.0")] == []
    assert program.cycles == 5 * (121 + 30) + 11
    assert program.cycles_under("ipu_jax.update") == 11
    assert (program.code_bytes, program.temporary_bytes) == (3, 4)


def test_the_plan_says_how_often_a_loop_of_unknown_length_runs(monkeypatch):
    """F.0 is active in 4 of 10 ticks on some IPU; the plan knows nothing of F.1."""
    active = np.array([[0, -1], [1, 0], [-1, 1], [2, -1], *[[-1, -1]] * 6])
    plan = SimpleNamespace(ticks=10, microbatches={("F", 0): active})
    monkeypatch.setattr(
        "ipu_jax.core.compiled.program.plan_named", lambda name: plan if "ipu_jax.plan" in name else None
    )
    text = TICKS.replace('{"known_trip_count":{"n":"5"}}', "{}").replace(
        "f/ipu_jax.F.0", "ipu_jax.plan.6.a/ipu_jax.F.0"
    )
    program = program_of(text)
    assert program.cycles == 4 * 121 + 10 * 30 + 11
    assert next(c.runs for c in program.collectives if c.instruction.name == "sum") == 10


def test_instructions_of_ticks_are_told_from_those_before_and_after():
    program = program_of(TICKS)
    (scan,) = program.scans
    assert (scan.name, scan.trips, scan.body, scan.called) == ("loop", 5, "tick", ["c", "tick"])
    assert scan.arrays == (Array("s32", ()), Array("bf16", (8, 4, 16)))
    names = ["while.1", "while.2", "sum", "product", "dot", "layers", "moved", "product.1"]
    assert sorted(i.name for i in program.in_scans()) == sorted(names)
    assert [i.name for i in program.outside_scans()] == ["loop", "new", "sum.1"]
    assert len([*program.instructions()]) == len(names) + 3
    assert {c.instruction.name: (c.runs, c.nbytes) for c in program.collectives} == {"sum": (5, 132), "sum.1": (1, 16)}


def test_the_length_of_a_loop_is_in_its_condition_where_the_compiler_does_not_write_it():
    """XLA for TPU writes no trip count. The end of a guard is a value, and the guard counts once."""
    text = TICKS.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    assert 'n":"3' not in text
    compared = "ROOT %lt = pred[] compare(%i, %end), direction=LT"
    loop = f"%c (p: s32[]) -> pred[] {{\n  %end = s32[]{{:T(128)}} constant(6)\n  {compared}\n}}\n\n"
    guard = f"%c (p: s32[]) -> pred[] {{\n  %end = s32[] get-tuple-element(%p), index=1\n  {compared}\n}}\n\n"
    head, rest = text.split("%heads", 1)
    assert program_of(f"{head}{guard}%heads{rest}").bodies["F.0"] == 100 + 7
    heads_only = rest.replace("condition=%c, body=%layer", "condition=%d, body=%layer")
    assert program_of(f"{head}{guard}{loop.replace('%c', '%d')}%heads{heads_only}").bodies["F.0"] == 100 + 6 * 7


@pytest.mark.parametrize("axes", ["'ipu'", "'replica'", "'replica','ipu'"])
def test_groups_along_the_axes_of_a_mesh(axes):
    """XLA with jax 0.12 names the mesh and its axes instead of devices."""
    line = (
        f"%a = f32[4] all-reduce(%x), replica_groups=mesh['replica'=2,'ipu'=3] {{{axes}}}, use_global_device_ids=true"
    )
    numbers = np.arange(6).reshape(2, 3)
    expected = {"'ipu'": numbers, "'replica'": numbers.T, "'replica','ipu'": numbers.reshape(1, 6)}[axes]
    assert Instruction("all-reduce", (), line).groups == expected.tolist()


def test_groups_in_both_notations():
    said = lambda text: Instruction("all-reduce", (), f"%sum = f32[] all-reduce(%x), {text}").groups
    numbered = lambda shape, axes: np.arange(8).reshape(shape).transpose(axes)
    assert said("replica_groups={{0,1},{2,3}}, to_apply=%add") == [[0, 1], [2, 3]]
    assert said("source_target_pairs={{0,1},{3,2}}") == [[0, 1], [3, 2]]
    assert said("replica_groups=[2,4]<=[8]") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert said("replica_groups=[2,4]<=[4,2]T(1,0)") == numbered((4, 2), (1, 0)).reshape(2, 4).tolist()
    assert said("replica_groups=[4,2]<=[2,2,2]T(2,0,1)") == numbered((2, 2, 2), (2, 0, 1)).reshape(4, 2).tolist()
    assert said("replica_groups={}") == said("channel_id=1") == []


@pytest.mark.parametrize(
    ("result", "op", "nbytes"),
    [
        ("f32[4,16]{1,0}", "all-reduce", 256),
        ("(bf16[4,16]{1,0:T(8,128)(2,1)}, f32[])", "all-reduce", 132),
        ("(bf16[4], f32[2])", "all-reduce-start", 16),
        ("((bf16[4], f32[2]), (bf16[4], f32[2]))", "all-reduce-start", 16),
        ("(bf16[64], bf16[64]{0:T(256)S(1)}, u32[]{:S(2)}, u32[]{:S(2)})", "collective-permute-start", 128),
        ("(f32[2], f32[8])", "all-gather-start", 32),
        ("((f32[2], bf16[2]), (f32[8], bf16[8]))", "all-gather-start", 48),
        ("((bf16[8]), bf16[2])", "reduce-scatter-start", 4),
        ("((f32[8]), f32[8])", "all-to-all-start", 32),
        ("(f8e4m3fn[8], pred[3], s4[6])", "all-reduce", 14),
    ],
)
def test_bytes_of_a_collective_are_those_of_its_result(result, op, nbytes):
    (found,) = of_lines(f"ROOT %sent = {result} {op}(%x), replica_groups={{{{0,1}}}}").collectives
    assert (found.op, found.nbytes) == (op.removesuffix("-start"), nbytes)


@pytest.mark.parametrize(
    ("between", "is_work"),
    [
        ("", False),
        ('%f = f32[4] fusion(%y), calls=%row, backend_config={"estimated_cycles":"999"}', False),
        ('%f = f32[4] fusion(%y), calls=%row, backend_config={"estimated_cycles":"1000"}', True),
        ("%loop = f32[4] while(%y), condition=%c, body=%b", True),
        ('%kernel = f32[4] custom-call(%y), custom_call_target="tpu_custom_call"', True),
        ('%whole = f32[4] custom-call(%y), custom_call_target="ConcatBitcast"', False),
    ],
)
def test_a_message_is_hidden_by_work_between_its_start_and_its_own_end(between, is_work):
    send = "%send{0} = (f32[4], f32[4]) collective-permute-start(%x), source_target_pairs={{{{0,1}}}}"
    end = "%end{0} = f32[4] collective-permute-done(%send{0})"
    others = [send.format(".1"), end.format(".1")]
    first, other = of_lines(send.format(""), *others, between, end.format("")).collectives
    assert (first.beside_work, other.beside_work) == (is_work, False)
    assert not of_lines("%sum = f32[4] all-reduce(%x)", between).collectives[0].beside_work


@pytest.mark.parametrize("pieces", [0, 2])
def test_a_collective_in_pieces_is_one_and_hidden_if_a_fusion_works_beside_a_piece(pieces):
    gather = '  %all-gather.{0} = f32[8] all-gather(%p), frontend_attributes={{chain_id="0"}}'
    fusions = {f"work.{k}": "" for k in range(pieces)}
    fusions |= {"start": "AsyncCollectiveStart", "done": "AsyncCollectiveDone"}
    text, calls = "", []
    for name, target in fusions.items():
        last = f'  ROOT %last = f32[8] custom-call(%a), custom_call_target="{target}"' if target else ""
        text += f"%{name} (p: f32[4]) -> f32[8] {{\n{gather.format(name)}\n{last}\n}}\n\n"
        calls.append(f"  %{name} = f32[8] fusion(%x), kind=kCustom, calls=%{name}")
    program = program_of(text + "\n".join(["ENTRY %main (p: f32[4]) -> f32[8] {", *calls, "}"]))
    assert [(c.op, c.nbytes, c.beside_work) for c in program.collectives] == [("all-gather", 32, pieces > 0)]


@pytest.mark.parametrize(
    "calls", ["branch_computations={%no, %yes}", "true_computation=%yes, false_computation=%no", "calls=%yes"]
)
def test_collectives_in_branches_and_calls_are_found(calls):
    text = "%yes (p: f32[]) -> f32[] {\n  ROOT %sum = f32[] all-reduce(%p), to_apply=%add\n}\n\n"
    entry = f"ENTRY %main (p: f32[]) -> f32[] {{\n  ROOT %either = f32[] conditional(%i, %p, %p), {calls}\n}}"
    assert [(c.op, c.runs) for c in program_of(text + entry).collectives] == [("all-reduce", 1)]


def test_loops_inside_of_graphs_are_the_chips_and_the_loop_over_ticks_is_no_guard():
    inner = "        000: kCommandBuffer [x]\n            001: kWhile [x]\n        002: kWhile [x]"
    graph = "    {0}: kCommandBuffer [x]\n" + inner
    after = "    004: kWhile [x]\n      body:\n        005: kWhile [x]"
    assert host_loops(f"000: kWhile [x]\n  body:\n{graph.format('001')}\n{graph.format('003')}\n{after}") == 2
    assert host_loops("000: kFusion [x]") == 0


IN_GUARDS = """HloModule jit_f, is_scheduled=true

%work (p: f32[4]) -> f32[4] {{
  ROOT %sent = f32[4] {sent}
}}

%tick (p: f32[4]) -> f32[4] {{
  ROOT %task = f32[4] while(%p), condition=%c, body=%work, metadata={{op_name="f/ipu_jax.plan.6a.1/ipu_jax.F.0/while"}}
}}

ENTRY %main (p: f32[4]) -> f32[4] {{
  %ticks = f32[4] while(%p), condition=%c, body=%tick, metadata={{op_name="f/ipu_jax.plan.6a.1/while"}}
  ROOT %own = f32[4] while(%ticks), condition=%c, body=%{in_update}, metadata={{op_name="f/ipu_jax.slot/while"}}
}}
"""


@pytest.mark.parametrize(
    ("sent", "axis", "waits_for_all"),
    [
        ("all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add", "tensor", False),
        ("all-reduce(%p), replica_groups={{0,2},{1,3}}, to_apply=%add", "ipu", True),
        ("all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}", "ipu x tensor", True),
        ("collective-permute(%p), source_target_pairs={{0,1},{2,3}}", "tensor", True),
    ],
    ids=["within an IPU", "between IPUs", "between all", "a permute"],
)
def test_what_one_ipu_runs_alone_sends_only_within_the_ipu(monkeypatch, sent, axis, waits_for_all):
    """Four devices, two of each of two IPUs: only one IPU comes to a collective in a guard of its own."""
    mesh = make_mesh(1, 2, tensor=2)
    segment = SimpleNamespace(place=0, stages=("block 0",))
    plan = SimpleNamespace(ipus=2, segments=(segment,), classes=((0,),), tick=Tick((Action("F", 0),)))
    monkeypatch.setattr("ipu_jax.core.compiled.guards.plan_named", lambda name: plan)
    reason = why_not_own(program_of(IN_GUARDS.format(sent=sent, in_update="none")), mesh)
    assert (reason is not None) == waits_for_all
    assert reason is None or ("'block 0'" in reason and f"axis '{axis}'" in reason)
    with refused(f"axis '{axis}'", "others would not take part") if waits_for_all else contextlib.nullcontext():
        check_update(program_of(IN_GUARDS.format(sent=sent, in_update="work")), mesh)


N, D, M = 4, 8, 6


@pytest.mark.fast("1f1b-10")
@pytest.mark.parametrize(("schedule", "y"), [("grouped", M + 1), ("1f1b", 10), ("zb-h1", 10)])
def test_runs_of_a_pipeline_by_its_schedule(schedule, y):
    """By hand: IPU 0 and 1 send in ticks 0 to 6 of "grouped", and in ticks 0 to 2 and 4 to 10 of "1f1b"."""
    first, body = lambda w, x, mb: jnp.tanh(mb @ w), lambda w, x, mb: jnp.tanh(x @ w)
    head = lambda w, x, mb: jax.lax.psum(jnp.mean((x @ w) ** 2), "ipu")
    stages = [Stage(first, "a", 0), Stage(body, "b", 1), Stage(body, "c", 2), Stage(head, "d", ALL_IPUS)]
    given = {"schedule": schedule, "gradient_accumulation": M, "specs": {"d": PartitionSpec()}}
    pipeline = Pipeline(stages, mesh=make_mesh(2, 3), **given)
    weights = pipeline.shard_shapes({name: jax.ShapeDtypeStruct((D, D), "float32") for name in "abcd"})
    batch = jax.ShapeDtypeStruct((2, M, N, D), "float32")
    program = Program(pipeline.lower(weights, batch).compile())
    sent = lambda label: {
        (c.op, c.runs, c.nbytes) for c in program.collectives if f"ipu_jax.{label}." in c.instruction.place
    }
    assert sent("y") == {("collective-permute", y, N * D * 4)}
    assert {runs for _, runs, _ in sent("FB")} == {M}
    assert {task.split(".")[0] for task in program.bodies} == {"F", "B", "FB"} | (
        {"W"} if schedule == "zb-h1" else set()
    )

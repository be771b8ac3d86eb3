"""Test what XLA's compilers for TPU and GPU make of small pipelines. They need no chip, and nothing runs on one."""

import functools
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ipu_jax.run.ahead.compilers import folder_of
from ipu_jax.schedules import SCHEDULES
from support.programs_for_chips import IPUS, MICRO_BATCHES, ROWS, SMALL, WIDTH

ROOT = Path(__file__).parents[4]
NEEDS = {
    platform: pytest.mark.skipif(not folder_of(platform), reason=f"needs XLA's compiler for {platform}: make aot")
    for platform in ("tpu", "gpu")
}
both = pytest.mark.parametrize("platform", [pytest.param(name, marks=mark) for name, mark in NEEDS.items()])

TWO_PHASE = ("sequential", "grouped", "grouped-zb")
LOOPED = ("looped", "looped-bfs", "looped-zb")
FOLDED = ("zbv", "zb-wave", "dualpipev")
SPLIT = ("grouped-zb", "zb-h1", "looped-zb", "zbv", "zb-wave", "dualpipev")


@functools.cache
def compiled(platform: str, *matrix: str) -> Any:
    """Return what the compiler made of each program. A compiler is only in the process that uses it."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests", "benchmarks"))
    command = [sys.executable, "-m", "support.programs_for_chips", platform, *matrix]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def bodies_of(tasks: str, classes: int, *, ends: bool = False) -> list[str]:
    """Return the tasks of classes of blocks; with ends, between an embedding and a head, whose F and B are one task."""
    blocks = [f"{task}.{c + ends}" for task in tasks for c in range(classes)]
    return sorted([*blocks, "F.0", "B.0", f"FB.{classes + 1}"] if ends else blocks)


@pytest.fixture
def programs(platform):
    return compiled(platform)


# jax 0.10.2 and 0.12.0 give 0.86 and 0.86 for the layers, and 1.33 and 1.41 for the block, which is small.
# benchmarks/chips.py compiles a block of a usual size: 1.01 under jax 0.10.2.
@pytest.mark.parametrize("platform", [pytest.param("tpu", marks=NEEDS["tpu"])])
@pytest.mark.parametrize(("program", "most"), [("grouped", 0.90), ("grouped, both ends", 1.45)])
def test_a_stage_takes_about_as_many_cycles_as_its_layers_alone(programs, program, most):
    assert 0.5 < programs[program]["ratio"] <= most


@both
def test_an_mlp_on_a_pair_of_chips_adds_up_once_in_f_and_once_in_b(programs):
    """The gradient of the first MLP's input, which nobody needs, is not added up; nothing is gathered."""
    first, second = ["first"], ["second", "loss"]
    expected = [[first, "F"], [second, "F"], [second, "B"]]
    assert programs["pairs"]["collectives"] == [[*task, "all-reduce", "tensor", 1] for task in expected]
    assert not programs["pairs"]["guards"]


@both
def test_no_tick_copies_a_whole_ring(programs):
    """Where layouts are not pinned, XLA gives each guard's loop its own layout for the rings of a block with heads."""
    assert len(programs["grouped, both ends"]["rings"]) >= 2
    assert {name: found["copied rings"] for name, found in programs.items() if found.get("copied rings")} == {}


@both
def test_which_permutes_travel_beside_work(programs, platform):
    if platform == "tpu":
        for program in ("grouped", "grouped, both ends", "grouped-zb", "training"):
            assert programs[program]["permutes"] == [True, True], program
        for program in ("1f1b, both ends", "zb-h1, head"):  # the next tick needs them
            assert programs[program]["permutes"] == [False, False], program
    else:  # XLA for GPUs moves exchanges into the next tick, and schedules one of y and dx beside work, or both
        for program in ("grouped", "training", "1f1b, both ends", "zb-h1, head"):
            assert True in programs[program]["permutes"], program


@both
def test_like_blocks_are_compiled_once_beside_an_embedding_and_a_head_too(programs, platform):
    bodies = {name: found["bodies"] for name, found in programs.items() if "bodies" in found}
    assert bodies["grouped"] == bodies["training"] == bodies_of("FB", 3)
    assert bodies["1f1b, both ends"] == bodies_of("FB", 1, ends=True)
    # on GPUs only the blocks are in guards
    assert bodies["grouped, both ends"] == (bodies["1f1b, both ends"] if platform == "tpu" else ["B.1", "F.1"])
    # the first block has no message to wait for, and differs
    assert bodies["zb-h1, head"] == sorted([*bodies_of("FBW", 2), "FB.2"])


@both
def test_tables_of_micro_batches_are_runs(programs):
    largest = max(programs["grouped"]["integer constants"], key=math.prod)
    assert largest[0] == IPUS
    # a table has a row of each IPU for each tick, and there are more ticks than micro-batches
    assert math.prod(largest) < IPUS * MICRO_BATCHES


@both
def test_gradients_of_bfloat16_weights_are_summed_over_replicas_in_float32(programs):
    for program in ("two replicas", "training"):
        assert set(programs[program]["sums"]) == {"f32"}, program


@both
def test_a_training_step_reuses_the_buffers_of_its_whole_state(programs, platform):
    # an IPU's weights, and two moments of each, in bfloat16; the counts of updates and of adamw
    layer = 2 * WIDTH * 2 * WIDTH + WIDTH
    state = 3 * 2 * layer + 2 * 4
    batch = 2 * SMALL.micro_batches * ROWS * WIDTH
    reused, arguments = programs["training"]["reused"], programs["training"]["arguments"]
    if platform == "tpu":  # each of the five buffers is padded
        assert state <= reused < state + 5 * 1024
    else:
        assert reused == state
    assert arguments - reused == batch


@both
def test_a_training_step_of_two_replicas_compiles_from_shapes_alone_within_a_minute(programs):
    assert programs["training"]["seconds"] < 60


@pytest.mark.parametrize("platform", [pytest.param("gpu", marks=NEEDS["gpu"])])
def test_the_host_of_a_gpu_reads_predicates_of_guards_with_collectives_alone(programs):
    loops = {name: found["host loops"] for name, found in programs.items() if "host loops" in found}
    # of the head; of the embedding's F and B, too
    assert loops == dict.fromkeys(loops, 0) | {"zb-h1, head": 1, "1f1b, both ends": 3}


@pytest.mark.parametrize("platform", [pytest.param("tpu", marks=NEEDS["tpu"])])
def test_neighbours_in_a_pipeline_are_one_hop_apart(programs):
    places = [tuple(place) for place in programs["v5p"]["places"]]
    assert len(set(places)) == 64
    hops = [sum(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(places)]
    assert hops == [1] * 63


@pytest.mark.parametrize("platform", [pytest.param("tpu", marks=NEEDS["tpu"])])
def test_a_part_of_a_slice_that_xla_refuses_is_refused_with_a_mend(programs):
    refusals = programs["parts of a slice"]
    for ipus in ("4", "6"):
        assert f"{ipus} of the 8 chips" in refusals[ipus]
        assert "use all of them" in refusals[ipus]


@pytest.mark.slow
@both
def test_an_exact_step_compiles_and_its_quotients_are_not_rewritten(platform):
    found = compiled(platform, "exact")
    assert found["exact"]["divide"] > found["default"]["divide"]
    assert found["exact"]["rsqrt"] == 0
    assert platform == "gpu" or found["default"]["rsqrt"] > 0


@pytest.mark.slow
@NEEDS["tpu"]
def test_a_state_in_the_hosts_memory_is_on_a_chip_block_by_block():
    """Each of 4 stages has 16.8 MB of weights, and adam's two moments of each. jax 0.10.2 gives 57.5 and 28.2 MB."""
    found, weights = compiled("tpu", "offload"), 4 * 2 * 512 * 1024 * 4
    device, host = found["device"], found["host"]
    assert (device["on host"], device["in loops"], device["outside"]) == (0, 0, [])
    assert device["bytes"] > 3 * weights
    assert (host["on host"], found["function"]["on host"]) == (2 * weights, 2 * weights)
    assert host["bytes"] < 30e6
    assert (found["average"]["on host"], found["turned"]["on host"]) == (3 * weights, weights)
    assert found["average"]["bytes"] < device["bytes"] - weights
    # 8 blocks' two moments are fetched and stored; the norms fetch them once more; and the average
    assert [found[name]["in loops"] for name in ("host", "average", "function")] == [32, 64, 48]
    # 8 leaves, of which two replicas have chunks: two moments and the average are fetched and stored
    assert [found[f"unusual shapes on {replicas}"]["in loops"] for replicas in (1, 2)] == [8 * 3 * 2] * 2
    # XLA lays small leaves with more dims out in its own order between steps, and copies these whole
    assert [name for name in found if found[name]["outside"]] == ["unusual shapes on 1"]


# all 26 take 5 minutes on two busy cores, 2 of CPU time
@pytest.mark.slow
@NEEDS["tpu"]
@pytest.mark.parametrize("mode", ["basic", "concurrent"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_compiles_for_tpu(schedule, mode):
    found = compiled("tpu", schedule, mode)
    rounds = 2 if schedule in LOOPED + FOLDED else 1
    assert found["permutes"] == [schedule in TWO_PHASE] * 2 * rounds
    tasks = "FBW" if schedule in SPLIT else "FB"
    if mode == "basic":  # the first block, the blocks between, the last; two rounds have two more of them
        assert found["bodies"] == bodies_of(tasks, 3 if rounds == 1 else 5)
    else:  # folded: there, the fold, and back. Looped: the first blocks of both rounds are alone, too
        classes = 4 if schedule in LOOPED else 3 if schedule in FOLDED else 1
        assert found["bodies"] == bodies_of(tasks, classes, ends=True)
    assert found["copied rings"] == []

"""Test the screen and the JSON of a report whose numbers are made up."""

import dataclasses
import json

import pytest

from ipu_jax.chips import Advice, ChipReport, Explanation, Kernel, Memory, Paper, Row, StepPart

GIB = 2**30
PARTS = {"arguments": 400, "results": 401, "reused": 400, "temporary": 1500, "program": 15, "needed": 1916}  # MB
MEMORY = Memory(**{name: size * 10**6 for name, size in PARTS.items()}, available=16 * GIB)
ROWS = tuple(Row(f"all-reduce {k}", "replica x ipu", 1000 - k, 10 ** (9 - k), None, k % 2 > 0, 0.5) for k in range(9))
REPORT = ChipReport(
    model="TrainStep(Pipeline of 66 stages on 64 IPUs x 16 replicas, 512 micro-batches per update)",
    chips=1024,
    chip="NVIDIA H100 80GB HBM3",
    versions={"jax": "0.10.2", "jax-cuda12-pjrt": "0.10.2"},
    mesh={"replica": 16, "ipu": 64},
    memory=MEMORY,
    flops={"F": 2 * 10**12, "B": 4 * 10**12, "W": 0},
    cycles={"F": 4_140_000, "B": 7_440_000, "W": 3_000_000, "FB": 12_345_678, "update": 1_234_567},
    rows=ROWS,
    host_loops=None,
    paper=Paper(0.1111, 0.2222, 0.3333, 0.4444, 0.5555, 0.6666, 0.7777, share_of_peak=0.42),
)
KERNELS = tuple(Kernel(f"kernel_{k}", 10 ** (12 - k) * (k < 2), 0.5 / 10**k) for k in range(4))
EXPLANATION = Explanation(2.5, 0.4, (StepPart("F", 2.0, "by", 1.0, {"products": 2.0}),), (Advice("more", 0.5),))
TOO_LARGE = dataclasses.replace(REPORT, memory=dataclasses.replace(MEMORY, needed=20 * GIB), mends=("a mend",) * 6)
UNCOMPILED = dataclasses.replace(
    TOO_LARGE, memory=Memory(400 * 10**6, 0, 0, None, None, 20 * GIB, 16 * GIB), cycles={}, rows=(), paper=None
)


def line_of(report: ChipReport, part: str) -> str:
    return next(line for line in str(report).splitlines() if part in line)


@pytest.mark.parametrize(
    "report",
    [
        *(REPORT, TOO_LARGE, dataclasses.replace(TOO_LARGE, kernels=KERNELS, explanation=EXPLANATION), UNCOMPILED),
        dataclasses.replace(TOO_LARGE, cycles={}, host_loops=12),
    ],
    ids=["fits", "too large", "kernels", "uncompiled", "GPUs"],
)
def test_a_large_report_fits_on_one_screen_and_says_what_is_missing(report):
    lines = str(report).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 130
    assert lines[0] == report.model
    holds = ("1024 x NVIDIA H100", "jax 0.10.2", "jax-cuda12-pjrt 0.10.2", "nothing ran")
    assert all(text in lines[1] for text in holds)
    assert str(report).count("a mend") == len(report.mends)


def test_the_memory_of_a_chip():
    assert (REPORT.fits, REPORT.memory.missing) == (True, 0)
    parts = ("1.9 GB", "arguments 400 MB", "temporary 1.5 GB", "of their own 1 MB", "program 15 MB")
    assert all(part.replace(" MB", ".0 MB") in line_of(REPORT, "memory of a chip") for part in parts)
    assert "fits into the 17.2 GB" in line_of(REPORT, "fits")
    assert "400.0 MB of the arguments" in line_of(REPORT, "reuse")

    assert "host's memory" not in str(REPORT)
    on_host = dataclasses.replace(REPORT, memory=dataclasses.replace(MEMORY, host=500 * 10**6))
    assert line_of(on_host, "host's memory").split()[:2] == ["500.0", "MB"]
    assert on_host.memory.missing == 0
    assert max(map(len, str(on_host).splitlines())) <= 130

    assert (TOO_LARGE.fits, TOO_LARGE.memory.missing) == (False, 4 * GIB)
    assert "4.3 GB too much for the 17.2 GB" in line_of(TOO_LARGE, "too much")
    unknown = dataclasses.replace(TOO_LARGE, memory=dataclasses.replace(TOO_LARGE.memory, available=None))
    assert (unknown.fits, unknown.memory.missing) == (True, 0)
    assert "fits" not in str(unknown)


def test_a_program_that_is_too_large_to_be_compiled():
    assert (UNCOMPILED.fits, UNCOMPILED.memory.missing) == (False, 4 * GIB)
    assert "at least 21.5 GB, of which arguments 400.0 MB" in line_of(UNCOMPILED, "memory of a chip")
    assert "too large to be compiled" in line_of(UNCOMPILED, "memory of a chip")
    assert all(text not in str(UNCOMPILED) for text in ("temporary", "reuse", "sent by", "on paper"))


def test_rows_and_times_with_their_units():
    assert "network" in line_of(REPORT, "all-reduce 0")
    assert "nothing hides it" in line_of(REPORT, "all-reduce 0")
    assert "beside work" in line_of(REPORT, "all-reduce 1")
    left = [row for row in ROWS if row.op not in str(REPORT)]
    assert f"and {len(left)} smaller, {sum(row.nbytes for row in left) / 1000:.1f} kB" in line_of(REPORT, "smaller")
    nothing = dataclasses.replace(REPORT, rows=())
    assert line_of(nothing, "sent by a chip").split()[-1] == "nothing"
    paper = line_of(REPORT, "a step on paper")
    assert (
        "3.1 s = F 111 ms + B 222 ms + W 333 ms + bubble 444 ms + messages 556 ms + sums 667 ms + update 778 ms"
        in paper
    )
    assert "42% of the chip's FLOP/s" in line_of(REPORT, "FLOP/s")
    assert "lower bound" not in str(REPORT)  # which only the roofline is
    assert "lower bound" in str(dataclasses.replace(REPORT, cycles={}))


def test_kernels_are_labelled_as_taken():
    report = dataclasses.replace(REPORT, kernels=KERNELS)
    shown = [line for line in str(report).splitlines() if "kernel_" in line]
    assert shown[0].split("  ", 1)[1].strip() == "kernel_0: 500 ms = 1.0 TFLOP at 50% of the peak, taken, not measured"
    assert "50.0 ms = 100.0 GFLOP at 50% of the peak" in shown[1]
    assert shown[2].strip() == "kernel_2: no FLOPs are known, counted 0"
    assert (len(shown), "kernels  " in str(REPORT)) == (3, False)


def test_an_explanation_is_shown_in_place_of_the_rest_if_the_program_fits():
    lines = str(dataclasses.replace(REPORT, explanation=EXPLANATION)).splitlines()
    assert lines[:2] == str(REPORT).splitlines()[:2]
    whole, task, kinds = (" ".join(line.split()) for line in lines[3:6])
    assert whole == "a step on paper 2.5 s 100% 40% of the chip's FLOP/s, on the IPU that works the most"
    assert (task, kinds) == ("F 2.0 s 80% by", "products 2.0 s")
    assert lines[-1].split() == ["500", "ms", "20%", "more"]
    assert "memory of a chip" in str(dataclasses.replace(TOO_LARGE, explanation=EXPLANATION))


def test_json_contains_the_same_numbers():
    found = json.loads(REPORT.json())
    assert "\n" not in REPORT.json()
    assert found.pop("format") == 1
    assert found["memory"].pop("missing") == 0
    assert found["paper"].pop("seconds") == pytest.approx(sum((1, 2, 3, 4, 5, 6, 7)) * 0.1111)
    assert Memory(**found.pop("memory")) == REPORT.memory
    assert Paper(**found.pop("paper")) == REPORT.paper
    assert tuple(Row(**row) for row in found.pop("rows")) == REPORT.rows
    assert (found.pop("mends"), found.pop("kernels"), found.pop("explanation")) == ([], [], None)
    assert found == {name: getattr(REPORT, name) for name in found}
    own = {"memory", "paper", "rows", "mends", "kernels", "explanation", "program"}
    assert set(found) == {field.name for field in dataclasses.fields(ChipReport)} - own

    explained = json.loads(dataclasses.replace(REPORT, kernels=KERNELS, explanation=EXPLANATION).json())
    assert tuple(Kernel(**kernel) for kernel in explained["kernels"]) == KERNELS
    assert explained["explanation"] == dataclasses.asdict(EXPLANATION) | {
        name: [dataclasses.asdict(one) for one in getattr(EXPLANATION, name)] for name in ("parts", "advice")
    }

    too_large = json.loads(UNCOMPILED.json())
    memory = too_large["memory"]
    assert (memory["missing"], memory["temporary"], too_large["paper"]) == (4 * GIB, None, None)
    assert too_large["mends"] == ["a mend"] * 6

"""Test the processes of the torch rival: answers, and a diagnosis if there is none. Stand-ins replace torch."""

import textwrap
from pathlib import Path

import numpy as np
import pytest

from figures import Cost
from rivals_of.torch_pipeline import TorchPipeline

BATCHES = {"4x2": {"images": np.zeros((2, 4, 28, 28), np.uint8), "labels": np.zeros((2, 4), np.int32)}}


def pipeline_of(folder: Path, program: str, limit: float = 20.0) -> TorchPipeline:
    """Make a rival whose processes run `program`, which can use `rank`, `folder` and the first `order`."""
    path = folder / "stage.py"
    path.write_text(
        "import json, pathlib, sys, time\n"
        "import numpy as np\n"
        "rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "order = json.loads(sys.stdin.readline())\n" + textwrap.dedent(program)
    )
    return TorchPipeline({"hidden.w": np.ones((2, 3))}, BATCHES, limit=limit, program=path)


def test_the_clock_is_rank_0s_cpu_work_is_summed_and_a_result_is_what_both_wrote(tmp_path: Path):
    program = """
        assert order == {"do": "steps", "batch": "4x2", "count": 2, "schedule": "GPipe", "threads": 1, "steps": 2}
        print(json.dumps({"wall": [1 + rank, 2 + rank], "cpu": [3 + rank, 4 + rank]}), flush=True)
        assert json.loads(sys.stdin.readline())["do"] == "result"
        weights = np.load(folder / "weights.npz")
        found = {"hidden.w": weights["hidden.w"]} if rank == 0 else {"loss": 3.0, "classifier.b": np.zeros(2)}
        np.savez(folder / f"result-{rank}.npz", **found)
        print("{}")
    """
    with pipeline_of(tmp_path, program) as rival:
        assert rival.step_costs("4x2", "GPipe", threads=1, steps=2) == [Cost(1, 7), Cost(2, 9)]
        loss, gradients = rival.result("4x2", "1F1B")
    assert loss == 3.0
    assert {name: g.tolist() for name, g in gradients.items()} == {
        "hidden.w": [[1.0] * 3] * 2,
        "classifier.b": [0.0, 0.0],
    }


@pytest.mark.parametrize(
    ("program", "limit", "told"),
    [
        (
            "sys.exit('no such kernel') if rank == 1 else time.sleep(600)",
            20.0,
            r"stage 1 exited with 1 at \{.*\nstage 1: no such kernel",
        ),
        ("time.sleep(600)", 1.0, r"no answer from stage 0 within 1 s to \{"),
    ],
    ids=["dies", "is stuck"],
)
def test_a_process_that_dies_or_is_stuck_ends_the_other_one(tmp_path: Path, program: str, limit: float, told: str):
    with pipeline_of(tmp_path, program, limit) as rival, pytest.raises(RuntimeError, match=told):
        rival.step_costs("4x2", "GPipe", threads=1, steps=1)
    assert all(process.returncode is not None for process in rival.processes)

"""Test the command ipu-compile: what it refuses, before jax is loaded where it can, and what it says of a script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ipu_jax.run.ahead.compilers import folder_of

ROOT = Path(__file__).parents[4]
GPT = ROOT / "examples" / "gpt.py"
COMMAND = "from ipu_jax.run.ahead.command import command; command()"
SEVERAL = """
import json, os, sys
from ipu_jax.run.ahead.command import main
for line in json.loads(sys.argv[1]):
    try:
        main(line)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
assert "jax" not in sys.modules or "AOT_TPU" in os.environ
"""
NEEDS_TPU = pytest.mark.skipif(
    not folder_of("tpu"), reason="needs XLA's compiler for TPU: make aot, or pip install 'ipu-jax[aot-tpu]'"
)


def run(code: str, *arguments: object, cwd: Path = ROOT, **variables: str) -> tuple[int, str, str]:
    removed = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_wrong_command_lines_are_refused_in_a_line_each_before_jax_is_loaded():
    rows = {
        (): "required: --topology, script",
        ("--topology", "v5e:2x2"): "required: script",
        ("--topology", "nonsense", GPT): "--topology 'nonsense' is not known: give one such as v5e:4x4",
        ("--topology", "v9:2x2", GPT): "--topology 'v9:2x2' is not known",
        ("--topology", "v5e:0x2", GPT): "--topology 'v5e:0x2' is not known",
        ("--topology", "h100x12", GPT): "--topology 'h100x12' is not a whole number of hosts with 8 GPUs: give h100x8",
        ("--topology", "v5e:2x2", "--slices", "0", GPT): "--slices: '0' is not a count: give",
        ("--topology", "v5e:2x2", "--jsn", GPT): "--jsn: did you mean --json",
        ("--topology", "v5e:2x2", "--offload", "weights", GPT): "--offload: invalid choice: 'weights' (choose from",
        ("--topology", "v5e:2x2", "none.py"): "none.py is not a file: give the path of a Python script, or -m",
        ("--topology", "v5e:2x2", "-m", "none.such"): "-m none.such is not a module here: give its name",
        ("--topology", "v5e:2x2", "-m", "sys"): "-m sys is not a module here: give its name",
    }
    status, out, err = run(SEVERAL, json.dumps([[*map(str, row)] for row in rows]))
    assert (status, out) == (0, ""), err
    lines = err.splitlines()
    assert lines[1::2] == ["2"] * len(rows)
    assert [said for line, said in zip(lines[::2], rows.values(), strict=True) if said not in line] == []
    assert all(line.startswith("ipu-compile: ") for line in lines[::2])


@pytest.mark.slow
def test_chips_that_cannot_be_described_are_refused_in_a_line(tmp_path):
    rows = {
        "--topology h100x8 --slices 2": ("--slices 2 is for TPUs", "h100x16"),
        "--topology v5e:2x2": ("for TPU is not installed", "ipu-jax[aot-tpu]", "make aot"),
        "--topology h100x4": ("GPUs is not installed", "ipu-jax[aot-cuda]", "make aot"),
    }
    lines, empty = json.dumps([[*row.split(), str(GPT)] for row in rows]), str(tmp_path)
    status, out, err = run(SEVERAL, lines, AOT_TPU=empty, AOT_CUDA=empty)
    assert (status, out) == (0, ""), err
    lines = err.splitlines()
    assert lines[1::2] == ["2"] * len(rows)
    for line, said in zip(lines[::2], rows.values(), strict=True):
        assert [text for text in said if text not in line] == []


@NEEDS_TPU
def test_what_is_no_slice_is_refused_in_a_line():
    status, out, err = run(COMMAND, "--topology", "v5e:3x5", GPT)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert "'v5e:3x5' is not a TPU slice" in err
    assert "v5e:4x4" in err


# scripts that end without a report: what stderr says last, and of whose files a traceback speaks
SCRIPTS = {
    "": ("ended without a call of ipu_jax.chips.hand_over", ()),
    "raise SystemExit(3)": ("ended with status 3 before it called ipu_jax.chips.hand_over", ()),
    "def f():\n    return {}[1]\nf()": ("failed before ipu_jax.chips.hand_over(...) had a report: KeyError", (4, 3)),
    "def f(:": ("failed before ipu_jax.chips.hand_over(...) had a report: SyntaxError", (2,)),
}


@NEEDS_TPU
@pytest.mark.parametrize("text", SCRIPTS, ids=lambda text: text[:5] or "ends")
def test_a_script_that_hands_nothing_over(text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:], __name__)\n" + text)
    status, out, err = run(COMMAND, "--topology", "v5e:2x2", script, "--json", "-x", cwd=tmp_path)
    said, lines = SCRIPTS[text]
    assert (status, err.splitlines()[-1][:13]) == (2, "ipu-compile: ")
    assert said in err.splitlines()[-1]
    assert out == ("" if "(:" in text else "['--json', '-x'] __main__\n")
    files = [line.strip() for line in err.splitlines() if line.startswith("  File ")]
    assert [file.partition(", in")[0] for file in files] == [f'File "{script}", line {line}' for line in lines]


@NEEDS_TPU
def test_a_script_gets_the_described_chips_and_imports_from_its_own_folder(tmp_path):
    (tmp_path / "own.py").write_text("from ipu_jax import make_mesh, configure\n")
    script = tmp_path / "train.py"
    script.write_text("from own import *\nconfigure(4)\nprint({d.device_kind for d in make_mesh(2, 2).devices.flat})\n")
    assert run(COMMAND, "--topology", "v5e:2x2", script)[1] == "{'TPU v5 lite'}\n"


@NEEDS_TPU
def test_a_module_is_run_from_the_folder_that_it_is_in_and_json_is_alone_on_stdout(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text("""
import jax, sys
from . import model
from ipu_jax import chips
print(sys.argv[1:])
shape = lambda *dims: jax.ShapeDtypeStruct(dims, "float32")
chips.hand_over(model.pipeline(), {"w": shape(3, 1)}, shape(2, 4, 3))
""")
    (tmp_path / "own" / "model.py").write_text("""
from ipu_jax import Pipeline, Stage
def pipeline():
    return Pipeline([Stage(lambda w, x, mb: (mb @ w).mean(), params="w", ipu=0)], gradient_accumulation=2)
""")
    status, out, err = run(COMMAND, "--topology", "v5e:1x1", "--json", "-m", "own.train", "-m", "x", cwd=tmp_path)
    assert (status, err) == (0, "['-m', 'x']\n")
    assert json.loads(out)["flops"]["F"] == 2 * (2 * 4 * 3 + 4 + 1)  # products, their sum and the mean


TINY = ["--width", 128, "--blocks", 4, "--sequence", 64, "--vocabulary", 512, "--gradient-accumulation", 4]


@NEEDS_TPU
def test_a_gpt_that_fits():
    status, out, err = run(COMMAND, "--topology", "v5e:2x2", "--json", "--explain", GPT, *TINY)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["chips"], found["chip"], found["mesh"]) == (4, "TPU v5 lite", {"replica": 1, "ipu": 4})
    assert found["memory"]["missing"] == 0
    assert found["paper"]["seconds"] > 0
    assert set(found["cycles"]) == {"F", "B", "FB", "update"}
    assert {row["op"] for row in found["rows"]} >= {"permute y", "permute dx"}
    assert {row["links"] for row in found["rows"] if row["op"] == "all-reduce"} == {2}  # of chips at corners
    parts = found["explanation"]["parts"]
    assert sum(part["seconds"] for part in parts) == pytest.approx(found["paper"]["seconds"])
    tasks = [part for part in parts if part["name"] in ("F", "B", "FB")]
    assert [part["name"] for part in tasks] == ["F", "B", "FB"]
    for part in tasks:
        assert part["kinds"]["products"] > 0
        assert sum(part["kinds"].values()) == pytest.approx(part["seconds"], rel=1e-3)


@NEEDS_TPU
def test_a_gpt_that_is_too_large_ends_with_status_1_and_what_would_help():
    large = ["--width", 4096, "--blocks", 4, "--sequence", 1024, "--micro-batch", 64, "--recompute", "none"]
    status, out, err = run(COMMAND, "--topology", "v5e:2x2", GPT, *large)
    assert (status, err) == (1, "")
    assert " GB too much for the 16.9 GB of one" in out
    assert "recompute='all' on every stage: temporary" in out

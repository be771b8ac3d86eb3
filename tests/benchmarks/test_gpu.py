"""Test how the benchmark for a GPU runs its parts: one hangs, fails or finds no GPU. `test_smallest` measures them."""

import json
import sys

import pytest

import gpu


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs the script; parts end with the statuses given, or else 0."""

    def run(*flags: str, **statuses: int | None) -> tuple[int, list[str]]:
        begun = []

        def in_a_process(figures, name, seconds):
            begun.append(name)
            assert 0 < seconds <= gpu.PARTS[name].seconds
            return statuses.get(name, 0)

        monkeypatch.setattr(gpu, "in_a_process", in_a_process)
        monkeypatch.setattr(sys, "argv", ["gpu", *flags])
        return gpu.main(), begun

    return run


def test_without_a_gpu_one_line_says_so_and_a_run_of_all_scripts_goes_on(run, tmp_path, capsys):
    record = tmp_path / "figures"
    assert run(env=gpu.NO_GPU) == (2, ["env"])
    assert capsys.readouterr().out == "pipelines on a GPU: not run, needs an NVIDIA GPU that jax finds\n"
    assert run("--record", str(record), env=gpu.NO_GPU) == (0, ["env"])
    assert "needs an NVIDIA GPU" in json.loads(record.read_text().splitlines()[0])["left_out"]


def test_a_part_that_fails_or_is_stopped_is_named_and_the_others_run(run, capsys):
    assert run() == (0, [*gpu.PARTS])
    assert run(verify=1, loss=None) == (1, [*gpu.PARTS])
    assert capsys.readouterr().err == "gpu.py: part verify: exit status 1\ngpu.py: part loss: stopped after 80 s\n"


def test_parts_for_which_no_time_is_left_are_not_begun(run, capsys):
    assert run("--budget", "5", "--only", "loss") == (1, [])
    assert "part loss: not begun, no time is left" in capsys.readouterr().err


def test_a_part_that_hangs_is_stopped_and_its_figures_are_kept(monkeypatch, tmp_path, capfd):
    hangs = (
        'import json, sys, time\nopen(sys.argv[4], "w").write(json.dumps({"name": "cost", "value": 3, "at_most": 1}))'
    )
    script, record = tmp_path / "part.py", tmp_path / "figures"
    script.write_text(f"{hangs}\ntime.sleep(60)\n")
    monkeypatch.setattr(gpu, "__file__", str(script))
    figures = gpu.Figures("", ["--check", "--record", str(record)])
    assert gpu.in_a_process(figures, "loss", 1.0) is None
    assert json.loads(record.read_text()) == {"name": "cost", "value": 3, "at_most": 1}
    assert figures.status() == 1
    assert "falls short: cost" in capfd.readouterr().err

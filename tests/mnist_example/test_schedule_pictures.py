"""Test `--plot-schedule`: which schedule is drawn, into which files, by whom, and what happens if that fails."""

import argparse
from typing import Any

import pytest

from ipu_jax import Schedule, make_schedule
from mnist_example import schedule_pictures, training_run
from mnist_example.layouts import MODES, Mode
from mnist_example.schedule_pictures import SchedulePictures

SCHEDULES: dict[Mode, Schedule] = {
    mode: make_schedule("grouped", ipus=2, micro_batches=m) for m, mode in enumerate(MODES, 1)
}


UNUSED = ("plot", "executable_cache", "log_file", "tensorboard", "report")


def flags(**given):
    return argparse.Namespace(**(dict.fromkeys(UNUSED) | {"compare": False} | given))


def test_with_compare_each_mode_has_a_picture_of_its_own(capsys, tmp_path):
    pictures = SchedulePictures(flags(compare=True, plot_schedule=tmp_path / "s.svg"))
    for mode, schedule in SCHEDULES.items():
        pictures.draw(mode, schedule)
        assert (tmp_path / f"s-{mode}.svg").read_text() == schedule.to_svg()
    assert capsys.readouterr().out == "".join(f"Schedule: {tmp_path}/s-{mode}.svg\n" for mode in MODES)
    assert pictures.status == 0


def test_a_png_file_is_one(tmp_path):
    pytest.importorskip("matplotlib")
    SchedulePictures(flags(plot_schedule=tmp_path / "s.PNG")).draw("basic", SCHEDULES["basic"])
    assert (tmp_path / "s.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_ends_in_74_after_the_training(capsys, tmp_path, monkeypatch):
    trained = []

    def train(run):
        run.pictures.draw(run.mode, SCHEDULES[run.mode])
        trained.append(run.mode)

    monkeypatch.setattr(training_run, "train", train)
    (tmp_path / "s.svg").mkdir()  # since it was checked
    args = flags(plot_schedule=tmp_path / "s.svg")
    trainers: Any = {"basic": None}
    data: Any = None
    assert training_run.train_and_compare(args, trainers, data, training_run.RunRecord(args)) == 74
    assert trained == ["basic"]
    line = f"run-sharded-mnist: --plot-schedule {tmp_path}/s.svg was not drawn (Is a directory)\n"
    assert capsys.readouterr() == ("", line)


def test_only_the_first_instance_draws_and_nobody_does_without_the_flag(capsys, tmp_path, monkeypatch):
    SchedulePictures(flags(plot_schedule=None)).draw("basic", SCHEDULES["basic"])
    monkeypatch.setattr(schedule_pictures, "is_first", lambda: False)
    SchedulePictures(flags(plot_schedule=tmp_path / "s.svg")).draw("basic", SCHEDULES["basic"])
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")

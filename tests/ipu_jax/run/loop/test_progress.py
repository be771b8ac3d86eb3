"""Test the lines and the bar of a training run: no line twice, no update left out, and a speed in samples."""

import io
import re
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from ipu_jax.base.cli import progress
from ipu_jax.base.cli.progress import Bar
from ipu_jax.observe import LossLines


def lines_of(updates_per_epoch, updates, updates_per_call, skipped=0):
    """Return the printed lines for a training run whose update number n, counted from 1, has a loss of n."""
    printed = []
    lines = LossLines(updates_per_epoch, printed.append, call=updates_per_call)
    lines.begin(0, updates)
    done = 0
    while done < updates:
        end_of_epoch = min(updates, (done // updates_per_epoch + 1) * updates_per_epoch)
        until = min(done + updates_per_call, end_of_epoch)
        losses = np.arange(done + 1, until + 1, dtype=np.float32)
        lines.add(losses, len(losses), min(skipped, len(losses)))
        done = until
        if done == updates:
            lines.end()
    return printed


@pytest.mark.parametrize(
    ("updates_per_epoch", "updates", "updates_per_call", "expected"),
    [
        # a line for every call that ends in another tenth
        (5, 8, 2, ["0.4: 1.5", "0.8: 3.5", "1.0: 5", "1.4: 6.5", "1.6: 8"]),
        (20, 20, 10, ["0.5: 5.5", "1.0: 15.5"]),
        # ten lines per epoch, each the mean of the calls since the line before
        (40, 40, 1, [f"{n / 10}: {4 * n - 1.5}" for n in range(1, 11)]),
        (20, 20, 3, ["0.15: 2", "0.30: 5", "0.45: 8", "0.60: 11", "0.75: 14", "0.90: 17", "1.00: 19.5"]),
        (40, 20, 3, ["0.07: 2", "0.15: 5", "0.23: 8", "0.30: 11", "0.38: 14", "0.45: 17", "0.50: 19.5"]),
        # what is left at the end
        (40, 1, 10, ["0.03: 1"]),
        (40, 41, 40, ["1.00: 20.5", "1.02: 41"]),
        (1000, 1, 1, ["0.001: 1"]),
        # ten lines of a training run that is shorter than an epoch
        (1000, 50, 1, [f"{n / 200:.3f}: {5 * n - 2}" for n in range(1, 11)]),
        (40, 5, 1, ["0.03: 1", "0.05: 2", "0.07: 3", "0.10: 4", "0.12: 5"]),
        # twenty lines of a training run that is longer than two
        (40, 240, 1, [f"{0.3 * n:.1f}: {12 * n - 5.5}" for n in range(1, 21)]),
        (10, 1000, 1, [f"{5 * n}.0: {50 * n - 24.5}" for n in range(1, 21)]),
    ],
)  # fmt: skip
def test_every_update_is_in_one_line_and_no_line_comes_twice(updates_per_epoch, updates, updates_per_call, expected):
    printed = lines_of(updates_per_epoch, updates, updates_per_call)
    expected_lines = [
        f"Epoch {epoch}, Mean loss: {float(loss):.3f}" for epoch, loss in (line.split(": ") for line in expected)
    ]
    assert printed == expected_lines


def test_all_lines_of_a_training_have_the_same_number_of_decimals():
    """An epoch of 937 updates, of which 94 are made in calls of 5; a slow one has finer lines in between."""
    found = [line.split(",")[0].partition(".")[2] for line in lines_of(937, 94, 5)]
    assert len(found) > 5
    assert {len(decimals) for decimals in found} == {3}
    now, printed = [0.0], []
    lines = LossLines(1000, printed.append, clock=lambda: now[0])
    lines.begin(0, 1000)
    for _ in range(200):
        lines.add(np.full(1, 2e-5, np.float32), 1)
    assert printed == [f"Epoch {epoch}, Mean loss: 2.00e-05" for epoch in (0.1, 0.2)]
    now[0] += 200
    lines.add(np.full(1, 2e-5, np.float32), 1)
    lines.add(np.full(99, 2e-5, np.float32), 99)
    assert printed[2:] == [f"Epoch {epoch}, Mean loss: 2.00e-05" for epoch in ("0.201", "0.300")]


def test_skipped_updates_are_counted_over_the_calls_of_a_line():
    printed = lines_of(20, 40, 1, skipped=1)
    assert printed[:2] == [
        "Epoch 0.1, Mean loss: 1.500, 2 of 2 updates skipped",
        "Epoch 0.2, Mean loss: 3.500, 2 of 2 updates skipped",
    ]


def test_a_stream_has_a_line_for_each_hundred_updates():
    printed = []
    lines = LossLines(None, printed.append)
    for done in range(60, 301, 60):
        lines.add(np.full(60, done, np.float32), 60)
    lines.end()
    assert printed == [
        "Update 120, Mean loss: 90.000",
        "Update 240, Mean loss: 210.000",
        "Update 300, Mean loss: 300.000",
    ]


def test_lines_go_on_where_they_were_saved():
    printed = []
    lines = LossLines(40, printed.append)
    lines.begin(5, 40)
    lines.add(np.array([np.nan, 1], np.float32), 2, 1)
    again = LossLines(40, printed.append)
    again.restore(lines.state())
    again.begin(7, 40)
    again.add(np.array([3], np.float32), 1)
    assert printed == ["Epoch 0.2, Mean loss: 2.000, 1 of 3 updates skipped"]


def bar_in(console, monkeypatch, name, total, samples, moves):
    """Show a bar whose clock ticks at each look, and print it."""
    monkeypatch.setattr(progress, "_console", lambda: console)
    bar = Bar(name, total, 0, samples, shown=True)
    clock = iter(range(0, 1000))
    bar._bar.get_time = lambda: float(next(clock))
    for move in moves:
        bar.move(*move)
    console.print(bar._bar.get_renderable())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_bar_shows_updates_samples_per_second_and_the_time_left(encoding, monkeypatch):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=120, force_terminal=True, color_system=None)
    bar_in(console, monkeypatch, "basic", 60, 32, [(10,), (20,), (30,), (40,)])
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    shown = " ".join(file.buffer.getvalue().decode(encoding).split())
    found = re.fullmatch(r"basic \S+ ?\S* 40/60 updates ([\d,]+) samples/s 0:00:\d\d left: 0:00:(\d\d)", shown)
    assert found, shown
    samples = int(found[1].replace(",", ""))
    assert 32 < samples <= 320  # 10 updates of 32 samples between two looks at the clock


@pytest.mark.parametrize("width", [80, 100, 110, 140])
def test_the_bar_fits_into_a_terminal(width, monkeypatch):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    of_epoch = "Epoch 4.397, loss 0.06854"
    bar_in(console, monkeypatch, "concurrent", 18740, 64, [(done, of_epoch) for done in (100, 200, 4120)])
    assert isinstance(console.file, io.StringIO)
    (shown,) = console.file.getvalue().splitlines()
    assert "…" not in shown
    parts = ("concurrent ", f" 4120/18740 updates {of_epoch}", "left: 0:00:")
    assert all(part in " ".join(shown.split()) for part in parts), shown


def test_a_bar_that_is_wanted_without_rich_is_refused(monkeypatch):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    assert not progress.shows_progress(None)
    with pytest.raises(ValueError, match=r"progress=True draws with rich, .* pip install rich, or leave it out"):
        progress.shows_progress(True)


def test_lines_of_calls_say_tenths_and_the_number_of_an_update_is_one():
    """937 updates per epoch: after calls of 8, the nearest to a tenth is up to 4 updates away."""

    def where(updates, length, **given):
        lines = LossLines(937, print, **given)
        lines.begin(updates, length)
        return lines.where()

    assert [where(updates, 937, call=8) for updates in (96, 192, 8)] == ["Epoch 0.1", "Epoch 0.2", "Epoch 0.0"]
    assert len({where(updates, None) for updates in range(1, 2000)}) == 1999


@pytest.mark.parametrize(
    ("every", "length", "expected"),
    [(None, 10**6, [180, 360, 540]), (None, 600, [60, 120, 180]), (2, 600, [2, 4, 6]), (0, 600, [])],
)
def test_an_hour_has_twenty_lines_unless_another_number_is_given(every, length, expected):
    """An update takes a second; a million of them would have a line every 50,000 seconds."""
    printed = []
    done = 0
    lines = LossLines(None, printed.append, every=every, clock=lambda: float(done))
    lines.begin(0, length)
    for done in range(1, 601):  # noqa: B007, the clock reads it
        lines.add(np.ones(1, np.float32), 1)
    lines.end()
    assert [int(line.split()[1].strip(",")) for line in printed][: len(expected)] == expected
    assert bool(printed) == bool(expected)


@pytest.mark.parametrize(
    ("epochs", "seconds", "every", "expected"),
    [(3, 1, None, 3), (30, 1, None, 20), (30, 200, None, 30), (30, 1, 0, 30), (1000, 1, None, 20)],
)
def test_evaluations_have_as_many_lines_as_losses(epochs, seconds, every, expected):
    now, shown = [0.0], []
    lines = LossLines(10, shown.append, every=every, clock=lambda: now[0])
    lines.begin(0, 10 * epochs)
    for epoch in range(1, epochs + 1):
        now[0] += seconds
        lines.add([], 10)
        lines.evaluated({"accuracy": 0.5}, is_last=epoch == epochs)
    shown = [line for line in shown if "Mean loss" not in line]
    assert len(shown) == pytest.approx(expected, abs=1)
    assert (shown[0], shown[-1]) == ("Epoch 1.0, Test accuracy: 50.00%", f"Epoch {epochs}.0, Test accuracy: 50.00%")


def test_a_stream_of_unknown_length_has_ten_lines_for_ten_times_the_updates():
    printed = []
    lines = LossLines(None, printed.append)
    for _ in range(20_000):
        lines.add(np.ones(1, np.float32), 1)
    assert len(printed) == 9 + 9 + 2


def test_a_notebook_has_one_line_that_is_drawn_anew(monkeypatch):
    """A notebook is a kernel whose shell has this name; its `display` returns a handle to change what it has shown."""
    shown, drawn = [], iter(range(1, 1000))

    class ZMQInteractiveShell:
        def update(self, data, raw):
            assert raw
            shown.append(data["text/plain"])

    shell = ZMQInteractiveShell()
    display = lambda data, raw, display_id: shell.update(data, raw) or (shell if display_id else None)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(drawn)))
    assert progress.shows_progress(None)
    with Bar("basic", 60, 0, 32, shown=True) as bar:
        bar.show("Compiling")
        bar.move(20, "Epoch 0.3, loss 1.5")
        bar.move(60, "Epoch 1.0, loss [1]")
    assert len(shown) == 5
    assert not any("\n" in line or "\x1b" in line for line in shown)
    assert [line.split("updates")[0].split()[-1] for line in shown] == ["0/60", "0/60", "20/60", "60/60", "60/60"]
    texts = ("", "Compiling", "Epoch 0.3, loss 1.5", "Epoch 1.0, loss [1]", "Epoch 1.0, loss [1]")
    assert all(text in line for text, line in zip(texts, shown, strict=True)), shown

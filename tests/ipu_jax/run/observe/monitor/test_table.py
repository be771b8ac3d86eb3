"""Test the table: which columns fit, that no line is wider than the terminal, and that it holds no commands to one."""

import dataclasses
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from ipu_jax.run.observe.monitor.records import Ignored, Ipu
from ipu_jax.run.observe.monitor.rows import Look, Row
from ipu_jax.run.observe.monitor.table import fitting, picture_of

IPUS = tuple(Ipu(k, "cpu", "cpu", k // 2, k % 2, (("mlp", "conv")[k % 2], "head")) for k in range(4))


def row(**values):
    usual = {
        "pid": 31939,
        "user": "somebody",
        "command": "run-sharded-mnist --pipeline-mode concurrent --epochs 20",
        "state": "running",
        "reason": None,
        "doing": "stepping",
        "running_seconds": 7384.0,
        "run": None,
        "instance": 0,
        "instances": 2,
        "replicas": 4,
        "ipus_per_replica": 2,
        "ipus": IPUS,
        "step": 1204,
        "steps_per_second": 19.83,
        "samples_per_second": 2538.4,
        "last_step_seconds": 0.052,
        "busy_share": 0.834,
        "rss_bytes": 286986240,
        "device_bytes": None,
    }
    return Row(**{**usual, **values})


def drawn(*rows, width, ignored=(), colours=None):
    console = Console(width=width, force_terminal=colours is not None, color_system=colours)
    with console.capture() as written:
        console.print(picture_of(Look(0.0, rows, ignored), width, "host, 2 cores, load 0.50"))
    return [line.rstrip() for line in written.get().splitlines()]


def heads(*rows, width):
    return [column.head for column in fitting(rows, width)]


def test_a_wide_terminal_shows_everything():
    about, head, line = drawn(row(), width=400)
    assert about == "host, 2 cores, load 0.50: 1 process on 4 IPUs"
    assert head.split("  ")[-1] == "state"
    expected = "31939 somebody run-sharded-mnist --pipeline-mode concurrent --epochs 20 2:03:04 4 0 of 2 0-1 of 4"
    expected += " 0 mlp, 1 conv, all head 1204 19.8 2538 287.0 MB 83% 0.05 s running"
    assert line.split() == expected.split()


def test_devices_of_a_group_are_one_ipu():
    """By hand: 2 IPUs of 2 devices each, with a stage each and one on both."""
    group = tuple(Ipu(k, "cpu", "cpu", 0, k // 2, (("mlp", "conv")[k // 2], "head"), (k % 2,)) for k in range(4))
    about, _, line = drawn(row(ipus=group), width=400)
    assert about == "host, 2 cores, load 0.50: 1 process on 2 IPUs"
    assert " 2 (4 devices)  0 of 2  0 of 4  0 mlp, 1 conv, all head " in re.sub(r"   +", "  ", line)


def test_a_narrow_terminal_shows_what_is_wanted_most():
    kept = "pid,command,IPUs,step,steps/s,memory,busy,last step,state"
    assert ",".join(heads(row(), width=80)) == kept
    assert ",".join(heads(row(), width=40)) == "pid,IPUs,step,steps/s,state"
    assert "31939  run-sharded-m" in drawn(row(), width=80)[2]


@pytest.mark.parametrize("other", [row(command="訓練 " * 30), row(state="stuck", reason="x" * 300), row(step=10**12)])
def test_no_line_is_wider_than_the_terminal_and_wider_ones_show_no_less(other):
    before: set[str] = set()
    for width in range(20, 260, 7):
        lines = drawn(row(), other, width=width)
        assert len(lines) == 4 + (other.reason is not None)
        assert max(map(cell_len, lines)) <= width
        found = set(heads(row(), other, width=width))
        assert before <= found, width
        before = found
        if "step" in found:  # what is shown of a number is all of it
            assert "1204" in lines[2].split()
    assert len(before) == 15


def test_what_is_unknown_is_a_dash():
    unknown = dict.fromkeys(("step", "steps_per_second", "samples_per_second", "last_step_seconds", "busy_share"))
    line = drawn(row(**unknown, ipus=()), width=400)[2]
    assert line.split()[-9:] == ["-", "-", "-", "-", "287.0", "MB", "-", "-", "running"]


def test_memory_of_devices_goes_before_that_of_the_host():
    assert "12.3 GB" in drawn(row(device_bytes=12_345_678_901), width=400)[2]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"doing": "compiling"}, "compiling"),
        ({"doing": None}, "running"),
        ({"state": "stopped", "doing": "busy: saving"}, "stopped"),
        ({"state": "stuck", "doing": "stepping"}, "stuck"),
    ],
)
def test_the_state_of_one_that_runs_says_what_it_does(values, word):
    assert drawn(row(**values), width=400)[2].endswith(f"  {word}")


def test_reasons_and_ignored_files_stand_below():
    stuck = row(state="stuck", reason="finished no step for 7 s, and may for 5 s")
    lines = drawn(stuck, width=400, ignored=(Ignored("/tmp/x", "why"),))
    assert lines[3] == "31939 is stuck: finished no step for 7 s, and may for 5 s"
    assert lines[4].startswith("1 file or folder is no record")


def test_a_terminal_has_colours():
    plain, coloured = (drawn(row(), row(state="stuck"), width=80, colours=colours) for colours in (None, "standard"))
    assert plain[2] in coloured[2]
    assert coloured[3].startswith("\x1b[1;31m")


def test_nothing_that_a_record_says_commands_the_terminal():
    evil = "\x1b]52;c;cm0gLXJm\x07\x1bc\x9b2J\n\u202e[red]"
    ipus = tuple(dataclasses.replace(ipu, platform=evil, kind=evil, stages=(f"mlp{evil}",)) for ipu in IPUS)
    texts = {name: f"a{evil}b" for name in ("user", "command", "reason", "doing", "run")}
    for width in (60, 400):
        for line in drawn(row(ipus=ipus, state="stuck", **texts), row(ipus=ipus, **texts), width=width):
            assert line.isprintable()
            assert cell_len(line) <= width
    assert "mlp?]52;c;cm0gLXJm??c?2J ?[red]" in drawn(row(ipus=ipus), width=400)[2]

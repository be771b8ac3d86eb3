"""Test the table: which columns fit, that no line is wider than the terminal, and that it holds no commands to one."""

import dataclasses
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from ipu_jax.run.observe.monitor.records import Ignored, Ipu
from ipu_jax.run.observe.monitor.rows import Look, ProcessRow
from ipu_jax.run.observe.monitor.table import fitting, picture_of

IPUS = tuple(Ipu(k, "cpu", "cpu", k // 2, k % 2, (("mlp", "conv")[k % 2], "head")) for k in range(4))


def row(**values):
    usual = {
        "pid": 31939, "user": "somebody", "command": "run-sharded-mnist --pipeline-mode concurrent --epochs 20",
        "state": "running", "reason": None, "doing": "stepping", "running_seconds": 7384.0,
        "run": None, "instance": 0, "instances": 2, "replicas": 4, "ipus_per_replica": 2, "ipus": IPUS,
        "step": 1204, "steps_per_second": 19.83, "samples_per_second": 2538.4, "last_step_seconds": 0.052,
        "planned_after": None, "planned_updates": None, "seconds_left": None, "busy_share": 0.834,
        "rss_bytes": 286986240, "device_bytes": None, "device_limit_bytes": None,
    }  # fmt: skip
    return ProcessRow(**{**usual, **values})


def drawn(*rows, width, ignored=(), colours=None, bars=False):
    console = Console(width=width, force_terminal=colours is not None, color_system=colours)
    with console.capture() as written:
        console.print(picture_of(Look(0.0, rows, ignored), width, "host, 2 cores, load 0.50", bars=bars))
    return [line.rstrip() for line in written.get().splitlines()]


heads = lambda *rows, width: [column.head for column in fitting(rows, width)]


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
    planned = row(planned_after=0, planned_updates=1500, seconds_left=14.9)
    for width in range(20, 260, 7):
        lines = drawn(planned, other, width=width, bars=True)
        assert len(lines) == 4 + (other.reason is not None)
        assert max(map(cell_len, lines)) <= width
        found = {column.head for column in fitting((planned, other), width, bars=True)}
        assert before <= found, width
        before = found
        if "step" in found:  # what is shown of a number is all of it
            assert "1204/1500" in lines[2].split()
    assert len(before) == 17


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
    assert lines[4].startswith("1 file or folder is not a record")


def test_a_terminal_has_colours():
    plain, coloured = (drawn(row(), row(state="stuck"), width=80, colours=colours) for colours in (None, "standard"))
    assert coloured[2] == plain[2].replace("running", "\x1b[32mrunning\x1b[0m")
    assert coloured[3].startswith("\x1b[1;31m")


@pytest.mark.parametrize(
    ("values", "style"),
    [
        ({"doing": "stepping"}, "32"),
        ({"doing": "compiling"}, "33"),
        ({"doing": "first step"}, "33"),
        ({"doing": "no step yet"}, "33"),
        ({"doing": "busy: saving"}, "36"),
        ({"doing": "failed: ValueError"}, "1;31"),
        ({"doing": "stepping", "state": "stuck"}, "1;31"),
        ({"doing": "busy: saving", "state": "stopped"}, "33"),
    ],
)
def test_a_state_has_its_colour(values, style):
    (line,) = drawn(row(**values), width=200, colours="standard")[2:]
    assert re.findall(r"\x1b\[([\d;]+)m *[a-z]", line)[-1] == style


def test_bars_show_the_share_of_the_updates_and_of_the_memory():
    """By hand: 6 of 8 characters are 75%, and 3 of 8 are 40%, rounded."""
    seen = row(planned_after=200, planned_updates=1200, step=950, seconds_left=750.9, device_bytes=4 * 10**9)
    (line,) = drawn(dataclasses.replace(seen, device_limit_bytes=10**10), width=300, bars=True)[2:]
    assert "  950/1200  ━━━━━━╌╌ 75%  0:12:30  " in line
    assert "  ━━━╌╌╌╌╌ 4.0 GB  " in line
    (line,) = drawn(seen, width=300)[2:]
    assert "  950/1200   75%  0:12:30  " in line
    assert "  4.0 GB  " in line
    past = dataclasses.replace(seen, step=1201)
    assert {"done", "left"} & set(heads(past, dataclasses.replace(past, planned_updates=None), width=300)) == {"left"}


def test_columns_that_say_the_same_of_each_alone_are_left_out():
    alone = row(instances=1, replicas=1)
    assert set(heads(row(replicas=1), width=400)) - set(heads(alone, width=400)) == {"instance"}
    assert set(heads(alone, row(instances=1), width=400)) - set(heads(alone, width=400)) == {"replica"}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        (None, "abc"),
        ("pid", "cba"),
        ("user", "bca"),
        ("step", "acb"),
        ("speed", "acb"),
        ("memory", "bac"),
        ("busy", "cab"),
        ("left", "acb"),
        ("state", "cba"),
    ],
)
def test_rows_are_sorted_with_the_unknown_last(name, order):
    rows = {
        "a": row(pid=9, user="z", step=7, steps_per_second=2.0, rss_bytes=50, busy_share=0.2, seconds_left=3.0),
        "b": row(
            pid=8, user="x", step=None, steps_per_second=None, rss_bytes=1, device_bytes=60, busy_share=None,
            seconds_left=None, state="waiting",
        ),
        "c": row(
            pid=7, user="y", step=3, steps_per_second=0.0, rss_bytes=40, busy_share=0.9, seconds_left=9.0, state="stuck"
        ),
    }  # fmt: skip
    found = Look(0.0, tuple(rows.values()), ()).sorted(name).rows
    assert "".join(letter for shown in found for letter in rows if rows[letter] is shown) == order


def test_nothing_that_a_record_says_commands_the_terminal():
    evil = "\x1b]52;c;cm0gLXJm\x07\x1bc\x9b2J\n\u202e[red]"
    ipus = tuple(dataclasses.replace(ipu, platform=evil, kind=evil, stages=(f"mlp{evil}",)) for ipu in IPUS)
    texts = {name: f"a{evil}b" for name in ("user", "command", "reason", "doing", "run")}
    for width in (60, 400):
        for line in drawn(row(ipus=ipus, state="stuck", **texts), row(ipus=ipus, **texts), width=width):
            assert line.isprintable()
            assert cell_len(line) <= width
    assert "mlp?]52;c;cm0gLXJm??c?2J ?[red]" in drawn(row(ipus=ipus), width=400)[2]

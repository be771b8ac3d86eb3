"""Test the table: which columns fit, that no line is wider than the terminal, and what entries say."""

import dataclasses

import pytest

from ipu_jax.observe.monitor.records import Ignored, Ipu
from ipu_jax.observe.monitor.rows import Look, Row
from ipu_jax.observe.monitor.table import cells, fitting, lines_of

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


def drawn(*rows, width, **options):
    return lines_of(Look(0.0, rows, ()), width, about="host, 2 cores, load 0.50", **options)


def test_a_wide_terminal_shows_everything():
    assert drawn(row(), width=None) == [
        "host, 2 cores, load 0.50: 1 process on 4 IPUs",
        "  pid  user      command                                                      time  IPUs  instance   replica"
        "  stage                    step  steps/s  samples/s  memory  busy  last step  state",
        "31939  somebody  run-sharded-mnist --pipeline-mode concurrent --epochs 20  2:03:04     4    0 of 2  0-1 of 4"
        "  0 mlp, 1 conv, all head  1204     19.8       2538  287 MB   83%     0.05 s  running",
    ]


def test_a_narrow_terminal_shows_what_is_wanted_most():
    assert drawn(row(), width=80)[1:] == [
        "  pid  command             IPUs  step  steps/s  memory  busy  last step  state",
        "31939  run-sharded-mnis..     4  1204     19.8  287 MB   83%     0.05 s  running",
    ]
    assert drawn(row(), width=40)[1:] == [
        "  pid  IPUs  step  steps/s  state",
        "31939     4  1204     19.8  running",
    ]


@pytest.mark.parametrize("other", [row(command="訓練 " * 30), row(state="stuck", reason="x" * 300), row(step=10**12)])
def test_no_line_is_wider_than_the_terminal_and_wider_ones_show_no_less(other):
    before: set[str] = set()
    for width in range(12, 260):
        lines = drawn(row(), other, width=width)
        assert max(map(cells, lines)) <= width
        heads = {column.head for column, _ in fitting([row(), other], width)}
        assert before <= heads, width
        before = heads
    assert len(before) == 15


def test_rows_of_a_table_begin_and_end_their_columns_together():
    lines = drawn(row(), row(pid=7, step=3, command="訓練", user="x"), width=None)[1:]
    assert len({cells(line.split("running")[0].split("state")[0]) for line in lines}) == 1


def test_what_is_unknown_is_a_dash():
    lines = drawn(
        row(
            step=None, steps_per_second=None, samples_per_second=None, last_step_seconds=None, busy_share=None, ipus=()
        ),
        width=None,
    )
    assert lines[2].split()[-9:] == ["-", "-", "-", "-", "-", "287", "MB", "-", "-", "running"][-9:]


def test_memory_of_devices_goes_before_that_of_the_host():
    assert "12.3 GB" in drawn(row(device_bytes=12_345_678_901), width=None)[2]


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
    assert drawn(row(**values), width=None)[2].endswith(f"  {word}")


def test_reasons_and_ignored_files_stand_below():
    stuck = row(state="stuck", reason="finished no step for 7 s, and may for 5 s")
    lines = lines_of(Look(0.0, (stuck,), (Ignored("/tmp/x", "why"),)), None, about="host")
    assert lines[3:] == [
        "31939 is stuck: finished no step for 7 s, and may for 5 s",
        "1 file or folder is no record: --json names them",
    ]


def test_colours_mark_whole_lines_and_are_no_part_of_their_width():
    plain = drawn(row(), row(state="stuck"), width=80)
    coloured = drawn(row(), row(state="stuck"), width=80, coloured=True)
    assert coloured == [
        f"\x1b[1m{plain[0]}\x1b[0m",
        f"\x1b[2m{plain[1]}\x1b[0m",
        plain[2],
        f"\x1b[1;31m{plain[3]}\x1b[0m",
    ]


def test_nothing_that_a_record_says_commands_the_terminal():
    evil = "\x1b]52;c;cm0gLXJm\x07\x1bc\x9b2J\n\u202e"
    ipus = tuple(dataclasses.replace(ipu, platform=evil, kind=evil, stages=(f"mlp{evil}",)) for ipu in IPUS)
    texts = {name: f"a{evil}b" for name in ("user", "command", "reason", "doing", "run")}
    for width in (None, 60, 400):
        for line in drawn(row(ipus=ipus, state="stuck", **texts), row(ipus=ipus, **texts), width=width):
            assert line.isprintable()
            assert width is None or cells(line) <= width
    line = drawn(row(ipus=ipus), width=None)[2]
    assert "mlp?]52;c;cm0gLXJm??c?2J ?" in line

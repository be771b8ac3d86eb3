"""Test a command that someone else writes with `ipu_jax.cli`: its help, what it refuses, and how it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = """
import dataclasses, sys
from pathlib import Path
from ipu_jax import cli

@dataclasses.dataclass(frozen=True)
class Flags:
    ipus: int = cli.flag(None, cli.count, "IPUs of a replica")
    replicas: int = cli.flag(None, cli.count, "copies of the model")
    ratio: float = cli.flag(0.5, cli.positive, "of both", group="training")
    kind: str = cli.flag("plain", cli.one_of("kind", ("plain", "fancy")), "of model", group="training")
    table: Path | None = cli.flag(None, cli.path, "where it is written", "FILE.csv")

def main():
    parser = cli.Parser("mine", "Counts devices.", called={"num_ipus": "--ipus"})
    cli.add_flags(parser, Flags)
    flags = cli.flags_of(Flags, parser.parse())
    try:
        if flags.table is not None:
            cli.check_file("--table", flags.table, (".csv",))
        counts = cli.counts_of(flags.ipus, flags.replicas, default_ipus=3)
        assert "jax" not in sys.modules
        cli.start_ipus(**counts)
    except ValueError as error:
        parser.refuse(error)
    import jax
    print(flags.kind, flags.ratio, len(jax.devices()))
    if flags.table is not None:
        with cli.replacing(flags.table) as file:
            file.write(b"1,2")
    cli.end_together()
    return 0

cli.run("mine", main)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(COMMAND)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }

    def run(*flags: str, under: tuple[str, ...] = ()) -> tuple[int, str, str]:
        own = environment | {"PYTHONPATH": str(ROOT), "IPU_JAX_MONITOR": "off", "COLUMNS": "100"}
        command = [sys.executable, *under, str(tmp_path / "mine.py"), *flags]
        done = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.slow
def test_it_runs_with_its_defaults_and_writes_its_file(mine, tmp_path):
    assert mine("--replicas", "2", "--kind", "FANCY", "--table", "t.csv") == (0, "fancy 0.5 6\n", "")
    assert (tmp_path / "t.csv").read_text() == "1,2"


def test_its_help_shows_headings_values_and_defaults(mine):
    status, out, err = mine("--help")
    assert (status, err) == (0, "")
    words = " ".join(out.split())
    assert "--ipus N IPUs of a replica --replicas N copies of the model" in words
    assert "training: --ratio X of both (default: 0.5) --kind {plain,fancy} of model (default: plain)" in words
    assert "--table FILE.csv where it is written" in words


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--ipus 0", "argument --ipus: '0' is not a count: give a whole number of at least 1"),
        ("--ratio -1", "argument --ratio: '-1' is not a positive number: give one such as 0.01"),
        ("--kin plain", "unrecognized arguments: --kin plain: did you mean --kind? --help lists all flags"),
        ("--table t.txt", "--table t.txt has the wrong suffix: give a name that ends in .csv"),
    ],
)
def test_what_it_refuses_is_one_line_and_status_2(mine, flags, said):
    assert mine(*flags.split()) == (2, "", f"mine: {said}\n")


def test_further_axes_of_poprun_are_refused(mine):
    status, out, err = mine(under=("-m", "ipu_jax.distributed.poprun", "--axes", "tensor=2", sys.executable))
    assert (status, out) == (2, "")
    assert "mine: poprun's --axes gives the mesh further axes, which this program lacks: leave --axes out\n" in err


@pytest.mark.slow
def test_instances_share_its_replicas(mine):
    poprun = ("-m", "ipu_jax.distributed.poprun", "--num-replicas", "2", "--num-instances", "2")
    status, out, err = mine(under=(*poprun, "--ipus-per-replica", "2", sys.executable))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[1,{k}]<stdout>:plain 0.5 4" for k in range(2)]

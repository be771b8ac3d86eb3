"""Test that each command ends as `ipu_jax.base.cli.process` says: at Ctrl-C in an import, and without a reader."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "mnist_example.run_sharded_mnist": "--pipeline-mode basic --synthetic-data",
    "mnist_example.benchmark_dataset": "--synthetic-data",
    "ipu_jax.tools.sharded_embedding_tool": "",
    "ipu_jax.tools.sharded_matmul_tool": "",
    "ipu_jax": "",
    "ipu_jax.run.observe.info": "",
    "ipu_jax.run.observe.runs.command": "LOG",
}
REMOVED = "the working directory was removed: change to one that is there"
# Python runs it at its start. It lets Ctrl-C through, and presses it at the import of the module that is named.
AT_AN_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["PRESS_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presses())
"""


def run(script, module, flags, *, stdout=subprocess.PIPE, **environment):
    """Run a command by a shell's script, in which "$@" is the command; return status, stdout and stderr."""
    path = os.pathsep.join([environment.pop("PYTHONPATH", ""), str(ROOT)])
    words = ["bash", "-c", script, "bash", sys.executable, "-m", module, *flags.split()]
    own = {**os.environ, **environment, "PYTHONPATH": path}
    done = subprocess.run(words, env=own, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.fast(
    "ipu_jax.tools.sharded_matmul_tool-jax._src.core", "mnist_example.run_sharded_mnist-ipu_jax.core.mesh.devices"
)
@pytest.mark.parametrize(
    ("module", "place"),
    [
        *((module, "jax._src.core") for module in COMMANDS),
        ("mnist_example.run_sharded_mnist", "ipu_jax.core.mesh.devices"),
    ],
)
def test_ctrl_c_in_the_middle_of_an_import_ends_it_with_130(module, place, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_AN_IMPORT)
    (log := tmp_path / "run.jsonl").write_text('{"event": "end"}\n')
    flags = COMMANDS[module].replace("LOG", str(log))
    status, out, err = run('"$@"', module, flags, PYTHONPATH=str(tmp_path), PRESS_AT=place)
    assert (status, err) == (130, "")
    assert out.count("\n") == (module == "ipu_jax")  # it prints the versions first


# one that argparse prints, one that rich prints, and one of the launcher
PRINTING = [
    ("ipu_jax.run.observe.info", "--version"),
    ("ipu_jax.run.observe.monitor.command", "--once"),
    ("ipu_jax.distributed.poprun", "--num-instances 2 --num-replicas 2 --print-topology --dry-run true"),
]


@pytest.mark.fast("ipu_jax.run.observe.info---version")
@pytest.mark.parametrize(("module", "flag"), PRINTING)
def test_an_output_that_nobody_reads_or_that_cannot_be_written_gives_no_traceback(module, flag):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb"):
        assert run('"$@"; exit $?', module, flag, stdout=writer) == (141, None, "")
    status, out, err = run('"$@" > /dev/full', module, flag)
    assert (status, out) == (74, "")
    assert err.endswith(": the output cannot be written (No space left on device): write it elsewhere\n")
    assert err.count("\n") == 1
    assert run('"$@" >&-', module, flag) == (0, "", "")
    status, out, err = run('"$@"', module, flag, PYTHONIOENCODING="ascii")
    assert (status, err) == (0, "")
    assert out


def test_a_refusal_that_cannot_be_printed_is_still_one():
    for script in ('"$@" 2> /dev/full', '"$@" <&- >&- 2>&-'):
        assert run(script, "ipu_jax.tools.sharded_matmul_tool", "--ipus 0") == (2, "", "")


POPRUN, MNIST = "ipu_jax.distributed.poprun", "mnist_example.run_sharded_mnist"
NO_FOLDER = "put the four MNIST files there, or leave --data-dir out to download them"


@pytest.mark.parametrize(
    ("module", "flags", "said"),
    [
        (POPRUN, "true", f"poprun: {REMOVED}\n"),
        (POPRUN, "--output-dir logs true", f"poprun: {REMOVED}\n"),
        (
            *(MNIST, "--compare --synthetic-data --plot /tmp/a.png --plot-schedule b.svg"),
            f"run-sharded-mnist: {REMOVED}\n",
        ),
        (
            *(MNIST, "--pipeline-mode basic --data-dir digits"),
            f"run-sharded-mnist: --data-dir digits is not a folder: {NO_FOLDER}\n",
        ),
        # these need no working directory
        pytest.param("ipu_jax.run.observe.info", "--json", "", marks=pytest.mark.slow),
        ("ipu_jax.run.observe.monitor.command", "--json", ""),
    ],
)
def test_what_a_removed_working_directory_hides_is_one_line(module, flags, said, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    status, out, err = run(f'cd {gone}; rmdir {gone}; "$@"', module, flags, PYTHONPATH=str(ROOT))
    assert (status, out[:1], err) == ((2, "", said) if said else (0, "{", ""))

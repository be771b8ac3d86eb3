"""Test the wheel and the sdist: what they contain, and that the commands of the wheel run away from the checkout."""

import email
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import ipu_jax
from mnist_example.data import synthetic_mnist
from support import documents
from support.mnist_instance import write_digits

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {"ipu_jax", "sharded_ops", "mnist_example"}
INFO = f"ipu_jax-{ipu_jax.__version__}.dist-info"
COMMANDS = sorted(PROJECT["scripts"])
OTHER_NAMES = {"gc-info": "ipu-info", "gc-monitor": "ipu-monitor"}


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )


def build(checkout: Path, folder: Path, kind: str) -> Path:
    """Build a "wheel" or "sdist" of a checkout, without a network, and return it."""
    done = run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=checkout)
    assert done.returncode == 0, done.stderr
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and nothing else; what it depends on is that of this Python."""
    folder = tmp_path_factory.mktemp("installed")
    install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", folder, wheel)
    done = run(sys.executable, *install, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def contents(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_three_packages_whole_and_nothing_else(wheel):
    names = contents(wheel).keys()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, INFO}
    of_checkout = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if not name.startswith(INFO)} == of_checkout
    # what is read as data, or is found by its place
    for name in ("py.typed", "run/observe/runs/page.html", "distributed/bootstrap/sitecustomize.py"):
        assert f"ipu_jax/{name}" in of_checkout


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel_byte_by_byte(wheel, tmp_path):
    sdist = build(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (checkout,) = (tmp_path / "unpacked").iterdir()
    again = build(checkout, tmp_path / "again", "wheel")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)
    # the tests, too, can be run from it
    for name in ("Makefile", "run_sharded_mnist.py", "tests/project/test_packages.py", "benchmarks/figures.py"):
        assert (checkout / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_metadata_are_those_of_the_project(wheel):
    files = contents(wheel)
    told = email.message_from_bytes(files[f"{INFO}/METADATA"])
    assert (told["Name"], told["Version"]) == ("ipu-jax", ipu_jax.__version__)
    assert (told["License-Expression"], told["License-File"]) == ("Apache-2.0", "LICENSE")
    assert files[f"{INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert told["Requires-Python"] == ">=3.11"
    assert set(told.get_all("Provides-Extra", [])) == PROJECT["optional-dependencies"].keys()
    needed = {line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert needed == set(PROJECT["dependencies"])
    assert "Typing :: Typed" in told.get_all("Classifier", [])


@pytest.mark.slow
def test_the_packages_are_found_where_the_wheel_was_installed(installed, tmp_path):
    code = f"import {', '.join(sorted(PACKAGES))}; print({', '.join(f'{name}.__file__' for name in sorted(PACKAGES))})"
    done = run(sys.executable, "-P", "-W", "error", "-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert done.stderr == ""
    assert done.stdout.split() == [str(installed / name / "__init__.py") for name in sorted(PACKAGES)]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_wheel_starts(command, installed, tmp_path):
    script = installed / "bin" / command
    done = run(sys.executable, "-P", script, "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{OTHER_NAMES.get(command, command)} {ipu_jax.__version__} (")


TRAIN = "run-sharded-mnist --pipeline-mode concurrent --synthetic-data --run-single-step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (TRAIN, "Test accuracy: "),
        (f"poprun --num-replicas 2 --num-instances 2 --ipus-per-replica 2 {TRAIN}", "Test accuracy: "),
        ("benchmark-dataset --synthetic-data --epochs 1", "Epoch 1: "),
        ("sharded-embedding-tool --vocab-size 100 --feature-size 16 --sequence-length 32", "Results match."),
        ("sharded-matmul-tool --rows 8 --cols 16 --outsize 11", "Results match."),
        ("ipu-monitor --once", " cores, load "),
        ("ipu-info", f"ipu_jax {ipu_jax.__version__}, jax "),
    ],
    ids=lambda line: line.split()[0],
)
def test_a_command_of_the_wheel_runs_away_from_the_checkout(line, expected, installed, tmp_path):
    environment = {"PYTHONPATH": str(installed), "PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = run(*line.split(), cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


# What a newcomer opens first, one after the other, and the name under which a page says to save its program
FIRST_PAGES = {"README.md": "first.py", "docs/index.md": "", "docs/concepts.md": "", "docs/tutorials/function.md": ""}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_after_the_printed_install_line_the_first_pages_do_what_they_say(wheel, tmp_path):
    pages = {ROOT / name: saved_as for name, saved_as in FIRST_PAGES.items()}
    shell = "".join(block for page in pages for block in documents.blocks(page, "bash"))
    install, *commands = dict.fromkeys(line.split("#")[0].strip() for line in shell.splitlines())
    extras = re.fullmatch(r"pip install '\.(\[.*\])'", install)
    assert extras
    assert not any(line.startswith("pip ") for line in commands), "one page's line is not another's"
    bin = tmp_path / "environment/bin"
    assert run(sys.executable, "-m", "venv", bin.parent, cwd=tmp_path).returncode == 0
    pip = (bin / "python", "-m", "pip", "install", "--no-input", "--retries", "1", f"{wheel}{extras[1]}")
    done = run(*pip, cwd=tmp_path, PYTHONPATH="")
    if done.returncode and "connection" in done.stderr.lower():
        pytest.skip("pip cannot reach an index of packages")
    assert done.returncode == 0, done.stderr
    digits = write_digits(tmp_path / "digits", synthetic_mnist(0, 320, 64))  # 60,000 images take minutes
    environment = {"PYTHONPATH": "", "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "MNIST_DIR": str(digits)}
    (empty := tmp_path / "empty").mkdir()
    for line in commands:
        done = run(*shlex.split(line), cwd=empty, **environment)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    for page, saved_as in pages.items():
        documents.assert_shown(page, documents.run(page, saved_as=saved_as, python=bin / "python"))

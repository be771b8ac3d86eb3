"""Test the commands under poprun: losses and weights equal those of one process, and one instance prints.

The unsharded run, without poprun, is the oracle. Under poprun all replicas are added in the order of their ranks,
however many instances share them, so that the bits are equal; the plain run adds them in another order.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ipu_jax import cli
from support import launched, mnist_instance

ROOT = Path(__file__).parents[2]
OF_DATA = ["--synthetic-data", "--batch-size", "2", "--gradient-accumulation-count", "2", "--epochs", "2"]
OF_DATA += ["--no-progress", "--repeat-count", "2"]
FLAGS = [*OF_DATA, "--learning-rate", "0.002"]
BASIC, CONCURRENT = ["--pipeline-mode", "basic"], ["--pipeline-mode", "concurrent"]
TRAIN, READ = "run_sharded_mnist", "benchmark_dataset"
VARIABLES = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONWARNINGS": "error", "MNIST_DIR": ""}
TAG = re.compile(r"^\[1,(\d+)\]<\w+>:")
# gloo's threads write into each other's lines, of which poprun leaves out whole ones only
GLOO = re.compile(r"Gloo|peer ranks|^\s*\d*\s*$")


class Ran:
    """How a run ended: its status, the lines of each instance on stdout and stderr, and what each one saved."""

    def __init__(self, folder, status, out, err):
        self.folder, self.status, self.err = folder, status, err
        self.out = [line for line in out.splitlines() if not GLOO.search(TAG.sub("", line))]

    def said_by(self, instance):
        """Return the lines of an instance on stdout, without their tags."""
        tag = f"[1,{instance}]<stdout>:"
        return [line.removeprefix(tag) for line in self.out if line.startswith(tag)]

    def files(self, mode):
        """Return the losses and weights that each instance saved of a mode."""
        return [dict(np.load(path)) for path in sorted(self.folder.glob(f"{mode}-*.npz"))]


@pytest.fixture
def alone(tmp_path, monkeypatch, capsys):
    """Return a function that trains in this process."""

    def train(*flags, images):
        folder = tmp_path / "alone"
        folder.mkdir()
        status = mnist_instance.main(str(folder), str(images), TRAIN, *flags, patch=monkeypatch.setattr)
        return Ran(folder, status, *capsys.readouterr())

    return train


def by_itself(folder, *flags, images):
    """Train in a process of its own, which has more devices than this one."""
    folder.mkdir()
    words = [sys.executable, mnist_instance.__file__, str(folder), str(images), TRAIN, *flags]
    variables = launched.environment(**VARIABLES, JAX_NUM_CPU_DEVICES="16")
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=240)
    return Ran(folder, done.returncode, done.stdout, done.stderr)


def poprun(folder, replicas, instances, ipus, command, *flags, images=170, **variables):
    folder.mkdir(exist_ok=True)
    counts = ["--num-replicas", str(replicas), "--num-instances", str(instances), "--ipus-per-replica", str(ipus)]
    words = (*counts, sys.executable, mnist_instance.__file__, str(folder), str(images), command, *flags)
    ran = launched.poprun(*words, cwd=folder, timeout=240, **VARIABLES, **variables)
    return Ran(folder, ran.status, ran.out, ran.err)


def without_times(lines):
    """Return the lines about the training, which no time depends on."""
    return [re.sub(r" in [\d.]+ s(, .*)?$", "", line) for line in lines if not line.startswith("Compiled")]


def assert_equal(ran, expected, mode, *, exactly=True):
    """Check that every instance of a run has the losses and weights of another run."""
    (first, *_), found = expected.files(mode), ran.files(mode)
    assert found
    for of_instance in found:
        assert of_instance.keys() == first.keys()
        for name, value in first.items():
            atol = 0 if exactly else 1e-5 * np.abs(value).max()
            np.testing.assert_allclose(of_instance[name], value, rtol=0, atol=atol, err_msg=name)


def assert_ended_well(ran, instances):
    assert ran.status == 0, ran.err
    assert ran.err == ""
    assert all(ran.said_by(k) == [] for k in range(1, instances))


HALF = ["--precision", "16.32", "--half", "float16"]
EVERY_FLAG = [
    [*CONCURRENT, "--optimizer", "adamw", "--shard-optimizer"],
    [*CONCURRENT, "--optimizer", "lamb", "--shard-optimizer"],
    [*BASIC, "--precision", "16.16"],
    [*CONCURRENT, *HALF, "--optimizer", "adam", "--shard-optimizer"],
    [*BASIC, "--optimizer", "momentum", "--async-dataloader", "--num-workers", "3", "--no-eight-bit-io"],
    [*BASIC, "--pipeline-schedule", "auto", "--run-single-step"],
    [*BASIC, "--explain", "--run-single-step", "--reduction", "mean"],
    [*BASIC, "--model", "resnet18", "--batch-size", "4", "--run-single-step"],
    [*BASIC, "--replicas", "2", "--ipus", "2", "--seed", "7", "--pipeline-schedule", "1f1b"],
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "replicas", "instances", "ipus", "images", "exactly"),
    [
        (BASIC, 2, [2], 2, 20, True),  # a sum of two replicas has one order only
        (BASIC, 8, [1, 2, 4], 2, 170, False),
        (CONCURRENT, 8, [1, 2, 4], 2, 170, False),
        # a replica spans instances
        (BASIC, 1, [2], 2, 50, True),
        (CONCURRENT, 1, [2], 2, 50, True),
        (CONCURRENT, 2, [4], 4, 50, False),
        *((of, 2, [2], 2, 50, "--precision" not in of and "resnet18" not in of) for of in EVERY_FLAG),
    ],
)
def test_instances_train_as_one_process_does(flags, replicas, instances, ipus, images, exactly, tmp_path, alone):
    flags = [*FLAGS, *flags]
    own = [] if "--replicas" in flags else ["--replicas", str(replicas), "--ipus", str(ipus)]
    train = alone if replicas * ipus <= 8 else functools.partial(by_itself, tmp_path / "one")
    one = train(*flags, *own, images=images)
    runs = [poprun(tmp_path / str(count), replicas, count, ipus, TRAIN, *flags, images=images) for count in instances]
    for run, count in zip(runs, instances, strict=True):
        assert_ended_well(run, count)
        mode = flags[flags.index("--pipeline-mode") + 1]
        assert_equal(run, runs[0], mode)
        assert_equal(run, one, mode, exactly=exactly)
        assert without_times(run.said_by(0)) == without_times(one.out)


@pytest.mark.slow
def test_instances_share_an_executable_cache(tmp_path):
    cache = tmp_path / "cache"
    flags = [*BASIC, *FLAGS, "--executable-cache", str(cache)]
    first, second = (poprun(tmp_path / name, 2, 2, 2, TRAIN, *flags, images=20) for name in ("first", "second"))
    for run in (first, second):
        assert_ended_well(run, 2)
    assert re.search(r"executable cache: 0 hits, \d+ misses", first.said_by(0)[-1])
    assert re.search(r"executable cache: \d+ hits, 0 misses", second.said_by(0)[-1])
    assert_equal(second, first, "basic")
    # each has programs of its own, and the second start compiles on none
    names = [sorted(path.name for path in (cache / f"instance-{i}").iterdir()) for i in range(2)]
    assert all(any(name.startswith("jit__run-") for name in of_instance) for of_instance in names)


@pytest.mark.slow
def test_reading_counts_the_samples_and_bytes_of_all_instances(tmp_path):
    flags = [*OF_DATA, "--epochs", "1.5", "--async-dataloader", "--num-workers", "2"]
    ran = poprun(tmp_path, 2, 2, 2, READ, *flags, images=50)
    assert_ended_well(ran, 2)
    head, whole, half, _ = ran.said_by(0)
    assert head == (
        "synthetic data, seed 0, to 2 replicas of 2 IPUs: 6 updates per epoch, each of 2 micro-batches of 2 on each"
    )
    for line, samples in ((whole, 48), (half, 24)):
        found = re.fullmatch(r"Epoch \d: (\d+) samples in [\d.]+ s, ([\d,]+) samples/s, ([\d,]+\.\d\d) MB/s", line)
        assert found, line
        assert int(found[1]) == samples
        per_second, megabytes = (float(text.replace(",", "")) for text in found.groups()[1:])
        of_sample = (28 * 28 + 1) / 1e6
        # both are rounded to half of their last digit
        assert abs(megabytes - per_second * of_sample) <= 0.005 + 0.5 * of_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "holds"),
    [
        (["--optimizer", "rmsprop"], ("argument --optimizer: 'rmsprop' is unknown",)),
        (
            ["--synthetic-data", "--batch-size", "99"],
            ("--batch-size 99 x", "--replicas 2 takes 792", "are 170: lower one of the three (under poprun, --ipus"),
        ),
    ],
    ids=["a choice", "a batch"],
)
def test_a_wrong_command_line_is_refused_once(flags, holds, tmp_path):
    ran = poprun(tmp_path, 2, 2, 2, TRAIN, *BASIC, *flags)
    assert ran.status == 2
    assert ran.out == []
    error, report = ran.err.splitlines()
    assert error.startswith("[1,0]<stderr>:run-sharded-mnist: ")
    assert [text for text in holds if text not in error] == [], error
    assert report.startswith("poprun: instance 0 ")


@pytest.mark.slow
def test_a_training_that_diverges_says_so_once(tmp_path):
    ran = poprun(tmp_path, 2, 2, 2, TRAIN, *BASIC, *FLAGS, "--learning-rate", "1e6")
    assert ran.status == 1
    # XLA itself tells of the signal by which poprun ends the first instance
    error, report = (line for line in ran.err.splitlines() if "preemption_notifier" not in line)
    assert re.fullmatch(r"\[1,0\]<stderr>:run-sharded-mnist: update \d, replica \d, .* training diverged; .*", error)
    assert re.match(r"poprun: instance \d .* \(exit status 1\)$", report), report
    assert ran.said_by(1) == []


@pytest.mark.slow
@pytest.mark.parametrize("command", [TRAIN, READ])
def test_there_is_a_bar_if_poprun_writes_to_a_terminal(command, tmp_path):
    flags = [flag for flag in (OF_DATA if command == READ else [*BASIC, *FLAGS]) if flag != "--no-progress"]
    ran = poprun(tmp_path, 2, 2, 2, command, *flags, images=50, POPRUN_TERMINAL_WIDTH="60")
    assert_ended_well(ran, 2)
    assert any("updates" in line and "\x1b[" in line for line in ran.said_by(0))


# without processes


@pytest.fixture
def place(monkeypatch):
    """Return a function that makes this process an instance of a run of 4 replicas of 2 IPUs."""

    def become(instance):
        variables = {
            "IPU_JAX_INSTANCE": str(instance),
            "IPU_JAX_INSTANCES": "2",
            "POPDIST_LOCAL_INSTANCE_INDEX": str(instance),
            "POPDIST_NUM_TOTAL_REPLICAS": "4",
            "POPDIST_NUM_IPUS_PER_REPLICA": "2",
            "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return become


def test_counts_are_those_of_poprun(place):
    place(0)
    assert cli.counts_of(None, None) == cli.counts_of(2, 4) == {"ipus": 2, "replicas": 4}
    with pytest.raises(ValueError, match=r"^--replicas 2, but poprun runs --num-replicas 4: leave --replicas out$"):
        cli.counts_of(None, 2)
    with pytest.raises(ValueError, match=r"^--ipus 3, but poprun runs --ipus-per-replica 2: leave --ipus out$"):
        cli.counts_of(3, None)


@pytest.mark.parametrize("instance", [0, 1])
def test_another_instance_waits_before_it_refuses(instance, place, monkeypatch, capsys):
    place(instance)
    waited = []
    monkeypatch.setattr("ipu_jax.run.cli.time.sleep", waited.append)
    with pytest.raises(SystemExit, match="2"):
        cli.Parser("some", "A command.").error("wrong")
    assert waited == [3.0] * instance
    assert capsys.readouterr().err == "some: wrong\n"

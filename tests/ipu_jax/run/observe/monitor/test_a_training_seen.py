"""Test what ipu-monitor shows of a real training under poprun, while it runs and while one instance is stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.launched import PLAIN_POPRUN, environment

PLACES = ["--num-replicas", "2", "--num-instances", "2", "--ipus-per-replica", "2"]
TRAINING = ["--pipeline-mode", "concurrent", "--synthetic-data", "--epochs", "1000"]


@pytest.mark.slow
def test_the_instances_of_a_training_are_shown_with_their_places(tmp_path):
    settings = environment(IPU_JAX_MONITOR=str(tmp_path / "records"))
    program = [sys.executable, "-m", "mnist_example.run_sharded_mnist", *TRAINING]

    def look():
        words = [sys.executable, "-m", "ipu_jax.run.observe.monitor.command", "--json"]
        done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)["processes"]

    def look_until(condition):
        until = time.monotonic() + 200
        while not condition(found := look()):
            assert time.monotonic() < until, found
            time.sleep(0.2)
        return found

    with subprocess.Popen([*PLAIN_POPRUN, *PLACES, *program], env=settings, stdout=subprocess.DEVNULL) as run:
        try:
            rows = look_until(lambda rows: len(rows) == 2 and all((row["samples_per_second"] or 0) > 0 for row in rows))
            assert [(row["instance"], row["instances"], row["replicas"]) for row in rows] == [(0, 2, 2), (1, 2, 2)]
            assert len({row["run"] for row in rows}) == 1
            for row in rows:
                assert [(ipu["replica"], ipu["ipu"]) for ipu in row["ipus"]] == [
                    (row["instance"], 0),
                    (row["instance"], 1),
                ]
                assert row["ipus"][0]["stages"][0] == "hidden"
                assert row["state"] == "running"
                # an update is 4 micro-batches of 16 images on each of 2 replicas
                assert row["samples_per_second"] == pytest.approx(128 * row["steps_per_second"])
            os.kill(rows[1]["pid"], signal.SIGSTOP)
            look_until(lambda rows: [row["state"] for row in rows][1:] == ["stopped"])
            os.kill(rows[1]["pid"], signal.SIGCONT)
        finally:
            run.kill()  # its watcher ends the instances
    look_until(lambda rows: rows == [])
    assert list((tmp_path / "records").iterdir()) == []

"""Run every benchmark at its smallest size: what the programs that it measures compute must agree."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicas
import results
import run_all
from figures import Cost
from mnist_example import model
from rivals_of.workers import torch_is_installed

# what a figure's name says if it does not come from a clock, from XLA's memory or from the size of a program
EXACT = ("difference", "bubble of", "names change", "that cross", "collectives in", "s in a step", "gain over")
# starting a training run is a figure of time alone; test_models.py compares the other models with independent ones
PARTS = {"instances": ["--only", "steps"], "models": ["--only", "recommender"]}
UNCOMPARED = {"checkpoints"}  # its programs compute nothing that could be compared


class DenseTwin:
    """Stands in for the processes of a torch rival where torch is not installed: the network in plain jax."""

    def __init__(self, weights, batches, program=None):
        self.weights = weights
        self.batches = batches
        self.context = jax.enable_x64(weights["hidden.w"].dtype == np.float64)

    def __enter__(self):
        self.context.__enter__()
        return self

    def __exit__(self, *error):
        self.context.__exit__(*error)

    def result(self, batch, schedule):
        """Return what torch does: the mean loss, and the sum of the gradients; or for DDP the weights after a step."""
        parts = self.batches[batch]["images"], self.batches[batch]["labels"]
        loss, sums = self._loss_and_sums(self.weights, *parts)
        if schedule == "DDP":
            sums = {name: w - replicas.RATE / replicas.REPLICAS * sums[name] for name, w in self.weights.items()}
        return np.asarray(loss), jax.tree.map(np.asarray, sums)

    def losses(self, batch, schedule, *, updates, rate, momentum):
        parts = [np.split(self.batches[batch][name], updates) for name in ("images", "labels")]
        weights, moments, losses = self.weights, jax.tree.map(np.zeros_like, self.weights), []
        for images, labels in zip(*parts, strict=True):
            loss, sums = self._loss_and_sums(weights, images, labels)
            moments = jax.tree.map(lambda m, g: momentum * m + g, moments, sums)
            weights = jax.tree.map(lambda w, m: w - rate * m, weights, moments)
            losses.append(float(loss))
        return np.asarray(losses)

    def _loss_and_sums(self, weights, images, labels):
        losses, gradients = jax.vmap(jax.value_and_grad(self._loss), (None, 0, 0))(weights, images, labels)
        return losses.mean(), {name: gradient.sum(0) for name, gradient in gradients.items()}

    @staticmethod
    def _loss(weights, images, labels):
        x = images.reshape(len(images), -1).astype(weights["hidden.w"].dtype) / 255.0
        for name in ("hidden", "features"):
            x = jnp.maximum(x @ weights[f"{name}.w"] + weights[f"{name}.b"], 0)
        logits = x @ weights["classifier.w"] + weights["classifier.b"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    def costs(self, *, steps, **order):
        return [Cost(1.0, 1.0)] * steps

    def step_costs(self, batch, schedule, **order):
        return self.costs(**order)


@pytest.fixture(autouse=True)
def constants_come_back():
    """A script changes constants under --smallest. Other tests use them at their usual size."""
    for name in run_all.scripts(results.FOLDER):
        importlib.import_module(name)
    of_modules: list[tuple[ModuleType, dict[str, object]]] = [
        (module, dict(vars(module)))
        for module in list(sys.modules.values())
        if module is model or Path(getattr(module, "__file__", None) or "/").parent == results.FOLDER
    ]
    yield
    for module, constants in of_modules:
        vars(module).update(constants)


# the programs of chips do not run; ipu_jax/run/ahead/test_compiled.py compiles smaller ones
@pytest.mark.fast("auto_schedule", "scale")
@pytest.mark.parametrize("name", [name for name in run_all.scripts(results.FOLDER) if name != "chips"])
def test_a_benchmark_runs_and_its_programs_agree(name, tmp_path, monkeypatch):
    record = tmp_path / "figures"
    monkeypatch.setattr(sys, "argv", [name, "--smallest", "--record", str(record), *PARTS.get(name, [])])
    monkeypatch.setenv("PYTHONPATH", str(results.FOLDER.parent))
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")  # processes that a script starts have as many IPUs as it says
    script = importlib.import_module(name)
    if name in ("rivals", "replicas") and not torch_is_installed():
        monkeypatch.setattr(script, "TorchPipeline", DenseTwin)
        monkeypatch.setattr(script, "torch_is_installed", lambda: True)
    assert script.main() == 0
    figures = [results.Figure(**line) for line in map(json.loads, record.read_text().splitlines()) if "name" in line]
    exact = [figure for figure in figures if any(part in figure.name for part in EXACT)]
    assert figures
    assert bool(exact) == (name not in UNCOMPARED)
    assert [figure.name for figure in exact if figure.holds is False] == []


@pytest.mark.parametrize("name", run_all.scripts(results.FOLDER))
def test_a_benchmark_refuses_an_unknown_flag_before_it_measures(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--smallest", "--no-such-flag"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main()
    assert stopped.value.code == 2
    assert "unrecognized arguments: --no-such-flag" in capsys.readouterr().err

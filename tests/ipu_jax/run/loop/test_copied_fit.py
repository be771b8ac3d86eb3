"""Test that the file of `fit` runs as a copy in a user's folder: public names only, and the same training."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import ipu_jax
from ipu_jax import Feed
from ipu_jax.run.loop import checked_fit
from ipu_jax.steps import FitResult
from support import public_api
from support.fitted import B, D, Lines, M, assert_same_weights, make_step, normal, twin, weights
from support.trained import compiled_quickly

FILE = public_api.ROOT / "ipu_jax/run/loop/fit.py"
MODULES = (*public_api.SUBJECTS, "popdist", "cli")

_compiled_quickly = compiled_quickly()


def test_its_file_uses_public_names_only_and_is_short():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 420
    tree = ast.parse(text)
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
    assert {each.partition(".")[0] for each in imported} - sys.stdlib_module_names == {"ipu_jax", "jax", "numpy"}
    # also in annotations, which are texts
    used = re.findall(rf"\bipu_jax\.(?:(?:{'|'.join(MODULES)})\.)?\w+", text)
    assert {"ipu_jax.Feed", "ipu_jax.observe.write_report", "ipu_jax.steps.StepOutputs"} <= {*used}
    public = {f"ipu_jax.{name}" for name in ipu_jax.__all__}
    public |= {f"ipu_jax.{module}.{name}" for module in MODULES for name in getattr(ipu_jax, module).__all__}
    assert {*used} <= public
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not [name for name in attributes if re.match("_[^_]", name)]
    (of_data,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [node for node in ast.walk(of_data) if isinstance(node, ast.FunctionDef)]


@pytest.fixture
def my_fit(tmp_path):
    """Return the module of a copy in another folder, under another name."""
    path = tmp_path / "my_fit.py"
    path.write_bytes(FILE.read_bytes())
    spec = importlib.util.spec_from_file_location("my_fit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_fit"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["my_fit"]


@pytest.mark.slow
def test_a_copy_trains_evaluates_saves_logs_draws_and_resumes(my_fit, tmp_path):
    rows, step = normal(2, 6 * M * B, D), make_step(2)

    def run(**more):
        lines = Lines()
        files = {"checkpoints": tmp_path / "saved", "log": tmp_path / "log", "report": tmp_path / "run.html"}
        with Feed(rows, step=step, micro_batch=B, shuffle=False) as feed:
            evaluate = lambda state: {"accuracy": int(state.step) / 100}
            result = my_fit.fit(step, step.init(weights()), feed, evaluate=evaluate, say=lines, **files, **more)
        return result, lines

    assert Path(my_fit.__file__).parent == tmp_path
    first, _ = run(epochs=1, trace=tmp_path / "trace", notes={"seed": 3})
    second, lines = run(epochs=2)
    losses, end = twin(rows, 12)
    np.testing.assert_allclose([*first.losses, *second.losses], losses, rtol=1e-4)
    assert_same_weights(step, second.state, end)
    assert isinstance(second, FitResult)
    assert second.evaluations == [(12, {"accuracy": 0.12})]
    assert (tmp_path / "trace/trace.json.gz").is_file()
    assert "all updates were made" in (tmp_path / "run.html").read_text()
    assert lines[0] == f"Resumed from {tmp_path}/saved/step-6, after 6 updates"
    events = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {event["event"] for event in events} >= {"start", "compiled", "losses", "evaluated", "saved", "resumed"}
    assert set(events[0]) >= {*checked_fit.NAMES_OF_START, "seed"}

"""Test the pipeline for reading: its numbers, the order of its tasks, its memory, and that it stays short."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage, make_schedule
from support.documents import ROOT

PATH = ROOT / "docs/tiny_pipeline.py"


def _imported(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tiny = _imported(PATH)
sizes = pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 4), (4, 3), (4, 8)])


def _ours(params, batch, stages: int, micro_batches: int):
    """Return loss and gradients of the library's engine, in the form of the weights of the file."""

    def block(w, x, microbatch):
        return tiny.block(*w, microbatch["x_MND"] if x is None else x)

    def head(w, y, microbatch):
        return tiny.cross_entropy(w, y, microbatch["labels_MN"])

    places = [Stage(block, params=f"block {s}", ipu=s) for s in range(stages)]
    places.append(Stage(head, params="head", ipu=stages - 1))
    pipeline = Pipeline(places, schedule="1f1b", gradient_accumulation=micro_batches)
    weights = {f"block {s}": (params["up_SDH"][s], params["down_SHD"][s]) for s in range(stages)}
    loss, gradients = pipeline.value_and_grad(pipeline.shard(weights | {"head": params["head_DV"]}), batch)[:2]
    whole = pipeline.unshard(gradients)
    up_SDH, down_SHD = (np.stack([whole[f"block {s}"][i] for s in range(stages)]) for i in range(2))
    return loss, {"up_SDH": up_SDH, "down_SHD": down_SHD, "head_DV": whole["head"]}


@pytest.mark.slow
@sizes
def test_loss_and_gradients_are_those_of_plain_jax_and_of_the_engine(stages, micro_batches):
    params, batch, mesh = tiny.example(stages, micro_batches)
    result = jax.jit(partial(tiny.value_and_grad, mesh=mesh))(params, batch)
    plain = jax.jit(jax.value_and_grad(tiny.unsharded_loss))(params, batch)
    _assert_near(result, plain)
    _assert_near(result, _ours(params, batch, stages, micro_batches))
    usual = jax.jit(jax.value_and_grad(partial(tiny.autodiff_loss, mesh=mesh)))
    _assert_near(result, usual(params, batch))


def _assert_near(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(b)))


@sizes
def test_each_device_does_its_tasks_in_the_order_of_1f1b(stages, micro_batches):
    schedule = make_schedule("1f1b", ipus=stages, gradient_accumulation=micro_batches)
    for s in range(stages):
        tasks = [tiny.task(tick, s, stages, micro_batches) for tick in range(schedule.ticks)]
        order = [f"{s}{' FB'[kind]}{m}" for kind, m in tasks if kind != tiny.IDLE]
        assert order == [str(task) for task in schedule.order(s)]
        ticks = {(kind, m): tick for tick, (kind, m) in enumerate(tasks)}
        lazy = make_schedule("interleaved", ipus=stages, gradient_accumulation=micro_batches)
        for m in range(micro_batches):
            assert (ticks[tiny.FORWARD, m], ticks[tiny.BACKWARD, m]) == (lazy.forward[s][m], lazy.backward[s][m])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_micro_batches():
    few, many = (tiny.temporary_bytes(tiny.value_and_grad, 4, m) for m in (8, 64))
    assert many <= 1.1 * few
    few, many = (tiny.temporary_bytes(jax.value_and_grad(tiny.autodiff_loss), 4, m) for m in (8, 64))
    assert many > 4 * few, "the docstring says that it grows"


@pytest.mark.slow
def test_gradients_of_a_few_micro_batches_and_of_bfloat16_weights_which_are_summed_in_float32():
    params, batch, mesh = tiny.example(2, 3)
    step = jax.jit(partial(tiny.value_and_grad, mesh=mesh))
    _assert_near(step(params, batch), jax.jit(jax.value_and_grad(tiny.unsharded_loss))(params, batch))
    halves = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), params)
    batch["x_MND"] = jnp.asarray(batch["x_MND"], jnp.bfloat16)
    _, gradients = jax.eval_shape(step, halves, batch)
    assert {gradient.dtype for gradient in gradients.values()} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_as_a_program_it_prints_the_table_and_the_figures_that_its_docstring_shows():
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    command = [sys.executable, "-W", "error", str(PATH)]
    printed = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True).stdout
    shown = PATH.read_text()
    for line in printed.splitlines()[:4]:
        assert line.strip() in shown
    assert float(printed.split("from one device ")[1].split()[0]) < 1e-5
    sizes = [[float(size) for size in re.findall(r"(\d+\.\d+) MB", text)] for text in (printed, shown)]
    np.testing.assert_allclose(*sizes, rtol=0.2)  # another version of XLA may use less


def test_it_is_short_and_needs_jax_and_numpy_alone():
    text = PATH.read_text()
    assert len(text.splitlines()) <= 200
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported - sys.stdlib_module_names == {"jax", "numpy"}

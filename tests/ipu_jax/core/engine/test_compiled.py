"""Test the compiled program: the order of operations in a tick, the copies that are made, and its size."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax import Pipeline, Stage
from support.compiled_text import computations


def exchanges(hlo: str) -> list[str]:
    """Return the names of the computations that contain an exchange."""
    return [name for name, body in computations(hlo).items() if any(" collective-permute" in line for line in body)]


def body_of(line: str) -> str | None:
    """Return the name of a while's body, or None for an instruction that is not a while."""
    found = re.search(r" while\(.*body=%?([\w.\-]+)", line)
    return found[1] if found else None


def tick_of(hlo: str) -> list[str]:
    """Return the computation of a tick, which every IPU runs in every tick: the one that has the exchanges' guards."""
    inner = exchanges(hlo)
    (tick,) = [body for body in computations(hlo).values() if any(body_of(line) in inner for line in body)]
    return tick


def text_of(program: Any) -> str:
    text = program.as_text()
    assert text is not None
    return text


@pytest.mark.fast("zb-h1")
@pytest.mark.parametrize("schedule", ["grouped", "1f1b", "sequential", "zb-h1"])
def test_products_and_exchanges_run_in_their_guards_and_exchanges_come_last(schedule):
    """Without a guard, all IPUs would wait for each other in every tick, also where none of them sends. If an exchange
    stood before a task, an IPU would wait for its neighbour's task before it begins its own."""
    hlo = text_of(compiled(4, schedule))
    # three layers: forward, and backward to weights and to all inputs but x
    assert len(re.findall(r" dot\(", hlo)) >= 8
    outside = r" (dot|convolution|custom-call)\(|kind=kCustom| collective-permute"
    assert not [line for line in tick_of(hlo) if re.search(outside, line)]
    guards = [body in exchanges(hlo) for line in tick_of(hlo) if (body := body_of(line))]
    assert guards[-2:] == [True, True]
    assert guards.count(True) == 2
    assert guards.count(False) >= 4


def cross_entropy(p, x, mb):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), mb["labels"][:, None], axis=1))


def remat_kernel(p, x, mb):
    return jnp.mean(jax.checkpoint(lambda x: jnp.tanh(x @ x.T) @ jnp.sin(x @ x.T))(x))


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "schedule"), [(cross_entropy, "grouped"), (remat_kernel, "sequential")])
def test_no_backward_of_a_last_stage_is_lifted_out_of_its_guard(loss, schedule):
    pipeline = Pipeline(
        [Stage(lambda w, x, mb: jnp.tanh(mb["x"] @ w), params="w", ipu=0), Stage(loss, ipu=1)],
        schedule=schedule,
        gradient_accumulation=5,
    )
    params = pipeline.shard({"w": np.ones((6, 7), np.float32)})
    batch = {"x": np.ones((5, 13, 6), np.float32), "labels": np.zeros((5, 13), np.int32)}
    arithmetic = r"= \S*\[13(,\d+)*\]\S* (fusion|dot|scatter|reduce|custom-call)\("
    hlo = text_of(jax.jit(pipeline.value_and_grad).lower(params, batch).compile())
    assert re.search(arithmetic, hlo)
    outside = [line for line in tick_of(hlo) if re.search(arithmetic, line)]
    assert not outside, outside


# memory, messages and copies

MLP = (48, 160, 80, 10)


def unlike_pipeline(m: int, schedule: str):
    """Return a small pipeline like MNIST's: an MLP on one IPU, a classifier on the other."""

    def mlp(p, x, mb):
        return jax.nn.relu(jax.nn.relu(mb["x"] @ p["w0"] + p["b0"]) @ p["w1"] + p["b1"])

    def classifier(p, x, mb):
        chances = jax.nn.log_softmax(x @ p["w"] + p["b"])
        return -jnp.mean(jnp.take_along_axis(chances, mb["labels"][:, None], axis=1))

    d0, d1, d2, classes = MLP
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(scale=0.1, size=shape).astype(np.float32)
    pipeline = Pipeline(
        [Stage(mlp, params="mlp", ipu=0), Stage(classifier, params="classifier", ipu=1)],
        schedule=schedule,
        gradient_accumulation=m,
    )
    params = pipeline.shard(
        {
            "mlp": {"w0": normal(d0, d1), "b0": normal(d1), "w1": normal(d1, d2), "b1": normal(d2)},
            "classifier": {"w": normal(d2, classes), "b": normal(classes)},
        }
    )
    return pipeline, params, {"x": normal(m, 8, d0), "labels": np.zeros((m, 8), np.int32)}


_programs = {}


def compiled(m: int, schedule: str):
    """Return the compiled program of `unlike_pipeline`, compiled once for all tests."""
    if (m, schedule) not in _programs:
        pipeline, params, batch = unlike_pipeline(m, schedule)
        _programs[m, schedule] = jax.jit(pipeline.value_and_grad).lower(params, batch).compile()
    return _programs[m, schedule]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["grouped", "sequential"])
def test_the_program_is_no_longer_for_more_micro_batches(schedule):
    few, many = (text_of(compiled(m, schedule)) for m in (4, 64))
    count = lambda hlo: len(re.findall(r" collective-permute(?:-start)?\(", hlo))
    assert count(few) == count(many) == 2  # an activation, and a gradient
    assert abs(len(many) - len(few)) <= 0.05 * len(few)


@pytest.mark.fast("zb-h1")
@pytest.mark.parametrize("schedule", ["grouped", "sequential", "zb-h1"])
def test_no_gradient_accumulator_is_copied_in_a_tick(schedule):
    hlo = text_of(compiled(4, schedule))
    d0, d1, d2, _classes = MLP
    large = {f"f32[{d1 * d2}]", f"f32[{d0 * d1}]", f"f32[{d1},{d2}]", f"f32[{d0},{d1}]"}
    assert all(shape in hlo for shape in large)
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.MULTILINE)
    assert entry
    for name, body in computations(hlo).items():
        if name != entry[1]:
            copies = [line for line in body if re.search(r"= (\S+?)(\{\S*)? copy(?:-start)?\(", line)]
            assert not [line for line in copies if any(shape in line.split(" copy")[0] for shape in large)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unlike", "options"),
    [
        (False, {}),
        (True, {}),
        (False, {"schedule": "zb-h1"}),
        (False, {"recompute": "all"}),
        (False, {"recompute": "none"}),
    ],
    ids=["like stages", "unlike stages", "zb-h1", "recompute all", "recompute none"],
)
def test_a_scan_over_layers_stacks_neither_their_gradients_nor_copies_of_their_weights(unlike, options):
    """Besides the accumulators, which are outputs, a step takes less than half of the bytes of an IPU's weights."""
    d, layers = 128, 4

    def blocks(w, x, mb):
        step = lambda h, w: (h + jnp.tanh(h @ w["a"]) @ w["b"], None)
        return jax.lax.scan(step, mb["x"] if x is None else x, w)[0]

    def last(w, x, mb):
        return jnp.mean((x @ w) ** 2) if unlike else jnp.mean(blocks(w, x, mb) ** 2)

    schedule, how = options.get("schedule", "grouped"), {"recompute": options.get("recompute", "auto")}
    stages = [Stage(blocks, params="first", ipu=0, **how), Stage(last, params="last", ipu=1, **how)]
    stack = {"a": np.zeros((layers, d, d), np.float32), "b": np.zeros((layers, d, d), np.float32)}
    pipeline = Pipeline(stages, gradient_accumulation=4, schedule=schedule)
    params = pipeline.shard({"first": stack, "last": np.zeros((d, d + 1), np.float32) if unlike else stack})
    batch = {"x": jax.ShapeDtypeStruct((4, 2, d), np.float32)}
    memory = jax.jit(pipeline.value_and_grad).lower(params, batch).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < sum(leaf.nbytes for leaf in stack.values()) / 2

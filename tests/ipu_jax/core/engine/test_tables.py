"""Test tables of which a micro-batch reads some rows: the engine adds their gradients in place.

The oracle is a chain of products and look-ups in plain jax, in float32.
"""

import itertools
import os
import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from ipu_jax import Pipeline, Stage, make_mesh, make_train_step
from support.against_plain import assert_equals_plain
from support.compiled_text import computations

D, ROWS = 5, 6
READS = {
    "rows": lambda t, ids: t[ids],
    "take": lambda t, ids: jnp.take(t, ids, axis=0),
    "clip": lambda t, ids: t.at[ids].get(mode="clip"),
    "scan": lambda t, ids: lax.scan(lambda h, _: (h, jnp.take(t, ids, axis=0)), 0, None, length=1)[1][0],
    "checkpoint": lambda t, ids: jax.checkpoint(lambda t: jnp.take(t, ids, axis=0))(t),
    "wide": lambda t, ids: t.astype("float32")[ids].astype(t.dtype),
    "twice": lambda t, ids: jnp.concatenate([t[ids[:2]], jnp.take(t, ids[2:], axis=0)]),
}


def stage(p, x, mb, *, k, last, read):
    """Return the rows of this stage's table that the micro-batch names, plus x @ w; of the last one, the loss."""
    terms = [READS[read](p["t"], mb["ids"][:, k])] if "t" in p else []
    y = sum(terms if x is None else [*terms, x @ p["w"]], start=jnp.zeros((), p["t" if "t" in p else "w"].dtype))
    return jnp.mean(jnp.square(y.astype("float32"))) if last else y


def model(stages: int, dtype: str, replicas: int, m: int, read: str):
    """Return the stages, their whole weights and a batch; stage k has a table if k is even."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: (rng.normal(size=shape) / 2).astype(dtype)
    params = {
        str(k): ({"w": normal(D, D)} if k else {}) | ({"t": normal(11 + 4 * k, D)} if k % 2 == 0 else {})
        for k in range(stages)
    }
    ids = rng.integers(0, 11, (replicas, m, ROWS, stages)).astype(np.int32)
    ids[..., 0, :] = ids[..., 1, :]  # at least one row is read twice
    fns = [partial(stage, k=k, last=k == stages - 1, read=read) for k in range(stages)]
    return fns, params, {"ids": ids if replicas > 1 else ids[0]}


def product_of_all(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    """Return the mean loss of all micro-batches in float32, by plain indexing."""
    x: Any = None
    for k, p in enumerate(params.values()):
        wide = jax.tree.map(lambda leaf: leaf.astype("float32"), p)
        y = wide["t"][batch["ids"][..., k]] if "t" in p else 0.0
        x = y if x is None else y + x @ wide["w"]
    return jnp.mean(jnp.square(x))


CASES = [
    pytest.param(1, 1, "float32", "grouped", "rows", "auto", id="one-ipu"),
    pytest.param(2, 1, "float32", "1f1b", "take", "auto", id="1f1b"),
    pytest.param(2, 2, "bfloat16", "zb-h1", "scan", "none", id="replicas-zb-h1"),
    pytest.param(4, 1, "float32", "zb-h1", "rows", "auto", id="zb-h1"),
    pytest.param(4, 2, "bfloat16", "interleaved", "wide", "auto", id="interleaved"),
    pytest.param(2, 1, "float32", "gpipe", "twice", "all", id="gpipe-recompute"),
    pytest.param(8, 1, "float32", "sequential", "clip", "auto", id="sequential"),
    pytest.param(8, 1, "bfloat16", "1f1b", "checkpoint", "auto", id="eight-ipus"),
]


@pytest.mark.fast("replicas-zb-h1")
@pytest.mark.parametrize(("ipus", "replicas", "dtype", "schedule", "read", "recompute"), CASES)
def test_gradients_of_tables_on_several_ipus(ipus, replicas, dtype, schedule, read, recompute):
    m = 2 * ipus + 1 if schedule == "interleaved" else 5
    fns, params, batch = model(max(ipus, 2), dtype, replicas, m, read)
    stages = [Stage(fn, params=str(k), ipu=k % ipus, recompute=recompute) for k, fn in enumerate(fns)]
    pipeline = Pipeline(stages, mesh=make_mesh(replicas, ipus), gradient_accumulation=m, schedule=schedule)
    bound = 1e-5 if dtype == "float32" else 4e-2
    assert_equals_plain(pipeline, params, batch, lambda params: product_of_all(params, batch), rtol=bound)


# what the compiled program makes

VOCABULARY, WIDTH, MICRO_BATCHES = 1009, 24, 4
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "optimization-barrier", "opt-barrier")
IN_PLACE = ("scatter", "dynamic-update-slice")


def tied(p, ids):
    rows = p["t"][ids]
    return rows + jnp.tanh(rows @ p["t"][:WIDTH])


def scan(p, ids):
    start = jnp.zeros((len(ids), WIDTH))
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h + jnp.take(p["t"], ids + i, axis=0)), start)


def stacked_in_scan(p, ids):
    start = jnp.zeros((len(ids), WIDTH))
    return lax.scan(lambda h, t: (jnp.tanh(h + t[ids]), None), start, p["fields"])[0]


def linen(p, ids):
    return nn.Embed(VOCABULARY, WIDTH, dtype="float32").apply({"params": {"embedding": p["t"]}}, ids)


def by_nnx(p, ids):
    module = nnx.eval_shape(lambda: nnx.Embed(VOCABULARY, WIDTH, rngs=nnx.Rngs(0)))
    module.embedding.set_value(p["t"])
    return module(ids)


LOOKUPS = {
    "rows": lambda p, ids: p["t"][ids],
    "twice": lambda p, ids: p["t"][ids] * jnp.take(p["t"], ids[::-1], axis=0),
    "two tables": lambda p, ids: p["t"][ids] + p["u"][ids],
    "scan": scan,
    "slice": lambda p, ids: jnp.stack([lax.dynamic_slice(p["t"], (i, 0), (1, WIDTH))[0] for i in ids[:2]]),
    "padded": lambda p, ids: p["t"][:-7][ids],
    "stacked": lambda p, ids: sum(p["fields"][k][ids] for k in range(3)),
    "stacked in a scan": stacked_in_scan,
    "tied": tied,
    "linen": linen,
    "nnx": by_nnx,
}
TABLES = {"two tables": ("t", "u"), "stacked": ("fields",), "stacked in a scan": ("fields",)}
SHAPES = {"t": (VOCABULARY, WIDTH), "u": (VOCABULARY, WIDTH), "fields": (3, VOCABULARY, WIDTH)}


def model_of(lookup: str, dtype: str, layout: str, schedule: str) -> tuple[Pipeline, dict[str, Any], np.ndarray]:
    """Return a pipeline of a look-up, or all, and a loss, whose weights, if it has any, share the look-up's slots."""
    lookups = LOOKUPS if lookup == "all" else [lookup]
    of_each = {name: {of: np.zeros(SHAPES[of], dtype) for of in TABLES.get(name, ("t",))} for name in lookups}
    params: dict[str, Any] = {"table": of_each}

    def looked_up(p, x, ids):
        rows = [LOOKUPS[name](p[name], ids).astype("float32") for name in lookups]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows)

    first = Stage(looked_up, params="table", ipu=0)
    if layout == "alone":
        last = Stage(lambda p, x, mb: jnp.mean(jnp.square(x)), ipu=1)
    else:
        params["last"] = np.zeros((WIDTH, WIDTH), dtype)
        last = Stage(lambda w, x, mb: jnp.mean(jnp.square(x @ w.astype("float32"))), params="last", ipu=1)
    pipeline = Pipeline([first, last], gradient_accumulation=MICRO_BATCHES, schedule=schedule)
    return pipeline, params, np.zeros((MICRO_BATCHES, 4), np.int32)


def compiled(lowered: Any) -> Any:
    """Return a program compiled as users do, whatever the tests' own flags say."""
    flag = "xla_cpu_use_fusion_emitters"
    return lowered.compile(compiler_options={flag: True} if flag in os.environ["XLA_FLAGS"] else {})


def gradient_of(*case: str) -> Any:
    pipeline, params, ids = model_of(*case)
    return compiled(jax.jit(pipeline.value_and_grad).lower(pipeline.shard(params), ids))


def made_in_a_tick(hlo: str, elements: int) -> list[str]:
    """Return the instructions in loops whose result has as many elements, or more, and is not an update in place."""
    bodies = computations(hlo)
    waiting = [name for body in bodies.values() for line in body for name in re.findall(r"body=%?([\w.\-]+)", line)]
    seen, found = set(), []
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in bodies[name]:
            made = re.match(r"(?:ROOT )?\S+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line)
            waiting += re.findall(r"to_apply=%?([\w.\-]+)", line) + re.findall(r"body=%?([\w.\-]+)", line)
            if made is None or np.prod(list(map(int, made[1].split(",")))) < elements or made[2] in FREE:
                continue
            fused = re.search(r"calls=%?([\w.\-]+)", line)
            roots = [line for line in bodies[fused[1]] if line.startswith("ROOT")] if fused else [line]
            if not any(f" {op}(" in root for op in IN_PLACE for root in roots):
                found.append(line)
    return found


PROGRAMS = [
    ("all", "float32", "packed", "grouped"),
    ("rows", "bfloat16", "alone", "zb-h1"),
    *itertools.product(LOOKUPS, ["float32"], ["packed"], ["grouped"]),
    *itertools.product(["rows", "padded", "stacked"], ["float32"], ["alone"], ["grouped"]),
    *itertools.product(["linen"], ["bfloat16"], ["alone", "packed"], ["zb-h1"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("lookup", "dtype", "layout", "schedule"), PROGRAMS)
def test_nothing_as_large_as_the_table_is_made_in_a_tick(lookup, dtype, layout, schedule):
    program = gradient_of(lookup, dtype, layout, schedule)
    assert not made_in_a_tick(program.as_text(), VOCABULARY * WIDTH // 2)
    # The accumulators are outputs; those of a half type are float32, and rounded in the end.
    held = VOCABULARY * WIDTH * 4 if dtype == "bfloat16" else 0
    assert program.memory_analysis().temp_size_in_bytes < held + VOCABULARY * WIDTH * 4 / 2


@pytest.mark.slow
def test_a_gradient_that_is_as_large_as_the_table_is_seen(monkeypatch):
    monkeypatch.setitem(LOOKUPS, "scaled", lambda p, ids: (p["t"] * 3)[ids])
    assert made_in_a_tick(gradient_of("scaled", "float32", "packed", "grouped").as_text(), VOCABULARY * WIDTH // 2)


@pytest.mark.parametrize(
    ("rows", "updated"),
    [
        ([4000, 4000], {4000}),
        ([4000, 500], {500 * 32, 4000 * 32}),
        ([4000, 1500, 1000, 20], {1500 * 32, 4000 * 32}),
    ],
    ids=["equal", "two", "four"],
)
@pytest.mark.slow
def test_an_update_of_tables_is_in_place_and_as_long_as_each_ipu_needs(rows, updated):
    """Tables share a slot; a length is compiled for each that is at most half of the next, and saves much."""
    stages = [
        Stage(lambda p, x, ids: (0 if x is None else x) + p[ids % len(p)], params=str(k), ipu=k)
        for k in range(len(rows))
    ]
    stages.append(Stage(lambda p, x, ids: jnp.mean(jnp.square(x)), ipu=len(rows) - 1))
    pipeline = Pipeline(stages, gradient_accumulation=2)
    random = np.random.default_rng(0)
    params: Any = {str(k): random.normal(size=(n, 32)).astype("float32") for k, n in enumerate(rows)}
    ids = random.integers(0, 4000, (2, 8)).astype("int32")
    step = make_train_step(pipeline, optax.adam(0.1))
    state = step.init(params)
    program = compiled(step.lower(state, ids))
    largest = rows[0] * 32
    assert program.memory_analysis().temp_size_in_bytes < 1.2 * largest * 4
    assert not re.findall(rf"\[(?:1,)*(?:{largest}|{rows[0]},32)\]\S* copy\(", program.as_text())
    assert {int(n) for n in re.findall(r"f32\[(\d+)(?:,32)?\]\S* sqrt\(", program.as_text())} == updated
    for _ in range(2):
        state, _ = step(state, ids)
    found = step.whole(state)["params"]

    def loss(params, ids):
        return jnp.mean(jnp.square(sum(p[ids % len(p)] for p in params.values())))

    optimizer = optax.adam(0.1)
    held, update, of_microbatch = optimizer.init(params), jax.jit(optimizer.update), jax.jit(jax.grad(loss))
    for _ in range(2):
        gradients = jax.tree.map(lambda *g: sum(g) / 2, *(of_microbatch(params, i) for i in ids))
        updates, held = update(gradients, held, params)
        params = optax.apply_updates(params, updates)
    for k in params:
        np.testing.assert_allclose(found[k], params[k], rtol=1e-5, atol=1e-5)

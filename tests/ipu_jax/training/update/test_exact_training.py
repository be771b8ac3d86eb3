"""Test that `TrainOptions(exact=True)` trains with equal bits under every schedule, recompute and number of IPUs.

Compared are losses, weights, optimizer state and stages' state after three updates, in all their bits. Each case is
compared with two IPUs under 1f1b. With `--slow=all` programs are compiled as users' are. Other runs compile with
fewer optimizations. Then operations that XLA fuses can round otherwise in another program, so nothing is fused.
"""

import functools
import os
from typing import Any

import jax
import numpy as np
import optax
import pytest

from ipu_jax import Checkpoints, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from support.exact_models import (
    ROWS,
    STATE,
    WEIGHTS,
    D,
    M,
    T,
    V,
    block,
    block_weights,
    cross_entropy,
    listed,
    narrow,
    scanned,
    tied,
    with_dropout_and_state,
)
from support.refusals import refusals, refused
from support.trained import bits

UPDATES = 3
BATCH: Any = {
    "ids": np.random.default_rng(0).integers(0, V, (2, M, ROWS, T)).astype(np.int32),
    "labels": np.random.default_rng(1).integers(0, V, (2, M, ROWS, T)).astype(np.int32),
}  # of two replicas
MICROBATCH = jax.tree.map(lambda leaf: leaf[0, 0], BATCH)
YES: Any = "yes"
ADAMW = optax.adamw(1e-2)


@pytest.fixture(autouse=True)
def _fused_as_users_alone(monkeypatch):
    flags = os.environ["XLA_FLAGS"]
    if "optimization_level=0" in flags:
        monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_disable_hlo_passes=fusion")


READ = {
    narrow: ("table", "positions", "narrow", "out"),
    listed: ("table", "positions", "layers", "out"),
    scanned: ("table", "positions", "stacked", "out"),
    with_dropout_and_state: ("table", "positions", "layers", "out"),
    tied: ("table", "positions", "layers"),
}


def cut(loss: Any, ipus: int = 2, schedule: str = "1f1b", recompute: str = "auto", replicas: int = 1) -> Any:
    """Return the pipeline and the first weights."""
    params = {name: WEIGHTS[name] for name in READ[loss]}
    how: Any = {"state": STATE} if loss is with_dropout_and_state else {}
    how |= {"ipus": ipus, "replicas": replicas, "gradient_accumulation": M, "schedule": schedule}
    return Pipeline.from_function(loss, params, MICROBATCH, recompute=recompute, **how), params


def first_state(step: Any, params: Any) -> Any:
    return step.init(params, **({"stages": STATE, "key": jax.random.key(3)} if step.random else {}))


def run(step: Any, state: Any, updates: int = UPDATES) -> tuple[Any, list[Any]]:
    """Return the last state, and the losses."""
    batch = BATCH if step.model.replicas == 2 else jax.tree.map(lambda leaf: leaf[0], BATCH)
    losses = []
    for _ in range(updates):
        state, outputs = step(state, batch)
        losses.append(np.asarray(outputs.loss))
    return state, losses


def step_of(pipeline: Pipeline, optimizer: Any = ADAMW, *, exact: bool = True, **options: Any) -> Any:
    return make_train_step(pipeline, optimizer, TrainOptions(exact=exact, **options))


def trained(pipeline: Pipeline, params: Any, optimizer: Any = ADAMW, **options: Any) -> dict[str, Any]:
    """Return the losses and the whole state after all updates, in bits by name."""
    step = step_of(pipeline, optimizer, **options)
    state, losses = run(step, first_state(step, params))
    return by_name(losses, step.whole(state))


def by_name(losses: Any, whole: Any) -> dict[str, Any]:
    tree = {"losses": losses, **whole}
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    return dict(zip(names, bits(tree), strict=True))


@functools.cache
def on_two_ipus(loss: Any, *, replicas: int = 1, **options: Any) -> Any:
    return trained(*cut(loss, replicas=replicas), **options)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    assert {"['losses'][0]", "['step']"} < found.keys()
    assert any(".mu" in name for name in found)
    return [name for name, leaf in found.items() if leaf != expected[name]]


ELSEWHERE = [
    *((2, name, "auto") for name in ("zb-h1", "grouped", "zbv")),
    *((4, name, "auto") for name in ("1f1b", "zb-h1")),
    *((2, "1f1b", name) for name in ("none", "all")),
    (4, "looped", "none"),
    (1, "sequential", "auto"),
]
CLIPPED = {"optimizer": optax.chain(optax.clip_by_global_norm(0.1), ADAMW)}
FEW = [(2, "zb-h1"), (4, "1f1b"), (4, "zb-h1")]
PROGRAMS: list[Any] = [
    *((loss, one, {}) for one in ELSEWHERE for loss in (narrow, listed, scanned, with_dropout_and_state)),
    *((narrow, one, {"precision": "16.32"}) for one in ELSEWHERE),  # a larger model would be compiled for a minute
    *((tied, one, {}) for one in FEW),  # each IPU reads the tied weights once
    # norms over leaves that are on one IPU
    *((listed, one, how) for one in [*FEW, (1, "sequential")] for how in (CLIPPED, {"max_gradient_norm": 0.1})),
]


name_of = lambda part: part.__name__ if callable(part) else "-".join(map(str, part)) or "plain"


@pytest.mark.fast("narrow-2-zb-h1-auto-plain", "narrow-1-sequential-auto-plain", "narrow-2-1f1b-none-plain")
@pytest.mark.parametrize(("loss", "elsewhere", "how"), PROGRAMS, ids=name_of)
def test_schedules_ipus_and_recompute_change_no_bit(loss, elsewhere, how):
    assert differing(trained(*cut(loss, *elsewhere), **how), on_two_ipus(loss, **how)) == []


@pytest.mark.slow
def test_by_default_they_change_bits():
    expected = on_two_ipus(listed, exact=False)
    changed = [differing(trained(*cut(listed, *one), exact=False), expected) for one in ELSEWHERE]
    assert all(changed[3:5]), "on four IPUs"
    assert any("['losses'][2]" in names for names in changed)


def staged(places: list[int], schedule: str) -> tuple[Pipeline, Any]:
    last = len(places) - 1
    stages = [
        Stage(lambda w, x, mb: block(w, jax.nn.one_hot(mb["ids"], D)), "0", places[0]),
        *(Stage(lambda w, x, mb: block(w, x), str(k), places[k]) for k in range(1, last)),
        Stage(lambda w, x, mb: cross_entropy(x @ w["out"], mb), str(last), places[last]),
    ]
    weights = {str(k): block_weights(k) for k in range(last)} | {str(last): {"out": WEIGHTS["out"]}}
    mesh = make_mesh(1, 1 + max(places))
    return Pipeline(stages, mesh=mesh, gradient_accumulation=M, schedule=schedule), weights


@functools.cache
def in_a_line() -> Any:
    return trained(*staged([0, 1, 2, 3], "1f1b"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "schedule"),
    [([0, 0, 1, 1], "1f1b"), ([3, 1, 0, 2], "zb-h1"), ([0, 1, 1, 0], "zb-wave"), ([0, 0, 0, 0], "sequential")],
    ids=lambda one: "".join(map(str, one)),
)
def test_placements_of_stages_change_no_bit(places, schedule):
    assert differing(trained(*staged(places, schedule)), in_a_line()) == []


@pytest.mark.slow
@pytest.mark.parametrize("shard_optimizer", [True, False])
@pytest.mark.parametrize("elsewhere", [(2, "zb-h1", "auto"), (4, "1f1b", "none"), (4, "zb-h1", "all")])
@pytest.mark.parametrize("loss", [scanned, with_dropout_and_state])
def test_two_replicas_have_equal_bits_too(loss, elsewhere, shard_optimizer):
    expected = on_two_ipus(loss, replicas=2, shard_optimizer=True)
    found = trained(*cut(loss, *elsewhere, replicas=2), shard_optimizer=shard_optimizer)
    assert differing(found, expected) == []


@pytest.mark.slow
def test_a_run_that_goes_on_on_other_ipus_ends_with_the_bits_of_one_that_was_not_stopped(tmp_path):
    step = step_of(cut(scanned, 4)[0])
    with Checkpoints(tmp_path, step) as checkpoints:
        state, _ = run(step, first_state(step, cut(scanned)[1]), 2)
        checkpoints.save(state, now=True)
    state, losses = run(step, state, 3)
    other = step_of(cut(scanned, 2, "zb-h1")[0])
    with Checkpoints(tmp_path, other) as checkpoints:
        restored = checkpoints.restore(first_state(other, cut(scanned)[1]), resume="must")
    assert restored is not None
    assert restored.step == 2
    resumed, losses_then = run(other, restored.state, 3)
    assert differing(by_name(losses_then, other.whole(resumed)), by_name(losses, step.whole(state))) == []


@refusals(
    (
        lambda: make_train_step(lambda w, mb: (mb @ w).sum(), ADAMW, TrainOptions(exact=True)),
        *("exact=True", "Pipeline", "leave it out"),
    ),
    (lambda: TrainOptions(exact=YES), "exact='yes'", "True or False"),
)
def test_what_cannot_be_exact_is_refused(call, holds):
    with refused(*holds):
        call()

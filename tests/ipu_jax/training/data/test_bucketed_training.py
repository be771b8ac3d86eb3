"""Train on examples of unlike lengths in buckets, against unpadded examples one by one on one device.

The model sums over the tokens before each token, so that padding after them changes nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, Pipeline, Stage, TrainOptions, fit, make_train_step
from support.refusals import compilations
from support.trained import compiled_quickly

_compiled_quickly = compiled_quickly()

V, D, SIZES = 13, 6, (8, 16, 32)
RANDOM = np.random.default_rng(0)
EXAMPLES = [
    {
        "tokens": RANDOM.integers(0, V, n),
        "targets": RANDOM.integers(0, V, n),
        "weights": np.ones(n, np.float32),
        "id": k,
    }
    for k, n in enumerate(RANDOM.choice([*range(1, 9), *range(9, 17), *range(17, 33, 2)], 240))
]
WEIGHTS = {
    "embed": RANDOM.normal(size=(V, D)).astype(np.float32),
    **{f"body {k}": RANDOM.normal(size=(D, D)).astype(np.float32) / 3 for k in range(2)},
    "head": RANDOM.normal(size=(D, V)).astype(np.float32),
}


def embed(w: Any, x: Any, mb: Any) -> Any:
    return w[mb["tokens"]]


def body(w: Any, x: Any, mb: Any) -> Any:
    return x + jnp.tanh(jnp.cumsum(x, axis=-2) @ w / 4)


def head(w: Any, x: Any, mb: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, mb["targets"])
    return (losses * mb["weights"]).sum(), mb["weights"].sum()


def whole(weights: Any, mb: Any) -> Any:
    x = embed(weights["embed"], None, mb)
    for k in range(2):
        x = body(weights[f"body {k}"], x, mb)
    return head(weights["head"], x, mb)


def make_step(ipus: int, replicas: int = 1, k: int = 1, m: int = 2, *, is_cut: bool = False) -> Any:
    functions = {"embed": embed, "body 0": body, "body 1": body, "head": head}
    if is_cut:
        rows = {name: np.stack([leaf] * 2) for name, leaf in EXAMPLES[0].items()}
        pipeline = Pipeline.from_function(whole, WEIGHTS, rows, ipus=ipus, gradient_accumulation=m)
    else:
        stages = [Stage(fn, params=name, ipu=at * ipus // 4) for at, (name, fn) in enumerate(functions.items())]
        pipeline = Pipeline(stages, gradient_accumulation=m)
    options = TrainOptions(weighted=True, replication_factor=replicas, device_iterations=k, outputs="all")
    return make_train_step(pipeline, optax.sgd(1.0), options)


def feed_of(step: Any, **options: Any) -> Feed:
    return Feed(EXAMPLES, items="examples", step=step, micro_batch=2, buckets=SIZES, seed=1, **options)


@jax.jit
@jax.value_and_grad
def dense(weights: Any, example: Any) -> Any:
    x = embed(weights["embed"], None, example)
    for k in range(2):
        x = body(weights[f"body {k}"], x, example)
    losses = -jax.nn.log_softmax(x @ weights["head"])[jnp.arange(len(x)), example["targets"]]
    return losses.sum()


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(("ipus", "replicas"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)])
def test_an_update_has_the_loss_and_gradients_of_unpadded_examples(ipus, replicas, is_cut):
    step = make_step(ipus, replicas, m=max(2, ipus), is_cut=is_cut)
    state, seen = step.init(WEIGHTS), set()
    with feed_of(step) as feed:
        for batch in feed.epoch():
            size = batch.data["tokens"].shape[-1]
            if size in seen and batch.updates:
                continue
            seen.add(size)
            before = jax.tree.map(np.asarray, step.whole(state)["params"])
            chosen = [EXAMPLES[k] for k in np.asarray(batch.data["id"]).reshape(-1)]
            assert len({len(one["tokens"]) for one in chosen}) > 1
            found = [dense(before, one) for one in chosen]
            count = sum(len(one["tokens"]) for one in chosen)
            total = jax.tree.map(lambda *leaves: sum(leaves), *(gradients for _, gradients in found))
            state, outputs = step(state, batch)
            np.testing.assert_allclose(outputs.loss, sum(loss for loss, _ in found) / count, rtol=1e-5)
            after = step.whole(state)["params"]
            for name, weight in before.items():  # of a rate of 1
                np.testing.assert_allclose((weight - after[name]) * count, total[name], rtol=1e-4, atol=3e-4)
    assert seen == {*SIZES}


@pytest.mark.slow
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_sixty_updates_compile_one_program_per_bucket_and_none_twice(k, is_cut):
    step, sizes, late = make_step(2, k=k, is_cut=is_cut), set[int](), 0
    state = step.init(WEIGHTS)
    with feed_of(step) as feed:
        while int(state.step) < 60:
            batch = next(feed)
            size, before = batch.arrays["tokens"].shape[-1], len(compilations)
            state, outputs = step(state, batch)
            jax.block_until_ready(outputs.loss)
            late += len(compilations) - before if size in sizes and batch.updates == k else 0
            sizes.add(size)
    assert (sizes, step._program._cache_size(), late) == ({*SIZES}, 3, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "is_cut"), [(1, False), (2, False), (2, True)])
def test_fit_continues_from_a_checkpoint_with_the_same_losses(k, is_cut, tmp_path):
    """7 updates end inside a call of 2, and inside an epoch."""
    said: list[str] = []
    step = make_step(2, k=k, is_cut=is_cut)

    def evaluate(state: Any) -> dict[str, float]:
        with feed_of(step, shuffle=False) as feed:
            return {"loss": float(np.mean([step.loss(state, batch)[0] for batch in feed.epoch()]))}

    def trained(updates: int, **options: Any) -> Any:
        with feed_of(step) as feed:
            state = step.init(WEIGHTS)
            return fit(step, state, feed, updates=updates, evaluate=evaluate, say=said.append, **options)

    whole = trained(70, progress=True, report=tmp_path / "run.html")
    first = trained(7, checkpoints=tmp_path / "saved")
    rest = trained(70, checkpoints=tmp_path / "saved")
    assert np.concatenate([first.losses, rest.losses]).tolist() == whole.losses.tolist()
    assert whole.evaluations[-1] == rest.evaluations[-1]
    assert (tmp_path / "run.html").stat().st_size > 10_000
    assert [line for line in said if line.startswith("70 updates") and "samples/s (median)" in line]

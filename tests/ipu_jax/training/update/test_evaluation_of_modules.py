"""Test that a module with dropout and batch norm is evaluated without dropout, by its running averages.

It is trained and evaluated as a function; the figure is compared with the module itself, whole, on one device.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Feed, Pipeline, fit, make_train_step
from ipu_jax.steps import Evaluation
from support.trained import compiled_quickly

B, D, LAYERS, M = 4, 3, 2, 2

_compiled_quickly = compiled_quickly()


def examples(count: int, seed: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)
    return {"x": 3 * x + 1, "y": x.sum(-1)}


def mse(y, batch):
    return jnp.mean((y - batch["y"]) ** 2)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for _ in range(LAYERS):
            y = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(D)(x))
            x = x + nn.Dropout(0.5, deterministic=not train)(nn.tanh(y))
        return x.sum(-1)


MODEL = Linen()


def loss_of_training(params, stats, batch, key):
    both: Any = {"params": params, "batch_stats": stats}
    y, new = MODEL.apply(both, batch["x"], train=True, rngs={"dropout": key}, mutable=["batch_stats"])
    return mse(y, batch), new["batch_stats"]


def evaluated(params, stats, x) -> Any:
    return MODEL.apply({"params": params, "batch_stats": stats}, x, train=False)


def test_a_module_is_evaluated_without_dropout_and_by_its_averages():
    train, data = examples(2 * M * B, 1), examples(M * B, 2)
    one = {name: leaf[:B] for name, leaf in train.items()}
    variables = jax.jit(lambda key: MODEL.init(key, one["x"], train=False))(jax.random.key(0))
    params, stats = variables["params"], variables["batch_stats"]
    pipeline = Pipeline.from_function(loss_of_training, params, one, state=stats, ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.sgd(0.05))
    state = step.init(params, stages=stats, key=jax.random.key(3))
    loss = lambda params, stats, batch: mse(evaluated(params, stats, batch["x"]), batch)
    evaluation = Evaluation(step.model.forward(loss, one), data)
    plain = jax.jit(evaluated)
    figure = lambda params, stats: np.mean(np.square(plain(params, stats, data["x"]) - data["y"]))
    with Feed(train, step=step, micro_batch=B) as feed:
        result = fit(step, state, feed, evaluate=evaluation, progress=False, say=list)
    whole = step.whole(result.state)
    expected = figure(whole["params"], whole["stages"])
    assert abs(figure(whole["params"], stats) / expected - 1) > 0.01  # it depends on the averages
    [(updates, found)] = result.evaluations
    assert updates == 2
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)

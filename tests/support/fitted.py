"""A pipeline of two stages to train with `fit`, and plain SGD on the same rows, one device and no code of ours."""

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.steps import StopRequest

B, M, D, RATE = 3, 2, 4, 0.05


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weights():
    return {"body": normal(0, D, 5), "head": normal(1, 5)}


def make_step(k=1, ipus=2, m=M, optimizer=None, **options):
    """Return a step of its own, for a test that changes it, or whose state remembers updates that were not finite."""
    pipeline = Pipeline(
        [
            Stage(lambda p, x, mb: jnp.tanh(mb @ p), params="body", ipu=0),
            Stage(lambda p, x, mb: jnp.mean((x @ p - 1) ** 2), params="head", ipu=ipus - 1),
        ],
        mesh=make_mesh(1, ipus),
        gradient_accumulation=m,
    )
    options = {"device_iterations": k, "outputs": "all", **options}
    return make_train_step(pipeline, optax.sgd(RATE) if optimizer is None else optimizer, TrainOptions(**options))


@functools.cache
def shared_step(k=1, m=M, **options):
    """Return the step that all tests share, and so the programs that it has compiled."""
    return make_step(k, m=m, **options)


@jax.jit
def _value_and_grad(w, x):
    return jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["body"]) @ w["head"] - 1) ** 2))(w)


def trained_on(batches):
    """Return losses and weights of plain SGD, an update for each of these arrays of rows."""
    w, losses = {name: jnp.asarray(value) for name, value in weights().items()}, []
    for rows in batches:
        loss, gradients = _value_and_grad(w, rows)
        w = jax.tree.map(lambda a, g: a - RATE * g, w, gradients)
        losses.append(float(loss))
    return losses, w


def twin(rows, updates, start=0):
    """Return losses and weights of plain SGD over rows in their order, `updates` of them, from update `start` of it."""
    per_epoch, size = len(rows) // (M * B), M * B
    losses, w = trained_on([rows[at * size : (at + 1) * size] for at in (n % per_epoch for n in range(updates))])
    return losses[start:], w


def assert_same_weights(step, state, expected):
    found = step.whole(state)["params"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, dict(expected))


_heard = threading.Event()


@contextlib.contextmanager
def hearing_ctrl_c() -> Iterator[None]:
    """Let this process hear Ctrl-C, which one that was started in the background ignores, and `press` know of it."""
    before, ask = signal.signal(signal.SIGINT, signal.default_int_handler), StopRequest._ask

    def heard(self: StopRequest, by: str) -> None:
        ask(self, by)
        _heard.set()

    StopRequest._ask = heard
    try:
        yield
    finally:
        StopRequest._ask = ask
        signal.signal(signal.SIGINT, before)


def press(number: int = signal.SIGINT) -> None:
    """Send this process a signal, and wait until the thread that waits for signals has seen it."""
    _heard.clear()
    os.kill(os.getpid(), number)
    assert _heard.wait(60)


class Lines(list):
    def __call__(self, line):
        self.append(line)

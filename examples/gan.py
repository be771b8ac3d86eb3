"""Train a GAN, two networks in one loss: the critic reads real points and the generator's, on four IPUs.

    IPU 0   generator      \\
    IPU 1   generator       -> made points \\
    IPU 2                     real points   -> critic, twice \\
    IPU 3                                                     -> critic, twice -> losses of both

The points lie around a ring of eight centres. One gradient trains both networks: the critic does not learn from the
generator's loss, nor the generator from the critic's, since each loss stops the other's gradient. Run it, in half a
minute: python -m examples.gan

Source: Goodfellow et al. 2014, "Generative Adversarial Networks", arXiv:1406.2661, section 3.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Feed, Pipeline, configure, fit, make_train_step, verify

CENTRES, NOISE, WIDTH, LAYERS, B, M = 8, 8, 64, 3, 64, 4


def network(layers, x):
    for w in layers[:-1]:
        x = jax.nn.leaky_relu(x @ w["kernel"] + w["bias"], 0.1)
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


def loss(params, batch):
    stop, critic = jax.lax.stop_gradient, params["critic"]
    made = network(params["generator"], batch["noise"])
    of_critic = jax.nn.softplus(-network(critic, batch["points"])) + jax.nn.softplus(network(critic, stop(made)))
    of_generator = jax.nn.softplus(-network(stop(critic), made))
    return jnp.mean(of_critic) + jnp.mean(of_generator)


def init(seed: int = 0) -> dict:
    random = np.random.default_rng(seed)

    def layers(*sizes: int) -> list:
        draw = lambda i, o: (random.normal(size=(i, o)) * (2 / i) ** 0.5).astype(np.float32)
        return [{"kernel": draw(i, o), "bias": np.zeros(o, np.float32)} for i, o in itertools.pairwise(sizes)]

    hidden = [WIDTH] * LAYERS
    return {"generator": layers(NOISE, *hidden, 2), "critic": layers(2, *hidden, 1)}


def points(seed: int, count: int) -> dict[str, np.ndarray]:
    """Return points around the centres of a ring of radius 1, and noise for the generator."""
    random = np.random.default_rng(seed)
    angles = 2 * np.pi * random.integers(CENTRES, size=count) / CENTRES
    ring = np.stack([np.cos(angles), np.sin(angles)], 1) + random.normal(scale=0.05, size=(count, 2))
    return {"points": ring.astype(np.float32), "noise": random.normal(size=(count, NOISE)).astype(np.float32)}


def reached(made: np.ndarray) -> tuple[int, float]:
    """Return at how many centres points lie, and which share of the points is within 0.25 of one."""
    angles = 2 * np.pi * np.arange(CENTRES) / CENTRES
    distances = np.linalg.norm(made[:, None] - np.stack([np.cos(angles), np.sin(angles)], 1), axis=-1)
    near = distances.min(1) < 0.25
    return len(np.unique(distances.argmin(1)[near])), near.mean()


def trained(updates: int = 1200) -> list[np.ndarray]:
    """Return 512 points that the generator makes before some updates, and after them; print what `verify` says."""
    params, data = init(), points(0, 1 << 14)
    batch = {name: rows[: M * B].reshape(M, B, -1) for name, rows in data.items()}
    one = {name: rows[0] for name, rows in batch.items()}
    pipeline = Pipeline.from_function(loss, params, one, ipus=4, gradient_accumulation=M, schedule="1f1b")
    rates: dict[Any, Any] = {"generator": optax.adam(2e-3, b1=0.5), "critic": optax.adam(2e-3, b1=0.5)}
    step = make_train_step(pipeline, optax.multi_transform(rates, {name: name for name in rates}))
    with Feed(data, step=step, micro_batch=B) as feed:
        state = fit(step, step.init(params), feed, updates=updates, say=lambda line: None).state
    make = pipeline.forward(lambda params, noise: network(params["generator"], noise), one["noise"])
    print(pipeline, verify(pipeline, state.params, batch), sep="\n")
    noise = points(1, 512)["noise"].reshape(-1, B, NOISE)
    return [np.asarray(make(weights, noise)).reshape(-1, 2) for weights in (pipeline.shard(params), state.params)]


def main() -> None:
    for when, made in zip(("before", "after"), trained(), strict=True):
        modes, share = reached(made)
        print(f"{when}: the generator's points are at {modes} of {CENTRES} centres, {share:.0%} of them near one")


if __name__ == "__main__":
    configure(4)
    main()

"""Train a U-Net, whose skips nest over five stages on five IPUs, to take the noise off images.

    IPU 0   down 0 ----------------------------------> up 0 -> loss    IPU 4
    IPU 1     down 1 ---------------------> up 1                       IPU 3
    IPU 2             bottom of the U

The function says nothing of stages: it adds to a list on the way down, and takes from it on the way up. Each skip
travels with the messages from the IPU that makes it to the IPU that needs it, and its gradient travels back. Run it, in
half a minute: python -m examples.unet

Source: Ronneberger et al. 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation", arXiv:1505.04597.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Feed, Pipeline, configure, fit, make_train_step, stage_end, verify

SIDE, FEATURES, B, M, IPUS = 16, (8, 16, 32), 8, 4, 5


class Convolutions(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Conv(self.features, (3, 3))(x))
        return x


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        *outer, bottom = FEATURES
        skips = []
        for features in outer:
            skips.append(Convolutions(features)(x))
            x = stage_end(nn.max_pool(skips[-1], (2, 2), (2, 2)))
        x = Convolutions(bottom)(x)
        for features in reversed(outer):
            x = nn.ConvTranspose(features, (2, 2), (2, 2))(stage_end(x))
            x = Convolutions(features)(jnp.concatenate([skips.pop(), x], -1))
        return nn.Conv(1, (1, 1))(x)


def loss(params, batch):
    return jnp.mean((UNet().apply({"params": params}, batch["noisy"]) - batch["clean"]) ** 2)


def init(key) -> Any:
    return UNet().init(key, jnp.zeros((1, SIDE, SIDE, 1)))["params"]


def images(seed: int, count: int = 512) -> dict[str, np.ndarray]:
    """Return images of one bright rectangle each, and the same with noise."""
    random = np.random.default_rng(seed)
    low, size = random.integers(SIDE // 2, size=(2, count, 2)) + np.array([0, 4])[:, None, None]
    inside = lambda axis: (low[:, None, axis] <= np.arange(SIDE)) & (np.arange(SIDE) < (low + size)[:, None, axis])
    clean = (inside(0)[:, :, None] & inside(1)[:, None, :])[..., None].astype(np.float32)
    return {"clean": clean, "noisy": clean + random.normal(scale=0.5, size=clean.shape).astype(np.float32)}


def make_pipeline() -> Pipeline:
    one = {name: rows[:B] for name, rows in images(0).items()}
    shapes = jax.eval_shape(init, jax.random.key(0))
    return Pipeline.from_function(loss, shapes, one, ipus=IPUS, gradient_accumulation=M, schedule="1f1b")


def main(updates: int = 60) -> None:
    pipeline, data = make_pipeline(), images(0)
    step = make_train_step(pipeline, optax.adam(3e-3))
    others = {name: rows.reshape(-1, B, *rows.shape[1:]) for name, rows in images(1, M * B).items()}
    state = step.init(init, jax.random.key(0))
    print(pipeline, verify(pipeline, state.params, others), sep="\n")
    with Feed(data, step=step, micro_batch=B) as feed:
        state = fit(step, state, feed, updates=updates, say=lambda line: None).state
    denoised = pipeline.forward(lambda params, noisy: UNet().apply({"params": params}, noisy), others["noisy"][0])
    for name, found in (("noisy", others["noisy"]), ("denoised", denoised(state.params, others["noisy"]))):
        print(f"{name}: mean squared error of other images {np.mean((found - others['clean']) ** 2):.3f}")


if __name__ == "__main__":
    configure(IPUS)
    main()

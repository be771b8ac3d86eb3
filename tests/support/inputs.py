"""Inputs of a traced stage: x, and a micro-batch with floats, bools, ints and a key; also a small stage."""

import jax
import jax.numpy as jnp
import numpy as np

ROWS, D, E = 5, 6, 7


def normal(shapes, seed=0):
    rng = np.random.default_rng(seed)
    is_shape = lambda s: isinstance(s, tuple)
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), shapes, is_leaf=is_shape)


X = normal((ROWS, D), seed=1)
MICROBATCH = {
    "x": normal((ROWS, D), seed=2),
    "keep": jnp.asarray(np.random.default_rng(3).random((ROWS, E)) < 0.7),
    "ids": jnp.asarray([0, 5, 2, 2, 1]),
    "key": jax.random.key(7),
}


def mlp(p, x, mb):
    return jax.nn.relu(x @ p["w"] + p["b"])

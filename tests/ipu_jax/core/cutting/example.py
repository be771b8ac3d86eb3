"""What a whole model is for `test_whole_models`: a loss as its author would write it, weights, and micro-batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, ROWS, LENGTH, D = 11, 2, 5, 8
"""Tokens, rows of a micro-batch, their length, and the features of each token."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A loss function, unchanged.

    Attributes:
        loss: of (params, micro_batch), (params, micro_batch, key), or with a state (params, state, micro_batch).
        params: the weights.
        micro_batch: draws a micro-batch of NumPy arrays.
        state: what the loss changes, such as averages of batch norm.
        takes_key: whether the loss takes a key.
        tolerance: of the relative error of each leaf.
        outputs: what the loss compares with its labels, of the loss's arguments; a state is read, and stays as it is.
    """

    loss: Callable[..., Any]
    params: Any
    micro_batch: Callable[[np.random.Generator], Any]
    state: Any = None
    takes_key: bool = False
    tolerance: float = 1e-5
    outputs: Callable[..., Any] | None = None


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Draw weights, (inputs, outputs), that keep the size of the features."""
    return (rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 4)).astype(np.float32)


def tokens(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw rows of tokens, and the tokens that follow them."""
    ids = rng.integers(VOCAB, size=(ROWS, LENGTH + 1)).astype(np.int32)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def rows(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw rows of features, and of what they should become."""
    return {"x": rng.normal(size=(4, D)).astype(np.float32), "y": rng.normal(size=(4, D)).astype(np.float32)}


def images(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw images of 8 x 8 pixels, and their classes."""
    return {
        "image": rng.normal(size=(3, 8, 8, 2)).astype(np.float32),
        "label": rng.integers(5, size=3).astype(np.int32),
    }


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared_error(y: Any, wanted: Any) -> jax.Array:
    return jnp.mean((y - wanted) ** 2)

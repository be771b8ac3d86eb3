"""Small problems for training steps: loss functions, and weights and batches for them."""

from typing import Any

import jax.numpy as jnp
import numpy as np

# the mean of squared errors of a layer's sums


def tanh_loss(params: Any, microbatch: Any) -> Any:
    hidden = jnp.tanh(microbatch["x"] @ params["w"] + params["b"])
    return jnp.mean((hidden.sum(axis=1) - microbatch["y"]).astype(jnp.float32) ** 2)


def tanh_problem(*lead: int, dtype: str = "float32") -> tuple[Any, Any]:
    """Return weights and a batch of these leading dims, for `tanh_loss`."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return {"w": normal(5, 7), "b": normal(7)}, {"x": normal(*lead, 3, 5), "y": normal(*lead, 3)}


# the same over the rows that count: a sum, and its count


def masked_sum(params: Any, microbatch: Any) -> Any:
    errors = (jnp.tanh(microbatch["x"] @ params["w"] + params["b"]).sum(-1) - microbatch["y"]) ** 2
    return jnp.sum(errors * microbatch["mask"]), microbatch["mask"].sum()


def tokens(*lead: int) -> Any:
    """Return rows of which each micro-batch counts another number, for `masked_sum`."""
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(*lead, 6, 5)).astype(np.float32),
        "y": rng.normal(size=(*lead, 6)).astype(np.float32),
        "mask": (rng.random((*lead, 6)) < 0.4).astype(np.float32),
    }


# the mean square of a product


def product_loss(w: Any, rows: Any) -> Any:
    return jnp.mean((rows @ w["u"] @ w["v"]) ** 2)


def product_weights() -> Any:
    rng = np.random.default_rng(0)
    return {"u": rng.normal(size=(5, 3)).astype(np.float32), "v": rng.normal(size=3).astype(np.float32)}


def product_rows(*lead: int) -> Any:
    return np.random.default_rng(1).normal(size=(*lead, 4, 5)).astype(np.float32)

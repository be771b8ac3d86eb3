"""One model whose layers keep a running mean, with the state written in all the ways in which people write it.

Each spelling is a function of (params, state, micro-batch) that returns what the head reads, and the new state. Each
layer reads its own old mean and replaces it, so the layers and their state can be divided evenly.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax

from support.inputs import normal

L, D = 8, 8
W = 0.5 * normal((L, D, D))
BATCH = {"x": normal((64, D), seed=2), "y": normal((64, 3), seed=3), "train": np.bool_(True)}
MEANS = 0.1 * normal((L, D), seed=4)
LIST, STACK, COLUMNS = {"m": [*MEANS]}, {"m": MEANS}, {"m": MEANS.T}


def layer(x: Any, w: Any, old: Any) -> tuple[Any, Any]:
    """Return the layer's output, and the mean of its micro-batch."""
    h = x @ w
    mean = h.mean(0)
    return x + jnp.tanh(h - mean + 0.1 * old), mean


def run(p: Any, mb: Any, old: Any) -> tuple[Any, list[Any]]:
    """Run the layers as a loop; `old` has a mean per layer."""
    x, means = mb["x"], []
    for k in range(L):
        x, mean = layer(x, p["w"][k], old[k])
        means.append(mean)
    return x, means


def scanned(p: Any, mb: Any, old: Any) -> tuple[Any, Any]:
    return lax.scan(lambda x, row: layer(x, *row), mb["x"], (p["w"], old))


def reversed_rows(p: Any, s: Any, mb: Any) -> Any:
    x, means = lax.scan(lambda x, row: layer(x, *row), mb["x"], (p["w"], s["m"]), reverse=True)
    return x, {"m": means}


def average(old: Any, new: Any) -> Any:
    return 0.9 * old + 0.1 * new


def of_list(late: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Return the model whose state is a list, with an operation on each leaf of the new state after all layers."""

    def read(p: Any, s: Any, mb: Any) -> Any:
        x, means = run(p, mb, s["m"])
        new = [average(old, mean) for old, mean in zip(s["m"], means, strict=True)]
        return x, jax.tree.map(functools.partial(late, mb), s, {"m": new})

    return read


def of_scan(late: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Return the model whose state is stacked, with one operation on all new means after the scan."""

    def read(p: Any, s: Any, mb: Any) -> Any:
        x, means = scanned(p, mb, s["m"])
        return x, {"m": late(mb, s["m"], means)}

    return read


def of_loop(join: Callable[[Any, Any], Any], take: Callable[[Any, int], Any] = lambda m, k: m[k]) -> Callable[..., Any]:
    """Return the model whose state is stacked, and joined from the layers' means after a loop."""

    def read(p: Any, s: Any, mb: Any) -> Any:
        old = [take(s["m"], k) for k in range(L)]
        x, means = run(p, mb, old)
        return x, {"m": join(s["m"], [average(*both) for both in zip(old, means, strict=True)])}

    return read


def put(set_row: Callable[[Any, int, Any], Any]) -> Callable[..., Any]:
    """Return the model that sets each row of a stacked state in its layer."""

    def read(p: Any, s: Any, mb: Any) -> Any:
        x, cache = mb["x"], s["m"]
        for k in range(L):
            x, mean = layer(x, p["w"][k], cache[k])
            cache = set_row(cache, k, mean)
        return x, {"m": cache}

    return read


def in_the_carry(p: Any, s: Any, mb: Any) -> Any:
    def one(k: Any, carry: Any) -> Any:
        x, cache = carry
        x, mean = layer(x, p["w"][k], cache[k])
        return x, cache.at[k].set(mean)

    x, cache = lax.fori_loop(0, L, one, (mb["x"], s["m"]))
    return x, {"m": cache}


def counted(p: Any, s: Any, mb: Any) -> Any:
    """Each layer divides its mean by what the count decides."""
    x, means = run(p, mb, [m / (1 - 0.9 ** (1.0 + s["count"])) for m in s["m"]])
    new = [average(old, mean) for old, mean in zip(s["m"], means, strict=True)]
    return x, {"m": new, "count": s["count"] + 1}


def counted_scan(p: Any, s: Any, mb: Any) -> Any:
    def one(x: Any, row: Any) -> Any:
        w, old = row
        x, mean = layer(x, w, old)
        return x, average(old, mean)

    x, means = lax.scan(one, mb["x"], (p["w"], s["m"]))
    return x, {"m": means, "count": s["count"] + 1}


def weights_average(p: Any, s: Any, mb: Any) -> Any:
    x, _ = scanned(p, mb, jnp.zeros((L, D)))
    return x, {"m": 0.99 * s["m"] + 0.01 * p["w"]}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.BatchNorm(use_running_average=False)(nn.Dense(D)(x))), None


def linen(axis: int) -> tuple[Any, Any, Any]:
    axes: Any = {"params": 0, "batch_stats": axis}
    model = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=L)()
    made = model.init(jax.random.key(0), BATCH["x"], None)

    def read(p: Any, s: Any, mb: Any) -> Any:
        (x, _), new = model.apply({"params": p["w"], **s}, mb["x"], None, mutable=["batch_stats"])
        return x, new

    return read, {"batch_stats": made["batch_stats"]}, made["params"]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(L):
            x = x + nn.tanh(nn.BatchNorm(use_running_average=False, axis_name="batch")(nn.Dense(D)(x)))
        return x


def vmapped() -> tuple[Any, Any, Any]:
    """The model sees one example; the new state is the first of equal ones."""
    model = Net()
    apply = lambda p, s, x: model.apply({"params": p, **s}, x, mutable=["batch_stats"])
    made = jax.vmap(functools.partial(model.init, jax.random.key(0)), axis_name="batch", out_axes=0)(BATCH["x"])
    made = jax.tree.map(lambda leaf: leaf[0], made)

    def read(p: Any, s: Any, mb: Any) -> Any:
        x, new = jax.vmap(apply, in_axes=(None, None, 0), axis_name="batch")(p["w"], s, mb["x"])
        return x, jax.tree.map(lambda leaf: leaf[0], new)

    return read, {"batch_stats": made["batch_stats"]}, made["params"]


STATES: dict[str, tuple[Any, ...]] = {
    "list": (of_list(lambda mb, old, new: new), LIST),
    "list, cast late": (of_list(lambda mb, old, new: new.astype(jnp.bfloat16).astype(jnp.float32)), LIST),
    "list, clipped late": (of_list(lambda mb, old, new: jnp.clip(new, -9, 9)), LIST),
    "list, stop_gradient": (of_list(lambda mb, old, new: lax.stop_gradient(new)), LIST),
    "list, masked": (of_list(lambda mb, old, new: jnp.where(mb["train"], new, old)), LIST),
    "list and a count": (counted, {**LIST, "count": np.int32(1)}),
    "scan": (of_scan(lambda mb, old, new: new), STACK),
    "reversed scan": (reversed_rows, STACK),
    "scan, cast first": (
        lambda p, s, mb: (lambda x, means: (x, {"m": means}))(
            *scanned(p, mb, s["m"].astype(jnp.bfloat16).astype(jnp.float32))
        ),
        STACK,
    ),
    "scan, rows and a count": (counted_scan, {**STACK, "count": np.int32(1)}),
    "scan, averaged late": (of_scan(lambda mb, old, new: average(old, new)), STACK),
    "scan, cast late": (of_scan(lambda mb, old, new: new.astype(jnp.bfloat16).astype(jnp.float32)), STACK),
    "scan, clipped late": (of_scan(lambda mb, old, new: jnp.clip(average(old, new), -9, 9)), STACK),
    "scan, masked": (of_scan(lambda mb, old, new: jnp.where(mb["train"], average(old, new), old)), STACK),
    "scan, masked by product": (of_scan(lambda mb, old, new: mb["train"] * new + (1 - mb["train"]) * old), STACK),
    "scan, columns": (
        lambda p, s, mb: (lambda x, means: (x, {"m": average(s["m"], means.T)}))(*scanned(p, mb, s["m"].T)),
        COLUMNS,
    ),
    "loop, stack": (of_loop(lambda old, new: jnp.stack(new)), STACK),
    "loop, stack along 1": (of_loop(lambda old, new: jnp.stack(new, 1), lambda m, k: m[:, k]), COLUMNS),
    "loop, jnp.array": (of_loop(lambda old, new: jnp.array(new)), STACK),
    "loop, stack, masked late": (
        of_loop(lambda old, new: jnp.where(jnp.isfinite(jnp.stack(new)), jnp.stack(new), old)),
        STACK,
    ),
    "at[k].set": (put(lambda cache, k, mean: cache.at[k].set(average(cache[k], mean))), STACK),
    "at[k].add": (put(lambda cache, k, mean: cache.at[k].add(0.1 * mean)), STACK),
    "dynamic_update": (put(lambda cache, k, mean: lax.dynamic_update_index_in_dim(cache, mean, k, 0)), STACK),
    "fori_loop, at[k].set": (in_the_carry, STACK),
    "average of the weights": (weights_average, {"m": W}),
    "linen, state along axis 0": linen(0),
    "linen, state along axis 1": linen(1),
    "linen under vmap": vmapped(),
}


def state_spelling(name: str) -> tuple[Callable[..., Any], Any, Any]:
    """Return the loss function, its params and its state."""
    read, state, *weights = STATES[name]

    def loss(p: Any, s: Any, mb: Any) -> Any:
        y, new = read(p, s, mb)
        return jnp.mean((y @ p["head"] - mb["y"]) ** 2), new

    return loss, {"w": weights[0] if weights else W, "head": normal((D, 3), seed=9)}, state

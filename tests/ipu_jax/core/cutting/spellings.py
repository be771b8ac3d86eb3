"""One model of stacked layers, written in all the ways in which people write it.

Each spelling is a function of (params, micro-batch) that returns what the head reads, or that and a penalty.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree

from support.inputs import normal

L, D = 4, 8
W, B = 0.3 * normal((L, D, D)), 0.1 * normal((L, D), seed=1)
PAIRS = {"w": W, "b": B}
BATCH = {
    "x": normal((32, D), seed=2),
    "y": normal((32, 3), seed=3),
    "keep": np.array([True, True, False, True]),
    "mask": (np.random.default_rng(4).random((L, D, D)) < 0.7).astype(np.float32),
}
MASK = BATCH["mask"]


def layer(x: Any, w: Any, b: Any = 0.0) -> Any:
    return x + jnp.tanh(x @ w + b).astype(x.dtype)  # a scan's carry keeps its dtype, whatever a mask makes of w


def scan(x: Any, rows: Any, **options: Any) -> Any:
    rows = rows if isinstance(rows, tuple) else (rows,)
    return lax.scan(lambda x, row: (layer(x, *row), None), x, rows, **options)[0]


def each(x: Any, *rows: Any) -> Any:
    return functools.reduce(lambda x, row: layer(x, *row), zip(*rows, strict=True), x)


def loop(x: Any, take: Callable[[Any, int], Any], *rows: Any) -> Any:
    for k in range(L):
        row = [take(of, k) for of in rows]
        x = layer(x, *(row[0] if isinstance(row[0], tuple) else row))
    return x


def of_pairs(f: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda p, mb: f(mb["x"], p["w"], p["b"])


def after(change: Callable[[Any], Any], *, loops: bool = False) -> Callable[[Any, Any], Any]:
    """Return the model with its matrices changed before the layers, which are a scan or a loop."""
    if loops:
        return lambda p, mb: loop(mb["x"], operator.getitem, change(p["w"]), p["b"])
    return lambda p, mb: scan(mb["x"], (change(p["w"]), p["b"]))


def penalised(penalty: Callable[[Any], Any], *, loops: bool = False) -> Callable[[Any, Any], Any]:
    of = loop if loops else None
    return lambda p, mb: (
        (of(mb["x"], operator.getitem, p["w"], p["b"]) if of else scan(mb["x"], (p["w"], p["b"]))),
        1e-2 * penalty(p),
    )


def in_half(how: Any) -> Callable[[Any, Any, Any], Any]:
    return lambda *given: how(*(v.astype(jnp.bfloat16) for v in given)).astype(jnp.float32)


@jax.custom_vjp
def quantised(w: Any) -> Any:
    scale = jnp.max(jnp.abs(w), axis=(1, 2), keepdims=True) / 7
    return jnp.round(w / scale) * scale


quantised.defvjp(lambda w: (quantised(w), None), lambda _, g: (g,))


@jax.custom_vjp
def rounded(w: Any) -> Any:
    return jnp.round(w * 16) / 16


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


def standardised(w: Any) -> Any:
    return (w - w.mean((1, 2), keepdims=True)) / (w.std((1, 2), keepdims=True) + 1e-5)


def spectral(w: Any) -> Any:
    u = jnp.einsum("lij,j->li", w, jnp.ones(D))
    v = jnp.einsum("lij,li->lj", w, u / jnp.linalg.norm(u, axis=1, keepdims=True))
    return w / lax.stop_gradient(jnp.linalg.norm(v, axis=1))[:, None, None]


def counting(x: Any, w: Any, b: Any) -> Any:
    def one(carry: Any, _: Any) -> Any:
        x, i = carry
        return (layer(x, w[i], b[i]), i + 1), None

    return lax.scan(one, (x, 0), None, length=L)[0][0]


def in_groups(x: Any, w: Any, b: Any) -> Any:
    of_two = lambda v: v.reshape(L // 2, 2, *v.shape[1:])
    return lax.scan(lambda x, group: (scan(x, group), None), x, (of_two(w), of_two(b)))[0]


def group_by_group(x: Any, w: Any, b: Any) -> Any:
    w, b = w.reshape(2, L // 2, D, D), b.reshape(2, L // 2, D)
    for g in range(2):
        for k in range(L // 2):
            x = layer(x, w[g, k], b[g, k])
    return x


def scan_of_groups(x: Any, w: Any, b: Any) -> Any:
    w, b = w.reshape(2, L // 2, D, D), b.reshape(2, L // 2, D)
    for g in range(2):
        x = scan(x, (w[g], b[g]))
    return x


def two_at_a_time(x: Any, w: Any, b: Any) -> Any:
    for k in range(L // 2):
        x = each(x, w[2 * k : 2 * k + 2], b[2 * k : 2 * k + 2])
    return x


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.tanh(nn.Dense(D)(nn.LayerNorm()(x))), None


def linen(axis: int, **options: Any) -> tuple[Any, Any]:
    scanned = nn.scan(Block, variable_axes={"params": axis}, split_rngs={"params": True}, length=L, **options)()
    params = {"w": scanned.init(jax.random.key(0), BATCH["x"], None)["params"]}
    return lambda p, mb: scanned.apply({"params": p["w"]}, mb["x"], None)[0], params


def equinox() -> tuple[Any, Any]:
    made = eqx.filter_vmap(lambda key: eqx.nn.MLP(D, D, D, 1, key=key))(jax.random.split(jax.random.key(0), L))
    arrays, static = eqx.partition(made, eqx.is_array)

    def read(p: Any, mb: Any) -> Any:
        one = lambda x, row: (x + jax.vmap(eqx.combine(row, static))(x), None)
        return lax.scan(one, mb["x"], p["w"])[0]

    return read, {"w": arrays}


FLAT, UNRAVEL = ravel_pytree([{"b": b, "w": w} for w, b in zip(W, B, strict=True)])
LISTED = {"w": [{"b": b, "w": w} for w, b in zip(W, B, strict=True)]}
LORA = {"w": PAIRS, "a": normal((L, D, 2), seed=5), "c": normal((L, 2, D), seed=6)}


def of_lora(low: Callable[[Any, Any], Any], run: Any = scan) -> Callable[[Any, Any], Any]:
    def read(p: Any, mb: Any) -> Any:
        w = p["w"]["w"] + 0.1 * low(p["a"], p["c"])
        return scan(mb["x"], (w, p["w"]["b"])) if run is scan else each(mb["x"], w, p["w"]["b"])

    return read


def stacked_by_the_function(p: Any, mb: Any) -> Any:
    rows = jax.tree.map(lambda *rows: jnp.stack(rows), *p["w"])
    return scan(mb["x"], (rows["w"], rows["b"]))


def tree_rows(p: Any, mb: Any) -> Any:
    x = mb["x"]
    for k in range(L):
        row = jax.tree.map(lambda leaf: leaf[k], p["w"])  # noqa: B023
        x = layer(x, row["w"], row["b"])
    return x


def teacher(p: Any, mb: Any, frozen: Any = np.asarray(normal((16, D, D), seed=8))) -> Any:  # noqa: B008
    x = each(mb["x"], p["w"], p["b"])
    y = lax.scan(lambda x, w: (jnp.tanh(x @ w).astype(x.dtype), None), mb["x"], frozen)[0]
    return x, jnp.mean((x - y) ** 2)


def packed(cut: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def read(p: Any, mb: Any) -> Any:
        one = lambda x, row: (x + jnp.tanh(x @ row[0]) * jax.nn.sigmoid(x @ row[1]), None)
        return lax.scan(one, mb["x"], cut(p["w"]))[0]

    return read


ROWS = lax.dynamic_index_in_dim
SQUARES: Any = lambda p: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
SPELLINGS: dict[str, Any] = {
    # p_forms
    "scan": of_pairs(lambda x, w, b: scan(x, (w, b))),
    "scan over numbers": of_pairs(
        lambda x, w, b: lax.scan(lambda x, i: (layer(x, w[i], b[i]), None), x, jnp.arange(L))[0]
    ),
    "fori_loop": of_pairs(lambda x, w, b: lax.fori_loop(0, L, lambda i, x: layer(x, w[i], b[i]), x)),
    "loop": of_pairs(lambda x, w, b: loop(x, operator.getitem, w, b)),
    "iteration": of_pairs(each),
    "unstack": of_pairs(lambda x, w, b: each(x, jnp.unstack(w), jnp.unstack(b))),
    "split": of_pairs(lambda x, w, b: loop(x, lambda v, k: v[k][0], jnp.split(w, L), jnp.split(b, L))),
    "take": of_pairs(lambda x, w, b: loop(x, lambda v, k: jnp.take(v, k, axis=0), w, b)),
    "dynamic_index": of_pairs(lambda x, w, b: loop(x, lambda v, k: ROWS(v, k, keepdims=False), w, b)),
    "cast, loop": of_pairs(in_half(lambda x, w, b: loop(x, operator.getitem, w, b))),
    "cast, scan": of_pairs(in_half(lambda x, w, b: scan(x, (w, b)))),
    "weight norm, scan": after(lambda w: w / jnp.linalg.norm(w, axis=1, keepdims=True)),
    "swapaxes, scan": after(lambda w: w.swapaxes(1, 2)),
    "scan, unroll=2": of_pairs(lambda x, w, b: scan(x, (w, b), unroll=2)),
    "scan of scans": of_pairs(in_groups),
    "scan twice": of_pairs(lambda x, w, b: scan(scan(x, (w, b)), (w, b))),
    "two halves": of_pairs(lambda x, w, b: scan(scan(x, (w[:2], b[:2])), (w[2:], b[2:]))),
    "checkpoint of a scan": of_pairs(
        lambda x, w, b: jax.checkpoint(
            lambda x: lax.scan(jax.checkpoint(lambda x, row: (layer(x, *row), None)), x, (w, b))[0]
        )(x)
    ),
    "vmap of a scan": of_pairs(lambda x, w, b: jax.vmap(lambda x: scan(x, (w, b)))(x)),
    "a constant teacher": teacher,
    # further ones: rows
    "loop, take along axis 1": (
        lambda p, mb: loop(mb["x"], lambda v, k: jnp.take(v, k, axis=1), p["w"], p["b"]),
        {"w": W.swapaxes(0, 1), "b": B.T},
    ),
    "loop, w[:, k]": (
        lambda p, mb: loop(mb["x"], lambda v, k: v[:, k], p["w"], p["b"]),
        {"w": W.swapaxes(0, 1), "b": B.T},
    ),
    "loop, w[..., k]": (
        lambda p, mb: loop(mb["x"], lambda v, k: v[..., k], p["w"], p["b"]),
        {"w": jnp.moveaxis(W, 0, -1), "b": B.T},
    ),
    "moveaxis(1), scan": (
        lambda p, mb: scan(mb["x"], (jnp.moveaxis(p["w"], 1, 0), p["b"])),
        {"w": W.swapaxes(0, 1), "b": B},
    ),
    "moveaxis(-1), scan": (
        lambda p, mb: scan(mb["x"], (jnp.moveaxis(p["w"], -1, 0), p["b"].T)),
        {"w": jnp.moveaxis(W, 0, -1), "b": B.T},
    ),
    "linen, axis 1": linen(1),
    "linen, axis -1": linen(-1),
    "linen, axis 0, unrolled": linen(0, unroll=2),
    "linen, axis 1, unrolled": linen(1, unroll=L),
    "equinox": equinox(),
    "swapaxes, loop": after(lambda w: w.swapaxes(1, 2), loops=True),
    "w.T, loop": of_pairs(lambda x, w, b: loop(x, lambda v, k: v[..., k].T, w.T, b.T)),
    "reshape, w[g, k]": of_pairs(group_by_group),
    "reshape, scan per group": of_pairs(scan_of_groups),
    "w[2 * k : 2 * k + 2]": of_pairs(two_at_a_time),
    "tree of rows": (tree_rows, {"w": PAIRS}),
    "w[np.array]": after(lambda w: w[np.arange(L)]),
    "permuted by np.array": after(lambda w: w[np.array([0, 2, 1, 3])], loops=True),
    "reversed rows, loop": of_pairs(lambda x, w, b: loop(x, operator.getitem, w[::-1], b[::-1])),
    "flip, scan": of_pairs(lambda x, w, b: scan(x, (jnp.flip(w, 0), jnp.flip(b, 0)))),
    "reversed scan": of_pairs(lambda x, w, b: scan(x, (w, b), reverse=True)),
    "scan with numbers": of_pairs(
        lambda x, w, b: lax.scan(lambda x, row: (layer(x, *row[1:]) / (1 + row[0]), None), x, (jnp.arange(L), w, b))[0]
    ),
    "scan over numbers, dynamic_index": of_pairs(
        lambda x, w, b: lax.scan(
            lambda x, i: (layer(x, ROWS(w, i, keepdims=False), ROWS(b, i, keepdims=False)), None), x, jnp.arange(L)
        )[0]
    ),
    "carry that counts": of_pairs(counting),
    "concatenate, scan": (
        lambda p, mb: scan(mb["x"], (jnp.concatenate(p["w"]), p["b"])),
        {"w": [W[:2], W[2:]], "b": B},
    ),
    "unlike stacks": (
        lambda p, mb: scan(scan(mb["x"], p["w"][0]), p["w"][1]),
        {"w": [W[:1], W[1:]]},
    ),
    "list stacked by the function": (stacked_by_the_function, LISTED),
    "flat vector": (lambda p, mb: functools.reduce(lambda x, q: layer(x, **q), UNRAVEL(p["w"]), mb["x"]), {"w": FLAT}),
    "bias in the matrix": (
        lambda p, mb: loop(mb["x"], lambda v, k: (v[k][:-1], v[k][-1]), p["w"]),
        {"w": jnp.concatenate([W, B[:, None]], 1)},
    ),
    "rows of one matrix": (
        lambda p, mb: scan(mb["x"], (p["w"].reshape(L, D, D), p["b"])),
        {"w": W.reshape(L * D, D), "b": B},
    ),
    "repeat, scan": (lambda p, mb: scan(mb["x"], jnp.repeat(p["w"], 2, axis=0)), {"w": W}),
    "packed, split": (packed(lambda w: jnp.split(w, 2, axis=-1)), {"w": jnp.concatenate([W, W[::-1]], -1)}),
    "packed, w[:, 0]": (packed(lambda w: [w[:, 0], w[:, 1]]), {"w": jnp.stack([W, W[::-1]], 1)}),
    "packed, moveaxis": (packed(lambda w: [*jnp.moveaxis(w, 1, 0)]), {"w": jnp.stack([W, W[::-1]], 1)}),
    # what is done to the stack first
    "lora, einsum": (of_lora(lambda a, c: jnp.einsum("lir,lro->lio", a, c)), LORA),
    "lora, vmap, loop": (of_lora(jax.vmap(jnp.matmul), each), LORA),
    "weight norm, vmap, loop": after(jax.vmap(lambda w: w / jnp.linalg.norm(w, axis=0)), loops=True),
    "standardised": after(standardised),
    "spectral norm": after(spectral),
    "softplus, scan": after(lambda w: jax.nn.softplus(w) - 0.7),
    "relu, loop": after(jax.nn.relu, loops=True),
    "gelu, scan": after(jax.nn.gelu),
    "quantised per layer, loop": after(quantised, loops=True),
    "quantised per layer, scan": after(quantised),
    "rounded, loop": after(rounded, loops=True),
    "straight through, scan": after(lambda w: w + lax.stop_gradient(jnp.round(w * 16) / 16 - w)),
    "constant mask, scan": after(lambda w: w * MASK),
    "constant mask, loop": after(lambda w: w * MASK, loops=True),
    "batch's mask, scan": lambda p, mb: scan(mb["x"], (p["w"] * mb["mask"], p["b"])),
    "batch's mask, loop": lambda p, mb: loop(mb["x"], operator.getitem, p["w"] * mb["mask"], p["b"]),
    "small weights are zero": after(lambda w: jnp.where(jnp.abs(w) > 0.1, w, 0)),
    "clip, loop": after(lambda w: jnp.clip(w, -0.5, 0.5), loops=True),
    "scaled by a vector, scan": (
        lambda p, mb: scan(mb["x"], (p["w"] * p["s"][:, None, None], p["b"])),
        {**PAIRS, "s": jnp.ones(L)},
    ),
    "scaled by a vector, loop": (
        lambda p, mb: loop(mb["x"], operator.getitem, p["w"] * p["s"][:, None, None], p["b"]),
        {**PAIRS, "s": jnp.ones(L)},
    ),
    "half is frozen, concatenate": after(lambda w: jnp.concatenate([lax.stop_gradient(w[:2]), w[2:]])),
    "half is frozen, where": after(
        lambda w: jnp.where(jnp.arange(L)[:, None, None] < 2, lax.stop_gradient(w), w), loops=True
    ),
    "a row is set": after(lambda w: w.at[0].set(lax.stop_gradient(w[0]))),
    "a row is scaled": after(lambda w: w.at[1].multiply(0.5), loops=True),
    # penalties
    "L2, scan": penalised(lambda p: jnp.sum(p["w"] ** 2)),
    "L2, loop": penalised(lambda p: jnp.sum(p["w"] ** 2), loops=True),
    "L2 of all leaves": penalised(SQUARES),
    "L1, loop": penalised(lambda p: jnp.abs(p["w"]).sum(), loops=True),
    "global norm": penalised(optax.tree.norm),
    "vdot": penalised(lambda p: jnp.vdot(p["w"], p["w"])),
    "norm, loop": penalised(lambda p: jnp.linalg.norm(p["w"]), loops=True),
    "largest weight": penalised(lambda p: jnp.max(jnp.abs(p["w"]))),
    "mean of squares": penalised(lambda p: jnp.mean(jnp.square(p["w"].astype(jnp.bfloat16)).astype(jnp.float32))),
    "norms of layers": penalised(lambda p: jnp.linalg.norm(p["w"], axis=(1, 2)).sum(), loops=True),
    "orthogonal": penalised(lambda p: jnp.sum((jnp.einsum("lij,lik->ljk", p["w"], p["w"]) - jnp.eye(D)) ** 2)),
}

EIGHT = {"w": 0.3 * normal((2 * L, D, D), seed=10), "b": jnp.zeros((2 * L, D))}


def closures(wrap: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the model of eight layers, of which each function closes over the whole stack."""

    def read(p: Any, mb: Any) -> Any:
        x = mb["x"]
        for k in range(2 * L):
            x = wrap(lambda x: layer(x, p["w"][k], p["b"][k]))(x)  # noqa: B023
        return x

    return read


def checkpoints_of_the_stack(p: Any, mb: Any) -> Any:
    one = jax.checkpoint(lambda p, x, k: layer(x, p["w"][k], p["b"][k]), static_argnums=2)
    return functools.reduce(lambda x, k: one(p, x, k), range(2 * L), mb["x"])


def sometimes(p: Any, mb: Any) -> Any:
    x = mb["x"]
    for k in range(L):
        x = lax.cond(mb["keep"][k], lambda x: layer(x, p["w"][k], p["b"][k]), lambda x: x, x)  # noqa: B023
    return x


def alternating(x: Any, pair: Any) -> Any:
    return jnp.sin(layer(x, pair[0])) + layer(x, pair[1]), None


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.tanh(nn.Dense(D)(x))


def remat_scan() -> tuple[Any, Any]:
    model = nn.remat_scan(Plain, lengths=(2, 2))()
    params = {"w": model.init(jax.random.key(0), BATCH["x"])["params"]}
    return lambda p, mb: model.apply({"params": p["w"]}, mb["x"]), params


SPELLINGS |= {
    "checkpoints that close over the stack": (closures(jax.checkpoint), EIGHT),
    "checkpoints of the stack and a number": (checkpoints_of_the_stack, EIGHT),
    "cond, rows in the branch": sometimes,
    "first row apart": of_pairs(lambda x, w, b: scan(layer(x, w[0], b[0]), (w[1:], b[1:]))),
    "last row apart": of_pairs(lambda x, w, b: layer(scan(x, (w[:-1], b[:-1])), w[-1], b[-1])),
    "even and odd rows": (
        lambda p, mb: lax.scan(alternating, mb["x"], (p["w"][::2], p["w"][1::2]))[0],
        {"w": EIGHT["w"]},
    ),
    "pairs in the body": (
        lambda p, mb: lax.scan(alternating, mb["x"], p["w"].reshape(L, 2, D, D))[0],
        {"w": EIGHT["w"]},
    ),
    "linen, remat_scan": remat_scan(),
    "barrier": after(lax.optimization_barrier),
    "named": after(lambda w: checkpoint_name(w, "w"), loops=True),
    "two casts": after(lambda w: w.astype(jnp.float8_e4m3fn).astype(jnp.float32)),
    "L2 by layer": penalised(lambda p: jnp.sum(jnp.arange(L)[:, None, None] * p["w"] ** 2)),
    "norm as aux": lambda p, mb: (scan(mb["x"], (p["w"], p["b"])), 0.0, jnp.linalg.norm(p["w"])),
    "norms of layers as aux": lambda p, mb: (
        scan(mb["x"], (p["w"], p["b"])),
        0.0,
        jnp.linalg.norm(p["w"], axis=(1, 2)),
    ),
    "all norms as aux": lambda p, mb: (
        loop(mb["x"], operator.getitem, p["w"], p["b"]),
        0.0,
        jax.tree.map(jnp.linalg.norm, p),
    ),
    "variance as aux": lambda p, mb: (loop(mb["x"], operator.getitem, p["w"], p["b"]), 0.0, jnp.var(p["w"])),
    "histogram as aux": lambda p, mb: (
        scan(mb["x"], (p["w"], p["b"])),
        0.0,
        jnp.histogram(p["w"], bins=jnp.linspace(-1, 1, 5))[0],
    ),
}


def spelling(name: str) -> tuple[Callable[[Any, Any], Any], Any]:
    """Return the loss function and its params; all leaves but "head" are stacked."""
    found = SPELLINGS[name]
    read, params = found if isinstance(found, tuple) else (found, PAIRS)

    def loss(p: Any, mb: Any) -> Any:
        y = read(p, mb)
        y, penalty, *aux = y if isinstance(y, tuple) else (y, 0.0)
        value = jnp.mean((y @ p["head"] - mb["y"]) ** 2) + penalty
        return (value, *aux) if aux else value

    return loss, {**params, "head": normal((D, 3), seed=9)}

"""Make the stages of a random model as a user of the library would write them, concurrent ones with `sharded_ops`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Stage
from random_programs.model import ROWS, VOCABULARY, Block, Leaf, Loss, Model, Piece, constant_of, count_of, state_of
from sharded_ops import (
    embedding,
    from_all,
    layer_norm,
    linear_cross_entropy,
    log_softmax_cross_entropy,
    matmul,
    scatter_tokens,
    softmax,
    tied_projection,
)

EPSILON, MOMENTUM = 0.1, 0.75


def stages_of(model: Model) -> list[Stage]:
    return [_stage(model, i) for i in range(len(model.pieces))]


def specs_of(model: Model) -> dict[str, Any]:
    concurrent = {piece.group for piece in model.pieces if piece.place is None}

    def spec(leaf: Leaf) -> P:
        return P() if leaf.split is None else P(*[None] * leaf.split, "ipu")

    return {name: tree for name, tree in model.by_leaf(spec).items() if name in concurrent}


def frozen_of(model: Model) -> dict[str, Any]:
    """Return `frozen`: True for a wholly frozen group, a tree for a partly frozen group, no entry for other groups."""
    found = {}
    for name, tree in model.by_leaf(lambda leaf: leaf.frozen).items():
        if all(jax.tree.leaves(tree)):
            found[name] = True
        elif any(jax.tree.leaves(tree)):
            found[name] = tree
    return found


def _stage(model: Model, number: int) -> Stage:
    piece = model.pieces[number]
    recompute: Any = piece.recompute
    if recompute == "dots":
        recompute = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return Stage(
        _function(piece, model.weighted),
        params=piece.group,
        ipu=ALL_IPUS if piece.place is None else piece.place,
        name=f"stage{number}",
        recompute=recompute,
        state=state_of(number) if piece.norm else None,
        random=piece.keep < 1,
        takes=piece.takes,
        predict=None if piece.loss is None else _function(dataclasses.replace(piece, loss=None, aux=False), False),
    )


def _function(piece: Piece, weighted: bool) -> Callable[..., Any]:
    # the function is exported once, as if read from a file, because jax cannot export inside a shard_map
    exports = {b: _export(block) for b, block in enumerate(piece.blocks) if block.kind == "exported"}

    def fn(
        w: Any, x: Any, mb: Any, *, state: Any = None, key: Any = None, skips: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(x, dict):
            x = x["h"] + x["mean"][:, None] * (x["three"] / 8).astype(x["h"].dtype)
        h = _begin(piece, w, x, mb)
        begun = h
        for name in piece.takes:
            assert skips is not None
            h = h + skips[name].mean(1, keepdims=True).astype(h.dtype)
        for b, block in enumerate(piece.blocks):
            h = h.astype(block.dtype)
            weights = None if w is None else w.get(str(b))
            h = exports[b].call(h) if b in exports else _BLOCKS[block.kind](block, weights, h, mb)
        if piece.keep < 1:
            if piece.draws:
                kept = jax.random.uniform(key, h.shape, jnp.float32) < piece.keep
            else:
                place = jnp.arange(h.size, dtype=jnp.uint32).reshape(h.shape)
                bits = jax.random.key_data(key)
                kept = ((bits[0] >> place) ^ (bits[1] >> place)) % 4 < round(piece.keep * 4)
            h = jnp.where(kept, h / piece.keep, 0).astype(h.dtype)
        new = None
        if piece.norm:
            h, new = _norm(_wide_enough(h), state)
        aux = {"mean": h.mean(), "rows": h[:, 0]} if piece.aux else None
        y = h if piece.loss is None else _LOSSES[piece.loss.kind](piece.loss, w, h, mb)
        if weighted and piece.loss is not None:
            count = count_of(mb)
            y, aux = y * count, count if piece.place is None else {"count": count}
        if piece.wraps:
            y = {"h": y, "mean": y.mean(1), "three": jnp.int32(3)}
        if new is None and not piece.sends:
            return y if aux is None else (y, aux) if piece.loss is not None else Outputs(y, aux=aux)
        return Outputs(y, state=new, skips={piece.sends: begun} if piece.sends else {}, aux=aux)

    return fn


def _wide_enough(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _begin(piece: Piece, w: Any, x: Any, mb: Any) -> Any:
    if piece.first == "x":
        return mb["x"]
    if piece.first == "local ids":
        return w["table"]["table"][mb["ids"]]
    if piece.first == "split ids":
        return embedding(w["table"]["table"], mb["ids"], size=VOCABULARY)
    return x


def _norm(h: Any, state: Any) -> tuple[Any, Any]:
    mean, var = h.mean(0), h.var(0)
    new = {
        "mean": MOMENTUM * state["mean"] + (1 - MOMENTUM) * mean,
        "var": MOMENTUM * state["var"] + (1 - MOMENTUM) * var,
        "count": state["count"] + 1,
    }
    return (h - mean) * lax.rsqrt(var + EPSILON), new


# blocks of a local stage


def _mlp(block: Block, w: Any, h: Any, mb: Any) -> Any:
    y = jnp.tanh(h @ w["w"].astype(h.dtype) + w["b"].astype(h.dtype))
    if "gain" in w:
        y = y * w["gain"].astype(h.dtype)
    return h + y if block.residual else y


def _scan(block: Block, w: Any, h: Any, mb: Any) -> Any:
    stacked = {name: leaf for name, leaf in w.items() if name != "shared"}
    if block.scaled:
        stacked[block.scaled] = stacked[block.scaled] * 0.5

    def layer(h: Any, p: Any) -> tuple[Any, None]:
        y = h @ p["a"].astype(h.dtype)
        if "gain" in p:
            y = y * p["gain"].astype(h.dtype)
        if "shared" in w:
            y = y + h @ w["shared"].astype(h.dtype)
        return h + jnp.tanh(y) @ p["b"].astype(h.dtype), None

    body = jax.checkpoint(layer) if block.remat else layer
    return lax.scan(body, h, stacked, reverse=block.reverse)[0]


def _loop(block: Block, w: Any, h: Any, mb: Any) -> Any:
    return lax.fori_loop(0, block.layers, lambda _, h: h + jnp.tanh(h @ w["w"].astype(h.dtype)), h)


def _attention(block: Block, w: Any, h: Any, mb: Any) -> Any:
    d = block.d_in
    qkv, out = w["qkv"].astype(h.dtype), w["out"]
    h = h + w["pos"][:ROWS].astype(h.dtype)
    q, k, v = h @ qkv[:, :d], h @ qkv[:, d : 2 * d], h @ qkv[:, 2 * d :]
    y = jax.nn.softmax(q @ k.T / jnp.sqrt(jnp.float32(d)).astype(h.dtype), axis=-1) @ v
    return h + jnp.tanh(y @ out[0].astype(h.dtype)) @ out[1].astype(h.dtype)


def _layer_norm(block: Block, w: Any, h: Any, mb: Any) -> Any:
    wide = _wide_enough(h)
    y = (wide - wide.mean(-1, keepdims=True)) * lax.rsqrt(wide.var(-1, keepdims=True) + EPSILON)
    return (y * w["gain"] + w["bias"]).astype(h.dtype)


def _constant(block: Block, w: Any, h: Any, mb: Any) -> Any:
    return h * jnp.cos(jnp.asarray(constant_of(block.constant, block.d_in))).astype(h.dtype)


def _callback(block: Block, w: Any, h: Any, mb: Any) -> Any:
    def on_the_host(x: Any) -> Any:
        return np.cos(constant_of(block.constant, block.d_in)) + 0 * np.asarray(x)[0]

    like = jax.ShapeDtypeStruct((block.d_in,), jnp.float32)
    return h * jax.pure_callback(on_the_host, like, lax.stop_gradient(mb["x"][:, :1])).astype(h.dtype)


def _export(block: Block) -> Any:
    shape = jax.ShapeDtypeStruct((ROWS, block.d_in), jnp.dtype(block.dtype))
    return jax.export.export(jax.jit(lambda h: _constant(block, None, h, None)))(shape)


def _cond(block: Block, w: Any, h: Any, mb: Any) -> Any:
    def one(h: Any) -> Any:
        return jnp.tanh(h @ w["w"].astype(h.dtype))

    return lax.cond(mb["flag"] > 0, one, lambda h: h * w["gain"].astype(h.dtype), h)


def _permutation(block: Block, w: Any, h: Any, mb: Any) -> Any:
    return h[:, w["perm"]] * w["gain"].astype(h.dtype)


def _convolution(block: Block, w: Any, h: Any, mb: Any) -> Any:
    dims = ("NWC", "WIO", "NWC")
    y = lax.conv_general_dilated(h[None], w["w"].astype(h.dtype), (1,), "SAME", dimension_numbers=dims)
    return h + jnp.tanh(y[0])


def _activation(block: Block, w: Any, h: Any, mb: Any) -> Any:
    return jnp.sin(h) + mb["x"][:, :1].astype(h.dtype)


# blocks of a concurrent stage, whose weights are this IPU's shards


def _columns(block: Block, w: Any, h: Any, mb: Any) -> Any:
    y = jnp.tanh(matmul(h, w["w"].astype(h.dtype), size=block.d_out, bias=w["b"].astype(h.dtype)))
    y = from_all(y, 1, block.d_out)
    if "gain" in w:
        y = y * w["gain"].astype(h.dtype)
    return h + y if block.residual else y


def _wide(block: Block, w: Any, h: Any, mb: Any) -> Any:
    up, down = w["up"].astype(h.dtype), w["down"].astype(h.dtype)
    up_bias, down_bias = w["up_bias"].astype(h.dtype), w["down_bias"].astype(h.dtype)
    size = block.layers
    if block.kind == "wide tokens":
        y = jnp.tanh(matmul(scatter_tokens(h), up, size=size, bias=up_bias, tokens=ROWS))
        down = matmul(y, down, split="rows", size=size, bias=down_bias, reduction="scatter")
        return h + from_all(down, 0, ROWS)
    y = matmul(h, up, size=size, bias=up_bias)
    if block.kind == "wide norm":
        y = layer_norm(y, w["gain"], w["bias"], size=size, epsilon=EPSILON)
    elif block.kind == "wide softmax":
        y = softmax(y, size=size)
    else:
        y = jnp.tanh(y)
    return h + matmul(y, down, split="rows", size=size, bias=down_bias)


_BLOCKS: dict[str, Callable[..., Any]] = {
    "mlp": _mlp,
    "scan": _scan,
    "loop": _loop,
    "attention": _attention,
    "layer norm": _layer_norm,
    "constant": _constant,
    "callback": _callback,
    "cond": _cond,
    "permutation": _permutation,
    "convolution": _convolution,
    "activation": _activation,
    "columns": _columns,
    "whole": _mlp,
    "wide": _wide,
    "wide norm": _wide,
    "wide softmax": _wide,
    "wide tokens": _wide,
}


# losses


def _mse(loss: Loss, w: Any, h: Any, mb: Any) -> Any:
    w = w["loss"]["w"]
    return jnp.mean((_wide_enough(h) @ _wide_enough(w) - mb["y"][:, : w.shape[1]]) ** 2)


def _classifier(loss: Loss, w: Any, h: Any, mb: Any) -> Any:
    logits = _wide_enough(h) @ _wide_enough(w["loss"]["w"]) + w["loss"]["b"]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    return jnp.mean(log_sum - jnp.take_along_axis(logits, mb["labels"][:, None], axis=-1)[:, 0])


def _options(loss: Loss) -> dict[str, Any]:
    return {
        "size": VOCABULARY,
        "label_smoothing": loss.label_smoothing,
        "z_loss": loss.z_loss,
        "soft_cap": loss.soft_cap,
        "reduction": "mean" if loss.mean_inside else "none",
    }


def _split_head(loss: Loss, w: Any, h: Any, mb: Any) -> Any:
    w = w["loss"]
    logits = matmul(_wide_enough(h), _wide_enough(w["w"]), size=VOCABULARY, bias=w["b"])
    return jnp.mean(log_softmax_cross_entropy(logits, mb["labels"], **_options(loss)))


def _tied(loss: Loss, w: Any, h: Any, mb: Any) -> Any:
    table = w["table"]["table"]
    logits = tied_projection(h.astype(table.dtype), table, size=VOCABULARY)
    return jnp.mean(log_softmax_cross_entropy(logits, mb["labels"], **_options(loss)))


def _linear(loss: Loss, w: Any, h: Any, mb: Any) -> Any:
    table = w["loss" if "loss" in w else "table"]["table"]
    return jnp.mean(linear_cross_entropy(h.astype(table.dtype), table, mb["labels"], **_options(loss)))


_LOSSES = {"mse": _mse, "classifier": _classifier, "split head": _split_head, "tied": _tied, "linear": _linear}

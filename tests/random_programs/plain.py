"""Compute a random model as a dense program: plain jnp on whole weights, without our library.

It differs from `placed` wherever possible: loops over layers are Python's, lookups are products with one-hot rows, and
each micro-batch is computed on its own and its gradient is added by hand.

`exact` programs get float64 weights and cast nothing; the others cast where the model says so. XLA keeps float32 if it
fuses one half-type operation with the next, so a whole model in one program rounds far less often than the same model
cut into stages. `fused=False` rounds after each operation.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from random_programs.closeness import as_float64
from random_programs.model import ROWS, VOCABULARY, Block, Loss, Model, Piece, constant_of, count_of, state_of

EPSILON, MOMENTUM = 0.1, 0.75


class Dense:
    """The dense program of a model.

    Args:
        model: the model to compute.
        exact: compute in float64, rather than in the model's own dtypes.
        fused: let XLA keep more digits between operations than their dtypes have.
    """

    def __init__(self, model: Model, *, exact: bool, fused: bool = True):
        self.model, self.exact = model, exact
        self.frozen = jax.tree.leaves(model.by_leaf(lambda leaf: leaf.frozen))
        self._options = None if fused else {"xla_allow_excess_precision": False}
        self._step = jax.jit(jax.value_and_grad(self._loss_of, has_aux=True), compiler_options=self._options)

    def run(self, weights: Any, batch: Any, state: Any, key: Any = None) -> tuple[Any, Any, dict[int, Any], Any]:
        """Return `(loss, gradients, {stage: aux of (replicas, M, ...)}, new state)` of one weight update.

        Args:
            weights: `{group: {block: {leaf: array}}}`, whole.
            batch: leaves (replicas, M, ...).
            state: `{group: tree}` of the batch norms.
            key: a typed key, if the model is random.
        """
        with jax.enable_x64(self.exact):
            if self.exact:
                weights, batch, state = as_float64(weights), as_float64(batch), as_float64(state)
            return self._run(weights, batch, state, key)

    def predict(self, weights: Any, batch: Any, state: Any, key: Any = None) -> np.ndarray:
        """Return the last stage's result before its loss, (replicas, m, ROWS, width); the state does not change."""
        with jax.enable_x64(self.exact):
            if self.exact:
                weights, batch, state = as_float64(weights), as_float64(batch), as_float64(state)
            forward = jax.jit(
                lambda mb, keys: self._forward(weights, mb, state, keys, predicts=True)[0],
                compiler_options=self._options,
            )
            lead = batch["x"].shape[:2]
            found = [
                np.asarray(forward({name: leaf[r, m] for name, leaf in batch.items()}, self._keys(key, r, m)))
                for r, m in np.ndindex(*lead)
            ]
            return np.stack(found).reshape(*lead, *found[0].shape)

    def _keys(self, key: Any, replica: int, m: int) -> Any:
        """Return the key of each stage for a micro-batch; None if nothing is random."""
        if not self.model.random:
            return None
        of_micro_batch = jax.random.fold_in(jax.random.fold_in(key, replica), m)
        return [jax.random.fold_in(of_micro_batch, stage) for stage in range(len(self.model.pieces))]

    def _loss_of(self, learning: Any, frozen: Any, mb: Any, state: Any, keys: Any) -> Any:
        whole = [f if one is None else one for one, f in zip(learning, frozen, strict=True)]
        treedef = jax.tree.structure(self.model.by_leaf(lambda leaf: 0))
        return self._forward(jax.tree.unflatten(treedef, whole), mb, state, keys)

    def _run(self, weights: Any, batch: Any, first_state: Any, key: Any) -> tuple[Any, Any, dict[int, Any], Any]:
        model = self.model
        leaves, treedef = jax.tree.flatten(weights)
        learning = [None if still else leaf for leaf, still in zip(leaves, self.frozen, strict=True)]
        frozen = [leaf if still else None for leaf, still in zip(leaves, self.frozen, strict=True)]
        losses, counts, sums, states, auxes = [], [], [np.zeros(leaf.shape) for leaf in leaves], [], []
        for replica in range(model.replicas):
            state = first_state
            for m in range(model.micro_batches):
                keys = self._keys(key, replica, m)
                mb = {name: leaf[replica, m] for name, leaf in batch.items()}
                (loss, (state, aux)), gradients = self._step(learning, frozen, mb, state, keys)
                counts.append(float(count_of(mb)) if model.weighted else 1.0)
                with np.errstate(invalid="ignore"):  # an infinite loss of no tokens is NaN
                    losses.append(np.float64(loss) * counts[-1])
                    for i, gradient in enumerate(gradients):
                        if gradient is not None:
                            sums[i] += np.asarray(gradient).astype(np.float64) * counts[-1]
                auxes.append(jax.device_get(aux))
            states.append(jax.device_get(state))
        count = np.sum(counts) or np.inf  # the mean over no tokens is 0
        gradients = [total if model.reduction == "sum" else total / count for total in sums]
        loss = np.sum(losses) if model.weighted and model.reduction == "sum" else np.sum(losses) / count
        lead = (model.replicas, model.micro_batches)
        stacked = jax.tree.map(lambda *parts: np.stack(parts).reshape(*lead, *np.shape(parts[0])), *auxes)
        mean = lambda *s: s[0] if s[0].dtype == np.int32 else np.mean(s, axis=0)
        return loss, jax.tree.unflatten(treedef, gradients), stacked, jax.tree.map(mean, *states)

    def _forward(self, weights: Any, mb: Any, state: Any, keys: Any, *, predicts: bool = False) -> Any:
        model, h = self.model, None
        state, sent, aux = dict(state), {}, {}
        for i, piece in enumerate(model.pieces):
            w = weights.get(piece.group, {})
            if isinstance(h, tuple):
                h = h[0] + h[1] * 0.375
            h = self._begin(piece, w, h, mb)
            begun = h
            for name in piece.takes:
                h = h + jnp.mean(sent[name], axis=1)[:, None].astype(h.dtype)
            for b, block in enumerate(piece.blocks):
                h = _BLOCKS[block.kind](block, w.get(str(b), {}), self._cast(h, block.dtype), mb, self._cast)
            if piece.keep < 1:
                h = h * _kept(piece, keys[i], h.shape) / piece.keep
            if piece.norm:
                h, state[state_of(i)] = self._norm(h, state[state_of(i)])
            if piece.sends:
                sent[piece.sends] = begun
            if piece.aux:
                aux[i] = {"mean": jnp.sum(h) / h.size, "rows": h[:, 0]}
            if piece.loss is not None and not predicts:
                h = self._loss(piece.loss, w, h, mb)
            if piece.wraps:
                h = (h, jnp.mean(h, axis=1)[:, None])
        return h, (state, aux)

    def _cast(self, h: Any, dtype: Any) -> Any:
        return h if self.exact else h.astype(dtype)

    def _begin(self, piece: Piece, w: Any, h: Any, mb: Any) -> Any:
        if piece.first == "x":
            return mb["x"]
        if piece.first:
            return jax.nn.one_hot(mb["ids"], VOCABULARY, dtype=w["table"]["table"].dtype) @ w["table"]["table"]
        return h

    def _norm(self, h: Any, state: Any) -> tuple[Any, Any]:
        h = self._cast(h, "float32")
        mean = jnp.sum(h, axis=0) / ROWS
        var = jnp.sum(jnp.square(h - mean), axis=0) / ROWS
        new = {
            "mean": state["mean"] * MOMENTUM + mean * (1 - MOMENTUM),
            "var": state["var"] * MOMENTUM + var * (1 - MOMENTUM),
            "count": state["count"] + 1,
        }
        return (h - mean) / jnp.sqrt(var + EPSILON), new

    def _loss(self, loss: Loss, w: Any, h: Any, mb: Any) -> Any:
        w = w.get("loss", w.get("table"))
        if loss.kind == "mse":
            h = self._cast(h, "float32")
            off = jnp.einsum("nd,de->ne", h, self._cast(w["w"], "float32")) - mb["y"][:, : w["w"].shape[1]]
            return jnp.sum(jnp.square(off)) / off.size
        if loss.kind in ("tied", "linear"):
            logits = jnp.einsum("nd,vd->nv", self._cast(h, w["table"].dtype), w["table"])
        else:
            logits = jnp.einsum("nd,dv->nv", self._cast(h, "float32"), self._cast(w["w"], "float32")) + w["b"]
        logits = self._cast(logits, "float32")
        if loss.soft_cap is not None:
            logits = jnp.tanh(logits / loss.soft_cap) * loss.soft_cap
        total = jnp.log(jnp.sum(jnp.exp(logits), axis=1))
        target = jax.nn.one_hot(mb["labels"], VOCABULARY) * (1 - loss.label_smoothing)
        target = target + loss.label_smoothing / VOCABULARY
        per_token = jnp.sum(target * (total[:, None] - logits), axis=1) + loss.z_loss * total**2
        return jnp.sum(per_token) / ROWS


Cast = Callable[[Any, Any], Any]


def _kept(piece: Piece, key: Any, shape: tuple[int, int]) -> Any:
    if piece.draws:
        return jax.random.uniform(key, shape, jnp.float32) < np.float32(piece.keep)
    first, second = jax.random.key_data(key)
    place = jnp.arange(shape[0] * shape[1], dtype=jnp.uint32)
    return (((first >> place) ^ (second >> place)) % 4 < round(piece.keep * 4)).reshape(shape)


def _mlp(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    y = jnp.tanh(jnp.einsum("nd,de->ne", h, cast(w["w"], block.dtype)) + cast(w["b"], block.dtype)[None])
    if "gain" in w:
        y = y * cast(w["gain"], block.dtype)[None]
    return h + y if block.residual else y


def _scan(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    order = range(block.layers)
    for layer in reversed(order) if block.reverse else order:
        a, b = cast(w["a"][layer], block.dtype), cast(w["b"][layer], block.dtype)
        a, b = (a * 0.5 if block.scaled == "a" else a), (b * 0.5 if block.scaled == "b" else b)
        y = jnp.einsum("nd,de->ne", h, a)
        if "gain" in w:
            y = y * cast(w["gain"][layer], block.dtype)
        if "shared" in w:
            y = y + jnp.einsum("nd,de->ne", h, cast(w["shared"], block.dtype))
        h = h + jnp.einsum("ne,ed->nd", jnp.tanh(y), b)
    return h


def _loop(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    for _ in range(block.layers):
        h = jnp.tanh(jnp.einsum("nd,de->ne", h, cast(w["w"], block.dtype))) + h
    return h


def _attention(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    d = block.d_in
    h = h + cast(w["pos"], block.dtype)[:ROWS]
    of_h = jnp.einsum("nd,de->ne", h, cast(w["qkv"], block.dtype))
    q, k, v = of_h[:, :d], of_h[:, d : 2 * d], of_h[:, 2 * d :]
    scores = jnp.exp(jnp.einsum("nd,md->nm", q, k) / np.sqrt(d).astype(np.float32))
    y = jnp.einsum("nm,md->nd", scores / jnp.sum(scores, axis=1)[:, None], v)
    first, second = jnp.split(cast(w["out"], block.dtype), 2)
    return h + jnp.tanh(jnp.einsum("nd,de->ne", y, first[0])) @ second[0]


def _layer_norm(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    wide = cast(h, "float32")
    centred = wide - jnp.sum(wide, axis=1)[:, None] / block.d_in
    y = centred / jnp.sqrt(jnp.sum(centred**2, axis=1)[:, None] / block.d_in + EPSILON)
    return cast(y * w["gain"] + w["bias"], block.dtype)


def _constant(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    return h * cast(np.cos(constant_of(block.constant, block.d_in).astype(np.float64)), block.dtype)


def _cond(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    one = jnp.tanh(jnp.einsum("nd,de->ne", h, cast(w["w"], block.dtype)))
    return jnp.where(mb["flag"] > 0, one, h * cast(w["gain"], block.dtype))


def _permutation(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    moved = jnp.stack([jnp.take(h, w["perm"][i], axis=1) for i in range(block.d_in)], axis=1)
    return moved * cast(w["gain"], block.dtype)


def _convolution(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    w = cast(w["w"], block.dtype)
    padded = jnp.pad(h, ((1, 1), (0, 0)))
    return h + jnp.tanh(sum(jnp.einsum("nd,de->ne", padded[k : k + ROWS], w[k]) for k in range(3)))


def _activation(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    return jnp.sin(h) + cast(mb["x"][:, :1], block.dtype)


def _wide(block: Block, w: Any, h: Any, mb: Any, cast: Cast) -> Any:
    """Return the result of a column-split and a row-split product, with the function between them."""
    y = jnp.einsum("nd,de->ne", h, cast(w["up"], block.dtype)) + cast(w["up_bias"], block.dtype)
    if block.kind == "wide norm":
        wide = cast(y, "float32")
        centred = wide - jnp.sum(wide, axis=1)[:, None] / y.shape[1]
        wide = centred / jnp.sqrt(jnp.sum(centred**2, axis=1)[:, None] / y.shape[1] + EPSILON)
        y = cast(wide * w["gain"] + w["bias"], block.dtype)
    elif block.kind == "wide softmax":
        y = jnp.exp(cast(y, "float32"))
        y = cast(y / jnp.sum(y, axis=1)[:, None], block.dtype)
    else:
        y = jnp.tanh(y)
    return h + jnp.einsum("ne,ed->nd", y, cast(w["down"], block.dtype)) + cast(w["down_bias"], block.dtype)


_BLOCKS: dict[str, Callable[..., Any]] = {
    "mlp": _mlp,
    "scan": _scan,
    "loop": _loop,
    "attention": _attention,
    "layer norm": _layer_norm,
    "constant": _constant,
    "callback": _constant,
    "exported": _constant,
    "cond": _cond,
    "permutation": _permutation,
    "convolution": _convolution,
    "activation": _activation,
    "columns": _mlp,
    "whole": _mlp,
    "wide": _wide,
    "wide norm": _wide,
    "wide softmax": _wide,
    "wide tokens": _wide,
}

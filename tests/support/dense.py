"""Make small models as stages, each with a dense twin: plain jnp on whole weights, without our library.

`chain` makes a model for any placement. The place of a stage decides what it computes:

    first    local: a layer on the batch's `x`                    concurrent: an embedding of `ids`, rows split
    middle   local: a layer that also reads the micro-batch       concurrent: a layer, columns split, gathered
    last     local: a classifier and its cross-entropy            concurrent: the same, vocabulary split

Sizes are chosen so that no split dim is divisible by the number of IPUs: VOCABULARY = 10 on 4 IPUs, 7 columns on 2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh

VOCABULARY = 10
ROWS = 3  # of a micro-batch
WIDTHS = (7, 5, 9, 4, 6)  # widths of the boundaries, if stages differ


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: stages, whole weights, a batch with leading dims (M,) or (replicas, M), and one micro-batch's loss."""

    stages: tuple[Stage, ...]
    specs: dict[str, PartitionSpec | dict[str, PartitionSpec]]
    params: dict[str, Any]
    batch: dict[str, jax.Array]
    dense: Callable[[dict[str, Any], dict[str, jax.Array]], jax.Array]
    replicas: int
    micro_batches: int

    def pipeline(self, ipus: int, **options: Any) -> Pipeline:
        return Pipeline(
            self.stages,
            mesh=make_mesh(self.replicas, ipus),
            specs=self.specs,
            gradient_accumulation=self.micro_batches,
            **options,
        )

    def twin(self, reduction: str = "mean") -> tuple[jax.Array, dict[str, Any]]:
        """Return the loss and gradients of the dense twin, which differentiates all micro-batches together."""
        count = self.micro_batches * self.replicas
        flat = self.batch
        if self.replicas > 1:
            flat = jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), flat)

        def mean_loss(params: dict[str, Any]) -> jax.Array:
            return jnp.mean(jax.vmap(lambda microbatch: self.dense(params, microbatch))(flat).astype(jnp.float32))

        loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(self.params)
        scale = count if reduction == "sum" else 1
        return loss, jax.tree.map(lambda g: g * scale, gradients)


def chain(
    places: tuple[int | None, ...],
    micro_batches: int,
    *,
    replicas: int = 1,
    like: bool = True,
    tied: bool = False,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> Model:
    """Return a model with one stage for each place (None: concurrent).

    Args:
        places: the IPU of each stage, or None.
        micro_batches: M.
        replicas: copies of the model.
        like: all stages have the same width; otherwise each boundary has its own width, and each stage its own tree.
        tied: an embedding at the start and a head at the end, both concurrent, share one table.
        dtype: the dtype of weights and activations; the loss is always float32.
        seed: the seed of weights and batch.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(scale=0.5, size=shape)

    last = len(places) - 1
    width = [6 if like or tied else WIDTHS[i % len(WIDTHS)] for i in range(len(places) + 1)]
    stages, dense_layers, params, specs = [], [], {}, {}
    for i, place in enumerate(places):
        group = f"stage{i}"
        embeds, concurrent, d_in, d_out = i == 0 and place is None and last > 0, place is None, width[i], width[i + 1]
        if tied and (embeds or i == last):
            group = "table"
        weights: dict[str, np.ndarray] = {}
        if embeds:
            weights["table"] = normal(VOCABULARY, d_out)
            fn, dense = _embed, _dense_embed
            specs[group] = PartitionSpec("ipu")
        elif i == last and tied:
            weights = params["table"]
            fn, dense = _tied_head, _dense_tied_head
        elif i == last:
            weights |= {"w": normal(d_in, VOCABULARY), "b": normal(VOCABULARY)}
            fn, dense = (_head if concurrent else _classifier), _dense_classifier
            if concurrent:
                specs[group] = {"w": PartitionSpec(None, "ipu"), "b": PartitionSpec("ipu")}
        elif concurrent:
            weights |= {"w": normal(d_in, d_out), "b": normal(d_out), "gain": normal(d_out)}
            fn, dense = _gathered_layer(d_out), _dense_layer
            specs[group] = {"w": PartitionSpec(None, "ipu"), "b": PartitionSpec("ipu"), "gain": PartitionSpec()}
        else:
            weights |= {"w": normal(d_in, d_out), "b": normal(d_out)}
            if not like and i % 2:
                weights["gain"] = normal(d_out)
            fn, dense = _layer, _dense_layer
        params[group] = jax.tree.map(lambda w: jnp.asarray(w, dtype), weights)
        stages.append(Stage(fn, params=group, ipu=ALL_IPUS if place is None else place, name=f"stage{i}"))
        dense_layers.append((dense, group))

    lead = (micro_batches,) if replicas == 1 else (replicas, micro_batches)
    batch = {
        "x": jnp.asarray(normal(*lead, ROWS, width[0]), dtype),
        "ids": jnp.asarray(rng.integers(VOCABULARY, size=(*lead, ROWS)), jnp.int32),
        "labels": jnp.asarray(rng.integers(VOCABULARY, size=(*lead, ROWS)), jnp.int32),
    }

    def dense_loss(params: dict[str, Any], microbatch: dict[str, jax.Array]) -> jax.Array:
        x = microbatch["x"]
        for dense, group in dense_layers:
            x = dense(params[group], x, microbatch)
        return x

    return Model(tuple(stages), specs, params, batch, dense_loss, replicas, micro_batches)


# The stages, as a user of the library writes them.


def _layer(p: Any, x: Any, mb: Any) -> Any:
    x = mb["x"] if x is None else x
    return jnp.tanh(x @ p["w"] + p["b"]) * p.get("gain", 1) + mb["x"][:, :1]


def _gathered_layer(columns: int) -> Callable[[Any, Any, Any], Any]:
    def fn(p: Any, x: Any, mb: Any) -> Any:
        y = lax.all_gather(jnp.tanh(x @ p["w"] + p["b"]), "ipu", axis=1, tiled=True)[:, :columns]
        return y * p["gain"] + mb["x"][:, :1]

    return fn


def _embed(p: Any, x: Any, mb: Any) -> Any:
    rows = p["table"].shape[0]
    here = mb["ids"] - rows * lax.axis_index("ipu")
    mine = (here >= 0) & (here < rows)
    return lax.psum(jnp.where(mine[:, None], p["table"][jnp.clip(here, 0, rows - 1)], 0), "ipu")


def _classifier(p: Any, x: Any, mb: Any) -> Any:
    x = mb["x"] if x is None else x
    logits = (x @ p["w"] + p["b"]).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, mb["labels"][:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)


def _cross_entropy_over_ipus(logits: Any, labels: Any) -> Any:
    logits = logits.astype(jnp.float32)
    columns = logits.shape[1]
    first = columns * lax.axis_index("ipu")
    logits = jnp.where(first + jnp.arange(columns) < VOCABULARY, logits, -jnp.inf)
    top = lax.pmax(lax.stop_gradient(logits).max(axis=1), "ipu")
    total = lax.psum(jnp.exp(logits - top[:, None]).sum(axis=1), "ipu")
    picked = jnp.where(labels[:, None] == first + jnp.arange(columns), logits, 0).sum(axis=1)
    return jnp.mean(jnp.log(total) + top - lax.psum(picked, "ipu"))


def _head(p: Any, x: Any, mb: Any) -> Any:
    x = mb["x"] if x is None else x
    return _cross_entropy_over_ipus(x @ p["w"] + p["b"], mb["labels"])


def _tied_head(p: Any, x: Any, mb: Any) -> Any:
    return _cross_entropy_over_ipus(x @ p["table"].T, mb["labels"])


# The twins, written independently in a different way.


def _dense_layer(p: Any, x: Any, mb: Any) -> Any:
    hidden = jnp.tanh(jnp.einsum("nd,de->ne", x, p["w"]) + p["b"][None])
    return (hidden * p["gain"] if "gain" in p else hidden) + mb["x"][:, 0][:, None]


def _dense_embed(p: Any, x: Any, mb: Any) -> Any:
    return jax.nn.one_hot(mb["ids"], VOCABULARY, dtype=p["table"].dtype) @ p["table"]


def _dense_cross_entropy(logits: Any, labels: Any) -> Any:
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.sum(chances * jax.nn.one_hot(labels, VOCABULARY), axis=-1))


def _dense_classifier(p: Any, x: Any, mb: Any) -> Any:
    return _dense_cross_entropy(jnp.einsum("nd,dv->nv", x, p["w"]) + p["b"][None], mb["labels"])


def _dense_tied_head(p: Any, x: Any, mb: Any) -> Any:
    return _dense_cross_entropy(jnp.einsum("nd,vd->nv", x, p["table"]), mb["labels"])


def largest_relative_error(found: Any, expected: Any) -> float:
    """Return the largest difference over all leaves, relative to the leaf's largest expected magnitude; inf for NaN."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)

    def one(f: Any, e: Any) -> float:
        f, e = np.asarray(f, np.float64), np.asarray(e, np.float64)
        assert f.shape == e.shape
        error = np.abs(f - e).max(initial=0) / max(np.abs(e).max(initial=0), 1e-30)
        return float(np.inf if np.isnan(error) else error)

    return max(map(one, jax.tree.leaves(found), jax.tree.leaves(expected)), default=0.0)

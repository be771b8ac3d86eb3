"""Make a pipeline whose weights are split over "tensor", and train its twin with plain optax on one device.

    blocks     Megatron's MLP: `up` by columns, `down` by rows, `scale` whole, a 1-D `bias` split
    head       on the last IPU, its columns over "tensor"; or concurrent, its rows over "tensor" and columns over "ipu"

The loss is a mean of squares, in which no weight has a gradient of 0. Letters: B rows, D features, F hidden, V outputs.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh

B = 6
BLOCK_SPECS = {"scale": P(), "up": P(None, "tensor"), "bias": P("tensor"), "down": P("tensor", None)}


def _block(w: Any, x: Any, mb: Any, *, is_split: bool) -> Any:
    split = lax.with_sharding_constraint if is_split else lambda value, _: value
    x = mb["x"] if x is None else x
    hidden = jnp.tanh(split((x * w["scale"]) @ w["up"], P(None, "tensor")) + w["bias"])
    return split(x + hidden @ w["down"], P())


def _loss_of(outputs: Any, mb: Any, weighted: bool) -> Any:
    errors = jnp.sum((outputs - mb["y"]) ** 2, axis=-1)
    return (jnp.sum(errors * mb["counted"]), mb["counted"].sum()) if weighted else jnp.mean(errors)


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """Describe a model with as many blocks as `blocks` says, on any mesh.

    Attributes:
        blocks: number of blocks; IPU i gets `blocks / ipus` of them.
        features, hidden, outputs: D, F and V.
        micro_batches: of an update, over all replicas.
        concurrent: whether the head is on all IPUs, V over "ipu" and D over "tensor".
        weighted: whether a loss is a sum with its count.
    """

    blocks: int = 2
    features: int = 8
    hidden: int = 12
    outputs: int = 8
    micro_batches: int = 4
    concurrent: bool = False
    weighted: bool = False

    def params(self, dtype: Any = np.float64) -> dict[str, Any]:
        rng, d, f = np.random.default_rng(5), self.features, self.hidden
        normal = lambda *shape: rng.normal(scale=0.4, size=shape).astype(dtype)
        blocks = {
            f"block{i}": {"scale": 1 + normal(d), "up": normal(d, f), "bias": normal(f), "down": normal(f, d)}
            for i in range(self.blocks)
        }
        return {**blocks, "head": {"w": normal(d, self.outputs)}}

    def batches(self, updates: int, dtype: Any = np.float64) -> dict[str, Any]:
        """Return the micro-batches of some updates: leaves (updates, micro_batches, B, ...)."""
        rng, lead = np.random.default_rng(6), (updates, self.micro_batches, B)
        normal = lambda width: rng.normal(size=(*lead, width)).astype(dtype)
        counted = (rng.random(lead) < 0.6).astype(dtype)
        return {"x": normal(self.features), "y": normal(self.outputs), "counted": counted}

    def for_mesh(self, batches: Any, mesh: Any) -> Any:
        """Return the same micro-batches, shared out among replicas: leaves (updates, [replicas,] M, B, ...)."""
        replicas = mesh.shape["replica"]
        if replicas == 1:
            return batches
        m = self.micro_batches // replicas
        return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], replicas, m, *leaf.shape[2:]), batches)

    def specs(self, *, is_split: bool) -> dict[str, Any]:
        """Return the specs of a mesh with "tensor", or of one without."""
        if not is_split:
            return {"head": {"w": P(None, "ipu")}} if self.concurrent else {}
        head = P("tensor", "ipu") if self.concurrent else P(None, "tensor")
        return {**{f"block{i}": BLOCK_SPECS for i in range(self.blocks)}, "head": {"w": head}}

    def pipeline(self, mesh: Any, **options: Any) -> Pipeline:
        """Return the pipeline. On a mesh without further axes it names none."""
        ipus, is_split = mesh.shape["ipu"], "tensor" in mesh.shape
        block = functools.partial(_block, is_split=is_split)
        stages = [Stage(block, params=f"block{i}", ipu=i * ipus // self.blocks) for i in range(self.blocks)]
        stages.append(Stage(self._head, params="head", ipu=ALL_IPUS if self.concurrent else ipus - 1))
        m = self.micro_batches // mesh.shape["replica"]
        given: dict[str, Any] = {"schedule": "1f1b", "gradient_accumulation": m} | options
        return Pipeline(stages, mesh=mesh, specs=self.specs(is_split=is_split), **given)

    def _head(self, w: Any, x: Any, mb: Any) -> Any:
        outputs = x @ w["w"]
        if self.concurrent:
            outputs = lax.all_gather(outputs, "ipu", axis=1, tiled=True)[:, : self.outputs]
        return _loss_of(outputs, mb, self.weighted)

    # the twin, in plain jax

    def plain_gradients(self, params: Any, batch: Any, reduction: str = "mean") -> tuple[Any, Any]:
        """Return loss and gradients of an update's batch, leaves (micro_batches, B, ...)."""

        def total(params: Any) -> Any:
            x = batch["x"]
            for i in range(self.blocks):
                w = params[f"block{i}"]
                hidden = jnp.tanh(jnp.einsum("mbd,d,df->mbf", x, w["scale"], w["up"]) + w["bias"])
                x = x + jnp.einsum("mbf,fd->mbd", hidden, w["down"])
            errors = jnp.sum((jnp.einsum("mbd,dv->mbv", x, params["head"]["w"]) - batch["y"]) ** 2, axis=-1)
            return jnp.sum(errors * batch["counted"]) if self.weighted else jnp.sum(errors.mean(axis=1))

        loss, gradients = jax.value_and_grad(total)(params)
        count = batch["counted"].sum() if self.weighted else self.micro_batches
        if reduction == "mean":
            gradients = jax.tree.map(lambda g: g / count, gradients)
        return loss if self.weighted and reduction == "sum" else loss / count, gradients


def norm(tree: Any) -> Any:
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


def _times(factor: float, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def trained_plainly(
    model: SplitModel, optimizer: Any, batches: Any, options: Mapping[str, Any], reduction: str = "mean"
) -> dict[str, Any]:
    """Return weights, optax's state, the average and lists of losses and norms, after an update for each batch.

    Of `options` it knows "max_gradient_norm", "ema_decay" and "on_nonfinite" ("skip").
    """
    params: Any = model.params()
    state, average = optimizer.init(params), params
    losses, norms, decay = [], [], options.get("ema_decay")
    gradients_of = jax.jit(lambda params, batch: model.plain_gradients(params, batch, reduction))
    update = jax.jit(functools.partial(_updated, optimizer))
    for number in range(len(batches["x"])):
        batch = jax.tree.map(lambda leaf, i=number: leaf[i], batches)
        loss, gradients = jax.device_get(gradients_of(params, batch))  # NumPy compiles nothing
        losses.append(float(loss))
        norms.append((norm(gradients), norm(params)))
        if "on_nonfinite" in options and not np.isfinite(norms[-1][0]):
            continue
        factor = min(1, options.get("max_gradient_norm", np.inf) / norms[-1][0])
        params, state = jax.device_get(update(params, state, _times(factor, gradients)))
        if decay is not None:
            average = jax.tree.map(np.add, _times(decay, average), _times(1 - decay, params))
    return {"params": params, "optimizer": state, "ema": average, "losses": losses, "norms": norms}


def _updated(optimizer: Any, params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def mesh_of(*shape: int) -> Any:
    """Return a mesh of (replicas, ipus), or of (replicas, ipus, tensor)."""
    return make_mesh(*shape[:2], **({"tensor": shape[2]} if len(shape) > 2 else {}))

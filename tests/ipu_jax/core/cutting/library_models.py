"""Whole models of Flax and Equinox, as their authors would write them. Each function returns an `Example`."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .example import LENGTH, VOCAB, D, Example, cross_entropy, images, rows, squared_error, tokens

HEADS = 2


def initialized(model: nn.Module, *inputs: Any) -> Any:
    """Draw variables of the model's shapes. It is not run: no test depends on how Flax draws them."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    shapes, rng = jax.eval_shape(lambda: model.init(keys, *inputs)), np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        is_near_1 = getattr(path[-1], "key", None) in ("scale", "var", "sigma")
        return (is_near_1 + (0.1 if is_near_1 else 0.3) * rng.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree.map_with_path(draw, shapes)


class Block(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train: bool = True):
        mask = nn.make_causal_mask(x[..., 0])
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(HEADS, use_bias=False, deterministic=True)(h, mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=not train)(h)
        h = nn.Dense(2 * D)(nn.LayerNorm()(x))
        h = nn.Dense(D)(nn.gelu(h))
        return x + nn.Dropout(self.dropout, deterministic=not train)(h)


class GPT(nn.Module):
    layers: int
    tied: bool = False
    scanned: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, ids, train: bool = True):
        embed = nn.Embed(VOCAB, D)
        x = embed(ids) + nn.Embed(LENGTH, D, name="positions")(jnp.arange(ids.shape[1]))
        if self.scanned:
            body = nn.remat(lambda block, x, _: (block(x), None), prevent_cse=False)
            scan = nn.scan(body, variable_axes={"params": 1}, split_rngs={"params": True}, length=self.layers)
            x, _ = scan(Block(name="blocks"), x, None)
        else:
            for _ in range(self.layers):
                x = Block(self.dropout)(x, train=train)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(VOCAB, use_bias=False)(x)


def linen_gpt() -> Example:
    """The embedding is tied, and there is dropout."""
    model = GPT(layers=1, tied=True, dropout=0.3)
    params = initialized(model, jnp.zeros((1, LENGTH), int))["params"]

    def logits(params, batch, key):
        return model.apply({"params": params}, batch["ids"], rngs={"dropout": key})

    def loss(params, batch, key):
        return cross_entropy(logits(params, batch, key), batch["labels"])

    return Example(loss, params, tokens, takes_key=True, outputs=logits)


def linen_gpt_scanned() -> Example:
    """Blocks are one `nn.scan` that stacks them along axis 1, each recomputed in the backward pass by `nn.remat`."""
    model = GPT(layers=5, scanned=True)
    params = initialized(model, jnp.zeros((1, LENGTH), int))["params"]

    def logits(params, batch):
        return model.apply({"params": params}, batch["ids"])

    def loss(params, batch):
        return cross_entropy(logits(params, batch), batch["labels"])

    return Example(loss, params, tokens, outputs=logits)


class Experts(nn.Module):
    experts: int = 4

    @nn.compact
    def __call__(self, x):
        shares = jax.nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(x))
        best, chosen = jax.lax.top_k(shares, 2)
        best = best / best.sum(-1, keepdims=True)
        sent = jnp.einsum("rk,rke->re", best, jax.nn.one_hot(chosen, self.experts))
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.experts, D, 2 * D))
        down = self.param("down", init, (self.experts, 2 * D, D))
        self.sow("losses", "balance", self.experts * jnp.sum(shares.mean(0) * (sent > 0).mean(0)))
        self.sow("intermediates", "chosen", chosen)
        h = jax.nn.relu(jnp.einsum("rd,edf->erf", x, up))
        return x + jnp.einsum("erf,efd,re->rd", h, down, sent)


class MixtureOfExperts(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = Experts()(nn.LayerNorm()(x))
        return nn.Dense(D)(x)


def linen_mixture_of_experts() -> Example:
    """Experts are chosen by top-k; the sown balance losses count, and the sown choices are the aux."""
    model = MixtureOfExperts()
    params = initialized(model, rows(np.random.default_rng(0))["x"])["params"]

    def outputs(params, batch):
        return model.apply({"params": params}, batch["x"], mutable=["losses", "intermediates"])

    def loss(params, batch):
        y, sown = outputs(params, batch)
        balance = sum(map(jnp.sum, jax.tree.leaves(sown["losses"])))
        return squared_error(y, batch["y"]) + 0.1 * balance, sown["intermediates"]

    return Example(loss, params, rows, outputs=outputs)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        for features in (4, 8):
            y = nn.Conv(features, (3, 3), use_bias=False)(x)
            y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
            y = nn.Conv(features, (3, 3), use_bias=False)(y)
            y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
            x = nn.relu(y + nn.Conv(features, (1, 1), use_bias=False)(x))
        return nn.Dense(5)(x.mean((1, 2)))


def linen_batch_norm() -> Example:
    """A ResNet, whose averages are the state."""
    model = ConvNet()
    variables = initialized(model, images(np.random.default_rng(0))["image"])

    def loss(params, batch_stats, batch):
        logits, new = model.apply(
            {"params": params, "batch_stats": batch_stats}, batch["image"], mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch["label"]), {"logits": logits}, new["batch_stats"]

    def in_evaluation(params, batch_stats, batch):
        return model.apply({"params": params, "batch_stats": batch_stats}, batch["image"], train=False)

    stats = variables["batch_stats"]
    return Example(loss, variables["params"], images, state=stats, tolerance=5e-5, outputs=in_evaluation)


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        skips = []
        for features in (3, 4):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(6, (3, 3))(x))
        for features, skip in zip((4, 3), reversed(skips), strict=True):
            x = nn.ConvTranspose(features, (2, 2), strides=(2, 2))(x)
            x = nn.relu(nn.Conv(features, (3, 3))(jnp.concatenate([x, skip], -1)))
        return nn.Conv(2, (1, 1))(x)


def linen_unet() -> Example:
    """The way up reads what the way down computed."""
    model = UNet()

    params = initialized(model, images(np.random.default_rng(0))["image"])["params"]

    def outputs(params, batch):
        return model.apply({"params": params}, batch["image"])

    def loss(params, batch):
        return squared_error(outputs(params, batch), batch["image"])

    return Example(loss, params, images, outputs=outputs)


def equinox_mlp() -> Example:
    """`eqx.partition` keeps the activation out of the weights; the batch is mapped."""
    model = eqx.nn.MLP(D, D, width_size=12, depth=4, activation=jax.nn.softplus, key=jax.random.key(3))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def outputs(params, batch):
        return jax.vmap(eqx.combine(params, static))(batch["x"])

    def loss(params, batch):
        return squared_error(outputs(params, batch), batch["y"])

    return Example(loss, params, rows, outputs=outputs)


LIBRARY_MODELS = (
    linen_gpt, linen_gpt_scanned, linen_mixture_of_experts, linen_batch_norm, linen_unet, equinox_mlp,
)  # fmt: skip

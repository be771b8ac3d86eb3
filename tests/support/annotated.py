"""Make models annotated for further mesh axes, each with a dense twin: plain jax on one device, without constraints.

    model = annotated("mlp", ipus=2)
    pipeline = model.pipeline(make_mesh(1, 2, tensor=2), schedule="1f1b")

One block is on each IPU, and the head on the last one. `BLOCKS` says what each kind splits:

    mlp         Megatron's MLP: hidden features over "tensor"
    heads       attention: heads over "tensor"
    sequence    mlp, and tokens over "tensor" between blocks
    both        mlp, and tokens over "context"
    tuple       mlp over ("context", "tensor"), with a whole head
    fsdp        weights and rows over "tensor", weights whole where they are used
    plain       mlp without annotations and specs
    shift       tokens over "tensor", of which each reads the one before it
    convolution tokens over "tensor", of which each reads its neighbours
    experts     a mixture of experts: rows and experts over "tensor", tokens exchanged by hand
    ring        attention: tokens over "tensor", keys and values passed on by hand

Letters: B rows, T tokens, D features, F hidden features, H heads, K features of a head, V vocabulary, E experts.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage
from sharded_ops import log_softmax_cross_entropy, matmul

B, T, D, F, H, K, V, E = 4, 8, 8, 12, 4, 2, 8, 4
UNEVEN_V = 11  # of the concurrent head, which pads
COLUMNS = P(None, "tensor")
split = lax.with_sharding_constraint


@dataclasses.dataclass(frozen=True)
class Annotated:
    """A model: stages, specs, whole weights, a batch with leading dims (M,) or (replicas, M), and its dense twin.

    `dense(params, batch)` returns the logits of a batch with leading dim N, in plain jax.
    """

    stages: tuple[Stage, ...]
    specs: dict[str, Any]
    params: dict[str, Any]
    batch: dict[str, Any]
    dense: Callable[[Any, Any], Any]
    micro_batches: int
    replicas: int

    def pipeline(self, mesh: Mesh, **options: Any) -> Pipeline:
        given: dict[str, Any] = {"specs": self.specs, "gradient_accumulation": self.micro_batches}
        return Pipeline(self.stages, mesh=mesh, **(given | options))

    def logits(self, params: Any) -> jax.Array:
        """Return the dense twin's logits, with the leading dims of the batch."""
        dims = 2 if self.replicas > 1 else 1
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[dims + 1 :]), self.batch)
        logits = self.dense(params, rows)
        return logits.reshape(*self.batch["labels"].shape, -1)

    def loss(self, params: Any) -> jax.Array:
        """Return the dense twin's loss, the mean over all micro-batches and replicas."""
        chances = jax.nn.log_softmax(self.logits(params).astype(jnp.float32))
        return -jnp.mean(jnp.sum(chances * jax.nn.one_hot(self.batch["labels"], chances.shape[-1]), axis=-1))

    def twin(self) -> tuple[jax.Array, Any]:
        """Return the dense twin's loss and every gradient."""
        return jax.jit(jax.value_and_grad(self.loss))(self.params)


@dataclasses.dataclass(frozen=True)
class Block:
    """A kind of block: `fn(w, x)` with annotations, the shapes and specs of its weights, its dense twin, and the head.

    `head` is the spec of the local head's weights, if the block has specs.
    """

    fn: Callable[[Any, Any], Any]
    shapes: Mapping[str, tuple[int, ...]]
    specs: Mapping[str, P]
    dense: Callable[[Any, Any], Any]
    head: P = COLUMNS


def annotated(
    kind: str,
    ipus: int,
    *,
    replicas: int = 1,
    micro_batches: int = 4,
    concurrent_head: bool = False,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> Annotated:
    """Return a model with a block on each IPU.

    Args:
        kind: a key of `BLOCKS`.
        ipus: IPUs of a replica.
        replicas: copies of the model.
        micro_batches: M.
        concurrent_head: whether the head is concurrent, its vocabulary over "ipu" by sharded_ops and its features over
            "tensor"; otherwise it is on the last IPU, its vocabulary over "tensor".
        dtype: of weights and activations; the loss is float32.
        seed: of weights and batch.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.normal(scale=0.4, size=shape).astype(dtype)

    lead = (micro_batches,) if replicas == 1 else (replicas, micro_batches)
    vocabulary = UNEVEN_V if concurrent_head else V
    batch = {
        "x": normal(*lead, B, T, D),
        "ids": rng.integers(V, size=(*lead, B, T), dtype=np.int32),
        "labels": rng.integers(vocabulary, size=(*lead, B, T), dtype=np.int32),
    }
    block, names = BLOCKS[kind], [f"block{i}" for i in range(ipus)]

    params: dict[str, Any] = {name: {leaf: normal(*shape) for leaf, shape in block.shapes.items()} for name in names}
    params["head"] = normal(D, vocabulary)
    stages = [Stage(_reading(block.fn), params=names[0], ipu=0)]
    stages += [Stage(lambda w, x, mb: block.fn(w, x), params=name, ipu=i) for i, name in enumerate(names) if i]
    stages.append(CONCURRENT_HEAD if concurrent_head else head_on(ipus - 1))
    specs: dict[str, Any] = {name: dict(block.specs) for name in names if block.specs}
    if concurrent_head or block.specs:
        specs["head"] = P("tensor", "ipu") if concurrent_head else block.head

    def dense(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for name in names:
            x = block.dense(params[name], x)
        return jnp.einsum("btd,dv->btv", x, params["head"])

    return Annotated(tuple(stages), specs, params, batch, dense, micro_batches, replicas)


def _reading(fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda w, x, mb: fn(w, mb["x"])


# heads


def cross_entropy(logits: Any, labels: Any) -> Any:
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _cross_entropy_without_a_gather(logits: Any, labels: Any) -> Any:
    # in a partly manual program XLA ends the process at a gather from a split dim, if another axis splits other dims
    logits = logits.astype(jnp.float32)
    picked = jnp.where(labels[..., None] == jnp.arange(logits.shape[-1]), logits, 0).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def head_on(ipu: int) -> Stage:
    """Return the last stage, which splits the vocabulary as its weights are split."""
    return Stage(
        lambda w, x, mb: _cross_entropy_without_a_gather(x @ w, mb["labels"]),
        params="head",
        ipu=ipu,
        predict=lambda w, x, mb: x @ w,
    )


def _concurrent_logits(w: Any, x: Any, mb: Any) -> Any:
    return matmul(x, w, axis="ipu", size=UNEVEN_V)


def _concurrent_loss(w: Any, x: Any, mb: Any) -> Any:
    logits = _concurrent_logits(w, x, mb)
    return jnp.mean(log_softmax_cross_entropy(logits, mb["labels"], size=UNEVEN_V, axis="ipu"))


CONCURRENT_HEAD = Stage(_concurrent_loss, params="head", ipu=ALL_IPUS)


# blocks, as a user annotates them


def mlp(w: Any, x: Any) -> Any:
    hidden = split(jnp.tanh((x * w["scale"]) @ w["up"]), P(None, None, "tensor"))
    return split(x + hidden @ w["down"], P())


def heads(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bthk", x * w["scale"], w["qkv"][i]) for i in range(3))
    q, k, v = (split(a, P(None, None, "tensor")) for a in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / K**0.5, axis=-1)
    mixed = jnp.einsum("bhts,bshk->bthk", scores, v)
    return split(x + jnp.einsum("bthk,hkd->btd", mixed, w["out"]), P())


def sequence(w: Any, x: Any) -> Any:
    x = split(x, P(None, "tensor"))
    hidden = split(jnp.tanh(split(x * w["scale"], P()) @ w["up"]), P(None, None, "tensor"))
    return split(x + hidden @ w["down"], P(None, "tensor"))


def both(w: Any, x: Any) -> Any:
    hidden = split(jnp.tanh((x * w["scale"]) @ w["up"]), P(None, "context", "tensor"))
    return split(x + hidden @ w["down"], P(None, "context"))


def over_two(w: Any, x: Any) -> Any:
    hidden = split(jnp.tanh((x * w["scale"]) @ w["up"]), P(None, None, ("context", "tensor")))
    return split(x + hidden @ w["down"], P())


def fsdp(w: Any, x: Any) -> Any:
    used = {name: split(leaf, P()) for name, leaf in w.items()}
    x = split(x, P("tensor"))
    return split(x + jnp.tanh((x * used["scale"]) @ used["up"]) @ used["down"], P("tensor"))


def shift(w: Any, x: Any) -> Any:
    x = split(x, P(None, "tensor"))
    before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
    return split(x + jnp.tanh((before * w["scale"]) @ w["up"]) @ w["down"], P(None, "tensor"))


def convolution(w: Any, x: Any) -> Any:
    x = split(x, P(None, "tensor"))
    mixed = lax.conv_general_dilated(x, w["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return split(x + jnp.tanh(mixed), P(None, "tensor"))


def plain(w: Any, x: Any) -> Any:
    return x + jnp.tanh((x * w["scale"]) @ w["up"]) @ w["down"]


def experts(w: Any, x: Any) -> Any:
    exchange = lambda blocks: lax.all_to_all(blocks, "tensor", 0, 0, tiled=True)

    def of_device(x: Any, number: Any, up: Any, down: Any) -> Any:
        goes = (jnp.arange(E)[:, None] == number.reshape(-1))[..., None]
        came = exchange(jnp.where(goes, x.reshape(-1, D), 0)).reshape(-1, len(up), goes.shape[1], D)
        results = jnp.einsum("nerf,efd->nerd", jnp.tanh(jnp.einsum("nerd,edf->nerf", came, up)), down)
        return exchange(results.reshape(E, -1, D)).sum(0).reshape(x.shape)

    rows = P("tensor")
    over_devices = jax.shard_map(of_device, axis_names={"tensor"}, in_specs=rows, out_specs=rows)
    chances = jax.nn.softmax((x * w["scale"]) @ w["router"])
    return x + chances.max(-1, keepdims=True) * over_devices(x, chances.argmax(-1), w["up"], w["down"])


def ring(w: Any, x: Any) -> Any:
    def of_device(q: Any, k: Any, v: Any) -> Any:
        devices, total, mixed = lax.axis_size("tensor"), 0, 0
        for _ in range(devices):
            shares = jnp.exp(jnp.einsum("bthk,bshk->bhts", q, k) / K**0.5)
            total, mixed = total + shares.sum(-1), mixed + jnp.einsum("bhts,bshk->bthk", shares, v)
            k, v = lax.ppermute((k, v), "tensor", [(i, (i + 1) % devices) for i in range(devices)])
        return mixed / jnp.moveaxis(total, 1, 2)[..., None]

    tokens = P(None, "tensor")
    over_devices = jax.shard_map(of_device, axis_names={"tensor"}, in_specs=tokens, out_specs=tokens)
    q, k, v = (jnp.einsum("btd,dhk->bthk", x * w["scale"], w["qkv"][i]) for i in range(3))
    return x + jnp.einsum("bthk,hkd->btd", over_devices(q, k, v), w["out"])


# their twins, written separately


def _dense_mlp(w: Any, x: Any) -> Any:
    hidden = jnp.tanh(jnp.einsum("btd,d,df->btf", x, w["scale"], w["up"]))
    return jnp.einsum("btf,fd->btd", hidden, w["down"]) + x


def _dense_heads(w: Any, x: Any) -> Any:
    rows, tokens, _ = x.shape
    scaled = w["scale"] * x
    q, k, v = (jnp.reshape(scaled @ each.reshape(D, H * K), (rows, tokens, H, K)) for each in w["qkv"])
    mixed = jax.nn.dot_product_attention(q, k, v)
    return x + mixed.reshape(rows, tokens, H * K) @ w["out"].reshape(H * K, D)


def _dense_shift(w: Any, x: Any) -> Any:
    before = jnp.roll(x, 1, axis=1).at[:, 0].set(0)
    return x + jnp.einsum("btf,fd->btd", jnp.tanh(jnp.einsum("btd,d,df->btf", before, w["scale"], w["up"])), w["down"])


def _dense_convolution(w: Any, x: Any) -> Any:
    padded = jnp.pad(x, [(0, 0), (1, 1), (0, 0)])
    taps = [jnp.einsum("btd,de->bte", padded[:, i : i + T], w["kernel"][i]) for i in range(3)]
    return x + jnp.tanh(taps[0] + taps[1] + taps[2])


def _dense_experts(w: Any, x: Any) -> Any:
    def of_token(x: Any) -> Any:
        scores = (w["scale"] * x) @ w["router"]
        best = jnp.argmax(scores)
        chance = jnp.exp(scores[best]) / jnp.exp(scores).sum()
        return x + chance * (jnp.tanh(x @ w["up"][best]) @ w["down"][best])

    return jax.vmap(jax.vmap(of_token))(x)


_MLP_SHAPES = {"scale": (D,), "up": (D, F), "down": (F, D)}
_MLP_SPECS = {"scale": P(), "up": COLUMNS, "down": P("tensor", None)}
_OVER_TWO = ("context", "tensor")
_HEADS_SHAPES = {"scale": (D,), "qkv": (3, D, H, K), "out": (H, K, D)}

BLOCKS = {
    "mlp": Block(mlp, _MLP_SHAPES, _MLP_SPECS, _dense_mlp),
    "heads": Block(
        heads,
        _HEADS_SHAPES,
        {"scale": P(), "qkv": P(None, None, "tensor"), "out": P("tensor")},
        _dense_heads,
    ),
    "sequence": Block(sequence, _MLP_SHAPES, _MLP_SPECS, _dense_mlp),
    "both": Block(both, _MLP_SHAPES, _MLP_SPECS, _dense_mlp),
    "tuple": Block(
        over_two, _MLP_SHAPES, {"scale": P(), "up": P(None, _OVER_TWO), "down": P(_OVER_TWO)}, _dense_mlp, P()
    ),
    "fsdp": Block(fsdp, _MLP_SHAPES, dict.fromkeys(_MLP_SHAPES, P("tensor")), _dense_mlp),
    "plain": Block(plain, _MLP_SHAPES, {}, _dense_mlp),
    "shift": Block(shift, _MLP_SHAPES, {}, _dense_shift),
    "convolution": Block(convolution, {"kernel": (3, D, D)}, {}, _dense_convolution),
    "experts": Block(
        experts,
        {"scale": (D,), "router": (D, E), "up": (E, D, F), "down": (E, F, D)},
        {"scale": P(), "router": P(), "up": P("tensor"), "down": P("tensor")},
        _dense_experts,
    ),
    "ring": Block(ring, _HEADS_SHAPES, {}, _dense_heads),
}

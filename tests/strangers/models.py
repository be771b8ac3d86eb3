"""Cut model files of other projects, and models of installed packages, each by at most five statements.

A stranger is a function that takes the imported module and returns a loss function, its weights, and a micro-batch.
`FILES` are fetched (`make strangers`); `PACKAGES` come with packages that the tests install.
"""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from strangers.files import Files

ROWS, LENGTH, WORDS = 2, 16, 64  # of a micro-batch: sequences, tokens of each, the vocabulary
TOKENS: Final = np.random.default_rng(0).integers(1, WORDS, (ROWS, LENGTH)).astype(np.int32)
IMAGES: Final = np.random.default_rng(1).normal(size=(ROWS, 32, 32, 3)).astype(np.float32)


Problem = tuple[Any, ...]  # the loss function, its weights, a micro-batch, and perhaps which leaves are frozen


@dataclasses.dataclass(frozen=True)
class Stranger:
    """Hold where a model comes from, what is unusual in it, and how it is called."""

    name: str
    module: str
    unusual: str
    problem: Callable[[ModuleType], Problem]
    files: Files | None = None


FILES: Final[list[Stranger]] = []
PACKAGES: Final[list[Stranger]] = []


def new_key() -> Any:
    return jax.random.key(0)  # a constant would start jax


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def all_but_weights(net: Any) -> Any:
    """Return which leaves of an NNX module are not weights, such as statistics and counts, as `frozen=` takes them."""
    return jax.tree.map(
        lambda v: not isinstance(v, nnx.Param), net, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )


def of_file(repository: str, commit: str, module: str, unusual: str, *, folder: str = "", also: tuple[str, ...] = ()):
    """Register a stranger whose module is a file of a repository; `also` are the other files that it imports."""
    paths = (module.replace(".", "/") + ".py", *also)

    def register(problem: Callable[[ModuleType], Problem]) -> Callable[[ModuleType], Problem]:
        name = f"{repository} {folder + '/' if folder else ''}{paths[0]}"
        FILES.append(Stranger(name, module, unusual, problem, Files(repository, commit, folder, paths)))
        return problem

    return register


def of_package(module: str, name: str, unusual: str):
    """Register a stranger of an installed package."""

    def register(problem: Callable[[ModuleType], Problem]) -> Callable[[ModuleType], Problem]:
        PACKAGES.append(Stranger(name, module, unusual, problem))
        return problem

    return register


FLAX, FLAX_COMMIT = "google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0"
BONSAI, BONSAI_COMMIT = "jax-ml/bonsai", "36284254cf738d99c1c5d1e3a292d27656a0a365"
OF_GEMMA = (
    "helpers.py",
    "layers.py",
    "modules.py",
    "params.py",
    "positional_embeddings.py",
    "sow_lib.py",
    "transformer_cfg.py",
)


@of_file(
    "google-deepmind/nanodo",
    "10aefdeed40a63293daf112b91a5538cd24fa3a4",
    "nanodo.model",
    also=("nanodo/fsdp.py",),
    unusual="`setup`, a table that `attend` reads again, partitioned boxes as leaves",
)
def nanodo(m: ModuleType) -> Problem:
    net = m.TransformerDo(m.DoConfig(D=32, H=4, L=LENGTH, N=8, V=WORDS, F=64, fsdp_enabled=False))
    return lambda p, x: cross_entropy(net.apply(p, x)[:, :-1], x[:, 1:]), net.init(new_key(), TOKENS), TOKENS


@of_file(FLAX, FLAX_COMMIT, "models", "packed segments, dropout by a key", folder="examples/lm1b")
def lm1b(m: ModuleType) -> Problem:
    sizes = {"emb_dim": 32, "num_heads": 4, "num_layers": 8, "qkv_dim": 32, "mlp_dim": 64, "max_len": LENGTH}
    net = m.TransformerLM(m.TransformerConfig(WORDS, WORDS, **sizes, logits_via_embedding=False))
    loss = lambda p, x, key: cross_entropy(net.apply(p, x, rngs={"dropout": key})[:, :-1], x[:, 1:])
    return loss, net.init({"params": new_key(), "dropout": new_key()}, TOKENS), TOKENS


@of_file(
    FLAX,
    FLAX_COMMIT,
    "models",
    "an encoder that each decoder layer reads, one table for three uses",
    folder="examples/wmt",
)
def wmt(m: ModuleType) -> Problem:
    sizes = {"emb_dim": 32, "num_heads": 4, "num_layers": 4, "qkv_dim": 32, "mlp_dim": 64, "max_len": LENGTH}
    of_both = {"share_embeddings": True, "logits_via_embedding": True, "deterministic": True}
    net = m.Transformer(m.TransformerConfig(WORDS, WORDS, **sizes, **of_both))
    return lambda p, x: cross_entropy(net.apply(p, x, x), x), net.init(new_key(), TOKENS, TOKENS), TOKENS


@of_file(FLAX, FLAX_COMMIT, "models", "messages shrink from stage to stage", folder="examples/imagenet")
def resnet(m: ModuleType) -> Problem:
    net = m.ResNet18(num_classes=10, num_filters=8, dtype=jnp.float32)
    (stats, params) = (net.init(new_key(), IMAGES, train=False)[name] for name in ("batch_stats", "params"))
    apply = lambda p, x: net.apply({"params": p, "batch_stats": stats}, x, train=False)
    return lambda p, x: (apply(p, x) ** 2).mean(), params, IMAGES


@of_file(
    FLAX,
    FLAX_COMMIT,
    "transformer",
    "NNX, `out_sharding=`, a mask and positions as inputs, capped logits",
    folder="examples/gemma",
    also=OF_GEMMA,
)
def gemma(m: ModuleType) -> Problem:
    cfg = m.TransformerConfig(
        8, WORDS, 32, 64, 4, 8, 2, 30.0, True, True, [*m.modules.AttentionType] * 4, sliding_window_size=8
    )
    net, at, mask = (
        m.Transformer(cfg, rngs=nnx.Rngs(0)),
        m.build_positions_from_mask(TOKENS != 0),
        m.make_causal_attn_mask(TOKENS != 0),
    )
    net.eval()
    loss = lambda n, x: cross_entropy(n(x, at, None, mask)[0][:, :-1], x[:, 1:])
    return loss, net, TOKENS, all_but_weights(net)


@of_file(FLAX, FLAX_COMMIT, "models", "a tagger: no mask, dropout in each block", folder="examples/nlp_seq")
def tagger(m: ModuleType) -> Problem:
    sizes = {"emb_dim": 32, "num_heads": 4, "num_layers": 8, "qkv_dim": 32, "mlp_dim": 64, "max_len": LENGTH}
    net = m.Transformer(m.TransformerConfig(WORDS, 8, **sizes))
    loss = lambda p, x, key: cross_entropy(net.apply(p, inputs=x, train=True, rngs={"dropout": key}), x % 8)
    return loss, net.init({"params": new_key(), "dropout": new_key()}, inputs=TOKENS, train=False), TOKENS


@of_file(BONSAI, BONSAI_COMMIT, "bonsai.models.dinov3.modeling", "register tokens, rotary positions of patches")
def dinov3(m: ModuleType) -> Problem:
    cfg = m.ModelConfig((4, 4), 32, 64, 8, 4, image_size=32)
    net, loss = (
        m.Dinov3ViTModel(cfg, rngs=nnx.Rngs(0)),
        lambda n, x: cross_entropy(n(x)["pooler_output"], np.arange(ROWS)),
    )
    return loss, net, IMAGES.transpose(0, 3, 1, 2)


@of_file(BONSAI, BONSAI_COMMIT, "bonsai.models.unet.modeling", "four nested skips")
def unet(m: ModuleType) -> Problem:
    net = m.UNet(m.ModelConfig(in_channels=3, features=(8, 16, 32, 64, 128)), rngs=nnx.Rngs(0))
    return lambda n, x: (n(x) ** 2).mean(), net, IMAGES


@of_file(BONSAI, BONSAI_COMMIT, "bonsai.models.densenet121.modeling", "each layer reads all earlier ones of its block")
def densenet(m: ModuleType) -> Problem:
    net = m.DenseNet(m.ModelConfig(10, [2, 4, 4, 2], 8), rngs=nnx.Rngs(0))
    return lambda n, x: (n(x) ** 2).mean(), net, IMAGES, all_but_weights(net)


@of_file(
    BONSAI, BONSAI_COMMIT, "bonsai.models.mamba2.modeling", "a state space in chunks, -inf under exp, a tied table"
)
def mamba2(m: ModuleType) -> Problem:
    cfg = dataclasses.replace(m.ModelConfig.tiny(), vocab_size=WORDS, num_hidden_layers=8, chunk_size=8)
    return lambda n, x: n(x, labels=x)["loss"], m.Mamba2ForCausalLM(cfg, rngs=nnx.Rngs(0)), TOKENS


@of_file(BONSAI, BONSAI_COMMIT, "bonsai.models.umt5.modeling", "encoder and decoder, a relative bias in each layer")
def umt5(m: ModuleType) -> Problem:
    cfg = m.ModelConfig(WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, dropout_rate=0.0)
    graph, params, rest = nnx.split(m.UMT5Model(cfg, rngs=nnx.Rngs(0)), nnx.Param, ...)
    ones, net = np.ones_like(TOKENS), lambda p: nnx.merge(graph, p, rest, copy=True)
    return lambda p, x: cross_entropy((n := net(p)).lm_head(n(x, ones, x, ones)), x), params, TOKENS


@of_file(
    BONSAI, BONSAI_COMMIT, "bonsai.models.qwen3.modeling", "a cache that is written in training, too; a bfloat16 table"
)
def qwen3(m: ModuleType) -> Problem:
    cfg = m.ModelConfig(8, WORDS, 32, 64, 4, 8, 2, 10_000, 8, 1e4, 1e-6, True)
    loss = lambda n, x: cross_entropy(
        n(x, cache=m.init_cache(cfg, ROWS, LENGTH, 0, jnp.float32), segment_ids=x * 0 + 1)[:, :-1], x[:, 1:]
    )
    return loss, m.Qwen3(cfg, rngs=nnx.Rngs(0)), TOKENS


@of_file(
    "google-research/t5x",
    "cc342d419ec3e3e9c4bf1df33c82330cafdc1e16",
    "t5x.examples.t5.network",
    also=("t5x/examples/t5/layers.py",),
    unusual="one relative bias that all layers of a stack read, axes of parameters in a second collection",
)
def t5x(m: ModuleType) -> Problem:
    cfg = m.T5Config(WORDS, emb_dim=32, num_heads=4, num_encoder_layers=4, num_decoder_layers=4, head_dim=8, mlp_dim=64)
    net = m.Transformer(cfg)
    apply = lambda p, x: net.apply({"params": p}, x, x, x, enable_dropout=False)
    return (
        lambda p, x: cross_entropy(apply(p, x), x),
        net.init(new_key(), TOKENS, TOKENS, TOKENS, enable_dropout=False)["params"],
        TOKENS,
    )


@of_file(
    "google-deepmind/recurrentgemma",
    "2efa84dac0e68e63547a27a18fa943c98f1c312e",
    "recurrentgemma.jax.griffin",
    also=(
        "recurrentgemma/common.py",
        *(
            f"recurrentgemma/jax/{name}.py"
            for name in ("array_typing", "layers", "modules", "scan", "complex_lib", "pallas")
        ),
    ),
    unusual="two kinds of blocks in turn, a scan over time, a derivative rule of its own, remat",
)
def griffin(m: ModuleType) -> Problem:
    block, c = m.common.TemporalBlockType, m.common
    cfg = c.GriffinConfig(
        WORDS,
        32,
        64,
        4,
        (block.RECURRENT, block.RECURRENT, block.ATTENTION) * 3,
        True,
        8,
        30.0,
        scan_type=c.ScanType.LINEAR_NATIVE,
    )
    net, at = m.Griffin(cfg), jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), TOKENS.shape)
    loss = lambda p, x: cross_entropy(net.apply(p, x, at, return_cache=False)[0][:, :-1], x[:, 1:])
    return loss, net.init(new_key(), jnp.asarray(TOKENS), at), TOKENS


@of_file(
    "google-deepmind/dm-haiku",
    "f4d858a5cbb29140855d68f81f5fd625e078a5ae",
    "model",
    "Haiku, a key for each dropout",
    folder="examples/transformer",
)
def haiku(m: ModuleType) -> Problem:
    net = m.hk.transform(lambda x: m.LanguageModel(m.Transformer(4, 8, 8, 0.1), 32, WORDS, 0)(x))
    return lambda p, x, key: cross_entropy(net.apply(p, key, x)[:, :-1], x[:, 1:]), net.init(new_key(), TOKENS), TOKENS


@of_package("jax.example_libraries.stax", "jax's stax", "pairs of functions, weights in nested tuples")
def stax(m: ModuleType) -> Problem:
    block = m.serial(m.FanOut(2), m.parallel(m.serial(m.Dense(64), m.Gelu, m.Dense(32)), m.Identity), m.FanInSum)
    init, apply = m.serial(m.Flatten, m.Dense(32), *[block] * 8, m.Dense(10))
    return lambda p, x: (apply(p, x) ** 2).mean(), init(new_key(), IMAGES.shape)[1], IMAGES


@of_package("equinox.nn", "equinox.nn", "a module of arrays and functions, vmapped over examples")
def equinox(m: ModuleType) -> Problem:
    import equinox as eqx

    layers = [m.MLP(32, 32, 64, 2, key=jax.random.key(k)) for k in range(8)]
    params, static = eqx.partition(m.Sequential(layers), eqx.is_inexact_array)
    rows = IMAGES.reshape(-1, 32)
    return lambda p, x: (jax.vmap(eqx.combine(p, static))(x) ** 2).mean(), params, rows


@of_package("haiku", "haiku.nets.ResNet18", "statistics of the batch in a second tree")
def haiku_resnet(m: ModuleType) -> Problem:
    net = m.transform_with_state(lambda x: m.nets.ResNet18(10)(x, is_training=True))
    params, state = net.init(new_key(), IMAGES)
    return lambda p, x: (net.apply(p, state, None, x)[0] ** 2).mean(), params, IMAGES


@of_package("haiku", "haiku.nets.MobileNetV1", "depthwise convolutions, whose work and weights lie apart")
def mobilenet(m: ModuleType) -> Problem:
    net = m.transform_with_state(lambda x: m.nets.MobileNetV1(num_classes=10, use_bn=False)(x, is_training=False))
    params, state = net.init(new_key(), IMAGES)
    return lambda p, x: cross_entropy(net.apply(p, state, None, x)[0], np.arange(ROWS)), params, IMAGES


@of_package("jraph", "jraph.GraphConvolution", "sums over the edges of a graph")
def graphs(m: ModuleType) -> Problem:
    edges = np.random.default_rng(2).integers(0, 12, (2, 40))
    graph = lambda x: m.GraphsTuple(x, None, *edges, None, np.array([12]), np.array([40]))

    def loss(params, x):
        for w in params:
            x = x + m.GraphConvolution(lambda n, w=w: jnp.tanh(n @ w))(graph(x)).nodes
        return (x**2).mean()

    return loss, [np.eye(16, dtype=np.float32) / (k + 2) for k in range(8)], IMAGES.reshape(-1, 16)[:12]


@of_package("haiku", "haiku.GRU", "each layer is a loop over time")
def recurrent(m: ModuleType) -> Problem:
    def layers(x):
        x = m.Embed(WORDS, 32)(x.T)
        for net in [m.GRU(32) for _ in range(8)]:
            x = x + m.dynamic_unroll(net, x, net.initial_state(ROWS))[0]
        return (x**2).mean()

    net = m.without_apply_rng(m.transform(layers))
    return net.apply, net.init(new_key(), TOKENS), TOKENS

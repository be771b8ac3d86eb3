"""Test the examples that tune or serve a model: loss, gradients and tokens equal a dense twin's, as scripts say."""

import collections
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import distill, dpo, lora, serve
from ipu_jax import Pipeline
from support import documents
from support.against_plain import assert_equals_plain, bubbles_hold_nan  # noqa: F401 (a fixture)

ROWS = 3
FROZEN = {lora: {"base": True, "lora": False}, dpo: dpo.FROZEN, distill: distill.FROZEN}
TOKENS = {lora: ("tokens",), dpo: ("chosen", "rejected"), distill: ("tokens",)}


def make_weights(example):
    """Return weights whose adapters change the base, with what is frozen in bfloat16."""
    half = lambda tree: jax.tree.map(lambda w: w.astype(jnp.bfloat16), tree)
    if example is distill:
        return {"teacher": half(lora.make_base(24)), "student": lora.make_base(8)}
    random, base = np.random.default_rng(3), lora.make_base()
    moved = lambda w: w + random.normal(scale=0.1, size=w.shape).astype(np.float32)
    return {"base": half(base), "lora": jax.tree.map(moved, lora.make_adapters(base))}


def make_batch(example):
    random, shape = np.random.default_rng(4), (lora.M, ROWS, lora.LENGTH)
    return {name: random.integers(lora.VOCABULARY, size=shape, dtype=np.int32) for name in TOKENS[example]}


def make_pipeline(example, schedule, ipus, weights, batch):
    one = {name: rows[0] for name, rows in batch.items()}
    options = {"schedule": schedule, "gradient_accumulation": lora.M, "frozen": FROZEN[example]}
    return Pipeline.from_function(example.loss, weights, one, ipus=ipus, **options)


# the twins, of one sequence (T,)


def logits_of(base, adapters, tokens):
    """Return the logits (T, V): adapters are added to the base's products, and heads attend one by one."""

    def normed(x):
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    x = base["table"][tokens] + base["positions"]
    for k, given in enumerate(base["layers"]):
        w = {
            name: w + (adapters[k][name]["a"] @ adapters[k][name]["b"] if adapters else 0) for name, w in given.items()
        }
        width, read = x.shape[1] // lora.HEADS, []
        for head in range(lora.HEADS):
            own = [slice(part * x.shape[1] + head * width, part * x.shape[1] + (head + 1) * width) for part in range(3)]
            q, k_of, v = (normed(x) @ w["qkv"][:, columns] for columns in own)
            scores = jnp.exp(q @ k_of.T / np.sqrt(width)) * np.tri(len(tokens))
            read.append(scores / scores.sum(1, keepdims=True) @ v)
        x = x + jnp.concatenate(read, 1) @ w["out"]
        h = normed(x) @ w["up"]
        x = x + h / 2 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) @ w["down"]
    return normed(x) @ base["table"].T


def log_chances(base, adapters, tokens):
    """Return the log-probability of each token after the first."""
    scores = logits_of(base, adapters, tokens)[:-1]
    return (scores - jnp.log(jnp.exp(scores).sum(1, keepdims=True)))[np.arange(len(tokens) - 1), tokens[1:]]


def loss_of_adapters(weights, sequences):
    return -log_chances(weights["base"], weights["lora"], sequences["tokens"]).mean()


def loss_of_preference(weights, sequences):
    base, gains = weights["base"], []
    for tokens in (sequences["chosen"], sequences["rejected"]):
        both = [log_chances(base, adapters, tokens).sum() for adapters in (weights["lora"], None)]
        gains.append(both[0] - both[1])
    return jnp.log(1 + jnp.exp(-0.1 * (gains[0] - gains[1])))


def loss_of_student(weights, sequences):
    tokens = sequences["tokens"]
    teacher, student = (jnp.exp(logits_of(weights[name], None, tokens)[:-1] / 2) for name in ("teacher", "student"))
    wanted, found = (scores / scores.sum(1, keepdims=True) for scores in (teacher, student))
    soft = (wanted * jnp.log(wanted / found)).sum(1).mean()
    return 0.5 * 4 * soft - 0.5 * log_chances(weights["student"], None, tokens).mean()


TWINS = {lora: loss_of_adapters, dpo: loss_of_preference, distill: loss_of_student}


def mean_loss(example, weights, batch):
    def trained(is_frozen, tree):
        wide = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), tree)
        return jax.lax.stop_gradient(wide) if is_frozen else wide

    weights = {name: trained(FROZEN[example][name], tree) for name, tree in weights.items()}
    rows = {name: rows.reshape(-1, lora.LENGTH) for name, rows in batch.items()}
    return jax.vmap(lambda row: TWINS[example](weights, row))(rows).mean()


name_of = lambda value: value.__name__.split(".")[-1] if inspect.ismodule(value) else None


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ipus"), [("1f1b", 4), ("zb-h1", 2)])
@pytest.mark.parametrize("example", TWINS, ids=name_of)
def test_loss_and_gradients_equal_a_dense_twin(example, schedule, ipus):
    weights, batch = make_weights(example), make_batch(example)
    pipeline = make_pipeline(example, schedule, ipus, weights, batch)
    assert_equals_plain(pipeline, weights, batch, lambda weights: mean_loss(example, weights, batch))


@pytest.mark.parametrize("example", [dpo, distill], ids=name_of)
def test_an_ipu_holds_an_even_share_of_the_weights(example):
    weights, batch = make_weights(example), make_batch(example)
    pipeline = make_pipeline(example, "1f1b", 4, weights, batch)
    held = collections.Counter()
    for leaf in jax.tree.leaves(pipeline.shard(weights)):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    tied = sum(tree["table"].nbytes for tree in weights.values() if "table" in tree)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert len(held) == 4
    assert max(held.values()) - tied <= 1.15 * (total - tied) / 4


@pytest.mark.slow
@pytest.mark.parametrize("example", TWINS, ids=name_of)
def test_a_script_verifies_itself_and_learns(example):
    out = documents.printed(example)
    errors = re.findall(r"relative error (\S+?)(?:;| at )", out)
    assert len(errors) == 4
    assert max(map(float, errors)) < 1e-5
    for first, last in re.findall(r"^loss (\S+) to (\S+)$", out, re.MULTILINE):
        assert float(last) < 0.4 * float(first)
    *_, base, adapters, before, after = out.splitlines()
    if example is lora:
        assert [base, adapters, before] == ["base: 103.4 kB", "lora: 32.8 kB", "moments of Adam: 65.5 kB"]
        assert float(re.findall(r"differ by (\S+)", after)[0]) < 1e-5
    if example is dpo:
        assert [int(re.findall(r"(\d+)%", line)[0]) > 95 for line in (before, after)] == [False, True]
    if example is distill:
        entropies = [list(map(float, re.findall(r"\d\.\d+", line))) for line in (before, after)]
        assert entropies[0][0] == entropies[0][1] < entropies[1][1] < 0.4 * entropies[1][0]


# serving


@jax.jit
def served_logits(params, tokens):
    return logits_of(params, None, tokens)


def served_by_the_twin(params, prompt, length, count):
    """Return the likeliest tokens after a prompt, one after the other, of a sequence that is whole each time."""
    tokens = np.zeros(serve.LENGTH, np.int32)
    tokens[:length] = prompt[:length]
    for at in range(length, length + count):
        tokens[at] = served_logits(params, tokens)[at - 1].argmax()
    return tokens[length : length + count]


@pytest.mark.fast("2")
@pytest.mark.parametrize("ipus", [1, 2, 4])
def test_each_group_gets_the_tokens_of_a_dense_twin(ipus, monkeypatch):
    monkeypatch.setattr(serve, "LAYERS", max(2, ipus))
    params = jax.tree.map(lambda w: 3 * w, serve.init(jax.random.key(0)))
    batch, steps = {"tokens": serve.sequences(0, 2)}, 4
    pipeline = Pipeline.from_function(serve.loss, params, batch, ipus=ipus, gradient_accumulation=4)
    random, shape = np.random.default_rng(3), (serve.GROUPS + 1, serve.B)
    prompts = random.integers(serve.VOCABULARY, size=(*shape, serve.PROMPT), dtype=np.int32)
    lengths = random.integers(1, serve.PROMPT + 1, size=shape, dtype=np.int32)
    found = serve.serve(pipeline, pipeline.shard(params), prompts, lengths, steps)
    assert [len(tokens) for tokens in found] == [4, 2, 4, 4, 2]
    for group, tokens in enumerate(found):
        of_group = [
            served_by_the_twin(params, *of, len(tokens)) for of in zip(prompts[group], lengths[group], strict=True)
        ]
        np.testing.assert_array_equal(np.transpose(tokens), of_group)
    assert len(np.unique(np.concatenate(found))) > 8


@pytest.mark.slow
def test_the_serving_script_learns_and_serves_as_one_device():
    lines = documents.printed(serve, "2", "40").splitlines()
    losses = [float(line.split()[-1]) for line in lines if "loss:" in line]
    assert losses[-1] < losses[0] / 4
    assert [line.split()[:5] for line in lines[-4:-2]] == [
        ["stage", "0", "IPU", "0", "4"],
        ["stage", "1", "IPU", "1", "4"],
    ]
    assert lines[-2:] == [
        "208 of 208 tokens equal greedy decoding without a cache on one device",
        "1 of 5 ticks of each IPU per token of 4 groups are a bubble",
    ]

"""Test the serving example: each group gets the tokens of a dense twin in NumPy, and the script says so of its own."""

import jax
import numpy as np
import pytest

from examples import serve
from ipu_jax import Pipeline
from support import documents


def twin(params, tokens):
    """Return the likeliest token after one sequence."""

    def normed(x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    x = params["table"][tokens] + params["positions"][: len(tokens)]
    for w in params["layers"]:
        q, k, v = (np.split(part, serve.HEADS, 1) for part in np.split(normed(x) @ w["qkv"], 3, 1))
        scores = [np.exp(q[h] @ k[h].T / np.sqrt(q[h].shape[1])) * np.tri(len(x)) for h in range(serve.HEADS)]
        read = [score / score.sum(1, keepdims=True) @ v[h] for h, score in enumerate(scores)]
        x = x + np.concatenate(read, 1) @ w["out"]
        h = normed(x) @ w["up"]
        x = x + h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))) @ w["down"]
    return int((normed(x[-1]) @ params["table"].T).argmax())


def expected(params, prompt, length, count):
    tokens = [*prompt[:length]]
    for _ in range(count):
        tokens.append(twin(params, tokens))
    return tokens[length:]


@pytest.mark.fast("2")
@pytest.mark.parametrize("ipus", [1, 2, 4])
def test_each_group_gets_the_tokens_of_a_dense_twin(ipus, monkeypatch):
    monkeypatch.setattr(serve, "LAYERS", max(2, ipus))
    params = jax.tree.map(lambda w: 3 * w, serve.make_params())
    batch, steps = {"tokens": serve.sequences(0, 2)}, 4
    pipeline = Pipeline.from_function(serve.loss, params, batch, ipus=ipus, gradient_accumulation=4)
    random, shape = np.random.default_rng(3), (serve.GROUPS + 1, serve.B)
    prompts = random.integers(serve.VOCABULARY, size=(*shape, serve.PROMPT), dtype=np.int32)
    lengths = random.integers(1, serve.PROMPT + 1, size=shape, dtype=np.int32)
    found = serve.serve(pipeline, pipeline.shard(params), prompts, lengths, steps)
    assert [len(tokens) for tokens in found] == [4, 2, 4, 4, 2]
    for group, tokens in enumerate(found):
        of_group = [expected(params, *of, len(tokens)) for of in zip(prompts[group], lengths[group], strict=True)]
        np.testing.assert_array_equal(np.transpose(tokens), of_group)
    assert len(np.unique(np.concatenate(found))) > 8


@pytest.mark.slow
def test_the_script_learns_and_serves_as_one_device():
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

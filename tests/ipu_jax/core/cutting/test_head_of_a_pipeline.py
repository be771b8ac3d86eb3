"""Test head="concurrent": a dense function, unchanged, whose head and look-ups all IPUs compute at once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Pipeline, verify
from support.dense import largest_relative_error
from support.refusals import refused

from .everywhere_models import D, Example, V, dense_cross_entropy, norm, tokens_of, weights
from .test_everywhere import M, batch_of, dense_loss, one_of, paths_of_split

LAYERS = 4


def hidden(params, tokens):
    """A scan over stacked layers, after a look-up."""
    layer = lambda x, w: (x + jnp.tanh(norm(x) @ w), None)
    return norm(jax.lax.scan(layer, params["table"][tokens], params["layers"])[0]) * params["scale"]


def tied_logits(params, tokens):
    return hidden(params, tokens) @ params["table"].T


def untied_logits(params, tokens):
    return hidden(params, tokens) @ params["out"] + params["bias"]


def smoothed(logits, targets):
    return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(targets, V), 0.1)).mean()


PARAMS = {"table": weights(V, D, seed=1), "layers": weights(LAYERS, D, D, seed=2), "scale": np.ones(D, np.float32)}
UNTIED = PARAMS | {"out": weights(D, V, seed=3), "bias": weights(V, seed=4)}


def example_of(logits, params, cross_entropy=dense_cross_entropy):
    loss = lambda params, mb: cross_entropy(logits(params, mb["tokens"]), mb["targets"])
    return Example(loss, loss, params, tokens_of, ())


TIED = example_of(tied_logits, PARAMS)
CASES = {
    "tied-2-zb-h1": (TIED, 2, "zb-h1", ["table"]),
    "tied-4-1f1b": (TIED, 4, "1f1b", ["table"]),
    "untied-3-grouped": (example_of(untied_logits, UNTIED), 3, "grouped", ["bias", "out", "table"]),
    "smoothed-2-zbv": (example_of(tied_logits, PARAMS, smoothed), 2, "zbv", ["table"]),
    "one IPU": (TIED, 1, "grouped", []),
}


def pipeline_of(example, **options) -> Pipeline:
    options = {"gradient_accumulation": M, "head": "concurrent", **options}
    return Pipeline.from_function(example.loss, example.params, one_of(example), **options)


@pytest.mark.fast("untied-3-grouped")
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_the_function(name):
    example, ipus, schedule, split = CASES[name]
    pipe, batch = pipeline_of(example, ipus=ipus, schedule=schedule), batch_of(example)
    params = pipe.shard(example.params)
    value, gradients = pipe.value_and_grad(params, batch)
    expected, expected_gradients = jax.jit(jax.value_and_grad(dense_loss(example, batch)))(example.params)
    assert abs(value - expected) < 2e-6 * expected
    assert largest_relative_error(pipe.unshard(gradients), expected_gradients) < 2e-6
    assert paths_of_split(pipe) == [f"params['{leaf}']" for leaf in split]
    verify(pipe, params, batch)


def test_a_head_takes_no_longer_on_the_busiest_ipu():
    wide = 50 * V
    example = example_of(tied_logits, PARAMS | {"table": weights(wide, D, seed=1)})
    reports = []
    for head in ("local", "concurrent"):
        pipe = pipeline_of(example, ipus=4, schedule="1f1b", head=head)
        reports.append(pipe.report(pipe.shard(example.params), batch_of(example), compile=False))
    local, concurrent = (max(part.flops for part in report.ipus) for report in reports)
    assert concurrent < 0.6 * local


@pytest.mark.parametrize("logits", [tied_logits, untied_logits])
def test_other_functions_of_its_weights(logits):
    """Logits, the most likely tokens, a sample, hidden values and look-ups: written for one device, as the loss is."""
    example = example_of(logits, PARAMS if logits is tied_logits else UNTIED)
    pipe, tokens = pipeline_of(example, ipus=3, schedule="1f1b"), batch_of(example)["tokens"]
    params, key = pipe.shard(example.params), jax.random.key(0)
    likely = lambda params, ids: logits(params, ids).argmax(-1)
    for fn in (logits, hidden, likely, lambda params, ids: params["table"][ids]):
        verify(pipe.forward(fn, tokens[0]), params, tokens)
    sample = lambda params, ids, key: jax.random.categorical(key, logits(params, ids))
    verify(pipe.forward(sample, tokens[0]), params, tokens, key=key)


def test_a_function_without_a_head_is_refused():
    squares = lambda p, mb: jnp.mean(p["table"][mb["tokens"]] ** 2)
    example = Example(squares, squares, PARAMS, tokens_of, ())
    with refused("head='concurrent'", "no product of an activation with a whole leaf", "leave head= out"):
        pipeline_of(example, ipus=2)
    with refused("head='all'", "concurrent", "local"):
        pipeline_of(TIED, ipus=2, head="all")

"""Run further functions of a pipeline's weights: decode with a cache, under a pipeline's options, and after training.

The expected numbers are plain jax's on one device. `tests/ipu_jax/core/cutting/test_forward.py` cuts whole models.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import Checkpoints, Pipeline, Stage, TrainOptions, make_train_step
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import largest_relative_error
from support.layers import normal
from support.refusals import refusals, refused

B, D, V, LAYERS, PROMPT, T = 2, 8, 11, 4, 4, 68
PARAMS = {
    "table": normal(V, D, seed=0),
    "positions": 3 * normal(T, D, seed=1),
    "layers": {name: normal(LAYERS, D, D, seed=k) / D**0.5 for k, name in enumerate(("q", "k", "v", "o"))},
}
CACHE = {name: np.zeros((LAYERS, B, T, D), np.float32) for name in "kv"}


def attend(p: Any, x: Any, keys: Any, values: Any, at: Any) -> jax.Array:
    """Let tokens at the positions `at` read those up to their own."""
    scores = jnp.einsum("btd,bsd->bts", x @ p["q"], keys) / D**0.5
    seen = jnp.arange(keys.shape[1]) <= at[:, None]
    return x + jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ values @ p["o"]


def logits(params: Any, tokens: Any) -> jax.Array:
    at = jnp.arange(tokens.shape[1])
    x = params["table"][tokens] + params["positions"][at]
    layer = lambda x, p: (attend(p, x, x @ p["k"], x @ p["v"], at), None)
    return lax.scan(layer, x, params["layers"])[0] @ params["table"].T


def loss(params: Any, tokens: Any) -> jax.Array:
    wanted = jnp.roll(tokens, -1, 1)
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens), wanted).mean()


def decode(params: Any, cache: Any, inputs: Any) -> tuple[jax.Array, Any]:
    """Return the tokens after (B, any number of) tokens whose first is at the position `at`; its cache is stacked."""
    at = inputs["at"] + jnp.arange(inputs["tokens"].shape[1])

    def layer(x: Any, given: Any) -> Any:
        p, cache = given
        new = {name: lax.dynamic_update_slice(cache[name], x @ p[name], (0, at[0], 0)) for name in "kv"}
        return attend(p, x, new["k"], new["v"], at), new

    x = params["table"][inputs["tokens"]] + params["positions"][at]
    x, cache = lax.scan(layer, x, (params["layers"], cache))
    return (x[:, -1] @ params["table"].T).argmax(-1), cache


PARAMS_ON_DEVICE = jax.tree.map(jnp.asarray, PARAMS)
TOKENS = np.random.default_rng(7).integers(V, size=(B, T)).astype(np.int32)


def pipeline_of(schedule: str = "1f1b", ipus: int = 2, **options: Any) -> Pipeline:
    options = {"gradient_accumulation": 4, "schedule": schedule, "ipus": ipus, **options}
    return Pipeline.from_function(loss, PARAMS, TOKENS[:, :PROMPT], **options)


def decoder(pipeline: Pipeline, length: int, cache: Any = CACHE) -> Any:
    return pipeline.forward(decode, {"tokens": TOKENS[:, :length], "at": np.int32(0)}, state=cache)


def one_of(tree: Any) -> Any:
    """Return a batch of one micro-batch."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


@pytest.mark.fast("zb-wave-2")
@pytest.mark.parametrize(("schedule", "ipus"), [("zb-wave", 2), ("1f1b", 4), ("zbv", 1)])
def test_64_tokens_of_a_cache_are_those_without_a_cache(schedule, ipus):
    """Two functions, of a prompt and of one token, have one cache."""
    pipeline = pipeline_of(schedule, ipus)
    weights, prefill, one = pipeline.shard(PARAMS), decoder(pipeline, PROMPT), decoder(pipeline, 1)
    placed, cache, plain = prefill.shard_state(CACHE), CACHE, jax.jit(decode)
    next_of = jax.jit(lambda params, tokens, at: logits(params, tokens)[:, at - 1].argmax(-1))
    params, found, expected = PARAMS_ON_DEVICE, TOKENS.copy(), TOKENS.copy()
    for at in range(PROMPT, T):
        step, first = (prefill, 0) if at == PROMPT else (one, at - 1)
        inputs = {"tokens": found[:, first:at], "at": np.int32(first)}
        tokens, placed = step(weights, one_of(inputs), placed)
        _, cache = plain(params, cache, inputs)
        found[:, at], expected[:, at] = tokens[0], next_of(params, expected, at)
    np.testing.assert_array_equal(found, expected)
    assert largest_relative_error(one.unshard(placed), cache) < 1e-6
    assert len({*found[0, PROMPT:]}) > 2
    one(weights, one_of({"tokens": found[:, -1:], "at": np.int32(0)}), placed)
    with refused("state: an earlier call reused the buffers", "pass what that call returned"):
        one(weights, one_of({"tokens": found[:, -1:], "at": np.int32(0)}), placed)


HALVES = {"q": True, "k": False, "v": False, "o": True}
SPLIT = {"table": PartitionSpec(), "positions": PartitionSpec(), "layers": PartitionSpec(None, None, "tensor")}


@pytest.mark.fast("frozen", "split")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"frozen": {"table": True, "positions": False, "layers": HALVES}, "ipus": 3}, id="frozen"),
        pytest.param({"axes": {"tensor": 2}, "specs": SPLIT}, id="split"),
        pytest.param({"axes": {"tensor": 2}}, id="whole on a further axis"),
    ],
)
def test_micro_batches_replace_a_state_one_after_the_other(options):
    pipeline = pipeline_of(**options)
    step, cache, expected = decoder(pipeline, PROMPT), CACHE, []
    batch = {"tokens": TOKENS[:, : 3 * PROMPT].reshape(B, 3, PROMPT).swapaxes(0, 1), "at": PROMPT * np.arange(3)}
    batch = jax.tree.map(lambda leaf: leaf.astype(np.int32), batch)
    found, new = step(pipeline.shard(PARAMS), batch, step.shard_state(CACHE))
    for k in range(3):
        tokens, cache = jax.jit(decode)(PARAMS_ON_DEVICE, cache, jax.tree.map(lambda leaf, k=k: leaf[k], batch))
        expected.append(tokens)
    np.testing.assert_array_equal(found, expected)
    assert largest_relative_error(step.unshard(new), cache) < 1e-6


def test_each_micro_batch_of_each_replica_has_its_key():
    pipeline = pipeline_of(replicas=2)
    noisy = lambda params, tokens, key: logits(params, tokens) + jax.random.uniform(key, (V,))
    outputs = pipeline.forward(noisy, TOKENS[:, :3])
    tokens, key = TOKENS[:, :18].reshape(2, 3, B, 3), jax.random.key(5)
    found = outputs(pipeline.shard(PARAMS), tokens, key=key)
    assert outputs.takes_key
    assert found.shape == (2, 3, B, 3, V)
    assert found.sharding.device_set == {*pipeline.mesh.devices.flat}
    for r, m in np.ndindex(2, 3):
        own = jax.random.fold_in(jax.random.fold_in(key, r), m)
        assert largest_relative_error(found[r, m], jax.jit(noisy)(PARAMS_ON_DEVICE, tokens[r, m], own)) < 1e-6


@pytest.mark.fast("16.32")
@pytest.mark.parametrize("precision", ["16.32", "16.16"])
def test_the_model_of_a_step_computes_in_its_precision(precision):
    step = make_train_step(pipeline_of(), optax.sgd(1.0), TrainOptions(precision=precision))
    found = step.model.forward(logits, TOKENS[:, :3])(step.init(PARAMS).params, TOKENS[None, :, :3])
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS_ON_DEVICE)
    expected, unrounded = (jax.jit(logits)(params, TOKENS[:, :3]) for params in (halves, PARAMS_ON_DEVICE))
    assert found.dtype == jnp.bfloat16
    assert largest_relative_error(found[0], expected) < 5e-3
    assert largest_relative_error(found[0], unrounded) > 1e-3


def test_weights_of_a_training_state_and_of_a_checkpoint_on_other_ipus(tmp_path):
    step, other = (make_train_step(pipeline_of(ipus=ipus), optax.sgd(1.0)) for ipus in (1, 2))
    state, _ = step(step.init(PARAMS), TOKENS[:, :16].reshape(B, 4, PROMPT).swapaxes(0, 1))
    expected = jax.jit(logits)(step.whole(state)["params"], TOKENS[:, :5])
    assert largest_relative_error(expected, jax.jit(logits)(PARAMS_ON_DEVICE, TOKENS[:, :5])) > 1e-2
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.restore(state)
        checkpoints.save(state, now=True)
    with Checkpoints(tmp_path, other) as checkpoints:
        restored = checkpoints.restore(other.init(PARAMS), resume="must")
        assert restored is not None
    for model, weights in ((step.model, state.params), (other.model, restored.state.params)):
        found = model.forward(logits, TOKENS[:, :5])(weights, TOKENS[None, :, :5])
        assert largest_relative_error(found[0], expected) < 1e-6


# what is refused


def layer_by_layer(params: Any, caches: Any, tokens: Any, order: Any = range(LAYERS)) -> tuple[jax.Array, Any]:
    """Read and replace one cache per layer, those with the numbers `order`."""
    x, new = params["table"][tokens], [*caches]
    for k, at in enumerate(order):
        new[at] = caches[at] + x
        x = x + jnp.tanh(x @ params["layers"]["q"][k] + new[at])
    return x @ params["table"].T, new


EACH, MANY = [np.zeros((B, 3, D), np.float32)] * LAYERS, one_of(TOKENS[:, :3])


@functools.cache
def functions() -> dict[str, Any]:
    """Return functions of one pipeline, and what they take."""
    pipeline = pipeline_of()
    backwards = functools.partial(layer_by_layer, order=range(LAYERS)[::-1])
    steps = {"forwards": layer_by_layer, "backwards": backwards}
    made = {name: pipeline.forward(fn, MANY[0], state=EACH) for name, fn in steps.items()}
    shorter = [leaf[:, :1] for leaf in EACH]
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (PARAMS, EACH))
    return made | {
        "logits": pipeline.forward(logits, MANY[0]),
        "noisy": pipeline.forward(lambda params, tokens, key: logits(params, tokens), MANY[0]),
        "weights": pipeline.shard(PARAMS),
        "half weights": pipeline.shard(halves[0]),
        "cache": made["forwards"].shard_state(EACH),
        "half cache": made["forwards"].shard_state(halves[1]),
        "shorter cache": pipeline.forward(layer_by_layer, MANY[0, :, :1], state=shorter).shard_state(shorter),
    }


def call(name: str, weights: str = "weights", batch: Any = MANY, cache: str | None = None, **given: Any) -> Any:
    """Return a call of a function with what `functions` names."""

    def run() -> Any:
        of = functions()
        given_state = {} if cache is None else {"state": of[cache]}
        return of[name](of[weights], batch, **given_state, **given)

    return run


def of_stages() -> Any:
    stage = Stage(lambda w, x, batch: (batch @ w).mean(), params="w")
    return Pipeline([stage], gradient_accumulation=2).forward(logits, MANY[0])


def derivative(weights: Any) -> Any:
    return jax.grad(lambda weights: functions()["logits"](weights, MANY).sum())(weights)


@refusals(
    (of_stages, "made of stages", "pipeline.predict", "Pipeline.from_function"),
    (lambda: decoder(pipeline_of(replicas=2), 1), "state= with 2 replicas", "its own copy", "of one replica"),
    (call("noisy"), "key is missing", "takes one", "key=jax.random.key(...)"),
    (call("noisy", key=np.zeros(2, np.uint32)), "not one typed key", "jax.random.key(seed)"),
    (call("logits", key=jax.random.key(0)), "a key was given", "no stage takes one"),
    (call("forwards"), "state is missing", "shard_state", "earlier call"),
    (call("logits", cache="cache"), "state was given", "no stage holds any"),
    (call("forwards", state=EACH), "state is a list", "shard_state(...) returns"),
    (lambda: functions()["logits"](PARAMS, MANY), "params is a dict", "pipeline.shard(...) returns"),
    (lambda: functions()["logits"].shard_state(EACH), "no state of its own", "state=..."),
    (lambda: functions()["forwards"].shard_state(EACH[1:]), "state is not the tree", "give a tree like that one"),
    (call("logits", batch=MANY[..., None]), "int32[2, 3, 1]", "cut for int32[2, 3]", "this number of dims"),
    (call("logits", batch=MANY.astype(np.float32)), "float32[2, 3]", "cut for int32[2, 3]"),
    (call("logits", batch=MANY[:0]), "shape (0, 2, 3)", "any number of micro-batches from 1 on"),
    (
        call("backwards", cache="cache"),
        "stage 0 holds state[0], state[1] there, and state[2], state[3] here",
        "unshard",
    ),
    (call("forwards", cache="shorter cache"), "state[0] is float32[2, 1, 8] there, and float32[2, 3, 8] here", "shard"),
    (call("forwards", cache="half cache"), "state[0] is bfloat16[2, 3, 8] there", "float32[2, 3, 8] here"),
    (
        call("forwards", cache="weights"),
        "state were sharded by a pipeline with other groups",
        "shard them with this one",
    ),
    (
        call("logits", weights="half weights"),
        "is bfloat16[4, 8, 8] there, and float32[4, 8, 8] here",
        "another function",
    ),
    (lambda: jax.eval_shape(derivative, functions()["weights"]), "cannot be differentiated", "use pipeline.loss"),
)
def test_a_call_is_refused(call, holds):
    functions()
    with refused(*holds):
        call()

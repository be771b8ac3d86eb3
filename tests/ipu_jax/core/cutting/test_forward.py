"""Cut further functions of a model's weights, its outputs or a step of decoding, and compare them with plain jax.

The stages run one after the other in plain jax: whether each operation is where its weights are is decided there. They
hold what the stages of the loss hold. Each model runs on the engine as well, most of them in slow tests.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipu_jax import Pipeline
from ipu_jax.core.cutting.forward import forward_of
from ipu_jax.core.cutting.function import FunctionModel
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.tree_parts import joined
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.composed import composed, cut_into
from support.dense import largest_relative_error
from support.refusals import refusals, refused

from .example import Example, normal
from .library_models import LIBRARY_MODELS
from .plain_models import PLAIN_MODELS
from .unusual_models import UNUSUAL_MODELS

WITHOUT_OUTPUTS = ("metrics", "custom_derivatives", "vae", "learning_to_learn", "unusual_aux")
MODELS = {
    make.__name__: functools.cache(make)
    for make in (*PLAIN_MODELS, *LIBRARY_MODELS, *UNUSUAL_MODELS)
    if make.__name__ not in WITHOUT_OUTPUTS
}


RUNS = (("1f1b", 4, 5), ("zbv", 2, 1), ("looped", 2, 3), ("zb-wave", 2, 5), ("sequential", 1, 2))
"""Schedules, numbers of IPUs, and of micro-batches."""


def assert_same(found: Any, expected: Any) -> None:
    """Compare structure, dtypes and numbers of two trees: bit for bit, but where XLA fuses otherwise."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, leaf), wanted in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            np.testing.assert_array_equal(leaf, wanted, jax.tree_util.keystr(path))
        elif not np.array_equal(leaf, wanted):
            assert largest_relative_error(leaf, wanted) < 1e-6, jax.tree_util.keystr(path)


def key_of(example: Example) -> Any:
    return jax.random.key(7) if "key" in inspect.signature(example.outputs).parameters else None


def plain_outputs(example: Example, inputs: Any, key: Any) -> Any:
    args = [example.params, *([] if example.state is None else [example.state]), inputs]
    return jax.jit(example.outputs)(*args, *([] if key is None else [key]))


def assert_cut_right(example: Example, stages: int, cut_for: Any, inputs: Any) -> None:
    """Cut the loss for one micro-batch, and the outputs for perhaps another one; compare the outputs."""
    key = key_of(example)
    loss = cut_into(stages, example.loss, example.params, cut_for, state=example.state)
    model = forward_of(loss, example.outputs, inputs, None)
    assert model.weights is loss.weights
    assert len(model.stages) == stages
    found, _ = jax.jit(composed(model))(example.params, example.state, inputs, key)
    expected = plain_outputs(example, inputs, key)
    assert_same(found, expected)
    assert jax.tree.map(lambda leaf: leaf.shape, model.outputs) == jax.tree.map(jnp.shape, expected)


@pytest.mark.fast(
    *("4-reads_of_all_earlier_layers", "4-control_flow", "4-unused_weights", "4-recommender", "4-linen_batch_norm"),
    *("4-linen_unet", "4-linen_gpt", "4-equinox_scanned", "4-scan_with_results_of_layers"),
    *("2-scan_with_a_key_per_layer", "2-one_block_again_and_again", "2-state_read_everywhere", "2-bfloat16_weights"),
    *("2-linen_scan_with_state", "1-linen_spectral_norm"),
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_stages_compute_the_outputs_of_the_model(name, stages):
    example = MODELS[name]()
    micro_batch = example.micro_batch(np.random.default_rng(1))
    assert_cut_right(example, stages, micro_batch, micro_batch)


@pytest.mark.fast("a shorter sequence", "one image, a quarter of its size")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param("scanned_gpt", np.s_[:, :3], id="a shorter sequence"),
        pytest.param("linen_gpt", np.s_[:1], id="one row"),
        pytest.param("encoder_decoder", np.s_[:1, :2], id="one row of two tokens"),
        pytest.param("linen_unet", np.s_[:1, :4, :4], id="one image, a quarter of its size"),
    ],
)
def test_inputs_of_another_size(name, part):
    example = MODELS[name]()
    micro_batch = example.micro_batch(np.random.default_rng(1))
    inputs = {what: leaf[part[0]] if leaf.ndim == 1 else leaf[part] for what, leaf in micro_batch.items()}
    assert_cut_right(example, 3, micro_batch, inputs)


@pytest.mark.fast(
    "encoder_decoder",
    "one_block_again_and_again",
    "linen_batch_norm",
    "scan_with_a_key_per_layer",
    "bfloat16_weights",
    "scan_with_results_of_layers",
)
@pytest.mark.parametrize("name", MODELS)
def test_the_pipeline_computes_the_outputs_of_the_model(name):
    """Rounding may differ in products that are fused otherwise."""
    example, (schedule, ipus, m) = MODELS[name](), RUNS[list(MODELS).index(name) % len(RUNS)]
    rng, key = np.random.default_rng(1), key_of(example)
    inputs = [example.micro_batch(rng) for _ in range(m)]
    options = {"ipus": ipus, "schedule": schedule, "gradient_accumulation": 4}
    pipeline = Pipeline.from_function(example.loss, example.params, inputs[0], state=example.state, **options)
    outputs = pipeline.forward(example.outputs, inputs[0])
    state = None if example.state is None else pipeline.shard_state(example.state)
    batch = jax.tree.map(lambda *leaves: np.stack(leaves), *inputs)
    found = outputs(pipeline.shard(example.params), batch, state, key)
    keys = [None if key is None else jax.random.fold_in(jax.random.fold_in(key, 0), i) for i in range(m)]
    each = [plain_outputs(example, *both) for both in zip(inputs, keys, strict=True)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert leaf.dtype == wanted.dtype
        assert np.abs(leaf - wanted).max() <= 1e-6 * np.abs(wanted).max()


# functions with a state of their own: 6 layers, each with a cache, on 3 stages

LAYERS, B, D, V = 6, 3, 8, 5
RNG = np.random.default_rng(3)
TABLES = {"table": normal(RNG, V, D), "head": normal(RNG, D, V)}
STACKED = TABLES | {"layers": normal(RNG, LAYERS, D, D)}
LISTED = TABLES | {"layers": [*STACKED["layers"]]}
IDS = np.array([3, 1, 4], np.int32)
CACHE = np.zeros((B, D), np.float32)


def layer(x: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
    """Read and replace a layer's cache, a moving sum of its inputs."""
    w, cache = given
    cache = 0.5 * cache + x
    return x + jnp.tanh(x @ w + cache), cache


def hidden(params: Any, ids: Any) -> jax.Array:
    x = params["table"][ids]
    for w in params["layers"]:
        x = layer(x, (w, 0))[0]
    return x


def loss_of_list(params: Any, ids: Any) -> jax.Array:
    return jnp.mean((hidden(params, ids) @ params["head"]) ** 2)


def loss_of_scan(params: Any, ids: Any, *, reverse: bool = False) -> jax.Array:
    x, _ = lax.scan(lambda x, w: (layer(x, (w, 0))[0], None), params["table"][ids], params["layers"], reverse=reverse)
    return jnp.mean((x @ params["head"]) ** 2)


def a_list(params, caches, ids):
    x, new = params["table"][ids], []
    for each in zip(params["layers"], caches, strict=True):
        x, cache = layer(x, each)
        new.append(cache)
    return x @ params["head"], new


def a_scan(params, caches, ids, *, reverse=False):
    x, new = lax.scan(layer, params["table"][ids], (params["layers"], caches), reverse=reverse)
    return x @ params["head"], new


def a_checkpointed_scan_with_a_counter(params, state, ids):
    def counted(x, given):
        w, (cache, sums) = given
        x, cache = layer(x, (w, cache))
        return x, (cache, sums + x.sum(0))

    x, new = lax.scan(jax.checkpoint(counted), params["table"][ids], (params["layers"], state["caches"]))
    return (x @ params["head"], state["count"]), {"caches": new, "count": state["count"] + 1}


def rows_in_a_loop(params, caches, ids):
    outputs, new = a_list(params, [caches[k] for k in range(LAYERS)], ids)
    return outputs, jnp.stack(new)


def rows_in_a_loop_backwards(params, caches, ids):
    outputs, new = a_list(params, [caches[LAYERS - 1 - k] for k in range(LAYERS)], ids)
    return outputs, jnp.stack(new[::-1])


def concatenated(params, caches, ids):
    outputs, new = a_list(params, [caches[k * B : (k + 1) * B] for k in range(LAYERS)], ids)
    return outputs, jnp.concatenate(new)


def results_are_outputs_too(params, caches, ids):
    outputs, new = a_list(params, caches, ids)
    return {"first": new[0], "last": new[-1], "logits": outputs}, new


def masked_after_the_model(params, caches, ids):
    outputs, new = a_list(params, caches, ids)
    return outputs, jax.tree.map(lambda new, old: jnp.where(ids[:, None] > 2, new, old), new, caches)


def one_cache_for_two_layers(params, caches, ids):
    x, new = params["table"][ids], []
    for k, w in enumerate(params["layers"]):
        x, cache = layer(x, (w, caches[k // 2] if k % 2 == 0 else new[-1]))
        new += [cache] if k % 2 == 0 else []
    return x @ params["head"], new


def assert_state_right(stages: int, loss: Any, params: Any, step: Any, state: Any) -> PackedLayout:
    """Run three steps by the stages and by plain jax, and compare outputs and state; return who holds the state."""
    model = forward_of(cut_into(stages, loss, params, IDS), step, IDS, state)
    assert model.state is not None
    run, plain, expected = jax.jit(composed(model)), jax.jit(step), state
    for turn in range(3):
        outputs, (_, groups) = run(params, state, (IDS + turn) % V)
        wanted, expected = plain(params, expected, (IDS + turn) % V)
        state = joined(model.state.join(groups))
        assert_same(outputs, wanted)
        assert_same(state, expected)
    return model.state


STACK = np.zeros((LAYERS, B, D), np.float32)
COUNTED = {"caches": (STACK, np.zeros((LAYERS, D), np.float32)), "count": np.int32(0)}
BACKWARDS = functools.partial(a_scan, reverse=True), functools.partial(loss_of_scan, reverse=True)


def cache_in_place(params: Any, caches: Any, ids: Any) -> Any:
    x = params["table"][ids]
    for k, w in enumerate(params["layers"]):
        x, cache = layer(x, (w, caches[k]))
        caches = caches.at[k].set(cache)
    return x, caches


@pytest.mark.parametrize(
    ("step", "loss", "params", "state"),
    [
        pytest.param(a_list, loss_of_list, LISTED, [CACHE] * LAYERS, id="list"),
        pytest.param(a_scan, loss_of_scan, STACKED, STACK, id="scan"),
        pytest.param(*BACKWARDS, STACKED, STACK, id="reversed scan"),
        pytest.param(a_checkpointed_scan_with_a_counter, loss_of_scan, STACKED, COUNTED, id="scan with a counter"),
        pytest.param(rows_in_a_loop, loss_of_list, LISTED, STACK, id="rows in a loop"),
        pytest.param(
            rows_in_a_loop_backwards, loss_of_list, LISTED, STACK, id="rows backwards", marks=pytest.mark.slow
        ),
        pytest.param(rows_in_a_loop, loss_of_scan, STACKED, STACK, id="rows of both", marks=pytest.mark.slow),
        pytest.param(concatenated, loss_of_list, LISTED, STACK.reshape(-1, D), id="concatenated"),
        pytest.param(results_are_outputs_too, loss_of_list, LISTED, [CACHE] * LAYERS, id="outputs, too"),
        pytest.param(cache_in_place, loss_of_scan, STACKED, STACK, id="in place"),
        pytest.param(masked_after_the_model, loss_of_list, LISTED, [CACHE] * LAYERS, id="masked"),
        pytest.param(one_cache_for_two_layers, loss_of_list, LISTED, [CACHE] * 3, id="one for two layers"),
    ],
)
def test_each_cache_is_in_the_stage_of_its_layers(step, loss, params, state):
    held = assert_state_right(3, loss, params, step, state).split(state)
    caches = {name: [leaf for leaf in leaves if leaf.ndim] for name, leaves in held.items()}
    of_stages = [sum(leaf.size for leaf in leaves) for leaves in caches.values()]
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert len(of_stages) == 3
    assert sum(of_stages) == sum(sizes)
    assert max(of_stages) <= sum(sizes) / 2


def test_a_state_that_weights_do_not_decide():
    """What one operation replaces is there; what none does is kept, and a new value of the batch alone is, too."""

    def step(params, state, ids):
        x = hidden(params, ids + 0 * state["never changed"]) @ params["head"]
        new = {"ids": ids, "logits": x, "steps": state["steps"] + 1, "zeros": jnp.zeros(2)}
        return x + state["steps"] + state["logits"].mean(), state | new

    zeros = {"ids": 0 * IDS, "logits": np.zeros((B, V), np.float32), "zeros": np.ones(2, np.float32)}
    state = zeros | {"steps": np.int32(3), "never changed": np.int32(1), "never read": np.ones(4, np.float32)}
    held = assert_state_right(3, loss_of_list, LISTED, step, state)
    found = {leaf.path: group.name for group in held.groups for leaf in group.leaves}
    assert found["state['logits']"] == "stage 2"


def average_of_rows(params: Any, averages: Any, ids: Any) -> Any:
    """Return a loss, and averages of each layer's inputs: a training state in one stacked leaf."""
    x, new = params["table"][ids], []
    for k, w in enumerate(params["layers"]):
        new.append(0.9 * averages[k] + 0.1 * x.mean(0))
        x = x + jnp.tanh(x @ w - new[-1])
    return jnp.mean((x @ params["head"]) ** 2), jnp.stack(new)


@pytest.mark.parametrize("way", ["loop", pytest.param("scan", marks=pytest.mark.slow)])
def test_rows_of_a_training_state_are_read_where_they_are(way):
    def outputs(params, averages, ids):
        x = params["table"][ids]
        if way == "scan":
            each = params["layers"], averages
            return lax.scan(lambda x, given: (x + jnp.tanh(x @ given[0] - given[1]), None), x, each)[0]
        for k in range(LAYERS):
            x = x + jnp.tanh(x @ params["layers"][k] - averages[k])
        return x

    averages = normal(RNG, LAYERS, D)
    assert_cut_right(Example(average_of_rows, STACKED, lambda _: IDS, state=averages, outputs=outputs), 3, IDS, IDS)


@functools.cache
def cut(kind: str = "list") -> FunctionModel:
    loss, params = {"list": (loss_of_list, LISTED), "scan": (loss_of_scan, STACKED)}[kind]
    return cut_into(3, loss, params, IDS)


def layers_of(order: list[int]) -> Any:
    def fn(params: Any, ids: Any) -> jax.Array:
        return hidden(params | {"layers": [params["layers"][k] for k in order]}, ids)

    return fn


def of_list(fn: Any, inputs: Any = IDS, *, state: Any = None) -> Any:
    return lambda: forward_of(cut(), fn, inputs, state)


def of_scan(fn: Any, *, state: Any = None) -> Any:
    return lambda: forward_of(cut("scan"), fn, IDS, state)


def both(params: Any, ids: Any) -> jax.Array:
    return hidden(params, ids) - hidden(params, ids[::-1])


def each_layer_of_a_stack(params: Any, ids: Any) -> jax.Array:
    stacked = jnp.stack(params["layers"])
    return lax.scan(lambda x, w: (x @ w, None), params["table"][ids], stacked)[0]


def scanned_on_both(params: Any, ids: Any) -> jax.Array:
    run = lambda ids: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), params["table"][ids], params["layers"])[0]
    return run(ids) @ run(ids[::-1]).T


@pytest.mark.parametrize(
    ("loss", "params", "outputs"),
    [(loss_of_list, LISTED, both), (loss_of_scan, STACKED, scanned_on_both)],
    ids=["listed", "stacked"],
)
@pytest.mark.parametrize("stages", [2, 3])
def test_layers_run_on_two_inputs_one_after_the_other(loss, params, outputs, stages):
    """The second run begins where the first layers are, although the function has it after the last ones."""
    assert_cut_right(Example(loss, params, lambda _: IDS, outputs=outputs), stages, IDS, IDS)


def test_a_scan_over_a_stack_of_leaves_runs_each_layer_where_its_leaf_is():
    example = Example(loss_of_list, LISTED, lambda _: IDS, outputs=each_layer_of_a_stack)
    assert_cut_right(example, 3, IDS, IDS)


def new_state(change: Any) -> Any:
    return lambda params, state, ids: (hidden(params, ids), change(state))


def old_cache_is_an_output(params: Any, caches: Any, ids: Any) -> Any:
    outputs, new = a_list(params, caches, ids)
    return (outputs, caches[0]), new


def cache_at_a_place_of_the_batch(params: Any, caches: Any, ids: Any) -> Any:
    x, caches = cache_in_place(params, caches, ids)
    return x, caches.at[ids[0] % LAYERS].add(1)


@refusals(
    (
        of_list(layers_of([5, 0])),
        *("params['layers'][0] of stage 0 is read", "after params['layers'][5] of stage 2", "test_forward.py:"),
        "read weights in the order of the loss function",
    ),
    (
        of_list(layers_of([5, 4, 3, 2, 1, 0])),
        *("params['layers'][3] of stage 1 is read", "after params['layers'][5] of stage 2"),
        "read weights in the order of the loss function",
    ),
    (
        of_scan(lambda params, ids: a_scan(params, STACK, ids, reverse=True)),
        *("params['layers'][3:4] of stage 1 is read", "after params['layers'][5:6] of stage 2", "test_forward.py:"),
    ),
    (
        of_scan(lambda params, ids: hidden(params, ids) + params["layers"].sum()),
        *("params['layers'] is read whole", "test_forward.py:", "in a scan over them or as w[k]"),
    ),
    (
        of_list(lambda params, ids: hidden(params, hidden(params, ids)[:, 0].astype(int))),
        *("params['table'] of stage 0 is read", "test_forward.py:", "after params['layers'][4] of stage 2"),
    ),
    (
        of_list(lambda params, ids: params["table"][ids] @ (params["layers"][0] @ params["layers"][5])),
        *("one operation (test_forward.py:", "params['layers'][0] of stage 0 and params['layers'][5] of stage 2"),
    ),
    (
        of_list(lambda params, ids: (hidden(params, ids), params["layers"][0])),
        *("params['layers'][0] is on stage 0", "read by stage 2", "use its results later"),
    ),
    (
        of_list(old_cache_is_an_output, state=[CACHE] * LAYERS),
        *("state[0] is one array", "several stages read or replace it", "hold one leaf per layer"),
    ),
    (
        of_scan(cache_at_a_place_of_the_batch, state=STACK),
        *("state is one array", "hold one leaf per layer", "as xs and ys of the scan"),
    ),
    (of_list(3), "fn=3", "not callable", "a function of (params, inputs)"),
    (of_list(lambda params, ids: {"a": []}), "fn returns {'a': []}", "any pytree of arrays"),
    (of_list(lambda params: 3), "fn takes 1 argument", "(params, inputs, key)", "needs state="),
    (of_list(lambda params, a, b, c: 3), "fn takes 4 arguments, params, a, b, c", "(params, inputs)"),
    (of_list(lambda params, x, y: 3), "fn takes 'y', gets a random key there", "inputs[0], inputs[1]", "give state="),
    (of_list(hidden, state=CACHE), "fn takes 2 arguments", "(params, state, inputs)"),
    (of_list(jax.value_and_grad(loss_of_list)), "fn is a jax.value_and_grad", "give loss_of_list"),
    (of_list(hidden, {"text": "hello"}), "inputs['text'] is 'hello'", "array of numbers"),
    (of_list(lambda p, s, ids: hidden(p, ids), state=CACHE), "with state=", "return (outputs, new_state)"),
    (of_list(new_state(lambda s: s[:2]), state=CACHE), "new state that is not like state", "shapes and dtypes"),
    (of_list(new_state(lambda s: s.astype(int)), state=CACHE), "new state that is not like state", "dtypes"),
    (of_list(new_state(lambda s: [s]), state=CACHE), "new state that is not like state", "return the same tree"),
)
def test_a_function_is_refused(call, holds):
    cut()
    cut("scan")
    with refused(*holds):
        call()

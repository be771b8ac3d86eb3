"""Cut whole models, unchanged, and compare every result with plain jax on one device.

The stages of each model run one after the other in plain jax: whether a cut is right is decided there. A few models, in
which each kind of value crosses a border, run on the engine as well; the others do so in slow tests.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Pipeline, make_train_step, verify
from ipu_jax.schedules import SCHEDULES
from support.against_plain import bubbles_hold_nan  # noqa: F401
from support.composed import composed, cut_into
from support.dense import largest_relative_error

from .example import Example
from .library_models import LIBRARY_MODELS
from .plain_models import PLAIN_MODELS
from .unusual_models import UNUSUAL_MODELS

MODELS = {make.__name__: functools.cache(make) for make in (*PLAIN_MODELS, *LIBRARY_MODELS, *UNUSUAL_MODELS)}
LARGE = (
    *("encoder_decoder", "linen_gpt", "linen_gpt_scanned", "linen_mixture_of_experts", "linen_scan_with_state"),
    *("lstm", "scanned_gpt", "state_space", "linen_batch_norm", "scan_that_carries_a_key"),
)
"""Models that take longest to compile: all of them are slow tests."""
RUNS: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "ipus": 4, "gradient_accumulation": 4},
    {"schedule": "zb-h1", "ipus": 2, "gradient_accumulation": 3},
    {"schedule": "looped", "ipus": 2, "gradient_accumulation": 4},
)


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step returns: of a pipeline, whole; or of plain jax."""

    loss: Any
    gradients: Any
    aux: Any
    state: Any


def batch_of(example: Example, *lead: int, seed: int = 0) -> Any:
    """Draw the micro-batches of a step, with these leading dims."""
    rng = np.random.default_rng(seed)
    drawn = [example.micro_batch(rng) for _ in range(int(np.prod(lead)))]
    return jax.tree.map(lambda *leaves: np.stack(leaves).reshape(*lead, *np.shape(leaves[0])), *drawn)


@functools.cache
def differentiated(name: str) -> Callable[..., Any]:
    """Return a jitted function of (params, state, micro-batch, key): ((loss, (aux, new state)), gradients)."""
    example = MODELS[name]()

    def loss(params, state, micro_batch, key):
        args = [micro_batch] if example.state is None else [state, micro_batch]
        found = example.loss(params, *args, *([key] if example.takes_key else []))
        value, *others = found if isinstance(found, tuple) else (found,)
        new_state = None if example.state is None else others.pop()
        return value, (others[0] if others else None, new_state)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def plain_step(name: str, params: Any, batch: Any, *, state: Any = None, key: Any = None, replicas: int = 1) -> Step:
    """Run micro-batch after micro-batch, each with its own key; return the mean loss and gradients."""
    by_replica = batch if replicas > 1 else jax.tree.map(lambda leaf: leaf[None], batch)
    losses, gradients, auxs = [], [], []
    for r in range(replicas):
        for i in range(jax.tree.leaves(by_replica)[0].shape[1]):
            own = None if key is None else jax.random.fold_in(jax.random.fold_in(key, r), i)
            micro_batch = jax.tree.map(lambda leaf, r=r, i=i: leaf[r, i], by_replica)
            (loss, (aux, state)), gradient = differentiated(name)(params, state, micro_batch, own)
            losses.append(loss)
            gradients.append(gradient)
            auxs.append(aux)
    mean = lambda *leaves: np.mean(np.stack(leaves).astype(np.float64), 0)
    lead = jax.tree.leaves(batch)[0].shape[: 1 + (replicas > 1)]
    stack = lambda *leaves: np.stack(leaves).reshape(*lead, *np.shape(leaves[0]))
    return Step(mean(*losses), jax.tree.map(mean, *gradients), jax.tree.map(stack, *auxs), state)


def step_of(pipeline: Pipeline, found: Any) -> Step:
    """Return what `value_and_grad` returned."""
    value, gradients, *state = found
    loss, aux = value if isinstance(value, tuple) else (value, None)
    return Step(loss, pipeline.unshard(gradients), aux, pipeline.unshard(state[0]) if state else None)


def assert_equal(found: Step, expected: Step, tolerance: float) -> None:
    for part in dataclasses.fields(Step):
        one, other = getattr(found, part.name), getattr(expected, part.name)
        assert jax.tree.structure(one) == jax.tree.structure(other), part.name
        for (path, leaf), wanted in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
            named = f"{part.name}{jax.tree_util.keystr(path)}"
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                assert largest_relative_error(leaf, wanted) < tolerance, named
            else:
                np.testing.assert_array_equal(leaf, wanted, named)


def cut(example: Example, **options: Any) -> Pipeline:
    micro_batch = example.micro_batch(np.random.default_rng(0))
    return Pipeline.from_function(example.loss, example.params, micro_batch, state=example.state, **options)


def dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.dtype(leaf.dtype), tree)


def arguments(pipeline: Pipeline, example: Example) -> tuple[Any, Any, Any]:
    """Return weights, state and key of a step."""
    state = None if example.state is None else pipeline.shard_state(example.state)
    return pipeline.shard(example.params), state, jax.random.key(7) if example.takes_key else None


@pytest.mark.fast(
    *("reads_of_all_earlier_layers", "custom_derivatives", "control_flow", "jitted_layers", "unused_weights"),
    *("recommender", "equinox_mlp", "one_block_again_and_again", "scan_with_a_key_per_layer"),
    *("state_read_everywhere", "learning_to_learn", "bfloat16_weights", "unusual_aux", "linen_spectral_norm"),
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in MODELS])
def test_the_stages_compute_what_the_function_computes(name):
    example = MODELS[name]()
    micro_batch, key = example.micro_batch(np.random.default_rng(1)), jax.random.key(7) if example.takes_key else None
    model = cut_into(3, example.loss, example.params, micro_batch, state=example.state)
    run = jax.jit(jax.value_and_grad(composed(model), has_aux=True))
    (loss, (aux, of_groups)), gradients = run(example.params, example.state, micro_batch, key)
    (expected, (of_function, state)), of_loss = differentiated(name)(example.params, example.state, micro_batch, key)
    split = {} if model.state is None else model.state.split(state)  # each copy of a leaf
    found, wanted = Step(loss, gradients, aux, of_groups), Step(expected, of_loss, of_function, split)
    assert_equal(found, wanted, example.tolerance)
    assert len(model.stages) == 3
    assert dtypes(gradients) == dtypes(of_loss)


@pytest.mark.fast("state_read_everywhere", "unusual_aux", "bfloat16_weights", "control_flow", "scan_that_carries_a_key")
@pytest.mark.parametrize("name", MODELS)
def test_a_step_computes_what_plain_jax_computes(name):
    """Each model is run under one schedule: its cut does not depend on the schedule."""
    example, options = MODELS[name](), RUNS[list(MODELS).index(name) % len(RUNS)]
    pipeline = cut(example, **options)
    params, state, key = arguments(pipeline, example)
    batch = batch_of(example, options["gradient_accumulation"])
    found = step_of(pipeline, pipeline.value_and_grad(params, batch, state, key))
    assert_equal(found, plain_step(name, example.params, batch, state=example.state, key=key), example.tolerance)
    assert dtypes(found.gradients) == dtypes(example.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_gpt_scanned", "equinox_mlp", "linen_batch_norm"])
def test_five_updates_equal_those_of_plain_optax(name):
    example, optimizer = MODELS[name](), optax.adamw(0.02)
    step = make_train_step(cut(example, ipus=2, schedule="1f1b", gradient_accumulation=3), optimizer)
    state = step.init(example.params, stages=example.state)
    params, stages = jax.tree.map(jnp.asarray, example.params), example.state
    slots, update = optimizer.init(params), jax.jit(optimizer.update)
    for seed in range(5):
        batch = batch_of(example, 3, seed=seed)
        state, outputs = step(state, batch)
        expected = plain_step(name, params, batch, state=stages)
        gradients = jax.tree.map(lambda g: g.astype(np.float32), expected.gradients)
        updates, slots = update(gradients, slots, params)
        params, stages = optax.apply_updates(params, updates), expected.state
        assert largest_relative_error(outputs.loss, expected.loss) < 1e-4
        if not seed:
            verify(step.model, state.params, batch, state.stages)
    found = step.whole(state)
    # Adam divides rounding errors by themselves where a gradient is almost zero
    assert largest_relative_error(found["params"], params) < 1e-3
    assert largest_relative_error(found["stages"], stages) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_frozen_leaves_get_no_gradient(replicas):
    name, lead = "metrics", (2,) if replicas == 1 else (2, 2)
    example = MODELS[name]()
    frozen = {part: part != "layers" for part in example.params}
    pipeline = cut(example, ipus=2, replicas=replicas, schedule="1f1b", gradient_accumulation=2, frozen=frozen)
    batch = batch_of(example, *lead)
    found = step_of(pipeline, pipeline.value_and_grad(pipeline.shard(example.params), batch))
    expected = plain_step(name, example.params, batch, replicas=replicas)
    zeros = {part: jax.tree.map(np.zeros_like, expected.gradients[part]) for part in frozen if frozen[part]}
    assert_equal(found, dataclasses.replace(expected, gradients=expected.gradients | zeros), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, "auto"])
def test_a_cut_function_runs_under_every_schedule(schedule):
    name = ("scanned_gpt", "linen_batch_norm")[len(schedule) % 2]
    example = MODELS[name]()
    pipeline = cut(example, ipus=2, schedule=schedule, gradient_accumulation=4)
    params, state, key = arguments(pipeline, example)
    batch = batch_of(example, 4)
    found = step_of(pipeline, pipeline.value_and_grad(params, batch, state, key))
    assert_equal(found, plain_step(name, example.params, batch, state=example.state, key=key), example.tolerance)


@pytest.mark.slow
def test_two_replicas_compute_the_mean_over_both():
    """The model has keys and an aux."""
    name, example = "vae", MODELS["vae"]()
    pipeline = cut(example, ipus=2, replicas=2, schedule="1f1b", gradient_accumulation=3)
    params, _, key = arguments(pipeline, example)
    batch = batch_of(example, 2, 3)
    found = step_of(pipeline, pipeline.value_and_grad(params, batch, key=key))
    assert_equal(found, plain_step(name, example.params, batch, key=key, replicas=2), example.tolerance)
    verify(pipeline, params, batch, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jitted_layers", pytest.param("scanned_gpt", marks=pytest.mark.slow)])
def test_the_loss_of_a_cut_function_can_be_differentiated(name):
    example = MODELS[name]()
    pipeline = cut(example, ipus=2, schedule="1f1b", gradient_accumulation=2)
    params, batch = pipeline.shard(example.params), batch_of(example, 2)
    expected = plain_step(name, example.params, batch)
    loss, gradients = jax.value_and_grad(lambda params: 2 * pipeline.loss(params, batch))(params)
    assert largest_relative_error(loss, 2 * expected.loss) < 1e-5
    doubled = jax.tree.map(lambda g: 2 * g, expected.gradients)
    assert largest_relative_error(pipeline.unshard(gradients), doubled) < 1e-5
    assert largest_relative_error(pipeline.loss(params, batch), expected.loss) < 1e-5

"""Test every transformation that optax and optax.contrib export in a training step on 2 IPUs against plain optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from ipu_jax import Pipeline, Stage, TrainOptions, make_train_step
from support.dense import largest_relative_error
from support.documents import ROOT, blocks
from support.refusals import refusals, refused

M, UPDATES, ROWS = 2, 4, 5


def body(p, x, mb):
    return jnp.tanh(mb["x"] @ p["w"] + p["b"])


def head(p, x, mb):
    return jnp.mean((x @ p["w"] * p["gain"] - mb["y"]) ** 2)


def drawn(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


WEIGHTS = {"body": {"w": drawn(4, 6), "b": drawn(6)}, "head": {"w": drawn(6, 3), "gain": drawn(1)}}
BATCHES = {"x": drawn(UPDATES, M, ROWS, 4), "y": drawn(UPDATES, M, ROWS, 3)}


def pipeline():
    return Pipeline([Stage(body, params="body"), Stage(head, params="head", ipu=1)], gradient_accumulation=M)


def loss_of(params, batch):
    one = lambda mb: head(params["head"], body(params["body"], None, mb), mb)
    return jnp.mean(jax.vmap(one)(batch))


def of_body(tree: Any) -> Any:
    return {name: jax.tree.map(lambda _, name=name: name == "body", leaves) for name, leaves in tree.items()}


def groups(tree):
    return {name: jax.tree.map(lambda _, name=name: name, leaves) for name, leaves in tree.items()}


OF_BODY: Any = of_body  # optax's annotations leave functions out


def first_two(step: Any, **_: Any) -> Any:
    return step < 2


def decayed(g: Any, p: Any) -> Any:
    return -0.1 * g + 0.01 * p


SKIPS: Any = lambda updates, number, params: optax.skip_large_updates(updates, number, params, 1e-1)


def downhill(transform):
    """Return a transform that only scales gradients as a descent, without which the weights explode."""
    return optax.chain(transform, optax.scale(-0.05))


_OPTIMIZERS = """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw
    novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd
    signum sm3 yogi contrib.acprop contrib.ademamix contrib.adopt contrib.galore contrib.madgrad contrib.muon
    contrib.schedule_free_adamw contrib.schedule_free_sgd contrib.simplified_ademamix contrib.cocob
    contrib.dadapt_adamw contrib.dog contrib.dowg contrib.momo contrib.momo_adam contrib.prodigy
""".split()  # noqa: SIM905
_TRANSFORMS = """
    centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta scale_by_adam
    scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients
    scale_by_factored_rms scale_by_lion scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm
    scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev
    scale_by_trust_ratio scale_by_yogi zero_nans contrib.normalize contrib.reduce_on_plateau contrib.scale_by_acprop
    contrib.scale_by_ademamix contrib.scale_by_adopt contrib.scale_by_cocob contrib.scale_by_galore
    contrib.scale_by_simplified_ademamix
""".split()  # noqa: SIM905


def exported(name: str) -> Any:
    """Return what optax exports by this name, or None: versions of optax differ."""
    return getattr(contrib if name.startswith("contrib.") else optax, name.removeprefix("contrib."), None)


def with_defaults(name: str) -> Any:
    for arguments in ((1e-2,), ()):
        try:
            return exported(name)(*arguments)
        except TypeError:
            continue
    raise AssertionError(name)


NORMALIZED = lambda: optax.chain(contrib.normalize(), optax.sgd(0.05))
MADE: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: with_defaults(name) for name in _OPTIMIZERS if exported(name)},
    **{name: lambda name=name: downhill(exported(name)()) for name in _TRANSFORMS if exported(name)},
    "adaptive_grad_clip": lambda: downhill(optax.adaptive_grad_clip(0.01)),
    "add_decayed_weights": lambda: downhill(optax.add_decayed_weights(0.1)),
    "add_noise": lambda: downhill(optax.add_noise(0.1, 0.5, key=0)),
    "apply_every": lambda: downhill(optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "clip": lambda: downhill(optax.clip(0.01)),
    "clip_by_block_rms": lambda: downhill(optax.clip_by_block_rms(0.01)),
    "clip_by_global_norm": lambda: downhill(optax.clip_by_global_norm(0.01)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(0.01), first_two),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.adam(0.01), first_two),
    "ema": lambda: downhill(optax.ema(0.9)),
    "freeze": lambda: optax.chain(optax.sgd(0.1), optax.freeze(OF_BODY)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.01, 5)),
    "masked": lambda: optax.masked(optax.adam(0.01), of_body),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "MultiSteps that skip": lambda: optax.MultiSteps(optax.adam(0.01), 2, should_skip_update_fn=SKIPS),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", optax.adam(0.01))),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "partition": lambda: optax.partition({"body": optax.adam(0.01), "head": optax.sgd(0.1)}, groups),
    "polyak_sgd": lambda: optax.polyak_sgd(0.1),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.1),
    "scale_by_polyak": lambda: downhill(optax.scale_by_polyak()),
    "scale_by_rprop": lambda: downhill(optax.scale_by_rprop(0.01)),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: -0.1 / (n + 1)),
    "selective_transform": lambda: optax.selective_transform(optax.adam(0.01), freeze_mask=OF_BODY),
    "set_to_zero": lambda: optax.set_to_zero(),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(decayed),
    "trace": lambda: downhill(optax.trace(0.9)),
    "contrib.mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "contrib.schedule_free": lambda: contrib.schedule_free(optax.adam(0.01), 0.01),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(0.01)),
    "contrib.sam": lambda: contrib.sam(optax.sgd(0.1), NORMALIZED(), sync_period=2),
    "contrib.sam, clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), contrib.sam(optax.sgd(0.1, momentum=0.9), NORMALIZED(), sync_period=3)
    ),
}


def plain(optimizer, takes_value):
    params = jax.tree.map(jnp.asarray, WEIGHTS)
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        extra = {"value": loss} if takes_value else {}
        updates, state = optimizer.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for k in range(UPDATES):
        params, state = update(params, state, {name: rows[k] for name, rows in BATCHES.items()})
    return params


@pytest.mark.fast("polyak_sgd")
@pytest.mark.parametrize("name", MADE)
def test_a_transformation_is_plain_optaxs(name):
    optimizer = MADE[name]()
    takes_value = isinstance(optimizer, optax.GradientTransformationExtraArgs) and "sam" not in name
    step = make_train_step(pipeline(), optimizer)
    state = step.init(WEIGHTS)
    for k in range(UPDATES):
        state, _ = step(state, {name: rows[k] for name, rows in BATCHES.items()})
    found = step.whole(state)["params"]
    assert largest_relative_error(found, plain(optimizer, takes_value)) < 1e-5


NEEDS = "one loss and its gradients per update", "use an optimizer without a line search"
PER_EXAMPLE = "the gradients of each example", "only their sum", "'Gradients per example' of docs/training.md"


def per_example(momentum):
    """Return the parts of contrib.dpsgd."""
    return optax.chain(contrib.differentially_private_aggregate(1.0, 1.1, 0), optax.sgd(0.1, momentum))


def given(make, model=None):
    return lambda: (model or pipeline(), make())


@refusals(
    (given(optax.lbfgs), "needs value_fn", *NEEDS),
    (given(lambda: optax.chain(optax.clip(1.0), optax.lbfgs())), "needs value_fn", *NEEDS),
    (given(lambda: optax.scale_by_backtracking_linesearch(5)), "needs value_fn", *NEEDS),
    (given(lambda: optax.scale_by_zoom_linesearch(5)), "needs value_fn", *NEEDS),
    (
        given(lambda: contrib.sam(optax.sgd(0.1), NORMALIZED(), opaque_mode=True)),
        *("needs grad_fn", *NEEDS, "the one without opaque_mode"),
    ),
    (given(lambda: contrib.sophia(0.01)), "needs obj_fn", *NEEDS),
    *(
        (given(lambda m=momentum: per_example(m), model), *PER_EXAMPLE)
        for momentum in (None, 0.9)
        for model in (None, lambda w, mb: jnp.mean((mb @ w) ** 2))
    ),
)
def test_an_optimizer_that_needs_more_than_gradients_is_refused_when_the_step_is_made(call, holds):
    model, optimizer = call()  # optax compiles keys
    with refused(*holds):
        make_train_step(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", [64.0, 1.0])
def test_the_documented_clipping_per_example_is_dp_sgd(loss_scale):
    (code,) = (code for code in blocks(ROOT / "docs/training.md", "python") if "clipped_per_example" in code)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "optax": optax}
    names |= {"make_train_step": make_train_step, "TrainOptions": TrainOptions}
    exec(code, names)
    rng = np.random.default_rng(2)
    weights = {"w": rng.normal(size=(4096, 2)).astype(np.float32), "b": np.ones(2, np.float32)}
    scales = rng.uniform(0, 0.02, (2, 4, 8, 1))
    batch = {"x": (scales * rng.normal(size=(2, 4, 8, 4096))).astype(np.float32), "y": np.ones((2, 4, 8), np.float32)}
    loss = lambda p, example: (jnp.sum(jnp.tanh(example["x"] @ p["w"] + p["b"])) - example["y"]) ** 2
    examples = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), batch)
    gradients = jax.vmap(jax.grad(loss), in_axes=(None, 0))(weights, examples)
    norms = np.sqrt(np.sum(np.square(gradients["w"]), (1, 2)) + np.sum(np.square(gradients["b"]), 1))
    limit = float(np.median(norms))  # half of the gradients are clipped
    plain = optax.chain(contrib.differentially_private_aggregate(limit, 0.0, 0), optax.sgd(0.1))
    expected = optax.apply_updates(weights, plain.update(gradients, plain.init(weights), weights)[0])
    options = TrainOptions(replication_factor=2, gradient_accumulation=4, loss_scale=loss_scale)
    found = {}
    for optimizer in (optax.sgd(0.1), optax.chain(names["noise"], optax.sgd(0.1))):
        step = make_train_step(names["clipped_per_example"](loss, limit), optimizer, options)
        found[optimizer] = step.whole(step(step.init(weights), batch)[0])["params"]
    without, noisy = found.values()
    assert largest_relative_error(without, expected) < 1e-6
    moved = jax.tree.map(lambda a, b: a - b, without, weights)
    assert largest_relative_error(moved, jax.tree.map(lambda a, b: a - b, expected, weights)) < 1e-3
    deviation = 0.1 * names["LIMIT"] * names["NOISE"] / len(norms)
    np.testing.assert_allclose(np.std(noisy["w"] - without["w"]), deviation, rtol=0.05)


def test_one_that_does_so_for_some_weights_only_is_refused_when_they_are_placed():
    optimizer = optax.partition({"body": optax.lbfgs(), "head": optax.sgd(0.1)}, {"body": "body", "head": "head"})
    step = make_train_step(pipeline(), optimizer)
    with refused("needs value_fn", *NEEDS):
        step.init(WEIGHTS)


@pytest.mark.parametrize("make", [lambda: optax.flatten(optax.adam(0.01)), lambda: optax.lbfgs(0.1, linesearch=None)])
def test_one_that_joins_all_weights_is_refused_on_several_ipus(make):
    step = make_train_step(pipeline(), make())
    with pytest.raises(ValueError, match=r"^optimizer: its \w+ reads all of params\['\w+'\]\['\w+'\] together with "):
        step.init(WEIGHTS)

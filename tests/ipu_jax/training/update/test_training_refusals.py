"""Test what training refuses: options, models and optimizers, what `init` and `restore` are given, states, batches."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale
from ipu_jax.steps import Replicas, replicate
from ipu_jax.training.update.replicas import replicas_of
from support.refusals import refusals, refused
from support.trained import quick_compiles

# Wrong arguments are intended here.
OPTIONS: Any = TrainOptions
SCALE: Any = DynamicScale
MAKE: Any = make_train_step
REPLICATE: Any = replicate
SGD = optax.sgd(0.1)
INTS = np.zeros(3, np.int32)
WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(2, np.float32)}
ROWS = np.ones((2, 1, 4, 3), np.float32)  # of two replicas, with a micro-batch of 4 rows each


def loss_of(params, rows):
    return jnp.mean((rows @ params["a"] @ params["b"]) ** 2)


def counted(p, x, mb, *, state):
    return Outputs(jnp.mean(mb * p), state=state)


OF_FOUR = Pipeline([Stage(lambda p, x, mb: jnp.sum(p), params="p")], gradient_accumulation=4)
STATEFUL = Pipeline([Stage(counted, params="w", state="s")])
COUNT, POSITIVE = "an int of at least 1", "a finite one above 0"


@refusals(
    (lambda: OPTIONS(device_iterations=0), "device_iterations=0 ", "is not a count", COUNT),
    (lambda: OPTIONS(replication_factor=-1), "replication_factor=-1 ", "is not a count", COUNT),
    (lambda: OPTIONS(reduction="max"), "reduction='max'", "is unknown", "'mean', 'sum'"),
    (lambda: OPTIONS(outputs="al"), "outputs='al'", "did you mean 'all'?", "'final', 'all', 'sum'"),
    (lambda: OPTIONS(outputs=4, device_iterations=6), "outputs=4 ", "device_iterations=6", "lost", "a divisor of it"),
    (lambda: OPTIONS(max_gradient_norm=0), "max_gradient_norm=0 ", "not a positive number", POSITIVE),
    (lambda: OPTIONS(loss_scale=float("inf")), "loss_scale=inf ", "not a positive number", POSITIVE),
    (lambda: OPTIONS(precision="8.8"), "precision='8.8'", "is unknown", "'32.32', '16.32', '16.16'"),
    (lambda: OPTIONS(weighted=1), "weighted=1 ", "not a bool", "True or False"),
    (
        lambda: OPTIONS(stochastic_rounding=True, precision="16.32"),
        *("stochastic_rounding=True", "precision='16.32'", "nothing is rounded", "use precision='16.16'"),
    ),
    (lambda: OPTIONS(ema_decay=1), "ema_decay=1 ", "for ever", "one below 1"),
    (lambda: OPTIONS(ema_decay=0), "ema_decay=0 ", "not a positive number", POSITIVE),
    (lambda: OPTIONS(on_nonfinite="halt"), "on_nonfinite='halt'", "is unknown", "'stop', 'skip'"),
    (lambda: OPTIONS(max_skips=5), "max_skips=5 ", "on_nonfinite=None", "no update is skipped", "on_nonfinite='skip'"),
    (lambda: SCALE(growth_interval=0), "growth_interval=0 ", "is not a count", COUNT),
    (lambda: SCALE(factor=1), "factor=1 ", "does not grow", "one above 1"),
    (lambda: SCALE(initial=float("nan")), "initial=nan ", "not a positive number", POSITIVE),
    (lambda: SCALE(initial=0.5), "initial=0.5 ", "smallest=1.0 to largest=16777216.0", "start between the two"),
    # models, optimizers and replicas
    (
        lambda: MAKE(OF_FOUR, SGD, TrainOptions(gradient_accumulation=2)),
        *("gradient_accumulation=2", "made with gradient_accumulation=4", "or the same in both"),
    ),
    (
        lambda: MAKE(Replicas(loss_of, replication_factor=2), SGD, TrainOptions(replication_factor=4)),
        *("replication_factor=4", "the Replicas are 2", "or the same in both"),
    ),
    (lambda: MAKE(OF_FOUR, 0.1), "optimizer=0.1 ", "not an optax.GradientTransformation", "optax.sgd(...)"),
    (lambda: MAKE(3, SGD), "model=3 ", "neither a Pipeline, nor Replicas, nor callable", "a loss function"),
    (lambda: MAKE(loss_of, SGD, {"donate": True}), "options={'donate': True}", "not a TrainOptions", "TrainOptions("),
    (lambda: REPLICATE(OF_FOUR, replication_factor=2, reduction="sum"), "reduction='sum'", "its own", "the Pipeline"),
    (lambda: REPLICATE(3, replication_factor=2), "model=3 ", "neither a Pipeline nor callable", "a loss function"),
    (
        lambda: REPLICATE(loss_of, replication_factor=16),
        *("replicas=16 x ipus_per_replica=1", "backend with 8", "configure(16)", "JAX_NUM_CPU_DEVICES=16"),
    ),
    (lambda: replicas_of(), "replication_factor and num_ipus", "neither given", "one of the two"),
    (lambda: replicas_of(replication_factor=2, num_ipus=4), "replication_factor and num_ipus", "both given", "one of"),
    (lambda: replicas_of(num_ipus=6, ipus_per_replica=4), "num_ipus=6 ", "ipus_per_replica=4", "such as 4 or 8"),
    (lambda: replicas_of(num_ipus=3, ipus_per_replica=4), "num_ipus=3 ", "ipus_per_replica=4", "such as 4"),
    (lambda: replicas_of(replication_factor=0), "replication_factor=0 ", "is not a count", COUNT),
    (lambda: replicas_of(num_ipus=2.0), "num_ipus=2.0 ", "is not a count", COUNT),  # pyright: ignore[reportArgumentType]
)
def test_options_and_models_that_do_not_fit_are_refused(call, holds):
    with refused(*holds):
        call()


@pytest.fixture(scope="module")
def made():
    """Return steps, and states of them, which the calls below use: what they compile is compiled before."""
    with quick_compiles():
        yield _made()


def _made() -> Any:
    stages = [
        Stage(lambda p, x, mb: mb @ p, params="a", ipu=0),
        Stage(lambda p, x, mb: jnp.mean((x @ p) ** 2), params="b", ipu=1),
    ]
    of = lambda model=loss_of, optimizer=SGD, **options: make_train_step(model, optimizer, TrainOptions(**options))
    momentum = optax.sgd(0.1, momentum=0.9)
    steps: Any = types.SimpleNamespace(
        plain=of(replication_factor=2),
        pipeline=of(Pipeline(stages, mesh=make_mesh(2, 2))),
        several=of(replication_factor=2, device_iterations=2),
        scaled=of(replication_factor=2, loss_scale=DynamicScale()),
        averaging=of(replication_factor=2, ema_decay=0.9),
        stopping=of(replication_factor=2, on_nonfinite="stop"),
        weighted=of(replication_factor=2, weighted=True),
        momentum=of(optimizer=momentum, replication_factor=2),
        half=of(replication_factor=2, precision="16.16"),
    )
    states = types.SimpleNamespace(**{name: step.init(WEIGHTS) for name, step in vars(steps).items()})
    steps.random = make_train_step(Replicas(loss_of, random=True), SGD)
    steps.rounding = of(replication_factor=2, precision="16.16", stochastic_rounding=True)
    steps.stateful = make_train_step(STATEFUL, SGD)
    replicas: Any = replicate(loss_of, replication_factor=2)
    return types.SimpleNamespace(
        **vars(steps),
        of=states,
        saved=steps.plain.whole(states.plain),
        saved_momentum=steps.momentum.whole(states.momentum),
        keys=jax.random.split(jax.random.key(0)),
        replicas=replicas,
        held=replicas.shard(WEIGHTS),
    )


def without(saved, name):
    return {part: value for part, value in saved.items() if part != name}


KEY, MISSING = "is not one typed key", "key is missing"
DIFFER, SCALING = "the state and this step differ in whether they", "scale the loss by a DynamicScale"


@refusals(
    # init
    (lambda m: m.random.init(WEIGHTS, key=3), "key=3 ", KEY, "jax.random.key(seed)"),
    (lambda m: m.random.init(WEIGHTS, key=m.keys), KEY, "jax.random.key(seed)"),
    (lambda m: m.random.init(WEIGHTS), MISSING, "the model is random", "init(..., key=jax.random.key(seed))"),
    (lambda m: m.rounding.init(WEIGHTS), MISSING, "stochastic_rounding=True", "init(..., key=jax.random.key"),
    (lambda m: m.plain.init({"w": INTS}), "params['w'] is int32", "floating", "in the batch"),
    (lambda m: m.plain.init(WEIGHTS, stages={"s": np.ones(())}), "the model holds no state", "leave them out"),
    (lambda m: m.pipeline.init(WEIGHTS, stages={"s": np.ones(())}), "the model holds no state", "leave them out"),
    (lambda m: m.stateful.init({"w": np.ones(3)}), "stages is missing", "the state of 's'"),
    # restore
    (lambda m: m.plain.restore(without(m.saved, "step")), "has no ['step']", "what step.whole(state) gave"),
    (lambda m: m.plain.restore(m.saved_momentum), "the saved optimizer state", "has leaves ["),
    (lambda m: m.scaled.restore(m.saved), "differ in whether they", SCALING),
    (lambda m: m.averaging.restore(without(m.saved, "ema")), "saved state", "by ema_decay", "its own 'params'"),
    (
        lambda m: m.averaging.restore({**m.saved, "ema": {"a": WEIGHTS["a"]}}),
        *("'ema' is not a tree like the saved 'params'", "what whole returned"),
    ),
    # states of other steps
    (lambda m: m.plain(None, ROWS), "state does not belong to this step", "step.init(params)"),
    (lambda m: m.plain(m.of.pipeline, ROWS), "state does not belong to this step", "step.init(params)"),
    (lambda m: m.plain(m.of.scaled, ROWS), DIFFER, SCALING),
    (lambda m: m.scaled(m.of.plain, ROWS), DIFFER, SCALING),
    (lambda m: m.plain(m.of.averaging, ROWS), DIFFER, "average the weights by ema_decay"),
    (lambda m: m.averaging(m.of.plain, ROWS), DIFFER, "average the weights by ema_decay"),
    (lambda m: m.stopping(m.of.plain, ROWS), DIFFER, "on_nonfinite", "step.restore(other.whole(state))"),
    (lambda m: m.half(m.of.plain, ROWS), "['a'] is float32", "precision='16.16' holds bfloat16", "step.init("),
    (lambda m: m.rounding(m.of.half, ROWS), MISSING, "stochastic_rounding=True", "jax.random.key(seed)"),
    # batches and updates of a call
    (lambda m: m.several(m.of.several, ROWS[None]), "(1, 2, 1, 4, 3)", "device_iterations=2", "of a Feed"),
    (
        lambda m: m.plain(m.of.plain, np.repeat(ROWS, 3, axis=1)),
        *("batch has shape (2, 3, 4, 3)", "leading dims", "(replicas, gradient_accumulation, ...) = (2, 1, ...)"),
    ),
    (lambda m: m.weighted(m.of.weighted, ROWS), "weighted=True", "gives no count", "return (sum, count)"),
    *(
        (lambda m, wrong=wrong: m.several(m.of.several, np.stack([ROWS] * 2), updates=wrong), "updates=", "give")
        for wrong in (0, 6, -1, True, 2.5, range(1, 1), range(3), range(0, 2, 2), range(-1, 2))
    ),
    # the loss of a step
    (lambda m: m.several.loss(m.of.several, ROWS[None]), "(1, 2, 1, 4, 3)", "device_iterations=2", "of a Feed"),
    (
        lambda m: m.several.loss(m.of.several, np.ones((2, 2, 2, 4, 3), np.float32)),
        *("batch has shape (2, 2, 4, 3)", "leading dims", "(replicas, gradient_accumulation, ...) = (2, 1, ...)"),
    ),
    (lambda m: m.plain.loss(m.of.plain.params, ROWS), "state does not belong to this step", "step.init(params)"),
    (lambda m: m.plain.loss(m.of.plain, ROWS, ema=True), "ema=True", "no average", "ema_decay=0.999"),
    # replicas of a loss function
    (lambda m: m.replicas.value_and_grad(m.held, ROWS, 0), "a key was given", "takes none", "random=True"),
    (lambda m: m.replicas.value_and_grad(m.held, np.ones((3, 1, 4, 3))), "(3, 1, 4, 3)", "= (2, 1, ...)"),
    (lambda m: m.replicas.value_and_grad({"w": INTS}, ROWS), "['w'] is int32", "floating", "in the batch"),
    (
        lambda m: m.replicas.value_and_grad({"w": np.zeros(3, jnp.float8_e5m2)}, ROWS),
        *("params['w'] is float8_e5m2", "at least 16 bits", "bfloat16"),
    ),
    (
        lambda m: REPLICATE(loss_of, replication_factor=2, random=True).value_and_grad(m.held, ROWS),
        *(f"key=None {KEY}", "which loss_fn takes", "jax.random.key(seed)"),
    ),
    (
        lambda m: REPLICATE(lambda p, mb: mb[0, :3], replication_factor=2).value_and_grad(m.held, ROWS),
        *("loss_fn returned float32[3]", "a float scalar, or (loss, aux)"),
    ),
)
def test_states_batches_and_keys_that_do_not_fit_are_refused(call, holds, made):
    with refused(*holds):
        call(made)

"""Run the whole library on all devices, of one process or of several, and return the results.

`support.programs` makes the same call of a function in every process; tests also call it in their own process, with 8
devices. Functions return plain arrays, so that the results of any number of processes can be compared.
"""

import importlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from ipu_jax import Feed, Pipeline, Stage, TrainOptions, make_mesh, make_train_step, verify
from ipu_jax.options import DynamicScale
from ipu_jax.pipelines import VerificationError, reference_predict, reference_value_and_grad
from ipu_jax.steps import Evaluation, replicate
from support.dense import Model, chain
from support.programs import Results

STEPS = 3
MICRO_BATCHES = 2


def model_of(replicas: int, ipus: int, dtype: str = "float32") -> Model:
    """Return a model with a tied table of 10 rows, split unevenly, and stages on every IPU of a replica."""
    return chain((None, *range(ipus), None), MICRO_BATCHES, replicas=replicas, tied=True, dtype=jnp.dtype(dtype))


def local(tree: Any) -> Any:
    """Return global arrays whole, by jax's own means."""
    read = lambda leaf: (
        np.asarray(leaf)
        if leaf.is_fully_addressable or leaf.is_fully_replicated
        else np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    )
    return jax.tree.map(read, tree)


def named(name: str, tree: Any) -> Results:
    """Return the leaves of a tree by their paths; bfloat16 leaves are float32, since npz cannot hold them."""
    as_array = lambda leaf: np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    arrays = {f"{name}{jax.tree_util.keystr(path)}": as_array(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
    wide = lambda array: array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
    return {path: wide(array) for path, array in arrays.items()}


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def refusal(call: Any) -> np.ndarray:
    """Return the text of the error that a call raises."""
    try:
        call()
    except (ValueError, AssertionError) as error:
        return np.array(f"{type(error).__name__}: {error}")
    return np.array("nothing was raised")


# pipelines


def whole_pipeline(replicas: int, ipus: int, dtype: str = "float32") -> Results:
    """Return the results of each method of a pipeline, of `verify` and of what measures and counts."""
    model = model_of(replicas, ipus, dtype)
    pipeline = model.pipeline(ipus)
    params, batch = pipeline.shard(model.params), jax.device_get(model.batch)
    loss, gradients = pipeline.value_and_grad(params, batch)
    report = verify(pipeline, params, batch)
    measured = pipeline.stage_costs(params, batch, measured=True, repeats=2)
    counted = pipeline.report(params, batch)
    return {
        "loss": np.asarray(loss),
        "loss alone": np.asarray(pipeline.loss(params, batch)),
        "verified": np.array([report.loss, report.reference_loss, *report.gradient_errors.values()]),
        **named("params", pipeline.unshard(params)),
        **named("gradients", pipeline.unshard(gradients)),
        **named("jax.grad", pipeline.unshard(jax.grad(lambda p: pipeline.loss(p, batch))(params))),
        **named("reference", reference_value_and_grad(pipeline, model.params, batch)),
        "repr": np.array(repr(report) + repr(params)[:9] + repr(pipeline)),
        "seconds": np.array([measured.forward, measured.whole_backward]),
        "report": np.array([[ipu.weights, ipu.stash] for ipu in counted.ipus]),
    }


def predictions(replicas: int, ipus: int) -> Results:
    """Return the predictions of a pipeline of layers, and of its unsharded program, for 3 micro-batches."""
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(6, 6)).astype(np.float32) for _ in range(2 * ipus)]
    layer = lambda w, x, mb: jnp.tanh((mb["x"] if x is None else x) @ w)
    stages = [Stage(layer, params=f"layer {k}", ipu=k // 2) for k in range(len(layers))]
    end = Stage(lambda _, x, mb: jnp.mean((x - mb["y"]) ** 2), predict=lambda _, x, mb: x, name="loss", ipu=ipus - 1)
    mesh = make_mesh(replicas, ipus)
    pipeline = Pipeline([*stages, end], mesh=mesh, gradient_accumulation=2, schedule="auto")
    params = pipeline.shard({f"layer {k}": w for k, w in enumerate(layers)})
    lead = (3,) if replicas == 1 else (replicas, 3)
    x = rng.normal(size=(*lead, 4, 6)).astype(np.float32)
    outputs = pipeline.predict(params, {"x": x})
    two = {name: x[..., :2, :, :] for name in ("x", "y")}
    chosen = pipeline.choose_schedule(params, two)
    return {
        "x": x,
        **named("layers", layers),
        "outputs": local(outputs),
        "reference": np.asarray(reference_predict(pipeline, pipeline.unshard(params), {"x": x})),
        "schedule": np.array(str(chosen.schedule)),
        "loss": np.asarray(pipeline.loss(params, two)),
    }


def evaluated(replicas: int, ipus: int) -> Results:
    """Return the means of a cut function over 21 examples before and after an update, and those before by NumPy."""
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(3, 3)).astype(np.float32) for _ in range(2 * ipus)]
    data = {name: rng.uniform(0.1, 1, size=(21, 3)).astype(np.float32) for name in ("x", "y")}

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    one = {name: leaf[:4] for name, leaf in data.items()}
    options: dict[str, Any] = {"ipus": ipus, "replicas": replicas, "gradient_accumulation": MICRO_BATCHES}
    step = make_train_step(Pipeline.from_function(loss, params, one, **options), optax.sgd(0.1))
    both = lambda params, batch: {"loss": loss(params, batch), "log": jnp.mean(jnp.log(batch["y"]))}
    evaluation = Evaluation(step.model.forward(both, one), data, micro_batches=1)
    state, numbers = step.init(params), lambda found: np.array([found["loss"], found["log"]])
    before = evaluation(state)
    with Feed(data, step=step, micro_batch=4) as feed:
        state, _ = step(state, next(feed))
    y = data["x"].astype(np.float64)
    for w in params:
        y = np.tanh(y @ w)
    expected = np.mean((y - data["y"]) ** 2), np.mean(np.log(data["y"].astype(np.float64)))
    return {"before": numbers(before), "after": numbers(evaluation(state)), "expected": np.array(expected)}


# training


def options_of(given: dict[str, Any]) -> TrainOptions:
    dynamic: dict[str, Any] = {"loss_scale": DynamicScale(initial=16.0)} if given.get("loss_scale") == "dynamic" else {}
    return TrainOptions(**(given | dynamic))


def trained(replicas: int, ipus: int, each: list[dict[str, Any]], dtype: str = "float32") -> Results:
    """Return losses and whole states after some updates under each of the options, with a `restore` in between."""
    found: Results = {}
    for number, given in enumerate(each):
        model, options = model_of(replicas, ipus, dtype), options_of(given)
        step = make_train_step(model.pipeline(ipus), optax.adamw(0.02), options)
        key = jax.random.key(5) if options.stochastic_rounding else None
        state = step.init(model.params, key=key)
        batches = [_batch(model, i, options.device_iterations) for i in range(STEPS)]
        outputs = []
        for i, batch in enumerate(batches):
            state, output = step(state, batch)
            outputs.append(output)
            if i == 0:
                state = step.restore(step.whole(state))
        whole, text = step.whole(state), repr(state) + repr(outputs)
        found |= named(f"{number} whole", whole) | named(f"{number} outputs", local(outputs))
        found |= {f"{number} loss": np.asarray(step.loss(state, batches[0])), f"{number} repr": np.array(text)}
        if options.ema_decay is not None:
            found[f"{number} loss of the average"] = np.asarray(step.loss(state, batches[0], ema=True))
    return found


def _batch(model: Model, step: int, iterations: int) -> Any:
    lead = 1 if model.replicas == 1 else 2
    rolled = [
        jax.tree.map(lambda leaf, i=i: np.roll(leaf, i, axis=lead), jax.device_get(model.batch))
        for i in range(iterations * step, iterations * (step + 1))
    ]
    return rolled[0] if iterations == 1 else jax.tree.map(lambda *leaves: np.stack(leaves), *rolled)


def function_trained(replicas: int, options: dict[str, Any] | None = None) -> Results:
    """Return the results of replicas of a plain loss function, without and with keys, and states after some updates."""
    rng = np.random.default_rng(1)
    params = {"w": rng.normal(size=(5, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
    batch = rng.normal(size=(replicas, MICRO_BATCHES, 4, 5)).astype(np.float32)

    def loss_fn(p: Any, rows: Any, *, key: Any = None) -> Any:
        rows = rows if key is None else rows * jax.random.bernoulli(key, 0.5, rows.shape)
        y = jnp.tanh(rows @ p["w"] + p["b"])
        return jnp.mean(y**2), jnp.mean(y)

    found: Results = {}
    for random in (False, True):
        key = {"key": jax.random.key(3)} if random else {}
        made = replicate(loss_fn, replication_factor=replicas, gradient_accumulation=MICRO_BATCHES, random=random)
        placed = made.shard(params)
        (loss, aux), gradients = made.value_and_grad(placed, batch, **key)
        found |= named(
            f"random={random}", (loss, local(aux), made.unshard(gradients), local(made.loss(placed, batch, **key)))
        )
        step = make_train_step(made, optax.adamw(0.02), options_of(options or {}))
        state = step.init(params, **key)
        for _ in range(STEPS):
            state, _ = step(state, batch)
        found |= named(f"random={random} whole", step.whole(state))
    return found


# random programs


def random_cases(kind: str, seed: int, first: int, count: int) -> Results:
    """Check the first random programs that need a device of every process against dense ones; return their numbers."""
    from random_programs.dice import Dice

    module = importlib.import_module(f"random_programs.{kind}")
    last = max(device.process_index for device in jax.devices())
    least = 1 + min(k for k, device in enumerate(jax.devices()) if device.process_index == last)
    checked: list[int] = []
    case = first
    while len(checked) < count:
        drawn = module.Case(Dice(kind, seed, case))
        if least <= drawn.model.replicas * drawn.model.ipus <= len(jax.devices()):
            try:
                drawn.check()
            except BaseException as error:
                error.add_note(f"case {case} of seed {seed}: {drawn}")
                raise
            checked.append(case)
        case += 1
    return {"checked": np.array(checked)}


def verify_on_one_side() -> Results:
    """Return the error of a `verify` in which a value is wrong on the last instance only."""
    from ipu_jax.core.proof import verification

    model = model_of(1, jax.device_count())
    pipeline = model.pipeline(jax.device_count())
    params, batch = pipeline.shard(model.params), jax.device_get(model.batch)
    right = verification.unsharded_update

    def spoiled(*args: Any, **options: Any) -> Any:
        loss, gradients = right(*args, **options)
        if jax.process_index() == jax.process_count() - 1:
            gradients = jax.tree.map(lambda leaf: leaf + 1, gradients)
        return loss, gradients

    verification.unsharded_update = spoiled
    error: Any = None
    try:
        verify(pipeline, params, batch)
    except VerificationError as raised:
        error = raised
    return {"error": np.array(str(error))}


def fails(how: str) -> Results:
    """Raise on instance 1 while instance 0 waits for it, or wait on both instances."""
    if how == "raises" and jax.process_index() == 1:
        raise RuntimeError("of instance 1")
    if how == "waits":
        time.sleep(600)
    multihost_utils.sync_global_devices("all")
    return {}

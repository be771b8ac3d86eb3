"""Make training steps in which one instance differs from the others, and steps in which all are alike.

`support.programs` runs these functions in each process.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from ipu_jax import Feed, Pipeline, Stage, TrainOptions, make_mesh, make_train_step, popdist
from ipu_jax.distributed import board
from ipu_jax.training.update import _alike
from support.programs import Results

# the value on most instances, and on the odd one; the name of what differs, and how both are shown
UNLIKE: dict[str, tuple[Any, Any, str, str, str]] = {
    "learning rate": (1e-2, 2e-2, "of its program", "dense<-0.00999999977>", "dense<-2.000000e-02>"),
    "optimizer": ("adam", "sgd", "optimizer[0].count", "int32[]", "none"),
    "first weights": (3, 4, "params['body']", "checksum", "checksum"),
    "key": (0, 1, "key", "checksum", "checksum"),
    "weights put together": (1.0, 1.5, "state.params", "checksum", "checksum"),
    "micro-batch": (4, 8, "batch['x']", ", 4, 8]", ", 8, 8]"),
    "dtype": ("float32", "float16", "batch['x']", "float32[", "float16["),
    "examples": (320, 160, "feed.examples", "'320'", "'160'"),
    "seed": (5, 6, "feed.seed", "'5'", "'6'"),
    "epochs": (2, 3, "feed.epochs", "'2'", "'3'"),
    "position": (0, 32, "feed.position", "'0'", "'32'"),
    "updates": (2, 1, "updates to make", "'0 to 1'", "'0 to 0'"),
    "code": ("tanh", "sin", "of its program", "stablehlo.tanh", "stablehlo.sine"),
    "constant": (1.0, 1.25, "of its program", "1.000000e+00", "1.250000e+00"),
    "loss scale": (1.0, 2.0, "options.loss_scale", "'1.0'", "'2.0'"),
    "precision": (None, "highest", "of its program", "[DEFAULT, DEFAULT]", "[HIGHEST, HIGHEST]"),
    "schedule": ("grouped", "gpipe", "schedule", "'grouped: ", "'gpipe: "),
    "width": (16, 24, "params['body']", "float32[8, 16]", "float32[8, 24]"),
}
ALIKE = {name: values[0] for name, values in UNLIKE.items()} | {"weights put together": None}


def weights_of(given: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(given["first weights"])
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    return {"body": draw(8, given["width"]), "head": draw(given["width"], 1)}


def _stages(given: dict[str, Any], last: int) -> list[Stage]:
    constant = np.full((given["width"],), given["constant"], np.float32)

    def body(w: Any, _x: Any, batch: Any, *, key: Any) -> Any:
        return getattr(jnp, given["code"])(batch["x"] @ w) * constant + 1e-6 * jax.random.normal(key, (1,))

    def head(w: Any, x: Any, batch: Any) -> Any:
        return jnp.mean((x @ w - batch["y"]) ** 2)

    return [Stage(body, params="body", ipu=0, random=True), Stage(head, params="head", ipu=last)]


def made(replicas: int, ipus: int, given: dict[str, Any], mesh: Mesh | None = None, **options: Any) -> Any:
    """Return a training step, its first state, and a feed."""
    pipeline = Pipeline(
        _stages(given, ipus - 1),
        mesh=make_mesh(replicas, ipus) if mesh is None else mesh,
        gradient_accumulation=4,
        **({"schedule": given["schedule"]} if ipus > 1 else {}),
    )
    optimizer = getattr(optax, given["optimizer"])(given["learning rate"])
    step = make_train_step(
        pipeline, optimizer, TrainOptions(device_iterations=2, loss_scale=given["loss scale"], **options)
    )
    state = step.init(weights_of(given), key=jax.random.key(given["key"]))
    if given["weights put together"] is not None:
        other = {group: leaf * np.float32(given["weights put together"]) for group, leaf in weights_of(given).items()}
        state = dataclasses.replace(state, params=step.init(other, key=jax.random.key(0)).params)
    data = {"x": np.ones((given["examples"], 8), given["dtype"]), "y": np.ones((given["examples"], 1), np.float32)}
    feed = Feed(
        data,
        step=step,
        micro_batch=given["micro-batch"],
        seed=given["seed"],
        epochs=given["epochs"],
        state={"epoch": 0, "position": given["position"], "examples": given["examples"], "seed": given["seed"]}
        | {"shuffle": 1},
    )
    return step, state, feed


def _compiled() -> list[str]:
    """Return a list that grows with each program that jax compiles from now on."""
    found: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: found.append(event) if "backend_compile" in event else None
    )
    return found


def refusals(replicas: int, ipus: int, odd: int, names: list[str]) -> Results:
    """Return what the first call of a step says for each of these differences, and how many programs were compiled."""
    is_odd, found, compiled, by_calls = board.process()[0] == odd, Results(), _compiled(), 0
    for name in names:
        given = ALIKE | {name: UNLIKE[name][is_odd]}
        step, state, feed = made(replicas, ipus, given)
        with feed, jax.default_matmul_precision(given["precision"]):
            batch = next(feed)
            before = len(compiled)
            try:
                step(state, batch, updates=given["updates"])
            except popdist.InstancesDifferError as error:
                found[name] = np.array(str(error))
            by_calls += len(compiled) - before
    return found | {"compiled by calls": np.array(by_calls)}


def equals(replicas: int, ipus: int) -> Results:
    """Return the number of messages of each step that all instances call alike, and who is missing in a last one."""
    messages: list[str] = []
    gather: Any = board.gather

    def counted(what: str, payload: bytes, **options: Any) -> list[bytes]:
        messages.append(what)
        return gather(what, payload, **options)

    board.gather = counted
    own, found, told = board.process()[0], Results(), 0

    def note(name: str) -> None:
        nonlocal told
        found[name] = np.array(len(messages) - told)
        told = len(messages)

    step, state, feed = made(replicas, ipus, ALIKE | {"examples": 80 * replicas, "epochs": 1})
    batch = None
    with feed:
        for batch in feed:  # the last has one update of two
            state, _ = step(state, batch)
    assert batch is not None
    assert batch.updates == 1
    note("an epoch of a feed")
    whole = step.whole(state)
    note("whole")
    again, first, _ = made(replicas, ipus, ALIKE)
    again(again.restore(whole), batch)
    note("a state that was restored")
    arrays = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), feed.like)
    other, first, _ = made(
        replicas, ipus, ALIKE | {"weights put together": 1.5}, shard_optimizer=True, precision="16.16"
    )
    other(first, arrays)
    note("a state that was put together, and an own batch")
    own_step, first, own_feed = made(1, 1, ALIKE, mesh=Mesh([[jax.local_devices()[0]]], ("replica", "ipu")))
    if own == 1:
        own_step(first, next(own_feed))
        step.lower(state, batch)
    note("a step of one instance")
    popdist.init(check_programs=False)
    free, first, feed = made(replicas, ipus, ALIKE | {"learning rate": 0.1 * (own + 1), "seed": own})
    free(first, next(feed))
    note("unlike programs that are allowed")
    popdist.init()
    _alike._SECONDS = 1.0
    last, first, feed = made(replicas, ipus, ALIKE)
    batch = next(feed)
    if own == 0:
        try:
            last(first, batch)
        except popdist.InstancesMissingError as error:
            found["missing"] = np.array(str(error))
    return found

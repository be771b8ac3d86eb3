"""Test that a state in the host's memory is trained to the same bits, and stays there.

The model has local stages of unlike shapes and, unless it is local, a head whose columns are on all IPUs, padded, and a
group that is whole on each of them. What XLA makes of the copies for a TPU is tested in run/ahead/test_compiled.py.
"""

import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Checkpoints, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.core.mesh import host_memory
from ipu_jax.core.mesh.host_memory import check_has_host_memory
from ipu_jax.core.proof.exact import exact_options
from ipu_jax.options import DynamicScale
from ipu_jax.steps import NonFiniteLossWarning, replicate
from support.refusals import refusals, refused
from support.trained import bits

M, N, D, UPDATES = 2, 4, 6, 3
OFFLOAD: dict[str, Any] = {"offload": ("optimizer",)}
drawn = lambda *shape: np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32) / 4
WEIGHTS = {
    "a": {"w": drawn(D, 9), "v": drawn(9, D)},
    "b": {"w": drawn(D, 5), "v": drawn(5, D)},
    "gain": drawn(D),
    "head": drawn(D, 5),
}


def block(p: Any, x: Any, mb: Any) -> Any:
    x = mb if x is None else x
    return x + jnp.tanh(x @ p["w"]) @ p["v"]


def local(replicas: int = 1) -> Pipeline:
    last = lambda p, x, mb: jnp.mean((block(p, x, mb) - 1) ** 2)
    stages = [Stage(block, params="a", ipu=0), Stage(last, params="b", ipu=1)]
    return Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=M)


def pipeline_of(replicas: int = 1) -> Pipeline:
    stages = [
        Stage(block, params="a", ipu=0),
        Stage(block, params="b", ipu=1),
        Stage(lambda p, x, mb: x * (1 + p), params="gain", ipu=ALL_IPUS),
        Stage(lambda p, x, mb: jax.lax.psum(jnp.mean((x @ p - 1) ** 2), "ipu"), params="head", ipu=ALL_IPUS),
    ]
    specs = {"gain": PartitionSpec(), "head": PartitionSpec(None, "ipu")}
    return Pipeline(stages, mesh=make_mesh(replicas, 2), specs=specs, gradient_accumulation=M)


def loss(p: Any, mb: Any) -> Any:
    return jnp.mean((block(p["b"], block(p["a"], None, mb), mb) * (1 + p["gain"]) @ p["head"] - 1) ** 2)


def function(replicas: int = 1) -> Any:
    return replicate(loss, replication_factor=replicas, gradient_accumulation=M)


def case(make: Any = pipeline_of, replicas: int = 1, optimizer: Any = None, **options: Any) -> Any:
    adamw = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    return SimpleNamespace(make=make, replicas=replicas, optimizer=optimizer or adamw, options=options)


# of the optimizers, those whose norms read the state, leaf by leaf and over all leaves
LAST_CLIPPED = optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.1), optax.scale(-1e-2))
CASES = {
    "plain": case(),
    "skip": case(on_nonfinite="skip"),
    "stop, average": case(on_nonfinite="stop", ema_decay=0.5),
    "dynamic scale": case(loss_scale=DynamicScale(), ema_decay=0.5),
    "two per call": case(device_iterations=2, on_nonfinite="skip", ema_decay=0.5),
    "divided": case(replicas=2, shard_optimizer=True, ema_decay=0.5),
    "average": case(ema_decay=0.5),
    "16.16": case(precision="16.16", ema_decay=0.5),
    "function": case(function, 2),
    "function, divided": case(function, 2, shard_optimizer=True, ema_decay=0.5, on_nonfinite="skip"),
    "lamb": case(optimizer=optax.lamb(1e-2)),
    "lamb, divided": case(replicas=2, optimizer=optax.lamb(1e-2), shard_optimizer=True, on_nonfinite="skip"),
    "lamb, function": case(function, 2, optax.lamb(1e-2)),
    "clipped at the end": case(optimizer=LAST_CLIPPED, on_nonfinite="skip"),
    "clipped at the end, function": case(function, 2, LAST_CLIPPED),
    "adafactor": case(optimizer=optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "muon, function": case(function, 2, optax.contrib.muon(1e-2)),
    "novograd": case(optimizer=optax.novograd(1e-2)),
    "MultiSteps": case(optimizer=optax.MultiSteps(optax.adam(1e-2), 2)),
    "MultiSteps, function": case(function, 2, optax.MultiSteps(optax.adam(1e-2), 2)),
    "rates": case(optimizer=optax.inject_hyperparams(optax.adam)(1e-2)),
}


def step_of(of: Any, **more: Any) -> Any:
    return make_train_step(of.make(of.replicas), of.optimizer, TrainOptions(**of.options, **more))


def batch_of(step: Any, number: int) -> Any:
    """Return the batch of a call. If the step looks for what is not finite, all of the second one is NaN."""
    lead = [n for n in (step.options.device_iterations, step.model.replicas) if n > 1]
    rows = np.random.default_rng(number).normal(size=(*lead, M, N, D)).astype(np.float32)
    looks = step.options.on_nonfinite == "skip" or step.options.loss_scale == DynamicScale()
    return rows * np.float32(np.nan) if looks and number == 1 else rows


def memories(state: Any) -> tuple[set[str], set[str]]:
    """Return the kinds of memory of what is kept with blocks, and of everything else."""
    named = zip(state.optimizer.layout.arrays, state.optimizer.arrays, strict=True)
    kept, others = [] if state.ema is None else [*state.ema.arrays], jax.tree.leaves((state.params, state.step))
    for own, array in named:
        (others if own.name.startswith("replicated") else kept).append(array)
    assert kept
    kinds_of = lambda arrays: {array.sharding.memory_kind for array in arrays}
    return kinds_of(kept), kinds_of(others)


ON_HOST = ({"pinned_host"}, {"device"})


def trained_exactly(step: Any) -> Any:
    """Return the state after some calls, in which XLA fuses nothing: a CPU rounds a product in a sum as it fuses."""
    state, updates = step.init(WEIGHTS), (np.int32(0), np.int32(step.options.device_iterations))
    program = step.lower(state, batch_of(step, 0)).compile(exact_options(optimized=False))
    for number in range(UPDATES):
        state, *_ = program(state, batch_of(step, number), updates)
    return state


WHOLE, FEW = 2**22, 100  # bytes of an array that are fetched; arrays have 6 rows, flat ones 30 and 54
BY_ROWS = ("plain", "skip", "divided", "average", "16.16", "function", "lamb, divided")


@pytest.mark.fast("function-4194304", "average-100")
@pytest.mark.parametrize(("name", "most"), [*((name, WHOLE) for name in CASES), *((name, FEW) for name in BY_ROWS)])
def test_all_bits_are_as_on_the_device_and_the_state_stays_on_the_host(name, most, monkeypatch):
    monkeypatch.setattr(host_memory, "_AT_ONCE", most)
    beside, step = (step_of(CASES[name], **more) for more in ({}, OFFLOAD))
    expected, found = trained_exactly(beside), trained_exactly(step)
    assert memories(found) == ON_HOST
    assert bits(step.whole(found)) == bits(beside.whole(expected))
    assert int(found.step) > 0
    if step.options.ema_decay is not None:
        batch = batch_of(step, 5)
        assert bits(step.loss(found, batch, ema=True)) == bits(beside.loss(expected, batch, ema=True))


def trained(step: Any, state: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteLossWarning)
        for number in range(UPDATES):
            state, _ = step(state, batch_of(step, number))
        step.check(state)
    return state


LOCAL = {name: WEIGHTS[name] for name in ("a", "b")}


@pytest.mark.fast("two per call")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"on_nonfinite": "skip", "ema_decay": 0.5, "device_iterations": 2}, id="two per call"),
        pytest.param({"replication_factor": 2, "shard_optimizer": True}, id="divided"),
    ],
)
def test_calls_of_local_stages_give_the_same_bits_and_reuse_buffers_on_the_host(options):
    of = case(local, options.get("replication_factor", 1), **options)
    beside, step = (step_of(of, **more) for more in ({}, OFFLOAD))
    first = step.init(LOCAL)
    assert memories(first) == ON_HOST
    found, expected = trained(step, first), trained(beside, beside.init(LOCAL))
    assert memories(found) == ON_HOST
    assert all(array.is_deleted() for array in jax.tree.leaves((first.optimizer, first.ema, first.params)))
    assert bits(step.whole(found)) == bits(beside.whole(expected))


@pytest.mark.fast("pipeline_of")
@pytest.mark.parametrize("make", [pipeline_of, function])
def test_a_state_goes_to_the_host_and_back_through_whole_and_a_checkpoint(make, tmp_path):
    steps = [step_of(case(make, ema_decay=0.5), **more) for more in ({}, OFFLOAD)]
    for name, (one, other) in {"there": steps, "back": steps[::-1]}.items():
        state = trained(one, one.init(WEIGHTS))
        with Checkpoints(tmp_path / name, one) as saved:
            saved.save(state, now=True)
        restored = Checkpoints(tmp_path / name, other).restore(other.init(WEIGHTS))
        assert restored is not None
        for state_of_other in (restored.state, other.restore(one.whole(state))):
            assert bits(other.whole(state_of_other)) == bits(one.whole(state))
            assert (memories(state_of_other) == ON_HOST) == (other.options.offload != ())
            trained(other, state_of_other)
        with refused("state.optimizer", "offload", "init"):
            other(state, batch_of(other, 0))


COPIED = optax.chain(optax.scale_by_adam(), optax.contrib.schedule_free(optax.sgd(0.1), 0.1))  # has copies of weights


@pytest.mark.fast("function")
@pytest.mark.parametrize("make", [pipeline_of, function])
def test_a_first_state_is_born_on_the_host_of_whole_and_placed_weights_and_of_a_function(make):
    beside, step = (step_of(case(make, optimizer=COPIED, ema_decay=0.5), **more) for more in ({}, OFFLOAD))
    expected = bits(beside.whole(beside.init(WEIGHTS)))
    again = lambda key: jax.tree.map(lambda w: jnp.asarray(w) + jax.random.uniform(key, w.shape) * 0, WEIGHTS)
    placed = [step.model.shard(WEIGHTS)] if make is pipeline_of else []
    for state in (step.init(WEIGHTS), step.init(again, jax.random.key(0)), *map(step.init, placed)):
        assert memories(state) == ON_HOST
        assert bits(step.whole(state)) == expected


def test_the_cause_of_a_stop_is_named():
    step = step_of(case(on_nonfinite="stop"), **OFFLOAD)
    state = trained(step, step.init(WEIGHTS))
    rows = batch_of(step, 0)
    rows[1, 2] = np.inf
    found = step.find_nonfinite(state, rows)
    assert (found.microbatch, found.stage) == (1, 0)


def device_of(kinds: Any) -> Any:
    """Return what knows of these memories, in place of a device."""

    def addressable_memories() -> Any:
        if kinds is None:
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: memories of a described device")
        return [SimpleNamespace(kind=kind) for kind in kinds]

    client = SimpleNamespace(local_devices=lambda: [] if kinds is None else ["one"])
    return SimpleNamespace(
        addressable_memories=addressable_memories, device_kind="K1", client=client, process_index=jax.process_index()
    )


def has(kinds: Any) -> Any:
    mesh: Any = SimpleNamespace(devices=np.array([device_of(kinds)], object))
    return lambda: check_has_host_memory(mesh)


@refusals(
    (lambda: TrainOptions(offload="optimizer"), "offload='optimizer'", "('optimizer',)", "tuple"),  # pyright: ignore
    (lambda: TrainOptions(offload=("weights",)), "offload=('weights',)", "rest in the host's memory", "leave it out"),
    (lambda: TrainOptions(offload=True), "offload=True", "('optimizer',)"),  # pyright: ignore
    (lambda: TrainOptions(offload=([],)), "offload=([],)", "('optimizer',)"),  # pyright: ignore
    (has(["device"]), "offload=('optimizer',)", "pinned_host", "K1", "leave offload out"),
    (has(None), "offload=('optimizer',)", "a described K1", "leave offload out, or compile where the GPU is"),
)
def test_what_cannot_rest_on_the_host_is_refused(call, holds):
    with refused(*holds):
        call()


def test_devices_with_the_hosts_memory_are_taken():
    has(["device", "pinned_host"])()
    assert TrainOptions(offload=["optimizer", "optimizer"]).offload == ("optimizer",)  # pyright: ignore

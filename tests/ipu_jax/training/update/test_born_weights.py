"""Test weights that a function of a key makes, on the IPUs that hold them, with the optimizer's state for them.

The oracle is the function itself, compiled for one device, and optax's own first state for its result: bit for bit.
"""

import collections
import functools
import itertools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.core.layout import born
from ipu_jax.steps import replicate
from sharded_ops import embedding, linear_cross_entropy
from support.inputs import normal
from support.programs import run_instances
from support.refusals import refused

D, WORDS, LENGTH, LAYERS = 8, 13, 5, 6
KEY = jax.random.key(3)
IDS = np.zeros((2, LENGTH), np.int32)
ROWS = {"x": np.zeros((3, D), np.float32)}


def bits(tree: Any) -> list[bytes]:
    plain = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return [np.asarray(plain(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_bits(found: Any, expected: Any) -> None:
    named = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(expected)]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    unlike = [n for n, one, other in zip(named, bits(found), bits(expected), strict=True) if one != other]
    assert not unlike, f"{unlike} of {len(named)}"


# functions of a key, each with a loss of what it returns


class BornGPT(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(WORDS, D)
        x = embed(ids)
        for _ in range(3):
            h = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            x = x + h + nn.Dense(D, kernel_init=nn.initializers.orthogonal())(nn.gelu(nn.Dense(2 * D)(x)))
        return embed.attend(nn.LayerNorm()(x))


def linen() -> tuple[Any, Any, Any]:
    """Its initialization runs the model; the table is tied."""
    apply: Any = BornGPT().apply
    loss = lambda params, mb: jnp.mean(apply({"params": params}, mb["ids"]) ** 2)
    return lambda key: BornGPT().init(key, IDS)["params"], loss, {"ids": IDS}


class BornMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def of_nnx() -> tuple[Any, Any, Any]:
    graph, _ = nnx.split(BornMLP(nnx.Rngs(0)))
    loss = lambda params, mb: jnp.mean(nnx.merge(graph, params)(mb["x"]) ** 2)
    return lambda key: nnx.state(BornMLP(nnx.Rngs(key)), nnx.Param), loss, ROWS


def equinox() -> tuple[Any, Any, Any]:
    made = lambda key: eqx.nn.MLP(D, D, 2 * D, LAYERS, key=key)
    _, static = eqx.partition(made(KEY), eqx.is_inexact_array)
    loss = lambda params, mb: jnp.mean(jax.vmap(eqx.combine(params, static))(mb["x"]) ** 2)
    return lambda key: eqx.filter(made(key), eqx.is_inexact_array), loss, ROWS


def plain() -> tuple[Any, Any, Any]:
    """Weights are stacked; one leaf follows from another, and one is the same for every key."""

    def init(key):
        one, two = jax.random.split(key)
        layers = jax.vmap(lambda k: jax.random.truncated_normal(k, -2, 2, (D, D)) @ jnp.eye(D))
        drawn = layers(jax.random.split(one, LAYERS))
        last = jax.random.normal(two, (D, 3))
        return {"layers": drawn, "last": last / jnp.linalg.norm(last), "bias": jnp.full(3, 0.5), "one": 1.0}

    def loss(params, mb):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), mb["x"], params["layers"])
        return jnp.mean((x @ params["last"] + params["bias"]) ** 2) * params["one"]

    return init, loss, ROWS


MODELS = {"linen": linen, "nnx": of_nnx, "equinox": equinox, "plain": plain}


@functools.cache
def made(name: str) -> tuple[Any, Any, Any, Any]:
    """Return a model's function of a key, its loss and micro-batch, and the weights that one device makes."""
    init, loss, batch = MODELS[name]()
    return init, loss, batch, jax.jit(init)(KEY)


def cut(name: str, **options: Any) -> Pipeline:
    init, loss, batch, _ = made(name)
    return Pipeline.from_function(loss, jax.eval_shape(init, KEY), batch, gradient_accumulation=2, **options)


MESHES = {"1": {"ipus": 1}, "2": {"ipus": 2}, "4": {"ipus": 4}, "2x2": {"ipus": 2, "replicas": 2}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.fast("2-nnx", "4-equinox", "2x2-plain")
def test_weights_are_born_with_the_bits_of_one_device(name, mesh):
    init, *_, expected = made(name)
    pipeline = cut(name, **MESHES[mesh])
    params, placed = pipeline.init(init, KEY), pipeline.shard(expected)
    assert_bits(pipeline.unshard(params), expected)
    assert params.layout == placed.layout
    for one, other in zip(params.arrays, placed.arrays, strict=True):
        assert one.sharding == other.sharding
        assert one.dtype == other.dtype
        for own, its in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert own.device == its.device
            assert_bits(own.data, its.data)  # padding, too


def test_weights_are_born_in_parts_over_a_further_axis():
    init, *_, expected = made("plain")
    specs = {"layers": P(None, "tensor"), "last": P("tensor"), "bias": P(), "one": P()}
    pipeline = cut("plain", ipus=2, axes={"tensor": 2}, specs=specs)
    params, placed = pipeline.init(init, KEY), pipeline.shard(expected)
    assert_bits(pipeline.unshard(params), expected)
    for one, other in zip(params.arrays, placed.arrays, strict=True):
        assert one.sharding == other.sharding
        assert [bits(s.data) for s in one.addressable_shards] == [bits(s.data) for s in other.addressable_shards]


def by_hand(replicas: int = 1, ipus: int = 4) -> tuple[Pipeline, Any]:
    """Return stages of unlike shapes with a table that is split unevenly, and the function of their weights."""

    def init(key):
        keys = [jax.random.fold_in(key, n) for n in range(4)]
        first = {"w": jax.random.normal(keys[1], (D, 3 * D)), "v": jax.random.normal(keys[2], (3 * D, D))}
        table = 0.1 * jax.random.normal(keys[0], (WORDS, D))
        # neither the order of the keys nor their kind of mapping is the pipeline's
        return collections.OrderedDict(table=table, b=jax.random.normal(keys[3], (D, D)), a=first)

    ends: Any = {"params": "table", "ipu": ALL_IPUS}
    stages = [
        Stage(lambda t, _, mb: embedding(t, mb["ids"], size=WORDS), **ends),
        Stage(lambda w, x, mb: x + jnp.tanh(x @ w["w"]) @ w["v"], params="a", ipu=0),
        Stage(lambda w, x, mb: jnp.tanh(x @ w), params="b", ipu=ipus - 1),
        Stage(lambda t, x, mb: linear_cross_entropy(x, t, mb["ids"], size=WORDS, reduction="mean"), **ends),
    ]
    mesh = make_mesh(replicas, ipus)
    return Pipeline(stages, mesh=mesh, specs={"table": P("ipu")}, gradient_accumulation=2), init


OPTIMIZERS = {
    "adamw": optax.adamw(0.01),
    "schedule_free": optax.contrib.schedule_free_adamw(0.01),  # the state has a copy of the weights
    "adagrad": optax.adagrad(0.01, initial_accumulator_value=0.25),  # and numbers that are not 0
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.adafactor(0.01)),  # keys
    "injected": optax.inject_hyperparams(optax.lamb)(learning_rate=0.01),
    "several": optax.MultiSteps(optax.sgd(0.01, momentum=0.9), every_k_schedule=2).gradient_transformation(),
}
STEPS: dict[str, dict[str, Any]] = {
    "one replica": {},
    "zero": {"replicas": 2, "ipus": 2, "shard_optimizer": True},
    "halves": {"ipus": 2, "precision": "16.16", "half": "bfloat16"},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("given", STEPS)
@pytest.mark.fast("zero-schedule_free", "halves-noise")
def test_a_state_is_born_as_optax_makes_it(name, given):
    options = {**STEPS[given]}
    sizes = {size: options.pop(size) for size in ("replicas", "ipus") if size in options}
    pipeline, init = by_hand(**sizes)
    step = make_train_step(pipeline, OPTIMIZERS[name], TrainOptions(ema_decay=0.9, **options))
    state = step.init(init, KEY)
    whole = step.whole(state)
    params = {**jax.jit(init)(KEY)}
    if given == "halves":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert_bits(whole["params"], params)
    assert_bits(whole["optimizer"], jax.jit(OPTIMIZERS[name].init)(params))
    assert_bits(whole["ema"], jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))
    for other in (step.init(params), step.init(pipeline.shard(params)), step.init(state.params)):
        assert jax.tree.structure(state) == jax.tree.structure(other)
        for one, its in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
            assert (one.shape, one.dtype) == (its.shape, its.dtype)
            assert one.sharding.is_equivalent_to(its.sharding, one.ndim)
        assert bits(state) == bits(other)  # padding, too
    ids = {"ids": np.zeros((2, 2, LENGTH) if "replicas" in sizes else (2, LENGTH), np.int32)}
    step(state, ids)
    assert bits(other) != bits(step(other, ids)[0])  # `other` has memory of its own


def test_a_loss_function_of_replicas_is_initialized():
    init, loss, _, expected = made("plain")
    init_floats = lambda key: {name: jnp.asarray(leaf) for name, leaf in init(key).items()}
    step = make_train_step(
        replicate(loss, replication_factor=2), optax.adam(0.1), TrainOptions(shard_optimizer=True, ema_decay=0.5)
    )
    state = step.init(init_floats, KEY)
    whole = step.whole(state)
    expected = jax.tree.map(jnp.asarray, expected)
    assert_bits(whole["params"], expected)
    assert_bits(whole["optimizer"], optax.adam(0.1).init(expected))
    assert bits(state) == bits(step.init(expected))
    step(state, {"x": normal((2, 1, 3, D))})


def test_each_ipu_computes_its_own_leaves_only(monkeypatch):
    """Count the leaves that are drawn: 4 layers and a table that 2 IPUs hold; an optimizer's zeros are no program."""
    drawn: list[int] = []
    pieces = born._pieces

    def noted(eqns: Any, outvars: Any) -> Any:
        drawn.append(sum(eqn.primitive.name == "random_bits" for eqn in eqns))
        return pieces(eqns, outvars)

    def loss(params, mb):
        x = params["table"][mb["ids"]]
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.mean((x @ params["table"].T) ** 2)

    def init(key):
        table, *keys = jax.random.split(key, 5)
        return {"table": jax.random.normal(table, (WORDS, D)), "layers": [jax.random.normal(k, (D, D)) for k in keys]}

    monkeypatch.setattr(born, "_pieces", noted)
    shapes = jax.eval_shape(init, KEY)
    pipeline = Pipeline.from_function(loss, shapes, {"ids": IDS}, ipus=2)
    own = [sum("layers" in leaf.path for leaf in group.leaves) for group in pipeline.shard_shapes(shapes).layout.groups]
    step = make_train_step(pipeline, optax.adamw(0.1), TrainOptions(ema_decay=0.9))
    step.init(init, KEY)
    assert sorted(drawn) == sorted(1 + count for count in own if count)
    assert sum(drawn) == 2 + 4


def test_nnx_rngs_and_other_trees_are_arguments():
    pipeline = cut("nnx", ipus=2)
    init = lambda rngs, scale: jax.tree.map(lambda leaf: leaf * scale["by"], nnx.state(BornMLP(rngs), nnx.Param))
    expected = jax.jit(init)(nnx.Rngs(5), {"by": 2.0})
    assert_bits(pipeline.unshard(pipeline.init(init, nnx.Rngs(5), {"by": 2.0})), expected)


def test_work_on_the_host_is_said_and_right():
    pipeline, (init, *_, expected) = cut("plain", ipus=2), made("plain")
    table = normal((LAYERS, D, D))
    with pytest.warns(UserWarning, match=r"makes params\['layers'\] of NumPy arrays, 1,536 bytes, .* jax.random"):
        params = pipeline.init(lambda key: {**init(key), "layers": table}, KEY)
    assert_bits(pipeline.unshard(params), {**expected, "layers": table})

    def called(key):
        layers = jax.pure_callback(lambda: table, jax.ShapeDtypeStruct(table.shape, table.dtype))
        return {**init(key), "layers": layers}

    step = make_train_step(pipeline, optax.adam(0.1))
    for make in (pipeline.init, lambda *args: step.init(*args).params):
        with pytest.warns(UserWarning, match=r"by pure_callback \(test_born_weights.py:\d+\): one device"):
            assert_bits(pipeline.unshard(make(called, KEY)), {**expected, "layers": table})


def instead(**leaves: Any) -> Any:
    """Return the plain model's function with other leaves."""
    init = made("plain")[0]
    return lambda key: {**init(key), **leaves}


REFUSED = {
    "weights": (lambda: ({"layers": 1}, KEY), "{'layers': 1}", "not a function", "shard(params)"),
    "a text": (lambda: (made("plain")[0], "seed"), "argument 1 of init_fn", "'seed'", "leave it out"),
    "a function": (lambda: (instead(last=jnp.tanh), KEY), "params['last']", "is a function", "leave it"),
    "a key": (lambda: (instead(last=jax.random.split(KEY, (D, 3))), KEY), "params['last']", "key", "key_data"),
    "no leaf": (lambda: (lambda key: {"last": 1.0}, KEY), "not the tree", "no params['bias']", "like that"),
    "a shape": (lambda: (instead(last=np.zeros((3, 3))), KEY), "params['last']", "(3, 3)", "give that shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_functions_that_make_no_weights_are_refused(case):
    pipeline, (given, *holds) = cut("plain", ipus=2), REFUSED[case]
    args = given()
    step = make_train_step(pipeline, optax.sgd(0.1))
    for make in (pipeline.init, *([step.init] if case != "weights" else [])):
        with refused(*holds):
            make(*args)


def test_a_call_inside_jit_is_refused():
    pipeline, (init, *_) = cut("plain", ipus=2), made("plain")
    with refused("inside jax.jit", "call it outside"):
        jax.jit(lambda key: pipeline.init(init, key).arrays)(KEY)


def test_a_key_after_weights_is_refused():
    pipeline, (*_, expected) = cut("plain", ipus=2), made("plain")
    step = make_train_step(pipeline, optax.sgd(0.1))
    with refused("1 argument after the weights", "init(init_fn, key)", "key=..."):
        step.init(expected, KEY)


def across_born(replicas: int, ipus: int) -> dict[str, np.ndarray]:
    """Return the whole states that several processes make of one function, and of its placed weights."""
    pipeline, init = by_hand(replicas, ipus)
    options = TrainOptions(ema_decay=0.9, shard_optimizer=replicas > 1)
    step = make_train_step(pipeline, optax.contrib.schedule_free_adamw(0.01), options)
    first = step.init(init, KEY)
    again = step.init(first.params)
    leads = (replicas, 2, LENGTH) if replicas > 1 else (2, LENGTH)
    after, _ = step(first, {"ids": np.zeros(leads, np.int32)})
    states = {"again": step.whole(again), "after": step.whole(after)}
    del after, again
    found: dict[str, np.ndarray] = {}
    for name, whole in states.items():
        for path, leaf in jax.tree.leaves_with_path({k: v for k, v in whole.items() if k != "key"}):
            found[f"{name}{jax.tree_util.keystr(path)}"] = np.asarray(leaf)
    own = {shard.device.id for array in pipeline.init(init, KEY).arrays for shard in array.addressable_shards}
    return {**found, "own devices": np.array(len(own))}


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "replicas", "ipus"), [((1, 1), 1, 2), ((2, 2), 2, 2), ((1, 2, 1), 1, 4)])
def test_instances_make_what_their_ipus_hold(devices, replicas, ipus):
    each = run_instances(across_born, devices, replicas=replicas, ipus=ipus)
    alone = across_born(replicas, ipus)
    for found, count in itertools.zip_longest(each, devices):
        assert int(found["own devices"]) == count
        for name in alone.keys() - {"own devices"}:
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-5, atol=1e-7, err_msg=name)
            if name.startswith("again"):
                assert bits(found[name]) == bits(alone[name])

"""Test modules of Flax and Equinox as functions of their weights: modes, keys, statistics, sown values and places.

A block of any library is called as docs/tutorials/flax.md shows it. A step must return the function's own
result on one device, one micro-batch after the other.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import sharded_ops
from ipu_jax import Pipeline, everywhere, verify
from ipu_jax.nn import conv_general_dilated
from support.against_plain import bubbles_hold_nan  # noqa: F401 (a fixture)
from support.dense import largest_relative_error
from support.inputs import normal

from .example import cross_entropy, squared_error

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")

M, ROWS, D, WORDS, WEIGHT = 3, 4, 8, 5, 0.3  # WEIGHT: of sown values in the loss
DENSE = {"x": normal((M, ROWS, D)), "y": normal((M, ROWS, D), seed=1)}
IMAGES = {name: normal((M, ROWS, 2, 2, D), seed=seed) for seed, name in enumerate("xy")}  # smaller than a kernel
TOKENS = dict(zip("xy", np.random.default_rng(0).integers(WORDS, size=(2, M, ROWS)), strict=True))
KEY = jax.random.key(7)

# A block of each library has weights and state. A call of (params, state, x, key) returns y, the new state, and what
# the module sowed. Without a key the module is in evaluation, and y alone counts.


class LinenModule(nn.Module):
    convolves: bool = False

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        options: Any = {"use_bias": False, "conv_general_dilated": conv_general_dilated}
        layer = nn.Conv(D, (3, 3), padding=1, **options) if self.convolves else nn.Dense(D, use_bias=False)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.5)(layer(x))
        self.sow("losses", "fourth", jnp.mean(y**4))
        self.sow("intermediates", "y", y)
        return x + nn.Dropout(0.3, deterministic=not train)(nn.tanh(y))


class Linen:
    def __init__(self, seed: int, convolves: bool = False):
        self.module = LinenModule(convolves)
        x = jnp.ones((1, 2, 2, D) if convolves else (1, D))
        drawn = jax.jit(functools.partial(self.module.init, train=False))(jax.random.key(seed), x)
        self.params, self.state = drawn["params"], {"batch_stats": drawn["batch_stats"]}  # what is sown is no state

    def __call__(self, params: Any, state: Any, x: Any, key: Any) -> Any:
        variables, changes = {"params": params, **state}, ["batch_stats", "losses"]
        if key is None:
            return self.module.apply(variables, x, train=False), state, ()
        y, new = self.module.apply(variables, x, train=True, mutable=changes, rngs={"dropout": key})
        return y, {"batch_stats": new["batch_stats"]}, new["losses"]


class Sown(nnx.Variable):
    """A value that counts in the loss."""


class NnxModule(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.rngs = nnx.Linear(D, D, use_bias=False, rngs=rngs), rngs
        self.norm = nnx.BatchNorm(D, momentum=0.5, rngs=rngs)
        self.before, self.after = nnx.Dropout(0.2, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = self.norm(self.linear(self.before(x)))
        self.sow(Sown, "fourth", jnp.mean(y**4))
        if not self.after.deterministic:
            y = y + jax.random.normal(self.rngs.noise(), y.shape)
        return x + self.after(nnx.tanh(y))


class Nnx:
    """It has two dropouts, and random streams of two names."""

    def __init__(self, seed: int):
        module = nnx.jit(lambda: NnxModule(nnx.Rngs(params=seed, dropout=0, noise=0)))()
        module(jnp.ones((ROWS, D)))
        nnx.pop(module, Sown)  # values that an earlier call sowed would count, too
        self.graph, self.params, self.state, self.rest = nnx.split(module, nnx.Param, nnx.BatchStat, ...)

    def __call__(self, params: Any, state: Any, x: Any, key: Any) -> Any:
        module = nnx.merge(self.graph, params, state, self.rest, copy=True)
        if key is None:
            module.eval()
            return module(x), state, ()
        of_dropout, of_noise = jax.random.split(key)
        nnx.reseed(module, dropout=of_dropout, noise=of_noise)
        return module(x), nnx.state(module, nnx.BatchStat), nnx.state(module, Sown)


class EquinoxModule(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, mode: Any, key: Any):
        self.linear = eqx.nn.Linear(D, D, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(D, axis_name="batch", momentum=0.5, mode=mode)
        self.dropout = eqx.nn.Dropout(0.3)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        y, state = self.norm(self.linear(x), state)
        return x + self.dropout(jnp.tanh(y), key=key), state


class Equinox:
    """It is called for each row, with a key of the row's own."""

    def __init__(self, seed: int, mode: str = "batch"):
        module, self.state = eqx.nn.make_with_state(EquinoxModule)(mode, jax.random.key(seed))
        self.params, self.static = eqx.partition(module, eqx.is_inexact_array)

    def __call__(self, params: Any, state: Any, x: Any, key: Any) -> Any:
        module: Any = eqx.combine(params, self.static)
        module = eqx.nn.inference_mode(module) if key is None else module
        keys = None if key is None else jax.random.split(key, len(x))
        over_rows = jax.vmap(module, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        return *over_rows(x, state, keys), ()


# chains of these blocks, and other models


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, whose `run` takes and returns what a block does; `error` compares y with the batch's."""

    run: Callable[..., Any]
    params: Any
    state: Any
    batch: Any = dataclasses.field(default_factory=lambda: DENSE)
    error: Callable[..., Any] = squared_error

    def loss(self, params: Any, state: Any, micro_batch: Any, key: Any) -> Any:
        y, new_state, sown = self.run(params, state, micro_batch["x"], key)
        added = sum(map(jnp.sum, jax.tree.leaves(sown)), start=jnp.float32(0))
        return self.error(y, micro_batch["y"]) + WEIGHT * added, new_state

    def outputs(self, params: Any, state: Any, x: Any) -> Any:
        return self.run(params, state, x, None)[0]

    def micro_batch(self, m: int = 0) -> Any:
        return jax.tree.map(lambda leaf: leaf[m], self.batch)

    def cut(self, ipus: int, schedule: str = "1f1b") -> Pipeline:
        options: Any = {"schedule": schedule, "gradient_accumulation": M, "state": self.state}
        return Pipeline.from_function(self.loss, self.params, self.micro_batch(), ipus=ipus, **options)

    def plain(self) -> Any:
        """Return loss, gradients and new state by jax on one device."""
        run, state, found = jax.jit(jax.value_and_grad(self.loss, has_aux=True)), self.state, []
        for m in range(M):
            key = jax.random.fold_in(jax.random.fold_in(KEY, 0), m)
            (loss, state), gradients = run(self.params, state, self.micro_batch(m), key)
            found.append((loss, gradients))
        return *jax.tree.map(lambda *each: sum(each) / M, *found), state


def chain(*blocks: Any, batch: Any = None) -> Model:
    """Return blocks one after the other. The last one also reads what the first one returns."""

    def run(params: Any, state: Any, x: Any, key: Any) -> Any:
        results = []
        for k, block in enumerate(blocks):
            x = x + results[0][0] if k == len(blocks) - 1 else x
            results.append(block(params[k], state[k], x, None if key is None else jax.random.fold_in(key, k)))
            x = results[-1][0]
        return x, [new for _, new, _ in results], [sown for *_, sown in results]

    return Model(run, [block.params for block in blocks], [block.state for block in blocks], batch or DENSE)


class Tied(eqx.Module):
    shared: eqx.nn.Shared
    layers: list[eqx.nn.Linear]

    def __init__(self):
        first, last, *others = jax.random.split(jax.random.key(3), 5)
        ends = eqx.nn.Embedding(WORDS, D, key=first), eqx.nn.Linear(D, WORDS, use_bias=False, key=last)
        self.shared = eqx.nn.Shared(ends, lambda pair: pair[1].weight, lambda pair: pair[0].weight)
        self.layers = [eqx.nn.Linear(D, D, key=key) for key in others]

    def __call__(self, word: Any) -> Any:
        embedding, head = self.shared()
        return head(functools.reduce(lambda x, layer: x + jnp.tanh(layer(x)), self.layers, embedding(word)))


def tied() -> Model:
    """The embedding and the head are one array. Nothing is drawn with the key, and the state is a count."""
    params, static = eqx.partition(Tied(), eqx.is_inexact_array)
    run = lambda params, state, x, key: (jax.vmap(eqx.combine(params, static))(x), state + 1, ())
    return Model(run, params, np.int32(0), TOKENS, cross_entropy)


class Columns(nn.Module):
    """A layer of which an IPU has some columns."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        own = D // jax.lax.axis_size("ipu")
        return sharded_ops.from_all(nn.Dense(own, name="dense")(x), 1, D)


def on_all_ipus() -> Model:
    """A linen module in `everywhere`, between two blocks."""
    ends = Linen(0), Linen(1)
    columns = {"dense": {"kernel": 0.4 * normal((D, D), seed=2), "bias": jnp.ones(D)}}
    module = everywhere(
        lambda params, x: Columns().apply({"params": params}, x),
        in_specs=({"dense": {"kernel": P(None, "ipu"), "bias": P("ipu")}}, P()),
    )

    def run(params: Any, state: Any, x: Any, key: Any) -> Any:
        x, one, sown = ends[0](params[0], state[0], x, key)
        x, other, again = ends[1](params[1], state[1], x + module(params[2], x), key)
        return x, [one, other], [sown, again]

    return Model(run, [ends[0].params, ends[1].params, columns], [end.state for end in ends])


MODELS: dict[str, Callable[[], Model]] = {
    "linen": lambda: chain(*map(Linen, range(3))),
    "linen, convolutions": lambda: chain(*(Linen(seed, convolves=True) for seed in range(2)), batch=IMAGES),
    "nnx": lambda: chain(*map(Nnx, range(3))),
    "equinox": lambda: chain(*(Equinox(seed, mode) for seed, mode in enumerate(("batch", "ema", "batch")))),
    "three libraries": lambda: chain(Linen(0), Nnx(1), Equinox(2)),
    "equinox, tied": tied,
    "linen, on all IPUs": on_all_ipus,
}
made = functools.cache(lambda name: MODELS[name]())
plain = functools.cache(lambda name: made(name).plain())
SCHEDULES = {1: "sequential", 2: "1f1b", 4: "zb-h1"}


def placed(model: Model, pipeline: Pipeline) -> tuple[Any, ...]:
    """Return the arguments of a step."""
    return pipeline.shard(model.params), model.batch, pipeline.shard_state(model.state), KEY


@pytest.mark.parametrize("ipus", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_computes_what_the_function_computes(name, ipus):
    model, (expected_loss, *expected) = made(name), plain(name)
    pipeline = model.cut(ipus, SCHEDULES[ipus])
    loss, *found = pipeline.value_and_grad(*placed(model, pipeline))
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    for one, other in zip(map(pipeline.unshard, found), expected, strict=True):
        assert largest_relative_error(one, other) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_reads_the_state_and_draws_nothing(name):
    model = made(name)
    pipeline, x = model.cut(2), model.batch["x"]
    params, _, state, _ = placed(model, pipeline)
    found = pipeline.forward(model.outputs, x[0])(params, x, state)
    expected = jax.jit(jax.vmap(lambda x: model.outputs(model.params, model.state, x), axis_size=M))(x)
    assert largest_relative_error(found, expected) < 1e-5


@pytest.mark.slow
def test_modules_of_three_libraries_keep_every_bit():
    model = made("three libraries")
    pipeline = model.cut(2)
    verify(pipeline, *placed(model, pipeline), exact=True)


# where layers are


def test_linen_modules_are_layers_by_their_names():
    module = nn.Sequential([nn.Dense(D) for _ in range(9)])
    params = jax.eval_shape(module.init, KEY, jnp.ones((1, D)))["params"]
    called: Any = lambda params, x: module.apply({"params": params}, x)
    loss = lambda params, x: jnp.mean(called(params, x) ** 2)
    cut: Any = functools.partial(Pipeline.from_function, loss, params, DENSE["x"][0])
    names = [f"layers_{k}" for k in range(9)]
    for pipeline, found in (
        (cut(ipus=3, cuts=names, layers_per_ipu=[1, -1, 3]), [1, 5, 3]),
        (cut(ipus=2, cuts=["layers_6"]), [7, 2]),
    ):
        leaves = pipeline.shard_shapes(params).layout.leaves
        assert [sum(leaf.ipu == ipu for leaf in leaves) / 2 for ipu in range(pipeline.ipus)] == found


# keys, and modules on all IPUs


@pytest.mark.parametrize("streams", [{}, {"default": KEY}])
def test_a_dropout_that_draws_the_same_for_all_micro_batches_warns(streams):
    graph, _, rest = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0)), nnx.Param, ...)

    def loss(params: Any, micro_batch: Any, key: Any) -> Any:
        net: Any = nnx.merge(graph, {}, rest, copy=True)
        reseed: Any = nnx.reseed
        reseed(net, **dict.fromkeys(streams, key))
        return jnp.mean(net(micro_batch["x"] @ params["w"]) ** 2)

    with pytest.warns(UserWarning, match="from a key that is not an argument: all micro-batches"):
        Pipeline.from_function(loss, {"w": jnp.eye(D)}, made("nnx").micro_batch(), ipus=1)


def test_bits_of_a_fixed_key_that_only_make_another_key_are_no_draw():
    def loss(w: Any, x: Any, key: Any) -> Any:
        own = jax.random.fold_in(key, jax.random.bits(KEY))
        return jnp.mean((jax.random.bernoulli(own, shape=x.shape) * x @ w) ** 2)

    Pipeline.from_function(loss, jnp.eye(D), DENSE["x"][0], ipus=1)  # a warning would be an error


def test_plain_dicts_say_how_a_module_on_all_ipus_is_split():
    graph, params = nnx.split(nnx.Linear(D, D, rngs=nnx.Rngs(0)))
    call = everywhere(lambda params, x: nnx.merge(graph, params)(x), in_specs=({"kernel": P(), "bias": P()}, P()))
    x = DENSE["x"][0]
    np.testing.assert_allclose(call(params, x), nnx.merge(graph, params)(x), rtol=1e-6)


# what is frozen

NNX = nnx.split(nnx.Dict(base=nnx.Linear(D, D, rngs=nnx.Rngs(0)), more=nnx.List([nnx.Linear(D, D, rngs=nnx.Rngs(1))])))
EQUINOX = eqx.partition(eqx.nn.MLP(D, D, D, 1, key=KEY), eqx.is_inexact_array)


def of_nnx(params: Any, x: Any) -> Any:
    net: Any = nnx.merge(NNX[0], params)
    return jnp.mean(net.more[0](jnp.tanh(net.base(x))) ** 2)


def of_equinox(params: Any, x: Any) -> Any:
    return jnp.mean(jax.vmap(eqx.combine(params, EQUINOX[1]))(x) ** 2)


# the leaves are base/bias, base/kernel, more/0/bias, more/0/kernel; and of each layer weight, bias
@pytest.mark.parametrize(
    ("loss", "params", "frozen", "expected"),
    [
        (of_nnx, NNX[1], {"base": True, "more": [False]}, [1, 1, 0, 0]),
        (of_nnx, NNX[1], {"base": {"kernel": True, "bias": False}, "more": {0: True}}, [0, 1, 1, 1]),
        (of_equinox, EQUINOX[0], {"layers": [{"weight": True, "bias": False}, True]}, [1, 0, 1, 1]),
        (of_equinox, EQUINOX[0], {"layers": (False, True)}, [0, 0, 1, 1]),
    ],
)
def test_plain_dicts_say_what_is_frozen(loss, params, frozen, expected):
    pipeline = Pipeline.from_function(loss, params, DENSE["x"][0], ipus=2, gradient_accumulation=M, frozen=frozen)
    _, gradients = pipeline.value_and_grad(pipeline.shard(params), DENSE["x"])
    assert [not np.any(leaf) for leaf in jax.tree.leaves(pipeline.unshard(gradients))] == [*map(bool, expected)]

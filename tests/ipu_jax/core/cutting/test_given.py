"""Test what `from_function` takes: trees of any order, odd leaves, modules; and that the lines of refusals work."""

import collections
import gc
import re
import textwrap
import weakref
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ipu_jax import Checkpoints, Feed, Pipeline, TrainOptions, make_train_step, verify
from support.inputs import normal
from support.refusals import refusals, refused

M, ROWS, D = 3, 4, 6
PARAMS = {"a": 0.4 * normal((D, D)), "b": 0.4 * normal((D, D), seed=1)}
BATCH = {"x": np.asarray(normal((M, ROWS, D), seed=2)), "y": np.asarray(normal((M, ROWS, D), seed=3))}
ONE = jax.tree.map(lambda leaf: leaf[0], BATCH)


def loss(params, mb):
    return jnp.mean((jnp.tanh(mb["x"] @ params["a"]) @ params["b"] - mb["y"]) ** 2)


def cut(fn: Any = loss, params: Any = PARAMS, batch: Any = ONE, ipus=2, **options: Any):
    options = {"gradient_accumulation": M} | options
    return Pipeline.from_function(fn, params, batch, ipus=ipus, **options)


def plain(fn, params, batch=BATCH):
    """Return the mean loss and gradient of the micro-batches, by jax on one device."""
    one = jax.jit(jax.value_and_grad(fn))
    losses = [one(params, jax.tree.map(lambda leaf: leaf[m], batch)) for m in range(M)]  # noqa: B023
    return jax.tree.map(lambda *values: sum(values) / M, *losses)


def assert_close(found, expected, rtol=1e-5):
    assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(expected))
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=rtol * (np.abs(np.asarray(e)).max(initial=0) + 1e-8))


def assert_right(fn, params, batch=BATCH, one=ONE, **options):
    pipeline = cut(fn, params, one, **options)
    value, gradients = pipeline.value_and_grad(pipeline.shard(params), batch)
    assert_close((value, pipeline.unshard(gradients)), plain(fn, params, batch))
    return pipeline


# trees


def ordered(tree):
    return collections.OrderedDict((name, tree[name]) for name in sorted(tree, reverse=True))


PIPELINE = cut()
STEP = make_train_step(PIPELINE, optax.sgd(0.1))


def of_feed():
    examples = jax.tree.map(lambda leaf: leaf.reshape(-1, D), BATCH)
    with Feed(ordered(examples), step=STEP, micro_batch=ROWS, shuffle=False) as feed:
        return STEP(STEP.init(PARAMS), next(iter(feed)))[1].loss


TAKES_A_BATCH = {
    "value_and_grad": lambda batch: PIPELINE.value_and_grad(PIPELINE.shard(PARAMS), batch)[0],
    "loss": lambda batch: PIPELINE.loss(PIPELINE.shard(PARAMS), batch),
    "verify": lambda batch: verify(PIPELINE, PIPELINE.shard(PARAMS), batch).reference_loss,
    "step": lambda batch: STEP(STEP.init(PARAMS), batch)[1].loss,
    "step.loss": lambda batch: STEP.loss(STEP.init(PARAMS), batch),
    "find_nonfinite": lambda batch: (
        float(STEP.find_nonfinite(STEP.init(PARAMS), batch) is None) * plain(loss, PARAMS)[0]
    ),
    "feed": lambda batch: of_feed(),
    "cut for it": lambda batch: cut(batch=ordered(ONE)).value_and_grad(PIPELINE.shard(PARAMS), BATCH)[0],
}


@pytest.mark.fast("value_and_grad", "verify", "feed", "cut for it")
@pytest.mark.parametrize("call", TAKES_A_BATCH)
def test_a_batch_is_read_by_path_whatever_the_order_of_its_tree(call):
    np.testing.assert_allclose(TAKES_A_BATCH[call](ordered(BATCH)), plain(loss, PARAMS)[0], rtol=1e-6)


@pytest.mark.slow
def test_the_reference_gets_the_users_own_tree():
    """A function that reads the values of a dict in order reads others in an OrderedDict, which `verify` finds."""

    def by_order(params, mb):
        x, y = mb.values()
        return loss(params, {"x": x, "y": y})

    pipeline = cut(by_order)
    verify(pipeline, pipeline.shard(PARAMS), BATCH)
    with pytest.raises(AssertionError, match="the loss differs"):
        verify(pipeline, pipeline.shard(PARAMS), ordered(BATCH))


STATE = {"mean": np.zeros(D, np.float32), "count": np.zeros((), np.float32)}
STATEFUL = cut(lambda p, s, mb: (loss(p, mb), {"mean": s["mean"] + mb["x"][0], "count": s["count"] + 1}), state=STATE)
AVERAGED = make_train_step(PIPELINE, optax.adam(0.1), TrainOptions(ema_decay=0.5))
WHOLE = AVERAGED.whole(AVERAGED.init(PARAMS))
REPLICAS = make_train_step(loss, optax.adam(0.1), TrainOptions(ema_decay=0.5, gradient_accumulation=M))


def with_ordered(name):
    return {**WHOLE, name: ordered(WHOLE[name])}


@refusals(
    (lambda: PIPELINE.shard(ordered(PARAMS)), "params is not the tree", "OrderedDict", "give a tree like that one"),
    (lambda: STEP.init(ordered(PARAMS)), "params is not the tree", "OrderedDict"),
    (lambda: STATEFUL.shard_state(ordered(STATE)), "state is not the tree", "OrderedDict"),
    (lambda: STATEFUL.shard_state(STATEFUL.shard_state(STATE)), "state is placed already", "pipeline.unshard(state)"),
    (lambda: AVERAGED.restore(with_ordered("params")), "params is not the tree", "OrderedDict"),
    *(
        (lambda of=of: of.restore(with_ordered("ema")), "'ema' is not a tree", "the saved")
        for of in (AVERAGED, REPLICAS)
    ),
)
def test_weights_and_state_of_another_order_are_refused(call, holds):
    with refused(*holds):
        call()


def test_a_checkpoint_is_read_by_name(tmp_path):
    other = cut(lambda p, mb: loss({"a": p["a"], "b": p["b"]}, mb), ordered(PARAMS))
    with Checkpoints(tmp_path, STEP) as checkpoints:
        checkpoints.save(STEP.init(PARAMS), now=True)
    step = make_train_step(other, optax.sgd(0.1))
    with Checkpoints(tmp_path, step) as checkpoints:
        found = checkpoints.restore(step.init(jax.tree.map(jnp.zeros_like, ordered(PARAMS))))
    assert found is not None
    assert_close(dict(step.whole(found.state)["params"]), PARAMS, rtol=0)


# odd leaves


@pytest.mark.fast("32.32")
@pytest.mark.parametrize("precision", ["32.32", "16.32", "16.16"])
def test_python_floats_are_weights_as_under_jax_grad(precision):
    def scaled(params, mb):
        return params["gain"] * loss(params, mb)

    params = {**PARAMS, "gain": 0.7}
    if precision == "32.32":
        assert_right(scaled, params)
    step = make_train_step(cut(scaled, params), optax.sgd(0.1), TrainOptions(precision=precision))
    whole = step.whole(step(step.init(params), BATCH)[0])["params"]
    gradients = plain(scaled, params)[1]
    expected = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
    assert_close(
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), whole), expected, 1e-5 if "32." in precision else 0.02
    )


def test_a_python_float_is_of_a_weak_type_as_under_jax_grad():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (PARAMS, ONE))
    types = []

    def scaled(params, mb):
        types.append((params["gain"] * mb["x"]).dtype)
        return loss(params, mb) * params["gain"]

    pipeline = cut(scaled, {**half[0], "gain": 0.7}, half[1])
    pipeline.placement.of_batch(jax.tree.map(lambda leaf: jnp.stack([leaf[:2]] * M), half[1]))
    assert set(types) == {jnp.dtype(jnp.bfloat16)}
    assert len(types) > 1


def test_a_pipeline_keeps_no_array_of_what_was_cut():
    """On chips, the first IPU would hold a copy of all weights."""
    given = jax.tree.map(jnp.array, {"params": PARAMS, "one": ONE, "state": jnp.zeros(D), "cache": jnp.ones(D)})
    alive = [weakref.ref(leaf) for leaf in jax.tree.leaves(given)]
    pipeline = cut(lambda p, s, mb: (loss(p, mb), s + mb["x"][0]), given["params"], given["one"], state=given["state"])
    forward = pipeline.forward(lambda p, c, x: (x @ p["a"] + c, c + 1), given["one"]["x"], state=given["cache"])
    given.clear()
    gc.collect()
    assert not any(leaf() is not None for leaf in alive)
    params = pipeline.shard(PARAMS)
    for rows in (ROWS, ROWS + 1):
        outputs, _ = forward(params, np.ones((1, rows, D), np.float32), forward.shard_state(jnp.ones(D)))
        assert_close(outputs[0], np.ones((rows, D)) @ PARAMS["a"] + 1)


@pytest.mark.fast("scan-0", "rows-0")
@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("way", ["scan", "reverse", "rows"])
def test_a_scan_over_any_number_of_layers(layers, way):
    def with_extra(params, mb):
        rows = params["extra"] if way != "rows" else jnp.concatenate([params["extra"], params["a"][None]])[:layers]
        x, tops = lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), mb["x"], rows, reverse=way == "reverse")
        return loss(params, {"x": x, "y": mb["y"]}) + tops.sum()

    assert_right(with_extra, {**PARAMS, "extra": 0.3 * normal((layers, D, D), seed=5)})


@pytest.mark.slow
def test_leaves_without_elements_and_leaves_that_nothing_reads():
    def adapted(params, state, mb):
        value = loss(params, mb) + jnp.mean(mb["x"] @ params["down"] @ params["up"])
        return value, {**state, "count": state["count"] + 1}

    extra = {"down": np.zeros((D, 0), np.float32), "up": np.zeros((0, D), np.float32), "unread": np.ones(0, np.float32)}
    params, batch = {**PARAMS, **extra}, {**BATCH, "unread": np.ones((M, 2), np.int32), "none": None}
    state = {"count": np.zeros((), np.int32), "kept": np.arange(3.0, dtype=np.float32), "empty": np.ones(0, np.float32)}
    one = jax.tree.map(lambda leaf: leaf[0], batch)
    pipeline = cut(adapted, params, one, state=state)
    value, gradients, new = pipeline.value_and_grad(pipeline.shard(params), batch, pipeline.shard_state(state))
    expected = plain(lambda p, mb: adapted(p, state, mb)[0], params, batch)
    assert_close((value, pipeline.unshard(gradients)), expected)
    assert_close(pipeline.unshard(new), {**state, "count": np.int32(M)})


@pytest.mark.slow
def test_a_key_that_the_function_does_not_use_may_be_given():
    def without_dropout(params, mb, key):
        dropped = jax.random.bernoulli(jax.random.split(key)[0], 0.0, mb["x"].shape)
        return loss(params, mb) + 0.0 * jnp.zeros(()) if dropped.ndim else dropped

    pipeline, key = cut(without_dropout), jax.random.key(0)
    params = pipeline.shard(PARAMS)
    assert pipeline.value_and_grad(params, BATCH, key=key)[0] == pipeline.value_and_grad(params, BATCH)[0]
    verify(pipeline, params, BATCH, key=key)
    step = make_train_step(pipeline, optax.sgd(0.1))
    state, _ = step(step.init(PARAMS, key=key), BATCH)
    np.testing.assert_allclose(step.loss(state, BATCH, key=key), step.loss(state, BATCH))


@pytest.mark.slow
def test_an_aux_without_leaves_is_an_aux():
    pipeline = cut(lambda p, mb: (loss(p, mb), {"metrics": {}}))
    (value, aux), _ = pipeline.value_and_grad(pipeline.shard(PARAMS), BATCH)
    assert aux == {"metrics": {}}
    np.testing.assert_allclose(value, plain(loss, PARAMS)[0], rtol=1e-6)
    step = make_train_step(pipeline, optax.sgd(0.1))
    assert step(step.init(PARAMS), BATCH)[1].aux == {"metrics": {}}
    verify(pipeline, pipeline.shard(PARAMS), BATCH)


# derivatives of the user's own


@jax.custom_vjp
def scaled_by(x, scale):
    return x * scale


scaled_by.defvjp(lambda x, scale: (x * scale, (x, scale)), lambda kept, g: (g * kept[1], kept[1] + 1.0))


def in_a_scan(fn):
    return lambda x, scale: lax.scan(lambda x, _: (fn(x, scale), None), x, None, length=2)[0]


SCALED = {**PARAMS, "scale": jnp.ones(())}


@pytest.mark.fast("<lambda>", "in_a_scan")
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint, in_a_scan])
def test_a_gradient_that_ignores_its_cotangent_is_refused(wrap):
    def with_state(params, mb):
        return loss(params, {"x": wrap(scaled_by)(mb["x"] @ params["a"], params["scale"]), "y": mb["y"]})

    with refused("scaled_by", "test_given.py:", "input 2", "does not depend on the cotangent", "state="):
        cut(with_state, SCALED)
    frozen = {"a": False, "b": False, "scale": True}
    gradients = plain(with_state, SCALED)[1] | {"scale": jnp.zeros(())}
    pipeline = cut(with_state, SCALED, frozen=frozen)
    assert_close(pipeline.unshard(pipeline.value_and_grad(pipeline.shard(SCALED), BATCH)[1]), gradients)


def test_a_gradient_that_is_stopped_may_ignore_its_cotangent():
    def stopped(params, mb):
        x = scaled_by(mb["x"] @ params["a"], lax.stop_gradient(params["scale"]))
        return loss(params, {"x": x, "y": mb["y"]})

    assert len(cut(stopped, SCALED).stages) == 2


# modules


class Net(nnx.Module):
    def __init__(self, rngs, *, norm=True, dropout=True):
        self.first, self.second = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs) if norm else None
        self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)] if dropout else [])

    def __call__(self, x):
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        for dropout in self.dropouts:
            x = dropout(x)
        return self.second(jnp.tanh(x))


def loss_fn(model, micro_batch):
    return jnp.mean((model(micro_batch["x"]) - micro_batch["y"]) ** 2)


def with_outputs(model, micro_batch):
    y = model(micro_batch["x"])
    return jnp.mean((y - micro_batch["y"]) ** 2), {"y": y}


def followed(error, model, fn, **names):
    """Run the lines that an error prints, as printed, and return the call that they end in."""
    lines = textwrap.dedent(str(error).partition("\n\n")[2])
    call = re.search(r"# and Pipeline\.from_function\((.*), \.\.\.\)", lines)
    assert call is not None, lines
    space = {"model": model, fn.__name__: fn, "jax": jax, "micro_batch": ONE, "Pipeline": Pipeline, "M": M, **names}
    exec(lines, space)
    space["pipeline"] = eval(f"Pipeline.from_function({call[1]}, ipus=2, gradient_accumulation=M)", space)
    return space


def one_by_one(fn, model):
    """Return the losses of the micro-batches, one after the other, as the model's own library computes them."""
    found = [fn(model, {name: leaf[m] for name, leaf in BATCH.items()}) for m in range(M)]
    return np.array([value[0] if isinstance(value, tuple) else value for value in found])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "dropout", "fn"),
    [
        (True, False, with_outputs),
        pytest.param(True, True, loss_fn, marks=pytest.mark.slow),
        pytest.param(False, True, loss_fn, marks=pytest.mark.slow),
    ],
)
def test_an_nnx_module_that_changes_is_refused_with_lines_that_work(fn, norm, dropout):
    model = Net(nnx.Rngs(0, dropout=1), norm=norm, dropout=dropout)
    with pytest.raises(ValueError, match=r"params\..* changes in place") as caught:
        cut(fn, model)
    space = followed(caught.value, model, fn)
    pipeline, keys = space["pipeline"], [jax.random.key(n) if dropout else None for n in (3, 4)]
    params, state = pipeline.shard(space["params"]), pipeline.shard_state(space["state"]) if norm else None
    if dropout:
        verify(pipeline, params, BATCH, state, keys[0])
    values = [jax.tree.leaves(pipeline.value_and_grad(params, BATCH, state, key)[0])[0] for key in keys]
    assert (values[0] == values[1]) == (not dropout)
    if not dropout:
        step = make_train_step(pipeline, optax.sgd(0.0))
        trained, _ = step(step.init(space["params"], stages=space["state"]), BATCH)
        np.testing.assert_allclose(values[0], one_by_one(fn, model).mean(), rtol=1e-5)
        assert_close(jax.tree.leaves(step.whole(trained)["stages"]), jax.tree.leaves(nnx.state(model, nnx.BatchStat)))


def test_an_nnx_module_of_weights_alone_is_cut():
    model = Net(nnx.Rngs(0), norm=False, dropout=False)
    pipeline = cut(loss_fn, model)
    value, gradients = pipeline.value_and_grad(pipeline.shard(model), BATCH)
    expected, of_plain = plain(lambda m, mb: loss_fn(m, mb), model)
    assert_close((value, pipeline.unshard(gradients)), (expected, of_plain))


def test_statistics_that_a_function_only_reads_are_refused_with_lines_that_freeze_them():
    model = Net(nnx.Rngs(0), dropout=False)
    model.eval()
    with refused("params.norm.mean", "nnx.BatchStat", "leaves as it is", "frozen=frozen") as error:
        cut(loss_fn, model)
    pipeline = followed(error.value, model, loss_fn)["pipeline"]
    verify(pipeline, pipeline.shard(model), BATCH)


class Counted:
    """A module of a user's own that counts its calls in place."""

    def __init__(self, w, calls):
        self.w, self.calls = w, calls


jax.tree_util.register_pytree_with_keys(
    Counted,
    lambda c: ([(jax.tree_util.GetAttrKey(name), getattr(c, name)) for name in ("w", "calls")], None),
    lambda _, children: Counted(*children),
)


def test_what_any_module_changes_in_place_is_refused_and_a_dict_may_change():
    def counting(model, mb):
        model.calls = model.calls + 1.0
        return jnp.mean((mb["x"] @ model.w) ** 2)

    counted, net = Counted(PARAMS["a"], jnp.zeros(())), Net(nnx.Rngs(0), norm=False, dropout=False)
    with refused("params.calls", "in place", "state="):
        cut(counting, counted)

    def shrinking(model, mb):
        model.first.kernel[...] = model.first.kernel[...] / 2
        return loss_fn(model, mb)

    with refused("params.first.kernel", "in place", "state="):
        cut(shrinking, net)

    def in_dicts(params, mb):
        params["a"], mb["x"] = 2 * params["a"], mb["x"] / 2
        return loss(params, mb)

    assert_right(in_dicts, PARAMS)


@pytest.mark.slow
def test_an_equinox_module_is_refused_with_lines_that_work():
    model = eqx.nn.MLP(D, D, 8, 3, key=jax.random.key(0))

    def mlp_loss(net, mb):
        return jnp.mean((jax.vmap(net)(mb["x"]) - mb["y"]) ** 2)

    with pytest.raises(ValueError, match=r"params\.activation is .*Equinox") as caught:
        cut(mlp_loss, model)
    space = followed(caught.value, model, mlp_loss)
    pipeline = space["pipeline"]
    value, gradients = pipeline.value_and_grad(pipeline.shard(space["params"]), BATCH)
    one = eqx.filter_jit(eqx.filter_value_and_grad(mlp_loss))
    ones = [one(model, {k: v[m] for k, v in BATCH.items()}) for m in range(M)]
    expected = jax.tree.map(lambda *v: sum(v) / M, *ones)
    assert_close((value, pipeline.unshard(gradients)), expected)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(D)(x))
        return nn.Dense(D)(jnp.tanh(x))


@pytest.mark.slow
def test_flax_variables_with_statistics_are_refused_with_lines_that_work():
    net = Linen()
    variables = net.init(jax.random.key(0), ONE["x"])

    def loss(variables, mb):
        y, changed = net.apply(variables, mb["x"], mutable=["batch_stats"])
        return jnp.mean((y - mb["y"]) ** 2), changed

    with pytest.raises(ValueError, match=r"params\['batch_stats'\] is a collection") as caught:
        cut(loss, variables)
    space = followed(caught.value, net, loss, variables=variables)
    pipeline = space["pipeline"]
    params, state = pipeline.shard(variables["params"]), pipeline.shard_state(space["state"])
    value, _, new = pipeline.value_and_grad(params, BATCH, state)
    now = dict(variables)

    def and_changes(_, mb):
        value, changed = loss(now, mb)
        now.update(changed)
        return value

    np.testing.assert_allclose(value, one_by_one(and_changes, net).mean(), rtol=1e-5)
    assert_close(pipeline.unshard(new), {"batch_stats": now["batch_stats"]})


@pytest.mark.slow
def test_haikus_order_of_arguments_is_refused_with_a_lambda_that_works():
    def apply(params, rng, *args):
        if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
            raise ValueError("Apply must be called with an RNG as the second argument")
        (mb,) = args
        return loss(params, {**mb, "x": mb["x"] * jax.random.bernoulli(rng, 0.9, mb["x"].shape)})

    with pytest.raises(ValueError, match="'rng' as argument 2") as caught:
        cut(apply)
    written = str(caught.value).partition(": give ")[2]
    pipeline = cut(eval(written, {"apply": apply}))
    verify(pipeline, pipeline.shard(PARAMS), BATCH, key=jax.random.key(0))


@pytest.mark.slow
def test_float8_layers_are_refused_unless_their_scales_are_frozen():
    net = nn.Dense(D, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    variables = net.init(jax.random.key(0), ONE["x"])

    def of_net(variables, mb):
        return jnp.mean((net.apply(variables, mb["x"]) - mb["y"]) ** 2)

    replaced = fp8_ops.OVERWRITE_WITH_GRADIENT
    with refused(f"params['{replaced}']", "its gradient is its new value", "Freeze it"):
        cut(of_net, variables, ipus=1)
    with refused(f"params['{replaced}']", "its gradient is its new value"):
        make_train_step(of_net, optax.sgd(0.1)).init(variables)
    frozen = {"params": False, replaced: True}
    pipeline = cut(of_net, variables, ipus=1, frozen=frozen, reduction="sum")  # a cotangent of 1, in float8
    _, gradients = pipeline.value_and_grad(pipeline.shard(variables), BATCH)
    expected = jax.tree.map(lambda leaf: M * leaf, plain(of_net, variables)[1]["params"])
    assert_close(pipeline.unshard(gradients)["params"], expected)


# refusals


def xy(params, x, y):
    return loss(params, {"x": x, "y": y})


OTHER = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("other",)), PartitionSpec("other"))
ELSEWHERE = jax.device_put(np.ones((D, D), np.float32), OTHER)
COMPLEX = PARAMS["a"] + 1j


@refusals(
    (lambda: cut(xy), "'y'", "a batch is one argument", "lambda params, micro_batch: xy(params, micro_batch[0]"),
    (lambda: Pipeline.from_function(xy, PARAMS, ONE["x"], ONE["y"], ipus=2), "2 arguments", "params, (x, y), ipus=2"),
    (lambda: cut(lambda p, mb, *, key: loss(p, mb)), "key by name only", "lambda params, micro_batch, key:", "key=key"),
    (
        lambda: cut(lambda p, key, mb: loss(p, mb)),
        "'key' as argument 2",
        "lambda params, micro_batch, key: loss(params, key",
    ),
    (lambda: cut(max), "max", "does not say what it takes", "lambda params, micro_batch"),
    (lambda: cut(PARAMS, loss), "loss={'a'", "loss and params are swapped"),
    (lambda: cut(loss, ONE, PARAMS), "params and micro_batch are swapped", "from_function(loss, params, micro_batch"),
    (lambda: cut(lambda p, mb: lax.pmean(loss(p, mb), "batch")), "axis 'batch' (test_given.py:", "leave pmean"),
    (lambda: cut(lambda p, mb: loss(p, mb) + jnp.sum(ELSEWHERE @ p["a"])), "float32[6, 6]", "'other': 2", "np.asarray"),
    (lambda: cut(frozen=lambda tree: tree), "frozen=<function", "frozen=fn(params)"),
    (lambda: cut(frozen={"a": "no", "b": True}), "frozen['a'] is 'no'", "True or False"),
    (lambda: cut(params={**PARAMS, "c": COMPLEX}), "params['c'] is complex64", "two real leaves", "jax.lax.complex"),
    (lambda: cut(params={**PARAMS, "k": jax.random.key(0)}), "params['k'] is key<fry>", "let the function take a key"),
    (lambda: cut(params={**PARAMS, "n": 3}), "params['n'] is int32", "freeze it"),
    (lambda: cut(params={**PARAMS, "n": "w.npy"}), "params['n'] is 'w.npy'", "a text"),
    (lambda: cut(params={**PARAMS, "f": jnp.tanh}), "params['f'] is a function", "leave it out"),
    (lambda: cut(batch={**ONE, "id": "abc"}), "micro_batch['id'] is 'abc'", "a text"),
    (lambda: cut(batch={**ONE, "id": np.array(["a"])}), "micro_batch['id'] has dtype <U1", "convert it"),
)
def test_what_is_given_in_another_form_is_refused_with_the_form(call, holds):
    with refused(*holds):
        call()


def test_errors_of_the_function_itself_stay_its_own():
    def wrong(params, mb):
        return loss(params, {"x": mb["images"], "y": mb["y"]})

    with pytest.raises(KeyError, match="images"):
        cut(wrong)


@pytest.mark.slow
def test_a_function_of_args_and_a_function_with_defaults_are_called_with_params_and_micro_batch():
    assert_right(lambda *args: loss(*args), PARAMS)
    assert_right(lambda params, mb, scale=2.0: scale * loss(params, mb), PARAMS)


def test_stages_have_the_names_of_modules_never_of_einsums():
    def named(params, mb):
        with jax.named_scope("encoder"):
            x = jnp.einsum("bd,de->be", mb["x"], params["a"])
        with jax.named_scope("decoder"):
            y = jnp.einsum("bd,de->be", jnp.tanh(x), params["b"])
        return jnp.mean((jnp.einsum("be,ef->bf", y, params["b"]) - mb["y"]) ** 2)

    assert [stage.name for stage in cut(named).stages] == ["encoder to decoder", "stage 1"]

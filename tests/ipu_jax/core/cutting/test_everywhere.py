"""Test that functions with parts on all IPUs compute what dense twins do, and that leaves lie split where they can."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import Pipeline, TrainOptions, everywhere, make_mesh, make_schedule, make_train_step, verify
from sharded_ops import argmax, tied_projection
from support.dense import largest_relative_error
from support.refusals import refusals, refused

from .everywhere_models import EXAMPLES, D, T, V, blocks, dense_cross_entropy, head, look_up, weights

M = 4
tied = EXAMPLES["tied"]()
X8 = weights(2, T, D, seed=7)


def one_of(example):
    return example.micro_batch(np.random.default_rng(0))


def batch_of(example, seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(example.micro_batch(random) for _ in range(M)))


def pipeline_of(example, loss=None, **options: Any) -> Pipeline:
    options = {"ipus": 2, "gradient_accumulation": M, **options}
    return Pipeline.from_function(loss or example.loss, example.params, one_of(example), **options)


def dense_loss(example, batch):
    ones = [jax.tree.map(lambda x, m=m: x[m], batch) for m in range(M)]
    return lambda params: sum(example.dense(params, one) for one in ones) / M


def cut_of(pipe):
    assert pipe.function is not None
    return pipe.function.cut


def paths_of_split(pipe):
    return sorted(leaf.path for leaf in pipe.function.weights.leaves if leaf.split is not None)


CASES = [
    ("tied", 1, "grouped"),
    ("tied", 2, "zbv"),
    ("tied", 3, "1f1b"),
    ("tied", 4, "zb-h1"),
    ("head_alone", 2, "1f1b"),
    ("head_alone", 4, "grouped"),
    ("mlps_in_the_middle", 2, "zb-h1"),
    ("mlps_in_the_middle", 3, "grouped"),
    ("mlps_in_the_middle", 2, "zbv"),
    ("two_heads", 2, "1f1b"),
    ("stacked_tables", 2, "looped"),
    ("read_whole_as_well", 2, "1f1b"),
]


@pytest.mark.fast("tied-2-zbv", "mlps_in_the_middle-3-grouped")
@pytest.mark.parametrize(("name", "ipus", "schedule"), CASES, ids=["-".join(map(str, case)) for case in CASES])
def test_loss_and_gradients_equal_the_dense_twin(name, ipus, schedule):
    example = EXAMPLES[name]()
    pipe, batch = pipeline_of(example, ipus=ipus, schedule=schedule), batch_of(example)
    params = pipe.shard(example.params)
    value, gradients = pipe.value_and_grad(params, batch)
    expected, expected_gradients = jax.jit(jax.value_and_grad(dense_loss(example, batch)))(example.params)
    assert abs((value[0] if isinstance(value, tuple) else value) - expected) < 2e-6 * expected
    assert largest_relative_error(pipe.unshard(gradients), expected_gradients) < 2e-6
    verify(pipe, params, batch)


@pytest.mark.parametrize("name", EXAMPLES)
def test_leaves_that_all_readers_split_lie_split(name):
    example = EXAMPLES[name]()
    pipe = pipeline_of(example, ipus=3)
    leaves = [("params" + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(example.params)]
    split = sorted(path for path, _ in leaves if any(name in path for name in example.split))
    assert sorted({*paths_of_split(pipe)}) == split
    assert ("split over the IPUs: params" in str(pipe)) == bool(split)
    sharded = pipe.shard(example.params)
    assert largest_relative_error(pipe.unshard(sharded), example.params) == 0
    shards = [shard for leaf in jax.tree.leaves(sharded) for shard in leaf.addressable_shards]
    held = [sum(x.data.nbytes for x in shards if x.device == device) for device in pipe.mesh.devices.flat]
    of_split = sum(leaf.nbytes for path, leaf in leaves if path in split)
    if split:  # a third of it, with padding
        assert max(held) < sum(leaf.nbytes for _, leaf in leaves) - 0.5 * of_split


def test_a_leaf_that_cannot_lie_split_is_named_with_what_needs_it_whole():
    line = (
        "all IPUs hold params['table'] (672 B) whole, though everywhere splits it: dot_general (everywhere_models.py:"
    )
    assert line in str(pipeline_of(EXAMPLES["read_whole_as_well"]()))
    returned = lambda params, mb: (tied.loss(params, mb), {"table": params["table"]})
    assert "the function returns it" in str(pipeline_of(tied, returned))
    otherwise = everywhere(lambda table: jax.lax.psum(jnp.sum(table**2), "ipu"), in_specs=P(None, "ipu"))
    both = pipeline_of(tied, lambda params, mb: tied.loss(params, mb) + otherwise(params["table"]))
    assert "everywhere (test_everywhere.py:" in str(both)
    assert not paths_of_split(both)


def test_stages_are_as_written_by_hand_would_be():
    pipe = pipeline_of(tied, ipus=2)
    assert [stage.place for stage in pipe.stages] == [None, 0, 1, None]
    work = cut_of(pipe).work
    assert work[0] < 0.01 * sum(work)
    assert [stage.place for stage in pipeline_of(EXAMPLES["mlps_in_the_middle"]()).stages].count(None) == 4
    alone = lambda params, mb: head(params["table"], look_up(params["table"], mb["tokens"]), mb["targets"])
    assert [stage.place for stage in pipeline_of(tied, alone).stages] == [None]


@pytest.mark.parametrize("seed", range(2))
def test_half_precision_is_as_exact_as_elsewhere(seed):
    """bfloat16 weights and float32 sums: as far from the dense twin in float32 as half precision is."""
    example = tied._replace(params=jax.tree.map(lambda w: w.astype(jnp.bfloat16), tied.params))
    pipe, batch = pipeline_of(example, ipus=3, schedule="1f1b"), batch_of(example, seed)
    value, gradients = pipe.value_and_grad(pipe.shard(example.params), batch)
    wide = jax.tree.map(lambda w: w.astype(jnp.float32), example.params)
    expected, expected_gradients = jax.value_and_grad(dense_loss(tied, batch))(wide)
    assert float(value) == pytest.approx(float(expected), rel=1e-2)
    assert largest_relative_error(pipe.unshard(gradients), expected_gradients) < 0.1


UPDATES = {
    "replicas, ZeRO and clipping": {"replicas": 2, "shard_optimizer": True, "clip": 0.5},
    "every second update, of replicas": {"replicas": 2, "shard_optimizer": True, "clip": 0.5, "every": 2},
    "half precision": {"precision": "16.32", "rtol": 2e-2},
    "frozen table": {"frozen": True},
    "padding": {"example": "mlps_in_the_middle"},
}


@pytest.mark.fast("padding")
@pytest.mark.parametrize("how", UPDATES)
def test_updates_equal_optax_on_the_dense_twin(how):
    """Three updates, so that what is wrong in the first one shows in the others."""
    options = dict(UPDATES[how])
    example, clip = EXAMPLES[options.pop("example", "tied")](), options.pop("clip", None)
    every = options.pop("every", 1)
    replicas, rtol = options.pop("replicas", 1), options.pop("rtol", 2e-5)
    frozen = {**dict.fromkeys(example.params, False), "table": True} if options.pop("frozen", False) else None
    transformation: Any = optax.chain(*[optax.clip_by_global_norm(clip)] * (clip is not None), optax.adam(1e-2))
    transformation = transformation if every == 1 else optax.MultiSteps(transformation, every)
    pipe = pipeline_of(example, ipus=3 if replicas == 1 else 2, replicas=replicas, schedule="1f1b", frozen=frozen)
    step = make_train_step(pipe, transformation, TrainOptions(gradient_accumulation=M, **options))
    state, batches = step.init(example.params), [batch_of(example, seed) for seed in range(replicas)]
    batch = batches[0] if replicas == 1 else jax.tree.map(lambda *leaves: np.stack(leaves), *batches)

    def mean(params):
        whole = {**params, "table": jax.lax.stop_gradient(params["table"])} if frozen else params
        return sum(dense_loss(example, batch)(whole) for batch in batches) / replicas

    expected, moments = example.params, transformation.init(example.params)
    for _ in range(3):
        state, outputs = step(state, batch)
        value, gradients = jax.jit(jax.value_and_grad(mean))(expected)
        assert outputs.loss == pytest.approx(float(value), rel=rtol)
        updates, moments = transformation.update(gradients, moments, expected)
        expected = optax.apply_updates(expected, updates)


def test_padding_stays_zeros_where_a_user_updates_the_shards():
    """The loss reads rows of padding as sigmoid(0), so they would get a gradient, and the second loss would show it."""
    example = EXAMPLES["mlps_in_the_middle"]()
    pipe, batch = pipeline_of(example, ipus=3), batch_of(example)
    params, expected, losses = pipe.shard(example.params), example.params, []
    for _ in range(2):
        value, gradients = pipe.value_and_grad(params, batch)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        dense, of_dense = jax.value_and_grad(dense_loss(example, batch))(expected)
        expected = jax.tree.map(lambda w, g: w - 0.1 * g, expected, of_dense)
        losses.append((float(value), float(dense)))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=2e-6)


def test_other_functions_read_the_split_leaves():
    """Logits, gathered; and the most likely tokens, for which no logits are sent."""

    def logits(params, tokens):
        x = blocks(params, look_up(params["table"], tokens) + params["positions"])
        of_shard = lambda table, x: jax.lax.all_gather(tied_projection(x, table, size=V), "ipu", axis=2, tiled=True)
        return everywhere(of_shard, in_specs=(P("ipu"), P()))(params["table"], x)[..., :V]

    def likely(params, tokens):
        x = blocks(params, look_up(params["table"], tokens) + params["positions"])
        of_shard = lambda table, x: argmax(tied_projection(x, table, size=V), size=V)
        return everywhere(of_shard, in_specs=(P("ipu"), P()))(params["table"], x)

    pipe, tokens = pipeline_of(tied, ipus=3, schedule="1f1b"), jnp.asarray(batch_of(tied)["tokens"])
    params = pipe.shard(tied.params)
    whole = jax.tree.map(jnp.asarray, tied.params)
    dense = jax.vmap(lambda ids: blocks(whole, whole["table"][ids] + whole["positions"]) @ whole["table"].T)(tokens)
    found = pipe.forward(logits, tokens[0])
    assert largest_relative_error(found(params, tokens), dense) < 2e-6
    verify(found, params, tokens)
    np.testing.assert_array_equal(pipe.forward(likely, tokens[0])(params, tokens), dense.argmax(-1))
    with refused("params['table'] lies split over the IPUs", "whole by gather (test_everywhere.py:", "everywhere"):
        pipe.forward(lambda params, ids: blocks(params, params["table"][ids] + params["positions"]), tokens[0])
    local = pipeline_of(tied, tied.dense)
    with refused("everywhere (everywhere_models.py:", "needs a concurrent stage", "leave it out"):
        local.forward(likely, tokens[0])


def test_a_state_that_all_ipus_replace():
    """The largest logit so far, which each micro-batch's loss reads."""
    of_shard = lambda table, x: jax.lax.pmax(jnp.max(jax.lax.stop_gradient(x @ table.T)), "ipu")
    largest = everywhere(of_shard, in_specs=(P("ipu"), P()))

    def loss(params, state, mb, largest=largest):
        x = blocks(params, look_up(params["table"], mb["tokens"]))
        seen = jnp.maximum(state["seen"], largest(params["table"], x))
        return head(params["table"], x, mb["targets"]) + 0.1 * seen * jnp.mean(x**2), {"seen": seen}

    state, batch = {"seen": np.zeros((), "f")}, batch_of(tied)
    pipe = pipeline_of(tied, loss, schedule="1f1b", state=state)
    value, gradients, new = pipe.value_and_grad(pipe.shard(tied.params), batch, pipe.shard_state(state))

    def whole(params):
        total, seen = 0.0, jnp.zeros(())
        for m in range(M):
            one = jax.tree.map(lambda x, m=m: x[m], batch)
            of_one = loss(
                params, {"seen": seen}, one, largest=lambda table, x: jax.lax.stop_gradient((x @ table.T).max())
            )
            total, seen = total + of_one[0] / M, of_one[1]["seen"]
        return total, seen

    (expected, seen), expected_gradients = jax.jit(jax.value_and_grad(whole, has_aux=True))(tied.params)
    np.testing.assert_allclose((value, pipe.unshard(new)["seen"]), (expected, seen), rtol=2e-6)
    assert largest_relative_error(pipe.unshard(gradients), expected_gradients) < 2e-6


def test_on_one_device_it_is_the_function():
    mb = one_of(tied)
    ones, twins = ([f(tied.params, mb) for f in (jax.jit(fn), fn)] for fn in (tied.loss, tied.dense))
    np.testing.assert_allclose(ones, twins, rtol=1e-6)
    mbs = jax.tree.map(lambda *leaves: np.stack(leaves), mb, one_of(tied))
    gradient = lambda loss: jax.jit(jax.grad(lambda params: jax.vmap(loss, (None, 0))(params, mbs).sum()))(tied.params)
    assert largest_relative_error(gradient(tied.loss), gradient(tied.dense)) < 2e-6
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    over = jax.sharding.NamedSharding(mesh, P("data"))
    mb, params = jax.device_put(mb, over), jax.device_put(tied.params, jax.sharding.NamedSharding(mesh, P()))
    np.testing.assert_allclose(jax.jit(tied.loss)(params, mb), twins[0], rtol=1e-6)


AROUND = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda loss: lambda p, mb: jax.lax.cond(True, loss, lambda *_: 0.0, p, mb),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["tied", "head_alone", "mlps_in_the_middle"])
def test_on_one_device_it_has_a_derivative_in_any_other_function(name, around):
    """There jax traces derivatives of `custom_vjp` and `custom_jvp` after the function, where no axis is in scope."""
    example = EXAMPLES[name]()
    mb, loss = one_of(example), AROUND[around](lambda *args: jax.tree.leaves(example.loss(*args))[0])
    assert largest_relative_error(*(jax.grad(fn)(example.params, mb) for fn in (loss, example.dense))) < 2e-6


def test_on_one_device_it_can_close_over_what_has_a_derivative():
    mb = one_of(tied)
    closed = lambda params: everywhere(lambda: head(params["table"], blocks(params, X8), mb["targets"]), in_specs=())()
    dense = lambda params: dense_cross_entropy(blocks(params, X8) @ params["table"].T, mb["targets"])
    assert largest_relative_error(*(jax.grad(fn)(tied.params) for fn in (jax.jit(closed), dense))) < 2e-6


def test_python_numbers_stay_weak():
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), tied.params)
    scaled = everywhere(lambda x, by: x * by, in_specs=P())

    def loss(params, mb):
        x = scaled(params["table"][mb["tokens"]], 2.0)
        assert x.dtype == jnp.bfloat16
        return dense_cross_entropy(blocks(params, x) @ params["table"].T, mb["targets"])

    pipeline_of(tied._replace(params=half), loss)
    loss(half, one_of(tied))


def test_a_jitted_function_is_traced_for_each_number_of_ipus():
    """jax keeps the traces of a jitted function: none may be taken for another number of IPUs, or for one device."""
    loss = jax.jit(tied.loss)
    for ipus in (2, 3, 2):
        pipe = pipeline_of(tied, loss, ipus=ipus)
        verify(pipe, pipe.shard(tied.params), batch_of(tied))
        assert loss(tied.params, one_of(tied)) == pytest.approx(float(tied.dense(tied.params, one_of(tied))), rel=1e-6)


def test_a_mesh_of_more_ipus():
    """Two of three IPUs have local stages, and all three hold the table."""
    pipe = pipeline_of(tied, ipus=2).replace(mesh=make_mesh(1, 3), schedule="1f1b")
    params = pipe.shard(tied.params)
    verify(pipe, params, batch_of(tied))
    assert any(shard.data.shape[-2] == 7 for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)


def test_it_works_beside_further_axes():
    specs = {**jax.tree.map(lambda _: P(), tied.params), "table": P(None, "tensor")}
    pipe = pipeline_of(tied, axes={"tensor": 2}, specs=specs, schedule="1f1b")
    params = pipe.shard(tied.params)
    shards = [shard.data for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    assert any(shard.shape[-2:] == (11, D // 2) for shard in shards)
    verify(pipe, params, batch_of(tied))
    with refused("specs split dim 0 of params['table'] over 'tensor'", "everywhere splits it", "another dim"):
        pipeline_of(tied, axes={"tensor": 3}, specs={**specs, "table": P("tensor")})


def test_work_that_is_traced_gives_the_same_stages():
    counted, traced = (cut_of(pipeline_of(tied, costs=costs)) for costs in ("counted", "traced"))
    assert counted.ipus == traced.ipus == (None, 0, 1, None)


def test_a_schedule_for_the_places_that_are_found():
    schedule = make_schedule("1f1b", ipus=2, placement=(None, 0, 1, None), gradient_accumulation=M)
    assert pipeline_of(tied, schedule=schedule).schedule is schedule
    wrong = make_schedule("1f1b", ipus=2, placement=(0, 1, None), gradient_accumulation=M)
    with refused("(0, 1, None)", "on (None, 0, 1, None)", "a schedule for this placement"):
        pipeline_of(tied, schedule=wrong)


PARAMS = {"w": [weights(4, 4, seed=k) for k in range(4)], "up": weights(4, 6, seed=9)}
X = weights(3, 4, seed=8)
NOT_A_FUNCTION: Any = 3
of_columns = lambda x, up: jax.lax.psum(jnp.tanh(x @ up).sum(-1, keepdims=True), "ipu")
mlp = everywhere(of_columns, in_specs=(P(), P(None, "ipu")))


def printed(x):
    jax.debug.print("{}", x[0, 0], ordered=True)
    return x


def cut(loss):
    return Pipeline.from_function(lambda p, x: loss(p, x).mean(), PARAMS, X, ipus=2)


def layered(layer):
    def loss(p, x):
        for w in p["w"]:
            x = layer(p, jnp.tanh(x @ w))
        return x

    return functools.partial(cut, loss)


@refusals(
    (lambda: everywhere(NOT_A_FUNCTION, in_specs=P()), "fn=3", "callable", "a function of one IPU's shards"),
    (lambda: everywhere(len, in_specs=P("tensor")), "P('tensor'", "'ipu' at most once"),
    (lambda: everywhere(len, in_specs=(P(), 1)), "in_specs holds 1", "give a PartitionSpec"),
    (lambda: everywhere(len, in_specs=P("ipu", "ipu")), "at most once", "P('ipu', 'ipu'"),
    (lambda: everywhere(len, in_specs=P(), out_specs=P("ipu")), "out_specs holds P('ipu'", "whole", "all_gather"),
    (layered(lambda p, x: mlp(x)), "do not fit 1 arguments", "for each argument"),
    (layered(lambda p, x: mlp(x, up=p["up"])), "everywhere (test_everywhere.py:", "given up by name", "in its place"),
    (layered(lambda p, x: mlp(x, "up")), "everywhere (test_everywhere.py:", "'up'", "not an array", "close over it"),
    (
        layered(
            lambda p, x: x + everywhere(lambda keys: 0.0, in_specs=P("ipu"))(jax.random.split(jax.random.key(0), 3))
        ),
        "splits 3 random keys over 2 IPUs",
        "no padding",
        "a multiple of 2",
    ),
    (
        layered(lambda p, x: x + everywhere(printed, in_specs=P())(x)),
        "an ordered effect, everywhere (test_everywhere.py:",
        "ordered=False",
    ),
    (layered(lambda p, x: mlp(x, p["up"][0])), "P(None, 'ipu') for an array of shape (6,)", "at most 1 dims"),
    (
        layered(lambda p, x: x + jax.lax.scan(lambda c, _: (c + mlp(c, p["up"]), None), x, None, length=2)[0]),
        "everywhere (test_everywhere.py:",
        "inside of a scan (test_everywhere.py:",
        "in a Python loop over the layers",
    ),
    (
        layered(lambda p, x: x + jax.lax.cond(x.sum() > 0, lambda: mlp(x, p["up"]), lambda: x[:, :1])),
        "inside of a cond",
        "call it outside",
    ),
    (
        layered(lambda p, x: x + jax.grad(lambda x: mlp(x, p["up"]).sum())(x)),
        "everywhere (test_everywhere.py:",
        "inside of jax.grad or another derivative",
        "of dense functions",
    ),
    (
        layered(lambda p, x: x + jax.vmap(lambda x: mlp(x, p["up"]))(x)),
        "everywhere (test_everywhere.py:",
        "inside of jax.vmap",
        "inside of the function that everywhere runs",
    ),
    (
        layered(lambda p, x: x + everywhere(lambda up: up[:, :1].sum(), in_specs=P(None, "ipu"))(p["up"])),
        "everywhere (test_everywhere.py:",
        "may differ between IPUs",
        "psum",
        "all_gather",
    ),
    (
        layered(
            lambda p, x: (
                x
                + everywhere(
                    lambda up: jax.lax.cond(up.sum() > 0, lambda: jax.lax.psum(up.sum(), "ipu"), lambda: 0.0),
                    in_specs=P(None, "ipu"),
                )(p["up"])
            )
        ),
        "psum",
        "in a cond that only some IPUs may run",
        "move it out",
    ),
)
def test_refused(call, holds):
    with refused(*holds):
        call()

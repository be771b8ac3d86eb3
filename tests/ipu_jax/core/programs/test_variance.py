"""Test which values of traced programs may differ between IPUs, and the errors for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh
from ipu_jax.core.programs.variance import differing
from sharded_ops import argmax, log_softmax_cross_entropy, matmul, top_k
from support.refusals import refusals, refused

M, ROWS, D, V = 2, 3, 4, 7


def of_two(fn):
    """Return, for each output of `fn(shard, alike)`, whether it may differ between IPUs."""
    shape = jax.ShapeDtypeStruct((4,), "float32")
    found = []

    def body(x):
        jaxpr = jax.make_jaxpr(fn)(shape, shape).jaxpr
        found.extend(differing(jaxpr, [True, False], "ipu", refuse))
        return x

    everywhere = PartitionSpec()
    mapped = jax.shard_map(body, mesh=make_mesh(1, 2), in_specs=everywhere, out_specs=everywhere, check_vma=False)
    jax.eval_shape(mapped, shape)
    return found


def refuse(eqn, inside):
    raise ValueError(f"{eqn.primitive.name} in {inside}")


def carried(shard, alike):
    """The shard reaches the last of three carries in the third iteration."""

    def step(carry, _):
        a, b, c, d = carry
        return (a + shard, b + a, c + b, d * 2), None

    zero = jnp.zeros(4)
    return lax.scan(step, (zero, zero, zero, alike), None, length=5)[0][2:]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda s, a: (s, a, s + a, a * 2, jnp.ones(3)), [True, False, True, False, False]),
        (lambda s, a: (lax.psum(s, "ipu"), lax.pmax(s, "ipu"), lax.all_gather(s, "ipu")), [False] * 3),
        (lambda s, a: (lax.pmean(s, ("replica", "ipu")), lax.psum(s, "replica")), [False, True]),
        (lambda s, a: (lax.axis_index("ipu"), lax.axis_index("replica"), lax.axis_size("ipu")), [True, False, False]),
        (lambda s, a: (lax.ppermute(a, "ipu", [(0, 1), (1, 0)]), lax.psum_scatter(a, "ipu", tiled=True)), [True, True]),
        (lambda s, a: lax.all_gather(a, "ipu", axis_index_groups=[[0], [1]]), [True]),
        (lambda s, a: jax.jit(lambda s, a: (a, s))(s, a), [False, True]),
        (lambda s, a: jax.checkpoint(lambda s, a: (jnp.sin(a), jnp.sin(s)))(s, a), [False, True]),
        (lambda s, a: (jax.nn.relu(a), jax.nn.relu(s)), [False, True]),
        (lambda s, a: lax.cond(a.sum() > 0, lambda: (s, a), lambda: (a, a)), [True, False]),
        (lambda s, a: lax.cond(s.sum() > 0, lambda: (s, a), lambda: (a, a * 2)), [True, True]),
        (carried, [True, False]),
        (lambda s, a: lax.scan(lambda c, x: (c, x + 1), a, s), [False, True]),
        (lambda s, a: lax.fori_loop(0, 3, lambda i, c: (c[0] + a, c[1] + c[0], c[2]), (a, s, a)), [False, True, False]),
        (lambda s, a: lax.while_loop(lambda c: c[0].sum() < 3, lambda c: (c[0] + s, c[1] + 1), (a, a)), [True, True]),
        (lambda s, a: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + lax.psum(s, "ipu"), a), [False]),
    ],
    ids=[
        "plain", "sums", "means", "numbers", "exchanges", "groups", "jit", "checkpoint", "custom_jvp", "cond",
        "cond of a shard", "scan carry", "scan rows", "fori_loop", "while of a shard", "while of a sum",
    ],
)  # fmt: skip
def test_what_may_differ(fn, expected):
    assert of_two(fn) == expected


def coming_to_differ(s, a):
    return lax.scan(lambda c, _: (c + s, lax.cond(c[0] > 0, lambda: lax.psum(a, "ipu"), lambda: a)), a, None, length=3)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda s, a: lax.cond(s[0] > 0, lambda: lax.psum(a, "ipu"), lambda: a), "psum in cond"),
        (lambda s, a: lax.while_loop(lambda c: c[0] < s[0], lambda c: lax.pmax(c, "ipu"), a), "pmax in while"),
        (lambda s, a: lax.while_loop(lambda c: lax.psum(c, "ipu")[0] < s[0], lambda c: c + 1, a), "psum in while"),
        (coming_to_differ, "psum in cond"),
    ],
    ids=["cond", "while", "while predicate", "a carry that comes to differ"],
)
def test_a_collective_that_some_ipus_do_not_come_to_is_refused(fn, message):
    with refused(message):
        of_two(fn)


# in pipelines


BODY = np.random.default_rng(0).normal(size=(D, D)).astype("float32")
HEAD = np.random.default_rng(1).normal(size=(D, V)).astype("float32")
BATCH = {
    "x": np.random.default_rng(2).normal(size=(M, ROWS, D)).astype("float32"),
    "y": np.random.default_rng(3).integers(0, V, (M, ROWS)).astype("int32"),
}


COLUMNS = {"head": PartitionSpec(None, "ipu")}


def pipeline_of(head, *, ipus=2, **options):
    stages = [
        Stage(lambda w, x, mb: jnp.tanh(mb["x"] @ w), params="body", ipu=0),
        Stage(head, params="head", ipu=ALL_IPUS, name="the head", **options),
    ]
    made = Pipeline(
        stages, mesh=make_mesh(1, ipus), gradient_accumulation=M, specs=COLUMNS,
        state_specs={"seen": PartitionSpec("ipu")} if "state" in options else None,
    )  # fmt: skip
    return made, made.shard({"body": BODY, "head": HEAD})


def loss_of(logits, mb):
    return jnp.mean(log_softmax_cross_entropy(logits, mb["y"], size=V))


@pytest.mark.slow
@pytest.mark.parametrize("ipus", [1, 2, 4])
def test_an_aux_that_all_ipus_hold_alike_is_that_of_the_whole_logits(ipus):
    def head(w, x, mb):
        logits = matmul(x, w)
        whole = lax.all_gather(logits, "ipu", axis=1, tiled=True)[:, :V]
        return loss_of(logits, mb), {"best": argmax(logits, size=V), "top": top_k(logits, 2, size=V)[0], "whole": whole}

    pipeline, params = pipeline_of(head, ipus=ipus)
    (_, aux), _ = pipeline.value_and_grad(params, BATCH)
    logits = np.tanh(BATCH["x"] @ BODY) @ HEAD
    np.testing.assert_allclose(aux["whole"], logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(aux["best"], logits.argmax(-1))
    np.testing.assert_allclose(aux["top"], np.sort(logits)[..., :-3:-1], rtol=1e-5, atol=1e-5)


def counting(w, x, mb, *, state):
    logits = matmul(x, w)
    return Outputs(loss_of(logits, mb), state=state + logits.sum())


def called(pipeline, params, batch=BATCH, state=None):
    """Return a call of a method of a pipeline, with its state, if it has any."""
    held = () if state is None else (pipeline.shard_state({"seen": state}),)
    return lambda method: getattr(pipeline, method)(pipeline.shard(params), batch, *held)


def headed(head, **options):
    return called(pipeline_of(head, **options)[0], {"body": BODY, "head": HEAD}, state=ZEROS if options else None)


def with_whole_state():
    pipeline = pipeline_of(counting, state="seen")[0]
    whole = Pipeline(pipeline.stages, mesh=pipeline.mesh, gradient_accumulation=M, specs=COLUMNS)
    # evaluation returns no state
    return lambda _: called(whole, {"body": BODY, "head": HEAD}, state=ZEROS)("value_and_grad")


def with_a_split_y():
    head = Stage(lambda w, x, mb: matmul(mb["x"], w), params="head", ipu=ALL_IPUS, name="the head")
    stages = [head, Stage(lambda w, x, mb: x.mean(), ipu=0)]
    return called(Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=M, specs=COLUMNS), {"head": HEAD})


def waiting_in_scan(w, x, mb):
    """Branch on a value of the shard, inside a scan."""

    def step(c, _):
        return lax.cond(w.sum() > 0, lambda: lax.psum(c, "ipu"), lambda: c), None

    return lax.scan(step, x.mean(), None, length=2)[0]


def waiting_for_state(w, x, mb, *, state):
    loss = lax.cond(state[0] > 0, lambda: lax.psum(x.mean(), "ipu"), lambda: x.mean())
    return Outputs(loss, state=state)


def waiting_for_replicas(ipu, replicas=2):
    """Return a call whose replicas have other data, so that one would wait for ever."""

    def mean(w, x, mb):
        return lax.cond(x.sum() > 0, lambda: lax.pmean(x.mean(), "replica"), lambda: x.mean())

    stages = [
        Stage(lambda w, x, mb: jnp.tanh(mb["x"] @ w), params="body", ipu=0),
        Stage(mean, ipu=ipu, name="the head"),
    ]
    batch = {"x": BATCH["x"] if replicas == 1 else np.stack([BATCH["x"], -BATCH["x"]])}
    return called(Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=M), {"body": BODY}, batch)


ZEROS = np.zeros(2, "float32")
ALIKE = "may differ between IPUs, where all must hold the same", "jax.lax.all_gather", "jax.lax.psum"
INSIDE = "inside a cond whose predicate may differ between ", "communicate outside of it"


@pytest.mark.parametrize("method", ["value_and_grad", "loss"])
@refusals(
    (headed(lambda w, x, mb: (loss_of(matmul(x, w), mb), matmul(x, w))), "'the head' returns an aux", *ALIKE),
    (headed(lambda w, x, mb: (loss_of(matmul(x, w), mb), lax.axis_index("ipu"))), "'the head' returns an aux", *ALIKE),
    (headed(lambda w, x, mb: matmul(x, w).mean()), "'the head' returns a loss", *ALIKE),
    (with_whole_state(), "'the head' returns state that is not split", *ALIKE),
    (with_a_split_y(), "'the head' returns a y or a skip", *ALIKE),
    (headed(waiting_in_scan), "'the head' uses psum over axis 'ipu'", "same on all IPUs", *INSIDE),
    (headed(waiting_for_state, state="seen"), "'the head' uses psum over axis 'ipu'", "same on all IPUs", *INSIDE),
    (waiting_for_replicas(1), "'the head' uses psum over axis 'replica'", "same on all replicas", *INSIDE),
    (waiting_for_replicas(ALL_IPUS), "'the head' uses psum over axis 'replica'", "on all replicas", *INSIDE),
)
def test_what_ipus_or_replicas_have_another_of_is_refused(call, holds, method):
    with refused(*holds):
        call(method)


@pytest.mark.parametrize("ipu", [1, ALL_IPUS])
def test_one_replica_alone_may_branch_on_its_data(ipu):
    waiting_for_replicas(ipu, replicas=1)("loss")


OF_A_REPLICA = {
    "x": lambda x, mb, state, key: x.sum(),
    "the micro-batch": lambda x, mb, state, key: mb["x"].sum(),
    "its key": lambda x, mb, state, key: jax.random.normal(key),
    "its state": lambda x, mb, state, key: state.sum(),
}


@pytest.mark.parametrize("call", ["value_and_grad", "loss"])
@pytest.mark.parametrize("decides", OF_A_REPLICA.values(), ids=OF_A_REPLICA)
def test_whatever_is_a_replicas_own_may_decide_no_collective_over_replicas(decides, call):
    """After the weights comes the micro-batch if there is no stage before it, else x."""
    is_first = decides is not OF_A_REPLICA["x"]

    def mean(w, x, mb, *, state, key):
        value = mb["x"].mean() * w.sum()
        one = lax.cond(decides(x, mb, state, key) > 0, lambda: lax.pmean(value, "replica"), lambda: value)
        return Outputs(one, state=state)

    body = Stage(lambda w, x, mb: jnp.tanh(mb["x"]), ipu=0)
    last = Stage(mean, params="w", state="seen", random=True, ipu=1, name="the head")
    pipeline = Pipeline([last] if is_first else [body, last], mesh=make_mesh(2, 2), gradient_accumulation=M)
    batch = {"x": np.stack([BATCH["x"], -BATCH["x"]])}
    state = pipeline.shard_state({"seen": np.zeros(2, "float32")})
    params, key = pipeline.shard({"w": np.ones(3, "float32")}), jax.random.key(0)
    with refused("'the head' uses psum over axis 'replica'", "inside a cond whose predicate may differ"):
        jax.eval_shape(getattr(pipeline, call), params, batch, state, key)


def test_a_collective_over_replicas_in_a_branch_decided_by_weights_or_by_a_sum_is_taken_by_all():
    def mean(w, x, mb):
        one = lax.cond(w.sum() > 0, lambda: lax.pmean(x.mean(), "replica"), lambda: x.mean())
        return lax.cond(lax.psum(x.sum(), "replica") > 0, lambda: lax.pmean(one, "replica"), lambda: -one)

    stages = [Stage(lambda w, x, mb: mb["x"] @ w, params="body", ipu=0), Stage(mean, params="w", ipu=1)]
    batch = {"x": np.stack([BATCH["x"], 1 - BATCH["x"]])}
    pipeline = Pipeline(stages, mesh=make_mesh(2, 2), gradient_accumulation=M)
    loss = pipeline.loss(pipeline.shard({"body": BODY, "w": np.ones(2, "float32")}), batch)
    sums = (batch["x"] @ BODY).mean((0, 2, 3))
    np.testing.assert_allclose(loss, np.abs(sums).mean(), rtol=1e-4)


# evaluation needs no derivative


def greedy(w, x, mb):
    """Run a loop whose length depends on the data, and a host callback: neither has a derivative."""
    steps = lax.while_loop(lambda c: c[1].sum() < 40, lambda c: (c[0] + 1, c[1] * 2 + 1), (0, jnp.abs(x)))[0]
    seen = jax.pure_callback(lambda a: np.asarray(a.mean(), "float32"), jax.ShapeDtypeStruct((), "float32"), x)
    return (x @ w).mean() + seen, {"steps": steps}


@pytest.mark.slow
@pytest.mark.parametrize("ipus", [1, 2])
def test_evaluation_takes_what_has_no_derivative(ipus):
    def body(w, x, mb):
        def grow(c):
            return c[0] * 1.5, c[1] + 1

        h, turns = lax.while_loop(lambda c: jnp.abs(c[0]).max() < 3, grow, (jnp.tanh(mb["x"] @ w), 0))
        return h, turns

    stages = [
        Stage(
            lambda w, x, mb: jnp.tanh(mb["x"] @ w), params="body", ipu=0, evaluate=lambda w, x, mb: body(w, x, mb)[0]
        ),
        Stage(lambda w, x, mb: (x @ w).mean(), params="head", ipu=ipus - 1, evaluate=greedy, name="last"),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, ipus), gradient_accumulation=M)
    params = {"body": BODY, "head": HEAD}
    sharded = pipeline.shard(params)
    loss, aux = pipeline.loss(sharded, BATCH)
    expected = [greedy(HEAD, body(BODY, None, {"x": x})[0], None) for x in BATCH["x"]]
    np.testing.assert_allclose(loss, np.mean([one for one, _ in expected]), rtol=1e-5)
    np.testing.assert_array_equal(aux["steps"], [a["steps"] for _, a in expected])
    pipeline.value_and_grad(sharded, BATCH)

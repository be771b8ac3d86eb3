"""Test the unsharded program against independent models in plain jax, and `verify` on pipelines with a fault.

`verify` shares code with the pipelines that it checks (keys, skips, state, how a loss is read), so neither is compared
with the other here. The expected results come from a Python loop over replicas and micro-batches, or from one product.
"""

import contextlib
import dataclasses
import functools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh, verify
from ipu_jax.core.engine import scan as engine
from ipu_jax.core.proof import verification
from ipu_jax.io import FeedBatch
from ipu_jax.pipelines import VerificationError, reference_value_and_grad
from support.dense import largest_relative_error
from support.layers import normal
from support.refusals import refusals, refused

ROWS, D, M = 3, 4, 3


def batch_of(replicas: int, m: int = M) -> Any:
    lead = (m,) if replicas == 1 else (replicas, m)
    return {"x": normal(*lead, ROWS, D, seed=1), "y": normal(*lead, ROWS, D, seed=2)}


# a model with everything that a stage may ask for and give


def first(p, x, mb, *, state, key):
    keep = jax.random.bernoulli(key, 0.5, mb["x"].shape)
    h = jnp.tanh(mb["x"] @ p["w"] + p["fixed"]) * keep
    seen = {"mean": 0.9 * state["mean"] + 0.1 * h.mean(0), "count": state["count"] + 1}
    return Outputs(h, state=seen, skips={"h": h}, aux={"mean": h.mean(), "on": keep.sum()})


def middle(p, x, mb):
    return jnp.sin(lax.all_gather(x @ p, "ipu", axis=1, tiled=True))


def last(p, x, mb, *, key, skips):
    noise = jax.random.normal(key, x.shape)
    loss = jnp.mean((x @ p + skips["h"] + 0.1 * noise - mb["y"]) ** 2)
    return loss, {"rows": x.sum(1), "masked": jnp.where(x[:, 0] > 0, x[:, 0], -jnp.inf)}


class Everything:
    """Return a model with state, keys, a skip, aux, a frozen leaf and a concurrent stage, over one or two replicas."""

    def __init__(self, replicas: int = 1, **options: Any):
        stages = [
            Stage(first, params="a", state="seen", random=True),
            Stage(middle, params="b", ipu=ALL_IPUS),
            Stage(last, params="c", ipu=1, random=True, takes=("h",)),
        ]
        self.pipeline = Pipeline(
            stages,
            mesh=make_mesh(replicas, 2),
            specs={"b": P(None, "ipu")},
            frozen={"a": {"w": False, "fixed": True}},
            gradient_accumulation=M,
            **options,
        )
        self.params = {"a": {"w": normal(D, D, seed=3), "fixed": normal(D, seed=4)}} | {
            name: normal(D, D, seed=seed) for name, seed in (("b", 5), ("c", 6))
        }
        self.state = {"seen": {"mean": normal(D, seed=7), "count": np.int32(3)}}
        self.batch, self.key, self.replicas = batch_of(replicas), jax.random.key(8), replicas

    def expected(self, reduction: str = "mean") -> Any:
        """Return `((loss, aux), gradients, state)`, computed by a loop."""

        def loss_of(learning, x, y, seen, keys):
            keep = jax.random.uniform(keys[0], x.shape) < 0.5
            h = jnp.where(keep, jnp.tanh(x @ learning[0] + self.params["a"]["fixed"]), 0)
            z = jnp.sin(h @ learning[1])
            loss = jnp.square(z @ learning[2] + h + 0.1 * jax.random.normal(keys[2], x.shape) - y).mean()
            seen = {"mean": seen["mean"] * 0.9 + h.sum(0) / ROWS * 0.1, "count": seen["count"] + 1}
            aux = {"a": {"mean": h.mean(), "on": keep.sum()}}
            return loss, (seen, aux | {"c": {"rows": z.sum(1), "masked": jnp.where(z[:, 0] > 0, z[:, 0], -np.inf)}})

        learning = [self.params["a"]["w"], self.params["b"], self.params["c"]]
        xs, ys = (self.batch[name].reshape(self.replicas, M, ROWS, D) for name in "xy")
        step = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
        losses, gradients, states, auxes = [], [], [], []
        for r in range(self.replicas):
            seen = self.state["seen"]
            for m in range(M):
                of_micro_batch = jax.random.fold_in(jax.random.fold_in(self.key, r), m)
                keys = [jax.random.fold_in(of_micro_batch, stage) for stage in range(3)]
                (loss, (seen, aux)), gradient = step(learning, xs[r, m], ys[r, m], seen, keys)
                losses.append(loss)
                gradients.append(gradient)
                auxes.append(aux)
            states.append(seen)
        count = 1 if reduction == "sum" else len(losses)
        a, b, c = jax.tree.map(lambda *g: sum(g) / count, *gradients)
        lead = (M,) if self.replicas == 1 else (self.replicas, M)
        aux = jax.tree.map(lambda *leaf: jnp.stack(leaf).reshape(*lead, *leaf[0].shape), *auxes)
        mean = sum(seen["mean"] for seen in states) / len(states)
        of_a = {"w": a, "fixed": np.zeros(D, np.float32)}
        return (
            (sum(losses) / len(losses), aux),
            {"a": of_a, "b": b, "c": c},
            {"seen": {"mean": mean, "count": np.int32(3 + M)}},
        )


def assert_everything_equals(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, f), e in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        f, e = np.asarray(f), np.asarray(e)
        assert (f.shape, f.dtype) == (e.shape, e.dtype), path
        np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-5 * np.abs(e[np.isfinite(e)]).max(), err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_unsharded_program_is_a_loop_over_replicas_and_micro_batches(reduction):
    """Test two replicas under "mean", and one under "sum", which gets numpy's float64 and holds it as float32."""
    model = Everything(2 if reduction == "mean" else 1, reduction=reduction)
    given = (model.params, model.batch, model.state)
    if reduction == "sum":
        given = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, given)
    found = reference_value_and_grad(model.pipeline, *given, model.key)
    assert_everything_equals(found, model.expected(reduction))
    assert {leaf.devices().pop() for leaf in jax.tree.leaves(found)} == {model.pipeline.mesh.devices.flat[0]}


@pytest.fixture(scope="module")
def right() -> Any:
    """Return a model, and the results of its pipeline and of the unsharded program."""
    model = Everything(replicas=2)
    pipeline = model.pipeline
    sharded = pipeline.shard(model.params), model.batch, pipeline.shard_state(model.state), model.key
    expected = reference_value_and_grad(pipeline, model.params, model.batch, model.state, model.key)
    return model, sharded, pipeline.value_and_grad(*sharded), expected


# faults


def _changed(stage: str, leaf: str, change: Any) -> Any:
    return lambda aux: aux | {stage: aux[stage] | {leaf: change(aux[stage][leaf])}}


def _floats_times(scale: float) -> Any:
    return lambda tree: jax.tree.map(lambda leaf: leaf * scale if leaf.dtype == jnp.float32 else leaf, tree)


@contextlib.contextmanager
def told(*holds: str):
    with pytest.raises(VerificationError) as caught:
        yield
    missing = [text for text in holds if text not in str(caught.value)]
    assert not missing, f"{missing} is not in: {caught.value}"


def _of_frozen(gradients: Any) -> Any:
    arrays = [leaf + 1e-3 if leaf.shape == (2, D) else leaf for leaf in gradients.arrays]
    return dataclasses.replace(gradients, arrays=arrays)


def _counted_again(state: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + 1 if leaf.dtype == jnp.int32 else leaf, state)


def _large_for_infinite(masked: Any) -> Any:
    return jnp.maximum(masked, -1e30)


ALL_AUX, ONE_AUX, NEAR = "(4 of 4 leaves of aux differ): loss ", "(1 of 4 leaves of aux differ): loss ", "rtol=1e-05: "
EQUAL = "int32 must be equal: "
FAULTS = [
    (
        "gradients",
        _of_frozen,
        "['fixed'] differs",
        "0.001 relative",
        NEAR,
        "0.001 instead of 0 at [0] (1 of 4 gradients",
    ),
    ("state", _counted_again, "['seen']['count'] differs", "by 0.167 relative", f"{EQUAL}7 instead of 6"),
    ("state", _floats_times(1.001), "state['seen']['mean'] differs", "by 0.001 relative", "(1 of 2 leaves of state "),
    ("aux", _changed("c", "rows", lambda rows: rows.at[1, 2, 1].add(0.01)), "['rows'] differs", NEAR, " at [1, 2, 1] "),
    ("aux", lambda aux: jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 1), aux), "the aux['", ALL_AUX),
    ("aux", lambda aux: jax.tree.map(lambda leaf: leaf[::-1], aux), "the aux['", ALL_AUX),
    ("aux", _changed("a", "on", lambda on: on.at[0, 1].add(1)), "['on'] differs", EQUAL, "[0, 1]"),
    (
        "aux",
        _changed("c", "masked", _large_for_infinite),
        "['masked'] differs",
        "by inf",
        "-1e+30 instead of -inf at [",
    ),
    ("aux", _changed("a", "mean", lambda mean: mean.at[0, 2].set(jnp.nan)), "by nan relative", " at [0, 2] ", ONE_AUX),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "change", "holds"), [(what, change, holds) for what, change, *holds in FAULTS])
def test_a_pipeline_with_a_fault_fails(monkeypatch, right, what, change, holds):
    model, sharded, ((loss, aux), gradients, state), expected = right
    found = {"loss": loss, "aux": aux, "gradients": gradients, "state": state}
    found |= {what: change(found[what])}
    result = (found["loss"], found["aux"]), found["gradients"], found["state"]
    monkeypatch.setattr(model.pipeline, "value_and_grad", lambda *_: result)
    monkeypatch.setattr(verification, "unsharded_update", lambda *_, **__: expected)
    with told(*holds):
        verify(model.pipeline, *sharded)


def half_of_the_gradients(run, plan, args, **options):
    result = run(plan, args, **options)
    return dataclasses.replace(result, gradients=_floats_times(0.5)(result.gradients))


def without_a_new_state(run, plan, args, **options):
    return dataclasses.replace(run(plan, args, **options), state=args.state)


def with_other_keys(run, plan, args, **options):
    return run(plan, args._replace(key=jax.random.fold_in(args.key, 1)), **options)


@pytest.mark.fast("gradients")
@pytest.mark.parametrize(
    ("fault", "holds"),
    [
        (half_of_the_gradients, ("the gradient of params['a'] differs from ", "by 0.5 relative")),
        (without_a_new_state, ("the new state['s'] differs from ", "by 1 relative", "0 instead of 3 (1 of 1 ")),
        (with_other_keys, ("the loss differs from ",)),
    ],
    ids=["gradients", "state", "keys"],
)
def test_an_engine_with_a_fault_fails(monkeypatch, fault, holds):
    monkeypatch.setattr(engine, "run", functools.partial(fault, engine.run))

    def fn(w, x, mb, *, state, key):
        return Outputs(jnp.mean((mb["x"] @ w) ** 2) * jax.random.uniform(key), state + 1)

    pipeline = Pipeline([Stage(fn, params="a", state="s", random=True)], gradient_accumulation=M)
    params, state = pipeline.shard({"a": normal(D, D)}), pipeline.shard_state({"s": np.float32(0)})
    with told(*holds):
        verify(pipeline, params, batch_of(1), state, jax.random.key(0))


# aux


def with_aux(fn, reference=None, dtype: Any = np.float32, **options: Any) -> Any:
    """Run `verify` on one stage that returns the aux of `fn`."""
    stage = Stage(
        lambda w, x, mb: (jnp.mean(mb["x"] @ w), fn(w, mb["x"])),
        params="w",
        reference=None if reference is None else lambda w, x, mb: (jnp.mean(mb["x"] @ w), reference(w, mb["x"])),
    )
    pipeline = Pipeline([stage], gradient_accumulation=M)
    return verify(pipeline, pipeline.shard({"w": normal(D, D).astype(dtype)}), batch_of(1), **options)


def large(at: int) -> Any:
    return lambda w, x: jnp.full((2,), 10**9).at[at].add(1)


def halves(by: float) -> Any:
    return lambda w, x: (x[0] @ w * by).astype(jnp.bfloat16)


@pytest.mark.slow
def test_an_aux_within_its_tolerance_is_right():
    assert with_aux(large(0)).aux_errors == {"aux": 0.0}
    assert with_aux(lambda w, x: x[:0]).aux_errors == {"aux": 0.0}
    assert with_aux(halves(1.02), halves(1), rtol=0.05).aux_errors["aux"] == pytest.approx(0.02, abs=0.01)


BILLION = "by 1e-09 relative, and int32 must be equal: 1000000001 instead of 1000000000 at [0, 0]"
SHAPES = "the aux has shapes [3, 3, 4], the unsharded program's ", "what a stage's reference returns"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "reference", "options", "holds"),
    [
        (large(0), large(1), {"dtype": jnp.bfloat16, "rtol": 0.5}, ("the aux differs", BILLION)),
        (lambda w, x: w[0, 0] == w[0, 0], lambda w, x: w[0, 0] != w[0, 0], {}, ("bool must be equal: True instead",)),
        (halves(1.1), halves(1), {}, ("more than rtol=0.0625: ",)),
        (halves(1.02), halves(1), {"rtol": 0.001}, ("more than rtol=0.001: ",)),
        (lambda w, x: jnp.sum(w) + 1j, lambda w, x: jnp.sum(w) + 2j, {}, ("the aux differs",)),
        (lambda w, x: x, lambda w, x: x[0], {}, (*SHAPES, "[3, 4]")),
        (lambda w, x: x, lambda w, x: {"logits": x}, {}, (*SHAPES, "{'logits': [3, 3, 4]}")),
        (lambda w, x: x, lambda w, x: None, {}, (*SHAPES, "program's None")),
    ],
    ids=["integers", "bools", "halves", "halves, by a given rtol", "complex", "a shape", "a tree", "none"],
)
def test_an_aux_that_differs_is_told(fn, reference, options, holds):
    with told(*holds):
        with_aux(fn, reference, **options)


# rules that are not linear in their cotangent


CLIP = 0.02
sign_of_cotangent, clipped = jax.custom_vjp(lambda x: x), jax.custom_vjp(lambda x: x)
sign_of_cotangent.defvjp(lambda x: (x, None), lambda _, g: (jnp.sign(g),))
clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -CLIP, CLIP),))
RULES = {"sign": (sign_of_cotangent, np.sign), "clip": (clipped, lambda g: np.clip(g, -CLIP, CLIP))}


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "reduction", "replicas"), [("sign", "sum", 1), ("clip", "mean", 2)])
def test_a_rule_sees_the_cotangent_of_its_micro_batch(rule, reduction, replicas):
    fn, by_hand = RULES[rule]
    stages = [
        Stage(lambda w, x, mb: fn(mb["x"] @ w), params="a"),
        Stage(lambda p, x, mb: jnp.mean((x - mb["y"]) ** 2), ipu=1),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=M, reduction=reduction)
    w, batch = normal(D, D, seed=5), batch_of(replicas)
    seed = 1 if reduction == "sum" else 1 / (M * replicas)
    expected = np.zeros((D, D))
    clipped_some = 0
    for x, y in zip(*(batch[name].reshape(-1, ROWS, D) for name in "xy"), strict=True):
        cotangent = 2 * (x @ w - y) / (ROWS * D) * seed
        clipped_some += np.count_nonzero(by_hand(cotangent) != cotangent)
        expected += x.T @ by_hand(cotangent)
    assert clipped_some
    _, gradients = reference_value_and_grad(pipeline, {"a": w}, batch)
    np.testing.assert_allclose(gradients["a"], expected, rtol=1e-5, atol=1e-6)
    verify(pipeline, pipeline.shard({"a": w}), batch)


@pytest.mark.slow
def test_a_concurrent_stages_rule_sees_a_part_of_the_cotangent_and_verify_says_so():
    """A value that is the same on all IPUs gets its cotangent in equal parts: such a rule belongs in a local stage."""
    stages = [
        Stage(lambda w, x, mb: sign_of_cotangent(mb["x"] @ w), params="a", ipu=ALL_IPUS),
        Stage(lambda p, x, mb: jnp.mean((x - mb["y"]) ** 2), ipu=1),
    ]
    pipeline = Pipeline(stages, gradient_accumulation=M, specs={"a": P()})
    with told("the gradient of params['a'] differs from ", " by 1 relative"):
        verify(pipeline, pipeline.shard({"a": normal(D, D)}), batch_of(1))


# replicas that see each other


def normalised(w, x, mb, *, state):
    """Apply batch norm over the rows of all replicas."""
    h = mb["x"] @ w
    mean = lax.pmean(h.mean(0), "replica")
    var = lax.pmean(jnp.square(h - mean).mean(0), "replica")
    y = (h - mean) * lax.rsqrt(var + 1e-5)
    return Outputs(y, state=0.5 * state + 0.5 * mean, aux={"replica": lax.axis_index("replica"), "y": y})


@pytest.mark.slow
def test_batch_norm_over_replicas_is_batch_norm_of_the_joined_rows():
    replicas = 3
    stages = [
        Stage(normalised, params="a", state="seen", name="norm"),
        Stage(lambda w, x, mb: jnp.mean((x @ w - mb["y"]) ** 2), params="b", ipu=1),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(replicas, 2), gradient_accumulation=M)
    params, batch = {"a": normal(D, D, seed=3), "b": normal(D, D, seed=4)}, batch_of(replicas)

    def loss_of(params):
        x, y = (jnp.swapaxes(batch[name], 0, 1).reshape(M, replicas * ROWS, D) for name in "xy")
        h = x @ params["a"]
        mean = h.mean(1, keepdims=True)
        normal_ = (h - mean) / jnp.sqrt(h.var(1, keepdims=True) + 1e-5)
        return jnp.mean((normal_ @ params["b"] - y) ** 2), (mean[:, 0], normal_.reshape(M, replicas, ROWS, D))

    (loss, (means, rows)), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
    state = np.zeros(D, np.float32)
    for mean in means:
        state = 0.5 * state + 0.5 * np.asarray(mean)
    state_before = {"seen": np.zeros(D, np.float32)}
    (found, aux), found_gradients, new_state = reference_value_and_grad(pipeline, params, batch, state_before)
    assert float(found) == pytest.approx(float(loss), rel=1e-5)
    assert largest_relative_error(found_gradients, gradients) < 1e-5
    np.testing.assert_allclose(new_state["seen"], state, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(aux["norm"]["replica"], np.repeat(np.arange(replicas)[:, None], M, 1))
    np.testing.assert_allclose(aux["norm"]["y"], np.swapaxes(rows, 0, 1), rtol=1e-4, atol=1e-5)
    report = verify(pipeline, pipeline.shard(params), batch, pipeline.shard_state(state_before))
    assert set(report.gradient_errors) == {"params['a']", "params['b']"}
    assert set(report.state_errors) == {"state['seen']"}
    assert set(report.aux_errors) == {"aux['norm']['replica']", "aux['norm']['y']"}
    assert re.fullmatch(r".*; 1 of state, \d\.\de[+-]\d\d; 2 of aux, \d\.\de[+-]\d\d", str(report))


# what it refuses


EVERYTHING = Everything(replicas=2)


def unsharded(**given: Any) -> Any:
    names = ("batch", "state", "key")
    arguments = {name: getattr(EVERYTHING, name) for name in names} | given
    return lambda: reference_value_and_grad(EVERYTHING.pipeline, EVERYTHING.params, *(arguments[n] for n in names))


@refusals(
    (unsharded(batch=batch_of(1)), "batch['x'] has shape (3, 3, 4)", "its leading dims must be"),
    (
        unsharded(batch=FeedBatch({}, 0, 0, 1, np.ones(0, bool), 0)),
        ".FeedBatch",
        "must be a NumPy or jax array",
        "batch.data",
    ),
    (lambda: reference_value_and_grad(cast(Any, 3), {}, {}), "pipeline is a int", "give a Pipeline"),
    (unsharded(key=None), "stage 'a' takes a random key", "jax.random.key(...)"),
    (unsharded(state=None), "state: missing 'seen'", "The stages name the groups 'seen'"),
    (unsharded(state={"other": 1}), "missing 'seen'; unknown 'other'", "The stages name the groups 'seen'"),
)
def test_the_unsharded_program_refuses_what_the_pipeline_refuses(call, holds):
    with refused(*holds):
        call()


# gradients of which rounding alone is left


def attention(fault: float = 0.0) -> tuple[Pipeline, Any, Any]:
    """The keys' bias adds the same to all scores of a row, which softmax ignores; `fault` is added to its gradient."""

    faulty = jax.custom_vjp(lambda bias: bias)
    faulty.defvjp(lambda bias: (bias, None), lambda _, g: (g + fault,))

    def attend(w, x, mb, bias_of):
        q, k = mb["x"] @ w["q"], mb["x"] @ w["k"] + bias_of(w["bias"])
        return jax.nn.softmax(q @ k.T) @ (mb["x"] @ w["v"])

    stages = [
        Stage(
            lambda w, x, mb: attend(w, x, mb, faulty),
            params="a",
            reference=lambda w, x, mb: attend(w, x, mb, lambda b: b),
        ),
        Stage(lambda w, x, mb: jnp.mean((x @ w - mb["y"]) ** 2), params="b", ipu=1),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=M)
    weights = {"q": normal(D, D), "k": normal(D, D, seed=3), "v": normal(D, D, seed=4), "bias": normal(D, seed=5)}
    return pipeline, pipeline.shard({"a": weights, "b": normal(D, D, seed=6)}), batch_of(1)


@pytest.mark.slow
def test_a_gradient_that_cancels_is_judged_by_what_it_was_made_of():
    pipeline, params, batch = attention()
    gradients = pipeline.unshard(pipeline.value_and_grad(params, batch)[1])["a"]
    assert np.abs(gradients["bias"]).max() < 1e-6 < 1e-3 < np.abs(gradients["q"]).max()
    errors = verify(pipeline, params, batch).gradient_errors
    assert errors["params['a']['bias']"] <= 1e-5
    with told("the gradient of params['a']['bias'] differs ", " (1 of 5 "):
        verify(*attention(fault=1e-5))


def verified(**given: Any) -> Any:
    shard = EVERYTHING.pipeline.shard
    arguments = {"params": shard(EVERYTHING.params), "batch": EVERYTHING.batch, "key": EVERYTHING.key}
    arguments |= {"state": EVERYTHING.pipeline.shard_state(EVERYTHING.state), **given}
    return lambda: verify(arguments.pop("pipeline", EVERYTHING.pipeline), **arguments)


@refusals(
    (verified(params=EVERYTHING.params), "params is a dict", "pipeline.shard(...)"),
    (verified(params=EVERYTHING.batch, batch=EVERYTHING.params), "params is a dict", "pipeline.shard(...)"),
    (verified(pipeline=EVERYTHING.pipeline.stages), "pipeline is a tuple", "give a Pipeline"),
    (verified(batch=batch_of(1)), "batch['x'] has shape (3, 3, 4)", "its leading dims must be"),
    (verified(state=None), "state is missing", "pipeline.shard_state"),
    (verified(state=EVERYTHING.state), "state is a dict", "pipeline.shard_state(...)"),
    (verified(key=None), "stage 'a' takes a random key", "jax.random.key(...)"),
    (verified(rtol="small"), "rtol='small'", "a finite number of at least 0"),
    (lambda: jax.jit(lambda key: verified(key=key)())(EVERYTHING.key), "inside jax.jit", "call it outside"),
)
def test_verify_refuses_what_the_pipeline_refuses(call, holds):
    with refused(*holds):
        call()

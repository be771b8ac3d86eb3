"""Test updates that are not finite: they change no bit, and what is named is what was made wrong by hand."""

import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Checkpoints, Feed, Outputs, Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.options import DynamicScale
from ipu_jax.steps import NonFiniteLossError, NonFiniteLossWarning
from ipu_jax.training.update.nonfinite import StageFlags, first_nonfinite
from support.harness import exactly
from support.programs import run_instances
from support.trained import bits, quick_compiles

M = 3


def body(p, x, mb, *, state, key=None):
    y = jnp.tanh(mb["x"] @ p["w"]) + 0 * state["mean"]
    if key is not None:
        y *= jax.random.bernoulli(key, 0.8, y.shape)
    new = {"n": state["n"] + 1, "mean": 0.5 * state["mean"] + 0.5 * y.mean() + mb["to_state"]}
    return Outputs(y, state=new)


def middle(p, x, mb):
    # where the shift is 0 the value is 0, and its slope infinite
    return x @ p["w"] + jnp.sqrt(p["b"] * mb["shift"])


def head(p, x, mb):
    """Take a logarithm on the last IPU only: of 1, unless the batch says otherwise."""
    last = lax.axis_index("ipu") == lax.axis_size("ipu") - 1
    squares = jnp.mean((x @ p["w"]) ** 2) + jnp.where(last, jnp.log(mb["one"]), 0.0)
    return lax.psum(squares, "ipu")


def model_of(replicas, ipus, *, places=(0, 1), random=True, schedule: Any = "grouped"):
    stages = [
        Stage(body, params="body", state="body", random=random, ipu=min(places[0], ipus - 1)),
        Stage(middle, params="middle", ipu=min(places[1], ipus - 1)),
        Stage(head, params="head", ipu=ALL_IPUS),
    ]
    specs = {"head": {"w": P(None, "ipu")}}
    return Pipeline(stages, mesh=make_mesh(replicas, ipus), gradient_accumulation=M, specs=specs, schedule=schedule)


def weights():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 3
    return {
        "body": {"w": draw(4, 6)},
        "middle": {"w": draw(6, 6), "b": np.ones(6, np.float32)},
        "head": {"w": draw(6, 8)},
    }


STATE = {"body": {"n": np.int32(0), "mean": np.float32(0)}}


def batch_of(seed, replicas):
    lead = (M,) if replicas == 1 else (replicas, M)
    x = np.random.default_rng(seed).normal(size=(*lead, 5, 4)).astype(np.float32)
    ones = np.ones(lead, np.float32)
    return {"x": x, "shift": np.ones((*lead, 6), np.float32), "one": ones, "to_state": 0 * ones}


def spoiled(name, value, *at, replicas=2, seed=0):
    batch = batch_of(seed, replicas)
    batch[name][at] = value
    return batch


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    with quick_compiles():
        yield


@pytest.fixture(scope="module")
def random_step():
    """Return a step of 2 replicas of 2 IPUs with state and random keys, which stops."""
    return make_train_step(model_of(2, 2), optax.adam(0.01), TrainOptions(on_nonfinite="stop"))


def first_state(step):
    return step.init(weights(), stages=STATE, key=jax.random.key(3) if step.random else None)


# what is named


@pytest.mark.parametrize(
    ("name", "value", "at", "expected"),
    [
        ("x", np.nan, (1, 2, 3, 0), (1, 2, 0, "body", "batch['x']")),
        ("to_state", np.inf, (0, 1), (0, 1, 0, "body", "its new state stages['body']['mean']")),
        ("shift", -1.0, (0, 2, 4), (0, 2, 1, "middle", "its output")),
        ("shift", 0.0, (1, 0, 4), (1, 0, 1, "middle", "the gradient of params['middle']['b']")),
        ("one", 0.0, (1, 1), (1, 1, 2, "head", "its loss")),
    ],
)
def test_what_was_made_wrong_is_named(name, value, at, expected, random_step):
    found: Any = random_step.find_nonfinite(first_state(random_step), spoiled(name, value, *at), step=7)
    assert found is not None
    assert dataclasses.astuple(found)[:6] == (7, *expected)
    is_gradient = "gradient" in found.what
    assert np.isfinite(found.loss) == (is_gradient or name == "to_state")


def test_of_several_wrong_values_the_first_counts(random_step):
    """A micro-batch before the others, whatever the replica, and a stage before the others of a micro-batch."""
    batch, state = spoiled("to_state", np.inf, 1, 0), first_state(random_step)
    batch["x"][0, 1, 3, 0] = np.nan
    for expected in ((1, 0, 0, "body", "its new state stages['body']['mean']"), (0, 1, 0, "body", "batch['x']")):
        found: Any = random_step.find_nonfinite(state, batch)
        assert dataclasses.astuple(found)[1:6] == expected
        batch["to_state"][1, 0], batch["one"][1, 1] = 0, 0
    batch = spoiled("shift", 0.0, 1, 0, 4)
    batch["shift"][0, 2, 4] = 0
    found = random_step.find_nonfinite(state, batch)
    assert (found.replica, found.microbatch, found.name) == (1, 0, "middle")


def test_a_loss_of_which_nothing_shows_the_cause_is_named():
    losses = np.array([[0, 0], [0, np.nan]], np.float32)
    found: Any = first_nonfinite(1, losses, [StageFlags()], ["a"], sums_are_finite=True)
    assert (found.replica, found.microbatch, found.what) == (1, 1, "its loss")


def test_a_feeds_batch_is_searched_as_it_is():
    step = make_train_step(lambda w, rows: jnp.mean(jnp.log(rows["x"] @ w)), optax.sgd(0.1))
    rows = np.ones((8, 2), np.float32)
    rows[5] = 0
    with Feed({"x": rows}, step=step, micro_batch=8, shuffle=False) as feed:
        found: Any = step.find_nonfinite(step.init(jnp.ones(2)), next(feed))
    assert found.what == "the loss"


def test_weights_and_state_that_are_not_finite_are_named(random_step):
    batch = batch_of(0, 2)
    for group, leaf in (("body", "w"), ("head", "w")):
        bad = weights()
        bad[group][leaf][-1, -1] = np.nan  # of the head, on the last IPU only
        state = random_step.init(bad, stages=STATE, key=jax.random.key(3))
        found: Any = random_step.find_nonfinite(state, batch)
        assert (found.replica, found.microbatch, found.name) == (0, 0, group)
        assert found.what == f"its weight params[{group!r}][{leaf!r}]"
    assert random_step.find_nonfinite(first_state(random_step), batch) is None
    assert str(found) == (
        "update 1, replica 0, micro-batch 0, stage 2, 'head': its weight params['head']['w'] is not finite, and the "
        "loss of the micro-batch is nan"
    )


@pytest.mark.slow
def test_a_stage_draws_what_it_drew_in_the_update():
    """A stage that fails for some keys only: jax.random alone says for which replica and micro-batch it does."""

    def fn(p, x, mb, *, key):
        return jnp.mean(mb @ p) + jnp.where(jax.random.uniform(key) < 0.2, jnp.nan, 0.0)

    step = make_train_step(
        Pipeline([Stage(fn, params="p", random=True)], mesh=make_mesh(2, 1), gradient_accumulation=M),
        optax.sgd(0.1),
        TrainOptions(on_nonfinite="stop"),
    )
    state = step.init({"p": np.ones(4, np.float32)}, key=jax.random.key(5))
    for number in (1, 2, 6):
        bad = []
        for m in range(M):
            for replica in range(2):
                key = jax.random.key(5)
                for fold in (number - 1, replica, m, 0):
                    key = jax.random.fold_in(key, fold)
                bad += [(replica, m)] if jax.random.uniform(key) < 0.2 else []
        found: Any = step.find_nonfinite(state, np.ones((2, M, 5, 4), np.float32), step=number)
        assert ([(found.replica, found.microbatch)] if found else []) == bad[:1]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("ipus", [1, 2, 4])
def test_what_is_named_does_not_depend_on_ipus_and_schedule(ipus, schedule):
    model = model_of(1, ipus, schedule="grouped" if ipus == 1 else schedule)
    step = make_train_step(model, optax.sgd(0.1), TrainOptions(on_nonfinite="stop"))
    state = first_state(step)
    cases = {("x", np.nan, (1, 3, 0)): "batch['x']", ("one", 0.0, (1,)): "its loss"}
    cases[("shift", 0.0, (1, 2))] = "the gradient of params['middle']['b']"
    for (name, value, at), what in cases.items():
        found: Any = step.find_nonfinite(state, spoiled(name, value, *at, replicas=1))
        assert (found.replica, found.microbatch, found.what) == (0, 1, what)


@pytest.mark.parametrize("concurrent", [False, True])
def test_sums_that_overflow_are_named_and_large_values_and_a_mask_are_not(concurrent):
    """By hand: each gradient is x, also as the sum of what two IPUs compute, and float32 ends at 3.4e38."""

    def fn(w, x, mb):
        y = lax.psum(mb["x"] * w / 2, "ipu") if concurrent else mb["x"] * w
        return jnp.where(mb["mask"] > 0, y, 1.0)

    stage, specs = Stage(fn, "w", ipu=ALL_IPUS if concurrent else 1), {"w": P()} if concurrent else None
    pipeline = Pipeline([stage], mesh=make_mesh(1, 2), gradient_accumulation=2, reduction="sum", specs=specs)
    step = make_train_step(pipeline, optax.sgd(0.1), TrainOptions(on_nonfinite="stop"))
    state, mask = step.init({"w": np.float32(1e-30)}), np.full(2, np.inf, np.float32)
    batch = {"mask": mask, "x": np.array([1e38, 1e30], np.float32)}
    assert step.find_nonfinite(state, batch) is None
    found: Any = step.find_nonfinite(state, batch | {"x": np.full(2, 3e38, np.float32)})
    assert found.what == "the sum of the gradients over micro-batches and replicas"
    found = step.find_nonfinite(step.init({"w": np.float32(1)}), batch | {"x": np.full(2, 3e38, np.float32)})
    assert found.what == "the sum of the losses"
    found = step.find_nonfinite(state, batch | {"x": np.array([1, np.nan], np.float32)})
    assert found.what == "batch['x']"


def test_a_stage_runs_on_its_own_ipu():
    """A local stage may ask where it is, and its weights may be bad anywhere else."""

    def fn(w, x, mb):
        return jnp.log(lax.axis_index("ipu") + 0 * mb[0]) * w.mean()

    stages = [Stage(fn, "a", ipu=1), Stage(lambda w, x, mb: (x * w * mb).mean(), "b", ipu=0)]
    step = make_train_step(Pipeline(stages, mesh=make_mesh(1, 2)), optax.sgd(0.1))
    ones = np.ones(3, np.float32)
    assert step.find_nonfinite(step.init({"a": ones, "b": ones}), ones[None]) is None


def test_a_cut_function_with_counts_is_searched():
    def loss_fn(params, rows):
        hidden = jnp.tanh(rows @ params["a"]).reshape(2, 3, len(rows)).reshape(6, -1)
        return jnp.sum(jnp.log(hidden.T @ params["b"]) ** 2), jnp.float32(len(rows))

    params, rows = {"a": np.ones((4, 6), np.float32), "b": np.ones(6, np.float32)}, np.ones((M, 5, 4), np.float32)
    pipeline = Pipeline.from_function(loss_fn, params, rows[0], ipus=2, gradient_accumulation=M)
    step = make_train_step(pipeline, optax.sgd(0.1), TrainOptions(weighted=True))
    for each in (rows, rows[:, :3]):  # another size, too
        assert step.find_nonfinite(step.init(params), each) is None
    rows[1, 2] = np.nan
    for each in (rows, rows[:, :3]):
        found: Any = step.find_nonfinite(step.init(params), each)
        assert (found.microbatch, found.stage, found.what) == (1, 0, "batch")


def test_each_stage_reads_the_state_that_it_wrote():
    """Both states are in the same place, each on its own IPU: one counts by 1, and one by 10."""

    def counting(by):
        def fn(w, x, mb, *, state):
            is_right = state["n"] == by * mb["number"]
            return Outputs(jnp.where(is_right, w.mean(), jnp.nan), state={"n": state["n"] + by})

        return fn

    stages = [Stage(counting(by), name, state=name, ipu=ipu) for ipu, (name, by) in enumerate([("a", 1), ("b", 10)])]
    step = make_train_step(Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=M), optax.sgd(0.1))
    zero, batch = {"n": np.float32(0)}, {"number": np.arange(M, dtype=np.float32)}
    state = step.init({name: np.ones(3, np.float32) for name in "ab"}, stages={"a": zero, "b": zero})
    assert step.find_nonfinite(state, batch) is None
    assert str(step.find_nonfinite(state, {"number": batch["number"] - 1})).startswith(
        "update 1, replica 0, micro-batch 0"
    )


# what becomes of the state


@pytest.mark.slow
def test_stop_leaves_every_bit_whatever_was_dispatched_after_it(random_step):
    step, state = random_step, first_state(random_step)
    for i in range(2):
        state, _ = step(state, batch_of(i, 2))
    before = step.whole(state)
    state, outputs = step(state, spoiled("x", np.nan, 1, 2, 3, 0, seed=2))
    assert (int(outputs.nonfinite), int(outputs.updated)) == (3, 0)
    for i in range(3, 6):  # these have finite losses
        state, outputs = step(state, batch_of(i, 2))
        assert (int(outputs.nonfinite), int(outputs.updated)) == (3, 0)
        assert np.isfinite(outputs.loss)
    after = step.whole(state)
    assert after["step"] == before["step"] == 2
    assert bits(after) == bits(before)
    assert repr(state).endswith("1 updates in a row were not finite)")
    message = (
        "update 3, replica 1, micro-batch 2, stage 0, 'body': batch['x'] is not finite, and the loss of the "
        "micro-batch is nan. No update was made since, and the state is the one before it: mend the data, lower the "
        "learning rate, or go on without this batch from step.restore(step.whole(state))"
    )
    with pytest.raises(NonFiniteLossError, match=exactly(message)) as raised:
        step.check(state)
    error: Any = raised.value
    assert (error.step, error.found.stage) == (3, 0)
    # without the bad batch, from the state that was stopped, and from one that never saw it
    again, _ = step(step.restore(after), batch_of(7, 2))
    other, _ = step(step.restore(before), batch_of(7, 2))
    assert bits(step.whole(again)) == bits(step.whole(other))
    assert bits(again.params) != bits(before["params"])


def log_step(**options):
    """Return a step whose loss is -inf where a row is 0."""
    return make_train_step(lambda w, x: jnp.mean(jnp.log(x @ w)), optax.sgd(0.1), TrainOptions(**options))


def test_a_loop_is_told_a_few_calls_later_and_its_state_stays_usable(tmp_path):
    step = log_step(on_nonfinite="stop")
    state, good, bad = step.init(np.ones(2, np.float32)), np.ones((1, 4, 2), np.float32), np.zeros((1, 4, 2))
    state, _ = step(state, bad)
    for _ in range(4):
        state, _ = step(state, good)
    with pytest.raises(NonFiniteLossError, match=r"^update 1, replica 0, micro-batch 0: the loss is -inf\. No update"):
        step(state, good)
    assert step.whole(state)["params"].tolist() == [1, 1]
    # a state that is stopped has not learned of the batches before the feed's position
    state, _ = step(step.restore(step.whole(state)), bad)
    with Checkpoints(tmp_path, step) as checkpoints, pytest.raises(NonFiniteLossError):
        checkpoints.save(state, now=True)
    assert list(tmp_path.iterdir()) == []


SKIP, SCALE = {"on_nonfinite": "skip"}, {"loss_scale": DynamicScale(initial=16.0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "ipus", "places", "options"),
    [
        (2, 2, (0, 1), SKIP),
        (2, 2, (1, 0), SCALE),
        (1, 1, (0, 0), SKIP),
        (1, 4, (0, 1), SKIP | {"precision": "16.32"}),
        (2, 4, (0, 1), SKIP | {"shard_optimizer": True, "ema_decay": 0.9}),
        (2, 2, (0, 1), SKIP | {"precision": "16.16", "norms": True}),
        (2, 2, (0, 1), SCALE | {"shard_optimizer": True}),
        (2, 2, (1, 0), SKIP | SCALE),
    ],
)
def test_after_a_skip_the_bits_are_those_of_a_run_without_the_batch(replicas, ipus, places, options):
    """Test also a gradient that is infinite beside a finite loss, on one IPU of one replica.

    The number of the update counts on, so a schedule of the step's number, or a random key, would differ.
    """
    model = model_of(replicas, ipus, places=places, random=False)
    step = make_train_step(model, optax.adam(0.01), TrainOptions(**options))
    lead = (0,) if replicas == 1 else (1, 0)
    bad = {
        2: spoiled("x", np.nan, *lead, 3, 0, replicas=replicas, seed=2),
        3: spoiled("shift", 0.0, *lead, 2, replicas=replicas, seed=3),
    }
    state, without = first_state(step), first_state(step)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(8):
            state, outputs = step(state, bad.get(i, batch_of(i, replicas)))
            assert (int(outputs.updated), bool(np.isfinite(outputs.loss))) == (i not in bad, i != 2)
            if "on_nonfinite" in options:
                assert int(outputs.nonfinite) == (i + 1 if i in bad and (i == 2 or "loss_scale" not in options) else 0)
        step.check(state)
    for i in range(8):
        if i not in bad:
            without, _ = step(without, batch_of(i, replicas))
    with_bad, good = step.whole(state), step.whole(without)
    assert (with_bad.pop("step"), good.pop("step")) == (8, 6)
    assert bits(with_bad | {"scale": None}) == bits(good | {"scale": None})
    where = f"update %d, replica {replicas - 1}, micro-batch 0, stage %d, %r: %s is not finite"
    named = []
    if "on_nonfinite" in options:
        named.append(where % (3, 0, "body", "batch['x']"))
    if "on_nonfinite" in options and "loss_scale" not in options:
        named.append(where % (4, 1, "middle", "the gradient of params['middle']['b']"))
    assert [warning.category for warning in told] == [NonFiniteLossWarning] * len(named)
    for warning, begin in zip(told, named, strict=True):
        assert str(warning.message).startswith(begin)
        assert re.search(r" \(with the state after update \d\); the update was skipped$", str(warning.message))
        assert warning.filename == __file__


@pytest.mark.fast("final")
@pytest.mark.parametrize(("outputs", "named"), [("final", [1, 5]), ("all", [1, 2, 4, 5])], ids=["final", "all"])
def test_so_many_skips_in_a_row_stop(outputs, named):
    """By outputs="final" the first skipped update of each call is heard of."""
    step = log_step(on_nonfinite="skip", max_skips=3, device_iterations=4, outputs=outputs)
    good = np.ones((4, 1, 2, 2), np.float32)
    first, second = good.copy(), good.copy()
    first[[0, 1, 3]] = 0  # two in a row, and one that two more follow
    second[:2, 0, 1] = 0
    state, found = step(step.init(np.ones(2, np.float32)), first)
    assert found.nonfinite.tolist() == {"final": 1, "all": [1, 2, 0, 4]}[outputs]
    made_once = np.asarray(state.params)
    for batch in (second, good):
        state, _ = step(state, batch)
    assert (int(state.step), int(state.nonfinite)) == (5, 3)
    np.testing.assert_array_equal(state.params, made_once)
    message = (
        r"^update 6, replica 0, micro-batch 0: the loss is -inf, the last of 3 in a row\. No update was made since"
    )
    with (
        pytest.warns(NonFiniteLossWarning, match=r"; the update was skipped$") as told,
        pytest.raises(NonFiniteLossError, match=message),
    ):
        step.check(state)
    assert [int(str(warning.message).split()[1].rstrip(",:")) for warning in told] == named


@pytest.mark.fast("sum", "2")
@pytest.mark.parametrize("outputs", ["all", "sum", 2, "final"])
def test_outputs_have_the_number_of_the_first_update_that_was_not_finite_and_the_count_of_all(outputs):
    step = log_step(on_nonfinite="skip", device_iterations=4, outputs=outputs)
    batch = np.ones((4, 1, 2, 2), np.float32)
    batch[2:] = 0
    _, found = step(step.init(np.ones(2, np.float32)), batch)
    assert found.nonfinite.tolist() == {"all": [0, 0, 3, 4], "sum": 3, 2: [0, 3], "final": 3}[outputs]
    assert found.updated.tolist() == {"all": [1, 1, 0, 0], "sum": 2, 2: [1, 0], "final": 0}[outputs]
    assert found.skipped.tolist() == {"all": [0, 0, 1, 1], "sum": 2, 2: [0, 2], "final": 2}[outputs]


def test_an_overflow_remains_the_affair_of_a_dynamic_scale_and_a_loss_does_not():
    """In float16 a scale of 2^15 overflows at once; a loss that is not finite says nothing about the scale."""
    step = make_train_step(
        lambda w, x: jnp.mean((x @ w) ** 2),
        optax.sgd(0.01),
        TrainOptions(
            loss_scale=DynamicScale(), precision="16.32", half="float16", on_nonfinite="stop", replication_factor=2
        ),
    )
    batch = np.full((2, 1, 4, 2), 2.0, np.float32)  # the gradient is 8, of each replica
    state: Any = step.init(np.ones(2, np.float32))
    scales = []
    for _ in range(6):
        state, outputs = step(state, batch)
        assert int(outputs.nonfinite) == 0
        scales.append((int(outputs.updated), float(state.scale.scale)))
    assert scales == [(0, 2.0**14), (0, 2.0**13), (0, 2.0**12), *[(1, 2.0**12)] * 3]
    assert int(state.step) == 6
    before = step.whole(state)
    bad = batch.copy()
    bad[1, 0, 2] = np.inf
    state, outputs = step(state, bad)
    assert (int(outputs.updated), int(outputs.nonfinite)) == (0, 7)
    assert bits(step.whole(state)) == bits(before)  # the scale among them
    with pytest.raises(NonFiniteLossError, match=r"^update 7, replica 1, micro-batch 0: batch is not finite, and"):
        step.check(state)


@functools.cache
def step_of_eight(max_skips):
    """Return a step of 8 updates per call: the gradient of w is the batch's number, in float16 and scaled."""
    options = TrainOptions(
        loss_scale=DynamicScale(initial=2.0**8),
        precision="16.32",
        half="float16",
        on_nonfinite="skip",
        max_skips=max_skips,
        device_iterations=8,
        outputs="all",
    )
    return make_train_step(lambda w, x: x.mean() * w, optax.sgd(2.0**-4), options)


@pytest.mark.parametrize(
    ("max_skips", "updates", "stops"),
    [
        (1, "oogogNgg", 6),
        (2, "NoNggggg", 3),
        (2, "ooNooNgg", 6),
        (2, "NgNogNoo", None),
        (2, "gNNogNgg", 3),
        (2, "NogNNoNg", 5),
        (3, "NoNooNgg", 6),
        (3, "NoNgNoNN", 8),
        (3, "NNogNNoo", None),
        (3, "gggooggo", None),
    ],
)
def test_overflows_neither_end_nor_belong_to_a_row_of_losses_that_are_not_finite(max_skips, updates, stops):
    """By hand: g is an update that is made, o an overflow beside a finite loss, N a loss that is NaN."""
    step: Any = step_of_eight(max_skips)
    numbers = {"g": 1.0, "o": 2.0**15, "N": np.nan}  # 2**15 overflows under all of these scales, and 1 under none
    batch = np.array([numbers[kind] for kind in updates], np.float32).reshape(8, 1, 1)
    state, outputs = step(step.init(np.float32(1)), batch)
    before = updates[: 8 if stops is None else stops - 1]  # what comes before the update that stops the state
    assert outputs.updated.tolist() == [int(kind == "g") for kind in before] + [0] * (8 - len(before))
    named = [number * (kind == "N") for number, kind in enumerate(before, 1)] + [stops] * (8 - len(before))
    assert outputs.nonfinite.tolist() == named
    assert int(state.step) == len(before)
    row = updates[:stops].rpartition("g")[2].count("N")
    assert int(state.nonfinite) == row
    assert (row == max_skips) == (stops is not None)
    assert float(state.params) == 1 - before.count("g") / 2**4
    assert float(state.scale.scale) == 2.0 ** (8 - before.count("o"))


# the program


def counted(step, state, batch):
    text = step.lower(state, batch).as_text()
    names = ("all_reduce", "all_gather", "reduce_scatter", "collective_permute")
    return {name: text.count(f"stablehlo.{name}") for name in names}, "is_finite" in text


@pytest.mark.fast("2-2-True-1")
@pytest.mark.parametrize(("replicas", "ipus", "shard_optimizer", "more"), [(2, 1, False, 0), (2, 2, True, 1)])
def test_it_costs_one_number_sent_among_the_ipus_of_a_replica_and_nothing_if_it_is_off(
    replicas, ipus, shard_optimizer, more
):
    made = []
    for how in (None, "stop"):
        options = TrainOptions(on_nonfinite=how, shard_optimizer=shard_optimizer)
        step = make_train_step(model_of(replicas, ipus, random=False), optax.sgd(0.1), options)
        made.append(counted(step, first_state(step), batch_of(0, replicas)))
    (off, looks), (on, also) = made
    assert (looks, also) == (False, True)
    assert on == off | {"all_reduce": off["all_reduce"] + more}


def test_a_step_that_looks_restores_the_state_of_one_that_does_not():
    loss_fn, batch = (lambda w, x: jnp.mean(x @ w)), np.ones((1, 4, 2), np.float32)
    plain = make_train_step(loss_fn, optax.sgd(0.1))
    state = plain.init(np.ones(2, np.float32))
    stopping = make_train_step(loss_fn, optax.sgd(0.1), TrainOptions(on_nonfinite="stop"))
    plain.check(state)
    _, outputs = stopping(stopping.restore(plain.whole(state)), batch)
    assert int(outputs.nonfinite) == 0


def across_instances() -> dict[str, np.ndarray]:
    """Return the error that a loop over a spoiled batch raises on this instance, and in which call."""
    step = make_train_step(model_of(2, 2), optax.adam(0.01), TrainOptions(on_nonfinite="stop"))
    state = first_state(step)
    for i in range(12):
        batch = spoiled("x", np.nan, 1, 2, 3, 0, seed=i) if i == 2 else batch_of(i, 2)
        try:
            state, _ = step(state, batch)
        except NonFiniteLossError as error:
            return {"error": np.array(f"call {i}: {error}")}
    return {"error": np.array("nothing was raised")}


@pytest.mark.slow
def test_all_instances_raise_the_same_in_the_same_call():
    first, second = run_instances(across_instances, [2, 2])
    assert str(first["error"]) == str(second["error"])
    assert str(first["error"]).startswith("call 7: update 3, replica 1, micro-batch 2, stage 0, 'body': batch['x'] is")

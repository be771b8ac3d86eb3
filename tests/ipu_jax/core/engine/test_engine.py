"""Test the staged scan against dense twins, with bubbles filled with NaN."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh, make_schedule, verify
from ipu_jax.schedules import Schedule
from support.against_plain import (
    assert_equals_its_twin,
    assert_equals_plain,
    bubbles_hold_nan,  # noqa: F401 (a fixture)
    stages_at,
)
from support.dense import chain, largest_relative_error
from support.layers import normal

_ = None  # in a placement: a concurrent stage


@pytest.mark.slow
@pytest.mark.parametrize(("places", "ipus"), [((0, _, 1), 2), ((_, 0, 1, _), 4)])
def test_bfloat16_stays_within_its_roundings_of_the_float32_twin(places, ipus):
    """A rounding is 2^-9 of a value, and a gradient has one per operation and layer, forward and backward: some 16."""
    model = chain(places, 3, dtype=jnp.bfloat16)
    pipeline = model.pipeline(ipus)
    loss, gradients = pipeline.value_and_grad(pipeline.shard(model.params), model.batch)
    full = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (model.params, model.batch))
    twin = dataclasses.replace(model, params=full[0], batch=full[1]).twin()
    assert all(g.dtype == jnp.bfloat16 for g in jax.tree.leaves(gradients))
    assert largest_relative_error((loss, pipeline.unshard(gradients)), twin) < 16 * 2**-9


@pytest.mark.parametrize(("place", "dtype"), [(0, jnp.float16), (ALL_IPUS, jnp.bfloat16)])
def test_losses_and_gradients_in_half_precision_are_accumulated_in_float32(place, dtype):
    m = 300  # in bfloat16, 256 + 1 is 256, and 512 + 2 is 512
    stage = Stage(lambda w, x, mb: (w * mb).sum(), params="w", ipu=place)
    pipeline = Pipeline(
        [stage],
        mesh=make_mesh(1, 2),
        gradient_accumulation=m,
        reduction="sum",
        specs={"w": PartitionSpec()} if place is ALL_IPUS else None,
    )
    loss, gradients = pipeline.value_and_grad(pipeline.shard({"w": jnp.ones(2, dtype)}), jnp.ones((m, 2), dtype))
    assert float(loss) == 2
    np.testing.assert_array_equal(pipeline.unshard(gradients)["w"], np.full(2, m))


# what passes between stages


def rich_stage(i: int, width: int):
    """Take and return a tree with every dtype; each boundary has a width of its own."""

    def fn(w, x, mb):
        if x is None:
            x = {"h": mb["x"], "n": [mb["ids"], mb["ids"][0] > 3], "half": mb["x"][:, 0].astype(jnp.bfloat16)}
            x |= {"scale": jnp.float16(1.5), "flags": mb["ids"] > 4}
        h = jnp.tanh(x["h"] @ w) * x["scale"].astype(jnp.float32) + x["half"].astype(jnp.float32)[:, None]
        h = jnp.where(x["flags"][:, None], h, h / 2) + jnp.where(x["n"][1], 0.1, 0.2) * x["n"][0][:, None]
        return {
            "h": h,
            "n": [x["n"][0] + 1, ~x["n"][1]],
            "half": h[:, 0].astype(jnp.bfloat16),
            "scale": (x["scale"] * h.mean()).astype(jnp.float16) if i % 2 else x["scale"],
            "flags": x["flags"] ^ (x["n"][0] % 2 == 0),
        }

    return fn


@pytest.mark.slow
@pytest.mark.parametrize("places", [(0, 1, 0), (0, _, 1), (_, 0, _)])
def test_trees_of_floats_ints_and_bools_pass_between_stages(places):
    rng = np.random.default_rng(0)
    widths = (4, 6, 3, 5)
    weights = {f"w{i}": jnp.asarray(rng.normal(size=widths[i : i + 2]), jnp.float32) for i in range(3)}
    fns = [rich_stage(i, widths[i + 1]) for i in range(3)]

    def loss(w, x, mb):
        y = fns[2](w, x, mb)
        return jnp.mean(y["h"] ** 2) + jnp.mean(jnp.where(y["flags"], y["n"][0], 0)) * y["scale"].astype(jnp.float32)

    stages, specs = stages_at(places, [*fns[:2], loss], tuple(weights))
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=4, specs=specs)
    batch = {
        "x": jnp.asarray(rng.normal(size=(4, 5, 4)), jnp.float32),
        "ids": jnp.asarray(rng.integers(9, size=(4, 5)), jnp.int32),
    }
    found_loss, gradients = pipeline.value_and_grad(pipeline.shard(weights), batch)

    def plain(weights):
        one = lambda mb: loss(weights["w2"], fns[1](weights["w1"], fns[0](weights["w0"], None, mb), mb), mb)
        return jnp.mean(jax.vmap(one)(batch))

    expected_loss, expected = jax.jit(jax.value_and_grad(plain))(weights)
    # the half-precision leaves are rounded by the same casts in both programs, but XLA may fuse around them
    assert largest_relative_error(found_loss, expected_loss) < 1e-3
    assert largest_relative_error(pipeline.unshard(gradients), expected) < 1e-2


def rows_of(x, w):
    """Return the columns of x that are multiplied by this IPU's rows of w."""
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("ipu") * w.shape[0], w.shape[0], axis=1)


gathered = functools.partial(jax.lax.all_gather, axis_name="ipu", axis=1, tiled=True)
COLLECTIVES = {
    "a reduce-scatter and an all-gather": (
        PartitionSpec("ipu"),
        lambda w, x: gathered(jax.lax.psum_scatter(rows_of(x, w) @ w, "ipu", scatter_dimension=1, tiled=True)),
        lambda w, x: x @ w,
    ),
    "a mean over IPUs that hold the weights alike": (
        PartitionSpec(),
        lambda w, x: jax.lax.pmean(x @ w, "ipu"),
        lambda w, x: x @ w,
    ),
    "all-gathers in a scan over remat layers": (
        PartitionSpec(None, "ipu"),
        lambda w, x: jax.lax.scan(
            lambda h, _: (jax.checkpoint(lambda h: gathered(jnp.tanh(h @ w)))(h), None), x, None, 2
        )[0],
        lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w),
    ),
    "an all-gather where the activations say so": (
        PartitionSpec(None, "ipu"),
        lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: gathered(x @ w), lambda: x),
        lambda w, x: jnp.where(x[0, 0] > 0, x @ w, x),
    ),
}


@pytest.mark.fast("a reduce-scatter and an all-gather")
@pytest.mark.parametrize(("spec", "fn", "plain"), COLLECTIVES.values(), ids=COLLECTIVES)
def test_the_collectives_of_a_concurrent_stage_have_the_gradients_of_the_dense_program(spec, fn, plain):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(scale=0.5, size=(8, 8)).astype(np.float32) for name in "abc"}
    batch = rng.normal(size=(3, 5, 8)).astype(np.float32)
    stages = [
        Stage(lambda w, x, mb: jnp.tanh(mb @ w), params="a", ipu=0),
        Stage(lambda w, x, mb: fn(w, x), params="b", ipu=ALL_IPUS),
        Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="c", ipu=1),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 4), gradient_accumulation=3, specs={"b": spec})

    def dense(params):
        return jnp.mean(
            jax.vmap(lambda mb: jnp.mean((plain(params["b"], jnp.tanh(mb @ params["a"])) @ params["c"]) ** 2))(batch)
        )

    assert_equals_plain(pipeline, params, batch, dense)


@pytest.mark.slow
def test_messages_wait_at_every_boundary_where_each_stage_does_all_micro_batches_before_the_next_begins():
    places, m = (_, 0, _, 1, _), 3
    turns = len(places)
    forward = tuple(tuple(range(m * turn, m * turn + m)) for turn in range(turns))
    backward = (*(tuple(range(m * turn, m * turn + m)) for turn in reversed(range(turns, 2 * turns - 1))), forward[-1])
    schedule = Schedule("one after the other", places, 2, forward, backward, clock="one-phase")
    depths = [[schedule.inbox_depth(boundary, kind) for boundary in range(turns - 1)] for kind in ("F", "B")]
    assert depths == [[m] * (turns - 1)] * 2
    assert_equals_its_twin(chain(places, m), 2, {"schedule": schedule})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ipus", "micro_batches", "rounds"), [("looped-zb", 2, 3, 3), ("zb-wave", 2, 3, 3), ("zb-wave", 3, 4, 4)]
)
def test_more_stages_per_ipu_than_two(name, ipus, micro_batches, rounds):
    schedule = make_schedule(name, gradient_accumulation=micro_batches, ipus=ipus, rounds=rounds)
    if ipus == 3:
        places = (*schedule.placement, None)
        schedule = make_schedule(name, gradient_accumulation=micro_batches, ipus=ipus, placement=places)
    assert_equals_its_twin(chain(schedule.placement, micro_batches, like=False), ipus, {"schedule": schedule})


@pytest.mark.parametrize(
    ("name", "places", "micro_batches", "waiting"),
    [
        ("zbv", (0, 1, 2, 3, 3, 2, 1, 0), 5, {"F": [1, 2], "B": [1, 1]}),
        ("looped", (0, 1, 2, 0, 1, 2), 4, {"F": [1, 1], "B": [1, 3]}),
    ],
    ids=["zbv", "looped"],
)
@pytest.mark.fast("looped")
def test_messages_may_wait_for_the_second_of_two_like_stages_alone(name, places, micro_batches, waiting):
    """Stages 1 and 2 are one piece of program, which comes after rings that only stage 2 needs."""
    stages = [Stage(lambda w, x, mb: jnp.sin(x), ipu=ipu, name=f"stage {i}") for i, ipu in enumerate(places)]
    stages[0] = Stage(lambda w, x, mb: mb @ w, params="first", ipu=places[0])
    stages[-1] = Stage(lambda w, x, mb: jnp.mean((x @ w) ** 2), params="last", ipu=places[-1])
    pipeline = Pipeline(stages, schedule=name, gradient_accumulation=micro_batches)
    params = pipeline.shard({"first": normal(3, 3, seed=0), "last": normal(3, 2, seed=1)})
    batch = np.random.default_rng(2).normal(size=(micro_batches, 5, 3)).astype(np.float32)
    plan = pipeline.placement.plan(params, batch)
    assert (1, 2) in plan.classes
    of = plan.schedule.inbox_depth
    assert {"F": [of(i - 1, "F") for i in (1, 2)], "B": [of(i, "B") for i in (1, 2)]} == waiting
    verify(pipeline, params, batch)

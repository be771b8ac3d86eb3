"""Test which collectives a stage may use over which axis, against dense twins where the axis is a dim of the batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh, verify
from ipu_jax.core.schedules import SCHEDULES, make_schedule
from ipu_jax.steps import replicate
from support.against_plain import assert_equals_plain, bubbles_hold_nan, stages_at  # noqa: F401 (a fixture)
from support.layers import normal
from support.refusals import refusals, refused
from support.ways import WAYS, only_backward

M, ROWS, D = 5, 4, 8


def permuted(x, axis="replica"):
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def shifted(x, axis="replica"):
    """Return the neighbour's x, as `permuted` does, by a collective that has replica groups."""
    n, i = lax.axis_size(axis), lax.axis_index(axis)
    rows = jnp.zeros((n, *x.shape), x.dtype).at[(i + 1) % n].set(x)
    return lax.all_to_all(rows, axis, 0, 0, tiled=True)[(i - 1) % n]


def unknown(x, axis="replica"):
    primitive = core.Primitive("swap")
    primitive.def_abstract_eval(lambda x, *, axis_name: x)
    return primitive.bind(x, axis_name=(axis,))


def ragged(x, axis="replica"):
    n = lax.axis_size(axis)
    one = jnp.ones(n, jnp.int32)
    return lax.ragged_all_to_all(x, x, jnp.arange(n), one, jnp.arange(n), one, axis_name=axis)


def shuffled(x):
    return lax.pshuffle(x, "replica", list(range(lax.axis_size("replica"))))


UNGROUPED = {
    "ppermute": permuted,
    "pshuffle": shuffled,
    "ragged_all_to_all": lambda x: lax.stop_gradient(ragged(x)),
    "an unknown one": lambda x: x + lax.stop_gradient(unknown(lax.stop_gradient(x))),
}
NAMES = {"ppermute": "ppermute", "pshuffle": "ppermute", "ragged_all_to_all": "ragged_all_to_all"}


def pipeline_of(body, *, ipu: Any = 0, mesh=(2, 2), **options: Any):
    """Return a pipeline of `body` and a loss on the last IPU, weights and batch."""
    replicas, ipus = mesh
    specs = {"body": PartitionSpec()} if ipu is ALL_IPUS else None
    stages = [
        Stage(lambda p, x, mb: body(p, mb["x"], mb), params="body", ipu=ipu, **options),
        Stage(lambda p, x, mb: jnp.mean((x - mb["y"]) ** 2), ipu=ipus - 1, name="the loss", predict=lambda p, x, mb: x),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(*mesh), gradient_accumulation=M, specs=specs, schedule="1f1b")
    lead = (M,) if replicas == 1 else (replicas, M)
    batch = {"x": normal(*lead, ROWS, D, seed=1), "y": normal(*lead, ROWS, D, seed=2)}
    return pipeline, {"body": normal(D, D, seed=4)}, batch


def traced(body, call="value_and_grad", **options):
    """Return a call that traces a pipeline of `body`."""
    pipeline, params, batch = pipeline_of(body, **options)
    fn = jax.grad(pipeline.loss) if call == "grad of loss" else getattr(pipeline, call)
    return lambda: jax.eval_shape(fn, pipeline.shard(params), batch)


def local(name, way="plainly"):
    op = WAYS[way](UNGROUPED[name])
    return traced(lambda p, x, mb: op(x @ p))


def in_branch(axis, decides):
    """Return a call of a concurrent stage with a permute in a branch that only some devices of the mesh take."""
    op = lambda x, mb: lax.cond(decides(mb), lambda x: permuted(x, axis), lambda x: x, x)
    return traced(lambda p, x, mb: lax.pmean(op(x @ p, mb), "ipu"), ipu=ALL_IPUS)


def swapped(p, x, mb):
    return permuted(mb["x"] @ p)


def product(p, x, mb):
    return x @ p


def of_replica(mb):
    return mb["x"].sum() > 0


def of_ipu(mb):
    return lax.axis_index("ipu") == 0


in_backward = lambda p, x, mb: only_backward(permuted)(x @ p)
MEND = "no replica groups", "all_to_all (a shift by k is ", "make the stage concurrent (ipu=ALL_IPUS)"
WAITS = "inside a cond whose predicate may differ between ", "communicate outside of it", "a value that is the same"


@refusals(
    *(
        (local(name), f"'body' on IPU 0 uses {NAMES.get(name, 'swap')} over axis 'replica'", *MEND)
        for name in UNGROUPED
    ),
    *((local("ppermute", way), "'body' on IPU 0 uses ppermute over axis 'replica'", *MEND) for way in WAYS),
    *(
        (traced(swapped, mesh=mesh, recompute=recompute), f"stage {stage!r} on IPU 0 uses ppermute", *MEND)
        for mesh, stage in (((1, 2), "body"), ((2, 1), "body + the loss"), ((4, 2), "body"))
        for recompute in ("all", jax.checkpoint_policies.dots_saveable)
    ),
    (traced(product, "loss", evaluate=swapped), "'body' on IPU 0 uses ppermute over axis 'replica'", *MEND),
    (traced(product, "predict", predict=swapped), "'body' on IPU 0 uses ppermute over axis 'replica'", *MEND),
    (traced(in_backward, "grad of loss"), "'body' on IPU 0 uses ppermute over axis 'replica'", *MEND),
    # over "ipu", too, a permute waits for the IPUs of all replicas
    (in_branch("ipu", of_replica), "ppermute over axis 'ipu'", "same on all replicas", *WAITS),
    (in_branch("replica", of_replica), "ppermute over axis 'replica'", "same on all replicas", *WAITS),
    (in_branch("replica", of_ipu), "ppermute over axis 'replica'", "same on all IPUs", *WAITS),
    (in_branch("ipu", of_ipu), "ppermute over axis 'ipu'", "same on all IPUs", *WAITS),
)
def test_a_collective_that_would_wait_for_others_or_take_their_data_is_refused(call, holds):
    with refused(*holds):
        call()


@pytest.mark.parametrize(
    "allowed",
    [traced(product, evaluate=swapped), traced(product, predict=swapped), traced(in_backward, "loss")],
    ids=["training", "training of what predicts", "evaluation of what has another backward"],
)
def test_what_does_not_run_is_not_refused(allowed):
    allowed()


def twin(batch, neighbours, params):
    """Return the mean loss of all replicas, where `neighbours(h)` is what each gets, by the replicas' dim 0."""
    h = batch["x"] @ params["body"]
    return jnp.mean((h + 0.5 * neighbours(h) - batch["y"]) ** 2)


def ring(h):
    return jnp.roll(h, 1, axis=0)


def pairs(h):
    return h.reshape(2, 2, *h.shape[1:]).sum(1, keepdims=True).repeat(2, axis=1).reshape(h.shape)


def swapped_blocks(h):
    """Return what all_to_all gives: block j of replica i's rows goes to block i of replica j's."""
    blocks = h.reshape(len(h), M, len(h), -1, D)
    return jnp.swapaxes(blocks, 0, 2).reshape(h.shape)


def scattered(h):
    """Return each replica's block of rows of the sum, twice."""
    blocks = h.sum(0).reshape(M, len(h), -1, D)
    return jnp.tile(jnp.swapaxes(blocks, 0, 1), (1, 1, len(h), 1))


RIGHT = [  # on 4 replicas
    (shifted, ring),
    (lambda x: lax.all_to_all(x, "replica", 0, 0, tiled=True), swapped_blocks),
    (lambda x: lax.psum(x, "replica", axis_index_groups=[[0, 1], [2, 3]]), pairs),
    (lambda x: lax.all_gather(x, "replica")[0], lambda h: h[:1].repeat(len(h), 0)),
    (lambda x: jnp.tile(lax.psum_scatter(x, "replica", tiled=True), (4, 1)), scattered),
    (lambda x: lax.pmean(x, "replica"), lambda h: h.mean(0, keepdims=True).repeat(len(h), 0)),
]


@pytest.mark.slow
def test_collectives_with_groups_over_replicas_are_right_in_a_local_stage():
    """Each has its own share in the result, so that none stands in for another."""

    def body(p, x, mb):
        h = x @ p
        return h + sum((k + 1) / 8 * op(h) for k, (op, _) in enumerate(RIGHT))

    def neighbours(h):
        return sum((k + 1) / 4 * of(h) for k, (_, of) in enumerate(RIGHT))

    pipeline, params, batch = pipeline_of(body, mesh=(4, 2))
    assert_equals_plain(pipeline, params, batch, lambda params: twin(batch, neighbours, params))


def product_by_ring(x, w):
    """Return x @ w for the IPU's rows of w, the parts added up by permutes over "ipu"."""
    own = lax.dynamic_slice_in_dim(x, lax.axis_index("ipu") * len(w), len(w), axis=1)
    total = part = own @ w
    for _ in range(lax.axis_size("ipu") - 1):
        part = permuted(part, "ipu")
        total = total + part
    return lax.pmean(total, "ipu")


def layer(p, x, mb):
    return jnp.tanh((mb["x"] if x is None else x) @ p)


def concurrent_layer(p, x, mb):
    h = jnp.tanh(product_by_ring(x, p))
    return h + 0.5 * permuted(h)


def concurrent_loss(p, x, mb):
    return jnp.mean((concurrent_layer(p, x, mb) - mb["y"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_permutes_over_both_axes_are_right_in_concurrent_stages(schedule):
    """All devices run a concurrent stage in the same tick, so they all meet in its permutes, in the same order."""
    places: list[Any] = list(make_schedule(schedule, ipus=2, gradient_accumulation=1).placement)
    places = [*places[:1], None, *places[1:], None]
    names = [f"p{i}" for i in range(len(places))]
    fns = [*(concurrent_layer if place is None else layer for place in places[:-1]), concurrent_loss]
    stages, _ = stages_at(places, fns, names)
    specs = {name: PartitionSpec("ipu") for name, place in zip(names, places, strict=True) if place is None}
    pipeline = Pipeline(stages, mesh=make_mesh(2, 2), gradient_accumulation=M, specs=specs, schedule=schedule)
    params = {name: normal(D, D, seed=i) for i, name in enumerate(names)}
    batch = {"x": normal(2, M, ROWS, D, seed=21), "y": normal(2, M, ROWS, D, seed=22)}

    def dense(params):
        h = batch["x"]
        for name, place in zip(names, places, strict=True):
            h = jnp.tanh(h @ params[name])
            h = h + 0.5 * ring(h) if place is None else h
        return jnp.mean((h - batch["y"]) ** 2)

    assert_equals_plain(pipeline, params, batch, dense)


@pytest.mark.slow
def test_a_permute_over_ipus_in_a_branch_that_one_replica_decides_is_right():
    def body(p, x, mb):
        h = x @ p
        return lax.cond(h.sum() > 0, lambda h: lax.pmean(permuted(h, "ipu"), "ipu"), lambda h: -h, h)

    pipeline, params, batch = pipeline_of(body, ipu=ALL_IPUS, mesh=(1, 2))
    verify(pipeline, pipeline.shard(params), batch)


def test_a_loss_function_on_replicas_may_permute():
    """Replicas of one IPU each run the same program, with nothing else beside it."""
    params, batch = normal(D, D), {"x": normal(4, M, ROWS, D, seed=1), "y": normal(4, M, ROWS, D, seed=2)}

    def loss_fn(w, mb):
        h = mb["x"] @ w
        return jnp.mean((h + 0.5 * permuted(h) - mb["y"]) ** 2)

    replicas = replicate(loss_fn, replication_factor=4, gradient_accumulation=M)
    loss, gradients = replicas.value_and_grad(replicas.shard(params), batch)

    def dense(w):
        h = batch["x"] @ w
        return jnp.mean((h + 0.5 * ring(h) - batch["y"]) ** 2)

    expected, expected_gradients = jax.jit(jax.value_and_grad(dense))(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(gradients, expected_gradients, rtol=1e-4, atol=1e-6)

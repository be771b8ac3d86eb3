"""Test optax optimizers on weights in slots, in shards and in replicas' chunks on IPUs against plain optax.

Gradients are drawn, not computed: each model's weights are updated three times, by all optimizers in one program.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.optimizer.update import ShardedUpdate
from support.refusals import refusals, refused
from support.trained import MODELS, compiled_quickly
from support.updates import STEPS, check, check_model, spread

MATRICES = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def only_first_stage(tree):
    """Return True for the leaves of one group, which share slots with leaves of other groups."""
    first = sorted(tree)[0]
    return {name: jax.tree.map(lambda _, name=name: name == first, tree[name]) for name in tree}


USUAL = {
    "sgd": optax.sgd(0.1),
    "adamw": optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1, mask=MATRICES),
    "lamb": optax.lamb(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True)),
}
OTHERS = {
    "half momentum": optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    "adam": optax.adam(1e-2),
    "lion": optax.lion(1e-2, weight_decay=0.1),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.5),
    "adagrad": optax.chain(optax.clip(0.05), optax.adagrad(0.1)),
    "clipped between": optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.5), optax.scale(-0.1)),
    "masked": optax.masked(optax.adam(1e-2), only_first_stage),
    "two": optax.multi_transform({True: optax.adam(1e-2), False: optax.sgd(0.1, momentum=0.9)}, only_first_stage),
    "decayed by loss": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "zero NaNs": optax.zero_nans(),
    "noisy": optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2),
}


def _counts_fillings(leaf):
    """Use every reduction, on numbers such that filling with zeros would change the result."""
    extremes = jnp.max(-1 - leaf**2) * jnp.min(1 + leaf**2)
    everywhere = jnp.all(leaf**2 < 9) & ~jnp.any(leaf > 9)
    return leaf * jnp.sum((leaf + 1) ** 2) * extremes * jnp.where(everywhere, 1e-3, 2e-3) + 0.01


FILLINGS = {"fillings": optax.stateless(lambda tree, _: jax.tree.map(_counts_fillings, tree))}
FACTORED = {"adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9)}


def matrices_but_of_the_head(tree):
    """Return muon's own dims for the matrices of local stages, and None where it is adam."""
    dims = optax.contrib.MuonDimensionNumbers()
    return {
        name: jax.tree.map(lambda w, name=name: dims if w.ndim == 2 and name != "stage2" else None, tree[name])
        for name in tree
    }


OF_LOCAL_LEAVES = {
    "muon, but of the head": optax.contrib.muon(0.1, muon_weight_dimension_numbers=matrices_but_of_the_head)
}
SORTED = optax.stateless(lambda g, _: jax.tree.map(lambda leaf: jnp.sort(leaf, axis=None).reshape(leaf.shape), g))
OF_WHOLE_LEAVES = {
    "muon": optax.contrib.muon(0.1, weight_decay=0.1),
    "muon, clipped": optax.chain(optax.contrib.muon(0.1, preconditioning="aol"), optax.clip_by_global_norm(0.5)),
    "low rank": optax.contrib.galore(0.1, rank=2),  # keeps projections that are not of the leaf's shape
    "sorted": SORTED,
}


_compiled_quickly = compiled_quickly()


@pytest.mark.fast("unlike local stages-1-names0")
@pytest.mark.parametrize(
    ("model", "replicas", "names"),
    [
        ("unlike local stages", 1, ("adamw",)),
        ("a concurrent head, split unevenly", 1, ("lamb", "adafactor", "muon, but of the head")),
        ("a tied table, split unevenly", 2, ("clipped",)),
        ("a concurrent head, split unevenly", 2, tuple(OTHERS)),
        ("like stages stacked", 1, (*OTHERS, "fillings", "adafactor")),
        ("a tied table, split unevenly", 1, (*OTHERS, "fillings", "adafactor")),
    ],
)
def test_optimizers_equal_plain_optax(model, replicas, names):
    check_model(
        model, replicas, {name: (USUAL | OTHERS | FACTORED | FILLINGS | OF_LOCAL_LEAVES)[name] for name in names}
    )


def with_weights_of(*shapes, ipus, dtype):
    """A pipeline with one matrix and one bias per shape, dealt out over the IPUs, and its weights."""
    rng = np.random.default_rng(2)
    stages = [Stage(lambda p, x, mb: mb, params=f"s{i}", ipu=i % ipus) for i in range(len(shapes))]
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    whole = {f"s{i}": {"w": draw(*shape), "b": draw(shape[-1])} for i, shape in enumerate(shapes)}
    return Pipeline(stages, mesh=make_mesh(1, ipus), schedule="sequential"), whole


UNEVEN, LIKE = ((7, 5), (5, 9), (9, 10), (2, 3, 4), (3, 3)), ((4, 6),) * 4


@pytest.mark.parametrize(
    ("shapes", "ipus", "dtype", "optimizers"),
    [
        (UNEVEN[1:3], 2, "float32", ("sorted",)),
        (UNEVEN[1:3], 2, "float32", ("muon", "sorted")),
        (UNEVEN[:2], 1, "float32", ("muon",)),
        (UNEVEN[1:3], 2, "bfloat16", ("muon",)),
        (UNEVEN[:3], 2, "float32", ("low rank", "sorted")),
        (UNEVEN[1:], 4, "float32", ("muon, clipped",)),
        (LIKE, 4, "float32", tuple(OF_WHOLE_LEAVES)),
        (LIKE, 4, "bfloat16", ("muon", "muon, clipped")),
    ],
)
@pytest.mark.fast("shapes0-2-float32-optimizers0")
def test_leaves_that_one_ipu_has_whole_may_be_mixed(shapes, ipus, dtype, optimizers):
    pipeline, whole = with_weights_of(*shapes, ipus=ipus, dtype=dtype)
    # in half, every product of muon's is rounded
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-6
    check(pipeline, whole, {name: OF_WHOLE_LEAVES[name] for name in optimizers}, tolerance)


def test_a_leaf_that_all_ipus_hold_counts_once_when_replicas_cut_it():
    unused = lambda p, x, mb: mb
    stages = [Stage(unused, params="a", ipu=0), Stage(unused, params="head", ipu=ALL_IPUS)]
    whole = {"a": jnp.ones(3), "head": {"gain": jnp.arange(5.0) + 1, "w": jnp.ones((2, 3))}}
    specs = {"head": {"gain": P(), "w": P(None, "ipu")}}
    check(Pipeline(stages, mesh=make_mesh(2, 2), specs=specs), whole, FILLINGS)


@pytest.mark.fast("2-1")
@pytest.mark.parametrize(("replicas", "ipus"), [(1, 2), (2, 1)])
def test_sums_of_half_leaves_that_lie_in_parts_are_rounded_once(replicas, ipus):
    """257 + 261 is 518, which is 520 in bfloat16; if both parts were rounded first, it would be 516."""
    stages = [Stage(lambda p, x, mb: mb, params="head", ipu=ALL_IPUS)]
    pipeline = Pipeline(stages, mesh=make_mesh(replicas, ipus), specs={"head": P("ipu")})
    whole = {"head": jnp.zeros(522)}
    gradients = {"head": jnp.ones((STEPS, 522)).at[:, 257:261].set(0)}
    total = lambda g: jnp.sum(g.astype(jnp.bfloat16), dtype=jnp.bfloat16)
    of_sum = optax.stateless(lambda tree, _: jax.tree.map(lambda g: jnp.full_like(g, total(g)), tree))
    found, _, _ = spread(pipeline, {"sum": of_sum}, whole, gradients, replicas)["sum"]
    assert set(found["head"].tolist()) == {STEPS * 520.0}


# the analysis of an optimizer


def update_of(optimizer, model="a concurrent head, split unevenly", replicas=1):
    dense, ipus = MODELS[model]()
    params = dense.pipeline(ipus).shard(dense.params)
    return ShardedUpdate(optimizer, Blocks(params.layout, replicas=replicas))


@pytest.mark.parametrize(
    ("optimizer", "local", "split"),
    [("sgd", 1, 1), ("adamw", 1, 1), ("clipped", 2, 2), ("lamb", 1, 3), ("adafactor", 1, 3)],
)
def test_only_norms_are_told_to_other_ipus(optimizer, local, split):
    """And a leaf's own norms only where no IPU has all of the leaf."""
    for model, levels in {"unlike local stages": local, "a concurrent head, split unevenly": split}.items():
        analysis = update_of((USUAL | FACTORED)[optimizer], model).analysis
        assert len(analysis.replicated) == levels
        assert any(analysis.reductions) == (levels > 1)


@pytest.mark.fast("optimizer0-0", "optimizer1-1")
@pytest.mark.parametrize(
    ("optimizer", "switches"),
    # the mask is by group, and in a slot are leaves of all groups; a norm is over the leaf's own elements
    [(USUAL["adamw"], 0), (OTHERS["masked"], 1), (USUAL["lamb"], 2)],
)
def test_leaves_that_are_treated_alike_share_a_program(optimizer, switches):
    update = update_of(optimizer, "unlike local stages")
    state = jax.tree.map(np.asarray, update.init(lambda leaf: jnp.ones(leaf.shape), make_mesh(1, 3)))

    def program(g, w):
        return update.apply(g, state, w, jnp.float32(0))[0]

    arrays = [jnp.ones(block.shape) for block in update.blocks.arrays]
    mapped = jax.shard_map(program, mesh=make_mesh(1, 3), in_specs=P(), out_specs=P(), check_vma=False)
    text = str(jax.make_jaxpr(mapped)(arrays, arrays))
    assert (text.count("cond[") > 0) == (switches > 0)
    if switches < 2:
        assert text.count("all_gather[") == 0


LOCAL = "unlike local stages"
ELEMENTWISE = "use an optimizer that is elementwise"
WHOLE = "or leave the leaf whole (PartitionSpec();"
UNSHARDED = "or shard_optimizer=False"
REPLICAS = "shard_optimizer=True cuts it over 2 replicas"


def _of_head(optimizer):
    """Analyse the optimizer on a leaf of one row, whose columns are split."""
    stages = [Stage(lambda p, x, mb: mb, params="head", ipu=ALL_IPUS)]
    head = Pipeline(stages, mesh=make_mesh(1, 2), specs={"head": P(None, "ipu")})
    layout = head.shard({"head": np.ones((1, 6), np.float32)}).layout
    return ShardedUpdate(optimizer, Blocks(layout, replicas=1))


def _of_leaves(fn):
    return optax.stateless(lambda tree, _: fn(tree))


def _sorted_together(tree):
    flat, unravel = ravel_pytree(tree)
    return unravel(jnp.sort(flat))


def _phases(tree):
    total = sum(jnp.sum(leaf.astype(jnp.complex64)) for leaf in jax.tree.leaves(tree))
    return jax.tree.map(lambda leaf: leaf * total.real, tree)


def _less_the_largest(tree):
    return jax.tree.map(lambda leaf: leaf - leaf.max(0), tree)


@refusals(
    (
        lambda: update_of(FACTORED["adafactor"], replicas=2),
        *("reduce_sum over dims (0,)", "params['stage0']['w'] of shape (7, 5)", REPLICAS, ELEMENTWISE, UNSHARDED),
    ),
    (
        lambda: update_of(OF_WHOLE_LEAVES["muon"]),
        *("its reshape", "params['stage2']['w'] of shape (9, 10)", "dim 1 is split over 4 IPUs", ELEMENTWISE, WHOLE),
    ),
    (
        lambda: update_of(OF_WHOLE_LEAVES["muon"], LOCAL, replicas=2),
        *("its reshape", "params['stage0']['w'] of shape (7, 5)", REPLICAS, ELEMENTWISE, UNSHARDED),
    ),
    (
        lambda: _of_head(_of_leaves(_less_the_largest)),
        *("reduce_max over dims (0,)", "params['head'] of shape (1, 6)", "dim 1 is split over 2", ELEMENTWISE, WHOLE),
    ),
    (
        lambda: update_of(_of_leaves(_sorted_together), LOCAL),
        *("its concatenate", "params['stage0']['b']", "lie apart, on 3 IPUs", "that work leaf by leaf"),
    ),
    (
        lambda: update_of(_of_leaves(_phases), LOCAL),
        *("complex64 of params['stage0']['b']", "only floats, integers and bools", "sent to all IPUs"),
    ),
    (lambda: update_of(_of_leaves(jax.tree.leaves)), "a tree with a different structure", "must keep both"),
)
def test_an_optimizer_that_cannot_be_split_is_refused(call, holds):
    # optax compiles what it computes itself when an optimizer is first traced: a refusal compiles nothing more
    with contextlib.suppress(ValueError):
        call()
    with refused(*holds):
        call()


def test_frozen_leaves_are_masked_and_stay():
    stage = lambda p, x, mb: jnp.sum(p["w"] * p["table"]) + mb
    params = {"a": {"w": jnp.ones(3), "table": jnp.arange(3)}}
    pipeline = Pipeline(
        [Stage(stage, params="a", ipu=1)], mesh=make_mesh(1, 2), frozen={"a": {"w": False, "table": True}}
    )
    blocks = Blocks(pipeline.shard(params).layout, replicas=1)
    assert [leaf.path for leaf in blocks.leaves] == ["params['a']['w']"]
    assert blocks.logical_tree([7]) == {"a": {"w": 7, "table": optax.MaskedNode()}}

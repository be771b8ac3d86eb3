"""Test training where XLA splits weights over a further axis, against plain optax on one device, in float64."""

import itertools
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import Pipeline, Stage, TrainOptions, make_mesh, make_train_step
from ipu_jax.steps import NonFiniteLossWarning
from support.refusals import compilations, refusals, refused
from support.tensor_split import SplitModel, mesh_of, trained_plainly
from support.trained import bits, quick_compiles

UPDATES = 3


@pytest.fixture(autouse=True)
def _in_float64():
    with quick_compiles(), jax.enable_x64(True):
        yield


def kinds(params):
    """Label matrices that are split by rows, by path."""
    label = lambda path, leaf: "decayed" if "down" in jax.tree_util.keystr(path) else "plain"
    return jax.tree.map_with_path(label, params)


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1)),
    "lamb": optax.lamb(1e-2, weight_decay=0.1),
    "muon": optax.contrib.muon(1e-2, weight_decay=0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adafactor without factors": optax.adafactor(1e-2),
    "by path": optax.partition({"decayed": optax.adamw(1e-2, weight_decay=0.1), "plain": optax.sgd(1e-2, 0.9)}, kinds),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), optax.adam(1e-2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"norms": True},
    "divided": {"shard_optimizer": True, "norms": True},
    "averaged": {"ema_decay": 0.9},
    "on the host": {"ema_decay": 0.9, "on_nonfinite": "skip", "offload": ("optimizer",)},
    "skipping": {"on_nonfinite": "skip"},
    "clipped": {"max_gradient_norm": 0.2, "shard_optimizer": True},
    "two per call": {"device_iterations": 2, "shard_optimizer": True, "ema_decay": 0.9, "norms": True},
}
EVEN, UNEVEN = SplitModel(), SplitModel(features=7, hidden=10, outputs=6)
COUNTED, CONCURRENT = SplitModel(weighted=True), SplitModel(features=6, hidden=10, outputs=7, concurrent=True)
MODELS = {"even": EVEN, "uneven": UNEVEN, "counted": COUNTED, "concurrent": CONCURRENT}
SMALL = SplitModel(blocks=1, features=3, hidden=4, outputs=2, micro_batches=2)
SHAPES = ((2, 2, 2), (1, 2, 2))


def cases():
    """Yield optimizers with options on the even model, and uneven leaves in chunks of others."""
    matrices, elementwise = ("adamw", "lamb", "muon", "adafactor"), ("adamw", "lamb", "by path", "masked")
    rows = [("even", *row) for row in itertools.product(matrices, ("plain", "divided", "averaged", "skipping"), SHAPES)]
    rows += list(itertools.product(MODELS, elementwise, ("divided", "two per call"), SHAPES[:1]))
    rows += [(model, "masked", "clipped", SHAPES[0]) for model in MODELS]
    rows += [("even", "adafactor without factors", options, SHAPES[0]) for options in ("plain", "divided", "averaged")]
    rows += [("even", optimizer, "on the host", shape) for optimizer in ("adamw", "lamb", "muon") for shape in SHAPES]
    rows += [("concurrent", "lamb", "on the host", SHAPES[0]), ("uneven", "adafactor", "on the host", SHAPES[1])]
    rows += [("counted", "by path", "skipping", SHAPES[0]), ("uneven", "muon", "plain", SHAPES[1])]
    rows += [("concurrent", optimizer, "plain", SHAPES[1]) for optimizer in ("adamw", "lamb")]
    rows += [("small", "adamw", "two per call", (2, 1, 2))]
    for row in dict.fromkeys(rows):
        model, optimizer, options, shape = row
        divides = OPTIONS[options].get("shard_optimizer", False)
        if divides and (optimizer in ("muon", "adafactor") or shape[0] == 1):
            continue  # these read matrices in one piece, and one replica has nothing to divide
        yield pytest.param(*row, id="-".join([model, optimizer, options, "x".join(map(str, shape))]))


def close(found, expected, bound=1e-13):
    def one(f, e):
        np.testing.assert_allclose(f, e, rtol=0, atol=bound * max(1, np.max(np.abs(e), initial=0)))

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(one, jax.device_get(found), jax.device_get(expected))


def spec_of(leaf):
    """Return the spec of an array, without Nones at its end; an axis of one device splits nothing."""
    sizes = leaf.sharding.mesh.shape
    entries = tuple(None if sizes.get(entry) == 1 else entry for entry in leaf.sharding.spec)
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return entries


def shardings(state):
    return list(map(spec_of, jax.tree.leaves(state)))


def magnitude(arrays):
    return sum(float(np.abs(array).sum()) for array in jax.device_get(jax.tree.leaves(arrays)))


def train(step, state, batches, k=1) -> tuple[Any, list[Any]]:
    """Return the last state and all outputs; assert that a call keeps shardings, uses the old state up, compiles once.

    After the last whole call, a call makes the rest of the updates.
    """
    outputs, first, updates = [], shardings(state), len(batches["x"])
    for start in range(0, updates, k):
        made = min(k, updates - start)
        rows = jax.tree.map(lambda leaf, at=start: leaf[np.arange(at, at + k) % updates], batches)
        batch = rows if k > 1 else jax.tree.map(lambda leaf: leaf[0], rows)
        old, before = state, len(compilations)
        state, told = step(state, batch, updates=made)
        assert start == 0 or len(compilations) == before or made < k  # which slices the outputs
        assert shardings(state) == first
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.params, moments(old.optimizer), old.ema)))
        outputs.append(jax.device_get(told))
    return state, outputs


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer", "options", "shape"), list(cases()))
def test_training_is_that_of_plain_optax_on_the_whole_tree(model, optimizer, options, shape):
    model, optimizer, options, mesh = (
        (MODELS | {"small": SMALL})[model],
        OPTIMIZERS[optimizer],
        OPTIONS[options],
        mesh_of(*shape),
    )
    batches = model.batches(UPDATES)
    if "on_nonfinite" in options:
        batches["x"][1, 2, 3, 4] = np.nan
    expected = trained_plainly(model, optimizer, batches, options)
    step = make_train_step(
        model.pipeline(mesh), optimizer, TrainOptions(**options, outputs="all", weighted=model.weighted)
    )
    k = options.get("device_iterations", 1)
    start = step.init(model.params())
    if "shard_optimizer" in options:
        specs = set(map(spec_of, moments(start.optimizer)))
        assert {spec[0] for spec in specs} == {"replica"}
        assert any("tensor" in spec for spec in specs)
    skips = pytest.warns(NonFiniteLossWarning, match="update 2") if "on_nonfinite" in options else nullcontext()
    with skips:
        state, outputs = train(step, start, model.for_mesh(batches, mesh), k)
        step.check(state)
    whole = step.whole(state)
    close(whole["params"], expected["params"])
    close(jax.tree.leaves(whole["optimizer"]), jax.tree.leaves(expected["optimizer"]))
    flat = lambda name: np.concatenate([np.atleast_1d(getattr(told, name)) for told in outputs])
    close(flat("loss"), np.array(expected["losses"]))
    if "norms" in options:
        close(np.stack([flat("gradient_norm"), flat("parameter_norm")], axis=1), np.array(expected["norms"]))
    if "ema_decay" in options:
        close(whole["ema"], expected["ema"])
    # what pads slots, chunks and shards stays 0
    of_leaves = [leaf for leaf in jax.tree.leaves(whole["optimizer"]) if np.ndim(leaf)]
    assert np.isclose(magnitude(state.params), magnitude(whole["params"]), rtol=1e-12)
    assert magnitude(moments(state.optimizer)) <= magnitude(of_leaves) * (1 + 1e-12)


def moments(optimizer):
    """Return the arrays of an optimizer's state that are kept with weights."""
    both = zip(optimizer.arrays, optimizer.layout.arrays, strict=True)
    return [array for array, of in both if not of.name.startswith("replicated")]


def divided_state(optimizer):
    options = TrainOptions(shard_optimizer=True)
    return make_train_step(EVEN.pipeline(mesh_of(2, 2, 2)), OPTIMIZERS[optimizer], options).init(EVEN.params())


@refusals(
    (
        lambda: divided_state("muon"),
        "its reshape needs params['block0']['down']",
        "in one piece",
        "shard_optimizer=False",
    ),
    (
        lambda: divided_state("adafactor"),
        "its reduce_sum over dims (0,) needs params['block0']['down']",
        "in one piece",
        "shard_optimizer=False",
    ),
)
def test_a_matrix_that_is_needed_in_one_piece_is_not_divided(call, holds):
    with refused(*holds):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_loop_of_ones_own_updates_split_weights(optimizer):
    mesh, optimizer = mesh_of(2, 2, 2), OPTIMIZERS[optimizer]
    pipeline, batches = UNEVEN.pipeline(mesh), UNEVEN.batches(UPDATES)
    updates = pipeline.optimizer(optimizer)
    params = pipeline.shard(UNEVEN.params())
    state = updates.init(params)
    first = shardings((params, state))

    @jax.jit
    def update(params, state, batch):
        loss, gradients = pipeline.value_and_grad(params, batch)
        return *updates.apply(gradients, state, params), loss

    losses = []
    for number in range(UPDATES):
        rows = jax.tree.map(lambda leaf, i=number: leaf[i], UNEVEN.for_mesh(batches, mesh))
        params, state, loss = update(params, state, rows)
        losses.append(float(loss))
        assert shardings((params, state)) == first
    expected = trained_plainly(UNEVEN, optimizer, batches, {})
    close(pipeline.unshard(params), expected["params"])
    close(np.array(losses), np.array(expected["losses"]))


@pytest.mark.slow
def test_the_first_value_that_is_not_finite_is_named():
    step = make_train_step(EVEN.pipeline(mesh_of(1, 2, 2)), optax.sgd(0.1))
    params, batch = EVEN.params(), jax.tree.map(lambda leaf: leaf[0], EVEN.batches(1))
    state = step.init(params)
    assert step.find_nonfinite(state, batch) is None
    batch["x"][2, 1, 3] = np.nan
    where = "update 1, replica 0, micro-batch 2, stage 0, 'block0': batch['x'] is not finite"
    assert str(step.find_nonfinite(state, batch)).startswith(where)
    params["block1"]["down"][-1, 0] = np.inf  # of the last device
    where = "update 1, replica 0, micro-batch 0, stage 1, 'block1': its weight params['block1']['down'] is not finite"
    assert str(step.find_nonfinite(step.init(params), batch)).startswith(where)


COIN_SHAPES = {"rows": (8, 6), "columns": (8, 6), "flat": (64,), "whole": (5, 3)}
COIN_SPECS = {"rows": P("tensor"), "columns": P(None, "tensor"), "flat": P("tensor"), "whole": P()}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_rounding_tosses_the_same_coins_wherever_a_weight_is(replicas):
    """The weights are 1 and their updates half of the distance to the next bfloat16, so that each tosses a coin."""
    weights = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in COIN_SHAPES.items()}

    def total(w):
        return -sum(lax.with_sharding_constraint(leaf, P()).astype(jnp.float32).sum() for leaf in jax.tree.leaves(w))

    def states(tensor):
        stages = [
            Stage(lambda w, x, mb: mb.sum() + total(w), params="first", ipu=0),
            Stage(lambda w, x, mb: x + total(w), params="then", ipu=1),
        ]
        specs = {name: dict(COIN_SPECS) for name in ("first", "then")}
        pipeline = Pipeline(stages, mesh=make_mesh(replicas, 2, tensor=tensor), specs=specs)
        options = TrainOptions(precision="16.16", stochastic_rounding=True, shard_optimizer=replicas > 1)
        step = make_train_step(pipeline, optax.sgd(2.0**-8), options)
        state = step.init({"first": weights, "then": weights}, key=jax.random.key(3))
        batch = np.zeros((1, 1) if replicas == 1 else (replicas, 1, 1), np.float32)
        for _ in range(2):
            state, _ = step(state, batch)
        return step.whole(state)["params"]

    with jax.enable_x64(False):
        one, two = states(1), states(2)
    assert len({float(x) for leaf in jax.tree.leaves(two) for x in np.asarray(leaf, np.float32).flat}) >= 2
    assert bits(one) == bits(two)

"""Test what the pages say of optax on packed weights: elementwise transformations and global norms are right there.

Others are not, since a slot is not a leaf: it has leaves of several stages, shapes and ranks. `Pipeline.optimizer` and
a training step are right for all. The gradients of each update are numbers of the batch, so the oracle is optax on the
whole weights.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from support.refusals import refusals, refused
from support.trained import compiled_quickly

UPDATES = 3
MATRICES = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def weights_of_layers(tree):
    """Return True for leaves whose path ends in "w", as a mask by path does."""
    return jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path[-1:]) == "['w']", tree)


def no_head(tree):
    return {name: jax.tree.map(lambda _, name=name: name != "head", leaves) for name, leaves in tree.items()}


RIGHT = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
    "amsgrad": optax.amsgrad(1e-2),
    "lion": optax.lion(1e-2, weight_decay=0.1),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.5),
    "adagrad": optax.adagrad(0.1),
    "clip": optax.chain(optax.clip(0.05), optax.sgd(0.1)),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "zero_nans": optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
}
WRONG: dict[str, Any] = {
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "novograd": optax.novograd(1e-2),
    "fromage": optax.fromage(1e-2),
    "sm3": optax.sm3(0.1),
    "mask by rank": optax.adamw(1e-2, weight_decay=1.0, mask=MATRICES),
    "mask by path": optax.adamw(1e-2, weight_decay=1.0, mask=weights_of_layers),
}
# what a mask by the names of groups does there is an error, and no other weights
REFUSED = {"mask by group": optax.masked(optax.sgd(0.1), no_head)}


_compiled_quickly = compiled_quickly()


def normal(seed, shapes):
    rng = np.random.default_rng(seed)
    is_shape = lambda s: isinstance(s, tuple)
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), shapes, is_leaf=is_shape)


SHAPES = {"first": {"w": (8, 16), "b": (16,)}, "second": {"w": (16, 4), "v": (4, 1)}, "head": {"w": (4, 5), "b": (5,)}}
SPECS = {"head": {"w": P(None, "ipu"), "b": P("ipu")}}
WEIGHTS = normal(0, SHAPES)
GRADIENTS = [normal(1 + k, SHAPES) for k in range(UPDATES)]


def pipeline(ipus=2, **options):
    """Return a pipeline whose gradients are the batch's numbers: the loss is their product with the weights."""

    def stage(name):
        def fn(p, x, mb):
            products = jax.tree.map(lambda w, g: jnp.vdot(w, g), p, mb[name])
            return sum(jax.tree.leaves(products)) + (0.0 if x is None else x)

        return fn

    def head(p, x, mb):  # on each IPU, its columns of 5; padding stands for no number of the batch
        first = jax.lax.axis_index("ipu") * p["b"].shape[0]
        own = jax.tree.map(
            lambda w, g: jax.lax.dynamic_slice_in_dim(
                jnp.pad(g, [*[(0, 0)] * (g.ndim - 1), (0, -5 % ipus)]), first, w.shape[-1], -1
            ),
            p,
            mb["head"],
        )
        return x + jax.lax.psum(sum(jax.tree.leaves(jax.tree.map(jnp.vdot, p, own))), "ipu")

    stages = [
        Stage(stage("first"), params="first", ipu=0),
        Stage(stage("second"), params="second", ipu=1),
        Stage(head, params="head", ipu=ALL_IPUS),
    ]
    return Pipeline(stages, mesh=make_mesh(1, ipus), specs=SPECS, **options)


def plain(optimizers, weights: Any, gradients) -> Any:
    """Return the weights by each of the optimizers after an update with each of the gradients, by optax on a tree."""
    trained = jax.jit(lambda w: {name: (w, optimizer.init(w)) for name, optimizer in optimizers.items()})(weights)

    @jax.jit
    def update(trained, of_update):
        found = {}
        for name, (w, state) in trained.items():
            changes, state = optimizers[name].update(of_update, state, w)
            found[name] = optax.apply_updates(w, changes), state
        return found

    for of_update in gradients:
        trained = update(trained, of_update)
    return {name: w for name, (w, _) in trained.items()}


def on_sharded(optimizers):
    made = pipeline()
    found = plain(optimizers, made.shard(WEIGHTS), [made.shard(each) for each in GRADIENTS])
    return {name: made.unshard(weights) for name, weights in found.items()}


def difference(found, expected):
    """Return the largest difference of weights, relative to the largest change of any weight."""
    largest = lambda a, b: max(jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)))
    return largest(found, expected) / largest(expected, WEIGHTS)


@pytest.mark.slow
def test_optimizers_are_right_on_packed_weights_if_they_look_at_no_leaf_and_wrong_otherwise():
    """If a wrong one is not, optax on packed weights has become right: say so where the pages warn."""
    expected = plain(RIGHT | WRONG, WEIGHTS, GRADIENTS)
    for name, found in on_sharded(RIGHT | WRONG).items():
        error = difference(found, expected[name])
        assert error < 1e-5 if name in RIGHT else error > 1e-3, name


def test_a_mask_by_the_names_of_groups_is_an_error_on_packed_weights():
    with pytest.raises((AttributeError, ValueError)):
        on_sharded(REFUSED)


def test_a_decay_of_all_weights_changes_frozen_ones_on_packed_weights():
    made = pipeline(frozen={"first": True})
    params, gradients = made.shard(WEIGHTS), made.shard(jax.tree.map(jnp.zeros_like, WEIGHTS))
    found = made.unshard(plain({"decayed": optax.adamw(1e-2, weight_decay=1.0)}, params, [gradients])["decayed"])
    assert not jnp.allclose(found["first"]["w"], WEIGHTS["first"]["w"], rtol=1e-3)


def test_an_optimizer_of_the_pipeline_leaves_frozen_weights_and_their_dtypes_as_they_are():
    decayed = optax.adamw(1e-2, weight_decay=1.0)
    whole = {**WEIGHTS, "second": jax.tree.map(lambda w: w.astype(jnp.bfloat16), WEIGHTS["second"])}
    made = pipeline(frozen={"first": {"w": True, "b": False}})
    optimizer, params = made.optimizer(decayed), made.shard(whole)
    gradients = made.shard(
        GRADIENTS[0] | {"second": jax.tree.map(lambda g: g.astype(jnp.bfloat16), GRADIENTS[0]["second"])}
    )
    new, _ = optimizer.apply(gradients, optimizer.init(params), params)
    assert new.layout == params.layout
    assert jax.tree.map(lambda w: w.dtype, made.unshard(new)) == jax.tree.map(lambda w: w.dtype, whole)
    np.testing.assert_array_equal(made.unshard(new)["first"]["w"], WEIGHTS["first"]["w"])
    assert not jnp.allclose(made.unshard(new)["first"]["b"], WEIGHTS["first"]["b"], rtol=1e-4)


@pytest.mark.slow
def test_a_state_is_saved_whole_and_goes_on_elsewhere():
    transformation = optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1, mask=MATRICES)
    one, two = pipeline(), pipeline(ipus=4)
    optimizer, params = one.optimizer(transformation), one.shard(WEIGHTS)
    state = optimizer.init(params)
    for each in GRADIENTS[:2]:
        params, state = optimizer.apply(one.shard(each), state, params)
    saved, whole = optimizer.whole(state, params), one.unshard(params)
    assert jax.tree.structure(saved) == jax.tree.structure(transformation.init(WEIGHTS))
    other, params = two.optimizer(transformation), two.shard(whole)
    params, _ = other.apply(two.shard(GRADIENTS[2]), other.restore(saved, params), params)
    assert difference(two.unshard(params), plain({"adamw": transformation}, WEIGHTS, GRADIENTS)["adamw"]) < 1e-5


def test_an_optimizer_of_the_pipeline_reads_the_loss():
    """Test losses that stop falling, which halve the later changes: without them the weights are others."""
    transformation = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    made = pipeline()
    optimizer, params = made.optimizer(transformation), made.shard(WEIGHTS)
    state, weights, plain_state = optimizer.init(params), WEIGHTS, transformation.init(WEIGHTS)
    update = jax.jit(transformation.update)
    for each, loss in zip([*GRADIENTS, *GRADIENTS], (3.0, 2.0, 2.0, 4.0, 1.0, 1.0), strict=True):
        params, state = optimizer.apply(made.shard(each), state, params, value=loss)
        changes, plain_state = update(each, plain_state, weights, value=loss)
        weights = optax.apply_updates(weights, changes)
    assert optax.tree.get(plain_state, "scale") < 1
    assert difference(made.unshard(params), weights) < 1e-5


class TwoPipelines:
    """Two pipelines on weights of the same names and shapes, whose stages are on each other's IPUs."""

    def __init__(self):
        def loss(w, x, mb):
            return (0.0 if x is None else x) + jnp.sum(w * mb)

        def made(*ipus):
            stages = [Stage(loss, params=name, ipu=ipu) for name, ipu in zip("ab", ipus, strict=True)]
            return Pipeline(stages, mesh=make_mesh(1, 2))

        self.one, self.other = made(0, 1), made(1, 0)
        self.params, self.others = (p.shard({"a": jnp.ones(3), "b": jnp.zeros(3)}) for p in (self.one, self.other))
        self.optimizer, self.others_optimizer = (p.optimizer(optax.adam(0.1)) for p in (self.one, self.other))
        self.state = self.optimizer.init(self.params)
        assert jax.tree.map(jnp.shape, self.params.arrays) == jax.tree.map(jnp.shape, self.others.arrays)
        as_params: Any = self.params
        self.others_state, self.state_of_optax = (
            self.others_optimizer.init(self.others),
            optax.adam(0.1).init(as_params),
        )
        self.saved, self.whole = self.optimizer.whole(self.state, self.params), {"a": jnp.ones(3)}
        self.narrow, self.losses = jax.tree.map(lambda g: g[..., :1], self.params), jnp.ones(3)
        self.by_loss: Any = self.one.optimizer(optax.contrib.reduce_on_plateau())
        self.state_by_loss = self.by_loss.init(self.params)


@pytest.fixture(scope="module")
def two():
    """Return pipelines, weights and states that the calls below use: what they compile is compiled before."""
    return TwoPipelines()


GIVE = "give what init or restore of this optimizer"
OUTSIDE = "call it outside", "pass the state to the jitted function"
OF_OTHERS = "sharded by a pipeline with other groups or IPUs", "shard them with this one"
OTHER_STATE = "another optimizer's, or of weights in other places", GIVE
NOT_LAID_OUT = "gradients are not laid out as params", "what value_and_grad returned for these params"


@refusals(
    # gradients
    (lambda t: t.optimizer.apply(t.others, t.state, t.params), *NOT_LAID_OUT),
    (lambda t: t.optimizer.apply(t.narrow, t.state, t.params), *NOT_LAID_OUT),
    (lambda t: t.optimizer.apply(t.whole, t.state, t.params), "gradients are a dict", "what value_and_grad returned"),
    # weights
    (lambda t: t.optimizer.apply(t.params, t.state, t.others), *OF_OTHERS),
    (lambda t: t.optimizer.init(t.others), *OF_OTHERS),
    (lambda t: t.optimizer.init(t.whole), "params is a dict", "what pipeline.shard(...) returns"),
    # states
    (lambda t: t.optimizer.apply(t.params, t.others_state, t.params), *OTHER_STATE),
    (lambda t: t.optimizer.whole(t.others_state, t.params), *OTHER_STATE),
    (lambda t: t.one.optimizer(optax.lion(0.1)).apply(t.params, t.state, t.params), *OTHER_STATE),
    (lambda t: t.optimizer.apply(t.params, t.state_of_optax, t.params), "state is a tuple", GIVE),
    # calls inside jax.jit
    (lambda t: jax.jit(t.optimizer.init)(t.params), "init was called inside jax.jit", *OUTSIDE),
    (lambda t: jax.jit(lambda s: t.optimizer.whole(s, t.params))(t.state), "whole was called inside jax.jit", *OUTSIDE),
    (
        lambda t: jax.jit(lambda s: t.optimizer.restore(s, t.params))(t.saved),
        *("restore was called inside jax.jit", *OUTSIDE),
    ),
    # optimizers and losses
    (
        lambda t: t.one.optimizer(optax.adam),
        "optimizer=<function adam",
        "not an optax.GradientTransformation",
        "optax.sgd(",
    ),
    (lambda t: t.optimizer.apply(t.params, t.state, t.params, value=t.losses), "value has shape (3,)", "a scalar"),
    (lambda t: t.by_loss.apply(t.params, t.state_by_loss, t.params), "reads the loss", "value=loss"),
    (lambda t: t.one.optimizer(optax.lbfgs()), "value_fn=", "one loss and its gradients", "without a line search"),
)
def test_an_optimizer_of_the_pipeline_refuses(call, holds, two):
    with refused(*holds):
        call(two)


@pytest.mark.slow
def test_weights_that_another_pipeline_froze_are_updated_with_their_gradients():
    """Unfreezing gradually: gradients are laid out as the weights that they are of, whichever pipeline froze them."""
    frozen, made = pipeline(frozen={"first": True}), pipeline()
    params = frozen.shard(WEIGHTS)
    optimizer = made.optimizer(optax.adam(1e-2))
    _, gradients = made.value_and_grad(params, jax.tree.map(lambda g: g[None], GRADIENTS[0]))
    expected_weights = plain({"adam": optax.adam(1e-2)}, WEIGHTS, GRADIENTS[:1])["adam"]
    for each in (gradients, made.shard(GRADIENTS[0])):
        new, _ = optimizer.apply(each, optimizer.init(params), params)
        assert difference(made.unshard(new), expected_weights) < 1e-5

"""Test what modules sow: a mixture of experts, whose balance loss counts, against Flax's own calls on one device."""

import warnings
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ipu_jax import Pipeline
from ipu_jax.nn import gather_stages, linen_stage, nnx_stage
from support.one_device import assert_trees_close, microbatches_of
from support.refusals import refusals, refused

M, REPLICAS, ROWS, D, EXPERTS = 2, 2, 6, 4, 3
SHAPE = (REPLICAS, M, ROWS, D)
BATCH = {
    "x": np.random.default_rng(0).normal(size=SHAPE).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=SHAPE).astype(np.float32),
}


def routed(x, gate, experts):
    """Return the experts' outputs by the gate's shares, and the balance loss of Switch."""
    shares = jax.nn.softmax(x @ gate)
    chosen = jax.nn.one_hot(shares.argmax(-1), EXPERTS)
    balance = EXPERTS * jnp.sum(shares.mean(0) * chosen.mean(0))
    return jnp.einsum("re,rd,edf->rf", shares * chosen, x, experts), balance


def loss_of(y, microbatch):
    return jnp.mean((y - microbatch["y"]) ** 2)


class LinenExperts(nn.Module):
    normal: bool = False
    sum_up: bool = False

    @nn.compact
    def __call__(self, x, train: bool = True):
        draw = nn.initializers.normal(1.0)
        y, balance = routed(x, self.param("gate", draw, (D, EXPERTS)), self.param("experts", draw, (EXPERTS, D, D)))
        how = {"init_fn": lambda: jnp.float32(0), "reduce_fn": jnp.add} if self.sum_up else {}
        self.sow("losses", "balance", balance, **how)
        self.sow("intermediates", "y", y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.5)(y) if self.normal else y
        return jnp.tanh(y)


class LinenTwice(nn.Module):
    """Sows from two modules, one of which keeps statistics."""

    @nn.compact
    def __call__(self, x, train: bool = True):
        x = LinenExperts(normal=True)(x, train)
        self.sow("router", "z", jnp.stack([x.mean(), (x**2).mean()]))
        return LinenExperts(sum_up=True)(x, train)


BODY, HEAD = LinenTwice(), LinenExperts()


@pytest.fixture(scope="module")
def variables():
    init = lambda module, seed: module.init(jax.random.key(seed), jnp.ones((ROWS, D)))
    return jax.jit(lambda: (init(BODY, 0), init(HEAD, 1)))()


@pytest.mark.slow
def test_evaluation_leaves_out_what_is_sown(variables):
    part = linen_stage(HEAD, variables[1], "x", inputs="x", losses={"losses": 0.3})
    out = part.stage.function("evaluation")(part.params["x"], None, {"x": BATCH["x"][0, 0]})
    assert out.loss is None
    expected: Any = HEAD.apply({"params": part.params["x"]}, BATCH["x"][0, 0])
    np.testing.assert_allclose(out.y, expected, rtol=1e-6)


class BalanceLoss(nnx.Variable):
    pass


class NnxExperts(nnx.Module):
    def __init__(self, seed, normal=False):
        rng = np.random.default_rng(seed)
        self.gate = nnx.Param(jnp.asarray(rng.normal(size=(D, EXPERTS)), jnp.float32))
        self.experts = nnx.Param(jnp.asarray(rng.normal(size=(EXPERTS, D, D)), jnp.float32))
        self.norm = nnx.BatchNorm(D, momentum=0.5, rngs=nnx.Rngs(seed)) if normal else None

    def __call__(self, x):
        y, balance = routed(x, self.gate[...], self.experts[...])
        self.sow(BalanceLoss, "balance", balance)
        self.sow(nnx.Intermediate, "y", y)
        self.sow("z_losses", "z", x.mean())
        return jnp.tanh(y if self.norm is None else self.norm(y))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("called_before", [False, True])
def test_what_nnx_modules_sow_is_added_to_the_loss(called_before):
    body, head = NnxExperts(0, normal=True), NnxExperts(1)
    if called_before:  # what that call sowed must not count
        body.eval()
        head(body(jnp.ones((ROWS, D))))
    losses = {BalanceLoss: 0.5, "z_losses": 0.2}
    parts = [
        nnx_stage(body, "body", ipu=0, inputs="x", losses=losses),
        nnx_stage(head, "head", ipu=1, loss=loss_of, losses=losses),
    ]
    stages, params, state = gather_stages(parts)
    pipeline = Pipeline(stages, schedule="1f1b", gradient_accumulation=M)
    batch = {name: leaf[0] for name, leaf in BATCH.items()}

    def twin(params):
        losses = []
        fresh_body, fresh_head = NnxExperts(0, normal=True), NnxExperts(1)
        nnx.update(fresh_body, params["body"])
        nnx.update(fresh_head, params["head"])
        for microbatch in microbatches_of(batch):
            loss = loss_of(fresh_head(fresh_body(microbatch["x"])), microbatch)
            for module in (fresh_body, fresh_head):
                sown = nnx.to_pure_dict(nnx.pop(module, (BalanceLoss, nnx.variable_type_from_name("z_losses"))))
                loss += 0.5 * sown["balance"][0] + 0.2 * sown["z"][0]
            losses.append(loss)
        return jnp.mean(jnp.stack(losses))

    loss, gradients = jax.jit(jax.value_and_grad(twin))(params)
    actual, sharded, new_state = pipeline.value_and_grad(pipeline.shard(params), batch, pipeline.shard_state(state))
    assert_trees_close((actual, pipeline.unshard(sharded)), (loss, gradients))
    assert jax.tree.structure(pipeline.unshard(new_state)) == jax.tree.structure(state)


# what is dropped


def called(part):
    """Call the stage's function twice, and return the warnings and the last result."""
    groups = (part.params.get("x"), None, {"x": jnp.ones((ROWS, D))})
    state = {"state": part.state["x"]} if part.state else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part.stage.fn(*groups, **state)
        out = part.stage.fn(*groups, **state)
    return [str(warning.message) for warning in caught], out


DROPPED = (
    "the module of stage 'x' sows into {}, which is dropped: give losses={{{}: weight}} to add it to the loss, or "
    "losses={{{}: 0}} to drop it without this warning"
)


@pytest.mark.parametrize("whole", [True, False])
def test_what_linen_modules_sow_in_vain_is_said_once(variables, whole):
    given = variables[0] if whole else {name: variables[0][name] for name in ("params", "batch_stats")}
    part = linen_stage(BODY, given, "x", inputs="x")
    messages, out = called(part)
    assert messages == [DROPPED.format(*[repr(name)] * 3) for name in ("losses", "router")]
    assert jax.tree.structure(out.state) == jax.tree.structure(part.state["x"])
    changed = BODY.apply({name: given[name] for name in ("params", "batch_stats")}, jnp.ones((ROWS, D)), mutable=True)[
        1
    ]
    assert_trees_close(out.state["batch_stats"], changed["batch_stats"])
    assert out.loss is None


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("called_before", [False, True])
def test_what_nnx_modules_sow_in_vain_is_said_once_and_does_not_grow(called_before):
    module = NnxExperts(0, normal=True)
    if called_before:
        module(jnp.ones((ROWS, D)))
    part = nnx_stage(module, "x", inputs="x", losses={"z_losses": 0})
    messages, out = called(part)
    assert messages == [DROPPED.format(*["BalanceLoss"] * 3)]
    assert (out.loss, jax.tree.structure(out.state)) == (None, jax.tree.structure(part.state["x"]))


@pytest.mark.parametrize("losses", [{"losses": 0, "router": 0.0}, {"losses": 0.5, "router": 0}])
def test_a_weight_of_0_drops_without_a_word(variables, losses):
    messages, out = called(linen_stage(BODY, variables[0], "x", inputs="x", losses=losses))
    assert (messages, out.loss is None) == ([], losses["losses"] == 0)


EXPERTS_OF_NNX = NnxExperts(0)
LINEAR = nnx_stage(nnx.Linear(D, D, rngs=nnx.Rngs(0)), "x", inputs="x", losses={BalanceLoss: 1.0})
OF_EXPERTS = {"params": {"gate": np.ones((D, EXPERTS)), "experts": np.ones((EXPERTS, D, D))}}
EXPERTS_PART = linen_stage(HEAD, OF_EXPERTS, "x", inputs="x", losses={"loss": 1.0})
WEIGHT, NOTHING = "of stage 'x' does not give each of them a finite weight", "into which its module sows nothing"


@refusals(
    (
        lambda: linen_stage(HEAD, {}, "x", losses=cast(Any, ("losses",))),
        "losses=('losses',)",
        WEIGHT,
        "{'losses': 0.01}",
    ),
    (lambda: nnx_stage(EXPERTS_OF_NNX, "x", losses={BalanceLoss: float("nan")}), "nan", WEIGHT, "{BalanceLoss: 0.01}"),
    (
        lambda: nnx_stage(EXPERTS_OF_NNX, "x", losses={nnx.Param: 1.0}),
        "not a type of variable",
        "class BalanceLoss(nnx.V",
    ),
    (lambda: called(LINEAR), "stage 'x' names BalanceLoss", NOTHING, "the name that the module's"),
    (lambda: called(EXPERTS_PART), "stage 'x' names 'loss'", NOTHING, "the name that the module's sow has"),
)
def test_losses_that_are_not_there_are_refused(call, holds):
    with refused(*holds):
        jax.eval_shape(call)

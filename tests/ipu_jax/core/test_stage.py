"""Test what a stage may be, and what is refused when a pipeline is traced: what would hang, or is not a loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax import ALL_IPUS, Pipeline, Stage, make_mesh
from support.inputs import ROWS, D, E, mlp
from support.refusals import refusals, refused
from support.ways import WAYS

# a stage itself


def test_a_stage_is_named_for_its_group_its_function_or_as_it_is_told():
    assert Stage(mlp, params="g").name == "g"
    assert Stage(mlp).name == "mlp"
    assert Stage(functools.partial(mlp)).name == "stage"
    assert Stage(mlp, params="g", name="first").name == "first"


@pytest.mark.parametrize("ipu", [np.int64(3), np.uint8(3), np.int32(3)])
def test_a_stage_on_numpys_integer_is_on_that_ipu(ipu):
    stage = Stage(mlp, ipu=ipu)
    assert (stage.ipu, type(stage.ipu), type(stage.place)) == (3, int, int)


SPLIT = PartitionSpec(None, "ipu")
NO_SPEC = "give a PartitionSpec with 'ipu' at most once"


def staged(fn: Any = mlp, **options: Any) -> Stage:
    return Stage(fn, **options)


@refusals(
    (lambda: staged(3), "fn=3", "callable", "(params, x, microbatch)"),
    (lambda: staged(evaluate=3), "evaluate=3", "callable", "called like fn, or None"),
    (lambda: staged(predict=3), "predict=3", "callable", "called like fn, or None"),
    *(
        (lambda ipu=ipu: staged(ipu=ipu), f"ipu={ipu!r}", "an int of at least 0, or ALL_IPUS")
        for ipu in (-1, 1.0, True, "0", None, "ALL_IPUS", np.int64(-1), np.True_, np.float64(1))
    ),
    (lambda: staged(predict_specs=None), "predict_specs holds None", NO_SPEC),
    (lambda: staged(predict_specs="ipu"), "predict_specs holds 'ipu'", NO_SPEC),
    (lambda: staged(predict_specs=PartitionSpec("replica")), f"holds {PartitionSpec('replica')}", NO_SPEC),
    (lambda: staged(predict_specs=[PartitionSpec("ipu", "ipu")]), f"holds {PartitionSpec('ipu', 'ipu')}", NO_SPEC),
    (lambda: staged(predict_specs=SPLIT, ipu=ALL_IPUS), f"{SPLIT} without predict", "give the function as well"),
    (
        lambda: staged(predict_specs={"y": SPLIT}, ipu=1, predict=mlp),
        f"predict_specs={ {'y': SPLIT} } on IPU 1",
        "only a concurrent stage (ipu=ALL_IPUS)",
    ),
)
def test_a_stage_that_there_cannot_be_is_refused(call, holds):
    with refused(*holds):
        call()


# errors, all of them before anything runs: `jax.eval_shape` only traces


def traced(fn, *, last=None, ipu: Any = 0):
    """Trace a pipeline of `fn` on one IPU and a loss on the other."""
    stages = [Stage(fn, params="body", ipu=ipu), Stage(last or (lambda p, x, mb: jnp.mean(x)), ipu=1, name="the loss")]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), specs={"body": PartitionSpec()} if ipu is ALL_IPUS else None)
    params = pipeline.shard({"body": np.ones((D, E), np.float32)})
    return jax.eval_shape(pipeline.value_and_grad, params, np.ones((1, ROWS, D), np.float32))


def collective(name):
    return {
        "psum": lambda y: lax.psum(y, "ipu"),
        "pmax": lambda y: y + lax.pmax(lax.stop_gradient(y), "ipu"),
        "ppermute": lambda y: lax.ppermute(y, "ipu", [(0, 1)]),
        "all_gather": lambda y: lax.all_gather(y, "ipu")[0],
        "all_to_all": lambda y: lax.all_to_all(y[:4], "ipu", 0, 0, tiled=True),
        "reduce_scatter": lambda y: lax.psum_scatter(y[:4], "ipu", tiled=True),
    }[name]


def local(name: str, way: str = "plainly") -> Any:
    op = WAYS[way](collective(name))
    return lambda: traced(lambda p, x, mb: op(mb @ p))


def ending(fn: Any) -> Any:
    return lambda: traced(lambda p, x, mb: mb @ p, last=fn)


MEND = "wait for ever for the IPUs that don't run it", "make the stage concurrent (ipu=ALL_IPUS)", "take the collective"
A_LOSS = "the last stage, 'the loss', returns ", "mean loss, a float scalar, or (loss, aux)"
PRIMITIVES = ("psum", "pmax", "ppermute", "all_gather", "all_to_all", "reduce_scatter")


@refusals(
    *((local(name), f"'body' on IPU 0 uses {name} over axis 'ipu'", *MEND) for name in PRIMITIVES),
    *(
        (local(name, way), f"'body' on IPU 0 uses {name} over axis 'ipu'", *MEND)
        for name in ("psum", "ppermute", "all_gather")
        for way in WAYS
        if way != "plainly"
    ),
    (lambda: traced(lambda p, x, mb: lax.psum(mb @ p, ("replica", "ipu"))), "'body' on IPU 0 uses psum", *MEND),
    (ending(lambda p, x, mb: lax.pmean(x, "ipu").mean()), "'the loss' on IPU 1 uses psum over axis 'ipu'", *MEND),
    (ending(lambda p, x, mb: x.mean(0)), f"returns float32[{E}]", *A_LOSS),
    (ending(lambda p, x, mb: x.sum().astype(jnp.int32)), "returns int32[]", *A_LOSS),
    (ending(lambda p, x, mb: (x > 0).all()), "returns bool[]", *A_LOSS),
    (ending(lambda p, x, mb: (x.mean(1), 0)), f"returns float32[{ROWS}]", *A_LOSS),
    (ending(lambda p, x, mb: 0.5), "returns float:", *A_LOSS),
    (ending(lambda p, x, mb: (x.mean(), 1, 2)), "returns tuple:", *A_LOSS),
    (ending(lambda p, x, mb: (x.mean(),)), "returns tuple:", *A_LOSS),
    (ending(lambda p, x, mb: [x.mean(), 1]), "returns list:", *A_LOSS),
    (ending(lambda p, x, mb: {"loss": x.mean()}), "returns dict:", *A_LOSS),
    (ending(lambda p, x, mb: None), "'the loss' returns None:", "from the last stage the loss"),
)
def test_a_stage_that_would_hang_or_has_no_loss_is_refused(call, holds):
    with refused(*holds):
        call()


@pytest.mark.parametrize(
    ("fn", "ipu"),
    [
        (lambda p, x, mb: mb @ p * lax.axis_index("ipu"), 0),
        (lambda p, x, mb: jax.jit(lambda y: y + lax.axis_index("ipu"))(mb @ p), 0),
        (lambda p, x, mb: mb @ p / lax.axis_size("ipu"), 0),
        (lambda p, x, mb: mb @ p / lax.psum(1, "ipu"), 0),
        (lambda p, x, mb: (mb @ p).sum(axis=0), 0),
        (lambda p, x, mb: lax.pmean(mb @ p, "replica"), 0),
        (lambda p, x, mb: lax.psum(mb @ p, "ipu"), ALL_IPUS),
    ],
)
def test_what_waits_for_no_other_ipu_is_allowed_and_all_ipus_may_wait_for_each_other(fn, ipu):
    assert traced(fn, ipu=ipu)[0].shape == ()


def broken(x):
    raise KeyError("of the stage")


broken_backward = jax.custom_vjp(lambda x: x)
broken_backward.defvjp(lambda x: (x, None), lambda _, g: broken(g))
BROKEN = {
    "plainly": (lambda p, x, mb: mb @ p, broken, "raised in stage 1, 'the loss'"),
    "in jit": (lambda p, x, mb: mb @ p, jax.jit(broken), "raised in stage 1, 'the loss'"),
    "in checkpoint": (lambda p, x, mb: mb @ p, jax.checkpoint(broken), "raised in stage 1, 'the loss'"),
    "in the first stage": (lambda p, x, mb: broken(mb @ p), jnp.mean, "raised in stage 0, 'body'"),
    "in its own backward": (lambda p, x, mb: broken_backward(mb @ p), jnp.mean, "raised in stage 0, 'body'"),
}


@pytest.mark.parametrize(("fn", "last", "note"), BROKEN.values(), ids=BROKEN)
def test_an_error_of_a_stage_keeps_its_message_and_says_which_stage_it_was(fn, last, note):
    with pytest.raises(KeyError, match="of the stage") as caught:
        traced(fn, last=lambda p, x, mb: last(x))
    assert note in caught.value.__notes__


@jax.custom_vjp
def cubed(x):
    return x**3


cubed.defvjp(lambda x: (x**3, x), lambda x, dy: (3 * x**2 * dy,))


@pytest.mark.parametrize("fn", [jax.nn.relu, cubed], ids=["custom_jvp", "custom_vjp"])
def test_a_policy_is_asked_about_functions_with_a_derivative_of_their_own(fn):
    stage = Stage(lambda w, x: fn(x @ w).sum(), ipu=0, recompute=jax.checkpoint_policies.dots_saveable)
    w, x = np.eye(3, dtype=np.float32) * 2, np.arange(-4, 5, dtype=np.float32).reshape(3, 3)
    gradient = jax.jit(jax.grad(stage.checkpointed(stage.fn)))(w, x)
    y = 2 * x
    np.testing.assert_allclose(gradient, x.T @ (y > 0 if fn is jax.nn.relu else 3 * y**2), rtol=1e-6)

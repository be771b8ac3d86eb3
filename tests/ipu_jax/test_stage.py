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
from support.harness import exactly
from support.inputs import ROWS, D, E, mlp

# a stage itself


def test_a_stage_is_named_for_its_group_its_function_or_as_it_is_told():
    assert Stage(mlp, params="g").name == "g"
    assert Stage(mlp).name == "mlp"
    assert Stage(functools.partial(mlp)).name == "stage"
    assert Stage(mlp, params="g", name="first").name == "first"


def test_a_stage_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match=r"^fn=3 is not callable: give a function of \(params, x, microbatch\)$"):
        Stage(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("ipu", [np.int64(3), np.uint8(3), np.int32(3)])
def test_a_stage_on_numpys_integer_is_on_that_ipu(ipu):
    stage = Stage(mlp, ipu=ipu)
    assert (stage.ipu, type(stage.ipu), type(stage.place)) == (3, int, int)


@pytest.mark.parametrize("ipu", [-1, 1.0, True, "0", None, "ALL_IPUS", np.int64(-1), np.True_, np.float64(1)])
def test_a_stage_on_what_is_no_ipu_is_refused(ipu):
    with pytest.raises(ValueError, match=exactly(f"ipu={ipu!r} is not an IPU: give an int of at least 0, or ALL_IPUS")):
        Stage(mlp, ipu=ipu)


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_another_function_that_cannot_be_called_is_refused(name):
    with pytest.raises(ValueError, match=exactly(f"{name}=3 is not callable: give a function called like fn, or None")):
        Stage(mlp, **{name: 3})  # pyright: ignore[reportArgumentType]


SPLIT = PartitionSpec(None, "ipu")
NO_SPEC = "give a PartitionSpec with 'ipu' at most once and None elsewhere, or a tree of them"


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        (None, {}, f"predict_specs holds None: {NO_SPEC}"),
        ("ipu", {}, f"predict_specs holds 'ipu': {NO_SPEC}"),
        (PartitionSpec("replica"), {}, f"predict_specs holds {PartitionSpec('replica')}: {NO_SPEC}"),
        ([PartitionSpec("ipu", "ipu")], {}, f"predict_specs holds {PartitionSpec('ipu', 'ipu')}: {NO_SPEC}"),
        (SPLIT, {"ipu": ALL_IPUS}, f"predict_specs={SPLIT} without predict: give the function as well"),
        (
            {"y": SPLIT},
            {"ipu": 1, "predict": mlp},
            f"predict_specs={ {'y': SPLIT} } on IPU 1: only a concurrent stage (ipu=ALL_IPUS) has outputs that are "
            "split over the IPUs",
        ),
    ],
)
def test_splits_of_outputs_that_there_cannot_be_are_refused(specs, options, message):
    with pytest.raises(ValueError, match=exactly(message)):
        Stage(mlp, predict_specs=specs, **options)


# errors, all of them before anything runs: `jax.eval_shape` only traces


def traced(fn, *, last=None, ipu: Any = 0):
    """Trace a pipeline of `fn` on one IPU and a loss on the other."""
    stages = [
        Stage(fn, params="body", ipu=ipu),
        Stage(last or (lambda p, x, mb: jnp.mean(x)), ipu=1, name="the loss"),
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), specs={"body": PartitionSpec()} if ipu is ALL_IPUS else None)
    params = pipeline.shard({"body": np.ones((D, E), np.float32)})
    return jax.eval_shape(pipeline.value_and_grad, params, np.ones((1, ROWS, D), np.float32))


def collective(name):
    return {
        "psum": lambda y: lax.psum(y, "ipu"),
        "pmax": lambda y: y + lax.pmax(lax.stop_gradient(y), "ipu"),
        "ppermute": lambda y: lax.ppermute(y, "ipu", [(0, 1)]),
        "all_gather": lambda y: lax.all_gather(y, "ipu"),
        "all_to_all": lambda y: lax.all_to_all(y[:4], "ipu", 0, 0, tiled=True),
        "reduce_scatter": lambda y: lax.psum_scatter(y[:4], "ipu", tiled=True),
    }[name]


WAYS = {
    "plainly": lambda op: op,
    "in jit": lambda op: jax.jit(op),
    "in checkpoint": lambda op: jax.checkpoint(op),
    "in cond": lambda op: lambda y: lax.cond(y.sum() > 0, lambda: op(y).sum(), lambda: y.sum()),
    "in scan": lambda op: lambda y: lax.scan(lambda c, _: (c + op(y).sum(), None), y.sum(), None, length=2)[0],
    "in a loop in jit": lambda op: jax.jit(lambda y: lax.fori_loop(0, 2, lambda _, c: c + op(y).sum(), y.sum())),
    "in a loop in cond": lambda op: (
        lambda y: lax.cond(
            y.sum() > 0, lambda: lax.fori_loop(0, 2, lambda _, c: op(y * c).sum(), y.sum()), lambda: y.sum()
        )
    ),
    "in custom_vjp": lambda op: _only_forward(op),
}


def _only_forward(op):
    @jax.custom_vjp
    def wrapped(y):
        return op(y).sum()

    wrapped.defvjp(lambda y: (op(y).sum(), y), lambda y, g: (g * jnp.ones_like(y),))
    return wrapped


def refusal(primitive, stage="body", ipu=0):
    return (
        f"stage {stage!r} on IPU {ipu} uses {primitive} over axis 'ipu', which would wait for ever for the IPUs that "
        "don't run it: make the stage concurrent (ipu=ALL_IPUS), or take the collective out"
    )


CASES = [(name, "plainly") for name in ("psum", "pmax", "ppermute", "all_gather", "all_to_all", "reduce_scatter")] + [
    (name, way) for name in ("psum", "ppermute", "all_gather") for way in WAYS if way != "plainly"
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_collective_in_a_local_stage_is_refused_naming_stage_and_primitive(name, way):
    op = WAYS[way](collective(name))
    with pytest.raises(ValueError, match=exactly(refusal(name))):
        traced(lambda p, x, mb: op(mb @ p))


def test_a_collective_over_both_axes_is_refused():
    with pytest.raises(ValueError, match=exactly(refusal("psum"))):
        traced(lambda p, x, mb: lax.psum(mb @ p, ("replica", "ipu")))


def test_a_collective_in_a_local_last_stage_is_refused():
    with pytest.raises(ValueError, match=exactly(refusal("psum", "the loss", 1))):
        traced(lambda p, x, mb: mb @ p, last=lambda p, x, mb: lax.pmean(x, "ipu").mean())


def test_a_collective_in_the_backward_of_a_local_stage_is_refused():
    @jax.custom_vjp
    def columns_split(y):
        return y

    columns_split.defvjp(lambda y: (y, None), lambda _, g: (lax.psum(g, "ipu"),))
    with pytest.raises(ValueError, match=exactly(refusal("psum"))):
        traced(lambda p, x, mb: columns_split(mb @ p))


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x, mb: mb @ p * lax.axis_index("ipu"),
        lambda p, x, mb: jax.jit(lambda y: y + lax.axis_index("ipu"))(mb @ p),
        lambda p, x, mb: mb @ p / lax.axis_size("ipu"),
        lambda p, x, mb: mb @ p / lax.psum(1, "ipu"),
        lambda p, x, mb: (mb @ p).sum(axis=0),
        lambda p, x, mb: lax.pmean(mb @ p, "replica"),
    ],
    ids=["axis_index", "axis_index in jit", "axis_size", "psum of a constant", "a sum over a dim", "over replicas"],
)
def test_what_waits_for_no_other_ipu_is_allowed(fn):
    loss, _ = traced(fn)
    assert loss.shape == ()


def test_a_concurrent_stage_may_communicate():
    assert traced(lambda p, x, mb: lax.psum(mb @ p, "ipu"), ipu=ALL_IPUS)[0].shape == ()


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x, mb: lax.cond(lax.axis_index("ipu") == 0, lambda y: lax.psum(y, "ipu"), lambda y: y, mb @ p),
        lambda p, x, mb: lax.stop_gradient(
            lax.fori_loop(0, lax.axis_index("ipu"), lambda _, y: lax.psum(y, "ipu"), mb @ p)
        ),
    ],
    ids=["cond", "while"],
)
def test_a_collective_in_a_branch_that_only_some_ipus_take_is_refused(fn):
    with pytest.raises(ValueError, match=r"^stage 'body' "):
        traced(fn, ipu=ALL_IPUS)


LAST = {
    "a vector": (lambda p, x, mb: x.mean(0), f"float32[{E}]"),
    "an int": (lambda p, x, mb: x.sum().astype(jnp.int32), "int32[]"),
    "a bool": (lambda p, x, mb: (x > 0).all(), "bool[]"),
    "a vector and an aux": (lambda p, x, mb: (x.mean(1), 0), f"float32[{ROWS}]"),
    "a Python number": (lambda p, x, mb: 0.5, "float"),
    "three things": (lambda p, x, mb: (x.mean(), 1, 2), "tuple"),
    "one thing in a tuple": (lambda p, x, mb: (x.mean(),), "tuple"),
    "a list": (lambda p, x, mb: [x.mean(), 1], "list"),
    "a dict": (lambda p, x, mb: {"loss": x.mean()}, "dict"),
    "nothing": (lambda p, x, mb: None, "NoneType"),
}


@pytest.mark.parametrize(("fn", "found"), LAST.values(), ids=LAST)
def test_a_last_stage_without_a_scalar_loss_is_refused(fn, found):
    needs = "return the micro-batch's mean loss, a float scalar, or (loss, aux)"
    with pytest.raises(ValueError, match=exactly(f"the last stage, 'the loss', returns {found}: {needs}")):
        traced(lambda p, x, mb: mb @ p, last=fn)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint])
def test_an_error_of_a_stage_says_which_stage_it_was(wrap):
    def broken(p, x, mb):
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights") as caught:
        traced(lambda p, x, mb: mb @ p, last=wrap(broken))
    assert "raised in stage 1, 'the loss'" in caught.value.__notes__


def test_an_error_of_a_first_stage_says_so_and_keeps_its_own_message():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as caught:
        traced(lambda p, x, mb: mb @ p.T)
    assert "raised in stage 0, 'body'" in caught.value.__notes__


def test_an_error_of_a_stages_own_backward_says_which_stage_it_was():
    @jax.custom_vjp
    def broken(y):
        return y

    def backward(_, g):
        raise KeyError("residuals")

    broken.defvjp(lambda y: (y, None), backward)
    with pytest.raises(KeyError, match="residuals") as caught:
        traced(lambda p, x, mb: broken(mb @ p))
    assert "raised in stage 0, 'body'" in caught.value.__notes__


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

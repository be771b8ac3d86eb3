"""Test that `verify` accepts what is right, and otherwise says which leaf has the largest error."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Feed, Outputs, Pipeline, Stage, make_mesh, verify
from ipu_jax.pipelines import VerificationError, VerificationReport, reference_value_and_grad

NUMBER = r"-?\d[\d.]*(?:e-?\d+)?"
rng = np.random.default_rng(0)
X = rng.normal(size=(3, 5, 4)).astype(np.float32)
WEIGHTS = {"a": {"w": rng.normal(size=(4, 4)).astype(np.float32)}, "b": rng.normal(size=(4, 4)).astype(np.float32)}


def body(p, x, mb):
    return jnp.tanh(mb @ p["w"])


def loss(w, x, mb):
    return jnp.mean((x @ w) ** 2)


def pipeline_of(first=body, last=loss, *, reference=None, last_reference=None, **options) -> Pipeline:
    stages = [
        Stage(first, params="a", ipu=0, reference=reference),
        Stage(last, params="b", ipu=1, reference=last_reference),
    ]
    return Pipeline(stages, gradient_accumulation=3, **options)


def verified(pipeline: Pipeline, weights=None, data=X, **options) -> VerificationReport:
    return verify(pipeline, pipeline.shard(WEIGHTS if weights is None else weights), data, **options)


def with_gradient_times(scale: float, fn):
    """Return the same values, with gradients that are `scale` times too large."""

    def wrong(p, x, mb):
        y = fn(p, x, mb)
        return lax.stop_gradient(y) + scale * (y - lax.stop_gradient(y))

    return wrong


# what is right


def test_a_report_of_what_is_right():
    report = verified(pipeline_of())
    expected = float(np.mean((np.tanh(X @ WEIGHTS["a"]["w"]) @ WEIGHTS["b"]) ** 2))
    assert report.loss == pytest.approx(expected, rel=1e-5)
    assert report.reference_loss == pytest.approx(expected, rel=1e-5)
    assert report.loss_error < 1e-6
    assert set(report.gradient_errors) == {"params['a']['w']", "params['b']"}
    assert all(0 <= error < 1e-5 for error in report.gradient_errors.values())


def test_the_report_in_words():
    report = VerificationReport(0.12345678, 0.12345679, 8.1e-8, {"params['a']": 1e-7, "params['b']": 2.34e-6})
    assert report.worst == ("params['b']", 2.34e-6)
    assert str(report) == (
        "loss 0.123457, unsharded 0.123457, relative error 8.1e-08; "
        "2 gradients, largest relative error 2.3e-06 at params['b']"
    )


@pytest.mark.parametrize("leaves", ["abc", "bac", "acb"])
def test_what_is_not_a_number_is_the_worst_wherever_it_stands(leaves):
    errors = {"a": 0.5, "b": math.nan, "c": 2.0}
    report = VerificationReport(1.0, 1.0, 0.0, {leaf: errors[leaf] for leaf in leaves})
    assert str(report).endswith("3 gradients, largest relative error nan at b")


def test_a_pipeline_without_weights_is_verified_by_its_loss():
    report = verified(Pipeline([Stage(lambda p, x, mb: jnp.mean(mb**2))], gradient_accumulation=3), {})
    assert report.worst == ("(no weights)", 0.0)
    assert str(report).endswith("0 gradients, largest relative error 0.0e+00 at (no weights)")


def test_the_unsharded_program_takes_the_reference_and_not_the_function():
    marked = lambda p, x, mb: 7 + 0 * jnp.mean(x)
    pipeline = pipeline_of(last_reference=lambda w, x, mb: marked(w, x, mb) + jnp.mean(w))
    value, gradients = reference_value_and_grad(pipeline, WEIGHTS, X)
    assert value == pytest.approx(7 + float(WEIGHTS["b"].mean()), rel=1e-6)
    np.testing.assert_allclose(gradients["b"], np.full((4, 4), 1 / 16), rtol=1e-6)
    np.testing.assert_array_equal(gradients["a"]["w"], 0)


def test_what_is_no_array_is_refused_as_ever_while_jax_searches_for_a_nan():
    one_device = make_mesh(1, 1)
    with jax.debug_nans(True), Feed({"x": X[0]}, mesh=one_device, micro_batch=5) as feed:
        with pytest.raises(ValueError, match=r"FeedBatch, and must be .* batch.data"):
            reference_value_and_grad(pipeline_of(), WEIGHTS, next(feed))
        with pytest.raises(ValueError, match=r"batch\[0\] is 0\.5"):
            reference_value_and_grad(pipeline_of(), WEIGHTS, [0.5])


def head_stage(fn, reference=None) -> Pipeline:
    stages = [Stage(body, params="a", ipu=0), Stage(fn, params="b", ipu=ALL_IPUS, reference=reference)]
    return Pipeline(stages, mesh=make_mesh(1, 4), specs={"b": P(None, "ipu")}, gradient_accumulation=3)


@pytest.mark.slow
def test_a_reference_reads_the_whole_weights_of_a_concurrent_stage():
    weights = WEIGHTS | {"b": rng.normal(size=(4, 10)).astype(np.float32)}  # 10 columns on 4 IPUs: 3 each

    def head(w, x, mb):
        assert w.shape == (4, 3)
        return lax.psum(jnp.sum((x @ w) ** 2), "ipu") / 50

    def dense(w, x, mb):
        assert w.shape == (4, 10)
        return jnp.mean((x @ w) ** 2)

    assert verified(head_stage(head, dense), weights).worst[1] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "batch", "named"),
    [
        (WEIGHTS | {"b": np.diag(np.array([0, np.nan, 0, 0], np.float32))}, X, "params['b'][1, 1]"),
        (WEIGHTS, np.where(X[2, 3, 1] == X, np.float32("nan"), X), "batch[2, 3, 1]"),
    ],
)
def test_a_nan_in_the_input_is_named_before_jax_searches_for_one(weights, batch, named):
    with jax.debug_nans(True), jax.disable_jit():
        with pytest.raises(ValueError, match=f"^{re.escape(named)} is nan, but jax.debug_nans finds"):
            reference_value_and_grad(pipeline_of(), weights, batch)
        with pytest.raises(FloatingPointError):  # an operation makes it
            reference_value_and_grad(pipeline_of(last=lambda w, x, mb: jnp.sum(jnp.log(-(x**2)))), WEIGHTS, X)


# what is wrong


nan_gradient = jax.custom_vjp(lambda x: x)
nan_gradient.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.nan,))


def with_nan_gradient(p, x, mb):
    return body(jax.tree.map(nan_gradient, p), x, mb)


def with_several_faults(w, x, mb):
    """Return a loss with 4 times the gradient of w and twice that of x: errors of 0.75 for b, and 0.5 for a."""
    of_w = with_gradient_times(4, lambda w, x, mb: loss(w, lax.stop_gradient(x), mb))(w, x, mb)
    return of_w + 2 * (loss(lax.stop_gradient(w), x, mb) - lax.stop_gradient(loss(w, x, mb)))


A, INSTEAD = r"the gradient of params\['a'\]\['w'\] differs from .*", rf"{NUMBER} instead of {NUMBER} at \[\d, \d\]"

AT_FINITE = r"in the unsharded program too, .* finite: .*find_nonfinite\(state, batch\)"


def overflowing() -> Pipeline:
    return Pipeline([Stage(lambda w, x, mb: jnp.sum(jnp.sqrt(mb**2 @ w)), params="w")], gradient_accumulation=3)


def largest_part(w, x, mb):
    """Return a loss that is the same on all IPUs, so that the trace does not show the fault."""
    return lax.pmax(jnp.sum(lax.stop_gradient(x @ w) ** 2), "ipu") / 10


def with_padding(w, x, mb):
    return jnp.log(lax.psum(jnp.sum(jnp.exp(x @ w)), "ipu"))  # exp of a padded column is 1, not 0


def tiny(times: float):
    return lambda w, x, mb: loss(w, x, mb) * times * 1e-6


FAULTS = {
    "an error relative to a tiny loss": (
        lambda: pipeline_of(last=tiny(1), last_reference=tiny(2)),
        r"the loss differs from .* relative error 5\.0e-01",
    ),
    "a gradient where the reference has none": (
        lambda: pipeline_of(last_reference=lambda w, x, mb: lax.stop_gradient(loss(w, x, mb))),
        r"the gradient of params\[.*\] differs from the unsharded program's by [\d.e-]+ relative",
    ),
    "a reference with another loss, told with the report": (
        lambda: pipeline_of(last_reference=lambda w, x, mb: 1.01 * loss(w, x, mb)),
        r"the loss differs from the unsharded program's by more than rtol=1e-05: "
        r"loss [\d.]+, unsharded [\d.]+, relative error 9\.9e-03; "
        r"2 gradients, largest relative error 9\.9e-03 at params\['(a'\]\['w|b)'\]$",
    ),
    "a wrong gradient": (
        lambda: pipeline_of(last_reference=with_gradient_times(1, loss), reference=with_gradient_times(2, body)),
        rf"{A} by 0\.5 relative, more than rtol=1e-05: {INSTEAD} \(1 of 2 gradients differ\): loss ",
    ),
    "of several wrong gradients the worst": (
        lambda: pipeline_of(last_reference=with_several_faults),
        rf"the gradient of params\['b'\] differs from .* by 0\.75 relative, .*: {INSTEAD} \(2 of 2 gradients differ\)",
    ),
    "a gradient that is nan, even beside a large error": (
        lambda: pipeline_of(with_nan_gradient, reference=body, last_reference=with_gradient_times(1e6, loss)),
        rf"{A} by nan relative",
    ),
    "a loss that is nan in the pipeline alone": (
        lambda: pipeline_of(last=lambda w, x, mb: loss(w, x, mb) * jnp.nan, last_reference=loss),
        r"the loss differs from .*: loss nan, unsharded [\d.]+, relative error nan",
    ),
    "a gradient that is nan in both programs": (
        lambda: pipeline_of(with_nan_gradient, reference=with_nan_gradient),
        rf"the gradient of params\['a'\]\['w'\]\[0, 0\] is nan, {AT_FINITE}",
    ),
    "a loss that is nan in both programs": (
        lambda: pipeline_of(last=lambda w, x, mb: loss(w, x, mb) * jnp.nan),
        f"the loss is nan, {AT_FINITE}",
    ),
    "a loss that overflows in both programs": (
        lambda: pipeline_of(last=lambda w, x, mb: loss(w, x, mb) * 1e38 * 1e3),
        f"the loss is inf, {AT_FINITE}",
    ),
    "a gradient that is infinite in both programs": (
        overflowing,
        rf"the gradient of params\['w'\]\[0, 0\] is inf, {AT_FINITE}",
    ),
    "a concurrent stage that takes the largest part for the whole": (
        lambda: head_stage(largest_part),
        "the loss differs",
    ),
    "a concurrent stage that counts its padding": (lambda: head_stage(with_padding), "the loss differs"),
}
WEIGHTS_OF = {overflowing: {"w": np.zeros((4, 4), np.float32)}}


@pytest.mark.fast("of several wrong gradients the worst")
@pytest.mark.parametrize(("wrong", "message"), FAULTS.values(), ids=FAULTS)
def test_what_differs_is_named(wrong, message):
    with pytest.raises(VerificationError, match=f"^{message}") as caught:
        verified(wrong(), WEIGHTS_OF.get(wrong, WEIGHTS | {"b": rng.normal(size=(4, 10)).astype(np.float32)}))
    assert isinstance(caught.value, AssertionError)


@pytest.mark.fast("batch")
@pytest.mark.parametrize(
    ("spoiled", "value", "named"),
    [
        ("batch", np.nan, r"batch\['x'\]\[2, 4, 1\] is nan"),
        ("batch", -np.inf, r"batch\['x'\]\[2, 4, 1\] is -inf"),
        ("params", np.nan, r"params\['b'\]\[1, 2\] is nan"),
        ("state", np.nan, r"state\['s'\] is nan"),
    ],
    ids=["batch", "an infinity", "weights", "state"],
)
def test_a_number_that_is_not_finite_is_named_with_its_place(spoiled, value, named):
    def first(w, x, mb, *, state):
        return Outputs(mb["x"] @ w["w"] + state, state)

    mask = np.full((3, 5, 4), -np.inf, np.float32)  # which does no harm
    inputs = {"batch": X.copy(), "params": WEIGHTS["b"].copy(), "state": np.zeros(())}
    inputs[spoiled][{"batch": (2, 4, 1), "params": (1, 2), "state": ()}[spoiled]] = value
    stages = [Stage(first, params="a", state="s", ipu=0), Stage(loss, params="b", ipu=1)]
    pipeline = Pipeline(stages, gradient_accumulation=3)
    params = pipeline.shard(WEIGHTS | {"b": inputs["params"]})
    state = pipeline.shard_state({"s": np.float32(inputs["state"])})
    batch = {"x": inputs["batch"]} | ({} if value == -np.inf else {"mask": mask})
    with pytest.raises(VerificationError, match=f"^{named}, and so .* is nan, .*: give finite numbers$"):
        verify(pipeline, params, batch, state)


# tolerances


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "other", "rtol"),
    [
        (np.float32, np.float32, "1e-05"),
        (jnp.bfloat16, np.float32, "0.0625"),
        (np.float16, jnp.bfloat16, "0.0625"),
        (np.float16, np.float32, "0.0078125"),
    ],
)
def test_the_default_tolerance_is_of_the_coarsest_weights(dtype, other, rtol):
    weights = {"a": {"w": WEIGHTS["a"]["w"].astype(dtype)}, "b": WEIGHTS["b"].astype(other)}
    with pytest.raises(VerificationError, match=f"^the loss differs from the unsharded .* by more than rtol={rtol}:"):
        verified(pipeline_of(last_reference=lambda w, x, mb: 2 * loss(w, x, mb)), weights)


@pytest.mark.slow
def test_a_tolerance_may_be_given():
    pipeline = pipeline_of(last_reference=lambda w, x, mb: 1.01 * loss(w, x, mb))
    assert verified(pipeline, rtol=0.02).loss_error == pytest.approx(0.01 / 1.01, rel=1e-3)
    with pytest.raises(VerificationError, match=r"by more than rtol=0\.005: "):
        verified(pipeline, rtol=0.005)


# float64


@pytest.mark.slow
def test_float64_throughout_where_jax_has_it():
    with jax.enable_x64(True):
        a, b = np.random.default_rng(0).normal(size=(2, 4, 4))
        x = np.random.default_rng(1).normal(size=(2, 3, 5, 4))
        last = lambda w, x, mb: (jnp.mean((x @ w) ** 2), x)
        stages = [Stage(lambda w, x, mb: jnp.tanh(mb @ w), params="a"), Stage(last, params="b", ipu=1)]
        pipeline = Pipeline(stages, mesh=make_mesh(2, 2), gradient_accumulation=3)
        (loss, aux), gradients = reference_value_and_grad(pipeline, {"a": a, "b": b}, x)
        h = np.tanh(x @ a)
        assert {leaf.dtype for leaf in jax.tree.leaves((loss, aux, gradients))} == {jnp.dtype("float64")}
        np.testing.assert_allclose(loss, np.mean((h @ b) ** 2), rtol=1e-14)
        np.testing.assert_allclose(aux, h, rtol=1e-14)
        dy = 2 * (h @ b) / h.size
        np.testing.assert_allclose(gradients["b"], np.einsum("rmnd,rmne->de", h, dy), rtol=1e-12)
        np.testing.assert_allclose(gradients["a"], np.einsum("rmnd,rmne->de", x, dy @ b.T * (1 - h**2)), rtol=1e-12)
        assert verify(pipeline, pipeline.shard({"a": a, "b": b}), x, rtol=1e-12).worst[1] < 1e-13
        verify(pipeline, pipeline.shard({"a": a, "b": b.astype(np.float32)}), x.astype(np.float32))

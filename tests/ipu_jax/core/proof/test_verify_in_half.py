"""Test `verify` on random models in mixed precision: it accepts the right ones, and finds a gradient that is 1% wrong.

Weights are float32, and stages cast them. One rule of the pipeline multiplies its gradient by a factor of the batch, so
that the right pipeline and the faulty one are one program; `reference` has no fault. So the expected verdict does not
depend on the library.
"""

import re
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ipu_jax import ALL_IPUS, Outputs, Pipeline, Stage, make_mesh, verify
from ipu_jax.core.proof import verification
from ipu_jax.core.proof.verification import in_float32
from ipu_jax.pipelines import VerificationError, VerificationReport

ACTIVATIONS = [jnp.tanh, jax.nn.gelu, jax.nn.relu, jax.nn.silu]


@jax.custom_vjp
def faulty(w, factor):
    return w


faulty.defvjp(lambda w, factor: (w, factor), lambda factor, g: ((g * factor).astype(g.dtype), jnp.zeros_like(factor)))


def normalised(h):
    wide = h.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)).astype(h.dtype)


def perceptron(rng, dtype):
    """Return `layer(w, x)`, with a norm or without one, and a function that draws its weights of width d."""
    activation, has_norm = ACTIVATIONS[rng.integers(4)], rng.integers(2)

    def layer(w, x):
        h = activation(x @ w["w"].astype(dtype) + w["b"].astype(dtype))
        return normalised(h) if has_norm else h

    return layer, lambda d: {"w": rng.normal(size=(d, d)) / np.sqrt(d), "b": 0.1 * rng.normal(size=d)}


def transformer(rng, dtype):
    def layer(w, x):
        q, k, v = (normalised(x) @ w[name].astype(dtype) for name in "qkw")
        scores = (q @ k.T).astype(jnp.float32) / np.sqrt(q.shape[-1])
        x = x + jax.nn.softmax(scores).astype(dtype) @ v
        return x + jax.nn.gelu(normalised(x) @ w["up"].astype(dtype)) @ w["down"].astype(dtype)

    return layer, lambda d: {name: rng.normal(size=(d, d)) / np.sqrt(d) for name in ("q", "k", "w", "up", "down")}


def quantised(rng, dtype):
    """Return a layer whose product is in float32, of numbers rounded to 8 bits."""

    def layer(w, x):
        return jnp.tanh(x.astype(jnp.float32) @ w["w"].astype(dtype).astype(jnp.float32))

    return layer, lambda d: {"w": rng.normal(size=(d, d)) / np.sqrt(d)}


def model(kind: Any, dtype: Any, seed: int) -> Any:
    """Return a verification of a pipeline of 2 to 4 layers over two IPUs by the factor, and the leaf that has it."""
    rng = np.random.default_rng(seed)
    depth, d, rows, m = (int(rng.integers(*bounds)) for bounds in ((2, 5), (8, 40), (4, 20), (1, 4)))
    wrong = int(rng.integers(depth))
    stages, weights = [], {}
    for i in range(depth):
        layer, draw = kind(rng, dtype)

        def run(w, x, mb, layer=layer):
            return layer(w, (mb["x"] if x is None else x).astype(dtype))

        def with_fault(w, x, mb, run=run):
            return run({**w, "w": faulty(w["w"], mb["factor"])}, x, mb)

        stages.append(Stage(with_fault if i == wrong else run, params=f"{i}", ipu=i % 2, reference=run))
        weights[f"{i}"] = draw(d)
    stages.append(
        Stage(lambda w, x, mb: jnp.mean(((x @ w.astype(x.dtype)).astype(jnp.float32) - mb["y"]) ** 2), "head")
    )
    weights["head"] = rng.normal(size=(d, 3)) / np.sqrt(d)
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=m)
    batch = {"x": rng.normal(size=(m, rows, d)), "y": rng.normal(size=(m, rows, 3))}
    as_float32 = lambda tree: jax.tree.map(np.float32, tree)
    params = pipeline.shard(as_float32(weights))

    def verified(factor: float, **options: Any) -> VerificationReport:
        return verify(pipeline, params, as_float32(batch | {"factor": np.full(m, factor)}), **options)

    return verified, f"params['{wrong}']['w']"


def assert_found(verified: Any, leaf: str, factor: float) -> None:
    with pytest.raises(VerificationError, match=f"^{re.escape(f'the gradient of {leaf} differs')}"):
        verified(factor)


SMALL = 11  # of the seeds below: two layers of width 12


def case(kind, dtype, seed):
    return pytest.param(kind, dtype, seed, id=f"{kind.__name__}-{jnp.dtype(dtype).name}-{seed}")


MODELS = [
    *(case(perceptron, jnp.bfloat16, seed) for seed in range(12)),
    *(case(perceptron, jnp.float16, seed) for seed in range(2)),
    *(case(transformer, dtype, seed) for dtype in (jnp.bfloat16, jnp.float16) for seed in range(2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype", "seed"), MODELS)
def test_a_right_model_passes_and_a_gradient_that_is_wrong_by_one_percent_is_found(kind, dtype, seed):
    verified, leaf = model(kind, dtype, seed)
    assert verified(1.0).worst[1] <= 1e-5
    assert_found(verified, leaf, 1.01)


def independent(dtype: Any, weights_dtype: Any, seed: int, factor: float, *, concurrent: bool) -> Any:
    """Return arguments of `verify`: references do the same maths by other operations, and one is wrong by a factor."""
    rng = np.random.default_rng(seed)
    w = {"body": rng.normal(size=(16, 16)) / 4, "rows": rng.normal(size=(16, 16)) / 4, "head": rng.normal(size=(16, 3))}
    batch = {"x": rng.normal(size=(3, 12, 16)).astype("float32"), "y": rng.normal(size=(3, 12, 3)).astype("float32")}

    def body(w, x, mb):
        return jnp.tanh(mb["x"].astype(dtype) @ w.astype(dtype))

    def body_by_parts(w, x, mb):
        w, x = faulty(w, jnp.float32(factor)).astype(dtype), mb["x"].astype(dtype)
        return 2 * jax.nn.sigmoid(2 * (x[:, 8:] @ w[8:] + x[:, :8] @ w[:8])) - 1

    def rows(w, x, mb):
        if not concurrent:
            return x @ w.astype(dtype)
        own = lax.dynamic_slice_in_dim(x, lax.axis_index("ipu") * w.shape[0], w.shape[0], 1)
        return lax.psum(own @ w.astype(dtype), "ipu")

    def head(w, x, mb):
        return jnp.mean(((x @ w.astype(dtype)).astype(jnp.float32) - mb["y"]) ** 2)

    def head_by_dot(w, x, mb):
        error = jnp.einsum("nf,fo->no", x[:, ::-1], w.astype(dtype)[::-1]).astype(jnp.float32) - mb["y"]
        return jnp.vdot(error, error) / error.size

    stages = [
        Stage(body, params="body", ipu=0, reference=body_by_parts),
        Stage(
            rows,
            params="rows",
            ipu=ALL_IPUS if concurrent else 0,
            reference=lambda w, x, mb: (w.astype(dtype).T @ x.T).T,
        ),
        Stage(head, params="head", ipu=1, reference=head_by_dot),
    ]
    specs = {"rows": P("ipu")} if concurrent else None
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=3, specs=specs)
    return pipeline, pipeline.shard(jax.tree.map(lambda leaf: jnp.asarray(leaf, weights_dtype), w)), batch


@pytest.mark.slow
@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize(
    ("dtype", "weights_dtype"),
    [(jnp.bfloat16, jnp.float32), (jnp.float16, jnp.float32), (jnp.bfloat16, jnp.bfloat16)],
)
def test_an_independent_reference_passes_and_is_found_if_it_is_wrong_by_half_a_percent(
    dtype, weights_dtype, concurrent
):
    given = [independent(dtype, weights_dtype, 1, factor, concurrent=concurrent) for factor in (1.0, 1.005)]
    assert verify(*given[0]).worst[1] <= 1e-5
    with pytest.raises(VerificationError, match=r"^the gradient of params\['body'\] differs .* by 0\.0049\d relative"):
        verify(*given[1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_cut_function_that_is_wrong_by_half_a_percent_in_half_precision_is_found(dtype, monkeypatch):
    w = {name: np.float32(np.random.default_rng(i).normal(size=(16, 16)) / 4) for i, name in enumerate("abc")}

    def loss(w, x):
        for name in "abc":
            x = jnp.tanh(x.astype(dtype) @ w[name].astype(dtype))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    x = np.random.default_rng(3).normal(size=(3, 12, 16)).astype("float32")
    pipeline = Pipeline.from_function(loss, w, x[0], ipus=2, gradient_accumulation=3)
    params = pipeline.shard(w)
    assert verify(pipeline, params, x).worst[1] <= 1e-5
    right = verification.unsharded_update

    def wrong(*args):
        value, gradients = right(*args)
        return value, gradients | {"b": 1.005 * gradients["b"]}

    monkeypatch.setattr(verification, "unsharded_update", wrong)
    with pytest.raises(VerificationError, match=r"^the gradient of params\['b'\] differs .* by 0\.0049\d relative"):
        verify(pipeline, params, x)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [0, 1])
def test_whole_numbers_that_roundings_decide_are_compared_in_float32(fault):
    def outputs(y, fault):
        return Outputs(y, aux={"quantised": jnp.round(y * 60).astype(jnp.int8) + fault, "largest": jnp.argmax(y, -1)})

    def layer(w, x, mb):
        return outputs(mb.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), 0)

    def by_rows(w, x, mb):
        x, w = mb.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return outputs(sum(x[:, k : k + 1] * w[k] for k in range(8)), fault)

    stages = [Stage(layer, "a", reference=by_rows), Stage(lambda w, x, mb: jnp.abs(x @ w).mean(), "b")]
    pipeline = Pipeline(stages, gradient_accumulation=2)
    draw = np.random.default_rng(0).normal
    params = pipeline.shard({name: draw(size=(8, 8)).astype(np.float32) / 3 for name in "ab"})
    batch = draw(size=(2, 6, 8)).astype(np.float32)
    if fault:
        with pytest.raises(VerificationError, match=r"^the aux\['a'\]\['quantised'\] differs .* int8 must be equal"):
            verify(pipeline, params, batch)
    else:
        assert verify(pipeline, params, batch).worst[1] <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("activation", [lambda x: jnp.clip(x, -0.3, 0.3), jax.nn.relu6])
def test_a_constant_is_rounded_alike_whether_or_not_its_call_was_inlined(activation):
    def layer(w, x, mb):
        x = (mb if x is None else x).astype(jnp.float16) @ w.astype(jnp.float16)
        return jax.jit(lambda x, high: x * lax.convert_element_type(high, x.dtype))(activation(x), 0.3)

    stages = [Stage(layer, "a", 0), Stage(lambda w, x, mb: jnp.abs(layer(w, x, mb).astype(jnp.float32)).mean(), "b", 1)]
    pipeline = Pipeline(stages, mesh=make_mesh(1, 2), gradient_accumulation=2)
    draw = np.random.default_rng(0).normal
    params = pipeline.shard({name: draw(size=(8, 8)).astype(np.float32) for name in "ab"})
    assert verify(pipeline, params, draw(size=(2, 6, 8)).astype(np.float32)).worst[1] <= 1e-5


def test_a_body_that_two_calls_share_has_the_constant_of_one_alone():
    @jax.jit
    def scaled(x, by):
        return x * lax.convert_element_type(lax.convert_element_type(by, jnp.bfloat16), jnp.float32)

    def program(x, by):
        return scaled(x, np.float32(0.3)) + scaled(x, by)

    args = (np.ones(3, np.float32), np.float32(0.7))
    found = jax.jit(jax.extend.core.jaxpr_as_fun(in_float32(jax.make_jaxpr(program)(*args))))(*args)[0]
    np.testing.assert_allclose(found, np.float32(jnp.bfloat16(0.3)) + args[1], rtol=1e-6)


@pytest.mark.slow
def test_a_right_model_in_float8_passes():
    verified, _ = model(quantised, jnp.float8_e4m3fn, 0)
    verified(1.0)


@pytest.mark.slow
def test_a_tolerance_that_is_given_holds_in_both_comparisons():
    verified, leaf = model(perceptron, jnp.bfloat16, SMALL)
    assert verified(1.05, rtol=0.1).gradient_errors[leaf] == pytest.approx(0.05, abs=0.03)
    with pytest.raises(VerificationError, match=r"more than rtol=0\.001: "):
        verified(1.05, rtol=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [0.0, 1.0])
def test_a_gradient_in_bfloat16_that_cancels_is_judged_by_how_much_its_terms_are_rounded(fault):
    """The gradient of a bias before a batch norm is rounding errors only, and more of them if a stage's end rounds."""

    def body(w, x, mb):
        h = jnp.tanh(mb["x"].astype(jnp.bfloat16) @ w["a"]) @ w["b"] + w["bias"]
        return with_fault(h)

    with_fault = jax.custom_vjp(lambda h: h)
    with_fault.defvjp(lambda h: (h, None), lambda _, dh: ((dh * (1 + fault * (jnp.arange(6) == 1))).astype(dh.dtype),))

    def norm_and_loss(w, x, mb):
        h = x.astype(jnp.float32)
        h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3)
        return jnp.mean((h.astype(jnp.bfloat16) @ w - mb["y"]) ** 2)

    rng = np.random.default_rng(3)
    half = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    reference = lambda w, x, mb: jnp.tanh(mb["x"].astype(jnp.bfloat16) @ w["a"]) @ w["b"] + w["bias"]
    stages = [Stage(body, params="a", ipu=0, reference=reference), Stage(norm_and_loss, params="b", ipu=1)]
    pipeline = Pipeline(stages, gradient_accumulation=3)
    params = pipeline.shard({"a": {"a": half(4, 8), "b": half(8, 6), "bias": half(6)}, "b": half(6, 2)})
    batch = {name: rng.normal(size=(3, 16, n)).astype(np.float32) for name, n in (("x", 4), ("y", 2))}
    if not fault:
        biggest = {
            path: np.abs(np.asarray(leaf, np.float32)).max()
            for path, leaf in jax.tree.leaves_with_path(pipeline.unshard(pipeline.value_and_grad(params, batch)[1]))
        }
        assert min(biggest.values()) < 0.02 * max(biggest.values())
        verify(pipeline, params, batch)
    else:
        with pytest.raises(VerificationError, match=r"^the gradient of params\['a'\]\['b'\] differs"):
            verify(pipeline, params, batch)

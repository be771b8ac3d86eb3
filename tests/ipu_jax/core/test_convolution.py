"""Test convolutions as matrix products against XLA's: output and gradients, also of images smaller than the kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipu_jax.core.convolution import conv_general_dilated, matrix_product_convolution

KINDS = [(1, 1), (1, 2), (3, 1), (3, 2), (5, 1), (7, 2)]


@pytest.mark.fast("3-2-3")
@pytest.mark.parametrize(("kernel", "strides", "size"), [(*kind, size) for kind in KINDS for size in (1, 2, 3, 5)])
def test_matrix_products_are_the_convolution(kernel, strides, size):
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (2, size, size + 1, 3)), jax.random.normal(keys[1], (kernel, kernel, 3, 4))
    padding = ((kernel // 2,) * 2,) * 2
    dense = functools.partial(
        lax.conv_general_dilated,
        window_strides=(strides, strides),
        padding=padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    products = functools.partial(matrix_product_convolution, strides=(strides, strides), padding=padding)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(fn, x, w):
        y, back = jax.vjp(fn, x, w)
        return y, back(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    (found, gradients), (expected, wanted) = with_gradients(products, x, w), with_gradients(dense, x, w)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_off_the_cpu_the_convolution_is_xlas(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    names = lambda: str(
        jax.make_jaxpr(
            lambda x, w: conv_general_dilated(
                x, w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 2)))
    )
    assert "conv_general_dilated" in names()
    monkeypatch.undo()
    assert "conv_general_dilated" not in names()

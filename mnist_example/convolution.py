"""Convolutions that are fast inside XLA's loops on a CPU, where a pipeline runs everything: as matrix products.

XLA's CPU backend brings a convolution into the form that its fast kernel takes only where it stands outside of loops
(jax issue 12868); inside, the gradient of a kernel is computed by plain loops on one core. A 3x3 of 64 channels on 32
images of 7x7, in a `lax.scan`, milliseconds for output, gradient of the input and gradient of the kernel:

    lax.conv_general_dilated    2.6   11.2   107.5
    as matrix products          3.1    2.9     5.6

Where the image has fewer rows than the kernel, as in the last blocks of a ResNet on digits, even the output takes the
plain loops, in loops or not: 41 ms at 2x2 pixels and 256 channels, against 2. Most of a 3x3 kernel also lies outside of
a single pixel: what reads nothing but padding is left out, 8 of its 9 taps.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def conv_general_dilated(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Sequence[tuple[int, int]], **options: Any
) -> jax.Array:
    """Convolve for Flax's `nn.Conv(conv_general_dilated=...)`: matrix products on a CPU, `jax.lax`'s elsewhere.

    Args:
        x: (B, H, W, C).
        kernel: (rows, columns, C, features).
        strides: down and across.
        padding: ((above, below), (left, right)).
        options: the others of `jax.lax.conv_general_dilated`, as Flax gives them for a convolution without dilation
            and groups.

    Returns:
        (B, output rows, output columns, features).
    """
    if jax.default_backend() == "cpu":
        return matrix_product_convolution(x, kernel, tuple(strides), tuple(padding))
    return lax.conv_general_dilated(x, kernel, strides, padding, **options)


def matrix_product_convolution(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], padding: tuple[tuple[int, int], ...]
) -> jax.Array:
    """Return a convolution as patches of the image times the kernel: shapes as in `conv_general_dilated` above.

    For its backward it keeps x and the kernel; the patches, rows x columns as large as x, are gathered again.

    >>> x, kernel = jnp.arange(8.0).reshape(1, 2, 2, 2), jnp.arange(36.0).reshape(3, 3, 2, 2)
    >>> matrix_product_convolution(x, kernel, (2, 2), ((1, 1), (1, 1)))[0, 0, 0].tolist()
    [816.0, 844.0]
    """
    (down, across), (around_rows, around_columns) = strides, padding
    rows, out_rows = _taps(x.shape[1], kernel.shape[0], down, around_rows)
    columns, out_columns = _taps(x.shape[2], kernel.shape[1], across, around_columns)

    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
        patches = [
            padded[:, row : row + (out_rows - 1) * down + 1 : down][
                :, :, column : column + (out_columns - 1) * across + 1 : across
            ]
            for row in rows
            for column in columns
        ]
        taps = kernel[rows.start : rows.stop, columns.start : columns.stop]
        return jnp.concatenate(patches, axis=-1) @ taps.reshape(-1, kernel.shape[-1])

    # F and B stand in loops of their own, across which XLA merges nothing: no need to prevent it
    return jax.checkpoint(product, prevent_cse=False)(x, kernel)


def _taps(size: int, window: int, stride: int, around: tuple[int, int]) -> tuple[range, int]:
    """Along one dim: the kernel's taps that meet a pixel of the image, and how many outputs there are."""
    before, after = around
    outputs = (size + before + after - window) // stride + 1
    first = max(0, before - (outputs - 1) * stride)  # it meets pixel 0 in the last output
    last = min(window - 1, size - 1 + before)  # it meets the last pixel in the first output
    return range(first, last + 1), outputs

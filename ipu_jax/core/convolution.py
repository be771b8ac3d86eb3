"""Compute convolutions as matrix products, which on a CPU are faster inside loops than XLA's own convolutions.

A pipeline runs everything inside loops. XLA's CPU backend has a fast kernel for convolutions, but rewrites a
convolution to the form that the kernel needs only outside loops (jax issue 12868). Inside, plain loops on one core
compute the gradient of a kernel. For a 3x3 kernel of 64 channels on 32 images of 7x7 in a `lax.scan`, these are the
milliseconds for the output, the gradient of the input and the gradient of the kernel:

    lax.conv_general_dilated    2.6   11.2   107.5
    as matrix products          3.1    2.9     5.6

If the image has fewer rows than the kernel, as in the last blocks of a ResNet on digits, XLA computes even the output
with plain loops, inside and outside loops. This takes 41 ms instead of 2 ms at 2x2 pixels and 256 channels. Matrix
products skip taps of the kernel that read only padding: on a single pixel, 8 of the 9 taps of a 3x3 kernel.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def conv_general_dilated(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Sequence[tuple[int, int]], **options: Any
) -> jax.Array:
    """Convolve for Flax's `nn.Conv(conv_general_dilated=...)`: by matrix products on a CPU, by `jax.lax` elsewhere.

    Args:
        x: (B, H, W, C).
        kernel: (rows, columns, C, features).
        strides: (down, across).
        padding: ((above, below), (left, right)).
        options: other options of `jax.lax.conv_general_dilated`, as Flax passes them for a convolution without
            dilation and groups.

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

    For the backward pass it keeps x and the kernel. It does not keep the patches, which are (kernel rows x kernel
    columns) times as large as x. With strides of 1 the backward pass gathers patches of the output's gradient. These
    patches times the kernel are the gradient of x, and x times these patches is the gradient of the kernel. With other
    strides the backward pass gathers the patches of x again.

    >>> x, kernel = jnp.arange(8.0).reshape(1, 2, 2, 2), jnp.arange(36.0).reshape(3, 3, 2, 2)
    >>> matrix_product_convolution(x, kernel, (2, 2), ((1, 1), (1, 1)))[0, 0, 0].tolist()
    [816.0, 844.0]
    """
    if strides == (1, 1):
        return _stride_one_convolution(x, kernel, padding)
    # F and B are in separate loops, and XLA merges nothing across loops, so CSE doesn't need to be prevented
    product = jax.checkpoint(_product, prevent_cse=False, static_argnums=(2, 3))
    return product(x, kernel, strides, padding)


def _product(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], padding: tuple[tuple[int, int], ...]
) -> jax.Array:
    (down, across), (around_rows, around_columns) = strides, padding
    rows, out_rows = _taps(x.shape[1], kernel.shape[0], down, around_rows)
    columns, out_columns = _taps(x.shape[2], kernel.shape[1], across, around_columns)
    patches = _patches(
        jnp.pad(x, ((0, 0), *padding, (0, 0))),
        [slice(row, row + (out_rows - 1) * down + 1, down) for row in rows],
        [slice(column, column + (out_columns - 1) * across + 1, across) for column in columns],
    )
    taps = kernel[rows.start : rows.stop, columns.start : columns.stop]
    return patches @ taps.reshape(-1, kernel.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _stride_one_convolution(x: jax.Array, kernel: jax.Array, padding: tuple[tuple[int, int], ...]) -> jax.Array:
    return _product(x, kernel, (1, 1), padding)


def _stride_one_backward(
    padding: tuple[tuple[int, int], ...], saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    taps, around, windows = [], [], []
    for dim, size in enumerate(x.shape[1:3]):
        before, _ = padding[dim]
        read, outputs = _taps(size, kernel.shape[dim], 1, padding[dim])
        # x[i] was read by output i + before - tap, which is outside dy for some taps
        low = max(0, read[-1] - before)
        taps.append(read)
        around.append((low, max(0, size + before - read[0] - outputs)))
        windows.append([slice(low + before - tap, low + before - tap + size) for tap in read])
    patches = _patches(jnp.pad(dy, ((0, 0), *around, (0, 0))), *windows)
    (rows, columns), (channels, features) = taps, kernel.shape[2:]
    used = kernel[rows.start : rows.stop, columns.start : columns.stop]
    dx = patches @ used.swapaxes(2, 3).reshape(-1, channels)
    products = jnp.einsum("bhwc,bhwp->cp", x, patches).reshape(channels, len(rows), len(columns), features)
    unused = [(read.start, kernel.shape[dim] - read.stop) for dim, read in enumerate(taps)]
    return dx, jnp.pad(products.transpose(1, 2, 0, 3), (*unused, (0, 0), (0, 0)))


_stride_one_convolution.defvjp(
    lambda x, kernel, padding: (_stride_one_convolution(x, kernel, padding), (x, kernel)), _stride_one_backward
)


def _patches(padded: jax.Array, rows: Sequence[slice], columns: Sequence[slice]) -> jax.Array:
    """Return the pixels that each output reads, side by side in the last dim, tap by tap."""
    return jnp.concatenate([padded[:, row][:, :, column] for row in rows for column in columns], axis=-1)


def _taps(size: int, window: int, stride: int, around: tuple[int, int]) -> tuple[range, int]:
    """Return, for one dim, the range of the kernel's taps that read a pixel for some output, and the output count."""
    before, after = around
    outputs = (size + before + after - window) // stride + 1
    first = max(0, before - (outputs - 1) * stride)  # this tap reads pixel 0 for the last output
    last = min(window - 1, size - 1 + before)  # this tap reads the last pixel for the first output
    return range(first, last + 1), outputs

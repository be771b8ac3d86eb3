"""Print an array's value on each IPU, in the forward pass and in the backward pass, from within a `shard_map`.

    y = debug_sharding(x, "hidden")

    hidden, forward, ipu 0 of 2: float32[2,3], differs between IPUs, min -1, max 2, mean 0.5
    hidden, forward, ipu 1 of 2: float32[2,3], differs between IPUs, min 0, max 3, mean 1.25
    hidden, backward, ipu 0 of 2: float32[2,3], the same on all IPUs, min 1, max 1, mean 1
    hidden, backward, ipu 1 of 2: float32[2,3], the same on all IPUs, min 1, max 1, mean 1

Each IPU reduces its part of the value to four words: a checksum of its bits, and the minimum, maximum and mean. One
all-gather collects these, and the first IPU of the axis prints the lines of all IPUs at once, in order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sharded_ops._arguments import array, shown
from sharded_ops._collectives import gather_to_all
from sharded_ops._split import axis_size

# The factor is odd, so multiplying by it loses no bits of a 32-bit word. It is Knuth's 2**32 over the golden ratio.
_MIXER = np.uint32(2654435769)


def debug_sharding(x: jax.Array, name: str, axis: str = "ipu") -> jax.Array:
    """Return `x`, and print its value on each IPU of `axis`; the backward pass prints the cotangent in the same way.

    A line contains the name of the value, the pass, the IPU (after its index on the mesh's other axes, if there are
    any), and the dtype and the shape on that IPU. It says whether all IPUs of the axis hold the same bits (as far as a
    checksum of 32 bits can tell). It ends with the least, greatest and mean element, rounded to float32. If an element
    is NaN, so are all three. Under check_vma=False the cotangent is this IPU's part of it (see the module
    `_collectives`).

    The lines of one value are printed together, in the order of the IPUs. Two values are printed in the order in which
    the program computes them. XLA chooses that order if neither depends on the other. `jax.effects_barrier()` waits
    until everything is printed. Each step of a `lax.scan` and each example of a `jax.vmap` is printed separately.

    Forward and backward: one all-gather of 16 bytes from each IPU. As for any collective, every IPU of the axis must
    take part, so do not call this in a branch that only some IPUs take. Only reverse-mode derivatives are supported.

    Args:
        x: any shape, of a boolean, integer or real dtype.
        name: the text with which each line begins.
        axis: the mesh axis.

    Returns:
        `x`, unchanged.

    Raises:
        ValueError: `x` contains complex numbers or keys, or the enclosing shard_map has no axis `axis`.

    Example:
        >>> from functools import partial
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> mesh = jax.make_mesh((2,), ("ipu",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        >>> op = partial(debug_sharding, name="x")
        >>> sharded = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("ipu"), out_specs=P("ipu")))
        >>> y = sharded(jnp.arange(4.0)); jax.effects_barrier()
        x, forward, ipu 0 of 2: float32[2], differs between IPUs, min 0, max 1, mean 0.5
        x, forward, ipu 1 of 2: float32[2], differs between IPUs, min 2, max 3, mean 2.5
    """
    axis_size(axis)  # raises for an unknown axis
    if not isinstance(name, str):
        raise ValueError(f"name={shown(name)} is not a string: give one for the head of each line")
    x = array("x", x)
    dtype = x.dtype
    if not (dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise ValueError(
            f"{name} has dtype {dtype}, which has no least and greatest element: give debug_sharding a boolean, "
            f"integer or real array, such as x.real and x.imag, or jax.random.key_data(x)"
        )
    if jnp.issubdtype(dtype, jnp.floating):
        return _observed(x, name, axis)
    _print_all(x, name, "forward", axis)  # x is not floating, so it has no cotangent
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _observed(x: jax.Array, name: str, axis: str) -> jax.Array:
    _print_all(x, name, "forward", axis)
    return x


def _observed_backward(name: str, axis: str, _: None, dx: jax.Array) -> tuple[jax.Array]:
    _print_all(dx, name, "backward", axis)
    return (dx,)


_observed.defvjp(lambda x, name, axis: (_observed(x, name, axis), None), _observed_backward)


def _print_all(x: jax.Array, name: str, way: str, axis: str) -> None:
    x = lax.stop_gradient(x)
    wide = x.astype(jnp.float32)
    summary = jnp.stack([wide.min(), wide.max(), wide.mean()]) if x.size else jnp.zeros(3, jnp.float32)
    words = jnp.concatenate([_checksum(x)[None], lax.bitcast_convert_type(summary, jnp.uint32)])
    mesh = jax.sharding.get_abstract_mesh()
    others = [other for other in mesh.manual_axes if other != axis]
    array, is_empty = f"{x.dtype}[{','.join(map(str, x.shape))}]", x.size == 0

    def print_words(words: np.ndarray, index: np.ndarray, places: list[np.ndarray]) -> None:
        if index != 0:
            return
        words = np.ascontiguousarray(words)
        alike = "the same on all IPUs" if np.all(words[:, 0] == words[0, 0]) else "differs between IPUs"
        place = "".join(f"{other} {int(at)}, " for other, at in zip(others, places, strict=True))
        lines = []
        for ipu, (low, high, mean) in enumerate(words[:, 1:].view(np.float32).tolist()):
            values = "empty" if is_empty else f"min {low:.6g}, max {high:.6g}, mean {mean:.6g}"
            lines.append(f"{name}, {way}, {place}{axis} {ipu} of {len(words)}: {array}, {alike}, {values}\n")
        # Printed with one call, so that the lines of two values do not mix.
        print("".join(lines), end="", flush=True)

    places = [lax.axis_index(other) for other in others]
    jax.debug.callback(print_words, gather_to_all(words, axis), lax.axis_index(axis), places)


def _checksum(x: jax.Array) -> jax.Array:
    """Return a uint32 that depends on all bits of `x` and their places.

    Two values that differ in only one word of 32 bits always have different checksums.
    """
    if x.dtype.itemsize < 4:
        # This conversion is exact. Some narrow types cannot be bit-cast to words.
        x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    bits = lax.bitcast_convert_type(x, jnp.uint32).ravel()  # two words for an element of 8 bytes
    places = 2 * lax.iota(jnp.uint32, bits.size) + 1
    return jnp.sum(_mixed(bits) * places, dtype=jnp.uint32)


def _mixed(bits: jax.Array) -> jax.Array:
    """Map 32-bit words one to one, so that the low bits also depend on the high bits, in which floats differ most."""
    bits = (bits ^ (bits >> 16)) * _MIXER
    return bits ^ (bits >> 15)

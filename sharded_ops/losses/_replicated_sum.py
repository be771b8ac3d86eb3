"""Sum over the IPUs of a mesh axis for a result that all IPUs use in the same way, without a reduction backward.

Inside a `shard_map` with check_vma=False, `lax.psum` transposes to another psum, since each IPU might use the result in
its own way. If all IPUs use it in the same way, as they do with a loss, their cotangents are equal. The sum of the
cotangents is then n times one of them, and nothing needs to be sent. Under check_vma=True the types already express
this, and `replicated_sum` is `lax.psum`.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sharded_ops._collectives import is_typed
from sharded_ops._split import axis_size


def replicated_sum(x: jax.Array, axis: str) -> jax.Array:
    """Return the sum of `x` over the IPUs of `axis`, for a program in which every IPU uses the sum in the same way.

    Forward: one all-reduce of `x`. Backward: nothing is sent; under check_vma=False the transpose multiplies by n.

    Args:
        x: any shape and number dtype: this IPU's part of the sum.
        axis: the mesh axis.

    Returns:
        An array like `x`, the same on all IPUs.
    """
    if is_typed(axis):
        return lax.psum(x, axis)
    return _sum_p.bind(x, axes=(axis,), parts=axis_size(axis))


# A custom primitive: nothing else in jax is linear, can be batched, and lets us choose its transpose.
_sum_p = Primitive("replicated_sum")


def _sum(x: jax.Array, *, axes: tuple[str, ...], parts: int) -> jax.Array:
    return lax.psum(x, axes)


def _transpose(cotangent: Any, x: Any, *, axes: tuple[str, ...], parts: int) -> tuple[Any]:
    return (cotangent * parts,)


def _batch(args: Any, dims: Any, **params: Any) -> Any:
    return _sum_p.bind(*args, **params), dims[0]


_sum_p.def_abstract_eval(lambda x, *, axes, parts: x)
mlir.register_lowering(_sum_p, mlir.lower_fun(_sum, multiple_results=False))
ad.deflinear2(_sum_p, _transpose)
batching.primitive_batchers[_sum_p] = _batch

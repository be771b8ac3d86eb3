"""A sum over the IPUs of a mesh axis for results that all of them use alike: what it saves is the reduction backward.

`lax.psum` inside a `shard_map` made with check_vma=False transposes to another psum, since each IPU might have used the
result otherwise. Where all use it alike, as they do with a loss, their cotangents are equal, and n times one of them is
their sum: nothing need be sent. Under check_vma=True the types know as much, and this is `lax.psum`.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sharded_ops._collectives import is_typed
from sharded_ops._split import axis_size


def sum_used_alike(x: jax.Array, axis: str) -> jax.Array:
    """Return the sum of `x` over the IPUs of `axis`, which every IPU must go on to use in the same way.

    Forward: one all-reduce of `x`. Backward: nothing; its transpose is, under check_vma=False, to multiply by n.

    Args:
        x: any shape and number dtype: this IPU's part of the sum.
        axis: the mesh axis.

    Returns:
        As `x`, the same on all IPUs.
    """
    if is_typed(axis):
        return lax.psum(x, axis)
    return _sum_p.bind(x, axes=(axis,), parts=axis_size(axis))


# A primitive, because nothing less is linear, can be batched, and has a transpose of its own choice.
_sum_p = Primitive("sum_used_alike")


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

"""Compute, sum and store in the dtypes of a precision, round weights right on average, and scale the loss for float16.

    "32.32"   everything in float32, or whatever dtype weights and batch have: nothing is cast
    "16.32"   F and B in half; sums, weights and the optimizer's state in float32
    "16.16"   F and B in half; weights and the optimizer's state in half, too

The first number is the precision of the computation, the second the precision of the weights and the optimizer's state.
Frozen weights that are narrower are held as they are.
Sums of gradients over micro-batches and over replicas are in float32 at least.

A loss scale keeps gradients from being too small for float16. Scaled gradients are divided in float32 at least:

    dynamic    scale 32768 ... 1000 good steps ... 65536 -> inf: skip this update, 32768 -> ...

Source of the scale: Micikevicius et al. 2017, "Mixed Precision Training", arXiv:1710.03740, section 3.2.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Batch, Dtype, Function, Key, Params, Tree, Value
from ipu_jax.core.cutting.function import FunctionModel
from ipu_jax.core.cutting.given import frozen_leaves
from ipu_jax.core.options import DynamicScale, TrainOptions
from ipu_jax.core.stage import Stage


def cast_floats(tree: Tree, dtype: Dtype) -> Tree:
    """Return the tree with its float32 and half leaves cast to `dtype`; keys, integers and float64 stay as they are.

    NumPy's float64 is float32 to jax, unless x64 is enabled. A `jax.ShapeDtypeStruct` stays one.
    """
    narrow = (jnp.float32, jnp.bfloat16, jnp.float16)

    def one(leaf: Value) -> Tree:
        own = getattr(leaf, "dtype", None)
        if not isinstance(own, np.dtype) or jax.dtypes.canonicalize_dtype(own, allow_extended_dtype=True) not in narrow:
            return leaf
        return leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)

    return jax.tree.map(one, tree)


def held_in(params: Params, dtype: Dtype, frozen: Sequence[bool]) -> Params:
    """Return weights in the dtype in which a step holds them; frozen ones that are narrower stay as they are.

    Args:
        params: arrays, or their shapes.
        dtype: the dtype.
        frozen: per leaf, whether it is frozen.
    """
    leaves, treedef = jax.tree.flatten(params)
    is_narrower = lambda leaf: getattr(leaf, "dtype", dtype).itemsize < jnp.dtype(dtype).itemsize
    kept = [is_frozen and is_narrower(leaf) for leaf, is_frozen in zip(leaves, frozen, strict=True)]
    return treedef.unflatten(
        [leaf if is_kept else cast_floats(leaf, dtype) for leaf, is_kept in zip(leaves, kept, strict=True)]
    )


def widened(x: Value) -> Value:
    """Return an array in float32 at least: float64 stays float64, and integers become float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def computing_in(stage: Stage, dtype: Dtype) -> Stage:
    """Return a stage that casts its weights, shared ones as well, and micro-batch to `dtype` before it uses them.

    The cast is inside the stage. So the gradients of micro-batches have the weights' own dtype, and are summed in
    float32.
    """

    def within(fn: Function | None) -> Function | None:
        if fn is None:
            return None

        def cast(p: Params, x: Tree, mb: Batch, **asked: Tree) -> Tree:
            asked |= {"shared": cast_floats(asked["shared"], dtype)} if "shared" in asked else {}
            return fn(cast_floats(p, dtype), x, cast_floats(mb, dtype), **asked)

        return cast

    functions = ("fn", "evaluate", "predict", "reference")
    return dataclasses.replace(stage, **{name: within(getattr(stage, name)) for name in functions})


def function_in(function: FunctionModel, dtype: Dtype, held: Tree) -> FunctionModel:
    """Return a cut function that casts its weights, held in `held`, and its micro-batch to `dtype`, cut anew."""
    shapes, frozen = jax.eval_shape(lambda tree: tree, function.source.params), function.source.frozen
    params = held_in(shapes, held, frozen_leaves(frozen, shapes))
    return function.again(params=params, cast=functools.partial(cast_floats, dtype=dtype))


def stochastic_round(x: Value, dtype: Dtype, key: Key) -> Value:
    """Round each element up or down at random, with probabilities that make the result right on average.

    Args:
        x: float32, any shape. Values that are not finite or out of the range of `dtype` are rounded to the nearest.
        dtype: bfloat16 or float16.
        key: a typed key.

    Returns:
        An array of `dtype`. An element of x that `dtype` can represent stays as it is. Communicates nothing.

    Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551, section 3.

    >>> x = jnp.full(10_000, 1 + 2.0**-9)    # a quarter of the way from 1 to the next bfloat16
    >>> rounded = stochastic_round(x, jnp.bfloat16, jax.random.key(0))
    >>> sorted(set(rounded.tolist())), abs(float((rounded > 1).mean()) - 0.25) < 0.02
    ([1.0, 1.0078125], True)
    """
    nearest = x.astype(dtype)
    error = x - nearest.astype(x.dtype)
    towards = jnp.where(error > 0, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(nearest, towards)
    chance = error / (other.astype(x.dtype) - nearest.astype(x.dtype))
    # the chance is 0 where x is exact or its neighbour infinite; where x is not finite it is NaN, which takes nearest
    takes_other = jax.random.uniform(key, x.shape, x.dtype) < chance
    return jnp.where(takes_other, other, nearest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scale:
    """A dynamic loss scale.

    Attributes:
        scale: float32, the factor by which the loss is multiplied.
        good_steps: int32, the number of updates made since the scale last changed.
    """

    scale: Value
    good_steps: Value


def initial_scale(options: TrainOptions) -> Scale | None:
    """Return the dynamic scale that training starts with, or None if the scale never changes."""
    chosen = options.loss_scale
    if not isinstance(chosen, DynamicScale):
        return None
    return Scale(jnp.float32(chosen.initial), jnp.int32(0))


def current_scale(options: TrainOptions, scale: Scale | None) -> Value:
    """Return the factor by which the loss is multiplied."""
    if scale is not None:
        return scale.scale.astype(float)  # under x64 its quotients are as exact as float64 gradients
    return 1.0 if isinstance(options.loss_scale, DynamicScale) else options.loss_scale


def next_scale(chosen: DynamicScale, scale: Scale, finite: Value) -> Scale:
    """Return the scale after an update that was made (if `finite`) or skipped.

    >>> chosen = DynamicScale(initial=8.0, growth_interval=1)
    >>> scale = Scale(jnp.float32(8), jnp.int32(0))
    >>> float(next_scale(chosen, scale, True).scale), float(next_scale(chosen, scale, False).scale)
    (16.0, 4.0)
    """
    good_steps = jnp.where(finite, scale.good_steps + 1, 0)
    grows = good_steps == chosen.growth_interval
    grown = jnp.minimum(scale.scale * chosen.factor, chosen.largest)
    shrunk = jnp.maximum(scale.scale / chosen.factor, chosen.smallest)
    new = jnp.where(finite, jnp.where(grows, grown, scale.scale), shrunk)
    return Scale(new.astype(jnp.float32), jnp.where(grows, 0, good_steps).astype(jnp.int32))

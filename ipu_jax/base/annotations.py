"""Names for values that Python's types cannot describe, or only at length: pytrees, and the parts of traced programs.

To type checkers almost all of them are `Any`: they tell the reader what a parameter holds. An *array* is here whatever
stands for one: a `jax.Array`, a NumPy array, a tracer while jax traces a program, or a `jax.ShapeDtypeStruct` where
shapes suffice. Whoever takes fewer of these says so. Importing this loads no jax.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

Tree: TypeAlias = Any
"""A pytree: state, aux, messages, PartitionSpecs, flags. Its leaves may be anything; None often stands for no tree."""

Params: TypeAlias = Any
"""A pytree of weights, or one like it, such as gradients: of a stage or `{group: pytree}`, whole or one IPU's part."""

Batch: TypeAlias = Any
"""A pytree of arrays whose first dims count examples: of a call, an update, or one micro-batch, (examples, ...)."""

Key: TypeAlias = Any
"""A typed random key, (), as `jax.random.key` returns it. None where nothing draws random numbers."""

Value: TypeAlias = Any
"""One array, such as a leaf of a tree or the value of a variable. Python numbers count as arrays of shape ()."""

Jaxpr: TypeAlias = Any
"""A traced program: `jax.extend.core.Jaxpr`, or `ClosedJaxpr`, which is the same class from jax 0.12 on."""

Eqn: TypeAlias = Any
"""An equation of a jaxpr: `jax.extend.core.JaxprEqn`, or an object with the same fields."""

Var: TypeAlias = Any
"""A variable of a jaxpr: `jax.extend.core.Var`. What an equation reads may be a `Literal` as well."""

Dtype: TypeAlias = Any
"""What jax takes as a dtype: "bfloat16", `jnp.bfloat16` or an `np.dtype`, which may be the dtype of random keys."""

Device: TypeAlias = Any
"""A `jax.Device`, or the description of a device that is not there, from `ipu_jax.chips.describe`."""

Json: TypeAlias = Any
"""Plain data, as JSON has it: None, a bool, a number, a text, or lists and dicts of these with texts as keys."""

Function: TypeAlias = Callable[..., Any]
"""A function whose arguments its caller knows, such as a stage's function, a loss, or a jitted program."""

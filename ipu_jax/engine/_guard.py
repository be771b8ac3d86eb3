"""A guard: a piece of program that runs or does nothing, as a loop of one or no iteration.

A loop rather than `lax.cond`: XLA gives a loop's carry one buffer, in and out, whereas a conditional that passes a
buffer through may copy it. So a gradient accumulator or the stash is never copied (docs/design/guards.md).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Fence:
    """Tie values to the iteration of a guard's loop.

    What does not depend on the iteration, XLA is free to compute before the loop, active or not. `zero` is the
    iteration's number, 0 in the only one, which XLA does not know.
    """

    zero: Any

    def __call__(self, tree: Any) -> Any:
        return lax.optimization_barrier((tree, self.zero))[0]


def guard(active: Any, body: Callable[[Fence, Any], Any], carry: Any) -> tuple[Any, Any]:
    """Return `(1, body(fence, carry))` where `active`, else `(0, carry)`. `body` passes what it reads through its
    `Fence`.
    """

    def once(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, carry = state
        return i + 1, body(Fence(i), carry)

    return lax.while_loop(lambda state: state[0] < active.astype(jnp.int32), once, (jnp.int32(0), carry))

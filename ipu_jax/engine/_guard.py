"""Guard a piece of program: run it or do nothing, as a loop of one iteration or none.

It is a loop rather than a `lax.cond`, because XLA updates a loop's carry in place, whereas a conditional may copy a
buffer that it passes through. So gradient accumulators and the stash are never copied (docs/design/guards.md).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Fence:
    """Make values depend on the iteration of a guard's loop.

    XLA may compute a value that does not depend on the iteration before the loop, whether the guard is active or not.
    `zero` is the number of the iteration: always 0, which XLA does not know.
    """

    zero: Any

    def __call__(self, tree: Any) -> Any:
        return lax.optimization_barrier((tree, self.zero))[0]


def guard(active: Any, body: Callable[[Fence, Any], Any], carry: Any) -> tuple[Any, Any]:
    """Return `(1, body(fence, carry))` where `active`, else `(0, carry)`.

    `body` must pass the values that it reads from outside through its `Fence`.
    """

    def once(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, carry = state
        return i + 1, body(Fence(i), carry)

    return lax.while_loop(lambda state: state[0] < active.astype(jnp.int32), once, (jnp.int32(0), carry))

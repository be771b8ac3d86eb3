"""Guard a piece of program: run it or do nothing, as a loop of one iteration or none.

It is a loop rather than a `lax.cond`, because XLA updates a loop's carry in place, whereas a conditional may copy a
buffer that it passes through. So gradient accumulators and the stash are never copied (docs/design/engine.md).

The loop counts on from the number of guards that were active before it. So XLA cannot run a guard before all earlier
ones. Otherwise it may order an exchange, which waits for all IPUs, before the tasks of some of them: F of IPU 0, the
exchange of its y, F of IPU 1. Each IPU would then wait for the other's task before it begins its own.
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

    Attributes:
        i: the loop's counter. Tied to `zero` instead, an exchange was moved out of its guard by XLA.
        zero: always 0, which XLA does not know.
    """

    i: Any
    zero: Any

    def __call__(self, tree: Any) -> Any:
        return lax.optimization_barrier((tree, self.i))[0]


def guard(guards_run: Any, active: Any, body: Callable[[Fence, Any], Any], carry: Any) -> tuple[Any, Any]:
    """Return `(guards_run + 1, body(fence, carry))` where `active`, else `(guards_run, carry)`.

    `body` must pass the values that it reads from outside through its `Fence`.

    Args:
        guards_run: int32, how many guards were active so far.
        active: bool.
        body: the piece of program.
        carry: what it changes.
    """
    end = guards_run + active.astype(jnp.int32)

    def once(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, carry = state
        return i + 1, body(Fence(i, i - guards_run), carry)

    return lax.while_loop(lambda state: state[0] < end, once, (guards_run, carry))

"""Guard a piece of program: run it or do nothing, as a loop of one or zero iterations.

It is a loop rather than a `lax.cond`, because XLA updates a loop's carry in place, whereas a conditional may copy a
buffer that it passes through. So gradient accumulators and the stash are never copied (docs/design/engine.md).

The loop's counter starts at the number of guards that were active before it. So XLA cannot run a guard before the
earlier guards have run. Otherwise XLA may order an exchange, which waits for all IPUs, before the tasks of some IPUs: F
of IPU 0, the exchange of its y, F of IPU 1. Each IPU would then wait for the other's task before it begins its own.
"""

import dataclasses
from collections.abc import Callable
from typing import Final

import jax.numpy as jnp
from jax import lax

from ipu_jax.base.annotations import Tree, Value

SLOT: Final = "ipu_jax.slot"
"""The name, in the compiled program, of the guards in which IPUs update their own leaves."""


@dataclasses.dataclass(frozen=True)
class Fence:
    """Make values depend on the iteration of a guard's loop.

    XLA may compute any other value before the loop, whether the guard is active or not.

    Attributes:
        i: the loop's counter. XLA moved an exchange out of its guard when it was tied to `zero` instead.
        zero: always 0, which XLA does not know.
    """

    i: Value
    zero: Value

    def __call__(self, tree: Tree) -> Tree:
        return lax.optimization_barrier((tree, self.i))[0]


def guard(guards_run: Value, active: Value, body: Callable[[Fence, Tree], Tree], carry: Tree) -> tuple[Value, Tree]:
    """Return `(guards_run + 1, body(fence, carry))` if `active`, else `(guards_run, carry)`.

    `body` must pass the values that it reads from outside through its `Fence`.

    Args:
        guards_run: int32, the number of guards that were active so far.
        active: bool; if it is a Python bool, there is no loop, and the piece does not count.
        body: the piece of program.
        carry: the values that the body changes.
    """
    if isinstance(active, bool):
        return guards_run, body(Fence(guards_run, jnp.int32(0)), carry) if active else carry
    end = guards_run + active.astype(jnp.int32)

    def once(state: tuple[Value, Tree]) -> tuple[Value, Tree]:
        i, carry = state
        return i + 1, body(Fence(i, i - guards_run), carry)

    return lax.while_loop(lambda state: state[0] < end, once, (guards_run, carry))

"""Bound the steps in flight, so that a loop that never waits cannot queue steps without bound."""

import collections
from typing import Any

import jax
from jax.core import Tracer

from ipu_jax.base import facts
from ipu_jax.base.annotations import Tree
from ipu_jax.base.checks import check_count

_outstanding: "collections.deque[tuple[InFlight, list[Any]]]" = collections.deque()
"""The steps of this process, the oldest first: all its loops share the devices, and so one bound."""


class InFlight:
    """Bounds the number of steps that are dispatched but not finished.

    jax dispatches without waiting. On the CPU backend some 45 queued steps with collectives exhaust the threads that
    XLA's rendezvous needs, and the process aborts or hangs. So a loop that runs steps must pass each step to `admit`.

    A step is remembered by its outputs of up to a kilobyte, or by its smallest output. This is enough, since all
    outputs of one computation become ready together, and a scalar does not keep weights alive. An output that was
    donated to a later step (`donate_argnums`) can no longer be waited for. If a step has no other output, the window
    waits for the next step that has one. That is safe but without overlap, so include an output that is not donated,
    such as the loss.

    All steps of the process count, whichever loop, `Pipeline` or `TrainStep` has dispatched them.

    Args:
        limit: the number of steps that may be outstanding after `admit` returns, at least 1.

    Raises:
        ValueError: `limit` is not a positive int.

    >>> window = InFlight(limit=2)
    >>> step = jax.jit(lambda x: x + 1)
    >>> x = 0
    >>> for _ in range(100):
    ...     x = step(x)
    ...     window.admit(x)
    >>> int(x), window.outstanding
    (100, 2)
    """

    def __init__(self, limit: int = 4):
        self._limit = check_count("limit", limit)
        self._error: Exception | None = None
        facts.say(lambda listener: listener.stepping())

    @property
    def limit(self) -> int:
        """Return the number of steps that may be outstanding."""
        return self._limit

    @property
    def outstanding(self) -> int:
        """Return the number of steps that were admitted here and not yet waited for."""
        return sum(window is self for window, _ in _outstanding)

    def begin(self, arguments: Tree = None) -> None:
        """Tell poprun, if it runs this process, that a step is about to be dispatched; `admit` takes its outputs.

        A dispatch may wait for other instances. If instances are stuck, they wait for the instance that has begun the
        fewest steps. Without this call, `admit` counts the step as begun. Inside a `jax.jit` nothing is dispatched yet,
        so this does nothing.

        Args:
            arguments: the arguments of the step, a pytree.
        """
        facts.say(lambda listener: listener.dispatching(self, arguments))

    def admit(self, outputs: Tree, *, updates: int = 1, samples: int = 0) -> None:
        """Remember a step that was just dispatched; wait for the oldest steps until `limit` are outstanding.

        Inside a `jax.jit` nothing is dispatched yet, so this does nothing.

        Args:
            outputs: the results of the step, a pytree that contains a `jax.Array`.
            updates: how many weight updates the step makes, for `ipu-monitor` and traces.
            samples: how many examples go into them, on all instances together; 0 if unknown.

        Raises:
            ValueError: `outputs` contains no array that can be waited for.
        """
        arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
        if any(isinstance(array, Tracer) for array in arrays):
            return
        leaves = [array for array in arrays if not array.is_deleted()]
        if not leaves:
            raise ValueError("outputs hold no live jax.Array to wait for: give what the step returned, with its loss")
        error, self._error = self._error, None
        if error is not None:
            raise error
        smallest = min(leaf.nbytes for leaf in leaves)
        kept = [leaf for leaf in leaves if leaf.nbytes <= max(smallest, 1024)]
        _outstanding.append((self, kept))
        facts.say(lambda listener: listener.dispatched(self, kept, updates, samples))
        while len(_outstanding) > self._limit:
            self._wait_for_oldest()
            facts.say(lambda listener: listener.waited())

    def _wait_for_oldest(self) -> None:
        while _outstanding:
            window, outputs = _outstanding.popleft()
            live = [output for output in outputs if not output.is_deleted()]
            if live:
                try:
                    live[0].block_until_ready()
                except Exception as error:
                    if window is self:
                        raise
                    window._error = error  # of another loop, whose next step raises it
                return

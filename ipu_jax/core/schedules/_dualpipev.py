"""The order of DualPipeV: two stages per IPU, folded, and F of one paired with B of the other.

IPU r of S does these tasks: F0 and B0 of its stage on the way there, F1 and B1 of its stage on the way back. W follows
its B at once. Z is a B whose W is postponed, and a W alone is the oldest postponed W.

    2 (S-r-1)       x  F0
    r+1             x  F0 F1
    S-r-1           x  Z1 W F1
    M - 2S + r+1    x  F0 B1 F1 B0      the pairs F0 B1 and F1 B0 are what DeepSeek overlaps
    S-r-1           x  B1 F1 B0
    r+1             x  B1 B0            Z instead of B in the second half
    S-r-1           x  W Z0
    r+1             x  W

With fewer than 2S micro-batches, the order is the order for 2S without the surplus tasks.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, and `dualpipev.py` of its DualPipe repository.
"""

import numpy as np

from ipu_jax.core.schedules._line import Line
from ipu_jax.core.schedules._run import Ints, Rule, follow

# numbers of kind and chunk (0 on the way there, 1 on the way back), as `Progress` numbers two segments of an IPU
_F0, _F1, _B0, _B1, _W0, _W1 = range(6)
_Z0, _Z1, _W = range(6, 9)  # B whose W is postponed, and the oldest postponed W


def dualpipev_rule(line: Line) -> Rule:
    """Return the rule that follows DualPipeV's order on a folded line."""
    rounds = max(map(len, line.on.values()), default=0)
    orders = [
        _segments(_order(len(line.on), rank, line.micro_batches), len(mine), rounds)
        for rank, mine in enumerate(line.on.values())
    ]
    return follow(orders)


def _segments(order: Ints, count: int, rounds: int) -> Ints:
    """Return an IPU's order in numbers of its `rounds` segments. Where a line turns, both chunks can be one segment."""
    kinds, chunks = order // 2, order % 2
    if count == 2:
        return order
    # the one segment runs a micro-batch when the first of its two chunks would
    first = np.zeros(len(order), np.bool_)
    for kind in range(3):
        there, back = (np.flatnonzero((kinds == kind) & (chunks == chunk)) for chunk in (0, 1))
        first[np.minimum(there, back)] = True
    return kinds[first] * rounds


def _order(ipus: int, rank: int, micro_batches: int) -> Ints:
    before, upto = ipus - rank - 1, rank + 1
    pairs = max(micro_batches, 2 * ipus) - 2 * ipus + upto
    last = np.tile([_B1, _B0], upto)
    last[upto:] += _Z0 - _B0
    steps = np.concatenate(
        [
            np.tile([_F0, _F0], before),
            np.tile([_F0, _F1], upto),
            np.tile([_Z1, _W, _F1], before),
            np.tile([_F0, _B1, _F1, _B0], pairs),
            np.tile([_B1, _F1, _B0], before),
            last,
            np.tile([_W, _Z0], before),
            np.tile([_W], upto),
        ]
    )
    postponed = steps[(steps == _Z0) | (steps == _Z1)]
    steps[steps == _W] = postponed - _Z0 + _W0  # first in, first out
    whole = (steps == _B0) | (steps == _B1)
    steps = np.repeat(steps, 1 + whole)
    places = np.flatnonzero(whole) + np.arange(1, 1 + whole.sum())
    steps[places] += _W0 - _B0
    steps[(steps == _Z0) | (steps == _Z1)] -= _Z0 - _B0
    kept = np.ones(len(steps), np.bool_)
    for number in range(_Z0):
        kept[np.flatnonzero(steps == number)[micro_batches:]] = False
    return steps[kept]

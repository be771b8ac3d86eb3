"""Rules that choose what each IPU does next. `_run` simulates the run in which they choose."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from ipu_jax.core.schedules._line import Line
from ipu_jax.core.schedules._run import NONE, Choices, Ints, Mask, Progress, Rule, first_of, follow
from ipu_jax.core.schedules._timetable import Kind


def _gpipe(progress: Progress) -> Choices:
    """Choose F until all are done, then B."""
    return np.where(_forward_left(progress), progress.nearest("F", progress.ready["F"]), progress.oldest("B"))


def _forward_left(progress: Progress) -> Mask:
    """Return, per IPU, whether it has an F left to begin."""
    left = (progress.begun["F"] < progress.line.micro_batches) & (progress.segment >= 0)
    return np.any(left, axis=0)


def _one_f_one_b(progress: Progress) -> Choices:
    """Choose B if one is ready, else F while fewer micro-batches are between F and B than segments are left to pass."""
    go = progress.ready["F"] & (progress.between("F", "B") < len(progress.line) - progress.segment)
    return first_of(progress.oldest("B"), progress.furthest("F", go))


def _looped(progress: Progress) -> Choices:
    """Choose as in 1F1B, over rounds: a group of micro-batches goes through all rounds before a newer group.

    Narayanan et al. take groups of S micro-batches and need M to be a multiple of S. Here the groups are as even as
    possible, and not smaller than S unless M is. Then no IPU ever waits for a round to come back, for any M.
    """
    groups = _groups(progress.line)
    more = _in_flight(progress, "B") < _looped_depths(progress)
    return first_of(_if(more, progress.in_turn("F", groups)), progress.in_turn("B", groups))


def _looped_zb(progress: Progress) -> Choices:
    """Choose F and B as in "looped", and W if neither is ready or if W makes room for F.

    An IPU keeps at most as many micro-batches from F until W as "looped" keeps on its fullest IPU.
    """
    groups, depths = _groups(progress.line), _looped_depths(progress)
    forward = _if(_in_flight(progress, "B") < depths, progress.in_turn("F", groups))
    weight = progress.oldest("W")
    fits = _in_flight(progress, "W") < depths.max(initial=0)
    make_room = _if(forward != NONE, weight)
    return first_of(_if(fits, forward), make_room, progress.in_turn("B", groups), weight)


def _looped_bfs(progress: Progress) -> Choices:
    """Choose F of all micro-batches, round after round, then B in the same way."""
    return np.where(_forward_left(progress), progress.in_turn("F", 1), progress.in_turn("B", 1))


def _if(mask: Mask, choices: Choices) -> Choices:
    return np.where(mask, choices, NONE)


def _groups(line: Line) -> int:
    """Return the number of groups into which "looped" divides the micro-batches."""
    return max(1, line.micro_batches // len(line.on))


def _looped_depths(progress: Progress) -> Ints:
    """Return how many pairs of segment and micro-batch each IPU keeps between F and B under "looped"."""
    rounds, ipus = progress.segment.shape
    group = -(-progress.line.micro_batches // _groups(progress.line))
    return 2 * np.arange(ipus)[::-1] + (rounds - 1) * group + 1


def _in_flight(progress: Progress, last: Kind) -> Ints:
    return progress.between("F", last).sum(axis=0)


def _zb_h1(progress: Progress) -> Choices:
    """Choose F and B as in 1F1B, and W if neither is ready or if W makes room for F.

    Each stage keeps at most S micro-batches from F until W, as many as 1F1B keeps on its fullest IPU.
    """
    due = progress.ready["F"] & (progress.between("F", "B") < len(progress.line) - progress.segment)
    fits = due & (progress.between("F", "W") < len(progress.line))
    weight = progress.oldest("W")
    make_room = _if(np.any(due, axis=0), weight)
    return first_of(progress.furthest("F", fits), make_room, progress.oldest("B"), weight)


def _zbv(progress: Progress) -> Choices:
    """Choose B, else F on the way back, else F on the way there, else W.

    An IPU holds at most S micro-batches of its share of the model.
    """
    return _folded(None, "B", progress)


def wave_rules() -> Iterator[Rule]:
    """Yield the rules that "zb-wave" tries. The first one never gets stuck."""
    for firsts in (("B", "F", "half"), ("room",)):
        for reserved, first in itertools.product((None, 1, 2), firsts):
            yield functools.partial(_folded, reserved, first)


def _folded(reserved: int | None, first: str, progress: Progress) -> Choices:
    """Choose B or F, else W. Of several F, choose the F that is furthest on its way.

    An IPU holds at most S micro-batches of its share of the model.

    Args:
        reserved: the number of segments of its IPU for which an F leaves room, from its own on; None for all of them,
            so that the oldest micro-batch can always go on.
        first: "B", "F", "half": F while less than half of the room is between F and B, else B, or "room": W if that
            makes room for an F that is ready, else B.
        progress: as for every rule.
    """
    length = progress.length
    limit = len(progress.line.on) * length.sum(axis=0)
    room = limit - (length * progress.between("F", "W")).sum(axis=0)
    rounds = len(length)
    needs = np.stack([length[j : rounds if reserved is None else j + reserved].sum(axis=0) for j in range(rounds)])
    forward = progress.furthest("F", progress.ready["F"] & (needs <= room))
    backward, weight = progress.oldest("B"), progress.oldest("W")
    if first == "B":
        return first_of(backward, forward, weight)
    if first == "F":
        return first_of(forward, backward, weight)
    if first == "room":
        make_room = _if(np.any(progress.ready["F"], axis=0) & (forward == NONE), weight)
        return first_of(make_room, backward, forward, weight)
    early = np.less(2 * (length * progress.between("F", "B")).sum(axis=0), limit)
    return first_of(_if(early, forward), backward, forward, weight)


RULES: dict[str, Rule] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "looped": _looped,
    "looped-bfs": _looped_bfs,
    "looped-zb": _looped_zb,
    "zb-h1": _zb_h1,
    "zbv": _zbv,
}


# DualPipeV: two stages per IPU, folded, and F of one paired with B of the other

# numbers of kind and chunk (0 on the way there, 1 on the way back), as `Progress` numbers two segments of an IPU
_F0, _F1, _B0, _B1, _W0, _W1 = range(6)
_Z0, _Z1, _W = range(6, 9)  # B whose W is postponed, and the oldest postponed W


def dualpipev_rule(line: Line) -> Rule:
    """Return the rule that follows DualPipeV's order on a folded line.

    IPU r of S does these tasks: F0 and B0 of its stage on the way there, F1 and B1 of its stage on the way back. W
    follows its B at once. Z is a B whose W is postponed, and a W alone is the oldest postponed W.

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

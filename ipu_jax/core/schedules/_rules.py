"""Rules that choose what each IPU does next. `_run` simulates the run in which they choose."""

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from ipu_jax.core.schedules._line import Line
from ipu_jax.core.schedules._run import NONE, Choices, Ints, Mask, Progress, Rule, first_of
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

"""Cut a function around its operations on all IPUs: these are stages of their own, with what is cheap beside them.

    operations   look up, add  |  block ........ block  |  block ........ block  |  norm, fused loss
    stages       all IPUs      |  IPU 0                 |  IPU 1                 |  all IPUs

The rest is cut as without them. So an operation in the middle of IPU 0's part makes three stages of it: IPU 0, all
IPUs, IPU 0.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from ipu_jax.core.cutting.cut import Cut, Places
from ipu_jax.core.cutting.everywhere import is_everywhere
from ipu_jax.core.cutting.trace import Read
from ipu_jax.core.cutting.users_code import at_line
from ipu_jax.core.layout.tree_parts import Part
from ipu_jax.core.programs.cost import bytes_of

_WORK: Final = 0.02
"""The part of the local work that every IPU may do again beside its operations on all IPUs, for a better border."""
_WEIGHTS: Final = 0.05
"""The part of all weights that every IPU may hold for that."""


def cut_around(
    places: Places, ipus: Sequence[int | None], marks: Sequence[str], cut: Callable[[Places], Cut | None]
) -> Cut | None:
    """Return a cut with a concurrent stage for each run of operations on all IPUs, or None if there is none.

    Args:
        places: the places at which the function can be cut.
        ipus: the IPU of each local stage.
        marks: the names of values after which the function asks to be cut; no concurrent stage reaches beyond one.
        cut: cuts the local operations into as many stages.

    Raises:
        ValueError: a function can be cut nowhere near an operation on all IPUs.
    """
    at = [t for t, op in enumerate(places.operations) if is_everywhere(op)]
    if not at:
        return cut(places)
    pieces = _pieces(places, at, [t for t in places.marked(marks) if places.allowed[t]])
    inside = np.zeros(len(places.operations), bool)
    for start, end in pieces:
        inside[start:end] = True
    if inside.all():
        return places.cut_at([], [None])
    found = cut(_local(places, pieces, inside))
    if found is None:
        return None
    ends = sorted({*found.ends, *itertools.chain(*pieces)} - {0})
    stage_at = lambda t: next(s for s, end in enumerate(found.ends) if t < end)
    of_stages = [None if inside[start] else ipus[stage_at(start)] for start in [0, *ends[:-1]]]
    return places.cut_at(ends[:-1], of_stages, marked=found.marked)


def _local(places: Places, pieces: Iterable[tuple[int, int]], inside: np.ndarray) -> Places:
    """Return the places of the local operations: concurrent ones have no work, and no place is inside of a piece."""
    local, count = copy.copy(places), len(inside)
    local.work = np.where(inside, 0.0, places.work)
    local.allowed = places.allowed & ~np.append(inside[1:] & inside[:-1], True)
    for start, end in pieces:  # a stage begins there anyway
        if start == 0:
            local.allowed[end - 1] = False
        elif end == count:
            local.allowed[start - 1] = False
    return local


def _pieces(places: Places, at: Sequence[int], marked: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first operation of each concurrent stage, and the one after its last, for the operations `at`.

    A stage takes operations beside one on all IPUs up to where the fewest bytes are live, and as many as it may, but
    none beyond a marked place.
    """
    count, work = len(places.operations), places.work.copy()
    work[list(at)] = 0.0
    most = _WORK * float(work.sum()) / max(2, len(at)), _WEIGHTS * bytes_of([v.aval for v in places.trace.params])
    pieces: list[tuple[int, int]] = []
    for t in at:
        first = max([m + 1 for m in marked if m < t], default=0)
        last = min([m + 1 for m in marked if m >= t], default=count)
        before, after = (_cheap(places, work, most, of) for of in (range(t - 1, -1, -1), range(t + 1, count)))
        starts = [s for s in (t, *before) if s >= first and (s == 0 or places.allowed[s - 1])]
        ends = [e + 1 for e in (t, *after) if e < last and (e + 1 == count or places.allowed[e])]
        if not starts or not ends:
            raise ValueError(
                f"everywhere{at_line(places.operations[t])}: the function can be cut at no place before it, or at none "
                "after it: leaves of a state, or an array of keys, hold it together with other operations"
            )
        start = 0 if 0 in starts else min(starts, key=lambda s: (places.sent[s - 1], s))
        end = count if count in ends else min(ends, key=lambda e: (places.sent[e - 1], -e))
        if pieces and start <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(end, pieces[-1][1]))
        else:
            pieces.append((start, end))
    return pieces


def _cheap(places: Places, work: np.ndarray, most: tuple[float, float], beside: Iterable[int]) -> list[int]:
    """Return the first ones of these operations that all IPUs may run: within the most work, and bytes of weights."""
    found, done, read = list[int](), 0.0, set[Read]()
    for s in beside:
        done += work[s]
        if not is_everywhere(places.operations[s]):
            read |= {of for of in places.trace.reads[id(places.operations[s])] if of[0] == "params"}
        if done > most[0] or sum(_bytes_of(places, part) for _, part in read) > most[1]:
            break
        found.append(s)
    return found


def _bytes_of(places: Places, part: Part) -> float:
    leaf = places.trace.params[part.leaf].aval
    return bytes_of(leaf) * (1.0 if part.rows is None else (part.rows[1] - part.rows[0]) / leaf.shape[part.axis])

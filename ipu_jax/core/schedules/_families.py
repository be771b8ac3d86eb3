"""Build the timetables of the named schedules.

Four stages on four IPUs, eight micro-batches, schedule "1f1b" (a cell is stage, F or B, micro-batch):

    tick   0    1    2    3    4    5    6    7    8    9    10   11 ...
    IPU 0  0F0  0F1  0F2  0F3                 0B0  0F4  0B1  0F5  0B2
    IPU 1       1F0  1F1  1F2            1B0  1F3  1B1  1F4  1B2  1F5
    IPU 2            2F0  2F1       2B0  2F2  2B1  2F3  2B2  2F4  2B3
    IPU 3                 3F0  3B0  3F1  3B1  3F2  3B2  3F3  3B3  3F4

"sequential", "grouped" and "grouped-zb" repeat the ticks of one micro-batch under the two-phase clock, and
"interleaved" does so under the one-phase clock. In "grouped-zb" every IPU does W in the tick in which the first local
stage does B: so all do it at the same time, and it hides the gradients on their way. The order of the others comes from
a simulated run in which the *rule* of the family chooses what each IPU does next (`_rules`), or, for "dualpipev", from
a list (`dualpipev_rule`). Each task then gets the earliest tick that the order and the clock allow. So any number of
micro-batches works, on any placement that the family can serve.

Concurrent stages run in the ticks of a local segment beside them: those before a local stage run their F in the tick of
that stage's F and their B in the tick of its B, and the loss head runs in the tick of the last local F. None of this
delays a local task.

Sources: Huang et al. 2019, arXiv:1811.06965 (gpipe); Narayanan et al. 2021, arXiv:2104.04473, section 2.2 (1f1b, and
looped: "interleaved stages" there); Lamy-Poirier 2022, arXiv:2211.05953 (looped-bfs); Qi et al. 2023, arXiv:2401.10241
(zb-h1, and looped-zb: the same idea over rounds); Qi et al. 2024, arXiv:2405.15362 (zbv, and zb-wave: the same over any
number of sweeps); DeepSeek-AI 2024, arXiv:2412.19437 (dualpipev); Graphcore, "Multi-IPU Programming Overview"
(sequential: "sharded execution"; grouped and interleaved pipelines).
"""

import dataclasses
import itertools

import numpy as np

from ipu_jax.base.checks import check_choice
from ipu_jax.core.schedules._rules import RULES, Rule, StuckError, dualpipev_rule, run, wave_rules
from ipu_jax.core.schedules._timetable import Kind, Line, LineTicks, Placement, Timetable, rows_of

SCHEDULES = (
    "sequential", "grouped", "grouped-zb", "interleaved", "gpipe", "1f1b", "looped", "looped-bfs", "looped-zb", "zb-h1",
    "zbv", "zb-wave", "dualpipev",
)  # fmt: skip
AUTO = "auto"
"""The name for a search with `find_schedule`. It is not a family."""
ALIASES = {
    "interleaved1f1b": "looped",
    "loopedbfs": "looped-bfs",
    "interleavedzerobubble": "looped-zb",
    "zbvzerobubble": "zbv",
    "std1f1b": "1f1b",
    "eager1f1b": "grouped",
}
"""Names of the same schedules in other libraries, in lower case: torch.distributed.pipelining, with or without
"Schedule" before the name, and JaxPP. "gpipe", "1f1b" and "dualpipev" have the same name everywhere."""

_SPLIT = ("looped-zb", "zb-h1", "zbv", "zb-wave", "dualpipev")
_LOOPED = ("looped", "looped-bfs", "looped-zb")
_FOLDED = ("zbv", "dualpipev")
_DIVISIBLE = ("looped", "looped-bfs", "zbv", "zb-wave")
"""The families of these that serve an IPU's segment in two, with a concurrent stage between; others could get stuck."""


def canonical_name(name: str) -> str:
    """Return the name in `SCHEDULES`, or "auto", for a name or an alias (`ALIASES`), in any case, with "-" or "_".

    Raises:
        ValueError: the name is unknown; the message suggests the nearest.

    >>> canonical_name("ScheduleZBVZeroBubble"), canonical_name("interleaved_1f1b"), canonical_name("ZB_H1")
    ('zbv', 'looped', 'zb-h1')
    """
    lower = name.lower().removeprefix("schedule").replace("_", "-") if isinstance(name, str) else name
    known = ALIASES.get(lower.replace("-", ""), lower) if isinstance(lower, str) else lower
    names = (*SCHEDULES, AUTO)
    check_choice("schedule", known if known in names else name, names)
    return known


def default_placement(name: str, ipus: int, rounds: int) -> Placement:
    """Return the placement that a family uses if none is given.

    >>> default_placement("zbv", 3, 2), default_placement("looped", 2, 2)
    ((0, 1, 2, 2, 1, 0), (0, 1, 0, 1))
    >>> default_placement("zb-wave", 3, 3)
    (0, 1, 2, 2, 1, 0, 0, 1, 2)
    """
    line = tuple(range(ipus))
    if name in _LOOPED:
        return line * rounds
    sweeps = 2 if name in _FOLDED else rounds if name == "zb-wave" else 1
    return tuple(ipu for sweep in range(sweeps) for ipu in (line[::-1] if sweep % 2 else line))


def timetable(name: str, placement: Placement, ipus: int, micro_batches: int) -> Timetable:
    """Return the family's timetable for a placement.

    Raises:
        ValueError: the family cannot serve this placement.
    """
    if name in ("sequential", "grouped", "grouped-zb"):
        forward, backward = _first_micro_batch(placement)
        period = 1 + backward[0] if name == "sequential" else 1
        repeat = lambda row: tuple(tuple(tick + period * m for m in range(micro_batches)) for tick in row)
        table = Timetable(name, placement, ipus, repeat(forward), repeat(backward))
        local = [tick for tick, ipu in zip(backward, placement, strict=True) if ipu is not None]
        if name != "grouped-zb" or not local:
            return table
        weight = [tick if ipu is None else max(local) for tick, ipu in zip(backward, placement, strict=True)]
        return dataclasses.replace(table, weight=repeat(weight))
    line = Line(placement, micro_batches, name in _SPLIT)
    _check_places(name, line)
    if name == "interleaved":
        ticks = _interleaved(line)
    elif name == "zb-wave":
        ticks = _shortest(line)
    else:
        rule: Rule = dualpipev_rule(line) if name == "dualpipev" else RULES[name]
        ticks = run(line, rule)[0]
    return Timetable(name, placement, ipus, *rows_of(line, ticks), "one-phase")


def _shortest(line: Line) -> LineTicks:
    """Return the ticks of the shortest run under the rules of `wave_rules`."""
    best: tuple[LineTicks, int] | None = None
    for rule in wave_rules():
        try:
            found = run(line, rule)
        except StuckError:
            continue
        if best is None or found[1] < best[1]:
            best = found
        if not line.on or best[1] == line.earliest_end():
            break
    assert best is not None, "the first of the rules never gets stuck"
    return best[0]


def _first_micro_batch(placement: Placement) -> tuple[list[int], list[int]]:
    """Return, per stage, the earliest two-phase ticks of F and B of a micro-batch that is alone."""
    last_local = max((s for s, ipu in enumerate(placement) if ipu is not None), default=-1)
    forward = [0]
    for s in range(1, len(placement)):
        before, here = placement[s - 1], placement[s]
        # a local stage's result leaves its IPU at the end of phase F; in that tick only the head or this IPU uses it
        stays = before is None or before == here or s > last_local
        forward.append(forward[-1] + (0 if stays else 1))
    backward = [forward[-1]] * len(placement)
    for s in range(len(placement) - 2, -1, -1):
        here, after = placement[s], placement[s + 1]
        # a gradient leaves its IPU at the end of phase B, in time for `exit`; a result of `exit` is used a tick later
        stays = here is None or here == after or s + 1 > last_local
        backward[s] = backward[s + 1] + (0 if stays else 1)
    return forward, backward


# checks of placements


def _check_places(name: str, line: Line) -> None:
    there, places = list(line.on), line.places
    turns = [ipu for ipu, _ in itertools.groupby(places)] if name in _DIVISIBLE else places
    if name in _LOOPED and turns != there * (len(turns) // max(1, len(there))):
        raise ValueError(
            f"schedule {name!r} cannot serve the local stages on {places}: it needs them on the same IPUs in the "
            "same order round after round, as in [0, 1, 0, 1]; '1f1b' serves any placement"
        )
    if name in _FOLDED and turns not in (there + there[::-1], there + there[-2::-1]):
        raise ValueError(
            f"schedule {name!r} cannot serve the local stages on {places}: it needs them folded, there and back over "
            "the same IPUs, as in [0, 1, 1, 0]; 'zb-h1' serves any placement"
        )
    if name == "zb-wave" and not _are_sweeps(there, turns):
        raise ValueError(
            f"schedule 'zb-wave' cannot serve the local stages on {places}: it needs them in sweeps, there and back "
            "over the same IPUs, as in [0, 1, 1, 0, 0, 1]; 'zb-h1' serves any placement"
        )


def _are_sweeps(line: list[int], places: list[int]) -> bool:
    """Return whether local segments go there and back along a line. At a turn, two segments can be one."""
    if not places:
        return True
    return places[: len(line)] == line and (
        _are_sweeps(line[::-1], places[len(line) :])
        or (len(line) > 1 and len(places) > len(line) and _are_sweeps(line[::-1], places[len(line) - 1 :]))
    )


# ticks


def _interleaved(line: Line) -> LineTicks:
    """Return the ticks of one micro-batch, repeated for all micro-batches.

    With one stage on each of S IPUs, F(s, m) = s + 2m and B(s, m) = 2S-1-s + 2m. An IPU with k segments has 2k tasks
    per micro-batch, each in a different tick modulo the period.
    """
    period = 2 * max(map(len, line.on.values()), default=1)
    taken: set[tuple[int, int]] = set()
    first: dict[tuple[int, Kind], int] = {}
    tick = 0
    there: list[tuple[int, Kind]] = [(i, "F") for i in range(len(line))]
    back: list[tuple[int, Kind]] = [(i, "B") for i in reversed(range(len(line)))]
    for i, kind in there + back:
        while (line.places[i], tick % period) in taken:
            tick += 1
        taken.add((line.places[i], tick % period))
        first[i, kind] = tick
        tick += 1
    begins: dict[Kind, list[int]] = {kind: [first[i, kind] for i in range(len(line))] for kind in line.kinds}
    after = period * np.arange(line.micro_batches)
    return {kind: np.array(ticks, np.int64)[:, None] + after for kind, ticks in begins.items()}

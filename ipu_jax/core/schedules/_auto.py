"""Make a schedule by name, or search for the one that takes the least time at given costs and within a limit of bytes.

The candidates are all families that can serve the placement, and tables that are made for these costs:

    free running   the orders of the list scheduler (`_list_scheduler`) under the policies of `_policies`, with B split
                   from W and without
    lockstep       tables of families and of the list scheduler, improved by annealing (`_annealing`)

`Schedule.simulate` judges each candidate. So no family that fits is better than the schedule returned.

Source: Qi et al. 2023, arXiv:2401.10241, section 5.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from ipu_jax.base import status
from ipu_jax.base.checks import as_int, check_bool, check_cost, check_count
from ipu_jax.base.decorators import public
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.schedules._annealing import AnnealedTable, Ticks, depths_of, lockstep_cost, spread
from ipu_jax.core.schedules._costs import StageCosts, Work, lower_bound
from ipu_jax.core.schedules._families import SCHEDULES, canonical_name, default_placement, timetable
from ipu_jax.core.schedules._list_scheduler import FIRSTS, Policy, earliest_ticks, list_schedule
from ipu_jax.core.schedules._policies import ROUNDING, allot, fits, search, wanted
from ipu_jax.core.schedules._schedule import Schedule, placement_of
from ipu_jax.core.schedules._timetable import Local, Placement, by_kind, rows_of

_TRIES = 200  # at most, both for the policies and for the variations of the best policy
_TASKS = 600_000  # the most tasks that the list scheduler places for each of the two: about two seconds
# Rounds of annealing: the moves per task, the number of best tables to improve, the heat, and the ratio of the best
# table to the best schedule so far at which to give up. A round also keeps its input tables.
_ROUNDS = ((10, 5, 0.1, 1.3), (40, 2, 0.1, 1.1), (120, 1, 0.1, 1.05))
# Tables of few tasks need hot rounds to find the optimum. Tables of many tasks lose their form in hot rounds.
_HOT_ROUNDS = (*_ROUNDS[:2], (40, 1, 1.0, 1.1), (40, 1, 0.3, 1.1), *_ROUNDS[2:])
_FEW = 1000  # tasks
_LEAST = 400  # tables of fewer tasks get as many moves as a table of this many
_KEPT = 2  # tables from which `Schedule.simulate` chooses
_REMEMBERED, _MEDIUM = 8, 2048  # the searches remembered, and their most micro-batches times stages

Limits = tuple[float, ...]
Depths = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A schedule that a search considered.

    Attributes:
        name: the family's name, or "auto" for the best table made for these costs.
        makespan, bubble: as in `Simulation`.
        stash_bytes: per IPU, the bytes of its stages' stash and weight residuals.
        fits: whether these are within the limit.
        schedule: the schedule itself.
    """

    name: str
    makespan: float
    bubble: float
    stash_bytes: tuple[float, ...]
    fits: bool
    schedule: Schedule = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, repr=False)
class FoundSchedule(Shown):
    """The result of `find_schedule`. It prints as a table of the chosen schedule and the costs of the others.

    Attributes:
        schedule: the chosen schedule. Its name is the family's name, or "auto" if the table was made for these costs.
        makespan: its time per step, in the unit of the costs.
        bound: a lower bound on the makespan of any schedule of this placement.
        candidates: all candidates, the best first; the candidates that do not fit are at the end.
        stash_limit: per IPU, the bytes that it may hold, or None.
        lockstep: whether IPUs wait for each other at each exchange.
        transfer: the time that a message takes.
    """

    schedule: Schedule
    makespan: float
    bound: float
    candidates: tuple[Candidate, ...]
    stash_limit: tuple[float, ...] | None
    lockstep: bool
    transfer: float = 0.0

    def _shown(self) -> list[str | Table]:
        clock = "lockstep" if self.lockstep else "free running"
        clock += f", {self.transfer:.6g} per message" if self.transfer else ""
        ratio = f"{self.makespan / self.bound:.3f} x the lower bound {self.bound:.6g}" if self.bound else "no work"
        lines = [("schedule", "makespan", "/ chosen", "bubble", "bytes per IPU", "")]
        for candidate in self.candidates:
            over = f"{candidate.makespan / self.makespan:.3f}" if self.makespan else "1.000"
            least = f"{max(candidate.stash_bytes):.6g}"
            note = "<- chosen" if candidate.schedule is self.schedule else self._excess(candidate)
            lines.append((candidate.name, f"{candidate.makespan:.6g}", over, f"{candidate.bubble:.1%}", least, note))
        return [f"{self.schedule.name}: makespan {self.makespan:.6g} ({clock}), {ratio}", Table(lines, left=6)]

    def _excess(self, candidate: Candidate) -> str:
        """Return by how much a candidate exceeds the limit, on the IPU that exceeds it most."""
        held, limits = candidate.stash_bytes, self.stash_limit
        if candidate.fits or limits is None:
            return ""
        ipu = max(range(len(held)), key=lambda k: held[k] - limits[k])
        return f"does not fit: IPU {ipu} needs {held[ipu]:.6g}, the limit is {limits[ipu]:.6g}"


def find_schedule(
    costs: StageCosts,
    *,
    placement: Placement,
    gradient_accumulation: int,
    ipus: int | None = None,
    transfer: float = 0.0,
    lockstep: bool = False,
    stash_limit: float | Sequence[float] | None = None,
    seed: int = 0,
) -> FoundSchedule:
    """Search for the schedule that takes the least time at these costs.

    The placement stays as it is. The same arguments give the same schedule in every process and every Python version.
    The last searches of a process are remembered, so repeating one takes no time. Among schedules that take the same
    time (within 1e-9), the search chooses the schedule whose fullest IPU holds the fewest bytes. If these are equal
    too, it prefers a family to a new table.

    Args:
        costs: the costs of the stages, and their bytes if `stash_limit` is given.
        placement: per stage its IPU, or None for a concurrent stage.
        gradient_accumulation: M, at least 1.
        ipus: IPUs of a replica. Default: 1 + the largest IPU in the placement.
        transfer: the time that a message takes, as in `Schedule.simulate`: in lockstep each exchange of the one-phase
            clock takes it, and under the two-phase clock messages travel while tasks run.
        lockstep: whether IPUs wait for each other at each exchange, as in the engine, or run freely.
        stash_limit: the most bytes for the stash and the weight residuals of an IPU's stages: a number, or one per IPU.
            Each stage counts with its bytes times the largest number of micro-batches that it holds at once; the engine
            keeps a ring of that size. Waiting messages are not counted.
        seed: the seed of the search. Another seed may find a slightly better or worse table.

    Returns:
        A `FoundSchedule`: the schedule, its makespan, a lower bound, and all candidates.

    Raises:
        ValueError: an argument is outside its rule, there are not as many costs as stages, or no schedule fits.

    >>> costs = StageCosts([1, 1, 1, 2], [1, 1, 1, 2], [1, 1, 1, 2], stash=[1, 1, 1, 2])
    >>> found = find_schedule(costs, placement=(0, 1, 2, 3), gradient_accumulation=8, stash_limit=4)
    >>> found.schedule.name, found.makespan, found.bound
    ('auto', 51.0, 51.0)
    >>> print(found)
    auto: makespan 51 (free running), 1.000 x the lower bound 51
    schedule     makespan  / chosen  bubble  bytes per IPU
    auto         51        1.000     41.2%   4              <- chosen
    interleaved  57        1.118     47.4%   4
    1f1b         57        1.118     47.4%   4
    sequential   120       2.353     75.0%   2
    zb-h1        51        1.000     41.2%   8              does not fit: IPU 3 needs 8, the limit is 4
    ...
    """
    if not isinstance(costs, StageCosts):
        raise ValueError(f"costs={costs!r} is not a StageCosts: give StageCosts(forward=, backward=, weight=)")
    placement, m = placement_of(placement), check_count("gradient_accumulation", gradient_accumulation)
    if len(costs) != len(placement):
        raise ValueError(f"costs has {len(costs)} stages, but placement has {len(placement)}: give costs per stage")
    ipus = 1 + max((k for k in placement if k is not None), default=0) if ipus is None else check_count("ipus", ipus)
    transfer, lockstep = check_cost("transfer", transfer), check_bool("lockstep", lockstep)
    if as_int(seed) is None:
        raise ValueError(f"seed={seed!r} is not a seed: give an int")
    limits = _limits(stash_limit, ipus)
    is_remembered = m * len(placement) <= _MEDIUM
    searched = _searched if is_remembered else _searched.__wrapped__
    with status.during("choosing a schedule"):
        candidates, bound = searched(costs, placement, m, ipus, transfer, lockstep, limits, int(seed))
    if not candidates[0].fits:
        _refuse(stash_limit, candidates)
    return FoundSchedule(
        schedule=candidates[0].schedule,
        makespan=candidates[0].makespan,
        bound=bound,
        candidates=candidates,
        stash_limit=None if stash_limit is None else limits,
        lockstep=lockstep,
        transfer=transfer,
    )


@functools.lru_cache(_REMEMBERED)
def _searched(
    costs: StageCosts,
    placement: Placement,
    micro_batches: int,
    ipus: int,
    transfer: float,
    lockstep: bool,
    limits: tuple[float, ...],
    seed: int,
) -> tuple[tuple[Candidate, ...], float]:
    """Return all candidates, the best first, and a lower bound. If no family fits, return only the families."""

    def judge(schedule: Schedule) -> Candidate:
        run, held = costs.simulate(schedule, transfer, lockstep=lockstep), costs.stash_bytes(schedule)
        return Candidate(schedule.name, run.makespan, run.bubble, held, fits(held, limits), schedule)

    families = [judge(schedule) for schedule in _families(placement, ipus, micro_batches)]
    works = [Work(costs, placement, micro_batches, ipus, split=split) for split in (True, False)]
    bound = min(lower_bound(work, transfer) for work in works)
    if not any(candidate.fits for candidate in families):
        return tuple(_ranked(families)), bound
    made: list[Candidate] = []
    for work in works:
        best = _ranked([*families, *made])[0].makespan
        if not len(work.line) or (not work.split and lower_bound(work, transfer) >= best):
            continue  # concurrent stages take the same time in any order, and B that is not split takes too long
        rng = random.Random(seed)
        tables: list[Ticks] = []
        if not lockstep or work.tasks <= _FEW:
            tables += _free_tables(work, limits, transfer, rng)
        if lockstep:
            tables += _lockstep_tables(work, limits, transfer, families, best, rng)
        made += [judge(schedule_of(work, ticks)) for ticks in tables]
    return tuple(_ranked([*families, *_ranked(made)[:1]])), bound


def _limits(stash_limit: Any, ipus: int) -> tuple[float, ...]:
    if stash_limit is None:
        return (math.inf,) * ipus
    if not isinstance(stash_limit, Iterable) or isinstance(stash_limit, (str, bytes)):
        return (check_cost("stash_limit", stash_limit, "size"),) * ipus
    limits = tuple(check_cost(f"stash_limit[{k}]", limit, "size") for k, limit in enumerate(stash_limit))
    if len(limits) != ipus:
        raise ValueError(f"stash_limit has {len(limits)} sizes for {ipus} IPUs: give a number, or one for each IPU")
    return limits


def _refuse(stash_limit: Any, families: Sequence[Candidate]) -> NoReturn:
    # "sequential" holds one micro-batch per stage, and no schedule holds less
    least = next(family for family in families if family.name == "sequential").stash_bytes
    raise ValueError(
        f"stash_limit={stash_limit!r} is too low for any schedule: 'sequential', which holds the least, holds "
        f"{', '.join(f'{held:.6g}' for held in least)} bytes on IPUs 0 to {len(least) - 1}: give at least that, or "
        "place fewer stages on the fullest IPU"
    )


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates, the best first: by whether they fit, by makespan, then by the bytes they hold."""
    best = min((candidate.makespan for candidate in candidates if candidate.fits), default=0.0)

    def rank(candidate: Candidate) -> tuple[Any, ...]:
        equal = candidate.makespan <= best * (1 + ROUNDING)
        held = max(candidate.stash_bytes), math.fsum(candidate.stash_bytes)
        return not candidate.fits, best if equal else candidate.makespan, *held, candidate.name == "auto"

    return sorted(candidates, key=rank)


def _families(placement: Placement, ipus: int, micro_batches: int) -> Iterator[Schedule]:
    """Yield the schedule of every family that can serve the placement. The first two families can serve any."""
    for name in SCHEDULES:
        try:
            table = timetable(name, placement, ipus, micro_batches)
        except ValueError:
            continue
        yield Schedule(**vars(table))


def schedule_of(work: Work, ticks: Ticks) -> Schedule:
    """Return the schedule "auto" with the given tick of each local task."""
    line = work.line
    tables = rows_of(line, by_kind(line, ticks))
    return Schedule("auto", line.placement, work.ipus, *tables, "one-phase")


def _free_tables(work: Work, limits: Limits, transfer: float, rng: random.Random) -> list[Ticks]:
    """Return the tables of the list scheduler's best runs.

    Orders that ignore concurrent stages are tried as well, since they can be better even with such stages.
    """
    ways = [work]
    if work.has_head or any(work.joint):
        ways.append(work.without_concurrent())
    tries = max(10, min(_TRIES, _TASKS // work.tasks) // len(ways))
    tables: list[Ticks] = []
    for way in ways:
        runs = search(way, limits, transfer, lower_bound(way, transfer), tries=tries, rng=rng)
        tables += [earliest_ticks(run.order, way) for run in runs[:_KEPT]]
    return tables


def _lockstep_tables(
    work: Work, limits: Limits, transfer: float, families: list[Candidate], best: float, rng: random.Random
) -> list[Ticks]:
    """Return the best tables from annealing: few moves from many seeds, then more moves from the best results.

    There are none if `best`, the best makespan so far, is out of reach.
    """
    work = work.without_concurrent()
    seeds: list[tuple[float, Ticks, Depths]] = []
    for ticks in _seeds(work, limits, families):
        depths = allot(work, [work.line.micro_batches] * len(work.line), limits, least=depths_of(ticks, work))
        if depths is not None:
            seeds.append((lockstep_cost(ticks, work, transfer), ticks, depths))
    seeds.sort(key=lambda seed: seed[0])
    for moves, kept, heat, hopeless in _HOT_ROUNDS if work.tasks <= _FEW else _ROUNDS:
        if not seeds or seeds[0][0] > hopeless * best:
            return []
        better: list[tuple[float, Ticks, Depths]] = []
        for _, ticks, depths in seeds[:kept]:
            steps, exact = moves * max(_LEAST, work.tasks), work.tasks <= _FEW
            ticks = AnnealedTable(ticks, work, *depths, transfer, exact).anneal(steps, heat, rng)
            better.append((lockstep_cost(ticks, work, transfer), ticks, depths))
        seeds = sorted([*better, *seeds], key=lambda seed: seed[0])  # a stable sort, so the same everywhere
    return [ticks for _, ticks, _ in seeds[:_KEPT]]


def _seeds(work: Work, limits: Limits, families: list[Candidate]) -> Iterator[Ticks]:
    """Yield tables to improve: from the families, and from the list scheduler at equal costs and at the real costs."""
    for family in families:
        if family.schedule.weight is None or work.split:
            yield spread(_phased(family.schedule, work), work)
    equal = work.with_equal_costs()
    for scale in (1.0, 1.6, math.inf):
        depths = allot(work, wanted(work, scale), limits)
        if depths is not None:
            for first, costs in itertools.product(FIRSTS, (equal, work)):
                order, _ = list_schedule(costs, Policy((first,) * len(work.line), *depths), 0.0)
                yield earliest_ticks(order, work)


def _phased(schedule: Schedule, work: Work) -> Iterator[tuple[tuple[int, int], int, Local]]:
    """Yield the local tasks of a schedule, each with its tick and phase, and its turn within the phase.

    If the work has W but the schedule does not, W comes right after B.
    """
    two_phase = schedule.clock == "two-phase"
    local = [stages[0] for stages in schedule.segments if schedule.placement[stages[0]] is not None]
    for i, stage in enumerate(local):
        for m in range(schedule.micro_batches):
            back = schedule.backward[stage][m]
            yield (schedule.forward[stage][m], 0), i, (i, "F", m)
            yield (back, 1 if two_phase else 0), -i, (i, "B", m)
            if work.split:
                weight = back if schedule.weight is None else schedule.weight[stage][m]
                yield (weight, 2 if two_phase or schedule.weight is None else 0), -i, (i, "W", m)


@public
def make_schedule(
    name: str,
    *,
    gradient_accumulation: int,
    ipus: int | None = None,
    placement: Placement | None = None,
    rounds: int = 2,
    costs: StageCosts | None = None,
    stash_limit: float | Sequence[float] | None = None,
) -> Schedule:
    """Return the schedule called `name`.

    M can be any number: below, equal to or above the number of stages. It need not be a multiple of it.

    | name | what it does | stage s of S keeps at most |
    |---|---|---|
    | "sequential" | one stage at a time, the others idle (model sharding) | 1 |
    | "grouped" | in a tick all IPUs do F, then all do B | 2(S-1-s)+1 |
    | "grouped-zb" | grouped with B split; in a tick all IPUs also do W | 2S-1-s |
    | "interleaved" | in a tick an IPU does F or B; no message ever waits | S-s |
    | "gpipe" | all F, then all B | M |
    | "1f1b" | B as soon as it can be, F as early as the stash allows | S-s |
    | "looped" | 1f1b over several rounds of stages: [0, 1, 0, 1] | of the order of S |
    | "looped-bfs" | rounds; all F round after round, then all B | M |
    | "looped-zb" | looped with B split, W where there were bubbles | of the order of S |
    | "zb-h1" | 1f1b with B split, W where there were bubbles | S |
    | "zbv" | B split, stages folded back: [0, 1, 1, 0] | S micro-batches of an IPU's share |
    | "zb-wave" | zbv over any number of sweeps: [0, 1, 1, 0, 0, 1] | S micro-batches of an IPU's share |
    | "dualpipev" | B split, folded, F of one stage beside B of the other | S+1 micro-batches of an IPU's share |
    | "auto" | the schedule of least time at the `costs` (`find_schedule`) | as many as `stash_limit` allows |

    `_simulate` lists the bubbles and `_families` the sources. Schedules with several stages per IPU ("looped" to
    "looped-zb", "zbv" to "dualpipev") are worthwhile if an IPU's share of the model can be divided into equal stages.

    Names are not case-sensitive, and "_" is "-". The names of other libraries are accepted too:
    torch.distributed.pipelining ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
    "ZBVZeroBubble", "DualPipeV", also as "ScheduleGPipe" and so on) and JaxPP ("Std1F1B", "Eager1F1B").

    Args:
        name: one of the above.
        gradient_accumulation: M, the micro-batches of one weight update, at least 1.
        ipus: IPUs of a replica. Without `placement` each IPU has one local stage, or as many as the schedule needs: two
            under "zbv" and "dualpipev", `rounds` under "zb-wave" and the looped schedules.
        placement: per stage its IPU, or None for a concurrent stage; concurrent stages may be anywhere.
        rounds: the stages on each IPU under "zb-wave" and the looped schedules if `placement` is not given.
        costs: under "auto", the costs of the stages. Default: F, B and W of an IPU's share take the same time.
        stash_limit: under "auto", the bytes that the stash of each IPU may take, as in `find_schedule`.

    Returns:
        A validated `Schedule`.

    Raises:
        ValueError: the name is unknown (the message suggests the nearest), a count is not an integer of at least 1,
            there are no stages, a stage is on an IPU that does not exist, the schedule cannot serve the placement, or
            `costs` or `stash_limit` is given for a name other than "auto".

    >>> make_schedule("sequential", ipus=4, gradient_accumulation=8).bubble()
    0.75
    >>> names = "1f1b", "looped", "zb-h1", "zbv"
    >>> {name: round(make_schedule(name, ipus=4, gradient_accumulation=8).bubble(), 3) for name in names}
    {'1f1b': 0.273, 'looped': 0.158, 'zb-h1': 0.111, 'zbv': 0.059}
    >>> [round(make_schedule("zb-wave", ipus=4, gradient_accumulation=8, rounds=r).bubble(), 3) for r in (2, 4, 8)]
    [0.059, 0.03, 0.015]
    >>> schedule = make_schedule("Interleaved1F1B", ipus=2, gradient_accumulation=3)
    >>> schedule.name, schedule.placement
    ('looped', (0, 1, 0, 1))
    >>> make_schedule("auto", ipus=4, gradient_accumulation=8).name
    'zb-h1'
    """
    name = canonical_name(name)
    m, rounds = check_count("gradient_accumulation", gradient_accumulation), check_count("rounds", rounds)
    ipus = None if ipus is None else check_count("ipus", ipus)
    if placement is None:
        if ipus is None:
            raise ValueError("give ipus=, placement=, or both")
        placement = default_placement(name, ipus, rounds)
    placement = placement_of(placement)
    if not placement:
        raise ValueError("placement=() has no stages: give at least one")
    if ipus is None:
        ipus = 1 + max((ipu for ipu in placement if ipu is not None), default=0)
    if name == "auto":
        costs = StageCosts.equal(placement) if costs is None else costs
        return find_schedule(
            costs, placement=placement, gradient_accumulation=m, ipus=ipus, stash_limit=stash_limit
        ).schedule
    for argument, value in (("costs", costs), ("stash_limit", stash_limit)):
        if value is not None:
            raise ValueError(f"{argument}={value!r} is for schedule 'auto', and {name!r} knows no costs: leave it out")
    return Schedule(**vars(timetable(name, placement, ipus, m)))

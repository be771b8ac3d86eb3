"""Make a schedule by name: the name of a family, or "auto" for a search."""

from collections.abc import Sequence

from ipu_jax.base.checks import check_count
from ipu_jax.base.decorators import public
from ipu_jax.core.schedules._auto import find_schedule
from ipu_jax.core.schedules._costs import StageCosts
from ipu_jax.core.schedules._families import canonical_name, default_placement, timetable
from ipu_jax.core.schedules._schedule import Schedule, placement_of
from ipu_jax.core.schedules._timetable import Placement


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

"""Judge a run: was it good, and what to change. Pure functions of the digest and of the traced steps."""

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from ipu_jax.base.showing import counted
from ipu_jax.core.schedules import SCHEDULES, make_schedule
from ipu_jax.run.observe.runs.digest import LOSS, Digest, duration, figure_in_words
from ipu_jax.run.observe.tracing.timeline import Timeline
from ipu_jax.run.observe.tracing.trace_report import TraceReport, median_costs, simulated

_WORTH: Final = 0.05
"""A smaller change of the bubble, as a share of the IPUs' time, is not worth a word."""
_MANY_SKIPPED: Final = 0.02
_MUCH: Final = 0.25
_MOSTLY_IDLE: Final = 0.5
_IDLE: Final = 0.1
"""An IPU with a smaller share of the busiest one's work is not worth having."""
_MORE_MICRO_BATCHES: Final = 4

Level = Literal["good", "fair", "bad"]


def verdict_of(digest: Digest, report: TraceReport | None = None) -> tuple[Level, list[str]]:
    """Return the level of a run and sentences: whether it finished, learnt and kept its IPUs busy, and what went wrong.

    >>> verdict_of(Digest([{"event": "losses", "updates": 2, "losses": [3.0, 1.0]}, {"event": "end"}]))
    ('good', ['Finished.', 'The loss fell from 3 to 1.'])
    """
    said = [_ending(digest), *_learning(digest), *_mishaps(digest)]
    if report is not None and (idle := bubbles(report)[1]) > _MOSTLY_IDLE:
        said.append(("fair", f"The IPUs ran no task for {idle:.0%} of the time."))
    levels = {level for level, _ in said}
    worst: Level = "bad" if "bad" in levels else "fair" if "fair" in levels else "good"
    return worst, [sentence for _, sentence in said]


def _ending(digest: Digest) -> tuple[Level, str]:
    match digest.ending:
        case "end", _:
            return "good", "Finished."
        case "stopped", reason:
            reason = reason or "stopped"
            return "fair", f"{reason[:1].upper()}{reason[1:]}."
        case "failed", error:
            return "bad", f"Failed: {error or 'without a reason'}"
        case _:
            return "fair", "The log has no end: the run is still going, or it was killed."


class LossMean(NamedTuple):
    """The mean of the first or the last losses of a run, which the verdict names and the page draws.

    Attributes:
        first, last: the updates of the first and the last of these losses.
        size: the number of losses.
        value: their mean.
        error: its standard error.
    """

    first: int
    last: int
    size: int
    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3g}"


def loss_means(digest: Digest) -> tuple[LossMean, LossMean] | None:
    """Return the means of the first and of the last tenth of the losses; None if there are fewer than two losses."""
    points = digest.curves[LOSS].means()
    if len(points) < 2:
        return None
    size = max(1, len(points) // 10)
    return _mean_of(points[:size]), _mean_of(points[-size:])


def _mean_of(points: Sequence[tuple[int, float, int]]) -> LossMean:
    updates, values, counts = zip(*points, strict=True)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return LossMean(updates[0], updates[-1], sum(counts), statistics.fmean(values, counts), error)


def _learning(digest: Digest) -> Iterator[tuple[Level, str]]:
    if means := loss_means(digest):
        before, after = means
        noise = math.hypot(before.error, after.error)
        begun, ended = f"{before}", f"{after}"
        if before.size > 1:
            begun, ended = f"{begun} (mean of the first {before.size:,})", f"{ended} (of the last {after.size:,})"
        if after.value < before.value - 2 * noise:
            yield "good", f"The loss fell from {begun} to {ended}."
        elif after.value > before.value + 2 * noise:
            yield "bad", f"The loss rose from {begun} to {ended}."
        else:
            yield "fair", f"The loss did not fall: from {begun} to {ended}."
    for name, curve in digest.curves.items():
        values, last = curve.points(), curve.last[1]
        if values and name.endswith("accuracy"):
            best = max(values, key=lambda point: point[1])
            text = f"{name.replace('_', ' ').capitalize()} {figure_in_words(name, last)}"
            if best[1] > last:
                text += f", at best {figure_in_words(name, best[1])} after {best[0]:,} updates"
            is_less = name in digest.expected and last < digest.expected[name]
            if is_less:
                text += f": less than the {figure_in_words(name, digest.expected[name])} that is expected"
            yield "fair" if is_less else "good", f"{text}."


def _mishaps(digest: Digest) -> Iterator[tuple[Level, str]]:
    if not digest.ends_finite or digest.nonfinite > digest.skipped:
        yield "bad", "Some losses are not finite."
    elif digest.nonfinite:
        yield "fair", "Some losses are not finite, of updates that were skipped."
    if skipped := digest.skipped:
        share = f" of {digest.updates:,}" if digest.updates else ""
        yield (
            ("fair" if skipped > _MANY_SKIPPED * digest.updates else "good"),
            f"{skipped:,}{share} updates were skipped.",
        )
    if digest.starts > 1:
        yield "good", f"It was restarted {'once' if digest.starts == 2 else f'{digest.starts - 1} times'}."
    number, why = digest.left_out
    if number:
        yield "fair", f"{counted(number, 'event')} of the log could not be read; the first: {why}."


def advice_on(digest: Digest, timeline: Timeline | None, report: TraceReport | None) -> list[str]:
    """Return what to change, the most useful first."""
    found: list[str] = []
    levels = {level for level, sentence in _learning(digest) if sentence.startswith("The loss")}
    if "bad" in levels or any(sentence.startswith("Some losses") for _, sentence in _mishaps(digest)):
        found.append("The loss does not settle: lower the learning rate, or clip gradients (max_gradient_norm).")
    if timeline is None or report is None:
        if _ending(digest)[0] != "bad":
            found.append("Where the time of a step goes is not known: record a trace (trace=, or --trace).")
    else:
        found += [*_of_schedule(timeline), *_of_times(report)]
    spent = digest.phases()
    whole = sum(spent.values())
    if spent.get("compiling", 0.0) > _MUCH * whole > 0:
        found.append(
            f"Compiling took {duration(spent['compiling'])} of {duration(whole)}: ExecutableCache "
            "(--executable-cache) keeps compiled programs for the next run."
        )
    return found


def bubbles(report: TraceReport) -> tuple[float, float]:
    """Return the planned and the measured bubble, as means over the IPUs."""
    planned = statistics.fmean(one.bubble_planned for one in report.ipus)
    return planned, statistics.fmean(one.bubble_measured for one in report.ipus)


def _of_schedule(timeline: Timeline) -> Iterator[str]:
    """Yield the change of the schedule, and of the number of micro-batches, that lowers the planned bubble most."""
    now, costs = timeline.schedule, median_costs(timeline.slices)
    if not timeline.backward:
        return

    def bubble_of(name: str, micro_batches: int) -> float:
        try:
            other = make_schedule(name, ipus=now.ipus, placement=now.placement, gradient_accumulation=micro_batches)
            return simulated(other, costs).bubble
        except ValueError:  # this schedule is for other placements or numbers of micro-batches
            return 1.0

    is_family = now.name in SCHEDULES
    bubble, count = simulated(now, costs).bubble, now.micro_batches
    more = _MORE_MICRO_BATCHES * count
    with_more = bubble_of(now.name, more) if is_family else 1.0
    if with_more < bubble - _WORTH:
        yield (
            f"More micro-batches: with gradient_accumulation={more} instead of {count}, the bubble in the plan falls "
            f"from {bubble:.0%} to {with_more:.0%}; an update then has {_MORE_MICRO_BATCHES} times the "
            "examples."
        )
    names: Sequence[str] = [name for name in SCHEDULES if name != now.name]
    best = min(names, key=lambda name: bubble_of(name, count))
    if (least := bubble_of(best, count)) < bubble - _WORTH:
        yield f"Another schedule: under {best!r} the bubble in the plan falls from {bubble:.0%} to {least:.0%}."


def _of_times(report: TraceReport) -> Iterator[str]:
    """Yield what the measured times of tasks, update and waiting suggest."""
    slowest = " and ".join(report.stages[stage] for stage in report.slowest)
    seconds = 1e3 * sum(report.stage_seconds[stage] for stage in report.slowest)
    yield f"The slowest stage is {slowest}, {seconds:.2f} ms per micro-batch; {report.split}."
    work = {one.ipu: 1 - one.bubble_planned for one in report.ipus}  # alike in all replicas
    idle = [str(ipu) for ipu, share in work.items() if share < _IDLE * max(work.values())]
    if idle and report.split.startswith("nothing to move"):
        yield f"Next to nothing runs on IPU {', '.join(idle)}: take fewer IPUs, or cut the model into more stages."
    update = statistics.fmean(one.update / one.step for one in report.ipus if one.step)
    if update > _MUCH:
        yield f"The weight update takes {update:.0%} of a step: more micro-batches per update make it rarer."
    planned, measured = bubbles(report)
    if measured > planned + _WORTH:
        cores, ipus = os.cpu_count() or 1, len(report.ipus)
        shared = f" {ipus} virtual IPUs share {cores} cores here, so compare shares, not times." if cores < ipus else ""
        yield (
            f"The bubble is {measured:.0%}, and {planned:.0%} is in the plan: the rest is exchanges, collectives and "
            f"the work between tasks.{shared}"
        )

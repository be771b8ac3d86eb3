"""Explain a step on paper: where its time goes, and what to change next.

    F               29.1 ms   28%  2.9 x its FLOPs at full speed, by the compiler's cycles
                                   products 11.9 ms, stores 8.6 ms, elementwise 8.5 ms
    bubble          13.5 ms   13%  under 'grouped', M=16, 4 IPUs
    ...
    to change next   7.0 ms    7%  gradient_accumulation=32, micro-batches as large, counted per 16 of them

Everything is arithmetic on the figures of `paper.py`, and each change is tried alone. It is listed if it saves 1% of
the step. Nothing is compiled again: a change that makes XLA choose other instructions saves more or less.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ipu_jax.base.annotations import Eqn, Jaxpr
from ipu_jax.base.jaxprs import bodies_of, closed_of
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.analysis.stage_costs import on_paper
from ipu_jax.core.compiled.program import Array, Instruction, Program
from ipu_jax.core.engine.labels import UPDATE
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.mesh.axes import parts
from ipu_jax.core.programs.cost import equation_flops
from ipu_jax.core.schedules import SCHEDULES, Schedule, make_schedule
from ipu_jax.run.ahead.kinds import Kind
from ipu_jax.run.ahead.paper import KERNELS_SHARE, TASKS, Paper, in_time, running, seconds_of, task_times
from ipu_jax.run.ahead.traffic import Row

_LEAST: Final = 0.01  # the share of a step that a change must save, and of a part that a kind must take
_MOST: Final = 5
_COPIES: Final = frozenset(("copy", "transpose", "reshape", "bitcast", "parameter", "tuple", "get-tuple-element"))
_Seconds = collections.defaultdict[str, float]
_OF_SCORES = _NOW, _FULL = "attention", "attention at full speed"
_Shape = tuple[int, tuple[int, ...]]  # of attention's scores: their number, and the dims of one factor alone


@dataclasses.dataclass(frozen=True)
class StepPart:
    """A part of a step's time on the IPU that works the most.

    Attributes:
        name: a task, where "FB" is F and B of a head in one guard; "bubble", "messages", "sums" or "update".
        seconds: of the step.
        by: what it goes by, in words.
        least: the seconds of a task's FLOPs or bytes at full speed; None for others.
        kinds: the seconds of each kind of instruction, or of each kind of message. Empty if they are not known.
    """

    name: str
    seconds: float
    by: str
    least: float | None = None
    kinds: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Advice:
    """Something to change, and the seconds of a step that it saves on paper, at most."""

    what: str
    saves: float


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """The parts of a step's time on paper, and what to change next; `str()` shows them on one screen.

    Attributes:
        seconds: of the step: the sum of its parts.
        share_of_peak: how much of the chip's FLOP/s it uses.
        parts: those that take time, in the order of a step.
        advice: what to change next, the best first; each is tried alone.
    """

    seconds: float
    share_of_peak: float
    parts: tuple[StepPart, ...]
    advice: tuple[Advice, ...]

    def _shown(self) -> list[str | Table]:
        return [self.table()]

    def table(self) -> Table:
        """Return the lines of the screen."""
        whole = f"{self.share_of_peak:.0%} of the chip's FLOP/s, on the IPU that works the most"
        rows = [("a step on paper", f"{in_time(self.seconds):>7}", "100%", whole)]
        for part in self.parts:
            rows.append((part.name, f"{in_time(part.seconds):>7}", f"{part.seconds / self.seconds:>4.0%}", part.by))
            kinds = sorted(part.kinds.items(), key=lambda item: -item[1])
            shown = ", ".join(f"{kind} {in_time(s)}" for kind, s in kinds if s >= _LEAST * part.seconds)
            rows += [("", "", "", shown)] * bool(shown)
        rows.append(("to change next", "", "", "each alone, by the same arithmetic: it saves at most"))
        for one in self.advice:
            rows.append(("", f"{in_time(one.saves):>7}", f"{one.saves / self.seconds:>4.0%}", one.what))
        nothing = [("", "", "", f"nothing that is tried saves {_LEAST:.0%}")] * (not self.advice)
        return Table([*rows, *nothing], left=4, has_head=False)


def explain_step(plan: Plan, kind: Kind, program: Program, rows: Sequence[Row], paper: Paper) -> Explanation:
    """Return the parts of a step's time, given the arguments of `estimate` and its result."""
    step = _ExplainedStep(plan, kind, program, rows, paper)
    advice = [one for one in (*step.advice(), *step.other_schedules()) if one.saves >= _LEAST * paper.seconds]
    best = sorted(advice, key=lambda one: -one.saves)[:_MOST]
    parts_of = tuple(part for part in step.parts() if part.seconds)
    return Explanation(paper.seconds, paper.share_of_peak, parts_of, tuple(best))


class _ExplainedStep:
    """The costs of a step, and what changes would save of them."""

    def __init__(self, plan: Plan, kind: Kind, program: Program, rows: Sequence[Row], paper: Paper):
        self._plan, self._rows, self._paper, self._m = plan, rows, paper, plan.schedule.micro_batches
        self._update = program.cycles_under(UPDATE) / kind.clock
        self._times = task_times(plan, kind, program.bodies)
        self._costs = [*map(seconds_of, self._times)]
        run = on_paper(plan, self._costs)
        self._makespan = run.makespan
        self._own = plan.segments_of(max(range(plan.ipus), key=run.busy.__getitem__))
        # of one run of a task of a class, by kind of instruction, and what meets attention's scores: now, at full speed
        self._work = collections.defaultdict[str, _Seconds](lambda: _Seconds(float))
        for c, (first, *_) in enumerate(plan.classes):
            jaxprs = plan.programs[first].jaxprs
            scores = scores_of(jaxprs.values())
            for task in TASKS:
                work = self._work[f"{task}.{c}"]
                for instruction, runs, inside in program.in_task(f"{task}.{c}"):
                    kinds = [kind_of_work(instruction, inside)]
                    kinds += [_NOW] * any(_is_like(x, scores) for one in (instruction, *inside) for x in one.arrays)
                    for each in kinds:
                        work[each] += runs * instruction.cycles / kind.clock
                if work[_NOW] and task in jaxprs:
                    work[_FULL] = flops_with(scores, jaxprs[task]) / kind.flops / parts(plan.axes)

    def parts(self) -> Iterator[StepPart]:
        """Yield the parts of the step, some of which may take no time."""
        yield from map(self._task, TASKS)
        plan, paper = self._plan, self._paper
        yield StepPart("bubble", paper.bubble, f"under {plan.schedule.name!r}, M={self._m}, {plan.ipus} IPUs")
        for name, seconds in (("messages", paper.messages), ("sums", paper.sums)):
            kinds = _Seconds(float)
            for row in self._rows:
                if not row.beside_work and ("replica" in row.axis) == (name == "sums"):
                    kinds[f"{row.op} over {row.over}"] += row.seconds or 0.0
            yield StepPart(name, seconds, "their bytes at full speed, hidden by no work", None, dict(kinds))
        cycles = f"; {in_time(self._update)} by the compiler's cycles" if self._update else ""
        yield StepPart("update", paper.update, f"bytes of weights and state at full speed{cycles}")

    def _task(self, task: str) -> StepPart:
        own = [(i, times[task]) for i in self._own if task in running(times := self._times[i])]
        total, least = (self._m * sum(getattr(time, of) for _, time in own) for of in ("seconds", "bound"))
        of_flops = sum(time.flops for _, time in own) >= sum(time.moved for _, time in own)
        full = f"its {'FLOPs' if of_flops else 'bytes'} at full speed"
        kinds = _Seconds(float)
        for i, time in own:
            beyond = (time.seconds - time.cycles - time.kernels) * (time.cycles > 0)
            work = {**self._work_of(i, task), "kernels (taken)": time.kernels, "beyond cycles": beyond}
            for what, seconds in work.items():
                kinds[what] += self._m * seconds
        shown = {what: seconds for what, seconds in kinds.items() if what not in _OF_SCORES and seconds > 1e-4 * total}
        by = f"{total / least:.1f} x {full}, by the compiler's cycles" if total > 1.005 * least else full
        return StepPart(task, total, by, least, shown)

    def _work_of(self, i: int, task: str) -> Mapping[str, float]:
        return self._work[f"{task}.{self._plan.class_of(i)}"]

    def advice(self) -> Iterator[Advice]:
        """Yield changes of the stages, whether they save time or not."""
        local = [i for i, segment in enumerate(self._plan.segments) if segment.place is not None]
        mean = tuple(sum(self._costs[i][task] for i in local) / max(1, len(local)) for task in range(3))
        even = [mean if i in local else cost for i, cost in enumerate(self._costs)]
        evened = self._on(self._plan.schedule, even)
        yield Advice("stages that all take the same time", self._makespan - evened)
        own = [self._work_of(i, task) for i in self._own for task in "FBW"]
        now, full = (self._m * sum(work[of] for work in own) for of in _OF_SCORES)
        if full:
            what = f"a kernel for attention, {in_time(now)} at {full / now:.0%} of the peak"
            saved = self._saved(lambda work: work[_NOW] - work[_FULL] / KERNELS_SHARE)
            yield Advice(f"{what}: at {KERNELS_SHARE:.0%}, taken, not measured", saved)
        copies = self._saved(lambda work: work["copies"])
        yield Advice("tasks without copies and relayouts, which `report.program` lists", copies)

    def other_schedules(self) -> Iterator[Advice]:
        """Yield other schedules, whether they save time or not."""
        now, paper, m = self._plan.schedule, self._paper, self._m
        fixed = {"name": now.name, "gradient_accumulation": m, "ipus": now.ipus, "placement": now.placement}
        time = lambda rows: sum(row.seconds or 0.0 for row in rows)
        permutes = [row for row in self._rows if row.op.startswith("permute") and row.axis == "ipu"]
        wait = time(row for row in permutes if not row.beside_work)

        def saved_by(other: Schedule) -> float:
            # under the one-phase clock the next tick waits for its messages
            of_other = time(permutes) if other.clock == "one-phase" else wait * (now.clock == other.clock)
            return self._makespan + wait - self._on(other) - of_other

        with contextlib.suppress(ValueError):  # a schedule of the user's own
            twice = make_schedule(**{**fixed, "gradient_accumulation": 2 * m})
            saves = self._makespan - self._on(twice) / 2 + (paper.sums + paper.update) / 2
            yield Advice(f"gradient_accumulation={2 * m}, micro-batches as large, counted per {m} of them", saves)
        others: list[Schedule] = []
        for name in SCHEDULES:
            with contextlib.suppress(ValueError):  # it does not fit the stages' places, or M
                others.append(make_schedule(**{**fixed, "name": name}))
        if others:
            best = max(others, key=saved_by)
            yield Advice(f"schedule={best.name!r}, if its stash fits", saved_by(best))
        first = next((k for k, ipu in enumerate(now.placement) if ipu is not None), 0)
        ends = [(0 if k < first else now.ipus - 1) if ipu is None else ipu for k, ipu in enumerate(now.placement)]
        with contextlib.suppress(ValueError):
            if None in now.placement:
                saves = self._makespan - self._on(make_schedule(**{**fixed, "placement": ends}))
                saves += time(row for row in self._rows if row not in permutes and row.axis == "ipu")
                yield Advice("concurrent stages on one IPU each, such as head='local'", saves)

    def _on(self, schedule: Schedule, costs: Sequence[tuple[float, ...]] | None = None) -> float:
        """Return the time of all tasks under a schedule. If it alone splits B, W is half of B."""
        costs, splits = costs or self._costs, schedule.weight is not None
        if splits != (self._plan.schedule.weight is not None):
            halves = [0.5 * (splits and segment.place is not None) for segment in self._plan.segments]
            costs = [(f, (1 - h) * (b + w), h * (b + w)) for h, (f, b, w) in zip(halves, costs, strict=True)]
        return on_paper(dataclasses.replace(self._plan, schedule=schedule), costs).makespan

    def _saved(self, saved: Callable[[Mapping[str, float]], float]) -> float:
        """Return what a step saves if each task saves so much of its work; none takes less than its bound."""
        costs = []
        for i, (times, cost) in enumerate(zip(self._times, self._costs, strict=True)):
            less = ((s - saved(self._work_of(i, k)), min(s, times[k].bound)) for k, s in zip("FBW", cost, strict=True))
            costs.append(cost if "FB" in times else tuple(map(max, *zip(*less, strict=True))))
        return self._makespan - self._on(self._plan.schedule, costs)


def kind_of_work(instruction: Instruction, inside: Sequence[Instruction]) -> str:
    """Return the kind of an instruction by what it fuses; products may store and load as well."""
    ops = {instruction.op, *(one.op for one in inside)} - {"fusion"}
    if ops & {"dot", "convolution"}:
        return "products"
    if "dynamic-update-slice" in ops:
        return "stores"
    if ops & {"dynamic-slice", "gather"}:
        return "loads"
    return "copies" if ops <= _COPIES else "elementwise"


def scores_of(jaxprs: Iterable[Jaxpr]) -> set[_Shape]:
    """Return the shapes of attention's scores: of batched products that are larger than their factors, in a softmax."""
    eqns = [eqn for jaxpr in jaxprs for eqn, _ in _equations(jaxpr)]
    in_softmax = {eqn.outvars[0].aval.size for eqn in eqns if eqn.primitive.name in ("exp", "exp2")}
    products = [product for eqn in eqns if (product := _batched(eqn)) is not None]
    return {shape for shape, factors in products if in_softmax.issuperset(shape[:1]) and shape[0] > max(factors)}


def flops_with(scores: Iterable[_Shape], jaxpr: Jaxpr) -> int:
    """Return the FLOPs of the batched products that make scores or read them."""
    sizes, found = {size for size, _ in scores}, 0
    for eqn, times in _equations(jaxpr):
        if (product := _batched(eqn)) is not None and sizes & {product[0][0], *product[1]}:
            found += times * equation_flops(eqn)
    return found


def _equations(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[Eqn, int]]:
    """Yield the equations of a jaxpr outside of kernels, and how often each runs."""
    for eqn in closed_of(jaxpr).jaxpr.eqns:
        yield eqn, times
        if eqn.primitive.name != "pallas_call":
            inside = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
            yield from (found for body in bodies_of(eqn) for found in _equations(body, inside))


def _batched(eqn: Eqn) -> tuple[_Shape, list[int]] | None:
    """Return the shape of a product with dims that both factors have, and the sizes of the factors."""
    if eqn.primitive.name != "dot_general" or not eqn.params["dimension_numbers"][1][0]:
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    avals = [v.aval for v in eqn.invars]
    free = (n for k in (0, 1) for d, n in enumerate(avals[k].shape) if d not in (*contracted[k], *batch[k]))
    alone = [n for n in free if n > 1]  # XLA leaves dims of 1 out
    return (eqn.outvars[0].aval.size, tuple(alone)), [aval.size for aval in avals]


def _is_like(array: Array, scores: Iterable[_Shape]) -> bool:
    dims = collections.Counter(array.dims)
    return any(array.size == size and not collections.Counter(alone) - dims for size, alone in scores)

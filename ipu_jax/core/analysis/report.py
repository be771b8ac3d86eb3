"""Report what a pipeline needs on each IPU, before it runs: bytes by kind, FLOPs, bytes sent, and the idle share.

    IPU  weights  padding   batch   stash  gradients  temporary        FLOPs  sent/tick   idle
    0    49.2 kB      0 B  1.0 MB  1.6 MB    49.2 kB     2.9 MB  136.2 MFLOP   131.1 kB  36.0%
    1    49.2 kB      0 B  1.0 MB  1.0 MB    49.2 kB     2.9 MB  153.6 MFLOP   131.1 kB  27.8%

The program is SPMD: the carry of its scan is as large on every IPU as on the IPU that needs the most. So the temporary
bytes are the same in each row, and are predicted from the largest values:

    temporary  =  stash       as the schedule says: for each segment, its depth x the bytes that a micro-batch stashes;
                              on a TPU, with the padding to its tiles
               +  channels    the messages between neighbours, y and dx, as made and as received; loss and aux
               +  working set the most bytes that F or B of one segment keeps alive at once for one micro-batch
               +  sums        gradient accumulators that are wider than the weights (if these are bfloat16); sums of the
                              weight's own dtype are the gradients that the step returns, and are counted there

All counts are derived from the plan and the traced programs of its segments. Nothing is run. `docs/measured.md`
compares predictions with the bytes that XLA reports.
"""

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ipu_jax.base.annotations import Batch, Device
from ipu_jax.base.checks import as_int
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.analysis.at_peak import Peak, stash_at_peak
from ipu_jax.core.analysis.bytes_picture import bytes_figure
from ipu_jax.core.analysis.stage_costs import flops_of, on_paper, transfer_time
from ipu_jax.core.compiled.guards import StageCollectives, in_stages
from ipu_jax.core.compiled.program import Program, compiled_for
from ipu_jax.core.engine.order import EXCHANGES
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.engine.stash import Stash
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.layout.tree_parts import resized
from ipu_jax.core.mesh.axes import parts
from ipu_jax.core.mesh.devices import REPLICA_AXIS
from ipu_jax.core.programs.cost import bytes_of, in_units, jaxpr_peak_bytes
from ipu_jax.core.programs.segment_program import split_floats
from ipu_jax.core.schedules import Schedule
from ipu_jax.core.schedules.figures import svg_of, written
from ipu_jax.core.step_args import StepArgs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class IpuReport:
    """One IPU's part of a `PipelineReport`. Numbers are bytes unless stated otherwise.

    Attributes:
        ipu: its number in the replica.
        weights: its own leaves, and its shards of concurrent leaves.
        padding: the rest of its slots and shards, which have room for the larger leaves of other IPUs.
        state: the state of its stages, including padding.
        batch: the M micro-batches of one step, which every IPU holds.
        stash: the values that its own segments keep between F and B (and W), and messages that wait in queues.
        stash_by_tick: the most of it that is in use at once, in each tick.
        stash_at_peak: what is in use when it is the most.
        gradients: the resulting gradients, which have the layout of weights and padding.
        accumulators: the sums in the scan, at least float32; the same buffers as `gradients` if the dtypes are equal.
        working_set: the most that F, B or W of one of its segments keeps alive at once.
        flops: the operations of one step, including its part of the concurrent stages.
        sent: the bytes that it sends in collectives in a tick in which all stages are active: a ppermute of y and one
            of dx, broadcasts to concurrent stages and reductions from them. The communication of a stage's own function
            is not included.
        idle: the share of a step in which it waits, if FLOPs are taken as time; on chips messages take time, too.
    """

    ipu: int
    weights: int
    padding: int
    state: int
    batch: int
    stash: int
    gradients: int
    accumulators: int
    working_set: int
    flops: int
    sent: int
    idle: float
    stash_by_tick: tuple[int, ...]
    stash_at_peak: Peak


@dataclasses.dataclass(frozen=True, repr=False)
class PipelineReport(Shown):
    """The needs of a pipeline for given shapes; `str()` prints a table.

    Attributes:
        schedule: the schedule's name.
        timetable: the schedule itself.
        micro_batches: M.
        ipus: per IPU of a replica, its part.
        stash, channels, working_set, sums: the predicted bytes, the same on every IPU; the module's docstring
            explains them.
        stash_padding: the part of `stash` that pads values to a TPU's tiles; 0 elsewhere.
        temporary: the compiled program's temporary bytes per IPU, as XLA reports them; None if it was not compiled.
        exchanges: the ticks in which an IPU sends to another.
        devices: how many devices an IPU has. Weights, state, gradients and the compiled temporary bytes are counted for
            one device. What XLA splits by itself is counted whole: batch, stash, working set, FLOPs.
        collectives: what the tasks of each stage send, from the compiled program; None if it was not compiled.
        limit: the bytes that an IPU can hold: `ipu_memory`, or what its device says; None if neither is known.
        exposed: on chips, the share of a step that these take under the one-phase clock, where little hides messages,
            by FLOPs and the public figures of links; 0 under the two-phase clock. None on CPUs and without messages.
    """

    schedule: str
    timetable: Schedule
    micro_batches: int
    ipus: tuple[IpuReport, ...]
    stash: int
    channels: int
    working_set: int
    sums: int
    stash_padding: int = 0
    temporary: int | None = None
    exchanges: int = 0
    exposed: float | None = None
    devices: int = 1
    collectives: tuple[StageCollectives, ...] | None = None
    limit: float | None = None

    @property
    def predicted_temporary(self) -> int:
        """Return the predicted temporary bytes per IPU."""
        return self.stash + self.channels + self.working_set + self.sums

    def bytes_by_kind(self, ipu: int) -> dict[str, int]:
        """Return the bytes that an IPU holds at once, by kind. Temporary bytes are predicted if not compiled.

        Raises:
            ValueError: there is no such IPU.
        """
        if as_int(ipu) not in range(len(self.ipus)):
            raise ValueError(f"ipu={ipu!r} is not an IPU of the report: give an int from 0 to {len(self.ipus) - 1}")
        part = self.ipus[ipu]
        return {
            "weights": part.weights,
            **({"padding": part.padding} if part.padding else {}),
            **({"state": part.state} if part.state else {}),
            "gradients": part.gradients,
            "batch": part.batch,
            "temporary": self.predicted_temporary if self.temporary is None else self.temporary,
        }

    def total(self, ipu: int) -> int:
        """Return the sum of `bytes_by_kind`."""
        return sum(self.bytes_by_kind(ipu).values())

    def bytes_by_tick(self, ipu: int) -> dict[str, list[int]]:
        """Return the bytes that are in use on an IPU in each tick of a step, by kind.

        Only the stash varies. XLA allocates `total` for the whole step, on each IPU with as much stash as the fullest
        one needs. "other temporary" is what the temporary bytes are besides the stash.

        Raises:
            ValueError: there is no such IPU.
        """
        kinds = self._besides_stash(ipu)
        by_tick = self.ipus[ipu].stash_by_tick
        return {**{kind: [size] * len(by_tick) for kind, size in kinds.items()}, "stash": [*by_tick]}

    def at_peak(self, ipu: int) -> Peak:
        """Return what lives on an IPU in the tick in which the most bytes are in use, the largest first.

        Values that wait for B, or for W, have the operation that makes them; "other temporary" is as for
        `bytes_by_tick`.

        Raises:
            ValueError: there is no such IPU.

        >>> import jax.numpy as jnp
        >>> from ipu_jax import Pipeline, Stage
        >>> stages = [Stage(lambda w, x, mb: jnp.exp(mb @ w), params="w", ipu=0, name="body")]
        >>> stages += [Stage(lambda _, x, mb: jnp.sum(x), ipu=1)]
        >>> pipeline = Pipeline(stages, schedule="1f1b", gradient_accumulation=4)
        >>> weights, batch = pipeline.shard({"w": jnp.ones((3, 5))}), jnp.ones((4, 8, 3))
        >>> print(pipeline.report(weights, batch, compile=False).at_peak(0))
        IPU 0 in tick 1: 1.6 kB
        what             micro-batches  values            bytes
        other temporary                                   804 B
        batch                                             384 B
        body, until B    0, 1           exp float32[8,5]  320 B
        weights                                            60 B
        gradients                                          60 B
        """
        return self.ipus[ipu].stash_at_peak.beside(self._besides_stash(ipu))

    def _besides_stash(self, ipu: int) -> dict[str, int]:
        """Return the bytes that an IPU holds in each tick, by kind."""
        kinds = self.bytes_by_kind(ipu)
        kinds["other temporary"] = max(0, kinds.pop("temporary") - self.stash)
        return kinds

    def plot(self, path: str | os.PathLike[str] | None = None) -> "Figure":
        """Draw the bytes of each IPU over the ticks of a step: `bytes_by_tick`, the most at once, `total`, and `limit`.

        Args:
            path: the SVG, PNG or PDF file to write, as for `Schedule.plot`.

        Returns:
            A matplotlib figure. matplotlib is the extra `plots`.

        Raises:
            ValueError: `path` has another suffix.
            ImportError: matplotlib is missing.
            OSError: the file cannot be written. An existing file is unchanged.
        """
        return written(path, self._figure)

    def to_svg(self) -> str:
        """Return the picture that `plot` draws as the text of an SVG file.

        Raises:
            ImportError: matplotlib, the extra `plots`, is missing.
        """
        return svg_of(self._figure())

    def _figure(self) -> "Figure":
        kind = "predicted" if self.temporary is None else "compiled"
        caption = f"Temporary bytes, such as the stash, are as {kind}. The optimizer's state is not included."
        if self.devices > 1:
            caption += f" An IPU has {self.devices} devices: weights, gradients and compiled bytes are per device."
        ipus, ticks = range(len(self.ipus)), len(self.ipus[0].stash_by_tick)
        title = f"{self.schedule}: bytes of an IPU over the {ticks} ticks of a step, {self.micro_batches} micro-batches"
        return bytes_figure(title, caption, [*map(self.bytes_by_tick, ipus)], [*map(self.total, ipus)], self.limit)

    def _shown(self) -> Iterator[str | Table]:
        kind = "predicted" if self.temporary is None else "compiled"
        head = ["IPU", "weights", "padding", "batch", "stash", "gradients", "temporary", "FLOPs", "sent/tick", "idle"]
        rows = [head]
        for part in self.ipus:
            temporary = self.bytes_by_kind(part.ipu)["temporary"]
            sizes = (part.weights, part.padding, part.batch, part.stash, part.gradients, temporary)
            cells = [str(part.ipu), *(in_units(size, "B") for size in sizes), in_units(part.flops, "FLOP")]
            rows.append([*cells, in_units(part.sent, "B"), f"{part.idle:.1%}"])
        padding = f" ({in_units(self.stash_padding, 'B')} of it pads to tiles)" if self.stash_padding else ""
        parts = f"stash {in_units(self.stash, 'B')}{padding}, channels {in_units(self.channels, 'B')}, working set "
        parts += f"{in_units(self.working_set, 'B')}" + (f", sums {in_units(self.sums, 'B')}" if self.sums else "")
        yield f"{self.schedule}: {self.micro_batches} micro-batches on {len(self.ipus)} IPUs, per step"
        yield Table(rows)
        yield (
            f"temporary ({kind}): the same on every IPU; predicted {in_units(self.predicted_temporary, 'B')} = {parts}"
        )
        if self.exposed == 0:
            yield "messages: they travel beside tasks, under the two-phase clock"
        elif self.exposed is not None:
            yield (
                f"messages: {self.exchanges} ticks send, and little hides their messages under the one-phase clock: "
                f"{self.exposed:.1%} of the step on paper"
            )
        if self.devices > 1:
            yield (
                f"devices: {self.devices} per IPU, split by XLA; weights, gradients and temporary bytes are per device"
            )
        if not self.collectives:
            return
        rows = [("stage", "task", "collective", "axis", "per micro-batch")]
        for one in self.collectives:
            stages = ", ".join(one.stages) if len(one.stages) < 3 else f"{one.stages[0]} ... {one.stages[-1]}"
            rows.append((stages, one.task, one.op, one.axis, f"{one.count} x {in_units(one.nbytes // one.count, 'B')}"))
        yield "collectives inside the stages, in the compiled program:"
        yield Table(rows, left=len(rows[0]))


def make_report(
    plan: Plan, batch: Batch, *, mesh: Mesh, lowered: Any = None, ipu_memory: float | None = None
) -> PipelineReport:
    """Return the report of a step; `Pipeline.report` documents it.

    Args:
        plan: the plan of the step.
        batch: the batch of all replicas, or its shapes.
        mesh: the mesh of replicas and IPUs.
        lowered: the lowered program of the step. It is compiled for its temporary bytes, unless it is None.
        ipu_memory: the bytes that an IPU can hold; a `UserWarning` reports what does not fit.

    Raises:
        ValueError: `ipu_memory` is not above 0.
    """
    check_ipu_memory(ipu_memory)
    report = count_report(plan, bytes_of(batch) // mesh.shape[REPLICA_AXIS])
    if lowered is not None:
        program = Program(compiled_for(mesh.devices.flat[0], lowered))
        temporary = None if program.memory is None else program.temporary_bytes  # not every platform reports it
        report = dataclasses.replace(report, temporary=temporary, collectives=tuple(in_stages(program, mesh)))
    if ipu_memory is not None:
        warn_where_too_large(report, ipu_memory, stacklevel=5)
    return dataclasses.replace(report, limit=_limit_of(mesh.devices.flat[0]) if ipu_memory is None else ipu_memory)


def _limit_of(device: Device) -> float | None:
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # it belongs to another process, or is not there and only compiled for
        return None


def count_report(plan: Plan, batch_bytes: int) -> PipelineReport:
    """Return the report of a step with predicted temporary bytes, for a replica's batch of this many bytes."""
    m, layout = plan.schedule.micro_batches, plan.params
    flops, stash = [flops_of(program) for program in plan.programs], Stash(plan)
    working_sets = [_working_set(plan, i) for i in range(len(plan.segments))]
    idle, exchanges, exposed = _waits(plan, flops)
    weights = [_weight_bytes(layout, k, plan.axes) for k in range(layout.ipus)]
    own = [plan.segments_of(k) for k in range(layout.ipus)]
    ipus = tuple(
        IpuReport(
            ipu=k,
            weights=weights[k].own,
            padding=weights[k].allocated - weights[k].own,
            state=_weight_bytes(plan.state, k, plan.axes).allocated,
            batch=batch_bytes,
            stash=stash.nbytes_of(k),
            gradients=weights[k].allocated,
            accumulators=weights[k].accumulators,
            working_set=max((working_sets[i] for i in own[k]), default=0),
            flops=m * sum(sum(flops[i]) for i in own[k]),
            sent=_sent_bytes(plan, k),
            idle=idle[k],
            stash_by_tick=tuple(stash.held(k)),
            stash_at_peak=stash_at_peak(plan, stash, k),
        )
        for k in range(layout.ipus)
    )
    return PipelineReport(
        schedule=plan.schedule.name,
        timetable=plan.schedule,
        micro_batches=m,
        ipus=ipus,
        stash=stash.nbytes + stash.padding,
        stash_padding=stash.padding,
        channels=_channel_bytes(plan),
        working_set=max(working_sets),
        sums=weights[0].wide,
        exchanges=exchanges,
        exposed=exposed,
        devices=parts(plan.axes),
    )


def _working_set(plan: Plan, i: int) -> int:
    """Return the most bytes alive at once in F, B or W of a segment for one micro-batch."""
    program = plan.programs[i]
    forward, *backward = program.jaxprs.values()
    weights = sum(len(plan.params.group(name).leaves) for name in plan.segments[i].groups)
    # Inputs after the weights are copied slices of the batch and the stash, except B's dy, which is in a channel.
    ends = [len(jaxpr.in_avals) for jaxpr in backward]
    ends[0] -= len(split_floats(program.y)[0])
    peaks = [
        jaxpr_peak_bytes(jaxpr, copied=range(weights, end), keep_outputs=False)
        for jaxpr, end in zip(backward, ends, strict=True)
    ]
    return max(*peaks, jaxpr_peak_bytes(forward, keep_outputs=False))


class _WeightBytes(NamedTuple):
    """The bytes of an IPU's own weights, of the arrays that hold them with padding, and of their accumulators.

    `wide` counts the accumulators that are wider than their gradients, and so cannot share memory with them. If the IPU
    is a group of devices, they are the bytes on one device.
    """

    own: int
    allocated: int
    accumulators: int
    wide: int


def _weight_bytes(layout: PackedLayout, ipu: int, axes: Mapping[str, int]) -> _WeightBytes:
    """Return the bytes that an IPU's weights and their accumulators take, split over further axes of these sizes."""
    own = 0
    arrays = [(math.prod(array.shape) // parts(axes, array.spec), array.dtype) for array in layout.arrays]
    summed = [array for k, array in enumerate(arrays) if k in layout.trained_arrays]
    for leaf in layout.leaves:
        if leaf.ipu in (None, ipu):
            shape = leaf.held
            if leaf.split is not None:  # the last shards are shorter if the dim does not divide evenly
                left = leaf.shape[leaf.split] - ipu * shape[leaf.split]
                shape = resized(shape, leaf.split, min(max(left, 0), shape[leaf.split]))
            own += np.dtype(leaf.dtype).itemsize * math.prod(shape) // parts(axes, layout.spec(leaf))
    allocated = sum(count * np.dtype(dtype).itemsize for count, dtype in arrays)
    sums = [(count * jnp.promote_types(dtype, jnp.float32).itemsize, dtype) for count, dtype in summed]
    wide = [size for size, dtype in sums if jnp.promote_types(dtype, jnp.float32) != np.dtype(dtype)]
    return _WeightBytes(own, allocated, sum(size for size, _ in sums), sum(wide))


def _channel_bytes(plan: Plan) -> int:
    """Return the bytes of loss, aux, and each channel's y and dx, which count twice if another IPU receives them."""
    m = plan.schedule.micro_batches
    total = bytes_of(plan.programs[-1].y) + m * sum(bytes_of(program.results.aux) for program in plan.programs)
    for kind in EXCHANGES:
        outboxes = plan.outboxes(kind)
        for k, channel in enumerate(plan.channels):
            total += bytes_of(channel.carried(kind)) * ((k in outboxes) + bool(channel.pairs))
    return total


def _sent_bytes(plan: Plan, ipu: int) -> int:
    """Return the bytes that an IPU sends in collectives between stages, in a tick in which every stage is active."""
    total = 0
    for channel in plan.channels:
        for kind, senders in zip(EXCHANGES, zip(*channel.pairs, strict=True), strict=False):
            total += bytes_of(channel.carried(kind)) * senders.count(ipu)
    for i in range(len(plan.segments) - 1):
        message, floats = plan.programs[i].y, split_floats(plan.programs[i].y)[0]
        if plan.segments[i + 1].place is None:  # a psum broadcasts x to all IPUs, and another psum sums the parts of dx
            total += bytes_of(message) + bytes_of(floats)
        elif plan.segments[i].place is None and not plan.programs[i].needs_sums_only:  # dy is broadcast to all IPUs
            total += bytes_of(floats)
    return total


def _waits(plan: Plan, flops: Sequence[Sequence[int]]) -> tuple[list[float], int, float | None]:
    """Return how IPUs wait in a step if FLOPs are time: all wait for each other at each exchange.

    Returns:
        Per IPU, the share of the step in which it is idle; the ticks in which an IPU sends to another; the share of the
        step that messages take while no task hides them, None where a message takes no time.
    """
    transfer = transfer_time(plan, "FLOPs")
    run = on_paper(plan, flops, transfer)
    idle = [1 - busy / run.makespan if run.makespan else 0.0 for busy in run.busy]
    exchanges = int((plan.exchanges["y"] | plan.exchanges["dx"]).any(1).sum())
    hidden = plan.schedule.clock == "two-phase"
    return idle, exchanges, (0.0 if hidden else exchanges * transfer / run.makespan) if transfer else None


def check_ipu_memory(ipu_memory: float | None) -> None:
    """Raise `ValueError` unless `ipu_memory` is None or a number of bytes above 0."""
    if ipu_memory is None:
        return
    if isinstance(ipu_memory, bool) or not isinstance(ipu_memory, (int, float)) or not ipu_memory > 0:
        raise ValueError(f"ipu_memory={ipu_memory!r} is not a size: give bytes above 0, as in 900e6, or None")


def warn_where_too_large(report: PipelineReport, ipu_memory: float, *, stacklevel: int = 2) -> None:
    """Warn once if some IPUs cannot hold the bytes that the report says they need."""
    above = [part.ipu for part in report.ipus if report.total(part.ipu) > ipu_memory]
    if not above:
        return
    worst = max(above, key=report.total)
    kinds = ", ".join(f"{kind} {in_units(size, 'B')}" for kind, size in report.bytes_by_kind(worst).items())
    others = f" ({len(above)} of {len(report.ipus)} IPUs do not fit)" if len(above) > 1 else ""
    warnings.warn(
        f"IPU {worst} needs {in_units(report.total(worst), 'B')} ({kinds}), more than ipu_memory="
        f"{in_units(ipu_memory, 'B')}{others}: use recompute='all' on its stages, more IPUs, a smaller micro-batch, or "
        f"a schedule that keeps less than {report.schedule!r} does",
        stacklevel=stacklevel,
    )


class MemoryGuard:
    """Warns before the first step with given shapes if it does not fit on an IPU. Nothing is compiled for this check.

    Args:
        ipu_memory: the bytes that an IPU can hold, or None for no check.

    Raises:
        ValueError: `ipu_memory` is not above 0.
    """

    def __init__(self, ipu_memory: float | None):
        check_ipu_memory(ipu_memory)
        self.ipu_memory = ipu_memory
        self._seen: set[Any] = set()

    def check(self, args: StepArgs, report: Callable[[], PipelineReport]) -> None:
        """Warn before a step of new shapes if it does not fit; `report` makes the step's report."""
        if self.ipu_memory is None:
            return
        leaves, treedef = jax.tree.flatten(args)
        shapes = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if shapes not in self._seen:
            self._seen.add(shapes)
            warn_where_too_large(report(), self.ipu_memory, stacklevel=5)

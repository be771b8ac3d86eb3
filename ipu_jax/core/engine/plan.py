"""Plan a program of the staged scan before it runs: its segment classes, tables and channels.

segment classes   local segments of several IPUs that compute the same function, such as the middle blocks of a
                  transformer, form a class: one piece of program, which each IPU runs on its own weights. So the
                  program does not grow with their number. Any other segment is a class of its own.
tables            per tick, segment class and IPU: the micro-batch of F, of B, of W, and of each message that is queued.
channels          the arrays that carry messages between neighbouring segments: IPU 0 --y--> IPU 1, and --dx--> back.
                  Boundaries with equal messages share a channel, and so one ppermute, as long as each IPU sends at most
                  once and receives at most once.
outboxes, inboxes where a segment writes a message, and where it reads one. All segments of a class have one outbox,
                  even beside a concurrent segment, where there is no channel. Their inboxes may differ: the first block
                  reads what the embedding made, the other blocks what a ppermute brought.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ipu_jax.base.annotations import Batch, Key, Tree, Value
from ipu_jax.core.engine.order import EXCHANGES, Exchange, Queue, Tick, tick_of
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.mesh.axes import further_axes
from ipu_jax.core.programs.like_segments import LikeSegments
from ipu_jax.core.programs.segment import NO_MESSAGE, MicrobatchInputs, Segment
from ipu_jax.core.programs.segment_program import SegmentProgram, split_floats
from ipu_jax.core.schedules import Schedule
from ipu_jax.core.stage import Role

Table = Literal["F", "B", "W", "x", "dy"]
TABLES: tuple[Table, ...] = ("F", "B", "W", "x", "dy")


@dataclasses.dataclass(frozen=True)
class Channel:
    """Carry equal messages over some boundaries between segments, and their gradients back.

    Attributes:
        message: the message, as a tree of `jax.ShapeDtypeStruct`.
        pairs: the `(source, destination)` pairs of its ppermute; empty where both segments are on one IPU, or one of
            them is concurrent.
    """

    message: Tree
    pairs: tuple[tuple[int, int], ...] = ()

    def carried(self, kind: Exchange) -> Tree:
        """Return what it carries: messages, or as gradients their floating leaves."""
        return self.message if kind == "y" else split_floats(self.message)[0]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Hold everything static about one program.

    Attributes:
        segments, programs: per segment, its stages, and its traced F and B.
        schedule: when each stage runs.
        params, state: the layouts of weights and state. The leaves that are frozen here get no gradient, whatever the
            layout of the weights says that come as an argument.
        channels: see `Channel`.
        channel_of: per boundary between segments i and i + 1, the number of its channel.
        classes: per segment class, the numbers of its segments; all run the program of the first one.
        tables: per table, an array (ticks, classes, ipus) of micro-batches, -1 where idle. "F", "B" and "W" are tasks
            ("W" is idle everywhere if B does the whole backward); "x" and "dy" are messages that are put into a queue.
        platform: of the IPUs, such as "tpu": it decides the layout of the stash.
        axes: the sizes of the mesh's further axes, over which values may be split.
        uniform: whether all IPUs run the guards of each other's tasks, and keep no results of them.
        exchanges: for messages ("y") and their gradients ("dx"), (ticks, channels) bool: whether any IPU sends one.
        tick: what IPUs do in each tick, in order.
    """

    segments: tuple[Segment, ...]
    programs: tuple[SegmentProgram, ...]
    schedule: Schedule
    params: PackedLayout
    state: PackedLayout
    channels: tuple[Channel, ...]
    channel_of: tuple[int, ...]
    platform: str
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    uniform: bool = False
    classes: tuple[tuple[int, ...], ...] = ()
    tables: dict[Table, np.ndarray] = dataclasses.field(default_factory=dict)
    exchanges: dict[Exchange, np.ndarray] = dataclasses.field(default_factory=dict)
    tick: Tick = dataclasses.field(default_factory=Tick)

    @property
    def ipus(self) -> int:
        """Return the number of IPUs of a replica."""
        return self.params.ipus

    @property
    def role(self) -> Role:
        return self.segments[0].role

    @property
    def backward(self) -> bool:
        """Return whether the program computes gradients; otherwise only F runs."""
        return self.segments[0].backward

    @property
    def last(self) -> int:
        return len(self.segments) - 1

    def segments_of(self, ipu: int) -> list[int]:
        """Return the numbers of an IPU's own segments and the concurrent ones."""
        return [i for i, segment in enumerate(self.segments) if segment.place in (None, ipu)]

    def class_of(self, i: int) -> int:
        """Return the number of the class that segment i belongs to."""
        return next(c for c, members in enumerate(self.classes) if i in members)

    def is_split(self, i: int) -> bool:
        """Return whether the backward of segment i is split into B and W."""
        return self.schedule.weight is not None and self.segments[i].place is not None

    def outbox(self, i: int, kind: Exchange) -> int:
        """Return the channel whose array holds y of segment i, or dx: the same for all segments of its class."""
        channels = [self.channel_of[j if kind == "y" else j - 1] for j in self.classes[self.class_of(i)]]
        return next((k for k in channels if self.channels[k].pairs), channels[0])

    def outboxes(self, kind: Exchange) -> set[int]:
        """Return the channels whose arrays segments write."""
        return {self.outbox(i if kind == "y" else i + 1, kind) for i in range(self.last)}

    def inbox(self, i: int, kind: Queue) -> tuple[str, int]:
        """Return the field of the carry, and the channel, in which segment i finds x or dy."""
        boundary, sent, sender = (i - 1, "y", i - 1) if kind == "x" else (i, "dx", i + 1)
        k = self.channel_of[boundary]
        return (f"{sent}_received", k) if self.channels[k].pairs else (sent, self.outbox(sender, sent))

    def waits_at(self, i: int, kind: Queue) -> int | None:
        """Return the IPU on which messages for segment i are queued, or None for all.

        A message between IPUs is queued on its receiver, any other on its sender.
        """
        other = self.segments[i - 1 if kind == "x" else i + 1].place
        return other if self.segments[i].place is None else self.segments[i].place


def make_plan(
    segments: tuple[Segment, ...],
    schedule: Schedule,
    params: PackedLayout,
    state: PackedLayout,
    microbatch: Batch,
    *,
    key: Key = None,
    platform: str,
    uniform: bool = False,
) -> Plan:
    """Trace every segment and plan channels, classes and tables. Axis names must be in scope, as in a `shard_map`.

    Args:
        segments: the model.
        schedule: when each stage runs.
        params, state: the layouts of weights and state, as in `Plan`.
        microbatch: the shapes of one micro-batch.
        key: the shape of a random key, or None.
        platform: of the IPUs, such as "tpu".
        uniform: as in `Plan`.
    """
    split = [schedule.weight is not None and segment.place is not None for segment in segments]
    programs = trace_programs(segments, split, params, state, microbatch, key)
    channels, channel_of = _channels(segments, [program.y for program in programs])
    axes = further_axes(jax.sharding.get_abstract_mesh())
    plan = Plan(segments, programs, schedule, params, state, channels, channel_of, platform, axes, uniform)
    plan = dataclasses.replace(plan, classes=_classes(plan))
    return dataclasses.replace(
        plan,
        tick=tick_of(
            schedule,
            [segment.first for segment in segments],
            plan.classes,
            [k for k, channel in enumerate(channels) if channel.pairs],
            backward=plan.backward,
            sends_beside_tasks=platform != "cpu",  # a CPU has no cores to spare for this
            always_sends=platform == "gpu",  # its host would read the predicate of a guard that sends
        ),
        tables={kind: _table(plan, kind) for kind in TABLES},
        exchanges={kind: _exchanges(plan, kind) for kind in EXCHANGES},
    )


def trace_programs(
    segments: Sequence[Segment],
    split: Sequence[bool],
    params: PackedLayout,
    state: PackedLayout,
    microbatch: Batch,
    key: Key,
) -> tuple[SegmentProgram, ...]:
    """Trace every segment, like ones once; `split` says whose backward to split.

    The other arguments are as for `make_plan`.
    """
    shape_of = lambda leaf: jax.ShapeDtypeStruct(leaf.held, leaf.dtype)
    weights, states = ({group.name: group.tree_of(shape_of) for group in of.groups} for of in (params, state))
    programs, like = list[SegmentProgram](), LikeSegments()
    x: Tree = NO_MESSAGE
    for i, segment in enumerate(segments):
        # jax would sort the names of a dict, and the names of like segments may sort otherwise
        own = collections.OrderedDict((name, weights[name]) for name in segment.groups)
        args = (
            own,
            x,
            MicrobatchInputs(microbatch, tuple(key if stage.random else None for stage in segment.stages)),
            {name: states[name] for name in segment.state_groups},
        )
        last = i == len(segments) - 1
        trained = [not leaf.frozen for name in segment.groups for leaf in params.group(name).leaves]
        shards = _shards(params, segment.groups), _shards(state, sorted(segment.state_groups))
        programs.append(like.trace(segment, args, last=last, split=split[i], trained=trained, shards=shards))
        x = programs[-1].y
    return tuple(programs)


def _shards(layout: PackedLayout, names: Sequence[str]) -> dict[str, Tree]:
    """Return, per group, a tree of bool: whether a leaf is sharded over the IPUs."""
    of_groups = ((name, layout.group(name).tree_of(lambda leaf: leaf.split is not None)) for name in names)
    return collections.OrderedDict(of_groups)


def _channels(segments: Sequence[Segment], messages: Sequence[Tree]) -> tuple[tuple[Channel, ...], tuple[int, ...]]:
    """Return the channels, and per boundary the number of its channel."""
    channels: list[Channel] = []
    channel_of: list[int] = []
    for segment, following, message in zip(segments, segments[1:], messages, strict=False):
        source, target = segment.place, following.place
        pair = None if source is None or target is None or source == target else (source, target)
        k = next((k for k, channel in enumerate(channels) if pair and _fits(channel, pair, message)), len(channels))
        if k == len(channels):
            channels.append(Channel(message))
        if pair:
            channels[k] = dataclasses.replace(channels[k], pairs=(*channels[k].pairs, pair))
        channel_of.append(k)
    return tuple(channels), tuple(channel_of)


def _fits(channel: Channel, pair: tuple[int, int], message: Tree) -> bool:
    """Return whether a channel can carry a message for this pair, too: each IPU sends and receives at most once."""
    free = all(pair[0] != source and pair[1] != target for source, target in channel.pairs)
    return bool(channel.pairs) and channel.message == message and free


@dataclasses.dataclass(frozen=True)
class _Likeness:
    """Describe a segment, or a class so far, to decide which segments form a class.

    Attributes:
        program: what it computes.
        properties: these must be equal.
        channels: of x and of y; None beside a concurrent segment, where there is no channel.
        beside: for x and for y, the IPUs whose segments are beside a concurrent one.
    """

    program: SegmentProgram
    properties: Any
    channels: tuple[int | None, ...]
    beside: tuple[frozenset[int | None], ...]

    def joined(self, other: "_Likeness", plan: Plan) -> "_Likeness | None":
        """Return the likeness of a class of both, or None if they cannot form one."""
        pairs = list(zip(self.channels, other.channels, strict=True))
        if self.properties != other.properties or any(None not in pair and pair[0] != pair[1] for pair in pairs):
            return None
        if not self.program.computes_the_same(other.program):
            return None
        channels = tuple(two if one is None else one for one, two in pairs)
        beside = tuple(one | two for one, two in zip(self.beside, other.beside, strict=True))
        for side, k in enumerate(channels):
            # the IPUs beside a concurrent segment write the channel's outbox, too: they may not send through it
            if k is not None and beside[side] & {pair[1 - side] for pair in plan.channels[k].pairs}:
                return None
        return _Likeness(self.program, self.properties, channels, beside)


def _classes(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Join equal segments of different IPUs into classes, so that each IPU runs its own segments in order."""
    classes: list[list[int]] = []
    likenesses: list[_Likeness | None] = []
    latest: dict[int | None, int] = {}  # per IPU, the class of its previous segment
    for i, segment in enumerate(plan.segments):
        own = _likeness(plan, i)
        for c in range(latest.get(segment.place, -1) + 1, len(classes)):
            known = likenesses[c]
            joined = known.joined(own, plan) if known and own else None
            if joined:
                break
        else:
            c, joined = len(classes), own
            classes.append([])
            likenesses.append(None)
        classes[c].append(i)
        likenesses[c] = joined
        latest[segment.place] = c
    return tuple(map(tuple, classes))


def _likeness(plan: Plan, i: int) -> _Likeness | None:
    """Return a segment's likeness, or None for a segment that is a class of its own."""
    segment, program = plan.segments[i], plan.programs[i]
    has_aux = bool(jax.tree.leaves(program.results.aux))
    if segment.place is None or not 0 < i < plan.last or has_aux:
        return None

    def leaves(layout: PackedLayout, groups: Sequence[str]) -> list[Value]:
        return [(leaf.array, leaf.shape, leaf.frozen) for name in groups for leaf in layout.group(name).leaves]

    keys = [stage.random for stage in segment.stages]
    groups = (leaves(plan.params, segment.groups), leaves(plan.state, sorted(segment.state_groups)))
    messages = [plan.programs[j].y for j in (i - 1, i)]
    is_beside = [plan.segments[j].place is None for j in (i - 1, i + 1)]
    channels = tuple(None if beside else plan.channel_of[i - 1 + side] for side, beside in enumerate(is_beside))
    beside = tuple(frozenset([segment.place] if beside else []) for beside in is_beside)
    return _Likeness(program, (messages, keys, groups), channels, beside)


def _table(plan: Plan, kind: Table) -> np.ndarray:
    schedule, segments = plan.schedule, plan.segments
    table = np.full((schedule.ticks, len(plan.classes), plan.ipus), -1, np.int32)
    rows: Value = {"F": schedule.forward, "B": schedule.backward, "W": schedule.weight}.get(kind)
    for c, members in enumerate(plan.classes):
        for i in members:
            place, sender = segments[i].place, i
            if kind in ("x", "dy"):
                sender = i - 1 if kind == "x" else i + 1
                if not 0 <= sender <= plan.last:
                    continue
                place = plan.waits_at(i, kind)
                rows = schedule.forward if kind == "x" else schedule.backward
            if rows is None:
                continue
            for microbatch, tick in enumerate(rows[segments[sender].first]):
                table[tick, c, slice(None) if place is None else place] = microbatch
    return table


def _exchanges(plan: Plan, kind: Exchange) -> np.ndarray:
    """Return in which ticks each channel carries a message ("y") or a gradient ("dx") between IPUs."""
    schedule, segments = plan.schedule, plan.segments
    table = np.zeros((schedule.ticks, len(plan.channels)), bool)
    for boundary, k in enumerate(plan.channel_of):
        if plan.channels[k].pairs:
            upstream, downstream = segments[boundary].first, segments[boundary + 1].first
            ticks = schedule.forward[upstream] if kind == "y" else schedule.backward[downstream]
            table[list(ticks), k] = True
    return table


TaskKind = Literal["F", "B", "W"]


def stretches_of(plan: Plan, ticks: int) -> list[range]:
    """Return the ticks of each scan, in which it is known beforehand whether concurrent stages run.

    On a GPU the host reads a guard's predicate, and waits for the IPU to compute it, unless the guard is part of a CUDA
    graph. A guard that contains a collective cannot be. The predicate of a concurrent stage depends on the tick alone,
    and under the two-phase clock a concurrent head runs in consecutive ticks. So on GPUs there are up to three scans,
    and concurrent stages are in no guard:

        warm-up      before the head's first tick      embedding, F
        steady                                         embedding, F, head, B, the embedding's B
        cool-down    after the head's last tick                           B, the embedding's B

    In the steady ticks the head always runs. The other concurrent stages have nothing to do in some of them, and
    compute something without effect instead: F computes its last micro-batch again, and B its first one with a
    cotangent of zero. Guards are left where that would have an effect, where B has no stash yet, and where the head
    does not run in consecutive ticks.
    """
    if plan.platform != "gpu" or plan.segments[-1].place is not None:
        return [range(ticks)]
    runs = np.flatnonzero(plan.tables["F"][:ticks, plan.class_of(plan.last), 0] >= 0)
    first, end = int(runs[0]), int(runs[-1]) + 1
    cuts = sorted({0, first, end, ticks}) if len(runs) == end - first else [0, ticks]
    return [range(*pair) for pair in itertools.pairwise(cuts)]


def is_due(plan: Plan, kind: TaskKind, c: int, ticks: range) -> bool | None:
    """Return whether a class runs a task in each of these ticks, also without effect; None if a guard must decide."""
    runs = plan.tables[kind][ticks.start : ticks.stop, c] >= 0
    if not runs.any():
        return False
    segment = plan.segments[plan.classes[c][0]]
    if plan.platform != "gpu" or segment.place is not None:
        return None
    idle = np.flatnonzero(~runs[:, 0])
    if not len(idle):
        return True
    if kind == "F":  # it can run again, unless that updates a state
        return True if idle[0] == len(runs) - len(idle) and not segment.state_groups else None
    has_stash = (plan.tables["F"][: ticks.start + 1, c] == instead(plan, kind, c, ticks)).any()
    return True if idle[-1] == len(idle) - 1 and has_stash else None


def instead(plan: Plan, kind: TaskKind, c: int, ticks: range) -> int | None:
    """Return the micro-batch with which a task runs without effect, or None if it is due in all these ticks."""
    microbatches = plan.tables[kind][ticks.start : ticks.stop, c, 0]
    due = microbatches[microbatches >= 0]
    return None if len(due) == len(microbatches) else int(due[-1 if kind == "F" else 0])

"""Say what each IPU does in a tick: a list of actions, the same in every tick. Guards say which of them are due.

    F 0, F 1, F 2, FB 3, B 2, B 1, y 0, dx 0, B 0

In this tick of the two-phase clock, an embedding and a loss head on all IPUs are the segment classes 0 and 3, and two
classes of local segments are between them. On chips, which send while they compute, messages of this clock travel
beside tasks in every tick, in no guard: y during the head and B, dx during W, or without W during the next tick's F.

    dx 0, F 0, F 1, F 2, y 0, FB 3, B 2, B 1, B 0

Under the one-phase clock F, B and W of local segments come before the head. IPUs wait for each other only in exchanges
and in concurrent stages. An IPU uses a message in the tick after it arrives, so one exchange at the end of a tick
serves all tasks. This is plain data, without jax.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from ipu_jax.core.schedules import Schedule

Queue = Literal["x", "dy"]
Exchange = Literal["y", "dx"]
Kind = Literal["F", "B", "W", "FB"] | Queue | Exchange

QUEUES: Final[tuple[Queue, ...]] = ("x", "dy")
EXCHANGES: Final[tuple[Exchange, ...]] = ("y", "dx")
WORDS: Final[dict[Kind, str]] = {
    **{"F": "F", "B": "B", "W": "W", "FB": "F and B"},
    **{"x": "queue", "dy": "queue", "y": "exchange", "dx": "exchange"},
}


class Action(NamedTuple):
    """Something that IPUs do in a tick.

    Attributes:
        kind: a task of a segment class, "FB" for F and B of the head in one; "x" or "dy", which puts what has arrived
            into the queue of a class; "y" or "dx", an exchange over a channel.
        number: of the class, or of the channel.
        senders: for a queue, the classes whose messages have arrived.
    """

    kind: Kind
    number: int
    senders: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" + (f" from {' '.join(map(str, self.senders))}" if self.senders else "")


@dataclasses.dataclass(frozen=True)
class Tick:
    """Hold what IPUs do in each tick, in order. Prints as its actions.

    Attributes:
        actions: see `Action`.
        always_sends: whether IPUs send in every tick, in no guard. Without a new message they send the last one again.
    """

    actions: tuple[Action, ...] = ()
    always_sends: bool = False

    def __str__(self) -> str:
        return ", ".join(map(str, self.actions))

    def position(self, guard: tuple[Kind, int]) -> int:
        """Return the position of the action with this kind and number."""
        return [action[:2] for action in self.actions].index(guard)

    def __contains__(self, guard: object) -> bool:
        return any(action[:2] == guard for action in self.actions)


def tick_of(
    schedule: Schedule,
    firsts: Sequence[int],
    classes: Sequence[Sequence[int]],
    crossing: Sequence[int],
    *,
    backward: bool,
    sends_beside_tasks: bool,
    always_sends: bool,
) -> Tick:
    """Return what each IPU does in a tick.

    Args:
        schedule: when each stage runs.
        firsts: per segment, its first stage.
        classes: per segment class, its segments.
        crossing: the channels that connect IPUs.
        backward: whether there are gradients.
        sends_beside_tasks: whether an IPU sends while it computes, where the clock permits it.
        always_sends: whether exchanges are in no guard under the other clock, too.
    """
    last = len(firsts) - 1
    class_of = {i: c for c, members in enumerate(classes) for i in members}
    is_local = [schedule.placement[firsts[members[0]]] is not None for members in classes]
    local = [c for c, here in enumerate(is_local) if here]
    entry = [c for c, members in enumerate(classes) if schedule.phase(firsts[members[0]], "F") == "entry"]
    head = [] if is_local[class_of[last]] else [class_of[last]]
    # a message waits at the boundary between two segments, which is after the last stage of the first one
    waiting = {("x", i): schedule.inbox_depth(firsts[i] - 1, "F") > 1 for i in range(1, last + 1)}
    waiting |= {("dy", i): schedule.inbox_depth(firsts[i + 1] - 1, "B") > 1 for i in range(last)}
    queued = {(kind, class_of[i]) for (kind, i), waits in waiting.items() if waits}

    def queue(kind: Queue, senders: Sequence[int]) -> list[Action]:
        """Return the actions that queue what these classes have sent."""
        step = 1 if kind == "x" else -1
        fed = {class_of[i + step] for c in senders for i in classes[c] if 0 <= i + step <= last}
        return [Action(kind, c, tuple(senders)) for c in sorted(fed) if (kind, c) in queued]

    task_and_queue = lambda kind, c, to: [Action(kind, c), *queue(to, [c])]
    enter = [action for c in entry for action in task_and_queue("F", c, "x")]
    forward = [Action("F", c) for c in local]
    at_head = [action for c in head for action in (task_and_queue("FB", c, "dy") if backward else [Action("F", c)])]
    back = [Action("B", c) for c in reversed(local) if backward]
    weight = [Action("W", c) for c in reversed(local) if backward and schedule.weight is not None]
    leave = [action for c in reversed(entry) if backward for action in task_and_queue("B", c, "dy")]
    sent, returned = queue("x", local), queue("dy", local) if backward else []
    onward = [action for action in sent if not is_local[action.number]]  # to concurrent classes, without an exchange
    arrived = [action for action in sent if is_local[action.number]]
    y, dx = ([Action(kind, k) for k in crossing if backward or kind == "y"] for kind in EXCHANGES)
    end = [*y, *arrived, *dx, *returned, *leave]

    # no task waits for a message of its own phase, unless messages queue
    overlaps = sends_beside_tasks and schedule.clock == "two-phase" and not any(is_local[c] for _, c in queued)
    if overlaps:
        before, after = ([], dx) if schedule.weight is not None else (dx, [])
        actions = [*before, *enter, *forward, *onward, *y, *at_head, *back, *after, *weight, *returned, *leave]
    elif schedule.clock == "two-phase":
        actions = [*enter, *forward, *onward, *at_head, *back, *weight, *end]
    else:
        actions = [*enter, *forward, *back, *weight, *onward, *at_head, *end]
    return Tick(tuple(actions), overlaps or always_sends)

"""Cut the scan over ticks into stretches in which it is known beforehand whether concurrent stages run.

On a GPU the host reads a guard's predicate, and waits for the IPU to compute it, unless the guard is part of a CUDA
graph. A guard that contains a collective cannot be. The predicate of a concurrent stage depends on the tick alone, and
under the two-phase clock a concurrent head runs in consecutive ticks. So on GPUs there are up to three scans, and
concurrent stages are in no guard:

    warm-up      before the head's first tick      embedding, F
    steady                                         embedding, F, head, B, the embedding's B
    cool-down    after the head's last tick                           B, the embedding's B

In the steady ticks the head always runs. The other concurrent stages have nothing to do in some of them, and compute
something without effect instead: F computes its last micro-batch again, and B its first one with a cotangent of zero.
Guards are left where that would have an effect, where B has no stash yet, and where the head does not run in
consecutive ticks.
"""

import itertools
from typing import Literal

import numpy as np

from ipu_jax.core.engine.plan import Plan

TaskKind = Literal["F", "B", "W"]


def stretches_of(plan: Plan, ticks: int) -> list[range]:
    """Return the ticks of each scan."""
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

"""Choose where to cut a function: stages of equal work, and little to send between them.

    operations     embed  attention ..........  mlp ......  attention ..........  mlp ......  head
    live after it    1    2 3 4 4 4 4 3 2 2 1    2 2 2 2 1   2 3 4 4 4 4 3 2 2 1   2 2 2 2 1
                                            ^            ^                     ^
                                            waists: one value is live, besides scalars

A cut after an operation sends the activations that are live there: computed before, read after. Cuts are at waists if
these give stages of nearly equal work. Otherwise, as in a decoder that reads the encoder's output, they are made
wherever stages become even, and among such cuts with the fewest bytes. All of it is exact, by dynamic programming.
"""

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Tree, Var
from ipu_jax.base.jaxprs import CALLS, CHECKPOINTS, closed_of, differentiated_between, scan_parts, variables
from ipu_jax.core.cutting.everywhere import is_everywhere
from ipu_jax.core.cutting.order import Order
from ipu_jax.core.cutting.scan_layers import ScanLayer, ScanStack
from ipu_jax.core.cutting.trace import FunctionTrace
from ipu_jax.core.cutting.users_code import scopes_of
from ipu_jax.core.layout.tree_parts import Part
from ipu_jax.core.programs.cost import bytes_of, equation_flops

_EVEN: Final = 1.25
"""The heaviest stage that waists may give, relative to the best that any places give."""
_AS_GOOD: Final = 1.05
"""How much heavier a stage may be than it must be, for stages that are more even, or send less."""
_EMPTY: Final = 0.01
"""The least work of a stage, relative to an even share, unless a function marks its places."""
TYPICAL: Final = 0.05
"""The price of sending a typical number of bytes, where a stage's work costs the square of its part of the heaviest."""
_ONCE_PER_UPDATE: Final = 1 / 8
"""What bytes that are sent once per update count, relative to bytes that are sent for each micro-batch."""
_MOST_PLACES: Final = 1024
_SMALL, _SMALL_SHARE = 8, 0.05
"""Bytes, and the share of all live bytes, up to which a live value does not count: a scalar, a sum of losses."""


PRODUCTS: Final = ("dot_general", "conv_general_dilated")
STAGE_END: Final = "stage_end"


def stage_end(x: Tree) -> Tree:
    """Mark a value as the end of a stage, for `Pipeline.from_function`; elsewhere it does nothing.

    Where a function has such marks, it is cut at some of them, and nowhere else: at all of them if they are as many as
    the schedule needs. Names that a model has for `jax.checkpoint`'s policies can be given as `cuts=` instead.

    Args:
        x: a pytree of arrays.

    Returns:
        The same values.

    >>> float(stage_end(2.0))
    2.0
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, STAGE_END), x)


@dataclasses.dataclass(frozen=True)
class Cut:
    """Describe a cut of a function.

    Attributes:
        ends: per stage, the number of its activations' operations and of those of earlier stages.
        work: per stage, the FLOPs of F and B for one micro-batch.
        sent: per boundary, the bytes of a micro-batch's live activations.
        waists: how many places there are at which one value is live.
        places: how many places there are in all.
        at_waists: whether each cut is at a waist.
        marked: whether the places were marked in the function.
        heaviest: the number of the operation with the most work, and its part of all work.
        kept: the leaf of the state that keeps the most work in one stage, and its part of all work.
        operations: the activations' operations, in the order in which they were cut.
        ipus: per stage its IPU, or None if all IPUs run it at once.
    """

    ends: tuple[int, ...]
    work: tuple[float, ...]
    sent: tuple[int, ...]
    waists: int
    places: int
    at_waists: bool
    marked: bool
    heaviest: tuple[int, float]
    kept: tuple[int, float]
    operations: Sequence[Eqn]
    ipus: tuple[int | None, ...]

    @property
    def work_per_ipu(self) -> list[float]:
        """Return the FLOPs of each IPU's local stages."""
        own = {*self.ipus} - {None} or {None}
        return [sum(w for w, at in zip(self.work, self.ipus, strict=True) if at == ipu) for ipu in own]

    @property
    def local_stages(self) -> int:
        """Return the number of local stages; one with a concurrent stage in its middle counts once."""
        around = zip(self.ipus, [None, *self.ipus], [None, None, *self.ipus], strict=False)
        return sum(ipu is not None and (before is not None or ipu != there) for ipu, before, there in around)

    @property
    def of_stages(self) -> list[Sequence[Eqn]]:
        """Return the operations of each stage."""
        return [self.operations[start:end] for start, end in itertools.pairwise([0, *self.ends])]


class Places:
    """The places at which a function can be cut; place t is after operation t.

    Args:
        trace: the trace of the function.
        work: per operation, by its id, the FLOPs of F and B.
        order: the operations on activations in another order than in the trace.

    Attributes:
        operations: the operations, in this order.
        work: per operation, the FLOPs of F and B.
        sent: per place, the bytes that are live.
        is_waist: per place, whether one value is live there, besides scalars.
        allowed: per place, whether a cut is possible.
        kept: the leaf of the state that keeps the most work in one stage, and its part of all work.
        price: per place, the bytes that are sent for a micro-batch: also its part of the gradients of leaves that are
            read on both sides, which are sent once per update.
    """

    def __init__(self, trace: FunctionTrace, work: Mapping[int, float], order: Order | None = None):
        order = Order(trace.activations) if order is None else order
        self.trace, self.operations = trace, order.operations
        self.work = np.array([work[id(op)] for op in self.operations], float)
        count = len(self.operations)
        sent, is_waist, allowed = list[int](), list[bool](), list[bool]()
        last = self._last_uses()
        live: dict[Var, int] = {}  # and the bytes of each
        fixed: set[Var] = set()  # live values that cannot be sent
        for t, op in enumerate(self.operations):
            for v in op.outvars:
                if last.get(v, -1) > t:
                    live[v] = bytes_of(v.aval)
                    is_value = type(v.aval).__name__ in ("ShapedArray", "ShapeDtypeStruct") and hasattr(v.aval, "dtype")
                    fixed |= set() if is_value else {v}
            for v in op.invars:
                if not isinstance(v, core.Literal) and last.get(v) == t:
                    live.pop(v, None)
                    fixed.discard(v)
            total = sum(live.values())
            small = max(_SMALL, _SMALL_SHARE * total)
            sent.append(total)
            is_waist.append(len([size for size in live.values() if size > small]) <= 1)
            allowed.append(t + 1 < count and not fixed)
        self.sent = np.array(sent, np.int64)
        self.is_waist, self.allowed = np.array(is_waist, bool), np.array(allowed, bool)
        for first, end in order.together:
            self.allowed[first:end] = False
        self.kept = (0, 0.0)
        for leaf, first, end in self._held_together():
            self.allowed[first:end] = False
            share = float(self.work[first : end + 1].sum() / (self.work.sum() or 1.0))
            self.kept = max(self.kept, (leaf, share), key=operator.itemgetter(1))
        self.price = self.sent + _ONCE_PER_UPDATE * self._shared_bytes()

    def _shared_bytes(self) -> np.ndarray:
        """Return, per place, the bytes of the leaves that operations on both sides read, other than by rows."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for t, op in enumerate(self.operations):
            for name, part in self.trace.reads[id(op)]:
                if name == "params" and part.rows is None:
                    first.setdefault(part.leaf, t)
                    last[part.leaf] = t
        change = np.zeros(len(self.operations) + 1)
        for leaf, t in first.items():
            size = bytes_of(self.trace.params[leaf].aval)
            change[t] += size
            change[last[leaf]] -= size
        return np.cumsum(change)[:-1]

    def _last_uses(self) -> dict[Var, int]:
        read = [(t, v) for t, op in enumerate(self.operations) for v in variables(op.invars)]
        last = {v: t for t, v in read if self.trace.kinds[v] == "a"}
        return last | {v: len(self.operations) for v in self.trace.outputs if self.trace.is_activation(v)}

    def _held_together(self) -> list[tuple[int, int, int]]:
        """Return, per set of leaves of the state that one stage holds, a leaf, and the first and the last operation.

        Of a stacked leaf one stage holds each row.
        """
        trace, at = self.trace, {v: t for t, op in enumerate(self.operations) for v in op.outvars}
        if not trace.state:
            return []
        read: dict[int, list[tuple[int, Part]]] = {}  # per leaf
        for t, op in enumerate(self.operations):
            for name, part in trace.reads[id(op)]:
                if name == "state":
                    read.setdefault(part.leaf, []).append((t, part))
        found: list[tuple[int, int, int]] = []
        for leaves in trace.kept_together:
            parts = [held for k in leaves for held in trace.stacked.get(k, ())]
            if not parts:
                times = [t for k in leaves for t, _ in read.get(k, ())]
                times += [at[v] for v in (trace.new_state[k] for k in leaves) if trace.is_activation(v)]
                times += [len(self.operations) - 1 for v in trace.outputs if leaves & trace.leaves_of(v)]
                found.append((min(leaves), min(times), max(times)))
            for rows, new in parts:
                times = [t for t, part in read.get(rows.leaf, ()) if rows.holds(part)] + [at[new]]
                found.append((rows.leaf, min(times), max(times)))
        return found

    @property
    def heaviest(self) -> tuple[int, float]:
        """Return the number of the local operation with the most work, and its part of all local work."""
        work = np.where([is_everywhere(op) for op in self.operations], 0.0, self.work)
        number = int(work.argmax()) if len(work) else 0
        return number, float(work[number] / (work.sum() or 1.0)) if len(work) else 0.0

    def marked(self, names: Sequence[str]) -> list[int]:
        """Return the places after values with these names, of `jax.ad_checkpoint.checkpoint_name`.

        A name that no value has is of a module, or another scope: its place is after the last operation in it.
        """
        found, scopes = list[int](), {*names}
        for t, op in enumerate(self.operations):
            if not isinstance(op, ScanLayer | ScanStack) and op.primitive.name == "name" and op.params["name"] in names:
                scopes.discard(op.params["name"])
                if found and found[-1] == t - 1:
                    found.pop()  # the leaves of one tree
                found.append(t)
        around = enumerate(f"/{'/'.join(scopes_of(op))}/" for op in self.operations)
        last = {name: t for t, modules in around for name in scopes if f"/{name}/" in modules}
        return sorted({*found, *last.values()})

    def cut(self, ipus: Sequence[int], names: Sequence[str] | None) -> Cut | None:
        """Return the best cut into a stage for each of these places; None if a function can be cut at too few places.

        It is cut at the named places if there are names. A stage without work is made only where marks ask for it.
        """
        stages = len(ipus)
        if stages == 1:
            best = []
        elif names is None:
            best = self._at_waists(stages) or self._at(self.allowed, stages)
        else:
            marked = self.allowed & np.isin(np.arange(len(self.allowed)), self.marked(names))
            best = self._at(marked, stages, least=0.0)
        return None if best is None else self.cut_at([t + 1 for t in best], ipus, marked=names is not None)

    def cut_at(self, ends: Sequence[int], ipus: Sequence[int | None], *, marked: bool = False) -> Cut:
        """Return a cut; `ends` has, per stage but the last, the number of operations of it and of earlier ones."""
        total = np.concatenate([[0.0], np.cumsum(self.work)])
        return Cut(
            ends=(*ends, len(self.operations)),
            work=tuple(map(float, np.diff(total[[0, *ends, -1]]))),
            sent=tuple(int(self.sent[end - 1]) if end else 0 for end in ends),
            waists=int((self.allowed & self.is_waist).sum()),
            places=int(self.allowed.sum()),
            at_waists=all(end == 0 or self.is_waist[end - 1] for end in ends),
            marked=marked,
            heaviest=self.heaviest,
            kept=self.kept,
            operations=self.operations,
            ipus=tuple(ipus),
        )

    def _at_waists(self, stages: int) -> list[int] | None:
        """Return the best cut at waists; None if they are too few, or other places give much more even stages."""
        waists, total = self.allowed & self.is_waist, np.cumsum(self.work)
        loads = [_heaviest(total, self._distinct(allowed), stages) for allowed in (waists, self.allowed)]
        return None if loads[0] > _EVEN * loads[1] else self._at(waists, stages)

    def _at(self, allowed: np.ndarray, stages: int, least: float = _EMPTY) -> list[int] | None:
        """Return the best cut at allowed places into stages with `least` of an even share, or None if there is none."""
        total, places = np.cumsum(self.work), self._distinct(allowed)
        if len(places) < stages - 1:
            return None
        heaviest = _heaviest(total, places, stages) * _AS_GOOD
        return _cheapest(total, self.price, places, stages, heaviest, least * total[-1] / stages)

    def _distinct(self, allowed: np.ndarray) -> np.ndarray:
        """Return the allowed places without those that divide the work like another one, and send no less."""
        total, places = np.cumsum(self.work), np.flatnonzero(allowed)
        width = (total[-1] / _MOST_PLACES) if len(places) > _MOST_PLACES else 0.0
        kept: list[int] = []
        for t in places:
            if kept and total[t] - total[kept[-1]] <= width:
                if self.price[t] < self.price[kept[-1]]:
                    kept[-1] = int(t)
                continue
            kept.append(int(t))
        return np.array(kept, int)


def work_of(trace: FunctionTrace) -> dict[int, float]:
    """Return the FLOPs of F and B of each operation on activations, by its id."""
    work: dict[int, float] = {}
    layers: dict[Any, float] = {}  # layers of one scan take the same
    for op in trace.activations:
        flags = _flags(op, trace.differentiated)
        if isinstance(op, ScanLayer):
            of_scan = id(op.scan), *flags
            if of_scan not in layers:
                layers[of_scan] = sum(_forward_and_backward(op.scan, flags)) / op.scan.params["length"]
            work[id(op)] = layers[of_scan]
        else:
            work[id(op)] = 0.0 if isinstance(op, ScanStack) else sum(_forward_and_backward(op, flags))
    return work


def _flags(eqn: Eqn, differentiated: set[Var]) -> list[bool]:
    """Return, per input of an equation, whether its gradient is wanted."""
    is_wanted = not differentiated.isdisjoint(eqn.outvars)
    return [is_wanted and not isinstance(v, core.Literal) and v in differentiated for v in eqn.invars]


def _forward_and_backward(eqn: Eqn, differentiable: Sequence[bool]) -> tuple[float, float]:
    """Return the FLOPs of F and of B of an equation.

    B computes the gradient of each differentiable operand. For a product or a convolution each of them takes as much
    as F; for other operations, all of them together do. So `x @ w` counts 3 times its F, and `x @ constant` 2 times. A
    block under `jax.checkpoint` counts its F once more.

    Args:
        eqn: the equation.
        differentiable: per input, whether its gradient is wanted.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        consts, carry = scan_parts(params)
        flags, body = list(differentiable), closed_of(params["jaxpr"])
        # what a later iteration differentiates, an earlier one does, too
        flags[consts : consts + carry] = [f or any(flags) for f in flags[consts : consts + carry]]
        forward, backward = _of_body(body, flags)
        return params["length"] * forward, params["length"] * backward
    if name == "cond":
        return max(_of_body(closed_of(branch), differentiable[1:]) for branch in params["branches"])
    if name in CALLS:
        forward, backward = _of_body(closed_of(params[CALLS[name]]), differentiable)
        again = forward if name in CHECKPOINTS and backward else 0
        return forward, backward + again
    if is_everywhere(eqn):
        return _of_body(params["jaxpr"], differentiable)
    forward = float(equation_flops(eqn))
    wanted = sum(differentiable)
    return forward, forward * (wanted if name in PRODUCTS else min(wanted, 1))


def _of_body(closed: Jaxpr, differentiable: Sequence[bool]) -> tuple[float, float]:
    jaxpr = closed.jaxpr
    inputs = [v for v, f in zip(jaxpr.invars, differentiable, strict=True) if f]
    differentiated = differentiated_between(jaxpr.eqns, inputs, jaxpr.outvars)
    both = [_forward_and_backward(eqn, _flags(eqn, differentiated)) for eqn in jaxpr.eqns]
    return sum(forward for forward, _ in both), sum(backward for _, backward in both)


def _heaviest(total: np.ndarray, places: np.ndarray, stages: int) -> float:
    """Return the work of the heaviest stage of the most even cut at these places, by bisection."""
    if len(places) < stages - 1:
        return np.inf
    at, low, high = total[places], 0.0, float(total[-1])
    for _ in range(64):
        limit, reached = (low + high) / 2, 0.0
        for _ in range(stages - 1):
            k = np.searchsorted(at, reached + limit, "right") - 1
            reached = at[k] if k >= 0 else 0.0
        low, high = (low, limit) if total[-1] - reached <= limit else (limit, high)
    return high


def _cheapest(
    total: np.ndarray, price_of_place: np.ndarray, places: np.ndarray, stages: int, limit: float, least: float
) -> list[int] | None:
    """Return the places of the cut that is the most even and sends the least, with loads from `least` to `limit`."""
    at, limit = total[places], limit * (1 + 1e-9)
    message = TYPICAL / max(1.0, float(np.median(price_of_place[places]))) * price_of_place

    def price(load: np.ndarray) -> np.ndarray:
        return np.where((load >= least) & (load <= limit), (load / limit) ** 2, np.inf)

    # per cut, the places with enough work before and after: few of them where stages are nearly even
    possible = [places[(at <= k * limit) & (total[-1] - at <= (stages - k) * limit)] for k in range(1, stages)]
    if not all(map(len, possible)):
        return None
    cost = price(total[possible[0]]) + message[possible[0]]
    before: list[np.ndarray] = []
    for ones, others in itertools.pairwise(possible):
        steps = np.where(ones < others[:, None], cost + price(total[others][:, None] - total[ones]), np.inf)
        before.append(steps.argmin(1))
        cost = steps.min(1) + message[others]
    cost = cost + price(total[-1] - total[possible[-1]])
    chosen = [int(cost.argmin())]
    if np.isinf(cost[chosen[0]]):
        return None
    for step in reversed(before):
        chosen.append(int(step[chosen[-1]]))
    return [int(found[k]) for found, k in zip(possible, reversed(chosen), strict=True)]

"""Run the tasks of the staged scan: F, B or W of one segment class, as a guarded piece of the scan's body.

Each method takes the rows of the tick, `{"F": (segment classes,), "B": ..., "W": ..., "x": ..., "dy": ...}`, which hold
this IPU's micro-batches or -1, and the carry, and returns the carry with the task's results.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax.base.annotations import Tree, Value
from ipu_jax.core.engine import _carry
from ipu_jax.core.engine._carry import Carry
from ipu_jax.core.engine.labels import label
from ipu_jax.core.engine.order import Exchange, Queue
from ipu_jax.core.engine.plan import Plan, Table, TaskKind, instead, is_due
from ipu_jax.core.engine.stash import RingKey, Stash
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.layout import Group
from ipu_jax.core.layout.leaf import Leaf
from ipu_jax.core.mesh.axes import broadcast
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.mesh.guard import Fence, guard
from ipu_jax.core.programs.gradient_sums import Sum
from ipu_jax.core.programs.segment import NO_MESSAGE, MicrobatchInputs, SegmentResults, keys_of
from ipu_jax.core.step_args import StepArgs

Rows = dict[str, Value]


class _Turn(NamedTuple):
    """Say whether an IPU runs a task in a tick.

    Attributes:
        mode: "never" and "always" are known beforehand; "guarded": a guard runs the task where it is due; "kept where
            due": a guard runs it where any IPU's is due, and its results are kept where this IPU's is.
        microbatch: its micro-batch, -1 if the task is not due.
        due: whether its results count.
        runs: whether it runs, also where it is not due.
    """

    mode: Literal["never", "always", "guarded", "kept where due"]
    microbatch: Value
    due: Value
    runs: Value


class Tasks:
    """Run the tasks of a plan's segment classes on one IPU of one replica, in some ticks."""

    def __init__(self, plan: Plan, args: StepArgs, loss_cotangent: Value, ticks: range):
        self.plan, self.args, self.loss_cotangent, self.ticks = plan, args, loss_cotangent, ticks
        self.ipu, self.replica = lax.axis_index(IPU_AXIS), lax.axis_index(REPLICA_AXIS)
        self.arrays = packing.arrays_of(args.params)
        self.stash = Stash(plan)
        self.places = self.stash.places(self.ipu)

    def within(self, ticks: range) -> "Tasks":
        """Return the tasks of other ticks."""
        other = copy.copy(self)
        other.ticks = ticks
        return other

    # inputs of a task

    def turn(self, kind: TaskKind, c: int, rows: Rows) -> "_Turn":
        """Return this IPU's turn at a task."""
        microbatch, runs = rows[kind][c], is_due(self.plan, kind, c, self.ticks)
        if runs is None:
            return self.guarded_turn(kind, c, rows, microbatch)
        if not runs:
            return _Turn("never", microbatch, False, False)
        other = instead(self.plan, kind, c, self.ticks)
        return _Turn(
            "always", microbatch if other is None else jnp.where(microbatch < 0, other, microbatch), True, True
        )

    def guarded_turn(self, table: Table, c: int, rows: Rows, microbatch: Value) -> "_Turn":
        """Return the turn at a task, or at a queue, that a guard decides. A micro-batch of -1 is none."""
        due, of_all = microbatch >= 0, self.plan.segments[self.representative(c)].place is None
        if not self.plan.uniform or (of_all and table in ("F", "B", "W")):
            return _Turn("guarded", microbatch, due, due)
        by_tick = (self.plan.tables[table][: self.ticks.stop, c] >= 0).any(axis=1)
        return _Turn("kept where due", microbatch, due, jnp.asarray(by_tick)[rows["tick"]])

    def representative(self, c: int) -> int:
        """Return the first segment of a class, whose program all segments of the class run."""
        return self.plan.classes[c][0]

    def groups(self, c: int) -> list[Group]:
        return [self.plan.params.group(name) for name in self.plan.segments[self.representative(c)].groups]

    def packed_weights(self, c: int) -> Tree:
        """Return the arrays that a class uses, and None for others."""
        used = {leaf.array for group in self.groups(c) for leaf in group.leaves}
        return [array if k in used else None for k, array in enumerate(self.arrays)]

    def weights(self, c: int, arrays: Sequence[Value]) -> dict[str, Tree]:
        return collections.OrderedDict((group.name, packing.read(arrays, group)) for group in self.groups(c))

    def inputs(self, c: int, microbatch: Value) -> MicrobatchInputs:
        examples = jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, microbatch, keepdims=False), self.args.batch
        )
        stages = self.plan.segments[self.representative(c)].stages
        numbers = [self.stage_number(c) + k for k in range(len(stages))]
        return MicrobatchInputs(examples, keys_of(self.args.key, self.replica, microbatch, numbers, stages))

    def stage_number(self, c: int) -> Value:
        """Return the number of the first stage of this IPU's segment."""
        firsts = {self.plan.segments[i].place: self.plan.segments[i].first for i in self.plan.classes[c]}
        if len(firsts) == 1:
            return next(iter(firsts.values()))
        return jnp.asarray([firsts.get(ipu, 0) for ipu in range(self.plan.ipus)])[self.ipu]

    def state_groups(self, c: int) -> list[Group]:
        return [self.plan.state.group(name) for name in self.plan.segments[self.representative(c)].state_groups]

    def read_state(self, c: int, carry: Carry) -> dict[str, Tree]:
        return {group.name: packing.read(carry.model_state, group) for group in self.state_groups(c)}

    def inboxes(self, c: int, kind: Queue) -> dict[tuple[str, int], list[int | None]]:
        """Return where the segments of a class find x or dy, with the IPUs that find it there."""
        found: dict[tuple[str, int], list[int | None]] = {}
        at_end = 0 if kind == "x" else self.plan.last
        for i in self.plan.classes[c]:
            if i != at_end:
                found.setdefault(self.plan.inbox(i, kind), []).append(self.plan.segments[i].place)
        return found

    def messages(self, c: int, kind: Queue, carry: Carry) -> list[Tree]:
        """Return the messages, one of which this IPU's segment reads: `own` chooses it. A model's ends have none."""
        return [getattr(carry, field)[k] for field, k in self.inboxes(c, kind)]

    def own(self, c: int, kind: Queue, messages: list[Tree]) -> Tree:
        """Return the message that this IPU's segment reads."""
        message, *others = messages
        for other, places in zip(others, list(self.inboxes(c, kind).values())[1:], strict=True):
            is_here = self.is_any_of(places)
            message = jax.tree.map(lambda one, two, here=is_here: jnp.where(here, two, one), message, other)
        return message

    def is_any_of(self, places: Sequence[int | None]) -> Value:
        return jnp.any(self.ipu == jnp.asarray(places))

    def read(self, key: RingKey, carry: Carry, microbatch: Value, fence: Fence) -> list[Value]:
        return self.stash.read(carry.stash, key, self.places, microbatch, fence.zero)

    def write(self, key: RingKey, carry: Carry, microbatch: Value, values: list[Value], fence: Fence) -> Carry:
        stash = self.stash.write(carry.stash, key, self.places, microbatch, values, fence.zero)
        return dataclasses.replace(carry, stash=stash)

    def arrived(self, c: int, kind: Queue, messages: list[Tree], microbatch: Value, carry: Carry, fence: Fence) -> Tree:
        """Return a message: read from its ring where messages queue, and broadcast where all IPUs need it."""
        if (kind, c) in self.stash:
            message = jax.tree.unflatten(
                jax.tree.structure(messages[0]), self.read((kind, c), carry, microbatch, fence)
            )
        else:
            message = self.own(c, kind, messages)
        i = self.representative(c)
        source = self.plan.segments[i - 1 if kind == "x" else i + 1].place
        needs_no_whole = kind == "dy" and self.plan.programs[i].needs_sums_only
        if self.plan.segments[i].place is not None or source is None or needs_no_whole:
            return message
        return broadcast(source, message)

    # results of a task

    def with_results(self, c: int, results: SegmentResults, microbatch: Value, carry: Carry, zero: Value) -> Carry:
        """Return the carry with the results of F."""
        i = self.representative(c)
        changed: dict[str, Tree] = {}
        put = lambda every, one: lax.dynamic_update_index_in_dim(every, one, microbatch, 0)
        if i < self.plan.last:
            changed["y"] = _replaced(carry.y, self.plan.outbox(i, "y"), results.y)
        elif self.plan.role == "prediction":
            changed["outputs"] = jax.tree.map(put, carry.outputs, results.y)
        else:
            changed["loss"] = carry.loss + results.y.astype(carry.loss.dtype)
        if jax.tree.leaves(results.aux):
            changed["aux"] = {**carry.aux, i: jax.tree.map(put, carry.aux[i], results.aux)}
        if self.plan.role != "evaluation" and self.state_groups(c):
            changed["model_state"] = carry.model_state
            for group in self.state_groups(c):
                changed["model_state"] = packing.write(changed["model_state"], group, results.state[group.name], zero)
        return dataclasses.replace(carry, **changed)

    def trained(self, c: int) -> list[Leaf]:
        """Return the leaves that get a gradient, in the order of dparams."""
        return [leaf for group in self.groups(c) for leaf in group.leaves if not leaf.frozen]

    def sums(self, c: int, carry: Carry) -> list[Sum]:
        """Return the accumulator of each trained leaf."""
        return [Sum(carry.sums[leaf.array], leaf.held) for leaf in self.trained(c)]

    def with_sums(self, c: int, totals: list[Value], carry: Carry) -> Carry:
        sums = list(carry.sums)
        for leaf, total in zip(self.trained(c), totals, strict=True):
            sums[leaf.array] = total
        return dataclasses.replace(carry, sums=sums)

    def with_dx(self, c: int, dx: list[Value], carry: Carry) -> Carry:
        i = self.representative(c)
        if i == 0:
            return carry
        if self.plan.segments[i].place is None:
            dx = [lax.psum(leaf, IPU_AXIS) for leaf in dx]
        return dataclasses.replace(carry, dx=_replaced(carry.dx, self.plan.outbox(i, "dx"), dx))

    # the tasks

    def run_forward(self, c: int, rows: Rows, carry: Carry) -> Carry:
        i, turn, messages = self.representative(c), self.turn("F", c, rows), self.messages(c, "x", carry)

        def body(fence: Fence, part: Carry) -> Carry:
            packed, received, microbatch = fence((self.packed_weights(c), messages, turn.microbatch))
            self.watch("F", c, microbatch, rows)
            x = self.arrived(c, "x", received, microbatch, part, fence) if i else NO_MESSAGE
            weights, inputs = self.weights(c, packed), self.inputs(c, microbatch)
            results, stash = self.plan.programs[i].forward(weights, x, inputs, self.read_state(c, part))
            part = self.with_results(c, results, microbatch, part, fence.zero)
            if self.plan.backward and ("stash", c) in self.stash:
                part = self.write(("stash", c), part, microbatch, stash, fence)
            return part

        names = ["stash", *self.results(c)]
        return self.guarded(turn, body, carry, names, label=label("F", c), aux_of=i)

    def results(self, c: int) -> list[str]:
        """Return the fields of the carry, beside the aux, that F of a class changes."""
        of_last = "outputs" if self.plan.role == "prediction" else "loss"
        name = "y" if self.representative(c) < self.plan.last else of_last
        return [name, "model_state"] if self.state_groups(c) else [name]

    def run_backward(self, c: int, rows: Rows, carry: Carry) -> Carry:
        """Run B: compute dx, and dparams unless the class has its own W."""
        i, turn = self.representative(c), self.turn("B", c, rows)
        segment, program, is_split = self.plan.segments[i], self.plan.programs[i], self.plan.is_split(i)
        messages = self.messages(c, "dy", carry)

        def body(fence: Fence, part: Carry) -> Carry:
            packed, received, microbatch = fence((self.packed_weights(c), messages, turn.microbatch))
            self.watch("B", c, microbatch, rows)
            if i == self.plan.last:
                dy = fence([jnp.full((), self.loss_cotangent, program.y.dtype)])
            else:
                dy = self.arrived(c, "dy", received, microbatch, part, fence)
            if program.needs_sums_only:
                # the IPU that has the whole cotangent keeps it
                owner = self.plan.segments[i + 1].place or 0
                dy = [jnp.where(self.ipu == owner, leaf, jnp.zeros_like(leaf)) for leaf in dy]
            elif segment.place is None:
                dy = [leaf / self.plan.ipus for leaf in dy]
            if turn.mode == "always":  # where it is not due, it must have no effect
                dy = [jnp.where(rows["B"][c] >= 0, leaf, jnp.zeros_like(leaf)) for leaf in dy]
            stash = self.read(("stash", c), part, microbatch, fence)
            weights, inputs = self.weights(c, packed), self.inputs(c, microbatch)
            if is_split:
                dx, residuals = program.backward_input(weights, inputs, stash, dy)
                return self.write(("weight", c), self.with_dx(c, dx, part), microbatch, residuals, fence)
            totals, dx = program.backward(weights, inputs, stash, dy, self.sums(c, part), fence.zero)
            return self.with_dx(c, dx, self.with_sums(c, totals, part))

        names = ["stash", "dx"] if is_split else ["stash", "sums", "dx"]
        return self.guarded(turn, body, carry, names, label=label("B", c))

    def run_weight(self, c: int, rows: Rows, carry: Carry) -> Carry:
        """Run W: compute dparams from the stash and from the weight residuals that B stored."""
        program, turn = self.plan.programs[self.representative(c)], self.turn("W", c, rows)

        def body(fence: Fence, part: Carry) -> Carry:
            packed, microbatch = fence((self.packed_weights(c), turn.microbatch))
            self.watch("W", c, microbatch, rows)
            stash = self.read(("stash", c), part, microbatch, fence)
            residuals = self.read(("weight", c), part, microbatch, fence)
            weights, inputs = self.weights(c, packed), self.inputs(c, microbatch)
            totals = program.backward_weight(weights, inputs, stash, residuals, self.sums(c, part), fence.zero)
            return self.with_sums(c, totals, part)

        names = ["stash", "sums"]
        return self.guarded(turn, body, carry, names, label=label("W", c))

    def run_head(self, c: int, rows: Rows, carry: Carry) -> Carry:
        """Run F and B of the concurrent loss head together, so that nothing is stashed."""
        program, turn = self.plan.programs[self.plan.last], self.turn("F", c, rows)
        messages = self.messages(c, "x", carry)

        def body(fence: Fence, part: Carry) -> Carry:
            packed, received, microbatch = fence((self.packed_weights(c), messages, turn.microbatch))
            self.watch("F", c, microbatch, rows)
            x = self.arrived(c, "x", received, microbatch, part, fence) if self.plan.last else NO_MESSAGE
            weights, inputs = self.weights(c, packed), self.inputs(c, microbatch)
            results, stash = program.forward(weights, x, inputs, self.read_state(c, part))
            self.watch("B", c, microbatch, rows)
            dy = fence([jnp.full((), self.loss_cotangent / self.plan.ipus, results.y.dtype)])
            totals, dx = program.backward(weights, inputs, stash, dy, self.sums(c, part), fence.zero)
            part = self.with_results(c, results, microbatch, part, fence.zero)
            return self.with_dx(c, dx, self.with_sums(c, totals, part))

        names = ["stash", *self.results(c), "sums", "dx"]
        return self.guarded(turn, body, carry, names, label=label("FB", c), aux_of=self.plan.last)

    def watch(self, kind: str, c: int, microbatch: Value, rows: Rows) -> None:
        if _carry.WATCH is not None:
            jax.debug.callback(
                _carry.WATCH,
                kind,
                stage=self.stage_number(c),
                microbatch=microbatch,
                tick=rows["tick"],
                ipu=self.ipu,
                replica=self.replica,
            )

    def enqueue(self, kind: Queue, c: int, rows: Rows, carry: Carry, senders: Sequence[int]) -> Carry:
        """Put the messages that have just arrived from some classes into the ring of class c."""
        members, step, active = self.plan.classes[c], -1 if kind == "x" else 1, rows[kind][c]
        fed = [self.plan.waits_at(i, kind) for i in members if self.plan.class_of(i + step) in senders]
        if len(fed) < len(members):
            active = jnp.where(self.is_any_of(fed), active, -1)
        turn = self.guarded_turn(kind, c, rows, active)
        messages = self.messages(c, kind, carry)

        def body(fence: Fence, part: Carry) -> Carry:
            received, microbatch = fence((messages, turn.microbatch))
            leaves = jax.tree.leaves(self.own(c, kind, received))
            return self.write((kind, c), part, microbatch, leaves, fence)

        return self.guarded(turn, body, carry, ["stash"], label=label(kind, c))

    def exchange(self, kind: Exchange, k: int, rows: Rows, carry: Carry) -> Carry:
        """Send a channel's messages ("y"), or their gradients back ("dx"), if any IPU has a new one in this tick.

        If IPUs send in every tick, it is in no guard: XLA can run tasks meanwhile, and a GPU's host reads no predicate.
        """
        # beside tasks, dx leaves in the tick after its B
        if not self.plan.exchanges[kind][max(self.ticks.start - 1, 0) : self.ticks.stop, k].any():
            return carry
        pairs, sent, received = self.plan.channels[k].pairs, carry.y[k], carry.y_received
        if kind == "dx":
            pairs, sent, received = [(b, a) for a, b in pairs], carry.dx[k], carry.dx_received

        def permuted(tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: lax.ppermute(leaf, IPU_AXIS, pairs), tree)

        with jax.named_scope(label(kind, k)):
            if self.plan.tick.always_sends:
                guards_run, arrived = carry.guards_run, permuted(sent)
            else:
                body = lambda fence, _: permuted(fence(sent))
                guards_run, arrived = guard(carry.guards_run, rows[kind][k], body, received[k])
        changed = {f"{kind}_received": _replaced(received, k, arrived)}
        return dataclasses.replace(carry, **changed, guards_run=guards_run)

    def guarded(
        self,
        turn: "_Turn",
        body: Callable[[Fence, Carry], Carry],
        carry: Carry,
        names: list[str],
        *,
        label: str,
        aux_of: int | None = None,
    ) -> Carry:
        """Run `body` on a part of the carry if it is its turn, after all guards so far.

        Under uniform guards it runs if any IPU's turn has come, and changes no more than spare rows of other stashes.

        Args:
            turn: whether it runs.
            body: the task.
            carry: the carry of the tick.
            names: the fields that the task reads or changes.
            label: the task's name in the compiled program.
            aux_of: the segment whose aux it changes.
        """
        if turn.mode == "never":
            return carry

        def pinned(part: Carry) -> Carry:
            return part if part.stash is None else dataclasses.replace(part, stash=self.stash.pinned(part.stash))

        def in_layout(fence: Fence, part: Carry) -> Carry:
            return pinned(body(fence, pinned(part)))

        def where_due(fence: Fence, part: Carry) -> Carry:
            due, changed = fence(turn.due), in_layout(fence, part)
            new, old = (dataclasses.replace(one, stash=None) for one in (changed, part))
            kept = jax.tree.map(lambda one, other: jnp.where(due, one, other), new, old)
            return dataclasses.replace(kept, stash=changed.stash)

        part, run = carry.part(names, aux_of=aux_of), where_due if turn.mode == "kept where due" else in_layout
        with jax.named_scope(label):
            guards_run, part = guard(carry.guards_run, turn.runs, run, part)
        return dataclasses.replace(carry.with_part(part), guards_run=guards_run)


def _replaced(values: Sequence[Value], at: int, value: Value) -> list[Value]:
    return [value if i == at else old for i, old in enumerate(values)]

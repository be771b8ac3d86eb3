"""The staged scan: one `lax.scan` over ticks inside one `shard_map`, which runs whatever schedule it is given.

A tick is the clock of `schedule.py`, in straight-line code. Under the two-phase clock:

    entry   broadcast y -> F of concurrent segments                                     (predicate: the tick alone)
    F       each IPU: F of its local segments, if the schedule says so                  (predicate: tick and IPU)
            ppermute y to the neighbour
    head    broadcast y -> F and B of the loss head on all IPUs -> reduce dx            (predicate: the tick alone)
    B       each IPU: B (and W) of its local segments                                   (predicate: tick and IPU)
            ppermute dx to the neighbour
    exit    broadcast dy -> B of concurrent segments -> reduce dx                       (predicate: the tick alone)

Under the one-phase clock F, B and W stand together, before both exchanges and the head.

Gradients are taken inside, by `jax.vjp`; nothing differentiates through the scan, so memory does not grow with the
micro-batches. What a predicate guards is a loop of no or one iteration (`_guard`): it does nothing when idle, and XLA
updates a loop's carry in place, so that a gradient accumulator or the stash is never copied.

The program runs under `check_vma=False`, so that a stage may be any plain function. There JAX's rule is that the
differentiated scalar is the sum over the devices: a value that all IPUs hold alike gets its cotangent in equal parts of
1/n, and the partial cotangents of a replicated input are summed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipu_jax import packing
from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.halves import split_floats
from ipu_jax.packing import Group, Sharded
from ipu_jax.plan import Plan, Stash

IDLE_FILL = 0.0
"""What registers and stash hold before anything is written. Tests make it NaN: a bubble that leaks shows."""


@dataclasses.dataclass(frozen=True)
class Fence:
    """Ties values to the iteration of a guard's loop.

    What does not depend on the iteration, XLA is free to compute before the loop, active or not. `zero` is the
    iteration's number, 0 in the only one, which XLA does not know.
    """

    zero: Any

    def __call__(self, tree: Any) -> Any:
        return lax.optimization_barrier((tree, self.zero))[0]


def _guard(active: Any, body: Callable[[Fence, Any], Any], carry: Any) -> Any:
    """`body(fence, carry)` where `active`, else `carry`, as a loop of one or no iteration.

    A loop rather than `lax.cond`: XLA gives a loop's carry one buffer, in and out, whereas a conditional that passes a
    buffer through may copy it. `body` must pass what it reads through its `Fence`.
    """

    def once(state: tuple[Any, Any]) -> tuple[Any, Any]:
        i, carry = state
        return i + 1, body(Fence(i), carry)

    return lax.while_loop(lambda state: state[0] < active.astype(jnp.int32), once, (jnp.int32(0), carry))[1]


def _idle(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(shape.shape, IDLE_FILL if jnp.issubdtype(shape.dtype, jnp.inexact) else 0, shape.dtype)


def _floats(message: Any) -> list[Any]:
    return split_floats(message)[0]


def _broadcast(tree: Any, source: int) -> Any:
    """Every IPU gets what `source` holds. Communicates one psum a leaf; what the others hold never counts."""
    me = lax.axis_index(IPU_AXIS)

    def one(leaf: jax.Array) -> jax.Array:
        bits = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        return lax.psum(jnp.where(me == source, bits, jnp.zeros_like(bits)), IPU_AXIS).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def run(plan: Plan, params: Sharded, batch: Any, *, seed: float, replicas: int, backward: bool) -> tuple[Any, Any, Any]:
    """The program of one IPU: call it inside `shard_map` over axes ("replica", "ipu") with `check_vma=False`.

    Args:
        plan: from `make_plan`.
        params: this IPU's shards; a slot is (1, *slot.shape).
        batch: leaves (M, micro-batch, ...), the same on every IPU of the replica.
        seed: the cotangent of one micro-batch's loss.
        replicas: size of axis "replica".
        backward: whether to compute gradients; without, only F runs.

    Returns:
        `(loss, aux, gradients)`: the mean loss over micro-batches and replicas; aux with a leading M; gradients laid
        out as `params`, summed over replicas, or None. Loss and aux are the same on every IPU.
    """
    return _Program(plan, params, batch, seed, replicas, backward).run()


class _Program:
    """One trace of the staged scan."""

    def __init__(self, plan: Plan, params: Sharded, batch: Any, seed: float, replicas: int, backward: bool):
        self.plan, self.params, self.batch, self.seed = plan, params, batch, seed
        self.replicas, self.backward = replicas, backward
        self.layout = params.layout
        self.me = lax.axis_index(IPU_AXIS)
        self.slots = [slot[0] for slot in params.slots]
        self.stash = Stash(plan, self.layout.ipus)
        self.last = len(plan.segments) - 1

    # what a segment reads

    def groups(self, i: int) -> list[Group]:
        return [self.layout.group(name) for name in self.plan.segments[i].groups]

    def weights(self, i: int, slots: Sequence[Any], concurrent: dict[str, Any]) -> dict[str, Any]:
        return {
            g.name: packing.read(slots, g) if g.ipu is not None else jax.tree.unflatten(g.treedef, concurrent[g.name])
            for g in self.groups(i)
        }

    def held(self, i: int) -> Any:
        """The packed weights that segment i uses, and nothing else."""
        used = {leaf.slot for g in self.groups(i) if g.ipu is not None for leaf in g.leaves}
        slots = [slot if k in used else None for k, slot in enumerate(self.slots)]
        return slots, {g.name: self.params.concurrent[g.name] for g in self.groups(i) if g.ipu is None}

    def microbatch(self, at: Any) -> Any:
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, at, keepdims=False), self.batch)

    # the state of the scan

    def start(self) -> dict[str, Any]:
        plan = self.plan
        loss = plan.halves[-1].y
        state: dict[str, Any] = {
            "y": [jax.tree.map(_idle, message) for message in plan.messages],
            "y_in": [jax.tree.map(_idle, m) if r else None for m, r in zip(plan.messages, plan.routes, strict=True)],
            "loss": jnp.zeros((), jnp.promote_types(loss[0].dtype, jnp.float32)),
            "aux": jax.tree.map(lambda a: jnp.zeros((plan.schedule.micro_batches, *a.shape), a.dtype), loss[1]),
        }
        if self.backward:
            zeros = lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))  # noqa: E731
            floats = [[_idle(leaf) for leaf in _floats(message)] for message in plan.messages]
            state |= {
                "dx": floats,
                "dx_in": [f if r else None for f, r in zip(floats, plan.routes, strict=True)],
                "stash": {d: _idle(jax.ShapeDtypeStruct((n,), d)) for d, n in self.stash.sizes.items()},
                "sums": [zeros(slot) for slot in self.slots],
                "concurrent_sums": jax.tree.map(zeros, self.params.concurrent),
            }
        return state

    # F and B of one segment

    def incoming(self, i: int, state: dict[str, Any]) -> tuple[Any, int | None]:
        """The register that segment i reads its x from, and the IPU that it must be broadcast from (or None)."""
        if i == 0:
            return None, None
        lane, before, here = self.plan.lanes[i - 1], self.plan.segments[i - 1].place, self.plan.segments[i].place
        return self.register(lane, "y", state), before if here is None else None

    def outgoing(self, i: int, state: dict[str, Any]) -> tuple[Any, int | None]:
        """The register that segment i reads the cotangent of its result from, likewise."""
        if i == self.last:
            return None, None
        lane, here, after = self.plan.lanes[i], self.plan.segments[i].place, self.plan.segments[i + 1].place
        return self.register(lane, "dx", state), after if here is None else None

    def register(self, lane: int, key: str, state: dict[str, Any]) -> Any:
        return state[f"{key}_in" if self.plan.routes[lane] else key][lane]

    def arrived(
        self, key: tuple[str, int], register: Any, source: int | None, at: Any, carry: dict[str, Any], zero: Any
    ) -> Any:
        """The message itself: out of its ring where messages queue up, and on all IPUs where all need it."""
        if key in self.stash:
            register = jax.tree.unflatten(jax.tree.structure(register), self.stash.read(carry["stash"], key, at, zero))
        return register if source is None else _broadcast(register, source)

    def keep_result(self, i: int, y: Any, at: Any, state: dict[str, Any]) -> dict[str, Any]:
        if i < self.last:
            return {"y": _replaced(state["y"], self.plan.lanes[i], y)}
        loss, aux = y
        return {
            "loss": state["loss"] + loss.astype(state["loss"].dtype),
            "aux": jax.tree.map(lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, at, 0), state["aux"], aux),
        }

    def keep_sums(self, i: int, dparams: Any, state: dict[str, Any], zero: Any) -> dict[str, Any]:
        sums, concurrent = state["sums"], dict(state["concurrent_sums"])
        for group in self.groups(i):
            if group.ipu is not None:
                sums = packing.accumulate(sums, group, dparams[group.name], zero)
            else:
                new = jax.tree.leaves(dparams[group.name])
                concurrent[group.name] = [
                    total + g.astype(total.dtype) for total, g in zip(concurrent[group.name], new, strict=True)
                ]
        return {"sums": sums, "concurrent_sums": concurrent}

    def keep_dx(self, i: int, dx: list[Any], state: dict[str, Any]) -> dict[str, Any]:
        if i == 0:
            return {}
        if self.plan.segments[i].place is None:
            dx = [lax.psum(leaf, IPU_AXIS) for leaf in dx]
        return {"dx": _replaced(state["dx"], self.plan.lanes[i - 1], dx)}

    def run_forward(self, i: int, at: Any, state: dict[str, Any]) -> dict[str, Any]:
        halves = self.plan.halves[i]
        register, source = self.incoming(i, state)

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), register_here, at_here = fence((self.held(i), register, at))
            x = self.arrived(("x", i), register_here, source, at_here, carry, fence.zero)
            y, stash = halves.forward(self.weights(i, slots, concurrent), x, self.microbatch(at_here))
            kept = self.keep_result(i, y, at_here, carry)
            if self.backward and ("stash", i) in self.stash:
                kept["stash"] = self.stash.write(carry["stash"], ("stash", i), at_here, stash, fence.zero)
            return {**carry, **kept}

        keys = ["stash", "y"] if i < self.last else ["stash", "loss", "aux"]
        return self.guarded(self.plan.segments[i].place, at, body, state, keys)

    def run_backward(self, i: int, at: Any, state: dict[str, Any]) -> dict[str, Any]:
        """B: dx, and dparams unless the segment has a W of its own."""
        segment, halves, plan = self.plan.segments[i], self.plan.halves[i], self.plan
        register, source = self.outgoing(i, state)
        x_shape = plan.messages[plan.lanes[i - 1]] if i > 0 else None

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), register_here, at_here = fence((self.held(i), register, at))
            dy = self.arrived(("dy", i), register_here, source, at_here, carry, fence.zero)
            if i == self.last:
                dy = fence([jnp.full((), self.seed, halves.y[0].dtype)])
            if segment.place is None:
                dy = [leaf / self.layout.ipus for leaf in dy]
            saved = self.stash.read(carry["stash"], ("stash", i), at_here, fence.zero)
            weights, microbatch = self.weights(i, slots, concurrent), self.microbatch(at_here)
            if plan.is_split(i):
                dx, cut = halves.backward_input(weights, microbatch, saved, dy)
                stash = self.stash.write(carry["stash"], ("cut", i), at_here, cut, fence.zero)
                return {**carry, **self.keep_dx(i, dx, carry), "stash": stash}
            x_shaped = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), x_shape)  # only its shapes matter
            dparams, dx = halves.backward(weights, x_shaped, microbatch, saved, dy)
            return {**carry, **self.keep_sums(i, dparams, carry, fence.zero), **self.keep_dx(i, dx, carry)}

        keys = ["stash", "dx"] if plan.is_split(i) else ["stash", "sums", "concurrent_sums", "dx"]
        return self.guarded(segment.place, at, body, state, keys)

    def run_weight(self, i: int, at: Any, state: dict[str, Any]) -> dict[str, Any]:
        """W: dparams, from what F stashed and B cut."""
        halves = self.plan.halves[i]

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), at_here = fence((self.held(i), at))
            saved = self.stash.read(carry["stash"], ("stash", i), at_here, fence.zero)
            cut = self.stash.read(carry["stash"], ("cut", i), at_here, fence.zero)
            weights = self.weights(i, slots, concurrent)
            dparams = halves.backward_weight(weights, self.microbatch(at_here), saved, cut)
            return {**carry, **self.keep_sums(i, dparams, carry, fence.zero)}

        return self.guarded(self.plan.segments[i].place, at, body, state, ["stash", "sums", "concurrent_sums"])

    def run_head(self, at: Any, state: dict[str, Any]) -> dict[str, Any]:
        """F and B of the concurrent loss head in one go: nothing of it is stashed."""
        i, halves = self.last, self.plan.halves[self.last]
        register, source = self.incoming(i, state)

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            (slots, concurrent), register_here, at_here = fence((self.held(i), register, at))
            x = self.arrived(("x", i), register_here, source, at_here, carry, fence.zero)
            weights, microbatch = self.weights(i, slots, concurrent), self.microbatch(at_here)
            y, saved = halves.forward(weights, x, microbatch)
            seed = fence([jnp.full((), self.seed / self.layout.ipus, y[0].dtype)])
            dparams, dx = halves.backward(weights, x, microbatch, saved, seed)
            kept = {**self.keep_result(i, y, at_here, carry), **self.keep_sums(i, dparams, carry, fence.zero)}
            return {**carry, **kept, **self.keep_dx(i, dx, carry)}

        return self.guarded(None, at, body, state, ["stash", "loss", "aux", "sums", "concurrent_sums", "dx"])

    def queue_up(self, key: tuple[str, int], lane: int, at: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Puts the message that just came into its ring, on the IPU that holds it, where messages queue up."""
        if key not in self.stash:
            return state
        register = self.register(lane, "y" if key[0] == "x" else "dx", state)

        def body(fence: Fence, carry: dict[str, Any]) -> dict[str, Any]:
            leaves, at_here = fence((jax.tree.leaves(register), at))
            return {"stash": self.stash.write(carry["stash"], key, at_here, leaves, fence.zero)}

        return self.guarded(self.stash.holder(key), at, body, state, ["stash"])

    def guarded(self, place: int | None, at: Any, body: Any, state: dict[str, Any], keys: list[str]) -> dict[str, Any]:
        active = at >= 0 if place is None else (at >= 0) & (self.me == place)
        carry = {key: state[key] for key in keys if key in state}
        return {**state, **_guard(active, body, carry)}

    # the tick

    def exchange(self, state: dict[str, Any], key: str, *, back: bool) -> dict[str, Any]:
        received = list(state[f"{key}_in"])
        for lane, pairs in enumerate(self.plan.routes):
            if pairs:
                permutation = [(b, a) for a, b in pairs] if back else list(pairs)
                received[lane] = jax.tree.map(lambda v, p=permutation: lax.ppermute(v, IPU_AXIS, p), state[key][lane])
        return {**state, f"{key}_in": received}

    def sent(self, i: int, f: Any, state: dict[str, Any]) -> dict[str, Any]:
        """After F of segment i, and its exchange if there is one."""
        return state if i == self.last else self.queue_up(("x", i + 1), self.plan.lanes[i], f[i], state)

    def sent_back(self, i: int, b: Any, state: dict[str, Any]) -> dict[str, Any]:
        """After B of segment i, and its exchange if there is one."""
        return state if i == 0 else self.queue_up(("dy", i - 1), self.plan.lanes[i - 1], b[i], state)

    def tick(self, state: dict[str, Any], row: tuple[Any, Any, Any]) -> tuple[dict[str, Any], None]:
        f, b, w = row
        plan = self.plan
        local = [i for i, segment in enumerate(plan.segments) if segment.place is not None]
        entry = [i for i, s in enumerate(plan.segments) if plan.schedule.phase(s.first, "F") == "entry"]
        one_phase = plan.schedule.clock == "one-phase"

        def backward(state: dict[str, Any]) -> dict[str, Any]:
            for i in reversed(local):
                state = self.run_backward(i, b[i], state)
            for i in local:
                if plan.is_split(i):
                    state = self.run_weight(i, w[i], state)
            return state

        def back(state: dict[str, Any]) -> dict[str, Any]:
            state = self.exchange(state, "dx", back=True)
            for i in local:
                state = self.sent_back(i, b, state)
            return state

        for i in entry:
            state = self.sent(i, f, self.run_forward(i, f[i], state))
        for i in local:
            state = self.run_forward(i, f[i], state)
        if self.backward and one_phase:
            state = backward(state)
        state = self.exchange(state, "y", back=False)
        for i in local:
            state = self.sent(i, f, state)
        if self.backward and one_phase:
            state = back(state)
        if plan.segments[-1].place is None:
            if self.backward:
                state = self.sent_back(self.last, f, self.run_head(f[self.last], state))
            else:
                state = self.run_forward(self.last, f[self.last], state)
        if self.backward:
            if not one_phase:
                state = back(backward(state))
            for i in reversed(entry):
                state = self.sent_back(i, b, self.run_backward(i, b[i], state))
        return state, None

    def run(self) -> tuple[Any, Any, Any]:
        ticks = self.plan.schedule.ticks if self.backward else self.plan.schedule.forward_ticks
        tables = (self.plan.forward, self.plan.backward, self.plan.weight)
        rows: Any = tuple(jnp.asarray(table[:ticks]) for table in tables)
        state, _ = lax.scan(self.tick, self.start(), rows)
        loss, aux = state["loss"] / self.plan.schedule.micro_batches, state["aux"]
        place = self.plan.segments[-1].place
        if place is not None:
            loss, aux = _broadcast((loss, aux), place)
        if self.replicas > 1:
            loss = lax.pmean(loss, REPLICA_AXIS)
        return loss, aux, self.gradients(state) if self.backward else None

    def gradients(self, state: dict[str, Any]) -> Sharded:
        sums, concurrent = state["sums"], dict(state["concurrent_sums"])
        for group in self.layout.groups:
            if group.ipu is None:
                # what every IPU holds whole got a part of its gradient on each
                concurrent[group.name] = [
                    g if IPU_AXIS in leaf.spec else lax.psum(g, IPU_AXIS)
                    for leaf, g in zip(group.leaves, concurrent[group.name], strict=True)
                ]
        found = Sharded([total[None] for total in sums], concurrent, self.layout)
        if self.replicas > 1:
            found = jax.tree.map(lambda g: lax.psum(g, REPLICA_AXIS), found)
        return jax.tree.map(lambda g, p: g.astype(p.dtype), found, self.params)


def _replaced(values: Sequence[Any], at: int, value: Any) -> list[Any]:
    return [value if i == at else old for i, old in enumerate(values)]

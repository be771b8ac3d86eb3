"""Join neighbouring stages in one place into a segment: one function from message to message.

    Message(y, skips, loss)  ->  stage 3  ->  stage 4  ->  Message(y, skips, loss)

A skip that a stage sends travels in the message, from stage to stage, up to the last stage that takes it. A loss that a
stage adds travels to the end, where the last stage's loss is added to it.
"""

import dataclasses
import warnings
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ipu_jax.base.annotations import Batch, Function, Key, Params, Tree, Value
from ipu_jax.core.programs.prices import ON_CPU, Prices
from ipu_jax.core.programs.recompute import ValueOrigin, recomputing
from ipu_jax.core.schedules import Schedule
from ipu_jax.core.stage import Outputs, Role, Stage, naming


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Message:
    """The message between stages: the sender's `y`, skips that later stages take, and the loss added so far."""

    y: Tree
    skips: dict[str, Tree] = dataclasses.field(default_factory=dict)
    loss: Value = None


NO_MESSAGE = Message(None)
"""The message to the first stage: there is no y, only the micro-batch."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MicrobatchInputs:
    """The inputs that F and B share: the micro-batch, and each stage's random key or None."""

    microbatch: Batch
    keys: tuple[Key, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SegmentResults:
    """Hold the results of a segment.

    Attributes:
        y: the message; on the last segment the loss, in prediction the outputs.
        state: the new state per group.
        aux: the aux per stage; prediction has none.
        adds_loss: whether the segment or an earlier one adds a loss to the last stage's loss.
    """

    y: Tree
    state: dict[str, Tree]
    aux: dict[str, Tree]
    adds_loss: bool = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring stages in one place that run one after the other, with no message sent between them.

    Attributes:
        stages: the stages, in order.
        first: the number of its first stage.
        onward: per stage, the names of the skips that later stages take.
        role: the purpose, which decides which functions run and whether they change the state.
        stashes: whether F and B are separate tasks, so that the values of F that B reads are stashed.
        backward: whether there is a B; otherwise nothing is kept or computed again for it.
        exact: whether all ways to run the stages add cotangents and gradients in one order.
        prices: decide which values B computes again.
    """

    stages: tuple[Stage, ...]
    first: int
    onward: tuple[frozenset[str], ...]
    role: Role = "training"
    stashes: bool = True
    backward: bool = True
    exact: bool = False
    prices: Prices = ON_CPU

    @property
    def place(self) -> int | None:
        return self.stages[0].place

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.groups))

    @property
    def state_groups(self) -> tuple[str, ...]:
        return tuple(stage.state for stage in self.stages if stage.state is not None)

    @property
    def name(self) -> str:
        return " + ".join(stage.name for stage in self.stages)

    @property
    def recomputes(self) -> bool:
        """Return whether B may compute any residual again: no stage has a `recompute` of its own."""
        return self.stashes and all(stage.recompute == "auto" for stage in self.stages)

    def _function(self, stage: Stage) -> Function:
        fn = stage.function(self.role)
        if not self.backward:
            return fn
        is_auto = stage.recompute == "auto" and self.stashes
        if is_auto or self.exact:  # each part of a stage adds up cotangents apart, whatever it keeps
            origins = (ValueOrigin.WEIGHTS, ValueOrigin.COMPUTED, ValueOrigin.GIVEN)
            fn = recomputing(fn, origins, self.prices if is_auto else None)
        return stage.checkpointed(fn)

    def _changes_state(self, stage: Stage, out: Outputs) -> bool:
        if self.role == "prediction":
            return stage.predict is not None and out.state is not None
        return self.role != "evaluation"

    def __call__(
        self, params: Mapping[str, Params], x: Message, inputs: MicrobatchInputs, state: Mapping[str, Tree]
    ) -> tuple[Message, dict[str, Tree], dict[str, Tree]]:
        """Return `(message, new state per group, aux per stage)`."""
        new_state, aux = dict(state), {}
        of_stages = zip(self.stages, self.onward, inputs.keys, strict=True)
        for number, (stage, onward, key) in enumerate(of_stages, self.first):
            with naming(stage.name, number):
                weights = None if stage.params is None else params[stage.params]
                extra: dict[str, Tree] = {"key": key} if stage.random else {}
                if stage.state is not None:
                    extra["state"] = new_state[stage.state]
                if stage.takes:
                    extra["skips"] = {name: _taken(name, stage, x) for name in stage.takes}
                if stage.shared:
                    extra["shared"] = {name: params[name] for name in stage.shared}
                out = self._function(stage)(weights, x.y, inputs.microbatch, **extra)
                if out is None:
                    raise ValueError(f"stage {stage.name!r} returns None: return y, or from the last stage the loss")
                out = out if isinstance(out, Outputs) else Outputs(out)
                if self.role == "prediction" and not (stage.predict or stage.evaluate) and out.state is not None:
                    warnings.warn(
                        f"stage {stage.name!r}: predict drops the state that fn returns, so every micro-batch reads "
                        "the same state: give Stage(..., predict=fn) to continue with it (a cache), or evaluate= a "
                        "function that returns no state",
                        stacklevel=2,
                    )
                if stage.state is not None and self._changes_state(stage, out):
                    new_state[stage.state] = _checked_state(stage, out.state, extra["state"])
                if stage.state is None and out.state is not None:
                    raise ValueError(
                        f"stage {stage.name!r} returns state but holds none: name its group, Stage(..., state='name')"
                    )
                if out.aux is not None:
                    aux = merged_aux(aux, {stage.name: out.aux})
                loss = None if self.role == "prediction" else _added(stage, x.loss, out.loss)
                x = Message(out.y, _sent(stage, out.skips, x.skips, onward), loss)
        return x, new_state, aux


def merged_aux(one: Mapping[str, Tree], other: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return the aux of both, by stage name.

    Raises:
        ValueError: two stages with the same name return aux.
    """
    twice = one.keys() & other.keys()
    if twice:
        raise ValueError(f"two stages called {min(twice)!r} return aux: give them names of their own, name=...")
    return {**one, **other}


def _taken(name: str, stage: Stage, x: Message) -> Tree:
    if name not in x.skips:
        raise ValueError(
            f"stage {stage.name!r} takes skip {name!r}, which no earlier stage sends: "
            f"return Outputs(y, skips={{{name!r}: ...}}) from one"
        )
    return x.skips[name]


def _sent(stage: Stage, new: Mapping[str, Tree], old: dict[str, Tree], onward: frozenset[str]) -> dict[str, Tree]:
    for name in new:
        if name not in onward:
            raise ValueError(f"stage {stage.name!r} sends skip {name!r}, which no later stage takes: leave it out")
        if name in old:
            raise ValueError(
                f"stage {stage.name!r} sends skip {name!r}, which is still on its way from an earlier stage: "
                "give it another name"
            )
    return {name: value for name, value in {**old, **new}.items() if name in onward}


def _added(stage: Stage, old: Tree, new: Tree) -> Tree:
    if new is None:
        return old
    if jnp.shape(new) != () or not jnp.issubdtype(jnp.result_type(new), jnp.floating):
        raise ValueError(
            f"stage {stage.name!r} adds a loss of {jnp.result_type(new)}{list(jnp.shape(new))}: "
            "return Outputs(y, loss=...) with a float scalar"
        )
    return jnp.asarray(new) if old is None else old + new


def _checked_state(stage: Stage, new: Tree, old: Tree) -> Tree:
    def of(tree: Tree) -> list[Value]:  # not a tree: its nodes may be compared by identity
        return [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)]

    if jax.tree.structure(new) != jax.tree.structure(old) or of(new) != of(old):
        raise ValueError(
            f"stage {stage.name!r} got state {_described(old)} and returns {_described(new)}: "
            "return Outputs(y, state=...) with the same tree, shapes and dtypes"
        )
    return new


def _described(tree: Tree) -> str:
    return str(jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree))


def whole(stages: tuple[Stage, ...], role: Role) -> Segment:
    """Return one segment of all stages: the unsharded model."""
    return Segment(stages, 0, _onward(stages), role, backward=role == "training")


def one_by_one(stages: tuple[Stage, ...]) -> tuple[Segment, ...]:
    """Return a segment for each stage."""
    onward = _onward(stages)
    return tuple(Segment((stage,), i, (onward[i],), "training") for i, stage in enumerate(stages))


def segments_of(
    stages: tuple[Stage, ...],
    schedule: Schedule,
    role: Role = "training",
    *,
    prices: Prices,
    backward: bool = True,
    exact: bool = False,
) -> tuple[Segment, ...]:
    """Return segments of neighbouring stages that are in one place and always run in the same tick."""
    when = list(zip(schedule.forward, schedule.backward, schedule.weight or schedule.backward, strict=True))
    found: list[Segment] = []
    for number, (stage, onward) in enumerate(zip(stages, _onward(stages), strict=True)):
        if found and found[-1].place == stage.place and when[number] == when[number - 1]:
            joined = found[-1]
            found[-1] = dataclasses.replace(joined, stages=(*joined.stages, stage), onward=(*joined.onward, onward))
        else:
            stashes = schedule.phase(number, "F") != "head"  # there, B follows F in the same task
            found.append(Segment((stage,), number, (onward,), role, stashes, backward, exact, prices))
    return tuple(found)


def _onward(stages: tuple[Stage, ...]) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(name for later in stages[i + 1 :] for name in later.takes) for i in range(len(stages)))


def loss_and_aux(message: Message, aux: Mapping[str, Tree], last: Stage) -> tuple[Value, dict[str, Tree]]:
    """Return the loss and the aux by stage, given the last stage's message, whose y is a loss or `(loss, aux)`."""
    y = loss = message.y
    if isinstance(y, tuple) and len(y) == 2:
        loss, aux = y[0], merged_aux(aux, {last.name: y[1]})
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        found = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise ValueError(
            f"the last stage, {last.name!r}, returns {found}: "
            "return the micro-batch's mean loss, a float scalar, or (loss, aux)"
        )
    return loss if message.loss is None else loss + message.loss, dict(aux)


def call_segment(
    segment: Segment, params: Params, x: Message, inputs: MicrobatchInputs, state: Mapping[str, Tree], last: bool
) -> SegmentResults:
    """Return a segment's results."""
    message, new_state, aux = segment(params, x, inputs, state)
    if segment.role == "prediction":
        return SegmentResults(message.y if last else message, new_state, {}, adds_loss=False)
    y, adds_loss = message, message.loss is not None
    if last:
        y, aux = loss_and_aux(message, aux, segment.stages[-1])
    return SegmentResults(y, new_state, aux, adds_loss)


def keys_of(key: Key, replica: Value, microbatch: Value, numbers: Value, stages: tuple[Stage, ...]) -> tuple[Key, ...]:
    """Return each stage's random key, `key` with replica, micro-batch and stage folded in; None where none is taken.

    The stage is not folded in for stages with `random="same"`.
    """
    if key is None:
        return (None,) * len(stages)
    own = jax.random.fold_in(jax.random.fold_in(key, replica), microbatch)
    keys = [
        own if stage.random == "same" else jax.random.fold_in(own, n) for stage, n in zip(stages, numbers, strict=True)
    ]
    return tuple(key if stage.random else None for key, stage in zip(keys, stages, strict=True))

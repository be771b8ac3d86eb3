"""The carry of the staged scan: the arrays that one IPU keeps from tick to tick."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from ipu_jax.base.annotations import Tree, Value
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.engine.stash import Stash
from ipu_jax.core.layout.packing import arrays_of
from ipu_jax.core.mesh.axes import kept_split
from ipu_jax.core.step_args import StepArgs

# switches for tests, which set them before a program is traced
IDLE_FILL = 0.0
"""The initial value of channels and stash. Tests set it to NaN, so that any use of a bubble's value shows."""

WATCH: Callable[..., None] | None = None
"""Called on the host whenever an IPU runs a task: `WATCH(kind, stage=, microbatch=, tick=, ipu=, replica=)`, where
`stage` is the first stage of the task's segment. Tests count the executed tasks with it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carry:
    """Hold the arrays that one IPU keeps from tick to tick. A pytree.

    A guard carries a part of it, in which the other fields are None.

    Attributes:
        guards_run: int32, the number of guards that were active so far.
        y, dx: per channel, the message and the gradient that this IPU computed last; None for a channel whose segments
            have another outbox.
        y_received, dx_received: per channel that crosses IPUs, the message and the gradient that this IPU received
            last; None for other channels.
        loss: the sum over micro-batches so far; None in prediction.
        outputs: in prediction, the outputs of every micro-batch, on the IPUs of the last stage.
        aux: per segment, the aux of every micro-batch.
        model_state: the state of the model's stages: per array of its layout, what this IPU has of it.
        stash: the buffers of `Stash`.
        sums: per array of the weights, the sum of gradients so far; None for an array without trained weights.
    """

    guards_run: Value = None
    y: Tree = None
    y_received: Tree = None
    dx: Tree = None
    dx_received: Tree = None
    loss: Value = None
    outputs: Tree = None
    aux: dict[int, Tree] = dataclasses.field(default_factory=dict)
    model_state: Tree = None
    stash: Tree = None
    sums: Tree = None

    def part(self, names: Iterable[str], *, aux_of: int | None = None) -> "Carry":
        """Return only these fields, and the aux of one segment."""
        fields: dict[str, Tree] = {name: getattr(self, name) for name in names}
        return Carry(**fields, aux={} if aux_of is None else {aux_of: self.aux[aux_of]})

    def with_part(self, part: "Carry") -> "Carry":
        """Return this carry, updated with the fields of a part."""
        fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name != "aux"}
        changed = {name: value for name, value in fields.items() if value is not None}
        return dataclasses.replace(self, **changed, aux={**self.aux, **part.aux})


def first_carry(plan: Plan, args: StepArgs, stash: Stash) -> Carry:
    """Return the carry of the first tick: zero sums, and no messages in the channels and the stash."""
    crossing = [bool(channel.pairs) for channel in plan.channels]
    messages = [jax.tree.map(_idle, channel.message) for channel in plan.channels]
    count, last = plan.schedule.micro_batches, plan.programs[-1].y
    of_y, of_dx = plan.outboxes("y"), plan.outboxes("dx")
    predicts = plan.role == "prediction"
    carry = Carry(
        guards_run=jnp.int32(0),
        y=[message if k in of_y else None for k, message in enumerate(messages)],
        y_received=[message if crosses else None for message, crosses in zip(messages, crossing, strict=True)],
        loss=None if predicts else jnp.zeros((), jnp.promote_types(last.dtype, jnp.float32)),
        outputs=_zeros_per_microbatch(count, last) if predicts else None,
        aux={i: _zeros_per_microbatch(count, program.results.aux) for i, program in enumerate(plan.programs)},
        model_state=arrays_of(args.state),
    )
    if not plan.backward:
        return carry
    gradients = [[_idle(leaf) for leaf in channel.carried("dx")] for channel in plan.channels]
    arrays = zip(plan.params.arrays, arrays_of(args.params), strict=True)
    zeros_like = lambda leaf: jnp.zeros_like(leaf, jnp.promote_types(leaf.dtype, jnp.float32))
    return dataclasses.replace(
        carry,
        dx=[leaves if k in of_dx else None for k, leaves in enumerate(gradients)],
        dx_received=[leaves if crosses else None for leaves, crosses in zip(gradients, crossing, strict=True)],
        stash=jax.tree.map(_idle, stash.shapes),
        sums=[
            kept_split(zeros_like(value), array.spec) if k in plan.params.trained_arrays else None
            for k, (array, value) in enumerate(arrays)
        ],
    )


def _zeros_per_microbatch(count: int, shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)


def _idle(shape: jax.ShapeDtypeStruct) -> jax.Array:
    fill = IDLE_FILL if jnp.issubdtype(shape.dtype, jnp.inexact) else 0
    return jnp.full(shape.shape, fill, shape.dtype)

"""Say what a training step asks of the model that it trains, whether this is a pipeline or a loss function."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh

from ipu_jax.base.annotations import Batch, Function, Params, Tree, Value
from ipu_jax.base.showing import counted
from ipu_jax.core.optimizer.blocks import Blocks
from ipu_jax.core.options import Reduction
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.core.weights.place import Place
from ipu_jax.training.update.nonfinite import UpdateFlags
from ipu_jax.training.update.state import TrainState


class Gradients(NamedTuple):
    """The gradients of one replica for an update, and what comes with them, in its mapped program.

    Attributes:
        loss: the replica's mean loss.
        aux: the model's aux, leaves (M, ...), or None.
        sums: per block, the gradients' sums over the micro-batches, at least float32.
        stages: the stages' new state, over all replicas, or None.
    """

    loss: Value
    aux: Tree
    sums: list[Tree]
    stages: Tree


class Model(Protocol):
    """What a training step trains. Weights are whole, as a user gives them, or placed, as `place` returns them.

    Without a word of its own, a model has no guards, freezes nothing, and its aux came with the loss.

    Attributes:
        kind: what it is, in words.
        runs: the `Pipeline` or `Replicas`, with all its replicas and in the step's precision.
        random: whether it takes a key.
        state_groups: the names of the stages' state.
        takes_unused_key: whether it takes a key that nothing reads.
        mesh, replicas, m, reduction: as `runs` has them; `m` is its gradient accumulation.
    """

    kind: str
    runs: Any
    random: bool
    state_groups: Sequence[str]
    takes_unused_key = False
    mesh: Mesh
    replicas: int
    m: int
    reduction: Reduction

    def __init__(self, runs: Any, *, random: bool, state_groups: Sequence[str] = ()):
        self.runs, self.random, self.state_groups = runs, random, state_groups
        self.mesh, self.replicas = runs.mesh, runs.replicas
        self.m, self.reduction = runs.options.gradient_accumulation, runs.options.reduction

    def describe(self) -> str:
        """Return a line about the kind of the model and its sizes."""
        replicas = f" x {self.replicas} replicas" * given_dims(self.replicas)
        return f"{self.kind} on {counted(self.runs.ipus, 'IPU')}{replicas}, {counted(self.m, 'micro-batch')} per update"

    def check(self, given: StepArgs) -> None:
        """Raise the `ValueError` that `value_and_grad` would raise for these arguments."""

    def check_guards(self, program: Any, args: Tree, lower: Callable[[], Any], *, runs: bool = True) -> None:
        """Choose the guards of a jitted program before it runs, or is only lowered; see `GuardChoice.check`."""

    def has(self, params: Params) -> bool:
        """Return whether a state's weights belong to this kind of model."""
        ...

    def freezes_as(self, params: Params) -> bool:
        """Return whether the weights of a state were placed by a model that freezes the same leaves."""
        return True

    def loss(self, given: StepArgs) -> tuple[Value, Tree]:
        """Return the loss and the aux, or None, of arguments as a user gives them, without gradients."""
        ...

    def aux_of_loss(self, aux: Tree) -> Tree:
        """Return the aux that came with the loss itself: the last stage's aux, if the aux is a dict by stage name."""
        return aux

    def place(self, params: Params) -> Params:
        """Place whole weights on the IPUs."""
        ...

    def layout(self, placed: Params) -> Any:
        """Return what the blocks of weights depend on; it can be hashed."""
        ...

    def blocks(self, placed: Params, replicas: int) -> Blocks:
        """Return the blocks of the weights, each divided among this many replicas."""
        ...

    def trained(self, placed: Params, whole: Tree) -> list[Value]:
        """Return the trained leaves of a whole tree with the structure of the weights."""
        ...

    def frozen(self, placed: Params) -> list[bool]:
        """Return, per leaf of the whole weights, whether it is frozen."""
        ...

    def places(self, placed: Params) -> list[Place]:
        """Return where each leaf of the whole weights is in the arrays of a checkpoint."""
        ...

    def assembled(self, placed: Params, leaves: Sequence[Value]) -> Params:
        """Return the whole weights from their leaves, in the order of `places`."""
        ...

    def on_ipus(self, program: Function, *, in_specs: Tree, out_specs: Tree) -> Function:
        """Map a program over the IPUs of all replicas. The result takes and returns global arrays."""
        ...

    def loss_cotangent(self, scale: Value, *, weighted: bool) -> Value:
        """Return the cotangent of one micro-batch's loss; a `weighted` loss is divided by its count later."""
        return scale if weighted or self.reduction == "sum" else scale / (self.m * self.replicas)

    def gradients(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Gradients:
        """Return this replica's loss and gradients; its batch has leaves (M, micro-batch, ...).

        Raises:
            ValueError: the loss is `weighted`, and a stage adds a loss that has no count.
        """
        ...

    def probed(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Tree:
        """Run an update with probes inside `jax.jit`, and return their flags; `args` has all dims."""
        ...

    def flags(self, state: TrainState, batch: Batch, results: Tree) -> UpdateFlags:
        """Return the flags by name, from what `probed` returned, on the host."""
        ...

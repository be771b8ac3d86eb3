"""Say what a training step asks of the model that it trains, whether this is a pipeline or a loss function."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh

from ipu_jax.base.annotations import Function, Params, Tree, Value
from ipu_jax.base.showing import counted
from ipu_jax.core.layout.layout import PackedLayout
from ipu_jax.core.options import Reduction
from ipu_jax.core.stage import Stage
from ipu_jax.core.step_args import StepArgs, given_dims


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
    """Describe a model to the training step. Weights are whole, as users give them, or placed, as `place` returns them.

    Without a word of its own, a model has nothing to choose, freezes nothing, and its aux came with the loss.

    Attributes:
        kind: a name for the line of `describe`.
        runs: the `Pipeline` or `Replicas`, with all its replicas and in the step's precision.
        random: whether it takes a key.
        stages: the model as stages; a loss function is a single one.
        state_groups: the names of the stages' state.
        takes_unused_key: whether it takes a key that nothing reads.
        mesh, replicas, m, reduction: as `runs` has them; `m` is its gradient accumulation.

    Methods:
        check: raise the `ValueError` that `value_and_grad` would raise for arguments as a user gives them.
        has: return whether a state's weights belong to this kind of model.
        loss: return the loss and the aux, or None, of arguments as a user gives them, without gradients.
        place: place whole weights on the IPUs.
        layout: return where each leaf of placed weights is.
        on_ipus: map a program over the IPUs of all replicas; the result takes and returns global arrays.
        gradients: return this replica's loss and gradients; its batch has leaves (M, micro-batch, ...). It raises
            `ValueError` if the loss is `weighted`, and a stage adds a loss that has no count.
    """

    kind: str
    runs: Any
    random: bool
    stages: tuple[Stage, ...]
    state_groups: Sequence[str]
    takes_unused_key = False
    mesh: Mesh
    replicas: int
    m: int
    reduction: Reduction

    def __init__(self, runs: Any, stages: tuple[Stage, ...], *, random: bool, state_groups: Sequence[str] = ()):
        self.runs, self.stages, self.random, self.state_groups = runs, stages, random, state_groups
        self.mesh, self.replicas = runs.mesh, runs.replicas
        self.m, self.reduction = runs.options.gradient_accumulation, runs.options.reduction

    def check(self, given: StepArgs) -> None: ...
    def has(self, params: Params) -> bool: ...
    def loss(self, given: StepArgs) -> tuple[Value, Tree]: ...
    def place(self, params: Params) -> Params: ...
    def layout(self, placed: Params) -> PackedLayout: ...
    def on_ipus(self, program: Function, *, in_specs: Tree, out_specs: Tree) -> Function: ...
    def gradients(self, args: StepArgs, loss_cotangent: Value, *, weighted: bool) -> Gradients: ...

    def describe(self) -> str:
        """Return a line about the kind of the model and its sizes."""
        replicas = f" x {self.replicas} replicas" * given_dims(self.replicas)
        return f"{self.kind} on {counted(self.runs.ipus, 'IPU')}{replicas}, {counted(self.m, 'micro-batch')} per update"

    def scheduled(self, given: Callable[[], StepArgs]) -> Any:
        """Return what is chosen for these arguments before a program is traced; see `PlacedStages.scheduled`."""

    def guarded(self, chosen: Any, program: Any, args: Tree, lower: Callable[[Any], Any], *, runs: bool = True) -> Any:
        """Return what is chosen, with the guards that a program needs; see `PlacedStages.guarded`."""
        return chosen

    def on(self, chosen: Any) -> "Model":
        """Return the model with what was chosen."""
        return self

    def freezes_as(self, params: Params) -> bool:
        """Return whether the weights of a state were placed by a model that freezes the same leaves."""
        return True

    def aux_of_loss(self, aux: Tree) -> Tree:
        """Return the aux that came with the loss itself: the last stage's aux, if the aux is a dict by stage name."""
        return aux

    def loss_cotangent(self, scale: Value, *, weighted: bool) -> Value:
        """Return the cotangent of one micro-batch's loss; a `weighted` loss is divided by its count later."""
        return scale if weighted or self.reduction == "sum" else scale / (self.m * self.replicas)

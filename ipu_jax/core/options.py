"""Define the options of pipelines and training steps: frozen dataclasses, checked when they are made.

    PipelineOptions(gradient_accumulation=16, reduction="mean")
    TrainOptions(device_iterations=10, max_gradient_norm=1.0, shard_optimizer=True)

Errors are raised before anything is traced or compiled, and give the value, the rule and a fix.
"""

import dataclasses
from typing import Any, Literal, get_args

from ipu_jax.base.checks import check_bool, check_choice, check_count, check_positive, in_line
from ipu_jax.base.decorators import public

Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")
Precision = Literal["32.32", "16.32", "16.16"]
Half = Literal["bfloat16", "float16"]
OnNonFinite = Literal["stop", "skip"]


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """Options of a pipeline's weight update.

    Attributes:
        gradient_accumulation: M, the micro-batches that make one weight update; at least 1.
        reduction: the gradients are the "mean" or the "sum" over the M micro-batches and the replicas.

    Raises:
        ValueError: a value breaks its rule.
    """

    gradient_accumulation: int = 1
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        _keep(self, gradient_accumulation=check_count("gradient_accumulation", self.gradient_accumulation))
        check_choice("reduction", self.reduction, REDUCTIONS)


@public
@dataclasses.dataclass(frozen=True)
class DynamicScale:
    """A loss scale that grows as far as possible. An update with an inf or NaN in its gradients is skipped.

    A skipped update leaves weights, optimizer state and stages' state unchanged, on all IPUs and replicas.

    Attributes:
        initial: the scale of the first update.
        growth_interval: after this many good updates in a row the scale is multiplied by `factor`.
        factor: the scale grows by this factor, and is divided by it after a skipped update; above 1.
        smallest, largest: the bounds of the scale.

    Raises:
        ValueError: a value breaks its rule.
    """

    initial: float = 2.0**15
    growth_interval: int = 1000
    factor: float = 2.0
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        _keep(self, growth_interval=check_count("growth_interval", self.growth_interval))
        for name in ("initial", "factor", "smallest", "largest"):
            _keep(self, **{name: check_positive(name, getattr(self, name))})
        if self.factor <= 1:
            raise ValueError(f"factor={self.factor} does not grow: give one above 1, such as 2")
        if not self.smallest <= self.initial <= self.largest:
            raise ValueError(
                f"initial={self.initial} is outside smallest={self.smallest} to largest={self.largest}: "
                "start between the two"
            )


@public
@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Options of a `TrainStep`: how weights are updated, and how often per call.

    Attributes:
        replication_factor: the number of copies of the model. None: the model's, or 1 for a plain function.
        gradient_accumulation: M, the micro-batches of a replica in one weight update. None: the model's, or 1.
        reduction: the gradients are the "mean" or the "sum" over micro-batches and replicas. None: the model's, or
            "mean".
        weighted: whether the loss of a micro-batch is a sum that comes with its count: the loss function, or the last
            stage, returns `(sum, count)`, or `(sum, aux)` with `aux["count"]`. The mean is then exactly the sum over
            all micro-batches and replicas, divided by the sum of their counts; 0 if the counts sum to 0. No stage may
            add a loss (`Outputs(loss=)`).
        device_iterations: the number of weight updates in one call.
        outputs: which updates' outputs a call returns: "final" (the last update's), "all", their "sum", or a number n
            (every n-th update's, with n a divisor of `device_iterations`, and the last update's of a `FeedBatch` that
            is cut short). A sum includes all outputs, even norms and learning rates.
        max_gradient_norm: gradients are scaled down to this norm, taken over all weights of all IPUs; None for never.
        loss_scale: the factor by which the loss is multiplied for the backward pass, or a `DynamicScale`.
        precision: the precision of the computation, and of sums, weights and optimizer state.
        half: the dtype that 16 means in `precision`.
        stochastic_rounding: whether weights in half are rounded up or down at random, so that small updates are not
            lost.
        shard_optimizer: whether each replica keeps and updates only its part of the optimizer's state (replicated
            tensor sharding).
        donate: whether a call gives the buffers of its state to the new state, so that the old one cannot be used
            again. False keeps the old state, at the cost of one more copy of weights and optimizer state.
        norms: whether `StepOutputs` contain the norms of gradients and weights. They cost one more pass over both, and
            one psum of two floats.
        ema_decay: the decay of a moving average of the trained weights, e' = e + (1 - ema_decay) (w - e), which begins
            at the first weights: between 0 and 1, such as 0.999. `TrainStep.loss(..., ema=True)` evaluates the average
            and `TrainStep.whole` returns it. It takes the bytes of the weights in float32, divided over the replicas
            under `shard_optimizer`. None: no average.
        on_nonfinite: what happens to an update whose loss or gradients are not finite. "stop" and "skip" do not make
            it: weights, optimizer state, stages' state and average keep their bits. "stop": no later update is made
            either, and a later call raises `NonFiniteLossError`, which names update, replica, micro-batch and stage.
            "skip": the next update is made, and a later call warns with the same names. None: the update is made. A
            `DynamicScale` still handles gradients that overflow while the loss is finite. The last few batches are kept
            until their updates have ended.
        exact: whether a pipeline's training has the same bits under every schedule, recompute and number of IPUs. XLA
            rewrites no operation, and gradients are added in one order; a policy of `jax.checkpoint_policies` keeps no
            value of a stage's parts. The docs say what still changes bits (how-to.md#the-same-bits).
        max_skips: under on_nonfinite="skip", this many such updates in a row stop the training as under "stop".
        offload: what rests in the host's memory: ("optimizer",) is the optimizer's state and the average of weights.
            An update fetches and stores them array by array, or some rows at a time if it is elementwise. It waits for
            these copies, and computes the same; of leaves that several IPUs hold, XLA may round the last bit otherwise.
            Numbers that all IPUs hold, such as a count, stay on them. () is nothing.

    Raises:
        ValueError: a value breaks its rule, or contradicts another.
    """

    replication_factor: int | None = None
    gradient_accumulation: int | None = None
    reduction: Reduction | None = None
    weighted: bool = False
    device_iterations: int = 1
    outputs: Literal["final", "all", "sum"] | int = "final"
    max_gradient_norm: float | None = None
    loss_scale: float | DynamicScale = 1.0
    precision: Precision = "32.32"
    half: Half = "bfloat16"
    stochastic_rounding: bool = False
    shard_optimizer: bool = False
    donate: bool = True
    norms: bool = False
    ema_decay: float | None = None
    on_nonfinite: OnNonFinite | None = None
    max_skips: int = 10
    exact: bool = False
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("replication_factor", "gradient_accumulation"):
            if getattr(self, name) is not None:
                _keep(self, **{name: check_count(name, getattr(self, name))})
        if self.reduction is not None:
            check_choice("reduction", self.reduction, REDUCTIONS)
        for name in ("weighted", "stochastic_rounding", "shard_optimizer", "norms", "donate", "exact"):
            _keep(self, **{name: check_bool(name, getattr(self, name))})
        _keep(self, device_iterations=check_count("device_iterations", self.device_iterations))
        self._check_outputs()
        self._check_offload()
        if self.max_gradient_norm is not None:
            _keep(self, max_gradient_norm=check_positive("max_gradient_norm", self.max_gradient_norm))
        if self.ema_decay is not None:
            _keep(self, ema_decay=check_positive("ema_decay", self.ema_decay))
            if self.ema_decay >= 1:
                raise ValueError(
                    f"ema_decay={self.ema_decay} keeps the first weights for ever: give one below 1, such as 0.999"
                )
        if isinstance(self.loss_scale, str):
            raise ValueError(f"loss_scale={self.loss_scale!r} is not a number: give one above 0, or DynamicScale()")
        if not isinstance(self.loss_scale, DynamicScale):
            _keep(self, loss_scale=check_positive("loss_scale", self.loss_scale))
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("half", self.half, get_args(Half))
        if self.on_nonfinite is not None:
            check_choice("on_nonfinite", self.on_nonfinite, get_args(OnNonFinite))
        _keep(self, max_skips=check_count("max_skips", self.max_skips))
        if self.max_skips != type(self).max_skips and self.on_nonfinite != "skip":
            raise ValueError(
                f"max_skips={self.max_skips} with on_nonfinite={self.on_nonfinite!r}: no update is skipped; give "
                "on_nonfinite='skip' too, or leave it out"
            )
        if self.stochastic_rounding and self.precision != "16.16":
            raise ValueError(
                f"stochastic_rounding=True with precision={self.precision!r}: weights are held in float32, and nothing "
                "is rounded; use precision='16.16'"
            )

    def _check_outputs(self) -> None:
        if isinstance(self.outputs, str):
            check_choice("outputs", self.outputs, ("final", "all", "sum"))
            return
        _keep(self, outputs=check_count("outputs", self.outputs))
        if self.device_iterations % self.outputs:
            raise ValueError(
                f"outputs={self.outputs} does not divide device_iterations={self.device_iterations}: the last outputs "
                "would be lost; give a divisor of it, or 'final', 'all' or 'sum'"
            )

    def _check_offload(self) -> None:
        given = self.offload
        if not isinstance(given, tuple | list) or not all(isinstance(x, str) and x == "optimizer" for x in given):
            raise ValueError(
                f"offload={in_line(given)} names something else than what can rest in the host's memory: give "
                "('optimizer',), a tuple, or leave it out"
            )
        _keep(self, offload=tuple(dict.fromkeys(given)))

    @property
    def every(self) -> int:
        """Return the number of updates per set of returned outputs; under "sum" all are summed."""
        if isinstance(self.outputs, int):
            return self.outputs
        return 1 if self.outputs == "all" else self.device_iterations


def _keep(options: Any, **checked: Any) -> None:
    """Put checked values into frozen options. NumPy's numbers become Python's, so that both hash and trace alike."""
    for name, value in checked.items():
        object.__setattr__(options, name, value)

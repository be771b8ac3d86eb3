"""Run a model as stages over the IPUs of a replica: loss and gradients of one weight update, in one program.

    IPU 0   inputs -> MLP \\  \\-> classifier (columns 0-4) -- softmax CE \\
    IPU 1                  -> -> classifier (columns 5-9) -- softmax CE  -> loss

    pipeline = Pipeline([Stage(mlp, params="mlp", ipu=0), Stage(head, params="head", ipu=ALL_IPUS)],
                        specs={"head": PartitionSpec(None, "ipu")}, gradient_accumulation=16)
    params = pipeline.shard({"mlp": ..., "head": ...})
    loss, gradients = pipeline.value_and_grad(params, batch)     # gradients are laid out as params

`value_and_grad` can be called directly, or inside the user's own `jax.jit` with the optimizer's update.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import optax
from jax.sharding import Mesh

from ipu_jax.base import facts
from ipu_jax.base.annotations import Batch, Device, Function, Params, Tree
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.base.other_words import Gone
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.analysis.report import MemoryGuard, make_report
from ipu_jax.core.compiled.guards import GuardCheck, Guards
from ipu_jax.core.cutting.function import FunctionModel, Source, checked_counts, cut_on
from ipu_jax.core.layout.packing import Sharded
from ipu_jax.core.layout.rule import rule_of_state, rule_of_weights
from ipu_jax.core.mesh.axes import further_axes
from ipu_jax.core.mesh.devices import IPU_AXIS, REPLICA_AXIS, devices_of, make_mesh
from ipu_jax.core.optimizer.pipeline_optimizer import PipelineOptimizer
from ipu_jax.core.options import PipelineOptions, Reduction
from ipu_jax.core.pipeline._foreseen import Foreseen
from ipu_jax.core.pipeline._placing import Placing
from ipu_jax.core.pipeline._programs import Programs
from ipu_jax.core.pipeline._schedule_choice import (
    ScheduleChoice,
    places_of_stages,
    silent_about_messages,
    warn_of_messages,
)
from ipu_jax.core.pipeline.arguments import (
    check_one_batch,
    check_places,
    check_predict_axes,
    check_reducible,
    checked_stages,
    mesh_for,
)
from ipu_jax.core.pipeline.forward import WithForward
from ipu_jax.core.pipeline.placed_stages import PlacedStages
from ipu_jax.core.schedules import Schedule
from ipu_jax.core.stage import Stage
from ipu_jax.core.step_args import StepArgs


@public_on_mesh
class Pipeline(Placing, Foreseen, WithForward, Shown):
    """Runs stages on the IPUs of each replica, under a schedule.

    Args:
        stages: the model, first stage first. An IPU may have several stages, whether they are neighbours or not.
        mesh: a mesh with axes ("replica", "ipu"), from `make_mesh`, and perhaps further axes. Default: one replica on
            as many IPUs as the stages name.
        schedule: a name in `ipu_jax.schedules.SCHEDULES`, a `Schedule` for this placement and M, or "auto": each step
            takes the schedule that is the fastest for the FLOPs of its shapes, within `ipu_memory`, as
            `choose_schedule` returns it. On chips a `UserWarning` says so if "grouped" leaves IPUs less idle.
        gradient_accumulation: M, the micro-batches of one weight update. It can be smaller than the number of stages.
            Default: the M of a `Schedule`, or 1. `make_train_step` can give M and `reduction` later, in `TrainOptions`.
        reduction: gradients are the "mean" (the default) or the "sum" over the M micro-batches and the replicas. The
            loss is always the mean.
        specs: per concurrent group, a `PartitionSpec` over "ipu", or a pytree of them, that says how its leaves are
            split. A dim that is not divisible by the number of IPUs is padded with zeros, which `unshard` drops. A
            group that stages share is whole by default. Specs of any group can name further axes of the mesh. Such a
            dim must be divisible by the size of its axes.
        state_specs: the same for state. By default it is whole on every IPU of its stage, and on each of its devices.
        frozen: per group, True, or a pytree of bools that is a prefix of the group's: the leaves that get no gradient.
            No gradient is computed or stored for a frozen leaf, and its part of the result is zeros. It can have any
            dtype. The pipeline that runs decides which leaves are frozen, not the pipeline that sharded the weights. So
            weights can be unfrozen gradually by passing them to another pipeline.
        guards: on a mesh with further axes, whether an IPU runs its own tasks only ("own"), or all IPUs run the tasks
            of all, and keep the results of their own ("uniform"). "auto" takes own guards. It compiles a program before
            its first call, and takes uniform guards if XLA exchanges data in a stage for which all IPUs must be there:
            where a dim that is split is shifted or convolved. That would hang under own guards, so "own" refuses it.
        ipu_memory: the memory of an IPU in bytes, for example 900e6. The first `value_and_grad` for given shapes warns,
            before it runs, if that is not enough.

    Raises:
        ValueError: there are no stages, a stage is on an IPU outside the replica, a group is on several IPUs, or
            a name or number breaks its rule. It is raised before anything is compiled.

    >>> import jax.numpy as jnp
    >>> stage = lambda w, x, mb: jnp.mean((mb @ w) ** 2)
    >>> pipeline = Pipeline([Stage(stage, params="w", ipu=0)], gradient_accumulation=2)
    >>> params = pipeline.shard({"w": jnp.ones((3, 1))})
    >>> loss, gradients = pipeline.value_and_grad(params, jnp.ones((2, 4, 3)))
    >>> float(loss), pipeline.unshard(gradients)["w"].tolist()
    (9.0, [[6.0], [6.0], [6.0]])
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        *,
        mesh: Mesh | None = None,
        schedule: str | Schedule = "grouped",
        gradient_accumulation: int | None = None,
        reduction: Reduction | None = None,
        specs: Mapping[str, Tree] | None = None,
        state_specs: Mapping[str, Tree] | None = None,
        frozen: Mapping[str, Tree] | None = None,
        ipu_memory: float | None = None,
        guards: Guards = "auto",
    ):
        self.stages, self.function = checked_stages(stages), stages if isinstance(stages, FunctionModel) else None
        if gradient_accumulation is None and isinstance(schedule, Schedule):
            gradient_accumulation = schedule.micro_batches
        self.given = {"gradient_accumulation": gradient_accumulation, "reduction": reduction}
        self.options = PipelineOptions(**{name: value for name, value in self.given.items() if value is not None})
        self.mesh = mesh_for(mesh, self.stages)
        self.given_devices = devices_of(self.mesh)
        self.replicas, self.ipus = self.mesh.shape[REPLICA_AXIS], self.mesh.shape[IPU_AXIS]
        axes = further_axes(self.mesh)
        check_places(self.stages, self.ipus)
        check_predict_axes(self.stages, axes)
        check_reducible(self.stages, self.mesh)
        self._given_per_group = {"specs": specs, "state_specs": state_specs, "frozen": frozen}
        trees = (None, None) if self.function is None else (self.function.weights, self.function.state)
        of_stages = self.stages, self.ipus, axes
        weights = rule_of_weights(*of_stages, specs=specs, frozen=frozen, tree=trees[0])
        state = rule_of_state(*of_stages, specs=state_specs, tree=trees[1])
        choice = ScheduleChoice(self.stages, self.ipus, self.options.gradient_accumulation, ipu_memory)
        self._asked_for, chosen, check = schedule, choice.of(schedule), GuardCheck(guards, self.mesh)
        of_model = self.stages, self.mesh, self.options, self.function, weights, state
        self.placement = PlacedStages(*of_model, choice, check, chosen, guards == "uniform")
        if chosen is not None:
            warn_of_messages(chosen, self.placement.platform, stacklevel=4)
        self._memory, self._programs = MemoryGuard(ipu_memory), Programs(self.placement)
        facts.say(lambda listener: listener.mesh(self.mesh, [(stage.name, stage.place) for stage in self.stages]))

    from_layers = Gone("from_layers")

    @classmethod
    def from_function(
        cls,
        loss: Function,
        params: Params,
        micro_batch: Batch,
        *others: Batch,
        ipus: int,
        state: Tree = None,
        replicas: int = 1,
        devices: Sequence[Device] | None = None,
        axes: Mapping[str, int] | None = None,
        specs: Tree = None,
        rounds: int = 2,
        schedule: str | Schedule = "grouped",
        gradient_accumulation: int | None = None,
        reduction: Reduction | None = None,
        cuts: Iterable[str] | None = None,
        layers_per_ipu: Iterable[int] | None = None,
        costs: Literal["counted", "traced"] = "counted",
        head: Literal["local", "concurrent"] = "local",
        recompute: Any = "auto",
        frozen: Tree = None,
        ipu_memory: float | None = None,
        guards: Guards = "auto",
    ) -> Self:
        """Return a pipeline cut out of any JAX function, unchanged. Nothing is run: shapes suffice.

        The function is traced once. It is cut where one activation is live, into stages of equal work (FLOPs of F and
        B), as many as the schedule has; where no such places give even stages, at any places. A scan over stacked
        weights is cut between its iterations. What follows from the weights alone or from the micro-batch alone, such
        as casts and masks, is computed again where it is needed. `print(pipeline)` says where the function was cut and
        why. `verify` compares with the trace of the function itself.

        `shard` takes and `unshard` returns the function's own tree of weights; `frozen`, optimizers, checkpoints and
        weight files speak of it, too. A stage holds the leaves that it reads. A leaf that stages on several IPUs read,
        such as a tied embedding, is on all IPUs, and its gradients are added up once per update. Of a stacked leaf an
        IPU holds its rows, and optax sees the whole leaf.

        Args:
            loss: `loss(params, micro_batch)`, or `loss(params, micro_batch, key)`, returns the micro-batch's mean loss,
                a float scalar, or `(loss, aux)`. With `state`, `loss(params, state, micro_batch)` returns
                `(loss, new_state)`, or `(loss, aux, new_state)`: micro-batches replace it one after the other. The key
                of micro-batch m of replica r is `fold_in(fold_in(key, r), m)`.
            params: the weights or their shapes, any pytree of arrays.
            micro_batch: one micro-batch or its shapes, any pytree of arrays, without the leading M. A call can have
                micro-batches of another size: the function is cut for each once, and the weights stay where they are.
            others: nothing: several arrays are one micro-batch, such as a tuple.
            ipus: the number of IPUs of a replica.
            state: the state or its shapes, such as batch norm's statistics. `shard_state` places it.
            replicas: copies of the model.
            devices: as for `make_mesh`.
            axes: the sizes of further axes of the mesh, such as `{"tensor": 2}`, which the function names.
            specs: a `PartitionSpec`, or a pytree of them that is a prefix of `params`: how weights are split over
                these.
            rounds: the stages on each IPU under "zb-wave" and the looped schedules.
            schedule, gradient_accumulation, reduction: as for `Pipeline`.
            cuts: names that `jax.ad_checkpoint.checkpoint_name` gives to values in the function, or of modules of linen
                and other scopes of `jax.named_scope`, such as "block_2": it is cut after these only. Default: after
                values marked by `stage_end`, if there are any.
            layers_per_ipu: the number of layers on each IPU, as optimum-graphcore takes it: [1, 2, -1, -1] divides what
                is left evenly between the last two. A layer ends at each value marked by `stage_end` or `cuts`; without
                marks it is an iteration of a scan over stacked weights. Default: stages of equal work.
            costs: how work is found: "counted" for each operation, or "traced" as `measure_costs` does, with F and B of
                all that lies between two waists. This is exact, also for what B computes again, and takes longer.
            head: "concurrent" puts the last product with a leaf, such as a projection to a vocabulary, and the loss of
                it on all IPUs, each with its rows of the leaf, and look-ups in such a leaf, too. Any function is
                computed right; operations that need whole rows gather them.
            recompute: as for `Stage`, for all stages.
            frozen: True, or a pytree of bools that is a prefix of `params`: leaves that get no gradient.
            ipu_memory, guards: as for `Pipeline`.

        Raises:
            ValueError: the function takes or returns something else, has an ordered effect, or has too few places to be
                cut; the message names the line. Or as in `Pipeline`.

        >>> import jax, jax.numpy as jnp
        >>> from ipu_jax import Pipeline
        >>> def loss(params, micro_batch):
        ...     x = micro_batch["x"]
        ...     for w in params["layers"]:
        ...         x = jnp.tanh(x @ w)
        ...     return jnp.mean((x - micro_batch["y"]) ** 2)
        >>> params = {"layers": [jnp.eye(3)] * 4}
        >>> batch = {"x": jnp.ones((8, 5, 3)), "y": jnp.zeros((8, 5, 3))}  # 8 micro-batches of 5 examples
        >>> one = jax.tree.map(lambda leaf: leaf[0], batch)
        >>> pipeline = Pipeline.from_function(loss, params, one, ipus=2, schedule="1f1b", gradient_accumulation=8)
        >>> print(pipeline)
        Pipeline of 2 stages on 2 IPUs, schedule '1f1b', 8 micro-batches, reduction 'mean'
          stage  IPU  work   weights  sends per micro-batch
          0      0    42.4%  72 B     1 array, 60 B
          1      1    57.6%  72 B     the loss
        cut at waists, where one activation is live: 11 of 11 places; ...
        >>> value, gradients = pipeline.value_and_grad(pipeline.shard(params), batch)
        >>> pipeline.unshard(gradients)["layers"][0].shape
        (3, 3)
        """
        check_one_batch(others, ipus)
        places = places_of_stages(schedule, ipus, rounds)
        if isinstance(cuts, str) or not isinstance(cuts, Iterable | None):
            raise ValueError(f"cuts={cuts!r} is not a list of names: give one, such as ['block 1'], or leave it out")
        names = None if cuts is None else list(cuts)
        layers = None if layers_per_ipu is None else checked_counts(layers_per_ipu, len(places), ipus)
        source = Source(
            loss, params, micro_batch, places, ipus, state, frozen, names, layers, costs, recompute, head=head
        )
        function, mesh = cut_on(functools.partial(make_mesh, replicas, ipus, devices=devices), source, axes)
        options: dict[str, Any] = {"schedule": schedule, "gradient_accumulation": gradient_accumulation}
        options |= {"reduction": reduction, "frozen": frozen, "ipu_memory": ipu_memory, "guards": guards}
        return cls(function, mesh=mesh, specs=specs, **options)

    @property
    def schedule(self) -> Schedule:
        """Return the schedule. Under "auto", which takes one for the shapes of a step, raise a `ValueError`."""
        if self.placement.schedule is None:
            raise ValueError(
                "schedule='auto' chooses a schedule for the shapes of a step: it is "
                "pipeline.choose_schedule(params, batch).schedule"
            )
        return self.placement.schedule

    def optimizer(self, transformation: optax.GradientTransformation) -> PipelineOptimizer:
        """Return an optax transformation as an optimizer of this pipeline's weights, for a custom training loop.

        On a `Sharded`, optax's own functions would see packed arrays. Here they see `{group: pytree}`.

        Args:
            transformation: any `optax.GradientTransformation`, or `optax.MultiSteps`, that does not call the loss
                function itself.

        Raises:
            ValueError: it is neither, such as `optax.adam` without its arguments; or its update needs a function that
                computes the loss, as in lbfgs, or the gradients of each example, as in dpsgd.

        >>> import jax.numpy as jnp, optax
        >>> from ipu_jax import Pipeline
        >>> stage = lambda w, x, mb: jnp.mean((mb @ w) ** 2)
        >>> pipeline = Pipeline([Stage(stage, params="w", ipu=0)], gradient_accumulation=2)
        >>> params, optimizer = pipeline.shard({"w": jnp.ones((3, 1))}), pipeline.optimizer(optax.lamb(0.5))
        >>> loss, gradients = pipeline.value_and_grad(params, jnp.ones((2, 4, 3)))
        >>> params, state = optimizer.apply(gradients, optimizer.init(params), params)
        >>> pipeline.unshard(params)["w"].round(4).tolist()
        [[0.5], [0.5], [0.5]]
        """
        return PipelineOptimizer(self, self.placement.weights, transformation)

    def value_and_grad(
        self, params: Sharded, batch: Batch, state: Sharded | None = None, key: jax.Array | None = None
    ) -> Tree:
        """Return the loss and the gradients of one weight update.

        Communicates, in each tick: one ppermute of an activation and one of its gradient between neighbours, and for
        each run of concurrent stages a broadcast of its input and a reduction of its gradient. At the end this
        communicates the loss, and the gradients over the replicas.

        Args:
            params: from `shard`.
            batch: a pytree whose leaves are (M, micro-batch, ...), or (replicas, M, micro-batch, ...) if there are
                several replicas. Across several instances it is from a `Feed`, or the whole batch as NumPy arrays, the
                same on each instance.
            state: from `shard_state` or from the previous step, if a stage has state.
            key: a typed key, `jax.random.key(...)`, if a stage is random. Give each step a different key.

        Returns:
            `(loss, gradients)`, or `((loss, aux), gradients)` if a stage returns an aux, followed by the new state if a
            stage has state. The loss is the mean over micro-batches and replicas. `aux` is the last stage's aux if no
            other stage returns one, otherwise `{stage name: aux}`; its leaves have leading dims (M,), or (replicas, M).
            Gradients have the layout and dtypes of `params`; they are accumulated in at least float32.

        Raises:
            ValueError: `params` is not from `shard`, the batch does not fit, or state or key is missing or superfluous.
                It is raised before anything is compiled.
        """
        given = StepArgs(params, batch, state, key)
        self.placement.check(given)
        self._memory.check(given, lambda: make_report(self.placement.plan(*given), batch, mesh=self.mesh))
        result = self._programs.value_and_grad(given)
        return result if self.placement.state.owners else result[:2]

    def loss(
        self,
        params: Sharded,
        batch: Batch,
        state: Sharded | None = None,
        key: jax.Array | None = None,
        *,
        training: bool = False,
    ) -> Tree:
        """Return the loss, or `(loss, aux)`, of the stages' `evaluate` functions, or with `training` of their `fn`.

        It computes no gradients and keeps no stash. `jax.grad`, `jax.value_and_grad` and `jax.jvp` differentiate it
        with respect to `params`, also as a part of another function, such as
        `pipeline.loss(params, batch) + penalty(params)`. They run the program of `value_and_grad`. They differentiate
        the functions whose loss is returned: the evaluation functions, or with `training` the training functions,
        including dropout. The gradient is the mean's, whatever `reduction` is, and zeros for frozen leaves.

        Communicates like `value_and_grad`, without gradients unless it is differentiated.

        Args:
            params, batch, state, key: as for `value_and_grad`. Without `training`, no key is needed if all random
                stages have an `evaluate` function.
            training: whether to run `fn` of each stage in place of `evaluate`. Then the stages change their state.

        Returns:
            `loss`, or `(loss, aux)` if a stage returns aux, like `value_and_grad`. With `training`, if stages have
            state, `(loss, new state)`, or `(loss, (aux, new state))`: use `jax.value_and_grad(..., has_aux=True)`. No
            gradient flows through the new state.

        Raises:
            ValueError: as in `value_and_grad`; or a derivative with respect to batch, state or key, through aux, or of
                second order is requested.

        >>> import jax.numpy as jnp
        >>> stage = lambda w, x, mb: jnp.mean((mb @ w) ** 2)
        >>> pipeline = Pipeline([Stage(stage, params="w", ipu=0)], gradient_accumulation=2)
        >>> params, batch = pipeline.shard({"w": jnp.ones((3, 1))}), jnp.ones((2, 4, 3))
        >>> penalty = lambda params: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        >>> gradients = jax.grad(lambda params: pipeline.loss(params, batch) + 0.5 * penalty(params))(params)
        >>> pipeline.unshard(gradients)["w"].tolist()  # 6 of the loss, 1 of the penalty
        [[7.0], [7.0], [7.0]]
        """
        given, role = StepArgs(params, batch, state, key), "training" if training else "evaluation"
        self.placement.check(given, role)
        loss, aux, new_state = self._programs.loss(given, role)
        result = self.placement.of_batch(batch).loss_with_aux(loss, aux)
        if not (training and self.placement.state.owners):
            return result
        return (loss, (result[1], new_state)) if isinstance(result, tuple) else (loss, new_state)

    def replace(
        self,
        *,
        stages: Iterable[Stage] | None = None,
        mesh: Mesh | None = None,
        schedule: str | Schedule | None = None,
        gradient_accumulation: int | None = None,
        reduction: Reduction | None = None,
    ) -> "Pipeline":
        """Return the same pipeline with other stages (same places and groups), mesh, schedule or options."""
        on_mesh = self.mesh if mesh is None else mesh
        own = (self.function or self.stages) if stages is None else stages
        m, keeps_m = gradient_accumulation, gradient_accumulation in (None, self.options.gradient_accumulation)
        with silent_about_messages():  # this pipeline has warned, or it has chosen the schedule
            replaced = Pipeline(
                own.on(on_mesh) if isinstance(own, FunctionModel) else own,
                mesh=on_mesh,
                schedule=schedule or (keeps_m and self.placement.schedule) or self._asked_for,
                gradient_accumulation=self.given["gradient_accumulation"] if m is None else m,
                reduction=self.given["reduction"] if reduction is None else reduction,
                **self._given_per_group,
                ipu_memory=self._memory.ipu_memory,
                guards=self.placement.guards.given,
            )
        if mesh is None:
            replaced.given_devices = self.given_devices
        return replaced

    def _shown(self) -> list[str | Table]:
        """Return what `print` and notebooks show."""
        return self.placement.described()

    def _repr_html_(self) -> str:
        schedule = self.placement.schedule
        picture = "" if schedule is None else schedule._repr_svg_() or ""
        return super()._repr_html_() + picture

"""A model as stages over the IPUs of a replica: loss and gradients of one weight update, as one program.

    IPU 0   inputs -> MLP \\  \\-> classifier (columns 0-4) -- softmax CE \\
    IPU 1                  -> -> classifier (columns 5-9) -- softmax CE  -> loss

    pipeline = Pipeline([Stage(mlp, params="mlp", ipu=0), Stage(head, params="head", ipu=ALL_IPUS)],
                        specs={"head": PartitionSpec(None, "ipu")}, gradient_accumulation=16)
    params = pipeline.shard({"mlp": ..., "head": ...})
    loss, gradients = pipeline.value_and_grad(params, batch)     # gradients are laid out as params

`value_and_grad` may be called as it is, or inside the user's own `jax.jit` with the optimizer's update.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ipu_jax import engine, packing
from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS, InFlight, make_mesh
from ipu_jax.options import PipelineOptions, Reduction
from ipu_jax.packing import Layout, Sharded
from ipu_jax.plan import make_plan
from ipu_jax.report import MemoryGuard, PipelineReport, make_report
from ipu_jax.schedule import Schedule, make
from ipu_jax.stage import Stage, segments_of


class Pipeline:
    """Runs stages on the IPUs of each replica, under a schedule.

    Args:
        stages: the model, first stage first. Neighbours on one IPU, and several stages an IPU, are fine.
        mesh: axes ("replica", "ipu"), from `make_mesh`. Default: one replica on as many IPUs as the stages name.
        schedule: a name of `ipu_jax.schedule.NAMES` or a `Schedule` for this placement and M.
        gradient_accumulation: M, the micro-batches of one weight update; any number, also fewer than stages.
        reduction: gradients are the "mean" or the "sum" over the M micro-batches and the replicas. The loss is always
            the mean.
        specs: per concurrent group, a `PartitionSpec` over "ipu" (or a pytree of them): how its leaves are split. A
            dim that doesn't divide by the IPUs is padded with zeros, which `unshard` drops.
        ipu_memory: bytes that an IPU holds, say 900e6: the first `value_and_grad` of given shapes warns, before it
            runs, where they do not suffice.

    Raises:
        ValueError: no stages, a stage on an IPU outside the replica, a group on several IPUs, a name or number outside
            its rule. Nothing has been compiled.

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
        gradient_accumulation: int = 1,
        reduction: Reduction = "mean",
        specs: Mapping[str, Any] | None = None,
        ipu_memory: float | None = None,
    ):
        self.stages = tuple(stages)
        if not self.stages:
            raise ValueError("stages=() is empty: give at least one Stage")
        self.options = PipelineOptions(gradient_accumulation, reduction)
        placement = tuple(stage.place for stage in self.stages)
        self.mesh = make_mesh(1, 1 + max((p for p in placement if p is not None), default=0)) if mesh is None else mesh
        if tuple(self.mesh.axis_names) != (REPLICA_AXIS, IPU_AXIS):
            raise ValueError(
                f"mesh has axes {self.mesh.axis_names}: make it with make_mesh(replicas, ipus_per_replica)"
            )
        self.replicas, self.ipus = self.mesh.shape[REPLICA_AXIS], self.mesh.shape[IPU_AXIS]
        for number, (stage, place) in enumerate(zip(self.stages, placement, strict=True)):
            if place is not None and place >= self.ipus:
                raise ValueError(
                    f"stage {number}, {stage.name!r}, is on IPU {place}, outside the replica: "
                    f"it has IPUs 0 to {self.ipus - 1}; make the mesh wider or move the stage"
                )
        self._owners = _owners(self.stages)
        self._specs = dict(specs or {})
        unused = sorted(name for name in self._specs if self._owners.get(name, 0) is not None)
        if unused:
            raise ValueError(f"specs for {', '.join(map(repr, unused))}: only groups of concurrent stages are split")
        self.schedule = self._schedule(schedule, placement)
        # without B there is nothing to interleave: evaluation fills the pipeline as fast as it can
        self._forward_schedule = make(
            "grouped", micro_batches=gradient_accumulation, ipus=self.ipus, placement=placement
        )
        self._window = InFlight()
        self._memory = MemoryGuard(ipu_memory)
        # jitted once each: every call with like shapes runs the same program
        self._value_and_grad = jax.jit(lambda params, batch: self._run(params, batch, backward=True))
        self._loss = jax.jit(lambda params, batch: self._run(params, batch, backward=False)[0])

    def _schedule(self, schedule: str | Schedule, placement: tuple[int | None, ...]) -> Schedule:
        m = self.options.gradient_accumulation
        if not isinstance(schedule, Schedule):
            return make(schedule, micro_batches=m, ipus=self.ipus, placement=placement)
        if (schedule.placement, schedule.ipus, schedule.micro_batches) != (placement, self.ipus, m):
            raise ValueError(
                f"schedule {schedule.name!r} places {schedule.placement} on {schedule.ipus} IPUs with "
                f"{schedule.micro_batches} micro-batches, but the stages stand on {placement}, the mesh has "
                f"{self.ipus} IPUs and gradient_accumulation={m}: make the schedule for these"
            )
        return schedule

    def shard(self, params: Mapping[str, Any]) -> Sharded:
        """Places `{group: pytree of weights}` on the IPUs.

        An IPU gets its own stages' weights and its own shard of the concurrent groups; host to device only.

        Args:
            params: whole weights, floating arrays (jax or numpy); a concurrent leaf has its unpadded, unsplit shape.

        Returns:
            A `Sharded`, a pytree of `jax.Array`: what `value_and_grad` takes and gives, and what optax can update.

        Raises:
            ValueError: a missing or unknown group, a leaf that isn't a floating array, a spec that doesn't fit.
        """
        layout = packing.plan_layout(params, self._owners, self._specs, self.ipus)
        return packing.place(params, layout, self.mesh)

    def unshard(self, sharded: Sharded) -> dict[str, Any]:
        """The inverse of `shard`, for parameters or gradients: `{group: pytree}` with whole, unpadded leaves."""
        return packing.fetch(sharded)

    def value_and_grad(self, params: Sharded, batch: Any) -> tuple[Any, Sharded]:
        """Loss and gradients of one weight update.

        Communicates, per tick: one ppermute of an activation and one of its gradient between neighbours; for each run
        of concurrent stages a broadcast of its input and a reduction of its gradient. At the end the loss, and over
        replicas the gradients.

        Args:
            params: from `shard`.
            batch: a pytree whose leaves are (M, micro-batch, ...), or (replicas, M, micro-batch, ...) where there is
                more than one replica.

        Returns:
            `(loss, gradients)`, or `((loss, aux), gradients)` where the last stage returns an aux. The loss is the mean
            over micro-batches and replicas; aux leaves have a leading (M,), or (replicas, M,). Gradients have the
            layout and dtypes of `params`; they are accumulated in float32 at least.

        Raises:
            ValueError: `params` is not from `shard`, or the batch doesn't fit; before anything is compiled.
        """
        self._check(params, batch)
        self._memory.check(self, params, batch)
        return self._bounded(self._value_and_grad, params, batch)

    def loss(self, params: Sharded, batch: Any) -> Any:
        """The loss, or `(loss, aux)`, of `value_and_grad`, forward only. Evaluation: no gradients, no stash."""
        return self._bounded(self._loss, params, batch)

    def report(
        self, params: Sharded, batch: Any, *, compile: bool = True, ipu_memory: float | None = None
    ) -> PipelineReport:
        """What a step needs on each IPU: bytes by kind, FLOPs, bytes sent, and its idle share. Runs nothing.

        Args:
            params: from `shard`, or `jax.eval_shape(lambda p: p, params)`.
            batch: as `value_and_grad` takes it, or `jax.ShapeDtypeStruct` in the place of its arrays.
            compile: whether to compile the step for the temporary bytes that XLA says; they are predicted otherwise.
            ipu_memory: bytes that an IPU holds: a `UserWarning` says what does not fit. Default: the pipeline's own.

        Raises:
            ValueError: what `value_and_grad` refuses, or an `ipu_memory` that is not above 0.

        >>> stage = lambda w, x, mb: jnp.mean((mb @ w) ** 2)
        >>> pipeline = Pipeline([Stage(stage, params="w", ipu=0)], gradient_accumulation=2)
        >>> params = pipeline.shard({"w": jnp.ones((3, 1))})
        >>> pipeline.report(params, jax.ShapeDtypeStruct((2, 4, 3), "float32"), compile=False).ipus[0].weights
        12
        """
        self._check(params, batch)
        limit = self._memory.ipu_memory if ipu_memory is None else ipu_memory
        return make_report(self, params, batch, program=self._value_and_grad if compile else None, ipu_memory=limit)

    def _bounded(self, program: Callable[[Any, Any], Any], params: Any, batch: Any) -> Any:
        self._check(params, batch)
        result = program(params, batch)
        self._window.admit(result)  # a loop that never waits would exhaust the CPU backend's rendezvous
        return result

    def _check(self, params: Any, batch: Any) -> None:
        if not isinstance(params, Sharded):
            raise ValueError(f"params is a {type(params).__name__}: pass what pipeline.shard(...) returns")
        layout = params.layout
        if {g.name: g.ipu for g in layout.groups} != self._owners or layout.ipus != self.ipus:
            raise ValueError("params were sharded by a pipeline with other groups or IPUs: shard them with this one")
        for group in layout.groups:
            if group.ipu is None and group.leaves != tuple(
                packing.with_specs(group.name, group.leaves, group.treedef, self._specs)
            ):
                raise ValueError("params were sharded by a pipeline with other specs: shard them with this one")
        m = self.options.gradient_accumulation
        lead = (m,) if self.replicas == 1 else (self.replicas, m)
        for path, leaf in jax.tree.leaves_with_path(batch):
            shape = getattr(leaf, "shape", None)
            if shape is None or shape[: len(lead)] != lead:
                found = type(leaf).__name__ if shape is None else f"shape {tuple(shape)}"
                means = "(gradient_accumulation," if self.replicas == 1 else "(replicas, gradient_accumulation,"
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)} has {found}: its leading dims must be {means} ...) = "
                    f"({', '.join(map(str, lead))}, ...)"
                )
        if not jax.tree.leaves(batch):
            raise ValueError("batch has no arrays: the first stage has nothing to read and M cannot be told")

    def _run(self, params: Sharded, batch: Any, *, backward: bool) -> tuple[Any, Any]:
        layout, options = params.layout, self.options
        seed = 1.0 if options.reduction == "sum" else 1.0 / (options.gradient_accumulation * self.replicas)
        of_batch = PartitionSpec() if self.replicas == 1 else PartitionSpec(REPLICA_AXIS)
        of_params = packing.specs_of(layout)

        schedule = self.schedule if backward else self._forward_schedule
        segments = segments_of(self.stages, schedule)

        def program(params: Sharded, batch: Any) -> Any:
            if self.replicas > 1:
                batch = jax.tree.map(lambda leaf: leaf[0], batch)
            shape_of = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
            plan = make_plan(segments, schedule, _local_shapes(layout), jax.tree.map(shape_of, batch))
            loss, aux, gradients = engine.run(plan, params, batch, seed=seed, replicas=self.replicas, backward=backward)
            if self.replicas > 1:
                aux = jax.tree.map(lambda leaf: leaf[None], aux)
            return loss, aux, gradients

        out = (PartitionSpec(), of_batch, of_params if backward else PartitionSpec())
        mapped = jax.shard_map(program, mesh=self.mesh, in_specs=(of_params, of_batch), out_specs=out, check_vma=False)
        loss, aux, gradients = mapped(params, batch)
        return (loss if not jax.tree.leaves(aux) else (loss, aux)), gradients


def _owners(stages: tuple[Stage, ...]) -> dict[str, int | None]:
    """Per group, the IPU of its stages, or None where they are concurrent."""
    owners: dict[str, int | None] = {}
    for stage in stages:
        if stage.params is None:
            continue
        if owners.setdefault(stage.params, stage.place) != stage.place:
            here, there = (
                "ALL_IPUS" if place is None else f"IPU {place}" for place in (owners[stage.params], stage.place)
            )
            raise ValueError(
                f"group {stage.params!r} is used on {here} and on {there}: a group lives on one IPU, or is shared by "
                "concurrent stages; put its stages on one IPU, make them all concurrent, or give each its own group"
            )
    return owners


def _local_shapes(layout: Layout) -> dict[str, Any]:
    """`{group: tree of the shapes that one IPU sees}`."""
    return {
        group.name: jax.tree.unflatten(
            group.treedef,
            [
                jax.ShapeDtypeStruct(
                    packing.local_shape(leaf, layout.ipus) if group.ipu is None else leaf.shape, jnp.dtype(leaf.dtype)
                )
                for leaf in group.leaves
            ],
        )
        for group in layout.groups
    }

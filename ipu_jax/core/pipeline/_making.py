"""Make pipelines of a list of layers, or of a whole loss function."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import jax
from jax.sharding import Mesh, PartitionSpec

from ipu_jax.base.annotations import Batch, Device, Function, Params, Tree
from ipu_jax.base.checks import as_int, check_count
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.core.analysis.balance import balance_layers, measure_costs
from ipu_jax.core.cutting.function import model_of
from ipu_jax.core.devices import is_described, make_mesh
from ipu_jax.core.options import Reduction
from ipu_jax.core.pipeline._guards import Guards
from ipu_jax.core.schedules import Schedule, canonical_name, make_schedule
from ipu_jax.core.stage import Stage
from ipu_jax.core.weights.packing import Sharded

Layer = tuple[Function, Params]


@public_on_mesh
class Made:
    """The constructors of `Pipeline` that make its stages."""

    @classmethod
    def from_layers(
        cls,
        layers: Iterable[Any],
        params: Iterable[Params] | None = None,
        *,
        loss: Function,
        ipus: int,
        inputs: Callable[[Batch], Tree] | None = None,
        replicas: int = 1,
        devices: Sequence[Device] | None = None,
        axes: Mapping[str, int] | None = None,
        specs: Tree = None,
        rounds: int = 1,
        costs: Iterable[float] | None = None,
        microbatch: Batch = None,
        layers_per_ipu: Iterable[int] | None = None,
        recompute: Any = "auto",
        schedule: str | Schedule = "grouped",
        gradient_accumulation: int | None = None,
        reduction: Reduction | None = None,
        frozen: Mapping[str, Tree] | None = None,
        ipu_memory: float | None = None,
        guards: Guards = "auto",
    ) -> tuple[Self, Sharded]:
        """Return a pipeline made from a list of layers, and their weights on the IPUs.

        `balance_layers` places the layers in their order, as evenly as possible by number, by `costs`, or by the FLOPs
        for one `microbatch`; or `layers_per_ipu` says where they go. Layer k becomes the stage "layer k", with its
        weights in the group "layer k"; the loss becomes the last stage, "loss". `predict` returns the last layer's
        result.

        Args:
            layers: functions `layer(params, x) -> x`, first layer first, such as modules' `apply`; or pairs
                `(function, params)`. Equal layers can be one function, `[block] * 12`.
            params: per layer, its weights, a pytree of arrays or None, unless layers are pairs.
            loss: `loss(x, microbatch) -> loss`, the micro-batch's mean loss, a float scalar, or `(loss, aux)`; x is the
                last layer's result.
            ipus: the number of IPUs of a replica; layers are placed on all of them.
            inputs: `inputs(microbatch) -> x` of the first layer. Default: the micro-batch itself.
            replicas: copies of the model.
            devices: as for `make_mesh`. If they are only described, `params` contains shapes.
            axes: the sizes of further axes of the mesh, such as `{"tensor": 2}`.
            specs: how weights are split over these: one tree of `PartitionSpec`s for all layers, or a list with a tree
                or None per layer.
            rounds: how often the layers go round the IPUs, for "looped" schedules.
            costs: per layer, a number, such as measured seconds.
            microbatch: one micro-batch or its shapes, leaves without the leading M: layers are placed by their FLOPs.
            layers_per_ipu: per IPU, how many of the layers it gets, in their order. IPUs with -1 share the other layers
                evenly, and the last of them gets the remainder: 9 layers and [2, -1, -1] are [2, 3, 4].
            recompute: as for `Stage`, for all layers.
            schedule, gradient_accumulation, reduction, frozen, ipu_memory, guards: as for `Pipeline`.

        Returns:
            `(pipeline, params)`. `pipeline.unshard(params)` returns `{"layer 0": weights, ...}`.

        Raises:
            ValueError: there are fewer layers than ipus x rounds, or not as many params or costs as layers; a layer is
                not a function or a pair; more than one of `costs`, `microbatch` and `layers_per_ipu` is given;
                `layers_per_ipu` does not fit the layers, `ipus` or `rounds`; or as in `Pipeline`.

        >>> import jax.numpy as jnp
        >>> from ipu_jax import Pipeline
        >>> block = lambda w, x: x + jnp.tanh(x @ w)
        >>> loss = lambda x, microbatch: jnp.mean((x - microbatch["y"]) ** 2)
        >>> pipeline, params = Pipeline.from_layers(
        ...     [block] * 5, [jnp.eye(3)] * 5, loss=loss, inputs=lambda mb: mb["x"], ipus=2, gradient_accumulation=4
        ... )
        >>> [stage.ipu for stage in pipeline.stages]
        [0, 0, 0, 1, 1, 1]
        >>> batch = {"x": jnp.ones((4, 8, 3)), "y": jnp.zeros((4, 8, 3))}
        >>> value, gradients = pipeline.value_and_grad(params, batch)
        >>> pipeline.predict(params, {"x": jnp.ones((1, 2, 3))}).shape
        (1, 2, 3)
        """
        mesh = make_mesh(replicas, ipus, devices=devices, **(axes or {}))
        layers = list(layers) if isinstance(layers, Iterable) else layers
        stages, weights = _stages_of_layers(
            layers,
            params,
            loss,
            inputs,
            ipus=ipus,
            rounds=rounds,
            costs=costs,
            microbatch=microbatch,
            layers_per_ipu=layers_per_ipu,
            recompute=recompute,
            mesh=mesh,
        )
        made: Any = cls
        options = {"schedule": schedule, "gradient_accumulation": gradient_accumulation, "reduction": reduction}
        options |= {"frozen": frozen, "ipu_memory": ipu_memory, "guards": guards}
        if specs is not None:
            options["specs"] = _specs_of_layers(specs, weights, len(stages) - 1)
        pipeline = made(stages, mesh=mesh, **options)
        place = pipeline.shard_shapes if is_described(pipeline.mesh.devices.flat[0]) else pipeline.shard
        return pipeline, place(weights)

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
        costs: Literal["counted", "traced"] = "counted",
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
            micro_batch: one micro-batch or its shapes, any pytree of arrays, without the leading M.
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
            cuts: names that `jax.ad_checkpoint.checkpoint_name` gives to values in the function: it is cut after these
                only. Default: after values marked by `stage_end`, if there are any.
            costs: how work is found: "counted" for each operation, or "traced" as `measure_costs` does, with F and B of
                all that lies between two waists. This is exact, also for what B computes again, and takes longer.
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
        if others:
            parts = ", ".join(f"micro_batch[{k}]" for k in range(1 + len(others)))
            raise ValueError(
                f"{1 + len(others)} arguments are given as micro_batch: join them, from_function(lambda params, "
                f"micro_batch: loss(params, {parts}), params, (x, y), ipus={ipus}, ...)"
            )
        if isinstance(schedule, Schedule):
            placement = schedule.placement
        else:
            family = "sequential" if canonical_name(schedule) == "auto" else schedule
            placement = make_schedule(family, ipus=ipus, gradient_accumulation=1, rounds=rounds).placement
        how: dict[str, Any] = {"state": state, "frozen": frozen, "costs": costs, "recompute": recompute}
        if isinstance(cuts, str) or not isinstance(cuts, Iterable | None):
            raise ValueError(f"cuts={cuts!r} is not a list of names: give one, such as ['block 1'], or leave it out")
        names = None if cuts is None else list(cuts)
        mesh = make_mesh(replicas, ipus, devices=devices, **(axes or {}))
        how["mesh"] = mesh if axes else None
        function = model_of(loss, params, micro_batch, placement, names=names, **how)
        made: Any = cls
        options = {"schedule": schedule, "gradient_accumulation": gradient_accumulation, "reduction": reduction}
        options |= {"specs": specs, "frozen": frozen, "ipu_memory": ipu_memory, "guards": guards}
        return made(function, mesh=mesh, **options)


def _stages_of_layers(
    layers: Iterable[Any],
    params: Iterable[Params] | None,
    loss: Function,
    inputs: Callable[[Batch], Tree] | None,
    *,
    ipus: int,
    rounds: int,
    costs: Iterable[float] | None,
    microbatch: Batch,
    layers_per_ipu: Iterable[int] | None,
    recompute: Any,
    mesh: Mesh,
) -> tuple[list[Stage], dict[str, Params]]:
    """Return the stages and `{group: weights}`. The arguments are as for `Pipeline.from_layers`.

    Raises:
        ValueError: the arguments do not fit each other, or layers cannot be placed.
    """
    pairs = _pairs(layers, params)
    for name, fn in (("loss", loss), ("inputs", inputs)):
        if not callable(fn) and (name == "loss" or fn is not None):
            takes = "(x, microbatch)" if name == "loss" else "(microbatch)"
            raise ValueError(f"{name}={fn!r} is not callable: give a function of {takes}")
    ways = {"costs": costs, "microbatch": microbatch, "layers_per_ipu": layers_per_ipu}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given together: give the layers' costs, or a micro-batch to count FLOPs, or "
            "the numbers of layers"
        )
    weights = {f"layer {k}": own for k, (_, own) in enumerate(pairs) if jax.tree.leaves(own)}
    stages = []
    for k, (layer, own) in enumerate(pairs):
        name = f"layer {k}"
        fn = _stage_function(layer, own, (inputs or _whole) if k == 0 else None)
        stages.append(Stage(fn, params=name if name in weights else None, name=name, recompute=recompute))
    end = Stage(lambda _, x, mb: loss(x, mb), name="loss", predict=lambda _, x, mb: x)
    if layers_per_ipu is not None:
        places = _places(layers_per_ipu, len(stages), ipus, rounds)
        stages = [dataclasses.replace(stage, ipu=ipu) for stage, ipu in zip(stages, places, strict=True)]
        return [*stages, dataclasses.replace(end, ipu=places[-1])], weights
    if microbatch is not None:
        *of_layers, last, of_loss = measure_costs([*stages, end], weights, microbatch, mesh=mesh)
        costs = [*of_layers, last + of_loss]
    elif costs is None:
        costs = [1.0] * (len(stages) - 1) + [1.01]  # the last IPU has the loss, so it gets the smaller of uneven parts
    placed = balance_layers(stages, costs, ipus, rounds=rounds).stages
    return [*placed, dataclasses.replace(end, ipu=placed[-1].ipu)], weights


def _specs_of_layers(specs: Tree, weights: Mapping[str, Params], layers: int) -> dict[str, Tree]:
    """Return the specs per group, from one tree of PartitionSpecs for all layers or a list with one for each.

    Raises:
        ValueError: there is not one for each layer.
    """
    if isinstance(specs, PartitionSpec) or not isinstance(specs, list | tuple):
        specs = [specs] * layers
    if len(specs) != layers:
        raise ValueError(f"specs has {len(specs)} entries for {layers} layers: give one for each, or one for all")
    named = {f"layer {k}": own for k, own in enumerate(specs)}
    return {name: own for name, own in named.items() if own is not None and name in weights}


def _places(layers_per_ipu: Iterable[int], layers: int, ipus: int, rounds: int) -> list[int]:
    """Return the IPU of each layer, as optimum-graphcore does: the last -1 gets what is left of an even division."""
    listed = list(layers_per_ipu) if isinstance(layers_per_ipu, Iterable) else []
    counts, value = [as_int(count) or 0 for count in listed], f"layers_per_ipu={layers_per_ipu!r}"
    if rounds != 1:
        raise ValueError(f"{value} with rounds={rounds}: the numbers are for one round; leave one of them out")
    if len(counts) != check_count("ipus", ipus) or any(count < 1 and count != -1 for count in counts):
        raise ValueError(
            f"{value} does not give numbers of layers for {ipus} IPUs: give each a number of at least 1, or -1 for an "
            "even share of the other layers"
        )
    sharing = [ipu for ipu, count in enumerate(counts) if count == -1]
    left = layers - sum(count for count in counts if count != -1)
    if left < len(sharing) or (left and not sharing):
        raise ValueError(
            f"{value} cannot place {layers} layers: give numbers that add up to {layers}, with at least 1 for each -1"
        )
    for ipu in sharing:
        counts[ipu] = left // len(sharing) + (left % len(sharing) if ipu == sharing[-1] else 0)
    return [ipu for ipu, count in enumerate(counts) for _ in range(count)]


def _pairs(layers: Iterable[Any], params: Iterable[Params] | None) -> list[Layer]:
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers={layers!r} is not a list of layers: give functions layer(params, x)")
    listed = list(layers)
    if params is not None:
        weights = list(params)
        if len(weights) != len(listed):
            raise ValueError(f"{len(listed)} layers and {len(weights)} params: give the weights of each layer")
        listed = list(zip(listed, weights, strict=True))
    for k, layer in enumerate(listed):
        if not (isinstance(layer, tuple) and len(layer) == 2 and callable(layer[0])):
            found = layer[0] if params is not None else layer
            mend = "give a function of (params, x)" if params is not None else "give (function, params), or params="
            raise ValueError(f"layer {k} is {found!r}: {mend}")
    return listed


def _whole(microbatch: Batch) -> Tree:
    return microbatch


def _stage_function(layer: Function, empty: Tree, inputs: Callable[[Batch], Tree] | None) -> Function:
    """Return a layer as a stage's function; a layer without weights gets its own `empty` tree."""

    def fn(p: Params, x: Tree, mb: Batch) -> Tree:
        return layer(empty if p is None else p, x if inputs is None else inputs(mb))

    return fn

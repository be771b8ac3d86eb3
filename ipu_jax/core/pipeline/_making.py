"""Make stages for `Pipeline.from_layers` and `Pipeline.from_function`, and say where they go."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ipu_jax.base.annotations import Batch, Function, Params, Tree
from ipu_jax.base.checks import as_int, check_count
from ipu_jax.core.analysis.balance import balance_layers, measure_costs
from ipu_jax.core.cutting.function import FunctionModel, Source, model_of
from ipu_jax.core.cutting.given import NeedsAxesError
from ipu_jax.core.schedules import Schedule, canonical_name, make_schedule
from ipu_jax.core.stage import Stage


def layers_to_stages(
    layers: Iterable[Any],
    params: Iterable[Params] | None,
    loss: Function,
    inputs: Callable[[Batch], Tree] | None,
    recompute: Any,
) -> tuple[list[Stage], dict[str, Params]]:
    """Return a stage for each layer, one for the loss, and `{group: weights}`.

    Raises:
        ValueError: a layer, the loss or `inputs` is not callable, or there are not as many params as layers.
    """
    pairs = _pairs(layers, params)
    for name, fn in (("loss", loss), ("inputs", inputs)):
        if not callable(fn) and (name == "loss" or fn is not None):
            takes = "(x, microbatch)" if name == "loss" else "(microbatch)"
            raise ValueError(f"{name}={fn!r} is not callable: give a function of {takes}")
    weights = {f"layer {k}": own for k, (_, own) in enumerate(pairs) if jax.tree.leaves(own)}
    stages = []
    for k, (layer, own) in enumerate(pairs):
        name = f"layer {k}"
        fn = _stage_function(layer, own, (inputs or (lambda mb: mb)) if k == 0 else None)
        stages.append(Stage(fn, params=name if name in weights else None, name=name, recompute=recompute))
    end = Stage(lambda _, x, mb: loss(x, mb), name="loss", predict=lambda _, x, mb: x)
    return [*stages, end], weights


def place_layers(
    stages: list[Stage],
    weights: dict[str, Params],
    mesh: Mesh,
    ipus: int,
    rounds: int,
    costs: Iterable[float] | None,
    microbatch: Batch,
    layers_per_ipu: Iterable[int] | None,
) -> list[Stage]:
    """Return the stages of layers on IPUs, and the loss on the last layer's.

    Raises:
        ValueError: several ways to place layers are given, or layers cannot be placed.
    """
    ways = {"costs": costs, "microbatch": microbatch, "layers_per_ipu": layers_per_ipu}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given together: give the layers' costs, or a micro-batch to count FLOPs, or "
            "the numbers of layers"
        )
    layers = stages[:-1]
    if microbatch is not None:
        *of_layers, last, of_loss = measure_costs(stages, weights, microbatch, mesh=mesh)
        costs = [*of_layers, last + of_loss]
    elif costs is None:
        costs = [1.0] * (len(layers) - 1) + [1.01]  # the last IPU has the loss, so it gets the smaller of uneven parts
    if layers_per_ipu is not None:
        places = _places(layers_per_ipu, len(layers), ipus, rounds)
    else:
        places = balance_layers(layers, costs, ipus, rounds=rounds).ipus
    return [dataclasses.replace(stage, ipu=ipu) for stage, ipu in zip(stages, [*places, places[-1]], strict=True)]


def check_one_batch(others: Sequence[Batch], ipus: int) -> None:
    """Raise `ValueError` if `Pipeline.from_function` gets several arguments as micro-batch."""
    if others:
        parts = ", ".join(f"micro_batch[{k}]" for k in range(1 + len(others)))
        raise ValueError(
            f"{1 + len(others)} arguments are given as micro_batch: join them, from_function(lambda params, "
            f"micro_batch: loss(params, {parts}), params, (x, y), ipus={ipus}, ...)"
        )


def places_of_stages(schedule: str | Schedule, ipus: int, rounds: int) -> Sequence[int | None]:
    """Return the IPU of each stage that a schedule has."""
    if isinstance(schedule, Schedule):
        return schedule.placement
    family = "sequential" if canonical_name(schedule) == "auto" else schedule
    return make_schedule(family, ipus=ipus, gradient_accumulation=1, rounds=rounds).placement


def cut_on(mesh_of: Callable[..., Mesh], source: Source, axes: Mapping[str, int] | None) -> tuple[FunctionModel, Mesh]:
    """Return a loss function as stages, and a mesh with further axes.

    If none are given, and the function names axes of size 1 of the mesh of `jax.set_mesh`, it gets these.
    """
    mesh = mesh_of(**(axes or {}))
    try:
        return model_of(dataclasses.replace(source, mesh=mesh) if axes else source), mesh
    except NeedsAxesError as needs:
        if {*needs.axes.values()} != {1}:
            raise
        return cut_on(mesh_of, source, needs.axes)


def specs_of_layers(specs: Tree, weights: Mapping[str, Params], layers: int) -> dict[str, Tree] | None:
    """Return the specs per group, from one tree of PartitionSpecs for all layers or a list with one for each.

    Raises:
        ValueError: there is not one for each layer.
    """
    if specs is None:
        return None
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


def _pairs(layers: Iterable[Any], params: Iterable[Params] | None) -> list[tuple[Function, Params]]:
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


def _stage_function(layer: Function, empty: Tree, inputs: Callable[[Batch], Tree] | None) -> Function:
    """Return a layer as a stage's function; a layer without weights gets its own `empty` tree."""

    def fn(p: Params, x: Tree, mb: Batch) -> Tree:
        return layer(empty if p is None else p, x if inputs is None else inputs(mb))

    return fn

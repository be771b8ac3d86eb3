"""Make stages from a list of layers, placed evenly on the IPUs, with the loss after the last layer."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ipu_jax.base.checks import as_int, check_count
from ipu_jax.core.analysis.balance import balance_layers, measure_costs
from ipu_jax.core.stage import Stage

Layer = tuple[Callable[..., Any], Any]


def stages_of_layers(
    layers: Iterable[Any],
    params: Iterable[Any] | None,
    loss: Callable[..., Any],
    inputs: Callable[[Any], Any] | None,
    *,
    ipus: int,
    rounds: int,
    costs: Iterable[float] | None,
    microbatch: Any,
    layers_per_ipu: Iterable[int] | None,
    recompute: Any,
    mesh: Mesh,
) -> tuple[list[Stage], dict[str, Any]]:
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


def specs_of_layers(specs: Any, weights: Mapping[str, Any], layers: int) -> dict[str, Any]:
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
            f"{value} are no numbers of layers for {ipus} IPUs: give each IPU a number of at least 1, or -1 for an "
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


def _pairs(layers: Iterable[Any], params: Iterable[Any] | None) -> list[Layer]:
    if not isinstance(layers, Iterable):
        raise ValueError(f"layers={layers!r} are no layers: give a list of functions layer(params, x)")
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


def _whole(microbatch: Any) -> Any:
    return microbatch


def _stage_function(layer: Callable[..., Any], empty: Any, inputs: Callable[[Any], Any] | None) -> Callable[..., Any]:
    """Return a layer as a stage's function; a layer without weights gets its own `empty` tree."""

    def fn(p: Any, x: Any, mb: Any) -> Any:
        return layer(empty if p is None else p, x if inputs is None else inputs(mb))

    return fn

"""Place layers on IPUs in contiguous runs, so that the largest load of an IPU is as small as possible.

    costs   4  1  1  1  3  2        on 3 IPUs
            -  -------  ----
            4     3      5          largest load 5, mean 4: imbalance 25%

In a pipeline every IPU waits for the IPU with the largest load, so this load decides how long a step takes. The
partition is exact, by dynamic programming over (layers, runs). It minimises the largest run first, and then the sum of
the squares of all runs, so that they are as even as possible.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from ipu_jax.base.annotations import Batch, Params, Tree
from ipu_jax.base.checks import check_cost, check_count
from ipu_jax.base.jaxprs import traced_on
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.mesh.axes import further_axes
from ipu_jax.core.mesh.devices import ALL_IPUS, IPU_AXIS, REPLICA_AXIS
from ipu_jax.core.programs.cost import jaxpr_flops
from ipu_jax.core.programs.segment import NO_MESSAGE, MicrobatchInputs, one_by_one
from ipu_jax.core.programs.segment_program import trace_segment
from ipu_jax.core.stage import Stage


@dataclasses.dataclass(frozen=True, repr=False)
class LayerPlacement(Shown):
    """The IPU of each layer; `str()` prints a table.

    Attributes:
        ipus: per layer its IPU, or None for a concurrent stage.
        loads: per IPU the sum of its layers' costs. It does not include the costs of concurrent stages.
        stages: the stages with their IPUs, if the layers were `Stage`s; else empty.
        names: per layer its name in the table.
    """

    ipus: tuple[int | None, ...]
    loads: tuple[float, ...]
    stages: tuple[Stage, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def imbalance(self) -> float:
        """Return the largest load divided by the mean load, minus 1. It is 0 if all loads are equal."""
        return max(self.loads) * len(self.loads) / sum(self.loads) - 1

    def _shown(self) -> list[str | Table]:
        rows = [("IPU", "layers", "cost", "share")]
        for ipu, load in enumerate(self.loads):
            layers = _in_runs([name for name, at in zip(self.names, self.ipus, strict=True) if at == ipu])
            rows.append((str(ipu), layers, f"{load:.4g}", f"{load / sum(self.loads):.1%}"))
        everywhere = [name for name, at in zip(self.names, self.ipus, strict=True) if at is None]
        if everywhere:
            rows.append(("all", _in_runs(everywhere), "-", "-"))
        return [Table(rows, left=2), f"imbalance {self.imbalance:.1%}: the largest load over the mean, less 1"]


def _in_runs(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)})"


def balance_layers(
    model_layers: Iterable[Any],
    costs: Iterable[float],
    ipus: int,
    *,
    rounds: int = 1,
    memory: Iterable[float] | None = None,
    limit: float | None = None,
) -> LayerPlacement:
    """Place layers on IPUs, neighbours together, so that the largest load is as small as possible.

    Args:
        model_layers: the layers in order: `Stage`s, names, `(fn, params)` pairs, or anything else. Concurrent `Stage`s
            stay concurrent, and count for no IPU. The `ipu` of other `Stage`s is replaced. Local stages that share a
            parameter group must end up on one IPU: `Pipeline` refuses them otherwise.
        costs: per layer a number, such as measured seconds or a result of `measure_costs`. The costs of concurrent
            stages are ignored.
        ipus: the number of IPUs of a replica.
        rounds: how often the layers go round the IPUs, for "looped" schedules: 2 rounds on 2 IPUs are [0, 1, 0, 1]. The
            largest of the ipus x rounds runs is made as small as possible.
        memory: per layer the bytes that it takes on its IPU.
        limit: the bytes that an IPU can hold (900e6 on Graphcore's second generation); needs `memory`.

    Returns:
        The `LayerPlacement`.

    Raises:
        ValueError: there is not one cost per layer; there are fewer layers than runs; costs are negative, not finite or
            all 0; or a layer, or every possible split, is above the limit.

    >>> print(balance_layers(["embed", "a", "b", "c", "d", "head"], [4, 1, 1, 1, 3, 2], ipus=3))
    IPU  layers   cost  share
    0    embed       4  33.3%
    1    a, b, c     3  25.0%
    2    d, head     5  41.7%
    imbalance 25.0%: the largest load over the mean, less 1
    >>> balance_layers(range(4), [1, 1, 1, 1], ipus=2, rounds=2).ipus
    (0, 1, 0, 1)
    >>> balance_layers(range(4), [5, 1, 1, 1], ipus=2, memory=[1, 1, 1, 1], limit=2).ipus  # 3 layers would not fit
    (0, 0, 1, 1)
    """
    if not isinstance(model_layers, Iterable):
        raise ValueError(f"model_layers={model_layers!r} is not a list of layers: give them in their order")
    layers = list(model_layers)
    ipus, rounds = check_count("ipus", ipus), check_count("rounds", rounds)
    cost_list = _one_per_layer("costs", costs, len(layers))
    local = [i for i, layer in enumerate(layers) if not (isinstance(layer, Stage) and layer.place is None)]
    names = tuple(_name_of(layer, i) for i, layer in enumerate(layers))
    if len(local) < ipus * rounds:
        places = f"{ipus} IPUs" if rounds == 1 else f"{ipus} IPUs x {rounds} rounds"
        raise ValueError(f"{len(local)} layers cannot fill {places}: cut them finer, or take fewer IPUs")
    layer_costs = [check_cost(f"layer {names[i]!r}: costs[{i}]", cost_list[i]) for i in local]
    if not sum(layer_costs):
        raise ValueError(f"costs of all {len(local)} layers are 0: there is nothing to balance; give costs above 0")
    layer_bytes = _checked_bytes(memory, limit, names, local)
    if layer_bytes is not None and rounds > 1:
        raise ValueError(
            f"limit={limit!r} with rounds={rounds}: the limit is kept for one round only; leave one of them"
        )
    ends = _partition(layer_costs, ipus * rounds, layer_bytes, limit)
    if ends is None:
        raise ValueError(
            f"no split of {len(local)} layers over {ipus} IPUs keeps each below limit={limit!r} bytes, neighbours "
            f"together: they take {sum(layer_bytes or ()):g} in all; take more IPUs, or cut the layers finer"
        )
    runs = itertools.pairwise([0, *ends])
    of_local = [run % ipus for run, (start, end) in enumerate(runs) for _ in range(start, end)]
    loads = [sum(c for c, at in zip(layer_costs, of_local, strict=True) if at == ipu) for ipu in range(ipus)]
    ipu_of = dict(zip(local, of_local, strict=True))
    is_model = all(isinstance(layer, Stage) for layer in layers)
    stages = [dataclasses.replace(stage, ipu=ipu_of.get(i, ALL_IPUS)) for i, stage in enumerate(layers) if is_model]
    return LayerPlacement(tuple(map(ipu_of.get, range(len(layers)))), tuple(loads), tuple(stages), names)


def _name_of(layer: Any, number: int) -> str:
    if isinstance(layer, (str, int)):
        return str(layer)
    return getattr(layer, "name", None) or f"layer {number}"


def _one_per_layer(name: str, numbers: Any, layers: int) -> list[Any]:
    if isinstance(numbers, (str, Mapping)) or not isinstance(numbers, Iterable):
        raise ValueError(f"{name}={numbers!r} is not a list of numbers: give one for each layer")
    listed = list(numbers)
    if len(listed) != layers:
        raise ValueError(f"{name} has {len(listed)} numbers for {layers} layers: give one for each layer")
    return listed


def _checked_bytes(
    memory: Iterable[float] | None, limit: float | None, names: tuple[str, ...], local: list[int]
) -> list[float] | None:
    if (memory is None) != (limit is None):
        raise ValueError(f"memory={memory!r} and limit={limit!r}: give the layers' bytes and an IPU's, or neither")
    if memory is None or limit is None:
        return None
    sizes = _one_per_layer("memory", memory, len(names))
    layer_bytes = [check_cost(f"layer {names[i]!r}: memory[{i}]", sizes[i], "size") for i in local]
    ipu_bytes = check_cost("limit", limit, "size")
    for i, size in zip(local, layer_bytes, strict=True):
        if size > ipu_bytes:
            raise ValueError(
                f"layer {names[i]!r} takes {size:g} bytes, more than an IPU holds, limit={ipu_bytes:g}: cut the layer "
                "in two, or make it a concurrent stage"
            )
    return layer_bytes


def _partition(
    costs: Sequence[float], runs: int, memory: Sequence[float] | None, limit: float | None
) -> list[int] | None:
    """Return the ends of the runs, or None if no partition is within the limit."""
    cost_to = [0, *itertools.accumulate(costs)]
    bytes_to = None if memory is None else [0, *itertools.accumulate(memory)]

    def load(start: int, end: int) -> float:
        fits = bytes_to is None or limit is None or bytes_to[end] - bytes_to[start] <= limit
        return cost_to[end] - cost_to[start] if fits else math.inf

    largest, _ = _best(len(costs), runs, load, max)
    if math.isinf(largest):
        return None

    def square(start: int, end: int) -> float:
        one = load(start, end)
        return one * one if one <= largest else math.inf

    return _best(len(costs), runs, square, lambda a, b: a + b)[1]


def _best(
    layers: int, runs: int, value: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the smallest joined value of the runs, and their ends.

    Dynamic programming makes it exact: a best placement of all layers contains a best placement of the first layers.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])] + [(math.inf, [])] * layers
    for run in range(runs):
        before = best
        best = [(math.inf, [])] * (layers + 1)
        for end in range(run + 1, layers - (runs - run - 1) + 1):
            joined, start = min((join(before[start][0], value(start, end)), start) for start in range(run, end))
            best[end] = joined, [*before[start][1], end]
    return best[layers]


def measure_costs(
    stages: Iterable[Stage],
    params: Mapping[str, Params],
    microbatch: Batch,
    state: Mapping[str, Tree] | None = None,
    *,
    mesh: Mesh | None = None,
) -> list[int]:
    """Return, per stage, the FLOPs of F and B for one micro-batch, by tracing the stages. Nothing is run.

    The FLOPs of a concurrent stage are the sum over all IPUs: it is traced as on one IPU, with whole weights.

    Args:
        stages: the model, first stage first; the last returns the loss.
        params: `{group: pytree}`, whole weights or their shapes.
        microbatch: one micro-batch or its shapes. Its leaves have no leading M.
        state: `{group: pytree}`, whole, if stages have state.
        mesh: the mesh whose further axes the stages name, if they do.

    Raises:
        ValueError: there are no stages, an item is not a `Stage`, a group is missing, or the last stage does not return
            a scalar loss.

    >>> first = Stage(lambda w, x, mb: jax.nn.relu(mb @ w), params="first")
    >>> last = Stage(lambda w, x, mb: jnp.mean(x @ w), params="last")
    >>> params = {"first": jnp.ones((8, 8)), "last": jnp.ones((8, 2))}
    >>> costs = measure_costs([first, last], params, jnp.ones((4, 8)))
    >>> balance_layers([first, last], costs, ipus=2).ipus
    (0, 1)
    """
    chain = tuple(stages) if isinstance(stages, Iterable) else (stages,)
    for stage in chain:
        if not isinstance(stage, Stage):
            raise ValueError(f"stages holds {stage!r}: give Stages, the first one first")
    if not chain:
        raise ValueError("stages=() is empty: give at least one Stage")
    _check_groups("params", params, [name for stage in chain for name in stage.groups])
    _check_groups("state", state or {}, [stage.state for stage in chain if stage.state is not None])
    return flops_of_stages(chain, params, microbatch, state, mesh=mesh)


def flops_of_stages(
    chain: tuple[Stage, ...],
    params: Mapping[str, Params],
    microbatch: Batch,
    state: Mapping[str, Tree] | None = None,
    *,
    mesh: Mesh | None = None,
    ipus: int = 1,
) -> list[int]:
    """Count the FLOPs of stages as `measure_costs` does, on a number of IPUs.

    An operation on all IPUs counts the FLOPs of one IPU.
    """
    to_shape = lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    shapes, microbatch_shapes, state_shapes = jax.tree.map(to_shape, (params, microbatch, state or {}))

    def costs() -> list[int]:
        flops: list[int] = []
        x: Tree = NO_MESSAGE
        for i, segment in enumerate(one_by_one(chain)):
            weights = {name: shapes[name] for name in segment.groups}
            states = {name: state_shapes[name] for name in segment.state_groups}
            key = jax.eval_shape(lambda: jax.random.key(0)) if chain[i].random else None
            inputs = MicrobatchInputs(microbatch_shapes, (key,))
            is_floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
            trained = [is_floating(leaf) for leaf in jax.tree.leaves(weights)]
            program = trace_segment(segment, weights, x, inputs, states, last=i + 1 == len(chain), trained=trained)
            flops.append(sum(map(jaxpr_flops, program.jaxprs.values())))
            x = program.y
        return flops

    # the collectives of concurrent stages need the mesh axes
    further = {} if mesh is None else further_axes(mesh)
    names = (REPLICA_AXIS, IPU_AXIS, *further)
    kinds = (AxisType.Auto,) * len(names)
    return traced_on(AbstractMesh((1, ipus, *further.values()), names, axis_types=kinds), costs)


def _check_groups(what: str, groups: Any, names: list[str]) -> None:
    if not isinstance(groups, Mapping):
        raise ValueError(f"{what} is a {type(groups).__name__}: give {{group: pytree}}")
    missing = sorted({*names} - groups.keys())
    if missing:
        raise ValueError(f"{what}: missing {', '.join(map(repr, missing))}, which stages name")

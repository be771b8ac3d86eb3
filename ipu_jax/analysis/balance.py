"""Which layer on which IPU: contiguous runs of layers, so that the IPU with the most to do has as little as can be.

    costs   4  1  1  1  3  2        on 3 IPUs
            -  -------  ----
            4     3      5          largest load 5, mean 4: imbalance 25%

In a pipeline every IPU waits for the one with the most to do, so the largest load is what a step takes. The partition
is exact, by dynamic programming over (layers, runs): first the smallest possible largest run; then, among those, the
least sum of squares, which is the most even.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ipu_jax._checks import check_cost, check_count
from ipu_jax._jaxprs import traced_on
from ipu_jax.analysis.cost import jaxpr_flops
from ipu_jax.devices import IPU_AXIS, REPLICA_AXIS
from ipu_jax.programs.segment import NO_MESSAGE, MicrobatchInputs, one_by_one
from ipu_jax.programs.segment_program import trace_segment
from ipu_jax.stage import Stage


@dataclasses.dataclass(frozen=True)
class LayerPlacement:
    """The IPU of each layer; `str()` prints a table.

    Attributes:
        ipus: per layer its IPU, or None for a concurrent stage.
        loads: per IPU the sum of its layers' costs. What concurrent stages cost is on no IPU's account.
        stages: the stages with their IPUs, where the layers were `Stage`s; else empty.
        names: per layer what the table calls it.
    """

    ipus: tuple[int | None, ...]
    loads: tuple[float, ...]
    stages: tuple[Stage, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def imbalance(self) -> float:
        """Return the largest load over the mean load, less 1: 0 if all IPUs work equally long."""
        return max(self.loads) * len(self.loads) / sum(self.loads) - 1

    def __str__(self) -> str:
        rows = [("IPU", "layers", "cost", "share")]
        for ipu, load in enumerate(self.loads):
            layers = _in_runs([name for name, at in zip(self.names, self.ipus, strict=True) if at == ipu])
            rows.append((str(ipu), layers, f"{load:.4g}", f"{load / sum(self.loads):.1%}"))
        everywhere = [name for name, at in zip(self.names, self.ipus, strict=True) if at is None]
        if everywhere:
            rows.append(("all", _in_runs(everywhere), "-", "-"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, f"imbalance {self.imbalance:.1%}: the largest load over the mean, less 1"])


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
    """Place layers on IPUs, neighbours together, so that the largest load is as small as can be.

    Args:
        model_layers: the layers in their order: `Stage`s, names, `(fn, params)` pairs, anything. Of `Stage`s those that
            are concurrent stay so, and cost no IPU anything; the IPU that the others name is replaced. Local stages
            that share a parameter group must come to stand on one IPU: `Pipeline` refuses them otherwise.
        costs: per layer a number, measured seconds or `measure_costs`; a concurrent stage's is not looked at.
        ipus: IPUs of a replica.
        rounds: how often the layers go round the IPUs, for "looped" schedules: with 2, on 2 IPUs, [0, 1, 0, 1]. The
            largest of the ipus x rounds runs is made as small as can be.
        memory: per layer the bytes that it takes on its IPU.
        limit: bytes that an IPU holds (one of Graphcore's second generation: 900e6); needs `memory`.

    Returns:
        The `LayerPlacement`.

    Raises:
        ValueError: not as many costs as layers, fewer layers than runs, costs that are negative, not finite or all 0, a
            layer above the limit, or no split below it.

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
        raise ValueError(f"model_layers={model_layers!r} are no layers: give them in their order, as in a list")
    layers = list(model_layers)
    ipus, rounds = check_count("ipus", ipus), check_count("rounds", rounds)
    given = _one_a_layer("costs", costs, len(layers))
    local = [i for i, layer in enumerate(layers) if not (isinstance(layer, Stage) and layer.place is None)]
    names = tuple(_name_of(layer, i) for i, layer in enumerate(layers))
    if len(local) < ipus * rounds:
        runs = f"{ipus} IPUs" if rounds == 1 else f"{ipus} IPUs x {rounds} rounds"
        raise ValueError(f"{len(local)} layers cannot fill {runs}: cut them finer, or take fewer IPUs")
    loads_of = [check_cost(f"layer {names[i]!r}: costs[{i}]", given[i]) for i in local]
    if not sum(loads_of):
        raise ValueError(f"costs of all {len(local)} layers are 0: there is nothing to balance; give costs above 0")
    bytes_of = _bytes_of(memory, limit, names, local)
    if bytes_of is not None and rounds > 1:
        raise ValueError(
            f"limit={limit!r} with rounds={rounds}: the limit is kept for one round only; leave one of them"
        )
    ends = _partition(loads_of, ipus * rounds, bytes_of, limit)
    if ends is None:
        raise ValueError(
            f"no split of {len(local)} layers over {ipus} IPUs keeps each below limit={limit!r} bytes, neighbours "
            f"together: they take {sum(bytes_of or ()):g} in all; take more IPUs, or cut the layers finer"
        )
    at: list[int | None] = [None] * len(layers)
    loads = [0.0] * ipus
    for run, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        for k in range(start, end):
            at[local[k]] = run % ipus
            loads[run % ipus] += loads_of[k]
    stages: tuple[Stage, ...] = ()
    if layers and all(isinstance(layer, Stage) for layer in layers):
        stages = tuple(
            stage if ipu is None else dataclasses.replace(stage, ipu=ipu) for stage, ipu in zip(layers, at, strict=True)
        )
    return LayerPlacement(tuple(at), tuple(loads), stages, names)


def _name_of(layer: Any, number: int) -> str:
    if isinstance(layer, (str, int)):
        return str(layer)
    return getattr(layer, "name", None) or f"layer {number}"


def _one_a_layer(name: str, numbers: Any, layers: int) -> list[Any]:
    if isinstance(numbers, (str, Mapping)) or not isinstance(numbers, Iterable):
        raise ValueError(f"{name}={numbers!r} are no numbers: give one for each layer")
    found = list(numbers)
    if len(found) != layers:
        raise ValueError(f"{name} has {len(found)} numbers for {layers} layers: give one for each layer")
    return found


def _bytes_of(
    memory: Iterable[float] | None, limit: float | None, names: tuple[str, ...], local: list[int]
) -> list[float] | None:
    if (memory is None) != (limit is None):
        raise ValueError(f"memory={memory!r} and limit={limit!r}: give the layers' bytes and an IPU's, or neither")
    if memory is None or limit is None:
        return None
    given = _one_a_layer("memory", memory, len(names))
    of_layers = [check_cost(f"layer {names[i]!r}: memory[{i}]", given[i], "size") for i in local]
    most = check_cost("limit", limit, "size")
    for i, size in zip(local, of_layers, strict=True):
        if size > most:
            raise ValueError(
                f"layer {names[i]!r} takes {size:g} bytes, more than an IPU holds, limit={most:g}: cut the layer "
                "in two, or make it a concurrent stage"
            )
    return of_layers


def _partition(
    costs: Sequence[float], runs: int, memory: Sequence[float] | None, limit: float | None
) -> list[int] | None:
    """Return the ends of the runs, or None where the limit allows none."""
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
    """Return the least join of the runs' values, and the runs' ends. Exact: the best of a prefix serves every end."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] + [(math.inf, [])] * layers
    for run in range(runs):
        before = best
        best = [(math.inf, [])] * (layers + 1)
        for end in range(run + 1, layers - (runs - run - 1) + 1):
            found, start = min((join(before[start][0], value(start, end)), start) for start in range(run, end))
            best[end] = found, [*before[start][1], end]
    return best[layers]


def measure_costs(
    stages: Iterable[Stage], params: Mapping[str, Any], microbatch: Any, state: Mapping[str, Any] | None = None
) -> list[int]:
    """Return, per stage, the FLOPs of F and B of one micro-batch, by tracing the chain; nothing is run.

    A concurrent stage's is what all IPUs compute together: it is traced as on one IPU, with whole weights.

    Args:
        stages: the model, first stage first; the last returns the loss.
        params: `{group: pytree}`, whole weights or their shapes.
        microbatch: one micro-batch, or its shapes: leaves without the leading M.
        state: `{group: pytree}`, whole, where stages hold state.

    Raises:
        ValueError: no stages, something else among them, a group that is missing, or no scalar loss of the last stage.

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
    _check_groups("params", params, [stage.params for stage in chain])
    _check_groups("state", state or {}, [stage.state for stage in chain])
    to_shape = lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))  # noqa: E731
    shaped, of_microbatch, of_state = jax.tree.map(to_shape, (params, microbatch, state or {}))

    def costs() -> list[int]:
        found: list[int] = []
        x: Any = NO_MESSAGE
        for i, segment in enumerate(one_by_one(chain)):
            own = {name: shaped[name] for name in segment.groups}
            states = {name: of_state[name] for name in segment.state_groups}
            given = MicrobatchInputs(
                of_microbatch, (jax.eval_shape(lambda: jax.random.key(0)),) if chain[i].random else (None,)
            )
            is_floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
            trained = [is_floating(leaf) for leaf in jax.tree.leaves(own)]
            halves = trace_segment(segment, own, x, given, states, last=i + 1 == len(chain), trained=trained)
            found.append(sum(map(jaxpr_flops, halves.jaxprs.values())))
            x = halves.y
        return found

    # collectives of concurrent stages need an axis to name
    return traced_on(AbstractMesh((1, 1), (REPLICA_AXIS, IPU_AXIS)), costs)


def _check_groups(what: str, given: Any, named: list[str | None]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is a {type(given).__name__}: give {{group: pytree}}")
    missing = sorted({name for name in named if name is not None} - given.keys())
    if missing:
        raise ValueError(f"{what}: missing {', '.join(map(repr, missing))}, which stages name")
